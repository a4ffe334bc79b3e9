//! The context of a device probe.

use std::{path::PathBuf, time::Duration};

use vmmfd::{channel::Trust, error::Result, memory::Device};

use super::{
    Status,
    control::Control,
    endpoint::Endpoint,
    outcome::ProbeResult,
    peer_process::{PeerProcess, start},
    task::Role,
};
use crate::{child::Process, line::Line};

/// The fraction of a probe's timeout that one side waits for the other. Below 1, so that the peer's error arrives before the timeout.
const PEER_SHARE: f64 = 0.75;

/// A device, and access to a peer process.
#[derive(Debug)]
pub(super) struct ProbeContext {
    pub(super) device: Device,
    /// The folder for sockets and files.
    pub(super) folder: PathBuf,
    timeout: Duration,
    /// The peer process, once a probe has started it.
    peer: Option<PeerProcess>,
}

impl ProbeContext {
    pub(super) fn new(device: Device, folder: PathBuf, timeout: Duration) -> Self {
        Self { device, folder, timeout, peer: None }
    }

    pub(super) fn start_peer(&self) -> Result<PeerProcess> {
        PeerProcess::start(&self.folder, self.device.backend(), self.peer_timeout())
    }

    /// Starts a process for a role other than [`PeerProcess`]. It inherits standard error.
    pub(super) fn start_child(&self, name: &'static str, role: Role) -> Result<(Process, Line)> {
        start(name, &self.folder, self.device.backend(), self.peer_timeout(), role)
    }

    /// This side of an exchange with a peer process.
    pub(super) fn endpoint(&self, peer: &PeerProcess) -> Endpoint {
        let (driver, socket) = (self.device.driver().clone(), peer.socket().to_owned());
        Endpoint { driver, socket, trust: Trust::default(), timeout: self.peer_timeout() }
    }

    /// Calls `work` with the peer process, which it starts if necessary. Kills it unless the outcome is `ok`, so that the next probe gets a
    /// new one.
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

    /// How long this side waits for the other.
    pub(super) fn peer_timeout(&self) -> Duration {
        self.timeout.mul_f64(PEER_SHARE)
    }
}
