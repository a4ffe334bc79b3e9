//! The implementation of the commands: options, doctor, and the content that they write and check.
//!
//! A library for the project's benchmarks and tests. It has no stable API.

#![doc(hidden)]
#![allow(missing_docs, reason = "it is no interface")]

pub mod check;
pub mod child;
pub mod cli;
pub mod doctor;
pub mod error;
pub mod line;
pub mod schema;
pub mod stamp;
pub mod temporary;
pub mod units;
pub mod verbs;
