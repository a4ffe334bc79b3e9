//! The producer against a handwritten consumer.

use vmmfd::session::handoff::Content;

use super::*;

/// Connects to the producer and exchanges hellos.
fn greeted(meeting: &Meeting) -> Channel {
    let mut channel = dial(&meeting.socket());
    channel.send(&hello(Backend::Host), &[]).unwrap();
    answer(&mut channel);
    channel
}

/// Runs the conversation through `received`, closes the descriptor, and returns the offer.
fn borrow(meeting: &Meeting) -> (Channel, Offer) {
    let mut channel = greeted(meeting);
    let offer = take(&mut channel);
    (channel, offer)
}

/// Requests the buffer and acknowledges its only segment.
fn take(channel: &mut Channel) -> Offer {
    channel.send(&request("default", None), &[]).unwrap();
    let (Message::Offer(offer), _) = answer(channel) else { panic!() };
    answer(channel);
    channel.send(&Message::Received(Received { segments: 1 }), &[]).unwrap();
    *offer
}

/// Reports the consumer's result, and returns the producer's.
fn report(channel: &mut Channel, result: &Message) -> Verdict {
    channel.send(result, &[]).unwrap();
    let (Message::Result(theirs), _) = answer(channel) else { panic!() };
    theirs
}

#[test]
fn dead_consumer_is_one_failed_consumer() {
    for stage in 0..3 {
        let meeting = Meeting::host();
        let producer = meeting.listening(&["--consumers", "2", "--round-trip"]);
        let mut channel = greeted(&meeting);
        channel.send(&request("default", None), &[]).unwrap();
        if stage > 0 {
            answer(&mut channel);
            answer(&mut channel);
        }
        if stage > 1 {
            channel.send(&Message::Received(Received { segments: 1 }), &[]).unwrap();
        }
        drop(channel);
        // The producer fills the buffer again for the next consumer.
        meeting.consumer(&[]).end().code(0);
        producer.end().code(4).says(&format!("pid {} ended or closed the connection", process::id()));
    }
}

#[test]
fn silent_consumer_fails_and_delays_nobody() {
    let meeting = Meeting::host();
    let producer = meeting.listening(&["--consumers", "2", "--timeout", "2s"]);
    let (mut silent, _) = borrow(&meeting);
    meeting.consumer(&[]).end().code(0);
    let ended = producer.end();
    ended.code(4).says("silent for 2s");
    assert_eq!(told(&mut silent), ErrorCode::Timeout);
}

#[test]
fn queued_consumer_hears_busy_each_second() {
    let meeting = Meeting::host();
    let producer = meeting.listening(&["--consumers", "2", "--round-trip", "--size", "4"]);
    let (first, offer) = borrow(&meeting);
    let mut second = greeted(&meeting);
    second.send(&request("default", None), &[]).unwrap();
    let begun = Instant::now();
    for _ in 0..2 {
        assert!(matches!(second.receive("for busy"), Ok((Message::Busy(_), _))));
    }
    assert!(begun.elapsed() >= Duration::from_secs(1), "{:?}", begun.elapsed());
    // The second consumer is served when the first disconnects.
    drop(first);
    let (Message::Offer(next), _) = answer(&mut second) else { panic!() };
    assert_ne!(claim(&next).reply_salt, claim(&offer).reply_salt);
    drop(second);
    producer.end().code(4);
}

#[test]
fn idle_connections_delay_no_consumer() {
    let meeting = Meeting::host();
    let producer = meeting.listening(&[]);
    let socket = meeting.socket();
    // Silent, disconnected, malformed, with another protocol version, and with a hello but no request.
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
    let _polite = greeted(&meeting);
    let with_fd = raw(&socket);
    let null = File::open("/dev/null").unwrap();
    with_fd.send_with_fd(b"x", &[null.as_raw_fd()]).unwrap();
    drop(with_fd);
    let half = raw(&socket);
    half.shutdown(Shutdown::Write).unwrap();

    meeting.consumer(&[]).end().code(0);
    assert_eq!(producer.end().code(0).stderr, "");
}

#[test]
fn few_descriptors_leave_room_for_consumer() {
    let meeting = Meeting::host();
    let run = meeting.producer(&["--timeout", "20s"]).with_files(48);
    let mut producer = run.start();
    producer.until("shared");
    let silent: Vec<UnixStream> = (0..60).map(|_| raw(&meeting.socket())).collect();
    let garbled: Vec<UnixStream> = (0..60)
        .map(|_| {
            let socket = raw(&meeting.socket());
            // The producer may already have closed the connection.
            let _ = rustix::net::send(&socket, b"GET / HTTP/1.1", SendFlags::NOSIGNAL);
            socket
        })
        .collect();
    meeting.consumer(&["--timeout", "10s"]).end().code(0);
    producer.end().code(0);
    drop((silent, garbled));
}

#[test]
fn mismatch_counts_after_consumer_hangs_up() {
    let meeting = Meeting::host();
    let producer = meeting.producer(&["--size", "8", "--json"]).start();
    wait_for("the socket", || meeting.socket().exists());
    let (mut channel, _) = borrow(&meeting);
    let first_mismatch = Some(Mismatch { index: 0, expected: 2, found: 3 });
    channel.send(&result(false, 2, 2, first_mismatch), &[]).unwrap();
    drop(channel);
    let report = producer.end().code(1).json();
    assert_eq!((&report["mismatches"], &report["consumers"][0]["outcome"]), (&2.into(), &"mismatch".into()));
}

#[test]
fn silent_flood_spares_greeted_consumers() {
    let meeting = Meeting::host();
    let producer = meeting.listening(&["--size", "4", "--consumers", "2"]);
    let mut polite = greeted(&meeting);
    let mut first = dial(&meeting.socket());
    let flood: Vec<UnixStream> = (0..300).map(|_| raw(&meeting.socket())).collect();
    assert_eq!(told(&mut first), ErrorCode::Full, "the oldest silent one makes room");
    meeting.consumer(&[]).end().code(0);
    take(&mut polite);
    report(&mut polite, &good(1));
    polite.finish(PATIENCE);
    drop(flood);
    producer.end().code(0);
}

struct Replies;

impl Content for Replies {
    fn expects_reply(&self) -> bool {
        true
    }
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
            let refused = loop {
                match channel.send(&Message::Busy(Busy {}), &[]) {
                    Ok(()) => thread::sleep(pause),
                    Err(error) => break error,
                }
            };
            drop(channel);
            assert!(
                matches!(&refused, Error::Peer(PeerError::Reported { code: ErrorCode::Timeout, message })
                    if message.contains("longer than its turn of 200ms")),
                "{refused:?}"
            );
            let served = producer.join().unwrap();
            assert!(matches!(served.error, Some(Error::Peer(PeerError::TurnTooLong { .. }))), "{served:?}");
        });
    }
}
