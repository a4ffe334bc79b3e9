//! The other commands, and the broker itself.

use super::*;

cases! {
    on crate::broker_commands::Broker; host and cuda: [
    who_shows_holders_and_unnamed_versions,
    claims_are_shown_with_their_holder,
    names_are_deleted_one_by_one,
    prefix_is_deleted_only_as_listed,
    dry_run_lists_names,
    only_verbose_output_is_long,
    bad_input_is_one_sentence,
    rm_lists_leases_that_hold_memory,
    notices_name_the_prefix,
    tables_fit_the_terminal,
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
    assert_eq!(shown["leases"].as_array().unwrap().len(), 1, "{shown}");
    assert_eq!((&lease["name"], &lease["version"], &lease["named"]), (&json!("held"), &json!(1), &json!(true)));
    assert_eq!((&lease["pid"], &lease["uid"]), (&json!(std::process::id()), &json!(nix::unistd::geteuid().as_raw())));
    let comm = fs::read_to_string("/proc/self/comm").unwrap();
    assert_eq!(lease["command"], comm.trim_end());
    let size = &broker.json(&["ls", "held"])["objects"][0]["devices"][0]["bytes"];
    assert_eq!(&lease["size"], size);
    assert_eq!(shown["unnamed"], json!([]));
    assert_eq!(broker.json(&["ls", "held"])["objects"][0]["leases"], 1);
    // After a replacement both versions are leased.
    broker.put("held", &data(200), &["--replace"]);
    let second = broker.lease("held");
    broker.end(&["rm", "held"]).code(0);
    let shown = broker.json(&["who", "he"]);
    let unnamed: Vec<_> =
        shown["unnamed"].as_array().unwrap().iter().map(|one| (&one["version"], &one["leases"])).collect();
    assert_eq!(unnamed, [(&json!(1), &json!(1)), (&json!(2), &json!(1))]);
    assert_eq!(shown["leases"].as_array().unwrap().iter().filter(|lease| lease["named"] == false).count(), 2);
    assert_eq!((&shown["users"][0]["objects"], &shown["users"][0]["leases"]), (&json!(1), &json!(2)));
    let sum: u64 = shown["devices"].as_array().unwrap().iter().map(|device| device["bytes"].as_u64().unwrap()).sum();
    assert_eq!(sum, 3 * size.as_u64().unwrap());
    assert_eq!(broker.json(&["who", "free"])["leases"], json!([]));
    let table = broker.end(&["who"]);
    let user = nix::unistd::User::from_uid(nix::unistd::geteuid()).unwrap().map(|user| user.name);
    let row = format!("{} {} ", std::process::id(), user.unwrap());
    let headings = |table: &Ended| -> Vec<String> {
        table.code(0).stdout.lines().filter(|line| line.ends_with(':')).map(str::to_owned).collect()
    };
    assert_eq!(headings(&table), ["Leases:", "Versions without a name:", "Users:", "Devices:"]);
    assert!(table.stdout.split_whitespace().collect::<Vec<_>>().join(" ").contains(&row), "{}", table.stdout);
    // With a name, only rows about this name are printed.
    assert_eq!(headings(&broker.end(&["who", "held"])), ["Leases:", "Versions without a name:"]);
    drop((first, second));
    wait_for("the end of the leases", || broker.json(&["who"])["leases"] == json!([]));
    assert_eq!(broker.json(&["who"])["unnamed"], json!([]));
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
        let held: Vec<_> = claims.iter().map(|claim| (&claim["name"], &claim["part"])).collect();
        assert_eq!(held, [(&json!("models/a"), &Value::Null), (&json!("models/b"), &json!("rank0"))]);
        let holder = json!([std::process::id(), nix::unistd::geteuid().as_raw()]);
        assert!(claims.iter().all(|claim| json!([claim["pid"], claim["uid"]]) == holder), "{shown}");
        assert!(claims[0]["since_ms"].as_u64().unwrap() > 1_700_000_000_000, "{shown}");
    }
    assert_eq!(broker.json(&["who", "models/b"])["claims"].as_array().unwrap().len(), 1);
    let lines = |arguments: &[&str]| {
        let shown = broker.end(arguments).code(0).stdout.clone();
        shown.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect::<Vec<_>>()
    };
    let pid = std::process::id();
    let table = lines(&["who"]);
    assert_eq!(&table[..2], ["Claims:", "PID USER COMMAND SINCE PART NAME"]);
    assert!(table[3].starts_with(&pid.to_string()) && table[3].ends_with("s rank0 models/b"), "{table:?}");
    let status = lines(&["status"]);
    let begins = format!("claim models/b, part rank0, by pid {pid} (");
    assert!(status.iter().any(|line| line.starts_with(&begins) && line.contains("uid ")), "{status:?}");
    drop(claims);
    wait_for("the end of the claims", || broker.json(&["who"])["claims"] == json!([]));
    assert_eq!(broker.json(&["status"])["claims"], json!([]));
}

