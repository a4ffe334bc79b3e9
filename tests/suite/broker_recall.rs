//! Recalls over restarts, and what they cost. `python/tests/test_recall.py` and `capi/tests/every_broker.c` have who acknowledges, and when the
//! memory is free.

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
