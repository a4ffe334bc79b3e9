//! The native extension of the Python package `vmmfd`: memory, arrays and the broker client as Python classes.
//!
//! Each file has one class or one job. All build on `memory`: Rust alone owns an array's bytes, so that they can be released on any thread,
//! with or without the GIL, and during interpreter shutdown.

mod array;
mod array_index;
mod array_methods;
mod array_new;
mod buffer;
mod client;
mod client_put;
mod connections;
mod copy;
mod device;
mod devices;
mod dlpack;
mod driver;
mod dtype;
mod error;
mod handoff;
mod interpreter;
mod json;
mod lease;
mod leased_memory;
mod legacy;
mod memory;
mod pool;
mod reaper;
mod requests;
mod shared;
mod signals;
mod source;
mod time;
mod torch_pool;
mod waiting;
mod walk;
mod watch;
mod weights;

use std::time::Duration;

use pyo3::prelude::*;

/// Waits until dropped memory is released. Returns False after `timeout` seconds.
#[pyfunction(name = "_settle")]
fn settle(py: Python<'_>, timeout: f64) -> bool {
    let timeout = Duration::try_from_secs_f64(timeout).unwrap_or_default();
    py.detach(|| reaper::settle(timeout))
}

// Nothing here relies on the GIL, so importing this module into a free-threaded Python does not enable it.
#[pymodule(name = "_native", gil_used = false)]
fn native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    // Arrays
    module.add_class::<array::Array>()?;
    module.add_class::<device::PyDevice>()?;
    module.add_class::<shared::PyMemory>()?;
    module.add_function(wrap_pyfunction!(array_new::empty, module)?)?;
    module.add_function(wrap_pyfunction!(array_new::asarray, module)?)?;
    module.add_function(wrap_pyfunction!(devices::devices, module)?)?;
    module.add_function(wrap_pyfunction!(devices::activate, module)?)?;
    module.add_function(wrap_pyfunction!(devices::device_uuid, module)?)?;
    module.add_function(wrap_pyfunction!(devices::same_device, module)?)?;
    module.add_function(wrap_pyfunction!(dtype::name, module)?)?;
    module.add_function(wrap_pyfunction!(settle, module)?)?;
    module.add_function(wrap_pyfunction!(handoff::serve, module)?)?;
    module.add_function(wrap_pyfunction!(handoff::take, module)?)?;
    module.add_function(wrap_pyfunction!(legacy::empty, module)?)?;
    module.add_function(wrap_pyfunction!(legacy::handle, module)?)?;
    module.add_function(wrap_pyfunction!(legacy::open, module)?)?;
    module.add_class::<legacy::OpenedHandle>()?;
    module.add_class::<pool::PyPool>()?;
    // Broker
    module.add_class::<client::Client>()?;
    module.add_class::<lease::Lease>()?;
    module.add_class::<lease::Prepared>()?;
    module.add_class::<lease::Claim>()?;
    module.add_class::<watch::Watch>()?;
    module.add_class::<signals::Stop>()?;
    module.add_function(wrap_pyfunction!(lease::origin, module)?)?;
    module.add_function(wrap_pyfunction!(interpreter::check_interpreter, module)?)?;
    // PyTorch
    module.add_function(wrap_pyfunction!(torch_pool::torch_pool_open, module)?)?;
    module.add_function(wrap_pyfunction!(torch_pool::torch_pool_find, module)?)?;
    module.add_function(wrap_pyfunction!(torch_pool::torch_pool_close, module)?)?;
    module.add_function(wrap_pyfunction!(torch_pool::torch_pool_figures, module)?)?;
    module.add_function(wrap_pyfunction!(torch_pool::torch_pool_last_error, module)?)?;
    module.add_function(wrap_pyfunction!(torch_pool::make_read_only, module)?)?;
    module.add_function(wrap_pyfunction!(torch_pool::check_read_only, module)?)?;
    module.add_function(wrap_pyfunction!(shared::digest_of, module)?)?;
    // Weights
    module.add_class::<weights::Weights>()?;
    module.add_function(wrap_pyfunction!(weights::load_safetensors, module)?)?;
    Ok(())
}
