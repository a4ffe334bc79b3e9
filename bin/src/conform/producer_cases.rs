//! Cases for a producer of handoffs. This side is a consumer.

use std::{
    ops::Range,
    os::fd::{AsFd, OwnedFd},
};

use vmmfd::{
    driver::{Access, GRANULARITY},
    error::ErrorCode,
    memory::{Description, Part},
    wire::{Busy, ByteRange, Failure, Hello, Message, Offer, Received, Request, Subscribe, Verdict},
};

use super::{
    Case, CaseResult, Context, case,
    case_end::{check, skip, violation},
    memory::{check_descriptor, verify},
    peer::{Incoming, Peer, check_hello, receive},
    records::{invalid, record},
};
use crate::check::{Figures, figures::Claim, pattern::words};

pub(super) fn cases() -> Vec<Case> {
    let mut cases = correct_consumers();
    cases.extend(early_endings());
    for (name, segments) in [("too-much-received", u64::MAX), ("nothing-received", 0)] {
        cases.push(case(name, "C7", move |_, peer| {
            receive_segments(peer)?;
            let received = Message::Received(Received { segments });
            peer.provoke(&received, "C7", ErrorCode::Protocol, "a wrong number of acknowledged segments")
        }));
    }
    let range = |offset, length| Request { range: Some(ByteRange { offset, length }), ..request() };
    for (name, code, request) in [
        ("empty-range", ErrorCode::Range, range(0, 0)),
        ("range-outside", ErrorCode::Range, range(u64::MAX, u64::MAX)),
        ("unknown-object", ErrorCode::Object, Request { object: "an object of conform".to_owned(), ..request() }),
    ] {
        cases.push(case(name, "C3", move |context, peer| {
            greet(peer)?;
            peer.provoke(&Message::Request(request.clone()), "C3", code, context.name)
        }));
    }
    for (name, rules, message) in [
        ("request-before-hello", "R2 H2", Message::Request(request())),
        ("busy-before-hello", "R2 H4", Message::Busy(Busy {})),
    ] {
        cases.push(case(name, rules, move |_, peer| {
            peer.provoke(&message, "R2", ErrorCode::Protocol, "a first message other than hello")
        }));
    }
    type Misplaced = (&'static str, &'static str, ErrorCode, fn(&Peer) -> Message);
    let misplaced: [Misplaced; 4] = [
        ("second-hello", "H2", ErrorCode::Protocol, |peer| Message::Hello(peer.own_hello(&[]))),
        ("busy-before-request", "H4", ErrorCode::Protocol, |_| Message::Busy(Busy {})),
        ("received-before-request", "R2", ErrorCode::Protocol, |_| Message::Received(Received { segments: 0 })),
        ("subscribe", "C13", ErrorCode::Object, |_| Message::Subscribe(Subscribe { keep: 1 })),
    ];
    for (name, rules, code, message) in misplaced {
        cases.push(case(name, rules, move |context, peer| {
            greet(peer)?;
            peer.provoke(&message(peer), context.rule, code, "a message other than request")
        }));
    }
    cases.extend(contradicting_results());
    for invalid in invalid().unwrap_or_default() {
        cases.push(case(format!("record: {}", invalid.name), invalid.rule(), move |_, peer| {
            greet(peer)?;
            invalid.send::<Message>(peer)
        }));
    }
    cases
}

