//! The errors of the tools, and hints about these and the library's errors.

use std::{path::PathBuf, time::Duration};

use vmmfd::error::{
    BrokerError, DeviceError, Error, ErrorCode, ErrorKind, LoadError, MemoryError, PeerError, RefusalCode, SocketError,
    code,
};

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

    /// The name of a new object belongs to another user.
    #[error("`{name}` exists, and this user may not {verb} it")]
    NotWritable {
        name: String,
        /// The permission that this user lacks: `read` or `replace`.
        verb: &'static str,
    },

    /// The peer of a meeting did not appear.
    #[error("no other doctor met this one at {} within {waited:?}", path.display())]
    Absent {
        path: PathBuf,
        waited: Duration,
        /// The missing command: `serve` or `join`.
        missing: &'static str,
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
        Some(ToolError::NotWritable { .. }) => ErrorKind::Object,
        Some(ToolError::Absent { .. }) => ErrorKind::Peer,
        Some(ToolError::Child { .. }) | None => error.kind(),
    }
}

/// A hint for the user about an error, if there is a general one.
pub fn hint(error: &Error) -> Option<&str> {
    if let Some(own) = ToolError::of(error) {
        return match own {
            ToolError::Child { hint, .. } => hint.as_deref(),
            ToolError::File { .. } => None,
            ToolError::NotWritable { .. } => Some("use another name, or ask the object's owner to delete it"),
            ToolError::Absent { missing: "serve", .. } => {
                Some("run `vmmfd doctor serve` on the same --socket, or wait longer with --wait")
            }
            ToolError::Absent { .. } => {
                Some("run `vmmfd doctor join` on the same --socket, or wait longer with --wait")
            }
        };
    }
    Some(match error {
        Error::Load(LoadError::NoLibrary { .. }) => {
            "install NVIDIA's driver, or give the container the GPU (for Docker: --gpus all); \
             --backend host tries the tools on ordinary memory"
        }
        Error::Load(LoadError::Stub { .. }) => "remove the toolkit's stubs folder from LD_LIBRARY_PATH",
        Error::Load(LoadError::MissingSymbol { .. }) => "CUDA 11.4 or newer is needed: update the driver",
        Error::Load(LoadError::NoDevice) => {
            "check nvidia-smi -L and CUDA_VISIBLE_DEVICES; --backend host tries the tools on ordinary memory"
        }
        Error::Device(DeviceError::NotFound { backend: "host", .. }) => "the host backend has one device, 0",
        Error::Device(DeviceError::NotFound { .. }) => {
            "ordinals count only the devices that CUDA_VISIBLE_DEVICES allows"
        }
        Error::Device(DeviceError::Ambiguous { .. }) => "write more digits of the UUID",
        Error::Device(DeviceError::Unsupported { .. }) => "`vmmfd devices` lists what can be shared of each device",
        Error::Device(DeviceError::NoPeerAccess { .. }) => {
            "choose a device of the same NVLink or PCIe group with --device; nvidia-smi topo -p2p r shows which can"
        }
        Error::Memory(MemoryError::TooManyDescriptors { .. }) => "raise ulimit -n, or use larger chunks",
        Error::Forked { .. } => "start the process with exec, or initialise the driver after the fork",
        Error::Memory(MemoryError::OutOfMemory { .. }) => "request less, or free memory first",
        Error::Socket(error) => return socket_hint(error),
        Error::Broker(BrokerError { code, .. }) => return refusal_hint(*code),
        Error::Peer(PeerError::NoConsumer { .. }) => {
            "start a consumer on the same --socket, or wait longer with --timeout"
        }
        Error::Peer(PeerError::Timeout { .. }) => {
            "the peer may hang or be much slower: check it, or raise --timeout on both sides"
        }
        Error::Peer(PeerError::TurnTooLong { .. }) => "a turn lasts ten times --timeout: raise it on this side",
        Error::Peer(PeerError::Gone { .. }) => {
            "it printed its own error, unless it was killed (for lack of memory: see dmesg)"
        }
        Error::Peer(PeerError::NotAllowed { .. }) => {
            "to trust that user, give this command --allow-uid with its number"
        }
        Error::Peer(PeerError::Reported { code: ErrorCode::Refused, .. }) => NOT_ADMITTED,
        Error::Driver { code: code::OUT_OF_MEMORY, .. } => "free memory first, or request less",
        Error::Driver { code: code::SYSTEM_DRIVER_MISMATCH, .. } => {
            "the driver library and the kernel module differ in version: reboot, or rebuild the container"
        }
        Error::Driver { call: "cuInit", .. } => {
            "check nvidia-smi and the kernel log: the driver is installed but fails"
        }
        _ => return None,
    })
}

/// A hint for a peer that does not admit this user.
const NOT_ADMITTED: &str = "the process that listens there must be started with --allow-uid and this user's number; a broker also admits \
                            the members of a group with --allow-gid";

/// A hint for the user about a socket, if there is a general one.
fn socket_hint(error: &SocketError) -> Option<&'static str> {
    Some(match error {
        SocketError::UnsafeFolder { .. } | SocketError::FolderLocked { .. } => {
            "name a socket in a folder of your own with --socket"
        }
        SocketError::DefaultFolder { .. } => "check XDG_RUNTIME_DIR, or name a socket with --socket",
        SocketError::NotAccepted { .. } => {
            "check the process that listens there: it may be stopped, or have too many connections"
        }
        SocketError::Path { .. } => "name another path with --socket",
        SocketError::AlreadyServed { .. } => "stop that process, or use another --socket",
        SocketError::Absent { .. } => "start a producer on the same --socket, or wait longer with --timeout",
        SocketError::NoBroker { .. } => "start one with `vmmfd serve`, or name its socket with --socket",
        SocketError::ClosedFolder { .. } => {
            "the folder's owner must let this user in: with chmod o+x, or with g+x for a group of this user"
        }
        SocketError::Denied { group: Some(_), .. } => {
            "add this user to that group and log in again, or start the process that listens there with --allow-uid and this user's number"
        }
        SocketError::Denied { .. } => NOT_ADMITTED,
        _ => return None,
    })
}

/// A hint for the user about a broker's refusal, if there is a general one.
fn refusal_hint(code: RefusalCode) -> Option<&'static str> {
    Some(match code {
        RefusalCode::Absent => "`vmmfd ls` lists the objects that this user may read",
        RefusalCode::Exists => "replace it with --replace, or use another name",
        RefusalCode::Version => "another process replaced it: `vmmfd stat` shows the current version for the next try",
        RefusalCode::Differs => "`vmmfd stat` shows its sizes, metadata and digests",
        RefusalCode::Denied => {
            "its owner and the broker's user delete it; the --mode of its first put says who reads and replaces it"
        }
        RefusalCode::Quota => "delete what is not needed, or raise the limit with `vmmfd serve --quota`",
        RefusalCode::Full => "raise ulimit -n for the broker, or use larger chunks",
        RefusalCode::Timeout => "wait longer, or check the process that should put it",
        RefusalCode::Failed => "see the broker's log",
        _ => return None,
    })
}
