//! The event loop's side of the keeper: queued messages, and recovery after the keeper dies.

use std::{
    io,
    os::fd::AsRawFd,
    time::{Duration, Instant},
};

use mio::{Interest, Token as Key, unix::SourceFd};
use nix::unistd::geteuid;

use super::{reactor::Reactor, timers::Timer};
use crate::{
    broker::{
        keeper::{Flushed, Link, Mark, Process},
        server::state::objects::ServerReport,
    },
    channel::Cancel,
    error::units::{about, count},
};

/// The keeper's connection in the event loop.
pub(super) const STORE: Key = Key(3);

/// The keeper's pidfd.
pub(super) const KEEPER: Key = Key(5);

/// Retry interval for sends that reached the kernel's limit on descriptors in flight.
const IN_FLIGHT_RETRY: Duration = Duration::from_millis(2);

/// Delays between connection attempts if keepers keep dying: the first, and the longest.
const MIN_DELAY: Duration = Duration::from_millis(5);
const MAX_DELAY: Duration = Duration::from_millis(200);

/// A keeper that lived longer than this is replaced without a delay.
const LONG_LIFE: Duration = Duration::from_secs(5);

/// A terminating process closes its sockets up to this long before its pidfd becomes readable.
const EXIT_GRACE: Duration = Duration::from_millis(50);

/// How long a stopping server waits for the keeper's exit before it kills the keeper.
const END_TIMEOUT: Duration = Duration::from_secs(1);

/// The keeper of this server.
#[derive(Debug, Default)]
pub(crate) struct KeeperLink {
    link: Option<Link>,
    process: Option<Process>,
    /// When the next keeper may be tried, and the delay after that attempt.
    next_attempt: Option<Instant>,
    delay: Duration,
    /// Since when the connection is closed although the keeper runs.
    closed_since: Option<Instant>,
    /// Triggered by SIGHUP: exit so that another server takes over.
    pub(super) leave: Option<Cancel>,
    /// The keeper must confirm this mark before the server exits.
    leave_mark: Option<Mark>,
    leave_deadline: Option<Instant>,
    /// Whether this server has ended its keeper.
    pub(super) ended_keeper: bool,
    /// How many items the keeper has read, and the pending confirmation with the time of the request.
    read: u64,
    confirmation: Option<(Mark, Instant)>,
    /// Whether the keeper may have sent something.
    pub(super) readable: bool,
    /// Whether the keeper has died.
    pub(super) exited: bool,
}

impl KeeperLink {
    pub(crate) fn new(link: Link, process: Process, leave: Option<Cancel>) -> Self {
        Self { link: Some(link), process: Some(process), leave, ..Self::default() }
    }

    /// The keeper's process, if it is visible in this PID namespace.
    pub(super) fn pid(&self) -> Option<u32> {
        self.process.as_ref().and_then(|process| u32::try_from(process.pid).ok()).filter(|pid| *pid > 0)
    }

    /// Whether the process exits within this time, or has never run.
    fn exits_within(&self, wait: Duration) -> bool {
        self.process.as_ref().is_none_or(|process| process.exits_within(wait))
    }
}

impl Reactor {
    /// Sends queued messages to the keeper. If the keeper is gone, connects to another and resends everything.
    pub(super) fn flush_keeper(&mut self) {
        let exited = std::mem::take(&mut self.keeper.exited);
        if std::mem::take(&mut self.keeper.readable) || exited {
            self.state.objects.store.read();
        }
        if exited {
            self.state.objects.store.disconnect();
        }
        if std::mem::take(&mut self.state.objects.store.needs_successor) {
            self.start_successor();
        }
        match self.state.objects.flush_store() {
            Flushed::All | Flushed::Full => {}
            Flushed::InFlight => self.timers.set_by(IN_FLIGHT_RETRY, Timer::Store),
            Flushed::Gone => self.replace_keeper(),
        }
        self.check_keeper_later();
    }

    /// Registers the keeper's connection and its death with the event loop.
    pub(super) fn register_keeper(&self) -> io::Result<()> {
        let registry = self.poll.registry();
        if let Some(pidfd) = self.keeper.process.as_ref().and_then(Process::pidfd) {
            registry.register(&mut SourceFd(&pidfd.as_raw_fd()), KEEPER, Interest::READABLE)?;
        }
        let interest = Interest::READABLE | Interest::WRITABLE;
        match self.state.objects.store.connection() {
            Some(fd) => registry.register(&mut SourceFd(&fd.as_raw_fd()), STORE, interest),
            None => Ok(()),
        }
    }

    /// The keeper exits on request, and only its twin and this server remain: starts another, if an init does not.
    fn start_successor(&mut self) {
        let Some(link) = self.keeper.link.as_mut().filter(|link| link.starts_keeper()) else { return };
        if self.cancel.check().is_ok()
            && let Err(error) = link.start_another()
        {
            tracing::error!(%error, "cannot start another keeper");
        }
    }

