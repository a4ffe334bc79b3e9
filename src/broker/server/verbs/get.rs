//! Gets: leases of what is there, waits for what is not, and claims of what no process makes yet.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    time::{Duration, Instant},
};

use crate::broker::server::{
    ConnectionId,
    io::connection::{Connection, Outgoing, Request},
    io::reactor::Reactor,
    io::worker::Step,
    state::caller::Caller,
    state::objects::{Answer, LeaseParts, Question, Selected, Selection, random},
};
use crate::{
    broker::name::{check_component, check_name},
    channel::deadline_after,
    error::{BrokerError, RefusalCode},
    wire::{
        MAX_FDS, Segments,
        broker::{Claim, Claimed, Get, Message, Token},
    },
};

/// A get that is not answered yet.
#[derive(Debug)]
pub(crate) struct Waiting {
    get: Get,
    /// What was found in the objects' tables, by their places in the get.
    answers: HashMap<usize, Answer>,
    /// When the wait ends, once it has begun.
    deadline: Option<Instant>,
}

/// How many claims one connection holds, and all connections of one user.
const MOST_CLAIMS: usize = 256;
const MOST_CLAIMS_OF_USER: usize = 4096;

/// Who makes an object that is not there: claims of all of it, or of its parts.
#[derive(Debug, Default)]
pub(crate) struct Claims {
    names: HashMap<String, Vec<Holder>>,
    /// The names that each connection has claims on, by the tokens of these.
    held: HashMap<ConnectionId, HashMap<Token, String>>,
    /// How many claims each user holds.
    users: HashMap<u32, usize>,
}

#[derive(Debug)]
struct Holder {
    connection: ConnectionId,
    uid: u32,
    token: Token,
    claim: Claim,
}

impl Claims {
    /// Grants a claim if it does not collide with those that are held.
    ///
    /// # Errors
    /// If the caller holds as many as it may.
    fn grant(&mut self, name: &str, caller: &Caller, claim: &Claim) -> Result<Option<Token>, BrokerError> {
        // Parts of one version: of the same group, and not the same part.
        let goes_with = |holder: &Holder| {
            let parts = (&holder.claim.part, &claim.part);
            holder.claim.group.is_some()
                && holder.claim.group == claim.group
                && matches!(parts, (Some(held), Some(wanted)) if held != wanted)
        };
        if !self.names.get(name).is_none_or(|holders| holders.iter().all(goes_with)) {
            return Ok(None);
        }
        let Caller { connection, uid, .. } = *caller;
        let of_connection = self.held.get(&connection).map_or(0, HashMap::len);
        let of_user = self.users.get(&uid).copied().unwrap_or(0);
        if of_connection >= MOST_CLAIMS || of_user >= MOST_CLAIMS_OF_USER {
            let message = format!(
                "this connection holds {of_connection} claims of at most {MOST_CLAIMS} claims, and uid {uid} holds {of_user} of at \
                 most {MOST_CLAIMS_OF_USER} claims: put or release what was claimed before"
            );
            return Err(BrokerError::new(RefusalCode::Quota, message));
        }
        let token = Token(random());
        let holder = Holder { connection, uid, token, claim: claim.clone() };
        self.names.entry(name.to_owned()).or_default().push(holder);
        self.held.entry(connection).or_default().insert(token, name.to_owned());
        *self.users.entry(uid).or_default() += 1;
        Ok(Some(token))
    }

    /// Ends a claim. Returns the name that it was on.
    fn end(&mut self, connection: ConnectionId, token: Token) -> Option<String> {
        let name = self.held.get(&connection)?.get(&token)?.clone();
        let holders = self.names.get_mut(&name)?;
        let at = holders.iter().position(|holder| holder.token == token)?;
        let holder = holders.remove(at);
        if holders.is_empty() {
            self.names.remove(&name);
        }
        self.forget(&holder);
        Some(name)
    }

    /// Ends all claims on a name: it is there.
    fn end_all(&mut self, name: &str) {
        for holder in self.names.remove(name).unwrap_or_default() {
            self.forget(&holder);
        }
    }

