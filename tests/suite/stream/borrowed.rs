//! Pool memory and legacy memory: the owner must free them last.

use super::*;

cases! {
    on crate::support::Subject; gpus alone: [
    buffers_of_a_pool_share_it,
    pool_returns_after_a_slow_withdrawal,
    producer_waits_for_borrowed_memory,
    unclosed_borrowed_memory_stays_allocated,
    legacy_memory_is_streamed,
    ]
}

/// A stream of one pool buffer, which the consumer holds. The publisher owns the only reference to the memory.
fn borrowing(subject: &Subject, place: &Place) -> (Publisher, Subscriber, Received) {
    let (mut publisher, mut subscriber) = place.meet(subject, 1);
    let memory = Arc::new(Shared::create(&subject.device(), Spec::pool(100)).unwrap());
    let id = publisher.add(&memory, None, ReadWrite).unwrap();
    memory.copy_in(0, b"there").unwrap();
    let received = hand_over(&mut publisher, &mut subscriber, id);
    (publisher, subscriber, received)
}

fn buffers_of_a_pool_share_it(subject: Subject) {
    let pool = Pool::create(&subject.device()).unwrap();
    let (mut publisher, mut subscriber) = Place::new().meet(&subject, 2);
    let memory: Vec<Arc<Shared>> = (0..3).map(|_| Arc::new(Shared::in_pool(&pool, 100).unwrap())).collect();
    let ids: Vec<BufferId> = memory.iter().map(|memory| publisher.add(memory, None, ReadWrite).unwrap()).collect();
    let imports = |turn: &mut dyn FnMut()| {
        subject.faulty.take_verbs();
        turn();
        subject.faulty.take_verbs().iter().filter(|verb| **verb == "pool import").count()
    };
    // The third buffer displaces the first, and the pool remains imported.
    for (round, index, pools) in [(0u8, 0, 1), (1, 1, 0), (2, 1, 0), (3, 2, 0), (4, 0, 0)] {
        memory[index].copy_in(0, &[round; 9]).unwrap();
        let imported = imports(&mut || {
            let received = hand_over(&mut publisher, &mut subscriber, ids[index]);
            assert_eq!((read(&received, 0), received.is_protected()), ([round; 9], false));
            subscriber.give_back(received).unwrap();
            publisher.take_back().unwrap();
        });
        assert_eq!((imported, subscriber.held().min(2)), (pools, subscriber.held()), "round {round}");
    }
    // Without any of its buffers the pool is released, and later imported again.
    let live = subject.faulty.taken();
    let in_use = hand_over(&mut publisher, &mut subscriber, ids[0]);
    thread::scope(|scope| {
        scope.spawn(|| {
            subscriber.give_back(in_use).unwrap();
            until_held(&mut subscriber, 0);
        });
        publisher.withdraw(ids[0]).unwrap();
        publisher.withdraw(ids[2]).unwrap();
    });
    assert_eq!((subject.faulty.taken().0, subject.faulty.taken().1), (live.0 - 2, live.1 - 1));
    assert_eq!(imports(&mut || turn(&mut publisher, &mut subscriber, ids[1])), 1);

    // The announced pool is missing, or has another number.
    let mut liar = Liar::new(&subject);
    let description = memory[1].describe().unwrap();
    let offer = Offer { memory: (&description).into(), part: None, ..liar.offer.clone() };
    liar.offer(&offer);
    let ready = Ready { buffer: 4, generation: 1, sizes: Vec::new() };
    liar.channel.send(&Message::Ready(ready), &[]).unwrap();
    let number = offer.memory.pool.unwrap() + 1;
    liar.channel.send(&Message::Pool(PoolNumber { pool: number }), &[pool.export().unwrap()]).unwrap();
    liar.found_out("another pool");
}

fn pool_returns_after_a_slow_withdrawal(subject: Subject) {
    let place = Place::with_timeout(moment(&subject, 2000));
    let pool = Pool::create(&subject.device()).unwrap();
    let (mut publisher, mut subscriber) = place.meet(&subject, 2);
    let memory = [100, 200].map(|size| Arc::new(Shared::in_pool(&pool, size).unwrap()));
    let [a, b] = memory.each_ref().map(|memory| publisher.add(memory, None, ReadOnly).unwrap());
    let in_use = hand_over(&mut publisher, &mut subscriber, a);
    assert!(matches!(publisher.withdraw(a), Err(Error::Peer(PeerError::Timeout { .. }))), "it is in use");
    assert!(subscriber.try_receive().unwrap().is_none());
    // The producer has not yet received `gone`.
    subscriber.give_back(in_use).unwrap();
    assert_eq!(subscriber.held(), 0);
    let received = hand_over(&mut publisher, &mut subscriber, b);
    subscriber.give_back(received).unwrap();
    publisher.withdraw(a).unwrap();
    assert_eq!(publisher.take_back().unwrap(), b);
}

