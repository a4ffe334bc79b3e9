//! Two signals, at any distance, to the broker's two processes: no acknowledged object is lost while one of them survives.

use crate::{
    broker_keeper::{nonce_of_segments, put_segments},
    support::prelude::*,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Process {
    Server,
    Keeper,
}

/// A signal, and its receiver.
type Event = (Signal, Process);

const SIGNALS: [Signal; 3] = [Signal::SIGHUP, Signal::SIGTERM, Signal::SIGKILL];

/// Every pair of events.
fn pairs() -> impl Iterator<Item = [Event; 2]> {
    let events = || SIGNALS.into_iter().flat_map(|signal| [(signal, Process::Server), (signal, Process::Keeper)]);
    events().flat_map(move |first| events().map(move |second| [first, second]))
}

/// Whether the objects may be gone: both processes are killed, or both are asked to exit.
fn may_lose([first, second]: [Event; 2]) -> bool {
    first.1 != second.1 && first.0 == second.0 && first.0 != Signal::SIGHUP
}

/// A broker whose server and keeper a small init restarts, with objects of so many segments each.
struct Broker {
    served: Served,
    objects: u8,
    segments: usize,
}

impl Broker {
    fn start(objects: u8, segments: usize) -> Self {
        let broker = Self { served: Served::start(Keeper::Apart, &Subject::host()), objects, segments };
        broker.fill();
        broker
    }

    /// Puts all objects anew.
    fn fill(&self) {
        let client = Client::connect(&self.served.path, &Config::default()).unwrap();
        client.list("").unwrap().into_iter().for_each(|object| client.delete(&object.name).unwrap());
        (0..self.objects).for_each(|number| put_segments(&self.served, &number.to_string(), number, self.segments));
    }

    /// The server and the keeper, once the keeper has everything and no other process is left.
    fn settled(&self) -> [Pid; 2] {
        self.served.settled(usize::from(self.objects) * self.segments)
    }

    /// Sends both signals, and returns whether all objects are there once a server answers.
    fn survives(&self, [first, second]: [Event; 2], distance: Duration) -> bool {
        let [server, keeper] = self.settled();
        let send = |(signal, process): Event| {
            // Fails if the first signal has ended the process.
            let _ = kill(if process == Process::Server { server } else { keeper }, signal);
        };
        send(first);
        let begun = Instant::now();
        while begun.elapsed() < distance {
            // A sleep is not exact enough for a millisecond.
            thread::sleep((distance - begun.elapsed().min(distance)).saturating_sub(Duration::from_millis(1)) / 2);
        }
        send(second);
        // Every signal ends its process, except SIGHUP to the keeper. A dying process still looks alive.
        let ends = |process: Process| {
            [first, second].iter().any(|event| event.1 == process && *event != (Signal::SIGHUP, Process::Keeper))
        };
        until(|| !(ends(Process::Server) && is_alive(server) || ends(Process::Keeper) && is_alive(keeper)));
        let client = loop {
            // The server that answers first may be the one that exits.
            let client = Client::connect(&self.served.path, &Config::default().timeout(Duration::from_secs(20)));
            match client.and_then(|client| client.list("").map(|list| (client, list.len()))) {
                Ok((_, count)) if count < usize::from(self.objects) => return false,
                Ok((client, _)) => break client,
                Err(_) => {}
            }
        };
        (0..self.objects).for_each(|number| {
            assert_eq!(nonce_of_segments(&client, &number.to_string(), self.segments), number);
        });
        true
    }
}

/// Sends each pair at some of these distances, in milliseconds: `each` of them, in turn.
fn send_pairs(broker: &Broker, distances: &[u64], each: usize) {
    let mut next = distances.iter().cycle();
    for pair in pairs() {
        let mut lost = Vec::new();
        for distance in next.by_ref().take(each) {
            if !broker.survives(pair, Duration::from_millis(*distance)) {
                lost.push(*distance);
                broker.fill();
            }
        }
        if !lost.is_empty() {
            eprintln!("{pair:?}: lost at {lost:?} ms");
        }
        assert!(lost.is_empty() || may_lose(pair), "{pair:?} at {lost:?} ms: {}", broker.served.log());
    }
}

/// The keeper reads both signals in one turn.
#[test]
fn keeper_ends_once_for_two_signals() {
    let broker = Broker::start(1, 1);
    let [_, keeper] = broker.settled();
    for signal in [Signal::SIGSTOP, Signal::SIGTERM, Signal::SIGINT, Signal::SIGCONT] {
        kill(keeper, signal).unwrap();
    }
    until(|| !is_alive(keeper));
    broker.settled();
    let client = Client::connect(&broker.served.path, &Config::default()).unwrap();
    assert_eq!(nonce_of_segments(&client, "0", 1), 0);
    assert!(!broker.served.log().contains("for the next server"), "{}", broker.served.log());
}

/// `VMMFD_TEST_PAIRS=all` for each millisecond up to 100: `make test-pairs`.
#[test]
fn signal_pairs_lose_nothing() {
    let all = env::var("VMMFD_TEST_PAIRS").is_ok_and(|which| which == "all");
    let every: Vec<u64> = (0..=100).collect();
    for (objects, segments) in [(1, 1), (4, 175)] {
        let broker = Broker::start(objects, segments);
        match all {
            true => send_pairs(&broker, &every, every.len()),
            false => send_pairs(&broker, &[0, 1, 2, 4, 7, 12, 20, 35, 60, 100], 2),
        }
    }
}

/// The time in which the second kill still loses something, from kills at evenly spread distances: the best threshold, and the longest.
fn window(broker: &Broker, pair: [Event; 2], kills: u64, longest: Duration) -> [Duration; 2] {
    let mut lost = Vec::new();
    for number in 0..kills {
        let distance = longest.mul_f64(number as f64 / kills as f64);
        let survives = broker.survives(pair, distance);
        if !survives {
            broker.fill();
        }
        lost.push((distance, !survives));
    }
    // The distance that separates losses from survivals with the fewest exceptions.
    let exceptions = |threshold: Duration| lost.iter().filter(|(at, lost)| (*at < threshold) != *lost).count();
    let median = lost.iter().map(|(at, _)| *at).min_by_key(|at| exceptions(*at)).unwrap();
    [median, lost.iter().filter(|(_, lost)| *lost).map(|(at, _)| *at).max().unwrap_or_default()]
}

#[test]
#[ignore = "a measurement: make test-pairs prints it"]
fn windows_between_two_kills() {
    let [server, keeper] = [Process::Server, Process::Keeper].map(|process| (Signal::SIGKILL, process));
    for (objects, segments) in [(1, 1), (4, 175)] {
        let broker = Broker::start(objects, segments);
        for (pair, longest, what) in
            [([server, keeper], 30, "server, then keeper"), ([keeper, server], 120, "keeper, then server")]
        {
            let [median, worst] = window(&broker, pair, 300, Duration::from_millis(longest));
            eprintln!(
                "{} segments, kill of {what}: median {median:.1?}, longest {worst:.1?}",
                usize::from(objects) * segments
            );
            assert!(worst < Duration::from_millis(longest));
        }
    }
}
