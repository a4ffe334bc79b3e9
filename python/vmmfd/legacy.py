"""Arrays by legacy CUDA handles (`CUipcMemHandle`), as Numba, CuPy and C programs share them.

For programs that support nothing else. A legacy handle becomes invalid when its creator exits, needs shared IPC and PID namespaces, and
lets the receiver read and write the whole block that contains the array. Otherwise use `vmmfd.serve` or a broker.

The driver refuses to open a handle in the process that created it: use the array itself there.
"""

from __future__ import annotations

from collections.abc import Sequence

from . import _arguments, _native
from . import _types as t
from ._native import Array, Device

__all__ = ["IpcArrayHandle", "OpenedArray", "empty", "get_ipc_handle", "open_ipc_array"]


class OpenedArray:
    """An array opened from its handle: a context manager that yields it and closes the handle.

    Its owner must not free the memory earlier. `array` is the `vmmfd.Array`.
    """

    def __init__(self, opened: _native._OpenedHandle) -> None:
        self._opened = opened
        self.array: Array = opened.array

    def close(self, *, exports_unused: bool = False) -> None:
        """Waits for all work of the device, then closes the handle. Closing twice does nothing.

        Raises `BufferError` while another library has a DLPack view of the array. `exports_unused=True` closes it anyway, and is the
        caller's promise that no such view is used any more. Views by
        `__cuda_array_interface__` are not counted, and must not be used afterwards. Raises `Error` for a driver error.
        """
        self._opened.close(_arguments.flag(exports_unused, "exports_unused"))

    def __enter__(self) -> Array:
        return self.array

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: t.TracebackType | None
    ) -> None:
        self.close()


class IpcArrayHandle:
    """The data another process needs to open an array: it can be pickled and sent. A context manager that opens the array. `strides` and
    `offset` are in bytes."""

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
        """The byte offset of the array from the opened address."""
        self._opened: OpenedArray | None = None

    def open(self, *, device: int | str | Device | None = None, backend: str | None = None) -> Array:
        """Opens the array, in another process than its creator. Raises as `open_ipc_array`."""
        self._opened = open_ipc_array(
            self.handle, self.shape, self.dtype, self.strides, self.offset, device=device, backend=backend
        )
        return self._opened.array

    def close(self) -> None:
        """Closes the array that `open` opened. Raises as `OpenedArray.close`."""
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
    shape: int | Sequence[int], dtype: t.Any, *, device: int | str | Device | None = None, backend: str | None = None
) -> Array:
    """Creates an array that is shared by a legacy handle (`cuMemAlloc`), in its own block of a multiple of 2 MiB.

    Contents are undefined. Raises `Unsupported` on the host backend, `OutOfMemory`, `Error`.
    """
    return _native._legacy_empty(shape, dtype, device, backend)


def get_ipc_handle(array: Array) -> IpcArrayHandle:
    """Returns the handle of an array that `empty` created, or of a view of such an array. Waits for all work queued on its device.

    The array must outlive every other process's use of the handle. Raises `Invalid` for other arrays.
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
    backend: str | None = None,
) -> OpenedArray:
    """Opens a legacy handle that another process created. Returns a context manager that yields a `vmmfd.Array`.

    `handle` is the 64 bytes. `strides` are in bytes, C order by default. `offset` is the byte offset of the array from the opened address.
    `device` is the device that has the memory. The memory size in the handle is not verified: only open handles of processes that may write
    to your memory.

    Raises `Invalid` for a handle of this process, for bytes that are not a handle, and for an array outside the memory; `Unsupported` on
    the host backend; `Error` for a driver error, for example if the owner has exited.
    """
    return OpenedArray(
        _native._legacy_open(
            bytes(handle), shape, dtype, None if strides is None else list(strides), offset, device, backend
        )
    )
