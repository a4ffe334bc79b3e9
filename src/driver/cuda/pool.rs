//! Memory pools with the CUDA driver.

use std::{
    ffi::c_void,
    os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd},
    ptr,
    sync::{PoisonError, RwLockReadGuard, RwLockWriteGuard},
};

use super::{
    super::{Location, PoolHandle, Pools, code, failure, ties::Tie},
    Core, KnownPool, PoolTable,
    addresses::Source,
    adopt, close_on_exec,
    ffi::{AccessDesc, HANDLE_TYPE_POSIX_FD, Opaque, PROT_READWRITE, PoolProps},
};
use crate::error::Result;

impl Core {
    /// Prevents a pool's destruction until the guard is dropped. Fails if the driver did not return the pool.
    fn hold_pool(&self, call: &'static str, pool: PoolHandle) -> Result<RwLockReadGuard<'_, PoolTable>> {
        self.origin.check()?;
        let pools = self.pools.read().unwrap_or_else(PoisonError::into_inner);
        if pools.contains_key(&pool) { Ok(pools) } else { Err(failure(call, code::INVALID_VALUE)) }
    }

    fn pools_mut(&self) -> RwLockWriteGuard<'_, PoolTable> {
        self.pools.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a pool was created here, not imported.
    fn is_created(pools: &PoolTable, pool: PoolHandle) -> bool {
        pools.get(&pool).is_some_and(|known| known.created)
    }
}

impl Pools for Core {
    fn create(&self, ordinal: i32) -> Result<PoolHandle> {
        self.device(ordinal)?;
        let mut pool = ptr::null_mut();
        // SAFETY: both pointers are valid for the call.
        unsafe { self.functions.mem_pool_create(&mut pool, &PoolProps::pinned(Location::Device(ordinal))) }?;
        let handle = PoolHandle(pool.addr() as u64);
        self.pools_mut().insert(handle, KnownPool { created: true, count: 1 });
        Ok(handle)
    }

    fn destroy(&self, pool: PoolHandle) -> Result<()> {
        const CALL: &str = "cuMemPoolDestroy";
        self.origin.check()?;
        let mut pools = self.pools_mut();
        if let Some(known) = pools.get_mut(&pool).filter(|known| known.count > 1) {
            known.count -= 1;
            return Ok(());
        }
        let used = self.addresses().blocks.values().any(|block| block.source.pool() == Some(pool));
        if used || !pools.contains_key(&pool) {
            return Err(failure(CALL, code::INVALID_VALUE));
        }
        // SAFETY: the pool was in the table, none of its memory is in use, and no call with it is in progress.
        unsafe { self.functions.mem_pool_destroy(pointer(pool)) }?;
        pools.remove(&pool);
        Ok(())
    }

    fn export(&self, pool: PoolHandle) -> Result<OwnedFd> {
        const CALL: &str = "cuMemPoolExportToShareableHandle";
        let pools = self.hold_pool(CALL, pool)?;
        if !Self::is_created(&pools, pool) {
            return Err(failure(CALL, code::INVALID_VALUE));
        }
        let mut fd: RawFd = -1;
        // SAFETY: the pool is alive. For this type the driver writes an int.
        unsafe { self.functions.mem_pool_export(&mut fd, pointer(pool), HANDLE_TYPE_POSIX_FD, 0) }?;
        // SAFETY: the driver opened it for the caller, who must close it.
        let fd = unsafe { adopt(CALL, fd) }?;
        // The driver sets this for memory in tests; for pools it is undocumented.
        close_on_exec(CALL, &fd)?;
        Ok(fd)
    }

    fn import(&self, fd: BorrowedFd<'_>) -> Result<PoolHandle> {
        self.origin.check()?;
        // Locked during the call: another thread could otherwise destroy the pool before its handle is counted.
        let mut pools = self.pools_mut();
        let mut pool = ptr::null_mut();
        let shareable = ptr::without_provenance_mut(fd.as_raw_fd() as usize);
        // SAFETY: the pointer is valid for one write. For this type, the descriptor itself is passed as the pointer.
        unsafe { self.functions.mem_pool_import(&mut pool, shareable, HANDLE_TYPE_POSIX_FD, 0) }?;
        let handle = PoolHandle(pool.addr() as u64);
        pools.entry(handle).or_insert(KnownPool { created: false, count: 0 }).count += 1;
        Ok(handle)
    }

