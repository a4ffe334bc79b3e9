"""Array interfaces and the buffer protocol."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np
import pytest

import vmmfd

FLAGS = {
    "SIMPLE": 0,
    "WRITABLE": 1,
    "FORMAT": 4,
    "ND": 8,
    "STRIDES": 0x18,
    "C": 0x38,
    "F": 0x58,
    "ANY": 0x98,
    "FULL_RO": 0x11C,
}


class View(ctypes.Structure):
    _fields_ = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.POINTER(ctypes.c_ssize_t)),
        ("strides", ctypes.POINTER(ctypes.c_ssize_t)),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    ]


def view(array: vmmfd.Array, flags: int) -> View:
    """Returns a view with exactly these flags, already released: its numbers are readable, its lists are not."""
    found = View()
    get = ctypes.pythonapi.PyObject_GetBuffer
    get.argtypes = [ctypes.py_object, ctypes.POINTER(View), ctypes.c_int]
    get(array, ctypes.byref(found), flags)
    release = ctypes.pythonapi.PyBuffer_Release
    release.argtypes = [ctypes.POINTER(View)]
    copy = View.from_buffer_copy(found)
    release(ctypes.byref(found))
    return copy


def test_numpy_interface() -> None:
    array = vmmfd.asarray(np.arange(12, dtype="i2").reshape(3, 4), backend="host")
    interface = array[:, ::2].__array_interface__
    assert interface == {
        "shape": (3, 2),
        "typestr": "<i2",
        "data": (array.address, False),
        "strides": (8, 4),
        "version": 3,
    }
    assert array.__array_interface__["strides"] is None
    assert not hasattr(array, "__cuda_array_interface__")


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2"])
def test_no_interface_without_typestr(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    array = vmmfd.empty(4, dtype, backend="host")
    assert not hasattr(array, "__array_interface__")
    with pytest.raises(AttributeError, match="no typestr"):
        array.__array_interface__
    with pytest.raises(BufferError, match="no format"):
        memoryview(array)
    with pytest.raises(TypeError, match="reinterpret"):
        np.asarray(array)
    size = array.itemsize
    assert np.asarray(array.reinterpret(f"uint{8 * size}")).shape == (4,)


@pytest.mark.fake
def test_cuda_interface() -> None:
    array = vmmfd.empty((3, 4), "float32")
    assert array[1].__cuda_array_interface__ == {
        "shape": (4,),
        "typestr": "<f4",
        "data": (array.address + 16, False),
        "strides": None,
        "version": 3,
        "stream": None,
    }
    assert array[:0].__cuda_array_interface__["data"][0] == 0
    assert not hasattr(array, "__array_interface__")
    assert not hasattr(vmmfd.empty(3, "bfloat16"), "__cuda_array_interface__")
    with pytest.raises(BufferError, match="on fakecuda"):
        memoryview(array)
    with pytest.raises(TypeError, match="tobytes"):
        np.asarray(array)


@pytest.mark.parametrize(
    ("dtype", "format"),
    [
        ("bool", "?"),
        ("int8", "b"),
        ("uint16", "H"),
        ("int64", "l"),
        ("float16", "e"),
        ("float64", "d"),
        ("complex64", "Zf"),
        (">u4", ">I"),
    ],
)
def test_buffer_formats_match_numpy(dtype: str, format: str) -> None:
    array = vmmfd.asarray(np.ones((2, 3), dtype), backend="host")
    assert memoryview(array).format == format
    assert np.asarray(memoryview(array)).dtype == np.dtype(dtype)
    assert np.asarray(memoryview(array)).ctypes.data == array.address


def test_buffer_flags() -> None:
    array = vmmfd.asarray(np.arange(12, dtype="f4").reshape(3, 4), backend="host")
    simple = view(array, FLAGS["SIMPLE"])
    assert (simple.buf, simple.len, simple.itemsize) == (array.address, 48, 4)
    assert not simple.shape and not simple.strides and simple.format is None
    assert bool(view(array, FLAGS["ND"]).shape) and not view(array, FLAGS["ND"]).strides
    assert bool(view(array, FLAGS["STRIDES"]).strides)
    view(array, FLAGS["C"])
    view(array.T, FLAGS["F"])
    view(array.T, FLAGS["ANY"])
    view(array, FLAGS["FULL_RO"] | FLAGS["WRITABLE"])
    for of, flags in (
        (array.T, "SIMPLE"),
        (array.T, "ND"),
        (array.T, "C"),
        (array, "F"),
        (array[:, ::2], "ANY"),
        (array[:, ::2], "SIMPLE"),
    ):
        with pytest.raises(BufferError, match="not contiguous"):
            view(of, FLAGS[flags])


def test_view_keeps_the_memory() -> None:
    seen = memoryview(vmmfd.asarray(b"kept", backend="host"))
    assert bytes(seen) == b"kept"
    seen.release()


def test_read_only_memory_refuses_writable_view(socket: str) -> None:
    with vmmfd.connect(socket, backend="host") as broker:
        broker.put("no-view", {"x": np.arange(3)})
        with broker.get("no-view") as lease:
            with pytest.raises(BufferError, match="only read"):
                view(lease["x"], FLAGS["WRITABLE"])
            assert view(lease["x"], FLAGS["SIMPLE"]).readonly == 1


def test_foreign_interface_is_read() -> None:
    numbers = np.arange(12, dtype="i4").reshape(3, 4)

    class Foreign:
        def __init__(self, **changes: Any) -> None:
            self.__array_interface__ = {**numbers.__array_interface__, **changes}

        def __setitem__(self, at: int, value: int) -> None: ...

    assert np.array_equal(np.asarray(vmmfd.asarray(Foreign(), backend="host")), numbers)
    view = numbers[:, ::-2]
    changes = view.__array_interface__
    assert np.array_equal(np.asarray(vmmfd.asarray(Foreign(**changes), backend="host")), view)
    for changes in ({"typestr": "|O8"}, {"shape": None}, {"mask": numbers}, {"typestr": "nonsense"}):
        with pytest.raises(ValueError):
            vmmfd.asarray(Foreign(**changes), backend="host")
