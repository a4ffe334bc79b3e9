//! Each side against a peer made by hand: one that dies, dawdles, lies or speaks something else.

#![allow(unsafe_code, reason = "descriptors as numbers")]

use std::{
    fs::{self, File},
    io::IoSlice,
    mem::MaybeUninit,
    net::Shutdown,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
        unix::net::UnixStream,
    },
    path::Path,
    thread,
    time::{Duration, Instant},
};

use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
    accept_with, bind, connect, listen, socket_with, socketpair,
};
use sendfd::SendWithFd;
use vmmfd::{
    Error,
    channel::{Cancel, CancelReason, Channel, Listener, Trust},
    driver::{Access, Backend, Choice, DeviceUuid, open},
    error::{DeviceError, PeerError, SocketError},
    memory::{Allocation, Device, Selector},
    session::{
        self, Config, Verdict,
        handoff::{Findings, fetch},
    },
    wire::{
        Busy, ErrorCode, Failure, Hello, Location, MAX_FDS, Mechanism, Memory, Message, Offer, Part, Pointer,
        ProtocolError, Received, Request, Segments,
    },
};
use vmmfd_cli::check::{
    DataVerifier, Figures,
    figures::Claim,
    pattern::{self, Mismatch, Pattern},
};

use crate::running::{Meeting, On};

pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

pub(crate) fn seqpacket() -> OwnedFd {
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
}

/// A connection to whoever listens at a path, as any process can make it.
fn raw(path: &Path) -> UnixStream {
    let socket = seqpacket();
    connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    UnixStream::from(socket)
}

pub(crate) fn dial(path: &Path) -> Channel {
    Channel::new(raw(path).into(), PATIENCE, &Cancel::new().unwrap()).unwrap()
}

/// A channel, and the naked other end of it.
fn channel_pair(timeout: Duration) -> (Channel, UnixStream) {
    let (a, b) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    (Channel::new(a, timeout, &Cancel::new().unwrap()).unwrap(), UnixStream::from(b))
}

fn send_raw(socket: &UnixStream, bytes: &[u8]) {
    rustix::net::send(socket, bytes, SendFlags::NOSIGNAL).unwrap();
}

pub(crate) fn hello(backend: Backend) -> Message {
    let capabilities = vec!["from the future".into()];
    Message::Hello(Hello { version: 1, capabilities, backend: backend.to_string(), pid: 1, timeout_ms: 20_000 })
}

pub(crate) fn request(object: &str, access: Option<Access>) -> Message {
    Message::Request(Request { object: object.into(), access, range: None })
}

/// A result with figures.
fn result(verified: bool, words: u64, mismatches: u64, first_mismatch: Option<Mismatch>) -> Message {
    Message::Result(Figures { words, mismatches, first_mismatch, digest: None }.verdict(verified))
}

fn good(words: u64) -> Message {
    result(true, words, 0, None)
}

fn claim(offer: &Offer) -> Claim {
    Claim::read(offer.check.as_ref()).unwrap()
}

/// The next message that is no sign of life.
pub(crate) fn answer(channel: &mut Channel) -> (Message, Vec<OwnedFd>) {
    loop {
        match channel.receive("for an answer").unwrap() {
            (Message::Busy(_), _) => {}
            answer => return answer,
        }
    }
}

pub(crate) fn told(channel: &mut Channel) -> ErrorCode {
    match answer(channel) {
        (Message::Error(failure), _) => failure.code,
        (other, _) => panic!("{other:?}"),
    }
}

/// How many descriptors of this process are of that file.
pub(crate) fn open_descriptors(path: &Path) -> usize {
    let links = fs::read_dir("/proc/self/fd").unwrap().filter_map(|entry| fs::read_link(entry.unwrap().path()).ok());
    links.filter(|link| link == path).count()
}

mod records {
    use super::*;

    const SENT: &[u8] = b"VMFD\x01\x00\x04\x00";

    fn segments(sizes: usize, claimed: u32) -> Vec<u8> {
        let body = serde_json::to_vec(&Segments { first: 0, sizes: vec![1; sizes] }).unwrap();
        [SENT, &(body.len() as u32).to_le_bytes(), &claimed.to_le_bytes(), &body].concat()
    }

