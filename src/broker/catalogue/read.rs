//! Reading a log that another process wrote.

use std::{
    fs::File,
    io,
    os::{fd::OwnedFd, unix::fs::FileExt},
};

use super::{Catalogue, CatalogueError, FORMAT, HEADER, MAGIC, PREFIX, Record, checksum, file_limit, header_checksum};

/// Why a catalogue can't be read.
#[derive(Debug, thiserror::Error)]
pub(in crate::broker) enum Unreadable {
    /// The descriptor is of something else, or of a log that was never finished.
    #[error("the descriptor is not of a catalogue: it begins with {found}, where \"VMMFDCAT\" belongs")]
    Foreign { found: String },

    /// It has the magic, and no whole header.
    #[error("the catalogue has {length} bytes, and its header alone has {HEADER}")]
    Short { length: usize },

    /// The header was changed by something else.
    #[error("the catalogue's header has the checksum {found:#010x} where {want:#010x} belongs")]
    Header { found: u32, want: u32 },

    /// Written by another build.
    #[error("the catalogue has format {found}, and this build reads only format {FORMAT}")]
    Format { found: u32 },

    /// It is whole, and this build does not know what it means: it was written by a newer one.
    #[error("the catalogue's record at byte {offset} can't be understood")]
    Record {
        offset: u64,
        #[source]
        reason: serde_json::Error,
    },

    /// It can't be opened to append.
    #[error(transparent)]
    Append(#[from] CatalogueError),

    /// A system call failed.
    #[error("cannot {action} the catalogue")]
    System {
        action: &'static str,
        #[source]
        source: io::Error,
    },
}

impl Unreadable {
    fn system(action: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::System { action, source }
    }
}

impl Catalogue {
    /// Opens a log that another process wrote, and returns its records. What was not written whole is cut off: nothing of it was
    /// acknowledged. Reads the whole log.
    ///
    /// # Errors
    /// [`Unreadable`]; nothing was changed.
    pub(in crate::broker) fn open(fd: OwnedFd) -> Result<(Self, Vec<Record>), Unreadable> {
        let file = File::from(fd);
        let written = file.metadata().map_err(Unreadable::system("examine"))?.len();
        let mut bytes = vec![0; usize::try_from(written).unwrap_or(usize::MAX)];
        file.read_exact_at(&mut bytes, 0).map_err(Unreadable::system("read"))?;
        let generation = read_header(&bytes)?;
        let mut records = Vec::new();
        let (mut at, mut base) = (HEADER, 0);
        while let Some(payload) = next_payload(&bytes[at..]) {
            let unknown = |reason| Unreadable::Record { offset: at as u64, reason };
            records.push(serde_json::from_slice(payload).map_err(unknown)?);
            at += PREFIX + payload.len();
            // Up to here it was written whole: what is behind has come since.
            if matches!(records.last(), Some(Record::Whole { .. })) {
                base = at as u64;
            }
        }
        let length = at as u64;
        let mut catalogue =
            Self { file, generation, length, torn: written > length, base, limit: file_limit()?, buffer: Vec::new() };
        if catalogue.torn {
            tracing::info!(bytes = written - length, "the catalogue ends with a record that was not written whole");
            catalogue.cut()?;
        }
        Ok((catalogue, records))
    }
}

/// The records of a log as JSON, for the project's own tests. A torn last one is cut off.
#[cfg(feature = "internals")]
pub(crate) fn read_as_json(log: OwnedFd) -> Result<Vec<serde_json::Value>, String> {
    let (_, records) = Catalogue::open(log).map_err(|error| error.to_string())?;
    records.iter().map(|record| serde_json::to_value(record).map_err(|error| error.to_string())).collect()
}

/// Checks a header, and returns the generation.
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

/// The payload of the record at the start of `bytes`, if that is whole.
fn next_payload(bytes: &[u8]) -> Option<&[u8]> {
    let (length, rest) = bytes.split_first_chunk::<4>()?;
    let (found, rest) = rest.split_first_chunk::<4>()?;
    let payload = rest.get(..u32::from_le_bytes(*length) as usize)?;
    (u32::from_le_bytes(*found) == checksum(length, payload)).then_some(payload)
}
