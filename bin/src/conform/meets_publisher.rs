//! This side is a subscriber: what a producer of streams must do.

use std::{
    collections::{BTreeMap, BTreeSet},
    os::fd::OwnedFd,
};

use vmmfd::{
    error::ErrorCode,
    wire::{BufferNumber, BufferTurn, Hello, MAX_FDS, Mechanism, Message, Offer, Ready, Received, STREAM, Subscribe},
};

use super::{
    Case, Scene,
    fault::Fault,
    meets_producer::{check_memory, check_part, check_segments, greet, request},
    peer::{Heard, Peer, checked},
};

/// How many turns are taken at most.
const TURNS: usize = 8;

pub(super) fn cases() -> Vec<Case> {
    let after_a_turn = |name: &str, rules: &'static [&'static str], fault: fn(BufferTurn) -> Message| {
        Case::new(name, rules, move |_, peer| {
            let mut stream = Stream::subscribe(peer, 2)?;
            let turn = stream.must_turn(peer)?;
            peer.send(&fault(turn), &[])?;
            peer.ends_with(rules[0], &[ErrorCode::Protocol], "a subscriber says what it may not")
        })
    };
    let instead =
        |name: &str, rules: &'static [&'static str], code: ErrorCode, say: fn(&mut Peer) -> Result<(), Fault>| {
            Case::new(name, rules, move |_, peer| {
                say(peer)?;
                peer.ends_with(rules[0], &[code], "it is no subscription")
            })
        };
    vec![
        Case::new("turns", &["S1", "S2", "S3", "S5", "S6", "S7", "S8"], |_, peer| turns(peer, 2)),
        Case::new("one-buffer-kept", &["S7", "S10"], |_, peer| turns(peer, 1)),
        Case::new("end", &["S13"], end),
        instead("request", &["C13"], ErrorCode::Object, |peer| {
            greet(peer, peer.own_hello(&[STREAM]))?;
            peer.send(&Message::Request(request()), &[])
        }),
        instead("without-the-capability", &["S1"], ErrorCode::Protocol, |peer| {
            greet(peer, peer.own_hello(&["streams"]))?;
            peer.send(&Message::Subscribe(Subscribe { keep: 1 }), &[])
        }),
        instead("keep-nothing", &["R2"], ErrorCode::Protocol, |peer| {
            greet(peer, peer.own_hello(&[STREAM]))?;
            peer.send(&Message::Subscribe(Subscribe { keep: 0 }), &[])
        }),
        instead("other-backend", &["S1"], ErrorCode::Backend, |peer| {
            greet(peer, Hello { backend: "conform".to_owned(), ..peer.own_hello(&[STREAM]) })?;
            peer.send(&Message::Subscribe(Subscribe { keep: 1 }), &[])
        }),
        instead("subscribe-before-hello", &["H2"], ErrorCode::Protocol, |peer| {
            peer.send(&Message::Subscribe(Subscribe { keep: 1 }), &[])
        }),
        after_a_turn("another-generation", &["S9"], |turn| {
            Message::Done(BufferTurn { generation: turn.generation + 1, ..turn })
        }),
        after_a_turn("done-of-nothing", &["S9"], |turn| Message::Done(BufferTurn { buffer: u64::MAX, ..turn })),
        after_a_turn("gone-in-its-turn", &["S12"], |turn| Message::Gone(BufferNumber { buffer: turn.buffer })),
        after_a_turn("subscribe-twice", &["R2"], |_| Message::Subscribe(Subscribe { keep: 1 })),
        after_a_turn("request-in-a-stream", &["C13"], |_| Message::Request(request())),
        after_a_turn("ready-from-a-subscriber", &["R2"], |turn| {
            Message::Ready(Ready { buffer: turn.buffer, generation: turn.generation, sizes: Vec::new() })
        }),
    ]
}

/// What this side knows of the stream.
struct Stream {
    keep: usize,
    described: BTreeMap<u64, Buffer>,
    /// All numbers that were given.
    numbers: BTreeSet<u64>,
    /// What is open and not in use, the one used longest ago first.
    unused: Vec<u64>,
}

struct Buffer {
    offer: Offer,
    generation: u64,
    open: bool,
}

impl Stream {
    fn subscribe(peer: &mut Peer, keep: usize) -> Result<Self, Fault> {
        let hello = checked(greet(peer, peer.own_hello(&[STREAM]))?)?;
        if !hello.capabilities.iter().any(|capability| capability == STREAM) {
            return Fault::broken("S1", "said hello without the capability `stream`");
        }
        peer.send(&Message::Subscribe(Subscribe { keep: keep as u64 }), &[])?;
        Ok(Self { keep, described: BTreeMap::new(), numbers: BTreeSet::new(), unused: Vec::new() })
    }

