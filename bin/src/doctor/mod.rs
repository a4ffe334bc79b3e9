//! Whether this machine can share GPU memory between processes, and if not, why not: found out by trying.
//!
//! Probes make a [`DoctorReport`], which is printed after it is made. See [`report`] for its fields, [`rules`] for the causes and
//! remedies, and [`text`] for the output. The probes of each device run in a child process, which is replaced when one of them
//! hangs or kills it: see [`run`].

mod child;
mod clean;
mod conclude;
mod context;
mod control;
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
