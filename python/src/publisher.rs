//! `_native.Publisher`, which `vmmfd.Publisher` wraps.

use std::{
    os::fd::{AsFd, AsRawFd, RawFd},
    sync::{Arc, Mutex},
};

use pyo3::prelude::*;
use vmmfd::{
    array::{ArrayDescriptor, Order},
    bindings::lock,
    memory::Region,
    session::stream::{self, Event, Format, Policy, PublishOptions, PublisherStats, SubscriberInfo, Usage},
    topic,
};

use crate::{
    array,
    client::Client,
    closing::Side,
    connections::Purpose,
    device::{self, PyDevice},
    driver, dtype,
    error::{Failure, Outcome},
    memory::Tie,
    order, signals,
    streams::{self, Buffer, Place},
    text::Text,
    time::{required, seconds},
};

/// Arrays without an offset begin at a multiple of this number of bytes.
const ALIGNMENT: u64 = 256;

/// The options of a publisher: a dict that `vmmfd._streams` has checked.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Offer<'py> {
    /// Whether subscribers connect to a path or socket.
    listens: bool,
    size: Option<u64>,
    room: u64,
    history: usize,
    loans: usize,
    trust: Vec<u32>,
    // Converted later: the derived code would replace the error.
    every: Bound<'py, PyAny>,
    placement: Bound<'py, PyAny>,
    device: Option<Bound<'py, PyAny>>,
    backend: Option<Bound<'py, PyAny>>,
    timeout: Bound<'py, PyAny>,
}

impl Offer<'_> {
    fn options(&self) -> Outcome<PublishOptions> {
        let options = match self.size {
            Some(size) => PublishOptions::fixed(size, usize::try_from(self.room).unwrap_or(usize::MAX)),
            None => PublishOptions::varying(self.room),
        };
        let placement: Text = self.placement.extract()?;
        let unknown = |_| Failure::invalid(format!("placement={:?} is not one of device, host", &*placement));
        let options = options.history(self.history).loans(self.loans).placement(placement.parse().map_err(unknown)?);
        Ok(seconds(&self.every, "every")?.into_iter().fold(options, PublishOptions::every))
    }
}

/// The publisher of a stream.
#[pyclass(name = "Publisher", module = "vmmfd._native", frozen, weakref)]
pub(crate) struct Publisher {
    side: Side<stream::Publisher>,
    format: Mutex<Arc<Format>>,
    device: PyDevice,
}

#[pymethods]
impl Publisher {
    /// Allocates the pool, and accepts subscribers at a path, or the subscriber at the other end of a connected socket,
    /// or none.
    #[new]
    fn new(py: Python<'_>, place: &Bound<'_, PyAny>, offer: Offer<'_>) -> Outcome<Self> {
        let options = offer.options()?;
        let config = streams::config(&offer.timeout, "timeout", offer.trust)?;
        let selector = offer.device.as_ref().map(device::selector).transpose()?;
        let backend: Option<Text> = offer.backend.map(|backend| backend.extract()).transpose()?;
        let place = offer.listens.then(|| Place::of(place)).transpose()?;
        let publisher = signals::run(py, &[], || {
            let device = driver::device(&driver::driver(backend.as_deref())?, selector)?;
            let publisher = stream::Publisher::create(&device, &options, &config)?;
            match place {
                Some(Place::Path(path)) => publisher.listen(&path)?,
                Some(Place::Socket(socket)) => publisher.admit(socket)?,
                None => {}
            }
            Ok(publisher)
        })?;
        let device = publisher.memory().device().clone();
        let side = Side::new(publisher, &device, "publisher", Tie::Published);
        Ok(Self { side, format: Mutex::default(), device: PyDevice(device) })
    }

    #[getter]
    fn device(&self) -> PyDevice {
        self.device.clone()
    }

    fn admit(&self, py: Python<'_>, socket: &Bound<'_, PyAny>) -> Outcome<()> {
        let socket = streams::socket(socket)?;
        self.side.run(py, |publisher| Ok(publisher.admit(socket)?))
    }

    /// Lets a broker introduce subscribers.
    fn open_topic(&self, py: Python<'_>, broker: &Client, topic: Text, mode: Option<u16>) -> Outcome<()> {
        let publisher = self.side.get()?;
        broker.0.call(py, Purpose::Any, move |client| Ok(topic::open(client, &topic, &publisher, mode)?))
    }

