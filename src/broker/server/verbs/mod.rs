//! Requests as functions of the state, which collects their effects. No sockets, no clock, no threads.
//!
//! | File | Purpose |
//! |---|---|
//! | `dispatch` | selects the function for a message, and answers |
//! | `connection` | connects, hellos, disconnects, deadlines, completed sends |
//! | `put` | puts and deletes, and how they take effect |
//! | `get`, `list`, `topic`, `watch` | the other verbs |

use super::state::effects;

pub(super) mod connection;
pub(super) mod dispatch;
mod get;
pub(super) mod list;
pub(super) mod put;
#[cfg(test)]
mod tests;
pub(super) mod topic;
pub(super) mod watch;
