"""Memory pools whose arrays are shared: one descriptor for the pool, as `cuda.core`'s `DeviceMemoryResource` does it.

For programs that allocate often: memory of a pool that is freed is used again. A receiver of one array can reach all of the pool, to
write too, and must have dropped it before the process that made it frees it. Otherwise take `vmmfd.empty`.
"""

from __future__ import annotations

from collections.abc import Sequence

from . import _native
from . import _types as t
from ._closing import Closing
from ._native import Array, Device

__all__ = ["Pool"]


class Pool(Closing):
    """A memory pool of a GPU that can be shared by descriptor: `cuMemPoolCreate`. A context manager that closes it.

    `max_size`, in bytes, is the most that its arrays may have together; `None` is as much as the device has. An array of it is handed on
    with `vmmfd.serve` and `vmmfd.take`; `Array.is_mapped` says of which side it is.

    Raises `Unsupported` on the host backend and for a device without such pools, `Error`.
    """

    is_mapped = False
    """Whether another process made it: what `vmmfd.take` gives is, and then `Array.is_mapped` says so."""

    def __init__(
        self, *, max_size: int | None = None, device: int | str | Device | None = None, backend: str = "auto"
    ) -> None:
        if max_size is not None and max_size <= 0:
            from ._errors import Invalid

            raise Invalid(f"max_size={max_size} is no size: give bytes, at least 1, or None")
        self._pool = _native._Pool(max_size, device, backend)

    @property
    def max_size(self) -> int | None:
        """The most bytes that its arrays may have together."""
        return self._pool.max_size

    @property
    def used(self) -> int:
        """The bytes that its arrays have now."""
        return self._pool.used

    @property
    def device(self) -> Device:
        """The device whose memory it is."""
        return self._pool.device

    def empty(self, shape: int | Sequence[int], dtype: t.Any) -> Array:
        """Makes an array in memory of the pool. Contents are undefined.

        Raises `OutOfMemory` beyond `max_size` or if the device has no more, `Unsupported` beyond 5 GiB, which NVIDIA's driver can't
        import, `Invalid` once it is closed.
        """
        return self._pool.empty(shape, dtype)

    def close(self) -> None:
        """Gives the pool back, as soon as its last array is gone. Closing again does nothing."""
        self._pool.close()
