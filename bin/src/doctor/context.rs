//! The processes of a probe: their tasks, the peer that a probe shares memory with, and the probe's own context.

use std::{
    fs,
    path::{Path, PathBuf},
    process,
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use serde::{Deserialize, Serialize};
use vmmfd::{
    channel::{Cancel, Trust},
    driver::{Backend, Driver},
    error::Result,
    memory::Device,
    session::Config,
};

use super::{Environment, Finding, Status, control::greet, report::ProbeResult};
use crate::{
    child::{Process, command, start},
    line::Line,
};

/// A child process's task.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Task {
    pub(super) backend: Backend,
    /// The folder for sockets and files.
    pub(super) folder: PathBuf,
    /// The timeout of a probe, or of a step.
    pub(super) timeout: Duration,
    pub(super) role: Role,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Role {
    /// Runs probes in order and sends each finding. Probes of a pair use memory of the device `owner`.
    Probes { device: Option<i32>, owner: Option<i32>, names: Vec<String> },
    /// Answers requests as the peer of a probe.
    Peer { socket: PathBuf },
    /// Creates memory with a pattern, and sends its descriptor.
    Make { device: i32, pattern: u32 },
    /// Holds a received descriptor without the driver.
    Hold,
}

/// One side of an exchange between two processes, without the control connection.
#[derive(Debug, Clone)]
pub(super) struct Endpoint {
    pub(super) driver: Driver,
    /// The socket for handoffs.
    pub(super) socket: PathBuf,
    pub(super) trust: Trust,
    /// The timeout of each wait for the peer.
    pub(super) timeout: Duration,
}

impl Endpoint {
    pub(super) fn config(&self, cancel: &Cancel) -> Config {
        Config::default().timeout(self.timeout).trust(self.trust.clone()).cancel(cancel)
    }
}

/// A peer process. Drop kills it.
#[derive(Debug)]
pub(super) struct PeerProcess {
    process: Process,
    pub(super) control: Line,
    pub(super) end: Endpoint,
}

impl PeerProcess {
    pub(super) fn kill(&mut self) {
        self.process.kill();
    }
}

impl Drop for PeerProcess {
    fn drop(&mut self) {
        self.kill();
        // A process killed while listening leaves its socket behind.
        let _ = fs::remove_file(&self.end.socket);
    }
}

/// A device, and access to a peer process.
#[derive(Debug)]
pub(super) struct ProbeContext {
    pub(super) device: Device,
    /// The folder for sockets and files.
    pub(super) folder: PathBuf,
    /// How long this side waits for the other: less than the probe's time limit, so that the peer's error arrives before.
    pub(super) peer_timeout: Duration,
    /// The peer process, once a probe has started it.
    peer: Option<PeerProcess>,
}

impl ProbeContext {
    pub(super) fn new(device: Device, folder: &Path, timeout: Duration) -> Self {
        Self { device, folder: folder.to_owned(), peer_timeout: timeout.mul_f64(0.75), peer: None }
    }

    /// Starts another process of the probe. `name` appears in error messages. It inherits standard error.
    pub(super) fn start_child(&self, name: &'static str, role: Role) -> Result<(Process, Line)> {
        let backend = self.device.backend();
        let timeout = self.peer_timeout;
        let task = Task { backend, folder: self.folder.clone(), timeout, role };
        start(name, &mut command(None, &task)?, false, timeout, &Cancel::new()?)
    }

    /// Starts a peer that creates its socket in the folder, and waits until its driver is ready.
    pub(super) fn start_peer(&self) -> Result<PeerProcess> {
        static NUMBERS: AtomicU32 = AtomicU32::new(0);
        let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
        let socket = self.folder.join(format!("m{}-{number}", process::id()));
        let role = Role::Peer { socket: socket.clone() };
        let (process, control) = self.start_child("the other process of the probe", role)?;
        let greeted = greet(&control, self.device.backend(), &Environment::default(), None);
        greeted.map_err(|error| process.explain(error, self.peer_timeout))?;
        let driver = self.device.driver().clone();
        let timeout = self.peer_timeout;
        Ok(PeerProcess { process, control, end: Endpoint { driver, socket, trust: Trust::default(), timeout } })
    }

    /// Calls `work` with the peer process, which it starts if necessary. Kills it unless the finding is `ok`, so that the next probe gets a
    /// new one.
    pub(super) fn with_peer(&mut self, work: impl FnOnce(&Endpoint, &Line, &Device) -> ProbeResult) -> ProbeResult {
        let peer = match self.peer.take() {
            Some(peer) => peer,
            None => self.start_peer()?,
        };
        let finding: Finding = work(&peer.end, &peer.control, &self.device)?;
        if finding.status == Status::Ok {
            self.peer = Some(peer);
        }
        Ok(finding)
    }
}