/// Consumers that follow the protocol.
fn correct_consumers() -> Vec<Case> {
    vec![
        case("handoff", "H2 C4 C5 C6 V1 V2 V3 C11 C12", |_, peer| {
            greet(peer)?;
            hand_over(peer)?;
            peer.shut_down_writing();
            peer.expect_close::<Message>("C12", "after the consumer shut down writing")
        }),
        case("two-requests", "C1 C2", |_, peer| {
            greet(peer)?;
            hand_over(peer)?;
            hand_over(peer)
        }),
        case("pattern", "K7 K1 C11", check_pattern),
        case("mismatch", "C11 K4", |_, peer| {
            greet(peer)?;
            take(peer, request())?;
            conclude(peer, Verdict::unchecked(false)).map(drop)
        }),
        case("range", "C5 C6", range),
        case("unknown-fields", "R5 R6 H2", unknown_fields),
        case("newer-version", "H1", |_, peer| {
            greet_as(peer, Hello { version: u16::MAX, ..peer.own_hello(&[]) })?;
            hand_over(peer)
        }),
        case("busy", "H4", |_, peer| {
            greet(peer)?;
            take(peer, request())?;
            (0..5).try_for_each(|_| peer.send(&Message::Busy(Busy {})))?;
            conclude(peer, Verdict::unchecked(true)).map(drop)
        }),
        case("read-only", "C4", |_, peer| {
            greet(peer)?;
            take(peer, Request { access: Some(Access::ReadOnly), ..request() })?;
            conclude(peer, Verdict::unchecked(true)).map(drop)
        }),
        case("read-write", "C4 C3 M6", read_write),
    ]
}

/// Consumers that stop, or break a rule once.
fn early_endings() -> Vec<Case> {
    vec![
        case("empty-record", "T2", |_, peer| {
            greet(peer)?;
            peer.send_record(b"", &[])?;
            peer.expect_close::<Message>("T2", "after an empty record")
        }),
        case("error", "H5", |_, peer| {
            greet(peer)?;
            peer.send(&Message::Error(Failure { code: ErrorCode::Failed, message: "an error of conform".to_owned() }))?;
            peer.expect_close::<Message>("H5", "after an error")
        }),
        case("idle", "H6", |_, peer| {
            let hello = greet(peer)?;
            peer.expect_timeout(&hello, "a consumer that requests nothing")
        }),
        case("silent-between-requests", "H6", |_, peer| {
            let hello = greet(peer)?;
            hand_over(peer)?;
            peer.expect_timeout(&hello, "a consumer that is silent after its result")
        }),
        case("busy-between-requests", "H4", |context, peer| {
            greet(peer)?;
            hand_over(peer)?;
            peer.provoke(&Message::Busy(Busy {}), context.rule, ErrorCode::Protocol, "busy between two requests")
        }),
        case("subscribe-between-requests", "C13", |context, peer| {
            greet(peer)?;
            hand_over(peer)?;
            let subscribe = Message::Subscribe(Subscribe { keep: 1 });
            peer.provoke(&subscribe, context.rule, ErrorCode::Protocol, "a subscription after a handoff")
        }),
        case("round-trip-without-check", "C11", round_trip_without_check),
        case("other-backend", "C2 H2", |_, peer| {
            greet_as(peer, Hello { backend: "conform".to_owned(), ..peer.own_hello(&[]) })?;
            peer.provoke(&Message::Request(request()), "C2", ErrorCode::Backend, "a request for another backend")
        }),
        case("old-version", "H1", |_, peer| {
            let hello = Message::Hello(Hello { version: 0, ..peer.own_hello(&[]) });
            peer.provoke(&hello, "H1", ErrorCode::Version, "a hello of version 0")
        }),
        case("result-before-received", "C7 R2", |_, peer| {
            receive_segments(peer)?;
            let result = Message::Result(Verdict::unchecked(true));
            peer.provoke(&result, "C7", ErrorCode::Protocol, "a result instead of received")
        }),
    ]
}

