//! `producer`: fills a buffer and shares it.

use std::process::ExitCode;

use clap::Parser;
use vmmfd::{
    channel::{Cancel, Listener, socket_path},
    memory::{Device, Mechanism, Placement, Selector},
    session::{
        Event,
        handoff::{self, Buffer, ServeOptions},
        start,
    },
    tools::check::{self, Exercise},
    tools::cli::{self, Command, Common, Console, Exit, Extent, parse_salt, parse_size, sharing},
};

/// Fills a buffer with a pattern or a file and shares it with consumers, which verify it.
#[derive(Debug, Parser)]
#[command(name = "producer", version, after_help = cli::EXIT_CODES)]
struct Options {
    #[command(flatten)]
    common: Common,

    /// Device to allocate on
    #[arg(long, value_name = "ORDINAL|UUID", default_value = "0")]
    device: Selector,

    #[command(flatten)]
    extent: Extent,

    /// How to share it: `vmm` (virtual memory management, a descriptor for each allocation), `pool` (a memory pool's descriptor
    /// and a handle of 64 bytes) or `legacy` (cuIpcMemHandle, 64 bytes). The consumer uses the same
    #[arg(long, value_name = "vmm|pool|legacy", default_value = "vmm")]
    mechanism: Mechanism,

    /// Memory to allocate: the device's, or the host's next to it (host-NUMA memory, which both the CPU and the GPU access)
    #[arg(long, value_name = "device|host", default_value = "device")]
    location: Placement,

    /// Allocate it in chunks of this size, mapped side by side; rounded up like sizes [default: one allocation]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    chunk: Option<u64>,

    /// Offer it read-only after filling it. Host memory is sealed against every holder of its descriptor; a GPU's is read-only
    /// by agreement, since its descriptor grants full access
    #[arg(long, conflicts_with = "round_trip")]
    seal: bool,

    /// Salt of the pattern, 32 bits, decimal or 0x; 0 is the classic pattern [default: random]
    #[arg(long, value_name = "SALT", value_parser = parse_salt)]
    seed: Option<u32>,

    /// Consumers to serve, concurrently if they connect at the same time; 0: until a signal
    #[arg(long, value_name = "N", default_value_t = 1)]
    consumers: u64,

    /// Serve one consumer at a time, which writes a reply, and verify the reply
    #[arg(long)]
    round_trip: bool,

    /// Flip one byte after filling, which both sides must report
    #[arg(long)]
    corrupt: bool,
}

impl Command for Options {
    const ROLE: &'static str = "producer";

    fn common(&self) -> &Common {
        &self.common
    }

    fn run(&self, console: &Console, cancel: &Cancel) -> anyhow::Result<Exit> {
        let observer = |event: Event<'_>| console.event(event);
        let (source, size, array) = self.extent.resolve()?;
        console.array(array.as_ref());
        let path = socket_path(self.common.socket.as_deref())?;
        Listener::check_free(&path)?;
        let config = self.common.config(cancel);
        let opened = start(self.common.backend, cancel, &observer)?;
        cli::leave_open(&opened.driver);
        let device = Device::find(&opened.driver, self.device)?;
        let spec = sharing(&device, size, self.mechanism, self.location, self.chunk)?;
        let spec = if self.seal { spec.sealed() } else { spec };
        let steps = |event: check::Event<'_>| console.check(event);
        let content = match source {
            Some(source) => Exercise::file(source, &steps),
            None => Exercise::pattern(self.seed.unwrap_or_else(rand::random), &steps),
        };
        let content = content.with_engine(self.common.verify).with_corruption(self.corrupt);
        let buffer = Buffer::create(&device, spec, content, array, &config, &observer)?;
        let listener = Listener::bind(&path, !config.trust.uids.is_empty(), config.timeout, cancel)?;
        let options = ServeOptions::default().with_consumers(self.consumers).with_round_trip(self.round_trip);
        let report = handoff::serve(listener, &buffer, &options, &config, &observer);
        console.served(&report.served);
        Ok(Exit::of_service(report, self.consumers == 0)?)
    }
}

fn main() -> ExitCode {
    cli::main::<Options>()
}
