//! `pub` and `sub`: a stream of buffers with a pattern that depends on each buffer's number.

mod publish;
mod subscribe;

use std::{collections::BTreeMap, fmt, os::fd::AsFd, time::Instant};

use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, ppoll},
    sys::time::TimeSpec,
};
use vmmfd::{
    broker::Client,
    channel::Trust,
    driver::{Choice, Driver},
    memory::{Device, Selector},
    session::{Config, start, stream::Policy},
};

use super::{Output, broker::broker_at, leave_open, options::parse_uid, raise_file_limit, values::CHOICE};
use crate::{check::pattern::Pattern, cli::prelude::*, units::time, verbs::HasVerbs};

pub(super) use self::{publish::PubOptions, subscribe::SubOptions};

/// Options of both commands.
#[derive(Debug, Clone, Args)]
struct StreamOptions {
    /// Topic of the broker
    #[arg(value_name = "TOPIC")]
    topic: Option<String>,

    /// Number of buffers, after which the command ends [default: no limit]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), help_heading = "Buffer")]
    count: Option<u64>,

    /// Backend of the memory, the same on both sides
    #[arg(long, value_name = "BACKEND",
        value_parser = CHOICE, env = "VMMFD_BACKEND", default_value = "auto", help_heading = "Sharing")]
    backend: Choice,

    /// Device; a UUID may be abbreviated [default: 0, or the publisher's]
    #[arg(long, value_name = "ORDINAL|UUID", help_heading = "Sharing")]
    device: Option<Selector>,

    /// Unix socket on which the publisher listens, in place of a topic
    #[arg(long, value_name = "PATH", conflicts_with = "topic", help_heading = "Meeting")]
    at: Option<PathBuf>,

    /// Unix socket of the topic's broker [default: as `vmmfd who`]
    #[arg(long, value_name = "PATH", env = "VMMFD_BROKER_SOCKET", help_heading = "Meeting")]
    socket: Option<PathBuf>,

    /// Other user that the peer may run as, besides this user and root; repeatable
    #[arg(long = "allow-uid", value_name = "UID", value_parser = parse_uid, help_heading = "Meeting")]
    allow_uids: Vec<u32>,

    /// Longest wait for the peer, and for each step: 500ms, 30s, 2m
    #[arg(long, value_name = "DURATION", default_value = "2m", value_parser = parse_timeout, help_heading = "Meeting")]
    timeout: Duration,
}

/// Where a publisher and its subscribers meet.
enum Place {
    Socket(PathBuf),
    Topic(Client, String),
}

impl StreamOptions {
    fn place(&self, cancel: &Cancel) -> Result<Place> {
        match (&self.at, &self.topic) {
            (Some(path), _) => Ok(Place::Socket(path.clone())),
            (None, Some(topic)) => {
                let (client, _) = broker_at(self.socket.as_deref(), &self.config(cancel))?;
                Ok(Place::Topic(client, topic.clone()))
            }
            (None, None) => {
                let problem = "there is no place to meet: name a topic of a broker, or a socket with --at PATH";
                Err(Error::Misuse { problem: problem.to_owned() })
            }
        }
    }

    fn start(&self, output: &Output, cancel: &Cancel) -> Result<Driver> {
        raise_file_limit();
        let opened = start(self.backend, cancel, &|_| {})?;
        leave_open(&opened.driver);
        output.notice_fallback(opened.fallback.as_ref());
        Ok(opened.driver)
    }

    fn config(&self, cancel: &Cancel) -> Config {
        let trust = Trust { uids: self.allow_uids.clone() };
        Config::default().timeout(self.timeout).trust(trust).cancel(cancel)
    }

    /// Prints the error of the command. A signal is one only if --count asks for more buffers.
    fn failure(&self, outcome: Result<()>) -> (Option<ErrorSummary>, Exit) {
        match outcome {
            Ok(()) => (None, Exit::Verified),
            Err(Error::Interrupted { .. }) if self.count.is_none() => (None, Exit::Verified),
            Err(error) => (Some(ErrorSummary::complained(&error)), Exit::of(&error)),
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Socket(path) => path.display().fmt(f),
            Self::Topic(_, topic) => write!(f, "topic {topic}"),
        }
    }
}

