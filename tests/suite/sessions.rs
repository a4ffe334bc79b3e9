//! The session API for programs: over an existing socket, with custom content and checks, and with a peer that has a shorter timeout.

use vmmfd::{
    Result,
    error::ProtocolError,
    session::{
        Check,
        handoff::{Content, ImportedObject, Offered, Served, Tick, Verifier, fetch, serve},
    },
};
use vmmfd_cli::check::Exercise;

use crate::{
    conversation::{listening, seqpacket},
    support::prelude::*,
};

fn driver() -> Driver {
    open(Choice::Only(Backend::Host)).unwrap().driver
}

fn shared(size: u64) -> Shared {
    Shared::create(&Device::find(&driver(), Selector::default()).unwrap(), Spec::vmm(size)).unwrap()
}

fn within(milliseconds: u64) -> Config {
    Config::default().timeout(Duration::from_millis(milliseconds))
}

/// Connects a producer and a consumer over a socket pair.
fn meet<T: Send>(
    buffer: &Buffer<'_>,
    options: &ServeOptions,
    configs: [&Config; 2],
    consume: impl FnOnce(Consumer<'_>) -> T,
) -> (Result<Served>, T) {
    let (ours, theirs) = Channel::socket_pair().unwrap();
    thread::scope(|scope| {
        let producer = scope.spawn(|| serve_connection(ours, buffer, options, configs[0], &|_| {}));
        let consumed = consume(Consumer::over(theirs, &driver(), None, configs[1], &|_| {}).unwrap());
        (producer.join().unwrap(), consumed)
    })
}

/// Custom content and check: a sum of bytes, and a reply that is verified. No pattern, no digest.
#[derive(Debug, Default)]
struct Sum {
    fills: Arc<AtomicU64>,
    /// Added to the sum of the data.
    off: u64,
    /// The duration of each fill.
    slow: Duration,
}

const SIZE: u64 = 1000;

fn sum(region: &dyn Region) -> Result<u64> {
    let mut bytes = vec![0; region.size() as usize];
    region.copy_out(0, &mut bytes)?;
    Ok(bytes.into_iter().map(u64::from).sum())
}

fn check(sum: u64) -> Check {
    Check::from_iter([("sum".to_owned(), sum.into())])
}

/// Sleeps for `time` and calls `tick` at short intervals.
fn work(time: Duration, tick: Tick<'_>) -> Result<()> {
    let begun = Instant::now();
    while begun.elapsed() < time {
        thread::sleep(Duration::from_millis(5));
        tick()?;
    }
    Ok(())
}

impl Content for Sum {
    fn fill(&self, memory: &Shared, tick: Tick<'_>) -> Result<()> {
        self.fills.fetch_add(1, Ordering::Relaxed);
        work(self.slow, tick)?;
        memory.copy_in(0, &[3; SIZE as usize])
    }

    fn expects_reply(&self) -> bool {
        true
    }

    fn check(&self, range: &std::ops::Range<u64>, _: bool, _: Tick<'_>) -> Result<Option<Check>> {
        Ok(Some(check(3 * (range.end - range.start) + self.off)))
    }

    fn accept(&self, _: &Offered, result: &Verdict) -> Result<()> {
        match result.check.as_ref().map(|check| check.contains_key("sum")) {
            None | Some(true) => Ok(()),
            Some(false) => Err(ProtocolError::Content("no sum".to_owned()).into()),
        }
    }

    fn judge(&self, memory: &Shared, offered: &Offered, result: &Verdict, _: Tick<'_>) -> Result<Verdict> {
        let replied = offered.reply && result.check.is_some();
        let verified = !replied || sum(memory)? == 5 * SIZE;
        Ok(Verdict::new(verified, replied.then(|| check(5 * SIZE))))
    }
}

#[derive(Default)]
struct SumVerifier {
    slow: Duration,
    /// The byte of the reply.
    reply: u8,
    answer: Option<Verdict>,
}

impl Verifier for SumVerifier {
    fn verify(&mut self, object: &ImportedObject, tick: Tick<'_>) -> Result<Verdict> {
        work(self.slow, tick)?;
        let found = sum(object)?;
        let claimed = object.check().unwrap()["sum"].as_u64().unwrap();
        Ok(Verdict::new(found == claimed, Some(check(found))))
    }

    fn reply(&mut self, object: &ImportedObject, _: Tick<'_>) -> Result<()> {
        if object.access() == ReadWrite { object.copy_in(0, &[self.reply; SIZE as usize]) } else { Ok(()) }
    }

    fn accept(&mut self, _: &ImportedObject, _: &Verdict, answer: &Verdict) -> Result<()> {
        self.answer = Some(answer.clone());
        Ok(())
    }
}

/// Runs a whole session over a socket path.
fn converse(buffer: &Buffer<'_>, options: &ServeOptions, verifier: &mut SumVerifier) -> (Served, bool) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let config = within(20_000);
    let listener = listener(&path);
    thread::scope(|scope| {
        let producer = scope.spawn(|| serve(listener, buffer, options, &config, &|_| {}));
        let findings = fetch(&driver(), None, &path, &Request::default(), verifier, &config, &|_| {}).unwrap();
        (producer.join().unwrap().served.remove(0), findings.verified())
    })
}

/// A listener on a socket created outside the library.
fn listener(path: &Path) -> Listener {
    Listener::from_fd(listening(path, 8)).unwrap()
}

#[test]
fn program_may_bring_content_and_check() {
    let buffer = Buffer::new(shared(SIZE), Sum::default(), None).unwrap();
    let round_trip = ServeOptions::default().round_trip(true);
    for (options, reply, checked, verified) in [
        (&ServeOptions::default(), 0, None, true),
        (&round_trip, 5, Some(check(5 * SIZE)), true),
        (&round_trip, 6, Some(check(5 * SIZE)), false),
    ] {
        let mut verifier = SumVerifier { reply, ..SumVerifier::default() };
        let (served, both) = converse(&buffer, options, &mut verifier);
        assert_eq!((both, served.mismatched(), served.error.is_none()), (verified, !verified, true), "{reply}");
        assert_eq!(verifier.answer, Some(Verdict::new(verified, checked)));
    }
    // Both sides report the consumer's mismatch.
    let wrong = Buffer::new(shared(SIZE), Sum { off: 1, ..Sum::default() }, None).unwrap();
    let (served, both) = converse(&wrong, &round_trip, &mut SumVerifier::default());
    assert_eq!((both, served.found), (false, Some(Verdict::new(false, Some(check(3 * SIZE))))));
}

#[test]
fn buffer_is_refilled_after_a_reply() {
    let content = Sum::default();
    let fills = Arc::clone(&content.fills);
    let buffer = Buffer::new(shared(SIZE), content, None).unwrap();
    let round_trip = ServeOptions::default().round_trip(true);
    for (options, count) in
        [(&ServeOptions::default(), 1), (&ServeOptions::default(), 1), (&round_trip, 1), (&round_trip, 2)]
    {
        assert!(converse(&buffer, options, &mut SumVerifier { reply: 5, ..SumVerifier::default() }).1);
        assert_eq!(fills.load(Ordering::Relaxed), count);
    }
}

#[test]
fn consumer_without_check_is_served() {
    // With the commands' own content, also in a round trip: no reply, and no verdict on the check.
    for round_trip in [false, true] {
        for verified in [true, false] {
            let buffer = Buffer::new(shared(SIZE), Exercise::pattern(7, &|_| {}), None).unwrap();
            let options = ServeOptions::default().round_trip(round_trip);
            let config = within(20_000);
            let (served, answer) = meet(&buffer, &options, [&config, &config], |mut consumer| {
                let object = consumer.request(&Request::default()).unwrap();
                assert_eq!(object.check().unwrap()["salt"], 7);
                let found = consumer.verify(&object, &mut Unchecked).unwrap();
                assert_eq!(found, Verdict::unchecked(true));
                let answer = consumer.report(&object, &Verdict::unchecked(verified)).unwrap();
                drop(object);
                consumer.close();
                answer
            });
            let served = served.unwrap();
            assert_eq!((answer, served.error.is_none()), (Verdict::unchecked(verified), true));
            assert_eq!(served.found, Some(Verdict::unchecked(verified)));
        }
    }
    // The commands' verifier ignores the check of another program.
    let buffer = Buffer::new(shared(SIZE), Sum::default(), None).unwrap();
    let config = within(20_000);
    let (served, found) = meet(&buffer, &ServeOptions::default(), [&config, &config], |mut consumer| {
        let object = consumer.request(&Request::default()).unwrap();
        let found = consumer.verify(&object, &mut DataVerifier::new(&|_| {})).unwrap();
        consumer.report(&object, &found).unwrap();
        found
    });
    assert_eq!((found, served.unwrap().mismatched()), (Verdict::unchecked(true), false));
}

#[test]
fn both_sides_send_busy_in_time() {
    let patient = within(30_000);
    let impatient = within(1000);
    let long = Duration::from_millis(1600);
    let turn = |mut consumer: Consumer<'_>, slow| {
        let object = consumer.request(&Request::default())?;
        let found = consumer.verify(&object, &mut SumVerifier { slow, ..SumVerifier::default() })?;
        let answer = consumer.report(&object, &found);
        consumer.close();
        answer
    };
    thread::scope(|scope| {
        // The producer is busy for longer than the consumer's timeout.
        scope.spawn(|| {
            let buffer = Buffer::new(shared(SIZE), Sum { slow: long, ..Sum::default() }, None).unwrap();
            let options = ServeOptions::default();
            let (served, found) =
                meet(&buffer, &options, [&patient, &impatient], |consumer| turn(consumer, Duration::ZERO));
            assert!(found.unwrap().verified && served.unwrap().error.is_none());
        });
        // The consumer is busy.
        scope.spawn(|| {
            let buffer = Buffer::new(shared(SIZE), Sum::default(), None).unwrap();
            let options = ServeOptions::default();
            let (served, found) = meet(&buffer, &options, [&impatient, &patient], |consumer| turn(consumer, long));
            assert!(found.unwrap().verified && served.unwrap().error.is_none());
        });
        // A consumer waits for another consumer's turn.
        scope.spawn(|| {
            let buffer = Buffer::new(shared(SIZE), Sum::default(), None).unwrap();
            let options = ServeOptions::default().round_trip(true);
            thread::scope(|scope| {
                let slow =
                    scope.spawn(|| meet(&buffer, &options, [&patient, &patient], |consumer| turn(consumer, long)));
                thread::sleep(Duration::from_millis(200));
                let (served, found) =
                    meet(&buffer, &options, [&patient, &impatient], |consumer| turn(consumer, Duration::ZERO));
                // No consumer has replied.
                assert!(!found.unwrap().verified && served.unwrap().error.is_none());
                assert!(slow.join().unwrap().0.unwrap().error.is_none());
            });
        });
    });
}

