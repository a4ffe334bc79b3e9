//! Claims: which client will create an object that does not exist yet.

use std::collections::BTreeMap;

use super::{
    caller::{Caller, ConnectionId},
    random,
};
use crate::{
    broker::server::admit::{Resource, Users},
    error::BrokerError,
    wire::broker::{ClaimHeader, HeldClaim, Token},
};

/// Claims on missing objects, or on their parts, by name.
#[derive(Debug, Default)]
pub(crate) struct Claims(BTreeMap<String, Vec<Holder>>);

#[derive(Debug)]
struct Holder {
    connection: ConnectionId,
    token: Token,
    group: Option<String>,
    claim: HeldClaim,
}

impl Claims {
    /// Grants a claim. Returns `None` if it conflicts with another claim.
    ///
    /// # Errors
    /// [`RefusalCode::Quota`](crate::error::RefusalCode::Quota) if the caller holds too many claims.
    pub(crate) fn grant(
        &mut self,
        users: &mut Users,
        name: &str,
        caller: &Caller,
        claim: &ClaimHeader,
        now_ms: u64,
    ) -> Result<Option<Token>, BrokerError> {
        let ClaimHeader { part, group } = claim;
        // Different parts of one group's version.
        let is_compatible = |holder: &Holder| {
            let parts = (&holder.claim.part, part);
            group.is_some() && holder.group == *group && matches!(parts, (Some(held), Some(wanted)) if held != wanted)
        };
        if !self.0.get(name).is_none_or(|holders| holders.iter().all(is_compatible)) {
            return Ok(None);
        }
        let Caller { connection, pid, uid, ref command, .. } = *caller;
        users.take(uid, Resource::Claims, 1)?;
        let token = Token(random());
        let (part, command) = (part.clone(), command.clone());
        let claim = HeldClaim { name: name.to_owned(), part, pid, uid, command, since_ms: now_ms };
        let holder = Holder { connection, token, group: group.clone(), claim };
        self.0.entry(name.to_owned()).or_default().push(holder);
        Ok(Some(token))
    }

    /// The process, in the server's PID namespace, and the user of the oldest claim on a name.
    pub(crate) fn holder(&self, name: &str) -> Option<(i32, u32)> {
        self.0.get(name)?.first().map(|holder| (holder.claim.pid, holder.claim.uid))
    }

    /// The claims on names with a prefix, oldest first.
    pub(crate) fn list(&self, prefix: &str) -> Vec<HeldClaim> {
        let named = self.0.iter().filter(|(name, _)| name.starts_with(prefix));
        let mut all: Vec<HeldClaim> =
            named.flat_map(|(_, holders)| holders).map(|holder| holder.claim.clone()).collect();
        all.sort_by(|one, other| (one.since_ms, &one.name).cmp(&(other.since_ms, &other.name)));
        all
    }

    /// Releases a claim of a connection, or all. Returns the objects' names.
    pub(crate) fn end(&mut self, users: &mut Users, connection: ConnectionId, token: Option<Token>) -> Vec<String> {
        let ends = |holder: &Holder| holder.connection == connection && token.is_none_or(|token| token == holder.token);
        let mut names = Vec::new();
        self.0.retain(|name, holders| {
            for ended in holders.extract_if(.., |holder| ends(holder)) {
                users.sub(ended.claim.uid, Resource::Claims, 1);
                names.push(name.clone());
            }
            !holders.is_empty()
        });
        names
    }

    /// Releases all claims on a name, because the object exists now.
    pub(crate) fn release_all(&mut self, users: &mut Users, name: &str) {
        for holder in self.0.remove(name).unwrap_or_default() {
            users.sub(holder.claim.uid, Resource::Claims, 1);
        }
    }
}
