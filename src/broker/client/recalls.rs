//! The holder's side of a recall: the background thread receives the broker's requests on a second connection.

use std::{collections::HashSet, fmt, sync::Arc, time::Instant};

use super::{Client, connection::Connection, holdings::OwnLease, subscription::Subscription};
use crate::{
    channel::deadline_after,
    error::Result,
    sys::lock,
    wire::broker::{EventKind, WatchHeader},
};

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