#[test]
fn slow_subscriber_sends_busy() {
    // With two devices, no device is activated before the first buffer is opened.
    let fake = Copy::new().load();
    fake.set("FAKECUDA_DEVICES", "2");
    let subject = Subject::of(fake);
    let (ours, theirs) = Channel::socket_pair().unwrap();
    let publisher = Publisher::create(&subject.device(), &PublishOptions::fixed(16, 3), &within(1000)).unwrap();
    subject.faulty.slow_down("activate", Duration::from_millis(1600));
    publisher.admit(ours).unwrap();
    let options = SubscribeOptions::default();
    let subscriber = Subscriber::over(theirs, &subject.driver, None, &options, &within(30_000)).unwrap();
    while publisher.event().is_none() {
        thread::sleep(Duration::from_millis(1));
    }
    publisher.try_loan().unwrap().unwrap().announce(&[]).unwrap();
    assert!(subscriber.receive(Duration::from_secs(30)).unwrap().sample().is_some());
}

#[test]
fn other_descriptors_are_no_sessions() {
    let (driver, config) = (driver(), Config::default());
    let device = Device::find(&driver, Selector::default()).unwrap();
    let publisher = Publisher::create(&device, &PublishOptions::fixed(16, 3), &config).unwrap();
    let buffer = Buffer::new(shared(SIZE), Unchecked, None).unwrap();
    let others: [fn() -> OwnedFd; 2] =
        [|| UnixStream::pair().unwrap().0.into(), || File::open("/dev/null").unwrap().into()];
    for other in others {
        for refused in [
            Consumer::over(other(), &driver, None, &config, &|_| {}).map(drop),
            Subscriber::over(other(), &driver, None, &SubscribeOptions::default(), &config).map(drop),
            publisher.admit(other()),
            serve_connection(other(), &buffer, &ServeOptions::default(), &config, &|_| {}).map(drop),
            Listener::from_fd(other()).map(drop),
        ] {
            assert!(matches!(refused, Err(Error::Socket { .. })), "{refused:?}");
        }
    }
    // A socket that does not listen is not a listener.
    let refused = Listener::from_fd(seqpacket());
    assert!(
        matches!(&refused, Err(Error::Socket(SocketError::Unfit { problem })) if problem.contains("listen")),
        "{refused:?}"
    );
}

#[test]
fn foreign_listener_serves_and_keeps_its_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let listener = listener(&path);
    assert_eq!(listener.path(), path);
    drop(listener);
    assert!(path.exists(), "it is not this program's to remove");
}
