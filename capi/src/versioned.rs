//! Structs of options and facts that start with their size, so that later versions of the library can add fields at their end.
//!
//! A new field starts at or after the old `sizeof`, not in the padding at the old end, where older programs have any bytes: if necessary,
//! an unused field fills that padding. There is no padding between and after the new fields, because an older library rejects bytes there
//! that are not 0. `FIRST` of the struct is then set to the old size.

use std::{mem::MaybeUninit, ptr, slice};

use crate::error::{Failure, Outcome};

/// A struct of the header that starts with its size.
///
/// # Safety
/// It is `repr(C)`, its first field is `struct_size: usize`, and zeros are a valid value.
pub(crate) unsafe trait Versioned: Copy {
    /// The struct's name in messages.
    const NAME: &'static str;
    /// The size in the first version of the library that has the struct.
    const FIRST: usize = size_of::<Self>();
}

/// Declares structs that start with their size.
macro_rules! versioned {
    ($($name:ident),*) => {
        $(
            // SAFETY: the field is the first; the others are numbers and pointers.
            unsafe impl $crate::versioned::Versioned for $name {
                const NAME: &'static str = stringify!($name);
            }
            const _: () = assert!(std::mem::offset_of!($name, struct_size) == 0);
        )*
    };
}

pub(crate) use versioned;

/// The largest size that a later version may have.
const MOST: usize = 4096;

/// Reads the size of a caller's struct.
///
/// # Errors
/// If the pointer is null, or the size is not possible.
fn size_of_callers<T: Versioned>(place: *const T, name: &str) -> Outcome<usize> {
    if place.is_null() {
        return Err(Failure::invalid(format!("{name} is NULL: pass the address of a {}", T::NAME)));
    }
    // SAFETY: the caller passes a struct of some version, which starts with its size.
    let size = unsafe { place.cast::<usize>().read() };
    match size {
        _ if (T::FIRST..=MOST).contains(&size) => Ok(size),
        _ => {
            let kind = T::NAME;
            Err(Failure::invalid(format!("struct_size of {name} is {size}: set it to sizeof({kind})")))
        }
    }
}

/// Reads options; `None` for null. Fields that the caller's version lacks are 0.
///
/// # Errors
/// If the size is not possible, or the caller set fields that this version does not have.
pub(crate) fn options<T: Versioned>(given: *const T) -> Outcome<Option<T>> {
    if given.is_null() {
        return Ok(None);
    }
    let size = size_of_callers(given, "options")?;
    // SAFETY: the caller's struct has this many bytes.
    let bytes = unsafe { slice::from_raw_parts(given.cast::<MaybeUninit<u8>>(), size) };
    let (known, later) = bytes.split_at(size.min(size_of::<T>()));
    // SAFETY: a later version's fields have no padding before them; the caller has set all fields.
    if later.iter().any(|byte| unsafe { byte.assume_init() } != 0) {
        let kind = T::NAME;
        return Err(Failure::unsupported(format!("a field of {kind} is set that this version does not have"), None));
    }
    let mut own = MaybeUninit::<T>::zeroed();
    // SAFETY: both have this many bytes and don't overlap; zeros and the caller's values are valid.
    Ok(Some(unsafe {
        ptr::copy_nonoverlapping(known.as_ptr(), own.as_mut_ptr().cast(), known.len());
        own.assume_init()
    }))
}

/// The place of facts. Its fields are 0 until [`Facts::write`].
pub(crate) struct Facts<T> {
    place: *mut T,
    size: usize,
}

impl<T: Versioned> Facts<T> {
    /// Zeros the caller's struct, except for its size.
    ///
    /// # Errors
    /// If the pointer is null, or the size is not possible.
    pub(crate) fn of(place: *mut T, name: &str) -> Outcome<Self> {
        let size = size_of_callers(place, name)?;
        // SAFETY: the caller's struct has `size` bytes.
        unsafe { ptr::write_bytes(place.cast::<u8>().add(size_of::<usize>()), 0, size - size_of::<usize>()) };
        Ok(Self { place, size })
    }

    /// Writes the fields that the caller's version has.
    pub(crate) fn write(self, facts: &T) {
        let start = size_of::<usize>();
        let known = self.size.min(size_of::<T>()) - start;
        let from = ptr::from_ref(facts).cast::<MaybeUninit<u8>>();
        // SAFETY: both have at least `start + known` bytes and don't overlap.
        unsafe { ptr::copy_nonoverlapping(from.add(start), self.place.cast::<MaybeUninit<u8>>().add(start), known) };
    }
}
