//! Server, keeper, clients and the channels between them in one thread, with a clock that only steps move.
//!
//! Verbs, state, log, the server's end of the keeper's connection and the keeper's handling of messages are the broker's own code. This
//! file stands in for `io`: it executes effects, keeps timers, and reconnects to the next keeper in the same order as
//! `io/keeper.rs`. Descriptors are real memfds, which the kernel passes to the keeper; records to clients stay in this process.

use std::{
    collections::{BTreeMap, VecDeque},
    os::fd::OwnedFd,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    client::{self, Client, Pending, memory_of},
    flaws::Flaw,
    log,
    oracle::Oracle,
    seed_tokens,
    step::{Kind, Request, Step},
};
use crate::{
    broker::{
        catalogue::SegmentId,
        keeper::{Flushed, KeeperFlaw, KeeperProcess, Mark},
        server::{
            limits::TimeLimits,
            state::{
                caller::{Caller, ConnectionId},
                objects::{Expiry, Objects},
                quota::Rules,
                room::DescriptorRoom,
                root::State,
                time::Time,
            },
            verbs::{
                connection, dispatch,
                effects::{Effect, Effects, Step as WorkStep, Work},
                list, publish, watch,
            },
        },
    },
    channel::Cancel,
    wire::broker::{Message, Quota, Release, Stop, Token},
};

pub(super) const CLIENTS: usize = 3;
const UIDS: [u32; CLIENTS] = [34_560, 34_560, 34_561];

/// Small enough to be reached. A version of one segment has 2 MiB.
pub(super) const QUOTA: Quota =
    Quota { bytes: Some(14 << 20), device_bytes: None, objects: Some(4), leases: Some(5), connections: None };

/// A time limit of the server, in the order of its use: a hello, and the rest of a put.
const TIMEOUT: Duration = Duration::from_secs(30);

/// A connection between a client and the server.
#[derive(Debug)]
pub(super) struct Pipe {
    pub(super) client: usize,
    is_accepted: bool,
    pub(super) to_server: VecDeque<(Message, Vec<OwnedFd>)>,
    /// Records that the client's socket has not accepted.
    pub(super) queue: VecDeque<(Message, Vec<SegmentId>)>,
    is_blocked: bool,
    pub(super) to_client: VecDeque<(Message, Vec<Option<usize>>)>,
    pub(super) closed_by_client: bool,
    pub(super) closed_by_server: bool,
}

pub(super) struct Server {
    pub(super) state: State,
    pub(super) deadlines: BTreeMap<ConnectionId, Instant>,
    expiries: Vec<(Instant, Arc<str>)>,
    unresumed: Option<Instant>,
    pub(super) work: VecDeque<Work>,
    /// The keeper that it is connected to.
    pub(super) keeper: u64,
    shutdown: Option<Mark>,
    /// Whether the keeper's socket accepted everything.
    is_flushed: bool,
}

pub(super) struct World {
    pub(super) now: Time,
    pub(super) flaw: Option<Flaw>,
    /// How often the flaw could have had an effect.
    chances: u64,
    pub(super) server: Option<Server>,
    pub(super) keeper: Option<KeeperProcess>,
    /// The number of the last keeper.
    pub(super) keepers: u64,
    pub(super) clients: [Client; CLIENTS],
    pub(super) pipes: BTreeMap<ConnectionId, Pipe>,
    last: u64,
    /// How many more effects the server executes before it is killed, and whether that time has come.
    fuse: Option<u8>,
    is_dying: bool,
    pub(super) oracle: Oracle,
    /// Whether the state may have changed since the last check.
    pub(super) is_changed: bool,
    cancel: Cancel,
}

impl World {
    pub(super) fn new(flaw: Option<Flaw>) -> Self {
        seed_tokens();
        let now = Time { at: Instant::now(), ms: 1_700_000_000_000 };
        let clients = std::array::from_fn(|number| Client {
            number,
            uid: UIDS[number],
            pid: number as i32 + 1,
            ..Client::default()
        });
        let (pipes, oracle) = (BTreeMap::new(), Oracle::default());
        let mut world = Self {
            now,
            flaw,
            chances: 0,
            server: None,
            keeper: None,
            keepers: 0,
            clients,
            pipes,
            last: 16,
            fuse: None,
            is_dying: false,
            oracle,
            is_changed: true,
            cancel: Cancel::new().unwrap(),
        };
        world.start_server();
        (0..CLIENTS).for_each(|client| world.connect(client));
        world.exchange_all();
        world
    }

