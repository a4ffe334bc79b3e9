//! Files and arrays through the commands.

use super::*;

cases! {
    on crate::running::Meeting; host and cuda: [
    array_is_shown_with_first_values,
    file_arrives_unchanged,
    corrupted_file_does_not_appear,
    ]
}

fn array_is_shown_with_first_values(meeting: Meeting) {
    let producer =
        meeting.listening(&["--dtype", "i16", "--shape", "3x5", "--order", "F", "--seed", "0", "--consumers", "2"]);
    let consumer = meeting.consumer(&[]).end();
    // The words of the classic pattern, as 16-bit numbers. Elements of a column are adjacent.
    let words = [1337u32 ^ 0xDEAD_BEEF, 1339 ^ 0xDEAD_BEEF, 1341 ^ 0xDEAD_BEEF, 1343 ^ 0xDEAD_BEEF];
    let halves: Vec<i16> = words.iter().flat_map(|word| [*word as i16, (word >> 16) as i16]).collect();
    let line = format!("array     int16 3x5, strides 2x6: {} {} ", halves[0], halves[3]);
    assert!(consumer.code(0).stdout.contains(&line), "no `{line}` in {}", consumer.stdout);
    let report = meeting.consumer(&["--json"]).end().code(0).json();
    assert_eq!(report["array"], json!({"dtype": "int16", "shape": [3, 5], "strides": [2, 6], "offset": 0}));
    assert_eq!(report["size"], 30);
    producer.end().code(0);
    let (producer, consumer) = meeting.pair(&["--dtype", "f64", "--size", "1MiB", "--json"], &["--json"]);
    for report in [producer.code(0).json(), consumer.code(0).json()] {
        assert_eq!((&report["array"]["dtype"], &report["array"]["shape"]), (&json!("float64"), &json!([1 << 17])));
    }
}

fn file_arrives_unchanged(meeting: Meeting) {
    let folder = tempfile::tempdir().unwrap();
    let (from, to) = (folder.path().join("from"), folder.path().join("to"));
    let data: Vec<u8> = (0..9_437_189u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    fs::write(&from, &data).unwrap();
    let from = from.to_str().unwrap();
    let to = to.to_str().unwrap();
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
        // A part of the file has its own digest.
        meeting.consumer(&["--to", to, "--force", "--range", "2097000:7000000"]).end().code(0);
        assert!(fs::read(to).unwrap() == data[2_097_000..9_097_000], "{kind:?}");
        let report = producer.end().code(0).json();
        assert_eq!(report["digest"], json!(format!("blake3:{}", blake3::hash(&data[2_097_000..9_097_000]).to_hex())));
    }
    let producer = meeting.listening(&["--from", from, "--dtype", "u8"]);
    let consumer = meeting.consumer(&["--to", to, "--force"]).end();
    let digest = format!(", digest {} as expected, pid ", &blake3::hash(&data).to_hex()[..8]);
    assert!(consumer.code(0).stdout.contains(&digest), "{}", consumer.stdout);
    assert!(consumer.stdout.contains(&format!("\nsaved     9 MiB in {to}\n")), "{}", consumer.stdout);
    let ended = producer.end();
    assert!(
        ended.code(0).stdout.contains(&format!("shared    9 MiB of {from}, uint8 9437189, at ")),
        "{}",
        ended.stdout
    );
    assert!(ended.stdout.contains(&digest), "{}", ended.stdout);
    // A pattern can be written to a file too.
    let producer = meeting.listening(&["--size", "1001", "--seed", "7"]);
    meeting.consumer(&["--to", to, "--force"]).end().code(0);
    let mut pattern = vec![0; 1001];
    Pattern::new(7).write(0, &mut pattern);
    assert_eq!(fs::read(to).unwrap(), pattern);
    producer.end().code(0);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2, "nothing is left beside it");
}

