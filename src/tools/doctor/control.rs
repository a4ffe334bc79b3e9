//! What two ends of a meeting tell each other beside the memory: JSON records over a socket of their own.

use std::time::{Duration, Instant};

use nix::poll::PollFlags;
use rustix::{
    io::Errno,
    net::{RecvFlags, SendFlags},
};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::{os::fd::AsFd, path::Path};

use super::{
    Environment, Finding,
    report::{DeviceReport, Seen},
};
use crate::{
    channel::{Cancel, Channel, Listener, Trust, connect, deadline_after},
    driver::{Backend, DeviceUuid},
    error::{Error, ErrorCode, PeerError, ProtocolError, Result},
    wire::clean,
};

/// The version of these records. Whoever speaks another one is told so and left.
pub(super) const VERSION: u32 = 2;

/// The longest record.
const MAX_RECORD: usize = 128 << 10;

/// How often a wait looks up.
const TICK: Duration = Duration::from_millis(20);

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
    channel: Channel,
    timeout: Duration,
}

impl Control {
    /// Waits for somebody to connect. `tick` is called meanwhile; its error ends the waiting.
    pub(super) fn accept(
        listener: &Listener,
        timeout: Duration,
        trust: &Trust,
        cancel: &Cancel,
        tick: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Self> {
        let deadline = deadline_after(timeout);
        loop {
            let slice = deadline.min(Instant::now() + TICK);
            if !cancel.wait(listener.as_fd(), PollFlags::POLLIN, slice)? {
                tick()?;
                if Instant::now() >= deadline {
                    return Err(Error::Peer(PeerError::NoConsumer { waited: timeout }));
                }
                continue;
            }
            let Some(socket) = listener.accept()? else { continue };
            let channel = Channel::new(socket, timeout, cancel)?;
            match trust.check(channel.peer()) {
                Ok(()) => return Ok(Self { channel, timeout }),
                // Whoever it is does not keep out the one who is waited for, but is told.
                Err(error) => {
                    let error = Some(Seen::of(&error));
                    if let Err(unsent) = (Self { channel, timeout }).send(&Say::Lent { error }) {
                        tracing::debug!(%unsent, "a stranger can't be told");
                    }
                }
            }
        }
    }

    /// Connects to whoever listens at a path, or will within the time.
    pub(super) fn connect(path: &Path, timeout: Duration, trust: &Trust, cancel: &Cancel) -> Result<Self> {
        Ok(Self { channel: connect(path, timeout, trust, cancel)?, timeout })
    }

    pub(super) fn cancel(&self) -> &Cancel {
        self.channel.cancel()
    }

    /// How long it waits from now on.
    pub(super) fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// Says who this is, and hears who the other one is.
    pub(super) fn greet(&mut self, backend: Backend, environment: &Environment) -> Result<Environment> {
        Ok(self.greet_with(backend, environment, None)?.0)
    }

    /// Says too what came of starting the driver, and hears it of the other one.
    pub(super) fn greet_with(
        &mut self,
        backend: Backend,
        environment: &Environment,
        driver: Option<&Finding>,
    ) -> Result<(Environment, Option<Finding>)> {
        let (tool, driver) = (super::tool(), driver.cloned().map(Box::new));
        let hello = Say::Hello { version: VERSION, tool, backend, environment: Box::new(environment.clone()), driver };
        // One who is not let in finds the door closed, and may still read why.
        let sent = self.send(&hello);
        match self.receive().map_err(|error| sent.err().unwrap_or(error))? {
            Say::Hello { version, .. } if version != VERSION => {
                let message =
                    format!("the other end speaks version {version} of the doctor's records, this one {VERSION}");
                Err(Error::Peer(PeerError::Mismatch { code: ErrorCode::Version, message }))
            }
            Say::Hello { backend: theirs, .. } if theirs != backend => {
                let message = format!("this end tests {backend} and the other one {theirs}");
                Err(Error::Peer(PeerError::Mismatch { code: ErrorCode::Backend, message }))
            }
            Say::Hello { environment, driver, .. } => Ok((*environment, driver.map(|driver| *driver))),
            Say::Lent { error: Some(seen) } => {
                Err(Error::Peer(PeerError::Reported { code: ErrorCode::Refused, message: seen.message }))
            }
            other => unexpected(&other, "hello"),
        }
    }

    pub(super) fn send(&mut self, say: &Say) -> Result<()> {
        let record = serde_json::to_vec(say).map_err(|error| ProtocolError::Content(error.to_string()))?;
        if record.len() > MAX_RECORD {
            return Err(ProtocolError::LongRecord { most: MAX_RECORD }.into());
        }
        let deadline = deadline_after(self.timeout);
        loop {
            match rustix::net::send(&*self.channel.socket(), &record, SendFlags::NOSIGNAL) {
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    if !self.cancel().wait(self.channel.socket().as_fd(), PollFlags::POLLOUT, deadline)? {
                        return Err(Error::Peer(PeerError::Timeout { purpose: "to send", waited: self.timeout }));
                    }
                }
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(Error::Peer(PeerError::Gone { purpose: "to send" })),
                Err(errno) => return Err(Error::system("send to the other end", errno)),
            }
        }
    }

    pub(super) fn receive(&mut self) -> Result<Say> {
        self.receive_within(self.timeout)
    }

    pub(super) fn receive_within(&mut self, timeout: Duration) -> Result<Say> {
        let purpose = "for the other end of the probes";
        let deadline = deadline_after(timeout);
        let mut record = vec![0; MAX_RECORD + 1];
        let mut resets = 0;
        loop {
            // Descriptors that nobody asked for are dropped by the kernel: there is no room for them.
            match rustix::net::recv(&*self.channel.socket(), &mut record[..], RecvFlags::DONTWAIT) {
                // A reset is told once, before what the other end had still sent: read on behind it.
                Err(Errno::CONNRESET) if resets == 0 => resets += 1,
                Ok((0, _)) | Err(Errno::CONNRESET | Errno::PIPE) => {
                    return Err(Error::Peer(PeerError::Gone { purpose }));
                }
                Ok((length, _)) if length > MAX_RECORD => {
                    return Err(ProtocolError::LongRecord { most: MAX_RECORD }.into());
                }
                Ok((length, _)) => return decode(&record[..length]),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    if !self.cancel().wait(self.channel.socket().as_fd(), PollFlags::POLLIN, deadline)? {
                        return Err(Error::Peer(PeerError::Timeout { purpose, waited: timeout }));
                    }
                }
                Err(errno) => return Err(Error::system("receive from the other end", errno)),
            }
        }
    }
}

fn decode(record: &[u8]) -> Result<Say> {
    let wrong = |error: serde_json::Error| {
        let mut reason = error.to_string();
        clean(&mut reason);
        Error::from(ProtocolError::Body { kind: "record", reason })
    };
    let mut value: Value = serde_json::from_slice(record).map_err(wrong)?;
    clean_all(&mut value);
    serde_json::from_value(value).map_err(wrong)
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

    #[test]
    fn what_is_no_record_is_an_error_and_no_text_reaches_a_terminal_as_it_came() {
        for record in ["", "[]", "{}", r#"{"kind":"new"}"#, r#"{"kind":"begin"}"#, "\u{0}"] {
            assert!(matches!(decode(record.as_bytes()), Err(Error::Peer(PeerError::Protocol(_)))), "{record:?}");
        }
        let said = decode(br#"{"kind":"begin","probe":"a\u001b[31mb","new":1}"#);
        assert!(matches!(said, Ok(Say::Begin { probe }) if probe == "a [31mb"));
    }
}
