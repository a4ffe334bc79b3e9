//! Can this machine share GPU memory between processes, and if not, why not: found out by doing it.
//!
//! Probes make a [`Report`], which is printed after it is made. See [`report`] for what it holds and [`rules`] for what
//! explains it; [`text`] prints it for people.

pub mod environment;
pub mod report;
pub mod rules;
pub mod text;

pub use self::{
    environment::Environment,
    report::{Finding, Report, Status},
};
