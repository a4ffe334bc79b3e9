//! Subscribers that join: the publisher's half of the messages before the first buffer. No step waits for the subscriber.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
};

use super::{
    connection::Identity,
    hub::{Desk, Hub, State},
    member::{Member, Stage},
    options::Policy,
    turns::SubscriberWords,
};
use crate::{
    channel::record::{RecordSocket, send_raw},
    error::{Error, ErrorCode, ProtocolError, Result},
    session::link::{check_backend, mismatch, unexpected, violation},
    wire::{Hello, MAX_FDS, Message, STREAM, Segments, Stream, Subscribe, TURNS, VERSION, milliseconds},
};

/// The most connections that have not joined yet. Beyond it, the oldest is closed.
const MAX_JOINING: usize = 256;

/// The most connections accepted in one go: a process that connects in a loop does not displace others before their records are read.
const MAX_ACCEPTED: usize = 8;

/// The most subscribers of a publisher whose sizes vary. A pool of fixed sizes has a limit in its number of buffers.
const MAX_VARYING: usize = 1024;

/// The most `busy` that a peer may send: more than it needs for any pool.
const MAX_BUSY: usize = 100_000;

/// How far a connection is.
#[derive(Debug)]
pub(super) enum Progress {
    /// It has sent nothing.
    Silent,
    /// It has sent its hello.
    Greeted { backend: String, streams: bool },
    /// It maps the pool, whose first `sent` segments it was sent.
    Mapping { sent: usize, history: usize, busy: usize },
}

impl Hub {
    /// Accepts the connections that wait at the listener.
    pub(super) fn accept(&self, state: &mut State) {
        for _ in 0..MAX_ACCEPTED {
            let accepted = match &state.listener {
                Some((listener, _)) => listener.accept(),
                None => return,
            };
            let admitted = match accepted {
                Ok(Some(socket)) => Identity::of(&socket).and_then(|identity| self.admit(state, socket, identity)),
                Ok(None) => return,
                Err(error) => Err(error),
            };
            if let Err(error) = admitted {
                // Usually this process is out of descriptors, and connections that do not join hold some.
                tracing::debug!(error = error.in_full(), "can't accept a subscriber");
                if !Self::make_room(state, 1) {
                    self.pause_listener(state);
                }
                return;
            }
        }
    }

    /// Adds a connection.
    ///
    /// # Errors
    /// [`Error::System`].
    pub(super) fn admit(&self, state: &mut State, socket: OwnedFd, identity: Identity) -> Result<()> {
        if state.is_closed {
            return Ok(());
        }
        Self::make_room(state, MAX_JOINING);
        let trusted = self.config.trust.check(identity.peer);
        let socket = RecordSocket::new(socket, self.timeout(), &self.cancel)?;
        let id = state.next_id;
        state.next_id += 1;
        let mut member = Member::new(id, socket, identity, self)?;
        if let Err(refused) = trusted {
            member.refuse(&refused, &mut state.desk, self);
        }
        state.members.insert(id, member);
        self.watcher.wake();
        Ok(())
    }

    /// Closes the oldest connections that have not joined, so that fewer than `most` remain. Returns whether any was closed.
    fn make_room(state: &mut State, most: usize) -> bool {
        let is_refused = |member: &Member| matches!(member.stage, Stage::Refused { .. });
        let is_silent = |member: &Member| {
            let Stage::Joining { progress, .. } = &member.stage else { return false };
            // A broker introduces each follower once, and limits how many there are.
            matches!(progress, Progress::Silent | Progress::Greeted { .. }) && !member.identity.is_introduced
        };
        let count = state.members.values().filter(|member| is_refused(member) || is_silent(member)).count();
        let mut excess = (count + 1).saturating_sub(most);
        let any = excess > 0;
        for closes in [&is_refused as &dyn Fn(&Member) -> bool, &is_silent] {
            for member in state.members.values_mut().filter(|member| closes(member)).take(excess) {
                if is_silent(member) {
                    member.send_error(&mismatch(
                        ErrorCode::Full,
                        "too many connections that do not subscribe: try again",
                    ));
                }
                member.stage = Stage::Gone;
                excess -= 1;
            }
        }
        state.desk.has_gone |= any;
        any
    }
}

impl Member {
    /// Handles a message of a peer that has not joined yet.
    pub(super) fn join(&mut self, message: Message, desk: &mut Desk, hub: &Hub) -> Result<()> {
        let Stage::Joining { progress, deadline } = &mut self.stage else { return Ok(()) };
        *deadline = hub.deadline();
        match (&*progress, message) {
            (Progress::Silent, Message::Hello(Hello { version, backend, capabilities, .. })) => {
                if version < VERSION {
                    return Err(ProtocolError::Version { got: version, own: VERSION }.into());
                }
                let streams = capabilities.iter().any(|named| named == STREAM);
                *progress = Progress::Greeted { backend, streams };
                self.send(&hub.hello());
                Ok(())
            }
            (Progress::Greeted { backend, streams }, Message::Subscribe(subscribe)) => {
                if !streams {
                    return Err(violation("the consumer subscribes without the capability `stream` in its hello"));
                }
                check_backend(hub.backend().as_str(), backend)?;
                self.subscribe(&subscribe, desk, hub)
            }
            (Progress::Greeted { .. }, Message::Request(request)) => {
                let object = request.object;
                let message = format!("there is no object `{object}` here: this producer has a stream: subscribe");
                Err(mismatch(ErrorCode::Object, message))
            }
            (&Progress::Mapping { sent, history, busy }, Message::Busy(_)) if busy < MAX_BUSY => {
                *progress = Progress::Mapping { sent, history, busy: busy + 1 };
                Ok(())
            }
            (Progress::Mapping { sent, history, .. }, Message::Received(received)) => {
                let (sent, history) = (*sent, *history);
                if received.segments != sent as u64 {
                    let count = received.segments;
                    return Err(violation(format!("{count} segments were acknowledged, but {sent} were sent")));
                }
                if sent == hub.chunks.len() { self.activate(history, desk, hub) } else { self.send_segments(sent, hub) }
            }
            (Progress::Silent, other) => Err(unexpected(&other, "hello")),
            (Progress::Greeted { .. }, other) => Err(unexpected(&other, "subscribe")),
            (Progress::Mapping { .. }, other) => Err(unexpected(&other, "received")),
        }
    }

