//! A connection of one request, whose answers go on: events, or introductions.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::Instant,
};

use super::{
    dial::{Dialler, no_broker},
    records::{buffer, is_broken, receive_on, send_on, unexpected},
};
use crate::{
    channel::{
        Cancel, deadline_after,
        record::{Arrival, RecordSocket},
    },
    error::{Error, PeerError, Result},
    sys::inherited::ClosedInForks,
    wire::broker::{Events, Message, WatchHeader},
};

/// The error of a wait for events.
const PURPOSE: &str = "for the broker's events";

#[derive(Debug)]
pub(super) struct Subscription {
    socket: RecordSocket,
    _closed_in_forks: ClosedInForks,
    incoming: Vec<u8>,
}

impl Subscription {
    /// Connects and makes the request. Waits until `deadline` for a listener. Returns the first answer too.
    pub(super) fn open(dialler: &Dialler, deadline: Instant, request: &Message) -> Result<(Self, Message)> {
        let mut incoming = buffer();
        let mut tries = 0;
        loop {
            let dialled = dialler.dial_until(deadline, tries, &mut incoming);
            let socket = dialled.map_err(|error| no_broker(error, dialler.timeout, true))?.socket;
            let limit = || deadline_after(dialler.timeout);
            let asked = send_on(&socket, request, &[])
                .and_then(|()| receive_on(&socket, &mut incoming, limit, "for the broker's answer"));
            match asked {
                Ok((answer, _)) => {
                    let _closed_in_forks = ClosedInForks::new(socket.as_fd());
                    return Ok((Self { socket, _closed_in_forks, incoming }, answer));
                }
                Err(error) if is_broken(&error) && Instant::now() < deadline => {}
                Err(error) => return Err(error),
            }
            tries += 1;
            dialler.pause(tries)?;
        }
    }

    /// As [`Subscription::open`], for a watch. Returns the events up to now too.
    pub(super) fn watch(dialler: &Dialler, deadline: Instant, watch: WatchHeader) -> Result<(Self, Events)> {
        match Self::open(dialler, deadline, &Message::Watch(watch))? {
            (subscription, Message::Events(events)) => Ok((subscription, events)),
            (_, other) => Err(unexpected(&other, "events")),
        }
    }

    pub(super) fn socket(&self) -> &RecordSocket {
        &self.socket
    }

    /// Another request cancels the waits from now on.
    pub(super) fn set_cancel(&mut self, cancel: &Cancel) {
        self.socket.set_cancel(cancel);
    }

    /// Waits for the next message until `deadline`.
    pub(super) fn next(&mut self, deadline: Instant, purpose: &'static str) -> Result<(Message, Vec<OwnedFd>)> {
        receive_on(&self.socket, &mut self.incoming, || deadline, purpose)
    }

    /// Waits for events until `deadline`. Returns `None` after it.
    pub(super) fn receive(&mut self, deadline: Instant) -> Result<Option<Events>> {
        match self.next(deadline, PURPOSE) {
            Ok((Message::Events(events), _)) => Ok(Some(events)),
            Ok((other, _)) => Err(unexpected(&other, "events")),
            Err(Error::Peer(PeerError::Timeout { .. })) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Takes received events, even if the program has cancelled its waits. Returns `None` if there are none.
    pub(super) fn try_receive(&mut self) -> Result<Option<Events>> {
        match self.socket.try_receive(&mut self.incoming) {
            Ok(Arrival::Record(record)) => match Message::decode(&self.incoming[..record.length], record.fds.len())? {
                Message::Events(events) => Ok(Some(events)),
                other => Err(unexpected(&other, "events")),
            },
            Ok(Arrival::Broken(error)) => Err(error.into()),
            Ok(Arrival::End) => Err(PeerError::Gone { pid: 0, purpose: PURPOSE }.into()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(Error::system("receive events", error)),
        }
    }
}

impl AsFd for Subscription {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
