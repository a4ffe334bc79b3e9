use std::{fs::File, os::fd::OwnedFd};

use super::*;
use crate::{
    channel::Channel,
    error::{CancelReason, PeerError},
};

const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(20);

/// A record socket, and the peer's plain socket.
fn pair(timeout: Duration) -> (RecordSocket, OwnedFd, Cancel) {
    let (own, other) = Channel::socket_pair().unwrap();
    let cancel = Cancel::new().unwrap();
    (RecordSocket::new(own, timeout, &cancel).unwrap(), other, cancel)
}

fn write(socket: &OwnedFd, record: &[u8]) {
    rustix::net::send(socket, record, SendFlags::NOSIGNAL).unwrap();
}

fn receive(socket: &RecordSocket) -> Result<Vec<u8>> {
    let mut bytes = [0; 9];
    let record = socket.receive(&mut bytes, "for a test")?;
    Ok(bytes[..record.length].to_vec())
}

#[test]
fn records_before_a_reset_are_received() {
    let (socket, other, _) = pair(LONG);
    // Closing a socket with unread records resets the connection.
    socket.send("a record", b"unread", &[]).unwrap();
    write(&other, b"one");
    write(&other, b"two");
    drop(other);
    assert_eq!(receive(&socket).unwrap(), b"one");
    assert_eq!(receive(&socket).unwrap(), b"two");
    assert!(matches!(receive(&socket), Err(Error::Peer(PeerError::Gone { purpose: "for a test", .. }))));
    assert!(matches!(
        socket.send("a record", b"late", &[]),
        Err(Error::Peer(PeerError::Gone { purpose: "to send", .. }))
    ));
}

#[test]
fn records_are_not_truncated() {
    let (socket, other, _) = pair(LONG);
    write(&other, b"12345678");
    write(&other, b"123456789");
    write(&other, b"1234567890");
    write(&other, b"next");
    assert_eq!(receive(&socket).unwrap(), b"12345678");
    for _ in 0..2 {
        let long = receive(&socket);
        assert!(
            matches!(long, Err(Error::Peer(PeerError::Protocol(ProtocolError::LongRecord { most: 8 })))),
            "{long:?}"
        );
    }
    assert_eq!(receive(&socket).unwrap(), b"next");
    write(&other, b"");
    assert!(matches!(receive(&socket), Err(Error::Peer(PeerError::Gone { .. }))), "an empty record counts as a close");
}

#[test]
fn descriptors_are_close_on_exec_duplicates() {
    let (socket, other, cancel) = pair(LONG);
    let file = File::open("/dev/null").unwrap();
    let other = RecordSocket::blocking(other, &cancel);
    other.send("a record", b"x", &[file.as_fd(), file.as_fd()]).unwrap();
    let mut bytes = [0; 2];
    let record = socket.receive(&mut bytes, "for a test").unwrap();
    assert_eq!((record.length, record.fds.len()), (1, 2));
    for fd in &record.fds {
        let flags = rustix::io::fcntl_getfd(fd).unwrap();
        assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
    }
    file.metadata().unwrap();
    // The descriptors of a record that is too long are closed.
    let (reader, writer) = io::pipe().unwrap();
    other.send("a record", b"xyz", &[writer.as_fd()]).unwrap();
    drop(writer);
    assert!(socket.receive(&mut bytes, "for a test").is_err());
    assert_eq!(io::read_to_string(reader).unwrap(), "", "a received descriptor is still open");
}

#[test]
fn peeking_leaves_descriptors() {
    let file = File::open("/dev/null").unwrap();
    for count in [0, 1, 4, 5, 20] {
        let (socket, other, _) = pair(LONG);
        socket.send("a record", b"x", &vec![file.as_fd(); count]).unwrap();
        assert_eq!([has_descriptors(&other), has_descriptors(&other)], [count > 0; 2], "{count}");
        sockopt::set_socket_passcred(&other, true).unwrap();
        assert_eq!(peek(&other).unwrap(), Next::Record { descriptors: count > 0, sender: None }, "{count}");
    }
}

#[test]
fn waits_respect_the_deadline() {
    let (socket, _other, _) = pair(SHORT);
    let late = receive(&socket);
    assert!(matches!(late, Err(Error::Peer(PeerError::Timeout { purpose: "for a test", waited: SHORT }))), "{late:?}");
    // Until the peer's queue is full.
    let late = (0..1_000_000).find_map(|_| socket.send("a record", &[0; 1024], &[]).err());
    assert!(matches!(late, Some(Error::Peer(PeerError::Timeout { purpose: "to send", waited: SHORT }))), "{late:?}");
}

#[test]
fn cancellation_interrupts_all_waits() {
    let (socket, other, cancel) = pair(LONG);
    write(&other, b"queued");
    thread::scope(|scope| {
        scope.spawn(|| cancel.cancel(CancelReason::Signal(15)));
        while cancel.check().is_ok() {
            thread::yield_now();
        }
        assert!(matches!(receive(&socket), Err(Error::Interrupted { reason: CancelReason::Signal(15) })));
    });
    let full = (0..1_000_000).find_map(|_| socket.send("a record", &[0; 1024], &[]).err());
    assert!(matches!(full, Some(Error::Interrupted { reason: CancelReason::Signal(15) })), "{full:?}");
    assert!(!socket.drain_until(&mut [0; 2], Instant::now() + LONG), "the peer has not closed the connection");
}

#[test]
fn draining_stops_at_close_or_deadline() {
    let (socket, other, _) = pair(LONG);
    write(&other, b"unread");
    assert!(!socket.drain_until(&mut [0; 9], Instant::now() + SHORT));
    write(&other, b"unread");
    drop(other);
    assert!(socket.drain_until(&mut [0; 9], Instant::now() + LONG));
}

#[test]
fn blocking_socket_waits_in_receive() {
    let (socket, other, cancel) = pair(SHORT);
    let other = RecordSocket::blocking(other, &cancel);
    let received = thread::scope(|scope| {
        let receiver = scope.spawn(|| receive(&other));
        // Longer than a socket with a timeout would wait.
        thread::sleep(SHORT * 2);
        socket.send("a record", b"late", &[]).unwrap();
        receiver.join().unwrap()
    });
    assert_eq!(received.unwrap(), b"late");
    drop(socket);
    assert!(matches!(receive(&other), Err(Error::Peer(PeerError::Gone { .. }))));
}
