//! The names of held descriptors.

use std::{collections::HashMap, fmt, os::fd::OwnedFd};

use crate::broker::catalogue::SegmentId;

/// The name of a held descriptor. The text of a catalogue's name sorts first, so the catalogue is handed over first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in crate::broker) enum Name {
    /// One of the two catalogues: `true` is the second.
    Catalogue(bool),
    /// The listening socket.
    Socket,
    /// The crash history.
    History,
    /// A device node that is held open.
    Device(u8),
    Segment(SegmentId),
}

impl Name {
    /// Parses a name.
    pub(in crate::broker) fn parse(text: &str) -> Option<Self> {
        match text {
            ".CAT0" => Some(Self::Catalogue(false)),
            ".CAT1" => Some(Self::Catalogue(true)),
            ".SOCK" => Some(Self::Socket),
            ".HIST" => Some(Self::History),
            other => match other.strip_prefix(".DEV") {
                Some(number) => number.parse().ok().map(Self::Device),
                None => other.parse().ok().map(Self::Segment),
            },
        }
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Catalogue(false) => f.write_str(".CAT0"),
            Self::Catalogue(true) => f.write_str(".CAT1"),
            Self::Socket => f.write_str(".SOCK"),
            Self::History => f.write_str(".HIST"),
            Self::Device(number) => write!(f, ".DEV{number}"),
            Self::Segment(id) => fmt::Display::fmt(id, f),
        }
    }
}

/// The descriptors that the keeper held for this server.
#[derive(Debug, Default)]
pub(in crate::broker) struct Inherited {
    pub(in crate::broker) socket: Option<OwnedFd>,
    pub(in crate::broker) history: Option<OwnedFd>,
    pub(in crate::broker) catalogues: [Option<OwnedFd>; 2],
    pub(in crate::broker) segments: HashMap<SegmentId, OwnedFd>,
    pub(in crate::broker) devices: HashMap<u8, OwnedFd>,
    /// Unknown names.
    pub(in crate::broker) others: Vec<String>,
}

impl Inherited {
    pub(in crate::broker) fn add(&mut self, name: String, fd: OwnedFd) {
        match Name::parse(&name) {
            Some(Name::Catalogue(second)) => self.catalogues[usize::from(second)] = Some(fd),
            Some(Name::Socket) => self.socket = Some(fd),
            Some(Name::History) => self.history = Some(fd),
            Some(Name::Device(number)) => drop(self.devices.insert(number, fd)),
            Some(Name::Segment(id)) => drop(self.segments.insert(id, fd)),
            None => self.others.push(name),
        }
    }
}
