//! A connection to the broker: one request at a time, and its answer. One that breaks is made again: see `reconnect`.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    process,
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use super::{
    dial::{Dialled, Dialler},
    holdings::{Handlers, Held, Holdings},
    records::{buffer, is_broken, lock, receive_on, send_on},
    waker::Waker,
};
use crate::{
    channel::{
        Config, Peer, deadline_after,
        record::{RecordSocket, check_type},
    },
    driver::Driver,
    error::{Error, PeerError, Result},
    memory::{Device, DeviceIdentity},
    sys::fork::ProcessIdentity,
    wire::broker::{Message, Release, Stop, Token},
};

/// The most puts that are noted to be taken up.
const MAX_PUTS: usize = 4096;

/// A connection over which a broker answered a hello.
#[derive(Debug)]
pub(super) struct Connection {
    /// Its descriptor stays the same when the connection is made again.
    pub(super) socket: RecordSocket,
    /// The process at the other end.
    pub(super) peer: Mutex<Peer>,
    /// The process that made it: a fork shares the socket and must not use it.
    made_by: ProcessIdentity,
    /// How it is made again; `None` for one over a socket of the caller's.
    pub(super) dialler: Option<Arc<Dialler>>,
    /// The devices that memory was opened for: looking for one asks the driver for all.
    devices: Mutex<Vec<Device>>,
    /// The record received last. Held from a request until its whole answer has come, and while the connection is made again.
    pub(super) incoming: Mutex<Vec<u8>>,
    pub(super) holdings: Mutex<Holdings>,
    pub(super) handlers: Mutex<Handlers>,
    /// Whether it works, as far as is known.
    pub(super) up: AtomicBool,
    /// How often a wait was to end.
    stops: AtomicU64,
    /// The thread that notices that it broke; `None` if there could be none.
    pub(super) watcher: OnceLock<Waker>,
}

/// A request, and the right to its answers.
#[derive(Debug)]
pub(super) struct Exchange<'a> {
    connection: &'a Connection,
    incoming: &'a mut Vec<u8>,
    /// How long the first answer may take.
    patience: Duration,
    /// Of a request that is sent again: how often waits were to end when it was sent first.
    stops: Option<u64>,
    finished: bool,
}

impl Connection {
    /// Connects to the broker at a path. Waits up to the config's timeout for one to listen.
    pub(super) fn connect(path: &Path, config: &Config) -> Result<Self> {
        let (dialler, mut incoming) = (Dialler::new(path, config, config.cancellation()?), buffer());
        let deadline = deadline_after(config.timeout);
        let dialled = dialler.dial_until(deadline, 0, &mut incoming)?;
        Ok(Self::new(dialled, incoming, Some(Arc::new(dialler))))
    }

    /// A connection over a socket that is connected. It can be made again if that was by a path.
    pub(super) fn over(socket: OwnedFd, path: Option<&Path>, config: &Config) -> Result<Self> {
        check_type(&socket)?;
        let peer = Peer::of(&socket)?;
        config.trust.check(peer)?;
        let (cancel, mut incoming) = (config.cancellation()?, buffer());
        let dialled = Dialled::greet(socket, peer, config.timeout, &cancel, &mut incoming)?;
        let dialler = path.map(|path| Arc::new(Dialler::new(path, config, cancel)));
        Ok(Self::new(dialled, incoming, dialler))
    }

    fn new(dialled: Dialled, incoming: Vec<u8>, dialler: Option<Arc<Dialler>>) -> Self {
        let Dialled { socket, peer, instance } = dialled;
        Self {
            socket,
            peer: Mutex::new(peer),
            made_by: ProcessIdentity::current(),
            dialler,
            devices: Mutex::default(),
            incoming: Mutex::new(incoming),
            holdings: Mutex::new(Holdings { instance, ..Holdings::default() }),
            handlers: Mutex::default(),
            up: AtomicBool::new(true),
            stops: AtomicU64::new(0),
            watcher: OnceLock::new(),
        }
    }

    /// The process at the other end.
    pub(super) fn peer(&self) -> Peer {
        *lock(&self.peer)
    }

