//! A connection to the broker: one request at a time, and its answer.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    process,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use crate::{
    channel::{
        Peer, connect_socket, deadline_after,
        record::{RecordSocket, check_type},
    },
    driver::Driver,
    error::{BrokerError, Error, ErrorCode, PeerError, ProtocolError, Result, SocketError},
    memory::{Device, DeviceIdentity},
    session::Config,
    wire::{
        HEADER_LENGTH, Hello, MAX_BODY, VERSION,
        broker::{BROKER, Message, NO_BACKEND},
    },
};

/// How long an answer is polled for before the thread sleeps. The broker has most often to be woken for a request, and then takes
/// some microseconds; to be woken in turn would cost as much again.
const SPIN: Duration = Duration::from_micros(150);

/// A connection over which a broker answered a hello.
#[derive(Debug)]
pub(super) struct Connection {
    socket: RecordSocket,
    peer: Peer,
    /// The process that made it: a fork shares the socket and must not use it.
    pid: u32,
    /// The devices that memory was opened for: looking for one asks the driver for all.
    devices: Mutex<Vec<Device>>,
    /// The record received last. Held from a request until its whole answer has come.
    incoming: Mutex<Vec<u8>>,
}

/// A request that was sent, and the right to its answers.
pub(super) struct Exchange<'a> {
    connection: &'a Connection,
    incoming: MutexGuard<'a, Vec<u8>>,
    /// How long the first answer may take.
    patience: Duration,
    finished: bool,
}

impl Connection {
    /// Connects to the broker at a path. Waits up to the config's timeout for one to listen.
    pub(super) fn connect(path: &Path, config: &Config) -> Result<Self> {
        let cancel = config.cancel()?;
        let (socket, peer) = connect_socket(path, config.timeout, &config.trust, &cancel).map_err(no_broker)?;
        Self::greet(socket, peer, config)
    }

    /// A connection over a socket that is connected.
    pub(super) fn over(socket: OwnedFd, config: &Config) -> Result<Self> {
        check_type(&socket)?;
        let peer = Peer::of(&socket)?;
        config.trust.check(peer)?;
        Self::greet(socket, peer, config)
    }

    fn greet(socket: OwnedFd, peer: Peer, config: &Config) -> Result<Self> {
        let socket = RecordSocket::new(socket, config.timeout, &config.cancel()?)?.spinning(SPIN);
        // A byte more than the longest record, so that a longer one shows.
        let incoming = Mutex::new(vec![0; HEADER_LENGTH + MAX_BODY + 1]);
        let connection = Self { socket, peer, pid: process::id(), devices: Mutex::default(), incoming };
        let hello = Message::Hello(Hello {
            version: VERSION,
            capabilities: vec![BROKER.to_owned()],
            backend: NO_BACKEND.to_owned(),
            pid: process::id(),
            timeout_ms: u64::try_from(config.timeout.as_millis()).unwrap_or(u64::MAX).max(1),
        });
        let mut exchange = connection.begin(&hello, &[], Duration::ZERO)?;
        match exchange.receive("for the broker's hello")? {
            (Message::Hello(hello), _) if hello.capabilities.iter().any(|named| named == BROKER) => {}
            (Message::Hello(_), _) => {
                let message = "the process at the other end is no broker: its hello lacks the capability `broker`";
                return Err(Error::Peer(PeerError::Mismatch { code: ErrorCode::Object, message: message.to_owned() }));
            }
            (other, _) => return Err(unexpected(&other, "hello")),
        }
        exchange.finish();
        Ok(connection)
    }

    /// The process at the other end.
    pub(super) fn peer(&self) -> Peer {
        self.peer
    }

    /// Sends a request. Blocks while another thread's request has not been answered.
    pub(super) fn request(&self, message: &Message, fds: &[BorrowedFd<'_>], wait: Duration) -> Result<Exchange<'_>> {
        self.begin(message, fds, wait)
    }

    fn begin(&self, message: &Message, fds: &[BorrowedFd<'_>], wait: Duration) -> Result<Exchange<'_>> {
        self.check_fork()?;
        let incoming = self.incoming.lock().unwrap_or_else(PoisonError::into_inner);
        let patience = self.socket.timeout().saturating_add(wait);
        let mut exchange = Exchange { connection: self, incoming, patience, finished: false };
        match self.send(message, fds) {
            Ok(()) => Ok(exchange),
            Err(gone @ Error::Peer(PeerError::Gone { .. })) => match exchange.receive("for the reason") {
                // The broker has said why before it closed the connection.
                Err(reported @ Error::Peer(PeerError::Reported { .. })) => Err(reported),
                _ => Err(gone),
            },
            Err(error) => Err(error),
        }
    }

    /// Sends a message that has no answer, or a further record of a request.
    pub(super) fn send(&self, message: &Message, fds: &[BorrowedFd<'_>]) -> Result<()> {
        self.check_fork()?;
        let (kind, want, got) = (message.name(), message.fd_count(), fds.len());
        if want != got {
            return Err(ProtocolError::FdCount { kind, want, claimed: want as u32, got }.into());
        }
        let mut record = Vec::with_capacity(512);
        message.encode_into(&mut record)?;
        tracing::debug!(kind, fds = got, "to the broker");
        self.socket.send(kind, &record, fds)
    }

    /// The device of this process that is to use memory of `owner`, if none is named.
    pub(super) fn device_of(&self, driver: &Driver, owner: &DeviceIdentity) -> Result<Device> {
        let mut devices = self.devices.lock().unwrap_or_else(PoisonError::into_inner);
        let known = |device: &&Device| device.uuid() == owner.uuid && device.driver() == driver;
        if let Some(device) = devices.iter().find(known) {
            return Ok(device.clone());
        }
        let device = Device::for_memory_of(driver, owner, None)?;
        if device.uuid() == owner.uuid {
            devices.push(device.clone());
        }
        Ok(device)
    }

    fn check_fork(&self) -> Result<()> {
        let pid = process::id();
        match pid == self.pid {
            true => Ok(()),
            false => Err(Error::Misuse {
                problem: format!(
                    "process {} made this connection to the broker, and process {pid} is a fork of it: connect again",
                    self.pid
                ),
            }),
        }
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Exchange<'_> {
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
        loop {
            let deadline = until.unwrap_or_else(|| deadline_after(self.patience));
            let record = self.connection.socket.receive_by(&mut self.incoming, deadline, purpose)?;
            let message = Message::decode(&self.incoming[..record.length], record.fds.len())?;
            tracing::debug!(kind = message.name(), fds = record.fds.len(), "from the broker");
            match message {
                Message::Busy(_) => {}
                Message::Refused(refusal) => {
                    self.finished = true;
                    return Err(BrokerError { code: refusal.code, message: refusal.message }.into());
                }
                Message::Error(failure) => {
                    return Err(Error::Peer(PeerError::Reported { code: failure.code, message: failure.message }));
                }
                message => return Ok((message, record.fds)),
            }
        }
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

/// What came does not belong there.
pub(super) fn unexpected(got: &Message, want: &'static str) -> Error {
    ProtocolError::Unexpected { got: got.name(), want }.into()
}

/// The error of a socket without a listener, in words that fit a broker.
fn no_broker(error: Error) -> Error {
    match error {
        Error::Socket(SocketError::Absent { path, waited }) => Error::Socket(SocketError::NoBroker { path, waited }),
        other => other,
    }
}
