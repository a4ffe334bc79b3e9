"""Following the versions of an object."""

from __future__ import annotations

from _thread import allocate_lock
from collections.abc import AsyncIterator, Iterator, Mapping
from time import monotonic

from . import _arguments, _native
from . import _types as t
from ._closing import Closing
from ._errors import NotFound, Timeout
from ._lease import Lease
from ._watch import Watch


class Follower(Closing, Iterator[Lease], AsyncIterator[Lease]):
    """The versions of an object, one after the other: `Broker.follow`. An iterator, also for `async for`, and a context manager.

    Each step returns the same lease, switched to the new version in place (`Lease.switch`): arrays, and the views that other libraries made
    of them, keep their addresses and read the new version. So finish all work on them before the next step: **asking for the next version
    is the promise that nothing uses them until it is there.** If versions are put faster than the loop runs, it skips to the newest. An
    object that is deleted and put again is followed too.

    `lease` is the lease, None before the first version. It remains open until it, or this object, is closed, or nothing refers to it.

    The iteration stops when the wait of a step expires; the next step waits again. A step raises `Differs` if a new version has another
    layout: follow again. Raises as `Broker.get` and `Lease.prepare`.
    """

    __slots__ = ("__weakref__", "_client", "_events", "_expected", "_first", "_lock", "_missed", "_name", "_returned", "_wait", "lease")

    def __init__(
        self,
        client: _native.Client,
        name: str,
        first: dict[str, t.Any],
        expected: Mapping[str, t.Any],
        wait: t.Time | None,
    ) -> None:
        self._client, self._name, self._first, self._expected, self._wait = client, name, first, expected, wait
        self._events = Watch(client.watch(name, None), None)
        self.lease: Lease | None = None
        # A cancelled step ends a moment later.
        self._lock = allocate_lock()
        # The id of the last returned version, and whether an event may have been read by a step that returned none.
        self._returned = ""
        self._missed = False

    def __next__(self) -> Lease:
        lease = self._step()
        if lease is None:
            raise StopIteration
        self._returned = lease.id
        return lease

    def __aiter__(self) -> Follower:
        return self

    async def __anext__(self) -> Lease:
        from ._async import in_thread

        # Not the lease itself, which a cancellation would close.
        (lease,) = await in_thread(lambda: (self._step(),))
        if lease is None:
            raise StopAsyncIteration
        self._returned = lease.id
        return lease

    def close(self) -> None:
        """Closes the lease, and interrupts a step in another thread."""
        self._events.close()
        if self.lease is not None:
            self.lease.close()

    def __repr__(self) -> str:
        return f"<vmmfd.Follower of {self._name}: {self.lease!r}>"

    def _step(self) -> Lease | None:
        with self._lock:
            if self._events.is_closed:
                return None
            if self.lease is None:
                try:
                    self.lease = Lease(self._client, self._client.get(self._name, self._first))
                except (Timeout, NotFound) as error:
                    if not _is_absent(error):
                        raise
            # A cancelled step may have got or switched it.
            elif self.lease.id == self._returned and not self._switch(self.lease):
                return None
            return self.lease

    def _switch(self, lease: Lease) -> bool:
        """Switches the lease to the next version. Returns False if none was put in time."""
        ends = monotonic() + _arguments.seconds(_arguments.endless(self._wait))
        missed, self._missed = self._missed, True
        while True:
            if not missed:
                event = self._events.next(max(0.0, ends - monotonic()))
                if event is None:
                    self._missed = False
                    return False
                is_new = event.kind in ("published", "replaced") and event.name == self._name and event.id != lease.id
                if not is_new and event.kind != "lost":
                    continue
            missed = False
            try:
                prepared = lease.prepare(self._name, **self._expected)
            except NotFound as error:
                if _is_absent(error):  # Deleted again.
                    continue
                raise
            with prepared:
                if prepared.id != lease.id:
                    lease.switch(prepared, exports_unused=True).close()
                    self._missed = False
                    return True


def _is_absent(error: Timeout | NotFound) -> bool:
    """Returns whether an error means that there is no such object, and not that there is no such array."""
    return type(error) is Timeout or type(error) is NotFound and error.kind == "object"
