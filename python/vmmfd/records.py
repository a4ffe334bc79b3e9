"""The records that calls return: plain named values. Their fields are read-only."""

from __future__ import annotations

from collections.abc import Iterable

from . import _types as t

__all__ = [
    "DeviceBytes",
    "Event",
    "HeldClaim",
    "HeldLease",
    "HeldTopic",
    "Holders",
    "LeasedPart",
    "Lost",
    "Maker",
    "Order",
    "Owner",
    "PartInfo",
    "Peer",
    "Publication",
    "Published",
    "PublisherStats",
    "Recall",
    "RecallHolder",
    "Report",
    "Restored",
    "Served",
    "Stat",
    "StreamEvent",
    "Summary",
    "Usage",
    "UserTotal",
]


class Record:
    """Plain named values. The annotations of a class are its fields; importing `dataclasses` takes longer than this package."""

    # The records in a report, by field.
    _kinds: t.ClassVar[dict[str, type[Record]]] = {}

    def __init__(self, *values: t.Any, **fields: t.Any) -> None:
        given = dict(zip(self._names(), values), **fields)
        vars(self).update({name: given[name] for name in self._names()})

    @classmethod
    def _names(cls) -> list[str]:
        return [name for name in cls.__annotations__ if name[0] != "_"]

    @classmethod
    def _of(cls, fields: dict[str, t.Any]) -> t.Self:
        """Converts a report of the extension: a dict with the fields of the protocol."""
        return cls(*(cls._value(fields, name) for name in cls._names()))

    @classmethod
    def _value(cls, fields: dict[str, t.Any], name: str) -> t.Any:
        if f"{name}_ms" in fields:
            return time(fields[f"{name}_ms"])
        value, kind = fields.get(name), cls._kinds.get(name)
        if isinstance(value, list):
            return tuple(value if kind is None else map(kind._of, value))
        return value if kind is None else kind._of(fields[name])

    def __setattr__(self, name: str, value: t.Any) -> None:
        raise AttributeError(f"{type(self).__name__}.{name} can't be set")

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other) if type(other) is type(self) else NotImplemented

    __hash__: t.ClassVar[None] = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        values = vars(self)
        ordered = {name: values[name] for name in ("name", "version", *values) if name in values}
        return f"{type(self).__name__}({', '.join(f'{name}={_shown(value)}' for name, value in ordered.items())})"


class Published(Record):
    """The result of `Broker.put`: the object's `name`, its `version`, counted from 1, the version's UUID `id`, how many bytes the put
    `copied` to new memory (0 if it shared all memory as it is), and the `recall` of earlier versions, None without `recall_old`."""

    name: str
    version: int
    id: str
    copied: int
    recall: Recall | None


class Owner(Record):
    """A user id and a group id."""

    uid: int
    gid: int


class LeasedPart(Record):
    """A part of a leased object: its `name`, the bytes of data (`size`) and of memory (`mapped_size`), its `digest` as given by its maker
    or None, the UUID of its `device`, and the number of its `arrays`."""

    name: str
    size: int
    mapped_size: int
    digest: str | None
    device: str
    arrays: int


class DeviceBytes(Record):
    """Memory on a device: its UUID `device`, its `device_name`, and the number of `bytes`."""

    device: str
    device_name: str
    bytes: int

    @classmethod
    def _of(cls, fields: dict[str, t.Any]) -> t.Self:
        return cls(fields["device"]["uuid"], fields["device"]["name"], fields["bytes"])


class Maker(Record):
    """A process: its `pid` as the broker sees it, or 0; its user id `uid`; and its `command`, if the broker can read it."""

    pid: int
    uid: int
    command: str | None


class Summary(Record):
    """A summary of an object: `name`, `version`, `id`, `size` (bytes of data), `devices` (bytes of memory on each), `backend` (`cuda` or
    `host`), the numbers of `parts`, `segments`, `arrays` and `leases`, its `owner`, the `mode` of its name, and the time at which the
    version was `created`."""

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
    created: t.datetime

    _kinds: t.ClassVar[dict[str, type[Record]]] = {"devices": DeviceBytes, "owner": Owner}

    @classmethod
    def _all(cls, reports: Iterable[dict[str, t.Any]]) -> list[t.Self]:
        """Converts many reports. Equal owners and devices are the same records: Python's garbage collector, which holds the GIL, then visits
        far fewer objects."""
        shared: dict[t.Any, t.Any] = {}
        summaries = []
        for fields in reports:
            made = vars(summary := cls._of(fields))
            for name in ("owner", "devices"):
                made[name] = shared.setdefault(repr(fields[name]), made[name])
            summaries.append(summary)
        return summaries

    def __repr__(self) -> str:
        return super().__repr__().replace(f" mode={self.mode!r},", f" mode={self.mode:#o},")


