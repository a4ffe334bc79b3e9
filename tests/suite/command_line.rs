//! Behaviour common to all commands: help, JSON, exit codes; and the small commands: devices, completions, man pages.
//!
//! One file of more than 500 lines: each test runs all commands.

use std::{collections::BTreeSet, fs, process::Command};

use serde_json::{Value, json};

use crate::{
    running::{Ended, Meeting, Run, schema_of},
    support::schema::mismatch,
};

fn vmmfd(meeting: &Meeting, arguments: &[&str]) -> Run {
    let mut run = meeting.bare("vmmfd").env("FAKECUDA_DEVICES", "1").env("FAKECUDA_FREE", "1073741824");
    run.command.args(arguments).env("TMPDIR", meeting.folder());
    run
}

fn help(meeting: &Meeting, arguments: &[&str]) -> String {
    vmmfd(meeting, arguments).end().code(0).stdout.clone()
}

#[test]
fn produce_and_consume_match_the_programs() {
    let meeting = Meeting::host();
    let mut producer = vmmfd(&meeting, &["produce", "--backend", "host", "--json", "--seed", "7"]);
    producer.command.arg("--socket").arg(meeting.socket());
    let producer = producer.start();
    let mut consumer = vmmfd(&meeting, &["consume", "--backend", "host", "--json"]);
    consumer.command.arg("--socket").arg(meeting.socket());
    let (consumer, producer) = (consumer.end().code(0).json(), producer.end().code(0).json());
    assert_eq!((&producer["role"], &consumer["role"]), (&json!("producer"), &json!("consumer")));
    // Both have the same options in the same groups, except `--version`.
    for (alone, part) in [("producer", "produce"), ("consumer", "consume")] {
        let mut run = meeting.bare(alone);
        run.command.arg("--help");
        let own = run.end().code(0).stdout.replace("  -V, --version", "");
        let own: Vec<&str> = own.lines().filter(|line| !line.contains("Print the version")).collect();
        let ours = help(&meeting, &[part, "--help"]).replace(&format!("vmmfd {part}"), alone);
        let squeezed = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(squeezed(&own.join("\n")), squeezed(&ours));
    }
}

#[test]
fn help_has_the_same_groups_everywhere() {
    let meeting = Meeting::host();
    const GROUPS: [&str; 7] = ["Object:", "Buffer:", "Array:", "Probes:", "Sharing:", "Meeting:", "Output:"];
    for arguments in [
        &["produce"][..],
        &["consume"],
        &["serve"],
        &["put"],
        &["get"],
        &["ls"],
        &["stat"],
        &["rm"],
        &["who"],
        &["doctor"],
        &["doctor", "serve"],
        &["doctor", "join"],
        &["devices"],
        &["bench"],
        &["completions"],
        &["man"],
        &["schema"],
    ] {
        for flag in ["-h", "--help"] {
            let text = help(&meeting, &[arguments, &[flag]].concat());
            let groups: Vec<&str> = text.lines().filter(|line| GROUPS.contains(line)).collect();
            let order = |group: &&str| GROUPS.iter().position(|known| known == group);
            assert!(groups.is_sorted_by_key(order) && groups.contains(&"Output:"), "{arguments:?}: {groups:?}");
            assert!(!text.lines().any(|line| line == "Options:"), "{text}");
            for words in
                ["--json", "-v, --verbose", "-q, --quiet", "-h, --help", "Exit codes:\n  0    ", "\n  2    bad usage\n"]
            {
                assert!(text.contains(words), "{arguments:?}: no {words:?} in {text}");
            }
            assert_eq!(too_wide(&text), None);
        }
    }
}

/// A line that is wider than 80 columns.
fn too_wide(text: &str) -> Option<&str> {
    text.lines().find(|line| line.chars().count() > 80)
}

#[test]
fn overview_has_groups_and_examples() {
    let meeting = Meeting::host();
    let bare = vmmfd(&meeting, &[]).end();
    let text = bare.code(2).stderr.clone();
    let headings: Vec<&str> = text.lines().filter_map(|line| line.strip_suffix(':')).collect();
    assert_eq!(headings, ["Try", "Broker", "Diagnose", "Advanced", "Options", "Examples"]);
    assert!(text.contains("\n  put          ") && text.contains("\n  vmmfd produce &\n"), "{text}");
    assert_eq!(too_wide(&text), None);
    for flag in ["-h", "--help"] {
        assert_eq!(help(&meeting, &[flag]), text);
    }
}

