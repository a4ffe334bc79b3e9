//! `consume`: imports a buffer, verifies it and reports the result.

use std::{ops::Range, path::PathBuf};

use clap::Args;
use vmmfd::{
    channel::{Cancel, socket_path},
    driver::{Access, Choice},
    memory::Selector,
    session::{
        Event,
        handoff::{self, Request},
        start,
    },
};

use super::{
    Console, Exit, Meet, Output, Session, leave_open,
    options::target_parser,
    parse_range,
    values::{ACCESS, CHOICE, ENGINE},
};
use crate::check::{self, DataVerifier, files::Target, pattern::EngineChoice};

/// Imports a buffer from a producer and verifies it.
///
/// Waits for the producer if it is started first.
#[derive(Debug, Args)]
pub struct Consume {
    /// Range of bytes, with or without units, such as 4MiB:1MiB; of a buffer in chunks, only the chunks of the range are sent and mapped
    /// [default: all]
    #[arg(long, value_name = "OFFSET:LENGTH", value_parser = parse_range, help_heading = "Buffer")]
    range: Option<Range<u64>>,

    /// File for the bytes, created only after they are verified
    #[arg(long, value_name = "FILE", value_parser = target_parser(), help_heading = "Buffer")]
    to: Option<PathBuf>,

    /// Replace the file if it exists
    #[arg(long, requires = "to", help_heading = "Buffer")]
    force: bool,

    /// Engine that checks the pattern
    #[arg(long, value_name = "ENGINE", value_parser = ENGINE, default_value = "auto", help_heading = "Buffer")]
    verify: EngineChoice,

    /// Backend of the memory; the producer must use the same
    #[arg(long, value_name = "BACKEND",
        value_parser = CHOICE, env = "VMMFD_BACKEND", default_value = "auto", help_heading = "Sharing")]
    backend: Choice,

    /// Device to map the memory on, if it can access it; a UUID may be abbreviated [default: the device of the memory]
    #[arg(long, value_name = "ORDINAL|UUID", help_heading = "Sharing")]
    device: Option<Selector>,

    /// Access of the mapping [default: rw in a round trip, else ro]
    #[arg(long, value_name = "ACCESS", value_parser = ACCESS, help_heading = "Sharing")]
    access: Option<Access>,

    #[command(flatten)]
    meet: Meet,

    #[command(flatten)]
    output: Output,
}

impl Session for Consume {
    const ROLE: &'static str = "consumer";

    fn output(&self) -> &Output {
        &self.output
    }

    fn run(&self, console: &Console, cancel: &Cancel) -> anyhow::Result<Exit> {
        let path = socket_path(self.meet.socket.as_deref())?;
        let observer = |event: Event<'_>| console.event(event);
        // Create the file before connecting: if it can't be written, the producer sends nothing.
        let target = self.to.as_deref().map(|file| Target::create(file, self.force)).transpose()?;
        let opened = start(self.backend, cancel, &observer)?;
        leave_open(&opened.driver);
        let config = self.meet.config(cancel);
        let mut request = Request::default();
        (request.access, request.range) = (self.access, self.range.clone());
        let steps = |event: check::Event<'_>| console.check(event);
        let mut verifier = DataVerifier::new(&steps).with_engine(self.verify).with_target(target);
        console.invite(self.meet.timeout, self.meet.peer_command("producer", self.backend));
        console.wait_for(&format!("a producer at {}", path.display()));
        let findings = handoff::fetch(&opened.driver, self.device, &path, &request, &mut verifier, &config, &observer)?;
        console.findings(&findings);
        Ok(if findings.verified() { Exit::Verified } else { Exit::Mismatch })
    }
}
