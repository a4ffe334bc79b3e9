//! The memory that ties a process to others, for a program that wants to checkpoint the process.
//!
//! The driver can't restore a process that has mapped another process's memory. After a restore, memory that the process itself shares is a
//! private copy. Only the process knows, and it may be stopped or busy, so it publishes two numbers in a memfd that its user can read by
//! `/proc/PID/fd`.

use std::{
    fs::{self, File},
    io,
    mem::size_of,
    num::NonZeroUsize,
    os::{fd::OwnedFd, unix::fs::FileExt},
    path::Path,
    process,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use crate::{
    error::{Error, Result},
    sys::{Words, fork::ProcessIdentity},
};

/// The name of the memfd in `/proc/PID/fd`: one for each copy of the library that the process has loaded.
const LINK: &str = "/memfd:vmmfd-ties";

/// The name of the memfd in which ranks publish a text, after their number.
const RANKS: &str = "/memfd:vmmfd-ranks";

/// The offsets of the numbers in the memfd. The first is the process, in its own PID namespace.
const IMPORTED: u64 = 8;
const OWN: u64 = 16;
/// How many checkpoints of the process were made. The program that makes a checkpoint writes it.
const CHECKPOINTS: u64 = 24;

const SIZE: NonZeroUsize = NonZeroUsize::new(32).unwrap();

/// The counts of a process, published for programs that want to checkpoint it.
#[derive(Debug)]
pub(super) struct Ties {
    numbers: Words,
    made_by: ProcessIdentity,
    /// Other programs find it in `/proc/PID/fd`.
    _file: OwnedFd,
}

impl Ties {
    /// Publishes that there are no ties yet.
    ///
    /// # Errors
    /// [`Error::System`]. See memfd_create(2), mmap(2).
    pub(super) fn publish() -> Result<Self> {
        let made = Words::create(c"vmmfd-ties", SIZE);
        let (numbers, file) =
            made.map_err(|error| Error::system("create a memfd for the counts of shared memory", error))?;
        let ties = Self { numbers, made_by: ProcessIdentity::current(), _file: file };
        ties.number(0).store(process::id().into(), Ordering::Release);
        Ok(ties)
    }

    fn number(&self, offset: u64) -> &AtomicU64 {
        &self.numbers.get()[offset as usize / size_of::<u64>()]
    }

    fn count(&self, imported: bool) -> &AtomicU64 {
        self.number(if imported { IMPORTED } else { OWN })
    }

    /// How many checkpoints of this process were made.
    pub(super) fn checkpoints(&self) -> u64 {
        self.number(CHECKPOINTS).load(Ordering::Acquire)
    }
}

/// A counted mapping or buffer, until it is dropped.
#[derive(Debug)]
pub(super) struct Tie {
    ties: Arc<Ties>,
    imported: bool,
}

impl Tie {
    pub(super) fn new(ties: &Arc<Ties>, imported: bool) -> Self {
        ties.count(imported).fetch_add(1, Ordering::AcqRel);
        Self { ties: Arc::clone(ties), imported }
    }
}

impl Drop for Tie {
    fn drop(&mut self) {
        // A fork has the page too, and none of the memory.
        if self.ties.made_by.is_current() {
            self.ties.count(self.imported).fetch_sub(1, Ordering::AcqRel);
        }
    }
}

/// What ties a process to others, counted in mappings and buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TieCounts {
    /// Memory of other processes that is mapped there: no restore is possible.
    pub imported: u64,
    /// Memory that the process allocated to share: after a restore, others would not see its writes.
    pub own: u64,
}

impl TieCounts {
    /// The ties of another process, summed over all copies of the library that it has loaded. Zero if it has none.
    ///
    /// # Errors
    /// See proc_pid_fd(5): the process must be of this user, or this process privileged.
    pub fn of(pid: u32) -> io::Result<Self> {
        let mut ties = Self::default();
        for file in files(pid, LINK, false)? {
            ties.imported = ties.imported.saturating_add(number_at(&file, IMPORTED)?);
            ties.own = ties.own.saturating_add(number_at(&file, OWN)?);
        }
        Ok(ties)
    }

    /// Tells another process that a checkpoint of it is made: its own memory will be a copy, which it must not share any more.
    ///
    /// # Errors
    /// As [`TieCounts::of`].
    pub fn announce_checkpoint(pid: u32) -> io::Result<()> {
        for file in files(pid, LINK, true)? {
            let count = number_at(&file, CHECKPOINTS)?.wrapping_add(1);
            file.write_all_at(&count.to_ne_bytes(), CHECKPOINTS)?;
        }
        Ok(())
    }
}

/// The text that a program with several ranks publishes about memory of other ranks which its libraries have mapped: empty if they have
/// none, `None` if it publishes nothing. Shortened to a few lines, and not checked.
///
/// # Errors
/// As [`TieCounts::of`].
pub fn ranks_of(pid: u32) -> io::Result<Option<String>> {
    let Some(file) = files(pid, RANKS, false)?.pop() else { return Ok(None) };
    let mut text = [0; 1000];
    let length = file.read_at(&mut text, size_of::<u64>() as u64)?;
    Ok(Some(String::from_utf8_lossy(&text[..length]).into_owned()))
}

/// The files of a process under this name. Each begins with the process's number.
fn files(pid: u32, name: &str, writable: bool) -> io::Result<Vec<File>> {
    let root = Path::new("/proc").join(pid.to_string());
    let own_number = innermost(&String::from_utf8_lossy(&fs::read(root.join("status"))?));
    let mut files = Vec::new();
    for entry in fs::read_dir(root.join("fd"))? {
        let path = entry?.path();
        // The process may have closed it.
        let Ok(link) = fs::read_link(&path) else { continue };
        if link.as_os_str().as_encoded_bytes().starts_with(name.as_bytes()) {
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
