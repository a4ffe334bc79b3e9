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

/// The file's length: the process's number, the two counts of ties, and the count of checkpoints, each in 8 bytes.
const BYTES: usize = 32;

/// The offset of the count of checkpoints. The program that makes a checkpoint writes it.
const CHECKPOINTS: u64 = 24;

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
        file.write_all_at(&[0; BYTES], 0).map_err(|error| Error::system("write to a memfd", error))?;
        Ok(Self { file, last: Mutex::default() })
    }

    /// How many checkpoints of this process were made.
    pub(super) fn checkpoints(&self) -> u64 {
        number_at(&self.file, CHECKPOINTS).unwrap_or_default()
    }

    /// Publishes new numbers. A write to pages that exist does not fail.
    pub(super) fn set(&self, ties: Ties) {
        let mut last = lock(&self.last);
        if *last != ties {
            *last = ties;
            let numbers = [u64::from(process::id()), ties.imported, ties.own];
            if let Err(error) = self.file.write_all_at(numbers.map(u64::to_ne_bytes).as_flattened(), 0) {
                tracing::error!(%error, "cannot publish the shared memory: do not checkpoint this process");
            }
        }
    }
}

impl Ties {
    /// The ties of another process, summed over all copies of the library that it has loaded. Zero if it has none.
    ///
    /// # Errors
    /// See proc_pid_fd(5): the process must be of this user, or this process privileged.
    pub fn of(pid: u32) -> io::Result<Self> {
        let mut ties = Self::default();
        for file in files(pid, false)? {
            ties.imported = ties.imported.saturating_add(number_at(&file, 8)?);
            ties.own = ties.own.saturating_add(number_at(&file, 16)?);
        }
        Ok(ties)
    }

    /// Tells another process that a checkpoint of it is made: its own memory will be a copy, which it must not share any more.
    ///
    /// # Errors
    /// As [`Ties::of`].
    pub fn announce_checkpoint(pid: u32) -> io::Result<()> {
        for file in files(pid, true)? {
            let count = number_at(&file, CHECKPOINTS)?.wrapping_add(1);
            file.write_all_at(&count.to_ne_bytes(), CHECKPOINTS)?;
        }
        Ok(())
    }
}

/// The files of a process, one for each copy of the library that it has loaded.
fn files(pid: u32, writable: bool) -> io::Result<Vec<File>> {
    let root = Path::new("/proc").join(pid.to_string());
    let own_number = innermost(&String::from_utf8_lossy(&fs::read(root.join("status"))?));
    let mut files = Vec::new();
    for entry in fs::read_dir(root.join("fd"))? {
        let path = entry?.path();
        // The process may have closed it.
        let Ok(link) = fs::read_link(&path) else { continue };
        if link.as_os_str().as_encoded_bytes().starts_with(LINK.as_bytes()) {
            let file = File::options().read(true).write(writable).open(&path)?;
            // A fork has its parent's file, and can't use its memory.
            if Some(number_at(&file, 0)?) == own_number {
                files.push(file);
            }
        }
    }
    Ok(files)
}

fn number_at(file: &File, offset: u64) -> io::Result<u64> {
    let mut bytes = [0; 8];
    file.read_exact_at(&mut bytes, offset)?;
    Ok(u64::from_ne_bytes(bytes))
}

/// The number of a process in its own PID namespace, which may be a child of ours: the last number of `NSpid`. See proc_pid_status(5).
fn innermost(status: &str) -> Option<u64> {
    let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    numbers.split_whitespace().last()?.parse().ok()
}
