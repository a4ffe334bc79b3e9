//! `vmmfd put`.

use super::*;

cases! {
    on crate::broker_commands::Broker; host and cuda: [
    options_describe_the_array,
    weights_are_arrays_of_the_object,
    replacement_needs_an_option,
    options_about_the_name_are_kept,
    refused_put_uses_no_device,
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
    let stat = broker.json(&["stat", "m"]);
    assert_eq!(stat["metadata"], json!({"engine": "x", "safetensors": {"format": "pt", "step": "7"}}));
    assert_eq!((&stat["parts"][0]["name"], &stat["parts"][0]["digest"]), (&json!("all"), &put["digest"]));
    let copy = broker.place.folder().join("copy");
    let got = broker.json(&["get", "m", "--to", text(&copy)]);
    assert_eq!(got["verified"], true);
    let arrays = got["parts"][0]["arrays"].as_array().unwrap();
    let names: Vec<&Value> = arrays.iter().map(|array| &array["name"]).collect();
    assert_eq!(names, ["a", "b", "c"]);
    assert_eq!(
        (&arrays[1]["array"]["dtype"], &arrays[1]["array"]["shape"]),
        (&json!("bfloat16"), &json!([1 << 20, 2]))
    );
    let copy = fs::read(&copy).unwrap();
    let begin = arrays[1]["array"]["offset"].as_u64().unwrap() as usize;
    assert_eq!(begin, 256);
    assert!(copy[begin..][..4 << 20] == written[1].bytes);
    // Files in the given order, with another segment size; the caller's metadata overrides the same key.
    let files = ["2.safetensors", "1.safetensors"].map(|name| folder.join(name));
    let named = ["--safetensors", text(&files[0]), text(&files[1]), "--replace", "--chunk", "2MiB"];
    let put = broker.json(&[&["put", "m"][..], &named, &["--meta", r#"{"safetensors": 1}"#]].concat());
    assert_eq!((&put["segments"], &put["version"], &put["digest"]), (&json!(3), &json!(2), &json!(null)));
    assert_eq!(broker.json(&["stat", "m"])["metadata"], json!({"safetensors": 1}));
    assert_eq!(broker.json(&["get", "m"])["parts"][0]["arrays"][0]["name"], "c");
    let shown = broker.end(&["put", "m", "--safetensors", text(&folder), "--replace"]);
    assert!(shown.code(0).stdout.contains(" of 3 arrays, "), "{}", shown.stdout);
    // A file with an invalid header fails before the broker or a device is used.
    let lies = broker.file("lies.safetensors", b"\x02\0\0\0\0\0\0\0{}with more behind");
    for (arguments, words) in [
        (&["put", "x", "--safetensors", text(&lies), "--device", "9"][..], "its last 16 bytes belong to no tensor"),
        (&["put", "x", "--safetensors", "/nonexistent/x"], "/nonexistent/x does not exist"),
        (&["put", "x", "--safetensors", "-"], "standard input"),
        (&["put", "x", "--safetensors", text(&folder), "--from", text(&lies)], "cannot be used with"),
        (&["put", "x", "--safetensors", text(&folder), "--dtype", "u8"], "cannot be used with"),
        (&["put", "x"], "--from"),
    ] {
        let message = broker.refusal(arguments, 2, "usage");
        assert!(message.contains(words), "{arguments:?}: no {words:?} in {message}");
    }
    let many = "n".repeat(1 << 20);
    weights::write(&lies, &[tensor("a", "U8", &[1], 1)], json!({ "much": many }));
    let message = broker.refusal(&["put", "x", "--safetensors", text(&lies)], 2, "usage");
    assert!(message.contains("the metadata has"), "{message}");
    assert_eq!(broker.names(), ["m"]);
}

fn replacement_needs_an_option(broker: Broker) {
    let file = broker.file("data", &data(100));
    let file = text(&file);
    broker.put("a", &data(10), &[]);
    let exists = broker.refusal(&["put", "a", "--from", file], 1, "object");
    assert!(exists.contains("`a`"), "{exists}");
    broker.end(&["put", "a", "--from", file]).code(1).says("hint: replace it with --replace");
    assert_eq!(broker.put("a", &data(20), &["--replace"])["version"], 2);
    // `--replace` also creates a new name.
    assert_eq!(broker.put("new", &data(20), &["--replace"])["version"], 1);
    let other = broker.refusal(&["put", "a", "--from", file, "--if-version", "1"], 1, "object");
    assert!(other.contains('2') && other.contains('1'), "{other}");
    assert_eq!(broker.put("a", &data(30), &["--if-version", "2", "--keep", "1"])["version"], 3);
    let absent = broker.refusal(&["put", "none", "--from", file, "--if-version", "1"], 1, "object");
    assert!(absent.contains("none"), "{absent}");
    // Version 2 is kept, version 1 is not.
    let copy = broker.place.folder().join("copy");
    broker.json(&["get", "a", "--version", "2", "--to", text(&copy)]);
    assert_eq!(fs::read(&copy).unwrap(), data(20));
    broker.refusal(&["get", "a", "--version", "1"], 1, "object");
    assert_eq!(broker.json(&["stat", "a", "--version", "2"])["summary"]["size"], 20);
    assert_eq!(broker.json(&["get", "a"])["version"], 3);
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

fn refused_put_uses_no_device(broker: Broker) {
    let limited = broker.another(&["--quota", "objects=1,bytes=6MiB"]);
    let small = limited.file("small", &data(3 << 20));
    let large = limited.file("large", &data(7 << 20));
    let (small, large) = (text(&small), text(&large));
    // Device 9 does not exist: a put that reaches the device fails with this error.
    let refused = |arguments: &[&str], code: i32, kind: &str, words: &str| {
        let message = limited.refusal(&[&["put"], arguments, &["--device", "9"]].concat(), code, kind);
        assert!(message.contains(words), "{arguments:?}: no {words:?} in {message}");
    };
    refused(&["a", "--from", small], 3, "unsupported", "device 9");
    refused(&["a", "--from", large], 4, "peer", "but its quota is 6 MiB");
    refused(&["a", "--from", small, "--if-version", "1"], 1, "object", "does not exist");
    limited.json(&["put", "a", "--from", small]);
    refused(&["b", "--from", small], 4, "peer", "has 1 object and asks for 1 more, but its quota is 1");
    limited.end(&["put", "b", "--from", small]).code(4).says("hint: delete what is not needed");
    assert_eq!(limited.names(), ["a"]);
    refused(&["a", "--from", small], 1, "object", "`a` exists");
    refused(&["a", "--from", small, "--if-version", "2"], 1, "object", "is 1, not 2");
    refused(
        &["a", "--from", small, "--replace", "--mode", "644"],
        2,
        "usage",
        "has mode 0600, which a replacement can't change",
    );
    refused(&["a", "--from", small, "--replace", "--keep", "65"], 2, "usage", "at most 64");
    refused(&["a", "--from", large, "--replace"], 4, "peer", "a replacement needs room for both versions");
    let tiny = limited.file("tiny", &data(10));
    refused(&["a", "--from", text(&tiny), "--replace", "--mode", "600"], 3, "unsupported", "device 9");
    // A device quota can be checked only after the device is open. The put is still not sent to the broker.
    let by_device = broker.another(&["--quota", "device-bytes=6MiB"]);
    let message = by_device.refusal(&["put", "a", "--from", large], 4, "peer");
    assert!(message.contains("has 0 bytes (claimed) of the device") && message.contains("quota is 6 MiB"), "{message}");
    let answered = by_device.client().metrics().unwrap().requests;
    assert!(answered.iter().all(|request| request.verb != "put"), "{answered:?}");
    // The check leaves no claim behind: another process gets the claim at once.
    let found = limited.client().get_or_claim(&Get::new("a").newer_than(1), &ClaimOf::whole()).unwrap();
    assert!(matches!(found, Found::Claim(_)), "{found:?}");
    // A put without the check is refused with the same sentence.
    let memory = memory(&data(5 << 20));
    let put = Put::new("a").condition(Condition::Any).part(PutPart::of("all", &memory).unwrap());
    let refused = limited.client().put(&put).unwrap_err().in_full();
    assert!(refused.contains("a replacement needs room for both versions"), "{refused}");
}

/// The library replaces the object between the command's check and its put, as another process would.
#[test]
fn concurrent_replacement_is_not_overwritten() {
    let broker = Broker::host();
    broker.put("a", &data(10), &[]);
    let memory = memory(&data(20));
    let client = broker.client();
    let put = || Put::new("a").part(PutPart::of("all", &memory).unwrap());
    client.put(&put().condition(Condition::Version(1))).unwrap();
    let file = broker.file("input", &data(30));
    broker.refusal(&["put", "a", "--from", text(&file), "--if-version", "1"], 1, "object");
    assert_eq!(broker.json(&["stat", "a"])["summary"]["size"], 20);
}
