//! [`Verbs`] of the CUDA backend.

use std::{
    collections::BTreeMap,
    ffi::{CStr, c_int},
    os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd},
    ptr::{self, NonNull},
    sync::{Arc, PoisonError},
};

use super::{
    CudaDriver,
    addresses::Mapped,
    adopt,
    ffi::{
        AccessDesc, AllocationProp, GRANULARITY_MINIMUM, GRANULARITY_RECOMMENDED, HANDLE_TYPE_POSIX_FD,
        HOST_ALLOC_PORTABLE, attribute, pointer_attribute,
    },
    flags_of, raw_properties,
};
use crate::{
    driver::{
        Access, Attribute, Backend, DeviceUuid, Granularity, Handle, LegacyIpc, Location, MemoryInfo, PageLocked,
        Pools, Properties, Retained, Streams, Verbs, Window, code, failure, ties::Tie, window::PageLocker,
    },
    error::Result,
};

use crate::driver::{Checkpoints, Diagnosis, Kernels};

// SAFETY: the tables contain all mappings, other addresses are rejected, and a mapping is removed together with its entry.
unsafe impl Verbs for CudaDriver {
    fn backend(&self) -> Backend {
        Backend::Cuda
    }

    fn version(&self) -> Result<i32> {
        self.core.origin.check()?;
        let mut version = 0;
        // SAFETY: the pointer is valid for one write.
        unsafe { self.core.functions.driver_get_version(&mut version) }?;
        Ok(version)
    }

    fn device_count(&self) -> Result<i32> {
        self.core.origin.check()?;
        let mut count = 0;
        // SAFETY: the pointer is valid for one write.
        unsafe { self.core.functions.device_get_count(&mut count) }?;
        Ok(count)
    }

    fn device_name(&self, ordinal: i32) -> Result<String> {
        let device = self.core.device(ordinal)?;
        let mut name = [0u8; 256];
        // SAFETY: the buffer has the given length.
        unsafe { self.core.functions.device_get_name(name.as_mut_ptr().cast(), name.len() as c_int, device) }?;
        Ok(CStr::from_bytes_until_nul(&name).unwrap_or_default().to_string_lossy().into_owned())
    }

    fn device_uuid(&self, ordinal: i32) -> Result<DeviceUuid> {
        let device = self.core.device(ordinal)?;
        let mut uuid = [0; 16];
        // SAFETY: the pointer is valid for the 16 bytes of a CUuuid.
        unsafe { self.core.functions.device_get_uuid(&mut uuid, device) }?;
        Ok(DeviceUuid::from_bytes(uuid))
    }

    fn device_attribute(&self, ordinal: i32, which: Attribute) -> Result<i32> {
        let device = self.core.device(ordinal)?;
        let number = match which {
            Attribute::VirtualMemoryManagement => attribute::VIRTUAL_MEMORY_MANAGEMENT,
            Attribute::PosixFileDescriptor => attribute::POSIX_FILE_DESCRIPTOR,
            Attribute::FabricHandle => attribute::FABRIC_HANDLE,
            Attribute::GpuDirectRdma => attribute::GPU_DIRECT_RDMA,
            Attribute::ComputeMode => attribute::COMPUTE_MODE,
            Attribute::MemoryPools => attribute::MEMORY_POOLS,
            Attribute::PoolHandleTypes => attribute::POOL_HANDLE_TYPES,
            Attribute::HostNumaId => attribute::HOST_NUMA_ID,
            Attribute::Mps => attribute::MPS,
            Attribute::StreamMemoryOperations => attribute::STREAM_MEMORY_OPERATIONS,
            Attribute::HostNumaVirtualMemoryManagement => attribute::HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT,
        };
        let mut value = 0;
        // SAFETY: the pointer is valid for one write.
        unsafe { self.core.functions.device_get_attribute(&mut value, number, device) }?;
        Ok(value)
    }

