//! Cases for a consumer of handoffs. This side is a producer. Each connection of the consumer is one case.

use std::os::fd::AsFd;

use serde_json::json;
use vmmfd::{
    driver::{Access, GRANULARITY},
    error::ErrorCode,
    memory::Region,
    wire::{Busy, Failure, Hello, Message, Offer, Part, Segments, Verdict},
};

use super::{
    Case, CaseResult, Context, case,
    case_end::{check, skip, violation},
    memory::{Flaw, SALT, TestMemory, memfd},
    peer::{Incoming, Peer},
    producer_steps::{
        body_of, figures, finish, for_request, greet, range, receive_hello, receive_request, send_offer, send_segments,
        serve, serve_correct,
    },
    records::{invalid, record, record_of},
};
use crate::check::{Figures, figures::Claim, pattern::words};

/// The salt of a reply.
const REPLY: u32 = !SALT;

/// The reason to skip a case if the consumer ignores checks.
const NO_CHECKS: &str = "the consumer does not support the extension Pattern and digest";

pub(super) fn cases() -> Vec<Case> {
    let mut cases = correct_producers();
    cases.extend(wrong_producers().into_iter().chain(wrong_memory()));
    cases.extend(invalid_offers().chain(invalid_json_offers()).chain(invalid_checks()));
    cases.extend(invalid_segments().chain(invalid_descriptors()));
    for invalid in invalid().unwrap_or_default() {
        cases.push(case(format!("record: {}", invalid.name), invalid.rule(), move |_, peer| {
            greet(peer)?;
            invalid.send::<Message>(peer)
        }));
    }
    cases
}

/// Producers that follow the protocol, or end the connection.
fn correct_producers() -> Vec<Case> {
    vec![
        case("one-allocation", "H2 C7 C10 C12 K3 K4", |context, peer| correct(context, peer, 1)),
        case("three-allocations", "C6 C7", |context, peer| correct(context, peer, 3)),
        case("immutable", "M6 V4", |context, peer| correct_read_only(peer, TestMemory::filled(context, 1, true)?)),
        case("for-reading-alone", "M7", |context, peer| {
            correct_read_only(peer, TestMemory::filled(context, 1, false)?.reopened_read_only()?)
        }),
        case("unknown-check", "C10", unknown_check),
        case("unknown-fields", "R5", unknown_fields),
        case("newer-version", "H1", |context, peer| {
            let memory = TestMemory::filled(context, 1, false)?;
            receive_hello(peer)?;
            peer.send(&Message::Hello(Hello { version: u16::MAX, ..peer.own_hello(&[]) }))?;
            let request = receive_request(peer)?;
            serve_correct(peer, &memory, &request).map(drop)
        }),
        case("busy", "H4", |context, peer| {
            let memory = TestMemory::filled(context, 1, false)?;
            let request = greet(peer)?;
            (0..5).try_for_each(|_| peer.send(&Message::Busy(Busy {})))?;
            serve_correct(peer, &memory, &request)?;
            (0..5).try_for_each(|_| peer.send(&Message::Busy(Busy {})))?;
            finish(peer, true)
        }),
        case("wrong-byte", "C10 K3 K4 K5", wrong_byte),
        case("round-trip", "C10", round_trip),
        case("error", "H5", |_, peer| {
            greet(peer)?;
            peer.send(&Message::Error(Failure { code: ErrorCode::Failed, message: "an error of conform".to_owned() }))?;
            peer.expect_close::<Message>("H5", "after an error")
        }),
        case("silent-producer", "H6", |_, peer| {
            let hello = receive_hello(peer)?;
            peer.send(&Message::Hello(peer.own_hello(&[])))?;
            receive_request(peer)?;
            peer.expect_timeout(&hello, "a producer that does not answer a request")
        }),
    ]
}

