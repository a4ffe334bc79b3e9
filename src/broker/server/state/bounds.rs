//! Memory that a pending request occupies.

use crate::wire::broker::{GetHeader, GetObject, Message, PutHeader, Table, WatchHeader};

/// Overhead of an allocation, and of a vector or string.
const ALLOCATION: usize = 16;
const HEAD: usize = 24;

/// Size of an entry of a map, and of its first node. A node has room for eleven entries and may be half full.
const ENTRY: usize = 4 * HEAD;
const NODE: usize = 24 * HEAD;

/// Fixed size of a pending request.
const REQUEST: usize = 512;

/// The approximate number of bytes that a request occupies until it is answered; 0 if it is answered at once.
pub(crate) fn memory_of(request: &Message) -> u64 {
    let bytes = match request {
        Message::Get(get) => REQUEST + get_bytes(get),
        Message::Put(put) => REQUEST + put_bytes(put),
        Message::Watch(WatchHeader { prefix, .. }) => REQUEST + 2 * text_bytes(prefix),
        _ => 0,
    };
    bytes as u64
}

fn text_bytes(text: &str) -> usize {
    HEAD + ALLOCATION + text.len()
}

fn get_bytes(get: &GetHeader) -> usize {
    let object = |object: &GetObject| {
        let parts = object.parts.iter().flatten().map(|name| text_bytes(name));
        let ranges = object.ranges.iter().flatten();
        let ranges = ranges.map(|(part, ranges)| ENTRY + text_bytes(part) + 2 * size_of_val(ranges.as_slice()));
        // The name is also stored among the waits.
        size_of::<GetObject>() + NODE + 3 * text_bytes(&object.name) + parts.sum::<usize>() + ranges.sum::<usize>()
    };
    get.objects.iter().map(object).sum()
}

fn put_bytes(put: &PutHeader) -> usize {
    let table = |table: &Option<Table>| match table {
        Some(Table::Inline(attached)) => text_bytes(attached.as_str()),
        _ => 0,
    };
    let part = |part: &crate::wire::broker::PutPartHeader| {
        size_of_val(part)
            + table(&part.arrays)
            + text_bytes(&part.name)
            + text_bytes(&part.memory.device.name)
            + part.digest.as_deref().map_or(0, text_bytes)
    };
    let announced = put.announced.iter().map(|name| text_bytes(name));
    let leases = put.restore.as_ref().map_or(0, |restore| size_of_val(restore.leases.as_slice()));
    table(&put.metadata)
        + put.parts.iter().map(part).sum::<usize>()
        + announced.sum::<usize>()
        + size_of_val(put.sizes.as_slice())
        + leases
}
