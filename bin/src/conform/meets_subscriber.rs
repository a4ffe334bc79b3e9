//! This side is a publisher: what a consumer of a stream must do. Each connection that it makes is one case.

use std::os::fd::{AsFd, BorrowedFd};

use vmmfd::{
    driver::GRANULARITY,
    error::ErrorCode,
    wire::{BufferNumber, BufferTurn, Hello, Message, Offer, Ready, STREAM, Segments, Subscribe},
};

use super::{
    Case, Scene,
    fault::Fault,
    lender,
    memory::{Flaw, Lending, memfd},
    peer::{Heard, Peer},
};

/// More buffers than that are not made to see one closed.
const KEPT: u64 = 8;

pub(super) fn cases() -> Vec<Case> {
    let mut cases = vec![
        Case::new("turns", &["S1", "S6", "S8", "S9", "S12", "S13"], turns),
        Case::new("three-segments", &["S7", "S8"], three_segments),
        Case::new("beyond-keep", &["S10"], beyond_keep),
        Case::new("withdrawn-and-never-open", &["S12"], withdrawn_and_never_open),
        Case::new("without-the-capability", &["S1"], |_, peer| {
            heard_hello(peer)?;
            peer.send(&Message::Hello(peer.own_hello(&[])), &[])?;
            peer.ends_with("S1", &[ErrorCode::Object], "the producer has no streams")
        }),
        Case::new("other-backend", &["S1", "C2"], |scene, peer| {
            heard_hello(peer)?;
            peer.send(&Message::Hello(Hello { backend: "cuda".to_owned(), ..peer.own_hello(&[STREAM]) }), &[])?;
            subscribed(peer)?;
            describe(peer, &buffer(scene, 0, 1)?)?;
            peer.ends_with("S1", &[ErrorCode::Backend], "a producer that said `cuda` offers memory")
        }),
    ];
    lies(&mut cases);
    cases
}

/// What a publisher may not say: of buffer 0, which is described, and open where the first flag says so.
fn lies(cases: &mut Vec<Case>) {
    type Lie = fn(&Peer, &Lending) -> Result<(), Fault>;
    let lies: [(&str, &'static [&'static str], bool, Lie); 15] = [
        ("undescribed", &["S2"], false, |peer, lending| ready(peer, 1, 1, lending, 1)),
        ("generation-2-first", &["S5"], false, |peer, lending| ready(peer, 0, 2, lending, 1)),
        ("generation-again", &["S5"], true, |peer, lending| ready(peer, 0, 1, lending, 0)),
        ("generation-left-out", &["S5"], true, |peer, lending| ready(peer, 0, 3, lending, 0)),
        ("closed-without-segments", &["S7"], false, |peer, lending| ready(peer, 0, 1, lending, 0)),
        ("open-with-segments", &["S6"], true, |peer, lending| ready(peer, 0, 2, lending, 1)),
        ("number-twice", &["S2"], false, describe),
        ("offer-without-number", &["S2"], false, |peer, lending| change(peer, lending, |offer| offer.buffer = None)),
        ("another-object", &["S3"], false, |peer, lending| change(peer, lending, |offer| offer.object = "x".into())),
        ("part-of-a-buffer", &["S3"], false, |peer, lending| {
            change(peer, lending, |offer| {
                if let Some(part) = &mut offer.part {
                    (part.segments, part.size) = (0, GRANULARITY);
                }
            })
        }),
        ("too-many-buffers", &["S4"], false, |peer, lending| {
            (1..=64).try_for_each(|number| {
                let offer = Offer { buffer: Some(number), ..lending.offer.clone() };
                peer.send(&Message::Offer(Box::new(offer)), &[])
            })
        }),
        ("withdraw-of-nothing", &["S12"], false, |peer, _| {
            peer.send(&Message::Withdraw(BufferNumber { buffer: 9 }), &[])
        }),
        ("done-from-a-publisher", &["R2"], true, |peer, _| {
            peer.send(&Message::Done(BufferTurn { buffer: 0, generation: 1 }), &[])
        }),
        ("subscribe-from-a-publisher", &["R2"], false, |peer, _| {
            peer.send(&Message::Subscribe(Subscribe { keep: 1 }), &[])
        }),
        ("segments-of-an-open-buffer", &["R2"], true, |peer, lending| {
            let sizes = vec![lending.segments[0].1];
            peer.send(&Message::Segments(Segments { first: 0, sizes }), &[lending.segments[0].0.as_fd()])
        }),
    ];
    for (name, rules, open, lie) in lies {
        cases.push(Case::new(name, rules, move |scene, peer| {
            greet(peer)?;
            let lending = buffer(scene, 0, 1)?;
            describe(peer, &lending)?;
            if open {
                introduce(peer, &lending, 1, 1)?;
                done(peer, 0, 1)?;
            }
            lie(peer, &lending)?;
            peer.ends_with(rules[0], &[ErrorCode::Protocol], name)
        }));
    }
    for (name, rules, flaw) in [
        ("memory-that-can-shrink", &["V2"] as &'static [&'static str], Flaw::Unsealed),
        ("sparse-memory", &["V3"], Flaw::Sparse),
        ("shorter-memory", &["V1"], Flaw::Short),
    ] {
        cases.push(Case::new(name, rules, move |scene, peer| {
            greet(peer)?;
            let fd = memfd(GRANULARITY, flaw).map_err(Fault::Failed)?;
            let lending = buffer(scene, 0, 1)?.with_descriptor(fd);
            describe(peer, &lending)?;
            ready(peer, 0, 1, &lending, 1)?;
            peer.ends_with(rules[0], &[ErrorCode::Protocol], name)
        }));
    }
}

