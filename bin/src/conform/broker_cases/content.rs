//! Cases about the description of objects: ranges, arrays, metadata, digests and tables.

use std::{
    fs::File,
    io::{self, Write},
    os::fd::{AsFd, OwnedFd},
};

use nix::{
    fcntl::{FcntlArg, SealFlag, fcntl},
    sys::memfd::{MFdFlags, memfd_create},
};
use serde_json::{Value, json};
use vmmfd::{
    driver::GRANULARITY,
    error::Error,
    internals::read_table,
    wire::{
        ByteRange,
        broker::{Attached, GetObject, MAX_METADATA, Put, RefusalCode, Table},
    },
};

use super::{
    client::{Broker, PART, descriptors, fresh, memory, named, put_of},
    greeted,
    objects::check_lease,
};
use crate::conform::{
    Case, CaseResult, Context,
    case_end::{check, violation},
    memory::not_memory,
};

pub(super) fn cases() -> Vec<Case> {
    vec![
        greeted("range", "G3 G5", range),
        greeted("arrays", "G3 B5", arrays),
        greeted("expect", "G4", expect),
        greeted("tables", "B6 B7", tables),
        greeted("bad-tables", "B5 B6", bad_tables),
    ]
}

fn range(context: &Context<'_>, broker: &mut Broker<'_>) -> CaseResult {
    let (memory, name) = (memory(context, 4)?, fresh("range")?);
    let put = put_of(&name, &memory);
    broker.put(&put, &descriptors(&memory))?;
    let size = put.parts[0].memory.size;
    let of_range = |offset, length| GetObject { range: Some(ByteRange { offset, length }), ..named(&name) };
    for (offset, length) in [(0, 1), (GRANULARITY - 1, 2), (2 * GRANULARITY, GRANULARITY), (size - 1, 1), (0, size)] {
        let leased = broker.get_one(of_range(offset, length))?;
        check_lease(context, &leased, &put, 0)?;
        let runs = &leased.header.parts[0].runs;
        let covers = runs.len() == 1 && runs[0].offset <= offset && offset + length <= runs[0].offset + runs[0].size;
        check(covers, "G3", || format!("sent {runs:?} for {length} bytes at offset {offset}"))?;
    }
    for (offset, length) in [(0, 0), (size, 1), (u64::MAX, u64::MAX)] {
        let request = format!("a range of {length} bytes at offset {offset} of {size}");
        broker.refuse_get(of_range(offset, length), "G3", RefusalCode::Differs, &request)?;
    }
    let both = GetObject { arrays: Some(vec!["x".to_owned()]), ..of_range(0, 1) };
    broker.refuse_get(both, "G3", RefusalCode::Invalid, "a range and arrays")
}

fn inline(value: &Value) -> CaseResult<Option<Table>> {
    let attached = Attached::of(value).map_err(|error| Error::Caller(Box::new(error)))?;
    Ok(Some(Table::Inline(attached)))
}

fn arrays(context: &Context<'_>, broker: &mut Broker<'_>) -> CaseResult {
    let (memory, name) = (memory(context, 3)?, fresh("arrays")?);
    let entries = [("first", 0), ("last", 2 * GRANULARITY), ("across", GRANULARITY - 8)];
    let table: Value = entries
        .iter()
        .map(|(name, offset)| {
            let array = json!({"dtype": "uint8", "shape": [16], "offset": offset});
            json!({"name": name, "array": array, "attributes": {"at": offset}})
        })
        .collect();
    let mut put = put_of(&name, &memory);
    put.parts[0].arrays = inline(&table)?;
    broker.put(&put, &descriptors(&memory))?;
    for (array, offset) in entries {
        let leased = broker.get_one(GetObject { arrays: Some(vec![array.to_owned()]), ..named(&name) })?;
        check_lease(context, &leased, &put, 0)?;
        let part = &leased.header.parts[0];
        let covers = part.runs.iter().any(|run| run.offset <= offset && offset + 16 <= run.offset + run.size);
        check(covers, "G3", || format!("sent {:?} for array `{array}`", part.runs))?;
        let found = read_lease_table(part.arrays.as_ref(), &mut leased.tables.iter())?;
        check(found == table, "G5", || format!("sent the arrays {found} instead of {table}"))?;
    }
    let missing = GetObject { arrays: Some(vec!["first".to_owned(), "none".to_owned()]), ..named(&name) };
    broker.refuse_get(missing, "G3", RefusalCode::Differs, "a get of an array that does not exist")
}

/// Reads a table from its record, or from the next descriptor.
fn read_lease_table<'a>(table: Option<&Table>, fds: &mut impl Iterator<Item = &'a OwnedFd>) -> CaseResult<Value> {
    let text = match table {
        None => return violation("B5", "sent no table although one was put"),
        Some(Table::Inline(text)) => text.as_str().to_owned(),
        Some(Table::Length(length)) => {
            let Some(fd) = fds.next() else { return violation("B7", "sent a table without its descriptor") };
            read_table(fd.as_fd(), *length, MAX_METADATA).or_else(|problem| violation("B6", problem))?
        }
    };
    serde_json::from_str(&text).or_else(|error| violation("B5", format!("sent a table that is not JSON: {error}")))
}

