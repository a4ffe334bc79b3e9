//! Tests whether this machine can share GPU memory between processes, and explains failures.
//!
//! Probes produce a [`DoctorReport`]. See [`report`] for its fields, [`rules`] for causes and remedies, and [`text`] for the output. The
//! probes of each device run in a child process. If a probe hangs or crashes its process, the remaining probes run in a new process: see
//! [`run`].

mod child;
mod context;
mod control;
mod endpoint;
pub mod environment;
mod error_details;
mod meeting;
mod outcome;
mod peer_process;
mod probe;
mod probes;
mod read;
pub mod report;
pub mod rules;
mod runner;
mod sharing;
mod task;
pub mod text;
mod verdict;

pub use self::child::run_task;
pub use self::{
    environment::Environment,
    error_details::{ErrorDetails, Reason},
    meeting::{Meeting, MeetingRole, meet},
    probe::{Probe, Scope},
    probes::PROBES,
    read::read,
    report::{DeviceReport, DoctorReport, Finding, PairReport, Status},
    runner::{DoctorPlan, Observer, Progress, run},
};
