//! The log of the server's durable state, in a memfd. It exists as long as any process holds the descriptor, even if its writer was killed.
//!
//! ```text
//! header   magic "VMMFDCAT" | u32 format | u32 crc32 of the rest of the header | u64 generation
//! record   u32 length of the payload | u32 crc32 of length and payload | payload: one JSON object
//! ```
//!
//! Numbers are little-endian. Each record is appended whole. If a killed writer left an incomplete record, the next writer cuts it
//! off. A long log is compacted into another memfd, whose header has the next generation and is written last: of several logs, the valid
//! log with the highest generation counts.

mod read;
pub(in crate::broker) mod record;
mod rewrite;
mod segment_id;
#[cfg(test)]
mod tests;

use std::{
    fs::File,
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::FileExt,
    },
};

use nix::sys::resource::{Resource, getrlimit};

use crate::error::units::bytes;

pub(in crate::broker) use self::{
    read::{Records, Unreadable},
    record::Record,
    rewrite::Rewrite,
    segment_id::SegmentId,
};

/// The log format that this build writes, and the only format that it reads.
const FORMAT: u32 = 1;

const MAGIC: [u8; 8] = *b"VMMFDCAT";

/// The length of the header, in bytes.
const HEADER: usize = 24;

/// How many bytes precede a payload.
const PREFIX: usize = 8;

/// The minimal growth before compaction, in bytes: the log is compacted at twice its compacted length plus this.
const SLACK: u64 = 4 << 20;

/// How many bytes of a log to read or write at once.
const CHUNK: usize = 256 << 10;

/// Why a record can't be written.
#[derive(Debug, thiserror::Error)]
pub(in crate::broker) enum CatalogueError {
    /// The record's length does not fit 32 bits.
    #[error("a record of {length} bytes is too long for the catalogue")]
    Long { length: usize },

    /// This process's limit on file sizes. Exceeding it would raise SIGXFSZ.
    #[error(
        "the catalogue would have {}, and this process may write files of {} (RLIMIT_FSIZE)", bytes(*needed), bytes(*limit)
    )]
    Limit { needed: u64, limit: u64 },

    /// A system call failed.
    #[error("cannot {action} the catalogue")]
    System {
        action: &'static str,
        #[source]
        source: io::Error,
    },
}

impl CatalogueError {
    fn system(action: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::System { action, source }
    }
}

/// A log, open for appending.
#[derive(Debug)]
pub(in crate::broker) struct Catalogue {
    file: File,
    generation: u64,
    /// The length of the header and all records, in bytes.
    length: u64,
    /// Whether bytes after `length` could not be cut off yet.
    torn: bool,
    /// The length after the last compaction.
    base: u64,
    /// RLIMIT_FSIZE at the time of creation.
    limit: u64,
    buffer: Vec<u8>,
}

impl Catalogue {
    /// Creates a log of these records in an empty memfd. Does not block.
    ///
    /// # Errors
    /// [`CatalogueError`]. See pwrite(2).
    pub(in crate::broker) fn create(
        memfd: OwnedFd,
        records: impl IntoIterator<Item = Record>,
    ) -> Result<Self, CatalogueError> {
        let length = HEADER as u64;
        let limit = file_limit()?;
        let buffer = Vec::new();
        let mut log = Self { file: File::from(memfd), generation: 0, length, torn: false, base: 0, limit, buffer };
        let mut rewrite = log.rewrite(log.file.try_clone().map_err(CatalogueError::system("duplicate"))?.into())?;
        records.into_iter().try_for_each(|record| rewrite.add(&record))?;
        rewrite.finish(&mut log)?;
        Ok(log)
    }

