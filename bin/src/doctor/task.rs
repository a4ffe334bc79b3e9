//! The tasks that the doctor gives its child processes.

use std::{path::PathBuf, time::Duration};

use serde::{Deserialize, Serialize};
use vmmfd::driver::Backend;

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
#[serde(rename_all = "snake_case")]
pub(super) enum Role {
    /// Runs probes in order and sends each finding. Probes of a pair use memory of the device `owner`.
    Probes { device: Option<i32>, owner: Option<i32>, names: Vec<String> },
    /// Answers requests as the peer of a probe.
    Peer { socket: PathBuf },
    /// Creates memory with a pattern, and sends its descriptor.
    Make { device: i32, pattern: u32 },
    /// Holds a received descriptor without the driver.
    Hold {},
}
