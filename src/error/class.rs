//! The class of an error, for callers in other languages to branch on, and the next step.

use std::{borrow::Cow, io};

#[cfg(feature = "weights")]
use super::WeightsError;
use super::{
    BrokerError, DeviceError, Error, ErrorCode, ErrorKind, LoadError, MemoryError, PeerError, RefusalCode, SocketError,
    code,
};

/// A finer division of [`Error`] than [`ErrorKind`]: the bindings have an exception or a code for each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorClass {
    /// An argument is invalid, or the state of the object does not allow the call. Nothing was changed.
    Invalid,
    /// The object, device, file, producer or broker does not exist.
    NotFound,
    /// The object has no such array or part, or it was not requested.
    NoArray,
    /// An object of that name exists.
    Exists,
    /// The object differs from the caller's expectation.
    Differs,
    /// This user lacks the permission.
    Denied,
    /// The wait that the caller requested expired.
    Timeout,
    /// The peer is gone or silent, or broke the protocol.
    Disconnected,
    /// The device or the machine has too little memory.
    OutOfMemory,
    /// This machine, driver or device does not support the operation.
    Unsupported,
    /// The caller stopped the call.
    Interrupted,
    /// This process is a fork of the process that initialised the driver.
    Forked,
    /// Another driver call failed.
    Driver,
    /// A system call failed, or the broker or a publisher has reached a limit.
    System,
}

impl Error {
    /// The class of the error.
    pub fn class(&self) -> ErrorClass {
        match self {
            Self::Memory(MemoryError::NotExchanged { source, .. } | MemoryError::NotImported { source, .. }) => {
                source.class()
            }
            Self::Driver { code: code::OUT_OF_MEMORY, .. } | Self::Memory(MemoryError::OutOfMemory { .. }) => {
                ErrorClass::OutOfMemory
            }
            Self::System { source, .. } if source.kind() == io::ErrorKind::OutOfMemory => ErrorClass::OutOfMemory,
            Self::Forked { .. } => ErrorClass::Forked,
            Self::Broker(BrokerError { code, .. }) => match code {
                RefusalCode::Absent => ErrorClass::NotFound,
                RefusalCode::Lacks => ErrorClass::NoArray,
                RefusalCode::Exists => ErrorClass::Exists,
                RefusalCode::Version | RefusalCode::Differs => ErrorClass::Differs,
                RefusalCode::Denied => ErrorClass::Denied,
                RefusalCode::Timeout => ErrorClass::Timeout,
                RefusalCode::Invalid => ErrorClass::Invalid,
                RefusalCode::Stopped => ErrorClass::Interrupted,
                _ => ErrorClass::System,
            },
            Self::Memory(MemoryError::NoArray { .. }) => ErrorClass::NoArray,
            Self::Device(DeviceError::NotFound { .. })
            | Self::Socket(SocketError::Absent { .. } | SocketError::NoBroker { .. }) => ErrorClass::NotFound,
            Self::Socket(SocketError::Denied { .. } | SocketError::ClosedFolder { .. })
            | Self::Peer(PeerError::NotAllowed { .. } | PeerError::Reported { code: ErrorCode::Access, .. }) => {
                ErrorClass::Denied
            }
            Self::Peer(PeerError::Reported { code: ErrorCode::Full, .. }) => ErrorClass::System,
            Self::Peer(PeerError::NoConsumer { .. } | PeerError::Starved { .. }) => ErrorClass::Timeout,
            Self::Peer(PeerError::Mismatch { code: ErrorCode::Backend | ErrorCode::Device, .. }) => {
                ErrorClass::Unsupported
            }
            #[cfg(feature = "weights")]
            Self::Weights(WeightsError::Absent { .. }) => ErrorClass::NotFound,
            #[cfg(feature = "weights")]
            Self::Weights(WeightsError::Denied { .. }) => ErrorClass::Denied,
            _ => match self.kind() {
                ErrorKind::Usage => ErrorClass::Invalid,
                ErrorKind::Unsupported => ErrorClass::Unsupported,
                ErrorKind::Peer => ErrorClass::Disconnected,
                ErrorKind::Interrupted => ErrorClass::Interrupted,
                _ if matches!(self, Self::Driver { .. }) => ErrorClass::Driver,
                _ => ErrorClass::System,
            },
        }
    }

