//! Descriptors of files whose daemon may never answer: the broker's server must not block on them.

use std::{fs::OpenOptions, os::fd::AsFd, os::unix::fs::OpenOptionsExt};

use nix::libc::{self, BPF_JSET, EIO};
use vmmfd::{driver::Backend, internals::inspect_descriptor};

use crate::seccomp::{self, ALLOW, rule, unless};

const SIZE: u64 = 2 << 20;

#[test]
fn inspection_asks_no_daemon() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(SIZE).unwrap();
    let path = OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(file.path()).unwrap();
    // For each of these calls, the kernel asks the daemon of a FUSE file system. Only cached attributes need no answer.
    let cached = (2, unless as fn(u32, u32, u8) -> _, BPF_JSET, libc::AT_STATX_DONT_SYNC as u32);
    let calls = [libc::SYS_fstat, libc::SYS_newfstatat, libc::SYS_lseek, libc::SYS_read, libc::SYS_pread64];
    let calls = calls.into_iter().flat_map(|call| rule(call, &[], EIO));
    let program = calls.chain(rule(libc::SYS_statx, &[cached], EIO)).chain([ALLOW]).collect();
    seccomp::under(program, move || {
        assert!(file.as_file().metadata().is_err(), "the filter is in force");
        for (fd, what) in [(file.as_file().as_fd(), "a regular file"), (path.as_fd(), "a path (O_PATH)")] {
            for emulated in [false, true] {
                let (result, foreign) = inspect_descriptor(fd, Backend::Host, SIZE, emulated);
                assert_eq!(result.unwrap_err(), "the descriptor is not of a memfd");
                // The server closes such a file in a separate thread: the close may block.
                assert!(foreign);
                let (result, foreign) = inspect_descriptor(fd, Backend::Cuda, SIZE, emulated);
                let error = result.unwrap_err();
                assert!(error.starts_with(&format!("the descriptor is {what}, but ")), "{error}");
                assert!(foreign);
            }
        }
    });
}