    #[test]
    fn descriptors_arrive_in_order_and_closed_on_exec() {
        let folder = tempfile::tempdir().unwrap();
        for count in [1, 2, MAX_FDS] {
            let (mut channel, peer) = channel_pair(PATIENCE);
            let mut sender = Channel::new(peer.into(), PATIENCE, &Cancel::new().unwrap()).unwrap();
            let files: Vec<File> =
                (0..count).map(|index| File::create(folder.path().join(index.to_string())).unwrap()).collect();
            let fds: Vec<BorrowedFd<'_>> = files.iter().map(AsFd::as_fd).collect();
            let sent = Message::Segments(Segments { first: 0, sizes: vec![4096; count] });
            sender.send(&sent, &fds).unwrap();
            let (message, received) = channel.receive("for a test").unwrap();
            assert_eq!((message, received.len()), (sent, count));
            for (index, fd) in received.iter().enumerate() {
                let link = fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).unwrap();
                assert_eq!(link, folder.path().join(index.to_string()));
                let flags = nix::fcntl::fcntl(fd, nix::fcntl::FcntlArg::F_GETFD).unwrap();
                assert_eq!(flags & nix::libc::FD_CLOEXEC, nix::libc::FD_CLOEXEC);
            }
        }
    }

    #[test]
    fn too_many_and_too_few_descriptors_are_refused_and_closed() {
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
        // Those beside a message that has none are closed too.
        let (mut channel, peer) = channel_pair(PATIENCE);
        peer.send_with_fd(&Message::Busy(Busy {}).encode().unwrap(), &[file.as_raw_fd()]).unwrap();
        assert!(matches!(
            channel.receive("for a test"),
            Err(Error::Peer(PeerError::Protocol(ProtocolError::FdCount { want: 0, .. })))
        ));
        assert_eq!(open_descriptors(&path), 1);
    }

    #[test]
    fn what_is_to_be_sent_with_another_number_of_descriptors_is_not_sent() {
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
    fn an_empty_record_is_a_hang_up_and_its_descriptor_is_closed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sent");
        let file = File::create(&path).unwrap();
        let (mut channel, peer) = channel_pair(PATIENCE);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let fds = [file.as_fd()];
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(&fds)));
        rustix::net::sendmsg(&peer, &[IoSlice::new(&[])], &mut ancillary, SendFlags::NOSIGNAL).unwrap();
        assert!(matches!(channel.receive("for a test"), Err(Error::Peer(PeerError::Gone { .. }))));
        assert_eq!(open_descriptors(&path), 1);
    }

    #[test]
    fn a_record_that_is_too_long_is_refused_and_the_next_one_is_whole() {
        let (mut channel, peer) = channel_pair(PATIENCE);
        for length in [16 + 64 * 1024 + 1, 16 + 64 * 1024 + 4096] {
            send_raw(&peer, &vec![b'x'; length]);
            assert!(matches!(
                channel.receive("for a test"),
                Err(Error::Peer(PeerError::Protocol(ProtocolError::LongRecord { .. })))
            ));
        }
        send_raw(&peer, &Message::Received(Received { segments: 1 }).encode().unwrap());
        assert!(matches!(channel.receive("for a test"), Ok((Message::Received(_), _))));
    }

    #[test]
    fn silence_ends_at_the_deadline() {
        let (mut channel, _peer) = channel_pair(Duration::from_millis(50));
        let begun = Instant::now();
        assert!(matches!(
            channel.receive("for a test"),
            Err(Error::Peer(PeerError::Timeout { purpose: "for a test", .. }))
        ));
        assert!(begun.elapsed() >= Duration::from_millis(50));
    }

    #[test]
    fn a_full_queue_ends_at_the_deadline_too() {
        let (mut channel, _peer) = channel_pair(Duration::from_millis(50));
        let refused = (0..100_000).find_map(|_| channel.send(&Message::Busy(Busy {}), &[]).err());
        assert!(matches!(refused, Some(Error::Peer(PeerError::Timeout { purpose: "to send", .. }))), "{refused:?}");
    }

    #[test]
    fn a_wait_can_be_cancelled_from_another_thread() {
        let (a, _b) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        let cancel = Cancel::new().unwrap();
        let mut channel = Channel::new(a, PATIENCE, &cancel).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(Duration::from_millis(20));
                cancel.cancel(CancelReason::Signal(2));
                cancel.cancel(CancelReason::Signal(15));
            });
            assert!(matches!(
                channel.receive("for a test"),
                Err(Error::Interrupted { reason: CancelReason::Signal(2) })
            ));
        });
    }

    #[test]
    fn the_last_error_of_a_peer_who_is_gone_is_heard() {
        let failure = Failure { code: ErrorCode::Failed, message: "the last words".into() };
        // It closes with records of this side unread: the connection is reset.
        let (mut channel, peer) = channel_pair(PATIENCE);
        channel.send(&Message::Busy(Busy {}), &[]).unwrap();
        send_raw(&peer, &Message::Error(failure.clone()).encode().unwrap());
        drop(peer);
        let refused = channel.send(&Message::Busy(Busy {}), &[]).unwrap_err();
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
    fn a_backlog_that_is_full_does_not_block_for_ever() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let listener = seqpacket();
        bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        listen(&listener, 0).unwrap();
        let _waiting = raw(&path);
        let timeout = Duration::from_millis(100);
        let refused = vmmfd::channel::connect(&path, timeout, &Trust::default(), &Cancel::new().unwrap());
        assert!(matches!(refused, Err(Error::Socket(SocketError::NotAccepted { .. }))));
        // Nor does it look dead to another producer.
        let taken = Listener::bind(&path, false, timeout, &Cancel::new().unwrap());
        assert!(matches!(taken, Err(Error::Socket(SocketError::AlreadyServed { .. }))));
    }

    #[test]
    fn of_many_producers_that_start_at_once_one_serves() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        for _ in 0..20 {
            let results: Vec<_> = thread::scope(|scope| {
                let bind = || Listener::bind(&path, false, PATIENCE, &Cancel::new().unwrap());
                let threads: Vec<_> = (0..4).map(|_| scope.spawn(bind)).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            assert_eq!(results.iter().filter(|result| result.is_ok()).count(), 1);
            drop(results);
            assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        }
    }
}

