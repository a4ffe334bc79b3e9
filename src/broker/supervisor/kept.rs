//! What the supervisor keeps, and how it is told.

use std::{
    collections::BTreeMap,
    io,
    mem::MaybeUninit,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixDatagram,
    },
};

use nix::unistd::geteuid;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

/// The longest datagram that means something here, in bytes.
const LONGEST: usize = 4096;

/// The descriptors that are kept, by their names: several may have one.
#[derive(Debug, Default)]
pub(super) struct KeptHere(BTreeMap<String, Vec<OwnedFd>>);

impl KeptHere {
    pub(super) fn keep(&mut self, name: String, fd: OwnedFd) {
        self.0.entry(name).or_default().push(fd);
    }

    pub(super) fn remove(&mut self, name: &str) {
        self.0.remove(name);
    }

    pub(super) fn all(&self) -> impl Iterator<Item = (&str, BorrowedFd<'_>)> {
        self.0.iter().flat_map(|(name, fds)| fds.iter().map(|fd| (name.as_str(), fd.as_fd())))
    }
}

/// Receives one datagram of this user or root, if one has come. Of other users it is ignored.
pub(in crate::broker) fn receive(socket: &UnixDatagram) -> io::Result<Option<(String, Vec<OwnedFd>)>> {
    loop {
        let mut text = [0; LONGEST];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253), ScmCredentials(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let message = match recvmsg(socket, &mut [io::IoSliceMut::new(&mut text)], &mut ancillary, flags) {
            Ok(message) => message,
            Err(rustix::io::Errno::AGAIN) => return Ok(None),
            Err(rustix::io::Errno::INTR) => continue,
            Err(errno) => return Err(errno.into()),
        };
        let (mut fds, mut allowed) = (Vec::new(), false);
        for part in ancillary.drain() {
            match part {
                RecvAncillaryMessage::ScmRights(some) => fds.extend(some),
                RecvAncillaryMessage::ScmCredentials(sender) => {
                    let uid = sender.uid.as_raw();
                    allowed = uid == 0 || uid == geteuid().as_raw();
                }
                _ => {}
            }
        }
        if allowed && let Ok(text) = std::str::from_utf8(&text[..message.bytes]) {
            return Ok(Some((text.to_owned(), fds)));
        }
    }
}
