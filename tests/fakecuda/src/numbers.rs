//! The numbers of CUDA that several files use.

use std::ffi::{c_int, c_uint};

use vmmfd::{Error, internals::Location as Place};

pub(crate) const INVALID_VALUE: u32 = 1;
pub(crate) const OUT_OF_MEMORY: u32 = 2;
pub(crate) const NOT_INITIALIZED: u32 = 3;
pub(crate) const NO_DEVICE: u32 = 100;
pub(crate) const INVALID_DEVICE: u32 = 101;
pub(crate) const INVALID_CONTEXT: u32 = 201;
pub(crate) const INVALID_HANDLE: u32 = 400;
pub(crate) const CONTEXT_IS_DESTROYED: u32 = 709;
pub(crate) const NOT_PERMITTED: u32 = 800;
pub(crate) const NOT_SUPPORTED: u32 = 801;
pub(crate) const NOT_FOUND: u32 = 500;
pub(crate) const ILLEGAL_ADDRESS: u32 = 700;
pub(crate) const ILLEGAL_STATE: u32 = 401;
pub(crate) const UNKNOWN: u32 = 999;

/// `CUDA_ERROR_OPERATING_SYSTEM`.
pub(crate) const OPERATING_SYSTEM: u32 = 304;

/// `CU_MEM_ALLOCATION_TYPE_PINNED`.
pub(crate) const PINNED: c_uint = 1;
/// `CU_MEM_LOCATION_TYPE_DEVICE`.
pub(crate) const DEVICE: c_uint = 1;
/// `CU_MEM_LOCATION_TYPE_HOST_NUMA`.
pub(crate) const HOST_NUMA: c_uint = 3;
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
pub(crate) const POSIX_FD: c_uint = 1;
/// `CU_MEM_HANDLE_TYPE_FABRIC`.
pub(crate) const FABRIC: c_uint = 8;
/// `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`.
pub(crate) const DMA_BUF: c_uint = 1;

/// `location.id` of an imported allocation whose owner is not visible to this process.
pub(crate) const NOT_VISIBLE: c_int = -2;

/// The location of the host backend's memory.
pub(crate) const HERE: Place = Place::Device(0);

/// The number of devices that [`mark`] can distinguish.
pub(crate) const MAX_DEVICES: u32 = 16;

/// The code of a host backend error.
pub(crate) fn code(error: Error) -> u32 {
    match error {
        Error::Driver { code, .. } => code,
        Error::System { .. } => OPERATING_SYSTEM,
        _ => UNKNOWN,
    }
}

/// The bytes of a handle that another process opens.
pub(crate) fn packed(numbers: [u64; 8]) -> [u8; 64] {
    let mut bytes = [0; 64];
    bytes.chunks_exact_mut(8).zip(numbers).for_each(|(bytes, number)| bytes.copy_from_slice(&number.to_le_bytes()));
    bytes
}

/// The numbers of a handle.
pub(crate) fn unpacked(bytes: &[u8; 64]) -> [u64; 8] {
    let mut numbers = [0; 8];
    let bytes = bytes.as_chunks().0;
    numbers.iter_mut().zip(bytes).for_each(|(number, bytes)| *number = u64::from_le_bytes(*bytes));
    numbers
}
