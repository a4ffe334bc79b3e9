//! What a probe of a device works with.

use std::{path::PathBuf, time::Duration};

use vmmfd::{channel::Trust, error::Result, memory::Device};

use super::{
    Status,
    control::Control,
    outcome::ProbeResult,
    peer_process::{PeerProcess, start},
    sharing::Endpoint,
    task::Role,
};
use crate::{child::Process, line::Line};

/// The part of a probe's time that one end waits for the other. It ends before the probe's, so that the reason is reported.
const WAITING: f64 = 0.75;

/// A device, and what a probe needs to call in another process.
#[derive(Debug)]
pub(super) struct ProbeContext {
    pub(super) device: Device,
    /// Where sockets and files may be created.
    pub(super) folder: PathBuf,
    /// How long each probe may take.
    timeout: Duration,
    /// The other process, once a probe has started one.
    peer: Option<PeerProcess>,
}

impl ProbeContext {
    pub(super) fn new(device: Device, folder: PathBuf, timeout: Duration) -> Self {
        Self { device, folder, timeout, peer: None }
    }

    /// Starts another process.
    pub(super) fn start_peer(&self) -> Result<PeerProcess> {
        PeerProcess::start(&self.folder, self.device.backend(), self.patience())
    }

    /// Starts a process for a part of a probe that no [`PeerProcess`] has. It inherits standard error.
    ///
    /// # Errors
    /// [`Error::System`](vmmfd::Error::System).
    pub(super) fn start_child(&self, name: &'static str, role: Role) -> Result<(Process, Line)> {
        start(name, &self.folder, self.device.backend(), self.patience(), role)
    }

    /// This end of an exchange with another process.
    pub(super) fn endpoint(&self, peer: &PeerProcess) -> Endpoint {
        let (driver, socket) = (self.device.driver().clone(), peer.socket().to_owned());
        Endpoint { driver, socket, trust: Trust::default(), timeout: self.patience() }
    }

    /// Does something with the other process, which is started if there is none. Unless the outcome is `ok` that process is
    /// killed, so that the next probe has a new one.
    pub(super) fn with_peer(&mut self, work: impl FnOnce(&Endpoint, &Control, &Device) -> ProbeResult) -> ProbeResult {
        let peer = match self.peer.take() {
            Some(peer) => peer,
            None => self.start_peer()?,
        };
        let endpoint = self.endpoint(&peer);
        let outcome = work(&endpoint, peer.control(), &self.device)?;
        if outcome.status == Status::Ok {
            self.peer = Some(peer);
        }
        Ok(outcome)
    }

    /// How long this end waits for the other.
    pub(super) fn patience(&self) -> Duration {
        self.timeout.mul_f64(WAITING)
    }
}
