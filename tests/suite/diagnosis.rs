//! The driver calls of a diagnosis: on the emulated driver, and on a GPU.

use std::{
    env,
    fs::{self, File},
    io::{Seek, SeekFrom},
    os::fd::AsFd,
    process::Command,
};

use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use vmmfd::{
    driver::{Access::ReadOnly, code},
    internals::{Diagnosis, MadeFor, Properties},
};

use crate::{
    legacy_and_pools::{Wire, with_owner_in},
    support::{EXPORTABLE, Kind, Mapped, Subject, code, in_child},
};

const INVALID: u32 = code::INVALID_VALUE;

cases! {
    on crate::support::Subject; gpus alone: [
    library_reports_its_file,
    fabric_memory_is_exported_or_forbidden,
    rdma_memory_works_like_other_memory,
    dma_buf_has_range_size_and_cloexec,
    dma_buf_needs_mapped_memory,
    device_copy_reports_its_time,
    device_copy_needs_access_to_both,
    a_kernel_stores_one_word,
    kernel_store_needs_mapped_words,
    store_without_write_access_destroys_the_context,
    event_is_local_to_its_driver,
    events_synchronize_both_processes,
    ]
}

fn diagnosis(subject: &Subject) -> &dyn Diagnosis {
    subject.verbs.diagnosis().unwrap()
}

fn closes_on_exec(fd: impl AsFd) -> bool {
    FdFlag::from_bits_retain(fcntl(fd, FcntlArg::F_GETFD).unwrap()).contains(FdFlag::FD_CLOEXEC)
}

fn module(subject: &Subject) -> &'static str {
    if subject.kind == Kind::Cuda { "cuda" } else { "fake" }
}

fn library_reports_its_file(subject: Subject) {
    let library = diagnosis(&subject).library().unwrap();
    match &subject.fake {
        Some(fake) => assert_eq!(library, fake.path()),
        None => {
            let name = library.file_name().unwrap().to_str().unwrap();
            assert!(name.starts_with("libcuda.so") && fs::metadata(&library).unwrap().is_file(), "{library:?}");
        }
    }
}

// Memory for fabric handles, RDMA and dma-bufs

fn fabric_memory_is_exported_or_forbidden(subject: Subject) {
    let driver = &subject.verbs;
    let diagnosis = diagnosis(&subject);
    let unit = subject.unit();
    assert_eq!(code(diagnosis.create_with(99, unit, MadeFor::Fabric)), code::INVALID_DEVICE);
    let ordinary = driver.create(unit, &EXPORTABLE).unwrap();
    let refused = code(diagnosis.export_fabric(ordinary));
    assert!(refused == INVALID || subject.kind == Kind::Cuda && refused != 0, "what is not made for it: {refused}");
    driver.release(ordinary).unwrap();
    assert_eq!(code(diagnosis.export_fabric(ordinary)), INVALID, "released");
    let refused = diagnosis.create_with(0, unit, MadeFor::Fabric);
    if let Some(fake) = &subject.fake {
        assert_eq!(code(refused), code::NOT_PERMITTED, "without a channel");
        fake.set("FAKECUDA_FABRIC", "1");
    } else if code(refused) == code::NOT_PERMITTED {
        return;
    }
    let handles = [(); 2].map(|()| diagnosis.create_with(0, unit, MadeFor::Fabric).unwrap());
    let exported = handles.map(|handle| diagnosis.export_fabric(handle).unwrap());
    assert_ne!(exported[0], exported[1]);
    assert_ne!(exported[0], [0; 64]);
    for handle in handles {
        assert_eq!(code(driver.export(handle)), INVALID, "as a descriptor");
        let mapped = Mapped::of(&*subject.verbs, handle, unit);
        mapped.write(0, b"fabric");
        assert_eq!(&mapped.read(0), b"fabric");
        mapped.end();
    }
}

