//! A deterministic simulation of the broker: random schedules of requests, kills, delays and clock changes, which shrink if they fail.
//!
//! | File | Purpose |
//! |---|---|
//! | `step` | the steps of a schedule, their generation from a seed, and defects that the simulation must find |
//! | `world`, `client` | scripted clients, and the channels |
//! | `server` | the server's event loop and its keeper |
//! | `oracle`, `check` | the promises, and the checks after each step and at the end |
//!
//! Not simulated: `io` itself, leases of several records, clients that restore lost versions, a broker without a keeper, and the time limits
//! after which a silent process is killed.
//!
//! `cargo test simulation` runs a bounded number of schedules, and `make test-simulation SECONDS=3600` as many as fit the time. A failure
//! prints a schedule for [`REGRESSIONS`].

mod check;
mod client;
mod oracle;
mod server;
mod step;
mod world;

use std::{
    cell::RefCell,
    panic::{self, AssertUnwindSafe},
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use self::{
    step::{
        FLAWS, Flaw,
        Kind::*,
        Random,
        Request::*,
        Step::{self, *},
    },
    world::World,
};

/// Steps per schedule.
const LENGTH: usize = 50;

/// Schedules per test run, and at most for a flaw.
const SCHEDULES: u64 = 500;
const SCHEDULES_PER_FLAW: u64 = 3000;

thread_local! {
    /// The random numbers of this thread's server. `None` outside the simulation.
    static TOKENS: RefCell<Option<Random>> = const { RefCell::new(None) };
}

fn seed_tokens() {
    TOKENS.set(Some(Random(1)));
}

/// The next token of a simulated server.
pub(in crate::broker::server) fn random() -> Option<[u8; 16]> {
    let next = || TOKENS.with_borrow_mut(|tokens| tokens.as_mut().map(Random::next));
    Some((u128::from(next()?) << 64 | u128::from(next()?)).to_le_bytes())
}

/// Runs a schedule. Returns the first violation.
fn run(steps: &[Step], flaw: Option<Flaw>) -> Result<(), String> {
    let result = panic::catch_unwind(AssertUnwindSafe(|| {
        let mut world = World::new(flaw);
        steps.iter().try_for_each(|step| world.step(*step))?;
        world.finish()
    }));
    TOKENS.set(None);
    result.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
        Err(format!("panic: {}", text.unwrap_or_default()))
    })
}

/// Removes steps as long as the schedule still fails.
fn shrink(mut steps: Vec<Step>, flaw: Option<Flaw>) -> Vec<Step> {
    let mut size = steps.len() / 2;
    while size > 0 {
        let (mut at, before) = (0, steps.len());
        while at < steps.len() {
            let mut fewer = steps.clone();
            fewer.drain(at..(at + size).min(steps.len()));
            match run(&fewer, flaw) {
                Ok(()) => at += size,
                Err(_) => steps = fewer,
            }
        }
        if size > 1 || steps.len() == before {
            size /= 2;
        }
    }
    steps
}

/// Runs the schedules of some seeds until one fails. Returns its steps and the violation.
fn search(seeds: impl IntoIterator<Item = u64>, flaw: Option<Flaw>) -> Option<(Vec<Step>, String)> {
    let schedules = seeds.into_iter().map(|seed| Random(seed).schedule(LENGTH));
    schedules.into_iter().find_map(|steps| run(&steps, flaw).err().map(|why| (steps, why)))
}

