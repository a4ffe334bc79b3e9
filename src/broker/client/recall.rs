//! Recalls: asks the holders of versions to release their leases, and reports which holders did. In a holder, the background thread
//! receives the broker's requests on a second connection.

use std::{
    collections::{BTreeSet, HashSet},
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    Client, Holders,
    connection::Connection,
    holdings::OwnLease,
    socket::{Subscription, answer},
};
use crate::{
    broker::request::check_name,
    channel::deadline_after,
    error::{BrokerError, Error, RefusalCode, Result},
    sys::lock,
    wire::broker::{self, EventKind, HeldLease, MAX_RECALLED, Message, Summary, WatchHeader},
};

/// The time until holders are asked again, which doubles each time: a holder may have connected or reconnected in between.
const REPEAT: Duration = Duration::from_secs(1);

/// The versions of a name for [`Client::recall`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum RecallOf {
    /// The current version; if the name was deleted, all of its versions.
    Current,
    /// All versions except the current version.
    Earlier,
    /// The versions with this number: several if the name was deleted and put again.
    Version(u64),
}

/// The result of [`Client::recall`].
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct Recall {
    /// The leases of the versions at the time of the request and since then.
    pub holders: Vec<RecallHolder>,
    /// Whether the broker holds none of the versions any more: their memory is free, except where a process has it mapped without a lease.
    pub free: bool,
    /// Whether a name [keeps](super::ObjectInfo::is_kept) one of the versions, so that the broker holds it without a lease too.
    pub kept: bool,
}

/// A lease of a recalled version.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct RecallHolder {
    /// The lease, and its process.
    #[serde(flatten)]
    pub lease: HeldLease,
    /// Whether the lease is gone, also if its process exited or closed the connection, but never because the time is over.
    pub acknowledged: bool,
}

impl Recall {
    /// Whether no process has a lease any more.
    pub fn is_complete(&self) -> bool {
        are_gone(&self.holders)
    }
}

fn are_gone(holders: &[RecallHolder]) -> bool {
    holders.iter().all(|holder| holder.acknowledged)
}

impl Client {
    /// Asks all holders of versions of a name to release their leases, and waits up to `within` until they have. In each holder, the
    /// handlers of [`Lease::on_recall`](super::Lease::on_recall) are called. No holder can be forced: a descriptor can't be revoked.
    ///
    /// Blocks for at most `within`, and for the broker's answers. Meanwhile holders are asked again after 1, 2, 4, ... seconds.
    ///
    /// # Errors
    /// [`Error::Broker`] with the code `denied` unless this user may delete the name, `absent` if there is no such version, `failed` if the
    /// broker loses its contents meanwhile; [`Error::Peer`], [`Error::System`], [`Error::Interrupted`]. Holders may have been asked then.
    pub fn recall(&self, name: &str, of: RecallOf, within: Duration) -> Result<Recall> {
        check_name(name)?;
        let number = match of {
            RecallOf::Version(number) => Some(number),
            _ => None,
        };
        let found = match self.stat(name, number) {
            Ok(info) => Some(info.version.summary),
            Err(Error::Broker(refusal)) if refusal.code == RefusalCode::Absent => None,
            Err(error) => return Err(error),
        };
        let leases = self.who(name)?.leases.into_iter().filter(|lease| lease.name == name);
        let wanted = leases.filter(|lease| match of {
            RecallOf::Current => found.as_ref().is_none_or(|found| found.id == lease.id),
            RecallOf::Earlier => found.as_ref().is_none_or(|found| found.id != lease.id),
            RecallOf::Version(number) => lease.version == number,
        });
        let mut ids: BTreeSet<String> = wanted.map(|lease| lease.id).collect();
        if found.is_none() && ids.is_empty() {
            let message = format!("there is no object `{name}`, or no such version, and no process holds one");
            return Err(BrokerError::new(RefusalCode::Absent, message).into());
        }
        let found = found.filter(|_| of != RecallOf::Earlier);
        ids.extend(found.iter().map(|found| found.id.clone()));
        self.recall_known(name, &Vec::from_iter(ids), found, within)
    }

    /// As [`Client::recall`], for versions by their UUIDs, of names that start with `prefix`. Unknown versions count as free.
    ///
    /// # Errors
    /// As [`Client::recall`], except `absent`.
    pub fn recall_ids(&self, prefix: &str, ids: &[String], within: Duration) -> Result<Recall> {
        self.recall_known(prefix, ids, None, within)
    }

