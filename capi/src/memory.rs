//! Memory: created here, imported from descriptors, taken from a producer or leased from a broker.

use std::{
    ffi::{CString, c_char, c_int},
    mem::MaybeUninit,
    os::fd::{AsFd, IntoRawFd},
    sync::{Arc, Mutex},
};

use vmmfd::{
    Error,
    bindings::lock,
    driver::Access,
    memory::{Allocation, Mapping, Neighbours, Placement, Rdma, Region, Reservation, Shared, Spec},
    session::stream::{Loan, Sample},
};

use crate::{
    argument::{bytes, descriptor, list, out, run_out, unknown},
    device::vmmfd_device_t,
    error::{Failure, Outcome, run, run_logged, vmmfd_error_t},
    handle::{self, handle},
    leased::Leased,
    owned::{Kept, c_text},
    versioned::{Facts, options, versioned},
};

/// Memory at addresses of this process. Any threads may use it at once; other processes may change its bytes at any time.
#[derive(Debug)]
pub struct vmmfd_memory_t {
    _opaque: [u8; 0],
}

handle!(vmmfd_memory_t, 2, "memory", Arc<Memory>);

pub(crate) struct Memory {
    pub(crate) source: Source,
    mapped_size: u64,
    device: CString,
}

pub(crate) enum Source {
    /// Created by this process.
    Own(Arc<Shared>),
    /// Opened by this process.
    Opened(Arc<dyn Region>),
    /// A part of a lease, which may be switched to another version or parked.
    Leased(Arc<Leased>, String),
    /// A buffer that this process may publish. `None` afterwards.
    Lent(Mutex<Option<Arc<Loan>>>),
    /// A buffer of a publisher, and the texts and lists that describe it.
    Received { sample: Arc<Sample>, _kept: Mutex<Kept> },
}

impl Memory {
    fn of(source: Source, region: &dyn Region, mapped_size: u64) -> Arc<Self> {
        let device = c_text(region.device().prefixed_uuid());
        Arc::new(Self { source, mapped_size, device })
    }

    pub(crate) fn own(shared: Shared) -> Arc<Self> {
        let shared = Arc::new(shared);
        Self::of(Source::Own(Arc::clone(&shared)), &*shared, shared.mapped_size())
    }

    pub(crate) fn opened(region: Arc<dyn Region>, mapped_size: u64) -> Arc<Self> {
        Self::of(Source::Opened(Arc::clone(&region)), &*region, mapped_size)
    }

    pub(crate) fn lent(loan: Loan) -> Arc<Self> {
        let loan = Arc::new(loan);
        Self::of(Source::Lent(Mutex::new(Some(Arc::clone(&loan)))), &*loan, loan.size())
    }

    pub(crate) fn received(sample: &Arc<Sample>, kept: Kept) -> Arc<Self> {
        let source = Source::Received { sample: Arc::clone(sample), _kept: Mutex::new(kept) };
        Self::of(source, &**sample, sample.size())
    }

    /// A part of a lease.
    ///
    /// # Errors
    /// If there is no such part, or the lease is parked.
    pub(crate) fn leased(lease: &Arc<Leased>, part: &str) -> Outcome<Arc<Self>> {
        let (mapped_size, device) =
            lease.part(part, |memory| (memory.mapped_size(), c_text(memory.device().prefixed_uuid())))?;
        Ok(Arc::new(Self { source: Source::Leased(Arc::clone(lease), part.to_owned()), mapped_size, device }))
    }

    /// Passes the memory to a function. A lease is not switched or parked during the call.
    pub(crate) fn with<T>(&self, work: impl FnOnce(&dyn Region) -> Outcome<T>) -> Outcome<T> {
        match &self.source {
            Source::Own(shared) => work(&**shared),
            Source::Opened(region) => work(&**region),
            Source::Leased(lease, part) => lease.part(part, |memory| work(&**memory))?,
            Source::Lent(loan) => work(&*lent(loan)?),
            Source::Received { sample, .. } => work(&**sample),
        }
    }

