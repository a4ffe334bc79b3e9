//! The other side: a process that takes memory, or is a client of a broker.

use std::{borrow::Cow, os::fd::OwnedFd, process, slice};

use serde_json::{Value, json};
use vmmfd::{
    broker::{Client, Get, Object, Prepared},
    channel::Channel,
    driver::{Access, Stream},
    error::RefusalCode,
    internals::{Handle, Location, PoolHandle},
    memory::{Description, Imported},
    session::{
        Config,
        order::Timeline,
        stream::{Received, SubscribeOptions, Subscriber},
    },
    wire::Message,
};
use vmmfd_cli::{
    child::line_to_parent,
    error::hint,
    line::{Line, typed},
};

use crate::{
    prelude::*,
    process::{Failure, Task, until_asleep},
    report::Machine,
};

/// Two objects that take turns at the same addresses.
pub(crate) const OBJECTS: [&str; 2] = ["bench/switch-1", "bench/switch-2"];

/// Answers [`Request`]s until the bench ends.
pub(crate) fn run_task(task: Value) -> Result<()> {
    let task: Task = typed(task)?;
    let line = line_to_parent()?;
    let failed = |error: Error| -> Failure { (error.in_full(), hint(&error).map(Cow::into_owned)) };
    let device = match task.driver.then(|| open_device(task.backend, &task.device)).transpose() {
        Ok(device) => device,
        Err(error) => return line.send(&Err::<Value, _>(failed(error))),
    };
    let config = Config::default().timeout(task.timeout);
    let mut taker = Taker {
        line,
        task,
        config,
        device,
        channel: None,
        description: None,
        subscriber: None,
        pool: None,
        client: None,
        mapped: None,
        object: None,
        switching: None,
    };
    taker.ready()?;
    loop {
        let (request, fds) = taker.line.receive_with()?;
        let answer = taker.answer(request, fds).map_err(failed);
        taker.line.send(&answer)?;
    }
}

/// A process that answers [`Request`]s.
struct Taker {
    line: Line,
    task: Task,
    config: Config,
    device: Option<Device>,
    channel: Option<Channel>,
    description: Option<Description>,
    subscriber: Option<Subscriber>,
    pool: Option<PoolHandle>,
    client: Option<Client>,
    /// Memory or an object of the last request, until the next request: closing it earlier would disturb consumers that still map theirs.
    mapped: Option<Mapped>,
    object: Option<Object>,
    /// Two objects at the same addresses, until `Close`.
    switching: Option<Switching>,
}

/// Segments that are mapped by the driver's calls.
struct Mapped {
    device: Device,
    address: u64,
    size: u64,
    handles: Vec<Handle>,
}

impl Mapped {
    fn open(device: &Device, fds: &[OwnedFd], size: u64, access: Access) -> Result<Self> {
        let verbs = device.verbs();
        let segment = size / fds.len().max(1) as u64;
        let address = verbs.reserve(size, 0)?;
        let mut handles = Vec::with_capacity(fds.len());
        for (number, fd) in (0..).zip(fds) {
            let handle = verbs.import(fd.as_fd(), segment)?;
            verbs.map(address + number * segment, segment, 0, handle)?;
            handles.push(handle);
        }
        verbs.set_access(address, size, Location::Device(device.ordinal()), Some(access))?;
        Ok(Self { device: device.clone(), address, size, handles })
    }

    /// Replaces the only segment.
    fn replace(&mut self, with: &mut Handle) -> Result<()> {
        let verbs = self.device.verbs();
        verbs.unmap(self.address, self.size)?;
        std::mem::swap(&mut self.handles[0], with);
        verbs.map(self.address, self.size, 0, self.handles[0])?;
        verbs.set_access(self.address, self.size, Location::Device(self.device.ordinal()), Some(Access::ReadOnly))
    }

    fn close(self) -> Result<()> {
        let verbs = self.device.verbs();
        verbs.unmap(self.address, self.size)?;
        verbs.free(self.address, self.size)?;
        self.handles.into_iter().try_for_each(|handle| verbs.release(handle))
    }
}

/// Both [`OBJECTS`], mapped by the library and again by the driver's calls.
struct Switching {
    object: Object,
    /// The object that the library has not mapped.
    next: Option<Prepared>,
    mapped: Mapped,
    /// The segment that the driver's calls have not mapped.
    other: Handle,
}

impl Switching {
    fn open(client: &Client, device: &Device) -> Result<Self> {
        let get = |number: usize| client.get(&Get::new(OBJECTS[number]));
        let object = get(0)?.open(device.driver(), None)?;
        let next = Some(object.prepare(get(1)?)?);
        let segment = |number| {
            let part = get(number)?.into_parts().pop().ok_or_else(not_prepared)?;
            part.into_segments()?.pop().ok_or_else(not_prepared)
        };
        let (size, fd) = segment(0)?;
        let mapped = Mapped::open(device, slice::from_ref(&fd), size, Access::ReadOnly)?;
        let other = device.verbs().import(segment(1)?.1.as_fd(), size)?;
        Ok(Self { object, next, mapped, other })
    }

