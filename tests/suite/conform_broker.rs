//! `vmmfd conform` as a client: against this crate's own broker, which follows every rule, and against a relay that changes the broker's
//! records to break one rule. The messages of broker and client match their schemas.

use std::{
    collections::BTreeSet,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};

use nix::{
    fcntl::{FcntlArg, SealFlag, fcntl},
    sys::memfd::{MFdFlags, memfd_create},
    unistd::ftruncate,
};
use rustix::net::{SocketAddrUnix, SocketFlags, accept_with, connect};
use serde_json::{Value, json};
use tempfile::TempDir;
use vmmfd::{
    broker::{ClaimOf, Client, Get, Put, PutPart, Server, ServerConfig},
    channel::{Cancel, CancelReason},
    driver::{Backend, Choice, GRANULARITY, open},
    memory::{Device, Selector, Shared, Spec},
    session::Config,
    wire::HEADER_LENGTH,
};

use crate::{
    broker::until,
    broker_files,
    conform::{breaks, conforms},
    conversation::{listening, seqpacket},
    protocol_files::relay,
    running::{Ended, Meeting},
};

/// A broker on host memory, in a thread.
struct Serving {
    folder: TempDir,
    cancel: Cancel,
    thread: Option<thread::JoinHandle<()>>,
}

impl Serving {
    fn start() -> Self {
        let (folder, cancel) = (tempfile::tempdir().unwrap(), Cancel::new().unwrap());
        let mut config = ServerConfig::default();
        // The timeout of the tool's silence cases.
        config.timeout = Duration::from_secs(3);
        let server = Server::bind(&folder.path().join("broker"), config, &cancel).unwrap();
        let thread = Some(thread::spawn(move || {
            let report = server.run().unwrap();
            // The cases leave no objects behind.
            assert_eq!((report.objects, report.versions, report.leases, report.bytes), (0, 0, 0, 0));
        }));
        Self { folder, cancel, thread }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("broker")
    }

    /// Stops the broker after it has released the resources of disconnected clients.
    fn stop(mut self) {
        let client = Client::connect(&self.path(), &Config::default()).unwrap();
        until(|| client.list("").unwrap().is_empty() && client.who("").unwrap().leases.is_empty());
        drop(client);
        self.cancel.cancel(CancelReason::Program);
        self.thread.take().unwrap().join().unwrap();
    }
}

fn conform(path: &Path, options: &[&str]) -> Ended {
    let mut run = Meeting::host().bare("vmmfd");
    run.command.arg("conform").arg(path).args(["--as", "client", "--json"]).args(options);
    run.end()
}

#[test]
fn this_broker_conforms() {
    let serving = Serving::start();
    conforms(&conform(&serving.path(), &["--timeout", "3s"]), &[]);
    serving.stop();
}

/// A decoded record of the broker.
struct Said {
    kind: u16,
    body: Value,
    fds: Vec<OwnedFd>,
}

impl Said {
    fn read(record: &[u8], fds: Vec<OwnedFd>) -> Self {
        let kind = u16::from_le_bytes([record[6], record[7]]);
        Self { kind, body: serde_json::from_slice(&record[HEADER_LENGTH..]).unwrap(), fds }
    }

    fn is(&self, name: &str) -> bool {
        broker_files::name_of(self.kind) == name
    }

    fn write(self) -> (Vec<u8>, Vec<OwnedFd>) {
        let body = self.body.to_string();
        let mut record = b"VMFD\x01\x00".to_vec();
        record.extend(self.kind.to_le_bytes());
        record.extend((body.len() as u32).to_le_bytes());
        record.extend((self.fds.len() as u32).to_le_bytes());
        record.extend(body.as_bytes());
        (record, self.fds)
    }
}

/// Relays the connections at a new path to a broker, and passes each record through `pass`.
fn between(
    serving: &Serving,
    pass: impl Fn(bool, Vec<u8>, Vec<OwnedFd>) -> Option<(Vec<u8>, Vec<OwnedFd>)> + Send + Sync + 'static,
) -> PathBuf {
    let (path, real, pass) = (serving.folder.path().join("between"), serving.path(), Arc::new(pass));
    let listener = listening(&path, 16);
    // This thread runs until the process exits; a connection's thread stops when both sockets close.
    thread::spawn(move || {
        while let Ok(theirs) = accept_with(&listener, SocketFlags::CLOEXEC) {
            let (real, pass) = (real.clone(), Arc::clone(&pass));
            thread::spawn(move || {
                let ours = seqpacket();
                if connect(&ours, &SocketAddrUnix::new(&real).unwrap()).is_ok() {
                    relay(&theirs, &ours, &*pass);
                }
            });
        }
    });
    path
}

