//! NVML, the management library: whether a GPU's driver state stays when no process uses the GPU, and how much of its memory is used.
//!
//! Loaded only when it is asked, since a container often has the driver without it. Nothing is set.

#![allow(unsafe_code)]

use std::{
    ffi::{CStr, CString, c_char, c_int, c_uint, c_void},
    mem, ptr,
};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use super::DeviceUuid;

/// The name that NVIDIA's driver installs it by.
const LIBRARY: &str = "libnvidia-ml.so.1";

/// `nvmlReturn_t`. A plain number, since a newer library may have values that no list here has.
type Code = c_uint;

/// The codes by which it reports that no device has this UUID: `NVML_ERROR_INVALID_ARGUMENT`, `NVML_ERROR_NOT_FOUND`.
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

/// Whether persistence mode is on for a GPU, or for the GPU that a MIG instance is part of: the mode itself, or the daemon
/// `nvidia-persistenced`, which NVML reports alike.
///
/// Blocks for as long as the driver does: there is no deadline. No setting is changed.
///
/// # Errors
/// Why it can't be found out, in one sentence without a full stop: no library, a function that it lacks, or its error.
///
/// Calls: `nvmlInit_v2`, `nvmlDeviceGetHandleByUUID`, `nvmlDeviceGetDeviceHandleFromMigDeviceHandle`,
/// `nvmlDeviceGetPersistenceMode`, `nvmlShutdown`.
pub fn persistence(uuid: DeviceUuid) -> Result<bool, String> {
    ask(uuid, true, |library, device| {
        // SAFETY: the type is that of the function in NVIDIA's nvml.h.
        let mode: Mode = unsafe { function(library, "nvmlDeviceGetPersistenceMode") }?;
        let mut on = 0;
        // SAFETY: the handle is one that NVML has just returned; `nvmlEnableState_t` has the size of an int.
        let code = unsafe { mode(device, &mut on) };
        Ok(("nvmlDeviceGetPersistenceMode", code, on != 0))
    })
}

/// How many bytes of a device's memory are used, by whichever process, and how many it has: of a GPU, or of a MIG instance.
///
/// Blocks for as long as the driver does: there is no deadline.
///
/// # Errors
/// As [`persistence`].
///
/// Calls: `nvmlInit_v2`, `nvmlDeviceGetHandleByUUID`, `nvmlDeviceGetMemoryInfo`, `nvmlShutdown`.
pub fn memory(uuid: DeviceUuid) -> Result<(u64, u64), String> {
    ask(uuid, false, |library, device| {
        // SAFETY: the type is that of the function in NVIDIA's nvml.h.
        let memory: Memory = unsafe { function(library, "nvmlDeviceGetMemoryInfo") }?;
        let mut info = MemoryInfo::default();
        // SAFETY: the handle is one that NVML has just returned, and there is a place for one `nvmlMemory_t`.
        let code = unsafe { memory(device, &mut info) };
        Ok(("nvmlDeviceGetMemoryInfo", code, (info.used, info.total)))
    })
}

/// The answer of a call with a device's handle, or with that of the GPU that an instance is part of: the call's name, code and result.
fn ask<T>(
    uuid: DeviceUuid,
    of_whole_gpu: bool,
    call: impl FnOnce(&Library, *mut c_void) -> Result<(&'static str, Code, T), String>,
) -> Result<T, String> {
    // SAFETY: loading NVML runs its initialisers, which is what a program that asks it wants.
    let library = unsafe { Library::open(Some(LIBRARY), RTLD_NOW | RTLD_LOCAL) };
    let library = library.map_err(|error| match std::error::Error::source(&error) {
        Some(cause) => cause.to_string(),
        None => error.to_string(),
    })?;
    let answer = ask_library(&library, uuid, of_whole_gpu, call);
    // As with the driver library, nothing says that it may be unloaded.
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

    // SAFETY: no arguments. It counts its callers, so that a program that uses NVML as well is not disturbed.
    check("nvmlInit_v2", unsafe { init() })?;
    let answer = (|| {
        let mut device = ptr::null_mut();
        let mut find = |kind: &str| {
            let name = CString::new(format!("{kind}-{uuid}")).expect("a UUID has no zero byte");
            // SAFETY: a C string that lives until the call returns, and a place for one pointer.
            unsafe { by_uuid(name.as_ptr(), &mut device) }
        };
        let mut code = find("GPU");
        if let Some(parent) = parent.filter(|_| NO_SUCH_DEVICE.contains(&code))
            && find("MIG") == 0
        {
            let instance = device;
            code = match of_whole_gpu {
                // SAFETY: the handle is one that NVML has just returned, and there is a place for one pointer.
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

/// What NVML calls one of its codes.
fn named(describe: Option<Describe>, code: Code) -> String {
    // SAFETY: any number may be asked for.
    let text = describe.map_or(ptr::null(), |describe| unsafe { describe(code) });
    if text.is_null() {
        return format!("code {code}");
    }
    // SAFETY: NVML returned a C string of static lifetime.
    let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
    format!("{text} ({code})")
}

/// A function of the library.
///
/// # Safety
/// `F` is the type of a pointer to the function of that name.
unsafe fn function<F: Copy>(library: &Library, name: &str) -> Result<F, String> {
    // SAFETY: the caller's promise.
    let symbol = unsafe { library.get::<F>(name.as_bytes()) };
    symbol.map(|symbol| *symbol).map_err(|_| format!("{LIBRARY} has no {name}"))
}
