//! The memory that ties a process to others, for a program that wants to checkpoint the process.
//!
//! The driver can't restore a process that has mapped another process's memory. After a restore, memory that the process itself shares is a
//! private copy. Only the process knows, and it may be stopped or busy, so it publishes two numbers in a memfd that its user can read by
//! `/proc/PID/fd`.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::FileExt,
    path::Path,
    process,
    sync::Mutex,
};

use crate::{
    error::{Error, Result},
    sys::{lock, memfd},
};

/// The name of the memfd in `/proc/PID/fd`.
const LINK: &str = "/memfd:vmmfd-ties";

/// The sizes of the file: the process's number and the two counts.
const BYTES: usize = 24;

/// What ties a process to others, counted in mappings and buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Ties {
    /// Memory of other processes that is mapped here: no restore is possible.
    pub imported: u64,
    /// Memory that this process allocated to share: after a restore, others would not see its writes.
    pub own: u64,
}

/// The published numbers of this process.
#[derive(Debug)]
pub(super) struct Published {
    file: File,
    last: Mutex<Ties>,
}

impl Published {
    /// Creates the file.
    ///
    /// # Errors
    /// [`Error::System`]. See memfd_create(2).
    pub(super) fn new() -> Result<Self> {
        let file = File::from(memfd::empty(c"vmmfd-ties").map_err(|errno| Error::system("create a memfd", errno))?);
        write(&file, Ties::default()).map_err(|error| Error::system("write to a memfd", error))?;
        Ok(Self { file, last: Mutex::default() })
    }

    /// Publishes new numbers. A write to pages that exist does not fail.
    pub(super) fn set(&self, ties: Ties) {
        let mut last = lock(&self.last);
        if *last != ties {
            *last = ties;
            if let Err(error) = write(&self.file, ties) {
                tracing::error!(%error, "cannot publish the shared memory: do not checkpoint this process");
            }
        }
    }
}

fn write(file: &File, Ties { imported, own }: Ties) -> io::Result<()> {
    let numbers = [u64::from(process::id()), imported, own];
    let mut bytes = [0; BYTES];
    for (to, number) in bytes.chunks_exact_mut(8).zip(numbers) {
        to.copy_from_slice(&number.to_ne_bytes());
    }
    file.write_all_at(&bytes, 0)
}

impl Ties {
    /// The ties of another process, summed over all copies of the library that it has loaded. Zero if it has none.
    ///
    /// # Errors
    /// See proc_pid_fd(5): the process must be of this user, or this process privileged.
    pub fn of(pid: u32) -> io::Result<Self> {
        let mut ties = Self::default();
        let root = Path::new("/proc").join(pid.to_string());
        let own_number = innermost(&fs::read_to_string(root.join("status"))?);
        for entry in fs::read_dir(root.join("fd"))? {
            let path = entry?.path();
            // It may be closed meanwhile.
            let Ok(link) = fs::read_link(&path) else { continue };
            if !link.as_os_str().as_encoded_bytes().starts_with(LINK.as_bytes()) {
                continue;
            }
            let mut bytes = [0; BYTES];
            let Ok(()) = File::open(&path).and_then(|file| file.read_exact_at(&mut bytes, 0)) else { continue };
            let number = |at: usize| u64::from_ne_bytes(std::array::from_fn(|byte| bytes[8 * at + byte]));
            // A fork has its parent's file, and can't use its memory.
            if Some(number(0)) == own_number {
                ties.imported = ties.imported.saturating_add(number(1));
                ties.own = ties.own.saturating_add(number(2));
            }
        }
        Ok(ties)
    }
}

/// The number of a process in its own PID namespace, which may be inside ours: the last one of `NSpid`. See proc_pid_status(5).
fn innermost(status: &str) -> Option<u64> {
    let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    numbers.split_whitespace().last()?.parse().ok()
}
