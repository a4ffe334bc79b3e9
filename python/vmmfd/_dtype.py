"""The type of an array's elements."""

from __future__ import annotations

from . import _native


class DType(str):
    """The type of an array's elements: a str with its NumPy or ml_dtypes name, such as `float32` or `bfloat16`.

    Big-endian types and raw bytes use NumPy's syntax: `>f4`, `|V16`. It equals that str, and the same type of NumPy, ml_dtypes, JAX and
    PyTorch. `numpy.dtype` accepts it; the types of ml_dtypes only after that package is imported.

    `dtype` is a str, or a dtype of NumPy, ml_dtypes, JAX or PyTorch. Raises `Invalid` for other objects and for unsupported types.
    """

    __slots__ = ()

    def __new__(cls, dtype: object) -> DType:
        return str.__new__(cls, _native._dtype_name(dtype, True) or "")

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str):
            return str.__eq__(self, other)
        return _native._dtype_name(other, False) == str(self)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return str.__hash__(self)
