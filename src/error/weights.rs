//! Why files of weights can't be loaded.

use std::path::PathBuf;

/// A file of weights can't be used. No memory was taken for it, but after [`WeightsError::Changed`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WeightsError {
    /// There is no such file or folder.
    #[error("{} does not exist{}", path.display(), named_by.as_ref().map_or_else(String::new, |index| {
        format!(", and {} names it", index.display())
    }))]
    Absent {
        /// Its path.
        path: PathBuf,
        /// The index that names it, if one does.
        named_by: Option<PathBuf>,
    },

    /// This process may not read it.
    #[error("{} can't be read: permission denied", path.display())]
    Denied {
        /// Its path.
        path: PathBuf,
    },

    /// It is no file of weights, or contradicts itself or another.
    #[error("{} {problem}", path.display())]
    Invalid {
        /// Its path.
        path: PathBuf,
        /// Why, as the rest of a sentence.
        problem: String,
    },

    /// It is not the same any more.
    #[error("{} was changed since it was opened with {size} bytes: load a copy that is not written to", path.display())]
    Changed {
        /// Its path.
        path: PathBuf,
        /// Its size in bytes, when it was opened.
        size: u64,
    },
}
