//! Host memory: checks of the peer's descriptors, and valid or invalid memory to send.

use std::{
    fs::File,
    io,
    ops::Range,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
};

use nix::{
    errno::Errno,
    fcntl::{FallocateFlags, FcntlArg, SealFlag, fallocate, fcntl},
    sys::{
        memfd::{MFdFlags, memfd_create},
        stat::fstat,
        statfs::{HUGETLBFS_MAGIC, fstatfs},
    },
    unistd::ftruncate,
};
use vmmfd::{
    driver::{Access, GRANULARITY},
    error::{Error, Result},
    internals::describe,
    memory::{Chunk, Imported, Placement, Region, Shared, Sharing, Spec},
    wire::{Memory, Offer},
};

use super::{
    CaseResult, Context,
    case_end::{check, violation},
};
use crate::check::{
    figures::Claim,
    pattern::{self, Pattern, Verification},
};

/// The salt of this side's pattern.
pub(super) const SALT: u32 = 0x5EED_1234;

/// Checks a segment's descriptor. `size` is in bytes.
pub(super) fn check_descriptor(fd: BorrowedFd<'_>, size: u64, memory: &Memory) -> CaseResult {
    let system = |errno: Errno| Error::system("inspect a descriptor", errno);
    let seals = match fcntl(fd, FcntlArg::F_GET_SEALS) {
        Ok(seals) => SealFlag::from_bits_retain(seals),
        Err(Errno::EINVAL) => return violation("V1", "sent a descriptor that is not a memfd"),
        Err(errno) => return Err(system(errno).into()),
    };
    if fstatfs(fd).map_err(system)?.filesystem_type() == HUGETLBFS_MAGIC {
        return violation("V1", "sent memory of huge pages");
    }
    let stat = fstat(fd).map_err(system)?;
    let committed = stat.st_blocks * 512;
    check(stat.st_size == size as i64, "V1", || format!("sent a memfd of {} bytes, declared as {size}", stat.st_size))?;
    check(seals.contains(SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_SEAL), "V2", || {
        format!("sent memory with the seals {seals:?}")
    })?;
    check(committed >= stat.st_size, "V3", || format!("committed {committed} of {size} bytes"))?;
    check(!memory.immutable || seals.contains(SealFlag::F_SEAL_WRITE), "V4", || {
        "offered memory as immutable without the write seal".to_owned()
    })
}

/// Verifies the pattern in a range of an object. `start` is the offset of the segments in the object.
pub(super) fn verify(
    context: &Context<'_>,
    segments: &[(OwnedFd, u64)],
    start: u64,
    range: Range<u64>,
    salt: u32,
) -> Result<Verification> {
    let sizes: Vec<u64> = segments.iter().map(|(_, size)| *size).collect();
    let all = sizes.iter().sum();
    let fds = segments.iter().map(|(fd, _)| fd.try_clone()).collect::<io::Result<_>>();
    let fds = fds.map_err(|error| Error::system("duplicate a descriptor", error))?;
    let sharing = Sharing::Vmm { placement: Placement::Device, segments: sizes.len() as u64 };
    let description = describe(context.device.identity(), sharing, all, all);
    let region = Imported::open(context.device, &description, &sizes, fds, Access::ReadOnly)?;
    pattern::verify(&region, start, range, Pattern::new(salt), &mut |_| Ok(()))
}

/// Memory that this side offers.
pub(super) struct TestMemory {
    pub(super) offer: Offer,
    pub(super) segments: Vec<(OwnedFd, u64)>,
    pub(super) shared: Shared,
}

impl TestMemory {
    /// Valid memory that holds zeros, created fast enough for any peer's timeout. Its size is not a multiple of a word.
    pub(super) fn zeros(context: &Context<'_>, segments: u64) -> Result<Self> {
        Self::create(context, segments, false, None)
    }

    /// Valid memory that holds the pattern of [`SALT`], sealed against writing on request.
    pub(super) fn filled(context: &Context<'_>, segments: u64, sealed: bool) -> Result<Self> {
        Self::create(context, segments, sealed, Some(SALT))
    }

