"""What a broker reports, as plain records: their classes, and functions that make them of the native client's dicts."""

from __future__ import annotations

from . import _types as t


class Record:
    """Plain values with names."""

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

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.__slots__)
        return f"{type(self).__name__}({fields})"


class Published(Record):
    """What `Broker.put` returns: the object's `name`, its `version`, counted from 1, and the version's UUID `id`."""

    __slots__ = ("id", "name", "version")

    name: str
    version: int
    id: str


class Owner(Record):
    """A user and a group, by their numbers."""

    __slots__ = ("gid", "uid")

    uid: int
    gid: int


class LeasedPart(Record):
    """A part of a leased object: its `name`, how many bytes of data it has (`size`) and of memory (`mapped_size`), its `digest` in its
    maker's words or None, the UUID of the `device` that has it, and how many `arrays` are in it."""

    __slots__ = ("arrays", "device", "digest", "mapped_size", "name", "size")

    name: str
    size: int
    mapped_size: int
    digest: str | None
    device: str
    arrays: int


class DeviceBytes(Record):
    """Memory of a device: its UUID `device`, its `device_name`, and how many `bytes`."""

    __slots__ = ("bytes", "device", "device_name")

    device: str
    device_name: str
    bytes: int


class Maker(Record):
    """A process: its number `pid` as the broker sees it, or 0; its user `uid`; and its `command`, where the broker can read it."""

    __slots__ = ("command", "pid", "uid")

    pid: int
    uid: int
    command: str | None


class Summary(Record):
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
    created: t.datetime

    def __repr__(self) -> str:
        return super().__repr__().replace(f" mode={self.mode!r},", f" mode={self.mode:#o},")


class PartInfo(Record):
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


class Report(Record):
    """What a reader found wrong with an object's memory: the `reader`, when it said so (`at`), and its `message`."""

    __slots__ = ("at", "message", "reader")

    reader: Maker
    at: t.datetime
    message: str


class Stat(Record):
    """All that is known of a version: its `summary`, the `versions` of the name that can be had by number, the name's `lifetime`
    (`"deleted"`, `"maker"`, `"leased"`, or seconds after its last lease) and how many older versions it keeps (`keep`), the `parts`, the
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
    """A lease that a process holds: its `number`, the object's `name`, `version` and `id`, whether the version can still be had by its name
    (`named`), the `holder`, `since` when, and how many bytes of memory were handed out (`size`)."""

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
    """What the broker holds for a user: `uid`, how many `objects`, `leases` and `connections`, and the memory on each of `devices`."""

    __slots__ = ("connections", "devices", "leases", "objects", "uid")

    uid: int
    objects: int
    devices: tuple[DeviceBytes, ...]
    leases: int
    connections: int


class Holders(Record):
    """What `Broker.who` returns: the `leases` that are held, and the `totals` of each user."""

    __slots__ = ("leases", "totals")

    leases: tuple[HeldLease, ...]
    totals: tuple[UserTotal, ...]


class Event(Record):
    """What happened to a name: `kind` is `published`, `replaced`, `deleted`, `reported`, `leased` or `ended`, or `lost` if events are not
    known any more (compare with `Broker.list` then; all other fields are None). With the object's `name`, `version` and `id`, the event's
    number `seq`, when it was (`at`), the process that did it (`pid`, `uid`), and a `message` or None."""

    __slots__ = ("at", "id", "kind", "message", "name", "pid", "seq", "uid", "version")

    kind: str
    name: str | None
    version: int | None
    id: str | None
    seq: int | None
    at: t.datetime | None
    pid: int | None
    uid: int | None
    message: str | None


class Lost(Record):
    """A lease that the broker does not count any more: the object's `name`, `version` and `id`, and why: `kind` is `unreachable` (it may be
    restored later), `ended` or `not-restored`, `reason` a sentence. What is mapped stays mapped and valid."""

    __slots__ = ("id", "kind", "name", "reason", "version")

    name: str
    version: int
    id: str
    kind: str
    reason: str


class Restored(Record):
    """A lease that the broker counts again: the object's `name`, `version` and `id`, and whether the broker had lost the version and has it
    from its readers again (`rebuilt`)."""

    __slots__ = ("id", "name", "rebuilt", "version")

    name: str
    version: int
    id: str
    rebuilt: bool


def time(milliseconds: float) -> t.datetime:
    """A moment in UTC, of its milliseconds since 1970."""
    from datetime import datetime, timedelta, timezone

    return datetime(1970, 1, 1, tzinfo=timezone.utc) + timedelta(milliseconds=milliseconds)


def device_bytes(told: dict[str, t.Any]) -> DeviceBytes:
    return DeviceBytes(device=told["device"]["uuid"], device_name=told["device"]["name"], bytes=told["bytes"])


def maker(told: dict[str, t.Any]) -> Maker:
    return Maker(pid=told["pid"], uid=told["uid"], command=told.get("command"))


def summary(told: dict[str, t.Any]) -> Summary:
    return Summary(
        name=told["name"],
        version=told["version"],
        id=told["id"],
        size=told["size"],
        devices=tuple(device_bytes(device) for device in told["devices"]),
        backend=told["backend"],
        parts=told["parts"],
        segments=told["segments"],
        arrays=told["arrays"],
        leases=told["leases"],
        owner=Owner(uid=told["owner"]["uid"], gid=told["owner"]["gid"]),
        mode=told["mode"],
        created=time(told["created_ms"]),
    )


def part_info(told: dict[str, t.Any]) -> PartInfo:
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
        maker=maker(told["maker"]),
    )


def stat(told: dict[str, t.Any]) -> Stat:
    lifetime = told["lifetime"]
    kind = lifetime["kind"]
    return Stat(
        summary=summary(told["summary"]),
        versions=tuple(told["versions"]),
        lifetime=lifetime["ms"] / 1000 if kind == "idle" else kind,
        keep=told["keep"],
        parts=tuple(part_info(part) for part in told["parts"]),
        metadata=told["metadata"],
        reports=tuple(
            Report(reader=maker(report["reader"]), at=time(report["at_ms"]), message=report["message"])
            for report in told["reports"]
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


def event(told: dict[str, t.Any]) -> Event:
    at = told.get("at_ms")
    return Event(
        kind=told["kind"],
        name=told.get("name"),
        version=told.get("version"),
        id=told.get("id"),
        seq=told.get("seq"),
        at=None if at is None else time(at),
        pid=told.get("pid"),
        uid=told.get("uid"),
        message=told.get("message"),
    )
