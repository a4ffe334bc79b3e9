//! Probes within one process.

use std::{
    fs::{self, File},
    io,
    ops::RangeInclusive,
    os::fd::{AsRawFd, OwnedFd},
};

use nix::sys::stat::fstat;
use vmmfd::{
    driver::{Access, Attribute},
    internals::{Granularity, Handle, Location, MadeFor, Properties, Verbs, nvml},
    memory::{Allocation, Mapping, Region},
    session::order::Timeline,
};

use crate::{
    check::pattern::{self, Pattern, random_salt},
    doctor::{
        prelude::*,
        report::{micros, skipped, timed, unsupported},
    },
    units::bytes,
};

/// The allocation size of most probes in bytes, before rounding up.
pub(super) const SIZE: u64 = 2 << 20;

/// Attributes relevant to sharing, with their names in a report.
const ATTRIBUTES: [(&str, Attribute); 11] = [
    ("virtual_memory_management", Attribute::VirtualMemoryManagement),
    ("posix_file_descriptor", Attribute::PosixFileDescriptor),
    ("fabric_handle", Attribute::FabricHandle),
    ("gpu_direct_rdma", Attribute::GpuDirectRdma),
    ("compute_mode", Attribute::ComputeMode),
    ("memory_pools", Attribute::MemoryPools),
    ("pool_handle_types", Attribute::PoolHandleTypes),
    ("host_numa_id", Attribute::HostNumaId),
    ("host_numa_virtual_memory_management", Attribute::HostNumaVirtualMemoryManagement),
    ("stream_memory_operations", Attribute::StreamMemoryOperations),
    ("mps", Attribute::Mps),
];

pub(super) fn attributes(context: &mut ProbeContext) -> ProbeResult {
    let mut finding = ok("The attributes that the device claims; the other probes test them.");
    let mut first = None;
    for (name, attribute) in ATTRIBUTES {
        match context.device.attribute(attribute) {
            Ok(value) => finding = finding.figure(name, value),
            // An old driver does not know the newest attributes.
            Err(error) => first = first.or(Some(error)),
        }
    }
    match first {
        Some(error) if finding.figures.is_empty() => Err(error.into()),
        _ => Ok(finding),
    }
}

/// Without MPS, each wait for another process's stream on the same device costs a switch between their contexts.
pub(super) fn order(context: &mut ProbeContext) -> ProbeResult {
    let (_, test_us) = timed(|| Timeline::create(&context.device))?;
    let has_mps = context.device.attribute(Attribute::Mps).unwrap_or(0) != 0;
    let meaning = match has_mps {
        true => "Streams of several processes order their work on the GPU, which they share by MPS.",
        false => {
            "Streams of several processes order their work on the GPU, which switches between them: MPS does not run."
        }
    };
    Ok(ok(meaning).figure("test_us", test_us).figure("mps", has_mps))
}

pub(super) fn granularity(context: &mut ProbeContext) -> ProbeResult {
    let device = &context.device;
    let location = Location::Device(device.ordinal());
    let properties = Properties { location, exportable: true, immutable: false, gpu_direct_rdma: false };
    let minimum = device.verbs().granularity(&properties, Granularity::Minimum)?;
    let recommended = device.verbs().granularity(&properties, Granularity::Recommended)?;
    let meaning = format!("Shared memory comes in multiples of {}.", bytes(minimum));
    Ok(ok(meaning).figure("minimum_bytes", minimum).figure("recommended_bytes", recommended))
}

pub(super) fn memory(context: &mut ProbeContext) -> ProbeResult {
    let device = &context.device;
    let (allocation, create_us) = timed(|| Allocation::create(device, SIZE))?;
    let (mapping, map_us) = timed(|| Mapping::new(&allocation, Access::ReadWrite))?;
    let pattern = Pattern::new(random_salt()?);
    let started = Instant::now();
    let good = keeps_pattern(&mapping, pattern)?;
    if !good {
        return Ok(failed("Memory does not hold the bytes that were copied into it."));
    }
    let finding = ok("Memory of the device can be allocated, mapped, written and read.")
        .figure("create_us", create_us)
        .figure("map_us", map_us)
        .figure("copy_us", micros(started.elapsed()))
        .figure("bytes", allocation.size());
    Ok(match device.memory_info() {
        Ok(info) => finding.figure("free_bytes", info.free).figure("total_bytes", info.total),
        Err(_) => finding,
    })
}

/// Writes a pattern, reads it back, and returns whether it matches.
fn keeps_pattern(region: &dyn Region, pattern: Pattern) -> Result<bool> {
    write(region, pattern)?;
    matches_pattern(region, pattern)
}

pub(super) fn write(region: &dyn Region, pattern: Pattern) -> Result<()> {
    pattern::fill(region, 0..region.size(), pattern, &mut |_| Ok(()))
}

pub(super) fn matches_pattern(region: &dyn Region, pattern: Pattern) -> Result<bool> {
    Ok(pattern::verify(region, 0, 0..region.size(), pattern, &mut |_| Ok(()))?.passed())
}

