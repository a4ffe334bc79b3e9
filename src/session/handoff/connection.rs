//! A producer's conversation with one consumer.

use std::{
    collections::BTreeSet,
    os::fd::{AsFd, BorrowedFd},
    time::Instant,
};

use super::{
    Offered,
    buffer::Buffer,
    gate::{Entered, Turn},
    options::ServeOptions,
};
use crate::{
    channel::deadline_after,
    driver::Access,
    error::{Error, ErrorCode, PeerError, ProtocolError, Result},
    memory::Region,
    session::{
        Event, Observer, Verdict,
        acceptor::check_backend,
        link::{Link, unexpected},
        opening::Offer,
    },
    wire::{DEFAULT_OBJECT, MAX_FDS, Message, PoolNumber, Request, Segments},
};

/// How many times the timeout a consumer may have the buffer to itself in a round trip, unless the options say how long.
const TURN: u32 = 10;

/// What all conversations about a buffer have in common.
#[derive(Clone, Copy)]
pub(super) struct Context<'a> {
    pub(super) buffer: &'a Buffer<'a>,
    pub(super) options: &'a ServeOptions,
    pub(super) observer: Observer<'a>,
    /// Why the buffer will never be filled, if that is so.
    pub(super) failure: &'a (dyn Fn() -> Option<Error> + Sync),
}

/// A conversation with one consumer.
pub(super) struct Conversation<'a> {
    link: Link,
    context: Context<'a>,
    /// The name of the consumer's backend.
    backend: String,
    /// What came of its requests so far.
    found: Option<Verdict>,
    /// Which pools it has.
    pools: BTreeSet<u64>,
    /// Whether it has memory that it must close before the connection ends.
    borrows: bool,
    /// Whether it has what it asked for, was then silent for its whole timeout, and knows that it was too long.
    silent: bool,
}

impl<'a> Conversation<'a> {
    pub(super) fn new(link: Link, backend: String, context: Context<'a>) -> Self {
        Self { link, context, backend, found: None, pools: BTreeSet::new(), borrows: false, silent: false }
    }

    /// From the first request to the end of the connection. Returns what was found, and what went wrong.
    pub(super) fn run(mut self, first: Request) -> (Option<Verdict>, Option<Error>) {
        let mut result = self.converse(first);
        if let (Err(Error::Interrupted { .. }), Some(failure)) = (&result, (self.context.failure)()) {
            result = Err(failure);
        }
        let waited = self.link.channel.timeout();
        let left = if self.silent { self.link.leave() } else { self.link.end(&result, self.borrows) };
        if !left && self.borrows {
            // It has the memory open, and is silent: it would read freed memory.
            self.context.buffer.shared().abandon();
            if result.is_ok() {
                let purpose = "for the consumer to close the memory";
                result = Err(Error::Peer(PeerError::Timeout { purpose, waited }));
            }
        }
        (self.found, result.err())
    }

    fn converse(&mut self, first: Request) -> Result<()> {
        let mut request = first;
        loop {
            self.answer(&request)?;
            let deadline = deadline_after(self.link.channel.timeout());
            request = match self.link.receive_first(deadline, "for another request") {
                Ok(Message::Request(request)) => request,
                Ok(other) => return Err(unexpected(&other, "request")),
                // It has what it asked for: how it leaves does not matter. It may be about to ask for more, and learns why not.
                Err(
                    error @ (Error::Peer(PeerError::Gone { .. })
                    | Error::Peer(PeerError::Timeout { .. })
                    | Error::Interrupted { .. }),
                ) if self.found.is_some() => {
                    self.link.report(&error);
                    self.silent = !matches!(error, Error::Peer(PeerError::Gone { .. }));
                    return Ok(());
                }
                Err(error) => return Err(error),
            };
        }
    }

    /// Notes what was found, before anything else can go wrong. A later success does not make up for a mismatch.
    fn find(&mut self, verdict: &Verdict) {
        if self.found.as_ref().is_none_or(|earlier| earlier.verified) {
            self.found = Some(verdict.clone());
        }
    }

    /// One request, from the turn to the results.
    fn answer(&mut self, request: &Request) -> Result<()> {
        let Context { buffer, options, .. } = self.context;
        let refuse = |code, message: String| Err(Error::Peer(PeerError::Mismatch { code, message }));
        check_backend(&self.backend, buffer.shared().device().backend())?;
        if request.object != DEFAULT_OBJECT {
            let message = format!("there is no object `{}` here, only `{DEFAULT_OBJECT}`", request.object);
            return refuse(ErrorCode::Object, message);
        }
        let _turn = self.turn()?;
        if options.round_trip {
            self.link.begin_turn(options.turn.unwrap_or_else(|| self.link.channel.timeout().saturating_mul(TURN)));
        }
        let answered = self.offer(request);
        self.link.end_turn();
        answered
    }

