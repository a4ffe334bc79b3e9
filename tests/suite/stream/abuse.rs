//! Peers that break the protocol, by hand.

use nix::{
    fcntl::{FallocateFlags, FcntlArg, SealFlag, fallocate, fcntl},
    unistd::ftruncate,
};
use vmmfd::wire::{self, Busy, Done, End, Format, Hello, Leave, Offer, Ready, Stream, Subscribe};

use super::*;
use crate::{
    broker_descriptors::Lingering,
    conversation::{accepted, answer, dial, listening, request, told},
};

cases! {
    on crate::support::Subject; every backend: [
    wrong_returns_end_the_subscription,
    wrong_joins_are_refused,
    wrong_publications_end_the_session,
    floods_do_not_block,
    wrong_words_are_refused,
    endless_joins_end,
    connection_floods_exclude_nobody,
    blocking_descriptors_are_not_received,
    unknown_returns_are_limited,
    error_keeps_buffers,
    ]
}

fn hello(subject: &Subject, capabilities: &[&str]) -> Message {
    let (backend, capabilities) = (subject.driver.backend().to_string(), capabilities.iter().map(ToString::to_string));
    let capabilities = capabilities.collect();
    Message::Hello(Hello { version: 1, capabilities, backend, pid: 1, timeout_ms: 20_000 })
}

fn subscription(held: u64) -> Message {
    Message::Subscribe(Subscribe { policy: wire::Policy::Latest, queue: None, held, history: 0 })
}

fn done(number: u64) -> Message {
    Message::Done(Done { number, done_at: None })
}

/// Connects and subscribes by hand, and maps nothing.
fn by_hand(subject: &Subject, stage: &Stage, held: u64) -> Channel {
    let mut channel = dial(&stage.path);
    channel.send(&hello(subject, &["stream"]), &[]).unwrap();
    assert!(matches!(answer(&mut channel).0, Message::Hello(hello) if hello.capabilities == ["stream"]));
    channel.send(&subscription(held), &[]).unwrap();
    let (Message::Stream(stream), words) = answer(&mut channel) else { panic!() };
    assert_eq!(
        (stream.turns.is_some(), words.len()),
        (subject.kind != Kind::Host, usize::from(subject.kind != Kind::Host))
    );
    assert_eq!((stream.epoch, stream.size, stream.deadline_ms), (stage.publisher.epoch(), Some(16), None));
    let (Message::Offer(offer), _) = answer(&mut channel) else { panic!() };
    assert_eq!((offer.access, offer.part.map(|part| part.segments)), (ReadOnly, Some(1)));
    let (Message::Segments(segments), fds) = answer(&mut channel) else { panic!() };
    assert_eq!((segments.sizes.len(), fds.len()), (1, 1));
    // It may work for as long as it says so.
    channel.send(&Message::Busy(Busy {}), &[]).unwrap();
    channel.send(&Message::Received(wire::Received { segments: 1 }), &[]).unwrap();
    assert_eq!(answer(&mut channel).0, Message::Format(Format { arrays: Vec::new(), length: None }));
    stage.until(|event| matches!(event, Event::Joined(_)));
    channel
}

fn number(channel: &mut Channel) -> u64 {
    match answer(channel).0 {
        Message::Ready(ready) => ready.number,
        other => panic!("{other:?}"),
    }
}

fn wrong_returns_end_the_subscription(subject: Subject) {
    // With turns, it is a turn that never comes.
    let has_turns = subject.kind != Kind::Host;
    let without_turns = if has_turns { done(0) } else { Message::Done(Done { number: 1, done_at: Some(1) }) };
    let wrong: [&[Message]; 7] = [
        &[done(1), done(1)],
        &[done(3)],
        &[done(0)],
        &[without_turns],
        &[Message::Busy(Busy {})],
        &[subscription(1)],
        &[Message::End(End { published: 2 })],
    ];
    for wrong in wrong {
        let stage = Stage::fixed(&subject, 6);
        let healthy = stage.join(&subject, SubscribeOptions::default());
        let mut channel = by_hand(&subject, &stage, 2);
        (1..=3).for_each(|byte| {
            stage.publish(byte);
            drop(take(&healthy));
        });
        assert_eq!([number(&mut channel), number(&mut channel)], [1, 2]);
        wrong.iter().for_each(|message| channel.send(message, &[]).unwrap());
        stage.until(|event| matches!(event, Event::Left { orderly: false, .. }));
        let mut held = 2 - usize::from(wrong[0] == done(1));
        while matches!(channel.receive("for the error").unwrap().0, Message::Ready(_)) {
            held += 1;
        }
        stage.publish(4);
        assert_eq!(take(&healthy).number(), 4, "the others go on");
        // What it has not given back stays out of use, until it gives it back.
        let out = || stage.stats().subscribers.iter().map(|usage| usage.buffers).sum::<usize>();
        wait_for("the buffers of the healthy one", || (1..=2).contains(&out()));
        channel.send(&done(2), &[]).unwrap();
        // With its last buffer, the publisher closes the connection.
        if held > 1 {
            channel.send(&Message::Leave(Leave { held: vec![] }), &[]).unwrap();
        }
        stage.until_free(6);
    }
}

