//! The driver library's functions, resolved one by one and typed to return a plain integer.
//!
//! cudarc's bindings of the functions are not used: its `CUresult` is a closed enum, so a code of a newer driver would be undefined
//! behaviour. Its loader panics on a missing library or symbol, and tries `libcuda.so` first, so that a toolkit's stub on the path is
//! preferred to the driver. Nor are its types and numbers, so that a program with its own cudarc, for any version of CUDA, can use this
//! library. With the feature `launch` the compiler compares layouts and numbers with cudarc's.

use std::{
    borrow::Cow,
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    mem, ptr,
};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use super::checkpoints::LockArguments;
use crate::{
    driver::{Operation, code},
    error::{Error, LoadError, Result},
};

/// `CUmemLocation`. The driver writes into it, so the fields are integers, not enums.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Location {
    pub kind: c_uint,
    pub id: c_int,
}

/// `CUmemLocationType`.
const LOCATION_DEVICE: c_uint = 1;
const LOCATION_HOST_NUMA: c_uint = 3;

impl From<crate::driver::Location> for Location {
    fn from(location: crate::driver::Location) -> Self {
        match location {
            crate::driver::Location::Device(ordinal) => Self { kind: LOCATION_DEVICE, id: ordinal },
            crate::driver::Location::HostNuma(node) => Self { kind: LOCATION_HOST_NUMA, id: node },
        }
    }
}

impl From<Location> for crate::driver::Location {
    fn from(location: Location) -> Self {
        match location.kind {
            LOCATION_DEVICE => Self::Device(location.id),
            LOCATION_HOST_NUMA => Self::HostNuma(location.id),
            // A newer driver's kind, for a device that is not visible here or a kind that this crate never requests.
            _ => Self::Device(location.id.min(-1)),
        }
    }
}

/// `CU_MEM_ALLOCATION_TYPE_PINNED`.
const PINNED: c_uint = 1;

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct AllocationProp {
    pub kind: c_uint,
    pub requested_handle_types: c_uint,
    pub location: Location,
    pub win32_meta_data: *mut c_void,
    pub compression: u8,
    pub gpu_direct_rdma: u8,
    pub usage: u16,
    pub reserved: [u8; 4],
}

impl AllocationProp {
    /// Pinned memory, the only kind.
    pub(super) fn pinned(location: crate::driver::Location, handle_types: c_uint) -> Self {
        Self {
            kind: PINNED,
            requested_handle_types: handle_types,
            location: location.into(),
            win32_meta_data: ptr::null_mut(),
            compression: 0,
            gpu_direct_rdma: 0,
            usage: 0,
            reserved: [0; 4],
        }
    }
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct AccessDesc {
    pub location: Location,
    pub flags: c_uint,
}

/// `CUmemPoolProps`. Zero is valid for all fields that newer versions take from `reserved`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct PoolProps {
    kind: c_uint,
    handle_types: c_uint,
    location: Location,
    win32_security_attributes: *mut c_void,
    reserved: [u8; 64],
}

impl PoolProps {
    /// A pool of pinned memory that can be exported as a descriptor.
    pub(super) fn pinned(location: crate::driver::Location) -> Self {
        Self {
            kind: PINNED,
            handle_types: HANDLE_TYPE_POSIX_FD,
            location: location.into(),
            win32_security_attributes: ptr::null_mut(),
            reserved: [0; 64],
        }
    }
}

/// `CUipcMemHandle`, `CUipcEventHandle`, `CUmemPoolPtrExportData` and `CUmemFabricHandle`, opaque to all but the driver.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct Opaque(pub [u8; 64]);

/// `CUstreamBatchMemOpParams`: the fields of the operations that are used here.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct MemoryOperation {
    kind: c_uint,
    address: u64,
    value: u64,
    flags: c_uint,
    alias: u64,
    reserved: u64,
}

/// `CUstreamBatchMemOpType`.
const WAIT_VALUE_64: c_uint = 4;
const WRITE_VALUE_64: c_uint = 5;

impl From<&Operation> for MemoryOperation {
    fn from(operation: &Operation) -> Self {
        // `CU_STREAM_WAIT_VALUE_GEQ` and `CU_STREAM_WRITE_VALUE_DEFAULT` are 0.
        let new = |kind, address, value| Self { kind, address, value, flags: 0, alias: 0, reserved: 0 };
        match *operation {
            Operation::Wait { address, value } => new(WAIT_VALUE_64, address, value),
            Operation::Write { address, value } => new(WRITE_VALUE_64, address, value),
        }
    }
}

