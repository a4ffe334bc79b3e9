//! `sub`: receives the buffers of `pub` and verifies them.

use std::time::Instant;

use vmmfd::{
    error::PeerError,
    memory::Region,
    session::stream::{MAX_HELD, MAX_QUEUE, Policy, Received, Sample, SubscribeOptions, Subscriber},
    topic::{Change, Follower, Topics, Update},
};

use super::{Durations, Place, Quantiles, StreamOptions, load_kernels, pattern, sleep_until, spelled};
use crate::{
    check::pattern::{EngineChoice, Verification},
    cli::{describe::first_words, output::Progress, prelude::*},
    units::{about, count},
};

/// Receives buffers from `vmmfd pub` and verifies every byte
///
/// Waits for the publisher if it is started first. Runs until the publisher ends, until --count buffers are received, or until SIGINT or
/// SIGTERM. A buffer is torn if it was changed while this command had it, or if it is another buffer than its number says.
#[derive(Debug, Args)]
#[command(after_help = exit_codes!("received, or without --count stopped by a signal", "a buffer was torn"; 2 3 4 5 130))]
pub(in super::super) struct SubOptions {
    /// What happens to buffers for which this command has no room: `latest` keeps the newest, `queue:N` the newest N, and `every` lets the
    /// publisher wait
    #[arg(long, value_name = "POLICY", value_parser = parse_policy, default_value = "latest", help_heading = "Buffer")]
    policy: Policy,

    /// Most buffers that this command has at a time: received, or on their way
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=MAX_HELD as i64), default_value = "1",
        help_heading = "Buffer")]
    held: u16,

    /// Most earlier buffers to receive at once
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Buffer")]
    history: u16,

    /// How long to keep each buffer before it is verified: 500ms, 30s, 2m [default: not at all]
    #[arg(long, value_name = "DURATION", value_parser = parse_timeout, help_heading = "Buffer")]
    work: Option<Duration>,

    #[command(flatten)]
    stream: StreamOptions,
}

fn parse_policy(text: &str) -> Result<Policy, String> {
    let length = |text: &str| text.parse().ok().filter(|length| (1..=MAX_QUEUE).contains(&u64::from(*length)));
    match (text, text.strip_prefix("queue:").and_then(length)) {
        ("latest", _) => Ok(Policy::Latest),
        ("every", _) => Ok(Policy::Every),
        (_, Some(length)) => Ok(Policy::Queue(length)),
        _ => Err(format!("`{text}` is not a policy: write latest, every, or queue:N with 1 to {MAX_QUEUE} for N")),
    }
}

#[derive(Debug, Serialize, JsonSchema)]
struct SubReport {
    backend: Backend,
    /// The publisher's process. Null for a topic, whose publisher may change.
    publisher: Option<i32>,
    delivered: u64,
    /// The publications between the first and the last delivered buffer that were not delivered.
    skipped: u64,
    torn: u64,
    /// Buffers per second.
    rate: f64,
    /// The time from a publication to its receipt.
    latency_us: Quantiles,
    /// The error that the command exits with.
    error: Option<ErrorSummary>,
}

#[derive(Debug, Default)]
struct Tally {
    skipped: u64,
    latency: Durations,
    torn: u64,
    /// The first torn buffer.
    first: Option<(u64, Verification)>,
}

impl SubOptions {
    fn receive(&self, from: &Source, tally: &mut Tally, cancel: &Cancel, progress: &Progress) -> Result<()> {
        while self.stream.count != Some(tally.latency.count) {
            let Some((epoch, sample)) = from.receive(self.stream.timeout)? else { return Ok(()) };
            let age = sample.age();
            if tally.latency.count == 0 {
                load_kernels(sample.device());
            }
            // The check comes last: a publisher that reuses the buffer too early is found out.
            self.work.map_or(Ok(()), |work| sleep_until(cancel, Instant::now() + work))?;
            let (number, size) = (sample.number(), sample.size());
            let pattern = pattern(epoch, number);
            let (found, _) = EngineChoice::Auto.verify(&sample, 0, 0..size, pattern, &mut |_| cancel.check())?;
            if !found.passed() {
                tally.torn += 1;
                tally.first.get_or_insert((number, found));
            }
            tally.skipped += sample.skipped_before();
            tally.latency.add(age);
            sample.give_back()?;
            progress.status(|| {
                let Tally { latency, skipped, torn, .. } = &*tally;
                format!("{} received, {:.1} per second, {skipped} skipped, {torn} torn", latency.count, latency.rate())
            });
        }
        Ok(())
    }
}

