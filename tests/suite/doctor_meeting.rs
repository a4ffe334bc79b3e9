//! `vmmfd doctor serve` and `join`: both sides report the same, also when the other sends false data, disconnects, or has no driver.

use rustix::net::{RecvFlags, SendFlags, accept};

use crate::{
    conversation::{listening, raw},
    doctor::{finding, probes},
    support::prelude::*,
};

cases! {
    on crate::running::Meeting; every backend: [
    both_ends_report_the_same,
    ]
}

const TRIED: [&str; 5] = ["round-trip", "host-numa", "pool", "legacy", "event"];

fn meet(meeting: &Meeting, part: &str, options: &[&str]) -> Run {
    let mut run = meeting.bare("vmmfd");
    run.command.args(["doctor", part, "--json", "--backend", meeting.backend(), "--socket"]).arg(meeting.socket());
    let timeout: &[&str] = if options.contains(&"--timeout") { &[] } else { &["--timeout", "5s"] };
    run.command.args(timeout).args(options);
    run
}

#[track_caller]
fn serving(meeting: &Meeting, run: Run) -> Running {
    let serve = run.start();
    wait_for("the socket", || meeting.socket().exists());
    serve
}

#[track_caller]
fn assert_met(serve: &Ended, join: &Ended) {
    let (serve, join) = (serve.code(0).json(), join.code(0).json());
    for report in [&serve, &join] {
        assert_eq!(probes(&report["devices"][0]["findings"]), TRIED);
        assert!(report["peer"].is_object() && report["environment"].is_object());
    }
    assert_eq!((&serve["devices"], &serve["verdict"]), (&join["devices"], &join["verdict"]));
    assert_eq!(finding(&serve, "round-trip")["figures"]["back"], "verified", "{serve}");
}

fn both_ends_report_the_same(meeting: Meeting) {
    let serve = serving(&meeting, meet(&meeting, "serve", &[]));
    let join = meet(&meeting, "join", &[]).end();
    assert_met(&serve.end(), &join);
    assert!(meeting.files().is_empty(), "{:?}", meeting.files());
}

fn say(socket: &UnixStream, record: &Value) -> bool {
    rustix::net::send(socket, record.to_string().as_bytes(), SendFlags::NOSIGNAL).is_ok()
}

/// Answers a doctor's hello with its own, without a finding of the driver.
fn greet(socket: &UnixStream) {
    let mut record = vec![0; 1 << 18];
    let (length, _) = rustix::net::recv(socket, &mut record[..], RecvFlags::empty()).unwrap();
    let mut hello: Value = serde_json::from_slice(&record[..length]).unwrap();
    hello["driver"] = Value::Null;
    say(socket, &hello);
}

#[test]
fn false_reports_are_failures() {
    let device = |ordinal: i32, probes: &[&str]| {
        let uuid = format!("HOST-00000000-0000-0000-0000-{ordinal:012}");
        let finding = |probe: &&str| json!({ "probe": probe, "status": "ok", "meaning": "It works." });
        let findings: Vec<Value> = probes.iter().map(finding).collect();
        json!({ "kind": "device", "ordinal": ordinal, "name": "a liar's", "uuid": uuid, "findings": findings })
    };
    let (whole, bye) = (device(0, &TRIED), json!({ "kind": "bye" }));
    // The parts of the report that name the failure.
    for (records, code, failed) in [
        (vec![whole.clone(), bye.clone()], 0, None),
        (vec![whole.clone()], 1, Some("machine")),
        (vec![whole.clone(), whole.clone(), bye.clone()], 1, Some("machine")),
        (vec![whole.clone(), json!({ "kind": "new" }), bye.clone()], 1, Some("machine")),
        (vec![device(0, &["event"]), bye], 1, Some("devices")),
    ] {
        let meeting = Meeting::host();
        let socket = listening(&meeting.socket(), 1);
        let join = meet(&meeting, "join", &[]).start();
        let come = UnixStream::from(accept(&socket).unwrap());
        greet(&come);
        records.iter().take_while(|record| say(&come, record)).for_each(drop);
        drop(come);
        let report = join.end().code(code).json();
        if let Some(part) = failed {
            assert_eq!(finding(&json!({ part: report[part] }), "round-trip")["status"], "failed", "{report}");
        }
    }
}

/// Ends the joining side at its first call of a function. Returns its exit code, and the other side's report.
fn without_peer(meeting: &Meeting, call: &str, signal: Signal) -> (Option<i32>, Value) {
    let serve = serving(meeting, meet(meeting, "serve", &[]));
    let log = meeting.folder().join("log");
    let slow = meet(meeting, "join", &[]).env("FAKECUDA_SLOW", format!("{call}:{HANGS}"));
    let slow = slow.env("FAKECUDA_LOG", &log).start();
    wait_for("the call", || fs::read_to_string(&log).unwrap_or_default().contains(call));
    slow.signal(signal);
    (slow.end().status.code(), serve.end().code(1).json())
}

/// The probes of a device, with their status.
fn statuses(device: &Value) -> Vec<(&str, &str)> {
    let statuses = device["findings"].as_array().unwrap().iter().map(|finding| finding["status"].as_str().unwrap());
    probes(&device["findings"]).into_iter().zip(statuses).collect()
}

