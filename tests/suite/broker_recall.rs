//! Recalls: which holders acknowledge, and when the memory is free.

use vmmfd::broker::RecallOf;

use crate::support::prelude::*;

const MIB: u64 = 1 << 20;

/// Longer than any recall takes that every holder acknowledges.
const LONG: Duration = Duration::from_secs(600);

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

#[test]
fn result_names_silent_holders() {
    let subject = Subject::host();
    let broker = Broker::start(&subject);
    let owner = broker.client();
    put(&owner, &subject);
    for _ in 0..5 {
        let lease = lease(&broker.client());
        let recalled = recalled(&lease);
        thread::spawn(move || {
            recalled.recv().unwrap();
            drop(lease);
        });
    }
    // One reader reads nothing, and another one dies meanwhile.
    let [silent, dying] = [(); 2].map(|()| Raw::greeted(&broker.path).unwrap());
    [&silent, &dying].iter().for_each(|raw| drop(raw.lease("w")));
    owner.delete("w").unwrap();
    let watcher = broker.client();
    let dies = thread::spawn(move || {
        until(|| watcher.who("w").unwrap().leases.len() == 2);
        drop(dying);
    });
    let (begun, within) = (Instant::now(), Duration::from_secs(2));
    let result = owner.recall("w", RecallOf::Current, within).unwrap();
    dies.join().unwrap();
    // Only the deadline ended the recall, and it is no acknowledgement.
    assert!(begun.elapsed() >= within && !result.is_complete() && !result.free && !result.kept, "{result:?}");
    assert_eq!(result.holders.iter().filter(|of| of.acknowledged).count(), 6);
    assert!(result.holders.iter().all(|of| of.lease.size == 2 * MIB && of.lease.recalled), "{result:?}");
    drop(silent);
    until(|| owner.who("w").map_or(0, |held| held.leases.len()) == 0);
    assert_eq!(owner.metrics().unwrap().versions, 0);
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
