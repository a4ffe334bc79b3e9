//! Every way of sharing through the two commands: mechanisms, places, chunks, arrays, files, seals, other devices.

use std::{
    fs,
    os::{
        fd::OwnedFd,
        unix::fs::{PermissionsExt, symlink},
    },
    thread,
    time::{Duration, Instant},
};

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use vmmfd::{
    channel::{Cancel, Channel, Listener, Trust},
    driver::{Access, Backend, Choice, open},
    memory::{Device, Mechanism, Mirror, Placement, Region, Selector, Shared, Spec},
    session::{
        Config, Verdict,
        handoff::{self, Buffer, Consumer, ServeOptions, Served, Unchecked, serve},
    },
    wire::{self, Hello, Message, Received},
};
use vmmfd_cli::check::{DataVerifier, Exercise};

use crate::running::{Meeting, On};

cases! {
    on crate::running::Meeting; every backend: [
    every_mechanism_goes_with_every_access_place_chunk_and_type,
    round_trips_go_both_ways_by_every_mechanism,
    a_wrong_byte_is_found_by_every_mechanism,
    a_range_takes_only_the_chunks_that_cover_it,
    an_array_is_shown_with_its_type_shape_and_first_values,
    small_floats_and_big_endian_numbers_are_shown_as_numbers,
    a_file_arrives_as_it_was,
    a_file_that_is_changed_on_the_way_does_not_appear,
    a_sealed_buffer_is_lent_read_only,
    a_consumer_that_is_killed_with_the_memory_open_harms_nobody,
    many_consumers_at_once_share_by_every_mechanism,
    two_pairs_at_once_have_a_buffer_each,
    ]
    gpus alone: [
    ten_thousand_chunks_work,
    ]
}

/// The mechanisms that a backend has.
fn mechanisms(meeting: &Meeting) -> &'static [&'static str] {
    if meeting.backend() == "host" { &["vmm"] } else { &["vmm", "pool", "legacy"] }
}

fn every_mechanism_goes_with_every_access_place_chunk_and_type(meeting: Meeting) {
    let mut shared = 0;
    for mechanism in ["vmm", "pool", "legacy"] {
        for location in ["device", "host"] {
            for chunk in [None, Some("2MiB")] {
                for array in [&["--size", "5000001"][..], &["--dtype", "f32", "--shape", "1000x1250", "--order", "F"]] {
                    let mut options = vec!["--mechanism", mechanism, "--location", location, "--json"];
                    options.extend(chunk.iter().flat_map(|chunk| ["--chunk", chunk]).chain(array.iter().copied()));
                    options.extend(["--consumers", "3"]);
                    let possible = mechanism == "vmm" || (location, chunk) == ("device", None);
                    let producer = meeting.producer(&options).start();
                    if !(possible && mechanisms(&meeting).contains(&mechanism)) {
                        let report = producer.end().code(3).json();
                        assert_eq!(report["error"]["kind"], "unsupported", "{options:?} {report}");
                        continue;
                    }
                    for access in [&[][..], &["--access", "ro"], &["--access", "rw"]] {
                        let consumer = meeting.consumer(&[access, &["--json"]].concat()).end();
                        let report = consumer.code(0).json();
                        assert_eq!(report["verified"], true, "{options:?} {access:?}");
                        assert_eq!((&report["mechanism"], &report["location"]), (&json!(mechanism), &json!(location)));
                        let segments = if mechanism != "vmm" {
                            0
                        } else if chunk.is_some() {
                            3
                        } else {
                            1
                        };
                        assert_eq!(report["segments"], segments, "{options:?}");
                        assert_eq!(report["array"].is_null(), array.len() == 2);
                        shared += 1;
                    }
                    assert_eq!(producer.end().code(0).json()["verified"], true);
                }
            }
        }
    }
    assert_eq!(shared, if meeting.backend() == "host" { 24 } else { 36 });
    assert!(meeting.files().is_empty());
}

fn round_trips_go_both_ways_by_every_mechanism(meeting: Meeting) {
    for mechanism in mechanisms(&meeting) {
        let options = ["--mechanism", mechanism, "--round-trip", "--consumers", "2", "--size", "3000001"];
        let producer = meeting.listening(&options);
        for consumer in [&[][..], &["--range", "2097150:7"]] {
            let consumer = meeting.consumer(consumer).end();
            assert!(consumer.code(0).stdout.contains(" fill "), "{}", consumer.stdout);
        }
        let ended = producer.end();
        let verified = ended.code(0).stdout.lines().filter(|line| line.contains(" verify ")).count();
        assert_eq!(verified, 2, "{}", ended.stdout);
        // Seven bytes of three words: the rest was not touched.
        assert!(ended.stdout.contains("verify   3 words, 0 wrong"), "{}", ended.stdout);
    }
}