#[test]
fn help_lists_the_exit_codes_of_its_command() {
    let meeting = Meeting::host();
    for (command, expected) in [
        ("produce", &["0", "1", "2", "3", "4", "5", "130"][..]),
        ("serve", &["0", "2", "4", "5"]),
        ("ls", &["0", "2", "4", "5", "130"]),
        ("stat", &["0", "1", "2", "4", "5", "130"]),
        ("devices", &["0", "2", "3", "5", "130"]),
        ("bench", &["0", "1", "2", "3", "5", "130"]),
        ("schema", &["0", "2", "5"]),
    ] {
        let text = help(&meeting, &[command, "-h"]);
        let (_, codes) = text.split_once("Exit codes:\n").unwrap();
        let codes: Vec<&str> = codes.lines().filter_map(|line| line.split_whitespace().next()).collect();
        assert_eq!(codes, expected, "{command}");
    }
}

#[test]
fn help_of_a_command_is_its_long_help() {
    let meeting = Meeting::host();
    for command in [&[][..], &["put"], &["doctor", "serve"], &["bench"]] {
        let asked = help(&meeting, &[&["help"], command].concat());
        assert_eq!(asked, help(&meeting, &[command, &["--help"]].concat()));
        assert!(asked.contains("\nExamples:\n  vmmfd "), "{asked}");
    }
    let mut producer = meeting.bare("producer");
    producer.command.arg("--help");
    assert!(producer.end().code(0).stdout.contains("\nExamples:\n  producer --size "));
    vmmfd(&meeting, &["help", "nope"]).end().code(2).says("'nope'");
}

#[test]
fn unknown_words_get_a_suggestion() {
    let meeting = Meeting::host();
    for (arguments, tip) in [
        (&["delete"][..], "exists: 'rm'"),
        (&["list"], "exists: 'ls'"),
        (&["fetch"], "exists: 'get'"),
        (&["stats"], "exists: 'stat'"),
        (&["benhc"], "exists: 'bench'"),
        (&["gte"], "exists: 'get'"),
        (&["doctor", "serv"], "exists: 'serve'"),
        (&["produce", "--once"], "use '--consumers 1'"),
        (&["produce", "--count", "3"], "use '--consumers'"),
        (&["consume", "--once"], "'--consumers 1' is an option of 'vmmfd produce'"),
        (&["consume", "--count", "3"], "'--consumers' is an option of 'vmmfd produce'"),
        (&["consume", "--size", "1MiB"], "'--size' is an option of 'vmmfd produce'"),
        (&["put", "a", "file"], "use '--from file'"),
        (&["get", "a", "file"], "use '--to file'"),
        (&["get", "a", "-o", "file"], "use '--to'"),
        (&["put", "a", "--metadata", "{}"], "use '--meta'"),
        (&["put", "a", "--helpp"], "use '--help'"),
        (&["--socket", "a", "put"], "write '--socket' after the command"),
    ] {
        vmmfd(&meeting, arguments).end().code(2).says(tip);
        let value = vmmfd(&meeting, &[arguments, &["--json"]].concat()).end().json();
        assert!(value["error"]["message"].as_str().unwrap().contains(tip), "{value}");
    }
    // No suggestion is better than a wrong one: `--socket`.
    let none = vmmfd(&meeting, &["serve", "--once"]).end();
    assert!(!none.code(2).stderr.contains("--socket"), "{}", none.stderr);
    let mut consumer = meeting.bare("consumer");
    consumer.command.args(["--size", "1MiB"]);
    consumer.end().code(2).says("'--size' is an option of 'producer'").says("Usage: consumer [OPTIONS]");
}

