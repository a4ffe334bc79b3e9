//! Watching the events of a broker's objects, with the library and with `vmmfd watch`.

use std::{thread, time::Duration};

use nix::sys::signal::Signal;
use serde_json::Value;
use vmmfd::{
    broker::{Condition, EventKind, Watched},
    wire::broker::{self as wire, Message},
};

use crate::{
    broker_commands::vmmfd,
    broker_pages::Template,
    running::{Meeting, fits, wait_for},
    support::served::Served,
};

/// Longer than any event takes.
const LONG: Duration = Duration::from_secs(600);

/// The kinds, names and versions of the next events of a watch.
#[track_caller]
fn happened(watch: &mut vmmfd::broker::Watch, count: usize) -> Vec<(EventKind, String, u64)> {
    let mut last = watch.place().seq;
    let seen = (0..count).map(|_| match watch.next(LONG).unwrap() {
        Some(Watched::Event(event)) => {
            assert!(event.seq > last, "{event:?} after {last}");
            last = event.seq;
            assert_eq!((event.uid, event.pid), (nix::unistd::geteuid().as_raw(), std::process::id() as i32));
            assert!(event.at_ms > 1_700_000_000_000, "{event:?}");
            (event.kind, event.name, event.version)
        }
        other => panic!("{other:?}"),
    });
    seen.collect()
}

#[test]
fn watch_reports_its_prefix_in_order() {
    let served = Served::alone(&[]);
    let (client, template) = (served.client(), Template::new());
    let put = |name: &str, nonce, condition| template.put(&client, name, nonce, condition).unwrap();
    put("models/before", 1, Condition::New);
    let watcher = served.client();
    let mut watch = watcher.watch("models/", None).unwrap();
    assert_eq!(watch.next(Duration::ZERO).unwrap(), None, "what was before is no event");
    put("models/a", 1, Condition::New);
    put("data/a", 1, Condition::New);
    put("models/a", 2, Condition::Any);
    let reader = served.greeted().0;
    let (token, message) = (reader.lease("models/a").token, "it is not as claimed".to_owned());
    reader.send(&Message::Report(wire::ReportHeader { token, message }), &[]).unwrap();
    reader.send(&Message::Release(wire::Release { token }), &[]).unwrap();
    reader.measured();
    client.delete("models/a").unwrap();
    let place = watch.place().clone();
    let a = |kind, version| (kind, "models/a".to_owned(), version);
    let all = vec![
        a(EventKind::Published, 1),
        a(EventKind::Replaced, 2),
        a(EventKind::Leased, 2),
        a(EventKind::Reported, 2),
        a(EventKind::Ended, 2),
        a(EventKind::Deleted, 2),
    ];
    assert_eq!(happened(&mut watch, 6), all);
    assert_eq!(watch.next(Duration::ZERO).unwrap(), None);
    // A second watch from the same place.
    let mut again = watcher.watch("models/", Some(&place)).unwrap();
    assert_eq!(happened(&mut again, 6), all);
    // Events of other prefixes do not count as lost.
    let mut data = watcher.watch("data/", Some(&place)).unwrap();
    assert_eq!(happened(&mut data, 1), [(EventKind::Published, "data/a".to_owned(), 1)]);
    // The watch wakes up when an event arrives.
    let waiting = thread::spawn(move || happened(&mut watch, 1));
    put("models/late", 1, Condition::New);
    assert_eq!(waiting.join().unwrap(), [(EventKind::Published, "models/late".to_owned(), 1)]);
}

#[test]
fn each_event_is_printed_at_once() {
    let place = Meeting::host();
    let mut server = vmmfd(&place, &["serve"]).start();
    server.until("listening");
    let watch = vmmfd(&place, &["watch", "models/", "--json"]).start();
    wait_for("the watch", || watch.so_far().contains("following"));
    let file = place.folder().join("input");
    std::fs::write(&file, b"bytes").unwrap();
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
    let place = Meeting::host();
    let mut server = vmmfd(&place, &["serve"]).start();
    server.until("listening");
    let watch = vmmfd(&place, &["watch", "--json"]);
    let mut command = std::process::Command::new("sh");
    let program = watch.command.get_program().to_owned();
    // `head` exits after the first line, and then the pipe has no reader.
    command.args(["-c", "{ \"$0\" watch --json; echo \"ended with $?\" >&2; } | head -n 1"]).arg(program);
    let ended = watch.instead(command).env("VMMFD_BROKER_SOCKET", place.socket()).end();
    assert_eq!(ended.code(0).stderr, "ended with 0\n");
    ended.json();
}

#[test]
fn watch_without_a_broker_fails() {
    let place = Meeting::host();
    vmmfd(&place, &["watch", "--json"]).end().code(4).json();
    vmmfd(&place, &["watch", "--after", "17"]).end().code(2).says("write instance and seq");
}
