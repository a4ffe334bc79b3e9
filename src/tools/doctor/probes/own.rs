//! What one process finds out by itself.

use std::{
    fs::{self, File},
    io,
    ops::RangeInclusive,
    os::fd::{AsRawFd, OwnedFd},
    sync::Arc,
    time::Instant,
};

use nix::sys::stat::fstat;

use super::{Bench, Found, micros, timed};
use crate::{
    driver::{Access, Attribute, Granularity, Handle, Location, MadeFor, Properties, Verbs},
    error::{Error, Result},
    memory::{Allocation, Mapping, Region},
    tools::check::pattern::{self, Pattern},
    tools::doctor::{Status, report::Seen},
};

/// What most probes allocate, in bytes, before it is rounded up.
pub(super) const SIZE: u64 = 2 << 20;

/// Every attribute that matters to sharing, by the name that it has in a report.
const ATTRIBUTES: [(&str, Attribute); 9] = [
    ("virtual_memory_management", Attribute::VirtualMemoryManagement),
    ("posix_file_descriptor", Attribute::PosixFileDescriptor),
    ("fabric_handle", Attribute::FabricHandle),
    ("gpu_direct_rdma", Attribute::GpuDirectRdma),
    ("compute_mode", Attribute::ComputeMode),
    ("memory_pools", Attribute::MemoryPools),
    ("pool_handle_types", Attribute::PoolHandleTypes),
    ("host_numa_id", Attribute::HostNumaId),
    ("host_numa_virtual_memory_management", Attribute::HostNumaVirtualMemoryManagement),
];

pub(super) fn attributes(bench: &mut Bench) -> Result<Found> {
    let mut found = Found::ok("What the device claims; what follows tries it.");
    let mut first = None;
    for (name, attribute) in ATTRIBUTES {
        match bench.device.attribute(attribute) {
            Ok(value) => found = found.figure(name, value),
            // An old driver does not know the newest of them.
            Err(error) => first = first.or(Some(error)),
        }
    }
    match first {
        Some(error) if found.figures.is_empty() => Err(error),
        _ => Ok(found),
    }
}

pub(super) fn granularity(bench: &mut Bench) -> Result<Found> {
    let device = &bench.device;
    let location = Location::Device(device.ordinal());
    let properties = Properties { location, exportable: true, immutable: false };
    let minimum = device.verbs().granularity(&properties, Granularity::Minimum)?;
    let recommended = device.verbs().granularity(&properties, Granularity::Recommended)?;
    let meaning = format!("Shared memory comes in multiples of {minimum} bytes.");
    Ok(Found::ok(meaning).figure("minimum_bytes", minimum).figure("recommended_bytes", recommended))
}

pub(super) fn memory(bench: &mut Bench) -> Result<Found> {
    let device = &bench.device;
    let (allocation, create_us) = timed(|| Allocation::create(device, SIZE))?;
    let (mapping, map_us) = timed(|| Mapping::new(&allocation, Access::ReadWrite))?;
    let pattern = Pattern::new(rand::random());
    let begun = Instant::now();
    let good = holds(&mapping, pattern)?;
    if !good {
        return Ok(Found::failed("Memory does not hold the bytes that were copied into it."));
    }
    let found = Found::ok("Memory of the device can be allocated, mapped, written and read.")
        .figure("create_us", create_us)
        .figure("map_us", map_us)
        .figure("copy_us", micros(begun.elapsed()))
        .figure("bytes", allocation.size());
    Ok(match device.memory_info() {
        Ok(info) => found.figure("free_bytes", info.free).figure("total_bytes", info.total),
        Err(_) => found,
    })
}

/// Writes a pattern and reads it back.
fn holds(region: &dyn Region, pattern: Pattern) -> Result<bool> {
    write(region, pattern)?;
    shows(region, pattern)
}

pub(super) fn write(region: &dyn Region, pattern: Pattern) -> Result<()> {
    pattern::fill(region, 0..region.size(), pattern, &mut |_| Ok(()))
}

pub(super) fn shows(region: &dyn Region, pattern: Pattern) -> Result<bool> {
    Ok(pattern::verify(region, 0, 0..region.size(), pattern, &mut |_| Ok(()))?.passed())
}

pub(super) fn export(bench: &mut Bench) -> Result<Found> {
    let allocation = Allocation::create(&bench.device, SIZE)?;
    let (fd, export_us) = timed(|| allocation.export())?;
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let target = fs::read_link(path).map(|target| target.display().to_string());
    let found = Found::ok("Memory can be handed out as a descriptor.").figure("export_us", export_us);
    let found = match target {
        Ok(target) => found.figure("descriptor", target),
        Err(error) => found.figure("descriptor", format!("can't be told: {error}")),
    };
    Ok(match fstat(fd) {
        Ok(stat) => found.figure("mode", format!("{:o}", stat.st_mode)).figure("size_bytes", stat.st_size),
        Err(_) => found,
    })
}

