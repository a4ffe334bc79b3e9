//! Arrays as DLPack capsules, and the tensors in capsules of other libraries.

#![allow(unsafe_code)]

use std::{
    ffi::{CStr, c_void},
    ptr::NonNull,
    sync::Arc,
};

use pyo3::{ffi, prelude::*, sync::critical_section::with_critical_section};
use vmmfd::{
    array::ArrayDescriptor,
    bindings::dlpack::{
        DLDevice, DLManagedTensor, DLManagedTensorVersioned, Elements, Exported, Foreign, IS_COPIED, READ_ONLY,
        Unusable,
    },
    memory::Device,
};

use crate::{
    error::{Failure, Outcome},
    memory::{Export, Memory},
};

/// The names of a capsule without and with a version, before and after a consumer took its tensor.
const NAMES: [&CStr; 2] = [c"dltensor", c"dltensor_versioned"];
const USED: [&CStr; 2] = [c"used_dltensor", c"used_dltensor_versioned"];

/// Returns the DLPack name of a device.
pub(crate) fn device(device: &Device) -> DLDevice {
    DLDevice::new(device.is_host(), device.ordinal())
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
    let dtype = array.dtype;
    let first = memory.address() + array.offset;
    if dtype.dlpack().is_none() {
        let text = format!(
            "DLPack has no code for elements of type {dtype}: use reinterpret(\"uint8\"), or Lease.state_dict() for a type of PyTorch"
        );
        return Err(Failure::export(text));
    }
    // DLPack requires the alignment of an element, at most 8.
    if !array.shape.contains(&0) && !first.is_multiple_of(dtype.size().min(8)) {
        return Err(Failure::export(format!("its first element, at {first:#x}, is not aligned for {dtype}")));
    }
    // The export counts until the memory is released.
    let owner = (Arc::clone(memory), export);
    let exported = Exported::new(array, memory.address(), device(memory.device()), owner).map_err(Failure::export)?;
    let flags = if wanted.read_only { READ_ONLY } else { 0 } | if wanted.copied { IS_COPIED } else { 0 };
    let tensor: NonNull<c_void> = match wanted.versioned {
        true => exported.versioned(flags).cast(),
        false => exported.unversioned().cast(),
    };
    let name = NAMES[usize::from(wanted.versioned)];
    // SAFETY: the pointer is not null, and the name is static.
    let capsule = unsafe { ffi::PyCapsule_New(tensor.as_ptr(), name.as_ptr(), Some(drop_capsule)) };
    // SAFETY: it is a new reference, or null with an exception set.
    let capsule = unsafe { Bound::from_owned_ptr_or_err(py, capsule) };
    // SAFETY: without a capsule, nothing else has a pointer to the tensor.
    Ok(capsule.inspect_err(|_| drop(unsafe { foreign(tensor, wanted.versioned) }))?)
}

/// Takes ownership of a tensor.
///
/// # Safety
/// The tensor is valid, the caller's own, and has a version or not.
unsafe fn foreign(tensor: NonNull<c_void>, versioned: bool) -> Result<Foreign, Unusable> {
    // SAFETY: guaranteed by the caller.
    unsafe {
        match versioned {
            true => Foreign::versioned(tensor.cast::<DLManagedTensorVersioned>()),
            false => Ok(Foreign::unversioned(tensor.cast::<DLManagedTensor>())),
        }
    }
}

/// Returns the pointer of a capsule, and whether its tensor has a version. `None` for other objects, and if a consumer took the tensor and
/// renamed the capsule.
///
/// # Safety
/// `capsule` is an object.
unsafe fn unclaimed(capsule: *mut ffi::PyObject) -> Option<(NonNull<c_void>, bool)> {
    [true, false].into_iter().find_map(|versioned| {
        let name = NAMES[usize::from(versioned)].as_ptr();
        // SAFETY: guaranteed by the caller. Neither call raises for a valid capsule, so a pending exception is preserved.
        let pointer = unsafe {
            match ffi::PyCapsule_IsValid(capsule, name) {
                0 => return None,
                _ => ffi::PyCapsule_GetPointer(capsule, name),
            }
        };
        Some((NonNull::new(pointer)?, versioned))
    })
}

/// SAFETY: Python calls it once, for a capsule of [`capsule`].
unsafe extern "C" fn drop_capsule(capsule: *mut ffi::PyObject) {
    // SAFETY: it is a capsule, and owns its tensor unless a consumer took it.
    unsafe {
        if let Some((tensor, versioned)) = unclaimed(capsule) {
            drop(foreign(tensor, versioned));
        }
    }
}

/// A problem of a tensor: `BufferError` if it is malformed, `ValueError` for elements that are not supported.
fn unusable(problem: Unusable) -> Failure {
    match problem {
        Unusable::Malformed(text) => Failure::export(format!("__dlpack__ returned a tensor that {text}")),
        Unusable::Unsupported(text) => Failure::invalid(format!("the DLPack tensor {text}")),
    }
}

/// Takes ownership of a capsule's tensor, and renames the capsule.
///
/// Without a GIL several threads may have the same capsule: only one of them gets the tensor.
///
/// # Errors
/// `BufferError` for an object that is not a DLPack capsule, was taken before, or has a newer major version, and for a malformed tensor;
/// `ValueError` for elements that are not supported.
pub(crate) fn take(capsule: &Bound<'_, PyAny>) -> Outcome<(Foreign, Elements)> {
    // The closure never calls Python code, which could let another thread in.
    let taken = with_critical_section(capsule, || {
        let raw = capsule.as_ptr();
        // SAFETY: the name of a valid capsule determines the type of its pointer. The renamed capsule no longer owns the tensor.
        unsafe {
            let (tensor, versioned) = unclaimed(raw)?;
            ffi::PyCapsule_SetName(raw, USED[usize::from(versioned)].as_ptr());
            Some(foreign(tensor, versioned))
        }
    });
    let taken = taken.ok_or_else(|| Failure::export("__dlpack__ returned an object that is not a DLPack capsule"))?;
    let taken = taken.map_err(unusable)?;
    let elements = taken.elements().map_err(unusable)?;
    Ok((taken, elements))
}