/// Producers that send a wrong message.
fn wrong_producers() -> Vec<Case> {
    vec![
        case("old-version", "H1", |_, peer| {
            receive_hello(peer)?;
            let hello = Message::Hello(Hello { version: 0, ..peer.own_hello(&[]) });
            peer.provoke(&hello, "H1", ErrorCode::Version, "a hello of version 0")
        }),
        case("offer-before-hello", "R2 H2", |context, peer| {
            receive_hello(peer)?;
            let offer = Message::Offer(Box::new(TestMemory::zeros(context, 1)?.offer));
            peer.provoke(&offer, "R2", ErrorCode::Protocol, "an offer instead of hello")
        }),
        case("other-backend", "C2", |context, peer| {
            receive_hello(peer)?;
            peer.send(&Message::Hello(Hello { backend: "cuda".to_owned(), ..peer.own_hello(&[]) }))?;
            let request = receive_request(peer)?;
            send_offer(peer, &TestMemory::zeros(context, 1)?.offer, &request)?;
            peer.expect_error::<Message>("C2", ErrorCode::Backend, "an offer from backend `cuda`")
        }),
        case("segments-before-offer", "R2 C4", |context, peer| {
            let memory = TestMemory::zeros(context, 1)?;
            greet(peer)?;
            send_segments(peer, &memory, 0, 1)?;
            peer.expect_error::<Message>("C4", ErrorCode::Protocol, "segments instead of an offer")
        }),
        case("other-access", "C4", |context, peer| {
            let Some(access) = greet(peer)?.access else { return skip("the consumer requests no particular access") };
            let mut offer = TestMemory::zeros(context, 1)?.offer;
            offer.access = match access {
                Access::ReadOnly => Access::ReadWrite,
                Access::ReadWrite => Access::ReadOnly,
            };
            let offer = Message::Offer(Box::new(offer));
            peer.provoke(&offer, "C4", ErrorCode::Protocol, "an offer of another access than was requested")
        }),
    ]
}

/// Producers that describe their memory wrongly.
fn wrong_memory() -> Vec<Case> {
    vec![
        case("wrong-order", "C6", |context, peer| {
            let memory = TestMemory::zeros(context, 3)?;
            let request = greet(peer)?;
            send_offer(peer, &memory.offer, &request)?;
            send_segments(peer, &memory, 1, 1)?;
            peer.expect_error::<Message>("C6", ErrorCode::Protocol, "the second segment before the first")
        }),
        case("contradicting-result", "K4", |context, peer| {
            let memory = TestMemory::filled(context, 1, false)?;
            let request = greet(peer)?;
            if serve(peer, &memory, &request)?.check.is_none() {
                return skip(NO_CHECKS);
            }
            let words = words(&range(&memory, &request)?);
            let result = Message::Result(Figures { words, mismatches: 1, ..Figures::default() }.verdict(true));
            peer.provoke(&result, "K4", ErrorCode::Protocol, "a positive result with a wrong word")
        }),
        case("far-more-than-there-is", "C9", |context, peer| {
            let mut memory = TestMemory::zeros(context, 1)?;
            let segments = (1 << 26) - 1;
            enlarge(&mut memory.offer, segments * GRANULARITY);
            memory.offer.memory.segments = segments;
            change_part(&mut memory.offer, |part| part.segments = segments);
            let request = greet(peer)?;
            send_offer(peer, &memory.offer, &request)?;
            send_segments(peer, &memory, 0, 1)?;
            peer.expect_error::<Message>("C9", ErrorCode::Failed, "an offer of 128 TiB")
        }),
        case("committed-foreign-memory", "V1 V2 V3", |context, peer| {
            let mut memory = TestMemory::zeros(context, 1)?.with_descriptor(memfd(GRANULARITY, Flaw::None)?);
            // It holds zeros instead of the pattern.
            memory.offer.check = None;
            let request = greet(peer)?;
            let verdict = serve(peer, &memory, &request)?;
            check(verdict.verified, "C10", || "reported valid memory without a check as wrong".to_owned())
        }),
    ]
}

