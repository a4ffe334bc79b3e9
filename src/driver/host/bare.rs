//! Handoffs with bare system calls.

use std::{
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd},
    time::Instant,
};

use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};

use super::{
    super::{
        bare::{Bare, BareMapping, Closing, Created, Opening, check, lap},
        code, failure_with,
    },
    HostDriver,
    addresses::{length, nonzero, pointer},
    from_errno,
};
use crate::{error::Result, sys::memfd};

impl Bare for HostDriver {
    fn create(&self, _: i32, size: u64) -> Result<Created> {
        self.origin.check()?;
        let memfd = memfd::create(size).map_err(|errno| from_errno("host create", errno))?;
        Ok(Created { by: self.identity, handle: memfd.into_raw_fd() as u64 })
    }

    fn export(&self, created: &Created) -> Result<OwnedFd> {
        self.origin.check()?;
        check("host export", created.by, self.identity)?;
        // SAFETY: the descriptor is open until `release` takes `created`, which is borrowed here, in whichever thread.
        let memfd = unsafe { BorrowedFd::borrow_raw(created.handle as RawFd) };
        let fails = |error| failure_with("host export", code::OPERATING_SYSTEM, Some(error));
        memfd.try_clone_to_owned().map_err(fails)
    }

    fn release(&self, created: Created) -> Result<()> {
        self.origin.check()?;
        check("host release", created.by, self.identity)?;
        // SAFETY: `created` owned the descriptor and is consumed: no other thread has the number.
        drop(unsafe { OwnedFd::from_raw_fd(created.handle as RawFd) });
        Ok(())
    }

    fn open(&self, _: i32, fd: BorrowedFd<'_>, size: u64) -> Result<(BareMapping, Opening)> {
        self.origin.check()?;
        let mut last = Instant::now();
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping that replaces nothing.
        let start = unsafe { mmap(None, nonzero(size), protection, MapFlags::MAP_SHARED, fd.as_fd(), 0) }
            .map_err(|errno| from_errno("host map", errno))?;
        let opening = Opening { map: lap(&mut last), ..Opening::default() };
        Ok((
            BareMapping { by: self.identity, handle: fd.as_raw_fd() as u64, address: start.as_ptr() as u64, size },
            opening,
        ))
    }

    fn close(&self, opened: BareMapping) -> Result<Closing> {
        self.origin.check()?;
        check("host unmap", opened.by, self.identity)?;
        let mut last = Instant::now();
        // SAFETY: the mapping is whole. No table contains it, so no thread accesses it, and `opened`, its only name, is consumed.
        unsafe { munmap(pointer(opened.address), length(opened.size)) }
            .map_err(|errno| from_errno("host unmap", errno))?;
        Ok(Closing { unmap: lap(&mut last), ..Closing::default() })
    }
}
