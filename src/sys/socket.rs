//! Options and state of Unix sockets.

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
};

use nix::libc;

use super::{
    descriptor::above_standard,
    process::{process_of, unless_short},
};

/// The initial number of groups to read. Most users have fewer.
const GROUPS: usize = 64;

/// The number of bytes that were sent on a Unix socket and not received by the peer yet. Does not block.
///
/// The kernel counts its buffers, which are larger than the records: only 0 is meaningful. On a `SOCK_SEQPACKET` socket the count is 0
/// once the peer has received every record (before its recvmsg(2) returns), and after the peer has closed the connection. A receive
/// with `MSG_PEEK` does not reduce it.
///
/// # Errors
/// See unix(7) and `SIOCOUTQ` in tcp(7).
pub(crate) fn unread(socket: BorrowedFd<'_>) -> io::Result<usize> {
    let mut bytes: libc::c_int = 0;
    // SIOCOUTQ is an alias of TIOCOUTQ.
    // SAFETY: the request writes one int to `bytes`, which lives until the call returns. The descriptor is borrowed.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    if result == -1 {
        return Err(io::Error::last_os_error());
    }
    usize::try_from(bytes).map_err(|_| io::ErrorKind::InvalidData.into())
}

/// `SO_PASSRIGHTS` of Linux 6.16, which libc lacks.
const SO_PASSRIGHTS: libc::c_int = 83;

/// Whether a Unix socket accepts descriptors from its peer. If not, the peer's sendmsg(2) fails with `EPERM`. Does not block.
///
/// # Errors
/// `ENOPROTOOPT` on a kernel older than 6.16.
pub(crate) fn passes_descriptors(socket: BorrowedFd<'_>) -> io::Result<bool> {
    let mut passes: libc::c_int = 1;
    let mut length = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes to `passes`, and it writes `length`; both live until the call returns. The
    // descriptor is borrowed.
    let result = unsafe {
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, SO_PASSRIGHTS, (&raw mut passes).cast(), &raw mut length)
    };
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(passes != 0) }
}

/// Sets whether a Unix socket accepts descriptors from its peer. New connections inherit the setting from the listening socket. Does
/// not block.
///
/// # Errors
/// `ENOPROTOOPT` on a kernel older than 6.16, where every socket accepts them.
pub(crate) fn pass_descriptors(socket: BorrowedFd<'_>, pass: bool) -> io::Result<()> {
    let pass = libc::c_int::from(pass);
    let length = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the kernel reads the `length` bytes of `pass`, which lives until the call returns. The descriptor is borrowed.
    let result = unsafe {
        libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, SO_PASSRIGHTS, (&raw const pass).cast(), length)
    };
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// A pidfd of the process at the other end of a Unix socket, recorded by the kernel when the connection was made. Does not block.
///
/// # Errors
/// `ENOPROTOOPT` on a kernel older than 6.5; `ESRCH` or `EINVAL` on some kernels if the process has been reaped.
pub(crate) fn peer_pidfd(socket: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let mut pidfd: libc::c_int = -1;
    let mut length = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes to `pidfd`, and it writes `length`; both live until the call returns. The
    // descriptor is borrowed.
    let result = unsafe {
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, SO_PEERPIDFD, (&raw mut pidfd).cast(), &raw mut length)
    };
    if result == -1 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has created the descriptor, close-on-exec, and no other code has its number.
    above_standard(unsafe { OwnedFd::from_raw_fd(pidfd) })
}

/// A pidfd of the process at the other end of a Unix socket: by its pid if the kernel has no better way. `None` if the process is not visible
/// here, or gone.
///
/// # Errors
/// `EMFILE`, `ENFILE` and `ENOMEM`.
pub(crate) fn peer_process(socket: BorrowedFd<'_>, pid: i32) -> io::Result<Option<OwnedFd>> {
    match peer_pidfd(socket) {
        Err(error) if error.raw_os_error() == Some(libc::ENOPROTOOPT) => process_of(pid),
        found => unless_short(found),
    }
}

/// `SO_PEERPIDFD` of Linux 6.5, which libc lacks.
const SO_PEERPIDFD: libc::c_int = 77;

/// The supplementary groups of the process at the other end of a Unix socket, recorded by the kernel when the connection was made. They
/// include the effective group only if it is also a supplementary group; `SO_PEERCRED` returns the effective group. Does not block.
///
/// # Errors
/// ENODATA if the socket has no peer; ENOPROTOOPT on a kernel older than 4.13. See `SO_PEERGROUPS` in unix(7).
pub(crate) fn peer_groups(socket: BorrowedFd<'_>) -> io::Result<Vec<u32>> {
    read_peer_groups(socket, GROUPS)
}

/// Like [`peer_groups`], with an initial buffer for `room` groups.
fn read_peer_groups(socket: BorrowedFd<'_>, mut room: usize) -> io::Result<Vec<u32>> {
    const GROUP: usize = size_of::<libc::gid_t>();
    loop {
        let mut groups: Vec<libc::gid_t> = vec![0; room];
        let too_many = |_| io::Error::from(io::ErrorKind::InvalidData);
        let mut length = libc::socklen_t::try_from(room * GROUP).map_err(too_many)?;
        // SAFETY: the kernel writes at most `length` bytes, all inside `groups`, and it writes `length`; both live until the call
        // returns, and any bytes are valid group IDs. The descriptor is borrowed.
        let result = unsafe {
            libc::getsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERGROUPS,
                groups.as_mut_ptr().cast(),
                &raw mut length,
            )
        };
        let needed = length as usize / GROUP;
        if result == 0 {
            groups.truncate(needed);
            return Ok(groups);
        }
        let error = io::Error::last_os_error();
        // On ERANGE the kernel sets `length` to the required size. A peer's groups never change.
        if error.raw_os_error() != Some(libc::ERANGE) || needed <= room {
            return Err(error);
        }
        room = needed;
    }
}