fn a_wrong_byte_is_found_by_every_mechanism(meeting: Meeting) {
    for mechanism in mechanisms(&meeting) {
        let producer = meeting.producer(&["--mechanism", mechanism, "--corrupt", "--json"]).start();
        let report = meeting.consumer(&["--json"]).end().code(1).json();
        assert_eq!((&report["mismatches"], &report["verified"]), (&json!(1), &json!(false)));
        producer.end().code(1);
    }
}

fn a_range_takes_only_the_chunks_that_cover_it(meeting: Meeting) {
    let size = 9u64 << 20;
    let producer = meeting.listening(&["--size", "9MiB", "--chunk", "2MiB", "--consumers", "5", "--corrupt"]);
    // The wrong byte is in the middle, at 4.5 MiB: in the third chunk.
    for (range, fds, words, wrong) in [
        ("0:1", "fd ", 1, 0),
        ("2097151:2", "2 fds", 2, 0),
        ("4MiB:2MiB", "fd ", 1 << 19, 1),
        ("6MiB:3MiB", "2 fds", 3 << 18, 0),
        ("3MiB:6MiB", "4 fds", 3 << 19, 1),
    ] {
        let consumer = meeting.consumer(&["--range", range]).end();
        consumer.code(i32::from(wrong > 0));
        let stdout = &consumer.stdout;
        let offer = stdout.lines().find(|line| line.contains(" offer ")).unwrap();
        assert!(offer.contains("5 chunks") && offer.contains(&format!(", {fds}")), "{range}: {offer}");
        assert!(stdout.contains(&format!("{words} words, {wrong} wrong")), "{range}: {stdout}");
        if wrong > 0 {
            assert!(stdout.contains(&format!("the first at word {}", size / 2 / 4)), "{stdout}");
        }
    }
    let ended = producer.end();
    // The other side heard the same, and believed it.
    assert!(
        ended.code(1).stdout.contains("NOT VERIFIED: 524288 words, 1 wrong, the first at word 1179648"),
        "{}",
        ended.stdout
    );
    assert_eq!(ended.stdout.matches(": mismatch").count(), 2, "{}", ended.stdout);
    let producer = meeting.listening(&["--size", "100"]);
    let refused = meeting.consumer(&["--range", "50:51"]).end();
    refused.code(4).says("51 bytes from 50 on were asked for, of a buffer of 100 bytes");
    producer.end().code(4);
}

fn an_array_is_shown_with_its_type_shape_and_first_values(meeting: Meeting) {
    let producer =
        meeting.listening(&["--dtype", "i16", "--shape", "3x5", "--order", "F", "--seed", "0", "--consumers", "2"]);
    let consumer = meeting.consumer(&[]).end();
    // The classic pattern's words, as 16-bit numbers; down a column they lie side by side.
    let words = [1337u32 ^ 0xDEAD_BEEF, 1339 ^ 0xDEAD_BEEF, 1341 ^ 0xDEAD_BEEF, 1343 ^ 0xDEAD_BEEF];
    let halves: Vec<i16> = words.iter().flat_map(|word| [*word as i16, (word >> 16) as i16]).collect();
    let line = format!("array    int16 3x5, strides 2x6: {} {} ", halves[0], halves[3]);
    assert!(consumer.code(0).stdout.contains(&line), "no `{line}` in {}", consumer.stdout);
    let report = meeting.consumer(&["--json"]).end().code(0).json();
    assert_eq!(report["array"], json!({"dtype": "int16", "shape": [3, 5], "strides": [2, 6], "offset": 0}));
    assert_eq!(report["size"], 30);
    producer.end().code(0);
    let producer = meeting.listening(&["--dtype", "f64", "--size", "1MiB"]);
    assert_eq!(meeting.consumer(&["--json"]).end().code(0).json()["array"]["shape"], json!([1 << 17]));
    producer.end().code(0);
}

