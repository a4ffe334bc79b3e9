//! `vmmfd.Array`: a typed, strided view of shared memory. The methods that Python calls are in `array_methods`.

use std::sync::{Arc, OnceLock};

use pyo3::{
    exceptions::{PyAttributeError, PyOverflowError},
    prelude::*,
    types::{PyBool, PyByteArray, PyBytes, PyDict, PyList, PyTuple},
};
use vmmfd::{Error, array::ArrayDescriptor, driver::Access, error::MemoryError, fork::ProcessIdentity};

use crate::{
    error::{Failure, Outcome, shown, tolerant},
    memory::{Export, Memory, Owned},
    signals,
};

/// A typed, strided view of memory that is shared between processes.
///
/// The memory remains mapped while an `Array` of it, or an object that another library made from one, exists. Other libraries use it
/// without a copy through `torch.from_dlpack`, `cupy.from_dlpack`, `jax.dlpack.from_dlpack`, `numpy.from_dlpack` (on the host backend),
/// `__cuda_array_interface__` and, on the host backend, `__array_interface__` and the buffer protocol.
///
/// `int`, `float`, `complex`, `bool` and `operator.index` convert the only element, and raise `TypeError` for another number of elements.
///
/// Copies made by its methods are complete when the methods return. The caller must order work that other libraries queue on the memory.
///
/// Attributes: `shape` and `strides` (tuples of int), `dtype` (`DType`), `itemsize`, `ndim`, `size`, `nbytes` and `address` (int),
/// `readonly` and `is_mapped` (bool), `device` (`Device`), `T` (`Array`). An index (int, slice, one `...`, or a tuple of them) returns an
/// `Array`, as does each step of an iteration along the first dimension.
#[pyclass(name = "Array", module = "vmmfd", frozen, weakref)]
pub(crate) struct Array {
    memory: Arc<dyn Memory>,
    descriptor: ArrayDescriptor,
    /// Whether read-only memory is exported as writable: the caller promised that nothing writes to it.
    promised: bool,
    /// The export that all readers of the array interface share: they hold this array, and no export.
    exported: OnceLock<Export>,
    /// The process that created this array.
    by: ProcessIdentity,
}

impl Array {
    /// An array in memory, which the array keeps alive.
    ///
    /// # Errors
    /// [`vmmfd::error::MemoryError::Array`] and [`vmmfd::error::MemoryError::OutOfRange`] if the array is not inside the memory.
    pub(crate) fn new(memory: Arc<dyn Memory>, descriptor: ArrayDescriptor) -> Outcome<Self> {
        descriptor.check(memory.size())?;
        Ok(Self { memory, descriptor, promised: false, exported: OnceLock::new(), by: ProcessIdentity::current() })
    }

    /// Returns this process's own memory, which can be published without a copy, or `None` for memory of another process. The descriptor's
    /// offset counts from the start of that memory.
    pub(crate) fn owner(&self) -> Option<Arc<Owned>> {
        Arc::clone(&self.memory).owner()
    }

    pub(crate) fn memory(&self) -> &Arc<dyn Memory> {
        &self.memory
    }

    pub(crate) fn descriptor(&self) -> &ArrayDescriptor {
        &self.descriptor
    }

    /// Whether the array is exported as read-only.
    pub(crate) fn exports_read_only(&self) -> bool {
        self.memory.is_read_only() && !self.promised
    }

    /// Fails in a fork of the creating process, and while no memory is mapped at its addresses.
    pub(crate) fn check(&self) -> Outcome<()> {
        self.by.check()?;
        Ok(self.memory.check_mapped()?)
    }

    /// Fails as [`Array::check`], and for read-only memory, also if it is exported as writable.
    pub(crate) fn check_writable(&self) -> Outcome<()> {
        self.check()?;
        if self.memory.is_read_only() { Err(Error::Memory(MemoryError::ReadOnly).into()) } else { Ok(()) }
    }

    /// The address of the element with all indices 0.
    pub(crate) fn first(&self) -> u64 {
        self.memory.address() + self.descriptor.offset
    }

    /// Returns another view of the same memory.
    pub(crate) fn view(&self, descriptor: ArrayDescriptor) -> Outcome<Self> {
        let promised = self.promised;
        Ok(Self { promised, by: self.by, ..Self::new(Arc::clone(&self.memory), descriptor)? })
    }

    pub(crate) fn is_host(&self) -> bool {
        self.memory.device().is_host()
    }

    /// Lets a consumer's stream use the array, with DLPack's meaning of the number: waits if another stream uses it.
    pub(crate) fn wait_for_user(&self, py: Python<'_>, consumer: Option<i64>) -> Outcome<()> {
        match (self.memory.user(), consumer.unwrap_or(1)) {
            // -1: the consumer orders the work itself.
            (None, _) | (_, -1) => Ok(()),
            (Some(user), consumer) if u64::try_from(consumer) == Ok(user.number()) => Ok(()),
            (Some(user), _) => signals::run(py, &[], || user.synchronize()),
        }
    }

    /// Returns the same array, exported as writable.
    pub(crate) fn promised(&self) -> Outcome<Self> {
        Ok(Self { promised: true, ..self.view(self.descriptor.clone())? })
    }

    /// Returns the dict of an array interface. `called` is the interface's name.
    pub(crate) fn interface<'py>(&self, py: Python<'py>, called: &str) -> PyResult<Bound<'py, PyDict>> {
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
        let access = if self.exports_read_only() { Access::ReadOnly } else { Access::ReadWrite };
        let interface = self.descriptor.interface(self.memory.address(), access);
        let interface = interface.map_err(Failure::from)?;
        // If another thread was faster, this export is dropped.
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
}

/// Converts a caller's shape: a number or a sequence of numbers.
///
/// # Errors
/// `TypeError` for other objects, `ValueError` for integers that are negative or too large.
pub(crate) fn shape(given: &Bound<'_, PyAny>) -> Outcome<Vec<u64>> {
    let py = given.py();
    let problem = || {
        Ok::<_, PyErr>(format!(
            "shape={} is not a shape: give a non-negative integer or a tuple of them",
            shown(given)?
        ))
    };
    if is_no_shape(given) {
        return Err(Failure::wrong_type(problem()?));
    }
    let (length, lengths) = (given.extract::<u64>(), given.extract::<Vec<u64>>());
    // A number that is negative or too large.
    let is_number = |error: &PyErr| error.is_instance_of::<PyOverflowError>(py);
    let is_integers = length.as_ref().is_err_and(is_number) || lengths.as_ref().is_err_and(is_number);
    if let Some(length) = tolerant(py, length)? {
        return Ok(vec![length]);
    }
    if let Some(lengths) = tolerant(py, lengths)? {
        return Ok(lengths);
    }
    let problem = problem()?;
    Err(if is_integers { Failure::invalid(problem) } else { Failure::wrong_type(problem) })
}

/// Whether an object is bytes or a bool, or a list or tuple with a bool: each of them converts to integers.
pub(crate) fn is_no_shape(given: &Bound<'_, PyAny>) -> bool {
    let is_bool = |given: &Bound<'_, PyAny>| given.is_instance_of::<PyBool>();
    let has_bool = match (given.cast::<PyTuple>(), given.cast::<PyList>()) {
        (Ok(lengths), _) => lengths.iter().any(|length| is_bool(&length)),
        (_, Ok(lengths)) => lengths.iter().any(|length| is_bool(&length)),
        _ => is_bool(given),
    };
    has_bool || given.is_instance_of::<PyBytes>() || given.is_instance_of::<PyByteArray>()
}
