"""The client of a broker: objects by name, leases of them, and what happens to names."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from operator import index

from . import _native
from ._errors import Invalid, NoArray

# Without the module `typing`, whose import takes longer than all of this package's.
TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    from builtins import list as List
    from collections.abc import Callable
    from datetime import datetime, timedelta
    from types import TracebackType
    from typing import Any, Literal

    from torch import Tensor
    from torch.nn import Module

    from ._native import Array, Device
    from .torch import Loaded

    Time = float | timedelta
    Wanted = str | int | Device
    Digest = str | Mapping[str, str]
    Json = Mapping[str, Any]

# The name of the one part of an object that is put as a whole.
_PART = "all"

# How many bytes a name or a digest has at most, and how many parts and arrays a get can name: more breaks the protocol.
_LONGEST = 255
_MOST_NAMED = 1024


class _Record:
    """Plain values with names."""

    __slots__: tuple[str, ...] = ()

    def __init__(self, **fields: Any) -> None:
        for name in self.__slots__:
            object.__setattr__(self, name, fields[name])

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__}.{name} can't be set")

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in self.__slots__)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.__slots__)
        return f"{type(self).__name__}({fields})"


class Published(_Record):
    """What `Broker.put` returns: the object's `name`, its `version`, counted from 1, and the version's UUID `id`."""

    __slots__ = ("id", "name", "version")

    name: str
    version: int
    id: str


class Owner(_Record):
    """A user and a group, by their numbers."""

    __slots__ = ("gid", "uid")

    uid: int
    gid: int


class LeasedPart(_Record):
    """A part of a leased object: its `name`, how many bytes of data it has (`size`) and of memory (`mapped_size`), its `digest` in its
    maker's words or None, the UUID of the `device` that has it, and how many `arrays` are in it."""

    __slots__ = ("arrays", "device", "digest", "mapped_size", "name", "size")

    name: str
    size: int
    mapped_size: int
    digest: str | None
    device: str
    arrays: int


class DeviceBytes(_Record):
    """Memory of a device: its UUID `device`, its `device_name`, and how many `bytes`."""

    __slots__ = ("bytes", "device", "device_name")

    device: str
    device_name: str
    bytes: int


class Maker(_Record):
    """A process: its number `pid` as the broker sees it, or 0; its user `uid`; and its `command`, where the broker can read it."""

    __slots__ = ("command", "pid", "uid")

    pid: int
    uid: int
    command: str | None


class Summary(_Record):
    """An object in short: `name`, `version`, `id`, `size` (bytes of data), `devices` (bytes of memory on each), `backend` (`cuda` or
    `host`), how many `parts`, `segments`, `arrays` and `leases` it has, its `owner`, the `mode` of its name, and when its version was
    `created`."""

    __slots__ = (
        "arrays", "backend", "created", "devices", "id", "leases", "mode", "name", "owner", "parts", "segments", "size", "version",
    )  # fmt: skip

    name: str
    version: int
    id: str
    size: int
    devices: tuple[DeviceBytes, ...]
    backend: str
    parts: int
    segments: int
    arrays: int
    leases: int
    owner: Owner
    mode: int
    created: datetime

    def __repr__(self) -> str:
        return super().__repr__().replace(f" mode={self.mode!r},", f" mode={self.mode:#o},")


class PartInfo(_Record):
    """A part of an object, as its maker claims it: `name`, `size` (bytes of data), `mapped_size` (bytes of memory), how many `segments` and
    `arrays`, the `device` that has it by its UUID and its `device_name`, its `digest` or None, and its `maker`."""

    __slots__ = ("arrays", "device", "device_name", "digest", "maker", "mapped_size", "name", "segments", "size")

    name: str
    size: int
    mapped_size: int
    segments: int
    arrays: int
    device: str
    device_name: str
    digest: str | None
    maker: Maker


class Report(_Record):
    """What a reader found wrong with an object's memory: the `reader`, when it said so (`at`), and its `message`."""

    __slots__ = ("at", "message", "reader")

    reader: Maker
    at: datetime
    message: str


class Stat(_Record):
    """All that is known of a version: its `summary`, the `versions` of the name that can be had by number, the name's `lifetime`
    (`"deleted"`, `"maker"`, `"leased"`, or seconds after its last lease) and how many older versions it keeps (`keep`), the `parts`, the
    `metadata`, and the `reports` of readers."""

    __slots__ = ("keep", "lifetime", "metadata", "parts", "reports", "summary", "versions")

    summary: Summary
    versions: tuple[int, ...]
    lifetime: str | float
    keep: int
    parts: tuple[PartInfo, ...]
    metadata: dict[str, Any]
    reports: tuple[Report, ...]


class HeldLease(_Record):
    """A lease that a process holds: its `number`, the object's `name`, `version` and `id`, whether the version can still be had by its name
    (`named`), the `holder`, `since` when, and how many bytes of memory were handed out (`size`)."""

    __slots__ = ("holder", "id", "name", "named", "number", "since", "size", "version")

    number: int
    name: str
    version: int
    id: str
    named: bool
    holder: Maker
    since: datetime
    size: int


class UserTotal(_Record):
    """What the broker holds for a user: `uid`, how many `objects`, `leases` and `connections`, and the memory on each of `devices`."""

    __slots__ = ("connections", "devices", "leases", "objects", "uid")

    uid: int
    objects: int
    devices: tuple[DeviceBytes, ...]
    leases: int
    connections: int


class Holders(_Record):
    """What `Broker.who` returns: the `leases` that are held, and the `totals` of each user."""

    __slots__ = ("leases", "totals")

    leases: tuple[HeldLease, ...]
    totals: tuple[UserTotal, ...]


