//! Cases for a publisher. This side is a subscriber.

use std::{
    collections::{BTreeMap, BTreeSet},
    os::fd::OwnedFd,
};

use vmmfd::{
    error::ErrorCode,
    wire::{BufferNumber, BufferTurn, Hello, MAX_FDS, Mechanism, Message, Offer, Ready, Received, STREAM, Subscribe},
};

use super::{
    Case, CaseResult, case,
    case_end::{check, skip, violation},
    peer::{Incoming, Peer, check_hello},
    producer_cases::{check_memory, check_part, check_segments, greet_as, request},
};

/// The number of buffers that a case receives at most.
const MAX_TURNS: usize = 8;

pub(super) fn cases() -> Vec<Case> {
    let mut cases = vec![
        case("turns", "S1 S2 S3 S5 S6 S7 S8", |_, peer| turns(peer, 2)),
        case("one-buffer-kept", "S7 S10", |_, peer| turns(peer, 1)),
        case("end", "S13", |_, peer| end(peer)),
    ];
    // Sends the hello unless it is `None`, then the message.
    type OwnHello = fn(&Peer) -> Option<Hello>;
    let with_streams: OwnHello = |peer| Some(peer.own_hello(&[STREAM]));
    let subscribe = |keep| Message::Subscribe(Subscribe { keep });
    let instead_of_subscribe: [(&str, &'static str, ErrorCode, OwnHello, Message); 5] = [
        ("request", "C13", ErrorCode::Object, with_streams, Message::Request(request())),
        ("without-the-capability", "S1", ErrorCode::Protocol, |peer| Some(peer.own_hello(&["streams"])), subscribe(1)),
        ("keep-nothing", "R2", ErrorCode::Protocol, with_streams, subscribe(0)),
        (
            "other-backend",
            "S1",
            ErrorCode::Backend,
            |peer| Some(Hello { backend: "conform".to_owned(), ..peer.own_hello(&[STREAM]) }),
            subscribe(1),
        ),
        ("subscribe-before-hello", "H2", ErrorCode::Protocol, |_| None, subscribe(1)),
    ];
    for (name, rule, code, hello, message) in instead_of_subscribe {
        cases.push(case(name, rule, move |_, peer| {
            if let Some(hello) = hello(peer) {
                greet_as(peer, hello)?;
            }
            peer.provoke(&message, rule, code, name)
        }));
    }
    type Invalid = (&'static str, &'static str, fn(BufferTurn) -> Message);
    let during_a_turn: [Invalid; 6] = [
        ("another-generation", "S9", |turn| Message::Done(BufferTurn { generation: turn.generation + 1, ..turn })),
        ("done-of-nothing", "S9", |turn| Message::Done(BufferTurn { buffer: u64::MAX, ..turn })),
        ("gone-in-its-turn", "S12", |turn| Message::Gone(BufferNumber { buffer: turn.buffer })),
        ("subscribe-twice", "R2", |_| Message::Subscribe(Subscribe { keep: 1 })),
        ("request-in-a-stream", "C13", |_| Message::Request(request())),
        ("ready-from-a-subscriber", "R2", |turn| {
            Message::Ready(Ready { buffer: turn.buffer, generation: turn.generation, sizes: Vec::new() })
        }),
    ];
    for (name, rule, message) in during_a_turn {
        cases.push(case(name, rule, move |_, peer| {
            let turn = Stream::subscribe(peer, 2)?.require_turn(peer)?;
            peer.provoke(&message(turn), rule, ErrorCode::Protocol, name)
        }));
    }
    cases
}

/// The subscriber's state.
struct Stream {
    keep: usize,
    described: BTreeMap<u64, Buffer>,
    /// Every buffer number so far.
    numbers: BTreeSet<u64>,
    /// Open buffers that are not in use, the least recently used first.
    unused: Vec<u64>,
}

struct Buffer {
    offer: Offer,
    generation: u64,
    open: bool,
}

impl Stream {
    fn subscribe(peer: &mut Peer, keep: usize) -> CaseResult<Self> {
        let hello = check_hello(greet_as(peer, peer.own_hello(&[STREAM]))?)?;
        check(hello.capabilities.iter().any(|capability| capability == STREAM), "S1", || {
            "sent hello without the capability `stream`".to_owned()
        })?;
        peer.send(&Message::Subscribe(Subscribe { keep: keep as u64 }))?;
        Ok(Self { keep, described: BTreeMap::new(), numbers: BTreeSet::new(), unused: Vec::new() })
    }

    /// The next turn. `None` if the publisher closes the stream or is silent, which is valid.
    fn turn(&mut self, peer: &mut Peer) -> CaseResult<Option<BufferTurn>> {
        loop {
            let message = match peer.receive()? {
                Incoming::Closed | Incoming::Timeout => return Ok(None),
                message => peer.require(message, "S5", "ready")?,
            };
            match message {
                (Message::Offer(offer), _) => self.add(*offer)?,
                (Message::Withdraw(BufferNumber { buffer }), _) => {
                    match self.described.remove(&buffer) {
                        None => return violation("S12", format!("withdrew buffer {buffer}, which does not exist")),
                        Some(known) if known.open => peer.send(&Message::Gone(BufferNumber { buffer }))?,
                        Some(_) => {}
                    }
                    self.unused.retain(|unused| *unused != buffer);
                }
                (Message::Ready(ready), fds) => return self.start_turn(peer, ready, fds).map(Some),
                (other, _) => return violation("R2", format!("sent {} in a stream", other.name())),
            }
        }
    }

    fn require_turn(&mut self, peer: &mut Peer) -> CaseResult<BufferTurn> {
        self.turn(peer)?.map_or_else(|| skip("the publisher publishes nothing"), Ok)
    }

    fn add(&mut self, offer: Offer) -> CaseResult {
        let Some(number) = offer.buffer else { return violation("S2", "described a buffer without a number") };
        check(self.numbers.insert(number), "S2", || format!("used the buffer number {number} twice"))?;
        check(offer.object == "default", "S3", || format!("described a buffer as object `{}`", offer.object))?;
        check_memory(&offer)?;
        if offer.memory.mechanism == Mechanism::Vmm {
            check_part("S3", &offer, &(0..offer.memory.mapped_size))?;
        }
        self.described.insert(number, Buffer { offer, generation: 0, open: false });
        let count = self.described.len();
        check(count <= 64, "S4", || format!("described {count} buffers"))
    }

    fn start_turn(&mut self, peer: &mut Peer, ready: Ready, fds: Vec<OwnedFd>) -> CaseResult<BufferTurn> {
        let Ready { buffer: number, generation, sizes } = ready;
        let Some(buffer) = self.described.get_mut(&number) else {
            return violation("S2", format!("published buffer {number}, which it has not described"));
        };
        buffer.generation += 1;
        let expected = buffer.generation;
        check(expected == generation, "S5", || {
            format!("published generation {generation} of buffer {number} instead of {expected}")
        })?;
        let turn = BufferTurn { buffer: number, generation };
        if buffer.open {
            self.unused.retain(|unused| *unused != number);
            check(sizes.is_empty(), "S6", || format!("sent {} segments of an open buffer", sizes.len()))?;
            return Ok(turn);
        }
        if buffer.offer.memory.mechanism != Mechanism::Vmm {
            return skip("the memory has no segments, so it can't be opened here");
        }
        check(!sizes.is_empty() && sizes.len() <= MAX_FDS, "S7", || {
            format!("published a closed buffer with {} segments", sizes.len())
        })?;
        let offer = buffer.offer.clone();
        if self.described.values().filter(|buffer| buffer.open).count() >= self.keep {
            let closed = self.unused.remove(0);
            peer.send(&Message::Gone(BufferNumber { buffer: closed }))?;
            self.described.entry(closed).and_modify(|buffer| buffer.open = false);
        }
        let mut taken: Vec<(OwnedFd, u64)> = fds.into_iter().zip(sizes).collect();
        let all = offer.part.map_or(0, |part| part.segments);
        while (taken.len() as u64) < all {
            peer.send(&Message::Received(Received { segments: taken.len() as u64 }))?;
            match peer.next_message("S7", "segments")? {
                (Message::Segments(segments), fds) if segments.first == taken.len() as u64 => {
                    taken.extend(fds.into_iter().zip(segments.sizes));
                }
                (other, _) => return violation("S7", format!("sent {} instead of the next segments", other.name())),
            }
        }
        check_segments(&offer, &taken)?;
        peer.send(&Message::Received(Received { segments: taken.len() as u64 }))?;
        self.described.entry(number).and_modify(|buffer| buffer.open = true);
        Ok(turn)
    }

    fn done(&mut self, peer: &mut Peer, turn: BufferTurn) -> CaseResult {
        self.unused.push(turn.buffer);
        peer.send(&Message::Done(turn))
    }
}

fn turns(peer: &mut Peer, keep: usize) -> CaseResult {
    let mut stream = Stream::subscribe(peer, keep)?;
    let first = stream.require_turn(peer)?;
    stream.done(peer, first)?;
    for _ in 1..MAX_TURNS {
        let Some(turn) = stream.turn(peer)? else { break };
        stream.done(peer, turn)?;
    }
    Ok(())
}

fn end(peer: &mut Peer) -> CaseResult {
    let mut stream = Stream::subscribe(peer, 2)?;
    let first = stream.require_turn(peer)?;
    stream.done(peer, first)?;
    peer.shut_down_writing();
    loop {
        match peer.receive::<Message>()? {
            Incoming::Closed => return Ok(()),
            Incoming::Timeout => return violation("S13", "did not close the stream after its subscriber did"),
            // Sent before the publisher noticed the shutdown.
            Incoming::Message(..) => {}
        }
    }
}
