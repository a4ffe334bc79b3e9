//! The report of `vmmfd doctor` on the broker at a user's default socket.

use std::{
    fs,
    os::{
        fd::AsFd,
        unix::{
            fs::{PermissionsExt, symlink},
            net::UnixListener,
        },
    },
    path::PathBuf,
    sync::mpsc,
    thread,
    time::Duration,
};

use nix::{libc, poll};
use serde_json::Value;
use vmmfd::{
    channel::{Cancel, Channel, Listener, Trust, connect},
    error::ErrorCode,
    session::Config,
    wire::{self, Failure, Hello, Message},
};

use crate::{
    doctor::{doctor, finding},
    running::{Meeting, wait_for},
    seccomp,
};

/// A user's runtime folder.
struct Runtime(Meeting);

impl Runtime {
    fn new() -> Self {
        let meeting = Meeting::host();
        let folder = meeting.folder().join("vmmfd");
        fs::create_dir(&folder).unwrap();
        fs::set_permissions(&folder, PermissionsExt::from_mode(0o700)).unwrap();
        Self(meeting)
    }

    fn folder(&self) -> PathBuf {
        self.0.folder().join("vmmfd")
    }

    fn socket(&self) -> PathBuf {
        self.folder().join("broker.sock")
    }

    /// The finding of the broker probe alone.
    fn finding(&self) -> Value {
        let report = doctor(&self.0, &["--json", "--only", "broker"]).end().json();
        let finding = finding(&report, "broker");
        // A probe named in `--only` is required.
        assert_eq!(report["exit_code"], if finding["status"] == "ok" { 0 } else { 1 }, "{report}");
        finding
    }

    fn listen(&self) -> Listener {
        Listener::bind(&self.socket(), &Config::default().timeout(Duration::from_secs(5))).unwrap()
    }

    /// The finding while a process listens and passes each connection to `answer`.
    fn finding_with(&self, answer: impl Fn(Channel) + Send + 'static) -> Value {
        let listener = self.listen();
        let (ended, end) = mpsc::channel::<()>();
        let serving = thread::spawn(move || {
            while end.try_recv() == Err(mpsc::TryRecvError::Empty) {
                let mut waiting = [poll::PollFd::new(listener.as_fd(), poll::PollFlags::POLLIN)];
                poll::poll(&mut waiting, 10u16).unwrap();
                let Ok(socket) = rustix::net::accept(listener.as_fd()) else { continue };
                answer(Channel::new(socket, Duration::from_secs(60), &Cancel::new().unwrap()).unwrap());
            }
        });
        // On a busy machine, that process may answer too late for the doctor.
        let findings = std::iter::repeat_with(|| self.finding()).take(20);
        let finding = findings.into_iter().find(|finding| finding["figures"]["problem"] != "silent").unwrap();
        drop(ended);
        serving.join().unwrap();
        finding
    }
}

/// Answers the doctor's hello.
fn send(mut channel: Channel, message: &Message) {
    assert!(matches!(channel.receive("for the doctor's hello").unwrap().0, Message::Hello(_)));
    channel.send(message, &[]).unwrap();
    channel.finish(Duration::from_secs(5));
}

#[track_caller]
fn assert_broken(finding: &Value, problem: &str, rule: &str, words: &str) {
    let seen = (&finding["status"], &finding["figures"]["problem"], &finding["rule"]);
    assert_eq!(seen, (&"failed".into(), &problem.into(), &rule.into()), "{finding}");
    assert!(finding["meaning"].as_str().unwrap().contains(words), "{finding}");
    assert!(!finding["remedy"].as_str().unwrap().is_empty());
}

#[test]
fn missing_broker_is_no_failure() {
    let meeting = Meeting::host();
    let report = doctor(&meeting, &["--json"]).end().code(0).json();
    let finding = finding(&report, "broker");
    assert_eq!((&finding["status"], &finding["error"]), (&"skipped".into(), &Value::Null), "{finding}");
    assert!(finding["meaning"].as_str().unwrap().contains("/vmmfd/broker.sock"), "{finding}");
    assert!(meeting.files().is_empty(), "{:?}", meeting.files());
    // Also if another program's file is already in the folder.
    let runtime = Runtime::new();
    fs::write(runtime.folder().join("vmmfd.sock"), "").unwrap();
    assert_eq!(runtime.finding()["status"], "skipped");
}

