//! The promises of the broker so far, and the checks of each answer against them; `states` has the checks of each state.

mod states;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    time::Instant,
};

use super::{
    client::{Client, NAMES, Pending, part_of},
    step::{Kind, Request},
    world::UIDS,
};
use crate::{
    broker::server::admit::Resource,
    broker::server::state::{
        caller::ConnectionId,
        objects::audit::{Audit, AuditedLease, AuditedVersion},
        root::State,
    },
    driver::GRANULARITY,
    error::RefusalCode,
    wire::broker::{EventKind, Message, Resumed, ResumedLease, Token},
};

/// The memory of each part.
pub(super) type Memory = Vec<(String, Vec<Option<usize>>)>;

/// A version that exists.
#[derive(Debug)]
struct Known {
    version: AuditedVersion,
    memory: Memory,
}

/// A requested put. `executed` is the version that it published.
#[derive(Debug, Default)]
struct RequestedPut {
    name: &'static str,
    part: &'static str,
    memory: Vec<Option<usize>>,
    replaces: bool,
    executed: Option<String>,
    /// Whether server and keeper both died after it, so that another attempt may publish another version.
    may_repeat: bool,
}

#[derive(Debug, Default)]
struct RequestedDelete {
    name: &'static str,
    uid: u32,
    is_executed: bool,
    /// Whether server and keeper both died after it, so that another attempt may delete later versions.
    may_repeat: bool,
    is_answered: bool,
    /// The versions whose name it has deleted.
    versions: Vec<String>,
}

impl RequestedDelete {
    fn may_execute(&self) -> bool {
        !self.is_executed || self.may_repeat
    }
}

/// The entries of a server's keeper at the server's start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Restart {
    Everything,
    /// The previous keeper and the previous server have died, and the server had not sent everything to this keeper.
    Part,
    Nothing,
}

#[derive(Debug, Default)]
pub(super) struct Oracle {
    violation: Option<String>,
    numbers: u64,
    puts: HashMap<Token, RequestedPut>,
    /// Deletes with their users, and whether each has been executed.
    deletes: HashMap<Token, RequestedDelete>,
    /// All versions ever published, by id.
    history: HashMap<String, (String, u64, Memory)>,
    versions: BTreeMap<u64, Known>,
    leases: BTreeMap<Token, AuditedLease>,
    /// The maker's connection of each name.
    makers: BTreeMap<String, Option<ConnectionId>>,
    pub(super) closed: BTreeSet<ConnectionId>,
    last_event: u64,
    /// The numbers of versions that were published and replaced before the next check, by name and id.
    replaced: HashMap<(String, String), u64>,
    pub(super) keeper_of_dead: Option<u64>,
    /// The last keeper that had everything.
    pub(super) whole_keeper: u64,
    /// Whether this server no longer waits for clients of the previous server.
    pub(super) grace_is_over: bool,
    /// Versions whose name an answered request has deleted.
    deleted: BTreeSet<String>,
    /// Deletes that were delivered and not executed, and their processes.
    deleting: Vec<(i32, Token)>,
    // Causes and answers of this step.
    released: Vec<Token>,
    pub(super) expired: Vec<String>,
    restart: Option<Restart>,
    answers: Vec<(Pending, Message)>,
}

impl Oracle {
    pub(super) fn fail(&mut self, why: impl Into<String>) {
        self.violation.get_or_insert(why.into());
    }

    pub(super) fn take_violation(&mut self) -> Result<(), String> {
        self.violation.take().map_or(Ok(()), Err)
    }

    /// The number of a request.
    pub(super) fn number(&mut self) -> Token {
        self.numbers += 1;
        let mut token = [0xee; 16];
        token[..8].copy_from_slice(&self.numbers.to_le_bytes());
        Token(token)
    }

