"""The order of GPU work between processes: streams that wait for streams."""

from __future__ import annotations

from . import _arguments, _native
from . import _types as t
from ._closing import Closing
from ._errors import Invalid, Timeout

# The legacy default stream, whose handle is 0.
_LEGACY = 1


def given(stream: t.Any) -> tuple[int, object] | None:
    """Returns the number of a stream with DLPack's meaning, and the object that keeps the stream."""
    if stream is None:
        return None
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1]) or _LEGACY, stream
    # Of PyTorch, CuPy and Numba. Other objects have such attributes too, but do not synchronize.
    names = [name for name in ("cuda_stream", "ptr", "handle") if hasattr(stream, name)]
    if names and hasattr(stream, "synchronize"):
        handle = getattr(stream, names[0])
        # Numba has a ctypes pointer.
        return int(getattr(handle, "value", handle) or _LEGACY), stream
    if isinstance(stream, bool) or not hasattr(stream, "__index__"):
        problem = f"stream={_arguments.shown(stream)} has type {type(stream).__name__}"
        raise TypeError(f"{problem}: give a stream of PyTorch, CuPy or Numba, an object with __cuda_stream__, or an int")
    number = _arguments.needed(_arguments.whole(stream, "stream"), "stream")
    if number == 0:
        raise Invalid("stream=0 is ambiguous: give 1 for the legacy default stream, 2 for the per-thread default stream, or a handle")
    return number, stream


def _needed(stream: t.Any) -> tuple[int, object]:
    return _arguments.needed(given(stream), "stream")


def _value(value: t.Any) -> int:
    return _arguments.needed(_arguments.whole(value, "value"), "value")


class Timeline(Closing):
    """A number that streams of one process raise, and that streams and threads of any process wait for. Threads may share it.

    `Timeline(device)` creates one for streams of a `device`, by default the first, of `backend` (str, as for `empty`). Only this process
    records. Another process opens its descriptor, `fileno()`, with `Timeline.open`, and can wait and release. A context manager that closes it.

    Raises `Unsupported` if the device's streams can't wait for host memory, as on the host backend, and `Invalid` for other arguments, after
    `close` and in a fork. Waits raise `Interrupted` if another thread closes it.
    """

    __slots__ = ("__weakref__", "_native")

    def __init__(self, device: t.DeviceName | None = None, *, backend: str | None = None) -> None:
        self._native = _native.Timeline(device, backend)

    @classmethod
    def open(cls, fd: t.Any, device: t.DeviceName | None = None, *, backend: str | None = None) -> t.Self:
        """Opens another process's timeline from its descriptor `fd`, an int or an object with `fileno()`, which stays open. With a `device` of
        `backend`, streams of the device can wait; without one, only `wait_cpu`, `completion`, `value` and `release` work. Raises `Error` if
        the descriptor is of no timeline, and as `Timeline`."""
        if device is None and backend is not None:
            raise Invalid("backend= has no effect without device=: give both, or none")
        opened = cls.__new__(cls)
        opened._native = _native.Timeline.open(fd, device, backend)
        return opened

    def record(self, stream: t.Any) -> int:
        """Raises the value by 1 when all earlier work of the `stream` is done, and returns the new value. Does not wait for the work.

        `stream` is a stream of PyTorch, CuPy or Numba, an object with `__cuda_stream__`, or an int with DLPack's meaning: 1 is the legacy
        default stream, 2 the per-thread default stream, and others are handles. The object is kept as long as the stream is used; keep a
        stream that you give as an int.

        Raises `Invalid` if another process records, for a stream of another device, in a capture or the per-thread default stream, and for 0;
        `TypeError` for another object; `Disconnected` after a release; `Error`."""
        return self._native.record(_needed(stream))

    def wait(self, stream: t.Any, value: int, timeout: t.Time) -> None:
        """Lets a `stream`, as for `record`, wait until the value is reached, at most `timeout` seconds (or a `timedelta`). Does not block. After
        this time all waits for the timeline are released, in all processes, and it can't be used any more. Raises as `record`."""
        self._native.wait(_needed(stream), _value(value), timeout)

    def wait_cpu(self, value: int, timeout: t.Time) -> None:
        """Waits until the value is reached, at most `timeout` seconds (or a `timedelta`), with the GIL released. Ctrl-C interrupts it. Raises
        `Timeout` after this time, `Disconnected` after a release, and `Interrupted`."""
        if not self._native.wait_cpu(_value(value), timeout):
            raise Timeout(f"the timeline did not reach {value} within {_arguments.shown(timeout)} seconds", kind="peer")

    def completion(self, value: int) -> t.Literal["done", "pending", "lost"]:
        """Whether the value was reached ("done"), was not yet ("pending"), or the waits for it were released before ("lost"): data that a
        stream read behind its wait is then undefined. Does not wait. Raises `TypeError` for another type."""
        return self._native.completion(_value(value))

    @property
    def value(self) -> int:
        """The value now; after a release the largest number."""
        return self._native.value

    def release(self) -> None:
        """Releases all waits for the timeline, in all processes. Values that were not reached are lost. Does not wait, and makes no driver call."""
        self._native.release()

    def release_with(self, peer: t.Any) -> None:
        """Releases the waits when a process exits or closes its end of a connection: `peer` is a descriptor, such as of `os.pidfd_open`, or a
        connected socket, and stays open. Raises `TypeError` and `Error` for other objects."""
        self._native.release_with(peer)

    def fileno(self) -> int:
        """Returns the descriptor, to send to another process: see `socket.send_fds`. The timeline owns it."""
        return self._native.fileno()

    @property
    def is_closed(self) -> bool:
        """Whether it is closed."""
        return self._native.is_closed

    def close(self) -> None:
        """Closes it. On a GPU, blocks while any stream of the device waits for a timeline, with the GIL released: call `release` first to
        release them. A timeline that is dropped without it is closed in the background. Closing twice does nothing."""
        self._native.close()

    def __repr__(self) -> str:
        return f"<vmmfd.Timeline{', closed' if self.is_closed else f' at {self.value}'}>"