/// `CUmemAllocationHandleType`.
pub(super) const HANDLE_TYPE_POSIX_FD: c_uint = 1;
pub(super) const HANDLE_TYPE_FABRIC: c_uint = 8;

/// `CUmemAccess_flags`.
pub(super) const PROT_NONE: c_uint = 0;
pub(super) const PROT_READ: c_uint = 1;
pub(super) const PROT_READWRITE: c_uint = 3;

/// `CUmemAllocationGranularity_flags`.
pub(super) const GRANULARITY_MINIMUM: c_uint = 0;
pub(super) const GRANULARITY_RECOMMENDED: c_uint = 1;

/// `CU_MEMHOSTALLOC_PORTABLE`.
pub(super) const HOST_ALLOC_PORTABLE: c_uint = 1;

/// `CUdevice_attribute`.
pub(super) mod attribute {
    use std::ffi::c_uint;

    pub(in super::super) const MULTIPROCESSOR_COUNT: c_uint = 16;
    pub(in super::super) const COMPUTE_MODE: c_uint = 20;
    pub(in super::super) const VIRTUAL_MEMORY_MANAGEMENT: c_uint = 102;
    pub(in super::super) const POSIX_FILE_DESCRIPTOR: c_uint = 103;
    pub(in super::super) const GPU_DIRECT_RDMA: c_uint = 110;
    pub(in super::super) const MEMORY_POOLS: c_uint = 115;
    pub(in super::super) const POOL_HANDLE_TYPES: c_uint = 119;
    pub(in super::super) const STREAM_MEMORY_OPERATIONS: c_uint = 122;
    pub(in super::super) const FABRIC_HANDLE: c_uint = 128;
    pub(in super::super) const MPS: c_uint = 133;
    pub(in super::super) const HOST_NUMA_ID: c_uint = 134;
    pub(in super::super) const HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT: c_uint = 141;
}

/// `CUpointer_attribute`.
pub(super) mod pointer_attribute {
    use std::ffi::c_uint;

    pub(in super::super) const DEVICE_ORDINAL: c_uint = 9;
    pub(in super::super) const MAPPING_SIZE: c_uint = 18;
    pub(in super::super) const MAPPING_BASE_ADDRESS: c_uint = 19;
}

