//! Processes that are killed or stopped while streams of other processes wait for them.
//!
//! `VMMFD_TEST_KILLS=200` sets the number of processes in each test, `VMMFD_TEST_PUBLICATIONS=10000` the number of publications.

use std::sync::atomic::AtomicUsize;

use rand::{RngExt, SeedableRng, rngs::SmallRng};
use vmmfd::{
    driver::Stream,
    session::order::{Completion, Timeline},
};

use super::{peers::Peer, *};
use crate::support::Gpu;

cases! {
    on crate::support::Subject;
    gpus alone: [
    killed_publishers_release_their_readers,
    stopped_publishers_release_their_readers,
    killed_subscribers_delay_nobody,
    stopped_subscribers_delay_nobody,
    buffers_are_whole_for_every_reader,
    ]
}

const ROLE: &str = "VMMFD_TEST_ORDER_PEER";

/// The processes that run at the same time: a process has eight queues for all its streams.
const AT_ONCE: usize = 4;

/// How long a stream waits for a stopped publisher.
const PATIENCE: Duration = Duration::from_millis(300);

const SIZE: u64 = 1 << 20;

fn start(subject: &Subject, role: &str, path: &Path) -> Peer {
    let kind = if subject.kind == Kind::Cuda { "cuda" } else { "fake" };
    let role = format!("{role} {kind} {}", path.display());
    Peer::run("stream::order_peers::process_of_a_test", ROLE, &role)
}

fn processes() -> usize {
    env::var("VMMFD_TEST_KILLS").map_or(8, |number| number.parse().unwrap())
}

/// Not a test: the process of [`start`].
#[test]
fn process_of_a_test() {
    let Ok(role) = env::var(ROLE) else { return };
    let [role, kind, path] = role.splitn(3, ' ').collect::<Vec<_>>().try_into().unwrap();
    let subject = if kind == "cuda" { Subject::cuda() } else { Subject::fake() };
    let (gpu, path) = (Gpu::of(&subject), Path::new(path));
    let [stream, opener] = [(); 2].map(|()| subject.driver.create_stream(0).unwrap());
    let mut random = SmallRng::seed_from_u64(process::id().into());
    let mut pause = move || thread::sleep(Duration::from_micros(random.random_range(0..2000)));
    if role == "publisher" {
        // Its streams go on only while the process runs.
        let gate = Timeline::create(&subject.device()).unwrap();
        let options = PublishOptions::fixed(SIZE, 8).every(LIMIT);
        let publisher = Publisher::create(&subject.device(), &options, &Config::default()).unwrap();
        publisher.listen(path).unwrap();
        println!("\nready");
        for number in 1u64.. {
            let loan = publisher.loan(LIMIT).unwrap();
            gate.wait(&stream, number, LIMIT).unwrap();
            gpu.fill(&stream, loan.address(), number as u8, SIZE as usize);
            loan.publish_on(&stream, &[number as u8]).unwrap();
            pause();
            gate.record(&opener).unwrap();
        }
    }
    let subscriber = subscribe(&subject, path, &SubscribeOptions::default().held(2)).unwrap();
    println!("\nready");
    if role == "checker" {
        check_all(&subject, &gpu, &subscriber);
        return println!("checked");
    }
    while let Ok(Received::Sample(sample)) = subscriber.receive_on(&stream, LIMIT) {
        pause();
        drop(sample);
    }
}

/// Whether all bytes are like the user byte.
fn is_whole(sample: &Sample) -> bool {
    let mut bytes = vec![0; SIZE as usize];
    sample.copy_out(0, &mut bytes).unwrap();
    // Fast also in a debug build.
    bytes == vec![sample.user()[0]; SIZE as usize]
}

fn killed_publishers_release_their_readers(subject: Subject) {
    lose_publishers(&subject, Signal::SIGKILL);
}

fn stopped_publishers_release_their_readers(subject: Subject) {
    lose_publishers(&subject, Signal::SIGSTOP);
}

