//! Functions for devices: the list, the UUIDs, and the comparison of two names.

use pyo3::{exceptions::PyOverflowError, prelude::*, types::PyBool};
use vmmfd::{
    driver::DeviceUuid,
    memory::{Device, Selector},
};

use crate::{
    array::Array,
    device::PyDevice,
    driver,
    error::{Failure, Outcome, shown, tolerant},
    text::Text,
};

/// Returns the visible devices, a list of `Device` by ordinal: `CUDA_VISIBLE_DEVICES` applies. The first call starts the driver.
/// `backend` (str) is as for `empty`. Raises `Error` if the driver does not start, `Invalid` for another `backend`.
#[pyfunction]
#[pyo3(signature = (*, backend=None))]
pub(crate) fn devices(py: Python<'_>, backend: Option<Text>) -> Outcome<Vec<PyDevice>> {
    py.detach(|| Ok(Device::all(&driver::driver(backend.as_deref())?)?.into_iter().map(PyDevice).collect()))
}

/// Returns the UUID (str) of a device, with its prefix, from its `ordinal` in this process (int). `backend` (str) is as for `empty`.
/// Raises `Error` if there is no such device.
#[pyfunction]
#[pyo3(signature = (ordinal=Ordinal(0), *, backend=None), text_signature = "(ordinal=0, *, backend=None)")]
pub(crate) fn device_uuid(py: Python<'_>, ordinal: Ordinal, backend: Option<Text>) -> Outcome<String> {
    uuid_of(py, ordinal.0, backend.as_deref())
}

fn uuid_of(py: Python<'_>, ordinal: u32, backend: Option<&str>) -> Outcome<String> {
    py.detach(|| Ok(driver::device(&driver::driver(backend)?, Some(Selector::Ordinal(ordinal)))?.prefixed_uuid()))
}

/// An ordinal: `Invalid` for a number that is none.
pub(crate) struct Ordinal(u32);

impl<'a, 'py> FromPyObject<'a, 'py> for Ordinal {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        match object.extract::<u32>() {
            Err(error) if error.is_instance_of::<PyOverflowError>(object.py()) => {
                Err(Failure::invalid(format!("ordinal={} is not the ordinal of a device", shown(&object)?)).into())
            }
            ordinal => Ok(Self(ordinal?)),
        }
    }
}

/// Retains the primary context of a CUDA device, by ordinal, until the process ends: UCX needs an active context to read and write GPU
/// memory. Raises `Error`. Driver call: `cuDevicePrimaryCtxRetain`.
#[pyfunction]
pub(crate) fn activate(py: Python<'_>, ordinal: u32) -> Outcome<()> {
    py.detach(|| Ok(driver::device(&driver::driver("cuda")?, Some(Selector::Ordinal(ordinal)))?.activate()?))
}

/// Returns whether two names identify the same device (bool).
///
/// The names `a` and `b` are each a `Device`, an `Array`, an ordinal in this process (int), the 16 bytes of a UUID, or an object whose str
/// is a UUID. A UUID (str) may be in any case, with or without `GPU-` or `MIG-`, or shortened to its first characters as in
/// `CUDA_VISIBLE_DEVICES`. Raises `Invalid` for an argument that names no device.
#[pyfunction]
pub(crate) fn same_device(a: &Bound<'_, PyAny>, b: &Bound<'_, PyAny>) -> Outcome<bool> {
    let a = digits(a)?;
    let b = digits(b)?;
    Ok(a.starts_with(&b) || b.starts_with(&a))
}

/// Returns the hexadecimal digits of a device's UUID, or its first digits.
fn digits(named: &Bound<'_, PyAny>) -> Outcome<String> {
    let plain = |uuid: String| uuid.to_ascii_lowercase().replace('-', "");
    let bad = || match shown(named) {
        Ok(shown) => Failure::invalid(format!(
            "{shown} names no device: give a vmmfd.Device or Array, an ordinal, or a UUID with or without GPU- or MIG-"
        )),
        Err(error) => error.into(),
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
        return Ok(plain(uuid_of(named.py(), ordinal, None)?.split_once('-').ok_or_else(bad)?.1.to_owned()));
    }
    if let Ok(bytes) = named.extract::<[u8; 16]>() {
        return Ok(plain(DeviceUuid::from_bytes(bytes).to_string()));
    }
    // UUID objects of PyTorch and Python.
    let text = tolerant(named.py(), named.str())?.ok_or_else(bad)?.to_string();
    if text.bytes().all(|byte| byte.is_ascii_digit()) && !text.is_empty() {
        let ordinal = text.parse().map_err(|_| bad())?;
        return Ok(plain(uuid_of(named.py(), ordinal, None)?.split_once('-').ok_or_else(bad)?.1.to_owned()));
    }
    match text.parse::<Selector>() {
        Ok(Selector::Uuid(uuid)) => Ok(plain(uuid.to_string())),
        Ok(Selector::Prefix(prefix)) => Ok(plain(prefix.to_string().trim_start_matches("GPU-").to_owned())),
        _ => Err(bad()),
    }
}
