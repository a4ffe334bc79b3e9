mod damaged;
mod killed;

use std::os::fd::{AsFd, BorrowedFd};

use serde::Serialize;
use serde_json::json;

use super::{
    read::Unreadable,
    record::{Completed, Deleted, Lease, Part, Report, Seen, Table, Version},
    *,
};
use crate::{
    driver::{Backend, DeviceUuid},
    wire::{
        DeviceIdentity, Mechanism, Memory, Placement,
        broker::{Attached, Event, EventKind, Lifetime, Maker, Owner, Token},
    },
};

/// JSON in a client's own formatting, which must be preserved.
const SPACED: &str = "[ {\"name\":\n\t\"w\\u00e9\", \"shape\": [2, 3.10e0]} ]";

impl Catalogue {
    /// Opens a log and returns all its records.
    fn open(fd: OwnedFd) -> Result<(Self, Vec<Record>), Unreadable> {
        let (mut catalogue, mut records) = Self::load(fd)?;
        let all = records.by_ref().collect::<Result<_, _>>()?;
        catalogue.append_after(&records);
        Ok((catalogue, all))
    }
}

fn inline(value: &impl Serialize) -> Table {
    Table::Inline(Attached::of(value).unwrap())
}

fn version(key: u64) -> Version {
    let memory = Memory {
        mechanism: Mechanism::Vmm,
        device: DeviceIdentity { uuid: DeviceUuid::from_bytes([7; 16]), name: "a device".to_owned() },
        location: Placement::Device,
        size: 3 << 20,
        mapped_size: 4 << 20,
        segments: 2,
        pool: None,
        pointer: None,
        offset: 0,
        immutable: true,
    };
    let segment = |index| SegmentId::at(index).unwrap();
    let part = |name: &str, arrays| Part {
        name: name.to_owned(),
        memory: memory.clone(),
        arrays,
        array_count: 1,
        maker: Maker { pid: 42, uid: 1000, command: Some("python \"é\"\n".to_owned()) },
        digest: Some("blake3:00".to_owned()),
        segments: vec![(segment(0), 2 << 20), (segment(35), 2 << 20)],
    };
    Version {
        key,
        name: "models/llama".to_owned(),
        version: 3,
        id: "67e55044-10b1-426f-9247-bb680e5fe0c8".to_owned(),
        created_ms: 1_700_000_000_000,
        owner: Owner { uid: 1000, gid: 100 },
        mode: 0o640,
        lifetime: Lifetime::Idle { ms: 60_000 },
        keep: 2,
        requests: vec![token(3)],
        backend: Backend::Cuda,
        metadata: Some(inline(&json!({"engine": "x", "layers": [1, 2.5, null], "nested": {"a": true}}))),
        parts: vec![
            part("rank0", Some(Table::Inline(Attached::from_text(SPACED.to_owned()).unwrap()))),
            part("rank1", Some(Table::Held { segment: segment(1_000_000), length: 700_000 })),
            part("rank2", None),
        ],
    }
}

fn token(byte: u8) -> Token {
    Token([byte; 16])
}

fn lease(byte: u8) -> Record {
    Record::Leased(Lease {
        token: token(byte),
        key: 1,
        uid: 1000,
        pid: 7,
        command: Some("python3".to_owned()),
        since_ms: 1,
        size: 4 << 20,
    })
}