    fn memory_info(&self, ordinal: i32) -> Result<MemoryInfo> {
        self.core.in_context(ordinal, || {
            let mut free = 0;
            let mut total = 0;
            // SAFETY: both pointers are valid for one write.
            unsafe { self.core.functions.mem_get_info(&mut free, &mut total) }?;
            Ok(MemoryInfo { free: free as u64, total: total as u64 })
        })
    }

    fn activate(&self, ordinal: i32) -> Result<()> {
        self.core.context(ordinal).map(drop)
    }

    fn granularity(&self, properties: &Properties, which: Granularity) -> Result<u64> {
        self.check_location(properties.location)?;
        let option = match which {
            Granularity::Minimum => GRANULARITY_MINIMUM,
            Granularity::Recommended => GRANULARITY_RECOMMENDED,
        };
        let mut granularity = 0;
        // SAFETY: both pointers are valid for the call.
        unsafe {
            self.core.functions.mem_get_allocation_granularity(&mut granularity, &raw_properties(properties), option)
        }?;
        Ok(granularity as u64)
    }

    fn create(&self, size: u64, properties: &Properties) -> Result<Handle> {
        self.check_location(properties.location)?;
        if properties.immutable {
            return Err(failure("cuMemCreate", code::INVALID_VALUE));
        }
        let mut handle = 0;
        tracing::debug!(size, "cuMemCreate");
        // SAFETY: both pointers are valid for the call.
        unsafe { self.core.functions.mem_create(&mut handle, size as usize, &raw_properties(properties), 0) }?;
        Ok(self.core.add_handle(handle, None))
    }

    fn release(&self, handle: Handle) -> Result<()> {
        self.core.origin.check()?;
        let mut handles = self.core.handles.write().unwrap_or_else(PoisonError::into_inner);
        let known = handles.get_mut(&handle).ok_or_else(|| failure("cuMemRelease", code::INVALID_VALUE))?;
        known.count -= 1;
        if known.count == 0 {
            handles.remove(&handle);
        }
        tracing::debug!("cuMemRelease");
        // SAFETY: the handle was in the table, and no call with it is in progress.
        unsafe { self.core.functions.mem_release(handle.number) }
    }

    fn reserve(&self, size: u64, alignment: u64) -> Result<u64> {
        self.core.origin.check()?;
        let mut address = 0;
        // SAFETY: the pointer is valid for one write.
        unsafe { self.core.functions.mem_address_reserve(&mut address, size as usize, alignment as usize, 0, 0) }?;
        tracing::debug!(size, address = format_args!("{address:#x}"), "cuMemAddressReserve");
        self.core.addresses_mut().reserved.insert(address, size);
        Ok(address)
    }

    fn free(&self, address: u64, size: u64) -> Result<()> {
        const CALL: &str = "cuMemAddressFree";
        let mut addresses = self.lock_own(CALL, address, size)?;
        if addresses.reserved.get(&address) != Some(&size) {
            return Err(failure(CALL, code::INVALID_VALUE));
        }
        tracing::debug!(address = format_args!("{address:#x}"), size, "{CALL}");
        // SAFETY: no pointers. It is a whole reservation, and the driver refuses reservations with mappings.
        unsafe { self.core.functions.mem_address_free(address, size as usize) }?;
        addresses.reserved.remove(&address);
        Ok(())
    }

    fn map(&self, address: u64, size: u64, offset: u64, handle: Handle) -> Result<()> {
        const CALL: &str = "cuMemMap";
        let held = self.core.hold_handle(CALL, handle)?;
        let imported = held.get(&handle).and_then(|known| known.imported.clone());
        let mut addresses = self.lock_own(CALL, address, size)?;
        tracing::debug!(address = format_args!("{address:#x}"), size, "{CALL}");
        // Counted before the call: a checkpoint may begin as soon as the call ends.
        let tie = imported.unwrap_or_else(|| Arc::new(Tie::new(&self.core.ties, false)));
        // SAFETY: the handle is alive, the addresses are reserved, and the driver refuses mapped ranges.
        unsafe { self.core.functions.mem_map(address, size as usize, offset as usize, handle.number, 0) }?;
        addresses.mapped.insert(address, Mapped { size, host: None, devices: BTreeMap::new(), _tie: tie });
        Ok(())
    }

