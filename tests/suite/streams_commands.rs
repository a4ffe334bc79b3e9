//! `vmmfd pub` and `vmmfd sub` as a user runs them: processes, their output and their exit codes.

use crate::support::prelude::*;

cases! {
    on crate::running::Meeting;
    every backend: [
    count_ends_a_subscriber,
    signals_end_both_in_order,
    flipped_byte_is_a_torn_buffer,
    stalled_subscribers_delay_nobody,
    topics_outlive_their_publishers,
    ]
}

fn vmmfd(meeting: &Meeting, command: &str, options: &[&str]) -> Run {
    let mut run = meeting.bare("vmmfd");
    run.command.args([command, "--json", "--backend", meeting.backend(), "--at"]).arg(meeting.socket()).args(options);
    if !options.contains(&"--timeout") {
        run.command.args(["--timeout", "10m"]);
    }
    run
}

/// A publisher of small buffers that listens.
fn publisher(meeting: &Meeting, options: &[&str]) -> Running {
    let running = vmmfd(meeting, "pub", &[&["--size", "70001"], options].concat()).start();
    wait_for("the publisher", || running.so_far().contains("  publishing  "));
    running
}

/// A subscriber that has joined.
fn subscriber(meeting: &Meeting, options: &[&str]) -> Running {
    let running = vmmfd(meeting, "sub", options).start();
    wait_for("the subscriber", || running.so_far().contains("  subscribed  "));
    running
}

/// The report of a publisher on its only subscriber.
fn only(report: &Value) -> &Value {
    let [line] = &report["subscribers"].as_array().unwrap()[..] else { panic!("{report}") };
    line
}

fn counts(report: &Value) -> [&Value; 3] {
    ["delivered", "skipped", "torn"].map(|name| &report[name])
}

#[track_caller]
fn failed(ended: &Ended, code: i32, kind: &str, words: &str) -> Value {
    let report = ended.code(code).json();
    assert_eq!(report["error"]["kind"], kind, "{report}");
    let message = report["error"]["message"].as_str().unwrap();
    assert!(message.contains(words) && !message.contains('\n'), "{message}");
    ended.says(&format!("error: {message}"));
    report
}

fn count_ends_a_subscriber(meeting: Meeting) {
    let publishing = publisher(&meeting, &[]);
    for (count, options) in [("1", &["--work", "300ms"][..]), ("5", &["--policy", "queue:9"])] {
        let ended = vmmfd(&meeting, "sub", &[&["--count", count], options].concat()).end();
        let report = ended.code(0).json();
        assert_eq!((report["delivered"].to_string(), &report["torn"]), (count.to_owned(), &json!(0)));
        assert!(ended.took >= Duration::from_millis(300) || options[0] != "--work", "{:?}", ended.took);
    }
    publishing.signal(Signal::SIGTERM);
    let report = publishing.end().code(0).json();
    let lines = report["subscribers"].as_array().unwrap();
    assert!(lines.iter().all(|line| line["state"] == "left"), "{report}");
    assert_eq!((lines.len(), &lines[1]["policy"]), (2, &json!("queue:9")));
}

fn signals_end_both_in_order(meeting: Meeting) {
    let publishing = publisher(&meeting, &["--count", "1000000"]);
    let stopped = subscriber(&meeting, &["--work", "1h"]);
    let counting = subscriber(&meeting, &["--count", "1000000"]);
    let lasting = subscriber(&meeting, &[]);
    for (sub, code) in [(stopped, 0), (counting, 143)] {
        sub.signal(Signal::SIGTERM);
        let report = sub.end().code(code).json();
        assert_eq!((&report["torn"], report["error"].is_null()), (&json!(0), code == 0), "{report}");
    }
    publishing.signal(Signal::SIGINT);
    // For this subscriber it is an end and no crash.
    lasting.end().code(0).json();
    let report = failed(&publishing.end(), 130, "interrupted", "SIGINT");
    assert_eq!(report["subscribers"].as_array().unwrap().len(), 3);
    assert!(meeting.files().is_empty(), "{:?}", meeting.files());
}

