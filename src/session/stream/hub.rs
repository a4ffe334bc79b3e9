//! The state of a publisher, shared by its threads, its loans and the library's thread.

mod desk;

use std::{
    any::Any,
    collections::{BTreeMap, VecDeque},
    os::fd::AsFd,
    process,
    sync::{Arc, Condvar, Mutex, MutexGuard, Once, PoisonError, Weak},
    thread,
    time::{Duration, Instant},
};

use nix::{
    poll::PollFlags,
    sys::{
        epoll::{Epoll, EpollEvent, EpollFlags},
        eventfd::EventFd,
    },
};

pub(super) use self::desk::Desk;
use super::{
    event::{Event, Usage},
    ledger::{Ledger, Limits},
    member::{Member, POLL, Stage},
    options::PublishOptions,
    space::padded,
    turns::PublisherTurns,
};
use crate::{
    channel::{Cancel, Config, Listener, cancel::CHECK_INTERVAL, deadline_after},
    driver::{Access, Backend},
    error::{Error, Result},
    memory::{Chunk, Device, Region, Shared, Spec},
    session::{
        opening::Offer,
        watcher::{Source, Token, Watcher},
    },
    sys::{epoll, eventfd, fork::ProcessIdentity, lock, pass_descriptors},
    wire::{DEFAULT_OBJECT, HEADER_LENGTH, Hello, MAX_BODY, Message, STREAM},
};

/// How long no connection is accepted after a failure.
const PAUSE: Duration = Duration::from_millis(50);

/// How long a waiting thread polls before it sleeps: about the time of a wakeup.
const SPIN: Duration = Duration::from_micros(20);

/// How long a thread that polls words sleeps for short times before it sleeps for this time.
const SLEEP: Duration = Duration::from_millis(1);

/// A publisher's pool and its connections.
#[derive(Debug)]
pub(super) struct Hub {
    pub(super) memory: Arc<Shared>,
    pub(super) offer: Offer,
    pub(super) chunks: Vec<Arc<Chunk>>,
    pub(super) options: PublishOptions,
    pub(super) config: Config,
    pub(super) cancel: Cancel,
    pub(super) epoch: u64,
    pub(super) creator: ProcessIdentity,
    pub(super) watcher: Arc<Watcher>,
    /// `None` if the device's streams can't store words.
    pub(super) turns: Option<PublisherTurns>,
    /// Readable when a subscriber has sent a record, or `freed` was written.
    pub(super) inbox: Epoll,
    /// Wakes the thread that waits for a buffer.
    freed: EventFd,
    /// Readable after a change that follows an attempt without a result.
    hint: EventFd,
    /// Readable while events wait.
    news: EventFd,
    /// Readable with `inbox`, `hint` or `news`: for the program.
    watch: Epoll,
    /// Adds `inbox` to `watch`, which makes each record a little slower.
    watches: Once,
    state: Mutex<State>,
    /// Wakes the threads that wait for their turn to wait.
    turn: Condvar,
    me: Weak<Hub>,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) members: BTreeMap<u64, Member>,
    pub(super) next_id: u64,
    /// With its token; none while it is paused.
    pub(super) listener: Option<(Listener, Option<Token>)>,
    paused_until: Option<Instant>,
    /// What brings further subscribers, until the publisher finishes.
    pub(super) doors: Vec<Box<dyn Any + Send>>,
    /// Whether the publisher is dropped.
    pub(super) is_closed: bool,
    pub(super) desk: Desk,
    /// Whether a thread waits at the inbox.
    is_awaited: bool,
    /// Whether the last [`Hub::attempt`] found no buffer: the program may wait for the publisher's descriptor.
    is_short: bool,
}

impl State {
    /// Whether buffers return once streams have finished with them, which wakes nobody.
    fn awaits_streams(&self) -> bool {
        let ledger = &self.desk.ledger;
        !ledger.is_written() || self.members.keys().any(|id| ledger.is_finishing(*id))
    }
}

