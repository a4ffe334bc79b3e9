//! The hold on a version, shared by [`Lease`](super::Lease) and [`Object`](super::Object).

use std::sync::Arc;

use super::{connection::Connection, holdings::OwnLease};
use crate::{
    error::{Error, Result, code},
    sys::lock,
};

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
