//! Errors as Python exceptions: `vmmfd.Error`, and one class for each matching built-in exception.

use std::io;

use pyo3::{
    exceptions::{
        PyAttributeError, PyBufferError, PyException, PyMemoryError, PyOverflowError, PyRuntimeError, PyTypeError,
        PyValueError,
    },
    prelude::*,
    sync::PyOnceLock,
    types::{PyDict, PyType},
};
use vmmfd::{
    Error,
    error::{BrokerError, ErrorCode, LoadError, MemoryError, PeerError, RefusalCode, SocketError, WeightsError, code},
};

/// An error of the library, of the caller, or the exception of a callback.
#[derive(Debug)]
pub(crate) enum Failure {
    Library(Error),
    /// The caller's error as a sentence, with its class.
    Caller(Class, String),
    Python(PyErr),
}

/// The result of functions that Python calls.
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

    /// An object whose state forbids the call: `ValueError`.
    pub(crate) fn unusable(message: impl Into<String>) -> Self {
        Self::Caller(Class::Invalid, message.into())
    }

    /// Adds a subject to the message.
    pub(crate) fn with_subject(self, what: &str) -> Self {
        match self {
            Self::Caller(class, message) => Self::Caller(class, format!("{what}: {message}")),
            other => other,
        }
    }

    /// A refused export: `BufferError`.
    pub(crate) fn export(message: impl Into<String>) -> Self {
        Self::Caller(Class::Export, message.into())
    }
}

