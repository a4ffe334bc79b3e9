//! `vmmfd doctor` as a user runs it: the report is complete after any failure, and its verdict is correct.
//!
//! One file of more than 500 lines: its tests share the machines that they describe to the doctor.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::{fs::PermissionsExt, process::CommandExt},
    thread,
    time::Duration,
};

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::{
    running::{Ended, HANGS, Meeting, Run, wait_for},
    support::Copy,
};

cases! {
    on crate::running::Meeting; every backend: [
    clean_report_is_complete,
    chosen_probes_alone_are_run,
    shown_report_prints_the_same,
    both_ends_report_the_same,
    ]
}

/// This probe causes a GPU fault, so it runs only on request.
const FAULTING: &str = "read-only-store";

/// The other probes of a machine and of a device, in order.
const MACHINE: [&str; 4] = ["driver", "descriptors", "host-memory", "broker"];
const DEVICE: [&str; 20] = [
    "attributes",
    "granularity",
    "memory",
    "export",
    "import",
    "round-trip",
    "aliases",
    "read-only-copy",
    "wrong-descriptor",
    "exporter-killed",
    "memory-returned",
    "held-descriptor",
    "persistence",
    "export-cost",
    "host-numa",
    "dma-buf",
    "fabric",
    "pool",
    "legacy",
    "event",
];

fn doctor(meeting: &Meeting, options: &[&str]) -> Run {
    let mut run = meeting.bare("vmmfd");
    run.command.args(["doctor", "--backend", meeting.backend()]).args(options);
    run.command.env("TMPDIR", meeting.folder()).env("XDG_RUNTIME_DIR", meeting.folder());
    // The free memory of the whole machine changes between runs.
    if meeting.is_fake() { run.env("FAKECUDA_FREE", "1073741824") } else { run }
}

/// The calls in the emulated driver's log, which has the line `pid name` for each call.
fn calls(log: &std::path::Path) -> Vec<(String, String)> {
    let log = fs::read_to_string(log).unwrap();
    log.lines().filter_map(|line| line.split_once(' ')).map(|(pid, name)| (pid.to_owned(), name.to_owned())).collect()
}

fn probes(findings: &Value) -> Vec<&str> {
    findings.as_array().unwrap().iter().map(|finding| finding["probe"].as_str().unwrap()).collect()
}

#[track_caller]
fn finding<'a>(findings: &'a Value, probe: &str) -> &'a Value {
    findings.as_array().unwrap().iter().find(|finding| finding["probe"] == probe).unwrap()
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
        assert!(!finding["meaning"].as_str().unwrap().is_empty());
        assert_eq!(
            finding["status"] == "ok" || finding["status"] == "skipped",
            finding["error"].is_null(),
            "{finding}"
        );
    }
}

fn clean_report_is_complete(meeting: Meeting) {
    let ended = doctor(&meeting, &["--json", "--device", "0"]).end();
    assert_eq!(ended.code(0).stderr, "");
    let report = ended.json();
    assert_whole(&report);
    assert_eq!(report["exit_code"], 0);
    assert_eq!(report["backend"], meeting.backend());
    let required = ["driver", "memory", "export", "import", "round-trip"];
    assert_eq!(report["required"], serde_json::json!(required));
    let findings = &report["devices"][0]["findings"];
    for finding in findings.as_array().unwrap() {
        assert_ne!(finding["status"], "failed", "{finding}");
    }
    for probe in &required[1..] {
        assert_eq!(finding(findings, probe)["status"], "ok");
        assert!(finding(findings, probe)["us"].as_u64().unwrap() > 0);
    }
    assert!(finding(findings, "export")["figures"]["descriptor"].is_string());
    if meeting.is_fake() {
        for probe in ["memory-returned", "held-descriptor", "dma-buf", "pool", "legacy", "event"] {
            assert_eq!(finding(findings, probe)["status"], "ok", "{}", finding(findings, probe));
        }
        assert_eq!(finding(findings, "fabric")["error"]["code"], 800);
    }
    assert!(report["verdict"].as_str().unwrap().starts_with("VMM fd sharing works on 1 of 1 "), "{report}");
    assert_gone(&meeting, &[]);

    // The verdict is also the last line of the text report.
    let text = doctor(&meeting, &["--device", "0"]).end();
    assert!(text.code(0).stdout.lines().last().unwrap().contains("VMM fd sharing works on 1 of 1 "), "{}", text.stdout);
    let first = text.stdout.lines().next().unwrap();
    assert_eq!(first.to_lowercase().contains("no gpu is being tested"), meeting.backend() == "host", "{first}");
    assert_gone(&meeting, &[]);
}

