//! Who receives which buffers, and when they return to the pool.

use std::os::fd::{AsFd, BorrowedFd};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use vmmfd::{channel::Channel, memory::Device};

use super::*;

cases! {
    on crate::support::Subject; every backend: [
    all_subscribers_receive_all_buffers,
    subscribed_means_joined,
    latest_skips_to_the_newest,
    queue_drops_the_oldest,
    loans_wait_for_every,
    several_loans_wait_for_every,
    waiting_loans_do_not_spin,
    history_arrives_at_once,
    joins_beyond_the_pool_are_refused,
    samples_outlive_their_subscriber,
    finish_is_an_end,
    dropped_publisher_is_a_crash,
    eviction_keeps_buffers_until_returned,
    connected_sockets_carry_streams,
    failed_work_is_not_published,
    descriptors_show_what_is_ready,
    misuse_is_refused,
    failure_at_any_call_leaves_nothing,
    ]
}

fn all_subscribers_receive_all_buffers(subject: Subject) {
    let stage = Stage::fixed(&subject, 8);
    let subscribers: Vec<_> = (0..3).map(|_| stage.join(&subject, SubscribeOptions::default().held(2))).collect();
    assert!(subscribers.iter().all(|subscriber| subscriber.epoch() == stage.publisher.epoch()));
    assert_eq!((subscribers[0].buffer_size(), subscribers[0].peer().pid), (Some(16), process::id() as i32));
    let mut last = Duration::ZERO;
    for number in 1..=20 {
        let published = stage.publish(number);
        assert_eq!((published.number, published.delivered), (number.into(), 3));
        for subscriber in &subscribers {
            let sample = take(subscriber);
            assert_eq!((sample.number(), sample.skipped_before(), sample.user()), (number.into(), 0, &[number][..]));
            assert!(sample.published_at() >= last && sample.age() < LIMIT);
            last = sample.published_at();
            thread::spawn(move || drop(sample)).join().unwrap();
        }
    }
    stage.until_free(8);
    let stats = stage.stats();
    assert!(stats.subscribers.iter().all(|usage| (usage.delivered, usage.skipped, usage.buffers) == (20, 0, 0)));
}

/// The first publication after `connect` has returned is received.
fn subscribed_means_joined(subject: Subject) {
    let stage = Stage::fixed(&subject, 3);
    for number in 1..=20 {
        let subscriber = subscribe(&subject, &stage.path, &SubscribeOptions::default()).unwrap();
        assert_eq!(stage.publish(number).delivered, 1);
        assert_eq!(numbers(&subscriber, 1), [(number.into(), 0)]);
        drop(subscriber);
        stage.until(|event| matches!(event, Event::Left { orderly: true, .. }));
    }
}

fn latest_skips_to_the_newest(subject: Subject) {
    let stage = Stage::fixed(&subject, 3);
    let subscriber = stage.join(&subject, SubscribeOptions::default());
    for number in 1..=9 {
        assert_eq!(stage.publish(number).delivered, usize::from(number == 1));
    }
    assert_eq!(numbers(&subscriber, 2), [(1, 0), (9, 7)]);
    // Without another publication or another call.
    assert!(subscriber.try_receive().unwrap().is_none());
    stage.until_free(3);
    assert_eq!(stage.stats().subscribers[0].skipped, 7);
}

fn queue_drops_the_oldest(subject: Subject) {
    let stage = Stage::fixed(&subject, 6);
    let subscriber = stage.join(&subject, SubscribeOptions::default().policy(Policy::Queue(3)).held(1));
    stage.publish_all(1..=9);
    assert_eq!(numbers(&subscriber, 4), [(1, 0), (7, 5), (8, 0), (9, 0)]);
    stage.until_free(6);
}

fn loans_wait_for_every(subject: Subject) {
    let options = PublishOptions::fixed(16, 6).every(LIMIT);
    let stage = Stage::new(&subject, &options);
    let subscriber = stage.join(&subject, SubscribeOptions::default().policy(Policy::Every));
    let other = stage.join(&subject, SubscribeOptions::default());
    stage.publish_all(1..=2);
    assert!(stage.publisher.try_loan().unwrap().is_none(), "one buffer waits for a subscriber that skips none");
    match stage.publisher.loan(SHORT) {
        Err(Error::Peer(PeerError::Starved { size: 16, holders, .. })) => {
            assert_eq!(holders.iter().map(|holder| (holder.buffers, holder.bytes)).collect::<Vec<_>>(), [(1, 16); 2]);
        }
        other => panic!("{other:?}"),
    }
    stage.until(|event| matches!(event, Event::Starved { by } if by.len() == 2));
    thread::scope(|scope| {
        let waiting = scope.spawn(|| stage.publish(3).number);
        thread::sleep(SHORT);
        assert!(!waiting.is_finished());
        assert_eq!(numbers(&subscriber, 1), [(1, 0)]);
        assert_eq!(waiting.join().unwrap(), 3);
    });
    for number in 4..=20 {
        assert_eq!(numbers(&subscriber, 1), [(u64::from(number) - 2, 0)]);
        stage.publish(number);
    }
    assert_eq!(numbers(&other, 2), [(1, 0), (20, 18)]);
}

