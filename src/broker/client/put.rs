//! Describes a put and uploads it.

use std::{
    collections::BTreeMap,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
    time::Duration,
};

use super::{
    Client,
    holdings::{Header, HeldPart, PartHeader},
    socket::{Exchange, answer, unexpected},
};
use crate::{
    broker::request,
    driver::Backend,
    error::{BrokerError, Error, RefusalCode, Result},
    memory::{Chunk, Description, Region, Shared, Sharing},
    sys::table::sealed,
    wire::{
        Check, MAX_FDS, Segments,
        broker::{
            self, ArrayEntry, Attached, Lifetime, MAX_INLINE, Message, Published, PutHeader, Restore, Table, Token,
        },
        milliseconds,
    },
};

/// When a put succeeds. Otherwise it fails with [`Error::Broker`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Condition {
    /// If the name does not exist.
    #[default]
    New,
    /// Always. An existing object gets a new version.
    Any,
    /// If this is the current version. The put replaces it.
    Version(u64),
}

/// An object to publish with [`Client::put`].
///
/// ```
/// use vmmfd::broker::{Put, PutPart};
///
/// # let broker = vmmfd::internals::ExampleBroker::start()?;
/// # let client = &broker.client;
/// # let memory = &broker.memory;
/// let put = |put: Put<'static>| client.put(&put.part(PutPart::of("all", memory)?));
/// assert_eq!(put(Put::new("weights"))?.version, 1);
/// assert!(put(Put::new("weights")).is_err(), "the name exists");
/// assert_eq!(put(Put::new("weights").replace())?.version, 2);
/// assert_eq!(put(Put::new("weights").replace_version(2))?.version, 3);
/// assert!(put(Put::new("weights").replace_version(2)).is_err(), "another process has replaced it");
/// # Ok::<(), vmmfd::Error>(())
/// ```
#[derive(Debug)]
#[must_use]
pub struct Put<'a> {
    /// Without the parts and the metadata.
    header: PutHeader,
    parts: Vec<PutPart<'a>>,
    metadata: Option<Attached>,
}

impl<'a> Put<'a> {
    /// Describes a put of a new object, without parts.
    pub fn new(name: impl Into<String>) -> Self {
        let header = PutHeader { name: name.into(), ..PutHeader::default() };
        Self { header, parts: Vec::new(), metadata: None }
    }

    /// Adds a part.
    pub fn part(mut self, part: PutPart<'a>) -> Self {
        self.parts.push(part);
        self
    }

    /// Replaces an object of this name, whatever its version: [`Condition::Any`].
    pub fn replace(self) -> Self {
        self.condition(Condition::Any)
    }

    /// Replaces this version of the object. Fails if another is current: [`Condition::Version`].
    pub fn replace_version(self, version: u64) -> Self {
        self.condition(Condition::Version(version))
    }

    /// Sets when the put succeeds; by default, if the name does not exist.
    pub fn condition(mut self, condition: Condition) -> Self {
        (self.header.replace, self.header.if_version) = match condition {
            Condition::New => (false, None),
            Condition::Any => (true, None),
            Condition::Version(version) => (true, Some(version)),
        };
        self
    }

    /// Makes this put contribute to a version that several processes put together. `parts` names all its parts, including those of this
    /// put. All puts of the version share a `group`, which no other version uses. The put waits up to `wait` for the other parts.
    pub fn together(
        mut self,
        parts: impl IntoIterator<Item = impl Into<String>>,
        group: impl Into<String>,
        wait: Duration,
    ) -> Self {
        self.header.announced = parts.into_iter().map(Into::into).collect();
        self.header.group = Some(group.into());
        self.header.wait_ms = (!wait.is_zero()).then(|| milliseconds(wait));
        self
    }

    /// Sets the metadata: at most 1 MiB as JSON.
    pub fn metadata(self, metadata: Check) -> Self {
        Self { metadata: Some(Attached::of(&metadata).expect("JSON values are JSON")), ..self }
    }

    /// Sets the metadata by the text of a JSON object. Its numbers keep all their digits.
    ///
    /// # Errors
    /// [`Error::Broker`] if it is not a JSON object.
    pub fn metadata_text(self, text: &str) -> Result<Self> {
        let fields = serde_json::from_str::<BTreeMap<String, Attached>>(text);
        let metadata = fields.and_then(|fields| Attached::of(&fields));
        let metadata = metadata.map_err(|error| invalid(format!("the metadata is not a JSON object: {error}")))?;
        Ok(Self { metadata: Some(metadata), ..self })
    }

