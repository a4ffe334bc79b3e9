//! Encoding and decoding of the messages of both protocols, and protocol violations. The golden records are the messages.

use serde_json::{Value, json};

use super::*;
use crate::wire::broker;

/// A golden record.
pub(super) struct Golden {
    pub(super) name: String,
    pub(super) kind: u16,
    pub(super) bytes: Vec<u8>,
    pub(super) fds: usize,
}

impl Golden {
    /// The text of the body.
    pub(super) fn text(&self) -> &str {
        str::from_utf8(&self.bytes[HEADER_LENGTH..]).unwrap()
    }

    pub(super) fn body(&self) -> Value {
        serde_json::from_str(self.text()).unwrap()
    }
}

/// The golden records of a protocol's page.
pub(super) fn golden(text: &str) -> Vec<Golden> {
    let golden: Value = serde_json::from_str(text).unwrap();
    let read = |record: &Value| {
        let bytes = hex::decode(record["hex"].as_str().unwrap()).unwrap();
        Golden {
            name: record["name"].as_str().unwrap().to_owned(),
            kind: u16::from_le_bytes([bytes[6], bytes[7]]),
            bytes,
            fds: record["descriptors"].as_u64().unwrap() as usize,
        }
    };
    golden["records"].as_array().unwrap().iter().map(read).collect()
}

/// Decodes a record, and encodes its message.
type Decode = fn(&[u8], usize) -> Result<Vec<u8>, ProtocolError>;

fn decode_peers(record: &[u8], fds: usize) -> Result<Vec<u8>, ProtocolError> {
    let message = Message::decode(record, fds)?;
    // Accepted messages can be encoded.
    Ok(message.encode().unwrap())
}

fn decode_broker(record: &[u8], fds: usize) -> Result<Vec<u8>, ProtocolError> {
    let message = broker::Message::decode(record, fds)?;
    let mut written = Vec::new();
    message.encode_into(&mut written).unwrap();
    Ok(written)
}

/// The golden records of both protocols, each with its decoder.
fn all() -> impl Iterator<Item = (Golden, Decode)> {
    let peers = golden(include_str!("../../docs/golden.json")).into_iter();
    let broker = golden(include_str!("../../docs/broker-golden.json")).into_iter();
    peers.map(|record| (record, decode_peers as Decode)).chain(broker.map(|record| (record, decode_broker as Decode)))
}

pub(super) fn record(kind: u16, body: &str, fds: u32) -> Vec<u8> {
    let mut record = b"VMFD\x01\x00".to_vec();
    record.extend(kind.to_le_bytes());
    record.extend((body.len() as u32).to_le_bytes());
    record.extend(fds.to_le_bytes());
    record.extend(body.as_bytes());
    record
}

/// The body of an offer of a pool's memory.
fn offer() -> Value {
    let records = golden(include_str!("../../docs/golden.json"));
    records.into_iter().find(|record| record.name == "memory of a pool").unwrap().body()
}

#[test]
fn unknown_kinds_are_rejected() {
    let known: Vec<(u16, Decode)> = all().map(|(record, decode)| (record.kind, decode)).collect();
    for decode in [decode_peers as Decode, decode_broker] {
        for kind in 0..=u16::MAX {
            let unknown = decode(&record(kind, "{}", 0), 0) == Err(ProtocolError::Kind { got: kind });
            let is_known = known.iter().any(|&(known, of)| known == kind && std::ptr::fn_addr_eq(of, decode));
            assert_eq!(unknown, !is_known, "kind {kind}");
        }
    }
}

#[test]
fn truncated_records_are_rejected() {
    for (Golden { name, bytes, fds, .. }, decode) in all() {
        for length in 0..bytes.len() {
            assert!(decode(&bytes[..length], fds).is_err(), "{name} cut to {length}");
        }
        let longer = [bytes, b" ".to_vec()].concat();
        assert!(matches!(decode(&longer, fds), Err(ProtocolError::BodyLength { .. })));
    }
}

#[test]
fn corrupted_records_do_not_panic() {
    for (Golden { bytes, fds, .. }, decode) in all() {
        for index in 0..bytes.len() {
            for value in [0, 1, b'"', b'[', b'{', b'-', b'9', 0x7f, 0xff] {
                let mut changed = bytes.clone();
                changed[index] = value;
                let _ = decode(&changed, fds);
            }
        }
    }
}

