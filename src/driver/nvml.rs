//! NVML, the management library: whether a GPU's driver state persists while no process uses the GPU, and how much of its memory is used.
//!
//! Loaded only on demand: a container often has the driver without NVML. No setting is changed.

#![allow(unsafe_code)]

use std::{
    ffi::{CStr, CString, c_char, c_int, c_uint, c_void},
    mem, ptr,
};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use super::DeviceUuid;

/// The library name that NVIDIA's driver installs.
const LIBRARY: &str = "libnvidia-ml.so.1";

/// `nvmlReturn_t`. A plain integer, because a newer library may return values unknown here.
type Code = c_uint;

/// The codes for an unknown UUID: `NVML_ERROR_INVALID_ARGUMENT`, `NVML_ERROR_NOT_FOUND`.
const NO_SUCH_DEVICE: [Code; 2] = [2, 6];

type ByUuid = unsafe extern "C" fn(*const c_char, *mut *mut c_void) -> Code;
type Parent = unsafe extern "C" fn(*mut c_void, *mut *mut c_void) -> Code;
type Mode = unsafe extern "C" fn(*mut c_void, *mut c_int) -> Code;
type Memory = unsafe extern "C" fn(*mut c_void, *mut MemoryInfo) -> Code;
type Plain = unsafe extern "C" fn() -> Code;
/// `nvmlMemory_t`.
#[repr(C)]
#[derive(Debug, Default)]
struct MemoryInfo {
    total: u64,
    free: u64,
    used: u64,
}

type Describe = unsafe extern "C" fn(Code) -> *const c_char;

/// Whether persistence is on for a GPU, or for the GPU of a MIG instance: by persistence mode, or by the daemon `nvidia-persistenced`,
/// which NVML reports in the same way.
///
/// Blocks for as long as the driver does: there is no deadline. No setting is changed.
///
/// # Errors
/// The reason as one sentence without a full stop: the library or a function is missing, or NVML fails.
///
/// Calls: `nvmlInit_v2`, `nvmlDeviceGetHandleByUUID`, `nvmlDeviceGetDeviceHandleFromMigDeviceHandle`,
/// `nvmlDeviceGetPersistenceMode`, `nvmlShutdown`.
pub fn persistence(uuid: DeviceUuid) -> Result<bool, String> {
    ask(uuid, true, |library, device| {
        // SAFETY: the type is that of the function in NVIDIA's nvml.h.
        let mode: Mode = unsafe { function(library, "nvmlDeviceGetPersistenceMode") }?;
        let mut on = 0;
        // SAFETY: NVML has just returned the handle; `nvmlEnableState_t` has the size of an int.
        let code = unsafe { mode(device, &mut on) };
        Ok(("nvmlDeviceGetPersistenceMode", code, on != 0))
    })
}

/// Bytes used by all processes, and total bytes, of a GPU's or a MIG instance's memory.
///
/// Blocks for as long as the driver does: there is no deadline.
///
/// # Errors
/// See [`persistence`].
///
/// Calls: `nvmlInit_v2`, `nvmlDeviceGetHandleByUUID`, `nvmlDeviceGetMemoryInfo`, `nvmlShutdown`.
pub fn memory(uuid: DeviceUuid) -> Result<(u64, u64), String> {
    ask(uuid, false, |library, device| {
        // SAFETY: the type is that of the function in NVIDIA's nvml.h.
        let memory: Memory = unsafe { function(library, "nvmlDeviceGetMemoryInfo") }?;
        let mut info = MemoryInfo::default();
        // SAFETY: NVML has just returned the handle, and the pointer is valid for one `nvmlMemory_t`.
        let code = unsafe { memory(device, &mut info) };
        Ok(("nvmlDeviceGetMemoryInfo", code, (info.used, info.total)))
    })
}

