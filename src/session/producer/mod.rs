//! The side that owns the memory and shares it.

mod buffer;
mod desk;

use std::thread;

pub use self::buffer::{Buffer, Content};
use self::desk::Desk;
use super::{Event, Observer, Terms};
use crate::{
    channel::{Listener, Peer},
    error::{Error, Result},
    wire::Outcome,
};

/// How a buffer is served.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    /// How many consumers to serve, or 0 for any number until it is cancelled.
    pub consumers: u64,
    /// Whether each consumer has the buffer to itself and writes a reply into it; not into one that holds what the program wrote
    /// itself, nor into a sealed one.
    pub round_trip: bool,
}

/// A consumer that was served, or refused.
#[derive(Debug)]
pub struct Served {
    /// Who it was.
    pub peer: Peer,
    /// What both sides together found, if it came to that: with the figures of the side that found a mismatch, if one did.
    pub found: Option<Outcome>,
    /// What went wrong with the conversation, before or after.
    pub error: Option<Error>,
}

impl Served {
    /// Whether the data was found wrong: that outweighs how the conversation ended.
    pub fn mismatched(&self) -> bool {
        self.found.as_ref().is_some_and(|found| !found.verified)
    }
}

/// Serves a buffer to consumers that connect to a listener, at the same time if they come at the same time, and returns
/// when as many were served as planned. `served` gets one entry for each of them, also if this fails; of a service without
/// end the last thousand, those that failed before the others.
///
/// Whoever sends a well-formed request is a consumer and counts, also when refused. Anything less is a stranger, who delays
/// no consumer and changes nothing. The listener's file is removed before the last conversation has ended.
///
/// # Errors
/// [`Error::NoConsumer`] if none is connected and none comes for as long as the timeout; [`Error::Interrupted`] if it was
/// cancelled, also where serving has no other end; what filling the buffer fails with; [`Error::System`]. What goes wrong
/// with a consumer is in `served`.
pub fn serve(
    listener: Listener,
    buffer: &Buffer,
    plan: Plan,
    terms: &Terms,
    observer: Observer<'_>,
    served: &mut Vec<Served>,
) -> Result<()> {
    let desk = Desk::new(buffer, plan, terms, observer)?;
    observer(Event::Listening { path: listener.path(), consumers: plan.consumers });
    let result = thread::scope(|scope| {
        let result = desk.receive_all(scope, &listener);
        // Nobody else can come, and whoever has asked for nothing yet need not wait for an answer.
        drop(listener);
        desk.end_all(&result);
        result
    });
    desk.close(result, served)
}
