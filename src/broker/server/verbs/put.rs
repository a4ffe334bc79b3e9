//! Puts: what comes is checked, completed with the parts of others, and published.

mod check;

use std::{os::fd::OwnedFd, time::Duration};

use self::check::{Examination, Examined, check};
use crate::broker::server::{
    ConnectionId,
    io::connection::Request,
    io::reactor::Reactor,
    io::worker::Step,
    state::caller::Caller,
    state::objects::{NewPart, NewTable, Staged, Terms},
};
use crate::{
    broker::table::sealed,
    channel::deadline_after,
    error::{BrokerError, RefusalCode},
    wire::{
        Segments,
        broker::{MAX_INLINE_TOGETHER, MAX_SEGMENTS, Message, Published, Put, Restore, Resume, Send, Token},
    },
};

/// How many segments are looked at on the event loop: more are the worker's.
const FEW: usize = 128;

/// A put whose segments are still to come, or all there.
#[derive(Debug)]
pub(crate) struct Upload {
    uid: u32,
    put: Put,
    terms: Terms,
    total: usize,
    tables: Vec<OwnedFd>,
    segments: Vec<(u64, OwnedFd)>,
}

impl Upload {
    /// Its descriptors, to be closed.
    pub(crate) fn into_fds(self) -> Vec<OwnedFd> {
        self.tables.into_iter().chain(self.segments.into_iter().map(|(_, fd)| fd)).collect()
    }

    /// How many descriptors it has when all have come.
    pub(crate) fn descriptors(&self) -> usize {
        self.total + self.tables.len()
    }

    fn is_small(&self) -> bool {
        self.tables.is_empty() && self.segments.len() <= FEW
    }
}

/// A put that was checked.
#[derive(Debug)]
struct Prepared {
    terms: Terms,
    announced: Vec<String>,
    group: Option<String>,
    wait: Duration,
    metadata: Option<NewTable>,
    parts: Vec<NewPart>,
}

/// What names a version that several puts make together.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct DraftKey {
    name: String,
    group: String,
}

/// A version of which some parts are still to come.
#[derive(Debug)]
pub(crate) struct Draft {
    uid: u32,
    /// In the order in which the first put names them, which is that of the version's parts.
    announced: Vec<String>,
    terms: Terms,
    metadata: Option<(ConnectionId, NewTable)>,
    puts: Vec<(ConnectionId, Vec<NewPart>)>,
    /// What the clients call these puts.
    requests: Vec<(ConnectionId, Token)>,
}

impl Draft {
    fn has(&self, part: &str) -> bool {
        self.puts.iter().flat_map(|(_, parts)| parts).any(|known| known.name == part)
    }

    fn is_complete(&self) -> bool {
        self.announced.iter().all(|part| self.has(part))
    }
}

/// A version whose descriptors are on their way to the keeper.
#[derive(Debug)]
pub(crate) struct Storing {
    makers: Vec<ConnectionId>,
    terms: Terms,
    pub(crate) staged: Staged,
}

/// How many bytes of memory and tables they are, as claimed.
fn bytes_of(parts: &[NewPart]) -> u64 {
    parts.iter().map(NewPart::bytes).sum()
}

/// Examines one part of a put, and then the next one when it is the user's turn again.
fn examine(id: ConnectionId, uid: u32, descriptors: usize, examination: Examination) -> Step {
    let prepared = match examination.step() {
        Examined::More(rest) => return Step::More(Box::new(move || examine(id, uid, descriptors, *rest))),
        Examined::Sound(prepared) => Ok(prepared),
        Examined::Refused(refusal, fds) => Err((refusal, fds)),
    };
    Step::Done(Box::new(move |reactor: &mut Reactor| {
        reactor.objects.users().end_reservation(uid, descriptors);
        reactor.set_request(id, Request::None);
        reactor.prepared(id, uid, prepared);
        reactor.listen_again(id);
    }))
}

/// How many descriptors they have at most: those of segments and tables.
fn descriptors_of(parts: &[NewPart]) -> usize {
    parts.iter().map(|part| part.segments.len() + 1).sum()
}

/// Whether two lists name the same parts, in any order; neither names one twice.
fn same(some: &[String], others: &[String]) -> bool {
    some.len() == others.len() && some.iter().all(|name| others.contains(name))
}

