"""Events of names."""

from __future__ import annotations

import os
from _thread import allocate_lock, start_new_thread
from collections.abc import AsyncIterator, Iterator
from fcntl import F_DUPFD_CLOEXEC, fcntl

from . import _arguments, _native
from . import _types as t
from ._closing import Closing
from ._errors import Invalid
from .records import Event


class Watch(Closing, Iterator[Event], AsyncIterator[Event]):
    """The events of names: `Broker.watch`. An iterator, also for `async for`, and a context manager.

    It has its own connection. Between calls it holds nothing in the broker and may fall behind: it then returns an event of kind `lost`.
    """

    __slots__ = ("__weakref__", "_ahead", "_lock", "_native", "_polled", "_wait")

    def __init__(self, watch: _native.Watch, wait: t.Time | None) -> None:
        self._native = watch
        self._wait = wait
        self._polled: _Polled | None = None
        # An event that no step has delivered yet.
        self._ahead: Event | None = None
        self._lock = allocate_lock()

    def next(self, wait: t.Time | None = None) -> Event | None:
        """Returns the next event, or None if none arrives within `wait` seconds (or a `timedelta`); None waits for ever, and 0 does not
        wait. Raises `Invalid` if the watch is closed or another thread waits in it, and as any call of
        the `Broker`."""
        if self._ahead is not None:
            event, self._ahead = self._ahead, None
            return event
        if self._polled is not None:
            return self._polled.next(wait)
        fields = self._native.next(wait)
        return None if fields is None else Event._of(fields)

    def fileno(self) -> int:
        """Returns a descriptor for select(2), poll(2), epoll(7) and `loop.add_reader` of asyncio. It is readable while `next(0)` would
        return an event or raise: an error, or the end because the watch is closed. Then call `next(0)` until it returns None.

        The watch owns the descriptor, an eventfd(2), and closes it when it is dropped; `close` only makes it readable. Do not read it. From
        the first call on, a thread waits for events, one ahead of `next`, and `next(0)` never waits for the broker. Raises `Invalid` if the
        watch is closed, and in a fork."""
        if self._polled is None:
            if self._native.is_closed:
                raise Invalid("the watch is closed: start another")
            self._polled = _Polled(self._native)
        return self._polled.descriptor

    def __iter__(self) -> Watch:
        return self

    def __aiter__(self) -> Watch:
        return self

    async def __anext__(self) -> Event:
        from ._async import in_thread

        event = await in_thread(self._look_ahead)
        if event is None:
            raise StopAsyncIteration
        self._ahead = None
        return event

    def _look_ahead(self) -> Event | None:
        """Returns the next event, and keeps it: a cancelled step may not deliver it."""
        # A cancelled step ends a moment later.
        with self._lock:
            if self._ahead is None:
                self._ahead = next(self, None)
            return self._ahead

    def __next__(self) -> Event:
        try:
            event = self.next(self._wait)
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
        instance, seq = self._native.place if self._polled is None else self._polled.place
        return f"{instance}:{seq}"

    @property
    def is_closed(self) -> bool:
        """Whether the watch is closed."""
        return self._native.is_closed

    def close(self) -> None:
        """Closes the watch. Iterations in other threads stop."""
        self._native.close()
        if self._polled is not None:
            self._polled.wake()

    def __repr__(self) -> str:
        return f"<vmmfd.Watch{': closed' if self.is_closed else f' at {self.place}'}>"

    def __del__(self) -> None:
        # Ends the thread of `fileno`, which has no reference to this object. An incomplete object has none.
        polled = getattr(self, "_polled", None)
        if polled is not None:
            self._native.close()
            polled.wake()


class _Polled:
    """A thread that waits for a watch's next event, and a descriptor that is readable while there is one."""

    def __init__(self, watch: _native.Watch) -> None:
        self._native = watch
        self._process = os.getpid()
        # Also raises in a fork.
        self.place = watch.place
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        if self.descriptor <= 2:  # The program has closed stdin, stdout or stderr, and would read or print into the eventfd.
            standard = self.descriptor
            self.descriptor = fcntl(standard, F_DUPFD_CLOEXEC, 3)
            os.close(standard)
        # The event and the position after it, or the error, until `next` takes it. `_taken` then gets a token.
        self._ready: tuple[t.Any, tuple[str, int]] | BaseException | None = None
        self._lock = allocate_lock()
        # Imported here because few programs poll, and it imports `threading`.
        from queue import SimpleQueue

        self._taken: SimpleQueue[None] = SimpleQueue()
        start_new_thread(self._run, ())

    def next(self, wait: t.Time | None) -> Event | None:
        if os.getpid() != self._process:
            self._native.next(0)  # Raises.
        if not self._wait(wait):
            return None
        with self._lock:
            if self._native.is_closed:
                raise Invalid("the watch is closed: start another")
            ready, self._ready = self._ready, None
            if ready is None:  # Another thread was faster.
                return None
            os.eventfd_read(self.descriptor)
            if not isinstance(ready, BaseException):
                event, self.place = ready
        self._taken.put(None)
        if isinstance(ready, BaseException):
            raise ready
        return Event._of(event)

    def wake(self) -> None:
        """Makes the descriptor readable for ever: the watch is closed."""
        if os.getpid() == self._process:
            # A `next` in progress reads the descriptor with the lock.
            with self._lock:
                os.eventfd_write(self.descriptor, 1)
            self._taken.put(None)

    def _wait(self, wait: t.Time | None) -> bool:
        import select

        poll = select.poll()
        poll.register(self.descriptor, select.POLLIN)
        milliseconds = 1000 * _arguments.seconds(_arguments.endless(wait))
        # poll(2) takes 31 bits.
        return bool(poll.poll(milliseconds if milliseconds < 2**31 else None))

    def _run(self) -> None:
        while True:
            ready: tuple[t.Any, tuple[str, int]] | BaseException
            try:
                fields = self._native.next(None)
                ready = (fields, self._native.place)
            except BaseException as error:
                ready = error
            if self._native.is_closed:
                return
            with self._lock:
                self._ready = ready
                os.eventfd_write(self.descriptor, 1)
            del ready
            self._taken.get()

    def __del__(self) -> None:
        if os.getpid() == self._process:
            os.close(self.descriptor)