mod producers {
    use super::*;

    #[test]
    fn a_reply_that_was_not_written_makes_both_sides_fail() {
        let meeting = Meeting::new(On::Host);
        let producer = meeting.listening(&["--round-trip", "--size", "4"]);
        let mut channel = dial(&meeting.socket());
        borrow(&mut channel, None);
        channel.send(&good(1), &[]).unwrap();
        let (Message::Result(theirs), _) = answer(&mut channel) else { panic!() };
        assert_eq!((theirs.verified, Figures::of(&theirs).mismatches), (false, 1));
        channel.finish(PATIENCE);
        producer.end().code(1);
    }

    /// A conversation up to the descriptor, which is let go.
    fn borrow(channel: &mut Channel, access: Option<Access>) -> Offer {
        channel.send(&hello(Backend::Host), &[]).unwrap();
        answer(channel);
        channel.send(&request("default", access), &[]).unwrap();
        let (Message::Offer(offer), _) = answer(channel) else { panic!() };
        answer(channel);
        channel.send(&Message::Received(Received { segments: 1 }), &[]).unwrap();
        *offer
    }

    #[test]
    fn a_consumer_that_finds_a_mismatch_makes_the_producer_fail() {
        let meeting = Meeting::new(On::Host);
        let producer = meeting.listening(&["--size", "8"]);
        let mut channel = dial(&meeting.socket());
        borrow(&mut channel, None);
        let first_mismatch = Some(Mismatch { index: 1, expected: 2, found: 3 });
        channel.send(&result(false, 2, 1, first_mismatch), &[]).unwrap();
        let (Message::Result(theirs), _) = answer(&mut channel) else { panic!() };
        assert!(!theirs.verified);
        channel.finish(PATIENCE);
        producer.end().code(1).says("1 wrong, the first at word 1");
    }

    #[test]
    fn a_consumer_that_dies_at_any_point_is_one_failed_consumer() {
        for stage in 0..3 {
            let meeting = Meeting::new(On::Host);
            let producer = meeting.listening(&["--consumers", "2", "--round-trip"]);
            let mut channel = dial(&meeting.socket());
            channel.send(&hello(Backend::Host), &[]).unwrap();
            answer(&mut channel);
            channel.send(&request("default", None), &[]).unwrap();
            if stage > 0 {
                answer(&mut channel);
                answer(&mut channel);
            }
            if stage > 1 {
                channel.send(&Message::Received(Received { segments: 1 }), &[]).unwrap();
            }
            drop(channel);
            // The next one finds the buffer filled again.
            meeting.consumer(&[]).end().code(0);
            producer.end().code(4).says("hung up");
        }
    }

    #[test]
    fn a_consumer_that_says_nothing_more_fails_at_the_deadline_and_delays_nobody() {
        let meeting = Meeting::new(On::Host);
        let producer = meeting.listening(&["--consumers", "2", "--timeout", "5s"]);
        let mut silent = dial(&meeting.socket());
        borrow(&mut silent, None);
        meeting.consumer(&[]).end().code(0);
        let ended = producer.end();
        ended.code(4).says("silent for 5s");
        assert_eq!(told(&mut silent), ErrorCode::Timeout);
    }

    #[test]
    fn a_busy_consumer_is_waited_for() {
        let meeting = Meeting::new(On::Host);
        let producer = meeting.listening(&["--timeout", "4s", "--size", "4"]);
        let mut channel = dial(&meeting.socket());
        borrow(&mut channel, None);
        for _ in 0..5 {
            thread::sleep(Duration::from_secs(1));
            channel.send(&Message::Busy(Busy {}), &[]).unwrap();
        }
        channel.send(&good(1), &[]).unwrap();
        assert!(matches!(answer(&mut channel), (Message::Result(_), _)));
        channel.finish(PATIENCE);
        producer.end().code(0);
    }

    #[test]
    fn whoever_waits_for_a_turn_is_told_once_a_second() {
        let meeting = Meeting::new(On::Host);
        let producer = meeting.listening(&["--consumers", "2", "--round-trip", "--size", "4"]);
        let mut first = dial(&meeting.socket());
        let offer = borrow(&mut first, None);
        let mut second = dial(&meeting.socket());
        second.send(&hello(Backend::Host), &[]).unwrap();
        answer(&mut second);
        second.send(&request("default", None), &[]).unwrap();
        let begun = Instant::now();
        for _ in 0..2 {
            assert!(matches!(second.receive("for busy"), Ok((Message::Busy(_), _))));
        }
        assert!((1..10).contains(&begun.elapsed().as_secs()), "{:?}", begun.elapsed());
        // When the first gives up, it is the second's turn.
        drop(first);
        let (Message::Offer(next), _) = answer(&mut second) else { panic!() };
        assert_ne!(claim(&next).reply_salt, claim(&offer).reply_salt);
        drop(second);
        producer.end().code(4);
    }

