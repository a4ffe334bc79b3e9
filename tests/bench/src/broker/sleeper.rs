//! A process that hands over memory on request and sleeps otherwise: a sender as idle as the broker, without the broker's work.
//!
//! A producer of the bench drives the measurement, so it never sleeps for long. A broker sleeps between gets, and waking it takes the
//! kernel longer, especially in a virtual machine.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use vmmfd::error::{ProtocolError, Result};

use crate::{
    process::BenchProcess,
    task::{Role, Task},
};
use vmmfd_cli::line::Line;

/// Requests. Each is a record of one byte.
const KEEP: u8 = 0;
const HAND_OVER: u8 = 1;

/// Keeps the received descriptors and sends them back on request, until the other process disconnects.
pub(crate) fn serve_sleeper(line: &Line) -> Result<()> {
    let mut kept = Vec::new();
    loop {
        let (mut request, mut response) = ([0; 2], Vec::new());
        let record = line.receive_bare(&mut request)?;
        match (record.length, request[0]) {
            (1, KEEP) => kept = record.fds,
            (1, HAND_OVER) => response = kept.iter().map(AsFd::as_fd).collect::<Vec<_>>(),
            _ => return Err(ProtocolError::Unexpected { got: "request", want: "one for a sleeper" }.into()),
        }
        line.send_bare(&[0], &response)?;
    }
}

/// The sleeper process, as seen by the consumer that starts it.
pub(crate) struct Sleeper(BenchProcess);

impl Sleeper {
    pub(crate) fn start(task: &Task) -> Result<Self> {
        BenchProcess::start(&task.with(Role::Sleeper)).map(Self)
    }

    /// Replaces the descriptors that the sleeper keeps.
    pub(crate) fn keep(&self, fds: &[OwnedFd]) -> Result<()> {
        let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
        self.call(KEEP, &fds).map(drop)
    }

    /// Wakes the sleeper and returns its descriptors.
    pub(crate) fn hand_over(&self) -> Result<Vec<OwnedFd>> {
        self.call(HAND_OVER, &[])
    }

    fn call(&self, request: u8, fds: &[BorrowedFd<'_>]) -> Result<Vec<OwnedFd>> {
        self.0.line.send_bare(&[request], fds)?;
        Ok(self.0.line.receive_bare(&mut [0; 2])?.fds)
    }
}
