//! Imports memory in batches of segments, and checks it against its description.

use std::{
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
};

use nix::sys::sysinfo::sysinfo;

use super::{
    Allocation, Description, Device, Mapping, Placement, Region, Reservation, Run, Sharing,
    imported::{Imported, ImportedBacking},
    offered::{OpenError, Step, contradiction},
};
use crate::{
    driver::{Access, Location},
    error::{Error, ErrorCode, PeerError, Result},
};

/// Imports memory in batches of segments, so that only the descriptors of one batch are open at a time.
///
/// The mapping does not need the handles and descriptors of its segments. They are released when the next batch is imported. The
/// caller releases the last batch: that takes about as long as the rest, and the peer need not wait for it.
#[derive(Debug)]
pub(crate) struct Importing {
    device: Device,
    description: Description,
    part: Run,
    access: Access,
    /// Whether the pages are copy-on-write.
    private: bool,
    /// `None` before the first segment is imported. No addresses are reserved before a real segment confirms part of the claimed size.
    mapping: Option<Mapping>,
    /// The owner that the driver must report for each allocation.
    owner: Owner,
    /// Number of imported segments.
    taken: u64,
    /// The handles and descriptors of the last batch.
    remains: Remains,
}

/// Handles and descriptors of mapped segments, which the mapping does not need. Dropping it releases the handles and closes the
/// descriptors.
#[derive(Debug, Default)]
pub(crate) struct Remains(Vec<(Allocation, Arc<OwnedFd>)>);

impl Remains {
    /// The handles, in the order of the segments.
    pub(super) fn allocations(&self) -> impl Iterator<Item = &Allocation> {
        self.0.iter().map(|(allocation, _)| allocation)
    }

    /// The sizes of the segments, in order.
    pub(crate) fn sizes(&self) -> impl Iterator<Item = u64> {
        self.allocations().map(Allocation::size)
    }
}

/// The owner of the memory, as visible to this process.
#[derive(Debug, Clone, Copy)]
enum Owner {
    Device(i32),
    NotVisible,
    Host,
}