    #[test]
    fn idle_connections_delay_no_consumer_and_change_nothing() {
        let meeting = Meeting::new(On::Host);
        let producer = meeting.listening(&[]);
        let socket = meeting.socket();
        // Silent, gone, garbled, of another protocol, and hello without a request.
        let _silent: Vec<UnixStream> = (0..10).map(|_| raw(&socket)).collect();
        drop(raw(&socket));
        let garbled = raw(&socket);
        send_raw(&garbled, b"GET / HTTP/1.1\r\n\r\n");
        let mut garbled = Channel::new(garbled.into(), PATIENCE, &Cancel::new().unwrap()).unwrap();
        assert_eq!(told(&mut garbled), ErrorCode::Protocol);
        let newer = raw(&socket);
        send_raw(&newer, b"VMFD\x09\x00\x01\x00\x02\x00\x00\x00\x00\x00\x00\x00{}");
        let mut newer = Channel::new(newer.into(), PATIENCE, &Cancel::new().unwrap()).unwrap();
        assert_eq!(told(&mut newer), ErrorCode::Version);
        let mut early = dial(&socket);
        early.send(&request("default", None), &[]).unwrap();
        assert_eq!(told(&mut early), ErrorCode::Protocol);
        let mut polite = dial(&socket);
        polite.send(&hello(Backend::Host), &[]).unwrap();
        answer(&mut polite);
        let with_fd = raw(&socket);
        let null = File::open("/dev/null").unwrap();
        with_fd.send_with_fd(b"x", &[null.as_raw_fd()]).unwrap();
        drop(with_fd);
        let half = raw(&socket);
        half.shutdown(Shutdown::Write).unwrap();

        meeting.consumer(&[]).end().code(0);
        let ended = producer.end();
        assert!(ended.code(0).took < Duration::from_secs(20));
        assert_eq!(ended.stderr, "");
    }

    #[test]
    fn a_crowd_of_idle_connections_leaves_room_for_a_consumer() {
        let meeting = Meeting::new(On::Host);
        let producer = meeting.listening(&[]);
        let crowd: Vec<UnixStream> = (0..300).map(|_| raw(&meeting.socket())).collect();
        meeting.consumer(&[]).end().code(0);
        producer.end().code(0);
        drop(crowd);
    }

    #[test]
    fn a_crowd_that_takes_all_descriptors_leaves_room_for_a_consumer() {
        let meeting = Meeting::new(On::Host);
        let run = meeting.producer(&["--timeout", "20s"]).with_files(48);
        let mut producer = run.start();
        producer.until("listen");
        let silent: Vec<UnixStream> = (0..60).map(|_| raw(&meeting.socket())).collect();
        let garbled: Vec<UnixStream> = (0..60)
            .map(|_| {
                let socket = raw(&meeting.socket());
                // It may have been sent away already.
                let _ = rustix::net::send(&socket, b"GET / HTTP/1.1", SendFlags::NOSIGNAL);
                socket
            })
            .collect();
        meeting.consumer(&["--timeout", "10s"]).end().code(0);
        producer.end().code(0);
        drop((silent, garbled));
    }

    #[test]
    fn a_peer_that_asked_for_nothing_has_nothing_to_be_busy_with() {
        let meeting = Meeting::new(On::Host);
        let producer = meeting.listening(&[]);
        for greeted in [false, true] {
            let mut channel = dial(&meeting.socket());
            if greeted {
                channel.send(&hello(Backend::Host), &[]).unwrap();
                answer(&mut channel);
            }
            channel.send(&Message::Busy(Busy {}), &[]).unwrap();
            assert_eq!(told(&mut channel), ErrorCode::Protocol);
        }
        meeting.consumer(&[]).end().code(0);
        producer.end().code(0);
    }

    #[test]
    fn backends_and_versions_of_the_future_are_told_what_does_not_fit() {
        let meeting = Meeting::new(On::Host);
        let producer = meeting.listening(&[]);
        let greet = |version, backend: &str| {
            let mut channel = dial(&meeting.socket());
            let greeting =
                Hello { version, capabilities: Vec::new(), backend: backend.into(), pid: 1, timeout_ms: 20_000 };
            channel.send(&Message::Hello(greeting), &[]).unwrap();
            channel
        };
        assert_eq!(told(&mut greet(0, "host")), ErrorCode::Version);
        let mut newer = greet(7, "hip");
        let (Message::Hello(theirs), _) = answer(&mut newer) else { panic!() };
        assert_eq!(theirs.version, 1);
        newer.send(&request("default", None), &[]).unwrap();
        assert_eq!(told(&mut newer), ErrorCode::Backend);
        newer.finish(PATIENCE);
        producer.end().code(4).says("the consumer uses hip");
    }

