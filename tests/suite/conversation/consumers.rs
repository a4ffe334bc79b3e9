//! The consumer against a handwritten producer.

use vmmfd::memory::Chunk;

use super::*;

/// Runs a handwritten producer that serves one connection.
fn against(serve: impl FnOnce(&mut Channel) + Send, check: impl FnOnce(Result<Findings, Error>)) {
    against_within(PATIENCE, serve, check);
}

fn against_within(
    timeout: Duration,
    serve: impl FnOnce(&mut Channel) + Send,
    check: impl FnOnce(Result<Findings, Error>),
) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let listener = listening(&path, 1);
    let config = Config::default().timeout(timeout);
    let request = session::handoff::Request::default().access(ReadOnly);
    thread::scope(|scope| {
        let consumer = scope.spawn(|| {
            let driver = open(Choice::Only(Backend::Host)).unwrap().driver;
            let mut verifier = DataVerifier::new(&|_| {});
            fetch(&driver, None, &path, &request, &mut verifier, &config, &|_| {})
        });
        let mut channel = accepted(&listener);
        serve(&mut channel);
        drop(channel);
        check(consumer.join().unwrap());
    });
}

/// Memory filled with a pattern, and its offer.
fn memory(size: u64, salt: u32) -> (Offer, Arc<Chunk>) {
    let driver = open(Choice::Only(Backend::Host)).unwrap().driver;
    let memory = Shared::create(&Device::find(&driver, Selector::default()).unwrap(), Spec::vmm(size)).unwrap();
    pattern::fill(&memory, 0..size, Pattern::new(salt), &mut |_| Ok(())).unwrap();
    let (part, mut chunks) = memory.chunks(0..size).unwrap().unwrap();
    let offer = Offer {
        object: "default".into(),
        memory: (&memory.describe().unwrap()).into(),
        array: None,
        access: ReadOnly,
        part: Some(part),
        check: Some(Claim { salt: Some(salt), ..Claim::default() }.to_check()),
    };
    (offer, chunks.remove(0))
}

fn greet(channel: &mut Channel) {
    assert!(matches!(answer(channel), (Message::Hello(_), _)));
    channel.send(&hello(Backend::Host), &[]).unwrap();
    assert!(matches!(answer(channel), (Message::Request(_), _)));
}

/// As [`lend`], but the consumer may refuse the offer.
fn send(channel: &mut Channel, offer: &Offer, fd: BorrowedFd<'_>) {
    greet(channel);
    channel.send(&Message::Offer(Box::new(offer.clone())), &[]).unwrap();
    // The consumer may already have closed the connection.
    let sizes = vec![offer.memory.mapped_size];
    let _ = channel.send(&Message::Segments(Segments { first: 0, sizes }), &[fd]);
}

fn lend(channel: &mut Channel, offer: &Offer, fd: BorrowedFd<'_>) {
    send(channel, offer, fd);
    assert!(matches!(answer(channel), (Message::Received(Received { segments: 1 }), _)));
}

#[test]
fn lost_producer_ends_the_consumer() {
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
                _ => lend(channel, &offer, memory.as_fd()),
            },
            |result| assert!(matches!(result, Err(Error::Peer(PeerError::Gone { .. }))), "{stage}: {result:?}"),
        );
    }
    against_within(
        Duration::from_secs(1),
        |channel| {
            greet(channel);
            // Stay silent until the consumer reports a timeout.
            assert_eq!(told(channel), ErrorCode::Timeout);
        },
        |result| {
            assert!(
                matches!(result, Err(Error::Peer(PeerError::Timeout { purpose: "for the offer", .. }))),
                "{result:?}"
            )
        },
    );
}

#[test]
fn producers_disagreement_fails_the_round() {
    let (offer, memory) = memory(100, 3);
    against(
        |channel| {
            lend(channel, &offer, memory.as_fd());
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

/// Runs a `consumer` process against a handwritten producer.
fn command_against(meeting: &Meeting, serve: impl FnOnce(&mut Channel)) -> Ended {
    let listener = listening(&meeting.socket(), 1);
    let consumer = meeting.consumer(&["--json"]).start();
    let mut channel = accepted(&listener);
    serve(&mut channel);
    drop((channel, listener));
    fs::remove_file(meeting.socket()).unwrap();
    consumer.end()
}

#[test]
fn mismatch_counts_after_producer_dies() {
    let meeting = Meeting::host();
    let (offer, memory) = memory(100, 3);
    let check = Claim { salt: Some(4), ..Claim::default() }.to_check();
    let wrong = Offer { check: Some(check), ..offer };
    let ended = command_against(&meeting, |channel| {
        lend(channel, &wrong, memory.as_fd());
        assert!(matches!(answer(channel), (Message::Result(Verdict { verified: false, .. }), _)));
    });
    let report = ended.code(1).json();
    assert_eq!((&report["verified"], &report["mismatches"]), (&false.into(), &25.into()));
}

#[test]
fn command_reports_truncated_descriptors() {
    let meeting = Meeting::host();
    let listener = listening(&meeting.socket(), 1);
    let (offer, memory) = memory(100, 3);
    // The limit is too low to receive the descriptor.
    let run = meeting.consumer(&[]).with_files(16);
    let consumer = run.start();
    let mut channel = accepted(&listener);
    greet(&mut channel);
    channel.send(&Message::Offer(Box::new(offer)), &[]).unwrap();
    let fds = vec![memory.as_fd(); MAX_FDS];
    channel.send(&Message::Segments(Segments { first: 0, sizes: vec![1; MAX_FDS] }), &fds).unwrap();
    assert_eq!(told(&mut channel), ErrorCode::Failed);
    channel.finish(PATIENCE);
    consumer.end().code(5).says("open files are needed, but the limit of this process is 16").says("ulimit -n");
}

#[test]
fn unknown_code_is_shown_by_name() {
    let ended = command_against(&Meeting::host(), |channel| {
        greet(channel);
        let body = r#"{"code":"too_warm","message":"the room"}"#;
        let length = (body.len() as u32).to_le_bytes();
        let record = [b"VMFD\x01\x00\x08\x00", &length[..], &[0; 4], body.as_bytes()].concat();
        rustix::net::send(channel.as_fd(), &record, SendFlags::NOSIGNAL).unwrap();
    });
    let error = &ended.code(4).json()["error"]["message"];
    assert_eq!(error, "the peer reported: the room (too_warm)");
}
