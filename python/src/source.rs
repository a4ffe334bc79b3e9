//! Arrays of other libraries, by each supported protocol, and vmmfd's own arrays.

#![allow(unsafe_code)]

use std::{ffi::c_int, sync::Arc};

use pyo3::{
    buffer::PyUntypedBuffer,
    exceptions::{PyOverflowError, PyTypeError},
    ffi,
    prelude::*,
    types::{PyDict, PyMemoryView},
};
use vmmfd::{
    array::{ArrayDescriptor, ElementType, Order},
    bindings::dlpack::{CPU, CUDA, CUDA_HOST, CUDA_MANAGED, Elements, Foreign, VERSION},
    driver::{Backend, Driver},
    memory::Selector,
};

use crate::{
    array::Array,
    dlpack, dtype,
    error::{Failure, Outcome, tolerant},
    memory::Memory,
    walk::span,
};

/// The location of another library's array.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Location {
    /// In memory that the CPU reads.
    Host,
    /// On a CUDA device, by ordinal; negative if the library does not report it.
    Cuda(i32),
}

/// The owner of an array's memory.
pub(crate) enum Keep {
    /// A vmmfd array: read through driver calls, not through its address.
    Ours(Arc<dyn Memory>),
    /// A drop without the GIL is deferred by PyO3.
    Object(#[allow(dead_code, reason = "held")] Py<PyAny>),
    View(#[allow(dead_code, reason = "held")] PyUntypedBuffer),
    Tensor(#[allow(dead_code, reason = "held")] Foreign),
}

/// An array of another library or of vmmfd: from the buffer protocol, NumPy's array interface, DLPack or the CUDA array interface. It keeps
/// the memory.
pub(crate) struct Source {
    pub(crate) dtype: ElementType,
    /// The length of each dimension, in elements.
    pub(crate) shape: Vec<u64>,
    /// The step along each dimension, in bytes; `None` for C order.
    pub(crate) strides: Option<Vec<i64>>,
    /// The address of the element with all indices 0.
    pub(crate) address: u64,
    pub(crate) location: Location,
    /// Whether its owner forbids writes.
    pub(crate) read_only: bool,
    /// Whether a copy must wait for the device first.
    pub(crate) wait: bool,
    pub(crate) keep: Keep,
}

impl Source {
    /// Returns a contiguous array of its type and shape, at offset 0.
    ///
    /// # Errors
    /// [`vmmfd::error::MemoryError::Array`] if no such array is possible.
    pub(crate) fn descriptor(&self) -> Outcome<ArrayDescriptor> {
        Ok(ArrayDescriptor::new(self.dtype, self.shape.clone(), Order::C)?)
    }

    /// Returns its device, if it is on a GPU and the driver is CUDA.
    pub(crate) fn selector(&self, driver: &Driver) -> Option<Selector> {
        match self.location {
            Location::Cuda(ordinal) if driver.backend() == Backend::Cuda => {
                // If the lookup fails, the copy reports the error.
                let ordinal = if ordinal < 0 { driver.device_of(self.address).ok()? } else { ordinal };
                u32::try_from(ordinal).ok().map(Selector::Ordinal)
            }
            _ => None,
        }
    }

    /// Checks that `array` has its type and shape.
    ///
    /// # Errors
    /// `ValueError`.
    pub(crate) fn check(&self, array: &ArrayDescriptor) -> Outcome<()> {
        if (self.dtype, &self.shape) == (array.dtype, &array.shape) {
            return Ok(());
        }
        Err(Failure::invalid(format!(
            "the other array is {} of shape {:?}, but this array is {} of shape {:?}",
            self.dtype, self.shape, array.dtype, array.shape
        )))
    }

    /// Checks the number of dimensions and the address range.
    fn checked(self) -> Outcome<Self> {
        if self.shape.len() > 64 {
            return Err(Failure::invalid(format!(
                "the array has {} dimensions, and at most 64 are supported",
                self.shape.len()
            )));
        }
        if self.strides.as_ref().is_some_and(|strides| strides.len() != self.shape.len()) {
            return Err(Failure::invalid("the array has different numbers of strides and dimensions"));
        }
        let Some(span) = span(self.address, &self.shape, &self.steps()?, self.dtype.size()) else { return Ok(self) };
        let most = i128::from(i64::MAX);
        if self.address == 0 || span.start <= 0 || span.end > i128::from(u64::MAX) || span.end - span.start > most {
            return Err(Failure::invalid(format!(
                "an array of shape {:?} can't start at address {:#x}",
                self.shape, self.address
            )));
        }
        Ok(self)
    }

    /// Places the elements at a byte offset in a buffer.
    ///
    /// # Errors
    /// `ValueError` if they exceed the buffer.
    fn inside(self, view: PyUntypedBuffer, offset: u64) -> Outcome<Self> {
        let begin = view.buf_ptr() as u64;
        let size = view.len_bytes() as u64;
        let address = begin.saturating_add(offset);
        let whole = i128::from(begin)..=i128::from(begin) + i128::from(size);
        let span = span(address, &self.shape, &self.steps()?, self.dtype.size());
        if !view.is_c_contiguous()
            || span.is_some_and(|span| !whole.contains(&span.start) || !whole.contains(&span.end))
        {
            return Err(Failure::invalid(format!(
                "an array of shape {:?} at offset {offset} is not inside the {size} bytes of the array interface's data",
                self.shape
            )));
        }
        Ok(Self { address, read_only: view.readonly(), keep: Keep::View(view), ..self })
    }

    /// Its strides in bytes.
    pub(crate) fn steps(&self) -> Outcome<Vec<i64>> {
        let array =
            ArrayDescriptor { dtype: self.dtype, shape: self.shape.clone(), strides: self.strides.clone(), offset: 0 };
        Ok(array.strides_in_bytes()?)
    }
}

/// Returns a view of an array. All work on it is ordered before this process's work on the default stream.
///
/// # Errors
/// `TypeError` for an object without a supported protocol, `ValueError` for an unsupported element type, `BufferError` if its library refuses the export; exceptions of
/// its methods.
pub(crate) fn of(object: &Bound<'_, PyAny>) -> Outcome<Source> {
    if let Ok(array) = object.cast::<Array>() {
        return ours(array.get());
    }
    if object.hasattr("mask")? && object.hasattr("filled")? {
        return Err(masked());
    }
    let mut format = None;
    // SAFETY: it takes any object.
    if unsafe { ffi::PyObject_CheckBuffer(object.as_ptr()) } == 1
        && let Some(view) = buffer(object)?
    {
        match of_buffer(view) {
            Ok(source) => return source.checked(),
            Err(unknown) => format = Some(unknown),
        }
    }
    // Not for a NumPy scalar: its address is only valid for a moment.
    if object.hasattr("__setitem__")?
        && let Some(source) = of_array_interface(object)?
    {
        return source.checked();
    }
    if object.hasattr("__dlpack__")? {
        refuse_unsupported_torch(object)?;
        return of_dlpack(object)?.checked();
    }
    if let Some(interface) = optional(object, "__cuda_array_interface__")? {
        return of_interface(object, interface.cast::<PyDict>().map_err(PyErr::from)?, true)?.checked();
    }
    if let Some(source) = of_scalar(object)? {
        return source.checked();
    }
    if let Some(source) = of_array_interface(object)? {
        return source.checked();
    }
    let kind = object.get_type().name()?;
    if let Some(format) = format {
        return Err(Failure::invalid(format!(
            "the elements of an object of type {kind} have the buffer format {format:?}, which vmmfd does not support: share numbers"
        )));
    }
    Err(Failure::wrong_type(format!(
        "an object of type {kind} is not an array: it has no buffer protocol, __dlpack__, __array_interface__ or \
             __cuda_array_interface__; convert it with numpy.asarray()"
    )))
}

fn masked() -> Failure {
    Failure::invalid("a masked array can't be shared: call filled() first")
}

/// Refuses tensors of PyTorch whose type vmmfd lacks. PyTorch exports integers of 1 to 7 bits as int8 and uint8.
fn refuse_unsupported_torch(object: &Bound<'_, PyAny>) -> Outcome<()> {
    if let Some(dtype) = tolerant(object.py(), object.getattr("dtype"))?
        && dtype.get_type().module()? == "torch"
    {
        dtype::extract(&dtype)?;
    }
    Ok(())
}

fn optional<'py>(object: &Bound<'py, PyAny>, name: &str) -> PyResult<Option<Bound<'py, PyAny>>> {
    object.getattr_opt(name)
}

fn ours(array: &Array) -> Outcome<Source> {
    array.check()?;
    let memory = array.memory();
    let descriptor = array.descriptor();
    let device = memory.device();
    Ok(Source {
        dtype: descriptor.dtype,
        shape: descriptor.shape.clone(),
        strides: descriptor.strides.clone(),
        address: array.first(),
        location: if device.is_host() { Location::Host } else { Location::Cuda(device.ordinal()) },
        read_only: memory.is_read_only(),
        wait: false,
        keep: Keep::Ours(Arc::clone(memory)),
    })
}

/// Returns a view by the buffer protocol, unless the object refuses it.
fn buffer(object: &Bound<'_, PyAny>) -> PyResult<Option<PyUntypedBuffer>> {
    let py = object.py();
    if let Some(view) = tolerant(py, PyUntypedBuffer::get(object))? {
        return Ok(Some(view));
    }
    // Arrays of ctypes have no strides; a memoryview of such an array has them.
    let Some(view) = tolerant(py, PyMemoryView::from(object))? else { return Ok(None) };
    tolerant(py, PyUntypedBuffer::get(&view))
}

/// Returns an array by the buffer protocol. `Err` is the format of unsupported elements.
fn of_buffer(view: PyUntypedBuffer) -> Result<Source, String> {
    let format = view.format().to_string_lossy().into_owned();
    let dtype = dtype::of_format(&format, view.item_size() as u64).filter(|_| view.suboffsets().is_none());
    let Some(dtype) = dtype else { return Err(format) };
    let shape = view.shape().iter().map(|length| *length as u64).collect();
    let strides = view.strides().iter().map(|stride| *stride as i64).collect();
    Ok(Source {
        dtype,
        shape,
        strides: Some(strides),
        address: view.buf_ptr() as u64,
        location: Location::Host,
        read_only: view.readonly(),
        wait: false,
        keep: Keep::View(view),
    })
}

/// Returns an array by NumPy's array interface, if the interface has data.
fn of_array_interface(object: &Bound<'_, PyAny>) -> Outcome<Option<Source>> {
    let Some(interface) = optional(object, "__array_interface__")? else { return Ok(None) };
    let Ok(interface) = interface.cast::<PyDict>() else { return Ok(None) };
    if !matches!(interface.get_item("data")?, Some(data) if !data.is_none()) {
        return Ok(None);
    }
    of_interface(object, interface, false).map(Some)
}

/// Returns a NumPy scalar as an array without dimensions, which holds a copy.
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
    let data = item("data")?.ok_or_else(|| missing("data"))?;
    let range = |name: &'static str| {
        move |error: PyErr| match error.is_instance_of::<PyOverflowError>(object.py()) {
            true => Failure::invalid(format!(
                "{name:?} of the array interface has a negative number, or one of more than 64 bits"
            )),
            false => Failure::from(error),
        }
    };
    let shape: Vec<u64> = item("shape")?.ok_or_else(|| missing("shape"))?.extract().map_err(range("shape"))?;
    let strides: Option<Vec<i64>> =
        item("strides")?.map(|strides| strides.extract()).transpose().map_err(range("strides"))?;
    if item("mask")?.is_some() {
        return Err(masked());
    }
    // The typestr does not identify ml_dtypes types; the dtype does.
    let typestr = item("typestr")?.ok_or_else(|| missing("typestr"))?.extract::<String>()?;
    let dtype = match optional(object, "dtype")? {
        Some(dtype) => dtype::extract(&dtype)?,
        None => dtype_of_interface(&typestr, item("descr")?)?,
    };
    let digits = typestr.trim_start_matches(|letter: char| !letter.is_ascii_digit());
    if digits.parse() != Ok(dtype.size()) {
        return Err(Failure::invalid(format!(
            "the array's dtype is {dtype}, of {} bytes, but its typestr is {typestr:?}",
            dtype.size()
        )));
    }
    let wait = cuda
        && (item("stream")?.is_some()
            || item("version")?.map(|version| version.extract::<u32>()).transpose()? < Some(3));
    let location = if cuda { Location::Cuda(-1) } else { Location::Host };
    let keep = Keep::Object(object.clone().unbind());
    let source = Source { dtype, shape, strides, address: 0, location, read_only: true, wait, keep };
    if let Some((address, read_only)) = tolerant(object.py(), data.extract())? {
        return Ok(Source { address, read_only, ..source });
    }
    let view = if cuda { None } else { buffer(&data)? };
    let offset = item("offset")?.map(|offset| offset.extract::<u64>()).transpose().map_err(range("offset"))?;
    let problem = "the data of the array interface is neither an address with a flag nor a buffer";
    source.inside(view.ok_or_else(|| Failure::invalid(problem))?, offset.unwrap_or(0))
}