    /// The memory of an owner that keeps it mapped.
    pub(crate) fn region(&self) -> Outcome<Arc<dyn Region>> {
        match &self.source {
            Source::Own(shared) => Ok(Arc::clone(shared) as Arc<dyn Region>),
            Source::Opened(region) => Ok(Arc::clone(region)),
            Source::Leased(lease, part) => lease.part(part, |memory| Arc::clone(memory) as Arc<dyn Region>),
            Source::Lent(loan) => Ok(lent(loan)? as Arc<dyn Region>),
            Source::Received { sample, .. } => Ok(Arc::clone(sample) as Arc<dyn Region>),
        }
    }

    /// The memory, if this process created it.
    ///
    /// # Errors
    /// Otherwise; `purpose` completes the sentence "can ...".
    pub(crate) fn shared(&self, purpose: &str) -> Outcome<&Arc<Shared>> {
        match &self.source {
            Source::Own(shared) => Ok(shared),
            Source::Lent(_) => Err(Failure::invalid(format!(
                "this memory is a buffer of a stream: nobody can {purpose}; copy it to memory of vmmfd_memory_create"
            ))),
            _ => Err(Failure::invalid(format!(
                "another process created this memory: only its creator can {purpose}; copy it to memory of vmmfd_memory_create"
            ))),
        }
    }

    /// Takes the loan out, to publish it.
    ///
    /// # Errors
    /// If the memory is no loan, or is in use; it then remains.
    pub(crate) fn take_loan(&self) -> Outcome<Loan> {
        let Source::Lent(place) = &self.source else {
            return Err(Failure::invalid("this memory is no loan: publish memory of vmmfd_publisher_loan"));
        };
        let mut place = lock(place);
        let loan = place.take().ok_or_else(published)?;
        Arc::try_unwrap(loan).map_err(|loan| {
            *place = Some(loan);
            Failure::invalid("a DLPack tensor or another call uses this loan: publish it afterwards")
        })
    }
}

fn lent(loan: &Mutex<Option<Arc<Loan>>>) -> Outcome<Arc<Loan>> {
    lock(loan).clone().ok_or_else(published)
}

fn published() -> Failure {
    Failure::invalid("this loan is over: it was published, or its publication failed")
}

/// Where memory is.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum vmmfd_placement_t {
    /// Device memory.
    VMMFD_ON_DEVICE = 0,
    /// Host memory on the NUMA node closest to the device, which the CPU and the device both reach.
    VMMFD_ON_HOST = 1,
}

/// A value of [`vmmfd_placement_t`].
///
/// # Errors
/// If it is unknown.
pub(crate) fn placement(value: u32) -> Outcome<Placement> {
    match value {
        0 => Ok(Placement::Device),
        1 => Ok(Placement::Host),
        other => Err(unknown("placement", other)),
    }
}

/// Whether network cards can reach memory (`gpuDirectRDMACapable`).
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum vmmfd_rdma_t {
    /// The flag is not requested.
    VMMFD_RDMA_NEVER = 0,
    /// Where the device supports it.
    VMMFD_RDMA_AUTO = 1,
    /// The allocation fails where the device does not support it.
    VMMFD_RDMA_REQUIRED = 2,
}

/// Options of new memory, which start with `VMMFD_MEMORY_OPTIONS`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct vmmfd_memory_options_t {
    /// The size of this struct: `sizeof` it.
    pub struct_size: usize,
    /// Splits the memory into allocations of this size in bytes, rounded up to the granularity. 0: one allocation.
    pub chunk: u64,
    /// A value of `vmmfd_placement_t`.
    pub placement: u32,
    /// A value of `vmmfd_rdma_t`.
    pub rdma: u32,
}

versioned!(vmmfd_memory_options_t);