fn small_floats_and_big_endian_numbers_are_shown_as_numbers(meeting: Meeting) {
    let file = tempfile::NamedTempFile::new().unwrap();
    let bf16 = [0x3f80u16, 0xc000, 0x3dcd, 0x7f80, 0x7fc0, 0x4049];
    let shown = "1.0 -2.0 0.100097656 inf NaN 3.140625";
    let little = bf16.map(u16::to_le_bytes).concat();
    let big = bf16.map(u16::to_be_bytes).concat();
    let words = [1.5f32, -0.25].map(f32::to_be_bytes).concat();
    for (dtype, shape, bytes, line, report) in [
        (
            "bf16",
            "2,3",
            &little,
            format!("bfloat16 2x3, strides 6x2: {shown}"),
            json!({"dtype": "bfloat16", "shape": [2, 3]}),
        ),
        (
            ">bfloat16",
            "6",
            &big,
            format!(">bfloat16 6, strides 2: {shown}"),
            json!({"dtype": "bfloat16", "byte_order": "big", "shape": [6]}),
        ),
        (
            ">f4",
            "2x1",
            &words,
            ">float32 2x1, strides 4x4: 1.5 -0.25".to_owned(),
            json!({"dtype": "float32", "byte_order": "big", "shape": [2, 1]}),
        ),
        (
            "f8e4m3fn",
            "2,2",
            &vec![0x38, 0x7e, 0xff, 0x81],
            "float8_e4m3fn 2x2, strides 2x1: 1.0 448.0 NaN -0.001953125".to_owned(),
            json!({"dtype": "float8_e4m3fn", "shape": [2, 2]}),
        ),
        (
            "float8_e5m2",
            "3",
            &vec![0x3c, 0x7b, 0xfc],
            "float8_e5m2 3, strides 1: 1.0 57344.0 -inf".to_owned(),
            json!({"dtype": "float8_e5m2", "shape": [3]}),
        ),
    ] {
        fs::write(file.path(), bytes).unwrap();
        let from = file.path().to_str().unwrap();
        let options = ["--from", from, "--dtype", dtype, "--shape", shape, "--consumers", "2"];
        let producer = meeting.listening(&options);
        let consumer = meeting.consumer(&[]).end();
        let line = format!("array    {line}\n");
        assert!(consumer.code(0).stdout.contains(&line), "no `{line}` in {}", consumer.stdout);
        let mut report = report;
        (report["strides"], report["offset"]) = (json!(null), json!(0));
        assert_eq!(meeting.consumer(&["--json"]).end().code(0).json()["array"], report);
        producer.end().code(0);
    }
    // The pattern is the same bytes whatever the elements are.
    let producer = meeting.listening(&["--dtype", "bfloat16", "--shape", "2,3", "--round-trip", "--seed", "0"]);
    let consumer = meeting.consumer(&[]).end();
    let first = f32::from_bits((1337u32 ^ 0xDEAD_BEEF) << 16);
    let line = format!("array    bfloat16 2x3, strides 6x2: {first:?} ");
    assert!(consumer.code(0).stdout.contains(&line), "no `{line}` in {}", consumer.stdout);
    producer.end().code(0);
}

fn a_file_arrives_as_it_was(meeting: Meeting) {
    let folder = tempfile::tempdir().unwrap();
    let (from, to) = (folder.path().join("from"), folder.path().join("to"));
    let data: Vec<u8> = (0..9_437_189u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    fs::write(&from, &data).unwrap();
    let (from, to) = (from.to_str().unwrap(), to.to_str().unwrap());
    let mut kinds: Vec<&[&str]> = vec![&[], &["--chunk", "2MiB"], &["--location", "host"], &["--seal"]];
    if meeting.backend() != "host" {
        kinds.extend([&["--mechanism", "pool"][..], &["--mechanism", "legacy", "--seal"]]);
    }
    for kind in kinds {
        let producer = meeting.producer(&[kind, &["--from", from, "--json", "--consumers", "2"]].concat()).start();
        let report = meeting.consumer(&["--to", to, "--force", "--json"]).end().code(0).json();
        assert!(fs::read(to).unwrap() == data, "{kind:?}");
        assert_eq!(fs::metadata(to).unwrap().permissions().mode() & 0o111, 0);
        let expected = format!("blake3:{}", blake3::hash(&data).to_hex());
        assert_eq!((&report["digest"], &report["verified"]), (&json!(expected), &json!(true)));
        // Some of it, with a digest of its own.
        meeting.consumer(&["--to", to, "--force", "--range", "2097000:7000000"]).end().code(0);
        assert!(fs::read(to).unwrap() == data[2_097_000..9_097_000], "{kind:?}");
        let report = producer.end().code(0).json();
        assert_eq!(report["digest"], json!(format!("blake3:{}", blake3::hash(&data[2_097_000..9_097_000]).to_hex())));
    }
    // A pattern is written to a file as well.
    let producer = meeting.listening(&["--size", "1001", "--seed", "7"]);
    meeting.consumer(&["--to", to, "--force"]).end().code(0);
    let mut pattern = vec![0; 1001];
    vmmfd_cli::check::pattern::Pattern::new(7).write(0, &mut pattern);
    assert_eq!(fs::read(to).unwrap(), pattern);
    producer.end().code(0);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2, "nothing is left beside it");
}

