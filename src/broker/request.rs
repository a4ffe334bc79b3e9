//! Checks of a put's request, by its client and by the server, and of its arrays, by its client and by readers.

use std::collections::HashSet;

use super::name::{check_component, check_name};
use crate::{
    driver::{Backend, GRANULARITY},
    error::{BrokerError, RefusalCode},
    wire::{
        Mechanism,
        broker::{
            ArrayEntry, MAX_ARRAYS, MAX_ATTRIBUTES, MAX_INLINE, MAX_INLINE_TOGETHER, MAX_METADATA, MAX_PARTS,
            MAX_SEGMENTS, MAX_TABLE, PutHeader, PutPartHeader, Table,
        },
    },
};

/// Refuses a put.
pub(super) fn invalid<T>(message: impl Into<String>) -> Result<T, BrokerError> {
    Err(BrokerError::new(RefusalCode::Invalid, message))
}

/// User address space is 47 bits: no process can map more.
const ADDRESSES: u64 = 1 << 47;

/// Checks a put without looking at its descriptors. Returns the backend.
pub(super) fn check(put: &PutHeader) -> Result<Backend, BrokerError> {
    check_name(&put.name)?;
    put.group.iter().try_for_each(|group| check_component("group", group))?;
    let backends = [Backend::Cuda, Backend::Host];
    let Some(backend) = backends.into_iter().find(|backend| backend.as_str() == put.backend) else {
        return invalid(format!("the backend `{}` is unknown: use cuda or host", put.backend));
    };
    if let Some(mode) = put.mode.filter(|mode| mode & !0o666 != 0) {
        return invalid(format!("mode {mode:o} is not allowed: at most 666 (read and write)"));
    }
    if put.parts.is_empty() {
        return invalid(format!("a put of `{}` has no parts", put.name));
    }
    let most = put.parts.len().max(put.announced.len());
    if most > MAX_PARTS {
        return invalid(format!("{most} parts are too many: the limit per object is {MAX_PARTS}"));
    }
    let mut announced = HashSet::new();
    for name in &put.announced {
        check_component("part", name)?;
        if !announced.insert(name.as_str()) {
            return invalid(format!("part `{name}` is announced twice"));
        }
    }
    let mut total = 0u64;
    let mut names = HashSet::new();
    for part in &put.parts {
        let name = &part.name;
        check_component("part", name)?;
        if !names.insert(name.as_str()) {
            return invalid(format!("part `{name}` is given twice"));
        }
        if !announced.is_empty() && !announced.contains(name.as_str()) {
            return invalid(format!("part `{name}` is not announced"));
        }
        check_memory(part)?;
        total = total.saturating_add(part.memory.segments);
        check_count(part)?;
    }
    check_lengths(put)?;
    if put.restore.is_some() && (put.announced.len() > put.parts.len() || put.if_version.is_some()) {
        return invalid("a restored version must have all its parts and no `if_version`");
    }
    if put.announced.len() > put.parts.len() && put.group.is_none() {
        return invalid("the put announces parts of other puts but names no group");
    }
    if total > MAX_SEGMENTS as u64 {
        return invalid(format!("{total} segments are too many: the limit per object is {MAX_SEGMENTS}"));
    }
    if put.sizes.is_empty() || put.sizes.len() as u64 > total {
        return invalid(format!(
            "the first record of a put with {total} segments has {}: 1 to {total} are allowed",
            put.sizes.len()
        ));
    }
    Ok(backend)
}

