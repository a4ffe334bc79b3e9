//! The claim to create a missing object.

use std::sync::Arc;

use super::{connection::Connection, lease::Lease};
use crate::wire::broker::{ClaimHeader, Token};

/// The object, or the part of it, that a process offers to create: see [`Client::get_or_claim`](super::Client::get_or_claim).
#[derive(Debug, Clone, Default)]
#[must_use]
pub struct ClaimOf {
    pub(super) claim: ClaimHeader,
}

impl ClaimOf {
    /// The whole object.
    pub fn whole() -> Self {
        Self::default()
    }

    /// A single part. All claims and puts for one version share a `group`, which no other version uses.
    pub fn part(part: impl Into<String>, group: impl Into<String>) -> Self {
        Self { claim: ClaimHeader { part: Some(part.into()), group: Some(group.into()) } }
    }
}

/// The result of [`Client::get_or_claim`](super::Client::get_or_claim).
///
/// ```
/// use std::time::Duration;
/// use vmmfd::broker::{ClaimOf, Found, Get, Put, PutPart};
///
/// # let broker = vmmfd::internals::ExampleBroker::start()?;
/// # let client = &broker.client;
/// # let (memory, driver) = (&broker.memory, &broker.driver);
/// let get = Get::new("weights").wait(Duration::from_secs(60));
/// let object = match client.get_or_claim(&get, &ClaimOf::whole())? {
///     Found::Lease(lease) => lease.open(driver, None)?,
///     // Only this process loads the weights. The others wait for its put.
///     Found::Claim(_claim) => {
///         client.put(&Put::new("weights").part(PutPart::of("all", memory)?))?;
///         client.get(&get)?.open(driver, None)?
///     }
///     other => unreachable!("{other:?}"),
/// };
/// # drop(object);
/// # Ok::<(), vmmfd::Error>(())
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub enum Found {
    /// The object exists.
    Lease(Lease),
    /// The object does not exist, and this process should create it.
    Claim(Claim),
}

/// The exclusive right to create an object or a part of it, while other processes wait.
///
/// A put of the object ends the claim. Dropping the claim, or closing the connection, passes it to the next process in the queue. Claims do
/// not survive a restart of the broker, which may then give the claim to another process, and an interrupted request of the client can end
/// them too. If both processes put the object, the second put fails with the code `exists`.
#[derive(Debug)]
pub struct Claim {
    pub(super) connection: Arc<Connection>,
    pub(super) token: Token,
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.connection.release(self.token, "the claim");
    }
}
