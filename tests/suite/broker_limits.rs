//! A broker at its limits: clients that do not read, descriptors in flight, exhausted descriptors, thousands of connections.

use std::{
    fs::File,
    os::{
        fd::{AsFd, BorrowedFd},
        unix::fs::FileExt,
    },
    thread,
    time::{Duration, Instant},
};

use nix::{
    poll::{self, PollFd, PollFlags, PollTimeout},
    sys::resource::{Resource, getrlimit, setrlimit},
};
use vmmfd::{
    Error,
    broker::{Client, Condition, Get, Lifetime, Put, PutPart, ServerConfig},
    driver::Driver,
    error::{ErrorCode, PeerError, RefusalCode},
    session::Config,
    wire::{
        MAX_FDS, Received, Segments,
        broker::{self, List, Message, Release, Stat},
    },
};

use crate::{
    broker::{Broker, filled, refused, until},
    broker_pages::{PAGE, Template, number, page},
    broker_process::{Process, Raw, Setup},
    support::material::{Material, get, get_message},
    support::{Inode, Subject, in_child},
};

const MIB: u64 = 1 << 20;

/// Puts an object whose segments all share one file.
pub(crate) fn put_segments(client: &Client, driver: &Driver, name: &str, segments: usize) {
    let material = Material::of(&filled(driver, 2 * MIB, None, 1)).repeated(segments);
    client.put(&Put::new(name).mode(0o644).part(material.part())).unwrap();
}

#[test]
fn unread_client_is_disconnected() {
    let subject = Subject::host();
    let server = Process::start(Setup { timeout_ms: 300, ..Setup::of(&subject) });
    let client = server.client();
    put_segments(&client, &subject.driver, "a", 3);
    // This client does not read its lease.
    let leased = Raw::greeted(&server.path).unwrap();
    leased.send(&Message::Get(Box::new(get("a"))), &[]).unwrap();
    // Another client is served at the same time.
    for _ in 0..20 {
        client.get(&Get::new("a")).unwrap();
    }
    // This client sends requests until its socket is full.
    let asking = Raw::greeted(&server.path).unwrap();
    asking.0.set_nonblocking(true).unwrap();
    let list = Message::List(List::default());
    let asked = (0..).take_while(|_| asking.send(&list, &[]).is_ok()).count();
    let mut served = 0;
    let begun = Instant::now();
    while server.log().matches("that does not read its records").count() < 2 {
        assert!(begun.elapsed() < Duration::from_secs(60), "{}", server.log());
        client.get(&Get::new("a")).unwrap();
        served += 1;
    }
    eprintln!("{asked} requests without a look at the answers; {served} gets of another client meanwhile");
    assert!(asked > 64);
    for raw in [leased, asking] {
        raw.0.set_nonblocking(false).unwrap();
        raw.ending();
    }
    server.wait_for_ends(&client);
    assert!(client.who("").unwrap().leases.is_empty());
}

