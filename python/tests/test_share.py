"""Memory that other code allocated, shared by its address."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import vmmfd
import vmmfd.legacy
from conftest import Child

driver = pytest.mark.parametrize("driver", [pytest.param("fake", marks=pytest.mark.fake), pytest.param("cuda", marks=pytest.mark.cuda)])

UNIT = 2 << 20


class Place(ctypes.Structure):
    """`CUmemLocation` of a device."""

    _fields_ = [("kind", ctypes.c_int), ("id", ctypes.c_int)]


class Properties(ctypes.Structure):
    """`CUmemAllocationProp`."""

    _fields_ = [
        ("kind", ctypes.c_int), ("handle_types", ctypes.c_int), ("place", Place), ("win32", ctypes.c_void_p), ("flags", ctypes.c_ubyte * 8)
    ]  # fmt: skip


class Access(ctypes.Structure):
    """`CUmemAccessDesc`."""

    _fields_ = [("place", Place), ("flags", ctypes.c_int)]


class Allocator:
    """Another library: it allocates by `cuMemCreate`, maps side by side, and hands out arrays at any offset."""

    def __init__(self, allocations: int = 2, handle_types: int = 1) -> None:
        vmmfd.empty(1, backend="cuda")  # Initializes the driver and its context.
        self._cu = ctypes.CDLL("libcuda.so.1")
        self.size = UNIT * allocations
        address = ctypes.c_uint64()
        self._call("cuMemAddressReserve", ctypes.byref(address), ctypes.c_size_t(self.size), ctypes.c_size_t(0), *[ctypes.c_uint64(0)] * 2)
        self.address = address.value
        self._handles = [self._map(at, handle_types) for at in range(self.address, self.address + self.size, UNIT)]
        access = Access(Place(1, 0), 3)
        self._call("cuMemSetAccess", address, ctypes.c_size_t(self.size), ctypes.byref(access), ctypes.c_size_t(1))

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._cu, name)(*arguments)
        assert code == 0, f"{name} failed: {code}"

    def _map(self, at: int, handle_types: int) -> ctypes.c_uint64:
        handle, size = ctypes.c_uint64(), ctypes.c_size_t(UNIT)
        self._call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(Properties(1, handle_types, Place(1, 0))), ctypes.c_uint64(0))
        self._call("cuMemMap", ctypes.c_uint64(at), size, ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
        return handle

    def array(self, offset: int, *shape: int) -> Tensor:
        return Tensor(self.address + offset, shape)

    def free(self) -> None:
        self._call("cuMemUnmap", ctypes.c_uint64(self.address), ctypes.c_size_t(self.size))
        for handle in self._handles:
            self._call("cuMemRelease", handle)
        self._call("cuMemAddressFree", ctypes.c_uint64(self.address), ctypes.c_size_t(self.size))


class Tensor:
    """Bytes of another library, with the CUDA array interface."""

    def __init__(self, address: int, shape: tuple[int, ...]) -> None:
        self.__cuda_array_interface__ = {"shape": shape, "typestr": "|u1", "data": (address, False), "version": 3}


@driver
def test_share_makes_no_copy(socket: str, name: str, driver: str) -> None:
    theirs = Allocator()
    # It crosses the border of the allocations.
    tensors = {"a": theirs.array(UNIT - 8, 4, 4), "b": theirs.array(UNIT + 100, 10)}
    shared = vmmfd.share(tensors, neighbours=True)
    assert [array.shape for array in shared.values()] == [(4, 4), (10,)]
    assert all(array.readonly and array.device.backend == "cuda" for array in shared.values())
    with vmmfd.connect(socket, backend="cuda") as broker:
        assert broker.put(name, shared).copied == 0
        (part,) = broker.stat(name).parts
        assert part.mapped_size == 2 * UNIT
        writer = vmmfd.share(theirs.array(UNIT - 8, 16), neighbours=True)
        with broker.get(name) as lease:
            before = lease["a"].tobytes()
            assert before == writer.tobytes()
            # The owner's end changes nothing for the others.
            del shared, writer, tensors
            theirs.free()
            assert lease["a"].tobytes() == before
        copied = broker.put(f"{name}/copy", {"c": np.ones(100, "u1")})
        assert copied.copied >= 100


@driver
def test_neighbours_need_a_word(driver: str) -> None:
    theirs = Allocator(1)
    assert vmmfd.share(theirs.array(0, UNIT)).nbytes == UNIT
    with pytest.raises(vmmfd.Invalid, match=r"sharing these 16 bytes would expose 1\.9 MiB \(2097136 bytes\) of other data"):
        vmmfd.share(theirs.array(0, 16))
    gaps = theirs.array(0, 2)
    gaps.__cuda_array_interface__["strides"] = (UNIT - 1,)
    with pytest.raises(vmmfd.Invalid, match="sharing these 2 bytes would expose"):
        vmmfd.share(gaps)
    assert vmmfd.share({"none": theirs.array(0, 0, 4), "all": theirs.array(0, UNIT)})["none"].shape == (0, 4)
    theirs.free()


@driver
def test_unshareable_memory_is_named(socket: str, name: str, driver: str) -> None:
    hidden = Allocator(1, handle_types=0)
    with pytest.raises(vmmfd.Unsupported, match="without CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR") as refused:
        vmmfd.share(hidden.array(0, UNIT))
    assert "expandable_segments" in str(refused.value.hint)
    hidden.free()
    with pytest.raises(vmmfd.Unsupported, match="it is not mapped GPU memory"):
        vmmfd.share({"x": hidden.array(0, 5)})
    legacy = vmmfd.legacy.empty(8, "u1")
    with pytest.raises(vmmfd.Unsupported, match="its allocator does not use cuMemCreate"):
        vmmfd.share(Tensor(legacy.address, (8,)))
    theirs = Allocator(1)
    shared = vmmfd.share(theirs.array(0, UNIT))
    with vmmfd.connect(socket, backend="cuda") as broker, pytest.raises(vmmfd.ExportError, match="seal=True needs a copy"):
        broker.put(name, {"x": shared}, seal=True)
    theirs.free()


@driver
def test_shared_array_keeps_its_source(driver: str) -> None:
    theirs = Allocator(1)
    source = theirs.array(0, UNIT)
    kept = weakref.ref(source)
    shared = vmmfd.share(source)
    del source
    assert kept() is not None
    del shared
    assert kept() is None
    theirs.free()


def test_ordinary_memory_is_refused() -> None:
    with pytest.raises(vmmfd.Unsupported, match="ordinary memory has no descriptor"):
        vmmfd.share(np.zeros(10))
    with pytest.raises(TypeError, match="is not an array"):
        vmmfd.share(object())
    ours = vmmfd.empty(3, "u1", backend="host")
    assert vmmfd.share(ours).address == ours.address
    assert vmmfd.share({}) == {}


READER = """
    import sys
    import torch, vmmfd

    with vmmfd.connect(sys.argv[1], backend="cuda").get(sys.argv[2]) as lease:
        for name in lease:
            tensor = torch.from_dlpack(lease[name])
            print(name, tuple(tensor.shape), int(tensor.to(torch.int64).sum()), flush=True)
            del tensor
