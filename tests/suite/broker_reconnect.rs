//! Clients of a broker that stops, restarts or is absent: their requests, their leases and the notices about them.

use std::sync::mpsc::Receiver;

use rustix::net::accept;
use vmmfd::{
    broker::{LossReason, Lost, Restored},
    wire::broker::{Message, Resumed},
};

use crate::{
    conversation::listening,
    support::{material::Material, prelude::*},
};

const MIB: u64 = 1 << 20;

/// A timeout that a test waits for.
const A_WHILE: Duration = Duration::from_secs(1);

/// A wait that a test ends before its time.
const LONG: Duration = Duration::from_secs(600);

fn connect(served: &Served, config: Config) -> Client {
    Client::connect(&served.path, &config).unwrap()
}

fn put(client: &Client, name: &str) {
    let subject = Subject::host();
    let memory = filled(&subject.driver, 4 * MIB, Some(2 * MIB), 7);
    client.put(&Put::new(name).part(PutPart::of("all", &memory).unwrap())).unwrap();
}

/// The reports of a client about its leases.
struct Notices(Receiver<Result<Restored, (Lost, usize)>>);

impl Notices {
    fn of(client: &Client) -> Self {
        let (restored, notices) = mpsc::channel();
        let lost = restored.clone();
        client.on_restored(move |_, notice| drop(restored.send(Ok(notice.clone()))));
        // A handler may make requests.
        client.on_lost(move |client, notice| {
            let listed = client.list("").map_or(0, |listed| listed.len());
            drop(lost.send(Err((notice.clone(), listed))));
        });
        Self(notices)
    }

    fn next(&self) -> Result<Restored, (Lost, usize)> {
        self.0.recv_timeout(LONG).unwrap()
    }
}

#[test]
fn client_over_given_socket_never_reconnects() {
    let broker = Broker::start(&Subject::host());
    let client = Client::over(Raw::dial(&broker.path).unwrap().0.into(), &Config::default()).unwrap();
    drop(broker);
    for _ in 0..2 {
        assert!(matches!(client.list("").unwrap_err(), Error::Peer(_)));
    }
}

/// Each connection that asks for a list ends.
#[test]
fn request_that_breaks_connections_ends() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("broker.sock");
    let listener = listening(&path, 8);
    let serving = thread::spawn(move || {
        for times in 0.. {
            let peer = Raw::over(accept(&listener).unwrap()).unwrap();
            loop {
                let answer = match peer.receive() {
                    Ok(Some((Message::Hello(_), _))) => Raw::hello(),
                    Ok(Some((Message::Resume(_), _))) => {
                        let instance = "0c2b6d3a-7f0e-4f3c-9d4b-000000000001".to_owned();
                        Message::Resumed(Resumed { instance, lost: Vec::new() })
                    }
                    Ok(Some((Message::Delete(_), _))) => {
                        peer.send(&Message::Done(vmmfd::wire::broker::Done {}), &[]).unwrap();
                        return times;
                    }
                    _ => break,
                };
                peer.send(&answer, &[]).unwrap();
            }
        }
        unreachable!()
    });
    let client = Client::connect(&path, &Config::default().timeout(A_WHILE)).unwrap();
    let error = client.list("").unwrap_err();
    assert!(matches!(error, Error::Peer(PeerError::Gone { .. })), "{error:?}");
    // The client remains usable.
    client.delete("a").unwrap();
    assert!(serving.join().unwrap() > 1);
}

#[test]
fn check_cannot_request_on_its_connection() {
    let served = Served::alone(&[]);
    let (tell, told) = mpsc::channel();
    let asking: Arc<Mutex<Option<Client>>> = Arc::default();
    let of_check = Arc::clone(&asking);
    let cancel = Cancel::new().unwrap().with_check(move || {
        if let Some(client) = of_check.lock().unwrap().take() {
            tell.send(client.list("")).unwrap();
        }
        false
    });
    let client = connect(&served, Config::default().timeout(LONG).cancel(&cancel));
    asking.lock().unwrap().replace(client.clone());
    let listing = served.while_stopped(|| {
        let listing = thread::spawn(move || client.list("").and(client.list("")));
        assert!(matches!(told.recv_timeout(LONG).unwrap(), Err(Error::Misuse { .. })));
        listing
    });
    listing.join().unwrap().unwrap();
}

