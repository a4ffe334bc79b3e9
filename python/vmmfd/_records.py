"""The broker's reports as plain records, and the functions that convert the native client's dicts to them."""

from __future__ import annotations

from . import _types as t


class Record:
    """Plain named values."""

    __slots__: tuple[str, ...] = ()

    def __init__(self, **fields: t.Any) -> None:
        for name in self.__slots__:
            object.__setattr__(self, name, fields[name])

    def __setattr__(self, name: str, value: t.Any) -> None:
        raise AttributeError(f"{type(self).__name__}.{name} can't be set")

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in self.__slots__)

    __hash__: t.ClassVar[None] = None  # type: ignore[assignment]

    def __reduce__(self) -> t.Any:
        return _record, (type(self), {name: getattr(self, name) for name in self.__slots__})

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.__slots__)
        return f"{type(self).__name__}({fields})"


def _record(kind: type[Record], fields: dict[str, t.Any]) -> Record:
    return kind(**fields)


class Published(Record):
    """The result of `Broker.put`: the object's `name`, its `version`, counted from 1, and the version's UUID `id`."""

    __slots__ = ("id", "name", "version")

    name: str
    version: int
    id: str


class Owner(Record):
    """A user id and a group id."""

    __slots__ = ("gid", "uid")

    uid: int
    gid: int


class LeasedPart(Record):
    """A part of a leased object: its `name`, the bytes of data (`size`) and of memory (`mapped_size`), its `digest` as given by its maker
    or None, the UUID of its `device`, and the number of its `arrays`."""

    __slots__ = ("arrays", "device", "digest", "mapped_size", "name", "size")

    name: str
    size: int
    mapped_size: int
    digest: str | None
    device: str
    arrays: int


class DeviceBytes(Record):
    """Memory on a device: its UUID `device`, its `device_name`, and the number of `bytes`."""

    __slots__ = ("bytes", "device", "device_name")

    device: str
    device_name: str
    bytes: int


class Maker(Record):
    """A process: its `pid` as the broker sees it, or 0; its user id `uid`; and its `command`, if the broker can read it."""

    __slots__ = ("command", "pid", "uid")

    pid: int
    uid: int
    command: str | None


class Summary(Record):
    """A summary of an object: `name`, `version`, `id`, `size` (bytes of data), `devices` (bytes of memory on each), `backend` (`cuda` or
    `host`), the numbers of `parts`, `segments`, `arrays` and `leases`, its `owner`, the `mode` of its name, and the time at which the
    version was `created`."""

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
    created: t.datetime

    def __repr__(self) -> str:
        return super().__repr__().replace(f" mode={self.mode!r},", f" mode={self.mode:#o},")


class PartInfo(Record):
    """A part of an object, as described by its maker: `name`, `size` (bytes of data), `mapped_size` (bytes of memory), the numbers of
    `segments` and `arrays`, the UUID of its `device` and its `device_name`, its `digest` or None, and its `maker`."""

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


class Report(Record):
    """A fault that a reader found in an object's memory: the `reader`, the time of the report (`at`), and its `message`."""

    __slots__ = ("at", "message", "reader")

    reader: Maker
    at: t.datetime
    message: str


class Stat(Record):
    """Everything known about a version: its `summary`, the `versions` of the name that can be got by number, the name's `lifetime`
    (`"deleted"`, `"maker"`, `"leased"`, or seconds after its last lease), the number of older versions to `keep`, the `parts`, the
    `metadata`, and the `reports` of readers."""

    __slots__ = ("keep", "lifetime", "metadata", "parts", "reports", "summary", "versions")

    summary: Summary
    versions: tuple[int, ...]
    lifetime: str | float
    keep: int
    parts: tuple[PartInfo, ...]
    metadata: dict[str, t.Any]
    reports: tuple[Report, ...]


class HeldLease(Record):
    """A lease that a process holds: its `number`, the object's `name`, `version` and `id`, whether the version can still be got by name
    (`named`), the `holder`, `since` when, and the bytes of memory handed out (`size`)."""

    __slots__ = ("holder", "id", "name", "named", "number", "since", "size", "version")

    number: int
    name: str
    version: int
    id: str
    named: bool
    holder: Maker
    since: t.datetime
    size: int


class UserTotal(Record):
    """A user's totals in the broker: `uid`, the numbers of `objects`, `leases` and `connections`, and the memory on each of `devices`."""

    __slots__ = ("connections", "devices", "leases", "objects", "uid")

    uid: int
    objects: int
    devices: tuple[DeviceBytes, ...]
    leases: int
    connections: int


