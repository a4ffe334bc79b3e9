//! Topics: a broker introduces the publishers and subscribers of streams, and then steps out of the way.
//!
//! A topic has the form of an object's name, and one publisher at a time. A follower receives from one topic, or from all topics with a
//! prefix, and continues when a publisher or the broker dies.
//!
//! ```
//! use std::time::Duration;
//! use vmmfd::{
//!     broker::Client,
//!     memory::{Device, Region, Selector},
//!     session::{Config, stream::{PublishOptions, Publisher, SubscribeOptions}},
//!     topic::{self, Change, Follower, Topics},
//! };
//!
//! # let broker = vmmfd::internals::ExampleBroker::start()?;
//! # let (path, driver) = (&broker.path, &broker.driver);
//! let config = Config::default();
//! let client = Client::connect(path, &config)?;
//!
//! let device = Device::find(driver, Selector::default())?;
//! let publisher = Publisher::create(&device, &PublishOptions::fixed(1 << 20, 4).history(1), &config)?;
//! topic::open(&client, "camera/left", &publisher, None)?; // Until the publisher finishes or is dropped.
//! publisher.loan(Duration::from_secs(10))?.publish(b"frame")?;
//!
//! // Usually in another process: all cameras, now and later.
//! let options = SubscribeOptions::default().history(1);
//! let follower = Follower::new(&client, Topics::Prefix("camera/"), driver, None, &options, &config)?;
//! let mut frames = 0;
//! while frames == 0 {
//!     let update = follower.receive(Duration::from_secs(10))?;
//!     match update.change {
//!         Change::Sample(sample) => frames += sample.user().len(),
//!         other => println!("{}: {other:?}", update.topic),
//!     }
//! }
//! # Ok::<(), vmmfd::Error>(())
//! ```

use std::{
    collections::{HashMap, VecDeque},
    io,
    os::fd::{AsFd, BorrowedFd},
    sync::{Arc, Mutex, atomic::Ordering},
    thread::JoinHandle,
    time::Duration,
};

use nix::{
    poll::PollFlags,
    sys::{
        epoll::{Epoll, EpollEvent, EpollFlags},
        eventfd::EventFd,
    },
};

use crate::{
    broker::{Client, Meeting, Meetings},
    channel::{Cancel, CancelReason, Peer, call_no_checks, deadline_after},
    driver::Driver,
    error::{Error, ErrorCode, PeerError, Result},
    memory::Selector,
    session::{
        Config,
        stream::{Identity, Publisher, Received, Sample, SubscribeOptions, Subscriber},
    },
    sys::{epoll, eventfd, fork::ProcessIdentity, lock, thread::spawn},
};

/// The most topics that are remembered without a publisher.
const MAX_KNOWN: usize = 10_000;

/// The most updates without a buffer that wait for the program. Beyond it, the oldest is dropped.
const MAX_UPDATES: usize = 1024;

/// The most publishers that are joined at a time.
const MAX_JOINS: usize = 64;

/// The pause before another look whether a publisher is joined.
const TURN: Duration = Duration::from_millis(5);

/// The pause after an attempt that the broker refused.
const PAUSE: Duration = Duration::from_millis(250);

/// Lets a broker introduce subscribers to a publisher, until the publisher finishes or is dropped. Blocks until the broker has answered.
/// If the broker dies, the streams continue, and new subscribers wait for its successor. `mode` has the bits of [`Put`](crate::broker::Put)'s
/// for reading: by default only this user follows the topic. A publisher may have several topics.
///
/// # Errors
/// [`Error::Broker`] with the code `exists` while another publisher has the topic, `invalid` for its name or mode; [`Error::Misuse`] for a
/// client without a path, and in a fork; [`Error::Peer`], [`Error::System`], [`Error::Interrupted`].
pub fn open(client: &Client, topic: &str, publisher: &Publisher, mode: Option<u16>) -> Result<()> {
    let cancel = Cancel::new()?;
    let door = publisher.door()?;
    let meetings = client.open_topic(topic, publisher.epoch(), mode, &cancel)?;
    let worker = Worker::start(cancel, meetings, move |Meeting { peer, process, socket, .. }| {
        if let Err(error) = door.admit(socket, Identity::introduced(peer, process)) {
            tracing::warn!(error = error.in_full(), pid = peer.pid, "can't admit a subscriber");
        }
    })?;
    publisher.keep(Box::new(worker));
    Ok(())
}

