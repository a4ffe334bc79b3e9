//! A lease of an object, and the claim to create a missing object.

use std::{
    io,
    os::fd::OwnedFd,
    sync::{Arc, Mutex, OnceLock},
    time::SystemTime,
};

use super::{
    connection::Connection,
    holdings::{Header, Hold, OwnLease, PartHeader, RestorePart, part_accessors, version_accessors},
    object::{Layout, Object, ObjectPart},
};
use crate::{
    broker::request,
    driver::{Access, Driver},
    error::{BrokerError, DeviceError, Error, ErrorCode, PeerError, ProtocolError, RefusalCode, Result},
    memory::{Description, Device, Imported, Importing, Remains, Run, Selector},
    sys::{lock, table},
    wire::{
        Check, MAX_MESSAGE,
        broker::{ArrayEntry, Attached, ClaimHeader, LeaseHeader, MAX_METADATA, MAX_TABLE, Owner, Table, Token},
        clean, shorten,
    },
};

/// A lease of a version: the broker keeps the version and counts this process among its readers.
///
/// The lease ends when it is dropped, and with the connection. It survives a restart of the broker: see [`Client`](super::Client). A lease
/// owns the descriptors of the requested memory and maps nothing; [`Lease::open`] maps it.
///
/// ```
/// # use vmmfd::broker::{Put, PutPart};
/// use vmmfd::{broker::Get, memory::Region};
///
/// # let broker = vmmfd::internals::ExampleBroker::start()?;
/// # let client = &broker.client;
/// # client.put(&Put::new("weights").part(PutPart::of("all", &broker.memory)?))?;
/// # let driver = &broker.driver;
/// let lease = client.get(&Get::new("weights"))?;
/// println!("version {} of uid {:?}", lease.version(), lease.owner());
/// let object = lease.open(driver, None)?;
/// let memory = object.part("all").expect("the part that was put").memory()?;
/// println!("{} bytes at {:#x}", memory.size(), memory.address());
/// # Ok::<(), vmmfd::Error>(())
/// ```
#[derive(Debug)]
pub struct Lease {
    pub(super) hold: Hold,
    pub(super) header: Arc<Header>,
    pub(super) parts: Vec<LeasedPart>,
}

/// A part of a lease, not mapped yet.
#[derive(Debug)]
pub struct LeasedPart {
    pub(super) header: PartHeader,
    pub(super) runs: Vec<LeasedRun>,
}

/// Contiguous segments.
#[derive(Debug)]
pub(super) struct LeasedRun {
    pub(super) run: Run,
    /// Each segment's size and descriptor. A restore borrows the descriptor.
    pub(super) segments: Vec<(u64, Arc<OwnedFd>)>,
}

/// A received lease, not read yet.
#[derive(Debug)]
pub(super) struct RawLease {
    pub(super) header: LeaseHeader,
    /// The memfds of the tables, in field order.
    pub(super) tables: Vec<OwnedFd>,
    /// The segments of all runs.
    pub(super) segments: Vec<(u64, OwnedFd)>,
}

impl RawLease {
    /// Reads and checks the description of the version, which its maker may have written wrongly.
    ///
    /// # Errors
    /// [`Error::Broker`] with the code `differs`.
    pub(super) fn describe(&mut self, cache: &TableCache) -> Result<Described> {
        let header = &mut self.header;
        let mut tables = std::mem::take(&mut self.tables).into_iter();
        let (name, version) = (header.name.clone(), header.version);
        let wrong =
            |problem: String| differs(format!("the description of version {version} of `{name}` is wrong: {problem}"));
        let metadata = read_metadata(header.metadata.take(), &mut tables).map_err(wrong)?;
        let mut parts = Vec::with_capacity(header.parts.len());
        for part in &mut header.parts {
            let description: Description = part.memory.clone().try_into()?;
            let arrays = part.arrays.take().map(|table| {
                let key = (header.id.clone(), part.name.clone(), table.length(), description.size);
                let fd = if table.is_attached() { tables.next() } else { None };
                cache.get(key, |key| {
                    let text = read_text(table, &mut fd.into_iter(), MAX_TABLE);
                    text.and_then(|text| parse_arrays(&key.1, &text, key.3))
                })
            });
            let arrays = arrays.transpose().map_err(wrong)?.unwrap_or_default();
            parts.push(PartHeader { name: part.name.clone(), description, digest: part.digest.take(), arrays });
        }
        let LeaseHeader { id, created_ms, owner, backend, mode, lifetime, keep, .. } = header;
        let (id, backend) = (id.clone(), backend.clone());
        let (created_ms, owner, mode, lifetime, keep) = (*created_ms, *owner, *mode, *lifetime, *keep);
        let header = Header { name, version, id, created_ms, owner, backend, metadata, mode, lifetime, keep };
        Ok(Described { header: Arc::new(header), parts })
    }
}

