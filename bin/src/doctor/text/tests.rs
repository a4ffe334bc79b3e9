use std::collections::BTreeMap;

use serde_json::json;

use super::*;
use crate::{
    doctor::report::{DeviceReport, PairReport},
    schema::VERSION,
};

fn finding(probe: &str, status: Status, meaning: &str) -> Finding {
    Finding {
        probe: probe.to_owned(),
        status,
        us: None,
        figures: BTreeMap::new(),
        error: None,
        meaning: meaning.to_owned(),
        cause: None,
        remedy: None,
        rule: None,
    }
}

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
    let mut driver = finding("driver", Status::Ok, "The driver starts.");
    driver.us = Some(103_990);
    let export = finding("export", Status::Ok, "Memory becomes a descriptor.");
    let copy = finding("memory", Status::Ok, "It is created, mapped and copied.");
    DoctorReport {
        schema: VERSION,
        tool: "vmmfd 0.1.0".to_owned(),
        made: "2026-11-21T16:00:00Z".to_owned(),
        backend: Backend::Cuda,
        environment,
        peer: None,
        required: vec!["driver".to_owned(), "export".to_owned()],
        machine: vec![driver],
        devices: vec![device(
            0,
            vec![
                with(copy, json!({ "bytes": 2_097_152, "copy_gb_per_s": 55.25 })),
                with(export, json!({ "anchored_us": 14, "export_us": 565.5, "names": ["x"] })),
            ],
        )],
        pairs: Vec::new(),
        verdict: "VMM fd sharing works on 1 of 1 GPUs".to_owned(),
        exit_code: 0,
    }
}

fn failing() -> DoctorReport {
    let mut report = working();
    let mut fabric = finding("fabric", Status::Failed, "Fabric handles can't be made.");
    fabric.error = Some(ErrorDetails {
        call: Some("cuMemCreate".to_owned()),
        code: Some(800),
        name: Some("CUDA_ERROR_NOT_PERMITTED".to_owned()),
        ..ErrorDetails::new("driver", "cuMemCreate failed: CUDA_ERROR_NOT_PERMITTED (800)".to_owned())
    });
    fabric.cause = Some("There is no IMEX channel.".to_owned());
    fabric.remedy = Some("Make one, and give it to each container that is to share memory.".to_owned());
    let pool = finding("pool", Status::Unsupported, "The device has no pools.");
    let event = finding("event", Status::Skipped, "The round trip failed.");
    report.devices[0].findings = vec![fabric, pool, event];
    (report.verdict, report.exit_code) = ("VMM fd sharing works on 0 of 1 GPUs".to_owned(), 1);
    report
}

fn two() -> DoctorReport {
    let mut report = working();
    let memory = || vec![finding("memory", Status::Ok, "It works.")];
    report.devices = vec![device(0, memory()), device(1, memory())];
    let pair = |device, owner, gb: f64| {
        let peer = finding("peer", Status::Ok, "It is mapped and read.");
        PairReport { device, owner, findings: vec![with(peer, json!({ "gb_per_s": gb }))] }
    };
    report.pairs = vec![pair(0, 1, 395.0), pair(1, 0, 394.4)];
    report.peer = Some(Environment { kernel: "Linux 5.4.0 aarch64".to_owned(), ..Environment::default() });
    report
}

fn text(report: &DoctorReport) -> String {
    render(report, Style::default())
}

/// What follows the environment.
fn body(text: &str) -> &str {
    text.split_once("\n\nmachine\n").unwrap().1
}

#[test]
fn a_report_where_all_works() {
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

device 0: NVIDIA H200 GPU-679ee1d3-1095-d5a4-3f1b-b0cc79e99f21
  ✓ memory  It is created, mapped and copied. (2 MiB, copy 55.2 GB/s)
  ✓ export  Memory becomes a descriptor. (anchored 14 us, export 566 us)

required for the verdict:  driver, export
VMM fd sharing works on 1 of 1 GPUs
";
    assert_eq!(text(&working()), want);
}

