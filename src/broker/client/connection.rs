//! A connection to the broker: one request at a time. `reconnect` replaces a broken socket.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    process, ptr,
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use nix::sys::eventfd::EventFd;

use super::{
    holdings::{Handlers, Holdings, OwnLease},
    lease::{Lease, TableCache},
    recall::Recalls,
    reconnect::resume_on,
    socket::{Dialled, Dialler, Exchange, buffer, is_broken, no_broker, send_on},
    turns::{Turns, Waits},
};
use crate::{
    channel::{
        Config, Peer, deadline_after,
        record::{RecordSocket, check_type},
    },
    driver::Driver,
    error::{BrokerError, Error, PeerError, RefusalCode, Result, SocketError},
    memory::{Device, DeviceIdentity},
    sys::{fork::ProcessIdentity, inherited::ClosedInForks, lock},
    wire::broker::{Message, Release, ReportHeader, Resume, Token},
};

/// How many puts are remembered for the next reconnect.
const MAX_PUTS: usize = 4096;

/// By default, the longest wait for a broker to listen, which may have just been started.
const APPEARS: Duration = Duration::from_secs(1);

/// A connection that completed the handshake.
#[derive(Debug)]
pub(super) struct Connection {
    /// A reconnect replaces the socket under the same descriptor number.
    pub(super) socket: RecordSocket,
    /// A fork would keep the leases and names of this connection.
    pub(super) closed_in_forks: ClosedInForks,
    pub(super) peer: Mutex<Peer>,
    /// The process that connected: a fork must not use the connection.
    process: ProcessIdentity,
    /// How to reconnect; `None` for a socket that the caller connected.
    pub(super) dialler: Option<Arc<Dialler>>,
    pub(super) tables: TableCache,
    /// Cache of the devices that objects were opened for: a lookup asks the driver for all devices.
    devices: Mutex<Vec<Device>>,
    /// The right to make a request, held until the whole answer has arrived and during a reconnect.
    pub(super) turns: Turns,
    pub(super) holdings: Mutex<Holdings>,
    pub(super) handlers: Mutex<Handlers>,
    pub(super) recalls: Mutex<Recalls>,
    /// False from a break until the reconnect has completed.
    pub(super) connected: AtomicBool,
    /// Whether an answer is due that nobody waits for. The socket still holds the leases, until a reconnect has moved them.
    abandoned: AtomicBool,
    /// The sockets that hold the leases while a reconnect moves them.
    pub(super) former: Mutex<Vec<(ClosedInForks, OwnedFd)>>,
    /// The waits on this connection and on the connections that belong to it.
    pub(super) waits: Arc<Waits>,
    /// Wakes the background thread. Unset before the first lease, or if no thread could be started.
    pub(super) watcher: OnceLock<Arc<EventFd>>,
}

impl Connection {
    /// Connects to the broker at a path: see [`Client::connect`](super::Client::connect).
    pub(super) fn connect(path: &Path, config: &Config) -> Result<Self> {
        let dialler = Dialler::new(path, config, config.cancellation()?);
        let mut incoming = buffer();
        let mut dial = |wait| {
            dialler.dial_until(deadline_after(wait), 0, &mut incoming).map_err(|error| no_broker(error, wait, false))
        };
        let dialled = match dial(config.wait.unwrap_or(config.timeout.min(APPEARS))) {
            // A broker listens, but has no room for another connection yet.
            Err(Error::Socket(SocketError::NotAccepted { .. })) => dial(config.timeout)?,
            dialled => dialled?,
        };
        Ok(Self::new(dialled, incoming, Some(Arc::new(dialler)), Arc::default()))
    }

    /// Creates a connection on a connected socket. It can't reconnect.
    pub(super) fn over(socket: OwnedFd, config: &Config) -> Result<Self> {
        check_type(&socket)?;
        let peer = Peer::of(&socket)?;
        config.trust.check(peer)?;
        let cancel = config.cancellation()?;
        let mut incoming = buffer();
        let dialled = Dialled::handshake(socket, peer, config.timeout, &cancel, &mut incoming)?;
        Ok(Self::new(dialled, incoming, None, Arc::default()))
    }

