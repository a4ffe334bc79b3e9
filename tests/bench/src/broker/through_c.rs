//! The get of the C library, called as C calls it.
#![allow(unsafe_code, reason = "the C library returns pointers")]

use std::{
    ffi::{CStr, CString},
    mem::MaybeUninit,
    os::unix::ffi::OsStrExt,
    path::Path,
    ptr,
};

use vmmfd::error::{Error, Result};
use vmmfd_capi::{
    broker::{vmmfd_broker_connect, vmmfd_broker_free, vmmfd_broker_get, vmmfd_broker_t},
    device::{vmmfd_device_free, vmmfd_device_open, vmmfd_device_t},
    error::{vmmfd_error_free, vmmfd_error_t},
    lease::{vmmfd_lease_free, vmmfd_lease_t},
};
use vmmfd_cli::error::ToolError;

use crate::{protocol::not_prepared, task::Task};

/// A device and a connection to the broker, as handles of the C library.
pub(crate) struct ThroughC {
    device: *mut vmmfd_device_t,
    broker: *mut vmmfd_broker_t,
    lease: *mut vmmfd_lease_t,
}

impl ThroughC {
    pub(crate) fn connect(task: &Task, socket: &Path) -> Result<Self> {
        let mut all = Self { device: ptr::null_mut(), broker: ptr::null_mut(), lease: ptr::null_mut() };
        let backend = c_text(task.backend.as_str().as_bytes())?;
        let (device, socket) = (c_text(task.device.as_bytes())?, c_text(socket.as_os_str().as_bytes())?);
        all.device = returned(|out| vmmfd_device_open(backend.as_ptr(), device.as_ptr(), Some(out)))?;
        all.broker = returned(|out| vmmfd_broker_connect(socket.as_ptr(), None, Some(out)))?;
        Ok(all)
    }

    /// Gets an object and maps it. It remains open until `close`.
    pub(crate) fn get(&mut self, name: &CStr) -> Result<()> {
        self.lease = returned(|out| vmmfd_broker_get(self.broker, self.device, name.as_ptr(), None, Some(out)))?;
        Ok(())
    }

    pub(crate) fn close(&mut self) {
        vmmfd_lease_free(std::mem::replace(&mut self.lease, ptr::null_mut()));
    }
}

impl Drop for ThroughC {
    fn drop(&mut self) {
        self.close();
        vmmfd_broker_free(self.broker);
        vmmfd_device_free(self.device);
    }
}

pub(crate) fn c_text(text: &[u8]) -> Result<CString> {
    CString::new(text).map_err(|_| not_prepared())
}

/// Returns the handle that a function of the C library returns through its last parameter.
fn returned<T>(call: impl FnOnce(&mut MaybeUninit<*mut T>) -> *mut vmmfd_error_t) -> Result<*mut T> {
    let mut handle = MaybeUninit::new(ptr::null_mut());
    let error = call(&mut handle);
    if error.is_null() {
        // SAFETY: it was initialised above.
        return Ok(unsafe { handle.assume_init() });
    }
    // SAFETY: the error and its text are valid until `vmmfd_error_free`.
    let message = unsafe { CStr::from_ptr((*error).message) }.to_string_lossy().into_owned();
    vmmfd_error_free(error);
    Err(Error::from(ToolError::Child { process: "the C library".to_owned(), message, hint: None }))
}
