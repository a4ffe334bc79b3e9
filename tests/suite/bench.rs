//! `vmmfd bench` as a user runs it: its output, its charts, and its behaviour on failures.
//!
//! One file of more than 500 lines: all tests use its reader of tables.

use std::{fs, path::PathBuf, process::Command};

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::running::{Ended, HANGS, Meeting, Run, binary, wait_for};

cases! {
    on crate::running::Meeting; every backend: [
    table_has_a_line_per_row,
    json_and_picture_have_every_series,
    concurrent_consumers_have_own_rows,
    sizes_that_do_not_fit_are_skipped,
    broker_is_measured_beside_handoff,
    broker_figures_are_printed_with_targets,
    ]
}

/// A bench on this test's backend, with few samples and little memory.
fn bench(meeting: &Meeting, options: &[&str]) -> Run {
    let mut run = meeting.bare("vmmfd");
    // `vmmfd bench` executes this program.
    binary("vmmfd-bench");
    run.command.arg("bench").args(options).args(["--backend", meeting.backend()]);
    for (option, value) in [("--count", "5"), ("--size", "2MiB"), ("--clients", "2")] {
        if !options.contains(&option) {
            run.command.args([option, value]);
        }
    }
    // This test's folder in the environment identifies its processes.
    run.command.env("BENCH_OF", meeting.folder());
    // Free memory of the whole machine would change between runs.
    if meeting.is_fake() { run.env("FAKECUDA_FREE", "1073741824") } else { run }
}

const HANDOFF: [&str; 7] =
    ["floor", "vmmfd", "vmmfd, with description", "export each, anchor", "export each, no anchor", "legacy", "pool"];
const VERIFY: [&str; 8] = [
    "load kernels, compiled",
    "load kernels, cached",
    "gpu fill, kernel",
    "gpu verify, kernel",
    "gpu fill",
    "gpu verify",
    "host fill",
    "host verify",
];
const STAGES: [&str; 9] =
    ["create", "export, anchor", "import", "reserve", "map", "set access", "unmap", "address free", "release"];
const STARTUP: [&str; 5] = [
    "bare start, to ready",
    "producer, to ready",
    "consumer, to ready",
    "bare start, to its end",
    "two bare starts at once, to their end",
];
const DEMO: &str = "demo, to its end";

/// The rows of each bench on a backend. The demo's row is omitted: not every build has the demo beside the program.
fn rows(meeting: &Meeting) -> [(&'static str, Vec<&'static str>); 5] {
    let host = meeting.backend() == "host";
    let of = |all: &[&'static str], on_host: &[&'static str]| if host { on_host.to_vec() } else { all.to_vec() };
    [
        ("handoff", of(&HANDOFF, &HANDOFF[..4])),
        ("repeat", vec!["floor", "vmmfd again"]),
        ("verify", of(&VERIFY, &VERIFY[6..])),
        ("stages", of(&STAGES, &["create", "export, anchor", "map", "unmap"])),
        ("startup", STARTUP.to_vec()),
    ]
}

/// The row names of the tables: each row ends with a bar.
fn names(table: &str) -> Vec<&str> {
    let row = |line: &'_ str| line.ends_with(['█', '▏', '▎', '▍', '▌', '▋', '▊', '▉']);
    table.lines().filter(|line| row(line)).filter_map(|line| line.split("  ").next()).collect()
}

/// Asserts that no process is left.
#[track_caller]
fn assert_ended(meeting: &Meeting) {
    wait_for("the end of all processes", || meeting.processes().is_empty());
}

/// The single sentence on standard error, after the messages of the emulated driver's libraries.
#[track_caller]
fn sentence(ended: &Ended) -> &str {
    let own: Vec<&str> = ended.stderr.lines().filter(|line| !line.starts_with("fakecuda: ")).collect();
    match own[..] {
        [line] => line.strip_prefix("error: ").unwrap(),
        [line, hint] if hint.starts_with("  hint: ") => line.strip_prefix("error: ").unwrap(),
        _ => panic!("not one sentence: {}", ended.stderr),
    }
}

