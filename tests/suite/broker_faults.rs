//! Clients that die before, during and after each verb of a broker: exactly the acknowledged changes remain.

use std::{
    os::fd::{AsFd, BorrowedFd},
    path::Path,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use vmmfd::{
    broker::{ArrayEntry, Attached, ClaimOf, Client, Condition, Found, Get, Put},
    driver::Driver,
    error::RefusalCode,
    memory::{Region, Shared},
    session::Config,
    wire::{
        MAX_FDS, Received, Segments,
        broker::{self, ClaimHeader, Delete, List, Message, Release, ReportHeader, Stat, Stop, Table, Token, Who},
    },
};

use crate::{
    broker::{filled, refused, until},
    broker_process::Raw,
    running::binary,
    support::{
        Subject,
        material::{Material, get, get_message, memfd},
        served::{Keeper, Served},
    },
};

cases! {
    on crate::support::Subject; host and cuda: [
    acknowledged_requests_survive_client_kill,
    ]
}

const MIB: u64 = 1 << 20;

/// The segments of the large object: its put and its lease take three records each.
pub(crate) const MANY: usize = 600;

/// The distinct chunks that the segments repeat.
pub(crate) const CHUNKS: usize = 3;

pub(crate) const CHUNK: u64 = 2 * MIB;

/// Whether `made` exists after a client's death.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Made {
    /// The put was acknowledged.
    Yes,
    /// The put was not sent completely.
    No,
    /// The put was sent completely but not acknowledged: both outcomes are valid.
    Maybe,
}

/// The steps at which a client dies, and whether `made` (three chunks) exists then. Each client finds an object `base`.
const STEPS: &[(&str, Made)] = &[
    ("connected", Made::No),
    ("hello-sent", Made::No),
    ("greeted", Made::No),
    ("put-sent", Made::Maybe),
    ("put-many-sent", Made::No),
    ("put-send-read", Made::No),
    ("put-half-of-the-segments", Made::No),
    ("put-all-but-the-last-segment", Made::No),
    ("put-all-segments", Made::Maybe),
    ("put-with-a-table-sent", Made::Maybe),
    ("put-refused-table-sent", Made::No),
    ("put-published", Made::Yes),
    ("put-waits-for-parts", Made::No),
    ("replace-sent", Made::No),
    ("replace-half-of-the-segments", Made::No),
    ("replace-published", Made::No),
    ("get-sent", Made::No),
    ("get-waits", Made::No),
    ("get-stopped", Made::No),
    ("get-first-record-read", Made::No),
    ("get-acknowledged", Made::No),
    ("get-two-records-read", Made::No),
    ("get-two-objects-first-read", Made::No),
    ("lease-held", Made::No),
    ("lease-held-ten-times", Made::No),
    ("release-sent", Made::No),
    ("report-sent", Made::No),
    ("claim-sent", Made::No),
    ("claim-held", Made::No),
    ("claim-held-and-put-half", Made::No),
    ("claim-held-and-published", Made::Yes),
    ("claim-released", Made::No),
    ("list-sent", Made::No),
    ("stat-sent", Made::No),
    ("who-sent", Made::No),
    ("delete-sent", Made::No),
    ("delete-done", Made::No),
];

fn claim_message(name: &str) -> Message {
    Message::Get(Box::new(broker::GetHeader { claim: Some(ClaimHeader::default()), ..get(name) }))
}

#[track_caller]
fn lease(answer: Option<(Message, Vec<std::os::fd::OwnedFd>)>) -> (Token, usize) {
    match answer {
        Some((Message::Lease(lease), fds)) => (lease.token, fds.len()),
        other => panic!("{other:?}"),
    }
}

/// A client with memory to put and a connection. For the broker, a drop is its death: the kernel closes the connection.
struct Steps {
    raw: Raw,
    shared: Shared,
    small: Material,
}

/// Runs a client up to the step.
fn go_to(step: &str, path: &Path, driver: &Driver) -> Steps {
    let shared = filled(driver, CHUNKS as u64 * CHUNK, Some(CHUNK), 7);
    let raw = if ["connected", "hello-sent"].contains(&step) { Raw::dial(path) } else { Raw::greeted(path) };
    let steps = Steps { raw: raw.unwrap(), small: Material::of(&shared), shared };
    match step.split('-').next().unwrap() {
        "connected" => {}
        "hello" => steps.send(Raw::hello()),
        "put" | "replace" => steps.put(step),
        "claim" => steps.claim(step),
        _ => steps.ask_for(step),
    }
    steps
}