/// A memfd with the size of one segment, filled with zeros.
fn zeros(seals: SealFlag) -> OwnedFd {
    let memfd = memfd_create(c"zeros", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING).unwrap();
    ftruncate(&memfd, GRANULARITY as i64).unwrap();
    nix::fcntl::fallocate(memfd.as_fd(), nix::fcntl::FallocateFlags::empty(), 0, GRANULARITY as i64).unwrap();
    fcntl(&memfd, FcntlArg::F_ADD_SEALS(seals)).unwrap();
    memfd
}

/// Changes a record of the broker. `false` drops the record.
type Change = fn(&mut Said) -> bool;

/// Sets a field of every record of a kind.
macro_rules! set {
    ($kind:literal, $path:literal, $value:expr) => {
        |said| {
            if said.is($kind)
                && let Some(field) = said.body.pointer_mut($path)
            {
                *field = json!($value);
            }
            true
        }
    };
}

#[test]
fn faulty_broker_is_detected() {
    const FINAL: SealFlag = SealFlag::F_SEAL_SHRINK.union(SealFlag::F_SEAL_SEAL);
    let cases: [(&str, &str, &str, Change); 24] = [
        ("hello", "B2", "the backend `host`", set!("hello", "/backend", "host")),
        ("hello", "R6", "capabilities", |said| {
            said.body.as_object_mut().unwrap().remove("capabilities");
            true
        }),
        ("nothing-there", "Q1", "listed 0 objects", set!("objects", "/more", true)),
        ("nothing-there", "Q2", "got `differs`", set!("refused", "/code", "differs")),
        ("names", "N1", "got `absent`", set!("refused", "/code", "absent")),
        ("wait", "B12", "got `stopped`", set!("refused", "/code", "stopped")),
        ("second-request", "B8", "closed the connection", |said| !said.is("error")),
        ("no-capability", "B2", "got `protocol`", set!("error", "/code", "protocol")),
        ("object", "N2", "as version 7", set!("published", "/version", 7)),
        ("object", "N2", "published version 1 as `x`", set!("published", "/id", "x")),
        ("object", "Q1", "listed", set!("objects", "/objects/0/size", 1)),
        ("object", "G5", "another description than was put", set!("lease", "/parts/0/memory/size", 1)),
        ("object", "G5", "bytes for", set!("lease", "/parts/0/runs/0/size", 1)),
        ("who", "L2", "the same token", set!("lease", "/token", "0".repeat(32))),
        ("object", "Q2", "described", set!("version", "/lifetime", json!({"kind": "deleted"}))),
        ("object", "L1", "deleted name", set!("leases", "/leases/0/named", true)),
        ("object", "V2", "seals", |said| {
            if said.is("lease") {
                said.fds[0] = zeros(SealFlag::F_SEAL_SEAL);
            }
            true
        }),
        ("object", "G5", "other bytes than were put", |said| {
            if said.is("lease") {
                said.fds[0] = zeros(FINAL);
            }
            true
        }),
        ("who", "Q3", "no total", set!("leases", "/totals", [0; 0])),
        ("many-segments", "G5", "sent segment 7", set!("segments", "/first", 7)),
        ("range", "G3", "for 1 bytes at offset 0", |said| {
            // Replace the first of four segments with the second.
            if said.is("lease") && said.fds.len() == 1 {
                said.body["parts"][0]["runs"][0] =
                    json!({"first": 2, "segments": 1, "offset": 2 * GRANULARITY, "size": GRANULARITY});
                said.body["parts"][0]["memory"]["size"] = json!(4 * GRANULARITY - 5);
                said.fds[0] = pattern_at(2 * GRANULARITY);
            }
            true
        }),
        ("expect", "G4", "got `denied`", set!("refused", "/code", "denied")),
        ("sparse-memory", "P3", "got published", |said| {
            if said.is("refused") {
                (said.kind, said.body) = (34, json!({"version": 1, "id": "00000000-0000-4000-8000-000000000000"}));
            }
            true
        }),
        ("tables", "Q2", "another number of arrays", set!("version", "/parts/0/arrays", 7)),
    ];
    for (case, rule, found, change) in cases {
        let serving = Serving::start();
        let path = between(&serving, move |from_broker, record, fds| {
            if !from_broker {
                return Some((record, fds));
            }
            let mut said = Said::read(&record, fds);
            change(&mut said).then(|| said.write())
        });
        breaks(&conform(&path, &["--only", case, "--timeout", "3s"]), rule, found);
        serving.stop();
    }
}

