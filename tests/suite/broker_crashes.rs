//! The server and its keeper, killed before each system call of each verb: every acknowledged change survives, and no partial change
//! does.

use std::{
    fs,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::Instant,
};

use nix::sys::signal::{Signal, kill};
use vmmfd::{
    broker::Client,
    driver::Driver,
    session::Config,
    wire::{
        MAX_FDS, Received, Segments,
        broker::{self, ClaimHeader, Delete, Message, Release, ReportHeader, Resume, Resumed, Table, Token},
    },
};

use crate::{
    broker::{filled, until},
    broker_faults::{CHUNK, CHUNKS, MANY, value},
    broker_process::Raw,
    running::binary,
    support::material::{Material, get, get_message, memfd},
    support::{
        Subject,
        served::{Keeper, Served, is_stopped},
        stepper::{Call, From, at as at_call, trace, while_traced},
    },
};

cases! {
    on crate::support::Subject; host and cuda: [
    verbs_survive_server_kill,
    verbs_survive_server_kill_with_keeper_service,
    start_survives_server_kill,
    puts_survive_keeper_kill,
    ]
}

/// The answer to a request, or `None` if the connection closed first.
type Answer = Option<(Message, Vec<OwnedFd>)>;

/// A unique token.
pub(crate) fn token() -> Token {
    use std::sync::atomic::{AtomicU64, Ordering};
    static LAST: AtomicU64 = AtomicU64::new(0);
    let mut bytes = [0; 16];
    bytes[..4].copy_from_slice(&std::process::id().to_le_bytes());
    bytes[8..].copy_from_slice(&LAST.fetch_add(1, Ordering::Relaxed).to_le_bytes());
    Token(bytes)
}

/// Sends a message that has no answer. The send fails if the server was killed.
fn tell(raw: &Raw, message: &Message) -> Answer {
    let _ = raw.send(message, &[]);
    None
}

/// Sends a request that a kill may interrupt.
fn ask(raw: &Raw, message: &Message, fds: &[BorrowedFd<'_>]) -> Answer {
    raw.ask(message, fds).ok().flatten()
}

#[track_caller]
fn resume(raw: &Raw, leases: &[Token]) -> Resumed {
    let resume = Message::Resume(Resume { leases: leases.to_vec(), puts: Vec::new() });
    match ask(raw, &resume, &[]) {
        Some((Message::Resumed(resumed), _)) => resumed,
        other => panic!("{other:?}"),
    }
}

/// Memory for puts.
struct Makings {
    small: Material,
    many: Material,
    table: (OwnedFd, usize),
}

impl Makings {
    fn new(driver: &Driver) -> Self {
        let shared = filled(driver, CHUNKS as u64 * CHUNK, Some(CHUNK), 7);
        let text = format!("{{\"words\": \"{}\"}}", "x".repeat(5000));
        let table = (memfd(&text), text.len());
        Self { small: Material::of(&shared), many: Material::of(&shared).repeated(MANY), table }
    }

    fn put(&self, name: &str, request: Token, replace: bool) -> broker::PutHeader {
        broker::PutHeader { request: Some(request), replace, ..self.small.put(name) }
    }

    fn put_small(&self, raw: &Raw, put: broker::PutHeader) -> Answer {
        ask(raw, &Message::Put(Box::new(put)), &self.small.fds())
    }

    /// A put with its metadata in a memfd.
    fn put_with_table(&self, raw: &Raw, put: broker::PutHeader) -> Answer {
        let put = broker::PutHeader { metadata: Some(Table::Length(self.table.1 as u64)), ..put };
        let fds: Vec<_> = [self.table.0.as_fd()].into_iter().chain(self.small.fds()).collect();
        ask(raw, &Message::Put(Box::new(put)), &fds)
    }

    /// A put of several records.
    fn put_many(&self, raw: &Raw, name: &str, request: Token) -> Answer {
        let put = broker::PutHeader { request: Some(request), ..self.many.put(name) };
        let (fds, sizes) = (self.many.fds(), &self.many.segments);
        match ask(raw, &Message::Put(Box::new(put)), &fds[..MAX_FDS]) {
            Some((Message::Send(_), _)) => {}
            other => return other,
        }
        for at in (MAX_FDS..MANY).step_by(MAX_FDS) {
            let some = at..MANY.min(at + MAX_FDS);
            let sizes = sizes[some.clone()].iter().map(|(size, _)| *size).collect();
            raw.send(&Message::Segments(Segments { first: at as u64, sizes }), &fds[some]).ok()?;
        }
        raw.receive().ok().flatten()
    }
}

/// Receives all records of a lease. Returns its token after the first record, and whether the lease is complete.
fn get_whole(raw: &Raw, name: &str, segments: usize) -> (Option<Token>, bool) {
    let Some((Message::Lease(lease), fds)) = ask(raw, &get_message(name), &[]) else { return (None, false) };
    let mut have = fds.len();
    while have < segments {
        let received = Message::Received(Received { segments: have as u64 });
        match ask(raw, &received, &[]) {
            Some((Message::Segments(_), fds)) => have += fds.len(),
            _ => return (Some(lease.token), false),
        }
    }
    (Some(lease.token), true)
}

/// The request that the server handles while it is traced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verb {
    Put,
    PutWithTable,
    PutMany,
    Replace,
    Delete,
    Get,
    GetMany,
    Release,
    Report,
    Claim,
    Resume,
    /// Closes a connection that has a lease.
    Close,
}

