//! This side is a producer: what a consumer of a handoff must do. Each connection that it makes is one case.

use std::os::fd::AsFd;

use vmmfd::{
    driver::{Access, GRANULARITY},
    error::ErrorCode,
    memory::Region,
    wire::{Busy, Failure, Hello, Message, Offer, Segments, Verdict},
};

use super::{
    Case, Scene,
    fault::Fault,
    lender::{
        answer_and_end, asked, body_of, figures, for_request, greet, heard_hello, lend, offer, range, right, segments,
    },
    memory::{Flaw, Lending, SALT, holds, memfd, not_memory},
    peer::{Heard, Peer, gives_up, impatient},
    records::{about, record, record_of, unreadable},
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
    bad_segments(&mut cases);
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

/// Segments that are not where the offer has them.
fn bad_segments(cases: &mut Vec<Case>) {
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
