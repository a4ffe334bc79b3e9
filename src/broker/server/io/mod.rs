//! Sockets, descriptors and time: the event loop and what it serves.
//!
//! | File | What it does |
//! |---|---|
//! | `reactor` | the event loop |
//! | `connection` | the socket of one client, and the records that wait for it |
//! | `admission` | which connections and descriptors are accepted |
//! | `flight` | descriptors that were sent and not read |
//! | `worker` | work that takes long |
//! | `closer` | closes that a peer may block |
//! | `keeper` | the connection to the keeper |
//! | `devices` | the nodes of devices, held open |

pub(super) mod admission;
pub(super) mod closer;
pub(super) mod connection;
pub(super) mod devices;
pub(super) mod flight;
pub(super) mod keeper;
pub(super) mod reactor;
pub(super) mod worker;
