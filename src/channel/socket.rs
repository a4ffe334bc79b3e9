//! Where the socket is, who may have put it there, and how to come by a connection.

use std::{
    env,
    ffi::{OsStr, OsString},
    fs::{self, DirBuilder, File, Permissions},
    io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::{
            ffi::OsStrExt,
            fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt},
        },
    },
    path::{Path, PathBuf},
    process,
    time::{Duration, Instant},
};

use super::{Cancel, Channel, Peer, Trust, deadline_after};
use crate::error::{Error, Result, SocketError};
use nix::{
    errno::Errno,
    fcntl::{AtFlags, Flock, FlockArg, renameat},
    sys::stat::{FchmodatFlags, Mode, fchmod, fchmodat, fstatat},
    unistd::{UnlinkatFlags, geteuid, unlinkat},
};
use rustix::{
    io::{Errno as SocketErrno, FdFlags, fcntl_setfd, ioctl_fionbio},
    net::{
        AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, getsockname, listen, socket_with,
        sockopt,
    },
};

/// The longest path of a socket: `sun_path` less its terminating zero.
const MAX_PATH: usize = 107;

/// Between two looks for what no event announces: a socket that appears, a lock that is let go, a full backlog.
const LOOK_AGAIN: Duration = Duration::from_millis(2);

/// The path of the socket: the one given, or the default of this user.
///
/// The default is `$XDG_RUNTIME_DIR/vmmfd/vmmfd.sock`, else `/tmp/vmmfd-UID/vmmfd.sock`; its folder is made, for this
/// user alone, where it is missing.
///
/// # Errors
/// [`SocketError::Path`] for a path that is too long, or whose folder does not exist; [`SocketError::UnsafeFolder`] if the
/// default folder is a link, belongs to another user or can be written by others; [`SocketError::DefaultFolder`] if it can't be
/// made or looked at.
pub fn socket_path(given: Option<&Path>) -> Result<PathBuf> {
    let path = match given {
        Some(path) => path.to_owned(),
        None => default_folder()?.join("vmmfd.sock"),
    };
    let unusable = |reason: String| Error::Socket(SocketError::Path { path: path.clone(), reason });
    let length = path.as_os_str().len();
    if length > MAX_PATH {
        return Err(unusable(format!("it has {length} bytes, and a socket's path has at most {MAX_PATH}")));
    }
    let (folder, _) = split(&path)?;
    match fs::metadata(&folder) {
        Ok(metadata) if metadata.is_dir() => Ok(path),
        Ok(_) => Err(unusable(format!("{} is not a folder", folder.display()))),
        Err(error) => Err(unusable(format!("its folder {} can't be opened: {error}", folder.display()))),
    }
}

fn default_folder() -> Result<PathBuf> {
    let runtime = env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|folder| folder.is_absolute());
    let folder = match runtime {
        Some(runtime) => runtime.join("vmmfd"),
        None => PathBuf::from(format!("/tmp/vmmfd-{}", geteuid())),
    };
    let made = DirBuilder::new().mode(0o700).create(&folder);
    // The umask may have taken the user's own rights too.
    match made.and_then(|()| fs::set_permissions(&folder, Permissions::from_mode(0o700))) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            return Err(Error::Socket(SocketError::DefaultFolder { path: folder, source: error }));
        }
        _ => {}
    }
    let metadata = match fs::symlink_metadata(&folder) {
        Ok(metadata) => metadata,
        Err(error) => return Err(Error::Socket(SocketError::DefaultFolder { path: folder, source: error })),
    };
    let unsafe_because =
        |reason: String| Err(Error::Socket(SocketError::UnsafeFolder { path: folder.clone(), reason }));
    if metadata.is_symlink() {
        return unsafe_because("it is a symbolic link".to_owned());
    }
    if !metadata.is_dir() {
        return unsafe_because("it is not a folder".to_owned());
    }
    if metadata.uid() != geteuid().as_raw() {
        return unsafe_because(format!("it belongs to uid {}, and this process to uid {}", metadata.uid(), geteuid()));
    }
    if metadata.mode() & 0o022 != 0 {
        return unsafe_because(format!("others may write in it (mode {:o})", metadata.mode() & 0o7777));
    }
    Ok(folder)
}

