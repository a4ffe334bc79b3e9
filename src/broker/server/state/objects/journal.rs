//! The log of changes, and the events for watchers.

use std::{
    collections::{HashMap, VecDeque},
    io,
    os::fd::OwnedFd,
};

use uuid::Builder;

use crate::broker::server::state::random::random;
use crate::{
    broker::{
        catalogue::{
            self, Catalogue, CatalogueError, Record, Records, Rewrite, Unreadable,
            record::{self, Completed, Deleted, Seen, Version},
        },
        keeper::{Keeper, Mark, Name, Store},
    },
    error::{Error, Result},
    wire::broker::{Event, EventKind, Maker, Token},
};

/// The number of events kept in memory.
const MAX_EVENTS: usize = 16 * 1024;

/// The number of events copied into a new log: watchers are rarely further behind.
const MAX_EVENTS_COPIED: usize = 1024;

/// The number of remembered requests without a live version: deletes, and puts of versions that are gone.
const MAX_COMPLETED: usize = 1024;

/// The number of deleted names remembered per user.
const MAX_DELETED: usize = 1024;

/// The catalogue, the events, and everything else that the next server needs.
#[derive(Debug)]
pub(crate) struct Journal {
    log: Catalogue,
    /// Whether the keeper holds the log under the second of its two names.
    second: bool,
    /// The memfd under the other name: the next log.
    spare: Option<OwnedFd>,
    /// The position after the spare in the messages to the keeper.
    spare_mark: Mark,
    instance: String,
    starts: u64,
    events: VecDeque<Seen>,
    last: u64,
    completed: VecDeque<Completed>,
    /// Names that their owners deleted while this instance was running, by owner. Clients may still hold versions of them.
    deleted: HashMap<u32, VecDeque<String>>,
}

impl Journal {
    fn new(log: Catalogue, second: bool) -> Self {
        Self {
            log,
            second,
            spare: None,
            spare_mark: Mark::default(),
            instance: String::new(),
            starts: 0,
            events: VecDeque::new(),
            last: 0,
            completed: VecDeque::new(),
            deleted: HashMap::new(),
        }
    }

    /// Creates an empty log and gives it to the keeper.
    pub(crate) fn create(store: &mut Store) -> Result<Self> {
        let instance = Builder::from_random_bytes(random()).into_uuid().to_string();
        let records = [Record::Begin { instance: instance.clone(), starts: 1 }, Record::Whole { seq: 0 }];
        let memfd = catalogue::memfd().map_err(|error| Error::system("create a memfd for the catalogue", error))?;
        let log = Catalogue::create(memfd, records).map_err(catalogue_error)?;
        let mut journal = Self { instance, starts: 1, ..Self::new(log, false) };
        journal.hand_to(store)?;
        Ok(journal)
    }

    /// Opens the newest log of the previous server, with its unread records. `None` if there is none.
    ///
    /// # Errors
    /// If a log was written by a newer build.
    pub(crate) fn open(logs: [Option<OwnedFd>; 2]) -> Result<Option<(Self, Records)>> {
        let failed = |error| Error::system("duplicate a descriptor", error);
        let mut newest: Option<(Self, Records)> = None;
        let mut spare = None;
        for (second, fd) in [false, true].into_iter().zip(logs) {
            let Some(fd) = fd else { continue };
            let (log, records) = match Catalogue::load(fd.try_clone().map_err(failed)?) {
                Ok(opened) => opened,
                Err(Unreadable::Foreign { .. } | Unreadable::Short { .. }) => {
                    spare = Some(fd);
                    continue;
                }
                Err(error) => return Err(catalogue_error(error)),
            };
            if newest.as_ref().is_some_and(|(known, _)| known.log.generation() > log.generation()) {
                spare = Some(fd);
                continue;
            }
            if let Some((older, _)) = newest.replace((Self::new(log, second), records)) {
                spare = Some(older.log.as_fd().try_clone_to_owned().map_err(failed)?);
            }
        }
        Ok(newest.map(|(journal, records)| (Self { spare, ..journal }, records)))
    }

    /// Applies a record that concerns the journal itself.
    pub(crate) fn replay_record(&mut self, record: &Record) {
        match record {
            Record::Begin { instance, starts } => (self.instance, self.starts) = (instance.clone(), *starts),
            Record::Seen(seen) => self.events.push_back(seen.clone()),
            Record::Completed(completed) => {
                // Earlier records may already have added it.
                self.completed.retain(|known| known.request != completed.request);
                self.note_completed(completed.clone());
            }
            Record::Whole { seq } => self.last = *seq,
            Record::Started => self.starts += 1,
            _ => {}
        }
    }

