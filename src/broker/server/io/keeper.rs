//! The event loop's side of the keeper: queued messages, and recovery after the keeper dies.

use std::{
    io,
    os::fd::AsRawFd,
    time::{Duration, Instant},
};

use mio::{Interest, Registry, Token as Key, unix::SourceFd};
use nix::unistd::geteuid;

use super::timers::{Timer, Timers};
use crate::{
    broker::{
        keeper::{Flushed, Keeper, Link, Mark, Process},
        server::{
            limits::TimeLimits,
            state::{
                objects::{Counts, Total},
                root::State,
            },
        },
    },
    channel::Cancel,
    error::units::{about, count},
};

/// The keeper's connection in the event loop.
pub(super) const STORE: Key = Key(3);

/// The keeper's pidfd.
pub(super) const KEEPER: Key = Key(5);

/// Retry interval for sends that reached the kernel's limit on descriptors in flight.
pub(super) const IN_FLIGHT_RETRY: Duration = Duration::from_millis(2);

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
    keeper: Option<Process>,
    /// When the next keeper may be tried, and the delay after that attempt.
    next_attempt: Option<Instant>,
    delay: Duration,
    /// Since when the connection is closed although the keeper runs.
    closed_since: Option<Instant>,
    /// Triggered by SIGHUP: exit so that another server takes over.
    leave: Option<Cancel>,
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

/// The parts of the event loop that the keeper code uses.
pub(super) struct LoopContext<'a> {
    pub(super) state: &'a mut State,
    pub(super) timers: &'a mut Timers,
    pub(super) registry: &'a Registry,
    pub(super) limits: &'a TimeLimits,
    pub(super) cancel: &'a Cancel,
}

impl KeeperLink {
    pub(crate) fn new(link: Link, keeper: Process, leave: Option<Cancel>) -> Self {
        Self { link: Some(link), keeper: Some(keeper), leave, ..Self::default() }
    }

    /// The keeper's process, if it is visible in this PID namespace.
    pub(super) fn keeper_pid(&self) -> Option<u32> {
        self.keeper.as_ref().and_then(|keeper| u32::try_from(keeper.pid).ok()).filter(|pid| *pid > 0)
    }

    pub(super) fn leave_request(&self) -> Option<&Cancel> {
        self.leave.as_ref()
    }
}

impl KeeperLink {
    /// Sends queued messages to the keeper. If the keeper is gone, connects to another and resends everything.
    pub(super) fn flush(&mut self, context: &mut LoopContext<'_>) {
        let exited = std::mem::take(&mut self.exited);
        if std::mem::take(&mut self.readable) || exited {
            context.state.objects.store_mut().read();
        }
        if exited {
            context.state.objects.store_mut().disconnect();
        }
        if context.state.objects.store_mut().take_succession() {
            self.start_successor(context);
        }
        match context.state.objects.flush_store() {
            Flushed::All | Flushed::Full => {}
            Flushed::InFlight => context.timers.set_once(IN_FLIGHT_RETRY, Timer::Store),
            Flushed::Gone => self.replace_keeper(context),
        }
        self.check_later(context);
    }

    /// Registers the keeper's connection and its death with the event loop.
    pub(super) fn register(&self, state: &State, registry: &Registry) -> io::Result<()> {
        if let Some(pidfd) = self.keeper.as_ref().and_then(Process::pidfd) {
            registry.register(&mut SourceFd(&pidfd.as_raw_fd()), KEEPER, Interest::READABLE)?;
        }
        let interest = Interest::READABLE | Interest::WRITABLE;
        match state.objects.store().connection() {
            Some(fd) => registry.register(&mut SourceFd(&fd.as_raw_fd()), STORE, interest),
            None => Ok(()),
        }
    }

    /// The keeper exits on request, and only its twin and this server remain: starts another, if an init does not.
    fn start_successor(&mut self, context: &LoopContext<'_>) {
        let Some(link) = self.link.as_mut().filter(|link| link.starts_keeper()) else { return };
        if context.cancel.check().is_ok()
            && let Err(error) = link.start_another()
        {
            tracing::error!(%error, "cannot start another keeper");
        }
    }

