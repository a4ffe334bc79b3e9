//! Recalls: which holders acknowledge, and when the memory is free.

use std::{
    collections::BTreeSet,
    env,
    io::{self, BufRead, BufReader, Read},
    path::Path,
    process::{Child, Command, Stdio},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use vmmfd::{
    Error,
    broker::{Client, Condition, Get, Lease, Put, PutPart, Recall, RecallOf},
    error::RefusalCode,
    session::Config,
};

use crate::{
    broker::{Broker, filled, refused, until},
    broker_process::Raw,
    support::{
        Subject,
        served::{Keeper, Served},
        session::spawn_alone,
    },
};

const MIB: u64 = 1 << 20;

/// Longer than any recall takes that every holder acknowledges.
const LONG: Duration = Duration::from_secs(600);

/// The socket and the behaviour of a reader. Only a child has these variables.
const SOCKET: &str = "VMMFD_TEST_RECALLED";
const HEEDS: &str = "VMMFD_TEST_HEEDS_RECALL";

fn put(client: &Client, subject: &Subject) {
    let memory = filled(&subject.driver, MIB, None, 1);
    client.put(&Put::new("w").condition(Condition::Any).part(PutPart::of("all", &memory).unwrap())).unwrap();
}

fn lease(client: &Client) -> Lease {
    client.get(&Get::new("w")).unwrap()
}

/// Returns a channel that receives when the lease is recalled.
fn recalled(lease: &Lease) -> mpsc::Receiver<()> {
    let (send, receive) = mpsc::channel();
    lease.on_recall(move || send.send(()).unwrap()).unwrap();
    receive
}

/// The processes of the holders that have acknowledged, or have not.
fn pids(recall: &Recall, acknowledged: bool) -> BTreeSet<i32> {
    recall.holders.iter().filter(|of| of.acknowledged == acknowledged).map(|of| of.lease.pid).collect()
}

/// A reader in its own process.
struct Reader(Child);

impl Reader {
    fn start(path: &Path, heeds: bool) -> Self {
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(["broker_recall::result_names_silent_holders", "--exact", "--nocapture"]);
        command.env(SOCKET, path).env(HEEDS, heeds.to_string()).stdin(Stdio::piped()).stdout(Stdio::piped());
        Self(spawn_alone(&mut command))
    }

    /// The child: ends its lease when it is recalled, and itself when its standard input is closed.
    fn run(path: &Path) {
        let client = Client::connect(path, &Config::default()).unwrap();
        let lease = lease(&client);
        let recalled = recalled(&lease);
        println!("holds");
        if env::var(HEEDS).unwrap() == "true" {
            thread::spawn(move || {
                recalled.recv().unwrap();
                drop(lease);
            });
        }
        io::stdin().read_to_end(&mut Vec::new()).unwrap();
    }

    fn until_it_holds(&mut self) {
        let lines = BufReader::new(self.0.stdout.take().unwrap()).lines();
        assert!(lines.map(Result::unwrap).any(|line| line.contains("holds")), "the reader ended");
    }

    fn pid(&self) -> i32 {
        self.0.id().cast_signed()
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.pid()), signal).unwrap();
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        // Works for a stopped process too.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn result_names_silent_holders() {
    if let Some(path) = env::var_os(SOCKET) {
        return Reader::run(Path::new(&path));
    }
    let subject = Subject::host();
    let broker = Broker::start(&subject);
    let owner = broker.client();
    put(&owner, &subject);
    let mut readers: Vec<Reader> = (0..20).map(|at| Reader::start(&broker.path, at < 18)).collect();
    readers.iter_mut().for_each(Reader::until_it_holds);
    let ignoring = readers.pop().unwrap();
    let killed = readers.pop().unwrap();
    let stopped = readers.pop().unwrap();
    owner.delete("w").unwrap();
    stopped.signal(Signal::SIGSTOP);
    let (watcher, victim) = (broker.client(), killed.pid());
    let kills = thread::spawn(move || {
        until(|| watcher.who("w").unwrap().leases.len() == 3);
        kill(Pid::from_raw(victim), Signal::SIGKILL).unwrap();
    });
    let (begun, within) = (Instant::now(), Duration::from_secs(10));
    let result = owner.recall("w", RecallOf::Current, within).unwrap();
    kills.join().unwrap();
    // Only the deadline ended the recall, and it is no acknowledgement.
    assert!(begun.elapsed() >= within && !result.is_complete() && !result.free && !result.kept, "{result:?}");
    assert_eq!(pids(&result, false), BTreeSet::from([stopped.pid(), ignoring.pid()]));
    let others = readers.iter().map(Reader::pid).chain([killed.pid()]);
    assert_eq!(pids(&result, true), others.collect());
    assert!(result.holders.iter().all(|of| of.lease.size == 2 * MIB && of.lease.recalled), "{result:?}");
    stopped.signal(Signal::SIGCONT);
    until(|| owner.who("w").unwrap().leases.len() == 1);
    drop(ignoring);
    let ids = [result.holders[0].lease.id.clone()];
    let result = owner.recall_ids("w", &ids, LONG).unwrap();
    assert!(result.is_complete() && result.free, "{result:?}");
    assert_eq!(owner.metrics().unwrap().versions, 0);
}

