//! `vmmfd doctor` as a user runs it: the report is complete after any failure, and its verdict is correct.

use std::{collections::BTreeSet, fs, path::Path};

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::{
    running::{Ended, HANGS, Meeting, Run, wait_for},
    support::Copy,
};

cases! {
    on crate::running::Meeting; every backend: [
    clean_report_is_complete,
    ]
}

/// This probe causes a GPU fault, so it runs only on request.
const FAULTING: &str = "read-only-store";

/// The other probes of a machine and of a device, in order.
#[rustfmt::skip]
const MACHINE: [&str; 4] = ["driver", "descriptors", "host-memory", "broker"];
#[rustfmt::skip]
const DEVICE: [&str; 20] = [
    "attributes", "granularity", "memory", "export", "import", "round-trip", "aliases", "read-only-copy", "wrong-descriptor",
    "exporter-killed", "memory-returned", "held-descriptor", "persistence", "export-cost", "host-numa", "dma-buf", "fabric", "pool",
    "legacy", "event",
];

pub(crate) fn doctor(meeting: &Meeting, options: &[&str]) -> Run {
    let mut run = meeting.bare("vmmfd");
    run.command.args(["doctor", "--backend", meeting.backend()]).args(options);
    run.command.env("TMPDIR", meeting.folder()).env("XDG_RUNTIME_DIR", meeting.folder());
    // The free memory of the whole machine changes between runs.
    if meeting.is_fake() { run.env("FAKECUDA_FREE", "1073741824") } else { run }
}

/// The doctor with one probe of the emulated driver.
fn only(meeting: &Meeting, probe: &str) -> Run {
    let faults: &[&str] = if probe == FAULTING { &["--faults"] } else { &[] };
    doctor(meeting, &[&["--json", "--only", probe][..], faults].concat()).env("FAKECUDA_FABRIC", "1")
}

/// The names of the probes, in order.
pub(crate) fn probes(findings: &Value) -> Vec<&str> {
    findings.as_array().unwrap().iter().map(|finding| finding["probe"].as_str().unwrap()).collect()
}

/// The first finding of a probe, anywhere in the report.
#[track_caller]
pub(crate) fn finding(report: &Value, probe: &str) -> Value {
    let inside = |part: &str| report[part].as_array().into_iter().flatten().filter_map(|of| of["findings"].as_array());
    let mut all = report["machine"].as_array().into_iter().chain(inside("devices")).chain(inside("pairs")).flatten();
    all.find(|finding| finding["probe"] == probe).unwrap_or_else(|| panic!("no {probe}: {report}")).clone()
}

/// Asserts that no file and no process of the doctor remains.
#[track_caller]
fn assert_gone(meeting: &Meeting, but: &[&str]) {
    wait_for("the end of all processes", || meeting.processes().is_empty());
    let files: Vec<String> = meeting.files().into_iter().filter(|file| !but.contains(&file.as_str())).collect();
    assert!(files.is_empty(), "{files:?}");
}

/// Asserts that the report covers one device, with every probe.
#[track_caller]
fn assert_whole(report: &Value) {
    assert_eq!(report["schema"], 1);
    assert_eq!(probes(&report["machine"]), MACHINE, "{report}");
    assert_eq!(probes(&report["devices"][0]["findings"]), DEVICE, "{report}");
    for finding in report["devices"][0]["findings"].as_array().unwrap() {
        let no_error = finding["status"] == "ok" || finding["status"] == "skipped";
        assert!(finding["meaning"] != "" && no_error == finding["error"].is_null(), "{finding}");
    }
}