#[test]
fn descriptor_limit_refuses_puts_and_connections_early() {
    let subject = Subject::host();
    let files = 600;
    let server = Process::start(Setup { files, timeout_ms: 60_000, ..Setup::of(&subject) });
    let client = server.client();
    let keep = |name: &str| {
        // Each part has its own file.
        let memory: Vec<_> = (0..40).map(|_| filled(&subject.driver, PAGE, None, 1)).collect();
        let parts = memory.iter().zip(0..).map(|(memory, at)| PutPart::of(format!("p{at}"), memory).unwrap());
        client.put(&parts.fold(Put::new(name), Put::part))
    };
    keep("one").unwrap();
    until(|| server.memory_files() == 40);
    let before = server.files();
    // The put needs more descriptors than are left. Only its first record is sent.
    let shared = filled(&subject.driver, 2 * MIB, None, 1);
    let material = Material::of(&shared).repeated(MAX_FDS + 1);
    let raw = Raw::greeted(&server.path).unwrap();
    let fds = material.fds();
    let answer = raw.ask(&Message::Put(Box::new(material.put("many"))), &fds[..MAX_FDS]).unwrap();
    let Some((Message::Refused(refusal), _)) = answer else { panic!("{answer:?}") };
    assert_eq!(refusal.code, RefusalCode::Full);
    assert!(refusal.message.contains("its limit is 600"), "{}", refusal.message);
    assert!(refusal.message.contains("needs 254 more descriptors"), "{}", refusal.message);
    drop(raw);
    until(|| server.files() == before);
    // Put objects until the broker is full.
    let mut kept = 1;
    let last = loop {
        match keep(&format!("more/{kept}")) {
            Ok(_) => kept += 1,
            other => break refused(other),
        }
    };
    assert_eq!(last.0, RefusalCode::Full, "{}", last.1);
    assert!((4..8).contains(&kept), "{kept} objects");
    // Then open connections until the broker refuses one.
    let mut connections = Vec::new();
    let refusal = loop {
        match Client::connect(&server.path, &Config::default()) {
            Ok(client) => connections.push(client),
            Err(error) => break error,
        }
        assert!(connections.len() < files as usize, "more connections than descriptors");
    };
    match &refusal {
        Error::Peer(PeerError::Reported { code: ErrorCode::Full, message }) => {
            assert!(message.contains("needs 1 more descriptors") && message.contains("its limit is 600"), "{message}");
        }
        other => panic!("{other:?}"),
    }
    assert!(!connections.is_empty());
    // Existing connections still work, and each lease gets all its descriptors.
    for client in connections.iter().chain([&client]) {
        assert_eq!(client.get(&Get::new("one")).unwrap().parts().len(), 40);
    }
    drop(connections);
    client.delete("one").unwrap();
    server.wait_for_ends(&client);
    until(|| keep("again").is_ok());
    Client::connect(&server.path, &Config::default()).unwrap().list("").unwrap();
}

#[test]
fn early_release_stops_remaining_segments() {
    let subject = Subject::host();
    let server = Process::start(Setup::of(&subject));
    let client = server.client();
    put_segments(&client, &subject.driver, "a", MAX_FDS + 1);
    let raw = Raw::greeted(&server.path).unwrap();
    let Ok(Some((Message::Lease(lease), _))) = raw.ask(&Message::Get(Box::new(get("a"))), &[]) else { panic!() };
    client.delete("a").unwrap();
    raw.send(&Message::Release(Release { token: lease.token }), &[]).unwrap();
    // A late acknowledgement must not send the memory that replaced the released memory.
    until(|| server.memory_files() == 0 || raw_has_ended(&raw));
    put_segments(&client, &subject.driver, "another", 1);
    let acknowledged = raw.send(&Message::Received(Received { segments: MAX_FDS as u64 }), &[]);
    match (acknowledged, raw.receive()) {
        (_, Ok(Some((Message::Error(failure), _)))) => assert_eq!(failure.code, ErrorCode::Protocol, "{failure:?}"),
        other => panic!("{other:?}"),
    }
    until(|| client.who("").unwrap().leases.is_empty());
    assert_eq!(client.list("").unwrap().len(), 1);
}

/// Quotas do not count memory without a name.
#[test]
fn puts_wait_for_released_memory() {
    const SEGMENTS: usize = 60;
    let server = Process::start(Setup::of(&Subject::host()));
    let template = Template::new();
    let raws: Vec<Raw> = (0..10).map(|_| Raw::greeted(&server.path).unwrap()).collect();
    let send_put = |raw: &Raw, name: &str, pages: usize| {
        let pages: Vec<_> = (0..pages).map(|_| page(1)).collect();
        let fds: Vec<_> = pages.iter().map(AsFd::as_fd).collect();
        raw.send(&Message::Put(Box::new(template.put_of_pages(name, pages.len()))), &fds).unwrap();
    };
    let assert_published = |raw: &Raw| {
        let answer = raw.receive().unwrap();
        assert!(matches!(answer, Some((Message::Published(_), _))), "{answer:?}");
    };
    let large = ["large/0", "large/1", "large/2"];
    for name in large {
        send_put(&raws[0], name, 2 * SEGMENTS);
        assert_published(&raws[0]);
    }
    let [deletes, measures] = [(); 2].map(|()| Raw::greeted(&server.path).unwrap());
    let before = measures.measured().descriptors.used;
    // The broker handles the deletes and the puts in one turn of its event loop.
    server.while_stopped(|| {
        for name in large {
            deletes.send(&Message::Delete(broker::Delete { name: name.to_owned(), request: None }), &[]).unwrap();
        }
        raws.iter().enumerate().for_each(|(at, raw)| send_put(raw, &format!("small/{at}"), SEGMENTS));
        measures.send(&Message::Measure(broker::Measure {}), &[]).unwrap();
    });
    let Some((Message::Measured(measured), _)) = measures.receive().unwrap() else { panic!() };
    let most = measured.descriptors.used;
    assert!(most <= before + 2 * SEGMENTS as u64, "{most} descriptors, and {before} before");
    raws.iter().for_each(assert_published);
}