    /// Replaces a keeper that is gone: connects to another and resends everything. If none is reachable, retries with increasing delays;
    /// puts wait until then.
    fn replace_keeper(&mut self, context: &mut LoopContext<'_>) {
        let now = Instant::now();
        let next_attempt = self.next_attempt.unwrap_or(now);
        if now < next_attempt {
            return context.timers.set_once(next_attempt.saturating_duration_since(now), Timer::Store);
        }
        let runs = self.keeper.as_ref().is_some_and(|keeper| !keeper.exits_within(Duration::ZERO));
        if runs && self.closed_since.get_or_insert(now).elapsed() < EXIT_GRACE {
            // Its death wakes the event loop earlier.
            return context.timers.set_once(EXIT_GRACE, Timer::Store);
        }
        self.closed_since = None;
        let has_closed = runs && !context.state.objects.store().keeper_stops();
        // A keeper that lived long is replaced at once, the next after a delay. A keeper that is still alive has closed the connection
        // itself and would soon do so again.
        let lived = now.saturating_duration_since(next_attempt);
        self.delay = match () {
            () if has_closed => MAX_DELAY,
            () if lived > LONG_LIFE => MIN_DELAY,
            // In small steps: until the next keeper has everything, a kill of this process loses it.
            () => (self.delay * 5 / 4).clamp(MIN_DELAY, MAX_DELAY),
        };
        self.next_attempt = Some(now + self.delay);
        if has_closed {
            let allowed = context.state.objects.store().room().1;
            if context.state.repeats.should_log(geteuid().as_raw(), "the keeper has closed the connection") {
                tracing::warn!(
                    allowed,
                    "the keeper is running but has closed the connection: check its descriptor limit (LimitNOFILE)"
                );
            }
            // A keeper that closes the connection has not crashed.
            context.state.objects.store_mut().take_crash();
        }
        self.note_crash(context);
        match self.reconnect(context) {
            Ok(Some(pid)) => {
                tracing::warn!(pid, "lost the keeper: sending all descriptors to its replacement");
                // Send at once: no other process has everything.
                context.state.objects.flush_store();
                context.timers.set_once(IN_FLIGHT_RETRY, Timer::Store);
            }
            // A later timer may be set already.
            Ok(None) => context.timers.set(self.delay, Timer::Store),
            Err(error) => {
                if context.state.repeats.should_log(geteuid().as_raw(), "no keeper can be reached") {
                    tracing::error!(%error, "no keeper can be reached: puts wait, and all memory is freed if this process dies now");
                }
                context.state.objects.store_mut().disconnect();
                context.timers.set(self.delay, Timer::Store);
            }
        }
    }

    /// Logs a keeper's crash.
    fn note_crash(&self, context: &mut LoopContext<'_>) {
        if context.state.objects.store_mut().take_crash() {
            tracing::warn!(pid = self.keeper_pid(), "the keeper crashed");
        }
    }

    /// Connects to another keeper and queues everything for it. Returns its pid; `None` while a keeper starts.
    fn reconnect(&mut self, context: &mut LoopContext<'_>) -> io::Result<Option<i32>> {
        let Some(link) = &mut self.link else { return Err(io::ErrorKind::NotConnected.into()) };
        let Some((socket, process)) = link.connect()? else { return Ok(None) };
        let pid = process.pid;
        (self.keeper, self.confirmation, self.read, self.exited) = (Some(process), None, 0, false);
        context.state.objects.store_mut().start_over(socket)?;
        self.register(context.state, context.registry)?;
        context.state.objects.resend();
        context.state.objects.store_mut().complete();
        context.state.objects.store_mut().serving();
        if self.leave_mark.is_some() {
            self.announce_leave(context);
        }
        Ok(Some(pid))
    }

    /// Kills a keeper that does not read.
    fn kill_keeper(&mut self) {
        self.confirmation = None;
        if let Some(process) = &self.keeper {
            process.kill();
        }
    }

    fn check_later(&self, context: &mut LoopContext<'_>) {
        let store = context.state.objects.store();
        // A long entry is queued until its last record is sent.
        if store.connection().is_some() && (store.sent() != self.read || store.has_queued()) {
            context.timers.set_once(context.limits.silence / 5, Timer::Keeper);
        }
    }

    /// Checks whether the keeper reads its messages. Replaces a keeper that does not, as it may be stopped.
    pub(super) fn check(&mut self, context: &mut LoopContext<'_>) {
        let store = context.state.objects.store();
        match self.confirmation {
            _ if store.is_greeted() && !store.is_unread() => {
                (self.confirmation, self.read) = (None, store.sent());
            }
            Some((mark, _)) if store.is_confirmed(mark) => self.confirmation = None,
            None => {
                self.confirmation = Some((context.state.objects.store_mut().sync(), Instant::now()));
            }
            Some((_, since)) if since.elapsed() > context.limits.silence => {
                let silence = context.limits.silence;
                tracing::error!("the keeper has read nothing for {silence:?}: killing and replacing it");
                context.state.objects.store_mut().disconnect();
                self.note_crash(context);
                self.kill_keeper();
            }
            Some(_) => {}
        }
        self.check_later(context);
    }

