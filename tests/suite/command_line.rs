//! Behaviour common to all commands: help, JSON, exit codes; and the small commands: devices, completions, man pages.

use crate::{running::schema_of, support::prelude::*};

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
fn json_prints_one_object_whatever_happens() {
    let meeting = Meeting::fake();
    let socket = meeting.socket();
    let socket = socket.to_str().unwrap();
    let none = tempfile::tempdir().unwrap();
    for (arguments, code, kind) in [
        (&["nope", "--json"][..], 2, "usage"),
        (&["--json"], 2, "usage"),
        (&["consume", "--nope", "--json"], 2, "usage"),
        (&["doctor", "--json", "--device", "9"], 3, "unsupported"),
        (&["sub", "--json", "--timeout", "100ms", "--at", socket, "--backend", "cuda"], 4, "peer"),
        (&["serve", "--json", "--socket", "/nonexistent/s.sock"], 2, "usage"),
        (&["get", "--json", "a", "--socket", socket], 4, "peer"),
        (&["rm", "--json"], 2, "usage"),
        (&["bench", "--json", "stages", "--device", "9"], 3, "unsupported"),
        (&["man", "--json"], 2, "usage"),
        (&["man", "--json", "/proc/nope"], 5, "system"),
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
    let mut unknown = vmmfd(&meeting, &["--json"]);
    unknown.command.arg(OsStr::from_bytes(b"\xff"));
    assert!(unknown.end().code(2).json()["command"].is_null());
    for arguments in [
        &["consume", "--backend", "host", "--to", "/nonexistent/out"][..],
        &["produce", "--backend", "host", "--from", "/nonexistent/out"],
        &["doctor", "--show", "/nonexistent/out"],
    ] {
        vmmfd(&meeting, arguments).end().code(2).says("/nonexistent");
    }
    // A path can't send escape sequences to a terminal.
    let ended = vmmfd(&meeting, &["doctor", "--show", "no\u{1b}[31mthing"]).end();
    assert!(!ended.code(2).stderr.contains('\u{1b}'), "{:?}", ended.stderr);
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
    for named in [&uuid, &short] {
        let report = meeting.producer(&["--device", named, "--json", "--timeout", "50ms"]).end().code(4).json();
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
fn installation_has_man_pages_and_completions() {
    let meeting = Meeting::host();
    let folder = meeting.folder().join("share/man");
    let listed = help(&meeting, &["man", folder.to_str().unwrap()]);
    for name in ["vmmfd.1", "vmmfd-who.1", "vmmfd-doctor.1", "producer.1", "consumer.1"] {
        assert!(folder.join(name).is_file() && listed.contains(name), "{name} in {listed}");
    }
    assert!(!listed.contains("child") && !listed.contains("help"), "{listed}");
    let page = fs::read_to_string(folder.join("vmmfd-produce.1")).unwrap();
    for words in [".TH", "mechanism", "memory pool", "Exit codes", "Examples", "vmmfd produce \\-\\-size 1.5GiB"] {
        assert!(page.contains(words), "no {words} in {page}");
    }
    let program = vmmfd(&meeting, &[]).command.get_program().to_owned();
    let prefix = meeting.folder().join("destination/usr");
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../scripts/install");
    let output = Command::new(script).arg(program).arg(&prefix).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    for (file, words) in [
        ("share/man/man1/vmmfd-doctor.1", ".TH"),
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
