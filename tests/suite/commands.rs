//! `producer` and `consumer` as a user runs them: two processes, their output and their exit codes.

use crate::support::prelude::*;

cases! {
    on crate::running::Meeting; host and cuda: [
    handoff_works_in_either_start_order,
    json_object_has_every_field,
    a_round_trip_verifies_both_ways,
    many_consumers_at_once_are_served,
    flipped_byte_fails_both_sides,
    a_device_is_matched_by_uuid,
    excess_memory_is_refused_with_figures,
    signals_end_both_sides_cleanly,
    ]
    gpus alone: [
    killed_consumer_harms_nobody,
    killed_producer_is_a_failed_peer,
    ]
}

fn pair(meeting: &Meeting, producer: &[&str], consumer: &[&str]) -> (Value, Value) {
    let (producer, consumer) = meeting.pair(&[producer, &["--json"]].concat(), &[consumer, &["--json"]].concat());
    assert_eq!(producer.status.code(), consumer.status.code(), "{}\n{}", producer.stdout, consumer.stdout);
    (producer.json(), consumer.json())
}

fn handoff_works_in_either_start_order(meeting: Meeting) {
    let producer = meeting.listening(&[]);
    meeting.consumer(&[]).end().code(0);
    producer.end().code(0);
    assert!(meeting.files().is_empty(), "{:?}", meeting.files());

    let mut consumer = meeting.consumer(&[]).start();
    consumer.until("waiting");
    thread::sleep(Duration::from_millis(20));
    meeting.producer(&[]).end().code(0);
    consumer.end().code(0);
    assert!(meeting.files().is_empty(), "{:?}", meeting.files());
}

fn json_object_has_every_field(meeting: Meeting) {
    let (producer, consumer) = pair(&meeting, &["--size", "1000001"], &[]);
    // The schema has the types.
    for (role, report) in [("producer", &producer), ("consumer", &consumer)] {
        assert_eq!((&report["role"], &report["backend"]), (&json!(role), &json!(meeting.backend())));
        let mapped = report["mapped_size"].as_u64().unwrap();
        let granularity = report["granularity"].as_u64().unwrap();
        assert!(mapped >= 1_000_001 && mapped % granularity == 0 && mapped < 1_000_001 + granularity);
        assert_eq!((&report["mismatches"], &report["first_mismatch"]), (&json!(0), &Value::Null));
        assert_eq!(report["device"]["uuid"], producer["device"]["uuid"]);
    }
    let [served] = &producer["consumers"].as_array().unwrap()[..] else { panic!("{producer}") };
    assert_eq!((&served["outcome"], &served["uid"]), (&json!("verified"), &json!(nix::unistd::geteuid().as_raw())));
    assert_eq!(consumer.get("consumers"), None);
}

fn a_round_trip_verifies_both_ways(meeting: Meeting) {
    for (options, size) in [
        (["--size", "1"], 1),
        (["--size", "2097153"], (2 << 20) + 1),
        (["--size", "9M"], 9 << 20),
        (["--elements", "3"], 12),
    ] {
        let (producer, consumer) = pair(&meeting, &[&options[..], &["--round-trip"]].concat(), &[]);
        for report in [producer, consumer] {
            assert_eq!((&report["size"], &report["verified"]), (&json!(size), &json!(true)), "{report}");
            let names = report["steps"].as_array().unwrap().iter().map(|step| step["name"].as_str().unwrap());
            assert_eq!(names.filter(|name| ["fill", "verify"].contains(name)).count(), 2, "{report}");
        }
    }
}

fn many_consumers_at_once_are_served(meeting: Meeting) {
    for options in [&["--consumers", "8"][..], &["--consumers", "8", "--round-trip"]] {
        let producer = meeting.producer(&[options, &["--size", "4M", "--json"]].concat()).start();
        let consumers: Vec<Running> = (0..8).map(|_| meeting.consumer(&[]).start()).collect();
        let pids: BTreeSet<u64> = consumers.iter().map(|consumer| consumer.pid().into()).collect();
        for consumer in consumers {
            consumer.end().code(0);
        }
        let report = producer.end().code(0).json();
        let served = report["consumers"].as_array().unwrap().iter();
        assert_eq!(served.map(|served| served["pid"].as_u64().unwrap()).collect::<BTreeSet<_>>(), pids);
    }
}