fn chosen_probes_alone_are_run(meeting: Meeting) {
    let report = doctor(&meeting, &["--json", "--device", "0", "--only", "export,granularity"]).end().json();
    // In their own order.
    assert_eq!(probes(&report["devices"][0]["findings"]), ["granularity", "export"]);
    // Only the driver probe is needed to find the devices.
    assert_eq!(probes(&report["machine"]), ["driver"]);
    assert_eq!(report["required"], serde_json::json!(["driver", "granularity", "export"]), "what is named is required");
    assert!(report["verdict"].as_str().unwrap().starts_with("The required probes succeed on 1 of 1 "), "{report}");
    let list = doctor(&meeting, &["--list"]).end();
    let names: Vec<&str> = list.code(0).stdout.lines().filter_map(|line| line.split_whitespace().next()).collect();
    let mut all = [&MACHINE[..], &DEVICE[..], &["peer"]].concat();
    all.insert(MACHINE.len() + DEVICE.iter().position(|probe| *probe == "wrong-descriptor").unwrap(), FAULTING);
    assert_eq!(names, all);
    assert!(list.stdout.lines().any(|line| line.starts_with(FAULTING) && line.ends_with(" (only with --faults)")));
    let listed = doctor(&meeting, &["--list", "--json"]).end().code(0).json();
    let faults = |probe: &&Value| probe["faults"] == true;
    let faulting: Vec<&Value> = listed["probes"].as_array().unwrap().iter().filter(faults).collect();
    assert!(matches!(faulting[..], [probe] if probe["name"] == FAULTING), "{listed}");
    let missing = doctor(&meeting, &["--device", "99"]).end();
    assert_eq!(missing.code(3).says("device 99").stdout, "");
    let wrong: [&[&str]; 6] = [
        &["--only", "everything"],
        &["--device", "none"],
        &["--timeout", "5"],
        &["--show", "/nonexistent"],
        &["--show", "/proc/version"],
        &["serve"],
    ];
    for options in wrong {
        let ended = doctor(&meeting, options).end();
        assert_eq!(ended.code(2).stdout, "", "{options:?}");
        assert!(!ended.stderr.is_empty());
    }
    // There is no fallback to another backend, even if the environment prefers one.
    let mut auto = meeting.bare("vmmfd").env("VMMFD_BACKEND", "host");
    auto.command.args(["doctor", "--json", "--only", "attributes", "--device", "0"]);
    assert_eq!(auto.end().json()["backend"], "cuda");
}

fn shown_report_prints_the_same(meeting: Meeting) {
    let made = doctor(&meeting, &["--json", "--device", "0"]).end();
    let file = meeting.folder().join("report.json");
    fs::write(&file, &made.stdout).unwrap();
    let file = file.to_str().unwrap();
    let show = |options: &[&str]| {
        let mut run = meeting.bare("vmmfd");
        run.command.args(["doctor", "--show", file]).args(options);
        run.end()
    };
    assert_eq!(show(&["--json"]).code(0).stdout, made.stdout);
    let text = show(&[]);
    let verdict = made.json()["verdict"].as_str().unwrap().to_owned();
    assert!(text.code(0).stdout.contains(&verdict));
    for probe in DEVICE {
        assert!(text.stdout.contains(probe), "{probe}");
    }
    // A report with another schema version is refused, and escape sequences are not printed.
    let changed = |from: &str, to: &str| fs::write(file, made.stdout.replacen(from, to, 1)).unwrap();
    changed("\"schema\":1", "\"schema\":2");
    show(&[]).code(2).says("schema 2");
    changed("\"verdict\":\"", "\"verdict\":\"\\u001b[31m");
    assert!(!show(&[]).code(0).stdout.contains("\u{1b}[31mVMM"));
}

fn meet(meeting: &Meeting, part: &str, options: &[&str]) -> Run {
    let mut run = meeting.bare("vmmfd");
    run.command.args(["doctor", part, "--backend", meeting.backend(), "--socket"]).arg(meeting.socket()).args(options);
    run
}

