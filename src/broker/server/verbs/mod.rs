//! Requests as functions of the state, which collects their effects. No sockets, no clock, no threads.
//!
//! | File | Purpose |
//! |---|---|
//! | `dispatch` | selects the function for a message |
//! | `connection` | connects, hellos, disconnects, deadlines, completed sends |
//! | `put` | puts and deletes, and how they take effect |
//! | `get`, `list`, `topic`, `watch` | the other verbs |
//! | `reply` | answers and refusals |

use super::state::effects;

pub(super) mod connection;
pub(super) mod dispatch;
mod get;
pub(super) mod list;
pub(super) mod put;
mod reply;
#[cfg(test)]
mod tests;
pub(super) mod topic;
pub(super) mod watch;
