//! What the server holds, as plain data: no sockets of clients.
//!
//! | File | What it does |
//! |---|---|
//! | `objects/` | names, versions, leases; the catalogue of them |
//! | `segments`, `inspect` | descriptors that are kept, and whether they may be |
//! | `caller`, `quota` | users: their rights and limits |
//! | `bounds` | how much memory a request takes |
//! | `history` | crashes, for the next server |
//! | `repeats` | log lines that clients can cause at will |

pub(super) mod bounds;
pub(super) mod caller;
pub(super) mod history;
pub(super) mod inspect;
pub(super) mod objects;
pub(super) mod quota;
pub(super) mod repeats;
pub(super) mod segments;
