//! The end that owns the buffers.

use std::{
    collections::{BTreeMap, VecDeque},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
    time::{Duration, Instant},
};

use super::{BufferId, MAX_BUFFERS, SessionNumber, misused, over, wrong};
use crate::{
    array::ArrayDescriptor,
    channel::{Listener, Peer, deadline_after},
    driver::{Access, Backend, Driver},
    error::{Error, PeerError, Result},
    memory::{Chunk, Region, Shared},
    session::{
        Config,
        acceptor::{Acceptor, Arrival, Dialect, Next, Wish},
        link::{Link, unexpected},
        opening::Offer,
    },
    wire::{BufferNumber, BufferTurn, DEFAULT_OBJECT, MAX_FDS, Message, PoolNumber, Ready, Segments},
};

/// The producer's end of a stream: one connection to one consumer. Several consumers are several publishers, which may have the
/// same memory.
///
/// A buffer is published, is out until the consumer gives it back, and can then be published again. What the consumer says is
/// read by [`Publisher::take_back`], [`Publisher::withdraw`] and the first publication of a buffer, and by nothing else.
///
/// An [`Error::Misuse`], a [`PeerError::Timeout`] of [`Publisher::take_back`] or [`Publisher::withdraw`] and a failure to
/// synchronise leave the session as it was. Any other error of a conversation ends it: the consumer gets to know why, and later
/// calls fail.
///
/// Dropping it ends the session. If the consumer has memory of a pool or legacy memory open, it has as long as the timeout to close
/// it; memory that it still holds then stays allocated for as long as this process lives.
#[derive(Debug)]
pub struct Publisher {
    link: Link,
    session: SessionNumber,
    backend: Backend,
    timeout: Duration,
    keep: u64,
    /// By the numbers that travel.
    buffers: BTreeMap<u64, Buffer>,
    next: u64,
    /// What was given back and not returned to the caller yet.
    back: VecDeque<u64>,
    over: bool,
}

/// A buffer, with all that it takes to open it.
#[derive(Debug)]
struct Buffer {
    memory: Arc<Shared>,
    /// The first segments, which come with a turn.
    first: Vec<Arc<Chunk>>,
    /// What follows that.
    records: Vec<Record>,
    generation: u64,
    /// Whether the consumer has it open.
    held: bool,
    /// Whether it is the consumer's turn.
    out: bool,
    /// Whether `withdraw` was sent for it.
    withdrawn: bool,
}

/// Some segments.
#[derive(Debug)]
struct Record {
    message: Message,
    chunks: Vec<Arc<Chunk>>,
}

impl Buffer {
    /// Whether the consumer must close it before it is freed.
    fn is_borrowed(&self) -> bool {
        self.held && !self.memory.is_protected()
    }

    fn pool(&self) -> Option<u64> {
        self.memory.pool().map(|pool| pool.number())
    }
}

impl Publisher {
    /// Waits for a trusted consumer to connect to the listener and to subscribe. Other peers are refused meanwhile, and delay
    /// none.
    ///
    /// # Errors
    /// [`PeerError::NoConsumer`] if none has subscribed within the timeout; [`Error::Interrupted`]; [`Error::System`].
    pub fn accept(listener: &Listener, driver: &Driver, config: &Config) -> Result<Self> {
        let cancel = config.cancellation()?;
        let mut acceptor = Acceptor::new(Dialect::Stream, driver.backend(), config, &cancel)?;
        let deadline = deadline_after(config.timeout);
        match acceptor.next(listener, None, deadline)? {
            Next::Arrived(arrival) => Self::with(*arrival, driver, config),
            Next::Woken | Next::Late => Err(Error::Peer(PeerError::NoConsumer { waited: config.timeout })),
        }
    }

    /// As [`Publisher::accept`], over a connected socket of type `SOCK_SEQPACKET`: of a socket pair, say, or accepted by the
    /// caller.
    ///
    /// # Errors
    /// [`Error::Socket`] for any other descriptor; [`PeerError::NotAllowed`], [`PeerError::Gone`], [`PeerError::Timeout`],
    /// [`PeerError::Mismatch`] and [`PeerError::Protocol`] if its peer does not subscribe; [`Error::Interrupted`];
    /// [`Error::System`].
    pub fn over(socket: OwnedFd, driver: &Driver, config: &Config) -> Result<Self> {
        let cancel = config.cancellation()?;
        let arrival = Acceptor::new(Dialect::Stream, driver.backend(), config, &cancel)?.meet(socket)?;
        Self::with(arrival, driver, config)
    }

