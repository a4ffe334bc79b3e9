//! Compares each state with the last one: each change has a cause.

use std::collections::{BTreeMap, BTreeSet};

use super::{Known, Memory, Oracle, RequestedDelete, Restart, is_replaced};
use crate::{
    broker::server::state::{
        caller::ConnectionId,
        objects::{
            Events,
            audit::{Audit, AuditedVersion},
        },
    },
    wire::broker::{EventKind, Lifetime, Token},
};

impl Oracle {
    /// Compares a state with the last one: each change has a cause.
    pub(in super::super) fn check_versions(
        &mut self,
        audit: &Audit,
        memory: &BTreeMap<u64, Memory>,
        events: &Events,
    ) -> Result<(), String> {
        let restart = self.restart.take();
        match restart {
            Some(Restart::Nothing) => self.forget_everything(),
            Some(Restart::Part) => {
                let is_gone = |id: &String| audit.versions.values().all(|version| version.id != *id);
                self.puts.values_mut().for_each(|put| put.may_repeat |= put.executed.as_ref().is_some_and(is_gone));
                self.deletes.values_mut().for_each(|delete| delete.may_repeat |= delete.is_executed);
            }
            _ => {}
        }
        let seen = events.events_after(self.last_event).1.map(|seen| &seen.event);
        let (deleted, published): (Vec<_>, Vec<_>) = seen
            .filter(|of| matches!(of.kind, EventKind::Published | EventKind::Replaced | EventKind::Deleted))
            .partition(|of| of.kind == EventKind::Deleted);
        for event in deleted {
            let matches =
                |delete: &RequestedDelete| delete.name == event.name && delete.uid == event.uid && delete.may_execute();
            let mut by = self.deleting.iter().filter(|(pid, _)| *pid == event.pid).map(|(_, token)| *token);
            let token = by.find(|token| self.deletes.get(token).is_some_and(matches));
            if let Some(delete) = token.and_then(|token| self.deletes.get_mut(&token)) {
                (delete.is_executed, delete.may_repeat) = (true, false);
                let gone =
                    self.versions.values().filter(|known| known.version.named && known.version.name == event.name);
                delete.versions = gone.map(|known| known.version.id.clone()).chain([event.id.clone()]).collect();
            }
        }
        self.last_event = events.last_event();
        self.check_known(audit, memory, restart)?;
        let replaced = published.iter().filter(|of| audit.versions.values().all(|now| now.id != of.id));
        let replaced = replaced.map(|of| (of.name.clone(), of.version, of.id.clone())).collect::<Vec<_>>();
        for (key, now) in &audit.versions {
            if restart.is_some() && now.named {
                self.undo_delete(&now.id);
            }
            if !self.versions.contains_key(key) {
                match self.history.get(&now.id) {
                    // The keeper had not read that it is gone.
                    Some((_, _, had)) if restart.is_some() && *had == memory[key] => {}
                    _ => self.check_new(now, &memory[key], audit, &replaced)?,
                }
                self.history.insert(now.id.clone(), (now.name.clone(), now.number, memory[key].clone()));
            }
            if now.named && self.deleted.contains(&now.id) {
                return Err(format!("version {} of `{}` has its name again after a delete", now.number, now.name));
            }
            if now.leases == 0 && !now.kept && !now.is_awaited {
                return Err(format!("version {} of `{}` has no lease and is not dropped", now.number, now.name));
            }
        }
        let known = |(key, version): (&u64, &AuditedVersion)| {
            (*key, Known { version: version.clone(), memory: memory[key].clone() })
        };
        self.versions = audit.versions.iter().map(known).collect();
        self.replaced.extend(replaced.into_iter().map(|(name, number, id)| ((name, id), number)));
        self.check_lease_changes(audit, restart)?;
        let names = published.iter().map(|of| of.name.as_str()).collect::<BTreeSet<_>>();
        self.check_makers(audit, &names)?;
        self.check_answers()?;
        self.deleting.retain(|(_, token)| self.deletes.get(token).is_some_and(RequestedDelete::may_execute));
        (self.released, self.expired) = Default::default();
        Ok(())
    }

    /// Checks the versions of the last state.
    fn check_known(
        &mut self,
        audit: &Audit,
        memory: &BTreeMap<u64, Memory>,
        restart: Option<Restart>,
    ) -> Result<(), String> {
        let mut executed = Vec::<(Token, String)>::new();
        for (key, Known { version, memory: had }) in &self.versions {
            let (now, has) = (audit.versions.get(key), memory.get(key));
            let what = format!("version {} of `{}`", version.number, version.name);
            let identity = |of: &AuditedVersion| (of.name.clone(), of.number, of.id.clone(), of.owner);
            let same = |now: &AuditedVersion| {
                // After a restart, an unanswered delete may be undone.
                let is_named = version.named || !now.named || restart.is_some();
                identity(now) == identity(version) && has == Some(had) && is_named
            };
            if now.is_some_and(|now| !same(now)) {
                return Err(format!("{what} has changed: {version:?} {had:?}, now {now:?} {has:?}"));
            }
            if !version.named || now.is_some_and(|now| now.named) {
                continue;
            }
            if restart != Some(Restart::Part) && !self.may_remove(version, audit) {
                return Err(format!("{what} is gone"));
            }
            if restart.is_none() {
                continue;
            }
            // The keeper had the delete, which the server did not answer.
            let deletes = self.deleting.iter().filter(|(_, token)| self.may_delete(*token, version));
            executed.extend(deletes.map(|(_, token)| (*token, version.id.clone())));
        }
        for (token, id) in executed {
            let delete = self.deletes.get_mut(&token).expect("it was requested");
            (delete.is_executed, delete.may_repeat) = (true, false);
            delete.versions.push(id);
        }
        Ok(())
    }

