//! Memory that another process gave, whichever way it travelled.

use std::{
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
};

use super::{Allocation, Device, LegacyMemory, Mapping, Pool, PoolBuffer, Region, Reservation, pool::check_size};
use crate::{
    driver::{Access, Location, code},
    error::{Error, ErrorCode, ProtocolError, Result},
    wire::{Description, Mechanism, Part, Placement, Pointer},
};

/// Memory that another process owns and that this one can use. Dropping it lets go of it.
///
/// With [`Mechanism::Vmm`] it stays valid for as long as it lives, also when its owner is gone. Memory of a pool and legacy
/// memory must be let go of before its owner frees it.
#[derive(Debug)]
pub struct Imported {
    memory: Memory,
    /// Where it begins, in bytes of the owner's.
    start: u64,
    access: Access,
    immutable: bool,
}

#[derive(Debug)]
enum Memory {
    /// One mapping behind the other.
    Vmm { mappings: Vec<Mapping>, reservation: Arc<Reservation>, device: Device, segments: u64 },
    /// Of a pool, or legacy: what is asked for begins some bytes behind the pointer.
    Opened { region: Arc<dyn Region>, offset: u64, size: u64 },
}

impl Imported {
    /// Opens memory from its description, all its segments, and the descriptors that came with them: with
    /// [`Mechanism::Vmm`] one for each segment, with [`Mechanism::Pool`] the pool's, with [`Mechanism::Legacy`] none.
    ///
    /// `device` may be another than the owner's, if it can reach it. The descriptors are closed on success and on failure.
    ///
    /// # Errors
    /// [`Error::Protocol`] if the description contradicts itself; [`Error::Mismatch`] if the memory is not what it says;
    /// [`Error::NoPeerAccess`] if the device can't reach it; [`Error::Unsupported`] for a mechanism that this side lacks;
    /// [`Error::OwnHandle`]; [`Error::Driver`].
    ///
    /// Driver calls: those of [`Allocation::import`] and [`Mapping::side_by_side`]; of [`Pool::import`] and
    /// [`PoolBuffer::import`]; of [`LegacyMemory::open`].
    pub fn open(
        device: &Device,
        description: &Description,
        segments: &[u64],
        mut fds: Vec<OwnedFd>,
        access: Access,
    ) -> Result<Self> {
        let want = if description.mechanism == Mechanism::Pool { 1 } else { segments.len() };
        if fds.len() != want {
            return nonsense(format!("{want} descriptors belong to this memory, and {} came", fds.len()));
        }
        match description.mechanism {
            Mechanism::Vmm => {
                let count = segments.len() as u64;
                let part = Part { first: 0, segments: count, offset: 0, size: description.mapped_size };
                let mut importing = Importing::begin(device, description, &part, access)?;
                importing.take(segments, fds)?;
                importing.finish()
            }
            Mechanism::Pool => {
                let pool = Self::pool(device, description, fds.remove(0))?;
                Self::of_pool(&pool, description, access)
            }
            _ => Self::of_legacy(device, description, access),
        }
    }

    /// Imports the pool that memory is of: once, for all memory of it.
    ///
    /// # Errors
    /// Those of [`Imported::open`]. Driver calls: those of [`Pool::import`].
    pub fn pool(device: &Device, description: &Description, fd: OwnedFd) -> Result<Arc<Pool>> {
        Pool::import(device, fd).map_err(|error| not_as_offered(device, description, error))
    }

    /// Opens memory of a pool that was imported before.
    ///
    /// # Errors
    /// Those of [`Imported::open`]. Driver calls: those of [`PoolBuffer::import`].
    pub fn of_pool(pool: &Arc<Pool>, description: &Description, access: Access) -> Result<Self> {
        let pointer = pointer(description)?;
        check_size(pool.device(), description.mapped_size)?;
        let buffer =
            PoolBuffer::import(pool, &pointer).map_err(|error| not_as_offered(pool.device(), description, error))?;
        Self::opened(buffer, description, access)
    }

    /// Opens a legacy handle.
    ///
    /// # Errors
    /// Those of [`Imported::open`]. Driver calls: those of [`LegacyMemory::open`].
    pub fn of_legacy(device: &Device, description: &Description, access: Access) -> Result<Self> {
        if description.mechanism != Mechanism::Legacy {
            let feature = "a mechanism that this version does not know";
            return Err(Error::Unsupported { device: device.to_string(), feature });
        }
        // What this side lacks comes first.
        device.verbs().legacy()?;
        let pointer = pointer(description)?;
        let memory =
            LegacyMemory::open(device, &pointer).map_err(|error| not_as_offered(device, description, error))?;
        Self::opened(memory, description, access)
    }

