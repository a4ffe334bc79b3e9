//! Copies between vmmfd's memory and arrays of other libraries, and within vmmfd's memory.

#![allow(unsafe_code)]

use std::{mem::MaybeUninit, ptr, slice, sync::Arc};

use vmmfd::{
    Error,
    array::{ArrayDescriptor, ElementType, Order},
    bindings::Walk,
    error::MemoryError,
    memory::{Device, Selector},
};

use crate::{
    error::{Failure, Outcome},
    memory::{Export, Memory, Owned},
    source::{Keep, Location, Source},
    stream_user::StreamUser,
    walk::{Overlap, each_run, offset_by, overlap},
};

/// Shorter runs of bytes are gathered before they are copied.
const SHORT_RUN: u64 = 64 << 10;

/// The most bytes gathered for one copy.
const BATCH_BYTES: usize = 4 << 20;

/// The most ranges in one driver call.
const BATCH_RANGES: usize = 4096;

impl Source {
    /// Copies its elements, in C order, to an offset in memory. Blocks until the copy is complete: release the GIL.
    ///
    /// # Errors
    /// As [`Source::copy_into`].
    pub(crate) fn copy_to(&self, memory: &dyn Memory, offset: u64) -> Outcome<()> {
        self.copy_into(memory, &ArrayDescriptor { offset, ..self.descriptor()? })
    }

    /// Copies its elements into an array of its shape and type. Blocks until the copy is complete: release the GIL.
    ///
    /// # Errors
    /// [`MemoryError::ReadOnly`]; [`MemoryError::OutOfRange`]; `ValueError` for a copy between a GPU and memory of the host backend;
    /// [`Error::Driver`].
    pub(crate) fn copy_into(&self, memory: &dyn Memory, to: &ArrayDescriptor) -> Outcome<()> {
        copy(&Side::of(self)?, &Side::ours(memory, to)?, memory.device())
    }

    /// Copies an array's elements into this array, of the same shape and type. Blocks: release the GIL.
    ///
    /// # Errors
    /// `ValueError` if its owner forbids writes; as [`Source::copy_into`].
    pub(crate) fn fill_from(&self, memory: &dyn Memory, from: &ArrayDescriptor) -> Outcome<()> {
        if self.read_only {
            return Err(Failure::invalid("the other array is read-only"));
        }
        copy(&Side::ours(memory, from)?, &Side::of(self)?, memory.device())
    }
}

/// The owner of the bytes on one side of a copy.
#[derive(Clone, Copy)]
enum Owner<'a> {
    /// Read and written through driver calls.
    Ours(&'a dyn Memory),
    /// Its library guarantees that the array is valid, and keeps it while the source exists.
    Foreign(&'a Source),
}

/// An array on one side of a copy.
struct Side<'a> {
    owner: Owner<'a>,
    dtype: ElementType,
    shape: &'a [u64],
    /// The address of the element with all indices 0.
    first: u64,
    /// The strides in bytes.
    steps: Vec<i64>,
}

impl<'a> Side<'a> {
    fn ours(memory: &'a dyn Memory, array: &'a ArrayDescriptor) -> Outcome<Self> {
        array.check(memory.size())?;
        let ArrayDescriptor { dtype, shape, offset, .. } = array;
        let first = memory.address() + offset;
        Ok(Self { owner: Owner::Ours(memory), dtype: *dtype, shape, first, steps: array.strides_in_bytes()? })
    }

    fn of(source: &'a Source) -> Outcome<Self> {
        let owner = match &source.keep {
            Keep::Ours(memory) => Owner::Ours(&**memory),
            _ => Owner::Foreign(source),
        };
        let steps = source.steps()?;
        Ok(Self { owner, dtype: source.dtype, shape: &source.shape, first: source.address, steps })
    }

