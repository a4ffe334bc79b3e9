//! Errors of weight files.

use std::path::PathBuf;

use super::units::bytes;

/// A weight file can't be used. No memory was allocated for it, except after [`WeightsError::Changed`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WeightsError {
    /// The file or folder does not exist.
    #[error("{} does not exist{}", path.display(), named_by.as_ref().map_or_else(String::new, |index| {
        format!(", and {} names it", index.display())
    }))]
    Absent {
        /// The file's path.
        path: PathBuf,
        /// The index that names the file, if there is one.
        named_by: Option<PathBuf>,
    },

    /// This process may not read the file.
    #[error("{} can't be read: permission denied", path.display())]
    Denied {
        /// The file's path.
        path: PathBuf,
    },

    /// The file is not a weight file, or contradicts itself or another file.
    #[error("{} {problem}", path.display())]
    Invalid {
        /// The file's path.
        path: PathBuf,
        /// The reason, as the rest of a sentence.
        problem: String,
    },

    /// The file was changed after it was opened.
    #[error("{} was changed since it was opened with {}: load a copy that is not written to", path.display(), bytes(*size))]
    Changed {
        /// The file's path.
        path: PathBuf,
        /// The size in bytes when the file was opened.
        size: u64,
    },
}
