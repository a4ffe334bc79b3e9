//! `vmmfd doctor` as a user runs it: the report is complete after any failure, its verdict is correct, and it explains the failure.

use vmmfd_cli::doctor::rules::rules;

use crate::support::prelude::*;

cases! {
    on crate::running::Meeting; every backend: [
    clean_report_is_complete,
    ]
}

/// This probe causes a GPU fault, so it runs only on request.
const FAULTING: &str = "read-only-store";

/// The other probes of a machine and of a device, in order.
const MACHINE: [&str; 4] = ["driver", "descriptors", "host-memory", "broker"];
#[rustfmt::skip]
const DEVICE: [&str; 21] = [
    "attributes", "granularity", "memory", "export", "import", "round-trip", "aliases", "read-only-copy", "wrong-descriptor",
    "exporter-killed", "memory-returned", "held-descriptor", "persistence", "checkpoint", "host-numa", "dma-buf", "fabric",
    "pool", "legacy", "event", "order",
];

const FAIL: &str = "FAKECUDA_FAIL";
const SLOW: &str = "FAKECUDA_SLOW";
const ABORT: &str = "FAKECUDA_ABORT";
const DEVICES: &str = "FAKECUDA_DEVICES";
const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";

pub(crate) fn doctor(meeting: &Meeting, options: &[&str]) -> Run {
    let mut run = meeting.bare("vmmfd");
    run.command.args(["doctor", "--backend", meeting.backend()]).args(options);
    run.command.env("TMPDIR", meeting.folder()).env("XDG_RUNTIME_DIR", meeting.folder());
    run.command.env_remove(VISIBLE).env_remove("CUDA_MPS_PIPE_DIRECTORY");
    // The free memory of the whole machine changes between runs.
    if meeting.is_fake() { run.env("FAKECUDA_FREE", "1073741824") } else { run }
}

/// The doctor with some probes, with settings of the emulated driver and of the environment.
fn only(meeting: &Meeting, probes: &str, settings: Settings<'_>) -> Run {
    let faults: &[&str] = if probes.contains(FAULTING) { &["--faults"] } else { &[] };
    let mut run = doctor(meeting, &[&["--json", "--only", probes], faults].concat()).env("FAKECUDA_FABRIC", "1");
    run.command.envs(settings.iter().copied());
    run
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
    let made = doctor(&meeting, &["--json", "--device", "0"]).end();
    assert_eq!(made.code(0).stderr, "");
    let report = made.json();
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
    assert_gone(&meeting, &[]);
    let file = meeting.folder().join("report.json");
    fs::write(&file, &made.stdout).unwrap();
    let show = |options: &[&str]| doctor(&meeting, &[&["--show", file.to_str().unwrap()], options].concat()).end();
    assert_eq!(show(&["--json"]).code(0).stdout, made.stdout);
    let text = show(&[]);
    let lines: Vec<&str> = text.code(0).stdout.lines().collect();
    assert!(DEVICE.iter().all(|probe| text.stdout.contains(probe)), "{}", text.stdout);
    assert_eq!(lines[0].contains("NO GPU IS BEING TESTED"), meeting.backend() == "host", "{}", lines[0]);
    // The verdict is also the last line of the text.
    for verdict in [report["verdict"].as_str().unwrap(), lines[lines.len() - 1]] {
        assert!(verdict.starts_with("VMM fd sharing works on 1 of 1 "), "{verdict}");
    }
}