    fn has(&self, flaw: Flaw) -> bool {
        self.flaw == Some(flaw)
    }

    /// Whether the flaw has an effect now: every third time.
    fn strikes(&mut self, flaw: Flaw) -> bool {
        self.chances += u64::from(self.has(flaw));
        self.has(flaw) && self.chances.is_multiple_of(3)
    }

    /// Executes a step, and checks the result.
    pub(super) fn step(&mut self, step: Step) -> Result<(), String> {
        self.apply(step);
        self.check()?;
        self.finish_death();
        Ok(())
    }

    fn apply(&mut self, step: Step) {
        match step {
            Step::Ask(client, request) => self.ask(client, request, None),
            Step::Deliver(at) => {
                let unread = self.pipes.iter().filter(|(_, pipe)| pipe.is_unread()).map(|(id, _)| *id);
                let unread = unread.collect::<Vec<_>>();
                if !unread.is_empty() {
                    self.deliver(unread[at % unread.len()]);
                }
            }
            Step::Receive(client) => self.receive(client),
            Step::Exchange(client) => self.exchange(client),
            Step::Block(client) => self.block(client),
            Step::Release(client) => self.release(client),
            Step::Stop(client) => self.stop(client),
            Step::Steal(client) => self.steal(client),
            Step::Connect(client) => self.connect(client),
            Step::HangUp(client) => self.hang_up(client),
            Step::KillClient(client) => self.kill_client(client),
            Step::Work => self.work(),
            Step::Turn => self.turn(),
            Step::Flush => self.handle_keeper_event(),
            Step::KeeperReads => self.keeper_reads(),
            Step::Sync => {
                self.keeper_reads();
                self.handle_keeper_event();
            }
            Step::KillServer => self.is_dying = self.server.is_some(),
            Step::KillServerAfter(effects) => self.fuse = self.server.as_ref().map(|_| effects),
            Step::Upgrade => self.upgrade(),
            Step::StartServer => self.start_server(),
            Step::KillKeeper => self.keeper = None,
            Step::StartKeeper => self.start_keeper(),
            Step::Tick(ms) => self.tick(ms),
            Step::SetClock(ms) => self.now.ms = self.now.ms.saturating_add_signed(ms),
            Step::Compact => {
                if let Some(server) = &mut self.server {
                    server.state.objects.compact_short_log();
                }
            }
        }
    }

    /// Lets a client, the server and the keeper exchange records until none is left.
    fn exchange(&mut self, client: usize) {
        for _ in 0..32 {
            let Some(id) = self.clients[client].connection else { return };
            let quiet = |pipe: &Pipe| !pipe.is_unread() && pipe.to_client.is_empty() && !pipe.closed_by_server;
            let is_done = self.pipes.get(&id).is_none_or(quiet) && self.is_keeper_quiet();
            if is_done || self.is_dying {
                return;
            }
            self.deliver(id);
            self.keeper_reads();
            self.handle_keeper_event();
            self.observe();
            self.receive(client);
        }
    }

    /// Everything runs until nothing is left to do.
    pub(super) fn exchange_all(&mut self) {
        for _ in 0..8 {
            self.start_keeper();
            self.start_server();
            for client in 0..CLIENTS {
                self.connect(client);
                self.exchange(client);
            }
            self.observe();
            for id in self.pipes.keys().copied().collect::<Vec<_>>() {
                self.deliver(id);
                self.observe();
            }
            self.work();
            for _ in 0..8 {
                self.keeper_reads();
                self.handle_keeper_event();
            }
            self.turn();
            if self.is_quiet() {
                return;
            }
        }
    }

    /// Whether no record is under way, and no work is left.
    fn is_quiet(&self) -> bool {
        let is_done = |pipe: &Pipe| {
            pipe.to_server.is_empty() && pipe.to_client.is_empty() && !pipe.closed_by_client && !pipe.closed_by_server
        };
        let Some(server) = self.server.as_ref().filter(|_| !self.is_dying) else { return false };
        server.is_flushed
            && server.work.is_empty()
            && !server.state.has_work()
            && self.clients.iter().all(|client| client.is_ready)
            && self.pipes.values().all(is_done)
            && self.is_keeper_quiet()
    }

    /// Checks the state within a step. The step reports the violation.
    fn observe(&mut self) {
        if let Err(why) = self.check() {
            self.oracle.fail(why);
        }
    }

