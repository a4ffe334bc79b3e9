//! The rules of `vmmfd doctor`: the emulated driver fails as each rule describes, and the report gives the rule's explanation.

use std::{fs, path::Path};

use serde_json::Value;
use vmmfd_cli::doctor::rules::rules;

use crate::{
    doctor::finding,
    running::{Meeting, Run},
    support::Copy,
};

const FAIL: &str = "FAKECUDA_FAIL";
const SLOW: &str = "FAKECUDA_SLOW";
const ABORT: &str = "FAKECUDA_ABORT";
const ATTRIBUTE: &str = "FAKECUDA_ATTRIBUTE";
const DEVICES: &str = "FAKECUDA_DEVICES";
const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";
/// systemd-nspawn and others set this variable in their containers.
const CONTAINER: (&str, &str) = ("container", "a-test");

/// A rule, a probe, its status, and the settings of the driver and the environment that cause it.
type Case = (&'static str, &'static str, &'static str, &'static [(&'static str, &'static str)]);

/// A failure on the machine, on a device, of a pair and of another process. The tests beside the rules cover every rule.
#[rustfmt::skip]
const CASES: &[Case] = &[
    ("fabric-manager", "driver", "failed", &[(FAIL, "cuInit:1:802")]),
    ("no-gpu-visible", "driver", "failed", &[(DEVICES, "0"), CONTAINER]),
    ("driver-hangs", "driver", "failed", &[(SLOW, "cuInit:3600000")]),
    ("mps", "driver", "failed", &[(FAIL, "cuInit:1:805"), ("CUDA_MPS_PIPE_DIRECTORY", "/nonexistent")]),
    ("exclusive", "memory", "failed", &[(FAIL, "cuDevicePrimaryCtxRetain:1:46")]),
    ("mig", "peer", "unsupported", &[("FAKECUDA_PEERS", "0"), (DEVICES, "2"), (VISIBLE, "MIG-1")]),
    ("gpu-hidden-by-variable", "import", "failed", &[(FAIL, "cuMemImportFromShareableHandle:1:101"), (VISIBLE, "1")]),
    ("event-not-shared", "event", "failed", &[("FAKECUDA_EVENTS_FAIL", "1")]),
    ("no-vmm", "round-trip", "unsupported", &[(ATTRIBUTE, "102:0")]),
    ("crashed", "memory", "failed", &[(ABORT, "cuMemcpyDtoH_v2")]),
];

/// The doctor with one probe, without device variables in the environment.
fn doctor(meeting: &Meeting, probe: &str, settings: &[(&str, &str)]) -> Run {
    let timeout = if settings.contains(&(SLOW, "cuInit:3600000")) { "700ms" } else { "20s" };
    let mut run = crate::doctor::doctor(meeting, &["--json", "--only", probe, "--timeout", timeout]);
    run.command.env_remove(VISIBLE).env_remove("CUDA_MPS_PIPE_DIRECTORY").envs(settings.iter().copied());
    run
}

#[track_caller]
fn assert_explained(report: &Value, probe: &str, status: &str, rule: &str) {
    let found = finding(report, probe);
    assert_eq!((&found["status"], &found["rule"]), (&status.into(), &rule.into()), "{rule}: {found}");
    let known = rules().find(|known| known.name == rule).unwrap();
    assert_eq!((&found["cause"], &found["remedy"]), (&known.cause.into(), &known.remedy.into()));
    assert!(report["verdict"].as_str().is_some_and(|verdict| !verdict.is_empty()));
}

/// Whether this machine has its own driver, which is loaded if the emulated driver is missing.
pub(crate) fn has_driver() -> bool {
    fs::exists("/dev/nvidiactl").unwrap()
}

#[test]
fn each_failure_has_its_rule() {
    let meeting = Meeting::fake();
    for (rule, probe, status, settings) in CASES {
        if *rule == "no-gpu-visible" && has_driver() {
            continue;
        }
        assert_explained(&doctor(&meeting, probe, settings).end().json(), probe, status, rule);
    }
    let report = doctor(&meeting, "descriptors", &[]).with_files(100).end().code(1).json();
    assert_explained(&report, "descriptors", "failed", "few-descriptors");
}

