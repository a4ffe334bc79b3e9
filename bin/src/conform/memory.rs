//! Host memory: what the other end sends is looked at, and what this side sends is sound or not, as a case wants it.

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
    memory::{Imported, Placement, Region, Shared, Sharing, Spec},
    wire::{Memory, Offer},
};

use super::{Scene, fault::Fault};
use crate::check::{
    figures::Claim,
    pattern::{self, Pattern, Verification},
};

/// The salt of this side's pattern.
pub(super) const SALT: u32 = 0x5EED_1234;

/// Looks at a descriptor that belongs to an offer.
pub(super) fn inspect(fd: BorrowedFd<'_>, size: u64, memory: &Memory) -> Result<(), Fault> {
    let system = |errno: Errno| Fault::Failed(Error::system("look at a descriptor", errno));
    let seals = match fcntl(fd, FcntlArg::F_GET_SEALS) {
        Ok(seals) => SealFlag::from_bits_retain(seals),
        Err(Errno::EINVAL) => return Fault::broken("V1", "sent a descriptor that is no memfd"),
        Err(errno) => return Err(system(errno)),
    };
    if fstatfs(fd).map_err(system)?.filesystem_type() == HUGETLBFS_MAGIC {
        return Fault::broken("V1", "sent memory of huge pages");
    }
    let stat = fstat(fd).map_err(system)?;
    if stat.st_size != size as i64 {
        return Fault::broken("V1", format!("sent {} bytes where {size} are named", stat.st_size));
    }
    if !seals.contains(SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_SEAL) {
        return Fault::broken("V2", format!("sent memory whose seals are {seals:?}"));
    }
    let committed = stat.st_blocks * 512;
    if committed < stat.st_size {
        return Fault::broken("V3", format!("committed {committed} of {size} bytes"));
    }
    if memory.immutable && !seals.contains(SealFlag::F_SEAL_WRITE) {
        return Fault::broken("V4", "offered as immutable what is not sealed against writing");
    }
    Ok(())
}

/// What the pattern's check of a range finds, in segments that came: `start` is the object's byte with which they begin.
pub(super) fn verify(
    scene: &Scene<'_>,
    segments: &[(OwnedFd, u64)],
    start: u64,
    range: Range<u64>,
    salt: u32,
) -> Result<Verification> {
    let sizes: Vec<u64> = segments.iter().map(|(_, size)| *size).collect();
    let all = sizes.iter().sum();
    let fds = segments.iter().map(|(fd, _)| fd.try_clone()).collect::<io::Result<_>>();
    let fds = fds.map_err(|error| Error::system("duplicate a descriptor", error))?;
    let placement = Placement::Device;
    let sharing = Sharing::Vmm { placement, segments: sizes.len() as u64 };
    let description = describe(scene.device.identity(), sharing, all, all);
    let region = Imported::open(scene.device, &description, &sizes, fds, Access::ReadOnly)?;
    pattern::verify(&region, start, range, Pattern::new(salt), &mut |_| Ok(()))
}

/// Memory that this side offers.
pub(super) struct Lending {
    pub(super) offer: Offer,
    pub(super) segments: Vec<(OwnedFd, u64)>,
    /// What owns it, where this library does.
    pub(super) shared: Option<Shared>,
}

impl Lending {
    /// Sound memory in so many segments, which holds zeros: to make it takes no longer than any peer waits. Its size is not a
    /// multiple of a word.
    pub(super) fn new(scene: &Scene<'_>, segments: u64) -> Result<Self> {
        Self::with(scene, segments, false, None)
    }

    /// As [`Lending::new`], with the pattern of [`SALT`] in it, perhaps sealed against writing.
    pub(super) fn filled(scene: &Scene<'_>, segments: u64, sealed: bool) -> Result<Self> {
        Self::with(scene, segments, sealed, Some(SALT))
    }

    fn with(scene: &Scene<'_>, segments: u64, sealed: bool, salt: Option<u32>) -> Result<Self> {
        let size = segments * GRANULARITY - 5;
        let spec = match segments {
            1 => Spec::from(Spec::vmm(size)),
            _ => Spec::vmm(size).chunk(GRANULARITY).into(),
        };
        let shared = Shared::create(scene.device, if sealed { spec.sealed() } else { spec })?;
        if let Some(salt) = salt {
            pattern::fill(&shared, 0..size, Pattern::new(salt), &mut |_| Ok(()))?;
        }
        if sealed {
            shared.seal()?;
        }
        let Some((part, chunks)) = shared.chunks(0..size)? else {
            return Err(Error::Misuse { problem: "memory without segments".to_owned() });
        };
        let duplicate = |chunk: &vmmfd::memory::Chunk| chunk.as_fd().try_clone_to_owned().map(|fd| (fd, chunk.size()));
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
        Ok(Self { offer, segments, shared: Some(shared) })
    }

    /// Memory of one segment whose descriptor is another.
    pub(super) fn with_descriptor(mut self, fd: OwnedFd) -> Self {
        self.segments[0].0 = fd;
        self
    }

    /// Memory of one segment whose descriptor is open for reading alone.
    pub(super) fn for_reading(self) -> Result<Self> {
        let path = format!("/proc/self/fd/{}", self.segments[0].0.as_raw_fd());
        let file = File::open(path).map_err(|error| Error::system("open memory for reading", error))?;
        Ok(self.with_descriptor(file.into()))
    }
}

/// What may be wrong with a memfd.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Flaw {
    None,
    Unsealed,
    SealsNotFinal,
    Sparse,
    Short,
}

/// A memfd of the pattern's first bytes, as another program might have made it.
pub(super) fn memfd(size: u64, flaw: Flaw) -> Result<OwnedFd> {
    let system = |errno: Errno| Error::system("make a memfd", errno);
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

/// A file that is no memory.
pub(super) fn not_memory() -> Result<OwnedFd> {
    File::open("/dev/null").map(Into::into).map_err(|error| Error::system("open /dev/null", error))
}

/// Whether all of a buffer holds the pattern of another salt: a reply.
pub(super) fn holds(shared: &Shared, salt: u32) -> Result<bool> {
    let found = pattern::verify(shared, 0, 0..shared.size(), Pattern::new(salt), &mut |_| Ok(()))?;
    Ok(found.passed())
}
