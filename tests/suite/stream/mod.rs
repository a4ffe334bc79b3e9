//! Streams that reuse buffers over one connection, and publishers and subscribers against peers that exit, stall or lie.

use std::{
    env,
    os::fd::{AsFd, BorrowedFd},
    path::PathBuf,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use tempfile::TempDir;
use vmmfd::{
    Error, Result,
    array::{ArrayDescriptor, ElementType, Order},
    channel::{Cancel, CancelReason, Channel, Listener},
    driver::{Access::ReadOnly, Access::ReadWrite},
    error::{MemoryError, PeerError},
    memory::{Device, Pool, Region, Shared, Spec},
    session::{
        Config,
        stream::{BufferId, Publisher, Received, Subscriber},
    },
    wire::{
        self, BufferNumber, BufferTurn, Busy, ErrorCode, Hello, MAX_FDS, Message, Offer, PoolNumber, Ready, Subscribe,
    },
};

use crate::{
    conversation::{PATIENCE, accepted, answer, dial, listening, request, told},
    support::{Fault, Inode, Kind, Subject, in_child, sealing},
};

mod borrowed;
mod by_hand;
mod ends;
mod turns;

/// A listener with its folder and configuration.
struct Place {
    folder: TempDir,
    listener: Listener,
    config: Config,
    /// Cancels the waits of publisher and subscriber.
    cancel: Cancel,
}

impl Place {
    fn new() -> Self {
        Self::with_timeout(PATIENCE)
    }

    fn with_timeout(timeout: Duration) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let cancel = Cancel::new().unwrap();
        let config = Config::default().timeout(timeout).cancel(&cancel);
        let listener = Listener::bind(&folder.path().join("s"), &Config::default().timeout(PATIENCE)).unwrap();
        Self { folder, listener, config, cancel }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("s")
    }

    fn subscribe(&self, subject: &Subject, keep: usize) -> Result<Subscriber> {
        Subscriber::connect(&subject.driver, None, &self.path(), keep, &self.config)
    }

    fn accept(&self, subject: &Subject) -> Result<Publisher> {
        Publisher::accept(&self.listener, &subject.driver, &self.config)
    }

    /// Connects a publisher and a subscriber. On a busy machine, the timeout of a test may be too short for it.
    fn meet(&self, subject: &Subject, keep: usize) -> (Publisher, Subscriber) {
        let begun = Instant::now();
        loop {
            let met = thread::scope(|scope| {
                let subscriber = scope.spawn(|| self.subscribe(subject, keep));
                (self.accept(subject), subscriber.join().unwrap())
            });
            match met {
                (Ok(publisher), Ok(subscriber)) => return (publisher, subscriber),
                met => assert!(begun.elapsed() < PATIENCE, "{met:?}"),
            }
        }
    }

    /// Connects a publisher and a scripted consumer.
    fn by_hand(&self, subject: &Subject) -> (Publisher, Channel) {
        let mut channel = dial(&self.path());
        channel.send(&greeting(subject), &[]).unwrap();
        channel.send(&Message::Subscribe(Subscribe { keep: 3 }), &[]).unwrap();
        let publisher = self.accept(subject).unwrap();
        let (Message::Hello(theirs), _) = answer(&mut channel) else { panic!() };
        assert_eq!(theirs.capabilities, ["stream"]);
        (publisher, channel)
    }
}

/// A timeout that a test waits for. It is longer on a GPU, as other tests use the same GPU.
fn moment(subject: &Subject, milliseconds: u64) -> Duration {
    Duration::from_millis(if subject.kind == Kind::Cuda { milliseconds + 2000 } else { milliseconds })
}

fn greeting(subject: &Subject) -> Message {
    hello(&subject.driver.backend().to_string(), &[wire::STREAM])
}

fn hello(backend: &str, capabilities: &[&str]) -> Message {
    let capabilities = capabilities.iter().map(ToString::to_string).collect();
    Message::Hello(Hello { version: 1, capabilities, backend: backend.to_owned(), pid: 1, timeout_ms: 20_000 })
}

fn memory(subject: &Subject, size: u64) -> Arc<Shared> {
    Arc::new(Shared::create(&subject.device(), Spec::vmm(size)).unwrap())
}

/// Adds `count` buffers to a publisher, each with its memory.
fn buffers(subject: &Subject, publisher: &mut Publisher, count: usize) -> Vec<(BufferId, Arc<Shared>)> {
    let mut add = |memory| (publisher.add(&memory, None, ReadWrite).unwrap(), memory);
    (0..count).map(|_| add(memory(subject, 100))).collect()
}

/// Connects a publisher and a subscriber, and adds `count` buffers.
fn stream(subject: &Subject, keep: usize, count: usize) -> (Publisher, Subscriber, Vec<BufferId>) {
    let (mut publisher, subscriber) = Place::new().meet(subject, keep);
    let ids = buffers(subject, &mut publisher, count).into_iter().map(|(id, _)| id).collect();
    (publisher, subscriber, ids)
}

