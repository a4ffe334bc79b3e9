//! The other side: a process that takes memory, or is a client of a broker.

use std::{
    borrow::Cow,
    io::{self, Write},
    os::fd::{AsFd, OwnedFd},
    process, thread,
    time::{Duration, Instant},
};

use serde_json::Value;
use vmmfd::{
    broker::{Client, Get, Object},
    channel::Cancel,
    driver::{Access, Backend, Driver},
    error::{Error, PeerError, RefusalCode, Result},
    internals::{BareMapping, Handle, Location, PoolHandle, RecordSocket},
    memory::Device,
    session::{Config, stream::Subscriber},
};
use vmmfd_cli::{
    child::line_to_parent,
    error::hint,
    line::{Line, typed},
    verbs::HasVerbs,
};

use crate::{
    base::{borrowed, not_prepared, now, open_device, until_asleep, us},
    process::{Answer, Failure, Request, Role, Way},
    report::Machine,
    switching::Switching,
};

/// The number of buffers that a subscriber keeps: a new one, and a held one.
const KEEP: usize = 2;

/// The number of longest durations that `GetUntilDeleted` reports.
const LONGEST: usize = 100;

/// Runs the task of another process of the bench.
pub(crate) fn run_task(task: Value) -> Result<()> {
    match typed(task)? {
        Role::Peer { backend, device, timeout, driver } => serve(backend, &device, timeout, driver),
        Role::Sleeper => sleep(),
        Role::BareStart { backend, device } => {
            // Skip the destructor and run the exit handlers, like an ordinary program: the kernel frees the driver's resources.
            std::mem::forget(open_device(backend, &device)?);
            let written = writeln!(io::stdout(), "ready").and_then(|()| io::stdout().flush());
            written.map_err(|error| Error::system("write to standard output", error))?;
            process::exit(0)
        }
    }
}

/// A sender as idle as a broker: it keeps the descriptors of a record, and sends them back when a record without descriptors wakes it.
fn sleep() -> Result<()> {
    let line = line_to_parent()?;
    let mut kept = Vec::new();
    loop {
        let record = line.receive_bare(&mut [0; 2])?;
        if record.fds.is_empty() {
            line.send_bare(&[0], &borrowed(&kept))?;
        } else {
            kept = record.fds;
        }
    }
}

/// A process that answers [`Request`]s.
struct Taker {
    line: Line,
    selector: String,
    config: Config,
    driver: Option<(Driver, Device)>,
    has: Has,
}

/// The process's state between requests.
#[derive(Default)]
struct Has {
    subscriber: Option<Subscriber>,
    pool: Option<PoolHandle>,
    sleeper: Option<Line>,
    client: Option<Client>,
    /// Memory of the last request, until the next request.
    opened: Option<BareMapping>,
    mapped: Option<Mapped>,
    /// An object of the last request, until the next request.
    object: Option<Object>,
    /// Two objects at the same addresses, until `Close`.
    switching: Option<Switching>,
}

/// Memory of several segments that is mapped by the driver's calls.
struct Mapped {
    address: u64,
    size: u64,
    handles: Vec<Handle>,
}

fn serve(backend: Backend, device: &str, timeout: Duration, driver: bool) -> Result<()> {
    let line = line_to_parent()?;
    let failed = |error: Error| -> Failure { (error.in_full(), hint(&error).map(Cow::into_owned)) };
    let opened = || {
        let driver = driver.then(|| open_device(backend, device)).transpose()?;
        let machine = driver.as_ref().map(|(_, device)| machine(device)).transpose()?;
        Ok((machine, driver))
    };
    let (machine, driver) = match opened() {
        Ok(opened) => opened,
        Err(error) => return line.send(&Err::<Answer, _>(failed(error))),
    };
    line.send(&Ok::<_, Failure>(Answer { machine, ..Answer::default() }))?;
    let config = Config::default().timeout(timeout);
    let mut taker = Taker { line, selector: device.to_owned(), config, driver, has: Has::default() };
    loop {
        let (request, fds) = taker.line.receive_with()?;
        let answer = taker.answer(request, fds).map_err(failed);
        taker.line.send(&answer)?;
    }
}

fn machine(device: &Device) -> Result<Machine> {
    let text = |path: &str| std::fs::read_to_string(path).ok().map(|text| text.trim().to_owned());
    Ok(Machine {
        kernel: text("/proc/sys/kernel/osrelease").unwrap_or_default(),
        cpus: thread::available_parallelism().map_or(0, usize::from),
        device: device.name().to_owned(),
        uuid: device.prefixed_uuid(),
        module: text("/sys/module/nvidia/version"),
        cuda: device.driver().version()?,
    })
}