/// One record of each kind, and a minimal version.
fn each_kind() -> Vec<Record> {
    let bare = Version { metadata: None, parts: Vec::new(), lifetime: Lifetime::Maker, ..version(u64::MAX) };
    let event = Event {
        seq: 4,
        at_ms: 2,
        kind: EventKind::Published,
        name: "models/llama".to_owned(),
        version: 2,
        id: version(1).id,
        uid: 1000,
        pid: 7,
        command: None,
        size: Some(4 << 20),
        message: None,
    };
    vec![
        Record::Begin { instance: version(1).id, starts: 3 },
        Record::Seen(Seen { event, owner: version(1).owner, mode: 0o640 }),
        Record::Completed(Completed { request: token(9), name: "a".to_owned(), published: None }),
        Record::Whole { seq: 4 },
        Record::Started,
        Record::Published(Box::new(version(1))),
        lease(0xA5),
        Record::Reported(Report {
            key: 1,
            reader: Maker { pid: 7, uid: 1000, command: None },
            at_ms: 5,
            message: "another size".to_owned(),
        }),
        Record::Recalled { key: 1, by: Maker { pid: 8, uid: 1000, command: None }, at_ms: 5 },
        Record::Ended { token: token(0xA5), at_ms: 6 },
        Record::Published(Box::new(bare)),
        deleted("models/llama"),
        Record::Dropped { key: 1 },
    ]
}

fn deleted(name: &str) -> Record {
    Record::Deleted(Deleted {
        name: name.to_owned(),
        at_ms: 6,
        uid: 1000,
        pid: 7,
        command: None,
        request: None,
        owner: Some(1000),
    })
}

/// A log without records.
fn new() -> Catalogue {
    Catalogue::create(memfd().unwrap(), []).unwrap()
}

/// A log of these records.
fn log(records: &[Record]) -> Catalogue {
    let mut catalogue = new();
    for record in records {
        catalogue.append(record).unwrap();
    }
    catalogue
}

