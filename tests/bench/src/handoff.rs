//! The groups `handoff` and `repeat`: each way to hand over memory, at each size, to each number of consumers.

use std::{
    mem,
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
};

use vmmfd::{
    channel::Channel,
    driver::Access,
    error::Result,
    internals::Handle,
    memory::{Chunk, Device, MOST_OF_A_POOL, Pointer, Region, Shared, Spec},
    session::stream::{BufferId, Publisher},
};
use vmmfd_cli::{units::about, verbs::HasVerbs};

use crate::{
    process::{Peer, Request, Way, exportable, not_prepared, now, until_asleep},
    report::{About, Group},
    run::{Named, Run},
};

/// Memory at the producer, of one size.
#[derive(Default)]
struct Memory {
    shared: Option<Arc<Shared>>,
    /// The segments of the shared memory.
    chunks: Vec<Arc<Chunk>>,
    unshared: Option<Handle>,
    /// Legacy memory and memory of a pool, with their handles.
    pointers: Vec<(Way, Shared, Pointer)>,
}

impl Memory {
    /// The producer's half of a handoff.
    fn give(&self, device: &Device, way: Way, to: &mut Consumer) -> Result<()> {
        let line = &to.peer.line;
        match way {
            Way::Floor => line.send_bare(&[0], &descriptors(&self.chunks)),
            Way::Export => {
                let created = self.unshared.ok_or_else(not_prepared)?;
                let fd = device.verbs().export(created)?;
                line.send_bare(&[0], &[fd.as_fd()])
            }
            Way::Legacy | Way::Pool => {
                let found = self.pointers.iter().find(|(other, ..)| *other == way);
                line.send_bare(&found.ok_or_else(not_prepared)?.2.0, &[])
            }
            Way::Record => line.send_bare(&[0], &[]),
            Way::Described | Way::Fresh | Way::Again => {
                if way == Way::Described {
                    to.describe(self)?;
                }
                to.publisher.announce(to.buffer.ok_or_else(not_prepared)?).map(drop)
            }
        }
    }
}

/// The segments of memory.
pub(crate) fn chunks(memory: &Shared) -> Result<Vec<Arc<Chunk>>> {
    Ok(memory.chunks(0..memory.size())?.map_or(Vec::new(), |(_, chunks)| chunks))
}

pub(crate) fn descriptors(chunks: &[Arc<Chunk>]) -> Vec<BorrowedFd<'_>> {
    chunks.iter().map(|chunk| chunk.as_fd()).collect()
}

/// A consumer process and the stream to it.
struct Consumer {
    peer: Peer,
    publisher: Publisher,
    /// The buffer in the stream, of one handoff or of all [`Way::Again`].
    buffer: Option<BufferId>,
}

impl Consumer {
    fn describe(&mut self, memory: &Memory) -> Result<()> {
        let shared = memory.shared.as_ref().ok_or_else(not_prepared)?;
        self.buffer = Some(self.publisher.add(shared, None, Access::ReadWrite)?);
        Ok(())
    }

    fn withdraw(&mut self) -> Result<()> {
        let Some(buffer) = self.buffer.take() else { return Ok(()) };
        self.peer.call(&Request::Release, &[])?;
        self.publisher.withdraw(buffer)?;
        self.peer.receive::<u64>().map(drop)
    }
}

/// The producer and its consumers.
pub(crate) struct Pair {
    pub(crate) device: Device,
    consumers: Vec<Consumer>,
    memory: Memory,
    size: u64,
}

impl Pair {
    pub(crate) fn start(run: &Run<'_>, consumers: u16) -> Result<Self> {
        run.tick("starting the processes", 0, 1)?;
        // All processes start their drivers at once.
        let peers = (0..consumers).map(|_| run.peer("a consumer")).collect::<Result<Vec<_>>>()?;
        let device = run.device()?;
        let connect = |peer: Peer| {
            peer.receive::<u64>()?;
            let (own, other) = Channel::socket_pair()?;
            peer.send(&Request::Session, &[other.as_fd()])?;
            let publisher = Publisher::over(own, device.driver(), &run.config());
            // The consumer's own error is better than a closed connection.
            peer.receive::<u64>()?;
            Ok(Consumer { peer, publisher: publisher?, buffer: None })
        };
        let consumers = peers.into_iter().map(connect).collect::<Result<Vec<_>>>()?;
        Ok(Self { device, consumers, memory: Memory::default(), size: 0 })
    }

    /// Creates memory for these ways.
    pub(crate) fn prepare(&mut self, size: u64, segments: u64, ways: &[Way]) -> Result<()> {
        self.size = size;
        let memory = &mut self.memory;
        for &way in ways {
            match way {
                Way::Export => memory.unshared = Some(self.device.verbs().create(size, &exportable(&self.device))?),
                Way::Legacy | Way::Pool => {
                    let spec = if way == Way::Pool { Spec::pool(size) } else { Spec::legacy(size) };
                    let shared = Shared::create(&self.device, spec)?;
                    if let Some(pool) = shared.pool() {
                        let pool = [pool.export()?];
                        self.consumers.iter().try_for_each(|to| to.peer.call(&Request::Pool, &pool))?;
                    }
                    let pointer = shared.describe()?.pointer().ok_or_else(not_prepared)?;
                    memory.pointers.push((way, shared, pointer));
                }
                _ if memory.shared.is_some() => {}
                _ => {
                    let spec = Spec::vmm(size);
                    let spec = if segments > 1 { spec.chunk(size / segments) } else { spec };
                    let shared = Shared::create(&self.device, spec)?;
                    memory.chunks = chunks(&shared)?;
                    memory.shared = Some(Arc::new(shared));
                }
            }
        }
        if ways.contains(&Way::Again) {
            for consumer in &mut self.consumers {
                consumer.describe(&self.memory)?;
            }
            self.hand_over(Way::Again)?;
        }
        Ok(())
    }

