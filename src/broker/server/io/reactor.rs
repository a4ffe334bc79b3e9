//! The event loop: one thread serves all connections without blocking on any of them.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd},
    sync::{
        Arc,
        mpsc::{self, Receiver},
    },
    time::{Duration, Instant},
};

use mio::{Events, Interest, Poll, Token as Key, Waker, unix::SourceFd};
use nix::sys::resource::{self, getrlimit, setrlimit};

use super::{
    admission::{Admission, restrict},
    closer::{Closed, Closer},
    connection::Connections,
    keeper::{KEEPER, KeeperLink, STORE},
    timers::{Timer, Timers},
};
use crate::{
    broker::{
        notify,
        server::{
            TimeLimits,
            admit::Resource,
            state::{
                caller::ConnectionId,
                metrics::REPEATS_LOGGED_EACH,
                objects::ServerReport,
                root::{State, Time},
            },
            verbs::{connection, list, put, watch},
        },
    },
    channel::Cancel,
    error::{Error, ErrorCode, Result, units::about},
    sys::{self, Heap},
    wire::{HEADER_LENGTH, MAX_BODY},
};

const LISTENER: Key = Key(0);
const WAKER: Key = Key(1);
const CANCEL: Key = Key(2);
const LEAVE: Key = Key(4);

/// How often to check for clients that do not read.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);

/// Timers run per turn.
const TIMERS_PER_TURN: usize = 128;

/// The most threads that close memory, and other descriptors. Further users wait.
const MAX_THREADS: (usize, usize) = (2, 64);

/// The descriptor table is preallocated for this many descriptors, at 8 bytes each.
const MAX_PREALLOCATED: usize = 1 << 20;

/// The event loop and everything it serves.
pub(crate) struct Reactor {
    pub(super) state: State,
    pub(super) poll: Poll,
    pub(super) cancel: Cancel,
    pub(super) admission: Admission,
    pub(super) connections: Connections,
    pub(super) timers: Timers,
    pub(super) keeper: KeeperLink,
    /// Closes memory.
    pub(super) closing: Closer,
    /// Closes descriptors whose close a peer can block.
    pub(super) blocking: Closer,
    pub(super) limits: TimeLimits,
    closed: Receiver<Closed>,
    heap: Heap,
    /// The receive buffer.
    pub(super) incoming: Vec<u8>,
}

impl Reactor {
    pub(crate) fn new(
        state: State,
        admission: Admission,
        keeper: KeeperLink,
        limits: TimeLimits,
        cancel: &Cancel,
    ) -> Result<Self> {
        let failed = |action: &'static str| move |error: io::Error| Error::system(action, error);
        let occupied = sys::occupy_standard();
        let poll = Poll::new().map_err(failed("create an epoll instance"))?;
        let waker = Arc::new(Waker::new(poll.registry(), WAKER).map_err(failed("create an eventfd"))?);
        drop(occupied);
        let sources = [(admission.listener.as_fd(), LISTENER), (cancel.as_fd(), CANCEL)];
        let leave = keeper.leave.as_ref().map(|leave| (leave.as_fd(), LEAVE));
        for (fd, key) in sources.into_iter().chain(leave) {
            let registered = poll.registry().register(&mut SourceFd(&fd.as_raw_fd()), key, Interest::READABLE);
            registered.map_err(failed("watch a descriptor"))?;
        }
        restrict(&admission.listener);
        let (done, closed) = mpsc::channel();
        let mut reactor = Self {
            state,
            poll,
            cancel: cancel.clone(),
            admission,
            connections: Connections::default(),
            timers: Timers::default(),
            keeper,
            closing: Closer::new(Resource::Closing, MAX_THREADS.0, done.clone(), Arc::clone(&waker)),
            blocking: Closer::new(Resource::Blocking, MAX_THREADS.1, done, waker),
            limits,
            closed,
            heap: Heap::default(),
            incoming: vec![0; HEADER_LENGTH + MAX_BODY + 1],
        };
        reactor.register_keeper().map_err(failed("watch the keeper"))?;
        reactor.feed_watchdog();
        reactor.timers.set(limits.file, Timer::SocketFile);
        if reactor.state.objects.awaits_clients() || reactor.state.changes.reserves_names {
            reactor.timers.set(limits.resume, Timer::Unresumed);
        }
        Ok(reactor)
    }

    /// Whether this server has ended its keeper.
    pub(crate) fn ended_keeper(&self) -> bool {
        self.keeper.ended_keeper
    }