/// The topics that a follower receives from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Topics<'a> {
    /// The topic with this name.
    Named(&'a str),
    /// All topics whose names start with this text. `""`: all.
    Prefix(&'a str),
}

/// Receives from the publishers of one or more topics.
///
/// A thread connects to each publisher when the broker introduces it, so that a publisher that does not answer delays nobody. All methods
/// may be called from any thread.
#[derive(Debug)]
pub struct Follower {
    shared: Arc<Shared>,
    /// The program's.
    cancel: Cancel,
    _worker: Worker,
}

/// A result of [`Follower::receive`].
#[derive(Debug)]
#[non_exhaustive]
pub struct Update {
    /// The topic.
    pub topic: Arc<str>,
    /// The publisher's run: see [`Publisher::epoch`].
    pub epoch: u64,
    /// What happened.
    pub change: Change,
}

/// What happened in a topic.
#[derive(Debug)]
#[non_exhaustive]
pub enum Change {
    /// The first publisher has been joined.
    Joined,
    /// Another publisher has been joined. Its publications have the numbers from 1 again, and its format can differ.
    Reset,
    /// A buffer.
    Sample(Sample),
    /// The publisher has finished.
    Ended,
    /// The publisher's process died, or it was dropped without finishing.
    Crashed(Peer),
    /// The publisher can't be joined, or has ended this subscription. If it is full or does not answer, it is tried again without another
    /// report, each time after one to two time limits of the client.
    Failed(Error),
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// Readable with any subscriber or `news`.
    epoll: Epoll,
    news: EventFd,
    creator: ProcessIdentity,
}

#[derive(Debug, Default)]
struct State {
    joined: Vec<Joined>,
    /// By topic.
    known: HashMap<Arc<str>, Known>,
    updates: VecDeque<Update>,
    /// The place of the next search for a buffer, so that no publisher is preferred.
    turn: usize,
}

/// A topic.
#[derive(Debug, Default)]
struct Known {
    /// The last publisher that is joined or being joined.
    epoch: Option<u64>,
    /// Whether any publisher was joined.
    was_joined: bool,
    /// The publisher whose failure to join was reported.
    failed: Option<u64>,
}

#[derive(Debug, Clone)]
struct Joined {
    topic: Arc<str>,
    epoch: u64,
    subscriber: Arc<Subscriber>,
}

impl Follower {
    /// Follows topics from now on. Blocks until the broker has answered. `options` apply to each publisher; `device` and `config` are those
    /// of [`Subscriber::connect`].
    ///
    /// # Errors
    /// [`Error::Broker`] with the code `invalid` for the name; [`Error::Misuse`] for options outside their limits, for a client without a
    /// path, and in a fork; [`Error::Peer`], [`Error::System`], [`Error::Interrupted`].
    pub fn new(
        client: &Client,
        topics: Topics<'_>,
        driver: &Driver,
        device: Option<Selector>,
        options: &SubscribeOptions,
        config: &Config,
    ) -> Result<Self> {
        options.check()?;
        let (name, is_prefix) = match topics {
            Topics::Named(name) => (name, false),
            Topics::Prefix(name) => (name, true),
        };
        let shared = Shared::new().map_err(|error| Error::system("create a follower's descriptors", error))?;
        let shared = Arc::new(shared);
        let cancel = Cancel::new()?;
        let meetings = client.follow_topics(name, is_prefix, &cancel)?;
        let again = Arc::clone(meetings.again());
        let (join, driver, options) = (Arc::clone(&shared), driver.clone(), options.clone());
        let (joining, stop) = (config.clone().cancel(&cancel), cancel.clone());
        let mut threads = Joins::default();
        let worker = Worker::start(cancel, meetings, move |meeting| {
            threads.0.retain(|thread| !thread.is_finished());
            // A publisher that never answers has a thread until its time is over.
            while threads.0.len() >= MAX_JOINS && stop.pause(TURN).is_ok() {
                threads.0.retain(|thread| !thread.is_finished());
            }
            if let Err(error) = joining.trust.check(meeting.peer) {
                return tracing::warn!(error = error.in_full(), topic = meeting.topic, "not joining a publisher");
            }
            let Some(topic) = join.begin(&meeting) else { return };
            let (join, driver, options, config) = (Arc::clone(&join), driver.clone(), options.clone(), joining.clone());
            let Meeting { epoch, peer, process, socket, .. } = meeting;
            let failed = (Arc::clone(&join), Arc::clone(&topic));
            let again = Arc::clone(&again);
            let started = spawn("vmmfd-joining", move || {
                call_no_checks();
                let identity = Identity::introduced(peer, process);
                let joined = Subscriber::over_as(socket, identity, &driver, device, &options, &config);
                let is_tried_again = joined.as_ref().is_err_and(may_pass);
                join.finish(topic, epoch, joined);
                // After that: the next introduction must not find it as being joined.
                if is_tried_again {
                    again.store(true, Ordering::Relaxed);
                }
            });
            match started {
                Ok(thread) => threads.0.push(thread),
                Err(error) => {
                    let error = Error::system("start a thread", error);
                    failed.0.finish(failed.1, epoch, Err(error));
                }
            }
        })?;
        Ok(Self { shared, cancel: config.cancellation()?, _worker: worker })
    }

    /// Waits for the next update at most this long.
    ///
    /// # Errors
    /// [`PeerError::Timeout`] after the limit; [`Error::Interrupted`]; [`Error::System`]; [`Error::Misuse`] in a fork.
    pub fn receive(&self, limit: Duration) -> Result<Update> {
        let deadline = deadline_after(limit);
        loop {
            if let Some(update) = self.try_receive()? {
                return Ok(update);
            }
            if !self.cancel.wait(self.shared.epoll.0.as_fd(), PollFlags::POLLIN, deadline)? {
                return Err(Error::Peer(PeerError::Timeout { purpose: "for a buffer", waited: limit }));
            }
        }
    }

    /// Like [`Follower::receive`], without waiting.
    ///
    /// # Errors
    /// The other errors of [`Follower::receive`].
    pub fn try_receive(&self) -> Result<Option<Update>> {
        self.shared.creator.check()?;
        let (joined, turn) = {
            let state = &mut *lock(&self.shared.state);
            if let Some(update) = state.updates.pop_front() {
                return Ok(Some(update));
            }
            // EAGAIN if nothing was written.
            let _ = self.shared.news.read();
            state.turn = state.turn.wrapping_add(1);
            (state.joined.clone(), state.turn)
        };
        for at in 0..joined.len() {
            let Joined { topic, epoch, subscriber } = &joined[(turn + at) % joined.len()];
            let change = match subscriber.try_receive() {
                Ok(None) => continue,
                Ok(Some(Received::Sample(sample))) => Change::Sample(sample),
                Ok(Some(Received::Ended)) => Change::Ended,
                Ok(Some(Received::Crashed(peer))) => Change::Crashed(peer),
                // Another thread has got the error, and removes it.
                Err(Error::Misuse { .. }) => continue,
                Err(error @ Error::Interrupted { .. }) => return Err(error),
                Err(error) => Change::Failed(error),
            };
            if !matches!(change, Change::Sample(_)) && !self.shared.forget(subscriber) {
                // Another thread has reported it.
                continue;
            }
            return Ok(Some(Update { topic: Arc::clone(topic), epoch: *epoch, change }));
        }
        Ok(None)
    }

    /// The topics whose publishers are joined.
    pub fn topics(&self) -> Vec<Arc<str>> {
        lock(&self.shared.state).joined.iter().map(|joined| Arc::clone(&joined.topic)).collect()
    }
}

impl AsFd for Follower {
    /// Readable when an update may be there. Call [`Follower::try_receive`] until it returns `None`.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.epoll.0.as_fd()
    }
}