/// Puts and leases of several records, while the server and the keeper are killed in turn. A name's versions never go back, and none is put
/// twice.
#[test]
fn long_puts_are_done_once_over_kills() {
    const SEGMENTS: usize = 300;
    let options = ["silence=1s", "resume=500ms"].map(|limit| format!("--time-limit={limit}"));
    let options = options.each_ref().map(String::as_str);
    let served = Served::with(Keeper::Own, &Subject::host(), &binary("vmmfd"), &options);
    let material = Material::of(&filled(&Subject::host().driver, 2 * MIB, None, 7)).repeated(SEGMENTS);
    let act = |name: &str| {
        let client = connect(&served, Config::default().timeout(LONG));
        for round in 0..6 {
            for version in 1..=3 {
                let put = Put::new(name).condition(Condition::Any).part(material.part());
                assert_eq!(client.put(&put).unwrap().version, version, "{name} in round {round}");
                let lease = client.get(&Get::new(name)).unwrap();
                assert_eq!(lease.version(), version);
                assert_eq!(lease.into_parts().remove(0).into_segments().unwrap().len(), SEGMENTS);
            }
            client.delete(name).unwrap();
        }
    };
    thread::scope(|scope| {
        let clients = ["a", "b", "c"].map(|name| scope.spawn(move || act(name)));
        for round in 0.. {
            if clients.iter().all(|client| client.is_finished()) {
                break;
            }
            if round % 4 == 3 {
                let keeper = served.keeper();
                kill(keeper, Signal::SIGKILL).unwrap();
                until(|| served.keeper() != keeper);
                // It is acknowledged once the next keeper holds everything.
                put(&connect(&served, Config::default().timeout(LONG)), &format!("keeper/{round}"));
            } else {
                served.kill_server();
            }
            thread::sleep(Duration::from_millis(20));
        }
    });
    let client = connect(&served, Config::default());
    assert!(client.list("").unwrap().iter().all(|object| object.name.starts_with("keeper/") && object.version == 1));
    client.list("").unwrap().iter().for_each(|object| client.delete(&object.name).unwrap());
    // Nothing else is held, at the latest after the time in which clients resume leases.
    until(|| served.kept(served.server()) == (0, 0));
}

#[test]
fn absent_broker_is_reported_until_back() {
    let options = ["--time-limit", "file=100ms"];
    let served = Served::with(Keeper::Own, &Subject::host(), &binary("vmmfd"), &options);
    let is_true = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&is_true);
    let cancel = Cancel::new().unwrap().with_check(move || seen.load(Ordering::Relaxed));
    let client = connect(&served, Config::default().timeout(A_WHILE));
    let idle = connect(&served, Config::default().timeout(A_WHILE).cancel(&cancel));
    put(&client, "a");
    let [(lease, notices), (other, others)] =
        [&client, &idle].map(|client| (client.get(&Get::new("a")).unwrap(), Notices::of(client)));
    // Only calls of the program are interrupted.
    is_true.store(true, Ordering::Relaxed);
    served.manager.stop(Signal::SIGKILL);
    fs::remove_file(&served.path).unwrap();
    let error = client.stat("a", None).unwrap_err();
    // An existing client waits for its timeout, unlike a new one.
    assert!(matches!(error, Error::Peer(PeerError::BrokerGone { waited: A_WHILE, .. })), "{error:?}");
    for notices in [&notices, &others] {
        let (lost, _) = notices.next().unwrap_err();
        assert!(matches!(lost.reason, LossReason::Unreachable), "{lost:?}");
    }
    assert!(!lease.is_held() && !other.is_held());
    served.manager.start_again();
    for (notices, lease) in [(notices, lease), (others, other)] {
        let restored = notices.next().unwrap();
        assert_eq!((restored.name.as_str(), restored.version, restored.rebuilt), ("a", 1, false));
        assert!(lease.is_held());
    }
}

/// The broker's processes die together. A client restores only an object that it holds as a whole.
#[test]
fn lease_of_lost_object_is_lost() {
    let subject = Subject::host();
    let served = Served::start(Keeper::Own, &subject);
    let client = connect(&served, Config::default().timeout(LONG));
    put(&client, "a");
    put(&client, "b");
    let object = client.get(&Get::new("a").range(0..MIB)).unwrap().open(&subject.driver, None).unwrap();
    let whole = client.get(&Get::new("b")).unwrap();
    let notices = Notices::of(&client);
    served.kill_both();
    served.manager.start_again();
    let mut both = [notices.next(), notices.next()];
    both.sort_by_key(Result::is_err);
    let [Ok(restored), Err((lost, listed))] = both else { panic!("{both:?}") };
    assert!(restored.rebuilt && restored.name == "b" && whole.is_held());
    assert!(matches!(lost.reason, LossReason::NotRestored(_)) && lost.name == "a", "{lost:?}");
    assert!(!object.is_held() && listed == 1);
    // The memory is still mapped.
    let mut byte = [0];
    object.part("all").unwrap().memory().unwrap().copy_out(0, &mut byte).unwrap();
    assert_eq!(byte, [7]);
}
