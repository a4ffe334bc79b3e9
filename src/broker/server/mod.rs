//! The server: one process that keeps memory under names, and needs no driver.
//!
//! | File | What it does |
//! |---|---|
//! | `reactor` | the event loop, connections, time |
//! | `admission` | which connections and descriptors are let in |
//! | `verbs` | which message comes when |
//! | `puts`, `gets` | the two verbs that take more than one step |
//! | `objects/` | names, versions, leases, quotas; the catalogue of them |
//! | `segments`, `inspect` | descriptors that are kept, and whether they may be |
//! | `caller` | users, groups and what they may do |
//! | `flight` | descriptors that were sent and not read |
//! | `worker` | what may take long |

mod admission;
mod caller;
mod connection;
mod flight;
mod gets;
mod inspect;
mod objects;
mod puts;
mod reactor;
mod segments;
mod verbs;
mod worker;

use std::{os::fd::AsFd, path::Path, time::Duration};

#[cfg(feature = "internals")]
pub(crate) use self::inspect::inspect_and_classify;
use self::reactor::Reactor;
use crate::{
    channel::{Cancel, Listener},
    error::{Error, Result},
};

/// A connection: they are counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct ConnectionId(u64);

/// How a broker serves.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ServerConfig {
    /// Users besides the server's own and root that may connect.
    pub allow_uids: Vec<u32>,
    /// Groups whose users may connect.
    pub allow_gids: Vec<u32>,
    /// What each user may have.
    pub quota: Quota,
    /// How long a connection may stay without a hello, and a client may leave unread what was sent to it: 30 s by default.
    pub timeout: Duration,
    /// Not for users: takes memfds for a GPU's memory, as the emulated driver of the tests makes it.
    #[doc(hidden)]
    pub emulated: bool,
}

impl Default for ServerConfig {
    fn default() -> Self {
        let (allow_uids, allow_gids, quota) = (Vec::new(), Vec::new(), Quota::default());
        Self { allow_uids, allow_gids, quota, timeout: Duration::from_secs(30), emulated: false }
    }
}

/// What each user may have in a broker; `None` is without a limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Quota {
    /// Bytes of memory, as their makers claim: also of versions that have no name any more.
    pub bytes: Option<u64>,
    /// Names.
    pub objects: Option<u64>,
    /// Leases.
    pub leases: Option<u64>,
    /// Connections.
    pub connections: Option<u64>,
}

/// What a broker still held when it ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ServerReport {
    /// Names.
    pub objects: u64,
    /// Versions, also of names that were deleted.
    pub versions: u64,
    /// Leases.
    pub leases: u64,
    /// Bytes of memory, as their makers claimed.
    pub bytes: u64,
}

/// A broker that listens.
pub struct Server {
    reactor: Reactor,
    path: std::path::PathBuf,
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server").field("path", &self.path).finish_non_exhaustive()
    }
}

/// How many connections may wait to be accepted; the kernel has a bound of its own (`net.core.somaxconn`).
const BACKLOG: i32 = 4096;

impl Server {
    /// Listens at a path. The socket's file has mode 0600, or 0666 if other users or groups are allowed. The limit of open files
    /// of this process is raised as far as it may be.
    ///
    /// # Errors
    /// [`Error::Socket`] if the path is served already or can't be used; [`Error::System`], [`Error::Interrupted`].
    pub fn bind(path: &Path, config: ServerConfig, cancel: &Cancel) -> Result<Self> {
        let open_to_others = !config.allow_uids.is_empty() || !config.allow_gids.is_empty();
        let listener = Listener::bind(path, open_to_others, config.timeout, cancel)?;
        rustix::net::listen(listener.as_fd(), BACKLOG).map_err(|errno| Error::system("listen", errno))?;
        let path = listener.path().to_owned();
        Ok(Self { reactor: Reactor::new(listener, config, cancel)?, path })
    }

    /// Where it listens.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Serves until it is cancelled. Blocks. What it holds goes with it; what clients have mapped stays mapped.
    ///
    /// # Errors
    /// [`Error::System`] if the event loop fails.
    pub fn run(mut self) -> Result<ServerReport> {
        let (objects, versions, leases, bytes) = self.reactor.run()?;
        Ok(ServerReport { objects, versions, leases, bytes })
    }
}
