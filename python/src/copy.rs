//! Copies between memory of ours and arrays of other libraries, and between memory of ours.

#![allow(unsafe_code)]

use std::{mem::MaybeUninit, ptr, slice, sync::Arc};

use vmmfd::{
    Error,
    array::{ArrayDescriptor, Order},
    error::MemoryError,
    memory::{Device, Selector},
};

use crate::{
    buffer,
    error::{Failure, Outcome},
    memory::{Export, Memory, Owned},
    source::{Keep, Place, Source},
    walk::{Meeting, Walk, meeting, moved},
};

/// Shorter runs of bytes are gathered before they are copied.
const SHORT: u64 = 64 << 10;

/// How many bytes are gathered at a time.
const GATHERED: usize = 4 << 20;

/// How many ranges the driver is given at a time.
const RANGES: usize = 4096;

impl Source {
    /// Copies its elements, in C order, to `offset` of memory. They are there when it returns. Blocks: call it with the GIL released.
    ///
    /// # Errors
    /// Those of [`Source::copy_into`].
    pub(crate) fn copy_to(&self, memory: &dyn Memory, offset: u64) -> Outcome<()> {
        self.copy_into(memory, &ArrayDescriptor { offset, ..self.descriptor()? })
    }

    /// Copies its elements into an array of its shape and type in memory. They are there when it returns. Blocks: call it with the
    /// GIL released.
    ///
    /// # Errors
    /// [`MemoryError::ReadOnly`]; [`MemoryError::OutOfRange`]; `NotImplementedError` for an array of a GPU and memory of the host
    /// backend; [`Error::Driver`].
    pub(crate) fn copy_into(&self, memory: &dyn Memory, to: &ArrayDescriptor) -> Outcome<()> {
        if memory.is_read_only() {
            return Err(Error::Memory(MemoryError::ReadOnly).into());
        }
        to.check(memory.size())?;
        let (steps, target) = (self.steps()?, to.strides_in_bytes()?);
        check_destination(&to.shape, &target)?;
        let walk = Walk::new(&self.shape, self.dtype.size(), &steps, &target);
        if walk.is_empty() {
            return Ok(());
        }
        match meeting((self.address, &steps), (memory.address() + to.offset, &target), &self.shape, self.dtype.size())?
        {
            Meeting::Apart => {}
            Meeting::Same => return Ok(()),
            Meeting::Overlap => {
                let straight = self.descriptor()?;
                let copy = Owned::create(memory.device(), straight.bytes()?)?;
                self.copy_into(&*copy, &straight)?;
                return between(&*copy, &straight, memory, to);
            }
        }
        let _held = held(memory)?;
        if let Place::Cuda(_) = self.place {
            let _source = self.export()?;
            self.meet(memory)?;
            let (from, base) = (self.address, memory.address() + to.offset);
            return on_device(memory, &walk, |a, b| (moved(base, b), moved(from, a)));
        }
        let whole = buffer::contiguous(to)?.0;
        if walk.bytes < SHORT && whole {
            // The elements follow one another where they go: gather them.
            let mut gathered = Vec::with_capacity(GATHERED.min(usize::try_from(self.bytes()?).unwrap_or(GATHERED)));
            let mut at = to.offset;
            walk.each(|a, _, size| {
                if gathered.len() + size as usize > gathered.capacity() {
                    memory.copy_in(at, &gathered)?;
                    at += gathered.len() as u64;
                    gathered.clear();
                }
                self.read_run(a, size, &mut |bytes| {
                    gathered.extend_from_slice(bytes);
                    Ok(())
                })
            })?;
            return Ok(memory.copy_in(at, &gathered)?);
        }
        walk.each(|a, b, size| {
            let mut at = moved(to.offset, b);
            self.read_run(a, size, &mut |bytes| {
                memory.copy_in(at, bytes)?;
                at += bytes.len() as u64;
                Ok(())
            })
        })
    }

