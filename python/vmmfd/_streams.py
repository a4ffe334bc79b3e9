"""Streams: a publisher passes buffers of one pool to any number of subscribers."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping
from time import monotonic

from . import _arguments, _native, _order
from . import _types as t
from ._buffers import Loan, Sample, octets
from ._closing import Closing
from ._errors import Crashed, Ended, Error, Invalid, Timeout
from ._native import Device
from ._native import Subscriber as NativeSubscriber
from .records import Order, Peer, PublisherStats, StreamEvent, Usage

# Not imported from `typing`, whose import takes longer than this package's.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeVar

    from ._broker import Broker
    from ._topics import Update

    Received = TypeVar("Received", Sample, Update)
else:
    Broker = Received = object


def publish(
    path: t.Path | t.Socket | None = None,
    *,
    topic: str | None = None,
    broker: Broker | None = None,
    mode: int | None = None,
    size: int | None = None,
    count: int | None = None,
    budget: int | None = None,
    history: int = 0,
    loans: int = 1,
    every: t.Time | None = None,
    placement: t.Literal["device", "host"] = "device",
    device: t.DeviceName | None = None,
    backend: str | None = None,
    timeout: t.Time = 30.0,
    trust: Iterable[int] = (),
) -> Publisher:
    """Creates a stream: allocates a pool of buffers, and accepts subscribers from now on. Does not wait for them.

    `path` is the socket's path; `None` is this user's default. Or it is a connected socket of type `SOCK_SEQPACKET`, whose other end
    subscribes: the caller's socket stays open. With a `topic` at a `broker`, it may be omitted: subscribers then come only from there. See
    `Publisher.open_topic`, also for `mode`; `backend` is by default the broker client's.

    Either `size` and `count` give a pool of `count` buffers of `size` bytes, or `budget` gives a
    pool of this number of bytes for buffers of any size. A fixed pool needs a buffer for each one that a subscriber may hold, the `history`,
    the `loans`, and one more: else a subscriber is refused.

    `history` is the number of publications that a late subscriber can receive at once, and `loans` the most buffers on loan at a time.
    `every`, in seconds or a `timedelta`, allows subscribers that skip nothing: a loan waits for each of them at most this long, and then
    evicts it. `placement="host"` puts the pool into the host memory near the `device` of `backend`. `timeout`, in seconds or a `timedelta`,
    is the longest silence of a subscriber that joins. `trust` lists the user ids that subscribers may run as, besides root and this process's own.

    Raises `Invalid`, `OutOfMemory`, `Unsupported`, and `Error` if another process listens at the path. With a topic, also as
    `Publisher.open_topic`.
    """
    if (topic is None) != (broker is None) or (mode is not None and topic is None):
        raise Invalid("topic names a topic at a broker, and mode is its permissions: give topic and broker together")
    fixed = size is not None and count is not None and budget is None
    if not fixed and (size is not None or count is not None or budget is None):
        raise Invalid("a pool has either size and count, for buffers of one size, or budget, for buffers of any size")
    publisher = Publisher(
        _native.Publisher(
            path,
            {
                "listens": path is not None or topic is None,
                "size": _arguments.whole(size, "size"),
                "room": _whole(count, "count", 32) if fixed else _whole(budget, "budget"),
                "history": _whole(history, "history", 32),
                "loans": _whole(loans, "loans", 32),
                "trust": _arguments.users(trust, "trust"),
                "every": every,
                "placement": placement,
                "device": device,
                "backend": _native_of(broker).backend if backend is None and broker is not None else backend,
                "timeout": timeout,
            },
        )
    )
    if topic is not None and broker is not None:
        try:
            publisher.open_topic(broker, topic, mode)
        except BaseException:
            publisher.close()
            raise
    return publisher


def subscribe(
    path: t.Path | t.Socket | None,
    *,
    policy: t.Literal["latest", "every"] = "latest",
    queue: int | None = None,
    held: int = 2,
    history: int = 0,
    device: t.DeviceName | None = None,
    backend: str | None = None,
    wait: t.Time = 30.0,
    trust: Iterable[int] = (),
) -> Subscriber:
    """Subscribes to the stream of a `publish` call, or of a Rust or C program. Maps its pool, read-only.

    `path` is the socket's path; `None` is this user's default. Or it is a connected socket of type `SOCK_SEQPACKET`: the caller's socket
    stays open. With `policy="latest"`, a slow subscriber skips to the newest buffer; with `queue=N`, at most N buffers wait for it, and the
    oldest is dropped; with `policy="every"` it skips nothing, if the publisher allows that.

    `held` is the most buffers that this process has at a time: samples, and the one that comes next. A loop still has the last sample and its
    arrays while it waits for the next one, so the default is 2. `history` is the number of earlier publications to receive at once. `device`
    is the device to use the pool on, by default the one that has it. `wait`, in seconds or a `timedelta`, is how long to wait for a
    publisher and for each of its answers. `trust` lists the user ids that the publisher may run as, besides root and this process's own.

    Raises `Timeout` if no publisher listens in time, `NotFound` with `wait=0`, `Error` if the publisher's pool is too small for one more
    subscriber, `PermissionDenied`, also if it does not allow `every`, `Disconnected`, `Unsupported`, `Invalid`.
    """
    return Subscriber(_native.Subscriber(path, request(policy, queue, held, history, device, backend, wait, trust)), held)


def request(
    policy: str,
    queue: int | None,
    held: int,
    history: int,
    device: t.DeviceName | None,
    backend: str | None,
    wait: t.Time,
    trust: Iterable[int],
) -> dict[str, t.Any]:
    """Returns the options of a subscriber or follower, checked."""
    if policy not in ("latest", "every"):
        raise Invalid(f'policy={_arguments.shown(policy)} is not "latest" or "every": give queue= for a queue')
    if queue is not None and policy == "every":
        raise Invalid('queue= drops buffers, and policy="every" drops none: give one of them')
    return {
        "every": policy == "every",
        "queue": _arguments.whole(queue, "queue", 16),
        "held": _whole(held, "held", 16),
        "history": _whole(history, "history", 16),
        "trust": _arguments.users(trust, "trust"),
        "device": device,
        "backend": backend,
        "wait": wait,
    }


def _native_of(broker: t.Any) -> _native.Client:
    client = getattr(broker, "_native", None)
    if not isinstance(client, _native.Client):
        raise TypeError(f"broker={_arguments.shown(broker)} has type {type(broker).__name__}: give a Broker, of vmmfd.connect")
    return client


def _whole(value: t.Any, what: str, bits: int = 64) -> int:
    return _arguments.needed(_arguments.whole(value, what, bits), what)


def _usages(of: list[_native._Usage]) -> tuple[Usage, ...]:
    return tuple(Usage(*subscriber, *counts) for subscriber, counts in of)


def _stats(published: int, free: int, subscribers: list[_native._Usage]) -> PublisherStats:
    return PublisherStats(published, free, _usages(subscribers))


class Publisher(Closing):
    """The publisher of a stream: `publish`. Threads may share it.

    A context manager: leaving the block completes the stream, as `finish()`; an exception closes it, and subscribers see a crash. Raises
    `Invalid` after `close` and `finish`, and in a fork. Waits raise `Interrupted` if another thread closes it.
    """

    __slots__ = ("__weakref__", "_native")

    def __init__(self, publisher: _native.Publisher) -> None:
        self._native = publisher

    def admit(self, socket: t.Socket) -> None:
        """Accepts the subscriber at the other end of a connected `socket` of type `SOCK_SEQPACKET`. The caller's socket stays open. Does not
        wait. Raises `TypeError` and `Error` for another socket."""
        self._native.admit(socket)

    def open_topic(self, broker: Broker, topic: str, mode: int | None = None) -> None:
        """Lets a broker introduce subscribers under the name `topic`, until this publisher finishes or is closed. A publisher may have several
        topics. `mode` sets the permissions as in `Broker.put`: by default only this user follows the topic. The topic outlives the client
        `broker`, and a restart of the broker: the streams go on, and new subscribers wait for the next broker.

        Raises `AlreadyExists` while another publisher has the topic, and as any call of the `Broker`."""
        self._native.open_topic(_native_of(broker), topic, _arguments.mode(mode))

    def set_format(self, arrays: Mapping[str, t.Any], blob: bytes = b"") -> int:
        """Describes the buffers that are published from now on: at most 64 `arrays` by name, and a `blob` of at most 64 KiB.

        Each array is a tuple of its dtype, its shape and, if you choose it, its offset in bytes; or an array of that dtype and shape.
        Without an offset, it follows the array before it, at a multiple of 256 bytes. Returns the number of bytes that the arrays need.
        Raises `Invalid` if they do not fit into a buffer of the fixed size, `TypeError`."""
        rows: list[tuple[str, t.Any, t.Any, int | None]] = []
        for name, array in dict(arrays).items():
            given = (array.dtype, tuple(array.shape)) if hasattr(array, "shape") and hasattr(array, "dtype") else array
            if not isinstance(given, tuple) or len(given) not in (2, 3):
                raise TypeError(f"arrays[{_arguments.shown(name)}]={_arguments.shown(array)} is not (dtype, shape) or (dtype, shape, offset)")
            dtype, shape, offset = (*given, None)[:3]
            rows.append((name, dtype, shape, _arguments.whole(offset, f"the offset of {_arguments.shown(name)}")))
        return self._native.set_format(rows, octets(blob, "blob"))

    def loan(self, size: int | None = None, wait: t.Time = 30.0) -> Loan:
        """Takes a free buffer, of `size` bytes if sizes vary. Waits at most `wait` seconds (or a `timedelta`), and only for this process's
        other loans, for subscribers that skip nothing, and for room if sizes vary.

        Raises `Timeout` after this time, with the holders of the buffers; `Invalid` for a size that no buffer has."""
        loan = self._native.loan(_arguments.whole(size, "size"), _arguments.seconds(wait))
        assert loan is not None, "a wait ends with a loan or an error"
        return Loan(loan)

    def try_loan(self, size: int | None = None) -> Loan | None:
        """Takes a free buffer as `loan`, or returns None if there is none now. Raises `Invalid`. `size` is in bytes."""
        loan = self._native.loan(_arguments.whole(size, "size"), None)
        return None if loan is None else Loan(loan)

    def event(self) -> StreamEvent | None:
        """Removes and returns the oldest event, or returns None. Does not wait. Beyond 1024 events, the oldest are dropped."""
        found = self._native.event()
        if found is None:
            return None
        kind, subscriber, orderly, by = found
        return StreamEvent(kind, *(subscriber or (None,) * 5), orderly, _usages(by))

    def events(self) -> list[StreamEvent]:
        """Removes and returns all events. Does not wait."""
        return list(iter(self.event, None))

    def stats(self) -> PublisherStats:
        """The number of publications, the free buffers or bytes, and the subscribers that have buffers. Does not wait."""
        return _stats(*self._native.stats())

    @property
    def order(self) -> Order:
        """How publications with a stream reach subscribers: "gpu" if their streams wait for this process's, or "cpu" with the reason. Before
        the first publication with a stream, it is the device's claim."""
        return Order(*self._native.order)

    def evict(self, id: int) -> bool:
        """Ends the subscription of a subscriber, by the `id` in an event or in `stats`. Its buffers remain out of use until it gives them
        back, or its process exits. Returns False if there is no such subscriber. Raises `TypeError` for another type. Does not wait."""
        return self._native.evict(_whole(id, "id"))

    def finish(self, wait: t.Time = 30.0) -> PublisherStats:
        """Completes the stream, and closes this publisher. Waits at most `wait` seconds (or a `timedelta`) until all subscribers have received
        and given back everything. Subscribers that have not by then see the end too. Returns the use of the pool at that time. Raises as
        any call of the publisher."""
        return _stats(*self._native.finish(wait))

    def fileno(self) -> int:
        """Returns a descriptor for select(2), poll(2), epoll(7) and `loop.add_reader` of asyncio. It is readable when an event waits, or a
        buffer may be free: then call `events` and `try_loan`. The publisher owns it. Do not read it."""
        return self._native.fileno()

    @property
    def device(self) -> Device:
        """The device that has the pool."""
        return self._native.device

    @property
    def is_closed(self) -> bool:
        """Whether it is closed or finished."""
        return self._native.is_closed

    def close(self) -> None:
        """Ends the stream at once: subscribers that have not seen the end see a crash. Their samples remain valid, and so do this process's
        loans. Interrupts the waits of other threads. Closing twice does nothing."""
        self._native.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: t.TracebackType | None
    ) -> None:
        try:
            if kind is None and not self.is_closed:
                self.finish()
        finally:
            self.close()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: t.TracebackType | None
    ) -> None:
        from ._async import in_thread

        await in_thread(lambda: self.__exit__(kind, error, traceback))


