//! The side that owns the memory and shares it.

use std::{
    collections::BTreeMap,
    net::Shutdown,
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::net::UnixStream,
    },
    sync::{Mutex, MutexGuard, PoisonError},
    thread::{self, Scope},
    time::{Duration, Instant},
};

use nix::{
    poll::PollFlags,
    sys::eventfd::{EfdFlags, EventFd},
};

use super::{
    Event, Link, Observer, Terms, activate,
    gate::{Gate, Turn},
    outcome_of, unexpected,
};
use crate::{
    channel::{Cancel, Channel, Listener, Peer, deadline_after},
    driver::{Access, Backend},
    error::{Error, Result},
    memory::{Allocation, Device, Mapping},
    pattern::{self, Pattern},
    wire::{
        DEFAULT_OBJECT, ELEMENT_U32, ErrorCode, MECHANISM_VMM, Message, Offer, OfferedDevice, Outcome, ProtocolError,
        Request, Segments,
    },
};

/// How many connections that asked for nothing yet are kept: beyond that the oldest goes.
const MAX_STRANGERS: usize = 64;

/// A buffer to share.
#[derive(Debug)]
pub struct Buffer {
    mapping: Mapping,
    size: u64,
    salt: u32,
    corrupt: bool,
}

impl Buffer {
    /// Allocates, maps and exports a buffer for `size` bytes of the pattern of a salt. [`serve`] fills it.
    ///
    /// With `corrupt` one byte of it is flipped after each fill, so that every check of it must fail.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the device can't share; those of [`Allocation::create`], [`Mapping::new`] and
    /// [`Allocation::export`].
    pub fn create(
        device: &Device,
        size: u64,
        salt: u32,
        corrupt: bool,
        cancel: &Cancel,
        observer: Observer<'_>,
    ) -> Result<Self> {
        device.require_sharing()?;
        activate(device, cancel, observer)?;
        let begun = Instant::now();
        let allocation = Allocation::create(device, size)?;
        observer(Event::Created { size, mapped_size: allocation.size(), took: begun.elapsed() });
        let begun = Instant::now();
        let mapping = Mapping::new(&allocation, Access::ReadWrite)?;
        let (address, access) = (mapping.address(), mapping.access());
        observer(Event::Mapped { address, access, took: begun.elapsed() });
        let begun = Instant::now();
        let fd = allocation.export()?.as_raw_fd();
        observer(Event::Exported { fd, took: begun.elapsed() });
        Ok(Self { mapping, size, salt, corrupt })
    }

    /// Where it is mapped in this process.
    pub fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    fn fill(&self, progress: &mut dyn FnMut() -> Result<()>, observer: Observer<'_>) -> Result<()> {
        let begun = Instant::now();
        pattern::fill(&self.mapping, self.size, Pattern::new(self.salt), &mut |_| progress())?;
        if self.corrupt {
            let (at, mut byte) = (self.size / 2, [0]);
            self.mapping.copy_out(at, &mut byte)?;
            self.mapping.copy_in(at, &[byte[0] ^ 0x01])?;
            self.mapping.synchronize()?;
        }
        observer(Event::Filled { words: pattern::words(self.size), salt: self.salt, took: begun.elapsed() });
        Ok(())
    }

    fn offer(&self, access: Access, reply_salt: Option<u32>) -> Offer {
        let device = self.mapping.device();
        Offer {
            object: DEFAULT_OBJECT.to_owned(),
            mechanism: MECHANISM_VMM.to_owned(),
            device: OfferedDevice { uuid: device.uuid(), name: device.name().to_owned() },
            size: self.size,
            mapped_size: self.mapping.size(),
            segments: 1,
            element_type: ELEMENT_U32.to_owned(),
            access,
            salt: self.salt,
            reply_salt,
        }
    }
}

/// How a buffer is served.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    /// How many consumers to serve, or 0 for any number until it is cancelled.
    pub consumers: u64,
    /// Whether each consumer has the buffer to itself and writes a reply into it.
    pub round_trip: bool,
}

/// A consumer that was served, or refused.
#[derive(Debug)]
pub struct Served {
    /// Who it was.
    pub peer: Peer,
    /// How it ended: what both sides together found, or what went wrong.
    pub result: Result<Outcome>,
}

