//! Cases for a subscriber. This side is a publisher. Each connection of the subscriber is one case.

use vmmfd::{
    driver::GRANULARITY,
    error::ErrorCode,
    wire::{BufferNumber, BufferTurn, Hello, Message, Offer, Ready, STREAM, Segments, Subscribe},
};

use super::{
    Case, CaseResult, Context, case,
    case_end::{check, skip, violation},
    memory::{Flaw, TestMemory, memfd},
    peer::Peer,
    producer_steps,
};

/// The largest `keep` of a subscriber for which the case `beyond-keep` runs.
const MAX_KEEP: u64 = 8;

pub(super) fn cases() -> Vec<Case> {
    let mut cases = vec![
        case("turns", "S1 S6 S8 S9 S12 S13", turns),
        case("three-segments", "S7 S8", three_segments),
        case("beyond-keep", "S10", beyond_keep),
        case("withdrawn-and-never-open", "S12", withdrawn_and_never_open),
        case("without-the-capability", "S1", |_, peer| {
            receive_hello(peer)?;
            let hello = Message::Hello(peer.own_hello(&[]));
            peer.provoke(&hello, "S1", ErrorCode::Object, "a producer without streams")
        }),
        case("other-backend", "S1 C2", |context, peer| {
            receive_hello(peer)?;
            peer.send(&Message::Hello(Hello { backend: "cuda".to_owned(), ..peer.own_hello(&[STREAM]) }))?;
            receive_subscribe(peer)?;
            describe(peer, &buffer(context, 0, 1)?)?;
            peer.expect_error::<Message>("S1", ErrorCode::Backend, "an offer from backend `cuda`")
        }),
    ];
    // Buffer 0 is described, and open if the flag is set. Then an invalid message follows.
    type Invalid = (&'static str, &'static str, bool, fn(&Peer, &TestMemory) -> CaseResult);
    let invalid: [Invalid; 15] = [
        ("undescribed", "S2", false, |peer, memory| ready(peer, 1, 1, memory, 1)),
        ("generation-2-first", "S5", false, |peer, memory| ready(peer, 0, 2, memory, 1)),
        ("generation-again", "S5", true, |peer, memory| ready(peer, 0, 1, memory, 0)),
        ("generation-left-out", "S5", true, |peer, memory| ready(peer, 0, 3, memory, 0)),
        ("closed-without-segments", "S7", false, |peer, memory| ready(peer, 0, 1, memory, 0)),
        ("open-with-segments", "S6", true, |peer, memory| ready(peer, 0, 2, memory, 1)),
        ("number-twice", "S2", false, describe),
        ("offer-without-number", "S2", false, |peer, memory| change(peer, memory, |offer| offer.buffer = None)),
        ("another-object", "S3", false, |peer, memory| change(peer, memory, |offer| offer.object = "x".into())),
        ("part-of-a-buffer", "S3", false, |peer, memory| {
            change(peer, memory, |offer| {
                if let Some(part) = &mut offer.part {
                    (part.segments, part.size) = (0, GRANULARITY);
                }
            })
        }),
        ("too-many-buffers", "S4", false, |peer, memory| {
            (1..=64).try_for_each(|number| {
                let offer = Offer { buffer: Some(number), ..memory.offer.clone() };
                peer.send(&Message::Offer(Box::new(offer)))
            })
        }),
        ("withdraw-of-nothing", "S12", false, |peer, _| peer.send(&Message::Withdraw(BufferNumber { buffer: 9 }))),
        ("done-from-a-publisher", "R2", true, |peer, _| {
            peer.send(&Message::Done(BufferTurn { buffer: 0, generation: 1 }))
        }),
        ("subscribe-from-a-publisher", "R2", false, |peer, _| peer.send(&Message::Subscribe(Subscribe { keep: 1 }))),
        ("segments-of-an-open-buffer", "R2", true, |peer, memory| producer_steps::send_segments(peer, memory, 0, 1)),
    ];
    for (name, rule, open, send) in invalid {
        cases.push(case(name, rule, move |context, peer| {
            greet(peer)?;
            let memory = buffer(context, 0, 1)?;
            describe(peer, &memory)?;
            if open {
                open_buffer(peer, &memory, 1, 1)?;
                receive_done(peer, 0, 1)?;
            }
            send(peer, &memory)?;
            peer.expect_error::<Message>(rule, ErrorCode::Protocol, name)
        }));
    }
    for (name, rule, flaw) in [
        ("memory-that-can-shrink", "V2", Flaw::Unsealed),
        ("sparse-memory", "V3", Flaw::Sparse),
        ("shorter-memory", "V1", Flaw::Short),
    ] {
        cases.push(case(name, rule, move |context, peer| {
            greet(peer)?;
            let memory = buffer(context, 0, 1)?.with_descriptor(memfd(GRANULARITY, flaw)?);
            describe(peer, &memory)?;
            ready(peer, 0, 1, &memory, 1)?;
            peer.expect_error::<Message>(rule, ErrorCode::Protocol, name)
        }));
    }
    cases
}

