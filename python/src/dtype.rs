//! Element types: from callers' names, and as formats of the buffer protocol.

use std::{borrow::Cow, str::FromStr};

use pyo3::{
    prelude::*,
    sync::PyOnceLock,
    types::{PyFloat, PyString, PyType},
};
use vmmfd::array::ElementType;

use crate::{
    error::{Failure, Outcome, shown, tolerant},
    text::unicode,
};

/// Returns the buffer protocol's format (PEP 3118); `None` for types without a format.
pub(crate) fn format(dtype: ElementType) -> Option<String> {
    let letter = match dtype.typestr()?.get(1..)? {
        // A C long, as in NumPy, which treats a long long as another type than int64. With a byte order, `l` has 4 bytes.
        "i8" if !dtype.is_big_endian() => "l",
        "u8" if !dtype.is_big_endian() => "L",
        "b1" => "?",
        "i1" => "b",
        "i2" => "h",
        "i4" => "i",
        "i8" => "q",
        "u1" => "B",
        "u2" => "H",
        "u4" => "I",
        "u8" => "Q",
        "f2" => "e",
        "f4" => "f",
        "f8" => "d",
        "c8" => "Zf",
        "c16" => "Zd",
        _ => return None,
    };
    Some(format!("{}{letter}", if dtype.is_big_endian() { ">" } else { "" }))
}

/// Returns the type of a buffer protocol format with elements of `size` bytes.
pub(crate) fn of_format(format: &str, size: u64) -> Option<ElementType> {
    let (order, letters) = match format.as_bytes().first()? {
        b'@' | b'=' | b'<' => ("<", &format[1..]),
        b'>' | b'!' => (">", &format[1..]),
        _ => ("<", format),
    };
    let kind = match letters {
        "?" => "b",
        "b" | "h" | "i" | "l" | "q" | "n" => "i",
        "B" | "c" | "H" | "I" | "L" | "Q" | "N" => "u",
        "e" | "f" | "d" => "f",
        "Zf" | "Zd" => "c",
        _ => return None,
    };
    let order = if size == 1 { "|" } else { order };
    ElementType::from_str(&format!("{order}{kind}{size}")).ok()
}

/// Parses a type: our names (`float32`, `bfloat16`, `float8_e4m3fn`, `f32`), a typestr (`<f4`), or NumPy's short form (`f4`). Names that
/// mean different types in NumPy and Rust, or in Python and C, are refused.
///
/// # Errors
/// `ValueError`.
pub(crate) fn parse(text: &str) -> Outcome<ElementType> {
    let ambiguous = match text {
        "i8" => Some("int64 for NumPy and int8 for others: write int64 or int8"),
        "u8" => Some("uint64 for NumPy and uint8 for others: write uint64 or uint8"),
        "float" => Some("float64 for Python and float32 for C: write float64 or float32"),
        "int" => Some("int64 for NumPy and int32 for C: write int64 or int32"),
        _ => None,
    };
    if let Some(means) = ambiguous {
        return Err(Failure::invalid(format!("dtype={text:?} means {means}")));
    }
    let plain = text.strip_prefix('=').unwrap_or(text);
    let short = ["f2", "f4", "f8", "i1", "i2", "i4", "u1", "u2", "u4", "c8", "c16", "b1"].contains(&plain);
    let order = if plain.ends_with('1') { "|" } else { "<" };
    let named = if short { format!("{order}{plain}") } else { plain.to_owned() };
    ElementType::from_str(&named).map_err(|_| {
        Failure::invalid(format!(
            "dtype={text:?} is not an element type: write a name such as float32, bfloat16 or float8_e4m3fn, or a typestr such as <f4"
        ))
    })
}

/// The spelling of `vmmfd.DType`: the name, or the typestr of big-endian and raw elements, whose names NumPy does not parse.
pub(crate) fn spelling(dtype: ElementType) -> Cow<'static, str> {
    match (dtype.dlpack(), dtype.typestr()) {
        (None, Some(typestr)) => typestr.into(),
        _ => dtype.name(),
    }
}

