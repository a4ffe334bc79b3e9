//! `pub`: publishes buffers at a rate.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use vmmfd::{
    error::PeerError,
    memory::{Device, Region},
    session::stream::{Event, PublishOptions, Publisher, PublisherStats, SubscriberInfo},
    topic,
};

use super::{Durations, Place, Quantiles, StreamOptions, load_kernels, pattern, sleep_until, spelled};
use crate::{
    check::pattern::EngineChoice,
    cli::{options::parse_size, output::Progress, prelude::*},
    units::{self, about},
};

/// How long subscribers may finish their last buffers after a signal. The process ends 2 s after it.
const LAST: Duration = Duration::from_secs(1);

/// The most subscribers in the report: beyond it, the oldest are dropped.
const MAX_SUBSCRIBERS: usize = 1000;

/// Publishes buffers at a rate to any number of subscribers
///
/// Each buffer has a pattern that depends on its number, and `vmmfd sub` verifies every byte. No subscriber delays the publisher, except
/// with the policy `every`, if --every allows it. Runs until SIGINT or SIGTERM, or until --count buffers are published, then waits until all
/// subscribers have given their buffers back: after a signal for a second, otherwise for --timeout.
#[derive(Debug, Args)]
#[command(after_help = exit_codes!("published, or without --count stopped by a signal"; 2 3 4 5 130))]
pub(in super::super) struct PubOptions {
    /// Size of each buffer: bytes, or with a binary unit, such as 64MiB, 64M or 1.5GiB
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "8MiB", help_heading = "Buffer")]
    size: u64,

    /// Buffers per second
    #[arg(long, value_name = "RATE", value_parser = parse_rate, default_value = "200", help_heading = "Buffer")]
    rate: f64,

    /// Number of buffers in the pool: the sum of the buffers that subscribers may hold, the history or the longest queue less 1, and 2
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..), default_value = "16",
        help_heading = "Buffer")]
    buffers: u32,

    /// Number of buffers that a late subscriber can receive at once
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Buffer")]
    history: u16,

    /// Allow the policy `every`: wait for such a subscriber at most this long, then evict it [default: refuse it]
    #[arg(long, value_name = "DURATION", value_parser = parse_timeout, help_heading = "Buffer")]
    every: Option<Duration>,

    /// Flip one byte of each buffer after the fill: subscribers must report it
    #[arg(long, help_heading = "Buffer")]
    corrupt: bool,

    #[command(flatten)]
    stream: StreamOptions,

    /// Number of subscribers to wait for before the first buffer
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Meeting")]
    subscribers: usize,
}

fn parse_rate(text: &str) -> Result<f64, String> {
    let rate = text.parse().ok().filter(|rate| (0.001..=1e6).contains(rate));
    rate.ok_or_else(|| format!("`{text}` is not a rate: write buffers per second, 0.001 to 1000000"))
}

#[derive(Debug, Serialize, JsonSchema)]
struct PubReport {
    backend: Backend,
    /// Bytes of each buffer.
    size: u64,
    published: u64,
    /// Buffers per second.
    rate: f64,
    /// How late the ticks began.
    late_us: Quantiles,
    /// How long the calls that take and publish a buffer took, without the fill.
    calls_us: Quantiles,
    /// The ticks without a buffer, because subscribers held all buffers for too long.
    starved: u64,
    subscribers: Vec<Line>,
    /// The error that the command exits with.
    error: Option<ErrorSummary>,
}

/// A present or former subscriber.
#[derive(Debug, Clone, Serialize, JsonSchema)]
struct Line {
    pid: i32,
    policy: String,
    delivered: u64,
    skipped: u64,
    /// `lost`: its process died, or it broke the protocol.
    #[schemars(extend("enum" = ["subscribed", "left", "lost", "evicted"]))]
    state: &'static str,
}

#[derive(Debug, Default)]
struct Tally {
    late: Durations,
    calls: Durations,
    starved: u64,
    /// By the library's number.
    subscribers: BTreeMap<u64, Line>,
}

impl Tally {
    fn line(&mut self, of: SubscriberInfo) -> &mut Line {
        if self.subscribers.len() >= MAX_SUBSCRIBERS && !self.subscribers.contains_key(&of.id) {
            self.subscribers.pop_first();
        }
        let new =
            || Line { pid: of.peer.pid, policy: spelled(of.policy), delivered: 0, skipped: 0, state: "subscribed" };
        self.subscribers.entry(of.id).or_insert_with(new)
    }

    /// Updates the subscribers. Returns how many are subscribed.
    fn look(&mut self, publisher: &Publisher, stats: &PublisherStats) -> usize {
        for usage in &stats.subscribers {
            let line = self.line(usage.subscriber);
            (line.delivered, line.skipped) = (usage.delivered, usage.skipped);
        }
        while let Some(event) = publisher.event() {
            match event {
                Event::Left { subscriber, orderly, delivered, skipped } => {
                    let state = if orderly { "left" } else { "lost" };
                    let line = self.line(subscriber);
                    *line = Line { delivered, skipped, state, ..line.clone() };
                }
                Event::Evicted(subscriber) => self.line(subscriber).state = "evicted",
                _ => {}
            }
        }
        stats.subscribers.iter().filter(|usage| usage.is_subscribed).count()
    }
}

