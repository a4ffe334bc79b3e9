"""Events of names."""

from __future__ import annotations

from collections.abc import Iterator

from . import _native, _records
from . import _types as t
from ._closing import Closing
from ._errors import Invalid
from ._records import Event


class Watch(Closing, Iterator[Event]):
    """The events of names: `Broker.watch`. An iterator and a context manager.

    It has its own connection. Between calls it holds nothing in the broker and may fall behind: it then returns an event of kind `lost`.
    """

    __slots__ = ("__weakref__", "_native", "_timeout")

    def __init__(self, watch: _native.Watch, timeout: t.Time | None) -> None:
        self._native = watch
        self._timeout = timeout

    def next(self, timeout: t.Time | None = None) -> Event | None:
        """Returns the next event, or None if none arrives within `timeout`; None waits forever, and 0 does not wait. Raises `Invalid` if
        the watch is closed or another thread waits in it."""
        fields = self._native.next(timeout)
        return None if fields is None else _records.event(fields)

    def __iter__(self) -> Watch:
        return self

    def __next__(self) -> Event:
        try:
            event = self.next(self._timeout)
        except Invalid:
            if self._native.is_closed:
                raise StopIteration from None
            raise
        if event is None:
            raise StopIteration
        return event

    @property
    def place(self) -> str:
        """The position after the last returned event. `Broker.watch(after=...)` continues from it."""
        instance, seq = self._native.place
        return f"{instance}:{seq}"

    def close(self) -> None:
        """Closes the watch. Iterations in other threads stop."""
        self._native.close()
