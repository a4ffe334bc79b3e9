//! The entries that a keeper holds, and their handover to the next server.

use std::{
    collections::BTreeSet,
    io,
    os::fd::{BorrowedFd, OwnedFd},
    thread,
    time::{Duration, Instant},
};

use nix::{libc, poll::PollFlags};

use super::{
    HANDOVER_TIMEOUT, WINDOW,
    entries::{Entries, Entry, Sending, borrowed},
    message::{Arrival, Message, Piece, receive, send},
    peer::{ready, until},
};

/// Retry interval after the kernel's limit on descriptors in flight was reached.
const IN_FLIGHT_PAUSE: Duration = Duration::from_millis(2);

/// The held entries.
#[derive(Debug)]
pub(super) struct Held {
    entries: Entries,
    /// Keys that the server has not sent again yet.
    unsent: BTreeSet<u64>,
    /// Whether the server has sent everything.
    pub(super) is_whole: bool,
    /// The report of the last server that exited on request.
    pub(super) last_report: String,
}

impl Held {
    pub(super) fn new(entries: Entries, last_report: String) -> Self {
        Self { entries, unsent: BTreeSet::new(), is_whole: true, last_report }
    }

    /// The number of descriptors.
    pub(super) fn len(&self) -> usize {
        self.iter().map(|(_, entry)| entry.fds.len()).sum()
    }

    /// The number of entries.
    pub(super) fn entries(&self) -> usize {
        self.entries.iter().len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, &Entry)> {
        self.entries.iter()
    }

    /// Takes a record of an entry.
    ///
    /// # Errors
    /// As [`Entries::take`].
    pub(super) fn take(&mut self, piece: Piece, fds: Vec<OwnedFd>) -> io::Result<()> {
        if let Some(key) = self.entries.take(piece, fds)? {
            self.unsent.remove(&key);
        }
        Ok(())
    }

    pub(super) fn remove(&mut self, key: u64) {
        self.unsent.remove(&key);
        self.entries.remove(key);
    }

    /// Changes the last entry of a version.
    #[cfg(test)]
    pub(super) fn change_last(&mut self, change: impl FnOnce(u64, &mut Entry)) {
        if let Some((key, entry)) = self.entries.last_mut().filter(|(key, _)| *key > 0) {
            change(key, entry);
        }
    }

    /// A server starts to send everything again.
    pub(super) fn begin_resend(&mut self) {
        self.entries.forget_arriving();
        self.unsent = self.iter().map(|(key, _)| key).collect();
        self.is_whole = false;
    }

    /// The server has sent everything: drops entries that it did not send again.
    pub(super) fn complete(&mut self) {
        std::mem::take(&mut self.unsent).into_iter().for_each(|key| self.entries.remove(key));
        if !std::mem::replace(&mut self.is_whole, true) {
            tracing::info!("all {} descriptors of the server are held", self.len());
        }
    }

    /// Sends everything to a server. Blocks, for at most [`HANDOVER_TIMEOUT`] without progress.
    pub(super) fn hand_over(&mut self, socket: &OwnedFd) -> io::Result<()> {
        // The previous server may have died while it sent everything again. This server will not.
        self.unsent.clear();
        self.entries.forget_arriving();
        let mut in_flight = 0;
        for (key, entry) in self.iter() {
            let mut sending = Sending::new(key, entry.manifest.clone(), entry.fds.len());
            loop {
                let Some((message, fds)) = sending.next(WINDOW - in_flight) else {
                    in_flight -= received(socket)?.min(in_flight);
                    continue;
                };
                let fds = borrowed(entry, fds);
                send_when_possible(socket, &message, &fds)?;
                in_flight += fds.len();
                if sending.sent(&message, fds.len()) {
                    break;
                }
            }
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
