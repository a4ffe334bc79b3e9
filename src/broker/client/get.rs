//! Selects an object, or a subset of it, and receives a lease of it.

use std::{collections::BTreeMap, ops::Range, os::fd::OwnedFd, sync::Arc, time::Duration};

use super::{Client, connection::Connection, exchange::Exchange, lease::Lease, records::unexpected};
use crate::{
    broker::name::{check_component, check_name},
    error::{BrokerError, ProtocolError, RefusalCode, Result},
    wire::{
        ByteRange, Received,
        broker::{self, GetObject, LeaseHeader, Message, Token},
    },
};

/// Selects an object, or a subset of it, for [`Client::get`].
///
/// ```
/// # use vmmfd::broker::{Put, PutPart};
/// use std::time::Duration;
/// use vmmfd::broker::Get;
///
/// # let broker = vmmfd::internals::ExampleBroker::start()?;
/// # let client = &broker.client;
/// # let put = Put::new("weights").part(PutPart::of("all", &broker.memory)?);
/// # client.put(&put)?;
/// let lease = client.get(&Get::new("weights").wait(Duration::from_secs(10)))?;
/// # client.put(&put.replace())?;
/// let next = client.get(&Get::new("weights").newer_than(lease.version()).wait(Duration::from_secs(10)))?;
/// assert!(next.version() > lease.version());
/// # Ok::<(), vmmfd::Error>(())
/// ```
#[derive(Debug, Clone)]
#[must_use]
pub struct Get {
    object: GetObject,
    owner: Option<u32>,
    wait: Option<Duration>,
}

impl Get {
    /// Gets the whole current version. Does not wait.
    pub fn new(name: impl Into<String>) -> Self {
        Self { object: GetObject { name: name.into(), ..GetObject::default() }, owner: None, wait: None }
    }

    /// Gets this version.
    pub fn version(mut self, version: u64) -> Self {
        self.object.version = Some(version);
        self
    }

    /// Gets the current version once it is newer than `version`.
    pub fn newer_than(mut self, version: u64) -> Self {
        self.object.newer_than = Some(version);
        self
    }

    /// Gets only these parts.
    pub fn parts(mut self, parts: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.object.parts = Some(parts.into_iter().map(Into::into).collect());
        self
    }

    /// Gets only the segments that hold these bytes of a part. The object must have one part, or [`Get::parts`] must name one.
    pub fn range(mut self, range: Range<u64>) -> Self {
        let length = range.end.saturating_sub(range.start);
        self.object.range = Some(ByteRange { offset: range.start, length });
        self
    }

    /// Gets only the segments that hold these arrays.
    pub fn arrays(mut self, names: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.object.arrays = Some(names.into_iter().map(Into::into).collect());
        self
    }

    /// Requires these metadata fields to have these values.
    pub fn expect(mut self, fields: crate::wire::Check) -> Self {
        self.object.expect = Some(fields);
        self
    }

    /// Requires this user to own the name; otherwise the get fails with the code `differs`. Any user may put a name that does not
    /// exist.
    pub fn expect_owner(self, uid: u32) -> Self {
        Self { owner: Some(uid), ..self }
    }

    /// Requires a part to have this digest.
    pub fn digest(mut self, part: impl Into<String>, digest: impl Into<String>) -> Self {
        self.object.digests.get_or_insert_with(BTreeMap::new).insert(part.into(), digest.into());
        self
    }

    /// Waits up to `wait` for the object to exist.
    pub fn wait(self, wait: Duration) -> Self {
        Self { wait: Some(wait), ..self }
    }

    /// Checks the names without a request, as [`Client::get`] does first.
    ///
    /// # Errors
    /// [`Error::Broker`](crate::error::Error::Broker) with the code `invalid`.
    pub fn check(&self) -> Result<()> {
        check_name(&self.object.name)?;
        self.object.parts.iter().flatten().try_for_each(|part| check_component("part", part))?;
        if self.object.range.is_some() && self.object.arrays.is_some() {
            return Err(BrokerError::new(RefusalCode::Invalid, "a get can request a range or arrays, not both").into());
        }
        Ok(())
    }

    fn check_owner(&self, lease: &Lease) -> Result<()> {
        let Some(wanted) = self.owner.filter(|wanted| *wanted != lease.owner().uid) else { return Ok(()) };
        let name = lease.name();
        let owner = lease.owner().uid;
        let message = format!("`{name}` is not as expected: its owner is uid {owner}, not {wanted}");
        Err(BrokerError::new(RefusalCode::Differs, message).into())
    }
}

/// The object, or the part of it, that a process offers to create: see [`Client::get_or_claim`].
#[derive(Debug, Clone, Default)]
#[must_use]
pub struct ClaimOf {
    claim: broker::ClaimHeader,
}

impl ClaimOf {
    /// The whole object.
    pub fn whole() -> Self {
        Self::default()
    }

    /// A single part. All claims and puts for one version share a `group`, which no other version uses.
    pub fn part(part: impl Into<String>, group: impl Into<String>) -> Self {
        Self { claim: broker::ClaimHeader { part: Some(part.into()), group: Some(group.into()) } }
    }
}

/// The result of [`Client::get_or_claim`].
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
/// not survive a restart of the broker, which may then give the claim to another process, and neither does a claim whose connection has an
/// interrupted request that the broker does not stop within 100 ms. If both put the object, the second put fails with the code `exists`.
#[derive(Debug)]
pub struct Claim {
    connection: Arc<Connection>,
    token: Token,
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.connection.release(self.token, "the claim");
    }
}

