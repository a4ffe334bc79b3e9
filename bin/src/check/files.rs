//! Files as content: loading a file into shared memory, saving shared memory to a file, and digests of both.
//!
//! Copies go through a [`Mirror`] of one slice at a time, so host memory does not grow with the data.

use std::{
    fs::{self, File, Permissions},
    io::{self, Write},
    ops::Range,
    os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    time::SystemTime,
};

use tempfile::{Builder, NamedTempFile};
use vmmfd::{
    error::{Error, MemoryError, Result},
    internals::{interruptibly, sized_mirror},
    memory::{Mirror, Region},
};

use crate::{
    check::{check_range, pattern::slices},
    error::ToolError,
    units::bytes,
};

/// The size of a slice in bytes, a multiple of 4.
const SLICE: usize = 8 << 20;

/// A digest in progress. The format is defined in [`vmmfd::wire`].
#[derive(Default)]
struct Digest(blake3::Hasher);

impl Digest {
    /// The prefix of supported digests.
    const ALGORITHM: &'static str = "blake3:";

    fn text(&self) -> String {
        format!("{}{}", Self::ALGORITHM, self.0.finalize().to_hex())
    }
}

/// Whether this version supports a digest.
pub fn is_known(digest: &str) -> bool {
    let hexadecimal = |digits: &str| digits.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'));
    digest.strip_prefix(Digest::ALGORITHM).is_some_and(|digits| digits.len() == 64 && hexadecimal(digits))
}

/// A file to share.
#[derive(Debug)]
pub struct Source {
    path: PathBuf,
    file: File,
    size: u64,
    modified: Option<SystemTime>,
}

impl Source {
    /// Opens a regular file.
    ///
    /// # Errors
    /// [`ToolError::File`] if it is not a regular file, or empty; [`Error::System`].
    pub fn open(path: &Path) -> Result<Self> {
        let invalid =
            |problem: &str| Err(Error::from(ToolError::File { path: path.to_owned(), problem: problem.to_owned() }));
        // Non-blocking: opening a pipe would wait for its peer.
        let file = match File::options().read(true).custom_flags(nix::libc::O_NONBLOCK).open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return invalid("does not exist"),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                return invalid("can't be read: permission denied");
            }
            Err(error) => return Err(Error::system(format!("open {}", path.display()), error)),
        };
        let metadata = file.metadata().map_err(|error| Error::system(format!("look at {}", path.display()), error))?;
        if !metadata.is_file() {
            return invalid("is not a regular file: its size can't be known before it is read");
        }
        if metadata.len() == 0 {
            return invalid("is empty: there is nothing to share");
        }
        Ok(Self { path: path.to_owned(), file, size: metadata.len(), modified: metadata.modified().ok() })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The size in bytes at the time of opening.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Copies the file to the start of memory, zeroes the rest, and returns the digest.
    ///
    /// `progress` is called after each slice with the number of bytes done. Its error stops the copy.
    ///
    /// # Errors
    /// [`ToolError::File`] if the file was changed since it was opened; [`MemoryError::OutOfRange`] if the memory is too small;
    /// [`Error::System`]; the errors of the mirror and of `progress`.
    ///
    /// Driver calls: as [`Mirror`].
    pub fn load(&self, region: &dyn Region, progress: &mut dyn FnMut(u64) -> Result<()>) -> Result<String> {
        check_range(region, 0, &(0..self.size))?;
        let mut digest = Digest::default();
        let mut mirror = Mirror::to_fill(region, 0, region.size().min(SLICE as u64))?;
        let mut staged = Vec::new();
        for part in slices(0..region.size(), SLICE) {
            let length = part.end - part.start;
            let data = self.size.saturating_sub(part.start).min(length) as usize;
            mirror.turn_to_unread(part.start, length)?;
            let (bytes, stages) = match mirror.bytes_mut() {
                Some(bytes) => (bytes, false),
                None => {
                    staged.resize(length as usize, 0);
                    (&mut staged[..], true)
                }
            };
            self.read_at(part.start, &mut bytes[..data])?;
            bytes[data..].fill(0);
            digest.0.update(&bytes[..data]);
            if stages {
                mirror.write(0, &staged)?;
            }
            mirror.commit()?;
            progress(part.end.min(self.size))?;
        }
        region.synchronize()?;
        self.check_unchanged()?;
        Ok(digest.text())
    }

    /// Reads a range of the file again and returns its digest. `tick` is called after each slice. Its error stops the read.
    ///
    /// # Errors
    /// [`ToolError::File`] if the file was changed since it was opened; [`MemoryError::OutOfRange`]; [`Error::System`]; the errors of
    /// `tick`.
    pub fn digest(&self, range: Range<u64>, tick: &mut dyn FnMut() -> Result<()>) -> Result<String> {
        if range.start > range.end || range.end > self.size {
            let length = range.end.saturating_sub(range.start);
            return Err(Error::Memory(MemoryError::OutOfRange { offset: range.start, length, size: self.size }));
        }
        let mut digest = Digest::default();
        let mut bytes = Vec::new();
        for part in slices(range, SLICE) {
            bytes.resize((part.end - part.start) as usize, 0);
            self.read_at(part.start, &mut bytes)?;
            digest.0.update(&bytes);
            tick()?;
        }
        self.check_unchanged()?;
        Ok(digest.text())
    }

    fn read_at(&self, offset: u64, to: &mut [u8]) -> Result<()> {
        self.file.read_exact_at(to, offset).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => self.changed(),
            _ => Error::system(format!("read {}", self.path.display()), error),
        })
    }

    /// A file that changes during the copy would be shared half old and half new.
    fn check_unchanged(&self) -> Result<()> {
        let metadata = self.file.metadata();
        let metadata = metadata.map_err(|error| Error::system(format!("look at {}", self.path.display()), error))?;
        let same = metadata.len() == self.size && metadata.modified().ok() == self.modified;
        if same { Ok(()) } else { Err(self.changed()) }
    }

    fn changed(&self) -> Error {
        let problem =
            format!("was changed since it was opened with {}: share a copy that is not written to", bytes(self.size));
        Error::from(ToolError::File { path: self.path.clone(), problem })
    }
}

