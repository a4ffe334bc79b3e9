//! `vmmfd status`, logged crashes, the options file, and access to the socket file.

use crate::{
    broker_commands::{text, vmmfd},
    doctor::has_driver,
    running::fits,
    support::prelude::*,
};

/// The report of `vmmfd status`.
#[track_caller]
fn status(path: &Path) -> Value {
    let output = Command::new(binary("vmmfd")).args(["status", "--json", "--socket", text(path)]).output().unwrap();
    let value: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(output.status.success(), "{value}");
    fits("status", &value);
    value
}

#[test]
fn status_shows_processes_and_restarts() {
    let subject = Subject::host();
    for keeper in [Keeper::Own, Keeper::Apart] {
        let served = Served::start(keeper, &subject);
        let keeper = served.keeper();
        let shown = status(&served.path);
        let pids = (&shown["pid"], &shown["keeper"]["pid"]);
        assert_eq!(pids, (&served.server().as_raw().into(), &keeper.as_raw().into()));
        assert_eq!((&shown["restarts"], &shown["socket"]), (&json!(0), &json!(text(&served.path))));
        assert!(shown["keeper"]["started_ms"].as_u64() <= shown["started_ms"].as_u64(), "{shown}");
        // A new process has taken over when it holds the object.
        let memory = filled(&subject.driver, 2 << 20, None, 1);
        served.client().put(&Put::new("a").part(PutPart::of("all", &memory).unwrap())).unwrap();
        served.kill_server();
        served.kill_keeper();
        served.wait_for_log(&format!("the keeper crashed pid={keeper}"), 1);
        let (server, _) = served.kill_server();
        let shown = status(&served.path);
        assert_eq!((&shown["pid"], &shown["restarts"]), (&server.as_raw().into(), &json!(2)));
        assert_eq!(shown["keeper"]["pid"], served.keeper().as_raw());
    }
}

#[test]
fn requested_ends_are_no_crashes() {
    let subject = Subject::host();
    let served = Served::start(Keeper::Apart, &subject);
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        let server = served.server();
        kill(server, signal).unwrap();
        served.wait_for_another(server, Instant::now());
        let keeper = served.keeper();
        kill(keeper, if signal == Signal::SIGHUP { Signal::SIGTERM } else { signal }).unwrap();
        until(|| !is_alive(keeper) && status(&served.path)["keeper"]["pid"] == served.keeper().as_raw());
    }
    assert_eq!(status(&served.path)["restarts"], 3, "{}", served.log());
    assert!(!served.log().contains("crashed"), "{}", served.log());
}

#[test]
fn total_crash_is_reported_at_next_start() {
    let place = Meeting::host();
    let socket = place.socket();
    let serve = || {
        let mut server = vmmfd(&place, &["serve", "--no-keeper", "--socket", text(&socket)]).start();
        server.until("listening");
        server
    };
    let lost = |server: Running| {
        server.signal(Signal::SIGTERM);
        server.end().code(0).stderr.contains("its objects are lost")
    };
    let first = serve();
    assert_eq!(status(&socket)["store"]["kind"], "none");
    first.signal(Signal::SIGKILL);
    drop(first.end());
    assert!(lost(serve()));
    assert!(!lost(serve()));
    let none = vmmfd(&place, &["status", "--socket", text(&place.folder().join("none"))]).end();
    none.code(4).says("no broker on").says("hint: start one with `vmmfd serve`");
}

#[test]
fn second_broker_is_refused_with_a_pid() {
    let served = Served::start(Keeper::Apart, &Subject::host());
    let place = Meeting::host();
    let second = || vmmfd(&place, &["serve", "--no-keeper", "--socket", text(&served.path)]).end();
    let other = place.folder().join("other.sock");
    let same_keeper = ["serve", "--keeper", text(&served.keeper_path), "--socket", text(&other)];
    for _ in 0..2 {
        second().code(5).says(&format!("already served by pid {}\n", served.server()));
        vmmfd(&place, &same_keeper).end().code(5).says(&format!("it already serves pid {}", served.server()));
        served.kill_server();
    }
    // While no server runs, the keeper's socket still carries the dead server's pid, which the error must not name.
    let old = served.server();
    fs::write(served.stop_flag(), "").unwrap();
    kill(old, Signal::SIGKILL).unwrap();
    until(|| !is_alive(old));
    second().code(5).says("already served by another process");
}

