//! The server.
#![allow(dead_code, reason = "the event loop, which uses these, follows")]

mod inspect;
mod segments;

#[cfg(feature = "internals")]
pub(crate) use self::inspect::inspect_and_classify;
