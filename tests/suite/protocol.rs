//! Protocol rules that need more than one record: silence, floods, turns, false descriptions of memory, and the errors that the commands
//! print.

use std::{
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    thread,
    time::{Duration, Instant},
};

use nix::{
    fcntl::{FallocateFlags, FcntlArg, SealFlag, fallocate, fcntl},
    sys::{
        memfd::{MFdFlags, memfd_create},
        stat::fstat,
    },
    unistd::ftruncate,
};
use rustix::net::{SocketAddrUnix, connect};
use vmmfd::{
    Error,
    channel::{Cancel, Channel},
    driver::{Access, Backend, Choice, GRANULARITY, open},
    error::PeerError,
    memory::{Device, Selector, Shared, Spec},
    session::{
        Config, Verdict,
        handoff::{Buffer, Content, ServeOptions, serve_connection},
        stream::Subscriber,
    },
    wire::{Busy, Check, ErrorCode, Failure, Hello, Message, Offer, Received, Request, Run, Segments},
};
use vmmfd_cli::check::Figures;

use crate::{
    conversation::{PATIENCE, accepted, answer, dial, hello, listening, request, seqpacket, told},
    running::{Ended, Meeting, Running},
};

/// Returns the next message, which must be an error.
fn failure(channel: &mut Channel) -> Failure {
    match answer(channel) {
        (Message::Error(failure), _) => failure,
        (other, _) => panic!("{other:?}"),
    }
}

/// Requests the buffer and acknowledges its segments.
fn take(channel: &mut Channel) -> Offer {
    channel.send(&request("default", None), &[]).unwrap();
    let (Message::Offer(offer), _) = answer(channel) else { panic!() };
    let (Message::Segments(segments), _) = answer(channel) else { panic!() };
    channel.send(&Message::Received(Received { segments: segments.sizes.len() as u64 }), &[]).unwrap();
    *offer
}

fn greeted(meeting: &Meeting) -> Channel {
    let mut channel = dial(&meeting.socket());
    channel.send(&hello(Backend::Host), &[]).unwrap();
    assert!(matches!(answer(&mut channel), (Message::Hello(_), _)));
    channel
}

fn finish(channel: &mut Channel) {
    channel.send(&Message::Result(Verdict::unchecked(true)), &[]).unwrap();
    assert!(matches!(answer(channel), (Message::Result(_), _)));
}

mod producers {
    use super::*;

    #[test]
    fn silent_consumer_is_reported() {
        let meeting = Meeting::host();
        let producer = meeting.listening(&["--timeout", "1s", "--size", "4"]);
        let mut channel = greeted(&meeting);
        take(&mut channel);
        finish(&mut channel);
        let failure = failure(&mut channel);
        assert_eq!(failure.code, ErrorCode::Timeout);
        assert!(failure.message.contains("waiting for another request"), "{}", failure.message);
        // The request was served nonetheless.
        producer.end().code(0);
    }

    #[test]
    fn silent_consumer_during_check_is_reported() {
        let meeting = Meeting::host();
        let producer = meeting.listening(&["--timeout", "1s", "--size", "4"]);
        // The consumer remains connected and silent.
        let mut stopped = greeted(&meeting);
        take(&mut stopped);
        producer.end().code(4).says("silent for 1s");
        assert_eq!(told(&mut stopped), ErrorCode::Timeout);
    }

