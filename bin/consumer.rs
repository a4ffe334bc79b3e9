//! `consumer`: imports a buffer from a producer, verifies it and reports the result.

use std::{ops::Range, path::PathBuf, process::ExitCode};

use clap::Parser;
use vmmfd::{
    channel::{Cancel, socket_path},
    driver::Access,
    memory::Selector,
    session::{
        Event,
        handoff::{self, Request},
        start,
    },
    tools::check::{self, DataVerifier, files::Target},
    tools::cli::{self, Command, Common, Console, Exit, parse_range},
};

/// Imports a buffer from a producer, verifies it and reports the result.
///
/// It may be started before the producer, and waits for it.
#[derive(Debug, Parser)]
#[command(name = "consumer", version, after_help = cli::EXIT_CODES)]
struct Options {
    #[command(flatten)]
    common: Common,

    /// Device to use it on, also another that can access the memory [default: the device that it is on]
    #[arg(long, value_name = "ORDINAL|UUID")]
    device: Option<Selector>,

    /// Access to map it with [default: rw in a round trip, else ro]
    #[arg(long, value_name = "rw|ro")]
    access: Option<Access>,

    /// Range of bytes, with units as in 4MiB:1MiB; of a buffer in chunks only those that cover it are sent and mapped
    /// [default: all]
    #[arg(long, value_name = "OFFSET:LENGTH", value_parser = parse_range)]
    range: Option<Range<u64>>,

    /// File to write the bytes to, created only when they are verified
    #[arg(long, value_name = "FILE")]
    to: Option<PathBuf>,

    /// Replace the file if it exists
    #[arg(long, requires = "to")]
    force: bool,
}

impl Command for Options {
    const ROLE: &'static str = "consumer";

    fn common(&self) -> &Common {
        &self.common
    }

    fn run(&self, console: &Console, cancel: &Cancel) -> anyhow::Result<Exit> {
        let observer = |event: Event<'_>| console.event(event);
        let path = socket_path(self.common.socket.as_deref())?;
        // Before the connection, so that nothing is sent that can't be written.
        let target = self.to.as_deref().map(|file| Target::create(file, self.force)).transpose()?;
        let opened = start(self.common.backend, cancel, &observer)?;
        cli::leave_open(&opened.driver);
        let config = self.common.config(cancel);
        let mut request = Request::default();
        (request.access, request.range) = (self.access, self.range.clone());
        let steps = |event: check::Event<'_>| console.check(event);
        let mut verifier = DataVerifier::new(&steps).with_engine(self.common.verify).with_target(target);
        let findings = handoff::fetch(&opened.driver, self.device, &path, &request, &mut verifier, &config, &observer)?;
        console.findings(&findings);
        Ok(if findings.verified() { Exit::Verified } else { Exit::Mismatch })
    }
}

fn main() -> ExitCode {
    cli::main::<Options>()
}
