//! The other commands, and the broker itself.

use super::*;

cases! {
    on crate::broker_commands::Broker; host and cuda: [
    who_shows_holders_and_unnamed_versions,
    claims_are_shown_with_their_holder,
    topics_are_shown_with_their_publisher,
    names_are_deleted_one_by_one,
    prefix_is_deleted_only_as_listed,
    only_verbose_output_is_long,
    bad_input_is_one_sentence,
    notices_name_the_prefix,
    signal_ends_the_broker_with_report,
    ]
}

fn who_shows_holders_and_unnamed_versions(broker: Broker) {
    broker.put("held", &data(100), &[]);
    broker.put("free", &data(100), &[]);
    assert_eq!(broker.json(&["who"])["leases"], json!([]));
    let first = broker.lease("held");
    let shown = broker.json(&["who"]);
    let lease = &shown["leases"][0];
    assert_eq!((&lease["name"], &lease["version"], &lease["named"]), (&json!("held"), &json!(1), &json!(true)));
    assert_eq!((&lease["pid"], &lease["uid"]), (&json!(process::id()), &json!(nix::unistd::geteuid().as_raw())));
    assert_eq!(lease["command"], fs::read_to_string("/proc/self/comm").unwrap().trim_end());
    let size = &broker.json(&["ls", "held"])["objects"][0]["devices"][0]["bytes"];
    assert_eq!((&lease["size"], &shown["unnamed"]), (size, &json!([])));
    // After a replacement both versions are leased.
    broker.put("held", &data(200), &["--replace"]);
    let second = broker.lease("held");
    broker.end(&["rm", "held"]).code(0);
    let shown = broker.json(&["who", "he"]);
    let unnamed: Vec<_> =
        shown["unnamed"].as_array().unwrap().iter().map(|one| (&one["version"], &one["leases"])).collect();
    assert_eq!(unnamed, [(&json!(1), &json!(1)), (&json!(2), &json!(1))]);
    assert_eq!((&shown["users"][0]["objects"], &shown["users"][0]["leases"]), (&json!(1), &json!(2)));
    let sum: u64 = shown["devices"].as_array().unwrap().iter().map(|device| device["bytes"].as_u64().unwrap()).sum();
    assert_eq!(sum, 3 * size.as_u64().unwrap());
    let headings = |arguments: &[&str]| -> Vec<String> {
        let table = broker.end(arguments);
        table.code(0).stdout.lines().filter(|line| line.ends_with(':')).map(str::to_owned).collect()
    };
    assert_eq!(headings(&["who"]), ["Leases:", "Versions without a name:", "Users:", "Devices:"]);
    // With a name, only rows about this name are printed.
    assert_eq!(headings(&["who", "held"]), ["Leases:", "Versions without a name:"]);
    drop((first, second));
    wait_for("the end of the leases", || broker.json(&["who"])["leases"] == json!([]));
}

fn claims_are_shown_with_their_holder(broker: Broker) {
    let claimer = broker.client();
    let claim = |name, of: &ClaimOf| match claimer.get_or_claim(&Get::new(name), of).unwrap() {
        Found::Claim(claim) => claim,
        other => panic!("{other:?}"),
    };
    let claims = [claim("models/a", &ClaimOf::whole()), claim("models/b", &ClaimOf::part("rank0", "first"))];
    for shown in [broker.json(&["who"]), broker.json(&["status"])] {
        let claims = shown["claims"].as_array().unwrap();
        let held: Vec<_> = claims.iter().map(|claim| (&claim["name"], &claim["part"], &claim["pid"])).collect();
        let pid = json!(process::id());
        assert_eq!(held, [(&json!("models/a"), &Value::Null, &pid), (&json!("models/b"), &json!("rank0"), &pid)]);
        assert!(claims[0]["since_ms"].as_u64().unwrap() > 1_700_000_000_000, "{shown}");
    }
    assert_eq!(broker.json(&["who", "models/b"])["claims"].as_array().unwrap().len(), 1);
    let table = lines(&broker.end(&["who"]));
    assert_eq!(&table[..2], ["Claims:", "PID USER COMMAND SINCE PART NAME"]);
    assert!(table[3].ends_with("s rank0 models/b"), "{table:?}");
    let begins = format!("claim models/b, part rank0, by pid {} (", process::id());
    assert!(lines(&broker.end(&["status"])).iter().any(|line| line.starts_with(&begins)));
    drop(claims);
    wait_for("the end of the claims", || broker.json(&["who"])["claims"] == json!([]));
}

