"""What happens to names, event by event."""

from __future__ import annotations

from collections.abc import Iterator

from . import _native, _records
from . import _types as t
from ._closing import Closing
from ._errors import Invalid
from ._records import Event


class Watch(Closing, Iterator[Event]):
    """What happens to names, event by event: `Broker.watch`. An iterator and a context manager.

    It has a connection of its own. Between calls it holds nothing in the broker, and may fall behind: an event of the kind `lost` says so.
    """

    __slots__ = ("__weakref__", "_native", "_timeout")

    def __init__(self, watch: _native.Watch, timeout: t.Time | None) -> None:
        self._native = watch
        self._timeout = timeout

    def next(self, timeout: t.Time | None = None) -> Event | None:
        """The next event. Waits for it up to `timeout`, for ever if that is None; then returns None. With 0 it only fetches what there is.
        Raises `Invalid` once it is closed, and if another thread waits in it."""
        told = self._native.next(timeout)
        return None if told is None else _records.event(told)

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
        """Behind what was returned last: for `Broker.watch`, to go on there later."""
        instance, seq = self._native.place
        return f"{instance}:{seq}"

    def close(self) -> None:
        """Ends it. An iteration of another thread ends too."""
        self._native.close()