impl Shared {
    fn new() -> io::Result<Self> {
        let (epoll, news) = (epoll()?, eventfd()?);
        epoll.add(&news, EpollEvent::new(EpollFlags::EPOLLIN, 0))?;
        Ok(Self { state: Mutex::default(), epoll, news, creator: ProcessIdentity::current() })
    }

    /// Notes that a publisher is being joined. Returns its topic. `None` if it is known: the broker was restarted.
    fn begin(&self, meeting: &Meeting) -> Option<Arc<str>> {
        let topic: Arc<str> = meeting.topic.as_str().into();
        let State { known, joined, .. } = &mut *lock(&self.state);
        if known.len() >= MAX_KNOWN {
            known.retain(|topic, _| joined.iter().any(|joined| joined.topic == *topic));
        }
        let before = known.entry(Arc::clone(&topic)).or_default().epoch.replace(meeting.epoch);
        (before != Some(meeting.epoch)).then_some(topic)
    }

    fn finish(&self, topic: Arc<str>, epoch: u64, joined: Result<Subscriber>) {
        let watched = joined.and_then(|subscriber| {
            let watched = self.epoll.add(&subscriber, EpollEvent::new(EpollFlags::EPOLLIN, 0));
            watched.map(|()| subscriber).map_err(|errno| Error::system("watch a publisher", errno))
        });
        let state = &mut *lock(&self.state);
        let known = state.known.entry(Arc::clone(&topic)).or_default();
        let change = match watched {
            Ok(subscriber) => {
                let subscriber = Arc::new(subscriber);
                state.joined.push(Joined { topic: Arc::clone(&topic), epoch, subscriber });
                known.failed = None;
                if std::mem::replace(&mut known.was_joined, true) { Change::Reset } else { Change::Joined }
            }
            Err(error) => {
                // With the next introduction, it is tried again.
                known.epoch = known.epoch.filter(|last| *last != epoch);
                if known.failed.replace(epoch) == Some(epoch) && may_pass(&error) {
                    return;
                }
                Change::Failed(error)
            }
        };
        if state.updates.len() >= MAX_UPDATES {
            state.updates.pop_front();
        }
        state.updates.push_back(Update { topic, epoch, change });
        let _ = self.news.write(1);
    }