/// The verbs that change something. The server's own keeper runs the first of them, a keeper service the others: the server's code is the same.
const VERBS: [Verb; 12] = [
    Verb::Put,
    Verb::PutWithTable,
    Verb::Delete,
    Verb::Get,
    Verb::Report,
    Verb::Claim,
    Verb::Replace,
    Verb::PutMany,
    Verb::GetMany,
    Verb::Release,
    Verb::Resume,
    Verb::Close,
];

/// A broker that the test kills, and its expected contents.
struct Scene<'a> {
    served: Served,
    driver: &'a Driver,
    /// Put and deleted in each round. Its memory is not shared with the permanent objects.
    makings: Makings,
    /// Put before a replacement.
    before: Makings,
    instance: String,
    kills: usize,
}

/// The names of the permanent objects.
const ALWAYS: [&str; 2] = ["base", "many"];

impl<'a> Scene<'a> {
    fn new(keeper: Keeper, subject: &'a Subject) -> Self {
        let served = Served::with(keeper, subject, &binary("vmmfd"), &[]);
        let stays = Makings::new(&subject.driver);
        let (raw, _) = served.greeted();
        let published = |answer: Answer| assert!(matches!(answer, Some((Message::Published(_), _))), "{answer:?}");
        published(stays.put_small(&raw, stays.put("base", token(), false)));
        published(stays.put_many(&raw, "many", token()));
        let [makings, before] = [Makings::new(&subject.driver), Makings::new(&subject.driver)];
        let instance = resume(&raw, &[]).instance;
        Self { served, driver: &subject.driver, makings, before, instance, kills: 0 }
    }

    fn client(&self) -> Client {
        Client::connect(&self.served.path, &Config::default()).unwrap()
    }

    fn listed(&self) -> Vec<(String, u64)> {
        let (raw, _) = self.served.greeted();
        raw.list().into_iter().map(|of| (of.name, of.version)).collect()
    }

