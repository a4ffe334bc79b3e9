//! Brokers that crash repeatedly under load: no object is lost, and no resource leaks.

use std::{
    fs,
    os::fd::AsFd,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use vmmfd::{
    broker::{Client, Condition, Get},
    session::Config,
    wire::broker::{self, Delete, Message},
};

use crate::{
    broker::until,
    broker_crashes::token,
    broker_pages::{Template, number, pages_of, whole},
    broker_process::Raw,
    support::{
        Subject, open_files,
        served::{Keeper, Served, stored},
    },
};

/// The number of cycles between two crashes.
const CRASH_EVERY: u64 = 500;

/// The limit on the catalogue: twice its live contents, 4 MiB of history, and the bytes written before the server notices.
const CATALOGUE: u64 = 5 << 20;

/// A client that reconnects and repeats its request until it gets an answer.
struct Persistent<'a> {
    served: &'a Served,
    raw: Raw,
    reconnects: u64,
}

impl Persistent<'_> {
    /// Repeats the request until it is answered.
    fn ask(&mut self, message: &Message, fds: &[std::os::fd::OwnedFd]) -> Message {
        loop {
            let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
            if let Ok(Some((answer, _))) = self.raw.ask(message, &fds) {
                return answer;
            }
            self.raw = self.served.greeted().0;
            self.reconnects += 1;
        }
    }

    fn put(&mut self, template: &Template, name: &str, nonce: u64, replace: bool) -> u64 {
        let (put, pages) = template.raw_put(name, nonce, replace);
        let put = broker::PutHeader { request: Some(token()), ..put };
        match self.ask(&Message::Put(Box::new(put)), &pages) {
            Message::Published(published) => published.version,
            other => panic!("{other:?}"),
        }
    }
}

/// The length of a process's longest catalogue.
fn catalogue(pid: Pid) -> u64 {
    let mut catalogues = open_files(pid).unwrap();
    catalogues.retain(|file| file.link.to_string_lossy().starts_with("/memfd:vmmfd-catalogue"));
    catalogues.iter().filter_map(|file| Some(fs::metadata(&file.path).ok()?.len())).max().unwrap_or(0)
}

/// Sizes that must not grow: descriptors of memory, KiB of the server and the keeper, bytes of the catalogue.
#[derive(Debug, Clone, Copy, Default)]
struct Sizes {
    descriptors: usize,
    server: u64,
    keeper: u64,
    catalogue: u64,
}

/// `VMMFD_TEST_CYCLES=100000` for the long run.
#[test]
fn cycles_with_crashes_leak_nothing() {
    let _turn = crate::support::cpu_turn();
    let cycles = number("VMMFD_TEST_CYCLES", 2000);
    let subject = Subject::host();
    let served = Served::start(Keeper::Own, &subject);
    let template = Template::new();
    let mut client = Persistent { served: &served, raw: served.greeted().0, reconnects: 0 };
    // This object exists for the whole test.
    assert_eq!(client.put(&template, "base", 2, false), 1);
    let base = pages_of(2) as usize;
    let mut crashes = 0;
    let mut early = Sizes::default();
    let mut late = Sizes::default();
    let mut longest = 0;
    for cycle in 1..=cycles {
        let killer = (cycle % CRASH_EVERY == 0).then(|| {
            let server = served.server();
            // The kill happens at a varying moment during the next cycles.
            thread::spawn(move || {
                thread::sleep(Duration::from_micros(cycle * 7919 % 5000));
                kill(server, Signal::SIGKILL).unwrap();
                server
            })
        });
        let name = format!("cycle/{}", cycle % 7);
        assert_eq!(client.put(&template, &name, 3 * cycle, false), 1, "cycle {cycle}");
        assert_eq!(client.put(&template, &name, 3 * cycle + 1, true), 2, "cycle {cycle}");
        let delete = Message::Delete(Delete { name, request: Some(token()) });
        let answer = client.ask(&delete, &[]);
        assert!(matches!(answer, Message::Done(_)), "cycle {cycle}: {answer:?}");
        if let Some(killer) = killer {
            let killed = killer.join().unwrap();
            crashes += 1;
            let (server, _) = served.wait_for_another(killed, Instant::now());
            // Wait until the server has closed the memory of the last cycle.
            until(|| served.kept(server) == (base + 2, base + 2));
            let keeper = served.keeper();
            let sizes = Sizes {
                descriptors: stored(server) + stored(keeper),
                server: served.resident(server),
                keeper: served.resident(keeper),
                catalogue: catalogue(server),
            };
            longest = longest.max(sizes.catalogue);
            let half = crashes * 2 * CRASH_EVERY <= cycles;
            *(if half { &mut early } else { &mut late }) = sizes;
        }
    }
    let reconnects = client.reconnects;
    eprintln!(
        "{cycles} cycles with {crashes} crashes, {reconnects} reconnects: at half of them {early:?}, at the end {late:?}"
    );
    // The last crash may happen after the last request.
    assert!(crashes >= 2 && reconnects + 1 >= crashes, "{crashes} crashes, {reconnects} reconnects");
    assert_eq!(early.descriptors, late.descriptors);
    assert!(longest <= CATALOGUE, "{longest} bytes of catalogue");
    // Each crash starts a new server, which reads a catalogue of up to a few MiB.
    assert!(late.server <= early.server + 16 * 1024, "{early:?} {late:?}");
    assert!(late.keeper <= early.keeper + 1024, "{early:?} {late:?}");
}