fn table_has_a_line_per_row(meeting: Meeting) {
    let ended = bench(&meeting, &["handoff"]).end();
    assert_eq!(ended.code(0).stderr, "");
    assert_eq!(names(&ended.stdout), rows(&meeting)[0].1, "{}", ended.stdout);
    assert_eq!(ended.stdout.contains("no GPU is measured"), meeting.backend() == "host", "{}", ended.stdout);
    assert!(ended.stdout.starts_with("vmmfd ") && ended.stdout.contains("5 samples of each"), "{}", ended.stdout);
    assert!(ended.stdout.contains("\nhandoff, 2 MiB "), "{}", ended.stdout);
    assert!(!ended.stdout.contains("differ by"), "five samples do not show the noise: {}", ended.stdout);
    assert_ended(&meeting);
}

fn json_and_picture_have_every_series(meeting: Meeting) {
    let picture = meeting.folder().join("bench.svg");
    fs::write(&picture, "something else").unwrap();
    let ended = bench(&meeting, &["--json", "--svg", picture.to_str().unwrap()]).end();
    assert_eq!(ended.code(0).stderr, "");
    let report = ended.json();
    let fields: Vec<&str> = report.as_object().unwrap().keys().map(String::as_str).collect();
    let mut expected =
        ["schema", "tool", "made", "backend", "machine", "count", "warm_up", "series", "figures", "left_out"].to_vec();
    expected.sort_unstable();
    assert_eq!(fields, expected);
    assert_eq!((&report["schema"], &report["count"]), (&json!(1), &json!(5)));
    assert_eq!(report["tool"], format!("vmmfd {}", env!("CARGO_PKG_VERSION")));
    assert_eq!(report["backend"], meeting.backend());

    let machine = &report["machine"];
    for text in ["kernel", "device", "uuid"] {
        assert!(!machine[text].as_str().unwrap().is_empty(), "{machine}");
    }
    assert!(machine["cpus"].as_u64().unwrap() > 0);
    assert_eq!(machine["cuda"] == 0, meeting.backend() == "host", "{machine}");
    assert!(machine.as_object().unwrap().contains_key("module"), "{machine}");
    assert_eq!(
        machine["device"].as_str().unwrap().contains("no GPU"),
        meeting.backend() == "host" || meeting.is_fake()
    );

    let series = report["series"].as_array().unwrap();
    for (bench, names) in rows(&meeting) {
        let found = series.iter().filter(|series| series["bench"] == bench && series["name"] != DEMO);
        let found: Vec<&str> = found.map(|series| series["name"].as_str().unwrap()).collect();
        assert_eq!(found, names, "{bench}");
    }
    let of_the_broker = |series: &&Value| series["bench"] == "broker";
    assert!(series.iter().any(|series| of_the_broker(&series)), "{report}");
    for series in series.iter().filter(|series| !of_the_broker(series)) {
        let us = ["min_us", "p50_us", "p90_us", "p99_us", "max_us"].map(|figure| series[figure].as_f64().unwrap());
        assert!(us.is_sorted() && us[0] >= 0.0, "{series}");
        assert_eq!(series["count"], 5, "{series}");
        assert_eq!(series["noise"], Value::Null, "five samples do not tell");
        assert!(series.get("samples").is_none(), "{series}");
        let bench = series["bench"].as_str().unwrap();
        let about_none = bench == "startup" || series["name"].as_str().unwrap().starts_with("load");
        assert_eq!(series["size"], if about_none { 0 } else { 2 << 20 }, "{series}");
        if series["name"] == "floor" {
            assert_eq!(series["ratio"], 1.0);
        }
        assert_eq!(series["ratio"].is_f64(), ["handoff", "repeat"].contains(&bench), "{series}");
        let moves = bench == "verify" && !about_none;
        assert_eq!(series["rate"].is_f64(), moves, "{series}");
    }
    let demo = series.iter().any(|series| series["name"] == DEMO);
    let left_out = report["left_out"].as_array().unwrap();
    assert_eq!(left_out.iter().any(|what| what.as_str().unwrap().contains("startup of demo")), !demo, "{report}");

    let svg = fs::read_to_string(&picture).unwrap();
    let drawn = |text: &str| svg.lines().any(|line| line.trim() == text);
    for series in series {
        assert!(drawn(series["name"].as_str().unwrap()), "{series}: {svg}");
    }
    for title in ["handoff, 2 MiB (microseconds)", "startup (microseconds)", "broker (microseconds)"] {
        assert!(drawn(title), "{title}: {svg}");
    }
    assert_eq!(meeting.files(), ["bench.svg"]);
    assert_ended(&meeting);
}

