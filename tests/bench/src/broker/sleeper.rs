//! A process that hands over memory when it is asked to, and sleeps otherwise: as idle a sender as the broker, without its work.
//!
//! A producer of the bench drives the measurement, so it never sleeps for long. A broker sleeps from one get to the next, and waking it
//! takes the kernel longer, above all in a virtual machine.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use vmmfd::error::{ProtocolError, Result};

use crate::{
    process::BenchProcess,
    task::{Role, Task},
};
use vmmfd_cli::line::Line;

/// The requests, each a record of one byte.
const KEEP: u8 = 0;
const HAND_OVER: u8 = 1;

/// Keeps the descriptors that it receives, and sends them back when it is asked to, until the other process ends the connection.
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

/// The process, seen from the consumer that starts it.
pub(crate) struct Sleeper(BenchProcess);

impl Sleeper {
    pub(crate) fn start(task: &Task) -> Result<Self> {
        BenchProcess::start(&task.with(Role::Sleeper)).map(Self)
    }

    /// Lets it keep these descriptors in place of those before.
    pub(crate) fn keep(&self, fds: &[OwnedFd]) -> Result<()> {
        let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
        self.call(KEEP, &fds).map(drop)
    }

    /// Wakes it, and returns the descriptors that it sends.
    pub(crate) fn hand_over(&self) -> Result<Vec<OwnedFd>> {
        self.call(HAND_OVER, &[])
    }

    fn call(&self, request: u8, fds: &[BorrowedFd<'_>]) -> Result<Vec<OwnedFd>> {
        self.0.line.send_bare(&[request], fds)?;
        Ok(self.0.line.receive_bare(&mut [0; 2])?.fds)
    }
}