/// Checks the claims about a part's memory.
fn check_memory(part: &PutPartHeader) -> Result<(), BrokerError> {
    let PutPartHeader { name, memory, .. } = part;
    if memory.mechanism != Mechanism::Vmm {
        return invalid(format!(
            "part `{name}` is not shared by vmm: pools and legacy handles end with their process, so a broker can't hold them"
        ));
    }
    if memory.pool.is_some() || memory.pointer.is_some() || memory.offset != 0 {
        return invalid(format!("part `{name}` is shared by vmm but has fields of another mechanism"));
    }
    let (size, mapped) = (memory.size, memory.mapped_size);
    if size == 0 || size > mapped || mapped >= ADDRESSES {
        return invalid(format!(
            "part `{name}` claims {size} bytes of data in {mapped} bytes of memory: 1 to {ADDRESSES} are allowed, and the data must fit"
        ));
    }
    // The driver maps only multiples of the granularity.
    if !mapped.is_multiple_of(GRANULARITY) {
        return invalid(format!(
            "part `{name}` claims {mapped} bytes of memory, which is not a multiple of the granularity, {GRANULARITY} bytes"
        ));
    }
    if memory.segments == 0 {
        return invalid(format!("part `{name}` has no segments"));
    }
    Ok(())
}

/// Checks the claimed number of arrays.
fn check_count(part: &PutPartHeader) -> Result<(), BrokerError> {
    let PutPartHeader { name, arrays, array_count, .. } = part;
    match (arrays, array_count) {
        (None, None) => Ok(()),
        (Some(_), Some(count)) if (1..=MAX_ARRAYS as u64).contains(count) => Ok(()),
        (Some(_), Some(count)) => {
            invalid(format!("part `{name}` claims {count} arrays: 1 to {MAX_ARRAYS} are allowed"))
        }
        _ => invalid(format!("part `{name}` needs both a table of arrays and their number, or neither")),
    }
}

/// Checks the claimed lengths of a put's tables.
fn check_lengths(put: &PutHeader) -> Result<(), BrokerError> {
    let arrays = put.parts.iter().filter_map(|part| {
        let table = part.arrays.as_ref()?;
        Some((format!("the table of part `{}`", part.name), table, MAX_TABLE))
    });
    let metadata = put.metadata.iter().map(|table| ("the metadata".to_owned(), table, MAX_METADATA));
    let mut inline = 0;
    for (what, table, max) in metadata.chain(arrays) {
        let (max, place) = match table {
            Table::Length(_) => (max, "in a memfd"),
            Table::Inline(_) => (MAX_INLINE as u64, "in the record"),
        };
        let length = table.length();
        if !(1..=max).contains(&length) {
            return invalid(format!("{what} has {length} bytes {place}: 1 to {max} are allowed"));
        }
        inline += if table.is_attached() { 0 } else { length };
    }
    match inline <= MAX_INLINE_TOGETHER as u64 {
        true => Ok(()),
        false => invalid(format!(
            "the tables in the record have {inline} bytes in total, and the limit is {MAX_INLINE_TOGETHER}: send some in memfds"
        )),
    }
}

/// Checks the table of a part of `size` bytes.
pub(super) fn check_arrays(part: &str, size: u64, arrays: &[ArrayEntry]) -> Result<(), BrokerError> {
    if arrays.len() > MAX_ARRAYS {
        let got = arrays.len();
        return invalid(format!("{got} arrays in part `{part}` are too many: the limit is {MAX_ARRAYS}"));
    }
    let mut names = HashSet::with_capacity(arrays.len());
    for entry in arrays {
        let mut shown = entry.name.clone();
        crate::wire::shorten(&mut shown, 100);
        if entry.name.is_empty() || entry.name.len() > 1024 {
            let length = entry.name.len();
            return invalid(format!("the name of an array in part `{part}` has {length} bytes: 1 to 1024 are allowed"));
        }
        if !names.insert(entry.name.as_str()) {
            return invalid(format!("array `{shown}` occurs twice in part `{part}`"));
        }
        if let Err(error) = entry.array.check(size) {
            return invalid(format!("array `{shown}` exceeds part `{part}` of {size} bytes: {}", error.in_full()));
        }
        if let Some(attributes) = &entry.attributes {
            let text = attributes.as_str();
            if text.len() > MAX_ATTRIBUTES || !text.starts_with('{') {
                return invalid(format!(
                    "the attributes of array `{shown}` have {} bytes: only JSON objects of at most {MAX_ATTRIBUTES} bytes are allowed",
                    text.len()
                ));
            }
        }
    }
    Ok(())
}
