//! `vmmfd.Array`: a typed, strided view of memory that is shared.

#![allow(unsafe_code)]

use std::{
    ffi::c_int,
    ptr, slice,
    sync::{Arc, OnceLock},
};

use pyo3::{
    exceptions::{PyAttributeError, PyImportError, PyIndexError, PyTypeError},
    ffi,
    prelude::*,
    types::{PyBool, PyBytes, PyDict, PyEllipsis, PySlice, PyTuple},
};
use vmmfd::{
    Error,
    array::{ArrayDescriptor, ElementType, Order},
    error::MemoryError,
    fork::ProcessIdentity,
    memory::Spec,
};

use crate::{
    buffer, copy,
    device::{self, PyDevice},
    dlpack::{self, Wanted},
    driver, dtype,
    error::{Failure, Outcome, shown, tolerant},
    memory::{Export, Memory},
    shared::{Buffer, Owned},
    signals, source,
};

/// A typed, strided view of memory that is shared between processes.
///
/// It keeps the memory, and only it does: the memory stays for as long as an array of it, or what another library made of one, is there.
/// Other libraries take it without a copy: `torch.from_dlpack`, `cupy.from_dlpack`, `jax.dlpack.from_dlpack`, `numpy.from_dlpack` (on the
/// host backend), and what reads `__cuda_array_interface__` or, on the host backend, `__array_interface__` and the buffer protocol.
///
/// All that this process copied with its methods is there when they return. What other libraries queue on the memory is theirs to order.
///
/// Attributes: `shape` and `strides` (tuples of int), `dtype` (`DType`), `itemsize`, `ndim`, `size`, `nbytes` and `address` (int), `readonly`
/// and `is_mapped` (bool), `device` (`Device`), `T` (`Array`). An index (int, slice, one `...`, or a tuple of them) gives an `Array`, and so
/// does each step of an iteration along the first dimension.
#[pyclass(name = "Array", module = "vmmfd", frozen, weakref)]
pub(crate) struct Array {
    memory: Arc<dyn Memory>,
    descriptor: ArrayDescriptor,
    /// Whether it says to other libraries that it may be written although it may not: the caller's promise that nothing writes.
    promised: bool,
    /// An array interface was read, and its reader holds this array and no export of its own.
    exported: OnceLock<Export>,
    /// The process that made it.
    by: ProcessIdentity,
}

impl Array {
    /// An array in memory, which it keeps.
    ///
    /// # Errors
    /// [`vmmfd::error::MemoryError::Array`] and [`vmmfd::error::MemoryError::OutOfRange`] if it is not inside the memory.
    pub(crate) fn new(memory: Arc<dyn Memory>, descriptor: ArrayDescriptor) -> Outcome<Self> {
        descriptor.check(memory.size())?;
        Ok(Self { memory, descriptor, promised: false, exported: OnceLock::new(), by: ProcessIdentity::current() })
    }

    /// The memory of this process's own that it is in, which can be published without a copy. The descriptor's offset counts from
    /// that memory's beginning. `None` for memory that another process made.
    pub(crate) fn owner(&self) -> Option<Arc<Owned>> {
        Arc::clone(&self.memory).owner()
    }

    /// The memory that it is in.
    pub(crate) fn memory(&self) -> &Arc<dyn Memory> {
        &self.memory
    }

    /// Which bytes of the memory it is.
    pub(crate) fn descriptor(&self) -> &ArrayDescriptor {
        &self.descriptor
    }

    /// Whether other libraries are told that they may only read it.
    pub(crate) fn exports_read_only(&self) -> bool {
        self.memory.is_read_only() && !self.promised
    }

    /// Fails in a fork of the process that made it, and while there is nothing at its addresses.
    pub(crate) fn check(&self) -> Outcome<()> {
        self.by.check()?;
        Ok(self.memory.check_mapped()?)
    }

    /// The address of the element with all indices 0.
    pub(crate) fn first(&self) -> u64 {
        self.memory.address() + self.descriptor.offset
    }

    fn view(&self, descriptor: ArrayDescriptor) -> Outcome<Self> {
        let promised = self.promised;
        Ok(Self { promised, by: self.by, ..Self::new(Arc::clone(&self.memory), descriptor)? })
    }

