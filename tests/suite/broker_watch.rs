//! Watching the events of a broker's objects, with the library and with `vmmfd watch`.

use std::{
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use nix::sys::signal::Signal;
use serde_json::Value;
use vmmfd::{
    Error,
    broker::{Condition, Event, EventKind, WatchPlace, Watched},
    error::{PeerError, RefusalCode},
    session::Config,
    wire::broker::{self as wire, Events, Message, WatchHeader},
};

use crate::{
    broker_pages::Template,
    broker_process::{Process, Raw, Setup},
    broker_reconnect::{FIRST as INSTANCE, OTHER, Peer, Scripted, meanwhile},
    running::{Meeting, fits, wait_for},
    support::Subject,
};

/// Longer than any event takes.
const LONG: Duration = Duration::from_secs(600);

fn event(seq: u64, kind: EventKind) -> Event {
    let (name, id) = ("models/tiny".to_owned(), OTHER.to_owned());
    Event { seq, at_ms: 1_000, kind, name, version: 1, id, uid: 7, pid: 9, command: None, size: None, message: None }
}

fn events(instance: &str, lost: bool, events: Vec<Event>, next: u64) -> Message {
    Message::Events(Events { instance: instance.to_owned(), lost, events, next })
}

fn at(instance: &str, seq: u64) -> WatchPlace {
    WatchPlace::new(instance, seq)
}

/// Receives a subscription, and asserts its start position.
#[track_caller]
fn subscribed(peer: &Peer, after: Option<(&str, u64)>) {
    let Message::Watch(WatchHeader { prefix, after: seq, instance, .. }) = peer.next().0 else {
        panic!("another request")
    };
    assert_eq!(prefix, "models/");
    assert_eq!((instance.as_deref(), seq), (after.map(|(instance, _)| instance), after.map(|(_, seq)| seq)));
}

#[track_caller]
fn unsubscribed(peer: &Peer, meanwhile: Option<Message>) {
    assert!(matches!(peer.next().0, Message::Stop(_)));
    meanwhile.into_iter().for_each(|message| peer.say(&message));
    peer.refuse(RefusalCode::Stopped);
}

#[test]
fn waits_continue_where_the_last_ended() {
    let scripted = Scripted::new();
    let (client, peer) = scripted.client();
    let broker = meanwhile(move || {
        subscribed(&peer, None);
        peer.say(&events(INSTANCE, false, vec![], 7));
        unsubscribed(&peer, None);
        subscribed(&peer, Some((INSTANCE, 7)));
        peer.say(&events(INSTANCE, false, vec![], 7));
        let two = vec![event(8, EventKind::Published), event(10, EventKind::Leased)];
        peer.say(&events(INSTANCE, false, two, 12));
        // Events that arrive before the broker sees the unsubscription are not lost.
        unsubscribed(&peer, Some(events(INSTANCE, false, vec![event(13, EventKind::Replaced)], 13)));
        subscribed(&peer, Some((INSTANCE, 13)));
        peer.say(&events(INSTANCE, false, vec![], 15));
        unsubscribed(&peer, None);
        // A second watch continues from the first one's place.
        subscribed(&peer, Some((INSTANCE, 10)));
        peer.say(&events(INSTANCE, false, vec![event(13, EventKind::Replaced)], 15));
        unsubscribed(&peer, None);
    });
    let mut watch = client.watch("models/", None).unwrap();
    assert_eq!(watch.place(), &at(INSTANCE, 7));
    assert_eq!(watch.next(LONG).unwrap(), Some(Watched::Event(event(8, EventKind::Published))));
    assert_eq!(watch.place(), &at(INSTANCE, 8));
    // This event is already here: it needs no request.
    assert_eq!(watch.next(Duration::ZERO).unwrap(), Some(Watched::Event(event(10, EventKind::Leased))));
    let place = watch.place().clone();
    assert_eq!(watch.next(LONG).unwrap(), Some(Watched::Event(event(13, EventKind::Replaced))));
    assert_eq!(watch.next(Duration::ZERO).unwrap(), None);
    assert_eq!(watch.place(), &at(INSTANCE, 15), "events of other names are behind it too");
    let mut again = client.watch("models/", Some(&place)).unwrap();
    assert_eq!(again.place(), &place);
    assert_eq!(again.next(LONG).unwrap(), Some(Watched::Event(event(13, EventKind::Replaced))));
    broker.join().unwrap();
}

#[test]
fn lost_events_are_reported_first() {
    let scripted = Scripted::new();
    let (client, peer) = scripted.client();
    let broker = meanwhile(move || {
        subscribed(&peer, Some((INSTANCE, 3)));
        peer.say(&events(INSTANCE, true, vec![event(90, EventKind::Deleted)], 95));
        unsubscribed(&peer, None);
        // Another store: its numbering starts from 1.
        subscribed(&peer, Some((INSTANCE, 95)));
        peer.say(&events(OTHER, false, vec![event(1, EventKind::Published)], 1));
        unsubscribed(&peer, Some(events(OTHER, true, vec![], 40)));
        subscribed(&peer, Some((OTHER, 40)));
        peer.say(&events(OTHER, false, vec![], 40));
        unsubscribed(&peer, None);
    });
    let mut watch = client.watch("models/", Some(&at(INSTANCE, 3))).unwrap();
    let mut next = || {
        let watched = watch.next(Duration::ZERO).unwrap();
        (watched, watch.place().clone())
    };
    assert_eq!(next(), (Some(Watched::Lost), at(INSTANCE, 89)));
    assert_eq!(next(), (Some(Watched::Event(event(90, EventKind::Deleted))), at(INSTANCE, 90)));
    assert_eq!(next(), (Some(Watched::Lost), at(OTHER, 0)));
    assert_eq!(next(), (Some(Watched::Event(event(1, EventKind::Published))), at(OTHER, 1)));
    assert_eq!(next(), (Some(Watched::Lost), at(OTHER, 40)));
    assert_eq!(next(), (None, at(OTHER, 40)));
    broker.join().unwrap();
}

#[test]
fn silent_broker_is_detected() {
    let scripted = Scripted::new();
    let (client, peer) = scripted.client_with(Config::default().timeout(Duration::from_secs(1)));
    let (ended, end) = mpsc::channel::<()>();
    let broker = meanwhile(move || {
        subscribed(&peer, None);
        peer.say(&events(INSTANCE, false, vec![], 7));
        unsubscribed(&peer, None);
        subscribed(&peer, Some((INSTANCE, 7)));
        let _ = end.recv();
    });
    let mut watch = client.watch("models/", None).unwrap();
    let error = watch.next(LONG).unwrap_err();
    assert!(matches!(error, Error::Peer(PeerError::Timeout { .. })), "{error}");
    assert_eq!(watch.place(), &at(INSTANCE, 7));
    drop(ended);
    broker.join().unwrap();
}

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
    let server = Process::start(Setup::of(&Subject::host()));
    let (client, template) = (server.client(), Template::new());
    let put = |name: &str, nonce, condition| template.put(&client, name, nonce, condition).unwrap();
    put("models/before", 1, Condition::New);
    let watcher = server.client();
    let mut watch = watcher.watch("models/", None).unwrap();
    assert_eq!(watch.next(Duration::ZERO).unwrap(), None, "what was before is no event");
    put("models/a", 1, Condition::New);
    put("data/a", 1, Condition::New);
    put("models/a", 2, Condition::Any);
    let reader = Raw::greeted(&server.path).unwrap();
    let get = wire::GetHeader {
        objects: vec![wire::GetObject { name: "models/a".to_owned(), ..wire::GetObject::default() }],
        wait_ms: None,
        claim: None,
    };
    let Some((Message::Lease(lease), _)) = reader.ask(&Message::Get(Box::new(get)), &[]).unwrap() else {
        panic!("no lease")
    };
    let message = "it is not as claimed".to_owned();
    reader.send(&Message::Report(wire::ReportHeader { token: lease.token, message }), &[]).unwrap();
    reader.send(&Message::Release(wire::Release { token: lease.token }), &[]).unwrap();
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
fn watch_of_new_broker_reports_lost_events() {
    let server = Process::start(Setup::of(&Subject::host()));
    let client = server.client();
    let mut watch = client.watch("", Some(&at(INSTANCE, 12))).unwrap();
    assert_eq!(watch.next(LONG).unwrap(), Some(Watched::Lost));
    assert_eq!(watch.next(Duration::ZERO).unwrap(), None);
    assert_ne!(watch.place().instance, INSTANCE);
    let (stopper, waiting) = (client.clone(), thread::spawn(move || watch.next(LONG)));
    let begun = Instant::now();
    // A stop before the request has no effect, so it is repeated.
    while !waiting.is_finished() {
        assert!(begun.elapsed() < LONG, "the wait does not end");
        stopper.stop().unwrap();
        thread::sleep(Duration::from_millis(5));
    }
    let error = waiting.join().unwrap().unwrap_err();
    assert!(matches!(&error, Error::Broker(refusal) if refusal.code == RefusalCode::Stopped), "{error}");
    // The connection remains usable.
    assert_eq!(client.list("").unwrap(), []);
}

fn vmmfd(place: &Meeting, arguments: &[&str]) -> crate::running::Run {
    let mut run = place.bare("vmmfd");
    run.command.args(arguments).env("VMMFD_BROKER_SOCKET", place.socket());
    run
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
    let lost = vmmfd(&place, &["watch", "--quiet", "--after", &format!("{INSTANCE}:3")]).start();
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
    let ended = vmmfd(&place, &["watch", "--json"]).end();
    ended.code(4).json();
    let usage = vmmfd(&place, &["watch", "--after", "17"]).end();
    usage.code(2).says("write instance and seq");
}