impl Hub {
    /// # Errors
    /// The errors of [`Shared::create`]; [`Error::Misuse`] for options without room; [`Error::System`].
    pub(super) fn create(device: &Device, options: &PublishOptions, config: &Config) -> Result<Arc<Self>> {
        let limits = Limits { history: options.history, loans: options.loans };
        let invalid =
            || super::misuse(format!("a pool of {} with {} loans has no buffer", options.room, options.loans));
        let (bytes, ledger) = match options.size {
            Some(size) => {
                let stride = padded(size).filter(|_| size > 0 && options.room > 0 && options.loans > 0);
                let stride = stride.ok_or_else(invalid)?;
                let count = usize::try_from(options.room).ok().filter(|count| *count <= u32::MAX as usize);
                let (count, bytes) = count.zip(stride.checked_mul(options.room)).ok_or_else(invalid)?;
                (bytes, Ledger::fixed(size, stride, count, limits))
            }
            None if options.room == 0 || options.loans == 0 => return Err(invalid()),
            None => (options.room, Ledger::varying(options.room, limits)),
        };
        let memory = Arc::new(Shared::create(device, Spec::vmm(bytes).placement(options.placement))?);
        let (part, chunks) = memory.chunks(0..bytes)?.ok_or_else(invalid)?;
        let (object, array, check) = (DEFAULT_OBJECT.to_owned(), None, None);
        let access = Access::ReadOnly;
        let offer = Offer { object, memory: memory.describe()?, array, access, part: Some(part), check };
        let system = |error| Error::system("create a publisher's descriptors", error);
        let (inbox, watch) = (epoll().map_err(system)?, epoll().map_err(system)?);
        let [freed, hint, news] = [eventfd(), eventfd(), eventfd()];
        let (freed, hint, news) = (freed.map_err(system)?, hint.map_err(system)?, news.map_err(system)?);
        let readable = || EpollEvent::new(EpollFlags::EPOLLIN, 0);
        let added = inbox.add(&freed, readable()).and_then(|()| watch.add(&hint, readable()));
        let added = added.and_then(|()| watch.add(&news, readable()));
        added.map_err(|errno| system(errno.into()))?;
        let desk = Desk {
            ledger,
            format: None,
            events: VecDeque::new(),
            has_news: false,
            incoming: vec![0; HEADER_LENGTH + MAX_BODY + 1],
            sender: None,
            is_finished: false,
            has_gone: false,
            has_freed: false,
        };
        let (members, listener, paused_until) = (BTreeMap::new(), None, None);
        let doors = Vec::new();
        let state = State {
            members,
            next_id: 1,
            listener,
            paused_until,
            doors,
            is_closed: false,
            desk,
            is_awaited: false,
            is_short: false,
        };
        let turns = PublisherTurns::new(device)?;
        let watcher = Watcher::get()?;
        let cancel = config.cancellation()?;
        let hub = Arc::new_cyclic(|me| Self {
            memory,
            offer,
            chunks,
            options: options.clone(),
            config: config.clone(),
            cancel,
            epoch: new_epoch(),
            creator: ProcessIdentity::current(),
            watcher,
            turns,
            inbox,
            freed,
            hint,
            news,
            watch,
            watches: Once::new(),
            state: Mutex::new(state),
            turn: Condvar::new(),
            me: me.clone(),
        });
        hub.watcher.attach(hub.source());
        Ok(hub)
    }

    pub(super) fn source(&self) -> Weak<dyn Source> {
        self.me.clone()
    }

    pub(super) fn socket_key(id: u64) -> u64 {
        2 * id
    }

    pub(super) fn process_key(id: u64) -> u64 {
        2 * id + 1
    }

    pub(super) fn timeout(&self) -> Duration {
        self.config.timeout
    }

    /// The deadline of a peer's next record during a join.
    pub(super) fn deadline(&self) -> Instant {
        deadline_after(self.timeout())
    }

    pub(super) fn backend(&self) -> Backend {
        self.memory.device().backend()
    }

    pub(super) fn hello(&self) -> Message {
        Message::Hello(Hello::new(&[STREAM], self.backend().as_str(), self.timeout()))
    }