    /// Ends all claims of a connection. Returns the names that they were on.
    fn end_of(&mut self, connection: ConnectionId) -> HashSet<String> {
        let tokens: Vec<Token> = self.held.get(&connection).map_or_else(Vec::new, |of| of.keys().copied().collect());
        tokens.into_iter().filter_map(|token| self.end(connection, token)).collect()
    }

    /// Counts a claim no more.
    fn forget(&mut self, holder: &Holder) {
        if let Some(held) = self.held.get_mut(&holder.connection) {
            held.remove(&holder.token);
            if held.is_empty() {
                self.held.remove(&holder.connection);
            }
        }
        if let Some(count) = self.users.get_mut(&holder.uid) {
            *count -= 1;
            if *count == 0 {
                self.users.remove(&holder.uid);
            }
        }
    }
}

/// What a get comes to at this moment.
enum Outcome {
    /// All of it is there.
    Ready(Vec<Selection>),
    /// Some tables must be looked into.
    Ask(VecDeque<(usize, Question)>),
    /// This object is not there.
    Absent(String),
}

/// Looks into one table for a get, and then into the next one when it is the user's turn again.
fn look(id: ConnectionId, mut waiting: Waiting, mut questions: VecDeque<(usize, Question)>, first: bool) -> Step {
    if let Some((at, question)) = questions.front_mut() {
        match question.step() {
            Ok(None) => {}
            Ok(Some(answer)) => {
                waiting.answers.insert(*at, answer);
                questions.pop_front();
            }
            Err(refusal) => {
                return Step::Done(Box::new(move |reactor: &mut Reactor| {
                    reactor.set_request(id, Request::None);
                    reactor.stop_waiting(id, &waiting.get);
                    reactor.refuse(id, refusal);
                    reactor.listen_again(id);
                }));
            }
        }
        if !questions.is_empty() {
            return Step::More(Box::new(move || look(id, waiting, questions, first)));
        }
    }
    Step::Done(Box::new(move |reactor: &mut Reactor| {
        reactor.set_request(id, Request::None);
        reactor.try_get(id, waiting, first);
        reactor.listen_again(id);
    }))
}

impl Reactor {
    /// A get has come.
    pub(crate) fn get(&mut self, id: ConnectionId, get: Get) {
        if let Err(refusal) = check(&get) {
            return self.refuse(id, refusal);
        }
        self.try_get(id, Waiting { get, answers: HashMap::new(), deadline: None }, true);
    }

    /// Answers a get, or waits. `first` if it has not waited yet.
    fn try_get(&mut self, id: ConnectionId, waiting: Waiting, first: bool) {
        match self.outcome(id, &waiting) {
            Err(refusal) => {
                self.stop_waiting(id, &waiting.get);
                self.refuse(id, refusal);
            }
            Ok(Outcome::Ready(selections)) => {
                self.stop_waiting(id, &waiting.get);
                self.hand_out(id, selections);
            }
            Ok(Outcome::Ask(questions)) => self.ask(id, waiting, questions, first),
            Ok(Outcome::Absent(name)) => self.absent(id, waiting, &name, first),
        }
    }

    fn outcome(&self, id: ConnectionId, waiting: &Waiting) -> Result<Outcome, BrokerError> {
        let Some(connection) = self.connections.get(&id) else { return Ok(Outcome::Ready(Vec::new())) };
        let (mut ready, mut questions) = (Vec::new(), VecDeque::new());
        for (at, object) in waiting.get.objects.iter().enumerate() {
            match self.objects.select(&connection.caller, connection, object, waiting.answers.get(&at))? {
                Selected::Ready(selection) => ready.push(selection),
                Selected::Ask(question) => questions.push_back((at, question)),
                Selected::Absent => return Ok(Outcome::Absent(object.name.clone())),
            }
        }
        Ok(if questions.is_empty() { Outcome::Ready(ready) } else { Outcome::Ask(questions) })
    }

    /// Looks into tables, here if they are small.
    fn ask(&mut self, id: ConnectionId, waiting: Waiting, questions: VecDeque<(usize, Question)>, first: bool) {
        let Some(uid) = self.connections.get(&id).map(|connection| connection.caller.uid) else { return };
        let small = questions.iter().all(|(_, question)| question.is_small());
        self.set_request(id, Request::Worker);
        self.work(uid, small, Box::new(move || look(id, waiting, questions, first)));
    }