    /// Describes the buffers that are published from now on. Returns the number of bytes that the arrays need.
    #[allow(clippy::type_complexity)]
    fn set_format(
        &self,
        py: Python<'_>,
        arrays: Vec<(Text, Bound<'_, PyAny>, Bound<'_, PyAny>, Option<u64>)>,
        blob: Vec<u8>,
    ) -> Outcome<u64> {
        let (mut format, mut end, mut bytes) = (Format { arrays: Vec::new(), blob }, 0_u64, 0);
        for (Text(name), dtype, shape, offset) in arrays {
            let array = ArrayDescriptor::new(dtype::extract(&dtype)?, array::shape(&shape)?, Order::C)?;
            let array = ArrayDescriptor { offset: offset.unwrap_or(end.next_multiple_of(ALIGNMENT)), ..array };
            end = array.span()?.end;
            bytes = end.max(bytes);
            format.arrays.push((name, array));
        }
        self.side.run(py, |publisher| Ok(publisher.set_format(&format)?))?;
        *lock(&self.format) = Arc::new(format);
        Ok(bytes)
    }

    /// Takes a free buffer. Without `wait`, returns None if there is none now.
    fn loan(&self, py: Python<'_>, size: Option<u64>, wait: Option<Bound<'_, PyAny>>) -> Outcome<Option<Buffer>> {
        let wait = wait.map(|wait| required(&wait, "wait")).transpose()?;
        let format = Arc::clone(&lock(&self.format));
        self.side.run(py, |publisher| {
            let loan = match (size, wait) {
                (None, None) => publisher.try_loan()?,
                (Some(size), None) => publisher.try_loan_of(size)?,
                (None, Some(wait)) => Some(publisher.loan(wait)?),
                (Some(size), Some(wait)) => Some(publisher.loan_of(size, wait)?),
            };
            Ok(loan.map(|loan| Buffer::lent(loan, Arc::clone(publisher.memory()), format)))
        })
    }

    /// Removes the oldest event: its kind, its subscriber, whether that left in order, and the subscribers with buffers.
    #[allow(clippy::type_complexity)]
    fn event(&self, py: Python<'_>) -> Outcome<Option<(&'static str, Option<Fields>, Option<bool>, Vec<Used>)>> {
        let event = self.side.run(py, |publisher| Ok(publisher.event()))?;
        Ok(event.map(|event| match event {
            Event::Joined(of) => ("joined", Some(subscriber(&of)), None, Vec::new()),
            Event::Left { subscriber: of, orderly, .. } => ("left", Some(subscriber(&of)), Some(orderly), Vec::new()),
            Event::Evicted(of) => ("evicted", Some(subscriber(&of)), None, Vec::new()),
            Event::Starved { by } => ("starved", None, None, by.iter().map(usage).collect()),
            _ => ("other", None, None, Vec::new()),
        }))
    }

    fn stats(&self, py: Python<'_>) -> Outcome<Figures> {
        self.side.run(py, |publisher| Ok(figures(&publisher.stats()?)))
    }

    /// How publications on streams are ordered, and the reason.
    #[getter]
    fn order(&self, py: Python<'_>) -> Outcome<(&'static str, Option<String>)> {
        self.side.run(py, |publisher| Ok(order::described(publisher.order())))
    }

    fn evict(&self, py: Python<'_>, id: u64) -> Outcome<bool> {
        self.side.run(py, |publisher| Ok(publisher.evict(id)?))
    }

    /// Completes the stream, and closes the publisher.
    fn finish(&self, py: Python<'_>, wait: &Bound<'_, PyAny>) -> Outcome<Figures> {
        let wait = required(wait, "wait")?;
        let stats = self.side.run(py, |publisher| Ok(figures(&publisher.complete(wait)?)))?;
        self.side.close(py);
        Ok(stats)
    }

    fn fileno(&self, py: Python<'_>) -> Outcome<RawFd> {
        self.side.run(py, |publisher| Ok(publisher.as_fd().as_raw_fd()))
    }

    #[getter]
    fn is_closed(&self) -> bool {
        self.side.is_closed()
    }

    fn close(&self, py: Python<'_>) {
        self.side.close(py);
    }
}

/// The number, pid, uid, policy and queue length of a subscriber.
type Fields = (u64, i32, u32, &'static str, Option<u16>);

fn subscriber(of: &SubscriberInfo) -> Fields {
    let (policy, queue) = match of.policy {
        Policy::Latest => ("latest", None),
        Policy::Every => ("every", None),
        Policy::Queue(length) => ("queue", Some(length)),
    };
    (of.id, of.peer.pid, of.peer.uid, policy, queue)
}

/// A subscriber's fields, whether it is subscribed, the numbers of delivered and skipped buffers, and the buffers and bytes that it has.
type Used = (Fields, (bool, u64, u64, usize, u64));

fn usage(of: &Usage) -> Used {
    (subscriber(&of.subscriber), (of.is_subscribed, of.delivered, of.skipped, of.buffers, of.bytes))
}

/// The numbers of publications and free buffers, and the subscribers.
type Figures = (u64, u64, Vec<Used>);

fn figures(of: &PublisherStats) -> Figures {
    (of.published, of.free, of.subscribers.iter().map(usage).collect())
}
