use serde_json::json;

use super::*;
use crate::doctor::report::{DeviceReport, PairReport};

fn with(mut finding: Finding, figures: Value) -> Finding {
    finding.figures = serde_json::from_value(figures).unwrap();
    finding
}

fn device(ordinal: i32, findings: Vec<Finding>) -> DeviceReport {
    let uuid = "679ee1d3-1095-d5a4-3f1b-b0cc79e99f21".parse().unwrap();
    DeviceReport { ordinal, name: "NVIDIA H200".to_owned(), uuid, findings }
}

fn working() -> DoctorReport {
    let environment = Environment {
        kernel: "Linux 6.18.0 x86_64".to_owned(),
        module: Some("580.159".to_owned()),
        ..Environment::default()
    };
    let mut driver = Finding::new("driver", Status::Ok, "The driver starts.");
    driver.us = Some(103_990);
    let export = Finding::new("export", Status::Ok, "Memory becomes a descriptor.");
    let copy = Finding::new("memory", Status::Ok, "It is created, mapped and copied.");
    let required = vec!["driver".to_owned(), "export".to_owned()];
    DoctorReport {
        tool: "vmmfd 0.1.0".to_owned(),
        made: "2026-11-21T16:00:00Z".to_owned(),
        machine: vec![driver],
        devices: vec![device(
            0,
            vec![
                with(copy, json!({ "bytes": 2_097_152, "copy_gb_per_s": 55.25 })),
                with(export, json!({ "anchored_us": 14, "export_us": 565.5, "names": ["x"] })),
            ],
        )],
        verdict: "VMM fd sharing works on 1 of 1 GPUs".to_owned(),
        ..DoctorReport::new(Backend::Cuda, environment, required)
    }
}

fn failing() -> DoctorReport {
    let mut report = working();
    let mut fabric = Finding::new("fabric", Status::Failed, "Fabric handles can't be made.");
    fabric.error = Some(ErrorDetails {
        call: Some("cuMemCreate".to_owned()),
        code: Some(800),
        name: Some("CUDA_ERROR_NOT_PERMITTED".to_owned()),
        ..ErrorDetails::new("driver", "cuMemCreate failed: CUDA_ERROR_NOT_PERMITTED (800)".to_owned())
    });
    fabric.cause = Some("There is no IMEX channel.".to_owned());
    fabric.remedy = Some("Make one, and give it to each container that is to share memory.".to_owned());
    let pool = Finding::new("pool", Status::Unsupported, "The device has no pools.");
    let event = Finding::new("event", Status::Skipped, "The round trip failed.");
    report.devices[0].findings = vec![fabric, pool, event];
    (report.verdict, report.exit_code) = ("VMM fd sharing works on 0 of 1 GPUs".to_owned(), 1);
    report
}

fn two() -> DoctorReport {
    let mut report = working();
    let memory = || vec![Finding::new("memory", Status::Ok, "It works.")];
    report.devices = vec![device(0, memory()), device(1, memory())];
    let pair = |device, owner, gb: f64| {
        let peer = Finding::new("peer", Status::Ok, "It is mapped and read.");
        PairReport { device, owner, findings: vec![with(peer, json!({ "gb_per_s": gb }))] }
    };
    report.pairs = vec![pair(0, 1, 395.0), pair(1, 0, 394.4)];
    report.peer = Some(Environment { kernel: "Linux 5.4.0 aarch64".to_owned(), ..Environment::default() });
    report
}

fn text(report: &DoctorReport) -> String {
    render(report, false)
}

/// The text after the environment.
fn body(text: &str) -> &str {
    text.split_once("\n\nmachine\n").unwrap().1
}

