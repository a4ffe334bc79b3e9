//! Reads a log that another process wrote.

use std::{
    fs::File,
    os::{fd::OwnedFd, unix::fs::FileExt},
};

use super::{
    CHUNK, Catalogue, CatalogueError, FORMAT, HEADER, MAGIC, PREFIX, Record, checksum, file_limit, header_checksum,
};

/// Why a catalogue can't be read.
#[derive(Debug, thiserror::Error)]
pub(in crate::broker) enum Unreadable {
    /// Not a catalogue, or a log that was never finished.
    #[error("the descriptor is not a catalogue: it starts with {found} instead of \"VMMFDCAT\"")]
    Foreign { found: String },

    /// The header is incomplete.
    #[error("the catalogue has {length} bytes, and its header alone has {HEADER}")]
    Short { length: usize },

    /// The header is damaged.
    #[error("the catalogue's header has the checksum {found:#010x} instead of {want:#010x}")]
    Header { found: u32, want: u32 },

    /// Another build wrote this log.
    #[error("the catalogue has format {found}, and this build reads only format {FORMAT}")]
    Format { found: u32 },

    /// A complete record that this build does not know: a newer build wrote it.
    #[error("the catalogue's record at byte {offset} is unknown to this build")]
    Record {
        offset: u64,
        #[source]
        reason: serde_json::Error,
    },

    /// The log can't be read or opened for appending.
    #[error(transparent)]
    Catalogue(#[from] CatalogueError),
}

impl Catalogue {
    /// Opens a log that another process wrote, or still writes, to read its records. Reads only the header. After all records have been
    /// read, call [`Catalogue::append_after`].
    ///
    /// # Errors
    /// [`Unreadable`]; the log is unchanged.
    pub(in crate::broker) fn load(fd: OwnedFd) -> Result<(Self, Records), Unreadable> {
        let file = File::from(fd);
        let written = file.metadata().map_err(CatalogueError::system("examine"))?.len();
        let mut bytes = vec![0; usize::try_from(written).unwrap_or(usize::MAX).min(HEADER)];
        file.read_exact_at(&mut bytes, 0).map_err(CatalogueError::system("read"))?;
        let generation = read_header(&bytes)?;
        let length = HEADER as u64;
        let again = file.try_clone().map_err(CatalogueError::system("read"))?;
        let records = Records { file: again, written, at: length, base: 0, buffer: Vec::new(), consumed: 0 };
        let catalogue =
            Self { file, generation, length, torn: false, base: 0, limit: file_limit()?, buffer: Vec::new() };
        Ok((catalogue, records))
    }

    /// Continues the log after the last record read. A trailing incomplete record was never acknowledged. The first
    /// [`Catalogue::append`] cuts it off, not earlier, because another server may still be writing it.
    pub(in crate::broker) fn append_after(&mut self, records: &Records) {
        (self.length, self.base, self.torn) = (records.at, records.base, records.written > records.at);
        if self.torn {
            let bytes = records.written - records.at;
            tracing::info!(bytes, "the catalogue ends with an incomplete record");
        }
    }
}

/// The records of a log, in order. Only a small part of the log is in memory at a time.
#[derive(Debug)]
pub(in crate::broker) struct Records {
    file: File,
    /// The length of the file when it was opened.
    written: u64,
    /// The offset of the next record.
    at: u64,
    /// The length after the last compaction.
    base: u64,
    buffer: Vec<u8>,
    /// The offset of the next record in the buffer.
    consumed: usize,
}

impl Records {
    /// Reads `length` bytes at the next record, or `None` if the file is shorter.
    fn peek(&mut self, length: usize) -> Result<Option<&[u8]>, Unreadable> {
        if self.buffer.len() - self.consumed < length {
            let left = self.written - self.at;
            if left < length as u64 {
                return Ok(None);
            }
            self.buffer.drain(..self.consumed);
            self.consumed = 0;
            let have = self.buffer.len();
            let more = length.max(CHUNK).min(usize::try_from(left).unwrap_or(usize::MAX));
            // Release the memory of an earlier long record.
            self.buffer.shrink_to(more);
            self.buffer.resize(more, 0);
            let read = self.file.read_exact_at(&mut self.buffer[have..], self.at + have as u64);
            read.map_err(CatalogueError::system("read"))?;
        }
        Ok(Some(&self.buffer[self.consumed..self.consumed + length]))
    }

    /// Reads the next record, or `None` if it is incomplete.
    fn read(&mut self) -> Result<Option<Record>, Unreadable> {
        let offset = self.at;
        let Some(&[l0, l1, l2, l3, c0, c1, c2, c3]) = self.peek(PREFIX)?.and_then(<[u8]>::first_chunk) else {
            return Ok(None);
        };
        let (length, found) = ([l0, l1, l2, l3], u32::from_le_bytes([c0, c1, c2, c3]));
        let whole = PREFIX + u32::from_le_bytes(length) as usize;
        let Some(bytes) = self.peek(whole)? else { return Ok(None) };
        let payload = &bytes[PREFIX..];
        if found != checksum(&length, payload) {
            return Ok(None);
        }
        let record = serde_json::from_slice(payload).map_err(|reason| Unreadable::Record { offset, reason })?;
        (self.at, self.consumed) = (offset + whole as u64, self.consumed + whole);
        if matches!(record, Record::Whole { .. }) {
            self.base = self.at;
        }
        Ok(Some(record))
    }
}

impl Iterator for Records {
    type Item = Result<Record, Unreadable>;

    fn next(&mut self) -> Option<Self::Item> {
        self.read().transpose()
    }
}

/// Checks a header. Returns the generation.
fn read_header(bytes: &[u8]) -> Result<u64, Unreadable> {
    if !bytes.starts_with(&MAGIC) {
        let start = &bytes[..bytes.len().min(MAGIC.len())];
        return Err(Unreadable::Foreign { found: format!("\"{}\"", start.escape_ascii()) });
    }
    let Some(header) = bytes.first_chunk::<HEADER>() else {
        return Err(Unreadable::Short { length: bytes.len() });
    };
    let [.., f0, f1, f2, f3, c0, c1, c2, c3, g0, g1, g2, g3, g4, g5, g6, g7] = *header;
    let format = u32::from_le_bytes([f0, f1, f2, f3]);
    if format != FORMAT {
        return Err(Unreadable::Format { found: format });
    }
    let (found, want) = (u32::from_le_bytes([c0, c1, c2, c3]), header_checksum(header));
    if found != want {
        return Err(Unreadable::Header { found, want });
    }
    Ok(u64::from_le_bytes([g0, g1, g2, g3, g4, g5, g6, g7]))
}
