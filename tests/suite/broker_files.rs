//! The files beside the broker's protocol page match the implementation: the schema of each message, and the golden records.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use vmmfd::wire::{
    HEADER_LENGTH,
    broker::{Message, RefusalCode},
};

use crate::support::schema::mismatch;

/// The files are compiled in: the tests also run without the repository.
macro_rules! schemas {
    ($($name:literal)*) => {
        [$(($name, include_str!(concat!("../../docs/schemas/broker/", $name, ".json"))),)*]
    };
}

/// One schema for each message, and one for the table of arrays.
const SCHEMAS: [(&str, &str); 30] = schemas!["hello" "segments" "received" "busy" "error" "put" "send" "published" "get" "lease"
    "claimed" "list" "objects" "stat" "version" "who" "leases" "delete" "done" "refused" "release" "report" "stop" "resume"
    "resumed" "watch" "events" "measure" "measured" "arrays"];

const PAGE: &str = include_str!("../../docs/broker-protocol.md");

/// The page of the shared protocol.
const PROTOCOL: &str = include_str!("../../docs/protocol.md");

fn schema(name: &str) -> Value {
    let (_, text) = SCHEMAS.iter().find(|(known, _)| *known == name).unwrap_or_else(|| panic!("no schema of {name}"));
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn golden() -> Value {
    serde_json::from_str(include_str!("../../docs/broker-golden.json")).unwrap()
}

fn list<'a>(value: &'a Value, name: &str) -> &'a [Value] {
    let list = value[name].as_array().unwrap();
    assert!(!list.is_empty(), "{name}");
    list
}

fn bytes(record: &Value) -> Vec<u8> {
    let digits = record["hex"].as_str().unwrap().as_bytes();
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    digits.chunks(2).map(byte).collect()
}

fn descriptors(record: &Value) -> usize {
    record["descriptors"].as_u64().unwrap().try_into().unwrap()
}

/// The name of a message kind.
pub(crate) fn name_of(kind: u16) -> &'static str {
    let names = "put send published get lease claimed list objects stat version who leases delete done refused release report stop resume \
                 resumed watch events measure measured";
    match kind {
        1 => "hello",
        4 => "segments",
        5 => "received",
        7 => "busy",
        8 => "error",
        kind => names.split(' ').nth(usize::from(kind) - 32).unwrap(),
    }
}

/// The mismatch between a body and the schema of its kind.
pub(crate) fn misfit(kind: &str, body: &Value) -> Option<String> {
    mismatch(&schema(kind), body)
}

#[test]
fn golden_records_round_trip_exactly() {
    let golden = golden();
    let mut seen = BTreeSet::new();
    for record in list(&golden, "records") {
        let (name, bytes, fds) = (&record["name"], bytes(record), descriptors(record));
        let message = Message::decode(&bytes, fds).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!((message.name(), message.fd_count()), (record["kind"].as_str().unwrap(), fds), "{name}");
        let body: Value = serde_json::from_slice(&bytes[HEADER_LENGTH..]).unwrap();
        assert_eq!(body, record["body"], "{name}");
        // The order of the fields is specific to this implementation.
        let mut written = Vec::new();
        message.encode_into(&mut written).unwrap();
        assert_eq!(String::from_utf8_lossy(&written), String::from_utf8_lossy(&bytes), "{name}");
        assert_eq!(misfit(message.name(), &body), None, "{name} does not fit its schema");
        seen.insert(message.name());
    }
    let all: BTreeSet<&str> = SCHEMAS.iter().map(|(name, _)| *name).filter(|name| *name != "arrays").collect();
    assert_eq!(seen, all, "each kind is there");
    let shown = PAGE.split("byte for byte").nth(1).unwrap().split("```").nth(1).unwrap();
    let mut shown_records = Vec::<Vec<u8>>::new();
    for line in shown.lines().skip(1) {
        match line.split_once("     VMFD") {
            Some((head, _)) => shown_records
                .push(head.split_whitespace().map(|digits| u8::from_str_radix(digits, 16).unwrap()).collect()),
            None => shown_records.last_mut().unwrap().extend(line.bytes()),
        }
    }
    assert_eq!(shown_records.len(), 2);
    for shown in shown_records {
        let known = list(&golden, "records").iter().any(|record| bytes(record) == shown);
        assert!(known, "on the page and not among the records: {}", String::from_utf8_lossy(&shown));
    }
}

#[test]
fn golden_violations_are_refused() {
    let golden = golden();
    for record in list(&golden, "refused") {
        let (name, bytes) = (&record["name"], bytes(record));
        let decoded = Message::decode(&bytes, descriptors(record));
        assert!(decoded.is_err(), "{name}: {decoded:?}");
        let rule = format!("**{}** ", record["rule"].as_str().unwrap());
        assert!(PROTOCOL.contains(&rule), "{rule} is not on the page");
        // The schema must reject invalid bodies too (not invalid headers). Exceptions: a schema can't limit the bytes of a text, and this
        // JSON parser keeps the last of two equal fields. A schema accepts 1.0 as an integer.
        let about_bodies = ["R6", "R7", "M3", "M4", "R9"].contains(&record["rule"].as_str().unwrap())
            && record["name"] != "a version with a point";
        if about_bodies {
            let body: Value = serde_json::from_slice(&bytes[HEADER_LENGTH..]).unwrap();
            let mut of_kind = list(&golden, "records").iter().filter(|known| self::bytes(known)[6..8] == bytes[6..8]);
            let kind = of_kind.next().unwrap()["kind"].as_str().unwrap();
            assert!(misfit(kind, &body).is_some(), "{name}: {body}");
        }
    }
}