#[cfg(test)]
mod tests {
    use std::{os::fd::AsFd, thread};

    use nix::unistd::{geteuid, getgroups};
    use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair};

    use super::*;

    fn pair() -> (OwnedFd, OwnedFd) {
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
    }

    #[test]
    fn unread_is_zero_after_peer_receives() {
        let (ours, theirs) = pair();
        assert_eq!(unread(ours.as_fd()).unwrap(), 0);
        let mut buffer = vec![0; 64 << 10];
        for length in [1, 16, 4096, 64 << 10] {
            for records in 1..=2 {
                for _ in 0..records {
                    assert_eq!(send(&ours, &vec![7; length], SendFlags::DONTWAIT).unwrap(), length);
                }
                for received in 0..records {
                    let before = unread(ours.as_fd()).unwrap();
                    assert!(before >= (records - received) * length, "{before} for records of {length}");
                    // Peeking does not consume the record.
                    recv(&theirs, &mut buffer[..], RecvFlags::PEEK).unwrap();
                    assert_eq!(unread(ours.as_fd()).unwrap(), before);
                    recv(&theirs, &mut buffer[..], RecvFlags::empty()).unwrap();
                }
                assert_eq!(unread(ours.as_fd()).unwrap(), 0);
            }
        }
        // Records from the peer do not count.
        send(&theirs, &[0; 10], SendFlags::DONTWAIT).unwrap();
        assert_eq!(unread(ours.as_fd()).unwrap(), 0);
        assert_ne!(unread(theirs.as_fd()).unwrap(), 0);
    }

    #[test]
    fn unread_is_zero_before_peer_replies() {
        let (ours, theirs) = pair();
        let (echo_ours, echo_theirs) = pair();
        let peer = thread::spawn(move || {
            let mut buffer = [0; 100];
            while recv(&theirs, &mut buffer[..], RecvFlags::empty()).unwrap().0 > 0 {
                send(&echo_theirs, b"e", SendFlags::empty()).unwrap();
            }
        });
        for _ in 0..5000 {
            send(&ours, &[1; 100], SendFlags::empty()).unwrap();
            recv(&echo_ours, &mut [0; 1][..], RecvFlags::empty()).unwrap();
            assert_eq!(unread(ours.as_fd()).unwrap(), 0);
        }
        drop(ours);
        peer.join().unwrap();
    }

    #[test]
    fn unread_is_zero_after_peer_closes() {
        let (ours, theirs) = pair();
        send(&ours, &[1; 100], SendFlags::empty()).unwrap();
        assert_ne!(unread(ours.as_fd()).unwrap(), 0);
        drop(theirs);
        assert_eq!(unread(ours.as_fd()).unwrap(), 0);
    }

    #[test]
    fn connections_inherit_descriptor_setting() {
        let folder = tempfile::tempdir().unwrap();
        let address = rustix::net::SocketAddrUnix::new(folder.path().join("socket")).unwrap();
        let new = || rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        let listener = new();
        if let Err(error) = pass_descriptors(listener.as_fd(), false) {
            assert_eq!(error.raw_os_error(), Some(libc::ENOPROTOOPT));
            assert_eq!(passes_descriptors(listener.as_fd()).unwrap_err().raw_os_error(), Some(libc::ENOPROTOOPT));
            return;
        }
        rustix::net::bind(&listener, &address).unwrap();
        rustix::net::listen(&listener, 1).unwrap();
        let theirs = std::os::unix::net::UnixStream::from(new());
        rustix::net::connect(&theirs, &address).unwrap();
        let send = || sendfd::SendWithFd::send_with_fd(&theirs, b"a", &[listener.as_raw_fd()]);
        assert_eq!(send().unwrap_err().raw_os_error(), Some(libc::EPERM));
        let ours = rustix::net::accept(&listener).unwrap();
        assert!(!passes_descriptors(ours.as_fd()).unwrap());
        assert_eq!(send().unwrap_err().raw_os_error(), Some(libc::EPERM));
        pass_descriptors(ours.as_fd(), true).unwrap();
        assert_eq!(send().unwrap(), 1);
    }

    #[test]
    fn peer_groups_match_process_groups() {
        // The bare system call changes this thread alone; glibc's wrapper would change every thread of the test process.
        let groups = thread::spawn(|| {
            if geteuid().is_root() {
                let many: Vec<libc::gid_t> = (1000..2000).collect();
                // SAFETY: the kernel reads `many.len()` group IDs from `many`.
                let result = unsafe { libc::syscall(libc::SYS_setgroups, many.len(), many.as_ptr()) };
                assert_eq!(result, 0);
            }
            let own: Vec<u32> = getgroups().unwrap().into_iter().map(nix::unistd::Gid::as_raw).collect();
            let (ours, _theirs) = pair();
            (own, peer_groups(ours.as_fd()).unwrap(), read_peer_groups(ours.as_fd(), 0).unwrap())
        });
        let (own, groups, grown) = groups.join().unwrap();
        assert_eq!(groups, own);
        assert_eq!(grown, own);
        assert!(!geteuid().is_root() || own.len() == 1000);
    }

    #[test]
    fn socket_without_peer_has_no_groups() {
        let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        assert_eq!(peer_groups(socket.as_fd()).unwrap_err().raw_os_error(), Some(libc::ENODATA));
    }
}
