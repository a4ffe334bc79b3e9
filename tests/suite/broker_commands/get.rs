//! `vmmfd get`.

use std::{ffi::OsStr, os::unix::ffi::OsStrExt};

use super::*;

cases! {
    on crate::broker_commands::Broker; host and cuda: [
    object_outlives_its_process,
    absent_objects_exit_with_1,
    get_waits_for_the_object,
    expected_metadata_must_be_there,
    range_within_the_object_is_written,
    bytes_of_wrong_digest_stay_unwritten,
    several_parts_need_a_choice,
    one_array_is_written_alone,
    ]
}

fn blake3(bytes: &[u8]) -> String {
    // `check::files` computes the digest independently of the loader, whose own digest is under test here.
    let digest = vmmfd_cli::check::files::read(&memory(bytes), 0, 0..bytes.len() as u64, &mut |_| Ok(())).unwrap();
    digest.strip_prefix("blake3:").unwrap().to_owned()
}

fn object_outlives_its_process(broker: Broker) {
    let bytes = data(5_000_003);
    let put = broker.put("models/tiny", &bytes, &["--digest", "--meta", r#"{"engine": "x"}"#]);
    assert_eq!((&put["name"], &put["version"], &put["size"]), (&json!("models/tiny"), &json!(1), &json!(5_000_003)));
    let digest = json!(format!("blake3:{}", blake3(&bytes)));
    assert_eq!((&put["backend"], &put["digest"]), (&json!(broker.place.backend()), &digest));

    let copy = broker.place.folder().join("copy");
    let got = broker.json(&["get", "models/tiny", "--to", text(&copy)]);
    assert_eq!(fs::read(&copy).unwrap(), bytes);
    assert_eq!((&got["verified"], &got["to"], &got["id"]), (&json!(true), &json!(text(&copy)), &put["id"]));
    assert_eq!((&got["metadata"], &got["parts"][0]["expected"]), (&json!({"engine": "x"}), &digest));
    // An existing file is replaced only with `--force`.
    assert!(broker.refusal(&["get", "models/tiny", "--to", text(&copy)], 2, "usage").contains("--force"));
    broker.end(&["get", "models/tiny", "--to", text(&copy), "--force"]).code(0);

    let listed = &broker.json(&["ls"])["objects"][0];
    assert_eq!((&listed["name"], &listed["size"], &listed["leases"]), (&put["name"], &put["size"], &json!(0)));
    assert_eq!((&listed["devices"], &listed["backend"]), (&json!([put["device"]]), &put["backend"]));
    assert_eq!(listed["owner"]["uid"], nix::unistd::geteuid().as_raw());
    let stat = broker.json(&["stat", "models/tiny"]);
    assert_eq!((&stat["summary"], &stat["metadata"]), (listed, &json!({"engine": "x"})));
    assert_eq!((&stat["parts"][0]["digest"], &stat["versions"]), (&digest, &json!([1])));
    assert_eq!(stat["parts"][0]["maker"]["command"], "vmmfd");
    assert_eq!(broker.end(&["ls"]).code(0).stdout, "models/tiny\n");
    assert_eq!(broker.end(&["ls", "models/u"]).code(0).stdout, "");
}

fn absent_objects_exit_with_1(broker: Broker) {
    broker.put("a", &data(10), &[]);
    let copy = broker.place.folder().join("copy");
    for arguments in [
        &["get", "b", "--to", text(&copy)][..],
        &["get", "a", "--version", "9"],
        &["get", "a", "--part", "rank0"],
        &["stat", "b"],
        &["rm", "b"],
    ] {
        broker.refusal(arguments, 1, "object");
    }
    // A failed get leaves no file.
    let files = broker.place.files();
    assert!(!files.iter().any(|file| file == "copy" || file.starts_with(".vmmfd-")), "{files:?}");
}

fn get_waits_for_the_object(broker: Broker) {
    broker.refusal(&["get", "late", "--wait", "50ms"], 4, "peer");
    let copy = broker.place.folder().join("copy");
    let waiting = broker.run(&["get", "late", "--wait", "10m", "--to", text(&copy)]).start();
    // The command creates its temporary file before it sends the request.
    wait_for("the file", || broker.place.files().iter().any(|file| file.starts_with(".vmmfd-")));
    broker.put("late", &data(1000), &[]);
    waiting.end().code(0);
    assert_eq!(fs::read(&copy).unwrap(), data(1000));
    // A signal cancels a wait.
    let waiting = broker.run(&["get", "never", "--wait", "10m"]).start();
    wait_for("the notice", || waiting.so_far().contains("notice: waiting for `never` to be put, for at most 600s\n"));
    waiting.signal(Signal::SIGINT);
    let ended = waiting.end();
    assert_eq!(ended.code(130).stderr.matches("notice: ").count(), 1, "{}", ended.stderr);
}

fn expected_metadata_must_be_there(broker: Broker) {
    broker.put("a", &data(10), &["--meta", r#"{"engine": "x", "layout": {"tp": 8}}"#]);
    broker.json(&["get", "a", "--expect", r#"{"layout": {"tp": 8}}"#]);
    let differs = broker.refusal(&["get", "a", "--expect", r#"{"engine": "y"}"#], 1, "object");
    assert!(differs.contains("engine"), "{differs}");
    broker.refusal(&["get", "a", "--expect", r#"{"quantisation": "fp8"}"#], 1, "object");
}

fn range_within_the_object_is_written(broker: Broker) {
    let bytes = data(5_000_003);
    broker.put("a", &bytes, &["--chunk", "2MiB", "--digest"]);
    let copy = broker.place.folder().join("copy");
    let got = broker.json(&["get", "a", "--range", "3MiB:100", "--to", text(&copy)]);
    let start = 3 << 20;
    assert_eq!(fs::read(&copy).unwrap(), bytes[start..start + 100]);
    let part = &got["parts"][0];
    assert_eq!((&part["offset"], &part["length"], &part["segments"]), (&json!(start), &json!(100), &json!(3)));
    // The digest covers the whole object, so a range can't be verified.
    assert_eq!((&got["verified"], &part["verified"]), (&json!(null), &json!(null)));
    assert_eq!(broker.json(&["get", "a", "--range", "0:5000003"])["verified"], true);
    let beyond = broker.refusal(&["get", "a", "--range", "5000000:4"], 1, "object");
    assert!(beyond.contains("which has 4.7 MiB (5000003 bytes)"), "{beyond}");
}

fn bytes_of_wrong_digest_stay_unwritten(broker: Broker) {
    let memory = memory(&data(1000));
    let wrong = format!("blake3:{}", "0".repeat(64));
    for (name, digest) in [("wrong", wrong.as_str()), ("unknown", "md5:0")] {
        let part = PutPart::of("all", &memory).unwrap().digest(digest);
        broker.client().put(&Put::new(name).part(part)).unwrap();
    }
    let copy = broker.place.folder().join("copy");
    let ended = broker.end(&["get", "wrong", "--backend", "auto", "--to", text(&copy), "--json"]);
    let got = ended.code(1).json();
    let fields = (&got["error"]["kind"], &got["verified"], &got["to"]);
    assert_eq!(fields, (&json!("mismatch"), &json!(false), &json!(null)));
    ended.says("did not verify").says(&wrong);
    assert!(!copy.exists());
    // The maker sees the report.
    wait_for("the report", || broker.json(&["stat", "wrong"])["reports"].as_array().unwrap().len() == 1);
    let report = &broker.json(&["stat", "wrong"])["reports"][0];
    assert!(report["message"].as_str().unwrap().contains(&format!("its maker gave {wrong}")), "{report}");
    // A digest of an unknown kind can't be verified, which is not a mismatch.
    assert_eq!(broker.json(&["get", "unknown", "--backend", "auto"])["verified"], json!(null));
}

fn several_parts_need_a_choice(broker: Broker) {
    let parts = [memory(&data(10)), memory(&data(20))];
    let parts = parts.iter().zip(["rank0", "rank1"]).map(|(memory, name)| PutPart::of(name, memory).unwrap());
    broker.client().put(&parts.fold(Put::new("a"), Put::part)).unwrap();
    let copy = broker.place.folder().join("copy");
    let to = ["get", "a", "--backend", "auto", "--to", text(&copy)];
    let several = broker.refusal(&to, 2, "usage");
    assert!(several.contains("2 parts (rank0, rank1)") && several.contains("--part") && !copy.exists(), "{several}");
    broker.json(&[&to[..], &["--part", "rank1"]].concat());
    assert_eq!(fs::read(&copy).unwrap(), data(20));
    broker.refusal(&["get", "a", "--backend", "auto", "--range", "0:5"], 2, "usage");
}

fn one_array_is_written_alone(broker: Broker) {
    let file = broker.place.folder().join("model.safetensors");
    let written = [tensor("a", "F32", &[5], 20), tensor("b", "BF16", &[3 << 20], 6 << 20), tensor("e", "U8", &[0], 0)];
    weights::write(&file, &written, json!({}));
    broker.json(&["put", "m", "--safetensors", text(&file), "--chunk", "2MiB", "--digest"]);
    let copy = broker.place.folder().join("copy");
    for (name, of) in ["a", "b"].into_iter().zip(&written) {
        let got = broker.json(&["get", "m", "--array", name, "--to", text(&copy), "--force"]);
        assert!(fs::read(&copy).unwrap() == of.bytes, "{name}");
        let part = &got["parts"][0];
        assert_eq!((&part["length"], &part["verified"]), (&json!(of.bytes.len()), &json!(null)));
    }
    let none = broker.refusal(&["get", "m", "--array", "layer", "--to", text(&copy), "--force"], 1, "object");
    assert!(none.contains("has no array layer; its arrays are a, b, e (3 in all)"), "{none}");
    assert!(broker.refusal(&["get", "m", "--array", "e"], 2, "usage").contains("is empty"));
    broker.refusal(&["get", "m", "--array", "a", "--range", "0:5"], 2, "usage");
    // A column of a matrix is not contiguous.
    let memory = memory(&data(1000));
    let mut matrix = ArrayDescriptor::new("uint8".parse::<ElementType>().unwrap(), [10, 10], Order::C).unwrap();
    matrix.offset = 100;
    let column = matrix.slice(1, 2..3, 1).unwrap();
    let part = PutPart::of("all", &memory).unwrap().arrays([ArrayEntry::new("column", column)]);
    broker.client().put(&Put::new("matrix").part(part)).unwrap();
    let gaps = broker.refusal(&["get", "matrix", "--array", "column", "--backend", "auto"], 2, "usage");
    assert!(gaps.contains("--range 102:91"), "{gaps}");
}

#[test]
fn file_names_need_no_utf8() {
    let broker = Broker::host();
    let named = |name: &[u8]| broker.place.folder().join(OsStr::from_bytes(name));
    let with = |arguments: &[&str], file: &Path| {
        let mut run = broker.run(arguments);
        run.command.arg(file);
        run.end().code(0);
    };
    let (from, to) = (named(b"from\xff"), named(b"to\xff"));
    fs::write(&from, b"bytes").unwrap();
    with(&["put", "a", "--from"], &from);
    with(&["get", "a", "--to"], &to);
    assert_eq!(fs::read(&to).unwrap(), b"bytes");
}
