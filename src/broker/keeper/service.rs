//! The server as the service of a keeper that starts it, and starts another when it has died.

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

/// How long a server may take to end that was asked to.
const STOP: Duration = Duration::from_secs(10);

/// The longest pause before a server is started again that never became ready.
const PAUSE: Duration = Duration::from_secs(5);

/// How a server ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Code(i32),
    Signal(i32),
    /// It was not this process's child.
    Unknown,
}

#[derive(Debug)]
pub(super) struct Service {
    /// Where the broker listens.
    socket: PathBuf,
    process: Option<(i32, OwnedFd)>,
    end: Option<End>,
    /// When to start the next server.
    restart_at: Option<Instant>,
    /// Whether some server of this or an earlier keeper has served.
    served: bool,
    /// Whether the server that runs serves, and whether it ends because it was asked to.
    ready: bool,
    stopping: bool,
    /// Whether the server that runs is to end for one of this build.
    outdated: bool,
    /// How many servers in a row ended before they served.
    failures: u32,
}

impl Service {
    /// The broker at a path, with the server that runs if this process's role says that there is one.
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

    pub(super) fn socket(&self) -> &Path {
        &self.socket
    }

    /// The server's pid, or 0.
    pub(super) fn pid(&self) -> i32 {
        self.process.as_ref().map_or(0, |(pid, _)| *pid)
    }

    pub(super) fn pidfd(&self) -> Option<BorrowedFd<'_>> {
        self.process.as_ref().map(|(_, pidfd)| pidfd.as_fd())
    }

    pub(super) fn restart_at(&self) -> Option<Instant> {
        self.restart_at
    }

    /// Whether the server that runs is an older build's. Says so once.
    pub(super) fn take_outdated(&mut self) -> bool {
        std::mem::take(&mut self.outdated)
    }

    /// Starts a server, if it is time to. Returns the connection with it.
    ///
    /// # Errors
    /// [`Error::System`] if the first server can't be started. Later ones are tried again.
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

    /// The server serves.
    pub(super) fn is_ready(&mut self) {
        if self.served && !self.ready {
            tracing::info!("the server runs again, as pid {}", self.pid());
        }
        (self.ready, self.served, self.failures) = (true, true, 0);
        notify("READY=1");
    }

    /// The server ends because it was asked to.
    pub(super) fn is_stopping(&mut self) {
        self.stopping = true;
    }

    /// Whether the server has ended since the last call.
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

    /// What follows the end of the server: the exit code of the keeper, or another server.
    pub(super) fn after_end(&mut self) -> Option<i32> {
        let ready = std::mem::take(&mut self.ready);
        match self.end? {
            End::Code(code) if !self.served || self.stopping || code == 0 => return Some(code),
            _ if self.stopping => return Some(0),
            End::Code(code) => tracing::warn!("the server has ended with exit code {code}: another is started"),
            End::Signal(signal) => tracing::warn!("the server was killed by signal {signal}: another is started"),
            End::Unknown => tracing::warn!("the server was killed: another is started"),
        }
        self.restart_at = Some(if ready { Instant::now() } else { self.pause() });
        None
    }

    /// Starts another server at once.
    pub(super) fn restart(&mut self) {
        (self.ready, self.stopping, self.restart_at) = (false, false, Some(Instant::now()));
    }

    /// Sends the server a signal. Returns until when it may take to end; `None` if there is no server.
    pub(super) fn signal(&self, signal: Signal) -> Option<Instant> {
        let (pid, _) = self.process.as_ref()?;
        // Fails if it has ended.
        let _ = kill(Pid::from_raw(*pid), signal);
        Some(Instant::now() + STOP)
    }

    /// The exit code after the server's end, which a signal asked for.
    pub(super) fn code(&self, signal: i32) -> i32 {
        match self.end {
            Some(End::Code(code)) => code,
            Some(_) => 128 + signal,
            None => 0,
        }
    }

    /// When to start the next server, after one that never served.
    fn pause(&mut self) -> Instant {
        self.failures = self.failures.saturating_add(1);
        let pause = Duration::from_millis(10 << self.failures.min(10)).min(PAUSE);
        Instant::now() + pause
    }
}
