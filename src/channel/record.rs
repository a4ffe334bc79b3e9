//! Records with descriptors over a `SOCK_SEQPACKET` socket.
//!
//! Handles `EINTR`, `EAGAIN`, deadlines, cancellation, resets, empty records and truncation for all users of records:
//! [`Channel`](super::Channel) for the wire's messages, and the tools for their JSON records.

use std::{
    fs, io,
    mem::{ManuallyDrop, MaybeUninit},
    net::Shutdown,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use nix::{
    cmsg_space,
    poll::PollFlags,
    sys::{
        resource::{Resource, getrlimit},
        socket::{ControlMessageOwned, MsgFlags, UnixCredentials, recvmsg},
    },
};
use rustix::{
    io::Errno,
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendFlags, SocketType,
        sockopt,
    },
};
use sendfd::SendWithFd;

use super::{Cancel, Peer, deadline_after};
use crate::{
    error::{Error, MemoryError, PeerError, Result, SocketError},
    sys::{above_standard, thread::spawn},
    wire::{MAX_FDS, ProtocolError, claimed_fds},
};

/// The pause before a retry of a send that reached the kernel's limit on descriptors in flight.
const IN_FLIGHT_PAUSE: Duration = Duration::from_millis(2);

/// A received record. Its bytes are in the caller's buffer.
#[derive(Debug)]
pub struct Record {
    /// Length in bytes, at least 1.
    pub length: usize,
    /// The received descriptors, all close-on-exec.
    pub fds: Vec<OwnedFd>,
}

/// The result of a receive call.
#[derive(Debug)]
pub enum Arrival {
    Record(Record),
    /// A record that is too long, or whose descriptors were truncated. The record is lost, and its descriptors are closed.
    Broken(ProtocolError),
    /// The peer has closed the connection, or sent an empty record.
    End,
}

/// A connected socket with timeout and cancellation.
#[derive(Debug)]
pub struct RecordSocket {
    socket: Arc<UnixStream>,
    timeout: Duration,
    cancel: Cancel,
    /// How long a receiver polls the socket before it sleeps.
    spin: Duration,
    /// Whether the receive call itself blocks, without a deadline.
    blocking: bool,
    /// The peer's pidfd: its exit ends a wait, even if a fork of the peer has a copy of its socket.
    process: Option<OwnedFd>,
}

impl RecordSocket {
    /// Makes a socket non-blocking: calls wait in poll(2), at most for `timeout`, or until `cancel`.
    ///
    /// # Errors
    /// [`Error::System`]. See fcntl(2).
    pub fn new(socket: OwnedFd, timeout: Duration, cancel: &Cancel) -> Result<Self> {
        let socket = UnixStream::from(socket);
        socket.set_nonblocking(true).map_err(|error| Error::system("make the socket non-blocking", error))?;
        let socket = Arc::new(socket);
        let cancel = cancel.clone();
        Ok(Self { socket, timeout, cancel, spin: Duration::ZERO, blocking: false, process: None })
    }

    /// Keeps a socket blocking: receiving is one system call without a deadline.
    pub fn blocking(socket: OwnedFd, cancel: &Cancel) -> Self {
        let socket = Arc::new(UnixStream::from(socket));
        let cancel = cancel.clone();
        Self { socket, timeout: Duration::MAX, cancel, spin: Duration::ZERO, blocking: true, process: None }
    }

    /// Sets how long a receiver polls the socket before it sleeps.
    pub fn spinning(self, spin: Duration) -> Self {
        Self { spin, ..self }
    }

    /// Lets the exit of the peer's process, by its pidfd, count as the end of the connection.
    pub fn watch_process(&mut self, process: Option<OwnedFd>) {
        self.process = process;
    }

    /// The limit of each wait.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Sets the limit of each wait.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// The request that cancels the socket's waits.
    pub fn cancel(&self) -> &Cancel {
        &self.cancel
    }

    /// Replaces the request that cancels the socket's waits.
    pub fn set_cancel(&mut self, cancel: &Cancel) {
        self.cancel = cancel.clone();
    }

    /// The socket, to shut it down from another thread. Not a duplicate: the process may have no descriptor left.
    pub fn shared(&self) -> Arc<UnixStream> {
        Arc::clone(&self.socket)
    }

    /// The socket, for calls that do not wait.
    pub fn stream(&self) -> &UnixStream {
        &self.socket
    }

    /// Replaces the socket with another under the same descriptor, and closes the old one. Concurrent sends and receives use either
    /// socket.
    ///
    /// # Errors
    /// [`Error::System`]. See dup3(2).
    pub fn replace(&self, by: &Self) -> Result<()> {
        crate::sys::replace(self.as_fd(), by.as_fd()).map_err(|error| Error::system("replace a socket", error))
    }

