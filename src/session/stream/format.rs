//! The description of a stream's buffers, sent when it changes.

use std::{
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    sync::Arc,
};

use super::misuse;
use crate::{
    array::ArrayDescriptor,
    channel::record::send_raw,
    error::{Error, ProtocolError, Result},
    sys::table,
    wire::{self, MAX_BLOB, Message, NamedArray},
};

/// Describes the buffers that follow: named arrays in each buffer, and bytes of the program's own. Empty until the publisher sets it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Format {
    /// The arrays in each buffer, with their names: at most 64. Their offsets count from the start of the buffer.
    pub arrays: Vec<(String, ArrayDescriptor)>,
    /// Bytes of the program's own, at most 64 KiB.
    pub blob: Vec<u8>,
}

impl Format {
    /// A format of one array.
    pub fn of(name: impl Into<String>, array: ArrayDescriptor) -> Self {
        Self { arrays: vec![(name.into(), array)], blob: Vec::new() }
    }

    /// The layout of an array.
    pub fn array(&self, name: &str) -> Option<&ArrayDescriptor> {
        self.arrays.iter().find(|(known, _)| known == name).map(|(_, array)| array)
    }
}

/// A format's record, with the descriptor of its blob.
#[derive(Debug)]
pub(super) struct FormatRecord {
    bytes: Vec<u8>,
    blob: Option<OwnedFd>,
}

impl FormatRecord {
    /// # Errors
    /// [`Error::Misuse`] for more than the protocol allows; [`Error::System`].
    pub(super) fn of(format: &Format) -> Result<Arc<Self>> {
        let named = |(name, array): &(String, ArrayDescriptor)| NamedArray { name: name.clone(), array: array.clone() };
        let length = Some(format.blob.len() as u64).filter(|length| *length > 0);
        let message = Message::Format(wire::Format { arrays: format.arrays.iter().map(named).collect(), length });
        let bytes = message.encode().map_err(|error| misuse(error.to_string()))?;
        let blob = length.map(|_| table::sealed(&format.blob)).transpose();
        let blob = blob.map_err(|error| Error::system("create a memfd for a format", error))?;
        Ok(Arc::new(Self { bytes, blob }))
    }

    /// # Errors
    /// See [`send_raw`].
    pub(super) fn send(&self, socket: &UnixStream) -> io::Result<()> {
        let fds: Vec<_> = self.blob.iter().map(AsFd::as_fd).collect();
        send_raw(socket, &self.bytes, &fds)
    }
}

/// Reads a received format.
///
/// # Errors
/// [`ProtocolError::Content`] if its blob is not a sealed memfd of the claimed length.
pub(super) fn read(format: wire::Format, fds: Vec<OwnedFd>) -> Result<Arc<Format>> {
    let arrays = format.arrays.into_iter().map(|NamedArray { name, array }| (name, array)).collect();
    let blob = match (format.length, fds.into_iter().next()) {
        (Some(length), Some(fd)) => table::read(fd, length, MAX_BLOB as u64).map_err(ProtocolError::Content)?,
        _ => Vec::new(),
    };
    Ok(Arc::new(Format { arrays, blob }))
}
