//! What two ends of a probe send each other beside the memory: JSON records over a socket of their own.

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

use super::{Environment, ErrorDetails, Finding, clean::clean_all, report::DeviceReport};
use crate::{
    line::{Line, typed},
    stamp,
};

/// The version of these records. An end that has another version is rejected.
pub(super) const VERSION: u32 = 2;

/// One record. Unknown fields are ignored; an unknown kind is an error.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(super) enum ControlRecord {
    /// The first record of both ends.
    Hello {
        version: u32,
        tool: String,
        backend: Backend,
        environment: Box<Environment>,
        /// What the `driver` probe found at that end.
        #[serde(default)]
        driver: Option<Box<Finding>>,
    },
    /// Memory is offered at the socket. It is answered by `done`.
    Begin { probe: String },
    /// The result of opening memory or an event, with its timings in microseconds.
    Done {
        open_us: Option<u64>,
        #[serde(default)]
        wait_us: Option<u64>,
        bytes: Option<u64>,
        /// The device that the memory was opened on.
        #[serde(default)]
        through: Option<DeviceUuid>,
        error: Option<ErrorDetails>,
    },
    /// Asks the other end to share memory of this device. It is answered by `begin`, or at once by `lent` with an error.
    #[serde(rename = "lend")]
    Share { probe: String, device: DeviceUuid },
    /// The result of sharing.
    #[serde(rename = "lent")]
    Shared { error: Option<ErrorDetails> },
    /// An event of the driver, for the other end to wait for.
    Event { device: DeviceUuid, handle: String },
    /// A device that is to be tried, for the other end's report. All devices are sent before the first finding.
    Device(DeviceReport),
    /// A finding about a device, for the other end's report.
    Found { device: i32, finding: Finding },
    /// The end of the meeting.
    Bye {},
}

/// Memory that was opened.
#[derive(Debug, Clone, Copy)]
pub(super) struct OpenedMemory {
    /// How long that took, in microseconds.
    pub(super) open_us: u64,
    pub(super) bytes: u64,
    /// The device that it was opened on, which need not be its own.
    pub(super) through: Option<DeviceUuid>,
}

impl ControlRecord {
    /// The result of opening memory.
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

/// The error of a record that is not the one expected.
pub(super) fn unexpected(got: &ControlRecord, want: &'static str) -> Error {
    ProtocolError::Unexpected { got: got.name(), want }.into()
}

/// A connection to the other end.
#[derive(Debug)]
pub(super) struct Control {
    line: Line,
}

impl Control {
    /// Over the line to a child process, or to the parent.
    pub(super) fn over(line: Line) -> Self {
        Self { line }
    }

    fn new(socket: RecordSocket) -> Self {
        Self::over(Line::new(socket, "for the other end of the probes"))
    }

    /// Waits up to `timeout` for a process to connect.
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

    /// Connects to the end that listens at a path. Waits up to `timeout` for it.
    pub(super) fn connect(path: &Path, timeout: Duration, trust: &Trust, cancel: &Cancel) -> Result<Self> {
        let (socket, _) = connect_socket(path, timeout, trust, cancel)?;
        Ok(Self::new(RecordSocket::new(socket, timeout, cancel)?))
    }

    pub(super) fn cancel(&self) -> &Cancel {
        self.line.cancel()
    }

    /// How long each wait may last from now on.
    pub(super) fn set_timeout(&mut self, timeout: Duration) {
        self.line.set_timeout(timeout);
    }

    /// Exchanges hellos, and returns the other end's environment.
    pub(super) fn greet(&self, backend: Backend, environment: &Environment) -> Result<Environment> {
        Ok(self.greet_with(backend, environment, None)?.0)
    }

    /// As [`Control::greet`], with what each end's `driver` probe found.
    pub(super) fn greet_with(
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
        // An end that is rejected can't send any more, and can still receive why.
        let sent = self.send(&hello);
        match self.receive().map_err(|error| sent.err().unwrap_or(error))? {
            ControlRecord::Hello { version, .. } if version != VERSION => {
                let message =
                    format!("the other end speaks version {version} of the doctor's records, this one {VERSION}");
                Err(Error::Peer(PeerError::Mismatch { code: ErrorCode::Version, message }))
            }
            ControlRecord::Hello { backend: theirs, .. } if theirs != backend => {
                let message = format!("this end tests {backend} and the other one {theirs}");
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
    fn an_invalid_record_is_an_error_and_control_characters_are_removed() {
        for record in ["", "[]", "{}", r#"{"kind":"new"}"#, r#"{"kind":"begin"}"#, "\u{0}"] {
            let decoded = parse(record.as_bytes()).and_then(decode);
            assert!(matches!(decoded, Err(Error::Peer(PeerError::Protocol(_)))), "{record:?}");
        }
        let record = parse(br#"{"kind":"begin","probe":"a\u001b[31mb","new":1}"#).and_then(decode);
        assert!(matches!(record, Ok(ControlRecord::Begin { probe }) if probe == "a [31mb"));
    }
}