/// Offers with a single invalid value.
fn invalid_offers() -> impl Iterator<Item = Case> {
    type Change = fn(&mut Offer);
    let changes: [(&'static str, &'static str, Change); 17] = [
        ("other-object", "C4", |offer| offer.object = "another".to_owned()),
        ("buffer-of-a-stream", "C4", |offer| offer.buffer = Some(1)),
        ("no-data", "M1", |offer| offer.memory.size = 0),
        ("more-data-than-memory", "M1", |offer| offer.memory.size = offer.memory.mapped_size + 1),
        ("more-than-there-can-be", "M1 C9", |offer| enlarge(offer, 1 << 47)),
        ("more-than-comes", "V1 C9", |offer| enlarge(offer, 2 * GRANULARITY)),
        ("half-a-unit", "M1", |offer| enlarge(offer, offer.memory.mapped_size - GRANULARITY / 2)),
        ("offset-with-vmm", "M2", |offer| offer.memory.offset = 4096),
        ("pool-with-vmm", "M2", |offer| offer.memory.pool = Some(1)),
        ("immutable-to-be-written", "M6", |offer| {
            (offer.access, offer.memory.immutable) = (Access::ReadWrite, true);
        }),
        ("immutable-unsealed", "V4 M6", |offer| offer.memory.immutable = true),
        ("no-part", "C5", |offer| offer.part = None),
        ("part-of-nothing", "C5", |offer| change_part(offer, |part| part.size = 0)),
        ("part-behind-the-range", "C5", |offer| change_part(offer, |part| part.offset = GRANULARITY)),
        ("more-segments-than-there-are", "C5", |offer| change_part(offer, |part| part.segments = 2)),
        ("part-of-other-segments", "C5", |offer| change_part(offer, |part| part.first = 1)),
        ("array-outside", "A1", |offer| {
            let array = json!({"dtype": "uint8", "shape": [offer.memory.size + 1]});
            offer.array = serde_json::from_value(array).ok();
        }),
    ];
    changes.into_iter().map(|(name, rules, change)| {
        case(name, rules, move |context, peer| {
            let mut memory = TestMemory::zeros(context, 1)?;
            change(&mut memory.offer);
            let request = greet(peer)?;
            if request.access == Some(Access::ReadOnly) && memory.offer.access == Access::ReadWrite {
                return skip("the consumer requests access ro");
            }
            send_offer(peer, &memory.offer, &request)?;
            if memory.offer.part.is_some() {
                memory.segments[0].1 = memory.offer.memory.mapped_size;
                send_segments(peer, &memory, 0, 1)?;
            }
            peer.expect_error::<Message>(context.rule, ErrorCode::Protocol, name)
        })
    })
}

/// Offers that only JSON can express.
fn invalid_json_offers() -> impl Iterator<Item = Case> {
    let changes = [
        ("unknown-mechanism", "M3", "/memory/mechanism", json!("fabric")),
        ("unknown-location", "M3", "/memory/location", json!("moon")),
        ("uuid-with-a-prefix", "M4", "/memory/device/uuid", json!("GPU-00112233-4455-6677-8899-aabbccddeeff")),
        ("uuid-without-hyphens", "M4", "/memory/device/uuid", json!("00112233445566778899aabbccddeeff")),
        ("array-for-a-part", "R4", "/part", json!([0, 1, 0, GRANULARITY])),
        ("array-for-a-device", "R4", "/memory/device", json!(["x", "y"])),
        ("65-dimensions", "A1", "/array", json!({"dtype": "uint8", "shape": vec![1; 65]})),
    ];
    changes.into_iter().map(|(name, rule, path, value)| {
        case(name, rule, move |context, peer| {
            let memory = TestMemory::zeros(context, 1)?;
            let request = greet(peer)?;
            let mut body = body_of(&for_request(&memory.offer, &request))?;
            if let Some(field) = body.pointer_mut(path) {
                *field = value.clone();
            }
            peer.send_record(&record(3, &body), &[])?;
            peer.expect_error::<Message>(rule, ErrorCode::Protocol, name)
        })
    })
}