// Bindings older than CUDA 12.4 don't have the other numbers.
#[cfg(feature = "launch")]
const _: () = {
    use std::mem::{align_of, offset_of, size_of};

    use cudarc::driver::sys::{
        self, CUdevice_attribute as Attribute, CUmemAccess_flags as Access,
        CUmemAllocationGranularity_flags as Granularity, CUpointer_attribute as OfPointer,
    };

    assert!(pointer_attribute::DEVICE_ORDINAL == OfPointer::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL as c_uint);
    assert!(pointer_attribute::MAPPING_SIZE == OfPointer::CU_POINTER_ATTRIBUTE_MAPPING_SIZE as c_uint);
    assert!(pointer_attribute::MAPPING_BASE_ADDRESS == OfPointer::CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR as c_uint);

    assert!(LOCATION_DEVICE == sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE as c_uint);
    assert!(PINNED == sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED as c_uint);
    assert!(HANDLE_TYPE_POSIX_FD == sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR.0);
    assert!(PROT_NONE == Access::CU_MEM_ACCESS_FLAGS_PROT_NONE as c_uint);
    assert!(PROT_READ == Access::CU_MEM_ACCESS_FLAGS_PROT_READ as c_uint);
    assert!(PROT_READWRITE == Access::CU_MEM_ACCESS_FLAGS_PROT_READWRITE as c_uint);
    assert!(GRANULARITY_MINIMUM == Granularity::CU_MEM_ALLOC_GRANULARITY_MINIMUM as c_uint);
    assert!(GRANULARITY_RECOMMENDED == Granularity::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED as c_uint);
    assert!(HOST_ALLOC_PORTABLE == sys::CU_MEMHOSTALLOC_PORTABLE);
    assert!(attribute::MULTIPROCESSOR_COUNT == Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT as c_uint);
    assert!(attribute::COMPUTE_MODE == Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_MODE as c_uint);
    assert!(
        attribute::VIRTUAL_MEMORY_MANAGEMENT
            == Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED as c_uint
    );
    assert!(
        attribute::POSIX_FILE_DESCRIPTOR
            == Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED as c_uint
    );
    assert!(
        attribute::GPU_DIRECT_RDMA == Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED as c_uint
    );
    assert!(attribute::MEMORY_POOLS == Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED as c_uint);
    assert!(attribute::POOL_HANDLE_TYPES == Attribute::CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES as c_uint);
    assert!(size_of::<Location>() == size_of::<sys::CUmemLocation>());
    assert!(size_of::<AllocationProp>() == size_of::<sys::CUmemAllocationProp>());
    assert!(align_of::<AllocationProp>() == align_of::<sys::CUmemAllocationProp>());
    assert!(
        offset_of!(AllocationProp, requested_handle_types)
            == offset_of!(sys::CUmemAllocationProp, requestedHandleTypes)
    );
    assert!(offset_of!(AllocationProp, location) == offset_of!(sys::CUmemAllocationProp, location));
    assert!(offset_of!(AllocationProp, win32_meta_data) == offset_of!(sys::CUmemAllocationProp, win32HandleMetaData));
    assert!(offset_of!(AllocationProp, compression) == offset_of!(sys::CUmemAllocationProp, allocFlags));
    assert!(size_of::<AccessDesc>() == size_of::<sys::CUmemAccessDesc>());
    assert!(offset_of!(AccessDesc, flags) == offset_of!(sys::CUmemAccessDesc, flags));
    assert!(size_of::<PoolProps>() == size_of::<sys::CUmemPoolProps>());
    assert!(align_of::<PoolProps>() == align_of::<sys::CUmemPoolProps>());
    assert!(offset_of!(PoolProps, handle_types) == offset_of!(sys::CUmemPoolProps, handleTypes));
    assert!(offset_of!(PoolProps, location) == offset_of!(sys::CUmemPoolProps, location));
    assert!(
        offset_of!(PoolProps, win32_security_attributes) == offset_of!(sys::CUmemPoolProps, win32SecurityAttributes)
    );
    // Bindings older than CUDA 12.8 don't have `CUcheckpointLockArgs`.
    assert!(size_of::<LockArguments>() == 64);
    assert!(size_of::<MemoryOperation>() == size_of::<sys::CUstreamBatchMemOpParams>());
    assert!(align_of::<MemoryOperation>() == align_of::<sys::CUstreamBatchMemOpParams>());
    assert!(size_of::<Opaque>() == size_of::<sys::CUipcMemHandle>());
    assert!(align_of::<Opaque>() == align_of::<sys::CUipcMemHandle>());
    assert!(size_of::<Opaque>() == size_of::<sys::CUipcEventHandle>());
    assert!(align_of::<Opaque>() == align_of::<sys::CUipcEventHandle>());
    assert!(size_of::<Opaque>() == size_of::<sys::CUmemPoolPtrExportData>());
    assert!(align_of::<Opaque>() == align_of::<sys::CUmemPoolPtrExportData>());
};

