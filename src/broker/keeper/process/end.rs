//! The end of a keeper: on request, or because another keeper takes over.

use std::{
    io,
    os::fd::OwnedFd,
    path::PathBuf,
    time::{Duration, Instant},
};

use nix::poll::PollFlags;
use rustix::net::{Shutdown, shutdown};

use super::{
    super::{
        HANDOVER_TIMEOUT, VERSION,
        handover::hand_over,
        link::{ready, until},
        message::{Arrival, Message, receive, send},
    },
    KeeperProcess, descriptor_limit,
};
use crate::channel::{Cancel, Listener};

impl KeeperProcess {
    /// Hands everything to another keeper, and exits once that keeper serves.
    pub(super) fn serve_successor(&mut self, socket: &OwnedFd, pid: i32) {
        self.release_server("another keeper");
        self.close_server();
        if self.exit.is_some() {
            return;
        }
        match self.hand_to_successor(socket) {
            Ok(()) => {
                tracing::info!("exiting: another keeper, pid {pid}, holds the {} descriptors", self.held.descriptors());
                self.twin.end();
                self.leave_socket();
            }
            Err(error) => tracing::warn!("keeper {pid} did not take over: {error}"),
        }
    }

    fn hand_to_successor(&mut self, socket: &OwnedFd) -> io::Result<()> {
        let Some(newcomers) = &self.newcomers else { return Ok(()) };
        send(socket, &Message::Welcome { version: VERSION, allowed: descriptor_limit() }, &[])?;
        send(socket, &Message::Stopping(self.held.last_report.clone()), &[])?;
        send(socket, &Message::Listener, &[newcomers.listener()])?;
        hand_over(&mut self.held, socket)?;
        let deadline = Instant::now() + HANDOVER_TIMEOUT;
        loop {
            match receive(socket)? {
                Arrival::Message(Message::Serving, _) => return Ok(()),
                // Acknowledges the last descriptors.
                Arrival::Message(..) => {}
                Arrival::End => return Err(io::ErrorKind::UnexpectedEof.into()),
                Arrival::Nothing if ready(socket, PollFlags::POLLIN, until(deadline)) => {}
                Arrival::Nothing => return Err(io::ErrorKind::TimedOut.into()),
            }
        }
    }

    /// Ends the server's sends, and reads everything that it has sent. It then connects to another keeper and sends everything again. Without a
    /// `successor`, it starts one, if an init does not.
    fn release_server(&mut self, successor: &str) {
        if let Some(server) = &mut self.server {
            server.leaves = true;
            // Fails if the server is gone.
            let _ = send(&server.socket, &Message::Stopping(successor.to_owned()), &[]);
            let _ = shutdown(&server.socket, Shutdown::Read);
            self.read_server(usize::MAX);
        }
    }

    /// Exits, and leaves the socket and its file to another process.
    pub(super) fn leave_socket(&mut self) {
        if let Some(newcomers) = self.newcomers.take() {
            newcomers.leave();
        }
        self.exit = Some(0);
    }

    /// Handles SIGTERM and SIGINT. With a server, its twin continues: it holds everything until another keeper does.
    pub(super) fn end(&mut self) {
        let Some(pid) = self.server.as_ref().map(|server| server.process.pid) else {
            return self.end_alone();
        };
        self.release_server("");
        if self.exit.is_some() || self.twin.pid().is_none() && !self.fork_twin() {
            return;
        }
        match self.twin.pid() {
            Some(twin) => {
                tracing::info!(
                    twin,
                    "exiting: the server, pid {pid}, and a twin hold the {} descriptors",
                    self.held.descriptors()
                );
                self.leave_socket();
            }
            None => {
                tracing::info!("exiting: the server, pid {pid}, has all the descriptors");
                self.exit = Some(0);
            }
        }
    }

    /// Handles SIGTERM and SIGINT without a server. If another will follow the last one, whose exit was just now, a twin waits for it.
    fn end_alone(&mut self) {
        if self.held.descriptors() > 0 && self.awaits_server && self.alone_since.elapsed() < HANDOVER_TIMEOUT {
            self.twin.end();
            self.frees_at = Some(Instant::now() + HANDOVER_TIMEOUT);
            if !self.fork_twin() {
                return;
            }
            if let Some(twin) = self.twin.pid() {
                let count = self.held.descriptors();
                tracing::info!(
                    twin,
                    "exiting: a twin holds {count} descriptors for {HANDOVER_TIMEOUT:?}, for the next server"
                );
                return self.leave_socket();
            }
        }
        self.log_end();
        self.exit = Some(0);
    }

    pub(super) fn log_end(&self) {
        let count = self.held.descriptors();
        match &*self.held.last_report {
            _ if count == 0 => tracing::info!("exiting: no descriptors are held"),
            "" => tracing::warn!("exiting, and freeing {count} descriptors that no server has"),
            report => tracing::info!("exiting, and freeing {count} descriptors: {report}"),
        }
    }

    /// Closes everything and removes the socket's file.
    pub(super) fn finish(mut self) {
        let Some(path) = self.newcomers.as_ref().map(|newcomers| newcomers.path().to_owned()) else { return };
        self.twin.end();
        drop(self);
        remove_file(path);
    }
}

fn remove_file(path: PathBuf) {
    let removed =
        Cancel::new().and_then(|cancel| Listener::remove_unserved(&path, Duration::from_millis(200), &cancel));
    if let Err(error) = removed {
        tracing::debug!(%error, "cannot remove the socket's file");
    }
}