fn clean_report_is_complete(meeting: Meeting) {
    let ended = doctor(&meeting, &["--json", "--device", "0"]).end();
    assert_eq!(ended.code(0).stderr, "");
    let report = ended.json();
    assert_whole(&report);
    assert_eq!((&report["exit_code"], &report["backend"]), (&0.into(), &meeting.backend().into()));
    let required = ["driver", "memory", "export", "import", "round-trip"];
    assert_eq!(report["required"], json!(required));
    for probe in DEVICE {
        assert_ne!(finding(&report, probe)["status"], "failed", "{report}");
    }
    for probe in required {
        let found = finding(&report, probe);
        assert!(found["status"] == "ok" && found["us"].as_u64().unwrap() > 0, "{found}");
    }
    assert!(finding(&report, "export")["figures"]["descriptor"].is_string());
    if meeting.is_fake() {
        for probe in ["memory-returned", "held-descriptor", "dma-buf", "pool", "legacy", "event"] {
            assert_eq!(finding(&report, probe)["status"], "ok", "{}", finding(&report, probe));
        }
        assert_eq!(finding(&report, "fabric")["error"]["code"], 800);
    }
    // The verdict is also the last line of the text report.
    let text = doctor(&meeting, &["--device", "0"]).end();
    let lines: Vec<&str> = text.code(0).stdout.lines().collect();
    for verdict in [report["verdict"].as_str().unwrap(), lines[lines.len() - 1]] {
        assert!(verdict.starts_with("VMM fd sharing works on 1 of 1 "), "{verdict}");
    }
    assert_eq!(lines[0].contains("NO GPU IS BEING TESTED"), meeting.backend() == "host", "{}", lines[0]);
    assert_gone(&meeting, &[]);
}

#[test]
fn chosen_probes_alone_are_run() {
    let meeting = Meeting::fake();
    let report = doctor(&meeting, &["--json", "--device", "0", "--only", "export,granularity"]).end().json();
    // In their own order.
    assert_eq!(probes(&report["devices"][0]["findings"]), ["granularity", "export"]);
    // Only the driver probe is needed to find the devices.
    assert_eq!(probes(&report["machine"]), ["driver"]);
    assert_eq!(report["required"], json!(["driver", "granularity", "export"]), "a named probe is required");
    assert!(report["verdict"].as_str().unwrap().starts_with("The required probes succeed on 1 of 1 "), "{report}");
    let list = doctor(&meeting, &["--list"]).end();
    let names: Vec<&str> = list.code(0).stdout.lines().filter_map(|line| line.split_whitespace().next()).collect();
    let mut all = [&MACHINE[..], &DEVICE[..], &["peer"]].concat();
    all.insert(MACHINE.len() + DEVICE.iter().position(|probe| *probe == "wrong-descriptor").unwrap(), FAULTING);
    assert_eq!(names, all);
    assert!(list.stdout.lines().any(|line| line.starts_with(FAULTING) && line.ends_with(" (only with --faults)")));
    let listed = doctor(&meeting, &["--list", "--json"]).end().code(0).json();
    let faulting = listed["probes"].as_array().unwrap().iter().filter(|probe| probe["faults"] == true);
    assert!(faulting.map(|probe| &probe["name"]).eq([FAULTING]), "{listed}");
    for wrong in [["--device", "none"], ["--timeout", "5"]] {
        assert_eq!(doctor(&meeting, &wrong).end().code(2).stdout, "", "{wrong:?}");
    }
    let none = doctor(&meeting, &["--json"]).env("FAKECUDA_DEVICES", "0").end().code(3).json();
    assert_eq!((&none["devices"], &none["exit_code"]), (&json!([]), &3.into()));
    assert!(none["verdict"].as_str().unwrap().contains("nothing here to test"), "{none}");
    // Another folder for temporary files is found.
    doctor(&meeting, &["--only", "round-trip"]).env("TMPDIR", "/nonexistent").end().code(0);
    // There is no fallback to another backend, even if the environment prefers one.
    let mut auto = meeting.bare("vmmfd").env("VMMFD_BACKEND", "host");
    auto.command.args(["doctor", "--json", "--only", "attributes", "--device", "0"]);
    assert_eq!(auto.end().json()["backend"], "cuda");
}

#[test]
fn shown_report_prints_the_same() {
    let meeting = Meeting::host();
    let made = doctor(&meeting, &["--json", "--device", "0"]).end();
    let file = meeting.folder().join("report.json");
    let show = |text: &str, options: &[&str]| {
        fs::write(&file, text).unwrap();
        let mut run = meeting.bare("vmmfd");
        run.command.args(["doctor", "--show"]).arg(&file).args(options);
        run.end()
    };
    assert_eq!(show(&made.stdout, &["--json"]).code(0).stdout, made.stdout);
    let text = show(&made.stdout, &[]);
    for part in [&DEVICE[..], &[made.json()["verdict"].as_str().unwrap()]].concat() {
        assert!(text.code(0).stdout.contains(part), "{part}");
    }
    // A report with another schema version is refused, and escape sequences are not printed.
    show(&made.stdout.replacen("\"schema\":1", "\"schema\":2", 1), &[]).code(2).says("schema 2");
    let evil = made.stdout.replacen("\"verdict\":\"", "\"verdict\":\"\\u001b[31m", 1);
    assert!(!show(&evil, &[]).code(0).stdout.contains("\u{1b}[31mVMM"));
    fs::File::create(&file).unwrap().set_len(17 << 20).unwrap();
    for wrong in [file.to_str().unwrap(), "/dev/zero", "/proc/version"] {
        doctor(&meeting, &["--show", wrong]).end().code(2).says("is not a report");
    }
}

