//! The steps of this side as a producer: what each case of a consumer is made of.

use std::{
    ops::Range,
    os::fd::{AsFd, BorrowedFd},
};

use vmmfd::wire::{ByteRange, HEADER_LENGTH, Hello, Message, Offer, Request, Segments, Verdict};

use super::{
    fault::Fault,
    memory::Lending,
    peer::{Heard, Peer, checked},
};
use crate::check::{Figures, pattern::words};

/// The consumer's hello, without an answer.
pub(super) fn heard_hello(peer: &mut Peer) -> Result<Hello, Fault> {
    let heard = peer.hear_all()?;
    match peer.must(heard, "H2", "hello")? {
        (Message::Hello(hello), _) => checked(hello),
        (other, _) => Fault::broken("H2", format!("began with {}", other.name())),
    }
}

/// Both say hello, and the consumer asks.
pub(super) fn greet(peer: &mut Peer) -> Result<Request, Fault> {
    heard_hello(peer)?;
    peer.send(&Message::Hello(peer.own_hello(&[])), &[])?;
    asked(peer)
}

pub(super) fn asked(peer: &mut Peer) -> Result<Request, Fault> {
    let heard = peer.hear_all()?;
    match peer.must(heard, "C1", "request")? {
        (Message::Request(request), _) => Ok(request),
        (Message::Busy(_), _) => Fault::broken("H4", "sent busy before its first request"),
        (other, _) => Fault::broken("C1", format!("sent {} where a request belongs", other.name())),
    }
}

/// An offer, with the access that was asked for.
pub(super) fn for_request(offer: &Offer, request: &Request) -> Offer {
    Offer { access: request.access.unwrap_or(offer.access), ..offer.clone() }
}

pub(super) fn offer(peer: &Peer, offer: &Offer, request: &Request) -> Result<(), Fault> {
    peer.send(&Message::Offer(Box::new(for_request(offer, request))), &[])
}

pub(super) fn body_of(offer: &Offer) -> Result<serde_json::Value, Fault> {
    let record = Message::Offer(Box::new(offer.clone())).encode().map_err(|error| Fault::Failed(error.into()))?;
    Ok(serde_json::from_slice(&record[HEADER_LENGTH..]).unwrap_or_default())
}

/// Sends some of the segments.
pub(super) fn segments(peer: &Peer, lending: &Lending, first: usize, count: usize) -> Result<(), Fault> {
    let some = &lending.segments[first..first + count];
    let sizes = some.iter().map(|(_, size)| *size).collect();
    let fds: Vec<BorrowedFd<'_>> = some.iter().map(|(fd, _)| fd.as_fd()).collect();
    peer.send(&Message::Segments(Segments { first: first as u64, sizes }), &fds)
}

/// The bytes that were asked for, of what this side has.
pub(super) fn range(lending: &Lending, request: &Request) -> Result<Range<u64>, Fault> {
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
pub(super) fn lend(peer: &mut Peer, lending: &Lending, request: &Request) -> Result<Verdict, Fault> {
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
pub(super) fn figures(verdict: &Verdict, range: &Range<u64>) -> Result<Option<Figures>, Fault> {
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
pub(super) fn right(verdict: &Verdict, lending: &Lending, request: &Request) -> Result<(), Fault> {
    figures(verdict, &range(lending, request)?)?;
    if verdict.verified { Ok(()) } else { Fault::broken("C10", "found something wrong with data that is right") }
}

pub(super) fn answer_and_end(peer: &mut Peer, verified: bool) -> Result<(), Fault> {
    peer.send(&Message::Result(Verdict::unchecked(verified)), &[])?;
    match peer.hear::<Message>()? {
        Heard::End => Ok(()),
        Heard::Message(message, _) if matches!(*message, Message::Request(_)) => Ok(()),
        Heard::Message(message, _) => Fault::broken("C12", format!("sent {} after the last result", message.name())),
        Heard::Silence => Fault::broken("C12", "neither asked again nor shut down writing"),
    }
}
