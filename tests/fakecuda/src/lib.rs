//! An emulated CUDA driver library for tests: the `cu*` functions that vmmfd calls, on its host backend.
//!
//! It needs no GPU, and the device is named accordingly. It lets tests run the CUDA path itself (symbol names, struct layouts, call order,
//! error codes) without a GPU, and is therefore strict: calls that NVIDIA's driver was seen to refuse fail with the same code, and calls
//! that were seen to crash it abort with a message.
//!
//! Tests control it with the settings of `controls.rs`, as environment variables of a child process or with [`fakecuda_set`] in their
//! own process. All state belongs to one loaded copy of the library.
//!
//! One file of more than 500 lines: a list of short functions, one for each call.

mod checkpoints;
mod controls;
mod emulated;
mod events;
mod ipc;
mod kernels;
mod modules;
mod names;
mod numbers;
mod streams;

use std::{
    cell::Cell,
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    mem::size_of,
    os::fd::{IntoRawFd, RawFd},
    ptr::{self, NonNull},
    slice,
};

use self::emulated::{Emulated, initialise, initialised};
use self::kernels::Stretch;
use self::modules::Kernel;
use self::numbers::{FABRIC, INVALID_VALUE};

/// The result of a call. The error is a `CUresult`.
type Answer<T = ()> = Result<T, c_uint>;

/// `CUmemLocation`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Location {
    kind: c_uint,
    id: c_int,
}

/// `CUmemAllocationProp`. Declared separately, from NVIDIA's header: a shared declaration would hide its errors.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct AllocationProp {
    kind: c_uint,
    requested_handle_types: c_uint,
    location: Location,
    win32_handle_meta_data: *const c_void,
    compression_type: u8,
    gpu_direct_rdma_capable: u8,
    usage: u16,
    reserved: [u8; 4],
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct AccessDesc {
    location: Location,
    flags: c_uint,
}

/// `CUmemPoolProps`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct PoolProps {
    kind: c_uint,
    handle_types: c_uint,
    location: Location,
    win32_security_attributes: *const c_void,
    max_size: usize,
    usage: u16,
    reserved: [u8; 54],
}

/// `CUipcMemHandle` and `CUipcEventHandle`, passed by value.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct IpcHandle {
    reserved: [u8; 64],
}

thread_local! {
    /// The thread's stream capture mode. Global by default, as in NVIDIA's driver.
    static CAPTURE_MODE: Cell<c_uint> = const { Cell::new(0) };
}

const _: () =
    assert!(size_of::<AllocationProp>() == 32 && size_of::<AccessDesc>() == 12 && size_of::<PoolProps>() == 88);

/// Checks the pointer for a call's result. Null is an error, reported before the call has effects.
fn place<T>(pointer: *mut T) -> Answer<NonNull<T>> {
    NonNull::new(pointer).ok_or(INVALID_VALUE)
}

/// Reads a call's argument.
///
/// # Safety
/// The pointer is null or points to a `T`.
unsafe fn given<'a, T>(pointer: *const T) -> Answer<&'a T> {
    // SAFETY: the caller's promise.
    unsafe { pointer.as_ref() }.ok_or(INVALID_VALUE)
}

/// Runs a call and writes its result through `pointer`, which is checked first.
///
/// # Safety
/// The pointer is null or valid for one write.
unsafe fn result<T>(pointer: *mut T, call: impl FnOnce(&mut Emulated) -> Answer<T>) -> Answer {
    initialised(|driver| {
        let pointer = place(pointer)?;
        let value = call(driver)?;
        // SAFETY: the caller's promise, and it is not null.
        unsafe { pointer.write(value) };
        Ok(())
    })
}

/// As [`result`], with a number that the caller sees as a pointer.
///
/// # Safety
/// The pointer is null or valid for one write.
unsafe fn opaque(pointer: *mut *mut c_void, call: impl FnOnce(&mut Emulated) -> Answer<usize>) -> Answer {
    // SAFETY: the caller's promise.
    unsafe { result(pointer, |driver| call(driver).map(ptr::without_provenance_mut)) }
}

/// Runs a call that needs a current context, with its device.
fn in_context(call: impl FnOnce(&mut Emulated, c_int) -> Answer) -> Answer {
    initialised(|driver| {
        let current = driver.current()?;
        call(driver, current)
    })
}

