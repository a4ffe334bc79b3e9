"""Element types: each round-trips or is refused by name; and the equality of `DType`."""

from __future__ import annotations

import ctypes
import json
import pickle
import sys
from array import array
from typing import Any

import numpy as np
import pytest

import vmmfd

PLAIN = [np.dtype(letter) for letter in np.typecodes["All"] if np.dtype(letter).itemsize]
# Derived types: with fields, as subarrays, with other byte orders and alignments.
MADE = [
    np.dtype("V16"),
    np.dtype(("f4", (2,))),
    np.dtype(("i4", {"low": ("i2", 0), "high": ("i2", 2)})),
    np.dtype("i4", metadata={"unit": "m"}),
    np.dtypes.StringDType(),
    *(np.dtype(f"{kind}{size}") for kind in "SUV" for size in (1, 3)),
    *(np.dtype(f"{kind}8[{unit}]") for kind in "Mm" for unit in ("D", "ns")),
    *(plain.newbyteorder() for plain in PLAIN),
    *(np.dtype([("a", plain)]) for plain in PLAIN),
    *(np.dtype([("a", "u1"), ("b", plain)], align=True) for plain in PLAIN),
    np.dtype([("a", [("b", "O")])]),
    np.dtype((np.record, [("a", "f4")])),
]
NUMPYS = PLAIN + MADE


def named(types: list[Any]) -> Any:
    return pytest.mark.parametrize("dtype", types, ids=[f"{number}:{one}" for number, one in enumerate(types)])


def returned(numbers: Any, broker: vmmfd.Broker, name: str) -> Any:
    """Returns the array as another process gets it from the broker."""
    broker.put(name, {"x": numbers})
    with broker.get(name) as lease:
        return np.array(np.asarray(lease["x"]))


def came_back_or_was_refused(dtype: Any, broker: vmmfd.Broker, name: str) -> bool:
    numbers = np.zeros(3, dtype)
    try:
        came = returned(numbers, broker, name)
    except vmmfd.Invalid as refused:
        # Every way in names the type.
        assert str(numbers.dtype) in str(refused) or repr(numbers.dtype) in str(refused), refused
        for way in (lambda: vmmfd.empty(1, numbers.dtype, backend="host"), lambda: vmmfd.asarray(numbers, backend="host")):
            with pytest.raises(vmmfd.Invalid, match="dtype="):
                way()
        return False
    assert came.dtype == numbers.dtype and came.tobytes() == numbers.tobytes()
    # Of C's long and long long, which NumPy treats as two types, only the first round-trips.
    assert numbers.dtype.type is came.dtype.type or numbers.dtype.char in "qQ" or not numbers.dtype.isnative
    made = vmmfd.empty(2, numbers.dtype, backend="host").dtype
    assert made == numbers.dtype and np.dtype(made) == numbers.dtype
    return True


@named(NUMPYS)
def test_numpy_types_round_trip(dtype: np.dtype[Any], broker: vmmfd.Broker, name: str) -> None:
    supported = dtype.kind in "biufcV" and dtype.fields is None and dtype.char not in "gG"
    assert came_back_or_was_refused(dtype, broker, name) == supported


def test_subarray_is_refused() -> None:
    with pytest.raises(vmmfd.Invalid, match=r"is a subarray"):
        vmmfd.empty(1, np.dtype(("f4", (2,))), backend="host")