    /// Copies the elements of an array in memory into this one, of the same shape and type. Blocks: call it with the GIL released.
    ///
    /// # Errors
    /// `ValueError` if its owner forbids it, and those of [`Source::copy_into`].
    pub(crate) fn fill_from(&self, memory: &dyn Memory, from: &ArrayDescriptor) -> Outcome<()> {
        if self.read_only {
            return Err(Failure::invalid("the other array may only be read: its library says so"));
        }
        let (steps, source) = (self.steps()?, from.strides_in_bytes()?);
        check_destination(&self.shape, &steps)?;
        let walk = Walk::new(&self.shape, self.dtype.size(), &steps, &source);
        if walk.is_empty() {
            return Ok(());
        }
        if let Keep::Ours(ours) = &self.keep {
            let to =
                ArrayDescriptor { offset: self.address - ours.address(), strides: Some(self.steps()?), ..from.clone() };
            return between(memory, from, &**ours, &to);
        }
        let first = memory.address() + from.offset;
        match meeting((first, &source), (self.address, &steps), &self.shape, self.dtype.size())? {
            Meeting::Apart => {}
            Meeting::Same => return Ok(()),
            Meeting::Overlap => {
                let (copy, straight) = copied(memory, from)?;
                return self.fill_from(&*copy, &straight);
            }
        }
        if let Place::Cuda(_) = self.place {
            let _held = memory.export()?;
            self.meet(memory)?;
            let (to, base) = (self.address, memory.address() + from.offset);
            return on_device(memory, &walk, |a, b| (moved(to, a), moved(base, b)));
        }
        // The other array may be a view of shared memory: there is no `&mut` of it.
        let mut bytes = vec![0; walk.bytes.min(GATHERED as u64) as usize];
        walk.each(|a, b, size| {
            let (mut to, mut at, mut left) = (moved(self.address, a), moved(from.offset, b), size as usize);
            while left > 0 {
                let length = left.min(GATHERED);
                memory.copy_out(at, &mut bytes[..length])?;
                // SAFETY: the other library says that the array is there, and keeps it as long as this lives; it may be written, and
                // the bytes are this function's own.
                unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), pointer(to), length) };
                (to, at, left) = (to + length as u64, at + length as u64, left - length);
            }
            Ok(())
        })
    }

    /// Makes ready for a copy on a device.
    fn meet(&self, memory: &dyn Memory) -> Outcome<()> {
        let device = memory.device();
        if device.is_host() {
            let text = "one array is on a GPU and the other in memory of the host backend: copy it to the CPU with its own library first";
            return Err(Failure::invalid(text));
        }
        let theirs = match self.place {
            Place::Cuda(ordinal) if ordinal >= 0 => ordinal,
            _ => device.driver().device_of(self.address)?,
        };
        if theirs == device.ordinal() {
            if self.wait {
                device.wait_for_work()?;
            }
        } else if let Ok(other) = u32::try_from(theirs) {
            // Its library ordered its work before what follows on its own device, which this copy is not.
            Device::find(device.driver(), Selector::Ordinal(other))?.wait_for_work()?;
        }
        Ok(())
    }

    /// Gives bytes of it to a function, some at a time.
    fn read_run(&self, at: i64, size: u64, give: &mut dyn FnMut(&[u8]) -> Outcome<()>) -> Outcome<()> {
        let from = moved(self.address, at);
        let Keep::Ours(memory) = &self.keep else {
            // SAFETY: its library says that the array is there, and keeps it as long as this lives.
            return give(unsafe { slice::from_raw_parts(pointer(from), size as usize) });
        };
        let (mut offset, mut left) = (from - memory.address(), size);
        let mut bytes = vec![0; left.min(GATHERED as u64) as usize];
        while left > 0 {
            let part = &mut bytes[..left.min(GATHERED as u64) as usize];
            memory.copy_out(offset, part)?;
            give(part)?;
            offset += part.len() as u64;
            left -= part.len() as u64;
        }
        Ok(())
    }
}

fn pointer(address: u64) -> *mut u8 {
    ptr::with_exposed_provenance_mut(address as usize)
}

/// Refuses an array as a destination that has elements at one address.
fn check_destination(shape: &[u64], steps: &[i64]) -> Outcome<()> {
    if !shape.contains(&0) && shape.iter().zip(steps).any(|(length, step)| *length > 1 && *step == 0) {
        return Err(Failure::invalid(
            "an array with a stride of 0 has many elements at one address: it can't be copied to",
        ));
    }
    Ok(())
}

