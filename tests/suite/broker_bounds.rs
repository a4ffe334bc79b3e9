//! A hostile user's share of the broker: its memory is bounded, and other users are still served.

use std::{
    fs,
    os::fd::{AsFd, OwnedFd},
    thread,
    time::Duration,
};

use nix::{
    poll::{self, PollFd, PollFlags},
    sys::{
        ptrace::{self, Options},
        wait::{WaitPidFlag, waitpid},
    },
    unistd::Pid,
};
use serde_json::json;
use vmmfd::{
    broker::Client,
    error::RefusalCode,
    session::Config,
    wire::broker::{
        self, Attached, ClaimHeader, GetHeader, Lifetime, List, Message, Release, Table, Token, WatchHeader, Who,
    },
};

use crate::{
    broker::until,
    broker_pages::{Template, page},
    broker_process::{Raw, processor_time},
    running::binary,
    support::{
        Subject,
        material::{get, get_message},
        served::{Keeper, Served, stored},
    },
};

/// The connections of a hostile user.
const HOSTILE: usize = 20;

/// The name of the server's thread that closes memory.
const WORKER: &str = "worker";

/// The limit on a server's resident memory under attack, in KiB.
const MOST: u64 = 64 << 10;

fn serve(options: &[&str]) -> Served {
    Served::with(Keeper::Own, &Subject::host(), &binary("vmmfd"), options)
}

/// Puts many versions of one page.
struct Maker {
    raw: Raw,
    put: broker::PutHeader,
    page: OwnedFd,
}

impl Maker {
    fn new(served: &Served) -> Self {
        let (mut put, _) = Template::new().raw_put("a", 0, true);
        put.metadata = None;
        Self { raw: served.greeted().0, put, page: page(0) }
    }

    fn put(&mut self, name: &str) -> Message {
        name.clone_into(&mut self.put.name);
        self.raw.send(&Message::Put(Box::new(self.put.clone())), &[self.page.as_fd()]).unwrap();
        self.raw.receive().unwrap().unwrap().0
    }

    #[track_caller]
    fn publish(&mut self, name: &str) {
        let answer = self.put(name);
        assert!(matches!(answer, Message::Published(_)), "{answer:?}");
    }
}

/// Sends a request whose answer is one record.
#[track_caller]
fn ask(raw: &Raw, message: &Message) -> Message {
    raw.ask(message, &[]).unwrap().expect("the broker ended the connection").0
}

#[track_caller]
fn lease(raw: &Raw, name: &str) -> Token {
    match ask(raw, &get_message(name)) {
        Message::Lease(lease) => lease.token,
        other => panic!("{other:?}"),
    }
}

/// A field of `/proc/PID/status`, in KiB.
#[track_caller]
fn status(pid: Pid, field: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(field)).unwrap();
    line.trim_start_matches(':').trim().strip_suffix(" kB").unwrap().parse().unwrap()
}

#[track_caller]
fn assert_bounded(pid: Pid) {
    let most = status(pid, "VmHWM");
    eprintln!("{most} KiB at most");
    assert!(most <= MOST, "{most} KiB");
}

/// The CPU time that the server spends on `work`.
fn cost(pid: Pid, work: impl FnOnce()) -> u64 {
    let before = processor_time(pid);
    work();
    processor_time(pid) - before
}

#[track_caller]
fn refused(answer: &Message) -> (RefusalCode, &str) {
    match answer {
        Message::Refused(refusal) => (refusal.code, &refusal.message),
        other => panic!("{other:?}"),
    }
}

mod memory {
    use super::*;

    #[test]
    fn claims_are_bounded() {
        let served = serve(&[]);
        let server = served.server();
        let connections: Vec<Raw> = (0..HOSTILE).map(|_| served.greeted().0).collect();
        let claim = |raw: &Raw, name: String| {
            let get = GetHeader { claim: Some(ClaimHeader { part: None, group: None }), ..get(&name) };
            ask(raw, &Message::Get(Box::new(get)))
        };
        let mut granted = 0;
        for (at, raw) in connections.iter().enumerate() {
            // Claim until the broker refuses, up to far more claims than it should grant.
            let name = |number: usize| format!("{at:03}/{number:0>200}");
            let refusal = (0..10_000).map(|number| claim(raw, name(number))).find(|answer| {
                granted += 1;
                !matches!(answer, Message::Claimed(_))
            });
            let Some(refusal) = refusal else { continue };
            let (code, message) = refused(&refusal);
            assert_eq!(code, RefusalCode::Quota, "{message}");
            assert!(message.contains("256 claims") || message.contains("4096 claims"), "{message}");
        }
        eprintln!("{granted} claims");
        assert_bounded(server);
        // Closed connections no longer count.
        drop(connections);
        let raw = served.greeted().0;
        raw.until_connections(1);
        for number in 0..200 {
            assert!(matches!(claim(&raw, format!("again/{number}")), Message::Claimed(_)));
        }
    }

