//! Callers and their permissions on names.

use std::sync::Arc;

use nix::unistd::geteuid;

use super::objects::Seen;
use crate::{
    error::BrokerError,
    sys,
    wire::broker::{EventKind, Maker, Owner},
};

/// Identifies a connection. Numbers are not reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct ConnectionId(pub(crate) u64);

impl ConnectionId {
    /// Stands for all connections of the previous server.
    pub(crate) const PREVIOUS_SERVER: Self = Self(0);
}

/// An operation that needs permission.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Right {
    Read = 0o4,
    Write = 0o2,
}

/// The peer process of a connection, as the kernel recorded it at connect time.
#[derive(Debug, Clone)]
pub(crate) struct Caller {
    pub(crate) connection: ConnectionId,
    pub(crate) pid: i32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// Supplementary groups; empty for a superuser, whose groups do not matter.
    pub(crate) groups: Arc<[u32]>,
    /// The command of the process, if it is visible in this PID namespace.
    pub(crate) command: Option<String>,
}

impl Caller {
    pub(crate) fn is_member_of(&self, gid: u32) -> bool {
        self.gid == gid || self.groups.contains(&gid)
    }

    /// Whether the caller has all permissions: the server's own user and root.
    pub(crate) fn is_superuser(&self) -> bool {
        is_superuser(self.uid)
    }

    /// Whether the caller may delete and recall the objects of an owner.
    pub(crate) fn may_remove(&self, owner: Owner) -> bool {
        self.is_superuser() || self.uid == owner.uid && !self.is_unmapped()
    }

    /// Whether the caller's user is unmapped in this user namespace. All unmapped users share one uid, so they can't own objects.
    pub(crate) fn is_unmapped(&self) -> bool {
        self.uid == sys::overflow_uid()
    }

    /// Whether the caller has this permission on a name with this owner and mode.
    pub(crate) fn may(&self, right: Right, owner: Owner, mode: u16) -> bool {
        may(self.uid, right, owner, mode, || self.is_member_of(owner.gid))
    }

    /// The caller's permissions, without its connection.
    pub(crate) fn reader(&self, recalls: bool) -> Reader {
        Reader { uid: self.uid, gid: self.gid, groups: Arc::clone(&self.groups), recalls }
    }

    /// As [`Caller::may`], but returns a refusal.
    pub(crate) fn require(&self, right: Right, name: &str, owner: Owner, mode: u16) -> Result<(), BrokerError> {
        if self.may(right, owner, mode) {
            return Ok(());
        }
        let what = if right == Right::Read { "read" } else { "replace" };
        let Owner { uid, gid } = owner;
        refuse!(
            Denied,
            "uid {} may not {what} `{name}`: its owner is uid {uid}, group {gid}, mode {mode:04o}",
            self.uid
        )
    }

    /// Describes the caller, as the maker or a reader of a version.
    pub(crate) fn describe(&self) -> Maker {
        Maker { pid: self.pid, uid: self.uid, command: self.command.clone() }
    }
}

/// Whether a user has all permissions: the server's own user and root.
pub(crate) fn is_superuser(uid: u32) -> bool {
    uid == 0 || uid == geteuid().as_raw()
}

/// The credentials that decide which names a process may read, and the events that its watch requests.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Reader {
    uid: u32,
    gid: u32,
    groups: Arc<[u32]>,
    /// Whether it requests only the events of the kind `recalled`.
    recalls: bool,
}

impl Reader {
    /// Whether an event is sent: it is requested, and the process may read its name, as for [`Caller::may`] of [`Right::Read`].
    pub(crate) fn sees(&self, Seen { event, owner, mode }: &Seen) -> bool {
        let is_of = || self.gid == owner.gid || self.groups.contains(&owner.gid);
        (!self.recalls || event.kind == EventKind::Recalled) && may(self.uid, Right::Read, *owner, *mode, is_of)
    }
}

/// Whether a user has a permission. As for files, the first matching class of the mode's bits decides.
fn may(uid: u32, right: Right, owner: Owner, mode: u16, is_of_group: impl FnOnce() -> bool) -> bool {
    if is_superuser(uid) {
        return true;
    }
    let bits = if uid == owner.uid && uid != sys::overflow_uid() {
        mode >> 6
    } else if is_of_group() {
        mode >> 3
    } else {
        mode
    };
    bits & right as u16 != 0
}

/// The command of a process, if the process is visible in this PID namespace. Reads `/proc`, which does not block.
pub fn command_of(pid: i32) -> Option<String> {
    let command = (pid > 0).then(|| std::fs::read(format!("/proc/{pid}/comm")).ok()).flatten()?;
    // The kernel cuts long names, perhaps in the middle of a character.
    let mut command = String::from_utf8_lossy(&command).into_owned();
    crate::wire::clean(&mut command);
    Some(command.trim_end().to_owned())
}