    fn is_host(&self) -> bool {
        self.memory.device().is_host()
    }

    /// What its dictionary for an array interface says.
    fn interface<'py>(&self, py: Python<'py>, called: &str) -> PyResult<Bound<'py, PyDict>> {
        self.check()?;
        if self.descriptor.dtype.typestr().is_none() {
            return Err(PyAttributeError::new_err(format!(
                "{called}: elements of type {} have no typestr: use DLPack, or reinterpret(\"uint{}\")",
                self.descriptor.dtype,
                8 * self.descriptor.dtype.size()
            )));
        }
        let export = match self.exported.get() {
            Some(_) => None,
            None => Some(self.memory.export_by_interface().map_err(Failure::from)?),
        };
        let interface = self.descriptor.interface(self.memory.address(), self.exports_read_only());
        let interface = interface.map_err(Failure::from)?;
        // Another thread may have done so meanwhile: then one of the two is dropped.
        if let Some(export) = export {
            let _ = self.exported.set(export);
        }
        let dictionary = PyDict::new(py);
        dictionary.set_item("shape", PyTuple::new(py, &interface.shape)?)?;
        dictionary.set_item("typestr", interface.typestr)?;
        dictionary.set_item("data", interface.data)?;
        dictionary.set_item("strides", interface.strides.map(|strides| PyTuple::new(py, strides)).transpose()?)?;
        dictionary.set_item("version", 3)?;
        Ok(dictionary)
    }

    /// The part of it that an index selects.
    fn select(&self, index: &Bound<'_, PyAny>) -> PyResult<ArrayDescriptor> {
        let items: Vec<Bound<'_, PyAny>> = match index.cast::<PyTuple>() {
            Ok(items) => items.iter().collect(),
            Err(_) => vec![index.clone()],
        };
        let dimensions = self.descriptor.shape.len();
        let named = items.iter().filter(|item| !item.is_instance_of::<PyEllipsis>()).count();
        if items.len() - named > 1 {
            return Err(PyIndexError::new_err("an index can have one ellipsis (...)"));
        }
        if named > dimensions {
            return Err(PyIndexError::new_err(format!("{named} indices are too many for {dimensions} dimensions")));
        }
        let mut array = self.descriptor.clone();
        let mut axis = 0;
        for item in &items {
            if item.is_instance_of::<PyEllipsis>() {
                axis += dimensions - named;
            } else if let Ok(slice) = item.cast::<PySlice>() {
                let found = slice.indices(isize::try_from(array.shape[axis]).unwrap_or(isize::MAX))?;
                let (start, step, count) = (found.start as i64, found.step as i64, found.slicelength as i64);
                let range = match count {
                    0 => 0..0,
                    _ if step > 0 => start as u64..(start + (count - 1) * step + 1) as u64,
                    _ => (start + (count - 1) * step) as u64..start as u64 + 1,
                };
                array = array.slice(axis, range, step).map_err(Failure::from)?;
                axis += 1;
            } else {
                let length = array.shape[axis];
                let at = integer(item)?;
                let inside = if at < 0 { at + i128::from(length) } else { at };
                match u64::try_from(inside) {
                    Ok(inside) if inside < length => array = array.index(axis, inside).map_err(Failure::from)?,
                    _ => {
                        return Err(PyIndexError::new_err(format!(
                            "index {at} is not inside dimension of length {length}"
                        )));
                    }
                }
            }
        }
        Ok(array)
    }
}

/// A whole number as an index.
fn integer(item: &Bound<'_, PyAny>) -> PyResult<i128> {
    if !item.is_instance_of::<PyBool>()
        && let Some(index) = tolerant(item.py(), item.extract::<i64>())?
    {
        return Ok(i128::from(index));
    }
    Err(PyTypeError::new_err(format!(
        "{} is no index: vmmfd takes whole numbers, slices and one ellipsis (...); for others use a view of NumPy's or PyTorch's",
        shown(item)?
    )))
}