fn duplicate(allocation: &Allocation) -> Result<OwnedFd> {
    let fd = allocation.export()?.try_clone_to_owned();
    fd.map_err(|error| Error::system("duplicate a descriptor", error))
}

pub(super) fn import(bench: &mut Bench) -> Result<Found> {
    let pattern = Pattern::new(rand::random());
    let allocation = Allocation::create(&bench.device, SIZE)?;
    let fd = duplicate(&allocation)?;
    write(&Mapping::new(&allocation, Access::ReadWrite)?, pattern)?;
    let (imported, import_us) = timed(|| Allocation::import(&bench.device, fd, allocation.size()))?;
    let (mapping, map_us) = timed(|| Mapping::new(&imported, Access::ReadOnly))?;
    if !shows(&mapping, pattern)? {
        return Ok(Found::failed("Imported memory does not show what was written before the export."));
    }
    let found = Found::ok("A descriptor becomes the same memory again.");
    Ok(found.figure("import_us", import_us).figure("map_us", map_us))
}

pub(super) fn aliases(bench: &mut Bench) -> Result<Found> {
    let allocation = Allocation::create(&bench.device, SIZE)?;
    let one = Mapping::new(&allocation, Access::ReadWrite)?;
    let other = Mapping::new(&allocation, Access::ReadWrite)?;
    for (writer, reader) in [(&one, &other), (&other, &one)] {
        let pattern = Pattern::new(rand::random());
        write(writer, pattern)?;
        if !shows(reader, pattern)? {
            return Ok(Found::failed(
                "What is written through one mapping does not show in another of the same memory.",
            ));
        }
    }
    Ok(Found::ok("Two mappings of one allocation show the same bytes at once."))
}

pub(super) fn read_only_copy(bench: &mut Bench) -> Result<Found> {
    let allocation = Allocation::create(&bench.device, SIZE)?;
    write(&Mapping::new(&allocation, Access::ReadWrite)?, Pattern::new(1))?;
    let mapping = Mapping::new(&allocation, Access::ReadOnly)?;
    // It must be the writing that is refused.
    let mut bytes = [0; 4];
    mapping.copy_out(0, &mut bytes)?;
    // By the driver's own call: the library would refuse it before.
    match bench.device.verbs().copy_in(bench.device.ordinal(), mapping.address(), &[!bytes[0]]) {
        Ok(()) => Ok(Found::failed("A copy into a read-only mapping went through.")),
        Err(error) if shows(&mapping, Pattern::new(1))? => {
            Ok(Found::ok("The driver refuses a copy into a read-only mapping.").figure("refused", error.in_full()))
        }
        Err(_) => Ok(Found::failed("A copy into a read-only mapping was refused and still changed the bytes.")),
    }
}

/// What a context fails with when a kernel goes wrong: `CUDA_ERROR_ILLEGAL_ADDRESS` to `CUDA_ERROR_LAUNCH_FAILED`.
const FAULTS: RangeInclusive<u32> = 700..=719;

pub(super) fn read_only_store(bench: &mut Bench) -> Result<Found> {
    const VALUE: u32 = 0x5EED_F00D;
    let device = &bench.device;
    let (driver, ordinal) = (device.verbs(), device.ordinal());
    let diagnosis = driver.diagnosis()?;
    let allocation = Allocation::create(device, SIZE)?;
    let writable = Mapping::new(&allocation, Access::ReadWrite)?;
    let read_only = Mapping::new(&allocation, Access::ReadOnly)?;
    // A store that never happens would pass for one that is refused.
    diagnosis.store(ordinal, writable.address(), VALUE)?;
    let mut word = [0; 4];
    read_only.copy_out(0, &mut word)?;
    if word != VALUE.to_le_bytes() {
        return Ok(Found::failed("A kernel's store into a writable mapping does not show in another mapping."));
    }
    match diagnosis.store(ordinal, read_only.address(), !VALUE) {
        Ok(()) => Ok(Found::failed("A kernel's store into a read-only mapping went through.")),
        Err(Error::Driver { code, name, .. }) if FAULTS.contains(&code) => {
            Ok(Found::ok("A kernel's store into a read-only mapping faults.")
                .figure("fault", format!("{name} ({code})")))
        }
        Err(error) => Err(error),
    }
}

