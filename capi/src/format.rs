//! The description of a stream's buffers.

use std::{
    ffi::{c_char, c_void},
    ptr,
};

use vmmfd::session::stream::Format;

use crate::{
    argument::{list, text},
    array::{described, vmmfd_layout_t},
    error::{Failure, Outcome},
    owned::Kept,
    versioned::{options, versioned},
};

/// Describes the buffers of a stream: named arrays, and bytes of the program's own. As an argument, its pointers are read during the call
/// only; in a sample, they are valid until the memory of the sample is freed.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct vmmfd_format_t {
    /// The size of this struct: `sizeof` it.
    pub struct_size: usize,
    /// The number of arrays, at most 64.
    pub array_count: usize,
    /// The names of the arrays.
    pub names: *const *const c_char,
    /// Their layouts, with offsets from the start of the buffer: `vmmfd_array_create` makes an array of the buffer's memory and a layout.
    /// `strides` of a layout is NULL if the array is contiguous in C order.
    pub layouts: *const *const vmmfd_layout_t,
    /// The program's own bytes.
    pub blob: *const c_void,
    /// The number of bytes in `blob`, at most 65,536.
    pub blob_size: usize,
}

versioned!(vmmfd_format_t);

/// Reads a format of the caller.
///
/// # Errors
/// If it is null, or one of its names or layouts is wrong.
pub(crate) fn read(format: *const vmmfd_format_t) -> Outcome<Format> {
    let format = options(format)?.ok_or_else(|| Failure::invalid("format is NULL: pass the arrays and the blob"))?;
    let names = list(format.names, format.array_count, "names")?;
    let layouts = list(format.layouts, format.array_count, "layouts")?;
    let arrays = names
        .iter()
        .zip(layouts)
        .map(|(name, layout)| Ok((text(*name, "a name of the format")?.to_owned(), described(*layout)?)));
    let blob = list(format.blob.cast::<u8>(), format.blob_size, "blob")?.to_vec();
    Ok(Format { arrays: arrays.collect::<Outcome<_>>()?, blob })
}

/// Describes a format, which lives at least as long as `kept`.
pub(crate) fn show(format: &Format, kept: &mut Kept) -> *const vmmfd_format_t {
    let mut names = Vec::with_capacity(format.arrays.len());
    let mut layouts = Vec::with_capacity(format.arrays.len());
    for (name, array) in &format.arrays {
        names.push(kept.text(name.as_str()));
        layouts.push(vmmfd_layout_t {
            struct_size: size_of::<vmmfd_layout_t>(),
            dtype: kept.text(array.dtype.to_string()),
            dimensions: array.shape.len(),
            shape: array.shape.as_ptr(),
            strides: array.strides.as_ref().map_or(ptr::null(), |strides| strides.as_ptr()),
            offset: array.offset,
        });
    }
    let shown = vmmfd_format_t {
        struct_size: size_of::<vmmfd_format_t>(),
        array_count: names.len(),
        names: kept.list(names),
        layouts: kept.addresses(layouts),
        blob: format.blob.as_ptr().cast(),
        blob_size: format.blob.len(),
    };
    kept.list(vec![shown])
}
