//! The driver calls of a diagnosis: on the emulated driver, and on a GPU.

use vmmfd::internals::Diagnosis;

use crate::support::prelude::*;

cases! {
    on crate::support::Subject; gpus alone: [
    store_without_write_access_destroys_the_context,
    ]
}

fn diagnosis(subject: &Subject) -> &dyn Diagnosis {
    subject.verbs.diagnosis().unwrap()
}

fn module(subject: &Subject) -> &'static str {
    if subject.kind == Kind::Cuda { "cuda" } else { "fake" }
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
