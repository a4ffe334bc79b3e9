//! The details of an error in a report.

use std::io;

use nix::libc;
use schemars::JsonSchema;
use serde::Deserialize;
use vmmfd::{
    driver::code,
    error::{DeviceError, LoadError, MemoryError, ProtocolError, SocketError},
};

use crate::doctor::prelude::*;

/// A cause beyond the error's number and class.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Reason {
    /// No driver library exists under any of its names.
    LibraryMissing,
    /// A driver library exists but can't be loaded.
    LibraryBroken,
    /// The driver library lacks a function.
    MissingFunction,
    /// The driver finds no device, and this process can't open a device node.
    NodesDenied,
    /// The limit of open files is too low.
    FileLimit,
    /// Descriptors were lost while receiving a record.
    DescriptorsLost,
    /// Unknown to this version.
    #[serde(other)]
    Other,
}

impl Reason {
    fn of(error: &Error) -> Option<Self> {
        match error {
            Error::Load(LoadError::NoLibrary { tried }) if is_missing(tried) => Some(Self::LibraryMissing),
            Error::Load(LoadError::NoLibrary { .. }) => Some(Self::LibraryBroken),
            Error::Load(LoadError::MissingSymbol { .. }) => Some(Self::MissingFunction),
            Error::Memory(MemoryError::TooManyDescriptors { .. }) => Some(Self::FileLimit),
            Error::Peer(PeerError::Protocol(ProtocolError::FdsTruncated { .. })) => Some(Self::DescriptorsLost),
            _ => {
                let mut causes = anyhow::Chain::new(error).filter_map(|error| error.downcast_ref::<io::Error>());
                causes.any(|error| error.raw_os_error() == Some(libc::EMFILE)).then_some(Self::FileLimit)
            }
        }
    }
}

/// Whether no file exists under any of the names.
///
/// Parses the message because dlopen(3) reports failures only through dlerror(3). Searching for the files would have to duplicate the
/// loader (its cache, LD_LIBRARY_PATH, the program's rpath), and RTLD_NOLOAD finds only loaded libraries.
fn is_missing(tried: &str) -> bool {
    // If a dependency of the driver library is missing, the loader names the dependency, or the library that needs it.
    let missing = |answer: &str| {
        let answer = answer.trim();
        answer.ends_with("No such file or directory")
            && (answer.starts_with("libcuda.so") || answer.contains(" libcuda.so"))
    };
    tried.split(';').all(missing)
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ErrorDetails {
    /// The driver call or system call, if known.
    pub call: Option<String>,
    /// The driver's error number.
    pub code: Option<u32>,
    /// The name of the error number, or of the signal that killed the process.
    pub name: Option<String>,
    /// `timeout`, `signal`, `driver`, `system`, or another error class.
    pub kind: String,
    /// The cause, if identified.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<Reason>,
    /// The error in one line.
    pub message: String,
}

impl ErrorDetails {
    /// The details of an error in this process.
    pub fn of(error: &Error) -> Self {
        let details = |kind: &str| Self { reason: Reason::of(error), ..Self::new(kind, error.in_full()) };
        let numbered = |call: &str, number: u32| {
            let name = code::name(number).map(str::to_owned);
            Self { call: Some(call.to_owned()), code: Some(number), name, ..details("driver") }
        };
        match error {
            Error::Driver { call, code, name, .. } => {
                Self { name: Some(name.clone().into_owned()), ..numbered(call, *code) }
            }
            Error::Load(LoadError::NoDevice) => numbered("cuDeviceGetCount", code::NO_DEVICE),
            Error::Load(LoadError::Stub { .. }) => numbered("cuInit", code::STUB_LIBRARY),
            Error::Memory(MemoryError::OutOfMemory { .. }) => numbered("cuMemCreate", code::OUT_OF_MEMORY),
            Error::Device(DeviceError::NoPeerAccess { source: Some(source), .. })
            | Error::Memory(MemoryError::NotImported { source, .. }) => {
                Self { message: error.in_full(), ..Self::of(source) }
            }
            Error::Load(LoadError::NoLibrary { .. }) => {
                Self { call: Some("dlopen".to_owned()), ..details("unsupported") }
            }
            Error::Load(LoadError::MissingSymbol { symbol, .. }) => {
                Self { call: Some((*symbol).to_owned()), ..details("unsupported") }
            }
            Error::Peer(PeerError::Timeout { .. })
            | Error::Peer(PeerError::NoConsumer { .. })
            | Error::Socket(SocketError::Absent { .. }) => details("timeout"),
            other => details(other.kind().as_str()),
        }
    }

    /// An error without a driver's error number.
    pub(super) fn new(kind: &str, message: String) -> Self {
        Self { call: None, code: None, name: None, kind: kind.to_owned(), reason: None, message }
    }

    /// Marks the error as that of the other process.
    pub(super) fn of_other_end(self) -> Self {
        Self { message: format!("the peer: {}", self.message), ..self }
    }

    /// Whether a feature is not supported, as opposed to failing.
    pub(super) fn is_unsupported(&self) -> bool {
        match self.code {
            Some(number) => [code::NOT_PERMITTED, code::NOT_SUPPORTED].contains(&number),
            None => self.kind == "unsupported",
        }
    }

    /// Whether there is nothing to test: no driver library, or no device and no denied device node.
    pub(super) fn is_nothing_to_test(&self) -> bool {
        match self.code {
            Some(code::NO_DEVICE) => self.reason != Some(Reason::NodesDenied),
            _ => self.reason == Some(Reason::LibraryMissing),
        }
    }
}

impl From<Error> for ErrorDetails {
    fn from(error: Error) -> Self {
        Self::of(&error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_of_errors() {
        let io = |number| Error::system("make a socket", io::Error::from_raw_os_error(number));
        let missing = LoadError::MissingSymbol { library: "libcuda.so.1".to_owned(), symbol: "cuMemCreate" };
        for (error, reason) in [
            (Error::Load(missing), Some(Reason::MissingFunction)),
            (MemoryError::TooManyDescriptors { needed: 512, limit: 256 }.into(), Some(Reason::FileLimit)),
            (io(libc::EMFILE), Some(Reason::FileLimit)),
            (io(libc::EACCES), None),
            (ProtocolError::FdsTruncated { most: 128 }.into(), Some(Reason::DescriptorsLost)),
            (ProtocolError::LongRecord { most: 128 }.into(), None),
        ] {
            assert_eq!(ErrorDetails::of(&error).reason, reason, "{error}");
        }
    }

    #[test]
    fn denied_nodes_are_a_failure() {
        let mut none = ErrorDetails::of(&Error::Load(LoadError::NoDevice));
        assert!(none.is_nothing_to_test());
        none.reason = Some(Reason::NodesDenied);
        assert!(!none.is_nothing_to_test());
    }
}
