//! `vmmfd doctor serve` and `join` when the other side sends false data, disconnects, or has no driver.

use std::{os::unix::net::UnixStream, path::Path, thread, time::Duration};

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept, bind, connect, listen,
    socket_with,
};
use serde_json::{Value, json};

use crate::running::{Ended, Meeting, Run, Running, wait_for};

const TRIED: [&str; 5] = ["round-trip", "host-numa", "pool", "legacy", "event"];

fn meet(meeting: &Meeting, backend: &str, part: &str) -> Run {
    let mut run = meeting.bare("vmmfd");
    let options = ["--json", "--timeout", "5s"];
    run.command.args(["doctor", part, "--backend", backend, "--socket"]).arg(meeting.socket()).args(options);
    run
}

#[track_caller]
fn serving(meeting: &Meeting, run: Run) -> Running {
    let serve = run.start();
    wait_for("the socket", || meeting.socket().exists());
    serve
}

fn seqpacket() -> std::os::fd::OwnedFd {
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
}

fn dial(path: &Path) -> UnixStream {
    let socket = seqpacket();
    connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    socket.into()
}

fn say(socket: &UnixStream, record: &Value) -> bool {
    rustix::net::send(socket, record.to_string().as_bytes(), SendFlags::NOSIGNAL).is_ok()
}

fn hear(socket: &UnixStream) -> Value {
    let mut record = vec![0; 1 << 18];
    let (length, _) = rustix::net::recv(socket, &mut record[..], RecvFlags::empty()).unwrap();
    serde_json::from_slice(&record[..length]).unwrap_or_default()
}

/// Runs `join` against a serving side that sends these records after the hello.
fn join_a_liar(records: &[Value]) -> Ended {
    let meeting = Meeting::host();
    let socket = seqpacket();
    bind(&socket, &SocketAddrUnix::new(meeting.socket()).unwrap()).unwrap();
    listen(&socket, 1).unwrap();
    let join = meet(&meeting, "host", "join").start();
    let come = UnixStream::from(accept(&socket).unwrap());
    let mut hello = hear(&come);
    hello["driver"] = Value::Null;
    say(&come, &hello);
    for record in records {
        if !say(&come, record) {
            break;
        }
    }
    drop(come);
    join.end()
}

fn device(ordinal: i32) -> Value {
    let uuid = format!("00000000-0000-0000-0000-{ordinal:012}");
    json!({ "kind": "device", "ordinal": ordinal, "name": "a liar's", "uuid": uuid, "findings": [] })
}

fn found(device: i32, probe: &str) -> Value {
    let finding = json!({ "probe": probe, "status": "ok", "meaning": "It works." });
    json!({ "kind": "found", "device": device, "finding": finding })
}

fn bye() -> Value {
    json!({ "kind": "bye" })
}

#[track_caller]
fn failure<'a>(report: &'a Value, of: &str) -> &'a Value {
    let findings = report.pointer(of).unwrap().as_array().unwrap();
    let finding = findings.iter().find(|finding| finding["probe"] == "round-trip").unwrap();
    assert_eq!(finding["status"], "failed", "{report}");
    &finding["error"]
}

#[test]
fn what_is_absent_is_not_good() {
    let all: Vec<Value> = TRIED.iter().map(|probe| found(0, probe)).collect();
    let told = |end: &[Value]| [&[device(0)], &all[..], end].concat();
    join_a_liar(&told(&[bye()])).code(0);
    let cases = [
        (vec![bye()], "/machine"),
        (vec![], "/machine"),
        (vec![device(0), bye()], "/devices/0/findings"),
        (vec![device(0), found(0, "pool"), bye()], "/devices/0/findings"),
        (vec![device(0), device(1), found(0, "round-trip"), bye()], "/devices/1/findings"),
        (vec![device(0), found(0, "pool")], "/devices/0/findings"),
        (told(&[]), "/machine"),
    ];
    for (records, of) in cases {
        let ended = join_a_liar(&records);
        failure(&ended.code(1).json(), of);
    }
}

