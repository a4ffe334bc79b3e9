//! [`Verbs`] of the host backend.

use std::{
    num::NonZeroUsize,
    os::fd::{AsRawFd, BorrowedFd, OwnedFd},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    fcntl::SealFlag,
    sys::mman::{MapFlags, ProtFlags, mmap_anonymous},
};

use super::{
    Anonymous, FORK_TIMEOUT, HostDriver, PhysicalMemory,
    addresses::{Mapped, Pages, Reserved, pointer},
    available, from_errno, readable, writable,
};
use super::{Resources, reservation_containing};
use crate::{
    driver::{
        Access, Attribute, Backend, DeviceUuid, Granularity, Handle, LegacyIpc, Location, MemoryInfo, PageLocked,
        Pools, Properties, Retained, Streams, Verbs, Window, code, copy, failure, failure_with, window::View,
    },
    error::Result,
    sys::memfd,
};

use crate::driver::{Checkpoints, Diagnosis, Kernels};

// SAFETY: the table contains all mappings, other addresses are rejected, and a mapping is removed together with its entry.
unsafe impl Verbs for HostDriver {
    fn backend(&self) -> Backend {
        Backend::Host
    }

    fn version(&self) -> Result<i32> {
        self.origin.check()?;
        Ok(0)
    }

    fn device_count(&self) -> Result<i32> {
        self.origin.check()?;
        Ok(1)
    }

    fn device_name(&self, ordinal: i32) -> Result<String> {
        self.device("host device_name", ordinal)?;
        Ok(crate::base::DEVICE_NAME.to_owned())
    }

    fn device_uuid(&self, ordinal: i32) -> Result<DeviceUuid> {
        self.device("host device_uuid", ordinal)?;
        Ok(self.uuid)
    }

    fn device_attribute(&self, ordinal: i32, attribute: Attribute) -> Result<i32> {
        self.device("host device_attribute", ordinal)?;
        Ok(match attribute {
            Attribute::VirtualMemoryManagement | Attribute::PosixFileDescriptor => 1,
            Attribute::HostNumaVirtualMemoryManagement => 1,
            Attribute::FabricHandle | Attribute::GpuDirectRdma | Attribute::ComputeMode | Attribute::HostNumaId => 0,
            Attribute::MemoryPools | Attribute::PoolHandleTypes => 0,
            Attribute::StreamMemoryOperations | Attribute::Mps => 0,
        })
    }

    fn memory_info(&self, ordinal: i32) -> Result<MemoryInfo> {
        self.device("host memory_info", ordinal)?;
        available::memory()
    }

    fn activate(&self, ordinal: i32) -> Result<()> {
        self.device("host activate", ordinal)
    }

    fn granularity(&self, properties: &Properties, _: Granularity) -> Result<u64> {
        self.location("host granularity", properties.location)?;
        Ok(self.granularity)
    }

    fn create(&self, size: u64, properties: &Properties) -> Result<Handle> {
        const CALL: &str = "host create";
        self.location(CALL, properties.location)?;
        if !self.aligned(size) || properties.immutable {
            return Err(failure(CALL, code::INVALID_VALUE));
        }
        if properties.gpu_direct_rdma {
            return Err(failure(CALL, code::NOT_SUPPORTED));
        }
        if size > self.memory_info(0)?.free {
            return Err(from_errno(CALL, Errno::ENOMEM));
        }
        tracing::debug!(size, "memfd_create, fallocate");
        let memfd = memfd::create(c"vmmfd", size).map_err(|errno| from_errno(CALL, errno))?;
        Ok(self.write().add(
            self.identity,
            PhysicalMemory { memfd, size, exportable: properties.exportable, closed: false, immutable: false },
        ))
    }

    fn release(&self, handle: Handle) -> Result<()> {
        self.origin.check()?;
        tracing::debug!("close a memfd");
        let released = self.write().handles.remove(&handle);
        released.map(drop).ok_or_else(|| failure("host release", code::INVALID_VALUE))
    }

    fn reserve(&self, size: u64, alignment: u64) -> Result<u64> {
        const CALL: &str = "host reserve";
        self.origin.check()?;
        if !self.aligned(size) || !(alignment == 0 || alignment.is_power_of_two()) {
            return Err(failure(CALL, code::INVALID_VALUE));
        }
        let alignment = alignment.max(self.granularity);
        let reserved = Reserved::new(size, alignment).map_err(|errno| from_errno(CALL, errno))?;
        let address = reserved.address();
        tracing::debug!(size, address = format_args!("{address:#x}"), "mmap PROT_NONE");
        self.write().reservations.insert(address, reserved);
        Ok(address)
    }

