//! The host backend: real shared memory of this machine with CUDA's rules, without a GPU.
//!
//! An allocation is a memfd, sealed at creation against shrinking and growing, with its pages allocated at once as by `cuMemCreate`. A
//! reservation is a range of `PROT_NONE` addresses; mapping uses `MAP_FIXED`, and access `mprotect`. The device's memory is this machine's
//! memory, so [`Location::Device`] 0 and [`Location::HostNuma`] 0 are the same. Calls that CUDA rejected in tests are rejected with the
//! same code, so that a program that works here also works on a GPU. Like the CUDA backend, it tracks the handles and addresses that it
//! returned, and fails with `CUDA_ERROR_INVALID_VALUE` for all others.

#![allow(unsafe_code)]

mod addresses;
mod available;
mod verbs;

use std::{
    collections::BTreeMap,
    fs, io,
    os::fd::OwnedFd,
    path::Path,
    ptr::NonNull,
    sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard},
    time::Duration,
};

use nix::{errno::Errno, sys::mman::munmap};
use uuid::{Uuid, uuid};

use self::addresses::{Mapped, Pages, Reserved};
use super::{
    Access, DeviceUuid, Handle, Identity, Location, code, failure, failure_with,
    window::{PageLocker, Windows},
};
use crate::{
    base::DEVICE_NAME,
    error::{DeviceError, Error, Result},
    sys::fork::ProcessIdentity,
};

/// The default granularity of sizes and addresses, in bytes, as on tested CUDA devices.
pub const GRANULARITY: u64 = 2 << 20;

/// How long to retry a seal while a fork of this process still has the memory mapped.
const FORK_TIMEOUT: Duration = Duration::from_secs(2);

/// The namespace of the host device's UUID: version 5, derived from the boot ID.
const NAMESPACE: Uuid = uuid!("8a4f2d0e-6c1b-4f0d-9a53-6d1e0c6f7b21");

/// The host backend. Each object has its own handles and addresses.
#[derive(Debug)]
pub struct HostDriver {
    origin: ProcessIdentity,
    identity: Identity,
    uuid: DeviceUuid,
    granularity: u64,
    space: Arc<Space>,
}

/// State shared by the driver object and its windows. Dropping the last reference unmaps everything that was not released.
#[derive(Debug)]
struct Space {
    origin: ProcessIdentity,
    /// Copies hold it for reading, so that nothing is unmapped during a copy.
    state: RwLock<Resources>,
    /// Windows are only opened, and only looked up, while the state is locked.
    windows: Arc<Windows>,
}

#[derive(Debug, Default)]
struct Resources {
    handles_made: u64,
    handles: BTreeMap<Handle, PhysicalMemory>,
    reservations: BTreeMap<u64, Reserved>,
}

/// Physical memory, until its handle is released. Mappings keep their pages alive by themselves.
#[derive(Debug)]
struct PhysicalMemory {
    memfd: OwnedFd,
    size: u64,
    exportable: bool,
    /// Whether no more seals can be added: since the first export, or the seal against writes.
    closed: bool,
    /// Whether it is sealed against writes.
    immutable: bool,
}

/// The number of live objects of a driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Live {
    /// Created or imported allocations.
    pub handles: usize,
    /// Reservations.
    pub reservations: usize,
    /// Mappings.
    pub mappings: usize,
}

impl HostDriver {
    /// Creates a host backend. Only the calling process can use it.
    ///
    /// # Errors
    /// [`Error::System`] if the boot ID can't be read: the device would have another UUID than in other processes.
    pub fn new() -> Result<Self> {
        Self::of(GRANULARITY)
    }

    /// Like [`HostDriver::new`], with another granularity, to test programs with a size other than 2 MiB. Both sides of a handoff need the
    /// same granularity.
    ///
    /// # Errors
    /// [`Error::Driver`] with `CUDA_ERROR_INVALID_VALUE` if `bytes` is not a power of two, or not a multiple of the page size; the errors
    /// of [`HostDriver::new`].
    pub fn with_granularity(bytes: u64) -> Result<Self> {
        // SAFETY: no pointers.
        let page = u64::try_from(unsafe { nix::libc::sysconf(nix::libc::_SC_PAGESIZE) }).unwrap_or(4096);
        if !bytes.is_power_of_two() || !bytes.is_multiple_of(page) {
            return Err(failure("host with_granularity", code::INVALID_VALUE));
        }
        Self::of(bytes)
    }

    fn of(granularity: u64) -> Result<Self> {
        let boot_id = boot_id(Path::new("/"))?;
        let origin = ProcessIdentity::current();
        let space = Arc::new(Space { origin, state: RwLock::default(), windows: Arc::default() });
        let identity = Identity::new();
        let uuid = Self::uuid_of(boot_id.trim());
        Ok(Self { origin, identity, uuid, granularity, space })
    }

    /// The device's UUID on a machine with this boot ID (without a newline).
    pub fn uuid_of(boot_id: &str) -> DeviceUuid {
        DeviceUuid::from_bytes(Uuid::new_v5(&NAMESPACE, boot_id.as_bytes()).into_bytes())
    }

    /// The number of objects that were not released.
    pub fn live(&self) -> Live {
        let state = self.read();
        Live {
            handles: state.handles.len(),
            reservations: state.reservations.len(),
            mappings: state.reservations.values().map(|reserved| reserved.mapped.len()).sum(),
        }
    }

