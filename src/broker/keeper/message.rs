//! The records between server and keeper.

use std::{
    io::{self, IoSlice},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::net::{RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use crate::{channel::record::receive_raw, wire::MAX_FDS};

/// The most keys in a record.
pub(super) const MAX_TOGETHER: usize = 1024;

/// The most bytes of a manifest in a record.
pub(super) const MAX_CHUNK: usize = 15 << 10;

/// The longest text, in bytes.
const MAX_TEXT: usize = 4096;

/// The longest record, in bytes.
const MAX_RECORD: usize = 16 << 10;

/// The bytes of an entry's record before the manifest: kind, key, flags, number of descriptors.
const PIECE_HEADER: usize = 11;

const _: () = assert!(MAX_TOGETHER * 8 < MAX_RECORD && MAX_TEXT < MAX_RECORD && MAX_CHUNK + PIECE_HEADER < MAX_RECORD);
const _: () = assert!(MAX_FDS <= u8::MAX as usize);

/// A part of an entry: a piece of its manifest, and its next descriptors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) key: u64,
    pub(super) is_first: bool,
    pub(super) is_last: bool,
    /// Whether only the manifest changes.
    pub(super) is_update: bool,
    /// The number of descriptors that the record carries.
    pub(super) descriptors: u8,
    pub(super) manifest: Vec<u8>,
}

/// One record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Message {
    Hello { version: u32, resends: bool },
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
    Succeed { version: u32 },
    Listener,
}

impl Message {
    /// Whether a keeper's state may differ after this message of a server: its twin is then outdated.
    pub(super) fn outdates_twin(&self) -> bool {
        !matches!(self, Self::Hello { .. } | Self::Received(_) | Self::Sync(_) | Self::Stopping(_) | Self::Exit(_))
    }

    fn encode(&self) -> Vec<u8> {
        let with = |kind: u8, parts: &[&[u8]]| [&[kind], parts.concat().as_slice()].concat();
        let text = |text: &str| text.as_bytes()[..text.len().min(MAX_TEXT)].to_vec();
        match self {
            Self::Hello { version, resends } => with(b'H', &[&version.to_le_bytes(), &[u8::from(*resends)]]),
            Self::Welcome { version, allowed } => with(b'W', &[&version.to_le_bytes(), &allowed.to_le_bytes()]),
            Self::Refused(why) => with(b'X', &[&text(why)]),
            Self::Entry(piece) => {
                let Piece { key, is_first, is_last, is_update, descriptors, manifest } = piece;
                let flags = u8::from(*is_first) | u8::from(*is_last) << 1 | u8::from(*is_update) << 2;
                with(b'K', &[&key.to_le_bytes(), &[flags, *descriptors], manifest])
            }
            Self::Remove(keys) => with(b'R', &[&keys.iter().flat_map(|key| key.to_le_bytes()).collect::<Vec<u8>>()]),
            Self::Complete(whole) => with(b'C', &[&[u8::from(*whole)]]),
            Self::Received(count) => with(b'A', &[&count.to_le_bytes()]),
            Self::Sync(number) => with(b'Y', &[&number.to_le_bytes()]),
            Self::Synced(number) => with(b'Z', &[&number.to_le_bytes()]),
            Self::Serving => with(b'S', &[]),
            Self::Stopping(held) => with(b'E', &[&text(held)]),
            Self::Exit(held) => with(b'Q', &[&text(held)]),
            Self::Succeed { version } => with(b'U', &[&version.to_le_bytes()]),
            Self::Listener => with(b'I', &[]),
        }
    }

    /// Returns `None` for a malformed record.
    fn decode(record: &[u8]) -> Option<Self> {
        let (kind, rest) = record.split_first()?;
        let number = |of: &[u8]| of.try_into().ok().map(u64::from_le_bytes);
        // The sender may have truncated the text within a character.
        let text = |of: &[u8]| String::from_utf8_lossy(of).into_owned();
        Some(match kind {
            b'H' => {
                let (version, resends) = rest.split_first_chunk()?;
                Self::Hello { version: u32::from_le_bytes(*version), resends: *resends.first()? != 0 }
            }
            b'W' => {
                let (version, allowed) = rest.split_first_chunk()?;
                Self::Welcome { version: u32::from_le_bytes(*version), allowed: number(allowed)? }
            }
            b'X' => Self::Refused(text(rest)),
            b'K' => {
                let (key, rest) = rest.split_first_chunk()?;
                let (&[flags, descriptors], manifest) = rest.split_first_chunk()?;
                Self::Entry(Piece {
                    key: u64::from_le_bytes(*key),
                    is_first: flags & 1 != 0,
                    is_last: flags & 2 != 0,
                    is_update: flags & 4 != 0,
                    descriptors,
                    manifest: manifest.to_vec(),
                })
            }
            b'R' => {
                let (keys, []) = rest.as_chunks() else { return None };
                Self::Remove(keys.iter().map(|key| u64::from_le_bytes(*key)).collect())
            }
            b'C' => Self::Complete(*rest.first()? != 0),
            b'A' => Self::Received(number(rest)?),
            b'Y' => Self::Sync(number(rest)?),
            b'Z' => Self::Synced(number(rest)?),
            b'S' => Self::Serving,
            b'E' => Self::Stopping(text(rest)),
            b'Q' => Self::Exit(text(rest)),
            b'U' => Self::Succeed { version: u32::from_le_bytes(*rest.first_chunk()?) },
            b'I' => Self::Listener,
            _ => return None,
        })
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
        Message::Entry(piece) => usize::from(piece.descriptors) == raw.fds.len(),
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