fn rdma_memory_works_like_other_memory(subject: Subject) {
    let driver = &subject.verbs;
    let diagnosis = diagnosis(&subject);
    let unit = subject.unit();
    assert_eq!(code(diagnosis.create_with(99, unit, MadeFor::Rdma)), code::INVALID_DEVICE);
    for size in [0, unit + 1] {
        assert_eq!(code(diagnosis.create_with(0, size, MadeFor::Rdma)), INVALID, "{size}");
    }
    let handle = diagnosis.create_with(0, unit, MadeFor::Rdma).unwrap();
    assert_eq!(driver.properties(handle).unwrap(), Properties { gpu_direct_rdma: true, ..EXPORTABLE });
    let fd = driver.export(handle).unwrap();
    let mapped = Mapped::of(&*subject.verbs, handle, unit);
    let imported = driver.import(fd.as_fd(), unit).unwrap();
    let other = Mapped::of(&*subject.verbs, imported, unit);
    mapped.write(5, b"the same");
    assert_eq!(&other.read(5), b"the same");
    other.end();
    mapped.end();
}

fn dma_buf_has_range_size_and_cloexec(subject: Subject) {
    let (diagnosis, unit) = (diagnosis(&subject), subject.unit());
    let mapped = Mapped::of(&*subject.verbs, diagnosis.create_with(0, 2 * unit, MadeFor::Rdma).unwrap(), 2 * unit);
    let fds = [(); 2].map(|()| diagnosis.export_dma_buf(0, mapped.address, 2 * unit).unwrap());
    assert!(fds.iter().all(closes_on_exec));
    for fd in fds {
        assert_eq!(File::from(fd).seek(SeekFrom::End(0)).unwrap(), 2 * unit);
    }
    mapped.end();
}

fn dma_buf_needs_mapped_memory(mut subject: Subject) {
    subject.alone();
    let driver = &subject.verbs;
    let diagnosis = diagnosis(&subject);
    let unit = subject.unit();
    let mapped = Mapped::of(&*subject.verbs, diagnosis.create_with(0, unit, MadeFor::Rdma).unwrap(), unit);
    let block = driver.legacy().unwrap().allocate(0, unit).unwrap();
    let beside = driver.reserve(unit, 0).unwrap();
    let address = mapped.address;
    let calls = || subject.fake.as_ref().map(|fake| fake.calls(""));
    let before = calls();
    for (what, start, size) in [
        ("nothing", address, 0),
        ("more than is mapped", address, 2 * unit),
        ("what is before", address - 4096, 4096),
        ("what is reserved", beside, unit),
        ("what is not mapped", block, unit),
        ("around the end of addresses", u64::MAX - 1, 4),
    ] {
        assert_eq!(code(diagnosis.export_dma_buf(0, start, size)), INVALID, "{what}");
    }
    assert_eq!(calls(), before, "none of it reached the driver");
    assert_eq!(code(diagnosis.export_dma_buf(99, address, unit)), code::INVALID_DEVICE);
    let ordinary = Mapped::new(&*subject.verbs, &EXPORTABLE, 1);
    if subject.fake.is_some() {
        assert_eq!(code(diagnosis.export_dma_buf(0, ordinary.address, unit)), INVALID, "what is not made for it");
    }
    ordinary.end();
    driver.free(beside, unit).unwrap();
    driver.legacy().unwrap().deallocate(0, block).unwrap();
    mapped.end();
    assert_eq!(code(diagnosis.export_dma_buf(0, address, unit)), INVALID, "unmapped");
}

// Copies

fn device_copy_reports_its_time(subject: Subject) {
    let driver = &subject.verbs;
    let diagnosis = diagnosis(&subject);
    let unit = subject.unit();
    let [one, two] = [(); 2].map(|()| Mapped::new(&*subject.verbs, &EXPORTABLE, 3));
    one.write(0, &[0; 200]);
    one.write(0, b"the first");
    one.write(3 * unit - 8, b"the last");
    let took = diagnosis.copy_within(0, two.address, one.address, 3 * unit).unwrap();
    assert!(!took.is_zero());
    assert_eq!((&two.read(0), &two.read(3 * unit - 8)), (b"the first", b"the last"));
    diagnosis.copy_within(0, two.address + 100, two.address + 4, 5).unwrap();
    assert_eq!((&two.read(99), &two.read(105)), (b"\0first", b"\0"), "so many bytes and no more");
    let legacy = driver.legacy().unwrap();
    let block = legacy.allocate(0, 9).unwrap();
    diagnosis.copy_within(0, block, one.address, 9).unwrap();
    diagnosis.copy_within(0, two.address + 1, block, 9).unwrap();
    assert_eq!(&two.read(0), b"tthe first");
    legacy.deallocate(0, block).unwrap();
    one.end();
    two.end();
}

