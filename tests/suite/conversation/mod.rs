//! Each side against a handwritten peer that dies, stalls, sends false data or speaks another protocol.

#![allow(unsafe_code, reason = "descriptors as numbers")]

use std::net::Shutdown;

use rustix::net::{
    AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, listen, socket_with,
    socketpair,
};
use sendfd::SendWithFd;
use vmmfd::{
    session::{
        self,
        handoff::{Findings, fetch},
    },
    wire::{Busy, ErrorCode, Failure, Hello, MAX_FDS, Offer, Received, Request, Segments},
};
use vmmfd_cli::check::{Figures, figures::Claim, pattern::Mismatch};

use crate::support::prelude::*;

mod consumers;
mod producers;
mod records;

pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

pub(crate) fn seqpacket() -> OwnedFd {
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
}

/// A plain connection to the listener at a path.
pub(crate) fn raw(path: &Path) -> UnixStream {
    let socket = seqpacket();
    connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    UnixStream::from(socket)
}

pub(crate) fn dial(path: &Path) -> Channel {
    Channel::new(raw(path).into(), PATIENCE, &Cancel::new().unwrap()).unwrap()
}

/// A listening socket at a path, with this backlog.
pub(crate) fn listening(path: &Path, backlog: i32) -> OwnedFd {
    let listener = seqpacket();
    bind(&listener, &SocketAddrUnix::new(path).unwrap()).unwrap();
    listen(&listener, backlog).unwrap();
    listener
}

/// Accepts the next connection.
pub(crate) fn accepted(listener: &OwnedFd) -> Channel {
    let socket = accept_with(listener, SocketFlags::CLOEXEC).unwrap();
    Channel::new(socket, PATIENCE, &Cancel::new().unwrap()).unwrap()
}

/// A channel, and the peer's raw socket.
fn channel_pair(timeout: Duration) -> (Channel, UnixStream) {
    let (a, b) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    (Channel::new(a, timeout, &Cancel::new().unwrap()).unwrap(), UnixStream::from(b))
}

fn send_raw(socket: &UnixStream, bytes: &[u8]) {
    rustix::net::send(socket, bytes, SendFlags::NOSIGNAL).unwrap();
}

pub(crate) fn hello(backend: Backend) -> Message {
    let capabilities = vec!["from the future".into()];
    Message::Hello(Hello { version: 1, capabilities, backend: backend.to_string(), pid: 1, timeout_ms: 20_000 })
}

pub(crate) fn request(object: &str, access: Option<Access>) -> Message {
    Message::Request(Request { object: object.into(), access, range: None })
}

/// A result message with verification figures.
fn result(verified: bool, words: u64, mismatches: u64, first_mismatch: Option<Mismatch>) -> Message {
    Message::Result(Figures { words, mismatches, first_mismatch, digest: None }.verdict(verified))
}

fn good(words: u64) -> Message {
    result(true, words, 0, None)
}

fn claim(offer: &Offer) -> Claim {
    Claim::read(offer.check.as_ref()).unwrap()
}

/// The next message other than `busy`.
pub(crate) fn answer(channel: &mut Channel) -> (Message, Vec<OwnedFd>) {
    loop {
        match channel.receive("for an answer").unwrap() {
            (Message::Busy(_), _) => {}
            answer => return answer,
        }
    }
}

pub(crate) fn told(channel: &mut Channel) -> ErrorCode {
    match answer(channel) {
        (Message::Error(failure), _) => failure.code,
        (other, _) => panic!("{other:?}"),
    }
}
