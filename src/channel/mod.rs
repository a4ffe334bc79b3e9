//! One record at a time, with its descriptors, to a peer whose user is known.
//!
//! Descriptors are sent with `sendfd`, which passes no `MSG_NOSIGNAL`: Rust programs ignore SIGPIPE from their start,
//! and a program that does not must ignore it before it uses this module. They are received with rustix, which owns each
//! one at once, asks for close-on-exec and shows truncation.

mod cancel;
mod socket;

use std::{
    io,
    mem::MaybeUninit,
    net::Shutdown,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
        unix::net::UnixStream,
    },
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use nix::{
    poll::PollFlags,
    sys::{
        resource::{Resource, getrlimit},
        socket::{getsockopt, sockopt::PeerCredentials},
    },
};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendFlags, SocketFlags,
    SocketType,
};
use sendfd::SendWithFd;

pub(crate) use self::cancel::eventfd;
pub use self::{
    cancel::Cancel,
    socket::{Listener, connect, socket_path},
};
use crate::{
    error::{Error, MemoryError, PeerError, Result},
    wire::{HEADER_LENGTH, MAX_BODY, MAX_FDS, Message, ProtocolError},
};

/// The process at the other end, as the kernel saw it when the connection was made (`SO_PEERCRED`, unix(7)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// Its process, or 0 if this PID namespace does not see it.
    pub pid: i32,
    /// Its effective user; the overflow uid (65534) if this user namespace does not know it.
    pub uid: u32,
}

impl Peer {
    fn of(socket: &impl AsFd) -> Result<Self> {
        let credentials = getsockopt(&socket.as_fd(), PeerCredentials)
            .map_err(|errno| Error::system("read the peer's credentials", errno))?;
        Ok(Self { pid: credentials.pid(), uid: credentials.uid() })
    }
}

/// Which users may be at the other end: one's own, root, and those named here.
#[derive(Debug, Clone, Default)]
pub struct Trust {
    /// The users allowed besides.
    pub uids: Vec<u32>,
}

impl Trust {
    /// # Errors
    /// [`PeerError::NotAllowed`].
    pub fn check(&self, peer: Peer) -> Result<()> {
        let own = nix::unistd::geteuid().as_raw();
        if peer.uid == own || peer.uid == 0 || self.uids.contains(&peer.uid) {
            return Ok(());
        }
        Err(Error::Peer(PeerError::NotAllowed { pid: peer.pid, uid: peer.uid }))
    }
}

/// How long a receiver looks again and again before it goes to sleep: to be woken takes about as long. A peer that answers at
/// once, or sends one record after the other, is heard without that.
const AWAKE: Duration = Duration::from_micros(20);

/// A connection. Every wait ends after `timeout`, or when it is cancelled.
#[derive(Debug)]
pub struct Channel {
    socket: Arc<UnixStream>,
    peer: Peer,
    timeout: Duration,
    cancel: Cancel,
    /// When the last record was sent, or the connection made.
    sent: Instant,
    /// What was received last.
    record: Vec<u8>,
    /// What was sent last.
    outgoing: Vec<u8>,
}

impl Channel {
    /// A channel over a connected `SOCK_SEQPACKET` socket.
    ///
    /// # Errors
    /// [`Error::Socket`] for anything else than such a socket; [`Error::System`].
    pub fn new(socket: OwnedFd, timeout: Duration, cancel: &Cancel) -> Result<Self> {
        socket::check_type(&socket)?;
        let peer = Peer::of(&socket)?;
        // Only its descriptor is used: `sendfd` knows no other type.
        let socket = Arc::new(UnixStream::from(socket));
        socket.set_nonblocking(true).map_err(|error| Error::system("make the socket non-blocking", error))?;
        let record = vec![0; HEADER_LENGTH + MAX_BODY + 1];
        let (cancel, outgoing) = (cancel.clone(), Vec::new());
        Ok(Self { socket, peer, timeout, cancel, sent: Instant::now(), record, outgoing })
    }

    /// Two connected sockets of the type that sessions need: for both ends in one process, or in one that is started with an end.
    ///
    /// # Errors
    /// [`Error::System`]. See socketpair(2).
    pub fn socket_pair() -> Result<(OwnedFd, OwnedFd)> {
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .map_err(|errno| Error::system("make a pair of sockets", errno))
    }

    /// Who is at the other end.
    pub fn peer(&self) -> Peer {
        self.peer
    }

    /// How long it waits.
    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// What cancels its waits.
    pub fn cancel(&self) -> &Cancel {
        &self.cancel
    }

