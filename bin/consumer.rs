//! `consumer`: takes a buffer from a producer, verifies it and acknowledges.

use std::process::ExitCode;

use clap::Parser;
use vmmfd::{
    channel::{Cancel, socket_path},
    cli::{self, Command, Common, Console, Exit},
    driver::Access,
    error::Error,
    memory::Selector,
    session::{Event, consumer, start},
};

/// Takes a buffer from a producer, verifies it and acknowledges.
///
/// It may be started before the producer, and waits for it.
#[derive(Debug, Parser)]
#[command(name = "consumer", version, after_help = cli::EXIT_CODES)]
struct Options {
    #[command(flatten)]
    common: Common,

    /// Device that the buffer must be on [default: the one it is on]
    #[arg(long, value_name = "ORDINAL|UUID")]
    device: Option<Selector>,

    /// Access to map it with [default: what the producer asks: rw in a round trip, else ro]
    #[arg(long, value_name = "rw|ro")]
    access: Option<Access>,
}

impl Command for Options {
    const ROLE: &'static str = "consumer";

    fn common(&self) -> &Common {
        &self.common
    }

    fn run(&self, console: &Console, cancel: &Cancel) -> Result<Exit, Error> {
        let observer = |event: Event<'_>| console.event(event);
        let path = socket_path(self.common.socket.as_deref())?;
        let opened = start(self.common.backend, cancel, &observer)?;
        let terms = self.common.terms(cancel);
        let findings = consumer::fetch(&opened.driver, self.device, &path, self.access, &terms, &observer)?;
        let outcome = findings.outcome();
        console.found(&outcome);
        Ok(if outcome.verified { Exit::Verified } else { Exit::Mismatch })
    }
}

fn main() -> ExitCode {
    cli::main::<Options>()
}
