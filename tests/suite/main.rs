//! The tests that need more than one module: each file is about one thing and named for it.

mod contract;
mod support;
