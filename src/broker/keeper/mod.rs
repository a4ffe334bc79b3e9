//! The keeper: a process that holds descriptors under names and does nothing else, so that they outlive the server.
//!
//! Server and keeper are two ends of one `SOCK_SEQPACKET` connection. The messages are always the same; the responsibility for restarts
//! differs:
//!
//! | Server | Keeper | Restarts the server | Restarts the keeper |
//! |---|---|---|---|
//! | `vmmfd serve --keeper PATH`, [`KeeperPath::Socket`] | `vmmfd keeper`, which listens at the path | an init | an init |
//! | a program with [`KeeperPath::Program`] | `vmmfd keeper`, which the server starts | its init, or its user | the server |
//! | `vmmfd serve` | the first process, which starts the server with one end of a pair | the keeper | the server |
//!
//! | File | Job |
//! |---|---|
//! | `role` | what a process does: the environment variables |
//! | `image`, `passed` | which program is executed, and with which descriptors |
//! | `peer`, `dial`, `link` | how a server finds or starts its keeper, and takes over |
//! | `store` | the server's end: what the keeper was sent |
//! | `process`, `held`, `newcomers`, `service` | the keeper: its loop, its descriptors, new connections, the server that it starts |
//! | `supervisor` | takes over from an older build |
//! | `message`, `name` | the records, and the names of descriptors |
//!
//! | Message | From | Meaning |
//! |---|---|---|
//! | `Hello` | server | its version, and whether it holds everything already (`resends`) or asks for it |
//! | `Welcome` | keeper | its version, and the most descriptors that it may hold |
//! | `Refused` | keeper | why it does not serve this connection, which it closes |
//! | `Keep` | both | names, and a descriptor for each |
//! | `Remove` | server | names to forget |
//! | `Complete` | both | everything was sent; from the keeper also whether it had everything |
//! | `Received` | both | how many descriptors more were received: at most [`WINDOW`] are under way |
//! | `Sync`, `Synced` | server, keeper | a number, which the keeper returns once it has read everything before it |
//! | `Serving` | server | that it serves |
//! | `Stopping` | both | that it ends because it was asked to, and, from the server, what it held |
//! | `Reload` | a command | to execute the program at the keeper's path in place |
//!
//! The keeper reads a connection to its end before it serves the next one. A put therefore needs no reply: whatever the kernel took from
//! a server is held, however that server ended.
//!
//! | Death of | What follows |
//! |---|---|
//! | the server | the keeper holds everything for the next one. That one removes descriptors that no version names |
//! | the keeper | the server connects to the next keeper, sends the catalogue, everything else, then `Complete`. Puts wait until this is sent, gets do not |
//! | both, one after the other, before `Complete` | the next server checks the incomplete set against the catalogue and names each version that lacks memory |
//! | the server during the handover | as of the server: a handover copies |
//! | the keeper during the handover | the server goes on with the descriptors that came, as with an incomplete set |
//! | the keeper's new program during a reload | the old program is executed again; if that fails, as of the keeper |
//! | both at once | the memory is freed, except for that which clients hold |

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
mod supervisor;
#[cfg(test)]
mod tests;

pub use self::{
    dial::{check_reachable, reload},
    link::KeeperPath,
    role::Role,
};
pub(super) use self::{
    image::answer_check,
    link::{Kept, Link, Taken},
    name::{Inherited, Name},
    peer::Process,
    process::KeeperProcess,
    store::{Flushed, Keeper, Mark, Store},
    supervisor::replace_supervisor,
};

/// The version of the messages, and of what a program passes to the one that it executes in place.
const VERSION: u32 = 1;

/// The most descriptors that are sent and not received yet: the kernel bounds the number for each user (`ETOOMANYREFS`).
const WINDOW: usize = 512;

/// After how many descriptors the receiver reports that it has them.
const RECEIVED_EACH: usize = 64;

/// How many descriptors a keeper needs besides those that it holds.
const OWN_DESCRIPTORS: u64 = 64;

/// How long one end waits for the other in a handover.
const HANDOVER_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(10);
