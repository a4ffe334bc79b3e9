//! A lease of an object.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, OnceLock},
    thread,
    time::{Duration, Instant, SystemTime},
};

use super::{
    connection::Connection,
    hold::{Hold, about_its_version},
    holdings::{Held, Whole, WholePart},
    object::{Layout, Object, ObjectPart},
};
use crate::{
    broker::table,
    channel::deadline_after,
    driver::{Access, Driver},
    error::{DeviceError, Error, ErrorCode, PeerError, ProtocolError, Result},
    memory::{Description, Device, Imported, Importing, Part, Remains, Selector},
    wire::{
        Check,
        broker::{ArrayEntry, Attached, LeaseHeader, MAX_ARRAYS, MAX_METADATA, MAX_TABLE, Owner, Table, read_arrays},
    },
};

/// How long a descriptor is waited for that is being offered back: longer than an offer takes.
const OFFERED: Duration = Duration::from_secs(5);

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
    ///
    /// # Errors
    /// [`Error::System`] if this process may open no more files while the connection's thread offers the version back to a broker
    /// that lost it, and that takes longer than five seconds. The descriptors are closed then.
    pub fn into_segments(self) -> Result<Vec<(u64, OwnedFd)>> {
        let deadline = deadline_after(OFFERED);
        let segments = self.runs.into_iter().flat_map(|run| run.segments);
        let owned = segments.map(|(size, fd)| Ok((size, owned(fd, deadline, OwnedFd::try_clone)?)));
        let action =
            || format!("take the descriptors of part `{}`, which is being offered back to the broker", self.name);
        owned.collect::<io::Result<_>>().map_err(|error| Error::system(action(), error))
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

/// Checks that the memory of an object is a driver's.
pub(super) fn check_backend(name: &str, backend: &str, driver: &Driver) -> Result<()> {
    let own = driver.backend();
    if backend == own.as_str() {
        return Ok(());
    }
    let message = format!("the memory of `{name}` is on backend {backend}, and this process uses {own}");
    Err(Error::Peer(PeerError::Mismatch { code: ErrorCode::Backend, message }))
}

/// The descriptor, or a duplicate while another thread offers it back. Without room for a duplicate, waits for the other thread until
/// the deadline.
fn owned(
    mut fd: Arc<OwnedFd>,
    deadline: Instant,
    duplicate: impl Fn(&OwnedFd) -> io::Result<OwnedFd>,
) -> io::Result<OwnedFd> {
    loop {
        fd = match Arc::try_unwrap(fd) {
            Ok(fd) => return Ok(fd),
            Err(shared) => match duplicate(&shared) {
                Err(error) if Instant::now() >= deadline => return Err(error),
                Err(_) => shared,
                duplicate => return duplicate,
            },
        };
        thread::sleep(Duration::from_millis(1));
    }
}

/// The text of a table, whichever way it came.
fn text_of(table: Table, tables: &mut impl Iterator<Item = OwnedFd>, most: u64) -> Result<String> {
    let wrong = |message: String| Error::from(ProtocolError::Content(message));
    match table {
        Table::Inline(text) => Ok(text.as_str().to_owned()),
        Table::Length(length) => {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn none_left(_: &OwnedFd) -> io::Result<OwnedFd> {
        Err(io::Error::from_raw_os_error(nix::libc::EMFILE))
    }

    fn shared() -> (Arc<OwnedFd>, Arc<OwnedFd>) {
        let fd = Arc::new(io::pipe().unwrap().0.into());
        (Arc::clone(&fd), fd)
    }

    #[test]
    fn descriptor_wait_ends_at_deadline() {
        let (fd, _offered) = shared();
        let error = owned(fd, deadline_after(Duration::from_millis(20)), none_left).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(nix::libc::EMFILE));
    }

    #[test]
    fn descriptor_is_taken_after_the_offer() {
        let (fd, offered) = shared();
        let offering = thread::spawn(move || {
            thread::sleep(Duration::from_millis(20));
            drop(offered);
        });
        owned(fd, deadline_after(Duration::from_secs(20)), none_left).unwrap();
        offering.join().unwrap();
    }
}
