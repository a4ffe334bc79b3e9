//! What is wrong with a put: in what it says, in its memory, in its tables.

use std::{
    collections::HashSet,
    os::fd::{AsFd, OwnedFd},
    time::Duration,
};

use super::{Prepared, Upload, invalid, refuse};
use crate::{
    broker::{
        name::{check_component, check_name},
        server::{
            inspect::inspect,
            objects::{NewPart, NewTable, Terms},
        },
        table,
    },
    driver::Backend,
    error::{BrokerError, RefusalCode},
    wire::{
        Check, Mechanism,
        broker::{MAX_ARRAYS, MAX_ATTRIBUTES, MAX_METADATA, MAX_SEGMENTS, MAX_TABLE, Maker, Put, Table, read_arrays},
    },
};

/// More bytes than a process has addresses for: half of 48 bits is the kernel's.
const ADDRESSES: u64 = 1 << 47;

/// Checks what a put says, without a look at its memory.
pub(super) fn check(put: &Put) -> Result<(Terms, usize, u64), BrokerError> {
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
    if put.restore.is_some() && (put.announced.len() > put.parts.len() || put.if_version.is_some()) {
        return invalid("a version that is offered back comes whole, and replaces none that is there");
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
        requests: put.request.into_iter().collect(),
        restore: put.restore.clone(),
    };
    Ok((terms, total as usize, bytes))
}

/// Looks at all descriptors and tables of a put. Those of a put that is refused come back, to be closed.
pub(super) fn prepare(upload: Upload, maker: &Maker, emulated: bool) -> Result<Prepared, (BrokerError, Vec<OwnedFd>)> {
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
