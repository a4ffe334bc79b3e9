//! The producer side of a stream.

use std::{
    collections::{BTreeMap, VecDeque},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
    time::Duration,
};

use super::{BufferId, Limit, MAX_BUFFERS, SessionNumber, ended, misuse};
use crate::{
    array::ArrayDescriptor,
    channel::{Listener, Peer, deadline_after},
    driver::{Access, Backend, Driver},
    error::{Error, PeerError, Result},
    memory::{Chunk, Region, Shared},
    session::{
        Config,
        acceptor::{Acceptor, Arrival, FirstRequest, Next, SessionKind},
        link::{Link, unexpected, violation},
        opening::Offer,
    },
    wire::{BufferNumber, BufferTurn, DEFAULT_OBJECT, MAX_FDS, Message, PoolNumber, Ready, Segments},
};

/// The producer side of a stream: a connection to one consumer. For several consumers, create several publishers; they may share
/// memory.
///
/// A published buffer is out until the consumer gives it back, and can then be published again. Only [`Publisher::take_back`],
/// [`Publisher::try_take_back`], [`Publisher::withdraw`] and the first publication of a buffer read the consumer's messages.
///
/// [`Error::Misuse`], [`PeerError::Timeout`] of [`Publisher::take_back`] or [`Publisher::withdraw`], and a failed synchronization leave
/// the session unchanged. Any other session error is fatal: the consumer receives the error, and later calls fail.
///
/// Dropping the publisher closes the session. If the consumer has memory of a pool or legacy memory open, the drop waits up to the timeout
/// for it to close the memory. Memory still open after that is not freed before this process exits.
#[derive(Debug)]
pub struct Publisher {
    link: Link,
    session: SessionNumber,
    backend: Backend,
    timeout: Duration,
    /// The number of buffers that the consumer keeps open.
    keep: u64,
    /// By number.
    buffers: BTreeMap<u64, Buffer>,
    next: u64,
    /// Buffers that the consumer gave back, until `take_back` returns them.
    returned: VecDeque<u64>,
    ended: bool,
}

/// A buffer, with the records that open it.
#[derive(Debug)]
struct Buffer {
    memory: Arc<Shared>,
    /// The segments sent with `ready`.
    first: Vec<Arc<Chunk>>,
    /// The segments after those.
    records: Vec<Record>,
    generation: u64,
    /// Whether the consumer has the buffer open.
    held: bool,
    /// Whether the consumer has the buffer.
    out: bool,
    /// Whether `withdraw` was sent.
    withdrawn: bool,
}

/// A `segments` message with its descriptors.
#[derive(Debug)]
struct Record {
    message: Message,
    chunks: Vec<Arc<Chunk>>,
}

impl Buffer {
    /// Whether the consumer must close the buffer before it is freed.
    fn is_borrowed(&self) -> bool {
        self.held && !self.memory.is_protected()
    }

    fn pool(&self) -> Option<u64> {
        self.memory.pool().map(|pool| pool.number())
    }
}

impl Publisher {
    /// Waits until a trusted consumer connects to the listener and subscribes. Refuses other peers; none delays a consumer. Blocks up to
    /// the timeout.
    ///
    /// # Errors
    /// [`PeerError::NoConsumer`] if no consumer subscribes within the timeout; [`Error::Interrupted`]; [`Error::System`].
    pub fn accept(listener: &Listener, driver: &Driver, config: &Config) -> Result<Self> {
        let cancel = config.cancellation()?;
        let mut acceptor = Acceptor::new(SessionKind::Stream, driver.backend(), config, &cancel)?;
        let deadline = deadline_after(config.timeout);
        match acceptor.next(listener, None, deadline)? {
            Next::Arrived(arrival) => Self::with(*arrival, driver, config),
            Next::Woken | Next::TimedOut => Err(Error::Peer(PeerError::NoConsumer { waited: config.timeout })),
        }
    }

    /// Like [`Publisher::accept`], over a connected socket of type `SOCK_SEQPACKET`, such as a socket of a pair, or a socket that the
    /// caller accepted.
    ///
    /// # Errors
    /// [`Error::Socket`] for any other descriptor; [`PeerError::NotAllowed`], [`PeerError::Gone`], [`PeerError::Timeout`],
    /// [`PeerError::Mismatch`] and [`PeerError::Protocol`] if its peer does not subscribe; [`Error::Interrupted`];
    /// [`Error::System`].
    pub fn over(socket: OwnedFd, driver: &Driver, config: &Config) -> Result<Self> {
        let cancel = config.cancellation()?;
        let arrival = Acceptor::new(SessionKind::Stream, driver.backend(), config, &cancel)?.accept_one(socket)?;
        Self::with(arrival, driver, config)
    }