    #[test]
    fn busy_consumer_can_not_extend_its_turn() {
        let driver = open(Choice::Only(Backend::Host)).unwrap().driver;
        let shared = Shared::create(&Device::find(&driver, Selector::default()).unwrap(), Spec::vmm(4)).unwrap();
        let buffer = Buffer::new(shared, Replies, None).unwrap();
        let options = ServeOptions::default().round_trip(true).turn(Duration::from_millis(200));
        for pause in [Duration::ZERO, Duration::from_millis(20)] {
            let (ours, theirs) = Channel::socket_pair().unwrap();
            let mut channel = Channel::new(theirs, PATIENCE, &Cancel::new().unwrap()).unwrap();
            thread::scope(|scope| {
                let producer =
                    scope.spawn(|| serve_connection(ours, &buffer, &options, &Config::default(), &|_| {}).unwrap());
                channel.send(&hello(Backend::Host), &[]).unwrap();
                answer(&mut channel);
                take(&mut channel);
                let begun = Instant::now();
                let refused = loop {
                    match channel.send(&Message::Busy(Busy {}), &[]) {
                        Ok(()) if begun.elapsed() < PATIENCE => thread::sleep(pause),
                        Ok(()) => break None,
                        Err(error) => break Some(error),
                    }
                };
                drop(channel);
                assert!(
                    matches!(&refused, Some(Error::Peer(PeerError::Reported { code: ErrorCode::Timeout, message }))
                        if message.contains("longer than its turn of 200ms")),
                    "{refused:?}"
                );
                let served = producer.join().unwrap();
                assert!(matches!(served.error, Some(Error::Peer(PeerError::TurnTooLong { .. }))), "{served:?}");
            });
        }
    }

    struct Replies;

    impl Content for Replies {
        fn expects_reply(&self) -> bool {
            true
        }
    }

    #[test]
    fn silent_flood_spares_greeted_consumers() {
        let meeting = Meeting::host();
        let producer = meeting.listening(&["--size", "4"]);
        let mut polite = greeted(&meeting);
        let mut first = dial(&meeting.socket());
        let flood: Vec<UnixStream> = (0..300)
            .map(|_| {
                let socket = seqpacket();
                connect(&socket, &SocketAddrUnix::new(meeting.socket()).unwrap()).unwrap();
                UnixStream::from(socket)
            })
            .collect();
        assert_eq!(told(&mut first), ErrorCode::Full, "the oldest silent one makes room");
        take(&mut polite);
        finish(&mut polite);
        polite.finish(PATIENCE);
        drop(flood);
        producer.end().code(0);
    }

    #[test]
    fn violations_are_answered_with_a_rule() {
        let meeting = Meeting::host();
        // A digest, although the offer has none.
        let producer = meeting.listening(&["--size", "8"]);
        let mut channel = greeted(&meeting);
        take(&mut channel);
        let figures = Figures { words: 2, digest: Some("blake3:00".to_owned()), ..Figures::default() };
        channel.send(&Message::Result(figures.verdict(true)), &[]).unwrap();
        let failure = failure(&mut channel);
        assert_eq!(failure.code, ErrorCode::Protocol);
        assert_eq!(
            failure.message,
            "the peer broke the protocol: a result that is right has digest blake3:00, and no digest was offered"
        );
        channel.finish(PATIENCE);
        producer.end().code(4);
    }

    #[test]
    fn producer_report_has_the_array() {
        let meeting = Meeting::host();
        let producer = meeting.producer(&["--dtype", "f32", "--shape", "4", "--json"]).start();
        meeting.consumer(&[]).end().code(0);
        let report = producer.end().code(0).json();
        let expected = serde_json::json!({"dtype": "float32", "shape": [4], "strides": null, "offset": 0});
        assert_eq!(report["array"], expected);
    }

    #[test]
    fn waiting_consumer_receives_busy() {
        let meeting = Meeting::host();
        // The producer's timeout is far longer than its consumer's.
        let producer = meeting.listening(&["--round-trip", "--consumers", "2", "--size", "4"]);
        let mut first = greeted(&meeting);
        take(&mut first);
        let second = meeting.consumer(&["--timeout", "1s"]).start();
        // Three times the second consumer's timeout.
        for _ in 0..6 {
            thread::sleep(Duration::from_millis(500));
            first.send(&Message::Busy(Busy {}), &[]).unwrap();
        }
        finish(&mut first);
        first.finish(PATIENCE);
        second.end().code(0);
        producer.end().code(0);
    }
}

mod consumers {
    use super::*;

    /// Runs a `consumer` process against a listener that `serve` controls.
    fn against(serve: impl FnOnce(&mut Channel), options: &[&str]) -> Ended {
        let meeting = Meeting::host();
        let (mut channel, consumer) = met(&meeting, options);
        serve(&mut channel);
        drop(channel);
        consumer.end()
    }