impl Taker {
    fn answer(&mut self, request: Request, mut fds: Vec<OwnedFd>) -> Result<Answer> {
        self.close_last()?;
        match request {
            Request::Session => {
                let driver = self.driver()?.0;
                let socket = fds.pop().ok_or_else(not_prepared)?;
                let device = Some(self.selector.parse().unwrap_or_default());
                self.has.subscriber = Some(Subscriber::over(socket, driver, device, KEEP, &self.config)?);
            }
            Request::Pool => {
                self.destroy_pool()?;
                let fd = fds.pop().ok_or_else(not_prepared)?;
                self.has.pool = Some(self.driver()?.0.verbs().pools()?.import(fd.as_fd())?);
            }
            Request::Take { way, size } => {
                self.ready()?;
                return self.take(way, size).map(Answer::time);
            }
            Request::Release => self.release()?,
            Request::Sleeper => {
                let socket = fds.pop().ok_or_else(not_prepared)?;
                let socket = RecordSocket::new(socket, self.config.timeout, &Cancel::new()?)?;
                self.has.sleeper = Some(Line::new(socket, "for the sleeper"));
            }
            Request::Wake { size } => return self.wake(size),
            Request::Receive => {
                self.ready()?;
                // Longer than any description.
                self.line.receive_bare(&mut [0; 8192])?;
            }
            Request::Connect { socket } => self.has.client = Some(Client::connect(&socket, &self.config)?),
            Request::Get { name, array } => return self.get(name, array.as_deref()),
            Request::Switch { bare } => return self.switch(bare),
            Request::Close => {
                self.has.switching.take().map_or(Ok(()), Switching::close)?;
                self.destroy_pool()?;
            }
            Request::Gets { name, count, map, at } => return self.gets(name, count, map, at),
            Request::GetUntilDeleted { name } => return self.get_until_deleted(name),
            Request::LoadKernels => {
                let kernels = self.driver()?.0.verbs().kernels()?;
                let ordinal = self.driver()?.1.ordinal();
                let begun = now();
                kernels.load(ordinal)?;
                return Ok(Answer::time(now() - begun));
            }
        }
        Ok(Answer::default())
    }

    /// Answers that the process takes the step now.
    fn ready(&self) -> Result<()> {
        self.line.send(&Ok::<_, Failure>(Answer::default()))
    }

    fn driver(&self) -> Result<(&Driver, &Device)> {
        self.driver.as_ref().map(|(driver, device)| (driver, device)).ok_or_else(not_prepared)
    }

    fn client(&self) -> Result<&Client> {
        self.has.client.as_ref().ok_or_else(not_prepared)
    }

    /// Closes the memory of the last request. Closing it earlier would disturb consumers that still map theirs.
    fn close_last(&mut self) -> Result<()> {
        self.has.object = None;
        if let Some(opened) = self.has.opened.take() {
            self.driver()?.0.verbs().bare()?.close(opened)?;
        }
        let Some(Mapped { address, size, handles }) = self.has.mapped.take() else { return Ok(()) };
        let verbs = self.driver()?.0.verbs();
        verbs.unmap(address, size)?;
        verbs.free(address, size)?;
        handles.into_iter().try_for_each(|handle| verbs.release(handle))
    }

    /// The consumer's half, in another process. Returns the time at which the memory was usable.
    fn take(&mut self, way: Way, size: u64) -> Result<u64> {
        if way.is_stream() {
            return self.take_turn(size);
        }
        let mut bytes = [0; 65];
        let fds = self.line.receive_bare(&mut bytes)?.fds;
        let handle = bytes.first_chunk().ok_or_else(not_prepared)?;
        let (driver, device) = self.driver()?;
        let verbs = driver.verbs();
        let ordinal = device.ordinal();
        match way {
            Way::Legacy => {
                let address = verbs.legacy()?.open(ordinal, handle)?;
                let at = now();
                verbs.legacy()?.close(ordinal, address).map(|()| at)
            }
            Way::Pool => {
                let address =
                    verbs.pools()?.import_pointer(self.has.pool.ok_or_else(not_prepared)?, ordinal, handle)?;
                let at = now();
                verbs.pools()?.free(ordinal, address).map(|()| at)
            }
            Way::Record => Ok(now()),
            _ => self.map(&fds, size),
        }
    }

