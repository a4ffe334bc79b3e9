//! Introductions of publishers and subscribers by the broker.

use std::{
    net::Shutdown,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    time::Instant,
};

use super::{
    Client,
    dial::{Dialler, no_broker},
    records::{buffer, is_broken, receive_on, send_on, unexpected},
};
use crate::{
    broker::name::{check_name, check_prefix},
    channel::{Cancel, Peer, deadline_after, record::RecordSocket},
    error::{Error, PeerError, ProtocolError, Result},
    sys::{fork::ProcessIdentity, inherited::ClosedInForks},
    wire::broker::{Follow, Meet, Message, Met, OpenTopic},
};

/// A connection on which the broker introduces other clients. A topic or a follower lasts as long as its connection.
#[derive(Debug)]
pub(crate) struct Meetings {
    dialler: Arc<Dialler>,
    request: Message,
    /// `None` if it broke.
    socket: Option<(RecordSocket, ClosedInForks)>,
    incoming: Vec<u8>,
    /// The number of failed attempts to connect since the last success.
    tries: u32,
    creator: ProcessIdentity,
}

/// The other side of a stream.
#[derive(Debug)]
pub(crate) struct Meeting {
    pub(crate) topic: String,
    /// The publisher's run.
    pub(crate) epoch: u64,
    pub(crate) peer: Peer,
    /// The other side's pidfd, if the broker's kernel provides it.
    pub(crate) process: Option<OwnedFd>,
    /// Connected to the other side.
    pub(crate) socket: OwnedFd,
}

impl Client {
    /// Opens a topic. `cancel` ends the waits of the result.
    pub(crate) fn open_topic(&self, name: &str, epoch: u64, mode: Option<u16>, cancel: &Cancel) -> Result<Meetings> {
        check_name(name)?;
        self.meetings(Message::OpenTopic(OpenTopic { name: name.to_owned(), epoch, mode }), cancel)
    }

    /// Follows a topic, or all topics with a prefix. `cancel` ends the waits of the result.
    pub(crate) fn follow_topics(&self, name: &str, prefix: bool, cancel: &Cancel) -> Result<Meetings> {
        if prefix { check_prefix(name) } else { check_name(name) }?;
        self.meetings(Message::Follow(Follow { name: name.to_owned(), prefix }), cancel)
    }

    fn meetings(&self, request: Message, cancel: &Cancel) -> Result<Meetings> {
        self.0.check_fork()?;
        let dialler = self.0.second_connection("topics")?;
        let (socket, incoming, tries) = (None, buffer(), 0);
        let own = Arc::new(dialler.with_cancel(cancel));
        let mut meetings =
            Meetings { dialler: own, request, socket, incoming, tries, creator: ProcessIdentity::current() };
        // The program's own request cancels the first attempt.
        meetings.connect(dialler, deadline_after(dialler.timeout))?;
        meetings.socket.iter_mut().for_each(|(socket, _)| socket.set_cancel(cancel));
        Ok(meetings)
    }
}

impl Drop for Meetings {
    /// The broker sees the end even if a fork of this process has a copy of the socket.
    fn drop(&mut self) {
        if let Some((socket, _)) = self.socket.as_ref().filter(|_| self.creator.is_current()) {
            let _ = socket.stream().shutdown(Shutdown::Both);
        }
    }
}

impl Meetings {
    /// Waits for the next introduction. Connects again if the broker has died, and waits for its successor.
    ///
    /// # Errors
    /// [`Error::Interrupted`]. Others are about one attempt: call it again.
    pub(crate) fn next(&mut self) -> Result<Meeting> {
        loop {
            let Some((socket, _)) = &self.socket else {
                self.dialler.pause(self.tries)?;
                let dialler = Arc::clone(&self.dialler);
                self.connect(&dialler, Instant::now())?;
                continue;
            };
            let asked = receive_on(socket, &mut self.incoming, || deadline_after(socket.timeout()), "for a peer");
            let met = asked.and_then(|(message, fds)| {
                send_on(socket, &Message::Met(Met {}), &[])?;
                Meeting::read(message, fds)
            });
            match met {
                Ok(meeting) => return Ok(meeting),
                Err(Error::Peer(PeerError::Timeout { .. })) => {}
                Err(error @ Error::Interrupted { .. }) => return Err(error),
                Err(error) => {
                    self.socket = None;
                    if !is_broken(&error) {
                        return Err(error);
                    }
                }
            }
        }
    }

    /// Connects, and waits for a broker until `deadline`.
    fn connect(&mut self, dialler: &Dialler, deadline: Instant) -> Result<()> {
        self.tries = self.tries.saturating_add(1);
        let dialled = dialler.dial_until(deadline, 0, &mut self.incoming);
        let socket = dialled.map_err(|error| no_broker(error, dialler.timeout, true))?.socket;
        send_on(&socket, &self.request, &[])?;
        let limit = || deadline_after(dialler.timeout);
        match receive_on(&socket, &mut self.incoming, limit, "for the broker's answer")? {
            (Message::Opened(_), _) => {
                let closed_in_forks = ClosedInForks::new(socket.as_fd());
                (self.socket, self.tries) = (Some((socket, closed_in_forks)), 0);
                Ok(())
            }
            (other, _) => Err(unexpected(&other, "opened")),
        }
    }
}

impl Meeting {
    fn read(message: Message, fds: Vec<OwnedFd>) -> Result<Self> {
        let Message::Meet(Meet { name: topic, epoch, pid, uid, .. }) = message else {
            return Err(unexpected(&message, "meet"));
        };
        let mut fds = fds.into_iter();
        let socket = fds.next().ok_or_else(|| ProtocolError::Content("meet has no socket".to_owned()))?;
        Ok(Self { topic, epoch, peer: Peer { pid, uid }, process: fds.next(), socket })
    }
}