fn assert_published(answer: Option<(Message, Vec<std::os::fd::OwnedFd>)>) {
    assert!(matches!(answer, Some((Message::Published(_), _))), "{answer:?}");
}

/// Sends a range of the segments.
pub(crate) fn send_segments(raw: &Raw, material: &Material, from: usize, to: usize) {
    for at in (from..to).step_by(MAX_FDS) {
        let some = at..to.min(at + MAX_FDS);
        let sizes = material.segments[some.clone()].iter().map(|(size, _)| *size).collect();
        raw.send(&Message::Segments(Segments { first: at as u64, sizes }), &material.fds()[some]).unwrap();
    }
}

impl Steps {
    fn send(&self, message: Message) {
        self.raw.send(&message, &[]).unwrap();
    }

    fn ask(&self, message: Message) -> Option<(Message, Vec<std::os::fd::OwnedFd>)> {
        self.raw.ask(&message, &[]).unwrap()
    }

    fn many(&self) -> Material {
        Material::of(&self.shared).repeated(MANY)
    }

    fn put_first(&self, put: broker::PutHeader) {
        self.raw.send(&Message::Put(Box::new(put)), &self.small.fds()).unwrap();
    }

    fn begin_many(&self, replace: bool) -> Material {
        let many = self.many();
        let put = broker::PutHeader { replace, ..many.put(if replace { "base" } else { "made" }) };
        let fds = many.fds();
        let answer = self.raw.ask(&Message::Put(Box::new(put)), &fds[..MAX_FDS]).unwrap();
        assert!(matches!(answer, Some((Message::Send(_), _))), "{answer:?}");
        many
    }

    fn table(&self, text: &str) {
        let (file, small) = (memfd(text), &self.small);
        let part = broker::PutPartHeader {
            arrays: Some(Table::Length(text.len() as u64)),
            ..small.put("made").parts.remove(0)
        };
        let put = broker::PutHeader { parts: vec![part], ..small.put("made") };
        let fds: Vec<BorrowedFd<'_>> = std::iter::once(file.as_fd()).chain(small.fds()).collect();
        self.raw.send(&Message::Put(Box::new(put)), &fds).unwrap();
    }

    fn put(&self, step: &str) {
        match step {
            "put-sent" => self.put_first(self.small.put("made")),
            "put-many-sent" => {
                let many = self.many();
                self.raw.send(&Message::Put(Box::new(many.put("made"))), &many.fds()[..MAX_FDS]).unwrap();
            }
            "put-send-read" => drop(self.begin_many(false)),
            "put-half-of-the-segments" => send_segments(&self.raw, &self.begin_many(false), MAX_FDS, MANY / 2),
            "put-all-but-the-last-segment" => send_segments(&self.raw, &self.begin_many(false), MAX_FDS, MANY - 1),
            "put-all-segments" => send_segments(&self.raw, &self.begin_many(false), MAX_FDS, MANY),
            "put-with-a-table-sent" => self.table(&big_table()),
            "put-refused-table-sent" => self.table(&"x".repeat(4 << 20)),
            "put-published" => {
                self.put_first(self.small.put("made"));
                assert_published(self.raw.receive().unwrap());
            }
            "put-waits-for-parts" => {
                let announced = vec!["all".to_owned(), "other".to_owned()];
                let group = Some("g".to_owned());
                self.put_first(broker::PutHeader {
                    announced,
                    group,
                    wait_ms: Some(600_000),
                    ..self.small.put("made")
                });
            }
            // The put is conditional on an old version: it is refused, and the object is unchanged.
            "replace-sent" => {
                self.put_first(broker::PutHeader { if_version: Some(1_000_000), ..self.small.put("base") })
            }
            "replace-half-of-the-segments" => send_segments(&self.raw, &self.begin_many(true), MAX_FDS, MANY / 2),
            "replace-published" => {
                self.put_first(broker::PutHeader { replace: true, ..self.small.put("base") });
                assert_published(self.raw.receive().unwrap());
            }
            other => panic!("no step {other}"),
        }
    }