/// A table of arrays is identified by the id of its version, its part, its length and the size of the part's memory.
type TableKey = (String, String, u64, u64);

/// The table of arrays that a connection read last: a program that gets the arrays of a version one by one parses its table once.
#[derive(Debug, Default)]
pub(super) struct TableCache(Mutex<Option<(TableKey, Arc<Vec<ArrayEntry>>)>>);

impl TableCache {
    /// The bytes of a table that stays in memory: shorter ones are parsed quickly.
    const WORTH: std::ops::RangeInclusive<u64> = 16 << 10..=4 << 20;

    fn get(
        &self,
        key: TableKey,
        read: impl FnOnce(&TableKey) -> Result<Vec<ArrayEntry>, String>,
    ) -> Result<Arc<Vec<ArrayEntry>>, String> {
        if let Some((_, arrays)) = lock(&self.0).as_ref().filter(|(last, _)| *last == key) {
            return Ok(Arc::clone(arrays));
        }
        let arrays = Arc::new(read(&key)?);
        if Self::WORTH.contains(&key.2) {
            *lock(&self.0) = Some((key, Arc::clone(&arrays)));
        }
        Ok(arrays)
    }
}

/// The description of a leased version.
#[derive(Debug)]
pub(super) struct Described {
    pub(super) header: Arc<Header>,
    pub(super) parts: Vec<PartHeader>,
}

impl Lease {
    /// Combines the description of a version with the memory of a lease, which may have fewer parts. The caller adds the lease to the
    /// connection.
    pub(super) fn new(connection: &Arc<Connection>, described: Described, raw: RawLease) -> Result<Self> {
        let Described { header, parts: mut headers } = described;
        let mut segments = raw.segments.into_iter().map(|(size, fd)| (size, Arc::new(fd)));
        let mut parts = Vec::with_capacity(raw.header.parts.len());
        for part in raw.header.parts {
            let at = headers.iter().position(|header| header.name == part.name);
            let unknown = || ProtocolError::Content(format!("part `{}` is in the second lease only", part.name));
            let header = headers.swap_remove(at.ok_or_else(unknown)?);
            let runs = part.runs.into_iter().map(|run| {
                let segments = segments.by_ref().take(usize::try_from(run.segments).unwrap_or(usize::MAX)).collect();
                LeasedRun { run, segments }
            });
            parts.push(LeasedPart { runs: runs.collect(), header });
        }
        let restore = raw.header.whole.then(|| parts.iter().map(LeasedPart::restore_part).collect());
        let size = parts.iter().flat_map(|part| &part.runs).map(|run| run.run.size).sum();
        let held = Arc::new(OwnLease::new(raw.header.token, Arc::clone(&header), size, restore));
        let hold = Hold { connection: Arc::clone(connection), held };
        Ok(Self { hold, header, parts })
    }

    version_accessors!();

    /// Whether the broker counts this process among the readers, as far as this process knows. False from a break of the connection
    /// until a reconnect resumes the lease, after it was [lost](super::Client::on_lost), and in a fork. Does not block.
    pub fn is_held(&self) -> bool {
        self.hold.is_held()
    }

    /// Whether the owner has [recalled](super::Client::recall) the version: this process should end the lease. Dropping the lease does,
    /// and so does [`Object::park`], but not [`Object::park_with_lease`].
    ///
    /// The first call for a client opens a second connection to the broker, which receives only recalls, and blocks meanwhile.
    ///
    /// # Errors
    /// Of the first call: [`Error::Misuse`] for a client without a path ([`Client::over`](super::Client::over)) and in a fork; errors of
    /// [`Client::connect`](super::Client::connect).
    pub fn is_recalled(&self) -> Result<bool> {
        self.hold.is_recalled()
    }

