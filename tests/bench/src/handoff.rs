//! The groups `handoff` and `repeat`: each way to hand over memory, at each size, to each number of consumers.

use std::{mem, os::fd::BorrowedFd, sync::Arc};

use vmmfd::{
    channel::Channel,
    driver::Access,
    internals::Handle,
    memory::{Chunk, MOST_OF_A_POOL, Pointer},
    session::{
        Config,
        stream::{PublishOptions, Publisher},
    },
    wire::{self, DEFAULT_OBJECT, Message, Offer, Segments},
};

use crate::{
    prelude::*,
    process::{exportable, until_asleep},
    report::Group,
    run::Named,
};

/// The buffers of a stream beyond those that the consumers hold: a loan, and the last.
pub(crate) const COPIES: usize = 2;

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
            Way::Described | Way::Fresh => {
                if way == Way::Described {
                    to.channel.send(&Message::Offer(Box::new(self.offer()?)), &[])?;
                }
                let sizes = self.chunks.iter().map(|chunk| chunk.size()).collect();
                to.channel.send(&Message::Segments(Segments { first: 0, sizes }), &descriptors(&self.chunks))
            }
            // One publication is for all consumers.
            Way::Again => Ok(()),
        }
    }

    fn offer(&self) -> Result<Offer> {
        let shared = self.shared.as_ref().ok_or_else(not_prepared)?;
        Ok(Offer {
            object: DEFAULT_OBJECT.to_owned(),
            memory: (&shared.describe()?).into(),
            array: None,
            access: Access::ReadWrite,
            part: shared.chunks(0..shared.size())?.map(|(part, _)| part),
            check: None,
        })
    }
}

/// The segments of memory.
pub(crate) fn chunks(memory: &Shared) -> Result<Vec<Arc<Chunk>>> {
    Ok(memory.chunks(0..memory.size())?.map_or(Vec::new(), |(_, chunks)| chunks))
}

pub(crate) fn descriptors(chunks: &[Arc<Chunk>]) -> Vec<BorrowedFd<'_>> {
    chunks.iter().map(|chunk| chunk.as_fd()).collect()
}

/// A consumer process, and the channel of the library's records.
struct Consumer {
    peer: Peer,
    channel: Channel,
}

/// The producer and its consumers.
pub(crate) struct Pair {
    pub(crate) device: Device,
    consumers: Vec<Consumer>,
    memory: Memory,
    /// To all consumers, with [`Way::Again`].
    publisher: Option<Publisher>,
    config: Config,
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
            peer.send(&Request::Channel, &[other.as_fd()])?;
            peer.receive::<u64>()?;
            let channel = Channel::new(own, run.options.timeout, run.cancel)?;
            Ok(Consumer { peer, channel })
        };
        let consumers = peers.into_iter().map(connect).collect::<Result<Vec<_>>>()?;
        let (memory, publisher, config) = (Memory::default(), None, run.config());
        Ok(Self { device, consumers, memory, publisher, config, size: 0 })
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
                Way::Again | Way::Record => {}
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
        if ways.contains(&Way::Fresh) {
            let memory = wire::Memory::from(&self.shared()?.describe()?);
            for consumer in &self.consumers {
                consumer.peer.call(&Request::Describe { memory: Box::new(memory.clone()) }, &[])?;
            }
        }
        if ways.contains(&Way::Again) {
            self.publish(size)?;
        }
        Ok(())
    }

    /// Creates a stream, and lets all consumers join it.
    fn publish(&mut self, size: u64) -> Result<()> {
        let options = PublishOptions::fixed(size, COPIES + self.consumers.len());
        let publisher = Publisher::create(&self.device, &options, &self.config)?;
        for consumer in &self.consumers {
            let (own, other) = Channel::socket_pair()?;
            publisher.admit(own)?;
            consumer.peer.send(&Request::Subscribe, &[other.as_fd()])?;
            consumer.peer.receive::<u64>()?;
        }
        while publisher.stats()?.subscribers.len() < self.consumers.len() {
            thread::yield_now();
        }
        self.publisher = Some(publisher);
        self.hand_over(Way::Again).map(drop)
    }

    /// Frees the memory, at the consumers too.
    pub(crate) fn clear(&mut self) -> Result<()> {
        for consumer in &mut self.consumers {
            consumer.peer.call(&Request::Close, &[])?;
        }
        self.publisher = None;
        let memory = mem::take(&mut self.memory);
        memory.unshared.map_or(Ok(()), |created| self.device.verbs().release(created))
    }

    pub(crate) fn shared(&self) -> Result<&Shared> {
        self.memory.shared.as_deref().ok_or_else(not_prepared)
    }

    /// The processes of the consumers.
    pub(crate) fn peers(&self) -> impl Iterator<Item = &Peer> {
        self.consumers.iter().map(|consumer| &consumer.peer)
    }

    /// The publisher of [`Way::Again`].
    pub(crate) fn publisher(&self) -> Result<&Publisher> {
        self.publisher.as_ref().ok_or_else(not_prepared)
    }

    /// The only consumer.
    pub(crate) fn peer(&self) -> &Peer {
        &self.consumers[0].peer
    }

    /// Hands over to all consumers at once. Returns the microseconds until the last has the memory.
    pub(crate) fn hand_over(&mut self, way: Way) -> Result<f64> {
        for consumer in &self.consumers {
            consumer.peer.call(&Request::Take { way, size: self.size }, &[])?;
        }
        let loan = match &self.publisher {
            Some(publisher) if way == Way::Again => publisher.try_loan()?,
            _ => None,
        };
        until_asleep();
        let begun = now();
        if way == Way::Again {
            loan.ok_or_else(not_prepared)?.announce(&[])?;
        }
        self.consumers.iter_mut().try_for_each(|consumer| self.memory.give(&self.device, way, consumer))?;
        let mut last = 0_u64;
        for consumer in &self.consumers {
            last = last.max(consumer.peer.receive()?);
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
    for consumers in run.consumers() {
        let mut pair = Pair::start(run, consumers)?;
        let copies = if run.group == Group::Repeat { COPIES as u64 + u64::from(consumers) } else { 1 };
        for size in run.sizes(&pair.device, copies)? {
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
