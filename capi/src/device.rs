//! Devices.

use std::{
    ffi::{CString, c_char},
    mem::MaybeUninit,
    ptr,
};

use vmmfd::{
    bindings,
    driver::{Backend, Driver},
    memory::{Device, Selector},
};

use crate::{
    argument::{optional_text, run_out},
    error::{Failure, Outcome, run, run_logged, vmmfd_error_t},
    handle::{self, handle},
    owned::c_text,
    versioned::{Facts, versioned},
};

/// A device: a GPU, or the host backend's ordinary memory. Any threads may use it at once.
#[derive(Debug)]
pub struct vmmfd_device_t {
    _opaque: [u8; 0],
}

handle!(vmmfd_device_t, 1, "a device", OpenDevice);

pub(crate) struct OpenDevice {
    pub(crate) device: Device,
    name: CString,
    uuid: CString,
    fallback: Option<CString>,
}

impl OpenDevice {
    pub(crate) fn selector(&self) -> Selector {
        Selector::Uuid(self.device.uuid())
    }
}

/// Facts about a device. The texts are valid until the device is freed.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct vmmfd_device_info_t {
    /// The size of this struct: `sizeof` it.
    pub struct_size: usize,
    /// `cuda`, or `host` for ordinary memory of this machine.
    pub backend: *const c_char,
    /// The name, such as `NVIDIA H200`.
    pub name: *const c_char,
    /// The UUID with its prefix, such as `GPU-53e9a7d2-1f0c-5b7e-9c55-0123456789ab`. It identifies the device in every process.
    pub uuid: *const c_char,
    /// Why the backend is `host` although `auto` prefers CUDA; NULL otherwise.
    pub fallback: *const c_char,
    /// The ordinal in this process.
    pub ordinal: i32,
    /// Sizes of shareable memory are multiples of this, in bytes.
    pub granularity: u64,
}

versioned!(vmmfd_device_info_t);

/// Returns the driver of a backend, and the reason for a fallback to the host.
pub(crate) fn driver(backend: Option<&str>) -> Outcome<(Driver, Option<String>)> {
    let backend = backend.unwrap_or("auto");
    let choice = backend.parse();
    let choice = choice.map_err(|_| Failure::invalid(format!("backend {backend:?} is not one of auto, cuda, host")))?;
    Ok(bindings::driver(choice)?)
}

/// Counts the devices of a backend: `cuda`, `host`, or `auto` (also NULL), which is CUDA, or the host if there is no driver or no device.
///
/// Blocks while the driver starts on first use, for up to about 100 ms.
///
/// Errors: `VMMFD_INVALID` for another name; `VMMFD_UNSUPPORTED` if the machine has no usable driver or no device; `VMMFD_DRIVER`;
/// `VMMFD_FORKED` if the parent process initialised the CUDA driver.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_device_count(
    backend: *const c_char,
    count: Option<&mut MaybeUninit<u32>>,
) -> *mut vmmfd_error_t {
    run_out(count, "count", || {
        let (driver, _) = driver(optional_text(backend, "backend")?)?;
        Ok(Device::all(&driver)?.len() as u32)
    })
}

/// Opens a device of a backend: see `vmmfd_device_count`. `selector` is an ordinal of this process such as `0`, a UUID, or the first digits
/// of a UUID such as `GPU-53e9`; NULL selects the first device.
///
/// The caller frees `*device` with `vmmfd_device_free`; it is NULL after a failure. Blocks while the driver starts on first use, for up to
/// about 100 ms, and creates the device's context only when memory needs it.
///
/// Errors: as for `vmmfd_device_count`; `VMMFD_NOT_FOUND` if there is no such device; `VMMFD_INVALID` if several match.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_device_open(
    backend: *const c_char,
    selector: *const c_char,
    device: Option<&mut MaybeUninit<*mut vmmfd_device_t>>,
) -> *mut vmmfd_error_t {
    run_out(device, "device", || {
        let selector = match optional_text(selector, "selector")? {
            None => Selector::default(),
            Some(text) => text.parse().map_err(|error| Failure::invalid(format!("selector: {error}")))?,
        };
        let (driver, fallback) = driver(optional_text(backend, "backend")?)?;
        let device = Device::find(&driver, selector)?;
        let name = c_text(device.name());
        let uuid = c_text(device.prefixed_uuid());
        Ok(handle::insert(OpenDevice { device, name, uuid, fallback: fallback.map(c_text) }))
    })
}

/// Describes a device. Does not block.
///
/// Errors: `VMMFD_INVALID`, `VMMFD_FORKED`, `VMMFD_DRIVER`.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_device_info(
    device: *const vmmfd_device_t,
    info: *mut vmmfd_device_info_t,
) -> *mut vmmfd_error_t {
    run(|| {
        let info = Facts::of(info, "info")?;
        let open = handle::get(device)?;
        let backend = match open.device.backend() {
            Backend::Cuda => c"cuda",
            Backend::Host => c"host",
        };
        info.write(&vmmfd_device_info_t {
            struct_size: 0,
            backend: backend.as_ptr(),
            name: open.name.as_ptr(),
            uuid: open.uuid.as_ptr(),
            fallback: open.fallback.as_ref().map_or(ptr::null(), |text| text.as_ptr()),
            ordinal: open.device.ordinal(),
            granularity: open.device.granularity()?,
        });
        Ok(())
    })
}

/// Frees a device handle. Memory of the device remains valid. Does not block.
#[unsafe(no_mangle)]
pub extern "C" fn vmmfd_device_free(device: *mut vmmfd_device_t) {
    run_logged(|| handle::remove(device));
}