/// With a loan in the program's hands, too, the subscriber's time runs.
fn several_loans_wait_for_every(subject: Subject) {
    let stage = Stage::new(&subject, &PublishOptions::fixed(16, 6).loans(2).every(SHORT));
    let subscriber = stage.join(&subject, SubscribeOptions::default().policy(Policy::Every));
    stage.publish(1);
    let _kept = stage.publisher.loan(LIMIT).unwrap();
    stage.publish_all(2..=3);
    stage.until(|event| matches!(event, Event::Evicted(_)));
    assert_eq!(numbers(&subscriber, 1), [(1, 0)]);
    reported(subscriber.receive(LIMIT), ErrorCode::Timeout);
}

/// The time of this thread on a CPU.
fn cpu_time() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

fn waiting_loans_do_not_spin(subject: Subject) {
    let stage = Stage::fixed(&subject, 4);
    let _kept = stage.publisher.loan(LIMIT).unwrap();
    assert!(stage.publisher.try_loan().unwrap().is_none());
    let before = cpu_time();
    assert!(is_timeout(&stage.publisher.loan(10 * SHORT)));
    let used = cpu_time() - before;
    assert!(used < 5 * SHORT, "{used:?} of {:?} on a CPU", 10 * SHORT);
}

fn history_arrives_at_once(subject: Subject) {
    let stage = Stage::new(&subject, &PublishOptions::fixed(16, 10).history(3));
    stage.publish_all(1..=5);
    let options = SubscribeOptions::default().policy(Policy::Queue(4)).history(2).held(3);
    let subscriber = stage.join(&subject, options);
    assert_eq!(numbers(&subscriber, 2), [(4, 0), (5, 0)]);
    assert!(subscriber.try_receive().unwrap().is_none());
    let newest = stage.join(&subject, SubscribeOptions::default().history(1));
    assert_eq!(numbers(&newest, 1), [(5, 0)]);
    stage.publish(6);
    assert_eq!([numbers(&subscriber, 1), numbers(&newest, 1)], [[(6, 0)], [(6, 0)]]);
    // Even if it has room for one at a time.
    let latest = stage.join(&subject, SubscribeOptions::default().history(3));
    assert_eq!(numbers(&latest, 3), [(4, 0), (5, 0), (6, 0)]);
    stage.publish_all(7..=9);
    assert_eq!(numbers(&latest, 2), [(7, 0), (9, 1)]);
}

fn joins_beyond_the_pool_are_refused(subject: Subject) {
    let stage = Stage::new(&subject, &PublishOptions::fixed(16, 5).history(1));
    let join = |options: &SubscribeOptions| subscribe(&subject, &stage.path, options);
    let first = stage.join(&subject, SubscribeOptions::default());
    let told = reported(join(&SubscribeOptions::default().held(2)), ErrorCode::Full);
    assert!(told.contains("need 6 buffers, and it has 5"), "{told}");
    let told = reported(join(&SubscribeOptions::default().policy(Policy::Queue(3))), ErrorCode::Full);
    assert!(told.contains("need 6 buffers"), "{told}");
    let told = reported(join(&SubscribeOptions::default().policy(Policy::Every)), ErrorCode::Access);
    assert!(told.contains("the policy `every` is not allowed"), "{told}");
    let _second = stage.join(&subject, SubscribeOptions::default());
    reported(join(&SubscribeOptions::default()), ErrorCode::Full);
    drop(first);
    stage.until(|event| matches!(event, Event::Left { orderly: true, .. }));
    stage.join(&subject, SubscribeOptions::default());
}

fn samples_outlive_their_subscriber(subject: Subject) {
    let stage = Stage::fixed(&subject, 5);
    let subscriber = stage.join(&subject, SubscribeOptions::default().policy(Policy::Queue(2)).held(2));
    stage.publish_all(1..=4);
    let kept = take(&subscriber);
    assert_eq!(subscriber.held(), 1);
    // One more is unread, and two wait.
    drop(subscriber);
    stage.until(|event| matches!(event, Event::Left { orderly: true, .. }));
    stage.until_free(4);
    stage.publish_all(5..=9);
    let mut bytes = [0; 16];
    kept.copy_out(0, &mut bytes).unwrap();
    assert_eq!(bytes, [1; 16]);
    thread::spawn(move || drop(kept)).join().unwrap();
    stage.until_free(5);
    assert_eq!(stage.stats().subscribers, []);
}

