//! Claims: which client will create an object that does not exist yet.

use std::collections::{HashMap, HashSet};

use super::{
    caller::{Caller, ConnectionId},
    random::random,
    refuse,
};
use crate::{
    error::{BrokerError, RefusalCode},
    wire::broker::{ClaimHeader, HeldClaim, Token},
};

/// The most claims per connection, and per user.
const MAX_CLAIMS: usize = 256;
const MAX_CLAIMS_OF_USER: usize = 4096;

/// Claims on missing objects, or on their parts.
#[derive(Debug, Default)]
pub(crate) struct Claims {
    names: HashMap<String, Vec<Holder>>,
    /// Claimed names of each connection, by token.
    held: HashMap<ConnectionId, HashMap<Token, String>>,
    /// The number of claims per user.
    users: HashMap<u32, usize>,
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
        let of_connection = self.held.get(&connection).map_or(0, HashMap::len);
        let of_user = self.users.get(&uid).copied().unwrap_or(0);
        if of_connection >= MAX_CLAIMS || of_user >= MAX_CLAIMS_OF_USER {
            return refuse(
                RefusalCode::Quota,
                format!(
                    "this connection holds {of_connection} of at most {MAX_CLAIMS} claims, and uid {uid} {of_user} of at most \
                {MAX_CLAIMS_OF_USER}: put the claimed objects or release the claims"
                ),
            );
        }
        let token = Token(random());
        let command = caller.command.clone();
        let holder = Holder { connection, pid, uid, command, since_ms: now_ms, token, claim: claim.clone() };
        self.names.entry(name.to_owned()).or_default().push(holder);
        self.held.entry(connection).or_default().insert(token, name.to_owned());
        *self.users.entry(uid).or_default() += 1;
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
    pub(crate) fn end(&mut self, connection: ConnectionId, token: Token) -> Option<String> {
        let name = self.held.get(&connection)?.get(&token)?.clone();
        let holders = self.names.get_mut(&name)?;
        let at = holders.iter().position(|holder| holder.token == token)?;
        let holder = holders.remove(at);
        if holders.is_empty() {
            self.names.remove(&name);
        }
        self.forget(&holder);
        Some(name)
    }

    /// Releases all claims on a name, because the object exists now.
    pub(crate) fn release_all(&mut self, name: &str) {
        for holder in self.names.remove(name).unwrap_or_default() {
            self.forget(&holder);
        }
    }

    /// Releases all claims of a connection. Returns the objects' names.
    pub(crate) fn release_connection(&mut self, connection: ConnectionId) -> HashSet<String> {
        let tokens: Vec<Token> = self.held.get(&connection).map_or_else(Vec::new, |of| of.keys().copied().collect());
        tokens.into_iter().filter_map(|token| self.end(connection, token)).collect()
    }

    fn forget(&mut self, holder: &Holder) {
        if let Some(held) = self.held.get_mut(&holder.connection) {
            held.remove(&holder.token);
            if held.is_empty() {
                self.held.remove(&holder.connection);
            }
        }
        if let Some(count) = self.users.get_mut(&holder.uid) {
            *count -= 1;
            if *count == 0 {
                self.users.remove(&holder.uid);
            }
        }
    }
}
