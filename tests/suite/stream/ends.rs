//! Publishers and subscribers that leave, wait, fail or misuse a stream.

use super::*;

cases! {
    on crate::support::Subject; every backend: [
    buffer_in_use_survives_its_producer,
    producer_learns_that_consumer_left,
    busy_producer_does_not_prolong_receive,
    timeouts_do_not_end_the_session,
    nonblocking_calls_return_none,
    misuse_is_refused_and_changes_nothing,
    failed_work_is_not_reported_done,
    failure_at_any_call_leaves_nothing,
    ]
}

/// Publisher and subscriber of a stream with two buffers, and all operations that a failure could interrupt.
fn everything(subject: &Subject, device: &Device, place: &Place) -> Result<()> {
    // If one side fails before the connection, cancel the other side's wait.
    let alone = |_: &Error| place.cancel.cancel(CancelReason::Program);
    let vmm = Spec::vmm(1).into();
    let specs = if subject.kind == Kind::Host { vec![vmm] } else { vec![vmm, Spec::pool(1)] };
    let memory = |spec: Spec| Shared::create(device, spec).map(Arc::new);
    let consume = || -> Result<()> {
        let mut subscriber = place.subscribe(subject, 1).inspect_err(alone)?;
        for _ in 0..3 * specs.len() {
            let received = subscriber.receive()?;
            subscriber.give_back(received)?;
        }
        drop(subscriber.receive()?);
        match subscriber.receive() {
            Err(Error::Peer(PeerError::Gone { .. })) => Ok(()),
            other => other.map(drop),
        }
    };
    let produce = || -> Result<()> {
        let mut publisher = place.accept(subject).inspect_err(alone)?;
        let mut last = None;
        for &spec in &specs {
            let one = memory(spec)?;
            let two = memory(spec)?;
            let ids = [publisher.add(&one, None, ReadWrite)?, publisher.add(&two, None, ReadWrite)?];
            for id in [ids[0], ids[0], ids[1]] {
                publisher.publish(id)?;
                publisher.take_back()?;
            }
            last = Some(ids[1]);
        }
        publisher.publish(last.expect("a mechanism"))?;
        publisher.withdraw(last.expect("a mechanism"))
    };
    thread::scope(|scope| {
        let consumer = scope.spawn(consume);
        let produced = produce();
        consumer.join().unwrap().and(produced)
    })
}

fn buffer_in_use_survives_its_producer(subject: Subject) {
    let place = Place::new();
    for closed in [true, false] {
        let (mut publisher, mut subscriber) = place.meet(&subject, 4);
        let buffers = buffers(&subject, &mut publisher, 3);
        buffers[0].1.copy_in(0, b"still").unwrap();
        let in_use = hand_over(&mut publisher, &mut subscriber, buffers[0].0);
        turn(&mut publisher, &mut subscriber, buffers[1].0);
        drop(hand_over(&mut publisher, &mut subscriber, buffers[2].0));
        if closed {
            publisher.close();
        } else {
            // Like a killed process: its received messages are never read.
            drop(publisher);
        }
        drop(buffers);
        let gone = subscriber.receive();
        assert!(matches!(gone, Err(Error::Peer(PeerError::Gone { .. }))), "{gone:?}");
        assert_eq!((subscriber.held(), subject.live().mappings), (0, 1));
        assert_eq!(read(&in_use, 0), *b"still", "what is in use stays");
        refused(subscriber.receive(), "the session has ended");
        refused(subscriber.give_back(in_use), "the session has ended");
        subject.assert_empty();
    }
}

fn producer_learns_that_consumer_left(subject: Subject) {
    let place = Place::new();
    let memory = memory(&subject, 100);
    for closed in [true, false] {
        let own = subject.live();
        let (mut publisher, mut subscriber) = place.meet(&subject, 2);
        let id = publisher.add(&memory, None, ReadOnly).unwrap();
        let received = hand_over(&mut publisher, &mut subscriber, id);
        if closed {
            subscriber.close();
            drop(received);
        } else {
            drop((received, subscriber));
        }
        assert_eq!(subject.live(), own);
        let gone = publisher.take_back();
        assert!(matches!(gone, Err(Error::Peer(PeerError::Gone { .. }))), "{gone:?}");
        refused(publisher.take_back(), "the session has ended");
        refused(publisher.publish(id), "the session has ended");
        refused(publisher.withdraw(id), "the session has ended");
    }
    // The same without a prior read.
    let (mut publisher, mut subscriber) = place.meet(&subject, 2);
    let id = publisher.add(&memory, None, ReadOnly).unwrap();
    turn(&mut publisher, &mut subscriber, id);
    drop(subscriber);
    // A forked child of another test may keep the socket open until it calls exec.
    let told = publisher.publish(id).and_then(|_| publisher.take_back());
    assert!(matches!(told, Err(Error::Peer(PeerError::Gone { .. }))), "{told:?}");
}