    /// What follows once it is this consumer's turn.
    fn offer(&mut self, request: &Request) -> Result<()> {
        let Context { buffer, options, observer, .. } = self.context;
        let refuse = |code, message: String| Err(Error::Peer(PeerError::Mismatch { code, message }));

        // Only now is it known whether it is sealed.
        let writable = buffer.shared().access() == Access::ReadWrite;
        let replies = options.round_trip && writable && buffer.content().expects_reply();
        let access = request.access.unwrap_or(if replies { Access::ReadWrite } else { Access::ReadOnly });
        if access == Access::ReadWrite && !writable {
            let message = "the buffer is sealed: it is offered read-only, and rw was asked for".to_owned();
            return refuse(ErrorCode::Access, message);
        }
        let range = buffer.range(request.range)?;
        let begun = Instant::now();
        let reply = replies && access == Access::ReadWrite;
        let check = buffer.content().check(&range, reply, &mut || self.link.busy())?;
        let offered = Offered { range, reply, check };
        if reply {
            buffer.spoil();
        }
        self.hand_over(&offered, access)?;
        observer(Event::Offered { peer: self.link.peer(), access, elapsed: begun.elapsed() });
        self.conclude(&offered)
    }

    /// A turn on the buffer, filled: alone in a round trip, else with others.
    fn turn(&mut self) -> Result<Entered<'a>> {
        let Context { buffer, options, observer, failure } = self.context;
        let (every, link) = (self.link.tick_every(), &mut self.link);
        let kind = if options.round_trip { Turn::Alone } else { Turn::Shared };
        let mut turn = buffer.turn(kind, every, &mut || link.busy())?;
        // A reply of another service may spoil it again between the two turns.
        while !buffer.is_filled() {
            if let Some(failure) = failure() {
                return Err(failure);
            }
            if kind == Turn::Shared {
                drop(turn);
                turn = buffer.turn(Turn::Alone, every, &mut || link.busy())?;
            }
            buffer.fill(&mut || link.busy(), observer)?;
            if kind == Turn::Shared {
                drop(turn);
                turn = buffer.turn(kind, every, &mut || link.busy())?;
            }
        }
        Ok(turn)
    }

    /// Sends the offer and what belongs to it.
    fn hand_over(&mut self, offered: &Offered, access: Access) -> Result<()> {
        let buffer = self.context.buffer;
        let shared = buffer.shared();
        let chunks = shared.chunks(offered.range.clone())?;
        let offer = Offer {
            object: DEFAULT_OBJECT.to_owned(),
            memory: shared.describe()?,
            array: buffer.array().cloned(),
            access,
            part: chunks.as_ref().map(|(part, _)| *part),
            check: offered.check.clone(),
            buffer: None,
        };
        self.borrows |= chunks.is_none();
        self.link.send(&Message::Offer(Box::new((&offer).into())), &[])?;
        if let Some(pool) = shared.pool().filter(|pool| !self.pools.contains(&pool.number())) {
            self.link.send(&Message::Pool(PoolNumber { pool: pool.number() }), &[pool.export()?])?;
            self.acknowledged(0)?;
            self.pools.insert(pool.number());
        }
        let Some((part, chunks)) = chunks else { return Ok(()) };
        let mut sent = 0;
        // One record at a time is in flight: the kernel bounds a user's descriptors in flight.
        for chunks in chunks.chunks(MAX_FDS) {
            let sizes = chunks.iter().map(|chunk| chunk.size()).collect();
            let fds: Vec<BorrowedFd<'_>> = chunks.iter().map(|chunk| chunk.as_fd()).collect();
            self.link.send(&Message::Segments(Segments { first: part.first + sent, sizes }), &fds)?;
            sent += chunks.len() as u64;
            self.acknowledged(sent)?;
        }
        Ok(())
    }

    /// Waits until the consumer has so many segments of this offer.
    fn acknowledged(&mut self, sent: u64) -> Result<()> {
        match self.link.receive("for the descriptors to be acknowledged")? {
            (Message::Received(received), _) if received.segments == sent => Ok(()),
            (Message::Received(received), _) => {
                let message = format!("{} segments of {sent} were acknowledged", received.segments);
                Err(ProtocolError::Content(message).into())
            }
            (other, _) => Err(unexpected(&other, "received")),
        }
    }

    /// Takes the consumer's result, checks its reply, and answers.
    fn conclude(&mut self, offered: &Offered) -> Result<()> {
        let Context { buffer, observer, .. } = self.context;
        let begun = Instant::now();
        let result: Verdict = match self.link.receive("for the consumer's result")? {
            (Message::Result(verdict), _) => verdict,
            (other, _) => return Err(unexpected(&other, "result")),
        };
        let accepted = buffer.content().accept(offered, &result);
        if accepted.is_err() && !result.verified {
            // The check has failed, even if its figures are invalid.
            self.find(&Verdict::unchecked(false));
        }
        accepted?;
        observer(Event::Reported { peer: self.link.peer(), verdict: &result, elapsed: begun.elapsed() });
        self.find(&result);
        let busy = &mut || self.link.busy();
        let own = buffer.content().judge(buffer.shared(), offered, &result, busy)?;
        // Either side's mismatch counts.
        let own = Verdict { verified: own.verified && result.verified, ..own };
        if !own.verified {
            self.find(&own);
        }
        self.link.send(&Message::Result(own), &[])
    }
}
