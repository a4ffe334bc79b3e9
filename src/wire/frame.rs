//! A record's header, and the JSON of its body.

use serde::{Serialize, de::DeserializeOwned};

use super::{HEADER_LENGTH, MAX_BODY, MAX_REASON, VERSION, shorten};
use crate::{base::strict::Clean, error::ProtocolError};

const MAGIC: [u8; 4] = *b"VMFD";

/// Defines a protocol's `Message`, with the kind, name and body of each message: `kind "name" Variant(Body)`.
macro_rules! messages {
    ($($(#[$meta:meta])* $kind:literal $name:literal $variant:ident($body:ty),)*) => {
        /// The content of one record.
        #[derive(Debug, Clone, PartialEq, Eq)]
        #[non_exhaustive]
        pub enum Message {
            $(
                #[doc = concat!("Kind ", $kind, ".")]
                $(#[$meta])*
                $variant($body),
            )*
        }

        impl Message {
            /// The name of the message's kind.
            pub fn name(&self) -> &'static str {
                match self {
                    $(Self::$variant(_) => $name,)*
                }
            }

            fn write(&self, record: &mut Vec<u8>) -> Result<(), ProtocolError> {
                let fds = self.fd_count();
                match self {
                    $(Self::$variant(body) => frame::write(record, $kind, fds, body),)*
                }
            }

            fn parse(kind: u16, body: &[u8]) -> Result<Self, ProtocolError> {
                match kind {
                    $($kind => parse($name, body).map(Self::$variant),)*
                    got => Err(ProtocolError::Kind { got }),
                }
            }

            /// Cleans the texts that may reach a terminal.
            fn clean(&mut self) {
                match self {
                    $(Self::$variant(body) => $crate::base::strict::Clean::clean(body),)*
                }
            }

            /// A JSON Schema, whose `$defs` has the body of each message under the message's name.
            #[cfg(feature = "schema")]
            pub fn schema() -> serde_json::Value {
                $crate::wire::schema::document(|generator| vec![$(($kind, $name, generator.subschema_for::<$body>()),)*])
            }
        }
    };
}

/// A record's header fields, and its body.
pub(super) struct Head<'a> {
    pub(super) kind: u16,
    pub(super) fds: u32,
    pub(super) body: &'a [u8],
}

/// Writes a record, replacing the buffer's contents.
pub(super) fn write(
    record: &mut Vec<u8>,
    kind: u16,
    fds: usize,
    body: &(impl Serialize + ?Sized),
) -> Result<(), ProtocolError> {
    record.clear();
    record.resize(HEADER_LENGTH, 0);
    serde_json::to_writer(&mut *record, body).map_err(|error| ProtocolError::Content(error.to_string()))?;
    let length = record.len() - HEADER_LENGTH;
    if length > MAX_BODY {
        return Err(ProtocolError::LongRecord { most: HEADER_LENGTH + MAX_BODY });
    }
    record[0..4].copy_from_slice(&MAGIC);
    record[4..6].copy_from_slice(&VERSION.to_le_bytes());
    record[6..8].copy_from_slice(&kind.to_le_bytes());
    record[8..12].copy_from_slice(&(length as u32).to_le_bytes());
    record[12..16].copy_from_slice(&(fds as u32).to_le_bytes());
    Ok(())
}

/// Reads a record's header, and checks it except for the kind and the number of descriptors.
pub(super) fn read(record: &[u8]) -> Result<Head<'_>, ProtocolError> {
    let Some((header, body)) = record.split_first_chunk::<HEADER_LENGTH>() else {
        return Err(ProtocolError::ShortRecord { got: record.len(), header: HEADER_LENGTH });
    };
    let [m0, m1, m2, m3, v0, v1, k0, k1, l0, l1, l2, l3, f0, f1, f2, f3] = *header;
    let magic = [m0, m1, m2, m3];
    if magic != MAGIC {
        return Err(ProtocolError::Magic { got: magic });
    }
    match u16::from_le_bytes([v0, v1]) {
        VERSION => {}
        got => return Err(ProtocolError::Version { got, own: VERSION }),
    }
    let length = u32::from_le_bytes([l0, l1, l2, l3]);
    if body.len() > MAX_BODY {
        return Err(ProtocolError::LongRecord { most: HEADER_LENGTH + MAX_BODY });
    }
    if length as usize != body.len() {
        return Err(ProtocolError::BodyLength { claimed: length, got: body.len() });
    }
    Ok(Head { kind: u16::from_le_bytes([k0, k1]), fds: u32::from_le_bytes([f0, f1, f2, f3]), body })
}

/// The number of descriptors in a record's header, which is not checked; 0 if there is none.
pub(crate) fn claimed_fds(record: &[u8]) -> usize {
    let field = record.get(12..HEADER_LENGTH).and_then(|field| field.try_into().ok());
    field.map_or(0, |field| u32::from_le_bytes(field) as usize)
}

/// Whether a record is an `error`, judging by its header alone: the body may be invalid.
pub(crate) fn is_error(record: &[u8]) -> bool {
    const ERROR: u16 = 8;
    let header = [&MAGIC[..], &VERSION.to_le_bytes(), &ERROR.to_le_bytes()].concat();
    record.starts_with(&header)
}

/// Compares the number of received descriptors with the header and the message.
pub(super) fn check_fds(kind: &'static str, want: usize, claimed: u32, got: usize) -> Result<(), ProtocolError> {
    if claimed as usize != want || got != want {
        return Err(ProtocolError::FdCount { kind, want, claimed, got });
    }
    Ok(())
}

pub(super) fn parse<T: DeserializeOwned>(kind: &'static str, body: &[u8]) -> Result<T, ProtocolError> {
    let invalid = |reason: &str| ProtocolError::Body { kind, reason: reason.to_owned() };
    // serde also accepts an array for a struct; the protocol only accepts objects.
    if !body.trim_ascii_start().starts_with(b"{") {
        return Err(invalid("it is not a JSON object"));
    }
    // Checks the whole body: the parser skips the text of unknown fields.
    let Ok(body) = str::from_utf8(body) else {
        return Err(invalid("it is not UTF-8"));
    };
    serde_json::from_str(body).map_err(|error| {
        let mut reason = error.to_string();
        shorten(&mut reason, MAX_REASON);
        reason.clean();
        ProtocolError::Body { kind, reason }
    })
}
