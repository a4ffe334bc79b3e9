"""DLPack: the capsules' fields, and exchange with each installed library."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vmmfd


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class Managed(ctypes.Structure):
    pass


Managed._fields_ = [
    ("tensor", Tensor),
    ("context", ctypes.c_void_p),
    ("deleter", ctypes.CFUNCTYPE(None, ctypes.POINTER(Managed))),
]


class Versioned(ctypes.Structure):
    pass


Versioned._fields_ = [
    ("major", ctypes.c_uint32),
    ("minor", ctypes.c_uint32),
    ("context", ctypes.c_void_p),
    ("deleter", ctypes.CFUNCTYPE(None, ctypes.POINTER(Versioned))),
    ("flags", ctypes.c_uint64),
    ("tensor", Tensor),
]

pointer = ctypes.pythonapi.PyCapsule_GetPointer
pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
rename = ctypes.pythonapi.PyCapsule_SetName
rename.restype, rename.argtypes = ctypes.c_int, [ctypes.py_object, ctypes.c_char_p]


def versioned(capsule: Any) -> Any:
    return Versioned.from_address(pointer(capsule, b"dltensor_versioned"))


def plain(capsule: Any) -> Any:
    return Managed.from_address(pointer(capsule, b"dltensor"))


@pytest.fixture
def array() -> vmmfd.Array:
    return vmmfd.asarray(np.arange(12, dtype="f4").reshape(3, 4), backend="host")


@pytest.fixture
def readonly(socket: str) -> Iterator[vmmfd.Array]:
    """A read-only array."""
    with vmmfd.connect(socket, backend="host") as broker:
        broker.put("readonly", {"x": np.arange(12, dtype="f4").reshape(3, 4)}, replace=True)
        with broker.get("readonly") as lease:
            yield lease["x"]


def test_tensor_describes_the_array(array: vmmfd.Array) -> None:
    capsule = array[1:, ::2].__dlpack__(max_version=(1, 0))
    managed = versioned(capsule)
    tensor = managed.tensor
    assert (managed.major, managed.flags) == (1, 0)
    assert (tensor.device_type, tensor.device_id, tensor.ndim) == (1, 0, 2)
    assert (tensor.code, tensor.bits, tensor.lanes) == (2, 32, 1)
    assert (tensor.shape[:2], tensor.strides[:2]) == ([2, 2], [4, 2])
    assert tensor.data + tensor.byte_offset == array.address + 16


def test_strides_are_never_null(array: vmmfd.Array) -> None:
    for of in (array, array[0], array.T, array[:0]):
        for capsule, tensor in (
            (one := of.__dlpack__(max_version=(1, 0)), versioned(one).tensor),
            (other := of.__dlpack__(), plain(other).tensor),
        ):
            assert tensor.ndim == of.ndim and bool(tensor.strides), capsule
            assert tensor.strides[: of.ndim] == [stride // 4 for stride in of.strides]


def test_max_version_selects_the_struct(array: vmmfd.Array) -> None:
    for options in ({}, {"max_version": None}, {"max_version": (0, 8)}):
        assert plain(array.__dlpack__(**options)).tensor.data == array.address  # type: ignore[arg-type]
    for version in ((1, 0), (1, 9), (2, 0)):
        assert versioned(array.__dlpack__(max_version=version)).major == 1


@pytest.mark.parametrize(
    ("name", "code", "bits"),
    [
        ("int8", 0, 8),
        ("uint64", 1, 64),
        ("float16", 2, 16),
        ("bfloat16", 4, 16),
        ("complex64", 5, 64),
        ("complex128", 5, 128),
        ("bool", 6, 8),
        ("float8_e3m4", 7, 8),
        ("float8_e4m3", 8, 8),
        ("float8_e4m3b11fnuz", 9, 8),
        ("float8_e4m3fn", 10, 8),
        ("float8_e4m3fnuz", 11, 8),
        ("float8_e5m2", 12, 8),
        ("float8_e5m2fnuz", 13, 8),
        ("float8_e8m0fnu", 14, 8),
    ],
)
def test_dtype_codes(name: str, code: int, bits: int) -> None:
    array = vmmfd.empty(4, name, backend="host")
    capsule = array.__dlpack__(max_version=(1, 1))
    tensor = versioned(capsule).tensor
    assert (tensor.code, tensor.bits, tensor.lanes) == (code, bits, 1)

    class Foreign:
        def __dlpack__(self, **options: Any) -> Any:
            return array.__dlpack__(**options)

        def __dlpack_device__(self) -> tuple[int, int]:
            return array.__dlpack_device__()

    assert vmmfd.asarray(Foreign(), backend="host").dtype == name


def test_unsupported_layouts_are_buffer_errors(array: vmmfd.Array) -> None:
    for of in (array.reinterpret("|V4"), array.reinterpret(">f4")):
        with pytest.raises(BufferError, match="no code"):
            of.__dlpack__()
    crooked = array.reinterpret("uint8", 48)[1:9].reinterpret("float32")
    with pytest.raises(BufferError, match="aligned"):
        crooked.__dlpack__()


def test_host_refuses_streams(array: vmmfd.Array) -> None:
    for stream in (0, 1, 2, -1, 12345, "x", True):
        with pytest.raises(vmmfd.Unsupported, match="stream="):
            array.__dlpack__(stream=stream)  # type: ignore[arg-type]
    array.__dlpack__(stream=None)


@pytest.mark.fake
def test_gpu_checks_streams() -> None:
    array = vmmfd.empty(4, "float32")
    for stream in (None, -1, 1, 2, 0x7F0000001000):
        array.__dlpack__(stream=stream)
    for stream in (0, -2, True, "1", 1.5):
        with pytest.raises(ValueError, match="stream="):
            array.__dlpack__(stream=stream)  # type: ignore[arg-type]
    assert array.__dlpack_device__() == (2, 0)
    assert versioned(array.__dlpack__(max_version=(1, 0))).tensor.device_type == 2


def test_copy_only_on_request(array: vmmfd.Array) -> None:
    capsule = array.__dlpack__(max_version=(1, 0), copy=False)
    assert versioned(capsule).tensor.data == array.address
    copied = array.T.__dlpack__(max_version=(1, 0), copy=True)
    tensor = versioned(copied)
    assert tensor.flags == 2 and tensor.tensor.data != array.address
    assert tensor.tensor.strides[:2] == [3, 1]
    found = ctypes.string_at(tensor.tensor.data, 48)
    assert found == np.arange(12, dtype="f4").reshape(3, 4).T.tobytes()


def test_other_device_is_refused(array: vmmfd.Array) -> None:
    array.__dlpack__(dl_device=(1, 0))
    for device in ((2, 0), (1, 1), (3, 0)):
        for copy in (None, False, True):
            with pytest.raises(BufferError, match="dl_device"):
                array.__dlpack__(dl_device=device, copy=copy)


def test_read_only_needs_versioned_capsule(readonly: vmmfd.Array) -> None:
    assert readonly.readonly and readonly.is_mapped
    capsule = readonly.__dlpack__(max_version=(1, 0))
    assert versioned(capsule).flags == 1
    for options in ({}, {"max_version": (0, 8)}):
        with pytest.raises(BufferError, match='writable\\(never_written=True\\).*would kill the process'):
            readonly.__dlpack__(**options)  # type: ignore[arg-type]
    assert versioned(readonly.__dlpack__(max_version=(1, 0), copy=True)).flags == 2
    plain(readonly.__dlpack__(copy=True))


def test_writable_needs_promise(readonly: vmmfd.Array) -> None:
    promised = readonly.writable(never_written=True)
    assert promised.readonly and "exported as writable" in repr(promised)
    assert plain(promised.__dlpack__()).tensor.data == readonly.address
    assert versioned(promised[1:].__dlpack__(max_version=(1, 0))).flags == 0
    assert promised.__array_interface__["data"][1] is False and readonly.__array_interface__["data"][1] is True
    assert not memoryview(promised).readonly and memoryview(readonly).readonly
    with pytest.raises(vmmfd.Invalid, match="call writable"):
        readonly.writable()


def test_numpy_shares_the_memory(array: vmmfd.Array, readonly: vmmfd.Array) -> None:
    view = np.from_dlpack(array)
    assert view.flags.writeable
    view[0, 0] = 7
    assert np.asarray(array)[0, 0] == 7
    frozen = np.from_dlpack(readonly)
    assert not frozen.flags.writeable and frozen.ctypes.data == readonly.address
    with pytest.raises(ValueError):
        frozen[0, 0] = 1
    assert np.from_dlpack(array[:0]).shape == (0, 4)
    assert np.from_dlpack(array[1, 2]) == 6


def test_unused_capsule_releases_memory(array: vmmfd.Array) -> None:
    for _ in range(1000):
        array.__dlpack__()
        array.__dlpack__(max_version=(1, 0))
    gc.collect()


def test_deleter_runs_without_the_gil(array: vmmfd.Array) -> None:
    for name, struct, options in (
        (b"dltensor", Managed, {}),
        (b"dltensor_versioned", Versioned, {"max_version": (1, 0)}),
    ):
        capsule = array.__dlpack__(**options)  # type: ignore[arg-type]
        managed: Any = struct.from_address(pointer(capsule, name))
        used = b"used_" + name
        rename(capsule, used)
        del capsule
        # ctypes calls the function with the GIL released.
        delete = managed.deleter
        thread = threading.Thread(target=lambda delete=delete, managed=managed: delete(ctypes.byref(managed)))
        thread.start()
        thread.join()


def test_used_or_invalid_capsule_is_refused(array: vmmfd.Array) -> None:
    taken = array.__dlpack__(max_version=(1, 0))

    class Foreign:
        def __init__(self, capsule: Any) -> None:
            self.capsule = capsule

        def __dlpack__(self, **options: Any) -> Any:
            return self.capsule

        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

    assert vmmfd.asarray(Foreign(taken), backend="host").shape == (3, 4)
    for capsule in (taken, None, "x"):
        with pytest.raises(BufferError, match="not a DLPack capsule"):
            vmmfd.asarray(Foreign(capsule), backend="host")


def test_old_library_is_retried() -> None:
    numbers = np.arange(6.0).reshape(2, 3)
    asked = []

    class Old:
        def __dlpack__(self, stream: None = None) -> Any:
            asked.append(stream)
            return numbers.__dlpack__()

        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

    assert np.array_equal(np.asarray(vmmfd.asarray(Old(), backend="host")), numbers)
    assert asked == [None]


def test_library_error_is_passed_on() -> None:
    class Broken:
        def __dlpack__(self, **options: Any) -> Any:
            raise RuntimeError("not today")

        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

    with pytest.raises(RuntimeError, match="not today"):
        vmmfd.asarray(Broken(), backend="host")


@pytest.mark.fake
def test_reaper_releases_gpu_memory() -> None:
    from vmmfd import _native

    arrays = [vmmfd.asarray(np.arange(1000) + at) for at in range(20)]
    capsules = [array.__dlpack__() for array in arrays]
    addresses = {array.address for array in arrays}
    del arrays
    gc.collect()
    assert _native._settle(10)
    # The capsules still hold the memory.
    for at, capsule in enumerate(capsules):
        assert ctypes.string_at(plain(capsule).tensor.data, 8) == at.to_bytes(8, "little")
    del capsule, capsules
    gc.collect()
    assert _native._settle(10)
    lines = Path("/proc/self/maps").read_text().splitlines()
    names = [line for line in lines if int(line.split("-")[0], 16) in addresses and "rw" in line]
    assert not names


@pytest.mark.fake
def test_device_copies_between_arrays() -> None:
    numbers = np.arange(60, dtype="f4").reshape(3, 4, 5)
    array = vmmfd.asarray(numbers)

    class Foreign:
        def __init__(self, of: vmmfd.Array) -> None:
            self.of = of

        def __dlpack__(self, **options: Any) -> Any:
            assert options["stream"] == 1
            return self.of.__dlpack__(**options)

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.of.__dlpack_device__()

    for view, wanted in ((array, numbers), (array.T, numbers.T), (array[:, 1::2, ::-2], numbers[:, 1::2, ::-2])):
        copy = vmmfd.asarray(Foreign(view))
        assert copy.device == array.device and copy.tobytes() == wanted.tobytes()
        assert vmmfd.asarray(view).tobytes() == wanted.tobytes()
        other = vmmfd.empty(view.shape, view.dtype)
        view.copy_to(Foreign(other))
        assert other.tobytes() == wanted.tobytes()
    with pytest.raises(vmmfd.Invalid, match="on a GPU"):
        vmmfd.asarray(Foreign(array), backend="host")


def test_torch_on_cpu(array: vmmfd.Array) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.from_dlpack(array)
    assert tensor.data_ptr() == array.address
    tensor[0, 0] = 9
    assert np.asarray(array)[0, 0] == 9
    half = vmmfd.asarray(torch.arange(8, dtype=torch.bfloat16), backend="host")
    assert half.dtype == "bfloat16" and torch.equal(torch.from_dlpack(half), torch.arange(8, dtype=torch.bfloat16))
    eight = vmmfd.asarray(torch.ones(4).to(torch.float8_e4m3fn), backend="host")
    assert eight.dtype == "float8_e4m3fn"
    assert vmmfd.empty(1, torch.float16, backend="host").dtype == "float16"


@pytest.mark.cuda
def test_torch_on_gpu() -> None:
    torch = pytest.importorskip("torch")
    array = vmmfd.asarray(torch.arange(12, device="cuda", dtype=torch.float32).reshape(3, 4))
    tensor = torch.from_dlpack(array)
    assert tensor.data_ptr() == array.address and tensor.device.index == array.device.ordinal
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        tensor += 1
        stream.synchronize()
    assert np.array_equal(np.frombuffer(array.tobytes(), "f4"), np.arange(12) + 1)
    assert vmmfd.same_device(array, torch.cuda.get_device_properties(tensor.device).uuid)
    seen = torch.as_tensor(array, device="cuda")
    assert seen.data_ptr() == array.address
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool, torch.complex64):
        source = torch.ones(16, device="cuda").to(dtype)
        copy = vmmfd.asarray(source)
        assert torch.equal(torch.from_dlpack(copy).view(torch.uint8), source.view(torch.uint8)), dtype


@pytest.mark.cuda
def test_cupy() -> None:
    cupy = pytest.importorskip("cupy")
    array = vmmfd.asarray(cupy.arange(12, dtype="f4").reshape(3, 4).T)
    for view in (cupy.from_dlpack(array), cupy.asarray(array)):
        assert view.data.ptr == array.address
        assert cupy.array_equal(view, cupy.arange(12, dtype="f4").reshape(3, 4).T)
    view[0, 0] = 5
    cupy.cuda.Device().synchronize()
    assert np.frombuffer(array.tobytes(), "f4")[0] == 5


@pytest.mark.cuda
def test_jax() -> None:
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("jax has no GPU here")
    source = jax.numpy.arange(12, dtype="float32").reshape(3, 4)
    array = vmmfd.asarray(source)
    assert np.array_equal(np.frombuffer(array.tobytes(), "f4"), np.arange(12))
    view = jax.dlpack.from_dlpack(array)
    assert view.unsafe_buffer_pointer() == array.address
    assert bool((view == source).all())
    assert vmmfd.empty(1, jax.numpy.bfloat16).dtype == "bfloat16"


@pytest.mark.cuda
def test_numba() -> None:
    cuda = pytest.importorskip("numba.cuda")
    array = vmmfd.asarray(np.arange(12, dtype="f4"))
    view = cuda.as_cuda_array(array)
    assert view.copy_to_host().tolist() == list(range(12))
    again = vmmfd.asarray(cuda.to_device(np.arange(5, dtype="i8")))
    assert again.dtype == "int64" and np.frombuffer(again.tobytes(), "i8").tolist() == list(range(5))


def test_drops_and_exports_in_threads(array: vmmfd.Array) -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(100):
                own = vmmfd.asarray(b"x" * 100, backend="host")
                views = [np.from_dlpack(own[1:]), memoryview(own), np.asarray(own), np.from_dlpack(array)]
                del own
                assert views[0][-1] == ord("x") and bytes(views[1][:1]) == b"x"  # type: ignore[index]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
