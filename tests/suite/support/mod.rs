//! What the tests stand on: a driver of each backend, one that fails on demand, processes with deadlines, open files.

mod fake;
mod faulty;
mod process;
mod subject;

pub(crate) use self::{
    fake::{Copy, Fake},
    faulty::{Fault, Faulty},
    process::{aborts_in_fork, in_child, in_fork},
    subject::{EXPORTABLE, Kind, Subject},
};

use std::{
    fs,
    os::{fd::AsFd, unix::fs::MetadataExt},
};

use nix::sys::stat::fstat;
use vmmfd::Error;

/// The code of a driver's answer, 0 if it went well. Any other error fails the test.
#[track_caller]
pub(crate) fn code<T>(answer: Result<T, Error>) -> u32 {
    match answer {
        Ok(_) => 0,
        Err(Error::Driver { code, .. }) => code,
        Err(error) => panic!("not the driver's own error: {error}"),
    }
}

/// The identity of an open file.
///
/// Leaks are looked for by it, not by counting all descriptors: other tests open and close theirs meanwhile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Inode {
    device: u64,
    number: u64,
}

impl Inode {
    pub(crate) fn of(fd: impl AsFd) -> Self {
        let stat = fstat(fd).unwrap();
        Self { device: stat.st_dev, number: stat.st_ino }
    }

    /// How many descriptors of this process are of it.
    pub(crate) fn open_here(self) -> usize {
        let fds = fs::read_dir("/proc/self/fd").unwrap();
        // Those of other tests may be closed between the listing and the look.
        let inodes = fds.filter_map(|entry| fs::metadata(entry.ok()?.path()).ok());
        inodes.filter(|seen| (seen.dev(), seen.ino()) == (self.device, self.number)).count()
    }
}
