//! Handoffs with bare CUDA calls.

use std::{
    os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd},
    ptr,
    time::Instant,
};

use super::{
    super::{
        Access, Location,
        bare::{Bare, BareMapping, Closing, Created, Opening, check, lap},
    },
    Core, adopt,
    ffi::{AccessDesc, AllocationProp, HANDLE_TYPE_POSIX_FD},
    flags_of,
};
use crate::error::Result;

impl Bare for Core {
    fn create(&self, ordinal: i32, size: u64) -> Result<Created> {
        self.origin.check()?;
        let properties = AllocationProp::pinned(Location::Device(ordinal), HANDLE_TYPE_POSIX_FD);
        let mut handle = 0;
        // SAFETY: both pointers are valid for the call.
        unsafe { self.functions.mem_create(&mut handle, size as usize, &properties, 0) }?;
        Ok(Created { by: self.identity, handle })
    }

    fn export(&self, created: &Created) -> Result<OwnedFd> {
        self.origin.check()?;
        check("cuMemExportToShareableHandle", created.by, self.identity)?;
        let mut fd: RawFd = -1;
        // SAFETY: for this type the driver writes an int. Only a driver creates `Created`, and `release` consumes it.
        unsafe { self.functions.mem_export((&raw mut fd).cast(), created.handle, HANDLE_TYPE_POSIX_FD, 0) }?;
        // SAFETY: the driver opened it for the caller, who must close it.
        unsafe { adopt("cuMemExportToShareableHandle", fd) }
    }

    fn release(&self, created: Created) -> Result<()> {
        self.origin.check()?;
        check("cuMemRelease", created.by, self.identity)?;
        // SAFETY: the driver returned the handle, and `created`, its only name, is consumed: no other thread has it.
        unsafe { self.functions.mem_release(created.handle) }
    }

    fn open(&self, ordinal: i32, fd: BorrowedFd<'_>, size: u64) -> Result<(BareMapping, Opening)> {
        self.origin.check()?;
        let access =
            AccessDesc { location: Location::Device(ordinal).into(), flags: flags_of(Some(Access::ReadWrite)) };
        let mut opening = Opening::default();
        let mut last = Instant::now();
        let mut handle = 0;
        let mut address = 0;
        let shareable = ptr::without_provenance_mut(fd.as_raw_fd() as usize);
        // SAFETY: all pointers are valid for the calls. For this type, the descriptor itself is passed as the pointer. The mapped handle
        // was just imported, and its addresses just reserved.
        unsafe {
            self.functions.mem_import(&mut handle, shareable, HANDLE_TYPE_POSIX_FD)?;
            opening.import = lap(&mut last);
            self.functions.mem_address_reserve(&mut address, size as usize, 0, 0, 0)?;
            opening.reserve = lap(&mut last);
            self.functions.mem_map(address, size as usize, 0, handle, 0)?;
            opening.map = lap(&mut last);
            self.functions.mem_set_access(address, size as usize, &access, 1)?;
            opening.set_access = lap(&mut last);
        }
        Ok((BareMapping { by: self.identity, handle, address, size }, opening))
    }

    fn close(&self, opened: BareMapping) -> Result<Closing> {
        self.origin.check()?;
        check("cuMemUnmap", opened.by, self.identity)?;
        let mut closing = Closing::default();
        let mut last = Instant::now();
        // SAFETY: the mapping is whole. No table contains it, so no thread starts a copy from or to it, and `opened`, its only name, is
        // consumed.
        unsafe {
            self.functions.mem_unmap(opened.address, opened.size as usize)?;
            closing.unmap = lap(&mut last);
            self.functions.mem_address_free(opened.address, opened.size as usize)?;
            closing.free = lap(&mut last);
            self.functions.mem_release(opened.handle)?;
            closing.release = lap(&mut last);
        }
        Ok(closing)
    }
}