fn expect(context: &Context<'_>, broker: &mut Broker<'_>) -> CaseResult {
    let (memory, name) = (memory(context, 1)?, fresh("expect")?);
    let mut put = put_of(&name, &memory);
    put.metadata = inline(&json!({"engine": "x", "layout": [1, {"a": null}]}))?;
    put.parts[0].digest = Some("blake3:00".to_owned());
    broker.put(&put, &descriptors(&memory))?;
    let expecting = |fields: &Value| GetObject { expect: serde_json::from_value(fields.clone()).ok(), ..named(&name) };
    let leased = broker.get_one(expecting(&json!({"layout": [1, {"a": null}]})))?;
    check_lease(context, &leased, &put, 0)?;
    for other in [json!({"engine": "y"}), json!({"absent": 1}), json!({"layout": [1]}), json!({"engine": null})] {
        let request = format!("a get that expects {other}");
        broker.refuse_get(expecting(&other), "G4", RefusalCode::Differs, &request)?;
    }
    let of_digest = |part: &str, digest: &str| {
        let digests = Some([(part.to_owned(), digest.to_owned())].into());
        GetObject { digests, ..named(&name) }
    };
    broker.get_one(of_digest(PART, "blake3:00"))?;
    for (part, digest) in [(PART, "blake3:01"), ("none", "blake3:00")] {
        let request = format!("a get of digest {digest} of part {part}");
        broker.refuse_get(of_digest(part, digest), "G4", RefusalCode::Differs, &request)?;
    }
    Ok(())
}

/// A memfd with this text and these seals.
fn text_memfd(text: &str, seals: SealFlag) -> CaseResult<OwnedFd> {
    let create = || -> io::Result<OwnedFd> {
        let fd = memfd_create(c"conform", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?;
        let mut file = File::from(fd);
        file.write_all(text.as_bytes())?;
        fcntl(&file, FcntlArg::F_ADD_SEALS(seals))?;
        Ok(file.into())
    };
    Ok(create().map_err(|error| Error::system("create a table", error))?)
}

const ALL_SEALS: SealFlag =
    SealFlag::F_SEAL_SHRINK.union(SealFlag::F_SEAL_GROW).union(SealFlag::F_SEAL_WRITE).union(SealFlag::F_SEAL_SEAL);

fn tables(context: &Context<'_>, broker: &mut Broker<'_>) -> CaseResult {
    let (memory, name) = (memory(context, 2)?, fresh("tables")?);
    let metadata = json!({"text": "é".repeat(10_000)});
    let entry =
        |at: u64| json!({"name": format!("array{at}"), "array": {"dtype": "uint8", "shape": [1], "offset": at}});
    let arrays: Value = (0..1000).map(entry).collect();
    let texts = [metadata.to_string(), arrays.to_string()];
    let fds = [text_memfd(&texts[0], ALL_SEALS)?, text_memfd(&texts[1], ALL_SEALS)?];
    let mut put = put_of(&name, &memory);
    put.metadata = Some(Table::Length(texts[0].len() as u64));
    put.parts[0].arrays = Some(Table::Length(texts[1].len() as u64));
    broker.send_put(&put, &[fds[0].as_fd(), fds[1].as_fd()], &descriptors(&memory))?;
    broker.receive_published()?;
    let leased = broker.get_one(named(&name))?;
    check_lease(context, &leased, &put, 0)?;
    let mut fds = leased.tables.iter();
    let found = [
        read_lease_table(leased.header.metadata.as_ref(), &mut fds)?,
        read_lease_table(leased.header.parts[0].arrays.as_ref(), &mut fds)?,
    ];
    check(found == [metadata.clone(), arrays], "B7", || {
        "sent other tables than were put, or in another order".to_owned()
    })?;
    let (info, fds) = broker.stat(&name)?;
    let same = read_lease_table(info.metadata.as_ref(), &mut fds.iter())? == metadata && info.parts[0].arrays == 1000;
    check(same, "Q2", || "described other metadata, or another number of arrays, than was put".to_owned())
}

fn bad_tables(context: &Context<'_>, broker: &mut Broker<'_>) -> CaseResult {
    let (memory, name) = (memory(context, 1)?, fresh("bad-tables")?);
    let put = put_of(&name, &memory);
    let text = json!({"text": "x".repeat(5000)}).to_string();
    let length = text.len() as u64;
    for (request, fd, length) in [
        ("writable metadata", text_memfd(&text, ALL_SEALS.difference(SealFlag::F_SEAL_WRITE))?, length),
        ("metadata with changeable seals", text_memfd(&text, ALL_SEALS.difference(SealFlag::F_SEAL_SEAL))?, length),
        ("metadata of another length", text_memfd(&text, ALL_SEALS)?, length - 1),
        ("metadata that is not an object", text_memfd("[1]", ALL_SEALS)?, 3),
        ("metadata that is not JSON", text_memfd("{", ALL_SEALS)?, 1),
        ("metadata that is not a memfd", not_memory()?, length),
    ] {
        let put = Put { metadata: Some(Table::Length(length)), ..put.clone() };
        broker.send_put(&put, &[fd.as_fd()], &descriptors(&memory))?;
        broker.expect_refusal("B6", RefusalCode::Invalid, request)?;
    }
    let entry = |name: &str, shape: u64| json!({"name": name, "array": {"dtype": "uint8", "shape": [shape]}});
    let mut long = entry("w", 1);
    long["attributes"] = json!({"x": "x".repeat(1024)});
    for (request, arrays) in [
        ("an object instead of arrays", json!({})),
        ("an array outside the memory", json!([entry("w", GRANULARITY + 1)])),
        ("two arrays of the same name", json!([entry("w", 1), entry("w", 1)])),
        ("an array without a name", json!([entry("", 1)])),
        ("attributes that are too long", json!([long])),
    ] {
        let mut put = put.clone();
        put.parts[0].arrays = inline(&arrays)?;
        broker.refuse_put(&put, &descriptors(&memory), "B5", RefusalCode::Invalid, request)?;
    }
    broker.expect_absent("P4", &name, "after its puts were refused")
}
