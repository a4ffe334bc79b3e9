//! The leases and puts of a connection, which a reconnect resumes or restores.

use std::{
    collections::HashMap,
    fmt,
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicBool, Ordering},
    },
};

use super::{
    Client,
    connection::Connection,
    recall::{RecallHandler, RecallState},
};
use crate::{
    error::{Error, Result, code},
    memory::Description,
    sys::lock,
    wire::broker::{ArrayEntry, Attached, Lifetime, Owner, ResumedLease, Token},
};

/// State that a reconnect resumes.
#[derive(Debug, Default)]
pub(super) struct Holdings {
    /// The UUID of the broker's state, from the last handshake.
    pub(super) instance: String,
    pub(super) leases: HashMap<Token, Arc<OwnLease>>,
    /// The last put of each name that may be deleted together with this connection.
    pub(super) puts: HashMap<String, Token>,
}

impl Holdings {
    pub(super) fn is_empty(&self) -> bool {
        self.leases.is_empty() && self.puts.is_empty()
    }
}

/// The version's properties that [`Lease`](super::Lease), [`Object`](super::Object) and [`Prepared`](super::Prepared) share.
#[derive(Debug)]
pub(super) struct Header {
    pub(super) name: String,
    pub(super) version: u64,
    pub(super) id: String,
    pub(super) created_ms: u64,
    pub(super) owner: Owner,
    pub(super) backend: String,
    pub(super) metadata: Option<Attached>,
    pub(super) mode: Option<u16>,
    pub(super) lifetime: Option<Lifetime>,
    pub(super) keep: Option<u32>,
}

/// A lease held by this process.
#[derive(Debug)]
pub(super) struct OwnLease {
    pub(super) token: Token,
    pub(super) header: Arc<Header>,
    /// How many bytes of the version it covers.
    pub(super) size: u64,
    /// The parts to restore the version, if this process got all of it.
    restore: Option<Vec<RestorePart>>,
    /// Whether the broker counts the lease, as far as this process knows.
    pub(super) counted: AtomicBool,
    pub(super) recall: Mutex<RecallState>,
}

impl OwnLease {
    pub(super) fn new(token: Token, header: Arc<Header>, size: u64, restore: Option<Vec<RestorePart>>) -> Self {
        Self { token, header, size, restore, counted: AtomicBool::new(true), recall: Mutex::default() }
    }

    pub(super) fn resumption(&self) -> ResumedLease {
        ResumedLease { token: self.token, id: self.header.id.clone(), size: self.size }
    }

    /// Sets whether the lease is counted. Returns the previous value.
    pub(super) fn set_counted(&self, counted: bool) -> bool {
        self.counted.swap(counted, Ordering::AcqRel)
    }

    /// The version's parts and their descriptors, unless a restore is impossible.
    pub(super) fn restorable(&self) -> Option<Vec<HeldPart>> {
        let held = |(size, fd): &(u64, Weak<OwnedFd>)| Some((*size, fd.upgrade()?));
        let part = |(header, segments): &RestorePart| {
            Some((header.clone(), segments.iter().map(held).collect::<Option<_>>()?))
        };
        self.restore.as_ref()?.iter().map(part).collect()
    }
}

/// A part's properties: of a [`PutPart`](super::PutPart), a [`LeasedPart`](super::LeasedPart) or an [`ObjectPart`](super::ObjectPart).
#[derive(Debug, Clone)]
pub(super) struct PartHeader {
    pub(super) name: String,
    pub(super) description: Description,
    pub(super) digest: Option<String>,
    pub(super) arrays: Arc<Vec<ArrayEntry>>,
}

impl PartHeader {
    pub(super) fn new(name: String, description: Description) -> Self {
        Self { name, description, digest: None, arrays: Arc::default() }
    }
}

/// A part of a version to restore, and its segments.
pub(super) type HeldPart = (PartHeader, Vec<(u64, Arc<OwnedFd>)>);

/// As [`HeldPart`]. The lease, or the object opened with it, owns the descriptors. Parked memory has no descriptors.
pub(super) type RestorePart = (PartHeader, Vec<(u64, Weak<OwnedFd>)>);

/// A lease that the broker no longer counts, although this process has not dropped it: see [`Client::on_lost`](super::Client::on_lost).
/// Mapped memory remains mapped.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Lost {
    /// The object's name.
    pub name: String,
    /// The version number.
    pub version: u64,
    /// The version's UUID.
    pub id: String,
    /// Why the lease was lost.
    pub reason: LossReason,
}

/// Why a lease was lost.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum LossReason {
    /// The connection broke, and no reconnect succeeded within the config's timeout. If a later reconnect resumes the lease,
    /// [`Restored`] follows.
    Unreachable,
    /// The broker ended the lease: it was not resumed in time, or the broker closed the connection.
    Ended,
    /// The broker lost the version, and this process could not restore it. Holds the reason, one sentence.
    NotRestored(String),
}

impl fmt::Display for LossReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreachable => f.write_str("the broker can't be reached"),
            Self::Ended => f.write_str("the broker ended the lease"),
            Self::NotRestored(why) => write!(f, "the broker has lost the version: {why}"),
        }
    }
}

