//! The simulated server: verbs, state, log and the server's end of the keeper's connection are the broker's own code.
//!
//! This file stands in for `io`: it executes effects, keeps timers, and reconnects to the next keeper in the order of `io/keeper.rs`.

use std::{
    collections::BTreeMap,
    fs::File,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    client::{Client, memory_of},
    seed_tokens,
    step::Flaw,
    world::World,
};
use crate::{
    broker::{
        keeper::{Flushed, KeeperProcess, Mark},
        server::{
            TimeLimits,
            admit::{Limits, Resource},
            state::{
                caller::{Caller, ConnectionId},
                effects::{Effect, Effects},
                objects::Objects,
                root::State,
                root::Time,
            },
            verbs::{connection, dispatch, list, put, watch},
        },
    },
    wire::broker::{Message, Quota},
};

/// The quota of each user: objects, leases and bytes. Small enough to be reached: a version of one segment has 2 MiB.
const LIMITS: [u64; 3] = [4, 5, 8 << 20];

/// A time limit of the server, in the order of its use: a hello, and the rest of a put.
const TIMEOUT: Duration = Duration::from_secs(30);

pub(super) struct Server {
    pub(super) state: State,
    pub(super) deadlines: BTreeMap<ConnectionId, Instant>,
    expiries: Vec<(Instant, Arc<str>)>,
    unresumed: Option<Instant>,
    /// The keeper that it is connected to.
    pub(super) keeper: u64,
    shutdown: Option<Mark>,
    /// Whether the keeper's socket accepted everything.
    pub(super) is_flushed: bool,
}

// The server's event loop.
impl World {
    fn with(&mut self, call: impl FnOnce(&mut State)) {
        let Some(server) = self.server.as_mut().filter(|_| !self.is_dying) else { return };
        server.state.objects.now = self.now;
        self.is_changed = true;
        call(&mut server.state);
        let effects = std::mem::take(&mut server.state.effects);
        self.execute(effects);
    }

    fn execute(&mut self, effects: Effects) {
        for effect in effects.0 {
            self.is_dying |= self.fuse == Some(0);
            self.fuse = self.fuse.map(|left| left.saturating_sub(1));
            let Some(server) = self.server.as_mut().filter(|_| !self.is_dying) else {
                self.fuse = None;
                return;
            };
            match effect {
                Effect::Send { client, records } => {
                    let Some(pipe) = self.pipes.get_mut(&client).filter(|pipe| !pipe.closed_by_server) else {
                        continue;
                    };
                    for record in records {
                        let fds = record.fds.len() + record.own.len();
                        let message = Message::decode(&record.bytes, fds).unwrap();
                        if !pipe.closed_by_client {
                            self.oracle.answered(&server.state, &self.clients[pipe.client], &message, self.now.at);
                        }
                        pipe.queue.push_back((message, record.fds));
                    }
                    self.flush(client);
                }
                Effect::Meet(_) => self.oracle.fail("clients without topics were introduced"),
                Effect::SendNext { .. } => self.oracle.fail("a short answer was continued"),
                Effect::End { client, message, .. } => {
                    self.oracle.ended(&message);
                    self.disconnect(client);
                }
                Effect::Close { client, .. } => self.disconnect(client),
                Effect::Deadline { client, deadline } => {
                    match deadline.filter(|_| self.flaw != Some(Flaw::DeadlinesLost)) {
                        Some(deadline) => server.deadlines.insert(client, deadline),
                        None => server.deadlines.remove(&client),
                    };
                }
                Effect::Store => {
                    if self.flaw == Some(Flaw::AnswersTooEarly) {
                        self.answer_early();
                    } else {
                        self.sync_store();
                    }
                }
                Effect::Listen(_) | Effect::CloseFds { .. } | Effect::Count { .. } => {}
            }
        }
    }

    /// Sends queued records if the client's socket has room.
    pub(super) fn flush(&mut self, id: ConnectionId) {
        let Some(server) = &mut self.server else { return };
        let Some(pipe) = self.pipes.get_mut(&id).filter(|pipe| !pipe.is_blocked) else { return };
        let mut records = Vec::new();
        while let Some((message, fds)) = pipe.queue.pop_front() {
            let memory = fds.iter().map(|fd| memory_of(server.state.objects.descriptor(*fd)));
            records.push((message, memory.collect::<Vec<_>>()));
        }
        connection::all_sent(&mut server.state, id);
        for (message, mut memory) in records {
            let is_answer = !matches!(message, Message::Hello(_) | Message::Resumed(_));
            if is_answer && self.strikes(Flaw::AnswersLost) {
                continue;
            }
            if is_answer && self.strikes(Flaw::WrongDescriptor) {
                memory.iter_mut().for_each(|memory| *memory = Some(7));
            }
            let misdirected = is_answer && self.strikes(Flaw::AnswersMisdirected);
            let swapped = is_answer && self.has(Flaw::AnswersSwapped);
            let other = self.pipes.keys().copied().find(|other| misdirected && *other != id).unwrap_or(id);
            let Some(pipe) = self.pipes.get_mut(&other).filter(|pipe| !pipe.closed_by_client) else { continue };
            if swapped {
                pipe.to_client.push_front((message, memory));
            } else {
                pipe.to_client.push_back((message, memory));
            }
        }
    }