/// A segment with the contents of conform's pattern at an offset.
fn pattern_at(offset: u64) -> OwnedFd {
    use std::os::unix::fs::FileExt;
    let mut bytes = vec![0; GRANULARITY as usize];
    // The salt of conform's memory.
    vmmfd_cli::check::pattern::Pattern::new(0x5EED_1234).write(offset, &mut bytes);
    let memfd = zeros(SealFlag::F_SEAL_SHRINK);
    std::fs::File::from(memfd.try_clone().unwrap()).write_all_at(&bytes, 0).unwrap();
    fcntl(&memfd, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SEAL)).unwrap();
    memfd
}

#[test]
fn missing_broker_finds_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let ended = conform(&folder.path().join("none"), &["--wait", "50ms"]);
    let report = ended.code(4).json();
    assert_eq!((&report["conforms"], report["broken"].as_array().unwrap().len()), (&Value::Null, 0));
    // A producer's hello names its role.
    let meeting = Meeting::host();
    let producer = meeting.listening(&["--consumers", "0", "--timeout", "1s"]);
    let report = conform(&meeting.socket(), &["--only", "hello"]).code(4).json();
    assert!(report["incomplete"].as_str().unwrap().contains("no broker"), "{report}");
    producer.signal(nix::sys::signal::Signal::SIGTERM);
    producer.end();
}

#[test]
fn messages_match_the_schemas() {
    let (serving, seen) = (Serving::start(), Arc::new(Mutex::new(Vec::new())));
    let kept = Arc::clone(&seen);
    let path = between(&serving, move |_, record, fds| {
        kept.lock().unwrap().push(record.clone());
        Some((record, fds))
    });
    let driver = open(Choice::Only(Backend::Host)).unwrap().driver;
    let device = Device::find(&driver, Selector::default()).unwrap();
    let memory = Shared::create(&device, Spec::vmm(300 * GRANULARITY).chunk(GRANULARITY)).unwrap();
    let metadata = |length: usize| serde_json::from_value(json!({"engine": "x".repeat(length)})).unwrap();
    {
        let (client, other) =
            (Client::connect(&path, &Config::default()).unwrap(), Client::connect(&path, &Config::default()).unwrap());
        let part = || PutPart::of("all", &memory).unwrap().digest("blake3:00");
        let claim = client.get_or_claim(&Get::new("a/b"), &ClaimOf::whole()).unwrap();
        client
            .put(&Put::new("a/b").part(part()).metadata(metadata(3)).lifetime(vmmfd::broker::Lifetime::Maker))
            .unwrap();
        drop(claim);
        let later = Put::new("a/b").part(part()).metadata(metadata(10_000)).condition(vmmfd::broker::Condition::Any);
        let first = client.get(&Get::new("a/b").expect(metadata(3))).unwrap();
        client.put(&later).unwrap();
        let object = client.get(&Get::new("a/b").range(0..7)).unwrap().open(&driver, None).unwrap();
        assert_eq!(client.list("a/").unwrap()[0].leases, 1);
        assert_eq!(client.stat("a/b", Some(1)).unwrap().metadata.len(), 1);
        assert_eq!(other.who("").unwrap().leases.len(), 2);
        assert!(client.get(&Get::new("none")).is_err());
        thread::scope(|scope| {
            let waiting = scope.spawn(|| client.get(&Get::new("none").wait(Duration::from_secs(60))));
            while !waiting.is_finished() {
                client.stop().unwrap();
                thread::sleep(Duration::from_millis(5));
            }
            waiting.join().unwrap().unwrap_err();
        });
        drop((first, object));
        other.delete("a/b").unwrap();
    }
    serving.stop();
    let mut kinds = BTreeSet::new();
    for record in seen.lock().unwrap().iter() {
        let said = Said::read(record, Vec::new());
        let name = broker_files::name_of(said.kind);
        assert_eq!(broker_files::misfit(name, &said.body), None, "{name}: {}", said.body);
        kinds.insert(name);
    }
    // `report` needs memory that contradicts its claim. The order of the others depends on the speed of the machine.
    let all = "hello put send segments published get lease received claimed list objects stat version who leases delete done \
               refused release stop";
    let missing: Vec<&str> = all.split(' ').filter(|name| !kinds.contains(name)).collect();
    assert!(missing.is_empty(), "{missing:?} of {kinds:?}");
}