fn names_are_deleted_one_by_one(broker: Broker) {
    for name in ["a", "b", "c"] {
        broker.put(name, &data(10), &[]);
    }
    let ended = broker.end(&["rm", "a", "x", "bad//name", "c", "--json"]);
    let report = ended.code(1).json();
    assert_eq!(report["deleted"], json!(["a", "c"]));
    let failed: Vec<_> =
        report["failed"].as_array().unwrap().iter().map(|one| (&one["name"], &one["error"]["kind"])).collect();
    assert_eq!(failed, [(&json!("x"), &json!("object")), (&json!("bad//name"), &json!("usage"))]);
    assert_eq!(report["error"], report["failed"][0]["error"]);
    assert_eq!(broker.names(), ["b"]);
    assert_eq!(broker.end(&["rm", "b"]).code(0).stdout, "deleted  b\n");
    let none = broker.end(&["ls", "-l"]);
    assert_eq!(none.code(0).stdout, "");
    none.says("notice: the broker has no objects for this user\n");
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
    // If the prefix has another object, or an object has another version, the confirmation is refused.
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
    // The last line is a command for a shell.
    let shown = broker.end(&rm(&["--dry-run"]));
    let mut pasted = Command::new("sh");
    pasted.args(["-c", shown.code(0).stdout.lines().last().unwrap()]);
    let deleted = broker.run(&["rm"]).instead(pasted).env("VMMFD_BROKER_SOCKET", broker.place.socket()).end();
    assert_eq!(deleted.code(0).stdout, "deleted  models/a\ndeleted  models/b\n");
    assert_eq!(broker.names(), ["models", "other"]);
}

fn dry_run_lists_names(broker: Broker) {
    broker.put("a", &data(10), &[]);
    broker.put("b", &data(10), &[]);
    let ended = broker.end(&["rm", "b", "x", "a", "--dry-run"]);
    ended.code(1).says("there is no object `x`");
    let listed: Vec<&str> = ended.stdout.lines().filter_map(|line| line.split(':').next()).collect();
    assert_eq!(listed, ["listed     b version 1", "listed     a version 1"]);
    let report = broker.json(&["rm", "a", "--dry-run"]);
    assert_eq!((&report["dry_run"]["objects"][0]["name"], &report["dry_run"]["confirm"]), (&json!("a"), &json!(null)));
    assert_eq!((&report["deleted"], broker.names()), (&json!([]), vec!["a".to_owned(), "b".to_owned()]));
}

/// Each line names the device briefly; only `-v` shows the owner, the whole UUID and the whole digest.
fn only_verbose_output_is_long(broker: Broker) {
    let put = broker.put("a", &data(10), &["--digest"]);
    let device = &put["device"]["device"];
    let digest = put["digest"].as_str().unwrap();
    let name = device["name"].as_str().unwrap().trim_end_matches(" (no GPU)");
    let prefix = if put["backend"] == "host" { "HOST-" } else { "GPU-" };
    let uuid = device["uuid"].as_str().unwrap();
    for (arguments, place) in [
        (&["ls"][..], "/objects/0/devices/0/device/uuid"),
        (&["stat", "a"], "/parts/0/memory/device/uuid"),
        (&["status"], "/devices/0/device/uuid"),
        (&["who"], "/devices/0/device/uuid"),
        (&["get", "a"], "/parts/0/device/device/uuid"),
    ] {
        let report = broker.json(arguments);
        assert!(report.pointer(place).unwrap() == uuid && uuid.starts_with(prefix), "{report}");
    }
    let device = format!("{name} {}", uuid[..uuid.len() - 28].trim_start_matches("HOST-"));
    let owner = format!("owner      uid {}, gid", nix::unistd::geteuid());
    let verified = format!("10 bytes, {device}, {}, verified\n", &digest[.."blake3:".len() + 8]);
    let file = broker.file("input", &data(10));
    for (arguments, words) in [
        (&["get", "a"][..], verified.as_str()),
        (&["put", "a", "--replace", "--digest", "--from", text(&file)], &device),
        (&["stat", "a"], &device),
        (&["status"], &device),
        (&["who"], &device),
    ] {
        let (short, long) = (broker.end(arguments), broker.end(&[arguments, &["-v"]].concat()));
        assert!(short.code(0).stdout.contains(words) && !short.stdout.contains(uuid), "{}", short.stdout);
        assert!(long.code(0).stdout.contains(&format!("{name} {uuid}")), "{}", long.stdout);
        assert!(!short.stdout.contains(digest), "{}", short.stdout);
        if arguments[0] == "get" {
            assert!(!short.stdout.contains("owner") && long.stdout.contains(&owner), "{}", long.stdout);
            assert!(long.stdout.contains(digest), "{}", long.stdout);
        }
    }
    broker.put("plain", &data(10), &[]);
    let unverified = broker.end(&["get", "plain"]);
    assert!(
        unverified.code(0).stdout.ends_with(", not verified: it was put without --digest\n"),
        "{}",
        unverified.stdout
    );
    let status = broker.end(&["status"]);
    assert!(status.code(0).stdout.contains("\nrestarts   none\n"), "{}", status.stdout);
}