    fn opened(region: Arc<dyn Region>, description: &Description, access: Access) -> Result<Self> {
        let (offset, size) = (description.offset, description.mapped_size);
        if description.size > size {
            return nonsense(format!("{} bytes of data in {size} bytes of memory", description.size));
        }
        // The driver was never told the size that is claimed.
        if offset.checked_add(size).is_none_or(|end| end > region.size()) {
            let message = format!(
                "{size} bytes from {offset} on are claimed of memory that has {} bytes: it is not the memory described",
                region.size()
            );
            return Err(Error::Mismatch { code: ErrorCode::Failed, message });
        }
        let memory = Memory::Opened { region, offset, size };
        Ok(Self { memory, start: 0, access, immutable: description.immutable })
    }

    /// Where it begins, in bytes of the owner's: 0 unless only a part was asked for.
    pub fn start(&self) -> u64 {
        self.start
    }

    /// How many of the owner's segments it has, from the first on; `None` if it begins with another, or has none.
    pub fn segments(&self) -> Option<u64> {
        match &self.memory {
            Memory::Vmm { segments, .. } if self.start == 0 => Some(*segments),
            _ => None,
        }
    }

    /// Whether its owner says that it is never written any more.
    pub fn is_immutable(&self) -> bool {
        self.immutable
    }

    /// Whether it must be let go of before its owner frees it.
    pub fn is_borrowed(&self) -> bool {
        matches!(self.memory, Memory::Opened { .. })
    }

    /// Adds segments that were imported behind these. See [`Importing::behind`].
    fn append(&mut self, mapping: Mapping, added: u64) {
        if let Memory::Vmm { mappings, segments, .. } = &mut self.memory {
            mappings.push(mapping);
            *segments += added;
        }
    }
}

impl super::sealed::Sealed for Imported {}

impl Region for Imported {
    fn device(&self) -> &Device {
        match &self.memory {
            Memory::Vmm { device, .. } => device,
            Memory::Opened { region, .. } => region.device(),
        }
    }

    fn address(&self) -> u64 {
        match &self.memory {
            Memory::Vmm { reservation, .. } => reservation.address(),
            Memory::Opened { region, offset, .. } => region.address() + offset,
        }
    }

    fn size(&self) -> u64 {
        match &self.memory {
            Memory::Vmm { mappings, .. } => mappings.iter().map(Region::size).sum(),
            Memory::Opened { size, .. } => *size,
        }
    }

    fn access(&self) -> Access {
        self.access
    }

    fn is_protected(&self) -> bool {
        !self.is_borrowed()
    }
}

/// Memory of many segments on its way in, some at a time: only so many descriptors need be open at once.
///
/// What a mapping needs no more, the handles and descriptors of the segments that came last, is let go of when the next ones
/// are taken, or once the device may use the memory: it costs about as much as all else, and nobody has to wait for it.
#[derive(Debug)]
pub struct Importing {
    device: Device,
    description: Description,
    part: Part,
    reservation: Arc<Reservation>,
    mapping: Mapping,
    /// What the driver must say of each allocation.
    owner: Owner,
    taken: u64,
    /// Of the segments that were taken last.
    remains: Remains,
}

/// What is left of segments that are mapped: their handles and descriptors, which the memory does not need. Dropping it
/// releases and closes them.
#[derive(Debug, Default)]
pub(crate) struct Remains(Vec<(Allocation, OwnedFd)>);

/// Whose the memory is, as this process can know it.
#[derive(Debug, Clone, Copy)]
enum Owner {
    Device(i32),
    NotVisible,
    Host,
}

impl Importing {
    /// Makes room for the segments of a part.
    ///
    /// # Errors
    /// Those of [`Imported::open`]. Driver call: `cuMemAddressReserve`.
    pub fn begin(device: &Device, description: &Description, part: &Part, access: Access) -> Result<Self> {
        check(device, description, part)?;
        let granularity = device.granularity()?;
        if part.size == 0 {
            return nonsense(format!("{part:?} has no memory"));
        }
        // If it may grow, room for that too, within reason and where there is any: other segments will follow these.
        let capacity = description.capacity.unwrap_or(0).clamp(part.size, part.size.saturating_add(MOST_ROOM));
        let capacity = capacity / granularity * granularity;
        let size = if part.size == description.mapped_size { capacity } else { part.size };
        let reservation = match Reservation::new(device, size) {
            Err(_) if size > part.size => Reservation::new(device, part.size)?,
            result => result?,
        };
        Self::at(reservation, 0, device, description, part, access)
    }