/// The folder and the name of a path.
fn split(path: &Path) -> Result<(PathBuf, OsString)> {
    let unusable = |reason: &str| Error::Socket(SocketError::Path { path: path.to_owned(), reason: reason.to_owned() });
    let name = path.file_name().filter(|_| !path.as_os_str().as_bytes().ends_with(b"/"));
    let name = name.ok_or_else(|| unusable("it names no file"))?.to_owned();
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder.to_owned(),
        _ => PathBuf::from("."),
    };
    Ok((folder, name))
}

/// How many connections may wait to be accepted.
const BACKLOG: i32 = 128;

/// What became of one attempt to connect.
enum Attempt {
    Connected(OwnedFd),
    /// There is no socket, or nobody listens on it.
    Nobody,
    /// Somebody listens and has no room for more at the moment.
    Full,
    /// This user may not connect.
    Denied,
}

fn attempt(path: &Path) -> Result<Attempt> {
    let address = SocketAddrUnix::new(path);
    let address = address.map_err(|errno| Error::system(format!("address {}", path.display()), errno))?;
    let socket = new_socket()?;
    match rustix::net::connect(&socket, &address) {
        Ok(()) => Ok(Attempt::Connected(socket)),
        Err(SocketErrno::NOENT | SocketErrno::CONNREFUSED) => Ok(Attempt::Nobody),
        Err(SocketErrno::AGAIN | SocketErrno::INTR) => Ok(Attempt::Full),
        Err(SocketErrno::ACCESS | SocketErrno::PERM) => Ok(Attempt::Denied),
        Err(SocketErrno::PROTOTYPE) => Err(Error::Socket(SocketError::Path {
            path: path.to_owned(),
            reason: "another program serves it, with another type of socket".to_owned(),
        })),
        Err(errno) => Err(Error::system(format!("connect to {}", path.display()), errno)),
    }
}

/// Non-blocking, since a full backlog would block `connect`.
fn new_socket() -> Result<OwnedFd> {
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)
        .map_err(|errno| Error::system("make a SOCK_SEQPACKET socket", errno))
}

/// Connects to the producer at a path, waiting for it to appear for as long as `timeout`.
///
/// # Errors
/// [`SocketError::Absent`] if nobody serves it in time; [`SocketError::NotAccepted`] if somebody does who has no room;
/// [`SocketError::Denied`] if this user may not connect; [`PeerError::NotAllowed`](crate::error::PeerError::NotAllowed) if a user not trusted serves it;
/// [`SocketError::Path`], [`Error::Interrupted`], [`Error::System`].
///
/// See connect(2), unix(7).
pub fn connect(path: &Path, timeout: Duration, trust: &Trust, cancel: &Cancel) -> Result<Channel> {
    let deadline = deadline_after(timeout);
    loop {
        let path = || path.to_owned();
        let in_vain = match attempt(&path())? {
            Attempt::Connected(socket) => {
                let channel = Channel::new(socket, timeout, cancel)?;
                trust.check(channel.peer())?;
                return Ok(channel);
            }
            // Perhaps nobody serves it, and a producer that lets this user in will replace it.
            Attempt::Denied => Error::Socket(SocketError::Denied { path: path() }),
            Attempt::Nobody => Error::Socket(SocketError::Absent { path: path(), waited: timeout }),
            Attempt::Full => Error::Socket(SocketError::NotAccepted { path: path(), waited: timeout }),
        };
        if Instant::now() >= deadline {
            return Err(in_vain);
        }
        cancel.pause(LOOK_AGAIN)?;
    }
}

/// A listening socket. Dropping one that [`Listener::bind`] made removes its file, unless another one has taken its place.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
    path: PathBuf,
    /// The file to remove at the end.
    file: Option<SocketFile>,
}

/// A socket's file, which may have been replaced meanwhile.
#[derive(Debug)]
struct SocketFile {
    folder: File,
    name: OsString,
    inode: (u64, u64),
}

