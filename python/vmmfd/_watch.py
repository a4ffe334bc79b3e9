"""Events of names."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from time import monotonic

from . import _arguments, _native
from . import _types as t
from ._closing import Closing
from ._errors import Invalid
from .records import Event


class Watch(Closing, Iterator[Event], AsyncIterator[Event]):
    """The events of names: `Broker.watch`. An iterator, also for `async for`, and a context manager.

    It has its own connection. Between calls it holds nothing in the broker and may fall behind: it then returns an event of kind `lost`.
    Threads and tasks may share it: each event goes to one of them. An interrupted or cancelled call loses no event.
    """

    __slots__ = ("__weakref__", "_native", "_wait")

    def __init__(self, watch: _native.Watch, wait: t.Time | None) -> None:
        self._native = watch
        self._wait = wait

    def next(self, wait: t.Time | None = None) -> Event | None:
        """Returns the next event, or None if none arrives within `wait` seconds (or a `timedelta`); None waits for ever, and 0 only for the
        broker's answer, at most the `timeout` of `connect`. Raises `Invalid` if the watch is closed, and as any call of the `Broker`."""
        ends = monotonic() + _arguments.seconds(_arguments.endless(wait))
        while self._native.wait(max(0.0, ends - monotonic())):
            # From here to the return Python runs no signal handler, whose exception would lose the event.
            event = self._native.taken
            if event is not None:
                return event
        return None

    def fileno(self) -> int:
        """Returns a descriptor for select(2), poll(2), epoll(7) and `loop.add_reader` of asyncio. It is readable while `next(0)` would
        return an event or raise: an error, or the end because the watch is closed. Then call `next(0)` until it returns None.

        The watch owns the descriptor, an eventfd(2), and closes it when it is dropped; `close` only makes it readable. Do not read it. From
        the first call on, a thread waits for events, one ahead of `next`, and `next(0)` never waits for the broker. Raises `Invalid` if the
        watch is closed, and in a fork."""
        return self._native.fileno()

    def __iter__(self) -> Watch:
        return self

    def __aiter__(self) -> Watch:
        return self

    async def __anext__(self) -> Event:
        from ._async import in_thread

        ends = monotonic() + _arguments.seconds(_arguments.endless(self._wait))
        try:
            while await in_thread(lambda: self._native.wait(max(0.0, ends - monotonic()))):
                event = self._native.taken
                if event is not None:
                    return event
        except Invalid:
            if not self.is_closed:
                raise
        raise StopAsyncIteration

    def __next__(self) -> Event:
        try:
            event = self.next(self._wait)
        except Invalid:
            if not self.is_closed:
                raise
            event = None
        if event is None:
            raise StopIteration
        return event

    @property
    def place(self) -> str:
        """The position after the last returned event. `Broker.watch(after=...)` continues from it."""
        instance, seq = self._native.place
        return f"{instance}:{seq}"

    @property
    def is_closed(self) -> bool:
        """Whether the watch is closed."""
        return self._native.is_closed

    def close(self) -> None:
        """Closes the watch. Iterations in other threads stop."""
        self._native.close()

    def __repr__(self) -> str:
        if self.is_closed:
            return "<vmmfd.Watch: closed>"
        try:
            return f"<vmmfd.Watch at {self.place}>"
        except Invalid:
            return "<vmmfd.Watch: not usable here>"
