//! The store as the event loop sees it: what waits for it, and what is done when its keeper dies.

use std::{io, os::fd::AsRawFd};

use mio::{Interest, unix::SourceFd};

use super::reactor::{BARRIER, Reactor, STORE, Timer};
use crate::broker::{
    store::{Flushed, Keeper, Name},
    supervisor,
};

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
                Flushed::InFlight => self.timer(super::reactor::IN_FLIGHT_PAUSE, Timer::Store),
                Flushed::Gone => self.keeper_gone(),
            }
            self.watch_barrier();
            let kept = |storing: &mut super::puts::Storing| self.objects.store().has_kept(storing.staged.mark);
            let Some(storing) = self.storing.pop_front_if(kept) else { return };
            self.stored(storing);
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
                self.timer(super::reactor::IN_FLIGHT_PAUSE, Timer::Store);
            }
        }
    }

    /// The process that keeps the descriptors is gone.
    fn keeper_gone(&mut self) {
        match self.objects.store().keeper() {
            Keeper::Supervisor => self.supervisor_gone(),
            // It comes back under the same path, or the machine goes down.
            _ => self.timer(super::reactor::SWEEP, Timer::Store),
        }
    }

    /// The supervisor has died: starts another, which keeps everything anew.
    pub(super) fn supervisor_gone(&mut self) {
        if self.objects.store().keeper() != Keeper::Supervisor {
            return;
        }
        tracing::warn!("the supervisor is gone: another is started");
        match self.begin_anew() {
            Ok(()) => {
                // Whatever was on its way is among what is kept anew.
                let mark = self.objects.store().mark();
                self.storing.iter_mut().for_each(|storing| storing.staged.mark = mark);
                self.timer(super::reactor::IN_FLIGHT_PAUSE, Timer::Store);
            }
            Err(error) => {
                tracing::error!(%error, "no supervisor can be started: what the broker holds is lost when it dies");
                self.life = None;
                self.objects.store_mut().give_up();
            }
        }
    }

    fn begin_anew(&mut self) -> io::Result<()> {
        if let Some(child) = self.supervisor.take() {
            child.reap();
        }
        let (child, life) = supervisor::start_another(self.objects.store().path())?;
        self.supervisor = Some(child);
        self.objects.store_mut().begin_anew()?;
        self.watch_store()?;
        self.life = Some(life);
        self.watch_life()?;
        self.objects.keep_anew().map_err(io::Error::other)?;
        for (number, fd) in &self.devices {
            self.objects.store_mut().keep_own(Name::Device(*number), fd.try_clone()?);
        }
        let socket = std::os::fd::AsFd::as_fd(&self.listener).try_clone_to_owned()?;
        self.objects.store_mut().keep_own(Name::Socket, socket);
        self.objects.store_mut().say("READY=1");
        Ok(())
    }

    /// Has the loop wake when the supervisor dies.
    pub(super) fn watch_life(&mut self) -> io::Result<()> {
        match &self.life {
            Some(life) => {
                let registry = self.poll.registry();
                registry.register(&mut SourceFd(&life.as_raw_fd()), super::reactor::LIFE, Interest::READABLE)
            }
            None => Ok(()),
        }
    }
}