    fn new(dialled: Dialled, incoming: Vec<u8>, dialler: Option<Arc<Dialler>>, waits: Arc<Waits>) -> Self {
        let Dialled { socket, peer, instance } = dialled;
        Self {
            closed_in_forks: ClosedInForks::new(socket.as_fd()),
            socket,
            peer: Mutex::new(peer),
            process: ProcessIdentity::current(),
            dialler,
            tables: TableCache::default(),
            devices: Mutex::default(),
            turns: Turns::new(incoming),
            holdings: Mutex::new(Holdings { instance, ..Holdings::default() }),
            handlers: Mutex::default(),
            recalls: Mutex::default(),
            connected: AtomicBool::new(true),
            abandoned: AtomicBool::new(false),
            former: Mutex::default(),
            waits,
            watcher: OnceLock::new(),
        }
    }

    pub(super) fn timeout(&self) -> Duration {
        self.socket.timeout()
    }

    /// Makes a request that does not wait in the broker: `request` sends it and receives the whole answer, within the timeout. Waits for the
    /// requests of other threads in progress, at most for the timeout.
    ///
    /// If the connection breaks, this reconnects within the timeout and calls `request` again. So `request` must be idempotent.
    pub(super) fn request<T>(&self, request: impl FnMut(&mut Exchange<'_>, Duration) -> Result<T>) -> Result<T> {
        self.run(Duration::ZERO, self.waits.stops(), request)
    }

    /// As [`Connection::request`], for a request that waits in the broker, on a connection of its own. `request` gets the rest of the wait.
    /// Without a path to connect to, it uses this connection.
    ///
    /// The broker attributes leases and names to the other connection, which is closed when the result is dropped: see
    /// [`Connection::take_over`].
    pub(super) fn wait<T>(
        self: &Arc<Self>,
        wait: Duration,
        request: impl FnMut(&mut Exchange<'_>, Duration) -> Result<T>,
    ) -> Result<(T, Arc<Self>)> {
        self.check_fork()?;
        let stops = self.waits.stops();
        let own = match &self.dialler {
            None => Arc::clone(self),
            Some(dialler) => {
                let mut incoming = buffer();
                let dialled = dialler.dial_until(deadline_after(dialler.timeout), 0, &mut incoming);
                let dialled = dialled.map_err(|error| no_broker(error, dialler.timeout, true))?;
                Arc::new(Self::new(dialled, incoming, Some(Arc::clone(dialler)), Arc::clone(&self.waits)))
            }
        };
        let waiting = self.waits.add(own.socket.shared(), stops)?;
        let result = own.run(wait, stops, request)?;
        drop(waiting);
        Ok((result, own))
    }

    /// `stops` is the number of stops at the start of the wait.
    fn run<T>(
        &self,
        wait: Duration,
        stops: u64,
        mut request: impl FnMut(&mut Exchange<'_>, Duration) -> Result<T>,
    ) -> Result<T> {
        self.check_fork()?;
        let started = Instant::now();
        let turn = self.turns.begin(deadline_after(self.timeout()), self.socket.cancel())?;
        let busy = PeerError::Timeout { waited: self.timeout(), purpose: "for another thread's request" };
        let mut turn = turn.ok_or(busy)?;
        let mut left = wait;
        let mut tries = 0;
        loop {
            // By an earlier request.
            if self.abandoned.load(Ordering::Acquire) {
                let error = PeerError::Gone { pid: 0, purpose: "for the broker's answer" };
                self.reconnect(&mut turn, error.into(), tries, started, wait)?;
            }
            let answer_timeout = self.timeout().saturating_add(left);
            let mut exchange = self.exchange(&mut turn, answer_timeout);
            let error = match request(&mut exchange, left) {
                Ok(answer) => {
                    exchange.finish();
                    return Ok(answer);
                }
                Err(Error::Broker(refusal)) if refusal.code == RefusalCode::Timeout => {
                    // The broker knows only the wait since the last reconnect.
                    let message = format!("{}: waited {} ms", refusal.message, wait.as_millis());
                    Error::Broker(BrokerError { message, ..refusal })
                }
                Err(error) => error,
            };
            drop(exchange);
            if !wait.is_zero() && is_broken(&error) {
                self.waits.check(stops)?;
            }
            self.reconnect(&mut turn, error, tries, started, wait)?;
            if !wait.is_zero() {
                // The stop ended the former socket.
                self.waits.check(stops)?;
            }
            tries += 1;
            left = wait.saturating_sub(started.elapsed());
        }
    }

    /// Moves leases and puts from the connection that [`Connection::wait`] used. Returns whether the broker still knows all of them.
    pub(super) fn take_over(self: &Arc<Self>, from: &Self, leases: &[Lease], puts: Vec<Token>) -> Result<bool> {
        if ptr::eq(&raw const **self, from) {
            return Ok(true);
        }
        self.request(|exchange, _| {
            let resumed = leases.iter().map(|lease| lease.hold.held.resumption()).collect();
            let lost = resume_on(exchange, Resume { leases: resumed, puts: puts.clone() })?;
            if lost.is_empty() {
                // Before another request: from now on a reconnect resumes them.
                leases.iter().for_each(|lease| self.add_lease(&lease.hold.held));
            }
            Ok(lost.is_empty())
        })
    }

    /// How to open a second connection.
    ///
    /// # Errors
    /// [`Error::Misuse`] on a socket without a path. `what` needs the connection.
    pub(super) fn second_connection(&self, what: &str) -> Result<&Dialler> {
        self.dialler.as_deref().ok_or_else(|| {
            let problem =
                format!("{what} need a second connection, and this client's socket has no path: connect to a path");
            Error::Misuse { problem }
        })
    }

    /// Gives up the pending answer. Leases and puts move to another connection, because the broker ends those of a closed one.
    pub(super) fn abandon(&self) {
        if self.dialler.is_some() && !lock(&self.holdings).is_empty() && !self.is_hung_up() {
            self.abandoned.store(true, Ordering::Release);
            self.wake_watcher();
        } else {
            let _ = self.socket.shared().shutdown(std::net::Shutdown::Both);
        }
    }

    /// Whether no further request can be made on the socket.
    pub(super) fn needs_reconnect(&self) -> bool {
        self.abandoned.load(Ordering::Acquire) || self.is_hung_up()
    }

    /// Replaces the socket. If the old one holds the leases, it stays open until [`Connection::moved`].
    ///
    /// # Errors
    /// [`Error::System`] if this process has no descriptor left.
    pub(super) fn replace_socket(&self, socket: &RecordSocket) -> Result<()> {
        if self.abandoned.load(Ordering::Acquire) && !self.is_hung_up() {
            let kept = self.socket.as_fd().try_clone_to_owned();
            let kept = kept.map_err(|error| Error::system("duplicate the broker's socket", error))?;
            lock(&self.former).push((ClosedInForks::new(kept.as_fd()), kept));
        }
        self.socket.replace(socket)?;
        // From here on, it is about the new socket, which another thread may find full.
        self.abandoned.store(false, Ordering::Release);
        self.closed_in_forks.update(self.socket.as_fd());
        Ok(())
    }

    /// Closes the former sockets: their leases have moved, or there are none.
    pub(super) fn moved(&self) {
        lock(&self.former).clear();
    }

    /// Sends a message without an answer, or a further record of a request.
    pub(super) fn send(&self, message: &Message, fds: &[BorrowedFd<'_>]) -> Result<()> {
        self.check_fork()?;
        send_on(&self.socket, message, fds)
    }

    /// Adds a lease, so that a reconnect resumes it.
    pub(super) fn add_lease(self: &Arc<Self>, held: &Arc<OwnLease>) {
        lock(&self.holdings).leases.insert(held.token, Arc::clone(held));
        self.start_watcher();
        self.wake_if_broken();
    }

    /// Remembers a put whose name may be deleted together with this connection.
    pub(super) fn remember_put(self: &Arc<Self>, name: &str, request: Token) {
        let mut holdings = lock(&self.holdings);
        if holdings.puts.len() >= MAX_PUTS {
            // Most of these names no longer exist: this process sees only its own deletes.
            holdings.puts.clear();
        }
        holdings.puts.insert(name.to_owned(), request);
        drop(holdings);
        self.start_watcher();
        self.wake_if_broken();
    }

    pub(super) fn forget_put(&self, name: &str) {
        lock(&self.holdings).puts.remove(name);
    }

    /// Ends a lease or a claim. Does not block, except on a full socket that can't be replaced.
    pub(super) fn release(&self, token: Token, what: &str) {
        if !self.is_own() {
            // The fork does not own the lease, and another thread may have held the locks at fork(2).
            return;
        }
        // Remove it first: a reconnect in progress compares the resumed leases with the remaining ones.
        lock(&self.holdings).leases.remove(&token);
        let release = Message::Release(Release { token });
        let sent = match self.try_send(&release) {
            Ok(true) => Ok(()),
            // The broker ends leases that are not resumed, and this is no longer one of them.
            Ok(false) if self.dialler.is_some() => return self.abandon(),
            Ok(false) => self.send(&release, &[]),
            Err(error) => Err(error),
        };
        match sent {
            // The connection broke: the same holds.
            Ok(()) | Err(Error::Peer(_)) => {}
            Err(error) => tracing::warn!(%error, "cannot end {what}"),
        }
    }

    /// Reports a leased version that differs from its description.
    pub(super) fn report(&self, token: Token, message: String) {
        // Best effort: a lost report has no effect on this process.
        let _ = self.send(&Message::Report(ReportHeader { token, message }), &[]);
    }

    /// Returns whether the socket had room for the message.
    fn try_send(&self, message: &Message) -> Result<bool> {
        let mut record = Vec::with_capacity(64);
        message.encode_into(&mut record)?;
        tracing::debug!(kind = message.name(), "to the broker");
        self.socket.try_send(message.name(), &record)
    }

    /// Changes the handlers. Does nothing in a fork: another thread may have held their lock, and no thread would call them.
    pub(super) fn handle(&self, change: impl FnOnce(&mut Handlers)) {
        if self.is_own() {
            change(&mut lock(&self.handlers));
        }
    }

    /// Whether the broker counts the lease, as far as this process knows.
    pub(super) fn counts(&self, held: &OwnLease) -> bool {
        self.is_own() && self.connected.load(Ordering::Acquire) && held.counted.load(Ordering::Acquire)
    }

    pub(super) fn wake_watcher(&self) {
        if let Some(watcher) = self.watcher.get() {
            // Fails only if the counter is full, and then the thread wakes anyway.
            let _ = watcher.write(1);
        }
    }

    /// Wakes the background thread if the connection broke before there was anything to resume.
    fn wake_if_broken(&self) {
        if self.is_hung_up() {
            self.wake_watcher();
        }
    }

    /// This process's device for memory of `owner`, if the caller selects none.
    pub(super) fn device_of(&self, driver: &Driver, owner: &DeviceIdentity) -> Result<Device> {
        self.check_fork()?;
        let known = |device: &&Device| device.uuid() == owner.uuid && device.driver() == driver;
        if let Some(device) = lock(&self.devices).iter().find(known) {
            return Ok(device.clone());
        }
        // The driver's calls may take long: do not hold the lock.
        let device = Device::for_memory_of(driver, owner, None)?;
        if device.uuid() == owner.uuid {
            let mut devices = lock(&self.devices);
            if !devices.iter().any(|other| known(&other)) {
                devices.push(device.clone());
            }
        }
        Ok(device)
    }

    fn is_own(&self) -> bool {
        self.process.is_current()
    }

    pub(super) fn check_fork(&self) -> Result<()> {
        match self.is_own() {
            true => Ok(()),
            false => Err(Error::Misuse {
                problem: format!(
                    "process {} made this connection to the broker, and process {} is a fork of it: connect again",
                    self.process.pid(),
                    process::id()
                ),
            }),
        }
    }

    /// An exchange for the requests of a reconnect itself.
    pub(super) fn exchange<'a>(&'a self, incoming: &'a mut Vec<u8>, answer_timeout: Duration) -> Exchange<'a> {
        Exchange { connection: self, incoming, answer_timeout, finished: false }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // In a fork, the socket is closed.
        if self.watcher.get().is_some() && self.is_own() {
            // The background thread shares the socket, which must not outlive the connection.
            let _ = self.socket.shared().shutdown(std::net::Shutdown::Both);
            self.wake_watcher();
        }
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
