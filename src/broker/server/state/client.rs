//! Clients: leases, names and pending requests.

use std::{collections::HashSet, sync::Arc, time::Instant};

use super::{caller::Caller, objects::NewVersion, root::DraftKey, waits::PendingGet, watchers::WatchState};
use crate::{
    error::BrokerError,
    wire::broker::{Token, Who},
};

/// A client, without its socket.
#[derive(Debug)]
pub(crate) struct ClientState {
    pub(crate) caller: Caller,
    pub(crate) greeted: bool,
    pub(crate) request: PendingRequest,
    pub(crate) request_info: Option<RequestInfo>,
    pub(crate) leases: HashSet<Token>,
    /// Leases of the answer being sent. Their segments are needed until the socket has accepted every record.
    pub(crate) sending: Vec<Token>,
    /// Names that this client put and whose lifetime depends on it.
    pub(crate) names: HashSet<Arc<str>>,
}

/// Resources charged for the pending request.
#[derive(Debug)]
pub(crate) struct RequestInfo {
    pub(crate) verb: &'static str,
    pub(crate) since: Instant,
    /// Bytes of memory charged to the user.
    pub(crate) bytes: u64,
}

/// The state of a client's request.
#[derive(Debug, Default)]
pub(crate) enum PendingRequest {
    #[default]
    None,
    /// Waits for the rest of a put's segments. With a `problem`, the put is refused after the last one.
    Upload { version: Box<NewVersion>, problem: Option<BrokerError> },
    /// Waits for the other parts of its put.
    Parts(DraftKey),
    /// Waits for an object.
    Object(Box<PendingGet>),
    /// Waits for the keeper to confirm the put.
    Confirmation,
    /// Waits for events.
    Watch(Box<WatchState>),
    /// Waits for introductions.
    Topic,
    /// Waits for the next slice of a lease listing.
    Leases(Who),
}

impl ClientState {
    pub(crate) fn new(caller: Caller) -> Self {
        Self {
            caller,
            greeted: false,
            request: PendingRequest::None,
            request_info: None,
            leases: HashSet::new(),
            sending: Vec::new(),
            names: HashSet::new(),
        }
    }

    pub(crate) fn is_busy(&self) -> bool {
        !matches!(self.request, PendingRequest::None) || !self.sending.is_empty()
    }

    /// Whether some records of a lease are still unsent.
    pub(crate) fn is_sending(&self, token: Token) -> bool {
        self.sending.contains(&token)
    }
}
