//! Functions of devices: their list, their UUIDs, and the comparison of two names.

use pyo3::{prelude::*, types::PyBool};
use vmmfd::{
    driver::DeviceUuid,
    memory::{Device, Selector},
};

use crate::{
    array::Array,
    device::PyDevice,
    driver,
    error::{Failure, Outcome},
};

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
