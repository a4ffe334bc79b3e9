//! The event loop: one thread that serves all connections, and never waits for one of them.

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
use nix::sys::resource::{Resource, getrlimit, setrlimit};

use super::{
    admission::Admission,
    backlog::{Backlog, Released},
    closer::Closers,
    connections::Connections,
    finished::Finished,
    flight::Flight,
    keeper::{Around, Keeping, STORE},
    timers::{Timer, Timers},
    worker::{MOST_CLOSING, Worker},
};
use crate::{
    broker::{
        keeper::Keeper,
        notify,
        server::{
            state::{caller::ConnectionId, objects::Total, repeats, root::State, time::Time},
            verbs::{connection, effects::Effects, list, publish, watch},
        },
    },
    channel::Cancel,
    error::{Error, ErrorCode, Result},
    sys,
    wire::{HEADER_LENGTH, MAX_BODY},
};

const LISTENER: Key = Key(0);
const WAKER: Key = Key(1);
const CANCEL: Key = Key(2);
const RESTART: Key = Key(4);

/// How often connections are looked at that do not read.
const SWEEP: Duration = Duration::from_secs(1);

/// How long after the start clients can take up what they held of a server before this one.
const GRACE: Duration = Duration::from_secs(10);

/// How many timers run before other connections are served.
const TIMERS_AT_ONCE: usize = 128;

/// How many descriptors there is room for from the start, at 8 bytes each.
const MOST_ROOM: usize = 1 << 20;

/// The event loop, and everything that it serves.
pub(crate) struct Reactor {
    pub(super) state: State,
    pub(super) poll: Poll,
    pub(super) cancel: Cancel,
    pub(super) admission: Admission,
    pub(super) connections: Connections,
    pub(super) flight: Flight,
    pub(super) backlog: Backlog,
    pub(super) timers: Timers,
    pub(super) keeping: Keeping,
    pub(super) worker: Worker,
    pub(super) closers: Closers,
    finished: Receiver<Finished>,
    /// The record that is received.
    pub(super) incoming: Vec<u8>,
}

impl Reactor {
    pub(crate) fn new(state: State, admission: Admission, keeping: Keeping, cancel: &Cancel) -> Result<Self> {
        let failed = |action: &'static str| move |error: io::Error| Error::system(action, error);
        let poll = Poll::new().map_err(failed("make an epoll instance"))?;
        let waker = Arc::new(Waker::new(poll.registry(), WAKER).map_err(failed("make an eventfd"))?);
        let sources = [(admission.listener.as_fd(), LISTENER), (cancel.as_fd(), CANCEL)];
        let restart = keeping.restart_request().map(|restart| (restart.as_fd(), RESTART));
        for (fd, key) in sources.into_iter().chain(restart) {
            let registered = poll.registry().register(&mut SourceFd(&fd.as_raw_fd()), key, Interest::READABLE);
            registered.map_err(failed("watch a descriptor"))?;
        }
        // A connection takes descriptors once its user is allowed. Before Linux 6.16 each does.
        if let Err(error) = sys::pass_descriptors(admission.listener.as_fd(), false) {
            tracing::debug!(%error, "users that are not allowed can send descriptors before they are disconnected");
        }
        let (done, finished) = mpsc::channel();
        let worker = Worker::start(done.clone(), Arc::clone(&waker))?;
        keeping.register(&state, poll.registry()).map_err(failed("watch the keeper"))?;
        let mut reactor = Self {
            state,
            poll,
            cancel: cancel.clone(),
            admission,
            connections: Connections::default(),
            flight: Flight::new(raise_limit()),
            backlog: Backlog::default(),
            timers: Timers::default(),
            keeping,
            worker,
            closers: Closers::new(done, waker),
            finished,
            incoming: vec![0; HEADER_LENGTH + MAX_BODY + 1],
        };
        reactor.feed_watchdog();
        if reactor.state.objects.journal().restarts() > 0 || reactor.state.storing.reserves {
            reactor.timers.set(GRACE, Timer::Unclaimed);
        }
        Ok(reactor)
    }

    /// Whether it goes on with what a server before it held.
    pub(crate) fn is_restarted(&self) -> bool {
        self.state.objects.journal().restarts() > 0
    }

    /// Ends the keeper of an embedded server that has no versions. Returns whether no keeper is left.
    pub(crate) fn end_unused_keeper(&self) -> bool {
        self.keeping.end_unused()
    }

    /// Serves until it is cancelled. Returns what the broker held then.
    pub(crate) fn run(&mut self) -> Result<Total> {
        let total = self.state.objects.total();
        tracing::info!(
            path = %self.admission.listener.path().display(),
            keeper = self.keeping.keeper_pid(),
            objects = total.counts.objects,
            versions = total.counts.versions,
            leases = total.counts.leases,
            bytes = total.bytes,
            restarts = self.state.objects.journal().restarts(),
            "serves"
        );
        let mut events = Events::with_capacity(1024);
        while !self.ends() {
            match self.poll.poll(&mut events, self.poll_timeout()) {
                Err(error) if error.kind() != io::ErrorKind::Interrupted => {
                    return Err(Error::system("wait for connections", error));
                }
                _ => {}
            }
            self.state.objects.now = Time::now();
            self.take_events(&events);
            self.take_finished();
            self.accept();
            self.serve();
            self.go_on();
        }
        self.state.repeats.log();
        Ok(self.end())
    }