fn concurrent_consumers_have_own_rows(meeting: Meeting) {
    let ended = bench(&meeting, &["repeat", "--consumers", "3,1,3", "--json"]).end();
    let report = ended.code(0).json();
    let found: Vec<_> = report["series"].as_array().unwrap().iter().map(|series| series["name"].clone()).collect();
    assert_eq!(found, ["floor", "vmmfd again", "floor, 3 at once", "vmmfd again, 3 at once"]);
    assert_eq!(report["series"][2]["ratio"], 1.0, "compared with the floor of as many");
}

fn sizes_that_do_not_fit_are_skipped(meeting: Meeting) {
    let sizes = ["--size", "2MiB,1PiB,18446744073709551615,1,2MiB", "--json"];
    for (name, expected) in rows(&meeting).into_iter().take(4) {
        let report = bench(&meeting, &[&[name][..], &sizes].concat()).end().code(0).json();
        let series = report["series"].as_array().unwrap();
        assert_eq!(series.len(), expected.len(), "each size once, rounded up: {report}");
        let left_out: Vec<&str> =
            report["left_out"].as_array().unwrap().iter().map(|what| what.as_str().unwrap()).collect();
        let said = |what: &str| what.contains(": there are ") || what.contains(": the driver can't import so much");
        assert!(left_out.iter().all(|what| what.starts_with(name) && said(what)), "{report}");
        for size in ["1 PiB", "15.9 EiB"] {
            assert!(left_out.iter().any(|what| what.contains(&format!(" at {size}:"))), "{report}");
        }
    }
}

/// The rows at each size.
const COMPARED: [&str; 6] =
    ["floor", "handoff", "handoff, with description", "handoff by a sleeper", "get", "get through C"];
const EXPORTS: [&str; 4] = [
    "export, the broker holds memory",
    "create to release, the broker holds memory",
    "export, no process holds any",
    "create to release, no process holds any",
];

const SWITCHED: [&str; 2] = ["unmap, map and set access", "switch"];

/// Enough memory for several processes, each with a CUDA context.
const ROOMY: &str = "8589934592";

/// Requests of several clients at once, with their number.
const BURSTS: [(&str, u64); 3] = [
    ("get by 3 clients at once", 150),
    ("get by 3 clients at once, mapped", 15),
    ("get of host memory by 4 clients at once", 200),
];

/// The names and sizes of all series of `vmmfd bench broker`.
fn broker_series(host: bool) -> Vec<(String, u64)> {
    let sized = |size, names: &[&str]| names.iter().map(|name| ((*name).to_owned(), size)).collect::<Vec<_>>();
    let segmented = COMPARED.map(|name| (format!("{name}, in segments of 2 MiB"), 8 << 20));
    let others = [
        "get of one array",
        "get of 10000 arrays",
        "send",
        "put",
        "send of 65 segments",
        "put of 65 segments",
        "send, under a keeper",
        "put, under a keeper",
        "send of 65 segments, under a keeper",
        "put of 65 segments, under a keeper",
    ];
    [
        sized(2 << 20, &COMPARED),
        sized(8 << 20, &COMPARED),
        segmented.into(),
        sized(0, &others),
        sized(2 << 20, &SWITCHED),
        sized(8 << 20, &SWITCHED),
        sized(0, &BURSTS.map(|(name, _)| name)),
        sized(0, if host { &[] } else { &EXPORTS }),
    ]
    .concat()
}

