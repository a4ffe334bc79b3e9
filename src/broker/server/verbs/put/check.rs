//! Validates a put: its request, memory and tables.

use std::{
    collections::HashMap,
    os::fd::{AsFd, OwnedFd},
    time::Duration,
};

use crate::{
    broker::{
        request::{self, PutClaims},
        server::state::{
            drafts::DraftPut,
            inspect::{Inode, inode, inspect},
            objects::{NewPart, NewTable, NewVersion, Terms},
            refuse,
            upload::ReceivedPut,
        },
        table,
    },
    driver::GRANULARITY,
    error::{BrokerError, RefusalCode},
    wire::{
        Check,
        broker::{MAX_METADATA, MAX_TABLE, Maker, PutHeader, PutPartHeader, Table, read_arrays},
    },
};

pub(super) use crate::broker::request::invalid;

/// A checked request, before its memory is examined.
#[derive(Debug)]
pub(super) struct Checked {
    pub(super) terms: Terms,
    pub(super) segments: usize,
    /// Bytes of memory and tables, as claimed.
    pub(super) bytes: u64,
}

/// An examined put.
#[derive(Debug)]
pub(super) struct ExaminedPut {
    pub(super) share: DraftPut,
    pub(super) group: Option<String>,
    /// How long to wait for the other parts.
    pub(super) wait: Duration,
}

/// Checks a put without looking at its memory.
pub(super) fn check(put: &PutHeader) -> Result<Checked, BrokerError> {
    let PutClaims { backend, segments, bytes } = request::check(put)?;
    let terms = Terms {
        name: put.name.clone(),
        replace: put.replace || put.if_version.is_some(),
        if_version: put.if_version,
        mode: put.mode,
        lifetime: put.lifetime,
        keep: put.keep,
        backend,
        requests: put.request.into_iter().collect(),
        restore: put.restore.clone(),
    };
    Ok(Checked { terms, segments, bytes })
}

/// Examines a put's descriptors and tables in steps, so that other users' work can run in between.
pub(crate) struct Examination {
    upload: ReceivedPut,
    maker: Maker,
    emulated: bool,
    /// The number of arrays of each examined part.
    counts: Vec<u64>,
    /// The number of tables and segments examined so far.
    tables: usize,
    segments: usize,
    /// Array counts of memfds already read, by inode and claimed length.
    read: HashMap<(Inode, u64), u64>,
}

/// The result of an examination step.
pub(crate) enum Examined {
    More(Box<Examination>),
    /// The put can be published.
    Accepted(ExaminedPut),
    /// The put is refused. The caller closes its descriptors.
    Refused(BrokerError, Vec<OwnedFd>),
}

impl Examination {
    pub(crate) fn new(upload: ReceivedPut, maker: Maker, emulated: bool) -> Self {
        let (counts, read) = (Vec::with_capacity(upload.put.parts.len()), HashMap::new());
        Self { upload, maker, emulated, counts, tables: 0, segments: 0, read }
    }

    /// Examines the metadata and the first part, or the next part. Reads at most one array table.
    pub(crate) fn step(mut self) -> Examined {
        let next = match self.counts.len() {
            0 => self.examine_metadata().and_then(|()| self.examine_part()),
            _ => self.examine_part(),
        };
        match next {
            Err(refusal) => Examined::Refused(refusal, self.upload.into_fds()),
            Ok(()) if self.counts.len() < self.upload.put.parts.len() => Examined::More(Box::new(self)),
            Ok(()) => Examined::Accepted(self.finish()),
        }
    }

    fn examine_metadata(&mut self) -> Result<(), BrokerError> {
        let Some(metadata) = &self.upload.put.metadata else { return Ok(()) };
        let text = match metadata {
            Table::Inline(text) => text.as_str().to_owned(),
            Table::Length(length) => {
                let fd = &self.upload.tables[self.tables];
                self.tables += 1;
                table::read(fd.as_fd(), *length, MAX_METADATA)
                    .or_else(|problem| invalid(format!("the metadata: {problem}")))?
            }
        };
        match serde_json::from_str::<Check>(&text) {
            Ok(_) => Ok(()),
            Err(error) => invalid(format!("the metadata is not a JSON object: {error}")),
        }
    }