    fn free(&self, address: u64, size: u64) -> Result<()> {
        const CALL: &str = "host free";
        self.origin.check()?;
        let mut state = self.write();
        let empty = |reserved: &&mut Reserved| reserved.size == size && reserved.mapped.is_empty();
        let reserved = state.reservations.get_mut(&address).filter(empty);
        let reserved = reserved.ok_or_else(|| failure(CALL, code::INVALID_VALUE))?;
        tracing::debug!(address = format_args!("{address:#x}"), size, "munmap");
        // SAFETY: nothing in it is mapped that a thread could access.
        unsafe { reserved.free() }.map_err(|errno| from_errno(CALL, errno))?;
        state.reservations.remove(&address);
        Ok(())
    }

    fn map(&self, address: u64, size: u64, offset: u64, handle: Handle) -> Result<()> {
        self.map_pages("host map", (address, size), offset, handle, PhysicalMemory::pages)
    }

    fn map_private(&self, address: u64, size: u64, handle: Handle) -> Result<()> {
        self.map_pages("host map_private", (address, size), 0, handle, |_| Pages::CopyOnWrite)
    }

    fn replace(&self, address: u64, size: u64, handle: Handle) -> Result<()> {
        const CALL: &str = "host replace";
        self.origin.check()?;
        let invalid = || failure(CALL, code::INVALID_VALUE);
        let mut state = self.write();
        let Resources { handles, reservations, .. } = &mut *state;
        let memory = handles.get(&handle).ok_or_else(invalid)?;
        let reserved = reservation_containing(reservations, address, size).ok_or_else(invalid)?;
        let mapped = reserved.mapped.get(&address).filter(|mapped| mapped.size == size).ok_or_else(invalid)?;
        if size != memory.size {
            return Err(failure(CALL, code::NOT_SUPPORTED));
        }
        let pages = if mapped.pages == Pages::CopyOnWrite { mapped.pages } else { memory.pages() };
        // The kernel would allow writes, to private copies of the pages.
        let written = pages == Pages::Sealed && mapped.access == Some(Access::ReadWrite);
        if written || self.space.windows.overlap(address, size) {
            return Err(invalid());
        }
        // SAFETY: copies in all threads hold the lock for reading and look the mapping up under it, so none is in progress. No window is
        // open on it, and none can be opened without the lock.
        unsafe { reserved.replace(address, &memory.memfd, pages) }.map_err(|errno| from_errno(CALL, errno))
    }

    fn unmap(&self, address: u64, size: u64) -> Result<()> {
        const CALL: &str = "host unmap";
        self.origin.check()?;
        let invalid = || failure(CALL, code::INVALID_VALUE);
        let mut state = self.write();
        let reserved = state.reservation(address, size).ok_or_else(invalid)?;
        if !self.aligned(size) || self.space.windows.overlap(address, size) {
            return Err(invalid());
        }
        tracing::debug!(address = format_args!("{address:#x}"), size, "mmap PROT_NONE, MAP_FIXED");
        for start in reserved.whole(address, size).ok_or_else(invalid)? {
            // SAFETY: copies in all threads hold the lock for reading and look the mapping up under it, so none is in progress. No window
            // is open in the range, and none can be opened without the lock.
            unsafe { reserved.unmap(start) }.map_err(|errno| from_errno(CALL, errno))?;
        }
        Ok(())
    }

    fn check_unused(&self, address: u64, size: u64) -> Result<()> {
        self.origin.check()?;
        // Windows are opened while the state is locked.
        let _state = self.read();
        if self.space.windows.overlap(address, size) {
            return Err(failure("host check_unused", code::INVALID_VALUE));
        }
        Ok(())
    }

    fn set_access(&self, address: u64, size: u64, location: Location, access: Option<Access>) -> Result<()> {
        const CALL: &str = "host set_access";
        self.location(CALL, location)?;
        let invalid = || failure(CALL, code::INVALID_VALUE);
        let mut state = self.write();
        let reserved = state.reservation(address, size).ok_or_else(invalid)?;
        let inside = reserved.whole(address, size).ok_or_else(invalid)?;
        if size == 0 || !reserved.covers(address, size, |_| true) || self.space.windows.overlap(address, size) {
            return Err(invalid());
        }
        // The kernel would allow writes, to private copies of the pages.
        if access == Some(Access::ReadWrite) && inside.iter().any(|start| reserved.mapped[start].pages == Pages::Sealed)
        {
            return Err(invalid());
        }
        tracing::debug!(
            address = format_args!("{address:#x}"),
            size,
            access = access.map(tracing::field::display),
            "mprotect"
        );
        // SAFETY: copies in all threads hold the lock for reading and look the access up under it. No window is open in the range, and so
        // no slice of it exists.
        unsafe { reserved.protect(&inside, access) }.map_err(|errno| from_errno(CALL, errno))
    }

