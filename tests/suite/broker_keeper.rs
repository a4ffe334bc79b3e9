//! `vmmfd keeper` beside `vmmfd serve --keeper`, as two services of an init.

use std::os::unix::net::UnixDatagram;

use nix::sys::{
    ptrace::{self, Options},
    wait::{WaitPidFlag, WaitStatus, waitpid},
};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};

use crate::support::{
    pages::{PAGE, Template, nonce_of, page},
    prelude::*,
    served::{copied, is_stopped},
    session::spawn_alone,
};

/// The time limit of each wait.
const PATIENCE: Duration = Duration::from_secs(120);

/// The segments of an object: two objects take several records of descriptors.
const SEGMENTS: usize = 200;

fn client(served: &Served) -> Client {
    Client::connect(&served.path, &Config::default().timeout(PATIENCE).wait(PATIENCE)).unwrap()
}

#[track_caller]
fn put(served: &Served, name: &str, nonce: u8) {
    put_segments(served, name, nonce, SEGMENTS);
}

/// Puts an object of so many segments. All are the same page with the nonce.
#[track_caller]
pub(crate) fn put_segments(served: &Served, name: &str, nonce: u8, segments: usize) {
    let (page, memory) = (page(nonce.into()), Template::new().of(segments as u64));
    let segments = (0..segments).map(|_| (PAGE, page.as_fd()));
    let part = PutPart::of_segments("all", Backend::Host, memory, segments).unwrap();
    // While the server or the keeper is down, the client repeats the put. It takes effect once.
    client(served).put(&Put::new(name).part(part)).unwrap();
}

/// The nonce in all segments of an object of so many.
#[track_caller]
pub(crate) fn nonce_of_segments(client: &Client, name: &str, count: usize) -> u8 {
    let lease = client.get(&Get::new(name)).unwrap();
    let segments: Vec<OwnedFd> =
        lease.into_parts().into_iter().flat_map(|part| part.into_segments().unwrap()).map(|(_, fd)| fd).collect();
    assert_eq!(segments.len(), count);
    let nonces: BTreeSet<u64> = segments.iter().map(nonce_of).collect();
    assert_eq!(nonces.len(), 1);
    nonces.first().map(|nonce| *nonce as u8).unwrap()
}

/// A broker with `objects` objects, each filled with its index.
fn broker(objects: u8, options: &[&str]) -> Served {
    let served = Served::with(Keeper::Apart, &Subject::host(), &binary("vmmfd"), options);
    (0..objects).for_each(|index| put(&served, &format!("object-{index}"), index));
    served
}

#[track_caller]
fn check(served: &Served, objects: u8) {
    let client = client(served);
    for index in 0..objects {
        assert_eq!(nonce_of_segments(&client, &format!("object-{index}"), SEGMENTS), index, "{}", served.log());
    }
}

/// Waits until the running keeper has everything that the server has.
#[track_caller]
fn settle(served: &Served) {
    until(|| {
        let (held, stored) = served.kept(served.server());
        held == stored && held > 0
    });
}

#[test]
fn server_without_keeper_names_lost_objects() {
    let served = broker(2, &["--time-limit", "keeper=1s"]);
    served.keeper_manager().stop(Signal::SIGKILL);
    assert_eq!(served.manager.stop(Signal::SIGTERM), Some(0));
    let log = served.log();
    for text in ["no keeper has confirmed everything after 1s: freeing the rest", "object-0", "object-1"] {
        assert!(log.contains(text), "no {text:?} in: {log}");
    }
}

#[test]
fn unusable_keeper_socket_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let (keeper, socket) = (folder.path().join("keeper.sock"), folder.path().join("broker.sock"));
    let mut command = Command::new(binary("vmmfd"));
    command.args(["serve", "--time-limit", "keeper=50ms", "--keeper"]).arg(keeper).arg("--socket").arg(&socket);
    let ended = command.env_remove("NOTIFY_SOCKET").output().unwrap();
    let error = String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.code() == Some(5) && error.contains("reach the keeper at"), "{error}");
    // The server never listened, so no client saw it without the objects.
    assert!(!socket.exists());
}

/// The first record of a server, of another version of the protocol.
const HELLO: &[u8] = b"{\"Hello\":{\"version\":9,\"role\":\"NextServer\"}}\0";

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
    let served = broker(1, &[]);
    served.manager.stop(Signal::SIGTERM);
    let answer = ask(&served.keeper_path, HELLO).unwrap();
    assert!(answer.contains("Refused") && answer.contains("version 3") && answer.contains("version 9"), "{answer}");
    // An invalid record only closes its connection.
    for record in [&b"?"[..], b"\"Serving\"", b"\"Serving\"\0", b"{\"Hello\":{}}\0"] {
        assert_eq!(ask(&served.keeper_path, record).unwrap_or_default(), "");
    }
    served.manager.start_again();
    check(&served, 1);
}

/// An upgrade: a keeper that starts takes over from the running one, and a server from the keeper.
#[test]
fn successors_execute_new_programs() {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("vmmfd");
    copied(&binary("vmmfd"), &program);
    let image = |pid: Pid| fs::metadata(format!("/proc/{pid}/exe")).map(|file| file.ino()).ok();
    for keeper in [Keeper::Own, Keeper::Apart] {
        let served = Served::with(keeper, &Subject::host(), &program, &[]);
        put(&served, "object-0", 0);
        for round in 1..4 {
            copied(&binary("vmmfd"), &program);
            let new = Some(fs::metadata(&program).unwrap().ino());
            let server = served.server();
            kill(server, Signal::SIGHUP).unwrap();
            served.wait_for_another(server, Instant::now());
            kill(served.keeper(), Signal::SIGTERM).unwrap();
            until(|| image(served.keeper()) == new);
            assert_eq!(image(served.server()), new);
            put(&served, &format!("object-{round}"), round);
            settle(&served);
            check(&served, round + 1);
        }
        served.kill_server();
        check(&served, 4);
    }
}

