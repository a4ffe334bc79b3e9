//! A lease of an object, and the object mapped.

use std::{
    collections::HashMap,
    os::fd::OwnedFd,
    sync::{Arc, OnceLock},
    thread,
    time::{Duration, SystemTime},
};

use super::{
    connection::Connection,
    holdings::{Held, Whole, WholePart},
    switch::Layout,
};
use crate::{
    broker::table,
    driver::{Access, Driver},
    error::{BrokerError, DeviceError, Error, MemoryError, ProtocolError, RefusalCode, Result, code},
    memory::{Array, Description, Device, Imported, Importing, Part, Region, Remains, Selector},
    wire::{
        Check,
        broker::{
            ArrayEntry, Attached, LeaseHeader, MAX_ARRAYS, MAX_METADATA, MAX_TABLE, Message, Owner, Report, Table,
            read_arrays,
        },
    },
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

/// A hold on a version of an object: the broker keeps it, and counts this process among its readers. It ends when it is dropped,
/// and with the connection. Where the broker is restarted it goes on: see [`Client`](super::Client).
///
/// It has the descriptors of what was asked for, and maps nothing: [`Lease::open`] does.
#[derive(Debug)]
pub struct Lease {
    pub(super) hold: Hold,
    pub(super) name: String,
    pub(super) version: u64,
    pub(super) id: String,
    pub(super) created: SystemTime,
    pub(super) owner: Owner,
    pub(super) backend: String,
    pub(super) metadata: Option<Attached>,
    pub(super) parts: Vec<LeasedPart>,
}

/// What ends a lease when it is dropped.
#[derive(Debug)]
pub(super) struct Hold {
    pub(super) connection: Arc<Connection>,
    held: Arc<Held>,
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.connection.release(self.held.token, "the lease");
    }
}

/// A part of a lease, not mapped.
#[derive(Debug)]
pub struct LeasedPart {
    pub(super) name: String,
    pub(super) description: Description,
    pub(super) digest: Option<String>,
    pub(super) arrays: Arc<Vec<ArrayEntry>>,
    pub(super) runs: Vec<Run>,
}

/// Segments side by side.
#[derive(Debug)]
pub(super) struct Run {
    pub(super) part: Part,
    /// Shared with what offers the version back to a broker that has lost it.
    pub(super) segments: Vec<(u64, Arc<OwnedFd>)>,
}