    /// Calls a handler once, when the owner recalls the version; soon if it is recalled already. It is dropped with the lease.
    ///
    /// Handlers run on the connection's background thread, so they should return soon, and must not own this lease or a clone of the
    /// client. They may send to a channel, or set a flag that the owner of the lease reads.
    ///
    /// # Errors
    /// As [`Lease::is_recalled`].
    pub fn on_recall(&self, call: impl FnOnce() + Send + 'static) -> Result<()> {
        self.hold.on_recall(call)
    }

    /// The memory's backend: `cuda` or `host`.
    pub fn backend(&self) -> &str {
        &self.header.backend
    }

    /// The requested parts.
    pub fn parts(&self) -> &[LeasedPart] {
        &self.parts
    }

    /// The part with this name.
    pub fn part(&self, name: &str) -> Option<&LeasedPart> {
        self.parts.iter().find(|part| part.header.name == name)
    }

    /// Ends the lease and returns its parts. Their descriptors remain valid.
    pub fn into_parts(self) -> Vec<LeasedPart> {
        self.parts
    }

    /// Like [`Lease::open`], but with private copy-on-write pages, as with `MAP_PRIVATE`: the memory is [`Access::ReadWrite`] in this
    /// process, and no other process sees its writes. Pages that this process has not written show the shared memory.
    /// [`Object::switch`] and [`Object::park`] discard the writes.
    ///
    /// # Errors
    /// All errors of [`Lease::open`]; [`DeviceError::Unsupported`] for GPU memory, because CUDA has no copy-on-write mappings. Errors end
    /// the lease.
    pub fn open_copy_on_write(self, driver: &Driver, device: Option<Selector>) -> Result<Object> {
        self.open_with(driver, device, true)
    }

    /// Maps all requested memory read-only, for use by `device` or, by default, by the device that owns it.
    ///
    /// Memory that differs from its description is reported to the broker.
    ///
    /// # Errors
    /// [`Error::Peer`] if the memory is on another backend or differs from its description; [`Error::Device`] if no device of this
    /// process can reach it; [`Error::Driver`]; [`Error::Misuse`] in a fork. Errors end the lease.
    ///
    /// Driver calls, for each part: as for [`Imported::open`].
    pub fn open(self, driver: &Driver, device: Option<Selector>) -> Result<Object> {
        self.open_with(driver, device, false)
    }

    fn open_with(self, driver: &Driver, device: Option<Selector>, copy_on_write: bool) -> Result<Object> {
        self.hold.connection.check_fork()?;
        let wanted = device.map(|device| Device::find(driver, device)).transpose()?;
        check_backend(&self.header.name, &self.header.backend, driver)?;
        let Self { hold, header, parts, .. } = self;
        let mut opened = Vec::with_capacity(parts.len());
        for part in parts {
            let owner = &part.header.description.device;
            let device = match &wanted {
                None => hold.connection.device_of(driver, owner)?,
                wanted => Device::for_memory_of(driver, owner, wanted.as_ref())?,
            };
            let mapped = part.map(&device, copy_on_write).inspect_err(|error| hold.report(error))?;
            opened.push(mapped);
        }
        Ok(Object { parts: opened, header, hold: Some(hold), layout: Layout::default() })
    }
}

impl LeasedPart {
    part_accessors!();

    /// Returns each segment's size in bytes and its descriptor, to import them by other means. The caller owns the descriptors.
    ///
    /// # Errors
    /// [`Error::System`] if the background thread restores the version on the broker at this moment, and this process has no free
    /// descriptors to duplicate those that it uses. The descriptors are closed then.
    pub fn into_segments(self) -> Result<Vec<(u64, OwnedFd)>> {
        let owned = self.runs.into_iter().flat_map(|run| run.segments).map(|(size, fd)| {
            let fd = Arc::try_unwrap(fd).or_else(|shared| shared.try_clone())?;
            Ok((size, fd))
        });
        let action =
            || format!("take the descriptors of part `{}`, which is being restored on the broker", self.header.name);
        owned.collect::<io::Result<_>>().map_err(|error| Error::system(action(), error))
    }

