//! Interrupted calls end nothing but themselves.

use std::{cell::Cell, iter};

use super::*;

thread_local!(static NUMBER: Cell<usize> = const { Cell::new(0) });

/// The calls that are interrupted: those of the thread with this number.
#[derive(Clone, Default)]
struct Interrupted(Arc<AtomicUsize>);

impl Interrupted {
    fn config(&self) -> Config {
        let interrupted = Arc::clone(&self.0);
        let check = move || NUMBER.get() != 0 && NUMBER.get() == interrupted.load(Ordering::Relaxed);
        Config::default().timeout(PATIENCE).cancel(&Cancel::new().unwrap().with_check(check))
    }

    /// Waits for an object, on the thread with this number.
    fn wait(client: &Client, number: usize) -> JoinHandle<vmmfd::Result<()>> {
        ask(client, move |client| {
            NUMBER.set(number);
            client.get(&Get::new(format!("object{number}")).wait(2 * PATIENCE)).map(drop)
        })
    }

    fn interrupt(&self, number: usize, call: JoinHandle<vmmfd::Result<()>>) {
        self.0.store(number, Ordering::Relaxed);
        assert!(matches!(call.join().unwrap(), Err(Error::Interrupted { .. })));
    }
}

fn expect_get(peer: &Peer, number: usize) {
    let Message::Get(get) = peer.next().0 else { panic!("no get") };
    assert_eq!(get.objects[0].name, format!("object{number}"));
}

fn expect_stop(peer: &Peer) {
    assert_eq!(peer.next().0, Message::Stop(Stop {}));
}

#[test]
fn interrupted_wait_is_stopped() {
    let (broker, interrupted) = (Scripted::new(), Interrupted::default());
    let reader = Reader::with(&broker, &Subject::host(), 1, true, interrupted.config());
    let call = Interrupted::wait(&reader.client, 1);
    expect_get(&reader.peer, 1);
    interrupted.0.store(1, Ordering::Relaxed);
    expect_stop(&reader.peer);
    reader.peer.refuse(RefusalCode::Stopped);
    interrupted.interrupt(1, call);
    // The connection is used further.
    let listing = ask(&reader.client, |client| client.list(""));
    assert!(matches!(reader.peer.next().0, Message::List(_)));
    reader.peer.say(&Message::Objects(Objects { objects: Vec::new(), more: false }));
    listing.join().unwrap().unwrap();
    assert!(reader.leases[0].is_held());
}

/// The broker closes a connection's leases with it, so they move first.
#[test]
fn leases_move_from_a_stuck_connection() {
    let (broker, interrupted) = (Scripted::new(), Interrupted::default());
    let reader = Reader::with(&broker, &Subject::host(), 1, true, interrupted.config());
    let call = Interrupted::wait(&reader.client, 1);
    expect_get(&reader.peer, 1);
    interrupted.interrupt(1, call);
    let other = broker.greet(FIRST);
    assert_eq!(other.resume().leases, [token(1)]);
    expect_stop(&reader.peer);
    let open = rustix::net::RecvFlags::DONTWAIT;
    assert!(rustix::net::recv(&reader.peer.0, &mut [0; 8][..], open).is_err(), "the first connection is still open");
    assert!(reader.leases[0].is_held());
    other.resumed(FIRST, &[]);
    other.resume();
    other.resumed(FIRST, &[]);
    // It closes, and no handler is called.
    assert!(reader.peer.0.receive().unwrap().is_none());
    assert!(reader.leases[0].is_held() && reader.notices.try_recv().is_err());
}

#[test]
fn paused_wait_follows_to_the_next_connection() {
    let (broker, interrupted) = (Scripted::new(), Interrupted::default());
    let reader = Reader::with(&broker, &Subject::host(), 1, true, interrupted.config());
    let first = Interrupted::wait(&reader.client, 1);
    expect_get(&reader.peer, 1);
    let second = Interrupted::wait(&reader.client, 2);
    expect_stop(&reader.peer);
    reader.peer.refuse(RefusalCode::Stopped);
    expect_get(&reader.peer, 2);
    interrupted.interrupt(2, second);
    // The background thread drops its connection if the waiting call reconnects first.
    let other = iter::repeat_with(|| broker.greet(FIRST)).find(|other| match other.0.receive().unwrap() {
        Some((Message::Resume(resume), _)) => resume.leases == [token(1)],
        Some((other, _)) => panic!("{other:?}"),
        None => false,
    });
    let other = other.unwrap();
    other.resumed(FIRST, &[]);
    other.resume();
    other.resumed(FIRST, &[]);
    expect_get(&other, 1);
    other.refuse(RefusalCode::Absent);
    assert_eq!(refused(first.join().unwrap()).0, RefusalCode::Absent);
    assert!(reader.leases[0].is_held());
}

#[test]
fn wait_for_a_turn_is_interrupted() {
    let (broker, interrupted) = (Scripted::new(), Interrupted::default());
    let (client, peer) = broker.client_with(interrupted.config());
    // It can't be paused.
    let listing = ask(&client, |client| client.list(""));
    assert!(matches!(peer.next().0, Message::List(_)));
    let call = Interrupted::wait(&client, 1);
    interrupted.interrupt(1, call);
    peer.say(&Message::Objects(Objects { objects: Vec::new(), more: false }));
    listing.join().unwrap().unwrap();
}
