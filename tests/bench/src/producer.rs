//! The process that shares memory and measures the handoffs.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    sync::{Arc, Barrier},
    thread,
};

use nix::fcntl::{FcntlArg, fcntl};
use vmmfd::{
    channel::{Cancel, Listener},
    driver::{Access, Backend, Driver},
    error::{Error, PeerError, ProtocolError, Result},
    internals::{Bare, Created},
    memory::{Device, Pointer, Shared, Spec},
    session::{Config, stream::Publisher},
};

use super::{
    broker::Maker,
    consumer_handle::{ConsumerHandle, until_asleep},
    process::BenchProcess,
    protocol::{ConsumerRequest, Method, ProducerRequest, ProducerResponse, not_prepared},
    stats::now,
    task::{Role, Task},
};
use vmmfd_cli::line::Line;
use vmmfd_cli::verbs::HasVerbs;

/// The prepared memory. All of it has the same size.
#[derive(Default)]
struct Prepared {
    size: u64,
    /// Memory for the floor and the session.
    shared: Option<Arc<Shared>>,
    /// The descriptors of its segments, for the floor.
    fds: Vec<OwnedFd>,
    /// Memory that is exported for each handoff.
    created: Option<Created>,
    legacy: Option<(Shared, Pointer)>,
    pool: Option<(Shared, Pointer)>,
}

struct Producer<'a> {
    task: &'a Task,
    driver: Driver,
    device: Device,
    folder: &'a Path,
    consumers: Vec<ConsumerHandle>,
    prepared: Prepared,
    maker: Option<Maker>,
}

/// Answers the requests of the measuring process until it disconnects.
pub(super) fn serve(task: &Task, folder: &Path, consumers: usize, line: &Line) -> Result<()> {
    let (driver, device) = task.open()?;
    device.activate()?;
    let child = task.with(Role::Consumer);
    let consumers = (0..consumers).map(|_| {
        let process = BenchProcess::start(&child)?;
        Ok(ConsumerHandle { process, publisher: None, held: None, fresh: None })
    });
    let consumers = consumers.collect::<Result<Vec<_>>>()?;
    // All consumers start their drivers concurrently.
    consumers.iter().try_for_each(ConsumerHandle::ready)?;
    line.send(&ProducerResponse::started(&device)?)?;
    let mut producer = Producer { task, driver, device, folder, consumers, prepared: Prepared::default(), maker: None };
    loop {
        let response = match line.receive()? {
            ProducerRequest::Prepare { size, segment, methods } => {
                producer.prepare(size, segment, &methods).map(|()| ProducerResponse::Done)
            }
            ProducerRequest::IsEmulated => producer.is_emulated().map(ProducerResponse::IsEmulated),
            ProducerRequest::Connect { socket } => producer.connect_to_broker(&socket).map(|()| ProducerResponse::Done),
            ProducerRequest::Measure { method } => producer.measure(method).map(|us| ProducerResponse::Time { us }),
            ProducerRequest::Clear => producer.clear().map(|()| ProducerResponse::Done),
            _ => Err(ProtocolError::Unexpected { got: "request", want: "one for a producer" }.into()),
        };
        line.send(&ProducerResponse::of(response))?;
    }
}

