//! The `CUresult` numbers that this crate names. A driver may return others.

macro_rules! codes {
    ($($name:ident = $value:literal,)*) => {
        $(#[doc = concat!("`CUDA_ERROR_", stringify!($name), "`")] pub const $name: u32 = $value;)*

        /// The name of a code in this list.
        pub fn name(code: u32) -> Option<&'static str> {
            match code {
                $($value => Some(concat!("CUDA_ERROR_", stringify!($name))),)*
                _ => None,
            }
        }
    };
}
codes! {
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    STUB_LIBRARY = 34,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    MAP_FAILED = 205,
    PEER_ACCESS_UNSUPPORTED = 217,
    OPERATING_SYSTEM = 304,
    INVALID_HANDLE = 400,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    NOT_PERMITTED = 800,
    NOT_SUPPORTED = 801,
    SYSTEM_DRIVER_MISMATCH = 803,
    STREAM_CAPTURE_IMPLICIT = 906,
    UNKNOWN = 999,
}
