//! The NVML functions that vmmfd calls, so that the same file also serves as `libnvidia-ml.so.1`. NVML ignores `CUDA_VISIBLE_DEVICES`, and
//! has its own error codes.

use std::{
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    ptr,
};

use vmmfd::driver::MemoryInfo;

use crate::{
    Answer, controls,
    emulated::{initialise, initialised},
    place,
};

const INVALID_ARGUMENT: c_uint = 2;
const NOT_FOUND: c_uint = 6;
const UNKNOWN: c_uint = 999;

/// The handle of a device, or of its only MIG instance, is this number plus the device's number.
const DEVICE: usize = 0x1000;
const INSTANCE: usize = 0x2000;

fn device(handle: *mut c_void, first: usize) -> Answer<c_int> {
    let number = handle.addr().wrapping_sub(first);
    c_int::try_from(number).ok().filter(|number| *number < 0x1000).ok_or(INVALID_ARGUMENT)
}

fn by_uuid(name: &CStr) -> Answer<usize> {
    let (kind, first) = if controls::settings().mig { ("MIG", INSTANCE) } else { ("GPU", DEVICE) };
    let wanted: String = name.to_str().unwrap_or_default().to_ascii_lowercase().replace('-', "");
    let mut found = None;
    initialised(|driver| {
        found = (0..driver.device_count()).find(|&device| {
            let digits = driver.device_uuid(device).unwrap_or_default().map(|byte| format!("{byte:02x}")).concat();
            wanted == format!("{}{digits}", kind.to_ascii_lowercase())
        });
        Ok(())
    })?;
    found.map(|device| first + device as usize).ok_or(NOT_FOUND)
}

// SAFETY of every block below: a caller of NVML promises that each pointer is null, or valid for the accesses of its function. Null is
// rejected first.
#[allow(clippy::undocumented_unsafe_blocks, reason = "one reason for all of them, above")]
mod exports {
    use super::*;

    exports! {
        fn nvmlInit_v2() {
            initialise()
        }

        fn nvmlShutdown() {
            Ok(())
        }

        fn nvmlDeviceGetHandleByUUID(name: *const c_char, handle: *mut *mut c_void) {
            let handle = place(handle)?;
            if name.is_null() {
                return Err(INVALID_ARGUMENT);
            }
            let found = by_uuid(unsafe { CStr::from_ptr(name) })?;
            unsafe { handle.write(ptr::without_provenance_mut(found)) };
            Ok(())
        }

        fn nvmlDeviceGetDeviceHandleFromMigDeviceHandle(instance: *mut c_void, handle: *mut *mut c_void) {
            let handle = place(handle)?;
            let found = DEVICE + device(instance, INSTANCE)? as usize;
            unsafe { handle.write(ptr::without_provenance_mut(found)) };
            Ok(())
        }

        fn nvmlDeviceGetMemoryInfo(handle: *mut c_void, info: *mut [u64; 3]) {
            let info = place(info)?;
            let device = device(handle, DEVICE).or_else(|_| device(handle, INSTANCE))?;
            let mut figures = [0; 3];
            initialised(|driver| {
                let MemoryInfo { free, total } = driver.memory_info(device).map_err(|_| UNKNOWN)?;
                figures = [total, free, total - free];
                Ok(())
            })?;
            unsafe { info.write(figures) };
            Ok(())
        }

        fn nvmlDeviceGetPersistenceMode(handle: *mut c_void, mode: *mut c_int) {
            let mode = place(mode)?;
            device(handle, DEVICE)?;
            unsafe { mode.write(controls::settings().persistence.into()) };
            Ok(())
        }
    }
}

/// The text of a code. NVML has a text for every number.
#[allow(non_snake_case, reason = "NVML's name")]
#[unsafe(no_mangle)]
extern "C" fn nvmlErrorString(code: c_uint) -> *const c_char {
    match code {
        0 => c"Success",
        INVALID_ARGUMENT => c"Invalid Argument",
        NOT_FOUND => c"Not Found",
        9 => c"Driver Not Loaded",
        _ => c"Unknown Error",
    }
    .as_ptr()
}
