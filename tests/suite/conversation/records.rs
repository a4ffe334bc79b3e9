//! Single records of a channel, and the underlying sockets.

use super::*;

#[test]
fn last_error_of_gone_peer_arrives() {
    let failure = Failure { code: ErrorCode::Failed, message: "the last words".into() };
    // The peer closes with unread records from this side, so the kernel resets the connection.
    let (mut channel, peer) = channel_pair(PATIENCE);
    channel.send(&Message::Busy(Busy {}), &[]).unwrap();
    send_raw(&peer, &Message::Error(failure.clone()).encode().unwrap());
    drop(peer);
    // A child that another test starts has the peer's socket until it executes its program.
    let refused = std::iter::repeat_with(|| channel.send(&Message::Busy(Busy {}), &[])).find_map(Result::err).unwrap();
    assert!(
        matches!(&refused, Error::Peer(PeerError::Reported { message, .. }) if message == "the last words"),
        "{refused}"
    );

    let (mut channel, peer) = channel_pair(PATIENCE);
    channel.send(&Message::Busy(Busy {}), &[]).unwrap();
    send_raw(&peer, &Message::Error(failure).encode().unwrap());
    drop(peer);
    assert!(matches!(channel.receive("for a test"), Ok((Message::Error(_), _))));
    assert!(matches!(channel.receive("for a test"), Err(Error::Peer(PeerError::Gone { .. }))));
}

#[test]
fn full_backlog_ends_at_the_deadline() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let _listener = listening(&path, 0);
    let _waiting = raw(&path);
    let timeout = Duration::from_millis(100);
    let refused = vmmfd::channel::connect(&path, timeout, &Trust::default(), &Cancel::new().unwrap());
    assert!(matches!(refused, Err(Error::Socket(SocketError::NotAccepted { .. }))));
    // Another producer does not mistake it for a stale socket.
    let taken = Listener::bind(&path, &Config::default().timeout(timeout));
    assert!(matches!(taken, Err(Error::Socket(SocketError::AlreadyServed { .. }))));
}

#[test]
fn one_of_many_producers_serves() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    for _ in 0..20 {
        let results: Vec<_> = thread::scope(|scope| {
            let bind = || Listener::bind(&path, &Config::default().timeout(PATIENCE));
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(bind)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(results.iter().filter(|result| result.is_ok()).count(), 1);
        drop(results);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
