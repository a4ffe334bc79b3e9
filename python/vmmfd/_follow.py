"""Following the versions of an object."""

from __future__ import annotations

from _thread import RLock
from collections.abc import AsyncIterator, Iterator, Mapping
from time import monotonic

from . import _native
from . import _types as t
from ._closing import Closing
from ._errors import Error, Invalid, NotFound
from ._lease import Lease
from ._watch import Watch
from .records import Event


class Follower(Closing, Iterator[Lease], AsyncIterator[Lease]):
    """The versions of an object, one after the other: `Broker.follow`. An iterator, also for `async for`, and a context manager.

    Each step returns the same lease, switched to the new version in place (`Lease.switch`): arrays, and the views that other libraries made
    of them, keep their addresses and read the new version. So finish all work on them before the next step: **asking for the next version
    is the promise that nothing uses them until it is there.** If versions are put faster than the loop runs, it skips to the newest. An
    object that is deleted and put again is followed too.

    `lease` is the lease, None before the first version. It remains open until it, or this object, is closed, or nothing refers to it.

    The iteration stops when the wait of a step expires; the next step waits again. A step raises `MismatchError` if a new version has another
    layout: follow again. It raises `Invalid` in a signal handler that interrupts another step. Raises as `Broker.get` and `Lease.prepare`.
    """

    __slots__ = ("__weakref__", "_client", "_current", "_events", "_expected", "_first", "_last", "_lock", "_name", "_stop", "_wait", "lease")

    def __init__(
        self,
        client: _native.Client,
        name: str,
        first: dict[str, t.Any],
        expected: Mapping[str, t.Any],
        wait: float,
    ) -> None:
        self._client, self._name, self._first, self._expected, self._wait = client, name, first, expected, wait
        self._events = Watch(client.watch(name, None), None)
        self._stop = _native.Stop()
        self.lease: Lease | None = None
        # One step at a time. A cancelled step ends a moment later. The lock knows its thread, whose signal handler may start another step.
        self._lock = RLock()
        # The id of the last returned version, and whether the lease has the newest one unless an unread event announces another.
        self._last = ""
        self._current = False

    def __next__(self) -> Lease:
        while (found := self._step()) is not None:
            lease, version = found
            # Else another step has returned it.
            if version != self._last:
                self._last = version
                return lease
        raise StopIteration

    def __aiter__(self) -> Follower:
        return self

    async def __anext__(self) -> Lease:
        from ._async import in_thread

        while (found := await in_thread(self._step)) is not None:
            lease, version = found
            if version != self._last:
                self._last = version
                return lease
        raise StopAsyncIteration

    def close(self) -> None:
        """Closes the lease, and interrupts a step in another thread."""
        self._events.close()
        self._stop.set()
        if self.lease is not None:
            self.lease.close()

    def __repr__(self) -> str:
        return f"<vmmfd.Follower of {self._name}: {self.lease!r}>"

    def _step(self) -> tuple[Lease, str] | None:
        """Waits until the lease has a version that was not returned. Returns the lease and the version's id, or None if no such version was
        put in time, or this is closed. An interrupted step loses nothing: the next step finds the lease as this one has left it."""
        if self._lock._is_owned():  # type: ignore[attr-defined]
            raise Invalid(f"a step of the follower of {self._name!r} is already executing: a signal handler can't start another")
        ends = monotonic() + self._wait
        try:
            with self._lock:
                while self.lease is None or self.lease.id == self._last:
                    if not self._current:
                        self._stop.run(self._advance)
                        self._current = True
                        continue
                    self._current = False
                    event = self._events.next(max(0.0, ends - monotonic()))
                    self._current = event is None or not self._announces(event)
                    if event is None:
                        return None
                return self.lease, self.lease.id
        except Error:
            if not self._events.is_closed:
                raise
            return None

    def _announces(self, event: Event) -> bool:
        """Returns whether there may be a newer version after an event."""
        is_put = event.kind in ("published", "replaced") and event.name == self._name and event.id != self._last
        return is_put or event.kind == "lost"

    def _advance(self) -> None:
        """Gets the newest version, or switches the lease to it. Does nothing if there is none."""
        try:
            if self.lease is None:
                self.lease = Lease(self._client, self._client.get(self._name, self._first))
                if self._events.is_closed:
                    self.lease.close()
            else:
                with self.lease.prepare(self._name, **self._expected) as prepared:
                    if prepared.id != self.lease.id:
                        self.lease.switch(prepared, exports_unused=True).close()
        except NotFound as error:
            # No such array.
            if type(error) is not NotFound or error.kind != "object":
                raise
