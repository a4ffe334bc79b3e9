//! The server that a keeper starts, and restarts when it dies.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        signal::{Signal, kill},
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::Pid,
};

use super::{image::Image, role::Role};
use crate::{
    broker::notify::notify,
    error::{Error, Result},
};

/// How long a server may take to exit on request.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);

/// The longest pause before the next start of a server that never became ready.
const MAX_PAUSE: Duration = Duration::from_secs(5);

/// How a server exited.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Code(i32),
    Signal(i32),
    /// It is not this process's child.
    Unknown,
}

#[derive(Debug)]
pub(super) struct Service {
    /// Where the broker listens.
    pub(super) socket: PathBuf,
    process: Option<(i32, OwnedFd)>,
    end: Option<End>,
    /// When to start the next server.
    pub(super) restart_at: Option<Instant>,
    /// Whether any server of this or an earlier keeper has become ready.
    served: bool,
    /// Whether the running server is ready, and whether it exits on request.
    ready: bool,
    stopping: bool,
    /// Whether the running server executes the program from before a reload and must be replaced.
    outdated: bool,
    /// How many servers in a row exited before they became ready.
    failures: u32,
}

impl Service {
    /// The broker at a path. The role decides whether a server runs already.
    pub(super) fn new(socket: &Path, role: Role, pidfd: Option<OwnedFd>) -> Self {
        let process = match role {
            Role::Reloaded(pid) | Role::Another(pid) => pidfd.map(|pidfd| (pid, pidfd)),
            _ => None,
        };
        Self {
            socket: socket.to_owned(),
            restart_at: process.is_none().then(Instant::now),
            served: role != Role::First,
            ready: process.is_some(),
            outdated: process.is_some() && matches!(role, Role::Reloaded(_)),
            process,
            end: None,
            stopping: false,
            failures: 0,
        }
    }

    /// The server's pid, or 0.
    pub(super) fn pid(&self) -> i32 {
        self.process.as_ref().map_or(0, |(pid, _)| *pid)
    }

    pub(super) fn pidfd(&self) -> Option<BorrowedFd<'_>> {
        self.process.as_ref().map(|(_, pidfd)| pidfd.as_fd())
    }

    /// Whether the running server must be replaced. True only once.
    pub(super) fn take_outdated(&mut self) -> bool {
        std::mem::take(&mut self.outdated)
    }

    /// Starts a server if one is due. Returns the connection.
    ///
    /// # Errors
    /// [`Error::System`] if the first server can't be started. Later starts are retried.
    pub(super) fn start_if_due(&mut self, image: &Image) -> Result<Option<OwnedFd>> {
        if self.restart_at.is_none_or(|at| at > Instant::now()) {
            return Ok(None);
        }
        match image.start_server() {
            Ok((pid, pidfd, socket)) => {
                (self.ready, self.stopping, self.restart_at, self.end) = (false, false, None, None);
                self.process = Some((pid, pidfd));
                Ok(Some(socket))
            }
            Err(error) if !self.served => Err(Error::system("start the server", error)),
            Err(error) => {
                tracing::warn!("the server can't be started: {error}");
                self.restart_at = Some(self.pause());
                Ok(None)
            }
        }
    }

    /// The server reports that it is ready.
    pub(super) fn mark_ready(&mut self) {
        if self.served && !self.ready {
            tracing::info!("the server runs again, as pid {}", self.pid());
        }
        (self.ready, self.served, self.failures) = (true, true, 0);
        notify("READY=1");
    }

    /// The server reports that it exits on request.
    pub(super) fn mark_stopping(&mut self) {
        self.stopping = true;
    }

    /// Whether the server has exited since the last call.
    pub(super) fn has_ended(&mut self) -> bool {
        let Some((pid, pidfd)) = &self.process else { return false };
        if poll(&mut [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)], PollTimeout::ZERO) == Ok(0) {
            return false;
        }
        self.end = Some(match waitpid(Pid::from_raw(*pid), Some(WaitPidFlag::WNOHANG)) {
            Ok(WaitStatus::Exited(_, code)) => End::Code(code),
            Ok(WaitStatus::Signaled(_, signal, _)) => End::Signal(signal as i32),
            _ => End::Unknown,
        });
        self.process = None;
        true
    }

    /// Handles the server's exit: returns the keeper's exit code, or schedules another server.
    pub(super) fn after_end(&mut self) -> Option<i32> {
        let ready = std::mem::take(&mut self.ready);
        match self.end? {
            End::Code(code) if !self.served || self.stopping || code == 0 => return Some(code),
            _ if self.stopping => return Some(0),
            End::Code(code) => tracing::warn!("the server exited with code {code}: starting another"),
            End::Signal(signal) => tracing::warn!("signal {signal} killed the server: starting another"),
            End::Unknown => tracing::warn!("the server was killed: starting another"),
        }
        self.restart_at = Some(if ready { Instant::now() } else { self.pause() });
        None
    }

    /// Starts another server at once.
    pub(super) fn restart(&mut self) {
        (self.ready, self.stopping, self.restart_at) = (false, false, Some(Instant::now()));
    }

    /// Sends the server a signal. Returns the deadline for its exit; `None` if there is no server.
    pub(super) fn signal(&self, signal: Signal) -> Option<Instant> {
        let (pid, _) = self.process.as_ref()?;
        // Fails if the server has exited.
        let _ = kill(Pid::from_raw(*pid), signal);
        Some(Instant::now() + STOP_TIMEOUT)
    }

    /// The keeper's exit code after `signal` ended the server.
    pub(super) fn code(&self, signal: i32) -> i32 {
        match self.end {
            Some(End::Code(code)) => code,
            Some(_) => 128 + signal,
            None => 0,
        }
    }

    /// When to start the next server after a failure.
    fn pause(&mut self) -> Instant {
        self.failures = self.failures.saturating_add(1);
        let pause = Duration::from_millis(10 << self.failures.min(10)).min(MAX_PAUSE);
        Instant::now() + pause
    }
}