/// Returns the result of a query to a foreign object, or `None` if its exception means that it does not support the query. Other
/// exceptions, such as `KeyboardInterrupt` and `MemoryError`, are passed on.
///
/// # Errors
/// The other exceptions.
pub(crate) fn tolerant<T>(py: Python<'_>, found: PyResult<T>) -> PyResult<Option<T>> {
    match found {
        Ok(found) => Ok(Some(found)),
        Err(error)
            if error.is_instance_of::<PyTypeError>(py)
                || error.is_instance_of::<PyValueError>(py)
                || error.is_instance_of::<PyAttributeError>(py)
                || error.is_instance_of::<PyOverflowError>(py)
                || error.is_instance_of::<PyBufferError>(py) =>
        {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Formats an argument for a message.
///
/// # Errors
/// Exceptions of its `__repr__` that are not an `Exception`, such as `KeyboardInterrupt`, and `MemoryError`.
pub(crate) fn shown(given: &Bound<'_, PyAny>) -> PyResult<String> {
    match given.repr() {
        Ok(text) => Ok(text.to_string_lossy().into_owned()),
        Err(error)
            if error.is_instance_of::<PyException>(given.py())
                && !error.is_instance_of::<PyMemoryError>(given.py()) =>
        {
            Ok("it".to_owned())
        }
        Err(error) => Err(error),
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

    /// The class of a library error.
    fn of(error: &Error) -> Self {
        use vmmfd::ErrorKind;
        match error {
            Error::Memory(MemoryError::NotExchanged { source, .. }) => Self::of(source),
            Error::Driver { code: code::OUT_OF_MEMORY, .. } => Self::OutOfMemory,
            Error::System { source, .. } if source.kind() == io::ErrorKind::OutOfMemory => Self::OutOfMemory,
            Error::Broker(BrokerError { code, .. }) => match code {
                RefusalCode::Absent => Self::NotFound,
                RefusalCode::Exists => Self::Exists,
                RefusalCode::Version | RefusalCode::Differs => Self::Differs,
                RefusalCode::Denied => Self::Denied,
                RefusalCode::Timeout => Self::Timeout,
                RefusalCode::Invalid => Self::Invalid,
                RefusalCode::Stopped => Self::Interrupted,
                _ => Self::Error,
            },
            Error::Memory(MemoryError::OutOfMemory { .. }) => Self::OutOfMemory,
            Error::Memory(MemoryError::TooManyDescriptors { .. }) => Self::Error,
            Error::Socket(SocketError::Denied { .. } | SocketError::ClosedFolder { .. }) => Self::Denied,
            Error::Socket(SocketError::Absent { .. } | SocketError::NoBroker { .. }) => Self::NotFound,
            Error::Peer(PeerError::NoConsumer { .. }) => Self::Timeout,
            Error::Peer(PeerError::NotAllowed { .. }) => Self::Denied,
            Error::Peer(PeerError::Mismatch { code: ErrorCode::Backend | ErrorCode::Device, .. }) => Self::Unsupported,
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

/// The next step after an error, if known.
fn hint(error: &Error) -> Option<String> {
    let hint = match error {
        Error::Broker(BrokerError { code, .. }) => match code {
            RefusalCode::Absent => "broker.list() shows all names; give wait= if the object may appear later",
            RefusalCode::Exists => "replace it with replace=True",
            RefusalCode::Version => "another process has replaced it: broker.stat(name) shows the current version",
            RefusalCode::Denied => "its owner grants access: broker.stat(name).summary has owner and mode",
            RefusalCode::Quota => "delete names that are no longer needed, or start the broker with a larger --quota",
            RefusalCode::Full => {
                "raise the broker's limit of open files (LimitNOFILE= of systemd, ulimit -Hn): each segment is one"
            }
            RefusalCode::Timeout => "wait longer, or check broker.list()",
            _ => return None,
        },
        Error::Socket(SocketError::NoBroker { path, .. }) => {
            return Some(format!(
                "start one with `vmmfd serve --socket {}`, or connect to the path of a running broker",
                path.display()
            ));
        }
        Error::Socket(SocketError::Denied { group: Some(_), .. }) => {
            "add this user to that group and log in again, or start the server with `--allow-uid`"
        }
        Error::Socket(SocketError::Denied { .. }) => {
            "start the server so that it admits this user: `vmmfd serve --allow-uid`, `--allow-gid`"
        }
        Error::Socket(SocketError::ClosedFolder { .. }) => {
            "the folder's owner must give this user access: chmod o+x, or g+x for a group of this user"
        }
        Error::Peer(PeerError::NotAllowed { uid, .. }) => {
            return Some(format!("connect with trust=[{uid}] to trust that user"));
        }
        Error::Peer(PeerError::Timeout { .. }) => {
            "the process at the other end is stopped or overloaded, or the timeout is too short"
        }
        Error::Peer(PeerError::Mismatch { code: ErrorCode::Backend, .. }) => {
            "connect with backend=\"auto\", which uses memory where it is"
        }
        Error::Memory(MemoryError::OutOfMemory { .. }) | Error::Driver { code: code::OUT_OF_MEMORY, .. } => {
            "`vmmfd who` and nvidia-smi show the users of GPU memory, and free shows host memory; `ulimit -v` limits a process's address \
             space"
        }
        Error::Memory(MemoryError::NotExchanged { source, .. }) => return hint(source),
        Error::Memory(MemoryError::TooManyDescriptors { .. }) => "raise this process's limit of open files: ulimit -n",
        Error::Load(_) => "without a GPU, use backend=\"host\" for ordinary shared memory",
        Error::Forked { .. } => "start processes with multiprocessing's method \"spawn\", and connect in each",
        _ => return None,
    };
    Some(hint.to_owned())
}

/// An error as a message. On the host backend the system's error replaces CUDA's number.
fn sentence(error: &Error) -> String {
    match error {
        Error::Driver { call, code: code::OUT_OF_MEMORY, source: Some(source), .. } => {
            format!("{call} failed: {source}")
        }
        error => error.in_full(),
    }
}

impl From<Failure> for PyErr {
    fn from(failure: Failure) -> Self {
        let (class, message, kind, hint) = match failure {
            Failure::Python(error) => return error,
            Failure::Caller(class, message) => (class, message, "usage", None),
            Failure::Library(error) => (Class::of(&error), sentence(&error), error.kind().as_str(), hint(&error)),
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
