//! What is wrong with a socket and its folder.

use std::{io, path::PathBuf, time::Duration};

/// A socket can not be made, or no connection over it can be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SocketError {
    /// The socket's path can't be used.
    #[error("socket path {path} can't be used: {reason}", path = path.display())]
    Path {
        /// The path.
        path: PathBuf,
        /// Why.
        reason: String,
    },

    /// The folder that holds the default socket is not safe to use.
    #[error("folder {path} is not safe for a socket: {reason}", path = path.display())]
    UnsafeFolder {
        /// The folder.
        path: PathBuf,
        /// Why.
        reason: String,
    },

    /// The folder for the default socket can't be made, or looked at.
    #[error("no default socket: the folder {path} can't be used", path = path.display())]
    DefaultFolder {
        /// The folder.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },

    /// Another process serves this socket.
    #[error("{path} is already served by {who}", path = path.display(), who = process_name(*pid))]
    AlreadyServed {
        /// The socket.
        path: PathBuf,
        /// The process that listens on it, or 0 if it is not known.
        pid: i32,
    },

    /// Another process of this user holds the lock of a socket in this folder.
    #[error("a socket in {path} stayed locked by another process for {waited:?}", path = path.display())]
    FolderLocked {
        /// The folder.
        path: PathBuf,
        /// How long was waited.
        waited: Duration,
    },

    /// No process served the socket in time.
    #[error("no producer on {path} within {waited:?}", path = path.display())]
    Absent {
        /// The socket.
        path: PathBuf,
        /// How long was waited.
        waited: Duration,
    },

    /// No broker served the socket in time.
    #[error("no broker on {path} within {waited:?}{}", otherwise.iter().map(|other| format!(", and {other}")).collect::<String>(),
        path = path.display())]
    NoBroker {
        /// The socket.
        path: PathBuf,
        /// How long was waited.
        waited: Duration,
        /// Why no other broker was found, where others were looked for: the end of a sentence that names their path.
        otherwise: Option<String>,
    },

    /// A process serves the socket and did not accept this connection in time: its backlog is full.
    #[error("the process that listens on {path} accepted no connection within {waited:?}", path = path.display())]
    NotAccepted {
        /// The socket.
        path: PathBuf,
        /// How long was waited.
        waited: Duration,
    },

    /// The socket is not for this user.
    #[error("the process that listens on {path} does not let this user connect{}", only_group(group.as_deref()), path = path.display())]
    Denied {
        /// The socket.
        path: PathBuf,
        /// The group whose members may connect: its name, or its number if it has none.
        group: Option<String>,
    },

    /// This user may not enter a folder on the way to the socket.
    #[error("{path} can't be reached: this user may not enter the folder {folder}", path = path.display(), folder = folder.display())]
    ClosedFolder {
        /// The socket.
        path: PathBuf,
        /// The first folder that lacks the permission to search it (x).
        folder: PathBuf,
    },

    /// A socket that the caller gave can't be used.
    #[error("the socket can't be used: {problem}")]
    Unfit {
        /// Why: one sentence.
        problem: String,
    },
}

fn only_group(name: Option<&str>) -> String {
    name.map(|name| format!(": the socket is for the group {name}")).unwrap_or_default()
}

fn process_name(pid: i32) -> String {
    if pid == 0 { "another process".to_owned() } else { format!("pid {pid}") }
}