class Event(_Record):
    """What happened to a name: `kind` is `published`, `replaced`, `deleted`, `reported`, `leased` or `ended`, or `lost` if events are not
    known any more (compare with `Broker.list` then; all other fields are None). With the object's `name`, `version` and `id`, the event's
    number `seq`, when it was (`at`), the process that did it (`pid`, `uid`), and a `message` or None."""

    __slots__ = ("at", "id", "kind", "message", "name", "pid", "seq", "uid", "version")

    kind: str
    name: str | None
    version: int | None
    id: str | None
    seq: int | None
    at: datetime | None
    pid: int | None
    uid: int | None
    message: str | None


class Lost(_Record):
    """A lease that the broker does not count any more: the object's `name`, `version` and `id`, and why: `kind` is `unreachable` (it may be
    restored later), `ended` or `not-restored`, `reason` a sentence. What is mapped stays mapped and valid."""

    __slots__ = ("id", "kind", "name", "reason", "version")

    name: str
    version: int
    id: str
    kind: str
    reason: str


class Restored(_Record):
    """A lease that the broker counts again: the object's `name`, `version` and `id`, and whether the broker had lost the version and has it
    from its readers again (`rebuilt`)."""

    __slots__ = ("id", "name", "rebuilt", "version")

    name: str
    version: int
    id: str
    rebuilt: bool


def connect(
    path: str | os.PathLike[str] | None = None,
    backend: str = "auto",
    *,
    timeout: Time = 30,
    trust: Iterable[int] = (),
) -> Broker:
    """Connects to the broker that listens at `path`.

    `path` is by default that of the environment variable `VMMFD_BROKER_SOCKET`, else `$XDG_RUNTIME_DIR/vmmfd/broker.sock`, else
    `/tmp/vmmfd-UID/broker.sock`. `backend` is where memory is made and mapped: `"cuda"`, `"host"` (ordinary shared memory), or `"auto"`:
    what is got is used where it is, and what is copied goes to a GPU if there is one. No driver is loaded before memory is needed.
    `timeout`, in seconds or a `timedelta`, is the longest silence of the broker, and how long a broker is waited for, now and
    when it restarts. `trust` are the users, by number, that the broker may be of besides this process's and root.

    Blocks until the broker has answered. Ctrl-C ends it.

    Raises `NotFound` if no broker listens in time, `Denied` if this user may not connect or the broker is of a user
    that is not trusted, `Disconnected` if the process at the other end is
    no broker, `Invalid` for an argument that makes no sense.
    """
    return Broker(path, backend, timeout=timeout, trust=trust)