/// Where buffers come from.
enum Source {
    Publisher(Box<Subscriber>),
    Topic(Follower),
}

impl Source {
    /// The next buffer, with the epoch of its publisher. `None` after the end of the stream.
    fn receive(&self, timeout: Duration) -> Result<Option<(u64, Sample)>> {
        match self {
            Self::Publisher(from) => match from.receive(timeout)? {
                Received::Sample(sample) => Ok(Some((from.epoch(), sample))),
                Received::Crashed(peer) => Err(PeerError::Gone { pid: peer.pid, purpose: "for a buffer" }.into()),
                _ => Ok(None),
            },
            Self::Topic(from) => loop {
                let Update { epoch, change, topic, .. } = from.receive(timeout)?;
                match change {
                    Change::Sample(sample) => return Ok(Some((epoch, sample))),
                    Change::Ended => return Ok(None),
                    Change::Failed(error) => return Err(error),
                    Change::Crashed(peer) => {
                        tracing::warn!(%topic, pid = peer.pid, "the publisher is gone: waiting for another");
                    }
                    _ => {}
                }
            },
        }
    }
}

impl Tool for SubOptions {
    const NAME: &'static str = "sub";

    const REPORTS: &'static [Named] = &[("sub", document::<Stamped<SubReport>>)];

    fn run(&self, Running { output, cancel, progress }: Running<'_>) -> anyhow::Result<ToolOutput> {
        let place = self.stream.place(cancel)?;
        let driver = self.stream.start(output, cancel)?;
        let options = SubscribeOptions::default().policy(self.policy).held(self.held).history(self.history);
        let wait = output.notice_wait(format!("waiting for a publisher at {place}"));
        let config = self.stream.config(cancel);
        let from = match &place {
            Place::Socket(path) => {
                let device = self.stream.device;
                Source::Publisher(Box::new(Subscriber::connect(&driver, device, path, &options, &config)?))
            }
            Place::Topic(client, topic) => {
                let topic = Topics::Named(topic);
                Source::Topic(Follower::new(client, topic, &driver, self.stream.device, &options, &config)?)
            }
        };
        drop(wait);
        let (policy, backend) = (spelled(self.policy), driver.backend());
        let (of, publisher) = match &from {
            Source::Publisher(from) => {
                let (size, pid) = (from.buffer_size().map_or_else(|| "buffers".to_owned(), about), from.peer().pid);
                (format!("{size} of pid {pid}"), Some(pid))
            }
            Source::Topic(_) => (place.to_string(), None),
        };
        output.announce(format!("sub       subscribed  {of}, {policy}, {backend}"))?;
        let mut tally = Tally::default();
        let outcome = self.receive(&from, &mut tally, cancel, progress);
        drop(from);
        progress.close();
        let (error, exit) = match &tally.first {
            Some(first) => {
                let error = torn(tally.torn, tally.latency.count, first);
                error.complain();
                (Some(error), Exit::Mismatch)
            }
            None => self.stream.failure(outcome),
        };
        let report = SubReport {
            backend,
            publisher,
            delivered: tally.latency.count,
            skipped: tally.skipped,
            torn: tally.torn,
            rate: tally.latency.rate(),
            latency_us: tally.latency.quantiles(),
            error,
        };
        Ok(ToolOutput::of(output, exit, report, render))
    }
}

fn torn(torn: u64, delivered: u64, (number, found): &(u64, Verification)) -> ErrorSummary {
    let (wrong, first) = (count(found.mismatches, "wrong word"), first_words(found.first));
    let message = format!("{torn} of {delivered} buffers are torn: buffer {number} has {wrong}{first}");
    let hint = "expected if the publisher has --corrupt; otherwise look for another process that writes to the pool";
    ErrorSummary { kind: "mismatch", message, hint: Some(hint.to_owned()) }
}

fn render(report: &SubReport, _verbose: bool) -> String {
    let SubReport { delivered, skipped, torn, rate, latency_us, .. } = report;
    format!("received    {delivered}, {rate:.1} per second, {skipped} skipped, {torn} torn\nlatency     {latency_us}\n")
}