    /// Sets the permissions of a new name, like a file's; by default `0o600`. `r` allows get, list and watch; `w` allows replacement.
    pub fn mode(mut self, mode: u16) -> Self {
        self.header.mode = Some(mode);
        self
    }

    /// Sets the lifetime of the name; by default, until it is deleted.
    pub fn lifetime(mut self, lifetime: Lifetime) -> Self {
        self.header.lifetime = Some(lifetime);
        self
    }

    /// Sets how many earlier versions the broker keeps without a lease; by default none.
    pub fn keep(mut self, versions: u32) -> Self {
        self.header.keep = Some(versions);
        self
    }
}

/// A part to put: memory of one device.
///
/// ```
/// use vmmfd::{array::{ArrayDescriptor, Order}, broker::{ArrayEntry, Get, Put, PutPart}};
///
/// # let broker = vmmfd::internals::ExampleBroker::start()?;
/// # let client = &broker.client;
/// # let (memory, driver) = (&broker.memory, &broker.driver);
/// let bias = ArrayDescriptor::new("f32".parse()?, [16], Order::C)?;
/// let part = PutPart::of("rank0", memory)?.arrays([ArrayEntry::new("bias", bias)]);
/// client.put(&Put::new("weights").part(part))?;
/// let object = client.get(&Get::new("weights"))?.open(driver, None)?;
/// assert_eq!(object.array("bias")?.descriptor().shape, [16]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
#[must_use]
pub struct PutPart<'a> {
    backend: Backend,
    header: PartHeader,
    segments: Vec<(u64, Segment<'a>)>,
}

#[derive(Debug)]
enum Segment<'a> {
    Chunk(Arc<Chunk>),
    Borrowed(BorrowedFd<'a>),
}

impl AsFd for Segment<'_> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Chunk(chunk) => chunk.as_fd(),
            Self::Borrowed(fd) => *fd,
        }
    }
}

impl PutPart<'static> {
    /// Describes all of `memory`. Blocks until all work in the device's primary context is done.
    ///
    /// # Errors
    /// [`Error::Broker`] for pool memory and legacy memory, which end with their process; [`Error::Driver`].
    ///
    /// Driver call: `cuCtxSynchronize`.
    #[doc(alias = "cuCtxSynchronize")]
    pub fn of(name: impl Into<String>, memory: &Shared) -> Result<Self> {
        let name = name.into();
        let description = memory.describe()?;
        let Some((_, chunks)) = memory.chunks(0..memory.size())? else {
            return Err(not_shareable(&name, &description));
        };
        memory.synchronize()?;
        let segments = chunks.into_iter().map(|chunk| (chunk.size(), Segment::Chunk(chunk))).collect();
        Ok(Self { backend: memory.device().backend(), header: PartHeader::new(name, description), segments })
    }

    /// Describes memories as one part, each after the [mapped size](crate::memory::Shared::mapped_size) of those before it. Blocks as [`PutPart::of`].
    ///
    /// # Errors
    /// As [`PutPart::of`]; [`Error::Broker`] for no memory, and for memory of several devices, or of a device and its host.
    pub fn of_several<'m>(name: &str, memories: impl IntoIterator<Item = &'m Shared>) -> Result<Self> {
        let mut whole: Option<Self> = None;
        for memory in memories {
            let mut part = Self::of(name, memory)?;
            part.header.description.size = part.header.description.mapped_size;
            whole = Some(match whole {
                None => part,
                Some(whole) => whole.join(part)?,
            });
        }
        whole.ok_or_else(|| invalid(format!("part `{name}` has no memory")))
    }

    fn join(mut self, other: Self) -> Result<Self> {
        let PartHeader { name, description: one, .. } = &mut self.header;
        let more = other.header.description;
        if self.backend != other.backend || one.device != more.device {
            let one = &one.device;
            let other = more.device;
            return Err(invalid(format!("part `{name}` has memory on {one} and on {other}: put one part per device")));
        }
        match (&mut one.sharing, more.sharing) {
            (Sharing::Vmm { placement, segments }, Sharing::Vmm { placement: of_other, segments: more })
                if *placement == of_other =>
            {
                *segments += more;
            }
            _ => return Err(invalid(format!("part `{name}` has memory of a device and of its host: put two parts"))),
        }
        one.size += more.size;
        one.mapped_size += more.mapped_size;
        one.immutable &= more.immutable;
        self.segments.extend(other.segments);
        Ok(self)
    }
}

