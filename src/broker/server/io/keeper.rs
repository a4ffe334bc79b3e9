//! The event loop's side of the keeper: queued messages, and recovery after the keeper dies.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    time::{Duration, Instant},
};

use mio::{Interest, Registry, Token as Key, unix::SourceFd};
use nix::unistd::geteuid;

use super::timers::{Timer, Timers};
use crate::{
    broker::{
        keeper::{Flushed, Keeper, Link, Mark, Name, Process},
        server::{
            limits::TimeLimits,
            state::{
                objects::{Counts, Total},
                root::State,
            },
        },
    },
    channel::{Cancel, CancelReason, Listener},
    error::{
        Error,
        units::{about, count},
    },
};

/// The keeper's connection in the event loop.
pub(super) const STORE: Key = Key(3);

/// Retry interval for sends that reached the kernel's limit on descriptors in flight.
pub(super) const IN_FLIGHT_RETRY: Duration = Duration::from_millis(2);

/// Delays between connection attempts if keepers keep dying: the first; the maximum if this process starts the keeper; and if an init
/// starts it.
const MIN_DELAY: Duration = Duration::from_millis(5);
const MAX_DELAY: Duration = Duration::from_secs(5);
const MAX_DELAY_BY_PATH: Duration = Duration::from_millis(200);

/// A terminating process closes its sockets up to this long before its pidfd becomes readable.
const EXIT_GRACE: Duration = Duration::from_millis(50);

/// The keeper of this server.
#[derive(Debug, Default)]
pub(crate) struct KeeperLink {
    link: Option<Link>,
    keeper: Option<Process>,
    /// When the next keeper may be tried, and the delay after that attempt.
    next_attempt: Option<Instant>,
    delay: Duration,
    /// Triggered by SIGHUP: exit so that another server takes over.
    restart: Option<Cancel>,
    /// The keeper must confirm this mark before the server exits.
    shutdown_mark: Option<Mark>,
    shutdown_deadline: Option<Instant>,
    /// How many items the keeper has read, and the pending confirmation with the time of the request.
    read: u64,
    confirmation: Option<(Mark, Instant)>,
    /// Whether the keeper may have sent something.
    pub(super) readable: bool,
    /// Device nodes held open.
    devices: Vec<(u8, OwnedFd)>,
}

/// The parts of the event loop that the keeper code uses.
pub(super) struct LoopContext<'a> {
    pub(super) state: &'a mut State,
    pub(super) timers: &'a mut Timers,
    pub(super) registry: &'a Registry,
    pub(super) listener: &'a Listener,
    pub(super) limits: &'a TimeLimits,
    pub(super) cancel: &'a Cancel,
}

impl KeeperLink {
    pub(crate) fn new(link: Link, keeper: Process, restart: Option<Cancel>) -> Self {
        Self { link: Some(link), keeper: Some(keeper), restart, ..Self::default() }
    }

    /// The keeper's process, if it is visible in this PID namespace.
    pub(super) fn keeper_pid(&self) -> Option<u32> {
        self.keeper.as_ref().and_then(|keeper| u32::try_from(keeper.pid).ok()).filter(|pid| *pid > 0)
    }

    pub(super) fn restart_request(&self) -> Option<&Cancel> {
        self.restart.as_ref()
    }

    pub(crate) fn holding(self, devices: Vec<(u8, OwnedFd)>) -> Self {
        Self { devices, ..self }
    }

    /// Whether this process starts its keeper.
    fn starts_keeper(&self) -> bool {
        self.link.as_ref().is_some_and(Link::starts_keeper)
    }

    /// Whether the keeper stays after this server is asked to exit.
    fn keeper_stays(&self) -> bool {
        self.link.as_ref().is_some_and(Link::keeper_stays)
    }

    /// Stops the keeper of an embedded server that has no versions. Returns whether no keeper is left.
    pub(super) fn end_unused(&self) -> bool {
        self.link.as_ref().zip(self.keeper.as_ref()).is_some_and(|(link, keeper)| link.end_unused(keeper))
    }
}