    #[test]
    fn a_mismatch_counts_although_its_finder_hangs_up() {
        let meeting = Meeting::new(On::Host);
        let producer = meeting.producer(&["--size", "8", "--json"]).start();
        crate::running::wait_for("the socket", || meeting.socket().exists());
        let mut channel = dial(&meeting.socket());
        borrow(&mut channel, None);
        let first_mismatch = Some(Mismatch { index: 0, expected: 2, found: 3 });
        channel.send(&result(false, 2, 2, first_mismatch), &[]).unwrap();
        drop(channel);
        let report = producer.end().code(1).json();
        assert_eq!((&report["mismatches"], &report["consumers"][0]["outcome"]), (&2.into(), &"mismatch".into()));
    }

    #[test]
    fn a_no_is_a_no_whatever_its_figures_are() {
        for (words, mismatches, code) in [(2, 1, 1), (0, 0, 1), (u64::MAX, 0, 1)] {
            let meeting = Meeting::new(On::Host);
            let producer = meeting.listening(&["--size", "8"]);
            let mut channel = dial(&meeting.socket());
            borrow(&mut channel, None);
            channel.send(&result(false, words, mismatches, None), &[]).unwrap();
            answer(&mut channel);
            channel.finish(PATIENCE);
            producer.end().code(code).says("did not verify");
        }
    }

    #[test]
    fn a_consumer_that_stays_for_nothing_is_waited_for_once() {
        let meeting = Meeting::new(On::Host);
        let timeout = Duration::from_secs(15);
        let producer = meeting.listening(&["--timeout", "15s", "--size", "4"]);
        let mut channel = dial(&meeting.socket());
        borrow(&mut channel, None);
        channel.send(&good(1), &[]).unwrap();
        answer(&mut channel);
        let begun = Instant::now();
        producer.end().code(0);
        // A second wait would end after twice the timeout.
        assert!(begun.elapsed() < 2 * timeout, "{:?}", begun.elapsed());
    }

    #[test]
    fn whoever_asks_as_the_wait_ends_is_served_or_turned_away() {
        let meeting = Meeting::new(On::Host);
        for delay in 0..40 {
            let producer = meeting.listening(&["--timeout", "40ms"]);
            thread::sleep(Duration::from_millis(20 + delay));
            let address = SocketAddrUnix::new(meeting.socket()).unwrap();
            let socket = seqpacket();
            // Each of these may come too late.
            if connect(&socket, &address).is_ok() {
                for message in [hello(Backend::Host), request("default", None)] {
                    let _ = rustix::net::send(&socket, &message.encode().unwrap(), SendFlags::NOSIGNAL);
                }
            }
            drop(socket);
            producer.end().code(4);
        }
    }

    #[test]
    fn the_wait_for_the_next_consumer_begins_when_the_last_has_gone() {
        let meeting = Meeting::new(On::Host);
        let producer = meeting.listening(&["--timeout", "6s", "--consumers", "2"]);
        thread::sleep(Duration::from_secs(3));
        meeting.consumer(&[]).end().code(0);
        let ended = producer.end();
        assert!(ended.code(4).took >= Duration::from_secs(9), "{:?}", ended.took);
    }

    #[test]
    fn idle_connections_do_not_prolong_the_wait_for_a_consumer() {
        let meeting = Meeting::new(On::Host);
        let producer = meeting.listening(&["--timeout", "500ms"]);
        thread::scope(|scope| {
            scope.spawn(|| {
                let address = SocketAddrUnix::new(meeting.socket()).unwrap();
                // Until the producer is gone, however it ends.
                while !matches!(
                    connect(seqpacket(), &address),
                    Err(rustix::io::Errno::CONNREFUSED | rustix::io::Errno::NOENT)
                ) {
                    thread::sleep(Duration::from_millis(20));
                }
            });
            producer.end().code(4).says("no consumer within");
        });
    }

    #[test]
    fn objects_that_do_not_exist_are_refused_and_the_asker_counts() {
        let meeting = Meeting::new(On::Host);
        let producer = meeting.listening(&[]);
        let mut channel = dial(&meeting.socket());
        channel.send(&hello(Backend::Host), &[]).unwrap();
        answer(&mut channel);
        channel.send(&request("weights\u{1b}[31m", None), &[]).unwrap();
        assert_eq!(told(&mut channel), ErrorCode::Object);
        channel.finish(PATIENCE);
        let ended = producer.end();
        ended.code(4).says("no object `weights");
        assert!(!ended.stderr.contains('\u{1b}') && !ended.stdout.contains('\u{1b}'));
    }
}

mod consumers {
    use super::*;

    /// A producer made by hand: one connection is served by a function.
    fn against(serve: impl FnOnce(&mut Channel) + Send, check: impl FnOnce(Result<Findings, Error>)) {
        against_asking(serve, check, session::handoff::Request::default());
    }

    fn against_asking(
        serve: impl FnOnce(&mut Channel) + Send,
        check: impl FnOnce(Result<Findings, Error>),
        request: session::handoff::Request,
    ) {
        against_within(PATIENCE, serve, check, request);
    }