fn heard_hello(peer: &mut Peer) -> Result<(), Fault> {
    let hello = lender::heard_hello(peer)?;
    match hello.capabilities.iter().any(|capability| capability == STREAM) {
        true => Ok(()),
        false => Fault::broken("S1", "said hello without the capability `stream`"),
    }
}

fn subscribed(peer: &mut Peer) -> Result<u64, Fault> {
    let heard = peer.hear_all()?;
    match peer.must(heard, "S1", "subscribe")? {
        (Message::Subscribe(Subscribe { keep: keep @ 1.. }), _) => Ok(keep),
        (Message::Subscribe(_), _) => Fault::broken("R2", "subscribed with keep 0"),
        (other, _) => Fault::broken("S1", format!("sent {} where subscribe belongs", other.name())),
    }
}

/// Both say hello, and the consumer subscribes. Returns how many buffers it keeps.
fn greet(peer: &mut Peer) -> Result<u64, Fault> {
    heard_hello(peer)?;
    peer.send(&Message::Hello(peer.own_hello(&[STREAM])), &[])?;
    subscribed(peer)
}

/// A buffer of so many segments.
fn buffer(scene: &Scene<'_>, number: u64, segments: u64) -> Result<Lending, Fault> {
    let mut lending = Lending::new(scene, segments).map_err(Fault::Failed)?;
    lending.offer.buffer = Some(number);
    Ok(lending)
}

fn describe(peer: &Peer, lending: &Lending) -> Result<(), Fault> {
    change(peer, lending, |_| {})
}

/// Describes a buffer otherwise than it is.
fn change(peer: &Peer, lending: &Lending, change: fn(&mut Offer)) -> Result<(), Fault> {
    let mut offer = lending.offer.clone();
    change(&mut offer);
    peer.send(&Message::Offer(Box::new(offer)), &[])
}

/// Publishes a buffer, with its first segments.
fn ready(peer: &Peer, buffer: u64, generation: u64, lending: &Lending, segments: usize) -> Result<(), Fault> {
    let some = &lending.segments[..segments];
    let sizes = some.iter().map(|(_, size)| *size).collect();
    let fds: Vec<BorrowedFd<'_>> = some.iter().map(|(fd, _)| fd.as_fd()).collect();
    peer.send(&Message::Ready(Ready { buffer, generation, sizes }), &fds)
}

/// What the consumer says next of its buffers.
fn says(peer: &mut Peer, rule: &'static str, what: &str) -> Result<Message, Fault> {
    peer.next(rule, what).map(|(message, _)| message)
}

fn done(peer: &mut Peer, buffer: u64, generation: u64) -> Result<(), Fault> {
    match says(peer, "S9", "done")? {
        Message::Done(turn) if turn == (BufferTurn { buffer, generation }) => Ok(()),
        Message::Done(BufferTurn { buffer: of, generation: found }) => {
            let found =
                format!("sent done for generation {found} of buffer {of} where {generation} of {buffer} is out");
            Fault::broken("S9", found)
        }
        Message::Gone(_) => Fault::broken("S10", "closed a buffer, and no other was being opened"),
        other => Fault::broken("S9", format!("sent {} where done belongs", other.name())),
    }
}

