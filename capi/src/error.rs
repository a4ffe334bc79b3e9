//! Errors for C, and the boundary that no panic crosses.

use std::{
    any::Any,
    borrow::Cow,
    error::Error as _,
    ffi::{CStr, c_char},
    panic::{AssertUnwindSafe, catch_unwind},
    ptr,
};

use vmmfd::{
    Error,
    error::{ErrorClass, MemoryError},
};

use crate::owned::{self, Kept};

/// The class of an error, to branch on.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum vmmfd_code_t {
    /// An argument or handle is not valid, or the state of the object does not allow the call. Nothing was changed.
    VMMFD_INVALID = 1,
    /// The object, device, array, producer or broker does not exist.
    VMMFD_NOT_FOUND = 2,
    /// An object of that name exists.
    VMMFD_EXISTS = 3,
    /// The object differs from the caller's expectation.
    VMMFD_DIFFERS = 4,
    /// This user lacks the permission.
    VMMFD_DENIED = 5,
    /// The time that the caller allowed has passed.
    VMMFD_TIMEOUT = 6,
    /// The peer is gone or silent, or broke the protocol.
    VMMFD_DISCONNECTED = 7,
    /// The device or the machine has too little memory.
    VMMFD_OUT_OF_MEMORY = 8,
    /// This machine, driver or device does not support the operation.
    VMMFD_UNSUPPORTED = 9,
    /// The caller stopped the call.
    VMMFD_INTERRUPTED = 10,
    /// This process is a fork of the process that made the handle or initialised the driver.
    VMMFD_FORKED = 11,
    /// A driver call failed: `driver_code` is its code.
    VMMFD_DRIVER = 12,
    /// A system call failed, or the broker has reached a limit.
    VMMFD_SYSTEM = 13,
    /// A defect of this library. The objects of the call may be unusable.
    VMMFD_INTERNAL = 14,
}

/// An error. The caller frees it with `vmmfd_error_free`, which also frees the texts.
#[repr(C)]
#[derive(Debug)]
pub struct vmmfd_error_t {
    /// The class of the error.
    pub code: vmmfd_code_t,
    /// The `CUresult` of the driver call that failed; 0 if no driver call failed.
    pub driver_code: u32,
    /// The problem in one sentence, with the values. UTF-8.
    pub message: *const c_char,
    /// The next step in one sentence; NULL if the library knows none. UTF-8.
    pub hint: *const c_char,
}

/// Frees an error. Does not block.
#[unsafe(no_mangle)]
pub extern "C" fn vmmfd_error_free(error: *mut vmmfd_error_t) {
    owned::free(error);
}

/// The failure of a function.
#[derive(Debug)]
pub(crate) enum Failure {
    Library(Error),
    /// The caller's mistake, or a panic: the class, the sentence and the hint.
    Own(vmmfd_code_t, String, Option<&'static str>),
}

pub(crate) type Outcome<T> = Result<T, Failure>;

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Library(error)
    }
}

impl Failure {
    /// An operation that this library or device lacks.
    pub(crate) fn unsupported(message: impl Into<String>, hint: Option<&'static str>) -> Self {
        Self::Own(vmmfd_code_t::VMMFD_UNSUPPORTED, message.into(), hint)
    }

    /// A bad argument or state.
    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::Own(vmmfd_code_t::VMMFD_INVALID, message.into(), None)
    }

    pub(crate) fn allocate(self) -> *mut vmmfd_error_t {
        let (code, driver_code, message, hint) = match self {
            Self::Own(code, message, hint) => (code, 0, message, hint.map(str::to_owned)),
            Self::Library(error) => {
                (code_of(&error), driver_code(&error), error.in_full(), error.hint().map(Cow::into_owned))
            }
        };
        let mut kept = Kept::default();
        let message = kept.text(message);
        let hint = hint.map_or(ptr::null(), |hint| kept.text(hint));
        kept.allocate(vmmfd_error_t { code, driver_code, message, hint })
    }
}

