//! Arrays of other libraries, as sources and destinations of copies.

#![allow(unsafe_code)]

use std::{ffi::c_int, mem::MaybeUninit, ops::Range, ptr, slice, sync::Arc};

use pyo3::{buffer::PyUntypedBuffer, exceptions::PyTypeError, ffi, prelude::*, types::PyDict};
use vmmfd::{
    Error,
    array::{ArrayDescriptor, ElementType, Order},
    driver::{Backend, Driver},
    error::MemoryError,
    memory::{Device, Selector},
};

use crate::{
    array::Array,
    dlpack::{self, Taken},
    dtype,
    error::{Failure, Outcome, tolerant},
    memory::{Export, Memory},
    shared::Owned,
    signals::Looks,
};

/// Shorter runs of bytes are gathered before they are copied.
const SHORT: u64 = 64 << 10;

/// How many bytes are gathered at a time.
const GATHERED: usize = 4 << 20;

/// How many bytes are copied at a time: between two of them a signal is looked for.
const PIECE: u64 = 16 << 20;

/// How many ranges the driver is given at a time.
const RANGES: usize = 4096;

/// Where another library's array is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// In memory that the CPU reads.
    Host,
    /// On a device of CUDA, by its number in this process; negative where its library does not say.
    Cuda(i32),
}

