//! A stand-in for a broker, which answers as a test says.

use std::{
    io,
    os::unix::net::UnixStream,
    path::Path,
    thread::{self, JoinHandle},
};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use vmmfd::wire::broker::{Message, Refusal, RefusalCode};

use crate::broker_process::Raw;

/// It listens at a path and answers one connection after the other.
pub(crate) struct StandIn(JoinHandle<()>);

impl StandIn {
    /// Listens, and does each of these with a connection over which hellos were exchanged.
    pub(crate) fn start(path: &Path, connections: Vec<Box<dyn FnOnce(Raw) + Send>>) -> Self {
        let flags = SocketFlags::CLOEXEC;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        rustix::net::bind(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
        rustix::net::listen(&socket, 8).unwrap();
        let path = path.to_owned();
        Self(thread::spawn(move || {
            for answer in connections {
                let raw = Raw(UnixStream::from(rustix::net::accept(&socket).unwrap()));
                assert!(matches!(raw.receive().unwrap(), Some((Message::Hello(_), _))));
                raw.send(&Raw::hello(), &[]).unwrap();
                answer(raw);
            }
            std::fs::remove_file(path).unwrap();
        }))
    }

    /// Waits until it has answered all of its connections, and fails if an answer did.
    pub(crate) fn end(self) {
        self.0.join().unwrap();
    }
}

/// The next request.
#[track_caller]
pub(crate) fn request(raw: &Raw) -> Message {
    match raw.receive() {
        Ok(Some((message, _))) => message,
        other => panic!("no request: {other:?}"),
    }
}

pub(crate) fn answer(raw: &Raw, message: Message) -> io::Result<()> {
    raw.send(&message, &[])
}

/// The answer to a `stop`.
pub(crate) fn stopped() -> Message {
    Message::Refused(Refusal { code: RefusalCode::Stopped, message: "the client ended the wait".to_owned() })
}
