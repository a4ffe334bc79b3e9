//! The order of GPU work between processes: streams that wait for streams, and peers that are late, stopped or dead.

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use vmmfd::{
    driver::Stream,
    error::Loss,
    session::order::{Completion, Order, Timeline},
};

use super::*;
use crate::support::Gpu;

cases! {
    on super::Alone;
    gpus alone: [
    timelines_order_streams,
    timelines_survive_a_lost_peer,
    timelines_refuse_wrong_use,
    timelines_open_at_the_same_time,
    subscribers_wait_for_the_publishers_stream,
    cpus_wait_for_the_publishers_stream,
    buffers_wait_for_their_readers,
    unwritten_buffers_are_not_lent,
    publishers_descriptor_shows_finished_work,
    slow_publisher_evicts_nobody,
    late_publisher_is_lost,
    dead_publisher_is_lost,
    late_joiner_gets_what_is_written,
    many_turns_on_several_streams,
    captures_are_refused,
    failing_calls_lose_nothing,
    ]
}

/// A subject that no other test uses: with a stream that waits, calls of the whole process may block.
struct Alone;

impl Alone {
    fn fake() -> Subject {
        Subject::fake()
    }

    fn cuda() -> Subject {
        let mut subject = Subject::cuda();
        subject.alone();
        subject
    }
}

/// A subject with streams, and a gate that holds streams back.
struct Bench<'a> {
    subject: &'a Subject,
    gpu: Gpu,
    gate: Timeline,
    opener: Stream,
}

impl<'a> Bench<'a> {
    fn new(subject: &'a Subject) -> Self {
        let gate = Timeline::create(&subject.device()).unwrap();
        Self { subject, gpu: Gpu::of(subject), gate, opener: subject.driver.create_stream(0).unwrap() }
    }

    fn stream(&self) -> Stream {
        self.subject.driver.create_stream(0).unwrap()
    }

    /// A stream that does nothing until the gate was opened `times` times.
    fn held_back(&self, times: u64) -> Stream {
        let stream = self.stream();
        self.hold(&stream, times);
        stream
    }

    fn hold(&self, stream: &Stream, times: u64) {
        self.gate.wait(stream, times, LIMIT).unwrap();
    }

    fn open(&self) {
        self.gate.record(&self.opener).unwrap();
    }

    /// Fills a loan on a stream, and publishes it there.
    fn publish(&self, stage: &Stage, stream: &Stream, byte: u8) -> Published {
        let loan = stage.publisher.loan(LIMIT).unwrap();
        self.gpu.fill(stream, loan.address(), byte, 16);
        loan.publish_on(stream, &[byte]).unwrap()
    }
}

fn bytes_of(sample: &Sample) -> [u8; 16] {
    let mut bytes = [0; 16];
    sample.copy_out(0, &mut bytes).unwrap();
    bytes
}

fn take_on(subscriber: &Subscriber, stream: &Stream) -> Sample {
    subscriber.receive_on(stream, LIMIT).unwrap().sample().expect("a buffer")
}

fn is_lost<T: std::fmt::Debug>(result: Result<T>, want: Loss) {
    match result {
        Err(Error::Peer(PeerError::WorkLost { reason })) => assert_eq!(reason, want),
        other => panic!("{other:?}, not lost: {want:?}"),
    }
}

fn timelines_order_streams(subject: Subject) {
    let bench = Bench::new(&subject);
    let device = subject.device();
    let [first, second, reader] = [bench.held_back(1), bench.stream(), bench.stream()];
    let timeline = Timeline::create(&device).unwrap();
    let other = Timeline::open(timeline.as_fd().try_clone_to_owned().unwrap(), Some(&device)).unwrap();
    let watcher = Timeline::open(timeline.as_fd().try_clone_to_owned().unwrap(), None).unwrap();
    // The second stream's record stays behind the first's.
    assert_eq!((timeline.record(&first).unwrap(), timeline.record(&second).unwrap()), (1, 2));
    other.wait(&reader, 2, LIMIT).unwrap();
    thread::sleep(SHORT);
    assert_eq!((other.value(), other.completion(1)), (0, Completion::Pending));
    assert!(!reader.is_idle().unwrap() && !second.is_idle().unwrap());
    let cancel = Cancel::new().unwrap();
    assert!(is_timeout(&watcher.wait_cpu(1, SHORT, &cancel)));
    bench.open();
    watcher.wait_cpu(2, LIMIT, &cancel).unwrap();
    reader.synchronize().unwrap();
    assert_eq!((other.value(), other.completion(2), other.completion(3)), (2, Completion::Done, Completion::Pending));
}

