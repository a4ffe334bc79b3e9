//! What a store gives back to the next server.

use std::{collections::HashMap, fmt, os::fd::OwnedFd};

use crate::broker::catalogue::SegmentId;

/// The name of a stored descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in crate::broker) enum Name {
    Segment(SegmentId),
    /// The listening socket.
    Socket,
    /// One of the two catalogues.
    Catalogue(bool),
    /// The node of a device that is held open.
    Device(u8),
}

/// The pipe between server and supervisor.
pub(in crate::broker) const LIFE: &str = "LIFE";

/// The supervisor's end of the pair of sockets.
pub(in crate::broker) const NOTIFY: &str = "NTFY";

/// The server's end.
pub(in crate::broker) const PEER: &str = "PEER";

/// The server, as a pidfd.
pub(in crate::broker) const SERVER: &str = "SELF";

/// The supervisor, as a pidfd.
pub(in crate::broker) const SUPERVISOR: &str = "SUPV";

impl Name {
    /// How many bytes it has.
    pub(in crate::broker) fn length(self) -> usize {
        match self {
            Self::Segment(id) => id.name().len(),
            Self::Device(_) => 3,
            Self::Socket | Self::Catalogue(_) => 4,
        }
    }

    /// What a name means, if it is one of these.
    pub(in crate::broker) fn read(text: &str) -> Option<Self> {
        match text {
            "SOCK" => Some(Self::Socket),
            "CAT0" => Some(Self::Catalogue(false)),
            "CAT1" => Some(Self::Catalogue(true)),
            other => match other.strip_prefix('D').filter(|digits| digits.len() == 2) {
                Some(digits) => u8::from_str_radix(digits, 16).ok().map(Self::Device),
                None => other.parse().ok().map(Self::Segment),
            },
        }
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Segment(id) => fmt::Display::fmt(id, f),
            Self::Socket => f.write_str("SOCK"),
            Self::Catalogue(false) => f.write_str("CAT0"),
            Self::Catalogue(true) => f.write_str("CAT1"),
            Self::Device(number) => write!(f, "D{number:02X}"),
        }
    }
}

/// The descriptors that a server was started with.
#[derive(Debug, Default)]
pub(in crate::broker) struct Inherited {
    pub(in crate::broker) socket: Option<OwnedFd>,
    pub(in crate::broker) catalogues: [Option<OwnedFd>; 2],
    pub(in crate::broker) segments: HashMap<SegmentId, OwnedFd>,
    pub(in crate::broker) devices: HashMap<u8, OwnedFd>,
    /// The pipe between server and supervisor.
    pub(in crate::broker) life: Option<OwnedFd>,
    /// The server's end of the pair of sockets.
    pub(in crate::broker) peer: Option<OwnedFd>,
    /// The supervisor, as a pidfd.
    pub(in crate::broker) supervisor: Option<OwnedFd>,
    /// What has a name of none of these, or one that came before.
    pub(in crate::broker) others: Vec<(String, OwnedFd)>,
}

impl Inherited {
    /// Sorts what was passed.
    pub(in crate::broker) fn of(passed: Vec<(String, OwnedFd)>) -> Self {
        let mut inherited = Self::default();
        for (name, fd) in passed {
            let place = match name.as_str() {
                LIFE => &mut inherited.life,
                PEER => &mut inherited.peer,
                SUPERVISOR => &mut inherited.supervisor,
                text => match Name::read(text) {
                    Some(Name::Socket) => &mut inherited.socket,
                    Some(Name::Catalogue(second)) => &mut inherited.catalogues[usize::from(second)],
                    Some(Name::Segment(id)) if !inherited.segments.contains_key(&id) => {
                        inherited.segments.insert(id, fd);
                        continue;
                    }
                    Some(Name::Device(number)) if !inherited.devices.contains_key(&number) => {
                        inherited.devices.insert(number, fd);
                        continue;
                    }
                    _ => {
                        inherited.others.push((name, fd));
                        continue;
                    }
                },
            };
            match place {
                None => *place = Some(fd),
                Some(_) => inherited.others.push((name, fd)),
            }
        }
        inherited
    }
}
