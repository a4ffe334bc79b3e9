//! A connection to a broker whose records are written by hand.

use std::{io::IoSliceMut, mem::MaybeUninit, os::fd::RawFd};

use nix::poll::{PollFd, PollFlags, poll};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendFlags, SocketAddrUnix};
use sendfd::SendWithFd;
use vmmfd::wire::{
    HEADER_LENGTH, Hello, MAX_BODY, MAX_FDS,
    broker::{BROKER, LeaseHeader, Measure, Measured, Message, NO_BACKEND, Published, PutHeader, Refusal},
};

use crate::{
    conversation::{PATIENCE, seqpacket},
    support::{material::get_message, prelude::*},
};

/// A connection to a broker, with every record written by hand.
#[derive(Debug)]
pub(crate) struct Raw(pub(crate) UnixStream);

impl Raw {
    /// A connection without a hello.
    pub(crate) fn dial(path: &Path) -> io::Result<Self> {
        let socket = seqpacket();
        rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
        Self::over(socket)
    }

    /// A connection made by another process.
    pub(crate) fn over(socket: OwnedFd) -> io::Result<Self> {
        let socket = UnixStream::from(socket);
        socket.set_read_timeout(Some(PATIENCE))?;
        socket.set_write_timeout(Some(PATIENCE))?;
        Ok(Self(socket))
    }

    pub(crate) fn hello() -> Message {
        let (capabilities, backend) = (vec![BROKER.to_owned()], NO_BACKEND.to_owned());
        Message::Hello(Hello { version: 1, capabilities, backend, pid: process::id(), timeout_ms: 20_000 })
    }

    /// A connection after the exchange of hellos, and the server's pid.
    pub(crate) fn greeted(path: &Path) -> io::Result<(Self, Pid)> {
        let raw = Self::dial(path)?;
        raw.send(&Self::hello(), &[])?;
        match raw.receive()? {
            Some((Message::Hello(hello), _)) => Ok((raw, Pid::from_raw(hello.pid.cast_signed()))),
            other => Err(io::Error::other(format!("{other:?}"))),
        }
    }

    pub(crate) fn send(&self, message: &Message, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut record = Vec::new();
        message.encode_into(&mut record).map_err(io::Error::other)?;
        self.send_bytes(&record, fds)
    }

    pub(crate) fn send_bytes(&self, record: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let fds: Vec<RawFd> = fds.iter().map(|fd| fd.as_raw_fd()).collect();
        if fds.is_empty() {
            rustix::net::send(&self.0, record, SendFlags::NOSIGNAL)?;
        } else {
            self.0.send_with_fd(record, &fds)?;
        }
        Ok(())
    }

    /// The next record, or `None` if the connection is closed.
    pub(crate) fn receive(&self) -> io::Result<Option<(Message, Vec<OwnedFd>)>> {
        let mut record = vec![0; HEADER_LENGTH + MAX_BODY];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(&mut record)];
        let received = rustix::net::recvmsg(&self.0, &mut parts, &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
        let rights = ancillary.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        });
        let fds: Vec<OwnedFd> = rights.flatten().collect();
        assert!(!received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC), "{:?}", received.flags);
        if received.bytes == 0 {
            return Ok(None);
        }
        let message = Message::decode(&record[..received.bytes], fds.len()).map_err(io::Error::other)?;
        Ok(Some((message, fds)))
    }

    #[track_caller]
    pub(crate) fn measured(&self) -> Measured {
        match self.ask(&Message::Measure(Measure {}), &[]).unwrap() {
            Some((Message::Measured(measured), _)) => *measured,
            other => panic!("{other:?}"),
        }
    }

    /// Waits until the server has closed all but this many connections: it is then idle.
    #[track_caller]
    pub(crate) fn until_connections(&self, left: usize) {
        until(|| self.measured().connections == left as u64);
    }

    /// Sends a request, and returns the first record of the answer.
    pub(crate) fn ask(&self, message: &Message, fds: &[BorrowedFd<'_>]) -> io::Result<Option<(Message, Vec<OwnedFd>)>> {
        self.send(message, fds)?;
        self.receive()
    }

    /// The answer to a request, one record without descriptors.
    #[track_caller]
    pub(crate) fn answer(&self, message: &Message) -> Message {
        self.ask(message, &[]).unwrap().expect("the broker ended the connection").0
    }

    #[track_caller]
    pub(crate) fn put(&self, put: PutHeader, fds: &[BorrowedFd<'_>]) -> Result<Published, Refusal> {
        match self.ask(&Message::Put(Box::new(put)), fds).unwrap().unwrap().0 {
            Message::Published(published) => Ok(published),
            Message::Refused(refusal) => Err(refusal),
            other => panic!("{other:?}"),
        }
    }

    /// The first record of a lease.
    #[track_caller]
    pub(crate) fn lease(&self, name: &str) -> LeaseHeader {
        match self.answer(&get_message(name)) {
            Message::Lease(lease) => *lease,
            other => panic!("{other:?}"),
        }
    }

    /// The refusal of a request.
    #[track_caller]
    pub(crate) fn refusal(&self, message: &Message) -> Refusal {
        match self.answer(message) {
            Message::Refused(refusal) => refusal,
            other => panic!("{other:?}"),
        }
    }

    /// Whether a record arrives within this time.
    pub(crate) fn has_answer_within(&self, milliseconds: u16) -> bool {
        poll(&mut [PollFd::new(self.as_fd(), PollFlags::POLLIN)], milliseconds).unwrap() > 0
    }

    /// Reads until the connection is closed, and returns the last error received.
    pub(crate) fn ending(&self) -> Option<vmmfd::wire::Failure> {
        let (mut failure, mut resets) = (None, 0);
        loop {
            match self.receive() {
                Ok(Some((Message::Error(error), _))) => failure = Some(error),
                Ok(Some(_)) => {}
                // A reset is reported once, before the records sent earlier.
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset && resets == 0 => resets += 1,
                Ok(None) | Err(_) => return failure,
            }
        }
    }
}

impl AsFd for Raw {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
