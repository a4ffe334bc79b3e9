//! A handover of everything that a keeper holds: to a server, or to the next keeper.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    thread,
    time::{Duration, Instant},
};

use nix::{libc, poll::PollFlags};

use super::{
    HANDOVER_TIMEOUT, RECEIVED_EACH, VERSION, WINDOW,
    entries::{Entries, Sending, borrowed},
    link::{Process, ready, until},
    message::{Arrival, Message, Role, receive, send},
};
use crate::channel::Cancel;

/// A keeper that never handed over.
pub(super) const NO_ANSWER: &str =
    "it died, or closed each connection without an answer: it may be of another version, with another protocol";

/// Retry interval after the kernel's limit on descriptors in flight was reached.
const IN_FLIGHT_PAUSE: Duration = Duration::from_millis(2);

/// Sends everything to a server or to the next keeper. Blocks, for at most [`HANDOVER_TIMEOUT`] without progress.
pub(super) fn hand_over(entries: &mut Entries, socket: &OwnedFd) -> io::Result<()> {
    entries.end_resend();
    let mut in_flight = 0;
    for (key, entry) in entries.iter() {
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
    send_when_possible(socket, &Message::Complete(entries.is_whole), &[])
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

/// What a keeper has handed over.
#[derive(Debug, Default)]
pub(super) struct Handover {
    pub(super) entries: Entries,
    /// The most descriptors that the keeper may hold.
    pub(super) allowed: u64,
    /// Whether the keeper closed the connection before it answered, or died before it had sent everything. Another one may continue.
    pub(super) is_cut: bool,
    /// The listening socket, for the next keeper.
    pub(super) listener: Option<OwnedFd>,
}

/// Sends a hello to a keeper and receives everything that it holds. Blocks.
///
/// # Errors
/// If the keeper refuses, does not answer or aborts the handover.
pub(super) fn receive_all(socket: &OwnedFd, keeper: &Process, role: Role, cancel: &Cancel) -> io::Result<Handover> {
    let mut handover = Handover::default();
    let mut is_welcome = false;
    let mut unacknowledged = 0;
    match send(socket, &Message::Hello { version: VERSION, role }, &[]) {
        // The keeper has exited: the next receive reports it.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
        sent => sent?,
    }
    loop {
        match receive(socket)? {
            Arrival::Message(Message::Welcome { allowed, .. }, _) => (handover.allowed, is_welcome) = (allowed, true),
            Arrival::Message(Message::Stopping(report), _) => handover.entries.last_report = report,
            Arrival::Message(Message::Listener, fds) => handover.listener = fds.into_iter().next(),
            Arrival::Message(Message::Entry(piece), fds) => {
                unacknowledged += fds.len();
                handover.entries.take(piece, fds)?;
                if unacknowledged >= RECEIVED_EACH {
                    // Fails if the keeper has exited: the next receive reports it.
                    let _ = send(socket, &Message::Received(unacknowledged as u64), &[]);
                    unacknowledged = 0;
                }
            }
            Arrival::Message(Message::Complete(is_whole), _) => {
                handover.entries.is_whole = is_whole;
                return Ok(handover);
            }
            Arrival::Message(Message::Refused(why), _) => return Err(io::Error::other(why)),
            Arrival::Message(message, _) => {
                return Err(io::Error::other(format!("it sent {message:?} during the handover")));
            }
            // A twin that takes over closes the connections of its predecessor, also those that were made to the twin in this moment. A keeper
            // that exits closes them too.
            Arrival::End if !is_welcome => return Ok(Handover { is_cut: true, ..handover }),
            // A living keeper still holds everything. This process drops its copies, and the next one takes over.
            Arrival::End if !keeper.exits_within(HANDOVER_TIMEOUT) => {
                return Err(io::Error::other(
                    "it aborted the handover because this process did not read: start this process again",
                ));
            }
            Arrival::End => return Ok(Handover { is_cut: true, ..handover }),
            Arrival::Nothing => wait(socket, cancel)?,
        }
    }
}

/// Waits for the keeper's next message.
fn wait(socket: &OwnedFd, cancel: &Cancel) -> io::Result<()> {
    let deadline = Instant::now() + HANDOVER_TIMEOUT;
    match cancel.wait(socket.as_fd(), PollFlags::POLLIN, deadline) {
        Ok(true) => Ok(()),
        Ok(false) => Err(io::Error::other(format!("it did not answer within {HANDOVER_TIMEOUT:?}"))),
        Err(error) => Err(io::Error::other(error.in_full())),
    }
}
