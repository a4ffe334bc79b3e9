//! The store as the event loop sees it: what waits for it, and what is done when its keeper dies.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    time::{Duration, Instant},
};

use mio::{Interest, unix::SourceFd};

use super::reactor::{BARRIER, IN_FLIGHT_PAUSE, LIFE, Reactor, STORE, SWEEP, Timer};
use crate::{
    broker::{
        store::{Flushed, Keeper, Mark, Name},
        supervisor::{self, Another, SupervisorProcess},
    },
    channel::Cancel,
};

/// How long to wait before the next supervisor is started, if one dies again soon; and that at most.
const PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// How often the supervisor is asked whether it has read what was sent since, and how long it may take to answer.
const ASK_EVERY: Duration = Duration::from_secs(1);
const LONGEST_ANSWER: Duration = Duration::from_secs(5);

/// The supervisor, as its server sees it.
#[derive(Debug, Default)]
pub(super) struct Supervision {
    /// The pipe that ends with it.
    life: Option<OwnedFd>,
    process: Option<SupervisorProcess>,
    /// When the next one may be started, and how long to wait for the one after that.
    next: Option<Instant>,
    pause: Duration,
    /// What SIGHUP requests: to end for another server. And the point that the supervisor must have confirmed by then.
    restart: Option<Cancel>,
    restart_mark: Option<Mark>,
    /// What it was asked to confirm, and since when it was silent.
    asked: Option<(Mark, Instant)>,
    /// Whether a timer to look after it is set.
    checks_later: bool,
}

impl Supervision {
    /// Of the supervisor that started this process.
    pub(super) fn of(life: Option<OwnedFd>, process: Option<SupervisorProcess>, restart: Option<Cancel>) -> Self {
        Self { life, process, restart, ..Self::default() }
    }

    pub(super) fn restart_request(&self) -> Option<&Cancel> {
        self.restart.as_ref()
    }
}

impl Reactor {
    /// Sends the store what waits for it, and publishes what it has kept.
    pub(super) fn settle_store(&mut self) {
        if self.objects.store().keeper() == Keeper::None && self.storing.is_empty() {
            return;
        }
        if self.objects.store_mut().passed_barrier().is_some() {
            // Closed, and with it no longer watched.
            self.watches_barrier = false;
            self.supervision.asked = None;
        }
        loop {
            let mark = match self.objects.store().keeper() {
                Keeper::Supervisor => self.supervision.restart_mark.or(self.supervision.asked.map(|(mark, _)| mark)),
                _ => self.storing.back().map(|storing| storing.staged.mark),
            };
            match self.objects.flush_store(mark) {
                Flushed::All | Flushed::Full => {}
                Flushed::InFlight => self.settle_store_later(IN_FLIGHT_PAUSE),
                Flushed::Gone => self.keeper_gone(),
            }
            self.watch_barrier();
            self.check_supervisor_later();
            let kept = |storing: &mut super::puts::Storing| self.objects.store().has_kept(storing.staged.mark);
            if !self.storing.front_mut().is_some_and(kept) {
                return;
            }
            if let Some(storing) = self.storing.pop_front() {
                self.stored(storing);
            }
        }
    }

    /// Has the loop wake when the store's socket has room again.
    pub(super) fn watch_store(&mut self) -> io::Result<()> {
        match self.objects.store().sources().0 {
            Some(fd) => self.poll.registry().register(&mut SourceFd(&fd.as_raw_fd()), STORE, Interest::WRITABLE),
            None => Ok(()),
        }
    }

    fn watch_barrier(&mut self) {
        let Some(fd) = self.objects.store().sources().1.filter(|_| !self.watches_barrier) else { return };
        match self.poll.registry().register(&mut SourceFd(&fd.as_raw_fd()), BARRIER, Interest::READABLE) {
            Ok(()) => self.watches_barrier = true,
            Err(error) => {
                tracing::error!(%error, "a barrier can't be watched");
                self.settle_store_later(IN_FLIGHT_PAUSE);
            }
        }
    }

    /// Has [`Reactor::settle_store`] called then.
    fn settle_store_later(&mut self, after: Duration) {
        if !self.settles_later {
            self.settles_later = true;
            self.timer(after, Timer::Store);
        }
    }

    /// The process that keeps the descriptors is gone.
    fn keeper_gone(&mut self) {
        match self.objects.store().keeper() {
            Keeper::Supervisor => self.supervisor_gone(),
            // It keeps what it has, and is soon there again.
            _ => {
                let connected = self.objects.store_mut().connect_again().and_then(|()| self.watch_store());
                if let Err(error) = connected {
                    tracing::warn!(%error, "the store of descriptors can't be reached: puts wait for it");
                }
                self.settle_store_later(SWEEP);
            }
        }
    }

