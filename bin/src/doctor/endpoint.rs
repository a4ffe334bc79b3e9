//! One side of an exchange between two processes.

use std::{path::PathBuf, time::Duration};

use vmmfd::{
    channel::{Cancel, Trust},
    driver::Driver,
    session::Config,
};

/// One side of an exchange, without the control connection.
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
