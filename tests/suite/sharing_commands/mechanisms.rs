//! Each mechanism in the commands, with its options and devices.

use super::*;

cases! {
    on crate::running::Meeting; every backend: [
    mechanisms_combine_with_all_options,
    every_mechanism_makes_round_trips,
    sealed_buffer_is_lent_read_only,
    ]
    host and cuda: [
    range_takes_only_covering_chunks,
    ]
    gpus alone: [
    many_chunks_work,
    ]
}

fn mechanisms(meeting: &Meeting) -> &'static [&'static str] {
    if meeting.backend() == "host" { &["vmm"] } else { &["vmm", "pool", "legacy"] }
}

fn mechanisms_combine_with_all_options(meeting: Meeting) {
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

fn every_mechanism_makes_round_trips(meeting: Meeting) {
    for mechanism in mechanisms(&meeting) {
        let options = ["--mechanism", mechanism, "--round-trip", "--consumers", "2", "--size", "3000001", "-v"];
        let producer = meeting.listening(&options);
        for consumer in [&[][..], &["--range", "2097150:7"]] {
            let consumer = meeting.consumer(consumer).end();
            assert!(consumer.code(0).stdout.contains(" <-> "), "{}", consumer.stdout);
        }
        let ended = producer.end();
        let verified = ended.code(0).stdout.lines().filter(|line| line.starts_with("verify ")).count();
        assert_eq!(verified, 2, "{}", ended.stdout);
        // Seven bytes of three words: the other bytes are unchanged.
        assert!(ended.stdout.contains("verify    3 words, 0 wrong"), "{}", ended.stdout);
    }
}

fn range_takes_only_covering_chunks(meeting: Meeting) {
    let size = 9u64 << 20;
    let producer = meeting.listening(&["--size", "9MiB", "--chunk", "2MiB", "--consumers", "5", "--corrupt", "-v"]);
    // The wrong byte is in the middle, at 4.5 MiB, in the third chunk.
    for (range, fds, words, wrong) in [
        ("0:1", "fd ", 1, 0),
        ("2097151:2", "2 fds", 2, 0),
        ("4MiB:2MiB", "fd ", 1 << 19, 1),
        ("6MiB:3MiB", "2 fds", 3 << 18, 0),
        ("3MiB:6MiB", "4 fds", 3 << 19, 1),
    ] {
        let consumer = meeting.consumer(&["--range", range, "-v"]).end();
        consumer.code(i32::from(wrong > 0));
        let stdout = &consumer.stdout;
        let offer = stdout.lines().find(|line| line.starts_with("offer ")).unwrap();
        assert!(offer.contains("5 chunks") && offer.contains(&format!(", {fds}")), "{range}: {offer}");
        assert!(stdout.contains(&format!("{words} words, {wrong} wrong")), "{range}: {stdout}");
        if wrong > 0 {
            assert!(stdout.contains(&format!("the first at word {}", size / 2 / 4)), "{stdout}");
        }
    }
    let ended = producer.end();
    // The producer reports the consumer's result.
    assert!(
        ended.code(1).stdout.contains("NOT VERIFIED: 524288 words, 1 wrong, the first at word 1179648"),
        "{}",
        ended.stdout
    );
    assert_eq!(ended.stdout.matches("\nmismatch ").count(), 2, "{}", ended.stdout);
    let producer = meeting.listening(&["--size", "100"]);
    let refused = meeting.consumer(&["--range", "50:51"]).end();
    refused.code(4).says("51 bytes from byte 50 on were requested, but the buffer has 100 bytes");
    producer.end().code(4);
}

fn sealed_buffer_is_lent_read_only(meeting: Meeting) {
    for mechanism in mechanisms(&meeting) {
        let options = ["--seal", "--mechanism", mechanism, "--consumers", "3", "-v"];
        let producer = meeting.listening(&options);
        assert!(meeting.consumer(&[]).end().code(0).stdout.contains("read-only"));
        meeting.consumer(&["--access", "ro"]).end().code(0);
        meeting.consumer(&["--access", "rw"]).end().code(4).says("the owner shares this buffer read-only");
        let ended = producer.end();
        let told = if meeting.backend() == "host" {
            "enforced: the kernel refuses every write"
        } else {
            "a process that holds the descriptor or handle can still write"
        };
        assert!(ended.code(4).stdout.contains(told), "{}", ended.stdout);
    }
}

fn many_chunks_work(meeting: Meeting) {
    // On the emulated driver, fewer and small chunks: less data to fill.
    let (unit, count): (u64, u64) = if meeting.is_fake() { (4096, 2_000) } else { (2 << 20, 10_000) };
    let run = |run: Run| run.env("FAKECUDA_GRANULARITY", unit.to_string());
    let (size, chunk) = ((count * unit).to_string(), unit.to_string());
    let mut producer =
        run(meeting.producer(&["--size", &size, "--chunk", &chunk, "--consumers", "2", "--timeout", "600s"])).start();
    // Ten thousand exports can exceed the consumer's default timeout if the driver serves other processes too.
    producer.until("shared");
    let consumer = run(meeting.consumer(&["--json", "--timeout", "600s"])).end().code(0).json();
    assert_eq!((&consumer["segments"], &consumer["verified"]), (&json!(count), &json!(true)));
    let range = format!("{}:{}", count / 2 * unit + 1, 300 * unit);
    run(meeting.consumer(&["--range", &range, "--timeout", "600s"])).end().code(0);
    producer.end().code(0);
}

#[test]
fn open_file_limit_precedes_allocation() {
    let meeting = Meeting::new(On::Fake);
    let log = meeting.folder().join("log");
    let ended = meeting
        .producer(&["--size", "200MiB", "--chunk", "2MiB"])
        .with_files(100)
        .env("FAKECUDA_LOG", log.to_str().unwrap())
        .end();
    ended.code(5).says("but the limit of this process is 100").says("ulimit -n");
    let calls = fs::read_to_string(log).unwrap();
    assert!(!calls.contains("cuMemCreate") && calls.contains("cuInit"), "{calls}");
}

#[test]
fn reachable_device_maps_the_memory() {
    let meeting = Meeting::new(On::Fake);
    let two = |run: Run| run.env("FAKECUDA_DEVICES", "2");
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
    // The consumer does not see the owner.
    let options = ["--device", "1", "--consumers", "2", "--json"];
    let producer = two(meeting.producer(&options)).start();
    assert_eq!(meeting.consumer(&["--json"]).end().code(0).json()["device"]["ordinal"], 0);
    let refused = meeting.consumer(&[]).env("FAKECUDA_PEERS", "0").end();
    let report = producer.end().code(4).json();
    let bare = report["device"]["uuid"].as_str().unwrap().split_once('-').unwrap().1;
    refused.code(3).says("can't reach the memory of").says(bare);
}
