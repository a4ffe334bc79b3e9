//! The server.
#![allow(dead_code, reason = "the event loop, which uses these, follows")]

mod inspect;
mod segments;
