//! Converts between JSON values and Python objects.

use std::fmt;

use pyo3::{
    IntoPyObjectExt,
    prelude::*,
    types::{PyBool, PyDict, PyFloat, PyInt, PyList, PyMapping, PyString, PyTuple},
};
use serde::Serialize;
use serde_json::{Map, Number, Value};

use crate::{
    error::{Failure, Outcome, shown},
    signals::GilPause,
};

/// The deepest nesting of lists and mappings.
const DEEPEST: usize = 64;

/// Converts a value to a dict, list, str, int, float, bool or None.
pub(crate) fn to_python<'py>(py: Python<'py>, value: &Value) -> PyResult<Bound<'py, PyAny>> {
    converted(py, value, &mut GilPause::new())
}

fn converted<'py>(py: Python<'py>, value: &Value, pause: &mut GilPause) -> PyResult<Bound<'py, PyAny>> {
    pause.step(py);
    match value {
        Value::Null => Ok(py.None().into_bound(py)),
        Value::Bool(value) => value.into_bound_py_any(py),
        Value::Number(number) => match (number.as_u64(), number.as_i64()) {
            (Some(number), _) => number.into_bound_py_any(py),
            (None, Some(number)) => number.into_bound_py_any(py),
            (None, None) => number.as_f64().into_bound_py_any(py),
        },
        Value::String(text) => text.into_bound_py_any(py),
        Value::Array(values) => {
            let list = PyList::empty(py);
            values.iter().try_for_each(|value| list.append(converted(py, value, pause)?))?;
            Ok(list.into_any())
        }
        Value::Object(fields) => {
            let dict = PyDict::new(py);
            fields.iter().try_for_each(|(name, value)| dict.set_item(name, converted(py, value, pause)?))?;
            Ok(dict.into_any())
        }
    }
}

/// Converts the JSON form of a report.
pub(crate) fn serialized<'py>(py: Python<'py>, of: impl Serialize + Send) -> Outcome<Bound<'py, PyAny>> {
    let value = py.detach(move || value(of))?;
    Ok(to_python(py, &value)?)
}

/// Returns the JSON form of a report.
///
/// # Errors
/// `ValueError`.
pub(crate) fn value(of: impl Serialize) -> Outcome<Value> {
    serde_json::to_value(of)
        .map_err(|error| Failure::invalid(format!("the broker's answer can't be converted: {error}")))
}

/// Converts a JSON object's text with Python's own reader, whose integers have any size.
///
/// # Errors
/// `ValueError` if it is not a JSON object.
pub(crate) fn read<'py>(py: Python<'py>, text: &str) -> Outcome<Bound<'py, PyDict>> {
    let value = py.import("json")?.call_method1("loads", (text,));
    let object = value.ok().and_then(|value| value.cast_into::<PyDict>().ok());
    object.ok_or_else(|| Failure::invalid("the metadata is not a JSON object"))
}

/// Converts an object to a dict.
pub(crate) fn to_dict<'py>(py: Python<'py>, fields: &Map<String, Value>) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    let mut pause = GilPause::new();
    fields.iter().try_for_each(|(name, value)| dict.set_item(name, converted(py, value, &mut pause)?))?;
    Ok(dict)
}

/// Converts a mapping to an object. `what` is its name in errors.
///
/// # Errors
/// `TypeError` for another type, and for a type that JSON lacks; `ValueError` for a value that it lacks; with the position.
pub(crate) fn from_mapping(value: &Bound<'_, PyAny>, what: &str) -> Outcome<Map<String, Value>> {
    match from_python(value, &At::Root(what), 0, &mut GilPause::new())? {
        Value::Object(fields) => Ok(fields),
        _ => Err(Failure::wrong_type(format!("{what} has type {}: give a mapping", type_of(value)))),
    }
}

/// A position in a value. Formatted only for an error: there may be a million of them.
enum At<'a> {
    Root(&'a str),
    Index(&'a At<'a>, usize),
    Key(&'a At<'a>, &'a str),
}

impl fmt::Display for At<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Root(what) => f.write_str(what),
            Self::Index(of, index) => write!(f, "{of}[{index}]"),
            Self::Key(of, key) => write!(f, "{of}[{key:?}]"),
        }
    }
}

fn from_python(value: &Bound<'_, PyAny>, at: &At<'_>, depth: usize, pause: &mut GilPause) -> Outcome<Value> {
    pause.step(value.py());
    if depth > DEEPEST {
        return Err(Failure::invalid(format!("{at} is nested more than {DEEPEST} levels deep: flatten it")));
    }
    if value.is_none() {
        return Ok(Value::Null);
    }
    if let Ok(value) = value.cast::<PyBool>() {
        return Ok(Value::Bool(value.is_true()));
    }
    if value.is_instance_of::<PyString>() {
        return text_of(value, at).map(Value::String);
    }
    if value.is_instance_of::<PyInt>() {
        let number = value.extract::<u64>().map(Number::from).or_else(|_| value.extract::<i64>().map(Number::from));
        return match number {
            Ok(number) => Ok(Value::Number(number)),
            Err(_) => Err(Failure::invalid(format!(
                "{at} is {}, which needs more than 64 bits: give it as a str",
                shown(value)?
            ))),
        };
    }
    if let Ok(value) = value.cast::<PyFloat>() {
        let number = value.extract::<f64>()?;
        let bad = || Failure::invalid(format!("{at} is {number}, which JSON lacks: give it as a str"));
        return Number::from_f64(number).map(Value::Number).ok_or_else(bad);
    }
    if value.is_instance_of::<PyList>() || value.is_instance_of::<PyTuple>() {
        let mut values = Vec::new();
        for (index, value) in value.try_iter()?.enumerate() {
            values.push(from_python(&value?, &At::Index(at, index), depth + 1, pause)?);
        }
        return Ok(Value::Array(values));
    }
    if let Ok(mapping) = value.cast::<PyMapping>() {
        let mut fields = Map::new();
        for item in mapping.items()?.iter() {
            let (key, value): (Bound<'_, PyAny>, Bound<'_, PyAny>) = item.extract()?;
            if !key.is_instance_of::<PyString>() {
                return Err(Failure::wrong_type(format!(
                    "{at} has the key {}, of type {}: keys are str",
                    shown(&key)?,
                    type_of(&key)
                )));
            }
            let key = text_of(&key, at)?;
            let value = from_python(&value, &At::Key(at, &key), depth + 1, pause)?;
            fields.insert(key, value);
        }
        return Ok(Value::Object(fields));
    }
    Err(Failure::wrong_type(format!(
        "{at} has type {}: give a str, int, float, bool, None, or lists and mappings of them",
        type_of(value)
    )))
}

fn text_of(value: &Bound<'_, PyAny>, at: &At<'_>) -> Outcome<String> {
    value
        .extract()
        .map_err(|_| Failure::invalid(format!("a str in {at} has an unpaired surrogate, which is not valid Unicode")))
}

pub(crate) fn type_of(value: &Bound<'_, PyAny>) -> String {
    value.get_type().fully_qualified_name().map_or_else(|_| "unknown".to_owned(), |name| name.to_string())
}
