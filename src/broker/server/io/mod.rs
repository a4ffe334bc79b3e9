//! Sockets, descriptors, threads and time: the event loop. It executes effects and does not know the verbs.
//!
//! | File | Purpose |
//! |---|---|
//! | `reactor` | the event loop and its timers |
//! | `serve` | receives records, executes effects, closes connections |
//! | `introduce` | connects the publishers and followers of topics |
//! | `connection` | client sockets, their send queues, and descriptors that were sent but not read |
//! | `admission` | decides which users may connect |
//! | `timers` | the timer queue |
//! | `closer` | closes descriptors |
//! | `keeper` | the connection to the keeper |
//! | `devices` | device nodes held open |

pub(super) mod admission;
mod closer;
mod connection;
pub(super) mod devices;
mod introduce;
pub(super) mod keeper;
pub(super) mod reactor;
mod serve;
mod timers;
