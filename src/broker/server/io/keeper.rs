//! The keeper as the event loop sees it: what waits for it, and what is done when it dies.

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

/// The keeper's connection, among what the event loop waits for.
pub(super) const STORE: Key = Key(3);

/// How long to wait before a send is tried again that met the kernel's bound on descriptors in flight.
pub(super) const IN_FLIGHT_PAUSE: Duration = Duration::from_millis(2);

/// How long to wait before the next try to reach a keeper, if one dies again soon; and that at most, where this process starts it and
/// where an init does.
const PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
const LONGEST_PAUSE_BY_PATH: Duration = Duration::from_millis(200);

/// How often to look whether the keeper reads what was sent, and for how long it may read nothing.
const LOOK_EVERY: Duration = Duration::from_secs(1);
const LONGEST_SILENCE: Duration = Duration::from_secs(5);

/// How long a process that ends keeps its pidfd unreadable after its sockets are closed.
const DYING: Duration = Duration::from_millis(50);

/// How long a server that is asked to end waits for a keeper that has everything.
const LONGEST_END: Duration = Duration::from_secs(10);

/// The keeper of this server.
#[derive(Debug, Default)]
pub(crate) struct Keeping {
    /// `None` without a keeper.
    link: Option<Link>,
    keeper: Option<Process>,
    /// When the next keeper may be tried, and how long to wait for the one after that.
    next: Option<Instant>,
    pause: Duration,
    /// The request of SIGHUP: to end for another server.
    restart: Option<Cancel>,
    /// Before it ends a keeper must have confirmed this.
    end_mark: Option<Mark>,
    end_by: Option<Instant>,
    /// How much the keeper is known to have read, and what it was asked to confirm, since when.
    read: u64,
    asked: Option<(Mark, Instant)>,
    /// Whether the keeper may have sent something.
    pub(super) readable: bool,
    /// The nodes of devices that are held open.
    devices: Vec<(u8, OwnedFd)>,
}

/// The rest of the event loop, as far as the keeper concerns it.
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

    /// The keeper's process, if there is a keeper that this PID namespace has.
    pub(super) fn keeper_pid(&self) -> Option<u32> {
        self.keeper.as_ref().and_then(|keeper| u32::try_from(keeper.pid).ok()).filter(|pid| *pid > 0)
    }

    pub(super) fn restart_request(&self) -> Option<&Cancel> {
        self.restart.as_ref()
    }

    /// Holds these nodes of devices open.
    pub(crate) fn holding(self, devices: Vec<(u8, OwnedFd)>) -> Self {
        Self { devices, ..self }
    }

    /// Whether this process starts its keepers.
    fn starts_keeper(&self) -> bool {
        self.link.as_ref().is_some_and(Link::starts_keeper)
    }

    /// Whether the keeper stays when this server was asked to end.
    fn keeper_stays(&self) -> bool {
        self.link.as_ref().is_some_and(Link::keeper_stays)
    }

    /// Ends the keeper of an embedded server that has no versions. Returns whether no keeper is left.
    pub(super) fn end_unused(&self) -> bool {
        self.link.as_ref().zip(self.keeper.as_ref()).is_some_and(|(link, keeper)| link.end_unused(keeper))
    }
}

impl Keeping {
    /// Sends the keeper what waits for it. Once the keeper is gone, another one is sent everything.
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

    /// Has the loop wake when the keeper has read or sent something.
    pub(super) fn register(&self, state: &State, registry: &Registry) -> io::Result<()> {
        let interest = Interest::READABLE | Interest::WRITABLE;
        match state.objects.store().connection() {
            Some(fd) => registry.register(&mut SourceFd(&fd.as_raw_fd()), STORE, interest),
            None => Ok(()),
        }
    }