    fn with(arrival: Arrival, driver: &Driver, config: &Config) -> Result<Self> {
        let Arrival { link, wish, .. } = arrival;
        let Wish::Stream(keep) = wish else { return Err(wrong("a request came where subscribe belongs".to_owned())) };
        Ok(Self {
            link,
            session: SessionNumber::next(),
            backend: driver.backend(),
            timeout: config.timeout,
            keep,
            buffers: BTreeMap::new(),
            next: 0,
            back: VecDeque::new(),
            over: false,
        })
    }

    /// Who the consumer is.
    pub fn peer(&self) -> Peer {
        self.link.peer()
    }

    /// How many buffers the consumer says that it keeps open at most: with more than that in rotation some are opened anew each
    /// time.
    pub fn keeps(&self) -> u64 {
        self.keep
    }

    /// Enters a buffer, and describes it to the consumer: to read that is not on the way of its first turn. The number is never
    /// used again on this connection. There are at most [`MAX_BUFFERS`] at a time.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`](crate::error::MemoryError::OutOfRange) or
    /// [`MemoryError::Array`](crate::error::MemoryError::Array) if the array is not inside the memory; [`Error::Misuse`] for
    /// memory that is
    /// still to be sealed;
    /// [`Error::Misuse`] if sealed memory is to be written, for memory of another backend, or where there are as many as there can
    /// be; [`Error::Driver`]; those of the conversation, which end it.
    ///
    /// Driver calls: `cuMemPoolExportPointer`, `cuIpcGetMemHandle`.
    #[doc(alias("cuMemPoolExportPointer", "cuIpcGetMemHandle"))]
    pub fn add(&mut self, memory: &Arc<Shared>, array: Option<ArrayDescriptor>, access: Access) -> Result<BufferId> {
        if self.over {
            return Err(over());
        }
        if self.buffers.len() >= MAX_BUFFERS {
            return Err(misused(format!("a stream has {MAX_BUFFERS} buffers at most: withdraw one first")));
        }
        if memory.device().backend() != self.backend {
            let message = format!("a stream on backend {} can't have memory of another", self.backend);
            return Err(misused(message));
        }
        if access == Access::ReadWrite && memory.access() == Access::ReadOnly {
            return Err(misused("sealed memory can be published read-only alone"));
        }
        let description = memory.describe()?;
        if let Some(array) = &array {
            array.check(description.size)?;
        }
        let chunks = memory.chunks(0..memory.size())?;
        if description.segments() != chunks.as_ref().map_or(0, |(part, _)| part.segments) {
            return Err(misused("the memory is to be sealed before it is published: call Shared::seal"));
        }
        let (part, chunks) = chunks.map_or((None, Vec::new()), |(part, chunks)| (Some(part), chunks));
        let number = self.next;
        let object = DEFAULT_OBJECT.to_owned();
        let offer = Offer { object, memory: description, array, access, part, check: None, buffer: Some(number) };
        let sent = self.link.send(&Message::Offer(Box::new((&offer).into())), &[]);
        self.guard(sent)?;
        let (first, behind) = chunks.split_at(chunks.len().min(MAX_FDS));
        let records = records(behind, first.len() as u64);
        let (memory, first) = (Arc::clone(memory), first.to_vec());
        let buffer = Buffer { memory, first, records, generation: 0, held: false, out: false, withdrawn: false };
        self.next += 1;
        self.buffers.insert(number, buffer);
        Ok(BufferId { session: self.session, number })
    }

    /// Waits until the GPU's work on a buffer is done, then gives the consumer its turn: in one small record if the
    /// consumer has the buffer open, else with all that it needs to open it, and waits until it has. Returns the generation,
    /// which counts the buffer's publications from 1. What was given back meanwhile is heard too: ask
    /// [`Publisher::try_take_back`] before waiting for this end to be readable.
    ///
    /// A consumer opens a new buffer when it next waits for one. One that is busy for longer than the timeout, or that holds as many
    /// as it keeps, has not opened it in time, and the session ends: so publish a new buffer to one that waits.
    ///
    /// # Errors
    /// [`Error::Misuse`] for a buffer that is out, withdrawn or unknown; [`Error::Driver`] from the synchronisation; those of the
    /// conversation, which end it.
    ///
    /// Driver call: `cuCtxSynchronize`.
    #[doc(alias = "cuCtxSynchronize")]
    pub fn publish(&mut self, id: BufferId) -> Result<u64> {
        self.idle(id)?.memory.synchronize()?;
        self.announce(id)
    }