class Broker:
    """A client of a broker: see `connect`. A context manager, which closes it.

    It can be used by several threads at once: each call that is under way has a connection of its own. All waits and times are in seconds
    or a `timedelta`; None is not to wait, `float("inf")` is for ever. Calls release the GIL. In the main thread Ctrl-C ends any of
    them; `close` ends those of all threads. If the broker restarts, the connection is made again within the timeout, calls that were
    under way are repeated without harm, and leases go on.

    It belongs to the process that made it: in a fork every call fails. Connect in each process; `vmmfd.register_reducer` lets
    `multiprocessing` do it.

    Each call may raise `Disconnected` if the broker is gone or silent for longer than the timeout, `NotFound` if none listens any more, and
    `Interrupted` if it is closed meanwhile.
    """

    __slots__ = ("__weakref__", "_native", "_timeout", "_trust")

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        backend: str = "auto",
        *,
        timeout: Time = 30,
        trust: Iterable[int] = (),
    ) -> None:
        self._trust = list(trust)
        self._timeout = timeout
        self._native = _native.Client(path, backend, timeout, self._trust)

    @property
    def path(self) -> str:
        """Where the broker listens."""
        return str(self._native.path)

    @property
    def backend(self) -> str:
        """`"auto"`, `"cuda"` or `"host"`, as it was given."""
        return self._native.backend

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._native.is_closed

    def close(self) -> None:
        """Ends the waits of other threads, which raise `Interrupted`, and the connections that no lease needs. Leases go on until they are
        closed themselves. Names with the lifetime `"maker"` go. To close twice does nothing. Does not block."""
        self._native.close()

    def __enter__(self) -> Broker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        closed = ", closed" if self.is_closed else ""
        return f"<vmmfd.Broker: {self.path}, backend {self.backend}{closed}>"

    def __reduce__(self) -> Any:
        raise TypeError("a Broker can't be pickled: call vmmfd.register_reducer() to send it with multiprocessing, or connect anew")

    def put(
        self,
        name: str,
        value: Any,
        *,
        metadata: Json | None = None,
        replace: bool | int = False,
        mode: int | None = None,
        lifetime: Literal["deleted", "maker", "leased"] | Time | None = None,
        keep: int | None = None,
        part: str | None = None,
        parts: Iterable[str] | None = None,
        group: str | None = None,
        wait: Time | None = None,
        seal: bool = False,
        copy: bool | None = None,
        digest: str | None = None,
        device: Wanted | None = None,
        exported: Literal["valid"] | None = None,
    ) -> Published:
        """Hands memory over under a name. When it returns the object is published, and this process may drop it, or end.

        `value` is a mapping of names to arrays: an `Array` of this process's own is handed over as it is, without a copy; anything
        else that speaks DLPack, an array interface or the buffer protocol is copied to new memory, of `device` if one is given. A module of
        PyTorch or its state dict, and `vmmfd.Weights`, are put without a copy where their memory can be shared. With `copy=False` what
        would be copied is refused; with `copy=True` all is copied, and `Weights` are refused: put `dict(weights)`. Do not write to
        memory that was put.

        `metadata` is what there is to say of it: a mapping that JSON can express, of at most 1 MiB. `replace=True` makes it the next version
        of a name that exists; a number replaces that version alone. `mode` is the permissions of a new name, `0o600` by default and `0o666` at
        most: `r` is get and list, `w` is replace. `lifetime` is how long the name stays: `"deleted"` (until it is deleted, the default),
        `"maker"` (until this Broker is closed), `"leased"` (until then, and until no lease is held), or so many seconds after its last
        lease. `keep` is how many older versions stay without a lease. `digest` is one of the bytes, in words that readers know, of at
        most 255 bytes.

        Several processes put one version together: each names its `part`, all `parts`, and a `group` that only these puts have, and waits
        up to `wait` until all are there. One of them brings the metadata.

        `seal=True` makes this process's own mapping of the memory read-only once it is put. A write by an address is a fault then: so it is
        refused while other libraries have views of it that may be written, unless `exported="valid"` promises that none is. What is
        copied on the host backend is sealed by the kernel in any case.

        Blocks until all work of the device is done, and the broker has answered. It synchronises the device's primary context, and so ends
        a capture of a CUDA graph that any thread of this process has under way there: put before or after a capture.

        Raises `Exists` if there is an object of the name, `Differs` if its version is another than the one to replace, `Denied` if it is another
        user's, `ExportError` (a `BufferError`) for what `copy=False` forbids and for `seal=True` with such views, `Invalid` for what makes no
        sense, `OutOfMemory`, `Timeout` if the other parts did not come, and `Error` if a quota or the broker is full.
        """
        if wait is not None and parts is None:
            raise Invalid(f"wait={wait!r} is how long the other parts are waited for: give part, parts and group too, or no wait")
        mode, keep = _mode(mode), _whole(keep, "keep", 32)
        if part is not None and _text(part, "part") == "":
            raise Invalid("part='' is no name: give the part one, or leave part out for an object of one part")
        if digest is not None:
            _text(digest, "digest")
        plans, additions, keep_alive = self._plan(value, part or _PART, copy, seal, device)
        if digest is not None:
            if len(plans) != 1:
                raise Invalid(f"digest={digest!r} is of one part, and this value has {len(plans)}")
            plans = [(*plans[0][:3], digest)]
        listed = None if parts is None else _names(parts, "parts")
        # Of several puts of a version one alone can bring metadata.
        if additions and (listed is None or metadata is not None or listed[:1] == [part]):
            metadata = {**additions, **(metadata or {})}
        promised = _promised(exported)
        if seal:
            _native.check_read_only([memory for plan in plans for memory in plan[1]], promised)
        version, id = self._native.put(
            name,
            plans,
            replace=replace,
            metadata=metadata,
            mode=mode,
            lifetime=lifetime,
            keep=keep,
            announced=listed,
            group=group,
            wait=wait,
        )
        if seal:
            for plan in plans:
                for memory in plan[1]:
                    _native.make_read_only(memory, promised)
        del keep_alive
        return Published(name=name, version=version, id=id)

    def _plan(
        self, value: Any, part: str, copy: bool | None, seal: bool, device: Wanted | None
    ) -> tuple[list[_native._PartPlan], dict[str, Any], object]:
        """The parts that a value is, what comes into the metadata, and what has to live until it is put."""
        plan = getattr(type(value), "_plan", None)
        if plan is not None and type(value).__module__.startswith("vmmfd."):
            parts, additions, keep_alive = plan(value, copy=copy, device=device)
            if part != _PART:
                parts = [(part, *parts[0][1:]), *parts[1:]]
            return parts, additions, keep_alive
        torch = sys.modules.get("torch")
        if torch is not None and _is_torchs(torch, value):
            ours = _torch()
            parts, additions, keep_alive = ours._plan(
                self._native, value, part=part, device=device, copy=copy, seal=seal
            )
            return parts, additions, keep_alive
        if not isinstance(value, Mapping):
            raise Invalid(f"value is of type {type(value).__name__}: give a mapping of names to arrays, such as {{'x': array}}")
        arrays = []
        for name, array in value.items():
            if not isinstance(name, str):
                raise Invalid(f"value has the key {name!r}, of type {type(name).__name__}: arrays have names, which are str")
            arrays.append((name, array))
        return [self._native.plan(arrays, part, device=device, copy=copy)], {}, arrays

    def get(
        self,
        name: str,
        *,
        version: int | None = None,
        newer_than: int | None = None,
        parts: Iterable[str] | None = None,
        arrays: Iterable[str] | None = None,
        expect: Json | None = None,
        digest: Digest | None = None,
        wait: Time | None = None,
        device: Wanted | None = None,
    ) -> Lease:
        """Gets a lease of an object, with its memory mapped read-only.

        It is the current version, unless `version` names another that is still there; with `newer_than` only a later one. Of `parts` and
        `arrays`, if given, only the segments in which these lie are mapped. `expect` names fields of the metadata and the values that
        they must have: equal as JSON, so that 1 is not 1.0, and a mapping in it has all fields of the other; `digest` is that of the one
        part, or a mapping of parts to theirs. `device` uses the memory instead of the one that has
        it, if it can reach it. With `wait` the object may come so much later.

        Raises `NotFound` if there is none, `Timeout` if none came in time, `Differs` if it is not as expected, `Denied`, `Invalid`,
        `Unsupported` if no device of this process can reach it.
        """
        return Lease(
            self,
            self._native.get(
                name,
                version=_whole(version, "version"),
                newer_than=_whole(newer_than, "newer_than"),
                parts=_chosen(parts, "parts"),
                arrays=_chosen(arrays, "arrays"),
                expect=expect,
                digest=_digest(digest),
                wait=wait,
                device=device,
            ),
        )

    def get_all(
        self,
        wanted: Iterable[str] | Mapping[str, Mapping[str, Any]],
        *,
        wait: Time | None = None,
        device: Wanted | None = None,
    ) -> List[Lease]:
        """Gets leases of several objects as they are at one moment, all or none, in their order.

        `wanted` are names, each once, or a mapping of names to what `get` takes of `version`, `newer_than`, `parts`, `arrays`, `expect`
        and `digest`. Waits up to `wait` until all are there. Raises what `get` does.
        """
        requests: List[Any] = []
        options = ("version", "newer_than", "parts", "arrays", "expect", "digest")
        named: Mapping[str, Mapping[str, Any]]
        if isinstance(wanted, Mapping):
            named = wanted
        else:
            names = _names(wanted, "wanted")
            named = dict.fromkeys(names, {})
            if len(named) < len(names):
                twice = next(name for name in named if names.count(name) > 1)
                raise Invalid(f"wanted has {twice!r} twice: name each object once")
        for name, given in named.items():
            unknown = [option for option in given if option not in options]
            if unknown:
                raise Invalid(f"{name!r} is to be got with {unknown[0]!r}, which is none of {', '.join(options)}")
            requests.append(
                (
                    name,
                    _whole(given.get("version"), "version"),
                    _whole(given.get("newer_than"), "newer_than"),
                    _chosen(given.get("parts"), "parts"),
                    _chosen(given.get("arrays"), "arrays"),
                    given.get("expect"),
                    _digest(given.get("digest")),
                )
            )
        return [Lease(self, lease) for lease in self._native.get_all(requests, wait=wait, device=device)]

    def claim(
        self,
        name: str,
        *,
        part: str | None = None,
        group: str | None = None,
        parts: Iterable[str] | None = None,
        arrays: Iterable[str] | None = None,
        expect: Json | None = None,
        digest: Digest | None = None,
        wait: Time | None = None,
        device: Wanted | None = None,
    ) -> Lease | Claim:
        """Gets a lease of an object, or the right to be the one that makes it.

        Of several processes that ask at once and find nothing one gets a `Claim`: it is to put the object. The others wait, up to `wait`, until
        it is put, or the claim passes on to one of them. A claim is of the whole object, or of one `part`, with the `group` of its version.
        Raises what `get` does.
        """
        found = self._native.claim(
            name,
            part=part,
            group=group,
            parts=_chosen(parts, "parts"),
            arrays=_chosen(arrays, "arrays"),
            expect=expect,
            digest=_digest(digest),
            wait=wait,
            device=device,
        )
        return Claim(self, name, found) if isinstance(found, _native.Claim) else Lease(self, found)

    def prepare(
        self,
        lease: Lease,
        name: str | None = None,
        *,
        version: int | None = None,
        newer_than: int | None = None,
        expect: Json | None = None,
        digest: Digest | None = None,
        wait: Time | None = None,
    ) -> Prepared:
        """As `Lease.prepare`."""
        return lease.prepare(name, version=version, newer_than=newer_than, expect=expect, digest=digest, wait=wait)

    def switch(self, lease: Lease, prepared: Prepared, *, exported: Literal["valid"] | None = None) -> Prepared:
        """As `Lease.switch`."""
        return lease.switch(prepared, exported=exported)

    def park(self, lease: Lease, *, keep_lease: bool = False, exported: Literal["valid"] | None = None) -> None:
        """As `Lease.park`."""
        lease.park(keep_lease=keep_lease, exported=exported)

    def unpark(
        self,
        lease: Lease,
        name: str | None = None,
        *,
        version: int | Literal["newest"] | None = None,
        expect: Json | None = None,
        digest: Digest | None = None,
        wait: Time | None = None,
    ) -> None:
        """As `Lease.unpark`."""
        lease.unpark(name, version=version, expect=expect, digest=digest, wait=wait)

    def state_dict(
        self,
        name: str,
        *,
        version: int | None = None,
        newer_than: int | None = None,
        parts: Iterable[str] | None = None,
        arrays: Iterable[str] | None = None,
        expect: Json | None = None,
        digest: Digest | None = None,
        wait: Time | None = None,
        device: Wanted | None = None,
        writable_buffers: bool = True,
        everything: bool = False,
        module: Module | None = None,
        private: Iterable[str] = (),
    ) -> dict[str, Tensor]:
        """The tensors of an object as PyTorch's, by name: for `module.load_state_dict(..., assign=True)`. They hold the lease.

        For safetensors and plain state dicts use `load`, or give `module=`: they do not say which of them a model writes, and a write to
        those that are mapped ends the process. An optimizer's step is one too, and PyTorch gives parameters the `requires_grad` that
        the module's had: call `module.requires_grad_(False)`. See `Lease.state_dict`; the other arguments and errors are `get`'s."""
        with self.get(
            name,
            version=version,
            newer_than=newer_than,
            parts=parts,
            arrays=arrays,
            expect=expect,
            digest=digest,
            wait=wait,
            device=device,
        ) as lease:
            return lease.state_dict(
                writable_buffers=writable_buffers, everything=everything, module=module, private=private
            )

    def load(
        self,
        name: str,
        into: Module,
        *,
        version: int | None = None,
        newer_than: int | None = None,
        parts: Iterable[str] | None = None,
        arrays: Iterable[str] | None = None,
        expect: Json | None = None,
        digest: Digest | None = None,
        wait: Time | None = None,
        device: Wanted | None = None,
        strict: bool = True,
        writable_buffers: bool = True,
        private: Iterable[str] = (),
    ) -> Loaded:
        """Makes an object's tensors the parameters and buffers of a module of PyTorch, and returns what another version can take their place
        with. The module holds the lease. See `Lease.load`; the other arguments and errors are `get`'s."""
        lease = self.get(
            name,
            version=version,
            newer_than=newer_than,
            parts=parts,
            arrays=arrays,
            expect=expect,
            digest=digest,
            wait=wait,
            device=device,
        )
        try:
            return lease.load(into, strict=strict, writable_buffers=writable_buffers, private=private)
        except BaseException:
            lease.close()
            raise

    def list(self, prefix: str = "") -> List[Summary]:
        """The objects whose names begin with `prefix` and that this user may read, in the order of their names."""
        return [_summary(summary) for summary in self._native.list(prefix)]

    def stat(self, name: str, version: int | None = None) -> Stat:
        """All that is known of a version of an object, by default of the current one. Maps nothing: what it takes is in
        `stat(name).parts[0].mapped_size`. Raises `NotFound` if there is none."""
        told = self._native.stat(name, _whole(version, "version"))
        lifetime = told["lifetime"]
        kind = lifetime["kind"]
        return Stat(
            summary=_summary(told["summary"]),
            versions=tuple(told["versions"]),
            lifetime=lifetime["ms"] / 1000 if kind == "idle" else kind,
            keep=told["keep"],
            parts=tuple(_part_info(part) for part in told["parts"]),
            metadata=told["metadata"],
            reports=tuple(
                Report(reader=_maker(report["reader"]), at=_time(report["at_ms"]), message=report["message"])
                for report in told["reports"]
            ),
        )

    def bytes_of(self, name: str, version: int | None = None, *, parts: Iterable[str] | None = None) -> int:
        """How many bytes of memory a get of an object, or of these parts of it, maps. Maps nothing. Raises `NotFound` if there is none,
        `NoArray` (a `KeyError`) if it has no such part."""
        sizes = {part.name: part.mapped_size for part in self.stat(name, version).parts}
        wanted = sizes if parts is None else dict.fromkeys(_names(parts, "parts"))
        for part in wanted:
            if part not in sizes:
                raise NoArray(f"{name!r} has no part {part!r}; it has {', '.join(sizes)}", kind="object")
        return sum(sizes[part] for part in wanted)

    def who(self, prefix: str = "") -> Holders:
        """The leases that are held of objects whose names begin with `prefix` and that this user may read, and what the broker holds for
        each user: for root and the broker's user of all users, for others their own."""
        leases, totals = self._native.who(prefix)
        return Holders(
            leases=tuple(
                HeldLease(
                    number=lease["number"],
                    name=lease["name"],
                    version=lease["version"],
                    id=lease["id"],
                    named=lease["named"],
                    holder=_maker(lease),
                    since=_time(lease["since_ms"]),
                    size=lease["size"],
                )
                for lease in leases
            ),
            totals=tuple(
                UserTotal(
                    uid=total["uid"],
                    objects=total["objects"],
                    devices=tuple(_device_bytes(device) for device in total["devices"]),
                    leases=total["leases"],
                    connections=total["connections"],
                )
                for total in totals
            ),
        )

    def watch(self, prefix: str = "", *, after: str | None = None, timeout: Time | None = None) -> Watch:
        """Follows what happens to names that begin with `prefix` and that this user may read: from now on, or from the place `after` that an
        earlier watch had (`Watch.place`), also in another process. Iterate over it: each step waits for the next event, and the iteration
        ends if none comes within `timeout`; by default it waits for ever.

        Raises `Invalid` for what is no place, and for one that the broker has not come to yet.
        """
        if after is None:
            return Watch(self._native.watch(prefix, None), timeout)
        instance, _, seq = after.rpartition(":") if isinstance(after, str) else ("", "", "")
        if not instance or not seq.isdecimal() or len(seq) > 20:
            raise Invalid(f"after={after!r} is no place of a watch: give what Watch.place was, INSTANCE:NUMBER")
        # The broker would take a place that is ahead of it for its newest one.
        newest = self._native.watch(prefix, None)
        try:
            now, last = newest.place
        finally:
            newest.close()
        if instance == now and int(seq) > last:
            raise Invalid(f"after={after!r} is ahead of the broker, which is at {last}: give what Watch.place was")
        return Watch(self._native.watch(prefix, (instance, min(int(seq), (1 << 64) - 1))), timeout)

    def delete(self, name: str) -> None:
        """Takes a name away. Readers keep what they hold, and the broker keeps the memory until the last of them ends. Raises `NotFound`
        if there is none, `Denied` if it is another user's."""
        self._native.delete(name)

    def on_lost(self, call: Callable[[Lost], object]) -> Callable[[Lost], object]:
        """Calls this with a `Lost` for each lease that the broker does not count any more, although this process has not ended it. What is
        mapped stays mapped and valid. It can decorate a function.

        It is called on a thread of a connection's own, which meanwhile notices nothing else: return soon. What it raises goes to
        `sys.unraisablehook`. It is not called while the interpreter ends."""
        self._native.on_lost(
            lambda name, version, id, kind, reason: call(Lost(name=name, version=version, id=id, kind=kind, reason=reason))
        )
        return call

    def on_restored(self, call: Callable[[Restored], object]) -> Callable[[Restored], object]:
        """Calls this with a `Restored` for each lease that the broker counts again, after the connection broke: as `on_lost` does."""
        self._native.on_restored(
            lambda name, version, id, rebuilt: call(Restored(name=name, version=version, id=id, rebuilt=rebuilt))
        )
        return call


