//! A socket between two processes of a bench: orders and answers as JSON, and bare records that are timed.

use std::{
    io::{self, IoSliceMut},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    time::Duration,
};

use rustix::{
    io::Errno,
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, SocketFlags, SocketType,
        socketpair,
        sockopt::{Timeout, set_socket_timeout},
    },
    time::{ClockId, clock_gettime},
};
use sendfd::SendWithFd;
use serde::{Serialize, de::DeserializeOwned};

use crate::error::{Error, PeerError, ProtocolError, Result};

/// The longest record.
const MAX_RECORD: usize = 64 << 10;

/// Nanoseconds of the clock that all processes of a machine share.
pub(super) fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs()
}

/// One end.
#[derive(Debug)]
pub(super) struct Line {
    socket: UnixStream,
    /// How long one call waits; without it as long as it takes.
    timeout: Option<Duration>,
}

impl Line {
    /// Two ends.
    pub(super) fn pair(timeout: Duration) -> Result<(Self, OwnedFd)> {
        let (own, other) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .map_err(|errno| Error::system("make a pair of sockets", errno))?;
        Ok((Self::of(own, Some(timeout))?, other))
    }

    /// The end that a process was started with. It waits without a limit for what it is to do: the other pair may be at work
    /// meanwhile, and nobody outlives who asks.
    pub(super) fn of(socket: OwnedFd, timeout: Option<Duration>) -> Result<Self> {
        for side in [Timeout::Recv, Timeout::Send] {
            set_socket_timeout(&socket, side, timeout)
                .map_err(|errno| Error::system("set a socket's timeout", errno))?;
        }
        // Only its descriptor is used: `sendfd` knows no other type.
        Ok(Self { socket: UnixStream::from(socket), timeout })
    }

    pub(super) fn send(&self, say: &impl Serialize) -> Result<()> {
        let record = serde_json::to_vec(say).map_err(|error| ProtocolError::Content(error.to_string()))?;
        self.send_record(&record, None)
    }

    pub(super) fn receive<T: DeserializeOwned>(&self) -> Result<T> {
        let mut record = vec![0; MAX_RECORD];
        let (length, _) = self.receive_record(&mut record)?;
        serde_json::from_slice(&record[..length])
            .map_err(|error| ProtocolError::Body { kind: "record", reason: error.to_string() }.into())
    }

    /// Sends a bare record, perhaps with a descriptor: one system call.
    pub(super) fn send_record(&self, record: &[u8], fd: Option<BorrowedFd<'_>>) -> Result<()> {
        let sent = match fd {
            Some(fd) => self.socket.send_with_fd(record, &[fd.as_raw_fd()]),
            None => rustix::net::send(&self.socket, record, SendFlags::NOSIGNAL).map_err(io::Error::from),
        };
        sent.map(drop).map_err(|error| match error.kind() {
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => {
                Error::Peer(PeerError::Gone { purpose: "to send" })
            }
            io::ErrorKind::WouldBlock => self.timed_out("to send"),
            _ => Error::system("send to another process", error),
        })
    }

    /// Receives a bare record: one system call, which waits.
    pub(super) fn receive_record(&self, record: &mut [u8]) -> Result<(usize, Option<OwnedFd>)> {
        let purpose = "for another process of the bench";
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let received = loop {
            let mut parts = [IoSliceMut::new(record)];
            match rustix::net::recvmsg(&self.socket, &mut parts, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Err(self.timed_out(purpose)),
                Err(Errno::CONNRESET) => return Err(Error::Peer(PeerError::Gone { purpose })),
                Err(errno) => return Err(Error::system("receive from another process", errno)),
                Ok(received) => break received,
            }
        };
        let fds = ancillary.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
            _ => None,
        });
        if received.bytes == 0 { Err(Error::Peer(PeerError::Gone { purpose })) } else { Ok((received.bytes, fds)) }
    }

    fn timed_out(&self, purpose: &'static str) -> Error {
        Error::Peer(PeerError::Timeout { purpose, waited: self.timeout.unwrap_or_default() })
    }
}

impl AsFd for Line {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
