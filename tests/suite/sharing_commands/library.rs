//! The library below the commands, in one process.

use super::*;

/// Runs a producer and a consumer in this process. Returns the result of `body` and the served consumers.
fn meet<T>(buffer: &Buffer<'_>, options: &ServeOptions, body: impl FnOnce(Consumer<'_>) -> T) -> (T, Vec<Served>) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let config = Config::default();
    let listener = Listener::bind(&path, &config).unwrap();
    thread::scope(|scope| {
        let serving = scope.spawn(|| serve(listener, buffer, options, &config, &|_| {}));
        let driver = buffer.shared().device().driver();
        let result = body(Consumer::connect(driver, None, &path, &config, &|_| {}).unwrap());
        (result, completed(serving.join().unwrap()))
    })
}

/// The consumers of a completed service.
fn completed(report: handoff::ServeReport) -> Vec<Served> {
    assert!(report.error.is_none(), "{report:?}");
    report.served
}

/// Runs a producer in this process, and a scripted consumer that has requested the buffer.
fn meet_by_hand<T>(buffer: &Buffer<'_>, body: impl FnOnce(&mut Channel) -> T) -> (T, Vec<Served>) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    // The producer waits for the whole timeout.
    let config = Config::default().timeout(Duration::from_secs(1));
    let listener = Listener::bind(&path, &config).unwrap();
    thread::scope(|scope| {
        let serving = scope.spawn(|| serve(listener, buffer, &ServeOptions::default(), &config, &|_| {}));
        let mut channel = dial(&path);
        channel.send(&hello(Backend::Cuda), &[]).unwrap();
        answer(&mut channel);
        channel.send(&request("default", None), &[]).unwrap();
        let result = body(&mut channel);
        // The channel is closed after this expression.
        (result, completed(serving.join().unwrap()))
    })
}

#[test]
fn producer_waits_until_pool_is_closed() {
    let subject = Subject::fake();
    let ask = |consumer: &mut Consumer<'_>| {
        let object = consumer.request(&Request::default()).unwrap();
        let found = consumer.verify(&object, &mut DataVerifier::new(&|_| {})).unwrap();
        assert!(found.verified && found.check.is_some());
        consumer.report(&object, &found).unwrap();
        object
    };
    let memory = Shared::create(&subject.device(), Spec::pool(1000)).unwrap();
    let buffer = Buffer::new(memory, Exercise::pattern(5, &|_| {}), None).unwrap();
    let ((), served) = meet(&buffer, &ServeOptions::default(), |mut consumer| {
        let objects = [ask(&mut consumer), ask(&mut consumer)];
        // The connection outlives the consumer while the memory is open.
        consumer.close();
        thread::sleep(Duration::from_millis(300));
        drop(objects);
    });
    assert!(served[0].error.is_none(), "{served:?}");
    // A consumer that never closes the memory counts as failed and cannot block the producer for ever. The producer keeps the memory
    // allocated.
    for spec in [Spec::pool(1000), Spec::legacy(1000)] {
        let subject = Subject::fake();
        let memory = Shared::create(&subject.device(), spec).unwrap();
        let taken = || subject.fake.as_ref().unwrap().live()[4..6].to_vec();
        let before = taken();
        let buffer = Buffer::new(memory, Unchecked, None).unwrap();
        let ((), served) = meet_by_hand(&buffer, |channel| {
            let (Message::Offer(_), _) = answer(channel) else { panic!() };
            if spec.mechanism() == Mechanism::Pool {
                let (Message::Pool(_), _) = answer(channel) else { panic!() };
                channel.send(&Message::Received(Received { segments: 0 }), &[]).unwrap();
            }
            channel.send(&Message::Result(Verdict::unchecked(true)), &[]).unwrap();
            answer(channel);
        });
        let told = served[0].error.as_ref().unwrap().to_string();
        assert!(told.contains("for the consumer to close the memory"), "{told}");
        drop(buffer);
        assert_eq!(taken(), before, "it is still there");
        // The memory remains allocated until the process exits.
        std::mem::forget(subject);
    }
}

#[test]
fn memory_without_pattern_is_lent_unchanged() {
    let memory = shared(Spec::vmm(1000));
    Mirror::of(&memory, 0, 1000).unwrap().write(990, b"end").unwrap();
    let array = ArrayDescriptor::new("u16".parse().unwrap(), vec![10, 50], Order::C).unwrap();
    let buffer = Buffer::new(memory, Unchecked, Some(array)).unwrap();
    let ((), served) = meet(&buffer, &ServeOptions::default().round_trip(true), |mut consumer| {
        let object = consumer.request(&Request::default().access(ReadWrite)).unwrap();
        assert_eq!(object.check(), None);
        let found = consumer.verify(&object, &mut DataVerifier::new(&|_| {})).unwrap();
        assert_eq!(found, Verdict::unchecked(true));
        assert!(consumer.report(&object, &found).unwrap().verified);
        let array = object.into_array().unwrap().unwrap();
        assert_eq!(array.element(&[9, 45]).unwrap(), b"en");
        array.memory().copy_in(0, b"back").unwrap();
        consumer.close();
    });
    assert!(served[0].error.is_none(), "{served:?}");
    let mut back = [0; 4];
    buffer.shared().copy_out(0, &mut back).unwrap();
    assert_eq!(&back, b"back");
}