impl Producer<'_> {
    fn prepare(&mut self, size: u64, segment: Option<u64>, methods: &[Method]) -> Result<()> {
        let wants = |method: Method| methods.contains(&method);
        let mut prepared = Prepared { size, ..Prepared::default() };
        let common = |method: &Method| !matches!(method, Method::ExportEach | Method::Legacy | Method::Pool);
        if methods.iter().any(common) {
            let spec = Spec::vmm(size);
            let shared = Arc::new(Shared::create(&self.device, segment.map_or(spec, |segment| spec.chunk(segment)))?);
            let chunks = shared.chunks(0..size)?.map_or(Vec::new(), |(_, chunks)| chunks);
            let fds = chunks.iter().map(|chunk| chunk.as_fd().try_clone_to_owned()).collect::<io::Result<_>>();
            prepared.fds = fds.map_err(|error| Error::system("duplicate a descriptor", error))?;
            prepared.shared = Some(shared);
        }
        if wants(Method::ExportEach) {
            prepared.created = Some(self.driver.verbs().bare()?.create(self.device.ordinal(), size)?);
        }
        if wants(Method::Legacy) {
            prepared.legacy = Some(self.with_pointer(Spec::legacy(size))?);
        }
        if wants(Method::Sleeper) {
            let fds: Vec<BorrowedFd<'_>> = prepared.fds.iter().map(AsFd::as_fd).collect();
            for consumer in &self.consumers {
                consumer.process.send(&ConsumerRequest::Sleeper)?;
                consumer.process.line.send_bare(&[0], &fds)?;
                consumer.ready()?;
            }
        }
        if wants(Method::Pool) {
            let pooled = self.with_pointer(Spec::pool(size))?;
            if let Some(pool) = pooled.0.pool() {
                for consumer in &self.consumers {
                    consumer.process.send(&ConsumerRequest::Pool)?;
                    consumer.process.line.send_bare(&[0], &[pool.export()?])?;
                    consumer.ready()?;
                }
            }
            prepared.pool = Some(pooled);
        }
        self.prepared = prepared;
        if [Method::Fresh, Method::Described, Method::Again].into_iter().any(wants) {
            self.connect()?;
        }
        if wants(Method::Again) {
            self.hold()?;
        }
        match (&mut self.maker, &self.prepared.shared) {
            (Some(maker), Some(shared)) => maker.prepare(shared, methods),
            _ => Ok(()),
        }
    }

    /// Creates memory that is shared by a handle of 64 bytes.
    fn with_pointer(&self, spec: Spec) -> Result<(Shared, Pointer)> {
        let shared = Shared::create(&self.device, spec)?;
        let pointer = shared.describe()?.pointer();
        let pointer = pointer.ok_or(ProtocolError::Content("the description has no handle of 64 bytes".to_owned()))?;
        Ok((shared, pointer))
    }

    fn is_emulated(&self) -> Result<bool> {
        let bare = self.driver.verbs().bare()?;
        let created = bare.create(self.device.ordinal(), self.device.granularity()?)?;
        let seals = bare.export(&created).map(|fd| fcntl(&fd, FcntlArg::F_GET_SEALS));
        bare.release(created)?;
        // A real driver's descriptor is a device file, which has no seals.
        Ok(self.driver.backend() == Backend::Cuda && seals?.is_ok())
    }

    fn connect_to_broker(&mut self, socket: &Path) -> Result<()> {
        self.maker = Some(Maker::connect(self.task, socket)?);
        let request = ConsumerRequest::Broker { socket: socket.to_owned() };
        self.consumers.iter().try_for_each(|consumer| consumer.call(&request))
    }

    /// Opens the missing sessions to consumers.
    fn connect(&mut self) -> Result<()> {
        let config = Config::default().timeout(self.task.timeout);
        let cancel = Cancel::new()?;
        for (number, consumer) in
            self.consumers.iter_mut().enumerate().filter(|(_, consumer)| consumer.publisher.is_none())
        {
            let socket = self.folder.join(format!("{}-{number}", std::process::id()));
            let listener = Listener::bind(&socket, false, config.timeout, &cancel)?;
            consumer.process.send(&ConsumerRequest::Connect { socket })?;
            consumer.publisher = Some(Publisher::accept(&listener, &self.driver, &config)?);
            consumer.ready()?;
        }
        Ok(())
    }

    /// Adds the shared buffer to each session, so that each consumer holds it.
    fn hold(&mut self) -> Result<()> {
        let (shared, size) = self.shared()?;
        for consumer in &mut self.consumers {
            let buffer = consumer.publisher()?.add(&shared, None, Access::ReadWrite)?;
            consumer.call(&ConsumerRequest::Open { method: Method::Fresh, size, segments: 1 })?;
            consumer.publish(buffer)?;
            consumer.end_of_turn()?;
            consumer.held = Some(buffer);
        }
        Ok(())
    }

    fn shared(&self) -> Result<(Arc<Shared>, u64)> {
        let shared = self.prepared.shared.clone().ok_or(not_prepared())?;
        Ok((shared, self.prepared.size))
    }

    /// Hands over once to all consumers. Returns the microseconds until the last consumer has the memory.
    fn measure(&mut self, method: Method) -> Result<f64> {
        if let (Some(maker), [consumer]) = (&self.maker, &self.consumers[..])
            && let Some(us) = maker.measure(method, consumer)?
        {
            return Ok(us);
        }
        let size = self.prepared.size;
        if method == Method::Fresh {
            let (shared, _) = self.shared()?;
            self.consumers.iter_mut().try_for_each(|consumer| consumer.describe(&shared))?;
        }
        for consumer in &self.consumers {
            let segments = self.prepared.fds.len();
            consumer.call(&ConsumerRequest::Open { method, size, segments })?;
        }
        until_asleep();
        let (prepared, bare) = (&self.prepared, self.driver.verbs().bare()?);
        let begun = match &mut self.consumers[..] {
            [consumer] => hand_over(method, consumer, prepared, bare)?,
            consumers => {
                let barrier = Barrier::new(consumers.len());
                let begun = thread::scope(|scope| {
                    let threads: Vec<_> = consumers
                        .iter_mut()
                        .map(|consumer| {
                            scope.spawn(|| {
                                barrier.wait();
                                hand_over(method, consumer, prepared, bare)
                            })
                        })
                        .collect();
                    let begun = threads.into_iter().map(|thread| {
                        thread.join().map_err(|_| {
                            Error::Peer(PeerError::Gone { pid: 0, purpose: "for a thread to hand over" })
                        })?
                    });
                    begun.collect::<Result<Vec<_>>>()
                })?;
                Begun { at: begun.iter().map(|begun| begun.at).min().unwrap_or(0), _fd: None }
            }
        };
        let session = matches!(method, Method::Fresh | Method::Described | Method::Again);
        let mut last = 0;
        for consumer in &mut self.consumers {
            last = last.max(if session { consumer.end_of_turn()? } else { consumer.usable()? });
        }
        for consumer in &mut self.consumers {
            if let Some(fresh) = consumer.fresh.take() {
                consumer.withdraw(fresh)?;
            }
        }
        Ok(last.saturating_sub(begun.at) as f64 / 1000.0)
    }

    fn clear(&mut self) -> Result<()> {
        for consumer in &mut self.consumers {
            consumer.call(&ConsumerRequest::Close)?;
            if let Some(held) = consumer.held.take() {
                consumer.withdraw(held)?;
            }
        }
        self.maker.iter_mut().try_for_each(Maker::clear)?;
        let prepared = std::mem::take(&mut self.prepared);
        match prepared.created {
            Some(created) => self.driver.verbs().bare()?.release(created),
            None => Ok(()),
        }
    }
}

