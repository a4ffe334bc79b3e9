//! `vmmfd keeper` beside `vmmfd serve --keeper`, as two services of an init.

use std::{
    collections::BTreeSet,
    fs, io,
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::{fs::MetadataExt, net::UnixDatagram},
    },
    path::Path,
    process::{Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use nix::{
    libc,
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
use vmmfd::{
    broker::{Client, Get},
    session::Config,
    wire::broker::{self, Message},
};

use crate::{
    broker::until,
    broker_crashes::token,
    broker_pages::{Template, nonce_of, page},
    running::binary,
    support::{
        Subject, pause,
        served::{Keeper, Served, copied, is_alive, is_stopped, stored},
        session::spawn_alone,
        stepper::{Call, From, trace},
    },
};

/// The time limit of each wait.
const PATIENCE: Duration = Duration::from_secs(120);

/// The segments of an object: two objects take several records of descriptors.
const SEGMENTS: usize = 200;

fn client(served: &Served) -> Client {
    Client::connect(&served.path, &Config::default().timeout(PATIENCE)).unwrap()
}

#[track_caller]
fn put(served: &Served, name: &str, nonce: u8) {
    // One memfd, opened repeatedly: each open file is a segment.
    let memory = page(nonce.into());
    let opened = format!("/proc/self/fd/{}", memory.as_raw_fd());
    let pages: Vec<fs::File> =
        (0..SEGMENTS).map(|_| fs::OpenOptions::new().read(true).write(true).open(&opened).unwrap()).collect();
    let put = broker::PutHeader { request: Some(token()), ..Template::new().put_of_pages(name, SEGMENTS) };
    // While the server or the keeper is down, the put is repeated. It takes effect once.
    let begun = Instant::now();
    loop {
        let fds: Vec<_> = pages.iter().map(AsFd::as_fd).collect();
        match served.greeted().0.ask(&Message::Put(Box::new(put.clone())), &fds) {
            Ok(Some((Message::Published(_), _))) => return,
            Ok(None) | Err(_) if begun.elapsed() < PATIENCE => {}
            other => panic!("{other:?}: {}", served.log()),
        }
    }
}

/// The nonce in all segments of an object.
#[track_caller]
fn value(client: &Client, name: &str) -> u8 {
    let lease = client.get(&Get::new(name)).unwrap();
    let segments: Vec<OwnedFd> =
        lease.into_parts().into_iter().flat_map(|part| part.into_segments().unwrap()).map(|(_, fd)| fd).collect();
    assert_eq!(segments.len(), SEGMENTS);
    let nonces: BTreeSet<u64> = segments.iter().map(nonce_of).collect();
    assert_eq!(nonces.len(), 1);
    nonces.first().map(|nonce| *nonce as u8).unwrap()
}

/// A broker with `objects` objects, each filled with its index.
fn broker(subject: &Subject, objects: u8) -> Served {
    with_limits(subject, objects, &[])
}

/// Like [`broker`], with time limits of the server.
fn with_limits(subject: &Subject, objects: u8, options: &[&str]) -> Served {
    let served = Served::with(Keeper::Apart, subject, &binary("vmmfd"), options);
    (0..objects).for_each(|index| put(&served, &format!("object-{index}"), index));
    served
}

#[track_caller]
fn check(served: &Served, objects: u8) {
    let client = client(served);
    for index in 0..objects {
        assert_eq!(value(&client, &format!("object-{index}")), index, "{}", served.log());
    }
}

/// Waits until the running keeper has everything that the server has.
#[track_caller]
fn settle(served: &Served) {
    let begun = Instant::now();
    loop {
        let (server, keeper) = (served.server(), served.keeper());
        let counts = (stored(server), stored(keeper));
        if counts.0 == counts.1 && counts.0 > 0 {
            return;
        }
        assert!(begun.elapsed() < PATIENCE, "{counts:?} descriptors: {}", served.log());
        pause(begun);
    }
}

fn output(arguments: &[&str], paths: &[&Path]) -> Output {
    let mut command = Command::new(binary("vmmfd"));
    command.args(arguments).args(paths).env_remove("NOTIFY_SOCKET").stdin(Stdio::null());
    command.output().unwrap()
}

/// The error of a command that exits with 5.
#[track_caller]
fn failure(arguments: &[&str], paths: &[&Path]) -> String {
    let ended = output(arguments, paths);
    let error = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert_eq!(ended.status.code(), Some(5), "{error}");
    error
}

#[test]
fn consecutive_restarts_lose_nothing() {
    let subject = Subject::host();
    let served = broker(&subject, 3);
    let server = served.manager.as_ref().unwrap();
    let keeper = served.keeper.as_ref().unwrap();
    for _ in 0..3 {
        // SIGTERM arrives before the server has sent the new keeper everything. The server sends the rest before it exits.
        assert_eq!(keeper.stop(Signal::SIGTERM), Some(0));
        keeper.start_again();
        assert_eq!(server.stop(Signal::SIGTERM), Some(0));
        server.start_again();
        check(&served, 3);
    }
    assert!(!["is lost", "are lost"].iter().any(|text| served.log().contains(text)), "{}", served.log());
    // The keeper holds everything without a server. The last process to exit reports the freed memory.
    assert_eq!(server.stop(Signal::SIGTERM), Some(0));
    assert!(stored(served.keeper()) > 3 * SEGMENTS);
    assert_eq!(keeper.stop(Signal::SIGTERM), Some(0));
    served.wait_for_log("descriptors: 3 objects, 3 versions, ", 1);
}

#[test]
fn server_without_keeper_names_lost_objects() {
    let subject = Subject::host();
    let served = with_limits(&subject, 2, &["--time-limit", "keeper=1s"]);
    assert_eq!(served.keeper.as_ref().unwrap().stop(Signal::SIGTERM), Some(0));
    assert_eq!(served.manager.as_ref().unwrap().stop(Signal::SIGTERM), Some(0));
    let log = served.log();
    for text in ["no keeper has confirmed everything after 1s: freeing the rest", "object-0", "object-1"] {
        assert!(log.contains(text), "no {text:?} in: {log}");
    }
}

#[test]
fn unusable_keeper_socket_is_an_error() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let (keeper, socket) = (folder.path().join("keeper.sock"), folder.path().join("broker.sock"));
    let error =
        failure(&["serve", "--time-limit", "keeper=50ms", "--keeper"], &[&keeper, Path::new("--socket"), &socket]);
    assert!(error.contains("reach the keeper at") && error.contains("vmmfd keeper"), "{error}");
    // The server never listened, so no client saw it without the objects.
    assert!(!socket.exists());
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o750)).unwrap();
    let error = failure(&["keeper", "--socket"], &[&keeper]);
    assert!(error.contains("mode 750") && error.contains("700"), "{error}");
}

