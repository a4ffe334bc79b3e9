"""The pool: PyTorch allocates memory that can be shared."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Literal

from .. import _arguments, _native
from .._errors import Invalid, Unsupported
from ._base import _torch

# The pluggable allocator. PyTorch's memory pools keep a bare pointer to it, so it is never freed.
_allocator: Any = None

# The pools that are entered now, in any thread.
_active: list[Pool] = []
_lock = threading.Lock()


def _pluggable() -> Any:
    global _allocator
    with _lock:
        if _allocator is None:
            torch = _torch()
            if not hasattr(torch.cuda, "MemPool") or not hasattr(torch.cuda, "use_mem_pool"):
                raise Unsupported(
                    f"PyTorch {torch.__version__} has no torch.cuda.MemPool: install 2.6 or newer", kind="unsupported"
                )
            _allocator = torch.cuda.memory.CUDAPluggableAllocator(
                _native.__file__, "vmmfd_torch_malloc", "vmmfd_torch_free"
            )
        return _allocator.allocator()


class Pool:
    """The result of `pool`: a context manager. Only one thread may be inside at a time."""

    def __init__(self, arena: int, device: Any, size: int | None, rdma: Any) -> None:
        self._arena = arena
        self._size = size
        self._rdma = rdma
        self._device = device
        self._ordinal = -1
        self._thread = 0
        self._mempool: Any = None
        self._routing: Any = None
        # Storages that are published while another thread's pool may own their blocks.
        self._held: list[Any] = []

    def __enter__(self) -> Pool:
        if self._routing is not None:
            raise Invalid("this pool is already entered: create one with vmmfd.torch.pool() for each thread and block")
        torch = _torch()
        if not torch.cuda.is_available():
            raise Unsupported("vmmfd.torch.pool() needs a GPU, and torch.cuda.is_available() is false", kind="unsupported")
        device = torch.cuda.current_device() if self._device is None else torch.device(self._device)
        if not isinstance(device, int):
            if device.type != "cuda":
                raise Invalid(f"device={str(device)!r} is not a CUDA device: a pool allocates GPU memory")
            device = torch.cuda.current_device() if device.index is None else int(device.index)
        # PyTorch's context first, so that PyTorch reports its errors.
        torch.cuda.init()
        self._ordinal = device
        self._thread = threading.get_ident()
        with _lock:
            # PyTorch does not say for which pool it allocates.
            other = next((pool._rdma for pool in _active if pool._ordinal == device and pool._rdma != self._rdma), None)
            if other is not None:
                raise Invalid(f"rdma={self._rdma!r}, but a pool with rdma={other!r} is entered on device {device}: leave it first")
            _active.append(self)
        try:
            _native.torch_pool_open(device, self._arena, self._size, self._rdma)
            self._begin()
        except BaseException:
            with _lock:
                _active.remove(self)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with _lock:
            _active.remove(self)
        self._end()
        self._held.clear()
        if error is not None and isinstance(error, _torch().OutOfMemoryError):
            problem = _native.torch_pool_last_error()
            if problem:
                error.add_note(f"vmmfd.torch.pool(): {problem}")

    def _begin(self) -> None:
        torch = _torch()
        # PyTorch counts the pool's uses on the device that is current when it is created, and `_end` on this one.
        with torch.cuda.device(self._ordinal):
            mempool = torch.cuda.MemPool(_pluggable())
        # PyTorch 2.11 aborts the process if a pool is destroyed while another is in use in any thread, or while a graph is captured. So
        # pools are never destroyed: this object is a few bytes, and `_end` frees its memory.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(mempool))
        routing = torch.cuda.use_mem_pool(mempool, self._ordinal)
        routing.__enter__()
        self._mempool, self._routing = mempool, routing

    def _end(self) -> None:
        routing, self._routing = self._routing, None
        mempool, self._mempool = self._mempool, None
        routing.__exit__(None, None, None)
        # Does the destructor's work: the pool allocates no more, and `empty_cache` frees its unused blocks.
        _torch()._C._cuda_releasePool(self._ordinal, mempool.id)

    @property
    def figures(self) -> dict[str, int]:
        """The current figures of this process's pools on the device: `arenas`, with one descriptor each; `closed`, the arenas that are
        published; `bytes` of all arenas; `blocks` that PyTorch has in them; and the `used` bytes of those blocks."""
        return _native.torch_pool_figures(self._ordinal) if self._ordinal >= 0 else dict.fromkeys(
            ("arenas", "closed", "bytes", "blocks", "used"), 0
        )


def pool(arena: int = 256 << 20, device: Any = None, *, size: int | None = None, rdma: bool | Literal["auto"] = "auto") -> Pool:
    """A context manager: this thread's PyTorch allocations on a GPU use memory that other processes can map.

        with vmmfd.torch.pool():
            model = load()
        broker.put("model", model)          # Without a copy.

    PyTorch's blocks are cut from arenas. Each arena is one driver allocation and one descriptor, and is freed when empty. `arena` is the
    smallest arena size in bytes. Arenas grow: each is a quarter of the total so far, up to 1 GiB, if that is more than `arena`. `size` is
    the expected total of all allocations in bytes: arenas of at most 1 GiB then add up to exactly `size`, and later arenas have `arena`
    bytes. `device` is a `torch.device`, its name or its ordinal; by default PyTorch's current device. `rdma` is as
    for `vmmfd.empty`; the pools that are entered on a device must agree on it. Needs PyTorch 2.6 or newer.

    Readers map whole arenas, including any other data beside the published tensors. Publishing closes arenas: nothing is allocated in them
    again, so published data is never overwritten, even if tensors are deleted. `torch.cuda.empty_cache()` frees the memory of deleted
    tensors, as usual in PyTorch.

    Threads started inside allocate as usual: enter a pool in each. Blocks while the driver starts, if needed.

    Raises `vmmfd.Unsupported` (a `NotImplementedError`) without a GPU, with an older PyTorch, or if `rdma=True` and the device lacks
    support; `vmmfd.Invalid` (a `ValueError`) for an invalid size or device, and if the entered pools differ in `rdma`; `vmmfd.Error` in a
    fork of a process that opened the driver.
    """
    for name, value in (("arena", arena), ("size", 1 if size is None else size)):
        if not 0 < _arguments.needed(_arguments.whole(value, name), name) < 1 << 47:
            raise Invalid(f"{name}={value!r} is not a memory size: give a number of bytes, such as 256 << 20")
    return Pool(arena, device, size, _arguments.rdma(rdma))


def _close(addresses: Iterable[int], storages: Iterable[Any]) -> None:
    """Stops allocation in published arenas.

    The arenas are closed. This thread's pools continue in new PyTorch pools, because the old ones could reuse free blocks. Other threads'
    pools cannot be changed from here: the storages are held until those threads leave them.
    """
    for address in addresses:
        _native.torch_pool_close(address)
    kept = list(storages)
    mine = []
    with _lock:
        for pool in _active:
            if pool._thread == threading.get_ident():
                mine.append(pool)
            else:
                # Released when the thread leaves its pool.
                pool._held.extend(kept)
    for pool in mine:
        pool._end()
        pool._begin()