impl Lease {
    pub(super) fn new(
        connection: &Arc<Connection>,
        header: LeaseHeader,
        tables: Vec<OwnedFd>,
        segments: Vec<(u64, OwnedFd)>,
    ) -> Result<Self> {
        let LeaseHeader { name, version, id, created_ms, owner, backend, metadata, .. } = header;
        let mut tables = tables.into_iter();
        let metadata = metadata.map(|table| text_of(table, &mut tables, MAX_METADATA)).transpose()?;
        let metadata = metadata.map(Attached::from_text).transpose();
        let metadata =
            metadata.map_err(|error| ProtocolError::Content(format!("the metadata is not JSON: {error}")))?;
        let segments = segments.into_iter().map(|(size, fd)| (size, Arc::new(fd)));
        let (mut parts, mut segments) = (Vec::with_capacity(header.parts.len()), segments);
        for part in header.parts {
            let description: Description = part.memory.try_into()?;
            let arrays = part.arrays.map(|table| text_of(table, &mut tables, MAX_TABLE)).transpose()?;
            let arrays = arrays.map(|text| arrays_of(&text, description.size)).transpose()?.unwrap_or_default();
            let runs = part.runs.into_iter().map(|run| {
                let segments = segments.by_ref().take(usize::try_from(run.segments).unwrap_or(usize::MAX)).collect();
                Run { part: run.into(), segments }
            });
            let (runs, arrays) = (runs.collect(), Arc::new(arrays));
            parts.push(LeasedPart { name: part.name, description, digest: part.digest, arrays, runs });
        }
        let whole = header.whole.then(|| Whole {
            backend: backend.clone(),
            created_ms,
            owner,
            metadata: metadata.clone(),
            mode: header.mode,
            lifetime: header.lifetime,
            keep: header.keep,
            parts: parts.iter().map(LeasedPart::whole).collect(),
        });
        let held = Arc::new(Held::new(header.token, name.clone(), version, id.clone(), whole));
        connection.hold(&held);
        let hold = Hold { connection: Arc::clone(connection), held };
        let created = SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(created_ms));
        let created = created.unwrap_or(SystemTime::UNIX_EPOCH);
        Ok(Self { hold, name, version, id, created, owner, backend, metadata, parts })
    }

    about_its_version!();

    /// Whether the broker counts this process among the readers, as far as is known: not between a break of the connection and the
    /// moment when the lease was taken up again, not if it is [lost](super::Client::on_lost), and not in a fork. Does not block.
    pub fn is_held(&self) -> bool {
        self.hold.is_held()
    }

    /// The backend of its memory: `cuda` or `host`.
    pub fn backend(&self) -> &str {
        &self.backend
    }

    /// The parts that were asked for.
    pub fn parts(&self) -> &[LeasedPart] {
        &self.parts
    }

    /// The part of a name.
    pub fn part(&self, name: &str) -> Option<&LeasedPart> {
        self.parts.iter().find(|part| part.name == name)
    }

    /// The parts alone: the lease has ended then, and what was handed over stays.
    pub fn into_parts(self) -> Vec<LeasedPart> {
        self.parts
    }

    /// As [`Lease::open`], with pages that are copied when this process writes to them, as `MAP_PRIVATE` does: the memory is
    /// [`Access::ReadWrite`] here, and no other process sees what is written. Bytes that this process has not written are the maker's
    /// for as long as nobody else writes them. [`Object::switch`] and [`Object::park`] discard what was written.
    ///
    /// # Errors
    /// Those of [`Lease::open`]; [`DeviceError::Unsupported`] for memory of a GPU, which CUDA can't map so. The lease has ended then.
    pub fn open_copy_on_write(self, driver: &Driver, device: Option<Selector>) -> Result<Object> {
        self.open_with(driver, device, true)
    }

    /// Maps all of it, read-only. Each part is used by `device`, if one is given, or else by its own device.
    ///
    /// Memory that the driver finds to be other than its maker claimed is reported to the broker.
    ///
    /// # Errors
    /// [`Error::Peer`] if the memory is on another backend, or is not as it is described; [`Error::Device`] if no device of this
    /// process can reach it; [`Error::Driver`]; [`Error::Misuse`] in a fork. The lease has ended then.
    ///
    /// Driver calls, for each part: those of [`Imported::open`].
    pub fn open(self, driver: &Driver, device: Option<Selector>) -> Result<Object> {
        self.open_with(driver, device, false)
    }

    fn open_with(self, driver: &Driver, device: Option<Selector>, copy_on_write: bool) -> Result<Object> {
        self.hold.connection.check_fork()?;
        let wanted = device.map(|device| Device::find(driver, device)).transpose()?;
        check_backend(&self.name, &self.backend, driver)?;
        let Self { hold, name, version, id, created, owner, metadata, parts, .. } = self;
        let mut opened = Vec::with_capacity(parts.len());
        for part in parts {
            let owner = &part.description.device;
            let device = match &wanted {
                None => hold.connection.device_of(driver, owner)?,
                wanted => Device::for_memory_of(driver, owner, wanted.as_ref())?,
            };
            let mapped = part.map(&device, copy_on_write).inspect_err(|error| hold.report(error))?;
            opened.push(mapped);
        }
        Ok(Object {
            parts: opened,
            name,
            version,
            id,
            created,
            owner,
            metadata,
            hold: Some(hold),
            layout: Layout::default(),
        })
    }
}

impl Hold {
    /// Whether the broker counts it, as far as is known.
    fn is_held(&self) -> bool {
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

    fn send_report(&self, message: String) {
        let report = Report { token: self.held.token, message };
        // A report that does not arrive changes nothing here.
        let _ = self.connection.send(&Message::Report(report), &[]);
    }
}

impl LeasedPart {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What it is. Its sizes are as its maker claimed them.
    pub fn description(&self) -> &Description {
        &self.description
    }

    /// The digest of its bytes, in its maker's words.
    pub fn digest(&self) -> Option<&str> {
        self.digest.as_deref()
    }

    /// The arrays in it, in its maker's order: all of them, also if only some of the memory was asked for.
    pub fn arrays(&self) -> &[ArrayEntry] {
        &self.arrays
    }

    /// The segments, each with its size in bytes and its descriptor, which the caller then owns: to import them by other means.
    pub fn into_segments(self) -> Vec<(u64, OwnedFd)> {
        self.runs.into_iter().flat_map(|run| run.segments).map(|(size, fd)| (size, owned(fd))).collect()
    }

    /// What it takes to offer it back.
    fn whole(&self) -> WholePart {
        let segments = self.runs.iter().flat_map(|run| &run.segments);
        WholePart {
            name: self.name.clone(),
            description: self.description.clone(),
            digest: self.digest.clone(),
            arrays: Arc::clone(&self.arrays),
            segments: segments.map(|(size, fd)| (*size, Arc::downgrade(fd))).collect(),
        }
    }