    /// Sets the append position after the last record.
    pub(crate) fn append_after(&mut self, records: &Records) {
        self.log.append_after(records);
    }

    /// Marks the start of another server in the log, and ensures a spare. The keeper already has the log.
    pub(crate) fn start(&mut self, store: &mut Store) -> Result<()> {
        match self.log.append(&Record::Started) {
            // Nothing can be put until the limit is raised, but existing objects can be read.
            Err(error @ CatalogueError::Limit { .. }) => tracing::error!(%error, "this start can't be recorded"),
            written => written.map_err(catalogue_error)?,
        }
        self.starts += 1;
        if self.spare.is_none() {
            self.renew_spare(store).map_err(|error| Error::system("create a memfd for the catalogue", error))?;
        }
        Ok(())
    }

    /// Gives the log and its spare to the keeper.
    pub(crate) fn hand_to(&mut self, store: &mut Store) -> Result<()> {
        let failed = |error| Error::system("hand the catalogue to the keeper", error);
        store.keep_own(Name::Catalogue(self.second), self.log.as_fd().try_clone_to_owned().map_err(failed)?);
        match &self.spare {
            Some(spare) => {
                store.keep_own(Name::Catalogue(!self.second), spare.try_clone().map_err(failed)?);
                self.spare_mark = store.mark();
            }
            None => self.renew_spare(store).map_err(failed)?,
        }
        Ok(())
    }

    /// Creates the next spare ahead of time: the keeper must have it before compaction.
    fn renew_spare(&mut self, store: &mut Store) -> io::Result<()> {
        self.spare = None;
        if store.keeper() == Keeper::None {
            return Ok(());
        }
        let memfd = catalogue::memfd()?;
        store.keep_own(Name::Catalogue(!self.second), memfd.try_clone()?);
        self.spare = Some(memfd);
        self.spare_mark = store.mark();
        Ok(())
    }

    /// Writes a change, then publishes its event.
    pub(crate) fn write(&mut self, record: &Record, seen: Option<Seen>) -> Result<(), CatalogueError> {
        self.log.append(record)?;
        self.publish_event(seen);
        Ok(())
    }

    /// Numbers an event and keeps it for watchers.
    pub(crate) fn publish_event(&mut self, seen: Option<Seen>) {
        let Some(mut seen) = seen else { return };
        self.last += 1;
        seen.event.seq = self.last;
        if self.events.len() >= MAX_EVENTS {
            self.events.pop_front();
        }
        self.events.push_back(seen);
    }

    /// Remembers a completed request without a live version: a delete, or the put of a version that is gone.
    pub(crate) fn note_completed(&mut self, completed: Completed) {
        push_bounded(&mut self.completed, completed, MAX_COMPLETED);
    }

    /// Remembers a deleted name, and the request that deleted it.
    pub(crate) fn note_deleted(&mut self, deleted: &Deleted) {
        let Deleted { name, request, owner, .. } = deleted;
        if let Some(request) = *request {
            self.note_completed(Completed { request, name: name.clone(), published: None });
        }
        if let Some(owner) = owner {
            push_bounded(self.deleted.entry(*owner).or_default(), name.clone(), MAX_DELETED);
        }
    }

    /// Whether this user deleted the name recently while this instance was running.
    pub(crate) fn was_deleted(&self, name: &str, owner: u32) -> bool {
        self.deleted.get(&owner).is_some_and(|names| names.iter().any(|deleted| deleted == name))
    }

    /// A completed request without a live version.
    pub(crate) fn completed(&self, request: Token) -> Option<&Completed> {
        self.completed.iter().find(|completed| completed.request == request)
    }

    /// Whether the log should and can be rewritten: the keeper must have the next log first.
    pub(crate) fn should_compact(&self, store: &Store) -> bool {
        self.log.should_compact() && self.can_compact(store)
    }

    pub(super) fn can_compact(&self, store: &Store) -> bool {
        store.holds(self.spare_mark)
    }

    pub(super) fn postpone(&mut self) {
        self.log.postpone();
    }

    pub(super) fn log(&self) -> &Catalogue {
        &self.log
    }

