//! Errors as Python exceptions: `vmmfd.Error`, and one class for each built-in exception that a caller would expect.

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

/// What a look at a foreign object found, or nothing if it is no such object. Other exceptions than those by which an object says so, a
/// `KeyboardInterrupt` or a `MemoryError`, are passed on.
///
/// # Errors
/// Those.
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

/// An argument as a message shows it.
///
/// # Errors
/// What its `__repr__` raises that is no `Exception`, such as `KeyboardInterrupt`.
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

    /// The class of a library's error.
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

/// What to do about an error, where that is known.
fn hint(error: &Error) -> Option<String> {
    let hint = match error {
        Error::Broker(BrokerError { code, .. }) => match code {
            RefusalCode::Absent => "broker.list() shows what there is; with wait= it may come later",
            RefusalCode::Exists => "put it with replace=True to make it the next version",
            RefusalCode::Version => "broker.stat(name) has the current version: another process has replaced it",
            RefusalCode::Denied => "its owner decides who may: broker.stat(name).summary has owner and mode",
            RefusalCode::Quota => {
                "delete names that are not needed any more, or start the broker with a larger --quota"
            }
            RefusalCode::Full => {
                "raise the limit of open files of the broker (LimitNOFILE= of systemd, ulimit -Hn): each segment is one"
            }
            RefusalCode::Timeout => "wait longer, or look at broker.list()",
            _ => return None,
        },
        Error::Socket(SocketError::NoBroker { path, .. }) => {
            return Some(format!(
                "start one with `vmmfd serve --socket {}`, or connect to where one listens",
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
            "the folder's owner must let this user in: with chmod o+x, or with g+x for a group of this user"
        }
        Error::Peer(PeerError::NotAllowed { uid, .. }) => {
            return Some(format!("connect with trust=[{uid}] if that user is to be trusted"));
        }
        Error::Peer(PeerError::Timeout { .. }) => {
            "the process at the other end is stopped or overloaded, or the timeout is too short"
        }
        Error::Peer(PeerError::Mismatch { code: ErrorCode::Backend, .. }) => {
            "connect with backend=\"auto\", which uses memory where it is"
        }
        Error::Memory(MemoryError::OutOfMemory { .. }) | Error::Driver { code: code::OUT_OF_MEMORY, .. } => {
            "`vmmfd who` and nvidia-smi show which processes have memory of a GPU, and free that of the host; `ulimit -v` bounds the \
             addresses of a process"
        }
        Error::Memory(MemoryError::NotExchanged { source, .. }) => return hint(source),
        Error::Memory(MemoryError::TooManyDescriptors { .. }) => "raise this process's limit of open files: ulimit -n",
        Error::Load(_) => "backend=\"host\" uses ordinary shared memory, where there is no GPU",
        Error::Forked { .. } => "start processes with multiprocessing's method \"spawn\", and connect in each",
        _ => return None,
    };
    Some(hint.to_owned())
}

/// An error as a message. On the host backend the operating system's answer stands for the number of CUDA's.
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
