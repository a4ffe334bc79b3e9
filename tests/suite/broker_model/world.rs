//! What there is: the descriptors that the keeper holds, the catalogues, the server and its clients; and what must hold in every state.

use std::collections::VecDeque;

/// How many names there are.
pub(super) const NAMES: usize = 2;

/// How many clients there are. The last one is another user's.
pub(super) const CLIENTS: usize = 3;

/// How many requests are open or have a version that is there, at most.
pub(super) const REQUESTS: usize = 4;

/// How many leases there are at most.
pub(super) const LEASES: usize = 5;

/// How many segments there are at most: each client has an open file of its own, and all have one in common.
pub(super) const SEGMENTS: usize = 4;

/// An index of [`World::requests`]. A version has the number of the request that made it.
pub(super) type Request = usize;

/// The number of a segment.
pub(super) type Segment = usize;

/// An open file.
pub(super) type File = u8;

/// The file that is a part of every put.
pub(super) const COMMON: File = CLIENTS as File;

/// What a client asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Verb {
    /// A name that must be new.
    Put,
    /// A name that may exist.
    Replace,
    Delete,
    Get,
}

/// A request of a client, which repeats it after a reconnect until it is answered.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Asked {
    pub(super) verb: Verb,
    pub(super) name: usize,
    pub(super) client: usize,
    /// Whether the clients could see it done.
    pub(super) done: bool,
    /// Whether its client waits no more, or is dead.
    pub(super) answered: bool,
    /// Whether it was answered as done.
    pub(super) promised: bool,
}

/// A version in a catalogue.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Version {
    pub(super) segments: [Segment; 2],
    pub(super) named: bool,
}

/// A lease in a catalogue.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Lease {
    pub(super) version: Request,
    pub(super) uid: u8,
}

/// What the records of a catalogue come to.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub(super) struct Content {
    pub(super) versions: [Option<Version>; REQUESTS],
    pub(super) current: [Option<Request>; NAMES],
    pub(super) leases: [Option<Lease>; LEASES],
    /// The requests that were done, for those who ask again.
    pub(super) remembered: [bool; REQUESTS],
}

impl Content {
    pub(super) fn leased(&self, version: Request) -> bool {
        self.leases.iter().flatten().any(|lease| lease.version == version)
    }

    /// How often each segment is part of a version.
    pub(super) fn references(&self) -> [u8; SEGMENTS] {
        let mut count = [0; SEGMENTS];
        self.versions.iter().flatten().flat_map(|version| version.segments).for_each(|segment| count[segment] += 1);
        count
    }
}

/// A catalogue's file: one of two.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub(super) struct Log {
    /// Counted up with each compaction; 0 where it has no header.
    pub(super) generation: u8,
    pub(super) content: Content,
}

/// A message to the keeper.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Message {
    Keep(Segment, File),
    Remove(Segment),
}

/// What the server does at once: it may be killed between any two of them, and not within one.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Step {
    /// Looks at a request.
    Admit(Request),
    /// Sends a segment to the keeper.
    Send(Segment),
    /// Has a segment removed from the keeper.
    Remove(Segment),
    /// Writes down that a version is published.
    Publish(Request),
    /// Writes down that a name is deleted.
    Delete(Request),
    /// Writes down that a version is given back, and takes its segments' numbers back.
    Drop(Request),
    /// Writes down a lease.
    Lease(Request, Request, usize),
    /// Sends a lease.
    Hand(Request, Request, usize),
    /// Writes down the end of a lease.
    End(usize),
    Answer(Request),
    Refuse(Request),
    /// Writes all that there is into the other catalogue.
    Copy,
    /// Gives that a header, and uses it.
    Switch,
    /// Makes a catalogue one without a header.
    Clear(usize),
    /// Sends the catalogues to a new keeper.
    SendCatalogues,
    /// Tells it that it has everything.
    Complete,
}