#[track_caller]
fn assert_met(serve: &Ended, join: &Ended) {
    let (serve, join) = (serve.code(0).json(), join.code(0).json());
    for report in [&serve, &join] {
        assert_eq!(probes(&report["devices"][0]["findings"]), ["round-trip", "host-numa", "pool", "legacy", "event"]);
        assert_eq!(finding(&report["devices"][0]["findings"], "round-trip")["status"], "ok");
        assert!(report["peer"].is_object() && report["environment"].is_object());
    }
    assert_eq!(serve["devices"], join["devices"]);
    assert_eq!(serve["verdict"], join["verdict"]);
}

fn both_ends_report_the_same(meeting: Meeting) {
    let serve = meet(&meeting, "serve", &["--json"]).start();
    wait_for("the socket", || meeting.socket().exists());
    let join = meet(&meeting, "join", &["--json"]).end();
    let serve = serve.end();
    assert_met(&serve, &join);
    let both = finding(&serve.json()["devices"][0]["findings"], "round-trip").clone();
    assert_eq!(both["figures"]["back"], "verified", "{both}");
    assert!(meeting.files().is_empty(), "{:?}", meeting.files());
}

#[test]
fn gpu_fault_needs_an_option() {
    let meeting = Meeting::fake();
    let stores = |options: &[&str]| {
        let report = doctor(&meeting, &[&["--json"], options].concat()).end().code(0).json();
        let findings = report["devices"][0]["findings"].as_array().unwrap().clone();
        findings.iter().filter(|finding| finding["probe"] == FAULTING).map(|found| found["status"].clone()).collect()
    };
    let stored: Vec<Value> = stores(&[]);
    assert!(stored.is_empty(), "{stored:?}");
    assert_eq!(stores(&["--faults"]), ["ok"]);
    assert_eq!(stores(&["--faults", "--only", "memory"]), ["ok"]);
    assert_eq!(stores(&["--faults", "--only", FAULTING]), ["ok"]);
    doctor(&meeting, &["--only", FAULTING]).end().code(2).says("add --faults");
}

#[test]
fn dead_end_leaves_a_complete_report() {
    let meeting = Meeting::fake();
    let serve = meet(&meeting, "serve", &["--json", "--timeout", "5s"]).start();
    wait_for("the socket", || meeting.socket().exists());
    let slow =
        meet(&meeting, "join", &[]).env("FAKECUDA_SLOW", format!("cuMemImportFromShareableHandle:{HANGS}")).start();
    // The other doctor has connected, and this one hangs in its driver.
    wait_for("the meeting", || !meeting.socket().exists());
    thread::sleep(Duration::from_millis(500));
    slow.signal(Signal::SIGKILL);
    let serve = serve.end();
    let report = serve.code(1).json();
    assert_eq!(probes(&report["devices"][0]["findings"]), ["round-trip", "host-numa", "pool", "legacy", "event"]);
    assert_eq!(finding(&report["devices"][0]["findings"], "round-trip")["status"], "failed");
}

/// Failing calls for one run, the affected probes, and the exit code.
const FAULTS: [(&str, &[&str], i32); 3] = [
    // Fails in every process of every probe.
    ("cuMemGetAllocationGranularity:1:999", &["granularity"], 1),
    ("cuMemCreate:1:2", &["memory"], 1),
    (
        "cuMemPoolCreate:1:801,cuMemAlloc_v2:1:2,cuEventCreate:1:2,cuMemGetHandleForAddressRange:1:801",
        &["pool", "legacy", "event", "dma-buf"],
        0,
    ),
];

#[test]
fn report_of_failed_calls_is_whole() {
    let meeting = Meeting::fake();
    for (faults, probes, code) in FAULTS {
        let ended = doctor(&meeting, &["--json"]).env("FAKECUDA_FAIL", faults).end();
        let report = ended.code(code).json();
        assert_whole(&report);
        for (fault, probe) in faults.split(',').zip(probes) {
            let parts: Vec<&str> = fault.split(':').collect();
            let found = finding(&report["devices"][0]["findings"], probe);
            assert_ne!(found["status"], "ok", "{found}");
            assert_eq!((&found["error"]["kind"], &found["error"]["call"]), (&"driver".into(), &parts[0].into()));
            assert_eq!(found["error"]["code"].to_string(), parts[2], "{found}");
        }
        assert_eq!(ended.stderr, "");
        assert_gone(&meeting, &[]);
    }
}

