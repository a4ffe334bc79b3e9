//! Tests whether this machine can share GPU memory between processes, and explains failures.
//!
//! Probes produce a [`DoctorReport`]. See [`report`] for its fields, [`rules`] for causes and remedies, and [`text`] for the output. Every
//! driver call runs in a child process with a time limit: see [`run`].

mod context;
pub mod environment;
mod error_details;
mod options;
mod prelude;
mod probes;
mod process;
pub mod report;
pub mod rules;
mod runner;
mod sharing;
pub mod text;
mod verdict;
mod worker;

pub use self::{
    environment::Environment,
    error_details::{ErrorDetails, Reason},
    options::DoctorPlan,
    probes::{Flag, PROBES, Probe, Scope},
    report::{DeviceReport, DoctorReport, Finding, PairReport, Status, read},
    runner::{Observer, run},
    worker::run_task,
};
