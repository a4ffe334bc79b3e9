//! A broker that survives the death of its server or its keeper, and an upgrade of its program.

use std::{fs, os::unix::fs::PermissionsExt, sync::mpsc, thread, time::Duration};

use nix::sys::signal::{Signal, kill};
use vmmfd::{
    broker::{Client, Get, Lifetime, Put, PutPart, Watched},
    session::Config,
    wire::broker::{self, Delete, Message, Published, Release, Resume, Resumed, ResumedLease, Token, Who},
};

use crate::{
    broker::{filled, until},
    broker_process::{Raw, become_user},
    running::binary,
    support::material::{Material, get_message, token, value},
    support::{
        Subject, in_fork,
        served::{Keeper, Served, is_alive},
    },
};

cases! {
    on crate::support::Subject; every backend: [
    readers_restore_lost_objects,
    ]
}

const MIB: u64 = 1 << 20;

fn small(subject: &Subject, value: u8) -> Material {
    Material::of(&filled(&subject.driver, 4 * MIB, Some(2 * MIB), value))
}

#[track_caller]
fn put(raw: &Raw, material: &Material, name: &str, replace: bool) -> Published {
    let put = broker::PutHeader { replace, request: Some(token()), ..material.put(name) };
    match raw.ask(&Message::Put(Box::new(put)), &material.fds()).unwrap() {
        Some((Message::Published(published), _)) => published,
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn lease(raw: &Raw, name: &str) -> ResumedLease {
    match raw.ask(&get_message(name), &[]).unwrap() {
        Some((Message::Lease(lease), _)) => ResumedLease { token: lease.token, id: lease.id, size: 1 },
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn resume(raw: &Raw, leases: &[&ResumedLease]) -> Resumed {
    let leases = leases.iter().map(|lease| (*lease).clone()).collect();
    match raw.ask(&Message::Resume(Resume { leases, puts: Vec::new() }), &[]).unwrap() {
        Some((Message::Resumed(resumed), _)) => resumed,
        other => panic!("{other:?}"),
    }
}

/// The names with their versions and leases.
#[track_caller]
fn listed(raw: &Raw) -> Vec<(String, u64, u64)> {
    raw.list().into_iter().map(|of| (of.name, of.version, of.leases)).collect()
}

fn leases(raw: &Raw) -> usize {
    match raw.ask(&Message::Who(Who::default()), &[]).unwrap() {
        Some((Message::Leases(page), _)) => page.leases.len(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn connections_during_a_restart_are_served() {
    let subject = Subject::host();
    let served = Served::start(Keeper::Own, &subject);
    let material = small(&subject, 1);
    let (raw, server) = served.greeted();
    put(&raw, &material, "a", false);
    let keeper = served.keeper();
    // A stopped keeper hands over nothing.
    kill(keeper, Signal::SIGSTOP).unwrap();
    kill(server, Signal::SIGKILL).unwrap();
    until(|| !is_alive(server));
    let waiting: Vec<Raw> = (0..100)
        .map(|_| {
            let raw = Raw::dial(&served.path).unwrap();
            raw.send(&Raw::hello(), &[]).unwrap();
            raw.send(&get_message("a"), &[]).unwrap();
            raw
        })
        .collect();
    kill(keeper, Signal::SIGCONT).unwrap();
    for raw in waiting {
        assert!(matches!(raw.receive().unwrap(), Some((Message::Hello(_), _))));
        let Some((Message::Lease(lease), fds)) = raw.receive().unwrap() else { panic!() };
        assert_eq!((lease.version, fds.len()), (1, 2));
    }
}

#[test]
fn unclaimed_leases_end_after_a_restart() {
    let subject = Subject::host();
    let served = Served::with(
        Keeper::Own,
        &subject,
        &binary("vmmfd"),
        &["--allow-uid", "34561", "--no-quota", "--time-limit", "resume=3s"],
    );
    fs::set_permissions(served.path.parent().unwrap(), fs::Permissions::from_mode(0o755)).unwrap();
    let (first, _) = served.greeted();
    put(&first, &small(&subject, 1), "a", false);
    let taken = lease(&first, "a");
    let left = lease(&first, "a");
    let (other, _) = served.greeted();
    let others = lease(&other, "a");
    served.kill_server();
    drop((first, other));
    let (raw, _) = served.greeted();
    // Another user can't resume these leases, even with the tokens.
    if nix::unistd::geteuid().is_root() {
        in_fork(|| {
            become_user(34561, 34561, &[]);
            let lost = resume(&Raw::greeted(&served.path).unwrap(), &[&taken, &left]).lost;
            lost == [taken.token, left.token]
        });
    }
    let unknown = ResumedLease { token: token(), id: String::new(), size: 1 };
    assert_eq!(resume(&raw, &[&taken, &unknown]).lost, [unknown.token]);
    let (second, _) = served.greeted();
    assert!(resume(&second, &[&others]).lost.is_empty());
    assert_eq!(leases(&raw), 2);
    // The lease `left` expires with the grace period.
    until(|| resume(&Raw::greeted(&served.path).unwrap(), &[&left]).lost == [left.token]);
    assert_eq!(listed(&raw), [("a".to_owned(), 1, 2)]);
    raw.send(&Message::Release(Release { token: taken.token }), &[]).unwrap();
    drop(second);
    until(|| leases(&raw) == 0);
}

#[test]
fn resumed_lease_keeps_an_unnamed_version() {
    let subject = Subject::host();
    let served = Served::with(Keeper::Own, &subject, &binary("vmmfd"), &["--time-limit", "resume=3s"]);
    let (raw, _) = served.greeted();
    put(&raw, &small(&subject, 1), "a", false);
    let old = lease(&raw, "a");
    put(&raw, &small(&subject, 2), "a", true);
    let deleted = lease(&raw, "a");
    let delete = Message::Delete(Delete { name: "a".to_owned(), request: None });
    assert!(matches!(raw.ask(&delete, &[]).unwrap(), Some((Message::Done(_), _))));
    // Closing a connection releases its resumed leases, so these connections are kept open until the server dies.
    let mut connections = vec![raw];
    for _ in 0..3 {
        let (server, _) = served.kill_server();
        let (raw, _) = served.greeted();
        assert!(resume(&raw, &[&old, &deleted]).lost.is_empty());
        assert!(listed(&raw).iter().all(|(name, ..)| name == "b"));
        put(&raw, &small(&subject, 3), "b", true);
        until(|| served.kept(server) == (6, 6));
        connections.push(raw);
    }
    let (server, _) = served.kill_server();
    let (raw, _) = served.greeted();
    assert!(resume(&raw, &[&deleted]).lost.is_empty());
    raw.send(&Message::Release(Release { token: deleted.token }), &[]).unwrap();
    // The other lease expires with the grace period.
    until(|| served.kept(server) == (2, 2));
    assert_eq!(listed(&raw), [("b".to_owned(), 3, 0)]);
}

/// A client that missed its answer repeats the request after another client's next request.
#[test]
fn repeated_requests_are_done_once() {
    let subject = Subject::host();
    let served = Served::start(Keeper::Own, &subject);
    let material = small(&subject, 1);
    let send = |raw: &Raw, name: &str, request: Token| {
        let put = broker::PutHeader { replace: true, request: Some(request), ..material.put(name) };
        match raw.ask(&Message::Put(Box::new(put)), &material.fds()).unwrap() {
            Some((Message::Published(published), _)) => published,
            other => panic!("{other:?}"),
        }
    };
    let delete = |raw: &Raw, name: &str, request: Token| {
        let delete = Message::Delete(Delete { name: name.to_owned(), request: Some(request) });
        assert!(matches!(raw.ask(&delete, &[]).unwrap(), Some((Message::Done(_), _))));
    };
    for killed in [false, true] {
        let (raw, _) = served.greeted();
        let [replaced, deleted, deletion] = [token(), token(), token()];
        let (first, second) = (send(&raw, "replaced", replaced), send(&raw, "deleted", deleted));
        let newest = put(&raw, &material, "replaced", true);
        delete(&raw, "deleted", deletion);
        if killed {
            served.kill_server();
        }
        let (raw, _) = served.greeted();
        // Repeat the requests as if their answers were lost.
        assert_eq!(send(&raw, "replaced", replaced), first);
        assert_eq!(send(&raw, "deleted", deleted), second);
        assert_eq!(listed(&raw), [("replaced".to_owned(), newest.version, 0)]);
        put(&raw, &material, "deleted", false);
        delete(&raw, "deleted", deletion);
        assert_eq!(listed(&raw).len(), 2);
        delete(&raw, "deleted", token());
    }
}

#[test]
fn requests_and_leases_survive_server_kill() {
    let subject = Subject::host();
    let served = Served::start(Keeper::Own, &subject);
    let connect = || Client::connect(&served.path, &Config::default().timeout(Duration::from_secs(100))).unwrap();
    let (client, other, waiter) = (connect(), connect(), connect());
    let (restored, notices) = mpsc::channel();
    client.on_restored(move |_, notice| restored.send(notice.rebuilt).unwrap_or_default());
    let memory = filled(&subject.driver, 4 * MIB, Some(2 * MIB), 7);
    let part = || PutPart::of("all", &memory).unwrap();
    client.put(&Put::new("a").part(part())).unwrap();
    client.put(&Put::new("mine").lifetime(Lifetime::Maker).part(part())).unwrap();
    let object = client.get(&Get::new("a")).unwrap().open(&subject.driver, None).unwrap();
    let get = Get::new("later").wait(Duration::from_secs(100));
    let waiting = thread::spawn(move || waiter.get(&get).unwrap().version());
    let held = || {
        let leases = other.who("a").unwrap().leases.into_iter();
        leases.map(|lease| (lease.id, lease.version, lease.size, lease.uid)).collect::<Vec<_>>()
    };
    let before = held();
    assert_eq!(before.len(), 1);
    let mut watch = other.watch("watched/", None).unwrap();
    for round in 0..3 {
        client.put(&Put::new(format!("watched/{round}")).part(part())).unwrap();
        served.kill_server();
        assert!(!notices.recv_timeout(Duration::from_secs(100)).unwrap() && object.is_held());
        assert_eq!(held(), before, "the same lease, and no other");
    }
    other.stat("mine", None).unwrap();
    client.put(&Put::new("watched/last").part(part())).unwrap();
    // A restarted server does not have the events before its start.
    let mut has_lost = false;
    loop {
        match watch.next(Duration::from_secs(100)).unwrap() {
            Some(Watched::Event(event)) if event.name == "watched/last" => break,
            Some(Watched::Event(_)) => {}
            Some(_) => has_lost = true,
            None => panic!("the event does not arrive"),
        }
    }
    assert!(has_lost);
    assert!(!waiting.is_finished());
    other.put(&Put::new("later").part(part())).unwrap();
    assert_eq!(waiting.join().unwrap(), 1);
    // Dropping the client releases the lease, and deletes the object whose lifetime is tied to its maker.
    drop((object, client));
    until(|| held().is_empty() && other.stat("mine", None).is_err());
}

fn readers_restore_lost_objects(mut subject: Subject) {
    subject.alone();
    let served = Served::start(Keeper::Own, &subject);
    let (raw, server) = served.greeted();
    let material = small(&subject, 5);
    for (name, replace) in [("a", false), ("a", true), ("unread", false)] {
        put(&raw, &material, name, replace);
    }
    // No client holds this token after the crash.
    let unread = lease(&raw, "unread");
    let instance = resume(&raw, &[]).instance;
    let clients = [(); 2].map(|()| Client::connect(&served.path, &Config::default()).unwrap());
    let leases = clients.each_ref().map(|client| client.get(&Get::new("a")).unwrap());
    let before = clients[0].stat("a", None).unwrap();
    served.kill_both();
    served.manager.start_again();
    served.wait_for_log("the previous broker, and its keeper if it had one, stopped", 1);
    served.wait_for_log(&format!("pid={server}"), 1);
    // The clients send no request: they reconnect because they hold leases.
    let (raw, server) = served.greeted();
    until(|| listed(&raw) == [("a".to_owned(), 2, 2)]);
    let resumed = resume(&raw, &[&unread]);
    assert_eq!((resumed.instance != instance, resumed.lost), (true, vec![unread.token]));
    assert_eq!(clients[0].stat("a", None).unwrap(), before);
    assert_eq!(value(&clients[1], &subject.driver, "a"), [5; 2]);
    until(|| leases.iter().all(|lease| lease.is_held()));
    until(|| served.kept(server) == (2, 2));
    drop(leases);
    until(|| listed(&raw) == [("a".to_owned(), 2, 0)]);
}
