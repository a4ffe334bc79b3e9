//! Encoding and decoding of all messages, and protocol violations.

use super::*;
use crate::{
    array::{ArrayDescriptor, Order},
    base::{Access, DeviceUuid},
};

fn every_message() -> Vec<Message> {
    let uuid = DeviceUuid::from_bytes(*b"0123456789abcdef");
    let check = |text: &str| serde_json::from_str::<Check>(text).unwrap();
    vec![
        Message::Hello(Hello {
            version: 1,
            capabilities: vec!["x".into()],
            backend: "cuda".into(),
            pid: 7,
            timeout_ms: u64::MAX,
        }),
        Message::Request(Request {
            object: DEFAULT_OBJECT.into(),
            access: Some(Access::ReadOnly),
            range: Some(ByteRange { offset: 1, length: u64::MAX }),
        }),
        Message::Offer(Box::new(Offer {
            object: "weights".into(),
            memory: Memory {
                mechanism: Mechanism::Pool,
                device: Device { uuid, name: "a device".into() },
                location: Location::Host,
                size: 5,
                mapped_size: 2 << 20,
                segments: 1,
                pool: Some(2),
                pointer: Some(Pointer([0xA5; 64])),
                offset: 4096,
                immutable: true,
            },
            array: Some(ArrayDescriptor::new("<f4".parse().unwrap(), vec![5, 7], Order::F).unwrap()),
            access: Access::ReadWrite,
            part: Some(Run { first: 1, segments: 2, offset: 3, size: 4 }),
            check: Some(check(r#"{"salt":4294967295,"of another":[1,{"x":null}]}"#)),
            buffer: Some(4),
        })),
        Message::Segments(Segments { first: 0, sizes: vec![2 << 20, 4 << 20] }),
        Message::Received(Received { segments: 2 }),
        Message::Result(Verdict { verified: false, check: Some(check(r#"{"words":9}"#)) }),
        Message::Busy(Busy {}),
        Message::Error(Failure { code: ErrorCode::Refused, message: "no".into() }),
        Message::Pool(PoolNumber { pool: 7 }),
        Message::Subscribe(Subscribe { keep: 4 }),
        Message::Ready(Ready { buffer: 2, generation: 9, sizes: vec![2 << 20, 1] }),
        Message::Done(BufferTurn { buffer: u64::MAX, generation: 1 }),
        Message::Withdraw(BufferNumber { buffer: 2 }),
        Message::Gone(BufferNumber { buffer: 0 }),
    ]
}

pub(super) fn record(kind: u16, body: &str, fds: u32) -> Vec<u8> {
    let mut record = b"VMFD\x01\x00".to_vec();
    record.extend(kind.to_le_bytes());
    record.extend((body.len() as u32).to_le_bytes());
    record.extend(fds.to_le_bytes());
    record.extend(body.as_bytes());
    record
}

#[test]
fn messages_round_trip() {
    for message in every_message() {
        let bytes = message.encode().unwrap();
        assert_eq!(Message::decode(&bytes, message.fd_count()), Ok(message));
    }
}

#[test]
fn truncated_records_are_rejected() {
    for message in every_message() {
        let bytes = message.encode().unwrap();
        for length in 0..bytes.len() {
            assert!(Message::decode(&bytes[..length], message.fd_count()).is_err(), "{message:?} cut to {length}");
        }
        let longer = [bytes, b" ".to_vec()].concat();
        assert!(matches!(Message::decode(&longer, 0), Err(ProtocolError::BodyLength { .. })));
    }
}

#[test]
fn corrupted_records_do_not_panic() {
    for message in every_message() {
        let bytes = message.encode().unwrap();
        for index in 0..bytes.len() {
            for value in [0, 1, 0x22, 0x7f, 0xff] {
                let mut changed = bytes.clone();
                changed[index] = value;
                let _ = Message::decode(&changed, message.fd_count());
            }
        }
    }
}

#[test]
fn descriptor_counts_must_match() {
    for message in every_message() {
        let (bytes, want) = (message.encode().unwrap(), message.fd_count());
        for fds in [0, 1, want + 1, MAX_FDS] {
            let decoded = Message::decode(&bytes, fds);
            let refused = matches!(decoded, Err(ProtocolError::FdCount { got, .. }) if got == fds);
            assert_eq!(refused, fds != want, "{message:?} with {fds}");
        }
    }
    let lying = record(4, r#"{"first":0,"sizes":[1]}"#, 2);
    assert!(matches!(Message::decode(&lying, 1), Err(ProtocolError::FdCount { claimed: 2, .. })));
}

#[test]
fn body_faults_have_codes() {
    use crate::error::{BodyCause::*, BodyFault};
    let offers: Vec<Message> = every_message().into_iter().filter(|one| matches!(one, Message::Offer(_))).collect();
    let offer = offers[0].encode().unwrap();
    let offer = str::from_utf8(&offer[HEADER_LENGTH..]).unwrap();
    let changed = |from: &str, to: &str| {
        assert!(offer.contains(from), "{from} is not in {offer}");
        offer.replacen(from, to, 1)
    };
    let uuid = format!("{}", DeviceUuid::from_bytes(*b"0123456789abcdef"));
    let cases = [
        (2, "[]".to_owned(), None, Type),
        (2, r#"{"object":"#.to_owned(), None, Syntax),
        (2, "{}".to_owned(), Some("object"), Missing),
        (2, r#"{"object":null}"#.to_owned(), Some("object"), Missing),
        (2, r#"{"object":7}"#.to_owned(), Some("object"), Type),
        (2, r#"{"object":"unknown variant","object":"x"}"#.to_owned(), Some("object"), Duplicate),
        (2, r#"{"object":"missing field","access":"floating point"}"#.to_owned(), Some("access"), Variant),
        (2, r#"{"object":"x","range":[1,2]}"#.to_owned(), Some("range"), Type),
        (2, r#"{"object":"x","range":{"offset":0}}"#.to_owned(), Some("length"), Missing),
        (2, r#"{"object":"x","range":{"offset":-1,"length":1}}"#.to_owned(), Some("offset"), Number),
        (2, r#"{"object":"x","range":{"offset":1.0,"length":1}}"#.to_owned(), Some("offset"), Number),
        (2, r#"{"object":"x","range":{"offset":1e999,"length":1}}"#.to_owned(), Some("offset"), Number),
        (4, r#"{"first":0,"sizes":[1,-0]}"#.to_owned(), Some("sizes"), Number),
        (3, changed(&uuid, "UUID"), Some("uuid"), Value),
        (3, changed("\"pool\",", "\"moon\","), Some("mechanism"), Variant),
        (3, changed("a5", "xx"), Some("pointer"), Value),
        (3, changed("{\"x\":null}", "{\"x\":1,\"x\":2}"), Some("of another"), Duplicate),
        (3, changed("{\"x\":null}", "1e999"), Some("of another"), Number),
        (6, r#"{"verified":true,"check":7}"#.to_owned(), Some("check"), Value),
        (6, format!(r#"{{"verified":true,"check":{}}}"#, "[".repeat(60000)), None, Syntax),
    ];
    for (kind, body, field, cause) in cases {
        let refused = Message::decode(&record(kind, &body, 0), 0);
        let want = BodyFault { field: field.map(str::to_owned), cause };
        assert!(matches!(&refused, Err(ProtocolError::Body { fault, .. }) if *fault == want), "{body}: {refused:?}");
    }
    let deep = format!(r#"{{"verified":true,"check":{{"x":{}{}}}}}"#, "[".repeat(30000), "]".repeat(30000));
    let refused = Message::decode(&record(6, &deep, 0), 0);
    assert!(matches!(&refused, Err(ProtocolError::Body { fault: BodyFault { cause: Syntax, .. }, .. })), "{refused:?}");
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
    let mut offers = every_message();
    offers.retain(|message| matches!(message, Message::Offer(_)));
    for mut message in offers {
        let Message::Offer(offer) = &mut message else { continue };
        offer.memory.device.name = long.clone();
        assert!(matches!(message.encode(), Err(ProtocolError::Content(_))));
    }
}

#[test]
fn unknown_fields_and_codes_are_ignored() {
    let request = Message::decode(&record(2, r#"{"object":"x","colour":"red"}"#, 0), 0);
    assert_eq!(request, Ok(Message::Request(Request { object: "x".into(), access: None, range: None })));
    let code_of = |name: &str| {
        let body = serde_json::json!({"code": name, "message": "y"}).to_string();
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
fn arrays_are_not_objects() {
    let offer = every_message().into_iter().find(|message| matches!(message, Message::Offer(_))).unwrap();
    let body = offer.encode().unwrap();
    let body: serde_json::Value = serde_json::from_slice(&body[HEADER_LENGTH..]).unwrap();
    let refused = |kind, body: &serde_json::Value| match Message::decode(&record(kind, &body.to_string(), 0), 0) {
        Err(ProtocolError::Body { reason, .. }) => assert!(reason.contains("expected a JSON object"), "{reason}"),
        other => panic!("{body}: {other:?}"),
    };
    assert!(Message::decode(&record(3, &body.to_string(), 0), 0).is_ok());
    for path in ["/memory", "/memory/device", "/array", "/part"] {
        let mut changed = body.clone();
        let nested = changed.pointer_mut(path).unwrap();
        // All values in the fields' order.
        *nested = nested.as_object().unwrap().values().cloned().collect();
        refused(3, &changed);
    }
    refused(2, &serde_json::json!({"object": "default", "range": [0, 4]}));
}

#[test]
fn lenient_json_is_rejected() {
    let refused = |kind, body: &[u8]| {
        let mut sent = record(kind, "", 0);
        sent[8..12].copy_from_slice(&(body.len() as u32).to_le_bytes());
        sent.extend(body);
        let refused = Message::decode(&sent, 0).unwrap_err();
        assert!(matches!(refused, ProtocolError::Body { .. } | ProtocolError::Content(_)), "{body:?} {refused}");
        refused.to_string()
    };
    assert!(refused(7, b"{\"unknown\":\"\xff\"}").contains("not UTF-8"));
    for number in ["4.0", "4e0", "-0", "-1", "18446744073709551616", "\"4\"", "true"] {
        refused(5, format!("{{\"segments\":{number}}}").as_bytes());
    }
    refused(5, b"{\"segments\":4,\"segments\":4}");
    refused(6, br#"{"verified":true,"check":{"words":1,"mismatches":0,"words":1}}"#);
    refused(6, br#"{"verified":true,"check":{"x":[{"y":1,"y":1}]}}"#);
    // `capabilities` is required.
    refused(1, br#"{"version":1,"backend":"host","pid":1,"timeout_ms":1}"#);
    let hello = |timeout: u64, capabilities: Vec<String>| {
        let body = serde_json::json!({"version": 1, "capabilities": capabilities, "backend": "host", "pid": 1,
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
    let device = |uuid: &str| serde_json::from_value::<Device>(serde_json::json!({"uuid": uuid, "name": ""}));
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
    let body = format!(r#"{{"buffer":"{}","generation":1}}"#, "é".repeat(20_000));
    let Err(ProtocolError::Body { reason, .. }) = Message::decode(&record(12, &body, 0), 0) else { panic!() };
    assert!(reason.len() <= MAX_REASON && reason.ends_with("..."), "{} bytes", reason.len());
    let sent = Message::Error(Failure { code: ErrorCode::Failed, message: "é".repeat(MAX_BODY) });
    let bytes = sent.encode().unwrap();
    let Ok(Message::Error(Failure { message, .. })) = Message::decode(&bytes, 0) else { panic!() };
    assert!(message.len() > MAX_MESSAGE - 5 && message.len() <= MAX_MESSAGE && message.ends_with("é..."));
    // The peer did not shorten it.
    let body = serde_json::json!({"code": "failed", "message": "x".repeat(60_000)}).to_string();
    let Ok(Message::Error(Failure { message, .. })) = Message::decode(&record(8, &body, 0), 0) else { panic!() };
    assert_eq!(message.len(), MAX_MESSAGE);
}

#[test]
fn optional_fields_may_be_null() {
    let ready = Message::decode(&record(11, r#"{"buffer":1,"generation":2,"sizes":null}"#, 0), 0);
    assert_eq!(ready, Ok(Message::Ready(Ready { buffer: 1, generation: 2, sizes: Vec::new() })));
    for message in every_message() {
        let Message::Offer(_) = &message else { continue };
        let record = message.encode().unwrap();
        let mut body: serde_json::Value = serde_json::from_slice(&record[HEADER_LENGTH..]).unwrap();
        let optional = ["array", "part", "check", "buffer"];
        optional.iter().for_each(|field| body[field] = serde_json::Value::Null);
        let optional = ["pool", "pointer", "offset", "immutable"];
        optional.iter().for_each(|field| body["memory"][field] = serde_json::Value::Null);
        let body = body.to_string();
        assert!(matches!(Message::decode(&self::record(3, &body, 0), 0), Ok(Message::Offer(_))), "{body}");
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
    serde_json::from_str::<Location>(r#""moon""#).unwrap_err();
}

#[test]
fn docs_list_every_kind() {
    let page = include_str!("../../docs/protocol.md");
    for message in every_message() {
        let kind = u16::from_le_bytes([message.encode().unwrap()[6], message.encode().unwrap()[7]]);
        assert!(page.contains(&format!("| {kind} | `{}` |", message.name())), "{kind} {}", message.name());
    }
}

#[test]
fn too_long_messages_are_not_sent() {
    let check = serde_json::from_value(serde_json::json!({"x": "x".repeat(MAX_BODY)})).unwrap();
    let message = Message::Result(Verdict { verified: true, check: Some(check) });
    assert_eq!(message.encode(), Err(ProtocolError::LongRecord { most: HEADER_LENGTH + MAX_BODY }));
}
