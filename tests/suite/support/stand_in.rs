//! A fake broker with scripted answers.

use std::{
    io,
    os::unix::net::UnixStream,
    path::Path,
    thread::{self, JoinHandle},
};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use vmmfd::wire::broker::{Message, Refusal, RefusalCode, Resumed};

use crate::broker_process::Raw;

/// The UUID of the fake broker's instance.
pub(crate) const INSTANCE: &str = "0b7e4d9a-6a3f-4f0e-9d5e-0a1b2c3d4e5f";

/// Listens at a path and answers one connection after another.
pub(crate) struct StandIn(JoinHandle<()>);

impl StandIn {
    /// Listens, and calls the next closure for each connection after the hellos.
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
                // A client asks for the broker's identity first.
                assert!(matches!(raw.receive().unwrap(), Some((Message::Resume(_), _))));
                let resumed = Resumed { instance: INSTANCE.to_owned(), lost: Vec::new() };
                raw.send(&Message::Resumed(resumed), &[]).unwrap();
                answer(raw);
            }
            std::fs::remove_file(path).unwrap();
        }))
    }

    /// Waits until all connections are answered. Fails if an answer failed.
    pub(crate) fn end(self) {
        self.0.join().unwrap();
    }
}

/// Receives the next request.
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

pub(crate) fn stopped() -> Message {
    Message::Refused(Refusal { code: RefusalCode::Stopped, message: "the client ended the wait".to_owned() })
}
