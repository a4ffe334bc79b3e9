//! Memory that another process shares, by any mechanism.

use std::{
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
};

use nix::sys::sysinfo::sysinfo;

use super::{
    Allocation, Description, Device, LegacyMemory, Mapping, Part, Placement, Pointer, Pool, PoolBuffer, Region,
    Reservation, Sharing, check_range, pool::check_size,
};
use crate::{
    driver::{Access, Location, code},
    error::{DeviceError, Error, ErrorCode, MemoryError, PeerError, ProtocolError, Result},
};

/// Memory that another process owns and that this one can use. Dropping it closes it.
///
/// [`Region::size`] is the bytes of data; [`Imported::mapped_size`] is what is mapped. Memory that is shared by
/// [`super::Mechanism::Vmm`] stays valid for as long as it lives, also when its owner is gone. Memory of a pool and legacy memory
/// must be dropped before its owner frees it.
#[derive(Debug)]
pub struct Imported {
    memory: Memory,
    /// Where it begins, in bytes of the owner's.
    start: u64,
    /// How many bytes of data it has.
    pub(super) size: u64,
    access: Access,
    pub(super) immutable: bool,
    /// Which NUMA node's CPUs may use it too, if it is host memory: for other memory that comes in its place.
    pub(super) node: Option<i32>,
    /// Whether nothing is mapped: the addresses are kept for memory that comes back.
    pub(super) parked: bool,
}

#[derive(Debug)]
enum Memory {
    Vmm(Mapping),
    /// Of a pool, or legacy: what was offered begins some bytes behind the pointer.
    Opened {
        region: Arc<dyn Region>,
        offset: u64,
        mapped_size: u64,
    },
}

impl Imported {
    /// Opens memory from its description, the sizes of all its segments, and the descriptors that came with it: with
    /// [`Sharing::Vmm`] one for each segment, with [`Sharing::Pool`] the pool's, with [`Sharing::Legacy`] none.
    ///
    /// `device` may be another than the owner's, if it can reach it. The descriptors are closed on success and on failure.
    ///
    /// # Errors
    /// [`PeerError::Protocol`] if the description contradicts itself; [`PeerError::Mismatch`] if the memory is not what it says;
    /// [`DeviceError::NoPeerAccess`] if the device can't reach it; [`DeviceError::Unsupported`] for a mechanism that this side
    /// lacks;
    /// [`MemoryError::OwnHandle`]; [`Error::Driver`].
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
        let want = if description.pool().is_some() { 1 } else { segments.len() };
        if fds.len() != want {
            return nonsense(format!("{want} descriptors belong to this memory, and {} came", fds.len()));
        }
        match description.sharing {
            Sharing::Vmm { .. } => {
                let count = segments.len() as u64;
                let part = Part { first: 0, segments: count, offset: 0, size: description.mapped_size };
                let mut importing = Importing::begin(device, description, &part, access)?;
                importing.take(segments, fds)?;
                importing.finish().map(|(imported, _)| imported)
            }
            Sharing::Pool { .. } => {
                let pool = Self::pool(device, description, fds.remove(0))?;
                Self::of_pool(&pool, description, access)
            }
            Sharing::Legacy { .. } => Self::of_legacy(device, description, access),
        }
    }

    /// Imports the pool that memory is of: once, where several buffers of it come by a channel of the caller's own.
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
        let (pointer, offset) = pointer(description)?;
        check_size(pool.device(), description.mapped_size)?;
        let buffer =
            PoolBuffer::import(pool, &pointer).map_err(|error| not_as_offered(pool.device(), description, error))?;
        Self::opened(buffer, offset, description, access)
    }

    /// Opens a legacy handle.
    ///
    /// # Errors
    /// Those of [`Imported::open`]. Driver calls: those of [`LegacyMemory::open`].
    pub(crate) fn of_legacy(device: &Device, description: &Description, access: Access) -> Result<Self> {
        // What this side lacks comes first.
        device.verbs().legacy()?;
        let (pointer, offset) = pointer(description)?;
        let memory =
            LegacyMemory::open(device, &pointer).map_err(|error| not_as_offered(device, description, error))?;
        Self::opened(memory, offset, description, access)
    }

    fn opened(region: Arc<dyn Region>, offset: u64, description: &Description, access: Access) -> Result<Self> {
        let Description { size, mapped_size, immutable, .. } = *description;
        if size > mapped_size {
            return nonsense(format!("{size} bytes of data in {mapped_size} bytes of memory"));
        }
        // The driver does not know the size that is claimed.
        if check_range(offset, mapped_size, region.size()).is_err() {
            let message = format!(
                "{mapped_size} bytes from {offset} on are claimed of memory that has {} bytes: it is not the memory described",
                region.size()
            );
            return Err(Error::Peer(PeerError::Mismatch { code: ErrorCode::Failed, message }));
        }
        let memory = Memory::Opened { region, offset, mapped_size };
        Ok(Self { memory, start: 0, size, access, immutable, node: None, parked: false })
    }

    /// Where it begins, in bytes of the owner's: 0 unless only a part was asked for.
    pub fn start(&self) -> u64 {
        self.start
    }

    /// How many bytes are mapped: at least [`Region::size`]. What lies behind the data is the owner's padding.
    pub fn mapped_size(&self) -> u64 {
        match &self.memory {
            Memory::Vmm(mapping) => mapping.size(),
            Memory::Opened { mapped_size, .. } => *mapped_size,
        }
    }

    /// Whether nothing is mapped at its addresses, which stay reserved: see `Object::park` of the broker's client. Its
    /// [`Region::size`] is 0 then, so that every access to it is refused.
    pub fn is_parked(&self) -> bool {
        self.parked
    }

    /// How many bytes of data it has, or had when it was parked.
    pub(crate) fn data_size(&self) -> u64 {
        self.size
    }

    /// What is mapped at addresses of its own.
    ///
    /// # Errors
    /// [`Error::Misuse`] for memory of a pool, and for legacy memory.
    pub(super) fn mapping(&mut self) -> Result<&mut Mapping> {
        match &mut self.memory {
            Memory::Vmm(mapping) => Ok(mapping),
            Memory::Opened { .. } => {
                let problem = "memory of a pool and legacy memory have no addresses that can be filled again";
                Err(Error::Misuse { problem: problem.to_owned() })
            }
        }
    }

    /// How many bytes of addresses are reserved for it.
    pub(crate) fn room(&self) -> u64 {
        match &self.memory {
            Memory::Vmm(mapping) => mapping.room(),
            Memory::Opened { .. } => self.mapped_size(),
        }
    }

    /// Whether its owner says that it is never written any more.
    pub fn is_immutable(&self) -> bool {
        self.immutable
    }

    /// Whether it must be dropped before its owner frees it.
    pub fn is_borrowed(&self) -> bool {
        matches!(self.memory, Memory::Opened { .. })
    }
}