    fn claim(&self, step: &str) {
        match step {
            "claim-sent" => self.send(claim_message("made")),
            "claim-held" | "claim-held-and-put-half" | "claim-held-and-published" | "claim-released" => {
                let Some((Message::Claimed(claimed), _)) = self.ask(claim_message("made")) else { panic!() };
                match step {
                    "claim-held-and-put-half" => send_segments(&self.raw, &self.begin_many(false), MAX_FDS, MANY / 2),
                    "claim-held-and-published" => {
                        self.put_first(self.small.put("made"));
                        assert_published(self.raw.receive().unwrap());
                    }
                    "claim-released" => self.send(Message::Release(Release { token: claimed.token })),
                    _ => {}
                }
            }
            other => panic!("no step {other}"),
        }
    }

    fn ask_for(&self, step: &str) {
        match step {
            "greeted" => {}
            "get-sent" => self.send(get_message("base")),
            "get-waits" => {
                self.send(Message::Get(Box::new(broker::GetHeader { wait_ms: Some(600_000), ..get("absent") })))
            }
            "get-stopped" => {
                self.send(Message::Get(Box::new(broker::GetHeader { wait_ms: Some(600_000), ..get("absent") })));
                self.send(Message::Stop(Stop {}));
            }
            "get-first-record-read" => assert_eq!(lease(self.ask(get_message("many"))).1, MAX_FDS),
            "get-acknowledged" => {
                lease(self.ask(get_message("many")));
                self.send(Message::Received(Received { segments: MAX_FDS as u64 }));
            }
            "get-two-records-read" => {
                lease(self.ask(get_message("many")));
                let answer = self.ask(Message::Received(Received { segments: MAX_FDS as u64 }));
                assert!(matches!(answer, Some((Message::Segments(_), _))), "{answer:?}");
            }
            "get-two-objects-first-read" => {
                let mut both = get("base");
                both.objects.push(both.objects[0].clone());
                lease(self.ask(Message::Get(Box::new(both))));
            }
            "lease-held" => {
                lease(self.ask(get_message("base")));
            }
            "lease-held-ten-times" => (0..10).for_each(|_| {
                lease(self.ask(get_message("base")));
            }),
            "release-sent" => {
                let (token, _) = lease(self.ask(get_message("base")));
                self.send(Message::Release(Release { token }));
            }
            "report-sent" => {
                let (token, _) = lease(self.ask(get_message("base")));
                self.send(Message::Report(ReportHeader { token, message: "it is not".to_owned() }));
            }
            "list-sent" => self.send(Message::List(List::default())),
            "stat-sent" => self.send(Message::Stat(Stat { name: "base".to_owned(), version: None })),
            "who-sent" => self.send(Message::Who(Who::default())),
            "delete-sent" => self.send(Message::Delete(Delete { name: "victim".to_owned(), request: None })),
            "delete-done" => {
                let answer = self.ask(Message::Delete(Delete { name: "victim".to_owned(), request: None }));
                assert!(matches!(answer, Some((Message::Done(_), _))), "{answer:?}");
            }
            other => panic!("no step {other}"),
        }
    }
}

/// A table of arrays that takes long enough to parse that its maker can be killed during it.
fn big_table() -> String {
    let entry = |at: u64| {
        let float = "float32".parse().unwrap();
        let array = vmmfd::array::ArrayDescriptor::new(float, [4u64], vmmfd::array::Order::C).unwrap();
        ArrayEntry::new(format!("layers.{at}"), array)
    };
    Attached::of(&(0..20_000).map(entry).collect::<Vec<_>>()).unwrap().as_str().to_owned()
}

pub(crate) fn value(client: &Client, driver: &Driver, name: &str) -> [u8; 2] {
    let object = client.get(&Get::new(name)).unwrap().open(driver, None).unwrap();
    let memory = object.parts()[0].memory().unwrap();
    let (mut first, mut last) = ([0; 1], [0; 1]);
    memory.copy_out(0, &mut first).unwrap();
    memory.copy_out(memory.size() - 1, &mut last).unwrap();
    [first[0], last[0]]
}

