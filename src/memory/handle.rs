//! Sharing arrays over the program's own channel.

use std::{
    ops::Range,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

use super::{Description, Device, Imported, LegacyMemory, Pointer, Region, Selector, Shared, check_range};
use crate::{
    array::{ArrayDescriptor, Interface},
    driver::{Access, Driver},
    error::{Error, MemoryError, Result},
};

/// Describes an array in shared memory. Together with the descriptors, this is all that another process needs to open the array: send
/// both over any channel.
///
/// Serialises with serde to JSON, or any other format with named fields, in the form of the protocol's `memory` and `array`. The contents
/// are checked when the array is opened.
///
/// ```
/// use vmmfd::{
///     array::{ArrayDescriptor, Order},
///     driver::{Access, Backend, Choice, open},
///     memory::{ArrayHandle, Device, Region, Selector, Shared, Spec},
/// };
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let driver = open(Choice::Only(Backend::Host))?.driver;
/// let device = Device::find(&driver, Selector::default())?;
/// let array = ArrayDescriptor::new("f32".parse()?, vec![3, 5], Order::C)?;
/// let shared = Shared::create(&device, Spec::vmm(array.bytes()?))?;
/// shared.copy_in(0, &1.5f32.to_le_bytes())?;
/// let (handle, fds) = ArrayHandle::of(&shared, array)?;
/// let text = serde_json::to_string(&handle)?;
///
/// // Another process receives the text and the descriptors:
/// let handle: ArrayHandle = serde_json::from_str(&text)?;
/// let array = handle.open(&driver, None, fds, Access::ReadOnly)?;
/// assert_eq!(array.element(&[0, 0])?, 1.5f32.to_le_bytes());
/// let row = array.index(0, 2)?; // A view also keeps the memory open.
/// drop(array);
/// assert_eq!(row.descriptor().shape, [5]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ArrayHandle {
    /// Describes the memory.
    pub memory: Description,
    /// The size of each allocation in bytes, in the order of the descriptors.
    pub segments: Vec<u64>,
    /// Describes the array in the memory.
    pub array: ArrayDescriptor,
}

impl ArrayHandle {
    /// Creates the handle of an array in shared memory. Also returns its descriptors: one per allocation, or the pool's, or none for
    /// legacy memory. The receiver may close them after opening the array.
    ///
    /// # Errors
    /// [`MemoryError::Array`] or [`MemoryError::OutOfRange`] if the array is not inside the memory; [`Error::Misuse`] if the memory is to
    /// be sealed and is not sealed yet; [`Error::Driver`]; [`Error::System`].
    ///
    /// Driver calls: `cuMemPoolExportToShareableHandle`, `cuMemPoolExportPointer`, `cuIpcGetMemHandle`.
    #[doc(alias("cuMemPoolExportToShareableHandle", "cuMemPoolExportPointer", "cuIpcGetMemHandle"))]
    pub fn of(shared: &Shared, array: ArrayDescriptor) -> Result<(Self, Vec<OwnedFd>)> {
        array.check(shared.size())?;
        let mut fds = Vec::new();
        let mut keep = |fd: BorrowedFd<'_>| {
            let fd = fd.try_clone_to_owned();
            fd.map(|fd| fds.push(fd)).map_err(|error| Error::system("duplicate a descriptor", error))
        };
        let mut segments = Vec::new();
        if let Some((_, chunks)) = shared.chunks(0..shared.size())? {
            for chunk in chunks {
                segments.push(chunk.size());
                keep(chunk.as_fd())?;
            }
        }
        if let Some(pool) = shared.pool() {
            keep(pool.export()?)?;
        }
        let memory = shared.describe()?;
        if memory.segments() != segments.len() as u64 {
            let problem = "the memory must be sealed before it is handed out: call Shared::seal";
            return Err(Error::Misuse { problem: problem.to_owned() });
        }
        Ok((Self { memory, segments, array }, fds))
    }

    /// Opens the array. `device` selects the device that the memory is mapped for; the default is the owner, or the first device if this
    /// process does not see the owner. The descriptors are closed on success and on failure.
    ///
    /// # Errors
    /// [`MemoryError::Array`] or [`MemoryError::OutOfRange`], before anything is opened, if the array is not inside the memory; as for
    /// [`Imported::open`] and [`Device::for_memory_of`].
    ///
    /// Driver calls: those of [`Imported::open`].
    pub fn open(&self, driver: &Driver, device: Option<Selector>, fds: Vec<OwnedFd>, access: Access) -> Result<Array> {
        self.array.check(self.memory.size)?;
        let wanted = device.map(|device| Device::find(driver, device)).transpose()?;
        let device = Device::for_memory_of(driver, &self.memory.device, wanted.as_ref())?;
        let memory = Imported::open(&device, &self.memory, &self.segments, fds, access)?;
        Array::new(Arc::new(memory), self.array.clone())
    }
}

/// A typed array in memory, or a view of an array. Clones and views share the memory, which stays open until the last of them is
/// dropped.
///
/// ```
/// # use std::sync::Arc;
/// # use vmmfd::{driver::{Backend, Choice, open}, memory::{Device, Selector, Shared, Spec}};
/// use vmmfd::{array::{ArrayDescriptor, Order}, memory::Array};
///
/// # let driver = open(Choice::Only(Backend::Host))?.driver;
/// # let device = Device::find(&driver, Selector::default())?;
/// # let memory = Shared::create(&device, Spec::vmm(24))?;
/// let array = Array::new(Arc::new(memory), ArrayDescriptor::new("f32".parse()?, [2, 3], Order::C)?)?;
/// let column = array.index(1, 2)?;  // A view of the same memory, with strides.
/// column.memory().copy_in(20, &1.5f32.to_le_bytes())?;
/// assert_eq!(column.first(2)?, ["0.0", "1.5"]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct Array {
    memory: Arc<dyn Region>,
    descriptor: ArrayDescriptor,
}

