//! The steps of this side as a producer.

use std::ops::Range;

use vmmfd::wire::{ByteRange, HEADER_LENGTH, Hello, Message, Offer, Request, Segments, Verdict};

use super::{
    CaseEnd, CaseResult,
    case_end::{check, skip, violation},
    memory::TestMemory,
    peer::{Incoming, Peer, check_hello, receive},
};
use crate::check::{Figures, pattern::words};

/// Receives the consumer's `hello` without answering it.
pub(super) fn receive_hello(peer: &mut Peer) -> CaseResult<Hello> {
    match peer.first_message("H2", "hello")? {
        (Message::Hello(hello), _) => check_hello(hello),
        (other, _) => violation("H2", format!("sent {} instead of hello", other.name())),
    }
}

/// Exchanges `hello` and receives the request.
pub(super) fn greet(peer: &mut Peer) -> CaseResult<Request> {
    receive_hello(peer)?;
    peer.send(&Message::Hello(peer.own_hello(&[])))?;
    receive_request(peer)
}

pub(super) fn receive_request(peer: &mut Peer) -> CaseResult<Request> {
    match peer.first_message("C1", "request")? {
        (Message::Request(request), _) => Ok(request),
        (Message::Busy(_), _) => violation("H4", "sent busy before its first request"),
        (other, _) => violation("C1", format!("sent {} instead of request", other.name())),
    }
}

/// The offer with the requested access.
pub(super) fn for_request(offer: &Offer, request: &Request) -> Offer {
    Offer { access: request.access.unwrap_or(offer.access), ..offer.clone() }
}

pub(super) fn send_offer(peer: &Peer, offer: &Offer, request: &Request) -> CaseResult {
    peer.send(&Message::Offer(Box::new(for_request(offer, request))))
}

/// The offer's body as JSON, for a case to modify.
pub(super) fn body_of(offer: &Offer) -> CaseResult<serde_json::Value> {
    let record = Message::Offer(Box::new(offer.clone())).encode().map_err(|error| CaseEnd::Internal(error.into()))?;
    Ok(serde_json::from_slice(&record[HEADER_LENGTH..]).unwrap_or_default())
}

/// Sends `count` segments from index `first`.
pub(super) fn send_segments(peer: &Peer, memory: &TestMemory, first: usize, count: usize) -> CaseResult {
    let (sizes, fds) = memory.descriptors(first..first + count);
    peer.send_with(&Message::Segments(Segments { first: first as u64, sizes }), &fds)
}

/// The requested bytes.
pub(super) fn range(memory: &TestMemory, request: &Request) -> CaseResult<Range<u64>> {
    let size = memory.offer.memory.size;
    match request.range {
        None => Ok(0..size),
        Some(ByteRange { offset, length })
            if length > 0 && offset.checked_add(length).is_some_and(|end| end <= size) =>
        {
            Ok(offset..offset + length)
        }
        Some(_) => skip(format!("the consumer requests a range outside {size} bytes")),
    }
}

/// Serves a request up to the consumer's result. Sends all segments, whatever range was requested: one record with the first
/// segment, then one with the rest.
pub(super) fn serve(peer: &mut Peer, memory: &TestMemory, request: &Request) -> CaseResult<Verdict> {
    range(memory, request)?;
    send_offer(peer, &memory.offer, request)?;
    let all = memory.segments.len();
    let mut sent = 0;
    while sent < all {
        let count = if sent == 0 { 1 } else { all - sent };
        send_segments(peer, memory, sent, count)?;
        sent += count;
        let received = receive!(peer, "C7", "received", (Message::Received(received), _) => received.segments);
        check(received == sent as u64, "C7", || format!("acknowledged {received} segments instead of {sent}"))?;
    }
    Ok(receive!(peer, "C10", "result", (Message::Result(verdict), _) => verdict))
}

/// Checks the figures of a result. `None` if the consumer does not support the extension.
pub(super) fn figures(verdict: &Verdict, range: &Range<u64>) -> CaseResult<Option<Figures>> {
    let Ok(figures) = Figures::read(verdict.check.as_ref()) else { return violation("K3", "sent an invalid check") };
    let Some(found) = figures else { return Ok(None) };
    let (words, mismatches) = (words(range), found.mismatches);
    check(found.words == words && mismatches <= words, "K3", || {
        format!("checked {} words of {words}, {mismatches} wrong", found.words)
    })?;
    check(verdict.verified == (mismatches == 0), "K4", || {
        format!("sent verified: {} with {mismatches} wrong words", verdict.verified)
    })?;
    if found.first_mismatch.is_some_and(|first| mismatches == 0 || first.expected == first.found) {
        return violation("K5", "sent a first mismatch that is not a mismatch");
    }
    check(found.digest.is_none(), "K6", || "sent a digest; none was offered".to_owned())?;
    Ok(Some(found))
}

/// Serves a request for correct data, and expects a positive result.
pub(super) fn serve_correct(peer: &mut Peer, memory: &TestMemory, request: &Request) -> CaseResult<Verdict> {
    let verdict = serve(peer, memory, request)?;
    figures(&verdict, &range(memory, request)?)?;
    check(verdict.verified, "C10", || "reported correct data as wrong".to_owned())?;
    Ok(verdict)
}

/// Answers the result. The consumer must then close or request again.
pub(super) fn finish(peer: &mut Peer, verified: bool) -> CaseResult {
    peer.send(&Message::Result(Verdict::unchecked(verified)))?;
    match peer.receive::<Message>()? {
        Incoming::Closed => Ok(()),
        Incoming::Message(message, _) if matches!(*message, Message::Request(_)) => Ok(()),
        Incoming::Message(message, _) => violation("C12", format!("sent {} after the last result", message.name())),
        Incoming::Timeout => violation("C12", "neither requested again nor shut down writing"),
    }
}