fn a_file_that_is_changed_on_the_way_does_not_appear(meeting: Meeting) {
    let folder = tempfile::tempdir().unwrap();
    let (from, to) = (folder.path().join("from"), folder.path().join("to"));
    fs::write(&from, vec![5; 100_000]).unwrap();
    let producer = meeting.producer(&["--from", from.to_str().unwrap(), "--corrupt", "--json"]).start();
    let consumer = meeting.consumer(&["--to", to.to_str().unwrap(), "--json"]).end();
    let report = consumer.code(1).json();
    assert_eq!((&report["verified"], &report["error"]["kind"]), (&json!(false), &json!("mismatch")));
    producer.end().code(1);
    // Of a part too: its digest is the file's, and not that of what became of it.
    let producer = meeting.producer(&["--from", from.to_str().unwrap(), "--corrupt", "--json"]).start();
    let range = ["--to", to.to_str().unwrap(), "--range", "49000:2000"];
    meeting.consumer(&range).end().code(1);
    producer.end().code(1);
    assert!(!to.exists());
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "nothing is left beside it");
}

fn a_sealed_buffer_is_lent_read_only(meeting: Meeting) {
    for mechanism in mechanisms(&meeting) {
        let options = ["--seal", "--mechanism", mechanism, "--consumers", "3"];
        let producer = meeting.listening(&options);
        assert!(meeting.consumer(&[]).end().code(0).stdout.contains("read-only"));
        meeting.consumer(&["--access", "ro"]).end().code(0);
        meeting.consumer(&["--access", "rw"]).end().code(4).says("the buffer is sealed");
        let ended = producer.end();
        let told = if meeting.backend() == "host" {
            "enforced: the kernel refuses every write"
        } else {
            "a process that holds the descriptor or handle can still write"
        };
        assert!(ended.code(4).stdout.contains(told), "{}", ended.stdout);
    }
}

fn a_consumer_that_is_killed_with_the_memory_open_harms_nobody(meeting: Meeting) {
    for mechanism in mechanisms(&meeting) {
        let producer = meeting.listening(&["--mechanism", mechanism, "--size", "256M", "--consumers", "2"]);
        let mut killed = meeting.consumer(&[]).start();
        killed.until("map");
        killed.signal(Signal::SIGKILL);
        drop(killed.end());
        meeting.consumer(&[]).end().code(0);
        producer.end().code(4);
    }
}

fn many_consumers_at_once_share_by_every_mechanism(meeting: Meeting) {
    for mechanism in mechanisms(&meeting) {
        let producer = meeting.listening(&["--mechanism", mechanism, "--size", "4M", "--consumers", "6"]);
        let consumers: Vec<_> = (0..6).map(|_| meeting.consumer(&[]).start()).collect();
        for consumer in consumers {
            consumer.end().code(0);
        }
        producer.end().code(0);
    }
}

fn two_pairs_at_once_have_a_buffer_each(meeting: Meeting) {
    for mechanism in mechanisms(&meeting) {
        let other = meeting.another();
        let options = ["--mechanism", mechanism, "--round-trip", "--dtype", "u32", "--shape", "1000"];
        let one = meeting.producer(&[&options[..], &["--seed", "1"]].concat()).start();
        let two = other.producer(&[&options[..], &["--seed", "2"]].concat()).start();
        let consumers = [&meeting, &other].map(|meeting| meeting.consumer(&[]).start());
        let first = consumers.map(|consumer| {
            let stdout = consumer.end().code(0).stdout.clone();
            stdout.split_once("array    uint32 1000, strides 4: ").unwrap().1.split(' ').next().unwrap().to_owned()
        });
        assert_eq!(first, [1, 2].map(|salt| (1337u32 ^ 0xDEAD_BEEF ^ salt).to_string()));
        one.end().code(0);
        two.end().code(0);
    }
}

