//! The child processes of the doctor, as their parent sees them. Every driver call runs in a child, which the parent kills if it is late.

use std::{os::fd::OwnedFd, path::PathBuf};

use serde::{Deserialize, de::DeserializeOwned};
use vmmfd::{
    channel::Cancel,
    driver::{Choice, Driver, open},
    session::Config,
};

use super::sharing::ControlRecord;
use crate::{
    child::{Process, ProcessEnd, command, start},
    doctor::prelude::*,
};

/// What the two processes of a probe have in common. A child's task is this and its role.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Setting {
    pub(super) backend: Backend,
    /// The socket for handoffs between the two processes. Files are created next to it.
    pub(super) socket: PathBuf,
    /// The timeout of each wait for the other process.
    pub(super) timeout: Duration,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) enum Role {
    /// Runs probes in order and sends each finding. Probes of a pair use memory of the device `owner`.
    Probes { device: Option<i32>, owner: Option<i32>, names: Vec<String> },
    /// Answers requests as the other process of a probe.
    Peer,
    /// Creates memory with a pattern, and sends its descriptor.
    Make { device: i32, pattern: u32 },
    /// Holds a received descriptor without the driver.
    Hold,
    /// Has memory with a pattern, and parks received memory with this pattern.
    Park { device: i32, pattern: u32 },
}

/// One side of an exchange between two processes, without the connection for its records.
#[derive(Debug)]
pub(super) struct Endpoint {
    pub(super) driver: Driver,
    pub(super) setting: Setting,
}

impl Endpoint {
    pub(super) fn open(setting: &Setting) -> Result<Self> {
        Ok(Self { driver: open(Choice::Only(setting.backend))?.driver, setting: setting.clone() })
    }

    pub(super) fn config(&self, cancel: &Cancel) -> Config {
        Config::default().timeout(self.setting.timeout).cancel(cancel)
    }
}

/// A child process. Drop kills it, with its children if it leads a group.
#[derive(Debug)]
pub(super) struct Child {
    process: Process,
    pub(super) line: Line,
}

impl Child {
    /// Starts a process that users call `name`. Each of its records may take until `limit`. If this process dies, it removes the folder. If it
    /// leads, see [`Process::spawn`].
    pub(super) fn start(
        name: &'static str,
        setting: &Setting,
        role: Role,
        folder: Option<&Path>,
        leads: bool,
        limit: Duration,
        cancel: &Cancel,
    ) -> Result<Self> {
        let (process, line) = start(name, &mut command(folder, &(setting, role))?, leads, limit, cancel)?;
        Ok(Self { process, line })
    }

    pub(super) fn pid(&self) -> u32 {
        self.process.pid().as_raw().unsigned_abs()
    }

    pub(super) fn kill(&mut self) {
        self.process.kill();
    }

    /// Receives a record and its descriptors.
    ///
    /// # Errors
    /// An error of kind `timeout` if the record is late: the process is killed. `exit` and `signal` if the process ended.
    pub(super) fn receive_with<T: DeserializeOwned>(&mut self) -> Result<(T, Vec<OwnedFd>), ErrorDetails> {
        let started = Instant::now();
        self.line.receive_with().map_err(|error| self.explain(error, started))
    }

    /// As [`Child::receive_with`], without descriptors.
    pub(super) fn receive<T: DeserializeOwned>(&mut self) -> Result<T, ErrorDetails> {
        self.receive_with().map(|(record, _)| record)
    }

    /// Waits until the driver of a [`Role::Peer`] has started.
    pub(super) fn ready(&mut self) -> Result<(), ErrorDetails> {
        match self.receive()? {
            ControlRecord::Ready {} => Ok(()),
            other => Err(other.unexpected("ready")),
        }
    }

    /// The reason for an error of the connection.
    fn explain(&mut self, error: Error, started: Instant) -> ErrorDetails {
        let limit = self.line.timeout();
        let ended = match &error {
            Error::Peer(PeerError::Timeout { .. }) => None,
            Error::Peer(PeerError::Gone { .. }) => match self.process.wait(started + limit, self.line.cancel()) {
                Ok(ended) => ended,
                Err(error) => return error.into(),
            },
            _ => return error.into(),
        };
        let (kind, name, message) = match ended {
            Some(ProcessEnd::Exited(_)) => ("exit", None, "the probe's process exited".to_owned()),
            Some(end @ ProcessEnd::Killed(signal)) => ("signal", signal, format!("its process {end}")),
            None => {
                self.kill();
                ("timeout", None, format!("it did not finish within {limit:?}, and was killed"))
            }
        };
        // The last line on standard error may have more.
        let more = self.process.last_error_line().map_or_else(String::new, |line| format!(": {line}"));
        let message = message + &more;
        ErrorDetails { name: name.map(|signal| signal.as_str().to_owned()), ..ErrorDetails::new(kind, message) }
    }
}