fn broker_is_measured_beside_handoff(meeting: Meeting) {
    let run = bench(&meeting, &["broker", "--size", "2MiB,8MiB,1PiB", "--clients", "3", "--json"]);
    let report = if meeting.is_fake() { run.env("FAKECUDA_FREE", ROOMY) } else { run }.end().code(0).json();
    let series = report["series"].as_array().unwrap();
    let named = |series: &'_ Value| (series["name"].as_str().unwrap().to_owned(), series["size"].as_u64().unwrap());
    let found: Vec<(String, u64)> = series.iter().map(named).collect();
    assert_eq!(found, broker_series(meeting.backend() == "host"));
    for series in series {
        let name = series["name"].as_str().unwrap();
        let burst = BURSTS.iter().find(|(burst, _)| *burst == name);
        assert_eq!(series["count"], burst.map_or(5, |(_, count)| *count), "every sample of every client: {series}");
        assert_eq!((&series["bench"], &series["rate"]), (&json!("broker"), &Value::Null), "{series}");
        assert!(series["min_us"].as_f64().unwrap() > 0.0, "{series}");
        assert_eq!(series["ratio"].is_f64(), series["size"] != 0, "{series}");
    }
    let figure = |name: &str, size: u64| {
        let all = report["figures"].as_array().unwrap();
        let one = all.iter().find(|figure| named(figure) == (name.to_owned(), size));
        one.unwrap_or_else(|| panic!("{name}, {size}: {all:?}"))
    };
    let median = |name: &str| {
        let one = series.iter().find(|series| named(series) == (name.to_owned(), 2 << 20));
        one.unwrap()["p50_us"].as_f64().unwrap()
    };
    let more = median("get") - median("handoff by a sleeper");
    let of_a_sleeper = figure("get, more than a handoff by a sleeper", 2 << 20);
    assert!((of_a_sleeper["value"].as_f64().unwrap() - more).abs() < 1e-6, "{of_a_sleeper} is not {more}");
    for (name, size, unit, at_most) in [
        ("get, more than a handoff by a sleeper", 8 << 20, "us", json!(15.0)),
        ("get, more than a handoff", 2 << 20, "us", json!(15.0)),
        ("get, more than a handoff with description", 2 << 20, "us", Value::Null),
        ("get, in segments of 2 MiB, more than a handoff", 8 << 20, "us", json!(15.0)),
        ("get through C, of a get", 2 << 20, "x", json!(1.02)),
        ("switch, of the driver's unmap, map and set access", 2 << 20, "x", json!(1.2)),
        ("get of 10000 arrays, more than of one", 0, "ms", json!(3.0)),
        ("put, more than the send of a handoff", 0, "us", json!(60.0)),
        ("put, each further segment", 0, "us", json!(5.0)),
    ] {
        let figure = figure(name, size);
        assert_eq!((&figure["unit"], &figure["at_most"]), (&json!(unit), &at_most), "{figure}");
    }
    for (what, _) in BURSTS {
        let rate = figure(&format!("{what}, all together"), 0);
        let at_least = if what.contains("host") { json!(10_000.0) } else { Value::Null };
        assert_eq!((&rate["unit"], &rate["at_least"]), (&json!("/s"), &at_least));
        let used = figure(&format!("{what}: CPU time of the broker, each"), 0)["value"].as_f64().unwrap();
        assert!(used > 0.1, "{what}: {used} us");
    }
    let held = figure("resident memory of the broker, 1000 objects and 1000 connections", 0);
    let [idle, held_value] =
        [figure("resident memory of the broker, idle", 0), held].map(|of| of["value"].as_f64().unwrap());
    assert!(1.0 < idle && idle < held_value, "{idle} and {held_value} MB");
    assert_eq!((&held["unit"], &held["at_most"]), (&json!("MB"), &json!(30.0)));
    let left_out = report["left_out"].as_array().unwrap();
    assert_eq!(left_out.len(), 2, "{report}");
    for (text, start) in left_out.iter().zip(["broker get at 1 PiB: there are ", "broker switch at 1 PiB: "]) {
        assert!(text.as_str().unwrap().starts_with(start), "{report}");
    }
    assert_ended(&meeting);
}

