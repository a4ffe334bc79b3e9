"""Memory pools whose arrays are shared: one descriptor per pool, as in `cuda.core`'s `DeviceMemoryResource`.

For programs that allocate often: the pool reuses freed memory. A receiver of one array can read and write the whole pool, and must drop it
before its creator frees it. Otherwise use `vmmfd.empty`.
"""

from __future__ import annotations

from collections.abc import Sequence

from . import _arguments, _native
from . import _types as t
from ._closing import Closing
from ._native import Array, Device

__all__ = ["Pool"]


class Pool(Closing):
    """A GPU memory pool that can be shared by descriptor: `cuMemPoolCreate`. A context manager that closes it.

    `max_size` limits the total size of its arrays, in bytes; `None` allows all of the device's memory. Share its arrays with `vmmfd.serve`
    and `vmmfd.take`; `Array.is_mapped` distinguishes the two sides.

    Raises `Unsupported` on the host backend and for a device without such pools, `Error`.
    """

    is_mapped = False
    """Whether another process created the pool: always False. Arrays from `vmmfd.take` report it as `Array.is_mapped`."""

    def __init__(
        self, *, max_size: int | None = None, device: int | str | Device | None = None, backend: str | None = None
    ) -> None:
        if _arguments.whole(max_size, "max_size") == 0:
            from ._errors import Invalid

            raise Invalid("max_size=0 is not a size: give bytes, at least 1, or None")
        self._pool = _native._Pool(max_size, device, backend)

    @property
    def max_size(self) -> int | None:
        """The limit on the total size of its arrays, in bytes."""
        return self._pool.max_size

    @property
    def used(self) -> int:
        """The current total size of its arrays, in bytes."""
        return self._pool.used

    @property
    def device(self) -> Device:
        """The device that has the memory."""
        return self._pool.device

    def empty(self, shape: int | Sequence[int], dtype: t.Any) -> Array:
        """Creates an array in memory of the pool. Contents are undefined.

        Raises `OutOfMemory` beyond `max_size` or if the device has no more memory, `Unsupported` beyond 5 GiB, which NVIDIA's driver can't
        import, `Invalid` if the pool is closed.
        """
        return self._pool.empty(shape, dtype)

    def close(self) -> None:
        """Closes the pool. Its memory is released when its last array is gone. Closing twice does nothing."""
        self._pool.close()
