//! What each request does: functions from the state and a request to effects. No sockets, no clock, no threads.
//!
//! | File | What it does |
//! |---|---|
//! | `dispatch` | calls the function of a message |
//! | `connection` | a client that comes, that goes, whose deadline passes, whose answer is sent |
//! | `hello`, `put`, `get`, `list`, `delete`, `watch`, `resume`, `lease`, `metrics` | one verb each, or a few that belong together |
//! | `put/check` | what is wrong with a put |
//! | `parts`, `publish` | the rest of a put: the parts of others, and the version |
//! | `reply` | answers and refusals |
//! | `effects` | what the event loop does for a request |

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
