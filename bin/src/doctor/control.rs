//! The records that the two sides of a probe exchange: JSON over a separate socket.

use std::{os::fd::AsFd, path::Path, time::Duration};

use nix::poll::PollFlags;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use vmmfd::{
    channel::{Cancel, Listener, Trust},
    driver::{Backend, DeviceUuid},
    error::{Error, ErrorCode, PeerError, ProtocolError, Result},
    internals::{RecordSocket, accept, connect_socket, deadline_after, peer_of, wait},
};

use super::{Environment, ErrorDetails, Finding, read::clean_all, report::DeviceReport};
use crate::{
    line::{Line, typed},
    stamp,
};

/// The version of these records. Sides of different versions reject each other.
pub(super) const VERSION: u32 = 2;

/// A record. Unknown fields are ignored; an unknown kind is an error.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(super) enum ControlRecord {
    /// The first record of both sides.
    Hello {
        version: u32,
        tool: String,
        backend: Backend,
        environment: Box<Environment>,
        /// The sender's finding of the `driver` probe.
        #[serde(default)]
        driver: Option<Box<Finding>>,
    },
    /// Memory is offered at the socket. The answer is `done`.
    Begin { probe: String },
    /// The result of opening memory or an event. Times are in microseconds.
    Done {
        open_us: Option<u64>,
        #[serde(default)]
        wait_us: Option<u64>,
        bytes: Option<u64>,
        /// The device on which the memory was opened.
        #[serde(default)]
        through: Option<DeviceUuid>,
        error: Option<ErrorDetails>,
    },
    /// Asks the peer to share memory of a device. The answer is `begin`, or `lent` with an error.
    #[serde(rename = "lend")]
    Share { probe: String, device: DeviceUuid },
    /// The result of sharing.
    #[serde(rename = "lent")]
    Shared { error: Option<ErrorDetails> },
    /// A CUDA event for the peer to wait for.
    Event { device: DeviceUuid, handle: String },
    /// A device under test, for the peer's report. All devices are sent before the first finding.
    Device(DeviceReport),
    /// A finding about a device, for the peer's report.
    Found { device: i32, finding: Finding },
    /// Closes the meeting.
    Bye {},
}

/// Opened memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct OpenedMemory {
    /// The duration in microseconds.
    pub(super) open_us: u64,
    pub(super) bytes: u64,
    /// The device on which it was opened, possibly not the owner.
    pub(super) through: Option<DeviceUuid>,
}

impl ControlRecord {
    pub(super) fn done(opened: &Result<OpenedMemory>) -> Self {
        let (open_us, bytes, through) = match opened {
            Ok(opened) => (Some(opened.open_us), Some(opened.bytes), opened.through),
            Err(_) => (None, None, None),
        };
        Self::Done { open_us, wait_us: None, bytes, through, error: opened.as_ref().err().map(ErrorDetails::of) }
    }

    fn name(&self) -> &'static str {
        match self {
            Self::Hello { .. } => "hello",
            Self::Begin { .. } => "begin",
            Self::Done { .. } => "done",
            Self::Share { .. } => "lend",
            Self::Shared { .. } => "lent",
            Self::Event { .. } => "event",
            Self::Device(_) => "device",
            Self::Found { .. } => "found",
            Self::Bye {} => "bye",
        }
    }
}

/// The error for a record of another kind than `want`.
pub(super) fn unexpected(got: &ControlRecord, want: &'static str) -> Error {
    ProtocolError::Unexpected { got: got.name(), want }.into()
}

/// The connection to the peer.
#[derive(Debug)]
pub(super) struct Control {
    line: Line,
}

impl Control {
    /// Uses the connection to a child process or to the parent.
    pub(super) fn over(line: Line) -> Self {
        Self { line }
    }

    fn new(socket: RecordSocket) -> Self {
        Self::over(Line::new(socket, "for the peer of the probes"))
    }