impl<'a> PutPart<'a> {
    /// Describes memory by its segments: each one's exact size in bytes and its descriptor, in order. The caller must have completed
    /// all work on the memory.
    ///
    /// # Errors
    /// [`Error::Broker`] for pool memory and legacy memory, which end with their process.
    pub fn of_segments(
        name: impl Into<String>,
        backend: Backend,
        description: Description,
        segments: impl IntoIterator<Item = (u64, BorrowedFd<'a>)>,
    ) -> Result<Self> {
        let name = name.into();
        if !matches!(description.sharing, Sharing::Vmm { .. }) {
            return Err(not_shareable(&name, &description));
        }
        let segments = segments.into_iter().map(|(size, fd)| (size, Segment::Borrowed(fd))).collect();
        Ok(Self { backend, header: PartHeader::new(name, description), segments })
    }

    /// Sets the arrays in the memory.
    pub fn arrays(mut self, arrays: impl IntoIterator<Item = ArrayEntry>) -> Self {
        self.header.arrays = Arc::new(arrays.into_iter().collect());
        self
    }

    /// Sets the digest of the part's bytes, in any format that its readers know, such as `blake3:` and 64 hexadecimal digits.
    pub fn digest(mut self, digest: impl Into<String>) -> Self {
        self.header.digest = Some(digest.into());
        self
    }
}

fn not_shareable(name: &str, description: &Description) -> Error {
    let mechanism = description.mechanism();
    invalid(format!(
        "part `{name}` is shared by {mechanism}: pools and legacy handles end with their process, so a broker can't hold them"
    ))
}

fn invalid(message: String) -> Error {
    BrokerError::new(RefusalCode::Invalid, message).into()
}

impl Client {
    /// Publishes memory under a name. Once this returns, the broker holds the memory and the caller may drop its own.
    ///
    /// # Errors
    /// [`Error::Broker`] if the broker refuses the put, which then has no effect; [`Error::Memory`] if an array is not inside its part;
    /// [`Error::Peer`], [`Error::System`], [`Error::Interrupted`].
    pub fn put(&self, put: &Put<'_>) -> Result<Published> {
        let mut upload = Upload::of(put)?;
        // Makes the put idempotent: it may be sent again after a reconnect.
        let request = super::new_token()?;
        upload.message.request = Some(request);
        let PutHeader { name, replace, wait_ms, lifetime, .. } = &put.header;
        let mut send = |exchange: &mut Exchange<'_>, left| {
            let published = upload.send(exchange, left)?;
            // Inside the exchange, so that no reconnect can miss this put.
            match lifetime {
                Some(Lifetime::Maker | Lifetime::Leased) => self.0.remember_put(name, request),
                // The existing name keeps its lifetime, which this process does not know.
                None if *replace => self.0.remember_put(name, request),
                _ => self.0.forget_put(name),
            }
            Ok(published)
        };
        let Some(wait) = wait_ms else { return self.0.request(send) };
        let (published, other) = self.0.wait(Duration::from_millis(*wait), &mut send)?;
        // The name's lifetime may depend on the connection.
        self.0.take_over(&other, &[], vec![request])?;
        Ok(published)
    }
}

/// Prepares to restore a version with its leases, and lets `send` upload it.
pub(super) fn restore(
    header: &Header,
    parts: &[HeldPart],
    leases: &[Token],
    send: impl FnOnce(&mut Upload<'_>) -> Result<Published>,
) -> Result<Published> {
    let Header { version, created_ms, owner, mode, lifetime, keep, .. } = *header;
    let unknown = || invalid(format!("the backend `{}` is unknown to this build", header.backend));
    let backends = [Backend::Cuda, Backend::Host];
    let backend = backends.into_iter().find(|known| known.as_str() == header.backend).ok_or_else(unknown)?;
    let mut put = Put::new(header.name.as_str());
    put.header = PutHeader { mode, lifetime, keep, ..put.header };
    put.metadata.clone_from(&header.metadata);
    for (part, segments) in parts {
        let segments = segments.iter().map(|(size, fd)| (*size, Segment::Borrowed(fd.as_fd()))).collect();
        put.parts.push(PutPart { backend, header: part.clone(), segments });
    }
    let mut upload = Upload::of(&put)?;
    upload.message.request = Some(super::new_token()?);
    let id = header.id.clone();
    upload.message.restore = Some(Restore { version, id, created_ms, owner, leases: leases.to_vec() });
    send(&mut upload)
}

/// A put, ready to send.
pub(super) struct Upload<'a> {
    message: Box<PutHeader>,
    tables: Vec<OwnedFd>,
    /// The segments of all parts.
    segments: Vec<(u64, &'a Segment<'a>)>,
}