/// Facts about memory. The text is valid until the memory is freed.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct vmmfd_memory_info_t {
    /// The size of this struct: `sizeof` it.
    pub struct_size: usize,
    /// The address on the device, the `CUdeviceptr`; on the host backend an address of this process.
    pub address: u64,
    /// The size of the data in bytes.
    pub size: u64,
    /// The size of the mapping in bytes: the size, rounded up.
    pub mapped_size: u64,
    /// The number of allocations that `vmmfd_memory_export` exports; 0 for memory that another process created, and for buffers of streams.
    pub segments: u64,
    /// The UUID of the device that the memory is mapped for, with its prefix.
    pub device: *const c_char,
    /// Whether this process may write to it. A kernel that writes to read-only memory destroys its CUDA context.
    pub writable: bool,
}

versioned!(vmmfd_memory_info_t);

/// Allocates shareable memory of `size` bytes on a device, and maps it for reading and writing. The contents are undefined.
///
/// `options` NULL means the defaults. The caller frees `*memory` with `vmmfd_memory_free`; it is NULL after a failure. Blocks while the
/// driver allocates, and up to 100 ms while it creates the device's context.
///
/// Errors: `VMMFD_INVALID` for a size of 0 and unknown options; `VMMFD_OUT_OF_MEMORY`; `VMMFD_UNSUPPORTED`; `VMMFD_SYSTEM` if this process
/// has too few descriptors, one for each chunk; `VMMFD_DRIVER`; `VMMFD_FORKED`. Driver calls: `cuMemCreate`, `cuMemAddressReserve`,
/// `cuMemMap`, `cuMemSetAccess`, `cuMemExportToShareableHandle`.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_memory_create(
    device: *const vmmfd_device_t,
    size: u64,
    options: *const vmmfd_memory_options_t,
    memory: Option<&mut MaybeUninit<*mut vmmfd_memory_t>>,
) -> *mut vmmfd_error_t {
    run_out(memory, "memory", || {
        let open = handle::get(device)?;
        let mut spec = Spec::vmm(size);
        if let Some(options) = self::options(options)? {
            if options.chunk > 0 {
                spec = spec.chunk(options.chunk);
            }
            spec = spec.placement(placement(options.placement)?);
            spec = match options.rdma {
                0 => spec,
                1 => spec.rdma(Rdma::Auto),
                2 => spec.rdma(Rdma::Required),
                other => return Err(unknown("rdma", other)),
            };
        }
        Ok(handle::insert(Memory::own(Shared::create(&open.device, spec)?)))
    })
}

/// Describes memory. Does not block, except while a lease is switched.
///
/// Errors: `VMMFD_INVALID`, also for memory of a parked lease; `VMMFD_FORKED`.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_memory_info(
    memory: *const vmmfd_memory_t,
    info: *mut vmmfd_memory_info_t,
) -> *mut vmmfd_error_t {
    run(|| {
        let info = Facts::of(info, "info")?;
        let memory = handle::get(memory)?;
        let segments = match &memory.source {
            Source::Own(shared) => shared.chunks(0..shared.size())?.map_or(0, |(_, chunks)| chunks.len() as u64),
            _ => 0,
        };
        memory.with(|region| {
            info.write(&vmmfd_memory_info_t {
                struct_size: 0,
                address: region.address(),
                size: region.size(),
                mapped_size: memory.mapped_size,
                segments,
                device: memory.device.as_ptr(),
                writable: region.access() == Access::ReadWrite,
            });
            Ok(())
        })
    })
}

/// Copies `size` bytes of the caller into the memory, starting at `offset`. Blocks until the copy is complete, including earlier work on
/// the default stream. Any threads may call it at once, and must agree who writes which bytes.
///
/// Errors: `VMMFD_INVALID` if the range exceeds the memory or the memory is read-only; `VMMFD_DRIVER`; `VMMFD_FORKED`. Driver calls:
/// `cuMemcpyHtoD`, `cuStreamSynchronize`.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_memory_copy_in(
    memory: *const vmmfd_memory_t,
    offset: u64,
    from: *const std::ffi::c_void,
    size: usize,
) -> *mut vmmfd_error_t {
    run(|| {
        let memory = handle::get(memory)?;
        let from: &[u8] = list(from.cast(), size, "from")?;
        memory.with(|region| Ok(region.copy_in(offset, from)?))
    })
}