/// A keeper that a user starts takes over too, with and without a server.
#[test]
fn keeper_takes_over_from_another() {
    let served = Served::start(Keeper::Own, &Subject::host());
    put(&served, "object-0", 0);
    for with_server in [true, false] {
        let old = served.keeper();
        if !with_server {
            served.manager.stop(Signal::SIGKILL);
        }
        let mut command = Command::new(binary("vmmfd"));
        command.args(["keeper", "--socket"]).arg(&served.keeper_path).stderr(Stdio::null());
        let mut child = spawn_alone(&mut command);
        let new = Pid::from_raw(child.id().cast_signed());
        until(|| !is_alive(old) && served.keeper() == new);
        if with_server {
            settle(&served);
        } else {
            served.manager.start_again();
        }
        check(&served, 1);
        // With a server, its copy continues.
        kill(new, Signal::SIGTERM).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(0));
        settle(&served);
        check(&served, 1);
    }
}

#[test]
fn twin_continues_for_killed_keeper() {
    let served = Served::start(Keeper::Own, &Subject::host());
    (0..2).for_each(|index| put(&served, &format!("object-{index}"), index));
    // The folder with both sockets is removed: the keeper listens there again, and the next server finds it.
    fs::remove_dir_all(served.path.parent().unwrap()).unwrap();
    served.manager.stop(Signal::SIGKILL);
    for _ in 0..5 {
        // The keeper and its twin.
        until(|| served.keepers().len() == 2);
        let keeper = served.keeper();
        kill(keeper, Signal::SIGKILL).unwrap();
        until(|| !is_alive(keeper));
    }
    // A killed twin is replaced.
    until(|| served.keepers().len() == 2);
    let keeper = served.keeper();
    let twin = served.keepers().into_iter().find(|&pid| pid != keeper).unwrap();
    kill(twin, Signal::SIGKILL).unwrap();
    until(|| !is_alive(twin) && served.keepers().len() == 2 && served.keeper_path.exists());
    served.manager.start_again();
    check(&served, 2);
    // The server has everything now, so there is no twin.
    until(|| served.keepers() == [keeper]);
}

/// A new keeper is killed once it has a twin, and before it has told the old keeper that it serves.
#[test]
fn twin_of_killed_successor_ends_the_handover() {
    let served = Served::start(Keeper::Own, &Subject::host());
    put(&served, "object-0", 0);
    let old = served.keeper();
    served.manager.stop(Signal::SIGKILL);
    let mut command = Command::new("sh");
    command.args(["-c", "kill -STOP $$; exec \"$0\" keeper --socket \"$1\""]).arg(binary("vmmfd"));
    let mut child = spawn_alone(command.arg(&served.keeper_path).stderr(Stdio::null()));
    let new = Pid::from_raw(child.id().cast_signed());
    until(|| is_stopped(new));
    ptrace::seize(new, Options::PTRACE_O_TRACEFORK).unwrap();
    kill(new, Signal::SIGCONT).unwrap();
    loop {
        match waitpid(new, None).unwrap() {
            WaitStatus::PtraceEvent(_, _, nix::libc::PTRACE_EVENT_FORK) => break,
            WaitStatus::Stopped(_, signal) => ptrace::cont(new, signal).unwrap(),
            _ => ptrace::cont(new, None).unwrap(),
        }
    }
    let twin = Pid::from_raw(ptrace::getevent(new).unwrap() as i32);
    waitpid(twin, Some(WaitPidFlag::__WALL)).unwrap();
    ptrace::detach(twin, None).unwrap();
    kill(new, Signal::SIGKILL).unwrap();
    child.wait().unwrap();
    until(|| !is_alive(old) && served.keeper() == twin);
    served.manager.start_again();
    check(&served, 1);
}

#[test]
fn stopped_keeper_is_replaced() {
    let served = broker(1, &["--time-limit", "silence=1s"]);
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
    use super::*;

    const OTHER: u32 = 45672;

    #[test]
    #[ignore = "needs root: make test-all runs it as root"]
    fn keeper_refuses_other_users() {
        let served = broker(1, &[]);
        let path = served.keeper_path.clone();
        let folder = path.parent().unwrap().to_owned();
        in_fork(|| {
            become_user(OTHER, OTHER, &[]);
            // The folder denies access.
            ask(&path, HELLO).is_err_and(|error| error.kind() == io::ErrorKind::PermissionDenied)
        });
        // Even if an operator opens the folder and the socket.
        for open in [folder.parent().unwrap(), &folder, &path] {
            fs::set_permissions(open, fs::Permissions::from_mode(0o777)).unwrap();
        }
        in_fork(|| {
            become_user(OTHER, OTHER, &[]);
            let answer = ask(&path, HELLO).unwrap();
            answer.contains("Refused") && answer.contains("must run as the same user")
        });
        served.wait_for_log(&format!("runs as uid {OTHER}"), 1);
        check(&served, 1);
    }
}