/// Sends a record to the keeper at a path, and returns its answer.
fn ask(path: &Path, record: &[u8]) -> io::Result<String> {
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    // The keeper may have refused the connection already.
    let _ = rustix::net::send(&socket, record, SendFlags::NOSIGNAL);
    let mut answer = [0; 4096];
    let mut receive = || rustix::net::recv(&socket, &mut answer[..], RecvFlags::empty());
    // A reset is reported once, before the answer.
    let (length, _) = receive().or_else(|_| receive())?;
    Ok(String::from_utf8_lossy(&answer[..length]).into_owned())
}

#[test]
fn other_protocol_versions_are_refused() {
    let subject = Subject::host();
    let served = broker(&subject, 1);
    served.manager.as_ref().unwrap().stop(Signal::SIGTERM);
    let answer = ask(&served.keeper_path(), &[b'H', 9, 0, 0, 0, 0]).unwrap();
    assert!(answer.starts_with('X') && answer.contains("version 1") && answer.contains("version 9"), "{answer}");
    // An invalid record only closes its connection.
    for record in [&b"?"[..], b"K\x01a", b"H", &[b'K', 200, 1]] {
        assert_eq!(ask(&served.keeper_path(), record).unwrap_or_default(), "");
    }
    served.manager.as_ref().unwrap().start_again();
    check(&served, 1);
}

/// Matches the `nth` of these system calls.
fn at_call(nth: usize, numbers: &[libc::c_long]) -> impl FnMut(&Call) -> bool {
    let mut count = 0;
    move |call| {
        let counts = numbers.contains(&call.number);
        count += usize::from(counts);
        counts && count == nth + 1
    }
}

