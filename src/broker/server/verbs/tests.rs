//! Tests verbs as functions from requests to effects.

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
            admit::Limits,
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
        Hello, MAX_FDS, VERSION,
        broker::{BROKER, Delete, EventKind, Message, Published, Quota, Stat, Token, Who},
    },
};

/// Neither root nor the user that runs the tests.
const USER_UID: u32 = 34_560;

struct Fixture {
    state: State,
    last: u64,
}

impl Fixture {
    fn new() -> Self {
        Self::with(Quota::default(), 10_000)
    }

    fn with(quota: Quota, files: usize) -> Self {
        let limits = Limits::new(quota, Quota::default(), files);
        Self { state: Self::state(Time::now(), limits, BTreeMap::new()), last: 16 }
    }

    fn state(now: Time, limits: Limits, entries: BTreeMap<u64, Entry>) -> State {
        let resume = Duration::from_secs(10);
        State::new(Objects::restore(now, limits, resume, Store::default(), entries), Duration::from_secs(30), false)
    }

    /// Another server takes over the entries, so many milliseconds later. Connections are lost.
    fn restart(&mut self, after_ms: u64) {
        let old = &self.state.objects;
        let entry = |key: &u64| {
            let fds = old.descriptors(*key).unwrap().iter().map(|fd| fd.try_clone().unwrap()).collect();
            (*key, Entry { manifest: old.manifest(*key).unwrap().0, fds })
        };
        let entries = old.copy().versions.keys().map(entry).collect();
        let (now, limits) = (Time { ms: old.now.ms + after_ms, ..old.now }, old.users.limits);
        self.state = Self::state(now, limits, entries);
    }

    /// Connects a client that has sent its hello.
    fn client(&mut self) -> ConnectionId {
        self.client_as(USER_UID, USER_UID, &[])
    }

