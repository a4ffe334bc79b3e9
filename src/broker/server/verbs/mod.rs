//! Which message comes when, and what is done then.

pub(super) mod get;
pub(super) mod metrics;
pub(super) mod put;
pub(super) mod watch;

use std::{os::fd::OwnedFd, process};

use crate::broker::server::{ConnectionId, io::connection::Request, io::reactor::Reactor, state::objects::TakenUp};
use crate::{
    broker::name::check_name,
    error::{BrokerError, ErrorCode, RefusalCode},
    wire::{
        Hello, VERSION,
        broker::{BROKER, Done, Message, NO_BACKEND, Resume, Resumed, Token},
    },
};

impl Reactor {
    /// A message has come.
    pub(crate) fn message(&mut self, id: ConnectionId, message: Message, fds: Vec<OwnedFd>) {
        // What is answered with descriptors.
        if matches!(message, Message::Get(_) | Message::Stat(_) | Message::Received(_)) && !self.has_read(id) {
            return;
        }
        let Some(connection) = self.connections.get_mut(&id) else { return self.reject(id, fds) };
        tracing::trace!(kind = message.name(), pid = connection.caller.pid, "received");
        let (greeted, busy) = (connection.greeted, connection.is_busy());
        match message {
            Message::Error(_) => self.close(id, "the peer has ended it with an error"),
            Message::Hello(hello) if !greeted => self.hello(id, &hello),
            other if !greeted => {
                self.reject(id, fds);
                self.break_off(id, &format!("{} came where hello belongs", other.name()));
            }
            Message::Busy(_) => {}
            Message::Release(release) if connection.is_sending(release.token) => {
                self.break_off(id, "a lease was released before all of it was received");
            }
            Message::Release(release) => {
                if connection.leases.remove(&release.token) {
                    self.objects.end_lease(release.token);
                } else {
                    self.end_claim(id, release.token);
                }
            }
            Message::Report(report) => {
                if connection.leases.contains(&report.token) {
                    let caller = connection.caller.clone();
                    let is_logged = self.is_logged(caller.uid, "a report of memory that is not as claimed");
                    self.objects.report(&caller, report.token, report.message, is_logged);
                }
            }
            Message::Stop(_) => {
                if matches!(connection.request, Request::Parts(_) | Request::Object(_) | Request::Watch(_)) {
                    self.end_wait(id, RefusalCode::Stopped);
                }
            }
            Message::Received(received) => match connection.acknowledged(received.segments) {
                Ok(()) => self.pushed(id),
                Err(problem) => self.break_off(id, &problem),
            },
            Message::Segments(segments) => self.segments(id, segments, fds),
            other if busy => {
                self.reject(id, fds);
                self.break_off(id, &format!("{} came before the answer to the request before it", other.name()));
            }
            other => match self.begin_request(id, &other) {
                Ok(()) => self.request(id, other, fds),
                Err(refusal) => {
                    self.reject(id, fds);
                    self.refuse(id, refusal);
                }
            },
        }
    }

    /// A request has come.
    fn request(&mut self, id: ConnectionId, message: Message, fds: Vec<OwnedFd>) {
        let Some(connection) = self.connections.get_mut(&id) else { return self.reject(id, fds) };
        match message {
            Message::Put(put) => self.put(id, *put, fds),
            Message::Get(get) => self.get(id, *get),
            Message::List(list) => {
                let page = self.objects.list(&connection.caller, &connection.socket, &list);
                self.reply(id, &Message::Objects(page));
            }
            Message::Stat(stat) => {
                let checked = check_name(&stat.name);
                let found = checked.and_then(|()| self.objects.stat(&connection.caller, &connection.socket, &stat));
                // A descriptor of its own: the name may be deleted before the reply can be sent.
                let found = found.and_then(|(info, segment)| match segment {
                    None => Ok((info, None)),
                    Some(segment) => match self.objects.segment(segment).try_clone_to_owned() {
                        Ok(fd) => Ok((info, Some(fd))),
                        Err(error) => Err(BrokerError::new(
                            RefusalCode::Full,
                            format!("the broker has no descriptor for the metadata: {error}"),
                        )),
                    },
                });
                match found {
                    Ok((info, fd)) => self.reply_with(id, &Message::Version(Box::new(info)), fd),
                    Err(refusal) => self.refuse(id, refusal),
                }
            }
            Message::Who(who) => {
                let page = self.objects.who(&connection.caller, &connection.socket, &who);
                self.reply(id, &Message::Leases(page));
            }
            Message::Delete(delete) => {
                let caller = connection.caller.clone();
                let deleted =
                    check_name(&delete.name).and_then(|()| self.objects.delete(&caller, &delete.name, delete.request));
                match deleted {
                    Ok(()) => self.reply(id, &Message::Done(Done {})),
                    Err(refusal) => self.refuse(id, refusal),
                }
            }
            Message::Resume(resume) => self.resume(id, &resume),
            Message::Watch(watch) => self.watch_events(id, watch),
            Message::Measure(_) => self.measure(id),
            other => {
                self.reject(id, fds);
                self.break_off(id, &format!("{} came, which a broker sends", other.name()));
            }
        }
    }

    /// Gives a connection what another one had.
    fn resume(&mut self, id: ConnectionId, resume: &Resume) {
        let Some(caller) = self.connections.get(&id).map(|connection| connection.caller.clone()) else { return };
        // The segments of a lease that another connection is still being sent are that connection's.
        let sending = |token: &Token| {
            let holder = self.objects.holder(*token).and_then(|holder| self.connections.get(&holder));
            holder.is_some_and(|holder| holder.is_sending(*token))
        };
        let (sending, leases) = resume.leases.iter().copied().partition(sending);
        let (sending, puts): (Vec<Token>, _) = (sending, resume.puts.clone());
        let TakenUp { leases, names, before, mut lost } = self.objects.resume(&caller, &Resume { leases, puts });
        lost.extend(sending);
        for (other, token) in before {
            if let Some(other) = self.connections.get_mut(&other) {
                other.leases.remove(&token);
            }
        }
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.leases.extend(leases);
            connection.names.extend(names);
        }
        let instance = self.objects.journal().instance().to_owned();
        self.reply(id, &Message::Resumed(Resumed { instance, lost }));
    }

    /// The first message.
    fn hello(&mut self, id: ConnectionId, hello: &Hello) {
        if !hello.capabilities.iter().any(|named| named == BROKER) {
            let message = "this is a broker, and the hello lacks the capability `broker`";
            return self.end(id, ErrorCode::Object, message, "it asks for no broker");
        }
        if hello.version < VERSION {
            let message = format!("the hello speaks version {}, and this broker version {VERSION}", hello.version);
            return self.end(id, ErrorCode::Version, &message, "it speaks another version");
        }
        let Some(connection) = self.connections.get_mut(&id) else { return };
        connection.greeted = true;
        connection.deadline = None;
        let timeout_ms = u64::try_from(self.timeout().as_millis()).unwrap_or(u64::MAX).max(1);
        let answer = Hello {
            version: VERSION,
            capabilities: vec![BROKER.to_owned()],
            backend: NO_BACKEND.to_owned(),
            pid: process::id(),
            timeout_ms,
        };
        self.reply(id, &Message::Hello(answer));
    }
}
