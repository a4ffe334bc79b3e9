//! When a name goes without being deleted.

use std::time::{Duration, Instant};

use super::Objects;
use crate::{broker::server::ConnectionId, wire::broker::Lifetime};

impl Objects {
    /// A connection has ended that put names which go with it.
    pub(in crate::broker::server) fn maker_gone(
        &mut self,
        connection: ConnectionId,
        names: impl IntoIterator<Item = String>,
    ) {
        for name in names {
            let Some(of) = self.names.get_mut(&name).filter(|of| of.maker == Some(connection)) else { continue };
            of.maker = None;
            self.note_expiry(&name);
        }
    }

    /// Whether a name's lifetime depends on the connection that put it.
    pub(in crate::broker::server) fn follows_maker(&self, name: &str) -> bool {
        self.names.get(name).is_some_and(|of| matches!(of.lifetime, Lifetime::Maker | Lifetime::Leased))
    }

    /// Notes when a name is to be looked at again, if its lifetime may end.
    pub(super) fn note_expiry(&mut self, name: &str) {
        let Some(of) = self.names.get_mut(name) else { return };
        let at = match of.lifetime {
            Lifetime::Deleted => return,
            Lifetime::Idle { ms } if of.leases == 0 => of.idle_since.checked_add(Duration::from_millis(ms)),
            Lifetime::Maker if of.maker.is_none() => Some(of.idle_since),
            Lifetime::Leased if of.maker.is_none() && of.leases == 0 => Some(of.idle_since),
            _ => None,
        };
        // One timer for each name: leases of it may end as often as their holders like.
        if let Some(at) = at.filter(|at| of.looked_at.is_none_or(|looked_at| looked_at > *at)) {
            of.looked_at = Some(at);
            self.expiries.push((at, name.to_owned()));
        }
    }

    /// Takes a name away whose time is over.
    pub(in crate::broker::server) fn expire(&mut self, name: &str, now: Instant) {
        let Some(of) = self.names.get_mut(name) else { return };
        of.looked_at = None;
        let over = match of.lifetime {
            Lifetime::Deleted => false,
            Lifetime::Idle { ms } => {
                of.leases == 0 && now.saturating_duration_since(of.idle_since) >= Duration::from_millis(ms)
            }
            Lifetime::Maker => of.maker.is_none(),
            Lifetime::Leased => of.maker.is_none() && of.leases == 0,
        };
        if !over {
            self.note_expiry(name);
        } else if let Err(error) = self.remove(name, "its lifetime is over") {
            tracing::error!(name, %error, "cannot take a name away");
            // Its looking again is not noted, so that it is tried again with the next lease of it; and in a second.
            self.expiries.push((now + Duration::from_secs(1), name.to_owned()));
        }
    }
}