    /// Serves until cancelled. Returns the totals at that time. A fork's request to cancel could not wake the event loop.
    pub(crate) fn run(&mut self) -> Result<ServerReport> {
        self.cancel.check_fork()?;
        let total = self.state.objects.total();
        tracing::info!(
            path = %self.admission.listener.path().display(),
            keeper = self.keeper.pid(),
            objects = total.objects,
            versions = total.versions,
            leases = total.leases,
            size = about(total.bytes),
            restarts = self.state.objects.events.restarts(),
            "serving"
        );
        let mut events = Events::with_capacity(1024);
        while !self.should_stop() {
            // `should_stop` may have asked the keeper for a confirmation, and nothing else may wake an idle server's loop.
            self.sync_store();
            match self.poll.poll(&mut events, self.poll_timeout()) {
                Err(error) if error.kind() != io::ErrorKind::Interrupted => {
                    return Err(Error::system("wait for connections", error));
                }
                _ => {}
            }
            self.state.objects.now = Time::now();
            self.take_events(&events);
            self.take_closed();
            if !self.is_leaving() {
                self.accept();
                self.serve();
            }
            self.run_pending();
        }
        self.state.repeats.log();
        Ok(self.end())
    }

    fn take_events(&mut self, events: &Events) {
        for event in events {
            match event.token() {
                LISTENER => self.admission.acceptable = true,
                WAKER | CANCEL => {}
                KEEPER => self.keeper.exited = true,
                STORE => self.keeper.readable |= event.is_readable() || event.is_read_closed(),
                LEAVE => self.start_leave(),
                Key(key) => {
                    let id = ConnectionId(key as u64);
                    if event.is_writable() {
                        self.send_more(id);
                    }
                    self.connections.list(id);
                }
            }
        }
    }

    /// Counts the descriptors that the closers have closed.
    fn take_closed(&mut self) {
        for Closed { resource, uid, count } in self.closed.try_iter().collect::<Vec<_>>() {
            self.closer(resource).closed(uid);
            let users = &mut self.state.objects.users;
            users.sub(uid, resource, count);
            if users.has_room(uid, Resource::Closing, 0) {
                self.connections.resume(uid);
            }
        }
    }

    /// Does background work within the budget of a turn.
    fn run_pending(&mut self) {
        self.sync_store();
        self.run_timers();
        self.with(|state| {
            list::continue_listing(state);
            watch::send_events(state);
        });
    }

    /// Calls a function of the state and executes its effects.
    pub(super) fn with(&mut self, call: impl FnOnce(&mut State)) {
        call(&mut self.state);
        self.execute();
    }

    /// Sends queued messages to the keeper, and completes the changes that are safe then.
    pub(super) fn sync_store(&mut self) {
        if !self.state.objects.store.has_keeper && self.state.changes.pending.is_empty() {
            return;
        }
        loop {
            self.flush_keeper();
            self.state.keeper_pid = self.keeper.pid();
            let mut any = false;
            self.with(|state| any = put::complete_safe(state));
            if !any {
                return;
            }
        }
    }

    /// Ends all connections, and reports whether the objects are kept or freed.
    fn end(&mut self) -> ServerReport {
        const MESSAGE: &str = "the broker is stopping: reconnect when it runs again";
        // Count first: disconnecting releases leases.
        let total = self.state.objects.total();
        self.report_end();
        if !self.state.objects.store.has_keeper {
            for id in self.connections.all.keys().copied().collect::<Vec<_>>() {
                self.end_connection(id, ErrorCode::Interrupted, MESSAGE, "the broker is stopping");
            }
            return total;
        }
        // The next server takes over the leases, so their end is not logged.
        self.state.objects.flush_store();
        for id in self.connections.all.keys().copied().collect::<Vec<_>>() {
            self.send_error(id, ErrorCode::Interrupted, MESSAGE);
        }
        // Closing may block; the peers see the shutdown first.
        for id in self.connections.all.keys().copied().collect::<Vec<_>>() {
            let connection = self.connections.get(id);
            connection.into_iter().for_each(|connection| drop(connection.socket.shutdown(std::net::Shutdown::Both)));
        }
        total
    }

    /// Notifies the init's watchdog, if enabled, and schedules the next notification.
    fn feed_watchdog(&mut self) {
        if let Some(every) = notify::watchdog() {
            notify::notify("WATCHDOG=1");
            self.timers.set(every / 3, Timer::Watchdog);
        }
    }

    /// Creates a lost socket file or lock file again.
    fn check_socket_file(&mut self) {
        if !self.admission.has_lost_file() {
            if self.admission.listener.has_lost_mark() {
                tracing::warn!(
                    path = %self.admission.listener.path().display(),
                    "the socket's lock file was removed or replaced: creating it again"
                );
                self.admission.listener.renew_mark();
            }
            return self.timers.set(self.limits.file, Timer::SocketFile);
        }
        let path = self.admission.listener.path().to_owned();
        match self.listen_again() {
            Ok(()) => {
                tracing::error!(path = %path.display(), "the socket's file was removed or replaced: listening at its path again");
                self.timers.set(self.limits.file, Timer::SocketFile);
            }
            Err(error) => tracing::error!(
                path = %path.display(),
                error = error.in_full(),
                "the socket's file was removed or replaced, so new clients can't connect: restart this broker; connected clients are still served"
            ),
        }
    }