fn topics_are_shown_with_their_publisher(broker: Broker) {
    let (subject, client) = (Subject::host(), broker.client());
    let options = PublishOptions::fixed(16, 4);
    let publisher = Publisher::create(&subject.device(), &options, &Config::default()).unwrap();
    vmmfd::topic::open(&client, "camera/left", &publisher, None).unwrap();
    let pid = process::id();
    for shown in [broker.json(&["who", "camera"]), broker.json(&["status"])] {
        let topic = &shown["topics"][0];
        let expected = (&json!("camera/left"), &json!(pid), &json!(0), &Value::Null);
        assert_eq!((&topic["name"], &topic["pid"], &topic["followers"], &shown["topics"][1]), expected);
    }
    let begins = format!("topic camera/left by pid {pid} (");
    let is_shown = |line: &String| line.starts_with(&begins) && line.ends_with(", 0 followers");
    assert!(lines(&broker.end(&["status"])).iter().any(is_shown));
    let table = lines(&broker.end(&["who", "camera"]));
    assert_eq!(&table[..2], ["Topics:", "PID USER COMMAND FOLLOWERS NAME"]);
    assert!(table[2].starts_with(&pid.to_string()) && table[2].ends_with(" 0 camera/left"), "{table:?}");
    assert_eq!(broker.json(&["who", "other"])["topics"], json!([]));
    drop(publisher);
    wait_for("the end of the topic", || broker.json(&["who"])["topics"] == json!([]));
}

fn names_are_deleted_one_by_one(broker: Broker) {
    for name in ["a", "b", "c"] {
        broker.put(name, &data(10), &[]);
    }
    // Nothing is deleted in a dry run.
    let ended = broker.end(&["rm", "b", "x", "a", "--dry-run"]);
    ended.code(1).says("there is no object `x`");
    let listed: Vec<&str> = ended.stdout.lines().filter_map(|line| line.split(':').next()).collect();
    assert_eq!(listed, ["listed     b version 1", "listed     a version 1"]);
    let ended = broker.end(&["rm", "a", "x", "bad//name", "c", "--json"]);
    let report = ended.code(1).json();
    assert_eq!(report["deleted"], json!(["a", "c"]));
    let failed: Vec<_> =
        report["failed"].as_array().unwrap().iter().map(|one| (&one["name"], &one["error"]["kind"])).collect();
    assert_eq!(failed, [(&json!("x"), &json!("object")), (&json!("bad//name"), &json!("usage"))]);
    assert_eq!(report["error"], report["failed"][0]["error"]);
    let held = broker.lease("b");
    let ended = broker.end(&["rm", "b"]);
    let process = format!("of b version 1 by pid {} (", process::id());
    let shown = &ended.code(0).stdout;
    assert!(shown.starts_with("deleted  b\nheld     ") && shown.contains(&process), "{shown}");
    drop(held);
    assert!(broker.names().is_empty());
}

fn prefix_is_deleted_only_as_listed(broker: Broker) {
    for name in ["models/a", "models/b", "models", "other"] {
        broker.put(name, &data(10), &[]);
    }
    let dry = ["rm", "--prefix", "models/", "--dry-run"];
    let listed = broker.json(&dry);
    let objects = listed["dry_run"]["objects"].as_array().unwrap();
    let names: Vec<&Value> = objects.iter().map(|object| &object["name"]).collect();
    assert_eq!((&listed["deleted"], names.as_slice()), (&json!([]), &[&json!("models/a"), &json!("models/b")][..]));
    let first = listed["dry_run"]["confirm"].as_str().unwrap();
    // If the prefix has another object, or an object has another version, the confirmation is refused.
    let confirmed = || broker.refusal(&["rm", "--prefix", "models/", "--confirm", first], 2, "usage");
    broker.put("models/c", &data(10), &[]);
    assert!(confirmed().contains("`models/` has 3 objects now"));
    broker.end(&["rm", "models/c"]).code(0);
    broker.put("models/b", &data(10), &["--replace"]);
    assert!(confirmed().contains("nothing is deleted"));
    for options in [
        &["rm", "--prefix", "models/"][..],
        &["rm", "--prefix", "", "--dry-run"],
        &["rm", "--prefix", "models/", "--dry-run", "--confirm", first],
        &["rm", "other", "--prefix", "models/", "--dry-run"],
        &["rm", "other", "--confirm", first],
    ] {
        broker.refusal(options, 2, "usage");
    }
    assert!(broker.refusal(&["rm", "--prefix", "x", "--dry-run"], 1, "object").contains("begins with `x`"));
    assert_eq!(broker.names(), ["models", "models/a", "models/b", "other"]);
    // The last line is a command for a shell.
    let shown = broker.end(&dry);
    assert!(shown.stdout.contains("listed     models/a version 1: 10 bytes, 0 leases, uid "), "{}", shown.stdout);
    let mut pasted = Command::new("sh");
    pasted.args(["-c", shown.code(0).stdout.lines().last().unwrap()]);
    let deleted = broker.run(&["rm"]).instead(pasted).env("VMMFD_BROKER_SOCKET", broker.place.socket()).end();
    assert_eq!(deleted.code(0).stdout, "deleted  models/a\ndeleted  models/b\n");
    assert_eq!(broker.names(), ["models", "other"]);
}