    /// Switches to the other object, and returns the duration.
    fn switch(&mut self, bare: bool) -> Result<u64> {
        let begun = now();
        if bare {
            self.mapped.replace(&mut self.other)?;
        } else {
            self.next = Some(self.object.switch(self.next.take().ok_or_else(not_prepared)?)?);
        }
        Ok(now() - begun)
    }

    fn close(self) -> Result<()> {
        let device = self.mapped.device.clone();
        self.mapped.close()?;
        device.verbs().release(self.other)
    }
}

impl Taker {
    fn answer(&mut self, request: Request, mut fds: Vec<OwnedFd>) -> Result<Value> {
        self.close_last()?;
        let mut fd = || fds.pop().ok_or_else(not_prepared);
        let mut time = 0;
        match request {
            Request::Machine => return Ok(json!(Machine::of(self.device()?)?)),
            Request::Channel => {
                self.channel = Some(Channel::new(fd()?, self.config.timeout, &Cancel::new()?)?);
            }
            Request::Describe { memory } => self.description = Some((*memory).try_into()?),
            Request::Subscribe => {
                let device = Some(self.task.device.parse().unwrap_or_default());
                let driver = self.device()?.driver();
                let options = SubscribeOptions::default();
                self.subscriber = Some(Subscriber::over(fd()?, driver, device, &options, &self.config)?);
            }
            Request::Pool => {
                self.destroy_pool()?;
                self.pool = Some(self.device()?.verbs().pools()?.import(fd()?.as_fd())?);
            }
            Request::Take { way, size } => {
                self.ready()?;
                time = self.take(way, size)?;
            }
            Request::Wake { size } => time = self.wake(size)?,
            Request::Receive => {
                self.ready()?;
                // Longer than any description.
                self.line.receive_bare(&mut [0; 8192])?;
            }
            Request::Follow { on_stream } => {
                self.ready()?;
                return Ok(json!(self.follow(on_stream)?));
            }
            Request::Await { values } => return Ok(json!(self.follow_timeline(fd()?, values)?)),
            Request::Connect { socket } => self.client = Some(Client::connect(&socket, &self.config)?),
            Request::Get { name, array } => time = self.get(name, array.as_deref())?,
            Request::Switch { bare } => {
                if self.switching.is_none() {
                    self.switching = Some(Switching::open(self.client()?, self.device()?)?);
                }
                time = self.switching.as_mut().ok_or_else(not_prepared)?.switch(bare)?;
            }
            Request::Close => {
                (self.subscriber, self.description) = (None, None);
                self.switching.take().map_or(Ok(()), Switching::close)?;
                self.destroy_pool()?;
            }
            Request::Gets { name, count, map, at } => return self.gets(name, count, map, at),
            Request::GetUntilDeleted { name } => time = self.get_until_deleted(name)?,
            Request::LoadKernels => {
                let kernels = self.device()?.verbs().kernels()?;
                let begun = now();
                kernels.load(self.device()?.ordinal())?;
                time = now() - begun;
            }
            // Skips the destructors and runs the exit handlers: the kernel frees the driver's resources.
            Request::Exit => process::exit(0),
        }
        Ok(json!(time))
    }

    /// Answers that the process takes the step now.
    fn ready(&self) -> Result<()> {
        self.line.send(&Ok::<_, Failure>(0))
    }

    fn device(&self) -> Result<&Device> {
        self.device.as_ref().ok_or_else(not_prepared)
    }

    fn client(&self) -> Result<&Client> {
        self.client.as_ref().ok_or_else(not_prepared)
    }

    fn close_last(&mut self) -> Result<()> {
        self.object = None;
        self.mapped.take().map_or(Ok(()), Mapped::close)
    }

    fn destroy_pool(&mut self) -> Result<()> {
        self.pool.take().map_or(Ok(()), |pool| self.device()?.verbs().pools()?.destroy(pool))
    }

    /// The consumer's half of a handoff. Returns the time at which the memory was usable.
    fn take(&mut self, way: Way, size: u64) -> Result<u64> {
        match way {
            Way::Fresh | Way::Described => return self.open(way),
            Way::Again => return self.receive(size),
            _ => {}
        }
        let mut bytes = [0; 65];
        let fds = self.line.receive_bare(&mut bytes)?.fds;
        let handle = bytes.first_chunk().ok_or_else(not_prepared)?;
        let verbs = self.device()?.verbs();
        let ordinal = self.device()?.ordinal();
        match way {
            Way::Legacy => {
                let address = verbs.legacy()?.open(ordinal, handle)?;
                let at = now();
                verbs.legacy()?.close(ordinal, address).map(|()| at)
            }
            Way::Pool => {
                let pool = self.pool.ok_or_else(not_prepared)?;
                let address = verbs.pools()?.import_pointer(pool, ordinal, handle)?;
                let at = now();
                verbs.pools()?.free(ordinal, address).map(|()| at)
            }
            Way::Record => Ok(now()),
            _ => self.map(&fds, size),
        }
    }