    fn with(arrival: Arrival, driver: &Driver, config: &Config) -> Result<Self> {
        let Arrival { link, request, .. } = arrival;
        let FirstRequest::Stream(keep) = request else { return Err(violation("expected subscribe, got request")) };
        Ok(Self {
            link,
            session: SessionNumber::next(),
            backend: driver.backend(),
            timeout: config.timeout,
            keep,
            buffers: BTreeMap::new(),
            next: 0,
            returned: VecDeque::new(),
            ended: false,
        })
    }

    /// The consumer's process.
    pub fn peer(&self) -> Peer {
        self.link.peer()
    }

    /// The largest number of buffers that the consumer keeps open. With more buffers in rotation, some are reopened for each publication.
    pub fn keeps(&self) -> u64 {
        self.keep
    }

    /// Adds a buffer, and sends its offer, which the consumer can read before the first publication. At most [`MAX_BUFFERS`] at a time.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`](crate::error::MemoryError::OutOfRange) or
    /// [`MemoryError::Array`](crate::error::MemoryError::Array) if the array is not inside the memory; [`Error::Misuse`] if the memory
    /// must be sealed first, if `access` is read-write for sealed memory, for memory of another backend, and for a buffer beyond the
    /// limit; [`Error::Driver`]; session errors, which are fatal.
    ///
    /// Driver calls: `cuMemPoolExportPointer`, `cuIpcGetMemHandle`.
    #[doc(alias("cuMemPoolExportPointer", "cuIpcGetMemHandle"))]
    pub fn add(&mut self, memory: &Arc<Shared>, array: Option<ArrayDescriptor>, access: Access) -> Result<BufferId> {
        if self.ended {
            return Err(ended());
        }
        if self.buffers.len() >= MAX_BUFFERS {
            return Err(misuse(format!("a stream has at most {MAX_BUFFERS} buffers: withdraw one first")));
        }
        let backend = memory.device().backend();
        if backend != self.backend {
            return Err(misuse(format!("memory on backend {backend} can't be added to a stream on {}", self.backend)));
        }
        if access == Access::ReadWrite && memory.access() == Access::ReadOnly {
            return Err(misuse("sealed memory can only be published read-only"));
        }
        let description = memory.describe()?;
        if let Some(array) = &array {
            array.check(description.size)?;
        }
        let chunks = memory.chunks(0..memory.size())?;
        if description.segments() != chunks.as_ref().map_or(0, |(part, _)| part.segments) {
            return Err(misuse("the memory must be sealed before it is published: call Shared::seal"));
        }
        let (part, chunks) = chunks.map_or((None, Vec::new()), |(part, chunks)| (Some(part), chunks));
        let number = self.next;
        let object = DEFAULT_OBJECT.to_owned();
        let offer = Offer { object, memory: description, array, access, part, check: None, buffer: Some(number) };
        let sent = self.link.send(&Message::Offer(Box::new((&offer).into())), &[]);
        self.guard(sent)?;
        let (first, behind) = chunks.split_at(chunks.len().min(MAX_FDS));
        let records = records(behind, first.len() as u64);
        let memory = Arc::clone(memory);
        let first = first.to_vec();
        let buffer = Buffer { memory, first, records, generation: 0, held: false, out: false, withdrawn: false };
        self.next += 1;
        self.buffers.insert(number, buffer);
        Ok(BufferId { session: self.session, number })
    }

    /// Waits until the GPU's work on a buffer has finished, then gives the buffer to the consumer. If the consumer has the buffer open, one
    /// small record is sent. Otherwise sends everything that opens the buffer, and waits until the consumer has opened it. Returns the
    /// generation, which counts the buffer's publications from 1. The wait may also receive buffers that the consumer gives back: call
    /// [`Publisher::try_take_back`] before waiting for the publisher to be readable.
    ///
    /// A consumer opens a new buffer in its next receive call. If it does not call within the timeout, or all of its buffers are in use,
    /// the publication times out, which is fatal: publish a new buffer only to a waiting consumer.
    ///
    /// # Errors
    /// [`Error::Misuse`] for a buffer that is out, withdrawn or unknown; [`Error::Driver`] if the synchronization fails; session
    /// errors, which are fatal.
    ///
    /// Driver call: `cuCtxSynchronize`.
    #[doc(alias = "cuCtxSynchronize")]
    pub fn publish(&mut self, id: BufferId) -> Result<u64> {
        self.idle(id)?.memory.synchronize()?;
        self.announce(id)
    }