    #[test]
    fn reports_are_bounded() {
        let served = serve(&[]);
        let (mut maker, raw) = (Maker::new(&served), served.greeted().0);
        let names: Vec<String> = (0..70).map(|name| name.to_string()).collect();
        for name in &names {
            maker.publish(name);
            let token = lease(&raw, name);
            let length = if name == "0" { 60_000 } else { 1 };
            for report in 0..17 {
                // Written by hand: the library shortens its messages.
                let body = json!({"token": token, "message": format!("{report} {}", "x".repeat(length))}).to_string();
                raw.send_bytes(&record(48, &body), &[]).unwrap();
            }
        }
        raw.measured();
        let client = Client::connect(&served.path, &Config::default()).unwrap();
        let reports: Vec<_> = names.iter().map(|name| client.stat(name, None).unwrap().version.reports).collect();
        assert_eq!((reports[0].len(), reports.iter().flatten().count()), (16, 1024));
        assert!(reports[0].iter().all(|report| (200..270).contains(&report.message.len())), "{:?}", reports[0]);
    }

    /// A record as a client without our library writes it.
    fn record(kind: u16, body: &str) -> Vec<u8> {
        let mut record = b"VMFD\x01\0".to_vec();
        record.extend(kind.to_le_bytes());
        record.extend((body.len() as u32).to_le_bytes());
        record.extend(0u32.to_le_bytes());
        record.extend(body.as_bytes());
        record
    }

    #[test]
    fn unread_answers_are_bounded() {
        let served = serve(&["--timeout", "60s"]);
        let server = served.server();
        let mut maker = Maker::new(&served);
        (0..150).for_each(|number| maker.publish(&format!("{number:0>250}")));
        let connections: Vec<Raw> = (0..2 * HOSTILE).map(|_| served.greeted().0).collect();
        let list = Message::List(List::default());
        for raw in &connections {
            raw.0.set_nonblocking(true).unwrap();
            // Until the socket is full, or the pending answers reach the broker's limit.
            let asked = (0..60).take_while(|_| raw.send(&list, &[]).is_ok()).count();
            assert!(asked > 4, "{asked}");
        }
        // Once the server is idle, it has read every request that it accepts.
        until(|| cost(server, || thread::sleep(Duration::from_millis(100))) < 1_000_000);
        // Other clients are served, and so is a blocked client once it reads.
        let other = served.greeted().0;
        assert!(matches!(ask(&other, &list), Message::Objects(_)));
        assert_bounded(server);
        let raw = &connections[0];
        raw.0.set_nonblocking(false).unwrap();
        for _ in 0..10 {
            assert!(matches!(raw.receive().unwrap(), Some((Message::Objects(_), _))));
        }
    }

    #[test]
    fn requests_that_wait_are_bounded() {
        let served = serve(&[]);
        let server = served.server();
        let mut wait = get(&"a".repeat(250));
        wait.wait_ms = Some(600_000);
        // Each part takes ten times its length once parsed.
        wait.objects[0].parts = Some((0..900).map(|part| (part.to_string(), Vec::new())).collect());
        wait.objects.resize(64, get(&"b".repeat(250)).objects.remove(0));
        let connections: Vec<Raw> = (0..4 * HOSTILE).map(|_| served.greeted().0).collect();
        for raw in &connections {
            raw.send(&Message::Get(Box::new(wait.clone())), &[]).unwrap();
        }
        let raw = served.greeted().0;
        raw.measured();
        assert_bounded(server);
        // The request that was read last was refused, and its connection remains usable.
        until(|| connections.iter().any(has_answer));
        let last = connections.iter().find(|raw| has_answer(raw)).unwrap();
        let answer = last.receive().unwrap().unwrap().0;
        let (code, message) = refused(&answer);
        assert_eq!(code, RefusalCode::Quota, "{message}");
        assert!(message.contains("the limit is 16 MiB"), "{message}");
        assert!(matches!(ask(last, &Message::List(List::default())), Message::Objects(_)));
        // A short wait works again once the other connections are closed.
        drop(connections);
        raw.until_connections(1);
        let waits = GetHeader { wait_ms: Some(1), ..get("absent") };
        let answer = ask(&raw, &Message::Get(Box::new(waits)));
        assert_eq!(refused(&answer).0, RefusalCode::Timeout);
    }

