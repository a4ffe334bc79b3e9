//! Many concurrent clients of one broker: some behave well, some die, and some violate every rule. A plain map predicts the contents.
//!
//! One file of more than 500 lines: one program of many clients.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    io,
    os::fd::{AsFd, BorrowedFd},
    path::Path,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use nix::sys::memfd::{MFdFlags, memfd_create};
use serde_json::json;
use vmmfd::{
    Error,
    broker::{ClaimOf, Client, Condition, Found, Get, Lease},
    error::RefusalCode,
    session::Config,
    wire::{
        Received, Segments,
        broker::{self, Delete, GetObject, List, Message, Release, Stat, Stop, Table, Token, Who},
    },
};

use crate::{
    broker::until,
    broker_pages::{PAGE, Template, number, pages_of, whole},
    broker_process::{Process, Raw, Setup},
    support::Subject,
};

/// A deterministic pseudo-random generator (splitmix64).
struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn of(&mut self, sides: u64) -> u64 {
        self.next() % sides
    }
}

/// The expected contents: the version and the number of the put, by name.
type Model = BTreeMap<String, (u64, u64)>;

/// Names that all clients replace. Each version belongs to one client: the number of the put, by name and version.
type Races = Mutex<BTreeMap<(String, u64), u64>>;

const CLIENTS: u64 = 50;
const NAMES: u64 = 6;
const SHARED: u64 = 3;

/// The state shared by all clients.
struct Field<'a> {
    path: &'a Path,
    template: Template,
    requests: AtomicU64,
    wanted: u64,
    races: Races,
    deaths: AtomicU64,
    violations: AtomicU64,
    dawdles: AtomicU64,
    failed: AtomicBool,
}

impl Field<'_> {
    /// Counts a request. Returns whether the test continues.
    fn count(&self) -> bool {
        self.requests.fetch_add(1, Ordering::Relaxed) < self.wanted && !self.failed.load(Ordering::Relaxed)
    }
}

struct Actor<'a> {
    field: &'a Field<'a>,
    number: u64,
    dice: Dice,
    model: Model,
    /// The number of the last put.
    nonce: u64,
    lives: u64,
}

fn code<T: std::fmt::Debug>(result: vmmfd::Result<T>) -> Option<RefusalCode> {
    match result {
        Ok(_) => None,
        Err(Error::Broker(refusal)) => Some(refusal.code),
        Err(other) => panic!("{other:?}"),
    }
}

fn of(put: broker::PutHeader) -> Message {
    Message::Put(Box::new(put))
}

fn encoded(message: &Message) -> Vec<u8> {
    let mut record = Vec::new();
    message.encode_into(&mut record).unwrap();
    record
}

/// Waits for an error, and the end of the connection.
fn ended(raw: &Raw) {
    assert!(raw.ending().is_some(), "an error, and the end");
}

fn refused(raw: &Raw) -> RefusalCode {
    match raw.receive() {
        Ok(Some((Message::Refused(refusal), _))) => refusal.code,
        other => panic!("{other:?}"),
    }
}