    /// Runs a verb and kills the server before its `nth` system call. Returns whether the server reached this call.
    fn kill_in(&mut self, verb: Verb, nth: usize) -> bool {
        let (raw, server) = self.served.greeted();
        let request = token();
        let name = format!("made/{verb:?}");
        // The object to replace or delete.
        if matches!(verb, Verb::Replace | Verb::Delete) {
            let answer = self.before.put_small(&raw, self.before.put(&name, token(), false));
            assert!(matches!(answer, Some((Message::Published(_), _))), "{verb:?} {nth}: {answer:?}");
        }
        let mut held = None;
        if matches!(verb, Verb::Release | Verb::Report | Verb::Resume | Verb::Close) {
            held = get_whole(&raw, "base", CHUNKS).0;
        }
        let (mut raw, mut server) = (raw, server);
        if verb == Verb::Resume {
            let begun = Instant::now();
            kill(server, Signal::SIGKILL).unwrap();
            self.served.wait_for_another(server, begun);
            (raw, server) = self.served.greeted();
        }
        raw.until_connections(1);
        let makings = &self.makings;
        let put = makings.put(&name, request, verb == Verb::Replace);
        let (answer, traced) = while_traced(server, at_call(nth), || match verb {
            Verb::Put | Verb::Replace => makings.put_small(&raw, put),
            Verb::PutWithTable => makings.put_with_table(&raw, put),
            Verb::PutMany => makings.put_many(&raw, &name, request),
            Verb::Delete => ask(&raw, &Message::Delete(Delete { name: name.clone(), request: Some(request) }), &[]),
            Verb::Get => ask(&raw, &get_message("base"), &[]),
            Verb::GetMany => {
                held = get_whole(&raw, "many", MANY).0;
                None
            }
            Verb::Release => tell(&raw, &Message::Release(Release { token: held.unwrap() })),
            Verb::Report => {
                let report = ReportHeader { token: held.unwrap(), message: "it is not".to_owned() };
                tell(&raw, &Message::Report(report))
            }
            Verb::Close => {
                rustix::net::shutdown(&raw, rustix::net::Shutdown::Both).unwrap();
                None
            }
            Verb::Claim => {
                let claim = broker::GetHeader { claim: Some(ClaimHeader::default()), ..get(&name) };
                ask(&raw, &Message::Get(Box::new(claim)), &[])
            }
            Verb::Resume => {
                let leases = held.into_iter().collect();
                ask(&raw, &Message::Resume(Resume { leases, puts: Vec::new() }), &[])
            }
        });
        let at = format!("{verb:?}, killed before system call {nth}: {answer:?}");
        if let Some(killed) = traced.killed {
            self.kills += 1;
            self.served.wait_for_another(server, killed);
        }
        if let Some((Message::Lease(lease), _)) = &answer {
            held = Some(lease.token);
        }
        assert!(!matches!(answer, Some((Message::Refused(_) | Message::Error(_), _))), "{at}");
        let held = held.filter(|_| traced.killed.is_some());
        // Check the lease first: the server waits 10 s for it.
        if let Some(token) = held {
            let lost = resume(&self.served.greeted().0, &[token]).lost;
            // Only a released lease, or a lease whose connection was closed, may be lost.
            assert!(lost.is_empty() || matches!(verb, Verb::Release | Verb::Close), "{at}: a lease is lost");
        }
        self.check(verb, &name, request, &answer, &at);
        traced.killed.is_some()
    }