    /// Removes a publisher. Returns false if it is removed.
    fn forget(&self, of: &Arc<Subscriber>) -> bool {
        let removed = {
            let joined = &mut lock(&self.state).joined;
            let at = joined.iter().position(|joined| Arc::ptr_eq(&joined.subscriber, of));
            at.map(|at| joined.swap_remove(at))
        };
        removed.is_some_and(|joined| {
            let _ = self.epoll.delete(&*joined.subscriber);
            true
        })
    }
}

/// Whether a publisher may be joined later: it is full, or does not answer.
fn may_pass(error: &Error) -> bool {
    match error {
        Error::Peer(PeerError::Reported { code, .. } | PeerError::Mismatch { code, .. }) => *code == ErrorCode::Full,
        Error::Peer(PeerError::Timeout { .. }) => true,
        _ => false,
    }
}

/// Threads that join publishers. The drop waits for them: the request that cancels the worker cancels them too.
#[derive(Debug, Default)]
struct Joins(Vec<JoinHandle<()>>);

impl Drop for Joins {
    fn drop(&mut self) {
        for thread in self.0.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a thread that joined a publisher panicked");
            }
        }
    }
}

/// A thread that receives introductions. The drop stops the thread.
#[derive(Debug)]
struct Worker {
    cancel: Cancel,
    thread: Option<JoinHandle<()>>,
    creator: ProcessIdentity,
}

impl Worker {
    fn start(cancel: Cancel, mut meetings: Meetings, mut meet: impl FnMut(Meeting) + Send + 'static) -> Result<Self> {
        let stop = cancel.clone();
        let run = move || {
            call_no_checks();
            let mut is_reported = false;
            while stop.check().is_ok() {
                match meetings.next() {
                    Ok(meeting) => {
                        is_reported = false;
                        meet(meeting);
                    }
                    Err(Error::Interrupted { .. }) => break,
                    Err(error) => {
                        if !std::mem::replace(&mut is_reported, true) {
                            tracing::warn!(
                                error = error.in_full(),
                                "the broker introduces no more peers: trying again"
                            );
                        }
                        if stop.pause(PAUSE).is_err() {
                            break;
                        }
                    }
                }
            }
        };
        let thread = spawn("vmmfd-topic", run).map_err(|error| Error::system("start a thread", error))?;
        Ok(Self { cancel, thread: Some(thread), creator: ProcessIdentity::current() })
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        if !self.creator.is_current() {
            // A fork has no such thread.
            return std::mem::forget(thread);
        }
        self.cancel.cancel(CancelReason::Program);
        if thread.join().is_err() {
            tracing::error!("the thread of a topic panicked");
        }
    }
}