    /// Makes ready for the segments that follow those of memory imported before.
    ///
    /// # Errors
    /// Those of [`Imported::open`]; [`Error::OutOfRange`] if there is no room behind it.
    pub fn behind(imported: &Imported, description: &Description, part: &Part) -> Result<Self> {
        let Memory::Vmm { reservation, device, segments, .. } = &imported.memory else {
            return nonsense("segments follow memory that has none".to_owned());
        };
        if imported.start != 0 || part.first != *segments || part.offset != imported.size() {
            return nonsense(format!("{part:?} does not follow {segments} segments of {} bytes", imported.size()));
        }
        check(device, description, part)?;
        Self::at(Arc::clone(reservation), imported.size(), device, description, part, imported.access)
    }

    fn at(
        reservation: Arc<Reservation>,
        offset: u64,
        device: &Device,
        description: &Description,
        part: &Part,
        access: Access,
    ) -> Result<Self> {
        let mapping = Mapping::empty(&reservation, offset, device, access)?;
        let owner = match description.location {
            Placement::Host => Owner::Host,
            _ if device.uuid() == description.device.uuid => Owner::Device(device.ordinal()),
            _ => match Device::see(device.driver(), &description.device)? {
                Some(owner) => Owner::Device(owner.ordinal()),
                None => Owner::NotVisible,
            },
        };
        let (device, description, part) = (device.clone(), description.clone(), *part);
        Ok(Self { device, description, part, reservation, mapping, owner, taken: 0, remains: Remains::default() })
    }

    /// Takes the next segments: releases and closes those taken before, imports these and maps them.
    ///
    /// # Errors
    /// Those of [`Imported::open`].
    ///
    /// Driver calls: `cuMemRelease`; those of [`Allocation::import`], `cuMemMap`.
    pub fn take(&mut self, sizes: &[u64], fds: Vec<OwnedFd>) -> Result<()> {
        if sizes.len() != fds.len() {
            return nonsense(format!("{} segments came with {} descriptors", sizes.len(), fds.len()));
        }
        self.remains.0.clear();
        self.remains.0.reserve_exact(fds.len());
        for (&size, fd) in sizes.iter().zip(fds) {
            let fits = self.mapping.size().checked_add(size).is_some_and(|end| end <= self.part.size);
            if self.taken == self.part.segments || !fits {
                return nonsense(format!("more segments came than the {:?} that were described", self.part));
            }
            let unfit = |error| not_as_offered(&self.device, &self.description, error);
            let allocation = Allocation::import_borrowed(&self.device, fd.as_fd(), size).map_err(unfit)?;
            self.check_owner(&allocation)?;
            self.mapping.push(&allocation).map_err(unfit)?;
            self.taken += 1;
            self.remains.0.push((allocation, fd));
        }
        Ok(())
    }

    /// How many segments are still to come.
    pub fn missing(&self) -> u64 {
        self.part.segments - self.taken
    }

    /// The driver must say the same of the memory as its description: what it says decides.
    fn check_owner(&self, allocation: &Allocation) -> Result<()> {
        let location = allocation.properties().location;
        let fits = match (self.owner, location) {
            // The host backend has one kind of memory.
            (Owner::Host, Location::HostNuma(_)) => true,
            (Owner::Host, Location::Device(_)) => self.device.is_host(),
            (Owner::Device(ordinal), Location::Device(of)) => of == ordinal,
            (Owner::NotVisible, Location::Device(of)) => of < 0,
            _ => false,
        };
        if fits {
            return Ok(());
        }
        let Description { device, location: said, .. } = &self.description;
        let message =
            format!("the driver says that the memory is at {location:?}, and its description {said} of {device}");
        Err(Error::Mismatch { code: ErrorCode::Device, message })
    }

    fn mapped(self) -> Result<Self> {
        if self.missing() > 0 || self.mapping.size() != self.part.size {
            let got = (self.taken, self.mapping.size());
            return nonsense(format!("{:?} was described, and {} segments of {} bytes came", self.part, got.0, got.1));
        }
        if self.taken > 0 {
            let node = match self.owner {
                Owner::Host => Some(self.device.numa_node()?),
                _ => None,
            };
            self.mapping.allow(node).map_err(|error| not_as_offered(&self.device, &self.description, error))?;
        }
        Ok(self)
    }