class Lease(Mapping[str, "Array"]):
    """A hold on a version of an object, with its memory mapped read-only: a mapping of names to `Array`s. Made by `Broker.get`.

    A context manager: leaving it closes it. The lease ends then, or when the last array in it is gone, in any library: arrays and what
    other libraries made of them stay valid. The broker counts this process among the readers until then.

    Another version can take its place at the same addresses: `prepare`, `switch`, `park`, `unpark`.

    Once it is closed, and in a fork, all raise `Invalid`, but `is_held` is False, and `is_closed` and `repr` can be asked. The broker
    counts a lease until the forks of its process end too, if it was not closed.
    """

    __slots__ = ("__weakref__", "_broker", "_native")

    def __init__(self, broker: Broker, lease: _native.Lease) -> None:
        self._broker = broker
        self._native = lease

    def __getitem__(self, name: str, /) -> Array:
        """The array of a name, read-only. Raises `NoArray` (a `KeyError`) if there is none or it was not asked for, and `Invalid` if
        several parts have one of that name: see `array`."""
        return self._native.array(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._native.keys())

    def __len__(self) -> int:
        return len(self._native.keys())

    def __contains__(self, name: object, /) -> bool:
        return isinstance(name, str) and name in self._native

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return object.__hash__(self)

    def array(self, name: str, part: str | None = None) -> Array:
        """The array of a name, of the part that is named if several have one. Raises what `lease[name]` does."""
        return self._native.array(name, part)

    def attributes(self, name: str, part: str | None = None) -> dict[str, Any]:
        """What its maker says of an array; empty if nothing. Raises what `array` does."""
        return self._native.attributes(name, part) or {}

    def memory(self, part: str | None = None) -> list[Array]:
        """The memory of a part as bytes (`uint8`): one array, unless arrays were asked for that lie apart. The part can be left out where
        there is one."""
        return [array for _, array in self._native.memory(part)]

    def pieces(self, part: str | None = None) -> list[tuple[int, Array]]:
        """As `memory`, each with the byte of the part at which it begins."""
        return self._native.memory(part)

    @property
    def name(self) -> str:
        """The object's name."""
        return self._native.name

    @property
    def version(self) -> int:
        """Its version, counted from 1."""
        return self._native.version

    @property
    def id(self) -> str:
        """The version's UUID."""
        return self._native.id

    @property
    def created(self) -> datetime:
        """When it was published, in UTC."""
        return _time(self._native.created * 1000)

    @property
    def owner(self) -> Owner:
        """Whose it is."""
        uid, gid = self._native.owner
        return Owner(uid=uid, gid=gid)

    @property
    def metadata(self) -> dict[str, Any]:
        """What its maker says of it; empty if nothing. A new dict each time."""
        return self._native.metadata

    @property
    def parts(self) -> tuple[LeasedPart, ...]:
        """The parts that were asked for."""
        return tuple(
            LeasedPart(name=name, size=size, mapped_size=mapped, digest=digest, device=device, arrays=arrays)
            for name, size, mapped, digest, device, arrays in self._native.parts
        )

    @property
    def is_held(self) -> bool:
        """Whether the broker counts this process among the readers, as far as is known: False between a break of the connection and the
        moment when the lease was taken up again, if it is lost, once it is closed, and in a fork. Does not block."""
        return self._native.is_held

    @property
    def is_parked(self) -> bool:
        """Whether nothing is mapped at its addresses."""
        return self._native.is_parked

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._native.is_closed

    @property
    def exports(self) -> int:
        """How many exports of its arrays to other libraries are alive: tensors, arrays of NumPy, and the like."""
        return self._native.exports

    def prepare(
        self,
        name: str | None = None,
        *,
        version: int | None = None,
        newer_than: int | None = None,
        expect: Json | None = None,
        digest: Digest | None = None,
        wait: Time | None = None,
    ) -> Prepared:
        """Gets and imports a version that is to take the addresses of this one, which stays in use meanwhile: the device holds both.

        By default it is one that is newer than this; with `version` that one; with `name` that of another object. It must have the same
        parts, of each at least the same bytes, and each array that is mapped here, by name, with the same type, shape, strides and place;
        it may have more. Blocks for the driver's calls.

        Raises `Differs` with a list of what does not fit, and what `Broker.get` does.
        """
        if version is None and newer_than is None and name is None:
            newer_than = self.version
        version, newer_than = _whole(version, "version"), _whole(newer_than, "newer_than")
        prepared = self._broker._native.prepare(
            self._native, name, version=version, newer_than=newer_than, expect=expect, digest=_digest(digest), wait=wait
        )
        return Prepared(prepared)

    def switch(self, prepared: Prepared, *, exported: Literal["valid"] | None = None) -> Prepared:
        """Puts a version that was prepared at the addresses of this one, and returns the old one, which can be switched back to: close or drop
        it to end its lease and release its memory.

        Waits until all work of the devices' primary contexts is done. Arrays read the new version afterwards, and so do tensors, pointers
        and captured graphs that have the addresses. **Nothing may use the memory while it runs**: on a GPU a kernel that does loses its
        context. While exports to other libraries are alive this is the caller's promise, which `exported="valid"` gives.

        Raises `ExportError` (a `BufferError`) without that promise, where there are exports; `Invalid` if this is parked, or the version
        was prepared for another layout; `Error` if the driver fails: then the old version is mapped again, or this is parked.
        """
        return Prepared(self._native.switch(prepared._native, _promised(exported)))

    def park(self, *, keep_lease: bool = False, exported: Literal["valid"] | None = None) -> None:
        """Gives the memory back and keeps the addresses, for `unpark`. Meanwhile its arrays can't be read, and nothing may use their
        addresses.

        With `keep_lease` the broker keeps this version for this process. Without, the lease ends. Waits as `switch` does; `exported` is the
        same promise, until `unpark` has returned. Raises what `switch` does.
        """
        self._native.park(keep_lease, _promised(exported))

    def unpark(
        self,
        name: str | None = None,
        *,
        version: int | Literal["newest"] | None = None,
        expect: Json | None = None,
        digest: Digest | None = None,
        wait: Time | None = None,
    ) -> None:
        """Fills the addresses again: with the version that was there, another one, or the newest. It must fit as `prepare` says.

        Raises `Invalid` if this is not parked, and what `prepare` does. It stays parked then, and can be tried again.
        """
        if version is None and name is None:
            version = self.version
        number = None if version == "newest" else _whole(version, "version")
        self._broker._native.unpark(self._native, name, version=number, expect=expect, digest=_digest(digest), wait=wait)

    def state_dict(
        self,
        *,
        writable_buffers: bool = True,
        everything: bool = False,
        module: Module | None = None,
        private: Iterable[str] = (),
    ) -> dict[str, Tensor]:
        """Its tensors as PyTorch's, by name: for `module.load_state_dict(..., assign=True)`. They hold the memory and need no gradient. Tied
        names are tensors of one storage, and views are views of it.

        Weights are the mapped memory itself, read-only: a store into it ends the CUDA context, on the host the process, and PyTorch does
        not know. So does a step of an optimizer: PyTorch gives parameters the `requires_grad` that the module's had, so call
        `module.requires_grad_(False)`. Buffers, which a model may write, are private copies; with `writable_buffers=False` they are the
        memory too. Which are buffers is known of what was put as a module, and of the `module` that the tensors are for, if it is given;
        then weights of its embeddings with `max_norm` are private copies too. Else, of safetensors and plain state dicts, only
        `nn.Parameter` (`state_dict(keep_vars=True)`) and the statistics of PyTorch's norms are told apart. All else is mapped, and where such a
        tensor becomes a buffer of a module, the module gets a private copy, by a hook of PyTorch's that stays from then on; not in
        TorchScript modules and where `module._buffers` is written directly. What `private` names is a private copy. What a `state_dict` does not have (buffers that are not persistent, tensors that are
        plain attributes of modules) comes with `everything=True`.

        Raises `Differs` for a type that PyTorch has not, `Unsupported` for an object on a GPU that PyTorch does not see, `Invalid` for
        names that several parts have, and for one in `private` that the object has not."""
        tensors: dict[str, Tensor] = _torch()._state_dict(
            self, writable_buffers=writable_buffers, everything=everything, module=module, private=private
        )
        return tensors

    def load(
        self, into: Module, *, strict: bool = True, writable_buffers: bool = True, private: Iterable[str] = ()
    ) -> Loaded:
        """Makes its tensors the parameters and buffers of a module of PyTorch, which may be on the meta device, and returns a
        `vmmfd.torch.Loaded`, with which another version can take their place.

        Parameters are the mapped memory itself, read-only, as `state_dict` says, and need no gradient. Names that are tied in the object, or
        in the module if the object has one of them, are one parameter afterwards. All else is a private copy: buffers, those in no
        `state_dict` too, and tensors that are plain attributes of modules; unless `writable_buffers=False`. So are the parameters that
        `private` names, and weights of embeddings with `max_norm`, which PyTorch writes to. Plain attributes come where the module has
        a tensor. A `load_state_dict` without `assign=True` raises `ExportError` from then on, as it would write to the memory; a step
        of an optimizer after `requires_grad_(True)` does write there, and ends the process.

        Raises `Differs` with a list of all names, types and shapes that do not fit; the module is as it was then. With `strict=False`
        names that only one of them has do not count, but for those that would stay on the meta device."""
        loaded: Loaded = _torch()._load(self, into, strict=strict, writable_buffers=writable_buffers, private=private)
        return loaded

    def close(self) -> None:
        """Ends the lease, and releases its memory: now if no array of it is alive, else when the last one is gone. To close twice does
        nothing."""
        self._native.close()

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        try:
            if self.is_closed:
                return "<vmmfd.Lease: closed>"
            parked = ", parked" if self.is_parked else ""
            return f"<vmmfd.Lease: {self.name} version {self.version}{parked}>"
        except Invalid:  # Closed by another thread meanwhile, or in a fork.
            return "<vmmfd.Lease: not usable here>"

    def __reduce__(self) -> Any:
        raise TypeError("a Lease can't be pickled: call vmmfd.register_reducer() to send it with multiprocessing, or send its name and version")


