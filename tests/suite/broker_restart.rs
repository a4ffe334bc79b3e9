//! A broker that survives the death of its server or its keeper, and an upgrade of its program.

use std::{
    fs,
    io::Write,
    os::unix::fs::{FileExt, PermissionsExt},
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use vmmfd::{
    broker::{Client, Get},
    session::Config,
    wire::broker::{self, Delete, Message, Published, Release, Resume, Resumed, Token, WatchHeader, Who},
};

use crate::{
    broker::{filled, until},
    broker_crashes::token,
    broker_faults::{Material, get, get_message, value},
    broker_process::{Raw, become_user},
    running::binary,
    support::{
        Inode, Subject, in_fork, open_files,
        served::{Keeper, Served, copied, is_alive},
    },
};

cases! {
    on crate::support::Subject; host and cuda: [
    connections_during_a_restart_are_served,
    killed_keepers_are_replaced,
    unclaimed_leases_end_after_a_restart,
    resumed_lease_keeps_an_unnamed_version,
    repeated_requests_are_done_once,
    events_go_on_across_a_restart,
    upgrade_loses_nothing,
    incompatible_program_is_refused,
    newer_catalogue_is_refused,
    death_of_both_starts_a_new_broker,
    reader_restores_lost_objects,
    waiting_get_survives_restarts,
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
fn lease(raw: &Raw, name: &str) -> (Token, Vec<Inode>) {
    match raw.ask(&get_message(name), &[]).unwrap() {
        Some((Message::Lease(lease), fds)) => (lease.token, fds.iter().map(Inode::of).collect()),
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn resume(raw: &Raw, leases: &[Token]) -> Resumed {
    match raw.ask(&Message::Resume(Resume { leases: leases.to_vec(), puts: Vec::new() }), &[]).unwrap() {
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

fn killed_keepers_are_replaced(mut subject: Subject) {
    subject.alone();
    let mut served = Served::start(Keeper::Own, &subject);
    let material = small(&subject, 1);
    let (raw, server) = served.greeted();
    put(&raw, &material, "a", false);
    // The keepers are killed faster than the server starts them: the server pauses, and works without a keeper in the meantime.
    for _ in 0..8 {
        served.kill_keeper();
    }
    assert_eq!(served.server(), server);
    let (next, _) = served.kill_server();
    assert_ne!(next, server);
    assert_eq!(listed(&served.greeted().0), [("a".to_owned(), 1, 0)]);
}

fn connections_during_a_restart_are_served(mut subject: Subject) {
    subject.alone();
    let served = Served::start(Keeper::Own, &subject);
    let material = small(&subject, 1);
    let (raw, server) = served.greeted();
    put(&raw, &material, "a", false);
    let keeper = served.keeper();
    // A stopped keeper starts no server.
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

fn unclaimed_leases_end_after_a_restart(mut subject: Subject) {
    subject.alone();
    let served = Served::with(
        Keeper::Own,
        &subject,
        &binary("vmmfd"),
        &["--allow-uid", "34561", "--no-quota", "--time-limit", "resume=3s"],
    );
    fs::set_permissions(served.path.parent().unwrap(), fs::Permissions::from_mode(0o755)).unwrap();
    let (first, _) = served.greeted();
    put(&first, &small(&subject, 1), "a", false);
    let (taken, _) = lease(&first, "a");
    let (left, _) = lease(&first, "a");
    let (other, _) = served.greeted();
    let (others, _) = lease(&other, "a");
    served.kill_server();
    drop((first, other));
    let (raw, _) = served.greeted();
    // Another user can't resume these leases, even with the tokens.
    if nix::unistd::geteuid().is_root() {
        in_fork(|| {
            become_user(34561, 34561, &[]);
            resume(&Raw::greeted(&served.path).unwrap(), &[taken, left]).lost == [taken, left]
        });
    }
    let unknown = token();
    assert_eq!(resume(&raw, &[taken, unknown]).lost, [unknown]);
    let (second, _) = served.greeted();
    assert!(resume(&second, &[others]).lost.is_empty());
    assert_eq!(leases(&raw), 3);
    // The lease `left` expires with the grace period.
    until(|| leases(&raw) == 2);
    assert_eq!(resume(&raw, &[left]).lost, [left]);
    assert_eq!(listed(&raw), [("a".to_owned(), 1, 2)]);
    raw.send(&Message::Release(Release { token: taken }), &[]).unwrap();
    drop(second);
    until(|| leases(&raw) == 0);
}

fn resumed_lease_keeps_an_unnamed_version(mut subject: Subject) {
    subject.alone();
    let served = Served::with(Keeper::Own, &subject, &binary("vmmfd"), &["--time-limit", "resume=3s"]);
    let (raw, _) = served.greeted();
    put(&raw, &small(&subject, 1), "a", false);
    let (old, _) = lease(&raw, "a");
    put(&raw, &small(&subject, 2), "a", true);
    let (deleted, _) = lease(&raw, "a");
    let delete = Message::Delete(Delete { name: "a".to_owned(), request: None });
    assert!(matches!(raw.ask(&delete, &[]).unwrap(), Some((Message::Done(_), _))));
    // Closing a connection releases its resumed leases, so these connections are kept open until the server dies.
    let mut connections = vec![raw];
    for _ in 0..3 {
        let (server, _) = served.kill_server();
        let (raw, _) = served.greeted();
        assert!(resume(&raw, &[old, deleted]).lost.is_empty());
        assert!(listed(&raw).iter().all(|(name, ..)| name == "b"));
        // New segments get other numbers.
        put(&raw, &small(&subject, 3), "b", true);
        until(|| served.kept(server) == (8, 8));
        connections.push(raw);
    }
    let (server, _) = served.kill_server();
    let (raw, _) = served.greeted();
    assert!(resume(&raw, &[deleted]).lost.is_empty());
    raw.send(&Message::Release(Release { token: deleted }), &[]).unwrap();
    // The other lease expires with the grace period.
    until(|| served.kept(server) == (4, 4));
    assert_eq!(listed(&raw), [("b".to_owned(), 3, 0)]);
}

/// A client that missed its answer repeats the request after another client's next request. The model search found this case.
fn repeated_requests_are_done_once(mut subject: Subject) {
    subject.alone();
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

fn events_go_on_across_a_restart(mut subject: Subject) {
    subject.alone();
    let served = Served::start(Keeper::Own, &subject);
    let material = small(&subject, 1);
    let (raw, _) = served.greeted();
    let watch = |after: Option<(u64, String)>| {
        let (after, instance) = after.map_or((None, None), |(after, instance)| (Some(after), Some(instance)));
        let (raw, _) = served.greeted();
        raw.send(&Message::Watch(WatchHeader { prefix: String::new(), after, instance }), &[]).unwrap();
        raw
    };
    let mut watcher = watch(None);
    let mut seen = Vec::new();
    let mut at = None;
    let mut read = |watcher: &Raw, count: usize, at: &mut Option<(u64, String)>| {
        while seen.len() < count {
            let Some((Message::Events(events), _)) = watcher.receive().unwrap() else { panic!() };
            assert!(!events.lost, "{events:?}");
            seen.extend(events.events.iter().map(|event| (event.seq, event.name.clone(), event.version)));
            *at = Some((events.next, events.instance));
        }
    };
    // Wait for the subscription before the first event.
    let mut expected = 0;
    for round in 1..=5 {
        let raw = if round == 1 { Raw::greeted(&served.path).unwrap() } else { served.greeted().0 };
        if round == 1 {
            let begun = Instant::now();
            // The first answer contains the start position.
            let Some((Message::Events(events), _)) = watcher.receive().unwrap() else { panic!() };
            assert!(events.events.is_empty(), "{events:?} after {:?}", begun.elapsed());
            at = Some((events.next, events.instance));
        }
        for name in ["x", "y"] {
            put(&raw, &material, name, true);
            expected += 1;
        }
        if round % 2 == 1 {
            read(&watcher, expected, &mut at);
        }
        served.kill_server();
        watcher = watch(at.clone());
    }
    let names: Vec<(String, u64)> = seen.iter().map(|(_, name, version)| (name.clone(), *version)).collect();
    let wanted = (1..=5).flat_map(|round| ["x", "y"].map(|name| (name.to_owned(), round)));
    assert_eq!(names, wanted.collect::<Vec<_>>());
    assert!(seen.windows(2).all(|pair| pair[0].0 < pair[1].0), "{seen:?}");
    drop(raw);
}

fn upgrade_loses_nothing(mut subject: Subject) {
    subject.alone();
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("vmmfd");
    copied(&binary("vmmfd"), &program);
    let served = Served::with(Keeper::Own, &subject, &program, &[]);
    let (raw, first) = served.greeted();
    put(&raw, &small(&subject, 1), "a", false);
    let (held, files) = lease(&raw, "a");
    let instance = resume(&raw, &[]).instance;
    let mut connections = vec![raw];
    let keeper = served.keeper();
    let image =
        |pid: Pid| fs::metadata(format!("/proc/{pid}/exe")).map(|file| std::os::unix::fs::MetadataExt::ino(&file));
    for _ in 0..3 {
        let before = served.server();
        copied(&binary("vmmfd"), &program);
        let new = fs::metadata(&program).map(|file| std::os::unix::fs::MetadataExt::ino(&file)).unwrap();
        kill(keeper, Signal::SIGHUP).unwrap();
        let (server, gap) = served.wait_for_another(before, Instant::now());
        eprintln!("an upgrade took {gap:?}");
        // The keeper is the same process and executes the new program, as does the new server.
        assert_eq!(served.keeper(), keeper);
        assert_eq!((image(keeper).unwrap(), image(server).unwrap()), (new, new));
        let (raw, _) = served.greeted();
        assert_eq!(resume(&raw, &[held]), Resumed { instance: instance.clone(), lost: Vec::new() });
        assert_eq!(lease(&raw, "a").1, files);
        until(|| served.kept(server) == (4, 4));
        connections.push(raw);
    }
    assert!(!is_alive(first));
    let (server, _) = served.kill_server();
    until(|| served.kept(server) == (4, 4));
}

fn incompatible_program_is_refused(mut subject: Subject) {
    subject.alone();
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("vmmfd");
    copied(&binary("vmmfd"), &program);
    let served = Served::with(Keeper::Own, &subject, &program, &[]);
    let (raw, server) = served.greeted();
    put(&raw, &small(&subject, 1), "a", false);
    let keeper = served.keeper();
    let mut refusals = 0;
    for (text, mode) in [("#!/bin/sh\nexit 3\n", 0o755), ("no program\n", 0o755), ("#!/bin/sh\nexit 0\n", 0o644)] {
        let beside = folder.path().join("other");
        fs::File::create(&beside).unwrap().write_all(text.as_bytes()).unwrap();
        fs::set_permissions(&beside, fs::Permissions::from_mode(mode)).unwrap();
        fs::rename(&beside, &program).unwrap();
        kill(keeper, Signal::SIGHUP).unwrap();
        refusals += 1;
        until(|| served.log().matches("not reloaded").count() == refusals);
        // The existing connection still works.
        assert_eq!(listed(&raw), [("a".to_owned(), 1, 0)]);
        assert_eq!((served.server(), served.keeper()), (server, keeper));
    }
    // A program that was removed.
    fs::remove_file(&program).unwrap();
    kill(keeper, Signal::SIGHUP).unwrap();
    until(|| served.log().matches("not reloaded").count() == refusals + 1);
    assert_eq!(listed(&raw), [("a".to_owned(), 1, 0)]);
    // A valid program afterwards.
    copied(&binary("vmmfd"), &program);
    kill(keeper, Signal::SIGHUP).unwrap();
    served.wait_for_another(server, Instant::now());
    assert_eq!(listed(&served.greeted().0), [("a".to_owned(), 1, 0)]);
}

fn newer_catalogue_is_refused(mut subject: Subject) {
    subject.alone();
    let served = Served::start(Keeper::Own, &subject);
    let (raw, server) = served.greeted();
    put(&raw, &small(&subject, 1), "a", false);
    let mut catalogues = open_files(server).unwrap();
    catalogues.retain(|file| file.link.to_string_lossy().starts_with("/memfd:vmmfd-catalogue"));
    let open = |path| fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
    let catalogues: Vec<fs::File> = catalogues.into_iter().map(|file| open(file.path)).collect();
    let header = |file: &fs::File| {
        let mut header = [0; 12];
        file.read_exact_at(&mut header, 0).ok().filter(|()| header.starts_with(b"VMMFDCAT")).map(|()| header)
    };
    let used: Vec<&fs::File> = catalogues.iter().filter(|file| header(file).is_some()).collect();
    assert_eq!((catalogues.len(), used.len()), (2, 1));
    let format = header(used[0]).unwrap()[8..].to_vec();
    used[0].write_all_at(&4711u32.to_le_bytes(), 8).unwrap();
    kill(served.keeper(), Signal::SIGHUP).unwrap();
    until(|| served.log().contains("not reloaded") && served.log().contains("4711"));
    assert_eq!(listed(&raw), [("a".to_owned(), 1, 0)]);
    assert_eq!(served.server(), server);
    used[0].write_all_at(&format, 8).unwrap();
    put(&raw, &small(&subject, 2), "a", true);
    kill(served.keeper(), Signal::SIGHUP).unwrap();
    served.wait_for_another(server, Instant::now());
    assert_eq!(listed(&served.greeted().0), [("a".to_owned(), 2, 0)]);
}

fn death_of_both_starts_a_new_broker(mut subject: Subject) {
    subject.alone();
    let mut served = Served::start(Keeper::Own, &subject);
    let (raw, server) = served.greeted();
    put(&raw, &small(&subject, 1), "a", false);
    let (held, _) = lease(&raw, "a");
    let instance = resume(&raw, &[]).instance;
    let keeper = served.keeper();
    kill(keeper, Signal::SIGSTOP).unwrap();
    kill(server, Signal::SIGKILL).unwrap();
    kill(keeper, Signal::SIGKILL).unwrap();
    served.reap();
    // A process's threads exit one by one, and its descriptors close with the last thread.
    until(|| Raw::dial(&served.path).is_err());
    served.start_again();
    let (raw, _) = served.greeted();
    let report = "the previous broker, and its keeper if it had one, stopped";
    // The log is written by another thread.
    until(|| served.log().contains(report) && served.log().contains(&format!("pid={server}")));
    let resumed = resume(&raw, &[held]);
    assert_ne!(resumed.instance, instance);
    assert_eq!(resumed.lost, [held]);
    assert!(listed(&raw).is_empty());
    let object = broker::GetHeader { wait_ms: None, ..get("a") };
    assert!(matches!(raw.ask(&Message::Get(Box::new(object)), &[]).unwrap(), Some((Message::Refused(_), _))));
}

fn reader_restores_lost_objects(mut subject: Subject) {
    subject.alone();
    let mut served = Served::start(Keeper::Own, &subject);
    let material = small(&subject, 5);
    let (raw, server) = served.greeted();
    let published = put(&raw, &material, "a", false);
    put(&raw, &material, "unread", false);
    let instance = resume(&raw, &[]).instance;
    let client = Client::connect(&served.path, &Config::default()).unwrap();
    let lease = client.get(&Get::new("a")).unwrap();
    let keeper = served.keeper();
    kill(keeper, Signal::SIGSTOP).unwrap();
    kill(server, Signal::SIGKILL).unwrap();
    kill(keeper, Signal::SIGKILL).unwrap();
    served.reap();
    until(|| Raw::dial(&served.path).is_err());
    served.start_again();
    // The client sends no request: it reconnects because it holds a lease.
    let (raw, server) = served.greeted();
    until(|| listed(&raw).len() == 1);
    assert_ne!(resume(&raw, &[]).instance, instance);
    let info = client.stat("a", None).unwrap().version.summary;
    assert_eq!((info.version, &info.id), (published.version, &published.id));
    assert_eq!(value(&client, &subject.driver, "a"), [5; 2]);
    until(|| lease.is_held());
    assert_eq!(listed(&raw), [("a".to_owned(), 1, 1)]);
    until(|| served.kept(server) == (4, 4));
    drop(lease);
    until(|| listed(&raw) == [("a".to_owned(), 1, 0)]);
}

fn waiting_get_survives_restarts(mut subject: Subject) {
    subject.alone();
    let served = Served::start(Keeper::Own, &subject);
    let config = Config::default().timeout(Duration::from_secs(60));
    let client = Client::connect(&served.path, &config).unwrap();
    let waiting = thread::spawn(move || {
        let lease = client.get(&Get::new("late").wait(Duration::from_secs(500))).unwrap();
        lease.version()
    });
    for _ in 0..5 {
        served.kill_server();
    }
    assert!(!waiting.is_finished());
    let (raw, _) = served.greeted();
    put(&raw, &small(&subject, 1), "late", false);
    assert_eq!(waiting.join().unwrap(), 1);
}
