"""Streams: a publisher passes buffers of one pool to any number of subscribers."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping
from time import monotonic

from . import _arguments, _errors, _native
from . import _types as t
from ._closing import Closing
from ._errors import Crashed, Ended, Error, Invalid, Timeout
from ._native import Array, Device
from ._native import Buffer as NativeBuffer
from ._native import Subscriber as NativeSubscriber
from ._native import TopicFollower as NativeFollower
from .records import Peer, Publication, PublisherStats, StreamEvent, Usage

# Not imported from `typing`, whose import takes longer than this package's.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeVar

    from ._broker import Broker

    Received = TypeVar("Received", "Sample", "Update")
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


def _octets(value: t.Any, what: str) -> bytes:
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise TypeError(f"{what}={_arguments.shown(value)} has type {type(value).__name__}: give bytes")
    return bytes(value)


def _usages(of: list[_native._Usage]) -> tuple[Usage, ...]:
    return tuple(Usage(*subscriber, *counts) for subscriber, counts in of)


def _stats(published: int, free: int, subscribers: list[_native._Usage]) -> PublisherStats:
    return PublisherStats(published, free, _usages(subscribers))


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

    def publish(self, user: bytes = b"") -> Publication:
        """Publishes the buffer, with at most 4096 bytes of your own: returns its number, and the number of subscribers that were given
        it at once. On a GPU, first waits for all work of this process. Does not wait for subscribers.

        **Do not write to the buffer afterwards**: subscribers read it. Arrays of this package then raise, but views of other libraries do
        not. Raises `Invalid` for too many bytes, if it is published or closed, or while another thread copies to it."""
        return Publication(*self._native.publish(_octets(user, "user")))


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
        return self._native.set_format(rows, _octets(blob, "blob"))

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


class _Receiver(Closing, Iterable[Received], AsyncIterable[Received]):
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
        ends = monotonic() + _arguments.seconds(_arguments.endless(wait))
        received = self._class.__new__(self._class)
        while self._native.wait(max(0.0, ends - monotonic())):
            # From here to the return Python runs no signal handler, whose exception would lose the sample: there is no call.
            if (taken := self._native.taken) is not None:
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


class Subscriber(_Receiver[Sample]):
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


class Update(Closing):
    """What happened in a topic: `TopicFollower.receive`. A context manager that gives its sample back, if it has one."""

    __slots__ = ("__weakref__", "_native")

    _native: tuple[str, int, str, NativeBuffer | None, tuple[int, int] | None, tuple[str, str, str, str | None] | None]

    @property
    def topic(self) -> str:
        """The topic's name."""
        return self._native[0]

    @property
    def epoch(self) -> int:
        """The publisher's run. The next publisher of the topic has another epoch, and numbers its publications anew."""
        return self._native[1]

    @property
    def kind(self) -> str:
        """`joined` (the first publisher of the topic), `reset` (a later one, whose format may differ), `sample`, `ended` (the publisher has
        finished), `crashed` (it died, or closed the stream without finishing it), or `failed`: it can't be joined, or has ended this
        subscription, and is not joined again."""
        return self._native[2]

    @property
    def sample(self) -> Sample | None:
        """The sample, if the kind is `sample`."""
        return None if self._native[3] is None else Sample(self._native[3])

    @property
    def peer(self) -> Peer | None:
        """The publisher's process, if the kind is `crashed`."""
        return None if self._native[4] is None else Peer(*self._native[4])

    @property
    def error(self) -> Error | None:
        """The error, if the kind is `failed`."""
        if self._native[5] is None:
            return None
        name, message, kind, hint = self._native[5]
        found: Error = getattr(_errors, name)(message, kind=kind, hint=hint)
        return found

    def close(self) -> None:
        """Closes the sample, if there is one. Closing twice does nothing."""
        if self._native[3] is not None:
            self._native[3].close()

    def __repr__(self) -> str:
        return f"<vmmfd.Update {self.topic}: {self.kind}>"


class TopicFollower(_Receiver[Update]):
    """Receives from the publishers of topics: `Broker.follow_topics`. Stays through the ends of publishers and of the broker. Threads and
    tasks may share it: each update goes to one of them. A context manager that closes it.

    An iterable of `Update`, also for `async for`: the iteration ends only when another thread closes the follower. Each step closes the
    sample of the step before; its arrays remain valid. Raises `Invalid` after `close` and in a fork. An interrupted or cancelled call loses
    no update.
    """

    __slots__ = ()

    _native: NativeFollower
    _class = Update

    def topics(self) -> list[str]:
        """The topics whose publishers are joined now. Does not wait."""
        return self._native.topics()
