//! The names of error codes, as in NVIDIA's header.

use std::ffi::CStr;

macro_rules! names {
    ($($code:literal $name:literal)*) => {
        /// The name of a code, if the header has it.
        pub(crate) fn name(code: u32) -> Option<&'static CStr> {
            match code {
                $($code => Some($name),)*
                _ => None,
            }
        }
    };
}

names! {
    0 c"CUDA_SUCCESS"
    1 c"CUDA_ERROR_INVALID_VALUE"
    2 c"CUDA_ERROR_OUT_OF_MEMORY"
    3 c"CUDA_ERROR_NOT_INITIALIZED"
    4 c"CUDA_ERROR_DEINITIALIZED"
    34 c"CUDA_ERROR_STUB_LIBRARY"
    46 c"CUDA_ERROR_DEVICE_UNAVAILABLE"
    100 c"CUDA_ERROR_NO_DEVICE"
    101 c"CUDA_ERROR_INVALID_DEVICE"
    200 c"CUDA_ERROR_INVALID_IMAGE"
    201 c"CUDA_ERROR_INVALID_CONTEXT"
    205 c"CUDA_ERROR_MAP_FAILED"
    206 c"CUDA_ERROR_UNMAP_FAILED"
    214 c"CUDA_ERROR_ECC_UNCORRECTABLE"
    217 c"CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"
    304 c"CUDA_ERROR_OPERATING_SYSTEM"
    400 c"CUDA_ERROR_INVALID_HANDLE"
    401 c"CUDA_ERROR_ILLEGAL_STATE"
    500 c"CUDA_ERROR_NOT_FOUND"
    600 c"CUDA_ERROR_NOT_READY"
    700 c"CUDA_ERROR_ILLEGAL_ADDRESS"
    709 c"CUDA_ERROR_CONTEXT_IS_DESTROYED"
    719 c"CUDA_ERROR_LAUNCH_FAILED"
    800 c"CUDA_ERROR_NOT_PERMITTED"
    801 c"CUDA_ERROR_NOT_SUPPORTED"
    802 c"CUDA_ERROR_SYSTEM_NOT_READY"
    803 c"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"
    804 c"CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE"
    999 c"CUDA_ERROR_UNKNOWN"
}
