"""CUDA streams by the driver's own functions, for tests without PyTorch and CuPy."""

from __future__ import annotations

import ctypes
from typing import Any

import vmmfd

# Seconds: only for a stream that hangs.
LIMIT = 60.0


class Stream:
    """A stream of device 0 that is not ordered with the default stream."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        context, stream = ctypes.c_void_p(), ctypes.c_void_p()
        assert self.library.cuInit(0) == 0
        assert self.library.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
        assert self.library.cuCtxSetCurrent(context) == 0
        assert self.library.cuStreamCreate(ctypes.byref(stream), 1) == 0
        self.context, self.number = context, stream.value

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.number

    def call(self, name: str, *arguments: Any) -> int:
        """Calls a function of the driver, with the stream as the last argument."""
        self.library.cuCtxSetCurrent(self.context)
        return int(getattr(self.library, name)(*arguments, ctypes.c_void_p(self.number)))

    def fill(self, array: vmmfd.Array, byte: int) -> None:
        """Enqueues a store of the same byte to an array."""
        assert self.call("cuMemsetD8Async", ctypes.c_uint64(array.address), ctypes.c_ubyte(byte), ctypes.c_size_t(array.nbytes)) == 0

    @property
    def is_idle(self) -> bool:
        code = self.call("cuStreamQuery")
        assert code in (0, 600), code
        return code == 0


class Gate:
    """Holds streams back until it is opened."""

    def __init__(self) -> None:
        self.timeline, self.opener, self.opened = vmmfd.Timeline(), Stream(), 0

    def hold(self, stream: Stream) -> Stream:
        """Lets a stream wait until the gate is opened the next time."""
        self.timeline.wait(stream, self.opened + 1, LIMIT)
        return stream

    def open(self) -> None:
        # First: a stream may go on before the call returns.
        self.opened += 1
        assert self.timeline.record(self.opener) == self.opened
