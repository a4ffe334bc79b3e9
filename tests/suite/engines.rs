//! `--verify` of both commands: the engine that writes and checks the pattern, and its report.

use serde_json::{Value, json};

use crate::running::{Ended, Meeting};

cases! {
    on crate::running::Meeting; every backend: [
    small_buffers_default_to_the_host,
    ]
    gpus alone: [
    forced_engine_is_reported,
    engines_of_both_sides_may_differ,
    ]
}

#[track_caller]
fn line<'a>(ended: &'a Ended, step: &str) -> &'a str {
    let line = ended.stdout.lines().find(|line| line.split_whitespace().next() == Some(step));
    line.unwrap_or_else(|| panic!("no {step}: {}", ended.stdout))
}

/// The engine of each step that reports one.
fn by(report: &Value) -> Vec<(&str, &str)> {
    let steps = report["steps"].as_array().unwrap().iter();
    steps.filter_map(|step| Some((step["name"].as_str()?, step.get("by")?.as_str()?))).collect()
}

fn small_buffers_default_to_the_host(meeting: Meeting) {
    for options in [&["--json"][..], &["--json", "--verify", "auto"]] {
        let (producer, consumer) = meeting.pair(options, options);
        assert_eq!(by(&producer.code(0).json()), [("fill", "host")]);
        assert_eq!(by(&consumer.code(0).json()), [("verify", "host")]);
        assert_eq!((producer.stderr, consumer.stderr), (String::new(), String::new()));
    }
}

fn forced_engine_is_reported(meeting: Meeting) {
    for (engine, place) in [("host", ", on the CPU ("), ("gpu", ", on the GPU at ")] {
        let options = ["--verify", engine, "-v"];
        let (producer, consumer) = meeting.pair(&options, &options);
        for (ended, step) in [(&producer, "fill"), (&consumer, "verify")] {
            let line = line(ended.code(0), step);
            let (_, speed) = line.split_once(place).unwrap_or_else(|| panic!("{line}"));
            let unit = speed.split_whitespace().nth(1).unwrap();
            assert!(engine == "host" || ["GB/s", "TB/s"].contains(&unit), "{line}");
        }
        assert!(line(&consumer, "verify").contains("262144 words, 0 wrong, "), "{}", consumer.stdout);
    }
}

fn engines_of_both_sides_may_differ(meeting: Meeting) {
    // Not a multiple of the word size, so the last word is partial.
    let size = ["--round-trip", "--size", "1000003", "--json"];
    for (here, there) in [("gpu", "host"), ("host", "gpu")] {
        let (producer, consumer) =
            meeting.pair(&[&["--verify", here][..], &size].concat(), &["--verify", there, "--json"]);
        let (producer, consumer) = (producer.code(0).json(), consumer.code(0).json());
        assert_eq!(by(&producer), [("fill", here), ("verify", here)]);
        assert_eq!(by(&consumer), [("verify", there), ("fill", there)]);
        assert_eq!((&producer["verified"], &consumer["verified"]), (&json!(true), &json!(true)));
    }
    // A range may start inside a word.
    let (producer, consumer) = meeting.pair(&["--size", "100000"], &["--range", "3:5000", "--verify", "gpu", "--json"]);
    producer.code(0);
    assert_eq!(by(&consumer.code(0).json()), [("verify", "gpu")]);
}

#[test]
fn gpu_engine_on_host_is_unsupported() {
    let meeting = Meeting::host();
    let ended = meeting.producer(&["--verify", "gpu"]).end();
    let errors: Vec<&str> = ended.code(3).stderr.lines().filter(|line| line.starts_with("error: ")).collect();
    assert!(matches!(errors[..], [error] if error.contains("does not support kernels")), "{}", ended.stderr);
    assert!(meeting.files().is_empty());

    let producer = meeting.producer(&["--json"]).start();
    let consumer = meeting.consumer(&["--verify", "gpu", "--json"]).end();
    let report = consumer.code(3).json();
    assert_eq!(report["error"]["kind"], "unsupported", "{report}");
    assert!(report["error"]["message"].as_str().unwrap().contains("does not support kernels"), "{report}");
    // The other side receives the error and does not wait for the timeout.
    assert!(producer.end().code(4).json()["error"]["message"].as_str().unwrap().contains("kernels"));
}
