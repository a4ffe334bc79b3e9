//! Requests as functions from the state and a request to effects. No sockets, no clock, no threads.
//!
//! | File | Purpose |
//! |---|---|
//! | `dispatch` | selects the function for a message |
//! | `connection` | connects, disconnects, deadlines, completed sends |
//! | `hello`, `put`, `get`, `list`, `delete`, `watch`, `resume`, `lease`, `metrics` | the verbs |
//! | `parts`, `publish` | drafts of several puts, and the published version |
//! | `reply` | answers and refusals |
//! | `effects` | instructions for the event loop |

pub(super) mod connection;
mod delete;
pub(super) mod dispatch;
pub(super) mod effects;
mod get;
mod hello;
mod lease;
pub(super) mod list;
mod metrics;
mod parts;
pub(super) mod publish;
mod put;
mod reply;
mod resume;
#[cfg(test)]
mod tests;

pub(super) mod watch;