    /// Readable when a buffer may be free, or an event waits.
    pub(super) fn watched(&self) -> &impl AsFd {
        self.watches.call_once(|| {
            if let Err(errno) = self.watch.add(&self.inbox.0, EpollEvent::new(EpollFlags::EPOLLIN, 0)) {
                tracing::error!(%errno, "a publisher's descriptor does not show returned buffers");
            }
        });
        &self.watch.0
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Removes closed connections, and wakes waiting threads. Call it before the lock is released.
    pub(super) fn settle(&self, state: &mut State) {
        state.desk.has_freed = false;
        if std::mem::take(&mut state.desk.has_gone) {
            state.members.retain(|_, member| {
                let is_gone = matches!(member.stage, Stage::Gone);
                if is_gone {
                    member.close(self);
                }
                !is_gone
            });
        }
        if std::mem::take(&mut state.desk.has_news) {
            let _ = self.news.write(1);
        }
        if state.is_awaited {
            let _ = self.freed.write(1);
        }
        if state.is_short {
            let _ = self.hint.write(1);
        }
    }

    /// Listens for subscribers. Returns the listener that is no longer used: its drop may wait for a file lock, so drop it without the
    /// state's lock.
    pub(super) fn listen(&self, state: &mut State, listener: Listener) -> Result<Option<Listener>> {
        // On a kernel without this, members look at each record first.
        let _ = pass_descriptors(listener.as_fd(), false);
        let token = self.watcher.add(listener.as_fd(), EpollFlags::EPOLLIN, self.source(), 0);
        let token = token.map_err(|error| Error::system("watch a listening socket", error))?;
        let former = self.stop_listening(state);
        state.listener = Some((listener, Some(token)));
        Ok(former)
    }

    /// Stops listening. Returns the listener, as [`Hub::listen`] does.
    #[must_use = "its drop may wait for a file lock"]
    pub(super) fn stop_listening(&self, state: &mut State) -> Option<Listener> {
        let (listener, token) = state.listener.take()?;
        if let Some(token) = token {
            self.watcher.remove(token, listener.as_fd());
        }
        Some(listener)
    }

    /// Accepts no further subscriber. Drop the result without the state's lock, which the doors' threads may want.
    #[must_use = "its drop may wait"]
    pub(super) fn close_doors(&self, state: &mut State) -> (Option<Listener>, Vec<Box<dyn Any + Send>>) {
        (self.stop_listening(state), std::mem::take(&mut state.doors))
    }

    /// Accepts no connection for a moment: the process has no descriptor left, and the thread would not sleep.
    pub(super) fn pause_listener(&self, state: &mut State) {
        if let Some((listener, token)) = &mut state.listener
            && let Some(token) = token.take()
        {
            self.watcher.remove(token, listener.as_fd());
            state.paused_until = Some(Instant::now() + PAUSE);
        }
    }

    /// Accepts connections again. Returns the time of the next attempt if this one failed.
    fn resume_listener(&self, state: &mut State) -> Option<Instant> {
        let State { listener: Some((listener, token @ None)), paused_until, .. } = state else { return None };
        match self.watcher.add(listener.as_fd(), EpollFlags::EPOLLIN, self.source(), 0) {
            Ok(added) => *token = Some(added),
            Err(error) => {
                tracing::error!(%error, "can't accept subscribers now");
                *paused_until = Some(Instant::now() + PAUSE);
            }
        }
        *paused_until
    }

    /// Reads the records of all subscribers, and sends the buffers that wait for them.
    pub(super) fn drain(&self, state: &mut State) {
        self.note_written(&mut state.desk);
        for member in state.members.values_mut().filter(|member| member.may_hold()) {
            member.drain(false, &mut state.desk, self);
            member.flush(&mut state.desk, self);
        }
    }

    /// Calls `attempt` until it returns a value, each time after subscribers have sent records. `None` after the limit.
    ///
    /// # Errors
    /// The errors of `attempt`; [`Error::Interrupted`]; [`Error::System`].
    pub(super) fn wait<T>(
        &self,
        limit: Duration,
        mut attempt: impl FnMut(&mut State) -> Result<Option<T>>,
    ) -> Result<Option<T>> {
        let mut state = self.lock();
        let begun = Instant::now();
        let deadline = begun.checked_add(limit).unwrap_or_else(|| deadline_after(limit));
        loop {
            let found = attempt(&mut state);
            self.settle(&mut state);
            if let Some(found) = found? {
                return Ok(Some(found));
            }
            let now = Instant::now();
            if now >= deadline {
                return Ok(None);
            }
            if now < begun + SPIN {
                drop(state);
                // The subscriber may need this CPU.
                thread::yield_now();
                state = self.lock();
            } else if state.is_awaited {
                let slice = CHECK_INTERVAL.min(deadline - now);
                (state, _) = self.turn.wait_timeout(state, slice).unwrap_or_else(PoisonError::into_inner);
                drop(state);
                // The program's check may take locks of its own.
                self.cancel.check_now()?;
                state = self.lock();
            } else {
                state.is_awaited = true;
                // A stream that finishes with a buffer wakes nobody.
                let polls = state.awaits_streams();
                drop(state);
                let waited = match polls {
                    true if now < begun + SLEEP => {
                        thread::sleep(SPIN);
                        Ok(true)
                    }
                    true => self.cancel.wait(self.inbox.0.as_fd(), PollFlags::POLLIN, deadline.min(now + SLEEP)),
                    false => self.cancel.wait(self.inbox.0.as_fd(), PollFlags::POLLIN, deadline),
                };
                state = self.lock();
                state.is_awaited = false;
                let _ = self.freed.read();
                self.turn.notify_all();
                waited?;
            }
        }
    }

    /// Calls `attempt` once. If it finds nothing, the publisher's descriptor is readable after the next change, whichever thread makes it.
    pub(super) fn attempt<T>(&self, attempt: impl FnOnce(&mut State) -> Option<T>) -> Option<T> {
        let state = &mut *self.lock();
        if std::mem::take(&mut state.is_short) {
            let _ = self.hint.read();
        }
        let found = attempt(state);
        self.settle(state);
        state.is_short = found.is_none();
        if state.is_short && state.awaits_streams() {
            self.watcher.wake();
        }
        found
    }

    /// Removes the oldest event.
    pub(super) fn event(&self) -> Option<Event> {
        let mut state = self.lock();
        if state.desk.events.is_empty() {
            self.drain(&mut state);
        }
        self.settle(&mut state);
        let event = state.desk.events.pop_front();
        if state.desk.events.is_empty() {
            let _ = self.news.read();
        }
        event
    }

    /// The use of the pool by all subscribers, present and former.
    pub(super) fn usage(state: &State) -> Vec<Usage> {
        let known = state.members.values().filter(|member| member.may_hold());
        let usage = known.map(|member| {
            let ledger = &state.desk.ledger;
            let ((buffers, bytes), tally) = (ledger.holds(member.id), ledger.tally(member.id));
            Usage {
                subscriber: member.info(),
                is_subscribed: member.is_subscribed(),
                delivered: tally.delivered,
                skipped: tally.skipped,
                buffers,
                bytes,
            }
        });
        usage.collect()
    }

    /// Closes all connections. Loans may still refer to the pool.
    pub(super) fn close(&self) {
        let mut state = self.lock();
        let closed = self.close_doors(&mut state);
        let members = std::mem::take(&mut state.members);
        members.into_values().for_each(|mut member| member.close(self));
        (state.desk.is_finished, state.is_closed) = (true, true);
        drop(state);
        drop(closed);
        self.watcher.detach(&self.source());
    }
}

impl Drop for Hub {
    /// On the thread of the last publisher or loan: waits for the streams that write to the pool.
    fn drop(&mut self) {
        if let Some(turns) = self.turns.as_mut().filter(|_| self.creator.is_current()) {
            turns.wait();
        }
    }
}

impl Source for Hub {
    fn ready(&self, key: u64, _: EpollFlags) {
        let state = &mut *self.lock();
        match state.members.get_mut(&(key / 2)) {
            None if key == 0 => self.accept(state),
            None => {}
            Some(member) if key == Self::process_key(member.id) => {
                // Its last records.
                member.drain(false, &mut state.desk, self);
                member.process_gone(&mut state.desk);
            }
            Some(member) => {
                member.drain(false, &mut state.desk, self);
                member.flush(&mut state.desk, self);
            }
        }
        self.settle(state);
    }

    fn tick(&self, now: Instant) -> Option<Instant> {
        let state = &mut *self.lock();
        let mut next = state.paused_until;
        if next.is_some_and(|until| until <= now) {
            (state.paused_until, next) = (None, self.resume_listener(state));
        }
        // A program that waits for the publisher's descriptor does not look itself.
        let polls = state.is_short && state.awaits_streams();
        if polls {
            self.note_written(&mut state.desk);
            state.members.values_mut().for_each(|member| member.take_finished(&mut state.desk));
        }
        let ticks = state.members.values_mut().filter_map(|member| member.tick(now, &mut state.desk, self));
        let next = ticks.chain(next).chain(polls.then(|| now + POLL)).min();
        if state.desk.has_gone || state.desk.has_news || state.desk.has_freed {
            self.settle(state);
        }
        next
    }
}

/// A number that another publisher does not have.
fn new_epoch() -> u64 {
    let mut bytes = [0; 8];
    let random = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    match random {
        // Half: some JSON readers have signed numbers.
        Ok(8) => u64::from_le_bytes(bytes) >> 12,
        _ => u64::from(process::id()) << 20 ^ crate::sys::monotonic().as_nanos() as u64 >> 12,
    }
}
