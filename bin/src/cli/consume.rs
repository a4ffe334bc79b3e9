//! `consume`: imports a buffer, verifies it and reports the result.

use vmmfd::{
    channel::socket_path,
    driver::{Access, Choice},
    session::{
        Event,
        handoff::{self, Request},
        start,
    },
};

use super::{
    Console, Fetch, Meet, Session, leave_open,
    values::{ACCESS, CHOICE, ENGINE},
};
use crate::{
    check::{self, DataVerifier, pattern::EngineChoice},
    cli::prelude::*,
};

/// Imports a buffer from a producer and verifies it.
///
/// Waits for the producer if it is started first.
#[derive(Debug, Args)]
pub struct Consume {
    #[command(flatten)]
    fetch: Fetch,

    /// Engine that checks the pattern
    #[arg(long, value_name = "ENGINE", value_parser = ENGINE, default_value = "auto", help_heading = "Buffer")]
    verify: EngineChoice,

    /// Backend of the memory; the producer must use the same
    #[arg(long, value_name = "BACKEND",
        value_parser = CHOICE, env = "VMMFD_BACKEND", default_value = "auto", help_heading = "Sharing")]
    backend: Choice,

    /// Access of the mapping [default: rw in a round trip, else ro]
    #[arg(long, value_name = "ACCESS", value_parser = ACCESS, help_heading = "Sharing")]
    access: Option<Access>,

    #[command(flatten)]
    meet: Meet,
}

impl Session for Consume {
    const ROLE: &'static str = "consumer";

    fn run(&self, console: &Console, cancel: &Cancel) -> anyhow::Result<Exit> {
        let path = socket_path(self.meet.socket.as_deref())?;
        let observer = |event: Event<'_>| console.event(event);
        let target = self.fetch.target()?;
        let opened = start(self.backend, cancel, &observer)?;
        leave_open(&opened.driver);
        let config = self.meet.config(cancel);
        let mut request = Request::default();
        request.access = self.access;
        request.range.clone_from(&self.fetch.range);
        let steps = |event: check::Event<'_>| console.check(event);
        let mut verifier = DataVerifier::new(&steps).with_engine(self.verify).with_target(target);
        console.invite(self.meet.timeout, self.meet.peer_command("producer", self.backend));
        console.wait_for(&format!("a producer at {}", path.display()));
        let findings =
            handoff::fetch(&opened.driver, self.fetch.device, &path, &request, &mut verifier, &config, &observer)?;
        console.findings(&findings);
        Ok(if findings.verified() { Exit::Verified } else { Exit::Mismatch })
    }
}
