//! What the server holds, as plain data: no sockets, no clock, no waiting.
//!
//! | File | What it holds |
//! |---|---|
//! | `objects/` | names, versions, leases, and the catalogue of them |
//! | `client` | what each client holds and waits for |
//! | `upload`, `drafts` | puts that are not published |
//! | `waits`, `claims` | gets that wait, and who makes what they wait for |
//! | `watchers` | clients that watch |
//! | `segments`, `inspect` | descriptors that are kept, and whether they may be |
//! | `caller`, `quota`, `bounds` | users: their rights, their limits, what a request takes |
//! | `history`, `metrics`, `repeats` | crashes, figures, and log lines that clients can repeat at will |
//! | `time`, `random` | when a request is handled; tokens |

pub(super) mod bounds;
pub(super) mod caller;
pub(super) mod claims;
pub(super) mod client;
pub(super) mod drafts;
pub(super) mod history;
pub(super) mod inspect;
pub(super) mod metrics;
pub(super) mod objects;
pub(super) mod quota;
pub(super) mod random;
pub(super) mod repeats;
pub(super) mod room;
pub(super) mod root;
pub(super) mod segments;
pub(super) mod time;
pub(super) mod upload;
pub(super) mod waits;
pub(super) mod watchers;