    /// Checks the objects after a kill, and deletes the new one.
    fn check(&self, verb: Verb, name: &str, request: Token, answer: &Answer, at: &str) {
        let (raw, _) = self.served.greeted();
        assert_eq!(resume(&raw, &[]).instance, self.instance, "{at}");
        let listed = self.listed();
        let version = listed.iter().find(|(of, _)| of == name).map(|(_, version)| *version);
        let others: Vec<_> = listed.iter().filter(|(of, _)| of != name).map(|(of, _)| of.as_str()).collect();
        assert_eq!(others, ALWAYS, "{at}");
        let client = self.client();
        assert_eq!(value(&client, self.driver, "base"), [7; 2], "{at}");
        let puts = matches!(verb, Verb::Put | Verb::PutWithTable | Verb::PutMany | Verb::Replace);
        if puts {
            let first = u64::from(verb == Verb::Replace);
            match answer {
                Some((Message::Published(published), _)) => assert_eq!(version, Some(published.version), "{at}"),
                Some(other) => panic!("{at}: {other:?}"),
                None => assert!(version.unwrap_or(0) == first || version == Some(first + 1), "{at}: {version:?}"),
            }
            // A repeated request is executed once.
            let again = match verb {
                Verb::PutMany => self.makings.put_many(&raw, name, request),
                Verb::PutWithTable => self.makings.put_with_table(&raw, self.makings.put(name, request, false)),
                _ => self.makings.put_small(&raw, self.makings.put(name, request, verb == Verb::Replace)),
            };
            match (again, answer) {
                (Some((Message::Published(again), _)), Some((Message::Published(before), _))) => {
                    assert_eq!((again.version, &again.id), (before.version, &before.id), "{at}");
                }
                (Some((Message::Published(again), _)), None) => assert_eq!(again.version, first + 1, "{at}"),
                other => panic!("{at}: {other:?}"),
            }
            let info = client.stat(name, None).unwrap().version;
            let segments = if verb == Verb::PutMany { MANY } else { CHUNKS };
            assert_eq!((info.summary.segments, info.summary.version), (segments as u64, first + 1), "{at}");
            assert_eq!(value(&client, self.driver, name), [7; 2], "{at}");
        }
        if verb == Verb::Delete {
            match answer {
                Some((Message::Done(_), _)) => assert_eq!(version, None, "{at}"),
                Some(other) => panic!("{at}: {other:?}"),
                None => assert!(version.is_none_or(|version| version == 1), "{at}"),
            }
            let delete = Message::Delete(Delete { name: name.to_owned(), request: Some(request) });
            let again = ask(&raw, &delete, &[]);
            assert!(matches!(again, Some((Message::Done(_), _))), "{at}: {again:?}");
            assert!(self.listed().iter().all(|(of, _)| of != name), "{at}");
        }
        if puts {
            client.delete(name).unwrap();
        }
    }
}

fn server_killed_in(subject: &Subject, keeper: Keeper, verbs: &[Verb]) {
    let mut scene = Scene::new(keeper, subject);
    for &verb in verbs {
        let before = scene.kills;
        while scene.kill_in(verb, scene.kills - before) {}
        assert!(scene.kills > before, "{verb:?}");
    }
    // The server keeps three segments, each once, and two catalogues.
    let server = scene.served.server();
    until(|| scene.served.kept(server) == (CHUNKS + 2, CHUNKS + 2));
}

fn verbs_survive_server_kill(mut subject: Subject) {
    subject.alone();
    server_killed_in(&subject, Keeper::Own, &VERBS[..7]);
}

fn verbs_survive_server_kill_with_keeper_service(mut subject: Subject) {
    subject.alone();
    server_killed_in(&subject, Keeper::Apart, &VERBS[7..]);
}

