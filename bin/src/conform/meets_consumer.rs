//! This side is a producer: what a consumer of a handoff must do. Each connection that it makes is one case.

use std::os::fd::{AsFd, BorrowedFd};

use vmmfd::{
    driver::{Access, GRANULARITY},
    error::ErrorCode,
    memory::Region,
    wire::{Busy, ByteRange, Failure, HEADER_LENGTH, Hello, Message, Offer, Request, Segments, Verdict},
};

use super::{
    Case, Scene,
    fault::Fault,
    meets_producer::{checked, gives_up, impatient, record, record_of},
    memory::{Flaw, Lending, SALT, holds, memfd, not_memory},
    peer::{Heard, Peer},
    records::{about, unreadable},
};
use crate::check::{Figures, figures::Claim, pattern::words};

/// The salt of a reply.
const REPLY: u32 = !SALT;

pub(super) fn cases() -> Vec<Case> {
    let mut cases = vec![
        Case::new("one-allocation", &["H2", "C7", "C10", "C12", "K3", "K4"], |scene, peer| {
            sound(scene, peer, 1, false)
        }),
        Case::new("three-allocations", &["C6", "C7"], |scene, peer| sound(scene, peer, 3, false)),
        Case::new("immutable", &["M6", "V4"], |scene, peer| sound(scene, peer, 1, true)),
        Case::new("for-reading-alone", &["M7"], for_reading_alone),
        Case::new("unknown-check", &["C10"], unknown_check),
        Case::new("unknown-fields", &["R5"], unknown_fields),
        Case::new("newer-version", &["H1"], newer_version),
        Case::new("busy", &["H4"], busy),
        Case::new("wrong-byte", &["C10", "K3", "K4", "K5"], wrong_byte),
        Case::new("round-trip", &["C10"], round_trip),
        Case::new("error", &["H5"], error_ends_it),
        Case::new("silent-producer", &["H6"], silent),
        Case::new("old-version", &["H1"], |_, peer| {
            heard_hello(peer)?;
            peer.send(&Message::Hello(Hello { version: 0, ..peer.own_hello(&[]) }), &[])?;
            peer.ends_with("H1", &[ErrorCode::Version], "a hello of version 0")
        }),
        Case::new("offer-before-hello", &["R2", "H2"], |scene, peer| {
            heard_hello(peer)?;
            let lending = Lending::new(scene, 1).map_err(Fault::Failed)?;
            peer.send(&Message::Offer(Box::new(lending.offer)), &[])?;
            peer.ends_with("R2", &[ErrorCode::Protocol], "an offer comes where hello belongs")
        }),
        Case::new("other-backend", &["C2"], |scene, peer| {
            heard_hello(peer)?;
            peer.send(&Message::Hello(Hello { backend: "cuda".to_owned(), ..peer.own_hello(&[]) }), &[])?;
            let request = asked(peer)?;
            let lending = Lending::new(scene, 1).map_err(Fault::Failed)?;
            offer(peer, &lending.offer, &request)?;
            peer.ends_with("C2", &[ErrorCode::Backend], "a producer that said `cuda` offers memory")
        }),
        Case::new("segments-before-offer", &["R2", "C4"], |scene, peer| {
            let lending = Lending::new(scene, 1).map_err(Fault::Failed)?;
            greet(peer)?;
            segments(peer, &lending, 0, 1)?;
            peer.ends_with("C4", &[ErrorCode::Protocol], "segments come where an offer belongs")
        }),
        Case::new("other-access", &["C4"], |scene, peer| {
            let request = greet(peer)?;
            let Some(access) = request.access else { return Fault::left_out("the consumer asks for no access") };
            let mut lending = Lending::new(scene, 1).map_err(Fault::Failed)?;
            lending.offer.access = match access {
                Access::ReadOnly => Access::ReadWrite,
                Access::ReadWrite => Access::ReadOnly,
            };
            peer.send(&Message::Offer(Box::new(lending.offer)), &[])?;
            peer.ends_with("C4", &[ErrorCode::Protocol], "another access is offered than was asked for")
        }),
        Case::new("wrong-order", &["C6"], |scene, peer| {
            let lending = Lending::new(scene, 3).map_err(Fault::Failed)?;
            let request = greet(peer)?;
            offer(peer, &lending.offer, &request)?;
            segments(peer, &lending, 1, 1)?;
            peer.ends_with("C6", &[ErrorCode::Protocol], "the second segment comes first")
        }),
        Case::new("contradicting-result", &["K4"], contradicting_result),
    ];
    bad_offers(&mut cases);
    bad_checks(&mut cases);
    bad_fields(&mut cases);
    for (name, first) in [("all-bytes-in-the-first-of-two-segments", 0), ("segment-before-the-first-byte", 1)] {
        cases.push(Case::new(name, &["C5"], move |scene, peer| {
            let size = 2 * GRANULARITY;
            let fd = memfd(size, Flaw::None).map_err(Fault::Failed)?;
            let mut lending = Lending::new(scene, 1).map_err(Fault::Failed)?.with_descriptor(fd);
            lending.segments[0].1 = size;
            enlarge(&mut lending.offer, size);
            (lending.offer.memory.segments, lending.offer.check) = (2, None);
            change_part(&mut lending.offer, |part| part.first = first);
            let request = greet(peer)?;
            offer(peer, &lending.offer, &request)?;
            let segments = Segments { first, sizes: vec![size] };
            peer.send(&Message::Segments(segments), &[lending.segments[0].0.as_fd()])?;
            peer.ends_with("C5", &[ErrorCode::Protocol], "one of two segments has all bytes")
        }));
    }
    bad_memory(&mut cases);
    for bad in unreadable().unwrap_or_default() {
        let name = format!("record: {}", bad.name);
        cases.push(Case::new(name, about(bad.rule), move |_, peer| {
            greet(peer)?;
            bad.send(peer)
        }));
    }
    cases
}