fn flipped_byte_fails_both_sides(meeting: Meeting) {
    for options in [&["--corrupt"][..], &["--corrupt", "--round-trip"], &["--corrupt", "--size", "1"]] {
        let (producer, consumer) = pair(&meeting, &[options, &["--seed", "7"]].concat(), &[]);
        for report in [&producer, &consumer] {
            assert_eq!((&report["verified"], &report["mismatches"]), (&json!(false), &json!(1)), "{report}");
            assert_eq!(report["first_mismatch"], consumer["first_mismatch"]);
            assert_eq!(report["error"]["kind"], "mismatch");
        }
        let size = consumer["size"].as_u64().unwrap();
        let first = &consumer["first_mismatch"];
        assert_eq!(first["index"], size / 2 / 4);
        let flipped = first["expected"].as_u64().unwrap() ^ first["found"].as_u64().unwrap();
        assert_eq!(flipped.count_ones(), 1, "{first}");
        assert_eq!(producer["consumers"][0]["outcome"], "mismatch");
    }
}

/// A consumer that is in its check for long. On the emulated driver each copy takes this many milliseconds; on a GPU the data is large.
fn checking(meeting: &Meeting, slow: &str) -> Running {
    let run = meeting.consumer(&["--verify", "host", "--json"]);
    run.env("FAKECUDA_SLOW", format!("cuMemcpyDtoH_v2:{slow}")).start()
}

fn large(meeting: &Meeting) -> &'static str {
    if meeting.is_fake() { "4M" } else { "256M" }
}

fn killed_consumer_harms_nobody(meeting: Meeting) {
    for mechanism in ["vmm", "pool", "legacy"] {
        let options = ["--mechanism", mechanism, "--size", large(&meeting), "--consumers", "2", "-v"];
        let mut producer = meeting.producer(&options).start();
        let killed = checking(&meeting, HANGS);
        producer.until("offer");
        let message = format!("pid {} ended or closed the connection while ", killed.pid());
        killed.signal(Signal::SIGKILL);
        drop(killed.end());
        meeting.consumer(&[]).end().code(0);
        producer.end().code(4).says(&message).says("killed");
    }
}

fn killed_producer_is_a_failed_peer(meeting: Meeting) {
    let mut producer = meeting.listening(&["-v", "--size", large(&meeting)]);
    let consumer = checking(&meeting, "500");
    producer.until("offer");
    producer.signal(Signal::SIGKILL);
    drop(producer.end());
    let report = consumer.end().code(4).json();
    assert_eq!(report["error"]["kind"], "peer");
    // The next producer replaces the stale socket.
    assert!(meeting.socket().exists());
    let producer = meeting.listening(&[]);
    meeting.consumer(&[]).end().code(0);
    producer.end().code(0);
}

fn a_device_is_matched_by_uuid(meeting: Meeting) {
    let (producer, _) = pair(&meeting, &["--device", "0"], &["--device", "0"]);
    let uuid = producer["device"]["uuid"].as_str().unwrap();
    let bare = uuid.split_once('-').unwrap().1;
    pair(&meeting, &["--device", uuid], &["--device", &bare.to_uppercase()]);

    let other = "00000000-1111-2222-3333-444444444444";
    let report = meeting.producer(&["--device", other, "--json"]).end().code(3).json();
    assert!(report["error"]["message"].as_str().unwrap().contains(uuid), "{report}");
    meeting.consumer(&["--device", "99"]).end().code(3).says("99");
}

fn excess_memory_is_refused_with_figures(meeting: Meeting) {
    let ended = meeting.producer(&["--size", "4TiB"]).end();
    ended.code(5).says("4 TiB were requested, but ").says(" free");
    meeting.producer(&["--size", "18446744073709551615"]).end().code(2).says("18446744073709551615");
}

fn signals_end_both_sides_cleanly(meeting: Meeting) {
    for (signal, code) in [(Signal::SIGINT, 130), (Signal::SIGTERM, 143)] {
        let producer = meeting.listening(&[]);
        producer.signal(signal);
        producer.end().code(code).says(signal.as_str());
        assert!(meeting.files().is_empty());

        let consumer = meeting.consumer(&["--json"]).start();
        consumer.until_it_handles_signals();
        consumer.signal(signal);
        assert_eq!(consumer.end().code(code).json()["error"]["kind"], "interrupted");

        let endless = meeting.producer(&["--consumers", "0", "--json"]).start();
        meeting.consumer(&[]).end().code(0);
        endless.signal(signal);
        let report = endless.end().code(0).json();
        assert_eq!((&report["error"], &report["verified"]), (&Value::Null, &json!(true)));
        assert!(meeting.files().is_empty());
    }
}
