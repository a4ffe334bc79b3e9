//! The state of a publisher that is not about one connection.

use std::{collections::VecDeque, sync::Arc};

use crate::session::stream::{event::Event, format::FormatRecord, ledger::Ledger};

/// The most events that wait for the program. Beyond it, the oldest is dropped.
const MAX_EVENTS: usize = 1024;

/// The state that is not about one connection.
#[derive(Debug)]
pub(in super::super) struct Desk {
    pub(in super::super) ledger: Ledger<Publication>,
    pub(in super::super) format: Option<Arc<FormatRecord>>,
    pub(super) events: VecDeque<Event>,
    pub(super) has_news: bool,
    /// The last received record.
    pub(in super::super) incoming: Vec<u8>,
    /// The process that sent it, if it is known.
    pub(in super::super) sender: Option<crate::channel::Peer>,
    pub(in super::super) is_finished: bool,
    /// Whether `members` has connections of [`Stage::Gone`].
    pub(in super::super) has_gone: bool,
    /// Whether streams have finished with buffers.
    pub(in super::super) has_freed: bool,
}

/// The record of a publication, the same for every subscriber.
#[derive(Debug, Default)]
pub(in super::super) struct Publication {
    pub(in super::super) record: Vec<u8>,
    /// The turn after which a stream has written it, unless it was written before.
    pub(in super::super) turn: Option<u64>,
    pub(in super::super) format: Option<Arc<FormatRecord>>,
}

impl Desk {
    pub(in super::super) fn report(&mut self, event: Event) {
        if self.events.len() == MAX_EVENTS {
            self.events.pop_front();
        }
        self.events.push_back(event);
        self.has_news = true;
    }
}