/// Kills the server before each message of its resend to a new keeper. Only sends are counted: the number of receives depends on the
/// keeper's speed.
#[test]
fn interrupted_resend_names_each_lost_version() {
    // The objects take three records of descriptors.
    const OBJECTS: u8 = 3;
    let subject = Subject::host();
    let mut nth = 0;
    let mut lost = 0;
    let mut whole = 0;
    let mut incomplete = 0;
    loop {
        let served = broker(&subject, OBJECTS);
        let keeper = served.keeper.as_ref().unwrap();
        let server = served.server();
        let starts = served.manager.as_ref().unwrap().starts();
        keeper.stop(Signal::SIGKILL);
        let all_sent = || served.log().matches("of the server are held").count();
        let before = all_sent();
        let (_, traced) = trace(server, From::Idle, at_call(nth, &[libc::SYS_sendmsg]), || {
            keeper.start_again();
            until(|| !is_alive(server) || all_sent() > before);
        });
        if traced.killed.is_none() {
            check(&served, OBJECTS);
            break;
        }
        served.manager.as_ref().unwrap().main(starts + 1);
        served.greeted();
        let client = client(&served);
        let there: BTreeSet<String> = client.list("").unwrap().into_iter().map(|object| object.name).collect();
        for index in 0..OBJECTS {
            let name = &*format!("object-{index}");
            if there.contains(name) {
                assert_eq!(value(&client, name), index);
            } else {
                let is_named =
                    |log: &str| log.lines().any(|line| line.contains("a version is lost") && line.contains(name));
                let all = ["everything is lost", "its objects are lost"];
                // The log is written by another thread.
                let begun = Instant::now();
                let (named, log) = loop {
                    let log = served.log();
                    let named = is_named(&log);
                    if named || all.iter().any(|text| log.contains(text)) || begun.elapsed() > Duration::from_secs(20) {
                        break (named, log);
                    }
                    thread::sleep(Duration::from_millis(5));
                };
                assert!(named || all.iter().any(|text| log.contains(text)), "{name} vanished at call {nth}: {log}");
                incomplete += usize::from(named);
                lost += 1;
            }
        }
        whole += usize::from(there.len() == usize::from(OBJECTS));
        // The next server sends the keeper a complete set.
        put(&served, "after", 7);
        settle(&served);
        nth += 1;
    }
    eprintln!(
        "{nth} kills of the server in a resend: {lost} objects lost, {incomplete} of them by name, and none {whole} times"
    );
    assert!(incomplete > 0 && lost > incomplete && whole > 0, "{lost} {incomplete} {whole}");
}

/// Kills the keeper before each message of the resend, and of the put that waits for the resend.
#[test]
fn keeper_kill_during_resend_loses_nothing() {
    let subject = Subject::host();
    let served = broker(&subject, 2);
    let keeper = served.keeper.as_ref().unwrap();
    let (mut nth, server) = (0, served.server());
    loop {
        settle(&served);
        let starts = keeper.starts();
        fs::write(served.keeper_stop_flag(), "").unwrap();
        kill(served.keeper(), Signal::SIGKILL).unwrap();
        let next = keeper.main(starts + 1);
        until(|| is_stopped(next));
        fs::remove_file(served.keeper_stop_flag()).unwrap();
        let name = format!("during-{nth}");
        let (_, traced) = trace(next, From::Stopped, at_call(nth, &[libc::SYS_sendmsg, libc::SYS_recvmsg]), || {
            put(&served, &name, 9)
        });
        check(&served, 2);
        assert_eq!(value(&client(&served), &name), 9);
        client(&served).delete(&name).unwrap();
        if traced.killed.is_none() {
            break;
        }
        nth += 1;
    }
    assert_eq!(served.server(), server);
    eprintln!("{nth} kills of the keeper");
    // About 12. On a busy machine several messages wait for each wake-up, and fewer receives find none.
    assert!(nth > 5, "{nth} kills");
    let (server, _) = served.kill_server();
    assert!(is_alive(server));
    check(&served, 2);
}