#[test]
fn removed_socket_admits_no_second_broker() {
    let subject = Subject::host();
    let served = Served::with(Keeper::Own, &subject, &binary("vmmfd"), &["--time-limit", "file=1h"]);
    let place = Meeting::host();
    // Each server takes over the socket of the previous server.
    let (server, _) = served.kill_server();
    fs::remove_file(&served.path).unwrap();
    let words = format!("pid {server} still serves {}, although the socket's file was removed", text(&served.path));
    let embedded = Server::bind(&served.path, ServerConfig::default(), &Cancel::new().unwrap());
    assert_eq!(embedded.unwrap_err().to_string(), words);
    // The failed start of a server and its keeper leaves the first broker's mark.
    for _ in 0..2 {
        let ended = vmmfd(&place, &["serve", "--socket", text(&served.path)]).end();
        ended.code(5).says(&words).says("hint: stop that process");
    }
    kill(server, Signal::SIGHUP).unwrap();
    served.wait_for_another(server, Instant::now());
    assert!(!served.log().contains("previous broker"), "{}", served.log());
}

#[test]
fn removed_files_are_created_again() {
    let subject = Subject::host();
    let place = Meeting::host();
    for keeper in [Keeper::Own, Keeper::Apart] {
        let served = Served::with(keeper, &subject, &binary("vmmfd"), &["--time-limit", "file=100ms"]);
        let server = served.server();
        fs::remove_file(&served.path).unwrap();
        served.wait_for_log("the socket's file was removed or replaced: listening at its path again", 1);
        let lock = served.path.with_file_name(".broker.sock.lock");
        fs::remove_file(&lock).unwrap();
        served.wait_for_log("the socket's lock file was removed or replaced: creating it again", 1);
        until(|| fs::read_to_string(&lock).is_ok_and(|pid| pid.trim() == server.to_string()));
        assert_eq!(served.server(), server);
        // The server looks for the socket's file only later, so the lock alone refuses the second broker.
        kill(server, Signal::SIGSTOP).unwrap();
        fs::remove_file(&served.path).unwrap();
        let ended = vmmfd(&place, &["serve", "--socket", text(&served.path)]).end();
        kill(server, Signal::SIGCONT).unwrap();
        ended.code(5).says(&format!("pid {server} still serves"));
        // Another broker's file stays.
        served.wait_for_log("listening at its path again", 2);
        fs::remove_file(&served.path).unwrap();
        fs::write(&served.path, "").unwrap();
        served.wait_for_log("so new clients can't connect: restart this broker", 1);
        fs::remove_file(&served.path).unwrap();
    }
}

/// A mark in the lock file would overwrite the other file.
#[test]
fn linked_lock_file_is_not_written() {
    let place = Meeting::host();
    let victim = place.folder().join("victim");
    fs::write(&victim, "precious").unwrap();
    fs::set_permissions(&victim, fs::Permissions::from_mode(0o640)).unwrap();
    fs::hard_link(&victim, place.socket().with_file_name(".s.sock.lock")).unwrap();
    let server = Server::bind(&place.socket(), ServerConfig::default(), &Cancel::new().unwrap());
    // Root removes the name.
    assert_eq!(server.is_ok(), nix::unistd::geteuid().is_root(), "{server:?}");
    assert_eq!((fs::read_to_string(&victim).unwrap().as_str(), mode(&victim)), ("precious", 0o640));
}

