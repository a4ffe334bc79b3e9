//! What two ends of a meeting tell each other beside the memory: JSON records over a socket of their own.

use std::{os::fd::AsFd, path::Path, time::Duration};

use nix::poll::PollFlags;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{
    Environment, Finding,
    report::{DeviceReport, Seen},
};
use crate::{
    channel::{Cancel, Listener, Peer, Trust, connect_socket, deadline_after, record::RecordSocket},
    driver::{Backend, DeviceUuid},
    error::{Error, ErrorCode, ProtocolError, Result},
    tools::line::{Line, typed},
    wire::clean,
};

/// The version of these records. Whoever speaks another one is told so and left.
pub(super) const VERSION: u32 = 2;

/// One record. Fields that are not known are ignored; kinds that are not known end the meeting.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(super) enum Say {
    /// The first word of both ends, before it is known whether they understand each other.
    Hello {
        version: u32,
        tool: String,
        backend: Backend,
        environment: Box<Environment>,
        /// What came of starting the driver, where the other end is told.
        #[serde(default)]
        driver: Option<Box<Finding>>,
    },
    /// "Memory waits at the socket: come and take it."
    Begin { probe: String },
    /// What came of it, and what it took in microseconds.
    Done {
        open_us: Option<u64>,
        #[serde(default)]
        wait_us: Option<u64>,
        bytes: Option<u64>,
        /// The device that it was taken on.
        #[serde(default)]
        through: Option<DeviceUuid>,
        error: Option<Seen>,
    },
    /// "Now you lend, on this device." It is answered by `begin`, or by `lent` at once if nothing comes of it.
    Lend { probe: String, device: DeviceUuid },
    /// What came of lending.
    Lent { error: Option<Seen> },
    /// An event of the driver's, for the other end to wait for.
    Event { device: DeviceUuid, handle: String },
    /// A device that is to be tried, for the other end's report. All of them come before anything is tried.
    Device(DeviceReport),
    /// What one probe found on a device, for the other end's report.
    Found { device: i32, finding: Finding },
    /// The end.
    Bye {},
}

/// Memory that was taken.
#[derive(Debug, Clone, Copy)]
pub(super) struct Taken {
    /// How long it took to open, in microseconds.
    pub(super) open_us: u64,
    pub(super) bytes: u64,
    /// The device that it was taken on, which need not be its own.
    pub(super) through: Option<DeviceUuid>,
}

impl Say {
    /// What came of taking memory.
    pub(super) fn done(taken: &Result<Taken>) -> Self {
        let (open_us, bytes, through) = match taken {
            Ok(taken) => (Some(taken.open_us), Some(taken.bytes), taken.through),
            Err(_) => (None, None, None),
        };
        Self::Done { open_us, wait_us: None, bytes, through, error: taken.as_ref().err().map(Seen::of) }
    }

    fn name(&self) -> &'static str {
        match self {
            Self::Hello { .. } => "hello",
            Self::Begin { .. } => "begin",
            Self::Done { .. } => "done",
            Self::Lend { .. } => "lend",
            Self::Lent { .. } => "lent",
            Self::Event { .. } => "event",
            Self::Device(_) => "device",
            Self::Found { .. } => "found",
            Self::Bye {} => "bye",
        }
    }
}

/// What came in place of what belongs.
pub(super) fn unexpected<T>(got: &Say, want: &'static str) -> Result<T> {
    Err(ProtocolError::Unexpected { got: got.name(), want }.into())
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
    /// [`Error::NoConsumer`]; [`Error::Interrupted`], [`Error::System`].
    pub(super) fn accept(listener: &Listener, timeout: Duration, trust: &Trust, cancel: &Cancel) -> Result<Self> {
        let deadline = deadline_after(timeout);
        loop {
            if !cancel.wait(listener.as_fd(), PollFlags::POLLIN, deadline)? {
                return Err(Error::NoConsumer { waited: timeout });
            }
            let Some(socket) = listener.accept()? else { continue };
            let allowed = trust.check(Peer::of(&socket)?);
            let control = Self::new(RecordSocket::new(socket, timeout, cancel)?);
            match allowed {
                Ok(()) => return Ok(control),
                // Reject the peer and keep listening.
                Err(error) => {
                    let error = Some(Seen::of(&error));
                    if let Err(unsent) = control.send(&Say::Lent { error }) {
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
    pub(super) fn greet(&mut self, backend: Backend, environment: &Environment) -> Result<Environment> {
        Ok(self.greet_with(backend, environment, None)?.0)
    }

    /// As [`Control::greet`], with what each end's `driver` probe found.
    pub(super) fn greet_with(
        &mut self,
        backend: Backend,
        environment: &Environment,
        driver: Option<&Finding>,
    ) -> Result<(Environment, Option<Finding>)> {
        let (tool, driver) = (super::tool(), driver.cloned().map(Box::new));
        let hello = Say::Hello { version: VERSION, tool, backend, environment: Box::new(environment.clone()), driver };
        // An end that is rejected can't send any more, and can still receive why.
        let sent = self.send(&hello);
        match self.receive().map_err(|error| sent.err().unwrap_or(error))? {
            Say::Hello { version, .. } if version != VERSION => {
                let message =
                    format!("the other end speaks version {version} of the doctor's records, this one {VERSION}");
                Err(Error::Mismatch { code: ErrorCode::Version, message })
            }
            Say::Hello { backend: theirs, .. } if theirs != backend => {
                let message = format!("this end tests {backend} and the other one {theirs}");
                Err(Error::Mismatch { code: ErrorCode::Backend, message })
            }
            Say::Hello { environment, driver, .. } => Ok((*environment, driver.map(|driver| *driver))),
            Say::Lent { error: Some(seen) } => Err(Error::Peer { code: ErrorCode::Refused, message: seen.message }),
            other => unexpected(&other, "hello"),
        }
    }

    pub(super) fn send(&self, say: &Say) -> Result<()> {
        self.line.send(say)
    }

    pub(super) fn receive(&self) -> Result<Say> {
        self.receive_within(self.line.timeout())
    }

    pub(super) fn receive_within(&self, timeout: Duration) -> Result<Say> {
        decode(self.line.receive_value_within(timeout)?)
    }
}

fn decode(mut value: Value) -> Result<Say> {
    clean_all(&mut value);
    typed(value)
}

/// Takes out of every text what a terminal would heed: the other end's words are printed here.
pub(super) fn clean_all(value: &mut Value) {
    match value {
        Value::String(text) => clean(text),
        Value::Array(values) => values.iter_mut().for_each(clean_all),
        Value::Object(fields) => fields.values_mut().for_each(clean_all),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tools::line::parse;

    #[test]
    fn what_is_no_record_is_an_error_and_no_text_reaches_a_terminal_as_it_came() {
        for record in ["", "[]", "{}", r#"{"kind":"new"}"#, r#"{"kind":"begin"}"#, "\u{0}"] {
            let decoded = parse(record.as_bytes()).and_then(decode);
            assert!(matches!(decoded, Err(Error::Protocol(_))), "{record:?}");
        }
        let said = parse(br#"{"kind":"begin","probe":"a\u001b[31mb","new":1}"#).and_then(decode);
        assert!(matches!(said, Ok(Say::Begin { probe }) if probe == "a [31mb"));
    }
}
