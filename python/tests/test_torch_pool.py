"""The allocator for PyTorch, and puts of its memory, on the emulated driver, whose memory is ordinary memory: CPU tensors can be in
arenas."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from conftest import Child

import vmmfd
from vmmfd import _native

pytestmark = pytest.mark.fake

MIB = 1 << 20


class Library:
    """The two functions, called as by PyTorch."""

    def __init__(self) -> None:
        library = ctypes.CDLL(_native.__file__)
        self._malloc, self._free = library.vmmfd_torch_malloc, library.vmmfd_torch_free
        self._malloc.restype = ctypes.c_void_p
        self._malloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        self._free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        self._free.restype = None

    def malloc(self, size: int, device: int = 0) -> int | None:
        found: int | None = self._malloc(size, device, None)
        return found

    def free(self, address: int, size: int = 0, device: int = 0) -> None:
        self._free(address, size, device, None)


@pytest.fixture
def library() -> Iterator[Library]:
    _native.torch_pool_open(0, 16 * MIB)
    yield Library()


def figures(device: int = 0) -> list[int]:
    """Returns arenas, closed arenas, their MiB, blocks, and MiB in blocks."""
    found = _native.torch_pool_figures(device)
    return [found["arenas"], found["closed"], found["bytes"] // MIB, found["blocks"], found["used"] // MIB]


def test_blocks_are_found_in_arenas(library: Library) -> None:
    assert figures() == [0, 0, 0, 0, 0]
    one, two = library.malloc(3 * MIB), library.malloc(4 * MIB)
    assert one is not None and two is not None
    assert figures() == [1, 0, 16, 2, 8]
    found = _native.torch_pool_find(two + 5)
    assert found is not None
    memory, offset = found
    assert memory.address + offset == two + 5 and memory.size == 16 * MIB
    assert _native.torch_pool_find(one - 1) is None and _native.torch_pool_find(0) is None
    # A block larger than an arena. An impossible size returns null, with the reason.
    large = library.malloc(40 * MIB)
    assert large is not None
    assert figures() == [2, 0, 56, 3, 48]
    assert library.malloc(1 << 46) is None
    trouble = _native.torch_pool_last_error()
    assert trouble is not None and trouble.startswith(f"{1 << 46} bytes of shared memory: ")
    assert _native.torch_pool_last_error() is None
    assert library.malloc(-1) is None and library.malloc(0) is None
    for block in (one, two, large, large, 12345, 0):
        library.free(block)
    # `found` keeps the memory, which is no longer an arena.
    assert figures() == [0, 0, 0, 0, 0]
    ctypes.memset(one, 7, 16)
    assert memory.address == one


def test_device_without_pool_returns_null(library: Library) -> None:
    assert library.malloc(MIB, 5) is None
    assert _native.torch_pool_last_error() == f"{MIB} bytes of shared memory: no vmmfd.torch.pool() is open for this device in this process"
    with pytest.raises(vmmfd.Error, match="device"):
        _native.torch_pool_open(77, MIB)
    with pytest.raises(vmmfd.Error):
        _native.torch_pool_open(0, 0)


def test_expected_size_is_one_arena(library: Library) -> None:
    _native.torch_pool_open(0, 2 * MIB, 50 * MIB)
    blocks = [library.malloc(size * MIB) for size in (20, 24, 6, 2)]
    assert None not in blocks and figures() == [2, 0, 52, 4, 52]
    for block in blocks:
        library.free(block or 0)
    _native.torch_pool_open(0, 16 * MIB)
    grown = [library.malloc(2 * MIB) for _ in range(64)]
    # Five of 16 MiB, then arenas of 20, 24 and 30.
    assert None not in grown and figures() == [8, 0, 154, 64, 128]
    for block in grown:
        library.free(block or 0)


def test_closed_arena_is_not_used(library: Library) -> None:
    block = library.malloc(2 * MIB)
    assert block is not None and _native.torch_pool_close(block + MIB)
    other = library.malloc(2 * MIB)
    assert other is not None and not block <= other < block + 16 * MIB
    assert figures() == [2, 1, 32, 2, 4]
    library.free(block)
    library.free(other)
    assert not _native.torch_pool_close(block)


def test_fork_allocates_and_frees_nothing(library: Library) -> None:
    block = library.malloc(2 * MIB)
    assert block is not None
    pid = os.fork()
    if pid == 0:
        # Catch everything: pytest must not continue in the child.
        try:
            library.free(block)
            refused = library.malloc(2 * MIB) is None and _native.torch_pool_find(block) is None
            with pytest.raises(vmmfd.Error, match="fork"):
                _native.torch_pool_open(0, MIB)
            os._exit(0 if refused else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert figures() == [1, 0, 16, 1, 2]
    library.free(block)


def test_blocks_alive_at_exit(child: Callable[..., Child]) -> None:
    child(
        """
        import ctypes, threading
        from vmmfd import _native
        _native.torch_pool_open(0, 16 << 20)
        library = ctypes.CDLL(_native.__file__)
        library.vmmfd_torch_malloc.restype = ctypes.c_void_p
        work = lambda: [library.vmmfd_torch_malloc(2 << 20, 0, None) for _ in range(20)]
        threads = [threading.Thread(target=work) for _ in range(4)]
        [thread.start() for thread in threads]
        work()
        """
    ).end()


# Tensors with storages in arenas.


@pytest.fixture
def broker(socket: str) -> Iterator[vmmfd.Broker]:
    with vmmfd.connect(socket, backend="cuda") as broker:
        yield broker


class Blocks:
    """Tensors in blocks, as PyTorch would allocate them in a pool."""

    def __init__(self, library: Library) -> None:
        self.torch = pytest.importorskip("torch", reason="PyTorch is not installed")
        self.library = library
        self.addresses: list[int] = []

    def tensor(self, *shape: int, value: float) -> Any:
        size = 4
        for length in shape:
            size *= length
        address = self.library.malloc(size)
        assert address is not None
        self.addresses.append(address)
        memory = (ctypes.c_char * size).from_address(address)
        return self.torch.frombuffer(memory, dtype=self.torch.float32).view(shape).fill_(value)

    def free(self) -> None:
        for address in self.addresses:
            self.library.free(address)
        self.addresses.clear()


@pytest.fixture
def blocks(library: Library) -> Iterator[Blocks]:
    blocks = Blocks(library)
    yield blocks
    blocks.free()


class Planned:
    """Returns the plan of a put. (The broker recognises the emulated driver's memory and refuses it.)"""

    def __init__(self, broker: vmmfd.Broker, value: Any, **options: Any) -> None:
        # Imported after the check for PyTorch.
        from vmmfd.torch._put import _plan

        parts, additions, self.keep = _plan(broker._native, value, **options)
        assert additions == {} and len(parts) == 1
        _, self.memories, self.entries, digest = parts[0]
        assert digest is None
        self.arrays: dict[str, Any] = {}
        self.attributes: dict[str, dict[str, Any]] = {}
        for name, dtype, shape, strides, memory, offset, attributes in self.entries:
            self.arrays[name] = self.memories[memory].array(dtype, shape, strides, offset)
            self.attributes[name] = json.loads(attributes or "{}")

    @property
    def size(self) -> int:
        return sum(memory.mapped_size for memory in self.memories)

    def seal(self) -> None:
        for memory in self.memories:
            _native.make_read_only(memory)


def same(array: Any, tensor: Any) -> bool:
    return bool(array.tobytes() == tensor.detach().numpy().tobytes())


def test_arena_tensors_are_not_copied(broker: vmmfd.Broker, blocks: Blocks) -> None:
    torch = blocks.torch
    module = torch.nn.Module()
    module.a = torch.nn.Parameter(blocks.tensor(1000, 1000, value=1))
    module.b = torch.nn.Parameter(blocks.tensor(7, value=2))
    module.tied = module.a
    module.view = module.b.detach()[3:5]
    module.c = torch.nn.Parameter(blocks.tensor(5 * MIB, value=3))
    assert figures() == [2, 0, 36, 3, 26]
    planned = Planned(broker, module, copy=False)
    assert figures() == [2, 2, 36, 3, 26]
    arrays = planned.arrays
    assert same(arrays["a"], module.a) and same(arrays["b"], module.b) and same(arrays["c"], module.c)
    assert arrays["a"].address == module.a.data_ptr() and arrays["tied"].address == arrays["a"].address
    assert arrays["view"].address == arrays["b"].address + 12 and arrays["view"].shape == (2,)
    assert planned.attributes["view"] == {
        "kind": "attribute", "persistent": False, "storage": 1, "storage_offset": 12, "storage_bytes": 28
    }  # fmt: skip
    assert planned.attributes["tied"] == planned.attributes["a"]
    # Exactly both arenas.
    assert len(planned.memories) == 2 and planned.size == 36 * MIB
    # New blocks do not reuse its freed blocks.
    before = arrays["a"].tobytes()
    module.a = module.tied = None
    blocks.free()
    for _ in range(20):
        blocks.tensor(1000, 1000, value=8)
    assert arrays["a"].tobytes() == before


def test_other_tensors_are_copied(broker: vmmfd.Broker, blocks: Blocks) -> None:
    torch = blocks.torch
    inside, outside = blocks.tensor(100, value=1), torch.full((300,), 2.0)
    with pytest.raises(vmmfd.ExportError) as raised:
        Planned(broker, {"inside": inside, "outside": outside}, copy=False)
    assert str(raised.value).splitlines()[1:] == ["- outside"]
    assert figures() == [1, 0, 16, 1, 2]
    planned = Planned(broker, {"inside": inside, "outside": outside, "empty": torch.empty(0, 2)})
    assert [len(array.tobytes()) for array in planned.arrays.values()] == [400, 1200, 0]
    assert same(planned.arrays["inside"], inside) and same(planned.arrays["outside"], outside)
    assert planned.size == 18 * MIB
    # Everything is copied: no arena is shared.
    planned = Planned(broker, {"inside": inside, "outside": outside}, copy=True)
    assert same(planned.arrays["inside"], inside)
    inside.fill_(5)
    assert not same(planned.arrays["inside"], inside)
    assert planned.arrays["outside"].address - planned.arrays["inside"].address == 512
    assert planned.size == 2 * MIB


def test_sealed_memory_is_read_only_here(
    broker: vmmfd.Broker, blocks: Blocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = blocks.tensor(100, value=1), blocks.tensor(MIB, value=2)
    segments = [
        {"address": address, "blocks": [{"size": 512, "state": "active_allocated"}, {"size": size - 512, "state": "inactive"}]}
        for address, size in zip(blocks.addresses, (2 * MIB, 4 * MIB), strict=True)
    ]
    monkeypatch.setattr(blocks.torch.cuda, "memory_snapshot", lambda: segments)
    with pytest.raises(vmmfd.Invalid, match="1 other tensors of 512 bytes are in the same arenas"):
        Planned(broker, {"one": one}, seal=True)
    assert figures() == [1, 0, 16, 2, 6]
    planned = Planned(broker, {"one": one, "two": two}, seal=True)
    planned.seal()
    planned.seal()
    assert float(one[5]) == 1.0 and same(planned.arrays["two"], two)
    with pytest.raises(vmmfd.Error, match="read-only"):
        planned.memories[0].array("u1", 1).copy_from(b"x")
