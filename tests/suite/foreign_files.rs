//! Descriptors of files whose daemon may never answer: the broker's server must not block on them.

use std::{
    fs::OpenOptions,
    os::{
        fd::AsFd,
        unix::fs::{MetadataExt, OpenOptionsExt},
    },
    thread,
};

use nix::libc;
use vmmfd::{driver::Backend, internals::inspect_descriptor};

use crate::support::fuse::{FLUSH, Fuse, GETATTR};

const SIZE: u64 = 2 << 20;

mod mounts {
    use super::*;

    #[test]
    #[ignore = "mounts a file system: make test-all runs it where it may"]
    fn unresponsive_fuse_file_is_refused() {
        let fuse = Fuse::mount(SIZE);
        let file = OpenOptions::new().read(true).write(true).open(fuse.file()).unwrap();
        let path = OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(fuse.file()).unwrap();
        let refuse = || {
            for (fd, what) in [(file.as_fd(), "a regular file"), (path.as_fd(), "a path (O_PATH)")] {
                for emulated in [false, true] {
                    let (result, foreign) = inspect_descriptor(fd, Backend::Host, SIZE, emulated);
                    assert_eq!(result.unwrap_err(), "the descriptor is not of a memfd");
                    assert!(foreign);
                    let (result, foreign) = inspect_descriptor(fd, Backend::Cuda, SIZE, emulated);
                    let error = result.unwrap_err();
                    assert!(error.starts_with(&format!("the descriptor is {what}, but ")), "{error}");
                    assert!(foreign);
                }
            }
        };
        fuse.requests();
        // While the daemon answers, so that a request fails the test instead of blocking it.
        refuse();
        assert_eq!(fuse.requests(), Vec::<u32>::new());
        // Check that the daemon counts requests.
        assert_eq!(file.metadata().unwrap().size(), SIZE);
        assert!(fuse.requests().contains(&GETATTR));

        fuse.answer(false);
        refuse();
        let closing = thread::spawn(move || drop(file));
        // The close blocks, so the server closes such a file in a separate thread.
        assert_eq!(fuse.next_request(), FLUSH);
        assert!(!closing.is_finished());
        fuse.answer(true);
        closing.join().unwrap();
    }
}
