//! This side is a consumer: what a producer of a handoff must do.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use vmmfd::{
    driver::{Access, GRANULARITY},
    error::ErrorCode,
    memory::Description,
    wire::{Busy, ByteRange, Failure, Hello, Message, Offer, Received, Request, Subscribe, Verdict},
};

use super::{
    Case, Scene,
    fault::Fault,
    memory::{inspect, verify},
    peer::{Heard, Peer, checked, gives_up, impatient},
    records::{about, record, unreadable},
};
use crate::check::{Figures, figures::Claim, pattern::words};

pub(super) fn cases() -> Vec<Case> {
    let mut cases = vec![
        Case::new("handoff", &["H2", "C4", "C5", "C6", "V1", "V2", "V3", "C11", "C12"], handoff),
        Case::new("two-requests", &["C1", "C2"], two_requests),
        Case::new("pattern", &["K7", "K1", "C11"], pattern_is_there),
        Case::new("mismatch", &["C11", "K4"], mismatch),
        Case::new("range", &["C5", "C6"], range),
        Case::new("unknown-fields", &["R5", "R6", "H2"], unknown_fields),
        Case::new("newer-version", &["H1"], newer_version),
        Case::new("busy", &["H4"], busy),
        Case::new("read-only", &["C4"], |scene, peer| access(scene, peer, Access::ReadOnly)),
        Case::new("read-write", &["C4", "C3", "M6"], |scene, peer| access(scene, peer, Access::ReadWrite)),
        Case::new("empty-record", &["T2"], empty_record),
        Case::new("error", &["H5"], error_ends_it),
        Case::new("idle", &["H6"], idle),
        Case::new("silent-between-requests", &["H6"], silent_between_requests),
        Case::new("busy-between-requests", &["H4"], |_, peer| {
            between_requests(peer, &Message::Busy(Busy {}), "H4", "a consumer that asks for nothing is busy")
        }),
        Case::new("subscribe-between-requests", &["C13"], |_, peer| {
            between_requests(
                peer,
                &Message::Subscribe(Subscribe { keep: 1 }),
                "C13",
                "a subscription follows a handoff",
            )
        }),
        Case::new("round-trip-without-check", &["C11"], round_trip_without_check),
    ];
    let range = |offset, length| Request { range: Some(ByteRange { offset, length }), ..request() };
    refused_requests(&mut cases, "empty-range", ErrorCode::Range, range(0, 0));
    refused_requests(&mut cases, "range-outside", ErrorCode::Range, range(u64::MAX, u64::MAX));
    let object = "an object that conform made up".to_owned();
    refused_requests(&mut cases, "unknown-object", ErrorCode::Object, Request { object, ..request() });
    cases.push(Case::new("other-backend", &["C2", "H2"], |_, peer| {
        greet(peer, Hello { backend: "conform".to_owned(), ..peer.own_hello(&[]) })?;
        peer.send(&Message::Request(request()), &[])?;
        peer.ends_with("C2", &[ErrorCode::Backend], "a consumer of another backend asks")
    }));
    cases.push(Case::new("old-version", &["H1"], |_, peer| {
        peer.send(&Message::Hello(Hello { version: 0, ..peer.own_hello(&[]) }), &[])?;
        peer.ends_with("H1", &[ErrorCode::Version], "a hello of version 0")
    }));
    misplaced(&mut cases);
    for (name, acknowledged) in [("too-much-received", u64::MAX), ("nothing-received", 0)] {
        cases.push(Case::new(name, &["C7"], move |_, peer| {
            greet(peer, peer.own_hello(&[]))?;
            peer.send(&Message::Request(request()), &[])?;
            only_vmm(&offered(peer)?)?;
            peer.next("C6", "segments")?;
            peer.send(&Message::Received(Received { segments: acknowledged }), &[])?;
            peer.ends_with("C7", &[ErrorCode::Protocol], "another number of segments is acknowledged")
        }));
    }
    cases.push(Case::new("result-before-received", &["C7", "R2"], |_, peer| {
        greet(peer, peer.own_hello(&[]))?;
        peer.send(&Message::Request(request()), &[])?;
        only_vmm(&offered(peer)?)?;
        peer.next("C6", "segments")?;
        peer.send(&Message::Result(Verdict::unchecked(true)), &[])?;
        peer.ends_with("C7", &[ErrorCode::Protocol], "a result comes where received belongs")
    }));
    contradictions(&mut cases);
    for bad in unreadable().unwrap_or_default() {
        let name = format!("record: {}", bad.name);
        cases.push(Case::new(name, about(bad.rule), move |_, peer| {
            greet(peer, peer.own_hello(&[]))?;
            bad.send(peer)
        }));
    }
    cases
}

