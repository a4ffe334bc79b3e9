//! The groups `handoff` and `repeat`: each way to hand over memory, at each size, to each number of consumers.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, Barrier},
    thread,
};

use vmmfd::{
    channel::Channel,
    driver::{Access, Driver},
    error::{Error, Result},
    internals::Created,
    memory::{Device, MOST_OF_A_POOL, Pointer, Shared, Spec},
    session::stream::{BufferId, Publisher},
};
use vmmfd_cli::{units::about, verbs::HasVerbs};

use crate::{
    base::{borrowed, not_prepared, now, until_asleep, usable},
    process::{Peer, Request, Role, Way},
    run::{About, Named, Run, nothing},
};

/// The producer's half. Returns the time at which it began.
fn give(way: Way, memory: &Memory, to: &mut Consumer) -> Result<u64> {
    let begun = now();
    match way {
        Way::Floor => to.peer.line.send_bare(&[0], &borrowed(&memory.fds))?,
        Way::Export => {
            let created = memory.unshared.as_ref().ok_or_else(not_prepared)?;
            let fd = memory.device.driver().verbs().bare()?.export(created)?;
            to.peer.line.send_bare(&[0], &[fd.as_fd()])?;
        }
        Way::Legacy | Way::Pool => to.peer.line.send_bare(&memory.pointer(way)?.0, &[])?,
        Way::Record => to.peer.line.send_bare(&[0], &[])?,
        Way::Described => {
            to.describe(memory)?;
            to.publisher.announce(to.fresh.ok_or_else(not_prepared)?)?;
        }
        Way::Fresh | Way::Again => {
            to.publisher.announce(to.fresh.or(to.held).ok_or_else(not_prepared)?)?;
        }
    }
    Ok(begun)
}

/// Memory at the producer, of one size.
struct Memory {
    device: Device,
    shared: Option<Arc<Shared>>,
    /// The descriptors of its segments.
    fds: Vec<OwnedFd>,
    unshared: Option<Created>,
    /// Legacy memory and memory of a pool, with their handles.
    pointers: Vec<(Way, Shared, Pointer)>,
}

impl Memory {
    fn pointer(&self, way: Way) -> Result<&Pointer> {
        let found = self.pointers.iter().find(|(other, ..)| *other == way);
        found.map(|(.., pointer)| pointer).ok_or_else(not_prepared)
    }
}

/// A consumer process and the stream to it.
pub(crate) struct Consumer {
    pub(crate) peer: Peer,
    publisher: Publisher,
    /// The buffer of this handoff, which is withdrawn afterwards.
    fresh: Option<BufferId>,
    /// The buffer that the consumer holds.
    held: Option<BufferId>,
}

impl Consumer {
    fn describe(&mut self, memory: &Memory) -> Result<()> {
        let shared = memory.shared.as_ref().ok_or_else(not_prepared)?;
        self.fresh = Some(self.publisher.add(shared, None, Access::ReadWrite)?);
        Ok(())
    }

    fn withdraw(&mut self, buffer: Option<BufferId>) -> Result<()> {
        let Some(buffer) = buffer else { return Ok(()) };
        self.peer.call(&Request::Release, &[])?;
        self.publisher.withdraw(buffer)?;
        self.peer.receive().map(drop)
    }
}

/// The producer and its consumers.
pub(crate) struct Pair {
    pub(crate) driver: Driver,
    pub(crate) device: Device,
    pub(crate) consumers: Vec<Consumer>,
    memory: Memory,
    size: u64,
}

impl Pair {
    pub(crate) fn start(run: &Run<'_>, consumers: u16) -> Result<Self> {
        run.tick("starting the processes", 0, 1)?;
        // All processes start their drivers at once.
        let start = |_| run.peer("a consumer", &Role::of(run.options));
        let peers = (0..consumers).map(start).collect::<Result<Vec<_>>>()?;
        let (driver, device) = run.device()?;
        let connect = |peer: Peer| {
            peer.receive()?;
            let (own, other) = Channel::socket_pair()?;
            peer.send(&Request::Session, &[other.as_fd()])?;
            let publisher = Publisher::over(own, &driver, &run.config());
            // The consumer's own error is better than a closed connection.
            peer.receive()?;
            Ok(Consumer { peer, publisher: publisher?, fresh: None, held: None })
        };
        let consumers = peers.into_iter().map(connect).collect::<Result<Vec<_>>>()?;
        let memory =
            Memory { device: device.clone(), shared: None, fds: Vec::new(), unshared: None, pointers: Vec::new() };
        Ok(Self { driver, device, consumers, memory, size: 0 })
    }

