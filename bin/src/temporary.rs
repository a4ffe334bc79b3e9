//! Temporary folders for sockets.

use std::{env, io, path::PathBuf};

use tempfile::TempDir;

use vmmfd::error::{Error, Result};

/// The prefix of the tools' temporary folders.
pub const PREFIX: &str = "vmmfd-";

/// A folder with a path short enough for a socket in it; drop removes it. Tries the folder for temporary files, `/tmp`, `$XDG_RUNTIME_DIR`
/// and `/dev/shm`: the doctor must also run where temporary files can't be created.
///
/// # Errors
/// [`Error::System`] if no folder is usable.
pub fn temporary_folder(prefix: &str) -> Result<TempDir> {
    const LONGEST: usize = 70;
    let runtime = env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let places = [Some(env::temp_dir()), Some("/tmp".into()), runtime, Some("/dev/shm".into())];
    let mut failed = None;
    for place in places.into_iter().flatten() {
        match tempfile::Builder::new().prefix(prefix).tempdir_in(place) {
            Ok(folder) if folder.path().as_os_str().len() <= LONGEST => return Ok(folder),
            Ok(_) => {}
            Err(error) => failed = failed.or(Some(error)),
        }
    }
    let failed = failed.unwrap_or_else(|| io::Error::other("the path is too long in every folder for temporary files"));
    Err(Error::system("create a temporary folder", failed))
}