/// Returns the type as a `vmmfd.DType`.
///
/// # Errors
/// Python's exceptions.
pub(crate) fn to_python(py: Python<'_>, dtype: ElementType) -> PyResult<Bound<'_, PyAny>> {
    static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let class = CLASS.import(py, "vmmfd._dtype", "DType")?;
    // DType's own constructor would parse the text.
    py.get_type::<PyString>().call_method1("__new__", (class, &*spelling(dtype)))
}

/// Returns the type as a NumPy dtype.
///
/// # Errors
/// `ImportError` without NumPy, or without ml_dtypes for its types.
pub(crate) fn to_numpy(py: Python<'_>, dtype: ElementType) -> PyResult<Bound<'_, PyAny>> {
    if dtype.typestr().is_none() {
        // Importing ml_dtypes registers its types with NumPy.
        py.import("ml_dtypes")?;
    }
    py.import("numpy")?.call_method1("dtype", (&*spelling(dtype),))
}

/// Returns the spelling of an object's type. For an object that is not a type, raises `TypeError` if `strict`, else returns None.
#[pyfunction(name = "_dtype_name")]
pub(crate) fn name(object: &Bound<'_, PyAny>, strict: bool) -> Outcome<Option<Cow<'static, str>>> {
    let found = if strict { Some(extract(object)?) } else { of_object(object)? };
    Ok(found.map(spelling))
}

/// Returns the type that a caller names: a text, or a dtype of NumPy, ml_dtypes, JAX or PyTorch.
///
/// # Errors
/// `TypeError` for an object that is not a type, `ValueError` for a type that readers could not restore.
pub(crate) fn extract(named: &Bound<'_, PyAny>) -> Outcome<ElementType> {
    if let Ok(text) = named.cast::<PyString>() {
        return parse(&unicode(text)?);
    }
    if let Some(dtype) = of_object(named)? {
        return Ok(dtype);
    }
    let shown = shown(named)?;
    if is_compound(named)? {
        return Err(Failure::invalid(format!(
            "dtype={shown} has fields or is a subarray, and readers would only get its bytes: share each field as a separate array"
        )));
    }
    let problem = format!(
        "dtype={shown} is not a supported element type: use bool, integers and floats of 8 to 64 bits, bfloat16, complex64, \
         complex128 or void, by a name such as \"float32\""
    );
    // The dtypes of NumPy and PyTorch have an itemsize.
    let is_type = named.is_instance_of::<PyType>() || named.hasattr("itemsize")?;
    Err(if is_type { Failure::invalid(problem) } else { Failure::wrong_type(problem) })
}

/// Returns the type of another library's object; `None` for other objects, and for unsupported types.
fn of_object(named: &Bound<'_, PyAny>) -> Outcome<Option<ElementType>> {
    let py = named.py();
    let text = |name: &str| -> PyResult<Option<String>> {
        let Some(found) = tolerant(py, named.getattr(name))? else { return Ok(None) };
        tolerant(py, found.extract())
    };
    if let Some(known) = of_dtype(named)? {
        return Ok(known);
    }
    // JAX's scalar types have a dtype. The dtype's own `dtype` is not followed: the chain may be infinite.
    if let Some(dtype) = tolerant(py, named.getattr("dtype"))?
        && !named.hasattr("__mro__")?
    {
        return Ok(of_dtype(&dtype)?.flatten());
    }
    // NumPy's scalar types, and PyTorch's `torch.float32`.
    if let Some(name) = text("__name__")? {
        return Ok(match name.as_str() {
            // Python's own, as in NumPy, where the size of its int depends on the version.
            "float" if named.is(py.get_type::<PyFloat>()) => Some(ElementType::F64),
            "float" | "int" | "complex" => None,
            "longlong" => Some(ElementType::I64),
            "ulonglong" => Some(ElementType::U64),
            name => ElementType::from_str(name).ok(),
        });
    }
    let Some(shown) = tolerant(py, named.str())? else { return Ok(None) };
    Ok(shown.to_string_lossy().strip_prefix("torch.").and_then(|name| ElementType::from_str(name).ok()))
}

/// Returns the type of a NumPy dtype, including types that ml_dtypes adds. `None` for an object that is not a dtype, `Some(None)` for an
/// unsupported type.
fn of_dtype(named: &Bound<'_, PyAny>) -> Outcome<Option<Option<ElementType>>> {
    let py = named.py();
    let text = |name: &str| -> PyResult<Option<String>> {
        let Some(found) = tolerant(py, named.getattr(name))? else { return Ok(None) };
        tolerant(py, found.extract())
    };
    let (Some(name), Some(typestr)) = (text("name")?, text("str")?) else { return Ok(None) };
    if is_compound(named)? {
        return Ok(Some(None));
    }
    // The typestr alone is not enough: ml_dtypes types, even of 4 bits, have the typestr of raw bytes.
    let order = if typestr.starts_with('>') { ">" } else { "" };
    Ok(Some(ElementType::from_str(&format!("{order}{name}")).ok()))
}

/// Whether the elements of a dtype have fields, or are subarrays.
fn is_compound(dtype: &Bound<'_, PyAny>) -> PyResult<bool> {
    for attribute in ["fields", "subdtype"] {
        if tolerant(dtype.py(), dtype.getattr(attribute))?.is_some_and(|found| !found.is_none()) {
            return Ok(true);
        }
    }
    Ok(false)
}