fn refuse<T>(code: RefusalCode, message: impl Into<String>) -> Result<T, BrokerError> {
    Err(BrokerError::new(code, message))
}

fn invalid<T>(message: impl Into<String>) -> Result<T, BrokerError> {
    refuse(RefusalCode::Invalid, message)
}

impl Reactor {
    /// A put has come, with the descriptors of its tables and of its first segments.
    pub(crate) fn put(&mut self, id: ConnectionId, put: Put, mut fds: Vec<OwnedFd>) {
        let before = self.published_before(id, &put);
        if let Some(answer) = before.transpose() {
            self.reject(id, fds);
            return match answer {
                Ok(published) => self.reply(id, &Message::Published(published)),
                Err(refusal) => self.refuse(id, refusal),
            };
        }
        match self.admit_put(id, &put) {
            Err(refusal) => {
                self.reject(id, fds);
                self.refuse(id, refusal);
            }
            Ok((terms, total)) => {
                let Some(connection) = self.connections.get(&id) else { return self.reject(id, fds) };
                let uid = connection.caller.uid;
                let segments = fds.split_off(fds.len() - put.sizes.len());
                let segments = put.sizes.iter().copied().zip(segments).collect::<Vec<_>>();
                let upload = Upload { uid, put, terms, total, tables: fds, segments };
                self.objects.users().reserve(uid, upload.descriptors());
                if upload.segments.len() < total {
                    self.set_request(id, Request::Upload(Box::new(upload)));
                    self.set_deadline(id, deadline_after(self.timeout()));
                    self.reply(id, &Message::Send(Send {}));
                } else {
                    self.uploaded(id, upload);
                }
            }
        }
    }

    /// What a put published that is sent again, since its answer was lost; or of what another reader has offered back before.
    fn published_before(&mut self, id: ConnectionId, put: &Put) -> Result<Option<Published>, BrokerError> {
        if let Some(restore) = &put.restore {
            return Ok(self.restored_before(id, &put.name, restore));
        }
        let (Some(connection), Some(request)) = (self.connections.get_mut(&id), put.request) else { return Ok(None) };
        let published = self.objects.published_before(&connection.caller, &put.name, request)?;
        if published.is_some() {
            // The name goes with this connection now, if it goes with its maker.
            let resume = Resume { leases: Vec::new(), puts: vec![request] };
            connection.names.extend(self.objects.resume(&connection.caller, &resume).names);
        }
        Ok(published)
    }

    /// Gives a client its leases of a version that another one has offered back, if it could have offered it.
    fn restored_before(&mut self, id: ConnectionId, name: &str, restore: &Restore) -> Option<Published> {
        let connection = self.connections.get_mut(&id)?;
        let key = self.objects.restored(&connection.caller, name, restore)?;
        connection.leases.extend(self.objects.lease_again(&connection.caller, key, &restore.leases));
        Some(Published { version: restore.version, id: restore.id.clone() })
    }

    /// Checks whether a put may come, before the rest of it does.
    fn admit_put(&self, id: ConnectionId, put: &Put) -> Result<(Terms, usize), BrokerError> {
        let (terms, total, bytes) = check(put)?;
        let Some(connection) = self.connections.get(&id) else { return invalid("the connection has ended") };
        self.objects.check_put(&connection.caller, connection, &terms, bytes)?;
        self.objects.check_devices(&connection.caller, &put.name, put.parts.iter().map(|part| &part.memory))?;
        let tables = put.parts.len() + 1;
        self.require_descriptors(&connection.caller, total + tables)?;
        Ok((terms, total))
    }

