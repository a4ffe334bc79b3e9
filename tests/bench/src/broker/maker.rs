//! The producer side of the bench: creates and puts objects.

use std::{os::fd::AsFd, path::Path, sync::Arc, time::Instant};

use vmmfd::{
    array::{ArrayDescriptor, ElementType, Order},
    broker::{ArrayEntry, Client, Put, PutPart},
    error::{Error, ProtocolError, Result},
    memory::{Region, Shared, Spec},
    session::Config,
    wire,
};

use super::switching::OBJECTS;
use crate::{
    consumer_handle::{ConsumerHandle, until_asleep},
    protocol::{ConsumerRequest, ConsumerResponse, Method, not_prepared},
    stats::us,
    task::Task,
};

const PLAIN: &str = "bench/plain";
const ONE_ARRAY: &str = "bench/one-array";
const MANY_ARRAYS: &str = "bench/many-arrays";
const NEW: &str = "bench/new";

/// The name of every object's part.
const PART: &str = "all";

/// The number of arrays in the object of many arrays.
pub(super) const ARRAYS: u64 = 10_000;

/// The size of each array in bytes.
const ARRAY: u64 = 200;

/// The number of segments for puts and sends of several segments.
pub(super) const SEGMENTS: u64 = 65;

/// A connection to the broker, and the objects put over it.
pub(crate) struct Maker {
    client: Client,
    objects: Vec<&'static str>,
    shared: Option<Arc<Shared>>,
    /// Memory of [`SEGMENTS`] segments.
    segments: Option<Shared>,
}

impl Maker {
    pub(crate) fn connect(task: &Task, socket: &Path) -> Result<Self> {
        let config = Config::default().timeout(task.timeout);
        Ok(Self { client: Client::connect(socket, &config)?, objects: Vec::new(), shared: None, segments: None })
    }

    /// Puts the objects for the get methods, and creates the memory for the put methods.
    pub(crate) fn prepare(&mut self, shared: &Arc<Shared>, methods: &[Method]) -> Result<()> {
        for &method in methods {
            let (name, arrays) = match method {
                Method::Get => (PLAIN, 0),
                Method::GetOneArray => (ONE_ARRAY, 1),
                Method::GetManyArrays => (MANY_ARRAYS, ARRAYS),
                Method::Switch => {
                    // Only the broker keeps the second object.
                    let other = Shared::create(shared.device(), Spec::vmm(shared.size()))?;
                    for (name, memory) in OBJECTS.into_iter().zip([&**shared, &other]) {
                        self.client.put(&Put::new(name).part(PutPart::of(PART, memory)?))?;
                        self.objects.push(name);
                    }
                    continue;
                }
                Method::SendSegments | Method::PutSegments if self.segments.is_none() => {
                    let (device, unit) = (shared.device(), shared.device().granularity()?);
                    self.segments = Some(Shared::create(device, Spec::vmm(SEGMENTS * unit).chunk(unit))?);
                    continue;
                }
                _ => continue,
            };
            let part = PutPart::of(PART, shared)?.arrays((0..arrays).map(array).collect::<Result<Vec<_>>>()?);
            self.client.put(&Put::new(name).part(part))?;
            self.objects.push(name);
        }
        self.shared = Some(Arc::clone(shared));
        Ok(())
    }

    /// Measures a method of the broker, or a send for comparison; `None` for any other method.
    pub(crate) fn measure(&self, method: Method, consumer: &ConsumerHandle) -> Result<Option<f64>> {
        match method {
            Method::Sleeper => got(consumer, &ConsumerRequest::Wake { size: self.shared()?.size() }),
            Method::Get => get(consumer, PLAIN, None),
            Method::GetThroughC => got(consumer, &ConsumerRequest::GetThroughC { name: PLAIN.to_owned() }),
            Method::GetOneArray => get(consumer, ONE_ARRAY, Some(array(0)?.name)),
            Method::GetManyArrays => get(consumer, MANY_ARRAYS, Some(array(ARRAYS - 1)?.name)),
            Method::Send => send(consumer, self.shared()?),
            Method::SendSegments => send(consumer, self.segments()?),
            Method::Put => self.put(self.shared()?),
            Method::PutSegments => self.put(self.segments()?),
            Method::SwitchBare | Method::Switch => got(consumer, &ConsumerRequest::Switch { method }),
            _ => return Ok(None),
        }
        .map(Some)
    }

    /// Deletes the objects and frees the memory.
    pub(crate) fn clear(&mut self) -> Result<()> {
        (self.shared, self.segments) = (None, None);
        self.objects.drain(..).try_for_each(|name| self.client.delete(name))
    }

    fn put(&self, memory: &Shared) -> Result<f64> {
        until_asleep();
        let begun = Instant::now();
        self.client.put(&Put::new(NEW).part(PutPart::of(PART, memory)?))?;
        let us = us(begun.elapsed());
        self.client.delete(NEW)?;
        Ok(us)
    }

    fn shared(&self) -> Result<&Shared> {
        self.shared.as_deref().ok_or_else(not_prepared)
    }

    fn segments(&self) -> Result<&Shared> {
        self.segments.as_ref().ok_or_else(not_prepared)
    }
}

fn get(consumer: &ConsumerHandle, name: &str, array: Option<String>) -> Result<f64> {
    got(consumer, &ConsumerRequest::Get { name: name.to_owned(), array })
}

/// Sends a request to the consumer and returns the consumer's duration.
fn got(consumer: &ConsumerHandle, request: &ConsumerRequest) -> Result<f64> {
    consumer.process.send(request)?;
    match consumer.process.receive()? {
        ConsumerResponse::Got { us } => Ok(us),
        ConsumerResponse::Failed(failure) => Err(failure.of(consumer.process.name())),
        _ => Err(ProtocolError::Unexpected { got: "response", want: "that of a get" }.into()),
    }
}

/// Sends the description and the descriptors of memory in one record, like a producer in a handoff.
fn send(consumer: &ConsumerHandle, memory: &Shared) -> Result<f64> {
    consumer.call(&ConsumerRequest::Take)?;
    until_asleep();
    let begun = Instant::now();
    memory.synchronize()?;
    let description = wire::Memory::from(&memory.describe()?);
    let record = serde_json::to_vec(&description).map_err(|error| Error::system("describe memory", error))?;
    let chunks = memory.chunks(0..memory.size())?.map_or(Vec::new(), |(_, chunks)| chunks);
    let fds: Vec<_> = chunks.iter().map(|chunk| chunk.as_fd()).collect();
    consumer.process.line.send_bare(&record, &fds)?;
    let us = us(begun.elapsed());
    consumer.ready()?;
    Ok(us)
}

/// Describes array `number` of an object of many adjacent arrays.
fn array(number: u64) -> Result<ArrayEntry> {
    let mut array = ArrayDescriptor::new(ElementType::F32, [ARRAY / 4], Order::C)?;
    array.offset = number * ARRAY;
    Ok(ArrayEntry::new(format!("model.layers.{}.weight.{}", number / 100, number % 100), array))
}
