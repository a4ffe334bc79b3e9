//! Legacy handles with the CUDA driver.

use super::{
    super::{LegacyIpc, code, failure, ties::Tie},
    Core,
    addresses::Source,
    ffi::Opaque,
};
use crate::error::Result;

/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`: the only flag, and the driver requires it.
const LAZY_ENABLE_PEER_ACCESS: u32 = 1;

impl LegacyIpc for Core {
    fn allocate(&self, ordinal: i32, size: u64) -> Result<u64> {
        let address = self.in_context(ordinal, || {
            let mut address = 0;
            // SAFETY: the pointer is valid for one write.
            unsafe { self.functions.mem_alloc(&mut address, size as usize) }?;
            Ok(address)
        })?;
        self.addresses_mut().add_block(address, size, ordinal, Source::Allocated);
        Ok(address)
    }

    fn deallocate(&self, ordinal: i32, address: u64) -> Result<()> {
        const CALL: &str = "cuMemFree_v2";
        self.origin.check()?;
        let released = self.addresses_mut().release_block(address, ordinal, |source| source == Source::Allocated);
        let released = released.ok_or_else(|| failure(CALL, code::INVALID_VALUE))?;
        let free = || {
            self.allocate_and_free()?;
            // SAFETY: according to the table, it was allocated and not freed. No copy is in progress or can start, and the context is idle.
            unsafe { self.functions.mem_free(address) }
        };
        let freed = self.in_context(ordinal, || self.with_relaxed_capture(free));
        freed.inspect_err(|_| self.addresses_mut().restore_block(&released))
    }

    fn handle(&self, ordinal: i32, address: u64) -> Result<[u8; 64]> {
        const CALL: &str = "cuIpcGetMemHandle";
        self.origin.check()?;
        let addresses = self.addresses();
        if !addresses.block(address, 0).is_some_and(|(_, block)| block.source == Source::Allocated) {
            return Err(failure(CALL, code::INVALID_VALUE));
        }
        self.in_context(ordinal, || {
            let mut handle = Opaque([0; 64]);
            // SAFETY: the pointer is valid for one write. The address stays allocated while the table is locked.
            unsafe { self.functions.ipc_get_mem_handle(&mut handle, address) }?;
            Ok(handle.0)
        })
    }

    fn open(&self, ordinal: i32, handle: &[u8; 64]) -> Result<u64> {
        let _opening = self.opening();
        let _announced = Tie::new(&self.ties, true);
        self.in_context(ordinal, || {
            let mut address = 0;
            // SAFETY: the pointer is valid for one write. The driver checks the handle.
            unsafe { self.functions.ipc_open_mem_handle(&mut address, Opaque(*handle), LAZY_ENABLE_PEER_ACCESS) }?;
            let size = self.reach(address).inspect_err(|_| {
                // SAFETY: it was just opened, and the driver counts openings. No other code knows this opening.
                let _ = unsafe { self.functions.ipc_close_mem_handle(address) };
            })?;
            self.addresses_mut().add_block(address, size, ordinal, Source::Opened);
            Ok(address)
        })
    }

    fn close(&self, ordinal: i32, address: u64) -> Result<()> {
        const CALL: &str = "cuIpcCloseMemHandle";
        self.origin.check()?;
        let _opening = self.opening();
        let released = self.addresses_mut().release_block(address, ordinal, |source| source == Source::Opened);
        let released = released.ok_or_else(|| failure(CALL, code::INVALID_VALUE))?;
        // SAFETY: according to the table, it is open. The driver counts openings and keeps the memory open until the last close; then no
        // copy is in progress or can start.
        let close = || unsafe { self.functions.ipc_close_mem_handle(address) };
        let closed = self.in_context(ordinal, || self.with_relaxed_capture(close));
        closed.inspect_err(|_| self.addresses_mut().restore_block(&released))
    }
}