    /// An object is not there: grants the claim, waits, or refuses.
    fn absent(&mut self, id: ConnectionId, mut waiting: Waiting, name: &str, first: bool) {
        if let (Some(claim), Some(connection)) = (&waiting.get.claim, self.connections.get(&id)) {
            let granted = self.objects.check_claim(&connection.caller, connection, name);
            match granted.and_then(|()| self.claims.grant(name, &connection.caller, claim)) {
                Ok(None) => {}
                Ok(Some(token)) => {
                    self.stop_waiting(id, &waiting.get);
                    return self.reply(id, &Message::Claimed(Claimed { token }));
                }
                Err(refusal) => {
                    self.stop_waiting(id, &waiting.get);
                    return self.refuse(id, refusal);
                }
            }
        }
        let Some(wait) = waiting.get.wait_ms else {
            return self.refuse(id, BrokerError::new(RefusalCode::Absent, self.why_absent(&waiting, name)));
        };
        if first {
            for object in &waiting.get.objects {
                self.waiting.entry(object.name.clone()).or_default().insert(id);
            }
        }
        // It may have passed while tables were looked into.
        let deadline = *waiting.deadline.get_or_insert_with(|| deadline_after(Duration::from_millis(wait)));
        self.set_request(id, Request::Object(Box::new(waiting)));
        self.set_deadline(id, deadline);
    }

    fn why_absent(&self, waiting: &Waiting, name: &str) -> String {
        let object = waiting.get.objects.iter().find(|object| object.name == name);
        match object.map(|object| (object.version, object.newer_than)) {
            Some((Some(version), _)) => format!("there is no version {version} of `{name}`"),
            Some((None, Some(older))) => format!("there is no version of `{name}` after {older}"),
            _ => format!("there is no object `{name}`"),
        }
    }

    /// The wait of a get is over.
    pub(crate) fn object_late(&mut self, id: ConnectionId, waiting: &Waiting, code: RefusalCode) {
        self.stop_waiting(id, &waiting.get);
        let missing = waiting
            .get
            .objects
            .iter()
            .find(|object| self.objects.find(&object.name, object.version, object.newer_than).is_none());
        let name = missing.or(waiting.get.objects.first()).map_or("", |object| object.name.as_str());
        let why = self.why_absent(waiting, name);
        let waited = waiting.get.wait_ms.unwrap_or(0);
        let message = match code {
            RefusalCode::Timeout => format!("{why}, and none came within {waited} ms"),
            _ => format!("{why}, and the wait for it was ended"),
        };
        self.refuse(id, BrokerError::new(code, message));
    }

    /// Forgets that a connection waits.
    pub(crate) fn stop_waiting(&mut self, id: ConnectionId, get: &Get) {
        for object in &get.objects {
            if let Some(ids) = self.waiting.get_mut(&object.name) {
                ids.remove(&id);
                if ids.is_empty() {
                    self.waiting.remove(&object.name);
                }
            }
        }
    }

    pub(crate) fn stop_waiting_of(&mut self, id: ConnectionId, waiting: &Waiting) {
        self.stop_waiting(id, &waiting.get);
    }

    /// A version was published: answers those that waited for it.
    pub(crate) fn published(&mut self, name: &str) {
        self.claims.end_all(name);
        self.wake(name);
    }

    /// Looks again at the gets that wait for a name.
    fn wake(&mut self, name: &str) {
        let ids: HashSet<ConnectionId> = self.waiting.get(name).cloned().unwrap_or_default();
        let mut ids: Vec<ConnectionId> = ids.into_iter().collect();
        // In the order in which they connected.
        ids.sort_unstable();
        for id in ids {
            // One for which tables are being looked into goes on when that is done.
            let idle = |connection: &&mut Connection| matches!(connection.request, Request::Object(_));
            let Some(connection) = self.connections.get_mut(&id).filter(idle) else { continue };
            let Request::Object(waiting) = std::mem::take(&mut connection.request) else { continue };
            self.try_get(id, *waiting, false);
            self.listen_again(id);
        }
    }