class PartInfo(Record):
    """A part of an object, as described by its maker: `name`, `size` (bytes of data), `mapped_size` (bytes of memory), the numbers of
    `segments` and `arrays`, the UUID of its `device` and its `device_name`, its `digest` or None, and its `maker`."""

    name: str
    size: int
    mapped_size: int
    segments: int
    arrays: int
    device: str
    device_name: str
    digest: str | None
    maker: Maker

    _kinds: t.ClassVar[dict[str, type[Record]]] = {"maker": Maker}

    @classmethod
    def _of(cls, fields: dict[str, t.Any]) -> t.Self:
        memory = fields["memory"]
        device, name = memory["device"]["uuid"], memory["device"]["name"]
        return super()._of({**fields, **memory, "name": fields["name"], "device": device, "device_name": name})


class Report(Record):
    """A fault that a reader found in an object's memory: the `reader`, the time of the report (`at`), and its `message`."""

    reader: Maker
    at: t.datetime
    message: str

    _kinds: t.ClassVar[dict[str, type[Record]]] = {"reader": Maker}


class Stat(Record):
    """Everything known about a version: its `summary`, its number (`version`), the `versions` of the name that can be got by number, the name's `lifetime`
    (`"deleted"`, `"maker"`, `"leased"`, or seconds after its last lease), the number of older versions to `keep`, the `parts`, the
    `metadata`, and the `reports` of readers."""

    summary: Summary
    versions: tuple[int, ...]
    lifetime: str | float
    keep: int
    parts: tuple[PartInfo, ...]
    metadata: dict[str, t.Any]
    reports: tuple[Report, ...]

    _kinds: t.ClassVar[dict[str, type[Record]]] = {"summary": Summary, "parts": PartInfo, "reports": Report}

    @property
    def version(self) -> int:
        """The number of the version."""
        return self.summary.version

    @classmethod
    def _of(cls, fields: dict[str, t.Any]) -> t.Self:
        lifetime = fields["lifetime"]
        seconds = lifetime["ms"] / 1000 if "ms" in lifetime else lifetime["kind"]
        return super()._of({**fields, "lifetime": seconds})


class HeldLease(Record):
    """A lease that a process holds: its `number`, the object's `name`, `version` and `id`, whether the version can still be got by name
    (`named`), the `holder`, `since` when, the bytes of memory handed out (`size`), and whether the version was `recalled`."""

    number: int
    name: str
    version: int
    id: str
    named: bool
    holder: Maker
    since: t.datetime
    size: int
    recalled: bool

    _kinds: t.ClassVar[dict[str, type[Record]]] = {"holder": Maker}

    @classmethod
    def _of(cls, fields: dict[str, t.Any]) -> t.Self:
        return super()._of({**fields, "holder": fields})


class HeldClaim(Record):
    """The right of a process to create an object for which others wait: the object's `name`, the `part` or None for the whole object, the
    `holder`, and `since` when."""

    name: str
    part: str | None
    holder: Maker
    since: t.datetime

    _kinds: t.ClassVar[dict[str, type[Record]]] = {"holder": Maker}

    @classmethod
    def _of(cls, fields: dict[str, t.Any]) -> t.Self:
        return super()._of({**fields, "holder": fields})


class HeldTopic(Record):
    """A topic with its publisher: the `name`, the `epoch` of the publisher's run, its `pid` or 0, its user `uid`, its `command` or None, and
    the number of its `followers`."""

    name: str
    epoch: int
    pid: int
    uid: int
    command: str | None
    followers: int


class UserTotal(Record):
    """A user's totals in the broker: `uid`, the numbers of `objects`, `leases` and `connections`, and the memory on each of `devices`."""

    uid: int
    objects: int
    devices: tuple[DeviceBytes, ...]
    leases: int
    connections: int

    _kinds: t.ClassVar[dict[str, type[Record]]] = {"devices": DeviceBytes}


class Holders(Record):
    """The result of `Broker.who`: the `leases` and `claims` that are held, the `totals` of each user, and the `topics` with publishers."""

    leases: tuple[HeldLease, ...]
    totals: tuple[UserTotal, ...]
    claims: tuple[HeldClaim, ...]
    topics: tuple[HeldTopic, ...]

    _kinds: t.ClassVar[dict[str, type[Record]]] = {"leases": HeldLease, "totals": UserTotal, "claims": HeldClaim, "topics": HeldTopic}