class Prepared:
    """A version that is imported and mapped nowhere, ready to take the addresses of a lease: `Lease.switch`. It holds the version's lease
    and its memory until it is closed, dropped or switched to. A context manager, which closes it."""

    __slots__ = ("__weakref__", "_native")

    def __init__(self, prepared: _native.Prepared) -> None:
        self._native = prepared

    @property
    def name(self) -> str:
        """The object's name."""
        return self._native.name

    @property
    def version(self) -> int:
        """Its version."""
        return self._native.version

    @property
    def id(self) -> str:
        """The version's UUID."""
        return self._native.id

    @property
    def metadata(self) -> dict[str, Any]:
        """What its maker says of it; empty if nothing."""
        return self._native.metadata

    @property
    def is_closed(self) -> bool:
        """Whether it was closed, or switched to."""
        return self._native.is_closed

    def close(self) -> None:
        """Ends its lease, and releases its memory. To close twice, or after it was switched to, does nothing."""
        self._native.close()

    def __enter__(self) -> Prepared:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        try:
            return "<vmmfd.Prepared: closed>" if self.is_closed else f"<vmmfd.Prepared: {self.name} version {self.version}>"
        except Invalid:  # Closed by another thread meanwhile, or in a fork.
            return "<vmmfd.Prepared: not usable here>"