impl Importing {
    /// Checks the description of a part. Makes no driver call for memory.
    ///
    /// # Errors
    /// The errors of [`Imported::open`].
    pub(crate) fn begin(device: &Device, description: &Description, part: &Run, access: Access) -> Result<Self> {
        let placement = check(device, description, part)?;
        if part.size == 0 {
            return contradiction(format!("a part has no memory: {part}"));
        }
        check_plausible(device, description, placement)?;
        let owner = match placement {
            Placement::Host => Owner::Host,
            _ if device.uuid() == description.device.uuid => Owner::Device(device.ordinal()),
            _ => match Device::find_owner(device.driver(), &description.device)? {
                Some(owner) => Owner::Device(owner.ordinal()),
                None => Owner::NotVisible,
            },
        };
        let device = device.clone();
        let description = description.clone();
        let part = *part;
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

    /// Maps the memory with writable copy-on-write pages. Host backend only. Call it before the first [`Importing::take`].
    pub(crate) fn copy_on_write(self) -> Self {
        Self { private: true, ..self }
    }

    /// Imports and maps the next batch of segments. Releases the handles and descriptors of the previous batch.
    ///
    /// # Errors
    /// The errors of [`Imported::open`].
    ///
    /// Driver calls: `cuMemRelease`; those of [`Allocation::import`], `cuMemAddressReserve` the first time, `cuMemMap`.
    pub(crate) fn take(&mut self, sizes: &[u64], fds: Vec<impl Into<Arc<OwnedFd>>>) -> Result<()> {
        if sizes.len() != fds.len() {
            return contradiction(format!("received {} segments with {} descriptors", sizes.len(), fds.len()));
        }
        self.remains.0.clear();
        self.remains.0.reserve_exact(fds.len());
        for (&size, fd) in sizes.iter().zip(fds) {
            let fd: Arc<OwnedFd> = fd.into();
            let before = self.mapping.as_ref().map_or(0, Region::size);
            let fits = before.checked_add(size).is_some_and(|end| end <= self.part.size);
            if self.taken == self.part.segments || !fits {
                return contradiction(format!("received more memory than described: {}", self.part));
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

    /// The number of missing segments.
    pub(crate) fn missing(&self) -> u64 {
        self.part.segments - self.taken
    }

    /// Checks the description against the driver, which has the final say on the memory's location.
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
        let described = self.description.placement();
        let device = &self.description.device;
        let found = match location {
            Location::Device(ordinal @ 0..) => format!("device {ordinal} of this process"),
            Location::Device(_) => "a device that this process does not see".to_owned(),
            Location::HostNuma(node) => format!("NUMA node {node}"),
        };
        let message =
            format!("the driver reports memory of {found}, but its description says {described} memory of {device}");
        Err(Error::Peer(PeerError::Mismatch { code: ErrorCode::Device, message }))
    }

    /// Checks that memory described as immutable is sealed. Only the host backend can check this: a GPU's driver reports no seals.
    fn check_seal(&self, allocation: &Allocation) -> Result<()> {
        if self.description.immutable && self.device.is_host() && !allocation.properties().immutable {
            return contradiction(
                "the memory is offered as immutable, but is not sealed against writing (F_SEAL_WRITE)".to_owned(),
            );
        }
        Ok(())
    }

    /// Gives the device access to the complete memory. Also returns the last batch's handles and descriptors, to release later.
    ///
    /// # Errors
    /// The errors of [`Imported::open`]. Driver call: `cuMemSetAccess`.
    pub(crate) fn finish(self) -> Result<(Imported, Remains)> {
        let Self { device, description, part, mapping, owner, taken, remains, .. } = self;
        let complete = |mapping: &Mapping| taken == part.segments && mapping.size() == part.size;
        let Some(mapping) = mapping.filter(complete) else {
            return contradiction(format!("received {taken} segments, which is less than described: {part}"));
        };
        let node = match owner {
            Owner::Host => Some(device.numa_node()?),
            _ => None,
        };
        mapping.allow(node).map_err(|error| OpenError::at(Step::Allow)(error).explain(&device, &description))?;
        let access = mapping.access();
        let size = description.size.min(part.offset + part.size).saturating_sub(part.offset);
        let memory = ImportedBacking::Vmm(mapping);
        Ok((Imported { memory, start: part.offset, size, access, node, parked: false }, remains))
    }
}

/// The size of a process's address space: half of 48 bits, because the kernel uses the other half.
const ADDRESSES: u64 = 1 << 47;

/// The size limit for device memory: 4 TiB, ten times the memory of the largest GPUs. Asking the driver would require a context.
const DEVICE_LIMIT: u64 = 1 << 42;

/// Checks a description and a part before they are used. Returns the location of the memory.
fn check(device: &Device, description: &Description, part: &Run) -> Result<Placement> {
    let Sharing::Vmm { placement, segments } = description.sharing else {
        return contradiction("received segments for memory without segments".to_owned());
    };
    let Description { size, mapped_size, .. } = *description;
    let granularity = device.granularity()?;
    for size in [mapped_size, part.size, part.offset] {
        if size >= ADDRESSES {
            return contradiction(format!("a mapped size of {size} bytes exceeds the address space of {ADDRESSES}"));
        }
        if !size.is_multiple_of(granularity) {
            return contradiction(format!("a mapped size of {size} bytes is not a multiple of {granularity}"));
        }
    }
    let behind = |all: u64, before: u64, part: u64| all.checked_sub(before)?.checked_sub(part);
    let pieces = [
        Some((part.first, part.offset)),
        Some((part.segments, part.size)),
        behind(segments, part.first, part.segments).zip(behind(mapped_size, part.offset, part.size)),
    ];
    // Before, in and after the part, each segment has at least `granularity` bytes.
    let possible = |(count, bytes): (u64, u64)| (count == 0) == (bytes == 0) && count <= bytes / granularity;
    if size > mapped_size || !pieces.into_iter().all(|piece| piece.is_some_and(possible)) {
        return contradiction(format!(
            "{part}: not a part of {size} bytes of data in {mapped_size} bytes of memory with {segments} segments"
        ));
    }
    Ok(placement)
}

/// Refuses more memory than the machine or a device can have, before addresses are reserved for it.
fn check_plausible(device: &Device, description: &Description, placement: Placement) -> Result<()> {
    let (limit, name) = if placement == Placement::Host || device.is_host() {
        let machine = sysinfo().map_err(|errno| Error::system("read the size of the machine's memory", errno))?;
        (machine.ram_total().saturating_add(machine.swap_total()), "this machine's memory and swap space")
    } else {
        (DEVICE_LIMIT, "the limit for device memory")
    };
    match description.mapped_size {
        size if size <= limit => Ok(()),
        size => {
            let message = format!("the offered {size} bytes of memory exceed {name} of {limit} bytes");
            Err(Error::Peer(PeerError::Mismatch { code: ErrorCode::Failed, message }))
        }
    }
}