    /// As [`Fixture::client`], of this user, group and supplementary groups.
    fn client_as(&mut self, uid: u32, gid: u32, groups: &[u32]) -> ConnectionId {
        self.last += 1;
        let connection = ConnectionId(self.last);
        let caller = Caller { connection, pid: 1, uid, gid, groups: Arc::from(groups), command: None };
        connected(&mut self.state, caller);
        self.state.effects = Effects::default();
        let capabilities = vec![BROKER.to_owned()];
        let hello = Hello { version: VERSION, capabilities, backend: "none".to_owned(), pid: 1, timeout_ms: 1000 };
        let seen = self.ask(connection, Message::Hello(hello));
        assert!(matches!(seen.message(connection), Message::Hello(_)));
        connection
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
    let stranger = test.client_as(USER_UID + 1, USER_UID, &[]);
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

// Bounds of a user.

#[test]
fn tables_count_towards_quota() {
    let quota = Quota { bytes: Some(GRANULARITY + 100_000), ..Quota::default() };
    let mut test = Fixture::with(quota, 10_000);
    let maker = test.client();
    for (length, fits) in [(200_000, false), (90_000, true)] {
        let table = table::sealed(json!({ "x": "x".repeat(length - 8) }).to_string()).unwrap();
        let metadata = format!(r#", "metadata": {{"length": {length}}}"#);
        let seen = test.put_fds(maker, "a", &metadata, vec![table, memory()]);
        let expected = if fits { "published" } else { "refused" };
        assert_eq!(seen.message(maker).name(), expected);
    }
}

#[test]
fn reports_are_bounded() {
    let mut test = Fixture::new();
    let reader = test.client();
    let reports = (0..70).map(|name| {
        let name = format!("{name:02}");
        test.put(reader, &name, "");
        let (token, _) = test.get(reader, &name, "").lease(reader);
        for _ in 0..17 {
            let report = json!({ "token": token, "message": "x".repeat(60_000) });
            test.ask(reader, Message::Report(serde_json::from_value(report).unwrap()));
        }
        match test.ask(reader, Message::Stat(Stat { name, version: None })).message(reader) {
            Message::Version(info) => info.reports,
            other => panic!("{other:?}"),
        }
    });
    let reports: Vec<_> = reports.collect();
    assert_eq!((reports[0].len(), reports.iter().flatten().count()), (16, 1024));
    assert!(reports.iter().flatten().all(|report| report.message.len() < 300));
}

// Leases.

/// Requests a lease, or memory of a lease.
fn select(test: &mut Fixture, id: ConnectionId, object: Value) -> Seen {
    let get = serde_json::from_value(json!({ "objects": [object] })).unwrap();
    test.ask(id, Message::Get(Box::new(get)))
}

#[test]
fn get_of_lease_selects_its_memory() {
    let mut test = Fixture::new();
    let (maker, reader) = (test.client(), test.client());
    test.put(maker, "a", "");
    let (token, _) = select(&mut test, reader, json!({"name": "a", "parts": {}})).lease(reader);
    test.put(maker, "a", r#", "replace": true"#);
    let of = |more: Value| {
        let mut object = json!({"name": "a", "lease": token});
        object.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        object
    };
    // From the leased version, which is no longer current.
    let seen = select(&mut test, reader, of(json!({"parts": {"all": [{"offset": 0, "length": 1}]}})));
    let Message::Lease(lease) = seen.message(reader) else { panic!() };
    assert_eq!((lease.token, lease.version, lease.sizes.len()), (token, 1, 1));
    assert_eq!(test.leases(), 1);
    for (more, code) in [
        (json!({"parts": {"all": [{"offset": GRANULARITY, "length": 1}]}}), RefusalCode::Differs),
        (json!({"parts": {"all": [{"offset": 1, "length": u64::MAX}]}}), RefusalCode::Differs),
        (json!({"parts": {"all": [{"offset": 1, "length": 0}]}}), RefusalCode::Differs),
        (json!({"parts": {"y": []}}), RefusalCode::Lacks),
        (json!({"name": "b"}), RefusalCode::Absent),
        (json!({"lease": Token([1; 16])}), RefusalCode::Absent),
    ] {
        assert_eq!(select(&mut test, reader, of(more)).refusal(reader), code);
    }
    assert_eq!(select(&mut test, maker, of(json!({}))).refusal(maker), RefusalCode::Absent);
    assert_eq!(test.leases(), 1);
    test.ask(reader, Message::Release(serde_json::from_value(json!({ "token": token })).unwrap()));
    assert_eq!(select(&mut test, reader, of(json!({}))).refusal(reader), RefusalCode::Absent);
    assert_eq!((test.leases(), test.state.objects.total().versions), (0, 1));
}

#[test]
fn wrong_tables_are_refused_unread() {
    let mut test = Fixture::new();
    let maker = test.client();
    let unsealed = memfd::empty(c"table").unwrap();
    nix::unistd::ftruncate(&unsealed, 2).unwrap();
    let pipe = || nix::unistd::pipe().unwrap().0;
    for (fd, length) in [(unsealed, 2), (pipe(), 2), (table::sealed("{}").unwrap(), 3), (table::sealed("").unwrap(), 0)]
    {
        let more = format!(r#", "metadata": {{"length": {length}}}"#);
        let seen = test.put_fds(maker, "a", &more, vec![fd, memory()]);
        assert_eq!((seen.refusal(maker), seen.closed()), (RefusalCode::Invalid, 2), "{length}");
    }
    // Only readers read it.
    test.put_fds(maker, "a", r#", "metadata": {"length": 7}"#, vec![table::sealed("garbage").unwrap(), memory()])
        .published(maker);
}

#[test]
fn get_of_several_waits_for_all() {
    let mut test = Fixture::new();
    let (maker, reader) = (test.client(), test.client());
    test.put(maker, "a", "");
    let both = json!({ "objects": [{ "name": "a", "version": 2 }, { "name": "b" }], "wait_ms": 1000 });
    let seen = test.ask(reader, Message::Get(Box::new(serde_json::from_value(both).unwrap())));
    assert!(seen.messages(reader).is_empty());
    assert!(test.put(maker, "b", "").messages(reader).is_empty());
    let seen = test.put(maker, "a", r#", "replace": true"#);
    let versions = seen.messages(reader).into_iter().map(|message| match message {
        Message::Lease(lease) => (lease.name, lease.version),
        other => panic!("{other:?}"),
    });
    assert_eq!(versions.collect::<Vec<_>>(), [("a".to_owned(), 2), ("b".to_owned(), 1)]);
}

/// The answer waits for the client's socket, and the name is deleted meanwhile.
#[test]
fn late_stat_has_its_own_metadata() {
    let mut test = Fixture::new();
    let maker = test.client();
    let text = json!({ "x": "x".repeat(10_000) }).to_string();
    let metadata = format!(r#", "metadata": {{"length": {}}}"#, text.len());
    let seen = test.put_fds(maker, "a", &metadata, vec![table::sealed(&text).unwrap(), memory()]);
    seen.published(maker);
    let stat = Stat { name: "a".to_owned(), version: None };
    let mut seen = test.ask(maker, Message::Stat(stat));
    test.ask(maker, Message::Delete(Delete { name: "a".to_owned(), request: None }));
    test.state.objects.garbage.clear();
    let Some(Effect::Send { records, .. }) = seen.0.pop() else { panic!("no answer") };
    let own = records[0].own.first().unwrap();
    assert_eq!(table::read(own.try_clone().unwrap(), text.len() as u64, 1 << 20).unwrap(), text.as_bytes());
}

/// A late acknowledgement must not send the memory of another object.
#[test]
fn early_release_ends_connection() {
    let mut test = Fixture::new();
    let (maker, reader) = (test.client(), test.client());
    test.put(maker, "a", "").published(maker);
    let get = Message::Get(Box::new(serde_json::from_str(r#"{"objects": [{"name": "a"}]}"#).unwrap()));
    handle(&mut test.state, reader, get, Vec::new());
    let (token, _) = Seen(std::mem::take(&mut test.state.effects).0.into()).lease(reader);
    let release = Message::Release(serde_json::from_value(json!({ "token": token })).unwrap());
    assert_eq!(test.ask(reader, release).ends(reader), Some(ErrorCode::Protocol));
}

/// Each restart lets clients resume leases for 10 s. A replaced version without a lease stays for 10 s, even if servers restart all the time.
#[test]
fn restarts_do_not_keep_replaced_versions() {
    let mut test = Fixture::new();
    let maker = test.client();
    test.put(maker, "a", "");
    let mut longest = 0;
    for _ in 0..12 {
        test.restart(4000);
        let maker = test.client();
        test.put(maker, "a", r#", "replace": true"#).published(maker);
        longest = longest.max(test.state.objects.total().versions);
    }
    assert_eq!(longest, 4, "the current version, and those of the last 10 s");
}