/// Checks that contradict themselves.
fn invalid_checks() -> impl Iterator<Item = Case> {
    let digest = format!("blake3:{}", "0".repeat(64));
    let checks = [
        ("salt-and-digest", "K1", format!(r#"{{"salt":{SALT},"digest":"{digest}"}}"#)),
        ("reply-salt-without-salt", "K1", format!(r#"{{"reply_salt":{REPLY}}}"#)),
        ("reply-salt-with-digest", "K1", format!(r#"{{"reply_salt":{REPLY},"digest":"{digest}"}}"#)),
        ("reply-salt-that-is-the-salt", "K1", format!(r#"{{"salt":{SALT},"reply_salt":{SALT}}}"#)),
        ("salt-twice", "R8", format!(r#"{{"salt":{SALT},"salt":{SALT}}}"#)),
    ];
    checks.into_iter().map(|(name, rule, text)| {
        case(name, rule, move |context, peer| {
            let mut memory = TestMemory::filled(context, 1, false)?;
            (memory.offer.access, memory.offer.check) = (Access::ReadWrite, None);
            let request = greet(peer)?;
            // As text: a JSON value can't hold a duplicate key.
            let body = body_of(&for_request(&memory.offer, &request))?.to_string();
            peer.send_record(&record_of(3, &format!(r#"{{"check":{text},{}"#, &body[1..])), &[])?;
            send_segments(peer, &memory, 0, 1)?;
            expect_refused_check(peer, &memory, rule)
        })
    })
}

/// A consumer that supports checks must refuse an invalid one. Others ignore it.
fn expect_refused_check(peer: &mut Peer, memory: &TestMemory, rule: &'static str) -> CaseResult {
    let found = loop {
        break match peer.receive()? {
            Incoming::Message(message, _) => match *message {
                Message::Error(Failure { code: ErrorCode::Protocol, .. }) => {
                    return peer.expect_close::<Message>("H5", "after its error");
                }
                Message::Result(Verdict { check: None, .. }) if !memory.holds(REPLY)? => return skip(NO_CHECKS),
                Message::Received(_) => continue,
                Message::Error(Failure { code, message }) => format!("got `{code}`: {message}"),
                other => format!("got {}", other.name()),
            },
            Incoming::Closed => "the peer closed the connection".to_owned(),
            Incoming::Timeout => "nothing arrived".to_owned(),
        };
    };
    violation(rule, format!("a check that contradicts itself: expected error `protocol`, but {found}"))
}

/// Segments that contradict the offer.
fn invalid_segments() -> impl Iterator<Item = Case> {
    [("all-bytes-in-the-first-of-two-segments", 0), ("segment-before-the-first-byte", 1)].into_iter().map(
        |(name, first)| {
            case(name, "C5", move |context, peer| {
                let size = 2 * GRANULARITY;
                let mut memory = TestMemory::zeros(context, 1)?.with_descriptor(memfd(size, Flaw::None)?);
                enlarge(&mut memory.offer, size);
                (memory.offer.memory.segments, memory.offer.check) = (2, None);
                change_part(&mut memory.offer, |part| part.first = first);
                let request = greet(peer)?;
                send_offer(peer, &memory.offer, &request)?;
                let segments = Message::Segments(Segments { first, sizes: vec![size] });
                peer.send_with(&segments, &[memory.segments[0].0.as_fd()])?;
                peer.expect_error::<Message>("C5", ErrorCode::Protocol, "all bytes in one of two segments")
            })
        },
    )
}

/// Descriptors of memory that differs from the offer.
fn invalid_descriptors() -> impl Iterator<Item = Case> {
    let flaws = [
        ("memory-that-can-shrink", "V2", Flaw::Unsealed),
        ("seals-not-final", "V2", Flaw::SealsNotFinal),
        ("sparse-memory", "V3", Flaw::Sparse),
        ("shorter-memory", "V1", Flaw::Short),
        ("no-memory", "V1", Flaw::NotMemory),
    ];
    flaws.into_iter().map(|(name, rule, flaw)| {
        case(name, rule, move |context, peer| {
            let memory = TestMemory::zeros(context, 1)?.with_descriptor(memfd(GRANULARITY, flaw)?);
            let request = greet(peer)?;
            send_offer(peer, &memory.offer, &request)?;
            send_segments(peer, &memory, 0, 1)?;
            peer.expect_error::<Message>(rule, ErrorCode::Protocol, name)
        })
    })
}

fn enlarge(offer: &mut Offer, mapped_size: u64) {
    offer.memory.mapped_size = mapped_size;
    change_part(offer, |part| part.size = mapped_size);
}

fn change_part(offer: &mut Offer, change: impl FnOnce(&mut Part)) {
    if let Some(part) = &mut offer.part {
        change(part);
    }
}

fn correct(context: &Context<'_>, peer: &mut Peer, segments: u64) -> CaseResult {
    let memory = TestMemory::filled(context, segments, false)?;
    let request = greet(peer)?;
    serve_correct(peer, &memory, &request)?;
    finish(peer, true)
}

fn correct_read_only(peer: &mut Peer, memory: TestMemory) -> CaseResult {
    let request = greet(peer)?;
    if request.access == Some(Access::ReadWrite) {
        return skip("the consumer requests access rw");
    }
    serve_correct(peer, &memory, &request)?;
    finish(peer, true)
}

fn unknown_check(context: &Context<'_>, peer: &mut Peer) -> CaseResult {
    let mut memory = TestMemory::zeros(context, 1)?;
    memory.offer.check = serde_json::from_str(r#"{"of another extension":[1,{"x":null}]}"#).ok();
    let request = greet(peer)?;
    let verdict = serve(peer, &memory, &request)?;
    check(verdict.check.is_none(), "C10", || "answered a check of an unknown extension".to_owned())?;
    check(verdict.verified, "C10", || "reported data as wrong without a check that it supports".to_owned())?;
    finish(peer, true)
}

fn unknown_fields(context: &Context<'_>, peer: &mut Peer) -> CaseResult {
    let memory = TestMemory::zeros(context, 1)?;
    receive_hello(peer)?;
    let own = peer.own_hello(&[]);
    let hello = json!({"of the future": [1], "version": own.version, "pid": own.pid,
        "capabilities": ["of the future"], "backend": own.backend, "timeout_ms": own.timeout_ms});
    peer.send_record(&record(1, &hello), &[])?;
    let request = receive_request(peer)?;
    let mut body = body_of(&for_request(&memory.offer, &request))?;
    body["colour"] = "red".into();
    body["memory"]["taste"] = json!({"of": ["the future"]});
    body["memory"]["device"]["age"] = 7.into();
    body["array"] = serde_json::Value::Null;
    peer.send_record(&record(3, &body), &[])?;
    send_segments(peer, &memory, 0, 1)?;
    match peer.next_message("R5", "received")? {
        (Message::Received(_), _) => Ok(()),
        (other, _) => violation("C7", format!("sent {} instead of received", other.name())),
    }
}

fn wrong_byte(context: &Context<'_>, peer: &mut Peer) -> CaseResult {
    let memory = TestMemory::filled(context, 1, false)?;
    let request = greet(peer)?;
    let range = range(&memory, &request)?;
    let at = range.start + (range.end - range.start) / 2;
    let mut byte = [0];
    memory.shared.copy_out(at, &mut byte)?;
    memory.shared.copy_in(at, &[byte[0] ^ 1])?;
    let verdict = serve(peer, &memory, &request)?;
    let Some(found) = figures(&verdict, &range)? else { return skip(NO_CHECKS) };
    check(!verdict.verified && found.mismatches == 1, "K3", || {
        format!("found {} wrong words instead of 1", found.mismatches)
    })?;
    if let Some(first) = found.first_mismatch {
        let correct = first.index == at / 4 && (first.expected ^ first.found) == 1 << (at % 4 * 8);
        check(correct, "K5", || format!("reported word {} as wrong instead of {}", first.index, at / 4))?;
    }
    finish(peer, false)
}

fn round_trip(context: &Context<'_>, peer: &mut Peer) -> CaseResult {
    let mut memory = TestMemory::filled(context, 1, false)?;
    memory.offer.check = Some(Claim { salt: Some(SALT), reply_salt: Some(REPLY), digest: None }.to_check());
    memory.offer.access = Access::ReadWrite;
    let request = greet(peer)?;
    if request.access == Some(Access::ReadOnly) || request.range.is_some() {
        return skip("the consumer requests access ro, or a range");
    }
    let verdict = serve_correct(peer, &memory, &request)?;
    check(verdict.check.is_none() || memory.holds(REPLY)?, "C10", || {
        "sent its result with a check but wrote no reply".to_owned()
    })?;
    finish(peer, true)
}
