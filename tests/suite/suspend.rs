//! `vmmfd suspend` and `resume`: a program without GPU memory, and the programs that could not be restored.

use vmmfd::internals::TieCounts;

use crate::support::prelude::*;

fn vmmfd(place: &Meeting, arguments: &[&str]) -> Run {
    let mut run = place.bare("vmmfd");
    run.command.args(arguments);
    run
}

#[test]
fn suspended_program_continues_on_emulation() {
    in_child(
        "suspend::suspended_program_continues_on_emulation",
        |_| (),
        || suspends(Subject::fake(), Meeting::fake()),
    );
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn suspended_program_continues_on_cuda() {
    in_child("suspend::suspended_program_continues_on_cuda", |_| (), || suspends(Subject::cuda(), Meeting::cuda()));
}

/// Suspends this process, which is then a program without other threads in the driver.
fn suspends(subject: Subject, place: Meeting) -> String {
    let device = subject.device();
    let states = place.folder().join("states");
    fs::create_dir(&states).unwrap();
    let pid = process::id().to_string();
    let run = |verb: &str, options: &[&str]| {
        let arguments = [&[verb, &pid][..], options].concat();
        vmmfd(&place, &arguments).env("FAKECUDA_CHECKPOINTS", &states)
    };
    let refused = |ties: TieCounts, words: &str| {
        assert_eq!(TieCounts::of(process::id()).unwrap(), ties);
        run("suspend", &[]).end().code(1).says(words).says("park or close its leases");
    };
    let kept = LegacyMemory::allocate(&device, 1000).unwrap();
    refused(TieCounts { imported: 0, own: 1 }, "it has mapped 1 allocation of its own for others");
    drop(kept);
    {
        let allocation = Allocation::create(&device, 1).unwrap();
        let fd = allocation.export().unwrap().try_clone_to_owned().unwrap();
        let imported = Allocation::import(&device, fd, allocation.size()).unwrap();
        refused(TieCounts { imported: 1, own: 0 }, "it holds or has mapped 1 allocation of other processes");
        let views = [ReadOnly, ReadOnly].map(|access| Mapping::new(&imported, access).unwrap());
        refused(TieCounts { imported: 1, own: 0 }, "it holds or has mapped 1 allocation of other processes");
        let _own = Mapping::new(&allocation, ReadWrite).unwrap();
        refused(TieCounts { imported: 1, own: 1 }, "of other processes, and has mapped 1 allocation of its own");
        drop(views);
    }
    let shared = Shared::create(&device, Spec::vmm(1000)).unwrap();
    shared.copy_in(0, b"kept").unwrap();
    refused(TieCounts { imported: 0, own: 1 }, "of its own for others");
    shared.describe().unwrap();
    run("suspend", &["--own-copies"]).end().code(0);
    run("resume", &[]).end().code(0);
    let mut bytes = [0; 4];
    shared.copy_out(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"kept");
    for result in [shared.describe().map(drop), shared.chunks(0..1).map(drop)] {
        assert!(
            matches!(result, Err(Error::Misuse { problem }) if problem.contains("a copy that no other process can get"))
        );
    }
    drop(shared);
    assert_eq!(TieCounts::of(process::id()).unwrap(), TieCounts::default());
    subject.verbs.activate(0).unwrap();
    if subject.fake.is_some() {
        for call in ["Lock", "Checkpoint"] {
            let fault = format!("cuCheckpointProcess{call}:1:999");
            run("suspend", &[]).env("FAKECUDA_FAIL", fault).end().code(5).says("failed: cuCheckpointProcess");
            changes(run("resume", &["--json"]).end(), false);
        }
    }
    if subject.fake.is_some() {
        // Another command holds the process, or held it when it was killed.
        fs::write(states.join(&pid), "1").unwrap();
        run("suspend", &[]).end().code(5).says("is locked").says(&format!("vmmfd resume {pid}"));
        assert_eq!(fs::read_to_string(states.join(&pid)).unwrap(), "1", "it is not this command's to undo");
        changes(run("resume", &["--json"]).end(), true);
        let faults = "cuCheckpointProcessCheckpoint:1:999,cuCheckpointProcessUnlock:1:999";
        run("suspend", &[]).env("FAKECUDA_FAIL", faults).end().code(5).says("is still suspended").says("vmmfd resume");
        changes(run("resume", &["--json"]).end(), true);
    }
    for changed in [true, false] {
        changes(run("suspend", &["--json"]).end(), changed);
    }
    for changed in [true, false] {
        changes(run("resume", &["--json"]).end(), changed);
    }
    // The driver works as before.
    let allocation = Allocation::create(&device, 1).unwrap();
    let mapping = Mapping::new(&allocation, ReadWrite).unwrap();
    mapping.copy_in(0, b"awake").unwrap();
    let mut bytes = [0; 5];
    mapping.copy_out(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"awake");
    String::new()
}

/// Checks the report about this process.
#[track_caller]
fn changes(ended: Ended, changed: bool) {
    let report = ended.code(0).json();
    let own = report["processes"].as_array().unwrap().iter().find(|line| line["pid"] == process::id());
    assert_eq!(own.unwrap()["changed"], Value::Bool(changed), "{report}");
}

#[test]
fn processes_without_cuda_are_named() {
    let place = Meeting::fake();
    let states = place.folder().join("states");
    fs::create_dir(&states).unwrap();
    let run = |pid: &str| vmmfd(&place, &["suspend", pid]).env("FAKECUDA_CHECKPOINTS", &states).end();
    let mut sleeper = Command::new("sleep").arg("60").spawn().unwrap();
    let pid = sleeper.id().to_string();
    run(&pid).code(5).says(&format!("process {pid} (sleep) does not use CUDA, nor does a child of it"));
    run("4000000").code(5).says("process 4000000 does not exist");
    run("0").code(2);
    // The emulated driver then is one without checkpoints.
    vmmfd(&place, &["suspend", &pid]).end().code(5).says("CUDA_ERROR_NOT_SUPPORTED");
    sleeper.kill().unwrap();
    sleeper.wait().unwrap();
}