#[test]
fn schemas_refuse_what_the_program_refuses() {
    let token = "0".repeat(32);
    for (kind, body) in [
        ("hello", json!({"version": 1, "capabilities": [], "backend": "none", "pid": 1, "timeout_ms": 0})),
        ("segments", json!({"first": 0, "sizes": []})),
        ("segments", json!({"first": 0, "sizes": vec![1; 254]})),
        ("get", json!({"objects": [{"name": "x", "range": [0, 4]}]})),
        ("get", json!({"objects": [{"name": "x"}], "claim": []})),
        ("get", json!({"objects": [{"name": "x", "expect": 7}]})),
        ("claimed", json!({"token": "0"})),
        ("list", json!({"prefix": "x".repeat(256)})),
        ("stat", json!({"name": "x", "version": -1})),
        ("who", json!({"prefix": "", "after": "7"})),
        ("refused", json!({"code": 7, "message": ""})),
        ("release", json!({})),
        ("report", json!({"token": token})),
        ("resume", json!({"leases": [token, "0"]})),
        ("resumed", json!({"instance": "x"})),
        ("watch", json!({"prefix": "", "after": -1})),
        ("events", json!({"instance": "x", "events": [{"seq": 1}], "next": 1})),
        ("measured", json!({"instance": "x"})),
    ] {
        assert!(misfit(kind, &body).is_some(), "{kind}: {body}");
        let number = golden()["records"].as_array().unwrap().iter().find(|record| record["kind"] == kind).map(bytes);
        let text = body.to_string();
        let mut record = number.unwrap()[..HEADER_LENGTH].to_vec();
        record[8..12].copy_from_slice(&(text.len() as u32).to_le_bytes());
        let fds = body["sizes"].as_array().map_or(0, Vec::len);
        record[12..16].copy_from_slice(&(fds as u32).to_le_bytes());
        record.extend(text.as_bytes());
        let decoded = Message::decode(&record, fds);
        assert!(decoded.is_err(), "{kind}: {decoded:?}");
    }
    // Definitions shared by several bodies.
    let golden = golden();
    let changed = |kind: &str, path: &str, value: Value| {
        let found = list(&golden, "records").iter().filter(|record| record["kind"] == kind);
        let mut body = found.map(|record| record["body"].clone()).find(|body| body.pointer(path).is_some()).unwrap();
        *body.pointer_mut(path).unwrap() = value;
        body
    };
    for (kind, path, value) in [
        ("put", "/parts/0/memory/mechanism", json!("pool")),
        ("put", "/parts/0/memory/size", json!(0)),
        ("put", "/parts/0/memory/mapped_size", json!(1u64 << 47)),
        ("put", "/parts/0/arrays/inline/0/array/dtype", json!("bf16")),
        ("put", "/parts/0/arrays/length", json!((256u64 << 20) + 1)),
        ("put", "/metadata/inline", json!([])),
        ("put", "/metadata/length", json!((1 << 20) + 1)),
        ("put", "/metadata", json!({})),
        ("put", "/lifetime", json!({"kind": "idle"})),
        ("put", "/lifetime", json!(["maker"])),
        ("put", "/mode", json!(0o1000)),
        ("put", "/keep", json!(65)),
        ("lease", "/owner", json!([0, 0])),
        ("lease", "/parts/0/runs/0", json!([0, 1, 0, 1])),
        ("objects", "/objects/0/devices/0/device/uuid", json!("GPU-00112233-4455-6677-8899-aabbccddeeff")),
        ("version", "/parts/0/maker/uid", json!(-1)),
        ("leases", "/leases/0/number", json!(0)),
        ("put", "/restore/leases", json!(["0"])),
        ("delete", "/request", json!("x")),
        ("events", "/events/0/kind", json!(7)),
        ("measured", "/descriptors", json!([1, 2])),
    ] {
        let body = changed(kind, path, value);
        assert!(misfit(kind, &body).is_some(), "{kind} {path}: {body}");
    }
    assert!(misfit("arrays", &json!([{"name": "w"}])).is_some());
    assert_eq!(misfit("arrays", &json!([{"name": "w", "array": {"dtype": "float32", "shape": []}}])), None);
}

#[test]
fn page_lists_every_code_and_its_retry() {
    let table = PAGE.split("## Refusals").nth(1).unwrap().split("## ").next().unwrap();
    let rows: Vec<Vec<&str>> =
        table.lines().filter(|line| line.starts_with("| `")).map(|line| line.split('|').collect()).collect();
    let mut seen = BTreeSet::new();
    for row in rows {
        assert!(row.len() == 5 && !row[3].trim().is_empty(), "{row:?}");
        let name = row[1].trim().trim_matches('`');
        assert!(!matches!(RefusalCode::of(name), RefusalCode::Unknown(_)), "{name} is no code of this program");
        seen.insert(name);
    }
    let all = "absent exists version differs denied quota full timeout stopped invalid memory failed";
    assert_eq!(seen, all.split(' ').collect());
}

#[test]
fn rule_numbers_are_unique() {
    let numbers = |page: &'static str| {
        page.split("\n\n")
            .filter_map(|paragraph| paragraph.strip_prefix("**")?.split_once("** "))
            .map(|(number, _)| number)
    };
    let both: Vec<&str> = numbers(PAGE).chain(numbers(PROTOCOL)).collect();
    let each: BTreeSet<&str> = both.iter().copied().collect();
    assert!(each.len() == both.len() && numbers(PAGE).count() > 30, "{both:?}");
}