/// Connects once all other connections are closed. Returns the connection and the server.
#[track_caller]
fn alone_with(served: &Served) -> (Raw, Pid) {
    let (raw, server) = served.greeted();
    raw.until_connections(1);
    (raw, server)
}

/// Checks the listing after a client's death at a step.
fn assert_listed(raw: &Raw, step: &str, made: Made, before: u64, server_died: bool) {
    let at = format!("{step}, and the server died: {server_died}");
    let listed = raw.list();
    let names: Vec<&str> = listed.iter().map(|of| of.name.as_str()).collect();
    let exists = names.contains(&"made");
    assert!(made == Made::Maybe || exists == (made == Made::Yes), "{at}: {names:?}");
    // A sent delete takes effect: the record was complete. A killed server may not have read it.
    let deleted = !names.contains(&"victim");
    let may_be_deleted = step == "delete-done" || (step == "delete-sent" && (deleted || !server_died));
    assert_eq!(deleted, may_be_deleted, "{at}");
    let others: Vec<&str> = names.into_iter().filter(|name| !["made", "victim"].contains(name)).collect();
    assert_eq!(others, ["base", "many"], "{at}");
    let base = listed.iter().find(|of| of.name == "base").unwrap();
    assert_eq!(base.version, before + u64::from(step == "replace-published"), "{at}");
    assert_eq!(base.segments, CHUNKS as u64, "{at}");
}

/// Each client dies alone, and then each that changes something dies together with the server.
fn acknowledged_requests_survive_client_kill(mut subject: Subject) {
    subject.alone();
    let driver = &subject.driver;
    let served = Served::with(Keeper::Own, &subject, &binary("vmmfd"), &["--time-limit", "resume=50ms"]);
    let connect = || Client::connect(&served.path, &Config::default().timeout(Duration::from_secs(100))).unwrap();
    let shared = filled(driver, CHUNKS as u64 * CHUNK, Some(CHUNK), 1);
    let (small, many) = (Material::of(&shared), Material::of(&shared).repeated(MANY));
    connect().put(&Put::new("many").part(many.part())).unwrap();
    let changes = |step: &str| {
        ["put", "replace", "claim", "release", "report", "delete"].contains(&step.split('-').next().unwrap())
    };
    let alone = STEPS.iter().map(|step| (false, step));
    let with_the_server = STEPS.iter().filter(|(step, _)| changes(step)).map(|step| (true, step));
    for (server_dies, (step, made)) in alone.chain(with_the_server) {
        let client = connect();
        for name in ["base", "victim"] {
            client.put(&Put::new(name).condition(Condition::Any).part(small.part())).unwrap();
        }
        let before = client.stat("base", None).unwrap().version.summary.version;
        drop(client);
        let (raw, server) = alone_with(&served);
        // Each file is held once, beside two catalogues: nothing is left of the clients before.
        until(|| served.kept(server) == (CHUNKS + 2, CHUNKS + 2));
        drop(raw);
        drop(go_to(step, &served.path, driver));
        if server_dies {
            kill(server, Signal::SIGKILL).unwrap();
            served.wait_for_another(server, Instant::now());
        }
        let (raw, _) = alone_with(&served);
        assert_listed(&raw, step, *made, before, server_dies);
        until(|| raw.measured().leases == 0);
        drop(raw);
        let client = connect();
        let bytes = if *step == "replace-published" { [7; 2] } else { [1; 2] };
        assert_eq!(value(&client, driver, "base"), bytes, "{step}");
        let reports = client.stat("base", None).unwrap().version.reports.len();
        assert!(reports == usize::from(*step == "report-sent") || server_dies, "{step}: {reports} reports");
        if client.stat("made", None).is_ok() {
            assert_eq!(value(&client, driver, "made"), [7; 2], "{step}");
            client.delete("made").unwrap();
        }
        // The dead client's claim and its part of a version are free again.
        let claimed = client.get_or_claim(&Get::new("made"), &ClaimOf::whole()).unwrap();
        assert!(matches!(claimed, Found::Claim(_)), "{step}");
        drop(claimed);
        let alone = Put::new("made").part(small.part()).together(["all", "other"], "g", Duration::from_millis(1));
        let (code, message) = refused(client.put(&alone));
        assert_eq!(code, RefusalCode::Timeout, "{step}");
        assert!(message.contains("the parts other are missing"), "{message}");
    }
}
