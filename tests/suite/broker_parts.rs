//! A version whose parts are on eight devices, each put by its own process.

use std::{
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use vmmfd::{
    Error,
    broker::{Client, Condition, Get, Put, PutPart},
    error::RefusalCode,
    memory::{Device, Region, Selector, Shared, Spec},
    session::Config,
};

use crate::{
    broker::{refused, until},
    broker_process::{Actor, Process, Setup},
    support::{Copy, Subject},
};

const RANKS: u8 = 8;

const TEST: &str = "broker_parts::eight_processes_put_one_version";

const VERSIONS: u8 = 12;

fn names() -> Vec<String> {
    (0..RANKS).map(|rank| format!("rank{rank}")).collect()
}

/// An emulated driver with eight devices.
fn eight() -> Subject {
    let copy = Copy::new();
    let fake = copy.load();
    fake.set("FAKECUDA_DEVICES", "8");
    Subject::of(fake)
}

fn memory(subject: &Subject, rank: u8, value: u8) -> Shared {
    let device = Device::find(&subject.driver, Selector::Ordinal(rank.into())).unwrap();
    let shared = Shared::create(&device, Spec::vmm(2 << 20)).unwrap();
    shared.copy_in(0, &vec![value; 2 << 20]).unwrap();
    shared
}

/// Puts one part of a version. Each byte is the version number.
fn put(client: &Client, subject: &Subject, rank: u8, version: u8, wait: Duration) -> vmmfd::Result<u64> {
    let shared = memory(subject, rank, version);
    let part = PutPart::of(format!("rank{rank}"), &shared).unwrap();
    let condition = match version {
        1 => Condition::New,
        later => Condition::Version(u64::from(later) - 1),
    };
    let put = Put::new("model").condition(condition).part(part).together(names(), format!("v{version}"), wait);
    client.put(&put).map(|published| published.version)
}

const LONG: Duration = Duration::from_secs(100);

/// The child's program: `rank R` puts its part of each version; `dies R` sends its part and waits for the others.
fn play(step: &str, path: &Path) -> ! {
    let subject = eight();
    let client = Client::connect(path, &Config::default()).unwrap();
    let (what, rank) = step.split_once('-').unwrap();
    let rank: u8 = rank.parse().unwrap();
    match what {
        "rank" => {
            for version in 1..=VERSIONS {
                assert_eq!(put(&client, &subject, rank, version, LONG).unwrap(), u64::from(version));
            }
        }
        "connects" => {}
        "waits" => {
            thread::spawn({
                let path = path.to_owned();
                // Once the broker has the part, a second put of it is refused.
                move || {
                    let client = Client::connect(&path, &Config::default()).unwrap();
                    let subject = eight();
                    let second = || put(&client, &subject, rank, VERSIONS + 1, Duration::from_millis(1));
                    while !matches!(refused(second()).0, RefusalCode::Exists) {
                        thread::sleep(Duration::from_millis(1));
                    }
                    Actor::stay("");
                }
            });
            // If the second put arrives first, this put is refused until the second put's wait times out.
            let put = || put(&client, &subject, rank, VERSIONS + 1, LONG);
            while matches!(put(), Err(Error::Broker(refusal)) if refusal.code == RefusalCode::Exists) {}
            panic!("its part was published");
        }
        other => panic!("{other}"),
    }
    Actor::stay("")
}

/// The version that a reader gets. Asserts that all its parts belong to it.
fn read(client: &Client, subject: &Subject) -> u8 {
    let object = client.get(&Get::new("model").wait(LONG)).unwrap().open(&subject.driver, None).unwrap();
    assert_eq!(object.parts().iter().map(|part| part.name().to_owned()).collect::<Vec<_>>(), names());
    let (mut bytes, mut devices) = (Vec::new(), Vec::new());
    for part in object.parts() {
        let memory = part.memory().unwrap();
        let mut byte = [0; 1];
        memory.copy_out(memory.size() - 1, &mut byte).unwrap();
        bytes.push(byte[0]);
        devices.push(memory.device().ordinal());
    }
    let version = u8::try_from(object.version()).unwrap();
    assert_eq!(bytes, vec![version; usize::from(RANKS)], "parts of several versions");
    assert_eq!(devices, (0..i32::from(RANKS)).collect::<Vec<_>>());
    version
}

#[test]
fn eight_processes_put_one_version() {
    if let Some((step, path)) = Actor::role() {
        play(&step, &path);
    }
    let subject = eight();
    let server = Process::start(Setup::of(&subject));
    let client = server.client();
    let before = server.other_files();
    let done = AtomicBool::new(false);
    let ranks: Vec<Actor> = (0..RANKS).map(|rank| Actor::start(TEST, &format!("rank-{rank}"), &server.path)).collect();
    let seen = thread::scope(|scope| {
        let readers: Vec<_> = (0..3)
            .map(|_| {
                let client = server.client();
                let subject = &subject;
                let done = &done;
                scope.spawn(move || {
                    let (mut last, mut reads) = (0, 0);
                    while !done.load(Ordering::Relaxed) || reads == 0 {
                        let version = read(&client, subject);
                        assert!(version >= last);
                        (last, reads) = (version, reads + 1);
                    }
                    reads
                })
            })
            .collect();
        let finished = ranks.into_iter().map(|mut rank| {
            rank.until_there();
            rank
        });
        // The makers are killed after the publication: their parts remain.
        let ranks: Vec<Actor> = finished.collect();
        ranks.into_iter().for_each(Actor::kill);
        done.store(true, Ordering::Relaxed);
        readers.into_iter().map(|reader| reader.join().unwrap()).sum::<u64>()
    });
    assert!(seen >= 3);
    server.wait_for_ends(&client);
    assert_eq!(read(&client, &subject), VERSIONS);
    let stat = client.stat("model", None).unwrap().version;
    assert_eq!((stat.versions, stat.summary.devices.len()), (vec![u64::from(VERSIONS)], usize::from(RANKS)));
    let pids: std::collections::BTreeSet<i32> = stat.parts.iter().map(|part| part.maker.pid).collect();
    assert_eq!(pids.len(), usize::from(RANKS));
    // Seven processes have put their part of the next version, and the eighth dies before its put: nothing of this version remains,
    // including the part of a process that dies during its wait.
    let kept = usize::from(RANKS) + 1;
    until(|| server.memory_files() == kept);
    let mut waiting: Vec<Actor> =
        (0..RANKS - 1).map(|rank| Actor::start(TEST, &format!("waits-{rank}"), &server.path)).collect();
    let mut last = Actor::start(TEST, &format!("connects-{}", RANKS - 1), &server.path);
    waiting.iter_mut().chain([&mut last]).for_each(|actor| drop(actor.until_there()));
    // The descriptors of the refused second puts are closed shortly after the refusal.
    until(|| server.memory_files() == kept + 7);
    last.kill();
    assert_eq!(read(&client, &subject), VERSIONS);
    // One waiting process dies: only its part is dropped, and the other parts remain until their processes die.
    waiting.pop().unwrap().kill();
    until(|| server.memory_files() == kept + 6);
    waiting.into_iter().for_each(Actor::kill);
    server.wait_for_ends(&client);
    until(|| server.memory_files() == kept && server.other_files() == before);
    assert_eq!(read(&client, &subject), VERSIONS);
    assert_eq!(client.stat("model", None).unwrap().version.versions, [u64::from(VERSIONS)]);
}
