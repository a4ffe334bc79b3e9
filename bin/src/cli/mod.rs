//! The commands: options, output, signals and exit codes.
//!
//! Not a stable interface for other programs.

mod broker;
mod console;
mod consume;
mod describe;
mod devices;
mod doctor;
mod examples;
mod exit;
mod laboratory;
mod layout;
mod log;
mod options;
mod output;
mod pages;
mod prelude;
mod produce;
mod report;
mod root;
mod run;
mod schema;
mod stream;
mod suspend;
mod values;

pub use self::{
    console::Console,
    consume::Consume,
    exit::{EXIT_CODES, Exit},
    layout::{Column, Table, stdout_width},
    options::{parse_size, parse_timeout, parse_uid},
    output::{Output, Progress, json_line, print_now},
    produce::Produce,
    root::{main, main_of, main_of_tool},
    run::{Running, Session, Tool, ToolOutput, raise_file_limit},
    values::BACKEND,
};
use self::{
    options::{Allocate, ArrayOptions, Extent, Fetch, Meet, parse_salt},
    run::leave_open,
};
