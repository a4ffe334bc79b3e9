//! Raw records that break a rule of the protocols' pages, sent to a producer, a consumer and a broker. Each is answered with its code.

use rustix::net::{SocketFlags, accept_with};
use vmmfd::{
    session::handoff::fetch,
    wire::{HEADER_LENGTH, MAX_BODY, broker},
};

use crate::{
    conversation::{PATIENCE, listening},
    support::{material::Material, prelude::*},
};

const MIB: u64 = 1 << 20;

/// A record with any text as its body, which claims `fds` descriptors.
pub(crate) fn record(kind: u16, body: &str, fds: u32) -> Vec<u8> {
    let length = (body.len() as u32).to_le_bytes();
    [b"VMFD\x01\x00", &kind.to_le_bytes()[..], &length, &fds.to_le_bytes(), body.as_bytes()].concat()
}

/// One violation: the records before it, the record itself with its number of descriptors, and the code of the answer. `""`: no answer,
/// and the connection is closed.
struct Violation {
    name: String,
    before: Vec<Vec<u8>>,
    record: Vec<u8>,
    fds: usize,
    code: &'static str,
}

fn violation(name: &str, before: &[Vec<u8>], record: Vec<u8>, fds: usize, code: &'static str) -> Violation {
    Violation { name: name.to_owned(), before: before.to_vec(), record, fds, code }
}

/// The violations by which a valid record becomes invalid, whatever it means. `before` are the records before it.
fn of_any_record(kind: u16, body: &str, before: &[Vec<u8>]) -> Vec<Violation> {
    let valid = record(kind, body, 0);
    let changed = |at: usize, byte: u8| {
        let mut record = valid.clone();
        record[at] = byte;
        record
    };
    let fields = body.trim_matches(['{', '}']);
    let more = |fields: &str, field: &str| if fields.is_empty() { String::new() } else { format!("{fields},{field}") };
    let cases = [
        ("bad magic", changed(0, b'X'), 0, "protocol"),
        ("version 2", changed(4, 2), 0, "version"),
        ("unknown kind", changed(6, 99), 0, "protocol"),
        ("longer body than claimed", changed(8, valid[8] - 1), 0, "protocol"),
        ("claimed descriptor", changed(12, 1), 0, "protocol"),
        ("descriptor where none belongs", valid.clone(), 1, "protocol"),
        ("claimed and sent descriptor where none belongs", changed(12, 1), 1, "protocol"),
        ("truncated header", valid[..HEADER_LENGTH - 1].to_vec(), 0, "protocol"),
        (
            "body of 65537 bytes",
            record(kind, &format!("{body}{}", " ".repeat(MAX_BODY + 1 - body.len())), 0),
            0,
            "protocol",
        ),
        ("array for an object", record(kind, "[]", 0), 0, "protocol"),
        ("broken JSON", record(kind, &body.replace('}', "]"), 0), 0, "protocol"),
        ("text after the body", record(kind, &format!("{body}{body}"), 0), 0, "protocol"),
        ("second name of a field", record(kind, &format!("{{{}}}", more(fields, fields)), 0), 0, "protocol"),
        ("empty record", Vec::new(), 0, ""),
        ("undecodable error", record(8, "{}", 0), 0, ""),
    ];
    // A body without fields has no second one.
    let cases = cases.into_iter().filter(|(name, ..)| !fields.is_empty() || *name != "second name of a field");
    cases.map(|(name, record, fds, code)| violation(name, before, record, fds, code)).collect()
}