fn ten_thousand_chunks_work(meeting: Meeting) {
    // Small chunks over the emulated driver: no 20 GB to allocate, and less to fill.
    let unit: u64 = if meeting.is_fake() { 4096 } else { 2 << 20 };
    let run = |run: crate::running::Run| run.env("FAKECUDA_GRANULARITY", unit.to_string());
    let (size, chunk) = ((10_000 * unit).to_string(), unit.to_string());
    let mut producer =
        run(meeting.producer(&["--size", &size, "--chunk", &chunk, "--consumers", "2", "--timeout", "600s"])).start();
    // Ten thousand exports may take longer than a consumer waits, where the driver has others to serve.
    producer.until("listen");
    let consumer = run(meeting.consumer(&["--json", "--timeout", "600s"])).end().code(0).json();
    assert_eq!((&consumer["segments"], &consumer["verified"]), (&json!(10_000), &json!(true)));
    let range = format!("{}:{}", 5000 * unit + 1, 300 * unit);
    run(meeting.consumer(&["--range", &range, "--timeout", "600s"])).end().code(0);
    producer.end().code(0);
}

#[test]
fn a_limit_of_open_files_is_named_before_anything_is_allocated() {
    let meeting = Meeting::new(On::Fake);
    let log = meeting.folder().join("log");
    let ended = meeting
        .producer(&["--size", "200MiB", "--chunk", "2MiB"])
        .with_files(100)
        .env("FAKECUDA_LOG", log.to_str().unwrap())
        .end();
    ended.code(5).says("and this process may have 100").says("ulimit -n");
    let calls = fs::read_to_string(log).unwrap();
    assert!(!calls.contains("cuMemCreate") && calls.contains("cuInit"), "{calls}");
}

#[test]
fn another_device_maps_the_memory_where_it_can_reach_it() {
    let meeting = Meeting::new(On::Fake);
    let two = |run: crate::running::Run| run.env("FAKECUDA_DEVICES", "2");
    for mechanism in ["vmm", "pool", "legacy"] {
        let options = ["--device", "1", "--mechanism", mechanism, "--round-trip", "--consumers", "3", "--json"];
        let producer = two(meeting.producer(&options)).start();
        let own = two(meeting.consumer(&["--json"])).end().code(0).json();
        assert_eq!(own["device"]["ordinal"], 1, "by default the memory's own");
        let other = two(meeting.consumer(&["--device", "0", "--json"])).end().code(0).json();
        assert_eq!(other["device"]["ordinal"], 0);
        assert_ne!(other["device"]["uuid"], own["device"]["uuid"]);
        let apart = two(meeting.consumer(&["--device", "0"])).env("FAKECUDA_PEERS", "0").end();
        let uuid = own["device"]["uuid"].as_str().unwrap();
        apart.code(3).says(uuid).says(other["device"]["uuid"].as_str().unwrap()).says("can't reach the memory of");
        assert_eq!(producer.end().code(4).json()["device"]["uuid"], own["device"]["uuid"]);
    }
}

#[test]
fn an_owner_that_a_consumer_does_not_see_is_reached_or_named() {
    let meeting = Meeting::new(On::Fake);
    let options = ["--device", "1", "--consumers", "2", "--json"];
    let producer = meeting.producer(&options).env("FAKECUDA_DEVICES", "2").start();
    let reached = meeting.consumer(&["--json"]).end().code(0).json();
    assert_eq!(reached["device"]["ordinal"], 0);
    let refused = meeting.consumer(&[]).env("FAKECUDA_PEERS", "0").end();
    let report = producer.end().code(4).json();
    let bare = report["device"]["uuid"].as_str().unwrap().split_once('-').unwrap().1;
    refused.code(3).says("can't reach the memory of").says(bare);
}