fn timelines_survive_a_lost_peer(subject: Subject) {
    let bench = Bench::new(&subject);
    let device = subject.device();
    let [end, peer] = UnixStream::pair().map(<[UnixStream; 2]>::from).unwrap();
    for (round, loss) in (1..).zip([Loss::Late { limit: SHORT }, Loss::Released, Loss::Gone]) {
        let timeline = Timeline::create(&device).unwrap();
        let [recorder, reader] = [bench.held_back(round), bench.stream()];
        let file = || timeline.as_fd().try_clone_to_owned().unwrap();
        let other = Timeline::open(file(), Some(&device)).unwrap();
        other.release_with(OwnedFd::from(end.try_clone().unwrap())).unwrap();
        let done = timeline.record(&bench.opener).unwrap();
        let value = timeline.record(&recorder).unwrap();
        other.wait(&reader, value, if loss == (Loss::Late { limit: SHORT }) { SHORT } else { LIMIT }).unwrap();
        bench.opener.synchronize().unwrap();
        match loss {
            Loss::Released => other.release(),
            Loss::Gone => peer.shutdown(std::net::Shutdown::Both).unwrap(),
            _ => {}
        }
        // The stream goes on although the other is still held back.
        wait_for("release", || reader.is_idle().unwrap());
        assert!(!recorder.is_idle().unwrap());
        assert_eq!([done, value].map(|value| other.completion(value)), [Completion::Done, Completion::Lost]);
        is_lost(other.wait(&reader, value, LIMIT), loss);
        is_lost(timeline.record(&bench.opener), Loss::Released);
        // A late store does not bring a wait back.
        let late = Timeline::open(file(), Some(&device)).unwrap();
        assert_eq!(late.completion(value), Completion::Lost);
        bench.open();
        recorder.synchronize().unwrap();
        reader.synchronize().unwrap();
        assert_eq!(other.completion(value), Completion::Lost);
    }
    let timeline = Timeline::create(&device).unwrap();
    timeline.release();
    is_lost(timeline.record(&bench.opener), Loss::Released);
}

fn timelines_refuse_wrong_use(subject: Subject) {
    let bench = Bench::new(&subject);
    let device = subject.device();
    let stream = bench.stream();
    let timeline = Timeline::create(&device).unwrap();
    let file = || timeline.as_fd().try_clone_to_owned().unwrap();
    let other = Timeline::open(file(), Some(&device)).unwrap();
    misused(other.record(&stream), "another process records");
    misused(Timeline::open(file(), None).unwrap().wait(&stream, 1, LIMIT), "without a device");
    misused(timeline.record(&Gpu::per_thread_stream(&subject)), "per-thread");
    misused(other.wait(&stream, 1 << 63, SHORT), "at most");
    bench.gpu.capture(&stream, || {
        misused(timeline.record(&stream), "being captured");
        misused(other.wait(&stream, 1, LIMIT), "being captured");
    });
    stream.synchronize().unwrap();
    let (reader, _writer) = io::pipe().unwrap();
    let wrong = Timeline::open(OwnedFd::from(reader), None).unwrap_err();
    assert!(wrong.in_full().contains("not of a memfd"), "{}", wrong.in_full());
    // Although the last value is reached.
    other.release();
    is_lost(timeline.record(&stream), Loss::Released);
    if let Some(fake) = &subject.fake {
        fake.set("FAKECUDA_ATTRIBUTE", "122:0");
        let unordered = Timeline::create(&device);
        assert!(matches!(unordered, Err(Error::Device(DeviceError::Unordered { .. }))), "{unordered:?}");
    }
}

fn timelines_open_at_the_same_time(subject: Subject) {
    let device = subject.device();
    let timeline = Timeline::create(&device).unwrap();
    for _ in 0..20 {
        let start = std::sync::Barrier::new(4);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    start.wait();
                    let file = timeline.as_fd().try_clone_to_owned().unwrap();
                    drop(Timeline::open(file, Some(&device)).unwrap());
                });
            }
        });
    }
}