fn rm_lists_leases_that_hold_memory(broker: Broker) {
    for name in ["a", "ab", "b"] {
        broker.put(name, &data(10), &[]);
    }
    let held = [broker.lease("a"), broker.lease("ab"), broker.lease("b")];
    let ended = broker.end(&["rm", "a"]);
    let process = format!("of a version 1 by pid {} (", std::process::id());
    assert!(
        ended.code(0).stdout.starts_with("deleted  a\nheld     ") && ended.stdout.contains(&process),
        "{}",
        ended.stdout
    );
    assert_eq!(ended.stdout.lines().count(), 2, "{}", ended.stdout);
    let report = broker.json(&["rm", "ab", "b"]);
    let names: Vec<&Value> = report["held"].as_array().unwrap().iter().map(|lease| &lease["name"]).collect();
    assert_eq!(names, ["ab", "b"]);
    assert_eq!(report["held"][0]["pid"], std::process::id());
    drop(held);
}

fn notices_name_the_prefix(broker: Broker) {
    broker.put("models/a", &data(10), &[]);
    for (arguments, notice) in [
        (&["ls", "model/"][..], "notice: no match: no object name begins with `model/`\n"),
        (&["who", "model/"], "notice: no match: no object name begins with `model/`\n"),
        (&["who", "models/a"], "notice: no object whose name begins with `models/a` has a lease\n"),
    ] {
        let ended = broker.end(arguments);
        assert_eq!((ended.code(0).stdout.as_str(), ended.stderr.as_str()), ("", notice), "{arguments:?}");
        assert_eq!(broker.end(&[arguments, &["-q"]].concat()).code(0).stderr, "");
    }
    // The hint depends on the command.
    for arguments in [&["rm", "x"][..], &["stat", "x"], &["rm", "--prefix", "x/", "--dry-run"]] {
        let ended = broker.end(arguments);
        ended.code(1).says("hint: `vmmfd ls` lists");
        assert!(!ended.stderr.contains("--wait"), "{}", ended.stderr);
    }
    let file = broker.file("data", &data(10));
    let absent = broker.end(&["put", "x", "--from", text(&file), "--if-version", "1"]);
    assert!(!absent.code(1).stderr.contains("replaced it"), "{}", absent.stderr);
}