/// Results that contradict themselves or the offer. They need a producer with the extension "Pattern and digest".
fn contradicting_results() -> impl Iterator<Item = Case> {
    type Change = fn(&mut Figures, u64);
    let changes: [(&str, &str, bool, Change); 5] = [
        ("right-and-wrong", "K4", true, |figures, _| figures.mismatches = 1),
        ("too-few-words", "K3", true, |figures, words| figures.words = words - 1),
        ("more-wrong-than-words", "K3", false, |figures, words| figures.mismatches = words + 1),
        ("first-of-none", "K5", true, |figures, _| {
            let first = serde_json::from_str(r#"{"index":0,"expected":0,"found":1}"#);
            figures.first_mismatch = first.ok();
        }),
        ("digest-of-none", "K6", true, |figures, _| figures.digest = Some("blake3:00".to_owned())),
    ];
    changes.into_iter().map(|(name, rule, verified, change)| {
        case(name, rule, move |_, peer| {
            greet(peer)?;
            let taken = take(peer, request())?;
            taken.salt()?;
            let words = words(&taken.range);
            let mut figures = Figures { words, ..Figures::default() };
            change(&mut figures, words);
            let result = Message::Result(figures.verdict(verified));
            peer.provoke(&result, rule, ErrorCode::Protocol, "a result that contradicts itself or the offer")
        })
    })
}

pub(super) fn request() -> Request {
    Request { object: "default".to_owned(), access: None, range: None }
}

/// Exchanges `hello`. Returns the producer's.
fn greet(peer: &mut Peer) -> CaseResult<Hello> {
    greet_as(peer, peer.own_hello(&[]))
}

pub(super) fn greet_as(peer: &mut Peer, own: Hello) -> CaseResult<Hello> {
    peer.send(&Message::Hello(own))?;
    match peer.first_message("H2", "hello")? {
        (Message::Hello(hello), _) => check_hello(hello),
        (other, _) => violation("H2", format!("sent {} instead of hello", other.name())),
    }
}

/// The memory that a request returned.
struct Taken {
    offer: Offer,
    segments: Vec<(OwnedFd, u64)>,
    /// The requested bytes.
    range: Range<u64>,
    claim: Claim,
}

impl Taken {
    /// The salt of the pattern. Skips the case if the producer offers none.
    fn salt(&self) -> CaseResult<u32> {
        self.claim.salt.map_or_else(|| skip("the producer offers no pattern to check"), Ok)
    }

    /// Verifies the pattern of a salt in the requested bytes.
    fn verify(&self, context: &Context<'_>, salt: u32) -> CaseResult<crate::check::pattern::Verification> {
        let start = self.offer.part.map_or(0, |part| part.offset);
        Ok(verify(context, &self.segments, start, self.range.clone(), salt)?)
    }
}

fn receive_offer(peer: &mut Peer) -> CaseResult<Offer> {
    Ok(receive!(peer, "C4", "offer", (Message::Offer(offer), _) => *offer))
}

/// Skips the case unless the memory has segments.
fn require_segments(offer: &Offer) -> CaseResult {
    if offer.part.is_some() { Ok(()) } else { skip("the producer offers memory without segments") }
}

/// Requests the object, and receives the first segments without acknowledging them.
fn receive_segments(peer: &mut Peer) -> CaseResult {
    greet(peer)?;
    peer.send(&Message::Request(request()))?;
    require_segments(&receive_offer(peer)?)?;
    peer.next_message("C6", "segments").map(drop)
}

/// Checks the rules about the memory of every offer.
pub(super) fn check_memory(offer: &Offer) -> CaseResult {
    let memory = &offer.memory;
    let (size, mapped) = (memory.size, memory.mapped_size);
    let valid = size > 0 && size <= mapped && mapped < 1 << 47 && mapped.is_multiple_of(GRANULARITY);
    check(valid, "M1", || format!("offered {size} bytes of data in {mapped} bytes of memory"))?;
    if let Err(error) = Description::try_from(memory.clone()) {
        return violation("M2", format!("offered invalid memory: {}", error.in_full()));
    }
    check(!memory.immutable || offer.access == Access::ReadOnly, "M6", || {
        "offered immutable memory with access rw".to_owned()
    })?;
    match offer.array.as_ref().map(|array| array.check(size)) {
        Some(Err(error)) => violation("A1", format!("offered an array outside the memory: {}", error.in_full())),
        _ => Ok(()),
    }
}

/// The offer's part must be valid and cover the range.
pub(super) fn check_part(rule: &'static str, offer: &Offer, range: &Range<u64>) -> CaseResult {
    let Some(part) = offer.part else { return violation(rule, "offered memory with segments but without a part") };
    let memory = &offer.memory;
    let end = part.offset.checked_add(part.size);
    let inside = end.is_some_and(|end| end <= memory.mapped_size);
    let covers = part.offset <= range.start && end.is_some_and(|end| end >= range.end);
    let counted = part.first.checked_add(part.segments).is_some_and(|end| end <= memory.segments);
    let whole = (part.size == memory.mapped_size) == (part.segments == memory.segments);
    check(inside && covers && counted && whole && part.segments > 0, rule, || {
        format!("offered {}, of {} bytes in {} segments", Part::from(part), memory.mapped_size, memory.segments)
    })
}

/// Sends a request, and receives the offer and its segments.
fn take(peer: &mut Peer, request: Request) -> CaseResult<Taken> {
    peer.send(&Message::Request(request.clone()))?;
    let offer = receive_offer(peer)?;
    check(offer.object == request.object, "C4", || {
        format!("offered object `{}`; requested `{}`", offer.object, request.object)
    })?;
    check(request.access.is_none_or(|access| access == offer.access), "C4", || {
        format!("offered access {}; another was requested", offer.access)
    })?;
    check(offer.buffer.is_none(), "C4", || "offered a stream's buffer in a handoff".to_owned())?;
    check_memory(&offer)?;
    let claim = Claim::read(offer.check.as_ref()).and_then(|claim| claim.inspect(offer.access).map(|()| claim));
    let Ok(claim) = claim else { return violation("K1", "offered a check that contradicts itself or the access") };
    require_segments(&offer)?;
    let range = request.range.map_or(0..offer.memory.size, |range| range.offset..range.offset + range.length);
    check_part("C5", &offer, &range)?;
    let segments = take_segments(peer, &offer)?;
    Ok(Taken { offer, segments, range, claim })
}

/// Receives and acknowledges the segments of an offer.
fn take_segments(peer: &mut Peer, offer: &Offer) -> CaseResult<Vec<(OwnedFd, u64)>> {
    let mut taken = Vec::new();
    let Some(part) = offer.part else { return Ok(taken) };
    while (taken.len() as u64) < part.segments {
        let (segments, fds) = receive!(peer, "C6", "segments", (Message::Segments(segments), fds) => (segments, fds));
        check(segments.first == part.first + taken.len() as u64, "C6", || {
            format!("sent segment {} out of order", segments.first)
        })?;
        taken.extend(fds.into_iter().zip(segments.sizes));
        peer.send(&Message::Received(Received { segments: taken.len() as u64 }))?;
    }
    check_segments(offer, &taken)?;
    Ok(taken)
}

/// Checks the received segments of a part.
pub(super) fn check_segments(offer: &Offer, taken: &[(OwnedFd, u64)]) -> CaseResult {
    let Some(part) = offer.part else { return Ok(()) };
    let sum = taken.iter().map(|(_, size)| size).sum::<u64>();
    check(taken.len() as u64 == part.segments && sum == part.size, "C6", || {
        let (count, part_size) = (taken.len(), part.size);
        format!("sent {count} segments of {sum} bytes; offered {} of {part_size}", part.segments)
    })?;
    taken.iter().try_for_each(|(fd, size)| check_descriptor(fd.as_fd(), *size, &offer.memory))
}

/// Sends the result and receives the producer's.
fn conclude(peer: &mut Peer, verdict: Verdict) -> CaseResult<Verdict> {
    let verified = verdict.verified;
    peer.send(&Message::Result(verdict))?;
    let answer = receive!(peer, "C11", "result", (Message::Result(answer), _) => answer);
    check(verified || !answer.verified, "C11", || {
        "answered verified: true although the consumer reported a mismatch".to_owned()
    })?;
    Ok(answer)
}

/// As [`conclude`]; the producer must confirm the positive result.
fn confirm(peer: &mut Peer, verdict: Verdict) -> CaseResult {
    let answer = conclude(peer, verdict)?;
    check(answer.verified, "C11", || "answered verified: false although nothing was wrong".to_owned())
}

/// A complete handoff without a check.
fn hand_over(peer: &mut Peer) -> CaseResult {
    take(peer, request())?;
    confirm(peer, Verdict::unchecked(true))
}

fn check_pattern(context: &Context<'_>, peer: &mut Peer) -> CaseResult {
    greet(peer)?;
    let taken = take(peer, Request { access: Some(Access::ReadOnly), ..request() })?;
    let salt = taken.salt()?;
    let found = taken.verify(context, salt)?;
    if let Some(first) = found.first {
        let (wrong, index) = (found.mismatches, first.index);
        return violation(
            "K7",
            format!("{wrong} words differ from the pattern of salt {salt:#x}, the first at {index}"),
        );
    }
    confirm(peer, Figures::from(&found).verdict(true))
}

fn range(context: &Context<'_>, peer: &mut Peer) -> CaseResult {
    greet(peer)?;
    let all = take(peer, request())?.offer.memory.size;
    conclude(peer, Verdict::unchecked(true))?;
    // From inside the first word to inside the last one, and the last byte.
    for (offset, length) in [(all.min(2) - 1, all - all.min(2) + 1), (all - 1, 1)] {
        let taken = take(peer, Request { range: Some(ByteRange { offset, length }), ..request() })?;
        if let Some(salt) = taken.claim.salt {
            check(taken.verify(context, salt)?.passed(), "C5", || {
                "the segments of a range do not hold the object's bytes at their offset".to_owned()
            })?;
        }
        // Without a check no reply is due.
        conclude(peer, Verdict::unchecked(true))?;
    }
    Ok(())
}

fn read_write(_: &Context<'_>, peer: &mut Peer) -> CaseResult {
    greet(peer)?;
    peer.send(&Message::Request(Request { access: Some(Access::ReadWrite), ..request() }))?;
    match peer.receive()? {
        Incoming::Message(message, _) => match *message {
            Message::Error(Failure { code: ErrorCode::Access, .. }) => Ok(()),
            Message::Error(Failure { code, message }) => {
                violation("C3", format!("refused access rw with `{code}` instead of `access`: {message}"))
            }
            Message::Offer(offer) if offer.access == Access::ReadWrite => check_memory(&offer),
            Message::Offer(offer) => violation("C4", format!("offered access {}; requested rw", offer.access)),
            other => violation("C4", format!("sent {} instead of offer", other.name())),
        },
        Incoming::Closed => violation("C3", "closed the connection after a request for rw"),
        Incoming::Timeout => violation("H3", "sent neither offer nor `busy`"),
    }
}

fn unknown_fields(_: &Context<'_>, peer: &mut Peer) -> CaseResult {
    let own = peer.own_hello(&[]);
    let hello = serde_json::json!({"of the future": [1, {"x": null}], "version": own.version, "pid": own.pid,
        "capabilities": ["", "of the future"], "backend": own.backend, "timeout_ms": own.timeout_ms});
    peer.send_record(&record(1, &hello), &[])?;
    match peer.first_message("R5", "hello")? {
        (Message::Hello(_), _) => {}
        (other, _) => return violation("H2", format!("sent {} instead of hello", other.name())),
    }
    peer.send_record(&record(2, &serde_json::json!({"object": "default", "colour": "red", "access": null})), &[])?;
    match peer.next_message("R5", "offer")? {
        (Message::Offer(_), _) => Ok(()),
        (other, _) => violation("C4", format!("sent {} instead of offer", other.name())),
    }
}

/// A consumer that sends no check has written no reply.
fn round_trip_without_check(_: &Context<'_>, peer: &mut Peer) -> CaseResult {
    greet(peer)?;
    if take(peer, request())?.claim.reply_salt.is_none() {
        return skip("the producer requests no reply");
    }
    let answer = conclude(peer, Verdict::unchecked(true))?;
    check(answer.verified && answer.check.is_none(), "C11", || {
        format!("answered verified: {} and a check although no reply was written", answer.verified)
    })
}