#[test]
fn files_that_can_not_be_shared_or_written_are_refused_in_one_sentence() {
    let meeting = Meeting::new(On::Host);
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    fs::write(path("empty"), "").unwrap();
    fs::write(path("full"), "data").unwrap();
    fs::create_dir(path("folder")).unwrap();
    symlink(path("full"), path("link")).unwrap();
    symlink(path("nowhere"), path("dangling")).unwrap();
    nix::unistd::mkfifo(path("pipe").as_str(), nix::sys::stat::Mode::S_IRWXU).unwrap();
    for (name, code, words) in [
        (path("none"), 2, "does not exist"),
        (path("empty"), 2, "is empty"),
        (path("folder"), 2, "is not a regular file"),
        (path("pipe"), 2, "is not a regular file"),
        ("/dev/zero".to_owned(), 2, "is not a regular file"),
    ] {
        meeting.producer(&["--from", &name]).end().code(code).says(words).says(&name);
    }
    for (name, force, code, words) in [
        (path("full"), false, 2, "exists: name another file, or replace it with --force"),
        (path("folder"), true, 2, "exists and is not a regular file"),
        (path("pipe"), true, 2, "exists and is not a regular file"),
        ("/dev/null".to_owned(), true, 2, "exists and is not a regular file"),
        (path("none/file"), false, 2, "is in a folder that does not exist"),
        (path("full/file"), false, 2, "is not in a folder"),
        (path(".."), true, 2, "exists and is not a regular file"),
    ] {
        let options = ["--to", &name, "--force"];
        // Nobody has to be asked for that: there is no producer.
        let refused = meeting.consumer(if force { &options } else { &options[..2] }).end();
        refused.code(code).says(words);
    }
    meeting.consumer(&["--force"]).end().code(2);
    assert_eq!(fs::read(path("full")).unwrap(), b"data");

    // What a link leads to is replaced, not the link.
    let producer = meeting.listening(&["--from", &path("full"), "--consumers", "2"]);
    fs::write(path("copy"), "old").unwrap();
    fs::set_permissions(path("copy"), PermissionsExt::from_mode(0o600)).unwrap();
    symlink(path("copy"), path("to copy")).unwrap();
    meeting.consumer(&["--to", &path("to copy"), "--force"]).end().code(0);
    assert_eq!(fs::read(path("copy")).unwrap(), b"data");
    assert!(fs::symlink_metadata(path("to copy")).unwrap().is_symlink());
    assert_eq!(fs::metadata(path("copy")).unwrap().permissions().mode() & 0o777, 0o600, "as it was");
    // One that leads nowhere is a name that is taken.
    meeting.consumer(&["--to", &path("dangling")]).end();
    drop(producer);
    let left: Vec<String> =
        fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    assert!(left.iter().all(|name| !name.starts_with(".vmmfd")), "{left:?}");
}

#[test]
fn options_that_do_not_go_together_are_bad_usage() {
    let meeting = Meeting::new(On::Host);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("data");
    fs::write(&file, vec![0; 24]).unwrap();
    let file = file.to_str().unwrap();
    for (options, words) in [
        (&["--shape", "2x3", "--size", "24"][..], "cannot be used with"),
        (&["--order", "F"], "--shape"),
        (&["--from", file, "--size", "24"], "cannot be used with"),
        (&["--from", file, "--seed", "1"], "cannot be used with"),
        (&["--from", file, "--round-trip"], "cannot be used with"),
        (&["--seal", "--round-trip"], "cannot be used with"),
        (&["--elements", "5", "--dtype", "f32"], "cannot be used with"),
        (&["--shape", "0x5"], "from 1 to"),
        (&["--shape", "2x"], "`2x` is not a shape: write whole numbers with x or commas between"),
        (&["--shape", "2,3x4"], "`2,3x4` is not a shape"),
        (&["--shape", "18446744073709551615x2"], "64 bits"),
        (&["--dtype", "f33"], "`f33` is not an element type: write a name such as float32"),
        (&["--dtype", "f32", "--size", "6"], "has 4 bytes, and there are 6"),
        (&["--from", file, "--dtype", "f32", "--shape", "7"], "has 28 bytes, and there are 24"),
        (&["--mechanism", "ipc"], "[possible values: vmm, pool, legacy]"),
        (&["--location", "disk"], "[possible values: device, host]"),
        (&["--chunk", "0"], "is no memory: write at least 1 byte"),
        (&["--order", "X", "--shape", "2"], "[possible values: C, F]"),
        (&["--from", "-"], "`-` is not supported: the size"),
    ] {
        meeting.producer(options).end().code(2).says(words);
    }
    for (range, words) in [
        ("5", "write its offset and length"),
        (":5", "write its offset"),
        ("5:", "write its offset"),
        ("0:0", "no memory"),
        ("1:18446744073709551615", "64 bits"),
        ("x:5", "is not a size"),
    ] {
        meeting.consumer(&["--range", range]).end().code(2).says(words);
    }
    let producer = meeting.listening(&["--from", file, "--dtype", "f32", "--shape", "2x3"]);
    assert!(
        meeting
            .consumer(&[])
            .end()
            .code(0)
            .stdout
            .contains("array    float32 2x3, strides 12x4: 0.0 0.0 0.0 0.0 0.0 0.0\n")
    );
    producer.end().code(0);
}

