//! Memory pools, through the driver.

use std::{
    ffi::c_void,
    os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd},
    ptr,
    sync::{PoisonError, RwLockReadGuard, RwLockWriteGuard},
};

use cudarc::driver::sys::CUmemAccess_flags;

use super::{
    super::{Location, PoolHandle, Pools, code, failure},
    Core, KnownPool, PoolTable,
    addresses::Source,
    adopt, close_on_exec,
    ffi::{AccessDesc, HANDLE_TYPE_POSIX_FD, Opaque, PoolProps},
};
use crate::error::Result;

impl Core {
    /// Keeps a pool from being destroyed for as long as the guard lives, if the driver gave it out.
    fn known_pool(&self, call: &'static str, pool: PoolHandle) -> Result<RwLockReadGuard<'_, PoolTable>> {
        self.origin.check()?;
        let pools = self.pools.read().unwrap_or_else(PoisonError::into_inner);
        if pools.contains_key(&pool) { Ok(pools) } else { Err(failure(call, code::INVALID_VALUE)) }
    }

    fn pools_to_change(&self) -> RwLockWriteGuard<'_, PoolTable> {
        self.pools.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a pool was created here, and not imported.
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
        self.pools_to_change().insert(handle, KnownPool { created: true, count: 1 });
        Ok(handle)
    }

    fn destroy(&self, pool: PoolHandle) -> Result<()> {
        const CALL: &str = "cuMemPoolDestroy";
        self.origin.check()?;
        let mut pools = self.pools_to_change();
        if let Some(known) = pools.get_mut(&pool).filter(|known| known.count > 1) {
            known.count -= 1;
            return Ok(());
        }
        let used = self.known_addresses().blocks.values().any(|block| block.source.pool() == Some(pool));
        if used || !pools.contains_key(&pool) {
            return Err(failure(CALL, code::INVALID_VALUE));
        }
        // SAFETY: the pool was in the table, nothing of it is in use, and no call on it is under way.
        unsafe { self.functions.mem_pool_destroy(pointer(pool)) }?;
        pools.remove(&pool);
        Ok(())
    }

    fn export(&self, pool: PoolHandle) -> Result<OwnedFd> {
        const CALL: &str = "cuMemPoolExportToShareableHandle";
        let pools = self.known_pool(CALL, pool)?;
        if !Self::is_created(&pools, pool) {
            return Err(failure(CALL, code::INVALID_VALUE));
        }
        let mut fd: RawFd = -1;
        // SAFETY: the pool is alive; for this type the driver writes an int.
        unsafe { self.functions.mem_pool_export(&mut fd, pointer(pool), HANDLE_TYPE_POSIX_FD, 0) }?;
        // SAFETY: the driver opened it for the caller, who is to close it.
        let fd = unsafe { adopt(CALL, fd) }?;
        // Nothing says that the driver sets it here, as it was seen to for memory.
        close_on_exec(CALL, &fd)?;
        Ok(fd)
    }

    fn import(&self, fd: BorrowedFd<'_>) -> Result<PoolHandle> {
        self.origin.check()?;
        // Held throughout: destroyed in between by another thread, the handle that this call is given would be dead.
        let mut pools = self.pools_to_change();
        let mut pool = ptr::null_mut();
        let shareable = ptr::without_provenance_mut(fd.as_raw_fd() as usize);
        // SAFETY: the pointer is valid for the one write; for this type the descriptor itself is passed as the pointer.
        unsafe { self.functions.mem_pool_import(&mut pool, shareable, HANDLE_TYPE_POSIX_FD, 0) }?;
        let handle = PoolHandle(pool.addr() as u64);
        pools.entry(handle).or_insert(KnownPool { created: false, count: 0 }).count += 1;
        Ok(handle)
    }

    fn allow(&self, pool: PoolHandle, ordinal: i32) -> Result<()> {
        let _known = self.known_pool("cuMemPoolSetAccess", pool)?;
        let flags = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        let access = AccessDesc { location: Location::Device(ordinal).into(), flags: flags as u32 };
        // SAFETY: the pool is alive; the pointer is valid for one description.
        unsafe { self.functions.mem_pool_set_access(pointer(pool), &access, 1) }
    }

