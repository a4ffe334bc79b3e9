//! The keeper in the simulation: its real descriptors and messages over a socket pair, without its loop, signals and listener.

use std::{io, os::fd::OwnedFd, path::PathBuf, time::Duration};

use nix::poll::PollFlags;

use super::{
    super::{
        Link, Process, Store, Takeover, VERSION,
        link::take_over,
        message::{Arrival, Message, receive, send},
        peer::{pair, ready},
    },
    Held, Image, KeeperProcess,
};
use crate::channel::Cancel;

/// A pair of sockets whose first end holds only a few messages.
fn small_pair() -> (OwnedFd, OwnedFd) {
    let (server, keeper) = pair().unwrap();
    rustix::net::sockopt::set_socket_send_buffer_size(&server, 1).unwrap();
    (server, keeper)
}

/// A defect of the channel from the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::broker) enum KeeperFlaw {
    IgnoresRemovals,
    SwapsMessages,
    LosesHold,
}

impl KeeperProcess {
    /// A keeper that holds nothing.
    pub(in crate::broker) fn simulated() -> Self {
        let (image, held) = (Image::of_this_process().unwrap(), Held::new(Vec::new(), String::new()));
        Self { image, held, server: None, newcomers: None, service: None, reload: None, notifies: false }
    }

    /// Ends it.
    pub(in crate::broker) fn kill(mut self) {
        self.close_server();
    }

    /// Closes the connection. A fork of another test may hold a copy of the socket, and the server would see no end.
    fn close_server(&mut self) {
        if let Some(server) = self.server.take() {
            let _ = rustix::net::shutdown(&server.socket, rustix::net::Shutdown::Both);
        }
    }

    /// Hands everything to a new server.
    pub(in crate::broker) fn hand_to_server(&mut self, cancel: &Cancel) -> Takeover {
        let (server, keeper) = small_pair();
        self.replace_server(keeper, 1, VERSION, false);
        let taken = take_over(server, Process::of(0), Link::Path(PathBuf::new()), cancel).unwrap();
        // The keeper's listener reads the hello before it serves a connection.
        let hello = receive(&self.server.as_ref().expect("the previous server is gone").socket).unwrap();
        assert!(matches!(hello, Arrival::Message(Message::Hello { resends: false, .. }, _)));
        taken
    }

    /// Accepts a server that lost its keeper and sends everything again.
    pub(in crate::broker) fn accept_server(&mut self, store: &mut Store) -> io::Result<()> {
        let (server, keeper) = small_pair();
        store.start_over(server)?;
        match receive(&keeper)? {
            Arrival::Message(Message::Hello { version, resends }, _) => {
                self.replace_server(keeper, 1, version, resends)
            }
            other => panic!("{other:?}"),
        }
        Self::clog(store);
        Ok(())
    }

    /// Fills the server's end with messages that the keeper ignores, so that the next messages wait until the keeper reads.
    pub(in crate::broker) fn clog(store: &Store) {
        while store.connection().is_some_and(|server| send(server, &Message::Received(0), &[]).is_ok()) {}
    }

    /// Reads one message, if there is one.
    pub(in crate::broker) fn read_message(&mut self, flaw: Option<KeeperFlaw>) {
        let Some(flaw) = flaw else { return self.read_server(1) };
        let next = || match receive(&self.server.as_ref()?.socket) {
            Ok(Arrival::Message(message, fds)) => Some((message, fds)),
            _ => None,
        };
        let mut messages = Vec::from_iter(next());
        if flaw == KeeperFlaw::SwapsMessages {
            messages.extend(next());
            messages.reverse();
        }
        for (message, fds) in messages {
            match (&message, flaw) {
                (Message::Remove(_), KeeperFlaw::IgnoresRemovals) => {}
                (Message::Hold(names), KeeperFlaw::LosesHold) if !names[0].starts_with('.') => {}
                _ => self.handle(message, fds).unwrap(),
            }
        }
    }

    /// Whether the server has sent more, or closed its connection.
    pub(in crate::broker) fn has_unread(&self) -> bool {
        self.server.as_ref().is_some_and(|server| ready(&server.socket, PollFlags::POLLIN, Duration::ZERO))
    }

    /// Closes the server's connection without reading the rest.
    pub(in crate::broker) fn drop_unread(&mut self) {
        self.close_server();
    }

    /// Closes the server's connection, after the last message.
    pub(in crate::broker) fn hang_up(&mut self) {
        self.read_server(usize::MAX);
        self.close_server();
    }

    pub(in crate::broker) fn has_server(&self) -> bool {
        self.server.is_some()
    }

    /// Whether the server has sent everything.
    pub(in crate::broker) fn is_whole(&self) -> bool {
        self.held.is_whole
    }

    /// The names of the held descriptors.
    pub(in crate::broker) fn names(&self) -> impl Iterator<Item = &str> {
        self.held.iter().map(|(name, _)| name)
    }

    /// A copy of a held descriptor.
    pub(in crate::broker) fn descriptor(&self, name: &str) -> Option<OwnedFd> {
        self.held.iter().find(|(held, _)| *held == name).map(|(_, fd)| fd.try_clone_to_owned().unwrap())
    }
}
