//! The broker's commands, as processes of their own: what they print, how they exit, and what is left behind.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use vmmfd::{
    array::{ArrayDescriptor, ElementType, Order},
    broker::{ArrayEntry, ClaimOf, Client, Condition, Found, Get, Lease, Put, PutPart},
    driver::{Backend, Choice, open},
    memory::{Device, Region, Selector, Shared, Spec},
    session::Config,
};

use crate::{
    command_line::{fits, object},
    running::{Ended, Meeting, Run, Running, wait_for},
    terminal::on_terminal,
    weights::{self, tensor},
};

cases! {
    on crate::broker_commands::Broker; every backend: [
    what_a_process_puts_another_gets_after_its_end,
    an_array_is_what_the_options_say,
    a_models_weights_are_arrays_of_the_object,
    a_name_is_replaced_only_when_that_is_asked_for,
    what_does_not_exist_is_exit_code_1,
    a_get_waits_for_the_object_and_not_for_longer,
    expected_metadata_must_be_there,
    a_range_is_written_and_only_what_is_there,
    bytes_that_are_not_as_the_digest_says_are_not_written,
    a_part_is_named_where_there_are_several,
    who_shows_the_holders_and_what_has_no_name_any_more,
    names_are_deleted_one_by_one,
    prefix_is_deleted_only_as_listed,
    one_array_is_written_alone,
    options_about_the_name_are_kept,
    a_limit_of_a_user_is_a_refusal_with_both_figures,
    put_is_refused_before_a_device_is_used,
    bad_input_is_one_sentence,
    tables_fit_the_terminal,
    a_signal_ends_the_broker_in_order_and_it_reports_what_goes,
    ]
}

/// A broker as a process of its own, at a place's socket.
struct Broker {
    place: Meeting,
    server: Running,
}

impl Broker {
    fn host() -> Self {
        Self::at(Meeting::host(), &[])
    }

    fn fake() -> Self {
        Self::at(Meeting::fake(), &[])
    }

    fn cuda() -> Self {
        Self::at(Meeting::cuda(), &[])
    }

    /// Another, on the same backend, with these options.
    fn another(&self, options: &[&str]) -> Self {
        Self::at(self.place.another(), options)
    }

    fn at(place: Meeting, options: &[&str]) -> Self {
        let mut server = serve(&place, options).start();
        server.until("listening");
        Self { place, server }
    }

    /// A client command at its socket.
    fn run(&self, arguments: &[&str]) -> Run {
        command(&self.place, arguments)
    }

    fn end(&self, arguments: &[&str]) -> Ended {
        self.run(arguments).end()
    }

    /// The JSON of a command that succeeds, which is as its schema says.
    #[track_caller]
    fn json(&self, arguments: &[&str]) -> Value {
        let value = object(self.end(&[arguments, &["--json"]].concat()).code(0));
        fits(arguments[0], &value);
        value
    }

    /// The error in the JSON of a command that fails so. Standard error has the same sentence, and no other error.
    #[track_caller]
    fn refusal(&self, arguments: &[&str], code: i32, kind: &str) -> String {
        let ended = self.end(&[arguments, &["--json"]].concat());
        let value = object(ended.code(code));
        assert_eq!(value["error"]["kind"], kind, "{arguments:?}: {value}");
        let message = value["error"]["message"].as_str().unwrap().to_owned();
        assert!(!message.is_empty() && !message.contains('\n'), "{message:?}");
        // What the parser of the command line refuses is in the object alone.
        if kind != "usage" || !ended.stderr.is_empty() {
            ended.says(&message);
            assert_eq!(ended.stderr.lines().filter(|line| line.starts_with("error: ")).count(), 1, "{}", ended.stderr);
        }
        message
    }

    /// Puts bytes under a name.
    #[track_caller]
    fn put(&self, name: &str, bytes: &[u8], options: &[&str]) -> Value {
        let file = self.file("input", bytes);
        self.json(&[&["put", name, "--from", text(&file)], options].concat())
    }

    fn file(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.place.folder().join(name);
        fs::write(&path, bytes).unwrap();
        path
    }

    fn client(&self) -> Client {
        Client::connect(&self.place.socket(), &Config::default()).unwrap()
    }

    /// A lease in this process, which maps nothing.
    fn lease(&self, name: &str) -> (Client, Lease) {
        let client = self.client();
        let lease = client.get(&Get::new(name)).unwrap();
        (client, lease)
    }

    fn names(&self) -> Vec<String> {
        let listed = self.json(&["ls"]);
        listed["objects"].as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap().to_owned()).collect()
    }
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn vmmfd(place: &Meeting, arguments: &[&str]) -> Run {
    let mut run = place.bare("vmmfd");
    run.command.args(arguments).env("VMMFD_BROKER_SOCKET", place.socket());
    run
}

fn command(place: &Meeting, arguments: &[&str]) -> Run {
    let run = vmmfd(place, arguments);
    if ["put", "get"].contains(&arguments[0]) { run.env("VMMFD_BACKEND", place.backend()) } else { run }
}

pub(crate) fn serve(place: &Meeting, options: &[&str]) -> Run {
    let emulated: &[&str] = if place.is_fake() { &["--emulated"] } else { &[] };
    vmmfd(place, &[&["serve"], emulated, options].concat())
}