fn subscribers_wait_for_the_publishers_stream(subject: Subject) {
    let bench = Bench::new(&subject);
    let stage = Stage::fixed(&subject, 4);
    let subscriber = stage.join(&subject, SubscribeOptions::default());
    assert_eq!((stage.publisher.order(), subscriber.order()), (Order::Gpu, Order::Gpu));
    let [writer, reader] = [bench.held_back(1), bench.stream()];
    assert_eq!(bench.publish(&stage, &writer, 7).delivered, 1);
    let sample = take_on(&subscriber, &reader);
    thread::sleep(SHORT);
    assert_eq!((sample.completion(), reader.is_idle().unwrap()), (Completion::Pending, false));
    bench.open();
    assert_eq!(bytes_of(&sample), [7; 16]);
    assert_eq!(sample.completion(), Completion::Done);
    drop(sample);
    stage.until_free(4);
    // Publications of both kinds mix.
    stage.publish(8);
    assert_eq!(bytes_of(&take_on(&subscriber, &reader)), [8; 16]);
    stage.publisher.finish(LIMIT).unwrap();
    assert!(matches!(subscriber.receive_on(&reader, LIMIT).unwrap(), Received::Ended));
}

fn cpus_wait_for_the_publishers_stream(subject: Subject) {
    let bench = Bench::new(&subject);
    let stage = Stage::fixed(&subject, 6);
    let subscribers = [(); 2].map(|()| stage.join(&subject, SubscribeOptions::default()));
    let writer = bench.held_back(1);
    bench.publish(&stage, &writer, 7);
    assert!(is_timeout(&subscribers[0].receive(SHORT)));
    assert!(subscribers[1].try_receive().unwrap().is_none());
    let is_readable = |limit: Duration| {
        let mut fds = [PollFd::new(subscribers[1].as_fd(), PollFlags::POLLIN)];
        poll(&mut fds, PollTimeout::try_from(limit).unwrap()).unwrap() == 1
    };
    assert!(!is_readable(SHORT), "the buffer is not written");
    bench.open();
    assert!(is_readable(LIMIT));
    let sample = subscribers[1].try_receive().unwrap().unwrap().sample().unwrap();
    assert_eq!((bytes_of(&sample), bytes_of(&take(&subscribers[0]))), ([7; 16], [7; 16]));
}

fn buffers_wait_for_their_readers(subject: Subject) {
    let bench = Bench::new(&subject);
    let stage = Stage::new(&subject, &PublishOptions::fixed(16, 4).every(LIMIT));
    let subscriber = stage.join(&subject, SubscribeOptions::default().policy(Policy::Every).held(2));
    let [writer, reader] = [bench.stream(), bench.stream()];
    bench.publish(&stage, &writer, 1);
    let sample = take_on(&subscriber, &reader);
    bench.hold(&reader, 1);
    drop(sample);
    bench.publish(&stage, &writer, 2);
    writer.synchronize().unwrap();
    // The reader has the first buffer, and the second was sent: its room is used up.
    wait_for("the return", || stage.stats().subscribers[0].buffers == 2);
    bench.publish(&stage, &writer, 3);
    assert!(is_timeout(&stage.publisher.loan(SHORT)));
    bench.open();
    drop(stage.publisher.loan(LIMIT).unwrap());
    assert_eq!(bytes_of(&take_on(&subscriber, &reader)), [2; 16]);
    assert_eq!(bytes_of(&take_on(&subscriber, &reader)), [3; 16]);
    stage.until_free(4);
    // Without a call of the publisher, the library's thread sends what waits.
    bench.publish(&stage, &writer, 4);
    bench.publish(&stage, &writer, 5);
    let samples = [take_on(&subscriber, &reader), take_on(&subscriber, &reader)];
    bench.hold(&reader, 2);
    drop(samples);
    bench.publish(&stage, &writer, 6);
    assert!(is_timeout(&subscriber.receive(SHORT)));
    bench.open();
    assert_eq!(bytes_of(&take_on(&subscriber, &reader)), [6; 16]);
}

fn unwritten_buffers_are_not_lent(subject: Subject) {
    let bench = Bench::new(&subject);
    let stage = Stage::fixed(&subject, 3);
    let writer = bench.held_back(1);
    for byte in 1..=3 {
        bench.publish(&stage, &writer, byte);
    }
    assert_eq!(stage.stats().free, 0);
    assert!(is_timeout(&stage.publisher.loan(SHORT)));
    let publisher = &stage.publisher;
    assert_eq!(
        thread::scope(|scope| {
            let loan = scope.spawn(|| publisher.loan(LIMIT).map(drop));
            bench.open();
            loan.join().unwrap()
        })
        .map_err(|error| error.in_full()),
        Ok(())
    );
    stage.until_free(3);
}

