//! The driver calls of a diagnosis: on the emulated driver, and on a GPU.

use vmmfd::internals::Diagnosis;

use crate::support::prelude::*;

cases! {
    on crate::support::Subject; gpus alone: [
    a_kernel_stores_one_word,
    store_without_write_access_destroys_the_context,
    ]
}

fn diagnosis(subject: &Subject) -> &dyn Diagnosis {
    subject.verbs.diagnosis().unwrap()
}

fn module(subject: &Subject) -> &'static str {
    if subject.kind == Kind::Cuda { "cuda" } else { "fake" }
}

// Copies

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
