//! An emulated CUDA driver library, for tests: the `cu*` functions that vmmfd calls, over its host backend.
//!
//! No GPU takes part, and the device's name says so. It is there so that the CUDA path itself (symbol names, struct
//! layouts, call order, error codes) runs where there is no GPU, and so it is strict: what NVIDIA's driver was seen to
//! refuse it refuses with the same code, and what was seen to crash that driver aborts here, with a message.
//!
//! A test steers it by the settings of [`controls`], as environment variables of a child process or through
//! [`fakecuda_set`] in its own. All state is of one loaded copy of the library.

mod controls;
mod emulated;
mod events;
mod ipc;
mod kernels;
mod names;

use std::{
    cell::Cell,
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    mem::size_of,
    os::fd::{IntoRawFd, RawFd},
    ptr::{self, NonNull},
    slice,
};

use self::emulated::{Emulated, FABRIC, INVALID_HANDLE, INVALID_VALUE, initialise, initialised};
use self::kernels::{Kernel, Stretch};

/// What a call answers: success, or a `CUresult`.
type Answer<T = ()> = Result<T, c_uint>;

/// `CUmemLocation`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Location {
    kind: c_uint,
    id: c_int,
}

/// `CUmemAllocationProp`. Declared here on its own, from NVIDIA's header: a shared declaration could not catch a wrong one.
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

/// `CUipcMemHandle` and `CUipcEventHandle`, which are passed by value.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct IpcHandle {
    reserved: [u8; 64],
}

thread_local! {
    /// The mode in which a thread captures, and is kept from what would disturb captures: global, as with NVIDIA's driver.
    static CAPTURE_MODE: Cell<c_uint> = const { Cell::new(0) };
}

const _: () =
    assert!(size_of::<AllocationProp>() == 32 && size_of::<AccessDesc>() == 12 && size_of::<PoolProps>() == 88);

/// Where a call is to write its result: nowhere is an error, before anything is done.
fn place<T>(pointer: *mut T) -> Answer<NonNull<T>> {
    NonNull::new(pointer).ok_or(INVALID_VALUE)
}

/// What a call was given to read.
///
/// # Safety
/// The pointer is null or points to a `T`.
unsafe fn given<'a, T>(pointer: *const T) -> Answer<&'a T> {
    // SAFETY: the caller's promise.
    unsafe { pointer.as_ref() }.ok_or(INVALID_VALUE)
}

/// Declares exported functions of C. Each call is logged, delayed and failed as the settings say, then answered.
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
// Behind the macro, which it uses.
mod nvml;

