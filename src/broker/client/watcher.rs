//! The thread that notices that a connection broke while no request is made, and tells the broker what it had no room for.

use std::{
    io,
    os::fd::AsFd,
    os::unix::net::UnixStream,
    sync::{Arc, TryLockError, Weak},
    thread,
    time::{Duration, Instant},
};

use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        eventfd::EventFd,
        signal::{SigSet, SigmaskHow, Signal},
    },
};

use super::{
    connection::Connection,
    dial::Dialler,
    records::{buffer, lock},
    waker::Waker,
};
use crate::{
    channel::eventfd,
    error::{Error, Result},
};

/// How long it waits before it looks again whether the thread that makes a request has made the connection again.
const OTHERS: Duration = Duration::from_millis(20);

/// The first and the longest pause between two attempts.
const PAUSES: [Duration; 2] = [Duration::from_millis(2), Duration::from_secs(1)];

impl Connection {
    /// Starts the thread that notices that the connection broke, if there is none.
    pub(super) fn watch(self: &Arc<Self>) {
        if self.watcher.get().is_some() {
            return;
        }
        match start(self) {
            // One that another thread has started meanwhile stays; this one ends.
            Ok(watcher) => drop(self.watcher.set(watcher)),
            // The next lease tries again.
            Err(error) => tracing::warn!(%error, "leases are not taken up while no request is made"),
        }
    }
}

/// Starts the thread of a connection that holds leases. It sleeps in poll(2) until the other end is closed; then it makes the connection
/// again, since the broker waits only so long for what it held to be taken up.
///
/// It costs one thread and one descriptor, from the first lease to the end of the connection, which it does not keep alive. It makes no
/// driver call.
///
/// # Errors
/// [`Error::System`]. See eventfd(2), pthread_create(3).
fn start(connection: &Arc<Connection>) -> Result<Waker> {
    let wake = Arc::new(eventfd()?);
    let watch = Watch {
        connection: Arc::downgrade(connection),
        dialler: connection.dialler.clone(),
        socket: connection.socket.shared(),
        wake: Arc::clone(&wake),
    };
    // The program's signals are for the program's threads. What a fault raises has to stay with the thread.
    let mut signals = SigSet::all();
    for fault in [Signal::SIGSEGV, Signal::SIGBUS, Signal::SIGFPE, Signal::SIGILL, Signal::SIGTRAP, Signal::SIGABRT] {
        signals.remove(fault);
    }
    let before = signals.thread_swap_mask(SigmaskHow::SIG_BLOCK);
    let started = thread::Builder::new().name("vmmfd-broker".to_owned()).spawn(move || watch.run());
    if let Ok(before) = before {
        let _ = before.thread_set_mask();
    }
    started.map_err(|error| Error::system("start a thread", error))?;
    Ok(Waker::new(wake))
}

/// What the thread has.
struct Watch {
    connection: Weak<Connection>,
    dialler: Option<Arc<Dialler>>,
    /// The connection's. The same descriptor when it is made again.
    socket: Arc<UnixStream>,
    wake: Arc<EventFd>,
}

/// What is to be waited for next.
enum Next {
    /// The end of the connection; with `unsent` also room for what the broker has not been told yet.
    HangUp { unsent: bool },
    /// This time.
    Pause(Duration),
    /// What another thread does.
    Wake,
}

impl Watch {
    fn run(self) {
        let mut next = Next::HangUp { unsent: false };
        // Since when it is broken, and whether that was said; and the pause before the next attempt.
        let (mut since, mut said, mut pause) = (None, false, PAUSES[0]);
        loop {
            if let Err(error) = self.wait(&next) {
                tracing::warn!(%error, "leases are not taken up while no request is made");
                return;
            }
            let Some(connection) = self.connection.upgrade() else { return };
            connection.call_handlers();
            if !connection.is_hung_up() {
                let unsent = connection.send_unsent();
                (next, since, said, pause) = (Next::HangUp { unsent }, None, false, PAUSES[0]);
                continue;
            }
            let Some(dialler) = &self.dialler else {
                connection.give_up(true);
                connection.call_handlers();
                return;
            };
            {
                let making = match connection.incoming.try_lock() {
                    Ok(incoming) => incoming,
                    Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                    Err(TryLockError::WouldBlock) => {
                        // That thread makes it again.
                        next = Next::Pause(OTHERS);
                        continue;
                    }
                };
                // It may have made it again since.
                if !connection.is_hung_up() {
                    next = Next::HangUp { unsent: connection.send_unsent() };
                    continue;
                }
                connection.broke();
                drop(making);
            }
            if lock(&connection.holdings).is_empty() {
                // The next request makes it again.
                next = Next::Wake;
                continue;
            }
            let since = *since.get_or_insert_with(Instant::now);
            // The connection may be dropped meanwhile.
            drop(connection);
            match self.make_again(dialler) {
                Ok(()) => {}
                Err(error @ Error::Interrupted { .. }) => {
                    tracing::debug!(%error, "a connection to the broker is not made again");
                    if let Some(connection) = self.connection.upgrade() {
                        connection.give_up(true);
                        connection.call_handlers();
                    }
                    return;
                }
                Err(error) => {
                    tracing::debug!(%error, "cannot make a connection to the broker again");
                    if since.elapsed() >= dialler.timeout
                        && !said
                        && let Some(connection) = self.connection.upgrade()
                    {
                        // A request may have made it again since.
                        let making = connection.incoming.try_lock();
                        if making.is_ok() && connection.is_hung_up() {
                            said = true;
                            connection.give_up(false);
                        }
                        drop(making);
                        connection.call_handlers();
                    }
                }
            }
            next = Next::Pause(pause);
            pause = (pause * 2).min(PAUSES[1]);
        }
    }

    /// Makes one attempt. The right to make a request is taken only once a broker has answered: a request need not wait for an
    /// attempt that comes to nothing.
    fn make_again(&self, dialler: &Dialler) -> Result<()> {
        let dialled = dialler.dial(Instant::now(), &mut buffer())?;
        let Some(connection) = self.connection.upgrade() else { return Ok(()) };
        let mut incoming = match connection.incoming.try_lock() {
            Ok(incoming) => incoming,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Ok(()),
        };
        match connection.is_hung_up() {
            true => connection.adopt(dialled, &mut incoming),
            false => Ok(()),
        }
    }

    fn wait(&self, next: &Next) -> io::Result<()> {
        // POLLHUP is reported unasked: records are for the thread that makes a request.
        let wake = PollFd::new(self.wake.as_fd(), PollFlags::POLLIN);
        let writable =
            if matches!(next, Next::HangUp { unsent: true }) { PollFlags::POLLOUT } else { PollFlags::empty() };
        let socket = PollFd::new(self.socket.as_fd(), writable);
        let mut polled = [wake, socket];
        let (polled, timeout) = match next {
            Next::HangUp { .. } => (&mut polled[..], PollTimeout::NONE),
            Next::Wake => (&mut polled[..1], PollTimeout::NONE),
            // Rounded up: a pause of 0 would be none.
            Next::Pause(pause) => {
                let pause = PollTimeout::try_from(*pause).unwrap_or(PollTimeout::MAX);
                (&mut polled[..1], pause)
            }
        };
        match poll(polled, timeout) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        // It is not readable most often.
        let _ = self.wake.read();
        Ok(())
    }
}
