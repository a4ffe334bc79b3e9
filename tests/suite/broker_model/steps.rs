//! The transitions: requests, the server's steps, kills, and recovery.
//!
//! One file of more than 500 lines: one match over all transitions.

use super::{
    flaws::Flaw,
    world::{
        Asked, CLIENTS, COMMON, Content, File, Kept, LEASES, Lease, Message, NAMES, REQUESTS, Request, SEGMENTS,
        Segment, Server, Step, Verb, Version, World, uid,
    },
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    Ask(usize, Verb, usize),
    Release(usize, usize),
    /// The server's next step.
    Step,
    KillServer,
    KillKeeper,
    KillClient(usize),
    Start,
    StoreAnew,
    /// A client reconnects, resumes its leases and repeats its request.
    Reconnect(usize),
    /// A client of another user presents a token that was not issued to it.
    TakeForeign(usize, usize),
    /// The grace period for resuming leases expires.
    EndGrace,
    Compact,
}

/// The model under search.
#[derive(Debug, Clone, Copy)]
pub(super) struct Model {
    pub(super) flaw: Flaw,
}

type Outcome = Result<(), String>;

impl Model {
    fn has(self, flaw: Flaw) -> bool {
        self.flaw == flaw
    }

    /// The possible actions in a state.
    pub(super) fn actions(self, world: &World) -> Vec<Action> {
        let mut actions = Vec::new();
        if world.crashes > 0 && world.logs_stored {
            actions.push(Action::KillKeeper);
        }
        let Some(server) = &world.server else {
            actions.push(Action::Start);
            actions.extend(world.mortals().map(Action::KillClient));
            return actions;
        };
        if world.crashes > 0 {
            actions.push(Action::KillServer);
        }
        if !server.is_idle() {
            actions.push(Action::Step);
            return actions;
        }
        if !server.stored {
            // The resend precedes every other action except a kill.
            actions.push(Action::StoreAnew);
            return actions;
        }
        if server.grace {
            actions.push(Action::EndGrace);
        }
        actions.extend(world.mortals().map(Action::KillClient));
        if world.compactions > 0 {
            actions.push(Action::Compact);
        }
        for (number, client) in world.clients.iter().enumerate().filter(|(_, client)| !client.dead) {
            if !client.connected {
                actions.push(Action::Reconnect(number));
                continue;
            }
            actions.extend(client.leases.iter().map(|&(token, _)| Action::Release(number, token)));
            let foreign = |token: &usize| {
                server.grace
                    && server.holders[*token].is_none()
                    && server.content.leases[*token].as_ref().is_some_and(|lease| lease.uid != uid(number))
            };
            actions.extend((0..LEASES).filter(foreign).map(|token| Action::TakeForeign(number, token)));
            if client.open.is_none() && world.left > 0 && self.in_order(world, number) {
                for name in 0..NAMES {
                    // The names are symmetric: the first request uses the first name.
                    if name > 0 && world.is_untouched() {
                        continue;
                    }
                    actions.extend([Verb::Put, Verb::Replace].map(|verb| Action::Ask(number, verb, name)));
                    if server.content.current[name].is_some() {
                        actions.push(Action::Ask(number, Verb::Delete, name));
                        if client.leases.is_empty() {
                            actions.push(Action::Ask(number, Verb::Get, name));
                        }
                    }
                }
            }
        }
        actions
    }

    /// The first two clients are symmetric: client 0 sends the first request.
    fn in_order(self, world: &World, client: usize) -> bool {
        client != 1 || world.first_asked
    }

    /// The state after an action.
    ///
    /// # Errors
    /// The violated invariant.
    pub(super) fn next(self, world: &World, action: Action) -> Result<World, String> {
        let mut next = world.clone();
        self.apply(&mut next, action)?;
        next.look()?;
        Ok(next)
    }

