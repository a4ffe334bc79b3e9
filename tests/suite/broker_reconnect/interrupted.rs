//! Interrupted calls end nothing but themselves.

use std::{cell::Cell, time::Instant};

use nix::poll::{PollFd, PollFlags, poll};

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

/// Skips a second stop: the thread that wants a turn sends one, and the thread whose wait it pauses may send one too.
fn expect_get(peer: &Peer, number: usize) {
    let mut message = peer.next().0;
    if message == Message::Stop(Stop {}) {
        message = peer.next().0;
    }
    let Message::Get(get) = message else { panic!("no get, but {message:?}") };
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
    assert_eq!(tokens(other.resume().leases), [token(1)]);
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

/// A reader with a lease and two waits: the first one is paused for the second one, which is then interrupted. Returns the first one's call.
fn interrupted_after_pause(broker: &Scripted, interrupted: &Interrupted) -> (Reader, JoinHandle<vmmfd::Result<()>>) {
    let reader = Reader::with(broker, &Subject::host(), 1, true, interrupted.config());
    let first = Interrupted::wait(&reader.client, 1);
    expect_get(&reader.peer, 1);
    let second = Interrupted::wait(&reader.client, 2);
    expect_stop(&reader.peer);
    reader.peer.refuse(RefusalCode::Stopped);
    expect_get(&reader.peer, 2);
    interrupted.interrupt(2, second);
    (reader, first)
}

#[test]
fn paused_wait_follows_to_the_next_connection() {
    let (broker, interrupted) = (Scripted::new(), Interrupted::default());
    let (reader, first) = interrupted_after_pause(&broker, &interrupted);
    let other = resuming(&broker, &mut Vec::new()).unwrap();
    other.take_up(FIRST, &[], false);
    expect_get(&other, 1);
    other.refuse(RefusalCode::Absent);
    assert_eq!(refused(first.join().unwrap()).0, RefusalCode::Absent);
    assert!(reader.leases[0].is_held());
}

/// The broker may have moved the leases to the new connection already, and would close them with it.
#[test]
fn interrupted_resume_ends_no_lease() {
    assert!((0..10).any(|_| second_interrupt_ends_no_lease()));
}

/// Returns false if the background thread was faster than the call, whose resume is to be interrupted.
fn second_interrupt_ends_no_lease() -> bool {
    let (broker, interrupted) = (Scripted::new(), Interrupted::default());
    let (reader, first) = interrupted_after_pause(&broker, &interrupted);
    let mut attempts = Vec::new();
    let other = resuming(&broker, &mut attempts).unwrap();
    assert_eq!(tokens(other.resume().leases), [token(1)]);
    interrupted.interrupt(1, first);
    let Some(last) = resuming(&broker, &mut attempts) else { return false };
    assert_eq!(tokens(last.resume().leases), [token(1)]);
    for peer in [&reader.peer, &other] {
        assert_ne!(peeked(peer), Ok(0), "the connection is still open");
    }
    last.resumed(FIRST, &[]);
    last.resume();
    last.resumed(FIRST, &[]);
    for peer in [&reader.peer, &other] {
        while peer.0.receive().unwrap().is_some() {}
    }
    assert!(reader.leases[0].is_held() && reader.notices.try_recv().is_err());
    true
}

/// Returns the size of the next record, at most 8, or 0 for the end of the connection.
fn peeked(peer: &Peer) -> rustix::io::Result<usize> {
    let flags = rustix::net::RecvFlags::DONTWAIT | rustix::net::RecvFlags::PEEK;
    rustix::net::recv(&peer.0, &mut [0; 8][..], flags).map(|(_, size)| size)
}

/// Accepts attempts to reconnect until one resumes: a call and the background thread may both connect. Returns `None` if none does.
fn resuming(broker: &Scripted, attempts: &mut Vec<Peer>) -> Option<Peer> {
    let deadline = Instant::now() + Duration::from_secs(2);
    while Instant::now() < deadline {
        if let Some(found) = attempts.iter().position(|peer| peeked(peer).is_ok_and(|size| size > 0)) {
            return Some(attempts.swap_remove(found));
        }
        let mut polled = [PollFd::new(broker.listener.as_fd(), PollFlags::POLLIN)];
        if poll(&mut polled, 5u16).unwrap() > 0 {
            attempts.push(broker.greet(FIRST));
        }
    }
    None
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
