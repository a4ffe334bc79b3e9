//! What is said to a broker, and what it says.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use vmmfd::{
    error::{Error, ErrorCode, ProtocolError},
    wire::{
        Failure, Hello, MAX_FDS, Memory, Received, Segments,
        broker::{
            BROKER, Get, GetObject, LeaseHeader, Lifetime, List, Message, NO_BACKEND, Objects, Published, Put, PutPart,
            RefusalCode, Stat, VersionInfo, Who,
        },
    },
};

use super::super::{
    Fault, Scene,
    memory::Lending,
    peer::{Heard, Peer, Speech},
};

impl Speech for Message {
    fn read(record: &[u8], fds: usize) -> Result<Self, ProtocolError> {
        Self::decode(record, fds)
    }

    fn kind(&self) -> &'static str {
        self.name()
    }

    fn is_busy(&self) -> bool {
        matches!(self, Self::Busy(_))
    }

    fn as_error(&self) -> Option<&Failure> {
        if let Self::Error(failure) = self { Some(failure) } else { None }
    }

    fn as_answer(&self) -> Option<String> {
        if let Self::Refused(refusal) = self { Some(format!("was refused: `{}`", refusal.code)) } else { None }
    }
}

/// The name of the one part that most objects here have.
pub(super) const PART: &str = "all";

/// A connection with a broker.
pub(super) struct Broker<'a> {
    pub(super) peer: &'a mut Peer,
}

/// A lease, with the segments that came with it.
pub(super) struct Leased {
    pub(super) header: LeaseHeader,
    pub(super) tables: Vec<OwnedFd>,
    pub(super) segments: Vec<(OwnedFd, u64)>,
}

impl<'a> Broker<'a> {
    /// Says hello, and hears it.
    pub(super) fn greet(peer: &'a mut Peer) -> Result<(Self, Hello), Fault> {
        let mut broker = Self { peer };
        broker.send(&Message::Hello(broker.own_hello()), &[])?;
        let heard = broker.hear()?;
        match broker.must(heard, "B2", "hello")? {
            (Message::Hello(Hello { version: 0, .. }), _) => Fault::broken("H1", "said hello with version 0"),
            (Message::Hello(hello), _) if !hello.capabilities.iter().any(|named| named == BROKER) => {
                Err(Fault::Absent("its hello lacks the capability `broker`: it is no broker".to_owned()))
            }
            (Message::Hello(hello), _) if hello.backend != NO_BACKEND => {
                Fault::broken("B2", format!("said hello with the backend `{}` where `none` belongs", hello.backend))
            }
            (Message::Hello(hello), _) => Ok((broker, hello)),
            (other, _) => Fault::broken("B2", format!("answered hello with {}", other.name())),
        }
    }

    pub(super) fn own_hello(&self) -> Hello {
        Hello { backend: NO_BACKEND.to_owned(), ..self.peer.own_hello(&[BROKER]) }
    }

