//! JSON records over a socket, between the processes of the doctor and of the benchmarks.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::Duration,
};

use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;

use vmmfd::{
    channel::{Cancel, Channel},
    error::{Error, ProtocolError, Result},
    internals::{Record, RecordSocket, clean, deadline_after},
};

/// The longest record in bytes.
const MAX_RECORD: usize = 128 << 10;

/// One side of a connection for JSON records, and raw records in between.
#[derive(Debug)]
pub struct Line {
    socket: RecordSocket,
    /// The purpose of a receive, for error messages.
    purpose: &'static str,
}

impl Line {
    /// Wraps a socket. `purpose` completes the sentence "waiting ...".
    pub fn new(socket: RecordSocket, purpose: &'static str) -> Self {
        Self { socket, purpose }
    }

    /// A connected pair. The second socket is for another process, and blocks.
    pub fn pair(timeout: Duration, cancel: &Cancel, purpose: &'static str) -> Result<(Self, OwnedFd)> {
        let (own, other) = Channel::socket_pair()?;
        Ok((Self::new(RecordSocket::new(own, timeout, cancel)?, purpose), other))
    }

    pub fn cancel(&self) -> &Cancel {
        self.socket.cancel()
    }

    pub fn timeout(&self) -> Duration {
        self.socket.timeout()
    }

    /// Sends a JSON record. Blocks while the peer's queue is full, up to the timeout.
    ///
    /// # Errors
    /// [`PeerError::Protocol`](vmmfd::error::PeerError::Protocol) if the record is too long (nothing is sent); [`PeerError::Gone`],
    /// [`PeerError::Timeout`], [`Error::Interrupted`], [`Error::System`].
    pub fn send(&self, record: &impl Serialize) -> Result<()> {
        self.send_with(record, &[])
    }

    /// As [`Line::send`], with descriptors.
    pub fn send_with(&self, record: &impl Serialize, fds: &[BorrowedFd<'_>]) -> Result<()> {
        let record = serde_json::to_vec(record).map_err(|error| ProtocolError::Content(error.to_string()))?;
        if record.len() > MAX_RECORD {
            return Err(ProtocolError::LongRecord { most: MAX_RECORD }.into());
        }
        self.send_bare(&record, fds)
    }

    /// Receives a JSON record. Blocks up to the timeout. Unexpected descriptors are closed.
    ///
    /// # Errors
    /// [`PeerError::Timeout`](vmmfd::error::PeerError::Timeout); [`PeerError::Gone`] at the end of the connection; [`PeerError::Protocol`]
    /// if the record is too long, or not JSON of this type; [`Error::Interrupted`], [`Error::System`].
    pub fn receive<T: DeserializeOwned>(&self) -> Result<T> {
        self.receive_with().map(|(record, _)| record)
    }

    /// As [`Line::receive`], with the record's descriptors.
    pub fn receive_with<T: DeserializeOwned>(&self) -> Result<(T, Vec<OwnedFd>)> {
        let mut bytes = vec![0; MAX_RECORD + 1];
        let record = self.socket.receive_by(&mut bytes, deadline_after(self.timeout()), self.purpose)?;
        let read = serde_json::from_slice(&bytes[..record.length]).map_err(|error| invalid(&error))?;
        Ok((read, record.fds))
    }

    /// Sends raw bytes with descriptors in one system call.
    pub fn send_bare(&self, record: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        self.socket.send("a record", record, fds)
    }

    /// Receives raw bytes. The buffer must be one byte longer than the longest record. One system call on a blocking socket.
    pub fn receive_bare(&self, record: &mut [u8]) -> Result<Record> {
        self.socket.receive(record, self.purpose)
    }
}

impl AsFd for Line {
    /// Readable when a record has arrived, or the peer has closed the connection.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// The only descriptor of a record.
///
/// # Errors
/// [`PeerError::Protocol`](vmmfd::error::PeerError::Protocol) for another number of descriptors.
pub fn only(mut fds: Vec<OwnedFd>) -> Result<OwnedFd> {
    match (fds.pop(), fds.is_empty()) {
        (Some(fd), true) => Ok(fd),
        _ => Err(ProtocolError::Content("a record that is to bring one descriptor".to_owned()).into()),
    }
}

pub fn typed<T: DeserializeOwned>(value: Value) -> Result<T> {
    serde_json::from_value(value).map_err(|error| invalid(&error))
}

fn invalid(error: &serde_json::Error) -> Error {
    let mut reason = format!("the body of record is wrong: {error}");
    clean(&mut reason);
    ProtocolError::Content(reason).into()
}