/// A lease that the broker counts again: see [`Client::on_restored`](super::Client::on_restored).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Restored {
    /// The object's name.
    pub name: String,
    /// The version number.
    pub version: u64,
    /// The version's UUID.
    pub id: String,
    /// Whether the broker had lost the version and got it back from its readers.
    pub rebuilt: bool,
}

/// A pending handler call.
#[derive(Debug)]
pub(super) enum Notice {
    Lost(Lost),
    Restored(Restored),
}

impl Notice {
    pub(super) fn lost(held: &OwnLease, reason: LossReason) -> Self {
        let Header { name, version, id, .. } = &*held.header;
        Self::Lost(Lost { name: name.clone(), version: *version, id: id.clone(), reason })
    }

    pub(super) fn restored(held: &OwnLease, rebuilt: bool) -> Self {
        let Header { name, version, id, .. } = &*held.header;
        Self::Restored(Restored { name: name.clone(), version: *version, id: id.clone(), rebuilt })
    }
}

type Handler<T> = Arc<dyn Fn(&Client, &T) + Send + Sync>;

/// The caller's handlers.
#[derive(Default)]
pub(super) struct Handlers {
    pub(super) lost: Vec<Handler<Lost>>,
    pub(super) restored: Vec<Handler<Restored>>,
    /// Notices that the handlers have not received yet.
    pub(super) due: Vec<Notice>,
    /// Handlers of recalled leases that were not called yet.
    pub(super) recalled: Vec<RecallHandler>,
}

impl Handlers {
    /// Queues notices, if there are handlers.
    pub(super) fn add(&mut self, notices: impl IntoIterator<Item = Notice>) {
        if !self.lost.is_empty() || !self.restored.is_empty() {
            self.due.extend(notices);
        }
    }
}

impl fmt::Debug for Handlers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handlers").field("due", &self.due).finish_non_exhaustive()
    }
}

/// The public accessors that a lease and an opened object share.
macro_rules! version_accessors {
    () => {
        /// The object's name.
        pub fn name(&self) -> &str {
            &self.header.name
        }

        /// The version number, counted from 1.
        pub fn version(&self) -> u64 {
            self.header.version
        }

        /// The version's UUID.
        pub fn id(&self) -> &str {
            &self.header.id
        }

        /// The time of publication.
        pub fn created(&self) -> SystemTime {
            let since = std::time::Duration::from_millis(self.header.created_ms);
            SystemTime::UNIX_EPOCH.checked_add(since).unwrap_or(SystemTime::UNIX_EPOCH)
        }

        /// The owner of the object's name.
        pub fn owner(&self) -> Owner {
            self.header.owner
        }

        /// The text of the creator's metadata, whose numbers have all their digits; `{}` if it gave none.
        pub fn metadata_text(&self) -> &str {
            self.header.metadata.as_ref().map_or("{}", |text| text.as_str())
        }

        /// The creator's metadata; empty if it gave none. Numbers that no type of Rust holds are rounded to `f64`.
        ///
        /// # Errors
        /// [`Error::Peer`] if the metadata is not a JSON object.
        pub fn metadata(&self) -> Result<Check> {
            let Some(text) = &self.header.metadata else { return Ok(Check::new()) };
            text.read()
                .map_err(|error| ProtocolError::Content(format!("the metadata is not a JSON object: {error}")).into())
        }
    };
}

pub(super) use version_accessors;

/// The public accessors that a part of a lease and of an opened object share.
macro_rules! part_accessors {
    () => {
        /// The part's name.
        pub fn name(&self) -> &str {
            &self.header.name
        }

        /// The memory's description. Until the memory is mapped, its sizes are unverified claims of the creator.
        pub fn description(&self) -> &Description {
            &self.header.description
        }

        /// The digest of the part's bytes, in the creator's format.
        pub fn digest(&self) -> Option<&str> {
            self.header.digest.as_deref()
        }

        /// All arrays of the part, in the creator's order, even if only some of the memory was requested.
        pub fn arrays(&self) -> &[ArrayEntry] {
            &self.header.arrays
        }
    };
}

pub(super) use part_accessors;

/// Ends the lease when dropped.
#[derive(Debug)]
pub(super) struct Hold {
    pub(super) connection: Arc<Connection>,
    pub(super) held: Arc<OwnLease>,
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.connection.release(self.held.token, "the lease");
    }
}

impl Hold {
    /// Whether the broker counts the lease, as far as this process knows.
    pub(super) fn is_held(&self) -> bool {
        self.connection.counts(&self.held)
    }

    /// Whether the broker has asked this process to end the lease.
    pub(super) fn is_recalled(&self) -> Result<bool> {
        self.connection.watch_recalls()?;
        Ok(lock(&self.held.recall).is_recalled())
    }

    pub(super) fn on_recall(&self, call: impl FnOnce() + Send + 'static) -> Result<()> {
        self.connection.on_recall(&self.held, Box::new(call))
    }

    /// Reports memory that differs from its description.
    pub(super) fn report(&self, error: &Error) {
        let lacks_memory = matches!(error, Error::Driver { code: code::OUT_OF_MEMORY, .. });
        let blamed = matches!(error, Error::Peer(_) | Error::Driver { .. }) && !lacks_memory;
        if blamed {
            self.send_report(error.in_full());
        }
    }

    pub(super) fn send_report(&self, message: String) {
        self.connection.report(self.held.token, message);
    }
}
