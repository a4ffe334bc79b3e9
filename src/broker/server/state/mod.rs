//! The server's state as plain data: no sockets, no clock, no waiting.
//!
//! | File | Contents |
//! |---|---|
//! | `objects/` | names, versions, leases, events; messages to the keeper |
//! | `effects` | instructions for the event loop |
//! | `topics` | publishers and followers, and whom to introduce |
//! | `claims` | claims on missing objects |
//! | `watchers` | watching clients |
//! | `caller` | users: permissions |
//! | `root` | all of it; each client's leases and pending request; waiting gets; the time of the current request |

use crate::error::{BrokerError, RefusalCode};

/// A refusal with a code and the arguments of `format!`.
macro_rules! refuse {
    ($code:ident, $($message:tt)+) => {
        $crate::broker::server::state::refuse($crate::error::RefusalCode::$code, format!($($message)+))
    };
}

pub(super) mod caller;
pub(super) mod claims;
pub(super) mod effects;
pub(super) mod inspect;
pub(super) mod metrics;
pub(super) mod objects;
pub(super) mod root;
pub(super) mod topics;
pub(super) mod watchers;

pub(crate) fn refuse<T>(code: RefusalCode, message: impl Into<String>) -> Result<T, BrokerError> {
    Err(BrokerError::new(code, message))
}

/// Sixteen random bytes, for tokens and identifiers. See getrandom(2).
pub(crate) fn random() -> [u8; 16] {
    #[cfg(test)]
    if let Some(bytes) = crate::broker::server::simulation::random() {
        return bytes;
    }
    let mut bytes = [0; 16];
    let filled = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    // After the pool is initialised, requests of up to 256 bytes are complete and not interrupted.
    assert_eq!(filled, Ok(bytes.len()), "getrandom(2) failed");
    bytes
}