/// The start time of a handoff, and the descriptor to close after it.
struct Begun {
    at: u64,
    _fd: Option<OwnedFd>,
}

fn hand_over(method: Method, consumer: &mut ConsumerHandle, prepared: &Prepared, bare: &dyn Bare) -> Result<Begun> {
    let begun = now();
    let mut handoff = Begun { at: begun, _fd: None };
    match method {
        Method::Floor => {
            let fds: Vec<BorrowedFd<'_>> = prepared.fds.iter().map(AsFd::as_fd).collect();
            consumer.process.line.send_bare(&[0], &fds)?
        }
        Method::ExportEach => {
            let fd = bare.export(prepared.created.as_ref().ok_or(not_prepared())?)?;
            consumer.process.line.send_bare(&[0], &[fd.as_fd()])?;
            handoff._fd = Some(fd);
        }
        Method::Described => {
            consumer.describe(prepared.shared.as_ref().ok_or(not_prepared())?)?;
            consumer.publish(consumer.fresh.ok_or(not_prepared())?)?;
        }
        Method::Fresh => handoff.at = consumer.publish(consumer.fresh.ok_or(not_prepared())?)?,
        Method::Again => {
            let held = consumer.held.ok_or(not_prepared())?;
            handoff.at = consumer.publish(held)?;
        }
        Method::Legacy => consumer.process.line.send_bare(&prepared.legacy.as_ref().ok_or(not_prepared())?.1.0, &[])?,
        Method::Pool => consumer.process.line.send_bare(&prepared.pool.as_ref().ok_or(not_prepared())?.1.0, &[])?,
        Method::Hop => consumer.process.line.send_bare(&[0], &[])?,
        // The broker's methods.
        _ => return Err(not_prepared()),
    }
    Ok(handoff)
}
