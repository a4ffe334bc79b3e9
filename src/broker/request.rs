//! Checks of names, of a put's request, by its client and by the server, and of its arrays, by its client and by readers.

use std::collections::HashSet;

use crate::{
    driver::{Backend, GRANULARITY},
    error::{BrokerError, RefusalCode},
    wire::{
        MAX_NAME, Mechanism,
        broker::{
            ArrayEntry, Attached, MAX_ARRAYS, MAX_ATTRIBUTES, MAX_INLINE, MAX_INLINE_TOGETHER, MAX_METADATA, MAX_PARTS,
            MAX_SEGMENTS, MAX_TABLE, PutHeader, PutPartHeader, Table,
        },
        clean, shorten,
    },
};

/// Refuses a put.
pub(super) fn invalid<T>(message: impl Into<String>) -> Result<T, BrokerError> {
    Err(BrokerError::new(RefusalCode::Invalid, message))
}

/// Refuses a put unless a condition holds.
macro_rules! ensure {
    ($holds:expr, $($message:tt)+) => {
        if !$holds {
            return invalid(format!($($message)+));
        }
    };
}

/// User address space is 47 bits: no process can map more.
const ADDRESSES: u64 = 1 << 47;

/// Checks a put without looking at its descriptors. Returns the backend.
pub(super) fn check(put: &PutHeader) -> Result<Backend, BrokerError> {
    let PutHeader { name: object, parts, announced, sizes, .. } = put;
    check_name(object)?;
    put.group.iter().try_for_each(|group| check_component("group", group))?;
    let backends = [Backend::Cuda, Backend::Host];
    let Some(backend) = backends.into_iter().find(|backend| backend.as_str() == put.backend) else {
        return invalid(format!("the backend `{}` is unknown: use cuda or host", put.backend));
    };
    let mode = put.mode.unwrap_or(0);
    ensure!(mode & !0o666 == 0, "mode {mode:o} is not allowed: at most 666 (read and write)");
    ensure!(!parts.is_empty(), "a put of `{object}` has no parts");
    let most = parts.len().max(announced.len());
    ensure!(most <= MAX_PARTS, "{most} parts are too many: the limit per object is {MAX_PARTS}");
    let mut expected = HashSet::new();
    for name in announced {
        check_component("part", name)?;
        ensure!(expected.insert(name.as_str()), "part `{name}` is announced twice");
    }
    let mut total = 0u64;
    let mut names = HashSet::new();
    for part in parts {
        let name = &part.name;
        check_component("part", name)?;
        ensure!(names.insert(name.as_str()), "part `{name}` is given twice");
        ensure!(expected.is_empty() || expected.contains(name.as_str()), "part `{name}` is not announced");
        check_part(part)?;
        total = total.saturating_add(part.memory.segments);
    }
    check_lengths(put)?;
    let is_whole = announced.len() <= parts.len();
    ensure!(
        put.restore.is_none() || is_whole && put.if_version.is_none(),
        "a restored version must have all its parts and no `if_version`"
    );
    ensure!(is_whole || put.group.is_some(), "the put announces parts of other puts but names no group");
    ensure!(total <= MAX_SEGMENTS as u64, "{total} segments are too many: the limit per object is {MAX_SEGMENTS}");
    let first = sizes.len();
    ensure!(
        (1..=total).contains(&(first as u64)),
        "the first record of a put with {total} segments has {first}: 1 to {total} are allowed"
    );
    Ok(backend)
}

/// Checks the claims about a part's memory and arrays.
fn check_part(part: &PutPartHeader) -> Result<(), BrokerError> {
    let PutPartHeader { name, memory, arrays, array_count, .. } = part;
    ensure!(
        memory.mechanism == Mechanism::Vmm,
        "part `{name}` is not shared by vmm: pools and legacy handles end with their process, so a broker can't hold them"
    );
    ensure!(
        memory.pool.is_none() && memory.pointer.is_none() && memory.offset == 0,
        "part `{name}` is shared by vmm but has fields of another mechanism"
    );
    let (size, mapped) = (memory.size, memory.mapped_size);
    ensure!(
        (1..=mapped).contains(&size) && mapped < ADDRESSES,
        "part `{name}` claims {size} bytes of data in {mapped} bytes of memory: 1 to {ADDRESSES} are allowed, and the data must fit"
    );
    // The driver maps only multiples of the granularity.
    ensure!(
        mapped.is_multiple_of(GRANULARITY),
        "part `{name}` claims {mapped} bytes of memory, which is not a multiple of the granularity, {GRANULARITY} bytes"
    );
    ensure!(memory.segments > 0, "part `{name}` has no segments");
    ensure!(
        arrays.is_some() == array_count.is_some(),
        "part `{name}` needs both a table of arrays and their number, or neither"
    );
    let count = array_count.unwrap_or(1);
    ensure!(
        (1..=MAX_ARRAYS as u64).contains(&count),
        "part `{name}` claims {count} arrays: 1 to {MAX_ARRAYS} are allowed"
    );
    Ok(())
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
        let length = table.length();
        let (max, place) = match table {
            Table::Length(_) => (max, "in a memfd"),
            Table::Inline(_) => (MAX_INLINE as u64, "in the record"),
        };
        ensure!((1..=max).contains(&length), "{what} has {length} bytes {place}: 1 to {max} are allowed");
        inline += if table.is_attached() { 0 } else { length };
    }
    let limit = inline_room(put.parts.len(), put.announced.len());
    ensure!(
        inline <= limit as u64,
        "the tables in the record have {inline} bytes in total, and the limit is {limit}: send some in memfds"
    );
    Ok(())
}