    /// Creates memory for these ways.
    pub(crate) fn prepare(&mut self, size: u64, segments: u64, ways: &[Way]) -> Result<()> {
        self.size = size;
        let memory = &mut self.memory;
        for &way in ways {
            match way {
                Way::Export => {
                    let bare = self.driver.verbs().bare()?;
                    memory.unshared = Some(bare.create(self.device.ordinal(), size)?);
                }
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
                    let chunks = shared.chunks(0..size)?.map_or(Vec::new(), |(_, chunks)| chunks);
                    let fds = chunks.iter().map(|chunk| chunk.as_fd().try_clone_to_owned()).collect::<io::Result<_>>();
                    memory.fds = fds.map_err(|error| Error::system("duplicate a descriptor", error))?;
                    memory.shared = Some(Arc::new(shared));
                }
            }
        }
        if ways.contains(&Way::Again) {
            for consumer in &mut self.consumers {
                consumer.describe(&self.memory)?;
                consumer.held = consumer.fresh.take();
            }
            self.hand_over(Way::Again)?;
        }
        Ok(())
    }

    /// Frees the memory, at the consumers too.
    pub(crate) fn clear(&mut self) -> Result<()> {
        for consumer in &mut self.consumers {
            consumer.peer.call(&Request::Close, &[])?;
            let held = consumer.held.take();
            consumer.withdraw(held)?;
        }
        let memory = &mut self.memory;
        memory.shared = None;
        memory.fds.clear();
        memory.pointers.clear();
        memory.unshared.take().map_or(Ok(()), |created| self.driver.verbs().bare()?.release(created))
    }

    pub(crate) fn shared(&self) -> Result<&Shared> {
        self.memory.shared.as_deref().ok_or_else(not_prepared)
    }

    /// The descriptors of the shared memory.
    pub(crate) fn fds(&self) -> &[OwnedFd] {
        &self.memory.fds
    }

    /// Hands over to all consumers at once. Returns the microseconds until the last has the memory.
    pub(crate) fn hand_over(&mut self, way: Way) -> Result<f64> {
        let memory = &self.memory;
        for consumer in &mut self.consumers {
            if way == Way::Fresh {
                consumer.describe(memory)?;
            }
            consumer.peer.call(&Request::Take { way, size: self.size }, &[])?;
        }
        until_asleep();
        let begun = match &mut self.consumers[..] {
            [consumer] => give(way, memory, consumer)?,
            consumers => at_once(way, memory, consumers)?,
        };
        let mut last = 0;
        for consumer in &mut self.consumers {
            last = last.max(consumer.peer.receive()?.time);
            if way.is_stream() {
                consumer.publisher.take_back()?;
            }
        }
        for consumer in &mut self.consumers {
            let fresh = consumer.fresh.take();
            consumer.withdraw(fresh)?;
        }
        Ok(last.saturating_sub(begun) as f64 / 1e3)
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

/// Hands over in a thread for each consumer. Returns the time at which the first began.
fn at_once(way: Way, memory: &Memory, consumers: &mut [Consumer]) -> Result<u64> {
    let barrier = Barrier::new(consumers.len());
    let hand = |consumer| {
        barrier.wait();
        give(way, memory, consumer)
    };
    thread::scope(|scope| {
        let threads: Vec<_> = consumers.iter_mut().map(|consumer| scope.spawn(|| hand(consumer))).collect();
        let begun = threads.into_iter().map(|thread| thread.join().map_err(|_| not_prepared())?);
        Ok(begun.collect::<Result<Vec<_>>>()?.into_iter().min().unwrap_or(0))
    })
}

pub(crate) fn measure(run: &mut Run<'_>) -> Result<()> {
    each_number(run, |run, pair, consumers, size| {
        // First: while another exported descriptor is open, an export is far faster.
        let mut alone = Vec::new();
        if run.is_cuda() && consumers == 1 {
            alone = pair.measure(run, size, &[Way::Export])?;
            alone[0].0 = "export each, no anchor".to_owned();
        }
        let ways = fitting(run, &pair.device, size, consumers)?;
        let mut rows = pair.measure(run, size, &ways)?;
        rows.append(&mut alone);
        run.add(About { consumers, ..About::size(size) }, rows, Some("floor"), nothing)
    })
}

pub(crate) fn measure_again(run: &mut Run<'_>) -> Result<()> {
    each_number(run, |run, pair, consumers, size| {
        let rows = pair.measure(run, size, &[Way::Record, Way::Again])?;
        run.add(About { consumers, ..About::size(size) }, rows, Some("record"), nothing)
    })
}

/// Measures with each number of consumers, at each size.
fn each_number(run: &mut Run<'_>, measure: impl Fn(&mut Run<'_>, &mut Pair, u16, u64) -> Result<()>) -> Result<()> {
    let mut numbers = run.options.consumers.clone();
    numbers.sort_unstable();
    numbers.dedup();
    for number in numbers {
        let mut pair = Pair::start(run, number)?;
        for size in run.sizes(&pair.device, 1)? {
            measure(run, &mut pair, number, size)?;
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
    let free = usable(device)?;
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