// SAFETY of every block below: a caller of the driver API promises that a pointer is null or good for what the function
// of this name reads or writes, and null was refused before.
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
            initialised(|driver| {
                let count = place(count)?;
                unsafe { count.write(driver.device_count()) };
                Ok(())
            })
        }

        fn cuDeviceGet(device: *mut c_int, ordinal: c_int) {
            initialised(|driver| {
                let device = place(device)?;
                driver.check_device(ordinal)?;
                unsafe { device.write(ordinal) };
                Ok(())
            })
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
            initialised(|driver| {
                let uuid = place(uuid)?;
                unsafe { uuid.write(driver.device_uuid(device)?) };
                Ok(())
            })
        }

        fn cuDeviceGetUuid(uuid: *mut [u8; 16], device: c_int) {
            initialised(|driver| {
                let uuid = place(uuid)?;
                unsafe { uuid.write(driver.device_uuid(device)?) };
                Ok(())
            })
        }

        fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_uint, device: c_int) {
            initialised(|driver| {
                let value = place(value)?;
                unsafe { value.write(driver.attribute(attribute, device)?) };
                Ok(())
            })
        }

        fn cuDevicePrimaryCtxRetain(context: *mut *mut c_void, device: c_int) {
            initialised(|driver| {
                let context = place(context)?;
                unsafe { context.write(driver.retain(device)?) };
                Ok(())
            })
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

        /// As cudarc has it for its own contexts.
        fn cuCtxGetCurrent(context: *mut *mut c_void) {
            initialised(|driver| {
                let context = place(context)?;
                unsafe { context.write(driver.top()) };
                Ok(())
            })
        }

        fn cuCtxSetCurrent(context: *mut c_void) {
            initialised(|driver| driver.replace_top(context))
        }

        fn cuCtxSynchronize() {
            initialised(Emulated::synchronize)
        }

        fn cuStreamSynchronize(stream: *mut c_void) {
            initialised(|driver| if stream.is_null() { driver.synchronize() } else { Err(INVALID_HANDLE) })
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
                let (free, total) = (place(free)?, place(total)?);
                let info = driver.memory_info(driver.current()?)?;
                unsafe {
                    free.write(info.free as usize);
                    total.write(info.total as usize);
                }
                Ok(())
            })
        }

        fn cuMemGetAllocationGranularity(granularity: *mut usize, properties: *const AllocationProp, option: c_uint) {
            initialised(|driver| {
                let granularity = place(granularity)?;
                driver.check_properties(unsafe { given(properties) }?)?;
                if option > 1 {
                    return Err(INVALID_VALUE);
                }
                unsafe { granularity.write(driver.granularity()) };
                Ok(())
            })
        }

        fn cuMemCreate(handle: *mut u64, size: usize, properties: *const AllocationProp, flags: u64) {
            initialised(|driver| {
                let handle = place(handle)?;
                let properties = unsafe { given(properties) }?;
                unsafe { handle.write(driver.create(size as u64, properties, flags)?) };
                Ok(())
            })
        }

        fn cuMemRelease(handle: u64) {
            initialised(|driver| driver.release(handle))
        }

        fn cuMemAddressReserve(address: *mut u64, size: usize, alignment: usize, wanted: u64, flags: u64) {
            initialised(|driver| {
                let address = place(address)?;
                // A wish for an address is none of what vmmfd does, so it is not emulated.
                if flags != 0 || wanted != 0 {
                    return Err(INVALID_VALUE);
                }
                unsafe { address.write(driver.reserve(size as u64, alignment as u64)?) };
                Ok(())
            })
        }

        fn cuMemAddressFree(address: u64, size: usize) {
            initialised(|driver| driver.free(address, size as u64))
        }

        fn cuMemMap(address: u64, size: usize, offset: usize, handle: u64, flags: u64) {
            initialised(|driver| driver.map(address, size as u64, offset as u64, handle, flags))
        }

        fn cuMemUnmap(address: u64, size: usize) {
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
            initialised(|driver| {
                let handle = place(handle)?;
                unsafe { handle.write(driver.import(shareable.addr() as RawFd, kind)?) };
                Ok(())
            })
        }

        fn cuMemGetAllocationPropertiesFromHandle(properties: *mut AllocationProp, handle: u64) {
            initialised(|driver| {
                let properties = place(properties)?;
                unsafe { properties.write(driver.properties(handle)) };
                Ok(())
            })
        }

        fn cuMemcpyHtoD_v2(to: u64, from: *const c_void, size: usize) {
            initialised(|driver| {
                let current = driver.current()?;
                if size == 0 {
                    return Ok(());
                }
                let from = NonNull::new(from.cast_mut()).filter(|_| isize::try_from(size).is_ok());
                let from = from.ok_or(INVALID_VALUE)?.cast::<u8>().as_ptr();
                driver.copy_in(current, to, unsafe { slice::from_raw_parts(from, size) })
            })
        }

        fn cuMemcpyDtoH_v2(to: *mut c_void, from: u64, size: usize) {
            initialised(|driver| {
                let current = driver.current()?;
                if size == 0 {
                    return Ok(());
                }
                let to = NonNull::new(to).filter(|_| isize::try_from(size).is_ok());
                let to = to.ok_or(INVALID_VALUE)?.cast::<u8>().as_ptr();
                driver.copy_out(current, from, unsafe { slice::from_raw_parts_mut(to, size) })
            })
        }

        fn cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, size: usize, stream: *mut c_void) {
            initialised(|driver| {
                let current = driver.current()?;
                if !stream.is_null() {
                    return Err(INVALID_HANDLE);
                }
                if size == 0 {
                    return Ok(());
                }
                let from = NonNull::new(from.cast_mut()).filter(|_| isize::try_from(size).is_ok());
                let from = from.ok_or(INVALID_VALUE)?.cast::<u8>().as_ptr();
                driver.copy_in(current, to, unsafe { slice::from_raw_parts(from, size) })
            })
        }

        fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, size: usize, stream: *mut c_void) {
            initialised(|driver| {
                let current = driver.current()?;
                if !stream.is_null() {
                    return Err(INVALID_HANDLE);
                }
                if size == 0 {
                    return Ok(());
                }
                let to = NonNull::new(to).filter(|_| isize::try_from(size).is_ok());
                let to = to.ok_or(INVALID_VALUE)?.cast::<u8>().as_ptr();
                driver.copy_out(current, from, unsafe { slice::from_raw_parts_mut(to, size) })
            })
        }

        fn cuMemsetD8Async(to: u64, value: u8, count: usize, stream: *mut c_void) {
            initialised(|driver| {
                let current = driver.current()?;
                if !stream.is_null() {
                    return Err(INVALID_HANDLE);
                }
                driver.copy_in(current, to, &vec![value; count])
            })
        }

        fn cuDeviceCanAccessPeer(can: *mut c_int, device: c_int, peer: c_int) {
            initialised(|driver| {
                let can = place(can)?;
                unsafe { can.write(driver.can_access_peer(device, peer)?.into()) };
                Ok(())
            })
        }

        fn cuPointerGetAttribute(data: *mut c_void, attribute: c_uint, address: u64) {
            initialised(|driver| {
                const DEVICE_ORDINAL: c_uint = 9;
                let data = place(data.cast::<c_int>())?;
                if attribute != DEVICE_ORDINAL {
                    return Err(INVALID_VALUE);
                }
                unsafe { data.write(driver.owner(address)?) };
                Ok(())
            })
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
            initialised(|driver| {
                let start = place(start)?;
                driver.current()?;
                unsafe { start.write(driver.ipc.lock(size, flags)?) };
                Ok(())
            })
        }

        fn cuMemFreeHost(start: *mut c_void) {
            initialised(|driver| {
                driver.ipc.unlock(start)?;
                // It waits for all work of the context, if there is one.
                let _ = driver.synchronize();
                Ok(())
            })
        }

        fn cuMemAlloc_v2(address: *mut u64, size: usize) {
            initialised(|driver| {
                let address = place(address)?;
                let current = driver.current()?;
                driver.check_free(current, size as u64)?;
                unsafe { address.write(driver.ipc.allocate(current, size as u64)?) };
                Ok(())
            })
        }

        fn cuMemFree_v2(address: u64) {
            initialised(|driver| {
                driver.current()?;
                driver.ipc.deallocate(address)
            })
        }

        fn cuIpcGetMemHandle(handle: *mut IpcHandle, address: u64) {
            initialised(|driver| {
                let handle = place(handle)?;
                driver.current()?;
                unsafe { handle.write(IpcHandle { reserved: driver.ipc.handle(address)? }) };
                Ok(())
            })
        }

        fn cuIpcOpenMemHandle_v2(address: *mut u64, handle: IpcHandle, flags: c_uint) {
            initialised(|driver| {
                let address = place(address)?;
                unsafe { address.write(driver.open(&handle.reserved, flags)?) };
                Ok(())
            })
        }

        fn cuIpcCloseMemHandle(address: u64) {
            initialised(|driver| {
                driver.current()?;
                driver.ipc.close(address)
            })
        }

        fn cuMemPoolCreate(pool: *mut *mut c_void, properties: *const PoolProps) {
            initialised(|driver| {
                let pool = place(pool)?;
                let properties = unsafe { given(properties) }?;
                driver.check_device(properties.location.id)?;
                let created = driver.ipc.create_pool(properties)?;
                unsafe { pool.write(ptr::without_provenance_mut(created)) };
                Ok(())
            })
        }

        fn cuMemPoolDestroy(pool: *mut c_void) {
            initialised(|driver| driver.ipc.destroy_pool(pool))
        }

        fn cuMemPoolExportToShareableHandle(shareable: *mut c_int, pool: *mut c_void, kind: c_uint, flags: u64) {
            initialised(|driver| {
                let shareable = place(shareable)?;
                unsafe { shareable.write(driver.ipc.export_pool(pool, kind, flags)?) };
                Ok(())
            })
        }

        fn cuMemPoolImportFromShareableHandle(
            pool: *mut *mut c_void,
            shareable: *mut c_void,
            kind: c_uint,
            flags: u64,
        ) {
            initialised(|driver| {
                let pool = place(pool)?;
                let imported = driver.import_pool(shareable.addr() as RawFd, kind, flags)?;
                unsafe { pool.write(ptr::without_provenance_mut(imported)) };
                Ok(())
            })
        }

        fn cuMemPoolSetAccess(pool: *mut c_void, access: *const AccessDesc, count: usize) {
            initialised(|driver| {
                let access = unsafe { given(access) }?;
                if count != 1 { Err(INVALID_VALUE) } else { driver.set_pool_access(pool, access) }
            })
        }

        fn cuMemAllocFromPoolAsync(address: *mut u64, size: usize, pool: *mut c_void, stream: *mut c_void) {
            initialised(|driver| {
                let address = place(address)?;
                let current = driver.default_stream(stream)?;
                driver.check_free(current, size as u64)?;
                unsafe { address.write(driver.ipc.allocate_from(pool, size as u64)?) };
                Ok(())
            })
        }

        fn cuMemFreeAsync(address: u64, stream: *mut c_void) {
            initialised(|driver| {
                driver.default_stream(stream)?;
                driver.ipc.free(address)
            })
        }

        fn cuMemPoolExportPointer(data: *mut [u8; 64], address: u64) {
            initialised(|driver| {
                let data = place(data)?;
                unsafe { data.write(driver.ipc.export_pointer(address)?) };
                Ok(())
            })
        }

        fn cuMemPoolImportPointer(address: *mut u64, pool: *mut c_void, data: *mut [u8; 64]) {
            initialised(|driver| {
                let address = place(address)?;
                let data = unsafe { given(data) }?;
                unsafe { address.write(driver.ipc.import_pointer(pool, data)?) };
                Ok(())
            })
        }

        fn cuMemGetHandleForAddressRange(
            shareable: *mut c_void,
            address: u64,
            size: usize,
            kind: c_uint,
            flags: u64,
        ) {
            initialised(|driver| {
                let shareable = place(shareable.cast::<c_int>())?;
                unsafe { shareable.write(driver.range_handle(address, size as u64, kind, flags)?) };
                Ok(())
            })
        }

        fn cuMemcpyDtoD_v2(to: u64, from: u64, size: usize) {
            initialised(|driver| {
                let current = driver.current()?;
                driver.copy_within(current, to, from, size as u64)
            })
        }

        fn cuModuleLoadData(module: *mut *mut c_void, image: *const c_void) {
            initialised(|driver| {
                let module = place(module)?;
                let image = NonNull::new(image.cast_mut()).ok_or(INVALID_VALUE)?;
                driver.current()?;
                let loaded = driver.modules.load(unsafe { CStr::from_ptr(image.as_ptr().cast()) })?;
                unsafe { module.write(ptr::without_provenance_mut(loaded)) };
                Ok(())
            })
        }

        fn cuModuleGetFunction(function: *mut *mut c_void, module: *mut c_void, name: *const c_char) {
            initialised(|driver| {
                let function = place(function)?;
                let name = NonNull::new(name.cast_mut()).ok_or(INVALID_VALUE)?;
                driver.current()?;
                let found = driver.modules.function(module, unsafe { CStr::from_ptr(name.as_ptr()) })?;
                unsafe { function.write(ptr::without_provenance_mut(found)) };
                Ok(())
            })
        }

        fn cuModuleUnload(module: *mut c_void) {
            initialised(|driver| {
                driver.current()?;
                driver.modules.unload(module)
            })
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
            initialised(|driver| {
                let event = place(event)?;
                let created = driver.current().and_then(|device| driver.events.create(device, flags))?;
                unsafe { event.write(ptr::without_provenance_mut(created)) };
                Ok(())
            })
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
            initialised(|driver| {
                let time = place(time)?;
                driver.current()?;
                unsafe { time.write(driver.events.elapsed(begin, end)?) };
                Ok(())
            })
        }

        fn cuEventDestroy_v2(event: *mut c_void) {
            initialised(|driver| driver.events.destroy(event))
        }

        fn cuIpcGetEventHandle(handle: *mut IpcHandle, event: *mut c_void) {
            initialised(|driver| {
                let handle = place(handle)?;
                driver.current()?;
                unsafe { handle.write(IpcHandle { reserved: driver.events.export(event)? }) };
                Ok(())
            })
        }

        fn cuIpcOpenEventHandle(event: *mut *mut c_void, handle: IpcHandle) {
            initialised(|driver| {
                let event = place(event)?;
                let opened = driver.current().and_then(|device| driver.events.open(device, &handle.reserved))?;
                unsafe { event.write(ptr::without_provenance_mut(opened)) };
                Ok(())
            })
        }
    }
}

