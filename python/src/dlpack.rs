//! DLPack: the structs of its version 1, and arrays as managed tensors.
//!
//! By hand, and not by the crate dlpark: what is needed of it are two structs, and that a managed tensor holds Rust's memory alone, so
//! that its deleter needs no interpreter.

#![allow(unsafe_code)]

use std::{
    ffi::{CStr, c_void},
    ptr::{self, NonNull},
    sync::Arc,
};

use pyo3::{ffi, prelude::*, sync::critical_section::with_critical_section};
use vmmfd::{array::ArrayDescriptor, memory::Device};

use crate::{
    dtype,
    error::{Failure, Outcome},
    memory::{Export, Memory},
};

/// `DLDeviceType`: memory of the CPU.
pub(crate) const CPU: i32 = 1;
/// Memory of a GPU of CUDA.
pub(crate) const CUDA: i32 = 2;
/// Page-locked memory of the CPU.
pub(crate) const CUDA_HOST: i32 = 3;
/// Managed memory of CUDA.
pub(crate) const CUDA_MANAGED: i32 = 13;

const READ_ONLY: u64 = 1;
const IS_COPIED: u64 = 2;

/// The version that is spoken here: 1.1 has the 8-bit floats.
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

/// What a managed tensor owns: nothing of Python's.
struct Context {
    shape: Box<[i64]>,
    strides: Box<[i64]>,
    // The memory is let go of while it still counts as exported.
    _memory: Arc<dyn Memory>,
    _export: Export,
}

/// How DLPack names a device.
pub(crate) fn device(device: &Device) -> DlDevice {
    if device.is_host() { DlDevice { kind: CPU, id: 0 } } else { DlDevice { kind: CUDA, id: device.ordinal() } }
}

/// What a consumer asks for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wanted {
    /// Whether it knows version 1: flags, and so the one that says read-only.
    pub(crate) versioned: bool,
    pub(crate) read_only: bool,
    /// Whether the memory is a copy that was made for this consumer.
    pub(crate) copied: bool,
}

/// A capsule with an array as a managed tensor, which `export` stands for.
///
/// # Errors
/// `BufferError` for elements that DLPack can't describe.
pub(crate) fn capsule<'py>(
    py: Python<'py>,
    memory: &Arc<dyn Memory>,
    array: &ArrayDescriptor,
    export: Export,
    wanted: Wanted,
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
            // SAFETY: it was just made, and no one else has it.
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
    let Some((code, bits)) = dtype::code(array.dtype) else {
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
                "DLPack counts strides in elements, and {stride} bytes are no whole number of {}",
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

/// What an element's address is a multiple of: its size, or half of it for complex numbers of 16 bytes.
fn alignment(size: u64) -> u64 {
    size.min(8)
}

/// SAFETY: called once, with what [`capsule`] made, on any thread, with or without an interpreter.
unsafe extern "C" fn delete(managed: *mut Managed) {
    if managed.is_null() {
        return;
    }
    // SAFETY: both were boxes, and this is the one call that takes them back.
    let context = unsafe { Box::from_raw(managed) }.context;
    // SAFETY: as above.
    drop(unsafe { Box::from_raw(context.cast::<Context>()) });
}

/// SAFETY: as [`delete`].
unsafe extern "C" fn delete_versioned(managed: *mut Versioned) {
    if managed.is_null() {
        return;
    }
    // SAFETY: both were boxes, and this is the one call that takes them back.
    let context = unsafe { Box::from_raw(managed) }.context;
    // SAFETY: as above.
    drop(unsafe { Box::from_raw(context.cast::<Context>()) });
}

/// The pointer of a capsule of this name, unless a consumer took it and renamed the capsule.
///
/// # Safety
/// `capsule` is a capsule.
unsafe fn left<T>(capsule: *mut ffi::PyObject, name: &CStr) -> Option<NonNull<T>> {
    // SAFETY: the caller's promise. Neither call raises for a valid capsule, so an exception that is set stays.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, name.as_ptr()) == 0 {
            return None;
        }
        NonNull::new(ffi::PyCapsule_GetPointer(capsule, name.as_ptr()).cast())
    }
}

