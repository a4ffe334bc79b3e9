//! DLPack: the structs of its version 1, and arrays as managed tensors.
//!
//! Not the crate dlpark: this module needs only two structs, and a managed tensor must hold only Rust's memory, so that its deleter needs
//! no interpreter.

#![allow(unsafe_code)]

use std::{
    ffi::{CStr, c_void},
    ptr::{self, NonNull},
    sync::Arc,
};

use pyo3::{ffi, prelude::*, sync::critical_section::with_critical_section};
use vmmfd::{array::ArrayDescriptor, memory::Device};

use crate::{
    error::{Failure, Outcome},
    memory::{Export, Memory},
};

/// `DLDeviceType`: memory of the CPU.
pub(crate) const CPU: i32 = 1;
/// CUDA device memory.
pub(crate) const CUDA: i32 = 2;
/// Page-locked host memory.
pub(crate) const CUDA_HOST: i32 = 3;
/// CUDA managed memory.
pub(crate) const CUDA_MANAGED: i32 = 13;

const READ_ONLY: u64 = 1;
const IS_COPIED: u64 = 2;

/// The version of capsules made here: 1.1 added the 8-bit floats.
pub(crate) const VERSION: (u32, u32) = (1, 1);

#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DlDevice {
    pub(crate) kind: i32,
    pub(crate) id: i32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct DlDataType {
    pub(crate) code: u8,
    pub(crate) bits: u8,
    pub(crate) lanes: u16,
}

#[repr(C)]
#[derive(Debug)]
pub(crate) struct DlTensor {
    pub(crate) data: *mut c_void,
    pub(crate) device: DlDevice,
    pub(crate) ndim: i32,
    pub(crate) dtype: DlDataType,
    pub(crate) shape: *mut i64,
    pub(crate) strides: *mut i64,
    pub(crate) byte_offset: u64,
}

#[repr(C)]
#[derive(Debug)]
pub(crate) struct Managed {
    pub(crate) tensor: DlTensor,
    context: *mut c_void,
    pub(crate) deleter: Option<unsafe extern "C" fn(*mut Managed)>,
}

#[repr(C)]
#[derive(Debug)]
pub(crate) struct Versioned {
    major: u32,
    minor: u32,
    context: *mut c_void,
    pub(crate) deleter: Option<unsafe extern "C" fn(*mut Versioned)>,
    flags: u64,
    pub(crate) tensor: DlTensor,
}

impl Versioned {
    pub(crate) fn is_read_only(&self) -> bool {
        self.flags & READ_ONLY != 0
    }

    pub(crate) fn major(&self) -> u32 {
        self.major
    }
}

pub(crate) const NAME: &CStr = c"dltensor";
pub(crate) const NAME_VERSIONED: &CStr = c"dltensor_versioned";
pub(crate) const USED: &CStr = c"used_dltensor";
pub(crate) const USED_VERSIONED: &CStr = c"used_dltensor_versioned";

/// The owner of a managed tensor's memory: no Python objects.
struct Context {
    shape: Box<[i64]>,
    strides: Box<[i64]>,
    // Dropped before the export, so that the memory counts as exported until it is released.
    _memory: Arc<dyn Memory>,
    _export: Export,
}

/// Returns the DLPack name of a device.
pub(crate) fn device(device: &Device) -> DlDevice {
    if device.is_host() { DlDevice { kind: CPU, id: 0 } } else { DlDevice { kind: CUDA, id: device.ordinal() } }
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct CapsuleOptions {
    /// Whether the consumer supports version 1, whose flags include read-only.
    pub(crate) versioned: bool,
    pub(crate) read_only: bool,
    /// Whether the memory is a copy made for this consumer.
    pub(crate) copied: bool,
}

/// Returns a capsule with an array as a managed tensor. The tensor owns `export`.
///
/// # Errors
/// `BufferError` for element types that DLPack lacks.
pub(crate) fn capsule<'py>(
    py: Python<'py>,
    memory: &Arc<dyn Memory>,
    array: &ArrayDescriptor,
    export: Export,
    wanted: CapsuleOptions,
) -> Outcome<Bound<'py, PyAny>> {
    let (tensor, context) = tensor(memory, array, export)?;
    if wanted.versioned {
        let flags = if wanted.read_only { READ_ONLY } else { 0 } | if wanted.copied { IS_COPIED } else { 0 };
        let (major, minor) = VERSION;
        let context = Box::into_raw(context).cast();
        let managed = Box::new(Versioned { major, minor, context, deleter: Some(delete_versioned), flags, tensor });
        let managed = Box::into_raw(managed);
        // SAFETY: the pointer is not null, and the name is static.
        let capsule = unsafe { ffi::PyCapsule_New(managed.cast(), NAME_VERSIONED.as_ptr(), Some(drop_versioned)) };
        // SAFETY: it is a new reference, or null with an exception set.
        unsafe { Bound::from_owned_ptr_or_err(py, capsule) }.map_err(|error| {
            // SAFETY: it was just made, and nothing else has a pointer to it.
            unsafe { delete_versioned(managed) };
            error.into()
        })
    } else {
        let context = Box::into_raw(context).cast();
        let managed = Box::into_raw(Box::new(Managed { tensor, context, deleter: Some(delete) }));
        // SAFETY: as above.
        let capsule = unsafe { ffi::PyCapsule_New(managed.cast(), NAME.as_ptr(), Some(drop_unversioned)) };
        // SAFETY: as above.
        unsafe { Bound::from_owned_ptr_or_err(py, capsule) }.map_err(|error| {
            // SAFETY: as above.
            unsafe { delete(managed) };
            error.into()
        })
    }
}