    pub(super) fn asked(&mut self, client: &Client, pending: &Pending) {
        match pending.request {
            Request::Put { name, memory, kind } => {
                let memory = if kind == Kind::Long { vec![Some(memory), Some(memory + 4)] } else { vec![Some(memory)] };
                let (name, part) = (NAMES[name], part_of(client.number, kind));
                let replaces = kind != Kind::New;
                self.puts.insert(pending.token, RequestedPut { name, part, memory, replaces, ..Default::default() });
            }
            Request::Delete { name } => {
                let (name, uid) = (NAMES[name], client.uid);
                self.deletes.insert(pending.token, RequestedDelete { name, uid, ..Default::default() });
            }
            _ => {}
        }
    }

    pub(super) fn delivered(&mut self, pid: i32, message: &Message) {
        match message {
            Message::Delete(delete) => self.deleting.extend(delete.request.map(|request| (pid, request))),
            Message::Release(release) => self.released.push(release.token),
            _ => {}
        }
    }

    /// The server closes a connection because of an error.
    pub(super) fn ended(&mut self, message: &str) {
        if !message.starts_with("no hello within") && !message.starts_with("not all segments of a put arrived") {
            self.fail(format!("the server closed a connection: {message}"));
        }
    }

    /// The name of a version, as a number.
    pub(super) fn name_of(&self, id: &str) -> Option<usize> {
        let (name, ..) = self.history.get(id)?;
        NAMES.iter().position(|known| known == name)
    }

    pub(super) fn server_started(&mut self, keeper: u64, whole: bool, is_new: bool) {
        self.grace_is_over = false;
        self.restart = Some(match self.keeper_of_dead == Some(keeper) {
            true if whole || self.whole_keeper == keeper => Restart::Everything,
            // Without the broker's own entry, the keeper knows no more than another one.
            true if !is_new => Restart::Part,
            _ => Restart::Nothing,
        });
    }
}

// Answers.
impl Oracle {
    /// Checks an answer when the server sends it.
    pub(super) fn answered(&mut self, state: &State, client: &Client, message: &Message, now: Instant) {
        if let Message::Resumed(resumed) = message {
            let is_sending = |token: &Token| {
                let holder = state.objects.holder(*token).and_then(|holder| state.clients.get(&holder));
                holder.is_some_and(|holder| holder.is_sending(*token))
            };
            let is_own = |token: &&Token| state.objects.user_of_lease(**token) == Some(client.uid);
            if resumed.lost.iter().filter(is_own).any(|token| !is_sending(token)) {
                self.fail(format!("client {} can't resume a lease that is counted", client.number));
            }
            let is_awaited =
                |lease: &&ResumedLease| resumed.lost.contains(&lease.token) && state.objects.awaits(&lease.id);
            if client.leases.iter().any(|lease| is_awaited(&lease)) && !is_near_quota(state) {
                self.fail(format!("client {} can't resume a lease after the restart", client.number));
            }
        }
        let Some(pending) = client.pending.as_ref().filter(|_| client.is_ready) else { return };
        if let Message::Refused(refusal) = message
            && !is_true(state, client, pending, refusal.code, now)
        {
            let (code, why) = (refusal.code, &refusal.message);
            self.fail(format!("client {} is refused {:?} ({code}): {why}", client.number, pending.request));
        }
        self.answers.push((pending.clone(), message.clone()));
    }

