//! The structs of DLPack 1, its type codes, and tensors of other libraries.

use std::{ffi::c_void, ptr::NonNull};

use vmmfd::array::ElementType;

use crate::error::{Failure, Outcome};

/// `kDLCPU`
pub(crate) const CPU: i32 = 1;
/// `kDLCUDA`
pub(crate) const CUDA: i32 = 2;
/// `kDLCUDAHost`
pub(crate) const CUDA_HOST: i32 = 3;
/// `kDLCUDAManaged`
pub(crate) const CUDA_MANAGED: i32 = 13;
/// `DLPACK_FLAG_BITMASK_READ_ONLY`
pub(crate) const READ_ONLY: u64 = 1;
/// The version of exported tensors: 1.1 added the 8-bit floats.
pub(crate) const VERSION: (u32, u32) = (1, 1);

#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DLDevice {
    pub(crate) kind: i32,
    pub(crate) id: i32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct DLDataType {
    pub(crate) code: u8,
    pub(crate) bits: u8,
    pub(crate) lanes: u16,
}

#[repr(C)]
#[derive(Debug)]
pub(crate) struct DLTensor {
    pub(crate) data: *mut c_void,
    pub(crate) device: DLDevice,
    pub(crate) ndim: i32,
    pub(crate) dtype: DLDataType,
    pub(crate) shape: *mut i64,
    pub(crate) strides: *mut i64,
    pub(crate) byte_offset: u64,
}

/// The struct of `dlpack.h`, which the header only declares.
#[repr(C)]
#[derive(Debug)]
pub struct DLManagedTensorVersioned {
    pub(crate) major: u32,
    pub(crate) minor: u32,
    pub(crate) context: *mut c_void,
    pub(crate) deleter: Option<unsafe extern "C" fn(*mut DLManagedTensorVersioned)>,
    pub(crate) flags: u64,
    pub(crate) tensor: DLTensor,
}

/// A tensor of another library. Calls its deleter when dropped.
pub(crate) struct Foreign(NonNull<DLManagedTensorVersioned>);

/// The elements of a tensor.
pub(crate) struct Elements {
    pub(crate) dtype: ElementType,
    pub(crate) shape: Vec<u64>,
    /// In bytes.
    pub(crate) strides: Option<Vec<i64>>,
    pub(crate) address: u64,
    pub(crate) device: DLDevice,
}

impl Foreign {
    /// Takes ownership of a tensor.
    ///
    /// # Errors
    /// For null, and for a tensor of a newer major version, whose deleter is called.
    pub(crate) fn take(tensor: *mut DLManagedTensorVersioned) -> Outcome<Self> {
        let tensor = NonNull::new(tensor).ok_or_else(|| Failure::invalid("tensor is NULL: pass a DLPack tensor"))?;
        let owned = Self(tensor);
        // SAFETY: the caller passes a valid tensor. Every version starts with its number.
        let major = unsafe { tensor.as_ref() }.major;
        if major > VERSION.0 {
            return Err(Failure::invalid(format!("the tensor has version {major} of DLPack: export it as version 1")));
        }
        Ok(owned)
    }

    /// # Errors
    /// For malformed tensors, and for elements that this library does not know.
    pub(crate) fn elements(&self) -> Outcome<Elements> {
        // SAFETY: the tensor is valid until its deleter runs, in `drop`.
        let tensor = &unsafe { self.0.as_ref() }.tensor;
        let wrong = |what: String| Failure::invalid(format!("the DLPack tensor {what}"));
        let code = tensor.dtype.code;
        let bits = tensor.dtype.bits;
        let lanes = tensor.dtype.lanes;
        let known = ElementType::from_dlpack(code, bits).filter(|_| lanes == 1);
        let dtype = known.ok_or_else(|| {
            wrong(format!("has elements of code {code} with {bits} bits and {lanes} lanes, which are not supported"))
        })?;
        let dimensions = usize::try_from(tensor.ndim).ok().filter(|dimensions| *dimensions <= 64);
        let dimensions =
            dimensions.ok_or_else(|| wrong(format!("has {} dimensions: at most 64 are supported", tensor.ndim)))?;
        if dimensions > 0 && tensor.shape.is_null() {
            return Err(wrong("has no shape".to_owned()));
        }
        let read = |start: *const i64| -> Vec<i64> {
            // SAFETY: both lists have `ndim` entries, and live as long as the tensor.
            (0..dimensions).map(|at| unsafe { start.add(at).read() }).collect()
        };
        let shape = if dimensions == 0 { Vec::new() } else { read(tensor.shape) };
        let shape: Result<Vec<u64>, _> = shape.into_iter().map(u64::try_from).collect();
        let shape = shape.map_err(|_| wrong("has a negative length".to_owned()))?;
        let size = dtype.size() as i64;
        let has_strides = dimensions > 0 && !tensor.strides.is_null();
        let strides =
            has_strides.then(|| read(tensor.strides).into_iter().map(|step| step.saturating_mul(size)).collect());
        let address = (tensor.data.expose_provenance() as u64).wrapping_add(tensor.byte_offset);
        Ok(Elements { dtype, shape, strides, address, device: tensor.device })
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        // SAFETY: this object owns the tensor, and calls its deleter once.
        unsafe {
            if let Some(deleter) = self.0.as_ref().deleter {
                deleter(self.0.as_ptr());
            }
        }
    }
}