    /// Admits a subscriber to the pool, and describes the pool.
    fn subscribe(&mut self, subscribe: &Subscribe, desk: &mut Desk, hub: &Hub) -> Result<()> {
        self.find_sender(desk, hub)?;
        let policy = Policy::of(subscribe);
        if desk.is_finished {
            return Err(mismatch(ErrorCode::Full, "this stream is complete"));
        }
        if policy == Policy::Every && hub.options.every.is_none() {
            let message = "this publisher does not wait for subscribers: the policy `every` is not allowed here";
            return Err(mismatch(ErrorCode::Access, message));
        }
        if hub.options.size.is_none() && desk.ledger.members() >= MAX_VARYING {
            let message = format!("this publisher has {MAX_VARYING} subscribers, the most for varying sizes");
            return Err(mismatch(ErrorCode::Full, message));
        }
        let room = usize::try_from(subscribe.held).unwrap_or(usize::MAX);
        desk.ledger.join(self.id, policy, room).map_err(|few| {
            let (needed, buffers) = (few.needed, few.buffers);
            let message = format!(
                "with this subscriber the pool would need {needed} buffers, and it has {buffers}: the sum of what \
                 subscribers may hold, the history, the loans and 1"
            );
            mismatch(ErrorCode::Full, message)
        })?;
        self.policy = policy;
        let history = usize::try_from(subscribe.history).unwrap_or(usize::MAX);
        let stream = Message::Stream(Stream {
            epoch: hub.epoch,
            size: hub.options.size,
            deadline_ms: hub.options.every.map(milliseconds),
            turns: hub.turns.as_ref().map(|_| TURNS as u64),
        });
        let offer = Message::Offer(Box::new((&hub.offer).into()));
        self.stage =
            Stage::Joining { progress: Progress::Mapping { sent: 0, history, busy: 0 }, deadline: hub.deadline() };
        if self.send_stream(&stream, hub)? && self.send(&offer) { self.send_segments(0, hub) } else { Err(unsent()) }
    }

    /// With the words, if the publisher's streams can store them.
    fn send_stream(&mut self, stream: &Message, hub: &Hub) -> Result<bool> {
        let (Some(_), Some(socket)) = (&hub.turns, &self.socket) else { return Ok(self.send(stream)) };
        let (words, file) = SubscriberWords::create()?;
        let sent = send_raw(socket.stream(), &stream.encode()?, &[file.as_fd()]);
        self.words = Some(words);
        Ok(sent.is_ok())
    }

    /// A socket pair of this process may connect it with another process.
    fn find_sender(&mut self, desk: &Desk, hub: &Hub) -> Result<()> {
        let (true, Some(socket)) = (std::mem::take(&mut self.shows_sender), &self.socket) else { return Ok(()) };
        let _ = rustix::net::sockopt::set_socket_passcred(socket, false);
        match desk.sender.filter(|sender| sender.pid != self.identity.peer.pid) {
            Some(sender) => self.identify(Identity::of_sender(sender)?, hub),
            None => Ok(()),
        }
    }

    /// Sends the segments after the first `sent`, as many as a record carries.
    fn send_segments(&mut self, sent: usize, hub: &Hub) -> Result<()> {
        let next = &hub.chunks[sent..hub.chunks.len().min(sent + MAX_FDS)];
        let sizes = next.iter().map(|chunk| chunk.size()).collect();
        let record = Message::Segments(Segments { first: sent as u64, sizes }).encode()?;
        let fds: Vec<_> = next.iter().map(|chunk| chunk.as_fd()).collect();
        let Some(socket) = &self.socket else { return Ok(()) };
        match send_raw(socket.stream(), &record, &fds) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(unsent()),
            Err(error) if error.raw_os_error() == Some(nix::libc::ETOOMANYREFS) => return Err(unsent()),
            Err(error) => return Err(Error::system("send the pool to a subscriber", error)),
        }
        if let Stage::Joining { progress: Progress::Mapping { sent, .. }, .. } = &mut self.stage {
            *sent += next.len();
        }
        Ok(())
    }
}

/// The records of a join fit into an empty socket's buffer.
pub(super) fn unsent() -> Error {
    mismatch(ErrorCode::Failed, "the pool can't be sent now, because too many descriptors are in flight: try again")
}