#[test]
fn short_time_limit_is_the_cause() {
    let meeting = Meeting::host();
    let report = crate::doctor::doctor(&meeting, &["--json", "--timeout", "1ms"]).end().code(1).json();
    let machine = report["machine"].as_array().unwrap();
    for found in machine.iter().filter(|found| found["error"]["kind"] == "timeout") {
        assert!(found["cause"].as_str().unwrap().contains("within --timeout"), "{found}");
    }
    assert_eq!(finding(&report, "descriptors")["rule"], "hangs", "{report}");
}

#[test]
fn library_that_fails_init_is_named() {
    let meeting = Meeting::fake();
    // Only the folder identifies a stub.
    let copy = Copy::new();
    let stubs = copy.folder().join("stubs");
    fs::create_dir(&stubs).unwrap();
    fs::rename(copy.write("libcuda.so.1"), stubs.join("libcuda.so.1")).unwrap();
    let run = doctor(&meeting, "driver", &[(FAIL, "cuInit:1:999")]).env("LD_LIBRARY_PATH", &stubs);
    let report = run.end().code(1).json();
    assert_explained(&report, "driver", "failed", "stub-library");
    let library = &report["environment"]["library"];
    assert!(library["path"].as_str().unwrap().ends_with("/stubs/libcuda.so.1"), "{library}");
    // The report names a library that is not a stub, too.
    let report = doctor(&meeting, "driver", &[(FAIL, "cuInit:1:803")]).end().code(1).json();
    assert!(Path::new(report["environment"]["library"]["path"].as_str().unwrap()).is_file(), "{report}");
}

#[test]
fn persistence_mode_is_only_a_warning() {
    let meeting = Meeting::fake();
    let found = |copy: &Copy, settings: &[(&str, &str)]| {
        let run = crate::doctor::doctor(&meeting, &["--json"]).env("LD_LIBRARY_PATH", copy.folder());
        // By default the probe is not required.
        let report = settings.iter().fold(run, |run, (name, value)| run.env(name, value)).end().code(0).json();
        (finding(&report, "persistence"), report)
    };
    let assert_skipped = |copy: &Copy, settings: &[(&str, &str)], words: &str| {
        let (found, _) = found(copy, settings);
        assert!(found["status"] == "skipped" && found["meaning"].as_str().unwrap().contains(words), "{found}");
    };
    let copy = Copy::new();
    copy.write("libcuda.so.1");
    // A container that has the driver but lacks NVML.
    if !has_driver() {
        assert_skipped(&copy, &[], "libnvidia-ml.so.1: cannot open");
    }
    copy.write("libnvidia-ml.so.1");
    let (ok, _) = found(&copy, &[]);
    assert_eq!((&ok["status"], &ok["figures"]["persistence_mode"]), (&"ok".into(), &1.into()), "{ok}");
    // A MIG instance reports the mode of its GPU.
    for settings in [&[("FAKECUDA_PERSISTENCE", "0")][..], &[("FAKECUDA_PERSISTENCE", "0"), ("FAKECUDA_MIG", "1")]] {
        let (off, report) = found(&copy, settings);
        assert_explained(&report, "persistence", "unsupported", "persistence-off");
        assert_eq!(off["figures"]["persistence_mode"], 0);
    }
    let failed = "nvmlDeviceGetHandleByUUID failed: Unknown Error (15)";
    assert_skipped(&copy, &[(FAIL, "nvmlDeviceGetHandleByUUID:1:15")], failed);
    let old = Copy::new().without("nvmlDeviceGetPersistenceMode");
    old.write("libcuda.so.1");
    old.write("libnvidia-ml.so.1");
    assert_skipped(&old, &[], "has no nvmlDeviceGetPersistenceMode");
}
