//! Replacing and moving descriptors.

use std::{
    fs::File,
    io, iter,
    os::fd::{AsRawFd, BorrowedFd, OwnedFd},
};

use nix::{
    libc,
    sys::{
        epoll::{Epoll, EpollCreateFlags},
        eventfd::{EfdFlags, EventFd},
    },
};

/// Moves a new descriptor to a number above 2. A program that has closed stdin, stdout or stderr would otherwise read from or print to the
/// library's file. Does not block.
///
/// # Errors
/// See `F_DUPFD_CLOEXEC` in fcntl(2). The descriptor is closed then.
pub(crate) fn above_standard(new: OwnedFd) -> io::Result<OwnedFd> {
    match new.as_raw_fd() {
        0..=libc::STDERR_FILENO => Ok(rustix::io::fcntl_dupfd_cloexec(new, libc::STDERR_FILENO + 1)?),
        _ => Ok(new),
    }
}

/// Opens `/dev/null` with each free number up to 2. Until the result is dropped, new descriptors have numbers above 2: for descriptors of
/// other libraries, which [`above_standard`] can't move. If `/dev/null` can't be opened, they may have smaller numbers.
pub(crate) fn occupy_standard() -> Vec<File> {
    let open = iter::from_fn(|| File::open("/dev/null").ok());
    open.take_while(|file| file.as_raw_fd() <= libc::STDERR_FILENO).collect()
}

/// Creates an unsignalled eventfd, close-on-exec and non-blocking.
///
/// # Errors
/// See eventfd(2).
pub fn eventfd() -> io::Result<EventFd> {
    let new = EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
    // SAFETY: the descriptor is an eventfd.
    Ok(unsafe { EventFd::from_owned_fd(above_standard(new.into())?) })
}

/// Creates an epoll instance, close-on-exec.
///
/// # Errors
/// See epoll_create1(2).
pub(crate) fn epoll() -> io::Result<Epoll> {
    let new = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
    Ok(Epoll(above_standard(new.0)?))
}

/// Atomically makes `descriptor` a close-on-exec duplicate of `by` and closes its old file: at no time can another thread get the number
/// for a new file. A system call that already runs on the descriptor continues with the old file. Does not block.
///
/// # Errors
/// See dup3(2).
pub(crate) fn replace(descriptor: BorrowedFd<'_>, by: BorrowedFd<'_>) -> io::Result<()> {
    loop {
        // SAFETY: the call reads and writes no memory of this process. Both descriptors are borrowed and therefore stay open; afterwards
        // the owner of `descriptor` still owns one open descriptor of that number.
        let result = unsafe { libc::dup3(by.as_raw_fd(), descriptor.as_raw_fd(), libc::O_CLOEXEC) };
        if result != -1 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        // EBUSY: another thread has allocated this number and not installed its file yet.
        if error.kind() != io::ErrorKind::Interrupted && error.raw_os_error() != Some(libc::EBUSY) {
            return Err(error);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read, Write},
        os::{fd::AsFd, unix::net::UnixStream},
    };

    use nix::fcntl::{FcntlArg, FdFlag, fcntl};

    use super::*;

    #[test]
    fn replace_keeps_number_and_closes_old_file() {
        let (ours, mut before) = UnixStream::pair().unwrap();
        let (by, mut after) = UnixStream::pair().unwrap();
        let number = ours.as_raw_fd();
        replace(ours.as_fd(), by.as_fd()).unwrap();
        drop(by);
        assert_eq!(before.read(&mut [0]).unwrap(), 0, "the old connection is closed");
        after.write_all(b"x").unwrap();
        let mut byte = [0];
        (&ours).read_exact(&mut byte).unwrap();
        assert_eq!((byte, ours.as_raw_fd()), (*b"x", number));
        let flags = FdFlag::from_bits_retain(fcntl(&ours, FcntlArg::F_GETFD).unwrap());
        assert!(flags.contains(FdFlag::FD_CLOEXEC));
    }
}