#[test]
fn oversized_message_ends_the_meeting() {
    let mut long = found(0, "pool");
    long["finding"]["meaning"] = "x".repeat(20_000).into();
    let cases = [
        vec![device(0), found(0, "round-trip"), found(0, "round-trip"), bye()],
        vec![device(0), found(0, "round-trip"), found(0, "driver"), bye()],
        vec![device(0), found(1, "round-trip"), bye()],
        vec![device(0), device(0), found(0, "round-trip"), bye()],
        vec![device(0), found(0, "round-trip"), device(1), bye()],
        vec![device(0), found(0, "round-trip"), long, bye()],
        (0..65).map(device).chain([bye()]).collect(),
    ];
    for records in cases {
        let ended = join_a_liar(&records);
        let report = ended.code(1).json();
        assert!(report["devices"].as_array().unwrap().len() <= 64);
        assert_ne!(report["verdict"], "", "{report}");
    }
}

#[test]
fn hangup_leaves_a_complete_report() {
    let meeting = Meeting::fake();
    let serve = serving(&meeting, meet(&meeting, "cuda", "serve").env("FAKECUDA_DEVICES", "2"));
    let come = dial(&meeting.socket());
    let mut hello = hear(&come);
    hello["driver"] = Value::Null;
    say(&come, &hello);
    assert_eq!([hear(&come)["ordinal"].clone(), hear(&come)["ordinal"].clone()], [0, 1]);
    drop(come);
    let ended = serve.end();
    let report = ended.code(1).json();
    for device in ["/devices/0/findings", "/devices/1/findings"] {
        let findings = report.pointer(device).unwrap().as_array().unwrap();
        assert_eq!(findings.len(), TRIED.len(), "{report}");
        failure(&report, device);
    }
}

#[test]
fn both_ends_name_the_missing_driver() {
    for broken in ["serve", "join"] {
        let meeting = Meeting::fake();
        let run = |part: &str| {
            let run = meet(&meeting, "cuda", part);
            if part == broken { run.env("CUDA_VISIBLE_DEVICES", "") } else { run }
        };
        let serve = serving(&meeting, run("serve"));
        let (join, serve) = (run("join").end(), serve.end());
        let (good, bad) = if broken == "serve" { (join, serve) } else { (serve, join) };
        let report = good.code(1).json();
        let error = failure(&report, "/devices/0/findings");
        assert!(error["message"].as_str().unwrap().starts_with("the peer: its driver"), "{error}");
        assert!(report["peer"].is_object());
        let report = bad.code(3).json();
        assert!(report["verdict"].as_str().unwrap().starts_with("There is nothing here to test"), "{report}");
        assert!(report["peer"].is_object());
    }
}

#[test]
fn strangers_do_not_block_the_peer() {
    let meeting = Meeting::host();
    let serve = serving(&meeting, meet(&meeting, "host", "serve"));
    drop(dial(&meeting.socket()));
    let silent = dial(&meeting.socket());
    thread::sleep(Duration::from_millis(100));
    meet(&meeting, "host", "join").end().code(0);
    serve.end().code(0);
    drop(silent);
}

#[test]
fn one_sided_device_is_reported() {
    let meeting = Meeting::fake();
    let serve = serving(&meeting, meet(&meeting, "cuda", "serve").env("FAKECUDA_DEVICES", "2"));
    let join = meet(&meeting, "cuda", "join").env("FAKECUDA_DEVICES", "1").end();
    let serve = serve.end();
    let (serve, join) = (serve.json(), join.json());
    assert_eq!(serve["devices"], join["devices"]);
    let finding = &serve["devices"][1]["findings"][0];
    assert_eq!(serve["devices"][0]["findings"][0]["figures"]["back"], "verified");
    // Data was read through the other device.
    assert_eq!(finding["status"], "ok", "{finding}");
    assert!(finding["meaning"].as_str().unwrap().starts_with("one direction only: "), "{finding}");
    assert_eq!(finding["figures"]["through"], serve["devices"][0]["uuid"]);
}

#[test]
fn missing_end_is_reported() {
    for (part, other) in [("serve", "doctor join"), ("join", "doctor serve")] {
        let meeting = Meeting::host();
        let mut run = meet(&meeting, "host", part);
        run.command.args(["--wait", "100ms"]);
        let ended = run.end();
        ended.code(4).says(other);
        assert!(!ended.stderr.contains("producer") && !ended.stderr.contains("consumer"), "{}", ended.stderr);
    }
}