/// A segment that the server has.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Kept {
    pub(super) file: File,
    pub(super) references: u8,
}

/// The server's memory.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub(super) struct Server {
    pub(super) content: Content,
    /// Which catalogue it writes.
    pub(super) log: usize,
    pub(super) kept: [Option<Kept>; SEGMENTS],
    /// The connections that hold the leases. Those that no client took up since the start have none.
    pub(super) holders: [Option<usize>; LEASES],
    pub(super) steps: VecDeque<Step>,
    /// Puts that are not published, and their segments.
    pub(super) waiting: Vec<(Request, [Segment; 2])>,
    /// Whether leases can still be taken up.
    pub(super) grace: bool,
    /// Whether the keeper has all that it should.
    pub(super) stored: bool,
    /// Whether there is a keeper that reads what is sent.
    pub(super) has_keeper: bool,
    /// The next token, where a flawed server counts them.
    pub(super) tokens: usize,
    /// Removals that a flawed server sends later.
    pub(super) late: Vec<Segment>,
}

impl Server {
    /// Whether it takes a request.
    pub(super) fn is_idle(&self) -> bool {
        self.steps.is_empty()
    }
}

/// A client.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub(super) struct Client {
    pub(super) connected: bool,
    pub(super) dead: bool,
    pub(super) open: Option<Request>,
    /// Tokens, with the versions that came with them.
    pub(super) leases: Vec<(usize, Request)>,
}

/// All there is.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct World {
    pub(super) requests: [Option<Asked>; REQUESTS],
    pub(super) clients: [Client; CLIENTS],
    pub(super) server: Option<Server>,
    /// Which names are of which files, in order.
    pub(super) store: Vec<(Segment, File)>,
    pub(super) logs: [Log; 2],
    /// Whether the keeper has the catalogues.
    pub(super) logs_stored: bool,
    /// Whether the server died while the keeper had not all: then versions may be lost.
    pub(super) excused: bool,
    /// What clients saw last under each name.
    pub(super) visible: [Option<Request>; NAMES],
    /// The request that deleted a name since then.
    pub(super) deleted: Option<Request>,
    /// How many requests there may still be.
    pub(super) left: u8,
    /// Whether the first client has asked for something.
    pub(super) first_asked: bool,
    pub(super) crashes: u8,
    pub(super) compactions: u8,
    pub(super) deaths: u8,
}

/// The user of a client.
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

    /// What the keeper does with a message.
    pub(super) fn keep(&mut self, message: &Message) {
        let (Message::Keep(segment, _) | Message::Remove(segment)) = *message;
        self.store.retain(|&(name, _)| name != segment);
        if let Message::Keep(segment, file) = *message {
            self.store.push((segment, file));
            self.store.sort_unstable();
        }
    }

    /// Notes what clients see now, and what follows of it.
    ///
    /// # Errors
    /// What must never be seen.
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

    /// A name changes by whole requests, each once, between its coming and its answer.
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

    /// What was answered as done is done.
    fn promises(&self) -> Result<(), String> {
        let broken = |asked: &Option<Asked>| asked.as_ref().is_some_and(|asked| asked.promised && !asked.done);
        match self.requests.iter().position(broken) {
            Some(request) => Err(format!("request {request} was answered as done, and is not")),
            None => Ok(()),
        }
    }

    /// All of a version is there, and it is its own.
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

    /// Each client has the leases that it was given, and no other.
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

    /// Nothing is kept that no version has.
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

    /// Forgets requests that were answered and have left nothing: the same state follows from many of them.
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
        // No client asks again what it has no open request for.
        let requests = &self.requests;
        let asks = |request: usize| requests[request].as_ref().is_some_and(|asked| !asked.answered);
        for content in self.logs.iter_mut().map(|log| &mut log.content).chain([&mut server.content]) {
            for (request, remembered) in content.remembered.iter_mut().enumerate() {
                *remembered &= asks(request);
            }
        }
    }
}