/// Publishes a buffer and receives it.
#[track_caller]
fn hand_over(publisher: &mut Publisher, subscriber: &mut Subscriber, id: BufferId) -> Received {
    let (published, received) = thread::scope(|scope| {
        let published = scope.spawn(|| publisher.publish(id));
        let received = subscriber.receive();
        (published.join().unwrap(), received)
    });
    let received = received.unwrap();
    assert_eq!((published.unwrap(), id.number()), (received.generation(), received.id().number()));
    received
}

/// Runs one turn of a buffer.
#[track_caller]
fn turn(publisher: &mut Publisher, subscriber: &mut Subscriber, id: BufferId) {
    let received = hand_over(publisher, subscriber, id);
    subscriber.give_back(received).unwrap();
    assert_eq!(publisher.take_back().unwrap(), id);
}

/// Polls the consumer until it holds only `count` buffers.
#[track_caller]
fn until_held(subscriber: &mut Subscriber, count: usize) {
    let begun = Instant::now();
    while subscriber.held() > count {
        assert!(subscriber.try_receive().unwrap().is_none() && begun.elapsed() < PATIENCE);
        thread::sleep(Duration::from_millis(1));
    }
}

fn read<const LENGTH: usize>(region: &dyn Region, offset: u64) -> [u8; LENGTH] {
    let mut bytes = [0xEE; LENGTH];
    region.copy_out(offset, &mut bytes).unwrap();
    bytes
}

#[track_caller]
fn refused<T: std::fmt::Debug>(result: Result<T>, why: &str) {
    match result {
        Err(Error::Misuse { problem }) if problem.contains(why) => {}
        other => panic!("{other:?} where `{why}` belongs"),
    }
}

/// A scripted producer and its subscriber, with a single buffer, number 4.
struct Liar {
    channel: Channel,
    subscriber: Subscriber,
    offer: Offer,
    memory: Arc<Shared>,
}

impl Liar {
    /// The memory has one segment.
    fn new(subject: &Subject) -> Self {
        Self::with(subject, Spec::vmm(100).into(), PATIENCE)
    }

    /// The memory has two segments. The first is sent with the turn.
    fn of_two(subject: &Subject, timeout: Duration) -> Self {
        let unit = subject.unit();
        Self::with(subject, Spec::vmm(unit + 100).chunk(unit).into(), timeout)
    }

    fn with(subject: &Subject, spec: Spec, timeout: Duration) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let listener = listening(&path, 1);
        let config = Config::default().timeout(timeout);
        thread::scope(|scope| {
            let subscriber = scope.spawn(|| Subscriber::connect(&subject.driver, None, &path, 2, &config).unwrap());
            let mut channel = accepted(&listener);
            let (Message::Hello(theirs), _) = answer(&mut channel) else { panic!() };
            assert_eq!(theirs.capabilities, ["stream"]);
            channel.send(&greeting(subject), &[]).unwrap();
            assert_eq!(answer(&mut channel).0, Message::Subscribe(Subscribe { keep: 2 }));
            let memory = Arc::new(Shared::create(&subject.device(), spec).unwrap());
            let offer = Offer {
                object: "default".into(),
                memory: (&memory.describe().unwrap()).into(),
                array: None,
                access: ReadOnly,
                part: memory.chunks(0..memory.size()).unwrap().map(|(part, _)| part),
                check: None,
                buffer: Some(4),
            };
            Self { channel, subscriber: subscriber.join().unwrap(), offer, memory }
        })
    }

    fn offer(&mut self, offer: &Offer) {
        self.channel.send(&Message::Offer(Box::new(offer.clone())), &[]).unwrap();
    }

    /// Starts a turn of this generation, and sends the first segment.
    fn ready(&mut self, generation: u64) {
        let (_, chunks) = self.memory.chunks(0..1).unwrap().unwrap();
        let ready = Ready { buffer: 4, generation, sizes: vec![chunks[0].size()] };
        self.channel.send(&Message::Ready(ready), &[chunks[0].as_fd()]).unwrap();
    }

    /// Offers the buffer and starts its first turn.
    fn begin(&mut self) {
        let offer = self.offer.clone();
        self.offer(&offer);
        self.ready(1);
    }

    fn lend(&mut self) -> Received {
        self.begin();
        let received = self.subscriber.receive().unwrap();
        assert_eq!(answer(&mut self.channel).0, Message::Received(wire::Received { segments: 1 }));
        received
    }

    /// Asserts that the subscriber rejects the message and reports the error to its peer.
    #[track_caller]
    fn found_out(mut self, what: &str) {
        let found = self.subscriber.receive();
        assert!(
            matches!(found, Err(Error::Peer(PeerError::Protocol(_)) | Error::Peer(PeerError::Mismatch { .. }))),
            "{what}: {found:?}"
        );
        assert_eq!(self.subscriber.held(), 0, "{what}");
        refused(self.subscriber.receive(), "the session has ended");
        loop {
            match answer(&mut self.channel).0 {
                // Responses to earlier turns.
                Message::Done(_) | Message::Gone(_) | Message::Received(_) => {}
                Message::Error(failure) => break assert_eq!(failure.code, ErrorCode::Protocol, "{what}"),
                other => panic!("{what}: {other:?}"),
            }
        }
    }
}