/// All bodies with one value, at any depth, replaced.
fn changed(value: &Value, with: &Value) -> Vec<Value> {
    let mut all = vec![with.clone()];
    match value {
        Value::Object(object) => {
            for (name, inner) in object {
                all.extend(changed(inner, with).into_iter().map(|inner| {
                    let mut object = object.clone();
                    object.insert(name.clone(), inner);
                    Value::Object(object)
                }));
            }
        }
        Value::Array(values) => {
            for (at, inner) in values.iter().enumerate() {
                all.extend(changed(inner, with).into_iter().map(|inner| {
                    let mut values = values.clone();
                    values[at] = inner;
                    Value::Array(values)
                }));
            }
        }
        _ => {}
    }
    all
}

#[test]
fn replaced_values_do_not_panic() {
    let mut refused = 0;
    for (golden, decode) in all() {
        for with in [json!(null), json!(-1), json!(1.5), json!("x"), json!([]), json!({}), json!(true)] {
            for body in changed(&golden.body(), &with) {
                let decoded = decode(&record(golden.kind, &body.to_string(), golden.fds as u32), golden.fds);
                refused += usize::from(decoded.is_err());
            }
        }
    }
    assert!(refused > 1000, "{refused}");
}

#[test]
fn descriptor_counts_must_match() {
    for (golden, decode) in all() {
        for fds in [0, 1, golden.fds + 1, MAX_FDS] {
            let refused = matches!(decode(&golden.bytes, fds), Err(ProtocolError::FdCount { got, .. }) if got == fds);
            assert_eq!(refused, fds != golden.fds, "{} with {fds}", golden.name);
        }
    }
    let lying = record(4, r#"{"first":0,"sizes":[1]}"#, 2);
    assert!(matches!(Message::decode(&lying, 1), Err(ProtocolError::FdCount { claimed: 2, .. })));
}

/// The paths of all objects in a body, except the contents of fields that users define.
fn objects(value: &Value, path: &str, found: &mut Vec<String>) {
    match value {
        Value::Object(object) => {
            found.push(path.to_owned());
            for (name, value) in object {
                if !["check", "expect", "digests", "inline", "attributes"].contains(&name.as_str()) {
                    objects(value, &format!("{path}/{name}"), found);
                }
            }
        }
        Value::Array(values) => {
            values.iter().enumerate().for_each(|(at, value)| objects(value, &format!("{path}/{at}"), found));
        }
        _ => {}
    }
}

#[test]
fn arrays_are_not_objects() {
    let mut count = 0;
    for (golden, decode) in all() {
        let body = golden.body();
        let mut paths = Vec::new();
        objects(&body, "", &mut paths);
        for path in paths {
            let mut changed = body.clone();
            let nested = changed.pointer_mut(&path).unwrap();
            // All values in the fields' order, which is the order in the text.
            let mut fields: Vec<(String, Value)> = nested.as_object().unwrap().clone().into_iter().collect();
            fields.sort_by_key(|(name, value)| golden.text().find(&format!("\"{name}\":{value}")));
            *nested = fields.into_iter().map(|(_, value)| value).collect();
            let decoded = decode(&record(golden.kind, &changed.to_string(), golden.fds as u32), golden.fds);
            assert!(matches!(decoded, Err(ProtocolError::Body { .. })), "{} {path}: {decoded:?}", golden.name);
            count += 1;
        }
    }
    assert!(count > 80, "{count}");
}

#[test]
fn pages_list_every_kind() {
    let peers = include_str!("../../docs/protocol.md");
    let broker = include_str!("../../docs/broker-protocol.md");
    for (golden, _) in all() {
        let row = format!("| {} | `", golden.kind);
        assert!(peers.contains(&row) || broker.contains(&row), "{}", golden.kind);
    }
}

#[test]
fn invalid_bodies_are_rejected() {
    let mut offer = offer();
    let uuid = offer["memory"]["device"]["uuid"].as_str().unwrap().to_owned();
    offer["memory"]["pointer"] = json!("a5".repeat(64));
    offer["check"] = json!({"of another": [1, {"x": null}]});
    let offer = offer.to_string();
    let changed = |from: &str, to: &str| {
        assert!(offer.contains(from), "{from} is not in {offer}");
        offer.replacen(from, to, 1)
    };
    let cases = [
        (2, "[]".to_owned()),
        (2, r#"{"object":"#.to_owned()),
        (2, "{}".to_owned()),
        (2, r#"{"object":null}"#.to_owned()),
        (2, r#"{"object":7}"#.to_owned()),
        (2, r#"{"object":"unknown variant","object":"x"}"#.to_owned()),
        (2, r#"{"object":"missing field","access":"floating point"}"#.to_owned()),
        (2, r#"{"object":"x","range":[1,2]}"#.to_owned()),
        (2, r#"{"object":"x","range":{"offset":0}}"#.to_owned()),
        (2, r#"{"object":"x","range":{"offset":-1,"length":1}}"#.to_owned()),
        (2, r#"{"object":"x","range":{"offset":1.0,"length":1}}"#.to_owned()),
        (2, r#"{"object":"x","range":{"offset":1e999,"length":1}}"#.to_owned()),
        (4, r#"{"first":0,"sizes":[1,-0]}"#.to_owned()),
        (3, changed(&uuid, "UUID")),
        (3, changed("\"pool\",", "\"moon\",")),
        (3, changed("a5", "xx")),
        (3, changed("{\"x\":null}", "{\"x\":1,\"x\":2}")),
        (3, changed("{\"x\":null}", "1e999")),
        (6, r#"{"verified":true,"check":7}"#.to_owned()),
        (6, format!(r#"{{"verified":true,"check":{}}}"#, "[".repeat(60000))),
    ];
    let deep = format!(r#"{{"verified":true,"check":{{"x":{}{}}}}}"#, "[".repeat(30000), "]".repeat(30000));
    for (kind, body) in cases.into_iter().chain([(6, deep)]) {
        let refused = Message::decode(&record(kind, &body, 0), 0);
        assert!(matches!(&refused, Err(ProtocolError::Body { .. })), "{body:.200}: {refused:?}");
    }
}

#[test]
fn invalid_records_have_specific_errors() {
    let decode = |bytes: &[u8]| Message::decode(bytes, 0).unwrap_err();
    assert_eq!(decode(b""), ProtocolError::ShortRecord { got: 0, header: 16 });
    assert_eq!(decode(b"GET / HTTP/1.1\r\n"), ProtocolError::Magic { got: *b"GET " });
    let mut newer = record(7, "{}", 0);
    newer[4] = 2;
    assert_eq!(decode(&newer), ProtocolError::Version { got: 2, own: 1 });
    assert_eq!(decode(&record(99, "{}", 0)), ProtocolError::Kind { got: 99 });
    for body in ["", "[]", "{", "null", r#"["default",null]"#, r#"{"object":7}"#, "\u{0}"] {
        let refused = decode(&record(2, body, 0));
        assert!(matches!(refused, ProtocolError::Body { kind: "request", .. }), "{body:?}: {refused}");
    }
    let many = format!(r#"{{"first":0,"sizes":[{}]}}"#, vec!["1"; MAX_FDS + 1].join(","));
    for body in [many.as_str(), r#"{"first":0,"sizes":[]}"#] {
        assert!(matches!(decode(&record(4, body, 0)), ProtocolError::SizeCount { kind: "segments", .. }));
    }
    let long = "x".repeat(MAX_NAME + 1);
    let asked = format!(r#"{{"object":"{long}"}}"#);
    assert!(matches!(decode(&record(2, &asked, 0)), ProtocolError::Content(_)));
    assert!(matches!(decode(&record(6, r#"{"verified":true,"check":7}"#, 0)), ProtocolError::Body { .. }));
    // `timeout_ms` is required.
    let hello = r#"{"version":1,"backend":"host","pid":1}"#;
    assert!(matches!(decode(&record(1, hello, 0)), ProtocolError::Body { kind: "hello", .. }));
    let bytes = record(3, &offer().to_string(), 0);
    let Ok(Message::Offer(mut offer)) = Message::decode(&bytes, 0) else { panic!() };
    offer.memory.device.name = long;
    assert!(matches!(Message::Offer(offer).encode(), Err(ProtocolError::Content(_))));
}

#[test]
fn unknown_fields_and_codes_are_ignored() {
    let request = Message::decode(&record(2, r#"{"object":"x","colour":"red"}"#, 0), 0);
    assert_eq!(request, Ok(Message::Request(Request { object: "x".into(), access: None, range: None })));
    let code_of = |name: &str| {
        let body = json!({"code": name, "message": "y"}).to_string();
        let Ok(Message::Error(failure)) = Message::decode(&record(8, &body, 0), 0) else { panic!("{body}") };
        (failure.code, failure.code.to_string())
    };
    assert!(matches!(code_of("too_warm"), (ErrorCode::Unknown(_), name) if name == "too_warm"), "the name is kept");
    assert_eq!(code_of("timeout"), (ErrorCode::Timeout, "timeout".to_owned()));
    let long = "\u{1b}[31m é".to_owned() + &"x".repeat(99);
    assert_eq!(code_of(&long).1, format!("??31m???{}", "x".repeat(24)));
    assert_eq!(serde_json::to_value(code_of("too_warm").0).unwrap(), "too_warm");
}

#[test]
fn hellos_have_limits() {
    let hello = |timeout: u64, capabilities: Vec<String>| {
        let body = json!({"version": 1, "capabilities": capabilities, "backend": "host", "pid": 1,
            "timeout_ms": timeout});
        Message::decode(&record(1, &body.to_string(), 0), 0)
    };
    assert!(hello(1, vec!["x".repeat(MAX_NAME); MAX_CAPABILITIES]).is_ok());
    for (timeout, capabilities) in
        [(0, Vec::new()), (1, vec!["x".repeat(MAX_NAME + 1)]), (1, vec![String::new(); MAX_CAPABILITIES + 1])]
    {
        assert!(matches!(hello(timeout, capabilities), Err(ProtocolError::Content(_))));
    }
}

#[test]
fn uuids_have_one_form() {
    let device = |uuid: &str| serde_json::from_value::<DeviceIdentity>(json!({"uuid": uuid, "name": ""}));
    let bare = "53e9a7d2-1f0c-5b7e-9c55-0123456789ab";
    for sound in [bare.to_owned(), bare.to_uppercase()] {
        assert_eq!(device(&sound).unwrap().uuid, bare.parse().unwrap());
    }
    let wrong = [format!("GPU-{bare}"), bare.replace('-', ""), format!("{{{bare}}}"), format!("urn:uuid:{bare}")];
    for wrong in wrong.iter().chain(&[bare.replace('a', "g"), bare.replacen('-', "0", 1)]) {
        device(wrong).unwrap_err();
    }
}

#[test]
fn peer_texts_are_shortened() {
    let body = format!(r#"{{"number":"{}"}}"#, "é".repeat(20_000));
    let Err(ProtocolError::Body { reason, .. }) = Message::decode(&record(14, &body, 0), 0) else { panic!() };
    assert!(reason.len() <= MAX_REASON && reason.ends_with("..."), "{} bytes", reason.len());
    let sent = Message::Error(Failure { code: ErrorCode::Failed, message: "é".repeat(MAX_BODY) });
    let bytes = sent.encode().unwrap();
    let Ok(Message::Error(Failure { message, .. })) = Message::decode(&bytes, 0) else { panic!() };
    assert!(message.len() > MAX_MESSAGE - 5 && message.len() <= MAX_MESSAGE && message.ends_with("é..."));
    // The peer did not shorten it.
    let body = json!({"code": "failed", "message": "x".repeat(60_000)}).to_string();
    let Ok(Message::Error(Failure { message, .. })) = Message::decode(&record(8, &body, 0), 0) else { panic!() };
    assert_eq!(message.len(), MAX_MESSAGE);
}

#[test]
fn optional_fields_may_be_null() {
    let done = Message::decode(&record(14, r#"{"number":1,"done_at":null}"#, 0), 0);
    assert_eq!(done, Ok(Message::Done(Done { number: 1, done_at: None })));
    let mut body = offer();
    for path in ["/array", "/part", "/check", "/memory/pool", "/memory/pointer", "/memory/offset", "/memory/immutable"]
    {
        let (parent, name) = path.rsplit_once('/').unwrap();
        body.pointer_mut(parent).unwrap()[name] = Value::Null;
    }
    // Pool memory needs its pool and pointer.
    body["memory"]["mechanism"] = json!("vmm");
    let decoded = Message::decode(&record(3, &body.to_string(), 0), 0);
    assert!(matches!(decoded, Ok(Message::Offer(_))), "{body}: {decoded:?}");
}

#[test]
fn turns_that_no_release_reaches_are_rejected() {
    let done = |turn: u64| Message::decode(&record(14, &json!({"number": 1, "done_at": turn}).to_string(), 0), 0);
    assert!(done(1).is_ok() && done(MAX_TURN).is_ok());
    for turn in [0, MAX_TURN + 1, u64::MAX] {
        assert!(matches!(done(turn), Err(ProtocolError::Content(_))), "{turn}");
    }
}

#[test]
fn control_characters_are_removed() {
    let body = r#"{"code":"failed","message":"\u001b[31mred\n\u202e"}"#;
    let Ok(Message::Error(failure)) = Message::decode(&record(8, body, 0), 0) else { panic!() };
    assert_eq!(failure.message, " [31mred  ");
}

#[test]
fn unknown_mechanisms_and_locations_are_rejected() {
    assert_eq!(serde_json::from_str::<Mechanism>(r#""legacy""#).unwrap(), Mechanism::Legacy);
    serde_json::from_str::<Mechanism>(r#""fabric""#).unwrap_err();
    serde_json::from_str::<Placement>(r#""moon""#).unwrap_err();
}

#[test]
fn too_long_messages_are_not_sent() {
    let check = serde_json::from_value(json!({"x": "x".repeat(MAX_BODY)})).unwrap();
    let message = Message::Result(Verdict { verified: true, check: Some(check) });
    assert_eq!(message.encode(), Err(ProtocolError::LongRecord { most: HEADER_LENGTH + MAX_BODY }));
}