fn lose_publishers(subject: &Subject, signal: Signal) {
    let (next, lost, longest) = (AtomicUsize::new(0), AtomicUsize::new(0), Mutex::new(Duration::ZERO));
    thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                let stream = subject.driver.create_stream(0).unwrap();
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= processes() {
                        break;
                    }
                    let (released, took) = lose_publisher(subject, &stream, signal, number as u64);
                    lost.fetch_add(usize::from(released), Ordering::Relaxed);
                    let mut longest = longest.lock().unwrap();
                    *longest = longest.max(took);
                }
            });
        }
    });
    let longest = longest.into_inner().unwrap();
    eprintln!("{signal}: {} of {} waits were released, the last {longest:?} after it", lost.into_inner(), processes());
}

/// Returns whether a wait was released, and how long after the signal all waits had ended.
fn lose_publisher(subject: &Subject, stream: &Stream, signal: Signal, seed: u64) -> (bool, Duration) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let publisher = start(subject, "publisher", &path);
    let subscriber = subscribe(subject, &path, &SubscribeOptions::default().held(2)).unwrap();
    let moment = Instant::now() + Duration::from_micros(SmallRng::seed_from_u64(seed).random_range(1000..30_000));
    let mut signalled = None;
    let mut was_lost = false;
    let end = loop {
        // Half of the signals come between two calls, and half while the stream waits.
        if seed.is_multiple_of(2) && signalled.is_none() && Instant::now() >= moment {
            publisher.signal(signal);
            signalled = Some(Instant::now());
        }
        match subscriber.receive_on(stream, PATIENCE) {
            Ok(Received::Sample(sample)) => {
                if signalled.is_none() && Instant::now() >= moment {
                    publisher.signal(signal);
                    signalled = Some(Instant::now());
                }
                stream.synchronize().unwrap();
                match sample.completion() {
                    Completion::Done => assert!(is_whole(&sample), "publication {} is torn", sample.number()),
                    Completion::Lost => was_lost = true,
                    Completion::Pending => panic!("the stream went on before publication {}", sample.number()),
                }
            }
            Ok(Received::Crashed(_)) => break signalled,
            Err(Error::Peer(PeerError::WorkLost { .. } | PeerError::Timeout { .. })) if signalled.is_some() => {
                break signalled;
            }
            other => panic!("{other:?}"),
        }
    };
    let took = end.unwrap().elapsed();
    assert!(took < 3 * PATIENCE + LIMIT / 10, "released {took:?} after the signal");
    drop(subscriber);
    // The context works.
    stream.synchronize().unwrap();
    (was_lost, took)
}

fn killed_subscribers_delay_nobody(subject: Subject) {
    lose_subscribers(&subject, Signal::SIGKILL);
}

fn stopped_subscribers_delay_nobody(subject: Subject) {
    lose_subscribers(&subject, Signal::SIGSTOP);
}

fn lose_subscribers(subject: &Subject, signal: Signal) {
    let gpu = Gpu::of(subject);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let options = PublishOptions::fixed(SIZE, 2 * AT_ONCE + 6);
    let publisher = Publisher::create(&subject.device(), &options, &Config::default().timeout(LIMIT)).unwrap();
    publisher.listen(&path).unwrap();
    let healthy = subscribe(subject, &path, &SubscribeOptions::default().held(2)).unwrap();
    let [writer, reader] = [(); 2].map(|()| subject.driver.create_stream(0).unwrap());
    let is_over = AtomicBool::new(false);
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        scope.spawn(|| {
            for number in 1u64.. {
                if is_over.load(Ordering::Acquire) {
                    break;
                }
                // No peer delays it.
                let loan = publisher.loan(Duration::from_secs(10)).unwrap();
                gpu.fill(&writer, loan.address(), number as u8, SIZE as usize);
                loan.publish_on(&writer, &[number as u8]).unwrap();
                let sample = healthy.receive_on(&reader, LIMIT).unwrap().sample().unwrap();
                assert!(is_whole(&sample) && sample.completion() == Completion::Done);
                while publisher.event().is_some() {}
            }
        });
        let losers: Vec<_> = (0..AT_ONCE)
            .map(|_| {
                scope.spawn(|| {
                    loop {
                        let number = next.fetch_add(1, Ordering::Relaxed);
                        if number >= processes() {
                            break;
                        }
                        let mut random = SmallRng::seed_from_u64(number as u64);
                        let peer = start(subject, "subscriber", &path);
                        thread::sleep(Duration::from_micros(random.random_range(0..30_000)));
                        peer.signal(signal);
                        thread::sleep(SHORT);
                        // A stopped process is killed here.
                    }
                })
            })
            .collect();
        let done = losers.into_iter().map(|loser| loser.join()).collect::<Vec<_>>();
        is_over.store(true, Ordering::Release);
        assert!(done.iter().all(Result::is_ok));
    });
    drop(healthy);
    let free = 2 * AT_ONCE as u64 + 6;
    wait_for("free buffers", || publisher.stats().unwrap().free == free);
    writer.synchronize().unwrap();
}

