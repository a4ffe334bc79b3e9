//! Sockets, descriptors, threads and time: the event loop. It executes effects and does not know the verbs.
//!
//! | File | Purpose |
//! |---|---|
//! | `reactor` | the event loop and its timers |
//! | `serve` | receives records, executes effects, closes connections |
//! | `connection`, `connections` | client sockets and their send queues |
//! | `admission` | decides which users may connect |
//! | `flight` | descriptors that were sent but not read |
//! | `timers` | the timer queue |
//! | `worker`, `backlog` | closes memory; backpressure on users that send memory faster than it is closed |
//! | `closer` | closes that a peer can block |
//! | `finished` | results of other threads |
//! | `keeper` | the connection to the keeper |
//! | `devices` | device nodes held open |

pub(super) mod admission;
mod backlog;
mod closer;
mod connection;
mod connections;
pub(super) mod devices;
mod finished;
mod flight;
pub(super) mod keeper;
pub(super) mod reactor;
mod serve;
mod timers;
mod worker;