    /// Replaces a keeper that is gone: connects to another and resends everything. If none is reachable, retries with increasing delays;
    /// puts wait until then.
    fn replace_keeper(&mut self) {
        let now = Instant::now();
        let next_attempt = self.keeper.next_attempt.unwrap_or(now);
        if now < next_attempt {
            return self.timers.set_by(next_attempt.saturating_duration_since(now), Timer::Store);
        }
        let runs = !self.keeper.exits_within(Duration::ZERO);
        if runs && self.keeper.closed_since.get_or_insert(now).elapsed() < EXIT_GRACE {
            // Its death wakes the event loop earlier.
            return self.timers.set_by(EXIT_GRACE, Timer::Store);
        }
        self.keeper.closed_since = None;
        let has_closed = runs && !self.state.objects.store.keeper_stops;
        // A keeper that lived long is replaced at once, the next after a delay. A keeper that is still alive has closed the connection
        // itself and would soon do so again.
        let lived = now.saturating_duration_since(next_attempt);
        self.keeper.delay = match () {
            () if has_closed => MAX_DELAY,
            () if lived > LONG_LIFE => MIN_DELAY,
            // In small steps: until the next keeper has everything, a kill of this process loses it.
            () => (self.keeper.delay * 5 / 4).clamp(MIN_DELAY, MAX_DELAY),
        };
        self.keeper.next_attempt = Some(now + self.keeper.delay);
        if has_closed {
            let allowed = self.state.objects.store.room().1;
            if self.state.repeats.should_log(geteuid().as_raw(), "the keeper has closed the connection") {
                tracing::warn!(
                    allowed,
                    "the keeper is running but has closed the connection: check its descriptor limit (LimitNOFILE)"
                );
            }
            // A keeper that closes the connection has not crashed.
            std::mem::take(&mut self.state.objects.store.keeper_crashed);
        }
        self.note_crash();
        match self.reconnect_keeper() {
            Ok(Some(pid)) => {
                tracing::warn!(pid, "lost the keeper: sending all descriptors to its replacement");
                // Send at once: no other process has everything.
                self.state.objects.flush_store();
                self.timers.set_by(IN_FLIGHT_RETRY, Timer::Store);
            }
            Ok(None) => self.timers.set_by(self.keeper.delay, Timer::Store),
            Err(error) => {
                if self.state.repeats.should_log(geteuid().as_raw(), "no keeper can be reached") {
                    tracing::error!(%error, "no keeper can be reached: puts wait, and all memory is freed if this process dies now");
                }
                self.state.objects.store.disconnect();
                self.timers.set_by(self.keeper.delay, Timer::Store);
            }
        }
    }

    /// Logs a keeper's crash.
    fn note_crash(&mut self) {
        if std::mem::take(&mut self.state.objects.store.keeper_crashed) {
            tracing::warn!(pid = self.keeper.pid(), "the keeper crashed");
        }
    }

    /// Connects to another keeper and queues everything for it. Returns its pid; `None` while a keeper starts.
    fn reconnect_keeper(&mut self) -> io::Result<Option<i32>> {
        let Some(link) = &mut self.keeper.link else { return Err(io::ErrorKind::NotConnected.into()) };
        let Some((socket, process)) = link.connect()? else { return Ok(None) };
        let pid = process.pid;
        let keeper = &mut self.keeper;
        (keeper.process, keeper.confirmation, keeper.read, keeper.exited) = (Some(process), None, 0, false);
        self.state.objects.store.start_over(socket)?;
        self.register_keeper()?;
        self.state.objects.resend();
        self.state.objects.store.complete();
        self.state.objects.store.serving();
        if self.keeper.leave_mark.is_some() {
            self.announce_leave();
        }
        Ok(Some(pid))
    }

    /// Kills a keeper that does not read.
    fn kill_keeper(&mut self) {
        self.keeper.confirmation = None;
        if let Some(process) = &self.keeper.process {
            process.kill();
        }
    }

    fn check_keeper_later(&mut self) {
        let store = &self.state.objects.store;
        // A long entry is queued until its last record is sent.
        if store.connection().is_some() && (store.sent != self.keeper.read || store.has_queued()) {
            self.timers.set_by(self.limits.silence / 5, Timer::Keeper);
        }
    }

