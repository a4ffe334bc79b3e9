//! The methods of `vmmfd.Array`: attributes, views, copies, and the protocols for other libraries.

#![allow(unsafe_code)]

use std::{ffi::c_int, ptr, slice};

use pyo3::{
    exceptions::{PyAttributeError, PyImportError, PyOverflowError, PyTypeError},
    ffi,
    prelude::*,
    types::{PyBool, PyBytes, PyComplex, PyDict, PyFloat, PyInt, PyTuple},
};
use vmmfd::array::{ArrayDescriptor, ElementType, Order};

use crate::{
    array::{self, Array, is_no_shape},
    array_index, buffer, copy,
    device::{PyDevice, short},
    dlpack::{self, CapsuleOptions},
    dtype,
    error::{Failure, Outcome, shown},
    shared::PyMemory,
    signals, source,
    stream_user::StreamUser,
};

#[pymethods]
impl Array {
    /// The length of each dimension, in elements.
    #[getter(shape)]
    fn py_shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.descriptor().shape)
    }

    /// The element type: a `DType`, a str such as `float32` or `bfloat16` that equals NumPy's types.
    #[getter]
    fn dtype<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        dtype::to_python(py, self.descriptor().dtype)
    }

    /// The type as a `numpy.dtype`, read by NumPy 2.4 and newer. Raises `ImportError` without NumPy, or without ml_dtypes for its
    /// types.
    #[getter(__numpy_dtype__)]
    fn numpy_dtype<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        dtype::to_numpy(py, self.descriptor().dtype)
    }

    /// The step between elements along each dimension, in bytes.
    #[getter]
    fn strides<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.descriptor().strides_in_bytes().map_err(Failure::from)?)
    }

    /// The size of an element, in bytes.
    #[getter]
    fn itemsize(&self) -> u64 {
        self.descriptor().dtype.size()
    }

    /// The number of dimensions.
    #[getter]
    fn ndim(&self) -> usize {
        self.descriptor().shape.len()
    }

    /// The number of elements.
    #[getter]
    fn size(&self) -> Outcome<u64> {
        Ok(self.descriptor().elements()?)
    }

    /// The total size of its elements, in bytes.
    #[getter]
    fn nbytes(&self) -> Outcome<u64> {
        Ok(self.descriptor().bytes()?)
    }

    /// Whether this process may only read it. A write would destroy the CUDA context, or on the host backend kill the process.
    #[getter]
    fn readonly(&self) -> bool {
        self.memory().is_read_only()
    }

    /// Whether another process created its memory.
    #[getter]
    fn is_mapped(&self) -> bool {
        self.owner().is_none()
    }

    /// The device on which this process uses it.
    #[getter]
    fn device(&self) -> PyDevice {
        PyDevice(self.memory().device().clone())
    }

    /// The memory that contains it, if this process created it and can publish it without a copy.
    #[getter(_memory)]
    fn py_memory(&self) -> Option<PyMemory> {
        self.owner().map(PyMemory::shared)
    }

    /// The address of its first element: a `CUdeviceptr`, or on the host backend an address of this process.
    ///
    /// Raises `Error` while no memory is mapped there, and in a fork.
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

    /// The same elements with the `axes` (int) in this order; without arguments, in reverse order. Raises `Invalid` unless each axis appears
    /// once.
    #[pyo3(signature = (*axes))]
    fn transpose(&self, axes: &Bound<'_, PyTuple>) -> Outcome<Self> {
        if axes.is_empty() {
            return self.transposed();
        }
        let listed = integers(axes)?;
        let dimensions = self.descriptor().shape.len() as i64;
        let axes = listed.iter().map(|axis| usize::try_from(if *axis < 0 { axis + dimensions } else { *axis }));
        let axes: Result<Vec<usize>, _> = axes.collect();
        let axes =
            axes.map_err(|_| Failure::invalid(format!("{listed:?} does not name each of the {dimensions} axes once")))?;
        self.view(self.descriptor().permute(&axes)?)
    }

    /// The same elements in another shape, without a copy. `shape` is an int or a sequence of int; the length -1 takes the elements that are
    /// left. Raises `Invalid` if the elements do not fit the shape, or are not contiguous.
    #[pyo3(signature = (*shape))]
    fn reshape(&self, shape: &Bound<'_, PyTuple>) -> Outcome<Self> {
        let from = self.descriptor();
        let mut lengths = integers(shape)?;
        let known =
            lengths.iter().filter(|length| **length != -1).fold(1, |all: i64, length| all.saturating_mul(*length));
        if let Some(open) = lengths.iter_mut().find(|length| **length == -1) {
            *open = i64::try_from(from.elements()?).unwrap_or(i64::MAX).checked_div(known).unwrap_or(0);
        }
        let lengths: Result<Vec<u64>, _> = lengths.iter().map(|length| u64::try_from(*length)).collect();
        let problem = || Failure::invalid(format!("an array of shape {:?} can't be reshaped to {shape}", from.shape));
        if !buffer::contiguous(from)?.0 {
            return Err(Failure::invalid(
                "only a C-contiguous array can be reshaped without a copy: call copy() first",
            ));
        }
        let seen = ArrayDescriptor::new(from.dtype, lengths.map_err(|_| problem())?, Order::C)?;
        if seen.elements()? != from.elements()? {
            return Err(problem());
        }
        self.view(ArrayDescriptor { offset: from.offset, ..seen })
    }

    fn __len__(&self) -> PyResult<usize> {
        match self.descriptor().shape.first() {
            Some(length) => Ok(*length as usize),
            None => Err(PyTypeError::new_err("an array without dimensions has no length")),
        }
    }

    /// A view selected by integers, slices and at most one ellipsis; a view even for a single element.
    ///
    /// Raises `IndexError` for an index out of range, `TypeError` for other kinds of index.
    fn __getitem__(&self, index: &Bound<'_, PyAny>) -> PyResult<Self> {
        Ok(self.view(array_index::select(self.descriptor(), index)?)?)
    }

    /// Sets the selected elements, as NumPy does: to a number, or to an array that can be broadcast to their shape. A value on a GPU must
    /// have their shape and type. Raises as `__getitem__` and `fill`.
    fn __setitem__(slf: &Bound<'_, Self>, index: &Bound<'_, PyAny>, value: &Bound<'_, PyAny>) -> PyResult<()> {
        Self::fill(&Bound::new(slf.py(), slf.get().__getitem__(index)?)?, value)
    }

    fn __iter__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        if slf.get().descriptor().shape.is_empty() {
            return Err(PyTypeError::new_err("an array without dimensions can't be iterated"));
        }
        // SAFETY: the array is a sequence: it has `__len__` and `__getitem__`.
        unsafe { Bound::from_owned_ptr_or_err(slf.py(), ffi::PySeqIter_New(slf.as_ptr())) }
    }

    /// A view of the same bytes as another element type.
    ///
    /// Without `shape`, the last dimension grows or shrinks. `dtype` is a name, or a dtype of NumPy, ml_dtypes, JAX or PyTorch. Raises
    /// `Invalid` if the size does not fit, or the elements are not contiguous.
    #[pyo3(signature = (dtype, shape=None))]
    fn reinterpret(&self, dtype: &Bound<'_, PyAny>, shape: Option<&Bound<'_, PyAny>>) -> Outcome<Self> {
        let from = self.descriptor();
        let to = dtype::extract(dtype)?;
        let shape = shape.map(array::shape).transpose()?;
        if shape.is_none() && from.dtype.size() == to.size() {
            return self.view(ArrayDescriptor { dtype: to, ..from.clone() });
        }
        if !buffer::contiguous(from)?.0 {
            return Err(Failure::invalid(
                "only a C-contiguous array can be reinterpreted with another shape or element size",
            ));
        }
        let shape = match (shape, from.shape.split_last()) {
            (Some(shape), _) => shape,
            (None, None) => return Err(Failure::invalid("reinterpreting an array without dimensions needs a shape")),
            (None, Some((last, rest))) => {
                let bytes = last.saturating_mul(from.dtype.size());
                if !bytes.is_multiple_of(to.size()) {
                    let text = format!("the {bytes} bytes of the last dimension are not a multiple of {to}");
                    return Err(Failure::invalid(text));
                }
                rest.iter().copied().chain([bytes / to.size()]).collect()
            }
        };
        let mut seen = ArrayDescriptor::new(to, shape, Order::C)?;
        if seen.bytes()? != from.bytes()? {
            let text = format!(
                "{to} of shape {:?} has {} bytes, but the array has {}",
                seen.shape,
                seen.bytes()?,
                from.bytes()?
            );
            return Err(Failure::invalid(text));
        }
        seen.offset = from.offset;
        self.view(seen)
    }

    /// The same array, exported as writable although this process may only read it.
    ///
    /// For libraries without read-only arrays (DLPack consumers before version 1.0; PyTorch's `__cuda_array_interface__`).
    /// `never_written=True` (bool) is the caller's promise that nothing writes to it: a store into memory that is mapped read-only destroys
    /// the CUDA context of this process and everything in it (Xid 31), or on the host backend kills the process (SIGSEGV). `readonly` is
    /// unchanged. Raises `Invalid` without the promise.
    #[pyo3(signature = (*, never_written=false))]
    fn writable(&self, never_written: bool) -> Outcome<Self> {
        if !never_written {
            let text = "call writable(never_written=True) to promise that nothing writes to it: a write destroys the CUDA context, or on the \
                        host kills the process";
            return Err(Failure::invalid(text));
        }
        self.promised()
    }

    /// Returns a NumPy array of the same memory, without a copy; writable unless `readonly`. Raises `TypeError` for GPU memory, and without
    /// ml_dtypes for its types; `ImportError` without NumPy.
    fn numpy<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.__array__(py, None, None)
    }

    /// Returns its elements as nested lists of Python numbers (bool, int, float, complex; bytes for void); for an array without
    /// dimensions, the number itself. Blocks while it copies, also from a GPU. Raises `TypeError` for the 8-bit floats without ml_dtypes.
    fn tolist<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("vmmfd._elements")?.call_method1("nested", (slf,))
    }

    /// Returns the only element as a Python number, as `tolist` does. Raises `Invalid` unless `size` is 1.
    fn item<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let shape = &slf.get().descriptor().shape;
        if shape.iter().any(|length| *length != 1) {
            let text = format!(
                "item() returns the only element, but the array has the shape {shape:?}: index it, or call tolist()"
            );
            return Err(Failure::invalid(text).into());
        }
        slf.py().import("vmmfd._elements")?.call_method1("only", (slf,))
    }

    fn __int__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.py().get_type::<PyInt>().call1((number(slf)?,))
    }

    fn __float__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.py().get_type::<PyFloat>().call1((number(slf)?,))
    }

    fn __complex__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.py().get_type::<PyComplex>().call1((number(slf)?,))
    }

    /// The truth value of the only element.
    fn __bool__(slf: &Bound<'_, Self>) -> PyResult<bool> {
        number(slf)?.is_truthy()
    }

    fn __index__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let array = slf.get().descriptor();
        let number = if array.shape.is_empty() { Some(number(slf)?) } else { None };
        number.filter(|number| number.is_instance_of::<PyInt>() && !number.is_instance_of::<PyBool>()).ok_or_else(
            || {
                PyTypeError::new_err(format!(
                    "only an integer array without dimensions is an index, and this one is {array}"
                ))
            },
        )
    }

    /// Copies the elements of another array, of the same shape and type, into it. `source` is any object that `asarray` accepts.
    ///
    /// Blocks, with the GIL released, until the copy is complete. An error or Ctrl-C leaves it partly written. Raises `Invalid` for another
    /// shape or type, for a copy between a GPU and the host, and if it is read-only.
    fn copy_from(&self, py: Python<'_>, source: &Bound<'_, PyAny>) -> Outcome<()> {
        self.check_writable()?;
        let source = source::of(source)?;
        source.check(self.descriptor())?;
        signals::run(py, &[], || source.copy_into(&**self.memory(), self.descriptor()))
    }

    /// Sets all elements to `value`, converted as NumPy does. Blocks. A GPU gets a copy of an array of this size that is filled in host
    /// memory. Raises `Invalid` if the array is read-only; `ImportError` without NumPy, or without ml_dtypes for its types; NumPy's
    /// `TypeError`, `ValueError` and `OverflowError` for a value that does not convert; and as `copy_from`.
    fn fill(slf: &Bound<'_, Self>, value: &Bound<'_, PyAny>) -> PyResult<()> {
        slf.get().check_writable()?;
        slf.py().import("vmmfd._elements")?.call_method1("assign", (slf, value))?;
        Ok(())
    }

    /// Returns a contiguous copy in new shared memory of the same device, writable. Blocks, with the GIL released. Raises as `empty`.
    fn copy(&self, py: Python<'_>) -> Outcome<Self> {
        self.check()?;
        let (memory, array) = signals::run(py, &[], || copy::contiguous_copy(&**self.memory(), self.descriptor()))?;
        Self::new(memory, array)
    }

    /// Copies its elements into another array, `destination`, which is writable and of the same shape and type. Blocks, with the GIL
    /// released, until the copy is complete. Raises as `copy_from`.
    fn copy_to(&self, py: Python<'_>, destination: &Bound<'_, PyAny>) -> Outcome<()> {
        self.check()?;
        let destination = source::of(destination)?;
        destination.check(self.descriptor())?;
        signals::run(py, &[], || destination.fill_from(&**self.memory(), self.descriptor()))
    }

    /// Returns its elements as bytes, in C order. Blocks, with the GIL released.
    fn tobytes<'py>(&self, py: Python<'py>) -> Outcome<Bound<'py, PyBytes>> {
        self.check()?;
        let size = usize::try_from(self.descriptor().bytes()?).unwrap_or(usize::MAX);
        if isize::try_from(size).is_err() {
            return Err(Failure::invalid(format!("{size} bytes are more than a bytes object can hold")));
        }
        // Not `PyBytes::new_with`, which would first zero all of it with the GIL held.
        // SAFETY: it creates a bytes object of that size, or raises.
        let bytes =
            unsafe { Bound::from_owned_ptr_or_err(py, ffi::PyBytes_FromStringAndSize(ptr::null(), size as isize)) }?;
        // SAFETY: the pointer is to the `size` bytes of the new object, which nothing else refers to yet.
        let to = unsafe { slice::from_raw_parts_mut(ffi::PyBytes_AsString(bytes.as_ptr()).cast(), size) };
        signals::run(py, &[], || copy::read(&**self.memory(), self.descriptor(), to))?;
        // SAFETY: it is a bytes object.
        Ok(unsafe { bytes.cast_into_unchecked() })
    }

    /// Returns a DLPack capsule, as defined by the array API standard.
    ///
    /// On CUDA, `stream` is 1 (legacy default), 2 (per-thread default), a stream, -1 or `None`; 0 is an error. On the host it must be
    /// `None`. No stream waits: this process's copies are complete. An array of a sample that was received for another stream blocks until
    /// that stream is done, with the GIL released. `copy=True` returns a contiguous copy in new memory.
    ///
    /// Raises `BufferError` for read-only memory unless `max_version` is at least (1, 0) (see `writable`), for another `dl_device`, and for
    /// element types without a DLPack code; `Invalid` for an invalid stream, and `Unsupported` for a stream on the host.
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
        let consumer = check_stream(self, stream)?;
        let here = dlpack::device(self.memory().device());
        if let Some((kind, id)) = dl_device
            && (kind, id) != (here.kind, here.id)
        {
            return Err(Failure::export(format!(
                "the array is on DLPack device ({}, {}), and dl_device=({kind}, {id}) would need a copy: copy it yourself",
                here.kind, here.id
            )));
        }
        let versioned = max_version.is_some_and(|(major, _)| major >= 1);
        if copy == Some(true) {
            let (memory, array) = signals::run(py, &[], || copy::contiguous_copy(&**self.memory(), self.descriptor()))?;
            let export = memory.export()?;
            return dlpack::capsule(
                py,
                &memory,
                &array,
                export,
                CapsuleOptions { versioned, read_only: false, copied: true },
            );
        }
        self.wait_for_user(py, consumer)?;
        let export = self.memory().export()?;
        let read_only = self.exports_read_only();
        if read_only && !versioned {
            let harm = if self.is_host() { "kill the process" } else { "destroy this process's CUDA context" };
            return Err(Failure::export(format!(
                "this process may only read the array, and a consumer older than DLPack 1.0 cannot know: if nothing will write to it, \
                 pass the array that writable(never_written=True) returns; a write would {harm}"
            )));
        }
        dlpack::capsule(
            py,
            self.memory(),
            self.descriptor(),
            export,
            CapsuleOptions { versioned, read_only, copied: false },
        )
    }

    /// Returns a DLPack capsule without the read-only flag; no stream waits. The caller promises not to write.
    fn _capsule<'py>(&self, py: Python<'py>) -> Outcome<Bound<'py, PyAny>> {
        self.check()?;
        self.wait_for_user(py, None)?;
        dlpack::capsule(
            py,
            self.memory(),
            self.descriptor(),
            self.memory().export()?,
            CapsuleOptions { versioned: false, read_only: false, copied: false },
        )
    }

    /// The DLPack device type, and the device's ordinal in this process.
    fn __dlpack_device__(&self) -> (i32, i32) {
        let device = dlpack::device(self.memory().device());
        (device.kind, device.id)
    }

    /// The CUDA array interface, version 3. Its `stream` is `None`, as all copies are complete; of a sample that was received for a stream, it
    /// is the stream.
    ///
    /// Raises `AttributeError` on the host backend and for element types without a typestr (`bfloat16`, the 8-bit floats).
    #[getter(__cuda_array_interface__)]
    fn cuda_array_interface<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        if self.is_host() {
            return Err(PyAttributeError::new_err("__cuda_array_interface__: the array is in host memory"));
        }
        let dictionary = self.interface(py, "__cuda_array_interface__")?;
        dictionary.set_item("stream", self.memory().user().map(StreamUser::number))?;
        Ok(dictionary)
    }

    /// NumPy's array interface, version 3. Raises `AttributeError` on a GPU and for element types without a typestr.
    #[getter(__array_interface__)]
    fn array_interface<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        if !self.is_host() {
            return Err(PyAttributeError::new_err("__array_interface__: the array is in GPU memory"));
        }
        self.interface(py, "__array_interface__")
    }

    /// Returns a NumPy array of the same memory. NumPy calls it for ml_dtypes types. Raises `TypeError` for GPU memory, and without
    /// ml_dtypes for its types.
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
                "the array is on {device}: copy it with tobytes(), or pass it to a library for that device"
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
                    "NumPy needs the package ml_dtypes for {own}: install it, or use reinterpret(\"{}\")",
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
        // SAFETY: Python passes a view to fill.
        Ok(unsafe { buffer::fill(&slf, view, flags) }?)
    }

    unsafe fn __releasebuffer__(&self, view: *mut ffi::Py_buffer) {
        // SAFETY: Python calls it once for each filled view.
        unsafe { buffer::release(view) }
    }

    fn __repr__(&self) -> String {
        let device = short(self.memory().device());
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

    /// Raises `TypeError`: whether the copy would share the memory is not clear.
    fn __copy__(&self) -> PyResult<()> {
        Err(PyTypeError::new_err(
            "copy.copy() can't copy an array: call copy() of the array, or take a view with array[...]",
        ))
    }

    /// Raises `TypeError`: memory can't be pickled.
    fn __reduce__(&self) -> PyResult<()> {
        Err(PyTypeError::new_err(
            "an array can't be pickled: put it into a broker and send its name, or serve it; vmmfd.register_reducer() lets \
             multiprocessing send arrays of a lease",
        ))
    }
}