    /// The server reads a connection's next record, or its end.
    pub(super) fn deliver(&mut self, id: ConnectionId) {
        let repeats = self.has(Flaw::RequestsRepeated);
        if self.server.is_none() || self.is_dying {
            return;
        }
        let Some(pipe) = self.pipes.get_mut(&id).filter(|pipe| pipe.queue.is_empty() && !pipe.closed_by_server) else {
            return;
        };
        let of = if self.flaw == Some(Flaw::UsersConfused) { 0 } else { pipe.client };
        if !std::mem::replace(&mut pipe.is_accepted, true) {
            let Client { uid, .. } = self.clients[of];
            let pid = self.clients[pipe.client].pid;
            let caller = Caller { connection: id, pid, uid, gid: uid, groups: Arc::from([]), command: None };
            return self.with(|state| connection::connected(state, caller));
        }
        match pipe.to_server.pop_front() {
            Some((message, fds)) => {
                if matches!(message, Message::Release(_)) && self.has(Flaw::ReleasesLost) {
                    return;
                }
                let pid =
                    self.server.as_ref().and_then(|server| server.state.caller(id)).map_or(0, |caller| caller.pid);
                self.oracle.delivered(pid, &message);
                let again = repeats && matches!(message, Message::Delete(_) | Message::Get(_) | Message::List(_));
                let copy = again.then(|| message.clone());
                self.with(|state| dispatch::handle(state, id, message, fds));
                if let Some(copy) = copy {
                    self.with(|state| dispatch::handle(state, id, copy, Vec::new()));
                }
            }
            None if pipe.closed_by_client && self.flaw != Some(Flaw::DisconnectsLost) => self.disconnect(id),
            None => {}
        }
    }

    fn disconnect(&mut self, id: ConnectionId) {
        let (Some(pipe), Some(server)) = (self.pipes.get_mut(&id), &mut self.server) else { return };
        pipe.closed_by_server = true;
        pipe.to_server.clear();
        pipe.queue.clear();
        if pipe.closed_by_client {
            self.pipes.remove(&id);
        }
        server.deadlines.remove(&id);
        if let Some(uid) = server.state.caller(id).map(|caller| caller.uid) {
            server.state.objects.users.sub(uid, Resource::Connections, 1);
        }
        self.oracle.closed.insert(id);
        self.with(|state| connection::disconnected(state, id));
    }

    /// The event loop's background work.
    pub(super) fn turn(&mut self) {
        let Some(server) = self.server.as_mut().filter(|_| !self.is_dying) else { return };
        let expiries = std::mem::take(&mut server.state.objects.expiries);
        if self.flaw != Some(Flaw::ExpiriesLost) {
            server.expiries.extend(expiries.into_iter().filter_map(|(name, at)| Some((at?, name))));
        }
        server.state.objects.garbage.clear();
        self.with(|state| {
            state.objects.clean_up_closed();
            state.objects.begin_turn();
        });
        self.handle_keeper_event();
        let watches = !self.has(Flaw::WatchWakeUpsLost);
        self.with(|state| {
            list::continue_listing(state);
            if watches {
                watch::send_events(state);
            }
        });
        self.observe();
    }

    /// Turns until no work is left.
    pub(super) fn rest(&mut self) {
        let has_work = |world: &Self| world.server.as_ref().is_some_and(|server| server.state.has_work());
        for _ in 0..100 {
            self.turn();
            if !has_work(self) {
                return;
            }
        }
    }

    pub(super) fn tick(&mut self, ms: u64) {
        self.now = Time { at: self.now.at + Duration::from_millis(ms), ms: self.now.ms + ms };
        let now = self.now.at;
        let Some(server) = &mut self.server else { return };
        let due = server.deadlines.iter().filter(|(_, at)| **at <= now).map(|(id, _)| *id).collect::<Vec<_>>();
        let expired = server.expiries.extract_if(.., |(at, _)| *at <= now).collect::<Vec<_>>();
        let is_over = server.unresumed.is_some_and(|at| at <= now) && self.flaw != Some(Flaw::EndlessGrace);
        server.deadlines.retain(|_, at| *at > now);
        for id in due {
            self.with(|state| connection::deadline_passed(state, id));
        }
        for (_, name) in expired {
            self.oracle.expired.push(name.to_string());
            self.with(|state| state.objects.expire(&name));
        }
        if is_over {
            self.end_grace();
        }
        self.turn();
    }

    fn end_grace(&mut self) {
        if let Some(server) = &mut self.server {
            server.unresumed = None;
        }
        self.oracle.grace_is_over = !self.has(Flaw::NoGrace);
        self.with(|state| {
            state.objects.end_unresumed();
            put::end_reservation(state);
        });
    }
}