fn receive_hello(peer: &mut Peer) -> CaseResult {
    let hello = producer_steps::receive_hello(peer)?;
    check(hello.capabilities.iter().any(|capability| capability == STREAM), "S1", || {
        "sent hello without the capability `stream`".to_owned()
    })
}

/// Returns the number of buffers that the subscriber keeps open.
fn receive_subscribe(peer: &mut Peer) -> CaseResult<u64> {
    match peer.first_message("S1", "subscribe")? {
        (Message::Subscribe(Subscribe { keep: keep @ 1.. }), _) => Ok(keep),
        (Message::Subscribe(_), _) => violation("R2", "subscribed with keep 0"),
        (other, _) => violation("S1", format!("sent {} instead of subscribe", other.name())),
    }
}

/// Exchanges `hello` and receives the subscription. Returns the number of buffers that the subscriber keeps open.
fn greet(peer: &mut Peer) -> CaseResult<u64> {
    receive_hello(peer)?;
    peer.send(&Message::Hello(peer.own_hello(&[STREAM])))?;
    receive_subscribe(peer)
}

fn buffer(context: &Context<'_>, number: u64, segments: u64) -> CaseResult<TestMemory> {
    let mut memory = TestMemory::zeros(context, segments)?;
    memory.offer.buffer = Some(number);
    Ok(memory)
}

fn describe(peer: &Peer, memory: &TestMemory) -> CaseResult {
    change(peer, memory, |_| {})
}

/// Describes a buffer with a changed offer.
fn change(peer: &Peer, memory: &TestMemory, change: fn(&mut Offer)) -> CaseResult {
    let mut offer = memory.offer.clone();
    change(&mut offer);
    peer.send(&Message::Offer(Box::new(offer)))
}

/// Publishes a buffer with its first segments.
fn ready(peer: &Peer, buffer: u64, generation: u64, memory: &TestMemory, segments: usize) -> CaseResult {
    let (sizes, fds) = memory.descriptors(0..segments);
    peer.send_with(&Message::Ready(Ready { buffer, generation, sizes }), &fds)
}

fn receive_done(peer: &mut Peer, buffer: u64, generation: u64) -> CaseResult {
    match peer.next_message("S9", "done")?.0 {
        Message::Done(turn) => check(turn == BufferTurn { buffer, generation }, "S9", || {
            format!(
                "sent done for generation {} of buffer {}; published generation {generation} of {buffer}",
                turn.generation, turn.buffer
            )
        }),
        Message::Gone(_) => violation("S10", "closed a buffer although no other one was opened"),
        other => violation("S9", format!("sent {} instead of done", other.name())),
    }
}