def test_ml_dtypes_round_trip(broker: vmmfd.Broker, name: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    kinds = [kind for kind in vars(ml_dtypes).values() if isinstance(kind, type) and issubclass(kind, np.generic)]
    supported = {kind.__name__ for kind in kinds if came_back_or_was_refused(kind, broker, f"{name}/{kind.__name__}")}
    refused = {kind.__name__ for kind in kinds} - supported
    assert "bfloat16" in supported and {one[:6] for one in supported} == {"bfloat", "float8"}
    assert {"int4", "uint4", "float4_e2m1fn"} <= refused


def test_torch_types_are_equal() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    supported = set()
    for dtype in {one for one in vars(torch).values() if isinstance(one, torch.dtype)}:
        name = str(dtype).removeprefix("torch.")
        try:
            made = vmmfd.empty(1, dtype, backend="host").dtype
        except vmmfd.Invalid as refused:
            assert str(dtype) in str(refused)
            continue
        assert made == name and made == dtype and dtype == made
        supported.add(name)
    assert {"float32", "bfloat16", "float8_e4m3fn", "bool", "uint16", "complex64"} <= supported
    assert not {one for one in supported if "int4" in one or "qu" in one or one == "complex32"}


def test_pointers_are_never_published(broker: vmmfd.Broker, name: str) -> None:
    secret = object()
    record = np.array([(secret, 1.0)], dtype=[("a", "O"), ("b", "f8")])
    pointers = (ctypes.c_void_p * 2)(id(secret), 0)
    objects = (ctypes.py_object * 1)(secret)
    for value in (record, record[0], record["a"], pointers, objects):
        with pytest.raises(vmmfd.Invalid):
            broker.put(name, {"x": value})
    assert broker.list(name) == []


class Interface:
    """An object with only an array interface."""

    def __init__(self, numbers: Any, **changes: Any) -> None:
        self.numbers = numbers
        self.__array_interface__ = {**numbers.__array_interface__, **changes}


def test_array_interface_is_enough() -> None:
    numbers = np.arange(12, dtype="f4").reshape(3, 4)[:, ::2]
    given = vmmfd.asarray(Interface(numbers), backend="host")
    assert given.dtype == "float32" and np.array_equal(np.asarray(given), numbers)
    given.reinterpret("uint32").copy_from(Interface(np.zeros((3, 2), "u4")))
    given.copy_to(Interface(numbers))
    assert not numbers.any()


def test_interface_with_data_in_buffer() -> None:
    numbers = np.arange(6, dtype="i2")
    # As Pillow's images do.
    assert vmmfd.asarray(Interface(numbers, data=numbers.tobytes()), backend="host").tobytes() == numbers.tobytes()
    assert vmmfd.asarray(Interface(numbers, data=(ctypes.c_int16 * 6)(*numbers)), backend="host").tobytes() == numbers.tobytes()
    part = Interface(numbers, data=b"??" + numbers.tobytes(), offset=2)
    assert vmmfd.asarray(part, backend="host").tobytes() == numbers.tobytes()
    backwards = Interface(numbers, data=numbers.tobytes(), offset=10, strides=(-2,))
    assert np.array_equal(np.asarray(vmmfd.asarray(backwards, backend="host")), numbers[::-1])
    for changes in ({"offset": 1}, {"shape": (7,)}, {"strides": (4,)}, {"strides": (-2,)}, {"offset": 2**64 - 1}, {"shape": (2**62,)}):
        with pytest.raises(vmmfd.Invalid):
            vmmfd.asarray(Interface(numbers, data=numbers.tobytes(), **changes), backend="host")
    with pytest.raises(vmmfd.Invalid, match="is read-only"):
        vmmfd.asarray(numbers, backend="host").copy_to(Interface(numbers, data=numbers.tobytes()))


@pytest.mark.parametrize(
    "changes",
    [
        {"typestr": "|V4", "descr": [("a", "<i4")]},
        {"typestr": "<V4"},
        {"typestr": "|O4"},
        {"typestr": "|t4"},
        {"typestr": "|V4", "descr": [5]},
        {"typestr": "|V4", "descr": 5},
        {"typestr": "<i3"},
        {"data": "text"},
        {"data": [1, 2]},
        {"data": (0, True)},
        {"mask": np.zeros(3, bool)},
        {"shape": (-1,)},
        {"shape": (1 << 70,)},
        {"strides": (1 << 70,)},
        {"data": bytes(12), "offset": -1},
    ],
    ids=str,
)
def test_invalid_interface_is_refused(broker: vmmfd.Broker, name: str, changes: dict[str, Any]) -> None:
    numbers = np.arange(3, dtype="i4")
    # Unchanged, it is accepted.
    assert vmmfd.asarray(Interface(numbers), backend="host").dtype == "int32"
    with pytest.raises(vmmfd.Invalid):
        vmmfd.asarray(Interface(numbers, **changes), backend="host")
    with pytest.raises(vmmfd.Invalid):
        broker.put(name, {"x": Interface(numbers, **changes)})


@pytest.mark.parametrize("kind", [ctypes.c_int8, ctypes.c_uint16, ctypes.c_int, ctypes.c_size_t, ctypes.c_float, ctypes.c_double, ctypes.c_bool])
def test_ctypes_arrays(kind: Any) -> None:
    values: Any = ((kind * 3) * 2)((1, 0, 1), (0, 1, 0))
    given = vmmfd.asarray(values, backend="host")
    assert given.shape == (2, 3) and given.dtype == np.dtype(kind) and given.tobytes() == bytes(values)
    vmmfd.asarray(((kind * 3) * 2)(), backend="host").copy_to(values)
    assert not any(bytes(values))


class Fields(ctypes.Structure):
    _fields_ = [("number", ctypes.c_int), ("pointer", ctypes.c_void_p)]


@pytest.mark.parametrize("kind", [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_wchar, ctypes.c_longdouble, ctypes.py_object, Fields])
def test_unsupported_ctypes_are_refused(kind: Any) -> None:
    with pytest.raises(vmmfd.Invalid, match=r"buffer format \"<?(P|z|u|g|O|T\{)"):
        vmmfd.asarray((kind * 2)(), backend="host")
    with pytest.raises(vmmfd.Invalid, match="buffer format"):
        vmmfd.asarray(array("u", "ab"), backend="host")


def test_dtype_is_str_and_equals_numpy() -> None:
    dtype = vmmfd.empty(1, "float32", backend="host").dtype
    assert isinstance(dtype, str) and type(dtype) is vmmfd.DType and dtype == "float32" and {"float32": 1}[dtype] == 1
    assert f"{dtype}" == "float32" and json.dumps(dtype) == '"float32"' and repr(dtype) == "'float32'"
    for same in (np.float32, np.dtype("f4"), np.zeros(1, "f4").dtype, vmmfd.DType("<f4")):
        assert dtype == same and same == dtype and not dtype != same
    others = (np.float64, np.dtype(">f4"), np.dtype([("a", "f4")]), "f4", "float64", None, 4, float, object(), np.generic, str)
    for other in others:
        assert dtype != other and not dtype == other
    assert np.dtype(dtype) == np.float32 and np.zeros(2, dtype).dtype == np.float32
    again = pickle.loads(pickle.dumps(dtype))
    assert type(again) is vmmfd.DType and again == dtype


def test_dtype_from_any_type() -> None:
    assert vmmfd.DType(np.float16) == vmmfd.DType("half") == "float16"
    assert vmmfd.DType(">i2") == ">i2" == np.dtype(">i2")
    assert vmmfd.DType(np.longlong) == "int64" and vmmfd.DType(float) == "float64" == np.dtype(float) and vmmfd.DType(bool) == "bool"
    for none, kind in ((None, TypeError), (4, TypeError), ("int4", vmmfd.Invalid), (np.dtype("O"), vmmfd.Invalid)):
        with pytest.raises(kind, match="dtype="):
            vmmfd.DType(none)


def test_dtype_without_numpy(child: Any) -> None:
    child(
        """
        import sys, vmmfd
        dtype = vmmfd.empty(1, "float32", backend="host").dtype
        assert type(dtype) is vmmfd.DType and dtype == "float32" and dtype != "float64" and dtype != 3 and "numpy" not in sys.modules
        """
    ).end()


@pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) < "2.4.0", reason="NumPy before 2.4 does not look for __numpy_dtype__")
def test_numpy_reads_array_dtype() -> None:
    for given in ("float32", "bool", ">i2", "|V3"):
        made = vmmfd.empty(2, given, backend="host")
        assert np.dtype(made) == np.dtype(given)
    assert np.result_type(made.reinterpret("uint8"), np.int8) == np.int16