/// Returns the type of an array interface whose object has no dtype.
fn dtype_of_interface(typestr: &str, fields: Option<Bound<'_, PyAny>>) -> Outcome<ElementType> {
    let dtype = dtype::parse(typestr)?;
    // NumPy marks raw bytes with `|`, and types of other packages with `<`.
    let is_added = typestr.starts_with('<') && typestr[1..].starts_with('V');
    let is_plain = match fields {
        // [("", typestr)]
        Some(fields) => tolerant(fields.py(), fields.extract::<[(String, Bound<'_, PyAny>); 1]>())?
            .is_some_and(|[(name, _)]| name.is_empty()),
        None => true,
    };
    if is_added || !is_plain {
        return Err(Failure::invalid(format!(
            "the array interface has elements of type {typestr:?} with fields, or of a library-specific type: share each field as a \
             separate array, or the bytes"
        )));
    }
    Ok(dtype)
}

fn of_dlpack(object: &Bound<'_, PyAny>) -> Outcome<Source> {
    let py = object.py();
    let (kind, id): (c_int, i32) = object.call_method0("__dlpack_device__")?.extract()?;
    let location = |id: i32| match kind {
        CPU | CUDA_HOST => Ok(Location::Host),
        CUDA | CUDA_MANAGED => Ok(Location::Cuda(id)),
        _ => Err(Failure::invalid(format!("the array is on a device of DLPack type {kind}, which vmmfd can't share"))),
    };
    let options = PyDict::new(py);
    if let Location::Cuda(_) = location(0)? {
        // The legacy default stream, on which the copy runs.
        options.set_item("stream", 1)?;
    }
    options.set_item("max_version", VERSION)?;
    let method = object.getattr("__dlpack__")?;
    let capsule = match method.call((), Some(&options)) {
        Err(error) if error.is_instance_of::<PyTypeError>(py) && !takes(&method, &options)? => {
            // The library predates DLPack 1.0.
            options.del_item("max_version")?;
            method.call((), Some(&options))?
        }
        capsule => capsule?,
    };
    let (taken, elements) = dlpack::take(&capsule)?;
    let Elements { dtype, shape, strides, address, device, read_only } = elements;
    let location = location(id)?;
    if device.kind != kind || (matches!(location, Location::Cuda(_)) && device.id != id) {
        let text = format!(
            "__dlpack__ returned a tensor on device ({}, {}), but __dlpack_device__ returned ({kind}, {id})",
            device.kind, device.id
        );
        return Err(Failure::export(text));
    }
    Ok(Source { dtype, shape, strides, address, location, read_only, wait: false, keep: Keep::Tensor(taken) })
}

/// Whether a method's signature accepts these options. False for a C method without a signature.
fn takes(method: &Bound<'_, PyAny>, options: &Bound<'_, PyDict>) -> PyResult<bool> {
    let py = method.py();
    let Some(signature) = tolerant(py, py.import("inspect")?.call_method1("signature", (method,)))? else {
        return Ok(false);
    };
    Ok(tolerant(py, signature.call_method("bind", (), Some(options)))?.is_some())
}