#[test]
fn report_survives_hanging_and_crashing_probes() {
    let slow = |call: &str| ("FAKECUDA_SLOW", format!("{call}:{HANGS}"));
    let runs = [
        // In the other process of the probe.
        (slow("cuIpcOpenMemHandle_v2"), "legacy", "timeout", 0),
        (("FAKECUDA_ABORT", "cuMemcpyDtoH_v2".to_owned()), "memory", "signal", 1),
        (slow("cuInit"), "driver", "timeout", 1),
        (("FAKECUDA_ABORT", "cuInit".to_owned()), "driver", "signal", 1),
    ];
    let runs = runs.map(|((variable, value), probe, kind, code)| {
        let meeting = Meeting::fake();
        let run = doctor(&meeting, &["--json", "--timeout", "10s"]).env(variable, value).start();
        (meeting, run, probe, kind, code)
    });
    for (meeting, run, probe, kind, code) in runs {
        let ended = run.end();
        let report = ended.code(code).json();
        let findings = if probe == "driver" {
            assert_eq!(probes(&report["machine"]), MACHINE);
            &report["machine"]
        } else {
            assert_whole(&report);
            &report["devices"][0]["findings"]
        };
        let found = finding(findings, probe);
        assert_eq!((&found["status"], &found["error"]["kind"]), (&"failed".into(), &kind.into()), "{found}");
        assert_eq!(ended.stderr, "");
        assert_gone(&meeting, &[]);
    }
}

#[test]
fn import_works_after_the_exporter_died() {
    let meeting = Meeting::fake();
    let log = meeting.folder().join("calls");
    let run = doctor(&meeting, &["--only", "held-descriptor", "--timeout", "10m"]);
    let slow = format!("cuMemImportFromShareableHandle:{HANGS}");
    let importing = run.env("FAKECUDA_LOG", &log).env("FAKECUDA_SLOW", slow).start();
    let by = |call: &str| calls(&log).into_iter().find(|(_, name)| name == call).map(|(pid, _)| pid);
    wait_for("the import", || log.exists() && by("cuMemImportFromShareableHandle").is_some());
    let alive = |pid: &str| fs::exists(format!("/proc/{pid}")).unwrap();
    assert!(alive(&by("cuMemImportFromShareableHandle").unwrap()));
    assert!(!alive(&by("cuMemExportToShareableHandle").unwrap()));
    drop(importing);
    wait_for("the end of all processes", || meeting.processes().is_empty());
}

#[test]
fn descriptor_holder_makes_no_driver_call() {
    let meeting = Meeting::fake();
    let log = meeting.folder().join("calls");
    let held = |run: Run| {
        let ended = run.end();
        let found = finding(&ended.json()["devices"][0]["findings"], "held-descriptor").clone();
        (ended, found)
    };
    let (ended, found) = held(only(&meeting, "held-descriptor").env("FAKECUDA_LOG", &log));
    ended.code(0);
    assert_eq!(found["status"], "ok", "{found}");
    let calls = calls(&log);
    let by = |call: &str| {
        let pids: Vec<&String> = calls.iter().filter(|(_, name)| name == call).map(|(pid, _)| pid).collect();
        assert_eq!(pids.len(), 1, "{call}: {calls:?}");
        pids[0]
    };
    let (maker, importer) = (by("cuMemExportToShareableHandle"), by("cuMemImportFromShareableHandle"));
    assert_ne!(maker, importer);
    // The third process belongs to the probe `driver`. The process that held the descriptor made no call.
    assert_eq!(calls.iter().map(|(pid, _)| pid).collect::<BTreeSet<_>>().len(), 3, "{calls:?}");
    assert!(!calls.iter().any(|(pid, name)| pid == maker && name == "cuMemRelease"), "it was killed with its memory");
    fs::remove_file(&log).unwrap();
    // The probe needs a process without the driver.
    let library = meeting.folder().join("libcuda.so.1");
    let copy = Copy::new();
    copy.write("libcuda.so.1");
    fs::copy(copy.folder().join("libcuda.so.1"), &library).unwrap();
    let (ended, found) = held(only(&meeting, "held-descriptor").env("LD_PRELOAD", &library));
    assert_eq!(found["status"], "skipped", "{found}");
    assert!(found["meaning"].as_str().unwrap().contains("libcuda.so.1"), "{found}");
    ended.code(1);
}