    /// Makes a request: `request` sends it and receives all of its answer, within so long after the timeout. Blocks while another
    /// thread's request has not been answered.
    ///
    /// If the connection breaks it is made again, within the timeout from then on, and `request` is called again, with what is left of
    /// the wait. So it must be one that does nothing twice; one with several answers that goes on, as a watch does, keeps
    /// what came outside of `request`, which asks for what follows.
    pub(super) fn request<T>(
        &self,
        wait: Duration,
        mut request: impl FnMut(&mut Exchange<'_>, Duration) -> Result<T>,
    ) -> Result<T> {
        self.check_fork()?;
        let mut incoming = lock(&self.incoming);
        let begun = Instant::now();
        let before = self.stops.load(Ordering::Acquire);
        let (mut left, mut stops, mut tries) = (wait, None, 0);
        loop {
            let patience = self.socket.timeout().saturating_add(left);
            let mut exchange = Exchange { connection: self, incoming: &mut incoming, patience, stops, finished: false };
            let error = match request(&mut exchange, left) {
                Ok(answer) => {
                    exchange.finished = true;
                    return Ok(answer);
                }
                Err(error) => error,
            };
            drop(exchange);
            self.make_again(&mut incoming, error, tries, begun, wait)?;
            tries += 1;
            left = wait.saturating_sub(begun.elapsed());
            stops = Some(before);
        }
    }

    /// How often [`Connection::stop`] was called.
    pub(super) fn stops(&self) -> u64 {
        self.stops.load(Ordering::Acquire)
    }

    /// Ends the wait of the request that is not answered yet.
    pub(super) fn stop(&self) -> Result<()> {
        self.stops.fetch_add(1, Ordering::AcqRel);
        match self.send(&Message::Stop(Stop {}), &[]) {
            // It is sent again with the request.
            Err(error) if is_broken(&error) && self.dialler.is_some() => Ok(()),
            sent => sent,
        }
    }

    /// Sends a message that has no answer, or a further record of a request.
    pub(super) fn send(&self, message: &Message, fds: &[BorrowedFd<'_>]) -> Result<()> {
        self.check_fork()?;
        send_on(&self.socket, message, fds)
    }

    /// Takes note of a lease that came, so that it is taken up when the connection is made again.
    pub(super) fn hold(self: &Arc<Self>, held: &Arc<Held>) {
        lock(&self.holdings).leases.insert(held.token, Arc::clone(held));
        self.watch();
        self.wake_if_broken();
    }

    /// Takes note of a put of a name that goes with its maker.
    pub(super) fn hold_put(self: &Arc<Self>, name: &str, request: Token) {
        let mut holdings = lock(&self.holdings);
        if holdings.puts.len() >= MAX_PUTS {
            // Of most of them the name is long gone: only their makers' deletes are seen here.
            holdings.puts.clear();
        }
        holdings.puts.insert(name.to_owned(), request);
        drop(holdings);
        self.watch();
        self.wake_if_broken();
    }

    /// Forgets the put of a name.
    pub(super) fn forget_put(&self, name: &str) {
        lock(&self.holdings).puts.remove(name);
    }

    /// Ends a lease or a claim. Does not block: while the broker does not read, the thread of the connection tells it later, or the next
    /// request does.
    pub(super) fn release(self: &Arc<Self>, token: Token, what: &str) {
        if !self.is_own() {
            // This is a fork, of which the lease is not. Another thread may have held the locks when it was made.
            return;
        }
        // First, so that it is not taken up: while the connection is made again what was taken up is compared with what is left.
        lock(&self.holdings).leases.remove(&token);
        match self.try_release(token) {
            Ok(true) => {}
            Ok(false) => {
                lock(&self.holdings).unsent.push(token);
                self.watch();
                self.wake_watcher();
            }
            // The connection has broken: what is not taken up again ends.
            Err(Error::Peer(_)) => {}
            Err(error) => tracing::warn!(%error, "cannot end {what}"),
        }
    }

    /// Returns whether there was room for it.
    fn try_release(&self, token: Token) -> Result<bool> {
        let message = Message::Release(Release { token });
        let mut record = Vec::with_capacity(64);
        message.encode_into(&mut record)?;
        tracing::debug!(kind = message.name(), "to the broker");
        self.socket.try_send(message.name(), &record)
    }

    /// Tells the broker what was released while it did not read, as far as there is room. Returns whether some is left. Does not block.
    pub(super) fn send_unsent(&self) -> bool {
        let mut holdings = lock(&self.holdings);
        while let Some(&token) = holdings.unsent.last() {
            match self.try_release(token) {
                Ok(true) => drop(holdings.unsent.pop()),
                Ok(false) => return true,
                // The connection has broken: what is not taken up again ends.
                Err(_) => holdings.unsent.clear(),
            }
        }
        false
    }

    /// The same, all of it, ahead of a request, which is not to come before it.
    fn send_all_unsent(&self) -> Result<()> {
        loop {
            // Not in the condition: the lock would be held for the whole turn.
            let token = lock(&self.holdings).unsent.pop();
            let Some(token) = token else { return Ok(()) };
            if let Err(error) = self.send(&Message::Release(Release { token }), &[]) {
                lock(&self.holdings).unsent.push(token);
                self.wake_watcher();
                return Err(error);
            }
        }
    }

    /// Changes the handlers. Not in a fork, where another thread may have held their lock, and there is none to call them.
    pub(super) fn handle(&self, change: impl FnOnce(&mut Handlers)) {
        if self.is_own() {
            change(&mut lock(&self.handlers));
        }
    }

    /// Whether the broker counts a lease, as far as is known.
    pub(super) fn counts(&self, held: &Held) -> bool {
        self.is_own() && self.up.load(Ordering::Acquire) && held.is_counted()
    }

    /// Wakes the thread that notices that the connection broke.
    pub(super) fn wake_watcher(&self) {
        if let Some(watcher) = self.watcher.get() {
            watcher.wake();
        }
    }

    /// Wakes that thread if the connection has broken already, when there was nothing yet to take up.
    fn wake_if_broken(&self) {
        if self.is_hung_up() {
            self.wake_watcher();
        }
    }

    /// The device of this process that is to use memory of `owner`, if none is named.
    pub(super) fn device_of(&self, driver: &Driver, owner: &DeviceIdentity) -> Result<Device> {
        self.check_fork()?;
        let known = |device: &&Device| device.uuid() == owner.uuid && device.driver() == driver;
        if let Some(device) = lock(&self.devices).iter().find(known) {
            return Ok(device.clone());
        }
        // Without the lock: the driver's calls may take long.
        let device = Device::for_memory_of(driver, owner, None)?;
        if device.uuid() == owner.uuid {
            let mut devices = lock(&self.devices);
            if !devices.iter().any(|other| known(&other)) {
                devices.push(device.clone());
            }
        }
        Ok(device)
    }

    /// Whether this is the process that made it.
    fn is_own(&self) -> bool {
        self.made_by.is_current()
    }

    pub(super) fn check_fork(&self) -> Result<()> {
        match self.is_own() {
            true => Ok(()),
            false => Err(Error::Misuse {
                problem: format!(
                    "process {} made this connection to the broker, and process {} is a fork of it: connect again",
                    self.made_by.pid(),
                    process::id()
                ),
            }),
        }
    }

    /// An exchange for what is said while the connection is made again.
    pub(super) fn exchange<'a>(&'a self, incoming: &'a mut Vec<u8>, patience: Duration) -> Exchange<'a> {
        Exchange { connection: self, incoming, patience, stops: None, finished: false }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        let Some(watcher) = self.watcher.get() else { return };
        if self.is_own() {
            // The watcher has the socket too: it must not outlive this.
            let _ = self.socket.shared().shutdown(std::net::Shutdown::Both);
            watcher.wake();
        } else {
            // A fork has no watcher, which would end; so the fork's descriptor of the socket ends here.
            watcher.replace_in_fork(self.socket.as_fd());
        }
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Exchange<'_> {
    /// Sends the first record of the request.
    pub(super) fn send_first(&mut self, message: &Message, fds: &[BorrowedFd<'_>]) -> Result<()> {
        let sent = self.connection.send_all_unsent().and_then(|()| self.send(message, fds));
        match sent {
            Ok(()) => {}
            Err(gone @ Error::Peer(PeerError::Gone { .. })) => {
                return Err(match self.receive("for the reason") {
                    // The broker has said why before it closed the connection.
                    Err(reported @ Error::Peer(PeerError::Reported { .. })) => reported,
                    _ => gone,
                });
            }
            Err(error) => return Err(error),
        }
        match self.stops {
            // Its wait was to end when there was no connection.
            Some(before) if before != self.connection.stops.load(Ordering::Acquire) => {
                self.send(&Message::Stop(Stop {}), &[])
            }
            _ => Ok(()),
        }
    }

    /// Waits for the next message of the answer. A refusal is an error, after which the connection can be used again.
    pub(super) fn receive(&mut self, purpose: &'static str) -> Result<(Message, Vec<OwnedFd>)> {
        self.receive_by(None, purpose)
    }

    /// The same until a deadline. With [`PeerError::Timeout`] the request stays as it is: more may be waited for.
    pub(super) fn receive_until(
        &mut self,
        deadline: Instant,
        purpose: &'static str,
    ) -> Result<(Message, Vec<OwnedFd>)> {
        self.receive_by(Some(deadline), purpose)
    }

    fn receive_by(&mut self, until: Option<Instant>, purpose: &'static str) -> Result<(Message, Vec<OwnedFd>)> {
        let deadline = || until.unwrap_or_else(|| deadline_after(self.patience));
        let received = receive_on(&self.connection.socket, self.incoming, deadline, purpose);
        if matches!(received, Err(Error::Broker(_))) {
            self.finished = true;
        }
        received
    }

    /// Sends a further record of the request, or an acknowledgement.
    pub(super) fn send(&self, message: &Message, fds: &[BorrowedFd<'_>]) -> Result<()> {
        self.connection.send(message, fds)
    }

    /// The whole answer has come.
    pub(super) fn finish(mut self) {
        self.finished = true;
    }
}

impl Drop for Exchange<'_> {
    fn drop(&mut self) {
        if !self.finished {
            // What is still to come would be taken for the answer to the next request.
            let _ = self.connection.socket.shared().shutdown(std::net::Shutdown::Both);
        }
    }
}
