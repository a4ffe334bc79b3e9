//! Clients, objects and starts of a broker whose server or keeper dies. The simulation has the orders of events.

use vmmfd::{
    broker::{Lifetime, Watched},
    wire::broker::Message,
};

use crate::support::{
    material::{get_message, put, value},
    prelude::*,
    session::Session,
};

cases! {
    on crate::support::Subject; every backend: [
    readers_restore_lost_objects,
    ]
}

const MIB: u64 = 1 << 20;

/// A client that waits for the next server.
fn client(served: &Served) -> Client {
    Client::connect(&served.path, &Config::default().timeout(Duration::from_secs(100))).unwrap()
}

#[test]
fn connections_during_a_restart_are_served() {
    let subject = Subject::host();
    let served = Served::start(Keeper::Own, &subject);
    put(&served.client(), &subject.driver, "a", 1);
    let (server, keeper) = (served.server(), served.keeper());
    // A stopped keeper hands over nothing.
    kill(keeper, Signal::SIGSTOP).unwrap();
    kill(server, Signal::SIGKILL).unwrap();
    until(|| !is_alive(server));
    let dial = |_| {
        let raw = Raw::dial(&served.path).unwrap();
        raw.send(&Raw::hello(), &[]).unwrap();
        raw.send(&get_message("a"), &[]).unwrap();
        raw
    };
    let waiting: Vec<Raw> = (0..100).map(dial).collect();
    kill(keeper, Signal::SIGCONT).unwrap();
    for raw in waiting {
        assert!(matches!(raw.receive().unwrap(), Some((Message::Hello(_), _))));
        let Some((Message::Lease(lease), fds)) = raw.receive().unwrap() else { panic!() };
        assert_eq!((lease.version, fds.len()), (1, 2));
    }
}

#[test]
fn requests_and_leases_survive_server_kill() {
    let subject = Subject::host();
    let served = Served::start(Keeper::Own, &subject);
    let [maker, other, waiter] = [(); 3].map(|()| client(&served));
    let (restored, notices) = mpsc::channel();
    maker.on_restored(move |_, notice| restored.send(notice.rebuilt).unwrap_or_default());
    put(&maker, &subject.driver, "a", 7);
    let memory = filled(&subject.driver, 4 * MIB, Some(2 * MIB), 7);
    maker.put(&Put::new("mine").lifetime(Lifetime::Maker).part(PutPart::of("all", &memory).unwrap())).unwrap();
    let object = maker.get(&Get::new("a")).unwrap().open(&subject.driver, None).unwrap();
    let get = Get::new("later").wait(Duration::from_secs(100));
    let waiting = thread::spawn(move || waiter.get(&get).unwrap().version());
    let held = || other.who("a").unwrap().leases.into_iter().map(|lease| (lease.id, lease.size)).collect::<Vec<_>>();
    let before = held();
    let mut watch = other.watch("watched/", None).unwrap();
    for round in 0..3 {
        put(&maker, &subject.driver, &format!("watched/{round}"), 1);
        served.kill_server();
        assert!(!notices.recv_timeout(Duration::from_secs(100)).unwrap() && object.is_held());
        assert!(before.len() == 1 && held() == before, "the same lease, and no other");
    }
    other.stat("mine", None).unwrap();
    put(&maker, &subject.driver, "watched/last", 1);
    // A restarted server does not have the events before its start.
    let next = || watch.next(Duration::from_secs(100)).unwrap().expect("the event does not arrive");
    let seen: Vec<Watched> = std::iter::repeat_with(next)
        .take_while(|next| !matches!(next, Watched::Event(event) if event.name == "watched/last"))
        .collect();
    assert!(seen.contains(&Watched::Lost) && !waiting.is_finished(), "{seen:?}");
    put(&other, &subject.driver, "later", 1);
    assert_eq!(waiting.join().unwrap(), 1);
    // Dropping the client releases the lease, and deletes the object whose lifetime is tied to its maker.
    drop((object, maker));
    until(|| held().is_empty() && other.stat("mine", None).is_err());
}

fn readers_restore_lost_objects(mut subject: Subject) {
    subject.alone();
    let served = Served::start(Keeper::Own, &subject);
    let clients = [(); 2].map(|()| client(&served));
    for (name, value) in [("a", 4), ("a", 5), ("unread", 1)] {
        put(&clients[0], &subject.driver, name, value);
    }
    let server = served.server();
    let listed = |client: &Client| {
        let list = client.list("").unwrap();
        list.into_iter().map(|of| (of.name, of.version, of.leases)).collect::<Vec<_>>()
    };
    let leases = clients.each_ref().map(|client| client.get(&Get::new("a")).unwrap());
    let before = clients[0].stat("a", None).unwrap();
    served.kill_both();
    served.manager.start_again();
    served.wait_for_log("the previous broker, and its keeper if it had one, stopped", 1);
    served.wait_for_log(&format!("pid={server}"), 1);
    // The clients send no request: they reconnect because they hold leases.
    let other = client(&served);
    until(|| listed(&other) == [("a".to_owned(), 2, 2)]);
    assert_eq!(clients[0].stat("a", None).unwrap(), before);
    assert_eq!(value(&clients[1], &subject.driver, "a"), [5; 2]);
    until(|| leases.iter().all(|lease| lease.is_held()) && served.kept(served.server()) == (2, 2));
    drop(leases);
    until(|| listed(&other) == [("a".to_owned(), 2, 0)]);
}

/// `serve` under a limit with which it can't hold an object.
#[test]
fn low_descriptor_limit_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -n 256; exec \"$0\" serve --socket \"$1\""]);
    command.arg(binary("vmmfd")).arg(folder.path().join("socket")).stderr(Stdio::piped());
    let mut child = Session::start(&mut command).unwrap();
    let text = io::read_to_string(child.stderr.take().unwrap()).unwrap();
    assert!(!child.wait().unwrap().success() && text.contains("RLIMIT_NOFILE") && text.contains("ulimit -n"), "{text}");
}

#[test]
fn unread_stderr_blocks_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("broker.sock");
    let mut child = Command::new(binary("vmmfd"));
    child.args(["serve", "-vv", "--socket"]).arg(&path).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = Session::start(&mut child).unwrap();
    let stderr = child.stderr.take().unwrap();
    let connect = || Client::connect(&path, &Config::default());
    until(|| connect().is_ok());
    // Each connection writes several log lines: together more than the pipe and the queue hold.
    (0..1500).for_each(|_| drop(connect().unwrap()));
    put(&connect().unwrap(), &Subject::host().driver, "a", 3);
    let read = thread::spawn(move || io::read_to_string(stderr).unwrap());
    kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGTERM).unwrap();
    assert!(child.wait().unwrap().success());
    let log = read.join().unwrap();
    assert!(log.contains("lines of the log were dropped"), "{} bytes", log.len());
}

#[test]
fn folder_lock_prevents_no_start() {
    let served = Served::start(Keeper::Own, &Subject::host());
    let folder = served.path.parent().unwrap().to_owned();
    assert_eq!(served.stop(), Some(0));
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 0, "an end in order leaves no file");
    // Any user can lock a folder that it can open.
    let locked = File::open(&folder).unwrap();
    locked.lock().unwrap();
    served.manager.start_again();
    served.greeted();
    assert!(!served.log().contains("previous"), "{}", served.log());
    let lock = fs::metadata(folder.join(".broker.sock.lock")).unwrap();
    assert_eq!(lock.permissions().mode() & 0o777, 0o600);
}