/// Messages that come where another one belongs.
fn misplaced(cases: &mut Vec<Case>) {
    let early = |name: &str, rules, message: fn() -> Message| {
        Case::new(name, rules, move |_, peer| {
            peer.send(&message(), &[])?;
            peer.ends_with("R2", &[ErrorCode::Protocol], "what is no hello comes first")
        })
    };
    cases.push(early("request-before-hello", &["R2", "H2"], || Message::Request(request())));
    cases.push(early("busy-before-hello", &["R2", "H4"], || Message::Busy(Busy {})));
    let greeted = |name: &str, rules: &'static [&'static str], code: ErrorCode, message: fn(&Peer) -> Message| {
        Case::new(name, rules, move |_, peer| {
            greet(peer, peer.own_hello(&[]))?;
            peer.send(&message(peer), &[])?;
            peer.ends_with(rules[0], &[code], "it comes where a request belongs")
        })
    };
    cases.push(greeted("second-hello", &["H2"], ErrorCode::Protocol, |peer| Message::Hello(peer.own_hello(&[]))));
    cases.push(greeted("busy-before-request", &["H4"], ErrorCode::Protocol, |_| Message::Busy(Busy {})));
    cases.push(greeted("received-before-request", &["R2"], ErrorCode::Protocol, |_| {
        Message::Received(Received { segments: 0 })
    }));
    cases.push(greeted("subscribe", &["C13"], ErrorCode::Object, |_| Message::Subscribe(Subscribe { keep: 1 })));
}

fn refused_requests(cases: &mut Vec<Case>, name: &str, code: ErrorCode, request: Request) {
    cases.push(Case::new(name, &["C3"], move |_, peer| {
        greet(peer, peer.own_hello(&[]))?;
        peer.send(&Message::Request(request.clone()), &[])?;
        peer.ends_with("C3", &[code], "a request that can't be served")
    }));
}

/// Results that contradict themselves or the offer, of a producer that has the extension.
fn contradictions(cases: &mut Vec<Case>) {
    type Change = fn(&mut Figures, u64);
    let changes: [(&str, &'static [&'static str], bool, Change); 5] = [
        ("right-and-wrong", &["K4"], true, |figures, _| figures.mismatches = 1),
        ("too-few-words", &["K3"], true, |figures, words| figures.words = words - 1),
        ("more-wrong-than-words", &["K3"], false, |figures, words| figures.mismatches = words + 1),
        ("first-of-none", &["K5"], true, |figures, _| {
            let first = serde_json::from_str(r#"{"index":0,"expected":0,"found":1}"#);
            figures.first_mismatch = first.ok();
        }),
        ("digest-of-none", &["K6"], true, |figures, _| figures.digest = Some("blake3:00".to_owned())),
    ];
    for (name, rules, verified, change) in changes {
        cases.push(Case::new(name, rules, move |_, peer| {
            greet(peer, peer.own_hello(&[]))?;
            let taken = take(peer, request())?;
            if taken.claim.salt.is_none() {
                return Fault::left_out("the producer offers no pattern to check");
            }
            let mut figures = Figures { words: taken.words(), ..Figures::default() };
            change(&mut figures, taken.words());
            peer.send(&Message::Result(figures.verdict(verified)), &[])?;
            peer.ends_with(rules[0], &[ErrorCode::Protocol], "a result that contradicts itself or the offer")
        }));
    }
}

pub(super) fn request() -> Request {
    Request { object: "default".to_owned(), access: None, range: None }
}

/// Both say hello. Returns the other end's.
pub(super) fn greet(peer: &mut Peer, own: Hello) -> Result<Hello, Fault> {
    peer.send(&Message::Hello(own), &[])?;
    let heard = peer.hear_all()?;
    match peer.must(heard, "H2", "hello")? {
        (Message::Hello(hello), _) => checked(hello),
        (other, _) => Fault::broken("H2", format!("answered hello with {}", other.name())),
    }
}

/// What a request brought.
struct Taken {
    offer: Offer,
    segments: Vec<(OwnedFd, u64)>,
    /// The bytes that were asked for.
    range: std::ops::Range<u64>,
    claim: Claim,
}

impl Taken {
    fn words(&self) -> u64 {
        words(&self.range)
    }

    /// Which byte of the object the segments begin with.
    fn start(&self) -> u64 {
        self.offer.part.map_or(0, |part| part.offset)
    }
}