#[test]
fn json_prints_one_object_whatever_happens() {
    let meeting = Meeting::fake();
    let socket = meeting.socket();
    let socket = socket.to_str().unwrap();
    let none = tempfile::tempdir().unwrap();
    for (arguments, code, kind) in [
        (&["nope", "--json"][..], 2, "usage"),
        (&["--json"], 2, "usage"),
        (&["produce", "--json", "--nope"], 2, "usage"),
        (&["consume", "--nope", "--json"], 2, "usage"),
        (&["doctor", "--json", "--nope"], 2, "usage"),
        (&["doctor", "--json", "--only", "nope"], 2, "usage"),
        (&["doctor", "--json", "--show", "/nonexistent"], 2, "usage"),
        (&["doctor", "serve", "--json"], 2, "usage"),
        (&["doctor", "--json", "--device", "9"], 3, "unsupported"),
        (&["doctor", "join", "--json", "--wait", "100ms", "--socket", socket], 4, "peer"),
        (&["devices", "--json", "stray"], 2, "usage"),
        (&["serve", "--json", "--quota", "nope"], 2, "usage"),
        (&["serve", "--json", "--socket", "/nonexistent/s.sock"], 2, "usage"),
        (&["put", "--json", "--from", "/nonexistent"], 2, "usage"),
        (&["put", "--json", "a", "--from", "/nonexistent"], 2, "usage"),
        (&["get", "--json", "a", "--range", "1"], 2, "usage"),
        (&["get", "--json", "a", "--socket", socket], 4, "peer"),
        (&["ls", "--json", "--socket", socket], 4, "peer"),
        (&["stat", "--json", "a", "--socket", socket], 4, "peer"),
        (&["rm", "--json"], 2, "usage"),
        (&["rm", "--json", "a", "--socket", socket], 4, "peer"),
        (&["who", "--json", "--socket", socket], 4, "peer"),
        (&["bench", "--json", "nope"], 2, "usage"),
        (&["bench", "--json", "stages", "--device", "9"], 3, "unsupported"),
        (&["completions", "--json", "nope"], 2, "usage"),
        (&["completions", "--json"], 2, "usage"),
        (&["man", "--json"], 2, "usage"),
        (&["man", "--json", "/proc/nope"], 5, "system"),
        (&["schema", "--json", "nope"], 2, "usage"),
        (&["produce", "--json", "--device", "9", "--socket", socket, "--backend", "cuda"], 3, "unsupported"),
        (&["consume", "--json", "--timeout", "100ms", "--socket", socket, "--backend", "cuda"], 4, "peer"),
        (&["produce", "--json", "--timeout", "100ms", "--socket", socket, "--backend", "cuda"], 4, "peer"),
    ] {
        let ended = vmmfd(&meeting, arguments).end();
        let value = ended.code(code).json();
        assert_eq!(value["error"]["kind"], kind, "{arguments:?}: {value}");
        let message = value["error"]["message"].as_str().unwrap();
        assert!(!message.is_empty() && !message.contains('\n'), "{arguments:?}: {message}");
        if !["produce", "consume", "nope", "--json"].contains(&arguments[0]) {
            assert_eq!(value["command"], arguments[0]);
        }
    }
    // Commands without a loadable driver.
    for (arguments, code) in [
        (&["bench", "--json", "--backend", "cuda"][..], 3),
        (&["devices", "--json", "--backend", "cuda"], 3),
        (&["doctor", "--json"], 1),
        (&["produce", "--json", "--backend", "cuda", "--socket", socket], 3),
    ] {
        // The loader looks here first and finds an invalid library, which the doctor treats as a broken driver.
        fs::write(none.path().join("libcuda.so.1"), "").unwrap();
        let ended = vmmfd(&meeting, arguments).env("LD_LIBRARY_PATH", none.path()).end();
        ended.code(code).json();
    }
    for arguments in [
        &["doctor", "--json", "--backend", "host"][..],
        &["doctor", "--json", "--list"],
        &["devices", "--json", "--backend", "host"],
        &["completions", "--json", "bash"],
        &["man", "--json", none.path().join("man").to_str().unwrap()],
    ] {
        let value = vmmfd(&meeting, arguments).end().code(0).json();
        assert!(value["error"].is_null(), "{value}");
    }
}

#[test]
fn bad_names_and_files_are_one_sentence() {
    use std::{ffi::OsStr, os::unix::ffi::OsStrExt};
    let meeting = Meeting::host();
    let mut man = vmmfd(&meeting, &["man", "--json"]);
    man.command.arg(meeting.folder().join(OsStr::from_bytes(b"\xff")));
    man.end().code(0).json();
    for json in [&[][..], &["--json"]] {
        let mut run = vmmfd(&meeting, &[]);
        run.command.arg(OsStr::from_bytes(b"\xff")).args(json);
        let ended = run.end();
        ended.code(2);
        assert!(json.is_empty() || ended.json()["command"].is_null());
    }
    for arguments in [
        &["consume", "--backend", "host", "--to", "/nonexistent/out"][..],
        &["produce", "--backend", "host", "--from", "/nonexistent/out"],
        &["doctor", "--show", "/nonexistent/out"],
    ] {
        vmmfd(&meeting, arguments).end().code(2).says("/nonexistent/out");
    }
    vmmfd(&meeting, &["produce", "--from", ""]).end().code(2).says("an empty name");
    vmmfd(&meeting, &["produce", "--allow-uid", "root"]).end().code(2).says("`root` is not a user's number");
    // A path can't send escape sequences to a terminal.
    let ended = vmmfd(&meeting, &["doctor", "--show", "no\u{1b}[31mthing"]).end();
    assert!(!ended.code(2).stderr.contains('\u{1b}'), "{:?}", ended.stderr);
}