    fn map_private(&self, _: u64, _: u64, handle: Handle) -> Result<()> {
        const CALL: &str = "map_private";
        let _held = self.core.hold_handle(CALL, handle)?;
        Err(failure(CALL, code::NOT_SUPPORTED))
    }

    fn replace(&self, _: u64, _: u64, handle: Handle) -> Result<()> {
        const CALL: &str = "replace";
        let _held = self.core.hold_handle(CALL, handle)?;
        Err(failure(CALL, code::NOT_SUPPORTED))
    }

    fn unmap(&self, address: u64, size: u64) -> Result<()> {
        let mut addresses = self.lock_own("cuMemUnmap", address, size)?;
        tracing::debug!(address = format_args!("{address:#x}"), size, "cuMemUnmap");
        // SAFETY: no pointers. No copy of this object is in progress, and the driver refuses partial unmapping.
        unsafe { self.core.functions.mem_unmap(address, size as usize) }?;
        addresses.mapped.retain(|&start, _| start < address || start - address >= size);
        Ok(())
    }

    fn check_unused(&self, address: u64, size: u64) -> Result<()> {
        self.lock_own("check_unused", address, size).map(drop)
    }

    fn set_access(&self, address: u64, size: u64, location: Location, access: Option<Access>) -> Result<()> {
        let mut addresses = self.lock_own("cuMemSetAccess", address, size)?;
        let description = AccessDesc { location: location.into(), flags: flags_of(access) };
        tracing::debug!(
            address = format_args!("{address:#x}"),
            size,
            ?location,
            access = access.map(tracing::field::display),
            "cuMemSetAccess"
        );
        // SAFETY: the pointer is valid for one description.
        unsafe { self.core.functions.mem_set_access(address, size as usize, &description, 1) }?;
        let inside = addresses.mapped.range_mut(address..).take_while(|(start, _)| **start - address < size);
        for (_, mapped) in inside {
            match (location, access) {
                (Location::HostNuma(_), _) => mapped.host = access,
                (Location::Device(ordinal), Some(access)) => drop(mapped.devices.insert(ordinal, access)),
                (Location::Device(ordinal), None) => drop(mapped.devices.remove(&ordinal)),
            }
        }
        Ok(())
    }

    fn export(&self, handle: Handle) -> Result<OwnedFd> {
        const CALL: &str = "cuMemExportToShareableHandle";
        let _held = self.core.hold_handle(CALL, handle)?;
        let mut fd: RawFd = -1;
        // SAFETY: for this type the driver writes an int.
        unsafe { self.core.functions.mem_export((&raw mut fd).cast(), handle.number, HANDLE_TYPE_POSIX_FD, 0) }?;
        tracing::debug!(fd, "{CALL}");
        // SAFETY: the driver opened it for the caller, who must close it.
        unsafe { adopt(CALL, fd) }
    }

    fn import(&self, fd: BorrowedFd<'_>, _: u64) -> Result<Handle> {
        self.core.origin.check()?;
        let mut handle = 0;
        tracing::debug!(fd = fd.as_raw_fd(), "cuMemImportFromShareableHandle");
        let tie = Arc::new(Tie::new(&self.core.ties, true));
        // SAFETY: the pointer is valid for one write. For this type, the descriptor itself is passed as the pointer.
        unsafe {
            self.core.functions.mem_import(
                &mut handle,
                ptr::without_provenance_mut(fd.as_raw_fd() as usize),
                HANDLE_TYPE_POSIX_FD,
            )
        }?;
        Ok(self.core.add_handle(handle, Some(tie)))
    }