fn offered(peer: &mut Peer) -> Result<Offer, Fault> {
    match peer.next("C4", "offer")? {
        (Message::Offer(offer), _) => Ok(*offer),
        (other, _) => Fault::broken("C4", format!("answered a request with {}", other.name())),
    }
}

fn only_vmm(offer: &Offer) -> Result<(), Fault> {
    match offer.part {
        Some(_) => Ok(()),
        None => Fault::left_out("the producer offers no memory of segments"),
    }
}

/// What must be so of the memory of every offer.
pub(super) fn check_memory(offer: &Offer) -> Result<(), Fault> {
    let memory = &offer.memory;
    let (size, mapped) = (memory.size, memory.mapped_size);
    if size == 0 || size > mapped || mapped >= 1 << 47 || !mapped.is_multiple_of(GRANULARITY) {
        return Fault::broken("M1", format!("offered {size} bytes of data in {mapped} bytes of memory"));
    }
    if let Err(error) = Description::try_from(memory.clone()) {
        return Fault::broken("M2", format!("offered memory that is none: {}", error.in_full()));
    }
    if memory.immutable && offer.access == Access::ReadWrite {
        return Fault::broken("M6", "offered immutable memory with rw");
    }
    match offer.array.as_ref().map(|array| array.check(size)) {
        Some(Err(error)) => Fault::broken("A1", format!("offered an array that is not inside: {}", error.in_full())),
        _ => Ok(()),
    }
}

/// The segments' part must be possible, and cover a range.
pub(super) fn check_part(rule: &'static str, offer: &Offer, range: &std::ops::Range<u64>) -> Result<(), Fault> {
    let Some(part) = offer.part else { return Fault::broken(rule, "offered memory of segments without a part") };
    let memory = &offer.memory;
    let end = part.offset.checked_add(part.size);
    let inside = end.is_some_and(|end| end <= memory.mapped_size);
    let covers = part.offset <= range.start && end.is_some_and(|end| end >= range.end);
    let counted = part.first.checked_add(part.segments).is_some_and(|end| end <= memory.segments);
    let whole = (part.size == memory.mapped_size) == (part.segments == memory.segments);
    if inside && covers && counted && whole && part.segments > 0 {
        return Ok(());
    }
    let part = vmmfd::memory::Part::from(part);
    Fault::broken(rule, format!("offered {part}, of {} bytes in {} segments", memory.mapped_size, memory.segments))
}

/// Asks, and takes all that follows.
fn take(peer: &mut Peer, request: Request) -> Result<Taken, Fault> {
    peer.send(&Message::Request(request.clone()), &[])?;
    let offer = offered(peer)?;
    if offer.object != request.object {
        return Fault::broken(
            "C4",
            format!("offered object `{}` where `{}` was asked for", offer.object, request.object),
        );
    }
    if request.access.is_some_and(|access| access != offer.access) {
        return Fault::broken("C4", format!("offered access {} where another was asked for", offer.access));
    }
    if offer.buffer.is_some() {
        return Fault::broken("C4", "offered a stream's buffer in a handoff");
    }
    check_memory(&offer)?;
    let claim = Claim::read(offer.check.as_ref()).and_then(|claim| claim.inspect(offer.access).map(|()| claim));
    let Ok(claim) = claim else { return Fault::broken("K1", "offered a check that contradicts itself or the access") };
    only_vmm(&offer)?;
    let range = request.range.map_or(0..offer.memory.size, |range| range.offset..range.offset + range.length);
    check_part("C5", &offer, &range)?;
    let mut taken = Taken { offer, segments: Vec::new(), range, claim };
    take_segments(peer, &taken.offer, &mut taken.segments)?;
    Ok(taken)
}

/// Takes the segments of an offer that have not come yet, and acknowledges each record of them.
pub(super) fn take_segments(peer: &mut Peer, offer: &Offer, taken: &mut Vec<(OwnedFd, u64)>) -> Result<(), Fault> {
    let Some(part) = offer.part else { return Ok(()) };
    while (taken.len() as u64) < part.segments {
        let (segments, fds) = match peer.next("C6", "segments")? {
            (Message::Segments(segments), fds) => (segments, fds),
            (other, _) => return Fault::broken("C6", format!("sent {} where segments belong", other.name())),
        };
        if segments.first != part.first + taken.len() as u64 {
            return Fault::broken("C6", format!("sent segment {} out of its order", segments.first));
        }
        taken.extend(fds.into_iter().zip(segments.sizes));
        peer.send(&Message::Received(Received { segments: taken.len() as u64 }), &[])?;
    }
    check_segments(offer, taken)
}