#[test]
fn gpu_fault_needs_an_option() {
    let meeting = Meeting::fake();
    let stored: [(&[&str], usize); 3] =
        [(&["--faults"], 1), (&["--faults", "--only", "memory"], 1), (&["--faults", "--only", FAULTING], 1)];
    for (options, times) in stored {
        let report = doctor(&meeting, &[&["--json"], options].concat()).end().code(0).json();
        let findings = report["devices"][0]["findings"].as_array().unwrap();
        let stores = findings.iter().filter(|finding| finding["probe"] == FAULTING && finding["status"] == "ok");
        assert_eq!(stores.count(), times, "{options:?}");
    }
    doctor(&meeting, &["--only", FAULTING]).end().code(2).says("add --faults");
}

#[test]
fn report_is_whole_after_any_failure() {
    let slow = |call: &str| ("FAKECUDA_SLOW", format!("{call}:{HANGS}"));
    let fail = |calls: &str| ("FAKECUDA_FAIL", calls.to_owned());
    let optional = "cuMemPoolCreate:1:801,cuMemAlloc_v2:1:2,cuEventCreate:1:2,cuMemGetHandleForAddressRange:1:801";
    let runs = [
        // Fails in every process of every probe.
        (fail("cuMemCreate:1:2"), &["memory"][..], "driver", 1),
        (fail(optional), &["pool", "legacy", "event", "dma-buf"], "driver", 0),
        // In the other process of the probe.
        (slow("cuIpcOpenMemHandle_v2"), &["legacy"], "timeout", 0),
        (slow("cuInit"), &["driver"], "timeout", 1),
    ];
    let runs = runs.map(|((variable, value), broken, kind, code)| {
        let meeting = Meeting::fake();
        let timeout = if kind == "timeout" { "5s" } else { "20s" };
        let run = doctor(&meeting, &["--json", "--timeout", timeout]).env(variable, &value).start();
        (meeting, run, value, broken, kind, code)
    });
    for (meeting, run, value, broken, kind, code) in runs {
        let ended = run.end();
        let report = ended.code(code).json();
        assert_eq!(ended.stderr, "");
        match broken {
            ["driver"] => assert_eq!(probes(&report["machine"]), MACHINE),
            _ => assert_whole(&report),
        }
        for (probe, fault) in broken.iter().zip(value.split(',')) {
            let (found, parts) = (finding(&report, probe), fault.split(':').collect::<Vec<_>>());
            assert!(found["status"] != "ok" && found["error"]["kind"] == kind, "{found}");
            if kind == "driver" {
                assert_eq!(
                    (&found["error"]["call"], found["error"]["code"].to_string()),
                    (&parts[0].into(), parts[2].to_owned())
                );
            }
        }
        assert_gone(&meeting, &[]);
    }
}

/// The calls in the emulated driver's log, which has the line `pid name` for each call.
fn calls(log: &Path) -> Vec<(String, String)> {
    let log = fs::read_to_string(log).unwrap_or_default();
    log.lines().filter_map(|line| line.split_once(' ')).map(|(pid, name)| (pid.to_owned(), name.to_owned())).collect()
}

