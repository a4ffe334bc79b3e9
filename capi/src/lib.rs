//! The C library `libvmmfd`: handles, errors and functions for programs in C and in every language that can call C.
//!
//! `capi/include/vmmfd.h` is generated from this source. docs/c.md describes the library for its users.
//!
//! - A handle is a number in the type of a pointer. It is never dereferenced, and never used again for another object, so a handle that was
//!   freed, has another type or comes from a parent process is an error.
//! - References in the functions' parameters are valid pointers of the caller, or null. Texts, buffers and lists are read in [`argument`].
//! - [`error::run`] surrounds every function: no panic reaches C.

#![allow(unsafe_code, reason = "C passes pointers")]
#![allow(non_camel_case_types, reason = "the names of C")]
#![allow(
    clippy::not_unsafe_ptr_arg_deref,
    reason = "C has no unsafe functions: the header states the duties of callers"
)]

mod argument;
pub mod array;
pub mod broker;
pub mod device;
pub mod error;
pub mod format;
pub mod get;
mod handle;
pub mod handoff;
pub mod lease;
mod leased;
pub mod library;
pub mod listing;
pub mod memory;
mod owned;
pub mod publisher;
mod put;
pub mod recall;
pub mod subscriber;
pub mod timeline;
mod versioned;
pub mod watch;
