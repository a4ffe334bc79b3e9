//! A listening socket and its file.

use std::{
    ffi::{OsStr, OsString},
    fs::{self, File},
    io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::{
            ffi::OsStrExt,
            fs::{FileTypeExt, MetadataExt, PermissionsExt},
        },
    },
    path::{Path, PathBuf},
    process,
    time::Duration,
};

use nix::{
    fcntl::{AtFlags, OFlag, openat, renameat},
    sys::stat::{Mode, SFlag, fchmod, fstat},
    unistd::{Gid, UnlinkatFlags, fchownat, unlinkat},
};
use rustix::{
    io::{Errno as SocketErrno, FdFlags, fcntl_setfd, ioctl_fionbio},
    net::{SocketAddrUnix, SocketFlags, accept_with, bind, getsockname, listen, sockopt},
};

use super::{
    Cancel, Config, Peer,
    attempt::{Attempt, attempt, new_socket},
    lock::{Mark, PathLock, inode_of, served_by},
    path::{MAX_PATH, split},
    record::check_type,
};
use crate::{
    error::{Error, Result, SocketError},
    sys::{above_standard, fork::ProcessIdentity},
};

/// The length of the accept queue.
const BACKLOG: i32 = 128;

/// How long a drop or a take-over waits for the lock.
const LOCK_TIMEOUT: Duration = Duration::from_millis(200);

/// A listening socket. Dropping a listener made by [`Listener::bind`] removes its file, unless another socket has replaced it.
///
/// ```
/// use vmmfd::{channel::Listener, session::Config};
/// # let folder = vmmfd::internals::ExampleFolder::new()?;
/// # let path = folder.path().join("s.sock");
///
/// let listener = Listener::bind(&path, &Config::default())?;  // Only this user may connect.
/// assert!(Listener::bind(&path, &Config::default()).is_err(), "a process listens there");
/// drop(listener);
/// assert!(!path.exists());
/// # Ok::<(), vmmfd::Error>(())
/// ```
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
    path: PathBuf,
    /// The file to remove.
    file: Option<SocketFile>,
    /// Shows other processes that this one serves, even if the file is gone.
    mark: Option<Mark>,
}

/// A socket's file, which another socket may have replaced.
#[derive(Debug)]
struct SocketFile {
    folder: File,
    name: OsString,
    inode: (u64, u64),
    /// A fork does not remove it.
    creator: ProcessIdentity,
}

impl Listener {
    /// Listens at `path`. Replaces a socket on which no process listens. The file has mode 0600, or 0666 if the configuration trusts other
    /// users. Waits up to the configuration's timeout for the lock, a file next to the socket.
    ///
    /// The file always refers to a listening socket: under the lock, the socket is bound to a temporary name, listens, and is renamed.
    ///
    /// # Errors
    /// [`SocketError::AlreadyServed`] if another process listens there; [`SocketError::ServedWithoutFile`] if a broker serves the path
    /// although its socket's file was removed; [`SocketError::Path`] if the file is not a socket; [`SocketError::FolderLocked`] if another
    /// process holds the lock for that time; [`Error::System`], [`Error::Interrupted`].
    ///
    /// See bind(2), listen(2), flock(2), rename(2).
    pub fn bind(path: &Path, config: &Config) -> Result<Self> {
        let mode = if config.trust.uids.is_empty() { 0o600 } else { 0o666 };
        let rights = |file: &SocketName<'_>| file.set_rights(mode, None);
        Self::bind_and_mark(path, rights, false, config.timeout, &config.cancellation()?).map(|(listener, _)| listener)
    }