#[test]
fn a_file_that_changes_under_the_reader_is_told() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(1000).unwrap();
    let source = vmmfd_cli::check::files::Source::open(file.path()).unwrap();
    let memory = shared(Spec::vmm(source.size()));
    file.as_file().set_len(999).unwrap();
    let told = source.load(&memory, &mut |_| Ok(())).unwrap_err().to_string();
    assert!(told.contains("was changed since it was opened with 1000 bytes"), "{told}");
    // Nor is half of what has grown, or of what was written anew, anybody's data.
    file.as_file().set_len(2000).unwrap();
    assert!(source.load(&memory, &mut |_| Ok(())).is_err());
    file.as_file().set_len(1000).unwrap();
    assert!(source.digest(0..10, &mut || Ok(())).is_err());
}

#[test]
fn nothing_stays_beside_a_file_that_was_not_finished() {
    let meeting = Meeting::new(On::Host);
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("to");
    let to = to.to_str().unwrap();
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        let producer = meeting.listening(&["--size", "300M"]);
        let mut consumer = meeting.consumer(&["--to", to]).start();
        consumer.until("map");
        thread::sleep(Duration::from_millis(30));
        consumer.signal(signal);
        let code = consumer.end().status.code().unwrap();
        assert_eq!(code, 128 + signal as i32);
        drop(producer);
    }
    // A limit of file sizes is an error like any other.
    let producer = meeting.listening(&["--size", "3M"]);
    meeting.consumer(&["--to", to]).with_file_size(1 << 20).end().code(5).says("File too large");
    drop(producer);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn large_raw_elements_are_shown_by_their_beginning() {
    let meeting = Meeting::new(On::Host);
    let producer = meeting.listening(&["--dtype", "|V1048576", "--shape", "3", "--seed", "0"]);
    let consumer = meeting.consumer(&[]).end();
    let line = consumer.code(0).stdout.lines().find(|line| line.contains(" array ")).unwrap();
    assert!(line.len() < 300 && line.contains("void8388608 3, strides 1048576: 0xd6bbadde"), "{line}");
    producer.end().code(0);
}

/// A producer of this process, and a consumer of it. Returns what `body` did and what was served.
fn meet<T>(buffer: &Buffer<'_>, options: &ServeOptions, body: impl FnOnce(Consumer<'_>) -> T) -> (T, Vec<Served>) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let config = Config::default();
    let listener = Listener::bind(&path, false, config.timeout, &Cancel::new().unwrap()).unwrap();
    thread::scope(|scope| {
        let serving = scope.spawn(|| serve(listener, buffer, options, &config, &|_| {}));
        let driver = buffer.shared().device().driver();
        let result = body(Consumer::connect(driver, None, &path, &config, &|_| {}).unwrap());
        (result, serving.join().unwrap().into_result().unwrap())
    })
}

/// A producer of this process, and a consumer by hand that has asked for its buffer.
fn meet_by_hand<T>(buffer: &Buffer<'_>, body: impl FnOnce(&mut Channel) -> T) -> (T, Vec<Served>) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let cancel = Cancel::new().unwrap();
    let config = Config::default().timeout(Duration::from_secs(20));
    let listener = Listener::bind(&path, false, config.timeout, &cancel).unwrap();
    thread::scope(|scope| {
        let serving = scope.spawn(|| serve(listener, buffer, &ServeOptions::default(), &config, &|_| {}));
        let patience = Duration::from_secs(20);
        let mut channel = vmmfd::channel::connect(&path, patience, &Trust::default(), &cancel).unwrap();
        let hello = Hello { version: 1, capabilities: Vec::new(), backend: "cuda".into(), pid: 1, timeout_ms: 20_000 };
        channel.send(&Message::Hello(hello), &[]).unwrap();
        next(&mut channel);
        let request = wire::Request { object: "default".into(), access: None, range: None };
        channel.send(&Message::Request(request), &[]).unwrap();
        let result = body(&mut channel);
        // The channel goes after that.
        (result, serving.join().unwrap().into_result().unwrap())
    })
}

fn shared(spec: impl Into<Spec>) -> Shared {
    let driver = open(Choice::Only(Backend::Host)).unwrap().driver;
    Shared::create(&Device::find(&driver, Selector::default()).unwrap(), spec).unwrap()
}