#[test]
fn reload_executes_new_program_in_place() {
    let subject = Subject::host();
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("vmmfd");
    copied(&binary("vmmfd"), &program);
    let served = Served::with(Keeper::Apart, &subject, &program, &[]);
    put(&served, "object-0", 0);
    let (server, keeper) = (served.server(), served.keeper());
    let image = |pid: Pid| fs::metadata(format!("/proc/{pid}/exe")).unwrap().ino();
    for round in 1..4 {
        copied(&binary("vmmfd"), &program);
        let ended = output(&["keeper", "--reload", "--socket"], &[&served.keeper_path()]);
        assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
        assert_eq!((served.keeper(), image(keeper)), (keeper, fs::metadata(&program).unwrap().ino()));
        // The connection to the server survives the upgrade.
        put(&served, &format!("object-{round}"), round);
        assert_eq!(served.server(), server);
    }
    for other in ["/bin/true", "/bin/false"] {
        let before = image(keeper);
        copied(Path::new(other), &program);
        let error = failure(&["keeper", "--reload", "--socket"], &[&served.keeper_path()]);
        assert!(error.contains(&program.display().to_string()), "{error}");
        assert_eq!((served.keeper(), image(keeper)), (keeper, before));
    }
    copied(&binary("vmmfd"), &program);
    served.kill_server();
    check(&served, 4);
}

#[test]
fn stopped_keeper_is_replaced() {
    let subject = Subject::host();
    let served = with_limits(&subject, 1, &["--time-limit", "silence=1s"]);
    let keeper = served.keeper();
    kill(keeper, Signal::SIGSTOP).unwrap();
    put(&served, "object-1", 1);
    served.wait_for_log("the keeper has read nothing for 1s", 1);
    until(|| served.keeper() != keeper);
    put(&served, "object-2", 2);
    settle(&served);
    served.kill_server();
    check(&served, 3);
}

#[test]
fn init_is_notified_of_ready_and_watchdog() {
    let folder = tempfile::tempdir().unwrap();
    let (notify, socket) = (folder.path().join("notify"), folder.path().join("broker.sock"));
    let heard = UnixDatagram::bind(&notify).unwrap();
    heard.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut command = Command::new(binary("vmmfd"));
    command.args(["serve", "--no-keeper", "--socket"]).arg(&socket).env("NOTIFY_SOCKET", &notify);
    command.env("WATCHDOG_USEC", "300000").env_remove("WATCHDOG_PID").stdout(Stdio::null());
    let mut server = spawn_alone(&mut command);
    let mut said = Vec::new();
    while said.iter().filter(|text| *text == "WATCHDOG=1").count() < 4 || !said.contains(&"READY=1".to_owned()) {
        let mut text = [0; 256];
        let length = heard.recv(&mut text).unwrap();
        said.push(String::from_utf8_lossy(&text[..length]).into_owned());
    }
    // A stopped server sends no watchdog messages, so the init would replace it.
    kill(Pid::from_raw(server.id().cast_signed()), Signal::SIGSTOP).unwrap();
    heard.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
    let silent = (0..100).any(|_| heard.recv(&mut [0; 256]).is_err());
    server.kill().unwrap();
    server.wait().unwrap();
    assert!(silent);
}

mod root {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::{broker_process::become_user, support::in_fork};

    const OTHER: u32 = 45672;

    #[test]
    #[ignore = "needs root: make test-all runs it as root"]
    fn keeper_refuses_other_users() {
        let subject = Subject::host();
        let served = broker(&subject, 1);
        let path = served.keeper_path();
        let folder = path.parent().unwrap().to_owned();
        in_fork(|| {
            become_user(OTHER, OTHER, &[]);
            // The folder denies access.
            ask(&path, &[b'H', 1, 0, 0, 0, 0]).is_err_and(|error| error.kind() == io::ErrorKind::PermissionDenied)
        });
        // Even if an operator opens the folder and the socket.
        for open in [folder.parent().unwrap(), &folder, &path] {
            fs::set_permissions(open, fs::Permissions::from_mode(0o777)).unwrap();
        }
        in_fork(|| {
            become_user(OTHER, OTHER, &[]);
            let answer = ask(&path, &[b'H', 1, 0, 0, 0, 0]).unwrap();
            answer.starts_with('X') && answer.contains("must run as the same user")
        });
        served.wait_for_log(&format!("runs as uid {OTHER}"), 1);
        check(&served, 1);
    }
}
