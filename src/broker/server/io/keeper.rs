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
        server::state::{
            objects::{Counts, Total},
            root::State,
        },
    },
    channel::{Cancel, CancelReason, Listener},
    error::Error,
};

/// The keeper's connection in the event loop.
pub(super) const STORE: Key = Key(3);

/// Retry interval for sends that reached the kernel's limit of descriptors in flight.
pub(super) const IN_FLIGHT_PAUSE: Duration = Duration::from_millis(2);

/// Delays between connection attempts if keepers keep dying: the first; the maximum if this process starts the keeper; and if an init
/// starts it.
const PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
const LONGEST_PAUSE_BY_PATH: Duration = Duration::from_millis(200);

/// How often to check whether the keeper reads its messages, and for how long it may not read.
const LOOK_EVERY: Duration = Duration::from_secs(1);
const LONGEST_SILENCE: Duration = Duration::from_secs(5);

/// A terminating process closes its sockets up to this long before its pidfd becomes readable.
const DYING: Duration = Duration::from_millis(50);

/// How long a stopping server waits for the keeper to have everything.
const LONGEST_END: Duration = Duration::from_secs(10);

/// The keeper of this server.
#[derive(Debug, Default)]
pub(crate) struct Keeping {
    link: Option<Link>,
    keeper: Option<Process>,
    /// When the next keeper may be tried, and the delay after that attempt.
    next: Option<Instant>,
    pause: Duration,
    /// Triggered by SIGHUP: exit so that another server takes over.
    restart: Option<Cancel>,
    /// The keeper must confirm this mark before the server exits.
    end_mark: Option<Mark>,
    end_by: Option<Instant>,
    /// How much the keeper has read, and the confirmation it was asked for, with the time.
    read: u64,
    asked: Option<(Mark, Instant)>,
    /// Whether the keeper may have sent something.
    pub(super) readable: bool,
    /// Device nodes held open.
    devices: Vec<(u8, OwnedFd)>,
}

/// The parts of the event loop that the keeper code uses.
pub(super) struct Around<'a> {
    pub(super) state: &'a mut State,
    pub(super) timers: &'a mut Timers,
    pub(super) registry: &'a Registry,
    pub(super) listener: &'a Listener,
    pub(super) cancel: &'a Cancel,
}