#[test]
fn late_handler_is_called_at_once() {
    let subject = Subject::host();
    let broker = Broker::start(&subject);
    let (owner, reader) = (broker.client(), broker.client());
    put(&owner, &subject);
    let held = lease(&reader);
    assert!(!held.is_recalled().unwrap());
    // One request, which does not wait. The subscription of the other client starts later.
    let other = broker.client();
    let later = lease(&other);
    let result = owner.recall("w", RecallOf::Current, Duration::ZERO).unwrap();
    assert_eq!((result.holders.len(), result.is_complete(), result.kept), (2, false, true));
    assert!(later.is_recalled().unwrap());
    let calls = [recalled(&held), recalled(&held), recalled(&later)];
    calls.iter().for_each(|call| call.recv_timeout(LONG).unwrap());
    // A lease that is parked with its object still counts.
    let mut object = later.open(&subject.driver, None).unwrap();
    object.park_with_lease().unwrap();
    assert!(object.is_recalled().unwrap());
    drop(held);
    let result = owner.recall("w", RecallOf::Current, Duration::from_millis(100)).unwrap();
    assert_eq!((result.holders.len(), result.is_complete()), (1, false));
    object.park().unwrap();
    let result = owner.recall("w", RecallOf::Current, LONG).unwrap();
    assert!(result.holders.is_empty() && result.kept && !result.free, "{result:?}");
    // The recall is complete: it does not concern later leases.
    assert!(!lease(&reader).is_recalled().unwrap() && !lease(&broker.client()).is_recalled().unwrap());
}

#[test]
fn versions_are_recalled_by_choice() {
    let subject = Subject::host();
    let broker = Broker::start(&subject);
    let owner = broker.client();
    let held: Vec<Lease> = (0..3)
        .map(|_| {
            put(&owner, &subject);
            lease(&broker.client())
        })
        .collect();
    let of = |which| owner.recall("w", which, Duration::ZERO).unwrap();
    let versions = |result: &Recall| result.holders.iter().map(|of| of.lease.version).collect::<Vec<_>>();
    assert_eq!(versions(&of(RecallOf::Earlier)), [1, 2]);
    assert_eq!(versions(&of(RecallOf::Version(2))), [2]);
    assert_eq!(versions(&of(RecallOf::Current)), [3]);
    assert_eq!(refused(owner.recall("w", RecallOf::Version(4), LONG)).0, RefusalCode::Absent);
    owner.delete("w").unwrap();
    assert_eq!(versions(&of(RecallOf::Current)), [1, 2, 3]);
    assert!(held.iter().all(|lease| lease.is_recalled().unwrap()));
    drop(held);
    assert_eq!(refused(owner.recall("w", RecallOf::Current, LONG)).0, RefusalCode::Absent);
    // Without holders there is nothing to wait for.
    put(&owner, &subject);
    assert!(of(RecallOf::Earlier).free);
}

#[test]
fn recall_survives_server_restarts() {
    let subject = Subject::host();
    let served = Served::start(Keeper::Own, &subject);
    let client = || Client::connect(&served.path, &Config::default().timeout(LONG)).unwrap();
    let (owner, reader) = (client(), client());
    put(&owner, &subject);
    let held = lease(&reader);
    let recalled = recalled(&held);
    owner.delete("w").unwrap();
    // The reader subscribes again.
    served.kill_server();
    until(|| owner.who("w").unwrap().leases.len() == 1);
    let recall = thread::spawn(move || owner.recall("w", RecallOf::Current, LONG));
    recalled.recv_timeout(LONG).unwrap();
    served.kill_server();
    until(|| held.is_held());
    drop(held);
    let result = recall.join().unwrap().unwrap();
    assert_eq!((result.holders.len(), result.is_complete(), result.free), (1, true, true), "{result:?}");
}

#[test]
fn stop_interrupts_recall() {
    let subject = Subject::host();
    let broker = Broker::start(&subject);
    let owner = broker.client();
    put(&owner, &subject);
    let held = lease(&broker.client());
    let recalled = recalled(&held);
    let waiting = owner.clone();
    let recall = thread::spawn(move || waiting.recall("w", RecallOf::Current, LONG));
    recalled.recv_timeout(LONG).unwrap();
    until(|| {
        owner.stop().unwrap();
        thread::sleep(Duration::from_millis(50));
        recall.is_finished()
    });
    assert_eq!(refused(recall.join().unwrap()).0, RefusalCode::Stopped);
}

#[test]
fn only_users_of_recalls_pay() {
    let subject = Subject::host();
    let broker = Broker::start(&subject);
    let owner = broker.client();
    put(&owner, &subject);
    let reader = broker.client();
    let leases = [lease(&reader), lease(&reader)];
    let figures = || {
        let metrics = owner.metrics().unwrap();
        (metrics.connections, metrics.watchers)
    };
    assert_eq!(figures(), (2, 0));
    for _ in 0..2 {
        assert!(!leases[0].is_recalled().unwrap() && !leases[1].is_recalled().unwrap());
        assert_eq!(figures(), (3, 1));
    }
    drop((leases, reader));
    until(|| figures() == (1, 0));
    // A client without a path can't open another connection.
    let socket = Raw::dial(&broker.path).unwrap().0.into();
    let over = Client::over(socket, &Config::default()).unwrap();
    assert!(matches!(lease(&over).is_recalled(), Err(Error::Misuse { .. })));
}