/// Copies from the caller's memory to the device.
///
/// # Safety
/// `from` is null or valid for `size` bytes.
unsafe fn copy_in(driver: &mut Emulated, to: u64, from: *const c_void, size: usize) -> Answer {
    let current = driver.current()?;
    if size == 0 {
        return Ok(());
    }
    let from = NonNull::new(from.cast_mut()).filter(|_| isize::try_from(size).is_ok());
    let from = from.ok_or(INVALID_VALUE)?.cast::<u8>().as_ptr();
    // SAFETY: the caller's promise.
    driver.copy_in(current, to, unsafe { slice::from_raw_parts(from, size) })
}

/// Copies from the device to the caller's memory.
///
/// # Safety
/// `to` is null or valid for `size` bytes.
unsafe fn copy_out(driver: &Emulated, to: *mut c_void, from: u64, size: usize) -> Answer {
    let current = driver.current()?;
    if size == 0 {
        return Ok(());
    }
    let to = NonNull::new(to).filter(|_| isize::try_from(size).is_ok());
    let to = to.ok_or(INVALID_VALUE)?.cast::<u8>().as_ptr();
    // SAFETY: the caller's promise.
    driver.copy_out(current, from, unsafe { slice::from_raw_parts_mut(to, size) })
}

/// Declares exported C functions. Each call is logged, delayed and failed according to the settings, then executed.
macro_rules! exports {
    ($($(#[$doc:meta])* fn $name:ident($($arg:ident: $type:ty),* $(,)?) $body:block)*) => {$(
        $(#[$doc])*
        #[allow(non_snake_case, reason = "the driver's names")]
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($arg: $type),*) -> c_uint {
            let answer = move || -> Answer { $body };
            match $crate::controls::before(stringify!($name)).and_then(|()| answer()) {
                Ok(()) => 0,
                Err(code) => {
                    $crate::emulated::failed(stringify!($name));
                    code
                }
            }
        }
    )*};
}
// After the macro, which it uses.
mod nvml;

// SAFETY of every block below: a caller of the driver API promises that each pointer is null, or valid for the accesses of its function.
// Null is rejected first.
#[allow(clippy::undocumented_unsafe_blocks, reason = "one reason for all of them, above")]
mod exports {
    use super::*;

    exports! {
        fn cuInit(flags: c_uint) {
            if flags != 0 { Err(INVALID_VALUE) } else { initialise() }
        }

        fn cuDriverGetVersion(version: *mut c_int) {
            let version = place(version)?;
            unsafe { version.write(13000) };
            Ok(())
        }

        fn cuGetErrorName(code: c_uint, name: *mut *const c_char) {
            let name = place(name)?;
            let known = names::name(code);
            unsafe { name.write(known.map_or(ptr::null(), CStr::as_ptr)) };
            known.map(drop).ok_or(INVALID_VALUE)
        }

        fn cuDeviceGetCount(count: *mut c_int) {
            unsafe { result(count, |driver| Ok(driver.device_count())) }
        }

        fn cuDeviceGet(device: *mut c_int, ordinal: c_int) {
            unsafe { result(device, |driver| driver.check_device(ordinal).map(|()| ordinal)) }
        }

        fn cuDeviceGetName(name: *mut c_char, length: c_int, device: c_int) {
            initialised(|driver| {
                let to = place(name)?;
                let name = driver.device_name(device)?;
                let room = usize::try_from(length).ok().and_then(|room| room.checked_sub(1)).ok_or(INVALID_VALUE)?;
                let cut = &name.as_bytes()[..name.len().min(room)];
                unsafe {
                    ptr::copy_nonoverlapping(cut.as_ptr(), to.as_ptr().cast(), cut.len());
                    to.add(cut.len()).write(0);
                }
                Ok(())
            })
        }

        fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int) {
            unsafe { result(uuid, |driver| driver.device_uuid(device)) }
        }

        fn cuDeviceGetUuid(uuid: *mut [u8; 16], device: c_int) {
            unsafe { result(uuid, |driver| driver.device_uuid(device)) }
        }

        fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_uint, device: c_int) {
            unsafe { result(value, |driver| driver.attribute(attribute, device)) }
        }

        fn cuDevicePrimaryCtxRetain(context: *mut *mut c_void, device: c_int) {
            unsafe { result(context, |driver| driver.retain(device)) }
        }

        fn cuDevicePrimaryCtxRelease_v2(device: c_int) {
            initialised(|driver| driver.release_context(device))
        }

        fn cuCtxPushCurrent_v2(context: *mut c_void) {
            initialised(|driver| driver.push(context))
        }

        fn cuCtxPopCurrent_v2(context: *mut *mut c_void) {
            initialised(|driver| {
                let popped = driver.pop()?;
                if !context.is_null() {
                    unsafe { context.write(popped) };
                }
                Ok(())
            })
        }

        /// cudarc calls it for its own contexts.
        fn cuCtxGetCurrent(context: *mut *mut c_void) {
            unsafe { result(context, |driver| Ok(driver.top())) }
        }

        fn cuCtxSetCurrent(context: *mut c_void) {
            initialised(|driver| driver.replace_top(context))
        }

        fn cuCtxSynchronize() {
            initialised(|driver| driver.current().map(drop))?;
            streams::block(|driver| Ok(driver.streams.are_idle()))?;
            initialised(Emulated::synchronize)
        }

        fn cuStreamSynchronize(stream: *mut c_void) {
            if stream.is_null() {
                return initialised(Emulated::synchronize);
            }
            streams::block(|driver| driver.streams.is_idle(stream))?;
            // Copies of other streams that still arrive are not told apart.
            initialised(|driver| {
                driver.arrived();
                Ok(())
            })
        }

        fn cuStreamCreate(stream: *mut *mut c_void, flags: c_uint) {
            unsafe { opaque(stream, |driver| driver.streams.create(driver.current()?, flags)) }
        }

        fn cuStreamDestroy_v2(stream: *mut c_void) {
            initialised(|driver| driver.streams.destroy(stream))
        }

        fn cuStreamQuery(stream: *mut c_void) {
            initialised(|driver| {
                driver.pump();
                driver.streams.query(stream)
            })
        }

        fn cuStreamGetCtx(stream: *mut c_void, context: *mut *mut c_void) {
            unsafe { result(context, |driver| driver.stream_device(stream).map(Emulated::context)) }
        }

        fn cuCtxGetDevice(device: *mut c_int) {
            unsafe { result(device, |driver| driver.current()) }
        }

        fn cuStreamIsCapturing(stream: *mut c_void, status: *mut c_uint) {
            unsafe { result(status, |driver| driver.streams.is_capturing(stream).map(c_uint::from)) }
        }

        fn cuStreamBeginCapture_v2(stream: *mut c_void, mode: c_uint) {
            initialised(|driver| if mode > 2 { Err(INVALID_VALUE) } else { driver.streams.capture(stream, true) })
        }

        fn cuStreamEndCapture(stream: *mut c_void, graph: *mut *mut c_void) {
            initialised(|driver| {
                let graph = place(graph)?;
                driver.streams.capture(stream, false)?;
                unsafe { graph.write(ptr::null_mut()) };
                Ok(())
            })
        }

        fn cuStreamBatchMemOp_v2(
            stream: *mut c_void,
            count: c_uint,
            operations: *mut streams::Operation,
            flags: c_uint,
        ) {
            initialised(|driver| {
                let first = NonNull::new(operations).ok_or(INVALID_VALUE)?;
                driver.batch(stream, unsafe { slice::from_raw_parts(first.as_ptr(), count as usize) }, flags)
            })
        }

        fn cuMemHostRegister_v2(start: *mut c_void, size: usize, flags: c_uint) {
            in_context(|driver, _| driver.streams.register(start, size, flags))
        }

        fn cuMemHostGetDevicePointer_v2(address: *mut u64, start: *mut c_void, flags: c_uint) {
            let call = |driver: &mut Emulated| {
                driver.current()?;
                if flags != 0 { Err(INVALID_VALUE) } else { driver.streams.device_pointer(start) }
            };
            unsafe { result(address, call) }
        }

        /// NVIDIA's driver blocks here while any stream waits.
        fn cuMemHostUnregister(start: *mut c_void) {
            streams::block(|driver| Ok(driver.streams.are_idle()))?;
            initialised(|driver| driver.streams.unregister(start))
        }

        fn cuThreadExchangeStreamCaptureMode(mode: *mut c_uint) {
            initialised(|_| {
                let mode = place(mode)?;
                let given = unsafe { mode.read() };
                if given > 2 {
                    return Err(INVALID_VALUE);
                }
                unsafe { mode.write(CAPTURE_MODE.replace(given)) };
                Ok(())
            })
        }

        fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
            initialised(|driver| {
                let free = place(free)?;
                let total = place(total)?;
                let info = driver.memory_info(driver.current()?)?;
                unsafe {
                    free.write(info.free as usize);
                    total.write(info.total as usize);
                }
                Ok(())
            })
        }

        fn cuMemGetAllocationGranularity(granularity: *mut usize, properties: *const AllocationProp, option: c_uint) {
            let call = |driver: &mut Emulated| {
                driver.check_properties(unsafe { given(properties) }?)?;
                if option > 1 { Err(INVALID_VALUE) } else { Ok(driver.granularity()) }
            };
            unsafe { result(granularity, call) }
        }

        fn cuMemCreate(handle: *mut u64, size: usize, properties: *const AllocationProp, flags: u64) {
            unsafe { result(handle, |driver| driver.create(size as u64, given(properties)?, flags)) }
        }

        fn cuMemRelease(handle: u64) {
            initialised(|driver| driver.release(handle))
        }

        fn cuMemRetainAllocationHandle(handle: *mut u64, address: *mut c_void) {
            unsafe { result(handle, |driver| driver.retain_at(address.addr() as u64)) }
        }

        fn cuCheckpointProcessGetState(pid: c_int, state: *mut c_uint) {
            unsafe { result(state, |_| checkpoints::state(pid)) }
        }

        fn cuCheckpointProcessLock(pid: c_int, _arguments: *const c_void) {
            initialised(|_| checkpoints::step(pid, checkpoints::LOCK))
        }

        fn cuCheckpointProcessCheckpoint(pid: c_int, _arguments: *const c_void) {
            initialised(|_| checkpoints::step(pid, checkpoints::CHECKPOINT))
        }

        fn cuCheckpointProcessRestore(pid: c_int, _arguments: *const c_void) {
            initialised(|_| checkpoints::step(pid, checkpoints::RESTORE))
        }

        fn cuCheckpointProcessUnlock(pid: c_int, _arguments: *const c_void) {
            initialised(|_| checkpoints::step(pid, checkpoints::UNLOCK))
        }

        fn cuMemAddressReserve(address: *mut u64, size: usize, alignment: usize, wanted: u64, flags: u64) {
            let call = |driver: &mut Emulated| {
                // vmmfd never requests an address, so this is not emulated.
                if flags != 0 || wanted != 0 {
                    return Err(INVALID_VALUE);
                }
                driver.reserve(size as u64, alignment as u64)
            };
            unsafe { result(address, call) }
        }

        fn cuMemAddressFree(address: u64, size: usize) {
            initialised(|driver| driver.free(address, size as u64))
        }

        fn cuMemMap(address: u64, size: usize, offset: usize, handle: u64, flags: u64) {
            initialised(|driver| driver.map(address, size as u64, offset as u64, handle, flags))
        }

        fn cuMemUnmap(address: u64, size: usize) {
            // NVIDIA's driver blocks here while any stream waits.
            streams::block(|driver| Ok(driver.streams.are_idle()))?;
            initialised(|driver| driver.unmap(address, size as u64))
        }

        fn cuMemSetAccess(address: u64, size: usize, access: *const AccessDesc, count: usize) {
            initialised(|driver| {
                let access = unsafe { given(access) }?;
                if count != 1 { Err(INVALID_VALUE) } else { driver.set_access(address, size as u64, access) }
            })
        }

        fn cuMemExportToShareableHandle(shareable: *mut c_void, handle: u64, kind: c_uint, flags: u64) {
            initialised(|driver| {
                let shareable = place(shareable)?;
                match kind {
                    FABRIC => unsafe { shareable.cast().write(driver.export_fabric(handle, flags)?) },
                    _ => unsafe { shareable.cast().write(driver.export(handle, kind, flags)?.into_raw_fd()) },
                }
                Ok(())
            })
        }

        fn cuMemImportFromShareableHandle(handle: *mut u64, shareable: *mut c_void, kind: c_uint) {
            unsafe { result(handle, |driver| driver.import(shareable.addr() as RawFd, kind)) }
        }

        fn cuMemGetAllocationPropertiesFromHandle(properties: *mut AllocationProp, handle: u64) {
            unsafe { result(properties, |driver| Ok(driver.properties(handle))) }
        }

        fn cuMemcpyHtoD_v2(to: u64, from: *const c_void, size: usize) {
            initialised(|driver| unsafe { copy_in(driver, to, from, size) })
        }

        fn cuMemcpyDtoH_v2(to: *mut c_void, from: u64, size: usize) {
            initialised(|driver| unsafe { copy_out(driver, to, from, size) })
        }

        /// cudarc calls this and the next one.
        fn cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, size: usize, stream: *mut c_void) {
            initialised(|driver| {
                driver.current()?;
                driver.default_stream(stream)?;
                unsafe { copy_in(driver, to, from, size) }
            })
        }

        fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, size: usize, stream: *mut c_void) {
            // Into pageable memory, the host is blocked until the copy's turn comes.
            streams::block(|driver| driver.streams.is_idle(stream))?;
            initialised(|driver| {
                driver.current()?;
                driver.stream_device(stream)?;
                unsafe { copy_out(driver, to, from, size) }
            })
        }

        fn cuMemsetD8Async(to: u64, value: u8, count: usize, stream: *mut c_void) {
            initialised(|driver| {
                driver.current()?;
                let device = driver.stream_device(stream)?;
                if stream.is_null() {
                    return driver.copy_in(device, to, &vec![value; count]);
                }
                driver.run_on(stream, move |driver| driver.fill(device, to, value, count))
            })
        }

        fn cuDeviceCanAccessPeer(can: *mut c_int, device: c_int, peer: c_int) {
            unsafe { result(can, |driver| driver.can_access_peer(device, peer).map(c_int::from)) }
        }

        fn cuPointerGetAttribute(data: *mut c_void, attribute: c_uint, address: u64) {
            const DEVICE_ORDINAL: c_uint = 9;
            const MAPPING_SIZE: c_uint = 18;
            const MAPPING_BASE_ADDR: c_uint = 19;
            match attribute {
                DEVICE_ORDINAL => unsafe { result(data.cast::<c_int>(), |driver| driver.owner(address)) },
                MAPPING_SIZE => unsafe { result(data.cast::<u64>(), |driver| Ok(driver.mapping(address)?.1)) },
                MAPPING_BASE_ADDR => unsafe { result(data.cast::<u64>(), |driver| Ok(driver.mapping(address)?.0)) },
                _ => Err(INVALID_VALUE),
            }
        }

        fn cuMemGetAddressRange_v2(base: *mut u64, size: *mut usize, address: u64) {
            initialised(|driver| {
                driver.current()?;
                let (start, length) = driver.range(address)?;
                unsafe {
                    if !base.is_null() {
                        base.write(start);
                    }
                    if !size.is_null() {
                        size.write(length as usize);
                    }
                }
                Ok(())
            })
        }

        fn cuMemHostAlloc(start: *mut *mut c_void, size: usize, flags: c_uint) {
            unsafe { result(start, |driver| driver.current().and_then(|_| driver.ipc.lock(size, flags))) }
        }

        fn cuMemFreeHost(start: *mut c_void) {
            initialised(|driver| {
                driver.ipc.unlock(start)?;
                Ok(())
            })?;
            // NVIDIA's driver waits for all work of the context, if there is one.
            streams::block(|driver| Ok(driver.streams.are_idle()))?;
            initialised(|driver| {
                let _ = driver.synchronize();
                Ok(())
            })
        }

        fn cuMemAlloc_v2(address: *mut u64, size: usize) {
            let call = |driver: &mut Emulated| {
                let current = driver.current()?;
                driver.check_free(current, size as u64)?;
                driver.ipc.allocate(current, size as u64)
            };
            unsafe { result(address, call) }
        }

        fn cuMemFree_v2(address: u64) {
            in_context(|driver, _| driver.ipc.deallocate(address))
        }

        fn cuIpcGetMemHandle(handle: *mut [u8; 64], address: u64) {
            unsafe { result(handle, |driver| driver.current().and_then(|_| driver.ipc.handle(address))) }
        }

        fn cuIpcOpenMemHandle_v2(address: *mut u64, handle: IpcHandle, flags: c_uint) {
            unsafe { result(address, |driver| driver.open(&handle.reserved, flags)) }
        }

        fn cuIpcCloseMemHandle(address: u64) {
            in_context(|driver, _| driver.ipc.close(address))
        }

        fn cuMemPoolCreate(pool: *mut *mut c_void, properties: *const PoolProps) {
            let call = |driver: &mut Emulated| {
                let properties = unsafe { given(properties) }?;
                driver.check_device(properties.location.id)?;
                driver.ipc.create_pool(properties)
            };
            unsafe { opaque(pool, call) }
        }

        fn cuMemPoolDestroy(pool: *mut c_void) {
            initialised(|driver| driver.ipc.destroy_pool(pool))
        }

        fn cuMemPoolExportToShareableHandle(shareable: *mut c_int, pool: *mut c_void, kind: c_uint, flags: u64) {
            unsafe { result(shareable, |driver| driver.ipc.export_pool(pool, kind, flags)) }
        }

        fn cuMemPoolImportFromShareableHandle(
            pool: *mut *mut c_void,
            shareable: *mut c_void,
            kind: c_uint,
            flags: u64,
        ) {
            unsafe { opaque(pool, |driver| driver.import_pool(shareable.addr() as RawFd, kind, flags)) }
        }

        fn cuMemPoolSetAccess(pool: *mut c_void, access: *const AccessDesc, count: usize) {
            initialised(|driver| {
                let access = unsafe { given(access) }?;
                if count != 1 { Err(INVALID_VALUE) } else { driver.set_pool_access(pool, access) }
            })
        }

        fn cuMemAllocFromPoolAsync(address: *mut u64, size: usize, pool: *mut c_void, stream: *mut c_void) {
            let call = |driver: &mut Emulated| {
                let current = driver.default_stream(stream)?;
                driver.check_free(current, size as u64)?;
                driver.ipc.allocate_from(pool, size as u64)
            };
            unsafe { result(address, call) }
        }

        fn cuMemFreeAsync(address: u64, stream: *mut c_void) {
            initialised(|driver| {
                driver.default_stream(stream)?;
                driver.ipc.free(address)
            })
        }

        fn cuMemPoolExportPointer(data: *mut [u8; 64], address: u64) {
            unsafe { result(data, |driver| driver.ipc.export_pointer(address)) }
        }

        fn cuMemPoolImportPointer(address: *mut u64, pool: *mut c_void, data: *mut [u8; 64]) {
            unsafe { result(address, |driver| driver.ipc.import_pointer(pool, given(data)?)) }
        }

        fn cuMemGetHandleForAddressRange(
            shareable: *mut c_void,
            address: u64,
            size: usize,
            kind: c_uint,
            flags: u64,
        ) {
            unsafe { result(shareable.cast(), |driver| driver.range_handle(address, size as u64, kind, flags)) }
        }

        fn cuMemcpyDtoD_v2(to: u64, from: u64, size: usize) {
            in_context(|driver, current| driver.copy_within(current, to, from, size as u64))
        }

        fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, size: usize, stream: *mut c_void) {
            initialised(|driver| {
                driver.current()?;
                let device = driver.stream_device(stream)?;
                driver.run_on(stream, move |driver| driver.copy_on_stream(device, to, from, size as u64))
            })
        }

        fn cuModuleLoadData(module: *mut *mut c_void, image: *const c_void) {
            let call = |driver: &mut Emulated| {
                let image = NonNull::new(image.cast_mut()).ok_or(INVALID_VALUE)?;
                driver.current()?;
                let text = unsafe { CStr::from_ptr(image.as_ptr().cast()) };
                driver.modules.load(text)
            };
            unsafe { opaque(module, call) }
        }

        fn cuModuleGetFunction(function: *mut *mut c_void, module: *mut c_void, name: *const c_char) {
            let call = |driver: &mut Emulated| {
                let name = NonNull::new(name.cast_mut()).ok_or(INVALID_VALUE)?;
                driver.current()?;
                let name = unsafe { CStr::from_ptr(name.as_ptr()) };
                driver.modules.function(module, name)
            };
            unsafe { opaque(function, call) }
        }

        fn cuModuleUnload(module: *mut c_void) {
            in_context(|driver, _| driver.modules.unload(module))
        }

        fn cuLaunchKernel(
            function: *mut c_void,
            grid_x: c_uint,
            grid_y: c_uint,
            grid_z: c_uint,
            block_x: c_uint,
            block_y: c_uint,
            block_z: c_uint,
            shared: c_uint,
            stream: *mut c_void,
            arguments: *mut *mut c_void,
            extra: *mut *mut c_void,
        ) {
            initialised(|driver| {
                let current = driver.default_stream(stream)?;
                let kernel = driver.modules.kernel(function)?;
                kernels::check_grid(kernel, [grid_x, grid_y, grid_z], [block_x, block_y, block_z], shared)?;
                if !extra.is_null() {
                    return Err(INVALID_VALUE);
                }
                let argument = |at: usize| -> Answer<*mut c_void> {
                    NonNull::new(unsafe { *NonNull::new(arguments).ok_or(INVALID_VALUE)?.add(at).as_ptr() })
                        .map(NonNull::as_ptr)
                        .ok_or(INVALID_VALUE)
                };
                let long = |at| -> Answer<u64> { Ok(unsafe { *given(argument(at)?.cast::<u64>())? }) };
                let word = |at| -> Answer<u32> { Ok(unsafe { *given(argument(at)?.cast::<u32>())? }) };
                let stretch = || -> Answer<Stretch> {
                    Ok(Stretch { address: long(0)?, start: long(1)?, size: long(2)?, salt: word(3)? })
                };
                match kernel {
                    Kernel::Store => driver.store(current, long(0)?, word(1)?)?,
                    Kernel::Fill => kernels::fill(driver, current, &stretch()?),
                    Kernel::Verify => kernels::verify(driver, current, &stretch()?, long(4)?),
                    Kernel::Add => {
                        let threads = u64::from(grid_x) * u64::from(block_x);
                        kernels::add(driver, current, long(0)?, word(1)?, word(2)?, threads);
                    }
                }
                Ok(())
            })
        }

        fn cuEventCreate(event: *mut *mut c_void, flags: c_uint) {
            unsafe { opaque(event, |driver| driver.events.create(driver.current()?, flags)) }
        }

        fn cuEventRecord(event: *mut c_void, stream: *mut c_void) {
            initialised(|driver| {
                let current = driver.default_stream(stream)?;
                driver.events.record(current, event)
            })
        }

        fn cuStreamWaitEvent(stream: *mut c_void, event: *mut c_void, flags: c_uint) {
            initialised(|driver| {
                driver.default_stream(stream)?;
                driver.events.wait(event, flags)
            })
        }

        fn cuEventElapsedTime(time: *mut f32, begin: *mut c_void, end: *mut c_void) {
            unsafe { result(time, |driver| driver.current().and_then(|_| driver.events.elapsed(begin, end))) }
        }

        fn cuEventDestroy_v2(event: *mut c_void) {
            initialised(|driver| driver.events.destroy(event))
        }

        fn cuIpcGetEventHandle(handle: *mut [u8; 64], event: *mut c_void) {
            unsafe { result(handle, |driver| driver.current().and_then(|_| driver.events.export(event))) }
        }

        fn cuIpcOpenEventHandle(event: *mut *mut c_void, handle: IpcHandle) {
            unsafe { opaque(event, |driver| driver.events.open(driver.current()?, &handle.reserved)) }
        }
    }
}

/// Changes a setting, with the name and value of the environment variable. Aborts if the setting is invalid.
///
/// # Safety
/// Both are C strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fakecuda_set(name: *const c_char, value: *const c_char) {
    // SAFETY: the caller's promise.
    let (name, value) = unsafe { (CStr::from_ptr(name), CStr::from_ptr(value)) };
    controls::set(&name.to_string_lossy(), &value.to_string_lossy());
}

/// The number of calls so far: of a function, or of all if the name is empty.
///
/// # Safety
/// `name` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fakecuda_calls(name: *const c_char) -> u64 {
    // SAFETY: the caller's promise.
    controls::calls(&unsafe { CStr::from_ptr(name) }.to_string_lossy())
}

/// The number of objects that were not given back: handles, reservations, mappings, contexts, memory of legacy handles and of pools,
/// pools, page-locked memory, events, modules.
///
/// # Safety
/// The pointer is valid for nine numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fakecuda_live(counts: *mut [u64; 9]) {
    let live = emulated::live();
    // SAFETY: the caller's promise.
    unsafe { counts.write(live) };
}