    fn examine_part(&mut self) -> Result<(), BrokerError> {
        let at = self.counts.len();
        let count = match &self.upload.put.parts[at].arrays {
            None => 0,
            Some(Table::Inline(text)) => check_arrays(&self.upload.put.parts[at], text.as_str())?,
            Some(Table::Length(length)) => self.count_arrays(at, *length)?,
        };
        self.counts.push(count);
        let ReceivedPut { put, terms, segments, .. } = &self.upload;
        let part = &put.parts[at];
        let (name, memory) = (&part.name, &part.memory);
        let segments = segments[self.segments..].iter().take(memory.segments as usize);
        let mut sum = 0u64;
        for (at, (size, fd)) in segments.enumerate() {
            if !size.is_multiple_of(GRANULARITY) {
                return invalid(format!(
                    "segment {at} of part `{name}` has {size} bytes, which is not a multiple of the granularity, {GRANULARITY} bytes"
                ));
            }
            if let Err(unfit) = inspect(fd.as_fd(), terms.backend, *size, memory.immutable, self.emulated) {
                return refuse(RefusalCode::Memory, format!("segment {at} of part `{name}` can't be held: {unfit}"));
            }
            sum = sum.saturating_add(*size);
        }
        if sum != memory.mapped_size {
            let mapped = memory.mapped_size;
            return invalid(format!(
                "the segments of part `{name}` have {sum} bytes in total, but the part claims {mapped}"
            ));
        }
        self.segments += memory.segments as usize;
        Ok(())
    }

    /// Counts the arrays of a part's table. A memfd shared by several parts is read once.
    fn count_arrays(&mut self, at: usize, length: u64) -> Result<u64, BrokerError> {
        let ReceivedPut { put, tables, .. } = &self.upload;
        let fd = &tables[self.tables];
        let refusal = |problem: String| {
            BrokerError::new(RefusalCode::Invalid, format!("part `{}`: {problem}", put.parts[at].name))
        };
        let unknown = |error| refusal(format!("the descriptor of its table can't be examined: {error}"));
        let file = inode(fd.as_fd()).map_err(unknown)?;
        if let Some(count) = self.read.get(&(file, length)) {
            self.tables += 1;
            return Ok(*count);
        }
        // The arrays must fit the smallest of the parts that share the table.
        let tables_of = put.parts[at..].iter().filter(|part| matches!(part.arrays, Some(Table::Length(_))));
        let parts = tables_of.zip(&tables[self.tables..]);
        let same = parts.filter(|(_, other)| inode(other.as_fd()).is_ok_and(|other| other == file));
        let smallest = same.map(|(part, _)| part).min_by_key(|part| part.memory.size).unwrap_or(&put.parts[at]);
        let text = table::read(fd.as_fd(), length, MAX_TABLE).map_err(refusal)?;
        let count = check_arrays(smallest, &text)?;
        self.read.insert((file, length), count);
        self.tables += 1;
        Ok(count)
    }

    fn finish(self) -> ExaminedPut {
        let Self { upload: ReceivedPut { put, terms, tables, segments, .. }, maker, counts, .. } = self;
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
            let name = part.name;
            let memory = part.memory;
            let digest = part.digest;
            let maker = maker.clone();
            parts.push(NewPart { name, memory, arrays, array_count, digest, maker, segments });
        }
        let wait = Duration::from_millis(put.wait_ms.unwrap_or(0));
        let mut announced = put.announced;
        if announced.is_empty() {
            announced = parts.iter().map(|part| part.name.clone()).collect();
        }
        let version = NewVersion { terms, metadata, parts };
        ExaminedPut { share: DraftPut { announced, version }, group: put.group, wait }
    }
}

/// Checks an array table. Returns the number of arrays.
fn check_arrays(part: &PutPartHeader, text: &str) -> Result<u64, BrokerError> {
    let name = &part.name;
    let arrays = match read_arrays(text) {
        Ok(arrays) => arrays,
        Err(error) => return invalid(format!("the table of part `{name}` is not an array table: {error}")),
    };
    request::check_arrays(name, part.memory.size, &arrays)?;
    Ok(arrays.len() as u64)
}
