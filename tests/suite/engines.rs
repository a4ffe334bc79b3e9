//! `--verify` of both commands: the engine that writes and checks the pattern, and its report.

use crate::support::prelude::*;

cases! {
    on crate::running::Meeting; gpus alone: [
    engines_of_both_sides_may_differ,
    ]
}

/// The engine of each step that reports one.
fn by(report: &Value) -> Vec<(&str, &str)> {
    let steps = report["steps"].as_array().unwrap().iter();
    steps.filter_map(|step| Some((step["name"].as_str()?, step.get("by")?.as_str()?))).collect()
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