    pub(super) fn is_dying(&self) -> bool {
        self.is_dying
    }

    /// Ends a server that was told to exit.
    pub(super) fn finish_death(&mut self) {
        if std::mem::take(&mut self.is_dying) {
            self.end_server();
        }
    }

    fn is_keeper_quiet(&self) -> bool {
        let is_sent = |server: &Server| server.state.pending_versions.queue.is_empty();
        !self.keeper.as_ref().is_some_and(KeeperProcess::has_unread) && self.server.as_ref().is_none_or(is_sent)
    }
}

impl Pipe {
    fn is_unread(&self) -> bool {
        !self.closed_by_server && (!self.to_server.is_empty() || self.closed_by_client)
    }
}

// Clients.
impl World {
    fn ask(&mut self, client: usize, request: Request, steals: Option<Token>) {
        if self.clients[client].pending.is_some() {
            return;
        }
        let token = self.oracle.number();
        let wait = match request {
            Request::Get { wait, .. } | Request::Claim { wait, .. } => wait,
            Request::Put { kind: Kind::Part, .. } => 2000,
            _ => 0,
        };
        let due = self.now.at + Duration::from_millis(wait);
        let pending = Pending { request, token, is_sent: false, is_stopped: false, due, steals };
        self.oracle.asked(&self.clients[client], &pending);
        self.clients[client].pending = Some(pending);
        if self.clients[client].is_ready {
            self.send_request(client);
        }
    }

    fn send_request(&mut self, client: usize) {
        let Some(mut pending) = self.clients[client].pending.clone() else { return };
        if pending.is_sent && self.has(Flaw::RequestsRenumbered) {
            pending.token = self.oracle.number();
        }
        (pending.is_sent, pending.is_stopped) = (true, false);
        let (message, fds) = self.clients[client].message(&pending);
        self.clients[client].pending = Some(pending);
        self.send(client, message, fds);
    }

    fn send(&mut self, client: usize, message: Message, fds: Vec<OwnedFd>) {
        let pipe = self.clients[client].connection.and_then(|id| self.pipes.get_mut(&id));
        if let Some(pipe) = pipe.filter(|pipe| !pipe.closed_by_server) {
            pipe.to_server.push_back((message, fds));
        }
    }

    fn connect(&mut self, client: usize) {
        if self.clients[client].connection.is_some() || self.server.is_none() {
            return;
        }
        self.last += 1;
        let id = ConnectionId(self.last);
        self.clients[client].connection = Some(id);
        let pipe = Pipe {
            client,
            is_accepted: false,
            to_server: VecDeque::new(),
            queue: VecDeque::new(),
            is_blocked: false,
            to_client: VecDeque::new(),
            closed_by_client: false,
            closed_by_server: false,
        };
        self.pipes.insert(id, pipe);
        self.send(client, client::hello(), Vec::new());
    }

    fn hang_up(&mut self, client: usize) {
        let Some(id) = self.clients[client].connection.take() else { return };
        (self.clients[client].is_ready, self.clients[client].claim) = (false, None);
        let Some(pipe) = self.pipes.get_mut(&id) else { return };
        pipe.closed_by_client = true;
        pipe.to_client.clear();
        if pipe.closed_by_server {
            self.pipes.remove(&id);
        }
    }

    pub(super) fn kill_client(&mut self, number: usize) {
        self.hang_up(number);
        let Client { uid, pid, .. } = self.clients[number];
        self.clients[number] = Client { number, uid, pid: pid + 10, ..Client::default() };
    }

    fn block(&mut self, client: usize) {
        let Some(id) = self.clients[client].connection else { return };
        if let Some(pipe) = self.pipes.get_mut(&id) {
            pipe.is_blocked = !pipe.is_blocked;
        }
        self.flush(id);
    }

    pub(super) fn unblock_all(&mut self) {
        self.fuse = None;
        for id in self.pipes.keys().copied().collect::<Vec<_>>() {
            self.pipes.get_mut(&id).expect("it was listed").is_blocked = false;
            self.flush(id);
        }
    }

    fn release(&mut self, client: usize) {
        let it = &mut self.clients[client];
        if !it.is_ready {
            return;
        }
        let lease = if it.claim.is_none() && !it.leases.is_empty() { Some(it.leases.remove(0)) } else { None };
        let Some(token) = it.claim.take().or(lease) else { return };
        self.send(client, Message::Release(Release { token }), Vec::new());
    }