impl PubOptions {
    fn publish(&self, publisher: &Publisher, tally: &mut Tally, cancel: &Cancel, progress: &Progress) -> Result<()> {
        let begun = Instant::now();
        while tally.look(publisher, &publisher.stats()?) < self.subscribers {
            if begun.elapsed() > self.stream.timeout {
                return Err(PeerError::Timeout { purpose: "for subscribers", waited: self.stream.timeout }.into());
            }
            sleep_until(cancel, Instant::now() + Duration::from_millis(5))?;
        }
        let period = Duration::from_secs_f64(1.0 / self.rate);
        let mut due = Instant::now();
        while self.stream.count != Some(tally.calls.count) {
            sleep_until(cancel, due)?;
            let now = Instant::now();
            let late = now - due;
            tally.late.add(late);
            // Missed ticks are not made up for.
            due = if late < period { due + period } else { now + period };
            let loan = match publisher.loan(self.stream.timeout) {
                Err(Error::Peer(error @ PeerError::Starved { .. })) => {
                    tracing::warn!(%error, "a tick without a buffer");
                    tally.starved += 1;
                    continue;
                }
                loan => loan?,
            };
            let waited = now.elapsed();
            let pattern = pattern(publisher.epoch(), tally.calls.count + 1);
            EngineChoice::Auto.write(&loan, 0, 0..self.size, pattern, &mut |_| cancel.check())?;
            if self.corrupt {
                let mut byte = [0];
                loan.copy_out(self.size / 2, &mut byte)?;
                loan.copy_in(self.size / 2, &[byte[0] ^ 1])?;
            }
            let filled = Instant::now();
            loan.publish(&[])?;
            tally.calls.add(waited + filled.elapsed());
            let subscribed = tally.look(publisher, &publisher.stats()?);
            progress.status(|| {
                let (count, rate) = (tally.calls.count, tally.calls.rate());
                let subscribers = units::count(subscribed as u64, "subscriber");
                format!("{count} published, {rate:.1} per second, to {subscribers}")
            });
        }
        Ok(())
    }
}

impl Tool for PubOptions {
    const NAME: &'static str = "pub";

    const REPORTS: &'static [Named] = &[("pub", document::<Stamped<PubReport>>)];

    fn run(&self, Running { output, cancel, progress }: Running<'_>) -> anyhow::Result<ToolOutput> {
        let place = self.stream.place(cancel)?;
        let driver = self.stream.start(output, cancel)?;
        let device = Device::find(&driver, self.stream.device.unwrap_or_default())?;
        let mut options = PublishOptions::fixed(self.size, self.buffers as usize).history(self.history.into());
        options.every = self.every;
        // A signal interrupts every wait, except the last.
        let (is_last, signal) = (Arc::new(AtomicBool::new(false)), cancel.clone());
        let interrupts = Arc::clone(&is_last);
        let waits = Cancel::new()?.with_check(move || !interrupts.load(Ordering::Relaxed) && signal.check().is_err());
        let publisher = Publisher::create(&device, &options, &self.stream.config(&waits))?;
        load_kernels(&device);
        match &place {
            Place::Socket(path) => publisher.listen(path)?,
            Place::Topic(client, topic) => topic::open(client, topic, &publisher, None)?,
        }
        let on = units::device(device.name(), &device.prefixed_uuid(), false);
        let (size, rate) = (about(self.size), self.rate);
        output.announce(format!("pub       publishing  {size}, {rate} per second, {on}, at {place}"))?;
        let mut tally = Tally::default();
        let outcome = match self.publish(&publisher, &mut tally, cancel, progress) {
            // The check has no number of the signal.
            Err(Error::Interrupted { .. }) => cancel.check(),
            outcome @ (Ok(()) | Err(Error::Peer(_))) => outcome,
            // For subscribers this is a crash.
            Err(error) => return Err(error.into()),
        };
        let stats = publisher.complete(self.stream.timeout).or_else(|error| match error {
            Error::Interrupted { .. } => {
                is_last.store(true, Ordering::Relaxed);
                publisher.complete(LAST)
            }
            error => Err(error),
        })?;
        tally.look(&publisher, &stats);
        progress.close();
        let (error, exit) = self.stream.failure(outcome);
        let report = PubReport {
            backend: driver.backend(),
            size: self.size,
            published: tally.calls.count,
            rate: tally.calls.rate(),
            late_us: tally.late.quantiles(),
            calls_us: tally.calls.quantiles(),
            starved: tally.starved,
            subscribers: tally.subscribers.into_values().collect(),
            error,
        };
        Ok(ToolOutput::of(output, exit, report, render))
    }
}

fn render(report: &PubReport, _verbose: bool) -> String {
    let PubReport { published, rate, late_us, calls_us, starved, subscribers, .. } = report;
    let starved = if *starved > 0 { format!(", {starved} ticks without a buffer") } else { String::new() };
    let mut text = format!(
        "published   {published}, {rate:.1} per second{starved}\nlate        {late_us}\ncalls       {calls_us}\n"
    );
    for Line { pid, policy, delivered, skipped, state } in subscribers {
        text += &format!("{state:<10}  pid {pid}, {policy}: {delivered} delivered, {skipped} skipped\n");
    }
    text
}
