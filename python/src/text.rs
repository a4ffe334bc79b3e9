//! Callers' names and paths. pyo3's own conversions raise `UnicodeEncodeError` and `OverflowError` for bad values.

use std::{ops::Deref, path::PathBuf};

use pyo3::{prelude::*, types::PyString};

use crate::error::{Failure, Outcome, shown, tolerant};

/// A str: `TypeError` for another type, `Invalid` for an unpaired surrogate.
pub(crate) struct Text(pub(crate) String);

impl Deref for Text {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl<'a, 'py> FromPyObject<'a, 'py> for Text {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        let Ok(text) = object.cast::<PyString>() else {
            let kind = object.get_type().name()?;
            return Err(Failure::wrong_type(format!("{} has type {kind}: give a str", shown(&object)?)).into());
        };
        Ok(Self(unicode(&text)?))
    }
}

/// Converts a str.
///
/// # Errors
/// `ValueError` for an unpaired surrogate.
pub(crate) fn unicode(text: &Bound<'_, PyString>) -> Outcome<String> {
    match tolerant(text.py(), text.extract())? {
        Some(text) => Ok(text),
        None => Err(Failure::invalid(format!(
            "{} has an unpaired surrogate, which is not valid Unicode: remove it",
            shown(text)?
        ))),
    }
}

/// A path, as a str, bytes or `os.PathLike`: `TypeError` for another type, `Invalid` for a path that no file can have.
pub(crate) struct FilePath(pub(crate) PathBuf);

impl<'a, 'py> FromPyObject<'a, 'py> for FilePath {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        let path = match object.extract::<PathBuf>() {
            Err(error) if error.is_instance_of::<pyo3::exceptions::PyUnicodeError>(object.py()) => {
                return Err(Failure::invalid(format!("path={} is not a path: {error}", shown(&object)?)).into());
            }
            path => path?,
        };
        match path.as_os_str().as_encoded_bytes().contains(&0) {
            true => Err(Failure::invalid(format!("path={path:?} contains a null character: remove it")).into()),
            false => Ok(Self(path)),
        }
    }
}