/// A policy as the option spells it.
fn spelled(policy: Policy) -> String {
    match policy {
        Policy::Latest => "latest".to_owned(),
        Policy::Queue(length) => format!("queue:{length}"),
        Policy::Every => "every".to_owned(),
    }
}

/// The pattern of a buffer. No two buffers of a publisher have the same word at the same place.
fn pattern(epoch: u64, number: u64) -> Pattern {
    Pattern::new(epoch.wrapping_add(number) as u32)
}

/// Loads the GPU's kernels. The engines do this only for a large buffer, because they don't know how many follow.
fn load_kernels(device: &Device) {
    if let Err(error) = device.verbs().kernels().and_then(|kernels| kernels.load(device.ordinal())) {
        tracing::debug!(%error, "the CPUs write and check the pattern");
    }
}

/// Waits until a time. More precise than poll(2), which counts milliseconds.
fn sleep_until(cancel: &Cancel, due: Instant) -> Result<()> {
    loop {
        cancel.check()?;
        let left = due.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        let mut fds = [PollFd::new(cancel.as_fd(), PollFlags::POLLIN)];
        match ppoll(&mut fds, Some(TimeSpec::from_duration(left)), None) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(errno) => return Err(Error::system("wait", errno)),
        }
    }
}

/// Counts events and their durations, in buckets of at most 1/32 of a duration.
#[derive(Debug, Default)]
struct Durations {
    /// By the least duration of the bucket in microseconds.
    buckets: BTreeMap<u64, u64>,
    count: u64,
    max: u64,
    /// The times of the first and the last event.
    span: Option<(Instant, Instant)>,
}

/// Durations in microseconds.
#[derive(Debug, Clone, Copy, Serialize, JsonSchema)]
struct Quantiles {
    p50: u64,
    p99: u64,
    max: u64,
}

impl Durations {
    fn add(&mut self, duration: Duration) {
        let us = u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
        let shift = (u64::BITS - us.leading_zeros()).saturating_sub(6);
        *self.buckets.entry(us >> shift << shift).or_default() += 1;
        self.count += 1;
        self.max = self.max.max(us);
        let now = Instant::now();
        self.span = Some((self.span.map_or(now, |(first, _)| first), now));
    }

    /// Events per second.
    fn rate(&self) -> f64 {
        let seconds = self.span.map_or(0.0, |(first, last)| (last - first).as_secs_f64());
        let rate = if seconds > 0.0 { (self.count - 1) as f64 / seconds } else { 0.0 };
        (rate * 100.0).round() / 100.0
    }

    fn quantiles(&self) -> Quantiles {
        let at = |percent: u64| {
            let mut left = (self.count * percent).div_ceil(100);
            let found = self.buckets.iter().find(|(_, count)| {
                left = left.saturating_sub(**count);
                left == 0
            });
            found.map_or(0, |(us, _)| *us)
        };
        Quantiles { p50: at(50), p99: at(99), max: self.max }
    }
}

impl fmt::Display for Quantiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [p50, p99, max] = [self.p50, self.p99, self.max].map(|us| time(Duration::from_micros(us)));
        write!(f, "{p50} (p50), {p99} (p99), {max} (max)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_exact_to_a_thirty_second() {
        let mut durations = Durations::default();
        assert_eq!(durations.quantiles().max, 0);
        (1..=10_000).for_each(|us| durations.add(Duration::from_micros(us)));
        let Quantiles { p50, p99, max } = durations.quantiles();
        assert!((4_840..=5_000).contains(&p50) && (9_590..=9_900).contains(&p99) && max == 10_000, "{p50} {p99} {max}");
        durations.add(Duration::MAX);
        assert_eq!(durations.quantiles().max, u64::MAX);
        assert!(durations.buckets.len() < 32 * 64);
    }

    #[test]
    fn patterns_differ_in_every_word() {
        for (epoch, number) in [(7, 1), (u64::MAX, 1), (0x1234_5678_9abc_def0, 4_294_967_295)] {
            let [one, other] = [number, number + 1].map(|number| pattern(epoch, number));
            assert!((0..100).all(|index| one.word(index) != other.word(index)));
        }
    }
}
