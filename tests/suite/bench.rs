//! `vmmfd bench` as a user runs it: the rows of each group, and its failures.

use crate::support::prelude::*;

cases! {
    on crate::running::Meeting; host and cuda: [
    broker_is_measured,
    ]
    gpus alone: [
    handoffs_are_measured,
    ]
}

/// A bench on this test's backend, with few samples and little memory.
fn bench(meeting: &Meeting, options: &[&str]) -> Run {
    let mut run = meeting.bare("vmmfd");
    // `vmmfd bench` executes this program.
    binary("vmmfd-bench");
    run.command.arg("bench").args(options).args(["--backend", meeting.backend(), "--emulated"]);
    run.command.args(["--count", "1", "--size", "2MiB,1PiB", "--clients", "2", "--consumers", "1,2"]);
    run.env("FAKECUDA_FREE", "8589934592").env("TMPDIR", meeting.folder())
}

/// Asserts that a group's report has these rows. Returns the report.
fn report(meeting: &Meeting, group: &str, names: &[&str]) -> Value {
    let report = bench(meeting, &["--json", group]).end().code(0).json();
    assert_eq!((&report["schema"], &report["backend"]), (&1.into(), &meeting.backend().into()));
    let rows = report["rows"].as_array().unwrap();
    for name in names {
        assert!(rows.iter().any(|row| row["group"] == group && row["name"] == *name), "{name}: {report}");
    }
    for row in rows.iter().filter(|row| row["count"] != 0) {
        let [min, median, p99] = ["min", "median", "p99"].map(|key| row[key].as_f64().unwrap());
        assert!(0.0 < min && min <= median && median <= p99 && p99 < 6e7, "{row}");
        assert!(row["name"] != "floor" || row["ratio"] == 1.0, "{row}");
    }
    wait_for("the end of all processes", || meeting.processes().is_empty());
    assert!(meeting.files().iter().all(|file| !file.starts_with("vmmfd-bench")), "{:?}", meeting.files());
    report
}

fn handoffs_are_measured(meeting: Meeting) {
    let handoffs = ["floor", "vmmfd", "vmmfd, with description", "export each, anchor", "legacy", "pool"];
    for (group, names) in [
        ("startup", &["bare start, to ready", "producer, to ready", "two bare starts at once, to the end"][..]),
        ("handoff", &handoffs),
        ("repeat", &["record", "vmmfd again"]),
        ("verify", &["host fill", "host verify", "gpu fill, kernel", "gpu verify", "load kernels, compiled"]),
        ("stages", &["create", "export, anchor", "map", "unmap", "import", "set access", "release"]),
        (
            "stream",
            &[
                "publication to receipt",
                "publication to the last receipt, on streams",
                "publisher's CPU, without",
                "skipped",
                "timeline, record to the other stream",
            ],
        ),
        ("copies", &["in, memcpy", "in", "out, memcpy", "out"]),
    ] {
        let report = report(&meeting, group, names);
        let at_once = report["rows"].as_array().unwrap().iter().filter(|row| row["consumers"] == 2);
        let expected = match group {
            "handoff" | "repeat" => 2,
            "stream" => 18,
            _ => 0,
        };
        assert_eq!(at_once.count(), expected, "{report}");
        let left_out = report["left_out"].as_array().unwrap();
        let left_out = left_out.iter().any(|text| text.as_str().unwrap().starts_with("handoff, 1 PiB: "));
        assert_eq!(left_out, group == "handoff", "{report}");
    }
}

fn broker_is_measured(meeting: Meeting) {
    let names = [
        "get",
        "handoff by a sleeper",
        "get, more than a handoff by a sleeper",
        "get of 10000 arrays, more than of one",
        "put, each further segment, under a keeper",
        "switch",
        "get by 2 clients at once, mapped: all together",
        "get of host memory by 4 clients: broker's CPU in the kernel",
        "broker's resident memory, 5 objects and 5 connections",
        "longest get while another client replaces 500 objects",
    ];
    report(&meeting, "broker", &names);
}

#[test]
fn stopped_bench_leaves_nothing() {
    for signal in [Signal::SIGKILL, Signal::SIGTERM, Signal::SIGINT] {
        let meeting = Meeting::fake();
        let run = bench(&meeting, &["broker"]).env("FAKECUDA_SLOW", "cuMemImportFromShareableHandle:100").start();
        // The bench, its first process, the consumer and the broker.
        wait_for("the processes", || meeting.processes().len() > 3);
        run.signal(signal);
        run.end();
        wait_for("the end of all processes", || meeting.processes().is_empty());
        let left = || meeting.files().into_iter().filter(|file| file.starts_with("vmmfd-")).count();
        wait_for("the removal of the folder", || left() == 0);
    }
}