pub(super) fn export(context: &mut ProbeContext) -> ProbeResult {
    let allocation = Allocation::create(&context.device, SIZE)?;
    let (fd, export_us) = timed(|| allocation.export())?;
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let target = fs::read_link(path);
    let target = target.map_or_else(|error| format!("unknown: {error}"), |target| target.display().to_string());
    let finding =
        ok("Memory can be exported as a descriptor.").figure("export_us", export_us).figure("descriptor", target);
    Ok(match fstat(fd) {
        Ok(stat) => finding.figure("mode", format!("{:o}", stat.st_mode)).figure("size_bytes", stat.st_size),
        Err(_) => finding,
    })
}

fn duplicate(allocation: &Allocation) -> Result<OwnedFd> {
    let fd = allocation.export()?.try_clone_to_owned();
    fd.map_err(|error| Error::system("duplicate a descriptor", error))
}

pub(super) fn import(context: &mut ProbeContext) -> ProbeResult {
    let pattern = Pattern::new(random_salt()?);
    let allocation = Allocation::create(&context.device, SIZE)?;
    let fd = duplicate(&allocation)?;
    write(&Mapping::new(&allocation, Access::ReadWrite)?, pattern)?;
    let (imported, import_us) = timed(|| Allocation::import(&context.device, fd, allocation.size()))?;
    let (mapping, map_us) = timed(|| Mapping::new(&imported, Access::ReadOnly))?;
    if !matches_pattern(&mapping, pattern)? {
        return Ok(failed("Imported memory does not show what was written before the export."));
    }
    let finding = ok("An exported descriptor can be imported, as the same memory.");
    Ok(finding.figure("import_us", import_us).figure("map_us", map_us))
}

pub(super) fn aliases(context: &mut ProbeContext) -> ProbeResult {
    let allocation = Allocation::create(&context.device, SIZE)?;
    let one = Mapping::new(&allocation, Access::ReadWrite)?;
    let other = Mapping::new(&allocation, Access::ReadWrite)?;
    for (writer, reader) in [(&one, &other), (&other, &one)] {
        let pattern = Pattern::new(random_salt()?);
        write(writer, pattern)?;
        if !matches_pattern(reader, pattern)? {
            return Ok(failed("Bytes written through one mapping do not show in another mapping of the same memory."));
        }
    }
    Ok(ok("Two mappings of one allocation show the same bytes."))
}

pub(super) fn read_only_copy(context: &mut ProbeContext) -> ProbeResult {
    let allocation = Allocation::create(&context.device, SIZE)?;
    write(&Mapping::new(&allocation, Access::ReadWrite)?, Pattern::new(1))?;
    let mapping = Mapping::new(&allocation, Access::ReadOnly)?;
    // Reading works, so a failure below is due to the write.
    let mut bytes = [0; 4];
    mapping.copy_out(0, &mut bytes)?;
    // Call the driver directly: the library would reject the copy itself.
    match context.device.verbs().copy_in(context.device.ordinal(), mapping.address(), &[!bytes[0]]) {
        Ok(()) => Ok(failed("A copy into a read-only mapping succeeded.")),
        Err(error) if matches_pattern(&mapping, Pattern::new(1))? => {
            Ok(ok("The driver refuses a copy into a read-only mapping.").figure("refused", error.in_full()))
        }
        Err(_) => Ok(failed("A copy into a read-only mapping was refused and still changed the bytes.")),
    }
}

/// The errors of a faulted context: `CUDA_ERROR_ILLEGAL_ADDRESS` to `CUDA_ERROR_LAUNCH_FAILED`.
const FAULTS: RangeInclusive<u32> = 700..=719;

pub(super) fn read_only_store(context: &mut ProbeContext) -> ProbeResult {
    const VALUE: u32 = 0x5EED_F00D;
    let device = &context.device;
    let driver = device.verbs();
    let ordinal = device.ordinal();
    let diagnosis = driver.diagnosis()?;
    let allocation = Allocation::create(device, SIZE)?;
    let writable = Mapping::new(&allocation, Access::ReadWrite)?;
    let read_only = Mapping::new(&allocation, Access::ReadOnly)?;
    // Otherwise a store that never executes would look like a refused store.
    diagnosis.store(ordinal, writable.address(), VALUE)?;
    let mut word = [0; 4];
    read_only.copy_out(0, &mut word)?;
    if word != VALUE.to_le_bytes() {
        return Ok(failed("A kernel's store into a writable mapping does not show in another mapping."));
    }
    match diagnosis.store(ordinal, read_only.address(), !VALUE) {
        Ok(()) => Ok(failed("A kernel's store into a read-only mapping succeeded.")),
        Err(Error::Driver { code, name, .. }) if FAULTS.contains(&code) => {
            Ok(ok("A kernel's store into a read-only mapping faults.").figure("fault", format!("{name} ({code})")))
        }
        Err(error) => Err(error.into()),
    }
}

