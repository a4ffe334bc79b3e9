//! The methods of `vmmfd.Array`: its attributes, views, copies, and the protocols by which other libraries take it.

#![allow(unsafe_code)]

use std::{ffi::c_int, ptr, slice};

use pyo3::{
    exceptions::{PyAttributeError, PyImportError, PyTypeError},
    ffi,
    prelude::*,
    types::{PyBool, PyBytes, PyDict, PyTuple},
};
use vmmfd::{
    Error,
    array::{ArrayDescriptor, ElementType, Order},
    error::MemoryError,
};

use crate::{
    array::{self, Array},
    array_index, buffer, copy,
    device::PyDevice,
    dlpack::{self, Wanted},
    dtype,
    error::{Failure, Outcome},
    shared::PyMemory,
    signals, source,
};

#[pymethods]
impl Array {
    /// The length of each dimension, in elements.
    #[getter(shape)]
    fn py_shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.descriptor().shape)
    }

    /// The type of each element: a `DType`, which is a str such as `float32` or `bfloat16`, and equals the types of NumPy.
    #[getter]
    fn dtype<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        dtype::to_python(py, self.descriptor().dtype)
    }

    /// The type as a `numpy.dtype`: NumPy 2.4 and newer read it. Raises `ImportError` without NumPy, or without ml_dtypes for its types.
    #[getter(__numpy_dtype__)]
    fn numpy_dtype<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        dtype::to_numpy(py, self.descriptor().dtype)
    }

    /// The step from an element to the next along each dimension, in bytes.
    #[getter]
    fn strides<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.descriptor().strides_in_bytes().map_err(Failure::from)?)
    }

    /// The size of an element, in bytes.
    #[getter]
    fn itemsize(&self) -> u64 {
        self.descriptor().dtype.size()
    }

    /// How many dimensions it has.
    #[getter]
    fn ndim(&self) -> usize {
        self.descriptor().shape.len()
    }

    /// How many elements it has.
    #[getter]
    fn size(&self) -> Outcome<u64> {
        Ok(self.descriptor().elements()?)
    }

    /// The size of all its elements together, in bytes.
    #[getter]
    fn nbytes(&self) -> Outcome<u64> {
        Ok(self.descriptor().bytes()?)
    }

    /// Whether this process may only read it. A store all the same ends the CUDA context, or on the host backend the process.
    #[getter]
    fn readonly(&self) -> bool {
        self.memory().is_read_only()
    }

    /// Whether another process made its memory.
    #[getter]
    fn is_mapped(&self) -> bool {
        self.owner().is_none()
    }

    /// The device that uses it here.
    #[getter]
    fn device(&self) -> PyDevice {
        PyDevice(self.memory().device().clone())
    }

    /// The memory of this process's own that it is in, which a broker can be given without a copy.
    #[getter(_memory)]
    fn py_memory(&self) -> Option<PyMemory> {
        self.owner().map(PyMemory)
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
        self.view(self.descriptor().transpose()?)
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
        let dimensions = self.descriptor().shape.len() as i64;
        let axes = listed.iter().map(|axis| usize::try_from(if *axis < 0 { axis + dimensions } else { *axis }));
        let axes: Result<Vec<usize>, _> = axes.collect();
        let axes =
            axes.map_err(|_| Failure::invalid(format!("{listed:?} does not name each of {dimensions} axes once")))?;
        self.view(self.descriptor().permute(&axes)?)
    }

    fn __len__(&self) -> PyResult<usize> {
        match self.descriptor().shape.first() {
            Some(length) => Ok(*length as usize),
            None => Err(PyTypeError::new_err("an array of no dimensions has no length")),
        }
    }

    /// The part of it that whole numbers, slices and one ellipsis select: a view, also of one element.
    ///
    /// Raises `IndexError` for what is outside, `TypeError` for other indices.
    fn __getitem__(&self, index: &Bound<'_, PyAny>) -> PyResult<Self> {
        Ok(self.view(array_index::select(self.descriptor(), index)?)?)
    }

    fn __iter__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        if slf.get().descriptor().shape.is_empty() {
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
        let (from, to) = (self.descriptor(), dtype::extract(dtype)?);
        let shape = shape.map(array::shape).transpose()?;
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
        self.promised()
    }

    /// Copies the elements of another array of this shape and type into it: of anything that `asarray` takes.
    ///
    /// Blocks, with the GIL released, until they are there. What Ctrl-C or an error ends leaves it partly written. Raises `Invalid` for
    /// another shape or type, and for an array that is on a GPU while this one is not or the other way round; `Denied` or `Error` if it may
    /// only be read.
    fn copy_from(&self, py: Python<'_>, source: &Bound<'_, PyAny>) -> Outcome<()> {
        self.check()?;
        if self.memory().is_read_only() {
            return Err(Error::Memory(MemoryError::ReadOnly).into());
        }
        let source = source::of(source)?;
        source.check(self.descriptor())?;
        signals::run(py, &[], || source.copy_into(&**self.memory(), self.descriptor()))
    }

    /// Copies its elements into another array of this shape and type, which is writable. Blocks, with the GIL released, until they are
    /// there. Raises as `copy_from`.
    fn copy_to(&self, py: Python<'_>, destination: &Bound<'_, PyAny>) -> Outcome<()> {
        self.check()?;
        let destination = source::of(destination)?;
        destination.check(self.descriptor())?;
        signals::run(py, &[], || destination.fill_from(&**self.memory(), self.descriptor()))
    }

    /// Its elements as bytes, in C order. Blocks, with the GIL released.
    fn tobytes<'py>(&self, py: Python<'py>) -> Outcome<Bound<'py, PyBytes>> {
        self.check()?;
        let size = usize::try_from(self.descriptor().bytes()?).unwrap_or(usize::MAX);
        if isize::try_from(size).is_err() {
            return Err(Failure::invalid(format!("{size} bytes are more than a bytes object can have")));
        }
        // `PyBytes::new_with` would set all of it to 0 first, with the GIL held.
        // SAFETY: it makes a bytes object of that size, or raises.
        let bytes =
            unsafe { Bound::from_owned_ptr_or_err(py, ffi::PyBytes_FromStringAndSize(ptr::null(), size as isize)) }?;
        // SAFETY: its bytes, which have no values yet, and which nothing else has seen.
        let to = unsafe { slice::from_raw_parts_mut(ffi::PyBytes_AsString(bytes.as_ptr()).cast(), size) };
        signals::run(py, &[], || copy::read(&**self.memory(), self.descriptor(), to))?;
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
        check_stream(self, stream)?;
        let here = dlpack::device(self.memory().device());
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
            let (memory, array) = signals::run(py, &[], || copy::copied(&**self.memory(), self.descriptor()))?;
            let export = memory.export()?;
            return dlpack::capsule(py, &memory, &array, export, Wanted { versioned, read_only: false, copied: true });
        }
        let export = self.memory().export()?;
        let read_only = self.exports_read_only();
        if read_only && !versioned {
            let harm =
                if self.is_host() { "the process" } else { "the CUDA context of this process, with all that is in it" };
            return Err(Failure::export(format!(
                "this process may only read the array, and a consumer that asks for DLPack before version 1.0 can't be told: call \
                 writable(\"promise\") and give it that array, if nothing will write to it; a write would end {harm}"
            )));
        }
        dlpack::capsule(py, self.memory(), self.descriptor(), export, Wanted { versioned, read_only, copied: false })
    }

    /// A capsule of DLPack without the read-only flag, for which no stream waits: the caller promises not to write.
    fn _capsule<'py>(&self, py: Python<'py>) -> Outcome<Bound<'py, PyAny>> {
        self.check()?;
        dlpack::capsule(
            py,
            self.memory(),
            self.descriptor(),
            self.memory().export()?,
            Wanted { versioned: false, read_only: false, copied: false },
        )
    }

    /// DLPack's type of device, and its number in this process.
    fn __dlpack_device__(&self) -> (i32, i32) {
        let device = dlpack::device(self.memory().device());
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
        let device = self.memory().device();
        if !self.is_host() {
            return Err(PyTypeError::new_err(format!(
                "the array is on {device}: take a copy with tobytes(), or give it to a library of that device"
            )));
        }
        let own = self.descriptor().dtype;
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
        let numbers = self.view(ArrayDescriptor { dtype: unsigned, ..self.descriptor().clone() })?;
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
        let device = self.memory().device();
        let access = match (self.memory().is_read_only(), self.exports_read_only()) {
            (false, _) => "",
            (true, true) => ", read-only",
            (true, false) => ", read-only, exported as writable",
        };
        let shape: Vec<String> = self.descriptor().shape.iter().map(u64::to_string).collect();
        let comma = if shape.len() == 1 { "," } else { "" };
        format!(
            "<vmmfd.Array {} ({}{comma}) on {device}{access}>",
            dtype::spelling(self.descriptor().dtype),
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

/// Checks the stream of a consumer. No stream has to wait: the copies of this process are finished.
fn check_stream(array: &Array, stream: Option<&Bound<'_, PyAny>>) -> Outcome<()> {
    let Some(stream) = stream else { return Ok(()) };
    let shown = stream.repr()?;
    if array.is_host() {
        let text = format!("stream={shown} means nothing for memory of the host: leave it out");
        return Err(Failure::invalid(text));
    }
    match stream.extract::<i64>() {
        Ok(0) => Err(Failure::invalid(
            "stream=0 may be either default stream: write 1 for the legacy one or 2 for the one of each thread",
        )),
        Ok(-1 | 1..) if !stream.is_instance_of::<PyBool>() => Ok(()),
        _ => Err(Failure::invalid(format!("stream={shown} is no stream: give -1, 1, 2 or a cudaStream_t as a number"))),
    }
}
