//! Requests that wait in the broker. Each has a connection of its own, so that no other request waits for it, and its end costs nothing else.

use std::{
    net::Shutdown,
    os::unix::net::UnixStream,
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicU64, Ordering},
    },
};

use crate::{
    error::{BrokerError, Error, RefusalCode, Result},
    sys::lock,
};

/// The waits of a client, which [`Client::stop`](super::Client::stop) ends.
#[derive(Debug, Default)]
pub(super) struct Waits {
    stops: AtomicU64,
    sockets: Mutex<Vec<Weak<UnixStream>>>,
}

/// A wait of a socket. It ends when dropped.
pub(super) struct Waiting<'a> {
    waits: &'a Waits,
    socket: Arc<UnixStream>,
}

impl Waits {
    /// The number of stops.
    pub(super) fn stops(&self) -> u64 {
        self.stops.load(Ordering::Acquire)
    }

    /// Adds a wait that started at the stop `since`.
    ///
    /// # Errors
    /// [`Waits::check`].
    pub(super) fn add(&self, socket: Arc<UnixStream>, since: u64) -> Result<Waiting<'_>> {
        lock(&self.sockets).push(Arc::downgrade(&socket));
        let waiting = Waiting { waits: self, socket };
        self.check(since)?;
        Ok(waiting)
    }

    /// # Errors
    /// [`Error::Broker`] with the code `stopped` if the waits were stopped after the stop `since`.
    pub(super) fn check(&self, since: u64) -> Result<()> {
        match self.stops() == since {
            true => Ok(()),
            false => Err(Error::Broker(BrokerError::new(RefusalCode::Stopped, "the wait was stopped"))),
        }
    }

    /// Ends all waits: their sockets are closed in both directions.
    pub(super) fn stop(&self) {
        self.stops.fetch_add(1, Ordering::AcqRel);
        for socket in lock(&self.sockets).iter().filter_map(Weak::upgrade) {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        lock(&self.waits.sockets).retain(|socket| !std::ptr::eq(socket.as_ptr(), &raw const *self.socket));
    }
}