fn flipped_byte_is_a_torn_buffer(meeting: Meeting) {
    let publishing = publisher(&meeting, &["--corrupt"]);
    let sub = vmmfd(&meeting, "sub", &["--count", "2"]).end();
    let report = failed(&sub, 1, "mismatch", "2 of 2 buffers are torn: buffer ");
    assert_eq!((&report["torn"], &report["delivered"]), (&json!(2), &json!(2)));
    publishing.signal(Signal::SIGTERM);
    assert!(only(&publishing.end().code(0).json())["delivered"].as_u64() >= Some(2));
}

#[test]
fn refusals_are_one_sentence() {
    let meeting = Meeting::host();
    let publishing = publisher(&meeting, &["--buffers", "3"]);
    for (options, words) in [
        (["--count", "1", "--policy", "every"], "the policy `every` is not allowed here"),
        (["--count", "1", "--held", "4"], "the pool would need 6 buffers, and it has 3"),
    ] {
        failed(&vmmfd(&meeting, "sub", &options).end(), 4, "peer", words);
    }
    drop(publishing);
    let alone = vmmfd(&meeting, "pub", &["--subscribers", "1", "--timeout", "10ms"]).end();
    failed(&alone, 4, "peer", "waiting for subscribers");
    let nobody = vmmfd(&meeting, "sub", &["--timeout", "10ms"]).end();
    failed(&nobody, 4, "peer", "s.sock");
}

fn topics_outlive_their_publishers(meeting: Meeting) {
    let served = Served::alone(&[]);
    let start = |command: &str, options: &[&str]| {
        let mut run = meeting.bare("vmmfd").env("VMMFD_BROKER_SOCKET", &served.path);
        run.command.args([command, "camera/left", "--json", "--backend", meeting.backend()]).args(options);
        run.start()
    };
    let publish = |options: &[&str]| {
        let running = start("pub", &[&["--size", "70001", "--every", "10m"], options].concat());
        wait_for("the publisher", || running.so_far().contains("publishing"));
        running
    };
    let subscribing = start("sub", &["--policy", "every"]);
    wait_for("the subscriber", || subscribing.so_far().contains("subscribed  topic camera/left"));
    let first = publish(&["--subscribers", "1"]);
    failed(&start("pub", &[]).end(), 1, "object", "the topic `camera/left` has a publisher");
    let client = served.client();
    wait_for("a buffer", || client.who("").unwrap().topics[0].followers == 1);
    first.signal(Signal::SIGKILL);
    drop(first.end());
    wait_for("the end of the topic", || client.who("").unwrap().topics.is_empty());
    let second = publish(&["--subscribers", "1", "--count", "20"]).end().code(0).json();
    let report = subscribing.end().code(0).json();
    assert!(report["delivered"].as_u64() >= Some(20) && report["torn"] == 0, "{report}");
    assert_eq!((&only(&second)["delivered"], &report["publisher"]), (&json!(20), &Value::Null));
}

#[test]
fn wrong_options_are_one_sentence() {
    let meeting = Meeting::host();
    for (arguments, words) in [
        (&["sub"][..], "name a topic of a broker, or a socket with --at PATH"),
        (&["sub", "camera", "--at", "s.sock"], "cannot be used with"),
        (&["pub", "--at", "s.sock", "--rate", "0"], "`0` is not a rate: write buffers per second"),
        (&["pub", "--at", "s.sock", "--rate", "nan"], "`nan` is not a rate"),
        (&["pub", "--at", "s.sock", "--size", "8MB"], "write 8MiB"),
        (&["pub", "--at", "s.sock", "--every", "5"], "`5` has no unit"),
        (&["pub", "--at", "s.sock", "--buffers", "1"], "1 is not in 2.."),
        (&["sub", "--at", "s.sock", "--count", "0"], "0 is not in 1.."),
        (&["sub", "--at", "s.sock", "--held", "65"], "65 is not in 1..=64"),
        (&["sub", "--at", "s.sock", "--policy", "newest"], "`newest` is not a policy: write latest, every, or queue:N"),
        (&["sub", "--at", "s.sock", "--policy", "queue:1025"], "with 1 to 1024 for N"),
        (&["sub", "--at", "s.sock", "--work", "0s"], "`0s` is no time"),
    ] {
        let mut run = meeting.bare("vmmfd");
        run.command.args(arguments);
        run.end().code(2).says(words);
    }
    let mut run = meeting.bare("vmmfd");
    run.command.args(["pub", "camera", "--timeout", "100ms", "--socket"]).arg(meeting.socket());
    run.end().code(4).says("no broker on").says("name its socket with --socket");
}