impl super::sealed::Sealed for Imported {}

impl Region for Imported {
    fn device(&self) -> &Device {
        match &self.memory {
            Memory::Vmm(mapping) => mapping.device(),
            Memory::Opened { region, .. } => region.device(),
        }
    }

    fn address(&self) -> u64 {
        match &self.memory {
            Memory::Vmm(mapping) => mapping.address(),
            Memory::Opened { region, offset, .. } => region.address() + offset,
        }
    }

    fn size(&self) -> u64 {
        if self.parked { 0 } else { self.size }
    }

    fn access(&self) -> Access {
        self.access
    }

    fn is_protected(&self) -> bool {
        !self.is_borrowed()
    }
}

/// Imports memory of many segments, some at a time: only so many descriptors need be open at once.
///
/// The mapping does not need the handles and descriptors of its segments. They are released when the next segments are taken, or
/// by the caller at the end: it costs about as much as all else, and the peer need not wait for it.
#[derive(Debug)]
pub(crate) struct Importing {
    device: Device,
    description: Description,
    part: Part,
    access: Access,
    /// Whether the pages are copied when this process writes to them.
    private: bool,
    /// None before the first segment is imported: then its size, and so a part of what is claimed, is known to be true.
    mapping: Option<Mapping>,
    /// What the driver must say of each allocation.
    owner: Owner,
    taken: u64,
    /// Of the segments that were taken last.
    remains: Remains,
}

/// What is left of segments that are mapped: their handles and descriptors, which the memory does not need. Dropping it
/// releases and closes them.
#[derive(Debug, Default)]
pub(crate) struct Remains(Vec<(Allocation, Arc<OwnedFd>)>);

impl Remains {
    /// The handles, in the order of the segments.
    pub(super) fn allocations(&self) -> impl Iterator<Item = &Allocation> {
        self.0.iter().map(|(allocation, _)| allocation)
    }
}

/// Whose the memory is, as this process can know it.
#[derive(Debug, Clone, Copy)]
enum Owner {
    Device(i32),
    NotVisible,
    Host,
}

