//! Requests as functions of the state, which collects their effects. No sockets, no clock, no threads.
//!
//! | File | Purpose |
//! |---|---|
//! | `dispatch` | selects the function for a message |
//! | `connection` | connects, hellos, disconnects, deadlines, completed sends |
//! | `put`, `parts` | checks of puts, and drafts of several puts |
//! | `publish` | published versions and deletions, once the keeper has them |
//! | `get`, `lease`, `list`, `topic`, `watch`, `metrics` | the other verbs |
//! | `reply` | answers and refusals |

use super::state::effects;

pub(super) mod connection;
pub(super) mod dispatch;
mod get;
mod lease;
pub(super) mod list;
mod metrics;
mod parts;
pub(super) mod publish;
mod put;
mod reply;
#[cfg(test)]
mod tests;
pub(super) mod topic;

pub(super) mod watch;