fn wrong_joins_are_refused(subject: Subject) {
    let stage = Stage::fixed(&subject, 4);
    let tell = |messages: &[Message]| {
        let mut channel = dial(&stage.path);
        messages.iter().for_each(|message| channel.send(message, &[]).unwrap());
        loop {
            match answer(&mut channel).0 {
                Message::Hello(_) | Message::Stream(_) | Message::Offer(_) | Message::Segments(_) => {}
                Message::Error(failure) => return failure.code,
                other => panic!("{other:?}"),
            }
        }
    };
    let ours = || hello(&subject, &["stream"]);
    let received = |segments| Message::Received(wire::Received { segments });
    assert_eq!(tell(&[subscription(1)]), ErrorCode::Protocol);
    assert_eq!(tell(&[ours(), ours()]), ErrorCode::Protocol);
    assert_eq!(tell(&[ours(), Message::Busy(Busy {})]), ErrorCode::Protocol);
    assert_eq!(tell(&[hello(&subject, &[]), subscription(1)]), ErrorCode::Protocol);
    assert_eq!(tell(&[ours(), request("default", None)]), ErrorCode::Object);
    assert_eq!(tell(&[ours(), subscription(3)]), ErrorCode::Full);
    assert_eq!(tell(&[ours(), subscription(1), received(2)]), ErrorCode::Protocol);
    assert_eq!(tell(&[ours(), subscription(1), done(1)]), ErrorCode::Protocol);
    let mut other = hello(&subject, &["stream"]);
    if let Message::Hello(hello) = &mut other {
        hello.backend = "moon".to_owned();
    }
    assert_eq!(tell(&[other, subscription(1)]), ErrorCode::Backend);
    // The room of all of them is free again; many that say nothing exclude nobody.
    let silent: Vec<_> = (0..300).map(|_| dial(&stage.path)).collect();
    stage.join(&subject, SubscribeOptions::default().held(2));
    drop(silent);
    // A connection that does not join in time is refused.
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let config = Config::default().timeout(SHORT);
    let publisher = Publisher::create(&subject.device(), &PublishOptions::fixed(16, 4), &config).unwrap();
    publisher.listen(&path).unwrap();
    assert_eq!(told(&mut dial(&path)), ErrorCode::Timeout);
}

fn connection_floods_exclude_nobody(subject: Subject) {
    let stage = Stage::fixed(&subject, 6);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                drop(crate::conversation::raw(&stage.path));
            }
        });
        let joined = (0..20).filter(|_| subscribe(&subject, &stage.path, &SubscribeOptions::default()).is_ok()).count();
        stop.store(true, Ordering::Relaxed);
        assert_eq!(joined, 20);
    });
}

/// A record with descriptors whose close blocks was sent before the publisher could refuse descriptors.
fn blocking_descriptors_are_not_received(subject: Subject) {
    let publisher = Publisher::create(&subject.device(), &PublishOptions::fixed(16, 4), &Config::default()).unwrap();
    let mut kept = Vec::new();
    for joins in [false, true] {
        let (ours, theirs) = Channel::socket_pair().unwrap();
        let peer = Raw::over(theirs).unwrap();
        let join = [hello(&subject, &["stream"]), subscription(1), Message::Received(wire::Received { segments: 1 })];
        join.iter().filter(|_| joins).for_each(|message| peer.send_bytes(&message.encode().unwrap(), &[]).unwrap());
        let mut blocking = Lingering::new(2);
        blocking.send(&peer, &done(1).encode().unwrap());
        publisher.admit(ours).unwrap();
        if joins {
            wait_for("the end", || matches!(publisher.event(), Some(Event::Left { orderly: false, .. })));
        }
        let mut peer = Channel::new(peer.0.into(), LIMIT, &Cancel::new().unwrap()).unwrap();
        let failure = loop {
            match answer(&mut peer).0 {
                Message::Error(failure) => break failure,
                Message::Hello(_)
                | Message::Stream(_)
                | Message::Offer(_)
                | Message::Segments(_)
                | Message::Format(_) => assert!(joins),
                other => panic!("{other:?}"),
            }
        };
        assert!(failure.message.contains("no descriptors"), "{failure:?}");
        publish(&publisher, 1);
        kept.push(blocking);
    }
    // A kernel since Linux 6.16 refuses them from then on.
    let (ours, theirs) = Channel::socket_pair().unwrap();
    publisher.admit(ours).unwrap();
    let (peer, file) = (Raw::over(theirs).unwrap(), File::open("/dev/null").unwrap());
    if let Err(error) = peer.send_bytes(&hello(&subject, &[]).encode().unwrap(), &[file.as_fd()]) {
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
    }
    drop(publisher);
}

