//! The consumer side of a stream.

use std::{
    collections::BTreeMap,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    BufferId, Limit, MAX_BUFFERS, SessionNumber, ended, misuse,
    received::{Held, Received},
};
use crate::{
    channel::{Cancel, Peer, connect},
    driver::Driver,
    error::{Error, ErrorCode, PeerError, Result},
    memory::{Mechanism, Pool, Region, Remains, Selector},
    session::{
        Config,
        link::{Link, check_backend, mismatch, unexpected, violation},
        opening::{self, Connection, DeviceChoice, Offer, acknowledge},
    },
    wire::{self, BufferNumber, BufferTurn, DEFAULT_OBJECT, Hello, Message, Ready, STREAM, Subscribe},
};

/// The consumer side of a stream: a connection to a producer, and the open buffers.
///
/// Buffers stay open between publications, at most `keep` of them. If another buffer is published, the least recently used buffer that is
/// not in use is closed first. A withdrawn buffer is closed in [`Subscriber::receive`] and [`Subscriber::try_receive`], or when it is given
/// back. All buffers are closed when these calls find that the producer is gone, and when the subscriber is dropped.
///
/// [`Error::Misuse`], [`PeerError::Timeout`] while waiting for a buffer, and a failed synchronization leave the session unchanged.
/// Any other error is fatal: the producer receives the error, all buffers that are not in use are closed, and later calls fail.
#[derive(Debug)]
pub struct Subscriber {
    /// Resources of the last opening, released when the buffer is in use.
    remains: Option<Remains>,
    /// All offers that were not withdrawn, opened or not.
    offers: BTreeMap<u64, Offered>,
    buffers: BTreeMap<u64, OpenBuffer>,
    keep: usize,
    /// Counts uses, to find the least recently used buffer.
    uses: u64,
    device: DeviceChoice,
    /// Shared with all memory that the producer frees when the connection closes. `None` after the session is closed.
    connection: Option<Arc<Connection>>,
    link: Link,
    /// The name of the producer's backend.
    backend: String,
    session: SessionNumber,
    timeout: Duration,
}

/// A buffer's offer.
#[derive(Debug)]
struct Offered {
    offer: Arc<Offer>,
    /// The number of publications.
    generation: u64,
}

#[derive(Debug)]
struct OpenBuffer {
    held: Arc<Held>,
    generation: u64,
    /// Whether the consumer has the buffer.
    in_use: bool,
    /// Whether the producer wants the buffer closed.
    withdrawn: bool,
    /// The value of [`Subscriber::uses`] at its last use.
    last_use: u64,
}

impl OpenBuffer {
    /// Whether the caller has dropped the buffer without giving it back.
    fn is_dropped(&mut self) -> bool {
        // `get_mut` rather than the count: it also orders the last user's accesses before ours.
        self.in_use && Arc::get_mut(&mut self.held).is_some()
    }
}

impl Subscriber {
    /// Connects to the producer at `path`, waiting for it up to the timeout, and subscribes. Keeps at most `keep` buffers open.
    ///
    /// A selected device is used if it can reach the offered memory; otherwise the device of the memory is used. The selected device, or
    /// the machine's only one, is activated before the wait.
    ///
    /// # Errors
    /// [`Error::Misuse`] if `keep` is 0; [`PeerError::Mismatch`] if the producer has no stream; the errors of [`connect`] and
    /// [`Device::find`](crate::memory::Device::find); session errors: [`PeerError::Gone`], [`PeerError::Timeout`], [`PeerError::Protocol`].
    pub fn connect(
        driver: &Driver,
        device: Option<Selector>,
        path: &Path,
        keep: usize,
        config: &Config,
    ) -> Result<Self> {
        Self::handshake(driver, device, keep, config, |cancel| {
            connect(path, config.timeout, &config.trust, cancel).map(Link::new)
        })
    }

    /// Like [`Subscriber::connect`], over a connected socket of type `SOCK_SEQPACKET`, such as a socket of a pair.
    ///
    /// # Errors
    /// [`Error::Socket`] for any other descriptor; [`PeerError::NotAllowed`]; the errors of [`Subscriber::connect`].
    pub fn over(
        socket: OwnedFd,
        driver: &Driver,
        device: Option<Selector>,
        keep: usize,
        config: &Config,
    ) -> Result<Self> {
        Self::handshake(driver, device, keep, config, |cancel| {
            let link = Link::over(socket, config, cancel)?;
            config.trust.check(link.peer()).map(|()| link)
        })
    }