class Receiver(Closing, Iterable[Received], AsyncIterable[Received]):
    """What a subscriber and a follower have in common. Threads and tasks may share it."""

    __slots__ = ("__weakref__", "_native", "_wakes")

    _native: t.Any
    # The class of what it receives, which has the attribute `_native`.
    _class: type[Received]

    def __init__(self, native: t.Any) -> None:
        self._native = native
        # Wake the tasks that wait.
        self._wakes: set[Callable[[], object]] = set()

    def receive(self, wait: t.Time | None = None) -> Received:
        """Returns the next `Sample`, or of a follower the next `Update`. Waits at most `wait` seconds (or a `timedelta`); None waits for ever.

        Raises `Timeout` after this time, `Interrupted` if another thread closes this. A subscriber raises `Ended` at the end of the stream,
        `Crashed` if the publisher died or closed the stream without finishing it, and `Disconnected` if it evicted this subscriber or broke
        the protocol."""
        return self._receive(self._native, wait)

    def _receive(self, native: t.Any, wait: t.Time | None) -> Received:
        ends = monotonic() + _arguments.seconds(_arguments.endless(wait))
        received = self._class.__new__(self._class)
        while native.wait(max(0.0, ends - monotonic())):
            # From here to the return Python runs no signal handler, whose exception would lose the sample: there is no call.
            if (taken := native.taken) is not None:
                received._native = taken
                return received
            self._check_end()
        raise Timeout(self._late(f"within {_arguments.shown(wait)} seconds"), kind="peer")

    def try_receive(self) -> Received | None:
        """Returns what `receive` would return, if it has arrived, else None. Does not wait. Raises as `receive`."""
        received = self._class.__new__(self._class)
        while self._native.wait(0):
            if (taken := self._native.taken) is not None:
                received._native = taken
                return received
            self._check_end()
        return None

    async def receive_async(self) -> Received:
        """As `receive`, for asyncio. If the task is cancelled, no sample is lost. Raises as `receive`, and `RuntimeError` without a running
        event loop."""
        while (received := self.try_receive()) is None:
            await self._readable()
        return received

    async def _readable(self) -> None:
        """Waits until `try_receive` may return something or raise."""
        import asyncio
        import os

        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        # A duplicate: each task has its own, and it stays open if this is closed meanwhile.
        descriptor = os.dup(self.fileno())

        def wake() -> None:
            loop.call_soon_threadsafe(ready.set)

        self._wakes.add(wake)
        loop.add_reader(descriptor, ready.set)
        try:
            if not self.is_closed:
                await ready.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
            self._wakes.discard(wake)

    def _check_end(self) -> None:
        """Raises at the end of the stream."""

    def _late(self, when: str) -> str:
        return f"no update arrived {when}"

    def _is_over(self, error: Error) -> bool:
        return isinstance(error, Ended) or self.is_closed

    def __iter__(self) -> Iterator[Received]:
        while True:
            try:
                received = self.receive()
            except Error as error:
                if self._is_over(error):
                    return
                raise
            yield received
            # The loop's variable still refers to it.
            received.close()

    async def __aiter__(self) -> AsyncIterator[Received]:
        while True:
            try:
                received = await self.receive_async()
            except Error as error:
                if self._is_over(error):
                    return
                raise
            yield received
            received.close()

    def fileno(self) -> int:
        """Returns a descriptor for select(2), poll(2), epoll(7) and `loop.add_reader` of asyncio. When it is readable, call `try_receive` until
        it returns None. This object owns it. Do not read it."""
        return int(self._native.fileno())

    @property
    def is_closed(self) -> bool:
        """Whether it is closed."""
        return bool(self._native.is_closed)

    def close(self) -> None:
        """Leaves the stream, or all streams. Samples remain valid, and are given back when they are dropped. Ends the iterations and waits of
        other threads and tasks. Closing twice does nothing."""
        self._native.close()
        for wake in list(self._wakes):
            wake()