/// Offers of which one thing is wrong.
fn bad_offers(cases: &mut Vec<Case>) {
    type Change = fn(&mut Offer);
    let changes: &[(&str, &'static [&'static str], Change)] = &[
        ("other-object", &["C4"], |offer| offer.object = "another".to_owned()),
        ("buffer-of-a-stream", &["C4"], |offer| offer.buffer = Some(1)),
        ("no-data", &["M1"], |offer| offer.memory.size = 0),
        ("more-data-than-memory", &["M1"], |offer| offer.memory.size = offer.memory.mapped_size + 1),
        ("more-than-there-can-be", &["M1", "C9"], |offer| enlarge(offer, 1 << 47)),
        ("more-than-comes", &["V1", "C9"], |offer| enlarge(offer, 2 * GRANULARITY)),
        ("half-a-unit", &["M1"], |offer| enlarge(offer, offer.memory.mapped_size - GRANULARITY / 2)),
        ("offset-with-vmm", &["M2"], |offer| offer.memory.offset = 4096),
        ("pool-with-vmm", &["M2"], |offer| offer.memory.pool = Some(1)),
        ("immutable-to-be-written", &["M6"], |offer| {
            (offer.access, offer.memory.immutable) = (Access::ReadWrite, true);
        }),
        ("immutable-unsealed", &["V4", "M6"], |offer| offer.memory.immutable = true),
        ("no-part", &["C5"], |offer| offer.part = None),
        ("part-of-nothing", &["C5"], |offer| change_part(offer, |part| part.size = 0)),
        ("part-behind-the-range", &["C5"], |offer| change_part(offer, |part| part.offset = GRANULARITY)),
        ("more-segments-than-there-are", &["C5"], |offer| change_part(offer, |part| part.segments = 2)),
        ("part-of-other-segments", &["C5"], |offer| change_part(offer, |part| part.first = 1)),
        ("array-outside", &["A1"], |offer| {
            let array = serde_json::json!({"dtype": "uint8", "shape": [offer.memory.size + 1]});
            offer.array = serde_json::from_value(array).ok();
        }),
    ];
    for &(name, rules, change) in changes {
        cases.push(Case::new(name, rules, move |scene, peer| {
            let mut lending = Lending::new(scene, 1).map_err(Fault::Failed)?;
            change(&mut lending.offer);
            let request = greet(peer)?;
            if request.access == Some(Access::ReadOnly) && lending.offer.access == Access::ReadWrite {
                return Fault::left_out("the consumer asks for ro");
            }
            offer(peer, &lending.offer, &request)?;
            if lending.offer.part.is_some() {
                let sizes = vec![lending.offer.memory.mapped_size];
                peer.send(&Message::Segments(Segments { first: 0, sizes }), &[lending.segments[0].0.as_fd()])?;
            }
            peer.ends_with(rules[0], &[ErrorCode::Protocol], name)
        }));
    }
}