    /// The next step in one sentence, if there is a general one. It names no option of a command and no argument of a language.
    pub fn hint(&self) -> Option<Cow<'static, str>> {
        let hint = match self {
            Self::Socket(SocketError::NoBroker { path, .. }) | Self::Peer(PeerError::BrokerGone { path, .. }) => {
                let path = path.display();
                return Some(format!("start `vmmfd serve` at {path}, or use the path of a running broker").into());
            }
            Self::Peer(PeerError::NotAllowed { uid, .. }) => {
                return Some(format!("add uid {uid} to the trusted users to accept that process").into());
            }
            Self::Memory(MemoryError::NotExchanged { source, .. } | MemoryError::NotImported { source, .. }) => {
                return source.hint();
            }
            Self::Load(error) => load_hint(error),
            Self::Device(error) => device_hint(error),
            Self::Socket(error) => socket_hint(error)?,
            Self::Broker(BrokerError { code, .. }) => refusal_hint(*code)?,
            Self::Peer(PeerError::NoConsumer { .. }) => "start a consumer at the same path, or wait longer",
            Self::Peer(PeerError::Timeout { .. }) => {
                "the process at the other end is stopped or overloaded, or the timeout is too short"
            }
            Self::Peer(PeerError::Starved { .. }) => {
                "wait longer, make the pool larger, or let subscribers hold fewer buffers"
            }
            Self::Peer(PeerError::WorkLost { .. }) => "discard what was read behind the wait, and connect again",
            Self::Peer(PeerError::TurnTooLong { .. }) => "a turn lasts ten times the timeout: raise it on this side",
            Self::Peer(PeerError::Gone { .. }) => {
                "it reported its own error, unless it was killed (for lack of memory: see dmesg)"
            }
            Self::Peer(PeerError::Reported { code: ErrorCode::Refused, .. }) => NOT_ADMITTED,
            Self::Peer(PeerError::Mismatch { code: ErrorCode::Backend, .. }) => "use the backend of the memory",
            Self::Memory(MemoryError::OutOfMemory { .. }) | Self::Driver { code: code::OUT_OF_MEMORY, .. } => {
                "free memory first, or request less: `vmmfd who` and nvidia-smi show the users of GPU memory, free shows host memory, and \
                 `ulimit -v` limits a process's address space"
            }
            Self::Memory(MemoryError::AmbiguousArray { .. }) => "select the part, then the array",
            Self::Memory(MemoryError::TooManyDescriptors { .. }) => {
                "raise this process's limit of open files (ulimit -n), or use larger chunks"
            }
            Self::Memory(MemoryError::NotShareable { .. }) => {
                "copy it, or allocate it so that it can be exported: PyTorch with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or with \
                 the pool of this library"
            }
            Self::Memory(MemoryError::Neighbours { .. }) => {
                "copy the data, or allow neighbours if every receiver may see them"
            }
            Self::Forked { .. } => "start the other process with exec, or use the library only after the fork",
            Self::Driver { code: code::SYSTEM_DRIVER_MISMATCH, .. } => {
                "the driver library and the kernel module differ in version: reboot, or rebuild the container"
            }
            Self::Driver { call: "cuInit", .. } => {
                "check nvidia-smi and the kernel log: the driver is installed but fails"
            }
            _ => return None,
        };
        Some(hint.into())
    }
}

const NOT_ADMITTED: &str = "the process that listens there must admit this user, or a group of this user";

fn load_hint(error: &LoadError) -> &'static str {
    match error {
        LoadError::Stub { .. } => "remove the toolkit's stubs folder from LD_LIBRARY_PATH",
        LoadError::MissingSymbol { .. } => "CUDA 11.4 or newer is needed: update the driver",
        LoadError::NoDevice => {
            "check nvidia-smi -L and CUDA_VISIBLE_DEVICES; without a GPU, the backend `host` shares ordinary memory"
        }
        _ => {
            "install NVIDIA's driver, or give the container the GPU; without a GPU, the backend `host` shares ordinary memory"
        }
    }
}

fn device_hint(error: &DeviceError) -> &'static str {
    match error {
        DeviceError::NotFound { backend: "host", .. } => "the host backend has one device, 0",
        DeviceError::NotFound { .. } => "ordinals count only the devices that CUDA_VISIBLE_DEVICES allows",
        DeviceError::Ambiguous { .. } => "write more digits of the UUID",
        DeviceError::Unsupported { .. } => "`vmmfd devices` lists how each device can share memory",
        DeviceError::Unordered { .. } => "synchronize the stream, then publish or send",
        DeviceError::NoPeerAccess { .. } => {
            "choose a device of the same NVLink or PCIe group; nvidia-smi topo -p2p r shows which can"
        }
    }
}