/// A shape as a caller gives it: a number or a sequence of them.
pub(crate) fn shape(given: &Bound<'_, PyAny>) -> Outcome<Vec<u64>> {
    let py = given.py();
    if let Some(length) = tolerant(py, given.extract::<u64>())? {
        return Ok(vec![length]);
    }
    if let Some(lengths) = tolerant(py, given.extract::<Vec<u64>>())? {
        return Ok(lengths);
    }
    Err(Failure::invalid(format!(
        "shape={} is no shape: give a whole number or a tuple of them, none negative",
        shown(given)?
    )))
}

#[pymethods]
impl Array {
    /// The length of each dimension, in elements.
    #[getter(shape)]
    fn py_shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.descriptor.shape)
    }

    /// The type of each element: a `DType`, which is a str such as `float32` or `bfloat16`, and equals the types of NumPy.
    #[getter]
    fn dtype<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        dtype::to_python(py, self.descriptor.dtype)
    }

    /// The type as a `numpy.dtype`: NumPy 2.4 and newer read it. Raises `ImportError` without NumPy, or without ml_dtypes for its types.
    #[getter(__numpy_dtype__)]
    fn numpy_dtype<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        dtype::to_numpy(py, self.descriptor.dtype)
    }

    /// The step from an element to the next along each dimension, in bytes.
    #[getter]
    fn strides<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.descriptor.strides_in_bytes().map_err(Failure::from)?)
    }

    /// The size of an element, in bytes.
    #[getter]
    fn itemsize(&self) -> u64 {
        self.descriptor.dtype.size()
    }

    /// How many dimensions it has.
    #[getter]
    fn ndim(&self) -> usize {
        self.descriptor.shape.len()
    }

    /// How many elements it has.
    #[getter]
    fn size(&self) -> Outcome<u64> {
        Ok(self.descriptor.elements()?)
    }

    /// The size of all its elements together, in bytes.
    #[getter]
    fn nbytes(&self) -> Outcome<u64> {
        Ok(self.descriptor.bytes()?)
    }

    /// Whether this process may only read it. A store all the same ends the CUDA context, or on the host backend the process.
    #[getter]
    fn readonly(&self) -> bool {
        self.memory.is_read_only()
    }

    /// Whether another process made its memory.
    #[getter]
    fn is_mapped(&self) -> bool {
        self.owner().is_none()
    }

    /// The device that uses it here.
    #[getter]
    fn device(&self) -> PyDevice {
        PyDevice(self.memory.device().clone())
    }

    /// The memory of this process's own that it is in, which a broker can be given without a copy.
    #[getter(_memory)]
    fn py_memory(&self) -> Option<Buffer> {
        self.owner().map(Buffer)
    }

    /// The address of its first element: a `CUdeviceptr`, or on the host backend an address of this process.
    ///
    /// Raises `Error` while nothing is mapped there, and in a fork.
    #[getter]
    fn address(&self) -> Outcome<u64> {
        self.check()?;
        Ok(self.first())
    }

    /// The same elements with the axes in reverse order.
    #[getter(T)]
    fn transposed(&self) -> Outcome<Self> {
        self.view(self.descriptor.transpose()?)
    }

    /// The same elements with the axes in this order; without any, in reverse order. Raises `Invalid` unless each is named once.
    #[pyo3(signature = (*axes))]
    fn transpose(&self, axes: &Bound<'_, PyTuple>) -> Outcome<Self> {
        if axes.is_empty() {
            return self.transposed();
        }
        let listed = if axes.len() == 1 { axes.get_item(0)?.extract::<Vec<i64>>().ok() } else { None };
        let listed = match listed {
            Some(listed) => listed,
            None => axes.extract::<Vec<i64>>()?,
        };
        let dimensions = self.descriptor.shape.len() as i64;
        let axes = listed.iter().map(|axis| usize::try_from(if *axis < 0 { axis + dimensions } else { *axis }));
        let axes: Result<Vec<usize>, _> = axes.collect();
        let axes =
            axes.map_err(|_| Failure::invalid(format!("{listed:?} does not name each of {dimensions} axes once")))?;
        self.view(self.descriptor.permute(&axes)?)
    }

    fn __len__(&self) -> PyResult<usize> {
        match self.descriptor.shape.first() {
            Some(length) => Ok(*length as usize),
            None => Err(PyTypeError::new_err("an array of no dimensions has no length")),
        }
    }

    /// The part of it that whole numbers, slices and one ellipsis select: a view, also of one element.
    ///
    /// Raises `IndexError` for what is outside, `TypeError` for other indices.
    fn __getitem__(&self, index: &Bound<'_, PyAny>) -> PyResult<Self> {
        Ok(self.view(self.select(index)?)?)
    }

    fn __iter__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        if slf.get().descriptor.shape.is_empty() {
            return Err(PyTypeError::new_err("an array of no dimensions can't be iterated"));
        }
        // SAFETY: the array is a sequence: it has `__len__` and `__getitem__`.
        unsafe { Bound::from_owned_ptr_or_err(slf.py(), ffi::PySeqIter_New(slf.as_ptr())) }
    }

    /// The same bytes as elements of another type: a view.
    ///
    /// Without a `shape` the last dimension grows or shrinks. `dtype` is a name, or a dtype of NumPy, ml_dtypes, JAX or PyTorch. Raises
    /// `Invalid` if the bytes do not fit, or the elements have gaps between them.
    #[pyo3(signature = (dtype, shape=None))]
    fn reinterpret(&self, dtype: &Bound<'_, PyAny>, shape: Option<&Bound<'_, PyAny>>) -> Outcome<Self> {
        let (from, to) = (&self.descriptor, dtype::extract(dtype)?);
        let shape = shape.map(self::shape).transpose()?;
        if shape.is_none() && from.dtype.size() == to.size() {
            return self.view(ArrayDescriptor { dtype: to, ..from.clone() });
        }
        if !buffer::contiguous(from)?.0 {
            return Err(Failure::invalid(
                "only an array that is contiguous in C order can be seen with another shape or size of elements",
            ));
        }
        let shape = match (shape, from.shape.split_last()) {
            (Some(shape), _) => shape,
            (None, None) => return Err(Failure::invalid("an array of no dimensions needs a shape to be seen in")),
            (None, Some((last, rest))) => {
                let bytes = last.saturating_mul(from.dtype.size());
                if !bytes.is_multiple_of(to.size()) {
                    let text = format!("the {bytes} bytes of its last dimension are no whole number of {to}");
                    return Err(Failure::invalid(text));
                }
                rest.iter().copied().chain([bytes / to.size()]).collect()
            }
        };
        let mut seen = ArrayDescriptor::new(to, shape, Order::C)?;
        if seen.bytes()? != from.bytes()? {
            let text =
                format!("{to} of shape {:?} has {} bytes, and the array {}", seen.shape, seen.bytes()?, from.bytes()?);
            return Err(Failure::invalid(text));
        }
        seen.offset = from.offset;
        self.view(seen)
    }

    /// The same array, said to be writable to other libraries although it may only be read here.
    ///
    /// For libraries that know no read-only arrays (a consumer of DLPack before version 1.0; PyTorch's `__cuda_array_interface__`). The
    /// word is the caller's promise that nothing writes to it: a store into memory that is mapped read-only ends the CUDA context of
    /// this process, with all that is in it (Xid 31), and on the host backend the process (SIGSEGV). `readonly` stays as it is.
    fn writable(&self, by: &str) -> Outcome<Self> {
        if by != "promise" {
            let text = "write writable(\"promise\"): you promise that nothing writes to it. On a GPU a write ends the context, on the host \
                        the process";
            return Err(Failure::invalid(text));
        }
        Ok(Self { promised: true, ..self.view(self.descriptor.clone())? })
    }

    /// Copies the elements of another array of this shape and type into it: of anything that `asarray` takes.
    ///
    /// Blocks, with the GIL released, until they are there. What Ctrl-C or an error ends leaves it partly written. Raises `Invalid` for
    /// another shape or type, and for an array that is on a GPU while this one is not or the other way round; `Denied` or `Error` if it may
    /// only be read.
    fn copy_from(&self, py: Python<'_>, source: &Bound<'_, PyAny>) -> Outcome<()> {
        self.check()?;
        if self.memory.is_read_only() {
            return Err(Error::Memory(MemoryError::ReadOnly).into());
        }
        let source = source::of(source)?;
        source.check(&self.descriptor)?;
        signals::run(py, &[], || source.copy_into(&*self.memory, &self.descriptor))
    }

    /// Copies its elements into another array of this shape and type, which is writable. Blocks, with the GIL released, until they are
    /// there. Raises as `copy_from`.
    fn copy_to(&self, py: Python<'_>, destination: &Bound<'_, PyAny>) -> Outcome<()> {
        self.check()?;
        let destination = source::of(destination)?;
        destination.check(&self.descriptor)?;
        signals::run(py, &[], || destination.fill_from(&*self.memory, &self.descriptor))
    }

    /// Its elements as bytes, in C order. Blocks, with the GIL released.
    fn tobytes<'py>(&self, py: Python<'py>) -> Outcome<Bound<'py, PyBytes>> {
        self.check()?;
        let size = usize::try_from(self.descriptor.bytes()?).unwrap_or(usize::MAX);
        if isize::try_from(size).is_err() {
            return Err(Failure::invalid(format!("{size} bytes are more than a bytes object can have")));
        }
        // `PyBytes::new_with` would set all of it to 0 first, with the GIL held.
        // SAFETY: it makes a bytes object of that size, or raises.
        let bytes =
            unsafe { Bound::from_owned_ptr_or_err(py, ffi::PyBytes_FromStringAndSize(ptr::null(), size as isize)) }?;
        // SAFETY: its bytes, which have no values yet, and which nothing else has seen.
        let to = unsafe { slice::from_raw_parts_mut(ffi::PyBytes_AsString(bytes.as_ptr()).cast(), size) };
        signals::run(py, &[], || copy::read(&*self.memory, &self.descriptor, to))?;
        // SAFETY: it is one.
        Ok(unsafe { bytes.cast_into_unchecked() })
    }

    /// A capsule for another library, as the array API standard has it.
    ///
    /// On CUDA `stream` is 1 (legacy default), 2 (per-thread default), a stream, -1 or `None`; 0 is an error, and on the host anything but
    /// `None`. No stream waits: what this process copied is there. `copy=True` is a contiguous copy in new memory.
    ///
    /// Raises `BufferError` for read-only memory unless `max_version` is at least (1, 0) (see `writable`), for another `dl_device`, and
    /// for elements that DLPack has no code for; `Invalid` for a stream that is none.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<&Bound<'_, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> Outcome<Bound<'py, PyAny>> {
        self.check()?;
        self.check_stream(stream)?;
        let here = dlpack::device(self.memory.device());
        if let Some((kind, id)) = dl_device
            && (kind, id) != (here.kind, here.id)
        {
            return Err(Failure::export(format!(
                "the array is on DLPack's device ({}, {}), and dl_device=({kind}, {id}) would need a copy to there: copy it yourself",
                here.kind, here.id
            )));
        }
        let versioned = max_version.is_some_and(|(major, _)| major >= 1);
        if copy == Some(true) {
            let (memory, array) = signals::run(py, &[], || copy::copied(&*self.memory, &self.descriptor))?;
            let export = memory.export()?;
            return dlpack::capsule(py, &memory, &array, export, Wanted { versioned, read_only: false, copied: true });
        }
        let export = self.memory.export()?;
        let read_only = self.exports_read_only();
        if read_only && !versioned {
            let harm =
                if self.is_host() { "the process" } else { "the CUDA context of this process, with all that is in it" };
            return Err(Failure::export(format!(
                "this process may only read the array, and a consumer that asks for DLPack before version 1.0 can't be told: call \
                 writable(\"promise\") and give it that array, if nothing will write to it; a write would end {harm}"
            )));
        }
        dlpack::capsule(py, &self.memory, &self.descriptor, export, Wanted { versioned, read_only, copied: false })
    }

    /// A capsule of DLPack without the read-only flag, for which no stream waits: the caller promises not to write.
    fn _capsule<'py>(&self, py: Python<'py>) -> Outcome<Bound<'py, PyAny>> {
        self.check()?;
        dlpack::capsule(
            py,
            &self.memory,
            &self.descriptor,
            self.memory.export()?,
            Wanted { versioned: false, read_only: false, copied: false },
        )
    }

    /// DLPack's type of device, and its number in this process.
    fn __dlpack_device__(&self) -> (i32, i32) {
        let device = dlpack::device(self.memory.device());
        (device.kind, device.id)
    }

    /// The CUDA array interface, version 3; its `stream` is `None`, as all is synchronised.
    ///
    /// Raises `AttributeError` on the host backend and for elements without a typestr (`bfloat16`, the 8-bit floats).
    #[getter(__cuda_array_interface__)]
    fn cuda_array_interface<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        if self.is_host() {
            return Err(PyAttributeError::new_err("__cuda_array_interface__: the array is in memory of the host"));
        }
        let dictionary = self.interface(py, "__cuda_array_interface__")?;
        // All work of ours is done: there is no stream to wait for.
        dictionary.set_item("stream", py.None())?;
        Ok(dictionary)
    }

    /// NumPy's array interface, version 3. Raises `AttributeError` on a GPU and for elements without a typestr.
    #[getter(__array_interface__)]
    fn array_interface<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        if !self.is_host() {
            return Err(PyAttributeError::new_err("__array_interface__: the array is in memory of a GPU"));
        }
        self.interface(py, "__array_interface__")
    }

    /// The elements as an array of NumPy, in the same memory. NumPy calls it for types of ml_dtypes, and for memory of a GPU: raises
    /// `TypeError` for that, and without ml_dtypes.
    #[pyo3(signature = (dtype=None, *, copy=None))]
    fn __array__<'py>(
        &self,
        py: Python<'py>,
        dtype: Option<&Bound<'py, PyAny>>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let device = self.memory.device();
        if !self.is_host() {
            return Err(PyTypeError::new_err(format!(
                "the array is on {device}: take a copy with tobytes(), or give it to a library of that device"
            )));
        }
        let own = self.descriptor.dtype;
        let unsigned = match own.typestr() {
            Some(_) => own,
            None if own.size() == 2 => ElementType::U16,
            None => ElementType::U8,
        };
        let known = match dtype::to_numpy(py, own) {
            Err(error) if error.is_instance_of::<PyImportError>(py) => {
                return Err(PyTypeError::new_err(format!(
                    "NumPy has {own} with the package ml_dtypes alone: install that, or use reinterpret(\"{}\")",
                    unsigned.name()
                )));
            }
            known => known?,
        };
        let numpy = py.import("numpy")?;
        let numbers = self.view(ArrayDescriptor { dtype: unsigned, ..self.descriptor.clone() })?;
        let view = numpy.call_method1("asarray", (numbers,))?.call_method1("view", (known,))?;
        let options = PyDict::new(py);
        options.set_item("dtype", dtype)?;
        options.set_item("copy", copy)?;
        numpy.call_method("array", (view,), Some(&options))
    }

    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        // SAFETY: Python calls it with a view to fill.
        Ok(unsafe { buffer::fill(&slf, view, flags) }?)
    }

    unsafe fn __releasebuffer__(&self, view: *mut ffi::Py_buffer) {
        // SAFETY: Python calls it once for a view that was filled.
        unsafe { buffer::release(view) }
    }

    fn __repr__(&self) -> String {
        let device = self.memory.device();
        let access = match (self.memory.is_read_only(), self.promised) {
            (false, _) => "",
            (true, false) => ", read-only",
            (true, true) => ", read-only, exported as writable",
        };
        let shape: Vec<String> = self.descriptor.shape.iter().map(u64::to_string).collect();
        let comma = if shape.len() == 1 { "," } else { "" };
        format!(
            "<vmmfd.Array {} ({}{comma}) on {device}{access}>",
            dtype::spelling(self.descriptor.dtype),
            shape.join(", ")
        )
    }

    /// Raises `TypeError`: memory can't be pickled.
    fn __reduce__(&self) -> PyResult<()> {
        Err(PyTypeError::new_err(
            "an array is memory of this process and can't be pickled: put it into a broker and send its name, or serve it; \
             vmmfd.register_reducer() does the former for what came from a broker",
        ))
    }
}