/// The trace starts at the program's entry: the dynamic loader is not part of the test. A kill before a close equals a kill before the next
/// call: the starting server closes nothing that others wait for.
fn start_survives_server_kill(mut subject: Subject) {
    subject.alone();
    let scene = Scene::new(Keeper::Apart, &subject);
    let manager = scene.served.manager.as_ref().unwrap();
    let flag = scene.served.stop_flag();
    let (mut nth, mut killed) = (0, true);
    while killed {
        let (raw, server) = scene.served.greeted();
        // The next server has cleanup to finish: only a lease holds this version, and no client reclaims it.
        let answer = scene.makings.put_small(&raw, scene.makings.put("gone", token(), false));
        assert!(matches!(answer, Some((Message::Published(_), _))), "{answer:?}");
        get_whole(&raw, "gone", CHUNKS).0.unwrap();
        let delete = Message::Delete(Delete { name: "gone".to_owned(), request: None });
        assert!(matches!(ask(&raw, &delete, &[]), Some((Message::Done(_), _))));
        // A put is in progress, too.
        let put = scene.before.put("half", token(), false);
        raw.send(&Message::Put(Box::new(put)), &scene.before.small.fds()).unwrap();
        fs::write(&flag, "").unwrap();
        let starts = manager.starts();
        kill(server, Signal::SIGKILL).unwrap();
        let next = manager.main(starts + 1);
        until(|| is_stopped(next));
        fs::remove_file(&flag).unwrap();
        let (_, traced) = trace(next, From::Stopped, not_closing(at_call(nth)), || {
            // Either this server answers or its successor does.
            scene.served.greeted()
        });
        killed = traced.killed.is_some();
        nth += 1;
        let client = scene.client();
        assert_eq!(value(&client, scene.driver, "base"), [7; 2], "killed before call {nth}");
        let names: Vec<String> = scene.listed().into_iter().map(|(name, _)| name).collect();
        assert!(names == ["base", "half", "many"] || names == ALWAYS, "killed before call {nth}: {names:?}");
        if names.len() > ALWAYS.len() {
            client.delete("half").unwrap();
        }
    }
    eprintln!("{} kills of the server while it starts", nth - 1);
    assert!(nth > 10);
    let server = scene.served.server();
    // The leases expire with the grace period.
    until(|| scene.served.kept(server) == (CHUNKS + 2, CHUNKS + 2));
    let (raw, _) = scene.served.greeted();
    assert_eq!(resume(&raw, &[]).instance, scene.instance);
}

fn not_closing(mut kills: impl FnMut(&Call) -> bool) -> impl FnMut(&Call) -> bool {
    move |call| call.number != nix::libc::SYS_close && kills(call)
}

fn puts_survive_keeper_kill(mut subject: Subject) {
    subject.alone();
    let mut scene = Scene::new(Keeper::Own, &subject);
    let mut kills = 0;
    for replace in [false, true] {
        let (mut nth, mut killed) = (0, true);
        while killed {
            let name = "made/it";
            let (raw, server) = scene.served.greeted();
            let keeper = scene.served.keeper();
            if replace {
                let answer = scene.before.put_small(&raw, scene.before.put(name, token(), false));
                assert!(matches!(answer, Some((Message::Published(_), _))), "{answer:?}");
            }
            let put = scene.makings.put(name, token(), replace);
            let (answer, traced) = while_traced(keeper, at_call(nth), || scene.makings.put_small(&raw, put));
            scene.served.reap();
            killed = traced.killed.is_some();
            // The server and its connections are unaffected.
            let Some((Message::Published(published), _)) = &answer else { panic!("{nth}: {answer:?}") };
            assert_eq!(published.version, 1 + u64::from(replace));
            assert_eq!(scene.served.server(), server);
            // The next keeper holds the same descriptors, and the next server restores everything from it.
            until(|| scene.served.kept(server) == (2 * CHUNKS + 2, 2 * CHUNKS + 2));
            let (server, _) = scene.served.kill_server();
            assert_eq!(scene.listed(), [("base", 1), (name, 1 + u64::from(replace)), ("many", 1)].map(owned));
            let client = scene.client();
            assert_eq!(value(&client, scene.driver, name), [7; 2]);
            client.delete(name).unwrap();
            drop(client);
            until(|| scene.served.kept(server) == (CHUNKS + 2, CHUNKS + 2));
            (nth, kills) = (nth + 1, kills + usize::from(killed));
        }
    }
    eprintln!("{kills} kills of the keeper");
    // On a busy machine the keeper receives several messages in one call: at least two kills in each round.
    assert!(kills >= 4);
    let (raw, _) = scene.served.greeted();
    assert_eq!(resume(&raw, &[]).instance, scene.instance);
    drop(raw);
    // The keepers are killed faster than the server starts them: the server pauses, and works without a keeper in the meantime.
    let server = scene.served.server();
    (0..8).for_each(|_| scene.served.kill_keeper());
    assert_eq!(scene.served.server(), server);
    // A keeper that the server started receives the same stop request as the first keeper.
    scene.served.stop();
}

fn owned((name, version): (&str, u64)) -> (String, u64) {
    (name.to_owned(), version)
}
