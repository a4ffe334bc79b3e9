"""The buffers of streams: loans and samples."""

from __future__ import annotations

from . import _arguments, _native, _order
from . import _types as t
from ._closing import Closing
from ._native import Array
from .records import Publication


def octets(value: t.Any, what: str) -> bytes:
    """Returns bytes. Raises `TypeError` for anything else."""
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise TypeError(f"{what}={_arguments.shown(value)} has type {type(value).__name__}: give bytes")
    return bytes(value)


class _Buffer(Closing):
    """A buffer of a pool, with the arrays of the stream's format."""

    __slots__ = ("__weakref__", "_native")

    def __init__(self, native: _native.Buffer) -> None:
        self._native = native

    def __getitem__(self, name: str, /) -> Array:
        return self.array(name)

    def array(self, name: str) -> Array:
        """Returns the array of this name in the stream's format. It keeps the buffer. Raises `NoArray` (a `KeyError`) if there is none, and
        `Invalid` if the array does not fit into this buffer, or the buffer is closed."""
        return self._native.array(name)

    def keys(self) -> list[str]:
        """The names of the arrays in the stream's format."""
        return self._native.names()

    def memory(self) -> Array:
        """Returns all bytes of the buffer, as `uint8`. Raises `Invalid` if the buffer is closed."""
        return self._native.memory()

    def numpy(self) -> dict[str, t.Any]:
        """Returns the arrays of the format as NumPy arrays of the same memory, by name. Raises as `array` and `Array.numpy`."""
        return {name: self.array(name).numpy() for name in self.keys()}

    @property
    def is_closed(self) -> bool:
        """Whether it is closed."""
        return self._native.is_closed

    def close(self) -> None:
        """Returns the buffer to the pool once its arrays, and the views that other libraries made of them, are gone. On a GPU, waits for all
        work of this process first. Closing twice does nothing."""
        self._native.close()


class Loan(_Buffer):
    """A buffer to fill and publish: `Publisher.loan`. It contains old bytes. A context manager that frees the buffer unless it was
    published.

    `loan[name]` is an array of the stream's format, and `loan.memory()` all bytes. Write to them through NumPy, PyTorch, or another library.
    """

    __slots__ = ()

    def publish(self, user: bytes = b"", *, stream: t.Any = None) -> Publication:
        """Publishes the buffer, with at most 4096 bytes of your own: returns its number, and the number of subscribers that were given
        it at once. On a GPU, first waits for all work of this process. Does not wait for subscribers.

        With a `stream`, as for `Timeline.record`, the publication is behind the work that the stream has now, and the call does not wait for
        this work: the streams of subscribers do, or their CPUs. The first call takes about a millisecond longer. If `Publisher.order` is
        "cpu", the call waits for the stream.

        **Do not write to the buffer afterwards**: subscribers read it. Arrays of this package then raise, but views of other libraries do
        not. Raises `Invalid` for too many bytes, if it is published or closed, while another thread copies to it, and for a stream of
        another device or in a capture; `Unsupported` for a stream on the host backend; `TypeError` for an object that is no stream. After
        an error of the stream, the buffer is free again."""
        return Publication(*self._native.publish(octets(user, "user"), _order.given(stream)))


class Sample(_Buffer):
    """A received buffer, read-only: `Subscriber.receive`. A context manager that gives it back. Dropping it gives it back too.

    Its arrays, and the views that other libraries made of them, keep the buffer: it is given back when the last of them is gone.
    """

    __slots__ = ()

    @property
    def number(self) -> int:
        """The number of the publication, counted from 1."""
        return self._fields[0]

    @property
    def published_at(self) -> float:
        """The time of the publication in seconds, as `time.monotonic()` in every process of the machine."""
        return self._fields[1]

    @property
    def skipped_before(self) -> int:
        """The number of publications since this subscriber's last sample that it did not get."""
        return self._fields[2]

    @property
    def user(self) -> bytes:
        """The publisher's own bytes."""
        return self._fields[3]

    @property
    def completion(self) -> t.Literal["done", "pending", "lost"]:
        """Whether the publisher's GPU has written the buffer: "done", or of a sample that was received for a stream also "pending", or
        "lost" if the publisher died or was late: then discard all that was read. Does not wait. Raises `Invalid` if the sample is closed."""
        return self._native.completion

    @property
    def _fields(self) -> tuple[int, float, int, bytes]:
        fields = self._native.fields
        assert fields is not None, "a sample has fields"
        return fields

    @property
    def blob(self) -> bytes:
        """The bytes that belong to the stream's format."""
        return self._native.blob

    def __repr__(self) -> str:
        return f"<vmmfd.Sample {self.number}{', closed' if self.is_closed else ''}>"
