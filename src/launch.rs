//! Memory as cudarc's [`DevicePtr`], for copies on its streams and for kernels.
//!
//! ```no_run
//! use cudarc::driver::CudaContext;
//! use vmmfd::{
//!     driver::{Access, Backend, Choice, open},
//!     launch::ViewMut,
//!     memory::{Allocation, Device, Mapping, Selector},
//! };
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let driver = open(Choice::Only(Backend::Cuda))?.driver;
//! let device = Device::find(&driver, Selector::default())?;
//! let mapping = Mapping::new(&Allocation::create(&device, 4096)?, Access::ReadWrite)?;
//!
//! let context = CudaContext::new(device.ordinal() as usize)?;
//! let stream = context.default_stream();
//! let mut view = ViewMut::<u32>::new(&mapping, &stream, 1024)?;
//! stream.memset_zeros(&mut view)?;
//! // A kernel takes `&view.address()` as its pointer: `stream.launch_builder(&kernel).arg(&view.address())`.
//! # Ok(())
//! # }
//! ```
//!
//! cudarc panics if there is no driver library. Open the CUDA backend first: it returns an error instead.

use std::{marker::PhantomData, sync::Arc};

use bytemuck::{AnyBitPattern, NoUninit};
use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, DeviceSlice, SyncOnDrop, sys::CUdeviceptr};

use crate::{
    driver::{Access, Backend},
    error::{DeviceError, Error, MemoryError, Result},
    memory::Region,
};

/// The first elements of memory, readable by cudarc.
///
/// Any bytes must be a valid value of the element type ([`AnyBitPattern`]: integers and floats, but not `bool`): cudarc turns the bytes
/// that it copies to the host into values, and another process may have written anything.
///
/// Each use through [`DevicePtr`] synchronises the stream, so that the work is finished before another process is notified. After
/// launching a kernel on [`View::address`], synchronise the stream yourself, also before dropping the memory. Other processes may write
/// to the same memory at any time.
#[derive(Debug)]
pub struct View<'a, T> {
    region: &'a dyn Region,
    stream: Arc<CudaStream>,
    length: usize,
    element: PhantomData<T>,
}

impl<'a, T: DeviceRepr + AnyBitPattern> View<'a, T> {
    /// Views the first `length` elements of memory for use on a stream.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`] if the memory is smaller; [`DeviceError::Unsupported`] if it is not GPU memory;
    /// [`Error::Misuse`] if it is mapped for another device than the stream's, or its address is not aligned for `T`.
    pub fn new(region: &'a dyn Region, stream: &Arc<CudaStream>, length: usize) -> Result<Self> {
        let (device, size) = (region.device(), region.size());
        if device.backend() != Backend::Cuda {
            let feature = "streams and kernels: it is not a GPU";
            return Err(Error::Device(DeviceError::Unsupported { device: device.to_string(), feature }));
        }
        if usize::try_from(device.ordinal()) != Ok(stream.context().ordinal()) {
            let problem = format!("the memory is mapped for {device}, but the stream belongs to another device");
            return Err(Error::Misuse { problem });
        }
        check_alignment::<T>(region.address())?;
        let bytes = length.checked_mul(size_of::<T>()).and_then(|bytes| u64::try_from(bytes).ok());
        match bytes {
            Some(bytes) if bytes <= size => {
                Ok(Self { region, stream: Arc::clone(stream), length, element: PhantomData })
            }
            _ => Err(Error::Memory(MemoryError::OutOfRange { offset: 0, length: bytes.unwrap_or(u64::MAX), size })),
        }
    }

    /// The device pointer, to pass to a kernel.
    pub fn address(&self) -> CUdeviceptr {
        self.region.address()
    }
}

/// A kernel that reads an element at a misaligned address destroys the context.
fn check_alignment<T>(address: u64) -> Result<()> {
    let alignment = align_of::<T>();
    if address.is_multiple_of(alignment as u64) {
        return Ok(());
    }
    let element = std::any::type_name::<T>();
    let problem =
        format!("the address {address:#x} is not aligned for {element}: it must be a multiple of {alignment}");
    Err(Error::Misuse { problem })
}

impl<T> DeviceSlice<T> for View<'_, T> {
    fn len(&self) -> usize {
        self.length
    }

    fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }
}

impl<T> DevicePtr<T> for View<'_, T> {
    fn device_ptr<'s>(&'s self, stream: &'s CudaStream) -> (CUdeviceptr, SyncOnDrop<'s>) {
        (self.region.address(), SyncOnDrop::sync_stream(stream))
    }
}

/// The first elements of memory, readable and writable by cudarc. Otherwise like [`View`].
///
/// The element type must have no uninitialised bytes ([`NoUninit`]: no padding), because other processes read them.
#[derive(Debug)]
pub struct ViewMut<'a, T>(View<'a, T>);

impl<'a, T: DeviceRepr + AnyBitPattern + NoUninit> ViewMut<'a, T> {
    /// Views the first `length` elements of memory for use on a stream.
    ///
    /// # Errors
    /// As for [`View::new`]; [`MemoryError::ReadOnly`].
    pub fn new(region: &'a dyn Region, stream: &Arc<CudaStream>, length: usize) -> Result<Self> {
        if region.access() != Access::ReadWrite {
            return Err(Error::Memory(MemoryError::ReadOnly));
        }
        View::new(region, stream, length).map(Self)
    }

    /// The device pointer, to pass to a kernel.
    pub fn address(&self) -> CUdeviceptr {
        self.0.address()
    }
}

impl<T> DeviceSlice<T> for ViewMut<'_, T> {
    fn len(&self) -> usize {
        self.0.length
    }

    fn stream(&self) -> &Arc<CudaStream> {
        &self.0.stream
    }
}

impl<T> DevicePtr<T> for ViewMut<'_, T> {
    fn device_ptr<'s>(&'s self, stream: &'s CudaStream) -> (CUdeviceptr, SyncOnDrop<'s>) {
        self.0.device_ptr(stream)
    }
}

impl<T> DevicePtrMut<T> for ViewMut<'_, T> {
    fn device_ptr_mut<'s>(&'s mut self, stream: &'s CudaStream) -> (CUdeviceptr, SyncOnDrop<'s>) {
        self.0.device_ptr(stream)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn misaligned_address_is_refused() {
        assert!(check_alignment::<u64>(0x7f00_0000_0008).is_ok());
        assert!(check_alignment::<u8>(0x7f00_0000_0001).is_ok());
        let refused = check_alignment::<u64>(0x7f00_0000_0004).unwrap_err().to_string();
        assert!(refused.contains("0x7f0000000004") && refused.contains("u64") && refused.ends_with("a multiple of 8"));
    }
}
