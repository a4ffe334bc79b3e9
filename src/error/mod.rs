//! One error type for the crate: callers branch on its variants, and the fields hold the facts to show to a user.

mod broker;
mod class;
pub mod code;
mod device;
mod load;
mod memory;
mod parse;
mod peer;
mod protocol;
mod socket;
pub(crate) mod units;
#[cfg(feature = "weights")]
mod weights;

use std::{borrow::Cow, fmt, io};

use nix::sys::signal::Signal;

pub use self::broker::{BrokerError, RefusalCode};
pub use self::class::ErrorClass;
pub use self::protocol::{ErrorCode, ProtocolError, UnknownCode};
#[cfg(feature = "weights")]
pub use self::weights::WeightsError;
pub use self::{
    device::DeviceError,
    load::LoadError,
    memory::MemoryError,
    parse::ParseError,
    peer::{Holder, Loss, PeerError},
    socket::SocketError,
};

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Any error of this crate.
///
/// Errors are nested by area; [`Error::kind`] gives the class to react to. [`std::error::Error::source`] returns the cause, if there
/// is one.
///
/// ```
/// use vmmfd::{Error, broker::Get, error::{BrokerError, RefusalCode}};
///
/// # let broker = vmmfd::internals::ExampleBroker::start()?;
/// # let client = &broker.client;
/// match client.get(&Get::new("weights")) {
///     Ok(lease) => println!("version {}", lease.version()),
///     Err(Error::Broker(BrokerError { code: RefusalCode::Absent, .. })) => println!("nobody has put the weights"),
///     Err(error) => eprintln!("{}", error.in_full()),  // With its causes.
/// }
/// # Ok::<(), vmmfd::Error>(())
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A driver call failed.
    ///
    /// The host backend returns the same codes, with the system call's error in `source`.
    #[error("{call} failed: {name} ({code})")]
    Driver {
        /// The driver's function, or the host backend's verb.
        call: &'static str,
        /// The `CUresult` number.
        code: u32,
        /// The code's name, such as `CUDA_ERROR_INVALID_VALUE`.
        name: Cow<'static, str>,
        /// The system call's error, on the host backend.
        source: Option<io::Error>,
    },

    /// No CUDA driver can be used in this process.
    #[error(transparent)]
    Load(#[from] LoadError),

    /// A device was not found, or does not support an operation.
    #[error(transparent)]
    Device(#[from] DeviceError),

    /// Memory can't be allocated or opened, or a range, size or array does not fit it.
    #[error(transparent)]
    Memory(#[from] MemoryError),

    /// A socket can't be created, or no connection can be made.
    #[error(transparent)]
    Socket(#[from] SocketError),

    /// The peer is absent, silent, gone or refused, or its messages do not fit.
    #[error(transparent)]
    Peer(#[from] PeerError),

    /// A broker refused a request. The connection remains open.
    #[error(transparent)]
    Broker(#[from] BrokerError),

    /// Weight files can't be loaded.
    #[cfg(feature = "weights")]
    #[error(transparent)]
    Weights(#[from] WeightsError),

    /// The caller combined incompatible objects, or called a method that the object's state does not allow. Nothing was changed.
    #[error("{problem}")]
    Misuse {
        /// The reason in one sentence.
        problem: String,
    },

    /// This process is a fork of the process that initialised the driver.
    #[error("process {initialised_by} initialised the driver, and process {pid} is a fork of it")]
    Forked {
        /// The process that initialised the driver.
        initialised_by: u32,
        /// This process.
        pid: u32,
    },

    /// A callback of the caller failed, such as a verifier or a progress report.
    #[error(transparent)]
    Caller(Box<dyn std::error::Error + Send + Sync>),

    /// An operating-system call failed.
    #[error("cannot {action}")]
    System {
        /// The action and its object: `bind /run/x.sock`.
        action: String,
        /// The operating system's error.
        source: io::Error,
    },

    /// The call was cancelled.
    #[error("interrupted by {reason}")]
    Interrupted {
        /// The source of the cancellation.
        reason: CancelReason,
    },
}

/// The classes of [`Error`]. The commands have an exit code for each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The request is invalid.
    Usage,
    /// This machine, driver or device does not support the operation.
    Unsupported,
    /// A broker's object is missing, exists unexpectedly, or differs from the expected object.
    Object,
    /// The peer is absent, gone, silent or refused, or does not fit.
    Peer,
    /// The driver or the operating system failed.
    System,
    /// A signal or the program cancelled the operation.
    Interrupted,
}

impl ErrorKind {
    /// The class as one word, as in the output of `--json`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Usage => "usage",
            Self::Unsupported => "unsupported",
            Self::Object => "object",
            Self::Peer => "peer",
            Self::System => "system",
            Self::Interrupted => "interrupted",
        }
    }
}

impl Error {
    /// Creates the error of a system call: `action` completes the sentence "cannot ...".
    pub fn system(action: impl Into<String>, source: impl Into<io::Error>) -> Self {
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

    /// The class of the error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Device(DeviceError::Ambiguous { .. }) => ErrorKind::Usage,
            Self::Memory(MemoryError::NotExchanged { source, .. } | MemoryError::NotImported { source, .. }) => {
                source.kind()
            }
            Self::Driver { code: code::NOT_SUPPORTED | code::NOT_PERMITTED, .. }
            | Self::Load(_)
            | Self::Device(_)
            | Self::Memory(MemoryError::NotShareable { .. }) => ErrorKind::Unsupported,
            Self::Memory(MemoryError::OutOfMemory { .. } | MemoryError::TooManyDescriptors { .. })
            | Self::Socket(
                SocketError::UnsafeFolder { .. }
                | SocketError::DefaultFolder { .. }
                | SocketError::FolderLocked { .. }
                | SocketError::AlreadyServed { .. }
                | SocketError::ServedWithoutFile { .. },
            )
            | Self::Driver { .. }
            | Self::Forked { .. }
            | Self::Caller(_)
            | Self::System { .. } => ErrorKind::System,
            Self::Socket(
                SocketError::Absent { .. }
                | SocketError::NoBroker { .. }
                | SocketError::NotAccepted { .. }
                | SocketError::Denied { .. }
                | SocketError::ClosedFolder { .. },
            )
            | Self::Peer(_) => ErrorKind::Peer,
            Self::Broker(BrokerError { code, .. }) => match code {
                RefusalCode::Absent
                | RefusalCode::Exists
                | RefusalCode::Version
                | RefusalCode::Differs
                | RefusalCode::Lacks => ErrorKind::Object,
                RefusalCode::Invalid => ErrorKind::Usage,
                _ => ErrorKind::Peer,
            },
            #[cfg(feature = "weights")]
            Self::Weights(_) => ErrorKind::Usage,
            Self::Memory(MemoryError::NoArray { .. }) => ErrorKind::Object,
            Self::Memory(_) | Self::Socket(_) | Self::Misuse { .. } => ErrorKind::Usage,
            Self::Interrupted { .. } => ErrorKind::Interrupted,
        }
    }
}

/// Why a call was cancelled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CancelReason {
    /// The program cancelled the call.
    Program,
    /// The process received this signal.
    Signal(i32),
}

impl fmt::Display for CancelReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Program => f.write_str("the program"),
            Self::Signal(number) => match Signal::try_from(*number) {
                Ok(signal) => f.write_str(signal.as_str()),
                Err(_) => write!(f, "signal {number}"),
            },
        }
    }
}

impl From<ProtocolError> for Error {
    fn from(error: ProtocolError) -> Self {
        Self::Peer(PeerError::Protocol(error))
    }
}