    fn forget_everything(&mut self) {
        self.last_event = 0;
        self.versions.clear();
        self.leases.clear();
        self.makers.clear();
        self.puts.values_mut().for_each(|put| (put.executed, put.may_repeat) = (None, false));
        self.deletes.values_mut().for_each(|delete| (delete.is_executed, delete.may_repeat) = (false, false));
    }

    /// Whether a version may have lost its name since the last state.
    fn may_remove(&self, version: &AuditedVersion, audit: &Audit) -> bool {
        let name = version.name.as_str();
        let may_expire = match version.lifetime {
            Lifetime::Deleted => false,
            Lifetime::Maker => self.has_lost_maker(name),
            Lifetime::Leased => self.has_lost_maker(name) && version.leases == 0,
            _ => version.leases == 0,
        };
        let is_expired = may_expire && self.expired.iter().any(|expired| expired == name);
        let is_deleted =
            self.deletes.values().any(|delete| delete.is_executed && delete.versions.contains(&version.id));
        is_replaced(version, audit)
            || is_expired
            || is_deleted
            || self.deleting.iter().any(|(_, token)| self.may_delete(*token, version))
    }

    /// Whether the connection of a name's maker has closed, or was not resumed in time.
    fn has_lost_maker(&self, name: &str) -> bool {
        match self.makers.get(name).copied().flatten() {
            Some(ConnectionId::PREVIOUS_SERVER) => self.grace_is_over,
            Some(maker) => self.closed.contains(&maker),
            None => true,
        }
    }

    fn may_delete(&self, token: Token, version: &AuditedVersion) -> bool {
        let may = |delete: &RequestedDelete| delete.name == version.name && delete.uid == version.owner;
        self.deletes.get(&token).is_some_and(|delete| may(delete) && delete.may_execute())
    }

    fn check_new(
        &mut self,
        new: &AuditedVersion,
        memory: &Memory,
        audit: &Audit,
        replaced: &[(String, u64, String)],
    ) -> Result<(), String> {
        let AuditedVersion { name, number, .. } = new;
        let removable =
            |known: &&Known| audit.versions.values().all(|other| !other.named || other.id != known.version.id);
        let before = self.versions.values().filter(|known| known.version.named && known.version.name == *name);
        let (gone, before): (Vec<_>, Vec<_>) = before.partition(|known| removable(known));
        let known = before.iter().chain(&gone).map(|known| known.version.number);
        let others =
            audit.versions.values().filter(|other| other.name == *name && other.named && other.number < *number);
        let replaced = replaced.iter().filter(|(of, replaced, _)| of == name && replaced < number);
        let others = others.map(|other| other.number).chain(replaced.map(|(_, number, _)| *number));
        let previous = others.chain(known.filter(|known| known < number)).max();
        let follows = previous.map_or(*number == 1, |previous| *number == previous + 1);
        let starts = *number == 1 && before.is_empty();
        if !follows && !starts {
            return Err(format!("version {number} of `{name}` follows version {previous:?}"));
        }
        if let Some(owner) = before.first().map(|known| known.version.owner)
            && owner != new.owner
        {
            return Err(format!("`{name}` of uid {owner} is now of uid {}", new.owner));
        }
        if new.requests.len() != memory.len() {
            return Err(format!(
                "version {number} of `{name}` has {} parts of {} puts",
                memory.len(),
                new.requests.len()
            ));
        }
        for request in &new.requests {
            let Some(put) = self.puts.get_mut(request) else {
                return Err(format!("version {number} of `{name}` has an unknown request"));
            };
            let part = memory.iter().find(|(part, _)| part == put.part).map(|(_, memory)| memory);
            if put.name != name || part != Some(&put.memory) || *number > 1 && !put.replaces {
                return Err(format!("version {number} of `{name}` has memory {memory:?}, and its put was {put:?}"));
            }
            let may_repeat = std::mem::take(&mut put.may_repeat);
            if put.executed.replace(new.id.clone()).is_some() && !may_repeat {
                return Err(format!("version {number} of `{name}` repeats an executed put"));
            }
        }
        Ok(())
    }

    /// A lease ends if its holder releases it, or does not resume it in time.
    fn check_lease_changes(&mut self, audit: &Audit, restart: Option<Restart>) -> Result<(), String> {
        for (token, before) in &self.leases {
            // A lease counts as ended once its cleanup begins.
            let now = audit.leases.get(token).filter(|now| before.is_closing || !now.is_closing);
            let ends = before.is_closing
                || self.released.contains(token)
                || self.closed.contains(&before.holder)
                || restart.is_some();
            match now {
                None if ends => {}
                None => return Err(format!("a lease of uid {} has ended: {before:?}", before.uid)),
                Some(now) if (now.key, now.uid) != (before.key, before.uid) => {
                    return Err(format!("a lease has changed: {before:?}, now {now:?}"));
                }
                Some(_) => {}
            }
        }
        if restart.is_some() && !audit.leases.is_empty() {
            return Err("a lease appears at a start".to_owned());
        }
        self.leases = audit.leases.clone();
        Ok(())
    }

    /// A name loses its maker with the maker's connection. The maker of a `published` version may be gone already.
    fn check_makers(&mut self, audit: &Audit, published: &BTreeSet<&str>) -> Result<(), String> {
        for (name, maker) in &audit.makers {
            let is_known = self.makers.contains_key(name) && !published.contains(name.as_str());
            if maker.is_none() && is_known && !self.has_lost_maker(name) {
                return Err(format!("`{name}` has no maker any more"));
            }
        }
        self.makers = audit.makers.clone();
        Ok(())
    }
}
