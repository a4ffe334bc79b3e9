//! Copies between vmmfd's memory and arrays of other libraries, and within vmmfd's memory.

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
    source::{Keep, Location, Source},
    walk::{Overlap, Walk, offset_by, overlap},
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
        if memory.is_read_only() {
            return Err(Error::Memory(MemoryError::ReadOnly).into());
        }
        to.check(memory.size())?;
        let steps = self.steps()?;
        let target = to.strides_in_bytes()?;
        check_destination(&to.shape, &target)?;
        let walk = Walk::new(&self.shape, self.dtype.size(), &steps, &target);
        if walk.is_empty() {
            return Ok(());
        }
        match overlap((self.address, &steps), (memory.address() + to.offset, &target), &self.shape, self.dtype.size())?
        {
            Overlap::Apart => {}
            Overlap::Same => return Ok(()),
            Overlap::Partial => {
                let packed = self.descriptor()?;
                let copy = Owned::create(memory.device(), packed.bytes()?)?;
                self.copy_into(&*copy, &packed)?;
                return copy_between(&*copy, &packed, memory, to);
            }
        }
        let _held = export_writable(memory)?;
        if let Location::Cuda(_) = self.location {
            let _source = self.export()?;
            self.wait_for_source(memory)?;
            let (from, base) = (self.address, memory.address() + to.offset);
            return on_device(memory, &walk, |a, b| (offset_by(base, b), offset_by(from, a)));
        }
        let whole = buffer::contiguous(to)?.0;
        if walk.bytes < SHORT_RUN && whole {
            // The destination is contiguous: gather the elements.
            let mut gathered =
                Vec::with_capacity(BATCH_BYTES.min(usize::try_from(self.bytes()?).unwrap_or(BATCH_BYTES)));
            let mut at = to.offset;
            walk.each_run(|a, _, size| {
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
        walk.each_run(|a, b, size| {
            let mut at = offset_by(to.offset, b);
            self.read_run(a, size, &mut |bytes| {
                memory.copy_in(at, bytes)?;
                at += bytes.len() as u64;
                Ok(())
            })
        })
    }

    /// Copies an array's elements into this array, of the same shape and type. Blocks: release the GIL.
    ///
    /// # Errors
    /// `ValueError` if its owner forbids writes; as [`Source::copy_into`].
    pub(crate) fn fill_from(&self, memory: &dyn Memory, from: &ArrayDescriptor) -> Outcome<()> {
        if self.read_only {
            return Err(Failure::invalid("the other array is read-only"));
        }
        let steps = self.steps()?;
        let source = from.strides_in_bytes()?;
        check_destination(&self.shape, &steps)?;
        let walk = Walk::new(&self.shape, self.dtype.size(), &steps, &source);
        if walk.is_empty() {
            return Ok(());
        }
        if let Keep::Ours(ours) = &self.keep {
            let to =
                ArrayDescriptor { offset: self.address - ours.address(), strides: Some(self.steps()?), ..from.clone() };
            return copy_between(memory, from, &**ours, &to);
        }
        let first = memory.address() + from.offset;
        match overlap((first, &source), (self.address, &steps), &self.shape, self.dtype.size())? {
            Overlap::Apart => {}
            Overlap::Same => return Ok(()),
            Overlap::Partial => {
                let (copy, packed) = contiguous_copy(memory, from)?;
                return self.fill_from(&*copy, &packed);
            }
        }
        if let Location::Cuda(_) = self.location {
            let _held = memory.export()?;
            self.wait_for_source(memory)?;
            let (to, base) = (self.address, memory.address() + from.offset);
            return on_device(memory, &walk, |a, b| (offset_by(to, a), offset_by(base, b)));
        }
        // The other array may be a view of shared memory: `&mut` would not be exclusive.
        let mut bytes = vec![0; walk.bytes.min(BATCH_BYTES as u64) as usize];
        walk.each_run(|a, b, size| {
            let mut to = offset_by(self.address, a);
            let mut at = offset_by(from.offset, b);
            let mut left = size as usize;
            while left > 0 {
                let length = left.min(BATCH_BYTES);
                memory.copy_out(at, &mut bytes[..length])?;
                // SAFETY: the other library guarantees that the array is valid and keeps it while `self` exists; it is writable, and this
                // function owns the bytes.
                unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), pointer(to), length) };
                (to, at, left) = (to + length as u64, at + length as u64, left - length);
            }
            Ok(())
        })
    }

    /// Waits for work that a device copy depends on.
    fn wait_for_source(&self, memory: &dyn Memory) -> Outcome<()> {
        let device = memory.device();
        if device.is_host() {
            let text =
                "one array is on a GPU and the other in host memory: copy it to the CPU with its own library first";
            return Err(Failure::invalid(text));
        }
        let theirs = match self.location {
            Location::Cuda(ordinal) if ordinal >= 0 => ordinal,
            _ => device.driver().device_of(self.address)?,
        };
        if theirs == device.ordinal() {
            if self.wait {
                device.wait_for_work()?;
            }
        } else if let Ok(other) = u32::try_from(theirs) {
            // The other library ordered its work only on its own device, but this copy runs on another device.
            Device::find(device.driver(), Selector::Ordinal(other))?.wait_for_work()?;
        }
        Ok(())
    }

    /// Passes its bytes to a function, in pieces.
    fn read_run(&self, at: i64, size: u64, give: &mut dyn FnMut(&[u8]) -> Outcome<()>) -> Outcome<()> {
        let from = offset_by(self.address, at);
        let Keep::Ours(memory) = &self.keep else {
            // SAFETY: its library guarantees that the array is valid, and keeps it while `self` exists.
            return give(unsafe { slice::from_raw_parts(pointer(from), size as usize) });
        };
        let (mut offset, mut left) = (from - memory.address(), size);
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
}

