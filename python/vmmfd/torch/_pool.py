"""The pool: PyTorch allocates in memory that can be shared."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from .. import _native
from .._errors import Invalid, Unsupported
from ._base import _torch

# The pluggable allocator. PyTorch's memory pools keep a bare pointer to it, so it is never let go of.
_allocator: Any = None

# What allocates in shared memory now, in any thread.
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
    """What `pool` returns: a context manager, to be entered once at a time, by one thread."""

    def __init__(self, arena: int, device: Any, size: int | None) -> None:
        self._arena = arena
        self._size = size
        self._device = device
        self._ordinal = -1
        self._thread = 0
        self._mempool: Any = None
        self._routing: Any = None
        # Storages that are published while another thread's pool may have their blocks.
        self._held: list[Any] = []

    def __enter__(self) -> Pool:
        if self._routing is not None:
            raise Invalid("this pool is entered already: make another with vmmfd.torch.pool() for each thread and block")
        torch = _torch()
        if not torch.cuda.is_available():
            raise Unsupported("vmmfd.torch.pool() needs a GPU, and torch.cuda.is_available() is false", kind="unsupported")
        device = torch.cuda.current_device() if self._device is None else torch.device(self._device)
        if not isinstance(device, int):
            if device.type != "cuda":
                raise Invalid(f"device={str(device)!r} is no CUDA device: a pool is of memory of a GPU")
            device = torch.cuda.current_device() if device.index is None else int(device.index)
        # PyTorch's context first: an error there is PyTorch's to say.
        torch.cuda.init()
        _native.torch_pool_open(device, self._arena, self._size)
        self._ordinal = device
        self._thread = threading.get_ident()
        self._begin()
        with _lock:
            _active.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with _lock:
            _active.remove(self)
        self._end()
        self._held.clear()
        if error is not None and isinstance(error, _torch().OutOfMemoryError):
            trouble = _native.torch_pool_trouble()
            if trouble:
                error.add_note(f"vmmfd.torch.pool(): {trouble}")

    def _begin(self) -> None:
        torch = _torch()
        mempool = torch.cuda.MemPool(_pluggable())
        # PyTorch 2.11 ends the process when a pool is destroyed while another is in use, in any thread, or a graph is captured. So none is
        # ever destroyed: this object is a few bytes, and `_end` gives its memory back.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(mempool))
        routing = torch.cuda.use_mem_pool(mempool, self._ordinal)
        routing.__enter__()
        self._mempool, self._routing = mempool, routing

    def _end(self) -> None:
        routing, self._routing = self._routing, None
        mempool, self._mempool = self._mempool, None
        routing.__exit__(None, None, None)
        # What the destructor would do: nothing allocates in it any more, and `empty_cache` gives back its blocks that are free.
        _torch()._C._cuda_releasePool(self._ordinal, mempool.id)

    @property
    def figures(self) -> dict[str, int]:
        """What this process's pools of the device hold now: `arenas`, each of which is one descriptor; `closed`, those of them that are
        published; their `bytes`; the `blocks` that PyTorch has of them, and how many bytes of them are `used` so."""
        return _native.torch_pool_figures(self._ordinal) if self._ordinal >= 0 else dict.fromkeys(
            ("arenas", "closed", "bytes", "blocks", "used"), 0
        )


def pool(arena: int = 256 << 20, device: Any = None, *, size: int | None = None) -> Pool:
    """A context in which this thread's PyTorch allocations on a GPU lie in memory that other processes can map.

        with vmmfd.torch.pool():
            model = load()
        broker.put("model", model)          # Without a copy.

    PyTorch's blocks are cut from arenas. Each arena is one allocation of the driver and one descriptor, and is given back once it is empty.
    `arena` is the size of the smallest arenas in bytes. Arenas grow: each has a quarter of the bytes of all, up to 1 GiB, if that is more than
    `arena`. `size`, if given, is how many bytes will be allocated: arenas of at most 1 GiB then have exactly that many bytes, and arenas
    beyond them have `arena` bytes. `device` is a `torch.device`, its name or its number; by default PyTorch's current one. Needs PyTorch 2.6
    or newer.

    Readers get whole arenas, with everything that lies beside the published tensors. Publishing closes arenas: nothing is allocated in them
    again, so that what readers see is never overwritten, whatever is deleted here. Memory of deleted tensors goes back at
    `torch.cuda.empty_cache()`, as all of PyTorch's does.

    Threads that are started inside allocate as ever: enter a pool in each. Blocks while the driver starts, if it has not.

    Raises `vmmfd.Unsupported` (a `NotImplementedError`) without a GPU or with an older PyTorch; `vmmfd.Invalid` (a `ValueError`) for a size
    or device that makes no sense; `vmmfd.Error` in a fork of a process that opened the driver.
    """
    for name, value in (("arena", arena), ("size", 1 if size is None else size)):
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 47:
            raise Invalid(f"{name}={value!r} is no size of memory: give a number of bytes, such as 256 << 20")
    return Pool(arena, device, size)


def _close(addresses: Iterable[int], storages: Iterable[Any]) -> None:
    """Sees to it that nothing is allocated any more where something is published.

    Nothing is cut from these arenas again. This thread's pool goes on in a new one of PyTorch's, so that free blocks in them are not used
    either. Other threads' pools can't be changed from here: the storages are held until these threads leave them.
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
                # Not any more once its thread has left it.
                pool._held.extend(kept)
    for pool in mine:
        pool._end()
        pool._begin()