impl Array {
    /// Whether a consumer's stream is one. All that this process copied is there: no stream has to wait for it.
    fn check_stream(&self, stream: Option<&Bound<'_, PyAny>>) -> Outcome<()> {
        let Some(stream) = stream else { return Ok(()) };
        let shown = stream.repr()?;
        if self.is_host() {
            let text = format!("stream={shown} means nothing for memory of the host: leave it out");
            return Err(Failure::invalid(text));
        }
        match stream.extract::<i64>() {
            Ok(0) => Err(Failure::invalid(
                "stream=0 may be either default stream: write 1 for the legacy one or 2 for the one of each thread",
            )),
            Ok(-1 | 1..) if !stream.is_instance_of::<PyBool>() => Ok(()),
            _ => Err(Failure::invalid(format!(
                "stream={shown} is no stream: give -1, 1, 2 or a cudaStream_t as a number"
            ))),
        }
    }
}

/// Makes an `Array` in new shared memory. Contents are undefined.
///
/// `shape` (int, or a sequence of int) is in elements. `dtype` is a str (`"float32"`, `"bfloat16"`, `"float8_e4m3fn"`, `"<f4"`), or a dtype
/// of NumPy, ml_dtypes, JAX or PyTorch. `device` (int, str or `Device`) is a number in this process, a UUID or the beginning of one, or a
/// `Device`; the first one by default. `backend` (str) is `"cuda"`, `"host"`, or `"auto"`: CUDA, and the host only where there is no driver
/// or no device.
///
/// Blocks, with the GIL released, while the driver allocates, and the first time while it starts. Raises `Invalid`, also for types that
/// readers would not get back as they are (with fields, of less than 8 bits, objects, strings, times); `OutOfMemory`; `NotFound` or `Error`
/// for a device that is not there; `Unsupported`.
#[pyfunction]
#[pyo3(signature = (shape, dtype, *, device=None, backend="auto"))]
pub(crate) fn empty(
    py: Python<'_>,
    shape: &Bound<'_, PyAny>,
    dtype: &Bound<'_, PyAny>,
    device: Option<&Bound<'_, PyAny>>,
    backend: &str,
) -> Outcome<Array> {
    made(py, shape, dtype, device, backend, |size| Spec::vmm(size).into())
}