    /// Appends a record. Once this returns, the next [`Catalogue::open`] finds the record, even if this process is killed. Does not block.
    ///
    /// # Errors
    /// [`CatalogueError`]; the log is unchanged.
    pub(in crate::broker) fn append(&mut self, record: &Record) -> Result<(), CatalogueError> {
        if self.torn {
            self.cut()?;
        }
        let mut buffer = std::mem::take(&mut self.buffer);
        buffer.clear();
        let result = encode(&mut buffer, record).and_then(|()| self.write_at_end(&buffer));
        self.buffer = buffer;
        result
    }

    /// Whether the log should be compacted: it has more than doubled since the last compaction.
    pub(in crate::broker) fn should_compact(&self) -> bool {
        self.length > self.base.saturating_mul(2).saturating_add(SLACK)
    }

    /// Postpones compaction after a failure, until the log has doubled again.
    pub(in crate::broker) fn postpone(&mut self) {
        self.base = self.length;
    }

    pub(in crate::broker) fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// The number of compactions since the first log.
    pub(in crate::broker) fn generation(&self) -> u64 {
        self.generation
    }

    /// Writes after the last record.
    fn write_at_end(&mut self, bytes: &[u8]) -> Result<(), CatalogueError> {
        let needed = self.length.saturating_add(bytes.len() as u64);
        if needed > self.limit {
            return Err(CatalogueError::Limit { needed, limit: self.limit });
        }
        // Usually one pwrite(2).
        match self.file.write_all_at(bytes, self.length) {
            Ok(()) => {
                self.length = needed;
                Ok(())
            }
            Err(error) => {
                self.torn = true;
                // If this fails, the next append tries again.
                let _ = self.cut();
                Err(CatalogueError::System { action: "write", source: error })
            }
        }
    }

    /// Cuts off everything after the last record.
    fn cut(&mut self) -> Result<(), CatalogueError> {
        self.file.set_len(self.length).map_err(CatalogueError::system("shorten"))?;
        self.torn = false;
        Ok(())
    }
}

/// Creates an empty memfd for a log.
///
/// # Errors
/// All errors of memfd_create(2).
pub(in crate::broker) fn memfd() -> io::Result<OwnedFd> {
    crate::sys::memfd::empty(c"vmmfd-catalogue").map_err(io::Error::from)
}

fn file_limit() -> Result<u64, CatalogueError> {
    let limit = getrlimit(Resource::RLIMIT_FSIZE).map_err(io::Error::from);
    Ok(limit.map_err(CatalogueError::system("find the size limit of"))?.0)
}

fn header(generation: u64) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[..8].copy_from_slice(&MAGIC);
    header[8..12].copy_from_slice(&FORMAT.to_le_bytes());
    header[16..24].copy_from_slice(&generation.to_le_bytes());
    let checksum = header_checksum(&header);
    header[12..16].copy_from_slice(&checksum.to_le_bytes());
    header
}

fn header_checksum(header: &[u8; HEADER]) -> u32 {
    checksum(&header[..12], &header[16..])
}

/// Appends a record to `buffer`, which is unchanged on error.
fn encode(buffer: &mut Vec<u8>, record: &Record) -> Result<(), CatalogueError> {
    let start = buffer.len();
    buffer.extend([0; PREFIX]);
    let written = serde_json::to_writer(&mut *buffer, record).map_err(io::Error::from);
    let length = buffer.len() - start - PREFIX;
    let prefix = written.map_err(CatalogueError::system("write a record for")).and_then(|()| {
        let length = u32::try_from(length).map_err(|_| CatalogueError::Long { length })?.to_le_bytes();
        Ok((length, checksum(&length, &buffer[start + PREFIX..])))
    });
    match prefix {
        Ok((length, checksum)) => {
            buffer[start..start + 4].copy_from_slice(&length);
            buffer[start + 4..start + PREFIX].copy_from_slice(&checksum.to_le_bytes());
            Ok(())
        }
        Err(error) => {
            buffer.truncate(start);
            Err(error)
        }
    }
}

fn checksum(first: &[u8], second: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(first);
    hasher.update(second);
    hasher.finalize()
}