fn socket_hint(error: &SocketError) -> Option<&'static str> {
    Some(match error {
        SocketError::UnsafeFolder { .. } | SocketError::FolderLocked { .. } => "use a path in a folder of your own",
        SocketError::DefaultFolder { .. } => "check XDG_RUNTIME_DIR, or use another path",
        SocketError::NotAccepted { .. } => {
            "check the process that listens there: it may be stopped, or have too many connections"
        }
        SocketError::Path { .. } => "use another path",
        SocketError::NoFolder { .. } => "create the folder, or use another path",
        SocketError::AlreadyServed { .. } | SocketError::ServedWithoutFile { .. } => {
            "stop that process, or use another path"
        }
        SocketError::Absent { .. } => "start the producer at the same path, or wait longer",
        SocketError::ClosedFolder { .. } => {
            "the folder's owner must let this user in: with chmod o+x, or with g+x for a group of this user"
        }
        SocketError::Denied { group: Some(_), .. } => {
            "add this user to that group and log in again, or let the process that listens there admit this user"
        }
        SocketError::Denied { .. } => {
            "the process that listens there must admit this user, or a group of this user; if the socket's mode does, SELinux does not: give \
             both containers the same label"
        }
        _ => return None,
    })
}

fn refusal_hint(code: RefusalCode) -> Option<&'static str> {
    Some(match code {
        RefusalCode::Absent => "list the names that this user may read",
        RefusalCode::Exists => "replace the object, or use another name",
        RefusalCode::Version => "another process has replaced it: look up the current version before the next try",
        RefusalCode::Differs => "compare its sizes, metadata and digests with the request",
        RefusalCode::Lacks => "look up the object's parts and arrays",
        RefusalCode::Denied => {
            "its owner and the broker's user may delete it; its mode decides who reads and replaces it"
        }
        RefusalCode::Quota => "delete names that are no longer needed, or raise the broker's quota",
        RefusalCode::Full => {
            "raise the broker's limit of open files (LimitNOFILE= of systemd, ulimit -Hn), or use larger chunks: each segment is one"
        }
        RefusalCode::Timeout => "wait longer, or check the process that should put it",
        RefusalCode::Failed => "see the broker's log",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn driver(code: u32) -> Error {
        Error::Driver { call: "cuMemMap", code, name: "CUDA_ERROR_X".into(), source: None }
    }

    #[test]
    fn causes_decide_class_and_hint() {
        let not_imported = |code| MemoryError::NotImported { reason: String::new(), source: Box::new(driver(code)) };
        let not_exchanged = |code| MemoryError::NotExchanged { back: None, source: Box::new(driver(code)) };
        let refused = |code| Error::from(BrokerError { code, message: String::new() });
        for (error, class, has_hint) in [
            (driver(code::OUT_OF_MEMORY), ErrorClass::OutOfMemory, true),
            (not_imported(code::NOT_SUPPORTED).into(), ErrorClass::Unsupported, false),
            (not_imported(code::OUT_OF_MEMORY).into(), ErrorClass::OutOfMemory, true),
            (not_exchanged(719).into(), ErrorClass::Driver, false),
            (Error::system("x", io::ErrorKind::OutOfMemory), ErrorClass::OutOfMemory, false),
            (Error::system("x", io::ErrorKind::NotFound), ErrorClass::System, false),
            (Error::Forked { initialised_by: 1, pid: 2 }, ErrorClass::Forked, true),
            (refused(RefusalCode::Version), ErrorClass::Differs, true),
            (refused(RefusalCode::Quota), ErrorClass::System, true),
            (refused(RefusalCode::Stopped), ErrorClass::Interrupted, false),
            (Error::Misuse { problem: String::new() }, ErrorClass::Invalid, false),
            (PeerError::NoConsumer { waited: Default::default() }.into(), ErrorClass::Timeout, true),
            (PeerError::Timeout { waited: Default::default(), purpose: "" }.into(), ErrorClass::Disconnected, true),
        ] {
            assert_eq!((error.class(), error.hint().is_some()), (class, has_hint), "{error:?}");
        }
    }
}