#[test]
fn memory_of_a_pool_is_the_producers_again_when_it_was_let_go_of() {
    let subject = crate::support::Subject::fake();
    let ask = |consumer: &mut Consumer<'_>| {
        let object = consumer.request(&handoff::Request::default()).unwrap();
        let found = consumer.verify(&object, &mut DataVerifier::new(&|_| {})).unwrap();
        assert!(found.verified && found.check.is_some());
        consumer.report(&object, &found).unwrap();
        object
    };
    let memory = Shared::create(&subject.device(), Spec::pool(1000)).unwrap();
    let buffer = Buffer::new(memory, Exercise::pattern(5, &|_| {}), None).unwrap();
    let (closed, served) = meet(&buffer, &ServeOptions::default(), |mut consumer| {
        let objects = [ask(&mut consumer), ask(&mut consumer)];
        // The connection goes on without the consumer, for as long as the memory is open.
        consumer.close();
        thread::sleep(Duration::from_millis(300));
        drop(objects);
        Instant::now()
    });
    assert!(closed.elapsed() < Config::default().timeout / 2, "the producer waits for that and no longer");
    assert!(served[0].error.is_none(), "{served:?}");
    // Whoever never lets go is a failed peer, and can't hold the producer for ever: but the memory is not freed under it.
    for spec in [Spec::pool(1000), Spec::legacy(1000)] {
        let subject = crate::support::Subject::fake();
        let memory = Shared::create(&subject.device(), spec).unwrap();
        let taken = subject.faulty.taken();
        let buffer = Buffer::new(memory, Unchecked, None).unwrap();
        let ((), served) = meet_by_hand(&buffer, |channel| {
            let (Message::Offer(_), _) = next(channel) else { panic!() };
            if spec.mechanism() == Mechanism::Pool {
                let (Message::Pool(_), _) = next(channel) else { panic!() };
                channel.send(&Message::Received(Received { segments: 0 }), &[]).unwrap();
            }
            channel.send(&Message::Result(Verdict::unchecked(true)), &[]).unwrap();
            next(channel);
        });
        let told = served[0].error.as_ref().unwrap().to_string();
        assert!(told.contains("for the consumer to close the memory"), "{told}");
        drop(buffer);
        assert_eq!(subject.faulty.taken(), taken, "it is still there");
        // It stays so to the end of the process.
        std::mem::forget(subject);
    }
}

fn next(channel: &mut Channel) -> (Message, Vec<OwnedFd>) {
    loop {
        match channel.receive("for a test").unwrap() {
            (Message::Busy(_), _) => {}
            message => return message,
        }
    }
}

#[test]
fn memory_that_a_program_fills_itself_is_lent_as_it_is() {
    let memory = shared(Spec::vmm(1000));
    Mirror::of(&memory, 0, 1000).unwrap().write(990, b"end").unwrap();
    let array =
        vmmfd::array::ArrayDescriptor::new("u16".parse().unwrap(), vec![10, 50], vmmfd::array::Order::C).unwrap();
    let buffer = Buffer::new(memory, Unchecked, Some(array)).unwrap();
    let ((), served) = meet(&buffer, &ServeOptions::default().round_trip(true), |mut consumer| {
        let object = consumer.request(&handoff::Request::default().access(Access::ReadWrite)).unwrap();
        assert_eq!(object.check(), None);
        let found = consumer.verify(&object, &mut DataVerifier::new(&|_| {})).unwrap();
        assert_eq!(found, Verdict::unchecked(true));
        assert!(consumer.report(&object, &found).unwrap().verified);
        let array = object.into_array().unwrap().unwrap();
        assert_eq!(array.element(&[9, 45]).unwrap(), b"en");
        array.memory().copy_in(0, b"back").unwrap();
        consumer.close();
    });
    assert!(served[0].error.is_none(), "{served:?}");
    let mut back = [0; 4];
    buffer.shared().copy_out(0, &mut back).unwrap();
    assert_eq!(&back, b"back");
}

#[test]
fn mechanisms_and_placements_have_the_names_of_the_wire() {
    for (mechanism, wire, name) in [
        (Mechanism::Vmm, wire::Mechanism::Vmm, "vmm"),
        (Mechanism::Pool, wire::Mechanism::Pool, "pool"),
        (Mechanism::Legacy, wire::Mechanism::Legacy, "legacy"),
    ] {
        assert_eq!((mechanism.to_string(), name.parse()), (name.to_owned(), Ok(mechanism)));
        assert_eq!(serde_json::to_value(wire).unwrap(), Value::from(name));
    }
    for (placement, wire, name) in
        [(Placement::Device, wire::Location::Device, "device"), (Placement::Host, wire::Location::Host, "host")]
    {
        assert_eq!((placement.to_string(), name.parse()), (name.to_owned(), Ok(placement)));
        assert_eq!(serde_json::to_value(wire).unwrap(), Value::from(name));
    }
}
