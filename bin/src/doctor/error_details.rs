//! An error in a report, and what can be concluded from it alone.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use vmmfd::{
    driver::code,
    error::{DeviceError, Error, LoadError, MemoryError, PeerError, SocketError},
};

/// How [`LoadError::NoLibrary`] begins.
pub(super) const NO_LIBRARY: &str = "no CUDA driver library loads: ";

/// Precedes the device nodes that this process may not open, where the driver finds no device.
pub(super) const NODES_DENIED: &str = "this process may not open ";

/// An error that a probe met.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ErrorDetails {
    /// The driver call or system call, if it is known.
    #[serde(default)]
    pub call: Option<String>,
    /// The driver's error number, if it is the driver's error.
    #[serde(default)]
    pub code: Option<u32>,
    /// The name of that number, or of the signal that killed the process.
    #[serde(default)]
    pub name: Option<String>,
    /// `timeout`, `signal`, `driver`, `system`, or the class of another error.
    pub kind: String,
    /// The error in one line.
    pub message: String,
}

impl ErrorDetails {
    /// The details of an error of this process.
    pub fn of(error: &Error) -> Self {
        let details = |kind: &str| Self::new(kind, error.in_full());
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

    /// An error that is not a driver's.
    pub(super) fn new(kind: &str, message: String) -> Self {
        Self { call: None, code: None, name: None, kind: kind.to_owned(), message }
    }

    /// The same, of the other end of a probe.
    pub(super) fn of_other_end(self) -> Self {
        Self { message: format!("{OTHER_END}{}", self.message), ..self }
    }

    /// Whether it is an error of the other end.
    pub(super) fn is_of_other_end(&self) -> bool {
        self.message.starts_with(OTHER_END)
    }

    /// Whether it says that a feature is not supported, rather than that it fails.
    pub(super) fn is_unsupported(&self) -> bool {
        match self.code {
            Some(number) => [code::NOT_PERMITTED, code::NOT_SUPPORTED].contains(&number),
            None => self.kind == "unsupported",
        }
    }

    /// Whether the driver library could not be loaded.
    pub(super) fn is_dlopen(&self) -> bool {
        self.call.as_deref() == Some("dlopen") && self.code.is_none()
    }

    /// Whether no driver library exists under any of its names. One that exists and does not load is broken.
    pub(super) fn is_library_missing(&self) -> bool {
        // A library that the driver's own needs may be what is missing: the loader then names that, or the library that needs it.
        let missing = |answer: &str| {
            let answer = answer.trim();
            answer.ends_with("No such file or directory")
                && (answer.starts_with("libcuda.so") || answer.contains(" libcuda.so"))
        };
        let answers = self.message.split_once(NO_LIBRARY).map(|(_, answers)| answers);
        answers.is_some_and(|answers| answers.split(';').all(missing))
    }

    /// Whether it says that there is nothing to test: no driver library, or no device and no device node that is denied.
    pub(super) fn is_nothing_to_test(&self) -> bool {
        match self.code {
            Some(code::NO_DEVICE) => !self.message.contains(NODES_DENIED),
            _ => self.is_dlopen() && self.is_library_missing(),
        }
    }
}

/// Precedes the message of an error of the other end.
const OTHER_END: &str = "the other end: ";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_device_is_nothing_to_test_unless_its_node_is_denied() {
        let mut none = ErrorDetails::of(&Error::Load(LoadError::NoDevice));
        assert!(none.is_nothing_to_test());
        none.message += "; this process may not open /dev/nvidia0";
        assert!(!none.is_nothing_to_test());
    }

    #[test]
    fn the_words_looked_for_are_those_of_the_error() {
        assert!(Error::Load(LoadError::NoLibrary { tried: String::new() }).to_string().starts_with(NO_LIBRARY));
    }
}