/// The most bytes of tables in a put's record. The puts of a group share the limit: a lease of their version is one record.
pub(super) fn inline_room(parts: usize, announced: usize) -> usize {
    MAX_INLINE_TOGETHER * parts / announced.max(parts).max(1)
}

/// A value, shortened for a sentence.
pub(super) fn short(value: &impl ToString) -> String {
    let mut text = value.to_string();
    shorten(&mut text, 100);
    text
}

/// Checks the table of a part of `size` bytes.
pub(super) fn check_arrays(part: &str, size: u64, arrays: &[ArrayEntry]) -> Result<(), BrokerError> {
    let count = arrays.len();
    ensure!(count <= MAX_ARRAYS, "{count} arrays in part `{part}` are too many: the limit is {MAX_ARRAYS}");
    let mut names = HashSet::with_capacity(count);
    for ArrayEntry { name, array, attributes } in arrays {
        let length = name.len();
        ensure!(
            (1..=1024).contains(&length),
            "the name of an array in part `{part}` has {length} bytes: 1 to 1024 are allowed"
        );
        ensure!(names.insert(name.as_str()), "array `{}` occurs twice in part `{part}`", short(name));
        if let Err(error) = array.check(size) {
            let (shown, why) = (short(name), error.in_full());
            return invalid(format!("array `{shown}` exceeds part `{part}` of {size} bytes: {why}"));
        }
        let text = attributes.as_ref().map_or("{}", Attached::as_str);
        ensure!(
            text.len() <= MAX_ATTRIBUTES && text.starts_with('{'),
            "the attributes of array `{}` have {} bytes: only JSON objects of at most {MAX_ATTRIBUTES} bytes are allowed",
            short(name),
            text.len()
        );
    }
    Ok(())
}

/// Checks a name: components of `[A-Za-z0-9._-]` separated by `/`, at most 255 bytes, no empty, `.` or `..` component.
pub(super) fn check_name(name: &str) -> Result<(), BrokerError> {
    let problem = match name {
        "" => "it is empty".to_owned(),
        _ if name.len() > MAX_NAME => return Err(too_long("name", name, name.len())),
        _ => match name.split('/').find_map(find_problem) {
            None => return Ok(()),
            Some(problem) => problem,
        },
    };
    Err(unusable("name", name, &problem))
}

/// Checks the prefix of a list or watch, which may be empty and matches nothing if no name starts with it.
pub(super) fn check_prefix(prefix: &str) -> Result<(), BrokerError> {
    match prefix.len() {
        0..=MAX_NAME => Ok(()),
        length => Err(too_long("prefix", prefix, length)),
    }
}

/// Checks the name of a part or a group: one component.
pub(super) fn check_component(what: &str, name: &str) -> Result<(), BrokerError> {
    match find_problem(name) {
        None if name.len() <= MAX_NAME => Ok(()),
        None => Err(too_long(what, name, name.len())),
        Some(problem) => Err(unusable(what, name, &problem)),
    }
}

fn find_problem(component: &str) -> Option<String> {
    match component {
        "" => Some("a component is empty".to_owned()),
        "." | ".." => Some(format!("a component is `{component}`")),
        _ => {
            let unfit = component.chars().find(|&c| !(c.is_ascii_alphanumeric() || "._-".contains(c)))?;
            Some(format!("it contains {unfit:?}, and only A-Z, a-z, 0-9, `.`, `_` and `-` are allowed"))
        }
    }
}

fn too_long(what: &str, name: &str, length: usize) -> BrokerError {
    unusable(what, name, &format!("it has {length} bytes, and at most {MAX_NAME} are allowed"))
}

fn unusable(what: &str, name: &str, problem: &str) -> BrokerError {
    let mut shown: String = name.chars().take(80).collect();
    clean(&mut shown);
    BrokerError::new(RefusalCode::Invalid, format!("the {what} `{shown}` can't be used: {problem}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_validated() {
        for good in ["a", "models/llama", "A.b_c-9/..x/...", &"n".repeat(255)] {
            assert_eq!(check_name(good), Ok(()), "{good}");
        }
        for bad in ["", "/a", "a/", "a//b", ".", "a/../b", "a b", "a\n", "ä", "a\0", &"n".repeat(256)] {
            let error = check_name(bad).unwrap_err();
            assert_eq!(error.code, RefusalCode::Invalid);
            assert!(!error.message.contains('\n') && !error.message.contains('\0'), "{}", error.message);
        }
        assert!(check_component("part", "rank0").is_ok() && check_prefix(&"n".repeat(255)).is_ok());
        assert_eq!(check_prefix(&"n".repeat(256)).unwrap_err().code, RefusalCode::Invalid);
        assert!(check_component("part", "a/b").unwrap_err().message.contains("part"));
    }
}