    /// Some more of a put's segments have come.
    pub(crate) fn segments(&mut self, id: ConnectionId, segments: Segments, fds: Vec<OwnedFd>) {
        let Some(connection) = self.connections.get_mut(&id) else { return self.reject(id, fds) };
        // What else it waits for must still be found when the connection is closed.
        let uploading = matches!(connection.request, Request::Upload(_));
        let request = if uploading { std::mem::take(&mut connection.request) } else { Request::None };
        let Request::Upload(mut upload) = request else {
            self.reject(id, fds);
            return self.break_off(id, "segments came where no put waits for any");
        };
        let (first, have, more) = (segments.first, upload.segments.len(), segments.sizes.len());
        if first != have as u64 || have + more > upload.total {
            let total = upload.total;
            self.end_upload(*upload);
            self.reject(id, fds);
            return self.break_off(
                id,
                &format!(
                    "segments {first} to {} came where {have} to {total} belong",
                    first.saturating_add(more as u64)
                ),
            );
        }
        upload.segments.extend(segments.sizes.into_iter().zip(fds));
        if upload.segments.len() < upload.total {
            self.set_request(id, Request::Upload(upload));
        } else {
            self.uploaded(id, *upload);
        }
    }

    /// Closes what came of a put that is given up.
    pub(crate) fn end_upload(&mut self, upload: Upload) {
        self.objects.users().end_reservation(upload.uid, upload.descriptors());
        self.reject_of(Some(upload.uid), upload.into_fds());
    }

    /// All segments of a put are there.
    fn uploaded(&mut self, id: ConnectionId, upload: Upload) {
        let (uid, descriptors, small) = (upload.uid, upload.descriptors(), upload.is_small());
        let Some(connection) = self.connections.get_mut(&id) else { return self.end_upload(upload) };
        let examination = Examination::new(upload, connection.caller.describe(), self.emulated);
        connection.request = Request::Worker;
        self.work(uid, small, Box::new(move || examine(id, uid, descriptors, examination)));
    }

    /// A put was looked at.
    fn prepared(&mut self, id: ConnectionId, uid: u32, prepared: Result<Prepared, (BrokerError, Vec<OwnedFd>)>) {
        let prepared = match prepared {
            Ok(prepared) => prepared,
            Err((refusal, fds)) => {
                self.reject_of(Some(uid), fds);
                return self.refuse(id, refusal);
            }
        };
        let Prepared { terms, announced, group, wait, metadata, parts } = prepared;
        let Some(caller) = self.connections.get(&id).map(|connection| connection.caller.clone()) else {
            return self.objects.discard(metadata, parts);
        };
        let together = group.filter(|_| announced.len() > parts.len());
        let Some(group) = together else {
            return self.store(vec![id], terms, metadata, parts);
        };
        let key = DraftKey { name: terms.name.clone(), group };
        if let Err(refusal) = self.join(&key, &caller, &announced, &terms, metadata, parts) {
            return self.refuse(id, refusal);
        }
        if self.drafts.get(&key).is_some_and(Draft::is_complete) {
            self.set_request(id, Request::Parts(key.clone()));
            self.complete(&key);
        } else {
            let deadline = deadline_after(wait);
            self.set_request(id, Request::Parts(key));
            self.set_deadline(id, deadline);
        }
    }