/// Returns the only element, to convert it.
///
/// # Errors
/// `TypeError` unless there is one element, and for void elements, which have no value.
fn number<'py>(array: &Bound<'py, Array>) -> PyResult<Bound<'py, PyAny>> {
    let descriptor = array.get().descriptor();
    let found = if descriptor.elements().map_err(Failure::from)? == 1 { Some(Array::item(array)?) } else { None };
    found.filter(|number| !number.is_instance_of::<PyBytes>()).ok_or_else(|| {
        PyTypeError::new_err(format!(
            "only an array of one element converts to a number, and this one is {descriptor}: call tolist()"
        ))
    })
}

/// Checks and returns a consumer's stream.
fn check_stream(array: &Array, stream: Option<&Bound<'_, PyAny>>) -> Outcome<Option<i64>> {
    let Some(stream) = stream else { return Ok(None) };
    let shown = shown(stream)?;
    if array.is_host() {
        let text = format!("stream={shown} does not apply to host memory: omit it");
        return Err(Failure::unsupported(text));
    }
    match stream.extract::<i64>() {
        Ok(0) => Err(Failure::invalid(
            "stream=0 is ambiguous: write 1 for the legacy default stream or 2 for the per-thread default stream",
        )),
        Ok(number @ (-1 | 1..)) if !stream.is_instance_of::<PyBool>() => Ok(Some(number)),
        _ => Err(Failure::invalid(format!(
            "stream={shown} is not a stream: give -1, 1, 2 or a cudaStream_t as an integer"
        ))),
    }
}

/// The integers that a call gives as its arguments, or as one sequence.
fn integers(given: &Bound<'_, PyTuple>) -> Outcome<Vec<i64>> {
    if is_no_shape(given) || given.len() == 1 && is_no_shape(&given.get_item(0)?) {
        return Err(Failure::wrong_type(format!("{} is neither a shape nor axes: give integers", shown(given)?)));
    }
    let listed = match given.len() {
        1 => given.get_item(0)?.extract().or_else(|_| given.extract()),
        _ => given.extract(),
    };
    listed.or_else(|error: PyErr| {
        if error.is_instance_of::<PyOverflowError>(given.py()) {
            return Err(Failure::invalid(format!("{} has an integer of more than 64 bits", shown(given)?)));
        }
        Err(error.into())
    })
}