    /// `known`: a version that may have no lease.
    fn recall_known(&self, prefix: &str, ids: &[String], known: Option<Summary>, within: Duration) -> Result<Recall> {
        let deadline = deadline_after(within);
        let mut watch = self.watch(prefix, None)?;
        let instance = watch.place().instance.clone();
        // Before the request: a holder may release its lease at once.
        let mut holders = Vec::new();
        self.update(&mut holders, prefix, ids)?;
        let mut repeat = REPEAT;
        self.send_recall(ids)?;
        let mut repeat_at = deadline_after(repeat);
        let resuming = loop {
            let resuming = self.update(&mut holders, prefix, ids)?;
            // A holder that has not resumed its lease after a restart of the server has not acknowledged.
            if are_gone(&holders) && !resuming || Instant::now() >= deadline {
                break resuming;
            }
            let event = watch.next(deadline.min(repeat_at).saturating_duration_since(Instant::now()))?;
            if watch.place().instance != instance {
                let message = "the broker lost its contents during the recall: recall the versions again";
                return Err(BrokerError::new(RefusalCode::Failed, message).into());
            }
            match event {
                // All at once: each question for the leases has the same answer.
                Some(_) => watch.discard(),
                None if Instant::now() < deadline => {
                    self.send_recall(ids)?;
                    repeat *= 2;
                    repeat_at = deadline_after(repeat);
                }
                None => {}
            }
        };
        let known = known.map(|known| (known.name, known.version));
        let leased = holders.iter().map(|holder| (holder.lease.name.clone(), holder.lease.version));
        let kept = self.keeps(known.into_iter().chain(leased).collect(), ids)?;
        Ok(Recall { free: !kept && !resuming && are_gone(&holders), kept, holders })
    }

    /// Notes which leases are left. A restart of the server changes their numbers and times. Returns whether leases may still be resumed:
    /// then a lease that is missing may appear again.
    fn update(&self, holders: &mut Vec<RecallHolder>, prefix: &str, ids: &[String]) -> Result<bool> {
        let Holders { leases: mut left, resuming, .. } = self.who(prefix)?;
        left.retain(|lease| ids.contains(&lease.id));
        let same = |some: &HeldLease, other: &HeldLease| {
            let key = |lease: &HeldLease| (lease.pid, lease.uid, lease.size);
            some.id == other.id && key(some) == key(other)
        };
        for holder in holders.iter_mut() {
            let at = left.iter().position(|lease| same(lease, &holder.lease));
            holder.acknowledged = at.is_none() && !resuming;
            at.into_iter().for_each(|at| drop(left.remove(at)));
        }
        let holder = |lease| RecallHolder { lease: HeldLease { recalled: true, ..lease }, acknowledged: false };
        holders.extend(left.into_iter().map(holder));
        Ok(resuming)
    }

    fn send_recall(&self, ids: &[String]) -> Result<()> {
        for ids in ids.chunks(MAX_RECALLED) {
            answer!(self.ask(&Message::Recall(broker::Recall { ids: ids.to_vec() }))?, Done, "done");
        }
        Ok(())
    }

    /// Whether a name keeps one of the versions.
    fn keeps(&self, versions: BTreeSet<(String, u64)>, ids: &[String]) -> Result<bool> {
        for (name, version) in versions {
            match self.stat(&name, Some(version)) {
                Ok(info) if info.is_kept() && ids.contains(&info.version.summary.id) => return Ok(true),
                // The name may belong to another user now.
                Ok(_) | Err(Error::Broker(_)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(false)
    }
}

// The holder.

/// A program's handler, called once.
pub(super) type RecallHandler = Box<dyn FnOnce() + Send>;

/// Whether a lease is recalled, and the handlers to call then.
#[derive(Default)]
pub(super) struct RecallState {
    recalled: bool,
    handlers: Vec<RecallHandler>,
}

impl fmt::Debug for RecallState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecallState").field("recalled", &self.recalled).finish_non_exhaustive()
    }
}

impl RecallState {
    pub(super) fn is_recalled(&self) -> bool {
        self.recalled
    }