    /// Puts and deletes are executed before they are answered.
    fn check_answers(&mut self) -> Result<(), String> {
        for (pending, message) in std::mem::take(&mut self.answers) {
            let is_done = match &message {
                Message::Published(published) => {
                    let Some(put) = self.puts.get_mut(&pending.token) else { continue };
                    if std::mem::take(&mut put.may_repeat) | put.executed.is_none()
                        && let Some(number) = self.replaced.get(&(put.name.to_owned(), published.id.clone()))
                    {
                        put.executed = Some(published.id.clone());
                        let memory = vec![(put.part.to_owned(), put.memory.clone())];
                        self.history.insert(published.id.clone(), (put.name.to_owned(), *number, memory));
                    }
                    put.executed.as_ref() == Some(&published.id)
                }
                Message::Refused(_) => {
                    self.deleting.retain(|(_, token)| *token != pending.token);
                    true
                }
                Message::Done(_) => {
                    let delete = self.deletes.get_mut(&pending.token);
                    let delete = delete.map(|delete| {
                        (delete.is_answered, delete.may_repeat) = (true, false);
                        &*delete
                    });
                    self.deleted.extend(delete.into_iter().flat_map(|delete| delete.versions.iter().cloned()));
                    delete.is_some_and(|delete| delete.is_executed)
                }
                _ => true,
            };
            if !is_done {
                return Err(format!("{:?} is answered but not executed", pending.request));
            }
        }
        Ok(())
    }

    /// The server died before the keeper had a delete of this version.
    fn undo_delete(&mut self, id: &String) {
        let deletes = self.deletes.values_mut().filter(|delete| !delete.is_answered && delete.versions.contains(id));
        deletes.for_each(|delete| {
            delete.is_executed = false;
            delete.versions.clear();
        });
    }

    /// A client reads an answer.
    pub(super) fn received(&mut self, client: &mut Client, message: Message, memory: &[Option<usize>]) {
        if let Err(why) = self.take(client, message, memory) {
            self.fail(format!("client {} received {why}", client.number));
        }
    }

    fn take_resumed(client: &mut Client, resumed: Resumed) -> Result<(), String> {
        if client.is_ready {
            return match client.pending.take().map(|pending| pending.request) {
                Some(Request::Steal(token)) if resumed.lost.contains(&token) => Ok(()),
                _ => Err("the lease of another user".to_owned()),
            };
        }
        client.leases.retain(|lease| !resumed.lost.contains(&lease.token));
        if client.instance != resumed.instance {
            client.seen = None;
        }
        (client.instance, client.is_ready) = (resumed.instance, true);
        Ok(())
    }

    fn take(&mut self, client: &mut Client, message: Message, memory: &[Option<usize>]) -> Result<(), String> {
        if let Message::Resumed(resumed) = message {
            return Self::take_resumed(client, resumed);
        }
        let Some(Pending { request, token, .. }) = client.pending.clone() else {
            return Err(format!("{} without a request", message.name()));
        };
        match (message, request) {
            (Message::Published(published), Request::Put { name, .. }) => {
                let wanted = self.puts.get(&token).map(|put| put.name);
                let known = self.history.get(&published.id);
                if known.is_none_or(|(known, number, _)| Some(known.as_str()) != wanted || *number != published.version)
                {
                    return Err(format!("an unknown version of `{}`", NAMES[name]));
                }
                client.puts.insert(name, token);
            }
            (
                Message::Lease(lease),
                Request::Get { name, .. }
                | Request::Claim { name, .. }
                | Request::Describe { name }
                | Request::Select { name, .. },
            ) => {
                let Some((known, number, parts)) = self.history.get(&lease.id) else {
                    return Err(format!("a lease of an unknown version of `{}`", NAMES[name]));
                };
                let mut want = parts.iter().flat_map(|(_, memory)| memory).flatten().copied().collect::<Vec<_>>();
                if matches!(request, Request::Describe { .. }) {
                    want.clear();
                }
                let have = memory.iter().flatten().copied().collect::<Vec<_>>();
                if (known.as_str(), *number) != (NAMES[name], lease.version) || want != have {
                    return Err(format!(
                        "memory {have:?} for version {number} of `{known}`, which has memory {want:?}"
                    ));
                }
                match request {
                    Request::Select { lease: of, .. } if of != lease.token => {
                        return Err("another lease than it selects from".to_owned());
                    }
                    Request::Select { .. } => {}
                    _ if client.has_lease(lease.token) => return Err("the same lease twice".to_owned()),
                    _ => {
                        let (token, id) = (lease.token, lease.id.clone());
                        client.leases.push(ResumedLease { token, id, size: GRANULARITY });
                    }
                }
            }
            (Message::Claimed(claimed), Request::Claim { .. }) => client.claim = Some(claimed.token),
            (Message::Done(_), Request::Delete { .. }) | (Message::Objects(_), Request::List) => {}
            (Message::Refused(_), _) => {}
            (Message::Events(events), Request::Watch) => {
                let seen = events.events.iter().map(|event| event.seq).collect::<Vec<_>>();
                // The first record of a watch starts at its request. A restarted server does not have the events before it.
                let is_new = client.seen.is_none_or(|seen| seen >> 32 != events.next >> 32);
                let first =
                    client.seen.filter(|_| !is_new).map_or(events.next + 1 - seen.len() as u64, |seen| seen + 1);
                if events.lost && !is_new || seen != (first..=events.next).collect::<Vec<_>>() {
                    return Err(format!("the events {seen:?} of {first} to {}", events.next));
                }
                client.seen = Some(events.next);
                return Ok(());
            }
            (message, request) => return Err(format!("{} for {request:?}", message.name())),
        }
        client.last = client.pending.take();
        Ok(())
    }
}