#[test]
fn closed_terminal_interrupts_a_command() {
    let meeting = Meeting::fake();
    let run =
        vmmfd(&meeting, &["bench", "--json", "--backend", "cuda", "handoff"]).env("FAKECUDA_SLOW", "cuMemMap:3600000");
    let run = run.start();
    crate::running::wait_for("the processes", || meeting.processes().len() > 1);
    run.signal(nix::sys::signal::Signal::SIGHUP);
    let value = run.end().code(129).json();
    assert_eq!(value["error"]["kind"], "interrupted");
    assert!(!meeting.files().iter().any(|file| file.starts_with("vmmfd-bench")), "{:?}", meeting.files());
}

#[test]
fn interrupted_command_prints_one_object() {
    let meeting = Meeting::fake();
    let run = vmmfd(&meeting, &["doctor", "--json", "-v"]).env("FAKECUDA_SLOW", "cuMemPoolCreate:3600000").start();
    crate::running::wait_for("the probe's process", || meeting.processes().len() > 1);
    run.signal(nix::sys::signal::Signal::SIGINT);
    let value = run.end().code(130).json();
    assert_eq!((&value["command"], &value["error"]["kind"]), (&json!("doctor"), &json!("interrupted")));
}

#[test]
fn same_mistake_has_the_same_exit_code() {
    let meeting = Meeting::fake();
    let socket = meeting.socket();
    let socket = socket.to_str().unwrap();
    for backend in ["host", "cuda"] {
        for arguments in [&["produce", "--socket", socket][..], &["doctor"], &["bench", "stages"]] {
            let arguments = [arguments, &["--backend", backend, "--device", "9"]].concat();
            let ended = vmmfd(&meeting, &arguments).end();
            ended.code(3).says("device 9");
            // A hint for the host backend does not mention CUDA.
            assert!(backend == "cuda" || !ended.stderr.to_lowercase().contains("cuda"), "{}", ended.stderr);
        }
    }
    let long = "x".repeat(120);
    for arguments in [&["produce"][..], &["consume"], &["doctor", "serve"], &["doctor", "join"]] {
        let arguments = [arguments, &["--backend", "host", "--socket", &long]].concat();
        vmmfd(&meeting, &arguments).end().code(2).says("at most 107");
        let arguments = [&arguments[..arguments.len() - 1], &["/nonexistent/s.sock"]].concat();
        vmmfd(&meeting, &arguments).end().code(2).says("its folder");
    }
    for mechanism in ["pool", "legacy"] {
        let arguments = ["produce", "--backend", "host", "--socket", socket, "--mechanism", mechanism];
        let ended = vmmfd(&meeting, &arguments).end();
        ended.code(3);
        let hint = ended.stderr.lines().find(|line| line.trim().starts_with("hint: ")).unwrap().to_lowercase();
        assert!(!hint.contains("cuda") && !hint.contains("driver"), "{hint}");
    }
}