    fn read(&self) -> RwLockReadGuard<'_, Resources> {
        self.space.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Resources> {
        self.space.state.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn device(&self, call: &'static str, ordinal: i32) -> Result<()> {
        self.origin.check()?;
        if ordinal == 0 { Ok(()) } else { Err(failure(call, code::INVALID_DEVICE)) }
    }

    fn location(&self, call: &'static str, location: Location) -> Result<()> {
        match location {
            Location::Device(ordinal) => self.device(call, ordinal),
            Location::HostNuma(0) => self.origin.check(),
            Location::HostNuma(_) => Err(failure(call, code::INVALID_VALUE)),
        }
    }

    fn lacking<T>(&self, feature: &'static str) -> Result<T> {
        self.origin.check()?;
        Err(Error::Device(DeviceError::Unsupported { device: DEVICE_NAME.to_owned(), feature }))
    }

    fn map_pages(
        &self,
        call: &'static str,
        (address, size): (u64, u64),
        offset: u64,
        handle: Handle,
        pages: impl FnOnce(&PhysicalMemory) -> Pages,
    ) -> Result<()> {
        self.origin.check()?;
        let invalid = || failure(call, code::INVALID_VALUE);
        let mut state = self.write();
        let Resources { handles, reservations, .. } = &mut *state;
        let memory = handles.get(&handle).ok_or_else(invalid)?;
        let reserved = reservation_containing(reservations, address, size).ok_or_else(invalid)?;
        if size == 0 || !address.is_multiple_of(self.granularity) {
            return Err(invalid());
        }
        if offset != 0 || size != memory.size {
            return Err(failure(call, code::NOT_SUPPORTED));
        }
        if !reserved.is_vacant(address, size) {
            return Err(invalid());
        }
        tracing::debug!(address = format_args!("{address:#x}"), size, "mmap MAP_FIXED");
        reserved.map(address, size, &memory.memfd, pages(memory)).map_err(|errno| from_errno(call, errno))
    }

    fn aligned(&self, size: u64) -> bool {
        size != 0 && size.is_multiple_of(self.granularity)
    }
}

impl PhysicalMemory {
    /// The pages of a normal mapping.
    fn pages(&self) -> Pages {
        if self.immutable { Pages::Sealed } else { Pages::Shared }
    }
}

impl Drop for Space {
    fn drop(&mut self) {
        if self.origin.check().is_err() {
            return;
        }
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        for (address, reserved) in &mut state.reservations {
            // SAFETY: the driver object and all of its windows are gone, in every thread.
            if let Err(errno) = unsafe { reserved.free() } {
                tracing::warn!(%errno, address, "can't free a leaked reservation");
            }
        }
    }
}

impl Resources {
    /// The reservation that contains a range.
    fn reservation(&mut self, address: u64, size: u64) -> Option<&mut Reserved> {
        reservation_containing(&mut self.reservations, address, size)
    }

    /// Whether mappings that `usable` accepts cover a range.
    fn usable(&self, address: u64, size: u64, usable: impl Fn(&Mapped) -> bool) -> bool {
        let found = self.reservations.range(..=address).next_back();
        found.is_some_and(|(_, reserved)| reserved.covers(address, size, usable))
    }

    fn add(&mut self, by: Identity, memory: PhysicalMemory) -> Handle {
        self.handles_made += 1;
        let handle = Handle { by, number: self.handles_made };
        self.handles.insert(handle, memory);
        handle
    }
}

/// Processes of one boot must have the same device UUID, and processes of different boots different ones. No source other than `/proc` is
/// the same in all containers of a machine: `/etc/machine-id` differs, and the time of boot changes with the clock.
fn boot_id(root: &Path) -> Result<String> {
    fs::read_to_string(root.join("proc/sys/kernel/random/boot_id")).map_err(|error| {
        let hidden = ": mount /proc, without `subset=pid` (systemd: ProcSubset=all)";
        let remedy = if error.kind() == io::ErrorKind::NotFound { hidden } else { "" };
        let action = format!("read /proc/sys/kernel/random/boot_id, which identifies this machine's memory{remedy}");
        Error::system(action, error)
    })
}

/// The reservation that contains a range.
fn reservation_containing(
    reservations: &mut BTreeMap<u64, Reserved>,
    address: u64,
    size: u64,
) -> Option<&mut Reserved> {
    let (&start, reserved) = reservations.range_mut(..=address).next_back()?;
    (address.checked_add(size)? <= start + reserved.size).then_some(reserved)
}

fn readable(mapped: &Mapped) -> bool {
    mapped.access.is_some()
}

fn writable(mapped: &Mapped) -> bool {
    mapped.access == Some(Access::ReadWrite)
}

/// Frees ordinary memory that replaces page-locked memory.
#[derive(Debug)]
struct Anonymous;

impl PageLocker for Anonymous {
    unsafe fn unlock(&self, start: NonNull<u8>, size: usize) -> Result<()> {
        // SAFETY: the caller promises a whole mapping that is no longer used. In a fork only the fork's copy is unmapped.
        unsafe { munmap(start.cast(), size) }.map_err(|errno| from_errno("host page_lock", errno))
    }
}

fn from_errno(call: &'static str, errno: Errno) -> Error {
    let code = match errno {
        Errno::ENOMEM | Errno::ENOSPC => code::OUT_OF_MEMORY,
        Errno::EACCES | Errno::EPERM | Errno::EBUSY => code::INVALID_VALUE,
        _ => code::OPERATING_SYSTEM,
    };
    failure_with(call, code, Some(errno.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hidden_boot_id_is_an_error() {
        let root = tempfile::tempdir().unwrap();
        let error = boot_id(root.path()).unwrap_err().in_full();
        assert!(error.contains("boot_id") && error.contains("ProcSubset=all"), "{error}");
    }
}
