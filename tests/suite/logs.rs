//! The log on standard error: in the journal, and as JSON.

use crate::support::prelude::*;

/// The log lines of a broker with these options, during a publication and a failed start of a second broker.
fn lines(options: &[&str], in_journal: bool) -> Vec<String> {
    let place = Meeting::host();
    let log = place.folder().join("log");
    let bytes = place.folder().join("bytes");
    let socket = place.socket();
    fs::write(&bytes, "bytes").unwrap();
    let bytes = bytes.to_str().unwrap();
    let socket = socket.to_str().unwrap();
    let file = File::create(&log).unwrap();
    let about = file.metadata().unwrap();
    let logged = |arguments: &[&str]| {
        let mut run = place.bare("vmmfd");
        run.command.args(arguments).args(options).stderr(File::options().append(true).open(&log).unwrap());
        match in_journal {
            true => run.env("JOURNAL_STREAM", format!("{}:{}", about.dev(), about.ino())),
            false => run,
        }
    };
    let mut server = logged(&["serve", "--socket", socket, "-v"]).start();
    server.until("listening");
    let mut put = place.bare("vmmfd");
    put.command.args(["put", "a", "--from", bytes, "--backend", "host", "--socket", socket]);
    put.end().code(0);
    logged(&["stat", "b", "--socket", socket]).end().code(1);
    server.signal(Signal::SIGTERM);
    server.end().code(0);
    let text = fs::read_to_string(&log).unwrap();
    assert!(!text.is_empty());
    text.lines().map(str::to_owned).collect()
}

#[test]
fn journal_lines_have_priorities() {
    let lines = lines(&[], true);
    let priority = |line: &str| line.strip_prefix('<').and_then(|rest| rest.split_once('>')?.0.parse::<u8>().ok());
    for line in &lines {
        assert!(priority(line).is_some_and(|priority| (3..=7).contains(&priority)), "{line}");
        let year = line.split(['-', '>']).nth(1).and_then(|year| year.trim().parse::<u16>().ok());
        assert_eq!(year, None, "{line}");
    }
    let of =
        |words: &str| priority(lines.iter().find(|line| line.contains(words)).unwrap_or_else(|| panic!("{lines:?}")));
    assert_eq!((of("published"), of("serving"), of("error: "), of("hint: ")), (Some(7), Some(6), Some(3), Some(6)));
    // JOURNAL_STREAM names a file other than this log.
    let other = self::lines(&[], false);
    assert!(!other.iter().any(|line| line.starts_with('<')), "{other:?}");
}

#[test]
fn default_log_is_brief() {
    let subject = Subject::host();
    let served = Served::with(Keeper::Apart, &subject, &binary("vmmfd"), &["--quota", "objects=0"]);
    let client = Client::connect(&served.path, &Config::default()).unwrap();
    let memory = filled(&subject.driver, 1 << 20, None, 1);
    for at in 0..50 {
        let put = Put::new(format!("name-{at}")).part(PutPart::of("all", &memory).unwrap());
        client.put(&put).unwrap_err();
    }
    let (old, keeper) = (served.server(), served.keeper());
    kill(old, Signal::SIGTERM).unwrap();
    let (new, _) = served.wait_for_another(old, Instant::now());
    // A killed server may lose its last lines, and the next server may log after its first answer.
    let lines_with = |words: &str| served.log().lines().filter(|line| line.contains(words)).count();
    until(|| lines_with("reactor: serving ") == 2);
    served.kill_server();
    let crashed = format!("WARN vmmfd::broker::keeper::process: the server, pid {new}, crashed: ");
    until(|| lines_with("reactor: serving ") == 3 && lines_with(&crashed) > 0);
    let log = served.log();
    let count = |words: &str| log.lines().filter(|line| line.contains(words)).count();
    assert_eq!((count("dispatch: refused "), count("its quota is 0")), (1, 1), "{log}");
    let uid = nix::unistd::geteuid();
    let again = format!("repeated in the last minute: a request refused because of a quota uid={uid} count=49");
    assert_eq!(count(&again), 1, "{log}");
    assert_eq!((count("closed a connection"), count("reactor: serving ")), (0, 3), "{log}");
    assert_eq!(count(&format!("stopping: the keeper has everything pid={keeper}")), 1, "{log}");
    assert_eq!(count(&crashed), 1, "{log}");
    // Each line has one timestamp, including the keeper's lines.
    for line in log.lines() {
        assert_eq!(line.matches("Z ").count(), 1, "{line}");
    }
    // Without a keeper, the log reports that the memory is freed.
    let place = Meeting::host();
    let mut run = place.bare("vmmfd");
    run.command.args(["serve", "--no-keeper", "--socket", place.socket().to_str().unwrap()]);
    let mut server = run.start();
    server.until("listening");
    server.signal(Signal::SIGTERM);
    server.end().code(0).says("stopping: the memory is freed, except where clients have it mapped\n");
}

#[test]
fn json_log_has_object_per_line() {
    let lines = lines(&["--log-format", "json"], true);
    let objects: Vec<Value> =
        lines.iter().map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("{line}"))).collect();
    for object in &objects {
        assert!(["timestamp", "level", "message"].iter().all(|field| object[field].is_string()), "{object}");
    }
    let published = objects.iter().find(|object| object["message"] == "published").unwrap();
    assert_eq!(
        (&published["level"], &published["name"], &published["version"]),
        (&"DEBUG".into(), &"a".into(), &1.into())
    );
    assert!(objects.iter().any(|object| object["level"] == "ERROR"), "{objects:?}");
}
