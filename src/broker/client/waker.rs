//! Wakes the background thread of a connection.

use std::sync::Arc;

use nix::sys::eventfd::EventFd;

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
}
