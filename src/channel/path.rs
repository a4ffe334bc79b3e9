//! Where the socket is, and whether its folder is safe.

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

/// Where the packaged unit of the system's broker listens. `VMMFD_SYSTEM_SOCKET` names another path.
const SYSTEM_BROKER_SOCKET: &str = "/run/vmmfd/broker.sock";

/// The longest path of a socket: `sun_path` less its terminating zero. See unix(7).
pub(super) const MAX_PATH: usize = 107;

/// The path of a producer's socket: the one given, or the default of this user.
///
/// The default is `$XDG_RUNTIME_DIR/vmmfd/vmmfd.sock`, else `/tmp/vmmfd-UID/vmmfd.sock`. Its folder is created with mode 0700
/// if it does not exist. The socket itself need not exist.
///
/// # Errors
/// [`SocketError::Path`] for a path that is too long, or whose folder does not exist; [`SocketError::UnsafeFolder`] if the
/// default folder is a link, belongs to another user or can be written by others; [`SocketError::DefaultFolder`] if it can't be
/// created or inspected.
pub fn socket_path(given: Option<&Path>) -> Result<PathBuf> {
    usable(given, "vmmfd.sock")
}

/// The path on which a broker listens: the one given, or the default of this user. Clients use [`BrokerPath::find`].
///
/// As [`socket_path`], with the default `$XDG_RUNTIME_DIR/vmmfd/broker.sock`, else `/tmp/vmmfd-UID/broker.sock`.
///
/// # Errors
/// As [`socket_path`].
pub fn broker_socket_path(given: Option<&Path>) -> Result<PathBuf> {
    usable(given, BROKER_SOCKET)
}

/// Where a client finds its broker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BrokerPath {
    path: PathBuf,
    /// Why the broker that was not chosen can't be reached, as the end of a sentence.
    otherwise: Option<String>,
}

impl BrokerPath {
    /// The path that is given, else that of this user's broker, else that of the system's broker.
    ///
    /// This user's broker listens on `$XDG_RUNTIME_DIR/vmmfd/broker.sock`, else `/tmp/vmmfd-UID/broker.sock`. If no process listens there,
    /// the system's broker is chosen, provided that its socket exists: `/run/vmmfd/broker.sock`, or the path in the environment
    /// variable `VMMFD_SYSTEM_SOCKET`. If neither exists, the path is that of this user's broker, which may still start.
    ///
    /// Creates no folder. Does not block.
    ///
    /// # Errors
    /// [`SocketError::Path`] for a given path that is too long or whose folder does not exist; [`SocketError::ClosedFolder`] if this
    /// user may not enter a folder on the way to it; without a system's broker [`SocketError::UnsafeFolder`] and
    /// [`SocketError::DefaultFolder`], as [`socket_path`].
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

    /// Adds the other path that was tried to the error of a connection without a broker.
    pub fn complete(&self, error: Error) -> Error {
        match error {
            Error::Socket(SocketError::NoBroker { path, waited, .. }) if path == self.path => {
                Error::Socket(SocketError::NoBroker { path, waited, otherwise: self.otherwise.clone() })
            }
            other => other,
        }
    }
}

/// The first folder on the way to a path that this user may not enter, if there is one.
pub(super) fn closed_folder(path: &Path) -> Option<PathBuf> {
    let mut folders: Vec<&Path> = path.ancestors().skip(1).filter(|folder| !folder.as_os_str().is_empty()).collect();
    folders.reverse();
    // To look up the folder itself in it takes the right to search it: see path_resolution(7).
    let is_closed = |folder: &&Path| {
        fs::metadata(folder.join(".")).is_err_and(|error| error.kind() == io::ErrorKind::PermissionDenied)
    };
    folders.into_iter().find(is_closed).map(Path::to_owned)
}

/// Where a broker of this user listens by default. Its folder is not created, and checked only if it exists.
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

/// A path that is given for a socket of this user alone. Its folder is created with mode 0700 if it does not exist.
///
/// # Errors
/// [`SocketError::Path`] for a path that is too long; [`SocketError::UnsafeFolder`] if the folder is a link, belongs to another user or
/// can be opened by others; [`SocketError::DefaultFolder`] if it can't be created or inspected.
pub fn private_socket_path(given: &Path) -> Result<PathBuf> {
    let (folder, _) = split(given)?;
    create_private(&folder)?;
    let metadata = fs::symlink_metadata(&folder)
        .map_err(|error| Error::Socket(SocketError::DefaultFolder { path: folder.clone(), source: error }))?;
    if metadata.mode() & 0o077 != 0 {
        let reason = format!("others may open it (mode {:o}): use a folder of mode 700", metadata.mode() & 0o7777);
        return Err(Error::Socket(SocketError::UnsafeFolder { path: folder, reason }));
    }
    usable(Some(given), "")
}

/// The path that is given, or that of a name in the default folder, which is created.
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

/// Creates a folder with mode 0700, and checks one that exists.
fn create_private(folder: &Path) -> Result<()> {
    let created = DirBuilder::new().mode(0o700).create(folder);
    // The umask may have removed the user's own rights too.
    match created.and_then(|()| fs::set_permissions(folder, Permissions::from_mode(0o700))) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            return Err(Error::Socket(SocketError::DefaultFolder { path: folder.to_owned(), source: error }));
        }
        _ => {}
    }
    check_folder(folder)
}

/// Checks that no other user can put a socket into the folder, or another folder in its place.
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