impl KeeperLink {
    /// Sends queued messages to the keeper. If the keeper is gone, connects to another and resends everything.
    pub(super) fn flush(&mut self, context: &mut LoopContext<'_>) {
        if std::mem::take(&mut self.readable) {
            context.state.objects.store_mut().read();
        }
        match context.state.objects.flush_store() {
            Flushed::All | Flushed::Full => {}
            Flushed::InFlight => context.timers.set_once(IN_FLIGHT_RETRY, Timer::Store),
            Flushed::Gone => self.replace_keeper(context),
        }
        self.check_later(context);
    }

    /// Registers the keeper's connection with the event loop.
    pub(super) fn register(&self, state: &State, registry: &Registry) -> io::Result<()> {
        let interest = Interest::READABLE | Interest::WRITABLE;
        match state.objects.store().connection() {
            Some(fd) => registry.register(&mut SourceFd(&fd.as_raw_fd()), STORE, interest),
            None => Ok(()),
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
        // A keeper that lived long is replaced at once, the next after a delay. A keeper that is still alive has closed the connection
        // itself and would soon do so again.
        let lived = now.saturating_duration_since(next_attempt);
        let lives = |keeper: &Process| !keeper.exits_within(EXIT_GRACE);
        let has_closed = !self.starts_keeper() && self.keeper.as_ref().is_some_and(lives);
        let max_delay = if self.starts_keeper() { MAX_DELAY } else { MAX_DELAY_BY_PATH };
        self.delay = match () {
            () if has_closed => MAX_DELAY,
            () if lived > MAX_DELAY => MIN_DELAY,
            () => (self.delay * 2).clamp(MIN_DELAY, max_delay),
        };
        self.next_attempt = Some(now + self.delay);
        if has_closed {
            let allowed = context.state.objects.store().room().1;
            tracing::warn!(
                allowed,
                "the keeper is running but has closed the connection: check its descriptor limit (LimitNOFILE)"
            );
            // A keeper that closes the connection has not crashed.
            context.state.objects.store_mut().take_crash();
        }
        self.note_crash(context);
        match self.reconnect(context) {
            Ok(pid) => {
                tracing::warn!(pid, "lost the keeper: sending all descriptors to its replacement");
                // Pending versions are part of the resent set.
                let mark = context.state.objects.store().mark();
                context.state.pending_versions.queue.iter_mut().for_each(|stored| stored.staged.mark = mark);
                // Send at once: no other process has everything.
                context.state.objects.flush_store();
                context.timers.set_once(IN_FLIGHT_RETRY, Timer::Store);
            }
            Err(error) => {
                if context.state.repeats.should_log(geteuid().as_raw(), "no keeper can be reached") {
                    tracing::error!(%error, "no keeper can be reached: puts wait, and all memory is freed if this process dies now");
                }
                context.state.objects.store_mut().disconnect();
                context.timers.set_once(self.delay, Timer::Store);
            }
        }
    }

    /// Records a keeper crash in the history.
    fn note_crash(&self, context: &mut LoopContext<'_>) {
        if context.state.objects.store_mut().take_crash() {
            let pid = self.keeper_pid().unwrap_or(0);
            context.state.history.record_keeper_crash(pid, context.state.objects.store_mut());
        }
    }

    /// Connects to another keeper and queues everything for it. Returns its pid.
    fn reconnect(&mut self, context: &mut LoopContext<'_>) -> io::Result<i32> {
        let Some(link) = self.link.clone() else { return Err(io::ErrorKind::NotConnected.into()) };
        if self.starts_keeper() {
            // Two keepers would start two servers.
            self.end_keeper();
        }
        let (socket, process) = link.connect()?;
        let pid = process.pid;
        (self.keeper, self.confirmation, self.read) = (Some(process), None, 0);
        context.state.objects.store_mut().start_over(socket)?;
        self.register(context.state, context.registry)?;
        context.state.objects.resend_catalogue().map_err(io::Error::other)?;
        let socket = context.listener.as_fd().try_clone_to_owned()?;
        context.state.objects.store_mut().keep_own(Name::Socket, socket);
        context.state.history.hand_to(context.state.objects.store_mut())?;
        for (number, fd) in &self.devices {
            context.state.objects.store_mut().keep_own(Name::Device(*number), fd.try_clone()?);
        }
        context.state.objects.resend_segments();
        context.state.objects.store_mut().complete();
        context.state.objects.store_mut().serving();
        if self.shutdown_mark.is_some() {
            self.shutdown_mark = Some(context.state.objects.store_mut().sync());
        }
        Ok(pid)
    }

    fn end_keeper(&mut self) {
        self.confirmation = None;
        if let Some(process) = self.keeper.take() {
            process.kill();
        }
    }

    fn check_later(&self, context: &mut LoopContext<'_>) {
        let store = context.state.objects.store();
        if store.connection().is_some() && store.sent() != self.read {
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
                self.end_keeper();
            }
            Some(_) => {}
        }
        self.check_later(context);
    }