fn device_copy_needs_access_to_both(mut subject: Subject) {
    subject.alone();
    let (diagnosis, unit) = (diagnosis(&subject), subject.unit());
    let [one, two] = [(); 2].map(|()| Mapped::new(&*subject.verbs, &EXPORTABLE, 1));
    let (to, from) = (one.address, two.address);
    let calls = || subject.fake.as_ref().map(|fake| fake.calls(""));
    let (local, before) = (0u64, calls());
    // Three units: the two mappings may be adjacent, and no other memory is mapped.
    for (what, to, from, size) in [
        ("to more than is mapped", to + 8, from, 3 * unit),
        ("from more than is mapped", to, from + 8, 3 * unit),
        ("to this process's own", &raw const local as u64, from, 8),
        ("from this process's own", to, &raw const local as u64, 8),
        ("around the end of addresses", to, u64::MAX - 1, 4),
    ] {
        assert_eq!(code(diagnosis.copy_within(0, to, from, size)), INVALID, "{what}");
    }
    assert_eq!(calls(), before, "none of it reached the driver");
    assert_eq!(code(diagnosis.copy_within(99, to, from, 8)), code::INVALID_DEVICE);
    two.write(0, b"read me!");
    two.allow(Some(ReadOnly));
    diagnosis.copy_within(0, to, from, 8).unwrap();
    assert_eq!(&one.read(0), b"read me!");
    assert_eq!(code(diagnosis.copy_within(0, from, to, 8)), INVALID, "to what may only be read");
    two.allow(None);
    assert_eq!(code(diagnosis.copy_within(0, to, from, 8)), INVALID, "from what may not be read");
    one.end();
    two.end();
    assert_eq!(code(diagnosis.copy_within(0, to, from, 8)), INVALID, "unmapped");
}

#[test]
fn failed_device_copy_is_awaited() {
    let subject = Subject::fake();
    let fake = subject.fake.as_ref().unwrap();
    let diagnosis = diagnosis(&subject);
    let mapped = Mapped::new(&*subject.verbs, &EXPORTABLE, 1);
    let copy = || diagnosis.copy_within(0, mapped.address, mapped.address + 8, 8);
    for (fault, want) in [("cuMemcpyDtoD_v2:1:700", 700), ("cuCtxSynchronize:1:719", 719)] {
        let before = fake.calls("cuCtxSynchronize");
        fake.set("FAKECUDA_FAIL", fault);
        assert_eq!((code(copy()), fake.calls("cuCtxSynchronize")), (want, before + 1), "{fault}");
    }
    copy().unwrap();
    mapped.end();
}

// Stores

fn a_kernel_stores_one_word(subject: Subject) {
    let (diagnosis, unit) = (diagnosis(&subject), subject.unit());
    let mapped = Mapped::new(&*subject.verbs, &EXPORTABLE, 1);
    mapped.write(0, &[9; 16]);
    mapped.write(unit - 8, &[9; 8]);
    diagnosis.store(0, mapped.address + 4, 0x0403_0201).unwrap();
    diagnosis.store(0, mapped.address + unit - 4, 0x0807_0605).unwrap();
    assert_eq!(mapped.read(0), [9, 9, 9, 9, 1, 2, 3, 4, 9, 9, 9, 9, 9, 9, 9, 9]);
    assert_eq!(mapped.read(unit - 8), [9, 9, 9, 9, 5, 6, 7, 8]);
    mapped.end();
}

