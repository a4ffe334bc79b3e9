//! `_native.TopicFollower`, which `vmmfd.TopicFollower` wraps. An update is handed over in two steps, as a sample of a subscriber is.

use std::{
    collections::VecDeque,
    os::fd::{AsFd, AsRawFd, RawFd},
    sync::Mutex,
};

use pyo3::prelude::*;
use vmmfd::{
    Error,
    bindings::lock,
    error::PeerError,
    topic::{Change, Follower, Topics, Update},
};

use crate::{
    client::Client,
    closing::Side,
    connections::Purpose,
    driver,
    error::{Described, Outcome, described},
    memory::Tie,
    streams::Buffer,
    subscriber::Request,
    text::Text,
    time::required,
};

/// An update: its topic, epoch, kind, sample, the pid and uid of a publisher that crashed, and the error.
type Fields = (String, u64, &'static str, Option<Buffer>, Option<(i32, u32)>, Option<Described>);

fn fields(Update { topic, epoch, change, .. }: Update) -> Fields {
    let (kind, sample, peer, error) = match change {
        Change::Joined => ("joined", None, None, None),
        Change::Reset => ("reset", None, None, None),
        Change::Sample(sample) => ("sample", Some(Buffer::received(sample, None)), None, None),
        Change::Ended => ("ended", None, None, None),
        Change::Crashed(peer) => ("crashed", None, Some((peer.pid, peer.uid)), None),
        Change::Failed(error) => ("failed", None, None, Some(described(&error))),
        _ => ("other", None, None, None),
    };
    (topic.to_string(), epoch, kind, sample, peer, error)
}

/// The follower of topics.
#[pyclass(name = "TopicFollower", module = "vmmfd._native", frozen, weakref)]
pub(crate) struct TopicFollower {
    side: Side<Follower>,
    /// The updates that calls have received and nobody has taken.
    next: Mutex<VecDeque<Fields>>,
}

#[pymethods]
impl TopicFollower {
    /// Follows a topic, or all topics with a prefix.
    #[new]
    fn new(py: Python<'_>, broker: &Client, name: Text, is_prefix: bool, request: Request<'_>) -> Outcome<Self> {
        let (options, config, selector, backend) = request.read()?;
        let topics = if is_prefix { Topics::Prefix(&name) } else { Topics::Named(&name) };
        let (follower, device) = broker.0.call(py, Purpose::Any, |client| {
            let driver = driver::driver(backend.as_deref())?;
            let device = driver::device(&driver, selector)?;
            Ok((Follower::new(client, topics, &driver, selector, &options, &config)?, device))
        })?;
        Ok(Self { side: Side::new(follower, &device, "follower", Tie::Subscribed), next: Mutex::default() })
    }

    /// Waits until there is an update. Returns whether there is. Threads may call it at once.
    fn wait(&self, py: Python<'_>, wait: &Bound<'_, PyAny>) -> Outcome<bool> {
        let wait = required(wait, "wait")?;
        self.side.run(py, |follower| {
            if !lock(&self.next).is_empty() {
                return Ok(true);
            }
            match follower.receive(wait) {
                Ok(update) => lock(&self.next).push_back(fields(update)),
                Err(Error::Peer(PeerError::Timeout { .. })) => return Ok(false),
                Err(error) => return Err(error.into()),
            }
            Ok(true)
        })
    }

    /// The update that a `wait` found. Reading it takes it; `None` if another thread took it. It is not a method, as that of a subscriber.
    #[getter]
    fn taken(&self) -> Outcome<Option<Fields>> {
        self.side.check()?;
        Ok(lock(&self.next).pop_front())
    }

    /// The topics whose publishers are joined.
    fn topics(&self, py: Python<'_>) -> Outcome<Vec<String>> {
        self.side.run(py, |follower| Ok(follower.topics().iter().map(ToString::to_string).collect()))
    }

    fn fileno(&self, py: Python<'_>) -> Outcome<RawFd> {
        self.side.run(py, |follower| Ok(follower.as_fd().as_raw_fd()))
    }

    #[getter]
    fn is_closed(&self) -> bool {
        self.side.is_closed()
    }

    fn close(&self, py: Python<'_>) {
        self.side.close_with(py, &self.next);
    }
}
