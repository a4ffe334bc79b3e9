//! Introductions of publishers and subscribers by the broker.

use std::{
    net::Shutdown,
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use super::{
    Client,
    socket::{Dialler, Subscription, is_broken, send_on, unexpected},
};
use crate::{
    broker::request::{check_name, check_prefix},
    channel::{Cancel, Peer, deadline_after},
    error::{Error, PeerError, ProtocolError, Result},
    sys::fork::ProcessIdentity,
    wire::broker::{Follow, Meet, Message, Met, OpenTopic},
};

/// A connection on which the broker introduces other clients. A topic or a follower lasts as long as its connection.
#[derive(Debug)]
pub(crate) struct Meetings {
    dialler: Arc<Dialler>,
    request: Message,
    /// `None` if it broke.
    subscription: Option<Subscription>,
    opened: Instant,
    /// Set to be introduced to all peers again.
    again: Arc<AtomicBool>,
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
        let (own, creator) = (Arc::new(dialler.with_cancel(cancel)), ProcessIdentity::current());
        let (opened, again) = (Instant::now(), Arc::default());
        let mut meetings = Meetings { dialler: own, request, subscription: None, opened, again, tries: 0, creator };
        // The program's own request cancels the first attempt.
        meetings.connect(dialler, deadline_after(dialler.timeout))?;
        meetings.subscription.iter_mut().for_each(|subscription| subscription.socket.set_cancel(cancel));
        Ok(meetings)
    }
}

impl Drop for Meetings {
    /// The broker sees the end even if a fork of this process has a copy of the socket.
    fn drop(&mut self) {
        if let Some(subscription) = self.subscription.as_ref().filter(|_| self.creator.is_current()) {
            let _ = subscription.socket.stream().shutdown(Shutdown::Both);
        }
    }
}

impl Meetings {
    /// Set it, and the broker introduces all peers again, after one to two time limits of the client.
    pub(crate) fn again(&self) -> &Arc<AtomicBool> {
        &self.again
    }

    /// Waits for the next introduction. Connects again if the broker has died, and waits for its successor.
    ///
    /// # Errors
    /// [`Error::Interrupted`]. Others are about one attempt: call it again.
    pub(crate) fn next(&mut self) -> Result<Meeting> {
        loop {
            if self.opened.elapsed() >= self.dialler.timeout && self.again.swap(false, Ordering::Relaxed) {
                self.subscription = None;
            }
            let Some(subscription) = &mut self.subscription else {
                self.dialler.pause(self.tries)?;
                let dialler = Arc::clone(&self.dialler);
                self.connect(&dialler, Instant::now())?;
                continue;
            };
            let limit = deadline_after(subscription.socket.timeout());
            let met = subscription.next(limit, "for a peer").and_then(|(message, fds)| {
                send_on(&subscription.socket, &Message::Met(Met {}), &[])?;
                Meeting::read(message, fds)
            });
            match met {
                Ok(meeting) => return Ok(meeting),
                Err(Error::Peer(PeerError::Timeout { .. })) => {}
                Err(error @ Error::Interrupted { .. }) => return Err(error),
                Err(error) => {
                    self.subscription = None;
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
        match Subscription::open(dialler, deadline, &self.request)? {
            (subscription, Message::Opened(_)) => {
                (self.subscription, self.opened, self.tries) = (Some(subscription), Instant::now(), 0);
                Ok(())
            }
            (_, other) => Err(unexpected(&other, "opened")),
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