#[test]
fn exporter_is_gone_before_the_import() {
    let meeting = Meeting::fake();
    let log = meeting.folder().join("calls");
    let run = only(&meeting, "held-descriptor").env("FAKECUDA_LOG", &log);
    let importing = run.env("FAKECUDA_SLOW", format!("cuMemImportFromShareableHandle:{HANGS}")).start();
    let by = |call: &str| calls(&log).into_iter().find(|(_, name)| name == call).map(|(pid, _)| pid);
    wait_for("the import", || by("cuMemImportFromShareableHandle").is_some());
    let alive = |call: &str| fs::exists(format!("/proc/{}", by(call).unwrap())).unwrap();
    assert!(alive("cuMemImportFromShareableHandle") && !alive("cuMemExportToShareableHandle"));
    // The processes of the probe `driver`, of the maker and of the importer: the holder makes no driver call.
    let calls = calls(&log);
    assert_eq!(calls.iter().map(|(pid, _)| pid).collect::<BTreeSet<_>>().len(), 3, "{calls:?}");
    drop(importing);
    // The probe needs a process without the driver.
    let library = meeting.driver_folder().unwrap().join("libcuda.so.1");
    let report = only(&meeting, "held-descriptor").env("LD_PRELOAD", library).end().code(1).json();
    let found = finding(&report, "held-descriptor");
    assert!(found["status"] == "skipped" && found["meaning"].to_string().contains("libcuda.so.1"), "{found}");
}

/// A call that each probe of a device makes, on either side of a probe with two processes, and an error.
#[rustfmt::skip]
const CALLS: [(&str, &str, u32, u32); 19] = [
    ("memory", "cuMemCreate", 1, 2),
    ("round-trip", "cuMemImportFromShareableHandle", 1, 999),
    ("exporter-killed", "cuMemImportFromShareableHandle", 1, 999),
    ("held-descriptor", "cuMemImportFromShareableHandle", 1, 999),
    ("event", "cuIpcOpenEventHandle", 1, 205),
    ("granularity", "cuMemGetAllocationGranularity", 1, 999),
    ("export", "cuMemExportToShareableHandle", 1, 1),
    ("import", "cuMemImportFromShareableHandle", 1, 999),
    ("aliases", "cuMemMap", 2, 999),
    ("read-only-copy", "cuMemSetAccess", 1, 999),
    ("read-only-store", "cuModuleLoadData", 1, 200),
    ("wrong-descriptor", "cuMemCreate", 1, 2),
    ("memory-returned", "cuMemGetInfo_v2", 1, 999),
    ("export-cost", "cuMemExportToShareableHandle", 2, 1),
    ("host-numa", "cuMemCreate", 1, 2),
    ("dma-buf", "cuMemGetHandleForAddressRange", 1, 999),
    ("fabric", "cuMemExportToShareableHandle", 1, 999),
    ("pool", "cuMemPoolCreate", 1, 2),
    ("legacy", "cuIpcOpenMemHandle_v2", 1, 999),
];

/// The error of the only probe. Asserts that the probe and the verdict report a failure.
#[track_caller]
fn error_of(meeting: &Meeting, ended: &Ended, probe: &str) -> Value {
    let report = ended.code(1).json();
    assert_eq!(ended.stderr, "");
    let found = finding(&report, probe);
    assert_eq!(found["status"], "failed", "{found}");
    assert!(report["verdict"].as_str().unwrap().contains(&format!("fails at {probe}")), "{report}");
    assert_gone(meeting, &[]);
    found["error"].clone()
}

#[test]
fn each_probe_fails_alone() {
    let run = |meeting: &Meeting, probe: &str, setting: &str, value: String, timeout: &str| {
        let mut run = only(meeting, probe).env(setting, value);
        run.command.args(["--timeout", timeout]);
        run.start()
    };
    let meeting = Meeting::fake();
    only(&meeting, "fabric").end().code(0);
    for (probe, call, nth, code) in CALLS {
        let ended = run(&meeting, probe, "FAKECUDA_FAIL", format!("{call}:{nth}:{code}"), "20s").end();
        let error = error_of(&meeting, &ended, probe);
        // A failure of the other process arrives as text that contains the code.
        let text = error["message"].as_str().is_some_and(|message| message.contains(&format!("({code})")));
        assert!(error["code"] == code || text, "{error}");
    }
    let ended = run(&meeting, "memory", "FAKECUDA_FAIL", "cuMemUnmap:1:1".to_owned(), "20s").end();
    assert_eq!(error_of(&meeting, &ended, "memory")["kind"], "teardown", "a leak is a failure");
    // The first calls are of probes with one, two and three processes. All that hang wait in parallel.
    let hanging = CALLS[..5].iter().map(|(probe, call, ..)| {
        let meeting = Meeting::fake();
        let running = run(&meeting, probe, "FAKECUDA_SLOW", format!("{call}:{HANGS}"), "3s");
        (meeting, running, probe)
    });
    let hanging: Vec<_> = hanging.collect();
    for (probe, call, ..) in &CALLS[..5] {
        let ended = run(&meeting, probe, "FAKECUDA_ABORT", (*call).to_owned(), "20s").end();
        assert!(!error_of(&meeting, &ended, probe).is_null(), "{probe}");
    }
    for (meeting, running, probe) in hanging {
        error_of(&meeting, &running.end(), probe);
    }
}

