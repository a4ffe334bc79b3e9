//! Names that expire.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use super::{Name, Objects};
use crate::{broker::server::state::caller::ConnectionId, wire::broker::Lifetime};

impl Objects {
    /// Sets the connection that put the current version of a name, if it is still open.
    pub(super) fn set_maker(&mut self, name: &str, maker: Option<ConnectionId>) {
        let Some((name, _)) = self.names.get_key_value(name) else { return };
        let name = Arc::clone(name);
        let Some(entry) = self.names.get_mut(&name) else { return };
        let depends = matches!(entry.lifetime, Lifetime::Maker | Lifetime::Leased);
        if let Some(before) = std::mem::replace(&mut entry.maker, maker) {
            self.makers.remove(&(before, Arc::clone(&name)));
        }
        self.makers.extend(maker.filter(|_| depends).map(|maker| (maker, name)));
    }

    /// Schedules the next check of a name, or none if it can't expire.
    pub(crate) fn note_expiry(&mut self, name: &str) {
        // Everything is checked when the clients of the previous server have had their time.
        if self.awaits_clients() {
            return;
        }
        let expires_at = self.names.get(name).and_then(Name::expires_at);
        self.expiries.push((name.into(), expires_at));
    }

    /// Removes a name if its lifetime is over.
    pub(crate) fn expire(&mut self, name: &str) {
        match self.names.get(name).and_then(Name::expires_at) {
            Some(at) if at > self.now.at => self.note_expiry(name),
            // The put's end checks the name again.
            Some(_) if !self.is_pending(name) => self.remove_unasked(name, "expired"),
            _ => {}
        }
    }
}

impl Name {
    /// When its lifetime is over, unless it is used until then. `None` if only a change of its users can end it.
    fn expires_at(&self) -> Option<Instant> {
        let (has_left, is_free) = (self.maker.is_none(), self.leases == 0);
        match self.lifetime {
            Lifetime::Idle { ms } if is_free => self.idle_since.checked_add(Duration::from_millis(ms)),
            Lifetime::Maker if has_left => Some(self.idle_since),
            Lifetime::Leased if has_left && is_free => Some(self.idle_since),
            _ => None,
        }
    }
}