def test_numpy_bfloat16_through_ml_dtypes() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    array = vmmfd.asarray(np.arange(6, dtype=ml_dtypes.bfloat16).reshape(2, 3), backend="host")
    view = np.asarray(array.T)
    assert view.dtype == ml_dtypes.bfloat16 and view.ctypes.data == array.address and view.tolist() == [[0, 3], [1, 4], [2, 5]]
    copied = np.array(array)
    copied[:] = 0
    assert np.asarray(array, dtype="f4").sum() == 15


def test_missing_ml_dtypes_has_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(TypeError, match=r"install it, or use reinterpret\(\"uint16\"\)"):
        np.asarray(vmmfd.empty(2, "bfloat16", backend="host"))


def test_jax_accepts_arrays() -> None:
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    if jax.default_backend() != "cpu":
        pytest.skip("JAX has a GPU here, and the arrays are in host memory")
    numbers = np.arange(6, dtype="f4").reshape(2, 3)
    for given in (numbers, numbers.astype(jax.numpy.bfloat16)):
        array = vmmfd.asarray(given, backend="host")
        for taken in (jax.numpy.asarray(array), jax.numpy.array(array), jax.dlpack.from_dlpack(array)):
            assert taken.dtype == given.dtype and array.dtype == taken.dtype and taken.tolist() == given.tolist()
        assert vmmfd.asarray(taken, backend="host").dtype == array.dtype