    /// Like [`Listener::bind`], with the permissions that `rights` sets before the file gets its final name. If `marks`, leaves a mark next
    /// to the socket, which is removed with the socket's file. Also returns the process of a remaining mark, which did not shut down
    /// cleanly.
    pub(crate) fn bind_and_mark(
        path: &Path,
        rights: impl Fn(&SocketName<'_>) -> io::Result<()>,
        marks: bool,
        timeout: Duration,
        cancel: &Cancel,
    ) -> Result<(Self, Option<i32>)> {
        let (folder_path, name) = split(path)?;
        let folder = open_folder(&folder_path)?;
        let lock = Self::lock_free(&folder, path, timeout, cancel)?;
        let marked_by = lock.marked_by();

        // Short, because a socket's path has at most 107 bytes, and unique among running processes, which hold other locks.
        let number =
            lock.inode().map_err(|error| Error::system(format!("inspect the lock of {}", path.display()), error))?;
        let temporary = Temporary { folder: &folder, name: format!(".vmmfd-{number}").into() };
        // A process that died here may have left the file.
        temporary.remove();
        let failed = |action: &str, error: io::Error| Error::system(format!("{action} {}", path.display()), error);
        let socket = new_socket()?;
        // Before it has a name, so that its file never has more permissions.
        fchmod(&socket, Mode::S_IRUSR | Mode::S_IWUSR)
            .map_err(|errno| failed("restrict the permissions of", errno.into()))?;
        let address = temporary.address(&folder_path).map_err(|errno| failed("address", errno.into()))?;
        bind(&socket, &address).map_err(|errno| failed("bind", errno.into()))?;
        // Independent of the umask. Before it listens, so that no process can connect yet; and without following a link, which another
        // user with write permission in the folder could have created.
        let file = SocketName { folder: &folder, name: &temporary.name };
        rights(&file).map_err(|error| failed("set the permissions of", error))?;
        listen(&socket, BACKLOG).map_err(|errno| failed("listen on", errno.into()))?;
        let inode = inode_of(&folder, &temporary.name).map_err(|errno| failed("inspect", errno.into()))?;
        renameat(&folder, temporary.name.as_os_str(), &folder, name.as_os_str())
            .map_err(|errno| failed("rename the socket to", errno.into()))?;
        // Finds no file: the socket has its own name now.
        drop(temporary);
        let marked = if marks { lock.mark(process::id()) } else { lock.unmark().map(|()| None) };
        let mark = marked.unwrap_or_else(|error| {
            tracing::warn!(%error, "can't mark the socket: a crash of this process will not be reported");
            None
        });
        drop(lock);
        let file = Some(SocketFile { folder, name, inode, creator: ProcessIdentity::current() });
        Ok((Self { socket, path: path.to_owned(), file, mark }, marked_by))
    }

    /// Listens on another socket at the same path, whose file was removed or replaced. On failure the current socket and mark stay.
    ///
    /// # Errors
    /// The errors of [`Listener::bind`].
    pub(crate) fn bind_again(
        &mut self,
        rights: impl Fn(&SocketName<'_>) -> io::Result<()>,
        cancel: &Cancel,
    ) -> Result<()> {
        // Its own mark would be another server's.
        let is_marked = self.mark.take().is_some();
        match Self::bind_and_mark(&self.path, rights, is_marked, LOCK_TIMEOUT, cancel) {
            Ok((bound, _)) => {
                *self = if self.file.is_none() { bound.leave_file() } else { bound };
                Ok(())
            }
            Err(error) => {
                if is_marked {
                    self.renew_mark();
                }
                Err(error)
            }
        }
    }

    /// Takes the lock of a path on which no process serves.
    fn lock_free<'a>(folder: &'a File, path: &Path, timeout: Duration, cancel: &Cancel) -> Result<PathLock<'a>> {
        let (folder_path, name) = split(path)?;
        let lock = PathLock::take(folder, &folder_path, &name, timeout, cancel)?;
        Self::check_free(path)?;
        match lock.is_served() {
            true => Err(Error::Socket(SocketError::ServedWithoutFile {
                path: path.to_owned(),
                pid: lock.marked_by().unwrap_or(0),
            })),
            false => Ok(lock),
        }
    }