    fn export(&self, handle: Handle) -> Result<OwnedFd> {
        const CALL: &str = "host export";
        self.origin.check()?;
        let mut state = self.write();
        let memory = state.handles.get_mut(&handle).filter(|memory| memory.exportable);
        let memory = memory.ok_or_else(|| failure(CALL, code::INVALID_VALUE))?;
        if !memory.closed {
            // Prevents more seals: a consumer could lock out its producer.
            memfd::add_seals(&memory.memfd, SealFlag::F_SEAL_SEAL).map_err(|errno| from_errno(CALL, errno))?;
            memory.closed = true;
        }
        let exported = memory.memfd.try_clone();
        tracing::debug!(fd = exported.as_ref().map_or(-1, AsRawFd::as_raw_fd), "fcntl F_DUPFD");
        exported.map_err(|error| failure_with(CALL, code::OPERATING_SYSTEM, Some(error)))
    }

    fn import(&self, fd: BorrowedFd<'_>, size: u64) -> Result<Handle> {
        const CALL: &str = "host import";
        self.origin.check()?;
        let fails = |(code, reason)| failure_with(CALL, code, Some(reason));
        let immutable = memfd::inspect(fd, size).map_err(fails)?;
        if !self.aligned(size) {
            return Err(failure(CALL, code::INVALID_VALUE));
        }
        tracing::debug!(fd = fd.as_raw_fd(), size, "fstat, F_GET_SEALS, F_DUPFD");
        let memfd = fd.try_clone_to_owned().map_err(|error| fails((code::OPERATING_SYSTEM, error)))?;
        Ok(self.write().add(self.identity, PhysicalMemory { memfd, size, exportable: false, closed: true, immutable }))
    }

    fn retain(&self, _: u64) -> Result<Retained> {
        self.origin.check()?;
        Err(failure("retain", code::NOT_SUPPORTED))
    }

    fn properties(&self, handle: Handle) -> Result<Properties> {
        self.origin.check()?;
        match self.read().handles.get(&handle) {
            Some(memory) => Ok(Properties {
                location: Location::Device(0),
                exportable: memory.exportable,
                immutable: memory.immutable,
                gpu_direct_rdma: false,
            }),
            None => Err(failure("host properties", code::INVALID_VALUE)),
        }
    }

    fn copy_in(&self, ordinal: i32, address: u64, from: &[u8]) -> Result<()> {
        const CALL: &str = "host copy_in";
        self.device(CALL, ordinal)?;
        let state = self.read();
        if !from.is_empty() && !state.usable(address, from.len() as u64, writable) {
            return Err(failure(CALL, code::INVALID_VALUE));
        }
        // SAFETY: the whole destination is mapped for writing, and stays mapped while the lock is held. It is outside of Rust's
        // allocations. Other processes may access it at the same time. Threads of this process do so only with `copy`: the lock does not
        // exclude them.
        unsafe { copy::write(from, pointer(address).as_ptr().cast()) };
        Ok(())
    }

    fn copy_out(&self, ordinal: i32, address: u64, to: &mut [u8]) -> Result<()> {
        const CALL: &str = "host copy_out";
        self.device(CALL, ordinal)?;
        let state = self.read();
        if !to.is_empty() && !state.usable(address, to.len() as u64, readable) {
            return Err(failure(CALL, code::INVALID_VALUE));
        }
        // SAFETY: the whole source is mapped for reading, and stays mapped while the lock is held. It is not memory that Rust borrows
        // mutably. Other processes may write to it at the same time. Threads of this process do so only with `copy`: the lock does not
        // exclude them.
        unsafe { copy::read(pointer(address).as_ptr().cast_const().cast(), to) };
        Ok(())
    }

    unsafe fn copy_device(&self, ordinal: i32, _: &[(u64, u64, u64)]) -> Result<()> {
        const CALL: &str = "host copy_device";
        self.device(CALL, ordinal)?;
        Err(failure(CALL, code::NOT_SUPPORTED))
    }

    fn device_of(&self, _: u64) -> Result<i32> {
        const CALL: &str = "host device_of";
        self.device(CALL, 0)?;
        Err(failure(CALL, code::NOT_SUPPORTED))
    }

    fn synchronize(&self, ordinal: i32) -> Result<()> {
        self.device("host synchronize", ordinal)
    }

    fn wait_for_work(&self, ordinal: i32) -> Result<()> {
        self.device("host wait_for_work", ordinal)
    }