class Holders(Record):
    """The result of `Broker.who`: the `leases` that are held, and the `totals` of each user."""

    __slots__ = ("leases", "totals")

    leases: tuple[HeldLease, ...]
    totals: tuple[UserTotal, ...]


class Event(Record):
    """An event of a name. `kind` is `published`, `replaced`, `deleted`, `reported`, `leased`, `ended`, or `lost` if events were missed
    (compare with `Broker.list`; all other fields are None). The fields: the object's `name`, `version` and `id`, the event's sequence
    number `seq`, its time (`at`), the process that caused it (`pid`, `uid`), and a `message` or None."""

    __slots__ = ("at", "id", "kind", "message", "name", "pid", "seq", "uid", "version")

    kind: t.Literal["published", "replaced", "deleted", "reported", "leased", "ended", "lost"]
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
    restored later, `ended` or `not-restored`), and the `reason` as a sentence. Its mappings stay valid."""

    __slots__ = ("id", "kind", "name", "reason", "version")

    name: str
    version: int
    id: str
    kind: str
    reason: str


class Restored(Record):
    """A lease that the broker counts again: the object's `name`, `version` and `id`, and whether the broker had lost the version and
    rebuilt it from its readers (`rebuilt`)."""

    __slots__ = ("id", "name", "rebuilt", "version")

    name: str
    version: int
    id: str
    rebuilt: bool


def time(milliseconds: float) -> t.datetime:
    """Converts milliseconds since 1970 to a UTC time."""
    from datetime import datetime, timedelta, timezone

    return datetime(1970, 1, 1, tzinfo=timezone.utc) + timedelta(milliseconds=milliseconds)


def device_bytes(fields: dict[str, t.Any]) -> DeviceBytes:
    return DeviceBytes(device=fields["device"]["uuid"], device_name=fields["device"]["name"], bytes=fields["bytes"])


def maker(fields: dict[str, t.Any]) -> Maker:
    return Maker(pid=fields["pid"], uid=fields["uid"], command=fields.get("command"))


def summary(fields: dict[str, t.Any]) -> Summary:
    return Summary(
        name=fields["name"],
        version=fields["version"],
        id=fields["id"],
        size=fields["size"],
        devices=tuple(device_bytes(device) for device in fields["devices"]),
        backend=fields["backend"],
        parts=fields["parts"],
        segments=fields["segments"],
        arrays=fields["arrays"],
        leases=fields["leases"],
        owner=Owner(uid=fields["owner"]["uid"], gid=fields["owner"]["gid"]),
        mode=fields["mode"],
        created=time(fields["created_ms"]),
    )


def part_info(fields: dict[str, t.Any]) -> PartInfo:
    memory = fields["memory"]
    return PartInfo(
        name=fields["name"],
        size=memory["size"],
        mapped_size=memory["mapped_size"],
        segments=memory["segments"],
        arrays=fields["arrays"],
        device=memory["device"]["uuid"],
        device_name=memory["device"]["name"],
        digest=fields.get("digest"),
        maker=maker(fields["maker"]),
    )


def stat(fields: dict[str, t.Any]) -> Stat:
    lifetime = fields["lifetime"]
    kind = lifetime["kind"]
    return Stat(
        summary=summary(fields["summary"]),
        versions=tuple(fields["versions"]),
        lifetime=lifetime["ms"] / 1000 if kind == "idle" else kind,
        keep=fields["keep"],
        parts=tuple(part_info(part) for part in fields["parts"]),
        metadata=fields["metadata"],
        reports=tuple(
            Report(reader=maker(report["reader"]), at=time(report["at_ms"]), message=report["message"])
            for report in fields["reports"]
        ),
    )


def holders(leases: list[dict[str, t.Any]], totals: list[dict[str, t.Any]]) -> Holders:
    return Holders(
        leases=tuple(
            HeldLease(
                number=lease["number"],
                name=lease["name"],
                version=lease["version"],
                id=lease["id"],
                named=lease["named"],
                holder=maker(lease),
                since=time(lease["since_ms"]),
                size=lease["size"],
            )
            for lease in leases
        ),
        totals=tuple(
            UserTotal(
                uid=total["uid"],
                objects=total["objects"],
                devices=tuple(device_bytes(device) for device in total["devices"]),
                leases=total["leases"],
                connections=total["connections"],
            )
            for total in totals
        ),
    )


def event(fields: dict[str, t.Any]) -> Event:
    at = fields.get("at_ms")
    return Event(
        kind=fields["kind"],
        name=fields.get("name"),
        version=fields.get("version"),
        id=fields.get("id"),
        seq=fields.get("seq"),
        at=None if at is None else time(at),
        pid=fields.get("pid"),
        uid=fields.get("uid"),
        message=fields.get("message"),
    )