    fn handshake(
        driver: &Driver,
        device: Option<Selector>,
        keep: usize,
        config: &Config,
        connect: impl FnOnce(&Cancel) -> Result<Link>,
    ) -> Result<Self> {
        if keep == 0 {
            return Err(misuse("`keep` is 0: a subscriber keeps at least one buffer"));
        }
        let cancel = config.cancellation()?;
        let device = DeviceChoice::new(driver, device, &cancel, &|_| {})?;
        let link = connect(&cancel)?;
        let mut subscriber = Self {
            remains: None,
            offers: BTreeMap::new(),
            buffers: BTreeMap::new(),
            keep,
            uses: 0,
            device,
            connection: Some(Connection::of(&link.channel)),
            link,
            backend: String::new(),
            session: SessionNumber::next(),
            timeout: config.timeout,
        };
        let greeted = subscriber.greet();
        subscriber.guard(greeted)?;
        Ok(subscriber)
    }

    fn greet(&mut self) -> Result<()> {
        self.link.hello(self.device.backend(), &[STREAM])?;
        let (hello, _) = self.link.receive("for the producer's hello")?;
        let Hello { capabilities, backend, .. } = self.link.check_hello(hello)?;
        self.backend = backend;
        if !capabilities.iter().any(|capability| capability == STREAM) {
            return Err(mismatch(ErrorCode::Object, "the producer has no stream to subscribe to"));
        }
        self.link.send(&Message::Subscribe(Subscribe { keep: self.keep as u64 }), &[])
    }

    /// The producer's process.
    pub fn peer(&self) -> Peer {
        self.link.peer()
    }

    /// The number of open buffers.
    pub fn held(&self) -> usize {
        self.buffers.len()
    }

    /// Waits for the next published buffer, and opens it if it is new. The producer's work on it has finished. Buffers arrive in the
    /// order of their publication. Blocks up to the timeout.
    ///
    /// # Errors
    /// [`Error::Misuse`] if all kept buffers are in use: nothing is then read from the producer;
    /// [`PeerError::Timeout`] if no buffer arrives within the timeout; [`PeerError::Gone`] if the producer is gone or has closed
    /// the session; [`PeerError::Mismatch`], [`DeviceError::NoPeerAccess`](crate::error::DeviceError::NoPeerAccess) and
    /// [`Error::Driver`] if a buffer can't be opened; session errors.
    ///
    /// Driver calls: none for an open buffer. A new buffer may first close another; for opening see
    /// [`Imported::open`](crate::memory::Imported::open).
    pub fn receive(&mut self) -> Result<Received> {
        let waited = self.timeout;
        let timeout = Error::Peer(PeerError::Timeout { purpose: FOR_A_BUFFER, waited });
        self.receive_within(waited)?.ok_or(timeout)
    }

    /// Like [`Subscriber::receive`], without waiting for a publication. `None` if no buffer is ready. If the producer has begun to send a new
    /// buffer, waits for the rest, up to the timeout in all.
    ///
    /// # Errors
    /// The errors of [`Subscriber::receive`].
    pub fn try_receive(&mut self) -> Result<Option<Received>> {
        self.receive_within(Duration::ZERO)
    }

    /// Like [`Subscriber::receive`]. `None` if no buffer is ready within `timeout`.
    fn receive_within(&mut self, timeout: Duration) -> Result<Option<Received>> {
        self.remains = None;
        self.return_dropped()?;
        if self.buffers.len() >= self.keep && self.buffers.values().all(|open| open.in_use) {
            let all = self.buffers.len();
            return Err(misuse(format!(
                "all {all} buffers that this subscriber keeps are in use: give one back first"
            )));
        }
        let mut limit = Limit::after(timeout);
        while let Some(deadline) = limit.next() {
            let (message, fds) = match self.link.receive_by(deadline, FOR_A_BUFFER) {
                Err(Error::Peer(PeerError::Timeout { .. })) => return Ok(None),
                received => self.guard(received)?,
            };
            let received = match message {
                Message::Ready(ready) => self.begin_use(&ready, fds).map(Some),
                Message::Busy(_) => Ok(None),
                Message::Offer(offer) => self.add_offer(*offer).map(|()| None),
                Message::Withdraw(BufferNumber { buffer }) => self.withdraw(buffer).map(|()| None),
                other => Err(unexpected(&other, "ready, offer or withdraw")),
            };
            match self.guard(received)? {
                received @ Some(_) => return Ok(received),
                // The withdrawn buffer may have been dropped without being given back.
                None => self.return_dropped()?,
            }
        }
        Ok(None)
    }