/// SAFETY: Python calls it, once, for a capsule of [`capsule`].
unsafe extern "C" fn drop_unversioned(capsule: *mut ffi::PyObject) {
    // SAFETY: it is a capsule; what no consumer took is its own.
    unsafe {
        if let Some(managed) = left::<Managed>(capsule, NAME) {
            delete(managed.as_ptr());
        }
    }
}

/// SAFETY: as [`drop_unversioned`].
unsafe extern "C" fn drop_versioned(capsule: *mut ffi::PyObject) {
    // SAFETY: as above.
    unsafe {
        if let Some(managed) = left::<Versioned>(capsule, NAME_VERSIONED) {
            delete_versioned(managed.as_ptr());
        }
    }
}

/// A managed tensor of another library's: deleted when it is dropped.
#[derive(Debug)]
pub(crate) enum Taken {
    Managed(NonNull<Managed>),
    Versioned(NonNull<Versioned>),
}

// SAFETY: DLPack's deleters may be called on any thread; the rest is only read.
unsafe impl Send for Taken {}
// SAFETY: as above.
unsafe impl Sync for Taken {}

impl Taken {
    /// Takes a capsule's tensor over, and renames the capsule.
    ///
    /// Without a GIL another thread may have the same capsule: of several that are in here one gets the tensor.
    ///
    /// # Errors
    /// `BufferError` for what is no capsule of DLPack's, was taken before, or is of a newer major version.
    pub(crate) fn from(capsule: &Bound<'_, PyAny>) -> Outcome<Self> {
        // Nothing in there calls back into Python, which would let another thread in.
        with_critical_section(capsule, || Self::renamed(capsule))
    }

    fn renamed(capsule: &Bound<'_, PyAny>) -> Outcome<Self> {
        let bad = |problem: &str| Failure::export(format!("__dlpack__ returned {problem}"));
        let raw = capsule.as_ptr();
        // SAFETY: `PyCapsule_IsValid` takes any object; a valid capsule's pointer is of its name's type.
        unsafe {
            if let Some(managed) = left::<Versioned>(raw, NAME_VERSIONED) {
                if managed.as_ref().major() > VERSION.0 {
                    return Err(bad("a tensor of a newer version of DLPack than 1"));
                }
                ffi::PyCapsule_SetName(raw, USED_VERSIONED.as_ptr());
                return Ok(Self::Versioned(managed));
            }
            if let Some(managed) = left::<Managed>(raw, NAME) {
                ffi::PyCapsule_SetName(raw, USED.as_ptr());
                return Ok(Self::Managed(managed));
            }
        }
        Err(bad("no capsule of DLPack's"))
    }

    /// The tensor.
    pub(crate) fn tensor(&self) -> &DlTensor {
        // SAFETY: it is the owner's until it is deleted, which is when this is dropped.
        unsafe {
            match self {
                Self::Managed(managed) => &managed.as_ref().tensor,
                Self::Versioned(managed) => &managed.as_ref().tensor,
            }
        }
    }

    /// Whether its flags say that it must not be written.
    pub(crate) fn is_read_only(&self) -> bool {
        match self {
            Self::Managed(_) => false,
            // SAFETY: as above.
            Self::Versioned(managed) => unsafe { managed.as_ref() }.is_read_only(),
        }
    }

    /// Its lengths and, if it has any, its strides, in elements.
    ///
    /// # Errors
    /// `BufferError` for what no tensor has: more than 64 dimensions or fewer than none, none of the lengths, or a negative one.
    pub(crate) fn layout(&self) -> Outcome<(Vec<u64>, Option<Vec<i64>>)> {
        let tensor = self.tensor();
        let wrong = |what: &str| Failure::export(format!("__dlpack__ returned a tensor {what}"));
        let dimensions = usize::try_from(tensor.ndim).ok().filter(|dimensions| *dimensions <= 64);
        let dimensions = dimensions.ok_or_else(|| wrong(&format!("of {} dimensions: 0 to 64 can be", tensor.ndim)))?;
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

impl Drop for Taken {
    fn drop(&mut self) {
        // SAFETY: it was taken over, and its deleter is called once.
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