    fn allow(&self, pool: PoolHandle, ordinal: i32) -> Result<()> {
        let _held = self.hold_pool("cuMemPoolSetAccess", pool)?;
        let access = AccessDesc { location: Location::Device(ordinal).into(), flags: PROT_READWRITE };
        // SAFETY: the pool is alive. The pointer is valid for one description.
        unsafe { self.functions.mem_pool_set_access(pointer(pool), &access, 1) }
    }

    fn allocate(&self, pool: PoolHandle, ordinal: i32, size: u64) -> Result<u64> {
        const CALL: &str = "cuMemAllocFromPoolAsync";
        let pools = self.hold_pool(CALL, pool)?;
        // For size 0 the driver returns the null address.
        if size == 0 || !Self::is_created(&pools, pool) {
            return Err(failure(CALL, code::INVALID_VALUE));
        }
        self.in_context(ordinal, || {
            let functions = &self.functions;
            let mut address = 0;
            // SAFETY: the pointer is valid for one write. The pool is alive. Null is the default stream.
            unsafe {
                functions.mem_alloc_from_pool_async(&mut address, size as usize, pointer(pool), ptr::null_mut())
            }?;
            // SAFETY: null is the default stream.
            unsafe { functions.stream_synchronize(ptr::null_mut()) }.inspect_err(|_| {
                // SAFETY: it was just allocated, and no other code knows its address.
                let _ = unsafe { functions.mem_free_async(address, ptr::null_mut()) };
            })?;
            self.addresses_mut().add_block(address, size, ordinal, Source::Pooled(pool));
            Ok(address)
        })
    }

    fn free(&self, ordinal: i32, address: u64) -> Result<()> {
        const CALL: &str = "cuMemFreeAsync";
        self.origin.check()?;
        let _opening = self.opening();
        let released = self.addresses_mut().release_block(address, ordinal, |source| source.pool().is_some());
        let released = released.ok_or_else(|| failure(CALL, code::INVALID_VALUE))?;
        // The driver does not count imports of a pointer: in tests, freeing it once freed all.
        if !released.last {
            return Ok(());
        }
        let free = || {
            // SAFETY: according to the table, it was taken and not freed. No copy is in progress or can start. Null is the default stream.
            let freed = unsafe { self.functions.mem_free_async(address, ptr::null_mut()) };
            freed.inspect_err(|_| self.addresses_mut().restore_block(&released))?;
            // The driver has freed it, even if the wait fails.
            // SAFETY: null is the default stream.
            unsafe { self.functions.stream_synchronize(ptr::null_mut()) }
        };
        self.in_context(ordinal, || self.with_relaxed_capture(free))
    }

    fn export_pointer(&self, ordinal: i32, address: u64) -> Result<[u8; 64]> {
        const CALL: &str = "cuMemPoolExportPointer";
        self.origin.check()?;
        let addresses = self.addresses();
        if !addresses.blocks.get(&address).is_some_and(|block| matches!(block.source, Source::Pooled(_))) {
            return Err(failure(CALL, code::INVALID_VALUE));
        }
        self.in_context(ordinal, || {
            let mut data = Opaque([0; 64]);
            // SAFETY: the pointer is valid for one write. The address stays allocated while the table is locked.
            unsafe { self.functions.mem_pool_export_pointer(&mut data, address) }?;
            Ok(data.0)
        })
    }

    fn import_pointer(&self, pool: PoolHandle, ordinal: i32, data: &[u8; 64]) -> Result<u64> {
        const CALL: &str = "cuMemPoolImportPointer";
        let pools = self.hold_pool(CALL, pool)?;
        if Self::is_created(&pools, pool) {
            return Err(failure(CALL, code::INVALID_VALUE));
        }
        self.in_context(ordinal, || {
            let functions = &self.functions;
            // Locked during the call: another thread could otherwise free the address before it is counted.
            let _opening = self.opening();
            let _announced = Tie::new(&self.ties, true);
            let mut address = 0;
            let mut data = Opaque(*data);
            // SAFETY: the pointers are valid for the call. The pool is alive. The driver checks the bytes.
            unsafe { functions.mem_pool_import_pointer(&mut address, pointer(pool), &mut data) }?;
            let known = self.addresses().blocks.contains_key(&address);
            let size = self.reach(address).inspect_err(|_| {
                if !known {
                    // SAFETY: it was just imported, and no other code has it.
                    let _ = unsafe { functions.mem_free_async(address, ptr::null_mut()) };
                }
            })?;
            self.addresses_mut().add_block(address, size, ordinal, Source::Imported(pool));
            Ok(address)
        })
    }
}

fn pointer(pool: PoolHandle) -> *mut c_void {
    ptr::without_provenance_mut(pool.0 as usize)
}
