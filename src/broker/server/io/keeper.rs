//! The keeper as the event loop sees it: what waits for it, and what is done when it dies.

use std::{
    io,
    os::fd::{AsFd, AsRawFd},
    time::{Duration, Instant},
};

use mio::{Interest, unix::SourceFd};
use nix::unistd::geteuid;

use crate::broker::server::io::reactor::{IN_FLIGHT_PAUSE, Reactor, STORE, Timer};
use crate::{
    broker::keeper::{Flushed, Keeper, Link, Mark, Name, Process},
    channel::Cancel,
};

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
    /// Whether a timer to look after it is set.
    looks_later: bool,
    /// Whether the keeper may have sent something.
    pub(crate) readable: bool,
}

impl Keeping {
    pub(crate) fn new(link: Link, keeper: Process, restart: Option<Cancel>) -> Self {
        Self { link: Some(link), keeper: Some(keeper), restart, ..Self::default() }
    }

    /// The keeper's process, if there is a keeper that this PID namespace has.
    pub(crate) fn keeper_pid(&self) -> Option<u32> {
        self.keeper.as_ref().and_then(|keeper| u32::try_from(keeper.pid).ok()).filter(|pid| *pid > 0)
    }

    pub(crate) fn restart_request(&self) -> Option<&Cancel> {
        self.restart.as_ref()
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
    pub(crate) fn end_unused(&self) -> bool {
        self.link.as_ref().zip(self.keeper.as_ref()).is_some_and(|(link, keeper)| link.end_unused(keeper))
    }
}

impl Reactor {
    /// Sends the keeper what waits for it, and publishes what is kept.
    pub(crate) fn settle_store(&mut self) {
        if self.objects.store().keeper() == Keeper::None && self.storing.is_empty() {
            return;
        }
        if std::mem::take(&mut self.keeping.readable) {
            self.objects.store_mut().read();
        }
        loop {
            match self.objects.flush_store() {
                Flushed::All | Flushed::Full => {}
                Flushed::InFlight => self.settle_store_later(IN_FLIGHT_PAUSE),
                Flushed::Gone => self.keeper_gone(),
            }
            self.look_after_keeper_later();
            let kept = |storing: &mut crate::broker::server::verbs::put::Storing| {
                self.objects.store().has_kept(storing.staged.mark)
            };
            if !self.storing.front_mut().is_some_and(kept) {
                return;
            }
            if let Some(storing) = self.storing.pop_front() {
                self.stored(storing);
            }
        }
    }

    /// Has the loop wake when the keeper has read or sent something.
    pub(crate) fn watch_store(&mut self) -> io::Result<()> {
        let interest = Interest::READABLE | Interest::WRITABLE;
        match self.objects.store().connection() {
            Some(fd) => self.poll.registry().register(&mut SourceFd(&fd.as_raw_fd()), STORE, interest),
            None => Ok(()),
        }
    }

    /// Has [`Reactor::settle_store`] called then.
    fn settle_store_later(&mut self, after: Duration) {
        if !self.settles_later {
            self.settles_later = true;
            self.timer(after, Timer::Store);
        }
    }

    /// No keeper is connected: goes on with another one, which is sent everything. If there is none it is tried again, after longer and
    /// longer pauses. Puts wait meanwhile.
    fn keeper_gone(&mut self) {
        let now = Instant::now();
        let keeping = &mut self.keeping;
        let next = keeping.next.unwrap_or(now);
        if now < next {
            return self.settle_store_later(next.saturating_duration_since(now));
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
            let allowed = self.objects.store().room().1;
            tracing::warn!(
                allowed,
                "the keeper lives and has closed the connection: does it have too few descriptors (LimitNOFILE)?"
            );
            // It did not crash.
            self.objects.store_mut().take_crash();
        }
        self.note_crash();
        match self.begin_anew() {
            Ok(pid) => {
                tracing::warn!(pid, "no keeper was connected: this one is sent everything");
                // Whatever was on its way is among what is kept anew.
                let mark = self.objects.store().mark();
                self.storing.iter_mut().for_each(|storing| storing.staged.mark = mark);
                // At once: this process alone has everything meanwhile.
                self.objects.flush_store();
                self.settle_store_later(IN_FLIGHT_PAUSE);
            }
            Err(error) => {
                if self.is_logged(geteuid().as_raw(), "no keeper can be reached") {
                    tracing::error!(%error, "no keeper can be reached: puts wait, and the memory is freed if this process dies now");
                }
                self.objects.store_mut().disconnect();
                self.settle_store_later(self.keeping.pause);
            }
        }
    }

    /// Remembers that the keeper crashed, if it did.
    fn note_crash(&mut self) {
        if self.objects.store_mut().take_crash() {
            let pid = self.keeping.keeper_pid().unwrap_or(0);
            self.history.keeper_crashed(pid, self.objects.store_mut());
        }
    }