/// Shrunk schedules that failed once.
const REGRESSIONS: &[&[Step]] = &[
    // A server died while it sent everything to its keeper again. The keeper then dropped all descriptors that the next server did not send.
    &[Ask(1, Put { name: 0, memory: 2, kind: New }), Exchange(1), KeeperHangsUp, Turn, KillServer],
    // The keeper closed the connection without reading an acknowledged version.
    &[
        Ask(2, Delete { name: 0 }),
        KillServerAfter(6),
        Deliver(1),
        Ask(1, Put { name: 2, memory: 0, kind: Maker }),
        Tick(400),
        Turn,
        Turn,
        Exchange(1),
        KeeperHangsUp,
    ],
    // A version was dropped while its entry was being sent.
    &[
        Ask(1, Put { name: 0, memory: 0, kind: Keep }),
        Deliver(2),
        Ask(2, Put { name: 0, memory: 1, kind: Keep }),
        Exchange(2),
        KeeperHangsUp,
        Ask(0, Delete { name: 0 }),
        HangUp(0),
    ],
    // Waiting changes of a name began together: a put was refused because the name existed, and the next change deleted it.
    &[
        KillKeeper,
        Ask(0, Delete { name: 1 }),
        Ask(2, Put { name: 1, memory: 1, kind: New }),
        Ask(1, Put { name: 1, memory: 0, kind: Leased }),
        Exchange(1),
        Deliver(1),
    ],
    // A put expired. Server and keeper died before the next keeper had its number, and its client repeated it.
    &[
        Ask(1, Put { name: 2, memory: 0, kind: Leased }),
        Deliver(0),
        HangUp(1),
        Exchange(0),
        Deliver(2),
        KillKeeper,
        HangUp(0),
        KillServerAfter(3),
        Turn,
        StartKeeper,
        Tick(11_000),
        Connect(0),
        Exchange(0),
    ],
    // The same for a delete, which the client repeated after another put of the name.
    &[
        Ask(0, Put { name: 0, memory: 0, kind: New }),
        Exchange(0),
        Ask(1, Delete { name: 0 }),
        Deliver(0),
        HangUp(1),
        KillKeeper,
        Turn,
        StartKeeper,
        Turn,
        Sync,
        KillServer,
        StartServer,
        Receive(0),
        Connect(0),
        Exchange(0),
        Ask(0, Put { name: 0, memory: 1, kind: New }),
        Exchange(0),
        Connect(1),
        Exchange(1),
    ],
    // The earlier versions of two names that were put at the same time exceeded their owner's quota.
    &[
        Ask(1, Put { name: 1, memory: 1, kind: Keep }),
        Ask(0, Put { name: 0, memory: 3, kind: New }),
        Exchange(0),
        Ask(0, Put { name: 2, memory: 3, kind: Idle }),
        Exchange(1),
        Ask(1, Put { name: 0, memory: 2, kind: Keep }),
        KillKeeper,
        Ask(2, Put { name: 1, memory: 1, kind: Replace }),
        Exchange(1),
        Exchange(2),
    ],
];

#[test]
fn simulation_finds_no_violation() {
    REGRESSIONS.iter().for_each(|steps| assert_eq!(run(steps, None), Ok(()), "{steps:?}"));
    let seconds = std::env::var("SECONDS").ok().and_then(|seconds| seconds.parse().ok());
    let start = Instant::now();
    let deadline = seconds.map(|seconds| start + Duration::from_secs(seconds));
    // Other seeds in each longer run.
    let first = seconds.map_or(0, |_| crate::broker::server::state::root::Time::now().ms << 20);
    let next = AtomicU64::new(0);
    let is_over = |done| deadline.map_or(done >= SCHEDULES, |deadline| Instant::now() >= deadline);
    let seeds = || {
        std::iter::from_fn(|| {
            let done = next.fetch_add(1, Ordering::Relaxed);
            (!is_over(done)).then_some(first + done)
        })
    };
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let failed = thread::scope(|scope| {
        let threads = (0..threads).map(|_| scope.spawn(|| search(seeds(), None))).collect::<Vec<_>>();
        threads.into_iter().filter_map(|thread| thread.join().unwrap()).next()
    });
    if let Some((failed, why)) = failed {
        let steps = shrink(failed, None);
        panic!("{why}\nshrunk: {:?}\n{steps:?}", run(&steps, None));
    }
    eprintln!("{} schedules in {:?}", next.load(Ordering::Relaxed), start.elapsed());
}

#[test]
fn simulation_finds_each_flaw() {
    let missed = |flaw: &Flaw| {
        let found = search(0..SCHEDULES_PER_FLAW, Some(*flaw));
        if let Some((found, _)) = &found
            && std::env::var_os("SECONDS").is_some()
        {
            let steps = shrink(found.clone(), Some(*flaw));
            eprintln!("{flaw:?}: {}\n    {steps:?}", run(&steps, Some(*flaw)).unwrap_err());
        }
        found.is_none()
    };
    let missed = FLAWS.iter().filter(|flaw| missed(flaw)).collect::<Vec<_>>();
    assert!(missed.is_empty(), "{missed:?}");
}
