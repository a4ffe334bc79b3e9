//! Processes killed before, during and after each verb of a broker: exactly the acknowledged changes remain.

use std::{
    fs,
    os::fd::{AsFd, BorrowedFd},
    path::Path,
    sync::Arc,
    time::Duration,
};

use vmmfd::{
    broker::{ArrayEntry, Attached, ClaimOf, Client, Condition, Found, Get, Put, PutPart},
    driver::Driver,
    error::RefusalCode,
    memory::{Chunk, Region, Shared},
    session::Config,
    wire::{
        MAX_FDS, Memory, Received, Segments,
        broker::{
            self, ClaimHeader, Delete, GetObject, List, Message, Release, ReportHeader, Stat, Stop, Table, Token, Who,
        },
    },
};

use crate::{
    broker::{filled, refused, until},
    broker_process::{Actor, Process, Raw, Setup},
    support::{Inode, Kind, Subject},
};

cases! {
    on crate::support::Subject; host and cuda: [
    acknowledged_requests_survive_client_kill,
    version_is_freed_with_its_killed_reader,
    ]
}

const MIB: u64 = 1 << 20;

/// The segments of the large object: its put and its lease take three records each.
pub(crate) const MANY: usize = 600;

/// The distinct chunks that the segments repeat.
pub(crate) const CHUNKS: usize = 3;

pub(crate) const CHUNK: u64 = 2 * MIB;

/// Whether `made` exists after a child is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Made {
    /// The put was acknowledged.
    Yes,
    /// The put was not sent completely.
    No,
    /// The put was sent completely but not acknowledged: both outcomes are valid.
    Maybe,
}

/// The steps at which a child is killed, and whether `made` (three chunks) exists then. Each child finds an object `base`.
pub(crate) const STEPS: &[(&str, Made)] = &[
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
    ("lease-mapped", Made::No),
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

/// Memory and its description in a put.
pub(crate) struct Material {
    pub(crate) memory: Memory,
    pub(crate) segments: Vec<(u64, Arc<Chunk>)>,
    backend: String,
}

impl Material {
    pub(crate) fn of(shared: &Shared) -> Self {
        let (_, chunks) = shared.chunks(0..shared.size()).unwrap().unwrap();
        let segments: Vec<_> = chunks.into_iter().map(|chunk| (chunk.size(), chunk)).collect();
        let memory = (&shared.describe().unwrap()).into();
        Self { memory, segments, backend: shared.device().backend().to_string() }
    }

    /// Repeats the segments up to this count.
    pub(crate) fn repeated(mut self, count: usize) -> Self {
        self.segments = self.segments.into_iter().cycle().take(count).collect();
        let size = self.segments.iter().map(|(size, _)| size).sum();
        (self.memory.size, self.memory.mapped_size, self.memory.segments) = (size, size, count as u64);
        self
    }

    /// A put of the whole memory, with the sizes of its first record.
    pub(crate) fn put(&self, name: &str) -> broker::PutHeader {
        let memory = self.memory.clone();
        let arrays = None;
        let digest = None;
        broker::PutHeader {
            name: name.to_owned(),
            replace: false,
            if_version: None,
            announced: Vec::new(),
            group: None,
            wait_ms: None,
            backend: self.backend.clone(),
            parts: vec![broker::PutPartHeader { name: "all".to_owned(), memory, arrays, digest }],
            metadata: None,
            mode: None,
            lifetime: None,
            keep: None,
            request: None,
            restore: None,
            sizes: self.segments.iter().take(MAX_FDS).map(|(size, _)| *size).collect(),
        }
    }

    pub(crate) fn fds(&self) -> Vec<BorrowedFd<'_>> {
        self.segments.iter().map(|(_, chunk)| chunk.as_fd()).collect()
    }

    /// Sends a range of the segments.
    pub(crate) fn send(&self, raw: &Raw, from: usize, to: usize) {
        for at in (from..to).step_by(MAX_FDS) {
            let some = &self.segments[at..to.min(at + MAX_FDS)];
            let sizes = some.iter().map(|(size, _)| *size).collect();
            let fds: Vec<BorrowedFd<'_>> = some.iter().map(|(_, chunk)| chunk.as_fd()).collect();
            raw.send(&Message::Segments(Segments { first: at as u64, sizes }), &fds).unwrap();
        }
    }
}