    /// Sends a record with its descriptors, which the caller keeps. `what` names the record in an error.
    ///
    /// # Errors
    /// [`PeerError::Gone`], [`PeerError::Timeout`], [`Error::Interrupted`]; [`Error::System`]. See sendmsg(2), unix(7).
    pub fn send(&self, what: &'static str, record: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        let purpose = "to send";
        let deadline = deadline_after(self.timeout);
        loop {
            match send_raw(&self.socket, record, fds) {
                Ok(()) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if !self.cancel.wait(self.as_fd(), PollFlags::POLLOUT, deadline)? {
                        return Err(Error::Peer(PeerError::Timeout { purpose, waited: self.timeout }));
                    }
                }
                // The limit applies to all sockets of a user, so other processes may be the cause.
                Err(error) if error.raw_os_error() == Some(nix::libc::ETOOMANYREFS) && Instant::now() < deadline => {
                    self.cancel.pause(IN_FLIGHT_PAUSE)?;
                }
                Err(error) if is_gone(&error) => return Err(Error::Peer(PeerError::Gone { pid: 0, purpose })),
                Err(error) => return Err(Error::system(format!("send {what} to the peer"), error)),
            }
        }
    }

    /// Sends a record without descriptors. Returns false if it would block.
    ///
    /// # Errors
    /// [`PeerError::Gone`]; [`Error::System`]. See send(2), unix(7).
    pub fn try_send(&self, what: &'static str, record: &[u8]) -> Result<bool> {
        loop {
            let sent = rustix::net::send(&*self.socket, record, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
            match sent.map_err(io::Error::from) {
                Ok(_) => return Ok(true),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if is_gone(&error) => {
                    return Err(Error::Peer(PeerError::Gone { pid: 0, purpose: "to send" }));
                }
                Err(error) => return Err(Error::system(format!("send {what} to the peer"), error)),
            }
        }
    }

    /// Receives a record into a buffer that is one byte longer than the longest record. `purpose` completes the error's sentence
    /// "waiting ...".
    ///
    /// # Errors
    /// [`PeerError::Timeout`] after the socket's timeout; [`PeerError::Gone`] if the peer has closed the connection, or sent an empty
    /// record; [`PeerError::Protocol`] for a record that is too long; [`MemoryError::TooManyDescriptors`] if this process's limit
    /// truncated the descriptors; [`Error::Interrupted`], [`Error::System`]. After any error, all received descriptors are closed.
    ///
    /// See recvmsg(2), unix(7).
    pub fn receive(&self, record: &mut [u8], purpose: &'static str) -> Result<Record> {
        self.receive_by(record, deadline_after(self.timeout), purpose)
    }

    /// Like [`RecordSocket::receive`], with a deadline.
    ///
    /// # Errors
    /// The errors of [`RecordSocket::receive`].
    pub fn receive_by(&self, record: &mut [u8], deadline: Instant, purpose: &'static str) -> Result<Record> {
        let (mut resets, mut exited) = (0, false);
        let mut asleep_from = None;
        loop {
            // Checked even while records are queued: a peer that never pauses must not prevent cancellation.
            self.cancel.check()?;
            match self.try_receive(record) {
                Ok(Arrival::Record(record)) => return Ok(record),
                Ok(Arrival::Broken(cut @ ProtocolError::FdsTruncated { .. })) => {
                    return Err(own_limit(claimed_fds(record)).unwrap_or(cut.into()));
                }
                Ok(Arrival::Broken(error)) => return Err(error.into()),
                Ok(Arrival::End) => return Err(Error::Peer(PeerError::Gone { pid: 0, purpose })),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let now = Instant::now();
                    if now < deadline && now < *asleep_from.get_or_insert(now + self.spin) {
                        // The peer may need this CPU.
                        thread::yield_now();
                        continue;
                    }
                    let own = (self.as_fd(), PollFlags::POLLIN);
                    let ready = match &self.process {
                        None => self.cancel.wait_any([own], deadline)?,
                        Some(process) => self.cancel.wait_any([own, (process.as_fd(), PollFlags::POLLIN)], deadline)?,
                    };
                    match ready {
                        None => return Err(Error::Peer(PeerError::Timeout { purpose, waited: self.timeout })),
                        Some(0) => {}
                        Some(_) if exited => return Err(Error::Peer(PeerError::Gone { pid: 0, purpose })),
                        // Behind its last records.
                        Some(_) => exited = true,
                    }
                }
                // ECONNRESET is reported once, before queued records: keep reading.
                Err(error) if is_gone(&error) && resets == 0 => resets += 1,
                Err(error) if is_gone(&error) => return Err(Error::Peer(PeerError::Gone { pid: 0, purpose })),
                Err(error) => return Err(Error::system("receive from the peer", error)),
            }
        }
    }

    /// Calls receive once. Does not wait unless the socket is blocking.
    pub fn try_receive(&self, record: &mut [u8]) -> io::Result<Arrival> {
        let most = record.len().saturating_sub(1);
        let wait = if self.blocking { RecvFlags::empty() } else { RecvFlags::DONTWAIT };
        let Raw { bytes, flags, fds } = receive_raw(&self.socket, record, wait)?;
        Ok(if bytes == 0 {
            Arrival::End
        } else if flags.contains(ReturnFlags::TRUNC) || bytes > most {
            Arrival::Broken(ProtocolError::LongRecord { most })
        } else if flags.contains(ReturnFlags::CTRUNC) {
            Arrival::Broken(ProtocolError::FdsTruncated { most: MAX_FDS })
        } else {
            Arrival::Record(Record { length: bytes, fds })
        })
    }

    /// Shuts down writing: the peer receives all sent records, then the close. See shutdown(2).
    pub fn shut_down_writing(&self) -> io::Result<()> {
        self.socket.shutdown(Shutdown::Write)
    }

    /// Closes the connection: the peer sees the end even if a fork of this process has a copy of the socket. Does not block: the kernel closes
    /// the descriptors in the queue too, which can block, so a separate thread closes a socket that may have some.
    pub fn close(self) {
        if is_drained(&self) {
            return;
        }
        let socket = ManuallyDrop::new(self);
        if let Err(error) = spawn("vmmfd-closer", move || drop(ManuallyDrop::into_inner(socket))) {
            tracing::error!(%error, "a connection with descriptors in its queue stays open");
        }
    }

    /// Receives and discards records. Returns true when the peer has closed the connection, false after the deadline or a cancellation.
    pub fn drain_until(&self, record: &mut [u8], deadline: Instant) -> bool {
        loop {
            match self.try_receive(record) {
                Ok(Arrival::End) => return true,
                Ok(_) if Instant::now() < deadline => {}
                // The peer never pauses.
                Ok(_) => return false,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    match self.cancel.wait(self.as_fd(), PollFlags::POLLIN, deadline) {
                        Ok(true) => {}
                        Ok(false) | Err(_) => return false,
                    }
                }
                Err(_) => return true,
            }
        }
    }
}

