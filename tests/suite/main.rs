//! The tests that need more than one module: each file is about one thing and named for it.

mod commands;
mod contract;
mod conversation;
mod cuda_library;
mod fakecuda;
mod host_memory;
#[cfg(feature = "launch")]
mod launch;
mod options;
mod reach;
mod readme;
mod running;
mod sharing;
mod support;
mod users;