    /// Lets the device use the memory, now that all of it is there, and lets go of what it does not need.
    ///
    /// # Errors
    /// Those of [`Imported::open`]. Driver calls: `cuMemSetAccess`, `cuMemRelease`.
    pub fn finish(self) -> Result<Imported> {
        self.finish_first().map(|(imported, _)| imported)
    }

    /// As [`Importing::finish`], for a caller who has more urgent things to do than to let go of the rest.
    pub(crate) fn finish_first(self) -> Result<(Imported, Remains)> {
        let Self { device, description, part, reservation, mapping, remains, .. } = self.mapped()?;
        let access = mapping.access();
        let segments = part.first + part.segments;
        let memory = Memory::Vmm { mappings: vec![mapping], reservation, device, segments };
        Ok((Imported { memory, start: part.offset, access, immutable: description.immutable }, remains))
    }

    /// As [`Importing::finish`], for segments behind memory imported before, which then has them too.
    ///
    /// # Errors
    /// Those of [`Importing::finish`].
    pub fn finish_behind(self, imported: &mut Imported) -> Result<()> {
        let Self { part, mapping, .. } = self.mapped()?;
        imported.append(mapping, part.segments);
        Ok(())
    }
}

/// How many more bytes of addresses than the memory has are reserved for it to grow, at most: the peer names the capacity.
const MOST_ROOM: u64 = 1 << 40;

/// More bytes than any process has addresses for.
const ADDRESSES: u64 = 1 << 56;

/// What a description must be, before anything is done with it.
fn check(device: &Device, description: &Description, part: &Part) -> Result<()> {
    if description.mechanism != Mechanism::Vmm || description.location == Placement::Unknown {
        let message = "the memory is of a kind that this version does not know".to_owned();
        return Err(Error::Mismatch { code: ErrorCode::Failed, message });
    }
    let Description { size, mapped_size, segments, .. } = *description;
    let granularity = device.granularity()?;
    for size in [mapped_size, part.size, part.offset] {
        if !size.is_multiple_of(granularity) || size > ADDRESSES {
            return nonsense(format!(
                "{size} bytes are offered as mapped, where memory comes in units of {granularity}"
            ));
        }
    }
    let possible = segments <= mapped_size / granularity;
    let whole = part.segments < segments || part.size == mapped_size;
    let inside = part.offset.checked_add(part.size).is_some_and(|end| end <= mapped_size);
    let counted = part.first.checked_add(part.segments).is_some_and(|end| end <= segments);
    let empty = (part.size == 0) == (part.segments == 0);
    if size > mapped_size || !(inside && counted && whole && possible && empty) {
        return nonsense(format!(
            "{part:?} of {size} bytes of data in {mapped_size} bytes of memory, {segments} segments"
        ));
    }
    Ok(())
}

fn pointer(description: &Description) -> Result<Pointer> {
    description.pointer.map_or_else(|| nonsense("memory without the 64 bytes that open it".to_owned()), Ok)
}

fn nonsense<T>(message: String) -> Result<T> {
    Err(ProtocolError::Content(message).into())
}

/// What the driver says of memory that is not what the peer claims is the peer's failure, not the driver's; and what a
/// device can't reach is told with both names.
fn not_as_offered(device: &Device, description: &Description, error: Error) -> Error {
    let (call, code) = match &error {
        Error::Unaligned { size, granularity } => {
            let claim = format!("{size} bytes are offered as mapped, where memory comes in units of {granularity}");
            return ProtocolError::Content(claim).into();
        }
        Error::Driver { call, code, .. } => (*call, *code),
        _ => return error,
    };
    let opens = ["Import", "Open", "host import"].iter().any(|part| call.contains(part));
    let maps = ["cuMemMap", "host map"].contains(&call);
    let allows = ["cuMemSetAccess", "host set_access"].contains(&call);
    let reaches = device.uuid() == description.device.uuid;
    let of_the_peer = match code {
        code::INVALID_VALUE => opens || maps || allows,
        code::NOT_SUPPORTED => opens || maps,
        code::UNKNOWN | code::INVALID_HANDLE => opens,
        _ => false,
    };
    let out_of_reach = [code::INVALID_DEVICE, code::PEER_ACCESS_UNSUPPORTED].contains(&code);
    if !reaches && (out_of_reach || (allows && code == code::INVALID_VALUE)) {
        let (device, owner) = (device.to_string(), description.device.to_string());
        return Error::NoPeerAccess { device, owner, source: Some(Box::new(error)) };
    }
    if !of_the_peer {
        return error;
    }
    let message = format!("what the producer sent is not the memory that it offered: {}", error.in_full());
    Error::Mismatch { code: ErrorCode::Failed, message }
}
