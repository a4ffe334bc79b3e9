//! Receives everything that a keeper holds: for a server, or for the next keeper.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    time::Instant,
};

use nix::poll::PollFlags;

use super::{
    HANDOVER_TIMEOUT, RECEIVED_EACH,
    entries::Entries,
    message::{Arrival, Message, receive, send},
    peer::Process,
};
use crate::channel::Cancel;

/// What a keeper has handed over.
#[derive(Debug, Default)]
pub(super) struct Handover {
    pub(super) entries: Entries,
    /// The number of received descriptors.
    pub(super) descriptors: usize,
    /// The most descriptors that the keeper may hold.
    pub(super) allowed: u64,
    /// Whether the keeper has everything of its last server.
    pub(super) is_whole: bool,
    /// Whether the keeper died before it had sent everything. Its twin may continue.
    pub(super) is_cut: bool,
    /// For the next keeper: the listening socket, and the report of the last server.
    pub(super) listener: Option<OwnedFd>,
    pub(super) report: String,
}

/// Sends `request` to a keeper and receives everything that it holds. Blocks.
///
/// # Errors
/// If the keeper refuses, does not answer or aborts the handover.
pub(super) fn receive_all(
    socket: &OwnedFd,
    keeper: &Process,
    request: &Message,
    cancel: &Cancel,
) -> io::Result<Handover> {
    let mut handover = Handover::default();
    let mut unacknowledged = 0;
    match send(socket, request, &[]) {
        // The keeper has exited: the next receive reports it.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
        sent => sent?,
    }
    loop {
        match receive(socket)? {
            Arrival::Message(Message::Welcome { allowed, .. }, _) => handover.allowed = allowed,
            Arrival::Message(Message::Stopping(report), _) => handover.report = report,
            Arrival::Message(Message::Listener, fds) => handover.listener = fds.into_iter().next(),
            Arrival::Message(Message::Entry(piece), fds) => {
                unacknowledged += fds.len();
                handover.descriptors += fds.len();
                handover.entries.take(piece, fds)?;
                if unacknowledged >= RECEIVED_EACH {
                    // Fails if the keeper has exited: the next receive reports it.
                    let _ = send(socket, &Message::Received(unacknowledged as u64), &[]);
                    unacknowledged = 0;
                }
            }
            Arrival::Message(Message::Complete(is_whole), _) => {
                tracing::debug!(descriptors = handover.descriptors, is_whole, "received the keeper's descriptors");
                return Ok(Handover { is_whole, ..handover });
            }
            Arrival::Message(Message::Refused(why), _) => return Err(io::Error::other(why)),
            Arrival::Message(message, _) => {
                return Err(io::Error::other(format!("it sent {message:?} during the handover")));
            }
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
