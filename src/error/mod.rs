//! What can go wrong, as one type: variants are what a caller branches on, fields what a person needs.

mod broker;
pub mod code;
mod device;
mod load;
mod memory;
mod parse;
mod peer;
mod protocol;
mod socket;
#[cfg(feature = "weights")]
mod weights;

use std::{borrow::Cow, fmt, io};

use nix::sys::signal::Signal;

pub use self::broker::{BrokerError, RefusalCode};
pub use self::protocol::{BodyCause, BodyFault, ErrorCode, ProtocolError, UnknownCode};
#[cfg(feature = "weights")]
pub use self::weights::WeightsError;
pub use self::{
    device::DeviceError, load::LoadError, memory::MemoryError, parse::ParseError, peer::PeerError, socket::SocketError,
};

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that this crate fails with.
///
/// It is nested by area; [`Error::kind`] sorts it into the few classes that a program reacts to. The cause, where there is one,
/// is in
/// [`std::error::Error::source`].
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

    /// No CUDA driver can be used here.
    #[error(transparent)]
    Load(#[from] LoadError),

    /// A device is not there, or can not do what is asked of it.
    #[error(transparent)]
    Device(#[from] DeviceError),

    /// Memory can not be had, or a range, size or array does not fit it.
    #[error(transparent)]
    Memory(#[from] MemoryError),

    /// A socket can not be made, or no connection over it can be had.
    #[error(transparent)]
    Socket(#[from] SocketError),

    /// The process at the other end is absent, silent, gone or refused, or what it says does not fit.
    #[error(transparent)]
    Peer(#[from] PeerError),

    /// A broker refused a request. The connection to it goes on.
    #[error(transparent)]
    Broker(#[from] BrokerError),

    /// Files of weights can not be loaded.
    #[cfg(feature = "weights")]
    #[error(transparent)]
    Weights(#[from] WeightsError),

    /// The caller combined what does not belong together, or asked for what the state of an object does not allow. Nothing was
    /// changed.
    #[error("{problem}")]
    Misuse {
        /// Why: one sentence.
        problem: String,
    },

    /// The driver was initialised by another process, of which this one is a fork.
    #[error("the driver was initialised by process {initialised_by}, and process {pid} is a fork of it")]
    Forked {
        /// The process that initialised it.
        initialised_by: u32,
        /// This process.
        pid: u32,
    },

    /// Code of the caller's own failed, which this crate called: a verifier, say, or a report of progress.
    #[error(transparent)]
    Caller(Box<dyn std::error::Error + Send + Sync>),

    /// An operating-system call failed.
    #[error("cannot {action}")]
    System {
        /// What was being done, with its object: `bind /run/x.sock`.
        action: String,
        /// The operating system's answer.
        source: io::Error,
    },

    /// The call was cancelled.
    #[error("interrupted by {reason}")]
    Interrupted {
        /// Who asked for it.
        reason: CancelReason,
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
    /// A broker has no such object, or has one where none was expected, or another than was expected.
    Object,
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
            Self::Object => "object",
            Self::Peer => "peer",
            Self::System => "system",
            Self::Interrupted => "interrupted",
        }
    }
}

impl Error {
    /// A system call's failure: `action` completes the sentence "cannot ...".
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

    /// Which class of failure this is.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Device(DeviceError::Ambiguous { .. }) => ErrorKind::Usage,
            Self::Memory(MemoryError::NotExchanged { source, .. } | MemoryError::NotImported { source, .. }) => {
                source.kind()
            }
            Self::Driver { code: code::NOT_SUPPORTED | code::NOT_PERMITTED, .. } | Self::Load(_) | Self::Device(_) => {
                ErrorKind::Unsupported
            }
            Self::Memory(MemoryError::OutOfMemory { .. } | MemoryError::TooManyDescriptors { .. })
            | Self::Socket(
                SocketError::UnsafeFolder { .. }
                | SocketError::DefaultFolder { .. }
                | SocketError::FolderLocked { .. }
                | SocketError::AlreadyServed { .. },
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
                RefusalCode::Absent | RefusalCode::Exists | RefusalCode::Version | RefusalCode::Differs => {
                    ErrorKind::Object
                }
                RefusalCode::Invalid => ErrorKind::Usage,
                _ => ErrorKind::Peer,
            },
            #[cfg(feature = "weights")]
            Self::Weights(_) => ErrorKind::Usage,
            Self::Memory(_) | Self::Socket(_) | Self::Misuse { .. } => ErrorKind::Usage,
            Self::Interrupted { .. } => ErrorKind::Interrupted,
        }
    }
}

/// Why a call was cancelled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CancelReason {
    /// The program decided to.
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