#[test]
fn lost_peer_leaves_a_complete_report() {
    let meeting = Meeting::fake();
    let serve = serving(&meeting, meet(&meeting, "serve", &[]).env("FAKECUDA_DEVICES", "2"));
    greet(&raw(&meeting.socket()));
    let report = serve.end().code(1).json();
    for device in [0, 1] {
        assert_eq!(statuses(&report["devices"][device]), TRIED.map(|probe| (probe, "failed")), "{report}");
    }
    // The other doctor hangs in its driver, and is interrupted or killed.
    let (code, report) = without_peer(&meeting, "cuMemImportFromShareableHandle", Signal::SIGINT);
    assert_eq!(code, Some(130));
    assert_eq!(statuses(&report["devices"][0]), TRIED.map(|probe| (probe, "failed")), "{report}");
    let (_, report) = without_peer(&Meeting::fake(), "cuIpcOpenMemHandle_v2", Signal::SIGKILL);
    assert_eq!(probes(&report["machine"]), ["driver", "legacy"], "{report}");
    let works = |probe: &str| if ["legacy", "event"].contains(&probe) { "failed" } else { "ok" };
    assert_eq!(statuses(&report["devices"][0]), TRIED.map(|probe| (probe, works(probe))), "{report}");
    let verdict = report["verdict"].as_str().unwrap();
    assert!(verdict.contains("; legacy was cut short: the peer disconnected"), "{verdict}");
    assert!(!verdict.contains("round-trip"), "{verdict}");
}

#[test]
fn both_ends_name_the_missing_driver() {
    for broken in ["serve", "join"] {
        let meeting = Meeting::fake();
        let run = |part: &str| {
            let run = meet(&meeting, part, &[]);
            if part == broken { run.env("CUDA_VISIBLE_DEVICES", "") } else { run }
        };
        let serve = serving(&meeting, run("serve"));
        let (join, serve) = (run("join").end(), serve.end());
        let (good, bad) = if broken == "serve" { (join, serve) } else { (serve, join) };
        let report = good.code(1).json();
        let error = &finding(&report, "round-trip")["error"];
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
    let serve = serving(&meeting, meet(&meeting, "serve", &[]));
    drop(raw(&meeting.socket()));
    let silent = raw(&meeting.socket());
    thread::sleep(Duration::from_millis(100));
    meet(&meeting, "join", &[]).end().code(0);
    serve.end().code(0);
    drop(silent);
}

#[test]
fn one_sided_device_is_reported() {
    let meeting = Meeting::fake();
    let serve = serving(&meeting, meet(&meeting, "serve", &[]).env("FAKECUDA_DEVICES", "2"));
    let join = meet(&meeting, "join", &[]).env("FAKECUDA_DEVICES", "1").end().json();
    let serve = serve.end().json();
    assert_eq!(serve["devices"], join["devices"]);
    assert_eq!(finding(&serve, "round-trip")["figures"]["back"], "verified");
    // Data was read through the other device.
    let found = &serve["devices"][1]["findings"][0];
    assert_eq!(
        (&found["status"], &found["figures"]["through"]),
        (&"ok".into(), &serve["devices"][0]["uuid"]),
        "{found}"
    );
    assert!(found["meaning"].as_str().unwrap().starts_with("one direction only: "), "{found}");
}

#[test]
fn missing_end_is_reported() {
    for (part, other) in [("serve", "doctor join"), ("join", "doctor serve")] {
        let ended = meet(&Meeting::host(), part, &["--wait", "100ms"]).end();
        let message = ended.code(4).json().to_string();
        assert!(message.contains(other) && !message.contains("producer") && !message.contains("consumer"), "{message}");
    }
}

mod namespaces {
    use super::*;

    #[test]
    #[ignore = "needs the right to make namespaces: make test-all runs it where there is"]
    fn ends_in_different_namespaces_meet() {
        for kinds in [&["--pid", "--fork", "--mount-proc"][..], &["--ipc", "--uts", "--net"]] {
            let meeting = Meeting::host();
            let serve = serving(&meeting, meet(&meeting, "serve", &["--allow-uid", "65534"]));
            let inner = meet(&meeting, "join", &["--allow-uid", "65534"]);
            let mut command = Command::new("unshare");
            command.args(["--user", "--map-root-user"]).args(kinds);
            command.arg(inner.command.get_program()).args(inner.command.get_args());
            let join = inner.instead(command).end();
            assert_met(&serve.end(), &join);
        }
    }
}

mod root {
    use super::*;

    #[test]
    #[ignore = "needs root: make test-all runs it as root"]
    fn different_users_meet_if_both_allow() {
        assert!(nix::unistd::geteuid().is_root(), "this test changes users: run it as root");
        let mut meeting = Meeting::host();
        fs::set_permissions(meeting.folder(), PermissionsExt::from_mode(0o777)).unwrap();
        meeting.copy_binaries();
        let join = || {
            let mut run = meet(&meeting, "join", &[]);
            run.command.uid(12345).gid(12345);
            run.end()
        };
        let serve = serving(&meeting, meet(&meeting, "serve", &["--allow-uid", "12345"]));
        // The socket of the other user admits only that user and root.
        let joined = join();
        assert_met(&serve.end(), &joined);
        let serve = serving(&meeting, meet(&meeting, "serve", &["--allow-uid", "54321", "--wait", "3s"]));
        assert!(join().code(4).json().to_string().contains("12345"));
        serve.end().code(4);
    }
}