#[test]
fn successful_report() {
    let want = "\
vmmfd 0.1.0 doctor, 2026-11-21T16:00:00Z, backend cuda: the NVIDIA driver

environment
  kernel         Linux 6.18.0 x86_64
  module         580.159
  nodes          none
  IMEX channels  none
  /dev/shm       unknown

machine
  ✓ driver  The driver starts. (in 104 ms)

device 0: NVIDIA H200 GPU-679ee1d3
  ✓ memory  It is created, mapped and copied. (2 MiB, copy 55.2 GB/s)
  ✓ export  Memory becomes a descriptor. (anchored 14 us, export 566 us)

required for the verdict:  driver, export
VMM fd sharing works on 1 of 1 GPUs
";
    assert_eq!(text(&working()), want);
}

#[test]
fn failures_show_error_cause_and_remedy() {
    let want = "  ✓ driver  The driver starts. (in 104 ms)

device 0: NVIDIA H200 GPU-679ee1d3
  ✗ fabric  Fabric handles can't be made.
            error   cuMemCreate failed: CUDA_ERROR_NOT_PERMITTED (800)
            cause   There is no IMEX channel.
            remedy  Make one, and give it to each container that is to share memory.
  – pool    The device has no pools.
  · event   The round trip failed.

required for the verdict:  driver, export
VMM fd sharing works on 0 of 1 GPUs
";
    assert_eq!(body(&text(&failing())), want);
}

#[test]
fn pairs_and_peer_have_sections() {
    let text = text(&two());
    assert!(text.contains("\n\nenvironment of the peer\n  kernel         Linux 5.4.0 aarch64\n"), "{text}");
    let (_, pairs) = text.split_once("\n\ndevice 0 with the memory of device 1\n").unwrap();
    let want = "  ✓ peer    It is mapped and read. (395 GB/s)

device 1 with the memory of device 0
  ✓ peer    It is mapped and read. (394 GB/s)

";
    assert!(pairs.starts_with(want), "{pairs}");
}

#[test]
fn host_report_names_no_gpu() {
    let mut report = working();
    report.backend = Backend::Host;
    let text = text(&report);
    assert!(text.lines().next().unwrap().ends_with("backend host: ordinary memory, NO GPU IS BEING TESTED"));
    assert!(text.contains(" 679ee1d3") && !text.contains("GPU-"));
}

#[test]
fn no_trailing_blanks() {
    let mut empty = working();
    empty.machine.push(Finding::new("aliases", Status::Ok, ""));
    for report in [working(), failing(), two(), empty] {
        let text = text(&report);
        assert!(text.lines().all(|line| line.trim_end() == line), "{text:?}");
    }
}

/// The text without colour codes.
fn without_colors(text: &str) -> String {
    let mut parts = text.split('\x1b');
    let mut without_colors = parts.next().unwrap().to_owned();
    for part in parts {
        without_colors += part.split_once('m').unwrap().1;
    }
    without_colors
}

#[test]
fn colour_is_optional_and_keeps_layout() {
    for report in [working(), failing(), two()] {
        let (bare, colored) = (text(&report), render(&report, true));
        assert!(!bare.contains('\x1b'));
        assert!(colored.contains("\x1b[32m✓\x1b[0m driver"), "{colored:?}");
        assert_eq!(without_colors(&colored), bare);
    }
    let failed = render(&failing(), true);
    assert!(failed.contains("\x1b[31m✗\x1b[0m") && failed.contains("\x1b[33m–\x1b[0m"), "{failed:?}");
    assert!(failed.ends_with("\x1b[31mVMM fd sharing works on 0 of 1 GPUs\x1b[0m\n"));
}

/// Appends text to every string of a value.
fn append_to_strings(value: &mut Value, evil: &str) {
    match value {
        Value::String(text) => text.push_str(evil),
        Value::Array(items) => items.iter_mut().for_each(|item| append_to_strings(item, evil)),
        Value::Object(fields) => {
            let figures = fields.get_mut("figures").and_then(Value::as_object_mut);
            figures.into_iter().for_each(|figures| drop(figures.insert(format!("name{evil}"), json!("value"))));
            let closed = ["backend", "uuid", "status"];
            fields.iter_mut().filter(|(name, _)| !closed.contains(&name.as_str())).for_each(|(_, value)| {
                append_to_strings(value, evil);
            });
        }
        _ => {}
    }
}