fn pointer(address: u64) -> *mut u8 {
    ptr::with_exposed_provenance_mut(address as usize)
}

/// Refuses a destination with several elements at one address.
fn check_destination(shape: &[u64], steps: &[i64]) -> Outcome<()> {
    if !shape.contains(&0) && shape.iter().zip(steps).any(|(length, step)| *length > 1 && *step == 0) {
        return Err(Failure::invalid(
            "an array with a stride of 0 has several elements at one address: it can't be a destination",
        ));
    }
    Ok(())
}

/// Copies on a device. `range` returns destination and source addresses.
fn on_device(memory: &dyn Memory, walk: &Walk, range: impl Fn(i64, i64) -> (u64, u64)) -> Outcome<()> {
    let device = memory.device();
    let mut ranges = Vec::new();
    let flush = |ranges: &mut Vec<(u64, u64, u64)>| {
        // SAFETY: one side is in `memory`, which was checked and is kept. The other library guarantees that its array is valid, and keeps
        // it. The destination is writable and not owned by Rust.
        let result = unsafe { device.driver().copy_device(device.ordinal(), ranges) };
        ranges.clear();
        result
    };
    walk.each_run(|a, b, size| {
        let (to, from) = range(a, b);
        ranges.push((to, from, size));
        if ranges.len() == BATCH_RANGES { Ok(flush(&mut ranges)?) } else { Ok(()) }
    })?;
    Ok(flush(&mut ranges)?)
}

/// Exports memory for a write. Until the export is dropped, a switch, a park and a seal are refused.
///
/// # Errors
/// [`MemoryError::ReadOnly`], also if another thread seals the memory now.
fn export_writable(memory: &dyn Memory) -> Outcome<Export> {
    let export = memory.export()?;
    if memory.is_read_only() { Err(Error::Memory(MemoryError::ReadOnly).into()) } else { Ok(export) }
}

/// Copies between vmmfd's own memories, of the same shape and type.
fn copy_between(from: &dyn Memory, source: &ArrayDescriptor, to: &dyn Memory, target: &ArrayDescriptor) -> Outcome<()> {
    if to.is_read_only() {
        return Err(Error::Memory(MemoryError::ReadOnly).into());
    }
    source.check(from.size())?;
    target.check(to.size())?;
    let a = source.strides_in_bytes()?;
    let b = target.strides_in_bytes()?;
    check_destination(&target.shape, &b)?;
    let walk = Walk::new(&source.shape, source.dtype.size(), &a, &b);
    if walk.is_empty() {
        return Ok(());
    }
    let (first, last) = (from.address() + source.offset, to.address() + target.offset);
    match overlap((first, &a), (last, &b), &source.shape, source.dtype.size())? {
        Overlap::Apart => {}
        Overlap::Same => return Ok(()),
        Overlap::Partial => {
            let (copy, packed) = contiguous_copy(from, source)?;
            return copy_between(&*copy, &packed, to, target);
        }
    }
    let _held = export_writable(to)?;
    if !from.device().is_host() && from.device().driver() == to.device().driver() {
        let _source = from.export()?;
        let (a, b) = (from.address() + source.offset, to.address() + target.offset);
        return on_device(to, &walk, |from, to| (offset_by(b, to), offset_by(a, from)));
    }
    let mut bytes = vec![0; walk.bytes.min(BATCH_BYTES as u64) as usize];
    walk.each_run(|a, b, size| {
        let mut at = offset_by(source.offset, a);
        let mut to_at = offset_by(target.offset, b);
        let mut left = size;
        while left > 0 {
            let part = &mut bytes[..left.min(BATCH_BYTES as u64) as usize];
            from.copy_out(at, part)?;
            to.copy_in(to_at, part)?;
            let done = part.len() as u64;
            (at, to_at, left) = (at + done, to_at + done, left - done);
        }
        Ok(())
    })
}

/// Copies an array's elements, in C order, into uninitialised bytes, and initialises all of them. Blocks: release the GIL.
///
/// # Errors
/// [`Error::Driver`].
pub(crate) fn read(memory: &dyn Memory, array: &ArrayDescriptor, to: &mut [MaybeUninit<u8>]) -> Outcome<()> {
    let packed = ArrayDescriptor::new(array.dtype, array.shape.clone(), Order::C)?;
    let walk = Walk::new(&array.shape, array.dtype.size(), &array.strides_in_bytes()?, &packed.strides_in_bytes()?);
    if walk.is_empty() {
        return Ok(());
    }
    walk.each_run(|a, b, size| {
        let part = &mut to[b as usize..][..size as usize];
        part.fill(MaybeUninit::new(0));
        // SAFETY: each of its bytes is initialised.
        let part = unsafe { &mut *(ptr::from_mut(part) as *mut [u8]) };
        Ok(memory.copy_out(offset_by(array.offset, a), part)?)
    })
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
    let copy = Owned::create(memory.device(), descriptor.bytes()?)?;
    copy_between(memory, array, &*copy, &descriptor)?;
    Ok((copy, descriptor))
}
