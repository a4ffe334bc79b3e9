//! What a child process of the doctor is to do, as data.

use std::{path::PathBuf, time::Duration};

use serde::{Deserialize, Serialize};

use vmmfd::driver::Backend;

/// The task of one child process.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Task {
    pub(super) backend: Backend,
    /// Where it may create sockets and files.
    pub(super) folder: PathBuf,
    /// How long a probe, or a step of one, may take.
    pub(super) timeout: Duration,
    pub(super) role: Role,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Role {
    /// Runs probes, in this order, and reports each finding over the line: on a device, with the memory of an owner for a pair.
    Probes { device: Option<i32>, owner: Option<i32>, names: Vec<String> },
    /// Is the other end of probes that take two processes: it does what it is asked for over the line.
    Peer { socket: PathBuf },
    /// Makes memory of a device with a pattern in it, and sends its descriptor over the line.
    Make { device: i32, pattern: u32 },
    /// Holds a descriptor that comes over the line, without the driver.
    Hold {},
}
