//! Puts: what comes is checked, completed with the parts of others, and published.

use std::{
    collections::HashSet,
    os::fd::{AsFd, OwnedFd},
    time::{Duration, Instant},
};

use super::{
    ConnectionId,
    caller::Caller,
    connection::Request,
    inspect::inspect,
    objects::{NewPart, NewTable, Terms},
    reactor::Reactor,
};
use crate::{
    broker::{
        name::{check_component, check_name},
        table::{self, sealed},
    },
    channel::deadline_after,
    driver::Backend,
    error::{BrokerError, RefusalCode},
    wire::{
        Check, Mechanism, Segments,
        broker::{
            MAX_ARRAYS, MAX_ATTRIBUTES, MAX_INLINE_TOGETHER, MAX_METADATA, MAX_SEGMENTS, MAX_TABLE, Maker, Message,
            Put, Send, Table, read_arrays,
        },
    },
};

/// More bytes than a process has addresses for: half of 48 bits is the kernel's.
const ADDRESSES: u64 = 1 << 47;

/// How many segments are looked at on the event loop: more are the worker's.
const FEW: usize = 128;

/// A put whose segments are still to come, or all there.
#[derive(Debug)]
pub(super) struct Upload {
    put: Put,
    terms: Terms,
    total: usize,
    tables: Vec<OwnedFd>,
    segments: Vec<(u64, OwnedFd)>,
}

impl Upload {
    /// Its descriptors, to be closed.
    pub(super) fn into_fds(self) -> Vec<OwnedFd> {
        self.tables.into_iter().chain(self.segments.into_iter().map(|(_, fd)| fd)).collect()
    }