fn tensor(memory: &Arc<dyn Memory>, array: &ArrayDescriptor, export: Export) -> Outcome<(DlTensor, Box<Context>)> {
    let Some((code, bits)) = array.dtype.dlpack() else {
        return Err(Failure::export(format!(
            "DLPack has no code for elements of type {}: use reinterpret(\"uint8\")",
            array.dtype
        )));
    };
    let size = array.dtype.size() as i64;
    let mut strides = Vec::with_capacity(array.shape.len());
    for stride in array.strides_in_bytes()? {
        if stride % size != 0 {
            return Err(Failure::export(format!(
                "DLPack counts strides in elements, and {stride} bytes are not a multiple of {}",
                array.dtype
            )));
        }
        strides.push(stride / size);
    }
    let shape: Vec<i64> = array.shape.iter().map(|length| i64::try_from(*length).unwrap_or(i64::MAX)).collect();
    let data = if array.shape.contains(&0) { 0 } else { memory.address() + array.offset };
    if !data.is_multiple_of(alignment(array.dtype.size())) {
        return Err(Failure::export(format!("its first element, at {data:#x}, is not aligned for {}", array.dtype)));
    }
    let mut context = Box::new(Context {
        shape: shape.into(),
        strides: strides.into(),
        _memory: Arc::clone(memory),
        _export: export,
    });
    let tensor = DlTensor {
        data: ptr::without_provenance_mut(data as usize),
        device: device(memory.device()),
        ndim: context.shape.len() as i32,
        dtype: DlDataType { code, bits, lanes: 1 },
        shape: context.shape.as_mut_ptr(),
        strides: context.strides.as_mut_ptr(),
        byte_offset: 0,
    };
    Ok((tensor, context))
}

/// The alignment that DLPack requires of an element's address: its size, at most 8.
fn alignment(size: u64) -> u64 {
    size.min(8)
}

/// SAFETY: called once, with a pointer from [`capsule`], on any thread, with or without an interpreter.
unsafe extern "C" fn delete(managed: *mut Managed) {
    if managed.is_null() {
        return;
    }
    // SAFETY: both were boxes, and only this call takes them back.
    let context = unsafe { Box::from_raw(managed) }.context;
    // SAFETY: as above.
    drop(unsafe { Box::from_raw(context.cast::<Context>()) });
}

/// SAFETY: as [`delete`].
unsafe extern "C" fn delete_versioned(managed: *mut Versioned) {
    if managed.is_null() {
        return;
    }
    // SAFETY: both were boxes, and only this call takes them back.
    let context = unsafe { Box::from_raw(managed) }.context;
    // SAFETY: as above.
    drop(unsafe { Box::from_raw(context.cast::<Context>()) });
}

/// Returns the pointer of a capsule of this name, unless a consumer took it and renamed the capsule.
///
/// # Safety
/// `capsule` is a capsule.
unsafe fn unclaimed<T>(capsule: *mut ffi::PyObject, name: &CStr) -> Option<NonNull<T>> {
    // SAFETY: guaranteed by the caller. Neither call raises for a valid capsule, so a pending exception is preserved.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, name.as_ptr()) == 0 {
            return None;
        }
        NonNull::new(ffi::PyCapsule_GetPointer(capsule, name.as_ptr()).cast())
    }
}

/// SAFETY: Python calls it once, for a capsule of [`capsule`].
unsafe extern "C" fn drop_unversioned(capsule: *mut ffi::PyObject) {
    // SAFETY: it is a capsule, and owns its tensor unless a consumer took it.
    unsafe {
        if let Some(managed) = unclaimed::<Managed>(capsule, NAME) {
            delete(managed.as_ptr());
        }
    }
}