/// Publishes a buffer that is closed at the subscriber: `first` segments with `ready`, then the rest. Returns the buffer that the
/// subscriber closed for it.
fn open_buffer(peer: &mut Peer, memory: &TestMemory, generation: u64, first: usize) -> CaseResult<Option<u64>> {
    let number = memory.offer.buffer.unwrap_or_default();
    ready(peer, number, generation, memory, first)?;
    let (mut sent, mut closed) = (first, None);
    loop {
        match peer.next_message("S8", "received")?.0 {
            Message::Received(received) => check(received.segments == sent as u64, "S8", || {
                format!("acknowledged {} segments instead of {sent}", received.segments)
            })?,
            Message::Gone(BufferNumber { buffer }) if closed.is_none() && buffer != number => {
                closed = Some(buffer);
                continue;
            }
            Message::Gone(_) => return violation("S10", "closed more than one buffer, or the published one"),
            other => return violation("S8", format!("sent {} instead of received", other.name())),
        }
        let all = memory.segments.len();
        if sent == all {
            return Ok(closed);
        }
        let (sizes, fds) = memory.descriptors(sent..all);
        peer.send_with(&Message::Segments(Segments { first: sent as u64, sizes }), &fds)?;
        sent = all;
    }
}

fn withdraw(peer: &mut Peer, number: u64) -> CaseResult {
    peer.send(&Message::Withdraw(BufferNumber { buffer: number }))?;
    match peer.next_message("S12", "gone")?.0 {
        Message::Gone(BufferNumber { buffer }) if buffer == number => Ok(()),
        other => violation("S12", format!("sent {} instead of gone for buffer {number}", other.name())),
    }
}

fn turns(context: &Context<'_>, peer: &mut Peer) -> CaseResult {
    greet(peer)?;
    let memory = buffer(context, 7, 1)?;
    describe(peer, &memory)?;
    open_buffer(peer, &memory, 1, 1)?;
    receive_done(peer, 7, 1)?;
    for generation in 2..6 {
        ready(peer, 7, generation, &memory, 0)?;
        receive_done(peer, 7, generation)?;
    }
    withdraw(peer, 7)?;
    peer.shut_down_writing();
    peer.expect_close::<Message>("S13", "after the end of the stream")
}

fn three_segments(context: &Context<'_>, peer: &mut Peer) -> CaseResult {
    greet(peer)?;
    for (number, first) in [(0, 1), (1, 3)] {
        let memory = buffer(context, number, 3)?;
        describe(peer, &memory)?;
        open_buffer(peer, &memory, 1, first)?;
        receive_done(peer, number, 1)?;
        withdraw(peer, number)?;
    }
    Ok(())
}

fn beyond_keep(context: &Context<'_>, peer: &mut Peer) -> CaseResult {
    let keep = greet(peer)?;
    if keep > MAX_KEEP {
        return skip(format!("it keeps {keep} buffers open; up to {MAX_KEEP} are tested"));
    }
    let buffers = (0..=keep).map(|number| buffer(context, number, 1)).collect::<Result<Vec<_>, _>>()?;
    let mut closed = None;
    for (number, memory) in (0..).zip(&buffers) {
        describe(peer, memory)?;
        closed = open_buffer(peer, memory, 1, 1)?;
        match closed {
            Some(closed) if number < keep => {
                return violation("S10", format!("closed buffer {closed} although only {number} of {keep} were open"));
            }
            None if number == keep => return violation("S10", format!("opened more than {keep} buffers")),
            _ => {}
        }
        receive_done(peer, number, 1)?;
    }
    // Publish the closed buffer again: the subscriber must close another one.
    let closed = closed.unwrap_or_default();
    let Some(memory) = buffers.get(closed as usize) else {
        return violation("S10", "closed a buffer that does not exist");
    };
    let again = open_buffer(peer, memory, 2, 1)?;
    check(again.is_some(), "S10", || format!("opened more than {keep} buffers"))?;
    receive_done(peer, closed, 2)
}

fn withdrawn_and_never_open(context: &Context<'_>, peer: &mut Peer) -> CaseResult {
    greet(peer)?;
    describe(peer, &buffer(context, 0, 1)?)?;
    peer.send(&Message::Withdraw(BufferNumber { buffer: 0 }))?;
    let memory = buffer(context, 1, 1)?;
    describe(peer, &memory)?;
    open_buffer(peer, &memory, 1, 1)?;
    receive_done(peer, 1, 1)
}