    /// Sends a message with its descriptors, which stay the caller's.
    ///
    /// # Errors
    /// [`PeerError::Protocol`] if the message is too large or has another number of descriptors (nothing is sent);
    /// [`PeerError::Reported`] if the peer had reported an error; [`PeerError::Gone`], [`PeerError::Timeout`],
    /// [`Error::Interrupted`], [`Error::System`].
    ///
    /// See sendmsg(2), unix(7).
    pub fn send(&mut self, message: &Message, fds: &[BorrowedFd<'_>]) -> Result<()> {
        let (kind, want, got) = (message.name(), message.fd_count(), fds.len());
        if want != got {
            return Err(ProtocolError::FdCount { kind, want, claimed: want as u32, got }.into());
        }
        message.encode_into(&mut self.outgoing)?;
        let fds: Vec<RawFd> = fds.iter().map(|fd| fd.as_raw_fd()).collect();
        let purpose = "to send";
        let deadline = self.deadline();
        loop {
            let sent = if fds.is_empty() {
                rustix::net::send(&*self.socket, &self.outgoing, SendFlags::NOSIGNAL).map_err(io::Error::from)
            } else {
                self.socket.send_with_fd(&self.outgoing, &fds)
            };
            match sent {
                Ok(_) => {
                    tracing::debug!(kind, fds = got, pid = self.peer.pid, "sent");
                    self.sent = Instant::now();
                    return Ok(());
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if !self.cancel.wait(self.socket.as_fd(), PollFlags::POLLOUT, deadline)? {
                        return Err(Error::Peer(PeerError::Timeout { purpose, waited: self.timeout }));
                    }
                }
                // The kernel's bound on descriptors in flight, of all of a user's sockets: it passes.
                Err(error) if error.raw_os_error() == Some(nix::libc::ETOOMANYREFS) && Instant::now() < deadline => {
                    self.cancel.pause(Duration::from_millis(2))?;
                }
                Err(error) if gone(&error) => {
                    return Err(self.last_words().unwrap_or(Error::Peer(PeerError::Gone { purpose })));
                }
                Err(error) => return Err(Error::system(format!("send {kind} to the peer"), error)),
            }
        }
    }

    /// Receives a message with its descriptors. `purpose` completes the sentence "waiting ...", for the error.
    ///
    /// # Errors
    /// [`PeerError::Timeout`] after the channel's timeout; [`PeerError::Gone`], also for an empty record;
    /// [`PeerError::Protocol`] for whatever breaks the protocol; [`Error::Interrupted`], [`Error::System`]. On any of them
    /// every descriptor that came is closed.
    ///
    /// See recvmsg(2), unix(7).
    pub fn receive(&mut self, purpose: &'static str) -> Result<(Message, Vec<OwnedFd>)> {
        self.receive_by(self.deadline(), purpose)
    }

    /// As [`Channel::receive`], until a deadline of the caller's.
    ///
    /// # Errors
    /// As [`Channel::receive`].
    pub(crate) fn receive_by(&mut self, deadline: Instant, purpose: &'static str) -> Result<(Message, Vec<OwnedFd>)> {
        let mut resets = 0;
        let mut asleep_from = None;
        loop {
            // Here too, and not only where there is nothing to read: a peer who never pauses must not hold this side.
            self.cancel.check()?;
            match self.take_record() {
                Ok(None) => return Err(Error::Peer(PeerError::Gone { purpose })),
                Ok(Some(Err(cut @ ProtocolError::FdsTruncated { .. }))) => {
                    return Err(own_limit().unwrap_or(cut.into()));
                }
                Ok(Some(received)) => {
                    let (message, fds) = received?;
                    tracing::debug!(kind = message.name(), fds = fds.len(), pid = self.peer.pid, "received");
                    return Ok((message, fds));
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let now = Instant::now();
                    if now < deadline && now < *asleep_from.get_or_insert(now + AWAKE) {
                        // The peer may need this CPU.
                        thread::yield_now();
                    } else if !self.cancel.wait(self.socket.as_fd(), PollFlags::POLLIN, deadline)? {
                        return Err(Error::Peer(PeerError::Timeout { purpose, waited: self.timeout }));
                    }
                }
                // ECONNRESET is reported once, ahead of queued data: read on after it.
                Err(error) if gone(&error) && resets == 0 => resets += 1,
                Err(error) if gone(&error) => return Err(Error::Peer(PeerError::Gone { purpose })),
                Err(error) => return Err(Error::system("receive from the peer", error)),
            }
        }
    }

    /// Ends the connection so that the last record arrives: shuts down writing, then reads to the end, or until the peer
    /// has had the channel's timeout since that record, or `patience` if that is less. Says whether the peer has gone.
    ///
    /// See shutdown(2): to close with records unread would reset the connection.
    pub fn finish(mut self, patience: Duration) -> bool {
        self.see_off(patience)
    }

    /// Shuts down writing: all that there is to say was said.
    pub(crate) fn hang_up(&mut self) {
        // The peer may be gone.
        let _ = self.socket.shutdown(Shutdown::Write);
    }

    /// Counts the time that the peer is given to leave from now on, and not from the last record.
    pub(crate) fn renew(&mut self) {
        self.sent = Instant::now();
    }

    /// Reads and drops a record, without waiting for one. Returns whether the peer has gone.
    pub(crate) fn discard(&mut self) -> bool {
        use io::ErrorKind::{Interrupted, WouldBlock};
        match self.take_record() {
            Ok(Some(_)) => false,
            Err(error) => !matches!(error.kind(), Interrupted | WouldBlock),
            Ok(None) => true,
        }
    }

    /// As [`Channel::finish`], for one that is not closed yet.
    pub(crate) fn see_off(&mut self, patience: Duration) -> bool {
        if self.socket.shutdown(Shutdown::Write).is_err() {
            return true;
        }
        let deadline = self.sent.checked_add(self.timeout.min(patience)).unwrap_or_else(|| self.deadline());
        loop {
            match self.take_record() {
                Ok(Some(_)) if Instant::now() < deadline => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    match self.cancel.wait(self.socket.as_fd(), PollFlags::POLLIN, deadline) {
                        Ok(true) => {}
                        Ok(false) | Err(_) => return false,
                    }
                }
                // It sends on and on.
                Ok(Some(_)) => return false,
                Ok(None) | Err(_) => return true,
            }
        }
    }