impl Importing {
    /// Checks what is claimed of the segments of a part.
    ///
    /// # Errors
    /// Those of [`Imported::open`]. No driver call for memory.
    pub(crate) fn begin(device: &Device, description: &Description, part: &Part, access: Access) -> Result<Self> {
        let placement = check(device, description, part)?;
        if part.size == 0 {
            return nonsense(format!("a part has no memory: {part}"));
        }
        check_possible(device, description, placement)?;
        let owner = match placement {
            Placement::Host => Owner::Host,
            _ if device.uuid() == description.device.uuid => Owner::Device(device.ordinal()),
            _ => match Device::see(device.driver(), &description.device)? {
                Some(owner) => Owner::Device(owner.ordinal()),
                None => Owner::NotVisible,
            },
        };
        let (device, description, part) = (device.clone(), description.clone(), *part);
        Ok(Self {
            device,
            description,
            part,
            access,
            private: false,
            mapping: None,
            owner,
            taken: 0,
            remains: Remains::default(),
        })
    }

    /// Has it mapped with copy-on-write pages, to read and write: on the host backend alone. Before the first segment is taken.
    pub(crate) fn copy_on_write(self) -> Self {
        Self { private: true, ..self }
    }

    /// Takes the next segments: releases and closes those before, imports these and maps them.
    ///
    /// # Errors
    /// Those of [`Imported::open`].
    ///
    /// Driver calls: `cuMemRelease`; those of [`Allocation::import`], `cuMemAddressReserve` the first time, `cuMemMap`.
    pub(crate) fn take(&mut self, sizes: &[u64], fds: Vec<impl Into<Arc<OwnedFd>>>) -> Result<()> {
        if sizes.len() != fds.len() {
            return nonsense(format!("{} segments came with {} descriptors", sizes.len(), fds.len()));
        }
        self.remains.0.clear();
        self.remains.0.reserve_exact(fds.len());
        for (&size, fd) in sizes.iter().zip(fds) {
            let fd: Arc<OwnedFd> = fd.into();
            let before = self.mapping.as_ref().map_or(0, Region::size);
            let fits = before.checked_add(size).is_some_and(|end| end <= self.part.size);
            if self.taken == self.part.segments || !fits {
                return nonsense(format!("more came than was described: {}", self.part));
            }
            let unfit = |error| not_as_offered(&self.device, &self.description, error);
            let allocation = Allocation::import_borrowed(&self.device, fd.as_fd(), size).map_err(unfit)?;
            self.check_owner(&allocation)?;
            self.check_seal(&allocation)?;
            let mapping = match &mut self.mapping {
                Some(mapping) => mapping,
                empty => {
                    let reservation = Reservation::new(&self.device, self.part.size)?;
                    let mut mapping = Mapping::empty(&reservation, 0, &self.device, self.access)?;
                    if self.private {
                        mapping.make_private();
                    }
                    empty.insert(mapping)
                }
            };
            mapping.push(&allocation).map_err(unfit)?;
            self.taken += 1;
            self.remains.0.push((allocation, fd));
        }
        Ok(())
    }

    /// How many segments are still to come.
    pub(crate) fn missing(&self) -> u64 {
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
        let (said, device) = (self.description.placement(), &self.description.device);
        let found = match location {
            Location::Device(ordinal @ 0..) => format!("device {ordinal} of this process"),
            Location::Device(_) => "a device that this process does not see".to_owned(),
            Location::HostNuma(node) => format!("NUMA node {node}"),
        };
        let message = format!("the driver says that the memory is of {found}, and its description {said} of {device}");
        Err(Error::Peer(PeerError::Mismatch { code: ErrorCode::Device, message }))
    }

    /// Memory that is said to be never written any more must be sealed, where that can be seen: a GPU's driver does not tell.
    fn check_seal(&self, allocation: &Allocation) -> Result<()> {
        if self.description.immutable && self.device.is_host() && !allocation.properties().immutable {
            return nonsense(
                "memory is offered as immutable, and is not sealed against writing (F_SEAL_WRITE)".to_owned(),
            );
        }
        Ok(())
    }

    /// Lets the device use the memory, now that all of it is there. Also returns what can be released later.
    ///
    /// # Errors
    /// Those of [`Imported::open`]. Driver call: `cuMemSetAccess`.
    pub(crate) fn finish(self) -> Result<(Imported, Remains)> {
        let Self { device, description, part, mapping, owner, taken, remains, .. } = self;
        let complete = |mapping: &Mapping| taken == part.segments && mapping.size() == part.size;
        let Some(mapping) = mapping.filter(complete) else {
            return nonsense(format!("{taken} segments came, and not all that was described: {part}"));
        };
        let node = match owner {
            Owner::Host => Some(device.numa_node()?),
            _ => None,
        };
        mapping.allow(node).map_err(|error| not_as_offered(&device, &description, error))?;
        let access = mapping.access();
        let size = description.size.min(part.offset + part.size).saturating_sub(part.offset);
        let (memory, start, immutable) = (Memory::Vmm(mapping), part.offset, description.immutable);
        Ok((Imported { memory, start, size, access, immutable, node, parked: false }, remains))
    }
}