impl Keeping {
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

impl Keeping {
    /// Sends queued messages to the keeper. If the keeper is gone, connects to another and resends everything.
    pub(super) fn flush(&mut self, around: &mut Around<'_>) {
        if std::mem::take(&mut self.readable) {
            around.state.objects.store_mut().read();
        }
        match around.state.objects.flush_store() {
            Flushed::All | Flushed::Full => {}
            Flushed::InFlight => around.timers.set_once(IN_FLIGHT_PAUSE, Timer::Store),
            Flushed::Gone => self.gone(around),
        }
        self.look_later(around);
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
    fn gone(&mut self, around: &mut Around<'_>) {
        let now = Instant::now();
        let keeping = &mut *self;
        let next = keeping.next.unwrap_or(now);
        if now < next {
            return around.timers.set_once(next.saturating_duration_since(now), Timer::Store);
        }
        // A keeper that lived long is replaced at once, the next after a delay. A keeper that is still alive has closed the connection
        // itself and would soon do so again.
        let lived = now.saturating_duration_since(next);
        let lives = |keeper: &Process| !keeper.ends_within(DYING);
        let has_closed = !keeping.starts_keeper() && keeping.keeper.as_ref().is_some_and(lives);
        let longest = if keeping.starts_keeper() { LONGEST_PAUSE } else { LONGEST_PAUSE_BY_PATH };
        keeping.pause = match () {
            () if has_closed => LONGEST_PAUSE,
            () if lived > LONGEST_PAUSE => PAUSE,
            () => (keeping.pause * 2).clamp(PAUSE, longest),
        };
        keeping.next = Some(now + keeping.pause);
        if has_closed {
            let allowed = around.state.objects.store().room().1;
            tracing::warn!(
                allowed,
                "the keeper is running but has closed the connection: check its descriptor limit (LimitNOFILE)"
            );
            // This was not a crash.
            around.state.objects.store_mut().take_crash();
        }
        self.note_crash(around);
        match self.begin_anew(around) {
            Ok(pid) => {
                tracing::warn!(pid, "the keeper was lost: sending everything to this one");
                // Pending versions are part of the resent set.
                let mark = around.state.objects.store().mark();
                around.state.storing.queue.iter_mut().for_each(|stored| stored.staged.mark = mark);
                // Send at once: no other process has everything.
                around.state.objects.flush_store();
                around.timers.set_once(IN_FLIGHT_PAUSE, Timer::Store);
            }
            Err(error) => {
                if around.state.repeats.is_first(geteuid().as_raw(), "no keeper can be reached") {
                    tracing::error!(%error, "no keeper can be reached: puts wait, and all memory is freed if this process dies now");
                }
                around.state.objects.store_mut().disconnect();
                around.timers.set_once(self.pause, Timer::Store);
            }
        }
    }

    /// Records a keeper crash in the history.
    fn note_crash(&self, around: &mut Around<'_>) {
        if around.state.objects.store_mut().take_crash() {
            let pid = self.keeper_pid().unwrap_or(0);
            around.state.history.keeper_crashed(pid, around.state.objects.store_mut());
        }
    }

    /// Connects to another keeper and queues everything for it. Returns its pid.
    fn begin_anew(&mut self, around: &mut Around<'_>) -> io::Result<i32> {
        let Some(link) = self.link.clone() else { return Err(io::ErrorKind::NotConnected.into()) };
        if self.starts_keeper() {
            // Two keepers would start two servers.
            self.end_keeper();
        }
        let (socket, process) = link.connect()?;
        let pid = process.pid;
        (self.keeper, self.asked, self.read) = (Some(process), None, 0);
        around.state.objects.store_mut().start_over(socket)?;
        self.register(around.state, around.registry)?;
        around.state.objects.keep_catalogue().map_err(io::Error::other)?;
        let socket = around.listener.as_fd().try_clone_to_owned()?;
        around.state.objects.store_mut().keep_own(Name::Socket, socket);
        around.state.history.keep(around.state.objects.store_mut())?;
        for (number, fd) in &self.devices {
            around.state.objects.store_mut().keep_own(Name::Device(*number), fd.try_clone()?);
        }
        around.state.objects.keep_segments();
        around.state.objects.store_mut().complete();
        around.state.objects.store_mut().serving();
        if self.end_mark.is_some() {
            self.end_mark = Some(around.state.objects.store_mut().sync());
        }
        Ok(pid)
    }

    fn end_keeper(&mut self) {
        self.asked = None;
        if let Some(process) = self.keeper.take() {
            process.kill();
        }
    }

    fn look_later(&self, around: &mut Around<'_>) {
        let store = around.state.objects.store();
        if store.connection().is_some() && store.sent() != self.read {
            around.timers.set_once(LOOK_EVERY, Timer::Keeper);
        }
    }

    /// Checks whether the keeper reads its messages. Replaces a keeper that does not, as it may be stopped.
    pub(super) fn look(&mut self, around: &mut Around<'_>) {
        let store = around.state.objects.store();
        match self.asked {
            _ if store.is_greeted() && !store.is_unread() => {
                (self.asked, self.read) = (None, store.sent());
            }
            Some((mark, _)) if store.is_confirmed(mark) => self.asked = None,
            None => {
                self.asked = Some((around.state.objects.store_mut().sync(), Instant::now()));
            }
            Some((_, since)) if since.elapsed() > LONGEST_SILENCE => {
                tracing::error!("the keeper has read nothing for {LONGEST_SILENCE:?}: killing and replacing it");
                around.state.objects.store_mut().disconnect();
                self.note_crash(around);
                self.end_keeper();
            }
            Some(_) => {}
        }
        self.look_later(around);
    }

    /// Handles SIGHUP: exit once the keeper has confirmed everything, so that another server takes over.
    pub(super) fn begin_end(&mut self, around: &mut Around<'_>) {
        if self.end_mark.is_none() {
            let mark = around.state.objects.store_mut().sync();
            self.end_mark = Some(mark);
        }
    }

    /// Whether another server can take over: a keeper has everything.
    fn may_end(&self, around: &Around<'_>) -> bool {
        self.end_mark.is_some_and(|mark| around.state.objects.store().is_confirmed(mark))
    }

    /// Whether the event loop must stop.
    pub(super) fn ends(&mut self, around: &mut Around<'_>) -> bool {
        let cancelled = around.cancel.check().is_err();
        if !cancelled || !self.keeper_stays() {
            return cancelled || self.may_end(around);
        }
        // This exit frees nothing: it waits until a keeper has everything.
        let now = Instant::now();
        let by = *self.end_by.get_or_insert_with(|| now + LONGEST_END);
        if self.end_mark.is_none() {
            self.begin_end(around);
            around.timers.set(LONGEST_END, Timer::Store);
        }
        self.may_end(around) || now >= by
    }

    /// Reports the fate of the server's objects to the keeper and the log.
    pub(super) fn report_end(&self, around: &mut Around<'_>, total: Total) {
        const FREED: &str = "the memory is freed, except where clients have it mapped";
        let Total { counts: Counts { objects, versions, .. }, bytes } = total;
        let held = format!("{objects} objects, {versions} versions, {bytes} bytes as claimed");
        match &self.keeper {
            _ if around.state.objects.store().keeper() == Keeper::None => {
                return tracing::info!(held, "stopping: {FREED}");
            }
            Some(keeper) if self.may_end(around) => {
                tracing::info!(pid = keeper.pid, held, "stopping: the keeper has everything")
            }
            _ if self.keeper_stays() => {
                tracing::error!(held, "no keeper has everything after {LONGEST_END:?}: freeing the rest");
                around.state.objects.report_unkept();
            }
            _ if is_hung_up(around.cancel) => {}
            _ => tracing::info!(held, "stopping server and keeper: {FREED}"),
        }
        around.state.history.end(around.state.objects.store_mut());
        if around.cancel.check().is_err() && (self.keeper_stays() || !is_hung_up(around.cancel)) {
            around.state.objects.store_mut().stopping(held);
        }
    }
}

/// Whether SIGHUP stopped this server, so that the next one takes over.
pub(super) fn is_hung_up(cancel: &Cancel) -> bool {
    matches!(cancel.check(), Err(Error::Interrupted { reason: CancelReason::Signal(nix::libc::SIGHUP) }))
}