class Subscriber(Receiver[Sample]):
    """The subscriber of a stream: `subscribe`. Threads and tasks may share it: each sample goes to one of them. A context manager that closes it.

    An iterable, also for `async for`: the iteration ends with the stream, or when another thread closes the subscriber. Each step closes the
    sample of the step before; its arrays remain valid. Raises `Crashed` if the publisher died. After that and after the end, samples remain
    valid. Raises `Invalid` after `close` and in a fork. An interrupted or cancelled call loses no sample.
    """

    __slots__ = ("_held",)

    _native: NativeSubscriber
    _class = Sample

    def __init__(self, subscriber: NativeSubscriber, held: int) -> None:
        super().__init__(subscriber)
        self._held = held

    def receive(self, wait: t.Time | None = None, *, stream: t.Any = None) -> Sample:
        """Returns the next `Sample`. Waits at most `wait` seconds (or a `timedelta`); None waits for ever.

        With a `stream`, as for `Timeline.record`, the sample is for work on this stream: the call does not wait until the publisher's GPU has
        written the buffer. The stream waits, also at most `wait` seconds; after that, or if the publisher dies, the stream goes on and
        `Sample.completion` is "lost". Closing or dropping the sample gives it back behind the work that the stream then has. DLPack consumers
        on the same stream get the memory at once, and others once the stream is done; `tobytes` and other copies wait too. If `order` is "cpu",
        the call waits until the buffer is written. The first call takes about a millisecond longer.

        Raises `Timeout` after the wait, `Interrupted` if another thread closes this, `Ended` at the end of the stream, `Crashed` if the
        publisher died or closed the stream without finishing it, and `Disconnected` if it evicted this subscriber, was late with GPU work,
        or broke the protocol. For a stream also as `Loan.publish`, and `Invalid` for the per-thread default stream and for a `wait` of 0."""
        given = _order.given(stream)
        if given is None:
            return self._receive(self._native, wait)
        _arguments.limit(_arguments.endless(wait), "wait")
        return self._receive(self._native.on_stream(given), wait)

    def _late(self, when: str) -> str:
        problem, held = f"no buffer arrived {when}", self.held
        if held >= self._held:
            problem += f": this process still has {held} samples or arrays of them, and held={self._held} allows no more: close or drop one"
        return problem

    def _check_end(self) -> None:
        end = self._native.end
        if end is None:
            return
        if not end:
            raise Ended("the publisher has finished the stream", kind="peer")
        peer = Peer(*end)
        raise Crashed(f"the publisher, pid {peer.pid}, died or closed the stream without finishing it", kind="peer", peer=peer)

    @property
    def order(self) -> Order:
        """Whether the streams of `receive` wait for the publisher's ("gpu"), or the CPU does, with the reason ("cpu"). The first call tests it,
        in about a millisecond."""
        return Order(*self._native.order)

    @property
    def held(self) -> int:
        """The number of buffers that this process has now: samples, and closed samples with arrays that still exist."""
        return self._native.held

    @property
    def device(self) -> Device:
        """The device on which this process uses the pool."""
        return self._native.device

    @property
    def peer(self) -> Peer:
        """The publisher's process."""
        return Peer(*self._native.peer)