    fn against_within(
        timeout: Duration,
        serve: impl FnOnce(&mut Channel) + Send,
        check: impl FnOnce(Result<Findings, Error>),
        request: session::handoff::Request,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let listener = seqpacket();
        bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        listen(&listener, 1).unwrap();
        let config = Config::default().timeout(timeout);
        thread::scope(|scope| {
            let consumer = scope.spawn(|| {
                let driver = open(Choice::Only(Backend::Host)).unwrap().driver;
                let mut verifier = DataVerifier::new(&|_| {});
                fetch(&driver, None, &path, &request, &mut verifier, &config, &|_| {})
            });
            let socket = accept_with(&listener, SocketFlags::CLOEXEC).unwrap();
            let mut channel = Channel::new(socket, PATIENCE, &Cancel::new().unwrap()).unwrap();
            serve(&mut channel);
            drop(channel);
            check(consumer.join().unwrap());
        });
    }

    /// Memory filled with a pattern, and the offer of it.
    fn memory(size: u64, salt: u32) -> (Offer, std::sync::Arc<Allocation>) {
        let driver = open(Choice::Only(Backend::Host)).unwrap().driver;
        let device = Device::find(&driver, Selector::default()).unwrap();
        let memory = Allocation::create(&device, size).unwrap();
        let mapping = vmmfd::memory::Mapping::new(&memory, Access::ReadWrite).unwrap();
        pattern::fill(&mapping, 0..size, Pattern::new(salt), &mut |_| Ok(())).unwrap();
        let offer = Offer {
            object: "default".into(),
            memory: Memory {
                mechanism: Mechanism::Vmm,
                device: vmmfd::wire::Device { uuid: device.uuid(), name: "by hand".into() },
                location: Location::Device,
                size,
                mapped_size: memory.size(),
                segments: 1,
                pool: None,
                pointer: None,
                offset: 0,
                immutable: false,
            },
            array: None,
            access: Access::ReadOnly,
            part: Some(Part { first: 0, segments: 1, offset: 0, size: memory.size() }),
            check: Some(Claim { salt: Some(salt), ..Claim::default() }.to_check()),
            buffer: None,
        };
        (offer, memory)
    }

    fn greet(channel: &mut Channel) {
        assert!(matches!(answer(channel), (Message::Hello(_), _)));
        channel.send(&hello(Backend::Host), &[]).unwrap();
        assert!(matches!(answer(channel), (Message::Request(_), _)));
    }

    /// As [`lend`], up to where it may be refused.
    fn send(channel: &mut Channel, offer: &Offer, fd: BorrowedFd<'_>) {
        greet(channel);
        channel.send(&Message::Offer(Box::new(offer.clone())), &[]).unwrap();
        // It may be gone already.
        let sizes = vec![offer.memory.mapped_size];
        let _ = channel.send(&Message::Segments(Segments { first: 0, sizes }), &[fd]);
    }

    fn lend(channel: &mut Channel, offer: &Offer, fd: BorrowedFd<'_>) {
        send(channel, offer, fd);
        assert!(matches!(answer(channel), (Message::Received(Received { segments: 1 }), _)));
    }

    /// Changes what an offer's data can be checked against.
    fn claims(offer: &mut Offer, change: fn(&mut Claim)) {
        let mut claim = claim(offer);
        change(&mut claim);
        offer.check = Some(claim.to_check());
    }

    /// Makes it an offer of memory of a pool, which the host backend lacks.
    fn pool(offer: &mut Offer) {
        let (pool, pointer) = (Some(1), Some(Pointer([0; 64])));
        offer.memory = Memory { mechanism: Mechanism::Pool, pool, pointer, segments: 0, ..offer.memory.clone() };
        offer.part = None;
    }

    /// As [`pool`], of legacy memory.
    fn legacy(offer: &mut Offer) {
        let pointer = Some(Pointer([0; 64]));
        offer.memory = Memory { mechanism: Mechanism::Legacy, pointer, segments: 0, ..offer.memory.clone() };
        offer.part = None;
    }

    /// Makes an offer a bad one, perhaps with another device.
    type Change = fn(&mut Offer, DeviceUuid);

