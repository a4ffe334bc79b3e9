//! Sockets, descriptors, threads and time: the event loop, which carries out effects and knows no verb.
//!
//! | File | What it does |
//! |---|---|
//! | `reactor` | the event loop and its timers |
//! | `serve` | receives records, carries out effects, closes connections |
//! | `connection`, `connections` | the sockets of clients, and the records that wait for them |
//! | `admission` | which users may connect |
//! | `flight` | descriptors that were sent and not read |
//! | `timers` | what happens when |
//! | `worker`, `backlog` | work that takes long, and users that send more of it than is done |
//! | `closer` | closes that a peer may block |
//! | `finished` | what the threads report |
//! | `keeper` | the connection to the keeper |
//! | `devices` | the nodes of devices, held open |

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