fn raw_has_ended(raw: &Raw) -> bool {
    let mut poll = [PollFd::new(raw.as_fd(), PollFlags::POLLIN)];
    poll::poll(&mut poll, PollTimeout::ZERO).unwrap() > 0
}

/// An object is deleted while the reply about its metadata waits for a client that does not read.
#[test]
fn delayed_stat_shows_the_state_requested() {
    let subject = Subject::host();
    let server = Process::start(Setup::of(&subject));
    let client = server.client();
    let memory = filled(&subject.driver, MIB, None, 1);
    let put = |note: char| {
        let metadata = serde_json::json!({"note": note.to_string().repeat(100_000)});
        let put = Put::new("a").metadata(metadata.as_object().unwrap().clone());
        client.put(&put.part(PutPart::of("all", &memory).unwrap())).unwrap();
    };
    // A page of these names fills a record, and a few records fill a socket.
    for at in 0..150 {
        let put = Put::new(format!("many/{at:0200}")).part(PutPart::of("all", &memory).unwrap());
        client.put(&put).unwrap();
    }
    let list = Message::List(List { prefix: "many/".to_owned(), after: None });
    let mut of_before = 0;
    // With some of these counts the socket is full just before the reply about the object.
    for lists in 1..=8 {
        put('x');
        let raw = Raw::greeted(&server.path).unwrap();
        for _ in 0..lists {
            raw.send(&list, &[]).unwrap();
        }
        raw.send(&Message::Stat(Stat { name: "a".to_owned(), version: None }), &[]).unwrap();
        // The broker handles the stat request before these later connections, unless the socket is full already.
        for _ in 0..3 {
            server.client();
        }
        client.delete("a").unwrap();
        put('y');
        for _ in 0..lists {
            let answer = raw.receive().unwrap();
            assert!(matches!(answer, Some((Message::Objects(_), _))), "{answer:?}");
        }
        let Ok(Some((Message::Version(_), fds))) = raw.receive() else { panic!() };
        let mut text = [0; 12];
        File::from(fds.into_iter().next().unwrap()).read_exact_at(&mut text, 0).unwrap();
        assert!(matches!(&text, b"{\"note\":\"xxx" | b"{\"note\":\"yyy"), "{}", text.escape_ascii());
        of_before += usize::from(text[9] == b'x');
        client.delete("a").unwrap();
    }
    // Both cases occurred: the reply waited in some rounds and not in others.
    assert!((1..8).contains(&of_before), "{of_before}");
}