    fn add_offer(&mut self, offer: wire::Offer) -> Result<()> {
        check_backend(&self.backend, self.device.backend().as_str())?;
        let offer = Offer::read(offer, DEFAULT_OBJECT)?;
        let number = self.check(&offer)?;
        self.offers.insert(number, Offered { offer: Arc::new(offer), generation: 0 });
        Ok(())
    }

    /// Starts the use of a published buffer, and opens it if it is not open.
    fn begin_use(&mut self, ready: &Ready, fds: Vec<OwnedFd>) -> Result<Received> {
        let Ready { buffer, generation, ref sizes } = *ready;
        let Some(offered) = self.offers.get_mut(&buffer) else {
            return Err(violation(format!("buffer {buffer} is ready, but was not offered")));
        };
        if offered.generation.checked_add(1) != Some(generation) {
            let last = offered.generation;
            return Err(violation(format!(
                "generation {generation} of buffer {buffer} is ready after generation {last}"
            )));
        }
        let offer = Arc::clone(&offered.offer);
        offered.generation = generation;
        let Some(open) = self.buffers.get_mut(&buffer) else {
            return self.open(&offer, ready, fds);
        };
        if open.in_use {
            return Err(violation(format!("buffer {buffer} is ready, but is still in use")));
        }
        if !sizes.is_empty() {
            return Err(violation(format!("buffer {buffer} is ready with segments, but is already open")));
        }
        self.uses += 1;
        (open.generation, open.in_use, open.last_use) = (generation, true, self.uses);
        Ok(Received { held: Arc::clone(&open.held), generation, usable_since: Instant::now() })
    }

    /// Opens a published buffer.
    fn open(&mut self, offer: &Offer, ready: &Ready, fds: Vec<OwnedFd>) -> Result<Received> {
        let Ready { buffer: number, generation, ref sizes } = *ready;
        let mechanism = offer.memory.mechanism();
        if sizes.is_empty() == (mechanism == Mechanism::Vmm) {
            let count = sizes.len();
            return Err(violation(format!("buffer {number}, shared by {mechanism}, is ready with {count} segments")));
        }
        let link = &mut self.link;
        let device = self.device.for_memory_of(&offer.memory.device, &mut || link.busy(), &|_| {})?;
        // Before a buffer is closed: the producer does not know yet that the pool may close with it.
        let known = offer.memory.pool().and_then(|number| self.pool(number));
        self.make_room()?;
        let range = 0..offer.memory.mapped_size;
        let opened = opening::open(&mut self.link, &device, offer, &range, known, (sizes, fds))?;
        self.remains = Some(opened.remains);
        let usable_since = Instant::now();
        acknowledge(&mut self.link, opened.unacknowledged.unwrap_or(0))?;
        let memory = opened.memory;
        let pool = opened.pool;
        let connection = self.connection.clone().filter(|_| memory.is_borrowed());
        let id = BufferId { session: self.session, number };
        let held = Arc::new(Held { id, memory, array: offer.array.clone(), pool, _connection: connection });
        self.uses += 1;
        let open =
            OpenBuffer { held: Arc::clone(&held), generation, in_use: true, withdrawn: false, last_use: self.uses };
        self.buffers.insert(number, open);
        Ok(Received { held, generation, usable_since })
    }

    /// Checks an offer of a stream. Returns the buffer's number.
    fn check(&self, offer: &Offer) -> Result<u64> {
        let Some(number) = offer.buffer else {
            return Err(violation("an offer in a stream lacks the buffer's number"));
        };
        // A withdrawn buffer may still be in use.
        if self.offers.contains_key(&number) || self.buffers.contains_key(&number) {
            return Err(violation(format!("buffer {number} is offered twice")));
        }
        if self.offers.len() >= MAX_BUFFERS {
            return Err(violation(format!(
                "buffer {number} is offered, but a stream has at most {MAX_BUFFERS} buffers"
            )));
        }
        offer.part(&(0..offer.memory.mapped_size))?;
        Ok(number)
    }

    /// Returns the pool with a number, if a buffer of it is open.
    fn pool(&self, number: u64) -> Option<Arc<Pool>> {
        // Withdrawn buffers don't count: the producer resends the pool, because it can't know whether they are closed.
        let counted = self.buffers.values().filter(|open| !open.withdrawn);
        let mut pools = counted.filter_map(|open| open.held.pool.as_ref());
        pools.find(|(of, _)| *of == number).map(|(_, pool)| Arc::clone(pool))
    }

