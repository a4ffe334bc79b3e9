//! The holder's side of a recall: the background thread receives the broker's requests on a second connection.

use std::{
    collections::HashSet,
    fmt, io,
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
    time::Instant,
};

use super::{
    Client,
    connection::Connection,
    dial::no_broker,
    holdings::OwnLease,
    records::{buffer, receive_on, send_on, unexpected},
};
use crate::{
    channel::{
        deadline_after,
        record::{Arrival, RecordSocket},
    },
    error::{Error, Result},
    sys::{inherited::ClosedInForks, lock},
    wire::broker::{EventKind, Events, Message, WatchHeader},
};

/// A program's handler, called once.
pub(super) type RecallHandler = Box<dyn FnOnce() + Send>;

/// Whether a lease is recalled, and the handlers to call then.
#[derive(Default)]
pub(super) struct RecallState {
    recalled: bool,
    handlers: Vec<RecallHandler>,
}

impl fmt::Debug for RecallState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecallState").field("recalled", &self.recalled).finish_non_exhaustive()
    }
}

impl RecallState {
    pub(super) fn is_recalled(&self) -> bool {
        self.recalled
    }

    /// Marks the lease as recalled. Returns the handlers to call.
    fn recall(&mut self) -> Vec<RecallHandler> {
        self.recalled = true;
        std::mem::take(&mut self.handlers)
    }
}

/// The recalls of a connection's leases.
#[derive(Debug, Default)]
pub(super) struct Recalls {
    /// Whether the program has asked for them.
    wanted: bool,
    /// A subscription that the background thread has not taken yet.
    fresh: Option<Subscription>,
}

/// A connection that receives only recalls.
#[derive(Debug)]
pub(super) struct Subscription {
    socket: RecordSocket,
    _closed_in_forks: ClosedInForks,
    incoming: Vec<u8>,
}

impl Subscription {
    /// Takes received events. `None` if there are none.
    fn receive(&mut self) -> Result<Option<Events>> {
        match self.socket.try_receive(&mut self.incoming) {
            Ok(Arrival::Record(record)) => match Message::decode(&self.incoming[..record.length], record.fds.len())? {
                Message::Events(events) => Ok(Some(events)),
                other => Err(unexpected(&other, "events")),
            },
            Ok(Arrival::Broken(error)) => Err(error.into()),
            Ok(Arrival::End) => Err(Error::system("receive recalls", io::ErrorKind::UnexpectedEof)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(Error::system("receive recalls", error)),
        }
    }
}

impl AsFd for Subscription {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Connection {
    /// Starts to receive recalls, unless it does already. Afterwards earlier recalls are known.
    ///
    /// # Errors
    /// [`Error::Misuse`] on a socket without a path; errors of [`Client::connect`] and [`Client::who`].
    pub(super) fn watch_recalls(self: &Arc<Self>) -> Result<()> {
        self.check_fork()?;
        let mut recalls = lock(&self.recalls);
        if !recalls.wanted {
            let subscription = self.subscribe(deadline_after(self.timeout()))?;
            *recalls = Recalls { wanted: true, fresh: Some(subscription) };
            self.wake_watcher();
        }
        Ok(())
    }

    /// Calls a handler when the lease is recalled, or soon if it is.
    pub(super) fn on_recall(self: &Arc<Self>, held: &OwnLease, call: RecallHandler) -> Result<()> {
        self.watch_recalls()?;
        let mut state = lock(&held.recall);
        state.handlers.push(call);
        if state.recalled {
            let calls = state.recall();
            drop(state);
            self.call_soon(calls);
        }
        Ok(())
    }

    /// Opens a connection that receives recalls, and checks for earlier recalls. Waits until `deadline` for a listener.
    fn subscribe(self: &Arc<Self>, deadline: Instant) -> Result<Subscription> {
        let Some(dialler) = &self.dialler else {
            let problem = "recalls need a second connection, and this client's socket has no path: connect to a path";
            return Err(Error::Misuse { problem: problem.to_owned() });
        };
        let mut incoming = buffer();
        let dialled = dialler.dial_until(deadline, 0, &mut incoming);
        let socket = dialled.map_err(|error| no_broker(error, dialler.timeout, true))?.socket;
        let watch = WatchHeader { recalls: true, ..WatchHeader::default() };
        send_on(&socket, &Message::Watch(watch), &[])?;
        match receive_on(&socket, &mut incoming, || deadline_after(dialler.timeout), "for the broker's events")? {
            (Message::Events(_), _) => {}
            (other, _) => return Err(unexpected(&other, "events")),
        }
        self.find_recalled()?;
        Ok(Subscription { _closed_in_forks: ClosedInForks::new(socket.as_fd()), socket, incoming })
    }

    /// Marks the leases whose versions were recalled before.
    fn find_recalled(self: &Arc<Self>) -> Result<()> {
        let names = lock(&self.holdings).leases.values().map(|held| held.header.name.clone()).collect::<Vec<_>>();
        // Names are ASCII.
        let shared = |some: String, other: String| {
            let same = some.bytes().zip(other.bytes()).take_while(|(some, other)| some == other).count();
            some[..same].to_owned()
        };
        let Some(prefix) = names.into_iter().reduce(shared) else { return Ok(()) };
        let leases = Client(Arc::clone(self)).who(&prefix)?.leases;
        self.mark_recalled(&leases.into_iter().filter(|lease| lease.recalled).map(|lease| lease.id).collect());
        Ok(())
    }

    /// Marks the leases of recalled versions.
    fn mark_recalled(&self, ids: &HashSet<String>) {
        let held = |held: &&Arc<OwnLease>| ids.contains(&held.header.id);
        let held: Vec<Arc<OwnLease>> = lock(&self.holdings).leases.values().filter(held).cloned().collect();
        held.iter().for_each(|held| {
            let calls = lock(&held.recall).recall();
            self.call_soon(calls);
        });
    }

    /// Lets the background thread call handlers.
    fn call_soon(&self, calls: Vec<RecallHandler>) {
        if !calls.is_empty() {
            self.handle(|handlers| handlers.recalled.extend(calls));
            self.wake_watcher();
        }
    }

    /// Takes received recalls, on the background thread, while the connection is up. Returns whether to try again later.
    pub(super) fn receive_recalls(self: &Arc<Self>, subscription: &mut Option<Subscription>) -> bool {
        let wanted = {
            let mut recalls = lock(&self.recalls);
            *subscription = recalls.fresh.take().or_else(|| subscription.take());
            recalls.wanted
        };
        let taken = loop {
            let Some(current) = subscription else {
                match wanted {
                    false => break Ok(()),
                    // After a restart of the broker.
                    true => match self.subscribe(Instant::now()) {
                        Ok(renewed) => *subscription = Some(renewed),
                        Err(error) => break Err(error),
                    },
                }
                continue;
            };
            match current.receive() {
                Ok(None) => break Ok(()),
                Ok(Some(events)) => {
                    let recalled = events.events.into_iter().filter(|event| event.kind == EventKind::Recalled);
                    self.mark_recalled(&recalled.map(|event| event.id).collect());
                    if events.lost
                        && let Err(error) = self.find_recalled()
                    {
                        break Err(error);
                    }
                }
                Err(error) => {
                    tracing::debug!(%error, "the connection for recalls broke");
                    *subscription = None;
                }
            }
        };
        taken.inspect_err(|error| tracing::debug!(%error, "cannot receive recalls yet")).is_err()
    }
}