    /// Checks whether the keeper reads its messages. Replaces a keeper that does not, as it may be stopped.
    pub(super) fn check_keeper(&mut self) {
        let store = &self.state.objects.store;
        match self.keeper.confirmation {
            _ if store.greeted && !store.is_unread() => {
                (self.keeper.confirmation, self.keeper.read) = (None, store.sent);
            }
            Some((mark, _)) if store.is_confirmed(mark) => self.keeper.confirmation = None,
            None => {
                self.keeper.confirmation = Some((self.state.objects.store.sync(), Instant::now()));
            }
            Some((_, since)) if since.elapsed() > self.limits.silence => {
                let silence = self.limits.silence;
                tracing::error!("the keeper has read nothing for {silence:?}: killing and replacing it");
                self.state.objects.store.disconnect();
                self.note_crash();
                self.kill_keeper();
            }
            Some(_) => {}
        }
        self.check_keeper_later();
    }

    /// Handles SIGHUP: exit once the keeper has confirmed everything, so that another server takes over.
    pub(super) fn start_leave(&mut self) {
        if self.keeper.link.is_some() && self.keeper.leave_mark.is_none() {
            self.announce_leave();
        }
    }

    fn announce_leave(&mut self) {
        // After SIGHUP, another server follows.
        let held = self.cancel.check().map_or_else(|_| summary(self.state.objects.total()), |()| String::new());
        self.state.objects.store.stopping(held);
        self.keeper.leave_mark = Some(self.state.objects.store.sync());
    }

    /// Whether another server can take over: a keeper has confirmed everything. Asks again if there was a change since.
    fn is_handed_over(&mut self) -> bool {
        let store = &self.state.objects.store;
        let Some(mark) = self.keeper.leave_mark.filter(|mark| store.is_confirmed(*mark)) else { return false };
        if store.is_last(mark) {
            return true;
        }
        self.keeper.leave_mark = Some(self.state.objects.store.sync());
        false
    }

    /// Whether clients must wait for the next server: each change would delay this server's exit.
    pub(super) fn is_leaving(&self) -> bool {
        self.keeper.leave_mark.is_some() && self.state.objects.store.greeted
    }

    /// Whether this server, which is asked to exit, ends its keeper too.
    fn ends_keeper(&self) -> bool {
        let is_empty = self.state.objects.is_empty();
        self.cancel.check().is_err() && self.keeper.link.as_ref().is_some_and(|link| link.ends_keeper(is_empty))
    }

    /// Whether the event loop must stop.
    pub(super) fn should_stop(&mut self) -> bool {
        let cancelled = self.cancel.check().is_err();
        if cancelled && (self.keeper.link.is_none() || self.ends_keeper()) {
            return true;
        }
        if cancelled && self.keeper.leave_deadline.is_none() {
            // This exit frees nothing: it waits until a keeper has everything.
            self.keeper.leave_deadline = Some(Instant::now() + self.limits.keeper);
            self.start_leave();
            self.timers.set(self.limits.keeper, Timer::Leave);
        }
        self.is_handed_over() || self.keeper.leave_deadline.is_some_and(|deadline| Instant::now() >= deadline)
    }

    /// Ends the keeper if this server does that, and logs whether the server's objects are kept or freed.
    pub(super) fn report_end(&mut self) {
        const FREED: &str = "the memory is freed, except where clients have it mapped";
        let held = summary(self.state.objects.total());
        if !self.state.objects.store.has_keeper {
            tracing::info!("stopping: {FREED}");
        } else if self.ends_keeper() {
            tracing::info!("stopping server and keeper: {FREED}");
            self.keeper.ended_keeper = self.end_keeper(held);
        } else if self.is_handed_over() {
            tracing::info!(pid = self.keeper.pid(), "stopping: the keeper has everything");
        } else {
            let limit = self.limits.keeper;
            tracing::error!(held, "no keeper has confirmed everything after {limit:?}: freeing the rest");
            self.state.objects.log_names();
        }
    }

    /// Makes the keeper exit, and kills it if it does not. Returns whether it has exited.
    fn end_keeper(&mut self, held: String) -> bool {
        let store = &mut self.state.objects.store;
        if store.connection().is_none()
            && let Some((socket, process)) = self.keeper.link.as_mut().and_then(|link| link.connect_if_there())
        {
            // Another keeper may hold a part of the objects.
            self.keeper.process = Some(process);
            let _ = store.start_over(socket);
        }
        store.exit(held);
        let deadline = Instant::now() + END_TIMEOUT;
        while Instant::now() < deadline {
            self.state.objects.store.read();
            self.state.objects.flush_store();
            if self.keeper.exits_within(IN_FLIGHT_RETRY) {
                return true;
            }
        }
        tracing::warn!("the keeper does not exit: killing it");
        self.kill_keeper();
        self.keeper.exits_within(END_TIMEOUT)
    }
}

/// Describes a server's objects for the log.
fn summary(total: ServerReport) -> String {
    let ServerReport { objects, versions, bytes, .. } = total;
    format!("{}, {}, {} as claimed", count(objects, "object"), count(versions, "version"), about(bytes))
}