/// Whether newer versions have replaced a version.
fn is_replaced(version: &AuditedVersion, audit: &Audit) -> bool {
    let newer = audit.versions.values().filter(|other| other.name == version.name && other.named);
    let newer = newer.filter(|other| other.number > version.number).collect::<Vec<_>>();
    newer.first().is_some_and(|other| newer.len() > other.keep as usize)
}

/// Whether a user may have too little room for a request.
fn is_near_quota(state: &State) -> bool {
    const LARGEST_PUT: u64 = 4 << 20;
    let is_near = |uid: &u32| {
        let needs = [(Resource::Objects, 1), (Resource::Leases, 1), (Resource::Bytes, LARGEST_PUT)];
        needs.into_iter().any(|(resource, more)| state.objects.lacks_room(*uid, resource, more))
    };
    UIDS.iter().any(is_near)
}

/// Whether the last event of a name is its deletion, at this moment. Waiting changes of a name begin together, and are then answered.
fn was_just_deleted(state: &State, name: &str) -> bool {
    let (_, events) = state.objects.events.events_after(0);
    let last = events.filter(|seen| seen.event.name == name).last();
    last.is_some_and(|seen| seen.event.kind == EventKind::Deleted && seen.event.at_ms == state.objects.now.ms)
}

/// Whether a refusal states a fact.
fn is_true(state: &State, client: &Client, pending: &Pending, code: RefusalCode, now: Instant) -> bool {
    let (name, newer_than) = match pending.request {
        Request::Get { name, newer, .. } => (name, newer.then_some(1)),
        Request::Put { name, .. }
        | Request::Claim { name, .. }
        | Request::Delete { name }
        | Request::Describe { name }
        | Request::Select { name, .. } => (name, None),
        Request::Watch | Request::List | Request::Steal(_) => (0, None),
    };
    let name = NAMES[name];
    let exists = state.objects.find(name, None, newer_than).is_some();
    let drafts = state.drafts.iter().filter(|(key, _)| key.name == name).flat_map(|(_, puts)| puts);
    let mut drafts = drafts.map(|put| put.record.payer());
    match code {
        RefusalCode::Absent => match pending.request {
            Request::Select { lease, .. } => state.objects.holder(lease) != client.connection,
            _ => !exists,
        },
        RefusalCode::Exists => exists || drafts.next().is_some() || was_just_deleted(state, name),
        RefusalCode::Timeout => now >= pending.due,
        RefusalCode::Denied => {
            let owner = state.objects.owner_of(name);
            // The next change of the name may have deleted it since.
            owner.is_none_or(|uid| uid != client.uid) || drafts.any(|uid| uid != client.uid)
        }
        RefusalCode::Quota => is_near_quota(state),
        _ => false,
    }
}
