//! What a descriptor refers to.

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd},
};

use nix::libc;

/// Makes `descriptor` refer to what `by` refers to, close-on-exec, and closes what it referred to before, at once: no other thread
/// finds the number unused in between. A call that another thread began on it before goes on with the file of before. Does not block.
///
/// # Errors
/// See dup3(2).
pub(crate) fn replace(descriptor: BorrowedFd<'_>, by: BorrowedFd<'_>) -> io::Result<()> {
    loop {
        // SAFETY: the call reads and writes no memory of this process. Both descriptors are borrowed, so they are open and stay so;
        // what owns `descriptor` owns one open descriptor of that number afterwards too.
        let result = unsafe { libc::dup3(by.as_raw_fd(), descriptor.as_raw_fd(), libc::O_CLOEXEC) };
        if result != -1 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        // EBUSY: Linux, while another thread is between taking this number and filling it.
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
    fn a_descriptor_that_is_replaced_keeps_its_number_and_closes_what_it_was_of() {
        let (ours, mut before) = UnixStream::pair().unwrap();
        let (by, mut after) = UnixStream::pair().unwrap();
        let number = ours.as_raw_fd();
        replace(ours.as_fd(), by.as_fd()).unwrap();
        drop(by);
        assert_eq!(before.read(&mut [0]).unwrap(), 0, "the end of the connection");
        after.write_all(b"x").unwrap();
        let mut byte = [0];
        (&ours).read_exact(&mut byte).unwrap();
        assert_eq!((byte, ours.as_raw_fd()), (*b"x", number));
        let flags = FdFlag::from_bits_retain(fcntl(&ours, FcntlArg::F_GETFD).unwrap());
        assert!(flags.contains(FdFlag::FD_CLOEXEC));
    }
}