    pub(super) fn stop(&mut self, client: usize) {
        let is_ready = self.clients[client].is_ready;
        let Some(pending) = self.clients[client].pending.as_mut().filter(|_| is_ready) else { return };
        pending.is_stopped = true;
        self.send(client, Message::Stop(Stop {}), Vec::new());
    }

    fn steal(&mut self, client: usize) {
        let uid = self.clients[client].uid;
        let others = self.clients.iter().filter(|other| other.uid != uid);
        if let Some(token) = others.flat_map(|other| &other.leases).next().copied()
            && self.clients[client].is_ready
        {
            self.ask(client, Request::List, Some(token));
        }
    }

    /// A client reads a record, or the end of its connection.
    fn receive(&mut self, client: usize) {
        let Some(id) = self.clients[client].connection else { return };
        let record = self.pipes.get_mut(&id).and_then(|pipe| {
            let record = pipe.to_client.pop_front();
            if record.is_none() && !pipe.closed_by_server { None } else { Some(record) }
        });
        match record {
            None => {}
            Some(None) => {
                self.pipes.remove(&id);
                let it = &mut self.clients[client];
                (it.connection, it.is_ready, it.claim) = (None, false, None);
            }
            Some(Some((message, memory))) => self.received(client, message, &memory),
        }
    }

    fn received(&mut self, client: usize, message: Message, memory: &[Option<usize>]) {
        self.is_changed = true;
        let skips_leases = self.has(Flaw::LeasesNotResumed);
        match &message {
            Message::Hello(_) => {
                let mut resume = self.clients[client].resume();
                if skips_leases {
                    resume.leases.clear();
                }
                self.send(client, Message::Resume(resume), Vec::new());
            }
            Message::Send(_) => {
                if let Some((rest, fds)) = self.clients[client].rest_of_put() {
                    self.send(client, rest, fds);
                }
            }
            Message::Resumed(_) if !self.clients[client].is_ready => {
                self.oracle.received(&mut self.clients[client], message, memory);
                self.send_request(client);
            }
            _ => self.oracle.received(&mut self.clients[client], message, memory),
        }
    }
}

