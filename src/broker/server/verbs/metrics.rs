//! Figures of the server itself.

use std::{
    collections::BTreeMap,
    process,
    time::{Duration, Instant},
};

use crate::broker::server::{
    ConnectionId, io::connection::Asked, io::reactor::Reactor, state::bounds::memory_of, state::objects::now_ms,
};
use crate::{
    error::BrokerError,
    sys,
    wire::broker::{Durations, KeeperInfo, Measured, Message, RequestCount, Room, StoreRoom},
};

/// The upper bounds of the classes of durations, in microseconds.
const BOUNDS: [u64; 12] = [25, 50, 100, 250, 500, 1_000, 2_500, 10_000, 100_000, 1_000_000, 10_000_000, 60_000_000];

/// How many bytes of totals.
const TOTALS: usize = 32 * 1024;

/// What was asked of the server so far.
#[derive(Debug)]
pub(crate) struct Metrics {
    started_ms: u64,
    requests: BTreeMap<(&'static str, String), u64>,
    durations: BTreeMap<&'static str, ([u64; BOUNDS.len() + 1], u64)>,
}

impl Metrics {
    pub(crate) fn new() -> Self {
        Self { started_ms: now_ms(), requests: BTreeMap::new(), durations: BTreeMap::new() }
    }

    /// Counts a request that is answered.
    pub(crate) fn count(&mut self, verb: &'static str, outcome: &str, took: Duration) {
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        match self.requests.get_mut(&(verb, String::new())).filter(|_| outcome == "ok") {
            Some(count) => *count += 1,
            // The empty outcome stands for `ok`: the most frequent needs no text of its own.
            None => {
                let outcome = if outcome == "ok" { String::new() } else { outcome.to_owned() };
                *self.requests.entry((verb, outcome)).or_default() += 1;
            }
        }
        let (classes, sum) = self.durations.entry(verb).or_default();
        classes[BOUNDS.partition_point(|bound| *bound < micros)] += 1;
        *sum = sum.saturating_add(micros);
    }
}

impl Reactor {
    /// Notes that a request has come.
    ///
    /// # Errors
    /// If the unanswered requests of its user take too much memory.
    pub(crate) fn begin_request(&mut self, id: ConnectionId, request: &Message) -> Result<(), BrokerError> {
        let Some(connection) = self.connections.get_mut(&id) else { return Ok(()) };
        let counted = self.objects.users().add_request(connection.caller.uid, memory_of(request));
        let bytes = if counted.is_ok() { memory_of(request) } else { 0 };
        connection.asked = Some(Asked { verb: request.name(), since: Instant::now(), bytes });
        counted
    }

    /// Notes that a request is answered.
    pub(crate) fn count_request(&mut self, id: ConnectionId, outcome: &str) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        if let Some(Asked { verb, since, bytes }) = connection.asked.take() {
            self.objects.users().remove_request(connection.caller.uid, bytes);
            self.metrics.count(verb, outcome, since.elapsed());
        }
    }

    /// How much the server holds and does.
    pub(crate) fn measure(&mut self, id: ConnectionId) {
        let Some(caller) = self.connections.get(&id).map(|connection| connection.caller.clone()) else { return };
        let (objects, versions, leases, _) = self.objects.sums();
        let (used, allowed) = self.objects.store().room();
        let (quota, total_quota) = self.objects.users().rules().limits();
        let crashes = self.history.crashes().cloned().map(|mut crash| {
            if !caller.is_superuser() {
                crash.names.clear();
            }
            crash
        });
        let number = |of: usize| u64::try_from(of).unwrap_or(u64::MAX);
        let outcome = |text: &String| if text.is_empty() { "ok".to_owned() } else { text.clone() };
        let requests = self.metrics.requests.iter().map(|((verb, text), count)| RequestCount {
            verb: (*verb).to_owned(),
            outcome: outcome(text),
            count: *count,
        });
        let durations = self.metrics.durations.iter().map(|(verb, (counts, sum_us))| Durations {
            verb: (*verb).to_owned(),
            bounds_us: BOUNDS.to_vec(),
            counts: counts.to_vec(),
            sum_us: *sum_us,
        });
        let measured = Measured {
            instance: self.objects.journal().instance().to_owned(),
            started_ms: self.metrics.started_ms,
            restarts: self.objects.journal().restarts(),
            objects,
            versions,
            leases,
            connections: number(self.connections.len()),
            watchers: number(self.watchers.len()),
            descriptors: Room { used: number(self.descriptors()), allowed: number(self.limit) },
            store: StoreRoom {
                kind: self.objects.store().keeper().as_str().to_owned(),
                used: number(used),
                allowed: number(allowed),
            },
            requests: requests.collect(),
            durations: durations.collect(),
            totals: self.objects.totals(&caller, TOTALS),
            version: Some(env!("CARGO_PKG_VERSION").to_owned()),
            lost_versions: Some(self.objects.lost().versions),
            quota: Some(quota),
            total_quota: Some(total_quota),
            pid: Some(process::id()),
            keeper: self
                .keeping
                .keeper_pid()
                .filter(|_| self.objects.store().is_greeted())
                .map(|pid| KeeperInfo { pid, started_ms: sys::started_ms(pid) }),
            crashes: Some(crashes.collect()),
        };
        self.reply(id, &Message::Measured(Box::new(measured)));
    }
}
