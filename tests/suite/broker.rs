//! The broker: named memory over its own socket, with the server in a thread of the test.

use nix::sys::resource::{Resource, getrlimit};
use vmmfd::{
    broker::{EventKind, Watched},
    driver::DeviceUuid,
    memory::DeviceIdentity,
};

use crate::support::{
    prelude::*,
    served::{status, stored},
};

cases! {
    on crate::support::Subject; gpus alone: [
    pools_and_legacy_memory_are_refused,
    report_of_false_claim_keeps_the_version,
    ]
}

/// The time limit of each wait, generous for a busy machine.
const PATIENCE: Duration = Duration::from_secs(600);

const MIB: u64 = 1 << 20;

/// Eight makers put the parts of each version, each on its own device. A reader sees whole versions only.
#[test]
fn parts_of_eight_devices_are_published_together() {
    const VERSIONS: u64 = 3;
    let fake = Copy::new().load();
    fake.set("FAKECUDA_DEVICES", "8");
    let subject = Subject::of(fake);
    let broker = Broker::start(&subject);
    let names: Vec<String> = (0..8).map(|rank| format!("rank{rank}")).collect();
    let make = |rank: u8, name: &str| {
        let client = broker.client();
        let device = Device::find(&subject.driver, Selector::Ordinal(rank.into())).unwrap();
        for version in 1..=VERSIONS {
            let group = format!("launch-{version}");
            let get = Get::new("model").newer_than(version - 1).wait(PATIENCE);
            let Found::Claim(_claim) = client.get_or_claim(&get, &ClaimOf::part(name, &group)).unwrap() else {
                panic!("found")
            };
            let memory = Shared::create(&device, Spec::vmm(MIB)).unwrap();
            memory.copy_in(MIB - 1, &[version as u8 * 8 + rank]).unwrap();
            let condition = if version == 1 { Condition::New } else { Condition::Version(version - 1) };
            let put = Put::new("model").together(&names, &group, PATIENCE).condition(condition);
            assert_eq!(client.put(&put.part(PutPart::of(name, &memory).unwrap())).unwrap().version, version);
        }
    };
    let client = broker.client();
    thread::scope(|scope| {
        (0..).zip(&names).for_each(|(rank, name)| drop(scope.spawn(move || make(rank, name))));
        let mut version = 0;
        while version < VERSIONS {
            let lease = client.get(&Get::new("model").newer_than(version).wait(PATIENCE)).unwrap();
            let object = lease.open(&subject.driver, None).unwrap();
            version = object.version();
            assert!(object.parts().iter().map(|part| part.name()).eq(&names));
            for (rank, part) in (0..).zip(object.parts()) {
                let (memory, mut byte) = (part.memory().unwrap(), [0]);
                memory.copy_out(MIB - 1, &mut byte).unwrap();
                assert_eq!((i32::from(byte[0]), memory.device().ordinal()), (version as i32 * 8 + rank, rank));
            }
        }
    });
    let one = client.get(&Get::new("model").parts(["rank3"])).unwrap();
    assert_eq!(one.parts().iter().map(|part| part.name()).collect::<Vec<_>>(), ["rank3"]);
    assert_eq!(refused(client.get(&Get::new("model").parts(["rank9"]))).0, RefusalCode::Lacks);
}

fn pools_and_legacy_memory_are_refused(subject: Subject) {
    for spec in [Spec::pool(MIB), Spec::legacy(MIB)] {
        let memory = Shared::create(&subject.device(), spec).unwrap();
        let (code, message) = refused(PutPart::of("all", &memory));
        assert_eq!(code, RefusalCode::Invalid);
        assert!(message.contains("end with their process"), "{message}");
    }
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
    let mut watch = client.watch("a", None).unwrap();
    assert!(matches!(lease.open(&subject.driver, None), Err(Error::Peer(_))));
    let event = watch.next(PATIENCE).unwrap();
    assert!(matches!(&event, Some(Watched::Event(event)) if event.kind == EventKind::Reported), "{event:?}");
    let info = client.stat("a", None).unwrap().version;
    let (report, maker) = (&info.reports[0], &info.parts[0].maker);
    assert!(report.message.contains("the driver reports memory of device 0"), "{}", report.message);
    assert_eq!((report.reader.pid, maker.pid), (process::id() as i32, process::id() as i32));
    assert_eq!(client.get(&Get::new("a")).unwrap().version(), 1);
}

/// Lists come in pages of a record.
#[test]
fn longest_descriptions_are_listed() {
    let subject = Subject::host();
    let broker = Broker::start(&subject);
    let client = broker.client();
    let shared = filled(&subject.driver, 2 * MIB, None, 1);
    let (_, chunks) = shared.chunks(0..2 * MIB).unwrap().unwrap();
    let part = |at: u8| {
        let mut description = shared.describe().unwrap();
        // The broker can't check the name of a device.
        description.device = DeviceIdentity { uuid: DeviceUuid::from_bytes([at; 16]), name: "\"".repeat(255) };
        let segments = chunks.iter().map(|chunk| (chunk.size(), chunk.as_fd()));
        let name = format!("{at:0>255}");
        PutPart::of_segments(name, Backend::Host, description, segments).unwrap().digest("d".repeat(255))
    };
    let names = ["a", "b", "c", "d", "e", "f", "g", "h"];
    names.iter().for_each(|name| drop(client.put(&(0..24).map(part).fold(Put::new(*name), Put::part)).unwrap()));
    assert!(client.list("").unwrap().into_iter().map(|of| of.name).eq(names));
    let leases: Vec<_> =
        (0..500).map(|_| client.get(&Get::new("a").parts([format!("{:0>255}", 0)])).unwrap()).collect();
    assert_eq!(client.who("").unwrap().leases.len(), 500);
    // The answer may exceed a record: then it is a refusal, and the leases remain valid.
    match client.stat("a", None) {
        Ok(info) => assert_eq!(info.version.parts.len(), 24),
        Err(refused) => assert!(matches!(refused, Error::Broker(_)), "{refused:?}"),
    }
    assert!(leases.iter().all(|lease| lease.is_held()));
}

#[test]
fn server_maps_no_driver() {
    let subject = Subject::fake();
    let served = Served::with(Keeper::None, &subject, &binary("vmmfd"), &[]);
    let (client, server) = (served.client(), served.pid());
    let is_mapped = |pid: &str| {
        let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
        ["cuda.so", "libcuda", "memfd:"].iter().any(|name| maps.contains(name))
    };
    let memory = filled(&subject.driver, 8 << 20, Some(2 << 20), 4);
    client.put(&Put::new("a").part(PutPart::of("all", &memory).unwrap())).unwrap();
    let object = client.get(&Get::new("a")).unwrap().open(&subject.driver, None).unwrap();
    // This process maps both.
    assert!(is_mapped("self") && !is_mapped(&server.to_string()));
    drop((object, memory));
    until(|| stored(server) == 4);
    // Each growth of the table of descriptors stops a multithreaded process for milliseconds.
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    let room = status(server, "FDSize");
    assert!(room >= hard.min(1 << 20), "room for {room} descriptors, at a limit of {hard}");
}