fn busy_producer_does_not_prolong_receive(subject: Subject) {
    let place = Place::with_timeout(moment(&subject, 500));
    let (publisher, mut subscriber) = place.meet(&subject, 1);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let (stop, memory) = (&stop, memory(&subject, 1));
        scope.spawn(move || {
            let mut publisher = publisher;
            while !stop.load(Ordering::Relaxed) {
                let Ok(id) = publisher.add(&memory, None, ReadOnly) else { break };
                let Ok(()) = publisher.withdraw(id) else { break };
            }
        });
        for _ in 0..2 {
            let waited = subscriber.receive();
            assert!(
                matches!(waited, Err(Error::Peer(PeerError::Timeout { purpose: "for a buffer", .. }))),
                "{waited:?}"
            );
        }
        stop.store(true, Ordering::Relaxed);
        drop(subscriber);
    });
}

fn timeouts_do_not_end_the_session(subject: Subject) {
    let place = Place::with_timeout(moment(&subject, 600));
    assert!(matches!(place.accept(&subject), Err(Error::Peer(PeerError::NoConsumer { .. }))));
    let (mut publisher, mut subscriber) = place.meet(&subject, 2);
    let id = buffers(&subject, &mut publisher, 1)[0].0;
    for generation in 1..3 {
        thread::scope(|scope| {
            let taken = scope.spawn(|| publisher.take_back());
            let received = subscriber.receive();
            assert!(matches!(received, Err(Error::Peer(PeerError::Timeout { purpose: "for a buffer", .. }))));
            assert!(matches!(taken.join().unwrap(), Err(Error::Peer(PeerError::Timeout { .. }))));
        });
        let received = hand_over(&mut publisher, &mut subscriber, id);
        assert_eq!(received.generation(), generation);
        assert!(matches!(publisher.take_back(), Err(Error::Peer(PeerError::Timeout { .. }))));
        subscriber.give_back(received).unwrap();
        assert_eq!(publisher.take_back().unwrap(), id);
    }
    let received = hand_over(&mut publisher, &mut subscriber, id);
    for _ in 0..2 {
        assert!(matches!(publisher.withdraw(id), Err(Error::Peer(PeerError::Timeout { .. }))), "it is in use");
        refused(publisher.publish(id), "is being withdrawn");
    }
    assert!(subscriber.try_receive().unwrap().is_none());
    subscriber.give_back(received).unwrap();
    publisher.withdraw(id).unwrap();
    assert_eq!(subscriber.held(), 0);
}

fn nonblocking_calls_return_none(subject: Subject) {
    let (mut publisher, mut subscriber, ids) = stream(&subject, 1, 1);
    let id = ids[0];
    let readable = |fd: BorrowedFd<'_>| {
        let mut fds = [nix::poll::PollFd::new(fd, nix::poll::PollFlags::POLLIN)];
        nix::poll::poll(&mut fds, nix::poll::PollTimeout::ZERO).unwrap() == 1
    };
    assert!(subscriber.try_receive().unwrap().is_none() && publisher.try_take_back().unwrap().is_none());
    turn(&mut publisher, &mut subscriber, id);
    assert!(!readable(subscriber.as_fd()) && !readable(publisher.as_fd()));
    publisher.publish(id).unwrap();
    assert!(readable(subscriber.as_fd()) && !readable(publisher.as_fd()));
    let received = subscriber.try_receive().unwrap().unwrap();
    subscriber.give_back(received).unwrap();
    assert!(!readable(subscriber.as_fd()) && readable(publisher.as_fd()));
    assert_eq!(publisher.try_take_back().unwrap(), Some(id));
}

