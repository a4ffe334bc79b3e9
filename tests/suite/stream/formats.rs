//! Sizes, arrays, and bytes of the program's own.

use vmmfd::session::stream::{Format, MAX_USER_BYTES};

use super::*;

cases! {
    on crate::support::Subject; every backend: [
    formats_are_sent_before_their_buffers,
    arrays_keep_their_sample,
    sizes_vary_within_the_pool,
    user_bytes_arrive_unchanged,
    ]
}

fn array(shape: &[u64]) -> ArrayDescriptor {
    ArrayDescriptor::new(ElementType::U8, shape, Order::C).unwrap()
}

fn formats_are_sent_before_their_buffers(subject: Subject) {
    let stage = Stage::new(&subject, &PublishOptions::fixed(16, 8).history(2));
    let subscriber = stage.join(&subject, SubscribeOptions::default().policy(Policy::Queue(2)).held(2));
    stage.publish(1);
    let mut format = Format::of("frame", array(&[4, 4]));
    format.blob = (0..=255).cycle().take(64 << 10).collect();
    stage.publisher.set_format(&format).unwrap();
    stage.publish(2);
    assert_eq!(*take(&subscriber).format(), Format::default());
    assert_eq!(*take(&subscriber).format(), format);
    let other = Format::of("other", array(&[16]));
    stage.publisher.set_format(&other).unwrap();
    stage.publish(3);
    assert_eq!(*take(&subscriber).format(), other);
    // A late subscriber receives the format of each earlier buffer.
    let late = stage.join(&subject, SubscribeOptions::default().policy(Policy::Queue(2)).held(2).history(2));
    assert_eq!([take(&late), take(&late)].map(|sample| sample.format().clone()), [format, other]);
    let refused = stage.publisher.set_format(&Format::of("large", array(&[17])));
    assert!(matches!(refused, Err(Error::Memory(MemoryError::OutOfRange { .. }))), "{refused:?}");
    let large = Format { blob: vec![0; (64 << 10) + 1], ..Format::default() };
    misused(stage.publisher.set_format(&large), "a blob of 65537 bytes");
}

fn arrays_keep_their_sample(subject: Subject) {
    let stage = Stage::fixed(&subject, 3);
    let subscriber = stage.join(&subject, SubscribeOptions::default());
    let mut right = array(&[2, 4]);
    right.offset = 8;
    let format = Format { arrays: vec![("left".into(), array(&[2, 4])), ("right".into(), right)], blob: Vec::new() };
    stage.publisher.set_format(&format).unwrap();
    stage.publish(5);
    let sample = Arc::new(take(&subscriber));
    let row = sample.array("right").unwrap().index(0, 1).unwrap();
    misused(sample.array("middle"), "no array `middle`");
    drop(sample);
    assert_eq!((row.element(&[3]).unwrap(), subscriber.held(), stage.stats().free), (vec![5], 1, 2));
    drop(row);
    stage.until_free(3);
}

fn sizes_vary_within_the_pool(subject: Subject) {
    let stage = Stage::new(&subject, &PublishOptions::varying(64 << 10).loans(2).history(2));
    let subscriber = stage.join(&subject, SubscribeOptions::default().policy(Policy::Queue(8)).held(8));
    assert_eq!(subscriber.buffer_size(), None);
    let mut samples = Vec::new();
    for size in [1, 1000, 20_000, 16] {
        let loan = stage.publisher.loan_of(size, LIMIT).unwrap();
        loan.copy_in(size - 1, &[7]).unwrap();
        loan.publish(&[]).unwrap();
        let sample = subscriber.receive(LIMIT).unwrap().sample().unwrap();
        let mut last = [0];
        sample.copy_out(size - 1, &mut last).unwrap();
        assert_eq!((sample.size(), last), (size, [7]));
        samples.push(sample);
    }
    match stage.publisher.loan_of(50_000, SHORT) {
        Err(Error::Peer(PeerError::Starved { size: 50_000, holders, .. })) => {
            assert_eq!((holders.len(), holders[0].buffers, holders[0].bytes), (1, 4, 21_017));
        }
        other => panic!("{other:?}"),
    }
    let large = thread::scope(|scope| {
        let waiting = scope.spawn(|| stage.publisher.loan_of(60_000, LIMIT).unwrap());
        samples.clear();
        waiting.join().unwrap()
    });
    assert!(stage.publisher.try_loan_of(10_000).unwrap().is_none());
    drop(large);
    stage.until_free(64 << 10);
}

fn user_bytes_arrive_unchanged(subject: Subject) {
    let stage = Stage::fixed(&subject, 3);
    let subscriber = stage.join(&subject, SubscribeOptions::default());
    for bytes in [vec![], vec![0], (0..MAX_USER_BYTES).map(|at| at as u8).collect::<Vec<_>>()] {
        stage.publisher.loan(LIMIT).unwrap().announce(&bytes).unwrap();
        let sample = subscriber.receive(LIMIT).unwrap().sample().unwrap();
        assert_eq!(sample.user(), bytes);
        sample.give_back_idle();
    }
    // Large records fill the socket's buffer before the subscriber's room: the rest waits.
    let stage = Stage::new(&subject, &PublishOptions::fixed(16, 70));
    let subscriber = stage.join(&subject, SubscribeOptions::default().policy(Policy::Queue(4)).held(64));
    let published = |_| stage.publisher.loan(LIMIT).unwrap().announce(&[1; MAX_USER_BYTES]).unwrap().number;
    assert_eq!((0..80).map(published).collect::<Vec<_>>(), (1..=80).collect::<Vec<_>>());
    let mut received = Vec::new();
    while received.last() != Some(&80) {
        received.push(subscriber.receive(LIMIT).unwrap().sample().unwrap().number());
    }
    assert!(received.is_sorted() && received.len() > 8, "{received:?}");
    stage.until_free(70);
}
