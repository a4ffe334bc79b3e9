//! What can go wrong, as one type: variants are what a caller branches on, fields what a person needs.

pub mod code;
mod parse;
mod protocol;

use std::{borrow::Cow, io, path::PathBuf, time::Duration};

use nix::sys::signal::Signal;

pub use self::parse::ParseError;
pub use self::protocol::{ErrorCode, ProtocolError};

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that this crate fails with.
///
/// [`Error::kind`] sorts the variants into the few classes that a program reacts to, and [`Error::hint`] says
/// what a person can do about it. The cause, where there is one, is in [`std::error::Error::source`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A driver call returned something other than success.
    ///
    /// The host backend answers with the same numbers; its `source` is then the system call's error.
    #[error("{call} failed: {name} ({code})")]
    Driver {
        /// The driver's function, or the host backend's verb.
        call: &'static str,
        /// The `CUresult`, as the number that came back.
        code: u32,
        /// Its name, such as `CUDA_ERROR_INVALID_VALUE`.
        name: Cow<'static, str>,
        /// What the operating system said, on the host backend.
        source: Option<io::Error>,
    },

    /// No driver library could be loaded: there is no NVIDIA driver here, or the container does not see it.
    #[error("no CUDA driver library loads: {tried}")]
    NoDriver {
        /// Each name that was tried, with the loader's answer.
        tried: String,
    },

    /// The library that was loaded is the toolkit's link-time stub, which has no driver in it.
    #[error("{library} is the CUDA toolkit's stub library, not a driver")]
    StubLibrary {
        /// The name it was loaded by.
        library: String,
    },

    /// The driver library lacks a function: it is older than what this needs.
    #[error("the driver library {library} has no {symbol}: the driver is too old for this")]
    MissingSymbol {
        /// The name it was loaded by.
        library: String,
        /// The function's exported name.
        symbol: &'static str,
    },

    /// The driver works and says that there is no device.
    #[error("the CUDA driver finds no device")]
    NoDevice,

    /// No device has the ordinal or UUID that was asked for.
    #[error("there is no {backend} device {wanted}: {available}")]
    NoSuchDevice {
        /// The backend that was searched.
        backend: &'static str,
        /// What was asked for.
        wanted: String,
        /// What there is instead.
        available: String,
    },

    /// A device can't reach memory of another.
    #[error("{device} can't reach the memory of {owner}")]
    NoPeerAccess {
        /// The device that was to use it.
        device: String,
        /// The device that owns it.
        owner: String,
        /// What the driver said, if it was asked to try.
        source: Option<Box<Error>>,
    },

    /// Memory that was opened read-only is not written.
    #[error("memory that was opened read-only can't be written")]
    ReadOnly,

    /// A legacy handle was opened by the process that made it.
    #[error("a legacy handle can't be opened in the process that made it, which has the memory already")]
    OwnHandle,

    /// This process may not hold as many descriptors as there are allocations, or as come at once.
    #[error("{needed} open files are needed, and this process may have {limit}")]
    TooManyDescriptors {
        /// How many it would have.
        needed: u64,
        /// How many it may have.
        limit: u64,
    },

    /// A file is not what it must be.
    #[error("{} {problem}", path.display())]
    File {
        /// Which one.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },

    /// The device lacks something that sharing needs.
    #[error("{device} does not support {feature}")]
    Unsupported {
        /// The device's name.
        device: String,
        /// What it lacks.
        feature: &'static str,
    },

    /// The driver was initialised by another process, of which this one is a fork.
    #[error("the driver was initialised by process {initialised_by}, and process {pid} is a fork of it")]
    Forked {
        /// The process that initialised it.
        initialised_by: u32,
        /// This process.
        pid: u32,
    },

    /// More memory than the device has free.
    #[error("{size} bytes are more than the {free} bytes that {device} has free")]
    OutOfMemory {
        /// The device's name.
        device: String,
        /// What was asked for, in bytes, rounded up to the granularity.
        size: u64,
        /// What was free at that moment, in bytes.
        free: u64,
    },

    /// A size of zero, or one that no longer fits 64 bits once rounded up.
    #[error("a buffer of {size} bytes can't be made: the size must be from 1 to {max} bytes")]
    InvalidSize {
        /// What was asked for, in bytes.
        size: u64,
        /// The largest that rounds up without overflow, in bytes.
        max: u64,
    },

    /// A size that the driver would refuse, caught before calling it.
    #[error("size {size} is not a positive multiple of the granularity, {granularity} bytes")]
    Unaligned {
        /// The size, in bytes.
        size: u64,
        /// The granularity, in bytes.
        granularity: u64,
    },

    /// A range that is not inside its mapping or reservation.
    #[error("{length} bytes at offset {offset} are not inside {size} bytes")]
    OutOfRange {
        /// First byte of the range.
        offset: u64,
        /// Its length, in bytes.
        length: u64,
        /// The size of what it should lie in, in bytes.
        size: u64,
    },

    /// The description of an array contradicts itself, or leaves what 64 bits can count; or an index, slice or order of
    /// axes does not belong to it.
    #[error("{problem}")]
    Array {
        /// What is wrong, with the values: one sentence.
        problem: String,
    },

    /// An operating-system call failed.
    #[error("cannot {action}")]
    System {
        /// What was being done, with its object: `bind /run/x.sock`.
        action: String,
        /// The operating system's answer.
        source: io::Error,
    },

    /// The socket's path can't be used.
    #[error("socket path {path} can't be used: {reason}", path = path.display())]
    SocketPath {
        /// The path.
        path: PathBuf,
        /// Why.
        reason: String,
    },

    /// A socket that the caller gave can't be used.
    #[error("the socket can't be used: {problem}")]
    Socket {
        /// Why: one sentence.
        problem: String,
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
        /// The process that listens on it, or 0 if it can't be told.
        pid: i32,
    },

    /// Another process holds the lock on the socket's folder.
    #[error("folder {path} stayed locked by another process for {waited:?}", path = path.display())]
    FolderLocked {
        /// The folder.
        path: PathBuf,
        /// How long was waited.
        waited: Duration,
    },

    /// Nobody served the socket in time.
    #[error("no producer on {path} within {waited:?}", path = path.display())]
    Absent {
        /// The socket.
        path: PathBuf,
        /// How long was waited.
        waited: Duration,
    },

    /// Somebody serves the socket and had no room for one more in time.
    #[error("the producer on {path} accepted nobody within {waited:?}", path = path.display())]
    NotAccepted {
        /// The socket.
        path: PathBuf,
        /// How long was waited.
        waited: Duration,
    },

    /// The socket is not for this user.
    #[error("the producer on {path} does not let this user connect", path = path.display())]
    Denied {
        /// The socket.
        path: PathBuf,
    },

    /// No consumer came in time.
    #[error("no consumer within {waited:?}")]
    NoConsumer {
        /// How long was waited.
        waited: Duration,
    },

    /// The peer said nothing in time.
    #[error("the peer was silent for {waited:?} while this side was waiting {purpose}")]
    Timeout {
        /// What was waited for: `for the offer`.
        purpose: &'static str,
        /// How long.
        waited: Duration,
    },

    /// The peer hung up, or died.
    #[error("the peer hung up while this side was waiting {purpose}")]
    PeerGone {
        /// What was waited for: `for the offer`.
        purpose: &'static str,
    },

    /// The peer reported an error and ended the conversation.
    #[error("the peer reported: {message} ({code})")]
    Peer {
        /// Which: its class.
        code: ErrorCode,
        /// The peer's sentence.
        message: String,
    },

    /// A process that was started to do a part of the work failed at it, died, or is stuck.
    #[error("{process} {message}")]
    Child {
        /// Which one, by its part: `the producer`.
        process: String,
        /// What became of it, as the rest of a sentence: `was ended by SIGABRT`.
        message: String,
        /// What its own error hints at.
        hint: Option<String>,
    },

    /// The process at the other end belongs to a user who is not allowed here.
    #[error("the peer, pid {pid}, runs as uid {uid}, which is not allowed here")]
    PeerNotAllowed {
        /// The peer's process.
        pid: i32,
        /// The peer's user.
        uid: u32,
    },

    /// What the peer offers or asks does not fit this side.
    #[error("{message}")]
    Mismatch {
        /// The code that the peer is told.
        code: ErrorCode,
        /// What does not fit.
        message: String,
    },

    /// The caller combined what does not belong together, or asked for what the state of an object does not allow. Nothing was
    /// changed.
    #[error("{problem}")]
    Misuse {
        /// Why: one sentence.
        problem: String,
    },

    /// The peer broke the protocol; the connection is closed.
    #[error("the peer broke the protocol")]
    Protocol(#[from] ProtocolError),

    /// The call was cancelled.
    #[error("interrupted by {name}", name = signal_name(*signal))]
    Interrupted {
        /// The signal that asked for it, or 0 if a program did.
        signal: i32,
    },
}

/// The classes of [`Error`]. The commands exit with a code for each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The caller asked for something that makes no sense.
    Usage,
    /// This machine, driver or device can't do it.
    Unsupported,
    /// The other side is absent, gone, silent, refused, or does not fit.
    Peer,
    /// The driver or the operating system failed.
    System,
    /// A signal, or the program, cancelled it.
    Interrupted,
}

