//! The state: the keeper's descriptors, the catalogues, the server and its clients; and the invariants of every state.

use std::collections::VecDeque;

/// The number of names.
pub(super) const NAMES: usize = 2;

/// The number of clients. The last client belongs to another user.
pub(super) const CLIENTS: usize = 3;

/// The limit on requests that are open or have a live version.
pub(super) const REQUESTS: usize = 4;

/// The limit on leases.
pub(super) const LEASES: usize = 5;

/// The limit on segments: each client has its own open file, and all share one.
pub(super) const SEGMENTS: usize = 4;

/// An index of [`World::requests`]. A version has the number of its request.
pub(super) type Request = usize;

pub(super) type Segment = usize;

/// An open file.
pub(super) type File = u8;

/// The file that every put includes.
pub(super) const COMMON: File = CLIENTS as File;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Verb {
    /// The name must be new.
    Put,
    /// The name may exist.
    Replace,
    Delete,
    Get,
}

/// A client's request. After a reconnect the client repeats it until it is answered.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Asked {
    pub(super) verb: Verb,
    pub(super) name: usize,
    pub(super) client: usize,
    /// Whether clients may have seen its effect.
    pub(super) done: bool,
    /// Whether its client no longer waits, or is dead.
    pub(super) answered: bool,
    /// Whether the client received a success.
    pub(super) promised: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Version {
    pub(super) segments: [Segment; 2],
    pub(super) named: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Lease {
    pub(super) version: Request,
    pub(super) uid: u8,
}

/// The contents of a catalogue after its last record.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub(super) struct Content {
    pub(super) versions: [Option<Version>; REQUESTS],
    pub(super) current: [Option<Request>; NAMES],
    pub(super) leases: [Option<Lease>; LEASES],
    /// The executed requests, for repetitions.
    pub(super) remembered: [bool; REQUESTS],
}

impl Content {
    pub(super) fn leased(&self, version: Request) -> bool {
        self.leases.iter().flatten().any(|lease| lease.version == version)
    }

    /// The number of references to each segment.
    pub(super) fn references(&self) -> [u8; SEGMENTS] {
        let mut count = [0; SEGMENTS];
        self.versions.iter().flatten().flat_map(|version| version.segments).for_each(|segment| count[segment] += 1);
        count
    }
}

/// A catalogue file; there are two.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub(super) struct Log {
    /// Incremented with each compaction; 0 without a header.
    pub(super) generation: u8,
    pub(super) content: Content,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Message {
    Keep(Segment, File),
    Remove(Segment),
}

/// An atomic step of the server: it may be killed between two steps, but not within a step.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Step {
    /// Checks a request.
    Admit(Request),
    Send(Segment),
    /// Removes a segment from the keeper.
    Remove(Segment),
    /// Records the publication of a version.
    Publish(Request),
    /// Records the deletion of a name.
    Delete(Request),
    /// Records the drop of a version, and frees its segment numbers.
    Drop(Request),
    /// Records a lease.
    Lease(Request, Request, usize),
    Hand(Request, Request, usize),
    /// Records that a lease is released.
    End(usize),
    Answer(Request),
    Refuse(Request),
    /// Copies the contents into the other catalogue.
    Copy,
    /// Writes a header to the copy, and switches to it.
    Switch,
    /// Erases the header of a catalogue.
    Clear(usize),
    /// Sends the catalogues to a new keeper.
    SendCatalogues,
    /// Marks the keeper's set as complete.
    Complete,
}

/// A segment that the server holds.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Kept {
    pub(super) file: File,
    pub(super) references: u8,
}

/// The server's memory.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub(super) struct Server {
    pub(super) content: Content,
    /// The index of the active catalogue.
    pub(super) log: usize,
    pub(super) kept: [Option<Kept>; SEGMENTS],
    /// The connection that holds each lease; `None` if no client has resumed the lease since the start.
    pub(super) holders: [Option<usize>; LEASES],
    pub(super) steps: VecDeque<Step>,
    /// Pending puts and their segments.
    pub(super) waiting: Vec<(Request, [Segment; 2])>,
    /// Whether the grace period for resuming leases is running.
    pub(super) grace: bool,
    /// Whether the keeper's set is complete.
    pub(super) stored: bool,
    /// Whether a keeper is alive.
    pub(super) has_keeper: bool,
    /// The next token, if a flaw counts tokens.
    pub(super) tokens: usize,
    /// Removals that a flaw delays.
    pub(super) late: Vec<Segment>,
}