/// SAFETY: as [`drop_unversioned`].
unsafe extern "C" fn drop_versioned(capsule: *mut ffi::PyObject) {
    // SAFETY: as above.
    unsafe {
        if let Some(managed) = unclaimed::<Versioned>(capsule, NAME_VERSIONED) {
            delete_versioned(managed.as_ptr());
        }
    }
}

/// A managed tensor of another library. Calls its deleter when dropped.
#[derive(Debug)]
pub(crate) enum ForeignTensor {
    Managed(NonNull<Managed>),
    Versioned(NonNull<Versioned>),
}

// SAFETY: DLPack's deleters may be called on any thread; the rest is only read.
unsafe impl Send for ForeignTensor {}
// SAFETY: as above.
unsafe impl Sync for ForeignTensor {}

impl ForeignTensor {
    /// Takes ownership of a capsule's tensor, and renames the capsule.
    ///
    /// Without a GIL several threads may have the same capsule: only one of them gets the tensor.
    ///
    /// # Errors
    /// `BufferError` for an object that is not a DLPack capsule, was taken before, or has a newer major version.
    pub(crate) fn from(capsule: &Bound<'_, PyAny>) -> Outcome<Self> {
        // The closure never calls Python code, which could let another thread in.
        with_critical_section(capsule, || Self::renamed(capsule))
    }

    fn renamed(capsule: &Bound<'_, PyAny>) -> Outcome<Self> {
        let bad = |problem: &str| Failure::export(format!("__dlpack__ returned {problem}"));
        let raw = capsule.as_ptr();
        // SAFETY: `PyCapsule_IsValid` takes any object; the name of a valid capsule determines the type of its pointer.
        unsafe {
            if let Some(managed) = unclaimed::<Versioned>(raw, NAME_VERSIONED) {
                if managed.as_ref().major() > VERSION.0 {
                    return Err(bad("a tensor of a newer version of DLPack than 1"));
                }
                ffi::PyCapsule_SetName(raw, USED_VERSIONED.as_ptr());
                return Ok(Self::Versioned(managed));
            }
            if let Some(managed) = unclaimed::<Managed>(raw, NAME) {
                ffi::PyCapsule_SetName(raw, USED.as_ptr());
                return Ok(Self::Managed(managed));
            }
        }
        Err(bad("an object that is not a DLPack capsule"))
    }

    pub(crate) fn tensor(&self) -> &DlTensor {
        // SAFETY: the tensor is valid until its deleter runs, in `drop`.
        unsafe {
            match self {
                Self::Managed(managed) => &managed.as_ref().tensor,
                Self::Versioned(managed) => &managed.as_ref().tensor,
            }
        }
    }

    /// Whether its flags forbid writes.
    pub(crate) fn is_read_only(&self) -> bool {
        match self {
            Self::Managed(_) => false,
            // SAFETY: as above.
            Self::Versioned(managed) => unsafe { managed.as_ref() }.is_read_only(),
        }
    }

    /// Returns its lengths and, if it has any, its strides, in elements.
    ///
    /// # Errors
    /// `BufferError` for a number of dimensions outside 0 to 64, missing lengths, or a negative length.
    pub(crate) fn layout(&self) -> Outcome<(Vec<u64>, Option<Vec<i64>>)> {
        let tensor = self.tensor();
        let wrong = |what: &str| Failure::export(format!("__dlpack__ returned a tensor {what}"));
        let dimensions = usize::try_from(tensor.ndim).ok().filter(|dimensions| *dimensions <= 64);
        let dimensions =
            dimensions.ok_or_else(|| wrong(&format!("of {} dimensions: at most 64 are supported", tensor.ndim)))?;
        if dimensions > 0 && tensor.shape.is_null() {
            return Err(wrong("without a shape"));
        }
        let list = |start: *const i64| -> Vec<i64> {
            // SAFETY: both lists have `ndim` entries, and live as long as the tensor.
            (0..dimensions).map(|at| unsafe { start.add(at).read() }).collect()
        };
        let shape = if dimensions == 0 { Vec::new() } else { list(tensor.shape) };
        let shape: Result<Vec<u64>, _> = shape.into_iter().map(u64::try_from).collect();
        let shape = shape.map_err(|_| wrong("with a negative length"))?;
        Ok((shape, (!tensor.strides.is_null() && dimensions > 0).then(|| list(tensor.strides))))
    }
}

impl Drop for ForeignTensor {
    fn drop(&mut self) {
        // SAFETY: this object owns the tensor, and calls its deleter once.
        unsafe {
            match self {
                Self::Managed(managed) => {
                    if let Some(deleter) = managed.as_ref().deleter {
                        deleter(managed.as_ptr());
                    }
                }
                Self::Versioned(managed) => {
                    if let Some(deleter) = managed.as_ref().deleter {
                        deleter(managed.as_ptr());
                    }
                }
            }
        }
    }
}