impl<'a> Upload<'a> {
    fn of(put: &'a Put<'_>) -> Result<Self> {
        check(put)?;
        let room = request::inline_room(put.parts.len(), put.header.announced.len());
        let mut tables = Tables { room, attached: Vec::new() };
        let metadata = put.metadata.clone().map(|text| tables.add(text)).transpose()?;
        let mut parts = Vec::with_capacity(put.parts.len());
        for PutPart { header: PartHeader { name, description, digest, arrays }, .. } in &put.parts {
            let (name, digest) = (name.clone(), digest.clone());
            let (arrays, array_count) = match arrays.as_slice() {
                [] => (None, None),
                of => (Some(tables.add(Attached::of(of).map_err(unwritable)?)?), Some(of.len() as u64)),
            };
            parts.push(broker::PutPartHeader { name, memory: description.into(), arrays, array_count, digest });
        }
        let tables = tables.attached;
        let of_part = |part: &'a PutPart<'_>| part.segments.iter().map(|(size, segment)| (*size, segment));
        let segments: Vec<(u64, &Segment<'_>)> = put.parts.iter().flat_map(of_part).collect();
        let first = segments.len().min(MAX_FDS.saturating_sub(tables.len()));
        let message = Box::new(PutHeader {
            backend: put.parts.first().map_or(broker::NO_BACKEND, |part| part.backend.as_str()).to_owned(),
            parts,
            metadata,
            sizes: segments[..first].iter().map(|(size, _)| *size).collect(),
            ..put.header.clone()
        });
        request::check(&message)?;
        Ok(Self { message, tables, segments })
    }

    /// Sends the put and waits until the version is published. `left` limits the wait for parts of other processes.
    pub(super) fn send(&mut self, exchange: &mut Exchange<'_>, left: Duration) -> Result<Published> {
        self.message.wait_ms = self.message.wait_ms.map(|_| milliseconds(left));
        let (first, rest) = self.segments.split_at(self.message.sizes.len());
        let fds = self.tables.iter().map(AsFd::as_fd).chain(first.iter().map(|(_, segment)| segment.as_fd()));
        let fds: Vec<BorrowedFd<'_>> = fds.collect();
        exchange.send_first(&Message::Put(self.message.clone()), &fds)?;
        if !rest.is_empty() {
            match exchange.receive("for room for the segments")? {
                (Message::Send(_), _) => {}
                // It was published before the connection broke.
                (Message::Published(published), _) => return Ok(published),
                (other, _) => return Err(unexpected(&other, "send")),
            }
            let mut at = first.len();
            for some in rest.chunks(MAX_FDS) {
                let sizes = some.iter().map(|(size, _)| *size).collect();
                let fds: Vec<BorrowedFd<'_>> = some.iter().map(|(_, segment)| segment.as_fd()).collect();
                exchange.send(&Message::Segments(Segments { first: at as u64, sizes }), &fds)?;
                at += some.len();
            }
        }
        Ok(answer!(exchange.receive("for the object to be published")?, Published, "published").0)
    }
}

/// Checks the arrays, which the server does not read, and the backends.
fn check(put: &Put<'_>) -> Result<()> {
    for PutPart { backend, header: PartHeader { name, description, arrays, .. }, .. } in &put.parts {
        let first = put.parts[0].backend;
        if *backend != first {
            return Err(invalid(format!(
                "all parts of an object must be on one backend, but these are on {first} and {backend}"
            )));
        }
        arrays.iter().try_for_each(|entry| entry.array.check(description.size))?;
        request::check_arrays(name, description.size, arrays)?;
    }
    Ok(())
}

fn unwritable(error: serde_json::Error) -> Error {
    invalid(format!("can't encode the put as JSON: {error}"))
}

/// The tables of one put: small tables go into the message, others into memfds beside it.
struct Tables {
    /// How many more bytes of tables the message can hold.
    room: usize,
    attached: Vec<OwnedFd>,
}

impl Tables {
    fn add(&mut self, text: Attached) -> Result<Table> {
        let length = text.as_str().len();
        if length <= MAX_INLINE.min(self.room) {
            self.room -= length;
            return Ok(Table::Inline(text));
        }
        self.attached.push(sealed(text.as_str()).map_err(|error| Error::system("create a memfd for a table", error))?);
        Ok(Table::Length(length as u64))
    }
}