/// Serves a buffer to consumers that connect to a listener, at the same time if they come at the same time, and returns
/// when as many were served as planned. `served` gets one entry for each of them, also if this fails.
///
/// Whoever sends a well-formed request is a consumer and counts, also when refused. Anything less is a stranger, who delays
/// no consumer and changes nothing. The listener's file is removed before the last conversation has ended.
///
/// # Errors
/// [`Error::NoConsumer`] if none is connected and none comes for as long as the timeout; [`Error::Interrupted`] if it was
/// cancelled, also where serving has no other end; what filling the buffer fails with; [`Error::System`]. What goes wrong
/// with a consumer is in `served`.
pub fn serve(
    listener: Listener,
    buffer: &Buffer,
    plan: Plan,
    terms: &Terms,
    observer: Observer<'_>,
    served: &mut Vec<Served>,
) -> Result<()> {
    let wake = EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
        .map_err(|errno| Error::system("make an eventfd", errno))?;
    let (over, gate, state) = (Cancel::new()?, Gate::default(), Mutex::default());
    let desk = Desk { buffer, plan, terms, observer, over, wake, gate, state };
    observer(Event::Listening { path: listener.path(), consumers: plan.consumers });
    let result = thread::scope(|scope| {
        let result = desk.receive_all(scope, &listener);
        // Nobody else can come, and whoever has asked for nothing yet need not wait for an answer.
        drop(listener);
        desk.over.cancel(match result {
            Err(Error::Interrupted { signal }) => signal,
            _ => 0,
        });
        result
    });
    let state = desk.state.into_inner().unwrap_or_else(PoisonError::into_inner);
    served.extend(state.served);
    match (result, state.fill) {
        // Interrupted only because all consumers were refused before it was done: nobody needed it.
        (Ok(()), Fill::Failed(Error::Interrupted { .. })) => Ok(()),
        (Ok(()), Fill::Failed(error)) => Err(error),
        (result, _) => result,
    }
}

/// What the threads of a service share.
struct Desk<'a> {
    buffer: &'a Buffer,
    plan: Plan,
    terms: &'a Terms,
    observer: Observer<'a>,
    /// Cancels all conversations.
    over: Cancel,
    /// Readable when the one that accepts has to look at the state again.
    wake: EventFd,
    gate: Gate,
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
    /// Since when nobody could have been served: from the first fill, and from the last consumer's end.
    idle_since: Option<Instant>,
    served: Vec<Served>,
    /// Who connected and asked for nothing yet, in the order in which they came.
    strangers: BTreeMap<u64, UnixStream>,
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

