//! The end that uses the buffers.

use std::{
    collections::BTreeMap,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    BufferId, MAX_BUFFERS, SessionNumber, misused, over,
    received::{Held, Received},
    wrong,
};
use crate::{
    channel::{Cancel, Peer, connect, deadline_after},
    driver::Driver,
    error::{Error, ErrorCode, PeerError, Result},
    memory::{Mechanism, Pool, Region, Remains, Selector},
    session::{
        Config,
        link::{Link, unexpected},
        opening::{self, Chosen, Connection, Offer, acknowledge, check_backend},
    },
    wire::{self, BufferNumber, BufferTurn, DEFAULT_OBJECT, Hello, Message, Ready, STREAM, Subscribe},
};

/// The consumer's end of a stream: one connection to a producer, and the buffers that are open.
///
/// Buffers stay open between their turns, at most as many as [`Subscriber::connect`] was given. When another one comes, the
/// least recently used of those not in use is closed first. A buffer that the producer withdraws is closed when this side hears
/// of it, in [`Subscriber::receive`] and [`Subscriber::try_receive`], or when it is given back after that. All buffers are closed
/// when those calls find that the producer is gone, and when this is dropped.
///
/// An [`Error::Misuse`], a [`PeerError::Timeout`] while no buffer comes and a failure to synchronise leave the session as it was.
/// Any other error ends it: the producer gets to know why, all buffers that are not in use are closed, and later calls fail.
#[derive(Debug)]
pub struct Subscriber {
    /// What was not urgent when the last buffer was opened.
    remains: Option<Remains>,
    /// What the producer said of its buffers, open or not.
    offers: BTreeMap<u64, Offered>,
    buffers: BTreeMap<u64, Kept>,
    keep: usize,
    /// Counts uses.
    uses: u64,
    chosen: Chosen,
    /// Held also by all memory that the producer frees when the connection ends; `None` when it has ended.
    connection: Option<Arc<Connection>>,
    link: Link,
    /// The name of the producer's backend.
    backend: String,
    session: SessionNumber,
    timeout: Duration,
}

/// A buffer as it was described.
#[derive(Debug)]
struct Offered {
    offer: Arc<Offer>,
    /// How often it was published.
    generation: u64,
}

/// A buffer that is open.
#[derive(Debug)]
struct Kept {
    held: Arc<Held>,
    generation: u64,
    /// Whether it is this side's turn.
    in_use: bool,
    /// Whether the producer wants it to be closed.
    withdrawn: bool,
    /// When it was used last, as a count.
    used: u64,
}

impl Kept {
    /// Whether it is this side's turn, and its user has dropped it.
    fn is_dropped(&mut self) -> bool {
        // Not by the count alone: what the last user did must be seen to be done.
        self.in_use && Arc::get_mut(&mut self.held).is_some()
    }
}

impl Subscriber {
    /// Waits for the producer at a path and subscribes. At most `keep` buffers are open at a time, at least one.
    ///
    /// A device that is named is used, if it can reach the memory that is offered; else the memory's own. The one that is named,
    /// or the only one, is made ready before the wait.
    ///
    /// # Errors
    /// [`Error::Misuse`] if `keep` is 0; [`PeerError::Mismatch`] if the producer has no stream; those of [`connect`],
    /// [`Device::find`](crate::memory::Device::find) and of the conversation: [`PeerError::Gone`], [`PeerError::Timeout`], [`PeerError::Protocol`].
    pub fn connect(
        driver: &Driver,
        device: Option<Selector>,
        path: &Path,
        keep: usize,
        config: &Config,
    ) -> Result<Self> {
        Self::meet(driver, device, keep, config, |cancel| {
            connect(path, config.timeout, &config.trust, cancel).map(Link::new)
        })
    }

    /// As [`Subscriber::connect`], over a connected socket of type `SOCK_SEQPACKET`: of a socket pair, say.
    ///
    /// # Errors
    /// [`Error::Socket`] for any other descriptor; [`PeerError::NotAllowed`]; those of [`Subscriber::connect`].
    pub fn over(
        socket: OwnedFd,
        driver: &Driver,
        device: Option<Selector>,
        keep: usize,
        config: &Config,
    ) -> Result<Self> {
        Self::meet(driver, device, keep, config, |cancel| {
            let link = Link::over(socket, config, cancel)?;
            config.trust.check(link.peer()).map(|()| link)
        })
    }