/// A call that each probe of a device makes. The call fails, hangs or kills its process; in a probe of two processes, on either side.
const CALLS: [(&str, &str, u32, u32); 19] = [
    ("granularity", "cuMemGetAllocationGranularity", 1, 999),
    ("memory", "cuMemCreate", 1, 2),
    ("export", "cuMemExportToShareableHandle", 1, 1),
    ("import", "cuMemImportFromShareableHandle", 1, 999),
    ("round-trip", "cuMemImportFromShareableHandle", 1, 999),
    ("aliases", "cuMemMap", 2, 999),
    ("read-only-copy", "cuMemSetAccess", 1, 999),
    ("read-only-store", "cuModuleLoadData", 1, 200),
    ("wrong-descriptor", "cuMemCreate", 1, 2),
    ("exporter-killed", "cuMemImportFromShareableHandle", 1, 999),
    ("memory-returned", "cuMemGetInfo_v2", 1, 999),
    ("held-descriptor", "cuMemImportFromShareableHandle", 1, 999),
    ("export-cost", "cuMemExportToShareableHandle", 2, 1),
    ("host-numa", "cuMemCreate", 1, 2),
    ("dma-buf", "cuMemGetHandleForAddressRange", 1, 999),
    ("fabric", "cuMemExportToShareableHandle", 1, 999),
    ("pool", "cuMemPoolCreate", 1, 2),
    ("legacy", "cuIpcOpenMemHandle_v2", 1, 999),
    ("event", "cuIpcOpenEventHandle", 1, 205),
];

fn only(meeting: &Meeting, probe: &str) -> Run {
    only_within(meeting, probe, "20s")
}

fn only_within(meeting: &Meeting, probe: &str, timeout: &str) -> Run {
    let faults: &[&str] = if probe == FAULTING { &["--faults"] } else { &[] };
    let options = [&["--json", "--timeout", timeout, "--only", probe][..], faults].concat();
    doctor(meeting, &options).env("FAKECUDA_FABRIC", "1")
}

/// The finding of the only probe. Asserts that the probe and the verdict report a failure.
#[track_caller]
fn of_one(meeting: &Meeting, ended: &Ended, probe: &str) -> Value {
    let report = ended.code(1).json();
    assert_eq!(ended.stderr, "");
    let found = finding(&report["devices"][0]["findings"], probe).clone();
    assert_eq!(found["status"], "failed", "{found}");
    assert!(report["verdict"].as_str().unwrap().contains(&format!("fails at {probe}")), "{report}");
    assert_gone(meeting, &[]);
    found
}

/// Further calls of the probes.
const MORE_CALLS: [(&str, &str, u32, u32); 8] = [
    ("memory", "cuMemAddressReserve", 1, 2),
    ("memory", "cuMemMap", 1, 999),
    ("memory", "cuMemSetAccess", 1, 1),
    ("memory", "cuMemcpyHtoD_v2", 1, 700),
    ("legacy", "cuMemAlloc_v2", 1, 2),
    ("legacy", "cuIpcGetMemHandle", 1, 999),
    ("event", "cuEventCreate", 1, 2),
    ("event", "cuIpcGetEventHandle", 1, 205),
];

#[test]
fn each_probe_fails_with_its_call() {
    let meeting = Meeting::fake();
    only(&meeting, "fabric").end().code(0);
    for (probe, call, nth, code) in CALLS.into_iter().chain(MORE_CALLS) {
        let run = only(&meeting, probe).env("FAKECUDA_FAIL", format!("{call}:{nth}:{code}"));
        let found = of_one(&meeting, &run.end(), probe);
        // A failure of the other process arrives as text that contains the code.
        let error = &found["error"];
        let told = error["message"].as_str().is_some_and(|message| message.contains(&format!("({code})")));
        assert!(error["code"] == code || told, "{found}");
    }
}

#[test]
fn each_hanging_probe_is_killed() {
    for calls in CALLS.chunks(5) {
        let running = calls.iter().map(|(probe, call, ..)| {
            let meeting = Meeting::fake();
            let run = only_within(&meeting, probe, "3s").env("FAKECUDA_SLOW", format!("{call}:{HANGS}")).start();
            (meeting, run, probe)
        });
        // All probes wait in parallel.
        for (meeting, run, probe) in running.collect::<Vec<_>>() {
            of_one(&meeting, &run.end(), probe);
        }
    }
}