    fn met(meeting: &Meeting, options: &[&str]) -> (Channel, Running) {
        let listener = listening(&meeting.socket(), 1);
        let consumer = meeting.consumer(options).start();
        (accepted(&listener), consumer)
    }

    fn greet(channel: &mut Channel, backend: Backend) {
        answer(channel);
        channel.send(&hello(backend), &[]).unwrap();
        assert!(matches!(answer(channel), (Message::Request(Request { .. }), _)));
    }

    /// Returns a host producer's offer, with its descriptor.
    fn offered(size: u64) -> (Offer, OwnedFd) {
        let driver = open(Choice::Only(Backend::Host)).unwrap().driver;
        let shared = Shared::create(&Device::find(&driver, Selector::default()).unwrap(), Spec::vmm(size)).unwrap();
        let (part, chunks) = shared.chunks(0..size).unwrap().unwrap();
        let offer = Offer {
            object: "default".into(),
            memory: (&shared.describe().unwrap()).into(),
            array: None,
            access: Access::ReadOnly,
            part: Some(part),
            check: None,
            buffer: None,
        };
        (offer, chunks[0].as_fd().try_clone_to_owned().unwrap())
    }

    fn give(channel: &mut Channel, offer: &Offer, fd: &OwnedFd) {
        channel.send(&Message::Offer(Box::new(offer.clone())), &[]).unwrap();
        let segments = Segments { first: 0, sizes: vec![offer.memory.mapped_size] };
        // Fails if the consumer has already rejected the offer.
        let _ = channel.send(&Message::Segments(segments), &[fd.as_fd()]);
    }

    #[test]
    fn stopped_producer_is_reported() {
        let meeting = Meeting::host();
        let (mut stopped, consumer) = met(&meeting, &["--timeout", "1s"]);
        greet(&mut stopped, Backend::Host);
        consumer.end().code(4).says("silent for 1s while this side was waiting for the offer");
        assert_eq!(told(&mut stopped), ErrorCode::Timeout);
    }

    #[test]
    fn impossible_offer_is_a_protocol_error() {
        let (sound, fd) = offered(100);
        let most = (1 << 26) - 1;
        for (mapped_size, segments, code) in [
            // Addresses could be reserved for the first two.
            (1 << 46, 1, ErrorCode::Failed),
            (most * GRANULARITY, most, ErrorCode::Failed),
            (1 << 47, 1, ErrorCode::Protocol),
            (1 << 63, 1, ErrorCode::Protocol),
        ] {
            let mut offer = sound.clone();
            (offer.memory.mapped_size, offer.memory.segments) = (mapped_size, segments);
            offer.part = Some(Run { segments, size: mapped_size, ..offer.part.unwrap() });
            let ended = against(
                |channel| {
                    greet(channel, Backend::Host);
                    give(channel, &offer, &fd);
                    assert_eq!(told(channel), code, "{mapped_size}");
                },
                &["--json"],
            );
            assert_eq!(ended.code(4).json()["error"]["kind"], "peer", "{mapped_size}");
        }
    }

    #[test]
    fn offer_of_another_backend_is_refused() {
        let (offer, fd) = offered(100);
        let ended = against(
            |channel| {
                greet(channel, Backend::Cuda);
                give(channel, &offer, &fd);
                assert_eq!(told(channel), ErrorCode::Backend);
            },
            &[],
        );
        ended.code(4).says("the producer's memory is on backend cuda, and the consumer uses host");
    }