/// Calls NVML with the handle of a device, or of the GPU of a MIG instance. `call` returns the call's name, code and result.
fn ask<T>(
    uuid: DeviceUuid,
    of_whole_gpu: bool,
    call: impl FnOnce(&Library, *mut c_void) -> Result<(&'static str, Code, T), String>,
) -> Result<T, String> {
    // SAFETY: loading NVML runs its initializers, as any program that uses NVML expects.
    let library = unsafe { Library::open(Some(LIBRARY), RTLD_NOW | RTLD_LOCAL) };
    let library = library.map_err(|error| match std::error::Error::source(&error) {
        Some(cause) => cause.to_string(),
        None => error.to_string(),
    })?;
    let answer = ask_library(&library, uuid, of_whole_gpu, call);
    // Like the driver library, it is not documented to be safe to unload.
    mem::forget(library);
    answer
}

fn ask_library<T>(
    library: &Library,
    uuid: DeviceUuid,
    of_whole_gpu: bool,
    call: impl FnOnce(&Library, *mut c_void) -> Result<(&'static str, Code, T), String>,
) -> Result<T, String> {
    // SAFETY: the type is that of the function in NVIDIA's nvml.h.
    let init: Plain = unsafe { function(library, "nvmlInit_v2") }?;
    // SAFETY: as above.
    let by_uuid: ByUuid = unsafe { function(library, "nvmlDeviceGetHandleByUUID") }?;
    // SAFETY: as above.
    let shutdown: Plain = unsafe { function(library, "nvmlShutdown") }?;
    // SAFETY: as above.
    let describe: Option<Describe> = unsafe { function(library, "nvmlErrorString") }.ok();
    // SAFETY: as above. Drivers before CUDA 11.1 lack it, and MIG.
    let parent: Option<Parent> = unsafe { function(library, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle") }.ok();
    let check = |call: &str, code: Code| match code {
        0 => Ok(()),
        _ => Err(format!("{call} failed: {}", named(describe, code))),
    };

    // SAFETY: no arguments. NVML counts its users, so another user in this program is not disturbed.
    check("nvmlInit_v2", unsafe { init() })?;
    let answer = (|| {
        let mut device = ptr::null_mut();
        let mut find = |kind: &str| {
            let name = CString::new(format!("{kind}-{uuid}")).expect("a UUID has no zero byte");
            // SAFETY: a C string that lives until the call returns, and a pointer that is valid for one write.
            unsafe { by_uuid(name.as_ptr(), &mut device) }
        };
        let mut code = find("GPU");
        if let Some(parent) = parent.filter(|_| NO_SUCH_DEVICE.contains(&code))
            && find("MIG") == 0
        {
            let instance = device;
            code = match of_whole_gpu {
                // SAFETY: NVML has just returned the handle, and the pointer is valid for one write.
                true => unsafe { parent(instance, &mut device) },
                false => 0,
            };
        }
        check("nvmlDeviceGetHandleByUUID", code)?;
        let (name, code, answer) = call(library, device)?;
        check(name, code).map(|()| answer)
    })();
    // SAFETY: it was initialised above, and no handle is used after this.
    unsafe { shutdown() };
    answer
}

/// NVML's name for a code.
fn named(describe: Option<Describe>, code: Code) -> String {
    // SAFETY: every number is allowed.
    let text = describe.map_or(ptr::null(), |describe| unsafe { describe(code) });
    if text.is_null() {
        return format!("code {code}");
    }
    // SAFETY: NVML returned a C string of static lifetime.
    let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
    format!("{text} ({code})")
}

/// Resolves a function of the library.
///
/// # Safety
/// `F` is the type of a pointer to the function named `name`.
unsafe fn function<F: Copy>(library: &Library, name: &str) -> Result<F, String> {
    // SAFETY: upheld by the caller.
    let symbol = unsafe { library.get::<F>(name.as_bytes()) };
    symbol.map(|symbol| *symbol).map_err(|_| format!("{LIBRARY} has no {name}"))
}
