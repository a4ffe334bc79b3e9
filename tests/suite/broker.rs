//! The broker: named memory over its own socket, with the server in a thread of the test.
//!
//! One file of more than 500 lines: the basic operations of one client.

use std::{
    os::fd::AsFd,
    path::PathBuf,
    process,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use serde_json::json;
use tempfile::TempDir;
use vmmfd::{
    Error,
    array::{ArrayDescriptor, ElementType, Order},
    broker::{
        ArrayEntry, ClaimOf, Client, Condition, EventKind, Found, Get, Lifetime, Put, PutPart, Quota, Server,
        ServerConfig, ServerReport, Watched,
    },
    channel::{Cancel, CancelReason},
    driver::{Backend, DeviceUuid, Driver},
    error::{ErrorClass, MemoryError, RefusalCode},
    internals,
    memory::{Device, DeviceIdentity, Placement, Region, Selector, Shared, Sharing, Spec},
    session::Config,
};

use crate::support::{Copy, Kind, Subject, material::Material, pause};

cases! {
    on crate::support::Subject; host and cuda: [
    readers_keep_a_replaced_version,
    get_waits_for_put,
    waiting_get_delays_no_other_request,
    one_reader_claims_and_others_wait,
    parts_of_processes_are_published_together,
    selected_arrays_send_only_their_segments,
    ambiguous_array_names_are_errors,
    large_array_table_travels_in_memfd,
    thousand_segments_are_one_object,
    names_end_with_their_lifetimes,
    quotas_are_refused_with_both_figures,
    long_list_comes_in_pages,
    ]
    gpus alone: [
    pools_and_legacy_memory_are_refused,
    gpu_memory_opens_on_no_other_backend,
    report_of_false_claim_keeps_the_version,
    ]
}

/// A broker in a thread.
pub(crate) struct Broker {
    _folder: TempDir,
    pub(crate) path: PathBuf,
    cancel: Cancel,
    server: Option<JoinHandle<vmmfd::Result<ServerReport>>>,
}

impl Broker {
    pub(crate) fn start(subject: &Subject) -> Self {
        Self::with(subject, ServerConfig::default())
    }

    pub(crate) fn with(subject: &Subject, mut config: ServerConfig) -> Self {
        if subject.kind == Kind::Fake {
            config = internals::emulated(config);
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("broker.sock");
        let cancel = Cancel::new().unwrap();
        let server = Server::bind(&path, config, &cancel).unwrap();
        let server = Some(thread::spawn(move || server.run()));
        Self { _folder: folder, path, cancel, server }
    }

    pub(crate) fn client(&self) -> Client {
        Client::connect(&self.path, &Config::default()).unwrap()
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        self.cancel.cancel(CancelReason::Program);
        if let Some(server) = self.server.take() {
            let _ = server.join();
        }
    }
}

/// Memory whose bytes all have the same value.
pub(crate) fn filled(driver: &Driver, size: u64, chunk: Option<u64>, value: u8) -> Shared {
    let device = Device::find(driver, Selector::default()).unwrap();
    let spec = Spec::vmm(size);
    let memory = Shared::create(&device, chunk.map_or(spec, |chunk| spec.chunk(chunk))).unwrap();
    memory.copy_in(0, &vec![value; size as usize]).unwrap();
    memory
}

fn put(client: &Client, name: &str, memory: &Shared, condition: Condition) -> vmmfd::Result<u64> {
    let put = Put::new(name).condition(condition).part(PutPart::of("all", memory)?);
    client.put(&put).map(|published| published.version)
}

fn byte(client: &Client, driver: &Driver, get: &Get) -> u8 {
    let object = client.get(get).unwrap().open(driver, None).unwrap();
    let mut bytes = [0; 1];
    object.parts()[0].memory().unwrap().copy_out(0, &mut bytes).unwrap();
    bytes[0]
}

#[track_caller]
pub(crate) fn refused<T: std::fmt::Debug>(result: vmmfd::Result<T>) -> (RefusalCode, String) {
    match result {
        Err(Error::Broker(refusal)) => (refusal.code, refusal.message),
        other => panic!("{other:?}"),
    }
}

const MIB: u64 = 1 << 20;

fn readers_keep_a_replaced_version(subject: Subject) {
    let (broker, driver) = (Broker::start(&subject), subject.driver.clone());
    let client = broker.client();
    put(&client, "a", &filled(&driver, MIB, None, 1), Condition::New).unwrap();
    let old = client.get(&Get::new("a")).unwrap();
    let (code, message) = refused(put(&client, "a", &filled(&driver, MIB, None, 2), Condition::New));
    assert_eq!((code, message.contains("`a` exists at version 1")), (RefusalCode::Exists, true), "{message}");
    let (code, _) = refused(put(&client, "a", &filled(&driver, MIB, None, 2), Condition::Version(7)));
    assert_eq!(code, RefusalCode::Version);
    assert_eq!(put(&client, "a", &filled(&driver, MIB, None, 2), Condition::Version(1)).unwrap(), 2);
    assert_eq!(put(&client, "a", &filled(&driver, MIB, None, 3), Condition::Any).unwrap(), 3);
    assert_eq!(byte(&client, &driver, &Get::new("a")), 3);
    // A lease holds the first version; nothing holds the second.
    assert_eq!(byte(&client, &driver, &Get::new("a").version(1)), 1);
    assert_eq!(refused(client.get(&Get::new("a").version(2))).0, RefusalCode::Absent);
    assert_eq!(client.stat("a", None).unwrap().version.versions, [1, 3]);
    let held = client.who("").unwrap().leases;
    assert_eq!((held.len(), held[0].version, held[0].named), (1, 1, true));
    let object = old.open(&driver, None).unwrap();
    client.delete("a").unwrap();
    assert_eq!(refused(client.get(&Get::new("a"))).0, RefusalCode::Absent);
    let held = client.who("").unwrap();
    assert_eq!((held.leases.len(), held.leases[0].named), (1, false));
    assert_eq!(held.totals[0].devices[0].bytes, 2 * MIB);
    let mut bytes = [0; 1];
    object.part("all").unwrap().memory().unwrap().copy_out(0, &mut bytes).unwrap();
    assert_eq!(bytes, [1]);
    drop(object);
    let held = client.who("").unwrap();
    assert_eq!((held.leases.len(), held.totals[0].devices.len()), (0, 0));
    // A name that is put again after its deletion starts at version 1.
    assert_eq!(put(&client, "a", &filled(&driver, MIB, None, 4), Condition::New).unwrap(), 1);
    assert_eq!(refused(client.delete("b")).0, RefusalCode::Absent);
}

fn get_waits_for_put(subject: Subject) {
    let (broker, driver) = (Broker::start(&subject), subject.driver.clone());
    let waiter = broker.client();
    let (path, reading) = (broker.path.clone(), driver.clone());
    let get = Get::new("late").wait(Duration::from_secs(600));
    let waiting = thread::spawn(move || byte(&waiter, &reading, &get));
    let client = Client::connect(&path, &Config::default()).unwrap();
    assert_eq!(refused(client.get(&Get::new("late"))).0, RefusalCode::Absent);
    let (code, message) = refused(client.get(&Get::new("late").wait(Duration::from_millis(1))));
    assert_eq!((code, message.as_str()), (RefusalCode::Timeout, "there is no object `late`: waited 1 ms"));
    put(&client, "late", &filled(&driver, MIB, None, 9), Condition::New).unwrap();
    assert_eq!(waiting.join().unwrap(), 9);
    // One wait for a future version, one for a newer version.
    let both = [Get::new("late").version(2), Get::new("other")];
    let (waiter, path) = (broker.client(), broker.path.clone());
    let waiting = thread::spawn(move || {
        let leases = waiter.get_all(&both, Some(Duration::from_secs(600))).unwrap();
        leases.iter().map(|lease| lease.version()).collect::<Vec<_>>()
    });
    put(&client, "other", &filled(&driver, MIB, None, 1), Condition::New).unwrap();
    put(&client, "late", &filled(&driver, MIB, None, 2), Condition::Any).unwrap();
    assert_eq!(waiting.join().unwrap(), [2, 1]);
    assert_eq!(refused(client.get(&Get::new("late").newer_than(2))).0, RefusalCode::Absent);
    assert_eq!(client.get(&Get::new("late").newer_than(1)).unwrap().version(), 2);
    // Another thread cancels the wait.
    let waiter = Client::connect(&path, &Config::default()).unwrap();
    let stopping = waiter.clone();
    let waiting = thread::spawn(move || refused(waiter.get(&Get::new("never").wait(Duration::from_secs(600)))).0);
    while !waiting.is_finished() {
        stopping.stop().unwrap();
        thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(waiting.join().unwrap(), RefusalCode::Stopped);
}

fn waiting_get_delays_no_other_request(subject: Subject) {
    let (broker, driver) = (Broker::start(&subject), subject.driver.clone());
    // Shorter than the waits: a request behind one of them fails.
    let config = Config::default().timeout(Duration::from_secs(30));
    let client = Client::connect(&broker.path, &config).unwrap();
    let waiting: Vec<_> = ["late", "later"]
        .map(|name| {
            let (client, driver) = (client.clone(), driver.clone());
            thread::spawn(move || byte(&client, &driver, &Get::new(name).wait(Duration::from_secs(600))))
        })
        .into();
    let never = {
        let client = client.clone();
        thread::spawn(move || refused(client.get(&Get::new("never").wait(Duration::from_millis(400)))).0)
    };
    let watching = {
        let mut watch = client.watch("late", None).unwrap();
        thread::spawn(move || {
            let mut names = Vec::new();
            while names.len() < 2 {
                let watched = watch.next(Duration::from_secs(600)).unwrap().unwrap();
                let Watched::Event(event) = watched else { panic!("{watched:?}") };
                if event.kind == EventKind::Published {
                    names.push(event.name);
                }
            }
            names
        })
    };
    for _ in 0..100 {
        client.list("").unwrap();
        thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(never.join().unwrap(), RefusalCode::Timeout);
    for (name, value) in [("late", 1), ("later", 2)] {
        put(&client, name, &filled(&driver, MIB, None, value), Condition::New).unwrap();
    }
    assert_eq!(waiting.into_iter().map(|get| get.join().unwrap()).collect::<Vec<_>>(), [1, 2]);
    assert_eq!(&watching.join().unwrap()[..], ["late", "later"]);
}

fn one_reader_claims_and_others_wait(subject: Subject) {
    let (broker, driver) = (Broker::start(&subject), subject.driver.clone());
    let get = || Get::new("weights").wait(Duration::from_secs(600));
    let claimer = broker.client();
    let Found::Claim(claim) = claimer.get_or_claim(&get(), &ClaimOf::whole()).unwrap() else { panic!("found") };
    let others: Vec<_> = (0..8)
        .map(|_| {
            let (client, driver) = (broker.client(), driver.clone());
            thread::spawn(move || match client.get_or_claim(&get(), &ClaimOf::whole()).unwrap() {
                Found::Lease(lease) => (lease.version(), false),
                Found::Claim(_claim) => {
                    put(&client, "weights", &filled(&driver, MIB, None, 1), Condition::New).unwrap();
                    (1, true)
                }
                other => panic!("{other:?}"),
            })
        })
        .collect();
    // Without a wait, a name that another client has claimed is absent.
    let (code, message) = refused(broker.client().get_or_claim(&Get::new("weights"), &ClaimOf::whole()));
    assert_eq!(code, RefusalCode::Absent);
    let holder = format!("pid {} of uid {} has claimed it", process::id(), nix::unistd::getuid());
    assert!(message.ends_with(&holder), "{message}");
    let waited = Get::new("weights").wait(Duration::from_millis(1));
    let (code, message) = refused(broker.client().get_or_claim(&waited, &ClaimOf::whole()));
    assert_eq!(code, RefusalCode::Timeout);
    assert!(message.contains(&holder), "{message}");
    // The claim passes to another waiting client, which makes the object.
    drop(claim);
    let mut made: Vec<(u64, bool)> = others.into_iter().map(|other| other.join().unwrap()).collect();
    made.sort_unstable();
    assert_eq!(made.iter().filter(|(_, made)| *made).count(), 1);
    assert!(made.iter().all(|(version, _)| *version == 1));
    assert_eq!(byte(&claimer, &driver, &Get::new("weights")), 1);
}

/// Eight makers put the parts of each version, on their own devices if there are eight. A reader sees whole versions only.
fn parts_are_published_together(subject: &Subject, devices: i32) {
    const VERSIONS: u64 = 3;
    const LONG: Duration = Duration::from_secs(600);
    let broker = Broker::start(subject);
    let names: Vec<String> = (0..8).map(|rank| format!("rank{rank}")).collect();
    let memory = |version: u64, rank: i32| {
        let device = Device::find(&subject.driver, Selector::Ordinal((rank % devices).cast_unsigned())).unwrap();
        let memory = Shared::create(&device, Spec::vmm(MIB)).unwrap();
        memory.copy_in(MIB - 1, &[version as u8 * 8 + rank as u8]).unwrap();
        memory
    };
    let make = |rank: i32, name: &str| {
        let client = broker.client();
        for version in 1..=VERSIONS {
            let group = format!("launch-{version}");
            let get = Get::new("model").newer_than(version - 1).wait(LONG);
            let Found::Claim(_claim) = client.get_or_claim(&get, &ClaimOf::part(name, &group)).unwrap() else {
                panic!("found")
            };
            let (memory, put) = (memory(version, rank), Put::new("model").together(&names, &group, LONG));
            let condition = if version == 1 { Condition::New } else { Condition::Version(version - 1) };
            let put = put.condition(condition).part(PutPart::of(name, &memory).unwrap());
            assert_eq!(client.put(&put).unwrap().version, version);
        }
    };
    let client = broker.client();
    thread::scope(|scope| {
        (0..).zip(&names).for_each(|(rank, name)| drop(scope.spawn(move || make(rank, name))));
        let mut version = 0;
        while version < VERSIONS {
            let lease = client.get(&Get::new("model").newer_than(version).wait(LONG)).unwrap();
            let object = lease.open(&subject.driver, None).unwrap();
            version = object.version();
            assert!(object.parts().iter().map(|part| part.name()).eq(&names));
            for (rank, part) in (0..).zip(object.parts()) {
                let (memory, mut byte) = (part.memory().unwrap(), [0]);
                memory.copy_out(MIB - 1, &mut byte).unwrap();
                assert_eq!((byte[0], memory.device().ordinal()), (version as u8 * 8 + rank as u8, rank % devices));
            }
        }
    });
    let info = client.stat("model", None).unwrap().version;
    assert_eq!((info.versions, info.summary.devices.len()), (vec![VERSIONS], devices as usize));
    let one = client.get(&Get::new("model").parts(["rank3"])).unwrap();
    assert_eq!(one.parts().iter().map(|part| part.name()).collect::<Vec<_>>(), ["rank3"]);
    assert_eq!(refused(client.get(&Get::new("model").parts(["rank9"]))).0, RefusalCode::Lacks);
}

fn parts_of_processes_are_published_together(subject: Subject) {
    parts_are_published_together(&subject, 1);
}

#[test]
fn parts_of_eight_devices_are_published_together() {
    let fake = Copy::new().load();
    fake.set("FAKECUDA_DEVICES", "8");
    parts_are_published_together(&Subject::of(fake), 8);
}

fn entry(name: &str, elements: u64, offset: u64) -> ArrayEntry {
    let float: ElementType = "float32".parse().unwrap();
    let mut array = ArrayDescriptor::new(float, [elements], Order::C).unwrap();
    array.offset = offset;
    ArrayEntry::new(name, array)
}

fn selected_arrays_send_only_their_segments(subject: Subject) {
    let (broker, driver) = (Broker::start(&subject), subject.driver.clone());
    let client = broker.client();
    let memory = filled(&driver, 16 * MIB, Some(2 * MIB), 0);
    for segment in 0..8u8 {
        memory.copy_in(u64::from(segment) * 2 * MIB, &vec![segment; 2 << 20]).unwrap();
    }
    let arrays =
        [entry("first", 16, 0), entry("middle", 1 << 19, 7 * MIB), entry("last", 16, 15 * MIB), entry("none", 0, 0)];
    let part = PutPart::of("all", &memory).unwrap().arrays(arrays);
    client.put(&Put::new("a").part(part)).unwrap();
    let object = client.get(&Get::new("a")).unwrap().open(&driver, None).unwrap();
    assert_eq!(object.array("last").unwrap().element(&[0]).unwrap(), [7; 4]);
    assert_eq!(object.part("all").unwrap().arrays().len(), 4);
    drop(object);
    let lease = client.get(&Get::new("a").arrays(["first", "last"])).unwrap();
    let object = lease.open(&driver, None).unwrap();
    let pieces: Vec<_> = object.parts()[0].pieces().iter().map(|piece| (piece.start(), piece.mapped_size())).collect();
    assert_eq!(pieces, [(0, 2 * MIB), (14 * MIB, 2 * MIB)]);
    assert_eq!(object.array("first").unwrap().element(&[15]).unwrap(), [0; 4]);
    assert_eq!(object.array("last").unwrap().element(&[15]).unwrap(), [7; 4]);
    assert!(matches!(object.array("middle"), Err(Error::Memory(_))));
    assert!(matches!(object.array("other"), Err(Error::Memory(MemoryError::NoArray { .. }))));
    let lease = client.get(&Get::new("a").arrays(["middle"])).unwrap();
    assert_eq!(lease.into_parts().remove(0).into_segments().unwrap().len(), 2);
    let (code, message) = refused(client.get(&Get::new("a").arrays(["first", "nothing"])));
    assert_eq!(code, RefusalCode::Lacks);
    assert!(message.contains("has no array nothing; its arrays are first"), "{message}");
    // Get a range.
    let lease = client.get(&Get::new("a").range(3 * MIB..5 * MIB)).unwrap();
    let object = lease.open(&driver, None).unwrap();
    let memory = object.parts()[0].memory().unwrap();
    assert_eq!((memory.start(), memory.mapped_size()), (2 * MIB, 4 * MIB));
    assert_eq!(refused(client.get(&Get::new("a").range(0..17 * MIB))).0, RefusalCode::Differs);
}

fn ambiguous_array_names_are_errors(subject: Subject) {
    let (broker, driver) = (Broker::start(&subject), subject.driver.clone());
    let client = broker.client();
    let memories = [filled(&driver, 2 * MIB, None, 1), filled(&driver, 2 * MIB, None, 2)];
    let part = |name, own, memory| PutPart::of(name, memory).unwrap().arrays([entry("w", 4, 0), entry(own, 4, 0)]);
    let put = Put::new("a").part(part("x", "x0", &memories[0])).part(part("y", "y0", &memories[1]));
    client.put(&put).unwrap();
    let object = client.get(&Get::new("a")).unwrap().open(&driver, None).unwrap();
    let error = object.array("w").unwrap_err();
    assert_eq!((error.class(), error.hint().is_some()), (ErrorClass::Invalid, true));
    assert_eq!(error.to_string(), "array `w` is ambiguous: parts x, y have it");
    assert_eq!(object.part("y").unwrap().array("w").unwrap().element(&[0]).unwrap(), [2; 4]);
    assert_eq!(object.array("y0").unwrap().element(&[0]).unwrap(), [2; 4]);
    let error = object.array("z").unwrap_err();
    assert_eq!(error.class(), ErrorClass::NoArray);
    assert_eq!(error.to_string(), "there is no array `z`: the arrays are `w`, `x0`, `w`, `y0`");
    // Only one of the parts was requested.
    let object = client.get(&Get::new("a").parts(["y"])).unwrap().open(&driver, None).unwrap();
    assert_eq!(object.array("w").unwrap().element(&[0]).unwrap(), [2; 4]);
}

fn large_array_table_travels_in_memfd(subject: Subject) {
    let (broker, driver) = (Broker::start(&subject), subject.driver.clone());
    let client = broker.client();
    let memory = filled(&driver, 2 * MIB, None, 5);
    let arrays: Vec<ArrayEntry> = (0..20_000).map(|at| entry(&format!("layers.{at}.weight"), 4, at * 64)).collect();
    let metadata = json!({"engine": "test", "note": "x".repeat(200_000)});
    let part = PutPart::of("all", &memory).unwrap().arrays(arrays.clone()).digest("sum:1");
    let put = Put::new("big").metadata(metadata.as_object().unwrap().clone()).part(part);
    client.put(&put).unwrap();
    let lease = client.get(&Get::new("big")).unwrap();
    assert_eq!(lease.part("all").unwrap().arrays(), arrays);
    assert_eq!(lease.metadata().unwrap(), *metadata.as_object().unwrap());
    let info = client.stat("big", None).unwrap();
    assert_eq!((info.version.summary.arrays, info.metadata == *metadata.as_object().unwrap()), (20_000, true));
    let object = client.get(&Get::new("big").arrays(["layers.19999.weight"])).unwrap().open(&driver, None).unwrap();
    assert_eq!(object.array("layers.19999.weight").unwrap().element(&[3]).unwrap(), [5; 4]);
    let expect = |value: serde_json::Value| Get::new("big").expect(value.as_object().unwrap().clone());
    assert!(client.get(&expect(json!({"engine": "test"}))).is_ok());
    let (code, message) = refused(client.get(&expect(json!({"engine": "other", "layout": 2}))));
    assert_eq!(code, RefusalCode::Differs);
    assert!(message.contains("engine is \"test\", not \"other\"; layout is missing, expected 2"), "{message}");
    assert!(client.get(&Get::new("big").digest("all", "sum:1")).is_ok());
    assert_eq!(refused(client.get(&Get::new("big").digest("all", "sum:2"))).0, RefusalCode::Differs);
}

fn thousand_segments_are_one_object(mut subject: Subject) {
    subject.alone();
    let (broker, driver) = (Broker::start(&subject), subject.driver.clone());
    let client = broker.client();
    // The same few files are repeated: a segment is the unit of storage.
    let memory = filled(&driver, 8 * MIB, Some(2 * MIB), 3);
    let material = Material::of(&memory).repeated(1000);
    client.put(&Put::new("many").part(material.part())).unwrap();
    let lease = client.get(&Get::new("many")).unwrap();
    let object = lease.open(&driver, None).unwrap();
    let mut bytes = [0; 1];
    object.parts()[0].memory().unwrap().copy_out(1999 * MIB, &mut bytes).unwrap();
    assert_eq!(bytes, [3]);
    let all = client.get_all(&[Get::new("many"), Get::new("many")], None).unwrap();
    assert_eq!(all.len(), 2);
}

/// The time limit of each wait, generous for a busy machine.
const PATIENCE: Duration = Duration::from_secs(600);

/// Waits until another thread makes the condition true.
#[track_caller]
pub(crate) fn until(done: impl Fn() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < PATIENCE, "it does not happen");
        pause(begun);
    }
}

fn names_end_with_their_lifetimes(subject: Subject) {
    let (broker, driver) = (Broker::start(&subject), subject.driver.clone());
    let client = broker.client();
    let names = |client: &Client| client.list("").unwrap().into_iter().map(|of| of.name).collect::<Vec<_>>();
    let with = |name: &str, lifetime| {
        let (memory, maker) = (filled(&driver, MIB, None, 1), broker.client());
        maker.put(&Put::new(name).lifetime(lifetime).part(PutPart::of("all", &memory).unwrap())).unwrap();
        maker
    };
    let maker = with("maker", Lifetime::Maker);
    let leased = with("leased", Lifetime::Leased);
    drop(with("idle", Lifetime::Idle { ms: 1 }));
    drop(with("stays", Lifetime::Deleted));
    until(|| !names(&client).contains(&"idle".to_owned()));
    assert_eq!(names(&client), ["leased", "maker", "stays"]);
    let lease = client.get(&Get::new("leased")).unwrap();
    drop((maker, leased));
    until(|| !names(&client).contains(&"maker".to_owned()));
    assert_eq!(names(&client), ["leased", "stays"]);
    drop(lease);
    until(|| !names(&client).contains(&"leased".to_owned()));
    assert_eq!(names(&client), ["stays"]);
}

fn quotas_are_refused_with_both_figures(subject: Subject) {
    let mut config = ServerConfig::default();
    let mut quota = Quota::default();
    (quota.bytes, quota.objects, quota.leases, quota.connections) = (Some(5 * MIB), Some(2), Some(2), Some(2));
    config.quota = quota;
    let (broker, driver) = (Broker::with(&subject, config), subject.driver.clone());
    let client = broker.client();
    let memory = filled(&driver, 2 * MIB, None, 1);
    put(&client, "a", &memory, Condition::New).unwrap();
    put(&client, "b", &memory, Condition::New).unwrap();
    let (code, message) = refused(put(&client, "a", &memory, Condition::Any));
    assert_eq!(code, RefusalCode::Quota);
    assert!(message.contains("has 4 MiB (claimed) and asks for 2 MiB more, but its quota is 5 MiB"), "{message}");
    client.delete("b").unwrap();
    put(&client, "a", &memory, Condition::Any).unwrap();
    put(&client, "c", &memory, Condition::New).unwrap();
    assert_eq!(refused(put(&client, "d", &memory, Condition::New)).0, RefusalCode::Quota);
    let one = client.get(&Get::new("a")).unwrap();
    let _two = client.get(&Get::new("a")).unwrap();
    assert_eq!(refused(client.get(&Get::new("a"))).0, RefusalCode::Quota);
    drop(one);
    client.get(&Get::new("a")).unwrap();
    let _second = broker.client();
    let third = Client::connect(&broker.path, &Config::default());
    assert!(matches!(third, Err(Error::Peer(_))), "{third:?}");
}

fn pools_and_legacy_memory_are_refused(subject: Subject) {
    for spec in [Spec::pool(MIB), Spec::legacy(MIB)] {
        let memory = Shared::create(&subject.device(), spec).unwrap();
        let (code, message) = refused(PutPart::of("all", &memory));
        assert_eq!(code, RefusalCode::Invalid);
        assert!(message.contains("end with their process"), "{message}");
    }
}

fn gpu_memory_opens_on_no_other_backend(subject: Subject) {
    let broker = Broker::start(&subject);
    let client = broker.client();
    put(&client, "a", &filled(&subject.driver, 4 * MIB, Some(2 * MIB), 6), Condition::New).unwrap();
    let lease = client.get(&Get::new("a")).unwrap();
    assert_eq!(lease.backend(), "cuda");
    let host = Subject::host();
    assert!(matches!(lease.open(&host.driver, None), Err(Error::Peer(_))));
    assert_eq!(byte(&client, &subject.driver, &Get::new("a")), 6);
}

fn report_of_false_claim_keeps_the_version(subject: Subject) {
    let broker = Broker::start(&subject);
    let client = broker.client();
    let memory = filled(&subject.driver, 2 * MIB, None, 6);
    let (_, chunks) = memory.chunks(0..2 * MIB).unwrap().unwrap();
    let mut description = memory.describe().unwrap();
    // The broker can't check the placement: it is specific to the device.
    description.sharing = Sharing::Vmm { placement: Placement::Host, segments: 1 };
    let segments = chunks.iter().map(|chunk| (chunk.size(), chunk.as_fd()));
    let part = PutPart::of_segments("all", Backend::Cuda, description, segments).unwrap();
    client.put(&Put::new("a").part(part)).unwrap();
    let lease = client.get(&Get::new("a")).unwrap();
    assert!(matches!(lease.open(&subject.driver, None), Err(Error::Peer(_))));
    let info = client.stat("a", None).unwrap().version;
    assert_eq!(info.reports.len(), 1);
    let (report, maker) = (&info.reports[0], &info.parts[0].maker);
    assert!(report.message.contains("the driver reports memory of device 0"), "{}", report.message);
    assert_eq!((report.reader.pid, maker.pid), (process::id() as i32, process::id() as i32));
    assert_eq!(client.get(&Get::new("a")).unwrap().version(), 1);
}

fn long_list_comes_in_pages(subject: Subject) {
    let (broker, driver) = (Broker::start(&subject), subject.driver.clone());
    let client = broker.client();
    let memory = filled(&driver, MIB, None, 1);
    for at in 0..500 {
        put(&client, &format!("many/{at:04}"), &memory, Condition::New).unwrap();
    }
    put(&client, "other", &memory, Condition::New).unwrap();
    let listed = client.list("many/").unwrap();
    let names: Vec<String> = listed.into_iter().map(|of| of.name).collect();
    assert_eq!(names, (0..500).map(|at| format!("many/{at:04}")).collect::<Vec<_>>());
    let leases: Vec<_> = (0..500).map(|_| client.get(&Get::new("other")).unwrap()).collect();
    assert_eq!(client.who("").unwrap().leases.len(), 500);
    assert_eq!(client.list("o").unwrap()[0].leases, 500);
    drop(leases);
    assert!(client.who("").unwrap().leases.is_empty());
}

#[test]
fn longest_descriptions_are_listed() {
    let subject = Subject::host();
    let broker = Broker::start(&subject);
    let client = broker.client();
    let shared = filled(&subject.driver, 2 << 20, None, 1);
    let (_, chunks) = shared.chunks(0..2 << 20).unwrap().unwrap();
    let part = |at: u8| {
        let mut description = shared.describe().unwrap();
        // The broker can't check the name of a device.
        description.device = DeviceIdentity { uuid: DeviceUuid::from_bytes([at; 16]), name: "\"".repeat(255) };
        let segments = chunks.iter().map(|chunk| (chunk.size(), chunk.as_fd()));
        let name = format!("{at:0>255}");
        PutPart::of_segments(name, Backend::Host, description, segments).unwrap().digest("d".repeat(255))
    };
    put(&client, "before", &shared, Condition::New).unwrap();
    for name in ["large", "larger"] {
        let large = (0..24).fold(Put::new(name), |put, at| put.part(part(at)));
        client.put(&large).unwrap();
    }
    put(&client, "then", &shared, Condition::New).unwrap();
    let names: Vec<String> = client.list("").unwrap().into_iter().map(|of| of.name).collect();
    assert_eq!(names, ["before", "large", "larger", "then"]);
    let lease = client.get(&Get::new("before")).unwrap();
    let held = client.who("").unwrap();
    assert_eq!((held.leases.len(), held.totals.len()), (1, 1));
    // The metadata may exceed a record: the broker answers with a refusal, but the lease remains valid.
    match client.stat("large", None) {
        Ok(info) => assert_eq!(info.version.parts.len(), 24),
        Err(refused) => assert!(matches!(refused, Error::Broker(_)), "{refused:?}"),
    }
    assert_eq!(client.who("").unwrap().leases.len(), 1);
    drop(lease);
}
