//! Names that expire.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use super::Objects;
use crate::{broker::server::state::caller::ConnectionId, wire::broker::Lifetime};

/// When to check a name for expiry.
#[derive(Debug)]
pub(crate) struct Expiry {
    pub(crate) name: Arc<str>,
    pub(crate) at: Instant,
    /// The check that this one replaces.
    pub(crate) before: Option<Instant>,
}

impl Objects {
    /// Handles the disconnect of a name's maker.
    pub(crate) fn maker_disconnected(&mut self, connection: ConnectionId, name: &str) {
        if let Some(entry) = self.names.get_mut(name).filter(|entry| entry.maker == Some(connection)) {
            entry.maker = None;
            self.note_expiry(name);
        }
    }

    /// Whether a name's lifetime depends on the connection that put it.
    pub(crate) fn depends_on_maker(&self, name: &str) -> bool {
        self.names.get(name).is_some_and(|entry| matches!(entry.lifetime, Lifetime::Maker | Lifetime::Leased))
    }

    /// Schedules the next check of a name, unless it can't expire.
    pub(crate) fn note_expiry(&mut self, name: &str) {
        // Everything is checked when the clients of the previous server have had their time.
        if self.awaits_clients() {
            return;
        }
        let Some(entry) = self.names.get_mut(name) else { return };
        let at = match entry.lifetime {
            Lifetime::Deleted => return,
            Lifetime::Idle { ms } if entry.leases == 0 => entry.idle_since.checked_add(Duration::from_millis(ms)),
            Lifetime::Maker if entry.maker.is_none() => Some(entry.idle_since),
            Lifetime::Leased if entry.maker.is_none() && entry.leases == 0 => Some(entry.idle_since),
            _ => None,
        };
        // One timer per name: clients can release leases at any rate.
        if let Some(at) = at.filter(|at| entry.next_check.is_none_or(|next_check| next_check > *at)) {
            let before = entry.next_check.replace(at);
            self.expiries.push(Expiry { name: name.into(), at, before });
        }
    }

    /// Removes a name if its lifetime is over.
    pub(crate) fn expire(&mut self, name: &str) {
        let now = self.now.at;
        let Some(entry) = self.names.get_mut(name) else { return };
        entry.next_check = None;
        let over = match entry.lifetime {
            Lifetime::Deleted => false,
            Lifetime::Idle { ms } => {
                entry.leases == 0 && now.saturating_duration_since(entry.idle_since) >= Duration::from_millis(ms)
            }
            Lifetime::Maker => entry.maker.is_none(),
            Lifetime::Leased => entry.maker.is_none() && entry.leases == 0,
        };
        match over {
            false => self.note_expiry(name),
            // The put's end checks the name again.
            true if self.is_unconfirmed(name) => {}
            true => self.remove_unasked(name, "expired"),
        }
    }
}
