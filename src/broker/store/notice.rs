//! What is said to a store: the datagrams of sd_notify(3).

use std::fmt;

/// One datagram. The descriptor that belongs to it comes with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::broker) enum Notice {
    /// To keep the descriptor under this name, whatever poll(2) says of it.
    Keep(String),
    /// To close the descriptors of this name.
    Remove(String),
    /// To close the descriptor once everything before was processed. The supervisor writes a byte to it first.
    Barrier,
    /// Something else.
    Other(String),
}

impl fmt::Display for Notice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Keep(name) => write!(f, "FDSTORE=1\nFDNAME={name}\nFDPOLL=0"),
            Self::Remove(name) => write!(f, "FDSTOREREMOVE=1\nFDNAME={name}"),
            Self::Barrier => f.write_str("BARRIER=1"),
            Self::Other(text) => f.write_str(text),
        }
    }
}

/// Reads a datagram.
pub(in crate::broker) fn read(text: &str) -> Notice {
    let value = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
    let set = |name: &str| value(name) == Some("1");
    let name = || value("FDNAME").unwrap_or("stored").to_owned();
    if set("FDSTORE") {
        Notice::Keep(name())
    } else if set("FDSTOREREMOVE") {
        Notice::Remove(name())
    } else if set("BARRIER") {
        Notice::Barrier
    } else {
        Notice::Other(text.to_owned())
    }
}