    /// The next turn; `None` if the producer ends the stream or is silent, which it may be.
    fn turn(&mut self, peer: &mut Peer) -> Result<Option<BufferTurn>, Fault> {
        loop {
            let heard = match peer.hear()? {
                Heard::End | Heard::Silence => return Ok(None),
                heard => peer.must(heard, "S5", "ready")?,
            };
            match heard {
                (Message::Offer(offer), _) => self.enter(*offer)?,
                (Message::Withdraw(BufferNumber { buffer }), _) => {
                    match self.described.remove(&buffer) {
                        None => return Fault::broken("S12", format!("withdrew buffer {buffer}, which there is not")),
                        Some(known) if known.open => peer.send(&Message::Gone(BufferNumber { buffer }), &[])?,
                        Some(_) => {}
                    }
                    self.unused.retain(|unused| *unused != buffer);
                }
                (Message::Ready(ready), fds) => return self.begin(peer, ready, fds).map(Some),
                (other, _) => return Fault::broken("R2", format!("sent {} in a stream", other.name())),
            }
        }
    }

    fn must_turn(&mut self, peer: &mut Peer) -> Result<BufferTurn, Fault> {
        match self.turn(peer)? {
            Some(turn) => Ok(turn),
            None => Fault::left_out("the producer publishes nothing"),
        }
    }

    fn enter(&mut self, offer: Offer) -> Result<(), Fault> {
        let Some(number) = offer.buffer else { return Fault::broken("S2", "described a buffer without its number") };
        if !self.numbers.insert(number) {
            return Fault::broken("S2", format!("gave the number {number} twice"));
        }
        if offer.object != "default" {
            return Fault::broken("S3", format!("described a buffer as object `{}`", offer.object));
        }
        check_memory(&offer)?;
        if offer.memory.mechanism == Mechanism::Vmm {
            check_part("S3", &offer, &(0..offer.memory.mapped_size))?;
        }
        self.described.insert(number, Buffer { offer, generation: 0, open: false });
        match self.described.len() {
            0..=64 => Ok(()),
            many => Fault::broken("S4", format!("described {many} buffers")),
        }
    }

    fn begin(&mut self, peer: &mut Peer, ready: Ready, fds: Vec<OwnedFd>) -> Result<BufferTurn, Fault> {
        let Ready { buffer: number, generation, sizes } = ready;
        let Some(buffer) = self.described.get_mut(&number) else {
            return Fault::broken("S2", format!("published buffer {number}, which it has not described"));
        };
        buffer.generation += 1;
        if buffer.generation != generation {
            let due = buffer.generation;
            return Fault::broken(
                "S5",
                format!("published generation {generation} of buffer {number} where {due} is due"),
            );
        }
        let turn = BufferTurn { buffer: number, generation };
        if buffer.open {
            self.unused.retain(|unused| *unused != number);
            return match sizes.len() {
                0 => Ok(turn),
                some => Fault::broken("S6", format!("sent {some} segments of a buffer that is open")),
            };
        }
        if buffer.offer.memory.mechanism != Mechanism::Vmm {
            return Fault::left_out("the memory has no segments, and can't be opened here");
        }
        if sizes.is_empty() || sizes.len() > MAX_FDS {
            return Fault::broken("S7", format!("published a closed buffer with {} segments", sizes.len()));
        }
        let (offer, open) = (buffer.offer.clone(), self.described.values().filter(|buffer| buffer.open).count());
        if open >= self.keep {
            let closed = self.unused.remove(0);
            peer.send(&Message::Gone(BufferNumber { buffer: closed }), &[])?;
            self.described.entry(closed).and_modify(|buffer| buffer.open = false);
        }
        let mut taken: Vec<(OwnedFd, u64)> = fds.into_iter().zip(sizes).collect();
        let all = offer.part.map_or(0, |part| part.segments);
        while (taken.len() as u64) < all {
            peer.send(&Message::Received(Received { segments: taken.len() as u64 }), &[])?;
            match peer.next("S7", "segments")? {
                (Message::Segments(segments), fds) if segments.first == taken.len() as u64 => {
                    taken.extend(fds.into_iter().zip(segments.sizes));
                }
                (other, _) => {
                    return Fault::broken("S7", format!("sent {} where the next segments belong", other.name()));
                }
            }
        }
        check_segments(&offer, &taken)?;
        peer.send(&Message::Received(Received { segments: taken.len() as u64 }), &[])?;
        self.described.entry(number).and_modify(|buffer| buffer.open = true);
        Ok(turn)
    }

    fn done(&mut self, peer: &mut Peer, turn: BufferTurn) -> Result<(), Fault> {
        self.unused.push(turn.buffer);
        peer.send(&Message::Done(turn), &[])
    }
}

fn turns(peer: &mut Peer, keep: usize) -> Result<(), Fault> {
    let mut stream = Stream::subscribe(peer, keep)?;
    let first = stream.must_turn(peer)?;
    stream.done(peer, first)?;
    for _ in 1..TURNS {
        let Some(turn) = stream.turn(peer)? else { break };
        stream.done(peer, turn)?;
    }
    Ok(())
}

fn end(_: &Scene<'_>, peer: &mut Peer) -> Result<(), Fault> {
    let mut stream = Stream::subscribe(peer, 2)?;
    let first = stream.must_turn(peer)?;
    stream.done(peer, first)?;
    peer.shut_down_writing();
    // What it had said before it could know.
    loop {
        match peer.hear::<Message>()? {
            Heard::End => return Ok(()),
            Heard::Silence => return Fault::broken("S13", "did not end the stream that its subscriber has ended"),
            Heard::Message(..) => {}
        }
    }
}