/// That a socket keeps records apart and passes descriptors.
pub(super) fn check_type(socket: &impl AsFd) -> Result<()> {
    let unfit = |problem: &str| Err(Error::Socket(SocketError::Unfit { problem: problem.to_owned() }));
    match (sockopt::socket_domain(socket), sockopt::socket_type(socket)) {
        (Ok(AddressFamily::UNIX), Ok(SocketType::SEQPACKET)) => Ok(()),
        (Ok(_), Ok(_)) => unfit("it is not of type SOCK_SEQPACKET and family AF_UNIX"),
        (Err(SocketErrno::NOTSOCK), _) => unfit("it is no socket"),
        (Err(errno), _) | (_, Err(errno)) => Err(Error::system("look at a socket", errno)),
    }
}

impl Listener {
    /// Listens at a path. A socket that nobody serves is replaced. The file is 0600, or 0666 if `open_to_others`.
    ///
    /// Nobody ever finds a socket there that does not listen yet: under a lock on the folder it is bound to another name,
    /// made to listen, and renamed.
    ///
    /// # Errors
    /// [`SocketError::AlreadyServed`] if somebody serves the path; [`SocketError::Path`] if it is taken by something that is no
    /// socket; [`SocketError::FolderLocked`] if the folder stays locked for `timeout`; [`Error::System`],
    /// [`Error::Interrupted`].
    ///
    /// See bind(2), listen(2), flock(2), rename(2).
    pub fn bind(path: &Path, open_to_others: bool, timeout: Duration, cancel: &Cancel) -> Result<Self> {
        let (folder_path, name) = split(path)?;
        let folder = File::open(&folder_path)
            .map_err(|error| Error::system(format!("open the folder {}", folder_path.display()), error))?;
        let _locked = lock(&folder, &folder_path, timeout, cancel)?;
        Self::check_free(path)?;

        let temporary = Temporary { folder: &folder, name: format!(".vmmfd-{}", process::id()).into() };
        // Left by a process that died here and had the same number; the lock keeps the living away.
        temporary.remove();
        let failed = |action: &str, error: io::Error| Error::system(format!("{action} {}", path.display()), error);
        let socket = new_socket()?;
        // Before it has a name, so that it never has one with more rights.
        fchmod(&socket, Mode::S_IRUSR | Mode::S_IWUSR).map_err(|errno| failed("restrict", errno.into()))?;
        let address = temporary.address(&folder_path).map_err(|errno| failed("address", errno.into()))?;
        bind(&socket, &address).map_err(|errno| failed("bind", errno.into()))?;
        // The umask took what it would: nobody can connect before it listens, so this is early enough. Never through a
        // link, which somebody else who may write here could have put in its place.
        let mode = Mode::from_bits_truncate(if open_to_others { 0o666 } else { 0o600 });
        fchmodat(&folder, temporary.name.as_os_str(), mode, FchmodatFlags::NoFollowSymlink)
            .map_err(|errno| failed("set the rights of", errno.into()))?;
        listen(&socket, BACKLOG).map_err(|errno| failed("listen on", errno.into()))?;
        let inode = inode_of(&folder, &temporary.name).map_err(|errno| failed("look at", errno.into()))?;
        renameat(&folder, temporary.name.as_os_str(), &folder, name.as_os_str())
            .map_err(|errno| failed("put in place", errno.into()))?;
        std::mem::forget(temporary);
        Ok(Self { socket, path: path.to_owned(), file: Some(SocketFile { folder, name, inode }) })
    }

