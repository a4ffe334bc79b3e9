//! The keeper: a process that only holds named descriptors, so that they outlive the server.
//!
//! Server and keeper share one `SOCK_SEQPACKET` connection. The messages are the same in each setup; the responsibility for restarts
//! differs:
//!
//! | Server | Keeper | Restarts the server | Restarts the keeper |
//! |---|---|---|---|
//! | `vmmfd serve --keeper PATH`, [`KeeperPath::Socket`] | `vmmfd keeper`, which listens at the path | an init | an init |
//! | a program with [`KeeperPath::Program`] | `vmmfd keeper`, which the server starts | its init, or its user | the server |
//! | `vmmfd serve` | the first process, which starts the server with one end of a pair | the keeper | the server |
//!
//! | File | Purpose |
//! |---|---|
//! | `role` | the role of a process, passed in environment variables |
//! | `image`, `passed` | the program to execute, and the descriptors passed to it |
//! | `peer`, `dial`, `link` | finds or starts a server's keeper, and takes over its descriptors |
//! | `store` | the server's end of the connection |
//! | `process`, `held`, `newcomers`, `service` | the keeper: its loop, its descriptors, new connections, the server that it starts |
//! | `message`, `name` | the records, and the names of descriptors |
//!
//! | Message | From | Meaning |
//! |---|---|---|
//! | `Hello` | server | its version, and whether it will send its descriptors (`resends`) or wants the keeper's |
//! | `Welcome` | keeper | its version, and the most descriptors that it may hold |
//! | `Refused` | keeper | why it closes this connection |
//! | `Hold` | both | names, and a descriptor for each |
//! | `Remove` | server | names to drop |
//! | `Complete` | both | everything was sent; from the keeper also whether its set is complete |
//! | `Received` | both | how many more descriptors were received: at most [`WINDOW`] are in flight |
//! | `Sync`, `Synced` | server, keeper | a number, which the keeper returns once it has read everything before it |
//! | `Serving` | server | it is ready |
//! | `Stopping` | both | it exits on request; the server adds a summary of its objects |
//! | `Reload` | a command | execute the program at the keeper's path in place |
//!
//! The keeper reads a closed connection to the last message before it serves the next server. A put therefore needs no reply: the keeper
//! gets everything that the kernel accepted from a server, even if that server was killed.
//!
//! | Death of | Consequence |
//! |---|---|
//! | the server | the keeper holds everything for the next server, which removes descriptors that no version names |
//! | the keeper | the server connects to the next keeper and sends the catalogue, everything else and `Complete`. Puts wait for that, gets do not |
//! | both, one after the other, before `Complete` | the next server checks the incomplete set against the catalogue and reports each version that lacks memory |
//! | the server during the handover | as for the server: a handover copies |
//! | the keeper during the handover | the server continues with the received descriptors, as with an incomplete set |
//! | the keeper's new program during a reload | the old program is executed again; if that fails, as for the keeper |
//! | both at once | the memory is freed, except for memory that clients hold |

mod dial;
mod held;
mod image;
mod link;
mod message;
mod name;
mod newcomers;
mod passed;
mod peer;
mod process;
mod role;
mod service;
mod store;
#[cfg(test)]
mod tests;

#[cfg(test)]
pub(super) use self::process::simulated::KeeperFlaw;
pub use self::{
    dial::{check_reachable, reload},
    link::KeeperPath,
    role::Role,
};
pub(super) use self::{
    image::answer_check,
    link::{Link, Takeover},
    name::{Inherited, Name},
    peer::Process,
    process::KeeperProcess,
    store::{Flushed, Keeper, Mark, Store},
};

/// The version of the messages, and of the state passed to a program that is executed in place.
const VERSION: u32 = 1;

/// The most descriptors in flight: the kernel limits them for each user (`ETOOMANYREFS`).
const WINDOW: usize = 512;

/// How many descriptors the receiver acknowledges at once.
const RECEIVED_EACH: usize = 64;

/// How many descriptors a keeper needs for itself.
const OWN_DESCRIPTORS: u64 = 64;

/// How long each side waits for the other during a handover.
const HANDOVER_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(10);
