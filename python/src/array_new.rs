//! New arrays: empty arrays, and copies of other libraries' arrays.

use pyo3::{prelude::*, types::PyString};
use vmmfd::{
    array::{ArrayDescriptor, Order},
    memory::{Rdma, Spec},
};

use crate::{
    array::{self, Array},
    copy,
    device::Wanted,
    driver, dtype,
    error::Outcome,
    memory::{Owned, RdmaOption},
    signals, source,
    text::Text,
};

/// Creates an `Array` in new shared memory. Contents are undefined.
///
/// `shape` (int, or a sequence of int) is in elements. `dtype` is a str (`"float32"`, `"bfloat16"`, `"float8_e4m3fn"`, `"<f4"`), or a dtype
/// of NumPy, ml_dtypes, JAX or PyTorch; as in NumPy `float64` by default. `device` (int, str or `Device`) is an ordinal in this process, a UUID or its first characters, or a
/// `Device`; the first device by default. `backend` (str or None) is `"cuda"`, `"host"`, or `"auto"`: CUDA, or the host if there is no
/// driver or no device; by default the environment variable `VMMFD_BACKEND`, else `"auto"`. `rdma` is whether RDMA can reach the memory
/// (`gpuDirectRDMACapable`), for network cards: `"auto"` where the device reports support, never on WSL2; `True` requires it; `False`
/// never.
///
/// Blocks, with the GIL released, while the driver allocates, and on first use while it starts. Raises `Invalid`, also for types that
/// readers could not restore (with fields, below 8 bits, objects, strings, times); `OutOfMemory`; `NotFound` or `Error` for a missing
/// device; `Unsupported`, also for `rdma=True` on a device without support, on WSL2 and on host memory.
#[pyfunction]
#[pyo3(signature = (shape, dtype=None, *, device=None, backend=None, rdma=RdmaOption(Rdma::Auto)), text_signature = "(shape, dtype='float64', *, device=None, backend=None, rdma='auto')")]
pub(crate) fn empty(
    py: Python<'_>,
    shape: &Bound<'_, PyAny>,
    dtype: Option<&Bound<'_, PyAny>>,
    device: Option<Wanted>,
    backend: Option<Text>,
    rdma: RdmaOption,
) -> Outcome<Array> {
    let float64 = PyString::intern(py, "float64");
    let dtype = dtype.unwrap_or(&float64);
    create(py, shape, dtype, device, backend, |size| Spec::vmm(size).rdma(rdma.0).into())
}

/// Creates an `Array` in new shared memory, filled with zeros.
///
/// The arguments are those of `empty`: `shape` (int, or a sequence of int), `dtype`, `device` (int, str or `Device`), `backend` (str or
/// None) and `rdma`. Blocks, with the GIL released. Raises as `empty`.
#[pyfunction]
#[pyo3(signature = (shape, dtype=None, *, device=None, backend=None, rdma=RdmaOption(Rdma::Auto)), text_signature = "(shape, dtype='float64', *, device=None, backend=None, rdma='auto')")]
pub(crate) fn zeros(
    py: Python<'_>,
    shape: &Bound<'_, PyAny>,
    dtype: Option<&Bound<'_, PyAny>>,
    device: Option<Wanted>,
    backend: Option<Text>,
    rdma: RdmaOption,
) -> Outcome<Array> {
    let array = empty(py, shape, dtype, device, backend, rdma)?;
    // The kernel zeroes new host memory.
    if !array.is_host() {
        signals::run(py, &[], || copy::zero(&**array.memory()))?;
    }
    Ok(array)
}

/// Creates an array in new memory. `spec` specifies an allocation of the given size, which is at least 1.
pub(crate) fn create(
    py: Python<'_>,
    shape: &Bound<'_, PyAny>,
    dtype: &Bound<'_, PyAny>,
    device: Option<Wanted>,
    backend: Option<Text>,
    spec: impl FnOnce(u64) -> Spec + Send,
) -> Outcome<Array> {
    let descriptor = ArrayDescriptor::new(dtype::extract(dtype)?, array::shape(shape)?, Order::C)?;
    let size = descriptor.bytes()?.max(1);
    signals::run(py, &[], || {
        Array::new(Owned::make(&driver::open_device(backend.as_deref(), device)?, spec(size))?, descriptor)
    })
}

/// Copies an array of another library into new shared memory, in C order. Returns an `Array`.
///
/// `object` supports the buffer protocol, NumPy's array interface, DLPack or the CUDA array interface; or it is a NumPy scalar, or an
/// `Array`, which is copied too. On CUDA the copy is on the array's device, or on `device` (int, str or `Device`). `backend` (str or None)
/// is as for `empty`. Blocks, with the GIL released, until the copy is complete. Raises as `empty`, `TypeError` for an object that is not an
/// array, and `Invalid` for a GPU array with the host backend.
#[pyfunction]
#[pyo3(signature = (object, *, device=None, backend=None))]
pub(crate) fn asarray(
    py: Python<'_>,
    object: &Bound<'_, PyAny>,
    device: Option<Wanted>,
    backend: Option<Text>,
) -> Outcome<Array> {
    like(py, object, device, backend, true)
}

/// Creates an `Array` of the shape, type and device of another array in new shared memory. Contents are undefined.
///
/// The arguments are those of `asarray`: `object`, `device` (int, str or `Device`) and `backend` (str or None). Returns an `Array`, in C
/// order. Raises as `asarray`.
#[pyfunction]
#[pyo3(signature = (object, *, device=None, backend=None))]
pub(crate) fn empty_like(
    py: Python<'_>,
    object: &Bound<'_, PyAny>,
    device: Option<Wanted>,
    backend: Option<Text>,
) -> Outcome<Array> {
    like(py, object, device, backend, false)
}

fn like(
    py: Python<'_>,
    object: &Bound<'_, PyAny>,
    device: Option<Wanted>,
    backend: Option<Text>,
    copied: bool,
) -> Outcome<Array> {
    let source = source::of(object)?;
    let made = signals::run(py, &[], || {
        let driver = driver::driver(backend.as_deref())?;
        let wanted = device.map(|Wanted(selector)| selector).or(source.selector(&driver));
        let descriptor = source.descriptor()?;
        let memory = Owned::create(&driver::device(&driver, wanted)?, descriptor.bytes()?)?;
        if copied {
            source.copy_into(&*memory, &descriptor)?;
        }
        Array::new(memory, descriptor)
    });
    drop(source);
    made
}
