//! `vmmfd watch`. `python/tests/test_watch.py` has the library's watch: prefixes, places, lost events, waits.

use crate::{broker_commands::vmmfd, running::fits, support::prelude::*};

/// A broker, and its folder.
fn served() -> (Meeting, Running) {
    let place = Meeting::host();
    let mut server = vmmfd(&place, &["serve"]).start();
    server.until("listening");
    (place, server)
}

#[test]
fn each_event_is_printed_at_once() {
    let (place, _server) = served();
    let watch = vmmfd(&place, &["watch", "models/", "--json"]).start();
    wait_for("the watch", || watch.so_far().contains("following"));
    let file = place.folder().join("input");
    fs::write(&file, b"bytes").unwrap();
    for name in ["models/a", "data/a", "models/b"] {
        vmmfd(&place, &["put", name, "--backend", "host", "--from", file.to_str().unwrap()]).end().code(0);
    }
    wait_for("the second event", || watch.so_far().contains("models/b"));
    watch.signal(Signal::SIGTERM);
    let ended = watch.end();
    assert_eq!(ended.code(0).stderr, "");
    let lines: Vec<Value> = ended.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    lines.iter().for_each(|line| fits("watch", line));
    let seen: Vec<(&str, Option<&str>)> =
        lines.iter().map(|line| (line["kind"].as_str().unwrap(), line["event"]["name"].as_str())).collect();
    assert_eq!(seen, [("following", None), ("published", Some("models/a")), ("published", Some("models/b"))]);
    // The events after the first one, as text.
    let after = format!("{}:{}", lines[1]["instance"].as_str().unwrap(), lines[1]["seq"]);
    let again = vmmfd(&place, &["watch", "models/", "--after", &after]).start();
    assert_eq!((&lines[1]["event"]["command"], &lines[1]["event"]["size"]), (&"vmmfd".into(), &(2 << 20).into()));
    wait_for("the event after", || again.so_far().contains("models/b version 1, 2 MiB, pid "));
    again.signal(Signal::SIGINT);
    let again = again.end();
    assert_eq!(again.code(0).stdout.lines().count(), 1, "{}", again.stdout);
    assert!(again.stdout.starts_with("published  20") && again.stdout.contains(" (vmmfd), uid "), "{}", again.stdout);
    // A place from an unknown broker.
    let lost = vmmfd(&place, &["watch", "--quiet", "--after", "0c2b6d3a-7f0e-4f3c-9d4b-000000000001:3"]).start();
    wait_for("the word", || lost.so_far().starts_with("lost       the events before the next line are unknown"));
    lost.signal(Signal::SIGHUP);
    assert_eq!(lost.end().code(0).stderr, "");
}

#[test]
fn watch_ends_when_its_reader_closes() {
    let (place, _server) = served();
    let watch = vmmfd(&place, &["watch", "--json"]);
    let mut command = Command::new("sh");
    let program = watch.command.get_program().to_owned();
    // `head` exits after the first line, and then the pipe has no reader.
    command.args(["-c", "{ \"$0\" watch --json; echo \"ended with $?\" >&2; } | head -n 1"]).arg(program);
    let ended = watch.instead(command).env("VMMFD_BROKER_SOCKET", place.socket()).end();
    assert_eq!(ended.code(0).stderr, "ended with 0\n");
    ended.json();
}