    /// Waits up to `timeout` for a connection.
    ///
    /// # Errors
    /// [`PeerError::NoConsumer`]; [`Error::Interrupted`], [`Error::System`].
    pub(super) fn accept(listener: &Listener, timeout: Duration, trust: &Trust, cancel: &Cancel) -> Result<Self> {
        let deadline = deadline_after(timeout);
        loop {
            if !wait(cancel, listener.as_fd(), PollFlags::POLLIN, deadline)? {
                return Err(Error::Peer(PeerError::NoConsumer { waited: timeout }));
            }
            let Some(socket) = accept(listener)? else { continue };
            let allowed = trust.check(peer_of(&socket)?);
            let control = Self::new(RecordSocket::new(socket, timeout, cancel)?);
            match allowed {
                Ok(()) => return Ok(control),
                // Reject the peer and keep listening.
                Err(error) => {
                    let error = Some(ErrorDetails::of(&error));
                    if let Err(unsent) = control.send(&ControlRecord::Shared { error }) {
                        tracing::debug!(%unsent, "the rejection can't be sent");
                    }
                }
            }
        }
    }

    /// Connects to the peer that listens on a path. Waits up to `timeout` for the peer to listen.
    pub(super) fn connect(path: &Path, timeout: Duration, trust: &Trust, cancel: &Cancel) -> Result<Self> {
        let (socket, _) = connect_socket(path, timeout, trust, cancel)?;
        Ok(Self::new(RecordSocket::new(socket, timeout, cancel)?))
    }

    pub(super) fn cancel(&self) -> &Cancel {
        self.line.cancel()
    }

    /// Sets the timeout of each wait.
    pub(super) fn set_timeout(&mut self, timeout: Duration) {
        self.line.set_timeout(timeout);
    }

    /// Exchanges hellos with the findings of the `driver` probe. Returns the peer's environment and finding.
    pub(super) fn greet(
        &self,
        backend: Backend,
        environment: &Environment,
        driver: Option<&Finding>,
    ) -> Result<(Environment, Option<Finding>)> {
        let (tool, driver) = (stamp::tool(), driver.cloned().map(Box::new));
        let hello = ControlRecord::Hello {
            version: VERSION,
            tool,
            backend,
            environment: Box::new(environment.clone()),
            driver,
        };
        // A rejected peer can't send, but still receives the reason.
        let sent = self.send(&hello);
        match self.receive().map_err(|error| sent.err().unwrap_or(error))? {
            ControlRecord::Hello { version, .. } if version != VERSION => {
                let message = format!("the peer uses version {version} of the doctor's records, this side {VERSION}");
                Err(Error::Peer(PeerError::Mismatch { code: ErrorCode::Version, message }))
            }
            ControlRecord::Hello { backend: theirs, .. } if theirs != backend => {
                let message = format!("this side tests {backend}, and the peer {theirs}");
                Err(Error::Peer(PeerError::Mismatch { code: ErrorCode::Backend, message }))
            }
            ControlRecord::Hello { environment, driver, .. } => Ok((*environment, driver.map(|driver| *driver))),
            ControlRecord::Shared { error: Some(error) } => {
                Err(Error::Peer(PeerError::Reported { code: ErrorCode::Refused, message: error.message }))
            }
            other => Err(unexpected(&other, "hello")),
        }
    }

    pub(super) fn send(&self, record: &ControlRecord) -> Result<()> {
        self.line.send(record)
    }

    pub(super) fn receive(&self) -> Result<ControlRecord> {
        self.receive_within(self.line.timeout())
    }

    pub(super) fn receive_within(&self, timeout: Duration) -> Result<ControlRecord> {
        decode(self.line.receive_value_within(timeout)?)
    }
}

fn decode(mut value: Value) -> Result<ControlRecord> {
    clean_all(&mut value);
    typed(value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::line::parse;

    #[test]
    fn records_are_validated_and_sanitized() {
        for record in ["", "[]", "{}", r#"{"kind":"new"}"#, r#"{"kind":"begin"}"#, "\u{0}"] {
            let decoded = parse(record.as_bytes()).and_then(decode);
            assert!(matches!(decoded, Err(Error::Peer(PeerError::Protocol(_)))), "{record:?}");
        }
        let record = parse(br#"{"kind":"begin","probe":"a\u001b[31mb","new":1}"#).and_then(decode);
        assert!(matches!(record, Ok(ControlRecord::Begin { probe }) if probe == "a [31mb"));
    }
}