/// More bytes than a process has addresses for: half of 48 bits is the kernel's.
const ADDRESSES: u64 = 1 << 47;

/// More bytes than a device has: 4 TiB, where the largest GPUs have a tenth of that. The driver would say how many only with a context.
const MOST_OF_DEVICE: u64 = 1 << 42;

/// Checks what a description says before it is used. Returns which memory it is.
fn check(device: &Device, description: &Description, part: &Part) -> Result<Placement> {
    let Sharing::Vmm { placement, segments } = description.sharing else {
        return nonsense("segments come with memory that has none".to_owned());
    };
    let Description { size, mapped_size, .. } = *description;
    let granularity = device.granularity()?;
    for size in [mapped_size, part.size, part.offset] {
        if size >= ADDRESSES {
            return nonsense(format!("{size} bytes are offered as mapped, and there are never {ADDRESSES}"));
        }
        if !size.is_multiple_of(granularity) {
            return nonsense(format!(
                "{size} bytes are offered as mapped, where memory comes in units of {granularity}"
            ));
        }
    }
    let behind = |all: u64, before: u64, part: u64| all.checked_sub(before)?.checked_sub(part);
    let pieces = [
        Some((part.first, part.offset)),
        Some((part.segments, part.size)),
        behind(segments, part.first, part.segments).zip(behind(mapped_size, part.offset, part.size)),
    ];
    // Before the part, in it and behind it: bytes are in segments, none of which is empty or smaller than the granularity.
    let possible = |(count, bytes): (u64, u64)| (count == 0) == (bytes == 0) && count <= bytes / granularity;
    if size > mapped_size || !pieces.into_iter().all(|piece| piece.is_some_and(possible)) {
        return nonsense(format!(
            "{part}: that is no part of {size} bytes of data in {mapped_size} bytes of memory in {segments} segments"
        ));
    }
    Ok(placement)
}

/// Refuses memory that no machine could have, before addresses are reserved for it.
fn check_possible(device: &Device, description: &Description, placement: Placement) -> Result<()> {
    let (most, holder) = if placement == Placement::Host || device.is_host() {
        let machine = sysinfo().map_err(|errno| Error::system("ask for the size of the machine's memory", errno))?;
        (machine.ram_total().saturating_add(machine.swap_total()), "this machine has memory and swap space for")
    } else {
        (MOST_OF_DEVICE, "the limit for the memory of a device is")
    };
    match description.mapped_size {
        size if size <= most => Ok(()),
        size => {
            let message = format!("{size} bytes of memory are offered, and {holder} {most}");
            Err(Error::Peer(PeerError::Mismatch { code: ErrorCode::Failed, message }))
        }
    }
}

/// What opens memory of a pool or legacy memory, and where the data begins behind that.
fn pointer(description: &Description) -> Result<(Pointer, u64)> {
    match description.sharing {
        Sharing::Pool { pointer, offset, .. } | Sharing::Legacy { pointer, offset } => Ok((pointer, offset)),
        Sharing::Vmm { .. } => nonsense("memory without the 64 bytes that open it".to_owned()),
    }
}

fn nonsense<T>(message: String) -> Result<T> {
    Err(ProtocolError::Content(message).into())
}

/// Where the driver refuses memory because it is not what the peer claims, the error is the peer's, not the driver's. Where the
/// device can't reach the memory, the error names both.
fn not_as_offered(device: &Device, description: &Description, error: Error) -> Error {
    let (call, code) = match &error {
        Error::Memory(MemoryError::Unaligned { size, granularity }) => {
            let claim = format!("{size} bytes are offered as mapped, where memory comes in units of {granularity}");
            return ProtocolError::Content(claim).into();
        }
        // The host backend has looked at the memory itself, and says what is wrong with it.
        Error::Driver {
            call: "host import", code: code::INVALID_VALUE | code::UNKNOWN, source: Some(reason), ..
        } => {
            return ProtocolError::Content(reason.to_string()).into();
        }
        Error::Driver { call, code, .. } => (*call, *code),
        _ => return error,
    };
    let opens = ["Import", "Open"].iter().any(|part| call.contains(part));
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
        return Error::Device(DeviceError::NoPeerAccess { device, owner, source: Some(Box::new(error)) });
    }
    if !of_the_peer {
        return error;
    }
    let message = format!("what the producer sent is not the memory that it offered: {}", error.in_full());
    Error::Peer(PeerError::Mismatch { code: ErrorCode::Failed, message })
}