    /// Marks the lease as recalled. Returns the handlers to call.
    fn recall(&mut self) -> Vec<RecallHandler> {
        self.recalled = true;
        std::mem::take(&mut self.handlers)
    }
}

/// The recalls of a connection's leases.
#[derive(Debug, Default)]
pub(super) struct Recalls {
    /// Whether the program has asked for them.
    wanted: bool,
    /// A subscription that the background thread has not taken yet.
    fresh: Option<Subscription>,
}

impl Connection {
    /// Starts to receive recalls, unless it does already. Afterwards earlier recalls are known.
    ///
    /// # Errors
    /// [`Error::Misuse`] on a socket without a path; errors of [`Client::connect`] and [`Client::who`].
    pub(super) fn watch_recalls(self: &Arc<Self>) -> Result<()> {
        self.check_fork()?;
        let mut recalls = lock(&self.recalls);
        if !recalls.wanted {
            let subscription = self.subscribe(deadline_after(self.timeout()))?;
            *recalls = Recalls { wanted: true, fresh: Some(subscription) };
            self.wake_watcher();
        }
        Ok(())
    }

    /// Calls a handler when the lease is recalled, or soon if it is.
    pub(super) fn on_recall(self: &Arc<Self>, held: &OwnLease, call: RecallHandler) -> Result<()> {
        self.watch_recalls()?;
        let mut state = lock(&held.recall);
        state.handlers.push(call);
        if state.recalled {
            let calls = state.recall();
            drop(state);
            self.call_soon(calls);
        }
        Ok(())
    }

    /// Opens a connection that receives recalls, and checks for earlier recalls. Waits until `deadline` for a listener.
    fn subscribe(self: &Arc<Self>, deadline: Instant) -> Result<Subscription> {
        let dialler = self.second_connection("recalls")?;
        let watch = WatchHeader { recalls: true, ..WatchHeader::default() };
        let (subscription, _) = Subscription::watch(dialler, deadline, watch)?;
        self.find_recalled()?;
        Ok(subscription)
    }

    /// Marks the leases whose versions were recalled before.
    fn find_recalled(self: &Arc<Self>) -> Result<()> {
        let names = lock(&self.holdings).leases.values().map(|held| held.header.name.clone()).collect::<Vec<_>>();
        // Names are ASCII.
        let shared = |some: String, other: String| {
            let same = some.bytes().zip(other.bytes()).take_while(|(some, other)| some == other).count();
            some[..same].to_owned()
        };
        let Some(prefix) = names.into_iter().reduce(shared) else { return Ok(()) };
        let leases = Client(Arc::clone(self)).who(&prefix)?.leases;
        self.mark_recalled(&leases.into_iter().filter(|lease| lease.recalled).map(|lease| lease.id).collect());
        Ok(())
    }

    /// Marks the leases of recalled versions.
    fn mark_recalled(&self, ids: &HashSet<String>) {
        let held = |held: &&Arc<OwnLease>| ids.contains(&held.header.id);
        let held: Vec<Arc<OwnLease>> = lock(&self.holdings).leases.values().filter(held).cloned().collect();
        held.iter().for_each(|held| {
            let calls = lock(&held.recall).recall();
            self.call_soon(calls);
        });
    }

    /// Lets the background thread call handlers.
    fn call_soon(&self, calls: Vec<RecallHandler>) {
        if !calls.is_empty() {
            self.handle(|handlers| handlers.recalled.extend(calls));
            self.wake_watcher();
        }
    }

    /// Takes received recalls, on the background thread, while the connection is up. Returns whether to try again later.
    pub(super) fn receive_recalls(self: &Arc<Self>, subscription: &mut Option<Subscription>) -> bool {
        let wanted = {
            let mut recalls = lock(&self.recalls);
            *subscription = recalls.fresh.take().or_else(|| subscription.take());
            recalls.wanted
        };
        let taken = loop {
            let Some(current) = subscription else {
                match wanted {
                    false => break Ok(()),
                    // After a restart of the broker.
                    true => match self.subscribe(Instant::now()) {
                        Ok(renewed) => *subscription = Some(renewed),
                        Err(error) => break Err(error),
                    },
                }
                continue;
            };
            match current.try_receive() {
                Ok(None) => break Ok(()),
                Ok(Some(events)) => {
                    let recalled = events.events.into_iter().filter(|event| event.kind == EventKind::Recalled);
                    self.mark_recalled(&recalled.map(|event| event.id).collect());
                    if events.lost
                        && let Err(error) = self.find_recalled()
                    {
                        break Err(error);
                    }
                }
                Err(error) => {
                    tracing::debug!(%error, "the connection for recalls broke");
                    *subscription = None;
                }
            }
        };
        taken.inspect_err(|error| tracing::debug!(%error, "cannot receive recalls yet")).is_err()
    }
}
