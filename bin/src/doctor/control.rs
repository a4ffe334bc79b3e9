//! The records that the two sides of a probe exchange: JSON over a separate socket.

use std::os::fd::AsFd;

use nix::poll::PollFlags;
use serde::Deserialize;
use vmmfd::{
    driver::DeviceUuid,
    error::{ErrorCode, ProtocolError},
    internals::wait,
};

use super::DeviceReport;
use crate::doctor::prelude::*;

/// The version of these records. Sides of different versions reject each other.
const VERSION: u32 = 3;

/// A record. Unknown fields are ignored; an unknown kind is an error.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(super) enum ControlRecord {
    /// The first record of both sides of a meeting, with the finding of the `driver` probe.
    Hello { version: u32, backend: Backend, environment: Box<Environment>, driver: Option<Box<Finding>> },
    /// The first record of a child: its driver has started.
    Ready {},
    /// Memory is offered at the socket. The answer is `done`.
    Begin { probe: String },
    /// Memory or an event was opened.
    Done(Opened),
    /// Asks the peer to share memory of a device. The answer is `begin`, then `shared`; or `failed`.
    Share { probe: String, device: DeviceUuid },
    /// The peer has opened what this side shared.
    Shared {},
    /// The request failed, or the connection is rejected.
    Failed { error: ErrorDetails },
    /// A CUDA event for the peer to wait for. The answer is `done`.
    Event { device: DeviceUuid, handle: String },
    /// The findings about a device, for the peer's report.
    Device(DeviceReport),
    /// Closes the meeting.
    Bye {},
}

/// Opened memory, or an event. Times are in microseconds.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub(super) struct Opened {
    pub(super) open_us: u64,
    /// The size of the memory.
    pub(super) bytes: u64,
    /// The device on which the memory was opened, possibly not the owner.
    pub(super) through: Option<DeviceUuid>,
    /// How long the wait for the event took.
    pub(super) wait_us: u64,
}

impl ControlRecord {
    /// The answer to a request.
    pub(super) fn answer<T>(result: std::result::Result<T, ErrorDetails>, record: impl FnOnce(T) -> Self) -> Self {
        result.map_or_else(|error| Self::Failed { error }, record)
    }

    /// The probe of a request.
    pub(super) fn requested(&self) -> Option<&str> {
        match self {
            Self::Begin { probe } | Self::Share { probe, .. } => Some(probe),
            Self::Event { .. } => Some("event"),
            _ => None,
        }
    }

    /// The error for a record of another kind than `want`; the peer's, if it reports one.
    pub(super) fn unexpected(self, want: &'static str) -> ErrorDetails {
        match self {
            Self::Failed { error } => error.of_other_end(),
            _ => ErrorDetails::of(&ProtocolError::Unexpected { got: "another record", want }.into()),
        }
    }
}

/// The purpose of a receive, for error messages.
pub(super) const PURPOSE: &str = "for the peer of the probes";

/// Exchanges hellos with the findings of the `driver` probe. Returns the peer's environment and finding.
pub(super) fn greet(
    line: &Line,
    backend: Backend,
    environment: &Environment,
    driver: Option<&Finding>,
) -> Result<(Environment, Option<Finding>)> {
    let environment = Box::new(environment.clone());
    let driver = driver.cloned().map(Box::new);
    // A rejected peer can't send, but still receives the reason.
    let sent = line.send(&ControlRecord::Hello { version: VERSION, backend, environment, driver });
    let mismatch = |code, message| Err(Error::Peer(PeerError::Mismatch { code, message }));
    match line.receive().map_err(|error| sent.err().unwrap_or(error))? {
        ControlRecord::Hello { version, .. } if version != VERSION => mismatch(
            ErrorCode::Version,
            format!("the peer uses version {version} of the doctor's records, this side {VERSION}"),
        ),
        ControlRecord::Hello { backend: theirs, .. } if theirs != backend => {
            mismatch(ErrorCode::Backend, format!("this side tests {backend}, and the peer {theirs}"))
        }
        ControlRecord::Hello { environment, driver, .. } => Ok((*environment, driver.map(|driver| *driver))),
        ControlRecord::Failed { error } => {
            Err(Error::Peer(PeerError::Reported { code: ErrorCode::Refused, message: error.message }))
        }
        _ => Err(ProtocolError::Unexpected { got: "another record", want: "hello" }.into()),
    }
}

/// Fails if the peer has closed the connection. Then it also drops records that were not received.
pub(super) fn check_connected(line: &Line) -> Result<()> {
    while wait(line.cancel(), line.as_fd(), PollFlags::empty(), Instant::now())? {
        line.receive::<ControlRecord>()?;
    }
    Ok(())
}
