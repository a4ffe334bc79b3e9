//! What of an object is asked for, and how the lease of it comes.

use std::{collections::BTreeMap, ops::Range, os::fd::OwnedFd, sync::Arc, time::Duration};

use super::{
    connection::{Connection, Exchange},
    lease::Lease,
    records::unexpected,
};
use crate::{
    broker::name::{check_component, check_name},
    error::{BrokerError, ProtocolError, RefusalCode, Result},
    wire::{
        ByteRange, Received,
        broker::{self, GetObject, LeaseHeader, Message, Token},
    },
};

/// Which object to get, and what of it: see [`super::Client::get`].
#[derive(Debug, Clone)]
#[must_use]
pub struct Get {
    object: GetObject,
    owner: Option<u32>,
    wait: Option<Duration>,
}

impl Get {
    /// The current version of an object, all of it, if it exists.
    pub fn new(name: impl Into<String>) -> Self {
        Self { object: GetObject { name: name.into(), ..GetObject::default() }, owner: None, wait: None }
    }

    /// This version of it.
    pub fn version(mut self, version: u64) -> Self {
        self.object.version = Some(version);
        self
    }

    /// The current version, if it is newer than this one.
    pub fn newer_than(mut self, version: u64) -> Self {
        self.object.newer_than = Some(version);
        self
    }

    /// These parts of it.
    pub fn parts(mut self, parts: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.object.parts = Some(parts.into_iter().map(Into::into).collect());
        self
    }

    /// The segments alone in which these bytes of the part lie. The object has one part, or one is named.
    pub fn range(mut self, range: Range<u64>) -> Self {
        let length = range.end.saturating_sub(range.start);
        self.object.range = Some(ByteRange { offset: range.start, length });
        self
    }

    /// The segments alone in which these arrays lie.
    pub fn arrays(mut self, names: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.object.arrays = Some(names.into_iter().map(Into::into).collect());
        self
    }

    /// Fields that its metadata must have, with these values.
    pub fn expect(mut self, fields: crate::wire::Check) -> Self {
        self.object.expect = Some(fields);
        self
    }

    /// The user who must own its name: else the get fails with the code `differs`. Any user may put a name that does not exist.
    pub fn expect_owner(self, uid: u32) -> Self {
        Self { owner: Some(uid), ..self }
    }

    /// The digest that a part must have.
    pub fn digest(mut self, part: impl Into<String>, digest: impl Into<String>) -> Self {
        self.object.digests.get_or_insert_with(BTreeMap::new).insert(part.into(), digest.into());
        self
    }

    /// Waits so long for the object to exist.
    pub fn wait(self, wait: Duration) -> Self {
        Self { wait: Some(wait), ..self }
    }

    fn check_owner(&self, lease: &Lease) -> Result<()> {
        let Some(wanted) = self.owner.filter(|wanted| *wanted != lease.owner().uid) else { return Ok(()) };
        let (name, owner) = (lease.name(), lease.owner().uid);
        let message = format!("`{name}` is not as expected: its owner is uid {owner} and not {wanted}");
        Err(BrokerError::new(RefusalCode::Differs, message).into())
    }
}

/// Which part of an object a process offers to make: see [`super::Client::get_or_claim`].
#[derive(Debug, Clone, Default)]
#[must_use]
pub struct ClaimOf {
    claim: broker::Claim,
}

impl ClaimOf {
    /// All of it.
    pub fn whole() -> Self {
        Self::default()
    }

    /// One part. Claims of the parts of one version have the same `group`, and those of another have another.
    pub fn part(part: impl Into<String>, group: impl Into<String>) -> Self {
        Self { claim: broker::Claim { part: Some(part.into()), group: Some(group.into()) } }
    }
}

/// What [`super::Client::get_or_claim`] returns.
#[derive(Debug)]
#[non_exhaustive]
pub enum Found {
    /// The object exists.
    Lease(Lease),
    /// It does not, and this process is the one to make it.
    Claim(Claim),
}

/// The right to be the one that makes an object, or a part of it. Others wait for it. Dropping it, or the end of the connection,
/// passes it to the next that waits; a put of the object ends it. So does the end of the broker: one that takes its place knows no
/// claims, and another process may be given it. Its put decides: of two that make the same object one is refused with `exists`.
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

