//! The default paths of sockets, and the safety of their folders.

use std::{
    env,
    ffi::OsString,
    fs::{self, DirBuilder, Permissions},
    io,
    os::unix::{
        ffi::OsStrExt,
        fs::{DirBuilderExt, MetadataExt, PermissionsExt},
    },
    path::{Path, PathBuf},
};

use nix::unistd::geteuid;

use super::attempt::{Attempt, attempt};
use crate::error::{Error, Result, SocketError};

/// The name of a broker's socket in the default folder.
const BROKER_SOCKET: &str = "broker.sock";

/// The socket of the packaged system broker. `VMMFD_SYSTEM_SOCKET` overrides it.
const SYSTEM_BROKER_SOCKET: &str = "/run/vmmfd/broker.sock";

/// The longest path of a socket: `sun_path` without its terminating zero. See unix(7).
pub(super) const MAX_PATH: usize = 107;

/// The path of a producer's socket: `given`, or this user's default.
///
/// The default is `$XDG_RUNTIME_DIR/vmmfd/vmmfd.sock`, otherwise `/tmp/vmmfd-UID/vmmfd.sock`. Creates the default folder with mode 0700
/// if it does not exist. The socket need not exist.
///
/// # Errors
/// [`SocketError::Path`] if the path is too long; [`SocketError::NoFolder`] if its folder does not exist; [`SocketError::UnsafeFolder`] if
/// the default folder is a link, belongs to another user or is writable by others; [`SocketError::DefaultFolder`] if it can't be created
/// or inspected.
///
/// ```
/// use std::path::Path;
/// use vmmfd::channel::socket_path;
///
/// assert_eq!(socket_path(Some(Path::new("/tmp/weights.sock")))?, Path::new("/tmp/weights.sock"));
/// let of_this_user = socket_path(None)?;
/// assert!(of_this_user.ends_with("vmmfd.sock"));
/// # Ok::<(), vmmfd::Error>(())
/// ```
pub fn socket_path(given: Option<&Path>) -> Result<PathBuf> {
    usable(given, "vmmfd.sock")
}

/// The path for a broker to listen on: `given`, or this user's default. Clients use [`BrokerPath::find`].
///
/// The default is `$XDG_RUNTIME_DIR/vmmfd/broker.sock`, otherwise `/tmp/vmmfd-UID/broker.sock`. See [`socket_path`].
///
/// # Errors
/// The errors of [`socket_path`].
pub fn broker_socket_path(given: Option<&Path>) -> Result<PathBuf> {
    usable(given, BROKER_SOCKET)
}

/// The path at which a client finds its broker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BrokerPath {
    path: PathBuf,
    /// Why the other broker was not chosen: the end of a sentence.
    otherwise: Option<String>,
}

impl BrokerPath {
    /// Returns `given`, otherwise this user's broker, otherwise the system's broker.
    ///
    /// This user's broker listens on `$XDG_RUNTIME_DIR/vmmfd/broker.sock`, otherwise `/tmp/vmmfd-UID/broker.sock`. If no process listens
    /// there, the system's broker is chosen if its socket exists: `/run/vmmfd/broker.sock`, or the environment variable
    /// `VMMFD_SYSTEM_SOCKET`. If neither exists, this user's broker is chosen: it may start later.
    ///
    /// Creates no folder. Does not block.
    ///
    /// # Errors
    /// [`SocketError::Path`] if `given` is too long; [`SocketError::NoFolder`] if its folder does not exist; [`SocketError::ClosedFolder`]
    /// if this user may not enter a folder of it; without a system broker, [`SocketError::UnsafeFolder`] and
    /// [`SocketError::DefaultFolder`] as for [`socket_path`].
    pub fn find(given: Option<&Path>) -> Result<Self> {
        if let Some(given) = given {
            return Ok(Self { path: usable(Some(given), BROKER_SOCKET)?, otherwise: None });
        }
        let system = env::var_os("VMMFD_SYSTEM_SOCKET").filter(|path| !path.is_empty());
        let system = system.map_or_else(|| PathBuf::from(SYSTEM_BROKER_SOCKET), PathBuf::from);
        let missing = match fs::metadata(&system) {
            Ok(_) => None,
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                Some(format!("this user may not enter the folder of {}", system.display()))
            }
            Err(_) => Some(format!("there is no {}", system.display())),
        };
        match (default_broker_socket(), missing) {
            (Ok(path), Some(missing)) => Ok(Self { path, otherwise: Some(missing) }),
            (Ok(own), None) if !matches!(attempt(&own), Ok(Attempt::Absent)) => Ok(Self { path: own, otherwise: None }),
            (Ok(own), None) => {
                Ok(Self { path: system, otherwise: Some(format!("no process listens on {}", own.display())) })
            }
            (Err(_), None) => Ok(Self { path: system, otherwise: None }),
            (Err(error), Some(_)) => Err(error),
        }
    }

    /// The path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Adds the reason why the other broker was not chosen to a [`SocketError::NoBroker`].
    pub fn complete(&self, error: Error) -> Error {
        match error {
            Error::Socket(SocketError::NoBroker { path, waited, .. }) if path == self.path => {
                Error::Socket(SocketError::NoBroker { path, waited, otherwise: self.otherwise.clone() })
            }
            other => other,
        }
    }
}

