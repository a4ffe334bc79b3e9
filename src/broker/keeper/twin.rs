//! A copy of a keeper without a server: a fork that waits, and continues as the keeper if its parent dies.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    process,
    time::{Duration, Instant},
};

use nix::{
    sys::{
        signal::{Signal, kill},
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::Pid,
};

use super::link::Process;
use crate::sys::{self, pidfd_of};

/// The pause before another fork if one failed, or if a twin died.
const PAUSE: Duration = Duration::from_millis(100);

/// The twin of this keeper, if there is one.
#[derive(Debug, Default)]
pub(super) struct Twin {
    child: Option<(Pid, OwnedFd)>,
    /// No fork before this time.
    pub(super) next_fork: Option<Instant>,
}

/// The process that returns from [`Twin::fork`].
pub(super) enum Side {
    Parent,
    /// The twin, and its parent.
    Twin(Process),
}

impl Twin {
    pub(super) fn pid(&self) -> Option<i32> {
        self.child.as_ref().map(|(pid, _)| pid.as_raw())
    }

    /// Readable once the twin has died.
    pub(super) fn pidfd(&self) -> Option<BorrowedFd<'_>> {
        self.child.as_ref().map(|(_, pidfd)| pidfd.as_fd())
    }

    /// Whether a twin may be forked now.
    pub(super) fn is_due(&self) -> bool {
        self.child.is_none() && self.next_fork.is_none_or(|at| at <= Instant::now())
    }

    /// Forks a twin.
    ///
    /// # Errors
    /// All errors of fork(2) and pidfd_open(2). No twin exists then.
    pub(super) fn fork(&mut self) -> io::Result<Side> {
        let fork = || {
            let own = Process::visible(process::id().cast_signed())?;
            let Some(child) = sys::fork_process()? else { return Ok(Err(own)) };
            let child = Pid::from_raw(child);
            let pidfd = pidfd_of(child.as_raw()).inspect_err(|_| end(child))?;
            Ok(Ok((child, pidfd)))
        };
        match fork() {
            Ok(Ok(child)) => {
                (self.child, self.next_fork) = (Some(child), None);
                Ok(Side::Parent)
            }
            Ok(Err(parent)) => {
                *self = Self::default();
                Ok(Side::Twin(parent))
            }
            Err(error) => {
                self.next_fork = Some(Instant::now() + PAUSE);
                Err(error)
            }
        }
    }

    /// Kills the twin: it is outdated, or no longer needed.
    pub(super) fn end(&mut self) {
        if let Some((child, _)) = self.child.take() {
            end(child);
        }
    }

    /// Reaps the twin if it has died.
    pub(super) fn reap(&mut self) {
        let Some((child, _)) = &self.child else { return };
        match waitpid(*child, Some(WaitPidFlag::WNOHANG)) {
            Ok(WaitStatus::StillAlive) => {}
            _ => {
                tracing::warn!("the keeper's twin, pid {child}, died: starting another");
                (self.child, self.next_fork) = (None, Some(Instant::now() + PAUSE));
            }
        }
    }
}

fn end(child: Pid) {
    // Fails if the twin has died.
    let _ = kill(child, Signal::SIGKILL);
    let _ = waitpid(child, None);
}