    /// Like [`Publisher::publish`], without the synchronization: the caller has already synchronized all GPU work on the buffer, for
    /// example by synchronizing its own stream.
    ///
    /// # Errors
    /// The errors of [`Publisher::publish`]. No driver call for an open buffer.
    pub fn announce(&mut self, id: BufferId) -> Result<u64> {
        let number = id.number;
        let buffer = self.idle(id)?;
        let generation = buffer.generation + 1;
        let held = buffer.held;
        let sent = match held {
            true => self.link.send(&ready(number, generation, &[]), &[]),
            false => self.send_new(number, generation),
        };
        self.guard(sent)?;
        let buffer = self.buffer(id)?;
        buffer.generation = generation;
        (buffer.held, buffer.out) = (true, true);
        Ok(generation)
    }

    /// Publishes a buffer that the consumer does not have open, and waits until it is opened.
    fn send_new(&mut self, number: u64, generation: u64) -> Result<()> {
        let pool = self.pool_to_send(number);
        let Some(buffer) = self.buffers.get(&number) else { return Ok(()) };
        self.link.send(&ready(number, generation, &buffer.first), &fds(&buffer.first))?;
        let mut sent = buffer.first.len() as u64;
        if let (Some(of), Some(pool)) = (pool, buffer.memory.pool()) {
            self.link.send(&Message::Pool(PoolNumber { pool: of }), &[pool.export()?])?;
        }
        // One record in flight at a time: the kernel limits a user's descriptors in flight.
        for index in 0.. {
            self.acknowledged(sent)?;
            let Some(record) = self.buffers.get(&number).and_then(|buffer| buffer.records.get(index)) else { break };
            self.link.send(&record.message, &fds(&record.chunks))?;
            sent += record.chunks.len() as u64;
        }
        Ok(())
    }

    /// Returns the buffer's pool unless the consumer has it, with another open buffer that is not withdrawn.
    fn pool_to_send(&self, number: u64) -> Option<u64> {
        let pool = self.buffers.get(&number)?.pool()?;
        // The consumer may already have closed a withdrawn buffer.
        let known = |buffer: &Buffer| buffer.held && !buffer.withdrawn && buffer.pool() == Some(pool);
        (!self.buffers.values().any(known)).then_some(pool)
    }

    /// Waits until the consumer has acknowledged `sent` segments of the current offer.
    fn acknowledged(&mut self, sent: u64) -> Result<()> {
        loop {
            match self.link.receive("for a buffer to be opened")?.0 {
                Message::Received(received) if received.segments == sent => return Ok(()),
                Message::Received(received) => {
                    let count = received.segments;
                    return Err(violation(format!("{count} segments were acknowledged, but {sent} were sent")));
                }
                other => self.handle(other)?,
            }
        }
    }

    /// Waits for the next buffer that the consumer gives back. The consumer's work on it has finished. Blocks up to the timeout.
    ///
    /// # Errors
    /// [`PeerError::Timeout`] if no buffer is given back within the timeout; session errors, which are fatal.
    pub fn take_back(&mut self) -> Result<BufferId> {
        self.take_back_within(self.timeout)
    }

    /// Like [`Publisher::take_back`], without waiting. `None` if no buffer has been given back.
    ///
    /// # Errors
    /// Session errors, which are fatal.
    pub fn try_take_back(&mut self) -> Result<Option<BufferId>> {
        match self.take_back_within(Duration::ZERO) {
            Err(Error::Peer(PeerError::Timeout { .. })) => Ok(None),
            result => result.map(Some),
        }
    }

    fn take_back_within(&mut self, timeout: Duration) -> Result<BufferId> {
        if self.ended {
            return Err(ended());
        }
        let mut limit = Limit::after(timeout);
        loop {
            if let Some(number) = self.returned.pop_front() {
                return Ok(BufferId { session: self.session, number });
            }
            self.receive_one(&mut limit, "for a buffer to be given back")?;
        }
    }

    /// Whether a buffer is out, according to the messages read so far. `false` for a buffer of another session.
    pub fn is_out(&self, id: BufferId) -> bool {
        id.session == self.session && self.buffers.get(&id.number).is_some_and(|buffer| buffer.out)
    }

    /// Removes a buffer from the stream. Returns when the consumer has closed it. If the buffer is out, the consumer closes it when it
    /// gives the buffer back. Blocks up to the timeout.
    ///
    /// # Errors
    /// [`Error::Misuse`] for an unknown buffer; [`PeerError::Timeout`] if the consumer has not closed it within the timeout:
    /// call again to continue the wait; session errors, which are fatal.
    pub fn withdraw(&mut self, id: BufferId) -> Result<()> {
        let buffer = self.buffer(id)?;
        if !buffer.withdrawn {
            buffer.withdrawn = true;
            let sent = self.link.send(&Message::Withdraw(BufferNumber { buffer: id.number }), &[]);
            self.guard(sent)?;
        }
        // `take_back` no longer returns it.
        self.returned.retain(|returned| *returned != id.number);
        let mut limit = Limit::after(self.timeout);
        while self.buffer(id)?.held {
            self.receive_one(&mut limit, "for the consumer to close a buffer")?;
        }
        self.buffers.remove(&id.number);
        Ok(())
    }

