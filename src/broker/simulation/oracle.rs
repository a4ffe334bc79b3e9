//! The promises of the broker so far, and the checks of each state against them.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    time::Instant,
};

use super::{
    client::{Client, NAMES, Pending, part_of},
    server::LIMITS,
    step::{Kind, Request},
};
use crate::{
    broker::server::state::{
        caller::ConnectionId,
        objects::{
            Journal,
            audit::{Audit, AuditedLease, AuditedVersion},
        },
        root::State,
    },
    error::RefusalCode,
    wire::broker::{EventKind, Lifetime, Message, Token},
};

/// The memory of each part.
pub(super) type Memory = Vec<(String, Vec<Option<usize>>)>;

/// A version that exists, and the keeper that had it when it was published.
#[derive(Debug)]
struct Known {
    version: AuditedVersion,
    memory: Memory,
    keeper: u64,
}

/// A requested put. `executed` is the version that it published.
#[derive(Debug)]
struct RequestedPut {
    name: &'static str,
    part: &'static str,
    memory: Vec<Option<usize>>,
    replaces: bool,
    executed: Option<String>,
}

#[derive(Debug)]
struct RequestedDelete {
    name: &'static str,
    uid: u32,
    is_executed: bool,
}

/// A server's start.
#[derive(Debug, Clone, Copy)]
struct Restart {
    keeper: u64,
    /// Whether the previous server had this keeper, and whether it has everything.
    same_keeper: bool,
    whole: bool,
    /// Whether the previous server was killed in a call, of which it had written a part.
    torn: bool,
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
    /// How many versions were lost because server and keeper both died.
    pub(super) losses: usize,
    /// The numbers of versions that were published and replaced before the next check, by name and id.
    replaced: HashMap<(String, String), u64>,
    pub(super) keeper_of_dead: Option<u64>,
    /// Whether this server no longer waits for clients of the previous server.
    pub(super) grace_is_over: bool,
    // Causes and answers of this step.
    deleting: Vec<Token>,
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
            _ if pending.steals.is_some() => {}
            Request::Put { name, memory, kind } => {
                let memory = if kind == Kind::Long { vec![Some(memory), Some(memory + 4)] } else { vec![Some(memory)] };
                let (name, part) = (NAMES[name], part_of(client.number, kind));
                let put = RequestedPut { name, part, memory, replaces: kind != Kind::New, executed: None };
                self.puts.insert(pending.token, put);
            }
            Request::Delete { name } => {
                let delete = RequestedDelete { name: NAMES[name], uid: client.uid, is_executed: false };
                self.deletes.insert(pending.token, delete);
            }
            _ => {}
        }
    }

    pub(super) fn delivered(&mut self, message: &Message) {
        match message {
            Message::Delete(delete) => self.deleting.extend(delete.request),
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

    pub(super) fn server_started(&mut self, keeper: u64, whole: bool, torn: bool, is_new: bool) {
        // A new keeper that has not received the log yet knows no more than the next keeper.
        let has_published = self.versions.values().any(|known| known.keeper == keeper);
        let has_log = whole || has_published || !is_new;
        let same_keeper = self.keeper_of_dead == Some(keeper) && has_log;
        self.grace_is_over = false;
        self.restart = Some(Restart { keeper, same_keeper, whole, torn });
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
                    if put.executed.is_none()
                        && let Some(number) = self.replaced.get(&(put.name.to_owned(), published.id.clone()))
                    {
                        put.executed = Some(published.id.clone());
                        let memory = vec![(put.part.to_owned(), put.memory.clone())];
                        self.history.insert(published.id.clone(), (put.name.to_owned(), *number, memory));
                    }
                    put.executed.as_ref() == Some(&published.id)
                }
                Message::Done(_) => self.deletes.get(&pending.token).is_some_and(|delete| delete.is_executed),
                _ => true,
            };
            if !is_done {
                return Err(format!("{:?} is answered but not executed", pending.request));
            }
        }
        Ok(())
    }

    /// A client reads an answer.
    pub(super) fn received(&mut self, client: &mut Client, message: Message, memory: &[Option<usize>]) {
        if let Err(why) = self.take(client, message, memory) {
            self.fail(format!("client {} received {why}", client.number));
        }
    }

    fn take(&mut self, client: &mut Client, message: Message, memory: &[Option<usize>]) -> Result<(), String> {
        let steals = client.pending.as_ref().and_then(|pending| pending.steals);
        if let Message::Resumed(resumed) = &message {
            if !client.is_ready {
                client.leases.retain(|token| !resumed.lost.contains(token));
                if client.instance != resumed.instance {
                    client.seen = None;
                }
                client.instance = resumed.instance.clone();
                client.is_ready = true;
                return Ok(());
            }
            client.pending = None;
            return match steals {
                Some(token) if resumed.lost.contains(&token) => Ok(()),
                _ => Err("the lease of another user".to_owned()),
            };
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
            (Message::Lease(lease), Request::Get { name, .. } | Request::Claim { name, .. }) => {
                let Some((known, number, parts)) = self.history.get(&lease.id) else {
                    return Err(format!("a lease of an unknown version of `{}`", NAMES[name]));
                };
                let want = parts.iter().flat_map(|(_, memory)| memory).flatten().copied().collect::<Vec<_>>();
                let have = memory.iter().flatten().copied().collect::<Vec<_>>();
                if (known.as_str(), *number) != (NAMES[name], lease.version) || want != have {
                    return Err(format!(
                        "memory {have:?} for version {number} of `{known}`, which has memory {want:?}"
                    ));
                }
                if client.leases.contains(&lease.token) {
                    return Err("the same lease twice".to_owned());
                }
                client.leases.push(lease.token);
            }
            (Message::Claimed(claimed), Request::Claim { .. }) => client.claim = Some(claimed.token),
            (Message::Done(_), Request::Delete { .. }) | (Message::Objects(_), Request::List) => {}
            (Message::Refused(_), _) => {}
            (Message::Events(events), Request::Watch) => {
                let seen = events.events.iter().map(|event| event.seq).collect::<Vec<_>>();
                // The first record of a watch starts at its request.
                let first = client.seen.map_or(events.next + 1 - seen.len() as u64, |seen| seen + 1);
                if events.lost || seen != (first..=events.next).collect::<Vec<_>>() {
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

/// The objects, leases and bytes of each user. `drafts` are bytes of unpublished versions.
pub(super) fn usage<'a>(
    versions: impl Iterator<Item = &'a AuditedVersion>,
    leases: impl Iterator<Item = &'a AuditedLease>,
    drafts: impl Iterator<Item = (u32, u64)>,
) -> BTreeMap<u32, [u64; 3]> {
    let mut usage = BTreeMap::<u32, [u64; 3]>::new();
    for version in versions {
        usage.entry(version.owner).or_default()[0] += u64::from(version.kept);
        usage.entry(version.payer).or_default()[2] += version.bytes;
    }
    leases.for_each(|lease| usage.entry(lease.uid).or_default()[1] += 1);
    drafts.for_each(|(uid, bytes)| usage.entry(uid).or_default()[2] += bytes);
    usage
}

/// Whether a user may have too little room for a request.
fn is_near_quota(state: &State) -> bool {
    // Without tables, which have a few bytes.
    const LARGEST_PUT: u64 = 4 << 20;
    let drafts = state.drafts.values().map(|draft| (draft.uid, draft.puts.len() as u64 * LARGEST_PUT));
    let audit = state.objects.copy();
    let [objects, leases, bytes] = LIMITS;
    let is_near = |used: &[u64; 3]| used[0] >= objects || used[1] >= leases || used[2] + LARGEST_PUT >= bytes;
    usage(audit.versions.values(), audit.leases.values(), drafts).values().any(is_near)
}

/// Whether a refusal states a fact.
fn is_true(state: &State, client: &Client, pending: &Pending, code: RefusalCode, now: Instant) -> bool {
    let (name, newer_than) = match pending.request {
        Request::Get { name, newer, .. } => (name, newer.then_some(1)),
        Request::Put { name, .. } | Request::Claim { name, .. } | Request::Delete { name } => (name, None),
        Request::Watch | Request::List => (0, None),
    };
    let name = NAMES[name];
    let exists = state.objects.find(name, None, newer_than).is_some();
    let drafts = state.drafts.iter().filter(|(key, _)| key.name == name).map(|(_, draft)| draft);
    let mut drafts = drafts.map(|draft| draft.uid);
    match code {
        RefusalCode::Absent => !exists,
        RefusalCode::Exists => exists || drafts.next().is_some(),
        RefusalCode::Timeout => now >= pending.due,
        RefusalCode::Stopped => pending.is_stopped,
        RefusalCode::Denied => {
            let owner = state.objects.owner_of(name);
            owner.is_some_and(|uid| uid != client.uid) || drafts.any(|uid| uid != client.uid)
        }
        RefusalCode::Quota => is_near_quota(state),
        _ => false,
    }
}

// States.
impl Oracle {
    /// Compares a state with the last one: each change has a cause.
    pub(super) fn check_versions(
        &mut self,
        audit: &Audit,
        memory: &BTreeMap<u64, Memory>,
        keeper: u64,
        journal: &Journal,
    ) -> Result<(), String> {
        let restart = self.restart.take();
        if restart.is_some_and(|restart| !restart.same_keeper) {
            self.forget_everything();
        }
        let published = journal.events_after(self.last_event).1.map(|seen| &seen.event);
        let published = published.filter(|of| matches!(of.kind, EventKind::Published | EventKind::Replaced));
        let published = published.collect::<Vec<_>>();
        self.last_event = journal.last_event();
        self.check_known(audit, memory, restart)?;
        let replaced = published.iter().filter(|of| audit.versions.values().all(|now| now.id != of.id));
        let replaced = replaced.map(|of| (of.name.clone(), of.version, of.id.clone())).collect::<Vec<_>>();
        for (key, now) in &audit.versions {
            if !self.versions.contains_key(key) {
                if restart.is_some_and(|restart| !restart.torn) {
                    return Err(format!("version {} of `{}` appears at a start", now.number, now.name));
                }
                self.check_new(now, &memory[key], audit, &replaced)?;
                self.history.insert(now.id.clone(), (now.name.clone(), now.number, memory[key].clone()));
            }
            if now.leases == 0 && !now.kept {
                return Err(format!("version {} of `{}` has no lease and is not dropped", now.number, now.name));
            }
        }
        let before = std::mem::take(&mut self.versions);
        self.versions = audit
            .versions
            .iter()
            .map(|(key, version)| {
                let keeper = before.get(key).map_or(keeper, |known| known.keeper);
                (*key, Known { version: version.clone(), memory: memory[key].clone(), keeper })
            })
            .collect();
        self.replaced.extend(replaced.into_iter().map(|(name, number, id)| ((name, id), number)));
        self.check_lease_changes(audit, restart)?;
        self.check_answers()?;
        (self.deleting, self.released, self.expired) = Default::default();
        Ok(())
    }

    /// Checks the versions of the last state.
    fn check_known(
        &mut self,
        audit: &Audit,
        memory: &BTreeMap<u64, Memory>,
        restart: Option<Restart>,
    ) -> Result<(), String> {
        let mut executed = Vec::new();
        for (key, Known { version, memory: had, keeper }) in &self.versions {
            let (now, has) = (audit.versions.get(key), memory.get(key));
            let what = format!("version {} of `{}`", version.number, version.name);
            let identity = |of: &AuditedVersion| (of.name.clone(), of.number, of.id.clone(), of.owner);
            let same = |now| identity(now) == identity(version) && has == Some(had) && (version.named || !now.named);
            if now.is_some_and(|now| !same(now)) {
                return Err(format!("{what} has changed: {version:?} {had:?}, now {now:?} {has:?}"));
            }
            if !version.named || now.is_some_and(|now| now.named) {
                continue;
            }
            if restart.is_some_and(|restart| !restart.whole && restart.keeper != *keeper) {
                self.losses += 1;
                let puts = self.puts.values_mut().filter(|put| put.executed.as_ref() == Some(&version.id));
                puts.for_each(|put| put.executed = None);
            } else if !self.may_remove(version, audit) {
                return Err(format!("{what} is gone"));
            }
            executed.extend(self.deleting.iter().filter(|token| self.may_delete(**token, version)));
        }
        for token in executed {
            self.deletes.get_mut(&token).expect("it was requested").is_executed = true;
        }
        Ok(())
    }

    fn forget_everything(&mut self) {
        (self.losses, self.last_event) = (self.losses + self.versions.len(), 0);
        self.versions.clear();
        self.leases.clear();
        self.makers.clear();
        self.puts.values_mut().for_each(|put| put.executed = None);
        self.deletes.values_mut().for_each(|delete| delete.is_executed = false);
    }

    /// Whether a version may have lost its name since the last state.
    fn may_remove(&self, version: &AuditedVersion, audit: &Audit) -> bool {
        let name = version.name.as_str();
        let newer = audit.versions.values().filter(|other| other.name == name && other.named);
        let newer = newer.filter(|other| other.number > version.number).collect::<Vec<_>>();
        let is_replaced = newer.first().is_some_and(|other| newer.len() > other.keep as usize);
        let may_expire = match version.lifetime {
            Lifetime::Deleted => false,
            Lifetime::Maker => self.has_lost_maker(name),
            Lifetime::Leased => self.has_lost_maker(name) && version.leases == 0,
            _ => version.leases == 0,
        };
        let is_expired = may_expire && self.expired.iter().any(|expired| expired == name);
        is_replaced || is_expired || self.deleting.iter().any(|token| self.may_delete(*token, version))
    }

    /// Whether the connection of a name's maker has closed, or was not resumed in time.
    fn has_lost_maker(&self, name: &str) -> bool {
        match self.makers.get(name).copied().flatten() {
            Some(ConnectionId::PREVIOUS_SERVER) => self.grace_is_over,
            Some(maker) => self.closed.contains(&maker),
            None => true,
        }
    }

    fn may_delete(&self, token: Token, version: &AuditedVersion) -> bool {
        let may = |delete: &RequestedDelete| delete.name == version.name && delete.uid == version.owner;
        self.deletes.get(&token).is_some_and(|delete| may(delete) && !delete.is_executed)
    }

    fn check_new(
        &mut self,
        new: &AuditedVersion,
        memory: &Memory,
        audit: &Audit,
        replaced: &[(String, u64, String)],
    ) -> Result<(), String> {
        let AuditedVersion { name, number, .. } = new;
        let removable =
            |known: &&Known| audit.versions.values().all(|other| !other.named || other.id != known.version.id);
        let before = self.versions.values().filter(|known| known.version.named && known.version.name == *name);
        let (gone, before): (Vec<_>, Vec<_>) = before.partition(|known| removable(known));
        let known = before.iter().chain(&gone).map(|known| known.version.number);
        let others =
            audit.versions.values().filter(|other| other.name == *name && other.named && other.number < *number);
        let replaced = replaced.iter().filter(|(of, replaced, _)| of == name && replaced < number);
        let others = others.map(|other| other.number).chain(replaced.map(|(_, number, _)| *number));
        let previous = others.chain(known.filter(|known| known < number)).max();
        let follows = previous.map_or(*number == 1, |previous| *number == previous + 1);
        let starts = *number == 1 && before.is_empty();
        if !follows && !starts {
            return Err(format!("version {number} of `{name}` follows version {previous:?}"));
        }
        if let Some(owner) = before.first().map(|known| known.version.owner)
            && owner != new.owner
        {
            return Err(format!("`{name}` of uid {owner} is now of uid {}", new.owner));
        }
        if new.requests.len() != memory.len() {
            return Err(format!(
                "version {number} of `{name}` has {} parts of {} puts",
                memory.len(),
                new.requests.len()
            ));
        }
        for request in &new.requests {
            let Some(put) = self.puts.get_mut(request) else {
                return Err(format!("version {number} of `{name}` has an unknown request"));
            };
            let part = memory.iter().find(|(part, _)| part == put.part).map(|(_, memory)| memory);
            if put.name != name || part != Some(&put.memory) || *number > 1 && !put.replaces {
                return Err(format!("version {number} of `{name}` has memory {memory:?}, and its put was {put:?}"));
            }
            if put.executed.replace(new.id.clone()).is_some() {
                return Err(format!("version {number} of `{name}` repeats an executed put"));
            }
        }
        Ok(())
    }

    /// A lease ends if its holder releases it, or does not resume it in time.
    fn check_lease_changes(&mut self, audit: &Audit, restart: Option<Restart>) -> Result<(), String> {
        for (token, before) in &self.leases {
            // A lease counts as ended once its cleanup begins.
            let now = audit.leases.get(token).filter(|now| before.is_closing || !now.is_closing);
            let ends = before.is_closing
                || self.released.contains(token)
                || before.holder.is_some_and(|holder| self.closed.contains(&holder))
                || before.holder.is_none() && self.grace_is_over
                || restart.is_some_and(|restart| !restart.whole) && !audit.versions.contains_key(&before.key);
            match now {
                None if ends => {}
                None => return Err(format!("a lease of uid {} has ended: {before:?}", before.uid)),
                Some(now) if (now.key, now.uid) != (before.key, before.uid) => {
                    return Err(format!("a lease has changed: {before:?}, now {now:?}"));
                }
                Some(_) => {}
            }
        }
        if restart.is_some_and(|restart| !restart.torn) && audit.leases.len() > self.leases.len() {
            return Err("a lease appears at a start".to_owned());
        }
        for (name, maker) in &audit.makers {
            if maker.is_none() && self.makers.contains_key(name) && !self.has_lost_maker(name) {
                return Err(format!("`{name}` has no maker any more"));
            }
        }
        (self.leases, self.makers) = (audit.leases.clone(), audit.makers.clone());
        Ok(())
    }
}
