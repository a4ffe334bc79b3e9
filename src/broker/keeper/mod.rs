//! The keeper: a process that only holds objects, so that they outlive the server.
//!
//! An [`Entry`] is an object: a manifest, which the keeper does not read, and descriptors. The keeper keeps it under a key, as a whole.
//!
//! It is always `vmmfd keeper`, which listens at a path, and has one server at a time. An init starts it for `vmmfd serve --keeper PATH` and
//! [`KeeperPath::Socket`]; plain `vmmfd serve` and [`KeeperPath::Program`] start it themselves if none listens. Neither process restarts a
//! server: its init or its user does.
//!
//! | File | Purpose |
//! |---|---|
//! | `link` | finds or starts a server's keeper, and takes over its entries |
//! | `store` | the server's end of the connection |
//! | `process`, `newcomers`, `twin` | the keeper: its loop, new connections, its copy while it has no server |
//! | `message`, `entries`, `handover` | the records, the entries that they carry, and handovers of all entries |
//!
//! | Message | From | Meaning |
//! |---|---|---|
//! | `Hello` | server, next keeper | its version, and whether it wants the keeper's entries or will send its own |
//! | `Welcome` | keeper | its version, and the most descriptors that it may hold |
//! | `Refused` | keeper | why it closes this connection |
//! | `Entry` | both | a piece of an entry: key, manifest, descriptors. With the last piece the entry replaces an older one, or only its manifest |
//! | `Remove` | server | keys of entries to drop |
//! | `Complete` | both | everything was sent; from the keeper also whether its set is complete |
//! | `Received` | both | how many more descriptors were received: at most [`WINDOW`] are in flight |
//! | `Sync`, `Synced` | server, keeper | a number, which the keeper returns once it has read everything before it |
//! | `Serving` | server, next keeper | it is ready: from now on it holds everything too |
//! | `Stopping` | both | it exits on request; the server adds a summary of its objects, unless another server is to follow, and sends a `Sync`; the keeper adds its successor |
//! | `Exit` | server | the keeper exits and frees everything; with a summary of the objects |
//! | `Listener` | keeper | the listening socket, for the next keeper |
//!
//! The server answers a put, a delete or a recall once the kernel has queued its last record at the socket of a keeper that has everything
//! else. The keeper reads a closed connection to the last message before it serves the next server or exits, and drops an entry whose last
//! piece is missing. So the keeper has the record if the server is killed, and the server has it if the keeper is killed before it reads.
//!
//! Two processes hold everything at every instant, unless one has just been killed. While no server is connected, and before it answers the
//! `Sync` of a server that leaves, the keeper has a *twin*: a fork that waits, and continues as the keeper if its parent dies. The first
//! message of a server that changes the keeper's state ends the twin.
//!
//! | End of | Consequence |
//! |---|---|
//! | the server | the keeper holds everything for the next server |
//! | the keeper | the server connects to the next keeper and sends everything and `Complete`. Puts wait for that, gets do not |
//! | the keeper without a server | its twin is the keeper, and forks another twin |
//! | the keeper by SIGTERM | with a server, its twin continues until the next keeper takes over; without one, everything is freed, unless another server is to follow: then a twin waits 10 s for it |
//! | the server during the handover | as for the server: a handover copies |
//! | the keeper during the handover | the server starts over with its twin. Without a twin it continues with the received entries, as with an incomplete set |
//! | the server before `Complete`, after its keeper | the next server continues with the entries that arrived, and logs that others are lost |
//! | both at once | the memory is freed, except for memory that clients hold |

mod entries;
mod handover;
mod link;
mod message;
mod newcomers;
mod process;
mod store;
#[cfg(test)]
mod tests;
mod twin;

use std::path::Path;

pub use self::link::{KeeperPath, check_reachable};
pub(super) use self::{
    entries::Entry,
    link::{Link, Process, Takeover},
    process::KeeperProcess,
    store::{Flushed, Mark, Source, Store},
};
use crate::{channel::Cancel, error::Result};

/// Runs a keeper that listens at a path. `is_detached`: a server started it. Returns its exit code. Blocks until the keeper exits. No other
/// thread may run: the keeper forks.
///
/// # Errors
/// All errors of the keeper.
pub fn run_keeper(socket: &Path, is_detached: bool) -> Result<i32> {
    if is_detached {
        // Executed through /proc/self/exe, its name would be `exe`. Only for people, so a failure does not matter.
        let _ = nix::sys::prctl::set_name(c"vmmfd");
        // Its own session: signals of a terminal are for the server. Fails if it leads a process group already.
        let _ = nix::unistd::setsid();
    }
    KeeperProcess::at(socket, is_detached, &Cancel::new()?)?.run()
}

/// The version of the messages.
const VERSION: u32 = 3;

/// The most descriptors in flight: the kernel limits them for each user (`ETOOMANYREFS`).
const WINDOW: usize = 512;

/// How many descriptors the receiver acknowledges at once.
const RECEIVED_EACH: usize = 64;

/// How many descriptors a keeper needs for itself.
const OWN_DESCRIPTORS: u64 = 64;

/// How long each side waits for the other during a handover.
const HANDOVER_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(10);
