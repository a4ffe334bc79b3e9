//! Decides which connections are accepted.

use std::{
    fs,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::MetadataExt,
    },
    path::{Path, PathBuf},
    sync::Arc,
};

use nix::{
    sys::socket::{getsockopt, sockopt::PeerCredentials},
    unistd::{Gid, Group},
};
use rustix::net::SendFlags;

use crate::{
    broker::server::{
        lengthen_queue, set_rights,
        state::caller::{Caller, ConnectionId, command_of, is_superuser},
    },
    channel::{Cancel, Listener, SocketName},
    error::{Error, ErrorCode, Result},
    sys,
    wire::{Failure, broker::Message},
};

/// The first connection number. Smaller numbers are other descriptors of the event loop.
const CONNECTIONS: u64 = 16;

/// The listening socket, and the allowed users.
#[derive(Debug)]
pub(crate) struct Admission {
    pub(super) listener: Listener,
    /// The absolute path of the socket, and the file that it named at the start.
    file: Option<(PathBuf, (u64, u64))>,
    allow_uids: Vec<u32>,
    allow_gids: Vec<u32>,
    /// Advice for a refused user: which group grants access.
    group_advice: String,
    /// Whether connections may be waiting in the accept queue.
    pub(super) acceptable: bool,
    last: ConnectionId,
}

impl Admission {
    pub(crate) fn new(listener: Listener, allow_uids: Vec<u32>, allow_gids: Vec<u32>) -> Self {
        let group_advice = group_advice(&allow_gids);
        let path = std::path::absolute(listener.path()).ok();
        let file = path.and_then(|path| inode(&path).map(|inode| (path, inode)));
        Self { listener, file, allow_uids, allow_gids, group_advice, acceptable: true, last: ConnectionId(CONNECTIONS) }
    }

    /// Whether the file at the socket's path is not the one from the start.
    pub(super) fn has_lost_file(&self) -> bool {
        self.file.as_ref().is_some_and(|(path, at_start)| inode(path) != Some(*at_start))
    }

    /// Listens at the path again.
    ///
    /// # Errors
    /// All errors of [`Listener::bind_again`].
    pub(super) fn listen_again(&mut self, cancel: &Cancel) -> Result<()> {
        let rights = |file: &SocketName<'_>| set_rights(file, &self.allow_uids, &self.allow_gids);
        self.listener.bind_again(rights, cancel)?;
        lengthen_queue(&self.listener)?;
        restrict(&self.listener);
        if let Some((path, at_start)) = &mut self.file {
            *at_start = inode(path).unwrap_or_default();
        }
        self.acceptable = true;
        Ok(())
    }

    /// Identifies the peer of a new connection by the credentials that the kernel recorded at connect time.
    ///
    /// # Errors
    /// [`Error::System`]. See unix(7).
    pub(super) fn identify(&mut self, socket: &OwnedFd) -> Result<Caller> {
        self.last.0 += 1;
        rustix::io::ioctl_fionbio(socket, true).map_err(|errno| Error::system("make a socket non-blocking", errno))?;
        let credentials = getsockopt(&socket.as_fd(), PeerCredentials)
            .map_err(|errno| Error::system("read the peer's credentials", errno))?;
        let pid = credentials.pid();
        let uid = credentials.uid();
        let gid = credentials.gid();
        let groups = match is_superuser(uid) {
            true => Vec::new(),
            false => sys::peer_groups(socket.as_fd())
                .inspect_err(|error| tracing::warn!(%error, "cannot read a peer's groups"))
                .unwrap_or_default(),
        };
        Ok(Caller { connection: self.last, pid, uid, gid, groups: Arc::from(groups), command: command_of(pid) })
    }

    /// Refuses disallowed users, with one sentence.
    pub(super) fn check(&self, caller: &Caller) -> Result<(), String> {
        let uid = caller.uid;
        let is_allowed = caller.is_superuser()
            || self.allow_uids.contains(&uid)
            || self.allow_gids.iter().any(|gid| caller.is_member_of(*gid));
        if is_allowed {
            return Ok(());
        }
        Err(format!("uid {uid} may not connect: start the broker with --allow-uid {uid}, or {}", self.group_advice))
    }
}

/// Connections accept descriptors once their user is allowed. Before Linux 6.16, all connections accept them.
pub(super) fn restrict(listener: &Listener) {
    if let Err(error) = sys::pass_descriptors(listener.as_fd(), false) {
        tracing::debug!(%error, "disallowed users can send descriptors before they are disconnected");
    }
}

/// The device and inode number of the file at a path.
fn inode(path: &Path) -> Option<(u64, u64)> {
    fs::symlink_metadata(path).ok().map(|metadata| (metadata.dev(), metadata.ino()))
}

/// Sends an error to the peer of a refused connection.
pub(super) fn send_error(socket: &OwnedFd, code: ErrorCode, message: String) {
    let mut record = Vec::new();
    if Message::Error(Failure { code, message }).encode_into(&mut record).is_ok() {
        // Fails if the peer is gone.
        let _ = rustix::net::send(socket, &record, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
    }
}

/// Advice for refused users. Called once: looking up group names may query another machine.
fn group_advice(gids: &[u32]) -> String {
    if gids.is_empty() {
        return "with --allow-gid and a group of this user".to_owned();
    }
    let name = |gid: &u32| match Group::from_gid(Gid::from_raw(*gid)) {
        Ok(Some(group)) => group.name,
        _ => gid.to_string(),
    };
    format!("add this user to the group {}", gids.iter().map(name).collect::<Vec<_>>().join(" or "))
}