    /// No keeper is connected: goes on with another one, which is sent everything. If there is none it is tried again, after longer and
    /// longer pauses. Puts wait meanwhile.
    fn gone(&mut self, around: &mut Around<'_>) {
        let now = Instant::now();
        let keeping = &mut *self;
        let next = keeping.next.unwrap_or(now);
        if now < next {
            return around.timers.set_once(next.saturating_duration_since(now), Timer::Store);
        }
        // One that lived for long is replaced at once, and the next one after a pause. One that lives has closed the connection, and would
        // soon do it again.
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
                "the keeper lives and has closed the connection: does it have too few descriptors (LimitNOFILE)?"
            );
            // It did not crash.
            around.state.objects.store_mut().take_crash();
        }
        self.note_crash(around);
        match self.begin_anew(around) {
            Ok(pid) => {
                tracing::warn!(pid, "no keeper was connected: this one is sent everything");
                // Whatever was on its way is among what is kept anew.
                let mark = around.state.objects.store().mark();
                around.state.storing.queue.iter_mut().for_each(|stored| stored.staged.mark = mark);
                // At once: this process alone has everything meanwhile.
                around.state.objects.flush_store();
                around.timers.set_once(IN_FLIGHT_PAUSE, Timer::Store);
            }
            Err(error) => {
                if around.state.repeats.is_first(geteuid().as_raw(), "no keeper can be reached") {
                    tracing::error!(%error, "no keeper can be reached: puts wait, and the memory is freed if this process dies now");
                }
                around.state.objects.store_mut().disconnect();
                around.timers.set_once(self.pause, Timer::Store);
            }
        }
    }

    /// Remembers that the keeper crashed, if it did.
    fn note_crash(&self, around: &mut Around<'_>) {
        if around.state.objects.store_mut().take_crash() {
            let pid = self.keeper_pid().unwrap_or(0);
            around.state.history.keeper_crashed(pid, around.state.objects.store_mut());
        }
    }

    /// Connects to another keeper, and has everything kept anew. Returns its pid.
    fn begin_anew(&mut self, around: &mut Around<'_>) -> io::Result<i32> {
        let Some(link) = self.link.clone() else { return Err(io::ErrorKind::NotConnected.into()) };
        if self.starts_keeper() {
            // Two would start two servers.
            self.end_keeper();
        }
        let (socket, process) = link.connect()?;
        let pid = process.pid;
        (self.keeper, self.asked, self.read) = (Some(process), None, 0);
        around.state.objects.store_mut().begin_anew(socket)?;
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

    /// Kills the keeper, if it lives.
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

    /// Looks whether the keeper has read what was sent, and replaces it if it reads nothing: it may be stopped.
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
                tracing::error!("the keeper has read nothing for {LONGEST_SILENCE:?}: it is killed and replaced");
                around.state.objects.store_mut().disconnect();
                self.note_crash(around);
                self.end_keeper();
            }
            Some(_) => {}
        }
        self.look_later(around);
    }

    /// SIGHUP: another server is to go on with what the keeper has confirmed.
    pub(super) fn begin_end(&mut self, around: &mut Around<'_>) {
        if self.end_mark.is_none() {
            let mark = around.state.objects.store_mut().sync();
            self.end_mark = Some(mark);
        }
    }

    /// Whether this server was asked to end for another one, and a keeper has everything.
    fn may_end(&self, around: &Around<'_>) -> bool {
        self.end_mark.is_some_and(|mark| around.state.objects.store().is_confirmed(mark))
    }

    /// Whether the loop is to end.
    pub(super) fn ends(&mut self, around: &mut Around<'_>) -> bool {
        let cancelled = around.cancel.check().is_err();
        if !cancelled || !self.keeper_stays() {
            return cancelled || self.may_end(around);
        }
        // It frees nothing, and so ends once a keeper has everything.
        let now = Instant::now();
        let by = *self.end_by.get_or_insert_with(|| now + LONGEST_END);
        if self.end_mark.is_none() {
            self.begin_end(around);
            around.timers.set(LONGEST_END, Timer::Store);
        }
        self.may_end(around) || now >= by
    }

    /// Reports what becomes of everything that this server held, to its keeper and in the log.
    pub(super) fn report_end(&self, around: &mut Around<'_>, total: Total) {
        const FREED: &str = "the memory is freed, but for what clients have mapped";
        let Total { counts: Counts { objects, versions, .. }, bytes } = total;
        let held = format!("{objects} objects, {versions} versions, {bytes} bytes as claimed");
        match &self.keeper {
            _ if around.state.objects.store().keeper() == Keeper::None => return tracing::info!(held, "ends: {FREED}"),
            Some(keeper) if self.may_end(around) => {
                tracing::info!(pid = keeper.pid, held, "ends: the keeper has everything")
            }
            _ if self.keeper_stays() => {
                tracing::error!(held, "no keeper has everything after {LONGEST_END:?}: the rest is freed");
                around.state.objects.report_unkept();
            }
            _ if is_hung_up(around.cancel) => {}
            _ => tracing::info!(held, "ends, and so does the keeper: {FREED}"),
        }
        around.state.history.end(around.state.objects.store_mut());
        if around.cancel.check().is_err() && (self.keeper_stays() || !is_hung_up(around.cancel)) {
            around.state.objects.store_mut().stopping(held);
        }
    }
}

/// Whether SIGHUP ended this server: the next one goes on.
pub(super) fn is_hung_up(cancel: &Cancel) -> bool {
    matches!(cancel.check(), Err(Error::Interrupted { reason: CancelReason::Signal(nix::libc::SIGHUP) }))
}
