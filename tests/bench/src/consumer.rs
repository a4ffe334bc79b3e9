//! The process that opens the producer's memory.

use std::{
    os::fd::{AsFd, OwnedFd},
    thread,
    time::Instant,
};

use vmmfd::{
    broker::{Client, Get, Object},
    driver::{Access, Driver},
    error::{Error, PeerError, ProtocolError, Result},
    internals::{BareMapping, Handle, Location, PoolHandle},
    memory::{Device, Region},
    session::{Config, stream::Subscriber},
};

use super::{
    broker::{Sleeper, Switching, ThroughC, c_text},
    consumer_handle::until_asleep,
    protocol::{ConsumerRequest, ConsumerResponse, Method, not_prepared},
    stats::{now, us},
    task::Task,
};
use vmmfd_cli::line::Line;
use vmmfd_cli::verbs::HasVerbs;

/// The number of kept buffers: a new buffer of each handoff, and a held buffer.
const KEEP: usize = 2;

struct Consumer<'a> {
    task: &'a Task,
    line: &'a Line,
    driver: Driver,
    device: Device,
    subscriber: Option<Subscriber>,
    /// The memory opened last. It is closed before the next request.
    opened: Option<BareMapping>,
    /// Like `opened`, for memory of several segments.
    segments: Option<Segments>,
    sleeper: Option<Sleeper>,
    broker: Option<Client>,
    /// The object of the last get, until the next request.
    object: Option<Object>,
    through_c: Option<ThroughC>,
    pool: Option<PoolHandle>,
    /// Two objects at the same addresses, until a `Close` request.
    switching: Option<Switching>,
}

/// Memory of several segments, opened by the driver's calls.
struct Segments {
    address: u64,
    size: u64,
    handles: Vec<Handle>,
}

/// Answers the requests of the producer until it disconnects.
pub(super) fn serve(task: &Task, line: &Line) -> Result<()> {
    let (driver, device) = task.open()?;
    device.activate()?;
    line.send(&ConsumerResponse::Ready)?;
    let mut consumer = Consumer {
        task,
        line,
        driver,
        device,
        subscriber: None,
        pool: None,
        opened: None,
        segments: None,
        sleeper: None,
        broker: None,
        object: None,
        through_c: None,
        switching: None,
    };
    loop {
        let request = line.receive()?;
        let response = consumer.answer(&request).unwrap_or_else(|error| ConsumerResponse::Failed(error.into()));
        line.send(&response)?;
    }
}