fn finish_is_an_end(subject: Subject) {
    let stage = Stage::fixed(&subject, 6);
    let subscriber = stage.join(&subject, SubscribeOptions::default().policy(Policy::Queue(2)));
    stage.publish_all(1..=3);
    let loan = stage.publisher.loan(LIMIT).unwrap();
    let stats = thread::scope(|scope| {
        let finished = scope.spawn(|| stage.publisher.finish(LIMIT).unwrap());
        assert_eq!(numbers(&subscriber, 3), [(1, 0), (2, 0), (3, 0)]);
        finished.join().unwrap()
    });
    assert_eq!((stats.published, stats.subscribers[0].delivered, stats.subscribers[0].buffers), (3, 3, 0));
    for _ in 0..2 {
        assert!(matches!(subscriber.receive(LIMIT).unwrap(), Received::Ended));
        assert!(matches!(subscriber.try_receive().unwrap(), Some(Received::Ended)));
    }
    misused(loan.publish(&[]), "the stream is complete");
}

fn dropped_publisher_is_a_crash(subject: Subject) {
    let stage = Stage::fixed(&subject, 3);
    let subscriber = stage.join(&subject, SubscribeOptions::default());
    stage.publish(7);
    drop(stage);
    let sample = take(&subscriber);
    let own = process::id() as i32;
    for _ in 0..2 {
        assert!(matches!(subscriber.receive(LIMIT).unwrap(), Received::Crashed(peer) if peer.pid == own));
    }
    drop(subscriber);
    assert_eq!(sample.user(), [7], "it remains readable");
}

fn eviction_keeps_buffers_until_returned(subject: Subject) {
    let stage = Stage::new(&subject, &PublishOptions::fixed(16, 5).every(SHORT));
    let subscriber = stage.join(&subject, SubscribeOptions::default().policy(Policy::Every));
    let id = stage.stats().subscribers[0].subscriber.id;
    let kept = {
        stage.publish(1);
        take(&subscriber)
    };
    // The third waits until the subscriber is evicted.
    stage.publish_all(2..=6);
    stage.until(|event| matches!(event, Event::Evicted(subscriber) if subscriber.id == id));
    stage.until_free(4);
    assert!(!stage.stats().subscribers[0].is_subscribed && !stage.publisher.evict(id).unwrap());
    let told = reported(subscriber.receive(LIMIT), ErrorCode::Timeout);
    assert!(told.contains("longer than its turn of 50ms"), "{told}");
    misused(subscriber.receive(LIMIT), "the session has ended");
    drop(kept);
    stage.until_free(5);
    // By the program, without a deadline.
    let other = stage.join(&subject, SubscribeOptions::default());
    assert!(stage.publisher.evict(stage.stats().subscribers[0].subscriber.id).unwrap());
    reported(other.receive(LIMIT), ErrorCode::Timeout);
}

fn connected_sockets_carry_streams(subject: Subject) {
    let options = PublishOptions::fixed(16, 4);
    let publisher = Publisher::create(&subject.device(), &options, &Config::default()).unwrap();
    let (ours, theirs) = Channel::socket_pair().unwrap();
    publisher.admit(ours).unwrap();
    let (options, config) = (SubscribeOptions::default(), Config::default());
    let subscriber = Subscriber::over(theirs, &subject.driver, None, &options, &config).unwrap();
    wait_for("a subscriber", || publisher.stats().unwrap().subscribers.len() == 1);
    publish(&publisher, 9);
    assert_eq!(take(&subscriber).user(), [9]);
    assert!(matches!(
        publisher.admit(File::open("/dev/null").unwrap().into()),
        Err(Error::System { .. } | Error::Socket(_))
    ));
}

fn failed_work_is_not_published(subject: Subject) {
    let stage = Stage::fixed(&subject, 3);
    let subscriber = stage.join(&subject, SubscribeOptions::default());
    let loan = stage.publisher.loan(LIMIT).unwrap();
    subject.faulty.fail(Fault::Verb("synchronize"), 4242);
    assert!(matches!(loan.publish(&[]), Err(Error::Driver { code: 4242, .. })));
    subject.faulty.mend();
    assert!(subscriber.try_receive().unwrap().is_none() && stage.stats().free == 3);
    assert_eq!(stage.publish(1).number, 1);
    let sample = take(&subscriber);
    subject.faulty.fail(Fault::Verb("synchronize"), 4242);
    assert!(matches!(sample.give_back(), Err(Error::Driver { code: 4242, .. })));
    subject.faulty.mend();
    stage.publish(2);
    assert!(subscriber.try_receive().unwrap().is_none(), "the buffer may still be in use");
    assert_eq!((subscriber.held(), stage.stats().free), (1, 1));
    drop(subscriber);
}