    pub(super) fn send(&self, message: &Message, fds: &[BorrowedFd<'_>]) -> Result<(), Fault> {
        let mut record = Vec::new();
        message.encode_into(&mut record).map_err(|error| Fault::Failed(error.into()))?;
        self.peer.send_record(&record, fds)
    }

    /// What comes next that is not `busy`.
    pub(super) fn hear(&mut self) -> Result<Heard<Message>, Fault> {
        self.peer.hear()
    }

    /// What was heard, if it is a message and no `error`.
    fn must(&self, heard: Heard<Message>, rule: &'static str, what: &str) -> Result<(Message, Vec<OwnedFd>), Fault> {
        match heard {
            Heard::Message(message, fds) => match *message {
                Message::Error(Failure { code: ErrorCode::Full | ErrorCode::Refused, message }) => {
                    Err(Fault::Absent(format!("the broker serves no more connections: {message}")))
                }
                Message::Error(Failure { code, message }) => {
                    Fault::broken(rule, format!("ended with `{code}` where {what} belongs: {message}"))
                }
                message => Ok((message, fds)),
            },
            Heard::End => Fault::broken(rule, format!("hung up without an error where {what} belongs")),
            Heard::Silence => {
                Fault::broken(rule, format!("sent neither {what} nor `busy` for {:?}", self.peer.timeout()))
            }
        }
    }

    /// The answer to a request, which is not refused.
    pub(super) fn answer(&mut self, rule: &'static str, what: &str) -> Result<(Message, Vec<OwnedFd>), Fault> {
        let heard = self.hear()?;
        match self.must(heard, rule, what)? {
            (Message::Refused(refusal), _) => {
                let (code, message) = (refusal.code, refusal.message);
                if matches!(code, RefusalCode::Quota | RefusalCode::Full) {
                    return Err(Fault::Absent(format!("the broker has no room for this case: {message}")));
                }
                Fault::broken(rule, format!("refused with `{code}` where {what} belongs: {message}"))
            }
            other => Ok(other),
        }
    }

    /// The request must be refused with this code, and the connection must go on.
    pub(super) fn refused(&mut self, rule: &'static str, want: RefusalCode, what: &str) -> Result<(), Fault> {
        let heard = self.hear()?;
        match self.must(heard, rule, &format!("a refusal of {what}"))? {
            (Message::Refused(refusal), _) if refusal.code == want => {}
            (Message::Refused(refusal), _) => {
                let (code, message) = (refusal.code, refusal.message);
                return Fault::broken(
                    rule,
                    format!("{what}: expected the refusal `{want}`, and got `{code}`: {message}"),
                );
            }
            (other, _) => {
                return Fault::broken(rule, format!("{what}: expected the refusal `{want}`, and got {}", other.name()));
            }
        }
        self.goes_on(rule, what)
    }

    /// The connection must still be good for a request.
    pub(super) fn goes_on(&mut self, rule: &'static str, after: &str) -> Result<(), Fault> {
        match self.list("conform-has-no-such-name/") {
            Ok(_) => Ok(()),
            Err(Fault::Broken { found, .. }) => Fault::broken(rule, format!("after {after}, a list failed: {found}")),
            Err(other) => Err(other),
        }
    }

    /// As [`Peer::ends_with`].
    pub(super) fn ends_with(&mut self, rule: &'static str, want: ErrorCode, what: &str) -> Result<(), Fault> {
        self.peer.ends_with_in::<Message>(rule, &[want], what)
    }

    /// As [`Peer::leaves`].
    pub(super) fn leaves(&mut self, rule: &'static str, when: &str) -> Result<(), Fault> {
        self.peer.leaves_in::<Message>(rule, when)
    }

    pub(super) fn list(&mut self, prefix: &str) -> Result<Objects, Fault> {
        self.send(&Message::List(List { prefix: prefix.to_owned(), after: None }), &[])?;
        match self.answer("B9", "objects")? {
            (Message::Objects(objects), _) => Ok(objects),
            (other, _) => Fault::broken("B9", format!("answered list with {}", other.name())),
        }
    }

    pub(super) fn stat(&mut self, name: &str) -> Result<(VersionInfo, Vec<OwnedFd>), Fault> {
        self.send(&Message::Stat(Stat { name: name.to_owned(), version: None }), &[])?;
        match self.answer("B9", "version")? {
            (Message::Version(info), fds) => Ok((*info, fds)),
            (other, _) => Fault::broken("B9", format!("answered stat with {}", other.name())),
        }
    }

    pub(super) fn who(&mut self, prefix: &str) -> Result<vmmfd::wire::broker::Leases, Fault> {
        self.send(&Message::Who(Who { prefix: prefix.to_owned(), after: None }), &[])?;
        match self.answer("B9", "leases")? {
            (Message::Leases(leases), _) => Ok(leases),
            (other, _) => Fault::broken("B9", format!("answered who with {}", other.name())),
        }
    }

    /// Whether a name can't be found, by `stat`.
    pub(super) fn absent(&mut self, rule: &'static str, name: &str, when: &str) -> Result<(), Fault> {
        self.send(&Message::Stat(Stat { name: name.to_owned(), version: None }), &[])?;
        self.refused(rule, RefusalCode::Absent, &format!("a stat of `{name}` {when}"))
    }

    /// Sends a put, with all its segments.
    pub(super) fn hand_over(
        &mut self,
        put: &Put,
        tables: &[BorrowedFd<'_>],
        all: &[BorrowedFd<'_>],
    ) -> Result<(), Fault> {
        let sizes = put.sizes.clone();
        let first = all.len().min(MAX_FDS - tables.len());
        let put = Put { sizes: sizes[..first].to_vec(), ..put.clone() };
        let fds: Vec<BorrowedFd<'_>> = tables.iter().chain(&all[..first]).copied().collect();
        self.send(&Message::Put(Box::new(put)), &fds)?;
        if first == all.len() {
            return Ok(());
        }
        match self.answer("P2", "send")? {
            (Message::Send(_), _) => {}
            (other, _) => return Fault::broken("P2", format!("answered a put of more segments with {}", other.name())),
        }
        let mut at = first;
        for some in all[first..].chunks(MAX_FDS) {
            let sizes = sizes[at..at + some.len()].to_vec();
            self.send(&Message::Segments(Segments { first: at as u64, sizes }), some)?;
            at += some.len();
        }
        Ok(())
    }

    /// A put that must succeed.
    pub(super) fn put(&mut self, put: &Put, fds: &[BorrowedFd<'_>]) -> Result<Published, Fault> {
        self.hand_over(put, &[], fds)?;
        self.published()
    }

    pub(super) fn published(&mut self) -> Result<Published, Fault> {
        match self.answer("P4", "published")? {
            (Message::Published(published), _) => {
                let id = published.id.as_bytes();
                let hyphens = id.iter().enumerate().all(|(at, byte)| match [8, 13, 18, 23].contains(&at) {
                    true => *byte == b'-',
                    false => matches!(byte, b'0'..=b'9' | b'a'..=b'f'),
                });
                match published.version > 0 && id.len() == 36 && hyphens {
                    true => Ok(published),
                    false => {
                        Fault::broken("N2", format!("published version {} as `{}`", published.version, published.id))
                    }
                }
            }
            (other, _) => Fault::broken("P4", format!("answered a put with {}", other.name())),
        }
    }

    /// Gets objects that must be there.
    pub(super) fn get(&mut self, objects: Vec<GetObject>) -> Result<Vec<Leased>, Fault> {
        let count = objects.len();
        self.send(&Message::Get(Box::new(Get { objects, wait_ms: None, claim: None })), &[])?;
        (1..=count).map(|at| self.leased(at < count)).collect()
    }

    /// Gets one object that must be there.
    pub(super) fn get_one(&mut self, object: GetObject) -> Result<Leased, Fault> {
        self.get(vec![object])?.pop().ok_or_else(|| Fault::Absent("no lease".to_owned()))
    }

    /// Asks for an object, without the answer.
    pub(super) fn ask(&self, object: GetObject, wait_ms: Option<u64>) -> Result<(), Fault> {
        self.send(&Message::Get(Box::new(Get { objects: vec![object], wait_ms, claim: None })), &[])
    }

    /// A lease that comes, with all its segments. `more` if another follows it.
    pub(super) fn leased(&mut self, more: bool) -> Result<Leased, Fault> {
        let (header, mut tables) = match self.answer("G1", "lease")? {
            (Message::Lease(header), fds) => (*header, fds),
            (other, _) => return Fault::broken("G1", format!("answered a get with {}", other.name())),
        };
        let want: u64 = header.parts.iter().flat_map(|part| &part.runs).map(|run| run.segments).sum();
        let fds = tables.split_off(tables.len() - header.sizes.len());
        let mut segments: Vec<(OwnedFd, u64)> = fds.into_iter().zip(header.sizes.iter().copied()).collect();
        while (segments.len() as u64) < want {
            self.send(&Message::Received(Received { segments: segments.len() as u64 }), &[])?;
            match self.answer("G5", "segments")? {
                (Message::Segments(some), fds) if some.first == segments.len() as u64 => {
                    segments.extend(fds.into_iter().zip(some.sizes));
                }
                (Message::Segments(some), _) => {
                    let belongs = segments.len();
                    return Fault::broken("G5", format!("sent segment {} where {belongs} belongs", some.first));
                }
                (other, _) => return Fault::broken("G5", format!("sent {} where segments belong", other.name())),
            }
        }
        if segments.len() as u64 != want {
            return Fault::broken("G5", format!("sent {} segments with a lease of {want}", segments.len()));
        }
        if more {
            self.send(&Message::Received(Received { segments: want }), &[])?;
        }
        Ok(Leased { header, tables, segments })
    }

    /// Ends a lease.
    pub(super) fn release(&self, leased: &Leased) -> Result<(), Fault> {
        self.send(&Message::Release(vmmfd::wire::broker::Release { token: leased.header.token }), &[])
    }
}

/// An object by its name.
pub(super) fn named(name: &str) -> GetObject {
    GetObject { name: name.to_owned(), ..GetObject::default() }
}

/// Sound memory of so many segments with a pattern in it.
pub(super) fn memory(scene: &Scene<'_>, segments: u64) -> Result<Lending, Fault> {
    Lending::filled(scene, segments, false).map_err(Fault::Failed)
}

/// The descriptors of memory.
pub(super) fn descriptors(lending: &Lending) -> Vec<BorrowedFd<'_>> {
    lending.segments.iter().map(|(fd, _)| fd.as_fd()).collect()
}

/// A put of memory under a new name, which goes with the connection.
pub(super) fn put_of(name: &str, lending: &Lending) -> Put {
    let sizes = lending.segments.iter().map(|(_, size)| *size).collect();
    put_described(name, lending.offer.memory.clone(), sizes)
}

/// As [`put_of`], of memory that is described.
pub(super) fn put_described(name: &str, memory: Memory, sizes: Vec<u64>) -> Put {
    Put {
        name: name.to_owned(),
        replace: false,
        if_version: None,
        announced: Vec::new(),
        group: None,
        wait_ms: None,
        backend: "host".to_owned(),
        parts: vec![PutPart { name: PART.to_owned(), memory, arrays: None, digest: None }],
        metadata: None,
        mode: None,
        lifetime: Some(Lifetime::Maker),
        keep: None,
        request: None,
        restore: None,
        sizes,
    }
}

/// Another connection, greeted.
pub(super) fn another(scene: &Scene<'_>) -> Result<Peer, Fault> {
    (scene.connect)().map_err(Fault::from)
}

/// A name that no other run has.
pub(super) fn fresh(case: &str) -> Result<String, Fault> {
    let mut random = [0; 8];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())
        .map_err(|errno| Fault::Failed(Error::system("get random bytes", errno)))?;
    Ok(format!("conform-{}/{case}", hex::encode(random)))
}
