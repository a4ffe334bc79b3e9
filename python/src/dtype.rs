//! Element types: as a caller names them, as DLPack codes, and as formats of the buffer protocol.

use std::{borrow::Cow, str::FromStr};

use pyo3::{
    prelude::*,
    sync::PyOnceLock,
    types::{PyString, PyType},
};
use vmmfd::array::ElementType;

use crate::error::{Failure, Outcome, shown, tolerant};

/// DLPack's codes of the types that it shares with us: `kDLInt` and so on.
const CODES: [(ElementType, u8); 23] = [
    (ElementType::I8, 0),
    (ElementType::I16, 0),
    (ElementType::I32, 0),
    (ElementType::I64, 0),
    (ElementType::U8, 1),
    (ElementType::U16, 1),
    (ElementType::U32, 1),
    (ElementType::U64, 1),
    (ElementType::F16, 2),
    (ElementType::F32, 2),
    (ElementType::F64, 2),
    (ElementType::BF16, 4),
    (ElementType::C64, 5),
    (ElementType::C128, 5),
    (ElementType::BOOL, 6),
    (ElementType::F8E3M4, 7),
    (ElementType::F8E4M3, 8),
    (ElementType::F8E4M3B11FNUZ, 9),
    (ElementType::F8E4M3FN, 10),
    (ElementType::F8E4M3FNUZ, 11),
    (ElementType::F8E5M2, 12),
    (ElementType::F8E5M2FNUZ, 13),
    (ElementType::F8E8M0FNU, 14),
];

/// DLPack's code and the bits of a type; `None` for big-endian and raw elements, which it has no code for.
pub(crate) fn code(dtype: ElementType) -> Option<(u8, u8)> {
    let (_, code) = CODES.iter().find(|(known, _)| *known == dtype)?;
    Some((*code, (8 * dtype.size()) as u8))
}

/// The type of a code of DLPack's.
pub(crate) fn of_code(code: u8, bits: u8, lanes: u16) -> Option<ElementType> {
    if lanes != 1 {
        return None;
    }
    let fits = |(known, of): &&(ElementType, u8)| *of == code && 8 * known.size() == u64::from(bits);
    CODES.iter().find(fits).map(|(known, _)| *known)
}

/// The format of the buffer protocol (PEP 3118); `None` for types that have none.
pub(crate) fn format(dtype: ElementType) -> Option<String> {
    let letter = match dtype.typestr()?.get(1..)? {
        // A C long, as NumPy has it: of a long long NumPy makes another type than int64. With a byte order `l` has 4 bytes.
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

/// The type of a format of the buffer protocol, whose elements have so many bytes.
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

/// The type that a text names: our names (`float32`, `bfloat16`, `float8_e4m3fn`, `f32`), a typestr (`<f4`), or NumPy's short form
/// (`f4`). What NumPy and Rust, or Python and C, call by one name and mean two types is refused.
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
            "dtype={text:?} is no type of elements: write a name such as float32, bfloat16 or float8_e4m3fn, or a typestr such as <f4"
        ))
    })
}

/// The type as `vmmfd.DType` spells it: its name, or the typestr of big-endian and raw elements, which NumPy parses by no name.
pub(crate) fn spelling(dtype: ElementType) -> Cow<'static, str> {
    match (code(dtype), dtype.typestr()) {
        (None, Some(typestr)) => typestr.into(),
        _ => dtype.name(),
    }
}