    fn map(self, device: &Device, copy_on_write: bool) -> Result<ObjectPart> {
        if copy_on_write && !device.is_host() {
            let feature = "copy-on-write mappings, as CUDA has none: copy what is to be written";
            return Err(Error::Device(DeviceError::Unsupported { device: device.to_string(), feature }));
        }
        let Self { name, description, digest, arrays, runs } = self;
        let (mut memory, mut remains) = (Vec::with_capacity(runs.len()), Vec::with_capacity(runs.len()));
        for run in runs {
            let (imported, rest) = run.map(device, &description, copy_on_write)?;
            memory.push(Arc::new(imported));
            remains.push(rest);
        }
        Ok(ObjectPart { name, description, digest, arrays, memory, remains, index: OnceLock::new() })
    }
}

impl Run {
    /// Maps it at addresses of the driver's choice. Also returns the handles and descriptors.
    pub(super) fn map(
        self,
        device: &Device,
        description: &Description,
        copy_on_write: bool,
    ) -> Result<(Imported, Remains)> {
        let mut importing = Importing::begin(device, description, &self.part, Access::ReadOnly)?;
        if copy_on_write {
            importing = importing.copy_on_write();
        }
        let (sizes, fds): (Vec<u64>, Vec<Arc<OwnedFd>>) = self.segments.into_iter().unzip();
        importing.take(&sizes, fds)?;
        importing.finish()
    }
}

/// An object that is mapped, and the lease of it, which ends when it is dropped.
///
/// Memory and arrays that were taken from it stay mapped for as long as they live, also after the lease ended and when the broker
/// is gone. The broker then no longer counts this process among the readers.
#[derive(Debug)]
pub struct Object {
    pub(super) parts: Vec<ObjectPart>,
    pub(super) name: String,
    pub(super) version: u64,
    pub(super) id: String,
    pub(super) created: SystemTime,
    pub(super) owner: Owner,
    pub(super) metadata: Option<Attached>,
    /// None once it was parked without it.
    pub(super) hold: Option<Hold>,
    pub(super) layout: Layout,
}

impl Object {
    about_its_version!();

    /// Whether the broker counts this process among the readers: see [`Lease::is_held`].
    pub fn is_held(&self) -> bool {
        self.hold.as_ref().is_some_and(Hold::is_held)
    }

    /// The parts that were asked for.
    pub fn parts(&self) -> &[ObjectPart] {
        &self.parts
    }

    /// Reports to the broker, in one sentence, that the memory is not what its maker described: that its digest is wrong, say. The broker
    /// shows the report to everyone who may read the object, and watchers get the event `reported`. Does nothing while the object is
    /// [parked](Object::park) without its lease. Blocks only while the broker reads nothing.
    pub fn report(&self, message: impl Into<String>) {
        if let Some(hold) = &self.hold {
            hold.send_report(message.into());
        }
    }

    /// The part of a name.
    pub fn part(&self, name: &str) -> Option<&ObjectPart> {
        self.parts.iter().find(|part| part.name == name)
    }

    /// The array of a name, in whichever part it is.
    ///
    /// # Errors
    /// [`Error::Broker`] with the code `absent` if there is none; [`Error::Memory`] if its bytes were not asked for; [`Error::Misuse`]
    /// while it is [parked](Object::park).
    pub fn array(&self, name: &str) -> Result<Array> {
        let part = self.parts.iter().find(|part| part.entry(name).is_some());
        part.ok_or_else(|| no_array(name))?.array(name)
    }
}

/// A part of an [`Object`], mapped.
#[derive(Debug)]
pub struct ObjectPart {
    pub(super) name: String,
    pub(super) description: Description,
    pub(super) digest: Option<String>,
    pub(super) arrays: Arc<Vec<ArrayEntry>>,
    pub(super) memory: Vec<Arc<Imported>>,
    /// The handles and descriptors of the segments of each piece: with them it is mapped again if another version can't take its place.
    pub(super) remains: Vec<Remains>,
    /// Where each array is in the table, from the first look for one on.
    pub(super) index: OnceLock<HashMap<String, usize>>,
}

impl ObjectPart {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What it is.
    pub fn description(&self) -> &Description {
        &self.description
    }

    /// The digest of its bytes, in its maker's words.
    pub fn digest(&self) -> Option<&str> {
        self.digest.as_deref()
    }

    /// Its memory: one piece, unless arrays were asked for that lie apart.
    ///
    /// # Errors
    /// [`Error::Misuse`] if it is several pieces: see [`ObjectPart::pieces`]; and while the object is [parked](Object::park).
    pub fn memory(&self) -> Result<&Arc<Imported>> {
        self.check_mapped()?;
        match self.memory.as_slice() {
            [memory] => Ok(memory),
            several => {
                let problem =
                    format!("part `{}` is mapped in {} pieces: take them one by one", self.name, several.len());
                Err(Error::Misuse { problem })
            }
        }
    }

