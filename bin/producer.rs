//! `producer`: fills a buffer and shares it.

use std::process::ExitCode;

use clap::Parser;
use vmmfd::{
    channel::{Cancel, Listener, socket_path},
    cli::{self, Command, Common, Console, Exit, parse_elements, parse_salt, parse_size},
    error::Error,
    memory::{Device, Selector},
    session::{
        Event,
        producer::{self, Buffer, Plan},
        start,
    },
};

/// Fills a buffer with a pattern and shares it with consumers, who verify it.
#[derive(Debug, Parser)]
#[command(name = "producer", version, after_help = cli::EXIT_CODES)]
struct Options {
    #[command(flatten)]
    common: Common,

    /// Device to allocate on
    #[arg(long, value_name = "ORDINAL|UUID", default_value = "0")]
    device: Selector,

    /// Size of the buffer: bytes, or with a unit of powers of 1024, as 64MiB, 64M or 1.5GiB [default: 1MiB]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    size: Option<u64>,

    /// Size of the buffer in 32-bit words
    #[arg(long, value_name = "N", value_parser = parse_elements, conflicts_with = "size")]
    elements: Option<u64>,

    /// Salt of the pattern, 32 bits, decimal or 0x; 0 is the classic pattern [default: random]
    #[arg(long, value_name = "SALT", value_parser = parse_salt)]
    seed: Option<u32>,

    /// How many consumers to serve, at the same time if they come at the same time; 0: until a signal
    #[arg(long, value_name = "N", default_value_t = 1)]
    consumers: u64,

    /// Give each consumer the buffer to itself, have it write a reply, and verify that
    #[arg(long)]
    round_trip: bool,

    /// Flip one byte after filling: both sides must report it
    #[arg(long)]
    corrupt: bool,
}

const DEFAULT_SIZE: u64 = 1 << 20;

impl Command for Options {
    const ROLE: &'static str = "producer";

    fn common(&self) -> &Common {
        &self.common
    }

    fn run(&self, console: &Console, cancel: &Cancel) -> Result<Exit, Error> {
        let observer = |event: Event<'_>| console.event(event);
        let path = socket_path(self.common.socket.as_deref())?;
        Listener::check_free(&path)?;
        let terms = self.common.terms(cancel);
        let opened = start(self.common.backend, cancel, &observer)?;
        let device = Device::find(&opened.driver, self.device)?;
        let size = self.size.or(self.elements).unwrap_or(DEFAULT_SIZE);
        let salt = self.seed.unwrap_or_else(rand::random);
        let buffer = Buffer::create(&device, size, salt, self.corrupt, cancel, &observer)?;
        let listener = Listener::bind(&path, !terms.trust.uids.is_empty(), terms.timeout, cancel)?;
        let plan = Plan { consumers: self.consumers, round_trip: self.round_trip };
        let mut served = Vec::new();
        let result = producer::serve(listener, &buffer, plan, &terms, &observer, &mut served);
        console.served(&served);
        Exit::of_service(result, served, self.consumers == 0)
    }
}

fn main() -> ExitCode {
    cli::main::<Options>()
}