    /// Takes over a listening socket, for example from systemd's socket activation. It becomes close-on-exec and non-blocking. Dropping the
    /// listener does not remove the socket's file.
    ///
    /// # Errors
    /// [`SocketError::Unfit`] if it does not listen, or is not of type `SOCK_SEQPACKET`; [`Error::System`].
    ///
    /// See sd_listen_fds(3).
    pub fn from_fd(socket: OwnedFd) -> Result<Self> {
        check_type(&socket)?;
        let failed = |errno: SocketErrno| Error::system("take over a listening socket", errno);
        if !sockopt::socket_acceptconn(&socket).map_err(failed)? {
            return Err(Error::Socket(SocketError::Unfit { problem: "it does not listen".to_owned() }));
        }
        fcntl_setfd(&socket, FdFlags::CLOEXEC).map_err(failed)?;
        ioctl_fionbio(&socket, true).map_err(failed)?;
        let address = getsockname(&socket).ok().and_then(|address| SocketAddrUnix::try_from(address).ok());
        let path =
            address.and_then(|address| Some(Path::new(OsStr::from_bytes(address.path()?.to_bytes())).to_owned()));
        Ok(Self { socket, path: path.unwrap_or_default(), file: None, mark: None })
    }

    /// Like [`Listener::from_fd`], for a socket that [`Listener::bind`] made at `path`, even if its file was removed or replaced.
    pub(crate) fn inherited(socket: OwnedFd, path: &Path) -> Result<Self> {
        let mut listener = Self::from_fd(socket)?;
        path.clone_into(&mut listener.path);
        Ok(listener)
    }

