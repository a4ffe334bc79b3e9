//! The table of waits in docs/streams.md: each call with a stopped peer ends at its limit.

use super::{peers::Peer, *};

/// Runs a call that waits for a stopped peer, and asserts that it ends after its limit and not much later.
#[track_caller]
fn bounded<T>(limit: Duration, call: impl FnOnce() -> T) -> T {
    let begun = Instant::now();
    let result = call();
    let took = begun.elapsed();
    assert!(took >= limit && took < limit + LIMIT / 2, "{took:?} with a limit of {limit:?}");
    result
}

#[test]
fn calls_of_a_publisher_are_bounded() {
    let subject = Subject::host();
    let stage = Stage::new(&subject, &PublishOptions::fixed(16, 6).every(LIMIT));
    let peer = Peer::start("every", &stage.path, 0);
    wait_for("a subscriber", || stage.stats().subscribers.len() == 1);
    peer.stop();
    stage.publish_all(1..=3);
    assert!(is_timeout(&bounded(SHORT, || stage.publisher.loan(SHORT))));
    bounded(Duration::ZERO, || assert!(stage.publisher.try_loan().unwrap().is_none()));
    bounded(Duration::ZERO, || stage.stats());
    bounded(Duration::ZERO, || while stage.publisher.event().is_some() {});
    let id = stage.stats().subscribers[0].subscriber.id;
    bounded(Duration::ZERO, || assert!(stage.publisher.evict(id).unwrap()));
    bounded(Duration::ZERO, || stage.publish(4));
    let stats = bounded(Duration::ZERO, || stage.publisher.finish(SHORT).unwrap());
    assert_eq!((stats.published, stats.subscribers[0].buffers), (4, 2));
}

#[test]
fn finish_is_bounded() {
    let subject = Subject::host();
    let stage = Stage::fixed(&subject, 6);
    let peer = Peer::start("latest", &stage.path, 0);
    wait_for("a subscriber", || stage.stats().subscribers.len() == 1);
    peer.stop();
    stage.publish_all(1..=4);
    let stats = bounded(SHORT, || stage.publisher.finish(SHORT).unwrap());
    assert_eq!(stats.subscribers[0].buffers, 2);
    let mut peer = peer;
    peer.signal(Signal::SIGCONT);
    // What waited is lost, but the stream was finished.
    peer.expect("ended");
}

#[test]
fn calls_of_a_subscriber_are_bounded() {
    let subject = Subject::host();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let peer = Peer::start("publisher", &path, 0);
    let subscriber = subscribe(&subject, &path, &SubscribeOptions::default().held(2)).unwrap();
    let kept = take(&subscriber);
    peer.stop();
    while subscriber.try_receive().unwrap().is_some() {}
    assert!(is_timeout(&bounded(SHORT, || subscriber.receive(SHORT))));
    bounded(Duration::ZERO, || assert!(subscriber.try_receive().unwrap().is_none()));
    bounded(Duration::ZERO, || kept.give_back().unwrap());
    let joined = bounded(SHORT, || {
        let config = Config::default().timeout(SHORT);
        Subscriber::connect(&subject.driver, None, &path, &SubscribeOptions::default(), &config)
    });
    assert!(is_timeout(&joined), "{joined:?}");
    peer.signal(Signal::SIGCONT);
    assert!(subscriber.receive(LIMIT).unwrap().sample().is_some());
    peer.stop();
    bounded(Duration::ZERO, || drop(subscriber));
}

#[test]
fn receivers_take_turns() {
    let subject = Subject::host();
    let stage = Stage::fixed(&subject, 3);
    let subscriber = stage.join(&subject, SubscribeOptions::default());
    thread::scope(|scope| {
        let waiting = scope.spawn(|| subscriber.receive(LIMIT).unwrap().sample().map(|sample| sample.number()));
        thread::sleep(SHORT);
        bounded(Duration::ZERO, || assert!(subscriber.try_receive().unwrap().is_none()));
        assert!(is_timeout(&bounded(SHORT, || subscriber.receive(SHORT))));
        stage.publish(1);
        assert_eq!(waiting.join().unwrap(), Some(1));
    });
}

/// A program's check may wait for a lock that another thread holds while it uses the publisher, such as an interpreter's lock.
#[test]
fn checks_run_without_the_lock() {
    let subject = Subject::host();
    let lock = Arc::new(Mutex::new(()));
    let checked = Arc::clone(&lock);
    let cancel = Cancel::new().unwrap().with_check(move || {
        drop(checked.lock().unwrap());
        false
    });
    let config = Config::default().cancel(&cancel);
    let publisher = Publisher::create(&subject.device(), &PublishOptions::fixed(16, 4), &config).unwrap();
    let _kept = publisher.loan(LIMIT).unwrap();
    thread::scope(|scope| {
        // One waits at the inbox, the others wait for their turn.
        let waiting: Vec<_> = (0..3).map(|_| scope.spawn(|| is_timeout(&publisher.loan(10 * SHORT)))).collect();
        while waiting.iter().any(|thread| !thread.is_finished()) {
            let _held = lock.lock().unwrap();
            thread::sleep(SHORT / 25);
            publisher.stats().unwrap();
        }
        assert!(waiting.into_iter().all(|thread| thread.join().unwrap()));
    });
}
