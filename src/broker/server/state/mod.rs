//! The server's state as plain data: no sockets, no clock, no waiting.
//!
//! | File | Contents |
//! |---|---|
//! | `objects/` | names, versions, leases, events; messages to the keeper |
//! | `client` | each client's leases and pending request |
//! | `drafts` | versions that still lack parts |
//! | `waits`, `claims` | waiting gets, and claims on the objects they wait for |
//! | `watchers` | watching clients |
//! | `caller`, `quota`, `bounds`, `room` | users: permissions, limits, memory per request, descriptors |
//! | `time`, `random` | time of the current request; tokens |

use crate::error::{BrokerError, RefusalCode};

pub(super) mod bounds;
pub(super) mod caller;
pub(super) mod claims;
pub(super) mod client;
pub(super) mod drafts;
pub(super) mod inspect;
pub(super) mod metrics;
pub(super) mod objects;
pub(super) mod quota;
pub(super) mod random;
pub(super) mod repeats;
pub(super) mod room;
pub(super) mod root;
pub(super) mod time;
pub(super) mod waits;
pub(super) mod watchers;

pub(crate) fn refuse<T>(code: RefusalCode, message: impl Into<String>) -> Result<T, BrokerError> {
    Err(BrokerError::new(code, message))
}