    /// Adds parts to a version that several puts make.
    fn join(
        &mut self,
        key: &DraftKey,
        caller: &Caller,
        announced: &[String],
        terms: &Terms,
        metadata: Option<NewTable>,
        parts: Vec<NewPart>,
    ) -> Result<(), BrokerError> {
        let count = |parts: &[NewPart]| parts.iter().map(|part| part.segments.len()).sum::<usize>();
        let problem = self.drafts.get(key).and_then(|draft| {
            let Draft { uid, .. } = draft;
            let twice = parts.iter().find(|part| draft.has(&part.name));
            if *uid != caller.uid {
                Some((
                    RefusalCode::Denied,
                    format!("uid {uid} makes this version of `{}`, and not {}", key.name, caller.uid),
                ))
            } else if !same(&draft.announced, announced) {
                Some((RefusalCode::Invalid, format!("others of group `{}` announced other parts", key.group)))
            } else if (draft.terms.replace, draft.terms.if_version) != (terms.replace, terms.if_version) {
                Some((RefusalCode::Invalid, format!("others of group `{}` replace another version", key.group)))
            } else if draft.terms.backend != terms.backend {
                Some((RefusalCode::Invalid, format!("others of group `{}` put memory of another backend", key.group)))
            } else if draft.puts.iter().map(|(_, parts)| count(parts)).sum::<usize>() + count(&parts) > MAX_SEGMENTS {
                let message =
                    format!("the parts have more than {MAX_SEGMENTS} segments together: an object has at most as many");
                Some((RefusalCode::Invalid, message))
            } else if metadata.is_some() && draft.metadata.is_some() {
                Some((RefusalCode::Invalid, format!("another put of group `{}` brings metadata already", key.group)))
            } else {
                twice.map(|part| (RefusalCode::Exists, format!("part `{}` is there already", part.name)))
            }
        });
        if let Some((code, message)) = problem {
            self.objects.discard(metadata, parts);
            return refuse(code, message);
        }
        let bytes = bytes_of(&parts) + metadata.as_ref().map_or(0, NewTable::length);
        // Others may have come while this was looked at.
        if let Err(refusal) = self.objects.users().check_bytes(caller.uid, bytes) {
            self.objects.discard(metadata, parts);
            return Err(refusal);
        }
        self.objects.users().add_waiting(caller.uid, bytes);
        self.objects.users().reserve(caller.uid, descriptors_of(&parts));
        let fresh = || Draft {
            uid: caller.uid,
            announced: announced.to_vec(),
            terms: Terms { requests: Vec::new(), ..terms.clone() },
            metadata: None,
            puts: Vec::new(),
            requests: Vec::new(),
        };
        let draft = self.drafts.entry(key.clone()).or_insert_with(fresh);
        if let Some(metadata) = metadata {
            draft.metadata = Some((caller.connection, metadata));
        }
        draft.puts.push((caller.connection, parts));
        draft.requests.extend(terms.requests.iter().map(|request| (caller.connection, *request)));
        Ok(())
    }

    /// All parts of a version are there.
    fn complete(&mut self, key: &DraftKey) {
        let Some(draft) = self.drafts.remove(key) else { return };
        let Draft { uid, announced, terms, metadata, puts, requests } = draft;
        let terms = Terms { requests: requests.into_iter().map(|(_, request)| request).collect(), ..terms };
        let waited = puts.iter().map(|(_, parts)| bytes_of(parts)).sum::<u64>()
            + metadata.as_ref().map_or(0, |(_, table)| table.length());
        self.objects.users().remove_waiting(uid, waited);
        self.objects.users().end_reservation(uid, puts.iter().map(|(_, parts)| descriptors_of(parts)).sum());
        let makers: Vec<ConnectionId> = puts.iter().map(|(id, _)| *id).collect();
        let mut parts: Vec<NewPart> = puts.into_iter().flat_map(|(_, parts)| parts).collect();
        parts.sort_by_key(|part| announced.iter().position(|name| *name == part.name));
        self.store(makers, terms, metadata.map(|(_, table)| table), parts);
    }

    /// Has the descriptors of a version kept. It is published once they are.
    fn store(
        &mut self,
        makers: Vec<ConnectionId>,
        terms: Terms,
        mut metadata: Option<NewTable>,
        mut parts: Vec<NewPart>,
    ) {
        let staged = match fit(&mut metadata, &mut parts) {
            Ok(()) => self.objects.stage(metadata, parts),
            Err(error) => {
                self.objects.discard(metadata, parts);
                refuse(RefusalCode::Full, format!("the broker can't make a memfd for a table: {error}"))
            }
        };
        match staged {
            Ok(staged) => {
                makers.iter().for_each(|id| self.set_request(*id, Request::Storing));
                self.storing.push_back(Storing { makers, terms, staged });
                self.settle_store();
            }
            Err(refusal) => self.answer_makers(&makers, &Err(refusal)),
        }
    }

    /// The time is over in which names were reserved for offers of what a broker before this one lost.
    pub(crate) fn end_reservation(&mut self) {
        self.reserves = false;
        for storing in std::mem::take(&mut self.reserved) {
            self.stored(storing);
        }
    }