    /// The device of vmmfd's memory.
    fn device(&self) -> Option<&'a Device> {
        match self.owner {
            Owner::Ours(memory) => Some(memory.device()),
            Owner::Foreign(_) => None,
        }
    }

    fn is_on_gpu(&self) -> bool {
        match self.owner {
            Owner::Ours(memory) => !memory.device().is_host(),
            Owner::Foreign(source) => source.location != Location::Host,
        }
    }

    /// Exports memory for the copy. Until the export is dropped, a switch, a park and a seal are refused.
    fn export(&self) -> Outcome<Export> {
        match self.owner {
            Owner::Ours(memory) => Ok(memory.export()?),
            Owner::Foreign(_) => Ok(Export::default()),
        }
    }

    /// # Errors
    /// [`MemoryError::ReadOnly`]; `ValueError` for several elements at one address.
    fn check_destination(&self) -> Outcome<()> {
        if matches!(self.owner, Owner::Ours(memory) if memory.is_read_only()) {
            return Err(Error::Memory(MemoryError::ReadOnly).into());
        }
        let repeats = |(length, step): (&u64, &i64)| *length > 1 && *step == 0;
        if !self.shape.contains(&0) && self.shape.iter().zip(&self.steps).any(repeats) {
            return Err(Failure::invalid(
                "an array with a stride of 0 has several elements at one address: it can't be a destination",
            ));
        }
        Ok(())
    }

    /// Waits for the work that a copy on `device` depends on: other work than the device's own was ordered only on its own device.
    fn wait(&self, device: &Device) -> Outcome<()> {
        let (theirs, must_wait) = match self.owner {
            Owner::Ours(memory) => (memory.device().ordinal(), false),
            Owner::Foreign(source) => match source.location {
                Location::Cuda(ordinal) if ordinal >= 0 => (ordinal, source.wait),
                _ => (device.driver().device_of(self.first)?, source.wait),
            },
        };
        if theirs == device.ordinal() {
            if must_wait {
                device.wait_for_work()?;
            }
        } else if let Ok(other) = u32::try_from(theirs) {
            Device::find(device.driver(), Selector::Ordinal(other))?.wait_for_work()?;
        }
        Ok(())
    }

    /// Passes bytes to a function, in pieces. `at` counts from the first element.
    fn read(&self, at: i64, size: u64, give: &mut dyn FnMut(&[u8]) -> Outcome<()>) -> Outcome<()> {
        let from = offset_by(self.first, at);
        let Owner::Ours(memory) = self.owner else {
            // SAFETY: see `Owner::Foreign`.
            return give(unsafe { slice::from_raw_parts(pointer(from), size as usize) });
        };
        let mut offset = from - memory.address();
        let mut left = size;
        let mut bytes = vec![0; left.min(BATCH_BYTES as u64) as usize];
        while left > 0 {
            let part = &mut bytes[..left.min(BATCH_BYTES as u64) as usize];
            memory.copy_out(offset, part)?;
            give(part)?;
            offset += part.len() as u64;
            left -= part.len() as u64;
        }
        Ok(())
    }

    /// Writes bytes. `at` counts from the first element.
    fn write(&self, at: i64, bytes: &[u8]) -> Outcome<()> {
        let to = offset_by(self.first, at);
        match self.owner {
            Owner::Ours(memory) => Ok(memory.copy_in(to - memory.address(), bytes)?),
            Owner::Foreign(_) => {
                // SAFETY: see `Owner::Foreign`; the array is writable. It may be a view of shared memory: `&mut` would not be exclusive.
                unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), pointer(to), bytes.len()) };
                Ok(())
            }
        }
    }
}

fn pointer(address: u64) -> *mut u8 {
    ptr::with_exposed_provenance_mut(address as usize)
}

/// Copies elements to an array of the same shape and type. `device` is of one side: the copy runs on the destination's, if that is known.
fn copy(from: &Side<'_>, to: &Side<'_>, device: &Device) -> Outcome<()> {
    to.check_destination()?;
    if let Owner::Ours(memory) = from.owner {
        wait_for_user(memory)?;
    }
    let item = from.dtype.size();
    let walk = Walk::new(from.shape, item, &from.steps, &to.steps);
    if walk.bytes == 0 {
        return Ok(());
    }
    let device = to.device().unwrap_or(device);
    match overlap((from.first, &from.steps), (to.first, &to.steps), from.shape, item)? {
        Overlap::Apart => {}
        Overlap::Same => return Ok(()),
        Overlap::Partial => {
            let packed = ArrayDescriptor::new(from.dtype, from.shape, Order::C)?;
            let memory = Owned::create(device, packed.bytes()?)?;
            let between = Side::ours(&*memory, &packed)?;
            copy(from, &between, device)?;
            return copy(&between, to, device);
        }
    }
    let _written = to.export()?;
    // Another thread may have sealed the memory in between.
    to.check_destination()?;
    if from.is_on_gpu() && to.is_on_gpu() {
        let _read = from.export()?;
        from.wait(device)?;
        to.wait(device)?;
        return on_device(device, &walk, from.first, to.first);
    }
    if [from, to].iter().any(|side| side.device().is_none() && side.is_on_gpu()) {
        let text = "one array is on a GPU and the other in host memory: copy it to the CPU with its own library first";
        return Err(Failure::invalid(text));
    }
    let whole = Walk::new(to.shape, item, &to.steps, &to.steps);
    if walk.bytes < SHORT_RUN && whole.is_one_run() {
        return gather(from, to, &walk, whole.bytes);
    }
    each_run(&walk, |a, mut b, size| {
        from.read(a, size, &mut |bytes| {
            to.write(b, bytes)?;
            b += bytes.len() as i64;
            Ok(())
        })
    })
}

