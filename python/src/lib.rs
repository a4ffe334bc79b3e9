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
mod closing;
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
mod lazy;
mod lease;
mod leased_memory;
mod legacy;
mod memory;
mod order;
mod pool;
mod publisher;
mod reaper;
mod requests;
mod share;
mod shared;
mod signals;
mod source;
mod stream_user;
mod streams;
mod subscriber;
mod suspend;
mod text;
mod time;
mod topics;
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
mod native {
    #[pymodule_export]
    use crate::{
        array::Array,
        array_new::{asarray, empty, empty_like, zeros},
        client::Client,
        device::PyDevice,
        devices::{activate, device_uuid, devices, same_device},
        dtype::name,
        handoff::{serve, take},
        interpreter::check_interpreter,
        lease::{Claim, Lease, Prepared, origin},
        legacy::{OpenedHandle, legacy_empty, legacy_handle, legacy_open},
        order::Timeline,
        pool::PyPool,
        publisher::Publisher,
        settle,
        share::share,
        shared::{PyMemory, digest_of},
        signals::Stop,
        streams::Buffer,
        subscriber::{OnStream, Subscriber},
        topics::TopicFollower,
        torch_pool::{
            check_read_only, make_read_only, torch_pool_close, torch_pool_figures, torch_pool_find,
            torch_pool_last_error, torch_pool_open,
        },
        watch::Watch,
        weights::{Weights, load_safetensors},
    };

    #[pymodule_export]
    #[allow(non_upper_case_globals, reason = "Python's name")]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