impl AsFd for RecordSocket {
    /// Readable if a record has arrived, or the peer has closed the connection.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Sends a record with its descriptors. A socket of type `SOCK_SEQPACKET` never raises SIGPIPE, which ends programs that do not ignore it:
/// see [`check_type`].
///
/// # Errors
/// See sendmsg(2): `EINVAL` for more than [`MAX_FDS`] descriptors, `EPIPE` if the peer has closed the connection.
pub(crate) fn send_raw(socket: &UnixStream, record: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let fds: Vec<_> = fds.iter().map(AsRawFd::as_raw_fd).collect();
    socket.send_with_fd(record, &fds).map(drop)
}

/// The result of one system call, possibly truncated.
pub(crate) struct Raw {
    /// Number of bytes. 0 if the peer has closed the connection, or sent an empty record.
    pub bytes: usize,
    /// Reports truncation.
    pub flags: ReturnFlags,
    /// The received descriptors, all close-on-exec.
    pub fds: Vec<OwnedFd>,
}

/// Receives a record with the largest number of descriptors that the kernel passes at once, even if none is expected, to own all of them.
///
/// # Errors
/// See recvmsg(2).
pub(crate) fn receive_raw(socket: impl AsFd, record: &mut [u8], flags: RecvFlags) -> io::Result<Raw> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [io::IoSliceMut::new(record)];
    let received = rustix::net::recvmsg(socket, &mut parts, &mut ancillary, RecvFlags::CMSG_CLOEXEC | flags)?;
    let fds = ancillary
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        })
        .flatten()
        .map(above_standard)
        .collect::<io::Result<_>>()?;
    Ok(Raw { bytes: received.bytes, flags: received.flags, fds })
}

/// The next item in a socket's queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    Record {
        /// Whether it carries descriptors.
        descriptors: bool,
        /// The process that sent it. `None` if the record was sent before the socket had `SO_PASSCRED`.
        sender: Option<Peer>,
    },
    /// The peer has closed the connection.
    End,
}

