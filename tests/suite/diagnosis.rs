//! The driver calls of a diagnosis: on the emulated driver, and on a GPU.

use vmmfd::internals::{Diagnosis, MadeFor};

use crate::support::prelude::*;

const INVALID: u32 = code::INVALID_VALUE;

cases! {
    on crate::support::Subject; gpus alone: [
    dma_buf_needs_mapped_memory,
    device_copy_needs_access_to_both,
    a_kernel_stores_one_word,
    kernel_store_needs_mapped_words,
    store_without_write_access_destroys_the_context,
    ]
}

fn diagnosis(subject: &Subject) -> &dyn Diagnosis {
    subject.verbs.diagnosis().unwrap()
}

fn module(subject: &Subject) -> &'static str {
    if subject.kind == Kind::Cuda { "cuda" } else { "fake" }
}

// Memory for fabric handles, RDMA and dma-bufs

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
