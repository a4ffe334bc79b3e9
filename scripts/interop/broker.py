"""A client of `vmmfd serve` that uses only the standard library.

docs/broker-protocol.md defines the messages. This module does not map memory: a Lease returns its description and descriptors, and a put
sends the given ones.

    with Client(path) as client:
        client.put("frames/left", [Part("all", memory, segments)], backend="host")
        with client.get("frames/left") as lease:
            ...                                # lease.parts[0].memory, lease.parts[0].runs
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import protocol
from protocol import Body, ProtocolError, Segment, VmmfdError

BROKER = "broker"
NO_BACKEND = "none"
MAX_INLINE = 4096
MAX_INLINE_TOGETHER = 16 * 1024
MAX_METADATA = 1 << 20
MAX_TABLE = 256 << 20

_KINDS = {1: "hello", 4: "segments", 5: "received", 7: "busy", 8: "error"} | dict(
    enumerate(
        ("put", "send", "published", "get", "lease", "claimed", "list", "objects", "stat", "version", "who", "leases")
        + ("delete", "done", "refused", "release", "report", "stop", "resume", "resumed", "watch", "events", "measure")
        + ("measured",),
        32,
    )
)
_NUMBERS = {kind: number for number, kind in _KINDS.items()}
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class Refused(VmmfdError):
    """The server refused a request. The connection is still usable."""

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        self.message = "".join(c if c.isprintable() else " " for c in message)
        super().__init__(f"refused: {self.message} ({self.code})")


# Records


def _objects(fields: Body) -> Callable[[Any], bool]:
    def fits(value: Any) -> bool:
        if not isinstance(value, list):
            return False
        for item in value:
            protocol._check("an item", item, fields)
        return True

    return fits


def _token(value: Any) -> bool:
    return isinstance(value, str) and len(value) == 32 and protocol._hexadecimal(value)


def _table(value: Any) -> bool:
    if not isinstance(value, dict) or len([name for name in ("inline", "length") if name in value]) != 1:
        return False
    return "inline" in value or protocol._U64(value["length"]) and value["length"] > 0


def _lifetime(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    return value.get("kind") in ("deleted", "maker", "leased") or value.get("kind") == "idle" and protocol._U64(value.get("ms"))


_U32, _U64, _NAME, _TEXT = protocol._u(32), protocol._U64, protocol._name, protocol._text
_NAMES = protocol._list_of(_NAME)
_SIZES = protocol._list_of(_U64)
_OWNER = {"uid": _U32, "gid": _U32}


def _i32(value: Any) -> bool:
    return type(value) is int and -(1 << 31) <= value < 1 << 31


_PROCESS = {"pid": _i32, "uid": _U32, "command?": _TEXT}
_BYTES = {"device": {"uuid": protocol._uuid, "name": _NAME}, "bytes": _U64}
_SUMMARY = {
    "name": _NAME, "version": _U64, "id": protocol._uuid, "size": _U64, "devices": _objects(_BYTES), "backend": _NAME,
    "parts": _U64, "segments": _U64, "arrays": _U64, "leases": _U64, "owner": _OWNER, "mode": protocol._u(16),
    "created_ms": _U64,
}
_OBJECT = {
    "name": _NAME, "version?": _U64, "newer_than?": _U64, "parts?": _NAMES, "range?": {"offset": _U64, "length": _U64},
    "arrays?": protocol._list_of(_TEXT), "expect?": {}, "digests?": {},
}
_TOKENS = protocol._list_of(_token)
_RESTORE = {"version": _U64, "id": protocol._uuid, "created_ms": _U64, "owner": _OWNER, "leases": _TOKENS}
_EVENT = {
    "seq": _U64, "at_ms": _U64, "kind": _TEXT, "name": _NAME, "version": _U64, "id": protocol._uuid, "uid": _U32,
    "pid": _i32, "command?": _TEXT, "size?": _U64, "message?": _TEXT,
}
_ROOM = {"used": _U64, "allowed": _U64}
_LIMITS = {"bytes?": _U64, "device_bytes?": _U64, "objects?": _U64, "leases?": _U64, "connections?": _U64}
_TOTAL = {"uid": _U32, "objects": _U64, "devices": _objects(_BYTES), "leases": _U64, "connections": _U64}
_BODIES: dict[str, Body] = {
    **{kind: protocol._BODIES[kind] for kind in ("hello", "segments", "received", "busy", "error")},
    "put": {
        "name": _NAME, "replace?": protocol._flag, "if_version?": _U64, "announced?": _NAMES, "group?": _NAME,
        "wait_ms?": _U64, "backend": _NAME, "metadata?": _table, "mode?": protocol._u(16), "lifetime?": _lifetime,
        "keep?": _U32, "request?": _token, "restore?": _RESTORE, "sizes": _SIZES,
        "parts": _objects({"name": _NAME, "memory": protocol._MEMORY, "arrays?": _table, "digest?": _NAME}),
    },
    "send": {},
    "published": {"version": _U64, "id": protocol._uuid},
    "get": {"objects": _objects(_OBJECT), "wait_ms?": _U64, "claim?": {"part?": _NAME, "group?": _NAME}},
    "lease": {
        "token": _token, "name": _NAME, "version": _U64, "id": protocol._uuid, "created_ms": _U64, "owner": _OWNER,
        "backend": _NAME, "metadata?": _table, "mode?": protocol._u(16), "lifetime?": _lifetime, "keep?": _U32,
        "whole?": protocol._flag, "sizes": _SIZES,
        "parts": _objects(
            {"name": _NAME, "memory": protocol._MEMORY, "runs": _objects(protocol._PART), "arrays?": _table, "digest?": _NAME}
        ),
    },
    "claimed": {"token": _token},
    "list": {"prefix": _NAME, "after?": _NAME},
    "objects": {"objects": _objects(_SUMMARY), "more": protocol._flag},
    "stat": {"name": _NAME, "version?": _U64},
    "version": {
        "summary": _SUMMARY, "versions": _SIZES, "lifetime": _lifetime, "keep": _U32, "metadata?": _table,
        "parts": _objects({"name": _NAME, "memory": protocol._MEMORY, "arrays": _U64, "digest?": _NAME, "maker": _PROCESS}),
        "reports": _objects({"reader": _PROCESS, "at_ms": _U64, "message": _TEXT}),
    },
    "who": {"prefix": _NAME, "after?": _U64},
    "leases": {
        "leases": _objects(
            {
                "number": _U64, "name": _NAME, "version": _U64, "id": protocol._uuid, "named": protocol._flag,
                "since_ms": _U64, "size": _U64, **_PROCESS,
            }
        ),
        "more": protocol._flag,
        "totals": _objects(_TOTAL),
    },
    "delete": {"name": _NAME, "request?": _token},
    "done": {},
    "refused": {"code": _TEXT, "message": _TEXT},
    "release": {"token": _token},
    "report": {"token": _token, "message": _TEXT},
    "stop": {},
    "resume": {"leases?": _TOKENS, "puts?": _TOKENS},
    "resumed": {"instance": protocol._uuid, "lost": _TOKENS},
    "watch": {"prefix": _NAME, "after?": _U64, "instance?": _TEXT},
    "events": {"instance": protocol._uuid, "lost?": protocol._flag, "events": _objects(_EVENT), "next": _U64},
    "measure": {},
    "measured": {
        "instance": protocol._uuid, "started_ms": _U64, "restarts": _U64, "objects": _U64, "versions": _U64,
        "leases": _U64, "connections": _U64, "watchers": _U64, "descriptors": _ROOM, "store": {"kind": _TEXT, **_ROOM},
        "requests": _objects({"verb": _TEXT, "outcome": _TEXT, "count": _U64}),
        "durations": _objects({"verb": _TEXT, "bounds_us": _SIZES, "counts": _SIZES, "sum_us": _U64}),
        "totals": _objects(_TOTAL), "version?": _TEXT, "lost_versions?": _U64,
        "quota?": _LIMITS, "total_quota?": _LIMITS, "pid?": _U32, "keeper?": {"pid": _U32, "started_ms?": _U64},
        "crashes?": _objects(
            {"at_ms": _U64, "process": _TEXT, "pid": _U32, "lost_versions?": _U64, "names?": _NAMES}
        ),
    },
}


def _fd_count(kind: str, body: Body) -> int:
    if kind == "segments":
        return len(body["sizes"])
    tables = [body.get("metadata")]
    if kind in ("put", "lease"):
        tables += [part.get("arrays") for part in body["parts"]]
    elif kind != "version":
        return 0
    return sum("length" in table for table in tables if table) + len(body.get("sizes") or ())


def encode(kind: str, body: Body) -> bytes:
    """Returns a record without its descriptors."""
    return protocol.frame(_NUMBERS[kind], body, _fd_count(kind, body))


def decode(record: bytes, fds: list[int]) -> protocol.Message:
    """Parses a record that arrived with these descriptors. On failure the caller must close them."""
    number, claimed, text = protocol.unframe(record)
    kind = _KINDS.get(number)
    if kind is None:
        raise ProtocolError(f"a message of kind {number}")
    body = protocol.read_body(kind, text, _BODIES[kind])
    if kind == "segments" and not body["sizes"]:
        raise ProtocolError("segments without sizes")
    most = {"announced": 64, "parts": 64, "objects": 64}
    if kind in ("put", "get") and any(len(body.get(name) or ()) > limit for name, limit in most.items()):
        raise ProtocolError(f"{kind} names more than a record may")
    want = _fd_count(kind, body)
    if not claimed == len(fds) == want <= protocol.MAX_FDS:
        raise ProtocolError(f"{kind} came with {len(fds)} descriptors, claims {claimed} and calls for {want}")
    return protocol.Message(kind, body, fds)


class _Channel(protocol.Channel):
    encode = staticmethod(encode)
    decode = staticmethod(decode)


# Tables


def _sealed(text: bytes) -> int:
    """Returns a table to send beside a record."""
    fd = os.memfd_create("table", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.write(fd, text)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _read_table(table: Body | None, fds: list[int], most: int) -> Any:
    """Parses a table, inline or beside the record. Takes its descriptor from the front of the list."""
    if table is None:
        return None
    if "inline" in table:
        return table["inline"]
    fd, length = fds.pop(0), table["length"]
    try:
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS or not os.fstat(fd).st_size == length <= most:
            raise ProtocolError("a table is not sealed, or not of the length that was named")
        return json.loads(os.pread(fd, length, 0))
    except (OSError, ValueError) as error:
        raise ProtocolError(f"a table can't be read: {error}") from None
    finally:
        os.close(fd)


# The client


@dataclass
class Part:
    """A part to put. The caller keeps the descriptors."""

    name: str
    memory: Body
    segments: Sequence[Segment]
    arrays: list[Body] = field(default_factory=list)
    digest: str | None = None


@dataclass
class LeasedPart:
    """A part of a lease: the byte ranges with their segments."""

    name: str
    memory: Body
    runs: list[tuple[Body, list[Segment]]]
    arrays: list[Body]
    digest: str | None


@dataclass
class Lease:
    """A lease. Closing it closes its descriptors."""

    client: Client
    body: Body
    metadata: Body
    parts: list[LeasedPart]

    def close(self) -> None:
        parts, self.parts = self.parts, []
        protocol.close_all([segment.fd for part in parts for _, segments in part.runs for segment in segments])
        if parts:
            self.client.send("release", {"token": self.body["token"]})

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Client:
    """A connection to a broker, retried until `timeout`. A context manager, with one request at a time."""

    def __init__(self, path: str, timeout: float = 30.0) -> None:
        self._timeout = timeout
        self._channel = _Channel(protocol._connect(path, timeout), timeout)
        try:
            self._channel.check_user()
            self._channel.hello(NO_BACKEND, [BROKER])
            if BROKER not in self._channel.greeted()["capabilities"]:
                raise protocol.Refusal("object", "the process at the other end is no broker")
        except BaseException as error:
            self._channel.end(error)
            raise

    def send(self, kind: str, body: Body, fds: Sequence[int] = ()) -> None:
        """Sends a message unchanged."""
        self._channel.send(kind, body, fds)

    def answer(self, *kinds: str) -> protocol.Message:
        """Receives the next message. Fails if its kind is not among these."""
        message = self._channel.receive(*kinds, "refused")
        if message.kind == "refused":
            raise Refused(message.body["code"], message.body["message"])
        return message

    def put(
        self,
        name: str,
        parts: Sequence[Part],
        backend: str,
        metadata: Body | None = None,
        wait: float = 0.0,
        **more: Any,
    ) -> Body:
        """Puts an object and returns the published version. `more` is as in the message: replace, if_version, announced, group, mode,
        lifetime, keep."""
        room, tables = MAX_INLINE_TOGETHER, []

        def table(value: Any) -> Body:
            nonlocal room
            text = json.dumps(value, separators=(",", ":")).encode()
            if len(text) <= min(MAX_INLINE, room):
                room -= len(text)
                return {"inline": value}
            tables.append(_sealed(text))
            return {"length": len(text)}

        try:
            body: Body = {"name": name, "backend": backend, "parts": [], **more}
            if metadata is not None:
                body["metadata"] = table(metadata)
            if wait:
                body["wait_ms"] = int(wait * 1000)
            for part in parts:
                entry = {"name": part.name, "memory": part.memory, "digest": part.digest}
                if part.arrays:
                    entry["arrays"] = table(part.arrays)
                body["parts"].append(entry)
            segments = [segment for part in parts for segment in part.segments]
            at = protocol.MAX_FDS - len(tables)
            body["sizes"] = [segment.size for segment in segments[:at]]
            self.send("put", body, tables + [segment.fd for segment in segments[:at]])
        finally:
            protocol.close_all(tables)
        if at < len(segments):
            self.answer("send")
        while at < len(segments):
            some = segments[at : at + protocol.MAX_FDS]
            sizes = [segment.size for segment in some]
            self.send("segments", {"first": at, "sizes": sizes}, [segment.fd for segment in some])
            at += len(some)
        return self.answer("published").body

    def get_all(self, objects: Sequence[Body], wait: float | None = None) -> list[Lease]:
        """Leases several objects, all or none. Takes the objects in the form of the message."""
        body: Body = {"objects": list(objects)}
        if wait is not None:
            body["wait_ms"] = int(wait * 1000)
        self.send("get", body)
        return [self._take(left > 0) for left in reversed(range(len(objects)))]

    def get(self, name: str, wait: float | None = None, **more: Any) -> Lease:
        """Leases an object. `more` is as in the message: version, parts, range, arrays, expect, digests."""
        return self.get_all([{"name": name, **more}], wait)[0]

    def _take(self, more: bool) -> Lease:
        _, body, fds = self.answer("lease")
        sizes = list(body["sizes"])
        at = len(fds) - len(sizes)
        tables, segments = fds[:at], fds[at:]
        try:
            want = sum(run["segments"] for part in body["parts"] for run in part["runs"])
            while len(segments) < want:
                self.send("received", {"segments": len(segments)})
                _, some, fds = self.answer("segments")
                if some["first"] != len(segments):
                    protocol.close_all(fds)
                    raise ProtocolError(f"segment {some['first']} came where {len(segments)} belongs")
                segments += fds
                sizes += some["sizes"]
            if len(segments) != want:
                raise ProtocolError(f"{len(segments)} segments came with a lease of {want}")
            if more:
                self.send("received", {"segments": want})
            metadata = _read_table(body.get("metadata"), tables, MAX_METADATA) or {}
            arrays = [_read_table(part.get("arrays"), tables, MAX_TABLE) or [] for part in body["parts"]]
        except BaseException:
            protocol.close_all(tables + segments)
            raise
        parts, came = [], iter(map(Segment, segments, sizes))
        for part, of in zip(body["parts"], arrays):
            runs = [(run, [next(came) for _ in range(run["segments"])]) for run in part["runs"]]
            parts.append(LeasedPart(part["name"], part["memory"], runs, of, part.get("digest")))
        return Lease(self, body, metadata, parts)

    def list(self, prefix: str = "") -> list[Body]:
        """Returns the objects that this user may read."""
        found: list[Body] = []
        more = True
        while more:
            self.send("list", {"prefix": prefix, "after": found[-1]["name"] if found else None})
            page = self.answer("objects").body
            found += page["objects"]
            more = page["more"] and bool(page["objects"])
        return found

    def stat(self, name: str, version: int | None = None) -> tuple[Body, Body]:
        """Returns the description of a version, and its metadata."""
        self.send("stat", {"name": name, "version": version})
        _, body, fds = self.answer("version")
        return body, _read_table(body.get("metadata"), fds, MAX_METADATA) or {}

    def delete(self, name: str) -> None:
        self.send("delete", {"name": name})
        self.answer("done")

    def close(self, error: BaseException | None = None) -> None:
        self._channel.end(error)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        with contextlib.suppress(OSError):
            self.close(None if isinstance(error, Refused) else error)