/// Copies `size` bytes out of the memory, starting at `offset`, into a buffer of the caller. Blocks until the copy is complete, including
/// earlier work on the default stream. Any threads may call it at once.
///
/// Errors: as for `vmmfd_memory_copy_in`. Driver call: `cuMemcpyDtoH`.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_memory_copy_out(
    memory: *const vmmfd_memory_t,
    offset: u64,
    to: *mut std::ffi::c_void,
    size: usize,
) -> *mut vmmfd_error_t {
    run(|| {
        let memory = handle::get(memory)?;
        let to = bytes(to.cast(), size, "to")?;
        memory.with(|region| Ok(region.copy_out(offset, to)?))
    })
}

/// Waits until all work in the device's primary context has finished, which the CUDA runtime, PyTorch and others use. Call it after your
/// kernels and before another process reads the memory. Blocks without limit.
///
/// Errors: `VMMFD_DRIVER`, also for an earlier asynchronous failure; `VMMFD_INVALID`; `VMMFD_FORKED`. Driver call: `cuCtxSynchronize`.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_memory_synchronize(memory: *const vmmfd_memory_t) -> *mut vmmfd_error_t {
    run(|| handle::get(memory)?.with(|region| Ok(region.synchronize()?)))
}

/// Duplicates the descriptor of one allocation, to send over the program's own socket (`SCM_RIGHTS`). `*size` is its size in
/// bytes, which the receiver needs. `segment` counts from 0: see `segments` of `vmmfd_memory_info_t`.
///
/// The caller closes `*fd`, which is close-on-exec; it is -1 after a failure. A holder of the descriptor can read and write the memory, and
/// keeps it allocated. Does not block.
///
/// Errors: `VMMFD_INVALID` for memory that another process created, a buffer of a stream, and a segment that does not exist;
/// `VMMFD_SYSTEM`; `VMMFD_FORKED`.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_memory_export(
    memory: *const vmmfd_memory_t,
    segment: u64,
    fd: Option<&mut MaybeUninit<c_int>>,
    size: Option<&mut MaybeUninit<u64>>,
) -> *mut vmmfd_error_t {
    run(|| {
        let fd = out(fd, "fd")?;
        fd.write(-1);
        let size = out(size, "size")?;
        let memory = handle::get(memory)?;
        let shared = memory.shared("export it")?;
        let chunks = shared.chunks(0..shared.size())?.map(|(_, chunks)| chunks).unwrap_or_default();
        let chunk = usize::try_from(segment).ok().and_then(|at| chunks.get(at)).ok_or_else(|| {
            Failure::invalid(format!("segment {segment} does not exist: the memory has {}", chunks.len()))
        })?;
        let owned = chunk.as_fd().try_clone_to_owned();
        let owned = owned.map_err(|error| Error::system("duplicate the descriptor of a segment", error))?;
        size.write(chunk.size());
        fd.write(owned.into_raw_fd());
        Ok(())
    })
}

