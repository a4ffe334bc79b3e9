//! Selects an object, or a subset of it, and receives a lease of it.

use std::{
    collections::BTreeMap,
    ops::Range,
    os::fd::OwnedFd,
    ptr,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    Client,
    connection::Connection,
    holdings::PartHeader,
    lease::{Claim, ClaimOf, Described, Found, Lease, RawLease, differs, quoting},
    ranges::ranges_of,
    socket::{Exchange, unexpected},
};
use crate::{
    broker::request::{check_component, check_name, short},
    channel::deadline_after,
    error::{BrokerError, Error, ProtocolError, RefusalCode, Result},
    wire::{
        ByteRange, Check, Received,
        broker::{self, GetObject, Message, Token},
        milliseconds,
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
    /// The name and the version.
    object: GetObject,
    parts: Option<Vec<String>>,
    range: Option<ByteRange>,
    arrays: Option<Vec<String>>,
    expect: Check,
    digests: BTreeMap<String, String>,
    owner: Option<u32>,
    wait: Option<Duration>,
}

impl Get {
    /// Gets the whole current version. Does not wait.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            object: GetObject { name: name.into(), ..GetObject::default() },
            parts: None,
            range: None,
            arrays: None,
            expect: Check::new(),
            digests: BTreeMap::new(),
            owner: None,
            wait: None,
        }
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
    pub fn parts(self, parts: impl IntoIterator<Item = impl Into<String>>) -> Self {
        Self { parts: Some(parts.into_iter().map(Into::into).collect()), ..self }
    }

    /// Gets only the segments that hold these bytes of a part. The object must have one part, or [`Get::parts`] must name one.
    ///
    /// If this get names no part, a second request selects the segments.
    pub fn range(self, range: Range<u64>) -> Self {
        let length = range.end.saturating_sub(range.start);
        Self { range: Some(ByteRange { offset: range.start, length }), ..self }
    }

    /// Gets only the segments that hold these arrays, and only the parts that have them. If several parts have an array, the first does.
    ///
    /// The client looks the arrays up in the version's tables, so this takes a second request to the broker.
    pub fn arrays(self, names: impl IntoIterator<Item = impl Into<String>>) -> Self {
        Self { arrays: Some(names.into_iter().map(Into::into).collect()), ..self }
    }

    /// Requires these metadata fields to have these values; otherwise the get fails with the code `differs`.
    pub fn expect(self, fields: Check) -> Self {
        Self { expect: fields, ..self }
    }

    /// Requires this user to own the name; otherwise the get fails with the code `differs`. Any user may put a name that does not
    /// exist.
    pub fn expect_owner(self, uid: u32) -> Self {
        Self { owner: Some(uid), ..self }
    }

    /// Requires a part to have this digest.
    pub fn digest(mut self, part: impl Into<String>, digest: impl Into<String>) -> Self {
        self.digests.insert(part.into(), digest.into());
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
        self.parts.iter().flatten().try_for_each(|part| check_component("part", part))?;
        let invalid = |message: &str| Err(BrokerError::new(RefusalCode::Invalid, message).into());
        if self.range.is_some() && self.arrays.is_some() {
            return invalid("a get can request a range or arrays, not both");
        }
        for (what, names) in [("part", &self.parts), ("array", &self.arrays)] {
            if names.as_ref().is_some_and(Vec::is_empty) {
                return invalid(&format!("a get must request at least one {what} of an object, or omit the list"));
            }
        }
        Ok(())
    }

    /// Whether the get names exactly one part.
    fn names_one_part(&self) -> bool {
        self.parts.as_ref().is_some_and(|parts| parts.len() == 1)
    }

    /// The parts that the get names, with the requested bytes.
    fn named_parts(&self) -> Option<BTreeMap<String, Vec<ByteRange>>> {
        let ranges: Vec<ByteRange> = self.range.into_iter().collect();
        self.parts.as_ref().map(|parts| parts.iter().map(|part| (part.clone(), ranges.clone())).collect())
    }

    /// Whether the client needs the description of all parts to request the memory, or to compare digests.
    fn needs_description(&self) -> bool {
        let is_named = |part: &String| self.parts.as_ref().is_none_or(|parts| parts.contains(part));
        let needs_part = self.range.is_some() && !self.names_one_part();
        self.arrays.is_some() || needs_part || !self.digests.keys().all(is_named)
    }

    /// The first request. It requests no memory if the client needs the description first.
    fn request(&self) -> GetObject {
        let parts = if self.needs_description() { Some(BTreeMap::new()) } else { self.named_parts() };
        GetObject { parts, ..self.object.clone() }
    }

    /// The request for the memory of a described version, if the first one requested none.
    fn selection(&self, token: Token, described: &Described) -> Result<Option<GetObject>> {
        if !self.needs_description() {
            return Ok(None);
        }
        let chosen = |part: &&PartHeader| self.parts.as_ref().is_none_or(|parts| parts.contains(&part.name));
        let chosen: Vec<&PartHeader> = described.parts.iter().filter(chosen).collect();
        let name = &self.object.name;
        let parts = match (&self.arrays, self.range) {
            (Some(arrays), _) => Some(ranges_of(name, arrays, &chosen)?),
            (None, Some(range)) if !self.names_one_part() => {
                let [part] = chosen[..] else {
                    let count = chosen.len();
                    let message = format!("a range needs exactly one part, but `{name}` has {count}: name the part");
                    return Err(BrokerError::new(RefusalCode::Invalid, message).into());
                };
                Some(BTreeMap::from([(part.name.clone(), vec![range])]))
            }
            _ => self.named_parts(),
        };
        Ok(Some(GetObject { parts, lease: Some(token), ..self.object.clone() }))
    }

    /// Compares a version with the expectations.
    fn compare(&self, described: &Described) -> Result<()> {
        let Described { header, parts } = described;
        let name = &header.name;
        let mut differences = Vec::new();
        if let Some(wanted) = self.owner.filter(|wanted| *wanted != header.owner.uid) {
            differences.push(format!("its owner is uid {}, not {wanted}", header.owner.uid));
        }
        let find = |part: &String| parts.iter().find(|known| known.name == *part);
        if let Some(part) = self.parts.iter().flatten().chain(self.digests.keys()).find(|part| find(part).is_none()) {
            return Err(quoting(RefusalCode::Lacks, format!("`{name}` has no part {part}")));
        }
        for (part, wanted) in &self.digests {
            match find(part).and_then(|found| found.digest.as_deref()) {
                None => differences.push(format!("part {part} has no digest")),
                Some(found) if found == wanted => {}
                Some(found) => differences.push(format!("the digest of part {part} is {found}, not {wanted}")),
            }
        }
        let metadata = header.metadata.as_ref().filter(|_| !self.expect.is_empty());
        let metadata: Check = metadata.and_then(|text| text.read().ok()).unwrap_or_default();
        for (field, wanted) in &self.expect {
            match metadata.get(field) {
                Some(found) if found == wanted => {}
                Some(found) => differences.push(format!("{field} is {}, not {}", short(found), short(wanted))),
                None => differences.push(format!("{field} is missing, expected {}", short(wanted))),
            }
        }
        match differences.is_empty() {
            true => Ok(()),
            false => Err(differs(format!("`{name}` is not as expected: {}", differences.join("; ")))),
        }
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
        leases.pop().ok_or_else(no_lease)
    }

    /// Gets leases of several objects atomically: all or none. Waits up to `wait` until all exist; [`Get::wait`] is ignored.
    ///
    /// # Errors
    /// As [`Client::get`].
    pub fn get_all(&self, gets: &[Get], wait: Option<Duration>) -> Result<Vec<Lease>> {
        match self.find(gets, wait, None)? {
            (leases, None) => Ok(leases),
            (_, Some(_)) => Err(ProtocolError::Unexpected { got: "claimed", want: "lease" }.into()),
        }
    }

    /// Gets a lease of an object or, if it does not exist, the claim to create it. If several processes ask for the same missing object,
    /// one gets the claim. The others wait, as long as [`Get::wait`] allows, until the object is put or the claim passes to them.
    ///
    /// # Errors
    /// As [`Client::get`].
    pub fn get_or_claim(&self, get: &Get, claim: &ClaimOf) -> Result<Found> {
        match self.find(std::slice::from_ref(get), get.wait, Some(claim))? {
            (mut leases, None) => leases.pop().map(Found::Lease).ok_or_else(no_lease),
            (_, Some(claim)) => Ok(Found::Claim(claim)),
        }
    }

    /// Gets leases, or a claim. If an object is missing, another connection waits for it.
    fn find(
        &self,
        gets: &[Get],
        wait: Option<Duration>,
        claim: Option<&ClaimOf>,
    ) -> Result<(Vec<Lease>, Option<Claim>)> {
        let waits = wait.is_some_and(|wait| !wait.is_zero());
        let mut request = build_request(gets, if waits { None } else { wait }, claim)?;
        match self.0.request(|exchange, left| self.receive(exchange, gets, &mut request, left)) {
            Err(Error::Broker(refusal)) if waits && refusal.code == RefusalCode::Absent => {
                self.wait_for(gets, wait, claim)
            }
            found => found?
                .map(|(leases, token)| (leases, token.map(|token| Claim { connection: Arc::clone(&self.0), token }))),
        }
    }

    fn wait_for(
        &self,
        gets: &[Get],
        wait: Option<Duration>,
        claim: Option<&ClaimOf>,
    ) -> Result<(Vec<Lease>, Option<Claim>)> {
        let mut left = wait.unwrap_or_default();
        let deadline = deadline_after(left);
        loop {
            let mut request = build_request(gets, wait.map(|_| left), claim)?;
            let found = self.0.wait(left, |exchange, left| self.receive(exchange, gets, &mut request, left));
            let (found, connection) = found?;
            let (leases, token) = found?;
            if let Some(token) = token {
                return Ok((leases, Some(Claim { connection, token })));
            }
            // Unless the broker has restarted in between and lost them.
            if self.0.take_over(&connection, &leases, Vec::new())? {
                return Ok((leases, None));
            }
            left = deadline.saturating_duration_since(Instant::now());
        }
    }

    /// Sends a get, and receives its leases or the token of its claim. The inner error is not the connection's.
    fn receive(
        &self,
        exchange: &mut Exchange<'_>,
        gets: &[Get],
        request: &mut Message,
        left: Duration,
    ) -> Result<Result<(Vec<Lease>, Option<Token>)>> {
        send_get(exchange, request, left)?;
        match exchange.receive("for the lease")? {
            (Message::Claimed(claimed), _) => Ok(Ok((Vec::new(), Some(claimed.token)))),
            first => Ok(receive_leases(&self.0, exchange, gets, first)?.map(|leases| (leases, None))),
        }
    }
}