impl ErrorKind {
    /// The class as one word, as `--json` gives it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Usage => "usage",
            Self::Unsupported => "unsupported",
            Self::Peer => "peer",
            Self::System => "system",
            Self::Interrupted => "interrupted",
        }
    }
}

impl Error {
    /// A system call's failure: `action` completes the sentence "cannot ...".
    pub(crate) fn system(action: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Self::System { action: action.into(), source: source.into() }
    }

    /// The error with the whole chain of its causes, on one line.
    pub fn in_full(&self) -> String {
        let mut text = self.to_string();
        let mut cause = std::error::Error::source(self);
        while let Some(error) = cause {
            text.push_str(": ");
            text.push_str(&error.to_string());
            cause = error.source();
        }
        text
    }

    /// Which class of failure this is.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Driver { code: code::NOT_SUPPORTED | code::NOT_PERMITTED, .. }
            | Self::NoDriver { .. }
            | Self::StubLibrary { .. }
            | Self::MissingSymbol { .. }
            | Self::NoDevice
            | Self::NoSuchDevice { .. }
            | Self::NoPeerAccess { .. }
            | Self::Unsupported { .. } => ErrorKind::Unsupported,
            Self::Driver { .. }
            | Self::Forked { .. }
            | Self::OutOfMemory { .. }
            | Self::TooManyDescriptors { .. }
            | Self::System { .. }
            | Self::Child { .. }
            | Self::UnsafeFolder { .. }
            | Self::DefaultFolder { .. }
            | Self::FolderLocked { .. }
            | Self::AlreadyServed { .. } => ErrorKind::System,
            Self::InvalidSize { .. }
            | Self::Unaligned { .. }
            | Self::OutOfRange { .. }
            | Self::ReadOnly
            | Self::OwnHandle
            | Self::File { .. }
            | Self::Array { .. }
            | Self::Misuse { .. }
            | Self::Socket { .. }
            | Self::SocketPath { .. } => ErrorKind::Usage,
            Self::Absent { .. }
            | Self::NotAccepted { .. }
            | Self::Denied { .. }
            | Self::NoConsumer { .. }
            | Self::Timeout { .. }
            | Self::PeerGone { .. }
            | Self::Peer { .. }
            | Self::PeerNotAllowed { .. }
            | Self::Mismatch { .. }
            | Self::Protocol(_) => ErrorKind::Peer,
            Self::Interrupted { .. } => ErrorKind::Interrupted,
        }
    }

    /// What a person can do about it, where there is something that can be said in general.
    pub fn hint(&self) -> Option<&str> {
        Some(match self {
            Self::Child { hint, .. } => return hint.as_deref(),
            Self::NoDriver { .. } => {
                "install NVIDIA's driver, or give the container the GPU (for Docker: --gpus all); \
                 --backend host tries the tools on ordinary memory"
            }
            Self::StubLibrary { .. } => "take the toolkit's stubs folder out of LD_LIBRARY_PATH",
            Self::MissingSymbol { .. } => "CUDA 11.4 or newer is needed: update the driver",
            Self::NoDevice => {
                "look at nvidia-smi -L, and at CUDA_VISIBLE_DEVICES; --backend host tries the tools on ordinary memory"
            }
            Self::NoSuchDevice { .. } => "ordinals are counted among the devices that CUDA_VISIBLE_DEVICES leaves",
            Self::Unsupported { .. } => "a device whose driver offers it is needed",
            Self::NoPeerAccess { .. } => {
                "choose a device of the same NVLink or PCIe group with --device; nvidia-smi topo -p2p r shows which can"
            }
            Self::TooManyDescriptors { .. } => "raise ulimit -n, or take larger chunks",
            Self::Forked { .. } => "start the process with exec, or initialise the driver after the fork",
            Self::OutOfMemory { .. } => "ask for less, or free memory first",
            Self::UnsafeFolder { .. } | Self::FolderLocked { .. } => {
                "name a socket in a folder of your own with --socket"
            }
            Self::DefaultFolder { .. } => "look at XDG_RUNTIME_DIR, or name a socket with --socket",
            Self::NotAccepted { .. } => "look at the producer: it may be stopped, or have too many connections",
            Self::SocketPath { .. } => "name another path with --socket",
            Self::AlreadyServed { .. } => "stop that process, or use another --socket",
            Self::Absent { .. } => "start a producer on the same --socket, or wait longer with --timeout",
            Self::NoConsumer { .. } => "start a consumer on the same --socket, or wait longer with --timeout",
            Self::Timeout { .. } => {
                "the peer may be stuck or much slower: look at it, or raise --timeout on both sides"
            }
            Self::PeerGone { .. } => "look at the peer's own error",
            Self::PeerNotAllowed { .. } => "allow that user with --allow-uid",
            Self::Peer { code: ErrorCode::Refused, .. } | Self::Denied { .. } => {
                "the other side must allow this user with --allow-uid"
            }
            Self::Driver { code: code::OUT_OF_MEMORY, .. } => "free device memory first, or ask for less",
            Self::Driver { code: code::SYSTEM_DRIVER_MISMATCH, .. } => {
                "the driver library and the kernel module differ in version: reboot, or rebuild the container"
            }
            Self::Driver { call: "cuInit", .. } => {
                "look at nvidia-smi and the kernel log: the driver is there and fails"
            }
            _ => return None,
        })
    }
}

fn process_name(pid: i32) -> String {
    if pid == 0 { "another process".to_owned() } else { format!("pid {pid}") }
}

/// The name of a signal, for a person.
fn signal_name(signal: i32) -> &'static str {
    Signal::try_from(signal).map_or("the program", Signal::as_str)
}
