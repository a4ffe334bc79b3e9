//! Claims: which client will create an object that does not exist yet.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::{
    caller::{Caller, ConnectionId},
    random,
};
use crate::{
    broker::server::admit::{Resource, Users},
    error::BrokerError,
    wire::broker::{ClaimHeader, HeldClaim, Token},
};

/// Claims on missing objects, or on their parts.
#[derive(Debug, Default)]
pub(crate) struct Claims {
    names: HashMap<String, Vec<Holder>>,
    /// Claimed names, by connection and token.
    held: BTreeMap<(ConnectionId, Token), String>,
}

#[derive(Debug)]
struct Holder {
    connection: ConnectionId,
    pid: i32,
    uid: u32,
    command: Option<String>,
    since_ms: u64,
    token: Token,
    claim: ClaimHeader,
}

impl Claims {
    /// Grants a claim. Returns `None` if it conflicts with another claim.
    ///
    /// # Errors
    /// [`RefusalCode::Quota`] if the caller holds too many claims.
    pub(crate) fn grant(
        &mut self,
        users: &mut Users,
        name: &str,
        caller: &Caller,
        claim: &ClaimHeader,
        now_ms: u64,
    ) -> Result<Option<Token>, BrokerError> {
        // Different parts of one group's version.
        let is_compatible = |holder: &Holder| {
            let parts = (&holder.claim.part, &claim.part);
            holder.claim.group.is_some()
                && holder.claim.group == claim.group
                && matches!(parts, (Some(held), Some(wanted)) if held != wanted)
        };
        if !self.names.get(name).is_none_or(|holders| holders.iter().all(is_compatible)) {
            return Ok(None);
        }
        let Caller { connection, pid, uid, .. } = *caller;
        users.take(uid, Resource::Claims, 1)?;
        let token = Token(random());
        let command = caller.command.clone();
        let holder = Holder { connection, pid, uid, command, since_ms: now_ms, token, claim: claim.clone() };
        self.names.entry(name.to_owned()).or_default().push(holder);
        self.held.insert((connection, token), name.to_owned());
        Ok(Some(token))
    }

    /// The process, in the server's PID namespace, and the user of the oldest claim on a name.
    pub(crate) fn holder(&self, name: &str) -> Option<(i32, u32)> {
        self.names.get(name)?.first().map(|holder| (holder.pid, holder.uid))
    }

    /// The claims on names with a prefix, oldest first.
    pub(crate) fn list(&self, prefix: &str) -> Vec<HeldClaim> {
        let names = self.names.iter().filter(|(name, _)| name.starts_with(prefix));
        let claim = |name: &String, holder: &Holder| HeldClaim {
            name: name.clone(),
            part: holder.claim.part.clone(),
            pid: holder.pid,
            uid: holder.uid,
            command: holder.command.clone(),
            since_ms: holder.since_ms,
        };
        let all = names.flat_map(|(name, holders)| holders.iter().map(move |holder| claim(name, holder)));
        let mut all: Vec<HeldClaim> = all.collect();
        all.sort_by(|one, other| (one.since_ms, &one.name).cmp(&(other.since_ms, &other.name)));
        all
    }

    /// Releases a claim. Returns its object's name.
    pub(crate) fn end(&mut self, users: &mut Users, connection: ConnectionId, token: Token) -> Option<String> {
        let name = self.held.get(&(connection, token))?.clone();
        let holders = self.names.get_mut(&name)?;
        let at = holders.iter().position(|holder| holder.token == token)?;
        let holder = holders.remove(at);
        if holders.is_empty() {
            self.names.remove(&name);
        }
        self.forget(users, &holder);
        Some(name)
    }

    /// Releases all claims on a name, because the object exists now.
    pub(crate) fn release_all(&mut self, users: &mut Users, name: &str) {
        for holder in self.names.remove(name).unwrap_or_default() {
            self.forget(users, &holder);
        }
    }

    /// Releases all claims of a connection. Returns the objects' names.
    pub(crate) fn release_connection(&mut self, users: &mut Users, connection: ConnectionId) -> HashSet<String> {
        let of_connection = (connection, Token([0; 16]))..=(connection, Token([u8::MAX; 16]));
        let tokens: Vec<Token> = self.held.range(of_connection).map(|((_, token), _)| *token).collect();
        tokens.into_iter().filter_map(|token| self.end(users, connection, token)).collect()
    }

    fn forget(&mut self, users: &mut Users, holder: &Holder) {
        users.sub(holder.uid, Resource::Claims, 1);
        self.held.remove(&(holder.connection, holder.token));
    }
}