    /// Maps memory by the driver's calls until the next request, and returns the time at which it was usable.
    fn map(&mut self, fds: &[OwnedFd], size: u64) -> Result<u64> {
        let mapped = Mapped::open(self.device()?, fds, size, Access::ReadWrite)?;
        let at = now();
        self.mapped = Some(mapped);
        Ok(at)
    }

    /// Opens memory by the library's records.
    fn open(&mut self, way: Way) -> Result<u64> {
        let channel = self.channel.as_mut().ok_or_else(not_prepared)?;
        if way == Way::Described {
            let (Message::Offer(offer), _) = channel.receive("for an offer")? else { return Err(not_prepared()) };
            self.description = Some(offer.memory.try_into()?);
        }
        let (Message::Segments(segments), fds) = channel.receive("for segments")? else { return Err(not_prepared()) };
        let device = self.device.as_ref().ok_or_else(not_prepared)?;
        let description = self.description.as_ref().ok_or_else(not_prepared)?;
        let memory = Imported::open(device, description, &segments.sizes, fds, Access::ReadWrite)?;
        let at = now();
        drop(memory);
        Ok(at)
    }

    /// Receives a buffer of the stream, and gives it back.
    fn receive(&self, size: u64) -> Result<u64> {
        let subscriber = self.subscriber.as_ref().ok_or_else(not_prepared)?;
        let received = subscriber.receive(self.config.timeout)?;
        let at = now();
        match received {
            Received::Sample(sample) if sample.size() >= size => Ok(at),
            _ => Err(not_prepared()),
        }
    }

    fn stream(&self) -> Result<Stream> {
        let device = self.device()?;
        device.driver().create_stream(device.ordinal())
    }

    /// The stream waits before the value is recorded.
    fn follow_timeline(&self, file: OwnedFd, values: u64) -> Result<Vec<u64>> {
        let (timeline, stream) = (Timeline::open(file, Some(self.device()?))?, self.stream()?);
        self.ready()?;
        let one = |value| {
            timeline.wait(&stream, value, self.config.timeout)?;
            stream.synchronize()?;
            Ok(now())
        };
        (1..=values).map(one).collect()
    }

    /// Receives publications and gives them back, until one without a time.
    fn follow(&self, on_stream: bool) -> Result<Vec<(u64, f64)>> {
        let subscriber = self.subscriber.as_ref().ok_or_else(not_prepared)?;
        let stream = on_stream.then(|| self.stream()).transpose()?;
        let mut all = Vec::new();
        loop {
            let received = match &stream {
                Some(stream) => subscriber.receive_on(stream, self.config.timeout)?,
                None => subscriber.receive(self.config.timeout)?,
            };
            stream.as_ref().map_or(Ok(()), Stream::synchronize)?;
            let at = now();
            let Received::Sample(sample) = received else { return Err(not_prepared()) };
            let Some(begun) = sample.user().first_chunk() else { return Ok(all) };
            // Rounded, so that all fit into a record.
            let took = at.saturating_sub(u64::from_ne_bytes(*begun)) as f64 / 1e3;
            all.push((sample.number(), (took * 10.0).round() / 10.0));
        }
    }

    fn wake(&mut self, size: u64) -> Result<u64> {
        until_asleep();
        let begun = now();
        self.line.send_bare(&[0], &[])?;
        let fds = self.line.receive_bare(&mut [0; 2])?.fds;
        Ok(self.map(&fds, size)?.saturating_sub(begun))
    }

    fn get(&mut self, name: String, array: Option<&str>) -> Result<u64> {
        let client = self.client()?;
        until_asleep();
        let begun = now();
        let object = client.get(&Get::new(name))?.open(self.device()?.driver(), None)?;
        let array = array.map(|array| object.array(array)).transpose()?;
        let took = now() - begun;
        drop(array);
        self.object = Some(object);
        Ok(took)
    }

    fn gets(&self, name: String, count: usize, map: bool, at: u64) -> Result<Value> {
        let client = self.client()?;
        let get = Get::new(name);
        let mut all = Vec::with_capacity(count);
        thread::sleep(Duration::from_nanos(at.saturating_sub(now())));
        let begun = now();
        for _ in 0..count {
            let since = Instant::now();
            let lease = client.get(&get)?;
            let object = if map { Ok(lease.open(self.device()?.driver(), None)?) } else { Err(lease) };
            // Rounded, so that all durations fit into a record.
            all.push((us(since.elapsed()) * 10.0).round() / 10.0);
            drop(object);
        }
        Ok(json!((begun, now(), all)))
    }

    fn get_until_deleted(&self, name: String) -> Result<u64> {
        let client = self.client()?;
        let get = Get::new(name);
        let mut longest = 0;
        loop {
            let begun = now();
            match client.get(&get) {
                Ok(_) => longest = longest.max(now() - begun),
                Err(Error::Broker(refusal)) if refusal.code == RefusalCode::Absent => return Ok(longest),
                Err(error) => return Err(error),
            }
        }
    }
}
