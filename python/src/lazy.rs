//! Iterators that create their Python objects one at a time.
//!
//! A list of many objects holds the GIL while it is dropped, and so does each run of Python's garbage collector over its members.

use std::sync::Mutex;

use pyo3::prelude::*;
use vmmfd::bindings::lock;

use crate::error::Outcome;

/// Creates one object.
type Make = Box<dyn FnOnce(Python<'_>) -> Outcome<Py<PyAny>> + Send>;

/// An iterator over Python objects that do not exist yet.
#[pyclass(name = "_Lazy", module = "vmmfd._native", frozen)]
pub(crate) struct Lazy(Mutex<Box<dyn Iterator<Item = Make> + Send>>);

impl Lazy {
    /// Each step converts one of `items`.
    pub(crate) fn of<T: Send + 'static>(
        items: Vec<T>,
        convert: impl Fn(Python<'_>, T) -> Outcome<Py<PyAny>> + Copy + Send + 'static,
    ) -> Self {
        let make = move |item| -> Make { Box::new(move |py| convert(py, item)) };
        Self(Mutex::new(Box::new(items.into_iter().map(make))))
    }
}

#[pymethods]
impl Lazy {
    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> Outcome<Option<Py<PyAny>>> {
        // Not under the lock: a conversion may run other Python code.
        let make = lock(&self.0).next();
        make.map(|make| make(py)).transpose()
    }
}
