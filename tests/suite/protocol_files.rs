//! The files of the protocol documentation match the program: the schema of each message, and the golden records.

use std::{
    collections::BTreeSet,
    fs,
    io::{IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};

use rustix::{
    event::{PollFd, PollFlags, poll},
    net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
        Shutdown, SocketAddrUnix, SocketFlags, accept_with, connect, recvmsg, sendmsg, shutdown,
    },
};
use serde_json::{Value, json};
use vmmfd::{
    channel::Channel,
    driver::{Backend, Choice, open},
    internals::HostDriver,
    memory::{Device, Selector, Shared, Spec},
    session::{
        Config,
        stream::{Publisher, Subscriber},
    },
    wire::{ErrorCode, HEADER_LENGTH, MAX_FDS, Message},
};
use vmmfd_cli::check::{figures::Claim, files::Source, pattern::Pattern};

use crate::{
    conversation::{listening, seqpacket},
    running::Meeting,
    support::schema::mismatch,
};

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

/// The files are compiled in: the tests also run without the repository.
macro_rules! schemas {
    ($($name:literal)*) => {
        [$(($name, include_str!(concat!("../../docs/schemas/protocol/", $name, ".json"))),)*]
    };
}

const SCHEMAS: [(&str, &str); 16] = schemas!["hello" "request" "offer" "segments" "received" "result" "busy" "error" "pool"
    "subscribe" "ready" "done" "withdraw" "gone" "check-of-offer" "check-of-result"];

const PAGE: &str = include_str!("../../docs/protocol.md");

fn schema(name: &str) -> Value {
    let (_, text) = SCHEMAS.iter().find(|(known, _)| *known == name).unwrap();
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{name}: {error}"))
}

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

#[track_caller]
fn fits(kind: &str, body: &Value) {
    let schema = schema(kind);
    if let Some(what) = mismatch(&schema, body) {
        panic!("{kind} does not fit its schema: {what}");
    }
}

/// Validates a sent record against the schema of its kind. Returns the kind.
#[track_caller]
fn record_fits(record: &[u8]) -> &'static str {
    let kind = KINDS[usize::from(u16::from_le_bytes([record[6], record[7]])) - 1];
    let body: Value = serde_json::from_slice(&record[HEADER_LENGTH..]).unwrap();
    fits(kind, &body);
    if let Some(check @ Value::Object(_)) = body.get("check") {
        fits(if kind == "offer" { "check-of-offer" } else { "check-of-result" }, check);
    }
    kind
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
        seen.insert(record_fits(&bytes));
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
fn schemas_refuse_what_the_program_refuses() {
    for (kind, body) in [
        ("hello", json!({"version": 1, "backend": "host", "pid": 1, "timeout_ms": 1})),
        ("hello", json!({"version": 1, "capabilities": [], "backend": "host", "pid": 1, "timeout_ms": 0})),
        ("hello", json!({"version": 0, "capabilities": [], "backend": "host", "pid": 1, "timeout_ms": 1})),
        ("hello", json!({"version": 1, "capabilities": vec![""; 65], "backend": "host", "pid": 1, "timeout_ms": 1})),
        ("request", json!({"object": "x".repeat(256)})),
        ("request", json!({"object": "default", "range": [0, 4]})),
        ("request", json!({"object": "default", "access": "wo"})),
        ("segments", json!({"first": 0, "sizes": []})),
        ("segments", json!({"first": 0, "sizes": vec![1; 254]})),
        ("received", json!({"segments": -1})),
        ("result", json!({"verified": 1})),
        ("result", json!({"verified": true, "check": 7})),
        ("error", json!({"code": "no code", "message": ""})),
        ("pool", json!({"pool": "7"})),
        ("subscribe", json!({"keep": 0})),
        ("ready", json!({"buffer": 0, "generation": 1, "sizes": vec![1; 254]})),
        ("done", json!({"buffer": 0})),
        ("check-of-offer", json!({"reply_salt": 1})),
        ("check-of-offer", json!({"salt": 1, "digest": "blake3:00"})),
        ("check-of-result", json!({"words": 1, "mismatches": 1, "first_mismatch": [0, 1, 2]})),
    ] {
        let schema = schema(kind);
        assert!(mismatch(&schema, &body).is_some(), "{kind}: {body}");
    }
    let golden = golden();
    let offers: Vec<&Value> = list(&golden, "records").iter().filter(|record| record["kind"] == "offer").collect();
    let mechanism = |record: &Value, name: &str| record["body"]["memory"]["mechanism"] == name;
    for (mechanism_is, path, value) in [
        ("vmm", "/memory/offset", json!(1)),
        ("vmm", "/memory/segments", json!(0)),
        ("vmm", "/memory/size", json!(0)),
        ("vmm", "/memory/mapped_size", json!(1u64 << 47)),
        ("vmm", "/memory/mechanism", json!("fabric")),
        ("vmm", "/memory/device/uuid", json!("GPU-00112233-4455-6677-8899-aabbccddeeff")),
        ("vmm", "/memory/location", json!("moon")),
        ("vmm", "/access", json!("wo")),
        ("vmm", "/part", json!([0, 1, 0, 2097152])),
        ("pool", "/memory/pool", json!(null)),
        ("pool", "/memory/segments", json!(1)),
        ("legacy", "/memory/pointer", json!("00")),
        ("legacy", "/memory/location", json!("host")),
        ("legacy", "/array/dtype", json!("bf16")),
        ("legacy", "/array/shape", json!(vec![1; 65])),
    ] {
        let mut body = offers.iter().find(|record| mechanism(record, mechanism_is)).unwrap()["body"].clone();
        *body.pointer_mut(path).unwrap() = value;
        let schema = schema("offer");
        assert!(mismatch(&schema, &body).is_some(), "{path}: {body}");
    }
}