/// Clients that get, and clients that put.
const READERS: u64 = 90;
const WRITERS: u64 = 10;

const TIMEOUT: Duration = Duration::from_secs(60);

#[test]
fn hundred_clients_see_whole_objects_over_restarts() {
    let _turn = crate::support::cpu_turn();
    let restarts = number("VMMFD_TEST_RESTARTS", 10);
    let subject = Subject::host();
    let served = Served::start(Keeper::Own, &subject);
    let template = &Template::new();
    let connect = &|| Client::connect(&served.path, &Config::default().timeout(TIMEOUT)).unwrap();
    let first = connect();
    for writer in 0..WRITERS {
        template.put(&first, &format!("n{writer}"), writer, Condition::New).unwrap();
    }
    let done = &AtomicBool::new(false);
    let gets = &AtomicU64::new(0);
    let puts = &AtomicU64::new(0);
    let slowest = &Mutex::new(Duration::ZERO);
    let longest = Mutex::new(Duration::ZERO);
    thread::scope(|scope| {
        let mut clients = Vec::new();
        for reader in 0..READERS {
            clients.push(scope.spawn(move || {
                let client = connect();
                let name = format!("n{}", reader % WRITERS);
                let mut last = 0;
                while !done.load(Ordering::Relaxed) {
                    let begun = Instant::now();
                    let lease = client.get(&Get::new(&name)).unwrap();
                    let version = lease.version();
                    assert!(version >= last, "version {version} of {name} after {last}");
                    last = version;
                    whole(lease);
                    let mut slowest = slowest.lock().unwrap();
                    *slowest = (*slowest).max(begun.elapsed());
                    gets.fetch_add(1, Ordering::Relaxed);
                }
            }));
        }
        for writer in 0..WRITERS {
            clients.push(scope.spawn(move || {
                let client = connect();
                let name = format!("n{writer}");
                let mut version = 1;
                while !done.load(Ordering::Relaxed) {
                    let nonce = version * WRITERS + writer;
                    // Each put takes effect once: the next put replaces exactly this version.
                    let published = template.put(&client, &name, nonce, Condition::Version(version)).unwrap();
                    assert_eq!(published, version + 1);
                    version = published;
                    puts.fetch_add(1, Ordering::Relaxed);
                }
            }));
        }
        for _ in 0..restarts {
            let gets_before = gets.load(Ordering::Relaxed);
            let puts_before = puts.load(Ordering::Relaxed);
            let (_, gap) = served.kill_server();
            let mut longest = longest.lock().unwrap();
            *longest = (*longest).max(gap);
            // Some gets and puts succeed before the next restart.
            until(|| {
                let enough = gets.load(Ordering::Relaxed) >= gets_before + READERS
                    && puts.load(Ordering::Relaxed) >= puts_before + WRITERS;
                enough || clients.iter().any(|client| client.is_finished())
            });
            if clients.iter().any(|client| client.is_finished()) {
                break;
            }
        }
        done.store(true, Ordering::Relaxed);
        clients.into_iter().for_each(|client| client.join().unwrap());
    });
    let slowest = *slowest.lock().unwrap();
    let longest = longest.into_inner().unwrap();
    eprintln!(
        "{} gets and {} puts of 100 clients through {restarts} restarts: the slowest get {slowest:?}, the longest gap {longest:?}",
        gets.load(Ordering::Relaxed),
        puts.load(Ordering::Relaxed),
    );
    assert!(slowest < TIMEOUT);
}