    fn apply(self, world: &mut World, action: Action) -> Outcome {
        match action {
            Action::Ask(client, verb, name) => {
                let request = world.requests.iter().position(Option::is_none).expect("room for a request");
                world.requests[request] =
                    Some(Asked { verb, name, client, done: false, answered: false, promised: false });
                world.clients[client].open = Some(request);
                world.left -= 1;
                world.first_asked |= client == 0;
                self.push(world, [Step::Admit(request)]);
            }
            Action::Release(client, token) => {
                world.clients[client].leases.retain(|&(own, _)| own != token);
                world.server_mut().holders[token] = None;
                self.push(world, [Step::End(token)]);
            }
            Action::Step => {
                let server = world.server_mut();
                let step = server.steps.pop_front().expect("a step");
                return self.step(world, step);
            }
            Action::KillServer => {
                world.crashes -= 1;
                let server = world.server.take().expect("a server");
                world.excused = !server.stored;
                world.clients.iter_mut().for_each(|client| client.connected = false);
            }
            Action::KillKeeper => {
                world.crashes -= 1;
                world.store.clear();
                world.logs_stored = false;
                match &mut world.server {
                    Some(server) => {
                        (server.stored, server.has_keeper) = (false, false);
                        // An interrupted resend starts again.
                        server.steps.retain(|step| !matches!(step, Step::SendCatalogues | Step::Complete));
                    }
                    None => world.excused = true,
                }
            }
            Action::KillClient(client) => world.kill_client(client),
            Action::Start => return self.start(world),
            Action::StoreAnew => {
                let server = world.server_mut();
                server.has_keeper = true;
                let segments = (0..SEGMENTS).filter(|&segment| server.kept[segment].is_some()).map(Step::Send);
                let segments = segments.filter(|_| !self.has(Flaw::SegmentsNotStoredAnew));
                // These are the current segments: a later put sends its own.
                server.steps = [Step::SendCatalogues].into_iter().chain(segments).chain([Step::Complete]).collect();
            }
            Action::Reconnect(client) => return self.reconnect(world, client),
            Action::TakeForeign(client, token) => {
                if self.has(Flaw::TokenAlone) {
                    world.server_mut().holders[token] = Some(client);
                }
            }
            Action::EndGrace => {
                // A client that reconnects later has lost its leases.
                world.clients.iter_mut().filter(|client| !client.connected).for_each(|client| client.leases.clear());
                let server = world.server_mut();
                server.grace = false;
                let free = |token: &usize| server.content.leases[*token].is_some() && server.holders[*token].is_none();
                let ends: Vec<Step> = (0..LEASES).filter(free).map(Step::End).collect();
                if !self.has(Flaw::EndlessGrace) {
                    self.push(world, ends);
                }
            }
            Action::Compact => {
                world.compactions -= 1;
                let steps = match self.has(Flaw::HeaderFirst) {
                    true => [Step::Switch, Step::Copy],
                    false => [Step::Copy, Step::Switch],
                };
                let old = world.server_mut().log;
                self.push(world, steps.into_iter().chain([Step::Clear(old)]));
            }
        }
        Ok(())
    }

    fn push(self, world: &mut World, steps: impl IntoIterator<Item = Step>) {
        world.server_mut().steps.extend(steps);
    }

    /// Inserts steps before the pending steps.
    fn push_front(self, world: &mut World, steps: impl IntoIterator<Item = Step>) {
        let server = world.server_mut();
        let rest = std::mem::take(&mut server.steps);
        server.steps = steps.into_iter().chain(rest).collect();
    }

    fn step(self, world: &mut World, step: Step) -> Outcome {
        match step {
            Step::Admit(request) => self.admit(world, request),
            Step::Send(segment) => {
                let kept = world.server_mut().kept[segment].clone();
                if let Some(Kept { file, .. }) = kept {
                    self.send(world, &Message::Keep(segment, file));
                }
            }
            Step::Remove(segment) => self.send(world, &Message::Remove(segment)),
            Step::Publish(request) => self.publish(world, request),
            Step::Delete(request) => self.delete(world, request),
            Step::Drop(version) => self.drop_version(world, version),
            Step::Lease(request, version, token) => {
                let uid = uid(world.asked(request).client);
                world.record(|content| content.leases[token] = Some(Lease { version, uid }));
            }
            Step::Hand(request, version, token) => {
                let (client, name) = (world.asked(request).client, world.asked(request).name);
                if world.visible[name] != Some(version) {
                    return Err(format!("a get of name {name} is answered with {version}"));
                }
                world.answer(request);
                world.clients[client].leases.push((token, version));
                world.server_mut().holders[token] = Some(client);
            }
            Step::End(token) => {
                let Some(lease) = world.server_mut().content.leases[token].clone() else { return Ok(()) };
                world.record(|content| content.leases[token] = None);
                self.drop_if_unused(world, lease.version);
            }
            Step::Answer(request) => {
                world.asked_mut(request).promised = true;
                world.answer(request);
            }
            Step::Refuse(request) => {
                let written = world.server_mut().content.remembered[request];
                if written || world.asked(request).done {
                    return Err(format!("request {request} is refused, and was done"));
                }
                world.answer(request);
            }
            Step::Copy => {
                let server = world.server.as_ref().expect("a server");
                let to = if self.has(Flaw::HeaderFirst) { server.log } else { 1 - server.log };
                let mut content = server.content.clone();
                if self.has(Flaw::RequestsForgottenByCompaction) {
                    content.remembered = Default::default();
                }
                world.logs[to].content = content;
            }
            Step::Switch => {
                let server = world.server_mut();
                let old = server.log;
                server.log = 1 - old;
                world.logs[1 - old].generation = world.logs[old].generation + 1;
            }
            Step::Clear(log) => world.logs[log] = Default::default(),
            Step::SendCatalogues => world.logs_stored = true,
            Step::Complete => world.server_mut().stored = true,
        }
        Ok(())
    }