/// Copies to a contiguous array of `whole` bytes, many runs at a time.
fn gather(from: &Side<'_>, to: &Side<'_>, walk: &Walk, whole: u64) -> Outcome<()> {
    let mut gathered = Vec::with_capacity(BATCH_BYTES.min(usize::try_from(whole).unwrap_or(BATCH_BYTES)));
    let mut at = 0;
    each_run(walk, |a, _, size| {
        if gathered.len() + size as usize > gathered.capacity() {
            to.write(at, &gathered)?;
            at += gathered.len() as i64;
            gathered.clear();
        }
        from.read(a, size, &mut |bytes| {
            gathered.extend_from_slice(bytes);
            Ok(())
        })
    })?;
    to.write(at, &gathered)
}

/// Copies on a device, from and to the addresses of first elements.
fn on_device(device: &Device, walk: &Walk, from: u64, to: u64) -> Outcome<()> {
    let mut ranges = Vec::new();
    let flush = |ranges: &mut Vec<(u64, u64, u64)>| {
        // SAFETY: vmmfd's memory was checked and is kept. The other library guarantees that its array is valid, and keeps it. The
        // destination is writable and not owned by Rust.
        let result = unsafe { device.driver().copy_device(device.ordinal(), ranges) };
        ranges.clear();
        result
    };
    each_run(walk, |a, b, size| {
        ranges.push((offset_by(to, b), offset_by(from, a), size));
        if ranges.len() == BATCH_RANGES { Ok(flush(&mut ranges)?) } else { Ok(()) }
    })?;
    Ok(flush(&mut ranges)?)
}

/// Waits for the stream that uses memory.
fn wait_for_user(memory: &dyn Memory) -> Outcome<()> {
    memory.user().map_or(Ok(()), StreamUser::synchronize)
}

/// Copies an array's elements, in C order, into uninitialised bytes, and initialises all of them. Blocks: release the GIL.
///
/// # Errors
/// [`Error::Driver`].
pub(crate) fn read(memory: &dyn Memory, array: &ArrayDescriptor, to: &mut [MaybeUninit<u8>]) -> Outcome<()> {
    wait_for_user(memory)?;
    let packed = ArrayDescriptor::new(array.dtype, array.shape.clone(), Order::C)?;
    let walk = Walk::new(&array.shape, array.dtype.size(), &array.strides_in_bytes()?, &packed.strides_in_bytes()?);
    each_run(&walk, |a, b, size| {
        let part = &mut to[b as usize..][..size as usize];
        part.fill(MaybeUninit::new(0));
        // SAFETY: each of its bytes is initialised.
        let part = unsafe { &mut *(ptr::from_mut(part) as *mut [u8]) };
        Ok(memory.copy_out(offset_by(array.offset, a), part)?)
    })
}

/// Zeroes a GPU's new memory, which has undefined contents. Blocks: release the GIL.
///
/// # Errors
/// [`Error::Driver`].
pub(crate) fn zero(memory: &dyn Memory) -> Outcome<()> {
    let (device, address, size) = memory.extent();
    let mut done = size.min(BATCH_BYTES as u64);
    memory.copy_in(0, &vec![0; done as usize])?;
    while done < size {
        let next = done.min(size - done);
        // SAFETY: both ranges are in this memory, which is kept, is writable and is not owned by Rust.
        unsafe { device.driver().copy_device(device.ordinal(), &[(address + done, address, next)]) }?;
        done += next;
    }
    Ok(())
}

/// Returns a contiguous copy of an array in new memory of the same device. Blocks: release the GIL.
///
/// # Errors
/// As [`Owned::create`]; [`Error::Driver`].
pub(crate) fn contiguous_copy(
    memory: &dyn Memory,
    array: &ArrayDescriptor,
) -> Outcome<(Arc<dyn Memory>, ArrayDescriptor)> {
    let descriptor = ArrayDescriptor::new(array.dtype, array.shape.clone(), Order::C)?;
    let made = Owned::create(memory.device(), descriptor.bytes()?)?;
    copy(&Side::ours(memory, array)?, &Side::ours(&*made, &descriptor)?, memory.device())?;
    Ok((made, descriptor))
}