class Claim:
    """The right to be the one that makes an object, or a part of it: `Broker.claim`. Others wait for it. To put the object ends it; to close
    or drop it passes it to the next that waits, and so do the end of this process and of the broker. A context manager, which closes it."""

    __slots__ = ("__weakref__", "_broker", "_native", "name")

    def __init__(self, broker: Broker, name: str, claim: _native.Claim) -> None:
        self._broker = broker
        self._native = claim
        self.name = name

    def put(self, value: Any, **options: Any) -> Published:
        """Puts the object, as `Broker.put` does with these options, and ends the claim. Raises `Invalid` once it is closed, and what
        `Broker.put` does: it is not ended then."""
        if self.is_closed:
            raise Invalid(f"the claim of {self.name!r} has ended, and another process may have it: claim it again")
        published = self._broker.put(self.name, value, **options)
        self.close()
        return published

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._native.is_closed

    def close(self) -> None:
        """Passes it on. To close twice, or once the object is put, does nothing."""
        self._native.close()

    def __enter__(self) -> Claim:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<vmmfd.Claim: {self.name}{', closed' if self.is_closed else ''}>"


class Watch(Iterator[Event]):
    """What happens to names, event by event: `Broker.watch`. An iterator and a context manager.

    It has a connection of its own. Between calls it holds nothing in the broker, and may fall behind: an event of the kind `lost` says so.
    """

    __slots__ = ("__weakref__", "_native", "_timeout")

    def __init__(self, watch: _native.Watch, timeout: Time | None) -> None:
        self._native = watch
        self._timeout = timeout

    def next(self, timeout: Time | None = None) -> Event | None:
        """The next event. Waits for it up to `timeout`, for ever if that is None; then returns None. With 0 it only fetches what there is.
        Raises `Invalid` once it is closed, and if another thread waits in it."""
        told = self._native.next(timeout)
        if told is None:
            return None
        at = told.get("at_ms")
        return Event(
            kind=told["kind"],
            name=told.get("name"),
            version=told.get("version"),
            id=told.get("id"),
            seq=told.get("seq"),
            at=None if at is None else _time(at),
            pid=told.get("pid"),
            uid=told.get("uid"),
            message=told.get("message"),
        )

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

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _torch() -> Any:
    from importlib import import_module

    return import_module("vmmfd.torch")