fn bad_input_is_one_sentence(broker: Broker) {
    let (file, empty) = (broker.file("data", &data(10)), broker.file("empty", &[]));
    let (file, empty) = (text(&file), text(&empty));
    let long = "n".repeat(256);
    for (arguments, words) in [
        (&["put", "a", "--from", empty][..], "is empty"),
        (&["put", "a", "--from", "/nonexistent/x"], "/nonexistent/x"),
        (&["put", "a", "--from", "-"], "standard input"),
        (&["put", "a", "--from", "/tmp"], "/tmp is a folder: put a model's files in it with `--safetensors /tmp`"),
        (&["put", "a//b", "--from", file], "a component is empty"),
        (&["put", "", "--from", file], "it is empty"),
        (&["put", "../a", "--from", file], "`..`"),
        (&["put", "a b", "--from", file], "' '"),
        (&["put", &long, "--from", file], "at most 255"),
        (&["put", "a\u{1b}[31m", "--from", file], "can't be used"),
        (&["put", "a", "--from", file, "--meta", "[1]"], "not an object"),
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
        (&["serve", "--time-limit", "patience=1s"], "there is no time limit `patience`"),
        (&["serve", "--quota", "bytes=1GB"], "1GiB"),
        (&["serve", "--allow-gid", "no such group"], "is not a group of this machine"),
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
    let got = broker.end(&["get", "owned", "-v", "--owner", &owner.to_string()]);
    assert!(got.code(0).stdout.contains(&format!("uid {owner}")), "{}", got.stdout);
    let other = broker.refusal(&["get", "owned", "--owner", &(owner + 1).to_string()], 1, "object");
    assert!(other.contains(&format!("its owner is uid {owner}, not {}", owner + 1)), "{other}");
    broker.end(&["rm", "owned"]).code(0);
    // A missing device, and an object of another backend.
    let device = broker.refusal(&["put", "a", "--from", file, "--device", "9"], 3, "unsupported");
    assert!(device.contains("device 9"), "{device}");
    broker.put("a", &data(10), &[]);
    if broker.place.backend() == "cuda" {
        broker.refusal(&["get", "a", "--backend", "host"], 4, "peer");
    }
}

fn tables_fit_the_terminal(broker: Broker) {
    broker.put("models/meta/llama3", &data(5_000_003), &[]);
    let _held = broker.lease("models/meta/llama3");
    for columns in [60, 80] {
        for (arguments, heading, row, optional) in
            [(&["ls", "-l"][..], 0, "4.7 MiB", "DEVICE"), (&["who"], 1, "models/meta/llama3", "SINCE")]
        {
            let shown = on_terminal(broker.run(arguments), columns).end();
            assert_eq!(shown.code, Some(0), "{}", shown.text());
            let screen = &shown.screen()[heading..];
            assert!(screen[0].contains("VERSION") && screen[1].contains(row), "{screen:?}");
            // The name is last, and no row of the table wraps.
            assert!(screen[0].trim_end().ends_with("NAME") && screen[1].trim_end().ends_with("llama3"), "{screen:?}");
            assert!(!shown.text().contains('\u{1b}'), "{:?}", shown.text());
            // If all columns fit, none is omitted.
            assert_eq!(screen[0].contains(optional), columns == 80, "{screen:?}");
        }
    }
}

fn signal_ends_the_broker_with_report(broker: Broker) {
    broker.put("a", &data(10), &[]);
    let held = broker.lease("a");
    // Two servers can't share one socket.
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
    // Without a server the commands fail at once.
    let nobody = command(&place, &["ls"]).end();
    nobody.code(4).says("no broker on").says("hint: start one with `vmmfd serve`");
    command(&place, &["get", "a", "--json", "--wait", "10m"]).end().code(4).json();

    // With `--json` the line `listening` is on standard error, and standard output has only the object.
    let server = serve(&place, &["--json"]).start();
    wait_for("the broker", || server.so_far().contains("listening"));
    command(&place, &["ls"]).end().code(0);
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
        ("zsh", &["_vmmfd_objects() {", "'*::names -- Names of the objects:_vmmfd_objects'"][..]),
        ("fish", &["__fish_vmmfd_using_subcommand get\" -f -a \"(vmmfd ls "]),
    ] {
        let script = broker.end(&["completions", shell]).code(0).stdout.clone();
        assert!(words.iter().all(|word| script.contains(word)), "{script}");
    }
    let script = broker.file("vmmfd.bash", broker.end(&["completions", "bash"]).code(0).stdout.as_bytes());
    let program = PathBuf::from(broker.run(&["ls"]).command.get_program());
    let path = format!("{}:{}", program.parent().unwrap().display(), std::env::var("PATH").unwrap());
    let complete = |words: &[&str]| {
        let script = format!(
            "source {}; COMP_WORDS=(vmmfd {}); COMP_CWORD={}; _vmmfd_objects vmmfd {}; echo \"${{COMPREPLY[*]}}\"",
            text(&script),
            words.join(" "),
            words.len(),
            words.iter().rev().take(2).copied().collect::<Vec<_>>().join(" ")
        );
        let output = Command::new("bash")
            .args(["-c", &script])
            .env("PATH", &path)
            .env("VMMFD_BROKER_SOCKET", broker.place.socket())
            .output()
            .unwrap();
        String::from_utf8(output.stdout).unwrap().trim_end().to_owned()
    };
    assert_eq!(complete(&["get", "mod"]), "models/a models/b");
    assert_eq!(complete(&["rm", "x"]), "");
    assert!(complete(&["get", "--ran"]).contains("--range"));
    assert!(complete(&["st"]).contains("stat"));
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
