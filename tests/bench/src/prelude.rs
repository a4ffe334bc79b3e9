//! The names that most groups use.

pub(crate) use crate::{
    process::{Peer, Request, Way, not_prepared, now, open_device, us},
    report::About,
    run::Run,
};
pub(crate) use std::{
    os::fd::AsFd,
    thread,
    time::{Duration, Instant},
};
pub(crate) use vmmfd::{
    channel::Cancel,
    driver::Backend,
    error::{Error, Result},
    memory::{Device, Region, Shared, Spec},
};
pub(crate) use vmmfd_cli::{units::about, verbs::HasVerbs};
