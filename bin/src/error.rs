//! The errors of the tools, and hints about these and the library's errors.

use std::{borrow::Cow, path::PathBuf};

use vmmfd::error::{BrokerError, Error, ErrorCode, ErrorKind, LoadError, PeerError, RefusalCode, SocketError};

/// An error of the tools, stored in [`Error::Caller`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ToolError {
    /// A file can't be used.
    #[error("{} {problem}", path.display())]
    File {
        path: PathBuf,
        /// The reason, as the rest of a sentence.
        problem: String,
    },

    /// A process can't be restored after a checkpoint.
    #[error("process {pid} ({command}) can't be restored later: it {reason}")]
    Tied {
        pid: u32,
        command: String,
        /// The memory that ties it to other processes, as the rest of a sentence.
        reason: String,
        /// What would allow the checkpoint.
        remedy: String,
    },

    /// A request to an engine's server failed.
    #[error("{request} {problem}")]
    Http {
        /// Its method and address.
        request: String,
        /// The event, as the rest of a sentence.
        problem: String,
        hint: Option<&'static str>,
    },

    /// A child process failed, died or hangs.
    #[error("{process} {message}")]
    Child {
        /// What users call it: `the producer`.
        process: String,
        /// The event, as the rest of a sentence: `was killed by SIGABRT`.
        message: String,
        /// The hint of the child's own error.
        hint: Option<String>,
    },
}

impl ToolError {
    /// The tools' error inside an error, if any.
    pub fn of(error: &Error) -> Option<&Self> {
        match error {
            Error::Caller(caller) => caller.downcast_ref(),
            _ => None,
        }
    }
}

impl From<ToolError> for Error {
    fn from(error: ToolError) -> Self {
        Self::Caller(Box::new(error))
    }
}

/// The class of an error, which determines the exit code.
pub fn kind_of(error: &Error) -> ErrorKind {
    match ToolError::of(error) {
        Some(ToolError::File { .. }) => ErrorKind::Usage,
        Some(ToolError::Tied { .. }) => ErrorKind::Object,
        Some(ToolError::Http { .. }) => ErrorKind::Peer,
        Some(ToolError::Child { .. }) | None => error.kind(),
    }
}

/// A hint for the user about an error, if there is a general one: the library's, or one that names a command's option.
pub fn hint(error: &Error) -> Option<Cow<'_, str>> {
    if let Some(own) = ToolError::of(error) {
        return match own {
            ToolError::Child { hint, .. } => hint.as_deref().map(Cow::from),
            ToolError::Tied { remedy, .. } => (!remedy.is_empty()).then(|| remedy.into()),
            ToolError::Http { hint, .. } => hint.map(Cow::from),
            ToolError::File { .. } => None,
        };
    }
    option_hint(error).map(Cow::from).or_else(|| error.hint())
}

fn option_hint(error: &Error) -> Option<&'static str> {
    Some(match error {
        Error::Load(LoadError::NoLibrary { .. }) => {
            "install NVIDIA's driver, or give the container the GPU (for Docker: --gpus all); \
             --backend host tries the tools on ordinary memory"
        }
        Error::Load(LoadError::NoDevice) => {
            "check nvidia-smi -L and CUDA_VISIBLE_DEVICES; --backend host tries the tools on ordinary memory"
        }
        Error::Peer(PeerError::NoConsumer { .. }) => {
            "start a consumer on the same --socket, or wait longer with --timeout"
        }
        Error::Peer(PeerError::NotAllowed { .. }) => {
            "to trust that user, give this command --allow-uid with its number"
        }
        Error::Peer(PeerError::Reported { code: ErrorCode::Refused, .. })
        | Error::Socket(SocketError::Denied { group: None, .. }) => {
            "the process that listens there must be started with --allow-uid and this user's number; a broker also admits the members of a \
             group with --allow-gid; if the socket's mode admits this user, SELinux does not: give both containers the same label"
        }
        Error::Socket(SocketError::Denied { .. }) => {
            "add this user to that group and log in again, or start the process that listens there with --allow-uid and this user's number"
        }
        Error::Socket(SocketError::Absent { .. }) => {
            "start a producer on the same --socket, for `vmmfd sub` a publisher on the same --at, or wait longer with --timeout"
        }
        Error::Socket(SocketError::NoBroker { .. }) => "start one with `vmmfd serve`, or name its socket with --socket",
        Error::Broker(BrokerError { code, .. }) => match code {
            RefusalCode::Absent => "`vmmfd ls` lists the objects that this user may read",
            RefusalCode::Exists => "replace it with --replace if it is an object, or use another name",
            RefusalCode::Quota => "delete what is not needed, or raise the limit with `vmmfd serve --quota`",
            _ => return None,
        },
        _ => return None,
    })
}