/// Gets leases of all objects, or none.
pub(super) fn get_all(connection: &Arc<Connection>, gets: &[Get], wait: Option<Duration>) -> Result<Vec<Lease>> {
    let mut question = question(gets, wait, None)?;
    let leases = connection.request(wait.unwrap_or_default(), |exchange, left| {
        ask(exchange, &mut question, left)?;
        let mut leases = Vec::with_capacity(gets.len());
        for behind in (0..gets.len()).rev() {
            let (header, fds) = match exchange.receive("for the lease")? {
                (Message::Lease(header), fds) => (header, fds),
                (other, _) => return Err(unexpected(&other, "lease")),
            };
            leases.push(take(connection, exchange, *header, fds, behind > 0)?);
        }
        Ok(leases)
    })?;
    gets.iter().zip(&leases).try_for_each(|(get, lease)| get.check_owner(lease))?;
    Ok(leases)
}

/// As [`get_all`] of one, which waits as the get says.
pub(super) fn get(connection: &Arc<Connection>, get: &Get) -> Result<Lease> {
    let mut leases = get_all(connection, std::slice::from_ref(get), get.wait)?;
    leases.pop().ok_or_else(|| ProtocolError::Content("no lease came".to_owned()).into())
}

/// Gets a lease, or the claim of what does not exist.
pub(super) fn get_or_claim(connection: &Arc<Connection>, get: &Get, claim: &ClaimOf) -> Result<Found> {
    let mut question = question(std::slice::from_ref(get), get.wait, Some(claim))?;
    let found = connection.request(get.wait.unwrap_or_default(), |exchange, left| {
        ask(exchange, &mut question, left)?;
        match exchange.receive("for the lease or the claim")? {
            (Message::Lease(header), fds) => Ok(Found::Lease(take(connection, exchange, *header, fds, false)?)),
            (Message::Claimed(claimed), _) => {
                Ok(Found::Claim(Claim { connection: Arc::clone(connection), token: claimed.token }))
            }
            (other, _) => Err(unexpected(&other, "lease")),
        }
    })?;
    if let Found::Lease(lease) = &found {
        get.check_owner(lease)?;
    }
    Ok(found)
}

/// The request, once what it names is checked.
fn question(gets: &[Get], wait: Option<Duration>, claim: Option<&ClaimOf>) -> Result<Message> {
    let invalid = |message: &str| Err(BrokerError::new(RefusalCode::Invalid, message).into());
    if gets.is_empty() {
        return invalid("a get names no object");
    }
    for Get { object, .. } in gets {
        check_name(&object.name)?;
        object.parts.iter().flatten().try_for_each(|part| check_component("part", part))?;
        if object.range.is_some() && object.arrays.is_some() {
            return invalid("a get asks for a range or for arrays, not for both");
        }
    }
    Ok(Message::Get(Box::new(broker::Get {
        objects: gets.iter().map(|get| get.object.clone()).collect(),
        wait_ms: wait.map(super::milliseconds),
        claim: claim.map(|claim| claim.claim.clone()),
    })))
}

/// Sends it, with what is left of its wait.
fn ask(exchange: &mut Exchange<'_>, question: &mut Message, left: Duration) -> Result<()> {
    if let Message::Get(get) = question {
        get.wait_ms = get.wait_ms.map(|_| super::milliseconds(left));
    }
    exchange.send_first(question, &[])
}

/// Takes a lease, whose first record came. `more` if another lease follows it, so that its last record is to be acknowledged too.
fn take(
    connection: &Arc<Connection>,
    exchange: &mut Exchange<'_>,
    mut header: LeaseHeader,
    mut fds: Vec<OwnedFd>,
    more: bool,
) -> Result<Lease> {
    let wrong = |message: String| Err(ProtocolError::Content(message).into());
    let mut sizes = std::mem::take(&mut header.sizes);
    let segments = fds.split_off(fds.len() - sizes.len());
    let (tables, mut segments) = (fds, segments);
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
                return wrong(format!("segment {} came where {} belongs", some.first, sizes.len()));
            }
            (other, _) => return Err(unexpected(&other, "segments")),
        }
    }
    if sizes.len() as u64 != want {
        return wrong(format!("{} segments came with a lease of {want}", sizes.len()));
    }
    if more {
        exchange.send(&Message::Received(Received { segments: want }), &[])?;
    }
    Lease::new(connection, header, tables, sizes.into_iter().zip(segments).collect())
}
