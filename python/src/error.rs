//! Errors as Python exceptions: `vmmfd.Error`, and one class for each built-in exception that a caller would expect.

use pyo3::{
    exceptions::PyRuntimeError,
    prelude::*,
    sync::PyOnceLock,
    types::{PyDict, PyType},
};
use vmmfd::{
    Error,
    error::{BrokerError, LoadError, MemoryError, PeerError, RefusalCode, SocketError, WeightsError},
};

/// An error of the library, or the exception that a callback raised.
#[derive(Debug)]
pub(crate) enum Failure {
    Library(Error),
    /// What the caller did wrong, in a sentence, with the class that it is.
    Caller(Class, String),
    Python(PyErr),
}

/// The result of what Python calls.
pub(crate) type Outcome<T> = Result<T, Failure>;

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Library(error)
    }
}

impl From<PyErr> for Failure {
    fn from(error: PyErr) -> Self {
        Self::Python(error)
    }
}

impl Failure {
    /// A bad argument: `ValueError`.
    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::Caller(Class::Invalid, message.into())
    }

    /// What an object can't do in the state that it is in: `ValueError`.
    pub(crate) fn unusable(message: impl Into<String>) -> Self {
        Self::Caller(Class::Invalid, message.into())
    }

    /// The same failure, which says of what it is.
    pub(crate) fn about(self, what: &str) -> Self {
        match self {
            Self::Caller(class, message) => Self::Caller(class, format!("{what}: {message}")),
            other => other,
        }
    }

    /// What can't be exported as asked: `BufferError`.
    pub(crate) fn export(message: impl Into<String>) -> Self {
        Self::Caller(Class::Export, message.into())
    }
}

/// A class of `vmmfd._errors`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Class {
    Error,
    Invalid,
    NotFound,
    NoArray,
    Exists,
    Differs,
    Denied,
    Timeout,
    Disconnected,
    OutOfMemory,
    Unsupported,
    Export,
    Interrupted,
}

impl Class {
    fn name(self) -> &'static str {
        match self {
            Self::Error => "Error",
            Self::Invalid => "Invalid",
            Self::NotFound => "NotFound",
            Self::NoArray => "NoArray",
            Self::Exists => "Exists",
            Self::Differs => "Differs",
            Self::Denied => "Denied",
            Self::Timeout => "Timeout",
            Self::Disconnected => "Disconnected",
            Self::OutOfMemory => "OutOfMemory",
            Self::Unsupported => "Unsupported",
            Self::Export => "ExportError",
            Self::Interrupted => "Interrupted",
        }
    }

    /// The class of a library's error.
    fn of(error: &Error) -> Self {
        use vmmfd::ErrorKind;
        match error {
            Error::Broker(BrokerError { code, .. }) => match code {
                RefusalCode::Absent => Self::NotFound,
                RefusalCode::Exists => Self::Exists,
                RefusalCode::Version | RefusalCode::Differs => Self::Differs,
                RefusalCode::Denied => Self::Denied,
                RefusalCode::Timeout => Self::Timeout,
                RefusalCode::Invalid => Self::Invalid,
                _ => Self::Error,
            },
            Error::Memory(MemoryError::OutOfMemory { .. }) => Self::OutOfMemory,
            Error::Memory(MemoryError::TooManyDescriptors { .. }) => Self::Error,
            Error::Socket(SocketError::Denied { .. }) => Self::Denied,
            Error::Socket(SocketError::Absent { .. } | SocketError::NoBroker { .. }) => Self::NotFound,
            Error::Peer(PeerError::Timeout { .. }) => Self::Timeout,
            Error::Weights(WeightsError::Absent { .. }) => Self::NotFound,
            Error::Weights(WeightsError::Denied { .. }) => Self::Denied,
            Error::Load(LoadError::MissingSymbol { .. }) => Self::Unsupported,
            _ => match error.kind() {
                ErrorKind::Usage => Self::Invalid,
                ErrorKind::Unsupported => Self::Unsupported,
                ErrorKind::Peer => Self::Disconnected,
                ErrorKind::Interrupted => Self::Interrupted,
                _ => Self::Error,
            },
        }
    }
}

/// What to do about an error, where that is known.
fn hint(_error: &Error) -> Option<String> {
    None
}

impl From<Failure> for PyErr {
    fn from(failure: Failure) -> Self {
        let (class, message, kind, hint) = match failure {
            Failure::Python(error) => return error,
            Failure::Caller(class, message) => (class, message, "usage", None),
            Failure::Library(error) => (Class::of(&error), error.in_full(), error.kind().as_str(), hint(&error)),
        };
        Python::attach(|py| raise(py, class, message, kind, hint).unwrap_or_else(|error| error))
    }
}

fn raise(py: Python<'_>, class: Class, message: String, kind: &str, hint: Option<String>) -> PyResult<PyErr> {
    static ERRORS: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    let errors = ERRORS.get_or_try_init(py, || py.import("vmmfd._errors").map(Bound::unbind))?;
    let class = errors.bind(py).getattr(class.name())?;
    let class = class.cast::<PyType>().map_err(|_| PyRuntimeError::new_err("vmmfd._errors is damaged"))?;
    let options = PyDict::new(py);
    options.set_item("kind", kind)?;
    options.set_item("hint", hint)?;
    Ok(PyErr::from_value(class.call((message,), Some(&options))?))
}
