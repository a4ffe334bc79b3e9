//! The process that lends memory, and takes the time.

use std::{
    os::fd::{AsFd, OwnedFd},
    path::Path,
    sync::{Arc, Barrier},
    thread,
    time::{Duration, Instant},
};

use super::{
    orders::{Answer, Call, Order, Reply, Way},
    process::BenchProcess,
    stats::now,
    task::{Role, Task},
};
use crate::{
    channel::{Cancel, Listener},
    driver::{Access, Bare, Driver, bare::Created},
    error::{Error, ProtocolError, Result},
    memory::{Device, Pointer, Shared, Spec},
    session::{
        Config,
        stream::{BufferId, Publisher},
    },
    tools::line::Line,
};

/// How long the other end is given to fall asleep over its socket, as it would between two handoffs.
const ASLEEP: Duration = Duration::from_micros(30);

/// What is made ready, all of one size.
#[derive(Default)]
struct Prepared {
    size: u64,
    /// For the floor and the session.
    shared: Option<Arc<Shared>>,
    /// Its descriptor, for the floor.
    fd: Option<OwnedFd>,
    /// To be exported each time.
    created: Option<Created>,
    legacy: Option<(Shared, Pointer)>,
    pool: Option<(Shared, Pointer)>,
}

/// A consumer, and the session with it.
struct Peer {
    process: BenchProcess,
    publisher: Option<Publisher>,
    /// The buffer that it is to hold.
    held: Option<BufferId>,
    /// The one that it is handed now, and is not to hold.
    fresh: Option<BufferId>,
}

struct Producer<'a> {
    task: &'a Task,
    driver: Driver,
    device: Device,
    folder: &'a Path,
    peers: Vec<Peer>,
    prepared: Prepared,
}

/// Does what it is told until whoever tells it has gone.
pub(super) fn serve(task: &Task, folder: &Path, consumers: usize, line: &Line) -> Result<()> {
    let (driver, device) = task.open()?;
    device.activate()?;
    let child = task.with(Role::Consumer);
    let peers = (0..consumers).map(|_| {
        let process = BenchProcess::start(&child)?;
        Ok(Peer { process, publisher: None, held: None, fresh: None })
    });
    let peers = peers.collect::<Result<Vec<_>>>()?;
    // All of them start at once.
    peers.iter().try_for_each(Peer::ready)?;
    line.send(&Answer::started(&device)?)?;
    let mut producer = Producer { task, driver, device, folder, peers, prepared: Prepared::default() };
    loop {
        let answer = match line.receive()? {
            Order::Prepare { size, ways } => producer.prepare(size, &ways).map(|()| Answer::Done),
            Order::Measure { way } => producer.measure(way).map(|us| Answer::Took { us }),
            Order::Clear => producer.clear().map(|()| Answer::Done),
            _ => Err(ProtocolError::Unexpected { got: "order", want: "one for a producer" }.into()),
        };
        line.send(&Answer::of(answer))?;
    }
}

impl Peer {
    fn call(&self, call: &Call) -> Result<()> {
        self.process.send(call)?;
        self.ready()
    }

    fn ready(&self) -> Result<()> {
        match self.process.receive()? {
            Reply::Ready => Ok(()),
            Reply::Usable { .. } => Err(ProtocolError::Unexpected { got: "usable", want: "ready" }.into()),
            Reply::Failed(failure) => Err(failure.of(self.process.name())),
        }
    }

    /// When it had the memory.
    fn usable(&self) -> Result<u64> {
        match self.process.receive()? {
            Reply::Usable { at } => Ok(at),
            Reply::Ready => Err(ProtocolError::Unexpected { got: "ready", want: "usable" }.into()),
            Reply::Failed(failure) => Err(failure.of(self.process.name())),
        }
    }

    fn publisher(&mut self) -> Result<&mut Publisher> {
        self.publisher.as_mut().ok_or(ProtocolError::Unexpected { got: "order", want: "a session" }.into())
    }

    /// Takes a buffer out of the session.
    fn withdraw(&mut self, buffer: BufferId) -> Result<()> {
        // It says so when it looks for what is withdrawn, and again when it has let go.
        self.call(&Call::LetGo)?;
        self.publisher()?.withdraw(buffer)?;
        self.ready()
    }

