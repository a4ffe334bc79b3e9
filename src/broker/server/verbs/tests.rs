//! Tests verbs as functions from requests to effects.

mod bounds;
mod leases;
mod users;

use std::{collections::BTreeMap, os::fd::OwnedFd, sync::Arc, time::Duration};

use serde_json::{Value, json};

use super::{
    connection::{all_sent, connected, disconnected},
    dispatch::handle,
    effects::{Effect, Effects},
    put::complete_safe,
    watch::send_events,
};
use crate::{
    broker::{
        keeper::{Entry, Source, Store},
        server::{
            admit::{Limits, Resource},
            state::{
                caller::{Caller, ConnectionId},
                objects::Objects,
                root::State,
                root::Time,
            },
        },
        table,
    },
    driver::GRANULARITY,
    error::{ErrorCode, RefusalCode},
    sys::{memfd, overflow_uid},
    wire::{
        Hello, MAX_FDS, Segments, VERSION,
        broker::{BROKER, Delete, EventKind, Message, Published, Quota, Stat, Token, Who},
    },
};

/// Neither root nor the user that runs the tests.
const USER_UID: u32 = 34_560;

const RESUME: Duration = Duration::from_secs(10);

struct Fixture {
    state: State,
    last: u64,
    limits: Limits,
    now: Time,
}

impl Fixture {
    fn new() -> Self {
        Self::with(Quota::default(), 10_000)
    }

    fn with(quota: Quota, files: usize) -> Self {
        let limits = Limits::new(quota, Quota::default(), files);
        let now = Time::now();
        let objects = Objects::restore(now, limits, RESUME, Store::default(), BTreeMap::new());
        Self { state: State::new(objects, Duration::from_secs(30), false), last: 16, limits, now }
    }

    /// Another server takes over the entries, so many milliseconds later. Connections are lost.
    fn restart(&mut self, after_ms: u64) {
        let old = &self.state.objects;
        let entry = |key: &u64| {
            let fds = old.descriptors(*key).unwrap().iter().map(|fd| fd.try_clone().unwrap()).collect();
            (*key, Entry { manifest: old.manifest(*key).unwrap().0, fds })
        };
        let entries = old.copy().versions.keys().map(entry).collect();
        self.now.ms += after_ms;
        let objects = Objects::restore(self.now, self.limits, RESUME, Store::default(), entries);
        self.state = State::new(objects, Duration::from_secs(30), false);
    }

    /// Connects a client that has sent its hello.
    fn client(&mut self) -> ConnectionId {
        let (connection, seen) = self.greet(VERSION);
        assert!(matches!(seen.message(connection), Message::Hello(_)));
        connection
    }

    /// Connects a client that sends a hello of this protocol version.
    fn greet(&mut self, version: u16) -> (ConnectionId, Seen) {
        self.greet_as((USER_UID, USER_UID, &[]), version)
    }

    /// Connects a client of this user, group and supplementary groups.
    fn greet_as(&mut self, (uid, gid, groups): (u32, u32, &[u32]), version: u16) -> (ConnectionId, Seen) {
        self.last += 1;
        let connection = ConnectionId(self.last);
        let caller = Caller { connection, pid: 1, uid, gid, groups: Arc::from(groups), command: None };
        connected(&mut self.state, caller);
        self.state.effects = Effects::default();
        let capabilities = vec![BROKER.to_owned()];
        let hello = Hello { version, capabilities, backend: "none".to_owned(), pid: 1, timeout_ms: 1000 };
        (connection, self.ask(connection, Message::Hello(hello)))
    }

    /// Sends a message, and executes the effects on the state.
    fn send(&mut self, id: ConnectionId, message: Message, fds: Vec<OwnedFd>) -> Seen {
        self.run(|state| handle(state, id, message, fds))
    }

    fn ask(&mut self, id: ConnectionId, message: Message) -> Seen {
        self.send(id, message, Vec::new())
    }

    fn run(&mut self, call: impl FnOnce(&mut State)) -> Seen {
        call(&mut self.state);
        let mut seen = Vec::new();
        while let Some(effect) = self.state.effects.0.pop_front() {
            match effect {
                Effect::Store => {
                    complete_safe(&mut self.state);
                }
                Effect::Send { client, .. } => {
                    all_sent(&mut self.state, client);
                    seen.push(effect);
                }
                other => seen.push(other),
            }
        }
        Seen(seen)
    }

    fn put(&mut self, id: ConnectionId, name: &str, more: &str) -> Seen {
        let memfd = memory();
        self.put_fds(id, name, more, vec![memfd])
    }