    fn restore_part(&self) -> RestorePart {
        let segments = self.runs.iter().flat_map(|run| &run.segments);
        (self.header.clone(), segments.map(|(size, fd)| (*size, Arc::downgrade(fd))).collect())
    }

    fn map(self, device: &Device, copy_on_write: bool) -> Result<ObjectPart> {
        if copy_on_write && !device.is_host() {
            let feature = "copy-on-write mappings, as CUDA has none: copy what is to be written";
            return Err(Error::Device(DeviceError::Unsupported { device: device.to_string(), feature }));
        }
        let Self { header, runs } = self;
        let mut memory = Vec::with_capacity(runs.len());
        let mut remains = Vec::with_capacity(runs.len());
        for run in runs {
            let (imported, rest) = run.map(device, &header.description, copy_on_write)?;
            memory.push(Arc::new(imported));
            remains.push(rest);
        }
        Ok(ObjectPart { header, memory, remains, index: OnceLock::new() })
    }
}

impl LeasedRun {
    /// Maps the run at addresses of the driver's choice. Also returns its handles and descriptors.
    pub(super) fn map(
        self,
        device: &Device,
        description: &Description,
        copy_on_write: bool,
    ) -> Result<(Imported, Remains)> {
        let mut importing = Importing::begin(device, description, &self.run, Access::ReadOnly)?;
        if copy_on_write {
            importing = importing.copy_on_write();
        }
        let (sizes, fds): (Vec<u64>, Vec<Arc<OwnedFd>>) = self.segments.into_iter().unzip();
        importing.take(&sizes, fds)?;
        importing.finish()
    }
}

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
/// not survive a restart of the broker, which may then give the claim to another process. An interrupted request of the client can end them
/// too, and so can the end of a lease while the broker does not read. If both processes put the object, the second put fails with the code
/// `exists`.
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

/// Checks that an object's memory belongs to the driver's backend.
pub(super) fn check_backend(name: &str, backend: &str, driver: &Driver) -> Result<()> {
    let own = driver.backend();
    if backend == own.as_str() {
        return Ok(());
    }
    let message = format!("the memory of `{name}` is on backend {backend}, and this process uses {own}");
    Err(Error::Peer(PeerError::Mismatch { code: ErrorCode::Backend, message }))
}

/// An object differs from its description, or from the caller's expectations. The sentence may quote the maker.
pub(super) fn differs(message: String) -> Error {
    quoting(RefusalCode::Differs, message)
}

/// An error whose sentence quotes the maker.
pub(super) fn quoting(code: RefusalCode, mut message: String) -> Error {
    clean(&mut message);
    shorten(&mut message, MAX_MESSAGE);
    BrokerError::new(code, message).into()
}

/// The text of a table, inline or in a descriptor.
fn read_text(table: Table, tables: &mut impl Iterator<Item = OwnedFd>, most: u64) -> Result<String, String> {
    match table {
        Table::Inline(text) => Ok(text.as_str().to_owned()),
        Table::Length(length) => {
            let fd = tables.next().ok_or_else(|| "the descriptor of a table is missing".to_owned())?;
            let text = table::read(fd, length, most)?;
            String::from_utf8(text).map_err(|_| "a table is not UTF-8".to_owned())
        }
    }
}

/// Reads the metadata, which must be a JSON object.
pub(super) fn read_metadata(
    table: Option<Table>,
    tables: &mut impl Iterator<Item = OwnedFd>,
) -> Result<Option<Attached>, String> {
    let Some(table) = table else { return Ok(None) };
    let text = read_text(table, tables, MAX_METADATA)?;
    let not_an_object = |error| format!("the metadata is not a JSON object: {error}");
    let text = Attached::from_text(text).map_err(not_an_object)?;
    text.read::<Check>().map_err(not_an_object)?;
    Ok(Some(text))
}

/// Parses and checks a part's arrays.
fn parse_arrays(part: &str, text: &str, size: u64) -> Result<Vec<ArrayEntry>, String> {
    let arrays: Vec<ArrayEntry> = serde_json::from_str(text)
        .map_err(|error| format!("the table of part `{part}` is not an array table: {error}"))?;
    request::check_arrays(part, size, &arrays).map_err(|refusal| refusal.message)?;
    Ok(arrays)
}