/// `VMMFD_TEST_CONNECTIONS=10000` for as many as a user's default quota.
#[test]
fn each_of_many_connections_is_served() {
    let _turn = crate::support::cpu_turn();
    let told = in_child(
        "broker_limits::each_of_many_connections_is_served",
        |_| {},
        || {
            let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
            setrlimit(Resource::RLIMIT_NOFILE, hard, hard).unwrap();
            let wanted = number("VMMFD_TEST_CONNECTIONS", 500).min(hard.saturating_sub(1000)) as usize;
            let subject = Subject::host();
            let server = Process::start(Setup { timeout_ms: 600_000, ..Setup::of(&subject) });
            let client = server.client();
            put_segments(&client, &subject.driver, "a", 1);
            let connections: Vec<Raw> = (0..wanted).map(|_| Raw::greeted(&server.path).unwrap()).collect();
            let totals = client.who("").unwrap().totals;
            assert_eq!(totals[0].connections as usize, wanted + 1);
            // Each client gets a lease; the last connection asks first.
            for raw in connections.iter().rev() {
                let answer = raw.ask(&Message::Get(Box::new(get("a"))), &[]).unwrap();
                assert!(matches!(answer, Some((Message::Lease(_), _))), "{answer:?}");
            }
            assert_eq!(client.list("").unwrap()[0].leases as usize, wanted);
            assert_eq!(client.who("").unwrap().leases.len(), wanted);
            let resident = server.resident();
            // All clients wait for one object and get it.
            for raw in &connections {
                let get = broker::GetHeader { wait_ms: Some(600_000), ..get("b") };
                raw.send(&Message::Get(Box::new(get)), &[]).unwrap();
            }
            put_segments(&client, &subject.driver, "b", 1);
            for raw in &connections {
                let answer = raw.receive().unwrap();
                assert!(matches!(answer, Some((Message::Lease(_), _))), "{answer:?}");
            }
            drop(connections);
            server.wait_for_ends(&client);
            assert!(client.who("").unwrap().leases.is_empty());
            format!(
                "{wanted} connections, {resident} KiB resident with a lease each; the limit of open files is {hard}"
            )
        },
    );
    eprintln!("{told}");
}

#[test]
fn waiting_parts_are_bounded_as_one_version() {
    let subject = Subject::host();
    let server = Process::start(Setup { quota: [Some(40 * MIB), None, None, None], ..Setup::of(&subject) });
    let client = server.client();
    let shared = filled(&subject.driver, 2 * MIB, None, 1);
    let waiting = |name: &str, part: &str, segments: usize| {
        let material = Material::of(&shared).repeated(segments);
        let raw = Raw::greeted(&server.path).unwrap();
        let mut put = material.put(name);
        part.clone_into(&mut put.parts[0].name);
        put.announced = ["a", "b", "c"].map(str::to_owned).into();
        (put.group, put.wait_ms) = (Some("g".to_owned()), Some(600_000));
        let fds: Vec<BorrowedFd<'_>> = material.fds();
        raw.send(&Message::Put(Box::new(put)), &fds).unwrap();
        raw
    };
    // Pending puts under two names hold 16 MiB each: 8 MiB of the quota remain.
    let one = waiting("x", "a", 8);
    let two = waiting("y", "a", 8);
    until(|| server.memory_files() == 16);
    let more = waiting("x", "b", 5);
    let Ok(Some((Message::Refused(refusal), _))) = more.receive() else { panic!() };
    assert_eq!(refusal.code, RefusalCode::Quota, "{}", refusal.message);
    assert!(refusal.message.contains("has 32 MiB (claimed)"), "{}", refusal.message);
    assert!(refusal.message.contains("its quota is 40 MiB"), "{}", refusal.message);
    // Closed connections no longer count.
    drop(two);
    server.wait_for_others(&client, 2);
    let more = waiting("x", "b", 5);
    let last = waiting("x", "c", 5);
    for raw in [one, more, last] {
        let answer = raw.receive().unwrap();
        assert!(matches!(answer, Some((Message::Published(_), _))), "{answer:?}");
    }
    let put = Put::new("z").condition(Condition::New).part(PutPart::of("all", &shared).unwrap());
    client.put(&put).unwrap();
    assert_eq!(
        refused(
            client.put(&Put::new("zz").part(PutPart::of("all", &filled(&subject.driver, 4 * MIB, None, 1)).unwrap()))
        )
        .0,
        RefusalCode::Quota
    );
}

mod root {
    use super::*;
    use crate::{
        broker_process::{become_user, connect},
        support::in_fork,
    };

    const SERVER: u32 = 23456;
    const OTHER: u32 = 23458;