    /// The supervisor has died: starts another, which keeps everything anew. If that fails it is tried again, after longer and longer
    /// pauses; meanwhile what is put is kept by this process alone.
    pub(super) fn supervisor_gone(&mut self) {
        let now = Instant::now();
        if self.objects.store().keeper() != Keeper::Supervisor {
            return;
        }
        // Watched no longer, with its end closed. Without a socket the next look at the store comes back here.
        self.supervision.life = None;
        self.objects.store_mut().forget_keeper();
        let supervision = &mut self.supervision;
        let next = supervision.next.unwrap_or(now);
        if now < next {
            return self.settle_store_later(next.saturating_duration_since(now));
        }
        // One that lived for long is replaced at once, and the next one after a pause.
        let lived = now.saturating_duration_since(next);
        supervision.pause =
            if lived > LONGEST_PAUSE { PAUSE } else { (supervision.pause * 2).clamp(PAUSE, LONGEST_PAUSE) };
        supervision.next = Some(now + supervision.pause);
        tracing::warn!("the supervisor is gone: another is started");
        match self.begin_anew() {
            Ok(()) => {
                // Whatever was on its way is among what is kept anew.
                let mark = self.objects.store().mark();
                self.storing.iter_mut().for_each(|storing| storing.staged.mark = mark);
                self.settle_store_later(Duration::ZERO);
            }
            Err(error) => {
                tracing::error!(%error, "no supervisor can be started: what the broker holds is lost if it dies now");
                self.end_supervisor();
                self.objects.store_mut().forget_keeper();
                self.settle_store_later(self.supervision.pause);
            }
        }
    }

    fn begin_anew(&mut self) -> io::Result<()> {
        self.end_supervisor();
        let Another { process, socket, life } = supervisor::start_another()?;
        (self.supervision.process, self.supervision.life) = (Some(process), Some(life));
        socket.set_nonblocking(true)?;
        // The barrier of the supervisor before is closed, and with it no longer watched.
        self.watches_barrier = false;
        self.objects.store_mut().begin_anew(socket);
        self.watch_store()?;
        self.watch_life()?;
        self.objects.keep_anew().map_err(io::Error::other)?;
        for (number, fd) in &self.devices {
            self.objects.store_mut().keep_own(Name::Device(*number), fd.try_clone()?);
        }
        let socket = self.listener.as_fd().try_clone_to_owned()?;
        self.objects.store_mut().keep_own(Name::Socket, socket);
        self.objects.store_mut().say("READY=1");
        Ok(())
    }

    /// Kills the supervisor, if it lives: two would start two servers.
    fn end_supervisor(&mut self) {
        (self.supervision.life, self.supervision.asked) = (None, None);
        if let Some(process) = self.supervision.process.take() {
            process.kill();
        }
    }

    fn check_supervisor_later(&mut self) {
        let store = self.objects.store();
        let confirmed = store.keeper() != Keeper::Supervisor || store.is_confirmed(store.mark());
        if !confirmed && !self.supervision.checks_later {
            self.supervision.checks_later = true;
            self.timer(ASK_EVERY, Timer::Supervisor);
        }
    }

    /// Asks the supervisor whether it has read what was sent to it, and replaces it if it does not read: it may be stopped.
    pub(super) fn check_supervisor(&mut self) {
        self.supervision.checks_later = false;
        match self.supervision.asked {
            None => {
                self.supervision.asked = Some((self.objects.store().mark(), Instant::now()));
                self.settle_store();
            }
            Some((_, since)) if since.elapsed() > LONGEST_ANSWER && self.objects.store().is_unread() => {
                tracing::error!("the supervisor has read nothing for {LONGEST_ANSWER:?}: it is killed and replaced");
                self.end_supervisor();
                self.supervisor_gone();
            }
            Some(_) => {}
        }
        self.check_supervisor_later();
    }

    /// SIGHUP: another server is to go on with what the supervisor has confirmed.
    pub(super) fn begin_restart(&mut self) {
        if self.supervision.restart_mark.is_none() {
            let mark = self.objects.store_mut().new_mark();
            self.supervision.restart_mark = Some(mark);
            self.supervision.asked = Some((mark, Instant::now()));
        }
    }

    /// Whether this server was asked to end for another one, and a supervisor has everything.
    pub(super) fn may_restart(&self) -> bool {
        self.supervision.restart_mark.is_some_and(|mark| self.objects.store().is_confirmed(mark))
    }

    /// Has the loop wake when the supervisor dies.
    pub(super) fn watch_life(&mut self) -> io::Result<()> {
        match &self.supervision.life {
            Some(life) => {
                let registry = self.poll.registry();
                registry.register(&mut SourceFd(&life.as_raw_fd()), LIFE, Interest::READABLE)
            }
            None => Ok(()),
        }
    }
}
