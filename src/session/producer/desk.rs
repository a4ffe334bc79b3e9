//! The producer's desk: it accepts, tells strangers from consumers, gives turns, and lends.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::Shutdown,
    ops::Range,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread::{self, Scope},
    time::{Duration, Instant},
};

use nix::{poll::PollFlags, sys::eventfd::EventFd};

use super::{Buffer, Plan, Served};
use crate::{
    channel::{Cancel, Channel, Listener, Peer, deadline_after, eventfd},
    driver::Access,
    error::{Error, Result},
    memory::Region,
    session::{Event, Link, Observer, Terms, gate::Turn, greeting, outcome_of, unexpected},
    tools::check::pattern::{self, Pattern},
    wire::{
        DEFAULT_OBJECT, ErrorCode, MAX_FDS, Message, Offer, OfferedPool, Outcome, ProtocolError, Request, Segments,
    },
};

/// How many connections that asked for nothing yet are kept, besides one for each consumer that is still to come (or as
/// many again, if there is no telling): beyond that the oldest goes.
const MAX_STRANGERS: usize = 64;

/// How many consumers a service without end remembers.
const REMEMBERED: usize = 1000;

/// How long somebody who asked for nothing is given to leave.
const GOODBYE: Duration = Duration::from_millis(100);

/// What the threads of a service share.
pub(super) struct Desk<'a> {
    buffer: &'a Buffer,
    plan: Plan,
    terms: &'a Terms,
    observer: Observer<'a>,
    /// Cancels all conversations.
    over: Cancel,
    /// Readable when the one that accepts has to look at the state again.
    wake: EventFd,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Changed only by whoever has the buffer alone.
    fill: Fill,
    /// How many have asked, of those that count.
    admitted: u64,
    /// How many of them are still connected.
    connected: u64,
    /// Whether nobody is admitted any more.
    closed: bool,
    /// Since when nobody could have been served: from the first fill, and from the last consumer's end.
    idle_since: Option<Instant>,
    served: Vec<Served>,
    /// Who connected and asked for nothing yet, in the order in which they came.
    strangers: BTreeMap<u64, Arc<UnixStream>>,
    connections: u64,
}

/// What the buffer holds.
#[derive(Default)]
enum Fill {
    /// Nothing that could be relied on.
    #[default]
    Unknown,
    /// The pattern.
    Done,
    /// Nothing, for good.
    Failed(Error),
}

impl Fill {
    /// What a consumer is told when nothing can be had any more.
    fn refusal(&self) -> Option<Error> {
        match self {
            Self::Failed(Error::Interrupted { .. }) | Self::Done | Self::Unknown => None,
            Self::Failed(error) => {
                let message = format!("the producer could not fill the buffer: {}", error.in_full());
                Some(Error::Mismatch { code: ErrorCode::Failed, message })
            }
        }
    }
}

