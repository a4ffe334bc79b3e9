//! The store as the event loop sees it: what waits for it, and what is done when its keeper dies.

use std::{
    io,
    os::fd::{AsFd, AsRawFd},
    time::{Duration, Instant},
};

use mio::{Interest, unix::SourceFd};

use super::reactor::{BARRIER, IN_FLIGHT_PAUSE, LIFE, Reactor, STORE, SWEEP, Timer};
use crate::broker::{
    store::{Flushed, Keeper, Name},
    supervisor::{self, Another},
};

/// How long to wait before the next supervisor is started, if one dies again soon; and that at most.
const PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

impl Reactor {
    /// Sends the store what waits for it, and publishes what it has kept.
    pub(super) fn settle_store(&mut self) {
        if self.objects.store().keeper() == Keeper::None && self.storing.is_empty() {
            return;
        }
        if self.objects.store_mut().passed_barrier().is_some() {
            // Closed, and with it no longer watched.
            self.watches_barrier = false;
        }
        loop {
            let mark = self.storing.back().map(|storing| storing.staged.mark);
            match self.objects.flush_store(mark) {
                Flushed::All | Flushed::Full => {}
                Flushed::InFlight => self.settle_store_later(IN_FLIGHT_PAUSE),
                Flushed::Gone => self.keeper_gone(),
            }
            self.watch_barrier();
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
        self.life = None;
        self.objects.store_mut().forget_keeper();
        if now < self.next_supervisor {
            return self.settle_store_later(self.next_supervisor.saturating_duration_since(now));
        }
        // One that lived for long is replaced at once, and the next one after a pause.
        let lived = now.saturating_duration_since(self.next_supervisor);
        self.supervisor_pause =
            if lived > LONGEST_PAUSE { PAUSE } else { (self.supervisor_pause * 2).clamp(PAUSE, LONGEST_PAUSE) };
        self.next_supervisor = now + self.supervisor_pause;
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
                (self.supervisor, self.life) = (None, None);
                self.objects.store_mut().forget_keeper();
                self.settle_store_later(self.supervisor_pause);
            }
        }
    }

    fn begin_anew(&mut self) -> io::Result<()> {
        self.supervisor = None;
        let Another { child, socket, life } = supervisor::start_another()?;
        socket.set_nonblocking(true)?;
        (self.supervisor, self.life) = (Some(child), Some(life));
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

    /// Has the loop wake when the supervisor dies.
    pub(super) fn watch_life(&mut self) -> io::Result<()> {
        match &self.life {
            Some(life) => {
                let registry = self.poll.registry();
                registry.register(&mut SourceFd(&life.as_raw_fd()), LIFE, Interest::READABLE)
            }
            None => Ok(()),
        }
    }
}
