//! What the commands are made of: their options, the doctor, and what the demonstration writes and checks.
//!
//! It is a library for the project's own benchmarks and tests. Nothing in it is kept stable for other programs.

#![doc(hidden)]
#![allow(missing_docs, reason = "it is no interface")]

pub mod check;
pub mod child;
pub mod cli;
pub mod conform;
pub mod doctor;
pub mod error;
mod exporter;
pub mod line;
pub mod schema;
pub mod stamp;
pub mod temporary;
pub mod units;
pub mod verbs;