/// Neither the publisher's streams nor a subscriber's wake a program that waits for the descriptor: the library's thread does.
fn publishers_descriptor_shows_finished_work(subject: Subject) {
    let bench = Bench::new(&subject);
    let stage = Stage::new(&subject, &PublishOptions::fixed(16, 3).every(LIMIT));
    let [writer, reader] = [bench.held_back(1), bench.stream()];
    let is_readable = |limit: Duration| {
        let mut fds = [PollFd::new(stage.publisher.as_fd(), PollFlags::POLLIN)];
        poll(&mut fds, PollTimeout::try_from(limit).unwrap()).unwrap() == 1
    };
    let loan = || {
        while stage.publisher.event().is_some() {}
        stage.publisher.try_loan().unwrap()
    };
    for byte in 1..=3 {
        bench.publish(&stage, &writer, byte);
    }
    wait_for("quiet", || loan().is_none() && !is_readable(SHORT));
    bench.open();
    assert!(is_readable(LIMIT / 6), "written buffers");
    let subscriber = stage.join(&subject, SubscribeOptions::default().policy(Policy::Every));
    bench.publish(&stage, &writer, 4);
    let sample = take_on(&subscriber, &reader);
    bench.hold(&reader, 2);
    drop(sample);
    bench.publish(&stage, &writer, 5);
    wait_for("quiet", || loan().is_none() && !is_readable(SHORT));
    bench.open();
    assert!(is_readable(LIMIT / 6), "a finished reader");
    assert!(loan().is_some());
}

/// A subscriber's time does not run while a buffer that waits for it is not written.
fn slow_publisher_evicts_nobody(subject: Subject) {
    let bench = Bench::new(&subject);
    let stage = Stage::new(&subject, &PublishOptions::fixed(16, 6).history(1).every(SHORT));
    let writer = bench.held_back(1);
    bench.publish(&stage, &writer, 1);
    let joined = stage.join(&subject, SubscribeOptions::default().policy(Policy::Every).history(1));
    thread::sleep(4 * SHORT);
    bench.open();
    assert_eq!(bytes_of(&take(&joined)), [1; 16]);
}

fn late_publisher_is_lost(subject: Subject) {
    let bench = Bench::new(&subject);
    let stage = Stage::fixed(&subject, 5);
    let subscriber = stage.join(&subject, SubscribeOptions::default().held(2));
    let [writer, reader] = [bench.stream(), bench.stream()];
    bench.publish(&stage, &writer, 1);
    let whole = take_on(&subscriber, &reader);
    reader.synchronize().unwrap();
    bench.hold(&writer, 1);
    bench.publish(&stage, &writer, 2);
    let late = subscriber.receive_on(&reader, SHORT).unwrap().sample().unwrap();
    wait_for("release", || reader.is_idle().unwrap());
    assert_eq!([whole.completion(), late.completion()], [Completion::Done, Completion::Lost]);
    is_lost(subscriber.receive_on(&reader, LIMIT), Loss::Late { limit: SHORT });
    misused(subscriber.receive(LIMIT), "the session has ended");
    // The context works, and the publisher serves others.
    assert_eq!(bytes_of(&whole), [1; 16]);
    bench.open();
    drop((whole, late, subscriber));
    let other = stage.join(&subject, SubscribeOptions::default());
    bench.publish(&stage, &writer, 3);
    assert_eq!(bytes_of(&take_on(&other, &reader)), [3; 16]);
    stage.until_free(5);
}

fn dead_publisher_is_lost(subject: Subject) {
    let bench = Bench::new(&subject);
    let stage = Stage::fixed(&subject, 4);
    let subscriber = stage.join(&subject, SubscribeOptions::default().held(2));
    let [writer, reader] = [bench.held_back(1), bench.stream()];
    bench.publish(&stage, &writer, 1);
    let sample = take_on(&subscriber, &reader);
    bench.publish(&stage, &writer, 2);
    let (send, gone) = mpsc::channel();
    // Its memory goes only when its streams are done.
    let dropped = thread::spawn(move || {
        drop(stage);
        send.send(()).unwrap();
    });
    wait_for("release", || reader.is_idle().unwrap());
    assert!(gone.try_recv().is_err() || subject.fake.is_none(), "the publisher's stream was held back");
    assert_eq!(sample.completion(), Completion::Lost);
    // The second was never written, and is not delivered.
    assert!(matches!(subscriber.receive_on(&reader, LIMIT).unwrap(), Received::Crashed(_)));
    bench.open();
    dropped.join().unwrap();
    assert_eq!(sample.completion(), Completion::Lost);
}

