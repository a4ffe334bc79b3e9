//! What a broker must do with what objects say of themselves: ranges, arrays, metadata, digests, tables.

use std::{
    fs::File,
    io::Write,
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
        ByteRange, Check,
        broker::{Attached, GetObject, MAX_METADATA, Put, RefusalCode, Table},
    },
};

use super::{
    objects::check,
    speak::{Broker, PART, descriptors, fresh, memory, named, put_of},
};
use crate::conform::{Case, Fault, Scene, memory::not_memory, peer::Peer};

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::new("range", &["G3", "G5"], range),
        Case::new("arrays", &["G3", "B5"], arrays),
        Case::new("expect", &["G4"], expect),
        Case::new("tables", &["B6", "B7"], tables),
        Case::new("bad-tables", &["B5", "B6"], bad_tables),
    ]
}

fn range(scene: &Scene<'_>, peer: &mut Peer) -> Result<(), Fault> {
    let (mut broker, _) = Broker::greet(peer)?;
    let (memory, name) = (memory(scene, 4)?, fresh("range")?);
    let put = put_of(&name, &memory);
    broker.put(&put, &descriptors(&memory))?;
    let size = put.parts[0].memory.size;
    for (offset, length) in [(0, 1), (GRANULARITY - 1, 2), (2 * GRANULARITY, GRANULARITY), (size - 1, 1), (0, size)] {
        let range = Some(ByteRange { offset, length });
        let leased = broker.get_one(GetObject { range, ..named(&name) })?;
        check(scene, &leased, &put, 0)?;
        let covered = |runs: &[vmmfd::wire::Part]| {
            runs.len() == 1 && runs[0].offset <= offset && offset + length <= runs[0].offset + runs[0].size
        };
        if !covered(&leased.header.parts[0].runs) {
            let runs = &leased.header.parts[0].runs;
            return Fault::broken("G3", format!("sent {runs:?} where {length} bytes from {offset} on were asked for"));
        }
    }
    for (offset, length) in [(0, 0), (size, 1), (u64::MAX, u64::MAX)] {
        broker.ask(GetObject { range: Some(ByteRange { offset, length }), ..named(&name) }, None)?;
        broker.refused(
            "G3",
            RefusalCode::Differs,
            &format!("a range of {length} bytes from {offset} on, of {size}"),
        )?;
    }
    let both = GetObject {
        arrays: Some(vec!["x".to_owned()]),
        range: Some(ByteRange { offset: 0, length: 1 }),
        ..named(&name)
    };
    broker.ask(both, None)?;
    broker.refused("G3", RefusalCode::Invalid, "a range and arrays")
}

fn inline(value: &Value) -> Result<Option<Table>, Fault> {
    attached(value).map(Table::Inline).map(Some)
}

fn attached(value: &Value) -> Result<Attached, Fault> {
    Attached::of(value).map_err(|error| Fault::Failed(Error::Caller(Box::new(error))))
}

fn arrays(scene: &Scene<'_>, peer: &mut Peer) -> Result<(), Fault> {
    let (mut broker, _) = Broker::greet(peer)?;
    let (memory, name) = (memory(scene, 3)?, fresh("arrays")?);
    let entry = |name: &str, offset: u64| json!({"name": name, "array": {"dtype": "uint8", "shape": [16], "offset": offset}, "attributes": {"at": offset}});
    let table = json!([entry("first", 0), entry("last", 2 * GRANULARITY), entry("across", GRANULARITY - 8)]);
    let mut put = put_of(&name, &memory);
    put.parts[0].arrays = inline(&table)?;
    broker.put(&put, &descriptors(&memory))?;
    for (array, offset) in [("first", 0), ("last", 2 * GRANULARITY), ("across", GRANULARITY - 8)] {
        let leased = broker.get_one(GetObject { arrays: Some(vec![array.to_owned()]), ..named(&name) })?;
        check(scene, &leased, &put, 0)?;
        let part = &leased.header.parts[0];
        if !part.runs.iter().any(|run| run.offset <= offset && offset + 16 <= run.offset + run.size) {
            return Fault::broken("G3", format!("sent {:?} where array `{array}` was asked for", part.runs));
        }
        let found = table_of(part.arrays.as_ref(), &mut leased.tables.iter())?;
        if found != table {
            return Fault::broken("G5", format!("sent the arrays {found} where {table} were put"));
        }
    }
    let missing = GetObject { arrays: Some(vec!["first".to_owned(), "none".to_owned()]), ..named(&name) };
    broker.ask(missing, None)?;
    broker.refused("G3", RefusalCode::Differs, "a get of an array that is not there")
}