    #[test]
    fn sparse_memfd_is_refused() {
        let size = 64 * GRANULARITY;
        let (mut offer, _) = offered(size);
        let sparse = memfd_create(c"sparse", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING).unwrap();
        ftruncate(&sparse, size as i64).unwrap();
        fallocate(&sparse, FallocateFlags::empty(), 0, GRANULARITY as i64).unwrap();
        fcntl(&sparse, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_SEAL)).unwrap();
        let blocks = fstat(&sparse).unwrap().st_blocks;
        offer.check = Some(serde_json::from_str(r#"{"salt":1}"#).unwrap());
        let ended = against(
            |channel| {
                greet(channel, Backend::Host);
                give(channel, &offer, &sparse);
                assert_eq!(told(channel), ErrorCode::Protocol);
            },
            &[],
        );
        ended.code(4).says("bytes are not committed");
        assert_eq!(fstat(&sparse).unwrap().st_blocks, blocks, "the consumer committed a page");
    }

    #[test]
    fn messages_to_a_peer_are_sentences() {
        let (sound, fd) = offered(100);
        for (change, expected) in [
            (
                (|offer| offer.part.as_mut().unwrap().size = 0) as fn(&mut Offer),
                "bytes 0 to 100 were requested, but the offer covers 1 segments from segment 0 on, 0 bytes from byte 0 on",
            ),
            (
                |offer| offer.part.as_mut().unwrap().first = 1,
                "1 segments from segment 1 on, 2097152 bytes from byte 0 on: not a part of 100 bytes of data",
            ),
        ] {
            let mut offer = sound.clone();
            change(&mut offer);
            against(
                |channel| {
                    greet(channel, Backend::Host);
                    give(channel, &offer, &fd);
                    let Failure { code, message } = failure(channel);
                    assert_eq!(code, ErrorCode::Protocol);
                    assert!(message.contains(expected), "{message}");
                    assert!(!message.contains("Part {") && !message.contains(".."), "{message}");
                },
                &[],
            )
            .code(4);
        }
    }

    #[test]
    fn unknown_code_is_shown_by_name() {
        let ended = against(
            |channel| {
                greet(channel, Backend::Host);
                let body = r#"{"code":"too_warm","message":"the room"}"#;
                let mut record = b"VMFD\x01\x00\x08\x00".to_vec();
                record.extend((body.len() as u32).to_le_bytes());
                record.extend([0; 4]);
                record.extend(body.as_bytes());
                rustix::net::send(channel.as_fd(), &record, rustix::net::SendFlags::NOSIGNAL).unwrap();
            },
            &[],
        );
        ended.code(4).says("the peer reported: the room (too_warm)");
    }

    #[test]
    fn subscriber_refuses_another_backend() {
        let (offer, _) = offered(100);
        let (ours, theirs) = Channel::socket_pair().unwrap();
        let mut channel = Channel::new(ours, PATIENCE, &Cancel::new().unwrap()).unwrap();
        let driver = open(Choice::Only(Backend::Host)).unwrap().driver;
        thread::scope(|scope| {
            let subscriber = scope.spawn(|| {
                let mut subscriber = Subscriber::over(theirs, &driver, None, 1, &Config::default())?;
                subscriber.receive().map(drop)
            });
            answer(&mut channel);
            let Message::Hello(greeting) = hello(Backend::Cuda) else { panic!() };
            let greeting = Hello { capabilities: vec!["stream".to_owned()], ..greeting };
            channel.send(&Message::Hello(greeting), &[]).unwrap();
            assert!(matches!(answer(&mut channel), (Message::Subscribe(_), _)));
            let offer = Offer { buffer: Some(1), ..offer };
            channel.send(&Message::Offer(Box::new(offer)), &[]).unwrap();
            assert_eq!(told(&mut channel), ErrorCode::Backend);
            let refused = subscriber.join().unwrap();
            assert!(
                matches!(&refused, Err(Error::Peer(PeerError::Mismatch { code: ErrorCode::Backend, .. }))),
                "{refused:?}"
            );
        });
    }

    #[test]
    fn producer_report_must_be_an_object() {
        let (mut offer, fd) = offered(4);
        offer.check = None;
        let mut check = Check::new();
        check.insert("words".to_owned(), 0.into());
        check.insert("mismatches".to_owned(), 0.into());
        check.insert("first_mismatch".to_owned(), serde_json::json!([0, 1, 2]));
        against(
            |channel| {
                greet(channel, Backend::Host);
                give(channel, &offer, &fd);
                assert!(matches!(answer(channel), (Message::Received(_), _)));
                assert!(matches!(answer(channel), (Message::Result(_), _)));
                channel.send(&Message::Result(Verdict::new(true, Some(check))), &[]).unwrap();
                let Failure { code, message } = failure(channel);
                assert_eq!(code, ErrorCode::Protocol);
                assert!(message.contains("expected a JSON object"), "{message}");
            },
            &[],
        )
        .code(4);
    }
}
