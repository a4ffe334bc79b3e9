//! A subscriber of a stream.

mod connection;
mod reader;

use std::{
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::Path,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use nix::sys::{
    epoll::{Epoll, EpollEvent, EpollFlags},
    eventfd::EventFd,
};

pub(super) use self::connection::Connection;
use self::reader::Reader;
use super::{
    connection::Identity,
    format::{self, Format},
    options::SubscribeOptions,
    sample::Sample,
    turns::{Turns, check_device},
};
use crate::{
    channel::{Cancel, Peer, connect, deadline_after},
    driver::{Access, Driver, Stream},
    error::{Error, ErrorCode, PeerError, Result},
    memory::{Device, Imported, Mechanism, Region, Selector},
    session::{
        Config,
        link::{Link, check_backend, mismatch, unexpected, violation},
        opening::{self, DeviceChoice, Offer, acknowledge},
        order::Order,
    },
    sys::{epoll, eventfd, fork::ProcessIdentity, try_lock},
    wire::{self, DEFAULT_OBJECT, Hello, Leave, Message, STREAM},
};

const FOR_A_BUFFER: &str = "for a buffer";

/// A join takes at most this many timeouts.
const JOIN: u32 = 10;

/// How often a waiting thread looks whether it is its turn to receive.
const TURN: Duration = Duration::from_millis(1);

/// Receives buffers of a [`Publisher`](super::Publisher).
///
/// All methods may be called from any thread. A call reads the connection itself. The library's thread only releases streams that wait for a
/// publisher which is dead or late.
#[derive(Debug)]
pub struct Subscriber {
    connection: Arc<Connection>,
    /// Boxed: the reader is large, and a subscriber is moved.
    reader: Box<Mutex<Reader>>,
    /// Readable with the socket, with `written`, or when the publisher's process has exited: for the program's polls.
    watch: Epoll,
    /// Readable once a buffer is written that [`Subscriber::try_receive`] found unwritten.
    written: Arc<EventFd>,
    /// The channel's.
    cancel: Cancel,
    publisher: Peer,
    stream: wire::Stream,
}

/// The result of a receive call.
#[derive(Debug)]
#[non_exhaustive]
pub enum Received {
    /// A buffer.
    Sample(Sample),
    /// The publisher has finished, and this subscriber has received the last buffer that it gets.
    Ended,
    /// The publisher's process died, or it closed the connection without finishing the stream.
    Crashed(Peer),
}

impl Received {
    /// The buffer, if it is one.
    pub fn sample(self) -> Option<Sample> {
        match self {
            Self::Sample(sample) => Some(sample),
            Self::Ended | Self::Crashed(_) => None,
        }
    }
}

impl Subscriber {
    /// Connects to the publisher at `path`, waiting for it up to the configuration's timeout, and maps its pool.
    ///
    /// A selected device is used if it can reach the pool; otherwise the device of the pool is used. The selected device, or the
    /// machine's only one, is activated before the wait.
    ///
    /// # Errors
    /// [`Error::Misuse`] for options outside their limits; [`PeerError::Reported`] with the publisher's reason: `full` if its pool has
    /// too few buffers for this subscriber, `access` if it does not allow the policy; [`PeerError::Mismatch`] if the peer has no stream or
    /// the pool can't be used; the errors of [`connect`] and [`Device::find`](crate::memory::Device::find); session errors:
    /// [`PeerError::Gone`], [`PeerError::Timeout`], [`PeerError::TurnTooLong`] after ten timeouts in all, [`PeerError::Protocol`].
    ///
    /// Driver calls: those of [`Imported::open`].
    pub fn connect(
        driver: &Driver,
        device: Option<Selector>,
        path: &Path,
        options: &SubscribeOptions,
        config: &Config,
    ) -> Result<Self> {
        let cancel = config.cancellation()?;
        let device = DeviceChoice::new(driver, device, &cancel, &|_| {})?;
        let link = Link::new(connect(path, config.timeout, &config.trust, &cancel)?);
        let identity = Identity::of(&link.channel)?;
        Self::join(link, identity, device, options)
    }

    /// Like [`Subscriber::connect`], over a connected socket of type `SOCK_SEQPACKET`.
    ///
    /// # Errors
    /// [`Error::Socket`] for any other descriptor; [`PeerError::NotAllowed`]; the errors of [`Subscriber::connect`].
    pub fn over(
        socket: OwnedFd,
        driver: &Driver,
        device: Option<Selector>,
        options: &SubscribeOptions,
        config: &Config,
    ) -> Result<Self> {
        let identity = Identity::of(&socket)?;
        Self::over_as(socket, identity, driver, device, options, config)
    }

    /// Like [`Subscriber::over`], for a publisher that another process has introduced: the socket does not show its identity.
    ///
    /// # Errors
    /// The errors of [`Subscriber::over`].
    pub(crate) fn over_as(
        socket: OwnedFd,
        identity: Identity,
        driver: &Driver,
        device: Option<Selector>,
        options: &SubscribeOptions,
        config: &Config,
    ) -> Result<Self> {
        let cancel = config.cancellation()?;
        let device = DeviceChoice::new(driver, device, &cancel, &|_| {})?;
        let link = Link::over(socket, config, &cancel)?;
        config.trust.check(identity.peer)?;
        Self::join(link, identity, device, options)
    }

    fn join(mut link: Link, identity: Identity, mut device: DeviceChoice, options: &SubscribeOptions) -> Result<Self> {
        // `busy` extends each wait, but not the whole join.
        link.begin_turn(JOIN * link.channel.timeout());
        let joined = Self::map(&mut link, &mut device, options);
        link.end_turn();
        let (stream, turns, memory, format) = match joined {
            Ok(joined) => joined,
            Err(error) => {
                link.report(&error);
                link.channel.shut_down_writing();
                return Err(error);
            }
        };
        let held = (0..options.held).map(|_| AtomicU64::new(0)).collect();
        let creator = ProcessIdentity::current();
        let connection = Arc::new(Connection { memory, turns, socket: link.channel.socket(), held, creator });
        let mut channel = link.channel;
        let Identity { peer: publisher, process, .. } = identity;
        let watching = |error| Error::system("watch a publisher", error);
        let written = Arc::new(eventfd().map_err(watching)?);
        let watch = watch(&connection.socket, process.as_ref(), &written).map_err(watching)?;
        if let Some(turns) = &connection.turns {
            let process = process.as_ref().map(OwnedFd::try_clone).transpose().map_err(watching)?;
            let socket = connection.socket.try_clone().map_err(watching)?;
            process.into_iter().chain([socket.into()]).try_for_each(|peer| turns.release_with(peer))?;
        }
        channel.watch_process(process);
        let cancel = channel.cancel().clone();
        let reader =
            Box::new(Mutex::new(Reader { channel, format, last: 0, size: stream.size, unwritten: None, end: None }));
        Ok(Self { connection, reader, watch, written, cancel, publisher, stream })
    }

    /// Subscribes, and maps the pool.
    fn map(
        link: &mut Link,
        device: &mut DeviceChoice,
        options: &SubscribeOptions,
    ) -> Result<(wire::Stream, Option<Turns>, Imported, Arc<Format>)> {
        let subscribe = options.to_wire()?;
        link.hello(device.backend(), &[STREAM])?;
        let (hello, _) = link.receive("for the publisher's hello")?;
        let Hello { capabilities, backend, .. } = link.check_hello(hello)?;
        if !capabilities.iter().any(|capability| capability == STREAM) {
            return Err(mismatch(ErrorCode::Object, "the producer has no stream to subscribe to"));
        }
        link.send(&Message::Subscribe(subscribe), &[])?;
        let (stream, words) = match link.receive("for the stream")? {
            (Message::Stream(stream), fds) => (stream, fds.into_iter().next()),
            (other, _) => return Err(unexpected(&other, "stream")),
        };
        let offer = match link.receive("for the offer of the pool")? {
            (Message::Offer(offer), _) => {
                check_backend(&backend, device.backend().as_str())?;
                Offer::read(*offer, DEFAULT_OBJECT)?
            }
            (other, _) => return Err(unexpected(&other, "offer")),
        };
        if offer.memory.mechanism() != Mechanism::Vmm || offer.access != Access::ReadOnly {
            return Err(violation("the pool of a stream is offered by another mechanism than vmm, or with rw"));
        }
        let range = 0..offer.memory.mapped_size;
        offer.part(&range)?;
        let chosen = device.for_memory_of(&offer.memory.device, &mut || link.busy(), &|_| {})?;
        let turns = words.map(|words| Turns::open(&words, &chosen)).transpose()?;
        let opened = opening::open(link, &chosen, &offer, &range, None)?;
        acknowledge(link, opened.unacknowledged.unwrap_or(0))?;
        // Ten times slower than an unmapping of the segments: after the acknowledgement, because the publisher need not wait for it.
        drop(opened.remains);
        // From now on, this side receives all publications.
        match link.receive("for the format of the buffers")? {
            (Message::Format(format), fds) => Ok((stream, turns, opened.memory, format::read(format, fds)?)),
            (other, _) => Err(unexpected(&other, "format")),
        }
    }

    /// Waits for the next buffer at most this long, and until the publisher's GPU has written it. Buffers arrive in the order of
    /// publication.
    ///
    /// # Errors
    /// [`PeerError::Timeout`] after the limit; [`PeerError::Reported`] if the publisher has ended this subscription (`timeout`: this
    /// subscriber kept a buffer for too long); [`PeerError::Protocol`]; [`Error::Interrupted`]; [`Error::System`];
    /// [`Error::Misuse`] after an earlier error other than a timeout or an interruption.
    pub fn receive(&self, limit: Duration) -> Result<Received> {
        self.receive_by(limit, None)
    }

    /// Like [`Subscriber::receive`], for work on a stream: does not wait until the buffer is written. The stream waits instead, at most
    /// `limit` long from now. If the publisher's process ends or is late, the stream is released, and [`Sample::completion`] reports
    /// [`Completion::Lost`](crate::session::order::Completion::Lost). Use the sample's address on this stream only. Dropping the sample gives it back behind the work that the
    /// stream then has.
    ///
    /// If streams can't order the work ([`Subscriber::order`]), the call waits until the buffer is written, and dropping the sample waits
    /// for the stream. The first call takes about a millisecond longer.
    ///
    /// # Errors
    /// [`Error::Misuse`] for a stream of another device, for the per-thread default stream, and while it is being captured;
    /// [`PeerError::WorkLost`] once the publisher was late: subscribe again; the errors of [`Subscriber::receive`].
    ///
    /// Driver calls: `cuStreamIsCapturing`, `cuStreamBatchMemOp`; at the first call `cuMemHostRegister`.
    #[doc(alias("cuStreamBatchMemOp", "cuStreamWaitValue64"))]
    pub fn receive_on(&self, stream: &Stream, limit: Duration) -> Result<Received> {
        check_device(stream, self.device())?;
        stream.check_shared()?;
        stream.check()?;
        self.receive_by(limit, Some(stream))
    }

    /// Whether streams order the buffers of [`Subscriber::receive_on`], or why not. The first call tests it, in about a millisecond.
    ///
    /// Driver calls: `cuMemHostRegister`, `cuStreamCreate`, `cuStreamBatchMemOp`.
    pub fn order(&self) -> Order {
        match &self.connection.turns {
            Some(turns) => turns.order(),
            None => Order::Cpu { reason: "the publisher's streams can't store words".to_owned() },
        }
    }

    fn receive_by(&self, limit: Duration, stream: Option<&Stream>) -> Result<Received> {
        self.connection.creator.check()?;
        let deadline = deadline_after(limit);
        let timeout = || Error::Peer(PeerError::Timeout { purpose: FOR_A_BUFFER, waited: limit });
        let mut reader = loop {
            match try_lock(&self.reader) {
                Some(reader) => break reader,
                None if Instant::now() >= deadline => return Err(timeout()),
                // Another thread receives.
                None => self.cancel.pause(TURN)?,
            }
        };
        let on = stream.map(|stream| (stream, limit));
        self.next(&mut reader, deadline, on)?.ok_or_else(timeout)
    }

    /// Like [`Subscriber::receive`], without waiting. `None` if no buffer has arrived or is written, or another thread receives.
    ///
    /// # Errors
    /// The other errors of [`Subscriber::receive`].
    pub fn try_receive(&self) -> Result<Option<Received>> {
        self.connection.creator.check()?;
        match try_lock(&self.reader) {
            Some(mut reader) => {
                if reader.unwritten.is_some() {
                    let _ = self.written.read();
                }
                let received = self.next(&mut reader, Instant::now(), None)?;
                if let (Some(Sample { turn: Some(turn), .. }), Some(turns)) =
                    (&reader.unwritten, &self.connection.turns)
                {
                    let written = Arc::clone(&self.written);
                    turns.notify(*turn, move || {
                        let _ = written.write(1);
                    });
                }
                Ok(received)
            }
            None => Ok(None),
        }
    }

    /// The publisher's process.
    pub fn peer(&self) -> Peer {
        self.publisher
    }

    /// The device on which this process uses the pool.
    pub fn device(&self) -> &Device {
        self.connection.memory.device()
    }

    /// Identifies the publisher's run.
    pub fn epoch(&self) -> u64 {
        self.stream.epoch
    }

    /// The size of each buffer in bytes. `None` if the sizes vary.
    pub fn buffer_size(&self) -> Option<u64> {
        self.stream.size
    }

    /// The number of samples that exist.
    pub fn held(&self) -> usize {
        self.connection.held.iter().filter(|entry| entry.load(Ordering::Acquire) != 0).count()
    }
}

/// An epoll instance that is readable when the socket is, or when the process has exited.
fn watch(socket: &UnixStream, process: Option<&OwnedFd>, written: &EventFd) -> io::Result<Epoll> {
    let watch = epoll()?;
    let readable = || EpollEvent::new(EpollFlags::EPOLLIN, 0);
    watch.add(socket, readable())?;
    watch.add(written, readable())?;
    process.map_or(Ok(()), |process| watch.add(process, readable()))?;
    Ok(watch)
}

impl AsFd for Subscriber {
    /// Readable when a record has arrived, or the publisher is gone. Call [`Subscriber::try_receive`] then.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.watch.0.as_fd()
    }
}

impl Drop for Subscriber {
    fn drop(&mut self) {
        if self.connection.is_own() {
            self.reader.get_mut().unwrap_or_else(PoisonError::into_inner).discard();
            let held = self.connection.held.iter().map(|entry| entry.load(Ordering::Acquire));
            self.connection.send(&Message::Leave(Leave { held: held.filter(|number| *number != 0).collect() }));
        }
    }
}