    /// Handles SIGHUP: exit once the keeper has confirmed everything, so that another server takes over.
    pub(super) fn start_shutdown(&mut self, context: &mut LoopContext<'_>) {
        if self.shutdown_mark.is_none() {
            let mark = context.state.objects.store_mut().sync();
            self.shutdown_mark = Some(mark);
        }
    }

    /// Whether another server can take over: a keeper has everything.
    fn is_handed_over(&self, context: &LoopContext<'_>) -> bool {
        self.shutdown_mark.is_some_and(|mark| context.state.objects.store().is_confirmed(mark))
    }

    /// Whether the event loop must stop.
    pub(super) fn should_stop(&mut self, context: &mut LoopContext<'_>) -> bool {
        let cancelled = context.cancel.check().is_err();
        if !cancelled || !self.keeper_stays() {
            return cancelled || self.is_handed_over(context);
        }
        // This exit frees nothing: it waits until a keeper has everything.
        let now = Instant::now();
        let deadline = *self.shutdown_deadline.get_or_insert_with(|| now + context.limits.keeper);
        if self.shutdown_mark.is_none() {
            self.start_shutdown(context);
            context.timers.set(context.limits.keeper, Timer::Store);
        }
        self.is_handed_over(context) || now >= deadline
    }

    /// Reports to the keeper and the log whether the server's objects are kept or freed.
    pub(super) fn report_end(&self, context: &mut LoopContext<'_>, total: Total) {
        const FREED: &str = "the memory is freed, except where clients have it mapped";
        let Total { counts: Counts { objects, versions, .. }, bytes } = total;
        let (objects, versions) = (count(objects, "object"), count(versions, "version"));
        let held = format!("{objects}, {versions}, {} as claimed", about(bytes));
        match &self.keeper {
            _ if context.state.objects.store().keeper() == Keeper::None => {
                return tracing::info!("stopping: {FREED}");
            }
            Some(keeper) if self.is_handed_over(context) => {
                tracing::info!(pid = keeper.pid, "stopping: the keeper has everything")
            }
            _ if self.keeper_stays() => {
                let limit = context.limits.keeper;
                tracing::error!(held, "no keeper has confirmed everything after {limit:?}: freeing the rest");
                context.state.objects.log_lost_versions();
            }
            _ if stopped_by_sighup(context.cancel) => {}
            _ => tracing::info!("stopping server and keeper: {FREED}"),
        }
        context.state.history.end(context.state.objects.store_mut());
        if context.cancel.check().is_err() && (self.keeper_stays() || !stopped_by_sighup(context.cancel)) {
            context.state.objects.store_mut().stopping(held);
        }
    }
}

/// Whether SIGHUP stopped this server, so that the next one takes over.
pub(super) fn stopped_by_sighup(cancel: &Cancel) -> bool {
    matches!(cancel.check(), Err(Error::Interrupted { reason: CancelReason::Signal(nix::libc::SIGHUP) }))
}