// The server's event loop.
impl World {
    fn with(&mut self, call: impl FnOnce(&mut State, &mut Effects)) {
        let Some(server) = self.server.as_mut().filter(|_| !self.is_dying) else { return };
        server.state.objects.now = self.now;
        self.is_changed = true;
        let mut effects = Effects::default();
        call(&mut server.state, &mut effects);
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
                        let fds = record.fds.len() + usize::from(record.own.is_some());
                        let message = Message::decode(&record.bytes, fds).unwrap();
                        if !pipe.closed_by_client {
                            self.oracle.answered(&server.state, &self.clients[pipe.client], &message, self.now.at);
                        }
                        pipe.queue.push_back((message, record.fds));
                    }
                    self.flush(client);
                }
                Effect::SendNext { .. } => self.oracle.fail("a short answer was continued"),
                Effect::End { client, message, .. } => {
                    self.oracle.ended(&message);
                    self.disconnect(client);
                }
                Effect::Close { client, .. } => self.disconnect(client),
                Effect::Deadline { client, deadline } => {
                    match deadline.filter(|_| self.flaw != Some(Flaw::DeadlinesLost)) {
                        Some(deadline) => server.deadlines.insert(client, deadline.at),
                        None => server.deadlines.remove(&client),
                    };
                }
                Effect::Work(work) => server.work.push_back(work),
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
    fn flush(&mut self, id: ConnectionId) {
        let Some(server) = &mut self.server else { return };
        let Some(pipe) = self.pipes.get_mut(&id).filter(|pipe| !pipe.is_blocked) else { return };
        let mut records = Vec::new();
        while let Some((message, segments)) = pipe.queue.pop_front() {
            let memory = segments.iter().map(|segment| memory_of(server.state.objects.segment(*segment)));
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
        let Some(server) = self.server.as_mut().filter(|_| !self.is_dying) else { return };
        let Some(pipe) = self.pipes.get_mut(&id).filter(|pipe| pipe.queue.is_empty() && !pipe.closed_by_server) else {
            return;
        };
        let of = if self.flaw == Some(Flaw::UsersConfused) { 0 } else { pipe.client };
        if !std::mem::replace(&mut pipe.is_accepted, true) {
            let Client { uid, .. } = self.clients[of];
            let pid = self.clients[pipe.client].pid;
            let caller = Caller { connection: id, pid, uid, gid: uid, groups: Arc::from([]), command: None };
            return self.with(|state, effects| connection::connected(state, effects, caller));
        }
        match pipe.to_server.pop_front() {
            Some((message, fds)) => {
                let room = DescriptorRoom { used: server.state.objects.descriptors(), limit: 100_000, closing: 0 };
                if matches!(message, Message::Release(_)) && self.has(Flaw::ReleasesLost) {
                    return;
                }
                self.oracle.delivered(id, &message);
                let again = repeats && matches!(message, Message::Delete(_) | Message::Get(_) | Message::List(_));
                let copy = again.then(|| message.clone());
                self.with(|state, effects| dispatch::handle(state, effects, &room, id, message, fds));
                if let Some(copy) = copy {
                    self.with(|state, effects| dispatch::handle(state, effects, &room, id, copy, Vec::new()));
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
            server.state.objects.users().remove_connection(uid);
        }
        self.oracle.closed(id);
        self.with(|state, effects| connection::disconnected(state, effects, id));
    }

    fn work(&mut self) {
        let Some(mut work) = self.server.as_mut().and_then(|server| server.work.pop_front()) else { return };
        match (work.job)() {
            WorkStep::Done(_) if self.has(Flaw::WorkLost) => {}
            WorkStep::Done(outcome) => {
                self.with(|state, effects| connection::work_done(state, effects, work.client, outcome));
            }
            WorkStep::More(job) => {
                work.job = job;
                if let Some(server) = &mut self.server {
                    server.work.push_back(work);
                }
            }
        }
    }

    /// The background work of a turn of the event loop.
    pub(super) fn turn(&mut self) {
        let Some(server) = self.server.as_mut().filter(|_| !self.is_dying) else { return };
        let objects = &mut server.state.objects;
        self.is_changed = true;
        objects.now = self.now;
        objects.clean_up_closed();
        objects.begin_turn();
        objects.release_some();
        objects.continue_compaction();
        let expiries = objects.take_expiries();
        if self.flaw != Some(Flaw::ExpiriesLost) {
            server.expiries.extend(expiries.into_iter().map(|Expiry { name, at, .. }| (at, name)));
        }
        drop(objects.take_garbage());
        if self.strikes(Flaw::ReleasedTwice) {
            self.release_segment();
        }
        self.handle_keeper_event();
        let watches = !self.has(Flaw::WatchWakeUpsLost);
        self.with(|state, effects| {
            list::continue_listing(state, effects);
            if watches {
                watch::send_events(state, effects);
            }
        });
    }

    fn tick(&mut self, ms: u64) {
        self.now = Time { at: self.now.at + Duration::from_millis(ms), ms: self.now.ms + ms };
        self.turn();
        let now = self.now.at;
        let Some(server) = &mut self.server else { return };
        let due = server.deadlines.iter().filter(|(_, at)| **at <= now).map(|(id, _)| *id).collect::<Vec<_>>();
        let expired = server.expiries.extract_if(.., |(at, _)| *at <= now).collect::<Vec<_>>();
        let is_over = server.unresumed.is_some_and(|at| at <= now) && self.flaw != Some(Flaw::EndlessGrace);
        server.deadlines.retain(|_, at| *at > now);
        for id in due {
            self.with(|state, effects| connection::deadline_passed(state, effects, id));
        }
        for (_, name) in expired {
            self.oracle.expired(&name);
            self.with(|state, _| state.objects.expire(&name));
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
        let is_early = self.has(Flaw::NoGrace);
        self.oracle.grace_ended(is_early);
        self.with(|state, effects| {
            state.objects.end_unresumed();
            publish::end_reservation(state, effects);
        });
    }
}

// The keeper, and the server's death.
impl World {
    fn start_keeper(&mut self) {
        if self.keeper.is_none() {
            self.keeper = Some(KeeperProcess::simulated());
            self.keepers += 1;
        }
    }

    pub(super) fn keeper_reads(&mut self) {
        let flaw = match self.flaw {
            Some(Flaw::RemovalsIgnored) => Some(KeeperFlaw::IgnoresRemovals),
            Some(Flaw::KeeperMessagesSwapped) => Some(KeeperFlaw::SwapsMessages),
            Some(Flaw::HoldsLost) => Some(KeeperFlaw::LosesHold),
            _ => None,
        };
        if let Some(keeper) = self.keeper.as_mut().filter(|keeper| keeper.has_unread()) {
            keeper.read_message(flaw);
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
            server.state.objects.store_mut().read();
            let flushed = server.state.objects.flush_store();
            server.is_flushed = flushed == Flushed::All;
            if flushed == Flushed::Gone {
                self.replace_keeper();
            }
            let mut any = false;
            self.with(|state, effects| any = publish::publish_confirmed(state, effects));
            if !any {
                break;
            }
        }
        let is_handed_over =
            |server: &Server| server.shutdown.is_some_and(|mark| server.state.objects.store().is_confirmed(mark));
        self.is_dying |= self.server.as_ref().is_some_and(is_handed_over);
    }

    /// As `KeeperLink::replace_keeper` and `KeeperLink::reconnect`, without delays between attempts.
    fn replace_keeper(&mut self) {
        let (keepers, flaw) = (self.keepers, self.flaw);
        let Some(server) = &mut self.server else { return };
        let state = &mut server.state;
        let Some(keeper) = self.keeper.as_mut().filter(|_| keepers != server.keeper) else {
            return state.objects.store_mut().disconnect();
        };
        keeper.accept_server(state.objects.store_mut()).unwrap();
        state.objects.resend_catalogue().unwrap();
        if flaw != Some(Flaw::SegmentsNotResent) {
            state.objects.resend_segments();
        }
        if flaw != Some(Flaw::CompleteNotSent) {
            state.objects.store_mut().complete();
        }
        state.objects.store_mut().serving();
        if server.shutdown.is_some() {
            server.shutdown = Some(state.objects.store_mut().sync());
        }
        let mark = state.objects.store().mark();
        if flaw != Some(Flaw::MarksNotMoved) {
            state.pending_versions.queue.iter_mut().for_each(|stored| stored.staged.mark = mark);
        }
        server.keeper = keepers;
        state.objects.flush_store();
    }

    fn upgrade(&mut self) {
        if let Some(server) = self.server.as_mut().filter(|server| server.shutdown.is_none()) {
            server.shutdown = Some(server.state.objects.store_mut().sync());
        }
    }

    /// The server's process is gone: its memory, and whatever its sockets had not accepted.
    fn end_server(&mut self) {
        let Some(server) = self.server.take() else { return };
        drop(server.state);
        self.fuse = None;
        self.oracle.server_ended(server.keeper);
        self.pipes.retain(|_, pipe| {
            pipe.to_server.clear();
            pipe.queue.clear();
            pipe.closed_by_server = true;
            !pipe.closed_by_client
        });
        if let Some(keeper) = &mut self.keeper {
            if self.flaw == Some(Flaw::UnreadDropped) {
                keeper.drop_unread();
            }
            log::damage(keeper, self.flaw);
        }
    }

    fn start_server(&mut self) {
        if self.server.is_some() {
            return;
        }
        self.start_keeper();
        if self.has(Flaw::TokensRepeated) {
            seed_tokens();
        }
        let Some(keeper) = &mut self.keeper else { return };
        let taken = keeper.hand_to_server(&self.cancel);
        let mut inherited = taken.inherited;
        if self.flaw == Some(Flaw::OldLog) {
            log::hide_newest(&mut inherited.catalogues);
        }
        let rules = Rules::new(QUOTA, Quota::unlimited());
        let restored = Objects::restore(self.now, rules, taken.store, inherited.catalogues, inherited.segments);
        let mut objects = restored.unwrap();
        objects.store_mut().complete();
        objects.store_mut().serving();
        let is_restarted = objects.journal().restarts() > 0;
        self.is_changed = true;
        self.oracle.server_started(self.keepers, taken.whole, objects.journal().last_event());
        let limit = TimeLimits::default().resume;
        self.server = Some(Server {
            state: State::new(objects, TIMEOUT, false),
            deadlines: BTreeMap::new(),
            expiries: Vec::new(),
            unresumed: is_restarted.then(|| self.now.at + limit),
            work: VecDeque::new(),
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
        server.state.pending_versions.queue.iter_mut().for_each(|version| version.staged.mark = Mark::default());
        self.with(|state, effects| {
            publish::publish_confirmed(state, effects);
        });
    }

    fn release_segment(&mut self) {
        let Some(server) = &mut self.server else { return };
        let objects = &mut server.state.objects;
        let versions = objects.audit(&[]).map(|audit| audit.versions).unwrap_or_default();
        if let Some(version) = versions.values().next() {
            objects.release(version.payer, version.parts[0].1[0]);
        }
    }
}
