//! What a probe of a device uses: the device, and the other process of a probe.

use vmmfd::channel::Cancel;

use super::process::{Child, Endpoint, Role};
use crate::doctor::prelude::*;

#[derive(Debug)]
pub(super) struct ProbeContext {
    pub(super) device: Device,
    /// This side of an exchange.
    pub(super) end: Endpoint,
    /// The other process, once a probe has started it.
    peer: Option<Child>,
}

impl ProbeContext {
    pub(super) fn new(device: Device, end: Endpoint) -> Self {
        Self { device, end, peer: None }
    }

    /// Starts another process of the probe. It inherits standard error.
    pub(super) fn start_child(&self, name: &'static str, role: Role) -> Result<Child> {
        let setting = &self.end.setting;
        Child::start(name, setting, role, None, false, setting.timeout, &Cancel::new()?)
    }

    /// Calls `work` with the connection to the other process, which it starts if necessary. Kills it unless the finding is `ok`, so that the
    /// next probe gets a new one.
    pub(super) fn with_peer(&mut self, work: impl FnOnce(&Endpoint, &Line, &Device) -> ProbeResult) -> ProbeResult {
        let peer = match self.peer.take() {
            Some(peer) => peer,
            None => {
                let mut child = self.start_child("the other process of the probe", Role::Peer)?;
                child.ready()?;
                child
            }
        };
        let result = work(&self.end, &peer.line, &self.device);
        if result.as_ref().is_ok_and(|finding| finding.status == Status::Ok) {
            self.peer = Some(peer);
        }
        result
    }
}