pub(super) fn wrong_descriptor(context: &mut ProbeContext) -> ProbeResult {
    let device = &context.device;
    let size = device.granularity()?;
    let io = |action: &'static str| move |error: io::Error| Error::system(action, error);
    let null = || File::open("/dev/null").map(OwnedFd::from).map_err(io("open /dev/null"));
    let pipe = || io::pipe().map(|(reader, _)| OwnedFd::from(reader)).map_err(io("create a pipe"));
    let folder = context.end.setting.socket.parent().unwrap_or(Path::new("/"));
    let file = || tempfile::tempfile_in(folder).map(OwnedFd::from).map_err(io("create a temporary file"));
    let mut refusals = Vec::new();
    for (what, fd) in [("/dev/null", null()?), ("a pipe", pipe()?), ("a file", file()?)] {
        match Allocation::import(device, fd, size) {
            Ok(_) => return Ok(failed(format!("{what} was imported as if it were memory."))),
            Err(error) => refusals.push(format!("{what}: {}", ErrorDetails::of(&error).message)),
        }
    }
    // The process and its context must still work.
    let allocation = Allocation::create(device, SIZE)?;
    if !keeps_pattern(&Mapping::new(&allocation, Access::ReadWrite)?, Pattern::new(2))? {
        return Ok(failed("After a wrong descriptor was refused, memory no longer holds its bytes."));
    }
    let finding = ok("A descriptor that is not memory is refused, without side effects.");
    Ok(finding.figure("refused", refusals))
}

/// Memory of a kind that [`Allocation`] does not support. Drop frees it.
struct SpecialMemory<'a> {
    driver: &'a dyn Verbs,
    handle: Handle,
    size: u64,
    reserved: Option<u64>,
    mapped: Option<u64>,
}

impl<'a> SpecialMemory<'a> {
    fn create(context: &'a ProbeContext, made_for: MadeFor) -> Result<Self> {
        let driver = context.device.verbs();
        let ordinal = context.device.ordinal();
        let size = SIZE.next_multiple_of(context.device.granularity()?);
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

impl Drop for SpecialMemory<'_> {
    fn drop(&mut self) {
        let unmapped = self.mapped.map_or(Ok(()), |address| self.driver.unmap(address, self.size));
        let freed = self.reserved.map_or(Ok(()), |address| self.driver.free(address, self.size));
        for error in [unmapped, freed, self.driver.release(self.handle)].into_iter().filter_map(Result::err) {
            tracing::error!(%error, "cannot free a probe's memory");
        }
    }
}

pub(super) fn dma_buf(context: &mut ProbeContext) -> ProbeResult {
    let ordinal = context.device.ordinal();
    let mut memory = SpecialMemory::create(context, MadeFor::Rdma)?;
    let address = memory.map(ordinal)?;
    let (fd, export_us) = timed(|| memory.driver.diagnosis()?.export_dma_buf(ordinal, address, memory.size))?;
    let stat = fstat(&fd).map_err(|errno| Error::system("inspect a dma-buf", errno))?;
    let finding = ok("Memory can be exported as a dma-buf, for devices of other vendors.");
    Ok(finding.figure("export_us", export_us).figure("size_bytes", stat.st_size))
}

pub(super) fn fabric(context: &mut ProbeContext) -> ProbeResult {
    let memory = match SpecialMemory::create(context, MadeFor::Fabric) {
        Err(error)
            if ErrorDetails::of(&error).is_unsupported()
                && context.device.attribute(Attribute::FabricHandle).is_ok_and(|on| on != 0) =>
        {
            let meaning = "The device claims fabric handles, and the driver creates none: attributes are claims.";
            return Ok(unsupported(meaning).with_error(ErrorDetails::of(&error)));
        }
        memory => memory?,
    };
    let (_, export_us) = timed(|| memory.driver.diagnosis()?.export_fabric(memory.handle))?;
    Ok(ok("Memory can be exported to other machines of the fabric.").figure("export_us", export_us))
}

/// Queries the mode without changing it. A real test would require every process that uses the device to exit.
pub(super) fn persistence(context: &mut ProbeContext) -> ProbeResult {
    if context.device.backend() == Backend::Host {
        let meaning = "Host memory needs no driver: a descriptor keeps it until the machine restarts.";
        return Ok(skipped(meaning));
    }
    Ok(match nvml::persistence(context.device.uuid()) {
        Ok(true) => ok(
            "Persistence mode is on: memory that only descriptors hold stays while no process uses the device. It goes with a \
             reset of the device, a reload of the driver's module, or a restart of the machine.",
        )
        .figure("persistence_mode", 1),
        Ok(false) => unsupported("Memory that only descriptors hold goes when the last process that uses the device ends.",
        )
        .figure("persistence_mode", 0)
        .with_error(ErrorDetails::new("unsupported", "persistence mode is off".to_owned())),
        Err(why) => {
            let meaning = format!("NVML, which knows whether persistence mode is on, can't be asked: {why}.");
            skipped(meaning)
        }
    })
}