#[test]
fn chosen_probes_alone_are_run() {
    let meeting = Meeting::fake();
    let report = only(&meeting, "export,granularity", &[]).end().json();
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
    // The probe that provokes a fault needs its own option.
    for (options, times) in [(&["--faults", "--only", "memory"][..], 1), (&["--only", "memory"], 0)] {
        let report = doctor(&meeting, &[&["--json"], options].concat()).end().code(0).json();
        let findings = report["devices"][0]["findings"].as_array().unwrap();
        let stores = findings.iter().filter(|finding| finding["probe"] == FAULTING && finding["status"] == "ok");
        assert_eq!(stores.count(), times, "{options:?}");
    }
    doctor(&meeting, &["--only", FAULTING]).end().code(2).says("add --faults");
    for wrong in [["--device", "none"], ["--timeout", "5"]] {
        assert_eq!(doctor(&meeting, &wrong).end().code(2).stdout, "", "{wrong:?}");
    }
    let none = doctor(&meeting, &["--json", "--only", "driver"]).env(DEVICES, "0").end().code(3).json();
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
fn other_reports_are_not_shown() {
    let meeting = Meeting::host();
    let made = doctor(&meeting, &["--json", "--only", "driver"]).end().code(0).stdout.clone();
    let file = meeting.folder().join("report.json");
    let show = |text: &str| {
        fs::write(&file, text).unwrap();
        doctor(&meeting, &["--show", file.to_str().unwrap()]).end()
    };
    show(&made.replacen("\"schema\":1", "\"schema\":2", 1)).code(2).says("schema 2");
    // Escape sequences are not printed.
    let evil = made.replacen("\"verdict\":\"", "\"verdict\":\"\\u001b[31m", 1);
    assert!(!show(&evil).code(0).stdout.contains("\u{1b}[31mThe"));
    File::create(&file).unwrap().set_len(17 << 20).unwrap();
    for wrong in [file.to_str().unwrap(), "/dev/zero", "/proc/version"] {
        doctor(&meeting, &["--show", wrong]).end().code(2).says("is not a report");
    }
}

#[test]
fn report_is_whole_after_any_failure() {
    let meeting = Meeting::fake();
    // `legacy` hangs in the other process of the probe.
    let fails = [
        ("pool", "cuMemPoolCreate", 801),
        ("event", "cuEventCreate", 2),
        ("dma-buf", "cuMemGetHandleForAddressRange", 801),
    ];
    let settings = fails.map(|(_, call, code)| format!("{call}:1:{code}")).join(",");
    let run = doctor(&meeting, &["--json", "--timeout", "5s"]).env(FAIL, settings);
    let ended = run.env(SLOW, format!("cuIpcOpenMemHandle_v2:{HANGS}")).end();
    let report = ended.code(0).json();
    assert_eq!(ended.stderr, "");
    assert_whole(&report);
    for (probe, call, code) in fails {
        let found = finding(&report, probe);
        let error = &found["error"];
        assert_ne!(found["status"], "ok", "{found}");
        assert_eq!((&error["kind"], &error["call"], &error["code"]), (&"driver".into(), &call.into(), &code.into()));
    }
    assert_eq!(finding(&report, "legacy")["error"]["kind"], "timeout", "{report}");
    assert_gone(&meeting, &[]);
}

/// The calls in the emulated driver's log, which has the line `pid name` for each call.
fn calls(log: &Path) -> Vec<(String, String)> {
    let log = fs::read_to_string(log).unwrap_or_default();
    log.lines().filter_map(|line| line.split_once(' ')).map(|(pid, name)| (pid.to_owned(), name.to_owned())).collect()
}

/// Probes that fail in one run, the calls that fail on either side, and their error.
#[rustfmt::skip]
const FAILURES: [(&str, &str, u32); 6] = [
    ("granularity,aliases,read-only-copy", "cuMemGetAllocationGranularity:1 cuMemMap:2 cuMemSetAccess:2", 999),
    ("memory,wrong-descriptor,host-numa", "cuMemCreate:1 cuMemCreate:2 cuMemCreate:3", 2),
    ("export,fabric", "cuMemExportToShareableHandle:1 cuMemExportToShareableHandle:2", 1),
    ("import,round-trip,exporter-killed,held-descriptor", "cuMemImportFromShareableHandle:1", 999),
    ("read-only-store,memory-returned,dma-buf", "cuModuleLoadData:1 cuMemGetInfo_v2:1 cuMemGetHandleForAddressRange:1", 999),
    ("pool,legacy,event", "cuMemPoolCreate:1 cuIpcOpenMemHandle_v2:1 cuIpcOpenEventHandle:1", 205),
];

/// Probes with one, two and three processes, and a call of each.
const ENDINGS: [(&str, &str); 3] = [
    ("memory", "cuMemCreate"),
    ("event", "cuIpcOpenEventHandle"),
    ("held-descriptor", "cuMemImportFromShareableHandle"),
];

/// Returns the errors of the probes. Asserts that all of them and the verdict report a failure.
#[track_caller]
fn errors_of(meeting: &Meeting, run: Run, probes: &str) -> Vec<Value> {
    let ended = run.end();
    let report = ended.code(1).json();
    assert_eq!(ended.stderr, "");
    let first = format!("fails at {}", probes.split(',').next().unwrap());
    assert!(report["verdict"].as_str().unwrap().contains(&first), "{report}");
    assert_gone(meeting, &[]);
    let findings = probes.split(',').map(|probe| finding(&report, probe));
    let failed = findings.inspect(|found| assert_eq!(found["status"], "failed", "{found}"));
    failed.map(|found| found["error"].clone()).collect()
}

#[test]
fn each_probe_fails_alone() {
    let meeting = Meeting::fake();
    for (probes, calls, code) in FAILURES {
        let faults: Vec<String> = calls.split(' ').map(|call| format!("{call}:{code}")).collect();
        for error in errors_of(&meeting, only(&meeting, probes, &[(FAIL, &faults.join(","))]), probes) {
            // A failure of the other process arrives as text that contains the code.
            let text = error["message"].as_str().is_some_and(|message| message.contains(&format!("({code})")));
            assert!(error["code"] == code || text, "{error}");
        }
    }
    let leak = errors_of(&meeting, only(&meeting, "memory", &[(FAIL, "cuMemUnmap:1:1")]), "memory");
    assert_eq!(leak[0]["kind"], "teardown", "a leak is a failure");
    for (probe, call) in ENDINGS {
        let crash = errors_of(&meeting, only(&meeting, probe, &[(ABORT, call)]), probe);
        assert!(!crash[0].is_null(), "{probe}");
        let mut hanging = only(&meeting, probe, &[(SLOW, &format!("{call}:{HANGS}"))]);
        hanging.command.args(["--timeout", "1s"]);
        let hang = errors_of(&meeting, hanging, probe);
        assert_eq!(hang[0]["kind"], "timeout", "{probe}: {hang:?}");
    }
}

#[test]
fn checkpoint_probe_names_times_and_driver() {
    let meeting = Meeting::fake();
    let states = tempfile::tempdir().unwrap();
    let probe = |settings: Settings<'_>| finding(&only(&meeting, "checkpoint", settings).end().json(), "checkpoint");
    let states = ("FAKECUDA_CHECKPOINTS", states.path().to_str().unwrap());
    let found = probe(&[states]);
    assert_eq!(found["status"], "ok", "{found}");
    assert!(found["figures"]["checkpoint_us"].is_u64() && found["figures"]["restore_us"].is_u64(), "{found}");
    for call in ["Lock", "Checkpoint", "Restore", "Unlock"] {
        let call = format!("cuCheckpointProcess{call}");
        let found = probe(&[states, (FAIL, &format!("{call}:1:999"))]);
        assert_eq!((&found["status"], &found["error"]["call"]), (&"failed".into(), &call.into()), "{found}");
    }
    // The other process's own error.
    let found = probe(&[states, (FAIL, "cuMemImportFromShareableHandle:2:999")]);
    assert!(found["status"] == "failed" && found["error"]["message"].to_string().contains("the peer"), "{found}");
    let old = Copy::new().without("cuCheckpointProcessGetState");
    old.write("libcuda.so.1");
    for settings in [&[][..], &[("LD_LIBRARY_PATH", old.folder().to_str().unwrap())]] {
        let found = probe(settings);
        assert!(found["status"] == "unsupported" && found["meaning"].to_string().contains("driver 570"), "{found}");
    }
    assert_gone(&meeting, &[]);
}

#[test]
fn each_ordered_device_pair_is_tried() {
    let meeting = Meeting::fake();
    // The bandwidth is not measured if memory is short.
    let run = only(&meeting, "memory,export,peer", &[(DEVICES, "3"), ("FAKECUDA_FREE", "67108864")]);
    let report = run.end().code(0).json();
    let devices = report["devices"].as_array().unwrap();
    assert!(devices.iter().map(|device| device["ordinal"].as_u64().unwrap()).eq(0..3), "{report}");
    assert!(devices.iter().all(|device| probes(&device["findings"]) == ["memory", "export"]), "{report}");
    let pairs = report["pairs"].as_array().unwrap();
    let numbers = pairs.iter().map(|pair| (pair["device"].as_u64().unwrap(), pair["owner"].as_u64().unwrap()));
    assert!(numbers.eq([(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]), "{report}");
    assert!(report["verdict"].as_str().unwrap().contains("3 of 3"), "{report}");
    for found in pairs.iter().map(|pair| &pair["findings"][0]) {
        let figures = &found["figures"];
        assert!(found["status"] == "ok" && figures["claimed"] == true && figures["read_gb_per_s"].is_null(), "{found}");
    }
    let measured = only(&meeting, "peer", &[(DEVICES, "2")]).end().code(0).json();
    assert!(finding(&measured, "peer")["figures"]["read_gb_per_s"].is_f64(), "{measured}");
    // A wrong claim is a failure, reported with the driver's code.
    let run = only(&meeting, "peer", &[(DEVICES, "2"), (FAIL, "cuMemSetAccess:2:217")]);
    let found = finding(&run.end().code(1).json(), "peer");
    assert_eq!((&found["status"], &found["error"]["code"]), (&"failed".into(), &217.into()));
    let ended = doctor(&meeting, &["--only", "peer"]).end();
    assert!(ended.code(1).stdout.contains("no pair of devices was tried"), "{}", ended.stdout);
}

#[test]
fn stopped_or_killed_doctor_leaves_nothing() {
    for (signal, code) in [(Signal::SIGINT, Some(130)), (Signal::SIGTERM, Some(143)), (Signal::SIGKILL, None)] {
        let meeting = Meeting::fake();
        let log = meeting.folder().join("log");
        let slow = format!("cuIpcOpenMemHandle_v2:{HANGS}");
        let running = only(&meeting, "legacy", &[(SLOW, &slow)]).env("FAKECUDA_LOG", &log).start();
        wait_for("the call that hangs", || calls(&log).iter().any(|(_, name)| name == "cuIpcOpenMemHandle_v2"));
        running.signal(signal);
        assert_eq!(running.end().status.code(), code);
        assert_gone(&meeting, &["log"]);
    }
}

/// Settings of the emulated driver and of the environment.
type Settings<'a> = &'a [(&'a str, &'a str)];

/// A rule, a probe, its status, and settings that cause it: a failure on the machine, on a device, of a pair and of another process. The
/// tests beside the rules cover every rule.
#[rustfmt::skip]
const EXPLAINED: [(&str, &str, &str, Settings<'_>); 7] = [
    ("driver-hangs", "driver", "failed", &[(SLOW, "cuInit:3600000")]),
    ("mps", "driver", "failed", &[(FAIL, "cuInit:1:805"), ("CUDA_MPS_PIPE_DIRECTORY", "/nonexistent")]),
    ("exclusive", "memory", "failed", &[(FAIL, "cuDevicePrimaryCtxRetain:1:46")]),
    ("crashed", "memory", "failed", &[(ABORT, "cuMemcpyDtoH_v2")]),
    ("mig", "peer", "unsupported", &[("FAKECUDA_PEERS", "0"), (DEVICES, "2"), (VISIBLE, "MIG-1")]),
    ("event-not-shared", "event", "failed", &[("FAKECUDA_EVENTS_FAIL", "1")]),
    ("no-vmm", "round-trip", "unsupported", &[("FAKECUDA_ATTRIBUTE", "102:0")]),
];

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
    for (rule, probe, status, settings) in EXPLAINED {
        let mut run = only(&meeting, probe, settings);
        run.command.args(["--timeout", if rule == "driver-hangs" { "700ms" } else { "20s" }]);
        assert_explained(&run.end().json(), probe, status, rule);
    }
    let report = only(&meeting, "descriptors", &[]).with_files(100).end().code(1).json();
    assert_explained(&report, "descriptors", "failed", "few-descriptors");
    // Only the folder identifies a stub.
    let copy = Copy::new();
    let stubs = copy.folder().join("stubs");
    fs::create_dir(&stubs).unwrap();
    fs::rename(copy.write("libcuda.so.1"), stubs.join("libcuda.so.1")).unwrap();
    let run = only(&meeting, "driver", &[(FAIL, "cuInit:1:999")]).env("LD_LIBRARY_PATH", &stubs);
    let report = run.end().code(1).json();
    assert_explained(&report, "driver", "failed", "stub-library");
    let library = &report["environment"]["library"];
    assert!(library["path"].as_str().unwrap().ends_with("/stubs/libcuda.so.1"), "{library}");
    // The report names a library that is not a stub, too.
    let report = only(&meeting, "driver", &[(FAIL, "cuInit:1:803")]).end().code(1).json();
    assert!(Path::new(report["environment"]["library"]["path"].as_str().unwrap()).is_file(), "{report}");
}

#[test]
fn persistence_mode_is_read() {
    let meeting = Meeting::fake();
    let copy = Copy::new();
    copy.write("libcuda.so.1");
    let report = |copy: &Copy, settings: Settings<'_>| {
        only(&meeting, "persistence", settings).env("LD_LIBRARY_PATH", copy.folder()).end().json()
    };
    let assert_skipped = |copy: &Copy, settings: Settings<'_>, words: &str| {
        let found = finding(&report(copy, settings), "persistence");
        assert!(found["status"] == "skipped" && found["meaning"].as_str().unwrap().contains(words), "{found}");
    };
    // A container that has the driver but lacks NVML.
    if !has_driver() {
        assert_skipped(&copy, &[], "libnvidia-ml.so.1: cannot open");
    }
    copy.write("libnvidia-ml.so.1");
    let ok = finding(&report(&copy, &[]), "persistence");
    assert_eq!((&ok["status"], &ok["figures"]["persistence_mode"]), (&"ok".into(), &1.into()), "{ok}");
    // A MIG instance reports the mode of its GPU.
    for settings in [&[("FAKECUDA_PERSISTENCE", "0")][..], &[("FAKECUDA_PERSISTENCE", "0"), ("FAKECUDA_MIG", "1")]] {
        let report = report(&copy, settings);
        assert_explained(&report, "persistence", "unsupported", "persistence-off");
        assert_eq!(finding(&report, "persistence")["figures"]["persistence_mode"], 0);
    }
    let failed = "nvmlDeviceGetHandleByUUID failed: Unknown Error (15)";
    assert_skipped(&copy, &[(FAIL, "nvmlDeviceGetHandleByUUID:1:15")], failed);
    let old = Copy::new().without("nvmlDeviceGetPersistenceMode");
    old.write("libcuda.so.1");
    old.write("libnvidia-ml.so.1");
    assert_skipped(&old, &[], "has no nvmlDeviceGetPersistenceMode");
}