impl State {
    /// Sends the stranger away who came first.
    fn evict(&mut self) {
        if let Some((_, socket)) = self.strangers.pop_first() {
            tracing::debug!("a stranger is sent away to make room");
            // It may have gone by itself.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

impl<'a> Desk<'a> {
    pub(super) fn new(buffer: &'a Buffer, plan: Plan, terms: &'a Terms, observer: Observer<'a>) -> Result<Self> {
        let (over, wake) = (Cancel::new()?, eventfd()?);
        Ok(Self { buffer, plan, terms, observer, over, wake, state: Mutex::default() })
    }

    /// Ends all conversations, for the reason for which the accepting has ended.
    pub(super) fn end_all(&self, accepting: &Result<()>) {
        self.over.cancel(match accepting {
            Err(Error::Interrupted { signal }) => *signal,
            _ => 0,
        });
    }

    /// What became of it all, when nobody is at the desk any more.
    pub(super) fn close(self, accepting: Result<()>, served: &mut Vec<Served>) -> Result<()> {
        let state = self.state.into_inner().unwrap_or_else(PoisonError::into_inner);
        served.extend(state.served);
        match (accepting, state.fill) {
            // Interrupted only because all consumers were refused before it was done: nobody needed it.
            (Ok(()), Fill::Failed(Error::Interrupted { .. })) => Ok(()),
            (Ok(()), Fill::Failed(error)) => Err(error),
            (result, _) => result,
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn look_again(&self) {
        if let Err(errno) = self.wake.write(1) {
            tracing::error!(%errno, "an eventfd can't be written");
        }
    }

    /// Fills the buffer while the first consumers may already wait, and accepts until there is nothing more to wait for.
    pub(super) fn receive_all<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        listener: &Listener,
    ) -> Result<()> {
        let alone = self.buffer.turn(Turn::Alone, &mut || self.terms.cancel.check())?;
        spawn(scope, "fill", move || {
            let filled = self.buffer.fill(&mut || self.over.check(), self.observer);
            let mut state = self.state();
            state.idle_since = Some(Instant::now());
            state.fill = filled.map_or_else(Fill::Failed, |()| Fill::Done);
            drop((state, alone));
            self.look_again();
        })?;
        while let Some(deadline) = self.patience() {
            if Instant::now() >= deadline && self.give_up() {
                return Err(Error::NoConsumer { waited: self.terms.timeout });
            }
            let fds = [(listener.as_fd(), PollFlags::POLLIN), (self.wake.as_fd(), PollFlags::POLLIN)];
            match self.terms.cancel.wait_any(fds, deadline)? {
                Some(0) => self.accept(scope, listener)?,
                // Looking again is what follows anyway; reading makes it quiet.
                Some(_) => drop(self.wake.read()),
                None => {}
            }
        }
        Ok(())
    }

    /// Admits nobody any more, unless somebody was admitted at the last moment.
    fn give_up(&self) -> bool {
        let mut state = self.state();
        state.closed = state.connected == 0;
        state.closed
    }

    /// Until when to wait for the next consumer; `None` when there is nothing more to wait for.
    fn patience(&self) -> Option<Instant> {
        let state = self.state();
        let all_served = self.plan.consumers > 0 && state.served.len() as u64 >= self.plan.consumers;
        if all_served || matches!(state.fill, Fill::Failed(_)) {
            return None;
        }
        let since = state.idle_since.filter(|_| self.plan.consumers > 0 && state.connected == 0);
        Some(match since {
            Some(since) => since.checked_add(self.terms.timeout).unwrap_or_else(|| deadline_after(Duration::MAX)),
            None => deadline_after(Duration::MAX),
        })
    }

    fn accept<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>, listener: &Listener) -> Result<()> {
        let accepted = listener.accept().and_then(|socket| match socket {
            Some(socket) => spawn(scope, "consumer", move || self.attend(socket)),
            None => Ok(()),
        });
        if let Err(error) = accepted {
            // Out of descriptors or threads: those who hold them and ask for nothing make room.
            tracing::debug!(%error, "a connection has to wait");
            self.state().evict();
            self.terms.cancel.pause(Duration::from_millis(5))?;
        }
        Ok(())
    }

    /// A connection from its first moment to its last.
    fn attend(&self, socket: OwnedFd) {
        let channel = match Channel::new(socket, self.terms.timeout, &self.over) {
            Ok(channel) => channel,
            Err(error) => return tracing::warn!(%error, "a connection is dropped"),
        };
        let mut visit = Visit::new(Link::new(channel), self);
        let peer = visit.link.peer();
        let number = self.welcome(&visit.link.channel);
        let mut result = visit.converse(number);
        if let (Err(Error::Interrupted { .. }), Some(refusal)) = (&result, self.state().fill.refusal()) {
            result = Err(refusal);
        }
        if !visit.admitted {
            if let Err(Error::Interrupted { signal: 0 }) = result {
                let message = "this producer has served all that it was to serve".to_owned();
                result = Err(Error::Mismatch { code: ErrorCode::Full, message });
            }
            visit.link.end_within(GOODBYE, &result);
            self.state().strangers.remove(&number);
            let error = result.err().map(|error| error.in_full());
            return tracing::info!(pid = peer.pid, uid = peer.uid, error, "a stranger came and went");
        }
        if !visit.link.end(&result) && visit.borrows {
            // It has the memory open, and is silent: freed, that would go under its feet.
            self.buffer.shared().abandon();
            if result.is_ok() {
                let purpose = "for the consumer to let go of the memory";
                result = Err(Error::Timeout { purpose, waited: self.terms.timeout });
            }
        }
        let served = Served { peer, found: visit.found, error: result.err() };
        (self.observer)(Event::Ended { served: &served });
        let mut state = self.state();
        if self.plan.consumers == 0 && state.served.len() >= REMEMBERED {
            let harmless = |served: &Served| served.error.is_none() && !served.mismatched();
            let forgotten = state.served.iter().position(harmless).unwrap_or(REMEMBERED - 1);
            state.served.remove(forgotten);
        }
        state.served.push(served);
        state.connected -= 1;
        state.idle_since = Some(Instant::now());
        drop(state);
        self.look_again();
    }

    /// Notes that somebody came, and gives the visit a number.
    fn welcome(&self, channel: &Channel) -> u64 {
        let mut state = self.state();
        let expected = match self.plan.consumers {
            0 => MAX_STRANGERS,
            consumers => usize::try_from(consumers - state.admitted).unwrap_or(usize::MAX).min(1024),
        };
        if state.strangers.len() >= MAX_STRANGERS + expected {
            state.evict();
        }
        state.connections += 1;
        let number = state.connections;
        state.strangers.insert(number, channel.socket());
        number
    }

    /// Makes a stranger a consumer, if one is still to come.
    fn admit(&self, number: u64, peer: Peer) -> Result<()> {
        let mut state = self.state();
        let expected = self.plan.consumers;
        if state.closed {
            let message = "this producer has given up waiting".to_owned();
            return Err(Error::Mismatch { code: ErrorCode::Full, message });
        }
        if expected > 0 && state.admitted == expected {
            let message = format!("this producer serves {expected} consumers, and all of them have come");
            return Err(Error::Mismatch { code: ErrorCode::Full, message });
        }
        state.strangers.remove(&number);
        state.admitted += 1;
        state.connected += 1;
        drop(state);
        (self.observer)(Event::Requested { peer });
        Ok(())
    }
}

/// One connection to a producer.
struct Visit<'a> {
    link: Link,
    desk: &'a Desk<'a>,
    admitted: bool,
    /// What came of its requests so far.
    found: Option<Outcome>,
    /// Which pools it has.
    pools: BTreeSet<u64>,
    /// Whether it was given memory that it must let go of before the connection ends.
    borrows: bool,
}

impl<'a> Visit<'a> {
    fn new(link: Link, desk: &'a Desk<'a>) -> Self {
        Self { link, desk, admitted: false, found: None, pools: BTreeSet::new(), borrows: false }
    }

    fn converse(&mut self, number: u64) -> Result<()> {
        self.desk.terms.trust.check(self.link.peer())?;
        let deadline = deadline_after(self.desk.terms.timeout);
        let backend = greeting(self.link.receive_first(deadline, "for the consumer's hello")?)?.backend;
        self.link.hello(self.desk.buffer.shared().device().driver(), &[])?;
        loop {
            let next = match self.admitted {
                false => self.link.receive_first(deadline, "for a request"),
                true => self.link.receive("for another request").map(|(message, _)| message),
            };
            let request = match next {
                Ok(Message::Request(request)) => request,
                Ok(Message::Subscribe(_)) => {
                    let message = "this producer has no stream to subscribe to, only a buffer to request".to_owned();
                    return Err(Error::Mismatch { code: ErrorCode::Object, message });
                }
                Ok(other) => return Err(unexpected(&other, "request")),
                // It has what it wanted: how it leaves is its own affair.
                Err(Error::PeerGone { .. } | Error::Timeout { .. } | Error::Interrupted { .. })
                    if self.found.is_some() =>
                {
                    return Ok(());
                }
                Err(error) => return Err(error),
            };
            if !self.admitted {
                self.desk.admit(number, self.link.peer())?;
                self.admitted = true;
            }
            self.lend(&backend, &request)?;
        }
    }

    /// Notes what was found, before anything else can go wrong. A later success does not make up for a mismatch.
    fn find(&mut self, outcome: &Outcome) {
        if self.found.as_ref().is_none_or(|earlier| earlier.verified) {
            self.found = Some(outcome.clone());
        }
    }

    /// One request, from the turn to the results.
    fn lend(&mut self, backend: &str, request: &Request) -> Result<()> {
        let (desk, peer) = (self.desk, self.link.peer());
        let (buffer, plan) = (desk.buffer, desk.plan);
        let refuse = |code, message: String| Err(Error::Mismatch { code, message });
        let own_backend = buffer.shared().device().backend();
        if backend != own_backend.as_str() {
            let message = format!("the producer's memory is on backend {own_backend}, and the consumer uses {backend}");
            return refuse(ErrorCode::Backend, message);
        }
        if request.object != DEFAULT_OBJECT {
            let message = format!("there is no object `{}` here, only `{DEFAULT_OBJECT}`", request.object);
            return refuse(ErrorCode::Object, message);
        }

        let turn = if plan.round_trip { Turn::Alone } else { Turn::Shared };
        let link = &mut self.link;
        let _turn = buffer.turn(turn, &mut || link.busy())?;
        let filled = match &desk.state().fill {
            Fill::Done => true,
            Fill::Unknown => false,
            // Interrupted, unless it says otherwise.
            failed => return Err(failed.refusal().unwrap_or(Error::Interrupted { signal: 0 })),
        };
        if !filled {
            // It was changed in a round trip, where every turn is one alone.
            buffer.fill(&mut || link.busy(), desk.observer)?;
            desk.state().fill = Fill::Done;
        }

        // Only now is it known whether it is sealed, and how large it is.
        let writable = buffer.shared().access() == Access::ReadWrite;
        let replies = plan.round_trip && writable && buffer.salt().is_some();
        let access = request.access.unwrap_or(if replies { Access::ReadWrite } else { Access::ReadOnly });
        if access == Access::ReadWrite && !writable {
            let message = "the buffer is sealed: it is lent read-only, and rw was asked for".to_owned();
            return refuse(ErrorCode::Access, message);
        }
        let range = buffer.range(request.range)?;
        let begun = Instant::now();
        let mut offer = buffer.offer(&range, access, &mut || link.busy())?;
        if replies && access == Access::ReadWrite {
            offer.reply_salt = Some(salt_other_than(offer.salt));
            desk.state().fill = Fill::Unknown;
        }
        self.hand_over(&mut offer, &range, request.have.unwrap_or(0))?;
        (desk.observer)(Event::Offered { peer, access, took: begun.elapsed() });
        self.conclude(&offer, range)
    }

    /// Sends the offer and what belongs to it.
    fn hand_over(&mut self, offer: &mut Offer, range: &Range<u64>, have: u64) -> Result<()> {
        let shared = self.desk.buffer.shared();
        if have > offer.memory.segments {
            let message = format!("{have} segments are there already, of a buffer of {}", offer.memory.segments);
            return Err(Error::Mismatch { code: ErrorCode::Range, message });
        }
        let chunks = shared.chunks(range.clone(), have)?;
        offer.part = chunks.as_ref().map(|(part, _)| *part);
        self.borrows |= chunks.is_none();
        self.link.send(&Message::Offer(Box::new(offer.clone())), &[])?;
        if let Some(pool) = shared.pool().filter(|pool| !self.pools.contains(&pool.number())) {
            self.link.send(&Message::Pool(OfferedPool { pool: pool.number() }), &[pool.export()?])?;
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

    /// Hears what the consumer found, checks its reply, and says what came of both.
    fn conclude(&mut self, offer: &Offer, range: Range<u64>) -> Result<()> {
        let (desk, peer) = (self.desk, self.link.peer());
        let begun = Instant::now();
        let found = match self.link.receive("for the consumer's result")? {
            (Message::Result(outcome), _) => outcome,
            (other, _) => return Err(unexpected(&other, "result")),
        };
        let sound = check_result(&found, offer, &range);
        if sound.is_err() && !found.verified {
            // A no is a no, whatever its figures are worth.
            self.find(&Outcome::of_verdict(false));
        }
        sound?;
        (desk.observer)(Event::Told { peer, outcome: &found, took: begun.elapsed() });
        self.find(&found);

        let own = match offer.reply_salt.filter(|_| found.verified) {
            Some(salt) => {
                let begun = Instant::now();
                let busy = &mut || self.link.busy();
                let (verification, work) = desk.buffer.verify(range, Pattern::new(salt), busy)?;
                let outcome = outcome_of(&verification);
                (desk.observer)(Event::Verified { outcome: &outcome, work: Some(&work), took: begun.elapsed() });
                outcome
            }
            // Nothing was left for this side to check.
            None => Outcome::of_verdict(found.verified),
        };
        if !own.verified {
            self.find(&own);
        }
        self.link.send(&Message::Result(own), &[])
    }
}

/// Whether a consumer's result can be one of this offer.
fn check_result(found: &Outcome, offer: &Offer, range: &Range<u64>) -> Result<(), ProtocolError> {
    found.check(if offer.salt.is_some() { pattern::touched(range) } else { 0..0 })?;
    if found.verified && found.digest != offer.digest {
        let message = format!("digest {:?} can't be verified where {:?} belongs", found.digest, offer.digest);
        return Err(ProtocolError::Content(message));
    }
    Ok(())
}

/// A fresh salt for a reply.
fn salt_other_than(salt: Option<u32>) -> u32 {
    loop {
        match rand::random() {
            fresh if Some(fresh) == salt => {}
            fresh => return fresh,
        }
    }
}

fn spawn<'scope>(scope: &'scope Scope<'scope, '_>, name: &str, work: impl FnOnce() + Send + 'scope) -> Result<()> {
    let spawned = thread::Builder::new().name(name.to_owned()).spawn_scoped(scope, work);
    spawned.map(drop).map_err(|error| Error::system("start a thread", error))
}
