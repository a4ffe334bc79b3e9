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

use crate::error::{Error, Result, SocketError};

/// The longest path of a socket: `sun_path` less its terminating zero. See unix(7).
pub(super) const MAX_PATH: usize = 107;

/// The path of the socket: the one given, or the default of this user.
///
/// The default is `$XDG_RUNTIME_DIR/vmmfd/vmmfd.sock`, else `/tmp/vmmfd-UID/vmmfd.sock`. Its folder is created with mode 0700
/// if it does not exist. The socket itself need not exist.
///
/// # Errors
/// [`SocketError::Path`] for a path that is too long, or whose folder does not exist; [`SocketError::UnsafeFolder`] if the
/// default folder is a link, belongs to another user or can be written by others; [`SocketError::DefaultFolder`] if it can't be
/// created or inspected.
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
    let created = DirBuilder::new().mode(0o700).create(&folder);
    // The umask may have removed the user's own rights too.
    match created.and_then(|()| fs::set_permissions(&folder, Permissions::from_mode(0o700))) {
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
