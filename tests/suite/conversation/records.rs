//! Single records of a channel, and the underlying sockets.

use super::*;

const SENT: &[u8] = b"VMFD\x01\x00\x04\x00";

fn segments(sizes: usize, claimed: u32) -> Vec<u8> {
    let body = serde_json::to_vec(&Segments { first: 0, sizes: vec![1; sizes] }).unwrap();
    [SENT, &(body.len() as u32).to_le_bytes(), &claimed.to_le_bytes(), &body].concat()
}

#[test]
fn wrong_descriptor_counts_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sent");
    let file = File::create(&path).unwrap();
    for (sizes, claimed, sent) in [(1, 1, 0), (1, 1, 2), (2, 2, 1), (1, 2, 1), (1, 0, 0), (3, 3, MAX_FDS)] {
        let (mut channel, peer) = channel_pair(PATIENCE);
        let fds: Vec<RawFd> = vec![file.as_raw_fd(); sent];
        peer.send_with_fd(&segments(sizes, claimed), &fds).unwrap();
        let refused = channel.receive("for a test").unwrap_err();
        let expected = ProtocolError::FdCount { kind: "segments", want: sizes, claimed, got: sent };
        assert!(matches!(&refused, Error::Peer(PeerError::Protocol(error)) if *error == expected), "{refused}");
        assert_eq!(open_descriptors(&path), 1, "{sizes} {claimed} {sent}");
    }
    // A message without descriptors: the unexpected descriptors are closed too.
    let (mut channel, peer) = channel_pair(PATIENCE);
    peer.send_with_fd(&Message::Busy(Busy {}).encode().unwrap(), &[file.as_raw_fd()]).unwrap();
    assert!(matches!(
        channel.receive("for a test"),
        Err(Error::Peer(PeerError::Protocol(ProtocolError::FdCount { want: 0, .. })))
    ));
    assert_eq!(open_descriptors(&path), 1);
}

#[test]
fn send_checks_the_descriptor_count() {
    let (mut channel, peer) = channel_pair(PATIENCE);
    let message = Message::Segments(Segments { first: 0, sizes: vec![1] });
    assert!(matches!(
        channel.send(&message, &[]),
        Err(Error::Peer(PeerError::Protocol(ProtocolError::FdCount { got: 0, .. })))
    ));
    peer.set_nonblocking(true).unwrap();
    assert_eq!(
        rustix::net::recv(&peer, &mut [0u8; 9][..], rustix::net::RecvFlags::empty()).unwrap_err(),
        rustix::io::Errno::AGAIN
    );
}

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