/// Receives a record with its descriptors; `None` once the peer has closed the socket.
fn receive(socket: &OwnedFd) -> Option<(Vec<u8>, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let (mut ancillary, mut record) = (RecvAncillaryBuffer::new(&mut space), vec![0; 1 << 17]);
    let received =
        recvmsg(socket, &mut [IoSliceMut::new(&mut record)], &mut ancillary, RecvFlags::CMSG_CLOEXEC).ok()?;
    let fds = ancillary.drain().flat_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => fds.collect::<Vec<_>>(),
        _ => Vec::new(),
    });
    let fds = fds.collect();
    record.truncate(received.bytes);
    (received.bytes > 0).then_some((record, fds))
}

/// Forwards records between two sockets until both are closed. `pass` receives each record, and whether it comes from `other`.
pub(crate) fn relay(
    one: &OwnedFd,
    other: &OwnedFd,
    pass: impl Fn(bool, Vec<u8>, Vec<OwnedFd>) -> Option<(Vec<u8>, Vec<OwnedFd>)>,
) {
    let mut open = [true, true];
    while open.contains(&true) {
        let mut polled = [one, other].map(|socket| PollFd::new(socket, PollFlags::IN));
        let timeout = Duration::from_secs(60).try_into().unwrap();
        assert!(poll(&mut polled, Some(&timeout)).unwrap() > 0, "nothing was said for a minute");
        let ready = polled.map(|polled| !polled.revents().is_empty());
        for (index, (from, to)) in [(one, other), (other, one)].into_iter().enumerate() {
            if !(ready[index] && open[index]) {
                continue;
            }
            let Some((record, fds)) = receive(from) else {
                open[index] = false;
                let _ = shutdown(to, Shutdown::Write);
                continue;
            };
            let Some((record, fds)) = pass(index == 1, record, fds) else { continue };
            let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            assert!(fds.is_empty() || ancillary.push(SendAncillaryMessage::ScmRights(&fds)));
            // Fails if the peer has closed its socket.
            let _ = sendmsg(to, &[IoSlice::new(&record)], &mut ancillary, SendFlags::NOSIGNAL);
        }
    }
}

#[test]
fn messages_match_the_schemas() {
    let seen = Mutex::new(Vec::new());
    let keep = |_, record: Vec<u8>, fds| {
        seen.lock().unwrap().push(record.clone());
        Some((record, fds))
    };
    // The commands: in chunks, in a round trip, with a digest, refused, and with a mismatch.
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("data");
    fs::write(&file, vec![7; 5000]).unwrap();
    for (produce, consume, code) in [
        (&["--size", "9MiB", "--chunk", "2MiB"][..], &["--range", "3MiB:1MiB"][..], 0),
        (&["--dtype", ">f4", "--shape", "3x5", "--order", "F", "--round-trip"], &[], 0),
        (&["--from", file.to_str().unwrap(), "--seal"], &[], 0),
        (&["--size", "4", "--seal"], &["--access", "rw"], 4),
        (&["--size", "64KiB", "--corrupt"], &[], 1),
    ] {
        let meeting = Meeting::host();
        let producer = meeting.listening(produce);
        let between = meeting.folder().join("between");
        let listener = listening(&between, 1);
        let path = between.to_str().unwrap();
        let consumer = meeting.bare_consumer(&[&["--socket", path, "--backend", "host"], consume].concat()).start();
        let theirs = accept_with(&listener, SocketFlags::CLOEXEC).unwrap();
        let ours = seqpacket();
        connect(&ours, &SocketAddrUnix::new(meeting.socket()).unwrap()).unwrap();
        relay(&theirs, &ours, keep);
        drop((theirs, ours));
        consumer.end().code(code);
        producer.end().code(code);
    }
    // A stream with more buffers than the consumer keeps.
    let ((publishing, left), (right, subscribing)) = (Channel::socket_pair().unwrap(), Channel::socket_pair().unwrap());
    let driver = open(Choice::Only(Backend::Host)).unwrap().driver;
    thread::scope(|scope| {
        scope.spawn(|| relay(&left, &right, keep));
        scope.spawn(|| {
            let mut subscriber = Subscriber::over(subscribing, &driver, None, 1, &Config::default()).unwrap();
            while let Ok(received) = subscriber.receive() {
                subscriber.give_back(received).unwrap();
            }
        });
        let device = Device::find(&driver, Selector::default()).unwrap();
        let mut publisher = Publisher::over(publishing, &driver, &Config::default()).unwrap();
        let mut ids = Vec::new();
        for _ in 0..2 {
            let memory = Arc::new(Shared::create(&device, Spec::vmm(100)).unwrap());
            ids.push(publisher.add(&memory, None, vmmfd::driver::Access::ReadOnly).unwrap());
        }
        for id in [ids[0], ids[0], ids[1]] {
            publisher.publish(id).unwrap();
            publisher.take_back().unwrap();
        }
        publisher.withdraw(ids[1]).unwrap();
    });
    let kinds: BTreeSet<&str> = seen.into_inner().unwrap().iter().map(|record| record_fits(record)).collect();
    // Whether `busy` is sent depends on the speed of this machine, and pools need a GPU.
    let expected: BTreeSet<&str> = KINDS.into_iter().filter(|kind| !["busy", "pool"].contains(kind)).collect();
    assert!(kinds.is_superset(&expected), "{kinds:?}");
}
