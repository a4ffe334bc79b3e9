//! The invariants that hold after each step and at the end of a schedule.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    client::memory_of,
    oracle::Memory,
    server::Server,
    step::{Request, Step},
    world::{CLIENTS, Pipe, UIDS, World},
};
use crate::{
    broker::{
        keeper::KeeperProcess,
        server::admit::Resource,
        server::state::{
            caller::ConnectionId,
            objects::audit::Audit,
            root::{Change, PendingChange, PendingRequest, State},
        },
    },
    wire::broker::{Message, Token},
};

fn require(holds: bool, why: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(why()) }
}

impl Server {
    fn audit(&self) -> Result<Audit, String> {
        self.state.objects.audit()
    }
}

impl World {
    /// Checks the state after a step.
    pub(super) fn check(&mut self) -> Result<(), String> {
        self.oracle.take_violation()?;
        // A new keeper is empty.
        let has_everything = |keeper: &&KeeperProcess| keeper.is_whole() && keeper.entries().next().is_some();
        if self.keeper.as_ref().filter(has_everything).is_some() {
            self.oracle.whole_keeper = self.keepers;
        }
        let Some(server) = &self.server else { return Ok(()) };
        if !std::mem::take(&mut self.is_changed) {
            return Ok(());
        }
        let audit = server.audit()?;
        let objects = &server.state.objects;
        let memory = audit.versions.iter().map(|(key, version)| {
            let of = |(part, segments): &(String, Vec<_>)| {
                (part.clone(), segments.iter().map(|fd| memory_of(objects.descriptor(*fd))).collect())
            };
            (*key, version.parts.iter().map(of).collect::<Memory>())
        });
        let memory = memory.collect::<BTreeMap<u64, Memory>>();
        self.oracle.check_versions(&audit, &memory, &objects.events)?;
        self.check_quotas()?;
        if self.is_dying {
            return Ok(());
        }
        self.check_holders(&audit)?;
        self.check_waits()?;
        self.check_reservations()?;
        self.check_claims()
    }

    /// Each lease has a connected holder of its user that knows it, and each client's leases are counted.
    fn check_holders(&self, audit: &Audit) -> Result<(), String> {
        let Some(server) = &self.server else { return Ok(()) };
        for (token, lease) in &audit.leases {
            if lease.is_closing {
                continue;
            }
            let holder = lease.holder;
            let user = server.state.clients.get(&holder).map(|client| client.caller.uid);
            require(user == Some(lease.uid), || format!("uid {user:?} holds a lease of uid {}", lease.uid))?;
            let Some(pipe) = self.pipes.get(&holder).filter(|pipe| !pipe.closed_by_client) else { continue };
            let known = self.clients[pipe.client].has_lease(*token) || pipe.carries(*token);
            require(known, || format!("client {} does not know a lease that is counted for it", pipe.client))?;
        }
        for client in self.clients.iter().filter(|client| client.is_ready) {
            let Some(id) = client.connection else { continue };
            let is_open = self.pipes.get(&id).is_some_and(|pipe| !pipe.closed_by_server);
            let counted = |token: &Token| audit.leases.get(token).is_some_and(|lease| lease.holder == id);
            require(!is_open || client.leases.iter().map(|lease| &lease.token).all(counted), || {
                format!("client {} holds a lease that is not counted for it", client.number)
            })?;
        }
        Ok(())
    }

    /// A wait ends as soon as its condition holds, and has a deadline.
    fn check_waits(&self) -> Result<(), String> {
        let Some(server) = &self.server else { return Ok(()) };
        let State { clients, objects, claims, drafts, changes, .. } = &server.state;
        let has_deadline = |id: &ConnectionId| server.deadlines.get(id).is_some_and(|at| *at > self.now.at);
        for (id, client) in clients {
            let lasts = match &client.request {
                PendingRequest::Object(waiting) => {
                    let object = &waiting.get.objects[0];
                    let exists = objects.find(&object.name, object.version, object.newer_than).is_some();
                    let is_claimed = waiting.get.claim.is_none() || claims.holder(&object.name).is_some();
                    !exists && is_claimed && has_deadline(id)
                }
                PendingRequest::Parts(key) => drafts.contains_key(key) && has_deadline(id),
                PendingRequest::Upload { .. } => has_deadline(id),
                PendingRequest::Change => {
                    let of_change = |change: &Change| match change {
                        Change::Put(put) => put.makers.contains(id),
                        Change::Delete(of, _) => of == id,
                    };
                    changes.pending.iter().any(|(_, change)| match change {
                        PendingChange::Put { makers, .. } => makers.contains(id),
                        PendingChange::Request(of) => of == id,
                    }) || changes.waiting.values().flatten().any(of_change)
                }
                _ => true,
            };
            require(lasts, || format!("connection {} waits without end: {:?}", id.0, client.request))?;
        }
        Ok(())
    }

    /// A name has at most one claim, of a connected client, and none if it exists.
    fn check_claims(&self) -> Result<(), String> {
        let Some(server) = &self.server else { return Ok(()) };
        let mut names = BTreeSet::new();
        for claim in server.state.claims.list("") {
            let connected = server.state.clients.values().any(|client| client.caller.pid == claim.pid);
            let is_free = server.state.objects.current_key(&claim.name).is_none();
            require(connected && is_free && names.insert(claim.name.clone()), || {
                format!("the claim on `{}` by pid {} is left over", claim.name, claim.pid)
            })?;
        }
        Ok(())
    }