pub(crate) fn get(name: &str) -> broker::GetHeader {
    let object = GetObject { name: name.to_owned(), ..GetObject::default() };
    broker::GetHeader { objects: vec![object], wait_ms: None, claim: None }
}

pub(crate) fn get_message(name: &str) -> Message {
    Message::Get(Box::new(get(name)))
}

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

/// A child of a test, with memory to put and a connection that has greeted the broker.
struct Steps<'a> {
    raw: Raw,
    shared: &'a Shared,
    small: Material,
}

/// Runs a child up to the step. It keeps its memory and connections until it is killed.
pub(crate) fn go_to(step: &str, path: &Path, driver: &Driver) -> ! {
    let shared = filled(driver, CHUNKS as u64 * CHUNK, Some(CHUNK), 7);
    if step == "connected" {
        let _raw = Raw::dial(path).unwrap();
        Actor::stay("");
    }
    if step == "hello-sent" {
        let raw = Raw::dial(path).unwrap();
        raw.send(&Raw::hello(), &[]).unwrap();
        Actor::stay("");
    }
    if step == "lease-mapped" {
        let client = Client::connect(path, &Config::default()).unwrap();
        let _object = client.get(&Get::new("base")).unwrap().open(driver, None).unwrap();
        Actor::stay("");
    }
    let steps = Steps { raw: Raw::greeted(path).unwrap(), shared: &shared, small: Material::of(&shared) };
    match step.split('-').next().unwrap() {
        "put" | "replace" => steps.put(step),
        "claim" => steps.claim(step),
        _ => steps.ask_for(step),
    }
    Actor::stay("");
}

fn assert_published(answer: Option<(Message, Vec<std::os::fd::OwnedFd>)>) {
    assert!(matches!(answer, Some((Message::Published(_), _))), "{answer:?}");
}

impl Steps<'_> {
    fn send(&self, message: Message) {
        self.raw.send(&message, &[]).unwrap();
    }

    fn ask(&self, message: Message) -> Option<(Message, Vec<std::os::fd::OwnedFd>)> {
        self.raw.ask(&message, &[]).unwrap()
    }

    fn many(&self) -> Material {
        Material::of(self.shared).repeated(MANY)
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
            "put-half-of-the-segments" => self.begin_many(false).send(&self.raw, MAX_FDS, MANY / 2),
            "put-all-but-the-last-segment" => self.begin_many(false).send(&self.raw, MAX_FDS, MANY - 1),
            "put-all-segments" => self.begin_many(false).send(&self.raw, MAX_FDS, MANY),
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
            "replace-half-of-the-segments" => self.begin_many(true).send(&self.raw, MAX_FDS, MANY / 2),
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
                    "claim-held-and-put-half" => self.begin_many(false).send(&self.raw, MAX_FDS, MANY / 2),
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
            "holds-until-told" => {
                lease(self.ask(get_message("base")));
            }
            other => panic!("no step {other}"),
        }
    }
}

