//! The hold on a version, which a lease and the object that is opened with it have.

use std::sync::Arc;

use super::{connection::Connection, holdings::Held};
use crate::{
    error::{Error, code},
    wire::broker::{Message, Report},
};

/// What a lease and the object that is opened with it both say of their version.
macro_rules! about_its_version {
    () => {
        /// The object's name.
        pub fn name(&self) -> &str {
            &self.name
        }

        /// Its version, counted from 1.
        pub fn version(&self) -> u64 {
            self.version
        }

        /// The version's UUID.
        pub fn id(&self) -> &str {
            &self.id
        }

        /// When it was published.
        pub fn created(&self) -> SystemTime {
            self.created
        }

        /// Whose it is.
        pub fn owner(&self) -> Owner {
            self.owner
        }

        /// What its maker says of it; empty if nothing.
        ///
        /// # Errors
        /// [`Error::Peer`] if it is not a JSON object.
        pub fn metadata(&self) -> Result<Check> {
            let Some(text) = &self.metadata else { return Ok(Check::new()) };
            text.read().map_err(|error| ProtocolError::Content(format!("the metadata is wrong: {error}")).into())
        }
    };
}

pub(super) use about_its_version;

/// What ends a lease when it is dropped.
#[derive(Debug)]
pub(super) struct Hold {
    pub(super) connection: Arc<Connection>,
    pub(super) held: Arc<Held>,
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.connection.release(self.held.token, "the lease");
    }
}

impl Hold {
    /// Whether the broker counts it, as far as is known.
    pub(super) fn is_held(&self) -> bool {
        self.connection.counts(&self.held)
    }

    /// Reports memory that is not as claimed.
    pub(super) fn report(&self, error: &Error) {
        let lacks_memory = matches!(error, Error::Driver { code: code::OUT_OF_MEMORY, .. });
        let blamed = matches!(error, Error::Peer(_) | Error::Driver { .. }) && !lacks_memory;
        if blamed {
            self.send_report(error.in_full());
        }
    }

    pub(super) fn send_report(&self, message: String) {
        let report = Report { token: self.held.token, message };
        // A report that does not arrive changes nothing here.
        let _ = self.connection.send(&Message::Report(report), &[]);
    }
}