    /// Maps memory by the driver's calls until the next request, and returns the time at which it was usable.
    fn map(&mut self, fds: &[OwnedFd], size: u64) -> Result<u64> {
        let verbs = self.driver()?.0.verbs();
        let ordinal = self.driver()?.1.ordinal();
        if let [fd] = fds {
            let (opened, _) = verbs.bare()?.open(ordinal, fd.as_fd(), size)?;
            let at = now();
            self.has.opened = Some(opened);
            return Ok(at);
        }
        let segment = size / fds.len().max(1) as u64;
        let address = verbs.reserve(size, 0)?;
        let mut handles = Vec::with_capacity(fds.len());
        for (number, fd) in (0..).zip(fds) {
            let handle = verbs.import(fd.as_fd(), segment)?;
            verbs.map(address + number * segment, segment, 0, handle)?;
            handles.push(handle);
        }
        verbs.set_access(address, size, Location::Device(ordinal), Some(Access::ReadWrite))?;
        let at = now();
        self.has.mapped = Some(Mapped { address, size, handles });
        Ok(at)
    }

    /// Takes a turn of the stream.
    fn take_turn(&mut self, size: u64) -> Result<u64> {
        let subscriber = self.has.subscriber.as_mut().ok_or_else(not_prepared)?;
        let received = subscriber.receive()?;
        let since = u64::try_from(received.usable_since().elapsed().as_nanos()).unwrap_or(u64::MAX);
        let at = now().saturating_sub(since);
        if received.mapped_size() < size {
            return Err(not_prepared());
        }
        subscriber.give_back(received)?;
        Ok(at)
    }

    /// Waits until the session withdraws a buffer.
    fn release(&mut self) -> Result<()> {
        self.ready()?;
        let subscriber = self.has.subscriber.as_mut().ok_or_else(not_prepared)?;
        let before = subscriber.held();
        let deadline = Instant::now() + self.config.timeout;
        while subscriber.held() == before && subscriber.try_receive()?.is_none() {
            if Instant::now() > deadline {
                let purpose = "for the session to withdraw a buffer";
                return Err(Error::Peer(PeerError::Timeout { purpose, waited: self.config.timeout }));
            }
            thread::yield_now();
        }
        Ok(())
    }

    fn wake(&mut self, size: u64) -> Result<Answer> {
        until_asleep();
        let begun = now();
        let sleeper = self.has.sleeper.as_ref().ok_or_else(not_prepared)?;
        sleeper.send_bare(&[0], &[])?;
        let fds = sleeper.receive_bare(&mut [0; 2])?.fds;
        let at = self.map(&fds, size)?;
        Ok(Answer::time(at.saturating_sub(begun)))
    }

    fn get(&mut self, name: String, array: Option<&str>) -> Result<Answer> {
        let client = self.client()?;
        until_asleep();
        let begun = now();
        let object = client.get(&Get::new(name))?.open(self.driver()?.0, None)?;
        let array = array.map(|array| object.array(array)).transpose()?;
        let took = now() - begun;
        drop(array);
        self.has.object = Some(object);
        Ok(Answer::time(took))
    }

    fn switch(&mut self, bare: bool) -> Result<Answer> {
        let mut switching = match self.has.switching.take() {
            Some(switching) => switching,
            None => Switching::open(self.client()?, self.driver()?.1)?,
        };
        let took = switching.switch(bare)?;
        self.has.switching = Some(switching);
        Ok(Answer::time(took))
    }

    fn gets(&self, name: String, count: usize, map: bool, at: u64) -> Result<Answer> {
        let client = self.client()?;
        let get = Get::new(name);
        let driver = map.then(|| self.driver()).transpose()?;
        let mut all = Vec::with_capacity(count);
        thread::sleep(Duration::from_nanos(at.saturating_sub(now())));
        let begun = now();
        for _ in 0..count {
            let since = Instant::now();
            let lease = client.get(&get)?;
            let object = match driver {
                Some((driver, _)) => Ok(lease.open(driver, None)?),
                None => Err(lease),
            };
            all.push(since.elapsed());
            drop(object);
        }
        // Rounded, so that all durations fit into a record.
        let us = all.into_iter().map(|time| (us(time) * 10.0).round() / 10.0).collect();
        Ok(Answer { begun, ended: now(), us, ..Answer::default() })
    }

    /// Reports only the longest gets: there can be very many.
    fn get_until_deleted(&self, name: String) -> Result<Answer> {
        let client = self.client()?;
        let get = Get::new(name);
        let begun = now();
        let mut longest = Vec::new();
        loop {
            let since = Instant::now();
            match client.get(&get) {
                Ok(_) => longest.push(us(since.elapsed())),
                Err(Error::Broker(refusal)) if refusal.code == RefusalCode::Absent => break,
                Err(error) => return Err(error),
            }
            if longest.len() >= 2 * LONGEST {
                longest.sort_by(|some: &f64, other| other.total_cmp(some));
                longest.truncate(LONGEST);
            }
        }
        Ok(Answer { begun, ended: now(), us: longest, ..Answer::default() })
    }

    fn destroy_pool(&mut self) -> Result<()> {
        self.has.pool.take().map_or(Ok(()), |pool| self.driver()?.0.verbs().pools()?.destroy(pool))
    }
}