/// What a table says, in the record or beside it.
fn table_of<'a>(table: Option<&Table>, fds: &mut impl Iterator<Item = &'a OwnedFd>) -> Result<Value, Fault> {
    let text = match table {
        None => return Fault::broken("B5", "sent no table where one was put"),
        Some(Table::Inline(text)) => text.as_str().to_owned(),
        Some(Table::Length(length)) => {
            let Some(fd) = fds.next() else { return Fault::broken("B7", "sent a table without its descriptor") };
            match read_table(fd.as_fd(), *length, MAX_METADATA) {
                Ok(text) => text,
                Err(problem) => return Fault::broken("B6", problem),
            }
        }
    };
    serde_json::from_str(&text).or_else(|error| Fault::broken("B5", format!("sent a table that is no JSON: {error}")))
}

fn expect(scene: &Scene<'_>, peer: &mut Peer) -> Result<(), Fault> {
    let (mut broker, _) = Broker::greet(peer)?;
    let (memory, name) = (memory(scene, 1)?, fresh("expect")?);
    let mut put = put_of(&name, &memory);
    put.metadata = inline(&json!({"engine": "x", "layout": [1, {"a": null}]}))?;
    put.parts[0].digest = Some("blake3:00".to_owned());
    broker.put(&put, &descriptors(&memory))?;
    let wanting = |fields: Value| {
        let fields: Option<Check> = serde_json::from_value(fields).ok();
        GetObject { expect: fields, ..named(&name) }
    };
    let leased = broker.get_one(wanting(json!({"layout": [1, {"a": null}]})))?;
    check(scene, &leased, &put, 0)?;
    for other in [json!({"engine": "y"}), json!({"absent": 1}), json!({"layout": [1]}), json!({"engine": null})] {
        broker.ask(wanting(other.clone()), None)?;
        broker.refused("G4", RefusalCode::Differs, &format!("a get that expects {other}"))?;
    }
    for (part, digest, good) in [(PART, "blake3:00", true), (PART, "blake3:01", false), ("none", "blake3:00", false)] {
        let digests = Some([(part.to_owned(), digest.to_owned())].into());
        broker.ask(GetObject { digests, ..named(&name) }, None)?;
        if good {
            broker.leased(false)?;
        } else {
            broker.refused("G4", RefusalCode::Differs, &format!("a get of digest {digest} of part {part}"))?;
        }
    }
    Ok(())
}

/// A memfd with a text and these seals.
fn text_memfd(text: &str, seals: SealFlag) -> Result<OwnedFd, Fault> {
    let failed = |error: std::io::Error| Fault::Failed(Error::system("make a table", error));
    let fd = memfd_create(c"conform", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING);
    let mut file = File::from(fd.map_err(|errno| failed(errno.into()))?);
    file.write_all(text.as_bytes()).map_err(failed)?;
    fcntl(&file, FcntlArg::F_ADD_SEALS(seals)).map_err(|errno| failed(errno.into()))?;
    Ok(file.into())
}

const FINAL: SealFlag =
    SealFlag::F_SEAL_SHRINK.union(SealFlag::F_SEAL_GROW).union(SealFlag::F_SEAL_WRITE).union(SealFlag::F_SEAL_SEAL);