    fn can_access_peer(&self, ordinal: i32, peer: i32) -> Result<bool> {
        const CALL: &str = "host can_access_peer";
        self.device(CALL, ordinal)?;
        self.device(CALL, peer)?;
        Ok(true)
    }

    fn extent(&self, ordinal: i32, address: u64) -> Result<(u64, u64)> {
        const CALL: &str = "host extent";
        self.device(CALL, ordinal)?;
        let state = self.read();
        let reserved = state.reservations.range(..=address).next_back();
        let mapped = reserved.and_then(|(_, reserved)| reserved.mapped.range(..=address).next_back());
        match mapped {
            Some((&start, mapped)) if address - start < mapped.size => Ok((start, mapped.size)),
            _ => Err(failure(CALL, code::INVALID_VALUE)),
        }
    }

    fn seal(&self, handle: Handle) -> Result<bool> {
        const CALL: &str = "host seal";
        self.origin.check()?;
        let invalid = || failure(CALL, code::INVALID_VALUE);
        let begun = Instant::now();
        loop {
            let mut state = self.write();
            let memory = state.handles.get_mut(&handle).ok_or_else(invalid)?;
            if memory.immutable {
                return Ok(true);
            }
            if memory.closed {
                return Err(invalid());
            }
            // The kernel refuses the seal while the memory is mapped, with any access. A seal can't be removed.
            match memfd::seal_content(&memory.memfd) {
                Ok(()) => {
                    (memory.closed, memory.immutable) = (true, true);
                    return Ok(true);
                }
                // A fork of this process that has not called exec yet still has the mappings.
                Err(Errno::EBUSY) if begun.elapsed() < FORK_TIMEOUT => {}
                Err(errno) => return Err(from_errno(CALL, errno)),
            }
            drop(state);
            thread::sleep(Duration::from_millis(5));
        }
    }

    fn page_lock(&self, ordinal: i32, size: u64) -> Result<PageLocked> {
        const CALL: &str = "host page_lock";
        self.device(CALL, ordinal)?;
        let wanted = usize::try_from(size).ok().and_then(NonZeroUsize::new);
        let wanted = wanted.ok_or_else(|| failure(CALL, code::INVALID_VALUE))?;
        if size > self.memory_info(0)?.free {
            return Err(from_errno(CALL, Errno::ENOMEM));
        }
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: new anonymous memory that replaces nothing.
        let start = unsafe { mmap_anonymous(None, wanted, protection, MapFlags::MAP_PRIVATE) }
            .map_err(|errno| from_errno(CALL, errno))?;
        // SAFETY: it was just mapped, for this caller alone.
        Ok(unsafe { PageLocked::new(start.cast(), wanted.get(), Arc::new(Anonymous)) })
    }

    fn window(&self, address: u64, size: u64) -> Result<Window> {
        self.origin.check()?;
        let state = self.read();
        let covered = |enough: fn(&Mapped) -> bool| state.usable(address, size, enough);
        if size == 0 || !covered(readable) {
            return Err(failure("host window", code::INVALID_VALUE));
        }
        let immutable = covered(|mapped| mapped.access.is_some() && mapped.pages == Pages::Sealed);
        let view = View { address, size, writable: covered(writable), immutable };
        // SAFETY: according to the table, the range is mapped with this access. Nothing in it is unmapped or changed while it is in
        // `windows`, or before `space` is dropped; all other code here that accesses it uses `copy`. Immutable memory was sealed against writes
        // before it was mapped: at that time the kernel had ensured that no process could write to it, and it refuses all later attempts
        // (mappings, write(2), holes). This process has only private mappings of it: `set_access` never makes `Pages::Sealed` mappings
        // writable, and writes to other mappings change private copies of their pages.
        Ok(unsafe { Window::new(view, self.origin, &self.space.windows, Arc::clone(&self.space) as _) })
    }

    fn legacy(&self) -> Result<&dyn LegacyIpc> {
        self.lacking("legacy handles (cuIpcGetMemHandle)")
    }

    fn pools(&self) -> Result<&dyn Pools> {
        self.lacking("memory pools (cuMemPoolCreate)")
    }

    fn streams(&self) -> Result<Arc<dyn Streams>> {
        self.lacking("streams, which need a GPU")
    }

    fn kernels(&self) -> Result<&dyn Kernels> {
        self.lacking("kernels that write and check the pattern, which need a GPU")
    }

    fn diagnosis(&self) -> Result<&dyn Diagnosis> {
        self.lacking("driver diagnosis, which needs CUDA")
    }

    fn checkpoints(&self) -> Result<&dyn Checkpoints> {
        self.lacking("checkpoints of a process's GPU memory, which need CUDA")
    }
}
