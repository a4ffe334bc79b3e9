//! `vmmfd status`, the history of crashes, the options file, and access to the socket file.

use std::{
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::Path,
    process::Command,
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};
use vmmfd::{
    broker::{Client, Get, Server, ServerConfig},
    channel::Cancel,
    session::Config,
};

use crate::{
    broker::until,
    doctor::has_driver,
    running::{Ended, Meeting, Run, binary, fits},
    support::{
        Copy, Subject,
        served::{Keeper, Served, is_alive},
    },
};

fn vmmfd(place: &Meeting, arguments: &[&str]) -> Run {
    let mut run = place.bare("vmmfd");
    run.command.args(arguments);
    run
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// The report of `vmmfd status`.
#[track_caller]
fn status(path: &Path) -> Value {
    let output = Command::new(binary("vmmfd")).args(["status", "--json", "--socket", text(path)]).output().unwrap();
    let value: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(output.status.success(), "{value}");
    fits("status", &value);
    value
}

/// The process, pid and lost versions of each reported crash.
fn crashes(path: &Path) -> Vec<Value> {
    let status = status(path);
    let crashes = status["crashes"].as_array().unwrap();
    crashes.iter().map(|crash| json!([crash["process"], crash["pid"], crash["lost_versions"]])).collect()
}

fn shows_processes_and_crashes(keeper: Keeper) {
    let subject = Subject::host();
    let mut served = Served::start(keeper, &subject);
    let (first, first_keeper) = (served.server(), served.keeper());
    let shown = status(&served.path);
    assert_eq!((&shown["pid"], &shown["keeper"]["pid"]), (&first.as_raw().into(), &first_keeper.as_raw().into()));
    assert_eq!((&shown["crashes"], &shown["restarts"], &shown["lost_versions"]), (&json!([]), &json!(0), &json!(0)));
    assert_eq!(shown["socket"], text(&served.path));
    let started = |of: &Value| of["started_ms"].as_u64().unwrap();
    assert!(shown["store"]["used"].as_u64() > Some(0), "{shown}");
    assert!(started(&shown["keeper"]) <= started(&shown), "the keeper starts first: {shown}");

    let (second, _) = served.kill_server();
    let (third, _) = served.kill_server();
    let of = |process: &str, pid: Pid| json!([process, pid.as_raw(), 0]);
    let both = [of("server", first), of("server", second)];
    assert_eq!(crashes(&served.path), both);
    served.kill_keeper();
    // The server notices the keeper's death, and the next keeper has the history too.
    let all = [&both[..], &[of("keeper", first_keeper)]].concat();
    assert_eq!(crashes(&served.path), all);
    served.kill_server();
    assert_eq!(crashes(&served.path), [&all[..], &[of("server", third)]].concat());
}

#[test]
fn status_shows_processes_and_crashes() {
    shows_processes_and_crashes(Keeper::Own);
}

#[test]
fn status_shows_units_and_their_crashes() {
    shows_processes_and_crashes(Keeper::Apart);
}

#[test]
fn requested_ends_are_no_crashes() {
    let subject = Subject::host();
    let served = Served::start(Keeper::Apart, &subject);
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        let server = served.server();
        kill(server, signal).unwrap();
        served.wait_for_another(server, std::time::Instant::now());
        let keeper = served.keeper();
        kill(keeper, if signal == Signal::SIGHUP { Signal::SIGTERM } else { signal }).unwrap();
        until(|| !is_alive(keeper) && status(&served.path)["keeper"]["pid"] == served.keeper().as_raw());
    }
    let shown = status(&served.path);
    assert_eq!((&shown["crashes"], &shown["restarts"]), (&json!([]), &json!(3)), "{}", served.log());
    // An upgrade of both processes in place.
    let served = Served::start(Keeper::Own, &subject);
    let server = served.server();
    kill(served.keeper(), Signal::SIGHUP).unwrap();
    served.wait_for_another(server, std::time::Instant::now());
    assert_eq!(crashes(&served.path), [Value::Null; 0], "{}", served.log());
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
    let first = serve();
    let pid = status(&socket)["pid"].clone();
    assert_eq!((&status(&socket)["store"]["kind"], crashes(&socket)), (&json!("none"), vec![]));
    first.signal(Signal::SIGKILL);
    drop(first.end());
    let second = serve();
    assert_eq!(crashes(&socket), [json!(["server", pid, null])]);
    let shown = vmmfd(&place, &["status", "--socket", text(&socket)]).end();
    assert!(shown.code(0).stdout.contains("everything was lost"), "{}", shown.stdout);
    second.signal(Signal::SIGTERM);
    second.end().code(0);
    let third = serve();
    assert_eq!(crashes(&socket), [Value::Null; 0]);
    drop(third);
    let none = vmmfd(&place, &["status", "--socket", text(&place.folder().join("none"))]).end();
    none.code(4).says("no broker on").says("hint: start one with `vmmfd serve`");
}