/// `VMMFD_TEST_STREAM=60` for a minute with buffers of 8 MiB: `make test-streams`. Prints how late the publisher was; only the counts are
/// asserted.
fn stalled_subscribers_delay_nobody(meeting: Meeting) {
    let (seconds, size) = match env::var("VMMFD_TEST_STREAM") {
        Ok(seconds) => (seconds.parse().unwrap(), "8MiB"),
        Err(_) => (1, "64KiB"),
    };
    let _turn = crate::support::cpu_turn();
    let count = (seconds * 200).to_string();
    let options = ["--size", size, "--count", &count, "--buffers", "64", "--every", "10m"];
    let alone = vmmfd(&meeting, "pub", &options).end().code(0).json();

    let publishing = vmmfd(&meeting, "pub", &[&options[..], &["--subscribers", "4"]].concat()).start();
    let [healthy, working, killed, stopped] =
        [&["--policy", "every"][..], &["--work", "100ms"], &[], &[]].map(|options| subscriber(&meeting, options));
    thread::sleep(Duration::from_millis(seconds * 1000 / 4));
    killed.signal(Signal::SIGKILL);
    stopped.signal(Signal::SIGSTOP);
    drop(killed.end());
    let healthy = healthy.end().code(0).json();
    assert_eq!(counts(&healthy), [seconds * 200, 0, 0]);
    // It still has the buffer that it was given before it was stopped.
    stopped.signal(Signal::SIGCONT);
    for sub in [working, stopped] {
        let report = sub.end().code(0).json();
        assert_eq!(report["torn"], 0);
        eprintln!("{report}");
    }
    let report = publishing.end().code(0).json();
    assert_eq!((&report["published"], &report["starved"]), (&json!(seconds * 200), &json!(0)));
    eprintln!("{healthy}\nalone: {alone}\nwith 4 subscribers: {report}");
}

mod namespaces {
    use super::*;

    /// As in two containers that share a folder: other processes, mounts, users, and no network.
    #[test]
    #[ignore = "needs the right to make namespaces: make test-all runs it where there is"]
    fn containers_share_streams() {
        let (meeting, served) = (Meeting::host(), Served::alone(&["--allow-uid", "65534"]));
        let start = |command: &str, options: &[&str], inside: bool| {
            let mut run = meeting.bare("vmmfd").env("VMMFD_BROKER_SOCKET", &served.path);
            run.command.args([command, "camera", "--json", "--backend", "host", "--allow-uid", "65534"]).args(options);
            if !inside {
                return run.start();
            }
            let kinds =
                ["--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc", "--ipc", "--net"];
            let mut outer = Command::new("unshare");
            outer.args(kinds).arg(run.command.get_program()).args(run.command.get_args());
            let environment =
                run.command.get_envs().filter_map(|(name, value)| Some((name.to_owned(), value?.to_owned())));
            outer.envs(environment.collect::<Vec<_>>());
            run.instead(outer).start()
        };
        let publishing = start("pub", &["--size", "70001", "--buffers", "11", "--every", "10m"], false);
        wait_for("the publisher", || publishing.so_far().contains("publishing"));
        let client = served.client();
        let followers = || client.who("").unwrap().topics[0].followers;
        // The pool has room for one of them at a time.
        for round in 0..3 {
            let killed = start("sub", &["--held", "8", "--work", "1h"], true);
            wait_for("a follower", || followers() == 1);
            thread::sleep(Duration::from_millis(20 * round));
            killed.signal(Signal::SIGKILL);
            drop(killed.end());
            wait_for("its room", || {
                let ended = start("sub", &["--held", "8", "--policy", "every", "--count", "50"], true).end();
                let has_room = ended.status.success();
                if has_room {
                    assert_eq!(counts(&ended.json()), [50, 0, 0]);
                } else {
                    assert!(ended.stderr.contains("the pool would need"), "{}", ended.stderr);
                }
                has_room
            });
        }
        publishing.signal(Signal::SIGTERM);
        publishing.end().code(0);
    }
}