    /// Like [`Listener::from_fd`], for a socket that [`Listener::bind`] made at `path` in another process: the socket's own name is the
    /// temporary one. `None` if the file no longer refers to it. Leaves a closed connection to be accepted.
    ///
    /// # Errors
    /// The errors of [`Listener::from_fd`] and [`Listener::check_free`].
    pub(crate) fn take_over(socket: OwnedFd, path: &Path) -> Result<Option<Self>> {
        use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
        let listener = Self::inherited(socket, path)?;
        match attempt(path)? {
            Attempt::Connected(_) => {
                let mut fds = [PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
                // A client that connected at this moment looks the same; then the file refers to this socket too.
                if poll(&mut fds, PollTimeout::ZERO) == Ok(1) {
                    return Ok(Some(listener));
                }
                Self::check_free(path).map(|()| None)
            }
            Attempt::Full => Ok(Some(listener)),
            Attempt::Denied | Attempt::Absent => Ok(None),
        }
    }

    /// Marks the path of an inherited socket as served by this process, no longer by the process that bound it.
    pub(crate) fn renew_mark(&mut self) {
        let mark = || {
            let (folder_path, name) = split(&self.path)?;
            let folder = open_folder(&folder_path)?;
            let lock = PathLock::take(&folder, &folder_path, &name, LOCK_TIMEOUT, &Cancel::new()?)?;
            lock.mark(process::id()).map_err(|error| Error::system("mark the socket", error))
        };
        match mark() {
            Ok(mark) => self.mark = mark,
            Err(error) => tracing::warn!(
                error = error.in_full(),
                "if the socket's file is removed, another broker can bind the path"
            ),
        }
    }

    /// Whether the file that [`Listener::renew_mark`] or [`Listener::bind_and_mark`] marked was removed or replaced.
    pub(crate) fn has_lost_mark(&self) -> bool {
        let Some(mark) = &self.mark else { return false };
        let Ok((folder_path, name)) = split(&self.path) else { return false };
        open_folder(&folder_path).is_ok_and(|folder| mark.is_lost(&folder, &name))
    }

    /// Keeps the file when the listener is dropped.
    pub(crate) fn leave_file(self) -> Self {
        let mut listener = self;
        listener.file = None;
        listener
    }

    /// Removes the file of a socket on which no process listens. Does nothing if there is none.
    ///
    /// # Errors
    /// The errors of [`Listener::bind`].
    pub(crate) fn remove_unserved(path: &Path, timeout: Duration, cancel: &Cancel) -> Result<()> {
        let (folder_path, name) = split(path)?;
        let folder = open_folder(&folder_path)?;
        let lock = Self::lock_free(&folder, path, timeout, cancel)?;
        // If this fails, the next broker reports a crash that did not happen.
        let _ = lock.unmark();
        match unlinkat(&folder, name.as_os_str(), UnlinkatFlags::NoRemoveDir) {
            Ok(()) | Err(nix::errno::Errno::ENOENT) => Ok(()),
            Err(errno) => Err(Error::system(format!("remove {}", path.display()), errno)),
        }
    }

    /// Checks that no process listens at `path`. Does not block. Call it before expensive work for a listener; [`Listener::bind`] checks
    /// again under the lock.
    ///
    /// # Errors
    /// [`SocketError::AlreadyServed`], [`SocketError::Path`], [`Error::System`].
    pub fn check_free(path: &Path) -> Result<()> {
        let Some(metadata) = metadata_of(path)? else { return Ok(()) };
        match attempt(path)? {
            Attempt::Connected(socket) => Err(Error::Socket(SocketError::AlreadyServed {
                path: path.to_owned(),
                pid: Peer::of(&socket)?.living_pid(),
            })),
            Attempt::Full => Err(Error::Socket(SocketError::AlreadyServed { path: path.to_owned(), pid: 0 })),
            Attempt::Denied => {
                let reason = format!("uid {} owns it, and this user may not connect to check it", metadata.uid());
                Err(Error::Socket(SocketError::Path { path: path.to_owned(), reason }))
            }
            Attempt::Absent => Ok(()),
        }
    }

    /// Like [`Listener::check_free`], and also finds a broker whose socket's file was removed. Creates no file.
    ///
    /// # Errors
    /// The errors of [`Listener::check_free`]; [`SocketError::ServedWithoutFile`].
    pub(crate) fn check_unserved(path: &Path) -> Result<()> {
        Self::check_free(path)?;
        let (folder_path, name) = split(path)?;
        // The folder may be absent.
        match File::open(folder_path).ok().and_then(|folder| served_by(&folder, &name)) {
            Some(pid) => Err(Error::Socket(SocketError::ServedWithoutFile { path: path.to_owned(), pid })),
            None => Ok(()),
        }
    }

    /// Sets the permissions of the file at this listener's path again.
    ///
    /// # Errors
    /// [`Error::System`]; [`SocketError::Path`].
    pub(crate) fn set_rights(&self, rights: impl Fn(&SocketName<'_>) -> io::Result<()>) -> Result<()> {
        let (folder, name) = split(&self.path)?;
        let set = File::open(folder).and_then(|folder| rights(&SocketName { folder: &folder, name: &name }));
        set.map_err(|error| Error::system(format!("set the permissions of {}", self.path.display()), error))
    }

    /// The listener's path. Empty for a socket without a path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Accepts a connection. `None` if none is waiting. Does not block. The socket is close-on-exec.
    ///
    /// # Errors
    /// [`Error::System`]. After `EMFILE` or `ENFILE` the connection is still waiting. See accept(2).
    pub(crate) fn accept(&self) -> Result<Option<OwnedFd>> {
        match accept_with(&self.socket, SocketFlags::CLOEXEC) {
            Ok(socket) => above_standard(socket)
                .map(Some)
                .map_err(|error| Error::system(format!("accept on {}", self.path.display()), error)),
            Err(SocketErrno::AGAIN | SocketErrno::INTR | SocketErrno::CONNABORTED) => Ok(None),
            Err(errno) => Err(Error::system(format!("accept on {}", self.path.display()), errno)),
        }
    }
}

impl AsFd for Listener {
    /// Readable while a connection is waiting.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let Some(SocketFile { folder, name, inode, creator }) = &self.file else { return };
        if !creator.is_current() {
            return;
        }
        let folder_path = self.path.parent().unwrap_or(Path::new(""));
        let locked = Cancel::new().and_then(|cancel| PathLock::take(folder, folder_path, name, LOCK_TIMEOUT, &cancel));
        // Another process may hold the lock. Then the file is removed without the lock, with a short race.
        let locked = locked.inspect_err(|error| tracing::warn!(%error, "removing the socket without the lock"));
        // Another producer may have replaced the file after this one stopped listening.
        if inode_of(folder, name) == Ok(*inode) {
            let _ = locked.map(|lock| lock.unmark());
            let removed = unlinkat(folder, name.as_os_str(), UnlinkatFlags::NoRemoveDir);
            if let Err(errno) = removed {
                tracing::warn!(%errno, path = %self.path.display(), "can't remove the socket");
            }
        }
    }
}

/// A socket's file: a folder and a name in it.
#[derive(Debug)]
pub(crate) struct SocketName<'a> {
    folder: &'a File,
    name: &'a OsStr,
}