fn unknown_returns_are_limited(subject: Subject) {
    let stage = Stage::fixed(&subject, 6);
    let mut channel = by_hand(&subject, &stage, 2);
    stage.publish_all(1..=2);
    channel.send(&Message::Leave(Leave { held: vec![1] }), &[]).unwrap();
    stage.until(|event| matches!(event, Event::Left { orderly: true, .. }));
    // It still has a buffer, and its connection. Then it never stops.
    wait_for("the end of the connection", || channel.send(&done(7), &[]).is_err());
    stage.publish(3);
    assert_eq!(stage.stats().free, 5, "its process may still read the buffer");
}

/// A subscriber that fails may still read what it was given.
fn error_keeps_buffers(subject: Subject) {
    let stage = Stage::fixed(&subject, 6);
    let mut channel = by_hand(&subject, &stage, 2);
    stage.publish_all(1..=2);
    channel.send(&Message::Error(wire::Failure { code: ErrorCode::Failed, message: "broken".into() }), &[]).unwrap();
    stage.until(|event| matches!(event, Event::Left { orderly: false, .. }));
    assert_eq!(stage.stats().free, 4);
    channel.send(&done(2), &[]).unwrap();
    stage.until_free(5);
    channel.send(&done(1), &[]).unwrap();
    stage.until_free(6);
}

/// Offers one segment. The subscriber may have refused the words before it.
fn send_pool(channel: &mut Channel, memory: &Shared, size: u64) {
    let (part, chunks) = memory.chunks(0..size).unwrap().unwrap();
    let offer = Offer {
        object: "default".into(),
        memory: (&memory.describe().unwrap()).into(),
        array: None,
        access: ReadOnly,
        part: Some(part),
        check: None,
    };
    channel.send(&Message::Offer(Box::new(offer)), &[]).unwrap();
    let segments = wire::Segments { first: 0, sizes: vec![chunks[0].size()] };
    let _ = channel.send(&Message::Segments(segments), &[chunks[0].as_fd()]);
}

/// A publisher by hand, with a pool of 100 bytes, and its subscriber.
fn liar(subject: &Subject, held: u16) -> (Channel, Subscriber, Arc<Shared>) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let listener = listening(&path, 1);
    let memory = Arc::new(Shared::create(&subject.device(), Spec::vmm(100)).unwrap());
    let options = SubscribeOptions::default().held(held);
    thread::scope(|scope| {
        let subscriber = scope.spawn(|| subscribe(subject, &path, &options).unwrap());
        let mut channel = accepted(&listener);
        assert!(matches!(answer(&mut channel).0, Message::Hello(hello) if hello.capabilities == ["stream"]));
        channel.send(&hello(subject, &["stream"]), &[]).unwrap();
        assert_eq!(answer(&mut channel).0, subscription(held.into()));
        let stream = Stream { epoch: 7, size: Some(50), deadline_ms: None, turns: None };
        channel.send(&Message::Stream(stream), &[]).unwrap();
        send_pool(&mut channel, &memory, 100);
        assert_eq!(answer(&mut channel).0, Message::Received(wire::Received { segments: 1 }));
        channel.send(&Message::Format(Format { arrays: Vec::new(), length: None }), &[]).unwrap();
        (channel, subscriber.join().unwrap(), memory)
    })
}

fn ready(number: u64, offset: u64) -> Ready {
    Ready { number, time: 1, offset, size: None, user: None, ready_at: None }
}

