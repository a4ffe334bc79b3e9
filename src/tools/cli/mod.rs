//! The commands: their options, the shape of a run, exit codes.
//!
//! The commands are parts of this package and not of its interface: nothing here is kept stable for other programs.

mod bench;
mod broker;
mod conform;
mod console;
mod consume;
mod describe;
mod devices;
mod doctor;
mod exit;
mod log;
mod options;
mod output;
mod pages;
mod produce;
mod report;
mod root;
mod run;
mod values;

pub use self::{
    console::Console,
    consume::Consume,
    exit::{EXIT_CODES, Exit},
    produce::Produce,
    root::{main, main_of},
    run::Session,
};
use self::{
    options::{ArrayOptions, Extent, Meet, parse_range, parse_salt, parse_size, parse_target, sharing},
    output::Output,
    run::{Tool, ToolOutput, leave_open, raise_file_limit},
};
