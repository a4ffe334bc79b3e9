//! A producer's session with one consumer.

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
    error::{Error, ErrorCode, PeerError, Result},
    memory::Region,
    session::{
        Event, Observer, Verdict,
        link::{Link, check_backend, mismatch, unexpected, violation},
        opening::Offer,
    },
    wire::{DEFAULT_OBJECT, MAX_FDS, Message, PoolNumber, Request, Segments},
};

/// The default limit of a turn in a round trip, as a multiple of the timeout.
const DEFAULT_TURN: u32 = 10;

/// The state that all sessions of a buffer share.
#[derive(Clone, Copy)]
pub(super) struct Context<'a> {
    pub(super) buffer: &'a Buffer<'a>,
    pub(super) options: &'a ServeOptions,
    pub(super) observer: Observer<'a>,
    /// Returns the error of a failed fill.
    pub(super) failure: &'a (dyn Fn() -> Option<Error> + Sync),
}

/// A session with one consumer.
pub(super) struct Session<'a> {
    link: Link,
    context: Context<'a>,
    /// The name of the consumer's backend.
    backend: String,
    /// The combined verdict on its requests so far.
    found: Option<Verdict>,
    /// The numbers of the pools that the consumer has.
    pools: BTreeSet<u64>,
    /// Whether the consumer has memory that it must close before the connection.
    borrows: bool,
    /// Whether the consumer has its answer, sent nothing for the timeout, and has been sent the error.
    silent: bool,
}

impl<'a> Session<'a> {
    pub(super) fn new(link: Link, backend: String, context: Context<'a>) -> Self {
        Self { link, context, backend, found: None, pools: BTreeSet::new(), borrows: false, silent: false }
    }

    /// Runs the session. Returns the verdict, and the error.
    pub(super) fn run(mut self, first: Request) -> (Option<Verdict>, Option<Error>) {
        let mut result = self.answer_all(first);
        if let (Err(Error::Interrupted { .. }), Some(failure)) = (&result, (self.context.failure)()) {
            result = Err(failure);
        }
        let waited = self.link.channel.timeout();
        let left = if self.silent { self.link.leave() } else { self.link.end(&result, self.borrows) };
        if !left && self.borrows {
            // The consumer is silent with the memory open: freed memory could be read.
            self.context.buffer.shared().abandon();
            if result.is_ok() {
                let purpose = "for the consumer to close the memory";
                result = Err(Error::Peer(PeerError::Timeout { purpose, waited }));
            }
        }
        (self.found, result.err())
    }