fn kernel_store_needs_mapped_words(mut subject: Subject) {
    subject.alone();
    let driver = &subject.verbs;
    let diagnosis = diagnosis(&subject);
    let unit = subject.unit();
    let mapped = Mapped::new(&*subject.verbs, &EXPORTABLE, 1);
    let beside = driver.reserve(unit, 0).unwrap();
    let (address, local) = (mapped.address, 0u32);
    let calls = || subject.fake.as_ref().map(|fake| fake.calls(""));
    let before = calls();
    for (what, at) in [
        ("between words", address + 2),
        ("behind", address + unit),
        ("reserved", beside),
        ("this process's own", &raw const local as u64),
        ("null", 0),
        ("the end of addresses", u64::MAX - 3),
    ] {
        assert_eq!(code(diagnosis.store(0, at, 1)), INVALID, "{what}");
    }
    assert_eq!(calls(), before, "none of it reached the driver");
    assert_eq!(code(diagnosis.store(99, address, 1)), code::INVALID_DEVICE);
    driver.synchronize(0).unwrap();
    driver.free(beside, unit).unwrap();
    mapped.end();
    assert_eq!(code(diagnosis.store(0, address, 1)), INVALID, "unmapped");
}

fn store_without_write_access_destroys_the_context(subject: Subject) {
    for access in [Some(ReadOnly), None] {
        let name = format!("diagnosis::{}::store_without_write_access_destroys_the_context", module(&subject));
        let prepare = |command: &mut Command| {
            command.env("ACCESS", format!("{access:?}"));
        };
        let answers = in_child(&name, prepare, || {
            let read_only = env::var("ACCESS").unwrap() == format!("{:?}", Some(ReadOnly));
            let mapped = Mapped::new(&*subject.verbs, &EXPORTABLE, 1);
            mapped.allow(read_only.then_some(ReadOnly));
            let answers = [
                diagnosis(&subject).store(0, mapped.address, 1),
                subject.verbs.synchronize(0),
                subject.verbs.copy_out(0, mapped.address, &mut [0]),
                diagnosis(&subject).store(0, mapped.address, 1),
            ];
            answers.map(|answer| code(answer).to_string()).join(" ")
        });
        assert_eq!(answers, "700 700 700 700", "{access:?}");
        subject.verbs.synchronize(0).unwrap();
    }
}

#[test]
fn failed_store_leaves_nothing() {
    let subject = Subject::fake();
    let fake = subject.fake.as_ref().unwrap();
    let diagnosis = diagnosis(&subject);
    let mapped = Mapped::new(&*subject.verbs, &EXPORTABLE, 1);
    for (symbol, waited) in
        [("cuModuleLoadData", 0), ("cuModuleGetFunction", 0), ("cuLaunchKernel", 1), ("cuCtxSynchronize", 1)]
    {
        let before = fake.calls("cuCtxSynchronize");
        fake.set("FAKECUDA_FAIL", &format!("{symbol}:1:719"));
        assert_eq!(code(diagnosis.store(0, mapped.address, 1)), 719, "{symbol}");
        assert_eq!((fake.live()[8], fake.calls("cuCtxSynchronize") - before), (0, waited), "{symbol}");
    }
    fake.set("FAKECUDA_FAIL", "cuModuleUnload:1:719");
    assert_eq!(code(diagnosis.store(0, mapped.address, 1)), 719);
    assert_eq!(fake.live()[8], 1, "what can't be unloaded is told");
    mapped.end();
    // The driver keeps this module loaded for good.
    std::mem::forget(subject);
}

// Events

fn event_is_local_to_its_driver(mut subject: Subject) {
    subject.alone();
    let diagnosis = diagnosis(&subject);
    assert_eq!(code(diagnosis.event_create(99)), code::INVALID_DEVICE);
    let [event, other] = [(); 2].map(|()| diagnosis.event_create(0).unwrap());
    assert_ne!(event, other);
    let waited = || subject.fake.as_ref().map_or(0, |fake| fake.waited());
    diagnosis.event_wait(0, event).unwrap();
    assert_eq!(waited(), 0, "it was never recorded");
    diagnosis.event_record(0, event).unwrap();
    diagnosis.event_wait(0, event).unwrap();
    diagnosis.event_wait(0, other).unwrap();
    assert_eq!(waited(), subject.fake.iter().count() as u64);
    let exported = diagnosis.event_export(0, event).unwrap();
    assert_ne!(exported, diagnosis.event_export(0, other).unwrap());
    let refusals = |ordinal| {
        let calls = [
            diagnosis.event_export(ordinal, event).map(drop),
            diagnosis.event_record(ordinal, event),
            diagnosis.event_wait(ordinal, event),
            diagnosis.event_destroy(ordinal, event),
        ];
        calls.map(code)
    };
    assert_eq!(refusals(1), [INVALID; 4], "another device");
    [event, other].into_iter().for_each(|event| diagnosis.event_destroy(0, event).unwrap());
    let calls = || subject.fake.as_ref().map(|fake| fake.calls(""));
    let before = calls();
    assert_eq!(refusals(0), [INVALID; 4], "destroyed");
    assert_eq!(calls(), before, "none of it reached the driver");
}

