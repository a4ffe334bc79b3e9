//! Reads the arguments of C callers.

use std::{
    ffi::{CStr, c_char, c_int},
    mem::MaybeUninit,
    os::fd::{BorrowedFd, OwnedFd},
    path::Path,
    slice,
    sync::Arc,
    time::Duration,
};

use serde_json::{Map, Value};
use vmmfd::{Error, channel::Cancel, channel::Trust, session::Config};

use crate::error::{Failure, Outcome, run, vmmfd_error_t};

/// The place of a result. Zeros it, so that the caller finds 0 and NULL after a failure.
///
/// # Errors
/// If the pointer is null.
pub(crate) fn out<'a, T>(pointer: Option<&'a mut MaybeUninit<T>>, name: &str) -> Outcome<&'a mut MaybeUninit<T>> {
    let place = pointer.ok_or_else(|| Failure::invalid(format!("{name} is NULL: pass the address of a variable")))?;
    *place = MaybeUninit::zeroed();
    Ok(place)
}

/// Runs the work of a function, and writes its result.
pub(crate) fn run_out<T>(
    pointer: Option<&mut MaybeUninit<T>>,
    name: &str,
    work: impl FnOnce() -> Outcome<T>,
) -> *mut vmmfd_error_t {
    run(|| {
        let place = out(pointer, name)?;
        place.write(work()?);
        Ok(())
    })
}

/// A text of the caller; `None` for null.
///
/// # Errors
/// If it is not UTF-8.
pub(crate) fn optional_text<'a>(pointer: *const c_char, name: &str) -> Outcome<Option<&'a str>> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller passes a null-terminated text that does not change during the call.
    let text = unsafe { CStr::from_ptr(pointer) };
    let text = text.to_str();
    text.map(Some).map_err(|_| Failure::invalid(format!("{name} is not UTF-8: pass it in that encoding")))
}

/// A text of the caller.
///
/// # Errors
/// If it is null or not UTF-8.
pub(crate) fn text<'a>(pointer: *const c_char, name: &str) -> Outcome<&'a str> {
    optional_text(pointer, name)?.ok_or_else(|| Failure::invalid(format!("{name} is NULL: pass a text")))
}

/// A path of the caller; `None` for null.
pub(crate) fn path<'a>(pointer: *const c_char) -> Option<&'a Path> {
    use std::os::unix::ffi::OsStrExt;
    // SAFETY: as in `optional_text`.
    let bytes = (!pointer.is_null()).then(|| unsafe { CStr::from_ptr(pointer) }.to_bytes());
    bytes.map(|bytes| Path::new(std::ffi::OsStr::from_bytes(bytes)))
}

/// A JSON object; `None` for null.
///
/// # Errors
/// If it is not a JSON object.
pub(crate) fn json(pointer: *const c_char, name: &str) -> Outcome<Option<Map<String, Value>>> {
    let Some(text) = optional_text(pointer, name)? else { return Ok(None) };
    let object = serde_json::from_str(text);
    object.map(Some).map_err(|error| Failure::invalid(format!("{name} is not a JSON object: {error}")))
}

/// Rejects an option that has no effect on the call.
///
/// # Errors
/// If it is set.
pub(crate) fn unused(is_set: bool, name: &str, when: &str) -> Outcome<()> {
    match is_set {
        false => Ok(()),
        true => Err(Failure::invalid(format!("{name} has no effect {when}: leave it out"))),
    }
}

/// An option whose value this version does not know.
pub(crate) fn unknown(name: &str, value: u32) -> Failure {
    Failure::invalid(format!("{name} {value} is unknown: see vmmfd.h"))
}

/// A list of the caller. Null is an empty list if the count is 0.
///
/// # Errors
/// If the list is null and the count is not 0, or the count is impossible.
pub(crate) fn list<'a, T>(first: *const T, count: usize, name: &str) -> Outcome<&'a [T]> {
    if count == 0 {
        return Ok(&[]);
    }
    check_list::<T>(first.is_null(), count, name)?;
    // SAFETY: the caller passes `count` elements that do not change during the call. The pointer is not null, and their size is possible.
    Ok(unsafe { slice::from_raw_parts(first, count) })
}

/// Writable bytes of the caller.
///
/// # Errors
/// As [`list`].
pub(crate) fn bytes<'a>(first: *mut u8, count: usize, name: &str) -> Outcome<&'a mut [u8]> {
    if count == 0 {
        return Ok(&mut []);
    }
    check_list::<u8>(first.is_null(), count, name)?;
    // SAFETY: the caller passes `count` writable bytes that nothing else uses during the call. Any bytes are valid.
    Ok(unsafe { slice::from_raw_parts_mut(first, count) })
}

fn check_list<T>(is_null: bool, count: usize, name: &str) -> Outcome<()> {
    if is_null {
        return Err(Failure::invalid(format!(
            "{name} is NULL, but its length is {count}: pass both, or a length of 0"
        )));
    }
    // Bytes are not copied. The limit of other lists is above all limits of the system and the broker.
    let most = if size_of::<T>() == 1 { isize::MAX as usize } else { 1 << 20 };
    match count {
        _ if count <= most => Ok(()),
        _ => Err(Failure::invalid(format!("{name} can't have a length of {count}: pass its real length"))),
    }
}

/// Duplicates a caller's descriptor, close-on-exec.
///
/// # Errors
/// If it is not open; if no descriptor is free.
pub(crate) fn descriptor(fd: c_int, name: &str) -> Outcome<OwnedFd> {
    if fd < 0 {
        return Err(Failure::invalid(format!("{name} is {fd}, which is not a descriptor")));
    }
    // SAFETY: it is not negative. The caller keeps it open during the call; if it is not open, the duplication fails.
    let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
    borrowed.try_clone_to_owned().map_err(|error| match error.raw_os_error() {
        Some(nix::libc::EBADF) => Failure::invalid(format!("{name} is {fd}, which is not an open descriptor")),
        _ => Failure::Library(Error::system(format!("duplicate descriptor {fd} of {name}"), error)),
    })
}

/// A time in milliseconds; 0 is `default`, and `VMMFD_FOREVER` is a year.
pub(crate) fn milliseconds(time: u64, default: Duration) -> Duration {
    match time {
        0 => default,
        // A year: the deadline must fit the clock.
        time => Duration::from_millis(time.min(365 * 24 * 3600 * 1000)),
    }
}

/// Builds the configuration of a connection.
///
/// # Errors
/// [`Error::System`] if no descriptor is free.
pub(crate) fn config(timeout_ms: u64, trust: &[u32], stop: Option<&Arc<OwnedFd>>) -> Outcome<Config> {
    let config = Config::default();
    let timeout = milliseconds(timeout_ms, config.timeout);
    let config = config.timeout(timeout).trust(Trust { uids: trust.to_vec() });
    let Some(stop) = stop.map(Arc::clone) else { return Ok(config) };
    let cancel = Cancel::new()?.with_check(move || is_readable(&stop));
    Ok(config.cancel(&cancel))
}

/// The descriptor that stops calls; `None` for -1.
///
/// # Errors
/// As [`descriptor`].
pub(crate) fn stop(fd: c_int) -> Outcome<Option<Arc<OwnedFd>>> {
    (fd != -1).then(|| descriptor(fd, "stop").map(Arc::new)).transpose()
}

pub(crate) fn is_readable(fd: &OwnedFd) -> bool {
    use std::os::fd::AsFd;

    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    let mut polled = [PollFd::new(fd.as_fd(), PollFlags::POLLIN)];
    poll(&mut polled, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
}