    /// The kernel limits descriptors in flight for each user, here the server's. Privileged processes are exempt.
    #[test]
    #[ignore = "needs root: make test-all runs it as root"]
    fn idle_clients_leave_descriptors_for_others() {
        let subject = Subject::host();
        // With a long timeout, the idle connections stay. With a short one, the broker closes them, and their descriptors are still in flight.
        for timeout_ms in [600_000, 300] {
            let allow_uids = vec![OTHER, 0];
            let server =
                Process::start(Setup { files: 2000, user: SERVER, timeout_ms, allow_uids, ..Setup::of(&subject) });
            let client = server.client();
            put_segments(&client, &subject.driver, "a", 200);
            // 6,000 descriptors, three times the kernel's limit.
            let ask = |_| {
                let raw = Raw::greeted(&server.path).unwrap();
                raw.send(&get_message("a"), &[]).unwrap();
                raw
            };
            let unread: Vec<Raw> = (0..30).map(ask).collect();
            if timeout_ms == 300 {
                until(|| server.log().matches("that does not read its records").count() == 5);
                server.wait_for_others(&client, 30);
            }
            let get_twenty = |client: &Client| {
                for _ in 0..20 {
                    let lease = client.get(&Get::new("a")).unwrap();
                    assert_eq!(lease.into_parts().remove(0).into_segments().unwrap().len(), 200);
                }
            };
            // Another user gets its descriptors each time.
            let path = server.path.clone();
            in_fork(|| {
                become_user(OTHER, OTHER, &[]);
                get_twenty(&connect(&path, SERVER).unwrap());
                true
            });
            // Another process of the same user gets a refusal with the reason. It is served once the idle connections are closed.
            let (code, message) = refused(client.get(&Get::new("a")));
            assert_eq!(code, RefusalCode::Full);
            assert!(message.contains("needs 200 descriptors, but only 0 more can be sent to uid 0"), "{message}");
            drop(unread);
            server.wait_for_ends(&client);
            get_twenty(&client);
        }
    }
}

#[test]
fn wrong_segments_end_a_waiting_put() {
    let subject = Subject::host();
    let broker = Broker::start(&subject);
    let client = broker.client();
    let shared = filled(&subject.driver, 2 * MIB, None, 5);
    let (_, chunks) = shared.chunks(0..2 * MIB).unwrap().unwrap();
    let file = Inode::of(&*chunks[0]);
    let before = file.open_here();
    let raw = Raw::greeted(&broker.path).unwrap();
    let mut put = Material::of(&shared).put("model");
    put.parts[0].name = "one".to_owned();
    (put.announced, put.group) = (vec!["one".to_owned(), "two".to_owned()], Some("g".to_owned()));
    put.wait_ms = Some(600_000);
    raw.send(&Message::Put(Box::new(put)), &[chunks[0].as_fd()]).unwrap();
    until(|| file.open_here() == before + 1);
    raw.send(&Message::Segments(Segments { first: 0, sizes: vec![2 * MIB] }), &[chunks[0].as_fd()]).unwrap();
    assert!(matches!(raw.receive().unwrap(), Some((Message::Error(_), _))));
    until(|| file.open_here() == before);
    let two = PutPart::of("two", &shared).unwrap();
    let put = Put::new("model").part(two).together(["one", "two"], "g", Duration::from_millis(1));
    assert_eq!(refused(client.put(&put)).0, RefusalCode::Timeout);
}

#[test]
fn name_expires_without_traffic() {
    let subject = Subject::host();
    // No other timer wakes the server.
    let mut config = ServerConfig::default();
    config.timeout = Duration::from_secs(3600);
    let broker = Broker::with(&subject, config);
    let shared = filled(&subject.driver, 2 * MIB, None, 5);
    let (_, chunks) = shared.chunks(0..2 * MIB).unwrap().unwrap();
    let file = Inode::of(&*chunks[0]);
    let before = file.open_here();
    let client = broker.client();
    let part = PutPart::of("all", &shared).unwrap();
    client.put(&Put::new("a").lifetime(Lifetime::Idle { ms: 5000 }).part(part)).unwrap();
    // The idle time restarts when the lease is dropped, before the server's first expiry check. Its check for stalled readers is also
    // earlier.
    thread::sleep(Duration::from_millis(1000));
    drop(client.get(&Get::new("a")).unwrap());
    until(|| file.open_here() == before);
}