    /// Handles SIGHUP: exit once the keeper has confirmed everything, so that another server takes over.
    pub(super) fn start_leave(&mut self, context: &mut LoopContext<'_>) {
        if self.link.is_some() && self.leave_mark.is_none() {
            self.announce_leave(context);
        }
    }

    fn announce_leave(&mut self, context: &mut LoopContext<'_>) {
        // After SIGHUP, another server follows.
        let held = context.cancel.check().map_or_else(|_| summary(context.state.objects.total()), |()| String::new());
        context.state.objects.store_mut().stopping(held);
        self.leave_mark = Some(context.state.objects.store_mut().sync());
    }

    /// Whether another server can take over: a keeper has confirmed everything. Asks again if there was a change since.
    fn is_handed_over(&mut self, context: &mut LoopContext<'_>) -> bool {
        let store = context.state.objects.store();
        let Some(mark) = self.leave_mark.filter(|mark| store.is_confirmed(*mark)) else { return false };
        if store.mark() == mark {
            return true;
        }
        self.leave_mark = Some(context.state.objects.store_mut().sync());
        false
    }

    /// Whether clients must wait for the next server: each change would delay this server's exit.
    pub(super) fn is_leaving(&self, state: &State) -> bool {
        self.leave_mark.is_some() && state.objects.store().is_greeted()
    }

    /// Whether this server, which is asked to exit, ends its keeper too.
    fn ends_keeper(&self, context: &LoopContext<'_>) -> bool {
        let is_empty = context.state.objects.is_empty();
        context.cancel.check().is_err() && self.link.as_ref().is_some_and(|link| link.ends_keeper(is_empty))
    }

    /// Whether the event loop must stop.
    pub(super) fn should_stop(&mut self, context: &mut LoopContext<'_>) -> bool {
        let cancelled = context.cancel.check().is_err();
        if cancelled && (self.link.is_none() || self.ends_keeper(context)) {
            return true;
        }
        if cancelled && self.leave_deadline.is_none() {
            // This exit frees nothing: it waits until a keeper has everything.
            self.leave_deadline = Some(Instant::now() + context.limits.keeper);
            self.start_leave(context);
            context.timers.set(context.limits.keeper, Timer::Store);
        }
        self.is_handed_over(context) || self.leave_deadline.is_some_and(|deadline| Instant::now() >= deadline)
    }

    /// Ends the keeper if this server does that, and logs whether the server's objects are kept or freed.
    pub(super) fn report_end(&mut self, context: &mut LoopContext<'_>) {
        const FREED: &str = "the memory is freed, except where clients have it mapped";
        let held = summary(context.state.objects.total());
        if context.state.objects.store().keeper() == Keeper::None {
            tracing::info!("stopping: {FREED}");
        } else if self.ends_keeper(context) {
            tracing::info!("stopping server and keeper: {FREED}");
            self.ended_keeper = self.end_keeper(context, held);
        } else if self.is_handed_over(context) {
            tracing::info!(pid = self.keeper_pid(), "stopping: the keeper has everything");
        } else {
            let limit = context.limits.keeper;
            tracing::error!(held, "no keeper has confirmed everything after {limit:?}: freeing the rest");
            context.state.objects.log_names();
        }
    }

    /// Makes the keeper exit, and kills it if it does not. Returns whether it has exited.
    fn end_keeper(&mut self, context: &mut LoopContext<'_>, held: String) -> bool {
        let store = context.state.objects.store_mut();
        if store.connection().is_none()
            && let Some((socket, process)) = self.link.as_mut().and_then(|link| link.connect_if_there())
        {
            // Another keeper may hold a part of the objects.
            self.keeper = Some(process);
            let _ = store.start_over(socket);
        }
        store.exit(held);
        let deadline = Instant::now() + END_TIMEOUT;
        let has_exited = || self.keeper.as_ref().is_none_or(|keeper| keeper.exits_within(IN_FLIGHT_RETRY));
        while Instant::now() < deadline {
            context.state.objects.store_mut().read();
            context.state.objects.flush_store();
            if has_exited() {
                return true;
            }
        }
        tracing::warn!("the keeper does not exit: killing it");
        self.kill_keeper();
        self.keeper.as_ref().is_none_or(|keeper| keeper.exits_within(END_TIMEOUT))
    }
}

/// Describes a server's objects for the log.
fn summary(total: Total) -> String {
    let Total { counts: Counts { objects, versions, .. }, bytes } = total;
    format!("{}, {}, {} as claimed", count(objects, "object"), count(versions, "version"), about(bytes))
}
