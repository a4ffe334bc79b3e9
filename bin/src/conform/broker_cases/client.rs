//! The steps of this side as a client of a broker.

use std::os::fd::{BorrowedFd, OwnedFd};

use vmmfd::{
    error::{Error, ErrorCode},
    wire::{
        Hello, MAX_FDS, Memory, Received, Segments,
        broker::{
            BROKER, Delete, Get, GetObject, LeaseHeader, Leases, Lifetime, List, Message, NO_BACKEND, Objects,
            Published, Put, PutPart, RefusalCode, Release, Stat, VersionInfo, Who,
        },
    },
};

use super::super::{
    CaseEnd, CaseResult, Context,
    case_end::{check, violation},
    memory::TestMemory,
    peer::{Incoming, Peer, receive},
};

/// The part name of single-part objects.
pub(super) const PART: &str = "all";

/// A connection to a broker.
pub(super) struct Broker<'a> {
    pub(super) peer: &'a mut Peer,
}

/// A lease with its descriptors.
pub(super) struct Leased {
    pub(super) header: LeaseHeader,
    pub(super) tables: Vec<OwnedFd>,
    pub(super) segments: Vec<(OwnedFd, u64)>,
}

impl<'a> Broker<'a> {
    /// Exchanges `hello`.
    pub(super) fn greet(peer: &'a mut Peer) -> CaseResult<Self> {
        Self::greet_with_hello(peer).map(|(broker, _)| broker)
    }

    /// As [`Broker::greet`]; returns the broker's `hello` too.
    pub(super) fn greet_with_hello(peer: &'a mut Peer) -> CaseResult<(Self, Hello)> {
        let mut broker = Self { peer };
        broker.send(&Message::Hello(broker.own_hello()))?;
        let incoming = broker.receive()?;
        let hello = match broker.peer.require(incoming, "B2", "hello")? {
            (Message::Hello(hello), _) => hello,
            (other, _) => return violation("B2", format!("sent {} instead of hello", other.name())),
        };
        check(hello.version > 0, "H1", || "sent version 0 in hello".to_owned())?;
        if !hello.capabilities.iter().any(|name| name == BROKER) {
            return Err(CaseEnd::NoPeer("the peer is no broker: its hello lacks the capability `broker`".to_owned()));
        }
        check(hello.backend == NO_BACKEND, "B2", || {
            format!("sent the backend `{}` in hello instead of `none`", hello.backend)
        })?;
        Ok((broker, hello))
    }

    pub(super) fn own_hello(&self) -> Hello {
        Hello { backend: NO_BACKEND.to_owned(), ..self.peer.own_hello(&[BROKER]) }
    }

    pub(super) fn send(&self, message: &Message) -> CaseResult {
        self.peer.send(message)
    }

