//! The broker's golden records match the program and the schemas of the messages.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use vmmfd::wire::{
    HEADER_LENGTH,
    broker::{Message, RefusalCode},
};

use crate::support::schema::{mismatch, of_message};

const PAGE: &str = include_str!("../../docs/broker-protocol.md");

/// The page of the shared protocol.
const PROTOCOL: &str = include_str!("../../docs/protocol.md");

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

/// The mismatch between a body and the schema of its kind.
fn misfit(kind: &str, body: &Value) -> Option<String> {
    mismatch(&of_message(&Message::schema(), kind), body)
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
    let document = Message::schema();
    let kinds = document["$defs"].as_object().unwrap().keys().filter(|name| name.starts_with(char::is_lowercase));
    assert_eq!(seen, kinds.map(String::as_str).collect(), "each kind is there");
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
    }
}

#[test]
fn schemas_refuse_wrong_bodies() {
    let golden = golden();
    for (kind, path, value) in [
        ("put", "/parts/0/memory/mechanism", json!("fabric")),
        ("put", "/metadata", json!({})),
        ("put", "/lifetime", json!({"kind": "idle"})),
        ("put", "/lifetime", json!(["maker"])),
        ("put", "/restore/leases", json!(["0"])),
        ("lease", "/owner", json!([0, 0])),
        ("lease", "/parts/0/runs/0", json!([0, 1, 0, 1])),
        ("lease", "/token", json!("0")),
        ("version", "/parts/0/maker/uid", json!(-1)),
        ("get", "/objects/0", json!({})),
        ("measured", "/descriptors", json!([1, 2])),
    ] {
        let found = list(&golden, "records").iter().filter(|record| record["kind"] == kind);
        let mut body = found.map(|record| record["body"].clone()).find(|body| body.pointer(path).is_some()).unwrap();
        *body.pointer_mut(path).unwrap() = value;
        assert!(misfit(kind, &body).is_some(), "{kind} {path}: {body}");
    }
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