    fn allocate(&self, pool: PoolHandle, ordinal: i32, size: u64) -> Result<u64> {
        const CALL: &str = "cuMemAllocFromPoolAsync";
        let pools = self.known_pool(CALL, pool)?;
        // The driver answers nothing with the null address.
        if size == 0 || !Self::is_created(&pools, pool) {
            return Err(failure(CALL, code::INVALID_VALUE));
        }
        self.within(ordinal, || {
            let functions = &self.functions;
            let mut address = 0;
            // SAFETY: the pointer is valid for the one write; the pool is alive; null is the default stream.
            unsafe {
                functions.mem_alloc_from_pool_async(&mut address, size as usize, pointer(pool), ptr::null_mut())
            }?;
            // SAFETY: null is the default stream.
            unsafe { functions.stream_synchronize(ptr::null_mut()) }.inspect_err(|_| {
                // SAFETY: it was allocated just now, and no other code knows its address.
                let _ = unsafe { functions.mem_free_async(address, ptr::null_mut()) };
            })?;
            self.changed().take(address, size, ordinal, Source::Pooled(pool));
            Ok(address)
        })
    }

    fn free(&self, ordinal: i32, address: u64) -> Result<()> {
        const CALL: &str = "cuMemFreeAsync";
        self.origin.check()?;
        let _opening = self.opening();
        let leaving = self.changed().leave(address, ordinal, |source| source.pool().is_some());
        let leaving = leaving.ok_or_else(|| failure(CALL, code::INVALID_VALUE))?;
        // A pointer imported twice is one to the driver: freeing it once was seen to end both.
        if !leaving.last {
            return Ok(());
        }
        let free = || {
            // SAFETY: the table said that it was taken and not freed; no copy is under way or begins; null is the default stream.
            let freed = unsafe { self.functions.mem_free_async(address, ptr::null_mut()) };
            freed.inspect_err(|_| self.changed().stay(&leaving))?;
            // Whatever follows, the driver has it back.
            // SAFETY: null is the default stream.
            unsafe { self.functions.stream_synchronize(ptr::null_mut()) }
        };
        self.within(ordinal, || self.relaxed(free))
    }

    fn export_pointer(&self, ordinal: i32, address: u64) -> Result<[u8; 64]> {
        const CALL: &str = "cuMemPoolExportPointer";
        self.origin.check()?;
        let addresses = self.known_addresses();
        if !addresses.blocks.get(&address).is_some_and(|block| matches!(block.source, Source::Pooled(_))) {
            return Err(failure(CALL, code::INVALID_VALUE));
        }
        self.within(ordinal, || {
            let mut data = Opaque([0; 64]);
            // SAFETY: the pointer is valid for the one write; the address is allocated while the table is held.
            unsafe { self.functions.mem_pool_export_pointer(&mut data, address) }?;
            Ok(data.0)
        })
    }

    fn import_pointer(&self, pool: PoolHandle, ordinal: i32, data: &[u8; 64]) -> Result<u64> {
        const CALL: &str = "cuMemPoolImportPointer";
        let pools = self.known_pool(CALL, pool)?;
        if Self::is_created(&pools, pool) {
            return Err(failure(CALL, code::INVALID_VALUE));
        }
        self.within(ordinal, || {
            let functions = &self.functions;
            // Freed in between by another thread, the address that this call is given would be dead.
            let _opening = self.opening();
            let mut address = 0;
            let mut data = Opaque(*data);
            // SAFETY: the pointers are valid for the call; the pool is alive; the driver checks the bytes.
            unsafe { functions.mem_pool_import_pointer(&mut address, pointer(pool), &mut data) }?;
            let known = self.known_addresses().blocks.contains_key(&address);
            let size = self.reach(address).inspect_err(|_| {
                if !known {
                    // SAFETY: it was imported just now, and no other code has it.
                    let _ = unsafe { functions.mem_free_async(address, ptr::null_mut()) };
                }
            })?;
            self.changed().take(address, size, ordinal, Source::Imported(pool));
            Ok(address)
        })
    }
}

fn pointer(pool: PoolHandle) -> *mut c_void {
    ptr::without_provenance_mut(pool.0 as usize)
}