"""


@pytest.mark.cuda
@pytest.mark.parametrize("library", ["torch", "jax"])
def test_tensors_of_libraries(child: Callable[..., Child], socket: str, name: str, library: str) -> None:
    """A tensor of several allocations, a small one and a strided one, changed after the put."""
    pytest.importorskip(library)
    made = {
        "torch": """
            import torch
            big = torch.full((100 << 20,), 7, dtype=torch.uint8, device="cuda")
            small = torch.arange(1000, dtype=torch.float32, device="cuda").reshape(10, 100).T
            def change(): big[:5].fill_(9); torch.cuda.synchronize()
        """,
        "jax": """
            import jax.numpy as jnp
            big = jnp.full((100 << 20,), 7, dtype=jnp.uint8)
            small = jnp.arange(1000, dtype=jnp.float32).reshape(100, 10)
            big.block_until_ready(), small.block_until_ready()
            def change(): pass
        """,
    }[library]
    publish = """
            import sys, vmmfd
            shared = vmmfd.share({"big": big, "small": small}, neighbours=True)
            assert vmmfd.connect(sys.argv[1], backend="cuda").put(sys.argv[2], shared).copied == 0
            print("ready", flush=True)
            sys.stdin.readline()
            change()
            print("changed", flush=True)
            sys.stdin.readline()
        """
    options = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    maker = child(made + publish, socket, name, env=options)
    maker.wait_for("ready")

    def read() -> list[str]:
        return child(READER, socket, name).end().splitlines()

    total = 7 * (100 << 20)
    assert read() == [f"big ({100 << 20},) {total}", f"small (100, 10) {sum(range(1000))}"]
    maker.send_line()
    maker.wait_for("changed")
    if library == "torch":
        assert read()[0] == f"big ({100 << 20},) {total + 10}"
    maker.send_line()
    maker.end(None)