fn tables(scene: &Scene<'_>, peer: &mut Peer) -> Result<(), Fault> {
    let (mut broker, _) = Broker::greet(peer)?;
    let (memory, name) = (memory(scene, 2)?, fresh("tables")?);
    let metadata = json!({"text": "é".repeat(10_000)});
    let entry =
        |at: u64| json!({"name": format!("array{at}"), "array": {"dtype": "uint8", "shape": [1], "offset": at}});
    let arrays: Value = (0..1000).map(entry).collect();
    let texts = [metadata.to_string(), arrays.to_string()];
    let fds = [text_memfd(&texts[0], FINAL)?, text_memfd(&texts[1], FINAL)?];
    let mut put = put_of(&name, &memory);
    put.metadata = Some(Table::Length(texts[0].len() as u64));
    put.parts[0].arrays = Some(Table::Length(texts[1].len() as u64));
    broker.hand_over(&put, &[fds[0].as_fd(), fds[1].as_fd()], &descriptors(&memory))?;
    broker.published()?;
    let leased = broker.get_one(named(&name))?;
    check(scene, &leased, &put, 0)?;
    let mut beside = leased.tables.iter();
    let found = [
        table_of(leased.header.metadata.as_ref(), &mut beside)?,
        table_of(leased.header.parts[0].arrays.as_ref(), &mut beside)?,
    ];
    if found != [metadata.clone(), arrays] {
        return Fault::broken("B7", "sent other tables than were put, or in another order");
    }
    let (info, fds) = broker.stat(&name)?;
    match table_of(info.metadata.as_ref(), &mut fds.iter())? == metadata && info.parts[0].arrays == 1000 {
        true => Ok(()),
        false => Fault::broken("Q2", "described other metadata, or another number of arrays, than were put"),
    }
}

fn bad_tables(scene: &Scene<'_>, peer: &mut Peer) -> Result<(), Fault> {
    let (mut broker, _) = Broker::greet(peer)?;
    let (memory, name) = (memory(scene, 1)?, fresh("bad-tables")?);
    let put = put_of(&name, &memory);
    let text = json!({"text": "x".repeat(5000)}).to_string();
    let length = text.len() as u64;
    for (what, fd, length) in [
        ("that can be written", text_memfd(&text, FINAL.difference(SealFlag::F_SEAL_WRITE))?, length),
        ("whose seals are not final", text_memfd(&text, FINAL.difference(SealFlag::F_SEAL_SEAL))?, length),
        ("of another length", text_memfd(&text, FINAL)?, length - 1),
        ("that is no object", text_memfd("[1]", FINAL)?, 3),
        ("that is no JSON", text_memfd("{", FINAL)?, 1),
        ("that is no memory", not_memory().map_err(Fault::Failed)?, length),
    ] {
        let put = Put { metadata: Some(Table::Length(length)), ..put.clone() };
        broker.hand_over(&put, &[fd.as_fd()], &descriptors(&memory))?;
        broker.refused("B6", RefusalCode::Invalid, &format!("metadata {what}"))?;
    }
    let entry = |name: &str, shape: u64| json!({"name": name, "array": {"dtype": "uint8", "shape": [shape]}});
    for (what, arrays) in [
        ("arrays that are none", json!({})),
        ("an array that is not inside", json!([entry("w", GRANULARITY + 1)])),
        ("two arrays of one name", json!([entry("w", 1), entry("w", 1)])),
        ("an array without a name", json!([entry("", 1)])),
        (
            "attributes that are too long",
            json!([{"name": "w", "array": {"dtype": "uint8", "shape": [1]},
            "attributes": {"x": "x".repeat(1024)}}]),
        ),
    ] {
        let mut put = put.clone();
        put.parts[0].arrays = inline(&arrays)?;
        broker.hand_over(&put, &[], &descriptors(&memory))?;
        broker.refused("B5", RefusalCode::Invalid, what)?;
    }
    broker.absent("P4", &name, "whose puts were refused")
}
