//! Errors as Python exceptions: `vmmfd.Error`, and one class for each matching built-in exception.

use std::borrow::Cow;

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
    error::{ErrorClass, SocketError, code},
};

/// An error of the library, of the caller, or the exception of a callback.
#[derive(Debug)]
pub(crate) enum Failure {
    Library(Error),
    /// The caller's error: the name of its class in `vmmfd._errors` or `TypeError`, and a sentence.
    Caller(&'static str, String),
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
    /// An argument of a wrong type: `TypeError`.
    pub(crate) fn wrong_type(message: impl Into<String>) -> Self {
        Self::Caller("TypeError", message.into())
    }

    /// A bad argument, or an object whose state forbids the call: `ValueError`.
    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::Caller("Invalid", message.into())
    }

    /// A request that this memory can't serve: `NotImplementedError`, which is a `RuntimeError`.
    pub(crate) fn unsupported(message: impl Into<String>) -> Self {
        Self::Caller("Unsupported", message.into())
    }

    /// Adds a subject to the message.
    pub(crate) fn with_subject(self, what: &str) -> Self {
        match self {
            Self::Caller(class, message) => Self::Caller(class, format!("{what}: {message}")),
            other => other,
        }
    }

    /// No such array or part: `KeyError`.
    pub(crate) fn no_array(message: impl Into<String>) -> Self {
        Self::Caller("NoArray", message.into())
    }

    /// A refused export: `BufferError`.
    pub(crate) fn export(message: impl Into<String>) -> Self {
        Self::Caller("ExportError", message.into())
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

/// The most characters of an argument in a message.
const LONGEST_SHOWN: usize = 200;

/// Formats an argument for a message: shortened, and only its type if it has no text, as an int of more digits than Python converts.
///
/// # Errors
/// Exceptions of its `__repr__` that are not an `Exception`, such as `KeyboardInterrupt`, and `MemoryError`.
pub(crate) fn shown(given: &Bound<'_, PyAny>) -> PyResult<String> {
    match given.repr() {
        Ok(text) => {
            let text = text.to_string_lossy();
            Ok(match text.char_indices().nth(LONGEST_SHOWN) {
                Some((end, _)) => format!("{}...", &text[..end]),
                None => text.into_owned(),
            })
        }
        Err(error)
            if error.is_instance_of::<PyException>(given.py())
                && !error.is_instance_of::<PyMemoryError>(given.py()) =>
        {
            Ok(format!("<{}>", given.get_type().name()?))
        }
        Err(error) => Err(error),
    }
}

/// The class of `vmmfd._errors` for an error of the library: its name there, or the base class.
fn class_of(error: &Error) -> String {
    match error.class() {
        // Of `vmmfd.take`, whose wait expired.
        _ if matches!(error, Error::Socket(SocketError::Absent { waited, .. }) if !waited.is_zero()) => {
            "Timeout".to_owned()
        }
        ErrorClass::Driver | ErrorClass::System => "Error".to_owned(),
        // The state of each object in a fork forbids every call.
        ErrorClass::Forked => "Invalid".to_owned(),
        ErrorClass::Exists => "AlreadyExists".to_owned(),
        ErrorClass::Differs => "MismatchError".to_owned(),
        ErrorClass::Denied => "PermissionDenied".to_owned(),
        class => format!("{class:?}"),
    }
}

/// An error as a message. On the host backend the system's error replaces CUDA's number.
fn sentence(error: &Error) -> String {
    match error {
        Error::Driver { call, code: code::OUT_OF_MEMORY, source: Some(source), .. } => {
            format!("{call} failed: {source}")
        }
        Error::Forked { initialised_by, pid } => format!(
            "process {pid} is a fork of process {initialised_by}, whose memory and connections it can't use: connect again, in a process \
             that spawn or forkserver started"
        ),
        error => error.in_full(),
    }
}

/// The name of an exception's class in `vmmfd._errors`, and its arguments.
pub(crate) type Described = (String, String, &'static str, Option<Cow<'static, str>>);

/// Describes an error of the library.
pub(crate) fn described(error: &Error) -> Described {
    (class_of(error), sentence(error), error.kind().as_str(), error.hint())
}

impl From<Failure> for PyErr {
    fn from(failure: Failure) -> Self {
        let described = match failure {
            Failure::Python(error) => return error,
            Failure::Caller("TypeError", message) => return PyTypeError::new_err(message),
            Failure::Caller(class, message) => (class.to_owned(), message, "usage", None),
            Failure::Library(error) => described(&error),
        };
        Python::attach(|py| raise(py, described).unwrap_or_else(|error| error))
    }
}

fn raise(py: Python<'_>, (class, message, kind, hint): Described) -> PyResult<PyErr> {
    static ERRORS: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    let errors = ERRORS.get_or_try_init(py, || py.import("vmmfd._errors").map(Bound::unbind))?;
    let class = errors.bind(py).getattr(class)?;
    let class = class.cast::<PyType>().map_err(|_| PyRuntimeError::new_err("vmmfd._errors is damaged"))?;
    let options = PyDict::new(py);
    options.set_item("kind", kind)?;
    options.set_item("hint", hint)?;
    Ok(PyErr::from_value(class.call((message,), Some(&options))?))
}