    /// Enters memory into the session, anew.
    fn describe(&mut self, memory: &Arc<Shared>) -> Result<()> {
        self.fresh = Some(self.publisher()?.add(memory, None, Access::ReadWrite)?);
        Ok(())
    }

    /// Tells of a buffer on which nothing is under way, and returns when that began.
    fn publish(&mut self, buffer: BufferId) -> Result<u64> {
        let begun = now();
        self.publisher()?.announce(buffer)?;
        Ok(begun)
    }

    /// Hears that the buffer was usable, and has it back.
    fn end_of_turn(&mut self) -> Result<u64> {
        let at = self.usable()?;
        self.publisher()?.take_back()?;
        Ok(at)
    }
}

impl Producer<'_> {
    fn prepare(&mut self, size: u64, ways: &[Way]) -> Result<()> {
        let wants = |way: Way| ways.contains(&way);
        let mut prepared = Prepared { size, ..Prepared::default() };
        if [Way::Floor, Way::Fresh, Way::Described, Way::Again].into_iter().any(wants) {
            let shared = Arc::new(Shared::create(&self.device, Spec::vmm(size))?);
            let chunks = shared.chunks(0..size)?.map_or(Vec::new(), |(_, chunks)| chunks);
            let fd = chunks.first().map(|chunk| chunk.as_fd().try_clone_to_owned()).transpose();
            prepared.fd = fd.map_err(|error| Error::system("duplicate a descriptor", error))?;
            prepared.shared = Some(shared);
        }
        if wants(Way::ExportEach) {
            prepared.created = Some(self.driver.verbs().bare()?.create(self.device.ordinal(), size)?);
        }
        if wants(Way::Legacy) {
            prepared.legacy = Some(self.pointed(Spec::legacy(size))?);
        }
        if wants(Way::Pool) {
            let pooled = self.pointed(Spec::pool(size))?;
            if let Some(pool) = pooled.0.pool() {
                for peer in &self.peers {
                    peer.process.send(&Call::Pool)?;
                    peer.process.line.send_bare(&[0], &[pool.export()?])?;
                    peer.ready()?;
                }
            }
            prepared.pool = Some(pooled);
        }
        self.prepared = prepared;
        if [Way::Fresh, Way::Described, Way::Again].into_iter().any(wants) {
            self.connect()?;
        }
        if wants(Way::Again) {
            self.hold()?;
        }
        Ok(())
    }

    /// Memory that is shared by 64 bytes.
    fn pointed(&self, spec: Spec) -> Result<(Shared, Pointer)> {
        let shared = Shared::create(&self.device, spec)?;
        let pointer = shared.describe()?.pointer();
        let pointer = pointer.ok_or(ProtocolError::Content("there are no 64 bytes".to_owned()))?;
        Ok((shared, pointer))
    }

    /// A session with each consumer, unless there is one.
    fn connect(&mut self) -> Result<()> {
        let config = Config::default().with_timeout(self.task.timeout);
        let cancel = Cancel::new()?;
        for (number, peer) in self.peers.iter_mut().enumerate().filter(|(_, peer)| peer.publisher.is_none()) {
            let socket = self.folder.join(format!("{}-{number}", std::process::id()));
            let listener = Listener::bind(&socket, false, config.timeout, &cancel)?;
            peer.process.send(&Call::Connect { socket })?;
            peer.publisher = Some(Publisher::accept(&listener, &self.driver, &config)?);
            peer.ready()?;
        }
        Ok(())
    }

    /// Has each consumer hold the buffer.
    fn hold(&mut self) -> Result<()> {
        let (shared, size) = self.shared()?;
        for peer in &mut self.peers {
            let buffer = peer.publisher()?.add(&shared, None, Access::ReadWrite)?;
            peer.call(&Call::Take { way: Way::Fresh, size })?;
            peer.publish(buffer)?;
            peer.end_of_turn()?;
            peer.held = Some(buffer);
        }
        Ok(())
    }

    fn shared(&self) -> Result<(Arc<Shared>, u64)> {
        let shared = self.prepared.shared.clone().ok_or(not_prepared())?;
        Ok((shared, self.prepared.size))
    }

    /// Hands over once to all consumers, and returns how long it took until the last one had it.
    fn measure(&mut self, way: Way) -> Result<f64> {
        let size = self.prepared.size;
        if way == Way::Fresh {
            let (shared, _) = self.shared()?;
            self.peers.iter_mut().try_for_each(|peer| peer.describe(&shared))?;
        }
        for peer in &self.peers {
            peer.call(&Call::Take { way, size })?;
        }
        let asleep = Instant::now();
        while asleep.elapsed() < ASLEEP {
            std::hint::spin_loop();
        }
        let (prepared, bare) = (&self.prepared, self.driver.verbs().bare()?);
        let begun = match &mut self.peers[..] {
            [peer] => lend(way, peer, prepared, bare)?,
            peers => {
                let barrier = Barrier::new(peers.len());
                let begun = thread::scope(|scope| {
                    let lenders: Vec<_> = peers
                        .iter_mut()
                        .map(|peer| {
                            scope.spawn(|| {
                                barrier.wait();
                                lend(way, peer, prepared, bare)
                            })
                        })
                        .collect();
                    let begun = lenders.into_iter().map(|lender| {
                        lender.join().map_err(|_| Error::PeerGone { purpose: "for a thread to lend" })?
                    });
                    begun.collect::<Result<Vec<_>>>()
                })?;
                Lent { at: begun.iter().map(|lent| lent.at).min().unwrap_or(0), _fd: None }
            }
        };
        let session = matches!(way, Way::Fresh | Way::Described | Way::Again);
        let mut last = 0;
        for peer in &mut self.peers {
            last = last.max(if session { peer.end_of_turn()? } else { peer.usable()? });
        }
        for peer in &mut self.peers {
            if let Some(fresh) = peer.fresh.take() {
                peer.withdraw(fresh)?;
            }
        }
        Ok(last.saturating_sub(begun.at) as f64 / 1000.0)
    }

    fn clear(&mut self) -> Result<()> {
        for peer in &mut self.peers {
            peer.call(&Call::Close)?;
            if let Some(held) = peer.held.take() {
                peer.withdraw(held)?;
            }
        }
        let prepared = std::mem::take(&mut self.prepared);
        match prepared.created {
            Some(created) => self.driver.verbs().bare()?.release(created),
            None => Ok(()),
        }
    }
}