/// What keeps an array's memory.
enum Keep {
    /// An array of ours: it is read by the driver's calls, and not by its address.
    Ours(Arc<dyn Memory>),
    /// Dropped with the GIL, or later.
    Object(#[allow(dead_code, reason = "held")] Py<PyAny>),
    View(#[allow(dead_code, reason = "held")] PyUntypedBuffer),
    Tensor(#[allow(dead_code, reason = "held")] Taken),
}

/// Another library's array, or one of ours: it speaks the buffer protocol, NumPy's array interface, DLPack or the CUDA array
/// interface. Its memory stays as long as this lives.
pub(crate) struct Source {
    pub(crate) dtype: ElementType,
    /// The length of each dimension, in elements.
    pub(crate) shape: Vec<u64>,
    /// The step along each dimension, in bytes; `None` for C order.
    pub(crate) strides: Option<Vec<i64>>,
    /// Of the element with all indices 0.
    pub(crate) address: u64,
    pub(crate) place: Place,
    /// Whether its owner forbids to write to it.
    pub(crate) read_only: bool,
    /// Whether the device has to be waited for first.
    wait: bool,
    keep: Keep,
}

impl Source {
    /// Its elements together, in bytes: what a copy of it takes.
    ///
    /// # Errors
    /// [`MemoryError::Array`] if 64 bits can't count them.
    pub(crate) fn bytes(&self) -> Outcome<u64> {
        Ok(self.descriptor()?.bytes()?)
    }

    /// A contiguous array of its type and shape, at the start of some memory.
    ///
    /// # Errors
    /// [`MemoryError::Array`] if there can be none.
    pub(crate) fn descriptor(&self) -> Outcome<ArrayDescriptor> {
        Ok(ArrayDescriptor::new(self.dtype, self.shape.clone(), Order::C)?)
    }

    /// The device that it is on, if a driver is of CUDA and it is on one.
    pub(crate) fn selector(&self, driver: &Driver) -> Option<Selector> {
        match self.place {
            Place::Cuda(ordinal) if driver.backend() == Backend::Cuda => {
                // Without an answer the copy says what is wrong.
                let ordinal = if ordinal < 0 { driver.device_of(self.address).ok()? } else { ordinal };
                u32::try_from(ordinal).ok().map(Selector::Ordinal)
            }
            _ => None,
        }
    }

    /// Checks that an array has its type and shape.
    ///
    /// # Errors
    /// `ValueError`.
    pub(crate) fn check(&self, array: &ArrayDescriptor) -> Outcome<()> {
        if (self.dtype, &self.shape) == (array.dtype, &array.shape) {
            return Ok(());
        }
        Err(Failure::invalid(format!(
            "the other array is {} of shape {:?}, and this one {} of shape {:?}",
            self.dtype, self.shape, array.dtype, array.shape
        )))
    }

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
        let whole = buffer_is_contiguous(to)?;
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

    /// Stands for a use of it, if it is ours: see [`Memory::export`].
    fn export(&self) -> Outcome<Export> {
        match &self.keep {
            Keep::Ours(memory) => Ok(memory.export()?),
            _ => Ok(Export::default()),
        }
    }

    /// It, if it can be what its library says.
    fn checked(self) -> Outcome<Self> {
        if self.shape.len() > 64 {
            return Err(Failure::invalid(format!(
                "the array has {} dimensions, and at most 64 can be",
                self.shape.len()
            )));
        }
        if self.strides.as_ref().is_some_and(|strides| strides.len() != self.shape.len()) {
            return Err(Failure::invalid("the array has another number of strides than of dimensions"));
        }
        let Some(span) = span(self.address, &self.shape, &self.steps()?, self.dtype.size()) else { return Ok(self) };
        let most = i128::from(i64::MAX);
        if self.address == 0 || span.start <= 0 || span.end > i128::from(u64::MAX) || span.end - span.start > most {
            return Err(Failure::invalid(format!(
                "an array of shape {:?} can't begin at address {:#x}",
                self.shape, self.address
            )));
        }
        Ok(self)
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

    /// Its strides in bytes.
    fn steps(&self) -> Outcome<Vec<i64>> {
        let array =
            ArrayDescriptor { dtype: self.dtype, shape: self.shape.clone(), strides: self.strides.clone(), offset: 0 };
        Ok(array.strides_in_bytes()?)
    }
}

fn pointer(address: u64) -> *mut u8 {
    ptr::with_exposed_provenance_mut(address as usize)
}

fn moved(address: u64, by: i64) -> u64 {
    address.wrapping_add_signed(by)
}

fn buffer_is_contiguous(array: &ArrayDescriptor) -> Outcome<bool> {
    Ok(crate::buffer::contiguous(array)?.0)
}

/// The addresses from an array's first byte to its last. `None` if it has no elements.
fn span(first: u64, shape: &[u64], steps: &[i64], item: u64) -> Option<Range<i128>> {
    if shape.contains(&0) {
        return None;
    }
    let mut span = i128::from(first)..i128::from(first) + i128::from(item);
    for (length, step) in shape.iter().zip(steps) {
        // 64 bits by 63 bits: 127 bits hold one; what holds no array saturates.
        let reach = i128::from(*length - 1).saturating_mul(i128::from(*step));
        if reach < 0 {
            span.start = span.start.saturating_add(reach);
        } else {
            span.end = span.end.saturating_add(reach);
        }
    }
    Some(span)
}

/// How the addresses of two arrays of a shape meet.
enum Meeting {
    Apart,
    /// Each element is where its counterpart is.
    Same,
    /// An element may be overwritten before it is read.
    Overlap,
}

/// How a source and a destination meet: each by the address of its first element and its steps.
fn meeting(from: (u64, &[i64]), to: (u64, &[i64]), shape: &[u64], item: u64) -> Outcome<Meeting> {
    if from == to {
        return Ok(Meeting::Same);
    }
    let (Some(a), Some(b)) = (span(from.0, shape, from.1, item), span(to.0, shape, to.1, item)) else {
        return Ok(Meeting::Apart);
    };
    Ok(if a.start < b.end && b.start < a.end { Meeting::Overlap } else { Meeting::Apart })
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

/// Two arrays of one shape, walked together: the longest runs of bytes that follow one another in both.
struct Walk {
    /// The length of a run, in bytes.
    bytes: u64,
    /// For each dimension that is left, from the outermost: its length, and the steps in both.
    outer: Vec<(u64, i64, i64)>,
}

impl Walk {
    fn new(shape: &[u64], item: u64, a: &[i64], b: &[i64]) -> Self {
        if shape.contains(&0) {
            return Self { bytes: 0, outer: Vec::new() };
        }
        let (mut bytes, mut outer) = (item, Vec::new());
        for ((length, a), b) in shape.iter().zip(a).zip(b).rev() {
            match *length {
                1 => {}
                length if outer.is_empty() && *a == bytes as i64 && *b == bytes as i64 => bytes *= length,
                length => outer.push((length, *a, *b)),
            }
        }
        outer.reverse();
        Self { bytes, outer }
    }

    fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Calls a function with where each run begins in both, relative to the element with all indices 0, and its bytes, in C order. Long
    /// runs come in pieces. Ends when a signal's handler raised.
    fn each(&self, mut call: impl FnMut(i64, i64, u64) -> Outcome<()>) -> Outcome<()> {
        let mut index = vec![0; self.outer.len()];
        let (mut a, mut b) = (0i64, 0i64);
        let mut looks = Looks::new();
        loop {
            let mut done = 0;
            while done < self.bytes {
                let size = (self.bytes - done).min(PIECE);
                call(a + done as i64, b + done as i64, size)?;
                done += size;
                looks.step(size)?;
            }
            let mut axis = self.outer.len();
            loop {
                if axis == 0 {
                    return Ok(());
                }
                axis -= 1;
                let (length, step_a, step_b) = self.outer[axis];
                index[axis] += 1;
                if index[axis] < length {
                    (a, b) = (a + step_a, b + step_b);
                    break;
                }
                let back = length as i64 - 1;
                (a, b) = (a - back * step_a, b - back * step_b);
                index[axis] = 0;
            }
        }
    }
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

/// A view of another library's array, or of one of ours, with all work on it ordered before what this process does on the default
/// stream.
///
/// # Errors
/// `ValueError` for what speaks none of the protocols or has elements of an unknown type, `BufferError` for what its library refuses
/// to give; and what its methods raise.
pub(crate) fn source(object: &Bound<'_, PyAny>) -> Outcome<Source> {
    if let Ok(array) = object.cast::<Array>() {
        return ours(array.get());
    }
    if object.hasattr("mask")? && object.hasattr("filled")? {
        return Err(masked());
    }
    // SAFETY: it takes any object.
    if unsafe { ffi::PyObject_CheckBuffer(object.as_ptr()) } == 1
        && let Some(source) = of_buffer(object)?
    {
        return source.checked();
    }
    if let Some(source) = of_array_interface(object)? {
        return source.checked();
    }
    if object.hasattr("__dlpack__")? {
        return of_dlpack(object)?.checked();
    }
    if let Some(interface) = optional(object, "__cuda_array_interface__")? {
        return of_interface(object, interface.cast::<PyDict>().map_err(PyErr::from)?, true)?.checked();
    }
    if let Some(source) = of_scalar(object)? {
        return source.checked();
    }
    let kind = object.get_type().name()?;
    Err(Failure::invalid(format!(
        "an object of type {kind} is no array: it has no buffer, no __dlpack__, no __array_interface__ and no __cuda_array_interface__; \
         make it one with numpy.asarray()"
    )))
}

fn masked() -> Failure {
    Failure::invalid("an array with a mask can't be shared: call filled() first")
}

fn optional<'py>(object: &Bound<'py, PyAny>, name: &str) -> PyResult<Option<Bound<'py, PyAny>>> {
    object.getattr_opt(name)
}

fn ours(array: &Array) -> Outcome<Source> {
    array.check()?;
    let (memory, descriptor) = (array.memory(), array.descriptor());
    let device = memory.device();
    Ok(Source {
        dtype: descriptor.dtype,
        shape: descriptor.shape.clone(),
        strides: descriptor.strides.clone(),
        address: array.first(),
        place: if device.is_host() { Place::Host } else { Place::Cuda(device.ordinal()) },
        read_only: memory.is_read_only(),
        wait: false,
        keep: Keep::Ours(Arc::clone(memory)),
    })
}

/// What the buffer protocol gives, unless it gives nothing, or elements without a type.
fn of_buffer(object: &Bound<'_, PyAny>) -> Outcome<Option<Source>> {
    let Some(view) = tolerant(object.py(), PyUntypedBuffer::get(object))? else { return Ok(None) };
    let format = view.format().to_string_lossy().into_owned();
    let Some(dtype) = dtype::of_format(&format, view.item_size() as u64) else { return Ok(None) };
    if view.suboffsets().is_some() {
        return Ok(None);
    }
    let shape = view.shape().iter().map(|length| *length as u64).collect();
    let strides = view.strides().iter().map(|stride| *stride as i64).collect();
    Ok(Some(Source {
        dtype,
        shape,
        strides: Some(strides),
        address: view.buf_ptr() as u64,
        place: Place::Host,
        read_only: view.readonly(),
        wait: false,
        keep: Keep::View(view),
    }))
}

/// NumPy's array interface, of what has elements of its own: a scalar's address is gone at once.
fn of_array_interface(object: &Bound<'_, PyAny>) -> Outcome<Option<Source>> {
    if !object.hasattr("__setitem__")? {
        return Ok(None);
    }
    let Some(interface) = optional(object, "__array_interface__")? else { return Ok(None) };
    let Ok(interface) = interface.cast::<PyDict>() else { return Ok(None) };
    if !matches!(interface.get_item("data")?, Some(data) if !data.is_none()) {
        return Ok(None);
    }
    of_interface(object, interface, false).map(Some)
}

/// A scalar of NumPy, as an array without dimensions that has a copy of it.
fn of_scalar(object: &Bound<'_, PyAny>) -> Outcome<Option<Source>> {
    if !object.hasattr("__array_interface__")? || !object.hasattr("__array__")? {
        return Ok(None);
    }
    let source = of_array_interface(&object.call_method0("__array__")?)?;
    Ok(source.map(|source| Source { read_only: true, ..source }))
}

fn of_interface(object: &Bound<'_, PyAny>, interface: &Bound<'_, PyDict>, cuda: bool) -> Outcome<Source> {
    let item = |name: &str| interface.get_item(name).map(|item| item.filter(|item| !item.is_none()));
    let missing = |name: &str| Failure::invalid(format!("the array interface has no {name:?}"));
    let (address, read_only): (u64, bool) = item("data")?.ok_or_else(|| missing("data"))?.extract()?;
    let shape: Vec<u64> = item("shape")?.ok_or_else(|| missing("shape"))?.extract()?;
    let strides: Option<Vec<i64>> = item("strides")?.map(|strides| strides.extract()).transpose()?;
    if item("mask")?.is_some() {
        return Err(masked());
    }
    // The typestr says nothing of the types that ml_dtypes adds; the dtype does.
    let typestr = item("typestr")?.ok_or_else(|| missing("typestr"))?.extract::<String>()?;
    let dtype = match optional(object, "dtype")? {
        Some(dtype) => dtype::extract(&dtype)?,
        None => dtype::parse(&typestr)?,
    };
    let digits = typestr.trim_start_matches(|letter: char| !letter.is_ascii_digit());
    if digits.parse() != Ok(dtype.size()) {
        return Err(Failure::invalid(format!(
            "the array's dtype is {dtype}, of {} bytes, and its typestr {typestr:?} says otherwise",
            dtype.size()
        )));
    }
    let wait = cuda
        && (item("stream")?.is_some()
            || item("version")?.map(|version| version.extract::<u32>()).transpose()? < Some(3));
    let place = if cuda { Place::Cuda(-1) } else { Place::Host };
    Ok(Source { dtype, shape, strides, address, place, read_only, wait, keep: Keep::Object(object.clone().unbind()) })
}

fn of_dlpack(object: &Bound<'_, PyAny>) -> Outcome<Source> {
    let py = object.py();
    let (kind, id): (c_int, i32) = object.call_method0("__dlpack_device__")?.extract()?;
    let place = |id: i32| match kind {
        dlpack::CPU | dlpack::CUDA_HOST => Ok(Place::Host),
        dlpack::CUDA | dlpack::CUDA_MANAGED => Ok(Place::Cuda(id)),
        _ => {
            Err(Failure::invalid(format!("the array is on a device of DLPack's type {kind}, which vmmfd can't share")))
        }
    };
    let options = PyDict::new(py);
    if let Place::Cuda(_) = place(0)? {
        // The legacy default stream: that is where the copy is.
        options.set_item("stream", 1)?;
    }
    options.set_item("max_version", dlpack::VERSION)?;
    let capsule = match object.call_method("__dlpack__", (), Some(&options)) {
        Err(error) if error.is_instance_of::<PyTypeError>(py) && is_of_the_call(py, &error) => {
            // A library that is older than version 1.
            options.del_item("max_version")?;
            object.call_method("__dlpack__", (), Some(&options))?
        }
        capsule => capsule?,
    };
    let taken = Taken::from(&capsule)?;
    let (shape, steps) = taken.layout()?;
    let tensor = taken.tensor();
    let types = tensor.dtype;
    let dtype = dtype::of_code(types.code, types.bits, types.lanes).ok_or_else(|| {
        let (code, bits, lanes) = (types.code, types.bits, types.lanes);
        Failure::invalid(format!("vmmfd knows no elements of DLPack's code {code} with {bits} bits and {lanes} lanes"))
    })?;
    let size = dtype.size() as i64;
    let strides = steps.map(|steps| steps.into_iter().map(|step| step.saturating_mul(size)).collect());
    let address = (tensor.data as u64).wrapping_add(tensor.byte_offset);
    let device = tensor.device;
    if device.kind != kind || (matches!(place(id)?, Place::Cuda(_)) && device.id != id) {
        let text = format!(
            "__dlpack__ returned a tensor on device ({}, {}), and __dlpack_device__ says ({kind}, {id})",
            device.kind, device.id
        );
        return Err(Failure::export(text));
    }
    let (place, read_only) = (place(id)?, taken.is_read_only());
    Ok(Source { dtype, shape, strides, address, place, read_only, wait: false, keep: Keep::Tensor(taken) })
}

/// Whether a `TypeError` is about how a method was called, and not from inside of it.
fn is_of_the_call(py: Python<'_>, error: &PyErr) -> bool {
    error.traceback(py).is_none() || error.value(py).to_string().contains("max_version")
}
