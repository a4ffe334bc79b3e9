//! The names that most commands use.

pub(super) use crate::{
    cli::{
        Exit, Running, Tool, ToolOutput,
        exit::exit_codes,
        options::parse_timeout,
        report::{ErrorSummary, Stamped},
    },
    schema::{Named, document},
};
pub(super) use clap::Args;
pub(super) use schemars::JsonSchema;
pub(super) use serde::Serialize;
pub(super) use std::{path::PathBuf, time::Duration};
pub(super) use vmmfd::{
    channel::Cancel,
    driver::Backend,
    error::{Error, Result},
};