/// Sends a violation, and asserts the answer. `next` returns the kind or, of an error or a refusal, the code of the next record.
fn check(case: &Violation, raw: &Raw, memory: &[BorrowedFd<'_>], mut next: impl FnMut() -> Option<String>) {
    let Violation { name, before, record, fds, code } = case;
    let null = File::open("/dev/null").unwrap();
    let fds: Vec<BorrowedFd<'_>> = memory.iter().copied().chain([null.as_fd(); 2]).take(*fds).collect();
    for record in before {
        raw.send_bytes(record, &[]).unwrap();
        // A broker accepts descriptors after the hellos.
        if record[6] == 1 {
            assert_eq!(next().as_deref(), Some("kind hello"), "{name}");
        }
    }
    // Fails if the peer has already closed the connection, which must be the answer.
    let _ = raw.send_bytes(record, &fds);
    if code.is_empty() {
        // An answer to the earlier records may come first.
        let last = std::iter::from_fn(next).last();
        assert!(last.is_none_or(|last| last.starts_with("kind ")), "{name}");
        return;
    }
    let found = std::iter::from_fn(&mut next).find(|answer| !answer.starts_with("kind "));
    assert_eq!(found.as_deref(), Some(*code), "{name}");
}

/// The answers of a peer, in the form of [`check`].
fn answers(socket: OwnedFd) -> impl FnMut() -> Option<String> {
    let mut channel = Channel::new(socket, PATIENCE, &Cancel::new().unwrap()).unwrap();
    move || match channel.receive("for an answer") {
        Ok((Message::Error(failure), _)) => Some(failure.code.to_string()),
        Ok((other, _)) => Some(format!("kind {}", other.name())),
        Err(Error::Peer(PeerError::Gone { .. })) => None,
        Err(error) => panic!("{error}"),
    }
}

const HELLO: &str = r#"{"version":1,"capabilities":[],"backend":"host","pid":1,"timeout_ms":20000}"#;
const REQUEST: &str = r#"{"object":"default"}"#;

#[test]
fn producer_refuses_each_violation() {
    let driver = open(Choice::Only(Backend::Host)).unwrap().driver;
    let device = Device::find(&driver, Selector::default()).unwrap();
    let buffer = Buffer::new(Shared::create(&device, Spec::vmm(100)).unwrap(), Unchecked, None).unwrap();
    let (hello, request) = (record(1, HELLO, 0), record(2, REQUEST, 0));
    let greeted = [hello.clone()];
    let offered = [hello.clone(), request.clone()];
    let received = |segments: &str| record(5, &format!(r#"{{"segments":{segments}}}"#), 0);
    let served = [hello.clone(), request.clone(), received("1"), record(6, r#"{"verified":true}"#, 0)];
    let asking = |fields: &str| record(2, &format!(r#"{{"object":"default",{fields}}}"#), 0);
    let other = |from: &str, to: &str| record(1, &HELLO.replace(from, to), 0);
    let mut cases = of_any_record(2, REQUEST, &greeted);
    cases.extend([
        violation("request before hello", &[], request.clone(), 0, "protocol"),
        violation("second hello", &greeted, hello.clone(), 0, "protocol"),
        violation("hello of version 0", &[], other(r#""version":1"#, r#""version":0"#), 0, "version"),
        violation("hello without pid", &[], other(r#","pid":1"#, ""), 0, "protocol"),
        violation("text for a number", &[], other(r#""pid":1"#, r#""pid":"1""#), 0, "protocol"),
        violation("number with a point", &[], other(r#""pid":1"#, r#""pid":1.0"#), 0, "protocol"),
        violation("timeout of 0", &[], other("20000", "0"), 0, "protocol"),
        violation("busy before a request", &greeted, record(7, "{}", 0), 0, "protocol"),
        violation("message of the producer", &greeted, record(9, r#"{"pool":1}"#, 0), 1, "protocol"),
        violation(
            "subscription to a handoff",
            &greeted,
            record(10, r#"{"policy":"latest","held":1,"history":0}"#, 0),
            0,
            "object",
        ),
        violation("request of another backend", &[other("host", "cuda")], request.clone(), 0, "backend"),
        violation("absent object", &greeted, record(2, r#"{"object":"x"}"#, 0), 0, "object"),
        violation(
            "name of 256 bytes",
            &greeted,
            record(2, &json!({"object": "x".repeat(256)}).to_string(), 0),
            0,
            "protocol",
        ),
        violation("empty range", &greeted, asking(r#""range":{"offset":0,"length":0}"#), 0, "range"),
        violation("range out of bounds", &greeted, asking(r#""range":{"offset":100,"length":1}"#), 0, "range"),
        violation("range as an array", &greeted, asking(r#""range":[0,1]"#), 0, "protocol"),
        violation("unknown access", &greeted, asking(r#""access":"wo""#), 0, "protocol"),
        violation("result before received", &offered, record(6, r#"{"verified":true}"#, 0), 0, "protocol"),
        violation("too many received", &offered, received("2"), 0, "protocol"),
        violation("negative count", &offered, received("-1"), 0, "protocol"),
        violation(
            "subscription after a handoff",
            &served,
            record(10, r#"{"policy":"latest","held":1,"history":0}"#, 0),
            0,
            "protocol",
        ),
        violation("record after the end", &served, received("1"), 0, "protocol"),
    ]);
    for case in &cases {
        let (ours, theirs) = Channel::socket_pair().unwrap();
        let raw = Raw::over(theirs.try_clone().unwrap()).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| serve_connection(ours, &buffer, &ServeOptions::default(), &Config::default(), &|_| {}));
            check(case, &raw, &[], answers(theirs));
            raw.0.shutdown(std::net::Shutdown::Both).unwrap();
        });
    }
}

fn changed(body: &Value, path: &str, value: Value) -> Value {
    let mut body = body.clone();
    match body.pointer_mut(path) {
        Some(old) => *old = value,
        None => {
            let (parent, field) = path.rsplit_once('/').unwrap();
            body.pointer_mut(parent).unwrap()[field] = value;
        }
    }
    body
}

fn segments(first: u64, sizes: &[u64], fds: u32) -> Vec<u8> {
    record(4, &json!({"first": first, "sizes": sizes}).to_string(), fds)
}

/// Offers that contradict themselves, or the protocol.
fn contradicting_offers(whole: &Value) -> Vec<Violation> {
    let offers: [(&str, &str, Value); 19] = [
        ("offer without memory", "/memory", json!(null)),
        ("offer of another object", "/object", json!("x")),
        ("unknown access", "/access", json!("wo")),
        ("unknown mechanism", "/memory/mechanism", json!("fabric")),
        ("unaligned size", "/memory/mapped_size", json!(4 * MIB - 1)),
        ("more data than memory", "/memory/size", json!(4 * MIB + 1)),
        ("no data", "/memory/size", json!(0)),
        ("pool of segments", "/memory/pool", json!(1)),
        ("offset of segments", "/memory/offset", json!(1)),
        ("UUID with a prefix", "/memory/device/uuid", json!("GPU-00112233-4455-6677-8899-aabbccddeeff")),
        ("writable and immutable", "/memory/immutable", json!(1)),
        ("no part", "/part", json!(null)),
        ("pointer of segments", "/memory/pointer", json!("00".repeat(64))),
        ("pool without a pool", "/memory/mechanism", json!("pool")),
        ("legacy memory without a pointer", "/memory/mechanism", json!("legacy")),
        (
            "part that overflows",
            "/part",
            json!({"first": u64::MAX, "segments": u64::MAX, "offset": u64::MAX, "size": u64::MAX}),
        ),
        ("part beyond the memory", "/part/size", json!(6 * MIB)),
        ("part of no segments", "/part/segments", json!(0)),
        ("array beyond the memory", "/array", json!({"dtype": "uint8", "shape": [4 * MIB + 1]})),
    ];
    let wrong = offers.into_iter().map(|(name, path, value)| {
        let offer = record(3, &changed(whole, path, value).to_string(), 0);
        violation(name, &[record(1, HELLO, 0)], offer, 0, "protocol")
    });
    wrong.collect()
}

/// Offers that are refused once the segments are there.
fn unusable_offers(whole: &Value) -> Vec<Violation> {
    let by_pointer = |mechanism: &str, pool: Value| {
        let pointer = json!("00".repeat(64));
        let memory = [("mechanism", json!(mechanism)), ("pool", pool), ("pointer", pointer), ("segments", json!(0))];
        memory.into_iter().fold(changed(whole, "/part", json!(null)), |offer, (field, value)| {
            changed(&offer, &format!("/memory/{field}"), value)
        })
    };
    let huge = json!(1u64 << 46);
    let offers = [
        (
            "more memory than there is",
            changed(&changed(whole, "/memory/mapped_size", huge.clone()), "/part/size", huge),
            "failed",
        ),
        ("pool on the host backend", by_pointer("pool", json!(1)), "failed"),
        ("legacy memory on the host backend", by_pointer("legacy", json!(null)), "failed"),
        ("digest of another kind", changed(whole, "/check", json!({"digest": "sha256:00"})), "failed"),
        (
            "digest and pattern",
            changed(whole, "/check", json!({"salt": 3, "digest": format!("blake3:{}", "0".repeat(64))})),
            "protocol",
        ),
        ("reply without a pattern", changed(whole, "/check", json!({"reply_salt": 7})), "protocol"),
        (
            "absent device",
            changed(whole, "/memory/device/uuid", json!("00000000-1111-2222-3333-444444444444")),
            "device",
        ),
    ];
    let unusable = offers.into_iter().map(|(name, offer, code)| {
        let half = offer["memory"]["mapped_size"].as_u64().unwrap() / 2;
        let before = [record(1, HELLO, 0), record(3, &offer.to_string(), 0)];
        violation(name, &before, segments(0, &[half; 2], 2), 2, code)
    });
    unusable.collect()
}

#[test]
fn consumer_refuses_each_violation() {
    let driver = open(Choice::Only(Backend::Host)).unwrap().driver;
    let memory = Material::of(&filled(&driver, 4 * MIB, Some(2 * MIB), 1));
    let fds = memory.fds();
    let whole = json!({"object": "default", "memory": memory.memory, "access": "ro",
        "part": {"first": 0, "segments": 2, "offset": 0, "size": 4 * MIB}});
    let offer = record(3, &whole.to_string(), 0);
    let hello = record(1, HELLO, 0);
    let (greeted, offered) = ([hello.clone()], [hello.clone(), offer.clone()]);
    let (half, verdict) = (2 * MIB, record(6, r#"{"verified":true}"#, 0));
    let mut cases = of_any_record(7, "{}", &greeted);
    cases.extend(contradicting_offers(&whole));
    cases.extend(unusable_offers(&whole));
    cases.extend([
        violation("offer before hello", &[], offer.clone(), 0, "protocol"),
        violation("second hello", &greeted, hello, 0, "protocol"),
        violation(
            "offer of another backend",
            &[record(1, &HELLO.replace("host", "cuda"), 0)],
            offer.clone(),
            0,
            "backend",
        ),
        violation("segments before the offer", &greeted, segments(0, &[half], 1), 1, "protocol"),
        violation("second offer", &offered, offer, 0, "protocol"),
        violation("too few descriptors", &offered, segments(0, &[half, half], 2), 1, "protocol"),
        violation("too many descriptors", &offered, segments(0, &[half], 1), 2, "protocol"),
        violation("segments without sizes", &offered, segments(0, &[], 0), 0, "protocol"),
        violation("more segments than offered", &offered, segments(0, &[half, half, half], 3), 3, "protocol"),
        violation("segments out of order", &offered, segments(1, &[half], 1), 1, "protocol"),
        violation("size that differs from the descriptor", &offered, segments(0, &[MIB, 3 * MIB], 2), 2, "protocol"),
        violation("result before the segments", &offered, verdict, 0, "protocol"),
    ]);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let listener = listening(&path, 1);
    for case in &cases {
        thread::scope(|scope| {
            scope.spawn(|| {
                let (request, mut verifier) = (Request::default(), DataVerifier::new(&|_| {}));
                fetch(&driver, None, &path, &request, &mut verifier, &Config::default(), &|_| {}).unwrap_err();
            });
            let socket = accept_with(&listener, SocketFlags::CLOEXEC).unwrap();
            let raw = Raw::over(socket.try_clone().unwrap()).unwrap();
            check(case, &raw, &fds, answers(socket));
        });
    }
}

#[test]
fn broker_refuses_each_violation() {
    let subject = Subject::host();
    let served = Served::alone(&[]);
    let memory = Material::of(&filled(&subject.driver, 2 * MIB, None, 1));
    let hello = r#"{"version":1,"capabilities":["broker"],"backend":"none","pid":1,"timeout_ms":20000}"#;
    let greeted = [record(1, hello, 0)];
    let waiting = [record(1, hello, 0), record(35, r#"{"objects":[{"name":"x"}],"wait_ms":60000}"#, 0)];
    // A lease of three records.
    let leased = [record(1, hello, 0), record(35, r#"{"objects":[{"name":"long"}]}"#, 0)];
    let long = Material::of(&filled(&subject.driver, 2 * MIB, None, 1)).repeated(600);
    served.client().put(&Put::new("long").part(long.part())).unwrap();
    let put = json!({"name": "x", "backend": "host", "parts": [{"name": "all", "memory": memory.memory}], "sizes": [2 * MIB]});
    let mut cases = of_any_record(38, r#"{"prefix":""}"#, &greeted);
    let puts: [(&str, &str, Value, &str); 19] = [
        ("name with an empty component", "/name", json!("a//b"), "invalid"),
        ("name of 256 bytes", "/name", json!("x".repeat(256)), "protocol"),
        ("number for a flag", "/replace", json!(1), "protocol"),
        ("no backend", "/backend", json!(null), "protocol"),
        ("no part", "/parts", json!([]), "invalid"),
        ("part as an array", "/parts/0", json!(["all"]), "protocol"),
        ("memory of a pool", "/parts/0/memory/mechanism", json!("pool"), "invalid"),
        ("unaligned size", "/parts/0/memory/mapped_size", json!(2 * MIB - 1), "invalid"),
        ("more data than memory", "/parts/0/memory/size", json!(2 * MIB + 1), "invalid"),
        ("size that differs from the descriptor", "/parts/0/memory/mapped_size", json!(4 * MIB), "invalid"),
        ("host memory as GPU memory", "/backend", json!("cuda"), "memory"),
        ("immutable memory that is not sealed", "/parts/0/memory/immutable", json!(true), "memory"),
        ("arrays without their number", "/parts/0/arrays", json!({"inline": []}), "invalid"),
        ("long metadata in the record", "/metadata", json!({"inline": {"x": "x".repeat(4096)}}), "invalid"),
        ("table without its descriptor", "/metadata", json!({"length": 2}), "protocol"),
        ("mode with other bits", "/mode", json!(0o1000), "invalid"),
        ("65 versions to keep", "/keep", json!(65), "invalid"),
        ("token of 2 digits", "/request", json!("00"), "protocol"),
        ("unknown lifetime", "/lifetime", json!({"kind": "ever"}), "protocol"),
    ];
    cases.extend(puts.into_iter().map(|(name, path, value, code)| {
        violation(name, &greeted, record(32, &changed(&put, path, value).to_string(), 1), 1, code)
    }));
    let text = put.to_string();
    let get = |fields: &str| record(35, &format!(r#"{{"objects":[{fields}]}}"#), 0);
    cases.extend([
        violation("list before hello", &[], record(38, r#"{"prefix":""}"#, 0), 0, "protocol"),
        violation("second hello", &greeted, record(1, hello, 0), 0, "protocol"),
        violation("client without the capability", &[], record(1, HELLO, 0), 0, "object"),
        violation(
            "hello of version 0",
            &[],
            record(1, &hello.replace(r#""version":1"#, r#""version":0"#), 0),
            0,
            "version",
        ),
        violation("kind of a handoff", &greeted, record(2, REQUEST, 0), 0, "protocol"),
        violation("answer as a request", &greeted, record(45, "{}", 0), 0, "protocol"),
        violation("put without its descriptor", &greeted, record(32, &text, 1), 0, "protocol"),
        violation("put with a descriptor too many", &greeted, record(32, &text, 1), 2, "protocol"),
        violation("segments without a put", &greeted, record(4, r#"{"first":0,"sizes":[1]}"#, 1), 1, "protocol"),
        violation("received without a lease", &greeted, record(5, r#"{"segments":0}"#, 0), 0, "protocol"),
        violation("received of nothing", &leased, record(5, r#"{"segments":0}"#, 0), 0, "protocol"),
        violation("received of all segments", &leased, record(5, r#"{"segments":600}"#, 0), 0, "protocol"),
        violation("second request", &waiting, record(42, r#"{"prefix":""}"#, 0), 0, "protocol"),
        violation("get of nothing", &greeted, get(""), 0, "invalid"),
        violation("get of an absent object", &greeted, get(r#"{"name":"x"}"#), 0, "absent"),
        violation("range as an array", &greeted, get(r#"{"name":"x","parts":{"a":[[0,1]]}}"#), 0, "protocol"),
    ]);
    for case in &cases {
        let raw = Raw::dial(&served.path).unwrap();
        check(case, &raw, &memory.fds(), || match raw.receive().unwrap()?.0 {
            broker::Message::Error(failure) => Some(failure.code.to_string()),
            broker::Message::Refused(refusal) => Some(refusal.code.to_string()),
            other => Some(format!("kind {}", other.name())),
        });
    }
    assert_eq!(served.client().list("").unwrap().len(), 1);
}