fn no_lease() -> Error {
    ProtocolError::Content("the answer has no lease".to_owned()).into()
}

/// Checks the names and builds the request.
fn build_request(gets: &[Get], wait: Option<Duration>, claim: Option<&ClaimOf>) -> Result<Message> {
    if gets.is_empty() {
        return Err(BrokerError::new(RefusalCode::Invalid, "a get needs at least one object").into());
    }
    gets.iter().try_for_each(Get::check)?;
    Ok(Message::Get(Box::new(broker::GetHeader {
        objects: gets.iter().map(Get::request).collect(),
        wait_ms: wait.map(milliseconds),
        claim: claim.map(|claim| claim.claim.clone()),
    })))
}

/// Sends the request with the rest of its wait.
fn send_get(exchange: &mut Exchange<'_>, request: &mut Message, left: Duration) -> Result<()> {
    if let Message::Get(get) = request {
        get.wait_ms = get.wait_ms.map(|_| milliseconds(left));
    }
    exchange.send_first(request, &[])
}

/// Receives the leases of a get for a connection, checks them, and requests the memory that their descriptions decide. The inner error is not
/// the connection's: the leases are released.
fn receive_leases(
    connection: &Arc<Connection>,
    exchange: &mut Exchange<'_>,
    gets: &[Get],
    first: (Message, Vec<OwnedFd>),
) -> Result<Result<Vec<Lease>>> {
    let mut leases = vec![receive_lease(exchange, first, gets.len() > 1)?];
    for remaining in (0..gets.len() - 1).rev() {
        let next = exchange.receive("for the lease")?;
        leases.push(receive_lease(exchange, next, remaining > 0)?);
    }
    let tokens: Vec<Token> = leases.iter().map(|lease| lease.header.token).collect();
    let holder = exchange.connection;
    let is_own = ptr::eq(holder, &raw const **connection);
    let release = || {
        // The connection of a wait is closed instead.
        if is_own {
            tokens.iter().for_each(|token| connection.release(*token, "the lease"));
        }
    };
    let described = gets.iter().zip(&mut leases).map(|(get, lease)| {
        let token = lease.header.token;
        let described =
            lease.describe(&connection.tables).inspect_err(|error| holder.report(token, error.in_full()))?;
        get.compare(&described)?;
        Ok((get.selection(token, &described)?, described))
    });
    let described: Vec<_> = match described.collect::<Result<_>>() {
        Ok(described) => described,
        Err(error) => {
            release();
            return Ok(Err(error));
        }
    };
    for ((selection, _), lease) in described.iter().zip(&mut leases) {
        let Some(object) = selection else { continue };
        let get = broker::GetHeader { objects: vec![object.clone()], wait_ms: None, claim: None };
        exchange.send(&Message::Get(Box::new(get)), &[])?;
        // A lease must not be released while it is being received.
        let answer = exchange.receive("for the memory of the lease").inspect_err(|error| {
            if matches!(error, Error::Broker(_)) {
                release();
            }
        })?;
        *lease = receive_lease(exchange, answer, false)?;
    }
    let leases = gets.iter().zip(described).zip(leases).map(|((get, (_, of)), lease)| {
        let mut lease = Lease::new(connection, of, lease)?;
        if let Some(parts) = &get.parts {
            lease.parts.sort_by_cached_key(|part| parts.iter().position(|name| *name == part.header.name));
        }
        Ok(lease)
    });
    let leases: Vec<Lease> = leases.collect::<Result<_>>()?;
    // Otherwise `Connection::take_over` adds them.
    if is_own {
        leases.iter().for_each(|lease| connection.add_lease(&lease.hold.held));
    }
    Ok(Ok(leases))
}

/// Receives the rest of a lease after its first record. `more`: another lease follows, so the last record needs an acknowledgement too.
fn receive_lease(exchange: &mut Exchange<'_>, first: (Message, Vec<OwnedFd>), more: bool) -> Result<RawLease> {
    let wrong = |message: String| Err(ProtocolError::Content(message).into());
    let (mut header, mut tables) = match first {
        (Message::Lease(header), fds) => (header, fds),
        (other, _) => return Err(unexpected(&other, "lease")),
    };
    let mut sizes = std::mem::take(&mut header.sizes);
    let mut segments = tables.split_off(tables.len() - sizes.len());
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
    Ok(RawLease { header: *header, tables, segments: sizes.into_iter().zip(segments).collect() })
}
