"""The broker client: named objects."""

from __future__ import annotations

from builtins import list as List
from collections.abc import Callable, Iterable, Mapping

from . import _arguments, _native
from . import _types as t
from ._errors import Invalid, NoArray, NotFound, Timeout
from ._gets import Gets
from ._lease import Claim, Lease, keeping_calls
from ._streams import request
from ._topics import TopicFollower
from ._watch import Watch
from .records import Holders, Lost, Published, Recall, Restored, Stat, Summary


def connect(
    path: t.Path | None = None,
    *,
    backend: str | None = None,
    timeout: t.Time = 30,
    wait: t.Time = 1,
    trust: Iterable[int] = (),
) -> Broker:
    """Connects to the broker that listens at `path`.

    `path` defaults to the environment variable `VMMFD_BROKER_SOCKET`, else `$XDG_RUNTIME_DIR/vmmfd/broker.sock`, else
    `/tmp/vmmfd-UID/broker.sock`. If no broker listens there and `/run/vmmfd/broker.sock` exists, it is used instead. `backend` selects
    where memory is allocated and mapped: `"cuda"`, `"host"` (ordinary shared memory), or `"auto"`: `get` uses memory where it is, and `put`
    copies to a GPU if there is one; by default the environment variable `VMMFD_BACKEND`, as for the commands, else `"auto"`. The driver is
    loaded on first use of memory. Times are in seconds or a `timedelta`: `wait` is how long to wait now for a broker to listen, and
    `timeout` limits how long the broker may be silent, and how long later calls wait for it while it restarts. `trust` lists the user ids
    that the broker may run as, besides root and this process's own.

    Blocks until the broker answers. Ctrl-C interrupts it. While a call waits longer than a second for a broker, now or after the broker's
    death, the logger `vmmfd` (see `logging`) gets one warning: the path, and how long the call waits.

    Raises `NotFound` if no broker listens within `wait`, `PermissionDenied` if this user may not connect or the broker runs as an untrusted
    user, `Disconnected` if the process at the other end is not a broker, `Invalid` for an invalid argument.
    """
    return Broker(path, backend=backend, timeout=timeout, wait=wait, trust=trust)