def _names(names: Any, what: str) -> list[str]:
    if isinstance(names, str):
        raise Invalid(f"{what}={names!r} is one name where a list belongs: give [{names!r}]")
    try:
        listed = list(names)
    except TypeError:
        raise Invalid(f"{what} is of type {type(names).__name__}: give a list of names") from None
    for name in listed:
        if not isinstance(name, str):
            raise Invalid(f"{what} has {name!r}, of type {type(name).__name__}: names are str")
    return listed


def _chosen(names: Any, what: str) -> list[str] | None:
    """The names of parts or arrays that are asked for, each once."""
    if names is None:
        return None
    chosen = list(dict.fromkeys(_names(names, what)))
    if len(chosen) > _MOST_NAMED:
        raise Invalid(f"{what} has {len(chosen)} names, and a get takes {_MOST_NAMED}: ask for all, or in several gets")
    return chosen


def _whole(value: Any, what: str, bits: int = 64) -> int | None:
    """A number of a version or the like. Raises `Invalid` for what is none, a bool included."""
    number = None
    if value is None:
        return None
    if not isinstance(value, bool):
        try:
            number = index(value)
        except TypeError:
            pass
        else:
            if number.bit_length() > bits:
                raise Invalid(f"{what} is a number of {number.bit_length()} bits, and it has at most {bits}")
    if number is None or number < 0:
        raise Invalid(f"{what}={value!r}: give a whole number, from 0 on")
    return number