    pub(super) fn send_with(&self, message: &Message, fds: &[BorrowedFd<'_>]) -> CaseResult {
        self.peer.send_with(message, fds)
    }

    pub(super) fn receive(&mut self) -> CaseResult<Incoming<Message>> {
        self.peer.receive()
    }

    /// The next message other than `busy`. `expected` names it. A refusal, `error`, close or silence violates the rule.
    pub(super) fn next_message(&mut self, rule: &'static str, expected: &str) -> CaseResult<(Message, Vec<OwnedFd>)> {
        let incoming = self.receive()?;
        match self.peer.require(incoming, rule, expected)? {
            (Message::Refused(refusal), _) if matches!(refusal.code, RefusalCode::Quota | RefusalCode::Full) => {
                Err(CaseEnd::NoPeer(format!("the broker has no room for this case: {}", refusal.message)))
            }
            (Message::Refused(refusal), _) => {
                let (code, message) = (refusal.code, refusal.message);
                violation(rule, format!("refused with `{code}` instead of {expected}: {message}"))
            }
            message => Ok(message),
        }
    }

    /// The broker must refuse the request with this code, and keep the connection usable.
    pub(super) fn expect_refusal(&mut self, rule: &'static str, code: RefusalCode, request: &str) -> CaseResult {
        let incoming = self.receive()?;
        let found = match self.peer.require(incoming, rule, &format!("a refusal of {request}"))? {
            (Message::Refused(refusal), _) if refusal.code == code => return self.expect_usable(rule, request),
            (Message::Refused(refusal), _) => format!("`{}`: {}", refusal.code, refusal.message),
            (other, _) => other.name().to_owned(),
        };
        violation(rule, format!("{request}: expected the refusal `{code}`, but got {found}"))
    }

    /// Sends a message that the broker must refuse with this code.
    pub(super) fn refuse(
        &mut self,
        message: &Message,
        rule: &'static str,
        code: RefusalCode,
        request: &str,
    ) -> CaseResult {
        self.send(message)?;
        self.expect_refusal(rule, code, request)
    }

    /// Gets an object without waiting; the broker must refuse it.
    pub(super) fn refuse_get(
        &mut self,
        object: GetObject,
        rule: &'static str,
        code: RefusalCode,
        request: &str,
    ) -> CaseResult {
        self.refuse(&get(vec![object], None), rule, code, request)
    }

    /// Puts memory; the broker must refuse it.
    pub(super) fn refuse_put(
        &mut self,
        put: &Put,
        fds: &[BorrowedFd<'_>],
        rule: &'static str,
        code: RefusalCode,
        request: &str,
    ) -> CaseResult {
        self.send_put(put, &[], fds)?;
        self.expect_refusal(rule, code, request)
    }

    /// The connection must still serve requests.
    pub(super) fn expect_usable(&mut self, rule: &'static str, after: &str) -> CaseResult {
        match self.list("conform-has-no-such-name/") {
            Err(CaseEnd::Violation { found, .. }) => violation(rule, format!("a list failed after {after}: {found}")),
            listed => listed.map(drop),
        }
    }

    pub(super) fn expect_error(&mut self, rule: &'static str, code: ErrorCode, provoked_by: &str) -> CaseResult {
        self.peer.expect_error::<Message>(rule, code, provoked_by)
    }

    /// Sends a message that the broker must answer with `error`.
    pub(super) fn provoke(
        &mut self,
        message: &Message,
        rule: &'static str,
        code: ErrorCode,
        provoked_by: &str,
    ) -> CaseResult {
        self.peer.provoke(message, rule, code, provoked_by)
    }

    pub(super) fn expect_close(&mut self, rule: &'static str, when: &str) -> CaseResult {
        self.peer.expect_close::<Message>(rule, when)
    }

    /// Shuts down writing and waits for the broker to close the connection.
    pub(super) fn disconnect(&mut self) -> CaseResult {
        self.peer.shut_down_writing();
        self.expect_close("T2", "after the client shut down writing")
    }

    pub(super) fn list(&mut self, prefix: &str) -> CaseResult<Objects> {
        self.send(&Message::List(List { prefix: prefix.to_owned(), after: None }))?;
        Ok(receive!(self, "B9", "objects", (Message::Objects(objects), _) => objects))
    }

    pub(super) fn stat(&mut self, name: &str) -> CaseResult<(VersionInfo, Vec<OwnedFd>)> {
        self.send(&stat(name))?;
        Ok(receive!(self, "B9", "version", (Message::Version(info), fds) => (*info, fds)))
    }

    pub(super) fn who(&mut self, prefix: &str) -> CaseResult<Leases> {
        self.send(&Message::Who(Who { prefix: prefix.to_owned(), after: None }))?;
        Ok(receive!(self, "B9", "leases", (Message::Leases(leases), _) => leases))
    }

    pub(super) fn delete(&mut self, name: &str) -> CaseResult {
        self.send(&delete(name))?;
        receive!(self, "Q4", "done", (Message::Done(_), _) => Ok(()))
    }

    /// A `stat` of the name must report that it is absent.
    pub(super) fn expect_absent(&mut self, rule: &'static str, name: &str, when: &str) -> CaseResult {
        self.refuse(&stat(name), rule, RefusalCode::Absent, &format!("a stat of `{name}` {when}"))
    }

    /// Sends a put with its tables and all segments.
    pub(super) fn send_put(&mut self, put: &Put, tables: &[BorrowedFd<'_>], fds: &[BorrowedFd<'_>]) -> CaseResult {
        let first = fds.len().min(MAX_FDS - tables.len());
        let head = Put { sizes: put.sizes[..first].to_vec(), ..put.clone() };
        let head_fds: Vec<BorrowedFd<'_>> = tables.iter().chain(&fds[..first]).copied().collect();
        self.send_with(&Message::Put(Box::new(head)), &head_fds)?;
        if first == fds.len() {
            return Ok(());
        }
        receive!(self, "P2", "send", (Message::Send(_), _) => ());
        let mut at = first;
        for chunk in fds[first..].chunks(MAX_FDS) {
            let sizes = put.sizes[at..at + chunk.len()].to_vec();
            self.send_with(&Message::Segments(Segments { first: at as u64, sizes }), chunk)?;
            at += chunk.len();
        }
        Ok(())
    }

    /// Puts memory; the broker must accept it.
    pub(super) fn put(&mut self, put: &Put, fds: &[BorrowedFd<'_>]) -> CaseResult<Published> {
        self.send_put(put, &[], fds)?;
        self.receive_published()
    }

    pub(super) fn receive_published(&mut self) -> CaseResult<Published> {
        let published = receive!(self, "P4", "published", (Message::Published(published), _) => published);
        let id = published.id.as_bytes();
        let hyphens = id.iter().enumerate().all(|(at, byte)| match [8, 13, 18, 23].contains(&at) {
            true => *byte == b'-',
            false => matches!(byte, b'0'..=b'9' | b'a'..=b'f'),
        });
        check(published.version > 0 && id.len() == 36 && hyphens, "N2", || {
            format!("published version {} as `{}`", published.version, published.id)
        })?;
        Ok(published)
    }

    /// Gets objects; the broker must grant the leases.
    pub(super) fn get(&mut self, objects: Vec<GetObject>) -> CaseResult<Vec<Leased>> {
        let count = objects.len();
        self.send(&get(objects, None))?;
        (1..=count).map(|at| self.receive_lease(at < count)).collect()
    }

    /// As [`Broker::get`], for one object.
    pub(super) fn get_one(&mut self, object: GetObject) -> CaseResult<Leased> {
        self.send(&get(vec![object], None))?;
        self.receive_lease(false)
    }

    /// Receives a lease with all segments. `more` if another lease follows.
    pub(super) fn receive_lease(&mut self, more: bool) -> CaseResult<Leased> {
        let (header, mut tables) = receive!(self, "G1", "lease", (Message::Lease(header), fds) => (*header, fds));
        let want: u64 = header.parts.iter().flat_map(|part| &part.runs).map(|run| run.segments).sum();
        let fds = tables.split_off(tables.len() - header.sizes.len());
        let mut segments: Vec<(OwnedFd, u64)> = fds.into_iter().zip(header.sizes.iter().copied()).collect();
        while (segments.len() as u64) < want {
            let next = segments.len() as u64;
            self.send(&Message::Received(Received { segments: next }))?;
            let (more, fds) = receive!(self, "G5", "segments", (Message::Segments(more), fds) => (more, fds));
            check(more.first == next, "G5", || format!("sent segment {} instead of {next}", more.first))?;
            segments.extend(fds.into_iter().zip(more.sizes));
        }
        let sent = segments.len() as u64;
        check(sent == want, "G5", || format!("sent {sent} segments for a lease of {want}"))?;
        if more {
            self.send(&Message::Received(Received { segments: want }))?;
        }
        Ok(Leased { header, tables, segments })
    }

    pub(super) fn release(&self, leased: &Leased) -> CaseResult {
        self.send(&Message::Release(Release { token: leased.header.token }))
    }
}

pub(super) fn get(objects: Vec<GetObject>, wait_ms: Option<u64>) -> Message {
    Message::Get(Box::new(Get { objects, wait_ms, claim: None }))
}

pub(super) fn stat(name: &str) -> Message {
    Message::Stat(Stat { name: name.to_owned(), version: None })
}

pub(super) fn delete(name: &str) -> Message {
    Message::Delete(Delete { name: name.to_owned(), request: None })
}

/// The current version of an object.
pub(super) fn named(name: &str) -> GetObject {
    GetObject { name: name.to_owned(), ..GetObject::default() }
}

/// Valid memory with the pattern.
pub(super) fn memory(context: &Context<'_>, segments: u64) -> CaseResult<TestMemory> {
    Ok(TestMemory::filled(context, segments, false)?)
}

pub(super) fn descriptors(memory: &TestMemory) -> Vec<BorrowedFd<'_>> {
    memory.descriptors(0..memory.segments.len()).1
}

/// A put of memory under a new name that lives as long as the connection.
pub(super) fn put_of(name: &str, memory: &TestMemory) -> Put {
    put_described(name, memory.offer.memory.clone(), memory.descriptors(0..memory.segments.len()).0)
}

/// As [`put_of`], for a description of memory.
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

pub(super) fn random<const N: usize>() -> CaseResult<[u8; N]> {
    let mut bytes = [0; N];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .map_err(|errno| Error::system("get random bytes", errno))?;
    Ok(bytes)
}

/// A name that is unique to this run.
pub(super) fn fresh(label: &str) -> CaseResult<String> {
    Ok(format!("conform-{}/{label}", hex::encode(random::<8>()?)))
}