// The keeper, and the server's death.
impl World {
    pub(super) fn start_keeper(&mut self) {
        if self.keeper.is_none() {
            self.keeper = Some(KeeperProcess::simulated());
            self.keepers += 1;
        }
    }

    pub(super) fn keeper_reads(&mut self) {
        let swaps = self.has(Flaw::DescriptorsSwapped);
        if let Some(keeper) = self.keeper.as_mut().filter(|keeper| keeper.has_unread()) {
            keeper.read_message(swaps);
        }
    }

    pub(super) fn handle_keeper_event(&mut self) {
        if !self.has(Flaw::KeeperWakeUpsLost) {
            self.sync_store();
        }
    }

    /// As `Reactor::sync_store`.
    fn sync_store(&mut self) {
        loop {
            let Some(server) = self.server.as_mut().filter(|_| !self.is_dying) else { return };
            server.state.objects.store.read();
            let flushed = server.state.objects.flush_store();
            server.is_flushed = flushed == Flushed::All;
            if flushed == Flushed::Gone {
                self.replace_keeper();
            }
            let mut any = false;
            self.with(|state| any = put::complete_safe(state));
            if !any {
                break;
            }
        }
        let is_handed_over =
            |server: &Server| server.shutdown.is_some_and(|mark| server.state.objects.store.is_confirmed(mark));
        self.is_dying |= self.server.as_ref().is_some_and(is_handed_over);
    }

    /// As `KeeperLink::replace_keeper` and `KeeperLink::reconnect`, without delays between attempts.
    fn replace_keeper(&mut self) {
        let (keepers, flaw) = (self.keepers, self.flaw);
        let Some(server) = &mut self.server else { return };
        let state = &mut server.state;
        let Some(keeper) = self.keeper.as_mut().filter(|keeper| !keeper.has_server()) else {
            return state.objects.store.disconnect();
        };
        keeper.accept_server(&mut state.objects.store).unwrap();
        if flaw != Some(Flaw::EntriesNotResent) {
            state.objects.resend();
        }
        if flaw != Some(Flaw::CompleteNotSent) {
            state.objects.store.complete();
        }
        state.objects.store.serving();
        if server.shutdown.is_some() {
            server.shutdown = Some(state.objects.store.sync());
        }
        server.keeper = keepers;
        state.objects.flush_store();
    }

    pub(super) fn upgrade(&mut self) {
        if let Some(server) = self.server.as_mut().filter(|server| server.shutdown.is_none()) {
            server.shutdown = Some(server.state.objects.store.sync());
        }
    }

    /// The server's process is gone: its memory, and whatever its sockets had not accepted.
    pub(super) fn end_server(&mut self) {
        let Some(server) = self.server.take() else { return };
        // A fork of another test may hold a copy of the socket, and the keeper would see no end.
        if let Some(socket) = server.state.objects.store.connection() {
            let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
        }
        drop(server.state);
        self.fuse = None;
        self.oracle.keeper_of_dead = Some(server.keeper);
        self.pipes.retain(|_, pipe| {
            pipe.to_server.clear();
            pipe.queue.clear();
            pipe.closed_by_server = true;
            !pipe.closed_by_client
        });
        if let Some(keeper) = &mut self.keeper {
            match self.flaw {
                Some(Flaw::ManifestDamaged) => keeper.damage_manifest(),
                Some(Flaw::RequestsForgotten) => keeper.forget_requests(),
                _ => {}
            }
        }
    }

    pub(super) fn start_server(&mut self) {
        if self.server.is_some() {
            return;
        }
        self.start_keeper();
        if self.has(Flaw::TokensRepeated) {
            seed_tokens();
        }
        let Some(keeper) = &mut self.keeper else { return };
        let taken = keeper.hand_to_server(&self.cancel);
        let [objects, leases, bytes] = LIMITS.map(Some);
        let quota = Quota { objects, leases, bytes, ..Quota::default() };
        let limits = Limits::new(quota, Quota::unlimited(), 100_000);
        let mut objects =
            Objects::restore(self.now, limits, TimeLimits::default().resume, taken.store, taken.inherited);
        objects.hold_own(File::open("/dev/null").unwrap().into(), Vec::new());
        objects.store.complete();
        objects.store.serving();
        let is_restarted = objects.events.restarts() > 0;
        self.is_changed = true;
        self.oracle.server_started(self.keepers, taken.whole, !is_restarted);
        let limit = TimeLimits::default().resume;
        self.server = Some(Server {
            state: State::new(objects, TIMEOUT, false),
            deadlines: BTreeMap::new(),
            expiries: Vec::new(),
            unresumed: is_restarted.then(|| self.now.at + limit),
            keeper: self.keepers,
            shutdown: None,
            is_flushed: false,
        });
        if self.has(Flaw::NoGrace) {
            self.end_grace();
        }
    }

    /// Publishes versions before their descriptors are sent.
    fn answer_early(&mut self) {
        let Some(server) = &mut self.server else { return };
        server.state.changes.pending.iter_mut().for_each(|(mark, _)| *mark = Mark::default());
        self.with(|state| {
            put::complete_safe(state);
        });
    }
}
