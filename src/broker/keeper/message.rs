//! The records between server and keeper.

use std::{
    io::{self, IoSlice},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::net::{RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use crate::{channel::record::receive_raw, wire::MAX_FDS};

/// The most names in a record.
pub(super) const MAX_TOGETHER: usize = MAX_FDS;

/// The longest name, in bytes.
pub(super) const MAX_NAME: usize = 32;

/// The longest text, in bytes.
const MAX_TEXT: usize = 4096;

/// The longest record, in bytes.
const MAX_RECORD: usize = 16 << 10;

const _: () = assert!(MAX_TOGETHER * (MAX_NAME + 1) < MAX_RECORD && MAX_TEXT < MAX_RECORD);

/// One record. `Hold` carries a descriptor for each name, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Message {
    Hello { version: u32, resends: bool },
    Welcome { version: u32, allowed: u64 },
    Refused(String),
    Hold(Vec<String>),
    Remove(Vec<String>),
    Complete(bool),
    Received(u64),
    Sync(u64),
    Synced(u64),
    Serving,
    Stopping(String),
    Reload,
}

impl Message {
    fn encode(&self) -> Vec<u8> {
        let with = |kind: u8, parts: &[&[u8]]| [&[kind], parts.concat().as_slice()].concat();
        let text = |text: &str| text.as_bytes()[..text.len().min(MAX_TEXT)].to_vec();
        let names = |names: &[String]| -> Vec<u8> {
            names.iter().flat_map(|name| [&[name.len() as u8], name.as_bytes()].concat()).collect()
        };
        match self {
            Self::Hello { version, resends } => with(b'H', &[&version.to_le_bytes(), &[u8::from(*resends)]]),
            Self::Welcome { version, allowed } => with(b'W', &[&version.to_le_bytes(), &allowed.to_le_bytes()]),
            Self::Refused(why) => with(b'X', &[&text(why)]),
            Self::Hold(of) => with(b'K', &[&names(of)]),
            Self::Remove(of) => with(b'R', &[&names(of)]),
            Self::Complete(whole) => with(b'C', &[&[u8::from(*whole)]]),
            Self::Received(count) => with(b'A', &[&count.to_le_bytes()]),
            Self::Sync(number) => with(b'Y', &[&number.to_le_bytes()]),
            Self::Synced(number) => with(b'Z', &[&number.to_le_bytes()]),
            Self::Serving => with(b'S', &[]),
            Self::Stopping(held) => with(b'E', &[&text(held)]),
            Self::Reload => with(b'L', &[]),
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
            b'K' => Self::Hold(decode_names(rest)?),
            b'R' => Self::Remove(decode_names(rest)?),
            b'C' => Self::Complete(*rest.first()? != 0),
            b'A' => Self::Received(number(rest)?),
            b'Y' => Self::Sync(number(rest)?),
            b'Z' => Self::Synced(number(rest)?),
            b'S' => Self::Serving,
            b'E' => Self::Stopping(text(rest)),
            b'L' => Self::Reload,
            _ => return None,
        })
    }
}

fn decode_names(mut rest: &[u8]) -> Option<Vec<String>> {
    let mut names = Vec::new();
    while let Some((length, behind)) = rest.split_first() {
        let (name, behind) = behind.split_at_checked(usize::from(*length))?;
        // Names of passed descriptors are separated by colons.
        let fits =
            (1..=MAX_NAME).contains(&name.len()) && name.iter().all(|&byte| byte.is_ascii_graphic() && byte != b':');
        names.push(String::from_utf8(name.to_vec()).ok().filter(|_| fits)?);
        rest = behind;
    }
    Some(names)
}

/// Sends a message, with the descriptors of a `Hold`. Does not block.
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
        Message::Hold(names) => names.len() == raw.fds.len(),
        _ => raw.fds.is_empty(),
    };
    match message.filter(fits) {
        Some(message) => Ok(Arrival::Message(message, raw.fds)),
        None => {
            Err(io::Error::new(io::ErrorKind::InvalidData, "the peer sent a record that is not a keeper's message"))
        }
    }
}
