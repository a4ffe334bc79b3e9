//! `vmmfd put`.

use super::*;

cases! {
    on crate::broker_commands::Broker; host and cuda: [
    options_describe_the_array,
    weights_are_arrays_of_the_object,
    replacement_needs_an_option,
    options_about_the_name_are_kept,
    refusals_name_limit_and_next_step,
    ]
}

fn options_describe_the_array(broker: Broker) {
    let put = broker.put("a", &data(24), &["--dtype", "bf16", "--shape", "3x4", "--order", "F"]);
    assert_eq!((&put["array"]["dtype"], &put["array"]["shape"]), (&json!("bfloat16"), &json!([3, 4])));
    let got = broker.json(&["get", "a"]);
    assert_eq!((&got["parts"][0]["arrays"][0]["name"], &got["verified"]), (&json!("array"), &json!(null)));
    assert_eq!(got["parts"][0]["arrays"][0]["array"], put["array"]);
    let file = broker.file("input", &data(25));
    let wrong = broker.refusal(&["put", "b", "--from", text(&file), "--dtype", "bf16", "--shape", "3x4"], 2, "usage");
    assert!(wrong.contains("24 bytes, but the data has 25 bytes"), "{wrong}");
}

fn weights_are_arrays_of_the_object(broker: Broker) {
    let folder = broker.place.folder().join("model");
    fs::create_dir(&folder).unwrap();
    let written = [tensor("a", "F32", &[5], 20), tensor("b", "BF16", &[1 << 20, 2], 4 << 20)];
    weights::write(&folder.join("1.safetensors"), &written, json!({"format": "pt"}));
    weights::write(&folder.join("2.safetensors"), &[tensor("c", "U8", &[], 1)], json!({"format": "pt", "step": "7"}));
    let put = broker.json(&["put", "m", "--safetensors", text(&folder), "--meta", r#"{"engine": "x"}"#, "--digest"]);
    assert_eq!((&put["arrays"], &put["array"], &put["segments"]), (&json!(3), &json!(null), &json!(1)));
    let metadata = broker.json(&["stat", "m"])["metadata"].clone();
    assert_eq!(metadata, json!({"engine": "x", "safetensors": {"format": "pt", "step": "7"}}));
    let copy = broker.place.folder().join("copy");
    let got = broker.json(&["get", "m", "--to", text(&copy)]);
    assert_eq!(got["verified"], true);
    let arrays = got["parts"][0]["arrays"].as_array().unwrap();
    let of = |at: usize| (&arrays[at]["name"], &arrays[at]["array"]["dtype"], &arrays[at]["array"]["shape"]);
    assert_eq!(of(1), (&json!("b"), &json!("bfloat16"), &json!([1 << 20, 2])));
    let begin = arrays[1]["array"]["offset"].as_u64().unwrap() as usize;
    assert!(begin == 256 && fs::read(&copy).unwrap()[begin..][..4 << 20] == written[1].bytes);
    // Files in the given order, with another segment size; the caller's metadata overrides the same key.
    let files = ["2.safetensors", "1.safetensors"].map(|name| folder.join(name));
    let named = ["--safetensors", text(&files[0]), text(&files[1]), "--replace", "--chunk", "2MiB"];
    let put = broker.json(&[&["put", "m"][..], &named, &["--meta", r#"{"safetensors": 1}"#]].concat());
    assert_eq!((&put["segments"], &put["version"], &put["digest"]), (&json!(3), &json!(2), &json!(null)));
    assert_eq!(broker.json(&["stat", "m"])["metadata"], json!({"safetensors": 1}));
    assert_eq!(broker.json(&["get", "m"])["parts"][0]["arrays"][0]["name"], "c");
    // A file with an invalid header fails before the broker or a device is used.
    let lies = broker.file("lies.safetensors", b"\x02\0\0\0\0\0\0\0{}with more behind");
    let message = broker.refusal(&["put", "x", "--safetensors", text(&lies), "--device", "9"], 2, "usage");
    assert!(message.contains("its last 16 bytes belong to no tensor"), "{message}");
    weights::write(&lies, &[tensor("a", "U8", &[1], 1)], json!({ "much": "n".repeat(1 << 20) }));
    let message = broker.refusal(&["put", "x", "--safetensors", text(&lies)], 2, "usage");
    assert!(message.contains("the metadata has"), "{message}");
}

fn replacement_needs_an_option(broker: Broker) {
    let file = broker.file("data", &data(100));
    let file = text(&file);
    broker.put("a", &data(10), &[]);
    broker.end(&["put", "a", "--from", file]).code(1).says("`a` exists").says("hint: replace it with --replace");
    assert_eq!(broker.put("a", &data(20), &["--replace"])["version"], 2);
    // `--replace` also creates a new name.
    assert_eq!(broker.put("new", &data(20), &["--replace"])["version"], 1);
    broker.refusal(&["put", "a", "--from", file, "--if-version", "1"], 1, "object");
    assert_eq!(broker.put("a", &data(30), &["--if-version", "2", "--keep", "1"])["version"], 3);
    // Version 2 is kept, version 1 is not.
    let copy = broker.place.folder().join("copy");
    broker.json(&["get", "a", "--version", "2", "--to", text(&copy)]);
    assert_eq!(fs::read(&copy).unwrap(), data(20));
    broker.refusal(&["get", "a", "--version", "1"], 1, "object");
    assert_eq!(broker.json(&["stat", "a", "--version", "2"])["summary"]["size"], 20);
}

fn options_about_the_name_are_kept(broker: Broker) {
    broker.put("a", &data(10), &["--mode", "640", "--ttl", "2h", "--keep", "2"]);
    let stat = broker.json(&["stat", "a"]);
    assert_eq!((&stat["summary"]["mode"], &stat["keep"]), (&json!(0o640), &json!(2)));
    assert_eq!(stat["lifetime"], json!({"kind": "idle", "ms": 7_200_000}));
    let shown = broker.end(&["stat", "a"]);
    assert!(shown.code(0).stdout.contains("2h after its last lease"), "{}", shown.stdout);
    broker.put("a", &data(10), &["--replace", "--ttl", "never"]);
    let stat = broker.json(&["stat", "a"]);
    assert_eq!((&stat["summary"]["mode"], &stat["keep"]), (&json!(0o640), &json!(2)));
    assert_eq!((&stat["lifetime"], &stat["versions"]), (&json!({"kind": "deleted"}), &json!([1, 2])));
    // The object is deleted once its TTL expires and no lease holds it.
    broker.put("short", &data(10), &["--ttl", "1ms", "--mode", "666"]);
    wait_for("the end of the object", || broker.names() == ["a"]);
}

fn refusals_name_limit_and_next_step(broker: Broker) {
    let limited = broker.another(&["--quota", "objects=1,bytes=6MiB"]);
    let small = limited.file("small", &data(3 << 20));
    let large = limited.file("large", &data(7 << 20));
    let (small, large) = (text(&small), text(&large));
    let refused = |arguments: &[&str], code: i32, kind: &str, words: &str| {
        let message = limited.refusal(&[&["put"], arguments].concat(), code, kind);
        assert!(message.contains(words), "{arguments:?}: no {words:?} in {message}");
    };
    refused(&["a", "--from", large], 4, "peer", "but its quota is 6 MiB");
    refused(&["a", "--from", small, "--if-version", "1"], 1, "object", "does not exist");
    limited.json(&["put", "a", "--from", small]);
    limited.end(&["put", "b", "--from", small]).code(4).says("hint: delete what is not needed");
    let replace = ["a", "--from", small, "--replace"];
    refused(&[&replace[..], &["--mode", "644"]].concat(), 2, "usage", "which a replacement can't change");
    refused(&["a", "--from", large, "--replace"], 4, "peer", "a replacement needs room for both versions");
}