#[test]
fn devices_report_their_memory_by_nvml() {
    let place = Meeting::fake();
    let (socket, file) = (place.socket(), place.folder().join("file"));
    fs::write(&file, [7; 5000]).unwrap();
    let mut server = vmmfd(&place, &["serve", "--emulated", "--socket", text(&socket)]).start();
    server.until("listening");
    let put = ["put", "a", "--from", text(&file), "--backend", "cuda", "--socket", text(&socket)];
    vmmfd(&place, &put).end().code(0);
    let copy = Copy::new();
    let status = |json: bool| {
        let mut run = vmmfd(&place, &["status", "--socket", text(&socket)]);
        run.command.env("LD_LIBRARY_PATH", copy.folder()).args(json.then_some("--json"));
        run.end()
    };
    let device = |ended: &Ended| ended.code(0).json()["devices"][0].clone();
    if !has_driver() {
        let shown = device(&status(true));
        assert!(shown["unknown"].as_str().unwrap().contains("libnvidia-ml.so.1"), "{shown}");
        status(false).code(0).says("notice: the devices do not report their memory");
    }
    copy.write("libnvidia-ml.so.1");
    let shown = device(&status(true));
    let [size, used, total] = ["bytes", "used", "total"].map(|key| shown[key].as_u64().unwrap_or_default());
    assert!(size == 2 << 20 && used < total && shown["unknown"] == Value::Null, "{shown}");
    let ended = status(false);
    assert!(ended.code(0).stdout.contains("2 MiB claimed; it reports "), "{}", ended.stdout);
    assert_eq!(ended.stderr, "");
}

#[test]
fn check_reports_each_problem() {
    let place = Meeting::host();
    let socket = place.socket();
    let file = place.folder().join("options");
    let keeper = place.folder().join("k/keeper.sock");
    let check = |options: &str, more: &[&str]| {
        fs::write(&file, options).unwrap();
        let arguments = ["serve", "--check", "--socket", text(&socket), "--options-file", text(&file)];
        vmmfd(&place, &[&arguments, more].concat()).end()
    };
    let good = check(
        "# all of them\nVMMFD_OPTIONS=\"--allow-uid root --allow-gid 7 --total-quota objects=5 -v\"\n",
        &["--json"],
    );
    good.code(0).json();
    assert!(check("", &[]).code(0).stdout.contains("the options are good"));
    for (options, words) in [
        ("VMMFD_OPTION=\"--allow-uid 7\"", "options, line 1: `VMMFD_OPTION` is not read from this file"),
        ("VMMFD_OPTIONS=\"--alow-uid 7\"", "unexpected argument '--alow-uid' found"),
        ("VMMFD_OPTIONS=\"--allow-gid no-such-group\"", "`no-such-group` is not a group of this machine"),
        ("VMMFD_OPTIONS=\"--no-quota --quota leases=1\"", "cannot be used with"),
    ] {
        let ended = check(options, &[]);
        ended.code(2).says(words).says(text(&file));
        assert_eq!(ended.stderr.lines().filter(|line| line.starts_with("error: ")).count(), 1, "{}", ended.stderr);
        check(options, &["--json"]).code(2).json();
        // The server fails to start with the same error.
        vmmfd(&place, &["serve", "--socket", text(&socket), "--options-file", text(&file)]).end().code(2).says(words);
    }
    fs::write(&socket, "").unwrap();
    let ended = check("", &["--keeper", text(&keeper)]);
    ended.code(2).says("not a socket").says("no keeper listens there");
    fs::remove_file(&socket).unwrap();
    let mut server = vmmfd(&place, &["serve", "--socket", text(&socket)]).start();
    server.until("listening");
    check("", &[]).code(5).says("already served by pid");
    server.signal(Signal::SIGTERM);
    server.end().code(0);
    check("", &[]).code(0);
    assert!(!socket.exists() && !keeper.parent().unwrap().exists());
    let holder = vmmfd(&place, &["keeper", "--socket", text(&keeper)]).start();
    until(|| keeper.exists());
    check("", &["--keeper", text(&keeper)]).code(0);
    holder.signal(Signal::SIGTERM);
    holder.end().code(0);
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().mode() & 0o777
}

#[test]
fn socket_follows_options_at_start() {
    let subject = Subject::host();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("options");
    fs::write(&file, "").unwrap();
    let served = Served::with(Keeper::Own, &subject, &binary("vmmfd"), &["--options-file", text(&file)]);
    assert_eq!(mode(&served.path), 0o600);
    for (options, wanted) in [("--allow-uid 34560", 0o666), ("", 0o600), ("--allow-gid 34570 --allow-gid 34571", 0o666)]
    {
        fs::write(&file, format!("VMMFD_OPTIONS=\"{options}\"\n")).unwrap();
        let server = served.server();
        kill(server, Signal::SIGHUP).unwrap();
        served.wait_for_another(server, Instant::now());
        assert_eq!(mode(&served.path), wanted, "{options}: {}", served.log());
    }
}
