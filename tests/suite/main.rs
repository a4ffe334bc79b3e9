//! The tests that need more than one module: each file is about one thing and named for it.

mod contract;
mod cuda_library;
mod fakecuda;
mod host_memory;
mod support;