    fn create(context: &Context<'_>, segments: u64, sealed: bool, salt: Option<u32>) -> Result<Self> {
        let size = segments * GRANULARITY - 5;
        let spec = match segments {
            1 => Spec::from(Spec::vmm(size)),
            _ => Spec::vmm(size).chunk(GRANULARITY).into(),
        };
        let shared = Shared::create(context.device, if sealed { spec.sealed() } else { spec })?;
        if let Some(salt) = salt {
            pattern::fill(&shared, 0..size, Pattern::new(salt), &mut |_| Ok(()))?;
        }
        if sealed {
            shared.seal()?;
        }
        let Some((part, chunks)) = shared.chunks(0..size)? else {
            return Err(Error::Misuse { problem: "memory without segments".to_owned() });
        };
        let duplicate = |chunk: &Chunk| chunk.as_fd().try_clone_to_owned().map(|fd| (fd, chunk.size()));
        let segments = chunks.iter().map(|chunk| duplicate(chunk)).collect::<io::Result<_>>();
        let segments = segments.map_err(|error| Error::system("duplicate a descriptor", error))?;
        let offer = Offer {
            object: "default".to_owned(),
            memory: (&shared.describe()?).into(),
            array: None,
            access: Access::ReadOnly,
            part: Some(part.into()),
            check: Some(Claim { salt: Some(SALT), ..Claim::default() }.to_check()),
            buffer: None,
        };
        Ok(Self { offer, segments, shared })
    }

    /// The sizes and descriptors of some segments.
    pub(super) fn descriptors(&self, indices: Range<usize>) -> (Vec<u64>, Vec<BorrowedFd<'_>>) {
        self.segments[indices].iter().map(|(fd, size)| (*size, fd.as_fd())).unzip()
    }

    /// Replaces the first segment's descriptor.
    pub(super) fn with_descriptor(mut self, fd: OwnedFd) -> Self {
        self.segments[0].0 = fd;
        self
    }

    /// Replaces the first segment's descriptor by a read-only descriptor of the same memory.
    pub(super) fn reopened_read_only(self) -> Result<Self> {
        let path = format!("/proc/self/fd/{}", self.segments[0].0.as_raw_fd());
        let file = File::open(path).map_err(|error| Error::system("reopen memory read-only", error))?;
        Ok(self.with_descriptor(file.into()))
    }

    /// Whether the whole buffer holds the pattern of a salt.
    pub(super) fn holds(&self, salt: u32) -> Result<bool> {
        let found = pattern::verify(&self.shared, 0, 0..self.shared.size(), Pattern::new(salt), &mut |_| Ok(()))?;
        Ok(found.passed())
    }
}

/// A defect of a memfd.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Flaw {
    None,
    Unsealed,
    SealsNotFinal,
    Sparse,
    Short,
    /// Not a memfd at all.
    NotMemory,
}

/// A memfd as another program might create it, with a defect.
pub(super) fn memfd(size: u64, flaw: Flaw) -> Result<OwnedFd> {
    if flaw == Flaw::NotMemory {
        return not_memory();
    }
    let system = |errno: Errno| Error::system("create a memfd", errno);
    let memfd = memfd_create(c"conform", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING).map_err(system)?;
    let size = size as i64 - if flaw == Flaw::Short { 4096 } else { 0 };
    ftruncate(&memfd, size).map_err(system)?;
    if flaw != Flaw::Sparse {
        fallocate(&memfd, FallocateFlags::empty(), 0, size).map_err(system)?;
    }
    let seals = match flaw {
        Flaw::Unsealed => SealFlag::F_SEAL_SEAL,
        Flaw::SealsNotFinal => SealFlag::F_SEAL_SHRINK,
        _ => SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_SEAL,
    };
    fcntl(&memfd, FcntlArg::F_ADD_SEALS(seals)).map_err(system)?;
    Ok(memfd)
}

pub(super) fn not_memory() -> Result<OwnedFd> {
    File::open("/dev/null").map(Into::into).map_err(|error| Error::system("open /dev/null", error))
}