fn wrong_publications_end_the_session(subject: Subject) {
    let user = |user: &str| Message::Ready(Ready { user: Some(user.to_owned()), ..ready(1, 0) });
    let size = |size| Message::Ready(Ready { size: Some(size), ..ready(1, 1) });
    let good = |number| Message::Ready(ready(number, 0));
    let wrong: [&[Message]; 9] = [
        &[good(0)],
        &[good(2), good(2)],
        &[good(2), good(1)],
        &[Message::Ready(ready(1, 51))],
        &[size(100), good(2)],
        &[size(u64::MAX), good(2)],
        &[user("0g")],
        &[Message::Ready(Ready { ready_at: Some(1), ..ready(1, 0) })],
        &[Message::Busy(Busy {})],
    ];
    let fails = |mut channel: Channel, subscriber: Subscriber| {
        let mut samples = Vec::new();
        let error = loop {
            match subscriber.receive(LIMIT) {
                Ok(Received::Sample(sample)) => samples.push(sample),
                other => break other,
            }
        };
        assert!(matches!(error, Err(Error::Peer(PeerError::Protocol(_)))), "{error:?}");
        assert_eq!(told(&mut channel), ErrorCode::Protocol);
        misused(subscriber.try_receive(), "the session has ended");
    };
    for wrong in wrong {
        let (mut channel, subscriber, _memory) = liar(&subject, 2);
        wrong.iter().for_each(|message| channel.send(message, &[]).unwrap());
        fails(channel, subscriber);
    }
    // More than it may hold.
    let (mut channel, subscriber, _memory) = liar(&subject, 2);
    (1..=3).for_each(|number| channel.send(&good(number), &[]).unwrap());
    fails(channel, subscriber);
    // A blob that its owner can change.
    let (mut channel, subscriber, memory) = liar(&subject, 2);
    let (_, chunks) = memory.chunks(0..100).unwrap().unwrap();
    let length = Some(chunks[0].size()).filter(|size| *size <= 65_536).unwrap_or(65_536);
    let format = Format { arrays: Vec::new(), length: Some(length) };
    channel.send(&Message::Format(format), &[chunks[0].as_fd()]).unwrap();
    fails(channel, subscriber);
}

/// A publisher that is always busy.
fn endless_joins_end(subject: Subject) {
    let config = Config::default().timeout(Duration::from_millis(100));
    let join = || {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let listener = listening(&path, 1);
        let options = SubscribeOptions::default();
        thread::scope(|scope| {
            let joining = scope.spawn(|| Subscriber::connect(&subject.driver, None, &path, &options, &config));
            let mut channel = accepted(&listener);
            answer(&mut channel);
            channel.send(&hello(&subject, &["stream"]), &[]).unwrap();
            while channel.send(&Message::Busy(Busy {}), &[]).is_ok() && !joining.is_finished() {
                thread::sleep(Duration::from_millis(1));
            }
            joining.join().unwrap()
        })
    };
    // On a busy machine, the publisher may be silent for the timeout.
    wait_for("the end of a join", || match join() {
        Err(Error::Peer(PeerError::TurnTooLong { .. })) => true,
        Err(Error::Peer(PeerError::Timeout { .. })) => false,
        other => panic!("{other:?}"),
    });
}

fn wrong_words_are_refused(subject: Subject) {
    let (reader, _writer) = io::pipe().unwrap();
    let memory = Shared::create(&subject.device(), Spec::vmm(8192)).unwrap();
    let (_, chunks) = memory.chunks(0..8192).unwrap().unwrap();
    let unsealed = File::from(memfd_create(c"unsealed", MFdFlags::MFD_CLOEXEC).unwrap());
    unsealed.set_len(8192).unwrap();
    // With final seals, this side can't prevent holes.
    let is_final = memfd_create(c"final", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING).unwrap();
    ftruncate(&is_final, 8192).unwrap();
    fallocate(&is_final, FallocateFlags::empty(), 0, 8192).unwrap();
    let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
    fcntl(&is_final, FcntlArg::F_ADD_SEALS(seals)).unwrap();
    let wrongs = [reader.into(), chunks[0].as_fd().try_clone_to_owned().unwrap(), unsealed.into(), is_final];
    for wrong in wrongs {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let listener = listening(&path, 1);
        thread::scope(|scope| {
            let subscriber = scope.spawn(|| subscribe(&subject, &path, &SubscribeOptions::default()));
            let mut channel = accepted(&listener);
            answer(&mut channel);
            channel.send(&hello(&subject, &["stream"]), &[]).unwrap();
            answer(&mut channel);
            let stream = Stream { epoch: 7, size: Some(50), deadline_ms: None, turns: Some(256) };
            channel.send(&Message::Stream(stream), &[wrong.as_fd()]).unwrap();
            send_pool(&mut channel, &memory, 8192);
            assert_eq!(told(&mut channel), ErrorCode::Protocol);
            assert!(matches!(subscriber.join().unwrap(), Err(Error::Peer(PeerError::Protocol(_)))));
        });
    }
}

fn floods_do_not_block(subject: Subject) {
    let (mut channel, subscriber, _memory) = liar(&subject, 1);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let stop = &stop;
        scope.spawn(move || {
            let format = Message::Format(Format { arrays: Vec::new(), length: None });
            while !stop.load(Ordering::Relaxed) && channel.send(&format, &[]).is_ok() {}
        });
        for _ in 0..100 {
            assert!(subscriber.try_receive().unwrap().is_none());
        }
        assert!(is_timeout(&subscriber.receive(SHORT)));
        stop.store(true, Ordering::Relaxed);
        drop(subscriber);
    });
}