class Broker(Gets):
    """A broker client: see `connect`. A context manager that closes it.

    Thread-safe: each call in progress uses its own connection. Times are in seconds or a `timedelta`. `wait` is how long a call waits for
    an object, a part or an event that may come later: 0 does not wait, and None (where it is allowed) or `float("inf")` waits for ever; a
    wait that expires raises `Timeout`. `timeout` is how long the broker may leave a request unanswered, and is set by `connect`. Calls
    release the GIL. In the main thread, Ctrl-C interrupts a wait, a copy and the allocation of host memory, but not a driver call of a GPU;
    `close` interrupts the waits of all threads. If the broker restarts, the client reconnects within the timeout, repeats interrupted calls
    safely, and keeps its leases.

    A client belongs to the process that created it: in a fork, every call fails. Connect in each process, or let `multiprocessing` do it
    with `vmmfd.register_reducer`.

    Any call may raise `Disconnected` if no broker listens any more or the broker is silent for longer than the timeout, and `Interrupted` if
    the client is closed during the call.
    """

    __slots__ = ("__weakref__", "_native")

    def __init__(
        self,
        path: t.Path | None = None,
        *,
        backend: str | None = None,
        timeout: t.Time = 30,
        wait: t.Time = 1,
        trust: Iterable[int] = (),
    ) -> None:
        self._native = _native.Client(path, backend, timeout, wait, _arguments.users(trust, "trust"))

    @property
    def path(self) -> str:
        """The path of the broker's socket."""
        return str(self._native.path)

    @property
    def backend(self) -> str:
        """The chosen backend: `"auto"`, `"cuda"` or `"host"`."""
        return self._native.backend

    @property
    def is_closed(self) -> bool:
        """Whether the client is closed."""
        return self._native.is_closed

    def close(self) -> None:
        """Interrupts the waits of other threads, which raise `Interrupted`, and closes all connections that no lease needs. Leases stay
        valid until they are closed. Names with the lifetime `"maker"` are deleted. Closing twice does nothing. Does not block."""
        self._native.close()

    def __repr__(self) -> str:
        closed = ", closed" if self.is_closed else ""
        return f"<vmmfd.Broker: {self.path}, backend {self.backend}{closed}>"

    def __reduce__(self) -> t.Any:
        raise TypeError("a Broker can't be pickled: call vmmfd.register_reducer() to send it with multiprocessing, or connect again")

    def put(
        self,
        name: str,
        value: t.Any,
        *,
        metadata: t.Json | None = None,
        replace: bool = False,
        replace_version: int | None = None,
        mode: int | None = None,
        lifetime: t.Literal["deleted", "maker", "leased"] | t.Time | None = None,
        keep: int | None = None,
        part: str | None = None,
        parts: Iterable[str] | None = None,
        group: str | None = None,
        wait: t.Time = 0,
        seal: bool = False,
        copy: bool | None = None,
        digest: str | None = None,
        device: t.DeviceName | None = None,
        exports_unused: bool = False,
        rdma: t.Rdma = "auto",
        recall_old: t.Time | None = None,
    ) -> Published:
        """Publishes memory under a name. Once it returns, the object is published, and this process may drop the memory or exit.

        `value` is a mapping of names to arrays. An `Array` that this process created is shared without a copy; any other object with
        DLPack, an array interface or the buffer protocol is copied to new memory, on `device` if given. A PyTorch module or its state dict,
        and `vmmfd.Weights`, are put without a copy where their memory can be shared. `copy=False` refuses values that need a copy.
        `copy=True` copies everything, and refuses `Weights`: put `dict(weights)`. Do not write to memory after putting it.

        `metadata` is a mapping that JSON can express, of at most 1 MiB. `replace=True` adds a version to an existing name;
        `replace_version=N` replaces only version N. `mode` sets the permissions of a
        new name, `0o600` by default and `0o666` at most: `r` allows get and list, `w` allows replace. `lifetime` is when the name is
        deleted: `"deleted"` (only explicitly; the default), `"maker"` (when this Broker is closed), `"leased"` (when this Broker is closed
        and no lease is held), or a number of seconds after the last lease. `keep` is the number of older versions to keep without a lease.
        `digest` identifies the bytes, in any format that the readers agree on, of at most 255 bytes.

        Several processes can put one version together: each gives its own `part`, the names of all `parts`, and a `group` unique to this
        version, and waits up to `wait` (seconds or a `timedelta`) for the other parts. One of them gives the metadata.

        `seal=True` makes this process's own mapping read-only after the put. A write through an address then faults, so sealing is refused
        while other libraries have writable views of the memory, unless `exports_unused=True` promises that none is used. Copies on the host
        backend are always sealed by the kernel.

        `rdma` applies to the memory of copies, as in `vmmfd.empty`. Memory that is shared without a copy keeps its own setting; with
        `rdma=True` RDMA must be able to reach it.

        `recall_old` recalls the name's earlier versions once the new one is published, and waits up to so many seconds (or a `timedelta`)
        for their holders: see `recall`, whose result is `Published.recall`. A holder that remains, or an error of the recall, does not undo
        the put.

        Blocks until all work on the device is done and the broker has answered. It synchronises the device's primary context, which
        invalidates any CUDA graph capture in progress there in this process: put before or after a capture.

        Raises `AlreadyExists` if the name is taken, `MismatchError` if the current version is not the one to replace, `PermissionDenied` if
        another user owns the name, `ExportError` (a `BufferError`) if `copy=False` would need a copy or such views prevent `seal=True`,
        `Invalid` for an invalid argument, `Unsupported` if RDMA can't reach memory and `rdma=True`, `OutOfMemory`, `Timeout` if other parts
        are missing, and `Error` if a quota or the broker is full.
        """
        if _arguments.seconds(wait) != 0 and parts is None:
            raise Invalid(f"wait={_arguments.shown(wait)} is the time to wait for the other parts: give part, parts and group too, or omit wait")
        _arguments.flag(seal, "seal")
        if copy is not None:
            _arguments.flag(copy, "copy")
        if recall_old is not None:
            _arguments.seconds(recall_old, "recall_old")
        mode, keep = _arguments.mode(mode), _arguments.whole(keep, "keep", 32)
        if part is not None and _arguments.text(part, "part") == "":
            raise Invalid("part='' is empty: name the part, or omit part for an object of one part")
        if digest is not None:
            _arguments.text(digest, "digest")
        # Imported here: most processes put nothing.
        from ._parts import check_rdma, plan

        plans, additions, keep_alive = plan(
            self._native, value, part=part, device=device, copy=copy, seal=seal, rdma=_arguments.rdma(rdma)
        )
        if rdma is True:
            check_rdma(plans)
        if digest is not None:
            if len(plans) != 1:
                raise Invalid(f"digest={digest!r} describes one part, but this value has {len(plans)}")
            plans = [(*plans[0][:3], digest)]
        listed = None if parts is None else _arguments.names(parts, "parts")
        # Only one put of each version may give metadata.
        if additions and (listed is None or metadata is not None or listed[:1] == [part]):
            metadata = {**additions, **(metadata or {})}
        promised = _arguments.flag(exports_unused, "exports_unused")
        if seal:
            _native.check_read_only([memory for planned in plans for memory in planned[1]], promised)
        version, id = self._native.put(
            name,
            plans,
            replace=_arguments.condition(replace, replace_version),
            metadata=metadata,
            mode=mode,
            lifetime=lifetime,
            keep=keep,
            announced=listed,
            group=group,
            wait=wait,
        )
        if seal:
            for planned in plans:
                for memory in planned[1]:
                    _native.make_read_only(memory, promised)
        del keep_alive
        copied = sum(memory.size for _, memories, _, _ in plans for memory in memories if memory.copied)
        recall = None if recall_old is None else self.recall(name, earlier=True, wait=recall_old)
        return Published(name, version, id, copied, recall)

    async def put_async(self, name: str, value: t.Any, **options: t.Any) -> Published:
        """As `put`, for asyncio, with its options: the event loop runs other tasks meanwhile. If the task is cancelled, the object may have
        been published. Do not change the value meanwhile. Raises as `put`, and `RuntimeError` without a running event loop."""
        from ._async import in_thread

        return await in_thread(lambda: self.put(name, value, **options))

    def claim(
        self,
        name: str,
        *,
        part: str | None = None,
        group: str | None = None,
        **options: t.Unpack[t.ClaimOptions],
    ) -> Lease | Claim:
        """Leases an object, or returns the right to create it.

        If several processes claim a missing object at once, one gets a `Claim` and should put the object. The others wait, up to `wait` in
        seconds or a `timedelta`, until it is put or the claim passes to one of them. A claim covers the whole object, or one `part` of the
        version with this `group`. The other arguments are as for `get`. Raises as `get`, so `NotFound` if another process has the claim and
        `wait` is 0.
        """
        given = _arguments.options(options, "version", "newer_than")
        try:
            found = self._native.claim(name, part, group, given)
        except Timeout as error:
            if _arguments.seconds(given["wait"] or 0) > 0:
                raise
            # The broker waits for claims, here for no time.
            text = str(error).removesuffix(": waited 0 ms")
            raise NotFound(text, kind="object", hint=error.hint) from None
        return Claim(self.put, name, found) if isinstance(found, _native.Claim) else Lease(self._native, found)

    async def claim_async(
        self, name: str, *, part: str | None = None, group: str | None = None, **options: t.Unpack[t.ClaimOptions]
    ) -> Lease | Claim:
        """As `claim`, for asyncio. If the task is cancelled, no lease and no claim is left. Raises as `claim`, and `RuntimeError` without a
        running event loop."""
        from ._async import in_thread

        return await in_thread(lambda: self.claim(name, part=part, group=group, **options))

    def list(self, prefix: str = "") -> List[Summary]:
        """Returns the objects whose names start with `prefix` and that this user may read, ordered by name. Raises as any call."""
        return Summary._all(self._native.list(prefix))

    def stat(self, name: str, version: int | None = None) -> Stat:
        """Describes a version of an object, by default the current one. Maps nothing: `stat(name).parts[0].mapped_size` is the memory that
        a part needs. Raises `NotFound` if there is no such object or version."""
        return Stat._of(self._native.stat(name, _arguments.whole(version, "version")))

    def bytes_of(self, name: str, version: int | None = None, *, parts: Iterable[str] | None = None) -> int:
        """Returns the bytes of memory that a get of the object, or only of `parts`, maps. Maps nothing. Raises `NotFound` if there is no
        such object, `NoArray` (a `KeyError`) if it has no such part."""
        sizes = {part.name: part.mapped_size for part in self.stat(name, version).parts}
        wanted = sizes if parts is None else dict.fromkeys(_arguments.names(parts, "parts"))
        for part in wanted:
            if part not in sizes:
                raise NoArray(f"{name!r} has no part {part!r}; it has {', '.join(sizes)}", kind="object")
        return sum(sizes[part] for part in wanted)

    def who(self, prefix: str = "") -> Holders:
        """Returns the leases of objects and the topics whose names start with `prefix` and that this user may read, and each user's totals.
        Root and the broker's user see all users, others only themselves. Raises as any call."""
        return Holders._of(self._native.who(prefix))

    def watch(self, prefix: str = "", *, after: str | None = None, wait: t.Time | None = None) -> Watch:
        """Follows events of names that start with `prefix` and that this user may read: from now on, or from `after`, the `Watch.place` of
        an earlier watch, possibly of another process. Iterate over it: each step waits for the next event. The iteration stops if no event
        arrives within `wait` seconds (or a `timedelta`); None, the default, waits for ever.

        Raises `Invalid` if `after` is not a place, or is ahead of the broker.
        """
        _arguments.seconds(_arguments.endless(wait))
        if after is None:
            return Watch(self._native.watch(prefix, None), wait)
        if not isinstance(after, str):
            raise TypeError(f"after={_arguments.shown(after)} has type {type(after).__name__}: give a Watch.place")
        instance, _, seq = after.rpartition(":")
        if not instance or not (seq.isascii() and seq.isdecimal()) or len(seq) > 20:
            raise Invalid(f"after={after!r} is not a place: give a Watch.place, INSTANCE:NUMBER")
        # The broker treats a place ahead of it as its newest one.
        newest = self._native.watch(prefix, None)
        try:
            now, last = newest.place
        finally:
            newest.close()
        if instance == now and int(seq) > last:
            raise Invalid(f"after={after!r} is ahead of the broker, which is at {last}: give a Watch.place of this broker")
        return Watch(self._native.watch(prefix, (instance, min(int(seq), (1 << 64) - 1))), wait)

    def follow_topics(
        self,
        name: str | None = None,
        *,
        prefix: str | None = None,
        policy: t.Literal["latest", "every"] = "latest",
        queue: int | None = None,
        held: int = 2,
        history: int = 0,
        device: t.DeviceName | None = None,
        backend: str | None = None,
        timeout: t.Time = 30.0,
        trust: Iterable[int] = (),
    ) -> TopicFollower:
        """Receives from the publishers of the topic `name`, now and later, or from those of all topics whose names start with `prefix`. See
        `TopicFollower`, and `Publisher.open_topic` for the other side.

        The options apply to each publisher, as in `subscribe`; `timeout`, in seconds or a `timedelta`, is the longest silence of one that is
        joined. `backend` is by default this client's. The follower outlives this client, and waits for the broker if it restarts. Does not
        wait for publishers. Raises `Invalid`, and as any call."""
        topics = prefix if name is None else name
        if topics is None or (name is not None and prefix is not None):
            raise Invalid("a follower receives from the topic with this name, or from all topics with a prefix: give name or prefix")
        limit, backend = _arguments.limit(timeout, "timeout"), self.backend if backend is None else backend
        options = request(policy, queue, held, history, device, backend, limit, trust)
        return TopicFollower(_native.TopicFollower(self._native, topics, name is None, options))

    def recall(self, name: str, *, version: int | None = None, earlier: bool = False, wait: t.Time = 5) -> Recall:
        """Asks the processes that hold a version to release it, and waits up to `wait` seconds (or a `timedelta`) until all have. Returns
        which did. No process can be forced: end those that have not acknowledged.

        By default the current version, and of a deleted name all versions that are still held; `version` selects one, `earlier=True` all
        but the current one. In the holders, the calls of `Lease.on_recall` run. A lease that was parked with `keep_lease` counts until it
        is closed.

        Raises `NotFound` if there is no such object or version, `PermissionDenied` if this user may not delete the name.
        """
        given = _arguments.whole(version, "version")
        return Recall._of(self._native.recall(name, given, _arguments.flag(earlier, "earlier"), wait))

    def suspend(self, *, keep_lease: bool = False, exports_unused: bool = False, own_copies: bool = False) -> None:
        """Parks every lease of this process, so that `vmmfd suspend` can take its GPU memory and give it back: the driver can't restore a
        process that has mapped memory of others. Includes leases whose objects are closed or dropped while arrays of them live, those of
        other Brokers of the same socket, and host memory, except leases with `copy_on_write`.

        Parks none, and raises `Invalid`, if memory remains that ties this process to others: the message names each lease that is used by
        other libraries, arrays of `vmmfd.take`, opened legacy handles, and memory that this process created to share. `keep_lease` and
        `exports_unused` are as for `Lease.park`, the latter until `resume` returns. `own_copies=True` leaves memory that this process
        created: after `vmmfd resume` it is a private copy that can't be put or served.

        Waits for the work of the devices. Raises `Error` for a driver error. If leases can then not be mapped again, `resume` does this."""
        flags = {"keep_lease": keep_lease, "exports_unused": exports_unused, "own_copies": own_copies}
        given = [_arguments.flag(value, name) for name, value in flags.items()]
        keeping_calls(lambda: self._native.suspend(*given))

    def resume(self, *, newest: bool = False) -> None:
        """Maps every lease again that `suspend` parked: the same version, or the newest one of its name. Tries each. Raises as
        `Lease.unpark`, the first error; such leases stay parked, and the call can be repeated."""
        keeping_calls(lambda: self._native.resume(_arguments.flag(newest, "newest")))

    def delete(self, name: str) -> None:
        """Deletes a name. Readers keep their leases, and the broker keeps the memory until the last lease is released. Raises `NotFound` if
        there is no such name, `PermissionDenied` if another user owns it."""
        self._native.delete(name)

    def on_lost(self, call: Callable[[Lost], object]) -> Callable[[Lost], object]:
        """Calls `call` with a `Lost` for each lease that the broker no longer counts although this process has not closed it. Its mappings
        remain valid. Usable as a decorator.

        The call runs on a connection's own thread, which handles nothing else until it returns: return soon. Exceptions that it raises go
        to `sys.unraisablehook`. Not called during interpreter shutdown."""
        _arguments.function(call, "call")
        self._native.on_lost(lambda *fields: call(Lost(*fields)))
        return call

    def on_restored(self, call: Callable[[Restored], object]) -> Callable[[Restored], object]:
        """Calls `call` with a `Restored` for each lease that the broker counts again after a broken connection. Runs as `on_lost` does."""
        _arguments.function(call, "call")
        self._native.on_restored(lambda *fields: call(Restored(*fields)))
        return call
