//! The host backend: real shared memory of this machine, under CUDA's rules. No GPU takes part.
//!
//! An allocation is a memfd, sealed at birth against shrinking and growing and committed at once, as `cuMemCreate`
//! commits; a reservation is a range of `PROT_NONE` addresses; mapping is `MAP_FIXED` into it and access `mprotect`. The
//! device's memory is this machine's, so [`Location::Device`] 0 and [`Location::HostNuma`] 0 are the same place here.
//! What CUDA was seen to refuse is refused with the same number, so that a program that works here is not surprised on
//! a GPU. Like the CUDA backend it knows what it gave out, and answers `CUDA_ERROR_INVALID_VALUE` for all else.

#![allow(unsafe_code)]

mod addresses;
mod available;
mod bare;
mod verbs;

use std::{
    collections::BTreeMap,
    fs,
    os::fd::OwnedFd,
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
    error::{DeviceError, Error, Result},
    sys::fork::ProcessIdentity,
};

/// What sizes and addresses are multiples of, unless made otherwise: the granularity that CUDA was seen to have.
pub const GRANULARITY: u64 = 2 << 20;

/// The name of the one device of this backend.
pub const DEVICE_NAME: &str = "host memory (no GPU)";

/// How long a fork of this process may keep memory from being sealed.
const FORKS_LIVE: Duration = Duration::from_millis(500);

/// The namespace of host device UUIDs: version 5, of the boot id.
const NAMESPACE: Uuid = uuid!("8a4f2d0e-6c1b-4f0d-9a53-6d1e0c6f7b21");

/// The host backend. Each object counts its own handles and addresses.
#[derive(Debug)]
pub struct HostDriver {
    origin: ProcessIdentity,
    identity: Identity,
    uuid: DeviceUuid,
    granularity: u64,
    space: Arc<Space>,
}

/// What the driver object and the windows of it hold: with the last of them everything forgotten is unmapped.
#[derive(Debug)]
struct Space {
    origin: ProcessIdentity,
    /// A copy holds it for reading, so that nothing is unmapped under it.
    state: RwLock<Resources>,
    /// Only opened, and only asked for, while the state is held.
    windows: Arc<Windows>,
}

#[derive(Debug, Default)]
struct Resources {
    handles_made: u64,
    handles: BTreeMap<Handle, PhysicalMemory>,
    reservations: BTreeMap<u64, Reserved>,
}

/// Physical memory, for as long as a handle names it. Mappings hold their pages by themselves.
#[derive(Debug)]
struct PhysicalMemory {
    memfd: OwnedFd,
    size: u64,
    exportable: bool,
    /// Whether no seal can be added any more: at the first export, or with the seal against writing.
    closed: bool,
    /// Whether it is sealed against writing.
    immutable: bool,
}

/// How many objects of a driver are alive: all zero when everything was given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Live {
    /// Allocations created or imported and not released.
    pub handles: usize,
    /// Reservations not freed.
    pub reservations: usize,
    /// Mappings not unmapped.
    pub mappings: usize,
}

impl HostDriver {
    /// A host backend with nothing allocated. The process that calls this is the one that may use it.
    pub fn new() -> Self {
        Self::of(GRANULARITY)
    }

    /// As [`HostDriver::new`], with another granularity: for trying programs on one that is not 2 MiB. Both sides of a
    /// handoff need the same.
    ///
    /// # Errors
    /// [`Error::Driver`] with `CUDA_ERROR_INVALID_VALUE` if it is no power of two or no multiple of the page size.
    pub fn with_granularity(bytes: u64) -> Result<Self> {
        // SAFETY: no pointers.
        let page = u64::try_from(unsafe { nix::libc::sysconf(nix::libc::_SC_PAGESIZE) }).unwrap_or(4096);
        if !bytes.is_power_of_two() || !bytes.is_multiple_of(page) {
            return Err(failure("host with_granularity", code::INVALID_VALUE));
        }
        Ok(Self::of(bytes))
    }

    fn of(granularity: u64) -> Self {
        // Two processes on one boot must agree on the device; two boots must not.
        let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_else(|error| {
            tracing::warn!(%error, "no boot id can be read: the host device of every such machine has the same UUID");
            String::new()
        });
        let origin = ProcessIdentity::current();
        let space = Arc::new(Space { origin, state: RwLock::default(), windows: Arc::default() });
        let (identity, uuid) = (Identity::new(), Self::uuid_of(boot_id.trim()));
        Self { origin, identity, uuid, granularity, space }
    }

    /// The UUID of the device of a machine with this boot id, which is without its newline.
    pub fn uuid_of(boot_id: &str) -> DeviceUuid {
        DeviceUuid::from_bytes(Uuid::new_v5(&NAMESPACE, boot_id.as_bytes()).into_bytes())
    }

    /// How many objects are alive.
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
        let reserved = holding(reservations, address, size).ok_or_else(invalid)?;
        if size == 0 || !address.is_multiple_of(self.granularity) {
            return Err(invalid());
        }
        if offset != 0 || size != memory.size {
            return Err(failure(call, code::NOT_SUPPORTED));
        }
        if !reserved.is_vacant(address, size) {
            return Err(invalid());
        }
        reserved.map(address, size, &memory.memfd, pages(memory)).map_err(|errno| from_errno(call, errno))
    }

    fn aligned(&self, size: u64) -> bool {
        size != 0 && size.is_multiple_of(self.granularity)
    }
}

impl PhysicalMemory {
    /// The pages that a mapping of it has, unless they are to be copied on write.
    fn pages(&self) -> Pages {
        if self.immutable { Pages::Sealed } else { Pages::Shared }
    }
}

impl Default for HostDriver {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Space {
    fn drop(&mut self) {
        if self.origin.check().is_err() {
            return;
        }
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        for (address, reserved) in &mut state.reservations {
            // SAFETY: neither the driver object nor a window of it is left, in any thread.
            if let Err(errno) = unsafe { reserved.free() } {
                tracing::warn!(%errno, address, "a forgotten reservation can't be freed");
            }
        }
    }
}

impl Resources {
    /// The reservation that holds a range.
    fn reservation(&mut self, address: u64, size: u64) -> Option<&mut Reserved> {
        holding(&mut self.reservations, address, size)
    }

    /// Whether a copy may touch a range.
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

/// The reservation that holds a range.
fn holding(reservations: &mut BTreeMap<u64, Reserved>, address: u64, size: u64) -> Option<&mut Reserved> {
    let (&start, reserved) = reservations.range_mut(..=address).next_back()?;
    (address.checked_add(size)? <= start + reserved.size).then_some(reserved)
}

fn readable(mapped: &Mapped) -> bool {
    mapped.access.is_some()
}

fn writable(mapped: &Mapped) -> bool {
    mapped.access == Some(Access::ReadWrite)
}

/// Ordinary memory of this process in the place of page-locked memory.
#[derive(Debug)]
struct Anonymous;

impl PageLocker for Anonymous {
    unsafe fn take_back(&self, start: NonNull<u8>, size: usize) -> Result<()> {
        // SAFETY: the caller's promise: it is a whole mapping that is not used any more. In a fork it is a copy, and goes alone.
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