    #[test]
    fn offers_that_contradict_themselves_or_do_not_fit_are_refused() {
        let (sound, memory) = memory(100, 3);
        let other = "00000000-1111-2222-3333-444444444444".parse().unwrap();
        let cases: &[(ErrorCode, Change)] = &[
            // The cases of `vmmfd conform` have the other rules.
            (ErrorCode::Protocol, |offer, _| offer.memory.mapped_size = 99),
            (ErrorCode::Protocol, |offer, _| {
                offer.part = Some(Part { first: u64::MAX, segments: u64::MAX, offset: u64::MAX, size: u64::MAX });
            }),
            (ErrorCode::Protocol, |offer, _| offer.memory.pointer = Some(Pointer([0; 64]))),
            (ErrorCode::Protocol, |offer, _| offer.memory.mechanism = Mechanism::Pool),
            (ErrorCode::Protocol, |offer, _| offer.memory.mechanism = Mechanism::Legacy),
            (ErrorCode::Failed, |offer, _| pool(offer)),
            (ErrorCode::Failed, |offer, _| legacy(offer)),
            (ErrorCode::Protocol, |offer, _| {
                pool(offer);
                offer.memory.location = Location::Host;
            }),
            (ErrorCode::Protocol, |offer, _| {
                legacy(offer);
                offer.memory.pool = Some(1);
            }),
            (ErrorCode::Protocol, |offer, _| {
                legacy(offer);
                offer.memory.segments = 1;
            }),
            (ErrorCode::Protocol, |offer, _| {
                legacy(offer);
                offer.part = Some(Part { first: 0, segments: 0, offset: 0, size: 0 });
            }),
            (ErrorCode::Failed, |offer, _| {
                claims(offer, |claim| *claim = Claim { digest: Some("sha256:00".into()), ..Claim::default() })
            }),
            (ErrorCode::Protocol, |offer, _| {
                claims(offer, |claim| claim.digest = Some(format!("blake3:{}", "0".repeat(64))))
            }),
            (ErrorCode::Protocol, |offer, _| {
                claims(offer, |claim| *claim = Claim { reply_salt: Some(7), ..Claim::default() })
            }),
            (ErrorCode::Device, |offer, other| offer.memory.device.uuid = other),
        ];
        for &(code, change) in cases {
            let mut offer = sound.clone();
            change(&mut offer, other);
            let request = session::handoff::Request::default().access(Access::ReadOnly);
            against_asking(
                |channel| {
                    greet(channel);
                    channel.send(&Message::Offer(Box::new(offer.clone())), &[]).unwrap();
                    let sizes = vec![offer.memory.mapped_size];
                    // It may be gone already.
                    let _ = channel.send(&Message::Segments(Segments { first: 0, sizes }), &[memory.export().unwrap()]);
                    assert_eq!(told(channel), code, "{offer:?}");
                },
                |result| {
                    let error = result.unwrap_err();
                    let lacking = matches!(error, Error::Device(DeviceError::Unsupported { .. }));
                    assert!(
                        lacking
                            || matches!(
                                error,
                                Error::Peer(PeerError::Protocol(_)) | Error::Peer(PeerError::Mismatch { .. })
                            ),
                        "{error:?}"
                    );
                },
                request,
            );
        }
    }

    #[test]
    fn a_claimed_size_that_is_not_the_memorys_is_refused() {
        for factor in [2, 1] {
            let (mut offer, memory) = memory(3 << 20, 3);
            let size = factor * (8 << 20);
            offer.memory = Memory { size: 100, mapped_size: size, ..offer.memory };
            offer.part = Some(Part { size, ..offer.part.unwrap() });
            against(
                |channel| {
                    send(channel, &offer, memory.export().unwrap());
                    assert_eq!(told(channel), ErrorCode::Protocol);
                },
                |result| assert!(matches!(result, Err(Error::Peer(PeerError::Protocol(_)))), "{result:?}"),
            );
        }
    }

    #[test]
    fn descriptors_of_other_things_are_refused() {
        let (offer, _) = memory(100, 3);
        let others = [File::open("/dev/null").unwrap(), tempfile::tempfile().unwrap()];
        for other in &others {
            against(
                |channel| {
                    send(channel, &offer, other.as_fd());
                    assert_eq!(told(channel), ErrorCode::Protocol);
                },
                |result| assert!(matches!(result, Err(Error::Peer(PeerError::Protocol(_)))), "{result:?}"),
            );
        }
    }

    #[test]
    fn segments_that_are_not_those_of_the_offer_break_the_protocol() {
        let (offer, memory) = memory(100, 3);
        for (first, sizes) in
            [(1, vec![offer.memory.mapped_size]), (0, vec![1, 1]), (0, vec![2 * offer.memory.mapped_size])]
        {
            against(
                |channel| {
                    greet(channel);
                    channel.send(&Message::Offer(Box::new(offer.clone())), &[]).unwrap();
                    let fds = vec![memory.export().unwrap(); sizes.len()];
                    channel.send(&Message::Segments(Segments { first, sizes: sizes.clone() }), &fds).unwrap();
                    assert_eq!(told(channel), ErrorCode::Protocol);
                },
                |result| {
                    assert!(
                        matches!(result, Err(Error::Peer(PeerError::Protocol(ProtocolError::Content(_))))),
                        "{result:?}"
                    )
                },
            );
        }
    }

