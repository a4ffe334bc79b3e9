//! The lock of a socket's path: a file next to the socket that other users can't open.

use std::{
    ffi::{OsStr, OsString},
    fs::{File, Permissions},
    io::{self, Read},
    os::unix::fs::{FileExt, MetadataExt, PermissionsExt},
    path::Path,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    fcntl::{AtFlags, FcntlArg, Flock, FlockArg, OFlag, fcntl, openat},
    libc,
    sys::stat::{Mode, fstatat},
    unistd::{UnlinkatFlags, geteuid, unlinkat},
};

use super::{Cancel, RETRY, deadline_after};
use crate::{
    error::{Error, Result, SocketError},
    sys::above_standard,
};

/// Excludes other processes from binding or removing the socket. Dropping it removes the lock file unless the file is marked.
pub(super) struct PathLock<'a> {
    folder: &'a File,
    name: OsString,
    file: Flock<File>,
}

impl<'a> PathLock<'a> {
    /// Takes the lock of the socket named `socket`. See flock(2).
    ///
    /// # Errors
    /// [`SocketError::FolderLocked`] if another process holds it for `timeout`; [`SocketError::Path`] if another user owns the lock
    /// file, or if it has another name too; [`Error::System`], [`Error::Interrupted`].
    pub(super) fn take(
        folder: &'a File,
        path: &Path,
        socket: &OsStr,
        timeout: Duration,
        cancel: &Cancel,
    ) -> Result<Self> {
        let name = lock_name(socket);
        let failed = |error: io::Error| Error::system(format!("lock {}", path.join(&name).display()), error);
        let deadline = deadline_after(timeout);
        loop {
            if let Some(file) = Self::open(folder, &name, path)? {
                match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                    // The previous holder may have removed the file, and another process created a new one.
                    Ok(file) if is_at(&file, folder, &name).map_err(failed)? => return Ok(Self { folder, name, file }),
                    Ok(_) | Err((_, Errno::EAGAIN | Errno::EINTR)) => {}
                    Err((_, errno)) => return Err(failed(errno.into())),
                }
            }
            if Instant::now() >= deadline {
                return Err(Error::Socket(SocketError::FolderLocked { path: path.to_owned(), waited: timeout }));
            }
            cancel.pause(RETRY)?;
        }
    }

    /// Opens the file. `None` if the caller must try again.
    fn open(folder: &File, name: &OsStr, path: &Path) -> Result<Option<File>> {
        let failed = |error: io::Error| Error::system(format!("open {}", path.join(name).display()), error);
        let flags = OFlag::O_RDWR | OFlag::O_CREAT | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC;
        let file = openat(folder, name, flags, Mode::S_IRUSR | Mode::S_IWUSR).map_err(|errno| failed(errno.into()))?;
        let file = File::from(above_standard(file).map_err(failed)?);
        let metadata = file.metadata().map_err(failed)?;
        // The mark overwrites the file: it must not be a file that also has another name.
        if metadata.uid() != geteuid().as_raw() || !metadata.is_file() || metadata.nlink() > 1 {
            if geteuid().is_root() && unlinkat(folder, name, UnlinkatFlags::NoRemoveDir).is_ok() {
                return Ok(None);
            }
            let (uid, links) = (metadata.uid(), metadata.nlink());
            let reason = format!("its lock {} is of uid {uid} and has {links} names: remove that file", name.display());
            return Err(Error::Socket(SocketError::Path { path: path.to_owned(), reason }));
        }
        // Independent of the umask.
        file.set_permissions(Permissions::from_mode(0o600)).map_err(failed)?;
        Ok(Some(file))
    }

    /// The file's inode number.
    pub(super) fn inode(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.ino())
    }

    /// The process that marked the file and did not shut down cleanly.
    pub(super) fn marked_by(&self) -> Option<i32> {
        marked_by(&self.file)
    }

    /// Whether a process that marked the file still serves.
    pub(super) fn is_served(&self) -> bool {
        is_served(&self.file)
    }

    /// Keeps the file, with a process ID, until [`PathLock::unmark`]. [`PathLock::is_served`] while the returned mark is held; `None` if
    /// the file system has no such locks.
    pub(super) fn mark(&self, pid: u32) -> io::Result<Option<Mark>> {
        let mark = Mark(self.file.try_clone()?);
        let locked = fcntl(&mark.0, FcntlArg::F_OFD_SETLK(&whole_file(libc::F_WRLCK)));
        if locked == Err(Errno::EAGAIN) {
            return Err(Errno::EAGAIN.into());
        }
        self.unmark()?;
        self.file.write_all_at(format!("{pid}\n").as_bytes(), 0)?;
        Ok(locked.ok().map(|_| mark))
    }

    pub(super) fn unmark(&self) -> io::Result<()> {
        self.file.set_len(0)
    }
}

impl Drop for PathLock<'_> {
    fn drop(&mut self) {
        if self.file.metadata().is_ok_and(|metadata| metadata.len() == 0) {
            // Before unlocking: the next process has either opened this file or creates a new one.
            let _ = unlinkat(self.folder, self.name.as_os_str(), UnlinkatFlags::NoRemoveDir);
        }
    }
}

/// A server's second lock of the file, which it holds as long as it serves: unlike a process ID, it is exact in every PID namespace and
/// after a reboot. The kernel releases it when the process dies. See "open file description locks" in fcntl(2).
#[derive(Debug)]
pub(super) struct Mark(File);

impl Mark {
    /// Whether the lock file of the socket named `socket` is not the marked file.
    pub(super) fn is_lost(&self, folder: &File, socket: &OsStr) -> bool {
        is_at(&self.0, folder, &lock_name(socket)).is_ok_and(|is_there| !is_there)
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        // Forks share the lock: closing the file is not enough.
        let _ = fcntl(&self.0, FcntlArg::F_OFD_SETLK(&whole_file(libc::F_UNLCK)));
    }
}

/// The process that serves the socket named `socket` according to its mark, or 0 if unknown. `None` if no process does, or the lock file
/// can't be opened. Takes no lock and creates no file.
pub(super) fn served_by(folder: &File, socket: &OsStr) -> Option<i32> {
    let flags = OFlag::O_RDONLY | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC;
    let file = File::from(openat(folder, &*lock_name(socket), flags, Mode::empty()).ok()?);
    is_served(&file).then(|| marked_by(&file).unwrap_or(0))
}

fn lock_name(socket: &OsStr) -> OsString {
    let mut name = OsString::from(".");
    name.push(socket);
    name.push(".lock");
    name
}

fn marked_by(file: &File) -> Option<i32> {
    let mut text = String::new();
    file.take(32).read_to_string(&mut text).ok()?;
    text.trim().parse().ok()
}

fn is_served(file: &File) -> bool {
    let mut found = whole_file(libc::F_WRLCK);
    let asked = fcntl(file, FcntlArg::F_OFD_GETLK(&mut found));
    asked.is_ok() && libc::c_int::from(found.l_type) != libc::F_UNLCK
}

fn whole_file(kind: libc::c_int) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    }
}

/// Whether a name still refers to an open file.
fn is_at(file: &File, folder: &File, name: &OsStr) -> io::Result<bool> {
    let metadata = file.metadata()?;
    Ok(inode_of(folder, name) == Ok((metadata.dev(), metadata.ino())))
}

/// The device and inode number of a file, by its folder and name.
pub(super) fn inode_of(folder: &File, name: &OsStr) -> nix::Result<(u64, u64)> {
    fstatat(folder, name, AtFlags::AT_SYMLINK_NOFOLLOW).map(|stat| (stat.st_dev, stat.st_ino))
}
