//! Encoding and decoding of the broker's messages, and protocol violations that the shared tests of `wire` do not cover.

use serde_json::{Value, json};

use super::*;
use crate::{
    array::{ArrayDescriptor, Order},
    base::DeviceUuid,
    wire::{
        DeviceIdentity, HEADER_LENGTH, MAX_BODY, MAX_CAPABILITIES, MAX_NAME, Mechanism, Memory, Placement,
        tests::{self, Golden, record},
    },
};

const RECORDS: &str = include_str!("../../../docs/broker-golden.json");
const LEASE: &str = "a lease of two runs, the table of arrays beside it";

fn memory() -> Memory {
    Memory {
        mechanism: Mechanism::Vmm,
        device: DeviceIdentity { uuid: DeviceUuid::from_bytes(*b"0123456789abcdef"), name: "a device".into() },
        location: Placement::Device,
        size: 5 << 20,
        mapped_size: 6 << 20,
        segments: 3,
        pool: None,
        pointer: None,
        offset: 0,
        immutable: false,
    }
}

fn attached(text: &str) -> Attached {
    Attached::from_text(text.to_owned()).unwrap()
}

fn put() -> PutHeader {
    let part = |name: &str, arrays| PutPartHeader {
        name: name.into(),
        memory: memory(),
        array_count: Some(1),
        arrays,
        digest: Some("blake3:00".into()),
    };
    let entry = ArrayEntry {
        name: "w".into(),
        array: ArrayDescriptor::new("<f4".parse().unwrap(), vec![5, 7], Order::C).unwrap(),
        attributes: Some(attached(r#"{"kind":"weight"}"#)),
    };
    PutHeader {
        name: "models/llama".into(),
        replace: true,
        if_version: Some(u64::MAX),
        announced: vec!["rank0".into(), "rank1".into(), "rank2".into()],
        group: Some("epoch-3".into()),
        wait_ms: Some(30_000),
        backend: "cuda".into(),
        parts: vec![
            part("rank0", Some(Table::Inline(Attached::of(&[entry]).unwrap()))),
            part("rank1", Some(Table::Length(70_000))),
        ],
        metadata: Some(Table::Length(5000)),
        mode: Some(0o640),
        lifetime: Some(Lifetime::Idle { ms: 60_000 }),
        keep: Some(1),
        request: Some(Token([9; 16])),
        restore: Some(Restore {
            version: 7,
            id: "53e9a7d2-1f0c-4b7e-9c55-0123456789ab".into(),
            created_ms: 1_800_000_000_000,
            owner: Owner { uid: 1000, gid: 100 },
            leases: vec![Token([0xA5; 16])],
        }),
        sizes: vec![2 << 20; 4],
    }
}

/// The golden record with this name.
fn golden(name: &str) -> Golden {
    tests::golden(RECORDS).into_iter().find(|record| record.name == name).unwrap_or_else(|| panic!("{name}"))
}

fn encoded(message: &Message) -> Vec<u8> {
    let mut record = b"earlier contents".to_vec();
    message.encode_into(&mut record).unwrap();
    record
}

fn body_of(message: &Message) -> Value {
    serde_json::from_slice(&encoded(message)[HEADER_LENGTH..]).unwrap()
}

/// Decodes a body with `fds` descriptors.
fn decode(kind: u16, body: &Value, fds: usize) -> Result<Message, ProtocolError> {
    Message::decode(&record(kind, &body.to_string(), fds as u32), fds)
}

#[test]
fn docs_list_the_limits() {
    let page = include_str!("../../../docs/broker-protocol.md");
    let table = page.split("## Limits").nth(1).unwrap().split("\n## ").next().unwrap();
    let row = |what: &str| {
        let row = table.lines().find(|line| line.starts_with(&format!("| {what} |")));
        let digits = |text: &str| text.replace(',', "").split_whitespace().find_map(|word| word.parse::<u64>().ok());
        row.and_then(|row| digits(row.split('|').nth(2).unwrap())).unwrap_or_else(|| panic!("no limit of {what}"))
    };
    for (what, limit) in [
        ("parts, or announced parts, of a `put`", MAX_PARTS as u64),
        ("segments of a version", MAX_SEGMENTS as u64),
        ("arrays of a part", MAX_ARRAYS as u64),
        ("metadata", MAX_METADATA),
        ("attributes of an array", MAX_ATTRIBUTES as u64),
        ("a table of arrays", MAX_TABLE),
        ("a table in a record", MAX_INLINE as u64),
        ("all tables in one record", MAX_INLINE_TOGETHER as u64),
        ("objects of one `get`", MAX_OBJECTS as u64),
        ("parts and ranges that one `get` names", MAX_NAMED as u64),
        ("a name", MAX_NAME as u64),
        ("descriptors of one record", MAX_FDS as u64),
        ("versions of one `recall`", MAX_RECALLED as u64),
    ] {
        assert_eq!(row(what), limit, "{what}");
    }
}

#[test]
fn tables_and_segments_share_a_limit() {
    assert_eq!(Message::Put(Box::new(put())).fd_count(), 2 + 4, "two attached tables and four segments");
    // The limit applies to tables and segments together.
    for (sizes, sound) in [(MAX_FDS - 2, true), (MAX_FDS - 1, false)] {
        let message = Message::Put(Box::new(PutHeader { sizes: vec![2 << 20; sizes], ..put() }));
        assert_eq!(message.encode_into(&mut Vec::new()).is_ok(), sound, "{sizes}");
        let body = serde_json::to_value(PutHeader { sizes: vec![2 << 20; sizes], ..put() }).unwrap();
        let decoded = decode(32, &body, sizes + 2);
        assert_eq!(decoded.is_ok(), sound, "{sizes}");
        assert!(sound || matches!(decoded, Err(ProtocolError::Content(_))));
    }
}

#[test]
fn both_peers_enforce_limits() {
    let part = json!(PutPartHeader { arrays: None, ..put().parts[0].clone() });
    let put = || json!(put());
    let get = || json!({"objects": [{"name": "a", "parts": {}}], "claim": {"part": "a", "group": "a"}});
    let prefix = || json!({"prefix": "", "after": null});
    let hello = || json!({"version": 1, "capabilities": [], "backend": NO_BACKEND, "pid": 1, "timeout_ms": 1});
    let range = json!({"offset": 0, "length": 1});
    let text = &json!(null);
    for (kind, body, field, most, item) in [
        (32, put(), "/name", MAX_NAME, text),
        (32, put(), "/backend", MAX_NAME, text),
        (32, put(), "/group", MAX_NAME, text),
        (32, put(), "/announced/0", MAX_NAME, text),
        (32, put(), "/parts/0/name", MAX_NAME, text),
        (32, put(), "/parts/0/digest", MAX_NAME, text),
        (32, put(), "/parts/1/memory/device/name", MAX_NAME, text),
        (32, put(), "/announced", MAX_PARTS, &json!("")),
        (32, put(), "/parts", MAX_PARTS, &part),
        (35, get(), "/objects/0/name", MAX_NAME, text),
        (35, get(), "/objects", MAX_OBJECTS, &json!({"name": ""})),
        (35, get(), "/objects/0/parts/a", MAX_NAMED - 1, &range),
        (35, get(), "/claim/part", MAX_NAME, text),
        (35, get(), "/claim/group", MAX_NAME, text),
        (38, prefix(), "/prefix", MAX_NAME, text),
        (42, prefix(), "/prefix", MAX_NAME, text),
        (40, json!({"name": ""}), "/name", MAX_NAME, text),
        (44, json!({"name": ""}), "/name", MAX_NAME, text),
        (56, json!({"ids": []}), "/ids", MAX_RECALLED, &json!("")),
        (56, json!({"ids": [""]}), "/ids/0", MAX_NAME, text),
        (4, json!({"first": 0, "sizes": []}), "/sizes", MAX_FDS, &json!(1)),
        (1, hello(), "/capabilities", MAX_CAPABILITIES, &json!("")),
    ] {
        let with = |length: usize| {
            let value = if item.is_null() { json!("n".repeat(length)) } else { json!(vec![item.clone(); length]) };
            let (parent, name) = field.rsplit_once('/').unwrap();
            let mut body = body.clone();
            match body.pointer_mut(parent).unwrap() {
                Value::Array(values) => values[name.parse::<usize>().unwrap()] = value,
                parent => parent[name] = value,
            }
            // Without the decoder's checks.
            (Message::parse(kind, body.to_string().as_bytes()).unwrap(), body)
        };
        let (sound, body) = with(most);
        assert_eq!(decode(kind, &body, sound.fd_count()).as_ref(), Ok(&sound), "{field}: {most}");
        let (long, body) = with(most + 1);
        for refused in [long.encode_into(&mut Vec::new()), decode(kind, &body, long.fd_count()).map(drop)] {
            assert!(matches!(refused, Err(ProtocolError::Content(_))), "{field}: {refused:?}");
        }
    }
    let none = decode(4, &json!({"first": 0, "sizes": []}), 0);
    assert!(matches!(none, Err(ProtocolError::SizeCount { .. })), "no segments");
}

#[test]
fn too_long_messages_are_not_sent() {
    let long = attached(&format!("\"{}\"", "x".repeat(MAX_BODY)));
    let message = Message::Put(Box::new(PutHeader { metadata: Some(Table::Inline(long)), ..put() }));
    let most = HEADER_LENGTH + MAX_BODY;
    assert_eq!(message.encode_into(&mut Vec::new()), Err(ProtocolError::LongRecord { most }));
}

#[test]
fn tokens_are_hex_and_not_logged() {
    for sound in ["00112233445566778899aabbccddeeff", "00112233445566778899AABBCCDDEEFF"] {
        assert!(decode(47, &json!({"token": sound}), 0).is_ok(), "{sound}");
    }
    for wrong in ["", "0", &"0".repeat(31), &"0".repeat(33), &"g".repeat(32)] {
        assert!(decode(47, &json!({"token": wrong}), 0).is_err(), "{wrong}");
    }
    let token = Token(*b"secret! secret! ");
    assert_eq!(format!("{:?}", Message::Release(Release { token })), "Release(Release { token: Token(..) })");
    assert_eq!(serde_json::to_value(token).unwrap(), json!(hex::encode(b"secret! secret! ")));
}

#[test]
fn tables_are_inline_or_attached() {
    let body = |metadata: Value| {
        let mut body = serde_json::to_value(put()).unwrap();
        body["metadata"] = metadata;
        body
    };
    let fds = put().sizes.len() + 1;
    let inline = decode(32, &body(json!({"inline": {"b": 1, "a": [2.50]}})), fds).unwrap();
    let Message::Put(read) = &inline else { panic!("{inline:?}") };
    // The text is carried without parsing.
    assert_eq!(read.metadata, Some(Table::Inline(attached(r#"{"a":[2.5],"b":1}"#))));
    assert!(decode(32, &body(json!({"length": 10})), fds + 1).is_ok());
    assert!(decode(32, &body(json!(null)), fds).is_ok());
    for wrong in
        [json!({}), json!({"length": 1, "inline": {}}), json!({"length": -1}), json!({"beside": 1}), json!("x")]
    {
        let decoded = decode(32, &body(wrong.clone()), fds);
        assert!(matches!(decoded, Err(ProtocolError::Body { .. })), "{wrong}: {decoded:?}");
    }
    // Inline JSON does not hide a later fault.
    let mut broken = body(json!({"inline": {"a": 1}}));
    broken["sizes"] = json!([1.5]);
    assert!(matches!(decode(32, &broken, fds), Err(ProtocolError::Body { .. })));
    let text = "{\"a\" :  1}";
    assert_eq!(attached(text).as_str(), text);
    assert_eq!(attached(text).read::<Value>().unwrap(), json!({"a": 1}));
    for wrong in ["", "{", "{} {}", "nul"] {
        Attached::from_text(wrong.to_owned()).unwrap_err();
    }
}

#[test]
fn optional_fields_may_be_null() {
    let optional = |mut body: Value, fields: &[&str]| {
        for field in fields {
            let (parent, name) = field.rsplit_once('/').unwrap();
            body.pointer_mut(parent).unwrap()[name] = Value::Null;
        }
        body
    };
    let all =
        ["/replace", "/if_version", "/announced", "/group", "/wait_ms", "/metadata", "/mode", "/lifetime", "/keep"];
    let all = [&all[..], &["/parts/0/arrays", "/parts/0/array_count", "/parts/0/digest", "/parts/1/arrays"]].concat();
    let body = optional(serde_json::to_value(put()).unwrap(), &all);
    let Ok(Message::Put(read)) = decode(32, &body, put().sizes.len()) else { panic!("{body}") };
    assert_eq!((read.replace, read.announced, read.lifetime), (false, Vec::new(), None));
    let all = ["version", "newer_than", "parts", "lease"].map(|f| format!("/objects/0/{f}"));
    let all: Vec<&str> = all.iter().map(String::as_str).chain(["/wait_ms", "/claim"]).collect();
    let body = optional(golden("bytes of one part of version 1").body(), &all);
    let Ok(Message::Get(read)) = decode(35, &body, 0) else { panic!("{body}") };
    assert_eq!(read.objects[0], GetObject { name: "models/llama".into(), ..GetObject::default() });
    assert!(decode(35, &json!({"objects": [], "claim": {"part": null, "group": null}}), 0).is_ok());
    let body = optional(golden(LEASE).body(), &["/metadata", "/parts/0/arrays", "/parts/0/digest"]);
    assert!(decode(36, &body, 2).is_ok());
    assert!(decode(38, &json!({"prefix": "", "after": null}), 0).is_ok());
    assert!(decode(42, &json!({"prefix": "", "after": null}), 0).is_ok());
}

#[test]
fn unknown_fields_and_codes_are_ignored() {
    let golden = golden(LEASE);
    let mut body = golden.body();
    body["colour"] = json!("red");
    body["owner"]["name"] = json!("ada");
    body["parts"][0]["runs"][0]["colour"] = json!([1]);
    assert_eq!(decode(36, &body, golden.fds), Message::decode(&golden.bytes, golden.fds));
    let Ok(Message::Refused(refusal)) = decode(46, &json!({"code": "too_warm", "message": "x"}), 0) else { panic!() };
    assert!(matches!(refusal.code, RefusalCode::Unknown(_)));
    assert_eq!(serde_json::to_value(refusal.code).unwrap(), "too_warm", "the name is kept");
    // The meaning of an unknown lifetime can't be guessed.
    let mut body = serde_json::to_value(put()).unwrap();
    body["lifetime"] = json!({"kind": "forever"});
    assert!(matches!(decode(32, &body, 6), Err(ProtocolError::Body { .. })));
}

#[test]
fn both_peers_shorten_sentences() {
    let long = "é".repeat(MAX_BODY / 4);
    let token = Token([0; 16]);
    for message in [
        Message::Refused(Refusal { code: RefusalCode::Failed, message: long.clone() }),
        Message::Report(ReportHeader { token, message: long.clone() }),
        Message::Error(Failure { code: crate::error::ErrorCode::Failed, message: long.clone() }),
    ] {
        let sent = body_of(&message);
        let sent = sent["message"].as_str().unwrap().to_owned();
        let kind = encoded(&message)[6].into();
        assert!(sent.len() <= MAX_MESSAGE && sent.ends_with("é..."), "{} bytes", sent.len());
        let mut body = body_of(&message);
        body["message"] = json!(long);
        let came = body_of(&decode(kind, &body, 0).unwrap());
        assert_eq!(came["message"], json!(sent), "the peer did not shorten it");
    }
}

/// Changes all texts of a body, except tables, whose contents users define, and fields with a fixed form.
fn texts(value: &mut Value, change: &mut impl FnMut(&mut String)) {
    match value {
        Value::Object(object) => {
            for (name, value) in object {
                let fixed = ["uuid", "token", "mechanism", "location", "kind", "inline", "lease", "dtype"];
                let tokens = ["request", "puts", "lost"].contains(&name.as_str())
                    || name == "leases" && value.get(0).is_some_and(Value::is_string);
                if !fixed.contains(&name.as_str()) && !tokens {
                    texts(value, change);
                }
            }
        }
        Value::Array(values) => values.iter_mut().for_each(|value| texts(value, change)),
        Value::String(text) => change(text),
        _ => {}
    }
}

#[test]
fn control_characters_are_removed() {
    for golden in tests::golden(RECORDS) {
        let mut body = golden.body();
        texts(&mut body, &mut |text| *text = "\u{1b}[31m\u{202e}\n".to_owned());
        let read = decode(golden.kind, &body, golden.fds).unwrap_or_else(|error| panic!("{}: {error}", golden.name));
        // The server checks the names in requests itself, and only the server prints them.
        if matches!(read.name(), "get" | "list" | "stat" | "who" | "delete" | "hello" | "watch" | "topic" | "follow") {
            continue;
        }
        let mut body = body_of(&read);
        texts(&mut body, &mut |text| {
            assert!(!text.contains(|c: char| c.is_control() || c == '\u{202e}'), "{}: {text:?}", read.name());
        });
    }
}