    fn answer_all(&mut self, first: Request) -> Result<()> {
        let mut request = first;
        loop {
            self.answer(&request)?;
            let deadline = deadline_after(self.link.channel.timeout());
            request = match self.link.receive_first(deadline, "for another request") {
                Ok(Message::Request(request)) => request,
                Ok(other) => return Err(unexpected(&other, "request")),
                // The consumer has its answer, so this is no failure. If it is about to send another request, it receives the error.
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

    /// Records a verdict before a later error can hide it. A success does not replace an earlier mismatch.
    fn record(&mut self, verdict: &Verdict) {
        if self.found.as_ref().is_none_or(|earlier| earlier.verified) {
            self.found = Some(verdict.clone());
        }
    }

    /// Answers one request: from the wait for the turn to the results.
    fn answer(&mut self, request: &Request) -> Result<()> {
        let Context { buffer, options, .. } = self.context;
        check_backend(buffer.shared().device().backend().as_str(), &self.backend)?;
        if request.object != DEFAULT_OBJECT {
            let message = format!("there is no object `{}` here, only `{DEFAULT_OBJECT}`", request.object);
            return Err(mismatch(ErrorCode::Object, message));
        }
        let _turn = self.turn()?;
        if options.round_trip {
            let default = self.link.channel.timeout().saturating_mul(DEFAULT_TURN);
            self.link.begin_turn(options.turn.unwrap_or(default));
        }
        let answered = self.offer(request);
        self.link.end_turn();
        answered
    }

    /// Answers a request during this consumer's turn.
    fn offer(&mut self, request: &Request) -> Result<()> {
        let Context { buffer, options, observer, .. } = self.context;

        // Known only now: the buffer is sealed after its first fill.
        let writable = buffer.shared().access() == Access::ReadWrite;
        let replies = options.round_trip && writable && buffer.content().expects_reply();
        let access = request.access.unwrap_or(if replies { Access::ReadWrite } else { Access::ReadOnly });
        if access == Access::ReadWrite && !writable {
            let message = "the owner shares this buffer read-only, but access rw was requested";
            return Err(mismatch(ErrorCode::Access, message));
        }
        let range = buffer.range(request.range)?;
        let started = Instant::now();
        let reply = replies && access == Access::ReadWrite;
        let check = buffer.content().check(&range, reply, &mut || self.link.busy())?;
        let offered = Offered { range, reply, check };
        if reply {
            buffer.invalidate();
        }
        self.hand_over(&offered, access)?;
        let bytes = offered.range.end - offered.range.start;
        observer(Event::Offered { peer: self.link.peer(), access, bytes, elapsed: started.elapsed() });
        self.conclude(&offered)
    }

    /// Waits for a turn on the filled buffer: exclusive in a round trip, else shared.
    fn turn(&mut self) -> Result<Entered<'a>> {
        let Context { buffer, options, observer, failure } = self.context;
        let interval = self.link.tick_interval();
        let link = &mut self.link;
        let kind = if options.round_trip { Turn::Exclusive } else { Turn::Shared };
        let mut turn = buffer.turn(kind, interval, &mut || link.busy())?;
        // A loop: between the two turns, a reply to another service may invalidate the buffer again.
        while !buffer.is_filled() {
            if let Some(failure) = failure() {
                return Err(failure);
            }
            if kind == Turn::Shared {
                drop(turn);
                turn = buffer.turn(Turn::Exclusive, interval, &mut || link.busy())?;
            }
            buffer.fill(&mut || link.busy(), observer)?;
            if kind == Turn::Shared {
                drop(turn);
                turn = buffer.turn(kind, interval, &mut || link.busy())?;
            }
        }
        Ok(turn)
    }

    /// Sends the offer, its pool and its segments.
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
        // One record in flight at a time: the kernel limits a user's descriptors in flight.
        for chunks in chunks.chunks(MAX_FDS) {
            let sizes = chunks.iter().map(|chunk| chunk.size()).collect();
            let fds: Vec<BorrowedFd<'_>> = chunks.iter().map(|chunk| chunk.as_fd()).collect();
            self.link.send(&Message::Segments(Segments { first: part.first + sent, sizes }), &fds)?;
            sent += chunks.len() as u64;
            self.acknowledged(sent)?;
        }
        Ok(())
    }

    /// Waits until the consumer has acknowledged `sent` segments of this offer.
    fn acknowledged(&mut self, sent: u64) -> Result<()> {
        match self.link.receive("for the descriptors to be acknowledged")? {
            (Message::Received(received), _) if received.segments == sent => Ok(()),
            (Message::Received(received), _) => {
                Err(violation(format!("{} segments were acknowledged, but {sent} were sent", received.segments)))
            }
            (other, _) => Err(unexpected(&other, "received")),
        }
    }

    /// Receives the consumer's result, checks its reply, and answers.
    fn conclude(&mut self, offered: &Offered) -> Result<()> {
        let Context { buffer, observer, .. } = self.context;
        let started = Instant::now();
        let result: Verdict = match self.link.receive("for the consumer's result")? {
            (Message::Result(verdict), _) => verdict,
            (other, _) => return Err(unexpected(&other, "result")),
        };
        let accepted = buffer.content().accept(offered, &result);
        if accepted.is_err() && !result.verified {
            // The consumer found wrong data, even if its figures are invalid.
            self.record(&Verdict::unchecked(false));
        }
        accepted?;
        observer(Event::Reported { peer: self.link.peer(), verdict: &result, elapsed: started.elapsed() });
        self.record(&result);
        let busy = &mut || self.link.busy();
        let own = buffer.content().judge(buffer.shared(), offered, &result, busy)?;
        // A mismatch on either side counts.
        let own = Verdict { verified: own.verified && result.verified, ..own };
        if !own.verified {
            self.record(&own);
        }
        self.link.send(&Message::Result(own), &[])
    }
}