/// Passes a range of an object to `each` slice by slice, and returns its digest. The memory starts at the object's offset `start`.
///
/// # Errors
/// [`MemoryError::OutOfRange`] if the range is not inside the memory; the errors of the mirror and of `each`.
///
/// Driver calls: as [`Mirror`].
pub fn read(
    region: &dyn Region,
    start: u64,
    range: Range<u64>,
    each: &mut dyn FnMut(&[u8]) -> Result<()>,
) -> Result<String> {
    check_range(region, start, &range)?;
    let mut digest = Digest::default();
    let mut mirror = None::<Mirror<'_>>;
    let mut staged = Vec::new();
    for part in slices(range, SLICE) {
        let offset = part.start - start;
        let length = part.end - part.start;
        let mirror = match &mut mirror {
            Some(mirror) => {
                mirror.turn_to(offset, length)?;
                mirror
            }
            // Reserve a whole slice even if the first one is shorter.
            None => mirror.insert(sized_mirror(region, offset, length, SLICE as u64)?),
        };
        let bytes = match mirror.bytes() {
            Some(bytes) => bytes,
            None => {
                // Copy once: another process may write to the memory, and the digest must match the bytes that are written to the file.
                staged.resize((part.end - part.start) as usize, 0);
                mirror.read(0, &mut staged)?;
                &staged[..]
            }
        };
        digest.0.update(bytes);
        each(bytes)?;
    }
    Ok(digest.text())
}

/// A file that appears under its name only when it is complete.
#[derive(Debug)]
pub struct Target {
    path: PathBuf,
    replace: bool,
    file: NamedTempFile,
}

impl Target {
    /// Creates a temporary file in the target's folder. Drop removes it; a killed process leaves it behind, with a name that starts with
    /// `.vmmfd-`.
    ///
    /// # Errors
    /// [`ToolError::File`] if the target exists and `replace` is false, or is not a regular file; [`Error::System`].
    pub fn create(path: &Path, replace: bool) -> Result<Self> {
        let invalid =
            |problem: &str| Err(Error::from(ToolError::File { path: path.to_owned(), problem: problem.to_owned() }));
        let write_error = |error: io::Error| match error.kind() {
            io::ErrorKind::NotFound => invalid("is in a folder that does not exist").unwrap_err(),
            io::ErrorKind::NotADirectory => invalid("is not in a folder").unwrap_err(),
            io::ErrorKind::PermissionDenied => invalid("can't be written: permission denied").unwrap_err(),
            io::ErrorKind::ReadOnlyFilesystem => invalid("can't be written: the file system is read-only").unwrap_err(),
            _ => Error::system(format!("write {}", path.display()), error),
        };
        let path_written = match fs::metadata(path) {
            Ok(metadata) if !metadata.is_file() => return invalid("exists and is not a regular file"),
            Ok(_) if !replace => return invalid("exists: name another file, or replace it with --force"),
            // Replace the target of a link, not the link.
            Ok(_) => fs::canonicalize(path).map_err(write_error)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound && path.is_symlink() => {
                return invalid("is a link to a file that does not exist: name that file, or remove the link");
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => path.to_owned(),
            Err(error) => return Err(write_error(error)),
        };
        if path_written.file_name().is_none() {
            return invalid("is not the name of a file");
        }
        let folder = match path_written.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder,
            _ => Path::new("."),
        };
        // Use the mode of a new file, or of the replaced file.
        let mut builder = Builder::new();
        builder.prefix(".vmmfd-").permissions(Permissions::from_mode(0o666));
        let file = builder.tempfile_in(folder).map_err(write_error)?;
        if let Ok(replaced) = fs::metadata(&path_written) {
            file.as_file().set_permissions(replaced.permissions()).map_err(write_error)?;
        }
        Ok(Self { path: path_written, replace, file })
    }

    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(|error| self.write_error(error))
    }

    /// Writes the file to the disk, renames it to its final name and returns the path. Calls `tick` during the write: the disk may be slow.
    ///
    /// # Errors
    /// [`ToolError::File`] if another file has appeared under that name and must not be replaced; [`Error::System`]; the errors of `tick`.
    ///
    /// See fsync(2) and rename(2).
    pub fn finish(self, tick: &mut dyn FnMut() -> Result<()>) -> Result<PathBuf> {
        let written = self.file.as_file().try_clone().map_err(|error| self.write_error(error))?;
        interruptibly(tick, move || written.sync_all().map_err(|error| Error::system("sync a file", error)))?;
        let Self { path, replace, file } = self;
        let result = if replace { file.persist(&path) } else { file.persist_noclobber(&path) };
        match result {
            Ok(_) => Ok(path),
            Err(persist) if persist.error.kind() == io::ErrorKind::AlreadyExists => {
                let problem = "has appeared meanwhile: name another file, or replace it with --force".to_owned();
                Err(Error::from(ToolError::File { path, problem }))
            }
            Err(persist) => Err(Error::system(format!("write {}", path.display()), persist.error)),
        }
    }

    fn write_error(&self, error: io::Error) -> Error {
        Error::system(format!("write {}", self.path.display()), error)
    }
}