    fn put_fds(&mut self, id: ConnectionId, name: &str, more: &str, fds: Vec<OwnedFd>) -> Seen {
        let (part_name, more) = more.split_once('|').unwrap_or(("all", more));
        let part = part(part_name, 1);
        let put =
            format!(r#"{{"name": "{name}", "backend": "host", "parts": [{part}], "sizes": [{GRANULARITY}]{more}}}"#);
        self.put_text(id, &put, fds)
    }

    fn put_text(&mut self, id: ConnectionId, put: &str, fds: Vec<OwnedFd>) -> Seen {
        self.send(id, Message::Put(Box::new(serde_json::from_str(put).unwrap())), fds)
    }

    /// Puts these parts, each with its number of segments.
    fn put_parts(&mut self, id: ConnectionId, name: &str, parts: &[Value], mut fds: Vec<OwnedFd>) -> Seen {
        let segments = parts.iter().map(|part| part["memory"]["segments"].as_u64().unwrap() as usize).sum::<usize>();
        let sizes = vec![GRANULARITY; segments.min(MAX_FDS - fds.len())];
        let memory = memory();
        fds.extend(sizes.iter().map(|_| memory.try_clone().unwrap()));
        let put = json!({ "name": name, "backend": "host", "parts": parts, "sizes": sizes });
        self.put_text(id, &put.to_string(), fds)
    }

    fn get(&mut self, id: ConnectionId, name: &str, more: &str) -> Seen {
        let get = format!(r#"{{"objects": [{{"name": "{name}"}}]{more}}}"#);
        self.ask(id, Message::Get(Box::new(serde_json::from_str(&get).unwrap())))
    }

    fn leases(&self) -> u64 {
        self.state.objects.total().leases
    }
}

/// The effects of a request.
struct Seen(Vec<Effect>);

impl Seen {
    fn messages(&self, id: ConnectionId) -> Vec<Message> {
        let records = self.0.iter().filter_map(|effect| match effect {
            Effect::Send { client, records } if *client == id => Some(records),
            _ => None,
        });
        let decode = |record: &super::effects::Outgoing| {
            Message::decode(&record.bytes, record.fds.len() + record.own.len()).unwrap()
        };
        records.flatten().map(decode).collect()
    }

    /// The only message to a client.
    fn message(&self, id: ConnectionId) -> Message {
        let mut messages = self.messages(id);
        assert_eq!(messages.len(), 1, "{messages:?}");
        messages.remove(0)
    }

    fn published(&self, id: ConnectionId) -> Published {
        match self.message(id) {
            Message::Published(published) => published,
            other => panic!("{other:?}"),
        }
    }

    fn lease(&self, id: ConnectionId) -> (Token, u64) {
        match self.message(id) {
            Message::Lease(lease) => (lease.token, lease.version),
            other => panic!("{other:?}"),
        }
    }

    fn refusal(&self, id: ConnectionId) -> RefusalCode {
        match self.message(id) {
            Message::Refused(refusal) => refusal.code,
            other => panic!("{other:?}"),
        }
    }

    /// The number of closed descriptors.
    fn closed(&self) -> usize {
        let closed = |effect: &Effect| match effect {
            Effect::CloseFds { fds, .. } => fds.len(),
            _ => 0,
        };
        self.0.iter().map(closed).sum()
    }

    fn ends(&self, id: ConnectionId) -> Option<ErrorCode> {
        self.0.iter().find_map(|effect| match effect {
            Effect::End { client, code, .. } if *client == id => Some(*code),
            _ => None,
        })
    }
}

/// A part of so many segments.
fn part(name: &str, segments: u64) -> Value {
    let (device, size) = (json!({ "uuid": uuid::Uuid::nil().to_string(), "name": "host" }), segments * GRANULARITY);
    json!({ "name": name, "memory": { "mechanism": "vmm", "device": device, "location": "device", "size": size,
        "mapped_size": size, "segments": segments } })
}

fn memory() -> OwnedFd {
    let memfd = memfd::create(c"vmmfd", GRANULARITY).unwrap();
    memfd::add_seals(&memfd, nix::fcntl::SealFlag::F_SEAL_SEAL).unwrap();
    memfd
}

#[test]
fn foreign_version_changes_nothing() {
    let mut test = Fixture::new();
    let client = test.client();
    test.put(client, "a", "");
    let (foreign, Seen(effects)) = test.greet(VERSION - 1);
    let [Effect::End { client: ended, code: ErrorCode::Version, message, .. }] = &effects[..] else {
        panic!("{} effects", effects.len())
    };
    assert_eq!(*ended, foreign);
    assert_eq!(message, "the hello is for protocol version 0, but this broker speaks version 1");
    test.get(client, "a", "").lease(client);
}

#[test]
fn refused_put_closes_descriptors() {
    let mut test = Fixture::new();
    let maker = test.client();
    let seen = test.put(maker, "a", r#", "mode": 4095"#);
    assert_eq!((seen.refusal(maker), seen.closed()), (RefusalCode::Invalid, 1));
    // No reservation is left, only the client's connection.
    assert_eq!(test.state.objects.users().total(Resource::Descriptors), 1);
    // A pipe is not memory.
    let (pipe, _) = nix::unistd::pipe().unwrap();
    let seen = test.put_fds(maker, "a", "", vec![pipe]);
    assert_eq!((seen.refusal(maker), seen.closed()), (RefusalCode::Memory, 1));
    assert_eq!(test.state.objects.users().total(Resource::Descriptors), 1);
}

#[test]
fn deleted_name_needs_no_expiry_check() {
    let mut test = Fixture::new();
    let maker = test.client();
    test.put(maker, "a", r#", "lifetime": {"kind": "idle", "ms": 1000}"#).published(maker);
    assert!(test.state.objects.take_expiries().last().unwrap().1.is_some());
    test.ask(maker, Message::Delete(serde_json::from_str(r#"{"name": "a"}"#).unwrap()));
    assert!(test.state.objects.take_expiries().last().unwrap().1.is_none());
}

/// The kinds of the events that a watcher gets now.
fn kinds(test: &mut Fixture, watcher: ConnectionId) -> Vec<EventKind> {
    let events = test.run(send_events).messages(watcher).into_iter().map(|message| match message {
        Message::Events(events) => events.events,
        other => panic!("{other:?}"),
    });
    events.flatten().map(|event| event.kind).collect()
}

#[test]
fn recall_marks_leases_until_they_end() {
    let mut test = Fixture::new();
    let (maker, reader, watcher) = (test.client(), test.client(), test.client());
    let (stranger, _) = test.greet_as((USER_UID + 1, USER_UID, &[]), VERSION);
    let id = test.put(maker, "a", r#", "mode": 292"#).published(maker).id;
    test.ask(watcher, Message::Watch(serde_json::from_str(r#"{"prefix": "", "recalls": true}"#).unwrap()));
    assert_eq!(kinds(&mut test, watcher), []);
    let recall = |ids: &[&str]| Message::Recall(serde_json::from_value(json!({ "ids": ids })).unwrap());
    let done = |message| assert!(matches!(message, Message::Done(_)), "{message:?}");
    let marks = |test: &mut Fixture| match test.ask(maker, Message::Who(Who::default())).message(maker) {
        Message::Leases(page) => page.leases.iter().map(|lease| lease.recalled).collect::<Vec<_>>(),
        other => panic!("{other:?}"),
    };
    // Nobody holds it.
    done(test.ask(maker, recall(&[&id])).message(maker));
    let (token, _) = test.get(reader, "a", "").lease(reader);
    assert_eq!((marks(&mut test), kinds(&mut test, watcher)), (vec![false], vec![]));
    assert_eq!(test.ask(stranger, recall(&["unknown", &id])).refusal(stranger), RefusalCode::Denied);
    assert_eq!(marks(&mut test), [false]);
    done(test.ask(maker, recall(&["unknown", &id])).message(maker));
    assert_eq!((marks(&mut test), kinds(&mut test, watcher)), (vec![true], vec![EventKind::Recalled]));
    test.ask(reader, Message::Release(serde_json::from_value(json!({ "token": token })).unwrap()));
    // The recall does not concern later leases.
    test.get(reader, "a", "").lease(reader);
    assert_eq!((marks(&mut test), kinds(&mut test, watcher)), (vec![false], vec![]));
}

#[test]
fn early_message_ends_connection() {
    let mut test = Fixture::new();
    let reader = test.client();
    test.get(reader, "a", r#", "wait_ms": 1000"#);
    assert_eq!(test.get(reader, "a", "").ends(reader), Some(ErrorCode::Protocol));
    // Segments of a put that is complete, and waits for the other parts. Its descriptors are closed.
    let maker = test.client();
    test.put(maker, "b", r#"x|, "announced": ["x", "y"], "group": "g", "wait_ms": 1000"#);
    let segments = Segments { first: 0, sizes: vec![GRANULARITY] };
    let seen = test.send(maker, Message::Segments(segments), vec![memory()]);
    assert_eq!(seen.ends(maker), Some(ErrorCode::Protocol));
    let seen = test.run(|state| disconnected(state, maker));
    assert_eq!((seen.closed(), test.state.drafts.len()), (1, 0));
    // Unmapped users can't own objects.
    assert_ne!(USER_UID, overflow_uid());
}