    /// Frees the memory, at the consumers too.
    pub(crate) fn clear(&mut self) -> Result<()> {
        for consumer in &mut self.consumers {
            consumer.peer.call(&Request::Close, &[])?;
            consumer.withdraw()?;
        }
        let memory = mem::take(&mut self.memory);
        memory.unshared.map_or(Ok(()), |created| self.device.verbs().release(created))
    }

    pub(crate) fn shared(&self) -> Result<&Shared> {
        self.memory.shared.as_deref().ok_or_else(not_prepared)
    }

    /// The only consumer.
    pub(crate) fn peer(&self) -> &Peer {
        &self.consumers[0].peer
    }

    /// Hands over to all consumers at once. Returns the microseconds until the last has the memory.
    pub(crate) fn hand_over(&mut self, way: Way) -> Result<f64> {
        for consumer in &mut self.consumers {
            if way == Way::Fresh {
                consumer.describe(&self.memory)?;
            }
            consumer.peer.call(&Request::Take { way, size: self.size }, &[])?;
        }
        until_asleep();
        let begun = now();
        self.consumers.iter_mut().try_for_each(|consumer| self.memory.give(&self.device, way, consumer))?;
        let mut last = 0_u64;
        for consumer in &mut self.consumers {
            last = last.max(consumer.peer.receive()?);
            if way.is_stream() {
                consumer.publisher.take_back()?;
            }
        }
        if matches!(way, Way::Fresh | Way::Described) {
            self.consumers.iter_mut().try_for_each(Consumer::withdraw)?;
        }
        Ok(last.saturating_sub(begun) as f64 / 1e3)
    }

    /// Sleeps until the consumer wakes this process, and sends the descriptors. Returns the microseconds that the consumer measured.
    pub(crate) fn hand_over_asleep(&self) -> Result<f64> {
        let peer = self.peer();
        peer.send(&Request::Wake { size: self.size }, &[])?;
        let descriptors = descriptors(&self.memory.chunks);
        peer.line.receive_bare(&mut [0; 2])?;
        peer.line.send_bare(&[0], &descriptors)?;
        Ok(peer.receive::<u64>()? as f64 / 1e3)
    }

    /// Measures ways in turns.
    fn measure(&mut self, run: &Run<'_>, size: u64, ways: &[Way]) -> Result<Vec<Named>> {
        self.prepare(size, 1, ways)?;
        let names: Vec<&str> = ways.iter().map(|way| way.name()).collect();
        let what = format!("handing over {}", about(size));
        let rows = run.turns(&what, &names, usize::MAX, |row| self.hand_over(ways[row]))?;
        self.clear().map(|()| rows)
    }
}

/// Measures the group with each number of consumers, at each size.
pub(crate) fn measure(run: &mut Run<'_>) -> Result<()> {
    let mut numbers = run.options.consumers.clone();
    numbers.sort_unstable();
    numbers.dedup();
    for consumers in numbers {
        let mut pair = Pair::start(run, consumers)?;
        for size in run.sizes(&pair.device, 1)? {
            let mut alone = Vec::new();
            let mut ways = vec![Way::Record, Way::Again];
            if run.group == Group::Handoff {
                // First: while another exported descriptor is open, an export is far faster.
                if run.is_cuda() && consumers == 1 {
                    alone = pair.measure(run, size, &[Way::Export])?;
                    alone[0].0 = "export each, no anchor".to_owned();
                }
                ways = fitting(run, &pair.device, size, consumers)?;
            }
            let mut rows = pair.measure(run, size, &ways)?;
            rows.append(&mut alone);
            run.add(About { consumers, ..About::size(size) }, rows, Some(ways[0].name()))?;
        }
    }
    Ok(())
}

/// The ways whose memory fits. Several consumers take only the floor and the library's own handoff.
fn fitting(run: &mut Run<'_>, device: &Device, size: u64, consumers: u16) -> Result<Vec<Way>> {
    let mut ways = vec![Way::Floor, Way::Fresh];
    if consumers > 1 {
        return Ok(ways);
    }
    ways.push(Way::Described);
    let free = run.usable(device)?;
    let others = [Way::Export, Way::Legacy, Way::Pool];
    // The first three have the same memory.
    for (copies, way) in (2..).zip(others).take(if run.is_cuda() { 3 } else { 1 }) {
        if way == Way::Pool && size > MOST_OF_A_POOL {
            run.leave_out(format!("{} at {}: the driver can't import so much", way.name(), about(size)));
        } else if size.saturating_mul(copies) > free {
            run.leave_out(format!("{} at {}: {} are free for all rows", way.name(), about(size), about(free)));
        } else {
            ways.push(way);
        }
    }
    Ok(ways)
}