fn broker_figures_are_printed_with_targets(meeting: Meeting) {
    let ended = bench(&meeting, &["broker"]).end();
    assert_eq!(ended.code(0).stderr, "");
    let line = |start: &str| {
        let line = ended.stdout.lines().find(|line| line.starts_with(start));
        line.unwrap_or_else(|| panic!("{start}: {}", ended.stdout)).split_whitespace().collect::<Vec<_>>().join(" ")
    };
    let line_of_put = line("put, more than the send of a handoff ");
    assert!(line_of_put.contains(" us at most 60: "), "{line_of_put}");
    assert!(["yes", "NO"].iter().any(|word| line_of_put.ends_with(word)), "{line_of_put}");
    assert!(line("get, more than a handoff, 2 MiB ").contains(" us at most 15: "), "{}", ended.stdout);
    let rate = line("get of host memory by 4 clients at once, all together ");
    assert!(rate.contains(" /s at least 10000: "), "{rate}");
    // The emulated GPU has too little memory for the contexts.
    let left_out = "\nleft out: broker mapped by 2 clients at once: they need 1920 MiB, and there are 972.7 MiB\n";
    assert_eq!(ended.stdout.contains(left_out), meeting.is_fake(), "{}", ended.stdout);
    assert_eq!(ended.stdout.contains("\nget by 2 clients at once, mapped "), !meeting.is_fake(), "{}", ended.stdout);
}

#[test]
fn dead_or_stopped_broker_ends_the_bench() {
    for signal in [Signal::SIGKILL, Signal::SIGSTOP] {
        let meeting = Meeting::fake();
        // Slow imports keep the broker in use for longer than the test needs to find it.
        let run = bench(&meeting, &["broker", "--count", "1000", "--timeout", "3s"]);
        let running = run.env("FAKECUDA_SLOW", "cuMemImportFromShareableHandle:50").start();
        let mut broker = None;
        wait_for("the broker", || {
            let is_broker = |process: &PathBuf| {
                let words = fs::read_to_string(process.join("cmdline")).unwrap_or_default();
                words.contains("broker_server") && fs::read_dir(process.join("task")).is_ok()
            };
            broker = meeting.processes().into_iter().find(is_broker);
            broker.is_some()
        });
        let number = broker.unwrap().file_name().unwrap().to_str().unwrap().parse().unwrap();
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(number), signal).unwrap();
        let ended = running.end();
        let said = sentence(ended.code(5));
        let names = ["the broker ", "the producer ", "a consumer "];
        assert!(names.iter().any(|name| said.starts_with(name)), "{said}");
        assert_eq!(ended.stdout, "");
        assert_ended(&meeting);
    }
}

#[test]
fn rows_without_memory_are_skipped_singly() {
    let meeting = Meeting::fake();
    for (free, expected) in [
        (3, vec!["floor", "vmmfd", "vmmfd, with description", "export each, no anchor"]),
        (7, HANDOFF[..6].to_vec()),
        (9, HANDOFF.to_vec()),
        (1, vec![]),
    ] {
        let ended = bench(&meeting, &["handoff"]).env("FAKECUDA_FREE", ((free << 20) + (1 << 20)).to_string()).end();
        // A bench without results fails.
        let code = i32::from(expected.is_empty());
        assert_eq!(names(&ended.code(code).stdout), expected, "{}", ended.stdout);
        for name in HANDOFF.iter().filter(|name| !expected.contains(name)) {
            let left_out = format!("\nleft out: handoff {name} at 2 MiB: there are ");
            assert!(ended.stdout.contains(&left_out), "{name}: {}", ended.stdout);
        }
    }
    let report = bench(&meeting, &["all", "--json"]).env("FAKECUDA_GRANULARITY", "4194304").end().code(0).json();
    let sized = report["series"].as_array().unwrap().iter().filter(|series| series["size"] != 0);
    assert!(sized.clone().count() > 15 && sized.clone().all(|series| series["size"] == 4 << 20), "{report}");
}