/// Checks that contradict themselves, and memory that no machine has.
fn bad_checks(cases: &mut Vec<Case>) {
    let digest = || format!("blake3:{}", "0".repeat(64));
    let checks = [
        (
            "salt-and-digest",
            &["K1"] as &'static [&'static str],
            format!(r#"{{"salt":{SALT},"digest":"{}"}}"#, digest()),
        ),
        ("reply-salt-without-salt", &["K1"], format!(r#"{{"reply_salt":{REPLY}}}"#)),
        ("reply-salt-with-digest", &["K1"], format!(r#"{{"reply_salt":{REPLY},"digest":"{}"}}"#, digest())),
        ("reply-salt-that-is-the-salt", &["K1"], format!(r#"{{"salt":{SALT},"reply_salt":{SALT}}}"#)),
        ("salt-twice", &["R8"], format!(r#"{{"salt":{SALT},"salt":{SALT}}}"#)),
    ];
    for (name, rules, check) in checks {
        cases.push(Case::new(name, rules, move |scene, peer| {
            let mut lending = Lending::filled(scene, 1, false).map_err(Fault::Failed)?;
            (lending.offer.access, lending.offer.check) = (Access::ReadWrite, None);
            let request = greet(peer)?;
            // Only as text has an object a name twice.
            let body = body_of(&for_request(&lending.offer, &request))?.to_string();
            peer.send_record(&record_of(3, &format!(r#"{{"check":{check},{}"#, &body[1..])), &[])?;
            segments(peer, &lending, 0, 1)?;
            refuses_check(peer, &lending, rules[0])
        }));
    }
    cases.push(Case::new("far-more-than-there-is", &["C9"], |scene, peer| {
        let mut lending = Lending::new(scene, 1).map_err(Fault::Failed)?;
        let segments = (1 << 26) - 1;
        enlarge(&mut lending.offer, segments * GRANULARITY);
        lending.offer.memory.segments = segments;
        change_part(&mut lending.offer, |part| part.segments = segments);
        let request = greet(peer)?;
        offer(peer, &lending.offer, &request)?;
        self::segments(peer, &lending, 0, 1)?;
        peer.ends_with("C9", &[ErrorCode::Failed], "128 TiB of memory are offered")
    }));
}

/// A consumer that knows the extension ends the conversation because of its check.
fn refuses_check(peer: &mut Peer, lending: &Lending, rule: &'static str) -> Result<(), Fault> {
    let replied = || lending.shared.as_ref().map_or(Ok(false), |shared| holds(shared, REPLY)).map_err(Fault::Failed);
    loop {
        let found = match peer.hear()? {
            Heard::Message(message, _) => match *message {
                Message::Error(Failure { code: ErrorCode::Protocol, .. }) => {
                    return peer.leaves("H5", "after its error");
                }
                Message::Result(Verdict { check: None, .. }) if !replied()? => {
                    return Fault::left_out("the consumer does not know the extension Pattern and digest");
                }
                Message::Received(_) => continue,
                Message::Error(Failure { code, message }) => format!("it sent error `{code}`: {message}"),
                other => format!("it sent {}", other.name()),
            },
            Heard::End => "it hung up".to_owned(),
            Heard::Silence => "nothing came".to_owned(),
        };
        return Fault::broken(rule, format!("a check contradicts itself: expected error `protocol`, and {found}"));
    }
}

fn enlarge(offer: &mut Offer, mapped_size: u64) {
    offer.memory.mapped_size = mapped_size;
    change_part(offer, |part| part.size = mapped_size);
}

fn change_part(offer: &mut Offer, change: impl FnOnce(&mut vmmfd::wire::Part)) {
    if let Some(part) = &mut offer.part {
        change(part);
    }
}

/// Offers that only JSON can say.
fn bad_fields(cases: &mut Vec<Case>) {
    let changes: [(&str, &'static [&'static str], &'static str, serde_json::Value); 7] = [
        ("unknown-mechanism", &["M3"], "/memory/mechanism", "fabric".into()),
        ("unknown-location", &["M3"], "/memory/location", "moon".into()),
        ("uuid-with-a-prefix", &["M4"], "/memory/device/uuid", "GPU-00112233-4455-6677-8899-aabbccddeeff".into()),
        ("uuid-without-hyphens", &["M4"], "/memory/device/uuid", "00112233445566778899aabbccddeeff".into()),
        ("array-for-a-part", &["R4"], "/part", serde_json::json!([0, 1, 0, GRANULARITY])),
        ("array-for-a-device", &["R4"], "/memory/device", serde_json::json!(["x", "y"])),
        ("65-dimensions", &["A1"], "/array", serde_json::json!({"dtype": "uint8", "shape": vec![1; 65]})),
    ];
    for (name, rules, path, value) in changes {
        cases.push(Case::new(name, rules, move |scene, peer| {
            let lending = Lending::new(scene, 1).map_err(Fault::Failed)?;
            let request = greet(peer)?;
            let mut body = body_of(&for_request(&lending.offer, &request))?;
            if let Some(field) = body.pointer_mut(path) {
                *field = value.clone();
            }
            peer.send_record(&record(3, &body), &[])?;
            peer.ends_with(rules[0], &[ErrorCode::Protocol], name)
        }));
    }
}

/// Descriptors that are not the memory that is offered.
fn bad_memory(cases: &mut Vec<Case>) {
    let flaws: [(&str, &'static [&'static str], Flaw); 4] = [
        ("memory-that-can-shrink", &["V2"], Flaw::Unsealed),
        ("seals-not-final", &["V2"], Flaw::SealsNotFinal),
        ("sparse-memory", &["V3"], Flaw::Sparse),
        ("shorter-memory", &["V1"], Flaw::Short),
    ];
    let mut case = |name: &'static str, rules: &'static [&'static str], flaw: Option<Flaw>| {
        cases.push(Case::new(name, rules, move |scene, peer| {
            let lending = Lending::new(scene, 1).map_err(Fault::Failed)?;
            let fd = flaw.map_or_else(not_memory, |flaw| memfd(GRANULARITY, flaw)).map_err(Fault::Failed)?;
            let lending = lending.with_descriptor(fd);
            let request = greet(peer)?;
            offer(peer, &lending.offer, &request)?;
            segments(peer, &lending, 0, 1)?;
            peer.ends_with(rules[0], &[ErrorCode::Protocol], name)
        }));
    };
    flaws.into_iter().for_each(|(name, rules, flaw)| case(name, rules, Some(flaw)));
    case("no-memory", &["V1"], None);
    cases.push(Case::new("committed-foreign-memory", &["V1", "V2", "V3"], |scene, peer| {
        let fd = memfd(GRANULARITY, Flaw::None).map_err(Fault::Failed)?;
        let mut lending = Lending::new(scene, 1).map_err(Fault::Failed)?.with_descriptor(fd);
        // It holds zeros.
        lending.offer.check = None;
        let request = greet(peer)?;
        match lend(peer, &lending, &request)? {
            Verdict { verified: true, .. } => Ok(()),
            _ => Fault::broken("C10", "found something wrong with sound memory that comes without a check"),
        }
    }));
}

/// The consumer's hello, without an answer.
fn heard_hello(peer: &mut Peer) -> Result<Hello, Fault> {
    let heard = peer.hear_all()?;
    match peer.must(heard, "H2", "hello")? {
        (Message::Hello(hello), _) => checked(hello),
        (other, _) => Fault::broken("H2", format!("began with {}", other.name())),
    }
}

/// Both say hello, and the consumer asks.
fn greet(peer: &mut Peer) -> Result<Request, Fault> {
    heard_hello(peer)?;
    peer.send(&Message::Hello(peer.own_hello(&[])), &[])?;
    asked(peer)
}

fn asked(peer: &mut Peer) -> Result<Request, Fault> {
    let heard = peer.hear_all()?;
    match peer.must(heard, "C1", "request")? {
        (Message::Request(request), _) => Ok(request),
        (Message::Busy(_), _) => Fault::broken("H4", "sent busy before its first request"),
        (other, _) => Fault::broken("C1", format!("sent {} where a request belongs", other.name())),
    }
}

/// An offer, with the access that was asked for.
fn for_request(offer: &Offer, request: &Request) -> Offer {
    Offer { access: request.access.unwrap_or(offer.access), ..offer.clone() }
}

fn offer(peer: &Peer, offer: &Offer, request: &Request) -> Result<(), Fault> {
    peer.send(&Message::Offer(Box::new(for_request(offer, request))), &[])
}

fn body_of(offer: &Offer) -> Result<serde_json::Value, Fault> {
    let record = Message::Offer(Box::new(offer.clone())).encode().map_err(|error| Fault::Failed(error.into()))?;
    Ok(serde_json::from_slice(&record[HEADER_LENGTH..]).unwrap_or_default())
}

/// Sends some of the segments.
fn segments(peer: &Peer, lending: &Lending, first: usize, count: usize) -> Result<(), Fault> {
    let some = &lending.segments[first..first + count];
    let sizes = some.iter().map(|(_, size)| *size).collect();
    let fds: Vec<BorrowedFd<'_>> = some.iter().map(|(fd, _)| fd.as_fd()).collect();
    peer.send(&Message::Segments(Segments { first: first as u64, sizes }), &fds)
}

/// The bytes that were asked for, of what this side has.
fn range(lending: &Lending, request: &Request) -> Result<std::ops::Range<u64>, Fault> {
    let size = lending.offer.memory.size;
    match request.range {
        None => Ok(0..size),
        Some(ByteRange { offset, length })
            if length > 0 && offset.checked_add(length).is_some_and(|end| end <= size) =>
        {
            Ok(offset..offset + length)
        }
        Some(_) => Fault::left_out(format!("the consumer asks for a range that is not inside {size} bytes")),
    }
}

/// All that follows a request, up to the consumer's result. All segments are sent, whatever the range is.
fn lend(peer: &mut Peer, lending: &Lending, request: &Request) -> Result<Verdict, Fault> {
    range(lending, request)?;
    offer(peer, &lending.offer, request)?;
    let all = lending.segments.len();
    // The first alone, then the others.
    let mut sent = 0;
    while sent < all {
        let count = if sent == 0 { 1 } else { all - sent };
        segments(peer, lending, sent, count)?;
        sent += count;
        match peer.next("C7", "received")? {
            (Message::Received(received), _) if received.segments == sent as u64 => {}
            (Message::Received(received), _) => {
                let found = format!("acknowledged {} segments where {sent} had come", received.segments);
                return Fault::broken("C7", found);
            }
            (other, _) => return Fault::broken("C7", format!("answered segments with {}", other.name())),
        }
    }
    match peer.next("C10", "result")? {
        (Message::Result(verdict), _) => Ok(verdict),
        (other, _) => Fault::broken("C10", format!("sent {} where a result belongs", other.name())),
    }
}

/// The figures of a result must fit it; `None` if the consumer does not know the extension.
fn figures(verdict: &Verdict, range: &std::ops::Range<u64>) -> Result<Option<Figures>, Fault> {
    let Ok(figures) = Figures::read(verdict.check.as_ref()) else {
        return Fault::broken("K3", "sent a check of another form");
    };
    let Some(found) = figures else { return Ok(None) };
    if found.words != words(range) || found.mismatches > found.words {
        let (words, of) = (found.words, words(range));
        return Fault::broken("K3", format!("checked {words} words of {of}, {} wrong", found.mismatches));
    }
    if verdict.verified != (found.mismatches == 0) {
        return Fault::broken(
            "K4",
            format!("sent verified: {} with {} wrong words", verdict.verified, found.mismatches),
        );
    }
    if found.first_mismatch.is_some_and(|first| found.mismatches == 0 || first.expected == first.found) {
        return Fault::broken("K5", "sent a first mismatch that is none");
    }
    if found.digest.is_some() {
        return Fault::broken("K6", "sent a digest where none was offered");
    }
    Ok(Some(found))
}

/// A verdict of what is right.
fn right(verdict: &Verdict, lending: &Lending, request: &Request) -> Result<(), Fault> {
    figures(verdict, &range(lending, request)?)?;
    if verdict.verified { Ok(()) } else { Fault::broken("C10", "found something wrong with data that is right") }
}

fn answer_and_end(peer: &mut Peer, verified: bool) -> Result<(), Fault> {
    peer.send(&Message::Result(Verdict::unchecked(verified)), &[])?;
    match peer.hear()? {
        Heard::End => Ok(()),
        Heard::Message(message, _) if matches!(*message, Message::Request(_)) => Ok(()),
        Heard::Message(message, _) => Fault::broken("C12", format!("sent {} after the last result", message.name())),
        Heard::Silence => Fault::broken("C12", "neither asked again nor shut down writing"),
    }
}

fn sound(scene: &Scene<'_>, peer: &mut Peer, count: u64, sealed: bool) -> Result<(), Fault> {
    let lending = Lending::filled(scene, count, sealed).map_err(Fault::Failed)?;
    let request = greet(peer)?;
    if sealed && request.access == Some(Access::ReadWrite) {
        return Fault::left_out("the consumer asks for rw");
    }
    let verdict = lend(peer, &lending, &request)?;
    right(&verdict, &lending, &request)?;
    answer_and_end(peer, true)
}

fn for_reading_alone(scene: &Scene<'_>, peer: &mut Peer) -> Result<(), Fault> {
    let lending = Lending::filled(scene, 1, false).and_then(Lending::for_reading).map_err(Fault::Failed)?;
    let request = greet(peer)?;
    if request.access == Some(Access::ReadWrite) {
        return Fault::left_out("the consumer asks for rw");
    }
    let verdict = lend(peer, &lending, &request)?;
    right(&verdict, &lending, &request)?;
    answer_and_end(peer, true)
}

fn unknown_check(scene: &Scene<'_>, peer: &mut Peer) -> Result<(), Fault> {
    let mut lending = Lending::new(scene, 1).map_err(Fault::Failed)?;
    lending.offer.check = serde_json::from_str(r#"{"of another extension":[1,{"x":null}]}"#).ok();
    let request = greet(peer)?;
    match lend(peer, &lending, &request)? {
        Verdict { verified: true, check: None, .. } => answer_and_end(peer, true),
        Verdict { check: Some(_), .. } => Fault::broken("C10", "answered a check that it can't know"),
        Verdict { .. } => Fault::broken("C10", "found something wrong where it can't know what is right"),
    }
}

fn unknown_fields(scene: &Scene<'_>, peer: &mut Peer) -> Result<(), Fault> {
    let lending = Lending::new(scene, 1).map_err(Fault::Failed)?;
    heard_hello(peer)?;
    let own = peer.own_hello(&[]);
    let hello = serde_json::json!({"of the future": [1], "version": own.version, "pid": own.pid,
        "capabilities": ["of the future"], "backend": own.backend, "timeout_ms": own.timeout_ms});
    peer.send_record(&record(1, &hello), &[])?;
    let request = asked(peer)?;
    let mut body = body_of(&for_request(&lending.offer, &request))?;
    body["colour"] = "red".into();
    body["memory"]["taste"] = serde_json::json!({"of": ["the future"]});
    body["memory"]["device"]["age"] = 7.into();
    body["array"] = serde_json::Value::Null;
    peer.send_record(&record(3, &body), &[])?;
    segments(peer, &lending, 0, 1)?;
    match peer.next("R5", "received")? {
        (Message::Received(_), _) => Ok(()),
        (other, _) => Fault::broken("C7", format!("answered segments with {}", other.name())),
    }
}

fn newer_version(scene: &Scene<'_>, peer: &mut Peer) -> Result<(), Fault> {
    let lending = Lending::filled(scene, 1, false).map_err(Fault::Failed)?;
    heard_hello(peer)?;
    peer.send(&Message::Hello(Hello { version: u16::MAX, ..peer.own_hello(&[]) }), &[])?;
    let request = asked(peer)?;
    let verdict = lend(peer, &lending, &request)?;
    right(&verdict, &lending, &request)
}

fn busy(scene: &Scene<'_>, peer: &mut Peer) -> Result<(), Fault> {
    let lending = Lending::filled(scene, 1, false).map_err(Fault::Failed)?;
    let request = greet(peer)?;
    (0..5).try_for_each(|_| peer.send(&Message::Busy(Busy {}), &[]))?;
    let verdict = lend(peer, &lending, &request)?;
    right(&verdict, &lending, &request)?;
    (0..5).try_for_each(|_| peer.send(&Message::Busy(Busy {}), &[]))?;
    answer_and_end(peer, true)
}

fn wrong_byte(scene: &Scene<'_>, peer: &mut Peer) -> Result<(), Fault> {
    let lending = Lending::filled(scene, 1, false).map_err(Fault::Failed)?;
    let request = greet(peer)?;
    let range = range(&lending, &request)?;
    let at = range.start + (range.end - range.start) / 2;
    if let Some(shared) = &lending.shared {
        let mut byte = [0];
        let flip = |byte: [u8; 1]| [byte[0] ^ 1];
        shared.copy_out(at, &mut byte).and_then(|()| shared.copy_in(at, &flip(byte))).map_err(Fault::Failed)?;
    }
    let verdict = lend(peer, &lending, &request)?;
    let Some(found) = figures(&verdict, &range)? else {
        return Fault::left_out("the consumer does not know the extension Pattern and digest");
    };
    if verdict.verified || found.mismatches != 1 {
        return Fault::broken("K3", format!("found {} wrong words where one is", found.mismatches));
    }
    match found.first_mismatch {
        Some(first) if first.index == at / 4 && (first.expected ^ first.found) == 1 << (at % 4 * 8) => {
            answer_and_end(peer, false)
        }
        Some(first) => Fault::broken("K5", format!("found word {} wrong where {} is", first.index, at / 4)),
        None => answer_and_end(peer, false),
    }
}

fn round_trip(scene: &Scene<'_>, peer: &mut Peer) -> Result<(), Fault> {
    let mut lending = Lending::filled(scene, 1, false).map_err(Fault::Failed)?;
    lending.offer.check = Some(Claim { salt: Some(SALT), reply_salt: Some(REPLY), digest: None }.to_check());
    lending.offer.access = Access::ReadWrite;
    let request = greet(peer)?;
    if request.access == Some(Access::ReadOnly) || request.range.is_some() {
        return Fault::left_out("the consumer asks for ro, or for a part");
    }
    let verdict = lend(peer, &lending, &request)?;
    right(&verdict, &lending, &request)?;
    let replied = lending.shared.as_ref().map_or(Ok(false), |shared| holds(shared, REPLY)).map_err(Fault::Failed)?;
    if verdict.check.is_some() && !replied {
        return Fault::broken("C10", "sent its result with a check, and wrote no reply");
    }
    answer_and_end(peer, true)
}

fn contradicting_result(scene: &Scene<'_>, peer: &mut Peer) -> Result<(), Fault> {
    let lending = Lending::filled(scene, 1, false).map_err(Fault::Failed)?;
    let request = greet(peer)?;
    if lend(peer, &lending, &request)?.check.is_none() {
        return Fault::left_out("the consumer does not know the extension Pattern and digest");
    }
    let figures = Figures { words: words(&range(&lending, &request)?), mismatches: 1, ..Figures::default() };
    peer.send(&Message::Result(figures.verdict(true)), &[])?;
    peer.ends_with("K4", &[ErrorCode::Protocol], "a result is verified and has a wrong word")
}

fn error_ends_it(_: &Scene<'_>, peer: &mut Peer) -> Result<(), Fault> {
    greet(peer)?;
    let message = "conform tries an error".to_owned();
    peer.send(&Message::Error(Failure { code: ErrorCode::Failed, message }), &[])?;
    peer.leaves("H5", "after an error")
}

fn silent(_: &Scene<'_>, peer: &mut Peer) -> Result<(), Fault> {
    let hello = heard_hello(peer)?;
    peer.send(&Message::Hello(peer.own_hello(&[])), &[])?;
    asked(peer)?;
    impatient(&hello)?;
    gives_up(peer, &hello, "a producer does not answer a request")
}