    /// Ends the session. [`Publisher`] documents how long this may block.
    pub fn close(self) {}

    fn buffer(&mut self, id: BufferId) -> Result<&mut Buffer> {
        if self.ended {
            return Err(ended());
        }
        if id.session != self.session {
            return Err(misuse(format!("buffer {id} belongs to another session")));
        }
        self.buffers.get_mut(&id.number).ok_or_else(|| misuse(format!("there is no buffer {id} in this stream")))
    }

    /// Returns a buffer that can be published.
    fn idle(&mut self, id: BufferId) -> Result<&mut Buffer> {
        let buffer = self.buffer(id)?;
        if buffer.withdrawn {
            return Err(misuse(format!("buffer {id} is being withdrawn")));
        }
        if buffer.out {
            return Err(misuse(format!("buffer {id} is out: the consumer has not given it back")));
        }
        Ok(buffer)
    }

    /// Receives and handles one message. A timeout is not fatal.
    fn receive_one(&mut self, limit: &mut Limit, purpose: &'static str) -> Result<()> {
        let Some(deadline) = limit.next() else {
            return Err(Error::Peer(PeerError::Timeout { purpose, waited: self.timeout }));
        };
        let handled = match self.link.receive_by(deadline, purpose) {
            Err(timeout @ Error::Peer(PeerError::Timeout { .. })) => return Err(timeout),
            received => received.and_then(|(message, _)| self.handle(message)),
        };
        self.guard(handled)
    }

    fn handle(&mut self, message: Message) -> Result<()> {
        match message {
            Message::Busy(_) => Ok(()),
            Message::Done(BufferTurn { buffer: number, generation }) => match self.buffers.get_mut(&number) {
                Some(buffer) if buffer.out && buffer.generation == generation => {
                    buffer.out = false;
                    if !buffer.withdrawn {
                        self.returned.push_back(number);
                    }
                    Ok(())
                }
                _ => {
                    Err(violation(format!("generation {generation} of buffer {number} is given back, but is not out")))
                }
            },
            Message::Gone(BufferNumber { buffer: number }) => match self.buffers.get_mut(&number) {
                Some(buffer) if buffer.held && !buffer.out => {
                    buffer.held = false;
                    Ok(())
                }
                _ => Err(violation(format!("buffer {number} is closed, but was not open or is out"))),
            },
            other => Err(unexpected(&other, "done or gone")),
        }
    }

    /// Passes a result through. If it is an error, reports it to the consumer and closes the session.
    fn guard<T>(&mut self, result: Result<T>) -> Result<T> {
        result.inspect_err(|error| {
            self.ended = true;
            self.link.report(error);
            self.link.channel.shut_down_writing();
        })
    }
}

impl AsFd for Publisher {
    /// Readable when the consumer has sent a message or is gone. Call [`Publisher::try_take_back`] then.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.link.channel.as_fd()
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        if !self.ended {
            self.link.channel.restart_close_timeout();
        }
        self.link.channel.shut_down_writing();
        let borrowed = || self.buffers.values().filter(|buffer| buffer.is_borrowed());
        if borrowed().next().is_some() && !self.link.channel.wait_for_close(self.timeout) {
            // The consumer is silent with the memory open: freed memory could be read.
            tracing::warn!("a consumer did not close memory within the timeout: the memory stays allocated");
            borrowed().for_each(|buffer| buffer.memory.abandon());
        }
    }
}

fn fds(chunks: &[Arc<Chunk>]) -> Vec<BorrowedFd<'_>> {
    chunks.iter().map(|chunk| chunk.as_fd()).collect()
}

/// A publication, with the segments in the same record.
fn ready(buffer: u64, generation: u64, chunks: &[Arc<Chunk>]) -> Message {
    let sizes = chunks.iter().map(|chunk| chunk.size()).collect();
    Message::Ready(Ready { buffer, generation, sizes })
}

/// The records for the segments after the first record. Their numbers start at `first`.
fn records(chunks: &[Arc<Chunk>], mut first: u64) -> Vec<Record> {
    let mut records = Vec::new();
    for chunks in chunks.chunks(MAX_FDS) {
        let sizes = chunks.iter().map(|chunk| chunk.size()).collect();
        records.push(Record { message: Message::Segments(Segments { first, sizes }), chunks: chunks.to_vec() });
        first += chunks.len() as u64;
    }
    records
}
