//! Introduces the publishers and followers of topics.

use std::os::fd::{AsFd, OwnedFd};

use super::reactor::Reactor;
use crate::{
    broker::server::{
        state::{
            caller::{Caller, ConnectionId},
            effects::Outgoing,
            topics::Meeting,
        },
        verbs::topic,
    },
    channel::Channel,
    error::{Error, ErrorCode, PeerError, Result},
    sys,
    wire::broker::{Meet, Message},
};

impl Reactor {
    /// Sends two clients the ends of a socket pair, each with the other's identity as the kernel recorded it.
    pub(super) fn introduce(&mut self, meeting: &Meeting) {
        let (publisher, follower) = (meeting.publisher, meeting.follower);
        let is_there = |server: &Self, id| server.connections.get(id).is_some();
        if !is_there(self, publisher) || !is_there(self, follower) {
            // The other side can meet others.
            self.state.topics.withdraw(meeting);
            return self.with(topic::introduce);
        }
        let records = Channel::socket_pair().and_then(|(one, other)| {
            Ok([self.introduction(meeting, follower, one)?, self.introduction(meeting, publisher, other)?])
        });
        let [to_publisher, to_follower] = match records {
            Ok(records) => records,
            Err(error) => {
                self.state.topics.withdraw(meeting);
                // It may connect again.
                return self.end_connection(follower, ErrorCode::Full, &error.in_full(), "no descriptor is free");
            }
        };
        self.send_introduction(publisher, to_publisher);
        if is_there(self, publisher) {
            self.send_introduction(follower, to_follower);
        } else {
            self.state.topics.withdraw(meeting);
            self.with(topic::introduce);
        }
    }

    /// The record with the identity of `of` and this socket.
    fn introduction(&self, meeting: &Meeting, of: ConnectionId, socket: OwnedFd) -> Result<Outgoing> {
        let (connection, caller) = (self.connections.get(of), self.state.caller(of));
        let gone = || Error::Peer(PeerError::Gone { pid: 0, purpose: "to introduce it" });
        let (connection, &Caller { pid, uid, gid, .. }) = connection.zip(caller).ok_or_else(gone)?;
        let process = sys::peer_process(connection.as_fd(), pid);
        let process = process.map_err(|error| Error::system("open a client's pidfd", error))?;
        let (name, epoch) = (meeting.topic.to_string(), meeting.epoch);
        let meet = Message::Meet(Meet { name, epoch, pid, uid, gid, process: process.is_some() });
        Ok(Outgoing {
            own: [Some(socket), process].into_iter().flatten().collect(),
            ..Outgoing::of(&meet, Vec::new())?
        })
    }

    fn send_introduction(&mut self, to: ConnectionId, record: Outgoing) {
        if let Some(connection) = self.connections.get_mut(to) {
            connection.answer(vec![record]);
            self.flush_queue(to);
        }
    }
}
