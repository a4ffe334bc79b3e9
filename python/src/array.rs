//! `vmmfd.Array`: a typed, strided view of memory that is shared. The methods that Python calls are in `array_methods`.

use std::sync::{Arc, OnceLock};

use pyo3::{
    exceptions::PyAttributeError,
    prelude::*,
    types::{PyDict, PyTuple},
};
use vmmfd::{array::ArrayDescriptor, fork::ProcessIdentity};

use crate::{
    error::{Failure, Outcome, shown, tolerant},
    memory::{Export, Memory, Owned},
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
    /// Whether other libraries are told that they may write read-only memory: the caller promised that they do not.
    promised: bool,
    /// The export for readers of an array interface, which hold this array and no export of their own.
    exported: OnceLock<Export>,
    /// The process that made this array.
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

    /// This process's own memory, which can be published without a copy, or `None` for memory of another process. The descriptor's
    /// offset counts from the beginning of that memory.
    pub(crate) fn owner(&self) -> Option<Arc<Owned>> {
        Arc::clone(&self.memory).owner()
    }

    /// The memory that the array is in.
    pub(crate) fn memory(&self) -> &Arc<dyn Memory> {
        &self.memory
    }

    /// The bytes of the memory that the array has.
    pub(crate) fn descriptor(&self) -> &ArrayDescriptor {
        &self.descriptor
    }

    /// Whether other libraries are told that they may only read the array.
    pub(crate) fn exports_read_only(&self) -> bool {
        self.memory.is_read_only() && !self.promised
    }

    /// Fails in a fork of the process that made the array, and while nothing is mapped at its addresses.
    pub(crate) fn check(&self) -> Outcome<()> {
        self.by.check()?;
        Ok(self.memory.check_mapped()?)
    }

    /// The address of the element with all indices 0.
    pub(crate) fn first(&self) -> u64 {
        self.memory.address() + self.descriptor.offset
    }

    /// Another view of the same memory.
    pub(crate) fn view(&self, descriptor: ArrayDescriptor) -> Outcome<Self> {
        let promised = self.promised;
        Ok(Self { promised, by: self.by, ..Self::new(Arc::clone(&self.memory), descriptor)? })
    }

    /// Whether the array is in memory of the host.
    pub(crate) fn is_host(&self) -> bool {
        self.memory.device().is_host()
    }

    /// The same array, which other libraries are told they may write.
    pub(crate) fn promised(&self) -> Outcome<Self> {
        Ok(Self { promised: true, ..self.view(self.descriptor.clone())? })
    }

    /// The dictionary of an array interface, which `called` names.
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
        let interface = self.descriptor.interface(self.memory.address(), self.exports_read_only());
        let interface = interface.map_err(Failure::from)?;
        // If another thread set one meanwhile, this export is dropped.
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

/// A shape that a caller gives: a number or a sequence of numbers.
///
/// # Errors
/// `ValueError` for other objects.
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