/// An array in new memory, of which `spec` says what to make for so many bytes: at least 1.
pub(crate) fn made(
    py: Python<'_>,
    shape: &Bound<'_, PyAny>,
    dtype: &Bound<'_, PyAny>,
    device: Option<&Bound<'_, PyAny>>,
    backend: &str,
    spec: fn(u64) -> Spec,
) -> Outcome<Array> {
    let descriptor = ArrayDescriptor::new(dtype::extract(dtype)?, self::shape(shape)?, Order::C)?;
    let wanted = device.map(device::selector).transpose()?;
    let size = descriptor.bytes()?.max(1);
    py.detach(|| {
        let device = driver::device(&driver::driver(backend)?, wanted)?;
        Array::new(Owned::make(&device, spec(size))?, descriptor)
    })
}

/// Copies an array of another library into new shared memory, in C order. Returns an `Array`.
///
/// `object` speaks the buffer protocol, NumPy's array interface, DLPack or the CUDA array interface; or is an `Array`, which is copied
/// too, or a scalar of NumPy. On CUDA the copy is on the device that the array is on, or on `device` (int, str or `Device`). `backend` (str) is
/// as for `empty`. Blocks, with the GIL released, until it is there. Raises as `empty`, and `Invalid` for an object that is no array, and
/// for one on a GPU while `backend` is the host.
#[pyfunction]
#[pyo3(signature = (object, *, device=None, backend="auto"))]
pub(crate) fn asarray(
    py: Python<'_>,
    object: &Bound<'_, PyAny>,
    device: Option<&Bound<'_, PyAny>>,
    backend: &str,
) -> Outcome<Array> {
    let source = source::of(object)?;
    let wanted = device.map(device::selector).transpose()?;
    let made = signals::run(py, &[], || {
        let driver = driver::driver(backend)?;
        let wanted = wanted.or(source.selector(&driver));
        let descriptor = source.descriptor()?;
        let memory = Owned::create(&driver::device(&driver, wanted)?, descriptor.bytes()?)?;
        source.copy_into(&*memory, &descriptor)?;
        Array::new(memory, descriptor)
    });
    drop(source);
    made
}