    /// If `keep` buffers are open, closes the least recently used before another is opened.
    ///
    /// `gone` can't cross a `ready` for the closed buffer: it is sent before `received`, for which the producer waits before it sends
    /// anything else.
    fn make_room(&mut self) -> Result<()> {
        if self.buffers.len() < self.keep {
            return Ok(());
        }
        let unused = self.buffers.iter().filter(|(_, open)| !open.in_use);
        match unused.min_by_key(|(_, open)| open.last_use).map(|(number, _)| *number) {
            Some(number) => self.discard(number),
            None => Ok(()),
        }
    }

    /// Closes a buffer, then notifies the producer.
    fn discard(&mut self, number: u64) -> Result<()> {
        self.buffers.remove(&number);
        self.link.send(&Message::Gone(BufferNumber { buffer: number }), &[])
    }

    /// Closes a withdrawn buffer, or marks it to be closed when it is given back.
    fn withdraw(&mut self, number: u64) -> Result<()> {
        if self.offers.remove(&number).is_none() {
            return Err(violation(format!("buffer {number} is withdrawn, but is not in this stream")));
        }
        match self.buffers.get_mut(&number) {
            Some(open) if open.in_use => {
                open.withdrawn = true;
                Ok(())
            }
            Some(_) => self.discard(number),
            None => Ok(()),
        }
    }

    /// Gives a buffer back: waits until the GPU's work on it has finished, then notifies the producer.
    ///
    /// # Errors
    /// [`Error::Misuse`] for a buffer of another session; [`Error::Driver`] if the synchronization fails: the next call retries it;
    /// session errors, which are fatal.
    ///
    /// Driver call: `cuCtxSynchronize`.
    #[doc(alias = "cuCtxSynchronize")]
    pub fn give_back(&mut self, received: Received) -> Result<()> {
        self.check_session()?;
        let number = received.held.id.number;
        if !self.buffers.get(&number).is_some_and(|open| Arc::ptr_eq(&open.held, &received.held)) {
            return Err(misuse(format!("{received:?} does not belong to this session")));
        }
        drop(received);
        self.end_use(number)?;
        self.remains = None;
        Ok(())
    }

    /// Gives back buffers that the caller dropped.
    fn return_dropped(&mut self) -> Result<()> {
        self.check_session()?;
        let dropped = |(number, open): (&u64, &mut OpenBuffer)| open.is_dropped().then_some(*number);
        while let Some(number) = self.buffers.iter_mut().find_map(dropped) {
            self.end_use(number)?;
        }
        Ok(())
    }

    /// Gives a buffer back when all work on it has finished, and closes it if it was withdrawn.
    fn end_use(&mut self, number: u64) -> Result<()> {
        let Some(open) = self.buffers.get_mut(&number) else { return Ok(()) };
        open.held.memory.synchronize()?;
        self.uses += 1;
        (open.in_use, open.last_use) = (false, self.uses);
        let generation = open.generation;
        let withdrawn = open.withdrawn;
        let done = self.link.send(&Message::Done(BufferTurn { buffer: number, generation }), &[]);
        let sent = match withdrawn {
            true => done.and_then(|()| self.discard(number)),
            false => done,
        };
        self.guard(sent)
    }

    /// Ends the session, and closes all buffers that are not in use.
    pub fn close(self) {}

    fn check_session(&self) -> Result<()> {
        if self.connection.is_some() { Ok(()) } else { Err(ended()) }
    }

    /// Passes a result through. If it is an error, reports it to the producer and closes the session.
    fn guard<T>(&mut self, result: Result<T>) -> Result<T> {
        result.inspect_err(|error| {
            self.link.report(error);
            self.end();
        })
    }

    /// Closes all buffers that are not in use. The connection closes when the last borrowed memory is dropped.
    fn end(&mut self) {
        for open in self.buffers.values_mut() {
            // Unmapping does not always wait for the GPU's work.
            if open.is_dropped()
                && let Err(error) = open.held.memory.synchronize()
            {
                tracing::error!(%error, "closing a buffer although GPU work on it may not be finished");
            }
        }
        self.remains = None;
        self.offers.clear();
        self.buffers.clear();
        self.connection = None;
    }
}

const FOR_A_BUFFER: &str = "for a buffer";

impl AsFd for Subscriber {
    /// Readable when the producer has sent a message or is gone. Call [`Subscriber::try_receive`] then.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.link.channel.as_fd()
    }
}

impl Drop for Subscriber {
    fn drop(&mut self) {
        self.end();
    }
}
