//! DLPack: the structs of its version 1, arrays as managed tensors, and tensors of other libraries.
//!
//! Not the crate dlpark: this module needs only the structs, and a managed tensor must hold only Rust's memory, so that its deleter can run
//! on any thread.

use std::{
    any::Any,
    ffi::c_void,
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    ptr::{self, NonNull},
};

use crate::array::{ArrayDescriptor, ElementType, MAX_DIMENSIONS};

/// `kDLCPU`
pub const CPU: i32 = 1;
/// `kDLCUDA`
pub const CUDA: i32 = 2;
/// `kDLCUDAHost`
pub const CUDA_HOST: i32 = 3;
/// `kDLCUDAManaged`
pub const CUDA_MANAGED: i32 = 13;

/// `DLPACK_FLAG_BITMASK_READ_ONLY`
pub const READ_ONLY: u64 = 1;
/// `DLPACK_FLAG_BITMASK_IS_COPIED`
pub const IS_COPIED: u64 = 2;

/// The version of exported tensors: 1.1 added the 8-bit floats.
pub const VERSION: (u32, u32) = (1, 1);

/// `DLDevice`
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DLDevice {
    /// The type of device.
    pub kind: i32,
    /// The ordinal in this process.
    pub id: i32,
}

impl DLDevice {
    /// The CPU, or the CUDA device of this ordinal.
    pub fn new(is_host: bool, ordinal: i32) -> Self {
        if is_host { Self { kind: CPU, id: 0 } } else { Self { kind: CUDA, id: ordinal } }
    }
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct DLDataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

/// `DLTensor`
#[repr(C)]
#[derive(Debug)]
pub struct DLTensor {
    data: *mut c_void,
    device: DLDevice,
    ndim: i32,
    dtype: DLDataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

/// `DLManagedTensor`, the struct before version 1.
#[repr(C)]
#[derive(Debug)]
pub struct DLManagedTensor {
    tensor: DLTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
}

/// `DLManagedTensorVersioned`
#[repr(C)]
#[derive(Debug)]
pub struct DLManagedTensorVersioned {
    major: u32,
    minor: u32,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
    flags: u64,
    tensor: DLTensor,
}

/// One of the two structs of managed tensors.
trait Managed {
    fn context(&self) -> *mut c_void;
}

impl Managed for DLManagedTensor {
    fn context(&self) -> *mut c_void {
        self.context
    }
}

impl Managed for DLManagedTensorVersioned {
    fn context(&self) -> *mut c_void {
        self.context
    }
}

/// The tensor of an array, and its owner.
#[derive(Debug)]
pub struct Exported {
    tensor: DLTensor,
    context: Box<Context>,
}

/// The owner of an exported tensor's data.
struct Context {
    shape: Box<[i64]>,
    strides: Box<[i64]>,
    _owner: Box<dyn Any + Send>,
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context").field("shape", &self.shape).field("strides", &self.strides).finish_non_exhaustive()
    }
}

impl Exported {
    /// Exports an array in memory that is mapped at `address`. The deleter drops `owner`.
    ///
    /// # Errors
    /// A sentence, for elements without a DLPack code and for strides that are not a multiple of the element.
    pub fn new(
        array: &ArrayDescriptor,
        address: u64,
        device: DLDevice,
        owner: impl Any + Send,
    ) -> Result<Self, String> {
        let dtype = array.dtype;
        let (code, bits) = dtype.dlpack().ok_or_else(|| format!("DLPack has no code for elements of type {dtype}"))?;
        let size = dtype.size() as i64;
        let steps = array.strides_in_bytes().map_err(|error| error.to_string())?;
        if let Some(step) = steps.iter().find(|step| **step % size != 0) {
            return Err(format!("DLPack counts strides in elements, and {step} bytes are not a multiple of {dtype}"));
        }
        let mut context = Box::new(Context {
            shape: array.shape.iter().map(|length| i64::try_from(*length).unwrap_or(i64::MAX)).collect(),
            strides: steps.iter().map(|step| step / size).collect(),
            _owner: Box::new(owner),
        });
        let data = if array.shape.contains(&0) { 0 } else { address + array.offset };
        let tensor = DLTensor {
            data: ptr::with_exposed_provenance_mut(data as usize),
            device,
            ndim: context.shape.len() as i32,
            dtype: DLDataType { code, bits, lanes: 1 },
            shape: context.shape.as_mut_ptr(),
            strides: context.strides.as_mut_ptr(),
            byte_offset: 0,
        };
        Ok(Self { tensor, context })
    }

    /// Makes the struct for a reader, which calls its deleter.
    pub fn versioned(self, flags: u64) -> NonNull<DLManagedTensorVersioned> {
        let (major, minor) = VERSION;
        let context = Box::into_raw(self.context).cast();
        let deleter = Some(delete as unsafe extern "C" fn(_));
        let tensor = self.tensor;
        Box::leak(Box::new(DLManagedTensorVersioned { major, minor, context, deleter, flags, tensor })).into()
    }

