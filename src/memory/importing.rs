//! Imports memory of many segments, some at a time, and checks it against its description.

use std::{
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
};

use nix::sys::sysinfo::sysinfo;

use super::{
    Allocation, Description, Device, Mapping, Part, Placement, Region, Reservation, Sharing,
    imported::{Imported, ImportedBacking},
    offered::{OpenError, Step, nonsense},
};
use crate::{
    driver::{Access, Location},
    error::{Error, ErrorCode, PeerError, Result},
};

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
            let allocation = Allocation::import_offered(&self.device, fd.as_fd(), size)
                .map_err(|error| error.explain(&self.device, &self.description))?;
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
            mapping
                .push(&allocation)
                .map_err(|error| OpenError::at(Step::Map)(error).explain(&self.device, &self.description))?;
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
        mapping.allow(node).map_err(|error| OpenError::at(Step::Allow)(error).explain(&device, &description))?;
        let access = mapping.access();
        let size = description.size.min(part.offset + part.size).saturating_sub(part.offset);
        let (memory, start, immutable) = (ImportedBacking::Vmm(mapping), part.offset, description.immutable);
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