    /// Starts a new log. The caller adds the state's records.
    pub(super) fn begin_compaction(&mut self, store: &mut Store) -> Result<Rewrite, CatalogueError> {
        let failed = |source| CatalogueError::System { action: "make room for", source };
        if self.spare.is_none() {
            self.renew_spare(store).map_err(failed)?;
        }
        // Stays the spare if this fails.
        let spare = match &self.spare {
            Some(spare) => spare.try_clone(),
            None => catalogue::memfd(),
        };
        let mut rewrite = self.log.rewrite(spare.map_err(failed)?)?;
        rewrite.add(&Record::Begin { instance: self.instance.clone(), starts: self.starts })?;
        // Before the versions: `Deleted` removes the name from all preceding versions.
        for (owner, names) in &self.deleted {
            for name in names {
                let (name, owner) = (name.clone(), Some(*owner));
                rewrite.add(&Record::Deleted(Deleted {
                    name,
                    at_ms: 0,
                    uid: 0,
                    pid: 0,
                    command: None,
                    request: None,
                    owner,
                }))?;
            }
        }
        Ok(rewrite)
    }

    /// Completes the new log and switches to it. Returns the old descriptor for the caller to close. If the keeper was replaced and does
    /// not have the new log yet, returns `None` and keeps the old log.
    pub(super) fn finish_compaction(
        &mut self,
        store: &mut Store,
        mut rewrite: Rewrite,
    ) -> Result<Option<OwnedFd>, CatalogueError> {
        if !store.holds(self.spare_mark) {
            return Ok(None);
        }
        let kept = self.events.len().saturating_sub(MAX_EVENTS_COPIED);
        self.events.iter().skip(kept).try_for_each(|seen| rewrite.add(&Record::Seen(seen.clone())))?;
        self.completed.iter().try_for_each(|completed| rewrite.add(&Record::Completed(completed.clone())))?;
        rewrite.add(&Record::Whole { seq: self.last })?;
        let old = rewrite.finish(&mut self.log)?;
        // The keeper already has the new log, which is valid from now on. The old log's name becomes the spare's.
        store.remove(Name::Catalogue(self.second));
        self.second = !self.second;
        if let Err(error) = self.renew_spare(store) {
            tracing::warn!(%error, "cannot create a memfd for the next catalogue");
        }
        Ok(Some(old))
    }

    pub(crate) fn descriptors(&self) -> usize {
        1 + usize::from(self.spare.is_some())
    }

    pub(crate) fn instance(&self) -> &str {
        &self.instance
    }

    pub(crate) fn restarts(&self) -> u64 {
        self.starts.saturating_sub(1)
    }

    pub(crate) fn last_event(&self) -> u64 {
        self.last
    }

    /// The events after a number, and whether earlier events after it were discarded.
    pub(crate) fn events_after(&self, after: u64) -> (bool, impl Iterator<Item = &Seen>) {
        let first = self.last + 1 - self.events.len() as u64;
        let skip = usize::try_from((after + 1).saturating_sub(first)).unwrap_or(usize::MAX);
        (after + 1 < first, self.events.iter().skip(skip))
    }
}

/// Adds an entry, and drops the oldest one if the queue is full.
fn push_bounded<T>(entries: &mut VecDeque<T>, entry: T, max: usize) {
    if entries.len() >= max {
        entries.pop_front();
    }
    entries.push_back(entry);
}

/// An event of a version. It is numbered when it is published.
pub(crate) fn event(kind: EventKind, of: &Version, at_ms: u64, by: Maker) -> Seen {
    let (name, id, Maker { pid, uid, command }) = (of.name.clone(), of.id.clone(), by);
    let size = Some(of.parts.iter().map(|part| part.memory.mapped_size).sum());
    let event = Event { seq: 0, at_ms, kind, name, version: of.version, id, uid, pid, command, size, message: None };
    Seen { event, owner: of.owner, mode: of.mode }
}

pub(crate) fn event_of_lease(kind: EventKind, of: &Version, at_ms: u64, lease: &record::Lease) -> Seen {
    let by = Maker { pid: lease.pid, uid: lease.uid, command: lease.command.clone() };
    let mut seen = event(kind, of, at_ms, by);
    seen.event.size = Some(lease.size);
    seen
}

/// The catalogue can't be used, so the server can't start.
pub(crate) fn catalogue_error(error: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::system("use the broker's catalogue", io::Error::other(error))
}
