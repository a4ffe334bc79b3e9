"""The elements of an array as Python objects."""

from __future__ import annotations

import struct
from math import prod

from . import _types as t
from ._native import Array, asarray

# Names of element types, by NumPy's kind and size.
_KINDS = {
    "bool": "b1",
    **{f"{name}{8 * size}": f"{name[0]}{size}" for name in ("int", "uint") for size in (1, 2, 4, 8)},
    **{f"float{8 * size}": f"f{size}" for size in (2, 4, 8)},
    **{f"complex{8 * size}": f"c{size}" for size in (8, 16)},
}
# DLPack's number of a host device.
_CPU = 1

# Their codes for `struct`.
_CODES = dict(zip("b1 i1 u1 i2 u2 i4 u4 i8 u8 f2 f4 f8".split(), "?bBhHiIqQefd", strict=True))


def nested(array: Array) -> t.Any:
    """Returns the elements as nested lists."""
    return _nest(_flat(array), array.shape)


def only(array: Array) -> t.Any:
    """Returns the only element."""
    return _flat(array)[0]


def assign(array: Array, value: t.Any) -> None:
    """Sets all elements of a writable array."""
    import numpy as np

    if array.device.backend == "host":
        array.numpy()[...] = value
        return
    on = getattr(value, "__dlpack_device__", None)
    if on is None or on()[0] == _CPU:
        value = asarray(np.full(array.shape, value, array.__numpy_dtype__), device=array.device)
    array.copy_from(value)


def _nest(flat: list[t.Any], shape: tuple[int, ...]) -> t.Any:
    if not shape:
        return flat[0]
    if len(shape) == 1:
        return flat
    size = prod(shape[1:])
    return [_nest(flat[start : start + size], shape[1:]) for start in range(0, shape[0] * size, size or 1)] or [
        _nest([], shape[1:]) for _ in range(shape[0])
    ]


def _flat(array: Array) -> list[t.Any]:
    data, name = array.tobytes(), str(array.dtype)
    if name.startswith("|V"):
        return [data[start : start + array.itemsize] for start in range(0, len(data), array.itemsize)]
    if name == "bfloat16":
        # The upper half of a float32.
        wide = bytearray(2 * len(data))
        wide[2::4], wide[3::4] = data[::2], data[1::2]
        return list(struct.unpack(f"<{array.size}f", wide))
    order, kind = (">", name[1:]) if name.startswith(">") else ("<", _KINDS.get(name, ""))
    if kind.startswith("c"):
        parts = struct.unpack(f"{order}{2 * array.size}{'fd'[kind == 'c16']}", data)
        return list(map(complex, parts[::2], parts[1::2]))
    if kind in _CODES:
        return list(struct.unpack(f"{order}{array.size}{_CODES[kind]}", data))
    # The 8-bit floats.
    import numpy as np

    return list(np.frombuffer(data, array.__numpy_dtype__).astype("f4").tolist())