impl Server {
    /// Whether the server can accept a request.
    pub(super) fn is_idle(&self) -> bool {
        self.steps.is_empty()
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub(super) struct Client {
    pub(super) connected: bool,
    pub(super) dead: bool,
    pub(super) open: Option<Request>,
    /// Tokens and their versions.
    pub(super) leases: Vec<(usize, Request)>,
}

/// The complete state.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct World {
    pub(super) requests: [Option<Asked>; REQUESTS],
    pub(super) clients: [Client; CLIENTS],
    pub(super) server: Option<Server>,
    /// The keeper's segments and their files, in order.
    pub(super) store: Vec<(Segment, File)>,
    pub(super) logs: [Log; 2],
    /// Whether the keeper has the catalogues.
    pub(super) logs_stored: bool,
    /// Whether the server died while the keeper was incomplete: then versions may be lost.
    pub(super) excused: bool,
    /// The version of each name that clients saw last.
    pub(super) visible: [Option<Request>; NAMES],
    /// The request that has deleted a name since then.
    pub(super) deleted: Option<Request>,
    /// The number of requests left.
    pub(super) left: u8,
    /// Whether the first client has sent a request.
    pub(super) first_asked: bool,
    pub(super) crashes: u8,
    pub(super) compactions: u8,
    pub(super) deaths: u8,
}

pub(super) fn uid(client: usize) -> u8 {
    u8::from(client == CLIENTS - 1)
}

impl World {
    pub(super) fn new(requests: u8, crashes: u8, compactions: u8, deaths: u8) -> Self {
        let server = Server { stored: true, has_keeper: true, ..Server::default() };
        let mut logs = [Log::default(), Log::default()];
        logs[0].generation = 1;
        let clients = std::array::from_fn(|_| Client { connected: true, ..Client::default() });
        Self {
            requests: Default::default(),
            clients,
            server: Some(server),
            store: Vec::new(),
            logs,
            logs_stored: true,
            excused: false,
            visible: [None; NAMES],
            deleted: None,
            left: requests,
            first_asked: false,
            crashes,
            compactions,
            deaths,
        }
    }

    pub(super) fn asked(&self, request: Request) -> &Asked {
        self.requests[request].as_ref().expect("a request that is open or has a version")
    }

    pub(super) fn asked_mut(&mut self, request: Request) -> &mut Asked {
        self.requests[request].as_mut().expect("a request that is open or has a version")
    }

    /// The files of a version, as its maker sent them.
    pub(super) fn files(&self, version: Request) -> [File; 2] {
        [self.asked(version).client as File, COMMON]
    }

    /// Applies a message to the keeper's segments.
    pub(super) fn keep(&mut self, message: &Message) {
        let (Message::Keep(segment, _) | Message::Remove(segment)) = *message;
        self.store.retain(|&(name, _)| name != segment);
        if let Message::Keep(segment, file) = *message {
            self.store.push((segment, file));
            self.store.sort_unstable();
        }
    }

    /// Checks the visible state and updates the record of it.
    ///
    /// # Errors
    /// The violated invariant.
    pub(super) fn look(&mut self) -> Result<(), String> {
        let Some(mut server) = self.server.take_if(|server| server.is_idle()) else {
            return Ok(());
        };
        let result = self.look_at(&mut server);
        self.server = Some(server);
        result
    }

    fn look_at(&mut self, server: &mut Server) -> Result<(), String> {
        self.names(server)?;
        self.promises()?;
        self.versions(server)?;
        self.leases(server)?;
        self.leaks(server)?;
        self.forget(server);
        Ok(())
    }

    /// A name changes only by whole requests, each once, between its arrival and its answer.
    fn names(&mut self, server: &Server) -> Result<(), String> {
        for name in 0..NAMES {
            let (was, is) = (self.visible[name], server.content.current[name]);
            if was == is {
                continue;
            }
            let explains = |asked: &&mut Asked| {
                !asked.done
                    && asked.name == name
                    && match asked.verb {
                        Verb::Put => was.is_none() && is.is_some(),
                        Verb::Replace => is.is_some(),
                        Verb::Delete => was.is_some() && is.is_none(),
                        Verb::Get => false,
                    }
            };
            let cause = match is {
                Some(version) => self.requests[version].as_mut(),
                None => self.deleted.and_then(|request| self.requests[request].as_mut()),
            };
            match cause.filter(explains) {
                Some(asked) => asked.done = true,
                None => return Err(format!("name {name} was {was:?} and is {is:?}, and no request did it")),
            }
            self.visible[name] = is;
        }
        Ok(())
    }

