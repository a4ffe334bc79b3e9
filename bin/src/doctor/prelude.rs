//! The names that most probes use.

pub(super) use crate::{
    doctor::{
        Environment, ErrorDetails, Finding, Status,
        context::ProbeContext,
        report::{ProbeResult, failed, ok},
    },
    line::Line,
    verbs::HasVerbs,
};
pub(super) use serde::Serialize;
pub(super) use std::{
    path::Path,
    time::{Duration, Instant},
};
pub(super) use vmmfd::{
    driver::Backend,
    error::{Error, PeerError, Result},
    memory::Device,
};