impl Consumer<'_> {
    fn answer(&mut self, request: &ConsumerRequest) -> Result<ConsumerResponse> {
        if let Some(opened) = self.opened.take() {
            self.driver.verbs().bare()?.close(opened)?;
        }
        if let Some(segments) = self.segments.take() {
            self.close_segments(segments)?;
        }
        self.object = None;
        if let Some(through_c) = &mut self.through_c {
            through_c.close();
        }
        match request {
            ConsumerRequest::Connect { socket } => {
                let config = Config::default().timeout(self.task.timeout);
                let selector = Some(self.task.selector());
                self.subscriber = Some(Subscriber::connect(&self.driver, selector, socket, KEEP, &config)?);
                Ok(ConsumerResponse::Ready)
            }
            ConsumerRequest::Pool => {
                let fd = self.descriptor()?;
                self.destroy_pool()?;
                self.pool = Some(self.driver.verbs().pools()?.import(fd.as_fd())?);
                Ok(ConsumerResponse::Ready)
            }
            ConsumerRequest::Open { method, size, segments } => {
                self.line.send(&ConsumerResponse::Ready)?;
                let at = match (method, segments) {
                    (Method::Floor, 2..) => self.open_segments(self.line.receive_bare(&mut [0; 2])?.fds, *size)?,
                    _ => self.open(*method, *size)?,
                };
                Ok(ConsumerResponse::Usable { at })
            }
            ConsumerRequest::Sleeper => {
                let fds = self.line.receive_bare(&mut [0; 2])?.fds;
                if self.sleeper.is_none() {
                    self.sleeper = Some(Sleeper::start(self.task)?);
                }
                self.sleeper.as_ref().ok_or_else(not_prepared)?.keep(&fds)?;
                Ok(ConsumerResponse::Ready)
            }
            ConsumerRequest::Wake { size } => self.wake(*size),
            ConsumerRequest::Broker { socket } => {
                let config = Config::default().timeout(self.task.timeout);
                self.broker = Some(Client::connect(socket, &config)?);
                self.through_c = Some(ThroughC::connect(self.task, socket)?);
                Ok(ConsumerResponse::Ready)
            }
            ConsumerRequest::Get { name, array } => self.get(name, array.as_deref()),
            ConsumerRequest::GetThroughC { name } => {
                let (Some(through_c), name) = (&mut self.through_c, c_text(name.as_bytes())?) else {
                    return Err(not_prepared());
                };
                until_asleep();
                let begun = Instant::now();
                through_c.get(&name)?;
                Ok(ConsumerResponse::Got { us: us(begun.elapsed()) })
            }
            ConsumerRequest::Take => {
                self.line.send(&ConsumerResponse::Ready)?;
                // Larger than any description.
                self.line.receive_bare(&mut [0; 8192])?;
                Ok(ConsumerResponse::Ready)
            }
            ConsumerRequest::Switch { method } => {
                let switching = match (&mut self.switching, &self.broker) {
                    (Some(switching), _) => switching,
                    (empty, Some(client)) => empty.insert(Switching::open(client, &self.driver, &self.device)?),
                    (None, None) => return Err(not_prepared()),
                };
                Ok(ConsumerResponse::Got { us: switching.measure(*method)? })
            }
            // Everything else is closed before each request.
            ConsumerRequest::Close => {
                self.switching.take().map_or(Ok(()), Switching::close)?;
                self.sleeper.as_ref().map_or(Ok(()), |sleeper| sleeper.keep(&[]))?;
                Ok(ConsumerResponse::Ready)
            }
            ConsumerRequest::Release => self.release(),
        }
    }

    /// Waits until the session withdraws a buffer.
    fn release(&mut self) -> Result<ConsumerResponse> {
        let Some(subscriber) = &mut self.subscriber else { return Ok(ConsumerResponse::Ready) };
        self.line.send(&ConsumerResponse::Ready)?;
        let before = subscriber.held();
        let deadline = Instant::now() + self.task.timeout;
        while subscriber.held() == before && subscriber.try_receive()?.is_none() {
            if Instant::now() > deadline {
                let purpose = "for the session to withdraw a buffer";
                return Err(Error::Peer(PeerError::Timeout { purpose, waited: self.task.timeout }));
            }
            thread::yield_now();
        }
        Ok(ConsumerResponse::Ready)
    }

    /// Opens memory, reads the clock, and closes the memory, now or before the next request.
    fn open(&mut self, method: Method, size: u64) -> Result<u64> {
        let ordinal = self.device.ordinal();
        match method {
            Method::Floor | Method::ExportEach => {
                let fd = self.descriptor()?;
                self.open_descriptor(&fd, size)
            }
            Method::Fresh | Method::Described | Method::Again => {
                let subscriber = self.subscriber.as_mut().ok_or_else(not_prepared)?;
                let received = subscriber.receive()?;
                let since = u64::try_from(received.usable_since().elapsed().as_nanos()).unwrap_or(u64::MAX);
                let at = now().saturating_sub(since);
                if received.size() < size {
                    return Err(not_prepared());
                }
                subscriber.give_back(received)?;
                Ok(at)
            }
            Method::Legacy => {
                let legacy = self.driver.verbs().legacy()?;
                let address = legacy.open(ordinal, &self.bytes()?)?;
                let at = now();
                legacy.close(ordinal, address)?;
                Ok(at)
            }
            Method::Pool => {
                let (pools, Some(pool)) = (self.driver.verbs().pools()?, self.pool) else { return Err(not_prepared()) };
                let address = pools.import_pointer(pool, ordinal, &self.bytes()?)?;
                let at = now();
                pools.free(ordinal, address)?;
                Ok(at)
            }
            Method::Hop => {
                self.line.receive_bare(&mut [0; 2])?;
                Ok(now())
            }
            // The broker's methods.
            _ => Err(not_prepared()),
        }
    }

    /// Opens memory of one segment by the driver's calls. It remains open until the next request: closing it would disturb consumers that
    /// are still opening theirs.
    fn open_descriptor(&mut self, fd: &OwnedFd, size: u64) -> Result<u64> {
        let (opened, _) = self.driver.verbs().bare()?.open(self.device.ordinal(), fd.as_fd(), size)?;
        let at = now();
        self.opened = Some(opened);
        Ok(at)
    }

    /// Opens several segments of equal size at adjacent addresses by the driver's calls.
    fn open_segments(&mut self, fds: Vec<OwnedFd>, size: u64) -> Result<u64> {
        let verbs = self.driver.verbs();
        let segment = size / fds.len().max(1) as u64;
        let address = verbs.reserve(size, 0)?;
        let mut handles = Vec::with_capacity(fds.len());
        for (fd, at) in fds.iter().zip((address..).step_by(usize::try_from(segment).unwrap_or(usize::MAX))) {
            let handle = verbs.import(fd.as_fd(), segment)?;
            verbs.map(at, segment, 0, handle)?;
            handles.push(handle);
        }
        verbs.set_access(address, size, Location::Device(self.device.ordinal()), Some(Access::ReadWrite))?;
        let at = now();
        self.segments = Some(Segments { address, size, handles });
        Ok(at)
    }

    fn close_segments(&self, segments: Segments) -> Result<()> {
        let verbs = self.driver.verbs();
        verbs.unmap(segments.address, segments.size)?;
        verbs.free(segments.address, segments.size)?;
        segments.handles.into_iter().try_for_each(|handle| verbs.release(handle))
    }

    /// Wakes the sleeper and opens its memory until the next request.
    fn wake(&mut self, size: u64) -> Result<ConsumerResponse> {
        let sleeper = self.sleeper.as_ref().ok_or_else(not_prepared)?;
        until_asleep();
        let begun = Instant::now();
        let fds = sleeper.hand_over()?;
        match &fds[..] {
            [fd] => self.open_descriptor(fd, size)?,
            _ => self.open_segments(fds, size)?,
        };
        Ok(ConsumerResponse::Got { us: us(begun.elapsed()) })
    }

    /// Gets an object from the broker. It remains open until the next request.
    fn get(&mut self, name: &str, array: Option<&str>) -> Result<ConsumerResponse> {
        let client = self.broker.as_ref().ok_or_else(not_prepared)?;
        until_asleep();
        let begun = Instant::now();
        let object = client.get(&Get::new(name))?.open(&self.driver, None)?;
        let array = array.map(|array| object.array(array)).transpose()?;
        let us = us(begun.elapsed());
        drop(array);
        self.object = Some(object);
        Ok(ConsumerResponse::Got { us })
    }

    fn descriptor(&self) -> Result<OwnedFd> {
        let fd = self.line.receive_bare(&mut [0; 2])?.fds.pop();
        fd.ok_or(ProtocolError::FdCount { kind: "record", want: 1, claimed: 1, got: 0 }.into())
    }

    fn bytes(&self) -> Result<[u8; 64]> {
        let mut bytes = [0; 65];
        let got = self.line.receive_bare(&mut bytes)?.length;
        let handle = bytes.first_chunk().filter(|_| got == 64);
        handle.copied().ok_or(ProtocolError::ShortRecord { got, header: 64 }.into())
    }

    fn destroy_pool(&mut self) -> Result<()> {
        self.pool.take().map_or(Ok(()), |pool| self.driver.verbs().pools()?.destroy(pool))
    }
}