/// All segments of a part, which have come.
pub(super) fn check_segments(offer: &Offer, taken: &[(OwnedFd, u64)]) -> Result<(), Fault> {
    let Some(part) = offer.part else { return Ok(()) };
    let sum = taken.iter().map(|(_, size)| size).sum::<u64>();
    if taken.len() as u64 != part.segments || sum != part.size {
        let found = format!(
            "sent {} segments of {sum} bytes where {} of {} were offered",
            taken.len(),
            part.segments,
            part.size
        );
        return Fault::broken("C6", found);
    }
    taken.iter().try_for_each(|(fd, size)| inspect(fd.as_fd(), *size, &offer.memory))
}

/// Reports, and takes the answer.
fn conclude(peer: &mut Peer, verdict: Verdict) -> Result<Verdict, Fault> {
    let verified = verdict.verified;
    peer.send(&Message::Result(verdict), &[])?;
    match peer.next("C11", "result")? {
        (Message::Result(answer), _) if verified || !answer.verified => Ok(answer),
        (Message::Result(_), _) => {
            Fault::broken("C11", "answered verified: true where the consumer found something wrong")
        }
        (other, _) => Fault::broken("C11", format!("answered a result with {}", other.name())),
    }
}

/// A request without any check, to its end.
fn one(peer: &mut Peer) -> Result<(), Fault> {
    take(peer, request())?;
    match conclude(peer, Verdict::unchecked(true))? {
        Verdict { verified: true, .. } => Ok(()),
        _ => Fault::broken("C11", "answered verified: false where nothing was checked and nothing found wrong"),
    }
}

fn handoff(_: &Scene<'_>, peer: &mut Peer) -> Result<(), Fault> {
    greet(peer, peer.own_hello(&[]))?;
    one(peer)?;
    peer.shut_down_writing();
    peer.leaves("C12", "after the consumer had shut down writing")
}

fn two_requests(_: &Scene<'_>, peer: &mut Peer) -> Result<(), Fault> {
    greet(peer, peer.own_hello(&[]))?;
    one(peer)?;
    one(peer)
}

fn pattern_is_there(scene: &Scene<'_>, peer: &mut Peer) -> Result<(), Fault> {
    greet(peer, peer.own_hello(&[]))?;
    let taken = take(peer, Request { access: Some(Access::ReadOnly), ..request() })?;
    let Some(salt) = taken.claim.salt else { return Fault::left_out("the producer offers no pattern to check") };
    let found = verify(scene, &taken.segments, taken.start(), taken.range.clone(), salt).map_err(Fault::Failed)?;
    if let Some(first) = found.first {
        return Fault::broken(
            "K7",
            format!("the pattern of salt {salt:#x} has {} wrong words, the first at {}", found.mismatches, first.index),
        );
    }
    match conclude(peer, Figures::from(&found).verdict(true))? {
        Verdict { verified: true, .. } => Ok(()),
        _ => Fault::broken("C11", "answered verified: false where the consumer found all right"),
    }
}

fn mismatch(_: &Scene<'_>, peer: &mut Peer) -> Result<(), Fault> {
    greet(peer, peer.own_hello(&[]))?;
    take(peer, request())?;
    conclude(peer, Verdict::unchecked(false)).map(drop)
}

fn range(scene: &Scene<'_>, peer: &mut Peer) -> Result<(), Fault> {
    greet(peer, peer.own_hello(&[]))?;
    let all = take(peer, request())?.offer.memory.size;
    conclude(peer, Verdict::unchecked(true))?;
    // From inside the first word to inside the last, and the very last byte.
    for (offset, length) in [(all.min(2) - 1, all - all.min(2) + 1), (all - 1, 1)] {
        let taken = take(peer, Request { range: Some(ByteRange { offset, length }), ..request() })?;
        let Some(salt) = taken.claim.salt else {
            conclude(peer, Verdict::unchecked(true))?;
            continue;
        };
        let found = verify(scene, &taken.segments, taken.start(), taken.range.clone(), salt).map_err(Fault::Failed)?;
        if !found.passed() {
            return Fault::broken("C5", "the segments of a range do not hold the object's bytes at their place");
        }
        // A reply is not written where this side checks nothing.
        conclude(peer, Verdict::unchecked(true))?;
    }
    Ok(())
}

