//! Errors about sockets and their folders.

use std::{io, path::PathBuf, time::Duration};

/// A socket can't be created, or no connection can be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SocketError {
    /// The socket's path can't be used.
    #[error("socket path {path} can't be used: {reason}", path = path.display())]
    Path {
        /// The path.
        path: PathBuf,
        /// The reason.
        reason: String,
    },

    /// The folder of the socket's path does not exist.
    #[error("socket path {path} can't be used: its folder {folder} does not exist", path = path.display(), folder = folder.display())]
    NoFolder {
        /// The socket.
        path: PathBuf,
        /// The folder.
        folder: PathBuf,
    },

    /// The folder of the default socket is not safe to use.
    #[error("folder {path} is not safe for a socket: {reason}", path = path.display())]
    UnsafeFolder {
        /// The folder.
        path: PathBuf,
        /// The reason.
        reason: String,
    },

    /// The folder of the default socket can't be created or examined.
    #[error("no default socket: the folder {path} can't be used", path = path.display())]
    DefaultFolder {
        /// The folder.
        path: PathBuf,
        /// The operating system's error.
        source: io::Error,
    },

    /// Another process serves this socket.
    #[error("{path} is already served by {who}", path = path.display(), who = process_name(*pid))]
    AlreadyServed {
        /// The socket.
        path: PathBuf,
        /// The process that listens on the socket, or 0 if unknown.
        pid: i32,
    },

    /// A broker serves this path, although its socket's file was removed or replaced.
    #[error("{who} still serves {path}, although the socket's file was removed", path = path.display(), who = process_name(*pid))]
    ServedWithoutFile {
        /// The socket.
        path: PathBuf,
        /// The broker's server, as the number in its own PID namespace, or 0 if unknown.
        pid: i32,
    },

    /// Another process of this user holds the lock of a socket in this folder.
    #[error("a socket in {path} stayed locked by another process for {waited:?}", path = path.display())]
    FolderLocked {
        /// The folder.
        path: PathBuf,
        /// The time limit.
        waited: Duration,
    },

    /// No producer served the socket in time.
    #[error("no producer on {path} within {waited:?}", path = path.display())]
    Absent {
        /// The socket.
        path: PathBuf,
        /// The time limit.
        waited: Duration,
    },

    /// No broker served the socket in time.
    #[error("no broker on {}{}{}", path.display(), within(*waited),
        otherwise.iter().map(|other| format!(", and {other}")).collect::<String>())]
    NoBroker {
        /// The socket.
        path: PathBuf,
        /// The time limit.
        waited: Duration,
        /// The result for other paths that were searched, completing the sentence.
        otherwise: Option<String>,
    },

    /// The process that serves the socket did not accept the connection in time: its backlog is full.
    #[error("the process that listens on {path} accepted no connection within {waited:?}", path = path.display())]
    NotAccepted {
        /// The socket.
        path: PathBuf,
        /// The time limit.
        waited: Duration,
    },

    /// This user may not connect to the socket.
    #[error("the process that listens on {path} does not let this user connect{}", only_group(group.as_deref()), path = path.display())]
    Denied {
        /// The socket.
        path: PathBuf,
        /// The group whose members may connect: its name, or its number if it has no name.
        group: Option<String>,
    },

    /// This user may not search a folder of the socket's path.
    #[error("{path} can't be reached: this user may not enter the folder {folder}", path = path.display(), folder = folder.display())]
    ClosedFolder {
        /// The socket.
        path: PathBuf,
        /// The first folder without search permission (x).
        folder: PathBuf,
    },

    /// The caller's socket can't be used.
    #[error("the socket can't be used: {problem}")]
    Unfit {
        /// The reason in one sentence.
        problem: String,
    },
}

fn only_group(name: Option<&str>) -> String {
    name.map(|name| format!(": the socket is for the group {name}")).unwrap_or_default()
}

/// Nothing if the caller did not wait.
fn within(waited: Duration) -> String {
    if waited.is_zero() { String::new() } else { format!(" within {waited:?}") }
}

fn process_name(pid: i32) -> String {
    if pid == 0 { "another process".to_owned() } else { format!("pid {pid}") }
}