#[test]
fn broker_that_answers_is_named() {
    let runtime = Runtime::new();
    let mut serve = runtime.0.bare("vmmfd").env("XDG_RUNTIME_DIR", runtime.0.folder());
    serve.command.arg("serve");
    let _serve = serve.start();
    wait_for("the broker", || runtime.socket().exists());
    let finding = runtime.finding();
    assert_eq!((&finding["status"], &finding["rule"]), (&"ok".into(), &Value::Null), "{finding}");
    assert!(finding["meaning"].as_str().unwrap().starts_with("A broker answers, with pid "), "{finding}");
    assert!(finding["figures"]["answer_us"].as_u64().unwrap() > 0);
}

#[test]
fn unusable_sockets_are_failures() {
    let runtime = Runtime::new();
    drop(UnixListener::bind(runtime.socket()).unwrap());
    assert_broken(&runtime.finding(), "stale", "broker-stale", "No process listens on ");
    let report = doctor(&runtime.0, &["--json", "--device", "0"]).end().code(0).json();
    assert_eq!(finding(&report, "broker")["status"], "failed");
    assert!(runtime.socket().exists(), "it is not the doctor's to remove");
    fs::remove_file(runtime.socket()).unwrap();
    let listener = runtime.listen();
    assert_broken(&runtime.finding(), "silent", "broker-silent", "does not answer within 2s");
    // A full backlog.
    let connect = || connect(&runtime.socket(), Duration::ZERO, &Trust::default(), &Cancel::new().unwrap());
    let connections: Vec<_> = std::iter::from_fn(|| connect().ok()).collect();
    assert_broken(&runtime.finding(), "silent", "broker-silent", "accepts no connection within 2s");
    drop(connections);
    // A folder that others may write in, and a link to a folder.
    fs::set_permissions(runtime.folder(), PermissionsExt::from_mode(0o777)).unwrap();
    assert_broken(&runtime.finding(), "folder", "broker-folder", "others may write in it");
    fs::set_permissions(runtime.folder(), PermissionsExt::from_mode(0o700)).unwrap();
    let linked = Meeting::host();
    symlink(runtime.folder(), linked.folder().join("vmmfd")).unwrap();
    let report = doctor(&linked, &["--json", "--only", "broker"]).end().json();
    assert_broken(&finding(&report, "broker"), "folder", "broker-folder", "symbolic link");
    let denied = [seccomp::rule(libc::SYS_connect, &[], libc::EACCES), vec![seccomp::ALLOW]].concat();
    seccomp::under(denied, move || {
        assert_broken(&runtime.finding(), "denied", "broker-denied", "may not connect");
        drop(listener);
    });
}

#[test]
fn other_listener_is_no_broker() {
    let other = |finding: &Value, words: &str| assert_broken(finding, "other-program", "broker-other-program", words);
    let runtime = Runtime::new();
    let answers = "does not answer as a broker does";
    // A producer.
    let hello = Hello {
        version: wire::VERSION,
        capabilities: vec!["stream".to_owned()],
        backend: "none".to_owned(),
        pid: 7,
        timeout_ms: 30_000,
    };
    other(&runtime.finding_with(move |channel| send(channel, &Message::Hello(hello.clone()))), answers);
    // A process that closes the connection.
    other(&runtime.finding_with(drop), answers);
    // A process that sends an unexpected message.
    let gone = Message::Gone(wire::BufferNumber { buffer: 1 });
    other(&runtime.finding_with(move |channel| send(channel, &gone)), answers);
    let stream = UnixListener::bind(runtime.socket()).unwrap();
    other(&runtime.finding(), "another type of socket");
    drop(stream);
    fs::remove_file(runtime.socket()).unwrap();
    fs::write(runtime.socket(), "").unwrap();
    other(&runtime.finding(), "is not a socket");
    // A broker's answer is quoted.
    let message = "3 connections are the most of uid 0";
    let refusal = Message::Error(Failure { code: ErrorCode::Refused, message: message.to_owned() });
    let finding = Runtime::new().finding_with(move |channel| send(channel, &refusal));
    assert_broken(&finding, "refused", "broker-refused", message);
}