fn access(_: &Scene<'_>, peer: &mut Peer, access: Access) -> Result<(), Fault> {
    greet(peer, peer.own_hello(&[]))?;
    let asked = Request { access: Some(access), ..request() };
    if access == Access::ReadOnly {
        take(peer, asked)?;
        return conclude(peer, Verdict::unchecked(true)).map(drop);
    }
    peer.send(&Message::Request(asked.clone()), &[])?;
    match peer.hear()? {
        Heard::Message(message, _) => match *message {
            Message::Error(Failure { code: ErrorCode::Access, .. }) => Ok(()),
            Message::Error(Failure { code, message }) => {
                Fault::broken("C3", format!("refused rw with `{code}` where `access` belongs: {message}"))
            }
            Message::Offer(offer) if offer.access == access => check_memory(&offer),
            Message::Offer(offer) => Fault::broken("C4", format!("offered {} where rw was asked for", offer.access)),
            other => Fault::broken("C4", format!("answered a request with {}", other.name())),
        },
        Heard::End => Fault::broken("C3", "hung up where rw was asked for"),
        Heard::Silence => Fault::broken("H3", "sent neither offer nor busy"),
    }
}

fn unknown_fields(_: &Scene<'_>, peer: &mut Peer) -> Result<(), Fault> {
    let own = peer.own_hello(&[]);
    let capabilities = ["", "of the future"];
    let hello = serde_json::json!({"of the future": [1, {"x": null}], "version": own.version, "pid": own.pid,
        "capabilities": capabilities, "backend": own.backend, "timeout_ms": own.timeout_ms});
    peer.send_record(&record(1, &hello), &[])?;
    let heard = peer.hear_all()?;
    match peer.must(heard, "R5", "hello")? {
        (Message::Hello(_), _) => {}
        (other, _) => return Fault::broken("H2", format!("answered hello with {}", other.name())),
    }
    peer.send_record(&record(2, &serde_json::json!({"object": "default", "colour": "red", "access": null})), &[])?;
    match peer.next("R5", "offer")? {
        (Message::Offer(_), _) => Ok(()),
        (other, _) => Fault::broken("C4", format!("answered a request with {}", other.name())),
    }
}

fn newer_version(_: &Scene<'_>, peer: &mut Peer) -> Result<(), Fault> {
    greet(peer, Hello { version: u16::MAX, ..peer.own_hello(&[]) })?;
    one(peer)
}

fn busy(_: &Scene<'_>, peer: &mut Peer) -> Result<(), Fault> {
    greet(peer, peer.own_hello(&[]))?;
    take(peer, request())?;
    (0..5).try_for_each(|_| peer.send(&Message::Busy(Busy {}), &[]))?;
    conclude(peer, Verdict::unchecked(true)).map(drop)
}

fn empty_record(_: &Scene<'_>, peer: &mut Peer) -> Result<(), Fault> {
    greet(peer, peer.own_hello(&[]))?;
    peer.send_record(b"", &[] as &[BorrowedFd<'_>])?;
    peer.leaves("T2", "after an empty record")
}

fn error_ends_it(_: &Scene<'_>, peer: &mut Peer) -> Result<(), Fault> {
    greet(peer, peer.own_hello(&[]))?;
    let message = "conform tries an error".to_owned();
    peer.send(&Message::Error(Failure { code: ErrorCode::Failed, message }), &[])?;
    peer.leaves("H5", "after an error")
}

fn idle(_: &Scene<'_>, peer: &mut Peer) -> Result<(), Fault> {
    let hello = greet(peer, peer.own_hello(&[]))?;
    impatient(&hello)?;
    gives_up(peer, &hello, "a consumer asks for nothing")
}

fn silent_between_requests(_: &Scene<'_>, peer: &mut Peer) -> Result<(), Fault> {
    let hello = greet(peer, peer.own_hello(&[]))?;
    impatient(&hello)?;
    one(peer)?;
    gives_up(peer, &hello, "a consumer is silent after its result")
}

/// What may not come where another request, or the end, belongs.
fn between_requests(peer: &mut Peer, message: &Message, rule: &'static str, fault: &str) -> Result<(), Fault> {
    greet(peer, peer.own_hello(&[]))?;
    one(peer)?;
    peer.send(message, &[])?;
    peer.ends_with(rule, &[ErrorCode::Protocol], fault)
}

/// A consumer that sends no check has written no reply.
fn round_trip_without_check(_: &Scene<'_>, peer: &mut Peer) -> Result<(), Fault> {
    greet(peer, peer.own_hello(&[]))?;
    if take(peer, request())?.claim.reply_salt.is_none() {
        return Fault::left_out("the producer asks for no reply");
    }
    match conclude(peer, Verdict::unchecked(true))? {
        Verdict { verified: true, check: None, .. } => Ok(()),
        Verdict { verified, .. } => {
            Fault::broken("C11", format!("answered verified: {verified} and a check where no reply was written"))
        }
    }
}
