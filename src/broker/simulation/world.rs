//! Server, keeper, clients and the channels between them in one thread, with a clock that only steps move.
//!
//! Descriptors are real memfds, which the kernel passes to the keeper. Records to clients stay in this process.

use std::{
    collections::{BTreeMap, VecDeque},
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

use super::{
    client::{self, Client, Pending},
    oracle::Oracle,
    seed_tokens,
    server::Server,
    step::{Flaw, Kind, Request, Step},
};
use crate::{
    broker::{
        keeper::KeeperProcess,
        server::state::{caller::ConnectionId, objects::VersionFd, root::Time},
    },
    channel::Cancel,
    wire::broker::{Message, Release},
};

pub(super) const CLIENTS: usize = 3;
pub(super) const UIDS: [u32; CLIENTS] = [34_560, 34_560, 34_561];

/// A connection between a client and the server.
#[derive(Debug, Default)]
pub(super) struct Pipe {
    pub(super) client: usize,
    pub(super) is_accepted: bool,
    pub(super) to_server: VecDeque<(Message, Vec<OwnedFd>)>,
    /// Records that the client's socket has not accepted.
    pub(super) queue: VecDeque<(Message, Vec<VersionFd>)>,
    pub(super) is_blocked: bool,
    pub(super) to_client: VecDeque<(Message, Vec<Option<usize>>)>,
    pub(super) closed_by_client: bool,
    pub(super) closed_by_server: bool,
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
    pub(super) fuse: Option<u8>,
    pub(super) is_dying: bool,
    pub(super) oracle: Oracle,
    /// Whether the state may have changed since the last check.
    pub(super) is_changed: bool,
    pub(super) cancel: Cancel,
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

    pub(super) fn has(&self, flaw: Flaw) -> bool {
        self.flaw == Some(flaw)
    }

    /// Whether the flaw has an effect now: every third time.
    pub(super) fn strikes(&mut self, flaw: Flaw) -> bool {
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
            Step::Ask(client, request) => self.ask(client, request),
            Step::Repeat(client) => self.repeat(client),
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
            Step::Steal(client) => self.steal(client),
            Step::Select(client) => self.select(client),
            Step::Connect(client) => self.connect(client),
            Step::HangUp(client) => self.hang_up(client),
            Step::KillClient(client) => self.kill_client(client),
            Step::Turn => self.turn(),
            Step::Flush => self.handle_keeper_event(),
            Step::KeeperReads => self.keeper_reads(),
            Step::Sync => {
                self.keeper_reads();
                self.handle_keeper_event();
            }
            Step::KillServer => self.is_dying = self.server.is_some(),
            Step::KillServerAfter(effects) => self.fuse = self.server.as_ref().map(|_| effects),
            Step::Clog => {
                if let Some(server) = &self.server {
                    KeeperProcess::clog(&server.state.objects.store);
                }
            }
            Step::Upgrade => self.upgrade(),
            Step::StartServer => self.start_server(),
            // A keeper without a server has a twin, which continues with the same entries.
            Step::KillKeeper if self.keeper.as_ref().is_some_and(|keeper| !keeper.has_server()) => {}
            Step::KillKeeper => drop(self.keeper.take().map(KeeperProcess::kill)),
            Step::KeeperHangsUp => self.keeper.iter_mut().for_each(KeeperProcess::hang_up),
            Step::StartKeeper => self.start_keeper(),
            Step::Tick(ms) => self.tick(ms),
            Step::SetClock(ms) => self.now.ms = self.now.ms.saturating_add_signed(ms),
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
            && !server.state.has_work()
            && self.clients.iter().all(|client| client.is_ready)
            && self.pipes.values().all(is_done)
            && self.is_keeper_quiet()
    }

    /// Checks the state within a step. The step reports the violation.
    pub(super) fn observe(&mut self) {
        if let Err(why) = self.check() {
            self.oracle.fail(why);
        }
    }

    /// Ends a server that was told to exit.
    pub(super) fn finish_death(&mut self) {
        if std::mem::take(&mut self.is_dying) {
            self.end_server();
        }
    }

    fn is_keeper_quiet(&self) -> bool {
        let is_sent = |server: &Server| server.state.changes.pending.is_empty();
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
    fn ask(&mut self, client: usize, request: Request) {
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
        let pending = Pending { request, token, is_sent: false, due };
        self.oracle.asked(&self.clients[client], &pending);
        self.clients[client].pending = Some(pending);
        if self.clients[client].is_ready {
            self.send_request(client);
        }
    }

    fn repeat(&mut self, client: usize) {
        let it = &mut self.clients[client];
        let last = it.last.take_if(|last| it.pending.is_none() && !matches!(last.request, Request::Steal(_)));
        let Some(last) = last else { return };
        let is_ready = it.is_ready;
        // A wait starts again.
        it.pending = Some(Pending { due: last.due.max(self.now.at), ..last });
        if is_ready {
            self.send_request(client);
        }
    }

    fn send_request(&mut self, client: usize) {
        let Some(mut pending) = self.clients[client].pending.clone() else { return };
        if pending.is_sent && self.has(Flaw::RequestsRenumbered) {
            pending.token = self.oracle.number();
        }
        pending.is_sent = true;
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
        self.pipes.insert(id, Pipe { client, ..Pipe::default() });
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
        // A lease must not be released while it is being sent again.
        let is_selecting = it.pending.as_ref().is_some_and(|pending| matches!(pending.request, Request::Select { .. }));
        let has_lease = it.claim.is_none() && !it.leases.is_empty() && !is_selecting;
        let lease = has_lease.then(|| it.leases.remove(0).token);
        let Some(token) = it.claim.take().or(lease) else { return };
        self.send(client, Message::Release(Release { token }), Vec::new());
    }

    fn steal(&mut self, client: usize) {
        let uid = self.clients[client].uid;
        let others = self.clients.iter().filter(|other| other.uid != uid);
        if let Some(token) = others.flat_map(|other| &other.leases).next().map(|lease| lease.token)
            && self.clients[client].is_ready
        {
            self.ask(client, Request::Steal(token));
        }
    }

    /// A client requests the memory of its oldest lease.
    fn select(&mut self, client: usize) {
        let Some(lease) = self.clients[client].leases.first() else { return };
        let Some(name) = self.oracle.name_of(&lease.id) else { return };
        self.ask(client, Request::Select { name, lease: lease.token });
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