fn descriptors_show_what_is_ready(subject: Subject) {
    let readable = |fd: BorrowedFd<'_>| {
        let mut fds = [PollFd::new(fd, PollFlags::POLLIN)];
        poll(&mut fds, PollTimeout::ZERO).unwrap() == 1
    };
    let stage = Stage::new(&subject, &PublishOptions::fixed(16, 4).every(LIMIT));
    let publisher = &stage.publisher;
    assert!(!readable(publisher.as_fd()));
    let subscriber = subscribe(&subject, &stage.path, &SubscribeOptions::default().policy(Policy::Every)).unwrap();
    wait_for("an event", || readable(publisher.as_fd()));
    while publisher.event().is_some() {}
    assert!(!readable(publisher.as_fd()) && !readable(subscriber.as_fd()));
    stage.publish_all(1..=2);
    assert!(readable(subscriber.as_fd()) && publisher.try_loan().unwrap().is_none() && !readable(publisher.as_fd()));
    drop(take(&subscriber));
    // Whichever thread has read the record.
    wait_for("room", || readable(publisher.as_fd()) && publisher.try_loan().unwrap().is_some());
    stage.publish(3);
    assert!(publisher.try_loan().unwrap().is_none());
    drop(take(&subscriber));
    wait_for("room", || readable(publisher.as_fd()) && publisher.try_loan().unwrap().is_some());
}

fn misuse_is_refused(subject: Subject) {
    let create = |options| Publisher::create(&subject.device(), &options, &Config::default());
    misused(create(PublishOptions::fixed(16, 0)), "has no buffer");
    misused(create(PublishOptions::fixed(0, 4)), "has no buffer");
    misused(create(PublishOptions::varying(0)), "has no buffer");
    misused(create(PublishOptions::fixed(u64::MAX, 4)), "has no buffer");
    misused(create(PublishOptions::fixed(16, 4).loans(0)), "has no buffer");
    let stage = Stage::fixed(&subject, 4);
    let join = |options| subscribe(&subject, &stage.path, &options);
    misused(join(SubscribeOptions::default().held(0)), "holds 1 to 64 buffers, not 0");
    misused(join(SubscribeOptions::default().held(65)), "not 65");
    misused(join(SubscribeOptions::default().policy(Policy::Queue(0))), "a queue has 1 to 1024 buffers");
    misused(stage.publisher.try_loan_of(0), "at least 1 byte");
    misused(stage.publisher.try_loan_of(17), "17 bytes exceeds the 16 bytes");
    misused(create(PublishOptions::varying(4096)).unwrap().try_loan(), "name the size");
    misused(stage.publisher.loan(LIMIT).unwrap().publish(&[0; 4097]), "4097 bytes of a publication");
    let loan = stage.publisher.loan(LIMIT).unwrap();
    assert!(stage.publisher.try_loan().unwrap().is_none() && is_timeout(&stage.publisher.loan(SHORT)));
    drop(loan);
    assert_eq!(stage.stats().free, 4);
}

/// A publisher and two subscribers, and all operations that a failure could interrupt.
fn everything(subject: &Subject, device: &Device) -> Result<()> {
    let publisher = Publisher::create(device, &PublishOptions::fixed(16, 6).history(1), &Config::default())?;
    for round in 0..2 {
        let (ours, theirs) = Channel::socket_pair()?;
        publisher.admit(ours)?;
        let options = SubscribeOptions::default().history(1);
        let subscriber = Subscriber::over(theirs, &subject.driver, None, &options, &Config::default())?;
        wait_for("a subscriber", || publisher.stats().unwrap().subscribers.len() == 1);
        let loan = publisher.loan(LIMIT)?;
        loan.copy_in(0, &[round; 16])?;
        loan.publish(&[round])?;
        let sample = subscriber.receive(LIMIT)?.sample().expect("a buffer");
        sample.copy_out(0, &mut [0])?;
        sample.give_back()?;
        drop(subscriber);
        wait_for("the end", || publisher.stats().unwrap().subscribers.is_empty());
    }
    publisher.finish(LIMIT).map(drop)
}

fn failure_at_any_call_leaves_nothing(mut subject: Subject) {
    subject.alone();
    let device = subject.device();
    everything(&subject, &device).unwrap();
    let failed = subject.fail_each_call(|| everything(&subject, &device));
    assert!(failed.len() > 10 && failed.contains(&"set_access"), "{failed:?}");
}