    /// The socket, to shut it down from another thread. No second descriptor: there may be none left.
    pub(crate) fn socket(&self) -> Arc<UnixStream> {
        Arc::clone(&self.socket)
    }

    fn deadline(&self) -> Instant {
        deadline_after(self.timeout)
    }

    /// The error that a peer who is gone may have left.
    fn last_words(&mut self) -> Option<Error> {
        // Behind a reset and signs of life; bounded, for the peer may still be sending.
        for _ in 0..64 {
            match self.take_record() {
                Ok(Some(Ok((Message::Error(failure), _)))) => {
                    return Some(Error::Peer(PeerError::Reported { code: failure.code, message: failure.message }));
                }
                Ok(Some(_)) => {}
                Err(error) if gone(&error) => {}
                Ok(None) | Err(_) => return None,
            }
        }
        None
    }

    /// Takes one record off the socket without waiting; `None` is the end, or an empty record, which means the same.
    #[allow(clippy::type_complexity)]
    fn take_record(&mut self) -> io::Result<Option<Result<(Message, Vec<OwnedFd>), ProtocolError>>> {
        // Room for the most that the kernel passes at once, also where none is expected: so each is owned, and closed.
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [io::IoSliceMut::new(&mut self.record)];
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let received = rustix::net::recvmsg(&*self.socket, &mut parts, &mut ancillary, flags)?;
        let fds: Vec<OwnedFd> = ancillary
            .drain()
            .filter_map(|message| match message {
                RecvAncillaryMessage::ScmRights(fds) => Some(fds),
                _ => None,
            })
            .flatten()
            .collect();
        if received.bytes == 0 {
            return Ok(None);
        }
        if received.flags.contains(ReturnFlags::TRUNC) || received.bytes == self.record.len() {
            return Ok(Some(Err(ProtocolError::LongRecord { most: HEADER_LENGTH + MAX_BODY })));
        }
        if received.flags.contains(ReturnFlags::CTRUNC) {
            return Ok(Some(Err(ProtocolError::FdsTruncated { most: MAX_FDS })));
        }
        Ok(Some(Message::decode(&self.record[..received.bytes], fds.len()).map(|message| (message, fds))))
    }
}

impl AsFd for Channel {
    /// Readable when there is something to receive, or the peer has gone.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// The limit of this process that cut descriptors off, if it was that and not the peer.
fn own_limit() -> Option<Error> {
    let (limit, _) = getrlimit(Resource::RLIMIT_NOFILE).ok()?;
    let needed = std::fs::read_dir("/proc/self/fd").ok()?.count() as u64 + MAX_FDS as u64;
    (needed > limit).then_some(Error::Memory(MemoryError::TooManyDescriptors { needed, limit }))
}

fn gone(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe | io::ErrorKind::NotConnected)
}

/// A moment so far off as `time` says, or as far as the clock goes.
pub(crate) fn deadline_after(time: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(time).unwrap_or_else(|| now + Duration::from_secs(u32::MAX.into()))
}