impl Desk<'_> {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn look_again(&self) {
        if let Err(errno) = self.wake.write(1) {
            tracing::error!(%errno, "an eventfd can't be written");
        }
    }

    /// Fills the buffer while the first consumers may already wait, and accepts until there is nothing more to wait for.
    fn receive_all<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>, listener: &Listener) -> Result<()> {
        let alone = self.gate.enter(Turn::Alone, &mut || self.terms.cancel.check())?;
        spawn(scope, "fill", move || {
            let filled = self.buffer.fill(&mut || self.over.check(), self.observer);
            let mut state = self.state();
            state.idle_since = Some(Instant::now());
            state.fill = filled.map_or_else(Fill::Failed, |()| Fill::Done);
            drop((state, alone));
            self.look_again();
        })?;
        while let Some(deadline) = self.patience() {
            if Instant::now() >= deadline {
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
            tracing::warn!(%error, "a connection has to wait");
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
        let mut visit = Visit { link: Link::new(channel), desk: self, admitted: false, outcome: None };
        let peer = visit.link.peer();
        let number = self.welcome(&visit.link.channel);
        let result = visit.converse(number);
        self.state().strangers.remove(&number);
        visit.link.end(&result);
        match (visit.admitted, result) {
            (true, result) => {
                // A consumer that was admitted and said nothing wrong has an outcome.
                let result = result.and_then(|()| visit.outcome.ok_or(Error::PeerGone { purpose: "for its result" }));
                let served = Served { peer, result };
                (self.observer)(Event::Ended { served: &served });
                let mut state = self.state();
                state.served.push(served);
                state.connected -= 1;
                state.idle_since = Some(Instant::now());
                drop(state);
                self.look_again();
            }
            (false, Err(error)) => tracing::info!(pid = peer.pid, uid = peer.uid, %error, "a stranger came and went"),
            (false, Ok(())) => tracing::info!(pid = peer.pid, uid = peer.uid, "a stranger came and went"),
        }
    }

    /// Notes that somebody came, and gives the visit a number.
    fn welcome(&self, channel: &Channel) -> u64 {
        let mut state = self.state();
        if state.strangers.len() >= MAX_STRANGERS {
            state.evict();
        }
        state.connections += 1;
        let number = state.connections;
        match channel.try_clone_socket() {
            Ok(socket) => drop(state.strangers.insert(number, socket)),
            Err(error) => tracing::warn!(%error, "a connection can't be sent away early"),
        }
        number
    }

    /// Makes a stranger a consumer, if one is still to come.
    fn admit(&self, number: u64, peer: Peer) -> Result<()> {
        let mut state = self.state();
        let expected = self.plan.consumers;
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
    outcome: Option<Outcome>,
}

impl Visit<'_> {
    fn converse(&mut self, number: u64) -> Result<()> {
        self.desk.terms.trust.check(self.link.peer())?;
        let backend = match self.link.receive("for the consumer's hello")? {
            (Message::Hello(hello), _) => hello.backend,
            (other, _) => return Err(unexpected(&other, "hello")),
        };
        self.link.hello(self.desk.buffer.mapping.device().driver().as_ref())?;
        loop {
            let request = match self.link.receive("for a request") {
                Ok((Message::Request(request), _)) => request,
                Ok((other, _)) => return Err(unexpected(&other, "request")),
                // It has what it wanted: how it leaves is its own affair.
                Err(Error::PeerGone { .. } | Error::Timeout { .. } | Error::Interrupted { .. })
                    if self.outcome.is_some() =>
                {
                    return Ok(());
                }
                Err(error) => return Err(error),
            };
            if !self.admitted {
                self.desk.admit(number, self.link.peer())?;
                self.admitted = true;
            }
            let outcome = self.lend(backend, &request)?;
            // A later success does not make up for a mismatch.
            if self.outcome.as_ref().is_none_or(|earlier| earlier.verified) {
                self.outcome = Some(outcome);
            }
        }
    }

    /// One request, from the turn to the results.
    fn lend(&mut self, backend: Backend, request: &Request) -> Result<Outcome> {
        let (desk, link) = (self.desk, &mut self.link);
        let (buffer, peer) = (desk.buffer, link.peer());
        let own_backend = buffer.mapping.device().backend();
        if backend != own_backend {
            let message = format!("the producer's memory is on backend {own_backend}, and the consumer uses {backend}");
            return Err(Error::Mismatch { code: ErrorCode::Backend, message });
        }
        if request.object != DEFAULT_OBJECT {
            let message = format!("there is no object `{}` here, only `{DEFAULT_OBJECT}`", request.object);
            return Err(Error::Mismatch { code: ErrorCode::Object, message });
        }
        let round_trip = desk.plan.round_trip;
        let access = request.access.unwrap_or(if round_trip { Access::ReadWrite } else { Access::ReadOnly });
        let reply_salt = (round_trip && access == Access::ReadWrite).then(|| salt_other_than(buffer.salt));

        let turn = if round_trip { Turn::Alone } else { Turn::Shared };
        let _turn = desk.gate.enter(turn, &mut || link.busy())?;
        let filled = matches!(desk.state().fill, Fill::Done);
        match (filled, turn) {
            (true, _) => {}
            (false, Turn::Alone) => {
                buffer.fill(&mut || link.busy(), desk.observer)?;
                desk.state().fill = Fill::Done;
            }
            (false, Turn::Shared) => {
                let message = "the producer could not fill the buffer".to_owned();
                return Err(Error::Mismatch { code: ErrorCode::Failed, message });
            }
        }

        let begun = Instant::now();
        if reply_salt.is_some() {
            desk.state().fill = Fill::Unknown;
        }
        let size = buffer.mapping.size();
        link.send(Message::Offer(buffer.offer(access, reply_salt)), &[])?;
        let fd = buffer.mapping.allocation().export()?;
        link.send(Message::Segments(Segments { first: 0, sizes: vec![size] }), &[fd])?;
        match link.receive("for the descriptor to be acknowledged")? {
            (Message::Received(received), _) if received.segments == 1 => {}
            (Message::Received(received), _) => {
                return Err(
                    ProtocolError::Content(format!("{} segments of 1 were acknowledged", received.segments)).into()
                );
            }
            (other, _) => return Err(unexpected(&other, "received")),
        }
        (desk.observer)(Event::Offered { peer, access, took: begun.elapsed() });

        let begun = Instant::now();
        let found = match link.receive("for the consumer's result")? {
            (Message::Result(outcome), _) => outcome,
            (other, _) => return Err(unexpected(&other, "result")),
        };
        let words = pattern::words(buffer.size);
        if found.words != words || found.verified != (found.mismatches == 0) || found.mismatches > words {
            return Err(ProtocolError::Content(format!("a result of {words} words can't be {found:?}")).into());
        }
        (desk.observer)(Event::Told { peer, outcome: &found, took: begun.elapsed() });

        let own = match reply_salt.filter(|_| found.verified) {
            Some(salt) => {
                let begun = Instant::now();
                let reply = Pattern::new(salt);
                let verification = pattern::verify(&buffer.mapping, buffer.size, reply, &mut |_| link.busy())?;
                (desk.observer)(Event::Verified { verification: &verification, took: begun.elapsed() });
                outcome_of(&verification)
            }
            // Nothing was left for this side to check.
            None => Outcome { verified: found.verified, words: 0, mismatches: 0, first_mismatch: None },
        };
        link.send(Message::Result(own.clone()), &[])?;
        Ok(if found.verified && reply_salt.is_some() { own } else { found })
    }
}

/// A fresh salt for a reply.
fn salt_other_than(salt: u32) -> u32 {
    loop {
        match rand::random() {
            fresh if fresh == salt => {}
            fresh => return fresh,
        }
    }
}

fn spawn<'scope>(scope: &'scope Scope<'scope, '_>, name: &str, work: impl FnOnce() + Send + 'scope) -> Result<()> {
    let spawned = thread::Builder::new().name(name.to_owned()).spawn_scoped(scope, work);
    spawned.map(drop).map_err(|error| Error::system("start a thread", error))
}