#[test]
fn devices_lists_sharing_support() {
    let meeting = Meeting::fake();
    let run = || vmmfd(&meeting, &["devices", "--backend", "cuda", "--json"]).env("FAKECUDA_DEVICES", "2");
    let report = run().end().code(0).json();
    let devices = report["devices"].as_array().unwrap();
    assert_eq!((devices.len(), &report["backend"]), (2, &json!("cuda")));
    for (ordinal, device) in devices.iter().enumerate() {
        assert_eq!(device["ordinal"], ordinal);
        assert_eq!((&device["granularity"], &device["free"]), (&json!(2_097_152), &json!(1_073_741_824)));
        for mechanism in ["vmm", "pool", "legacy"] {
            assert_eq!(device["sharing"][mechanism], json!({"works": true, "error": null}));
        }
    }
    // The command tests the export instead of trusting the driver's claim.
    let failing = run().env("FAKECUDA_FAIL", "cuMemExportToShareableHandle:1:304").end().code(0).json();
    let vmm = &failing["devices"][0]["sharing"]["vmm"];
    assert_eq!(vmm["works"], false);
    assert!(vmm["error"].as_str().unwrap().contains("cuMemExportToShareableHandle"), "{vmm}");
    // The text output contains each device's UUID: eight digits, or with `-v` all. Options accept both.
    let [text, verbose] = ["-q", "-v"].map(|option| vmmfd(&meeting, &["devices", "--backend", "cuda", option]).end());
    let word = |text: &Ended| {
        let mut words = text.code(0).stdout.split_whitespace();
        words.find(|word| word.starts_with("GPU-")).unwrap_or_else(|| panic!("{}", text.stdout)).to_owned()
    };
    let (short, uuid) = (word(&text), word(&verbose));
    assert_eq!(short, uuid[..12]);
    assert!(text.stdout.starts_with("0  ") && text.stdout.contains("1 GiB free"), "{}", text.stdout);
    let socket = meeting.socket();
    for named in [&uuid, &short] {
        let arguments = [
            "produce",
            "--backend",
            "cuda",
            "--device",
            named,
            "--json",
            "--timeout",
            "50ms",
            "--socket",
            socket.to_str().unwrap(),
        ];
        let report = vmmfd(&meeting, &arguments).end().code(4).json();
        assert_eq!(report["device"]["uuid"], uuid);
    }
    let host = vmmfd(&meeting, &["devices", "--backend", "host"]).end();
    assert!(
        host.code(0).stdout.starts_with("0  host memory ") && host.stdout.contains("pool     no: "),
        "{}",
        host.stdout
    );
}

#[test]
fn completions_know_the_values_of_options() {
    let meeting = Meeting::host();
    for (shell, words) in [
        ("bash", &["--mechanism", "vmm pool legacy", "bfloat16", "doctor", "--if-version"][..]),
        ("zsh", &["#compdef vmmfd", "legacy", "read-only-store"]),
        ("fish", &["complete -c vmmfd", "bfloat16"]),
    ] {
        let script = help(&meeting, &["completions", shell]);
        for word in words {
            assert!(script.contains(word), "{shell}: no {word}");
        }
        let file = meeting.folder().join(shell);
        fs::write(&file, &script).unwrap();
        // If the shell is installed, it checks the script's syntax.
        if let Ok(output) = Command::new(shell).arg("-n").arg(&file).output() {
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        }
    }
    let own = help(&meeting, &["completions", "bash", "--of", "producer"]);
    assert!(own.contains("_producer") && !own.contains("completions"));
}

#[test]
fn every_command_has_a_man_page() {
    let meeting = Meeting::host();
    let folder = meeting.folder().join("share/man");
    let listed = help(&meeting, &["man", folder.to_str().unwrap()]);
    let mut names: Vec<String> =
        fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    for name in [
        "vmmfd.1",
        "vmmfd-serve.1",
        "vmmfd-put.1",
        "vmmfd-who.1",
        "vmmfd-produce.1",
        "vmmfd-doctor.1",
        "vmmfd-doctor-serve.1",
        "producer.1",
        "consumer.1",
    ] {
        assert!(names.iter().any(|known| known == name) && listed.contains(name), "{name} in {names:?}");
    }
    assert!(!names.iter().any(|name| name.contains("child") || name.contains("help")), "{names:?}");
    let page = fs::read_to_string(folder.join("vmmfd-produce.1")).unwrap();
    for words in [".TH", "mechanism", "memory pool", "Exit codes", "Examples", "vmmfd produce \\-\\-size 1.5GiB"] {
        assert!(page.contains(words), "no {words} in {page}");
    }
}

#[test]
fn gpus_are_listed_in_order() {
    let meeting = Meeting::fake();
    // `export-cost` runs last, after every device has been probed.
    let doctor = ["doctor", "--json", "--only", "memory,export-cost,peer"];
    let report = vmmfd(&meeting, &doctor).env("FAKECUDA_DEVICES", "3").end().code(0).json();
    let devices: Vec<u64> =
        report["devices"].as_array().unwrap().iter().map(|d| d["ordinal"].as_u64().unwrap()).collect();
    assert_eq!(devices, (0..3).collect::<Vec<u64>>());
    let names = |findings: &Value| -> Vec<String> {
        findings.as_array().unwrap().iter().map(|finding| finding["probe"].as_str().unwrap().to_owned()).collect()
    };
    for device in report["devices"].as_array().unwrap() {
        assert_eq!(names(&device["findings"]), ["memory", "export-cost"]);
    }
    let pairs: Vec<(u64, u64)> = report["pairs"]
        .as_array()
        .unwrap()
        .iter()
        .map(|pair| {
            assert_eq!(pair["findings"][0]["status"], "ok", "{pair}");
            (pair["device"].as_u64().unwrap(), pair["owner"].as_u64().unwrap())
        })
        .collect();
    let all: Vec<(u64, u64)> = (0..3).flat_map(|a| (0..3).filter(move |b| *b != a).map(move |b| (a, b))).collect();
    assert_eq!(pairs, all);
    assert!(report["verdict"].as_str().unwrap().contains("3 of 3"), "{}", report["verdict"]);
}