/// Shares `size` bytes at an address of this process that another library allocated with `cuMemCreate`, without a copy: PyTorch with
/// expandable segments, JAX, or your own code. `*memory` is the allocations that contain them, and `*offset` the place of the first byte
/// in it, both 0 or NULL after a failure.
///
/// A receiver can read and write everything in these allocations: without `neighbours`, they must be full of the given bytes. The memory
/// is read-only through its own addresses and outlives its owner; the contents do not. Keep the bytes allocated for as long as another
/// process uses them. The caller frees `*memory` with `vmmfd_memory_free`. Blocks for driver calls, about 0.1 ms for each
/// allocation.
///
/// Errors: `VMMFD_UNSUPPORTED` for memory that can't be exported, with the reason, and always on the host backend; `VMMFD_INVALID` for a
/// size of 0 and for neighbours; `VMMFD_SYSTEM` if this process has too few descriptors; `VMMFD_DRIVER`; `VMMFD_FORKED`. Driver calls:
/// `cuPointerGetAttribute`, `cuMemRetainAllocationHandle`, `cuMemAddressReserve`, `cuMemMap`, `cuMemSetAccess`,
/// `cuMemExportToShareableHandle`.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_memory_at(
    device: *const vmmfd_device_t,
    address: u64,
    size: u64,
    neighbours: bool,
    memory: Option<&mut MaybeUninit<*mut vmmfd_memory_t>>,
    offset: Option<&mut MaybeUninit<u64>>,
) -> *mut vmmfd_error_t {
    run_out(memory, "memory", || {
        let offset = out(offset, "offset")?;
        offset.write(0);
        let open = handle::get(device)?;
        let neighbours = if neighbours { Neighbours::Expose } else { Neighbours::Refuse };
        let (shared, offsets) = Shared::from_addresses(&open.device, &[(address, size)], neighbours)?;
        offset.write(offsets[0]);
        Ok(handle::insert(Memory::own(shared)))
    })
}

/// Imports `count` allocations that another process exported, and maps them side by side for a device. `sizes` are the exporter's, in
/// bytes: a descriptor does not carry its size.
///
/// The caller keeps its descriptors and may close them afterwards. `writable` asks for write access of this process. The caller frees
/// `*memory` with `vmmfd_memory_free`; it is NULL after a failure. Blocks for the driver's calls.
///
/// Errors: `VMMFD_INVALID` for a descriptor that is not open, no descriptor, or a size that is not a multiple of the granularity;
/// `VMMFD_DRIVER` or `VMMFD_UNSUPPORTED` for a wrong size or a descriptor of something else; `VMMFD_SYSTEM`; `VMMFD_FORKED`. Driver calls:
/// `cuMemImportFromShareableHandle`, `cuMemAddressReserve`, `cuMemMap`, `cuMemSetAccess`.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_memory_import(
    device: *const vmmfd_device_t,
    fds: *const c_int,
    sizes: *const u64,
    count: usize,
    writable: bool,
    memory: Option<&mut MaybeUninit<*mut vmmfd_memory_t>>,
) -> *mut vmmfd_error_t {
    run_out(memory, "memory", || {
        let open = handle::get(device)?;
        let fds = list(fds, count, "fds")?;
        let sizes = list(sizes, count, "sizes")?;
        if count == 0 {
            return Err(Failure::invalid("count is 0: pass at least one descriptor"));
        }
        let mut total = 0u64;
        let mut allocations = Vec::new();
        for (fd, size) in fds.iter().zip(sizes) {
            let sum = total.checked_add(*size);
            total = sum.ok_or_else(|| Failure::invalid("the sizes together exceed 64 bits: pass the exporter's"))?;
            allocations.push(Allocation::import(&open.device, descriptor(*fd, "fds")?, *size)?);
        }
        let access = if writable { Access::ReadWrite } else { Access::ReadOnly };
        let reservation = Reservation::new(&open.device, total)?;
        let mapping = Mapping::side_by_side(&reservation, 0, &allocations, &open.device, access)?;
        Ok(handle::insert(Memory::opened(Arc::new(mapping), total)))
    })
}

/// Frees a handle of memory. The memory itself is released when no array, lease or DLPack tensor of this process uses it any more; other
/// processes that have it open keep it. A loan is free again, and a sample is given back once all work in the device's primary context has
/// finished, or behind its stream's work. May block for the driver's calls. Finish your own work on the memory first.
#[unsafe(no_mangle)]
pub extern "C" fn vmmfd_memory_free(memory: *mut vmmfd_memory_t) {
    run_logged(|| handle::remove(memory));
}