    /// As [`Publisher::publish`], for a caller who has seen all of the GPU's work on the buffer done: by synchronising its own
    /// stream, say, where others work on.
    ///
    /// # Errors
    /// Those of [`Publisher::publish`]. No driver call.
    pub fn announce(&mut self, id: BufferId) -> Result<u64> {
        let number = id.number;
        let buffer = self.idle(id)?;
        let (generation, held) = (buffer.generation + 1, buffer.held);
        let sent = match held {
            true => self.link.send(&ready(number, generation, &[]), &[]),
            false => self.introduce(number, generation),
        };
        self.guard(sent)?;
        let buffer = self.buffer(id)?;
        buffer.generation = generation;
        (buffer.held, buffer.out) = (true, true);
        Ok(generation)
    }

    /// Begins the turn of a buffer that the consumer has not open, and waits until it has.
    fn introduce(&mut self, number: u64, generation: u64) -> Result<()> {
        let pool = self.unknown_pool(number);
        let Some(buffer) = self.buffers.get(&number) else { return Ok(()) };
        self.link.send(&ready(number, generation, &buffer.first), &fds(&buffer.first))?;
        let mut sent = buffer.first.len() as u64;
        if let (Some(of), Some(pool)) = (pool, buffer.memory.pool()) {
            self.link.send(&Message::Pool(PoolNumber { pool: of }), &[pool.export()?])?;
        }
        // One record at a time is in flight: the kernel bounds a user's descriptors in flight.
        for index in 0.. {
            self.acknowledged(sent)?;
            let Some(record) = self.buffers.get(&number).and_then(|buffer| buffer.records.get(index)) else { break };
            self.link.send(&record.message, &fds(&record.chunks))?;
            sent += record.chunks.len() as u64;
        }
        Ok(())
    }

    /// The pool of a buffer, if it has to come: the consumer has those of the buffers that it has open and that were not withdrawn.
    fn unknown_pool(&self, number: u64) -> Option<u64> {
        let pool = self.buffers.get(&number)?.pool()?;
        // One that is being withdrawn may be gone there before it is known here.
        let known = |buffer: &Buffer| buffer.held && !buffer.withdrawn && buffer.pool() == Some(pool);
        (!self.buffers.values().any(known)).then_some(pool)
    }

    /// Waits until the consumer has so many segments of the current offer.
    fn acknowledged(&mut self, sent: u64) -> Result<()> {
        loop {
            match self.link.receive("for a buffer to be opened")?.0 {
                Message::Received(received) if received.segments == sent => return Ok(()),
                Message::Received(received) => {
                    return Err(wrong(format!("{} segments of {sent} were acknowledged", received.segments)));
                }
                other => self.note(other)?,
            }
        }
    }

    /// The next buffer that the consumer gives back. Its work on it is finished.
    ///
    /// # Errors
    /// [`PeerError::Timeout`] if none was for as long as the timeout; those of the conversation, which end it.
    pub fn take_back(&mut self) -> Result<BufferId> {
        self.take_back_within(self.timeout)
    }

    /// As [`Publisher::take_back`], without waiting: `None` if the consumer has said nothing of the kind.
    ///
    /// # Errors
    /// Those of the conversation, which end it.
    pub fn try_take_back(&mut self) -> Result<Option<BufferId>> {
        match self.take_back_within(Duration::ZERO) {
            Err(Error::Peer(PeerError::Timeout { .. })) => Ok(None),
            result => result.map(Some),
        }
    }

    fn take_back_within(&mut self, patience: Duration) -> Result<BufferId> {
        if self.over {
            return Err(over());
        }
        loop {
            if let Some(number) = self.back.pop_front() {
                return Ok(BufferId { session: self.session, number });
            }
            self.hear(patience, "for a buffer to be given back")?;
        }
    }

    /// Whether a buffer is out, as far as this side has heard the consumer. One of another session is not.
    pub fn is_out(&self, id: BufferId) -> bool {
        id.session == self.session && self.buffers.get(&id.number).is_some_and(|buffer| buffer.out)
    }