/// The finding of the broker probe alone.
fn broker(meeting: &Meeting) -> Value {
    let report = doctor(meeting, &["--json", "--only", "broker"]).end().json();
    let found = finding(&report, "broker");
    // A probe named in `--only` is required.
    assert_eq!(report["exit_code"], if found["status"] == "ok" { 0 } else { 1 }, "{report}");
    found
}

#[test]
fn broker_at_default_socket_is_tested() {
    let meeting = Meeting::host();
    let socket = meeting.folder().join("vmmfd/broker.sock");
    let found = broker(&meeting);
    assert_eq!((&found["status"], &found["error"]), (&"skipped".into(), &Value::Null), "{found}");
    assert!(found["meaning"].as_str().unwrap().contains("/vmmfd/broker.sock"), "{found}");
    assert!(meeting.files().is_empty(), "{:?}", meeting.files());
    let mut serve = meeting.bare("vmmfd").env("XDG_RUNTIME_DIR", meeting.folder());
    serve.command.arg("serve");
    let serve = serve.start();
    wait_for("the broker", || socket.exists());
    let found = broker(&meeting);
    assert_eq!((&found["status"], &found["rule"]), (&"ok".into(), &Value::Null), "{found}");
    assert!(found["meaning"].as_str().unwrap().starts_with("A broker answers, with pid "), "{found}");
    assert!(found["figures"]["answer_us"].as_u64().unwrap() > 0);
    drop(serve);
    let _ = fs::remove_file(&socket);
    drop(UnixListener::bind(&socket).unwrap());
    let assert_broken = |problem: &str, words: &str| {
        let found = broker(&meeting);
        let rule = format!("broker-{problem}");
        assert_eq!((&found["figures"]["problem"], &found["rule"]), (&problem.into(), &rule.into()), "{found}");
        assert!(found["error"]["message"].as_str().unwrap().contains(words), "{found}");
    };
    assert_broken("stale", "no broker on ");
    assert!(socket.exists(), "it is not the doctor's to remove");
    // A folder that others may write in.
    fs::set_permissions(socket.parent().unwrap(), PermissionsExt::from_mode(0o777)).unwrap();
    assert_broken("folder", "others may write in it");
}
