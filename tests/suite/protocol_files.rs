//! The golden records match the program and the schemas of the messages.

use std::{collections::BTreeSet, fs};

use serde_json::{Value, json};
use vmmfd::{
    internals::HostDriver,
    wire::{ErrorCode, HEADER_LENGTH, Message},
};
use vmmfd_cli::check::{figures::Claim, files::Source, pattern::Pattern};

use crate::support::schema::{mismatch, of_message};

const KINDS: [&str; 14] = [
    "hello",
    "request",
    "offer",
    "segments",
    "received",
    "result",
    "busy",
    "error",
    "pool",
    "subscribe",
    "ready",
    "done",
    "withdraw",
    "gone",
];

const PAGE: &str = include_str!("../../docs/protocol.md");

fn golden() -> Value {
    serde_json::from_str(include_str!("../../docs/golden.json")).unwrap()
}

fn list<'a>(value: &'a Value, name: &str) -> &'a [Value] {
    let list = value[name].as_array().unwrap();
    assert!(!list.is_empty(), "{name}");
    list
}

fn bytes(hex: &Value) -> Vec<u8> {
    let digits = hex.as_str().unwrap().as_bytes();
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    digits.chunks(2).map(byte).collect()
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value}"))
}

fn salt(value: &Value) -> u32 {
    number(&value["salt"]).try_into().unwrap()
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
        let (name, bytes) = (&record["name"], bytes(&record["hex"]));
        let fds = number(&record["descriptors"]) as usize;
        let message = Message::decode(&bytes, fds).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!((message.name(), message.fd_count()), (record["kind"].as_str().unwrap(), fds), "{name}");
        let body: Value = serde_json::from_slice(&bytes[HEADER_LENGTH..]).unwrap();
        assert_eq!(body, record["body"], "{name}");
        // The order of the fields is specific to this implementation.
        let written = message.encode().unwrap();
        assert_eq!(String::from_utf8_lossy(&written), String::from_utf8_lossy(&bytes), "{name}");
        assert_eq!(misfit(message.name(), &body), None, "{name} does not fit its schema");
        seen.insert(message.name());
        if let Message::Offer(offer) = &message {
            Claim::read(offer.check.as_ref()).unwrap().inspect(offer.access).unwrap();
        }
    }
    assert_eq!(seen, BTreeSet::from(KINDS), "each kind is there");
    let one = &list(&golden, "records").iter().find(|record| record["name"] == "one allocation").unwrap()["hex"];
    let shown = PAGE.split("## A record, byte for byte").nth(1).unwrap().split("```").nth(1).unwrap();
    let head = shown.lines().nth(1).and_then(|line| line.get(..56)).unwrap();
    let digits: String = head.chars().chain(shown.lines().nth(2).unwrap().chars()).filter(|c| *c != ' ').collect();
    assert_eq!(digits, one.as_str().unwrap(), "the record on the page");
}

#[test]
fn golden_violations_are_refused() {
    let golden = golden();
    for record in list(&golden, "refused") {
        let fds = number(&record["descriptors"]) as usize;
        let decoded = Message::decode(&bytes(&record["hex"]), fds);
        assert!(decoded.is_err(), "{}: {decoded:?}", record["name"]);
        let rule = format!("**{}** ", record["rule"].as_str().unwrap());
        assert!(PAGE.contains(&rule), "{rule} is not on the page");
    }
}

#[test]
fn page_lists_every_code_sender_and_retry() {
    let table = PAGE.split("## Errors").nth(1).unwrap().split("## ").next().unwrap();
    let rows: Vec<Vec<&str>> =
        table.lines().filter(|line| line.starts_with("| `")).map(|line| line.split('|').collect()).collect();
    let mut seen = BTreeSet::new();
    for row in rows {
        assert_eq!(row.len(), 6, "{row:?}");
        let name = row[1].trim().trim_matches('`');
        assert!(!matches!(ErrorCode::of(name), ErrorCode::Unknown(_)), "{name} is no code of this program");
        assert!(["both", "producer", "consumer"].contains(&row[2].trim()), "{row:?}");
        seen.insert(name);
    }
    let all = "version protocol refused backend device object access range full timeout interrupted failed";
    assert_eq!(seen, all.split(' ').collect());
}

#[test]
fn golden_values_match_the_program() {
    let golden = golden();
    for value in list(&golden, "words") {
        assert_eq!(
            u64::from(Pattern::new(salt(value)).word(number(&value["index"]))),
            number(&value["word"]),
            "{value}"
        );
    }
    for value in list(&golden, "bytes") {
        let mut written = vec![0xEE; number(&value["size"]) as usize];
        Pattern::new(salt(value)).write(number(&value["offset"]), &mut written);
        assert_eq!(written, bytes(&value["hex"]), "{value}");
    }
    let folder = tempfile::tempdir().unwrap();
    for value in list(&golden, "digests") {
        let (path, data) = (folder.path().join("data"), bytes(&value["hex"]));
        fs::write(&path, &data).unwrap();
        let digest = Source::open(&path).unwrap().digest(0..data.len() as u64, &mut || Ok(())).unwrap();
        assert_eq!(json!(digest), value["digest"]);
    }
    for value in list(&golden, "host_devices") {
        assert_eq!(json!(HostDriver::uuid_of(value["boot_id"].as_str().unwrap())), value["uuid"]);
    }
}

#[test]
fn schemas_refuse_wrong_bodies() {
    for (kind, body) in [
        ("hello", json!({"version": 1, "backend": "host", "pid": 1, "timeout_ms": 1})),
        ("hello", json!({"version": 1, "capabilities": [], "backend": "host", "pid": 1, "timeout_ms": 0})),
        ("request", json!({"object": "default", "range": [0, 4]})),
        ("request", json!({"object": "default", "access": "wo"})),
        ("segments", json!({"first": 0, "sizes": []})),
        ("segments", json!({"first": 0, "sizes": vec![1; 254]})),
        ("received", json!({"segments": -1})),
        ("result", json!({"verified": true, "check": 7})),
        ("error", json!({"code": "no code", "message": ""})),
        ("done", json!({"buffer": 0})),
    ] {
        assert!(misfit(kind, &body).is_some(), "{kind}: {body}");
    }
    let golden = golden();
    let offer = &list(&golden, "records").iter().find(|record| record["kind"] == "offer").unwrap()["body"];
    for (path, value) in [
        ("/memory/mechanism", json!("fabric")),
        ("/memory/device/uuid", json!("GPU-00112233-4455-6677-8899-aabbccddeeff")),
        ("/memory/immutable", json!(1)),
        ("/part", json!([0, 1, 0, 2097152])),
    ] {
        let mut body = offer.clone();
        *body.pointer_mut(path).unwrap() = value;
        assert!(misfit("offer", &body).is_some(), "{path}: {body}");
    }
}