/// Each line names the device briefly; only `-v` shows the owner, the whole UUID and the whole digest.
fn only_verbose_output_is_long(broker: Broker) {
    let put = broker.put("a", &data(10), &["--digest"]);
    let digest = put["digest"].as_str().unwrap();
    let uuid = put["device"]["device"]["uuid"].as_str().unwrap();
    let brief = uuid[..uuid.len() - 28].trim_start_matches("HOST-");
    for arguments in [&["get", "a"][..], &["stat", "a"], &["status"], &["who"]] {
        let (short, long) = (broker.end(arguments), broker.end(&[arguments, &["-v"]].concat()));
        assert!(short.code(0).stdout.contains(brief) && !short.stdout.contains(uuid), "{}", short.stdout);
        assert!(long.code(0).stdout.contains(uuid) && !short.stdout.contains(digest), "{}", long.stdout);
        if arguments[0] == "get" {
            let owner = format!("owner      uid {}, gid", nix::unistd::geteuid());
            assert!(!short.stdout.contains("owner") && long.stdout.contains(&owner), "{}", long.stdout);
            assert!(long.stdout.contains(digest), "{}", long.stdout);
            let verified = format!("{}, verified\n", &digest[.."blake3:".len() + 8]);
            assert!(short.stdout.contains(&verified), "{}", short.stdout);
        }
    }
    broker.put("plain", &data(10), &[]);
    let unverified = broker.end(&["get", "plain"]).code(0).stdout.clone();
    assert!(unverified.ends_with(", not verified: it was put without --digest\n"), "{unverified}");
}

fn notices_name_the_prefix(broker: Broker) {
    let none = broker.end(&["ls", "-l"]);
    assert_eq!(none.code(0).stdout, "");
    none.says("notice: the broker has no objects for this user\n");
    broker.put("models/a", &data(10), &[]);
    for (arguments, notice) in [
        (&["ls", "model/"][..], "notice: no match: no object name begins with `model/`\n"),
        (&["who", "models/a"], "notice: no object whose name begins with `models/a` has a lease\n"),
    ] {
        let ended = broker.end(arguments);
        assert_eq!((ended.code(0).stdout.as_str(), ended.stderr.as_str()), ("", notice), "{arguments:?}");
        assert_eq!(broker.end(&[arguments, &["-q"]].concat()).code(0).stderr, "");
    }
    for arguments in [&["rm", "x"][..], &["stat", "x"], &["rm", "--prefix", "x/", "--dry-run"]] {
        broker.end(arguments).code(1).says("hint: `vmmfd ls` lists");
    }
}