/// The first folder of a path that this user may not enter, if any.
pub(super) fn closed_folder(path: &Path) -> Option<PathBuf> {
    let mut folders: Vec<&Path> = path.ancestors().skip(1).filter(|folder| !folder.as_os_str().is_empty()).collect();
    folders.reverse();
    // Looking up `.` in a folder requires search permission in it: see path_resolution(7).
    let is_closed = |folder: &&Path| {
        fs::metadata(folder.join(".")).is_err_and(|error| error.kind() == io::ErrorKind::PermissionDenied)
    };
    folders.into_iter().find(is_closed).map(Path::to_owned)
}

/// The default socket of this user's broker. Does not create the folder, and checks it only if it exists.
///
/// # Errors
/// [`SocketError::UnsafeFolder`] and [`SocketError::DefaultFolder`], as [`socket_path`].
pub fn default_broker_socket() -> Result<PathBuf> {
    let folder = default_folder();
    match fs::symlink_metadata(&folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        _ => check_folder(&folder)?,
    }
    Ok(folder.join(BROKER_SOCKET))
}

/// Checks a path for a socket. Creates its folder with mode 0700 if it does not exist.
///
/// # Errors
/// [`SocketError::Path`] if the path is too long; [`SocketError::DefaultFolder`] if the folder can't be created.
pub(crate) fn created_socket_path(given: &Path) -> Result<PathBuf> {
    let (folder, _) = split(given)?;
    if fs::symlink_metadata(&folder).is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
        create_private(&folder)?;
    }
    usable(Some(given), "")
}

/// The given path, or a name in the default folder, which is created.
fn usable(given: Option<&Path>, name: &str) -> Result<PathBuf> {
    let path = match given {
        Some(path) => path.to_owned(),
        None => created_default_folder()?.join(name),
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
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Err(Error::Socket(SocketError::NoFolder { path, folder }))
        }
        Err(error) => match closed_folder(&path) {
            Some(folder) => Err(Error::Socket(SocketError::ClosedFolder { path, folder })),
            None => Err(unusable(format!("its folder {} can't be opened: {error}", folder.display()))),
        },
    }
}

fn default_folder() -> PathBuf {
    let runtime = env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|folder| folder.is_absolute());
    match runtime {
        Some(runtime) => runtime.join("vmmfd"),
        None => PathBuf::from(format!("/tmp/vmmfd-{}", geteuid())),
    }
}

fn created_default_folder() -> Result<PathBuf> {
    let folder = default_folder();
    create_private(&folder)?;
    Ok(folder)
}

/// Creates a folder with mode 0700, or checks the existing folder.
fn create_private(folder: &Path) -> Result<()> {
    let created = DirBuilder::new().mode(0o700).create(folder);
    // The umask may have removed the owner's permissions.
    match created.and_then(|()| fs::set_permissions(folder, Permissions::from_mode(0o700))) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            return Err(Error::Socket(SocketError::DefaultFolder { path: folder.to_owned(), source: error }));
        }
        _ => {}
    }
    check_folder(folder)
}

/// Checks that no other user can create a socket in the folder, or replace the folder.
fn check_folder(folder: &Path) -> Result<()> {
    let metadata = match fs::symlink_metadata(folder) {
        Ok(metadata) => metadata,
        Err(error) => return Err(Error::Socket(SocketError::DefaultFolder { path: folder.to_owned(), source: error })),
    };
    let unsafe_because =
        |reason: String| Err(Error::Socket(SocketError::UnsafeFolder { path: folder.to_owned(), reason }));
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
    Ok(())
}

/// The folder and the file name of a path.
pub(super) fn split(path: &Path) -> Result<(PathBuf, OsString)> {
    let unusable = |reason: &str| Error::Socket(SocketError::Path { path: path.to_owned(), reason: reason.to_owned() });
    let name = path.file_name().filter(|_| !path.as_os_str().as_bytes().ends_with(b"/"));
    let name = name.ok_or_else(|| unusable("it names no file"))?.to_owned();
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder.to_owned(),
        _ => PathBuf::from("."),
    };
    Ok((folder, name))
}