    /// A connection ends a claim. Whether there was one.
    pub(crate) fn end_claim(&mut self, id: ConnectionId, token: Token) {
        if let Some(name) = self.claims.end(id, token) {
            self.wake(&name);
        }
    }

    /// A connection has ended: its claims pass on.
    pub(crate) fn end_claims(&mut self, id: ConnectionId) {
        for name in self.claims.end_of(id) {
            self.wake(&name);
        }
    }

    /// Gives leases of all selections, or of none, and sends them.
    fn hand_out(&mut self, id: ConnectionId, selections: Vec<Selection>) {
        let Some(connection) = self.connections.get(&id) else { return };
        let caller = connection.caller.clone();
        let mut tokens = Vec::with_capacity(selections.len());
        let mut records = Vec::with_capacity(selections.len());
        let mut refusal = None;
        for selection in &selections {
            match self.objects.lease(&caller, selection.key, selection.bytes) {
                Ok(token) => {
                    tokens.push(token);
                    match self.lease_records(token, selection) {
                        Ok(some) => records.extend(some),
                        Err(error) => refusal = Some(error),
                    }
                }
                Err(error) => refusal = Some(error),
            }
            if refusal.is_some() {
                break;
            }
        }
        if let Some(refusal) = refusal {
            for token in tokens {
                self.objects.end_lease(token);
            }
            return self.refuse(id, refusal);
        }
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.leases.extend(&tokens);
            connection.sending = tokens;
            connection.deadline = None;
            connection.request = Request::None;
            connection.answer(records);
            self.count_request(id, "ok");
            self.pushed(id);
        }
    }

    /// The records that a lease is sent in.
    fn lease_records(&self, token: Token, selection: &Selection) -> Result<Vec<Outgoing>, BrokerError> {
        let gone = || BrokerError::new(RefusalCode::Absent, "the version is gone");
        let LeaseParts { mut header, tables, segments } =
            self.objects.describe_lease(token, selection).ok_or_else(gone)?;
        let (first, rest) = segments.split_at(segments.len().min(MAX_FDS - tables.len()));
        header.sizes = first.iter().map(|(_, size)| *size).collect();
        let fds = tables.into_iter().chain(first.iter().map(|(id, _)| *id)).collect();
        let long = |error: crate::error::Error| {
            let message =
                format!("what was asked for does not fit one record ({error}): ask for fewer parts or arrays at once");
            BrokerError::new(RefusalCode::Invalid, message)
        };
        let mut records = vec![Outgoing::of(&Message::Lease(Box::new(header)), fds).map_err(long)?];
        let mut at = first.len();
        for some in rest.chunks(MAX_FDS) {
            let sizes = some.iter().map(|(_, size)| *size).collect();
            let message = Message::Segments(Segments { first: at as u64, sizes });
            records.push(Outgoing::of(&message, some.iter().map(|(id, _)| *id).collect()).map_err(long)?);
            at += some.len();
        }
        Ok(records)
    }
}

/// Checks what a get says.
fn check(get: &Get) -> Result<(), BrokerError> {
    let invalid = |message: &str| Err(BrokerError::new(RefusalCode::Invalid, message));
    if get.objects.is_empty() {
        return invalid("a get names no object");
    }
    for object in &get.objects {
        check_name(&object.name)?;
        if object.range.is_some() && object.arrays.is_some() {
            return invalid("a get asks for a range or for arrays, not for both");
        }
        if object.parts.as_ref().is_some_and(Vec::is_empty) || object.arrays.as_ref().is_some_and(Vec::is_empty) {
            return invalid("a get asks for no part, or for no array, of an object");
        }
    }
    if let Some(Claim { part, group }) = &get.claim {
        if get.objects.len() > 1 {
            return invalid("a claim is on one object");
        }
        if part.is_some() != group.is_some() {
            return invalid("a claim of a part names the group of its version, and a claim of all has none");
        }
        part.iter().try_for_each(|part| check_component("part", part))?;
        group.iter().try_for_each(|group| check_component("group", group))?;
    }
    Ok(())
}