#[test]
fn each_probe_may_crash() {
    let meeting = Meeting::fake();
    for (probe, call, ..) in CALLS {
        let found = of_one(&meeting, &only(&meeting, probe).env("FAKECUDA_ABORT", call).end(), probe);
        assert!(!found["error"].is_null(), "{found}");
    }
}

#[test]
fn leaks_are_detected() {
    let meeting = Meeting::fake();
    let ended = only(&meeting, "memory").env("FAKECUDA_FAIL", "cuMemUnmap:1:1").end();
    let found = of_one(&meeting, &ended, "memory");
    assert_eq!(found["error"]["kind"], "teardown", "{found}");
}

#[test]
fn finds_folder_without_temporary_files() {
    let meeting = Meeting::host();
    doctor(&meeting, &["--only", "round-trip"]).env("TMPDIR", "/nonexistent").end().code(0);
    let large = meeting.folder().join("large");
    fs::File::create(&large).unwrap().set_len(17 << 20).unwrap();
    doctor(&meeting, &["--show", large.to_str().unwrap()]).end().code(2).says("is not a report");
    doctor(&meeting, &["--show", "/dev/zero"]).end().code(2).says("is not a report");
}

#[test]
fn missing_requested_pair_fails() {
    let ended = doctor(&Meeting::fake(), &["--only", "peer"]).end();
    ended.code(1);
    assert!(ended.stdout.contains("no pair of devices was tried"), "{}", ended.stdout);
}

#[test]
fn nothing_to_test_is_no_failure() {
    let meeting = Meeting::fake();
    let none = doctor(&meeting, &["--json"]).env("FAKECUDA_DEVICES", "0").end().code(3).json();
    assert_eq!((&none["devices"], &none["exit_code"]), (&serde_json::json!([]), &3.into()));
    assert!(none["verdict"].as_str().unwrap().contains("nothing here to test"), "{none}");
    let mut run = Meeting::host().bare("vmmfd");
    run.command.args(["doctor"]).env("LD_LIBRARY_PATH", "/nonexistent");
    // Only on a machine without a driver.
    if !fs::exists("/dev/nvidiactl").unwrap() {
        assert!(run.end().code(3).stdout.contains("nothing here to test"));
    }
    let broken = doctor(&meeting, &["--json"]).env("FAKECUDA_FAIL", "cuInit:1:999").end().code(1).json();
    assert_eq!(finding(&broken["machine"], "driver")["error"]["code"], 999);
}

fn with_copy(meeting: &Meeting, copy: &Copy, options: &[&str]) -> Run {
    copy.write("libcuda.so.1");
    doctor(meeting, options).env("LD_LIBRARY_PATH", copy.folder())
}

#[test]
fn old_driver_fails_only_missing_calls() {
    let meeting = Meeting::fake();
    let lacking = [("cuMemPoolCreate", "pool"), ("cuIpcGetMemHandle", "legacy"), ("cuIpcGetEventHandle", "event")];
    let copy = lacking.iter().fold(Copy::new(), |copy, (symbol, _)| copy.without(symbol));
    let report = with_copy(&meeting, &copy, &["--json"]).end().code(0).json();
    assert_whole(&report);
    for (symbol, probe) in lacking {
        let found = finding(&report["devices"][0]["findings"], probe);
        assert_eq!(found["status"], "unsupported", "{found}");
        assert!(found["error"]["message"].as_str().unwrap().contains(symbol));
    }
    let copy = Copy::new().without("cuMemCreate");
    let report = with_copy(&meeting, &copy, &["--json"]).end().code(1).json();
    let found = finding(&report["devices"][0]["findings"], "memory");
    assert_eq!((&found["status"], &found["error"]["call"]), (&"unsupported".into(), &"cuMemCreate".into()), "{found}");
    let ended = doctor(&meeting, &["--json"]).env("FAKECUDA_ATTRIBUTE", "102:0").end();
    assert_whole(&ended.code(1).json());
}