fn schema(arguments: &[&str]) -> Ended {
    vmmfd(&Meeting::host(), &[&["schema"][..], arguments].concat()).end()
}

#[test]
fn every_json_report_has_a_schema() {
    let names = schema(&[]).code(0).stdout.clone();
    let names: BTreeSet<&str> = names.lines().collect();
    let help = help(&Meeting::host(), &["--help"]);
    let listed = help.split("Options:").next().unwrap();
    let commands = listed.lines().filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    let commands: Vec<&str> = commands.filter_map(|line| line.split_whitespace().next()).collect();
    assert!(commands.len() > 15, "{help}");
    // The keeper prints only failures, and help is text.
    for command in commands.into_iter().filter(|command| !["keeper", "help"].contains(command)) {
        assert!(names.contains(command), "{command} is not among {names:?}");
    }
    for name in &names {
        let document = schema_of(name);
        // The messages of a protocol have no number.
        if !["protocol", "broker"].contains(name) {
            assert_eq!(document["properties"]["schema"]["const"], 1, "{name}");
        }
        let report = schema(&[name, "--json"]).code(0).json();
        assert_eq!((&report["document"], report["names"].as_array().unwrap().len()), (&document, names.len()));
    }
    schema(&["--json"]).code(0).json();
    schema(&["nope"]).code(2).says("nope");
}

#[test]
fn schemas_refuse_reports_that_differ() {
    let report = || vmmfd(&Meeting::fake(), &["devices", "--json", "--backend", "cuda"]).end().json();
    let differs = |path: &str, value: Option<Value>| {
        let mut report = report();
        let (parent, field) = path.rsplit_once('/').unwrap();
        let parent = report.pointer_mut(parent).unwrap().as_object_mut().unwrap();
        match value {
            Some(value) => drop(parent.insert(field.to_owned(), value)),
            None => drop(parent.remove(field)),
        }
        mismatch(&schema_of("devices"), &report)
    };
    for (path, value) in [
        ("/schema", Some(json!(2))),
        ("/backend", Some(json!("moon"))),
        ("/devices/0/free", Some(json!(-1))),
        ("/devices/0/uuid", None),
        ("/devices/0/colour", Some(json!("red"))),
        ("/devices/0/sharing/vmm/works", Some(json!("yes"))),
    ] {
        let found = differs(path, value);
        assert!(found.is_some(), "{path}");
    }
}

#[test]
fn install_respects_the_prefix() {
    let meeting = Meeting::host();
    let program = vmmfd(&meeting, &[]).command.get_program().to_owned();
    let prefix = meeting.folder().join("destination/usr");
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../scripts/install");
    let output = Command::new(script).arg(program).arg(&prefix).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    for (file, words) in [
        ("share/man/man1/vmmfd.1", ".TH"),
        ("share/man/man1/vmmfd-doctor-serve.1", ".TH"),
        ("share/bash-completion/completions/vmmfd", "_vmmfd"),
        ("share/zsh/site-functions/_vmmfd", "#compdef vmmfd"),
        ("share/fish/vendor_completions.d/vmmfd.fish", "complete -c vmmfd"),
    ] {
        let text = fs::read_to_string(prefix.join(file)).unwrap_or_else(|error| panic!("{file}: {error}"));
        assert!(text.contains(words), "{file}");
    }
    let version = Command::new(prefix.join("bin/vmmfd")).arg("--version").output().unwrap();
    assert_eq!(String::from_utf8_lossy(&version.stdout), concat!("vmmfd ", env!("CARGO_PKG_VERSION"), "\n"));
    // Programs with generic names are not installed.
    assert_eq!(fs::read_dir(prefix.join("bin")).unwrap().count(), 1);
}
