//! The log of everything that the server must not forget, in a memfd: it is there as long as any process holds the descriptor,
//! whatever became of the one that wrote it.
//!
//! ```text
//! header   magic "VMMFDCAT" | u32 format | u32 crc32 of the rest of the header | u64 generation
//! record   u32 length of the payload | u32 crc32 of length and payload | payload: one JSON object
//! ```
//!
//! Numbers are little-endian. A record is appended whole behind the others; what a killed writer left of one is cut off by the next
//! that opens it. A log that has grown long is written anew into another memfd, whose header is written last and counts one generation
//! more: of several logs the valid one of the highest generation holds.

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

pub(crate) use self::read::read_as_json;
pub(in crate::broker) use self::{
    read::{Records, Unreadable},
    record::Record,
    rewrite::Rewrite,
    segment_id::SegmentId,
};

/// The layout that this build writes, and the only one that it reads.
const FORMAT: u32 = 1;

const MAGIC: [u8; 8] = *b"VMMFDCAT";

/// The length of the header, in bytes.
const HEADER: usize = 24;

/// The length of what stands before a payload, in bytes.
const PREFIX: usize = 8;

/// How much longer than twice its length when it was last written whole the log becomes, in bytes, before it is written again.
const SLACK: u64 = 4 << 20;

/// How much of a log is read or written at once, in bytes.
const CHUNK: usize = 256 << 10;

/// Why a record can't be written.
#[derive(Debug, thiserror::Error)]
pub(in crate::broker) enum CatalogueError {
    /// No record is that long.
    #[error("a record of {length} bytes is too long for the catalogue")]
    Long { length: usize },

    /// The limit of this process on the length of files. To write beyond it would end the process.
    #[error(
        "the catalogue would have {needed} bytes, and this process may write files of {limit} bytes (RLIMIT_FSIZE)"
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

/// The log, open to append.
#[derive(Debug)]
pub(in crate::broker) struct Catalogue {
    file: File,
    generation: u64,
    /// How many bytes hold records and the header.
    length: u64,
    /// Whether something behind that could not be cut off.
    torn: bool,
    /// The length when it was last written whole.
    base: u64,
    /// RLIMIT_FSIZE as it was when this was made.
    limit: u64,
    buffer: Vec<u8>,
}

impl Catalogue {
    /// A log of these records in an empty memfd. Does not block.
    ///
    /// # Errors
    /// [`CatalogueError`]. See pwrite(2).
    pub(in crate::broker) fn create(
        memfd: OwnedFd,
        records: impl IntoIterator<Item = Record>,
    ) -> Result<Self, CatalogueError> {
        let (length, limit, buffer) = (HEADER as u64, file_limit()?, Vec::new());
        let mut log = Self { file: File::from(memfd), generation: 0, length, torn: false, base: 0, limit, buffer };
        let mut rewrite = log.rewrite(log.file.try_clone().map_err(CatalogueError::system("duplicate"))?.into())?;
        records.into_iter().try_for_each(|record| rewrite.add(&record))?;
        rewrite.finish(&mut log)?;
        Ok(log)
    }

    /// Appends a record. When it returns, the record is what the next [`Catalogue::open`] finds, also if this process is killed.
    /// Does not block.
    ///
    /// # Errors
    /// [`CatalogueError`]: the log is then as it was.
    pub(in crate::broker) fn append(&mut self, record: &Record) -> Result<(), CatalogueError> {
        if self.torn {
            self.cut()?;
        }
        let mut buffer = std::mem::take(&mut self.buffer);
        buffer.clear();
        let result = encode(&mut buffer, record).and_then(|()| self.write_behind(&buffer));
        self.buffer = buffer;
        result
    }

    /// Whether the log has grown so long that it should be written anew: more than twice as long as it was then.
    pub(in crate::broker) fn should_compact(&self) -> bool {
        self.length > self.base.saturating_mul(2).saturating_add(SLACK)
    }

    /// Has it grow as much again before it should be written anew: that failed.
    pub(in crate::broker) fn postpone(&mut self) {
        self.base = self.length;
    }

    /// The memfd.
    pub(in crate::broker) fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Counts up with each log that was written anew.
    pub(in crate::broker) fn generation(&self) -> u64 {
        self.generation
    }

    /// Writes behind the last record.
    fn write_behind(&mut self, bytes: &[u8]) -> Result<(), CatalogueError> {
        let needed = self.length.saturating_add(bytes.len() as u64);
        if needed > self.limit {
            return Err(CatalogueError::Limit { needed, limit: self.limit });
        }
        // One pwrite(2), unless the kernel takes less at once.
        match self.file.write_all_at(bytes, self.length) {
            Ok(()) => {
                self.length = needed;
                Ok(())
            }
            Err(error) => {
                self.torn = true;
                // Should it fail, the next append tries again.
                let _ = self.cut();
                Err(CatalogueError::System { action: "write", source: error })
            }
        }
    }

    /// Cuts off what is behind the last record.
    fn cut(&mut self) -> Result<(), CatalogueError> {
        self.file.set_len(self.length).map_err(CatalogueError::system("shorten"))?;
        self.torn = false;
        Ok(())
    }
}

/// An empty memfd for a log.
///
/// # Errors
/// Those of memfd_create(2).
pub(in crate::broker) fn memfd() -> io::Result<OwnedFd> {
    crate::sys::memfd::empty(c"vmmfd-catalogue").map_err(io::Error::from)
}

fn file_limit() -> Result<u64, CatalogueError> {
    let limit = getrlimit(Resource::RLIMIT_FSIZE).map_err(io::Error::from);
    Ok(limit.map_err(CatalogueError::system("find the greatest length of"))?.0)
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

/// Appends a record to `buffer`; on an error that is as it was.
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