#[test]
fn old_driver_fails_only_missing_calls() {
    let meeting = Meeting::fake();
    let report = |copy: Copy, code| {
        copy.write("libcuda.so.1");
        doctor(&meeting, &["--json"]).env("LD_LIBRARY_PATH", copy.folder()).end().code(code).json()
    };
    let lacking = [("cuMemPoolCreate", "pool"), ("cuIpcGetMemHandle", "legacy"), ("cuIpcGetEventHandle", "event")];
    let old = report(lacking.iter().fold(Copy::new(), |copy, (symbol, _)| copy.without(symbol)), 0);
    assert_whole(&old);
    let older = report(Copy::new().without("cuMemCreate"), 1);
    for (report, symbol, probe) in
        lacking.map(|(symbol, probe)| (&old, symbol, probe)).into_iter().chain([(&older, "cuMemCreate", "memory")])
    {
        let found = finding(report, probe);
        assert_eq!((&found["status"], &found["error"]["call"]), (&"unsupported".into(), &symbol.into()), "{found}");
    }
    assert_whole(&doctor(&meeting, &["--json"]).env("FAKECUDA_ATTRIBUTE", "102:0").end().code(1).json());
}

#[test]
fn each_ordered_device_pair_is_tried() {
    let meeting = Meeting::fake();
    // `export-cost` runs last, after every device has been probed.
    let doctor =
        |peers| doctor(&meeting, &["--json", "--only", "memory,export-cost,peer"]).env("FAKECUDA_PEERS", peers);
    for (peers, status, code) in [("1", "ok", 0), ("0", "unsupported", 1)] {
        let report = doctor(peers).env("FAKECUDA_DEVICES", "3").end().code(code).json();
        let devices = report["devices"].as_array().unwrap();
        assert!(devices.iter().map(|device| device["ordinal"].as_u64().unwrap()).eq(0..3), "{report}");
        assert!(devices.iter().all(|device| probes(&device["findings"]) == ["memory", "export-cost"]), "{report}");
        let pairs = report["pairs"].as_array().unwrap();
        let numbers = pairs.iter().map(|pair| (pair["device"].as_u64().unwrap(), pair["owner"].as_u64().unwrap()));
        assert!(numbers.eq([(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]), "{report}");
        for found in pairs.iter().map(|pair| &pair["findings"][0]) {
            assert_eq!((&found["probe"], &found["status"]), (&"peer".into(), &status.into()), "{found}");
            assert_eq!(found["figures"]["claimed"], peers == "1");
            assert_eq!(found["figures"]["read_gb_per_s"].is_f64(), peers == "1");
        }
        assert!(report["verdict"].as_str().unwrap().contains("3 of 3"), "{report}");
    }
    // A wrong claim is a failure, reported with the driver's code.
    let run = only(&meeting, "peer").env("FAKECUDA_DEVICES", "2").env("FAKECUDA_FAIL", "cuMemSetAccess:2:217");
    let found = finding(&run.end().code(1).json(), "peer");
    assert_eq!((&found["status"], &found["error"]["code"]), (&"failed".into(), &217.into()));
    let ended = self::doctor(&meeting, &["--only", "peer"]).end();
    assert!(ended.code(1).stdout.contains("no pair of devices was tried"), "{}", ended.stdout);
}

#[test]
fn stopped_or_killed_doctor_leaves_nothing() {
    for (signal, code) in [(Signal::SIGINT, Some(130)), (Signal::SIGTERM, Some(143)), (Signal::SIGKILL, None)] {
        let meeting = Meeting::fake();
        let log = meeting.folder().join("log");
        let run = only(&meeting, "legacy").env("FAKECUDA_SLOW", format!("cuIpcOpenMemHandle_v2:{HANGS}"));
        let running = run.env("FAKECUDA_LOG", &log).start();
        wait_for("the call that hangs", || calls(&log).iter().any(|(_, name)| name == "cuIpcOpenMemHandle_v2"));
        running.signal(signal);
        assert_eq!(running.end().status.code(), code);
        assert_gone(&meeting, &["log"]);
    }
}
