//! Arrays in memory that travels by a channel of the user's own.

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

/// All that another process needs to open an array, besides the descriptors: send both by any channel that you have.
///
/// It serialises with serde, to JSON or any other format that names its fields, in the form of the protocol's `memory` and
/// `array`. What it says is checked when it is opened.
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
/// // What another process does with the text and the descriptors:
/// let handle: ArrayHandle = serde_json::from_str(&text)?;
/// let array = handle.open(&driver, None, fds, Access::ReadOnly)?;
/// assert_eq!(array.element(&[0, 0])?, 1.5f32.to_le_bytes());
/// let row = array.index(0, 2)?; // A view: it keeps the memory too.
/// drop(array);
/// assert_eq!(row.descriptor().shape, [5]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ArrayHandle {
    /// What is shared, and how.
    pub memory: Description,
    /// The size of each allocation, in bytes, in the order of the descriptors.
    pub segments: Vec<u64>,
    /// What the memory holds.
    pub array: ArrayDescriptor,
}

impl ArrayHandle {
    /// The handle of an array in shared memory, with the descriptors that belong to it: one for each allocation, or the pool's,
    /// or none with a legacy handle. The receiver may close them once it has opened it.
    ///
    /// # Errors
    /// [`MemoryError::Array`] if the array is not inside the memory; [`Error::Misuse`] for memory that is still to be sealed;
    /// [`Error::Driver`]; [`Error::System`].
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
            let problem = "the memory is to be sealed before it is handed out: call Shared::seal";
            return Err(Error::Misuse { problem: problem.to_owned() });
        }
        Ok((Self { memory, segments, array }, fds))
    }

    /// Opens it. `device` is the one that is to use the memory: by default the owner, or the first one if this process does not
    /// see the owner. The descriptors are closed on success and on failure.
    ///
    /// # Errors
    /// [`MemoryError::Array`] if the array is not inside the memory, before anything is opened; those of [`Imported::open`]
    /// and [`Device::for_memory_of`].
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

/// A typed array in memory, or a view of one. Clones and views are of the same memory, which lives until the last one is
/// dropped.
#[derive(Debug, Clone)]
pub struct Array {
    memory: Arc<dyn Region>,
    descriptor: ArrayDescriptor,
}

impl Array {
    /// An array in memory.
    ///
    /// # Errors
    /// [`MemoryError::Array`] if it is not inside the memory.
    pub fn new(memory: Arc<dyn Region>, descriptor: ArrayDescriptor) -> Result<Self> {
        descriptor.check(memory.size())?;
        Ok(Self { memory, descriptor })
    }

    /// Opens a raw legacy handle, such as CuPy, Numba or a C program makes, as an array: what Numba calls `open_ipc_array`.
    /// `offset` is where the array's memory begins behind what the handle opens, in bytes.
    ///
    /// # Errors
    /// Those of [`LegacyMemory::open`]; [`MemoryError::OutOfRange`]; [`MemoryError::Array`].
    ///
    /// Driver calls: those of [`LegacyMemory::open`].
    pub fn open_legacy(device: &Device, handle: &Pointer, offset: u64, descriptor: ArrayDescriptor) -> Result<Self> {
        let memory = LegacyMemory::open(device, handle)?;
        check_range(offset, 0, memory.size())?;
        let begin = descriptor.offset.checked_add(offset);
        let begin = begin.ok_or(Error::Memory(MemoryError::OutOfRange {
            offset,
            length: descriptor.offset,
            size: memory.size(),
        }))?;
        Self::new(memory, ArrayDescriptor { offset: begin, ..descriptor })
    }

    /// What it is made of.
    pub fn descriptor(&self) -> &ArrayDescriptor {
        &self.descriptor
    }

    /// The memory that it is in.
    pub fn memory(&self) -> &Arc<dyn Region> {
        &self.memory
    }

    /// The dictionary of `__cuda_array_interface__`, for CuPy, Numba, PyTorch and others.
    ///
    /// # Errors
    /// [`MemoryError::Array`] if the interface has no name for the elements (`bfloat16` and the 8-bit floats), or if the array
    /// passes
    /// the end of the address space.
    pub fn interface(&self) -> Result<Interface> {
        self.descriptor.interface(self.memory.address(), self.memory.access() == Access::ReadOnly)
    }

    /// One element's bytes.
    ///
    /// # Errors
    /// [`MemoryError::Array`] for an index outside; [`Error::Driver`]. Driver call: `cuMemcpyDtoH`.
    #[doc(alias = "cuMemcpyDtoH")]
    pub fn element(&self, index: &[u64]) -> Result<Vec<u8>> {
        element_at(&*self.memory, self.descriptor.dtype.size(), self.descriptor.offset_of(index)?)
    }

    /// The first elements as a person reads them, at most so many.
    ///
    /// # Errors
    /// [`Error::Driver`]. Driver call: `cuMemcpyDtoH` for each.
    #[doc(alias = "cuMemcpyDtoH")]
    pub fn first(&self, most: usize) -> Result<Vec<String>> {
        first_elements(&*self.memory, &self.descriptor, most)
    }

    /// A view of every `step`th element of a range along an axis: see [`ArrayDescriptor::slice`].
    ///
    /// # Errors
    /// [`MemoryError::Array`] if it is not inside.
    pub fn slice(&self, axis: usize, range: Range<u64>, step: i64) -> Result<Self> {
        self.view(self.descriptor.slice(axis, range, step)?)
    }

    /// A view of one index along an axis, which it no longer has.
    ///
    /// # Errors
    /// [`MemoryError::Array`] if it is not inside.
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

/// How many bytes of an element a person is shown.
const SHOWN_OF_AN_ELEMENT: u64 = 32;

/// The first elements of an array in memory as a person reads them, at most so many.
///
/// # Errors
/// [`MemoryError::Array`] if it makes no sense; [`MemoryError::OutOfRange`]; [`Error::Driver`].
pub fn first_elements(memory: &dyn Region, array: &ArrayDescriptor, most: usize) -> Result<Vec<String>> {
    let offsets = array.offsets()?.take(most);
    // Only a raw element is larger: its beginning is enough.
    let size = array.dtype.size();
    let shown = size.min(SHOWN_OF_AN_ELEMENT);
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