impl Array {
    /// Creates an array in memory.
    ///
    /// # Errors
    /// [`MemoryError::Array`] or [`MemoryError::OutOfRange`] if the array is not inside the memory.
    pub fn new(memory: Arc<dyn Region>, descriptor: ArrayDescriptor) -> Result<Self> {
        descriptor.check(memory.size())?;
        Ok(Self { memory, descriptor })
    }

    /// Opens a raw legacy handle from CuPy, Numba or a C program as an array, like Numba's `open_ipc_array`. `offset` is the start of
    /// the array's memory relative to the address that the handle opens, in bytes.
    ///
    /// # Errors
    /// The errors of [`LegacyMemory::open`]; [`MemoryError::OutOfRange`]; [`MemoryError::Array`].
    ///
    /// Driver calls: those of [`LegacyMemory::open`].
    pub fn open_legacy(device: &Device, handle: &Pointer, offset: u64, descriptor: ArrayDescriptor) -> Result<Self> {
        let memory = LegacyMemory::open(device, handle)?;
        check_range(offset, 0, memory.size())?;
        let start = descriptor.offset.checked_add(offset);
        let start = start.ok_or(Error::Memory(MemoryError::OutOfRange {
            offset,
            length: descriptor.offset,
            size: memory.size(),
        }))?;
        Self::new(memory, ArrayDescriptor { offset: start, ..descriptor })
    }

    /// The array's type, shape, strides and offset.
    pub fn descriptor(&self) -> &ArrayDescriptor {
        &self.descriptor
    }

    /// The memory that contains the array.
    pub fn memory(&self) -> &Arc<dyn Region> {
        &self.memory
    }

    /// The dictionary of `__cuda_array_interface__`, for CuPy, Numba, PyTorch and others.
    ///
    /// # Errors
    /// [`MemoryError::Array`] if the interface has no typestr for the elements (`bfloat16` and the 8-bit floats), or if the array
    /// exceeds the address space.
    pub fn interface(&self) -> Result<Interface> {
        self.descriptor.interface(self.memory.address(), self.memory.access())
    }

    /// Reads the bytes of one element.
    ///
    /// # Errors
    /// [`MemoryError::Array`] if the index is not in the array; [`Error::Driver`]. Driver call: `cuMemcpyDtoH`.
    #[doc(alias = "cuMemcpyDtoH")]
    pub fn element(&self, index: &[u64]) -> Result<Vec<u8>> {
        element_at(&*self.memory, self.descriptor.dtype.size(), self.descriptor.offset_of(index)?)
    }

    /// Reads the first elements, at most `most`, and formats them as text.
    ///
    /// # Errors
    /// [`Error::Driver`]. Driver call: `cuMemcpyDtoH` for each element.
    #[doc(alias = "cuMemcpyDtoH")]
    pub fn first(&self, most: usize) -> Result<Vec<String>> {
        first_elements(&*self.memory, &self.descriptor, most)
    }

    /// A view of every `step`-th element of a range along an axis: see [`ArrayDescriptor::slice`].
    ///
    /// # Errors
    /// [`MemoryError::Array`] if the axis or the range is not in the array, or the step is 0.
    pub fn slice(&self, axis: usize, range: Range<u64>, step: i64) -> Result<Self> {
        self.view(self.descriptor.slice(axis, range, step)?)
    }

    /// A view of one index along an axis. The view does not have this axis.
    ///
    /// # Errors
    /// [`MemoryError::Array`] if the axis or the index is not in the array.
    pub fn index(&self, axis: usize, index: u64) -> Result<Self> {
        self.view(self.descriptor.index(axis, index)?)
    }

    /// A view with the axes in another order.
    ///
    /// # Errors
    /// [`MemoryError::Array`] unless each axis is named once.
    pub fn permute(&self, axes: &[usize]) -> Result<Self> {
        self.view(self.descriptor.permute(axes)?)
    }

    fn view(&self, descriptor: ArrayDescriptor) -> Result<Self> {
        Self::new(Arc::clone(&self.memory), descriptor)
    }
}

/// The maximum number of bytes to format of an element.
const FORMATTED_BYTES: u64 = 32;

/// Reads the first elements of an array in memory, at most `most`, and formats them as text.
///
/// # Errors
/// [`MemoryError::Array`] if the descriptor is invalid; [`MemoryError::OutOfRange`]; [`Error::Driver`].
pub fn first_elements(memory: &dyn Region, array: &ArrayDescriptor, most: usize) -> Result<Vec<String>> {
    let offsets = array.offsets()?.take(most);
    // Only raw elements can be larger: their first bytes are enough.
    let size = array.dtype.size();
    let shown = size.min(FORMATTED_BYTES);
    let shorten = |offset| {
        let text = array.dtype.format(&element_at(memory, shown, offset)?);
        Ok(if shown < size { text + "..." } else { text })
    };
    offsets.map(shorten).collect()
}

fn element_at(memory: &dyn Region, size: u64, offset: u64) -> Result<Vec<u8>> {
    let mut bytes = vec![0; usize::try_from(size).unwrap_or(usize::MAX)];
    memory.copy_out(offset, &mut bytes)?;
    Ok(bytes)
}
