//! The class of devices, and the parsing of callers' device names.

use std::{
    collections::hash_map::DefaultHasher,
    hash::{Hash, Hasher},
};

use pyo3::{
    prelude::*,
    types::{PyBool, PyString},
};
use vmmfd::memory::{Device, Selector};

use crate::error::{Failure, Outcome, shown};

/// A CUDA device, or this machine's memory. Devices with the same UUID are equal.
///
/// Attributes: `uuid`, `name` and `backend` (str), `ordinal` (int).
#[pyclass(name = "Device", module = "vmmfd", frozen, weakref)]
#[derive(Debug, Clone)]
pub(crate) struct PyDevice(pub(crate) Device);

#[pymethods]
impl PyDevice {
    /// The UUID with its prefix, as in `nvidia-smi -L` and `CUDA_VISIBLE_DEVICES`; the same in every process.
    #[getter]
    fn uuid(&self) -> String {
        self.0.prefixed_uuid()
    }

    /// The ordinal in this process; other processes may number devices differently.
    #[getter]
    fn ordinal(&self) -> i32 {
        self.0.ordinal()
    }

    /// The name, such as `NVIDIA H200`.
    #[getter]
    fn name(&self) -> &str {
        self.0.name()
    }

    /// Where the memory is: `host` is ordinary memory of this machine, not a GPU.
    #[getter]
    fn backend(&self) -> &'static str {
        self.0.backend().as_str()
    }

    fn __eq__(&self, other: &Bound<'_, PyAny>) -> bool {
        other.cast::<Self>().is_ok_and(|other| {
            let this = &self.0;
            let other = &other.get().0;
            this.backend() == other.backend() && this.uuid() == other.uuid()
        })
    }

    fn __hash__(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        (self.0.backend().as_str(), self.0.uuid()).hash(&mut hasher);
        hasher.finish()
    }

    fn __str__(&self) -> String {
        self.0.to_string()
    }

    fn __repr__(&self) -> String {
        format!("<vmmfd.Device {}: {}>", self.0.ordinal(), short(&self.0))
    }
}

/// Describes a device, with the first eight characters of its UUID.
pub(crate) fn short(device: &Device) -> String {
    let uuid = device.uuid().to_string();
    device.to_string().replace(&uuid, &uuid[..8])
}

/// The option `device` of a caller.
pub(crate) struct Wanted(pub(crate) Selector);

impl<'a, 'py> FromPyObject<'a, 'py> for Wanted {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        Ok(Self(selector(&object)?))
    }
}

/// Parses a caller's device: an ordinal in this process, a UUID or its first characters, or a [`PyDevice`].
///
/// # Errors
/// `ValueError` for a number or text that names no device; `TypeError` for anything else.
pub(crate) fn selector(wanted: &Bound<'_, PyAny>) -> Outcome<Selector> {
    if let Ok(device) = wanted.cast::<PyDevice>() {
        return Ok(Selector::Uuid(device.get().0.uuid()));
    }
    let is_bool = wanted.is_instance_of::<PyBool>();
    if !is_bool && let Ok(ordinal) = wanted.extract::<u32>() {
        return Ok(Selector::Ordinal(ordinal));
    }
    if let Some(selector) = wanted.extract::<String>().ok().and_then(|text| text.parse().ok()) {
        return Ok(selector);
    }
    let problem = format!(
        "device={} is not a device: give its ordinal, its UUID or the UUID's first characters, or a vmmfd.Device",
        shown(wanted)?
    );
    let is_named = wanted.is_instance_of::<PyString>() || !is_bool && wanted.hasattr("__index__")?;
    Err(if is_named { Failure::invalid(problem) } else { Failure::wrong_type(problem) })
}
