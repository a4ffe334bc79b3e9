//! Arrays: memory with element type, shape and strides; DLPack both ways.

use std::{
    ffi::{CString, c_char},
    mem::MaybeUninit,
    ptr::{self, NonNull},
    slice,
    sync::Arc,
};

use vmmfd::{
    array::{ArrayDescriptor, MAX_DIMENSIONS, Order},
    bindings::{
        Walk,
        dlpack::{
            self, CPU, CUDA, CUDA_HOST, CUDA_MANAGED, DLDevice, DLManagedTensorVersioned, Elements, Exported, Foreign,
            Unusable,
        },
    },
    driver::Access,
    memory::{Region, Selector, Shared, Spec},
};

use crate::{
    argument::{list, out, run_out, text},
    device::{OpenDevice, vmmfd_device_t},
    error::{Failure, Outcome, run, run_logged, vmmfd_error_t},
    handle::{self, handle},
    memory::{Memory, Source, vmmfd_memory_t},
    owned::c_text,
    versioned::{Facts, options, versioned},
};

/// An array in memory: type, shape, strides and offset. It keeps its memory. Any threads may use it at once.
#[derive(Debug)]
pub struct vmmfd_array_t {
    _opaque: [u8; 0],
}

handle!(vmmfd_array_t, 3, "an array", Array);

pub(crate) struct Array {
    pub(crate) memory: Arc<Memory>,
    pub(crate) descriptor: ArrayDescriptor,
    dtype: CString,
    strides: Vec<i64>,
}

impl Array {
    /// # Errors
    /// If the array is not inside the memory.
    pub(crate) fn new(memory: Arc<Memory>, descriptor: ArrayDescriptor) -> Outcome<Self> {
        memory.with(|region| Ok(descriptor.check(region.size())?))?;
        let dtype = c_text(descriptor.dtype.to_string());
        let strides = descriptor.strides_in_bytes()?;
        Ok(Self { memory, descriptor, dtype, strides })
    }
}

/// The layout of an array: of a new one as an argument, or of an array as a result, whose pointers are valid until the array is freed.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct vmmfd_layout_t {
    /// The size of this struct: `sizeof` it.
    pub struct_size: usize,
    /// The element type: a name of NumPy or ml_dtypes such as `float32`, `uint8`, `bfloat16`, or a typestr such as `<f4`.
    pub dtype: *const c_char,
    /// The number of dimensions, at most 64.
    pub dimensions: usize,
    /// The length of each dimension, in elements.
    pub shape: *const u64,
    /// The distance of neighbours along each dimension, in bytes. As an argument, NULL means contiguous in C order.
    pub strides: *const i64,
    /// The position of the first element in the memory, in bytes.
    pub offset: u64,
}

versioned!(vmmfd_layout_t);

/// Reads a layout of the caller.
///
/// # Errors
/// If it is null, has no known type or too many dimensions.
pub(crate) fn described(layout: *const vmmfd_layout_t) -> Outcome<ArrayDescriptor> {
    let layout = options(layout)?.ok_or_else(|| Failure::invalid("layout is NULL: pass the type and the shape"))?;
    let dtype = text(layout.dtype, "dtype")?;
    let dtype = dtype.parse().map_err(|error| Failure::invalid(format!("dtype: {error}")))?;
    if layout.dimensions > MAX_DIMENSIONS {
        let got = layout.dimensions;
        return Err(Failure::invalid(format!("{got} dimensions are too many: the limit is {MAX_DIMENSIONS}")));
    }
    let shape = list(layout.shape, layout.dimensions, "shape")?.to_vec();
    let strides = match layout.strides.is_null() {
        true => None,
        false => Some(list(layout.strides, layout.dimensions, "strides")?.to_vec()),
    };
    Ok(ArrayDescriptor { dtype, shape, strides, offset: layout.offset })
}

/// Makes an array of memory. `layout` describes it, and its pointers are read during the call only.
///
/// The caller frees `*array` with `vmmfd_array_free`; it is NULL after a failure. The array keeps the memory: the caller may free its
/// handle. Does not block.
///
/// Errors: `VMMFD_INVALID` for an unknown type, and for an array that is not inside the memory; `VMMFD_FORKED`.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_array_create(
    memory: *const vmmfd_memory_t,
    layout: *const vmmfd_layout_t,
    array: Option<&mut MaybeUninit<*mut vmmfd_array_t>>,
) -> *mut vmmfd_error_t {
    run_out(array, "array", || {
        let memory = handle::get(memory)?;
        Ok(handle::insert(Array::new(Arc::clone(&memory), described(layout)?)?))
    })
}