/// The unit tests of `values.rs`, `options.rs` and `name.rs` have more values.
fn bad_input_is_one_sentence(broker: Broker) {
    let (file, empty) = (broker.file("data", &data(10)), broker.file("empty", &[]));
    let (file, empty) = (text(&file), text(&empty));
    for (arguments, words) in [
        (&["put", "a", "--from", empty][..], "is empty"),
        (&["put", "a", "--from", "-"], "standard input"),
        (&["put", "a", "--from", "/tmp"], "/tmp is a folder: put a model's files in it with `--safetensors /tmp`"),
        (&["put", "a\u{1b}[31m", "--from", file], "can't be used"),
        (&["put", "a", "--from", file, "--if-version", "0"], "--if-version"),
        (&["put", "a", "--from", file, "--chunk", "64MB"], "64MiB"),
        (&["get", "a", "--to", "-"], "standard output"),
        (&["get", "a", "--force"], "--to"),
        (&["get", "a", "--wait", "0s"], "no time"),
        (&["rm", "."], "`.`"),
        (&["serve", "--time-limit", "patience=1s"], "there is no time limit `patience`"),
        (&["serve", "--allow-gid", "no such group"], "is not a group of this machine"),
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
    let got = broker.end(&["get", "owned", "-v", "--owner", &owner.to_string()]);
    assert!(got.code(0).stdout.contains(&format!("uid {owner}")), "{}", got.stdout);
    let other = broker.refusal(&["get", "owned", "--owner", &(owner + 1).to_string()], 1, "object");
    assert!(other.contains(&format!("its owner is uid {owner}, not {}", owner + 1)), "{other}");
    broker.end(&["rm", "owned"]).code(0);
    if broker.place.backend() == "cuda" {
        broker.put("a", &data(10), &[]);
        broker.refusal(&["get", "a", "--backend", "host"], 4, "peer");
    }
}

fn signal_ends_the_broker_with_report(broker: Broker) {
    broker.put("a", &data(10), &[]);
    let held = broker.lease("a");
    let socket = broker.place.socket();
    let Broker { place, server } = broker;
    server.signal(Signal::SIGTERM);
    let ended = server.end();
    let report = &ended.code(0).stdout;
    assert!(report.contains("1 object, 1 version, ") && report.contains("1 lease") && !socket.exists(), "{report}");
    drop(held);
    // Without a server the commands fail at once.
    command(&place, &["ls"]).end().code(4).says("no broker on").says("hint: start one with `vmmfd serve`");
    command(&place, &["get", "a", "--json", "--wait", "10m"]).end().code(4).json();
    // With `--json` the line `listening` is on standard error, and standard output has only the object.
    let server = serve(&place, &["--json"]).start();
    wait_for("the broker", || server.so_far().contains("listening"));
    server.signal(Signal::SIGINT);
    let ended = server.end();
    let report = ended.code(0).json();
    assert_eq!((&report["objects"], &report["size"]), (&json!(0), &json!(0)));
    ended.says("broker    listening  ");
}

#[test]
fn completions_list_objects() {
    let broker = Broker::host();
    for name in ["models/a", "models/b", "other"] {
        broker.put(name, &data(10), &[]);
    }
    for (shell, words) in [
        ("zsh", "'*::names -- Names of the objects:_vmmfd_objects'"),
        ("fish", "__fish_vmmfd_using_subcommand get\" -f -a \"(vmmfd ls "),
    ] {
        assert!(broker.end(&["completions", shell]).code(0).stdout.contains(words), "{shell}");
    }
    let script = broker.file("vmmfd.bash", broker.end(&["completions", "bash"]).code(0).stdout.as_bytes());
    let program = PathBuf::from(broker.run(&["ls"]).command.get_program());
    let path = format!("{}:{}", program.parent().unwrap().display(), env::var("PATH").unwrap());
    for (command, word, expected) in [("get", "mod", "models/a models/b"), ("rm", "x", ""), ("get", "--ran", "--range")]
    {
        let script = format!(
            "source {}; COMP_WORDS=(vmmfd {command} {word}); COMP_CWORD=2; _vmmfd_objects vmmfd {word} {command}; \
            echo \"${{COMPREPLY[*]}}\"",
            text(&script)
        );
        let mut bash = Command::new("bash");
        bash.args(["-c", &script]).env("PATH", &path).env("VMMFD_BROKER_SOCKET", broker.place.socket());
        assert_eq!(String::from_utf8(bash.output().unwrap().stdout).unwrap().trim_end(), expected, "{command} {word}");
    }
}

#[test]
fn other_peers_are_no_broker() {
    let meeting = Meeting::host();
    let producer = meeting.listening(&["--consumers", "0"]);
    let ended = command(&meeting, &["ls"]).end();
    ended.code(4).says("is not a broker");
    assert_eq!(ended.stderr.lines().filter(|line| line.starts_with("error: ")).count(), 1, "{}", ended.stderr);
    producer.signal(Signal::SIGTERM);
    producer.end();
}