    fn listen_again(&mut self) -> Result<()> {
        let failed = |error| Error::system("watch a descriptor", error);
        // The keeper has a copy of the socket, so closing it would not end its registration.
        let old = self.admission.listener.as_fd().try_clone_to_owned().map_err(failed)?;
        self.admission.listen_again(&self.cancel)?;
        let _ = self.poll.registry().deregister(&mut SourceFd(&old.as_raw_fd()));
        let listener = self.admission.listener.as_fd();
        let registered =
            self.poll.registry().register(&mut SourceFd(&listener.as_raw_fd()), LISTENER, Interest::READABLE);
        registered.map_err(failed)?;
        let copy = listener.try_clone_to_owned().map_err(failed)?;
        self.state.objects.hold_socket(copy);
        self.sync_store();
        Ok(())
    }

    fn poll_timeout(&self) -> Option<Duration> {
        let can_serve = !self.is_leaving();
        if can_serve && (self.admission.acceptable || !self.connections.readable.is_empty()) || self.state.has_work() {
            return Some(Duration::ZERO);
        }
        let left = self.timers.first()?.saturating_duration_since(Instant::now());
        // epoll counts milliseconds: round up to avoid spinning.
        Some(if left.is_zero() { left } else { left + Duration::from_millis(1) })
    }

    /// Runs due timers and pending cleanup.
    fn run_timers(&mut self) {
        self.state.objects.now = Time::now();
        let now = self.state.objects.now.at;
        self.state.objects.clean_up_closed();
        self.state.objects.begin_turn();
        for _ in 0..TIMERS_PER_TURN {
            // In each iteration: a timer may release leases and so schedule expiries.
            self.schedule_expiries();
            let Some(timer) = self.timers.pop(now) else { break };
            match timer {
                Timer::Connection(id) => self.with(|state| connection::deadline_passed(state, id)),
                Timer::Retry(id) => self.send_more(id),
                Timer::Name(name) => self.state.objects.expire(&name),
                Timer::Accept => self.admission.acceptable = true,
                Timer::Sweep => self.sweep(now),
                Timer::Store | Timer::Leave => self.sync_store(),
                Timer::Keeper => {
                    self.check_keeper();
                    self.sync_store();
                }
                Timer::SocketFile => self.check_socket_file(),
                Timer::Watchdog => self.feed_watchdog(),
                Timer::RepeatLimiter => self.state.repeats.log(),
                Timer::Unresumed => {
                    self.state.objects.end_unresumed();
                    self.with(put::end_reservation);
                }
            }
        }
        self.schedule_expiries();
        if !self.state.repeats.is_empty() {
            self.timers.set_by(REPEATS_LOGGED_EACH, Timer::RepeatLimiter);
        }
        self.close_garbage();
        self.heap.note(self.state.objects.total().versions as usize);
    }

    fn schedule_expiries(&mut self) {
        for (name, at) in std::mem::take(&mut self.state.objects.expiries) {
            self.timers.set_or_cancel(at, Timer::Name(name));
        }
    }

    pub(super) fn sweep_later(&mut self) {
        self.timers.set_by(SWEEP_INTERVAL, Timer::Sweep);
    }

    /// Disconnects clients that do not read, and retries failed work.
    fn sweep(&mut self, now: Instant) {
        self.closing.start_threads();
        self.blocking.start_threads();
        self.settle(Duration::ZERO);
        for id in self.connections.stuck(now, self.state.timeout) {
            self.disconnect_stalled(id);
        }
        if !self.connections.unread.is_empty()
            || !self.connections.lingering.is_empty()
            || self.closing.lacks_threads()
            || self.blocking.lacks_threads()
        {
            self.sweep_later();
        }
    }
}

/// Makes the kernel allocate a descriptor table of this size (at most 8 MiB), by duplicating `fd`. In a multithreaded process, each growth
/// of the table waits for an RCU grace period, which would stop the event loop for 10 to 20 ms.
pub(crate) fn preallocate_descriptor_table(fd: BorrowedFd<'_>, descriptors: usize) {
    let last = descriptors.min(MAX_PREALLOCATED).saturating_sub(1);
    if let Err(error) = rustix::io::fcntl_dupfd_cloexec(fd, last as RawFd) {
        tracing::debug!(%error, descriptors, "cannot preallocate the descriptor table: it grows on demand");
    }
}

/// Raises the open-file limit as far as allowed, and returns it.
pub(crate) fn raise_limit() -> usize {
    let Ok((soft, hard)) = getrlimit(resource::Resource::RLIMIT_NOFILE) else { return 1024 };
    let raised = soft >= hard || setrlimit(resource::Resource::RLIMIT_NOFILE, hard, hard).is_ok();
    usize::try_from(if raised { hard } else { soft }).unwrap_or(usize::MAX)
}
