//! The clients: what each one holds, and the request that is not answered yet.

use std::{collections::HashSet, sync::Arc, time::Instant};

use super::{caller::Caller, drafts::DraftKey, upload::Upload, waits::Waiting, watchers::Watching};
use crate::wire::broker::{Token, Who};

/// The logical half of a connection.
#[derive(Debug)]
pub(crate) struct Client {
    pub(crate) caller: Caller,
    /// Whether it has sent its hello.
    pub(crate) greeted: bool,
    /// The request that is not answered yet.
    pub(crate) request: Request,
    pub(crate) asked: Option<Asked>,
    /// The leases that it holds.
    pub(crate) leases: HashSet<Token>,
    /// The leases of the last answer, until the socket has taken all of its records: the segments are still needed.
    pub(crate) sending: Vec<Token>,
    /// The names that it put and whose lifetime depends on it.
    pub(crate) names: HashSet<Arc<str>>,
}

/// When a request came, and what it takes.
#[derive(Debug)]
pub(crate) struct Asked {
    pub(crate) verb: &'static str,
    pub(crate) since: Instant,
    /// How many bytes of memory are counted for its user.
    pub(crate) bytes: u64,
}

/// What a client waits for.
#[derive(Debug, Default)]
pub(crate) enum Request {
    /// Nothing.
    #[default]
    None,
    /// The rest of a put's segments.
    Upload(Box<Upload>),
    /// The worker. Its client may have asked meanwhile that the request does not wait any longer.
    Worker { stopped: bool },
    /// The other parts of its put.
    Parts(DraftKey),
    /// An object.
    Object(Box<Waiting>),
    /// The keeper, which must have what it put.
    Storing,
    /// Events.
    Watch(Box<Watching>),
    /// The next slice of a listing of leases.
    Leases(Who),
}

impl Client {
    pub(crate) fn new(caller: Caller) -> Self {
        Self {
            caller,
            greeted: false,
            request: Request::None,
            asked: None,
            leases: HashSet::new(),
            sending: Vec::new(),
            names: HashSet::new(),
        }
    }

    /// Whether a request is under way.
    pub(crate) fn is_busy(&self) -> bool {
        !matches!(self.request, Request::None) || !self.sending.is_empty()
    }

    /// Whether some records of a lease are not sent yet.
    pub(crate) fn is_sending(&self, token: Token) -> bool {
        self.sending.contains(&token)
    }
}