/// Changes a setting from now on: the names and values are those of the environment. Aborts if it makes no sense.
///
/// # Safety
/// Both are C strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fakecuda_set(name: *const c_char, value: *const c_char) {
    // SAFETY: the caller's promise.
    let (name, value) = unsafe { (CStr::from_ptr(name), CStr::from_ptr(value)) };
    controls::set(&name.to_string_lossy(), &value.to_string_lossy());
}

/// How often a function was called so far, or all of them if the name is empty.
///
/// # Safety
/// `name` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fakecuda_calls(name: *const c_char) -> u64 {
    // SAFETY: the caller's promise.
    controls::calls(&unsafe { CStr::from_ptr(name) }.to_string_lossy())
}

/// What is alive: handles not released, reservations not freed, mappings not unmapped, contexts not released, memory of
/// legacy handles and of pools not freed or closed, pools not destroyed, page-locked memory not freed, events not destroyed,
/// modules not unloaded.
///
/// # Safety
/// The pointer is good for nine numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fakecuda_live(counts: *mut [u64; 9]) {
    let live = emulated::live();
    // SAFETY: the caller's promise.
    unsafe { counts.write(live) };
}

/// How many waits there were in this process for an event that some process had recorded.
#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_waited() -> u64 {
    emulated::waited()
}