    /// The descriptors of a version are kept.
    pub(crate) fn stored(&mut self, storing: Storing) {
        // Its owner may still offer the name back: the broker has lost whose it was.
        let is_new = storing.terms.restore.is_none() && self.objects.current_key(&storing.terms.name).is_none();
        if self.reserves && is_new {
            return self.reserved.push(storing);
        }
        let Storing { makers, terms, staged } = storing;
        let first = makers.iter().find_map(|id| self.connections.get(id)).map(|connection| connection.caller.clone());
        let connection = first.as_ref().and_then(|caller| self.connections.get_mut(&caller.connection));
        let (Some(caller), Some(connection)) = (first, connection) else { return self.objects.unstage(staged) };
        // The same request may have been under way twice, over a connection that broke too.
        let before = |request: &Token| self.objects.published_before(&caller, &terms.name, *request).transpose();
        if let Some(answer) = terms.requests.iter().find_map(before) {
            self.objects.unstage(staged);
            return self.answer_makers(&makers, &answer);
        }
        let result = self.objects.publish(&caller, connection, &terms, staged);
        if result.is_ok() {
            if self.objects.follows_maker(&terms.name) {
                connection.names.insert(terms.name.as_str().into());
            }
            if let Some(restore) = &terms.restore {
                let key = self.objects.current_key(&terms.name);
                let leases = key.map(|key| self.objects.lease_again(&caller, key, &restore.leases));
                connection.leases.extend(leases.into_iter().flatten());
            }
        }
        if result.is_ok() {
            self.answer_makers(&makers, &result);
            return self.published(&terms.name);
        }
        // Another reader was faster, while this one's descriptors went to the keeper.
        let faster = terms.restore.as_ref().and_then(|of| self.restored_before(caller.connection, &terms.name, of));
        self.answer_makers(&makers, &faster.map_or(result, Ok));
    }

    fn answer_makers(&mut self, makers: &[ConnectionId], result: &Result<Published, BrokerError>) {
        for id in makers {
            self.set_request(*id, Request::None);
            match result {
                Ok(published) => self.reply(*id, &Message::Published(published.clone())),
                Err(refusal) => self.refuse(*id, refusal.clone()),
            }
            self.listen_again(*id);
        }
    }

    /// Takes a connection's parts out of a version that is not complete.
    pub(crate) fn withdraw(&mut self, id: ConnectionId, key: &DraftKey) {
        let Some(draft) = self.drafts.get_mut(key) else { return };
        let (gone, stay): (Vec<_>, Vec<_>) = std::mem::take(&mut draft.puts).into_iter().partition(|(of, _)| *of == id);
        draft.puts = stay;
        draft.requests.retain(|(of, _)| *of != id);
        let metadata = draft.metadata.take_if(|(of, _)| *of == id).map(|(_, table)| table);
        let waited =
            gone.iter().map(|(_, parts)| bytes_of(parts)).sum::<u64>() + metadata.as_ref().map_or(0, NewTable::length);
        self.objects.users().remove_waiting(draft.uid, waited);
        self.objects.users().end_reservation(draft.uid, gone.iter().map(|(_, parts)| descriptors_of(parts)).sum());
        let empty = draft.puts.is_empty();
        let rest = if empty { self.drafts.remove(key) } else { None };
        let rest = rest.and_then(|draft| draft.metadata).map(|(_, table)| table);
        self.objects.discard(metadata.or(rest), gone.into_iter().flat_map(|(_, parts)| parts).collect());
    }

    /// The wait for the parts of others is over.
    pub(crate) fn parts_late(&mut self, id: ConnectionId, key: &DraftKey, code: RefusalCode) {
        let missing: Vec<String> = self.drafts.get(key).map_or(Vec::new(), |draft| {
            let mut missing: Vec<String> = draft.announced.iter().filter(|part| !draft.has(part)).cloned().collect();
            missing.sort();
            missing
        });
        self.withdraw(id, key);
        let message = format!("`{}` is not published: the parts {} did not come", key.name, missing.join(", "));
        self.refuse(id, BrokerError::new(code, message));
    }
}

/// Moves tables into memfds until those that are left fit one record.
fn fit(metadata: &mut Option<NewTable>, parts: &mut [NewPart]) -> std::io::Result<()> {
    let mut room = MAX_INLINE_TOGETHER;
    for table in metadata.iter_mut().chain(parts.iter_mut().filter_map(|part| part.arrays.as_mut())) {
        let NewTable::Inline(text) = table else { continue };
        let length = text.as_str().len();
        match room.checked_sub(length) {
            Some(left) => room = left,
            None => *table = NewTable::Memfd { fd: sealed(text.as_str())?, length: length as u64 },
        }
    }
    Ok(())
}