/// Publishes a buffer that is closed there: the first segments with the turn, then the others. Returns which buffer was closed for
/// it.
fn introduce(peer: &mut Peer, lending: &Lending, generation: u64, first: usize) -> Result<Option<u64>, Fault> {
    let number = lending.offer.buffer.unwrap_or_default();
    ready(peer, number, generation, lending, first)?;
    let (mut sent, mut closed) = (first, None);
    loop {
        match says(peer, "S8", "received")? {
            Message::Received(received) if received.segments == sent as u64 => {}
            Message::Received(received) => {
                let found = format!("acknowledged {} segments where {sent} had come", received.segments);
                return Fault::broken("S8", found);
            }
            Message::Gone(BufferNumber { buffer }) if closed.is_none() && buffer != number => {
                closed = Some(buffer);
                continue;
            }
            Message::Gone(_) => {
                return Fault::broken("S10", "closed more than one buffer, or the one that is published");
            }
            other => return Fault::broken("S8", format!("answered a new buffer with {}", other.name())),
        }
        let rest = &lending.segments[sent..];
        if rest.is_empty() {
            return Ok(closed);
        }
        let sizes = rest.iter().map(|(_, size)| *size).collect();
        let fds: Vec<BorrowedFd<'_>> = rest.iter().map(|(fd, _)| fd.as_fd()).collect();
        peer.send(&Message::Segments(Segments { first: sent as u64, sizes }), &fds)?;
        sent = lending.segments.len();
    }
}

fn withdraw(peer: &mut Peer, number: u64) -> Result<(), Fault> {
    peer.send(&Message::Withdraw(BufferNumber { buffer: number }), &[])?;
    match says(peer, "S12", "gone")? {
        Message::Gone(BufferNumber { buffer }) if buffer == number => Ok(()),
        other => Fault::broken("S12", format!("answered withdraw with {}", other.name())),
    }
}

fn turns(scene: &Scene<'_>, peer: &mut Peer) -> Result<(), Fault> {
    greet(peer)?;
    let lending = buffer(scene, 7, 1)?;
    describe(peer, &lending)?;
    introduce(peer, &lending, 1, 1)?;
    done(peer, 7, 1)?;
    for generation in 2..6 {
        ready(peer, 7, generation, &lending, 0)?;
        done(peer, 7, generation)?;
    }
    withdraw(peer, 7)?;
    peer.shut_down_writing();
    match peer.hear::<Message>()? {
        Heard::End => Ok(()),
        Heard::Message(message, _) => Fault::broken("S13", format!("sent {} after the end", message.name())),
        Heard::Silence => Fault::broken("S13", "did not shut down writing after the end"),
    }
}

fn three_segments(scene: &Scene<'_>, peer: &mut Peer) -> Result<(), Fault> {
    greet(peer)?;
    for (number, first) in [(0, 1), (1, 3)] {
        let lending = buffer(scene, number, 3)?;
        describe(peer, &lending)?;
        introduce(peer, &lending, 1, first)?;
        done(peer, number, 1)?;
        withdraw(peer, number)?;
    }
    Ok(())
}

fn beyond_keep(scene: &Scene<'_>, peer: &mut Peer) -> Result<(), Fault> {
    let keep = greet(peer)?;
    if keep > KEPT {
        return Fault::left_out(format!("it keeps {keep} buffers, and this is tried of at most {KEPT}"));
    }
    let buffers = (0..=keep).map(|number| buffer(scene, number, 1)).collect::<Result<Vec<_>, _>>()?;
    let mut closed = None;
    for (number, lending) in (0..).zip(&buffers) {
        describe(peer, lending)?;
        closed = introduce(peer, lending, 1, 1)?;
        match closed {
            Some(closed) if number < keep => {
                return Fault::broken("S10", format!("closed buffer {closed} where {number} of {keep} were open"));
            }
            None if number == keep => return Fault::broken("S10", format!("opened more than {keep} buffers")),
            _ => {}
        }
        done(peer, number, 1)?;
    }
    // The one that was closed comes anew, and another makes room.
    let Some(lending) = closed.and_then(|closed| buffers.get(closed as usize)) else {
        return Fault::broken("S10", "closed a buffer that there is not");
    };
    let again = introduce(peer, lending, 2, 1)?;
    match again {
        Some(_) => done(peer, closed.unwrap_or_default(), 2),
        None => Fault::broken("S10", format!("opened more than {keep} buffers")),
    }
}

fn withdrawn_and_never_open(scene: &Scene<'_>, peer: &mut Peer) -> Result<(), Fault> {
    greet(peer)?;
    describe(peer, &buffer(scene, 0, 1)?)?;
    peer.send(&Message::Withdraw(BufferNumber { buffer: 0 }), &[])?;
    let lending = buffer(scene, 1, 1)?;
    describe(peer, &lending)?;
    introduce(peer, &lending, 1, 1)?;
    done(peer, 1, 1)
}