/// Bytes that no two slices of have in common, of a length that is no multiple of anything.
fn data(length: usize) -> Vec<u8> {
    (0..length as u32).flat_map(|word| word.wrapping_mul(2_654_435_761).to_le_bytes()).take(length).collect()
}

fn what_a_process_puts_another_gets_after_its_end(broker: Broker) {
    let bytes = data(5_000_003);
    let put = broker.put("models/tiny", &bytes, &["--digest", "--meta", r#"{"engine": "x"}"#]);
    assert_eq!((&put["name"], &put["version"], &put["size"]), (&json!("models/tiny"), &json!(1), &json!(5_000_003)));
    assert_eq!(put["backend"], broker.place.backend());
    let digest = format!("blake3:{}", blake3(&bytes));
    assert_eq!(put["digest"], digest);

    let copy = broker.place.folder().join("copy");
    let got = broker.json(&["get", "models/tiny", "--to", text(&copy)]);
    assert_eq!(fs::read(&copy).unwrap(), bytes);
    assert_eq!((&got["verified"], &got["to"]), (&json!(true), &json!(text(&copy))));
    assert_eq!((&got["id"], &got["metadata"]), (&put["id"], &json!({"engine": "x"})));
    assert_eq!((&got["parts"][0]["name"], &got["parts"][0]["expected"]), (&json!("all"), &json!(digest)));
    // A file that exists is not replaced by accident.
    assert!(broker.refusal(&["get", "models/tiny", "--to", text(&copy)], 2, "usage").contains("--force"));
    broker.end(&["get", "models/tiny", "--to", text(&copy), "--force"]).code(0);

    let listed = broker.json(&["ls"]);
    let listed = &listed["objects"][0];
    assert_eq!((&listed["name"], &listed["version"], &listed["leases"]), (&json!("models/tiny"), &json!(1), &json!(0)));
    assert_eq!((&listed["device"], &listed["backend"]), (&put["device"]["uuid"], &put["backend"]));
    assert_eq!((&listed["size"], &listed["devices"][0]["size"]), (&json!(5_000_003), &put["device"]["size"]));
    assert_eq!(listed["owner"]["uid"], nix::unistd::geteuid().as_raw());
    let stat = broker.json(&["stat", "models/tiny"]);
    assert_eq!((&stat["object"], &stat["metadata"]), (listed, &json!({"engine": "x"})));
    assert_eq!((&stat["parts"][0]["digest"], &stat["versions"]), (&json!(digest), &json!([1])));
    assert_eq!(stat["parts"][0]["maker"]["command"], "vmmfd");
    assert!(broker.end(&["stat", "models/tiny"]).code(0).stdout.contains("as claimed"));
    assert_eq!(broker.end(&["ls"]).code(0).stdout, "models/tiny\n");
    assert_eq!(broker.end(&["ls", "models/u"]).code(0).stdout, "");
}

fn blake3(bytes: &[u8]) -> String {
    // By the tool that checks files elsewhere: the digest of the loader itself is what is tested here.
    let memory = open(Choice::Only(Backend::Host)).unwrap().driver;
    let device = Device::find(&memory, Selector::default()).unwrap();
    let memory = Shared::create(&device, Spec::vmm(bytes.len() as u64)).unwrap();
    memory.copy_in(0, bytes).unwrap();
    let digest = vmmfd_cli::check::files::read(&memory, 0, 0..bytes.len() as u64, &mut |_| Ok(())).unwrap();
    digest.strip_prefix("blake3:").unwrap().to_owned()
}

fn an_array_is_what_the_options_say(broker: Broker) {
    let put = broker.put("a", &data(24), &["--dtype", "bf16", "--shape", "3x4", "--order", "F"]);
    assert_eq!((&put["array"]["dtype"], &put["array"]["shape"]), (&json!("bfloat16"), &json!([3, 4])));
    let got = broker.json(&["get", "a"]);
    assert_eq!((&got["parts"][0]["arrays"][0]["name"], &got["verified"]), (&json!("array"), &json!(null)));
    assert_eq!(got["parts"][0]["arrays"][0]["array"], put["array"]);
    let file = broker.file("input", &data(25));
    let wrong = broker.refusal(&["put", "b", "--from", text(&file), "--dtype", "bf16", "--shape", "3x4"], 2, "usage");
    assert!(wrong.contains("24 bytes, and there are 25"), "{wrong}");
}

fn a_models_weights_are_arrays_of_the_object(broker: Broker) {
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
    let (copy, begin) = (fs::read(&copy).unwrap(), arrays[1]["array"]["offset"].as_u64().unwrap() as usize);
    assert_eq!(begin, 256);
    assert!(copy[begin..][..4 << 20] == written[1].bytes);
    // Files by their names, in an order, and segments of another size; metadata of the same key is the caller's.
    let files = ["2.safetensors", "1.safetensors"].map(|name| folder.join(name));
    let named = ["--safetensors", text(&files[0]), text(&files[1]), "--replace", "--chunk", "2MiB"];
    let put = broker.json(&[&["put", "m"][..], &named, &["--meta", r#"{"safetensors": 1}"#]].concat());
    assert_eq!((&put["segments"], &put["version"], &put["digest"]), (&json!(3), &json!(2), &json!(null)));
    assert_eq!(broker.json(&["stat", "m"])["metadata"], json!({"safetensors": 1}));
    assert_eq!(broker.json(&["get", "m"])["parts"][0]["arrays"][0]["name"], "c");
    let shown = broker.end(&["put", "m", "--safetensors", text(&folder), "--replace"]);
    assert!(shown.code(0).stdout.contains(" of 3 arrays, "), "{}", shown.stdout);
    // Nothing of a file that lies reaches the broker, or a device.
    let lies = broker.file("lies.safetensors", b"\x02\0\0\0\0\0\0\0{}with more behind");
    for (arguments, words) in [
        (&["put", "x", "--safetensors", text(&lies), "--device", "9"][..], "no tensor has its last 16 bytes"),
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

fn a_name_is_replaced_only_when_that_is_asked_for(broker: Broker) {
    let file = broker.file("data", &data(100));
    let file = text(&file);
    broker.put("a", &data(10), &[]);
    let exists = broker.refusal(&["put", "a", "--from", file], 1, "object");
    assert!(exists.contains("`a`"), "{exists}");
    broker.end(&["put", "a", "--from", file]).code(1).says("hint: replace it with --replace");
    assert_eq!(broker.put("a", &data(20), &["--replace"])["version"], 2);
    // What is not there is put as well.
    assert_eq!(broker.put("new", &data(20), &["--replace"])["version"], 1);
    let other = broker.refusal(&["put", "a", "--from", file, "--if-version", "1"], 1, "object");
    assert!(other.contains('2') && other.contains('1'), "{other}");
    assert_eq!(broker.put("a", &data(30), &["--if-version", "2", "--keep", "1"])["version"], 3);
    let absent = broker.refusal(&["put", "none", "--from", file, "--if-version", "1"], 1, "object");
    assert!(absent.contains("none"), "{absent}");
    // The one before is kept, and the one before that is not.
    let copy = broker.place.folder().join("copy");
    broker.json(&["get", "a", "--version", "2", "--to", text(&copy)]);
    assert_eq!(fs::read(&copy).unwrap(), data(20));
    broker.refusal(&["get", "a", "--version", "1"], 1, "object");
    assert_eq!(broker.json(&["stat", "a", "--version", "2"])["object"]["size"], 20);
    assert_eq!(broker.json(&["get", "a"])["version"], 3);
}

fn what_does_not_exist_is_exit_code_1(broker: Broker) {
    broker.put("a", &data(10), &[]);
    for arguments in [
        &["get", "b"][..],
        &["get", "a", "--version", "9"],
        &["get", "a", "--part", "rank0"],
        &["stat", "b"],
        &["stat", "a", "--version", "9"],
        &["rm", "b"],
    ] {
        broker.refusal(arguments, 1, "object");
    }
    // A failed get leaves no file.
    let copy = broker.place.folder().join("copy");
    broker.refusal(&["get", "b", "--to", text(&copy)], 1, "object");
    let files = broker.place.files();
    assert!(!files.iter().any(|file| file == "copy" || file.starts_with(".vmmfd-")), "{files:?}");
}

fn a_get_waits_for_the_object_and_not_for_longer(broker: Broker) {
    broker.refusal(&["get", "late", "--wait", "50ms"], 4, "peer");
    let copy = broker.place.folder().join("copy");
    let waiting = broker.run(&["get", "late", "--wait", "10m", "--to", text(&copy)]).start();
    // Its temporary file is there before it asks.
    wait_for("the file", || broker.place.files().iter().any(|file| file.starts_with(".vmmfd-")));
    broker.put("late", &data(1000), &[]);
    waiting.end().code(0);
    assert_eq!(fs::read(&copy).unwrap(), data(1000));
    // A signal ends a wait.
    let waiting = broker.run(&["get", "never", "--wait", "10m", "--json"]).start();
    wait_for("the connection", || broker.json(&["who"])["users"][0]["connections"] == 2);
    waiting.signal(Signal::SIGINT);
    assert_eq!(object(waiting.end().code(130))["error"]["kind"], "interrupted");
}

fn expected_metadata_must_be_there(broker: Broker) {
    broker.put("a", &data(10), &["--meta", r#"{"engine": "x", "layout": {"tp": 8}}"#]);
    broker.json(&["get", "a", "--expect", r#"{"layout": {"tp": 8}}"#]);
    let differs = broker.refusal(&["get", "a", "--expect", r#"{"engine": "y"}"#], 1, "object");
    assert!(differs.contains("engine"), "{differs}");
    broker.refusal(&["get", "a", "--expect", r#"{"quantisation": "fp8"}"#], 1, "object");
}

fn a_range_is_written_and_only_what_is_there(broker: Broker) {
    let bytes = data(5_000_003);
    broker.put("a", &bytes, &["--chunk", "2MiB", "--digest"]);
    let copy = broker.place.folder().join("copy");
    let got = broker.json(&["get", "a", "--range", "3MiB:100", "--to", text(&copy)]);
    let start = 3 << 20;
    assert_eq!(fs::read(&copy).unwrap(), bytes[start..start + 100]);
    let part = &got["parts"][0];
    assert_eq!((&part["offset"], &part["length"], &part["segments"]), (&json!(start), &json!(100), &json!(3)));
    // The digest is that of all.
    assert_eq!((&got["verified"], &part["verified"]), (&json!(null), &json!(null)));
    assert_eq!(broker.json(&["get", "a", "--range", "0:5000003"])["verified"], true);
    let beyond = broker.refusal(&["get", "a", "--range", "5000000:4"], 1, "object");
    assert!(beyond.contains("which has 5000003"), "{beyond}");
}

/// Memory of this process with some bytes, on the host backend alone: the emulated driver of a test is another's.
fn memory(bytes: &[u8]) -> Shared {
    let driver = open(Choice::Only(Backend::Host)).unwrap().driver;
    let memory = Shared::create(&Device::find(&driver, Selector::default()).unwrap(), Spec::vmm(bytes.len() as u64));
    let memory = memory.unwrap();
    memory.copy_in(0, bytes).unwrap();
    memory
}

fn bytes_that_are_not_as_the_digest_says_are_not_written(broker: Broker) {
    let memory = memory(&data(1000));
    let digest = format!("blake3:{}", "0".repeat(64));
    let part = PutPart::of("all", &memory).unwrap().digest(&digest);
    broker.client().put(&Put::new("wrong").part(part)).unwrap();
    let part = PutPart::of("all", &memory).unwrap().digest("md5:0");
    broker.client().put(&Put::new("unknown").part(part)).unwrap();
    let copy = broker.place.folder().join("copy");
    let ended = broker.end(&["get", "wrong", "--backend", "auto", "--to", text(&copy), "--json"]);
    let got = object(ended.code(1));
    fits("get", &got);
    assert_eq!(
        (&got["error"]["kind"], &got["verified"], &got["to"]),
        (&json!("mismatch"), &json!(false), &json!(null))
    );
    ended.says("did not verify").says(&digest);
    assert!(!copy.exists());
    // The maker sees it.
    wait_for("the report", || broker.json(&["stat", "wrong"])["reports"].as_array().unwrap().len() == 1);
    let report = &broker.json(&["stat", "wrong"])["reports"][0];
    assert!(report["message"].as_str().unwrap().contains(&format!("its maker gave {digest}")), "{report}");
    let plain = broker.end(&["get", "wrong", "--backend", "auto"]);
    assert!(plain.code(1).stdout.contains("which is WRONG"), "{}", plain.stdout);
    // A digest of another kind can't be verified, which is no mismatch.
    let got = broker.json(&["get", "unknown", "--backend", "auto"]);
    assert_eq!((&got["verified"], &got["backend"]), (&json!(null), &json!("host")));
    assert_eq!(broker.json(&["stat", "unknown"])["reports"], json!([]));
}

fn a_part_is_named_where_there_are_several(broker: Broker) {
    let parts = [memory(&data(10)), memory(&data(20))];
    let put = parts
        .iter()
        .zip(["rank0", "rank1"])
        .fold(Put::new("a"), |put, (memory, name)| put.part(PutPart::of(name, memory).unwrap()));
    broker.client().put(&put).unwrap();
    let got = broker.json(&["get", "a", "--backend", "auto"]);
    let lengths: Vec<&Value> = got["parts"].as_array().unwrap().iter().map(|part| &part["length"]).collect();
    assert_eq!(lengths, [10, 20]);
    let copy = broker.place.folder().join("copy");
    let to = ["get", "a", "--backend", "auto", "--to", text(&copy)];
    let several = broker.refusal(&to, 2, "usage");
    assert!(several.contains("2 parts (rank0, rank1)") && several.contains("--part"), "{several}");
    assert!(!copy.exists());
    broker.json(&[&to[..], &["--part", "rank1"]].concat());
    assert_eq!(fs::read(&copy).unwrap(), data(20));
    broker.refusal(&["get", "a", "--backend", "auto", "--range", "0:5"], 2, "usage");
    assert_eq!(broker.json(&["ls"])["objects"][0]["parts"], 2);
}

fn who_shows_the_holders_and_what_has_no_name_any_more(broker: Broker) {
    broker.put("held", &data(100), &[]);
    broker.put("free", &data(100), &[]);
    assert_eq!(broker.json(&["who"])["leases"], json!([]));
    let first = broker.lease("held");
    let shown = broker.json(&["who"]);
    let lease = &shown["leases"][0];
    assert_eq!(shown["leases"].as_array().unwrap().len(), 1, "{shown}");
    assert_eq!((&lease["name"], &lease["version"], &lease["named"]), (&json!("held"), &json!(1), &json!(true)));
    assert_eq!((&lease["pid"], &lease["uid"]), (&json!(std::process::id()), &json!(nix::unistd::geteuid().as_raw())));
    let comm = fs::read_to_string("/proc/self/comm").unwrap();
    assert_eq!(lease["command"], comm.trim_end());
    let size = &broker.json(&["ls", "held"])["objects"][0]["devices"][0]["size"];
    assert_eq!(&lease["size"], size);
    assert_eq!(shown["unnamed"], json!([]));
    assert_eq!(broker.json(&["ls", "held"])["objects"][0]["leases"], 1);
    // Both versions are held once the name has another.
    broker.put("held", &data(200), &["--replace"]);
    let second = broker.lease("held");
    broker.end(&["rm", "held"]).code(0);
    let shown = broker.json(&["who", "he"]);
    let unnamed: Vec<_> =
        shown["unnamed"].as_array().unwrap().iter().map(|one| (&one["version"], &one["leases"])).collect();
    assert_eq!(unnamed, [(&json!(1), &json!(1)), (&json!(2), &json!(1))]);
    assert_eq!(shown["leases"].as_array().unwrap().iter().filter(|lease| lease["named"] == false).count(), 2);
    assert_eq!((&shown["users"][0]["objects"], &shown["users"][0]["leases"]), (&json!(1), &json!(2)));
    let sum: u64 = shown["devices"].as_array().unwrap().iter().map(|device| device["size"].as_u64().unwrap()).sum();
    assert_eq!(sum, 3 * size.as_u64().unwrap());
    assert_eq!(broker.json(&["who", "free"])["leases"], json!([]));
    let table = broker.end(&["who"]);
    for words in ["PID", "NO LONGER NAMED", "USER", "DEVICE", &std::process::id().to_string()] {
        assert!(table.code(0).stdout.contains(words), "no {words} in {}", table.stdout);
    }
    drop((first, second));
    wait_for("the end of the leases", || broker.json(&["who"])["leases"] == json!([]));
    assert_eq!(broker.json(&["who"])["unnamed"], json!([]));
}

fn names_are_deleted_one_by_one(broker: Broker) {
    for name in ["a", "b", "c"] {
        broker.put(name, &data(10), &[]);
    }
    let ended = broker.end(&["rm", "a", "x", "bad//name", "c", "--json"]);
    let report = object(ended.code(1));
    fits("rm", &report);
    assert_eq!(report["deleted"], json!(["a", "c"]));
    let failed: Vec<_> =
        report["failed"].as_array().unwrap().iter().map(|one| (&one["name"], &one["error"]["kind"])).collect();
    assert_eq!(failed, [(&json!("x"), &json!("object")), (&json!("bad//name"), &json!("usage"))]);
    assert_eq!(report["error"], report["failed"][0]["error"]);
    assert_eq!(broker.names(), ["b"]);
    assert_eq!(broker.end(&["rm", "b"]).code(0).stdout, "deleted  b\n");
    let none = broker.end(&["ls", "-l"]);
    assert_eq!(none.code(0).stdout, "");
    none.says("no objects");
    assert_eq!(broker.end(&["ls", "-q"]).code(0).stderr, "");
}

fn prefix_is_deleted_only_as_listed(broker: Broker) {
    for name in ["models/a", "models/b", "models", "other"] {
        broker.put(name, &data(10), &[]);
    }
    fn rm<'a>(options: &[&'a str]) -> Vec<&'a str> {
        [&["rm", "--prefix", "models/"], options].concat()
    }
    let listed = broker.json(&rm(&["--dry-run"]));
    assert_eq!((&listed["deleted"], &listed["error"]), (&json!([]), &json!(null)));
    let names = |listed: &Value| -> Vec<String> {
        let objects = listed["dry_run"]["objects"].as_array().unwrap();
        objects.iter().map(|object| object["name"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(names(&listed), ["models/a", "models/b"]);
    let shown = broker.end(&rm(&["--dry-run"]));
    let first = listed["dry_run"]["confirm"].as_str().unwrap();
    for words in
        ["listed     models/a version 1: 10 bytes, 0 leases, uid ", "listed     models/b", "confirm    ", first]
    {
        assert!(shown.code(0).stdout.contains(words), "no {words} in {}", shown.stdout);
    }
    // Another object of the prefix, and another version of one: what was not listed is not deleted.
    let confirmed = |code: &str| broker.refusal(&rm(&["--confirm", code]), 2, "usage");
    broker.put("models/c", &data(10), &[]);
    assert!(confirmed(first).contains("`models/` has 3 objects now"));
    broker.end(&["rm", "models/c"]).code(0);
    broker.put("models/b", &data(10), &["--replace"]);
    assert!(confirmed(first).contains("nothing is deleted"));
    for (options, words) in [
        (&["rm", "--prefix", "models/"][..], "--confirm"),
        (&["rm", "--prefix", "", "--dry-run"], "--prefix"),
        (&["rm", "--prefix", "models/", "--dry-run", "--confirm", first], "--confirm"),
        (&["rm", "other", "--prefix", "models/", "--dry-run"], "--prefix"),
        (&["rm", "other", "--dry-run"], "--dry-run"),
        (&["rm", "other", "--confirm", first], "--confirm"),
    ] {
        let message = broker.refusal(options, 2, "usage");
        assert!(message.contains(words), "{options:?}: {message}");
    }
    assert!(broker.refusal(&["rm", "--prefix", "x", "--dry-run"], 1, "object").contains("begins with `x`"));
    assert_eq!(broker.names(), ["models", "models/a", "models/b", "other"]);
    let listed = broker.json(&rm(&["--dry-run"]));
    let second = listed["dry_run"]["confirm"].as_str().unwrap();
    assert_ne!(first, second);
    let deleted = broker.json(&rm(&["--confirm", second]));
    assert_eq!((&deleted["deleted"], &deleted["dry_run"]), (&json!(["models/a", "models/b"]), &json!(null)));
    assert_eq!(broker.names(), ["models", "other"]);
}

fn one_array_is_written_alone(broker: Broker) {
    let file = broker.place.folder().join("model.safetensors");
    let names = ["a", "b"];
    let written = [tensor("a", "F32", &[5], 20), tensor("b", "BF16", &[3 << 20], 6 << 20), tensor("e", "U8", &[0], 0)];
    weights::write(&file, &written, json!({}));
    broker.json(&["put", "m", "--safetensors", text(&file), "--chunk", "2MiB", "--digest"]);
    let copy = broker.place.folder().join("copy");
    for (name, of) in names.into_iter().zip(&written) {
        let got = broker.json(&["get", "m", "--array", name, "--to", text(&copy), "--force"]);
        assert!(fs::read(&copy).unwrap() == of.bytes, "{name}");
        let part = &got["parts"][0];
        assert_eq!((&part["length"], &part["verified"]), (&json!(of.bytes.len()), &json!(null)));
        let arrays = part["arrays"].as_array().unwrap();
        let array = arrays.iter().find(|array| array["name"] == name).unwrap();
        assert_eq!(part["offset"], array["array"]["offset"]);
    }
    // Of four segments the first array is in one.
    let lease = broker.client().get(&Get::new("m").arrays(["a"])).unwrap();
    assert_eq!(lease.into_parts().remove(0).into_segments().unwrap().len(), 1);
    let none = broker.refusal(&["get", "m", "--array", "layer", "--to", text(&copy), "--force"], 1, "object");
    assert!(none.contains("there is no array layer; its arrays are a, b, e (3 in all)"), "{none}");
    broker.put("bytes", &data(10), &[]);
    assert!(broker.refusal(&["get", "bytes", "--array", "a"], 1, "object").contains("it has no arrays"));
    assert!(broker.refusal(&["get", "m", "--array", "e"], 2, "usage").contains("is empty"));
    broker.refusal(&["get", "m", "--array", "a", "--range", "0:5"], 2, "usage");
    // A column of a matrix has gaps.
    let memory = memory(&data(1000));
    let mut matrix = ArrayDescriptor::new("uint8".parse::<ElementType>().unwrap(), [10, 10], Order::C).unwrap();
    matrix.offset = 100;
    let column = matrix.slice(1, 2..3, 1).unwrap();
    let part = PutPart::of("all", &memory).unwrap().arrays([ArrayEntry::new("column", column)]);
    broker.client().put(&Put::new("matrix").part(part)).unwrap();
    let gaps = broker.refusal(&["get", "matrix", "--array", "column", "--backend", "auto"], 2, "usage");
    assert!(gaps.contains("--range 102:91"), "{gaps}");
    assert!(fs::read(&copy).unwrap() == written[1].bytes);
}

fn options_about_the_name_are_kept(broker: Broker) {
    broker.put("a", &data(10), &["--mode", "640", "--ttl", "2h", "--keep", "2"]);
    let stat = broker.json(&["stat", "a"]);
    assert_eq!((&stat["object"]["mode"], &stat["keep"]), (&json!("0640"), &json!(2)));
    assert_eq!(stat["lifetime"], json!({"kind": "idle", "ms": 7_200_000}));
    let shown = broker.end(&["stat", "a"]);
    assert!(shown.code(0).stdout.contains("2h after its last lease"), "{}", shown.stdout);
    broker.put("a", &data(10), &["--replace", "--ttl", "never"]);
    let stat = broker.json(&["stat", "a"]);
    assert_eq!((&stat["object"]["mode"], &stat["keep"]), (&json!("0640"), &json!(2)));
    assert_eq!((&stat["lifetime"], &stat["versions"]), (&json!({"kind": "deleted"}), &json!([1, 2])));
    // It goes when its time is over, and not while it is held.
    broker.put("short", &data(10), &["--ttl", "1ms", "--mode", "666"]);
    wait_for("the end of the object", || broker.names() == ["a"]);
}

fn a_limit_of_a_user_is_a_refusal_with_both_figures(broker: Broker) {
    let limited = broker.another(&["--quota", "objects=1,bytes=1TiB"]);
    limited.put("a", &data(10), &[]);
    let file = limited.file("input", &data(10));
    let refused = limited.refusal(&["put", "b", "--from", text(&file)], 4, "peer");
    assert!(refused.contains('1') && refused.contains("objects"), "{refused}");
    limited.end(&["put", "b", "--from", text(&file)]).code(4).says("hint: delete what is not needed");
    assert_eq!(limited.names(), ["a"]);
}

fn put_is_refused_before_a_device_is_used(broker: Broker) {
    let limited = broker.another(&["--quota", "objects=1,bytes=6MiB"]);
    let (small, large) = (limited.file("small", &data(3 << 20)), limited.file("large", &data(7 << 20)));
    let (small, large) = (text(&small), text(&large));
    // There is no such device: a put that gets so far reports it.
    let refused = |arguments: &[&str], code: i32, kind: &str, words: &str| {
        let message = limited.refusal(&[&["put"], arguments, &["--device", "9"]].concat(), code, kind);
        assert!(message.contains(words), "{arguments:?}: no {words:?} in {message}");
    };
    refused(&["a", "--from", small], 3, "unsupported", "device 9");
    refused(&["a", "--from", large], 4, "peer", "and its quota is 6291456");
    refused(&["a", "--from", small, "--if-version", "1"], 1, "object", "there is no such object");
    limited.json(&["put", "a", "--from", small]);
    refused(&["b", "--from", small], 4, "peer", "objects");
    refused(&["a", "--from", small], 1, "object", "`a` exists");
    refused(&["a", "--from", small, "--if-version", "2"], 1, "object", "is 1, and not 2");
    refused(&["a", "--from", small, "--replace", "--mode", "644"], 2, "usage", "has mode 0600 and keeps it");
    refused(&["a", "--from", small, "--replace", "--keep", "65"], 2, "usage", "at most 64");
    refused(&["a", "--from", large, "--replace"], 4, "peer", "a replacement needs room for both versions");
    let tiny = limited.file("tiny", &data(10));
    refused(&["a", "--from", text(&tiny), "--replace", "--mode", "600"], 3, "unsupported", "device 9");
    // The device is known only once it is open: then the broker is not asked either.
    let by_device = broker.another(&["--quota", "device-bytes=6MiB"]);
    let message = by_device.refusal(&["put", "a", "--from", large], 4, "peer");
    assert!(message.contains("bytes (claimed) of the device") && message.contains("quota is 6291456"), "{message}");
    let answered = by_device.client().metrics().unwrap().requests;
    assert!(answered.iter().all(|request| request.verb != "put"), "{answered:?}");
    // The check leaves no claim behind: another process gets it at once.
    let found = limited.client().get_or_claim(&Get::new("a").newer_than(1), &ClaimOf::whole()).unwrap();
    assert!(matches!(found, Found::Claim(_)), "{found:?}");
    // A put without the check is refused with the same words.
    let memory = memory(&data(5 << 20));
    let put = Put::new("a").condition(Condition::Any).part(PutPart::of("all", &memory).unwrap());
    let refused = limited.client().put(&put).unwrap_err().in_full();
    assert!(refused.contains("a replacement needs room for both versions"), "{refused}");
}

fn bad_input_is_one_sentence(broker: Broker) {
    let (file, empty) = (broker.file("data", &data(10)), broker.file("empty", &[]));
    let (file, empty) = (text(&file), text(&empty));
    let long = "n".repeat(256);
    for (arguments, words) in [
        (&["put", "a", "--from", empty][..], "is empty"),
        (&["put", "a", "--from", "/nonexistent/x"], "/nonexistent/x"),
        (&["put", "a", "--from", "-"], "standard input"),
        (&["put", "a//b", "--from", file], "a component is empty"),
        (&["put", "", "--from", file], "it is empty"),
        (&["put", "../a", "--from", file], "`..`"),
        (&["put", "a b", "--from", file], "' '"),
        (&["put", &long, "--from", file], "at most 255"),
        (&["put", "a\u{1b}[31m", "--from", file], "can't be used"),
        (&["put", "a", "--from", file, "--meta", "[1]"], "no object"),
        (&["put", "a", "--from", file, "--meta", "{"], "not JSON"),
        (&["put", "a", "--from", file, "--mode", "755"], "at most 666"),
        (&["put", "a", "--from", file, "--ttl", "30"], "has no unit"),
        (&["put", "a", "--from", file, "--if-version", "0"], "--if-version"),
        (&["put", "a", "--from", file, "--keep", "few"], "--keep"),
        (&["put", "a", "--from", file, "--chunk", "64MB"], "64MiB"),
        (&["get", "a", "--to", "-"], "standard output"),
        (&["get", "a", "--to", "/nonexistent/x"], "/nonexistent/x"),
        (&["get", "a", "--force"], "--to"),
        (&["get", "a", "--expect", "x"], "not JSON"),
        (&["get", "a", "--range", "0"], "not a range"),
        (&["get", "a", "--wait", "0s"], "no time"),
        (&["get", "/a"], "a component is empty"),
        (&["get", "a", "--part", "x/y"], "part"),
        (&["stat", "a/"], "a component is empty"),
        (&["rm", "."], "`.`"),
        (&["ls", "--timeout", "5"], "has no unit"),
        (&["serve", "--quota", "users=1"], "not a limit"),
        (&["serve", "--quota", "bytes=1GB"], "1GiB"),
        (&["serve", "--allow-gid", "no such group"], "is no group of this machine"),
        (&["serve", "--allow-uid", "-5"], "unexpected argument"),
        (&["serve", "--no-quota", "--total-quota", "objects=1"], "cannot be used with"),
        (&["get", "a", "--owner", "root"], "not a user's number"),
    ] {
        let message = broker.refusal(arguments, 2, "usage");
        assert!(message.contains(words), "{arguments:?}: no {words:?} in {message}");
        let ended = broker.end(arguments);
        assert!(!ended.code(2).stderr.contains('\u{1b}'), "{:?}", ended.stderr);
    }
    assert_eq!(broker.names(), <[String; 0]>::default());
    broker.put("owned", &data(10), &[]);
    let owner = nix::unistd::geteuid().as_raw();
    let got = broker.end(&["get", "owned", "--owner", &owner.to_string()]);
    assert!(got.code(0).stdout.contains(&format!("uid {owner}")), "{}", got.stdout);
    let other = broker.refusal(&["get", "owned", "--owner", &(owner + 1).to_string()], 1, "object");
    assert!(other.contains(&format!("its owner is uid {owner} and not {}", owner + 1)), "{other}");
    broker.end(&["rm", "owned"]).code(0);
    // A device that is not there, and a backend that the object is not on.
    let device = broker.refusal(&["put", "a", "--from", file, "--device", "9"], 3, "unsupported");
    assert!(device.contains("device 9"), "{device}");
    broker.put("a", &data(10), &[]);
    if broker.place.is_fake() {
        broker.refusal(&["get", "a", "--backend", "host"], 4, "peer");
    }
}

fn tables_fit_the_terminal(broker: Broker) {
    broker.put("models/llama3", &data(5_000_003), &[]);
    let _held = broker.lease("models/llama3");
    for columns in [40, 80] {
        for (arguments, row, optional) in
            [(&["ls", "-l"][..], "4.7 MiB", "UID"), (&["who"], "models/llama3", "COMMAND")]
        {
            let shown = on_terminal(broker.run(arguments), columns).end();
            assert_eq!(shown.code, Some(0), "{}", shown.text());
            let screen = shown.screen();
            assert!(screen[0].contains("VERSION") && screen[1].contains(row), "{screen:?}");
            // A row of the screen for each of the table: the name is its end.
            assert!(screen[0].trim_end().ends_with("NAME") && screen[1].trim_end().ends_with("llama3"), "{screen:?}");
            assert!(!shown.text().contains('\u{1b}'), "{:?}", shown.text());
            // Where all fit, none is left out.
            assert_eq!(screen[0].contains(optional), columns == 80, "{screen:?}");
        }
    }
}

fn a_signal_ends_the_broker_in_order_and_it_reports_what_goes(broker: Broker) {
    broker.put("a", &data(10), &[]);
    let held = broker.lease("a");
    // Two can't serve one socket.
    serve(&broker.place, &[]).end().code(5).says("already served");
    let socket = broker.place.socket();
    let Broker { place, server } = broker;
    server.signal(Signal::SIGTERM);
    let ended = server.end();
    assert!(
        ended.code(0).stdout.contains("1 object, 1 version, ") && ended.stdout.contains("1 lease"),
        "{}",
        ended.stdout
    );
    assert!(!socket.exists());
    drop(held);
    // Nobody answers now, and that is known soon.
    let nobody = command(&place, &["ls"]).end();
    nobody.code(4).says("no broker on").says("hint: start one with `vmmfd serve`");
    let failed = object(command(&place, &["get", "a", "--json", "--wait", "10m"]).end().code(4));
    fits("failure", &failed);

    // With --json the line that it listens is on standard error, and the object is alone on standard output.
    let server = serve(&place, &["--json"]).start();
    wait_for("the broker", || server.so_far().contains("listening"));
    command(&place, &["ls"]).end().code(0);
    server.signal(Signal::SIGINT);
    let ended = server.end();
    let report = object(ended.code(0));
    fits("serve", &report);
    assert_eq!((&report["objects"], &report["size"]), (&json!(0), &json!(0)));
    ended.says("broker    listening  ");
}

#[test]
fn a_peer_that_is_no_broker_is_named_so() {
    let meeting = Meeting::host();
    let producer = meeting.listening(&["--consumers", "0"]);
    let ended = command(&meeting, &["ls"]).end();
    ended.code(4).says("is no broker");
    assert_eq!(ended.stderr.lines().filter(|line| line.starts_with("error: ")).count(), 1, "{}", ended.stderr);
    producer.signal(Signal::SIGTERM);
    producer.end();
}

/// What `make demo` ends with.
mod demo {
    use super::*;

    fn run(place: &Meeting, options: &[&str]) -> Ended {
        let programs = PathBuf::from(place.bare("vmmfd").command.get_program());
        // In a bundle it lies beside the programs.
        let bundled = programs.with_file_name("demo-broker");
        let script = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../scripts/demo-broker"));
        let script = if script.exists() { script } else { bundled };
        let mut demo = Command::new(script);
        demo.arg(programs.parent().unwrap()).args(["--backend", place.backend()]).args(options);
        demo.env("TMPDIR", place.folder());
        let ended = place.bare("vmmfd").instead(demo).end();
        // It leaves neither a process nor a file.
        wait_for("the end of all processes", || place.processes().is_empty());
        assert_eq!(place.files(), <[String; 0]>::default());
        ended
    }

    fn shows_every_step(place: Meeting) {
        let ended = run(&place, &[]);
        let steps: Vec<&str> = ended.code(0).stdout.lines().filter_map(|line| line.split_whitespace().next()).collect();
        assert_eq!(
            steps,
            ["broker", "put", "MODE", "0600", "owner", "got", "saved", "broker", "demo:"],
            "{}",
            ended.stdout
        );
    }

    #[test]
    fn it_shows_every_step_and_leaves_nothing() {
        shows_every_step(Meeting::host());
    }

    #[test]
    fn one_that_fails_leaves_nothing() {
        run(&Meeting::host(), &["--device", "9"]).code(3).says("demo: FAILED (put exited with 3)");
    }

    mod cuda {
        #[test]
        #[ignore = "needs an NVIDIA GPU: make test-gpu"]
        fn it_shows_every_step_and_leaves_nothing() {
            super::shows_every_step(super::Meeting::cuda());
        }
    }
}

/// A replacement through the library, as by another process: the version between the look and the put.
#[test]
fn a_name_that_is_replaced_meanwhile_is_not_put_over() {
    let broker = Broker::host();
    broker.put("a", &data(10), &[]);
    let memory = memory(&data(20));
    let client = broker.client();
    let put = || Put::new("a").part(PutPart::of("all", &memory).unwrap());
    client.put(&put().condition(Condition::Version(1))).unwrap();
    let file = broker.file("input", &data(30));
    broker.refusal(&["put", "a", "--from", text(&file), "--if-version", "1"], 1, "object");
    assert_eq!(broker.json(&["stat", "a"])["object"]["size"], 20);
}
