//! The buffer protocol (PEP 3118), for host memory.

#![allow(unsafe_code)]

use std::{
    ffi::{CString, c_int, c_void},
    ptr,
};

use pyo3::{exceptions::PyBufferError, ffi, prelude::*};
use vmmfd::{array::ArrayDescriptor, bindings::Walk};

use crate::{
    array::Array,
    dtype,
    error::{Failure, Outcome},
    memory::Export,
};

/// The data of a view, freed when the view is released.
struct View {
    shape: Vec<isize>,
    strides: Vec<isize>,
    format: Option<CString>,
    _export: Export,
}

/// Whether an array is contiguous in C order, and whether in Fortran order.
pub(crate) fn contiguous(array: &ArrayDescriptor) -> Outcome<(bool, bool)> {
    let strides = array.strides_in_bytes()?;
    let one_run = |shape: &[u64], steps: &[i64]| Walk::new(shape, array.dtype.size(), steps, steps).is_one_run();
    let reversed: Vec<u64> = array.shape.iter().rev().copied().collect();
    let reversed_strides: Vec<i64> = strides.iter().rev().copied().collect();
    Ok((one_run(&array.shape, &strides), one_run(&reversed, &reversed_strides)))
}

/// Fills a view of an array.
///
/// # Errors
/// `BufferError` if the protocol or the consumer's flags do not allow the view.
///
/// # Safety
/// `view` is an unfilled view from Python.
pub(crate) unsafe fn fill(array: &Bound<'_, Array>, view: *mut ffi::Py_buffer, flags: c_int) -> Outcome<()> {
    if view.is_null() {
        return Err(PyBufferError::new_err("there is no view to fill").into());
    }
    // SAFETY: guaranteed by the caller.
    unsafe { (*view).obj = ptr::null_mut() };
    let this = array.get();
    let memory = this.memory();
    let descriptor = this.descriptor();
    this.check()?;
    if !memory.device().is_host() {
        let text = format!(
            "its memory is on {}: copy it with tobytes(), or pass it to a library for that device",
            memory.device()
        );
        return Err(Failure::export(text));
    }
    let export = memory.export()?;
    let read_only = this.exports_read_only();
    if flags & ffi::PyBUF_WRITABLE == ffi::PyBUF_WRITABLE && read_only {
        return Err(Failure::export("this process may only read the memory, and a writable view was requested"));
    }
    let (c, fortran) = contiguous(descriptor)?;
    let asks = |flag: c_int| flags & flag == flag;
    let refused = (asks(ffi::PyBUF_C_CONTIGUOUS) && !c)
        || (asks(ffi::PyBUF_F_CONTIGUOUS) && !fortran)
        || (asks(ffi::PyBUF_ANY_CONTIGUOUS) && !c && !fortran)
        || (!asks(ffi::PyBUF_STRIDES) && !c);
    if refused {
        return Err(Failure::export("the array is not contiguous as this view requires: copy it with tobytes()"));
    }
    let format = if asks(ffi::PyBUF_FORMAT) {
        let format = dtype::format(descriptor.dtype).and_then(|format| CString::new(format).ok());
        Some(format.ok_or_else(|| {
            let text = "the buffer protocol has no format for elements of type";
            let integer = if descriptor.dtype.size() == 2 { "uint16" } else { "uint8" };
            Failure::export(format!("{text} {}: use reinterpret(\"{integer}\"), or DLPack", descriptor.dtype))
        })?)
    } else {
        None
    };
    let shape: Vec<isize> = descriptor.shape.iter().map(|length| *length as isize).collect();
    let strides: Vec<isize> = descriptor.strides_in_bytes()?.into_iter().map(|stride| stride as isize).collect();
    let bytes = descriptor.bytes()?;
    let length = isize::try_from(bytes).map_err(|_| Failure::export("it has more bytes than a view can hold"))?;
    let mut filled = Box::new(View { shape, strides, format, _export: export });
    let address = memory.address() + descriptor.offset;
    // SAFETY: guaranteed by the caller. `release` frees the lists, and `obj` holds the array.
    unsafe {
        let view = &mut *view;
        view.buf = ptr::with_exposed_provenance_mut::<c_void>(address as usize);
        view.len = length;
        view.itemsize = descriptor.dtype.size() as isize;
        view.readonly = read_only.into();
        view.ndim = filled.shape.len() as c_int;
        view.format = filled.format.as_ref().map_or(ptr::null_mut(), |format| format.as_ptr().cast_mut());
        view.shape = if asks(ffi::PyBUF_ND) { filled.shape.as_mut_ptr() } else { ptr::null_mut() };
        view.strides = if asks(ffi::PyBUF_STRIDES) { filled.strides.as_mut_ptr() } else { ptr::null_mut() };
        view.suboffsets = ptr::null_mut();
        view.internal = Box::into_raw(filled).cast();
        view.obj = array.clone().into_any().into_ptr();
    }
    Ok(())
}

/// Frees the data of a view.
///
/// # Safety
/// [`fill`] filled it, and it is released once.
pub(crate) unsafe fn release(view: *mut ffi::Py_buffer) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let internal = std::mem::replace(&mut (*view).internal, ptr::null_mut());
        if !internal.is_null() {
            drop(Box::from_raw(internal.cast::<View>()));
        }
    }
}