impl SocketName<'_> {
    /// Sets the group, if given, then the mode.
    ///
    /// # Errors
    /// See fchownat(2), chmod(2): `EPERM` if this process is not in the group.
    pub(crate) fn set_rights(&self, mode: u32, group: Option<u32>) -> io::Result<()> {
        let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let file = openat(self.folder, self.name, flags, Mode::empty())?;
        // Another user with write permission in the folder could have put another file there.
        let status = fstat(&file)?;
        if SFlag::from_bits_truncate(status.st_mode & SFlag::S_IFMT.bits()) != SFlag::S_IFSOCK {
            return Err(io::Error::other("a file that is not a socket has replaced it"));
        }
        // A seccomp filter may refuse fchownat(2), so it is only called if necessary.
        if let Some(group) = group.filter(|group| *group != status.st_gid) {
            fchownat(&file, "", None, Some(Gid::from_raw(group)), AtFlags::AT_EMPTY_PATH)?;
        }
        // fchmod(2) does not accept O_PATH descriptors.
        let through = Path::new("/proc/self/fd").join(file.as_raw_fd().to_string());
        fs::set_permissions(through, fs::Permissions::from_mode(mode))
    }
}

fn open_folder(path: &Path) -> Result<File> {
    let opened = File::open(path).and_then(|folder| above_standard(folder.into()));
    let opened = opened.map_err(|error| Error::system(format!("open the folder {}", path.display()), error))?;
    Ok(opened.into())
}

/// The metadata of the socket file at a path, if it exists.
///
/// # Errors
/// [`SocketError::Path`] for another kind of file; [`Error::System`].
fn metadata_of(path: &Path) -> Result<Option<fs::Metadata>> {
    match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.file_type().is_socket() => Ok(Some(metadata)),
        Ok(_) => {
            let reason = "a file of that name exists and is not a socket".to_owned();
            Err(Error::Socket(SocketError::Path { path: path.to_owned(), reason }))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Error::system(format!("inspect {}", path.display()), error)),
    }
}

/// The temporary name of a socket until it listens. Dropping it removes the file.
struct Temporary<'a> {
    folder: &'a File,
    name: OsString,
}

impl Temporary<'_> {
    fn address(&self, folder_path: &Path) -> rustix::io::Result<SocketAddrUnix> {
        let direct = folder_path.join(&self.name);
        let fits = direct.as_os_str().len() <= MAX_PATH;
        SocketAddrUnix::new(if fits { direct } else { through(self.folder, &self.name) })
    }

    fn remove(&self) {
        // Usually it does not exist.
        let _ = unlinkat(self.folder, self.name.as_os_str(), UnlinkatFlags::NoRemoveDir);
    }
}

impl Drop for Temporary<'_> {
    fn drop(&mut self) {
        self.remove();
    }
}

/// The path of a file in an open folder, short for any depth of folders.
fn through(folder: &File, name: &OsStr) -> PathBuf {
    Path::new("/proc/self/fd").join(folder.as_raw_fd().to_string()).join(name)
}
