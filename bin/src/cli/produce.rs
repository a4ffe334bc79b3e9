//! `produce`: fills a buffer and shares it.

use vmmfd::{
    channel::{Listener, socket_path},
    memory::{Device, Mechanism, Placement},
    session::{
        Event,
        handoff::{self, Buffer, ServeOptions},
        start,
    },
};

use super::{
    Allocate, ArrayOptions, Console, Extent, Meet, Session, leave_open, parse_salt,
    values::{ENGINE, MECHANISM, PLACEMENT},
};
use crate::{
    check::{
        self, Exercise,
        pattern::{EngineChoice, random_salt},
    },
    cli::prelude::*,
};

/// Fills a buffer and shares it with consumers, which verify it.
#[derive(Debug, Args)]
pub struct Produce {
    #[command(flatten)]
    extent: Extent,

    /// Salt of the pattern, 32 bits, decimal or 0x; 0 is the classic pattern [default: random]
    #[arg(long, value_name = "SALT", value_parser = parse_salt, help_heading = "Buffer")]
    seed: Option<u32>,

    /// Flip one byte after the fill: both sides must report it
    #[arg(long, help_heading = "Buffer")]
    corrupt: bool,

    /// Engine that writes and checks the pattern
    #[arg(long, value_name = "ENGINE", value_parser = ENGINE, default_value = "auto", help_heading = "Buffer")]
    verify: EngineChoice,

    #[command(flatten)]
    array: ArrayOptions,

    #[command(flatten)]
    memory: Allocate,

    /// Mechanism that shares the memory; the consumer uses the same
    #[arg(long, value_name = "MECHANISM", value_parser = MECHANISM, default_value = "vmm", help_heading = "Sharing")]
    mechanism: Mechanism,

    /// Location of the memory
    #[arg(long, value_name = "LOCATION", value_parser = PLACEMENT, default_value = "device", help_heading = "Sharing")]
    location: Placement,

    /// Make the memory read-only after the fill. Host memory is sealed for every holder of its descriptor; GPU memory is read-only by
    /// agreement, since its descriptor grants full access
    #[arg(long, conflicts_with = "round_trip", help_heading = "Sharing")]
    seal: bool,

    #[command(flatten)]
    meet: Meet,

    /// Number of consumers, served concurrently; 0 means until a signal
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Meeting")]
    consumers: u64,

    /// Serve one consumer at a time, and verify the reply that it writes
    #[arg(long, help_heading = "Meeting")]
    round_trip: bool,
}

impl Session for Produce {
    const ROLE: &'static str = "producer";

    fn run(&self, console: &Console, cancel: &Cancel) -> anyhow::Result<Exit> {
        let observer = |event: Event<'_>| console.event(event);
        let (source, size, array) = self.extent.resolve(&self.array)?;
        console.array(array.as_ref());
        console.invite(self.meet.timeout, self.meet.peer_command("consumer", self.memory.backend));
        let path = socket_path(self.meet.socket.as_deref())?;
        Listener::check_free(&path)?;
        let config = self.meet.config(cancel);
        let opened = start(self.memory.backend, cancel, &observer)?;
        leave_open(&opened.driver);
        let device = Device::find(&opened.driver, self.memory.device)?;
        let spec = self.memory.spec(&device, size, self.mechanism, self.location)?;
        let spec = if self.seal { spec.sealed() } else { spec };
        let file = source.as_ref().map(|source| format!(" of {}", source.path().display()));
        let typed = array.as_ref().map(|array| format!(", {array},"));
        console.content(file.into_iter().chain(typed).collect());
        let steps = |event: check::Event<'_>| console.check(event);
        let content = match source {
            Some(source) => Exercise::file(source, &steps),
            None => Exercise::pattern(self.seed.map_or_else(random_salt, Ok)?, &steps),
        };
        let content = content.with_engine(self.verify).with_corruption(self.corrupt);
        console.allocating(size);
        let buffer = Buffer::create(&device, spec, content, array, &config, &observer)?;
        let listener = Listener::bind(&path, &config)?;
        let options = ServeOptions::default().consumers(self.consumers).round_trip(self.round_trip);
        let report = handoff::serve(listener, &buffer, &options, &config, &observer);
        console.served(&report.served);
        Ok(Exit::of_service(report, self.consumers == 0)?)
    }
}
