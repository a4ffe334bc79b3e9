//! The native half of the Python package `vmmfd`: memory, arrays and the broker's client as Python classes.
//!
//! Each file is one class or one job. Below them all is `memory`: what keeps an array's bytes, owned by Rust alone, so that it can be
//! let go of on any thread, with or without the GIL, and while the interpreter ends.

mod array;
mod copy;
mod device;
mod driver;
mod error;
mod memory;
mod reaper;
mod shared;
mod torch_pool;
mod weights;

use pyo3::prelude::*;

#[pymodule(name = "_native")]
fn native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    // Arrays
    module.add_class::<array::Array>()?;
    module.add_class::<device::PyDevice>()?;
    module.add_class::<shared::Buffer>()?;
    // Broker
    // PyTorch
    module.add_function(wrap_pyfunction!(torch_pool::torch_pool_open, module)?)?;
    module.add_function(wrap_pyfunction!(torch_pool::torch_pool_find, module)?)?;
    module.add_function(wrap_pyfunction!(torch_pool::torch_pool_close, module)?)?;
    module.add_function(wrap_pyfunction!(torch_pool::torch_pool_figures, module)?)?;
    module.add_function(wrap_pyfunction!(torch_pool::torch_pool_trouble, module)?)?;
    module.add_function(wrap_pyfunction!(torch_pool::torch_pool_descriptor, module)?)?;
    module.add_function(wrap_pyfunction!(torch_pool::make_read_only, module)?)?;
    // Weights
    module.add_class::<weights::Weights>()?;
    module.add_function(wrap_pyfunction!(weights::load_safetensors, module)?)?;
    Ok(())
}
