//! `_native.Subscriber`, which `vmmfd.Subscriber` wraps.
//!
//! A sample is handed over in two steps, so that an interrupted call never loses it: [`Subscriber::wait`] waits for a sample and keeps it,
//! and reading the attribute `taken` takes it.

use std::{
    collections::VecDeque,
    os::fd::{AsFd, AsRawFd, RawFd},
    sync::{Arc, Mutex, OnceLock},
};

use pyo3::{IntoPyObjectExt, prelude::*, types::PyTuple};
use vmmfd::{
    Error,
    bindings::lock,
    channel::Peer,
    error::PeerError,
    memory::Selector,
    session::{
        Config,
        stream::{self, Policy, SubscribeOptions},
    },
};

use crate::{
    closing::Side,
    device::{self, PyDevice},
    driver,
    error::Outcome,
    memory::Tie,
    order, signals,
    stream_user::{Given, StreamUser},
    streams::{self, Buffer, Place},
    text::Text,
    time::required,
};

/// The options of a subscriber or follower: a dict that `vmmfd._streams` has checked.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Request<'py> {
    every: bool,
    queue: Option<u16>,
    held: u16,
    history: u16,
    trust: Vec<u32>,
    // Converted later: the derived code would replace the error.
    device: Option<Bound<'py, PyAny>>,
    backend: Option<Bound<'py, PyAny>>,
    wait: Bound<'py, PyAny>,
}

impl Request<'_> {
    /// The options, the configuration, the device and the backend.
    pub(crate) fn read(self) -> Outcome<(SubscribeOptions, Config, Option<Selector>, Option<Text>)> {
        let policy = match (self.every, self.queue) {
            (true, _) => Policy::Every,
            (false, Some(length)) => Policy::Queue(length),
            (false, None) => Policy::Latest,
        };
        let options = SubscribeOptions::default().policy(policy).held(self.held).history(self.history);
        let config = streams::config(&self.wait, "wait", self.trust)?;
        let selector = self.device.as_ref().map(device::selector).transpose()?;
        let backend = self.backend.map(|backend| backend.extract()).transpose()?;
        Ok((options, config, selector, backend))
    }
}

/// The subscriber of a stream.
#[pyclass(name = "Subscriber", module = "vmmfd._native", frozen, weakref)]
pub(crate) struct Subscriber {
    side: Side<stream::Subscriber>,
    /// The samples that calls have received and nobody has taken.
    next: Mutex<VecDeque<Buffer>>,
    /// The end of the stream, with the publisher if that crashed.
    end: OnceLock<Option<Peer>>,
    device: PyDevice,
    peer: Peer,
}

#[pymethods]
impl Subscriber {
    /// Connects to a publisher, and maps its pool.
    #[new]
    fn new(py: Python<'_>, place: &Bound<'_, PyAny>, request: Request<'_>) -> Outcome<Self> {
        let (options, config, selector, backend) = request.read()?;
        let place = Place::of(place)?;
        let subscriber = signals::run(py, &[], || {
            let driver = driver::driver(backend.as_deref())?;
            Ok(match place {
                Place::Path(path) => stream::Subscriber::connect(&driver, selector, &path, &options, &config)?,
                Place::Socket(socket) => stream::Subscriber::over(socket, &driver, selector, &options, &config)?,
            })
        })?;
        let (device, peer) = (subscriber.device().clone(), subscriber.peer());
        let side = Side::new(subscriber, &device, "subscriber", Tie::Subscribed);
        Ok(Self { side, next: Mutex::default(), end: OnceLock::new(), device: PyDevice(device), peer })
    }

    /// Waits until there is a sample or the end. Returns whether there is. Threads may call it at once.
    fn wait(&self, py: Python<'_>, wait: &Bound<'_, PyAny>) -> Outcome<bool> {
        self.wait_for(py, wait, None)
    }

    /// This subscriber for the samples of a stream.
    fn on_stream(slf: &Bound<'_, Self>, stream: Given) -> Outcome<OnStream> {
        let device = &slf.get().device.0;
        let user = Arc::new(slf.py().detach(|| StreamUser::new(device, stream))?);
        Ok(OnStream { subscriber: slf.clone().unbind(), user })
    }