/// Scratch memory for work of random length.
fn scratch(subject: &Subject) -> Mapping {
    let size = SIZE.next_multiple_of(subject.unit());
    Mapping::new(&Allocation::create(&subject.device(), size).unwrap(), ReadWrite).unwrap()
}

/// Copies each buffer on a stream, gives the buffer back at once, and checks the copy later.
fn check_all(subject: &Subject, gpu: &Gpu, subscriber: &Subscriber) {
    let mut random = SmallRng::seed_from_u64(process::id().into());
    let [copies, busy] = [(); 2].map(|()| scratch(subject));
    let stream = subject.driver.create_stream(0).unwrap();
    while let Received::Sample(sample) = subscriber.receive_on(&stream, LIMIT).unwrap() {
        for _ in 0..random.random_range(0..4) {
            gpu.fill(&stream, busy.address(), 1, SIZE as usize);
        }
        gpu.copy(&stream, copies.address(), sample.address(), SIZE as usize);
        let byte = sample.user()[0];
        let number = sample.number();
        drop(sample);
        if random.random_range(0..2) == 0 {
            thread::yield_now();
        }
        stream.synchronize().unwrap();
        let mut bytes = vec![0; SIZE as usize];
        copies.copy_out(0, &mut bytes).unwrap();
        assert!(bytes == vec![byte; SIZE as usize], "publication {number} is torn");
    }
}

fn buffers_are_whole_for_every_reader(subject: Subject) {
    let publications: u64 = env::var("VMMFD_TEST_PUBLICATIONS").map_or(300, |number| number.parse().unwrap());
    let (gpu, mut random) = (Gpu::of(&subject), SmallRng::seed_from_u64(1));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let options = PublishOptions::fixed(SIZE, 3 * 2 + 2);
    let publisher = Publisher::create(&subject.device(), &options, &Config::default().timeout(LIMIT)).unwrap();
    publisher.listen(&path).unwrap();
    let mut peers = [(); 3].map(|()| start(&subject, "checker", &path));
    let busy = scratch(&subject);
    let streams = [(); 2].map(|()| subject.driver.create_stream(0).unwrap());
    for number in 1..=publications {
        let stream = &streams[random.random_range(0..2)];
        let loan = publisher.loan(LIMIT).unwrap();
        for _ in 0..random.random_range(0..4) {
            gpu.fill(stream, busy.address(), 1, SIZE as usize);
        }
        gpu.fill(stream, loan.address(), number as u8, SIZE as usize);
        loan.publish_on(stream, &[number as u8]).unwrap();
    }
    // A subscriber that has finished is not in the last figures.
    let stats = publisher.stats().unwrap();
    publisher.finish(LIMIT).unwrap();
    peers.iter_mut().for_each(|peer| peer.expect("checked"));
    let received: Vec<_> = stats.subscribers.iter().map(|usage| usage.delivered).collect();
    eprintln!("{publications} publications, of which the readers checked {received:?}");
    assert!(received.len() == 3 && received.iter().all(|count| *count > 0));
}