/// Copies on a device. `range` returns where to and where from.
fn on_device(memory: &dyn Memory, walk: &Walk, range: impl Fn(i64, i64) -> (u64, u64)) -> Outcome<()> {
    let device = memory.device();
    let mut ranges = Vec::new();
    let flush = |ranges: &mut Vec<(u64, u64, u64)>| {
        // SAFETY: one end is in `memory`, which was checked and is kept; of the other one its library says that it is there, and it
        // keeps it meanwhile. Where it goes may be written, and is no memory of Rust's.
        let result = unsafe { device.driver().copy_device(device.ordinal(), ranges) };
        ranges.clear();
        result
    };
    walk.each(|a, b, size| {
        let (to, from) = range(a, b);
        ranges.push((to, from, size));
        if ranges.len() == RANGES { Ok(flush(&mut ranges)?) } else { Ok(()) }
    })?;
    Ok(flush(&mut ranges)?)
}

/// Stands for a use of memory that is written: it must stay mapped, and writable. A switch, a park and a seal are refused meanwhile.
///
/// # Errors
/// [`MemoryError::ReadOnly`], also for what another thread makes so now.
fn held(memory: &dyn Memory) -> Outcome<Export> {
    let export = memory.export()?;
    if memory.is_read_only() { Err(Error::Memory(MemoryError::ReadOnly).into()) } else { Ok(export) }
}

/// Copies from memory of ours to other memory of ours, of the same shape and type.
fn between(from: &dyn Memory, source: &ArrayDescriptor, to: &dyn Memory, target: &ArrayDescriptor) -> Outcome<()> {
    if to.is_read_only() {
        return Err(Error::Memory(MemoryError::ReadOnly).into());
    }
    source.check(from.size())?;
    target.check(to.size())?;
    let (a, b) = (source.strides_in_bytes()?, target.strides_in_bytes()?);
    check_destination(&target.shape, &b)?;
    let walk = Walk::new(&source.shape, source.dtype.size(), &a, &b);
    if walk.is_empty() {
        return Ok(());
    }
    let (first, last) = (from.address() + source.offset, to.address() + target.offset);
    match meeting((first, &a), (last, &b), &source.shape, source.dtype.size())? {
        Meeting::Apart => {}
        Meeting::Same => return Ok(()),
        Meeting::Overlap => {
            let (copy, straight) = copied(from, source)?;
            return between(&*copy, &straight, to, target);
        }
    }
    let _held = held(to)?;
    if !from.device().is_host() && from.device().driver() == to.device().driver() {
        let _source = from.export()?;
        let (a, b) = (from.address() + source.offset, to.address() + target.offset);
        return on_device(to, &walk, |from, to| (moved(b, to), moved(a, from)));
    }
    let mut bytes = vec![0; walk.bytes.min(GATHERED as u64) as usize];
    walk.each(|a, b, size| {
        let (mut at, mut to_at, mut left) = (moved(source.offset, a), moved(target.offset, b), size);
        while left > 0 {
            let part = &mut bytes[..left.min(GATHERED as u64) as usize];
            from.copy_out(at, part)?;
            to.copy_in(to_at, part)?;
            let done = part.len() as u64;
            (at, to_at, left) = (at + done, to_at + done, left - done);
        }
        Ok(())
    })
}

/// Copies an array's elements, in C order, into new bytes, all of which have values then. Blocks: call it with the GIL released.
///
/// # Errors
/// [`Error::Driver`].
pub(crate) fn read(memory: &dyn Memory, array: &ArrayDescriptor, to: &mut [MaybeUninit<u8>]) -> Outcome<()> {
    let straight = ArrayDescriptor::new(array.dtype, array.shape.clone(), Order::C)?;
    let walk = Walk::new(&array.shape, array.dtype.size(), &array.strides_in_bytes()?, &straight.strides_in_bytes()?);
    if walk.is_empty() {
        return Ok(());
    }
    walk.each(|a, b, size| {
        let part = &mut to[b as usize..][..size as usize];
        part.fill(MaybeUninit::new(0));
        // SAFETY: each of its bytes has a value now.
        let part = unsafe { &mut *(ptr::from_mut(part) as *mut [u8]) };
        Ok(memory.copy_out(moved(array.offset, a), part)?)
    })
}

/// A copy of an array in new memory of the same device, contiguous. Blocks: call it with the GIL released.
///
/// # Errors
/// Those of [`Owned::create`] and [`Error::Driver`].
pub(crate) fn copied(memory: &dyn Memory, array: &ArrayDescriptor) -> Outcome<(Arc<dyn Memory>, ArrayDescriptor)> {
    let descriptor = ArrayDescriptor::new(array.dtype, array.shape.clone(), Order::C)?;
    let copy = Owned::create(memory.device(), descriptor.bytes()?)?;
    between(memory, array, &*copy, &descriptor)?;
    Ok((copy, descriptor))
}
