//! Concurrent clients of a broker whose server and keeper are killed: each sees whole objects, and a plain map predicts the contents.

use std::{
    collections::BTreeMap,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use nix::sys::signal::{Signal, kill};
use serde_json::json;
use vmmfd::{
    Error,
    broker::{ClaimOf, Client, Condition, Found, Get, Lease},
    error::RefusalCode,
    session::Config,
};

use crate::{
    broker::until,
    broker_pages::{PAGE, Template, number, pages_of, whole},
    support::{
        Subject,
        served::{Keeper, Served},
    },
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

const CLIENTS: u64 = 20;
const NAMES: u64 = 6;
const SHARED: u64 = 3;

/// The state shared by all clients.
struct Field<'a> {
    served: &'a Served,
    template: Template,
    requests: AtomicU64,
    done: AtomicBool,
    /// Names that all clients replace. Each version belongs to one client: the number of the put, by name and version.
    races: Mutex<BTreeMap<(String, u64), u64>>,
}

impl Field<'_> {
    fn client(&self) -> Client {
        Client::connect(&self.served.path, &Config::default().timeout(Duration::from_secs(100))).unwrap()
    }
}

struct Actor<'a> {
    field: &'a Field<'a>,
    client: Client,
    number: u64,
    dice: Dice,
    model: Model,
    held: Vec<(Lease, u64)>,
    /// The number of the last put.
    nonce: u64,
    /// The newest version seen of each shared name.
    seen: [u64; SHARED as usize],
}

fn code<T: std::fmt::Debug>(result: vmmfd::Result<T>) -> Option<RefusalCode> {
    match result {
        Ok(_) => None,
        Err(Error::Broker(refusal)) => Some(refusal.code),
        Err(other) => panic!("{other:?}"),
    }
}

impl Actor<'_> {
    fn put(&mut self, name: &str, condition: Condition) -> (vmmfd::Result<u64>, u64) {
        self.nonce += 1;
        let nonce = self.number << 40 | self.nonce;
        (self.field.template.put(&self.client, name, nonce, condition), nonce)
    }

    /// Sends a request. The model predicts the answer.
    fn act(&mut self) {
        let name = format!("c{:02}/{}", self.number, self.dice.of(NAMES));
        let known = self.model.get(&name).copied();
        let version = known.map_or(0, |(version, _)| version);
        match self.dice.of(11) {
            choice @ 0..=3 => {
                let next = version + self.dice.of(2);
                let (condition, expected) = match (choice, known) {
                    (0, None) => (Condition::New, Ok(1)),
                    (0, Some(_)) => (Condition::New, Err(RefusalCode::Exists)),
                    (1, Some(_)) if next == version => (Condition::Version(next), Ok(version + 1)),
                    (1, _) => (Condition::Version(next.max(1)), Err(RefusalCode::Version)),
                    _ => (Condition::Any, Ok(version + 1)),
                };
                let (result, nonce) = self.put(&name, condition);
                match expected {
                    Ok(version) => {
                        assert_eq!(result.unwrap(), version);
                        self.model.insert(name, (version, nonce));
                    }
                    Err(expected) => assert_eq!(code(result), Some(expected)),
                }
            }
            4 => {
                let absent = self.model.remove(&name).is_none().then_some(RefusalCode::Absent);
                assert_eq!(code(self.client.delete(&name)), absent);
            }
            5 => match (self.client.get(&Get::new(&name)), known) {
                (Ok(lease), Some((version, nonce))) => {
                    assert_eq!(lease.version(), version);
                    self.held.push((lease, nonce));
                }
                (result, known) => assert_eq!((code(result), known), (Some(RefusalCode::Absent), None)),
            },
            6 => self.held.drain(..).for_each(|(lease, nonce)| assert_eq!(whole(lease), nonce)),
            7 => match self.client.stat(&name, None) {
                Ok(info) => assert_eq!(
                    (info.version.summary.version, &info.metadata["nonce"]),
                    (version, &json!(known.unwrap().1))
                ),
                other => assert_eq!((code(other), known), (Some(RefusalCode::Absent), None)),
            },
            8 => {
                let listed = self.client.list(&format!("c{:02}/", self.number)).unwrap();
                let listed: Vec<(String, u64)> = listed.into_iter().map(|of| (of.name, of.version)).collect();
                let expected: Vec<(String, u64)> = self.model.iter().map(|(name, of)| (name.clone(), of.0)).collect();
                assert_eq!(listed, expected);
            }
            9 => match self.client.get_or_claim(&Get::new(&name), &ClaimOf::whole()).unwrap() {
                Found::Lease(lease) => assert_eq!(whole(lease), known.unwrap().1),
                Found::Claim(_claim) => assert_eq!(known, None),
                other => panic!("{other:?}"),
            },
            _ => self.race(),
        }
    }

    /// Replaces a shared name if its version is unchanged.
    fn race(&mut self) {
        let shared = self.dice.of(SHARED);
        let name = format!("shared/{shared}");
        let condition = match self.client.get(&Get::new(&name)) {
            Ok(lease) => {
                let version = lease.version();
                let found = whole(lease);
                let seen = &mut self.seen[shared as usize];
                assert!(version >= *seen, "version {version} of {name} after {seen}");
                *seen = version;
                // The client that put this version may not have recorded its number yet: then there is nothing to compare.
                if let Some(known) = self.field.races.lock().unwrap().get(&(name.clone(), version)) {
                    assert_eq!(*known, found);
                }
                Condition::Version(version)
            }
            Err(_) => Condition::New,
        };
        match self.put(&name, condition) {
            (Ok(version), nonce) => {
                let before = self.field.races.lock().unwrap().insert((name, version), nonce);
                assert_eq!(before, None, "a version that two clients put");
            }
            (other, _) => {
                let code = code(other);
                assert!(matches!(code, Some(RefusalCode::Version | RefusalCode::Exists)), "{code:?}");
            }
        }
    }

    fn run(mut self) -> Model {
        while !self.field.done.load(Ordering::Relaxed) {
            self.act();
            self.field.requests.fetch_add(1, Ordering::Relaxed);
        }
        self.model
    }
}