def _mode(mode: Any) -> int | None:
    number = _whole(mode, "mode")
    if number is not None and number & ~0o666:
        raise Invalid(f"mode={number:#o} has more than read and write for each: at most 0o666; give it in octal, such as 0o640")
    return number


def _text(value: Any, what: str) -> str:
    """A digest or a part's name. Raises `Invalid` for what is no str, or longer than a broker takes."""
    if not isinstance(value, str):
        raise Invalid(f"{what}={value!r} is of type {type(value).__name__}: give a str")
    length = len(value.encode(errors="surrogatepass"))
    if length > _LONGEST:
        raise Invalid(f"{what} has {length} bytes, and at most {_LONGEST} are allowed")
    return value


def _digest(digest: Any) -> Digest | None:
    """The digests that are asked for: of the one part, or of several by their names."""
    if digest is None:
        return None
    if isinstance(digest, Mapping):
        return {_text(part, "a part in digest"): _text(one, f"digest[{part!r}]") for part, one in digest.items()}
    if not isinstance(digest, str):
        raise Invalid(f"digest is of type {type(digest).__name__}: give a str, or a mapping of parts to their digests")
    return _text(digest, "digest")


def _promised(exported: object) -> bool:
    if exported not in (None, "valid"):
        raise Invalid(f'exported={exported!r} is none of None and "valid"')
    return exported is not None


def _is_torchs(torch: Any, value: Any) -> bool:
    """Whether a value is what PyTorch makes: a module, or a mapping with tensors."""
    module, tensor = getattr(getattr(torch, "nn", None), "Module", None), getattr(torch, "Tensor", None)
    if module is None or tensor is None:
        return False
    return isinstance(value, module) or isinstance(value, Mapping) and any(isinstance(of, tensor) for of in value.values())


def _time(milliseconds: float) -> datetime:
    from datetime import datetime, timedelta, timezone

    return datetime(1970, 1, 1, tzinfo=timezone.utc) + timedelta(milliseconds=milliseconds)


def _device_bytes(told: dict[str, Any]) -> DeviceBytes:
    return DeviceBytes(device=told["device"]["uuid"], device_name=told["device"]["name"], bytes=told["bytes"])


def _maker(told: dict[str, Any]) -> Maker:
    return Maker(pid=told["pid"], uid=told["uid"], command=told.get("command"))


def _summary(told: dict[str, Any]) -> Summary:
    return Summary(
        name=told["name"],
        version=told["version"],
        id=told["id"],
        size=told["size"],
        devices=tuple(_device_bytes(device) for device in told["devices"]),
        backend=told["backend"],
        parts=told["parts"],
        segments=told["segments"],
        arrays=told["arrays"],
        leases=told["leases"],
        owner=Owner(uid=told["owner"]["uid"], gid=told["owner"]["gid"]),
        mode=told["mode"],
        created=_time(told["created_ms"]),
    )


def _part_info(told: dict[str, Any]) -> PartInfo:
    memory = told["memory"]
    return PartInfo(
        name=told["name"],
        size=memory["size"],
        mapped_size=memory["mapped_size"],
        segments=memory["segments"],
        arrays=told["arrays"],
        device=memory["device"]["uuid"],
        device_name=memory["device"]["name"],
        digest=told.get("digest"),
        maker=_maker(told["maker"]),
    )