    /// How many descriptors it has when all have come.
    pub(super) fn descriptors(&self) -> usize {
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
pub(super) struct DraftKey {
    name: String,
    group: String,
}

/// A version of which some parts are still to come.
#[derive(Debug)]
pub(super) struct Draft {
    uid: u32,
    /// In the order in which the first put names them, which is that of the version's parts.
    announced: Vec<String>,
    terms: Terms,
    metadata: Option<(ConnectionId, NewTable)>,
    puts: Vec<(ConnectionId, Vec<NewPart>)>,
}

impl Draft {
    fn has(&self, part: &str) -> bool {
        self.puts.iter().flat_map(|(_, parts)| parts).any(|known| known.name == part)
    }

    /// How many descriptors it has.
    pub(super) fn descriptors(&self) -> usize {
        self.puts.iter().flat_map(|(_, parts)| parts).map(|part| part.segments.len() + 1).sum()
    }

    fn is_complete(&self) -> bool {
        self.announced.iter().all(|part| self.has(part))
    }
}

/// How many bytes of memory they are, as claimed.
fn bytes_of(parts: &[NewPart]) -> u64 {
    parts.iter().map(|part| part.memory.mapped_size).sum()
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

/// Checks what a put says, without a look at its memory.
fn check(put: &Put) -> Result<(Terms, usize, u64), BrokerError> {
    check_name(&put.name)?;
    put.group.iter().try_for_each(|group| check_component("group", group))?;
    let backends = [Backend::Cuda, Backend::Host];
    let Some(backend) = backends.into_iter().find(|backend| backend.as_str() == put.backend) else {
        return invalid(format!("the backend `{}` is not known here: it is cuda or host", put.backend));
    };
    if let Some(mode) = put.mode.filter(|mode| mode & !0o666 != 0) {
        return invalid(format!("mode {mode:o} has more than read and write: at most 666"));
    }
    if put.parts.is_empty() {
        return invalid(format!("a put of `{}` brings no part", put.name));
    }
    let mut announced = HashSet::new();
    for name in &put.announced {
        check_component("part", name)?;
        if !announced.insert(name.as_str()) {
            return invalid(format!("part `{name}` is announced twice"));
        }
    }
    let (mut total, mut bytes, mut names) = (0u64, 0u64, HashSet::new());
    for part in &put.parts {
        let name = &part.name;
        check_component("part", name)?;
        if !names.insert(name.as_str()) {
            return invalid(format!("part `{name}` comes twice"));
        }
        if !announced.is_empty() && !announced.contains(name.as_str()) {
            return invalid(format!("part `{name}` is not among those that are announced"));
        }
        let memory = &part.memory;
        if memory.mechanism != Mechanism::Vmm {
            return invalid(format!(
                "part `{name}` is not shared by vmm: pools and legacy handles die with their maker, so a broker can't keep them"
            ));
        }
        if memory.pool.is_some() || memory.pointer.is_some() || memory.offset != 0 {
            return invalid(format!("part `{name}` is shared by vmm, and has fields of another mechanism"));
        }
        let (size, mapped) = (memory.size, memory.mapped_size);
        if size == 0 || size > mapped || mapped >= ADDRESSES {
            return invalid(format!(
                "part `{name}` claims {size} bytes of data in {mapped} bytes of memory: at least 1 in at most {ADDRESSES}"
            ));
        }
        if memory.segments == 0 {
            return invalid(format!("part `{name}` has no segment"));
        }
        if let Some(Table::Length(length)) = &part.arrays
            && *length > MAX_TABLE
        {
            return invalid(format!("the table of part `{name}` has {length} bytes: at most {MAX_TABLE} are allowed"));
        }
        total = total.saturating_add(memory.segments);
        bytes = bytes.saturating_add(mapped);
    }
    if put.announced.len() > put.parts.len() && put.group.is_none() {
        return invalid("parts of others are announced, and no group says which are of the same version");
    }
    if total > MAX_SEGMENTS as u64 {
        return invalid(format!("{total} segments are too many: an object has at most {MAX_SEGMENTS}"));
    }
    if put.sizes.len() as u64 > total {
        return invalid(format!("{} segments come with a put of {total}", put.sizes.len()));
    }
    let terms = Terms {
        name: put.name.clone(),
        replace: put.replace || put.if_version.is_some(),
        if_version: put.if_version,
        mode: put.mode,
        lifetime: put.lifetime,
        keep: put.keep,
        backend,
    };
    Ok((terms, total as usize, bytes))
}

/// Looks at all descriptors and tables of a put. Those of a put that is refused come back, to be closed.
fn prepare(upload: Upload, maker: &Maker, emulated: bool) -> Result<Prepared, (BrokerError, Vec<OwnedFd>)> {
    let counts = match examine(&upload, emulated) {
        Ok(counts) => counts,
        Err(refusal) => return Err((refusal, upload.into_fds())),
    };
    let Upload { put, terms, tables, segments, .. } = upload;
    let (mut tables, mut segments) = (tables.into_iter(), segments.into_iter());
    let mut take = |table: Table| match table {
        Table::Length(length) => tables.next().map(|fd| NewTable::Memfd { fd, length }),
        Table::Inline(text) => Some(NewTable::Inline(text)),
    };
    let metadata = put.metadata.and_then(&mut take);
    let mut parts = Vec::with_capacity(put.parts.len());
    for (part, array_count) in put.parts.into_iter().zip(counts) {
        let arrays = part.arrays.and_then(&mut take);
        let segments = segments.by_ref().take(part.memory.segments as usize).collect();
        let (name, memory, digest, maker) = (part.name, part.memory, part.digest, maker.clone());
        parts.push(NewPart { name, memory, arrays, array_count, digest, maker, segments });
    }
    let wait = Duration::from_millis(put.wait_ms.unwrap_or(0));
    let mut announced = put.announced;
    if announced.is_empty() {
        announced = parts.iter().map(|part| part.name.clone()).collect();
    }
    Ok(Prepared { terms, announced, group: put.group, wait, metadata, parts })
}

/// Checks the memory and the tables of a put. Returns how many arrays each part has.
fn examine(upload: &Upload, emulated: bool) -> Result<Vec<u64>, BrokerError> {
    let Upload { put, terms, tables, segments, .. } = upload;
    let mut tables = tables.iter();
    let mut text = |table: &Table, most: u64| match table {
        Table::Inline(text) => Ok(text.as_str().to_owned()),
        Table::Length(length) => {
            let fd = tables.next().ok_or_else(|| "a table came without its descriptor".to_owned())?;
            table::read(fd.as_fd(), *length, most)
        }
    };
    if let Some(metadata) = &put.metadata {
        let text = text(metadata, MAX_METADATA).or_else(|problem| invalid(format!("the metadata: {problem}")))?;
        if let Err(error) = serde_json::from_str::<Check>(&text) {
            return invalid(format!("the metadata is not a JSON object: {error}"));
        }
    }
    let (mut segments, mut counts) = (segments.iter(), Vec::with_capacity(put.parts.len()));
    for part in &put.parts {
        let name = &part.name;
        counts.push(match &part.arrays {
            None => 0,
            Some(arrays) => {
                let text = text(arrays, MAX_TABLE).or_else(|problem| invalid(format!("part `{name}`: {problem}")))?;
                check_arrays(name, &text, part.memory.size)?
            }
        });
        let mut sum = 0u64;
        for (at, (size, fd)) in segments.by_ref().take(part.memory.segments as usize).enumerate() {
            if let Err(unfit) = inspect(fd.as_fd(), terms.backend, *size, emulated) {
                return refuse(RefusalCode::Memory, format!("segment {at} of part `{name}` can't be kept: {unfit}"));
            }
            sum = sum.saturating_add(*size);
        }
        if sum != part.memory.mapped_size {
            let mapped = part.memory.mapped_size;
            return invalid(format!("part `{name}` has segments of {sum} bytes together, and claims {mapped}"));
        }
    }
    Ok(counts)
}

/// Checks a table of arrays. Returns how many they are.
fn check_arrays(part: &str, text: &str, size: u64) -> Result<u64, BrokerError> {
    let arrays = match read_arrays(text) {
        Ok(arrays) => arrays,
        Err(error) => return invalid(format!("the table of part `{part}` is not one of arrays: {error}")),
    };
    if arrays.len() > MAX_ARRAYS {
        let got = arrays.len();
        return invalid(format!("{got} arrays in part `{part}` are too many: at most {MAX_ARRAYS} are allowed"));
    }
    let mut names = HashSet::with_capacity(arrays.len());
    for entry in &arrays {
        let mut shown = entry.name.clone();
        crate::wire::shorten(&mut shown, 100);
        if entry.name.is_empty() || entry.name.len() > 1024 {
            let length = entry.name.len();
            return invalid(format!(
                "the name of an array in part `{part}` has {length} bytes, and 1 to 1024 are allowed"
            ));
        }
        if !names.insert(entry.name.as_str()) {
            return invalid(format!("array `{shown}` is twice in part `{part}`"));
        }
        if let Err(error) = entry.array.check(size) {
            return invalid(format!(
                "array `{shown}` is not inside part `{part}` of {size} bytes: {}",
                error.in_full()
            ));
        }
        if let Some(attributes) = &entry.attributes {
            let text = attributes.as_str();
            if text.len() > MAX_ATTRIBUTES || !text.starts_with('{') {
                return invalid(format!(
                    "the attributes of array `{shown}` have {} bytes: a JSON object of at most {MAX_ATTRIBUTES} is allowed",
                    text.len()
                ));
            }
        }
    }
    Ok(arrays.len() as u64)
}

impl Reactor {
    /// A put has come, with the descriptors of its tables and of its first segments.
    pub(super) fn put(&mut self, id: ConnectionId, put: Put, mut fds: Vec<OwnedFd>) {
        match self.admit_put(id, &put) {
            Err(refusal) => {
                self.worker.reject(fds);
                self.refuse(id, refusal);
            }
            Ok((terms, total)) => {
                let segments = fds.split_off(fds.len() - put.sizes.len());
                let segments = put.sizes.iter().copied().zip(segments).collect::<Vec<_>>();
                let upload = Upload { put, terms, total, tables: fds, segments };
                self.uploading += upload.descriptors();
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

    /// Checks whether a put may come, before the rest of it does.
    fn admit_put(&self, id: ConnectionId, put: &Put) -> Result<(Terms, usize), BrokerError> {
        let (terms, total, bytes) = check(put)?;
        let Some(connection) = self.connections.get(&id) else { return invalid("the connection has ended") };
        self.objects.check_put(&connection.caller, connection, &terms, bytes)?;
        let tables = put.parts.len() + 1;
        self.require_descriptors(total + tables)?;
        Ok((terms, total))
    }

    /// Some more of a put's segments have come.
    pub(super) fn segments(&mut self, id: ConnectionId, segments: Segments, fds: Vec<OwnedFd>) {
        let Some(connection) = self.connections.get_mut(&id) else { return self.worker.reject(fds) };
        let Request::Upload(mut upload) = std::mem::take(&mut connection.request) else {
            self.worker.reject(fds);
            return self.break_off(id, "segments came where no put waits for any");
        };
        let (first, have, more) = (segments.first, upload.segments.len(), segments.sizes.len());
        if first != have as u64 || have + more > upload.total {
            let total = upload.total;
            self.uploading -= upload.descriptors();
            self.worker.reject(upload.into_fds().into_iter().chain(fds).collect());
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

    /// All segments of a put are there.
    fn uploaded(&mut self, id: ConnectionId, upload: Upload) {
        let descriptors = upload.descriptors();
        let Some(connection) = self.connections.get_mut(&id) else {
            self.uploading -= descriptors;
            return self.worker.reject(upload.into_fds());
        };
        let (maker, emulated) = (connection.caller.describe(), self.emulated);
        if upload.is_small() {
            let prepared = prepare(upload, &maker, emulated);
            self.uploading -= descriptors;
            return self.prepared(id, prepared);
        }
        connection.request = Request::Worker;
        self.worker.run(move || {
            let prepared = prepare(upload, &maker, emulated);
            Some(Box::new(move |reactor: &mut Self| {
                reactor.uploading -= descriptors;
                reactor.set_request(id, Request::None);
                reactor.prepared(id, prepared);
                reactor.listen_again(id);
            }))
        });
    }

    /// A put was looked at.
    fn prepared(&mut self, id: ConnectionId, prepared: Result<Prepared, (BrokerError, Vec<OwnedFd>)>) {
        let prepared = match prepared {
            Ok(prepared) => prepared,
            Err((refusal, fds)) => {
                self.worker.reject(fds);
                return self.refuse(id, refusal);
            }
        };
        let Prepared { terms, announced, group, wait, metadata, parts } = prepared;
        let Some(caller) = self.connections.get(&id).map(|connection| connection.caller.clone()) else {
            return self.objects.discard(metadata, parts);
        };
        let together = group.filter(|_| announced.len() > parts.len());
        let Some(group) = together else {
            let result = self.publish(&caller, &terms, metadata, parts);
            return match result {
                Ok(published) => {
                    self.reply(id, &Message::Published(published));
                    self.published(&terms.name);
                }
                Err(refusal) => self.refuse(id, refusal),
            };
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
        let bytes = bytes_of(&parts);
        // Others may have come while this was looked at.
        if let Err(refusal) = self.objects.users().check_bytes(caller.uid, bytes) {
            self.objects.discard(metadata, parts);
            return Err(refusal);
        }
        self.objects.users().add_waiting(caller.uid, bytes);
        let fresh = || Draft {
            uid: caller.uid,
            announced: announced.to_vec(),
            terms: terms.clone(),
            metadata: None,
            puts: Vec::new(),
        };
        let draft = self.drafts.entry(key.clone()).or_insert_with(fresh);
        if let Some(metadata) = metadata {
            draft.metadata = Some((caller.connection, metadata));
        }
        draft.puts.push((caller.connection, parts));
        Ok(())
    }

    /// All parts of a version are there.
    fn complete(&mut self, key: &DraftKey) {
        let Some(draft) = self.drafts.remove(key) else { return };
        let Draft { uid, announced, terms, metadata, puts } = draft;
        self.objects.users().remove_waiting(uid, puts.iter().map(|(_, parts)| bytes_of(parts)).sum());
        let makers: Vec<ConnectionId> = puts.iter().map(|(id, _)| *id).collect();
        let mut parts: Vec<NewPart> = puts.into_iter().flat_map(|(_, parts)| parts).collect();
        parts.sort_by_key(|part| announced.iter().position(|name| *name == part.name));
        let first = makers.iter().find_map(|id| self.connections.get(id)).map(|connection| connection.caller.clone());
        let metadata = metadata.map(|(_, table)| table);
        let Some(caller) = first else { return self.objects.discard(metadata, parts) };
        let result = self.publish(&caller, &terms, metadata, parts);
        for id in makers {
            self.set_request(id, Request::None);
            match &result {
                Ok(published) => self.reply(id, &Message::Published(published.clone())),
                Err(refusal) => self.refuse(id, refusal.clone()),
            }
            self.listen_again(id);
        }
        if result.is_ok() {
            self.published(&terms.name);
        }
    }

    fn publish(
        &mut self,
        caller: &Caller,
        terms: &Terms,
        metadata: Option<NewTable>,
        mut parts: Vec<NewPart>,
    ) -> Result<crate::wire::broker::Published, BrokerError> {
        let mut metadata = metadata;
        if let Err(error) = fit(&mut metadata, &mut parts) {
            self.objects.discard(metadata, parts);
            return refuse(RefusalCode::Full, format!("the broker can't make a memfd for a table: {error}"));
        }
        let Some(connection) = self.connections.get_mut(&caller.connection) else {
            self.objects.discard(metadata, parts);
            return invalid("the connection has ended");
        };
        let published = self.objects.publish(caller, connection, terms, metadata, parts)?;
        if self.objects.follows_maker(&terms.name) {
            connection.names.insert(terms.name.clone());
        }
        Ok(published)
    }

    /// Takes a connection's parts out of a version that is not complete.
    pub(super) fn withdraw(&mut self, id: ConnectionId, key: &DraftKey) {
        let Some(draft) = self.drafts.get_mut(key) else { return };
        let (gone, stay): (Vec<_>, Vec<_>) = std::mem::take(&mut draft.puts).into_iter().partition(|(of, _)| *of == id);
        draft.puts = stay;
        self.objects.users().remove_waiting(draft.uid, gone.iter().map(|(_, parts)| bytes_of(parts)).sum());
        let metadata = draft.metadata.take_if(|(of, _)| *of == id).map(|(_, table)| table);
        let empty = draft.puts.is_empty();
        let rest = if empty { self.drafts.remove(key) } else { None };
        let rest = rest.and_then(|draft| draft.metadata).map(|(_, table)| table);
        self.objects.discard(metadata.or(rest), gone.into_iter().flat_map(|(_, parts)| parts).collect());
    }

    /// The wait for the parts of others is over.
    pub(super) fn parts_late(&mut self, id: ConnectionId, key: &DraftKey, code: RefusalCode, _now: Instant) {
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
