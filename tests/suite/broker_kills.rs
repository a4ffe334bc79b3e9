//! Random kills of the server and its keeper while clients put and get: no acknowledged object is lost, and no reader sees old bytes.

use std::{
    collections::VecDeque,
    sync::{RwLock, atomic::Ordering::SeqCst},
};

use rand::{TryRng, rngs::SysRng};

use crate::support::{
    pages::{Template, nonce_of},
    prelude::*,
};

const CLIENTS: usize = 8;
const NAMES: usize = 10;

/// The numbers of an object's newest put: started, and acknowledged.
#[derive(Debug, Default)]
struct Written {
    started: AtomicU64,
    acknowledged: AtomicU64,
}

#[derive(Debug, Default)]
struct Counts {
    puts: u64,
    gets: u64,
    refused: BTreeMap<String, u64>,
}

struct Run {
    served: Served,
    written: Vec<Written>,
    counts: Mutex<Counts>,
    /// Clients hold it shared during a request.
    quiet: RwLock<()>,
    /// Leases that ended although their holders live.
    lost: Arc<Mutex<Vec<String>>>,
    is_over: AtomicBool,
}

/// A random number below the limit.
fn below(limit: usize) -> usize {
    SysRng.try_next_u64().unwrap() as usize % limit
}

fn name_of(object: usize) -> String {
    format!("{}/{}", object / NAMES, object % NAMES)
}

impl Run {
    fn start() -> Self {
        Self {
            served: Served::start(Keeper::Apart, &Subject::host()),
            written: (0..CLIENTS * NAMES).map(|_| Written::default()).collect(),
            counts: Mutex::default(),
            quiet: RwLock::default(),
            lost: Arc::default(),
            is_over: AtomicBool::new(false),
        }
    }

    /// Puts own names and gets any names until the run is over.
    fn client(&self, number: usize) {
        let client = Client::connect(&self.served.path, &Config::default().timeout(Duration::from_secs(600))).unwrap();
        let lost = Arc::clone(&self.lost);
        client.on_lost(move |_, what| lost.lock().unwrap().push(format!("{what:?}")));
        let template = Template::new();
        // The newest leases of this client.
        let mut leases = VecDeque::new();
        while !self.is_over.load(SeqCst) {
            let _running = self.quiet.read().unwrap();
            match below(10) {
                0..5 => self.put(&client, &template, number * NAMES + below(NAMES)),
                5..9 => self.get(&client, below(self.written.len())),
                _ => leases.extend(client.get(&Get::new(name_of(below(self.written.len()))))),
            }
            leases.drain(..leases.len().saturating_sub(5));
        }
    }

    fn put(&self, client: &Client, template: &Template, object: usize) {
        let number = self.written[object].started.fetch_add(1, SeqCst) + 1;
        let put = template.put(client, &name_of(object), number, Condition::Any);
        let mut counts = self.counts.lock().unwrap();
        match put {
            Ok(_) => {
                self.written[object].acknowledged.store(number, SeqCst);
                counts.puts += 1;
            }
            Err(error) => *counts.refused.entry(error.to_string()).or_default() += 1,
        }
    }

    /// Any put between the newest acknowledged before the get and the newest started after it may be seen.
    fn get(&self, client: &Client, object: usize) {
        let written = &self.written[object];
        let least = written.acknowledged.load(SeqCst);
        let seen = match client.get(&Get::new(name_of(object))) {
            Ok(lease) => {
                let (_, fd) = lease.into_parts().remove(0).into_segments().unwrap().remove(0);
                nonce_of(&fd)
            }
            Err(_) if least == 0 => return,
            Err(error) => panic!("`{}`, put {least}: {error}\n{}", name_of(object), self.served.log()),
        };
        let most = written.started.load(SeqCst);
        assert!((least..=most).contains(&seen), "`{}`: {seen}, not {least} to {most}", name_of(object));
        self.counts.lock().unwrap().gets += 1;
    }

    /// As [`Served::settled`], while the clients pause.
    fn settle(&self) -> [Pid; 2] {
        let _paused = self.quiet.write().unwrap();
        self.served.settled(0)
    }

    /// Ends a random process in a random way after a random time. Returns the kind of event.
    fn disturb(&self) -> (Signal, &'static str) {
        let [server, keeper] = self.settle();
        thread::sleep(Duration::from_micros(below(500_000) as u64));
        let (target, what) = [(server, "server"), (keeper, "keeper")][below(2)];
        let signal = [Signal::SIGKILL, Signal::SIGKILL, Signal::SIGTERM][below(3)];
        kill(target, signal).unwrap();
        until(|| !is_alive(target));
        (signal, what)
    }
}

/// `VMMFD_TEST_KILLS=1800` for half an hour: `make test-kills`.
#[test]
fn random_kills_lose_nothing() {
    let seconds = env::var("VMMFD_TEST_KILLS").map_or(10, |seconds| seconds.parse().unwrap());
    let run = Run::start();
    let mut events = BTreeMap::<_, u64>::new();
    thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS)
            .map(|number| {
                scope.spawn({
                    let run = &run;
                    move || run.client(number)
                })
            })
            .collect();
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_secs(seconds) && !clients.iter().any(|client| client.is_finished()) {
            *events.entry(run.disturb()).or_default() += 1;
        }
        run.is_over.store(true, SeqCst);
    });
    run.settle();
    let client = run.served.client();
    (0..run.written.len()).for_each(|object| run.get(&client, object));
    let counts = run.counts.into_inner().unwrap();
    eprintln!("{seconds} s, {events:?}\n{counts:?}");
    assert!(counts.refused.is_empty(), "{:?}", counts.refused);
    assert_eq!(*run.lost.lock().unwrap(), [""; 0]);
}
