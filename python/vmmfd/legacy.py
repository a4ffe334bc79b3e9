"""Arrays by legacy CUDA handles (`CUipcMemHandle`), as Numba, CuPy and C programs share them.

For programs that speak nothing else. A legacy handle is gone with the process that made it, needs shared IPC and PID namespaces, and
gives the receiver all of the block that it lies in, to write too. Otherwise take `vmmfd.serve` or a broker.

A handle can't be opened in the process that made it: the driver refuses. There the array itself is at hand.
"""

from __future__ import annotations

from collections.abc import Sequence

from . import _native
from . import _types as t
from ._native import Array, Device

__all__ = ["IpcArrayHandle", "OpenedArray", "empty", "get_ipc_handle", "open_ipc_array"]


class OpenedArray:
    """An array that was opened by its handle: a context manager that yields it and closes the handle.

    Its owner must not free the memory before. `array` is the `vmmfd.Array`.
    """

    def __init__(self, opened: _native._OpenedHandle) -> None:
        self._opened = opened
        self.array: Array = opened.array

    def close(self, *, exported: t.Literal["valid"] | None = None) -> None:
        """Closes the handle, once all work of the device is done. Blocks for as long as that takes. Closing again does nothing.

        Raises `BufferError` while another library has a view of the array by DLPack; `exported="valid"` closes it all the same, and is
        the caller's promise that none of them is used any more. Views by `__cuda_array_interface__` are not counted: they must not be
        used afterwards. Raises `Error` for what the driver reports.
        """
        if exported not in (None, "valid"):
            from ._errors import Invalid

            raise Invalid(f'exported={exported!r} is not "valid" or None')
        self._opened.close(exported == "valid")

    def __enter__(self) -> Array:
        return self.array

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: t.TracebackType | None
    ) -> None:
        self.close()


class IpcArrayHandle:
    """What another process needs to open an array: plain data, which can be pickled and sent. A context manager that opens it there."""

    def __init__(
        self, handle: bytes, shape: tuple[int, ...], dtype: str, strides: tuple[int, ...] | None, offset: int
    ) -> None:
        self.handle = handle
        """The 64 bytes of the `CUipcMemHandle`."""
        self.shape = shape
        self.dtype = dtype
        self.strides = strides
        """In bytes."""
        self.offset = offset
        """Where the array begins behind what the handle opens, in bytes."""
        self._opened: OpenedArray | None = None

    def open(self, *, device: int | str | Device | None = None, backend: str = "auto") -> Array:
        """Opens the array, in another process than the one that made it. Raises as `open_ipc_array`."""
        self._opened = open_ipc_array(
            self.handle, self.shape, self.dtype, self.strides, self.offset, device=device, backend=backend
        )
        return self._opened.array

    def close(self) -> None:
        """Closes what `open` opened. Raises as `OpenedArray.close`."""
        opened = self._opened
        if opened is not None:
            opened.close()
            self._opened = None

    def __enter__(self) -> Array:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: t.TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[t.Any, ...]:
        return IpcArrayHandle, (self.handle, self.shape, self.dtype, self.strides, self.offset)

    def __repr__(self) -> str:
        return f"<vmmfd.legacy.IpcArrayHandle {self.dtype} {self.shape}>"


def empty(
    shape: int | Sequence[int], dtype: t.Any, *, device: int | str | Device | None = None, backend: str = "auto"
) -> Array:
    """Makes an array in memory that is shared by a legacy handle (`cuMemAlloc`), in a block of its own of 2 MiB or a multiple.

    Contents are undefined. Raises `Unsupported` on the host backend, `OutOfMemory`, `Error`.
    """
    return _native._legacy_empty(shape, dtype, device, backend)


def get_ipc_handle(array: Array) -> IpcArrayHandle:
    """The handle of an array that `empty` made, or of a view of one. All work that is queued on its device is waited for.

    The array must live for as long as another process has it open. Raises `Invalid` for other arrays.
    """
    handle, offset = _native._legacy_handle(array)
    return IpcArrayHandle(handle, array.shape, array.dtype, array.strides, offset)


def open_ipc_array(
    handle: bytes,
    shape: int | Sequence[int],
    dtype: t.Any,
    strides: Sequence[int] | None = None,
    offset: int = 0,
    *,
    device: int | str | Device | None = None,
    backend: str = "auto",
) -> OpenedArray:
    """Opens a legacy handle that another process made: a context manager that yields a `vmmfd.Array`.

    `handle` is the 64 bytes; `strides`, in bytes, are those of C order if left out; `offset`, in bytes, is where the array begins
    behind what the handle opens. `device` is the one whose memory it is. What the handle says of the memory's size is believed: open no
    handle of a process that you would not let write into your memory.

    Raises `Invalid` for a handle of this very process, for bytes that are no handle, and for an array that is not inside the memory;
    `Unsupported` on the host backend; `Error` for what the driver reports, such as an owner that has gone.
    """
    return OpenedArray(
        _native._legacy_open(
            bytes(handle), shape, dtype, None if strides is None else list(strides), offset, device, backend
        )
    )