#[test]
fn control_characters_are_removed() {
    let mut report = failing();
    report.environment = serde_json::from_value(json!({
        "kernel": "k", "container": "c", "confidential": "c", "module": "m", "mps": "m", "visible_devices": "v",
        "library": { "path": "p", "file": "f" }, "library_path": "l", "uid": 1, "euid": 2, "user_namespace": true,
        "nodes": [{ "path": "p", "mode": "m", "uid": 1, "gid": 1, "usable": false }],
        "imex_channels": [{ "path": "p", "mode": "m", "uid": 1, "gid": 1, "usable": true }],
    }))
    .unwrap();
    report.peer = Some(report.environment.clone());
    report.machine.push(with(Finding::new("p", Status::Ok, "m"), json!({ "text": "t" })));
    let lines = text(&report).lines().count();
    let mut value = serde_json::to_value(&report).unwrap();
    append_to_strings(&mut value, "\x1b[2J\r\n\t\u{202e}\u{9b}31m");
    let evil: DoctorReport = serde_json::from_value(value).unwrap();
    let text = text(&evil);
    let unfit = |c: char| c.is_control() && c != '\n' || c == '\u{202e}';
    assert!(!text.contains(unfit), "{text:?}");
    assert_eq!(text.lines().count(), lines, "{text}");
}

#[test]
fn long_names_keep_columns() {
    let mut report = working();
    report.machine.push(Finding::new(&"x".repeat(1000), Status::Ok, "It works."));
    let text = text(&report);
    assert!(text.contains(&format!("  ✓ {:<MAX_COLUMN$}  The driver starts.", "driver")), "{text}");
}

#[test]
fn huge_reports_are_truncated() {
    let long = "x".repeat(70_000);
    let words = "word ".repeat(70_000);
    let mut report = failing();
    report.environment.kernel = words.clone();
    report.required = vec![long.clone(); 100];
    (report.tool, report.made, report.verdict) = (long.clone(), long.clone(), words.clone());
    let mut worst = with(Finding::new(&long, Status::Failed, &words), json!({ long.clone(): words.clone() }));
    (worst.cause, worst.remedy) = (Some(words.clone()), Some(words.clone()));
    report.machine.push(worst);
    report.devices[0].name = words;
    for color in [false, true] {
        let text = render(&report, color);
        assert!(text.len() < 200_000, "{}", text.len());
        assert!(text.contains(&format!(" {}…  word", &long[..MAX_COLUMN - 1])), "{text}");
    }
}

#[test]
fn truncation_is_marked() {
    assert_eq!(
        ["", "abc", "äöüß", "abcde", "ab cde"].map(|text| truncated(text, 4)),
        ["", "abc", "äöüß", "abc…", "ab…"]
    );
}

#[test]
fn figures_have_units() {
    for (name, value, text) in [
        ("export_us", json!(14), "export 14 us"),
        ("us", json!(14), "14 us"),
        ("status", json!(3), "status 3"),
        ("free_before_bytes", json!(1_610_612_736_u64), "free before 1.5 GiB"),
        ("lost_bytes", json!(-5), "lost -5 bytes"),
        ("read_gb_per_s", json!(4280.7), "read 4281 GB/s"),
        ("dma_buf", json!(true), "dma buf yes"),
        ("inode", json!("a  b"), "inode a b"),
    ] {
        assert_eq!(figure(name, &value).as_deref(), Some(text));
    }
    for silent in [json!(null), json!([1]), json!({ "a": 1 })] {
        assert_eq!(figure("list", &silent), None);
    }
}

#[test]
fn parsed_report_prints_the_same() {
    for report in [working(), failing(), two()] {
        let back: DoctorReport = serde_json::from_str(&serde_json::to_string(&report).unwrap()).unwrap();
        assert_eq!(text(&back), text(&report));
    }
}