    #[test]
    fn a_producer_that_dies_or_stops_at_any_point_ends_the_consumer() {
        let (offer, memory) = memory(100, 3);
        for stage in 0..4 {
            against(
                |channel| match stage {
                    0 => {}
                    1 => greet(channel),
                    2 => {
                        greet(channel);
                        channel.send(&Message::Offer(Box::new(offer.clone())), &[]).unwrap();
                    }
                    _ => lend(channel, &offer, memory.export().unwrap()),
                },
                |result| assert!(matches!(result, Err(Error::Peer(PeerError::Gone { .. }))), "{stage}: {result:?}"),
            );
        }
        against_within(
            Duration::from_secs(5),
            |channel| {
                greet(channel);
                // Silent until the consumer gives up, and says so.
                assert_eq!(told(channel), ErrorCode::Timeout);
            },
            |result| {
                assert!(
                    matches!(result, Err(Error::Peer(PeerError::Timeout { purpose: "for the offer", .. }))),
                    "{result:?}"
                )
            },
            session::handoff::Request::default(),
        );
    }

    #[test]
    fn a_producer_that_disagrees_makes_the_round_fail() {
        let (offer, memory) = memory(100, 3);
        against(
            |channel| {
                lend(channel, &offer, memory.export().unwrap());
                answer(channel);
                channel.send(&Message::Result(Verdict::unchecked(false)), &[]).unwrap();
            },
            |result| {
                let findings = result.unwrap();
                assert!(findings.found.verified && !findings.producer.as_ref().unwrap().verified);
                assert!(!findings.verified());
            },
        );
    }

    /// A listener that a `consumer` process can be pointed at, and its connection.
    fn command_against(meeting: &Meeting, serve: impl FnOnce(&mut Channel)) -> crate::running::Ended {
        let listener = seqpacket();
        bind(&listener, &SocketAddrUnix::new(meeting.socket()).unwrap()).unwrap();
        listen(&listener, 1).unwrap();
        let consumer = meeting.consumer(&["--json"]).start();
        let socket = accept_with(&listener, SocketFlags::CLOEXEC).unwrap();
        let mut channel = Channel::new(socket, PATIENCE, &Cancel::new().unwrap()).unwrap();
        serve(&mut channel);
        drop((channel, listener));
        fs::remove_file(meeting.socket()).unwrap();
        consumer.end()
    }

    #[test]
    fn a_producer_that_lies_is_a_failed_peer_of_the_command() {
        let meeting = Meeting::new(On::Host);
        let (sound, memory) = memory(3 << 20, 3);
        let null = File::open("/dev/null").unwrap();
        for (mapped_size, fd) in [
            (sound.memory.size + 1, memory.export().unwrap()),
            (2 * sound.memory.mapped_size, memory.export().unwrap()),
            (sound.memory.mapped_size, null.as_fd()),
        ] {
            let mut offer = sound.clone();
            offer.memory.mapped_size = mapped_size;
            offer.part = Some(Part { size: mapped_size, ..offer.part.unwrap() });
            let ended = command_against(&meeting, |channel| {
                send(channel, &offer, fd);
                told(channel);
            });
            assert_eq!(ended.code(4).json()["error"]["kind"], "peer");
        }
    }

    #[test]
    fn a_mismatch_counts_although_the_producer_dies() {
        let meeting = Meeting::new(On::Host);
        let (offer, memory) = memory(100, 3);
        let check = Claim { salt: Some(4), ..Claim::default() }.to_check();
        let wrong = Offer { check: Some(check), ..offer };
        let ended = command_against(&meeting, |channel| {
            lend(channel, &wrong, memory.export().unwrap());
            assert!(matches!(answer(channel), (Message::Result(Verdict { verified: false, .. }), _)));
        });
        let report = ended.code(1).json();
        assert_eq!((&report["verified"], &report["mismatches"]), (&false.into(), &25.into()));
    }

    #[test]
    fn truncated_descriptors_are_an_error_of_the_command() {
        let meeting = Meeting::new(On::Host);
        let listener = seqpacket();
        bind(&listener, &SocketAddrUnix::new(meeting.socket()).unwrap()).unwrap();
        listen(&listener, 1).unwrap();
        let (offer, memory) = memory(100, 3);
        // So few files that the descriptor does not fit.
        let run = meeting.consumer(&[]).with_files(16);
        let consumer = run.start();
        let mut channel =
            Channel::new(accept_with(&listener, SocketFlags::CLOEXEC).unwrap(), PATIENCE, &Cancel::new().unwrap())
                .unwrap();
        greet(&mut channel);
        channel.send(&Message::Offer(Box::new(offer)), &[]).unwrap();
        let fds = vec![memory.export().unwrap(); MAX_FDS];
        channel.send(&Message::Segments(Segments { first: 0, sizes: vec![1; MAX_FDS] }), &fds).unwrap();
        assert_eq!(told(&mut channel), ErrorCode::Failed);
        channel.finish(PATIENCE);
        consumer.end().code(5).says("open files are needed, and this process may have 16").says("ulimit -n");
    }

    #[test]
    fn the_memory_outlives_its_producer() {
        let (offer, memory) = memory(3 << 20, 9);
        let fd = memory.export().unwrap().try_clone_to_owned().unwrap();
        drop(memory);
        against(
            move |channel| {
                lend(channel, &offer, fd.as_fd());
                drop(fd);
                answer(channel);
                channel.send(&good(0), &[]).unwrap();
            },
            |result| assert!(result.unwrap().found.verified),
        );
    }
}