#[test]
fn a_failure_is_followed_by_its_error_cause_and_remedy() {
    let want = "  ✓ driver  The driver starts. (in 104 ms)

device 0: NVIDIA H200 GPU-679ee1d3-1095-d5a4-3f1b-b0cc79e99f21
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
fn two_devices_have_their_pairs_and_two_ends_their_environments() {
    let text = text(&two());
    assert!(text.contains("\n\nenvironment of the other end\n  kernel         Linux 5.4.0 aarch64\n"), "{text}");
    let (_, pairs) = text.split_once("\n\ndevice 0 with the memory of device 1\n").unwrap();
    let want = "  ✓ peer    It is mapped and read. (395 GB/s)

device 1 with the memory of device 0
  ✓ peer    It is mapped and read. (394 GB/s)

";
    assert!(pairs.starts_with(want), "{pairs}");
}

#[test]
fn host_memory_never_passes_for_a_gpu() {
    let mut report = working();
    report.backend = Backend::Host;
    let text = text(&report);
    assert!(text.lines().next().unwrap().ends_with("backend host: ordinary memory, NO GPU IS BEING TESTED"));
    assert!(text.contains(" HOST-679ee1d3") && !text.contains("GPU-"));
}

#[test]
fn long_lines_are_folded_beside_their_label() {
    let style = Style { color: false, width: Some(60) };
    let text = render(&failing(), style);
    let want = "            remedy  Make one, and give it to each container\n\
            \x20                   that is to share memory.\n";
    assert!(text.contains(want), "{text}");
    let mut folded = text.lines().filter(|line| line.starts_with(' '));
    assert!(folded.all(|line| line.chars().count() <= 60), "{text}");
    assert_eq!(text.lines().last(), Some("VMM fd sharing works on 0 of 1 GPUs"));
}

#[test]
fn the_verdict_is_one_line_however_narrow() {
    let mut report = working();
    report.verdict = "a long verdict\nof two lines".to_owned();
    let text = render(&report, Style { color: false, width: Some(1) });
    assert!(text.ends_with("\na long verdict of two lines\n"), "{text}");
}

#[test]
fn no_line_ends_in_a_blank() {
    let mut empty = working();
    empty.machine.push(finding("aliases", Status::Ok, ""));
    for report in [working(), failing(), two(), empty] {
        for width in [None, Some(1), Some(40), Some(120)] {
            let text = render(&report, Style { color: false, width });
            assert!(text.lines().all(|line| line.trim_end() == line), "{text:?}");
        }
    }
}

/// The text without colour codes.
fn faded(text: &str) -> String {
    let mut parts = text.split('\x1b');
    let mut faded = parts.next().unwrap().to_owned();
    for part in parts {
        faded += part.split_once('m').unwrap().1;
    }
    faded
}

#[test]
fn colour_is_there_only_if_asked_for_and_moves_nothing() {
    for report in [working(), failing(), two()] {
        for width in [None, Some(60)] {
            let bare = render(&report, Style { color: false, width });
            assert!(!bare.contains('\x1b'));
            let colored = render(&report, Style { color: true, width });
            assert!(colored.contains("\x1b[32m✓\x1b[0m driver"), "{colored:?}");
            assert_eq!(faded(&colored), bare);
        }
    }
    let failed = render(&failing(), Style { color: true, width: None });
    assert!(failed.contains("\x1b[31m✗\x1b[0m") && failed.contains("\x1b[33m–\x1b[0m"), "{failed:?}");
    assert!(failed.ends_with("\x1b[31mVMM fd sharing works on 0 of 1 GPUs\x1b[0m\n"));
}

/// Appends a text to every text of a value.
fn everywhere(value: &mut Value, evil: &str) {
    match value {
        Value::String(text) => text.push_str(evil),
        Value::Array(items) => items.iter_mut().for_each(|item| everywhere(item, evil)),
        Value::Object(fields) => {
            let figures = fields.get_mut("figures").and_then(Value::as_object_mut);
            figures.into_iter().for_each(|figures| drop(figures.insert(format!("name{evil}"), json!("value"))));
            let closed = ["backend", "uuid", "status"];
            fields.iter_mut().filter(|(name, _)| !closed.contains(&name.as_str())).for_each(|(_, value)| {
                everywhere(value, evil);
            });
        }
        _ => {}
    }
}

#[test]
fn control_characters_of_a_report_do_not_reach_the_terminal() {
    let mut report = failing();
    report.environment = serde_json::from_value(json!({
        "kernel": "k", "container": "c", "confidential": "c", "module": "m", "mps": "m", "visible_devices": "v",
        "library": { "path": "p", "file": "f" }, "library_path": "l", "uid": 1, "euid": 2, "user_namespace": true,
        "nodes": [{ "path": "p", "mode": "m", "uid": 1, "gid": 1, "usable": false }],
        "imex_channels": [{ "path": "p", "mode": "m", "uid": 1, "gid": 1, "usable": true }],
    }))
    .unwrap();
    report.peer = Some(report.environment.clone());
    report.machine.push(with(finding("p", Status::Ok, "m"), json!({ "text": "t" })));
    let lines = text(&report).lines().count();
    let mut value = serde_json::to_value(&report).unwrap();
    everywhere(&mut value, "\x1b[2J\r\n\t\u{202e}\u{9b}31m");
    let evil: DoctorReport = serde_json::from_value(value).unwrap();
    let text = text(&evil);
    let unfit = |c: char| c.is_control() && c != '\n' || c == '\u{202e}';
    assert!(!text.contains(unfit), "{text:?}");
    assert_eq!(text.lines().count(), lines, "{text}");
}

#[test]
fn a_name_of_any_length_pushes_no_other_aside() {
    let mut report = working();
    report.machine.push(finding(&"x".repeat(1000), Status::Ok, "It works."));
    let text = text(&report);
    assert!(text.contains(&format!("  ✓ {:<MAX_COLUMN$}  The driver starts.", "driver")), "{text}");
}

#[test]
fn a_report_of_any_length_is_printed_in_few_characters() {
    let long = "x".repeat(70_000);
    let words = "word ".repeat(70_000);
    let mut report = failing();
    report.environment.kernel = words.clone();
    report.required = vec![long.clone(); 100];
    (report.tool, report.made, report.verdict) = (long.clone(), long.clone(), words.clone());
    let mut worst = with(finding(&long, Status::Failed, &words), json!({ long.clone(): words.clone() }));
    (worst.cause, worst.remedy) = (Some(words.clone()), Some(words.clone()));
    report.machine.push(worst);
    report.devices[0].name = words;
    for style in [Style::default(), Style { color: true, width: Some(1) }, Style { color: false, width: Some(80) }] {
        let text = render(&report, style);
        assert!(text.len() < 200_000, "{}", text.len());
        assert!(text.contains(&format!(" {}…  word", &long[..MAX_COLUMN - 1])), "{text}");
    }
}

#[test]
fn what_is_cut_says_so_and_what_fits_is_not_cut() {
    assert_eq!(["", "abc", "äöüß", "abcde", "ab cde"].map(|text| short(text, 4)), ["", "abc", "äöüß", "abc…", "ab…"]);
}

#[test]
fn figures_have_their_units() {
    let text = |name: &str, value: Value| figure(name, &value);
    assert_eq!(text("export_us", json!(14)).unwrap(), "export 14 us");
    assert_eq!(text("us", json!(14)).unwrap(), "14 us");
    assert_eq!(text("status", json!(3)).unwrap(), "status 3");
    assert_eq!(text("free_before_bytes", json!(1_610_612_736_u64)).unwrap(), "free before 1.5 GiB");
    assert_eq!(text("lost_bytes", json!(-5)).unwrap(), "lost -5 bytes");
    assert_eq!(text("read_gb_per_s", json!(4280.7)).unwrap(), "read 4281 GB/s");
    assert_eq!(text("dma_buf", json!(true)).unwrap(), "dma buf yes");
    assert_eq!(text("inode", json!("a  b")).unwrap(), "inode a b");
    for silent in [json!(null), json!([1]), json!({ "a": 1 })] {
        assert_eq!(text("list", silent), None);
    }
}

#[test]
fn a_report_read_back_prints_the_same() {
    for report in [working(), failing(), two()] {
        let back: DoctorReport = serde_json::from_str(&serde_json::to_string(&report).unwrap()).unwrap();
        assert_eq!(text(&back), text(&report));
    }
}