    /// Takes a buffer out of the stream. When this returns the consumer has closed it: at once, or when it has given it back if
    /// it is out.
    ///
    /// # Errors
    /// [`Error::Misuse`] for an unknown buffer; [`PeerError::Timeout`] if the consumer has not closed it within the timeout:
    /// to call this again waits again; those of the conversation, which end it.
    pub fn withdraw(&mut self, id: BufferId) -> Result<()> {
        let buffer = self.buffer(id)?;
        if !buffer.withdrawn {
            buffer.withdrawn = true;
            let sent = self.link.send(&Message::Withdraw(BufferNumber { buffer: id.number }), &[]);
            self.guard(sent)?;
        }
        // Its return is not reported any more.
        self.back.retain(|back| *back != id.number);
        let deadline = deadline_after(self.timeout);
        while self.buffer(id)?.held {
            let purpose = "for the consumer to close a buffer";
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::Peer(PeerError::Timeout { purpose, waited: self.timeout }));
            }
            self.hear(left, purpose)?;
        }
        self.buffers.remove(&id.number);
        Ok(())
    }

    /// Ends the session: see [`Publisher`] for how long that may take.
    pub fn close(self) {}

    /// A buffer of a session that goes on.
    fn buffer(&mut self, id: BufferId) -> Result<&mut Buffer> {
        if self.over {
            return Err(over());
        }
        if id.session != self.session {
            return Err(misused(format!("buffer {id} is of another session")));
        }
        self.buffers.get_mut(&id.number).ok_or_else(|| misused(format!("there is no buffer {id} in this stream")))
    }

    /// A buffer that can be published.
    fn idle(&mut self, id: BufferId) -> Result<&mut Buffer> {
        let buffer = self.buffer(id)?;
        if buffer.withdrawn {
            return Err(misused(format!("buffer {id} is being withdrawn")));
        }
        if buffer.out {
            return Err(misused(format!("buffer {id} is out: the consumer has not given it back")));
        }
        Ok(buffer)
    }

    /// Hears one message. A silence changes nothing.
    fn hear(&mut self, patience: Duration, purpose: &'static str) -> Result<()> {
        let heard = match self.link.receive_within(patience, purpose) {
            Err(silence @ Error::Peer(PeerError::Timeout { .. })) => return Err(silence),
            heard => heard.and_then(|(message, _)| self.note(message)),
        };
        self.guard(heard)
    }

    /// Notes what the consumer says of buffers.
    fn note(&mut self, message: Message) -> Result<()> {
        match message {
            Message::Done(BufferTurn { buffer: number, generation }) => match self.buffers.get_mut(&number) {
                Some(buffer) if buffer.out && buffer.generation == generation => {
                    buffer.out = false;
                    if !buffer.withdrawn {
                        self.back.push_back(number);
                    }
                    Ok(())
                }
                _ => Err(wrong(format!("generation {generation} of buffer {number} is given back, and is not out"))),
            },
            Message::Gone(BufferNumber { buffer: number }) => match self.buffers.get_mut(&number) {
                Some(buffer) if buffer.held && !buffer.out => {
                    buffer.held = false;
                    Ok(())
                }
                _ => Err(wrong(format!("buffer {number} is closed, and could not be"))),
            },
            other => Err(unexpected(&other, "done or gone")),
        }
    }

    /// Ends the session if something of the conversation failed, and passes that on.
    fn guard<T>(&mut self, result: Result<T>) -> Result<T> {
        result.inspect_err(|error| {
            self.over = true;
            self.link.report(error);
            self.link.channel.shut_down_writing();
        })
    }
}

impl AsFd for Publisher {
    /// Readable when the consumer has said something, or is gone: time for [`Publisher::try_take_back`].
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.link.channel.as_fd()
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        if !self.over {
            self.link.channel.restart_close_timeout();
        }
        self.link.channel.shut_down_writing();
        let borrowed = || self.buffers.values().filter(|buffer| buffer.is_borrowed());
        if borrowed().next().is_some() && !self.link.channel.wait_for_close(self.timeout) {
            // It has the memory open, and is silent: it would read freed memory.
            tracing::warn!("a consumer does not close memory, which stays allocated");
            borrowed().for_each(|buffer| buffer.memory.abandon());
        }
    }
}

fn fds(chunks: &[Arc<Chunk>]) -> Vec<BorrowedFd<'_>> {
    chunks.iter().map(|chunk| chunk.as_fd()).collect()
}

/// The turn of a buffer, with the segments that it brings.
fn ready(buffer: u64, generation: u64, chunks: &[Arc<Chunk>]) -> Message {
    let sizes = chunks.iter().map(|chunk| chunk.size()).collect();
    Message::Ready(Ready { buffer, generation, sizes })
}

/// The records that those segments travel in that do not come with the turn itself, from number `first` on.
fn records(chunks: &[Arc<Chunk>], mut first: u64) -> Vec<Record> {
    let mut records = Vec::new();
    for chunks in chunks.chunks(MAX_FDS) {
        let sizes = chunks.iter().map(|chunk| chunk.size()).collect();
        records.push(Record { message: Message::Segments(Segments { first, sizes }), chunks: chunks.to_vec() });
        first += chunks.len() as u64;
    }
    records
}
