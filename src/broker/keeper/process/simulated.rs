//! The keeper in the simulation: its real descriptors and messages over a socket pair, without its loop, signals and listener.

use std::{io, os::fd::OwnedFd, path::Path, time::Duration};

use nix::poll::PollFlags;

use super::{
    super::{
        Link, Process, Store, Takeover,
        link::take_over,
        link::{pair, ready},
        message::{Arrival, Message, Role, receive, send},
    },
    Entries, KeeperProcess,
};
use crate::{broker::manifest::BROKER, channel::Cancel};

/// A pair of sockets whose first end holds only a few messages.
fn small_pair() -> (OwnedFd, OwnedFd) {
    let (server, keeper) = pair().unwrap();
    rustix::net::sockopt::set_socket_send_buffer_size(&server, 1).unwrap();
    (server, keeper)
}

impl KeeperProcess {
    /// A keeper that holds nothing.
    pub(in crate::broker) fn simulated() -> Self {
        Self::new(Entries::none(), None, false)
    }

    /// Ends it.
    pub(in crate::broker) fn kill(mut self) {
        self.cut_server();
    }

    /// Closes the connection. A fork of another test may hold a copy of the socket, and the server would see no end.
    fn cut_server(&mut self) {
        if let Some(server) = self.server.take() {
            let _ = rustix::net::shutdown(&server.socket, rustix::net::Shutdown::Both);
        }
    }

    /// Hands everything to a new server.
    pub(in crate::broker) fn hand_to_server(&mut self, cancel: &Cancel) -> Takeover {
        let (server, keeper) = small_pair();
        self.replace_server(keeper, 0, false);
        let taken = take_over(server, Process::of(0), Link::to(Path::new("")), cancel).unwrap();
        // The keeper's listener reads the hello before it serves a connection.
        let hello = receive(&self.server.as_ref().expect("the previous server is gone").socket).unwrap();
        assert!(matches!(hello, Arrival::Message(Message::Hello { role: Role::NextServer, .. }, _)));
        taken
    }

    /// Accepts a server that lost its keeper and sends everything again.
    pub(in crate::broker) fn accept_server(&mut self, store: &mut Store) -> io::Result<()> {
        let (server, keeper) = small_pair();
        store.start_over(server)?;
        let hello = receive(&keeper)?;
        assert!(matches!(hello, Arrival::Message(Message::Hello { role: Role::SameServer, .. }, _)));
        self.replace_server(keeper, 0, true);
        Self::clog(store);
        Ok(())
    }

    /// Fills the server's end with messages that the keeper ignores, so that the next messages wait until the keeper reads.
    pub(in crate::broker) fn clog(store: &Store) {
        while store.connection().is_some_and(|server| send(server, &Message::Received(0), &[]).is_ok()) {}
    }

    /// Reads one message, if there is one. `swaps`: takes its descriptors in the reverse order.
    pub(in crate::broker) fn read_message(&mut self, swaps: bool) {
        let Some(server) = self.server.as_ref().filter(|_| swaps) else { return self.read_server(1) };
        if let Ok(Arrival::Message(message, mut fds)) = receive(&server.socket) {
            fds.reverse();
            self.handle(message, fds).unwrap();
        }
    }

    /// Whether the server has sent more, or closed its connection.
    pub(in crate::broker) fn has_unread(&self) -> bool {
        self.server.as_ref().is_some_and(|server| ready(&server.socket, PollFlags::POLLIN, Duration::ZERO))
    }

    /// Closes the server's connection, after the last message.
    pub(in crate::broker) fn hang_up(&mut self) {
        self.read_server(usize::MAX);
        self.cut_server();
    }

    pub(in crate::broker) fn has_server(&self) -> bool {
        self.server.is_some()
    }

    /// Whether the server has sent everything.
    pub(in crate::broker) fn is_whole(&self) -> bool {
        self.held.is_whole
    }

    /// The held entries: key, manifest, number of descriptors.
    pub(in crate::broker) fn entries(&self) -> impl Iterator<Item = (u64, &[u8], usize)> {
        self.held.iter().map(|(key, entry)| (key, entry.manifest.as_slice(), entry.fds.len()))
    }

    /// Changes a bit of the last manifest.
    pub(in crate::broker) fn damage_manifest(&mut self) {
        if let Some((_, entry)) = self.held.last_mut() {
            let middle = entry.manifest.len() / 2;
            entry.manifest[middle] ^= 1;
        }
    }

    /// Forgets completed requests.
    pub(in crate::broker) fn forget_requests(&mut self) {
        let requests = self.held.iter().filter(|(key, entry)| *key != BROKER && entry.fds.is_empty());
        let keys = requests.map(|(key, _)| key).collect::<Vec<_>>();
        keys.into_iter().for_each(|key| self.held.remove(key));
    }
}