#[test]
fn failed_bench_keeps_the_old_picture() {
    let meeting = Meeting::fake();
    let picture = meeting.folder().join("bench.svg");
    fs::write(&picture, "of yesterday").unwrap();
    let run = bench(&meeting, &["handoff", "--svg", picture.to_str().unwrap()]);
    run.env("FAKECUDA_FAIL", "cuMemImportFromShareableHandle:9:999").end().code(5);
    assert_eq!(fs::read_to_string(&picture).unwrap(), "of yesterday");
    assert_eq!(meeting.files(), ["bench.svg"]);
}

#[test]
fn bad_usage_is_one_sentence() {
    let meeting = Meeting::host();
    let wrong: [(&[&str], &str); 8] = [
        (&["everything"], "[possible values: handoff, repeat, verify, stages, startup, broker, all]"),
        (&["--size", "2MiB,0"], "`0` is no memory"),
        (&["--count", "0"], "0 is not in 1..=1000000"),
        (&["--consumers", "1,10000"], "10000 is not in 1..=256"),
        (&["--clients", "0"], "0 is not in 1..=1024"),
        (&["--backend", "auto"], "[possible values: cuda, host]"),
        (&["--svg", "-"], "`-` is not supported"),
        (&["handoff", "repeat"], "unexpected argument 'repeat'"),
    ];
    for (options, why) in wrong {
        let mut run = meeting.bare("vmmfd");
        run.command.arg("bench").args(options);
        let ended = run.end();
        assert_eq!(ended.code(2).says(why).stdout, "");
        let errors = ended.stderr.lines().filter(|line| line.starts_with("error: ")).count();
        assert_eq!(errors, 1, "{}", ended.stderr);
    }
}

#[test]
fn tables_are_printed_when_they_are_measured() {
    let meeting = Meeting::host();
    let run = bench(&meeting, &["stages", "--size", "2MiB,64MiB,1GiB", "--count", "300"]).start();
    wait_for("the first table", || run.so_far().contains("\nstages, 2 MiB "));
    run.signal(Signal::SIGINT);
    let ended = run.end();
    assert!(!ended.code(130).stdout.contains("stages, 1 GiB"), "{}", ended.stdout);
}

#[test]
fn missing_driver_or_device_is_an_error() {
    let meeting = Meeting::fake();
    let broken = tempfile::tempdir().unwrap();
    for name in ["libcuda.so.1", "libcuda.so"] {
        fs::write(broken.path().join(name), "no library").unwrap();
    }
    for name in ["handoff", "startup", "broker"] {
        let ended = bench(&meeting, &[name]).env("LD_LIBRARY_PATH", broken.path()).end();
        assert!(sentence(ended.code(3)).starts_with("no CUDA driver library loads"), "{}", ended.stderr);
        ended.says("  hint: ").says("--backend host");
        let ended = bench(&meeting, &[name]).env("FAKECUDA_DEVICES", "0").end();
        assert_eq!(sentence(ended.code(3)), "the CUDA driver finds no device");
        ended.says("  hint: ");
        assert_eq!(ended.stdout, "");
    }
}