fn events_synchronize_both_processes(subject: Subject) {
    let owner = |subject: &Subject, wire: Wire| {
        let diagnosis = diagnosis(subject);
        let event = diagnosis.event_create(0).unwrap();
        wire.say(&diagnosis.event_export(0, event).unwrap());
        wire.hear::<1>();
        diagnosis.event_record(0, event).unwrap();
        wire.say(b".");
        wire.hear::<1>();
        diagnosis.event_wait(0, event).unwrap();
        diagnosis.event_destroy(0, event).unwrap();
        wire.say(b".");
    };
    let test = format!("diagnosis::{}::events_synchronize_both_processes", module(&subject));
    with_owner_in(&subject, &test, owner, |wire| {
        let diagnosis = diagnosis(&subject);
        let handle: [u8; 64] = wire.hear();
        assert_eq!(code(diagnosis.event_open(99, &handle)), code::INVALID_DEVICE);
        let event = diagnosis.event_open(0, &handle).unwrap();
        let waited = || subject.fake.as_ref().map_or(0, |fake| fake.waited());
        diagnosis.event_wait(0, event).unwrap();
        assert_eq!(waited(), 0, "it was never recorded");
        wire.say(b"x");
        assert_eq!(&wire.hear(), b".");
        diagnosis.event_wait(0, event).unwrap();
        assert_eq!(waited(), subject.fake.iter().count() as u64, "the other process recorded it");
        diagnosis.event_record(0, event).unwrap();
        wire.say(b"x");
        assert_eq!(&wire.hear(), b".");
        diagnosis.event_destroy(0, event).unwrap();
        assert_eq!(code(diagnosis.event_destroy(0, event)), INVALID, "twice");
    });
}

#[test]
fn foreign_handle_is_no_event() {
    let share = |subject: &Subject, wire: Wire| {
        let event = diagnosis(subject).event_create(0).unwrap();
        wire.say(&diagnosis(subject).event_export(0, event).unwrap());
        wire.hear::<1>();
        diagnosis(subject).event_destroy(0, event).unwrap();
        wire.say(b".");
        wire.hear::<1>();
    };
    let subject = Subject::fake();
    with_owner_in(&subject, "diagnosis::foreign_handle_is_no_event", share, |wire| {
        let fake = subject.fake.as_ref().unwrap();
        let diagnosis = diagnosis(&subject);
        let handle: [u8; 64] = wire.hear();
        let mut damaged = handle;
        damaged[0] ^= 0xFF;
        assert_eq!(code(diagnosis.event_open(0, &[0; 64])), INVALID);
        assert_eq!(code(diagnosis.event_open(0, &damaged)), INVALID);
        fake.set("FAKECUDA_EVENTS_FAIL", "1");
        assert_eq!(code(diagnosis.event_open(0, &handle)), code::MAP_FAILED);
        fake.set("FAKECUDA_EVENTS_FAIL", "0");
        let event = diagnosis.event_open(0, &handle).unwrap();
        assert_eq!(code(diagnosis.event_export(0, event)), code::INVALID_HANDLE, "exported again");
        diagnosis.event_destroy(0, event).unwrap();
        wire.say(b"x");
        assert_eq!(&wire.hear(), b".");
        assert_eq!(code(diagnosis.event_open(0, &handle)), code::INVALID_HANDLE, "destroyed by its maker");
        wire.say(b"x");
        wire.hear_the_end();
        assert_eq!(code(diagnosis.event_open(0, &handle)), code::INVALID_HANDLE, "its maker is gone");
        let own = diagnosis.event_create(0).unwrap();
        let exported = diagnosis.event_export(0, own).unwrap();
        assert_eq!(code(diagnosis.event_open(0, &exported)), code::INVALID_CONTEXT, "where it is from");
        diagnosis.event_destroy(0, own).unwrap();
    });
}