/// When a handoff began, and what is to be closed when it is over.
struct Lent {
    at: u64,
    _fd: Option<OwnedFd>,
}

/// Hands over to one consumer.
fn lend(way: Way, peer: &mut Peer, prepared: &Prepared, bare: &dyn Bare) -> Result<Lent> {
    let begun = now();
    let mut lent = Lent { at: begun, _fd: None };
    match way {
        Way::Floor => peer.process.line.send_bare(&[0], &[prepared.fd.as_ref().ok_or(not_prepared())?.as_fd()])?,
        Way::ExportEach => {
            let fd = bare.export(prepared.created.as_ref().ok_or(not_prepared())?)?;
            peer.process.line.send_bare(&[0], &[fd.as_fd()])?;
            lent._fd = Some(fd);
        }
        Way::Described => {
            peer.describe(prepared.shared.as_ref().ok_or(not_prepared())?)?;
            peer.publish(peer.fresh.ok_or(not_prepared())?)?;
        }
        Way::Fresh => lent.at = peer.publish(peer.fresh.ok_or(not_prepared())?)?,
        Way::Again => {
            let held = peer.held.ok_or(not_prepared())?;
            lent.at = peer.publish(held)?;
        }
        Way::Legacy => peer.process.line.send_bare(&prepared.legacy.as_ref().ok_or(not_prepared())?.1.0, &[])?,
        Way::Pool => peer.process.line.send_bare(&prepared.pool.as_ref().ok_or(not_prepared())?.1.0, &[])?,
        Way::Hop => peer.process.line.send_bare(&[0], &[])?,
    }
    Ok(lent)
}

fn not_prepared() -> Error {
    ProtocolError::Unexpected { got: "order", want: "what makes ready for it" }.into()
}