    /// Makes the struct for a reader older than version 1, which calls its deleter.
    pub fn unversioned(self) -> NonNull<DLManagedTensor> {
        let context = Box::into_raw(self.context).cast();
        Box::leak(Box::new(DLManagedTensor { tensor: self.tensor, context, deleter: Some(delete) })).into()
    }
}

/// Frees an exported tensor, on any thread.
///
/// # Safety
/// `managed` is null or of an [`Exported`], and this is the only call.
unsafe extern "C" fn delete<T: Managed>(managed: *mut T) {
    if managed.is_null() {
        return;
    }
    let free = || {
        // SAFETY: both were boxes, and only this call takes them back.
        let context = unsafe { Box::from_raw(managed) }.context();
        // SAFETY: as above.
        drop(unsafe { Box::from_raw(context.cast::<Context>()) });
    };
    // The panic was printed.
    let _ = catch_unwind(AssertUnwindSafe(free));
}

/// A managed tensor of another library. Calls its deleter when dropped.
pub struct Foreign {
    tensor: NonNull<DLTensor>,
    flags: u64,
    free: Box<dyn FnMut()>,
}

// SAFETY: DLPack's deleters may be called on any thread; the rest is only read.
unsafe impl Send for Foreign {}
// SAFETY: as above.
unsafe impl Sync for Foreign {}

/// The elements of a tensor of another library.
#[derive(Debug)]
pub struct Elements {
    /// The element type.
    pub dtype: ElementType,
    /// The length of each dimension.
    pub shape: Vec<u64>,
    /// The distance of neighbours along each dimension in bytes; `None` for C order.
    pub strides: Option<Vec<i64>>,
    /// The address of the element with all indices 0.
    pub address: u64,
    /// Where the memory is.
    pub device: DLDevice,
    /// Whether its owner forbids writes.
    pub read_only: bool,
}

/// Why a tensor can't be used: the end of a sentence about it.
#[derive(Debug)]
pub enum Unusable {
    /// It breaks the rules of DLPack, or is of a newer version.
    Malformed(String),
    /// Its elements are not supported.
    Unsupported(String),
}

impl Foreign {
    /// Takes ownership of a tensor.
    ///
    /// # Errors
    /// [`Unusable::Malformed`] for a newer major version. The tensor's deleter is called then.
    ///
    /// # Safety
    /// The tensor is valid and the caller's own.
    pub unsafe fn versioned(managed: NonNull<DLManagedTensorVersioned>) -> Result<Self, Unusable> {
        // SAFETY: guaranteed by the caller. Every version starts with its number, its owner and its deleter.
        let (major, deleter, flags) =
            unsafe { ((*managed.as_ptr()).major, (*managed.as_ptr()).deleter, (*managed.as_ptr()).flags) };
        // SAFETY: the field is inside the struct.
        let tensor = unsafe { NonNull::new_unchecked(&raw mut (*managed.as_ptr()).tensor) };
        // SAFETY: called once, by `drop`.
        let free = move || unsafe { deleter.into_iter().for_each(|delete| delete(managed.as_ptr())) };
        let owned = Self { tensor, flags, free: Box::new(free) };
        match major {
            _ if major <= VERSION.0 => Ok(owned),
            _ => Err(Unusable::Malformed(format!("has version {major} of DLPack: export it as version 1"))),
        }
    }

    /// Takes ownership of a tensor without a version.
    ///
    /// # Safety
    /// The tensor is valid and the caller's own.
    pub unsafe fn unversioned(managed: NonNull<DLManagedTensor>) -> Self {
        // SAFETY: guaranteed by the caller.
        let deleter = unsafe { managed.as_ref() }.deleter;
        // SAFETY: called once, by `drop`.
        let free = move || unsafe { deleter.into_iter().for_each(|delete| delete(managed.as_ptr())) };
        // The tensor is the first field.
        Self { tensor: managed.cast(), flags: 0, free: Box::new(free) }
    }

    /// Describes the elements.
    ///
    /// # Errors
    /// [`Unusable`].
    pub fn elements(&self) -> Result<Elements, Unusable> {
        // SAFETY: the tensor is valid until its deleter runs, in `drop`.
        let tensor = unsafe { self.tensor.as_ref() };
        let DLDataType { code, bits, lanes } = tensor.dtype;
        let dtype = ElementType::from_dlpack(code, bits).filter(|_| lanes == 1).ok_or_else(|| {
            let of = format!("elements of code {code} with {bits} bits and {lanes} lanes");
            Unusable::Unsupported(format!("has {of}, which are not supported"))
        })?;
        let wrong = |what: &str| Unusable::Malformed(what.to_owned());
        let dimensions = usize::try_from(tensor.ndim).ok().filter(|dimensions| *dimensions <= MAX_DIMENSIONS);
        let dimensions = dimensions
            .ok_or_else(|| wrong(&format!("has {} dimensions: at most {MAX_DIMENSIONS} are supported", tensor.ndim)))?;
        if dimensions > 0 && tensor.shape.is_null() {
            return Err(wrong("is without a shape"));
        }
        let read = |start: *const i64| -> Vec<i64> {
            // SAFETY: both lists have `ndim` entries, and live as long as the tensor.
            (0..dimensions).map(|at| unsafe { start.add(at).read() }).collect()
        };
        let shape: Result<Vec<u64>, _> = read(tensor.shape).into_iter().map(u64::try_from).collect();
        let shape = shape.map_err(|_| wrong("has a negative length"))?;
        if tensor.data.is_null() && !shape.contains(&0) {
            return Err(wrong("has no data"));
        }
        let size = dtype.size() as i64;
        let has_strides = dimensions > 0 && !tensor.strides.is_null();
        let steps = if has_strides { Some(read(tensor.strides)) } else { None };
        let strides = steps.map(|steps| steps.into_iter().map(|step| step.saturating_mul(size)).collect());
        let address = (tensor.data.expose_provenance() as u64).wrapping_add(tensor.byte_offset);
        let read_only = self.flags & READ_ONLY != 0;
        Ok(Elements { dtype, shape, strides, address, device: tensor.device, read_only })
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        (self.free)();
    }
}