/// Describes an array. Does not block.
///
/// Errors: `VMMFD_INVALID`, `VMMFD_FORKED`.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_array_info(array: *const vmmfd_array_t, layout: *mut vmmfd_layout_t) -> *mut vmmfd_error_t {
    run(|| {
        let layout = Facts::of(layout, "layout")?;
        let array = handle::get(array)?;
        layout.write(&vmmfd_layout_t {
            struct_size: 0,
            dtype: array.dtype.as_ptr(),
            dimensions: array.descriptor.shape.len(),
            shape: array.descriptor.shape.as_ptr(),
            strides: array.strides.as_ptr(),
            offset: array.descriptor.offset,
        });
        Ok(())
    })
}

/// Returns the memory of an array, to read and write its bytes. The array starts at `offset` of `vmmfd_array_info`.
///
/// The caller frees `*memory` with `vmmfd_memory_free`; it is NULL after a failure. Does not block.
///
/// Errors: `VMMFD_INVALID`, `VMMFD_FORKED`.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_array_memory(
    array: *const vmmfd_array_t,
    memory: Option<&mut MaybeUninit<*mut vmmfd_memory_t>>,
) -> *mut vmmfd_error_t {
    run_out(memory, "memory", || Ok(handle::insert(Arc::clone(&handle::get(array)?.memory))))
}

/// Frees a handle of an array. DLPack tensors of it remain valid. May block for the driver's calls if it was the last user of its memory.
#[unsafe(no_mangle)]
pub extern "C" fn vmmfd_array_free(array: *mut vmmfd_array_t) {
    run_logged(|| handle::remove(array));
}

/// Exports an array as a DLPack tensor of version 1, without a copy. `dlpack.h` has the struct.
///
/// The tensor's deleter frees it, on any thread, and may outlive the array. `*tensor` is NULL after a failure. A read-only array has the
/// flag `DLPACK_FLAG_BITMASK_READ_ONLY`. While a tensor of a lease exists, the lease can't be switched or parked. Does not block, and waits
/// for no stream: work of this process on the memory must be complete, or ordered before the reader's.
///
/// Errors: `VMMFD_UNSUPPORTED` for big-endian and raw elements, and for strides that are not a multiple of the element; `VMMFD_INVALID`,
/// also for memory of a parked lease; `VMMFD_FORKED`.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_array_to_dlpack(
    array: *const vmmfd_array_t,
    tensor: Option<&mut MaybeUninit<*mut DLManagedTensorVersioned>>,
) -> *mut vmmfd_error_t {
    run_out(tensor, "tensor", || {
        let array = handle::get(array)?;
        export(&array)
    })
}

fn export(array: &Array) -> Outcome<*mut DLManagedTensorVersioned> {
    let region = array.memory.region()?;
    let flags = if region.access() == Access::ReadOnly { dlpack::READ_ONLY } else { 0 };
    // Keeps the lease.
    let keep = match &array.memory.source {
        Source::Leased(lease, _) => Some(Arc::clone(lease)),
        _ => None,
    };
    let device = DLDevice::new(region.device().is_host(), region.device().ordinal());
    let exported = Exported::new(&array.descriptor, region.address(), device, (region, keep));
    let hint = Some("share it as an array of uint8");
    Ok(exported.map_err(|problem| Failure::unsupported(problem, hint))?.versioned(flags).as_ptr())
}

/// Copies a DLPack tensor of version 1 into new shareable memory of a device, as a contiguous array. `dlpack.h` has the struct.
///
/// The library takes the tensor and calls its deleter, on success and on failure. CPU memory and CUDA memory can be copied; CUDA memory
/// only to a device of CUDA. The caller frees `*array` with `vmmfd_array_free`; it is NULL after a failure. Blocks until the copy is
/// complete; for CUDA memory also until all work in the primary context of the tensor's device is done.
///
/// Errors: `VMMFD_INVALID` for a malformed tensor; `VMMFD_UNSUPPORTED` for other devices and other elements; the errors of
/// `vmmfd_memory_create`. Driver calls: `cuMemcpyHtoD` or `cuMemcpyDtoD`, `cuStreamSynchronize`.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_array_from_dlpack(
    device: *const vmmfd_device_t,
    tensor: *mut DLManagedTensorVersioned,
    array: Option<&mut MaybeUninit<*mut vmmfd_array_t>>,
) -> *mut vmmfd_error_t {
    run(|| {
        let tensor = NonNull::new(tensor).ok_or_else(|| Failure::invalid("tensor is NULL: pass a DLPack tensor"));
        // SAFETY: the caller passes a valid tensor.
        let foreign = tensor.map(|tensor| unsafe { Foreign::versioned(tensor) });
        let place = out(array, "array")?;
        let open = handle::get(device)?;
        let foreign = foreign?.map_err(unusable)?;
        place.write(handle::insert(import(&open, &foreign.elements().map_err(unusable)?)?));
        Ok(())
    })
}