fn corrupted_file_does_not_appear(meeting: Meeting) {
    let folder = tempfile::tempdir().unwrap();
    let (from, to) = (folder.path().join("from"), folder.path().join("to"));
    fs::write(&from, vec![5; 100_000]).unwrap();
    let producer = meeting.producer(&["--from", from.to_str().unwrap(), "--corrupt", "--json"]).start();
    let consumer = meeting.consumer(&["--to", to.to_str().unwrap(), "--json"]).end();
    let report = consumer.code(1).json();
    assert_eq!((&report["verified"], &report["error"]["kind"]), (&json!(false), &json!("mismatch")));
    producer.end().code(1);
    // This also holds for a part: its digest is computed from the file, not from the corrupted memory.
    let producer = meeting.producer(&["--from", from.to_str().unwrap(), "--corrupt", "--json"]).start();
    let range = ["--to", to.to_str().unwrap(), "--range", "49000:2000"];
    meeting.consumer(&range).end().code(1);
    producer.end().code(1);
    assert!(!to.exists());
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "nothing is left beside it");
}

#[test]
fn unusable_files_are_refused() {
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
        (path("dangling"), true, 2, "is a link to a file that does not exist: name that file, or remove the link"),
    ] {
        let options = ["--to", &name, "--force"];
        // No producer is needed: the consumer refuses before it connects.
        let refused = meeting.consumer(if force { &options } else { &options[..2] }).end();
        refused.code(code).says(words);
    }
    meeting.consumer(&["--force"]).end().code(2);
    assert_eq!(fs::read(path("full")).unwrap(), b"data");

    // The target of the link is replaced, not the link.
    let producer = meeting.listening(&["--from", &path("full"), "--consumers", "2"]);
    fs::write(path("copy"), "old").unwrap();
    fs::set_permissions(path("copy"), PermissionsExt::from_mode(0o600)).unwrap();
    symlink(path("copy"), path("to copy")).unwrap();
    meeting.consumer(&["--to", &path("to copy"), "--force"]).end().code(0);
    assert_eq!(fs::read(path("copy")).unwrap(), b"data");
    assert!(fs::symlink_metadata(path("to copy")).unwrap().is_symlink());
    assert_eq!(fs::metadata(path("copy")).unwrap().permissions().mode() & 0o777, 0o600, "as it was");
    drop(producer);
    let left: Vec<String> =
        fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    assert!(left.iter().all(|name| !name.starts_with(".vmmfd")), "{left:?}");
}

#[test]
fn file_changed_while_read_is_refused() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(1000).unwrap();
    let source = vmmfd_cli::check::files::Source::open(file.path()).unwrap();
    let memory = shared(Spec::vmm(source.size()));
    file.as_file().set_len(999).unwrap();
    let told = source.load(&memory, &mut |_| Ok(())).unwrap_err().to_string();
    assert!(told.contains("was changed since it was opened with 1000 bytes"), "{told}");
    // A file that has grown or was rewritten is refused too.
    file.as_file().set_len(2000).unwrap();
    assert!(source.load(&memory, &mut |_| Ok(())).is_err());
    file.as_file().set_len(1000).unwrap();
    assert!(source.digest(0..10, &mut || Ok(())).is_err());
}

#[test]
fn unfinished_file_leaves_nothing() {
    let meeting = Meeting::fake();
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("to");
    let to = to.to_str().unwrap();
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        let producer = meeting.listening(&["--size", "64M"]);
        let mut consumer = meeting.consumer(&["--to", to]).env("FAKECUDA_SLOW", "cuMemcpyDtoH_v2:200").start();
        consumer.until("mapped");
        thread::sleep(Duration::from_millis(30));
        consumer.signal(signal);
        assert_eq!(consumer.end().status.code().unwrap(), 128 + signal as i32);
        drop(producer);
    }
    // A file size limit is an ordinary error.
    let producer = meeting.listening(&["--size", "3M"]);
    meeting
        .consumer(&["--to", to])
        .with_limit(nix::sys::resource::Resource::RLIMIT_FSIZE, 1 << 20)
        .end()
        .code(5)
        .says("File too large");
    drop(producer);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}