impl Client {
    /// Gets a lease of an object. Waits for the object as long as [`Get::wait`] allows.
    ///
    /// # Errors
    /// [`Error::Broker`](crate::error::Error::Broker) with the code `absent` if the object does not exist, `timeout` if it did not appear in
    /// time, `differs` if it does not match the get's expectations; `Error::Peer`, `Error::System`, `Error::Interrupted`.
    pub fn get(&self, get: &Get) -> Result<Lease> {
        let mut leases = self.get_all(std::slice::from_ref(get), get.wait)?;
        leases.pop().ok_or_else(|| ProtocolError::Content("the answer has no lease".to_owned()).into())
    }

    /// Gets leases of several objects atomically: all or none. Waits up to `wait` until all exist; [`Get::wait`] is ignored.
    ///
    /// # Errors
    /// As [`Client::get`].
    pub fn get_all(&self, gets: &[Get], wait: Option<Duration>) -> Result<Vec<Lease>> {
        let mut request = build_request(gets, wait, None)?;
        let leases = self.0.wait(wait.unwrap_or_default(), |exchange, left| {
            send_get(exchange, &mut request, left)?;
            let mut leases = Vec::with_capacity(gets.len());
            for remaining in (0..gets.len()).rev() {
                let (header, fds) = match exchange.receive("for the lease")? {
                    (Message::Lease(header), fds) => (header, fds),
                    (other, _) => return Err(unexpected(&other, "lease")),
                };
                leases.push(receive_lease(&self.0, exchange, *header, fds, remaining > 0)?);
            }
            Ok(leases)
        })?;
        gets.iter().zip(&leases).try_for_each(|(get, lease)| get.check_owner(lease))?;
        Ok(leases)
    }

    /// Gets a lease of an object or, if it does not exist, the claim to create it. If several processes ask for the same missing object,
    /// one gets the claim. The others wait, as long as [`Get::wait`] allows, until the object is put or the claim passes to them.
    ///
    /// # Errors
    /// As [`Client::get`].
    pub fn get_or_claim(&self, get: &Get, claim: &ClaimOf) -> Result<Found> {
        let mut request = build_request(std::slice::from_ref(get), get.wait, Some(claim))?;
        let found = self.0.wait(get.wait.unwrap_or_default(), |exchange, left| {
            send_get(exchange, &mut request, left)?;
            match exchange.receive("for the lease or the claim")? {
                (Message::Lease(header), fds) => {
                    Ok(Found::Lease(receive_lease(&self.0, exchange, *header, fds, false)?))
                }
                (Message::Claimed(claimed), _) => {
                    Ok(Found::Claim(Claim { connection: Arc::clone(&self.0), token: claimed.token }))
                }
                (other, _) => Err(unexpected(&other, "lease")),
            }
        })?;
        if let Found::Lease(lease) = &found {
            get.check_owner(lease)?;
        }
        Ok(found)
    }
}

/// Checks the names and builds the request.
fn build_request(gets: &[Get], wait: Option<Duration>, claim: Option<&ClaimOf>) -> Result<Message> {
    if gets.is_empty() {
        return Err(BrokerError::new(RefusalCode::Invalid, "a get needs at least one object").into());
    }
    gets.iter().try_for_each(Get::check)?;
    Ok(Message::Get(Box::new(broker::GetHeader {
        objects: gets.iter().map(|get| get.object.clone()).collect(),
        wait_ms: wait.map(super::milliseconds),
        claim: claim.map(|claim| claim.claim.clone()),
    })))
}

/// Sends the request with the rest of its wait.
fn send_get(exchange: &mut Exchange<'_>, request: &mut Message, left: Duration) -> Result<()> {
    if let Message::Get(get) = request {
        get.wait_ms = get.wait_ms.map(|_| super::milliseconds(left));
    }
    exchange.send_first(request, &[])
}

/// Receives the rest of a lease after its first record. `more`: another lease follows, so the last record needs an acknowledgement too.
fn receive_lease(
    connection: &Arc<Connection>,
    exchange: &mut Exchange<'_>,
    mut header: LeaseHeader,
    mut fds: Vec<OwnedFd>,
    more: bool,
) -> Result<Lease> {
    let wrong = |message: String| Err(ProtocolError::Content(message).into());
    let mut sizes = std::mem::take(&mut header.sizes);
    let segments = fds.split_off(fds.len() - sizes.len());
    let tables = fds;
    let mut segments = segments;
    let want: u64 =
        header.parts.iter().flat_map(|part| &part.runs).map(|run| run.segments).fold(0, u64::saturating_add);
    while (sizes.len() as u64) < want {
        exchange.send(&Message::Received(Received { segments: sizes.len() as u64 }), &[])?;
        match exchange.receive("for the segments of the lease")? {
            (Message::Segments(some), fds) if some.first == sizes.len() as u64 => {
                sizes.extend(some.sizes);
                segments.extend(fds);
            }
            (Message::Segments(some), _) => {
                return wrong(format!("received segment {} instead of {}", some.first, sizes.len()));
            }
            (other, _) => return Err(unexpected(&other, "segments")),
        }
    }
    if sizes.len() as u64 != want {
        return wrong(format!("received {} segments for a lease of {want}", sizes.len()));
    }
    if more {
        exchange.send(&Message::Received(Received { segments: want }), &[])?;
    }
    Lease::new(connection, header, tables, sizes.into_iter().zip(segments).collect())
}