    /// How the publisher's work and this process's streams are ordered, and the reason.
    #[getter]
    fn order(&self, py: Python<'_>) -> Outcome<(&'static str, Option<String>)> {
        self.side.run(py, |subscriber| Ok(order::described(subscriber.order())))
    }

    /// The sample that a `wait` found. Reading it takes it; `None` at the end, and if another thread took it. It is not a method: Python runs
    /// signal handlers after a call, and their exceptions would lose its result.
    #[getter]
    fn taken(&self) -> Outcome<Option<Buffer>> {
        self.take(None)
    }

    /// The end of the stream: `()`, or the pid and uid of a publisher that crashed; `None` before the end.
    #[getter]
    fn end<'py>(&self, py: Python<'py>) -> Outcome<Option<Bound<'py, PyAny>>> {
        Ok(match self.end.get() {
            Some(Some(peer)) => Some((peer.pid, peer.uid).into_bound_py_any(py)?),
            Some(None) => Some(PyTuple::empty(py).into_any()),
            None => None,
        })
    }

    /// The number of buffers that this process has.
    #[getter]
    fn held(&self, py: Python<'_>) -> Outcome<usize> {
        self.side.run(py, |subscriber| Ok(subscriber.held()))
    }

    #[getter]
    fn device(&self) -> PyDevice {
        self.device.clone()
    }

    /// The publisher's pid and uid.
    #[getter]
    fn peer(&self) -> (i32, u32) {
        (self.peer.pid, self.peer.uid)
    }

    fn fileno(&self, py: Python<'_>) -> Outcome<RawFd> {
        self.side.run(py, |subscriber| Ok(subscriber.as_fd().as_raw_fd()))
    }

    #[getter]
    fn is_closed(&self) -> bool {
        self.side.is_closed()
    }

    fn close(&self, py: Python<'_>) {
        self.side.close_with(py, &self.next);
    }
}

impl Subscriber {
    /// Waits for a sample that the caller may take.
    fn wait_for(&self, py: Python<'_>, wait: &Bound<'_, PyAny>, user: Option<&Arc<StreamUser>>) -> Outcome<bool> {
        let wait = required(wait, "wait")?;
        self.side.run(py, |subscriber| {
            loop {
                let found = {
                    let mut next = lock(&self.next);
                    if next.front().is_some_and(|sample| sample.suits(user)) {
                        return Ok(true);
                    }
                    next.pop_front()
                };
                // It is for another stream, of an interrupted call or another thread.
                let Some(found) = found else { break };
                match found.make_suit_all() {
                    Ok(false) => drop(found),
                    suits => {
                        lock(&self.next).push_front(found);
                        return suits;
                    }
                }
            }
            let received = match user {
                // The time is also the stream's.
                Some(_) if wait.is_zero() => return Ok(false),
                Some(user) => subscriber.receive_on(user.stream(), wait),
                None => subscriber.receive(wait),
            };
            match received {
                Ok(stream::Received::Sample(sample)) => lock(&self.next).push_back(Buffer::received(sample, user)),
                Ok(stream::Received::Crashed(peer)) => drop(self.end.set(Some(peer))),
                Ok(_) => drop(self.end.set(None)),
                Err(Error::Peer(PeerError::Timeout { .. })) => return Ok(false),
                Err(error) => return Err(error.into()),
            }
            Ok(true)
        })
    }

    fn take(&self, user: Option<&Arc<StreamUser>>) -> Outcome<Option<Buffer>> {
        self.side.check()?;
        let mut next = lock(&self.next);
        let suits = next.front().is_some_and(|sample| sample.suits(user));
        Ok(if suits { next.pop_front() } else { None })
    }
}

/// A subscriber for a call that receives for a stream.
#[pyclass(name = "OnStream", module = "vmmfd._native", frozen)]
pub(crate) struct OnStream {
    subscriber: Py<Subscriber>,
    user: Arc<StreamUser>,
}

#[pymethods]
impl OnStream {
    /// As [`Subscriber::wait`].
    fn wait(&self, py: Python<'_>, wait: &Bound<'_, PyAny>) -> Outcome<bool> {
        self.subscriber.get().wait_for(py, wait, Some(&self.user))
    }

    /// As [`Subscriber::taken`].
    #[getter]
    fn taken(&self) -> Outcome<Option<Buffer>> {
        self.subscriber.get().take(Some(&self.user))
    }
}