pub(super) fn wrong_descriptor(bench: &mut Bench) -> Result<Found> {
    let device = &bench.device;
    let size = device.granularity()?;
    let io = |action: &'static str| move |error: io::Error| Error::system(action, error);
    let null = || File::open("/dev/null").map(OwnedFd::from).map_err(io("open /dev/null"));
    let pipe = || io::pipe().map(|(reader, _)| OwnedFd::from(reader)).map_err(io("make a pipe"));
    let file = || tempfile::tempfile_in(&bench.folder).map(OwnedFd::from).map_err(io("make a temporary file"));
    let mut refusals = Vec::new();
    for (what, fd) in [("/dev/null", null()?), ("a pipe", pipe()?), ("a file", file()?)] {
        match Allocation::import(device, fd, size) {
            Ok(_) => return Ok(Found::failed(format!("{what} was imported as if it were memory."))),
            Err(error) => refusals.push(format!("{what}: {}", Seen::of(&error).message)),
        }
    }
    // The process, and its context, must be as good as before.
    let allocation = Allocation::create(device, SIZE)?;
    if !holds(&Mapping::new(&allocation, Access::ReadWrite)?, Pattern::new(2))? {
        return Ok(Found::failed("After a wrong descriptor memory does not hold its bytes any more."));
    }
    let found = Found::ok("A descriptor that is no such memory is refused, and nothing is harmed.");
    Ok(found.figure("refused", refusals))
}

/// How often an export is measured: the median is told.
const ROUNDS: usize = 5;

pub(super) fn export_cost(bench: &mut Bench) -> Result<Found> {
    let device = &bench.device;
    let cost = || -> Result<u64> {
        let mut times = Vec::new();
        for _ in 0..ROUNDS {
            let allocation: Arc<Allocation> = Allocation::create(device, SIZE)?;
            let (_, us) = timed(|| allocation.export())?;
            times.push(us);
        }
        times.sort_unstable();
        Ok(times[ROUNDS / 2])
    };
    let alone_us = cost()?;
    let held = Allocation::create(device, SIZE)?;
    held.export()?;
    let held_us = cost()?;
    let meaning = match alone_us > held_us.saturating_mul(3) {
        true => "An export is far cheaper while the process holds another exported descriptor open: keep one.",
        false => "An export costs the same whether or not another exported descriptor is held open.",
    };
    Ok(Found::ok(meaning).figure("alone_us", alone_us).figure("held_us", held_us))
}

/// Memory that is not of [`Allocation`]'s kind. Dropping it gives it back.
struct Made<'a> {
    driver: &'a dyn Verbs,
    handle: Handle,
    size: u64,
    reserved: Option<u64>,
    mapped: Option<u64>,
}

impl<'a> Made<'a> {
    fn create(bench: &'a Bench, made_for: MadeFor) -> Result<Self> {
        let (driver, ordinal) = (bench.device.verbs(), bench.device.ordinal());
        let size = SIZE.next_multiple_of(bench.device.granularity()?);
        let handle = driver.diagnosis()?.create_with(ordinal, size, made_for)?;
        Ok(Self { driver, handle, size, reserved: None, mapped: None })
    }

    fn map(&mut self, ordinal: i32) -> Result<u64> {
        let address = self.driver.reserve(self.size, 0)?;
        self.reserved = Some(address);
        self.driver.map(address, self.size, 0, self.handle)?;
        self.mapped = Some(address);
        self.driver.set_access(address, self.size, Location::Device(ordinal), Some(Access::ReadWrite))?;
        Ok(address)
    }
}

impl Drop for Made<'_> {
    fn drop(&mut self) {
        let unmapped = self.mapped.map_or(Ok(()), |address| self.driver.unmap(address, self.size));
        let freed = self.reserved.map_or(Ok(()), |address| self.driver.free(address, self.size));
        for error in [unmapped, freed, self.driver.release(self.handle)].into_iter().filter_map(Result::err) {
            tracing::error!(%error, "a probe's memory can't be given back");
        }
    }
}

pub(super) fn dma_buf(bench: &mut Bench) -> Result<Found> {
    let ordinal = bench.device.ordinal();
    let mut made = Made::create(bench, MadeFor::Rdma)?;
    let address = made.map(ordinal)?;
    let (fd, export_us) = timed(|| made.driver.diagnosis()?.export_dma_buf(ordinal, address, made.size))?;
    let stat = fstat(&fd).map_err(|errno| Error::system("look at a dma-buf", errno))?;
    let found = Found::ok("Memory can be handed to devices of other makers as a dma-buf.");
    Ok(found.figure("export_us", export_us).figure("size_bytes", stat.st_size))
}

pub(super) fn fabric(bench: &mut Bench) -> Result<Found> {
    let made = match Made::create(bench, MadeFor::Fabric) {
        Err(error)
            if Seen::of(&error).is_lacking()
                && bench.device.attribute(Attribute::FabricHandle).is_ok_and(|on| on != 0) =>
        {
            let meaning = "The device claims fabric handles, and the driver makes none: attributes are claims.";
            return Ok(Found::of(Status::Unsupported, meaning).with(Seen::of(&error)));
        }
        made => made?,
    };
    let (_, export_us) = timed(|| made.driver.diagnosis()?.export_fabric(made.handle))?;
    Ok(Found::ok("Memory can be handed to other machines of the fabric.").figure("export_us", export_us))
}