/// The type as a `vmmfd.DType`.
///
/// # Errors
/// What Python raises.
pub(crate) fn to_python(py: Python<'_>, dtype: ElementType) -> PyResult<Bound<'_, PyAny>> {
    static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let class = CLASS.import(py, "vmmfd._dtype", "DType")?;
    // Its own constructor would parse the text.
    py.get_type::<PyString>().call_method1("__new__", (class, &*spelling(dtype)))
}

/// The type as a dtype of NumPy.
///
/// # Errors
/// `ImportError` without NumPy, or without ml_dtypes where the type is one of its own.
pub(crate) fn to_numpy(py: Python<'_>, dtype: ElementType) -> PyResult<Bound<'_, PyAny>> {
    if dtype.typestr().is_none() {
        // It registers its types with NumPy.
        py.import("ml_dtypes")?;
    }
    py.import("numpy")?.call_method1("dtype", (&*spelling(dtype),))
}

/// The spelling of the type that an object is, with `strict`; without it None for an object that is no type.
#[pyfunction(name = "_dtype_name")]
pub(crate) fn name(object: &Bound<'_, PyAny>, strict: bool) -> Outcome<Option<Cow<'static, str>>> {
    let found = if strict { Some(extract(object)?) } else { of_object(object)? };
    Ok(found.map(spelling))
}

/// The type that a caller names: by a text, or by a dtype of NumPy, ml_dtypes, JAX or PyTorch.
///
/// # Errors
/// `ValueError` for an object that is no type, and for a type that readers would not get back as it is.
pub(crate) fn extract(named: &Bound<'_, PyAny>) -> Outcome<ElementType> {
    if let Ok(text) = named.cast::<PyString>() {
        return parse(&text.to_cow()?);
    }
    if let Some(dtype) = of_object(named)? {
        return Ok(dtype);
    }
    let shown = shown(named)?;
    Err(Failure::invalid(if is_compound(named)? {
        format!(
            "dtype={shown} has fields or is an array itself, and readers would get its bytes alone: share each field as an array of its own"
        )
    } else {
        format!(
            "dtype={shown} is no type of elements that vmmfd supports: use bool, integers and floats of 8 to 64 bits, bfloat16, complex64, \
             complex128 or void, by a name such as \"float32\""
        )
    }))
}

/// The type that an object of another library is; `None` for other objects, and for types that are not supported.
fn of_object(named: &Bound<'_, PyAny>) -> Outcome<Option<ElementType>> {
    let py = named.py();
    let text = |name: &str| -> PyResult<Option<String>> {
        let Some(found) = tolerant(py, named.getattr(name))? else { return Ok(None) };
        tolerant(py, found.extract())
    };
    if let Some(known) = of_dtype(named)? {
        return Ok(known);
    }
    // The scalars of JAX have a dtype. That one's own is not looked at: it might be without an end.
    if let Some(dtype) = tolerant(py, named.getattr("dtype"))?
        && !named.hasattr("__mro__")?
    {
        return Ok(of_dtype(&dtype)?.flatten());
    }
    // NumPy's scalar types, and PyTorch's `torch.float32`.
    if let Some(name) = text("__name__")? {
        return Ok(match name.as_str() {
            "float" | "int" | "complex" => None,
            "longlong" => Some(ElementType::I64),
            "ulonglong" => Some(ElementType::U64),
            name => ElementType::from_str(name).ok(),
        });
    }
    let Some(shown) = tolerant(py, named.str())? else { return Ok(None) };
    Ok(shown.to_string_lossy().strip_prefix("torch.").and_then(|name| ElementType::from_str(name).ok()))
}

/// The type that a dtype of NumPy is, also of types that ml_dtypes adds. `None` for an object that is no dtype, `Some(None)` for a type
/// that is not supported.
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
    // Not by the typestr alone: that of ml_dtypes' types, of 4 bits too, is one of raw bytes.
    let order = if typestr.starts_with('>') { ">" } else { "" };
    Ok(Some(ElementType::from_str(&format!("{order}{name}")).ok()))
}

/// Whether the elements of a dtype have fields, or are arrays themselves.
fn is_compound(dtype: &Bound<'_, PyAny>) -> PyResult<bool> {
    for attribute in ["fields", "subdtype"] {
        if tolerant(dtype.py(), dtype.getattr(attribute))?.is_some_and(|found| !found.is_none()) {
            return Ok(true);
        }
    }
    Ok(false)
}
