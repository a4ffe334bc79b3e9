//! Recalls: asks the holders of versions to release their leases, and reports which holders did.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use super::{Client, Holders, records::answer};
use crate::{
    broker::name::check_name,
    channel::deadline_after,
    error::{BrokerError, Error, RefusalCode, Result},
    wire::broker::{self, HeldLease, MAX_RECALLED, Message, Summary},
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