/// Declares the function table: the exported names of each function, preferred first, and its arguments.
macro_rules! functions {
    ($($(#[$doc:meta])* $method:ident = [$($name:literal),+] ($($arg:ident: $type:ty),*);)*) => {
        /// Pointers into the driver library, which is never unloaded.
        #[derive(Debug)]
        pub(super) struct Functions {
            library: &'static str,
            $($method: Option<unsafe extern "C" fn($($type),*) -> c_uint>,)*
        }

        impl Functions {
            fn resolve(library: &'static str, loaded: &Library) -> Self {
                Self {
                    library,
                    // SAFETY: the driver API documents this type for the symbols of these names.
                    $($method: [$($name),+].iter().find_map(|name| unsafe { find(loaded, name) }),)*
                }
            }

            $(
                $(#[$doc])*
                ///
                /// # Safety
                /// Pointers must be valid for the driver function of this name, and handles must have been returned by the driver and
                /// not released.
                #[allow(clippy::too_many_arguments, reason = "the driver's signature")]
                #[allow(dead_code, reason = "`failure` calls cuGetErrorName directly to avoid recursion")]
                pub(super) unsafe fn $method(&self, $($arg: $type),*) -> Result<()> {
                    let call = [$($name),+][0];
                    let library = || self.library.to_owned();
                    let function = self.$method.ok_or_else(|| Error::Load(LoadError::MissingSymbol { library: library(), symbol: call }))?;
                    // SAFETY: upheld by the caller.
                    match unsafe { function($($arg),*) } {
                        0 => Ok(()),
                        code => Err(self.failure(call, code)),
                    }
                }
            )*
        }
    };
}

/// Resolves a symbol, if the library has it.
///
/// # Safety
/// `F` is the type of the symbol.
unsafe fn find<F: Copy>(library: &Library, name: &str) -> Option<F> {
    // SAFETY: upheld by the caller; the library is never unloaded.
    unsafe { library.get::<F>(name.as_bytes()) }.ok().map(|symbol| *symbol)
}

functions! {
    init = ["cuInit"] (flags: c_uint);
    driver_get_version = ["cuDriverGetVersion"] (version: *mut c_int);
    get_error_name = ["cuGetErrorName"] (code: c_uint, name: *mut *const c_char);
    device_get_count = ["cuDeviceGetCount"] (count: *mut c_int);
    device_get = ["cuDeviceGet"] (device: *mut c_int, ordinal: c_int);
    device_get_name = ["cuDeviceGetName"] (name: *mut c_char, length: c_int, device: c_int);
    /// The second version returns a MIG instance's own UUID instead of its GPU's.
    device_get_uuid = ["cuDeviceGetUuid_v2", "cuDeviceGetUuid"] (uuid: *mut [u8; 16], device: c_int);
    device_get_attribute = ["cuDeviceGetAttribute"] (value: *mut c_int, attribute: c_uint, device: c_int);
    primary_ctx_retain = ["cuDevicePrimaryCtxRetain"] (context: *mut *mut c_void, device: c_int);
    primary_ctx_release = ["cuDevicePrimaryCtxRelease_v2"] (device: c_int);
    ctx_push_current = ["cuCtxPushCurrent_v2"] (context: *mut c_void);
    ctx_pop_current = ["cuCtxPopCurrent_v2"] (context: *mut *mut c_void);
    ctx_synchronize = ["cuCtxSynchronize"] ();
    stream_synchronize = ["cuStreamSynchronize"] (stream: *mut c_void);
    stream_create = ["cuStreamCreate"] (stream: *mut *mut c_void, flags: c_uint);
    stream_destroy = ["cuStreamDestroy_v2"] (stream: *mut c_void);
    stream_query = ["cuStreamQuery"] (stream: *mut c_void);
    stream_get_ctx = ["cuStreamGetCtx"] (stream: *mut c_void, context: *mut *mut c_void);
    stream_is_capturing = ["cuStreamIsCapturing"] (stream: *mut c_void, status: *mut c_uint);
    /// Without `_v2` it needs an option of the kernel module.
    stream_batch_mem_op = ["cuStreamBatchMemOp_v2"]
        (stream: *mut c_void, count: c_uint, operations: *mut MemoryOperation, flags: c_uint);
    ctx_get_device = ["cuCtxGetDevice"] (device: *mut c_int);
    mem_host_register = ["cuMemHostRegister_v2"] (start: *mut c_void, size: usize, flags: c_uint);
    mem_host_get_device_pointer = ["cuMemHostGetDevicePointer_v2"]
        (address: *mut u64, start: *mut c_void, flags: c_uint);
    mem_host_unregister = ["cuMemHostUnregister"] (start: *mut c_void);
    thread_exchange_capture_mode = ["cuThreadExchangeStreamCaptureMode"] (mode: *mut c_uint);
    mem_get_info = ["cuMemGetInfo_v2"] (free: *mut usize, total: *mut usize);
    mem_get_allocation_granularity = ["cuMemGetAllocationGranularity"]
        (granularity: *mut usize, properties: *const AllocationProp, option: c_uint);
    mem_create = ["cuMemCreate"] (handle: *mut u64, size: usize, properties: *const AllocationProp, flags: u64);
    mem_release = ["cuMemRelease"] (handle: u64);
    mem_address_reserve = ["cuMemAddressReserve"]
        (address: *mut u64, size: usize, alignment: usize, wanted: u64, flags: u64);
    mem_address_free = ["cuMemAddressFree"] (address: u64, size: usize);
    mem_retain = ["cuMemRetainAllocationHandle"] (handle: *mut u64, address: *mut c_void);
    mem_map = ["cuMemMap"] (address: u64, size: usize, offset: usize, handle: u64, flags: u64);
    mem_unmap = ["cuMemUnmap"] (address: u64, size: usize);
    mem_set_access = ["cuMemSetAccess"] (address: u64, size: usize, access: *const AccessDesc, count: usize);
    mem_export = ["cuMemExportToShareableHandle"] (shareable: *mut c_void, handle: u64, kind: c_uint, flags: u64);
    mem_import = ["cuMemImportFromShareableHandle"] (handle: *mut u64, shareable: *mut c_void, kind: c_uint);
    mem_get_properties = ["cuMemGetAllocationPropertiesFromHandle"] (properties: *mut AllocationProp, handle: u64);
    memcpy_htod = ["cuMemcpyHtoD_v2"] (to: u64, from: *const c_void, size: usize);
    memcpy_dtoh = ["cuMemcpyDtoH_v2"] (to: *mut c_void, from: u64, size: usize);
    device_can_access_peer = ["cuDeviceCanAccessPeer"] (can: *mut c_int, device: c_int, peer: c_int);
    mem_get_address_range = ["cuMemGetAddressRange_v2"] (base: *mut u64, size: *mut usize, address: u64);
    mem_host_alloc = ["cuMemHostAlloc"] (start: *mut *mut c_void, size: usize, flags: c_uint);
    mem_free_host = ["cuMemFreeHost"] (start: *mut c_void);
    mem_alloc = ["cuMemAlloc_v2"] (address: *mut u64, size: usize);
    mem_free = ["cuMemFree_v2"] (address: u64);
    ipc_get_mem_handle = ["cuIpcGetMemHandle"] (handle: *mut Opaque, address: u64);
    ipc_open_mem_handle = ["cuIpcOpenMemHandle_v2"] (address: *mut u64, handle: Opaque, flags: c_uint);
    ipc_close_mem_handle = ["cuIpcCloseMemHandle"] (address: u64);
    mem_pool_create = ["cuMemPoolCreate"] (pool: *mut *mut c_void, properties: *const PoolProps);
    mem_pool_destroy = ["cuMemPoolDestroy"] (pool: *mut c_void);
    mem_pool_export = ["cuMemPoolExportToShareableHandle"]
        (shareable: *mut c_int, pool: *mut c_void, kind: c_uint, flags: u64);
    mem_pool_import = ["cuMemPoolImportFromShareableHandle"]
        (pool: *mut *mut c_void, shareable: *mut c_void, kind: c_uint, flags: u64);
    mem_pool_set_access = ["cuMemPoolSetAccess"] (pool: *mut c_void, access: *const AccessDesc, count: usize);
    mem_alloc_from_pool_async = ["cuMemAllocFromPoolAsync"]
        (address: *mut u64, size: usize, pool: *mut c_void, stream: *mut c_void);
    mem_free_async = ["cuMemFreeAsync"] (address: u64, stream: *mut c_void);
    mem_pool_export_pointer = ["cuMemPoolExportPointer"] (data: *mut Opaque, address: u64);
    mem_pool_import_pointer = ["cuMemPoolImportPointer"] (address: *mut u64, pool: *mut c_void, data: *mut Opaque);
    /// CUDA 11.7 and later.
    mem_get_handle_for_range = ["cuMemGetHandleForAddressRange"]
        (shareable: *mut c_void, address: u64, size: usize, kind: c_uint, flags: u64);
    pointer_get_attribute = ["cuPointerGetAttribute"] (data: *mut c_void, attribute: c_uint, address: u64);
    memcpy_dtod = ["cuMemcpyDtoD_v2"] (to: u64, from: u64, size: usize);
    module_load_data = ["cuModuleLoadData"] (module: *mut *mut c_void, image: *const c_void);
    module_get_function = ["cuModuleGetFunction"] (function: *mut *mut c_void, module: *mut c_void, name: *const c_char);
    module_unload = ["cuModuleUnload"] (module: *mut c_void);
    launch_kernel = ["cuLaunchKernel"]
        (function: *mut c_void, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint,
         block_z: c_uint, shared: c_uint, stream: *mut c_void, arguments: *mut *mut c_void, extra: *mut *mut c_void);
    event_create = ["cuEventCreate"] (event: *mut *mut c_void, flags: c_uint);
    event_record = ["cuEventRecord"] (event: *mut c_void, stream: *mut c_void);
    stream_wait_event = ["cuStreamWaitEvent"] (stream: *mut c_void, event: *mut c_void, flags: c_uint);
    /// In milliseconds.
    event_elapsed_time = ["cuEventElapsedTime"] (time: *mut f32, begin: *mut c_void, end: *mut c_void);
    event_destroy = ["cuEventDestroy_v2"] (event: *mut c_void);
    ipc_get_event_handle = ["cuIpcGetEventHandle"] (handle: *mut Opaque, event: *mut c_void);
    ipc_open_event_handle = ["cuIpcOpenEventHandle"] (event: *mut *mut c_void, handle: Opaque);
    /// CUDA 12.8 and later, as the others.
    process_get_state = ["cuCheckpointProcessGetState"] (pid: c_int, state: *mut c_uint);
    process_lock = ["cuCheckpointProcessLock"] (pid: c_int, arguments: *const LockArguments);
    process_checkpoint = ["cuCheckpointProcessCheckpoint"] (pid: c_int, arguments: *const c_void);
    process_restore = ["cuCheckpointProcessRestore"] (pid: c_int, arguments: *const c_void);
    process_unlock = ["cuCheckpointProcessUnlock"] (pid: c_int, arguments: *const c_void);
}

/// The driver's name first: `libcuda.so` may be a toolkit's stub, or be missing without a -dev package.
const LIBRARIES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];

impl Functions {
    /// Loads the driver library of this machine.
    ///
    /// # Errors
    /// [`LoadError::NoLibrary`] if no library can be loaded. A missing function fails the call that needs it.
    pub(super) fn load() -> Result<Self> {
        let mut tried = Vec::new();
        for library in LIBRARIES {
            match Self::load_from(library) {
                Ok(functions) => return Ok(functions),
                Err(error) => tried.push(error),
            }
        }
        Err(Error::Load(LoadError::NoLibrary { tried: tried.join("; ") }))
    }

    /// Loads a library by name or path.
    pub(super) fn load_from(library: &str) -> Result<Self, String> {
        // SAFETY: loading the driver runs its initializers, as any program that uses CUDA expects.
        let loaded = unsafe { Library::open(Some(library), RTLD_NOW | RTLD_LOCAL) };
        let loaded = loaded.map_err(|error| match std::error::Error::source(&error) {
            Some(cause) => cause.to_string(),
            None => error.to_string(),
        })?;
        // The driver starts threads and registers exit handlers: unloading is not safe, so it is never unloaded.
        let functions = Self::resolve(library.to_owned().leak(), &loaded);
        mem::forget(loaded);
        Ok(functions)
    }

    /// The path of the loaded library, as reported by the loader.
    pub(super) fn file(&self) -> Result<std::path::PathBuf> {
        use std::{ffi::OsStr, mem::MaybeUninit, os::unix::ffi::OsStrExt};

        use nix::libc::{Dl_info, dladdr};

        const CALL: &str = "cuInit";
        let function = self
            .init
            .ok_or_else(|| Error::Load(LoadError::MissingSymbol { library: self.library.to_owned(), symbol: CALL }))?;
        let mut info = MaybeUninit::<Dl_info>::zeroed();
        // SAFETY: the pointer is valid for one write. The address is only looked up.
        let found = unsafe { dladdr(function as *const c_void, info.as_mut_ptr()) } != 0;
        // SAFETY: null pointers are valid for all its fields, and it was all zero before.
        let name = unsafe { info.assume_init() }.dli_fname;
        if !found || name.is_null() {
            return Err(crate::driver::failure("dladdr", code::UNKNOWN));
        }
        // SAFETY: the loader's C string, which lives as long as the library is loaded: forever.
        let name = unsafe { CStr::from_ptr(name) };
        Ok(std::path::PathBuf::from(OsStr::from_bytes(name.to_bytes())))
    }

    /// The error of a call that returned `code`, with the driver's name for the code.
    fn failure(&self, call: &'static str, code: c_uint) -> Error {
        if code == code::STUB_LIBRARY {
            return Error::Load(LoadError::Stub { library: self.library.to_owned() });
        }
        let mut name = ptr::null();
        let named = self.get_error_name.is_some_and(|function| {
            // SAFETY: the pointer is valid for one write. An unknown code returns an error.
            unsafe { function(code, &mut name) == 0 && !name.is_null() }
        });
        if !named {
            return crate::driver::failure(call, code);
        }
        // SAFETY: the driver returned a C string of static lifetime.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
        Error::Driver { call, code, name: Cow::Owned(name), source: None }
    }
}
