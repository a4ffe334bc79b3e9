//! The background thread: it reconnects while no request is in progress, and calls handlers.

use std::{
    io,
    os::fd::AsFd,
    os::unix::net::UnixStream,
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::eventfd::EventFd,
};

use super::{
    connection::Connection,
    socket::{Dialler, Subscription, buffer, no_broker},
};
use crate::{
    channel::{call_no_checks, cancel::eventfd},
    error::{Error, Result},
    sys::{self, lock},
};

/// How often to check whether another thread's request has finished reconnecting.
const RECHECK_INTERVAL: Duration = Duration::from_millis(20);

/// The first and the longest pause between attempts to reconnect.
const PAUSES: [Duration; 2] = [Duration::from_millis(2), Duration::from_secs(1)];

/// The pause between attempts to subscribe to recalls.
const RETRY: Duration = Duration::from_secs(1);

impl Connection {
    /// Starts the background thread unless it runs.
    pub(super) fn start_watcher(self: &Arc<Self>) {
        if self.watcher.get().is_some() {
            return;
        }
        match start(self) {
            // If another thread was faster, its watcher remains and this one exits.
            Ok(watcher) => drop(self.watcher.set(watcher)),
            // The next lease tries again.
            Err(error) => {
                tracing::warn!(%error, "cannot start a thread to reconnect to the broker: leases end with the connection unless a request reconnects in time")
            }
        }
    }
}

/// Starts a thread that sleeps in poll(2) until the broker closes the connection and then reconnects: the broker waits only for a limited
/// time for leases to be resumed.
///
/// The thread does not keep the connection alive, makes no driver call, and owns one descriptor.
///
/// # Errors
/// [`Error::System`]. See eventfd(2), pthread_create(3).
fn start(connection: &Arc<Connection>) -> Result<Arc<EventFd>> {
    let wake = Arc::new(eventfd()?);
    let watcher = Watcher {
        connection: Arc::downgrade(connection),
        dialler: connection.dialler.clone(),
        socket: connection.socket.shared(),
        wake: Arc::clone(&wake),
    };
    sys::thread::spawn("vmmfd-broker", move || watcher.run())
        .map_err(|error| Error::system("start a thread", error))?;
    Ok(wake)
}

/// The background thread's state.
struct Watcher {
    connection: Weak<Connection>,
    dialler: Option<Arc<Dialler>>,
    /// The connection's socket. A reconnect keeps its descriptor number.
    socket: Arc<UnixStream>,
    wake: Arc<EventFd>,
}

/// The event that the thread waits for.
enum Next {
    /// A broken connection, or a recall; at the latest this time, if any.
    HangUp(Option<Duration>),
    /// This time, if any.
    Pause(Option<Duration>),
}

impl Watcher {
    fn run(self) {
        call_no_checks();
        let mut next = Next::HangUp(None);
        let mut recalls = None;
        // When the connection broke, whether the handlers were called, and the pause before the next attempt.
        let mut since = None;
        let mut reported = false;
        let mut pause = PAUSES[0];
        loop {
            if let Err(error) = self.wait(&next, recalls.as_ref()) {
                tracing::warn!(%error, "cannot wait for the broker: leases end with the connection unless a request reconnects in time");
                return;
            }
            let Some(connection) = self.connection.upgrade() else { return };
            connection.call_handlers();
            if !connection.needs_reconnect() {
                let retries = connection.receive_recalls(&mut recalls);
                connection.call_handlers();
                next = Next::HangUp(retries.then_some(RETRY));
                (since, reported, pause) = (None, false, PAUSES[0]);
                continue;
            }
            let Some(dialler) = &self.dialler else {
                connection.report_unreachable(true);
                connection.call_handlers();
                return;
            };
            {
                let Some(turn) = connection.turns.try_begin() else {
                    // The other thread's request reconnects.
                    next = Next::Pause(Some(RECHECK_INTERVAL));
                    continue;
                };
                // A request may have reconnected in the meantime.
                if !connection.needs_reconnect() {
                    // Recalls make a request, which needs the turn.
                    next = Next::Pause(Some(PAUSES[0]));
                    continue;
                }
                let is_unused = lock(&connection.holdings).is_empty();
                if is_unused || connection.is_hung_up() {
                    connection.mark_broken();
                }
                if is_unused {
                    // What could not be sent, such as the end of a lease, takes effect with the end of the sockets. The next request reconnects.
                    connection.moved();
                    next = Next::Pause(None);
                    continue;
                }
                drop(turn);
            }
            let since = *since.get_or_insert_with(Instant::now);
            // Do not keep the connection alive during the attempt.
            drop(connection);
            match self.try_reconnect(dialler) {
                Ok(()) => {}
                Err(error @ Error::Interrupted { .. }) => {
                    tracing::debug!(%error, "not reconnecting to the broker");
                    if let Some(connection) = self.connection.upgrade() {
                        connection.report_unreachable(true);
                        connection.call_handlers();
                    }
                    return;
                }
                Err(error) => {
                    tracing::debug!(%error, "cannot reconnect to the broker");
                    if since.elapsed() >= dialler.timeout
                        && !reported
                        && let Some(connection) = self.connection.upgrade()
                    {
                        // A request may have reconnected in the meantime.
                        let turn = connection.turns.try_begin();
                        if turn.is_some() && connection.needs_reconnect() {
                            reported = true;
                            connection.report_unreachable(false);
                        }
                        drop(turn);
                        connection.call_handlers();
                    }
                }
            }
            next = Next::Pause(Some(pause));
            pause = (pause * 2).min(PAUSES[1]);
        }
    }

    /// Makes one attempt. Blocks requests only after a broker has answered, so that no request waits for a failing attempt.
    fn try_reconnect(&self, dialler: &Dialler) -> Result<()> {
        let dialled =
            dialler.dial(Instant::now(), &mut buffer()).map_err(|error| no_broker(error, Duration::ZERO, true))?;
        let Some(connection) = self.connection.upgrade() else { return Ok(()) };
        let Some(mut turn) = connection.turns.try_begin() else { return Ok(()) };
        match connection.needs_reconnect() {
            true => connection.adopt(dialled, &mut turn),
            false => Ok(()),
        }
    }

    fn wait(&self, next: &Next, recalls: Option<&Subscription>) -> io::Result<()> {
        // poll(2) always reports POLLHUP. Records are for the requesting thread, so do not ask for POLLIN.
        let mut polled = vec![PollFd::new(self.wake.as_fd(), PollFlags::POLLIN)];
        let (Next::HangUp(wait) | Next::Pause(wait)) = next;
        if matches!(next, Next::HangUp(_)) {
            polled.push(PollFd::new(self.socket.as_fd(), PollFlags::empty()));
            polled.extend(recalls.map(|socket| PollFd::new(socket.as_fd(), PollFlags::POLLIN)));
        }
        let timeout = wait.map_or(PollTimeout::NONE, |wait| PollTimeout::try_from(wait).unwrap_or(PollTimeout::MAX));
        match poll(&mut polled, timeout) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        // Usually EAGAIN: nothing was written.
        let _ = self.wake.read();
        Ok(())
    }
}