    fn check_quotas(&self) -> Result<(), String> {
        let Some(server) = &self.server else { return Ok(()) };
        let resources = [Resource::Objects, Resource::Leases, Resource::Bytes];
        let mut exceeded = UIDS.iter().flat_map(|uid| resources.map(|resource| (*uid, resource)));
        let exceeded = exceeded.find(|(uid, resource)| server.state.objects.lacks_room(*uid, *resource, 0));
        require(exceeded.is_none(), || format!("a user has more than its quota: {exceeded:?}"))
    }

    /// Descriptors are reserved exactly for uploads, drafts and waiting puts.
    fn check_reservations(&self) -> Result<(), String> {
        let Some(server) = &self.server else { return Ok(()) };
        let uploads = server.state.clients.values().map(|client| match &client.request {
            PendingRequest::Upload { version, .. } => version.record.descriptors(),
            _ => 0,
        });
        let drafts = server.state.drafts.values().flatten();
        let queued = server.state.changes.waiting.values().flatten().filter_map(|change| match change {
            Change::Put(put) => Some(&**put),
            Change::Delete(..) => None,
        });
        let reserved = uploads.sum::<usize>() + drafts.chain(queued).map(|put| put.record.descriptors()).sum::<usize>();
        require(server.state.objects.reserved() == reserved, || {
            format!("{} descriptors are reserved for {reserved}", server.state.objects.reserved())
        })
    }
}

impl Pipe {
    /// Whether a record under way concerns this lease.
    fn carries(&self, token: Token) -> bool {
        let is_lease = |message: &Message| matches!(message, Message::Lease(lease) if lease.token == token);
        self.queue.iter().any(|(message, _)| is_lease(message))
            || self.to_client.iter().any(|(message, _)| is_lease(message))
            || self.to_server.iter().any(|(message, _)| matches!(message, Message::Release(of) if of.token == token))
    }
}

// The end of a schedule.
impl World {
    /// Lets everything finish: all requests are answered, also by another server. When all clients and names
    /// are gone, nothing is left.
    pub(super) fn finish(&mut self) -> Result<(), String> {
        self.unblock_all();
        self.settle()?;
        self.check_keeper()?;
        self.rest();
        self.step(Step::KillServer)?;
        self.settle()?;
        (0..CLIENTS).try_for_each(|client| self.step(Step::Repeat(client)))?;
        self.settle()?;
        for wait in [4000, 40_000] {
            self.step(Step::Tick(wait))?;
            self.settle()?;
        }
        for client in 0..CLIENTS {
            let Some(pending) = self.clients[client].pending.clone() else { continue };
            require(pending.request == Request::Watch, || {
                format!("client {client} gets no answer to {:?}", pending.request)
            })?;
            let last = self.server.as_ref().map(|server| server.state.objects.events.last_event());
            require(self.clients[client].seen == last, || {
                format!("client {client} has seen the events up to {:?} of {last:?}", self.clients[client].seen)
            })?;
        }
        self.settle()?;
        self.check_keeper()?;
        (0..CLIENTS).try_for_each(|client| self.step(Step::KillClient(client)))?;
        self.drain()
    }

    fn settle(&mut self) -> Result<(), String> {
        self.exchange_all();
        self.check()?;
        self.finish_death();
        self.exchange_all();
        self.check()
    }

    /// The keeper holds the broker's entries, and nothing else.
    fn check_keeper(&self) -> Result<(), String> {
        let (Some(server), Some(keeper)) = (&self.server, &self.keeper) else { return Ok(()) };
        require(keeper.is_whole(), || "the keeper does not know that it has everything".to_owned())?;
        let text =
            |(key, manifest, fds): (u64, &[u8], usize)| (key, String::from_utf8_lossy(manifest).into_owned(), fds);
        let held = keeper.entries().map(text).collect::<BTreeSet<_>>();
        let entries = server.state.objects.entries().collect::<Vec<_>>();
        let wanted = entries.iter().map(|(key, manifest, fds)| text((*key, manifest, *fds))).collect::<BTreeSet<_>>();
        require(held == wanted, || {
            let (more, less) = (held.difference(&wanted), wanted.difference(&held));
            format!("the keeper also holds {:?} and lacks {:?}", more.collect::<Vec<_>>(), less.collect::<Vec<_>>())
        })
    }

    fn drain(&mut self) -> Result<(), String> {
        for _ in 0..3 {
            for id in self.pipes.keys().copied().collect::<Vec<_>>() {
                self.deliver(id);
            }
            self.step(Step::Tick(11_000))?;
            self.rest();
        }
        let Some(server) = &mut self.server else { return Ok(()) };
        let audit = server.audit()?;
        require(audit.leases.is_empty(), || format!("{} leases are left without clients", audit.leases.len()))?;
        let ending = audit.versions.values().find(|version| version.lifetime != Default::default());
        require(ending.is_none(), || format!("a name has not expired: {ending:?}"))?;
        require(server.state.drafts.is_empty() && server.state.claims.list("").is_empty(), || {
            "drafts or claims are left without clients".to_owned()
        })?;
        for name in audit.makers.keys() {
            server.state.objects.remove_unasked(name, "the end");
        }
        self.rest();
        let Some(server) = &mut self.server else { return Ok(()) };
        let left = server.state.objects.total().versions;
        require(left == 0, || format!("{left} versions are left without names"))?;
        require(server.state.objects.users.totals(None, 1 << 16).is_empty(), || "a user is left".to_owned())?;
        for _ in 0..8 {
            self.keeper_reads();
            self.handle_keeper_event();
        }
        self.check_keeper()
    }
}