/// A sealed memfd with a text, the form of a table.
pub(crate) fn memfd(text: &str) -> std::os::fd::OwnedFd {
    use nix::{
        fcntl::{FcntlArg, SealFlag, fcntl},
        sys::memfd::{MFdFlags, memfd_create},
    };
    let file = memfd_create(c"table", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING).unwrap();
    let mut file = fs::File::from(file);
    std::io::Write::write_all(&mut file, text.as_bytes()).unwrap();
    let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_WRITE | SealFlag::F_SEAL_SEAL;
    fcntl(&file, FcntlArg::F_ADD_SEALS(seals)).unwrap();
    file.into()
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

/// The full name of a case's test.
pub(crate) fn name_of(subject: &Subject, file: &str, case: &str) -> String {
    let module = match subject.kind {
        Kind::Host => "host",
        Kind::Fake => "fake",
        Kind::Cuda => "cuda",
    };
    format!("{file}::{module}::{case}")
}

pub(crate) fn value(client: &Client, driver: &Driver, name: &str) -> [u8; 2] {
    let object = client.get(&Get::new(name)).unwrap().open(driver, None).unwrap();
    let memory = object.parts()[0].memory().unwrap();
    let (mut first, mut last) = ([0; 1], [0; 1]);
    memory.copy_out(0, &mut first).unwrap();
    memory.copy_out(memory.size() - 1, &mut last).unwrap();
    [first[0], last[0]]
}

/// Checks the listing after a kill. Returns whether the object `made` exists.
fn assert_listed(client: &Client, step: &str, made: Made, version: u64) -> bool {
    let listed: Vec<(String, u64, u64)> =
        client.list("").unwrap().into_iter().map(|of| (of.name, of.version, of.leases)).collect();
    let exists = listed.iter().any(|(name, ..)| name == "made");
    assert!(made == Made::Maybe || exists == (made == Made::Yes), "{step}: {listed:?}");
    let names = ["base", "made", "many", "victim"].into_iter().filter(|name| exists || *name != "made");
    let expected = names.map(|name| (name.to_owned(), if name == "base" { version } else { 1 }, 0));
    assert_eq!(listed, expected.collect::<Vec<_>>(), "{step}");
    let held = client.who("").unwrap();
    assert!(held.leases.is_empty(), "{step}: {:?}", held.leases);
    assert_eq!((held.totals.len(), held.totals[0].objects, held.totals[0].leases), (1, listed.len() as u64, 0));
    exists
}

fn acknowledged_requests_survive_client_kill(mut subject: Subject) {
    subject.alone();
    let driver = subject.driver.clone();
    if let Some((step, path)) = Actor::role() {
        go_to(&step, &path, &driver);
    }
    let test = name_of(&subject, "broker_faults", "acknowledged_requests_survive_client_kill");
    let server = Process::start(Setup::of(&subject));
    let client = server.client();
    let shared = filled(&driver, CHUNKS as u64 * CHUNK, Some(CHUNK), 1);
    let file = Inode::of(&*Material::of(&shared).segments[0].1);
    assert!(file.open_here() > 0);
    let part = || PutPart::of("all", &shared).unwrap();
    client.put(&Put::new("base").part(part())).unwrap();
    let many = Material::of(&shared).repeated(MANY);
    let mut description = shared.describe().unwrap();
    (description.size, description.mapped_size) = (many.memory.size, many.memory.mapped_size);
    if let vmmfd::memory::Sharing::Vmm { segments, .. } = &mut description.sharing {
        *segments = MANY as u64;
    }
    let segments = many.segments.iter().map(|(size, chunk)| (*size, chunk.as_fd()));
    let whole = PutPart::of_segments("all", driver.backend(), description, segments).unwrap();
    client.put(&Put::new("many").part(whole)).unwrap();
    drop(many);
    client.put(&Put::new("victim").part(part())).unwrap();
    // The server keeps each file once, plus the catalogue. It closes duplicates in another thread.
    until(|| server.memory_files() == CHUNKS + 1);
    let files = server.files();
    // The first child may leave one-time allocations in the driver, so the first step runs twice.
    let mut free = None;
    let mut version = 1;
    let mut kills = 0;
    for (step, made) in std::iter::once(&STEPS[0]).chain(STEPS) {
        let mut actor = Actor::start(&test, step, &server.path);
        actor.until_there();
        actor.kill();
        kills += 1;
        server.wait_for_ends(&client);
        version += u64::from(*step == "replace-published");
        if *step == "delete-sent" || *step == "delete-done" {
            // A sent delete takes effect: the record was complete.
            until(|| client.list("victim").unwrap().is_empty());
            client.put(&Put::new("victim").part(part())).unwrap();
        }
        let exists = assert_listed(&client, step, *made, version);
        let base = client.stat("base", None).unwrap().version;
        assert_eq!((base.versions, base.summary.segments), (vec![version], CHUNKS as u64), "{step}");
        assert_eq!(base.reports.len(), usize::from(kills > 1 && *step == "report-sent"), "{step}");
        assert_eq!(value(&client, &driver, "base"), if version == 1 { [1; 2] } else { [7; 2] }, "{step}");
        if exists {
            assert_eq!(value(&client, &driver, "made"), [7; 2], "{step}");
            client.delete("made").unwrap();
        }
        // The dead child's claim and its part of a version are free again.
        let claimed = client.get_or_claim(&Get::new("made"), &ClaimOf::whole()).unwrap();
        assert!(matches!(claimed, Found::Claim(_)), "{step}");
        drop(claimed);
        let alone = Put::new("made").part(part()).together(["all", "other"], "g", Duration::from_millis(1));
        assert_eq!(refused(client.put(&alone)).0, RefusalCode::Timeout, "{step}");
        if *step == "report-sent" || *step == "replace-published" {
            // Restore the initial state.
            client.put(&Put::new("base").condition(Condition::Any).part(part())).unwrap();
            client.delete("base").unwrap();
            client.put(&Put::new("base").part(part())).unwrap();
            version = 1;
        }
        until(|| server.files() == files);
        if subject.kind == Kind::Cuda && free.is_none() {
            free = Some(subject.device().memory_info().unwrap().free);
        }
    }
    // Other processes may use the GPU temporarily.
    if let Some(before) = free {
        until(|| subject.device().memory_info().unwrap().free >= before);
    }
    eprintln!("{test}: {kills} kills; free memory before and after: {free:?}");
    assert_eq!(kills, STEPS.len() + 1);
}

fn version_is_freed_with_its_killed_reader(mut subject: Subject) {
    subject.alone();
    let driver = subject.driver.clone();
    if let Some((step, path)) = Actor::role() {
        go_to(&step, &path, &driver);
    }
    let test = name_of(&subject, "broker_faults", "version_is_freed_with_its_killed_reader");
    let server = Process::start(Setup::of(&subject));
    let client = server.client();
    let put = |value: u8| {
        let shared = filled(&driver, CHUNKS as u64 * CHUNK, Some(CHUNK), value);
        let put = Put::new("base").condition(Condition::Any).part(PutPart::of("all", &shared).unwrap());
        client.put(&put).unwrap().version
    };
    put(1);
    let before = CHUNKS + 1;
    until(|| server.memory_files() == before);
    for deleted in [false, true] {
        let mut actors: Vec<Actor> =
            ["holds-until-told", "lease-mapped"].map(|step| Actor::start(&test, step, &server.path)).into();
        actors.iter_mut().for_each(|actor| drop(actor.until_there()));
        let old = client.stat("base", None).unwrap().version.summary.version;
        let new = put(2);
        if deleted {
            client.delete("base").unwrap();
            put(3);
        }
        let held = client.who("").unwrap();
        assert_eq!(held.leases.len(), 2);
        assert!(held.leases.iter().all(|lease| (lease.version, lease.named) == (old, !deleted)), "{:?}", held.leases);
        until(|| server.memory_files() == before + CHUNKS);
        // The last lease frees the memory.
        let last = actors.pop().unwrap();
        last.kill();
        until(|| client.who("").unwrap().leases.len() == 1);
        assert_eq!(server.memory_files(), before + CHUNKS);
        actors.pop().unwrap().kill();
        until(|| client.who("").unwrap().leases.is_empty());
        until(|| server.memory_files() == before);
        let versions = client.stat("base", None).unwrap().version.versions;
        assert_eq!(versions, if deleted { vec![1] } else { vec![new] });
        assert_eq!(value(&client, &driver, "base"), if deleted { [3; 2] } else { [2; 2] });
    }
}
