//! The keeper: a process that holds descriptors under names and does nothing else, so that they outlive the server.
//!
//! Server and keeper are two ends of one `SOCK_SEQPACKET` connection. `vmmfd keeper` listens at a path and `vmmfd serve --keeper PATH`
//! connects to it; plain `vmmfd serve` is a keeper that starts the server with one end of a pair. The messages are the same, and only
//! the responsibility for restarts differs: an init restarts the two processes in the first case, each restarts the other in the second.
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

mod image;
mod link;
mod message;
mod name;
mod process;
mod service;
mod store;
mod supervisor;
#[cfg(test)]
mod tests;

pub use self::link::Kept;
pub use self::{
    image::{Role, check},
    link::check_reachable,
    process::{KeeperProcess, reload},
    supervisor::replace_supervisor,
};
pub(super) use self::{
    link::{Link, Process, Taken},
    name::{Inherited, Name},
    store::{Flushed, Keeper, Mark, Store},
};

/// The version of the messages, and of what a program passes to the one that it executes in place.
const VERSION: u32 = 1;

/// The most descriptors that are sent and not received yet: the kernel bounds the number for each user (`ETOOMANYREFS`).
const WINDOW: usize = 512;

/// How many descriptors are received before the sender is told.
const RECEIVED_EACH: usize = 64;

/// How long one end waits for the other in a handover.
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(10);