fn producer_waits_for_borrowed_memory(subject: Subject) {
    const A_WHILE: Duration = Duration::from_millis(100);
    let place = Place::new();
    // A subscriber that waits for a buffer releases its memory at once, although it is not dropped.
    let (publisher, mut subscriber, received) = borrowing(&subject, &place);
    subscriber.give_back(received).unwrap();
    let begun = Instant::now();
    thread::scope(|scope| {
        scope.spawn(|| publisher.close());
        assert!(matches!(subscriber.receive(), Err(Error::Peer(PeerError::Gone { .. }))));
    });
    assert!(begun.elapsed() < PATIENCE / 2);
    subject.assert_empty();
    // The producer waits for a buffer in use, even after the subscriber was dropped.
    for ends in [true, false] {
        let (publisher, subscriber, received) = borrowing(&subject, &place);
        let subscriber = Some(subscriber).filter(|_| !ends);
        let begun = Instant::now();
        thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(A_WHILE);
                assert_eq!(read(&received, 0), *b"there");
                drop((received, subscriber));
            });
            publisher.close();
            assert!(begun.elapsed() >= A_WHILE, "{:?}", begun.elapsed());
        });
        subject.assert_empty();
    }
}

fn unclosed_borrowed_memory_stays_allocated(subject: Subject) {
    let place = Place::with_timeout(moment(&subject, 1000));
    let (publisher, subscriber, received) = borrowing(&subject, &place);
    let begun = Instant::now();
    publisher.close();
    assert!(begun.elapsed() >= place.config.timeout);
    assert_eq!(read(&received, 0), *b"there");
    drop((received, subscriber));
    // The memory remains allocated until the process exits.
    let (blocks, pools, _) = subject.faulty.taken();
    assert_eq!((blocks, pools), (1, 1));
    subject.forget();
}

fn legacy_memory_is_streamed(subject: Subject) {
    let name = if subject.kind == Kind::Fake { "fake" } else { "cuda" };
    let test = format!("stream::borrowed::{name}::legacy_memory_is_streamed");
    let place = Place::new();
    const ROUNDS: u8 = 6;
    thread::scope(|scope| {
        let (path, subject) = (place.path(), &subject);
        let consumer = scope.spawn(move || {
            let prepare = |command: &mut Command| {
                command.env("STREAM", path);
            };
            in_child(&test, prepare, || {
                let config = Config::default().timeout(PATIENCE);
                let path = PathBuf::from(env::var_os("STREAM").unwrap());
                let mut subscriber = Subscriber::connect(&subject.driver, None, &path, 1, &config).unwrap();
                let mut seen = Vec::new();
                for _ in 0..ROUNDS {
                    let received = subscriber.receive().unwrap();
                    assert!(!received.is_protected());
                    seen.extend(read::<1>(&received, 0));
                    received.copy_in(1, &[!seen[seen.len() - 1]]).unwrap();
                    subscriber.give_back(received).unwrap();
                }
                let end = subscriber.receive();
                assert!(matches!(end, Err(Error::Peer(PeerError::Gone { .. }))), "{end:?}");
                assert_eq!(subscriber.held(), 0);
                format!("{seen:?}")
            })
        });
        let mut publisher = place.accept(subject).unwrap();
        let memory = [(); 2].map(|()| Arc::new(Shared::create(&subject.device(), Spec::legacy(100)).unwrap()));
        let ids = memory.each_ref().map(|memory| publisher.add(memory, None, ReadWrite).unwrap());
        for round in 0..ROUNDS {
            // Each buffer has two turns in a row, and the bound is one buffer.
            let index = usize::from(round / 2) % 2;
            memory[index].copy_in(0, &[round]).unwrap();
            publisher.publish(ids[index]).unwrap();
            assert_eq!(publisher.take_back().unwrap(), ids[index]);
            assert_eq!(read(&*memory[index], 1), [!round]);
        }
        // The producer does not wait for a consumer that leaves.
        let begun = Instant::now();
        publisher.close();
        assert!(begun.elapsed() < PATIENCE / 2);
        assert_eq!(consumer.join().unwrap(), "[0, 1, 2, 3, 4, 5]");
    });
}