fn misuse_is_refused_and_changes_nothing(subject: Subject) {
    let place = Place::new();
    refused(place.subscribe(&subject, 0), "at least one buffer");
    let ((mut publisher, mut subscriber), (mut other_publisher, mut other)) =
        (place.meet(&subject, 2), place.meet(&subject, 2));
    let (id, memory) = buffers(&subject, &mut publisher, 1).remove(0);
    let ids = buffers(&subject, &mut publisher, 1);
    let (_, mut third) = place.meet(&subject, 1);
    let unknown = {
        let (mut publisher, _subscriber) = place.meet(&subject, 1);
        let mut all = buffers(&subject, &mut publisher, 3);
        all.remove(2).0
    };
    refused(publisher.publish(unknown), "buffer 2 belongs to another session");
    refused(publisher.withdraw(unknown), "buffer 2 belongs to another session");
    assert!(!publisher.is_out(unknown));
    // A foreign buffer whose number is also a number in this session.
    let foreign = buffers(&subject, &mut other_publisher, 1)[0].0;
    assert!(foreign.number() == id.number() && foreign != id);
    refused(publisher.publish(foreign), "buffer 0 belongs to another session");
    refused(publisher.announce(foreign), "belongs to another session");
    refused(publisher.withdraw(foreign), "belongs to another session");
    assert!(subscriber.try_receive().unwrap().is_none());
    other_publisher.withdraw(foreign).unwrap();

    let received = hand_over(&mut publisher, &mut subscriber, id);
    refused(publisher.publish(id), "is out");
    // A buffer with the same number.
    let theirs = buffers(&subject, &mut other_publisher, 1)[0].0;
    let of_theirs = hand_over(&mut other_publisher, &mut other, theirs);
    assert_ne!(received.id(), of_theirs.id());
    refused(publisher.publish(received.id()), "belongs to another session");
    refused(other.give_back(received), "does not belong to this session");
    assert!(other_publisher.try_take_back().unwrap().is_none());
    other.give_back(of_theirs).unwrap();
    assert!(matches!(third.receive(), Err(Error::Peer(PeerError::Gone { .. }))));
    // The failed call returned the buffer to its own session.
    assert!(subscriber.try_receive().unwrap().is_none());
    assert_eq!(publisher.take_back().unwrap(), id);
    turn(&mut publisher, &mut subscriber, ids[0].0);

    let array = ArrayDescriptor::new(ElementType::U8, [101], Order::C).unwrap();
    let added = publisher.add(&memory, Some(array), ReadOnly);
    assert!(matches!(added, Err(Error::Memory(MemoryError::OutOfRange { .. }))), "{added:?}");
    let sealed = Arc::new(Shared::create(&subject.device(), Spec::vmm(1).sealed()).unwrap());
    assert!(matches!(publisher.add(&sealed, None, ReadOnly), Err(Error::Misuse { .. })), "it is still to be sealed");
    sealing(|| sealed.seal()).unwrap();
    refused(publisher.add(&sealed, None, ReadWrite), "only be published read-only");
    let id = publisher.add(&sealed, None, ReadOnly).unwrap();
    turn(&mut publisher, &mut subscriber, id);
    if subject.kind != Kind::Host {
        let elsewhere = Subject::host();
        refused(publisher.add(&self::memory(&elsewhere, 1), None, ReadOnly), "can't be added to a stream on");
    }
}

fn failed_work_is_not_reported_done(subject: Subject) {
    let (mut publisher, mut subscriber, ids) = stream(&subject, 2, 1);
    let id = ids[0];
    turn(&mut publisher, &mut subscriber, id);
    subject.faulty.fail(Fault::Verb("synchronize"), 4242);
    assert!(matches!(publisher.publish(id), Err(Error::Driver { code: 4242, .. })));
    assert!(!publisher.is_out(id));
    subject.faulty.mend();
    assert!(subscriber.try_receive().unwrap().is_none(), "nothing was sent");
    assert_eq!(publisher.publish(id).unwrap(), 2, "nor counted");
    let received = subscriber.receive().unwrap();
    subject.faulty.fail(Fault::Verb("synchronize"), 4242);
    assert!(matches!(subscriber.give_back(received), Err(Error::Driver { code: 4242, .. })));
    assert!(matches!(subscriber.receive(), Err(Error::Driver { code: 4242, .. })), "it is tried again");
    assert!(publisher.try_take_back().unwrap().is_none());
    subject.faulty.mend();
    assert!(subscriber.try_receive().unwrap().is_none());
    assert_eq!(publisher.take_back().unwrap(), id);
    turn(&mut publisher, &mut subscriber, id);
}

fn failure_at_any_call_leaves_nothing(mut subject: Subject) {
    subject.alone();
    let device = subject.device();
    everything(&subject, &device, &Place::new()).unwrap();
    let failed = subject.fail_each_call(|| everything(&subject, &device, &Place::new()));
    assert!(failed.len() > 20 && failed.contains(&"set_access"), "{failed:?}");
}
