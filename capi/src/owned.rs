//! Results that the caller frees: the struct that C sees, and the texts and lists that it points to.

use std::{
    any::Any,
    ffi::{CString, c_char},
};

/// The allocation of a result.
#[repr(C)]
struct Owned<T> {
    /// First, so that its address is the allocation's.
    shown: T,
    kept: Kept,
}

/// The texts and lists of a result.
#[derive(Default)]
pub(crate) struct Kept {
    texts: Vec<CString>,
    lists: Vec<Box<dyn Any>>,
}

// SAFETY: the lists hold numbers, and addresses of the same `Kept`; nothing is shared with another thread.
unsafe impl Send for Kept {}

impl Kept {
    /// Adds a text, and returns its start, which does not move with its owner. A null character, which C texts can't have, becomes a
    /// question mark.
    pub(crate) fn text(&mut self, text: impl Into<Vec<u8>>) -> *const c_char {
        let text = c_text(text);
        let start = text.as_ptr();
        self.texts.push(text);
        start
    }

    /// Adds a list, and returns its start.
    pub(crate) fn list<T: 'static>(&mut self, list: Vec<T>) -> *const T {
        let list = list.into_boxed_slice();
        let start = list.as_ptr();
        self.lists.push(Box::new(list));
        start
    }

    /// Adds a list of structs, and returns the start of the list of their addresses: later versions may add fields to the structs.
    pub(crate) fn addresses<T: 'static>(&mut self, list: Vec<T>) -> *const *const T {
        let count = list.len();
        let start = self.list(list);
        self.list((0..count).map(|at| start.wrapping_add(at)).collect())
    }

    /// Allocates the result, which [`free`] frees.
    pub(crate) fn allocate<T>(self, shown: T) -> *mut T {
        Box::into_raw(Box::new(Owned { shown, kept: self })).cast()
    }
}

/// Frees a result. Null is allowed.
pub(crate) fn free<T>(result: *mut T) {
    if !result.is_null() {
        // SAFETY: every result comes from `Kept::allocate`, as the first field of its allocation, and the caller frees it once.
        let owned = unsafe { Box::from_raw(result.cast::<Owned<T>>()) };
        drop(owned.kept);
    }
}

/// A text for C.
pub(crate) fn c_text(text: impl Into<Vec<u8>>) -> CString {
    let mut bytes = text.into();
    bytes.iter_mut().filter(|byte| **byte == 0).for_each(|byte| *byte = b'?');
    CString::new(bytes).unwrap_or_default()
}