#[test]
fn second_broker_is_refused_with_a_pid() {
    let subject = Subject::host();
    let served = Served::start(Keeper::Apart, &subject);
    let place = Meeting::host();
    let second = || vmmfd(&place, &["serve", "--no-keeper", "--socket", text(&served.path)]).end();
    let other = place.folder().join("other.sock");
    let same_keeper = ["serve", "--keeper", text(&served.keeper_path()), "--socket", text(&other)].map(str::to_owned);
    for _ in 0..2 {
        second().code(5).says(&format!("already served by pid {}\n", served.server()));
        let ended = vmmfd(&place, &same_keeper.each_ref().map(|word| &**word)).end();
        ended.code(5).says(&format!("it already serves pid {}", served.server()));
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
    for _ in 0..2 {
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
        kill(served.keeper(), Signal::SIGHUP).unwrap();
        served.greeted();
    }
    assert!(!served.log().contains("previous broker"), "{}", served.log());
}

#[test]
fn removed_socket_is_bound_again() {
    let subject = Subject::host();
    for (keeper, ending) in [(Keeper::Own, "restarting the server"), (Keeper::Apart, "restart this broker")] {
        let served = Served::with(keeper, &subject, &binary("vmmfd"), &["--time-limit", "file=100ms"]);
        let server = served.server();
        fs::remove_file(&served.path).unwrap();
        served.wait_for_log("ERROR vmmfd::broker::server::io::reactor: the socket's file was removed or replaced", 1);
        served.wait_for_log(ending, 1);
        if keeper == Keeper::Apart {
            kill(server, Signal::SIGTERM).unwrap();
        }
        served.wait_for_another(server, std::time::Instant::now());
        assert_eq!(served.log().matches("was removed or replaced").count(), 1, "{}", served.log());
    }
}

#[test]
fn removed_lock_file_is_created_again() {
    let subject = Subject::host();
    let place = Meeting::host();
    for keeper in [Keeper::Own, Keeper::Apart] {
        let served = Served::with(keeper, &subject, &binary("vmmfd"), &["--time-limit", "file=100ms"]);
        let server = served.server();
        let lock = served.path.with_file_name(".broker.sock.lock");
        fs::remove_file(&lock).unwrap();
        served.wait_for_log("the socket's lock file was removed or replaced: creating it again", 1);
        until(|| fs::read_to_string(&lock).is_ok_and(|pid| pid.trim() == server.to_string()));
        // The server looks for the socket's file only later, so the lock alone refuses the second broker.
        kill(server, Signal::SIGSTOP).unwrap();
        fs::remove_file(&served.path).unwrap();
        let ended = vmmfd(&place, &["serve", "--socket", text(&served.path)]).end();
        kill(server, Signal::SIGCONT).unwrap();
        ended.code(5).says(&format!("pid {server} still serves"));
    }
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
        ("VMMFD_OPTIONS=\"--quota leases=many\"", "`many` is not a number of leases"),
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
    check("", &["--keeper", text(&keeper)]).code(5).says("no keeper listens there");
    fs::write(&socket, "").unwrap();
    let ended = check("", &["--keeper", text(&keeper)]);
    ended.code(2).says("not a socket").says("no keeper listens there");
    fs::remove_file(&socket).unwrap();
    let mut server = vmmfd(&place, &["serve", "--socket", text(&socket)]).start();
    server.until("listening");
    let ended = check("", &["--keeper", text(&keeper)]);
    ended.code(5).says("already served by pid").says("no keeper listens there");
    fs::remove_file(&socket).unwrap();
    check("", &[]).code(5).says("although the socket's file was removed");
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

fn socket_follows_the_options(keeper: Keeper, signal: Signal) {
    let subject = Subject::host();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("options");
    fs::write(&file, "").unwrap();
    let served = Served::with(keeper, &subject, &binary("vmmfd"), &["--options-file", text(&file)]);
    assert_eq!(mode(&served.path), 0o600);
    for (options, wanted) in [("--allow-uid 34560", 0o666), ("", 0o600), ("--allow-gid 34570 --allow-gid 34571", 0o666)]
    {
        fs::write(&file, format!("VMMFD_OPTIONS=\"{options}\"\n")).unwrap();
        let server = served.server();
        let asked = if signal == Signal::SIGHUP { served.keeper() } else { server };
        kill(asked, signal).unwrap();
        served.wait_for_another(server, std::time::Instant::now());
        assert_eq!(mode(&served.path), wanted, "{options}: {}", served.log());
    }
}

#[test]
fn socket_follows_options_at_start() {
    socket_follows_the_options(Keeper::Apart, Signal::SIGTERM);
}

#[test]
fn socket_follows_options_at_reload() {
    socket_follows_the_options(Keeper::Own, Signal::SIGHUP);
}

mod root {
    use super::*;
    use crate::{broker_process::become_user, support::in_fork};

    const TEAM: u32 = 34570;

    #[test]
    #[ignore = "needs root: make test-all runs it as root"]
    fn socket_is_for_the_allowed_group() {
        let subject = Subject::host();
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("options");
        let allow = |options: &str| fs::write(&file, format!("VMMFD_OPTIONS='{options}'\n")).unwrap();
        allow("");
        let served = Served::with(Keeper::Apart, &subject, &binary("vmmfd"), &["--options-file", text(&file)]);
        fs::set_permissions(served.path.parent().unwrap(), fs::Permissions::from_mode(0o755)).unwrap();
        let connects = |uid: u32, gid: u32| {
            in_fork(|| {
                become_user(uid, gid, &[]);
                Client::connect(&served.path, &Config::default()).is_ok_and(|client| client.list("").is_ok())
            });
        };
        let refused = |uid: u32, gid: u32| {
            in_fork(|| {
                become_user(uid, gid, &[]);
                let config = Config::default().timeout(std::time::Duration::from_millis(500));
                Client::connect(&served.path, &config).is_err()
            });
        };
        refused(34561, TEAM);
        allow(&format!("--allow-gid {TEAM}"));
        served.kill_server();
        let socket = fs::metadata(&served.path).unwrap();
        assert_eq!((socket.mode() & 0o777, socket.gid(), socket.uid()), (0o660, TEAM, 0));
        connects(34561, TEAM);
        refused(34561, 34561);
        // A group is no longer allowed: the next server sets the mode of the socket file to match.
        allow("--allow-uid 34562");
        served.kill_server();
        assert_eq!(mode(&served.path), 0o666);
        refused(34561, TEAM);
        connects(34562, 34562);
    }

    #[test]
    #[ignore = "needs root: make test-all runs it as root"]
    fn status_of_foreign_broker_shows_own_objects() {
        let subject = Subject::host();
        let served = Served::with(Keeper::Own, &subject, &binary("vmmfd"), &["--allow-uid", "34561"]);
        fs::set_permissions(served.path.parent().unwrap(), fs::Permissions::from_mode(0o755)).unwrap();
        let root = Client::connect(&served.path, &Config::default()).unwrap();
        drop(root.get(&Get::new("none")));
        served.kill_server();
        in_fork(|| {
            become_user(34561, 34561, &[]);
            let client = Client::connect(&served.path, &Config::default()).unwrap();
            let metrics = client.metrics().unwrap();
            let crashes = metrics.crashes.unwrap();
            crashes.len() == 1 && metrics.totals.iter().all(|total| total.uid == 34561) && metrics.pid.is_some()
        });
    }
}