impl Actor<'_> {
    fn client(&self) -> Client {
        Client::connect(self.field.path, &Config::default()).unwrap()
    }

    fn own_name(&mut self) -> String {
        format!("c{:02}/{}", self.number, self.dice.of(NAMES))
    }

    fn next_nonce(&mut self) -> u64 {
        self.nonce += 1;
        self.number << 40 | self.nonce
    }

    /// Sends valid requests. The model predicts the answers.
    fn behave(&mut self, client: &Client, held: &mut Vec<Lease>) {
        let name = self.own_name();
        let known = self.model.get(&name).copied();
        match self.dice.of(16) {
            0..=2 => {
                let nonce = self.next_nonce();
                let result = self.field.template.put(client, &name, nonce, Condition::New);
                match known {
                    None => {
                        assert_eq!(result.unwrap(), 1);
                        self.model.insert(name, (1, nonce));
                    }
                    Some(_) => assert_eq!(code(result), Some(RefusalCode::Exists)),
                }
            }
            3 | 4 => {
                let nonce = self.next_nonce();
                let version = self.field.template.put(client, &name, nonce, Condition::Any).unwrap();
                assert_eq!(version, known.map_or(0, |(version, _)| version) + 1);
                self.model.insert(name, (version, nonce));
            }
            5 => {
                let nonce = self.next_nonce();
                let wanted = known.map_or(1, |(version, _)| version) + self.dice.of(2);
                let result = self.field.template.put(client, &name, nonce, Condition::Version(wanted));
                match known {
                    Some((version, _)) if version == wanted => {
                        assert_eq!(result.unwrap(), version + 1);
                        self.model.insert(name, (version + 1, nonce));
                    }
                    _ => assert_eq!(code(result), Some(RefusalCode::Version)),
                }
            }
            6 | 7 => {
                let result = client.delete(&name);
                match self.model.remove(&name) {
                    Some(_) => result.unwrap(),
                    None => assert_eq!(code(result), Some(RefusalCode::Absent)),
                }
            }
            8 | 9 => match (client.get(&Get::new(&name)), known) {
                (Ok(lease), Some((version, nonce))) => {
                    assert_eq!(lease.version(), version);
                    if self.dice.of(4) == 0 && held.len() < 8 {
                        held.push(lease);
                    } else {
                        assert_eq!(whole(lease), nonce);
                    }
                }
                (result, known) => assert_eq!((code(result), known), (Some(RefusalCode::Absent), None)),
            },
            10 => self.get_any(client),
            11 => match client.stat(&name, None) {
                Ok(info) => {
                    let (version, nonce) = known.unwrap();
                    assert_eq!((info.version.summary.version, &info.metadata["nonce"]), (version, &json!(nonce)));
                }
                other => assert_eq!((code(other), known), (Some(RefusalCode::Absent), None)),
            },
            12 => {
                let listed = client.list(&format!("c{:02}/", self.number)).unwrap();
                let listed: Vec<(String, u64)> = listed.into_iter().map(|of| (of.name, of.version)).collect();
                let expected: Vec<(String, u64)> = self.model.iter().map(|(name, of)| (name.clone(), of.0)).collect();
                assert_eq!(listed, expected);
            }
            13 => {
                if self.dice.of(8) == 0 {
                    client.who(&name).unwrap();
                }
                held.clear();
            }
            14 => match client.get_or_claim(&Get::new(&name), &ClaimOf::whole()).unwrap() {
                Found::Lease(lease) => assert_eq!(whole(lease), known.unwrap().1),
                Found::Claim(_claim) => assert_eq!(known, None),
                other => panic!("{other:?}"),
            },
            _ => self.race(client),
        }
    }

    /// Gets an object of any client: it may be absent, but is always complete.
    fn get_any(&mut self, client: &Client) {
        let other = format!("c{:02}/{}", self.dice.of(CLIENTS), self.dice.of(NAMES));
        let get = Get::new(other).wait(Duration::from_millis(self.dice.of(3)));
        match client.get(&get) {
            Ok(lease) => drop(whole(lease)),
            other => {
                let code = code(other);
                assert!(matches!(code, Some(RefusalCode::Absent | RefusalCode::Timeout)), "{code:?}");
            }
        }
    }

    /// Replaces a shared name if its version is unchanged.
    fn race(&mut self, client: &Client) {
        let name = format!("shared/{}", self.dice.of(SHARED));
        let nonce = self.next_nonce();
        let result = match client.get(&Get::new(&name)) {
            Ok(lease) => {
                let version = lease.version();
                let found = whole(lease);
                // The client that put this version may not have recorded its number yet: then there is nothing to compare.
                if let Some(known) = self.field.races.lock().unwrap().get(&(name.clone(), version)) {
                    assert_eq!(*known, found);
                }
                self.field.template.put(client, &name, nonce, Condition::Version(version))
            }
            Err(_) => self.field.template.put(client, &name, nonce, Condition::New),
        };
        match result {
            Ok(version) => {
                let before = self.field.races.lock().unwrap().insert((name, version), nonce);
                assert_eq!(before, None, "a version that two clients put");
            }
            other => {
                let code = code(other);
                assert!(matches!(code, Some(RefusalCode::Version | RefusalCode::Exists)), "{code:?}");
            }
        }
    }

    /// Violates a rule on a separate connection. The broker must close the connection or refuse the request.
    fn misbehave(&mut self) {
        self.field.violations.fetch_add(1, Ordering::Relaxed);
        let raw = Raw::greeted(self.field.path).unwrap();
        let name = self.own_name();
        let nonce = self.next_nonce();
        let (put, pages) = self.field.template.raw_put(&name, nonce, true);
        let fds: Vec<BorrowedFd<'_>> = pages.iter().map(AsFd::as_fd).collect();
        match self.dice.of(20) {
            0..=4 => self.send_broken_record(&raw, put, &fds),
            5..=11 => self.put_wrong_memory(&raw, put, &fds),
            _ => self.send_out_of_order(&raw, put, &fds),
        }
    }

    /// Sends a record that is no message, or lacks its descriptors.
    fn send_broken_record(&mut self, raw: &Raw, put: broker::PutHeader, fds: &[BorrowedFd<'_>]) {
        match self.dice.of(5) {
            0 => {
                let bytes: Vec<u8> = (0..self.dice.of(300) + 1).map(|_| self.dice.next() as u8).collect();
                raw.send_bytes(&bytes, fds).unwrap();
                ended(raw);
            }
            1 => {
                // A truncated record.
                let mut bytes = encoded(&of(put));
                let at = self.dice.of(bytes.len() as u64) as usize;
                bytes.truncate(at.max(1));
                raw.send_bytes(&bytes, fds).unwrap();
                ended(raw);
            }
            2 => {
                let more: Vec<BorrowedFd<'_>> = fds.iter().chain(fds).copied().collect();
                raw.send_bytes(&encoded(&of(put)), &more).unwrap();
                ended(raw);
            }
            3 => {
                raw.send_bytes(&encoded(&of(put)), &[]).unwrap();
                ended(raw);
            }
            _ => {
                let mut bytes = encoded(&Message::List(List::default()));
                bytes[6] = 99;
                raw.send_bytes(&bytes, &[]).unwrap();
                ended(raw);
            }
        }
    }

    /// Puts memory that no client may put.
    fn put_wrong_memory(&mut self, raw: &Raw, put: broker::PutHeader, fds: &[BorrowedFd<'_>]) {
        match self.dice.of(7) {
            0 => {
                // A size larger than the memory.
                let mut put = put;
                put.sizes[0] += PAGE;
                put.parts[0].memory.mapped_size += PAGE;
                raw.send(&of(put), fds).unwrap();
                assert_eq!(refused(raw), RefusalCode::Memory);
            }
            1 => {
                let mut put = put;
                put.parts[0].memory.mapped_size += PAGE;
                raw.send(&of(put), fds).unwrap();
                assert_eq!(refused(raw), RefusalCode::Invalid);
            }
            2 => {
                // Unsealed memory: its maker could truncate it.
                let file =
                    File::from(memfd_create(c"open", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING).unwrap());
                file.set_len(PAGE).unwrap();
                let foreign = vec![file.as_fd(); fds.len()];
                raw.send(&of(put), &foreign).unwrap();
                assert_eq!(refused(raw), RefusalCode::Memory);
            }
            3 => {
                let (reader, _writer) = io::pipe().unwrap();
                raw.send(&of(put), &vec![reader.as_fd(); fds.len()]).unwrap();
                assert_eq!(refused(raw), RefusalCode::Memory);
            }
            4 => {
                let null = File::open(["/dev/null", "/proc/self/maps", "/"][self.dice.of(3) as usize]).unwrap();
                raw.send(&of(put), &vec![null.as_fd(); fds.len()]).unwrap();
                assert_eq!(refused(raw), RefusalCode::Memory);
            }
            5 => {
                // The broker's own socket.
                raw.send(&of(put), &vec![raw.as_fd(); fds.len()]).unwrap();
                assert_eq!(refused(raw), RefusalCode::Memory);
            }
            _ => {
                // Memory that is not a table.
                let mut put = put;
                put.parts[0].arrays = Some(Table::Length(PAGE));
                let fds: Vec<BorrowedFd<'_>> = std::iter::once(fds[0]).chain(fds.iter().copied()).collect();
                raw.send(&of(put), &fds).unwrap();
                assert_eq!(refused(raw), RefusalCode::Invalid);
            }
        }
    }

    /// Sends messages in the wrong order.
    fn send_out_of_order(&mut self, raw: &Raw, put: broker::PutHeader, fds: &[BorrowedFd<'_>]) {
        match self.dice.of(8) {
            0 => {
                // The put is interrupted: the connection closes, or another record follows.
                let mut put = put;
                let total = 300;
                put.parts[0].memory.segments = total;
                (put.parts[0].memory.size, put.parts[0].memory.mapped_size) = (total * PAGE, total * PAGE);
                raw.send(&of(put), fds).unwrap();
                assert!(matches!(raw.receive(), Ok(Some((Message::Send(_), _)))));
                let first = fds.len() as u64 + self.dice.of(2);
                let sizes = vec![PAGE; fds.len()];
                raw.send(&Message::Segments(Segments { first, sizes }), fds).unwrap();
                if first > fds.len() as u64 {
                    ended(raw);
                }
            }
            1 => {
                raw.send(&Message::Received(Received { segments: 1 }), &[]).unwrap();
                ended(raw);
            }
            2 => {
                // A second request before the answer to the first, which waits.
                let object = GetObject { name: "absent".to_owned(), ..GetObject::default() };
                let get = broker::GetHeader { objects: vec![object], wait_ms: Some(600_000), claim: None };
                raw.send(&Message::Get(Box::new(get)), &[]).unwrap();
                raw.send(&Message::List(List::default()), &[]).unwrap();
                ended(raw);
            }
            3 => {
                raw.send(&Message::Segments(Segments { first: 0, sizes: vec![PAGE; fds.len()] }), fds).unwrap();
                ended(raw);
            }
            4 => {
                raw.send(&Raw::hello(), &[]).unwrap();
                ended(raw);
            }
            5 => {
                // An unknown token: the broker ignores it, and the connection remains usable.
                raw.send(&Message::Release(Release { token: Token([7; 16]) }), &[]).unwrap();
                raw.send(&Message::Stop(Stop {}), &[]).unwrap();
                let answer = raw.ask(&Message::Who(Who { prefix: "absent".to_owned(), after: None }), &[]);
                assert!(matches!(answer, Ok(Some((Message::Leases(_), _)))), "{answer:?}");
            }
            6 => {
                // A request before the hello, on a new connection.
                let raw = Raw::dial(self.field.path).unwrap();
                raw.send(&Message::List(List::default()), &[]).unwrap();
                ended(&raw);
            }
            _ => {
                // A message that only a broker sends.
                raw.send(&Message::Done(broker::Done {}), &[]).unwrap();
                ended(raw);
            }
        }
    }

    /// Reads no answers, or reads them late and holds a lease in the meantime.
    fn dawdle(&mut self) {
        self.field.dawdles.fetch_add(1, Ordering::Relaxed);
        let raw = Raw::greeted(self.field.path).unwrap();
        let name = format!("shared/{}", self.dice.of(SHARED));
        let object = GetObject { name, ..GetObject::default() };
        let get = Message::Get(Box::new(broker::GetHeader { objects: vec![object], wait_ms: None, claim: None }));
        match self.dice.of(3) {
            // Sends requests without reading until the broker closes the connection.
            0 => {
                raw.0.set_nonblocking(true).unwrap();
                let list = Message::List(List { prefix: String::new(), after: None });
                while self.field.count() && raw.send(&list, &[]).is_ok() {}
            }
            1 => {
                raw.send(&get, &[]).unwrap();
                thread::sleep(Duration::from_millis(self.dice.of(5)));
                while let Ok(Some(_)) =
                    raw.ask(&Message::Stat(Stat { name: "shared/0".to_owned(), version: None }), &[])
                {
                    if self.dice.of(4) == 0 || !self.field.count() {
                        break;
                    }
                }
            }
            // Reads, holds the lease for a while, and disconnects.
            _ => {
                drop(raw.ask(&get, &[]).unwrap());
                thread::sleep(Duration::from_millis(self.dice.of(5)));
            }
        }
    }

    /// Sends a complete request and dies. The result is final once the broker has closed the connection: the broker reads every record
    /// before that.
    fn die(&mut self) {
        self.field.deaths.fetch_add(1, Ordering::Relaxed);
        self.lives += 1;
        let name = self.own_name();
        let known = self.model.get(&name).copied();
        let tomb = format!("tombs/{}/{}", self.number, self.lives);
        let raw = Raw::greeted(self.field.path).unwrap();
        let object = GetObject { name: tomb.clone(), ..GetObject::default() };
        let claim =
            broker::GetHeader { objects: vec![object], wait_ms: None, claim: Some(broker::ClaimHeader::default()) };
        let answer = raw.ask(&Message::Get(Box::new(claim)), &[]).unwrap();
        assert!(matches!(answer, Some((Message::Claimed(_), _))), "{answer:?}");
        let nonce = self.next_nonce();
        let expected = match self.dice.of(3) {
            0 => {
                raw.send(&Message::Delete(Delete { name: name.clone(), request: None }), &[]).unwrap();
                None
            }
            1 => {
                let (put, pages) = self.field.template.raw_put(&name, nonce, true);
                let fds: Vec<BorrowedFd<'_>> = pages.iter().map(AsFd::as_fd).collect();
                raw.send(&Message::Put(Box::new(put)), &fds).unwrap();
                Some((known.map_or(0, |(version, _)| version) + 1, nonce))
            }
            _ => {
                // An incomplete put.
                let (mut put, pages) = self.field.template.raw_put(&name, nonce, true);
                put.parts[0].memory.segments = 5;
                (put.parts[0].memory.size, put.parts[0].memory.mapped_size) = (5 * PAGE, 5 * PAGE);
                let fds: Vec<BorrowedFd<'_>> = pages.iter().map(AsFd::as_fd).collect();
                raw.send(&Message::Put(Box::new(put)), &fds).unwrap();
                known
            }
        };
        drop(raw);
        let client = self.client();
        let buried = client.get_or_claim(&Get::new(tomb).wait(Duration::from_secs(60)), &ClaimOf::whole()).unwrap();
        assert!(matches!(buried, Found::Claim(_)));
        match expected {
            Some(of) => self.model.insert(name, of),
            None => self.model.remove(&name),
        };
    }

    fn run(mut self) -> Model {
        // A third of the clients misbehave, half of the time.
        let bad = self.number.is_multiple_of(3);
        let mut held = Vec::new();
        let mut client = self.client();
        while self.field.count() {
            match self.dice.of(if bad { 12 } else { 6 }) {
                0..=5 => self.behave(&client, &mut held),
                6 | 7 => self.misbehave(),
                8 => self.dawdle(),
                9 | 10 => self.die(),
                _ => {
                    // Disconnects while it holds leases.
                    client = self.client();
                    held = std::mem::take(&mut held).into_iter().filter(|_| self.dice.of(2) == 0).collect();
                }
            }
        }
        self.model
    }
}

#[test]
fn catalogue_matches_a_map_under_stress() {
    let _turn = crate::support::cpu_turn();
    let wanted = number("VMMFD_TEST_REQUESTS", 10_000);
    let subject = Subject::host();
    let server = Process::start(Setup::of(&subject));
    let watcher = server.client();
    let before = server.files();
    let field = Field {
        path: &server.path,
        template: Template::new(),
        requests: AtomicU64::new(0),
        wanted,
        races: Mutex::default(),
        deaths: AtomicU64::new(0),
        violations: AtomicU64::new(0),
        dawdles: AtomicU64::new(0),
        failed: AtomicBool::new(false),
    };
    let begun = std::time::Instant::now();
    let models: Vec<Model> = thread::scope(|scope| {
        let actor =
            |number| Actor { field: &field, number, dice: Dice(number), model: Model::new(), nonce: 0, lives: 0 };
        let clients: Vec<_> = (0..CLIENTS)
            .map(|number| {
                let actor = actor(number);
                scope.spawn(|| {
                    let field = actor.field;
                    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| actor.run()));
                    field.failed.fetch_or(result.is_err(), Ordering::Relaxed);
                    result.unwrap()
                })
            })
            .collect();
        clients.into_iter().map(|client| client.join().unwrap()).collect()
    });
    let requests = field.requests.load(Ordering::Relaxed);
    let (deaths, violations, dawdles) =
        [&field.deaths, &field.violations, &field.dawdles].map(|count| count.load(Ordering::Relaxed)).into();
    eprintln!(
        "{requests} requests of {CLIENTS} clients in {:?}: {deaths} deaths, {violations} violations, {dawdles} dawdled",
        begun.elapsed()
    );
    assert!(requests >= wanted && deaths > 0 && violations > 0 && dawdles > 0);
    server.wait_for_ends(&watcher);

    // Compare the clients' predictions with the broker's contents.
    let mut model: Model = models.into_iter().flatten().collect();
    let races = field.races.into_inner().unwrap();
    for name in races.keys().map(|(name, _)| name).collect::<BTreeSet<_>>() {
        let versions: Vec<(u64, u64)> =
            races.iter().filter(|((of, _), _)| of == name).map(|((_, version), nonce)| (*version, *nonce)).collect();
        assert!(
            versions.iter().zip(1..).all(|((version, _), at)| *version == at),
            "each version of {name} was put once"
        );
        model.insert(name.clone(), *versions.last().unwrap());
    }
    let listed: Vec<(String, u64)> = watcher.list("").unwrap().into_iter().map(|of| (of.name, of.version)).collect();
    let expected: Vec<(String, u64)> = model.iter().map(|(name, (version, _))| (name.clone(), *version)).collect();
    assert_eq!(listed, expected);
    let held = watcher.who("").unwrap();
    assert!(held.leases.is_empty(), "{:?}", held.leases);
    let total = &held.totals[0];
    assert_eq!((held.totals.len(), total.objects, total.leases, total.connections), (1, model.len() as u64, 0, 1));
    let pages: u64 = model.values().map(|(_, nonce)| pages_of(*nonce)).sum();
    assert_eq!(total.devices.iter().map(|of| of.bytes).sum::<u64>(), pages * PAGE);
    for (name, (version, nonce)) in &model {
        let info = watcher.stat(name, None).unwrap();
        assert_eq!((info.version.versions, &info.metadata["nonce"]), (vec![*version], &json!(nonce)), "{name}");
        assert_eq!(whole(watcher.get(&Get::new(name)).unwrap()), *nonce, "{name}");
    }
    let files = |server: &Process| {
        let mut files = server.files();
        let pages = files.remove("/memfd:page (deleted)").unwrap_or(0) as u64;
        (files, pages)
    };
    until(|| files(&server) == (before.clone(), pages));
}
