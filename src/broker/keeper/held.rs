//! The descriptors that a keeper holds, and their handover to the next server.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    thread,
    time::{Duration, Instant},
};

use nix::{libc, poll::PollFlags};

use super::{
    HANDOVER_TIMEOUT, WINDOW,
    message::{Arrival, MAX_TOGETHER, Message, receive, send},
    peer::{ready, until},
};

/// Retry interval after the kernel's limit on descriptors in flight was reached.
const IN_FLIGHT_PAUSE: Duration = Duration::from_millis(2);

/// The held descriptors by name.
#[derive(Debug)]
pub(super) struct Held {
    descriptors: BTreeMap<String, OwnedFd>,
    /// Names that the server has not sent again yet.
    unsent: BTreeSet<String>,
    /// Whether the server has sent everything.
    pub(super) is_whole: bool,
    /// The report of the last server that exited on request.
    pub(super) last_report: String,
}

impl Held {
    pub(super) fn new(held: Vec<(String, OwnedFd)>, last_report: String) -> Self {
        Self { descriptors: held.into_iter().collect(), unsent: BTreeSet::new(), is_whole: true, last_report }
    }

    pub(super) fn len(&self) -> usize {
        self.descriptors.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&str, BorrowedFd<'_>)> {
        self.descriptors.iter().map(|(name, fd)| (name.as_str(), fd.as_fd()))
    }

    pub(super) fn hold(&mut self, name: String, fd: OwnedFd) {
        self.unsent.remove(&name);
        self.descriptors.insert(name, fd);
    }

    pub(super) fn remove(&mut self, name: &str) {
        self.unsent.remove(name);
        self.descriptors.remove(name);
    }

    /// A server starts to send everything again.
    pub(super) fn begin_resend(&mut self) {
        self.unsent = self.descriptors.keys().cloned().collect();
        self.is_whole = false;
    }

    /// The server has sent everything: drops descriptors that it did not send again.
    pub(super) fn complete(&mut self) {
        for name in std::mem::take(&mut self.unsent) {
            self.descriptors.remove(&name);
        }
        if !std::mem::replace(&mut self.is_whole, true) {
            tracing::info!("all {} descriptors of the server are held", self.len());
        }
    }

    /// Sends everything to a server. Blocks, for at most [`HANDOVER_TIMEOUT`] without progress.
    pub(super) fn hand_over(&mut self, socket: &OwnedFd) -> io::Result<()> {
        // The previous server may have died while it sent everything again. This server will not.
        self.unsent.clear();
        let all: Vec<(&String, &OwnedFd)> = self.descriptors.iter().collect();
        let mut in_flight = 0;
        for some in all.chunks(MAX_TOGETHER) {
            while in_flight + some.len() > WINDOW {
                in_flight -= received(socket)?.min(in_flight);
            }
            let message = Message::Hold(some.iter().map(|(name, _)| (*name).clone()).collect());
            let fds: Vec<BorrowedFd<'_>> = some.iter().map(|(_, fd)| fd.as_fd()).collect();
            send_when_possible(socket, &message, &fds)?;
            in_flight += some.len();
        }
        send_when_possible(socket, &Message::Complete(self.is_whole), &[])
    }
}

/// Waits for the server's next acknowledgement. Returns the number of descriptors.
fn received(socket: &OwnedFd) -> io::Result<usize> {
    loop {
        match receive(socket)? {
            Arrival::Message(Message::Received(count), _) => return Ok(usize::try_from(count).unwrap_or(usize::MAX)),
            Arrival::Message(other, _) => {
                return Err(io::Error::other(format!("it sent {other:?} during the handover")));
            }
            Arrival::End => return Err(io::ErrorKind::UnexpectedEof.into()),
            Arrival::Nothing if ready(socket, PollFlags::POLLIN, HANDOVER_TIMEOUT) => {}
            Arrival::Nothing => return Err(io::ErrorKind::TimedOut.into()),
        }
    }
}

/// Sends a message once the socket has room.
fn send_when_possible(socket: &OwnedFd, message: &Message, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let deadline = Instant::now() + HANDOVER_TIMEOUT;
    loop {
        match send(socket, message, fds) {
            Err(error) if Instant::now() < deadline => match error.raw_os_error() {
                Some(libc::EAGAIN) => drop(ready(socket, PollFlags::POLLOUT, until(deadline))),
                Some(libc::ETOOMANYREFS | libc::ENOBUFS | libc::ENOMEM) => thread::sleep(IN_FLIGHT_PAUSE),
                _ => return Err(error),
            },
            sent => return sent,
        }
    }
}