    fn retain(&self, address: u64) -> Result<Retained> {
        self.core.origin.check()?;
        let attribute = |number| -> Result<u64> {
            let mut value = 0u64;
            // SAFETY: for these attributes the driver writes 64 bits. It knows its own addresses.
            unsafe { self.core.functions.pointer_get_attribute((&raw mut value).cast(), number, address) }?;
            Ok(value)
        };
        let start = attribute(pointer_attribute::MAPPING_BASE_ADDRESS)?;
        let size = attribute(pointer_attribute::MAPPING_SIZE)?;
        let mut handle = 0;
        tracing::debug!(address = format_args!("{address:#x}"), "cuMemRetainAllocationHandle");
        // SAFETY: the pointer is valid for one write; the driver only looks the address up.
        unsafe { self.core.functions.mem_retain(&mut handle, ptr::without_provenance_mut(address as usize)) }?;
        Ok(Retained { handle: self.core.add_handle(handle, None), start, size })
    }

    fn properties(&self, handle: Handle) -> Result<Properties> {
        let _held = self.core.hold_handle("cuMemGetAllocationPropertiesFromHandle", handle)?;
        let mut properties = AllocationProp::pinned(Location::Device(0), 0);
        // SAFETY: the handle is alive. The layout is the driver's, and its integers are valid with any bytes.
        unsafe { self.core.functions.mem_get_properties(&mut properties, handle.number) }?;
        let exportable = properties.requested_handle_types & HANDLE_TYPE_POSIX_FD != 0;
        let gpu_direct_rdma = properties.gpu_direct_rdma != 0;
        Ok(Properties { location: properties.location.into(), exportable, immutable: false, gpu_direct_rdma })
    }

    fn copy_in(&self, ordinal: i32, address: u64, from: &[u8]) -> Result<()> {
        self.copy("cuMemcpyHtoD_v2", ordinal, address, from.len(), || {
            // SAFETY: `from` is valid for its length, and the destination stays mapped during the call.
            unsafe { self.core.functions.memcpy_htod(address, from.as_ptr().cast(), from.len()) }?;
            // From pageable memory, the call returns while the last bytes are still in transfer, and unmapping does not wait for them: in
            // tests the GPU faulted, which destroys the context. So the transfer must be finished on return, even after an error.
            // SAFETY: null is the default stream, which the copy uses.
            unsafe { self.core.functions.stream_synchronize(ptr::null_mut()) }.inspect_err(|_| {
                // SAFETY: no pointers. A failure here repeats the same error.
                let _ = unsafe { self.core.functions.ctx_synchronize() };
            })
        })
    }

    fn copy_out(&self, ordinal: i32, address: u64, to: &mut [u8]) -> Result<()> {
        self.copy("cuMemcpyDtoH_v2", ordinal, address, to.len(), || {
            // SAFETY: `to` is valid for its length, and the source stays mapped during the call.
            unsafe { self.core.functions.memcpy_dtoh(to.as_mut_ptr().cast(), address, to.len()) }
        })
    }

    unsafe fn copy_device(&self, ordinal: i32, ranges: &[(u64, u64, u64)]) -> Result<()> {
        const CALL: &str = "cuMemcpyDtoD_v2";
        self.core.origin.check()?;
        let addresses = self.core.addresses();
        if !ranges.iter().all(|&(to, from, size)| addresses.cover(to, size) || addresses.cover(from, size)) {
            return Err(failure(CALL, code::INVALID_VALUE));
        }
        let copy = || {
            let copied = ranges.iter().try_for_each(|&(to, from, size)| {
                // SAFETY: upheld by the caller. This object's memory stays mapped while the addresses are locked.
                unsafe { self.core.functions.memcpy_dtod(to, from, size as usize) }
            });
            // The calls return while the copies are in progress. They must be finished on return, even after an error.
            // SAFETY: null is the default stream, which the copies use.
            let done = unsafe { self.core.functions.stream_synchronize(ptr::null_mut()) };
            copied.and(done)
        };
        self.core.in_context(ordinal, || self.core.with_relaxed_capture(copy))
    }

    fn device_of(&self, address: u64) -> Result<i32> {
        self.core.origin.check()?;
        let mut ordinal: c_int = -1;
        // SAFETY: for this attribute the driver writes an int. It knows its own addresses.
        unsafe {
            self.core.functions.pointer_get_attribute(
                (&raw mut ordinal).cast(),
                pointer_attribute::DEVICE_ORDINAL,
                address,
            )
        }?;
        Ok(ordinal)
    }

