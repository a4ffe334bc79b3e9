"""Arrays: creation, indexing, reinterpretation, copies, lifetime, and refusals."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vmmfd


def filled(shape: tuple[int, ...] = (3, 4), dtype: str = "float32") -> tuple[vmmfd.Array, Any]:
    numbers = np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
    return vmmfd.asarray(numbers, backend="host"), numbers


def test_attributes_and_repr() -> None:
    array = vmmfd.empty((2, 3, 4), "float32", backend="host")
    assert (array.shape, array.dtype, array.strides) == ((2, 3, 4), "float32", (48, 16, 4))
    assert (array.itemsize, array.ndim, array.size, array.nbytes, len(array)) == (4, 3, 24, 96, 2)
    assert not array.readonly and not array.is_mapped
    assert array.device == vmmfd.devices(backend="host")[0] and array.device.backend == "host"
    assert array.address % 256 == 0
    assert repr(array).startswith("<vmmfd.Array float32 (2, 3, 4) on host memory")
    with pytest.raises(TypeError, match="no length"):
        len(vmmfd.empty((), "float32", backend="host"))


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("float32", "float32"),
        ("f4", "float32"),
        ("<f4", "float32"),
        ("=f4", "float32"),
        (">i2", ">i2"),
        ("bf16", "bfloat16"),
        ("float8_e4m3fn", "float8_e4m3fn"),
        ("half", "float16"),
        ("|V16", "|V16"),
        (np.float16, "float16"),
        (np.dtype("int64"), "int64"),
        (np.dtype(">f8"), ">f8"),
        (np.dtype("bool"), "bool"),
        (bool, "bool"),
    ],
)
def test_dtype_names(given: object, name: str) -> None:
    assert vmmfd.empty(1, given, backend="host").dtype == name


@pytest.mark.parametrize("given", ["i8", "u8", "float", "int", int, "str", np.dtype("U3"), np.dtype("M8[s]"), 4])
def test_ambiguous_and_unknown_dtypes_are_refused(given: object) -> None:
    with pytest.raises(TypeError if given == 4 else vmmfd.Invalid, match="dtype="):
        vmmfd.empty(1, given, backend="host")


@pytest.mark.parametrize("shape", [-1, (2, -1), "3", 2.5, (2**33, 2**33), [1] * 65])
def test_invalid_shape_is_refused(shape: Any) -> None:
    with pytest.raises(TypeError if shape in ("3", 2.5) else vmmfd.Invalid):
        vmmfd.empty(shape, "float64", backend="host")


@pytest.mark.parametrize(
    "index",
    [
        0,
        -1,
        slice(None),
        slice(None, None, -1),
        slice(10, 2),
        slice(-1, -4, -2),
        (1, 2),
        (slice(1, 3), slice(None, None, 3)),
        ...,
        (..., 1),
        (1, ...),
        (-1, ..., slice(3, 0, -1)),
        (),
        (1, 2, 0),
        np.int64(1),
    ],
)
def test_index_matches_numpy(index: Any) -> None:
    array, numbers = filled((4, 5, 2))
    part, wanted = array[index], np.asarray(numbers[index])
    assert part.shape == wanted.shape
    assert np.array_equal(np.asarray(part), wanted)
    assert part.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("index", [4, -5, (0, 5), (0, 0, 0, 0), (..., ...)])
def test_index_out_of_range(index: Any) -> None:
    with pytest.raises(IndexError):
        filled((4, 5, 2))[0][index]


@pytest.mark.parametrize("index", [None, True, 1.0, "x", [0, 1], (None, 0), np.array([True] * 4)])
def test_unsupported_index_is_type_error(index: Any) -> None:
    with pytest.raises(TypeError, match="is not a supported index"):
        filled((4, 5, 2))[0][index]


def test_iteration() -> None:
    array, numbers = filled()
    rows: list[Any] = [np.asarray(row) for row in array]
    assert np.array_equal(rows, numbers) and isinstance(array, Iterable)
    with pytest.raises(TypeError, match="without dimensions"):
        iter(array[0, 0])


def test_reinterpret() -> None:
    array, numbers = filled((3, 4), "float32")
    assert np.array_equal(np.asarray(array.reinterpret("uint8")), numbers.view("u1"))
    assert np.array_equal(np.asarray(array.reinterpret("int32")), numbers.view("i4"))
    assert array.reinterpret("float64").shape == (3, 2)
    assert array.reinterpret("uint8", 48).shape == (48,)
    assert array.reinterpret("bfloat16", (6, 4)).dtype == "bfloat16"
    assert array[1:].reinterpret("uint8", 32).tobytes() == numbers[1:].tobytes()
    # Gaps between elements matter only if the element size changes.
    assert np.array_equal(np.asarray(array[:, ::2].reinterpret("uint32")), numbers.view("u4")[:, ::2])
    for refused in (
        lambda: array.reinterpret("complex128", 5),
        lambda: array[:, ::2].reinterpret("uint8"),
        lambda: array[:, :3].reinterpret("float64"),
        lambda: array[0, 0].reinterpret("uint8"),
        lambda: array[:, :3].reinterpret("float32", 9),
    ):
        with pytest.raises(vmmfd.Invalid):
            refused()


def test_transpose() -> None:
    array, numbers = filled((2, 3, 4))
    assert np.array_equal(np.asarray(array.T), numbers.T)
    assert np.array_equal(np.asarray(array.transpose(1, 0, 2)), numbers.transpose(1, 0, 2))
    assert np.array_equal(np.asarray(array.transpose((0, -1, 1))), numbers.transpose(0, 2, 1))
    for axes in [(0, 1), (0, 0, 1), (0, 1, 3), (-4, 0, 1)]:
        with pytest.raises(vmmfd.Invalid, match="each of"):
            array.transpose(*axes)


def test_strided_copies_in_both_directions() -> None:
    numbers = np.arange(60, dtype="i4").reshape(3, 4, 5)
    for source in (numbers, numbers.T, numbers[:, ::-1, ::2], numbers[..., 0], numbers[:0], np.broadcast_to(numbers[0], (7, 4, 5))):
        array = vmmfd.asarray(source, backend="host")
        assert np.array_equal(np.asarray(array), source)
        backwards = np.empty_like(source[..., ::-1])
        array.copy_to(backwards[..., ::-1])
        assert np.array_equal(backwards[..., ::-1], source)
    array = vmmfd.empty((4, 3), "int32", backend="host")
    array.T.copy_from(numbers[:, :, 0])
    assert np.array_equal(np.asarray(array), numbers[:, :, 0].T)
    array[::2].copy_from(array[1::2])
    assert np.array_equal(np.asarray(array[0]), np.asarray(array[1]))


def test_large_strided_copy() -> None:
    numbers = np.arange(3 << 20, dtype="u2").reshape(3, 1 << 20)
    assert np.array_equal(np.asarray(vmmfd.asarray(numbers.T, backend="host")), numbers.T)


@pytest.mark.parametrize(
    "source",
    [
        b"hello",
        bytearray(b"hello"),
        memoryview(b"hello")[::2],
        np.zeros((2, 0, 3)),
        np.array(3 + 4j),
        np.arange(4, dtype=">u4"),
    ],
    ids=["bytes", "bytearray", "memoryview", "empty", "complex", "big-endian"],
)
def test_asarray_copies_buffers(source: Any) -> None:
    array = vmmfd.asarray(source, backend="host")
    assert array.shape == np.asarray(memoryview(source)).shape
    assert array.tobytes() == np.asarray(source).tobytes()


def test_asarray_refuses_other_objects() -> None:
    for source in ([1, 2], 3, None, "text"):
        with pytest.raises(TypeError, match="is not an array"):
            vmmfd.asarray(source, backend="host")
    for source in (np.array(["a"]), np.array([object()]), np.ma.masked_array([1], [True])):
        with pytest.raises(vmmfd.Invalid):
            vmmfd.asarray(source, backend="host")


def test_copy_needs_same_type_and_shape() -> None:
    array, numbers = filled()
    for other in (numbers.astype("f8"), numbers[:2], numbers.ravel(), numbers.astype(">f4")):
        with pytest.raises(vmmfd.Invalid, match="the other array is"):
            array.copy_from(other)
        with pytest.raises(vmmfd.Invalid, match="the other array is"):
            array.copy_to(other)
    frozen = numbers.copy()
    frozen.flags.writeable = False
    with pytest.raises(vmmfd.Invalid, match="is read-only"):
        array.copy_to(frozen)


def test_last_view_frees_memory() -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("vmmfd")

    gc.collect()
    before = mapped()
    array, numbers = filled((1 << 20,))
    assert mapped() > before
    view = array[::2]
    del array
    tensor = np.from_dlpack(view)
    del view
    gc.collect()
    assert np.array_equal(tensor, numbers[::2])
    del tensor
    gc.collect()
    assert mapped() == before


ON = ["host", pytest.param("cuda", marks=pytest.mark.fake, id="fake"), pytest.param("cuda", marks=pytest.mark.cuda, id="cuda")]


@pytest.mark.parametrize("on", ON)
def test_zeros_are_zeros(on: str) -> None:
    for shape, dtype in ((9_000_001, "uint8"), ((2, 3), "float32"), ((), "int64"), ((0, 3), "bool")):
        array = vmmfd.zeros(shape, dtype, backend=on)
        assert array.tobytes() == bytes(array.nbytes) and array.dtype == dtype and not array.readonly
    assert vmmfd.zeros(3, backend=on).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("on", ON)
@pytest.mark.parametrize("dtype", ["u1", "i4", "f2", "f8", "c8", "?", ">i2"])
def test_assignment_matches_numpy(on: str, dtype: str) -> None:
    numbers = np.zeros((4, 5), dtype)
    array = vmmfd.asarray(numbers, backend=on)
    values: list[tuple[Any, Any]] = [
        (..., 3),
        ((slice(None), 1), True),
        ((slice(None, None, -2), slice(1, None, 3)), 7.9),
        (0, [1, 0, 1, 1, 0]),
        (slice(1, 3), np.arange(5, dtype="f4")),
        ((3, 4), vmmfd.asarray(np.array(1, "i8"), backend="host")),
    ]
    for index, value in values:
        array[index] = value
        numbers[index] = value.item() if isinstance(value, vmmfd.Array) else value
        assert array.tobytes() == numbers.tobytes(), index
    array[0] = array[1]
    numbers[0] = numbers[1]
    assert array.tobytes() == numbers.tobytes()
    array.fill(5)
    assert array.tobytes() == np.full_like(numbers, 5).tobytes()


def test_copy_module_names_the_method() -> None:
    with pytest.raises(TypeError, match=r"call copy\(\) of the array"):
        copy.copy(vmmfd.zeros(3, backend="host"))


@pytest.mark.parametrize("on", ON)
def test_wrong_assignment_is_refused(on: str) -> None:
    array = vmmfd.zeros((2, 3), backend=on)
    for index, value, kind in (((0, 3), 1, IndexError), (0, [1, 2], ValueError), (0, "x", ValueError), (0, object(), TypeError)):
        with pytest.raises(kind):
            array[index] = value
    if int(np.__version__.split(".")[0]) >= 2:
        with pytest.raises(OverflowError):
            vmmfd.zeros(3, "uint8", backend=on).fill(300)


def test_read_only_memory_is_not_filled(broker: vmmfd.Broker, name: str) -> None:
    broker.put(name, {"x": np.ones(3)})
    with broker.get(name) as lease:
        for array in (lease["x"], lease["x"].writable(never_written=True)):
            with pytest.raises(vmmfd.Invalid, match="read-only"):
                array.fill(2)
            with pytest.raises(vmmfd.Invalid, match="read-only"):
                array.copy_from(np.zeros(3))
            with pytest.raises(vmmfd.Invalid, match="read-only"):
                array[0] = 2
    with broker.get(name, copy_on_write=True) as lease:
        lease["x"][:2] = 5
        assert lease["x"].tolist() == [5, 5, 1]


def test_array_is_not_pickled() -> None:
    with pytest.raises(TypeError, match="can't be pickled"):
        pickle.dumps(filled()[0])


def test_cycle_is_collected() -> None:
    class Holder:
        pass

    holder: Any = Holder()
    holder.array, holder.self = filled()[0], holder
    holder.tensor = np.from_dlpack(holder.array)
    del holder
    gc.collect()


def test_use_in_fork_is_refused(child: Any) -> None:
    child(
        """
        import os, vmmfd, numpy as np
        array = vmmfd.asarray(np.arange(3), backend="host")
        view = np.from_dlpack(array)
        pid = os.fork()
        if pid == 0:
            refused = 0
            for call in (array.__dlpack__, lambda: memoryview(array), array.tobytes, lambda: array.address, lambda: array[1:].tobytes()):
                try:
                    call()
                except vmmfd.Invalid as error:
                    assert f"process {os.getpid()} is a fork of process {os.getppid()}, whose memory" in str(error), error
                    refused += 1
            assert view.sum() == 3
            # The parent's memory is not released here, but memory created here is.
            del view, array
            mine = vmmfd.asarray(np.arange(4), backend="host")
            assert np.asarray(mine).sum() == 6
            os._exit(0 if refused == 5 else 1)
        assert os.waitpid(pid, 0)[1] == 0
        assert view.sum() == 3 and array.tobytes() == view.tobytes()
        """
    ).end()


def test_objects_alive_at_exit(child: Any) -> None:
    child(
        """
        import sys, threading, vmmfd, numpy as np
        array = vmmfd.asarray(np.arange(1000.0), backend="host")
        sys.kept = [array, np.from_dlpack(array), memoryview(array), array.__dlpack__(), array.__dlpack__(max_version=(1, 0))]
        sys.kept.append(sys.kept)
        class Late:
            def __init__(self): self.array = vmmfd.asarray(np.arange(3), backend="host")
            def __del__(self): self.array.tobytes()
        late = Late()
        threading.Thread(target=lambda kept: kept.clear(), args=([np.from_dlpack(array)],), daemon=True).start()
        """
    ).end()


def test_import_loads_no_driver(child: Any) -> None:
    child(
        """
        import sys
        before = set(sys.modules)
        import vmmfd
        heavy = {"numpy", "torch", "dataclasses", "inspect", "asyncio", "datetime"} & (set(sys.modules) - before)
        assert not heavy, heavy
        with open("/proc/self/maps") as maps:
            assert "libcuda" not in maps.read()
        """
    ).end()


def test_stubs_match_the_module() -> None:
    """The native module and its stubs have the same names."""
    import ast

    tree = ast.parse((Path(vmmfd.__file__).parent / "_native.pyi").read_text())
    typed: dict[str, set[str]] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            typed[node.name] = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
        elif isinstance(node, ast.FunctionDef):
            typed[node.name] = set()
    native = sys.modules["vmmfd._native"]
    there = {name for name in dir(native) if not name.startswith("__")}
    assert there == set(typed), there ^ set(typed)
    implied = {"__new__", "__delitem__", "__doc__", "__module__", "__weakref__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__buffer__", "__release_buffer__"}
    implied |= {"__repr__", "__str__", "__eq__", "__hash__", "__enter__", "__exit__", "__reduce__", "__iter__", "__next__", "__annotations__"}
    for name, methods in typed.items():
        kind = getattr(native, name)
        if isinstance(kind, type):
            own = set(vars(kind)) - implied
            assert own == methods - implied, (name, own ^ (methods - implied))


def test_reshape_is_a_view() -> None:
    numbers = np.arange(24, dtype="i4").reshape(4, 6)
    array = vmmfd.asarray(numbers, backend="host")
    for shape in ((24,), (-1,), (2, -1), (2, 3, 4), (1, 24, 1)):
        seen = array.reshape(*shape)
        assert np.array_equal(seen.numpy(), numbers.reshape(shape)) and seen.address == array.address
        assert array.reshape(shape).shape == seen.shape
    assert array[2:].reshape(-1).tolist() == numbers[2:].ravel().tolist()
    assert array[:0].reshape(0, 5).shape == (0, 5)
    for wrong in ((5, -1), (23,), (-1, -1), (-2, -12), (0, -1)):
        with pytest.raises(vmmfd.Invalid, match="can't be reshaped"):
            array.reshape(wrong)
    with pytest.raises(vmmfd.Invalid, match="overflows 64 bits"):
        array.reshape(1 << 62, 8)
    for many in (1 << 63, 10**5000):
        with pytest.raises(vmmfd.Invalid, match="has an integer of more than 64 bits"):
            array.reshape(many)
        with pytest.raises(vmmfd.Invalid, match="has an integer of more than 64 bits"):
            array.transpose(0, many)
    with pytest.raises(vmmfd.Invalid, match="copy"):
        array.T.reshape(24)
    with pytest.raises(TypeError):
        array.reshape(1.5)  # type: ignore[arg-type]
    for other in (True, (24, True), [True], b"3"):
        with pytest.raises(TypeError, match="is neither a shape nor axes"):
            array.reshape(other)  # type: ignore[arg-type]


def test_empty_has_numpys_default_type() -> None:
    assert vmmfd.empty(3, backend="host").dtype == np.empty(3).dtype
    like = vmmfd.empty_like(np.zeros((2, 3), ">i2").T, backend="host")
    assert (like.shape, like.dtype, like.readonly) == ((3, 2), ">i2", False) and like.strides == (4, 2)
    with pytest.raises(TypeError, match="is not an array"):
        vmmfd.empty_like(5, backend="host")


def test_repr_has_short_uuid() -> None:
    array = vmmfd.empty(3, backend="host")
    uuid = array.device.uuid.partition("-")[2]
    for shown in (repr(array), repr(array.device)):
        assert uuid[:8] in shown and uuid[:13] not in shown
    assert uuid in str(array.device)