fn late_joiner_gets_what_is_written(subject: Subject) {
    let bench = Bench::new(&subject);
    let stage = Stage::new(&subject, &PublishOptions::fixed(16, 6).history(1));
    let early = stage.join(&subject, SubscribeOptions::default());
    let [writer, reader] = [bench.held_back(1), bench.stream()];
    bench.publish(&stage, &writer, 1);
    let joined = stage.join(&subject, SubscribeOptions::default().history(1));
    assert!(is_timeout(&joined.receive_on(&reader, SHORT)));
    bench.open();
    assert_eq!(bytes_of(&take_on(&joined, &reader)), [1; 16]);
    assert_eq!(bytes_of(&take_on(&early, &reader)), [1; 16]);
    bench.publish(&stage, &writer, 2);
    assert_eq!(bytes_of(&take_on(&joined, &reader)), [2; 16]);
}

/// More turns than words, on streams of different speed.
fn many_turns_on_several_streams(subject: Subject) {
    let bench = Bench::new(&subject);
    let stage = Stage::new(&subject, &PublishOptions::fixed(16, 12).every(LIMIT));
    let options = SubscribeOptions::default().policy(Policy::Every).held(4);
    let subscribers = [(); 2].map(|()| stage.join(&subject, options.clone()));
    let [first, second] = [bench.stream(), bench.stream()];
    thread::scope(|scope| {
        for subscriber in &subscribers {
            let streams = [bench.stream(), bench.stream()];
            scope.spawn(move || {
                for number in 1..=700u64 {
                    let sample = take_on(subscriber, &streams[number as usize % 2]);
                    assert_eq!((sample.number(), bytes_of(&sample)), (number, [number as u8; 16]));
                    assert_eq!(sample.completion(), Completion::Done);
                }
            });
        }
        for number in 1..=700u64 {
            bench.publish(&stage, if number % 3 == 0 { &first } else { &second }, number as u8);
        }
    });
    stage.until_free(12);
}

fn captures_are_refused(subject: Subject) {
    let bench = Bench::new(&subject);
    let stage = Stage::fixed(&subject, 4);
    let subscriber = stage.join(&subject, SubscribeOptions::default());
    let stream = bench.stream();
    bench.gpu.capture(&stream, || {
        misused(stage.publisher.loan(LIMIT).unwrap().publish_on(&stream, b""), "being captured");
        misused(subscriber.receive_on(&stream, LIMIT).map(drop), "being captured");
    });
    stage.until_free(4);
    let writer = bench.held_back(1);
    bench.publish(&stage, &writer, 1);
    // The refused publication was the first after the join.
    let sample = subscriber.receive_on(&stream, SHORT * 20).unwrap().sample().unwrap();
    assert_eq!(sample.completion(), Completion::Pending);
    bench.open();
    assert_eq!(bytes_of(&sample), [1; 16]);
}

/// Each failing call is reported, or replaced by the order of the CPU.
fn failing_calls_lose_nothing(subject: Subject) {
    let Some(fake) = &subject.fake else { return };
    let bench = Bench::new(&subject);
    let exchange = || -> Result<()> {
        let stage = Stage::fixed(&subject, 4);
        let subscriber = stage.join(&subject, SubscribeOptions::default());
        let stream = || subject.driver.create_stream(0);
        let (writer, reader) = (stream()?, stream()?);
        for byte in 1..=2 {
            let loan = stage.publisher.loan(LIMIT)?;
            bench.gpu.fill(&writer, loan.address(), byte, 16);
            loan.publish_on(&writer, &[byte])?;
            let sample = subscriber.receive_on(&reader, LIMIT)?.sample().unwrap();
            let mut bytes = [0; 16];
            sample.copy_out(0, &mut bytes)?;
            assert_eq!(bytes, [byte; 16]);
            sample.give_back()?;
        }
        stage.until_free(4);
        Ok(())
    };
    let mut reported = 0;
    for call in [
        "cuStreamBatchMemOp_v2",
        "cuStreamIsCapturing",
        "cuStreamCreate",
        "cuStreamSynchronize",
        "cuMemHostRegister_v2",
        "cuMemHostGetDevicePointer_v2",
    ] {
        for nth in 1.. {
            let before = fake.calls(call);
            fake.set("FAKECUDA_FAIL", &format!("{call}:{nth}:999"));
            let result = exchange();
            fake.set("FAKECUDA_FAIL", "");
            if fake.calls(call) - before < nth {
                result.unwrap();
                break;
            }
            if let Err(error) = result {
                assert!(matches!(error, Error::Driver { code: 999, .. }), "{call} {nth}: {}", error.in_full());
                reported += 1;
            }
        }
    }
    assert!(reported > 5, "{reported} failures were reported");
}