    #[test]
    fn objects_load_within_serving_memory() {
        let served = serve(&[]);
        let old = served.server();
        let mut maker = Maker::new(&served);
        let note = "x".repeat(3800);
        maker.put.metadata = Some(Table::Inline(Attached::of(&json!({"note": note})).unwrap()));
        maker.put.keep = Some(64);
        let names: Vec<String> = (0..20).map(|name| format!("{name}")).collect();
        for _ in 0..66 {
            names.iter().for_each(|name| maker.publish(name));
        }
        let served_in = status(old, "VmHWM");
        let (new, _) = served.kill_server();
        let loaded_in = status(new, "VmHWM");
        eprintln!("{served_in} KiB while serving, {loaded_in} KiB while loading");
        // The live versions alone have 5 MiB of metadata.
        assert!(loaded_in <= served_in + 2048, "{served_in} KiB while serving, {loaded_in} KiB while loading");
        assert_eq!(served.greeted().0.measured().versions, 20 * 65);
    }
}

fn has_answer(raw: &Raw) -> bool {
    has_answer_within(raw, 0)
}

fn has_answer_within(raw: &Raw, milliseconds: u16) -> bool {
    poll::poll(&mut [PollFd::new(raw.as_fd(), PollFlags::POLLIN)], milliseconds).unwrap() > 0
}

/// The thread that closes replaced memory is stopped. The event loop goes on.
#[test]
fn puts_wait_for_closing_replaced_memory() {
    let served = serve(&[]);
    let server = served.server();
    let mut maker = Maker::new(&served);
    maker.publish("a");
    let worker = || {
        let threads = fs::read_dir(format!("/proc/{server}/task")).unwrap().map(|task| task.unwrap().path());
        threads.filter(|path| fs::read_to_string(path.join("comm")).unwrap().starts_with(WORKER)).last()
    };
    // A thread names itself once it runs.
    until(|| worker().is_some());
    let worker = worker().unwrap();
    let worker = Pid::from_raw(worker.file_name().unwrap().to_str().unwrap().parse().unwrap());
    ptrace::seize(worker, Options::empty()).unwrap();
    ptrace::interrupt(worker).unwrap();
    waitpid(worker, Some(WaitPidFlag::__WALL)).unwrap();
    let before = stored(server);
    let mut answers = 0;
    while answers < 500 {
        maker.page = page(0);
        maker.raw.send(&Message::Put(Box::new(maker.put.clone())), &[maker.page.as_fd()]).unwrap();
        if !has_answer_within(&maker.raw, 500) {
            break;
        }
        assert!(matches!(maker.raw.receive().unwrap(), Some((Message::Published(_), _))));
        answers += 1;
    }
    let held = stored(server) - before;
    ptrace::detach(worker, None).unwrap();
    assert!((256..360).contains(&answers) && held < 360, "{answers} answers, {held} more descriptors");
    assert!(matches!(maker.raw.receive().unwrap(), Some((Message::Published(_), _))));
}

#[test]
fn kept_versions_count_as_objects() {
    let served = serve(&["--quota", "objects=10"]);
    let mut maker = Maker::new(&served);
    maker.put.keep = Some(64);
    (0..10).for_each(|_| maker.publish("a"));
    for name in ["a", "b"] {
        let answer = maker.put(name);
        let (code, message) = refused(&answer);
        assert_eq!(code, RefusalCode::Quota, "{message}");
        assert!(message.contains("has 10 objects") && message.contains("its quota is 10"), "{message}");
    }
    // A replacement that keeps fewer versions frees quota.
    maker.put.keep = Some(3);
    maker.publish("a");
    maker.publish("b");
    assert_eq!(maker.raw.measured().versions, 5);
    served.kill_server();
    let mut maker = Maker::new(&served);
    (0..5).for_each(|number| maker.publish(&format!("c{number}")));
    assert_eq!(refused(&maker.put("d")).0, RefusalCode::Quota);
}

/// Each lease holds another version of the same name.
#[test]
fn ending_leases_takes_linear_time() {
    let _turn = crate::support::cpu_turn();
    let served = serve(&[]);
    let server = served.server();
    let mut maker = Maker::new(&served);
    let other = served.greeted().0;
    let mut end = |count: usize| {
        let reader = served.greeted().0;
        for _ in 0..count {
            maker.publish("a");
            lease(&reader, "a");
        }
        cost(server, || {
            drop(reader);
            until(|| other.measured().leases == 0);
        })
    };
    let (few, many) = (end(100), end(1000));
    assert!(many < 30 * few, "{few} ns for 100 leases, {many} ns for 1000");
}