    /// An acknowledged request has its effect.
    fn promises(&self) -> Result<(), String> {
        let broken = |asked: &Option<Asked>| asked.as_ref().is_some_and(|asked| asked.promised && !asked.done);
        match self.requests.iter().position(broken) {
            Some(request) => Err(format!("request {request} was answered as done, and is not")),
            None => Ok(()),
        }
    }

    /// Each version is complete and has its own files.
    fn versions(&self, server: &Server) -> Result<(), String> {
        for (number, version) in server.content.versions.iter().enumerate() {
            let Some(version) = version else { continue };
            for (segment, file) in version.segments.into_iter().zip(self.files(number)) {
                match &server.kept[segment] {
                    Some(kept) if kept.file == file => {}
                    other => return Err(format!("segment {segment} of version {number} is {other:?}, not {file}")),
                }
            }
        }
        for (name, current) in server.content.current.iter().enumerate() {
            if current.is_some_and(|version| server.content.versions[version].is_none()) {
                return Err(format!("name {name} has no version"));
            }
        }
        Ok(())
    }

    /// Each client holds exactly its leases.
    fn leases(&self, server: &Server) -> Result<(), String> {
        for (number, client) in self.clients.iter().enumerate().filter(|(_, client)| client.connected) {
            for &(token, version) in &client.leases {
                let lease = server.content.leases[token].as_ref();
                if lease.is_none_or(|lease| lease.version != version) || server.holders[token] != Some(number) {
                    return Err(format!("client {number} leases version {version}, and the server has {lease:?}"));
                }
                if server.content.versions[version].is_none() {
                    return Err(format!("version {version} is gone, which client {number} leases"));
                }
            }
        }
        for (token, holder) in server.holders.iter().enumerate() {
            if holder.is_none() && !server.grace && server.content.leases[token].is_some() {
                return Err(format!("lease {token} stays, and no client has it"));
            }
            let Some(holder) = *holder else { continue };
            if !self.clients[holder].leases.iter().any(|&(own, _)| own == token) {
                return Err(format!("client {holder} has lease {token}, which it was not given"));
            }
        }
        Ok(())
    }

    /// The server and the keeper hold no unreferenced segment.
    fn leaks(&self, server: &Server) -> Result<(), String> {
        if !server.waiting.is_empty() || !server.stored || !server.late.is_empty() {
            return Ok(());
        }
        let references = server.content.references();
        for (segment, &count) in references.iter().enumerate() {
            let kept = server.kept[segment].as_ref();
            if kept.map_or(0, |kept| kept.references) != count {
                return Err(format!("segment {segment} is in {count} versions, and counted as {kept:?}"));
            }
            let stored: Vec<_> = self.store.iter().filter(|(name, _)| *name == segment).collect();
            if stored.len() != usize::from(count > 0) {
                return Err(format!("segment {segment} is in {count} versions, and stored as {stored:?}"));
            }
        }
        let unnamed = |(number, version): (usize, &Option<Version>)| {
            version.as_ref().is_some_and(|version| !version.named && !server.content.leased(number))
        };
        if server.content.versions.iter().enumerate().any(unnamed) {
            return Err("a version stays that has no name and no lease".to_owned());
        }
        if self.logs[1 - server.log].generation > 0 {
            return Err("the other catalogue has a header".to_owned());
        }
        Ok(())
    }

    /// Forgets answered requests without effects: many histories lead to the same state.
    fn forget(&mut self, server: &mut Server) {
        self.deleted = None;
        for request in 0..REQUESTS {
            if self.requests[request].as_ref().is_none_or(|asked| !asked.answered) {
                continue;
            }
            let versioned = |content: &Content| content.versions[request].is_some();
            let leased = self.clients.iter().any(|client| client.leases.iter().any(|&(_, of)| of == request));
            let known = leased
                || versioned(&server.content)
                || self.logs.iter().any(|log| versioned(&log.content))
                || self.visible.contains(&Some(request));
            if !known {
                self.requests[request] = None;
            }
        }
        // A client repeats only its open request.
        let requests = &self.requests;
        let asks = |request: usize| requests[request].as_ref().is_some_and(|asked| !asked.answered);
        for content in self.logs.iter_mut().map(|log| &mut log.content).chain([&mut server.content]) {
            for (request, remembered) in content.remembered.iter_mut().enumerate() {
                *remembered &= asks(request);
            }
        }
    }
}