    fn synchronize(&self, ordinal: i32) -> Result<()> {
        self.core.in_context(ordinal, || {
            // SAFETY: no pointers.
            unsafe { self.core.functions.ctx_synchronize() }
        })
    }

    fn wait_for_work(&self, ordinal: i32) -> Result<()> {
        self.core.in_context(ordinal, || self.core.with_relaxed_capture(|| self.core.allocate_and_free()))
    }

    fn can_access_peer(&self, ordinal: i32, peer: i32) -> Result<bool> {
        let device = self.core.device(ordinal)?;
        let peer_device = self.core.device(peer)?;
        // The driver reports false for a device and itself.
        if ordinal == peer {
            return Ok(true);
        }
        let mut can = 0;
        // SAFETY: the pointer is valid for one write.
        unsafe { self.core.functions.device_can_access_peer(&mut can, device, peer_device) }?;
        Ok(can != 0)
    }

    fn extent(&self, ordinal: i32, address: u64) -> Result<(u64, u64)> {
        self.core.device(ordinal)?;
        let addresses = self.core.addresses();
        if let Some(mapping) = addresses.mapping(address) {
            return Ok(mapping);
        }
        match addresses.block(address, 0) {
            Some(_) => self.core.in_context(ordinal, || self.core.extent(address)),
            None => Err(failure("cuMemGetAddressRange_v2", code::INVALID_VALUE)),
        }
    }

    fn seal(&self, handle: Handle) -> Result<bool> {
        self.core.hold_handle("seal", handle).map(|_| false)
    }

    fn page_lock(&self, ordinal: i32, size: u64) -> Result<PageLocked> {
        const CALL: &str = "cuMemHostAlloc";
        self.core.device(ordinal)?;
        // For size 0 the driver returns null.
        if size == 0 {
            return Err(failure(CALL, code::INVALID_VALUE));
        }
        let start = self.core.in_context(ordinal, || {
            let mut start = ptr::null_mut();
            // SAFETY: the pointer is valid for one write.
            unsafe { self.core.functions.mem_host_alloc(&mut start, size as usize, HOST_ALLOC_PORTABLE) }?;
            NonNull::new(start).ok_or_else(|| failure(CALL, code::UNKNOWN))
        })?;
        // SAFETY: the driver allocated it for this caller alone, and `unlock` frees it.
        Ok(unsafe { PageLocked::new(start.cast(), size as usize, Arc::clone(&self.core) as Arc<dyn PageLocker>) })
    }

    fn window(&self, address: u64, size: u64) -> Result<Window> {
        self.core.origin.check()?;
        let addresses = self.core.addresses();
        let view = addresses.view(address, size).ok_or_else(|| failure("window", code::INVALID_VALUE))?;
        // SAFETY: according to the table, the range is mapped with this access for the CPU. Nothing in it is unmapped or changed while it
        // is in `windows`. This driver object unmaps nothing when it is dropped.
        Ok(unsafe { Window::new(view, self.core.origin, &self.windows, Arc::clone(&self.core) as _) })
    }

    fn legacy(&self) -> Result<&dyn LegacyIpc> {
        self.core.origin.check()?;
        Ok(&*self.core)
    }

    fn pools(&self) -> Result<&dyn Pools> {
        self.core.origin.check()?;
        Ok(&*self.core)
    }

    fn kernels(&self) -> Result<&dyn Kernels> {
        self.core.origin.check()?;
        Ok(&*self.core)
    }

    fn streams(&self) -> Result<Arc<dyn Streams>> {
        self.core.origin.check()?;
        Ok(Arc::clone(&self.core) as _)
    }

    fn diagnosis(&self) -> Result<&dyn Diagnosis> {
        self.core.origin.check()?;
        Ok(&*self.core)
    }

    fn checkpoint_count(&self) -> u64 {
        self.core.ties.checkpoints()
    }

    fn checkpoints(&self) -> Result<&dyn Checkpoints> {
        self.core.origin.check()?;
        Ok(&*self.core)
    }
}