    /// Sends a message to the keeper, which keeps it even if the server dies. Without a keeper the message is dropped: a later resend
    /// covers it.
    fn send(self, world: &mut World, message: &Message) {
        if world.server_mut().has_keeper {
            world.keep(message);
        }
    }

    fn admit(self, world: &mut World, request: Request) {
        let Asked { verb, name, client, .. } = world.asked(request).clone();
        let server = world.server_mut();
        let current = server.content.current[name];
        if server.content.remembered[request] && !self.has(Flaw::RequestsForgotten) {
            return self.push(world, [Step::Answer(request)]);
        }
        match (verb, current) {
            (Verb::Put, Some(_)) | (Verb::Delete | Verb::Get, None) => self.push(world, [Step::Refuse(request)]),
            (Verb::Put | Verb::Replace, _) => {
                let taken = [client as File, COMMON].map(|file| server.take(file));
                server.waiting.push((request, taken.map(|(segment, _)| segment)));
                let new = taken.into_iter().filter(|(_, new)| *new);
                let send: Vec<Step> = new.map(|(segment, _)| Step::Send(segment)).collect();
                let publish = Step::Publish(request);
                if self.has(Flaw::CatalogueBeforeStore) {
                    self.push(world, [Step::Publish(request)].into_iter().chain(send));
                } else if self.has(Flaw::AnswerBeforeCatalogue) {
                    self.push(world, [Step::Answer(request)].into_iter().chain(send).chain([publish]));
                } else {
                    self.push(world, send.into_iter().chain([publish]));
                }
                let late = std::mem::take(&mut world.server_mut().late);
                self.push(world, late.into_iter().map(Step::Remove));
            }
            (Verb::Delete, Some(version)) => {
                if self.has(Flaw::RemovalBeforeCatalogue) && !server.content.leased(version) {
                    let segments = server.content.versions[version].as_ref().map(|version| version.segments);
                    let alone =
                        |segment: &Segment| server.kept[*segment].as_ref().is_some_and(|kept| kept.references == 1);
                    let removed: Vec<Step> = segments.into_iter().flatten().filter(alone).map(Step::Remove).collect();
                    self.push(world, removed);
                }
                self.push(world, [Step::Delete(request)]);
            }
            (Verb::Get, Some(version)) => {
                let token = match self.has(Flaw::TokensCounted) {
                    true => {
                        server.tokens += 1;
                        (server.tokens - 1) % LEASES
                    }
                    // Tokens are random, so they are unique.
                    false => world.free_token(),
                };
                let write = Step::Lease(request, version, token);
                let hand = Step::Hand(request, version, token);
                match self.has(Flaw::LeaseBeforeCatalogue) {
                    true => self.push(world, [hand, write]),
                    false => self.push(world, [write, hand]),
                }
            }
        }
    }

    fn publish(self, world: &mut World, request: Request) {
        let Asked { verb, name, .. } = world.asked(request).clone();
        let server = world.server_mut();
        let at = server.waiting.iter().position(|(of, _)| *of == request).expect("a put that waits");
        let (_, segments) = server.waiting.remove(at);
        let before = server.content.current[name];
        // Another put may have created the name in the meantime.
        if verb == Verb::Put && before.is_some() {
            let removed = segments.into_iter().filter_map(|segment| self.release(server, segment)).map(Step::Remove);
            let steps: Vec<Step> = [Step::Refuse(request)].into_iter().chain(removed).collect();
            return self.push(world, steps);
        }
        world.record(|content| {
            content.versions[request] = Some(Version { segments, named: true });
            content.current[name] = Some(request);
            content.remembered[request] = true;
            if let Some(before) = before.and_then(|before| content.versions[before].as_mut()) {
                before.named = false;
            }
        });
        self.push(world, [Step::Answer(request)]);
        if let Some(before) = before {
            self.drop_if_unused(world, before);
        }
    }