    /// Takes over a socket that listens already: from systemd's socket activation, say. It is made close-on-exec and
    /// non-blocking. Its file, if it has one, stays when this is dropped.
    ///
    /// # Errors
    /// [`Error::Socket`] for anything else than a listening socket of type `SOCK_SEQPACKET`; [`Error::System`].
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
        Ok(Self { socket, path: path.unwrap_or_default(), file: None })
    }

    /// Checks that nobody serves a path: to be called early, before anything expensive is made for it. [`Listener::bind`]
    /// checks again, under the lock.
    ///
    /// # Errors
    /// [`SocketError::AlreadyServed`], [`SocketError::Path`], [`Error::System`].
    pub fn check_free(path: &Path) -> Result<()> {
        let metadata = match fs::symlink_metadata(path) {
            Ok(metadata) => metadata,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(Error::system(format!("look at {}", path.display()), error)),
        };
        if !metadata.file_type().is_socket() {
            let reason = "there is something else of that name, which is not a socket".to_owned();
            return Err(Error::Socket(SocketError::Path { path: path.to_owned(), reason }));
        }
        match attempt(path)? {
            Attempt::Connected(socket) => {
                Err(Error::Socket(SocketError::AlreadyServed { path: path.to_owned(), pid: Peer::of(&socket)?.pid }))
            }
            Attempt::Full => Err(Error::Socket(SocketError::AlreadyServed { path: path.to_owned(), pid: 0 })),
            Attempt::Denied => {
                let reason = format!("uid {} owns it, and this user can't tell whether it is served", metadata.uid());
                Err(Error::Socket(SocketError::Path { path: path.to_owned(), reason }))
            }
            Attempt::Nobody => Ok(()),
        }
    }

    /// Where it listens; empty for a socket that has no path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Takes a connection if one waits. The socket is close-on-exec.
    ///
    /// # Errors
    /// [`Error::System`]: with `EMFILE` or `ENFILE` the connection still waits. See accept(2).
    pub(crate) fn accept(&self) -> Result<Option<OwnedFd>> {
        match accept_with(&self.socket, SocketFlags::CLOEXEC) {
            Ok(socket) => Ok(Some(socket)),
            Err(SocketErrno::AGAIN | SocketErrno::INTR | SocketErrno::CONNABORTED) => Ok(None),
            Err(errno) => Err(Error::system(format!("accept on {}", self.path.display()), errno)),
        }
    }
}

impl AsFd for Listener {
    /// Readable while a connection waits.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let Some(SocketFile { folder, name, inode }) = &self.file else { return };
        let locked = Cancel::new().and_then(|cancel| lock(folder, &self.path, Duration::from_millis(200), &cancel));
        // Another process may hold the lock: then without it, at the risk of a moment.
        let _locked = locked.inspect_err(|error| tracing::warn!(%error, "the socket is removed all the same"));
        // Another producer may have found this one not listening any more and taken its place.
        if inode_of(folder, name) == Ok(*inode) {
            let removed = unlinkat(folder, name.as_os_str(), UnlinkatFlags::NoRemoveDir);
            if let Err(errno) = removed {
                tracing::warn!(%errno, path = %self.path.display(), "the socket can't be removed");
            }
        }
    }
}

/// The name that a socket has until it listens.
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
        // Most often there is nothing.
        let _ = unlinkat(self.folder, self.name.as_os_str(), UnlinkatFlags::NoRemoveDir);
    }
}

impl Drop for Temporary<'_> {
    fn drop(&mut self) {
        self.remove();
    }
}

/// A file in an open folder as a path, short however deep the folder is.
fn through(folder: &File, name: &OsStr) -> PathBuf {
    Path::new("/proc/self/fd").join(folder.as_raw_fd().to_string()).join(name)
}

fn inode_of(folder: &File, name: &OsStr) -> nix::Result<(u64, u64)> {
    fstatat(folder, name, AtFlags::AT_SYMLINK_NOFOLLOW).map(|stat| (stat.st_dev, stat.st_ino))
}

/// Locks a folder against others who bind or remove sockets in it. It leaves no file behind.
fn lock(folder: &File, path: &Path, timeout: Duration, cancel: &Cancel) -> Result<Flock<File>> {
    let failed = |error: io::Error| Error::system(format!("lock the folder {}", path.display()), error);
    let deadline = deadline_after(timeout);
    let mut folder = folder.try_clone().map_err(failed)?;
    loop {
        match Flock::lock(folder, FlockArg::LockExclusiveNonblock) {
            Ok(locked) => return Ok(locked),
            Err((back, Errno::EAGAIN | Errno::EINTR)) if Instant::now() < deadline => folder = back,
            Err((_, Errno::EAGAIN)) => {
                return Err(Error::Socket(SocketError::FolderLocked { path: path.to_owned(), waited: timeout }));
            }
            Err((_, errno)) => return Err(failed(errno.into())),
        }
        cancel.pause(LOOK_AGAIN)?;
    }
}