/// Runs the work of a function. Returns null, or the error.
pub(crate) fn run(work: impl FnOnce() -> Outcome<()>) -> *mut vmmfd_error_t {
    // A panic may leave an object half changed, but not its locks: later calls recover them.
    let failure = match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(())) => return ptr::null_mut(),
        Ok(Err(failure)) => failure,
        Err(panic) => Failure::Own(
            vmmfd_code_t::VMMFD_INTERNAL,
            format!("the library panicked: {}", message_of(&*panic)),
            Some("report this as a defect, with the sentence and the lines on stderr"),
        ),
    };
    failure.allocate()
}

/// Runs the work of a function that returns no error, such as a free. Reports a failure in the log.
pub(crate) fn run_logged(work: impl FnOnce() -> Outcome<()>) {
    let error = run(work);
    if error.is_null() {
        return;
    }
    // SAFETY: `run` has just returned the error, with a text.
    let message = unsafe { CStr::from_ptr((*error).message) };
    tracing::error!(error = %message.to_string_lossy(), "a handle was not freed");
    owned::free(error);
}

fn message_of(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message")
}

fn code_of(error: &Error) -> vmmfd_code_t {
    use vmmfd_code_t::*;
    match error.class() {
        ErrorClass::Invalid => VMMFD_INVALID,
        ErrorClass::NotFound | ErrorClass::NoArray => VMMFD_NOT_FOUND,
        ErrorClass::Exists => VMMFD_EXISTS,
        ErrorClass::Differs => VMMFD_DIFFERS,
        ErrorClass::Denied => VMMFD_DENIED,
        ErrorClass::Timeout => VMMFD_TIMEOUT,
        ErrorClass::Disconnected => VMMFD_DISCONNECTED,
        ErrorClass::OutOfMemory => VMMFD_OUT_OF_MEMORY,
        ErrorClass::Unsupported => VMMFD_UNSUPPORTED,
        ErrorClass::Interrupted => VMMFD_INTERRUPTED,
        ErrorClass::Forked => VMMFD_FORKED,
        ErrorClass::Driver => VMMFD_DRIVER,
        _ => VMMFD_SYSTEM,
    }
}

/// The driver's code of an error, or of the error that caused it.
fn driver_code(error: &Error) -> u32 {
    match error {
        Error::Driver { code, .. } => *code,
        Error::Memory(MemoryError::NotExchanged { source, .. } | MemoryError::NotImported { source, .. }) => {
            driver_code(source)
        }
        error => error.source().and_then(|cause| cause.downcast_ref()).map_or(0, driver_code),
    }
}

/// The next step in a fork.
pub(crate) const FORK_HINT: &str = "start the other process with exec, or use the library only after the fork";

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(error: *mut vmmfd_error_t) -> (vmmfd_code_t, u32, String, bool) {
        // SAFETY: `run` returned the error, which is freed below.
        let shown = unsafe { error.as_ref() }.expect("an error");
        // SAFETY: the text belongs to the error.
        let message = unsafe { CStr::from_ptr(shown.message) }.to_str().unwrap().to_owned();
        let found = (shown.code, shown.driver_code, message, shown.hint.is_null());
        vmmfd_error_free(error);
        found
    }

    #[test]
    fn panics_become_errors() {
        let (code, driver, message, no_hint) = taken(run(|| panic!("a defect with a \0")));
        assert_eq!((code, driver, no_hint), (vmmfd_code_t::VMMFD_INTERNAL, 0, false));
        assert_eq!(message, "the library panicked: a defect with a ?");
        run_logged(|| panic!("in a free"));
    }

    #[test]
    fn driver_codes_are_found_in_causes() {
        let driver = |code| Error::Driver { call: "cuMemMap", code, name: "CUDA_ERROR_X".into(), source: None };
        let error = Error::Memory(MemoryError::NotExchanged { back: None, source: Box::new(driver(719)) });
        let (code, number, message, _) = taken(run(|| Err(error.into())));
        assert_eq!((code, number), (vmmfd_code_t::VMMFD_DRIVER, 719));
        assert!(message.contains("cuMemMap failed: CUDA_ERROR_X (719)"), "{message}");
        assert_eq!(taken(run(|| Err(driver(2).into()))).0, vmmfd_code_t::VMMFD_OUT_OF_MEMORY);
        assert!(run(|| Ok(())).is_null());
    }
}
