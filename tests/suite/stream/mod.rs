//! Streams: publishers and subscribers in one process, in processes that are stopped and killed, and against peers that lie.

use std::ops::RangeInclusive;

use vmmfd::{
    Result,
    error::{ErrorCode, PeerError},
    session::stream::{Event, Policy, Published, PublisherStats, Received, Sample},
};

use crate::support::prelude::*;

mod abuse;
mod formats;
mod order;
mod order_peers;
mod peers;
mod policies;
mod waits;

/// The limit of waits that end earlier.
const LIMIT: Duration = Duration::from_secs(60);

/// A limit that a test waits for.
const SHORT: Duration = Duration::from_millis(50);

/// A publisher at a socket.
struct Stage {
    _folder: TempDir,
    path: PathBuf,
    publisher: Publisher,
}

impl Stage {
    fn new(subject: &Subject, options: &PublishOptions) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let publisher = Publisher::create(&subject.device(), options, &Config::default().timeout(LIMIT)).unwrap();
        publisher.listen(&path).unwrap();
        Self { _folder: folder, path, publisher }
    }

    /// Buffers of 16 bytes.
    fn fixed(subject: &Subject, count: usize) -> Self {
        Self::new(subject, &PublishOptions::fixed(16, count))
    }

    fn join(&self, subject: &Subject, options: SubscribeOptions) -> Subscriber {
        let subscriber = subscribe(subject, &self.path, &options).unwrap();
        self.until(|event| matches!(event, Event::Joined(_)));
        subscriber
    }

    /// Removes events until one fits.
    #[track_caller]
    fn until(&self, fits: impl Fn(&Event) -> bool) {
        let found = || std::iter::from_fn(|| self.publisher.event()).any(|event| fits(&event));
        wait_for("an event", found);
    }

    fn publish(&self, byte: u8) -> Published {
        publish(&self.publisher, byte)
    }

    fn publish_all(&self, mut bytes: RangeInclusive<u8>) {
        bytes.all(|byte| self.publish(byte).number > 0);
    }

    fn stats(&self) -> PublisherStats {
        self.publisher.stats().unwrap()
    }

    #[track_caller]
    fn until_free(&self, free: u64) {
        wait_for("free buffers", || self.stats().free == free);
    }
}

fn subscribe(subject: &Subject, path: &Path, options: &SubscribeOptions) -> Result<Subscriber> {
    Subscriber::connect(&subject.driver, None, path, options, &Config::default().timeout(LIMIT))
}

fn publish(publisher: &Publisher, byte: u8) -> Published {
    let loan = publisher.loan(LIMIT).unwrap();
    loan.copy_in(0, &[byte; 16]).unwrap();
    loan.publish(&[byte]).unwrap()
}

/// Receives a buffer whose bytes are all like its first user byte.
#[track_caller]
fn take(subscriber: &Subscriber) -> Sample {
    let sample = subscriber.receive(LIMIT).unwrap().sample().expect("a buffer");
    let mut bytes = [0; 16];
    sample.copy_out(0, &mut bytes).unwrap();
    assert_eq!(bytes, [sample.user()[0]; 16], "publication {} is torn", sample.number());
    sample
}

#[track_caller]
fn numbers(subscriber: &Subscriber, count: usize) -> Vec<(u64, u64)> {
    (0..count).map(|_| take(subscriber)).map(|sample| (sample.number(), sample.skipped_before())).collect()
}

#[track_caller]
fn reported<T: std::fmt::Debug>(result: Result<T>, want: ErrorCode) -> String {
    match result {
        Err(Error::Peer(PeerError::Reported { code, message })) if code == want => message,
        other => panic!("{other:?}, not the code {want}"),
    }
}

#[track_caller]
fn misused<T: std::fmt::Debug>(result: Result<T>, why: &str) {
    match result {
        Err(Error::Misuse { problem }) if problem.contains(why) => {}
        other => panic!("{other:?} where `{why}` belongs"),
    }
}

fn is_timeout<T>(result: &Result<T>) -> bool {
    matches!(result, Err(Error::Peer(PeerError::Timeout { .. } | PeerError::Starved { .. })))
}