class RecallHolder(Record):
    """A `lease` of a recalled version, and whether it is gone (`acknowledged`): released, or its process exited or disconnected. The end
    of the wait is no acknowledgement."""

    lease: HeldLease
    acknowledged: bool

    @classmethod
    def _of(cls, fields: dict[str, t.Any]) -> t.Self:
        return cls(HeldLease._of(fields), fields["acknowledged"])


class Recall(Record):
    """The result of `Broker.recall`: the `holders` at the time of the request and since then, whether the broker holds none of the versions
    any more (`free`), and whether a name keeps one of them without a lease (`kept`)."""

    holders: tuple[RecallHolder, ...]
    free: bool
    kept: bool

    _kinds: t.ClassVar[dict[str, type[Record]]] = {"holders": RecallHolder}

    @property
    def is_complete(self) -> bool:
        """Whether all holders have acknowledged."""
        return all(holder.acknowledged for holder in self.holders)


class Event(Record):
    """An event of a name. `kind` is `published`, `replaced`, `deleted`, `reported`, `leased`, `ended`, `recalled`, or `lost` if events were
    missed (compare with `Broker.list`; all other fields are None). The fields: the object's `name`, `version` and `id`, the event's sequence
    number `seq`, its time (`at`), the process that caused it (`pid`, `uid`), and a `message` or None."""

    kind: t.Literal["published", "replaced", "deleted", "reported", "leased", "ended", "recalled", "lost"]
    name: str | None
    version: int | None
    id: str | None
    seq: int | None
    at: t.datetime | None
    pid: int | None
    uid: int | None
    message: str | None


class Lost(Record):
    """A lease that the broker no longer counts: the object's `name`, `version` and `id`, the `kind` of loss (`unreachable`, which may be
    restored later, `ended` or `not-restored`), and the `reason` as a sentence. Its mappings remain valid."""

    name: str
    version: int
    id: str
    kind: str
    reason: str


class Restored(Record):
    """A lease that the broker counts again: the object's `name`, `version` and `id`, and whether the broker had lost the version and
    rebuilt it from its readers (`rebuilt`)."""

    name: str
    version: int
    id: str
    rebuilt: bool


class Peer(Record):
    """The process at the other end of a stream: its `pid`, or 0 if it is not visible here, and its user id `uid`."""

    pid: int
    uid: int


class Publication(Record):
    """The result of `Loan.publish`: the `number` of the publication, counted from 1, and the number of subscribers to which it was
    `delivered` at once. For the others it waits, depending on their policies."""

    number: int
    delivered: int


class Usage(Record):
    """A subscriber and its use of a stream's pool: its `id`, which the publisher uses once; its `pid` and `uid`; its `policy` (`latest`,
    `queue` or `every`) and the length of its `queue`, else None; whether it `is_subscribed` still; the numbers of buffers that were
    `delivered` to it and `skipped`; and the `buffers` that it has now, with their `bytes`."""

    id: int
    pid: int
    uid: int
    policy: str
    queue: int | None
    is_subscribed: bool
    delivered: int
    skipped: int
    buffers: int
    bytes: int


class PublisherStats(Record):
    """The state of a publisher: the number of publications (`published`); the `free` buffers, or the free bytes if sizes vary; and the
    `subscribers`, with former ones that still have buffers."""

    published: int
    free: int
    subscribers: tuple[Usage, ...]


class Order(Record):
    """How two processes order their GPU work: the `kind` is `gpu` if streams wait for streams, or `cpu` with the `reason`, else None."""

    kind: str
    reason: str | None


class StreamEvent(Record):
    """A change among the subscribers of a publisher. Its `kind` is `joined`, `left`, `evicted`, or `starved` if a loan got no buffer in
    time. The `id`, `pid`, `uid`, `policy` and `queue` are the subscriber's, as in `Usage`; for `starved` they are None, and `by` has the
    subscribers with buffers. For `left`, `orderly` is False if the process exited or broke the protocol."""

    kind: str
    id: int | None
    pid: int | None
    uid: int | None
    policy: str | None
    queue: int | None
    orderly: bool | None
    by: tuple[Usage, ...]


class Served(Record):
    """A consumer that was served or refused: its process id `pid` and user id `uid`, as reported by the kernel, and its `error`, or
    `None`."""

    pid: int
    uid: int
    error: str | None


def _shown(value: object) -> str:
    """Formats a value; of a UUID only the first eight characters."""
    if isinstance(value, str) and len(value) >= 36 and value[-28::5][:4] == "----":
        return repr(value[:-28])
    return repr(value)


def time(milliseconds: float) -> t.datetime:
    """Converts milliseconds since 1970 to a UTC time."""
    from datetime import datetime, timedelta, timezone

    return datetime(1970, 1, 1, tzinfo=timezone.utc) + timedelta(milliseconds=milliseconds)