/// Inspects the next record of a socket with `SO_PASSCRED`, without removing it. Does not block, and installs no descriptor.
///
/// # Errors
/// `WouldBlock` if no record is there and the connection is open. See recvmsg(2).
pub(crate) fn peek(socket: impl AsFd) -> io::Result<Next> {
    let mut byte = [0];
    let mut parts = [io::IoSliceMut::new(&mut byte)];
    // The credentials leave no room for descriptors: the kernel installs none, and reports the truncation.
    let mut space = cmsg_space!(UnixCredentials);
    let flags = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_CMSG_CLOEXEC;
    let seen = recvmsg::<()>(socket.as_fd().as_raw_fd(), &mut parts, Some(&mut space), flags)?;
    let descriptors = seen.flags.contains(MsgFlags::MSG_CTRUNC);
    // Not with rustix, whose type for a pid can't be 0: the kernel reports 0 for a process that is not visible here.
    let mut credentials = seen.cmsgs().into_iter().flatten().filter_map(|message| match message {
        ControlMessageOwned::ScmCredentials(found) => Some(Peer { pid: found.pid(), uid: found.uid() }),
        _ => None,
    });
    let sender = credentials.next();
    let is_record = seen.bytes > 0 || sender.is_some() || descriptors;
    let sender = sender.filter(|sender| sender.pid > 0);
    Ok(if is_record { Next::Record { descriptors, sender } } else { Next::End })
}

/// Inspects the next record of a socket without `SO_PASSCRED`, as [`peek`] does.
///
/// # Errors
/// The errors of [`peek`].
pub(crate) fn peek_unsigned(socket: impl AsFd) -> io::Result<Next> {
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let mut nothing = RecvAncillaryBuffer::default();
    let seen = rustix::net::recvmsg(socket, &mut [io::IoSliceMut::new(&mut [0])], &mut nothing, flags)?;
    let descriptors = seen.flags.contains(ReturnFlags::CTRUNC);
    Ok(if seen.bytes > 0 || descriptors { Next::Record { descriptors, sender: None } } else { Next::End })
}

/// Whether the next record of a socket without `SO_PASSCRED` carries descriptors. Does not remove it, does not block, and installs no
/// descriptor: closing a duplicate could block.
pub(crate) fn has_descriptors(socket: impl AsFd) -> bool {
    matches!(peek_unsigned(socket), Ok(Next::Record { descriptors: true, .. }))
}

/// The most queued records that [`is_drained`] discards.
const MAX_DISCARDED: usize = 128;

/// Shuts a connection down and discards queued records without descriptors. Returns whether the queue is empty, so that close(2) can't
/// block. Does not block.
pub(crate) fn is_drained(socket: &impl AsFd) -> bool {
    // From here on, the peer's sends fail and the queue can't grow.
    let ended = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
    // Lets `peek` distinguish an empty record from the end of the stream.
    if ended.and_then(|()| sockopt::set_socket_passcred(socket, true)).is_err() {
        return false;
    }
    for _ in 0..MAX_DISCARDED {
        match peek(socket) {
            Ok(Next::End) => return true,
            Ok(Next::Record { descriptors: true, .. }) => return false,
            Ok(Next::Record { descriptors: false, .. }) => {
                if rustix::net::recv(socket, &mut [0; 1][..], RecvFlags::DONTWAIT).is_err() {
                    return false;
                }
            }
            // A reset is reported once, before queued records.
            Err(error) if is_gone(&error) || error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return false,
        }
    }
    false
}

/// Checks that a socket preserves record boundaries and passes descriptors.
pub(crate) fn check_type(socket: &impl AsFd) -> Result<()> {
    let unfit = |problem: &str| Err(Error::Socket(SocketError::Unfit { problem: problem.to_owned() }));
    match (sockopt::socket_domain(socket), sockopt::socket_type(socket)) {
        (Ok(AddressFamily::UNIX), Ok(SocketType::SEQPACKET)) => Ok(()),
        (Ok(_), Ok(_)) => unfit("it is not of type SOCK_SEQPACKET and family AF_UNIX"),
        (Err(Errno::NOTSOCK), _) => unfit("it is not a socket"),
        (Err(errno), _) | (_, Err(errno)) => Err(Error::system("inspect a socket", errno)),
    }
}

/// Whether an error of the socket means that the peer has closed the connection.
pub(crate) fn is_gone(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe | io::ErrorKind::NotConnected)
}

/// The error for this process's descriptor limit, if the limit, not the peer, truncated a record's `claimed` descriptors.
fn own_limit(claimed: usize) -> Option<Error> {
    let (limit, _) = getrlimit(Resource::RLIMIT_NOFILE).ok()?;
    let used = match fs::read_dir("/proc/self/fd") {
        // The list's own descriptor is in it.
        Ok(list) => list.count() as u64 - 1,
        Err(error) if error.raw_os_error() == Some(Errno::MFILE.raw_os_error()) => limit,
        Err(_) => return None,
    };
    let needed = used + claimed.clamp(1, MAX_FDS) as u64;
    (needed > limit).then_some(Error::Memory(MemoryError::TooManyDescriptors { needed, limit }))
}

#[cfg(test)]
mod tests;
