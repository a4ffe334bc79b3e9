//! The records between server and keeper: JSON, and a piece of a manifest after it.

use std::{
    io::{self, IoSlice},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::net::{RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde::{Deserialize, Serialize};

use crate::{
    channel::record::receive_raw,
    wire::{MAX_FDS, shorten},
};

/// The most keys in a record.
pub(super) const MAX_TOGETHER: usize = 512;

/// The most bytes of a manifest in a record.
pub(super) const MAX_CHUNK: usize = 15 << 10;

/// The longest text, in bytes: encoded, it fits a record.
const MAX_TEXT: usize = 2048;

/// The longest record, in bytes.
const MAX_RECORD: usize = 16 << 10;

/// Ends the JSON of a record.
const END: u8 = 0;

/// A part of an entry: a piece of its manifest, and its next descriptors.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Piece {
    pub(super) key: u64,
    pub(super) is_first: bool,
    pub(super) is_last: bool,
    /// Whether only the manifest changes.
    pub(super) is_update: bool,
    /// The number of descriptors that the record carries.
    pub(super) descriptors: usize,
    /// After the JSON.
    #[serde(skip)]
    pub(super) manifest: Vec<u8>,
}

/// The process that connects to a keeper.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Role {
    /// A server that wants the keeper's entries.
    NextServer,
    /// A server that lost its keeper, and will send its entries.
    SameServer,
    NextKeeper,
}

/// One record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Message {
    Hello { version: u32, role: Role },
    Welcome { version: u32, allowed: u64 },
    Refused(String),
    Entry(Piece),
    Remove(Vec<u64>),
    Complete(bool),
    Received(u64),
    Sync(u64),
    Synced(u64),
    Serving,
    Stopping(String),
    Exit(String),
    Listener,
}

impl Message {
    /// Whether a keeper's state may differ after this message of a server: its twin is then outdated.
    pub(super) fn outdates_twin(&self) -> bool {
        !matches!(self, Self::Received(_) | Self::Sync(_) | Self::Stopping(_) | Self::Exit(_))
    }

    fn encode(&self) -> Vec<u8> {
        let mut message = self.clone();
        let mut manifest = Vec::new();
        match &mut message {
            Self::Refused(text) | Self::Stopping(text) | Self::Exit(text) => shorten(text, MAX_TEXT),
            Self::Entry(piece) => manifest = std::mem::take(&mut piece.manifest),
            _ => {}
        }
        let mut record = serde_json::to_vec(&message).expect("a message is plain data");
        record.push(END);
        record.extend(manifest);
        record
    }

    /// Returns `None` for a malformed record.
    fn decode(record: &[u8]) -> Option<Self> {
        let end = record.iter().position(|byte| *byte == END)?;
        let mut message = serde_json::from_slice(&record[..end]).ok()?;
        if let Self::Entry(piece) = &mut message {
            piece.manifest = record[end + 1..].to_vec();
        }
        Some(message)
    }
}

/// Sends a message, with the descriptors of an entry. Does not block.
///
/// # Errors
/// See sendmsg(2): `EAGAIN` if the socket is full, `ETOOMANYREFS` if too many descriptors are in flight.
pub(super) fn send(socket: impl AsFd, message: &Message, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let record = message.encode();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    loop {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        match sendmsg(&socket, &[IoSlice::new(&record)], &mut ancillary, flags) {
            Err(rustix::io::Errno::INTR) => {}
            sent => return sent.map(drop).map_err(io::Error::from),
        }
    }
}

/// The result of a receive.
#[derive(Debug)]
pub(super) enum Arrival {
    Message(Message, Vec<OwnedFd>),
    /// No record is queued.
    Nothing,
    /// The peer has closed, and everything it sent has been received.
    End,
}

/// Receives a message. Does not block.
///
/// # Errors
/// `InvalidData` for an unknown or malformed record; `Other` if descriptors were cut off; errors of recvmsg(2).
pub(super) fn receive(socket: impl AsFd) -> io::Result<Arrival> {
    let mut record = [0; MAX_RECORD];
    let mut resets = 0;
    let raw = loop {
        match receive_raw(&socket, &mut record, RecvFlags::DONTWAIT) {
            Ok(raw) => break raw,
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock => return Ok(Arrival::Nothing),
                io::ErrorKind::Interrupted => {}
                // Reported once, before queued records.
                io::ErrorKind::ConnectionReset if resets == 0 => resets += 1,
                io::ErrorKind::ConnectionReset => return Ok(Arrival::End),
                _ => return Err(error),
            },
        }
    };
    if raw.bytes == 0 {
        return Ok(Arrival::End);
    }
    if raw.flags.contains(ReturnFlags::CTRUNC) {
        let reason = "this process has no free descriptors to receive more: raise its open-file limit (LimitNOFILE=, ulimit -Hn)";
        return Err(io::Error::other(reason));
    }
    let message = Message::decode(&record[..raw.bytes]).filter(|_| !raw.flags.contains(ReturnFlags::TRUNC));
    let fits = |message: &Message| match message {
        Message::Entry(piece) => piece.descriptors == raw.fds.len(),
        Message::Listener => raw.fds.len() == 1,
        _ => raw.fds.is_empty(),
    };
    match message.filter(fits) {
        Some(message) => Ok(Arrival::Message(message, raw.fds)),
        None => {
            Err(io::Error::new(io::ErrorKind::InvalidData, "the peer sent a record that is not a keeper's message"))
        }
    }
}