    fn delete(self, world: &mut World, request: Request) {
        let name = world.asked(request).name;
        let Some(current) = world.server_mut().content.current[name] else { return };
        world.record(|content| {
            content.current[name] = None;
            content.remembered[request] = true;
            if let Some(version) = &mut content.versions[current] {
                version.named = false;
            }
        });
        world.deleted = Some(request);
        self.push(world, [Step::Answer(request)]);
        self.drop_if_unused(world, current);
    }

    /// Drops a version without a name and without a lease.
    fn drop_if_unused(self, world: &mut World, version: Request) {
        let content = &world.server_mut().content;
        if content.versions[version].as_ref().is_some_and(|version| !version.named) && !content.leased(version) {
            self.push_front(world, [Step::Drop(version)]);
        }
    }

    fn drop_version(self, world: &mut World, version: Request) {
        let Some(gone) = world.server_mut().content.versions[version].clone() else { return };
        world.record(|content| content.versions[version] = None);
        let server = world.server_mut();
        let removed: Vec<Segment> =
            gone.segments.into_iter().filter_map(|segment| self.release(server, segment)).collect();
        match self.has(Flaw::RemovalAfterReuse) {
            true => server.late.extend(removed),
            // The removal happens after the answer.
            false => self.push(world, removed.into_iter().map(Step::Remove)),
        }
    }

    /// Removes a reference. Returns the segment if this was the last reference.
    fn release(self, server: &mut Server, segment: Segment) -> Option<Segment> {
        let kept = server.kept[segment].as_mut()?;
        kept.references -= 1;
        if kept.references > 0 && !self.has(Flaw::NoReferences) {
            return None;
        }
        server.kept[segment] = None;
        Some(segment)
    }

    fn start(self, world: &mut World) -> Outcome {
        let mut server = Server { stored: true, has_keeper: true, ..Server::default() };
        let generation = |log: usize| world.logs[log].generation;
        let valid: Vec<usize> = (0..2).filter(|&log| world.logs_stored && generation(log) > 0).collect();
        match valid.iter().copied().max_by_key(|&log| generation(log)) {
            Some(log) => {
                if world.excused && !self.has(Flaw::IncompleteSetTrusted) {
                    world.lose_incomplete(log);
                }
                server.log = log;
                server.content = world.logs[log].content.clone();
                if valid.len() > 1 {
                    server.steps.push_back(Step::Clear(1 - log));
                }
            }
            None if world.excused => {
                world.lose_all();
                server.steps.push_back(Step::SendCatalogues);
                server.stored = false;
            }
            None => return Err("the catalogue is lost".to_owned()),
        }
        world.excused = false;
        if self.has(Flaw::NoGrace) {
            server.content.leases = Default::default();
            world.logs[server.log].content.leases = Default::default();
        }
        server.grace = true;
        let references = server.content.references();
        for (segment, &count) in references.iter().enumerate() {
            let mut stored = world.store.iter().filter(|(name, _)| *name == segment);
            match stored.next() {
                Some(&(_, file)) if count > 0 => server.kept[segment] = Some(Kept { file, references: count }),
                Some(_) if !self.has(Flaw::NothingRemovedAtTheStart) => server.steps.push_back(Step::Remove(segment)),
                _ => {}
            }
        }
        let unused = |number: usize| {
            let version = server.content.versions[number].as_ref();
            version.is_some_and(|version| !version.named) && !server.content.leased(number)
        };
        if !self.has(Flaw::NothingDroppedAtTheStart) {
            let drops: Vec<Step> = (0..REQUESTS).filter(|&number| unused(number)).map(Step::Drop).collect();
            server.steps.extend(drops);
        }
        world.server = Some(server);
        world.settle_grace();
        Ok(())
    }

    fn reconnect(self, world: &mut World, number: usize) -> Outcome {
        let client = &mut world.clients[number];
        client.connected = true;
        let leases = std::mem::take(&mut client.leases);
        let open = client.open;
        let server = world.server.as_mut().expect("a server");
        for (token, version) in leases {
            let lease = server.content.leases[token].as_ref();
            if lease.is_some_and(|lease| lease.uid == uid(number)) && server.holders[token].is_none() && server.grace {
                server.holders[token] = Some(number);
                world.clients[number].leases.push((token, version));
            } else if server.grace {
                return Err(format!("client {number} can't take lease {token} up"));
            }
        }
        world.settle_grace();
        if let Some(request) = open {
            self.push(world, [Step::Admit(request)]);
        }
        Ok(())
    }
}

