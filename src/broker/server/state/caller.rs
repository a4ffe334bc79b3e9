//! Who asks, and what that user may do with a name.

use std::sync::Arc;

use nix::unistd::geteuid;

use crate::{
    error::{BrokerError, RefusalCode},
    sys,
    wire::broker::{Maker, Owner},
};

/// The number of a connection: they are counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct ConnectionId(pub(crate) u64);

impl ConnectionId {
    /// Stands for all connections of a server before this one.
    pub(crate) const BEFORE: Self = Self(0);
}

/// What a caller wants to do with an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Right {
    Read,
    Write,
}

/// The process at the other end of a connection, as the kernel recorded it when the connection was made.
#[derive(Debug, Clone)]
pub(crate) struct Caller {
    pub(crate) connection: ConnectionId,
    pub(crate) pid: i32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// The supplementary groups: none of a superuser, whose groups decide nothing.
    pub(crate) groups: Arc<[u32]>,
}

impl Caller {
    /// Whether the caller is a member of a group.
    pub(crate) fn is_of(&self, gid: u32) -> bool {
        self.gid == gid || self.groups.contains(&gid)
    }

    /// Whether the caller may do everything: the server's own user and root.
    pub(crate) fn is_superuser(&self) -> bool {
        is_superuser(self.uid)
    }

    /// Whether the kernel has no number for the caller's user here: all such users look alike, so none owns anything.
    pub(crate) fn is_unmapped(&self) -> bool {
        self.uid == sys::overflow_uid()
    }

    /// Whether the caller has a right to a name of this owner and mode.
    pub(crate) fn may(&self, right: Right, owner: Owner, mode: u16) -> bool {
        let bit = match right {
            Right::Read => 0o4,
            Right::Write => 0o2,
        };
        if self.is_superuser() {
            return true;
        }
        class_of(self.uid, owner, mode, || self.is_of(owner.gid)) & bit != 0
    }

    /// The caller's rights, without its connection.
    pub(crate) fn reader(&self) -> Reader {
        Reader { is_superuser: self.is_superuser(), uid: self.uid, gid: self.gid, groups: Arc::clone(&self.groups) }
    }

    /// As [`Caller::may`], with the refusal.
    pub(crate) fn require(&self, right: Right, name: &str, owner: Owner, mode: u16) -> Result<(), BrokerError> {
        if self.may(right, owner, mode) {
            return Ok(());
        }
        let what = match right {
            Right::Read => "read",
            Right::Write => "replace",
        };
        let Owner { uid, gid } = owner;
        Err(BrokerError::new(
            RefusalCode::Denied,
            format!("uid {} may not {what} `{name}`: it is uid {uid}'s, group {gid}, mode {mode:04o}", self.uid),
        ))
    }

    /// The caller as the maker or reader of something. Reads `/proc`, which does not block.
    pub(crate) fn describe(&self) -> Maker {
        Maker { pid: self.pid, uid: self.uid, command: command_of(self.pid) }
    }
}

/// Whether a user may do everything: the server's own and root.
pub(crate) fn is_superuser(uid: u32) -> bool {
    uid == 0 || uid == geteuid().as_raw()
}

/// What decides which names a process may read.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Reader {
    is_superuser: bool,
    uid: u32,
    gid: u32,
    groups: Arc<[u32]>,
}

impl Reader {
    /// As [`Caller::may`] of [`Right::Read`].
    pub(crate) fn may_read(&self, owner: Owner, mode: u16) -> bool {
        let is_of = || self.gid == owner.gid || self.groups.contains(&owner.gid);
        self.is_superuser || class_of(self.uid, owner, mode, is_of) & 0o4 != 0
    }
}

/// The bits of a mode that hold for a user: as of files, the first class that fits decides.
fn class_of(uid: u32, owner: Owner, mode: u16, is_of_group: impl FnOnce() -> bool) -> u16 {
    if uid == owner.uid && uid != sys::overflow_uid() {
        mode >> 6
    } else if is_of_group() {
        mode >> 3
    } else {
        mode
    }
}

/// The command of a process, if this PID namespace has it.
pub(crate) fn command_of(pid: i32) -> Option<String> {
    let mut command = (pid > 0).then(|| std::fs::read_to_string(format!("/proc/{pid}/comm")).ok()).flatten()?;
    crate::wire::clean(&mut command);
    Some(command.trim_end().to_owned())
}