#[test]
fn failed_call_is_reported_with_its_process() {
    let meeting = Meeting::fake();
    for (name, call, nth, who) in [
        ("stages", "cuInit", 1, "the process that is measured"),
        ("stages", "cuMemCreate", 2, "the process that is measured"),
        ("stages", "cuMemRelease", 1, "the process that is measured"),
        ("verify", "cuLaunchKernel", 1, "the process that is measured"),
        ("handoff", "cuInit", 1, "the producer"),
        ("handoff", "cuMemExportToShareableHandle", 4, "the producer"),
        ("handoff", "cuMemImportFromShareableHandle", 3, "a consumer"),
        ("handoff", "cuMemPoolImportPointer", 1, "a consumer"),
        ("broker", "cuMemExportToShareableHandle", 2, "the producer"),
        ("broker", "cuMemImportFromShareableHandle", 1, "a consumer"),
    ] {
        let ended = bench(&meeting, &[name]).env("FAKECUDA_FAIL", format!("{call}:{nth}:999")).end();
        assert_eq!(sentence(ended.code(5)), format!("{who} failed: {call} failed: CUDA_ERROR_UNKNOWN (999)"));
        // The kernels are loaded before the failing call, so `verify` prints their row.
        assert_eq!(ended.stdout.is_empty(), name != "verify", "{}", ended.stdout);
    }
    // The floor and the three handoffs precede the failing call.
    let ended = bench(&meeting, &["broker"]).env("FAKECUDA_FAIL", "cuMemImportFromShareableHandle:5:999").end();
    let said = sentence(ended.code(5));
    let call = "cuMemImportFromShareableHandle failed: CUDA_ERROR_UNKNOWN (999)";
    assert!(said.starts_with("a consumer failed: ") && said.ends_with(call), "{said}");
    let ended = bench(&meeting, &["stages"]).env("FAKECUDA_FAIL", "cuMemCreate:2:2").end();
    ended.code(5).says("  hint: free memory first");
    assert_ended(&meeting);
}

#[test]
fn dead_process_is_reported_with_its_status() {
    let meeting = Meeting::fake();
    for (name, call, who) in [
        ("handoff", "cuMemImportFromShareableHandle", "a consumer"),
        ("stages", "cuMemMap", "the process that is measured"),
    ] {
        let ended = bench(&meeting, &[name]).env("FAKECUDA_ABORT", call).end();
        assert_eq!(sentence(ended.code(5)), format!("{who} was killed by SIGABRT"));
        assert_eq!(ended.stdout, "");
    }
    // The bare start and the consumer do not call `cuMemMap`.
    let ended = bench(&meeting, &["startup"]).env("FAKECUDA_ABORT", "cuMemMap").end();
    let said = sentence(ended.code(5));
    assert!(said.starts_with("the producer was killed by SIGABRT before it was ready"), "{said}");
    let ended = bench(&meeting, &["startup"]).env("FAKECUDA_FAIL", "cuMemMap:1:999").end();
    let said = sentence(ended.code(5));
    assert!(said.ends_with("before it was ready: cuMemMap failed: CUDA_ERROR_UNKNOWN (999)"), "{said}");
    assert_ended(&meeting);
}

#[test]
fn hanging_driver_is_reported_with_its_process() {
    let hanging = [
        ("handoff", "cuInit", "the producer did not respond"),
        ("handoff", "cuMemImportFromShareableHandle", "a consumer did not respond"),
        ("stages", "cuMemMap", "the process that is measured did not respond"),
        ("startup", "cuMemMap", "the producer did not become ready"),
    ]
    .map(|(name, call, who)| {
        let meeting = Meeting::fake();
        let run = bench(&meeting, &[name, "--timeout", "3s"]).env("FAKECUDA_SLOW", format!("{call}:{HANGS}")).start();
        (meeting, run, who)
    });
    // All benches wait concurrently.
    for (meeting, run, who) in hanging {
        let ended = run.end();
        assert_eq!(sentence(ended.code(5)), format!("{who} within 3s, the longest that a step may take"));
        assert_ended(&meeting);
    }
}