fn unusable(problem: Unusable) -> Failure {
    let sentence = |text| format!("the DLPack tensor {text}");
    match problem {
        Unusable::Malformed(text) => Failure::invalid(sentence(text)),
        Unusable::Unsupported(text) => {
            Failure::unsupported(sentence(text), Some("pass a tensor of its bytes, as uint8"))
        }
    }
}

fn import(open: &OpenDevice, from: &Elements) -> Outcome<Array> {
    let packed = ArrayDescriptor::new(from.dtype, from.shape.clone(), Order::C)?;
    // Anywhere in the address space: the shape and strides are checked for overflow.
    let steps = match &from.strides {
        Some(steps) => steps.clone(),
        None => packed.strides_in_bytes()?,
    };
    let is_cuda = match from.device.kind {
        CPU | CUDA_HOST => false,
        CUDA | CUDA_MANAGED if !open.device.is_host() => true,
        CUDA | CUDA_MANAGED => {
            let problem = "the tensor is in CUDA memory, and the device is of the host backend: open a device of cuda";
            return Err(Failure::unsupported(problem, None));
        }
        other => {
            let problem =
                format!("the tensor is on a device of DLPack type {other}: copy it to the CPU or to CUDA first");
            return Err(Failure::unsupported(problem, None));
        }
    };
    let size = packed.bytes()?;
    let shared = Shared::create(&open.device, Spec::vmm(size.max(1)))?;
    if size > 0 {
        if is_cuda {
            let theirs = open.device.driver().device_of(from.address)?;
            let theirs = Selector::Ordinal(u32::try_from(theirs).unwrap_or_default());
            vmmfd::memory::Device::find(open.device.driver(), theirs)?.wait_for_work()?;
        }
        let mut batch = Batch { shared: &shared, is_cuda, at: 0, bytes: Vec::new(), ranges: Vec::new() };
        let walk = Walk::new(&from.shape, from.dtype.size(), &steps, &packed.strides_in_bytes()?);
        walk.each_run(|offset, to| batch.add(from.address.wrapping_add_signed(offset), to as u64, walk.bytes))?;
        batch.flush()?;
    }
    Array::new(Memory::own(shared), packed)
}

/// Copies runs of bytes to consecutive places, many at a time.
struct Batch<'a> {
    shared: &'a Shared,
    is_cuda: bool,
    /// Where the gathered bytes go.
    at: u64,
    bytes: Vec<u8>,
    ranges: Vec<(u64, u64, u64)>,
}

impl Batch<'_> {
    /// The most gathered bytes, and the most ranges of one driver call.
    const BYTES: usize = 4 << 20;
    const RANGES: usize = 4096;

    fn add(&mut self, from: u64, to: u64, length: u64) -> Outcome<()> {
        if self.is_cuda {
            self.ranges.push((self.shared.address() + to, from, length));
            return if self.ranges.len() == Self::RANGES { self.flush() } else { Ok(()) };
        }
        let mut from = from;
        let mut left = length as usize;
        while left > 0 {
            let some = left.min(Self::BYTES - self.bytes.len());
            // SAFETY: the other library guarantees that the tensor's bytes are readable until its deleter runs.
            let bytes = unsafe { slice::from_raw_parts(ptr::with_exposed_provenance(from as usize), some) };
            self.bytes.extend_from_slice(bytes);
            (from, left) = (from + some as u64, left - some);
            if self.bytes.len() == Self::BYTES {
                self.flush()?;
            }
        }
        Ok(())
    }

    fn flush(&mut self) -> Outcome<()> {
        if !self.ranges.is_empty() {
            let device = self.shared.device();
            // SAFETY: the destinations are in `shared`, which this process may write; the other library guarantees the sources.
            unsafe { device.driver().copy_device(device.ordinal(), &self.ranges) }?;
            self.ranges.clear();
        }
        if !self.bytes.is_empty() {
            self.shared.copy_in(self.at, &self.bytes)?;
            self.at += self.bytes.len() as u64;
            self.bytes.clear();
        }
        Ok(())
    }
}