    /// Connects to another keeper, and has everything kept anew. Returns its pid.
    fn begin_anew(&mut self) -> io::Result<i32> {
        let Some(link) = self.keeping.link.clone() else { return Err(io::ErrorKind::NotConnected.into()) };
        if self.keeping.starts_keeper() {
            // Two would start two servers.
            self.end_keeper();
        }
        let (socket, process) = link.connect()?;
        let pid = process.pid;
        (self.keeping.keeper, self.keeping.asked, self.keeping.read) = (Some(process), None, 0);
        self.objects.store_mut().begin_anew(socket)?;
        self.watch_store()?;
        self.objects.keep_catalogue().map_err(io::Error::other)?;
        let socket = self.listener.as_fd().try_clone_to_owned()?;
        self.objects.store_mut().keep_own(Name::Socket, socket);
        self.history.keep(self.objects.store_mut())?;
        for (number, fd) in &self.devices {
            self.objects.store_mut().keep_own(Name::Device(*number), fd.try_clone()?);
        }
        self.objects.keep_segments();
        self.objects.store_mut().complete();
        self.objects.store_mut().serving();
        if self.keeping.end_mark.is_some() {
            self.keeping.end_mark = Some(self.objects.store_mut().sync());
        }
        Ok(pid)
    }

    /// Kills the keeper, if it lives.
    fn end_keeper(&mut self) {
        self.keeping.asked = None;
        if let Some(process) = self.keeping.keeper.take() {
            process.kill();
        }
    }

    fn look_after_keeper_later(&mut self) {
        let store = self.objects.store();
        if store.connection().is_some() && store.sent() != self.keeping.read && !self.keeping.looks_later {
            self.keeping.looks_later = true;
            self.timer(LOOK_EVERY, Timer::Keeper);
        }
    }

    /// Looks whether the keeper has read what was sent, and replaces it if it reads nothing: it may be stopped.
    pub(crate) fn look_after_keeper(&mut self) {
        self.keeping.looks_later = false;
        let store = self.objects.store();
        match self.keeping.asked {
            _ if store.is_greeted() && !store.is_unread() => {
                (self.keeping.asked, self.keeping.read) = (None, store.sent());
            }
            Some((mark, _)) if store.is_confirmed(mark) => self.keeping.asked = None,
            None => {
                self.keeping.asked = Some((self.objects.store_mut().sync(), Instant::now()));
                self.settle_store();
            }
            Some((_, since)) if since.elapsed() > LONGEST_SILENCE => {
                tracing::error!("the keeper has read nothing for {LONGEST_SILENCE:?}: it is killed and replaced");
                self.objects.store_mut().disconnect();
                self.note_crash();
                self.end_keeper();
                self.settle_store();
            }
            Some(_) => {}
        }
        self.look_after_keeper_later();
    }

    /// SIGHUP: another server is to go on with what the keeper has confirmed.
    pub(crate) fn begin_end(&mut self) {
        if self.keeping.end_mark.is_none() {
            let mark = self.objects.store_mut().sync();
            self.keeping.end_mark = Some(mark);
            // Nothing else may wake the loop of an idle server.
            self.settle_store();
        }
    }

    /// Whether this server was asked to end for another one, and a keeper has everything.
    fn may_end(&self) -> bool {
        self.keeping.end_mark.is_some_and(|mark| self.objects.store().is_confirmed(mark))
    }

    /// Whether the loop is to end.
    pub(crate) fn ends(&mut self) -> bool {
        let cancelled = self.cancel.check().is_err();
        if !cancelled || !self.keeping.keeper_stays() {
            return cancelled || self.may_end();
        }
        // It frees nothing, and so ends once a keeper has everything.
        let now = Instant::now();
        let by = *self.keeping.end_by.get_or_insert_with(|| now + LONGEST_END);
        if self.keeping.end_mark.is_none() {
            self.begin_end();
            self.timer(LONGEST_END, Timer::Store);
        }
        self.may_end() || now >= by
    }

    /// Reports what becomes of everything that this server held, to its keeper and in the log.
    pub(crate) fn report_end(&mut self, (objects, versions, _, bytes): (u64, u64, u64, u64)) {
        const FREED: &str = "the memory is freed, but for what clients have mapped";
        let held = format!("{objects} objects, {versions} versions, {bytes} bytes as claimed");
        match &self.keeping.keeper {
            _ if self.objects.store().keeper() == Keeper::None => return tracing::info!(held, "ends: {FREED}"),
            Some(keeper) if self.may_end() => tracing::info!(pid = keeper.pid, held, "ends: the keeper has everything"),
            _ if self.keeping.keeper_stays() => {
                tracing::error!(held, "no keeper has everything after {LONGEST_END:?}: the rest is freed");
                self.objects.report_unkept();
            }
            _ if self.is_hung_up() => {}
            _ => tracing::info!(held, "ends, and so does the keeper: {FREED}"),
        }
        self.history.end(self.objects.store_mut());
        if self.cancel.check().is_err() && (self.keeping.keeper_stays() || !self.is_hung_up()) {
            self.objects.store_mut().stopping(held);
        }
    }
}
