//! Wakes the background thread of a connection.

use std::{
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
};

use nix::sys::eventfd::EventFd;

use crate::sys;

#[derive(Debug)]
pub(super) struct Waker(Arc<EventFd>);

impl Waker {
    pub(super) fn new(wake: Arc<EventFd>) -> Self {
        Self(wake)
    }

    pub(super) fn wake(&self) {
        // Fails only if the counter is full, and then the thread wakes anyway.
        let _ = self.0.write(1);
    }

    /// Closes a fork's copy of the socket by replacing it with the eventfd.
    pub(super) fn replace_in_fork(&self, socket: BorrowedFd<'_>) {
        let _ = sys::replace(socket, self.0.as_fd());
    }
}