/// Another client polls the leases and names of a closed connection while the server releases them. On a busy machine the server may release
/// all of them before the client runs again, so several attempts may be needed.
#[test]
fn others_are_served_while_leases_end() {
    let _turn = crate::support::cpu_turn();
    let served = serve(&[]);
    let mut maker = Maker::new(&served);
    maker.publish("a");
    let other = served.greeted().0;
    let sees_leases = || {
        let reader = served.greeted().0;
        for _ in 0..1500 {
            lease(&reader, "a");
        }
        drop(reader);
        let mut seen = Vec::new();
        while seen.last() != Some(&0) {
            let measured = other.measured();
            seen.push(measured.leases);
            assert!(measured.connections >= 2);
        }
        seen.iter().any(|leases| (1..1500).contains(leases))
    };
    assert!((0..10).any(|_| sees_leases()));
    // Names that are deleted with their maker.
    let sees_names = || {
        let mut maker = Maker::new(&served);
        maker.put.lifetime = Some(Lifetime::Maker);
        (0..800).for_each(|number| maker.publish(&format!("{number}")));
        drop(maker);
        let mut seen = Vec::new();
        while seen.last() != Some(&1) {
            seen.push(other.measured().objects);
        }
        seen.iter().any(|names| (2..800).contains(names))
    };
    assert!((0..10).any(|_| sees_names()));
}

/// Watchers of other names cost a get nothing; watchers of its name some microseconds each, in a debug build.
#[test]
fn idle_watchers_delay_no_get() {
    let _turn = crate::support::cpu_turn();
    let served = serve(&["--timeout", "600s"]);
    let server = served.server();
    Maker::new(&served).publish("a");
    let reader = served.greeted().0;
    let gets = || {
        for _ in 0..100 {
            let token = lease(&reader, "a");
            reader.send(&Message::Release(Release { token }), &[]).unwrap();
        }
    };
    let alone = cost(server, gets);
    let mut watchers = Vec::new();
    for (prefix, factor) in [("other/", 3), ("", 200)] {
        let watch = Message::Watch(WatchHeader { prefix: prefix.to_owned(), ..WatchHeader::default() });
        for _ in 0..1000 {
            let raw = served.greeted().0;
            assert!(matches!(ask(&raw, &watch), Message::Events(_)));
            watchers.push(raw);
        }
        let watched = cost(server, gets);
        eprintln!("{alone} ns alone, {watched} ns with 1000 watchers of {prefix:?}");
        assert!(watched < factor * alone, "{alone} ns alone, {watched} ns with 1000 watchers of {prefix:?}");
    }
}

mod root {
    use super::*;
    use crate::{broker_process::become_user, support::in_fork};

    const OTHER: u32 = 45671;

    /// The server's CPU time for 50 requests of a user without read access.
    fn cost_for_other(served: &Served, request: &Message) -> u64 {
        let server = served.server();
        cost(server, || {
            in_fork(|| {
                become_user(OTHER, OTHER, &[]);
                let raw = Raw::greeted(&served.path).unwrap();
                (0..50).for_each(|_| drop(ask(&raw, request)));
                true
            });
        })
    }

    #[test]
    #[ignore = "needs root: make test-all runs it as root"]
    fn hidden_names_cost_others_nothing() {
        let uid = OTHER.to_string();
        let served = serve(&["--allow-uid", &uid, "--quota", "connections=100"]);
        fs::set_permissions(served.path.parent().unwrap(), std::os::unix::fs::PermissionsExt::from_mode(0o755))
            .unwrap();
        let mut maker = Maker::new(&served);
        let reader = served.greeted().0;
        let mut add = |from: usize, to: usize| {
            for number in from..to {
                let name = format!("{number}");
                maker.publish(&name);
                lease(&reader, &name);
            }
        };
        let requests = [Message::List(List::default()), Message::Who(Who { prefix: String::new(), after: None })];
        add(0, 200);
        let few = requests.each_ref().map(|request| cost_for_other(&served, request));
        add(200, 4000);
        let many = requests.each_ref().map(|request| cost_for_other(&served, request));
        eprintln!("{few:?} ns with 200, {many:?} ns with 4000");
        for (few, many) in few.iter().zip(many) {
            assert!(many < 5 * few, "{few} ns with 200 hidden objects, {many} ns with 4000");
        }
    }
}