fn bytes_of(log: BorrowedFd<'_>) -> Vec<u8> {
    let file = File::from(log.try_clone_to_owned().unwrap());
    let mut bytes = vec![0; file.metadata().unwrap().len() as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

fn memfd_of(bytes: &[u8]) -> OwnedFd {
    let file = File::from(memfd().unwrap());
    file.write_all_at(bytes, 0).unwrap();
    file.into()
}

/// The records that another process reads.
fn read(log: BorrowedFd<'_>) -> Vec<Record> {
    Catalogue::open(log.try_clone_to_owned().unwrap()).unwrap().1
}

/// Frames a payload as a record.
fn framed(payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u32).to_le_bytes();
    [&length[..], &checksum(&length, payload).to_le_bytes(), payload].concat()
}

/// Opens these bytes as a log, expecting an error and unchanged bytes.
fn refusal(bytes: &[u8]) -> Unreadable {
    let fd = memfd_of(bytes);
    let kept = fd.try_clone().unwrap();
    let error = Catalogue::open(fd).unwrap_err();
    assert_eq!(bytes_of(kept.as_fd()), bytes, "it was changed");
    error
}

#[test]
fn records_are_read_in_order() {
    let catalogue = log(&each_kind());
    let (again, records) = Catalogue::open(catalogue.as_fd().try_clone_to_owned().unwrap()).unwrap();
    assert_eq!(records, each_kind());
    assert_eq!((again.length, again.generation), (catalogue.length, 1));
    assert_eq!(again.length, bytes_of(again.as_fd()).len() as u64);
    assert!(read(new().as_fd()).is_empty());
}

#[test]
fn records_have_the_documented_json() {
    let catalogue = log(&[Record::Ended { token: token(0xA5), at_ms: 6 }, deleted("models/llama")]);
    let ended = br#"{"ended":{"token":"a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5","at_ms":6}}"#;
    let deleted = br#"{"deleted":{"name":"models/llama","at_ms":6,"uid":1000,"pid":7,"owner":1000}}"#;
    let header = header(1);
    assert_eq!(header[..12], *b"VMMFDCAT\x01\0\0\0");
    assert_eq!(header[16..], 1u64.to_le_bytes());
    assert_eq!(bytes_of(catalogue.as_fd()), [&header[..], &framed(ended), &framed(deleted)].concat());
}

/// The file has a record of each kind. If one is read or written differently, `FORMAT` must change: a broker then refuses to upgrade in
/// place.
#[test]
fn records_of_this_format_are_unchanged() {
    let lines: Vec<&str> = include_str!("records.jsonl").lines().collect();
    let framed: Vec<Vec<u8>> = lines.iter().map(|line| framed(line.as_bytes())).collect();
    let log = [header(1).to_vec(), framed.concat()].concat();
    let (_, records) = Catalogue::open(memfd_of(&log)).unwrap();
    assert_eq!(records.len(), lines.len());
    for (line, record) in lines.iter().zip(records) {
        let value: serde_json::Value = serde_json::from_str(line).unwrap();
        assert_eq!(serde_json::to_value(record).unwrap(), value);
    }
}

#[test]
fn unknown_fields_are_ignored() {
    let log = [&header(5)[..], &framed(br#"{"dropped":{"key":3,"later":[1,{}]}}"#)].concat();
    let (catalogue, records) = Catalogue::open(memfd_of(&log)).unwrap();
    assert_eq!(records, [Record::Dropped { key: 3 }]);
    assert_eq!(catalogue.generation, 5);
}

#[test]
fn unknown_formats_and_records_are_refused() {
    let mut newer = header(1);
    newer[8] = 2;
    // The format is checked before the checksum, which a later format may compute differently.
    let error = refusal(&newer);
    assert_eq!(error.to_string(), "the catalogue has format 2, and this build reads only format 1");
    let unknown = [&header(1)[..], &framed(br#"{"dropped":{"key":3}}"#), &framed(br#"{"later":{}}"#), b"torn"].concat();
    let error = refusal(&unknown);
    assert!(matches!(error, Unreadable::Record { offset: 53, .. }), "{error:?}");
    assert_eq!(error.to_string(), "the catalogue's record at byte 53 is unknown to this build");
}

#[test]
fn foreign_descriptors_are_refused() {
    for (bytes, found) in [
        (&b""[..], r#""""#),
        (b"VMMFDCA", r#""VMMFDCA""#),
        (&[0; 100], r#""\x00\x00\x00\x00\x00\x00\x00\x00""#),
        (b"!/bin/sh\necho a script of more than a header", r#""!/bin/sh""#),
    ] {
        let error = refusal(bytes);
        let want = format!(r#"the descriptor is not a catalogue: it starts with {found} instead of "VMMFDCAT""#);
        assert_eq!(error.to_string(), want);
    }
    let want = "the catalogue has 12 bytes, and its header alone has 24";
    assert_eq!(refusal(b"VMMFDCAT\x01\0\0\0").to_string(), want);
}

/// Compacts a log to these records.
fn compact(
    catalogue: &mut Catalogue,
    memfd: OwnedFd,
    records: impl IntoIterator<Item = Record>,
) -> Result<OwnedFd, CatalogueError> {
    let mut rewrite = catalogue.rewrite(memfd)?;
    records.into_iter().try_for_each(|record| rewrite.add(&record))?;
    rewrite.finish(catalogue)
}

#[test]
fn rewrite_includes_records_appended_meanwhile() {
    let mut catalogue = log(&each_kind());
    let mut rewrite = catalogue.rewrite(memfd().unwrap()).unwrap();
    rewrite.add(&lease(1)).unwrap();
    let appended: Vec<Record> = (2..5000).map(|key| Record::Dropped { key }).collect();
    appended.iter().for_each(|record| catalogue.append(record).unwrap());
    while !rewrite.copy_appended(&catalogue).unwrap() {}
    catalogue.append(&lease(2)).unwrap();
    assert!(rewrite.copy_appended(&catalogue).unwrap());
    rewrite.finish(&mut catalogue).unwrap();
    assert_eq!(read(catalogue.as_fd()), [vec![lease(1)], appended, vec![lease(2)]].concat());
}

#[test]
fn rewrite_ends_under_constant_load() {
    let mut catalogue = log(&[]);
    let mut rewrite = catalogue.rewrite(memfd().unwrap()).unwrap();
    let append = |catalogue: &mut Catalogue, bytes: usize| {
        let end = catalogue.length + bytes as u64;
        while catalogue.length < end {
            catalogue.append(&lease(1)).unwrap();
        }
    };
    append(&mut catalogue, 4 * CHUNK);
    let ends = (0..20).any(|_| {
        append(&mut catalogue, CHUNK);
        rewrite.copy_appended(&catalogue).unwrap()
    });
    assert!(ends, "copied {} of {} bytes", rewrite.length(), catalogue.length);
}

#[test]
fn compaction_keeps_records_and_old_log() {
    let mut catalogue = log(&each_kind());
    // More than one chunk in all, and single records longer than a chunk.
    let long = |key| {
        let metadata = Some(inline(&"x".repeat(CHUNK / 3 * key as usize)));
        Record::Published(Box::new(Version { metadata, ..version(key) }))
    };
    let live: Vec<Record> = (0..8).map(long).collect();
    let old = compact(&mut catalogue, memfd_of(b"what a killed writer left"), live.clone()).unwrap();
    assert_eq!(read(old.as_fd()), each_kind());
    assert_eq!(read(catalogue.as_fd()), live);
    assert_eq!(catalogue.generation, 2);
    catalogue.append(&lease(1)).unwrap();
    let (mut catalogue, records) = Catalogue::open(catalogue.as_fd().try_clone_to_owned().unwrap()).unwrap();
    assert_eq!(records, [live, vec![lease(1)]].concat());
    compact(&mut catalogue, memfd().unwrap(), []).unwrap();
    assert_eq!((catalogue.generation, read(catalogue.as_fd())), (3, vec![]));
}

#[test]
fn failed_compaction_leaves_log_unchanged() {
    let mut catalogue = log(&[lease(1)]);
    catalogue.limit = catalogue.length;
    let error = compact(&mut catalogue, memfd().unwrap(), [lease(1), lease(2)]).unwrap_err();
    assert!(matches!(error, CatalogueError::Limit { .. }), "{error:?}");
    assert_eq!((catalogue.generation, read(catalogue.as_fd())), (1, vec![lease(1)]));
}

#[test]
fn file_size_limit_is_respected() {
    let mut catalogue = log(&[lease(1)]);
    let needed = catalogue.length + framed(br#"{"dropped":{"key":3}}"#).len() as u64;
    catalogue.limit = needed - 1;
    let error = catalogue.append(&Record::Dropped { key: 3 }).unwrap_err();
    let want = format!(
        "the catalogue would have {needed} bytes, and this process may write files of {} bytes (RLIMIT_FSIZE)",
        needed - 1
    );
    assert_eq!(error.to_string(), want);
    assert_eq!(read(catalogue.as_fd()), [lease(1)]);
    catalogue.limit = needed;
    catalogue.append(&Record::Dropped { key: 3 }).unwrap();
    assert_eq!(read(catalogue.as_fd()), [lease(1), Record::Dropped { key: 3 }]);
}

#[test]
fn log_stays_within_twice_its_live_records() {
    let live = |key| {
        let metadata = Some(inline(&"x".repeat(1 << 20)));
        Record::Published(Box::new(Version { metadata, ..version(key) }))
    };
    let (mut catalogue, mut written) = (new(), 0);
    assert!(!catalogue.should_compact());
    // Each record replaces the previous: only one is live.
    for key in 0..40 {
        catalogue.append(&live(key)).unwrap();
        if catalogue.should_compact() {
            compact(&mut catalogue, memfd().unwrap(), [live(key)]).unwrap();
            written += 1;
            assert!(!catalogue.should_compact());
        }
        assert!(catalogue.length < (2 << 20) + SLACK + (1 << 20), "{}", catalogue.length);
    }
    assert!((5..=10).contains(&written), "{written}");
}