impl Server {
    /// The number of an open file, and whether the number is new.
    fn take(&mut self, file: File) -> (Segment, bool) {
        let known = self.kept.iter().position(|kept| kept.as_ref().is_some_and(|kept| kept.file == file));
        let segment = known.or_else(|| self.kept.iter().position(Option::is_none)).expect("a number");
        self.kept[segment].get_or_insert(Kept { file, references: 0 }).references += 1;
        (segment, known.is_none())
    }
}

impl World {
    pub(super) fn server_mut(&mut self) -> &mut Server {
        self.server.as_mut().expect("a server")
    }

    fn is_untouched(&self) -> bool {
        self.requests.iter().all(Option::is_none) && self.visible == [None; NAMES]
    }

    /// Appends to the catalogue and updates the server's memory.
    fn record(&mut self, change: impl Fn(&mut Content)) {
        let server = self.server.as_mut().expect("a server");
        change(&mut server.content);
        change(&mut self.logs[server.log].content);
    }

    /// Delivers the answer to the client.
    fn answer(&mut self, request: Request) {
        let client = self.asked(request).client;
        if self.clients[client].open == Some(request) {
            self.clients[client].open = None;
        }
        self.asked_mut(request).answered = true;
    }

    /// The clients that may be killed.
    fn mortals(&self) -> impl Iterator<Item = usize> {
        let mortal = |number: &usize| {
            let client = &self.clients[*number];
            self.deaths > 0 && (client.open.is_some() || !client.leases.is_empty())
        };
        (0..CLIENTS).filter(mortal)
    }

    fn kill_client(&mut self, client: usize) {
        self.deaths -= 1;
        let gone = std::mem::take(&mut self.clients[client]);
        self.clients[client].dead = true;
        if let Some(request) = gone.open {
            // The request may still be executed.
            self.asked_mut(request).answered = true;
        }
        if let Some(server) = &mut self.server {
            for (token, _) in gone.leases.into_iter().filter(|_| gone.connected) {
                server.holders[token] = None;
                server.steps.push_back(Step::End(token));
            }
            self.settle_grace();
        }
    }

    /// If no lease and no client can still be resumed, the grace period makes no difference.
    fn settle_grace(&mut self) {
        let absent = self.clients.iter().any(|client| !client.connected && !client.leases.is_empty());
        let Some(server) = &mut self.server else { return };
        let free = (0..LEASES).any(|token| server.content.leases[token].is_some() && server.holders[token].is_none());
        server.grace &= absent || free;
    }

    fn free_token(&self) -> usize {
        let server = self.server.as_ref().expect("a server");
        let held = |token: usize| self.clients.iter().any(|client| client.leases.iter().any(|&(own, _)| own == token));
        (0..LEASES).find(|&token| server.content.leases[token].is_none() && !held(token)).expect("a token")
    }

    /// Server and keeper died before the keeper was complete: versions with missing segments are lost.
    fn lose_incomplete(&mut self, log: usize) {
        for version in 0..REQUESTS {
            let content = &mut self.logs[log].content;
            let stored = |segment: &Segment| self.store.iter().any(|(name, _)| name == segment);
            if content.versions[version].as_ref().is_none_or(|version| version.segments.iter().all(stored)) {
                continue;
            }
            content.versions[version] = None;
            for lease in
                content.leases.iter_mut().filter(|lease| lease.as_ref().is_some_and(|of| of.version == version))
            {
                *lease = None;
            }
            content.current.iter_mut().for_each(|current| *current = current.filter(|of| *of != version));
            // The request was executed, and its effect is lost.
            self.asked_mut(version).done = true;
            let name = self.asked(version).name;
            self.visible[name] = self.logs[log].content.current[name];
            self.clients.iter_mut().for_each(|client| client.leases.retain(|&(_, leased)| leased != version));
        }
    }

    /// Server and keeper are dead: everything is lost.
    fn lose_all(&mut self) {
        self.clients.iter_mut().for_each(|client| client.leases.clear());
        self.visible = [None; NAMES];
        self.deleted = None;
        self.logs = Default::default();
        self.logs[0].generation = 1;
        for request in 0..REQUESTS {
            let open = self.clients.iter().any(|client| client.open == Some(request));
            match &mut self.requests[request] {
                Some(asked) if open => (asked.done, asked.promised) = (false, false),
                other => *other = None,
            }
        }
    }
}