    fn take_events(&mut self, events: &Events) {
        for event in events {
            match event.token() {
                LISTENER => self.admission.acceptable = true,
                WAKER | CANCEL => {}
                STORE => self.keeping.readable |= event.is_readable() || event.is_read_closed(),
                RESTART => {
                    let (keeping, mut around) = self.keeping();
                    keeping.begin_end(&mut around);
                }
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

    /// Handles what other threads have finished.
    fn take_finished(&mut self) {
        for finished in self.finished.try_iter().collect::<Vec<_>>() {
            match finished {
                Finished::Work(client, outcome) => {
                    self.with(|state, effects| connection::work_done(state, effects, client, outcome));
                }
                // [`Reactor::run_timers`] receives again.
                Finished::CaughtUp => {}
                Finished::Closed(closed) => {
                    let (of, connections) = (closed.of, closed.connections);
                    self.closers.closed(closed);
                    if let Some(uid) = of {
                        (0..connections).for_each(|_| self.state.objects.users().remove_connection(uid));
                    }
                }
            }
        }
    }

    /// Does what no connection asks for: as much of it as leaves others their turn.
    fn go_on(&mut self) {
        self.settle_store();
        self.run_timers();
        self.with(|state, effects| {
            list::go_on(state, effects);
            watch::send_events(state, effects);
        });
    }

    /// Calls a function of the state, and does what it says.
    pub(super) fn with(&mut self, call: impl FnOnce(&mut State, &mut Effects)) {
        let mut effects = Effects::default();
        call(&mut self.state, &mut effects);
        self.execute(effects);
    }

    /// The keeper, and what it needs of the rest.
    pub(super) fn keeping(&mut self) -> (&mut Keeping, Around<'_>) {
        let Self { keeping, state, timers, poll, admission, cancel, .. } = self;
        (keeping, Around { state, timers, registry: poll.registry(), listener: &admission.listener, cancel })
    }

    /// Whether the loop must end.
    fn ends(&mut self) -> bool {
        let (keeping, mut around) = self.keeping();
        if keeping.ends(&mut around) {
            return true;
        }
        // It may have asked the keeper to confirm everything, and nothing else may wake the loop of an idle server.
        self.settle_store();
        false
    }

    /// Sends the keeper what waits for it, and publishes what it has.
    pub(super) fn settle_store(&mut self) {
        if self.state.objects.store().keeper() == Keeper::None && self.state.storing.queue.is_empty() {
            return;
        }
        loop {
            let (keeping, mut around) = self.keeping();
            keeping.flush(&mut around);
            self.state.keeper_pid = self.keeping.keeper_pid();
            let mut any = false;
            self.with(|state, effects| any = publish::kept(state, effects));
            if !any {
                return;
            }
        }
    }

    /// Ends all connections, and reports what becomes of what they hold.
    fn end(&mut self) -> Total {
        const MESSAGE: &str = "the broker stops: connect again when it runs";
        // Before the connections end, and their leases with them.
        let total = self.state.objects.total();
        let (keeping, mut around) = self.keeping();
        keeping.report_end(&mut around, total);
        if self.state.objects.store().keeper() == Keeper::None {
            for id in self.connections.ids() {
                self.end_connection(id, ErrorCode::Interrupted, MESSAGE, "the broker stops");
            }
            return total;
        }
        // What they hold is the next server's: nothing of it is written down as ended.
        self.state.objects.flush_store();
        for id in self.connections.ids() {
            self.send_error(id, ErrorCode::Interrupted, MESSAGE);
        }
        // Their close may block; the peers see the end before it.
        for (_, connection) in self.connections.iter_mut() {
            let _ = connection.socket.shutdown(std::net::Shutdown::Both);
        }
        total
    }

    /// Tells the init that this process runs, if it watches it, and does so again in time.
    fn feed_watchdog(&mut self) {
        if let Some(every) = notify::watchdog() {
            notify::notify("WATCHDOG=1");
            self.timers.set(every / 3, Timer::Watchdog);
        }
    }

    /// How long the loop may sleep.
    fn poll_timeout(&self) -> Option<Duration> {
        if self.admission.acceptable || self.connections.any_listed() || self.state.has_work() {
            return Some(Duration::ZERO);
        }
        let left = self.timers.first()?.saturating_duration_since(Instant::now());
        // epoll counts milliseconds: round up to avoid spinning.
        Some(if left.is_zero() { left } else { left + Duration::from_millis(1) })
    }

    /// Closes what waits to be closed, and runs the timers that are due.
    fn run_timers(&mut self) {
        self.state.objects.now = Time::now();
        let now = self.state.objects.now.at;
        self.state.objects.end_departed();
        self.state.objects.begin_turn();
        self.state.objects.release_some();
        if self.backlog.any() && !self.is_behind() {
            self.receive_again();
        }
        self.state.objects.go_on_compacting();
        for _ in 0..TIMERS_AT_ONCE {
            // Anew each time: a timer may end leases, and so begin the end of names.
            self.schedule_expiries();
            let Some(timer) = self.timers.pop(now) else { break };
            match timer {
                Timer::Connection(id) => self.check_deadline(id, now),
                Timer::Retry(id) => self.send_more(id),
                Timer::Name(name) => self.state.objects.expire(&name),
                Timer::Accept => self.admission.acceptable = true,
                Timer::Sweep => self.sweep(now),
                Timer::Store => self.settle_store(),
                Timer::Keeper => {
                    let (keeping, mut around) = self.keeping();
                    keeping.look(&mut around);
                    self.settle_store();
                }
                Timer::Watchdog => self.feed_watchdog(),
                Timer::Repeats => self.state.repeats.log(),
                Timer::Unclaimed => {
                    self.state.objects.end_unclaimed();
                    self.with(publish::end_reservation);
                }
            }
        }
        self.schedule_expiries();
        if !self.state.repeats.is_empty() {
            self.timers.set_once(repeats::EVERY, Timer::Repeats);
        }
        self.worker.close(self.state.objects.take_garbage());
    }

    fn schedule_expiries(&mut self) {
        for expiry in self.state.objects.take_expiries() {
            self.timers.set_at(expiry.at, Timer::Name(expiry.name), expiry.before);
        }
    }

    pub(super) fn sweep_later(&mut self) {
        self.timers.set_once(SWEEP, Timer::Sweep);
    }

    /// Disconnects clients that do not read, and tries again what could not be done.
    fn sweep(&mut self, now: Instant) {
        self.closers.start();
        self.count_unread();
        for id in self.connections.stuck(now, self.state.timeout) {
            self.disconnect_stalled(id);
        }
        if self.connections.any_unread() || self.flight.abandoned() > 0 || self.closers.wants_thread() {
            self.sweep_later();
        }
    }

    /// The timer of a connection runs: its deadline may have passed, or was moved.
    fn check_deadline(&mut self, id: ConnectionId, now: Instant) {
        let Some(connection) = self.connections.get_mut(id) else { return };
        connection.timer = None;
        match connection.deadline {
            None => {}
            Some(deadline) if deadline.at > now => self.set_timer(id, deadline.at),
            // [`Reactor::receive_again`] moves it.
            Some(deadline) if deadline.stops && self.backlog.holds_up(connection.uid) => {}
            Some(_) => {
                connection.deadline = None;
                self.with(|state, effects| connection::deadline_passed(state, effects, id));
            }
        }
    }

    /// Sets the timer of a connection, unless it runs before.
    pub(super) fn set_timer(&mut self, id: ConnectionId, at: Instant) {
        let Some(connection) = self.connections.get_mut(id) else { return };
        // One timer for each connection: a client may make requests with other waits as often as it likes.
        if connection.timer.is_none_or(|timer| timer > at) {
            let before = connection.timer.replace(at);
            self.timers.set_at(at, Timer::Connection(id), before);
        }
    }

    /// Whether much memory waits to be released and closed, so that users may send little more.
    pub(super) fn is_behind(&self) -> bool {
        self.state.objects.releasing() + self.worker.closing() > MOST_CLOSING
    }

    /// Memory was closed: receives again from the connections that waited for that. Their users' deadlines stood still.
    fn receive_again(&mut self) {
        let Released { connections, users } = self.backlog.release(Instant::now());
        let mut moved = Vec::new();
        for (id, connection) in self.connections.iter_mut() {
            if let Some(deadline) = connection.deadline.as_mut().filter(|deadline| deadline.stops)
                && let Some(stopped) = users.get(&connection.uid)
            {
                deadline.at += *stopped;
                moved.push((id, deadline.at));
            }
        }
        moved.into_iter().for_each(|(id, at)| self.set_timer(id, at));
        connections.into_iter().for_each(|id| self.connections.list(id));
    }

    /// Descriptors that this process has, about, and those that puts under way will bring.
    pub(super) fn descriptors(&self) -> usize {
        let closing = self.worker.closing() + self.closers.descriptors();
        self.connections.len() + self.flight.abandoned() + self.state.objects.descriptors() + closing
    }
}

/// Makes the kernel allocate a table for this many descriptors (at most 8 MiB), by a duplicate of `fd`. In a process with several
/// threads the table grows only after an RCU grace period, which stops the event loop for 10 to 20 ms each time that the table is full.
pub(crate) fn make_room(fd: BorrowedFd<'_>, descriptors: usize) {
    let last = descriptors.min(MOST_ROOM).saturating_sub(1);
    if let Err(error) = rustix::io::fcntl_dupfd_cloexec(fd, last as RawFd) {
        tracing::debug!(%error, descriptors, "the table of descriptors grows as they come");
    }
}

/// Raises the limit of open files as far as this process may, and returns it.
pub(crate) fn raise_limit() -> usize {
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else { return 1024 };
    let raised = soft >= hard || setrlimit(Resource::RLIMIT_NOFILE, hard, hard).is_ok();
    usize::try_from(if raised { hard } else { soft }).unwrap_or(usize::MAX)
}