    /// The pieces of its memory, in their order: [`Imported::start`] is where each begins. While the object is [parked](Object::park)
    /// they are of 0 bytes.
    pub fn pieces(&self) -> &[Arc<Imported>] {
        &self.memory
    }

    /// The arrays in it, in its maker's order: all of them, also if only some of the memory was asked for.
    pub fn arrays(&self) -> &[ArrayEntry] {
        &self.arrays
    }

    /// The array of a name.
    ///
    /// # Errors
    /// [`Error::Broker`] with the code `absent` if there is none; [`Error::Memory`] if its bytes were not asked for; [`Error::Misuse`]
    /// while the object is [parked](Object::park).
    pub fn array(&self, name: &str) -> Result<Array> {
        self.check_mapped()?;
        let mut descriptor = self.entry(name).ok_or_else(|| no_array(name))?.array.clone();
        let span = descriptor.span()?;
        let inside = |piece: &&Arc<Imported>| {
            let start = piece.start();
            start <= span.start && span.end <= start + piece.size()
        };
        let Some(piece) = self.memory.iter().find(inside) else {
            let (offset, length) = (span.start, span.end - span.start);
            let size = self.memory.iter().map(|piece| piece.size()).sum();
            return Err(Error::Memory(MemoryError::OutOfRange { offset, length, size }));
        };
        descriptor.offset -= piece.start();
        Array::new(Arc::clone(piece) as Arc<dyn Region>, descriptor)
    }

    fn check_mapped(&self) -> Result<()> {
        match self.memory.iter().any(|piece| piece.is_parked()) {
            false => Ok(()),
            true => Err(Error::Misuse { problem: format!("part `{}` is parked: nothing is mapped", self.name) }),
        }
    }

    fn entry(&self, name: &str) -> Option<&ArrayEntry> {
        let index =
            self.index.get_or_init(|| (0..).zip(self.arrays.iter()).map(|(at, of)| (of.name.clone(), at)).collect());
        index.get(name).map(|at| &self.arrays[*at])
    }
}

/// Checks that the memory of an object is a driver's.
pub(super) fn check_backend(name: &str, backend: &str, driver: &Driver) -> Result<()> {
    let own = driver.backend();
    if backend == own.as_str() {
        return Ok(());
    }
    let message = format!("the memory of `{name}` is on backend {backend}, and this process uses {own}");
    Err(Error::Peer(crate::error::PeerError::Mismatch { code: crate::error::ErrorCode::Backend, message }))
}

/// The descriptor, or one of its own while it is being offered back.
fn owned(mut fd: Arc<OwnedFd>) -> OwnedFd {
    loop {
        fd = match Arc::try_unwrap(fd) {
            Ok(fd) => return fd,
            Err(shared) => match shared.try_clone() {
                Ok(fd) => return fd,
                // There is none left. An offer takes no longer than a put.
                Err(_) => shared,
            },
        };
        thread::sleep(Duration::from_millis(1));
    }
}

fn no_array(name: &str) -> Error {
    BrokerError::new(RefusalCode::Absent, format!("there is no array `{name}`")).into()
}

/// The text of a table, whichever way it came.
fn text_of(table: Table, tables: &mut impl Iterator<Item = OwnedFd>, most: u64) -> Result<String> {
    let wrong = |message: String| Error::from(ProtocolError::Content(message));
    match table {
        Table::Inline(text) => Ok(text.as_str().to_owned()),
        Table::Length(length) => {
            use std::os::fd::AsFd;
            let fd = tables.next().ok_or_else(|| wrong("a table came without its descriptor".to_owned()))?;
            table::read(fd.as_fd(), length, most).map_err(wrong)
        }
    }
}

/// The arrays of a part, each inside its memory.
fn arrays_of(text: &str, size: u64) -> Result<Vec<ArrayEntry>> {
    let wrong = |message: String| Error::from(ProtocolError::Content(message));
    let arrays = read_arrays(text).map_err(|error| wrong(format!("the table of arrays is wrong: {error}")))?;
    if arrays.len() > MAX_ARRAYS {
        return Err(wrong(format!("{} arrays came where at most {MAX_ARRAYS} are allowed", arrays.len())));
    }
    for entry in &arrays {
        let check = entry.array.check(size);
        check.map_err(|error| wrong(format!("array `{}` is not inside the memory: {error}", entry.name)))?;
    }
    Ok(arrays)
}
