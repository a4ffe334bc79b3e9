//! The server's state as plain data: no sockets, no clock, no waiting.
//!
//! | File | Contents |
//! |---|---|
//! | `objects/` | names, versions, leases, events; messages to the keeper |
//! | `client` | each client's leases and pending request |
//! | `effects` | instructions for the event loop |
//! | `topics` | publishers and followers, and whom to introduce |
//! | `waits`, `claims` | waiting gets, and claims on the objects they wait for |
//! | `watchers` | watching clients |
//! | `caller` | users: permissions |
//! | `time`, `random` | time of the current request; tokens |

use crate::error::{BrokerError, RefusalCode};

/// A refusal with a code and the arguments of `format!`.
macro_rules! refuse {
    ($code:ident, $($message:tt)+) => {
        $crate::broker::server::state::refuse($crate::error::RefusalCode::$code, format!($($message)+))
    };
}

pub(super) mod caller;
pub(super) mod claims;
pub(super) mod client;
pub(super) mod effects;
pub(super) mod inspect;
pub(super) mod metrics;
pub(super) mod objects;
pub(super) mod random;
pub(super) mod repeats;
pub(super) mod root;
pub(super) mod time;
pub(super) mod topics;
pub(super) mod waits;
pub(super) mod watchers;

pub(crate) fn refuse<T>(code: RefusalCode, message: impl Into<String>) -> Result<T, BrokerError> {
    Err(BrokerError::new(code, message))
}