#[test]
fn waiting_pair_is_not_stuck() {
    let meeting = Meeting::fake();
    // Together the steps exceed the timeout, but each step is far shorter.
    let run = bench(&meeting, &["handoff", "--size", "2MiB,4MiB", "--timeout", "3s"]);
    run.env("FAKECUDA_SLOW", "cuIpcOpenMemHandle_v2:500").end().code(0);
}

/// The folder of a running bench, from the command lines of its processes.
fn folder_of(meeting: &Meeting) -> Option<PathBuf> {
    let words = meeting.processes().into_iter().filter_map(|process| fs::read_to_string(process.join("cmdline")).ok());
    let found = |words: String| {
        let from = words.find("vmmfd-bench.")?;
        let name = words[from..].split(['/', '"', '\0']).next()?;
        Some(meeting.folder().join(name))
    };
    words.filter_map(found).next()
}

#[test]
fn stopped_or_killed_bench_leaves_nothing() {
    for (signal, code, name, call) in [
        (Signal::SIGINT, Some(130), "handoff", "cuMemImportFromShareableHandle"),
        (Signal::SIGTERM, Some(143), "startup", "cuMemMap"),
        (Signal::SIGKILL, None, "broker", "cuMemImportFromShareableHandle"),
    ] {
        let meeting = Meeting::fake();
        let log = meeting.folder().join("log");
        let run = bench(&meeting, &[name]).env("FAKECUDA_SLOW", format!("{call}:{HANGS}")).env("FAKECUDA_LOG", &log);
        let run = run.env("TMPDIR", meeting.folder());
        let running = run.start();
        wait_for("the call that hangs", || fs::read_to_string(&log).unwrap_or_default().contains(call));
        let folder = folder_of(&meeting).unwrap();
        assert!(folder.exists(), "{}", folder.display());
        running.signal(signal);
        let ended = running.end();
        assert_eq!(ended.status.code(), code, "{name} {signal}: {}", ended.stderr);
        assert_ended(&meeting);
        if code.is_some() {
            assert_eq!(sentence(&ended), format!("interrupted by {signal}"));
            assert!(!folder.exists(), "{} stays after {signal}", folder.display());
        }
    }
}

#[test]
fn missing_program_names_its_installation() {
    let alone = tempfile::tempdir().unwrap();
    assert!(Command::new("cp").arg(binary("vmmfd")).arg(alone.path()).status().unwrap().success());
    let meeting = Meeting::host();
    let run = |options: &[&str]| {
        let mut command = Command::new(alone.path().join("vmmfd"));
        command.env("PATH", alone.path()).arg("bench").args(options);
        meeting.bare("vmmfd").instead(command).end()
    };
    let ended = run(&["handoff"]);
    ended
        .code(5)
        .says(&format!("{}/ nor on PATH", alone.path().display()))
        .says("cargo install --locked --path tests/bench");
    assert_eq!(ended.stdout, "");
    let report = crate::command_line::object(run(&["--json"]).code(5));
    assert_eq!((&report["command"], &report["error"]["kind"]), (&"bench".into(), &"system".into()));
}

#[test]
fn startup_of_missing_commands_is_skipped() {
    let meeting = Meeting::host();
    let alone = tempfile::tempdir().unwrap();
    let run = bench(&meeting, &["startup"]);
    // `cp` copies the files: a program that a child of this process still has open for writing can't be executed (`ETXTBSY`).
    let programs = ["vmmfd", "vmmfd-bench"].map(binary);
    assert!(Command::new("cp").args(programs).arg(alone.path()).status().unwrap().success());
    let mut command = Command::new(alone.path().join("vmmfd"));
    command.args(run.command.get_args());
    let ended = run.instead(command).end();
    assert_eq!(ended.code(0).stderr, "");
    assert_eq!(names(&ended.stdout), [STARTUP[0], STARTUP[3], STARTUP[4]], "{}", ended.stdout);
    for name in ["producer", "consumer", "demo"] {
        let left_out = format!("\nleft out: startup of {name}: it is not beside this program\n");
        assert!(ended.stdout.contains(&left_out), "{}", ended.stdout);
    }
}