    fn meet(
        driver: &Driver,
        device: Option<Selector>,
        keep: usize,
        config: &Config,
        connect: impl FnOnce(&Cancel) -> Result<Link>,
    ) -> Result<Self> {
        if keep == 0 {
            return Err(misused("a subscriber must keep one buffer at least"));
        }
        let cancel = config.cancellation()?;
        let chosen = Chosen::new(driver, device, &cancel, &|_| {})?;
        let link = connect(&cancel)?;
        let mut subscriber = Self {
            remains: None,
            offers: BTreeMap::new(),
            buffers: BTreeMap::new(),
            keep,
            uses: 0,
            chosen,
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
        self.link.hello(self.chosen.backend(), &[STREAM])?;
        let (hello, _) = self.link.receive("for the producer's hello")?;
        let Hello { capabilities, backend, .. } = self.link.greeted(hello)?;
        self.backend = backend;
        if !capabilities.iter().any(|capability| capability == STREAM) {
            let message = "the producer has no stream to subscribe to".to_owned();
            return Err(Error::Peer(PeerError::Mismatch { code: ErrorCode::Object, message }));
        }
        self.link.send(&Message::Subscribe(Subscribe { keep: self.keep as u64 }), &[])
    }

    /// Who the producer is.
    pub fn peer(&self) -> Peer {
        self.link.peer()
    }

    /// How many buffers are open.
    pub fn held(&self) -> usize {
        self.buffers.len()
    }

    /// The next buffer whose turn it is: mapped, if it is new, and the producer's work on it is finished. They come in the order
    /// in which they were published.
    ///
    /// # Errors
    /// [`Error::Misuse`] if as many buffers are in use as are kept, before anything is taken from the producer;
    /// [`PeerError::Timeout`] if none comes for as long as the timeout; [`PeerError::Gone`] when the producer is gone or has ended
    /// the session; [`PeerError::Mismatch`], [`DeviceError::NoPeerAccess`](crate::error::DeviceError::NoPeerAccess) and
    /// [`Error::Driver`] from opening a buffer; those of the
    /// conversation.
    ///
    /// Driver calls, for a new buffer: those of [`Imported::open`](crate::memory::Imported::open), before them those that close another.
    pub fn receive(&mut self) -> Result<Received> {
        let waited = self.timeout;
        let timeout = Error::Peer(PeerError::Timeout { purpose: FOR_A_BUFFER, waited });
        self.receive_within(waited)?.ok_or(timeout)
    }

    /// As [`Subscriber::receive`], without waiting for a turn to begin: `None` if none has.
    ///
    /// # Errors
    /// Those of [`Subscriber::receive`].
    pub fn try_receive(&mut self) -> Result<Option<Received>> {
        self.receive_within(Duration::ZERO)
    }

    /// As [`Subscriber::receive`]; `None` if no turn begins in time.
    fn receive_within(&mut self, patience: Duration) -> Result<Option<Received>> {
        self.remains = None;
        self.return_dropped()?;
        if self.buffers.len() >= self.keep && self.buffers.values().all(|kept| kept.in_use) {
            let all = self.buffers.len();
            return Err(misused(format!(
                "all {all} buffers that this subscriber keeps are in use: give one back first"
            )));
        }
        let deadline = deadline_after(patience);
        // What is there when the time is over is still heard: of a producer that never pauses so much and no more.
        let mut late = 0;
        while late <= AT_THE_END {
            late += usize::from(Instant::now() >= deadline);
            let left = deadline.saturating_duration_since(Instant::now());
            let (message, fds) = match self.link.receive_within(left, FOR_A_BUFFER) {
                Err(Error::Peer(PeerError::Timeout { .. })) => return Ok(None),
                received => self.guard(received)?,
            };
            let taken = match message {
                Message::Ready(turn) => self.begin_turn(&turn, fds).map(Some),
                Message::Offer(offer) => self.enter(*offer).map(|()| None),
                Message::Withdraw(BufferNumber { buffer }) => self.withdrawn(buffer).map(|()| None),
                other => Err(unexpected(&other, "ready, offer or withdraw")),
            };
            match self.guard(taken)? {
                received @ Some(_) => return Ok(received),
                // What was withdrawn may have been dropped meanwhile, and goes with that.
                None => self.return_dropped()?,
            }
        }
        Ok(None)
    }

    /// A buffer that is described.
    fn enter(&mut self, offer: wire::Offer) -> Result<()> {
        check_backend(&self.backend, self.chosen.backend())?;
        let offer = Offer::read(offer, DEFAULT_OBJECT)?;
        let number = self.check(&offer)?;
        self.offers.insert(number, Offered { offer: Arc::new(offer), generation: 0 });
        Ok(())
    }

    /// The turn of a buffer: of one that is open, or with what it takes to open it.
    fn begin_turn(&mut self, turn: &Ready, fds: Vec<OwnedFd>) -> Result<Received> {
        let Ready { buffer, generation, ref sizes } = *turn;
        let Some(offered) = self.offers.get_mut(&buffer) else {
            return Err(wrong(format!("buffer {buffer} is ready, and is not described")));
        };
        if offered.generation.checked_add(1) != Some(generation) {
            let known = offered.generation;
            return Err(wrong(format!(
                "generation {generation} of buffer {buffer} is ready behind generation {known}"
            )));
        }
        let offer = Arc::clone(&offered.offer);
        offered.generation = generation;
        let Some(kept) = self.buffers.get_mut(&buffer) else {
            return self.open(&offer, turn, fds);
        };
        if kept.in_use {
            return Err(wrong(format!("buffer {buffer} is ready, and is in use here")));
        }
        if !sizes.is_empty() {
            return Err(wrong(format!("buffer {buffer} comes with segments, and is open here")));
        }
        self.uses += 1;
        (kept.generation, kept.in_use, kept.used) = (generation, true, self.uses);
        Ok(Received { held: Arc::clone(&kept.held), generation, usable: Instant::now() })
    }

    /// The turn of a buffer that is not open.
    fn open(&mut self, offer: &Offer, turn: &Ready, fds: Vec<OwnedFd>) -> Result<Received> {
        let Ready { buffer: number, generation, ref sizes } = *turn;
        let mechanism = offer.memory.mechanism();
        if sizes.is_empty() == (mechanism == Mechanism::Vmm) {
            return Err(wrong(format!("{} segments came with buffer {number}, shared by {mechanism}", sizes.len())));
        }
        let link = &mut self.link;
        let device = self.chosen.for_memory_of(&offer.memory.device, &mut || link.busy(), &|_| {})?;
        // Before a buffer of it is closed: the producer knows nothing of that yet.
        let known = offer.memory.pool().and_then(|number| self.pool(number));
        self.make_room()?;
        let range = 0..offer.memory.mapped_size;
        let opened = opening::open(&mut self.link, &device, offer, &range, known, (sizes, fds))?;
        self.remains = Some(opened.remains);
        let usable = Instant::now();
        acknowledge(&mut self.link, opened.unacknowledged.unwrap_or(0))?;
        let (memory, pool) = (opened.memory, opened.pool);
        let connection = self.connection.clone().filter(|_| memory.is_borrowed());
        let id = BufferId { session: self.session, number };
        let held = Arc::new(Held { id, memory, array: offer.array.clone(), pool, _connection: connection });
        self.uses += 1;
        let kept = Kept { held: Arc::clone(&held), generation, in_use: true, withdrawn: false, used: self.uses };
        self.buffers.insert(number, kept);
        Ok(Received { held, generation, usable })
    }

    /// What an offer must be in a stream. Returns the buffer's number.
    fn check(&self, offer: &Offer) -> Result<u64> {
        let Some(number) = offer.buffer else {
            return Err(wrong("memory is offered in a stream without a buffer's number".to_owned()));
        };
        // One that was withdrawn may still be in use.
        if self.offers.contains_key(&number) || self.buffers.contains_key(&number) {
            return Err(wrong(format!("buffer {number} is offered, and was before")));
        }
        if self.offers.len() >= MAX_BUFFERS {
            return Err(wrong(format!("buffer {number} is offered, and there are {MAX_BUFFERS} already")));
        }
        offer.part(&(0..offer.memory.mapped_size))?;
        Ok(number)
    }

    /// The pool of a number: what is open of it keeps it.
    fn pool(&self, number: u64) -> Option<Arc<Pool>> {
        // As the producer counts: it may not know yet that one that it withdrew is gone.
        let counted = self.buffers.values().filter(|kept| !kept.withdrawn);
        let mut pools = counted.filter_map(|kept| kept.held.pool.as_ref());
        pools.find(|(of, _)| *of == number).map(|(_, pool)| Arc::clone(pool))
    }

    /// Closes a buffer if as many are open as are kept, before another one is opened.
    ///
    /// The producer waits for `received` when it offers a new buffer, and this `gone` is sent before that: so it is read before
    /// the producer says anything of the buffer that is closed, and can't cross a `ready`.
    fn make_room(&mut self) -> Result<()> {
        if self.buffers.len() < self.keep {
            return Ok(());
        }
        let unused = self.buffers.iter().filter(|(_, kept)| !kept.in_use);
        match unused.min_by_key(|(_, kept)| kept.used).map(|(number, _)| *number) {
            Some(number) => self.discard(number),
            None => Ok(()),
        }
    }

    /// Closes a buffer, and says so when it is closed.
    fn discard(&mut self, number: u64) -> Result<()> {
        self.buffers.remove(&number);
        self.link.send(&Message::Gone(BufferNumber { buffer: number }), &[])
    }

    /// The producer wants a buffer back for good.
    fn withdrawn(&mut self, number: u64) -> Result<()> {
        if self.offers.remove(&number).is_none() {
            return Err(wrong(format!("buffer {number} is withdrawn, and is not of this stream")));
        }
        match self.buffers.get_mut(&number) {
            Some(kept) if kept.in_use => {
                kept.withdrawn = true;
                Ok(())
            }
            Some(_) => self.discard(number),
            None => Ok(()),
        }
    }

    /// Gives a buffer back: waits until the GPU's work on it is done, then notifies the producer.
    ///
    /// # Errors
    /// [`Error::Misuse`] for a buffer of another session; [`Error::Driver`] from the synchronisation: the next call tries again;
    /// those of the conversation, which end it.
    ///
    /// Driver call: `cuCtxSynchronize`.
    #[doc(alias = "cuCtxSynchronize")]
    pub fn give_back(&mut self, received: Received) -> Result<()> {
        self.check_session()?;
        let number = received.held.id.number;
        if !self.buffers.get(&number).is_some_and(|kept| Arc::ptr_eq(&kept.held, &received.held)) {
            return Err(misused(format!("{received:?} is not of this session")));
        }
        drop(received);
        self.end_turn(number)?;
        self.remains = None;
        Ok(())
    }

    /// Gives back what was dropped.
    fn return_dropped(&mut self) -> Result<()> {
        self.check_session()?;
        let dropped = |(number, kept): (&u64, &mut Kept)| kept.is_dropped().then_some(*number);
        while let Some(number) = self.buffers.iter_mut().find_map(dropped) {
            self.end_turn(number)?;
        }
        Ok(())
    }

    /// Ends this side's turn, when all work is done, and closes the buffer if it was withdrawn meanwhile.
    fn end_turn(&mut self, number: u64) -> Result<()> {
        let Some(kept) = self.buffers.get_mut(&number) else { return Ok(()) };
        kept.held.memory.synchronize()?;
        self.uses += 1;
        (kept.in_use, kept.used) = (false, self.uses);
        let (generation, withdrawn) = (kept.generation, kept.withdrawn);
        let done = self.link.send(&Message::Done(BufferTurn { buffer: number, generation }), &[]);
        let sent = match withdrawn {
            true => done.and_then(|()| self.discard(number)),
            false => done,
        };
        self.guard(sent)
    }

    /// Ends the session: closes all buffers but those in use.
    pub fn close(self) {}

    fn check_session(&self) -> Result<()> {
        if self.connection.is_some() { Ok(()) } else { Err(over()) }
    }

    /// Ends the session if something of the conversation failed, and passes that on.
    fn guard<T>(&mut self, result: Result<T>) -> Result<T> {
        result.inspect_err(|error| {
            self.link.report(error);
            self.end();
        })
    }

    /// Closes all that is not in use. The connection ends once nothing borrowed is left, which the producer sees.
    fn end(&mut self) {
        for kept in self.buffers.values_mut() {
            // Work on it may still go on, and unmapping does not always wait for that.
            if kept.is_dropped()
                && let Err(error) = kept.held.memory.synchronize()
            {
                tracing::error!(%error, "a buffer is closed, and work on it may not be done");
            }
        }
        self.remains = None;
        self.offers.clear();
        self.buffers.clear();
        self.connection = None;
    }
}

/// How many messages are heard of a producer when the time to wait is over: more than one that means well has queued.
const AT_THE_END: usize = 4 * MAX_BUFFERS;

/// What a subscriber waits for.
const FOR_A_BUFFER: &str = "for a buffer";

impl AsFd for Subscriber {
    /// Readable when the producer has said something, or is gone: time for [`Subscriber::try_receive`].
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.link.channel.as_fd()
    }
}

impl Drop for Subscriber {
    fn drop(&mut self) {
        self.end();
    }
}
