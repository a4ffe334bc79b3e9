//! Legacy handles, through the driver.

use super::{
    super::{LegacyIpc, code, failure},
    Core,
    addresses::Source,
    ffi::Opaque,
};
use crate::error::Result;

/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`: the one flag there is, and the driver refuses to do without.
const LAZY_ENABLE_PEER_ACCESS: u32 = 1;

impl LegacyIpc for Core {
    fn allocate(&self, ordinal: i32, size: u64) -> Result<u64> {
        let address = self.within(ordinal, || {
            let mut address = 0;
            // SAFETY: the pointer is valid for the one write.
            unsafe { self.functions.mem_alloc(&mut address, size as usize) }?;
            Ok(address)
        })?;
        self.changed().take(address, size, ordinal, Source::Allocated);
        Ok(address)
    }

    fn deallocate(&self, ordinal: i32, address: u64) -> Result<()> {
        const CALL: &str = "cuMemFree_v2";
        self.origin.check()?;
        let leaving = self.changed().leave(address, ordinal, |source| source == Source::Allocated);
        let leaving = leaving.ok_or_else(|| failure(CALL, code::INVALID_VALUE))?;
        let free = || {
            self.allocate_and_free()?;
            // SAFETY: the table said that it was allocated and not freed; no copy is under way or begins, and the context is idle.
            unsafe { self.functions.mem_free(address) }
        };
        let freed = self.within(ordinal, || self.relaxed(free));
        freed.inspect_err(|_| self.changed().stay(&leaving))
    }

    fn handle(&self, ordinal: i32, address: u64) -> Result<[u8; 64]> {
        const CALL: &str = "cuIpcGetMemHandle";
        self.origin.check()?;
        let addresses = self.known_addresses();
        if !addresses.block(address, 0).is_some_and(|(_, block)| block.source == Source::Allocated) {
            return Err(failure(CALL, code::INVALID_VALUE));
        }
        self.within(ordinal, || {
            let mut handle = Opaque([0; 64]);
            // SAFETY: the pointer is valid for the one write; the address is allocated while the table is held.
            unsafe { self.functions.ipc_get_mem_handle(&mut handle, address) }?;
            Ok(handle.0)
        })
    }

    fn open(&self, ordinal: i32, handle: &[u8; 64]) -> Result<u64> {
        let _opening = self.opening();
        self.within(ordinal, || {
            let mut address = 0;
            // SAFETY: the pointer is valid for the one write; the driver checks the handle.
            unsafe { self.functions.ipc_open_mem_handle(&mut address, Opaque(*handle), LAZY_ENABLE_PEER_ACCESS) }?;
            let size = self.reach(address).inspect_err(|_| {
                // SAFETY: it was opened just now, and the driver counts how often. No other code knows of this opening.
                let _ = unsafe { self.functions.ipc_close_mem_handle(address) };
            })?;
            self.changed().take(address, size, ordinal, Source::Opened);
            Ok(address)
        })
    }

    fn close(&self, ordinal: i32, address: u64) -> Result<()> {
        const CALL: &str = "cuIpcCloseMemHandle";
        self.origin.check()?;
        let _opening = self.opening();
        let leaving = self.changed().leave(address, ordinal, |source| source == Source::Opened);
        let leaving = leaving.ok_or_else(|| failure(CALL, code::INVALID_VALUE))?;
        // SAFETY: the table said that it is open. If this was the last time, no copy is under way or begins; else the driver keeps
        // it open, for it counts.
        let close = || unsafe { self.functions.ipc_close_mem_handle(address) };
        let closed = self.within(ordinal, || self.relaxed(close));
        closed.inspect_err(|_| self.changed().stay(&leaving))
    }
}