/// Kills the server and the keeper in turn, each after some more requests.
fn kill_each_in_turn(field: &Field<'_>, wanted: u64, has_failed: impl Fn() -> bool) {
    const KILLS: u64 = 8;
    let client = field.client();
    for round in 1..=KILLS {
        until(|| field.requests.load(Ordering::Relaxed) >= wanted * round / KILLS || has_failed());
        if has_failed() {
            return;
        }
        if round % 2 == 0 {
            let keeper = field.served.keeper();
            kill(keeper, Signal::SIGKILL).unwrap();
            until(|| field.served.keeper() != keeper);
            // It is acknowledged once the next keeper holds everything.
            field.template.put(&client, "kept", round, Condition::Any).unwrap();
        } else {
            field.served.kill_server();
        }
    }
}

/// `VMMFD_TEST_REQUESTS=100000` for the long run.
#[test]
fn contents_match_a_map_over_kills() {
    let _turn = crate::support::cpu_turn();
    let wanted = number("VMMFD_TEST_REQUESTS", 1200);
    let subject = Subject::host();
    let served = Served::with(Keeper::Own, &subject, &crate::running::binary("vmmfd"), &["--time-limit", "silence=1s"]);
    let field = Field {
        served: &served,
        template: Template::new(),
        requests: AtomicU64::new(0),
        done: AtomicBool::new(false),
        races: Mutex::default(),
    };
    let models: Vec<Model> = thread::scope(|scope| {
        let actor = |number| {
            let (client, dice) = (field.client(), Dice(number));
            Actor { field: &field, client, number, dice, model: Model::new(), held: Vec::new(), nonce: 0, seen: [0; 3] }
        };
        let clients: Vec<_> = (0..CLIENTS).map(actor).map(|actor| scope.spawn(|| actor.run())).collect();
        kill_each_in_turn(&field, wanted, || clients.iter().any(|client| client.is_finished()));
        field.done.store(true, Ordering::Relaxed);
        clients.into_iter().map(|client| client.join().unwrap()).collect()
    });

    // Compare the clients' predictions with the broker's contents.
    let client = field.client();
    client.delete("kept").unwrap();
    let mut model: Model = models.into_iter().flatten().collect();
    let mut races: BTreeMap<String, Vec<(u64, u64)>> = BTreeMap::new();
    for ((name, version), nonce) in field.races.into_inner().unwrap() {
        races.entry(name).or_default().push((version, nonce));
    }
    for (name, versions) in races {
        assert!(versions.iter().map(|(version, _)| *version).eq(1..=versions.len() as u64), "{name}: {versions:?}");
        model.insert(name, *versions.last().unwrap());
    }
    let listed: Vec<(String, u64)> = client.list("").unwrap().into_iter().map(|of| (of.name, of.version)).collect();
    let expected: Vec<(String, u64)> = model.iter().map(|(name, (version, _))| (name.clone(), *version)).collect();
    assert_eq!(listed, expected);
    until(|| client.who("").unwrap().leases.is_empty());
    let pages: u64 = model.values().map(|(_, nonce)| pages_of(*nonce)).sum();
    // A server closes the versions of its predecessor's leases after the time in which clients resume them.
    until(|| client.who("").unwrap().totals[0].devices.iter().map(|of| of.bytes).sum::<u64>() == pages * PAGE);
    for (name, (version, nonce)) in &model {
        assert_eq!(client.stat(name, None).unwrap().version.versions, [*version], "{name}");
        assert_eq!(whole(client.get(&Get::new(name)).unwrap()), *nonce, "{name}");
    }
    // Nothing else is held.
    let held = pages as usize;
    let server = served.server();
    until(|| served.kept(server) == (held, held));
}