#[test]
fn each_ordered_device_pair_is_tried() {
    let meeting = Meeting::fake();
    for (peers, status) in [("1", "ok"), ("0", "unsupported")] {
        let run = doctor(&meeting, &["--json"]).env("FAKECUDA_DEVICES", "2").env("FAKECUDA_PEERS", peers);
        let report = run.end().code(0).json();
        assert_eq!(report["devices"].as_array().unwrap().len(), 2);
        let pairs: Vec<(i64, i64)> = report["pairs"]
            .as_array()
            .unwrap()
            .iter()
            .map(|pair| (pair["device"].as_i64().unwrap(), pair["owner"].as_i64().unwrap()))
            .collect();
        assert_eq!(pairs, [(0, 1), (1, 0)]);
        for pair in report["pairs"].as_array().unwrap() {
            let found = finding(&pair["findings"], "peer");
            assert_eq!(found["status"], status, "{found}");
            assert_eq!(found["figures"]["claimed"], peers == "1");
            assert_eq!(found["figures"]["read_gb_per_s"].is_f64(), peers == "1");
        }
        assert!(report["verdict"].as_str().unwrap().starts_with("VMM fd sharing works on 2 of 2 GPUs"), "{report}");
    }
    // A wrong claim is a failure, reported with the driver's code.
    let run = doctor(&meeting, &["--json", "--only", "peer"]).env("FAKECUDA_DEVICES", "2");
    let report = run.env("FAKECUDA_FAIL", "cuMemSetAccess:2:217").end().json();
    assert_eq!(report["pairs"][0]["findings"][0]["status"], "failed", "{report}");
    assert_eq!(report["pairs"][0]["findings"][0]["error"]["code"], 217);
}

#[test]
fn stopped_or_killed_doctor_leaves_nothing() {
    for (signal, code) in [(Signal::SIGINT, Some(130)), (Signal::SIGTERM, Some(143)), (Signal::SIGKILL, None)] {
        let meeting = Meeting::fake();
        let log = meeting.folder().join("log");
        let run = doctor(&meeting, &[])
            .env("FAKECUDA_SLOW", format!("cuIpcOpenMemHandle_v2:{HANGS}"))
            .env("FAKECUDA_LOG", &log);
        let running = run.start();
        let reached = || fs::read_to_string(&log).unwrap_or_default().contains("cuIpcOpenMemHandle_v2");
        wait_for("the call that hangs", reached);
        running.signal(signal);
        assert_eq!(running.end().status.code(), code);
        assert_gone(&meeting, &["log"]);
    }
}

mod namespaces {
    use super::*;

    #[test]
    #[ignore = "needs the right to make namespaces: make test-all runs it where there is"]
    fn ends_in_different_namespaces_meet() {
        for kinds in [&["--pid", "--fork", "--mount-proc"][..], &["--ipc", "--uts", "--net"]] {
            let meeting = Meeting::host();
            let serve = meet(&meeting, "serve", &["--json", "--allow-uid", "65534"]).start();
            wait_for("the socket", || meeting.socket().exists());
            let inner = meet(&meeting, "join", &["--json", "--allow-uid", "65534"]);
            let mut command = std::process::Command::new("unshare");
            command.args(["--user", "--map-root-user"]).args(kinds);
            command.arg(inner.command.get_program()).args(inner.command.get_args());
            let join = inner.instead(command).end();
            assert_met(&serve.end(), &join);
        }
    }
}

mod root {
    use super::*;

    const OTHER: u32 = 12345;

    #[test]
    #[ignore = "needs root: make test-all runs it as root"]
    fn different_users_meet_if_both_allow() {
        assert!(nix::unistd::geteuid().is_root(), "these tests change users: run them as root");
        let mut meeting = Meeting::host();
        fs::set_permissions(meeting.folder(), PermissionsExt::from_mode(0o777)).unwrap();
        meeting.copy_binaries();
        let as_other = |mut run: Run| {
            run.command.uid(OTHER).gid(OTHER);
            run
        };
        let serve = meet(&meeting, "serve", &["--json", "--allow-uid", "12345"]).start();
        wait_for("the socket", || meeting.socket().exists());
        let join = as_other(meet(&meeting, "join", &["--json"])).end();
        // The socket of the other user admits only that user and root.
        assert_met(&serve.end(), &join);

        let serve = meet(&meeting, "serve", &["--json", "--allow-uid", "54321", "--wait", "3s"]).start();
        wait_for("the socket", || meeting.socket().exists());
        as_other(meet(&meeting, "join", &[])).end().code(4).says("12345");
        serve.end().code(4);
    }
}
