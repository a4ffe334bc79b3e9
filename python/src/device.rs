//! Devices as Python sees them, and how a caller names one.

use std::{
    collections::hash_map::DefaultHasher,
    hash::{Hash, Hasher},
};

use pyo3::{prelude::*, types::PyBool};
use vmmfd::{
    driver::DeviceUuid,
    memory::{Device, Selector},
};

use crate::{
    array::Array,
    driver,
    error::{Failure, Outcome},
};

/// A device: of CUDA, or this machine's memory. Equal are those with the same UUID.
///
/// Attributes: `uuid`, `name` and `backend` (str), `ordinal` (int).
#[pyclass(name = "Device", module = "vmmfd", frozen, weakref)]
#[derive(Debug, Clone)]
pub(crate) struct PyDevice(pub(crate) Device);

#[pymethods]
impl PyDevice {
    /// Its UUID with its prefix, as `nvidia-smi -L` prints it and `CUDA_VISIBLE_DEVICES` takes it; the same in every process.
    #[getter]
    fn uuid(&self) -> String {
        self.0.prefixed_uuid()
    }

    /// Its number in this process, which may be another in another one.
    #[getter]
    fn ordinal(&self) -> i32 {
        self.0.ordinal()
    }

    /// Its name, such as `NVIDIA H200`.
    #[getter]
    fn name(&self) -> &str {
        self.0.name()
    }

    /// Where its memory is: `host` is ordinary memory of this machine, and no GPU.
    #[getter]
    fn backend(&self) -> &'static str {
        self.0.backend().as_str()
    }

    fn __eq__(&self, other: &Bound<'_, PyAny>) -> bool {
        other.cast::<Self>().is_ok_and(|other| {
            let (this, other) = (&self.0, &other.get().0);
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
        format!("<vmmfd.Device {}: {}>", self.0.ordinal(), self.0)
    }
}

/// The device that a caller names: by its number in this process, by its UUID or the beginning of one, or by a [`PyDevice`].
///
/// # Errors
/// `ValueError` for what names none.
pub(crate) fn selector(wanted: &Bound<'_, PyAny>) -> Outcome<Selector> {
    if let Ok(device) = wanted.cast::<PyDevice>() {
        return Ok(Selector::Uuid(device.get().0.uuid()));
    }
    let bad = || {
        let shown = wanted.repr().map_or_else(|_| "it".to_owned(), |shown| shown.to_string());
        Failure::invalid(format!(
            "device={shown} is no device: give its number, its UUID or the beginning of one, or a vmmfd.Device"
        ))
    };
    if wanted.is_instance_of::<PyBool>() {
        return Err(bad());
    }
    if let Ok(ordinal) = wanted.extract::<u32>() {
        return Ok(Selector::Ordinal(ordinal));
    }
    wanted.extract::<String>().ok().and_then(|text| text.parse().ok()).ok_or_else(bad)
}

/// The devices that this process sees, a list of `Device` by number: `CUDA_VISIBLE_DEVICES` is applied. The first time it starts the driver.
#[pyfunction]
#[pyo3(signature = (backend="auto"))]
pub(crate) fn devices(py: Python<'_>, backend: &str) -> Outcome<Vec<PyDevice>> {
    py.detach(|| Ok(Device::all(&driver::driver(backend)?)?.into_iter().map(PyDevice).collect()))
}

/// The UUID (str) of a device by its number in this process (int), with its prefix. Raises `Error` if there is none.
#[pyfunction]
#[pyo3(signature = (ordinal=0, *, backend="auto"))]
pub(crate) fn device_uuid(py: Python<'_>, ordinal: u32, backend: &str) -> Outcome<String> {
    py.detach(|| Ok(driver::device(&driver::driver(backend)?, Some(Selector::Ordinal(ordinal)))?.prefixed_uuid()))
}

/// Whether two names are of one device (bool).
///
/// A name is a `Device`, an `Array`, a number in this process (int), a UUID (str) in any case, with or without `GPU-` or `MIG-` before it, or the
/// beginning of one, as `CUDA_VISIBLE_DEVICES` has it; the 16 bytes of one; or what prints itself as one. Raises `Invalid` for what
/// names none.
#[pyfunction]
pub(crate) fn same_device(a: &Bound<'_, PyAny>, b: &Bound<'_, PyAny>) -> Outcome<bool> {
    let (a, b) = (digits(a)?, digits(b)?);
    Ok(a.starts_with(&b) || b.starts_with(&a))
}

/// The digits of a device's UUID, or the first of them.
fn digits(named: &Bound<'_, PyAny>) -> Outcome<String> {
    let plain = |uuid: String| uuid.to_ascii_lowercase().replace('-', "");
    let bad = || {
        let shown = named.repr().map_or_else(|_| "it".to_owned(), |shown| shown.to_string());
        Failure::invalid(format!(
            "{shown} names no device: give a vmmfd.Device or Array, a number, or a UUID with or without GPU- or MIG- before it"
        ))
    };
    if let Ok(device) = named.cast::<PyDevice>() {
        return Ok(plain(device.get().0.uuid().to_string()));
    }
    if let Ok(array) = named.cast::<Array>() {
        return Ok(plain(array.get().memory().device().uuid().to_string()));
    }
    if named.is_instance_of::<PyBool>() {
        return Err(bad());
    }
    if let Ok(ordinal) = named.extract::<u32>() {
        return Ok(plain(device_uuid(named.py(), ordinal, "auto")?.split_once('-').ok_or_else(bad)?.1.to_owned()));
    }
    if let Ok(bytes) = named.extract::<[u8; 16]>() {
        return Ok(plain(DeviceUuid::from_bytes(bytes).to_string()));
    }
    // A UUID of PyTorch's or Python's own prints itself.
    let text = named.str()?.to_string();
    if text.bytes().all(|byte| byte.is_ascii_digit()) && !text.is_empty() {
        let ordinal = text.parse().map_err(|_| bad())?;
        return Ok(plain(device_uuid(named.py(), ordinal, "auto")?.split_once('-').ok_or_else(bad)?.1.to_owned()));
    }
    match text.parse::<Selector>() {
        Ok(Selector::Uuid(uuid)) => Ok(plain(uuid.to_string())),
        Ok(Selector::Prefix(prefix)) => Ok(plain(prefix.to_string().trim_start_matches("GPU-").to_owned())),
        _ => Err(bad()),
    }
}
