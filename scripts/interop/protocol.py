"""The protocol of vmmfd, version 1, for both sides, with only the standard library.

Longer than 500 lines: another project takes it as one file.

docs/protocol.md defines the messages. This module does not open memory: a Consumer returns the offer and its descriptors, and a Producer
sends the given ones.

    with Consumer(path, backend="cuda") as consumer, consumer.request() as offered:
        ...                                    # offered.memory, offered.segments, offered.pool_fd
        consumer.report(check(data, offered.check["salt"]))

A consumer that does not support an offer's `check` reports unchecked(True).
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

VERSION = 1
MAX_BODY = 64 * 1024
MAX_FDS = 253
MAX_NAME = 255
MAX_CAPABILITIES = 64
DEFAULT_OBJECT = "default"

_MAGIC = b"VMFD"
_HEADER = struct.Struct("<4sHHII")
_KINDS = ("hello", "request", "offer", "segments", "received", "result", "busy", "error", "pool") + (
    "subscribe", "ready", "done", "withdraw", "gone")  # Of streams, which are not spoken here.
_BUSY_EVERY = 0.9
# The start of an `error` record's header: magic, version, kind.
_ERROR = b"VMFD\x01\x00\x08\x00"
_WORD = 0xFFFF_FFFF

Body = dict[str, Any]


class VmmfdError(Exception):
    """A failed conversation. The peer receives `code`."""

    code = "failed"


class ProtocolError(VmmfdError):
    """The peer violated the protocol."""

    code = "protocol"


class VersionError(VmmfdError):
    """The peer supports no version of this side."""

    code = "version"


class UnreadableError(ProtocolError):
    """The peer sent an unreadable `error`, which is not answered."""


class PeerGone(VmmfdError):
    """The peer closed the connection too early."""


class PeerError(VmmfdError):
    """The peer reported an `error`."""

    def __init__(self, code: str, message: str) -> None:
        # A peer's control characters never reach a terminal.
        self.message = "".join(c if c.isprintable() else " " for c in message)
        self.code = "".join(c if c.isprintable() else " " for c in code)
        super().__init__(f"the peer says: {self.message} ({self.code})")


class Refusal(VmmfdError):
    """This side does not support the peer's request."""

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        super().__init__(message)


# The pattern


def _mix(h: int) -> int:
    h ^= h >> 16
    h = h * 0x85EBCA6B & _WORD
    h ^= h >> 13
    h = h * 0xC2B2AE35 & _WORD
    return h ^ h >> 16


def word(salt: int, index: int) -> int:
    """Returns one word of a salt's pattern."""
    return (index * 2 + 1337 & _WORD) ^ 0xDEADBEEF ^ salt ^ _mix(index >> 31 & _WORD)


def pattern(salt: int, first_word: int, count: int) -> bytes:
    """Returns words of a salt's pattern as bytes in memory order."""
    words = array.array("I")
    end = first_word + count
    while first_word < end:
        # A run of 2 ** 31 words shares one constant: compute it once.
        run = first_word >> 31
        stop = min(end, run + 1 << 31)
        constant = 0xDEADBEEF ^ salt ^ _mix(run & _WORD)
        words.extend([(index * 2 + 1337 & _WORD) ^ constant for index in range(first_word, stop)])
        first_word = stop
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def numpy_pattern(salt: int, first_word: int, count: int) -> Any:
    """As `words`, as a numpy array of `<u4`, fast enough for gigabytes."""
    import numpy

    index = numpy.arange(first_word, first_word + count, dtype=numpy.uint64)
    run = (index >> numpy.uint64(31)).astype("<u4")
    run ^= run >> numpy.uint32(16)
    run *= numpy.uint32(0x85EBCA6B)
    run ^= run >> numpy.uint32(13)
    run *= numpy.uint32(0xC2B2AE35)
    run ^= run >> numpy.uint32(16)
    words = index.astype("<u4")
    words *= numpy.uint32(2)
    words += numpy.uint32(1337)
    words ^= numpy.uint32(0xDEADBEEF ^ salt)
    words ^= run
    return words


def pattern_bytes(salt: int, start: int, size: int) -> bytes:
    """Returns the pattern's bytes from `start` on, which may be inside a word."""
    first = start // 4
    count = -(-(start + size) // 4) - first
    return pattern(salt, first, count)[start - first * 4 :][:size]


def unchecked(verified: bool) -> Body:
    """Returns the `result` of a side that checked nothing."""
    return {"verified": verified}


def result(words: int, mismatches: int = 0, first_mismatch: Body | None = None) -> Body:
    """Returns the `result` of a side that checked the pattern."""
    figures = {"words": words, "mismatches": mismatches, "first_mismatch": first_mismatch}
    return {"verified": mismatches == 0, "check": figures}


def check(found: bytes, salt: int, start: int = 0) -> Body:
    """Compares an object's bytes from `start` on with the pattern. Returns a `result`."""
    expected = pattern_bytes(salt, start, len(found))
    # Extend to whole words; the bytes outside count as zeros.
    before, after = b"\0" * (start % 4), b"\0" * (-(start + len(found)) % 4)
    expected, found = (before + data + after for data in (expected, bytes(found)))
    words = len(found) // 4
    if found == expected:
        return result(words)
    pairs = zip(struct.iter_unpack("<I", expected), struct.iter_unpack("<I", found))
    wrong = [(index, e, f) for index, ((e,), (f,)) in enumerate(pairs, start // 4) if e != f]
    return result(words, len(wrong), dict(zip(("index", "expected", "found"), wrong[0])))


def numpy_check(found: Any, salt: int) -> Body:
    """As `check`, for a whole object as a numpy array of words. (Not floats: NaN differs from itself.)"""
    import numpy

    expected = numpy_pattern(salt, 0, found.size)
    wrong = numpy.flatnonzero(found != expected)
    if not wrong.size:
        return result(found.size)
    index = int(wrong[0])
    first = {"index": index, "expected": int(expected[index]), "found": int(found[index])}
    return result(found.size, int(wrong.size), first)


# Records


class Message(NamedTuple):
    """A record. The receiver owns the descriptors."""

    kind: str
    body: Body
    fds: list[int]


def _fd_count(kind: str, body: Body) -> int:
    if kind in ("segments", "ready"):
        return len(body.get("sizes") or ())
    return 1 if kind == "pool" else 0


def frame(number: int, body: Body, fds: int) -> bytes:
    """Returns a record of a numeric kind, without its descriptors."""
    text = json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()
    if len(text) > MAX_BODY:
        raise ValueError(f"kind {number} has {len(text)} bytes, and a body at most {MAX_BODY}")
    return _HEADER.pack(_MAGIC, VERSION, number, len(text), fds) + text


def encode(kind: str, body: Body) -> bytes:
    """Returns a record without its descriptors."""
    return frame(_KINDS.index(kind) + 1, body, _fd_count(kind, body))


def unframe(record: bytes) -> tuple[int, int, bytes]:
    """Returns the numeric kind, the claimed number of descriptors and the body of a record."""
    if len(record) < _HEADER.size:
        raise ProtocolError(f"a record of {len(record)} bytes has no header")
    magic, version, number, length, claimed = _HEADER.unpack_from(record)
    text = record[_HEADER.size :]
    if magic != _MAGIC:
        raise ProtocolError(f"a record begins with {magic!r}")
    if version != VERSION:
        raise VersionError(f"a record of version {version}")
    if length != len(text) or length > MAX_BODY:
        raise ProtocolError(f"a body of {len(text)} bytes, said to be {length}")
    return number, claimed, text


def decode(record: bytes, fds: list[int]) -> Message:
    """Parses a record that arrived with these descriptors. On failure the caller must close them."""
    number, claimed, text = unframe(record)
    if not 1 <= number <= len(_KINDS):
        raise ProtocolError(f"a message of kind {number}")
    kind = _KINDS[number - 1]
    body = _parse(kind, text)
    want = _fd_count(kind, body)
    if not claimed == len(fds) == want:
        raise ProtocolError(f"{kind} came with {len(fds)} descriptors, claims {claimed} and calls for {want}")
    return Message(kind, body, fds)


def read_body(kind: str, text: bytes, fields: Body) -> Body:
    """Returns a body, which must have these fields."""
    try:
        body = json.loads(text.decode("utf-8"), object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the body of {kind} is no JSON: {str(error)[:200]}") from None
    if not isinstance(body, dict):
        raise ProtocolError(f"the body of {kind} is not a JSON object")
    _check(kind, body, fields)
    return body


def _parse(kind: str, text: bytes) -> Body:
    body = read_body(kind, text, _BODIES[kind])
    sizes = body.get("sizes")
    if kind == "segments" and not sizes or sizes is not None and len(sizes) > MAX_FDS:
        raise ProtocolError(f"{kind} without 1 to {MAX_FDS} sizes")
    if kind == "hello" and (body["timeout_ms"] == 0 or len(body["capabilities"]) > MAX_CAPABILITIES):
        raise ProtocolError("hello has a timeout_ms of 0, or too many capabilities")
    return body


def _object(pairs: list[tuple[str, Any]]) -> Body:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name comes twice")
    return found


def _u(bits: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and 0 <= value < 1 << bits


def _name(value: Any) -> bool:
    return isinstance(value, str) and len(value.encode(errors="replace")) <= MAX_NAME


def _any_of(*values: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and value in values


def _list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(fits, value))


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _hexadecimal(digits: str) -> bool:
    return not set(digits) - set("0123456789abcdefABCDEF")


def _uuid(value: Any) -> bool:
    groups = value.split("-") if isinstance(value, str) else []
    return [len(group) for group in groups] == [8, 4, 4, 4, 12] and _hexadecimal("".join(groups))


def _pointer(value: Any) -> bool:
    return isinstance(value, str) and len(value) == 128 and _hexadecimal(value)


# The type of each field: a predicate, or the fields of an object. Fields with `?` may be null or absent.
_U64, _ACCESS = _u(64), _any_of("ro", "rw")
_TURN = {"buffer": _U64, "generation": _U64}
_MEMORY = {
    "mechanism": _any_of("vmm", "pool", "legacy"),
    "device": {"uuid": _uuid, "name": _name},
    "location": _any_of("device", "host"),
    "size": _U64,
    "mapped_size": _U64,
    "segments": _U64,
    "pool?": _U64,
    "pointer?": _pointer,
    "offset?": _U64,
    "immutable?": _flag,
}
_ARRAY = {
    "dtype": _text,
    "shape": _list_of(_U64),
    "byte_order?": _any_of("little", "big"),
    "strides?": _list_of(lambda value: type(value) is int and -(1 << 63) <= value < 1 << 63),
    "offset?": _U64,
}
_PART = {"first": _U64, "segments": _U64, "offset": _U64, "size": _U64}
_BODIES: dict[str, Body] = {
    "hello": {
        "version": _u(16), "capabilities": _list_of(_name), "backend": _name, "pid": _u(32), "timeout_ms": _U64,
    },
    "request": {"object": _name, "access?": _ACCESS, "range?": {"offset": _U64, "length": _U64}},
    "offer": {
        "object": _name, "memory": _MEMORY, "array?": _ARRAY, "access": _ACCESS, "part?": _PART, "check?": {},
        "buffer?": _U64,
    },
    "segments": {"first": _U64, "sizes": _list_of(_U64)},
    "received": {"segments": _U64},
    "result": {"verified": _flag, "check?": {}},
    "busy": {},
    "error": {"code": _text, "message": _text},
    "pool": {"pool": _U64},
    "subscribe": {"keep": _U64},
    "ready": {**_TURN, "sizes?": _list_of(_U64)},
    "done": _TURN,
    "withdraw": {"buffer": _U64},
    "gone": {"buffer": _U64},
}


def _check(what: str, body: Any, fields: Body) -> None:
    if not isinstance(body, dict):
        raise ProtocolError(f"`{what}` is no object")
    for name, fits in fields.items():
        value = body.get(name.rstrip("?"))
        if value is None and name.endswith("?"):
            continue
        if isinstance(fits, dict):
            _check(name.rstrip("?"), value, fits)
        elif not fits(value):
            raise ProtocolError(f"`{name.rstrip('?')}` of {what} is {value!r:.100}")


def _is_natural(value: object) -> bool:
    return _U64(value)


def _get(body: Body, name: str, kind: type, default: Any = None) -> Any:
    """Returns a field of a peer's body, checked for its type; `default` if it is null or absent."""
    value = body.get(name)
    if value is None and default is not None:
        return default
    if not (_is_natural(value) if kind is int else isinstance(value, kind)):
        raise ProtocolError(f"`{name}` is {value!r:.100}")
    return value


def close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


class Channel:
    """A connected socket. A peer that is silent for longer than `timeout` seconds is an error."""

    # The fields of its records; another protocol with the same records overrides them.
    encode = staticmethod(encode)
    decode = staticmethod(decode)

    def __init__(self, connected: socket.socket, timeout: float) -> None:
        self._socket = connected
        self._socket.settimeout(timeout)
        self._timeout = timeout
        # Until the peer's hello sets it.
        self._busy_every = _BUSY_EVERY

    def check_user(self) -> None:
        """Requires that the peer runs as this process's user or root."""
        credentials = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        _, uid, _ = struct.unpack("iII", credentials)
        if uid not in (os.geteuid(), 0):
            raise Refusal("refused", f"the peer runs as uid {uid}, which is not allowed here")

    def send(self, kind: str, body: Body, fds: Sequence[int] = ()) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self._socket.sendmsg([self.encode(kind, body)], rights, socket.MSG_NOSIGNAL)
        except (BrokenPipeError, ConnectionResetError):
            # The peer's reason may still be readable.
            for _ in range(64):
                close_all(self.receive().fds)
            raise PeerGone("the peer takes no more messages") from None

    def receive(self, *kinds: str, first: bool = False) -> Message:
        """Returns the next answer. Fails if its kind is not among these. With `first`, the peer has no open request, and so may not send
        `busy`."""
        while True:
            message = self._receive()
            if message.kind == "busy" and not first:
                continue
            if message.kind == "error":
                raise PeerError(_get(message.body, "code", str), _get(message.body, "message", str))
            if kinds and message.kind not in kinds:
                close_all(message.fds)
                raise ProtocolError(f"{message.kind} came where {' or '.join(kinds)} belongs")
            return message

    def _receive(self) -> Message:
        record, fds, flags = self._take()
        try:
            if not record:
                raise PeerGone("the peer hung up")
            if flags & socket.MSG_CTRUNC:
                raise ProtocolError("descriptors were cut off: this process may open no more files")
            if flags & socket.MSG_TRUNC:
                raise ProtocolError(f"a record of more than {_HEADER.size + MAX_BODY} bytes")
            return self.decode(record, fds)
        except BaseException as error:
            close_all(fds)
            if isinstance(error, ProtocolError) and record.startswith(_ERROR):
                raise UnreadableError(f"the peer's error can't be read: {error}") from None
            raise

    def _take(self) -> tuple[bytes, list[int], int]:
        """Receives a record with its descriptors. The buffer has room for the kernel's maximum, so none is lost."""
        room = _HEADER.size + MAX_BODY, socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize)
        # ECONNRESET is reported once, before queued records.
        for last in (False, True):
            try:
                record, ancillary, flags, _ = self._socket.recvmsg(*room, socket.MSG_CMSG_CLOEXEC)
                break
            except ConnectionResetError:
                if last:
                    return b"", [], 0
        fds = array.array("i")
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        return record, fds.tolist(), flags

    def hello(self, backend: str, capabilities: Sequence[str] = ()) -> None:
        self.send(
            "hello",
            {
                "version": VERSION,
                "capabilities": list(capabilities),
                "backend": backend,
                "pid": os.getpid(),
                "timeout_ms": max(1, int(self._timeout * 1000)),
            },
        )

    def greeted(self) -> Body:
        """Receives the peer's hello."""
        hello = self.receive("hello", first=True).body
        if hello["version"] < VERSION:
            raise VersionError(f"the peer speaks version {hello['version']}, and this side {VERSION}")
        # Slightly more than three times per timeout.
        self._busy_every = min(_BUSY_EVERY, max(_get(hello, "timeout_ms", int), 1) / 4000)
        return hello

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Sends `busy` while the block runs, as often as the peer's hello requires."""
        done = threading.Event()

        def speak() -> None:
            # The next message detects a dead peer.
            with contextlib.suppress(OSError, VmmfdError):
                while not done.wait(self._busy_every):
                    self._socket.sendmsg([self.encode("busy", {})], [], socket.MSG_NOSIGNAL)

        speaker = threading.Thread(target=speak, daemon=True)
        speaker.start()
        try:
            yield
        finally:
            done.set()
            speaker.join()

    def end(self, error: BaseException | None = None) -> None:
        """Closes the conversation after a last record, which is an `error` if there is one."""
        with contextlib.closing(self._socket), contextlib.suppress(OSError):
            if error is not None and not isinstance(error, (PeerError, PeerGone, UnreadableError)):
                self._socket.sendmsg([self.encode("error", _error_body(error))], [], socket.MSG_NOSIGNAL)
            self._socket.shutdown(socket.SHUT_WR)
            # Closing with unread records would discard our last record.
            deadline = time.monotonic() + self._timeout
            while time.monotonic() < deadline:
                record, fds, _ = self._take()
                close_all(fds)
                if not record:
                    break


def _error_body(error: BaseException) -> Body:
    if isinstance(error, VmmfdError):
        code = error.code
    elif isinstance(error, KeyboardInterrupt):
        code = "interrupted"
    else:
        code = "timeout" if isinstance(error, (TimeoutError, socket.timeout)) else "failed"
    return {"code": code, "message": (str(error) or type(error).__name__)[:1000]}


# The receiving side


class Segment(NamedTuple):
    """One allocation."""

    fd: int
    size: int


@dataclass
class Offered:
    """A producer's offer with its descriptors, which it closes, except the pool's."""

    offer: Body
    range: tuple[int, int]
    segments: list[Segment] = field(default_factory=list)
    pool_fd: int | None = None

    @property
    def memory(self) -> Body:
        return self.offer["memory"]

    @property
    def check(self) -> Body:
        """The data to check against; empty if the producer sends none."""
        return _get(self.offer, "check", dict, {})

    @property
    def pointer(self) -> bytes:
        """The 64 bytes that open memory of a pool, or legacy memory."""
        return bytes.fromhex(self.memory["pointer"])

    def close(self) -> None:
        segments, self.segments = self.segments, []
        close_all([segment.fd for segment in segments])

    def __enter__(self) -> Offered:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Consumer:
    """A connection to a producer, retried until `timeout`. A context manager that reports the block's success or failure to the producer.
    Memory of a pool and legacy memory must be closed inside it."""

    def __init__(self, path: str, backend: str, timeout: float = 30.0) -> None:
        self._pools: dict[int, int] = {}
        self._channel = Channel(_connect(path, timeout), timeout)
        try:
            self._channel.check_user()
            self._channel.hello(backend)
            self._backend, self._theirs = backend, self._channel.greeted()["backend"]
        except BaseException as error:
            self._channel.end(error)
            raise

    def request(
        self,
        object: str = DEFAULT_OBJECT,
        access: str | None = None,
        range: tuple[int, int] | None = None,
    ) -> Offered:
        """Requests an object, or a `range` (offset, length) of it."""
        asked = None if range is None else {"offset": range[0], "length": range[1]}
        self._channel.send("request", {"object": object, "access": access, "range": asked})
        offer = self._channel.receive("offer").body
        if self._theirs != self._backend:
            raise Refusal("backend", f"the memory is on backend {self._theirs}, and this side's is {self._backend}")
        memory = _check_offer(offer, object, access)
        if memory["mechanism"] == "vmm":
            _check_possible(memory, self._backend == "host" or memory["location"] == "host")
        offered = Offered(offer, range or (0, memory["size"]))
        try:
            if memory["mechanism"] == "vmm":
                self._take_segments(offered)
            elif memory["mechanism"] == "pool":
                offered.pool_fd = self._pool(_get(memory, "pool", int))
            return offered
        except BaseException:
            offered.close()
            raise

    def _take_segments(self, offered: Offered) -> None:
        part = _check_part(offered)
        while len(offered.segments) < part["segments"]:
            message = self._channel.receive("segments")
            taken = len(offered.segments)
            # From here on the offer closes them.
            offered.segments += map(Segment, message.fds, message.body["sizes"])
            if message.body.get("first") != part["first"] + taken:
                raise ProtocolError(f"segment {message.body.get('first')} came where {part['first'] + taken} belongs")
            if len(offered.segments) > part["segments"]:
                raise ProtocolError(f"more segments came than the {part['segments']} that were said to follow")
            self._channel.send("received", {"segments": len(offered.segments)})
        if sum(segment.size for segment in offered.segments) != part["size"]:
            raise ProtocolError(f"the segments that came have not {part['size']} bytes")

    def _pool(self, number: int) -> int:
        """A pool's descriptor arrives with the first offer that names it."""
        if number not in self._pools:
            message = self._channel.receive("pool")
            if message.body.get("pool") != number:
                close_all(message.fds)
                raise ProtocolError(f"pool {message.body.get('pool')} came where {number} belongs")
            (self._pools[number],) = message.fds
            self._channel.send("received", {"segments": 0})
        return self._pools[number]

    def report(self, result: Body) -> Body:
        """Reports the result once all work on the memory is done. Returns the producer's own result."""
        self._channel.send("result", result)
        answer = self._channel.receive("result").body
        _get(answer, "verified", bool)
        return answer

    def working(self) -> contextlib.AbstractContextManager[None]:
        """A block during which this side sends `busy` once per second."""
        return self._channel.working()

    def close(self, error: BaseException | None = None) -> None:
        pools, self._pools = self._pools, {}
        close_all(list(pools.values()))
        self._channel.end(error)

    def __enter__(self) -> Consumer:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self.close(error)


def _connect(path: str, timeout: float) -> socket.socket:
    deadline = time.monotonic() + timeout
    while True:
        connecting = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connecting.settimeout(timeout)
            connecting.connect(path)
            return connecting
        except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
            connecting.close()
            if time.monotonic() >= deadline:
                raise TimeoutError(f"no producer on {path} within {timeout} s") from None
            time.sleep(0.01)
        except BaseException:
            connecting.close()
            raise


def _check_offer(offer: Body, object: str, access: str | None) -> Body:
    memory = offer["memory"]
    size, mapped_size, mechanism = memory["size"], memory["mapped_size"], memory["mechanism"]
    if offer["object"] != object or offer.get("buffer") is not None:
        raise ProtocolError(f"object {offer['object']!r} is offered where {object!r} was asked for")
    if access not in (None, offer["access"]):
        raise ProtocolError(f"access {offer['access']!r} is offered where {access!r} was asked for")
    if not 0 < size <= mapped_size < 1 << 47:
        raise ProtocolError(f"{size} bytes of data are offered in {mapped_size} bytes of memory")
    if memory.get("immutable") and offer["access"] == "rw":
        raise ProtocolError("memory that is never written any more is offered to be written")
    pool, pointer, offset = (memory.get(name) is not None for name in ("pool", "pointer", "offset"))
    if mechanism == "vmm":
        sound = memory["segments"] > 0 and not (pool or pointer or memory.get("offset"))
    else:
        sound = memory["segments"] == 0 and memory["location"] == "device" and pointer
        sound = sound and pool == (mechanism == "pool") and offer.get("part") is None
    if not sound:
        raise ProtocolError(f"memory that is shared by {mechanism} lacks a field, or has one of another mechanism")
    array = offer.get("array")
    if array is not None and (len(array["shape"]) > 64 or _reach(array) > size):
        raise ProtocolError("an array is offered that is not inside the data, or has more than 64 dimensions")
    check = _get(offer, "check", dict, {})
    salt, reply, digest = (check.get(name) for name in ("salt", "reply_salt", "digest"))
    if salt is not None and digest is not None:
        raise ProtocolError("a check has both a salt and a digest")
    if reply is not None and (offer["access"] == "ro" or salt in (None, reply)):
        raise ProtocolError("a reply is asked for that can't be written, or can't be told from what is there")
    return memory


def _check_possible(memory: Body, of_machine: bool) -> None:
    """Refuses an impossible offer: more than 4 TiB of a device, or than this machine's memory and swap."""
    most = 1 << 42
    if of_machine:
        with open("/proc/meminfo", encoding="ascii") as lines:
            fields = dict(line.split(":") for line in lines)
        most = sum(int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "SwapTotal"))
    if memory["mapped_size"] > most:
        raise Refusal("failed", f"{memory['mapped_size']} bytes of memory are offered, and there are at most {most}")


def _reach(array: Body) -> int:
    """Returns the least size of a C-order array of any type in bytes; 0 if it has strides."""
    count = 0 if array.get("strides") is not None else 1
    for length in array["shape"]:
        count *= length
    return count + (array.get("offset") or 0)


def _check_part(offered: Offered) -> Body:
    part, memory = _get(offered.offer, "part", dict), offered.memory
    first, segments, offset, size = (part[name] for name in ("first", "segments", "offset", "size"))
    begin, length = offered.range
    behind = memory["segments"] - first - segments, memory["mapped_size"] - offset - size
    # Before, inside and after the part: bytes are in segments, and no segment is empty.
    pieces = all(0 <= count <= bytes and (count == 0) == (bytes == 0) for count, bytes in ((first, offset), (segments, size), behind))
    if not (pieces and segments > 0 and offset <= begin and offset + size >= begin + length):
        raise ProtocolError(f"bytes {offered.range} were asked for, and {part} follows")
    return part


def check_host_segment(fd: int, size: int, immutable: bool) -> None:
    """Checks host memory before it is mapped: sealed, committed, and of the offered size."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise ProtocolError("the descriptor is not of a memfd") from None
    stat = os.fstat(fd)
    if stat.st_size != size:
        raise ProtocolError(f"the memory has {stat.st_size} bytes where {size} were claimed")
    if seals & (fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL) != fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL:
        raise ProtocolError("the memory is not sealed against shrinking, or its seals are not final")
    if stat.st_blocks * 512 < size:
        raise ProtocolError("not all of the memory is committed")
    if immutable and not seals & fcntl.F_SEAL_WRITE:
        raise ProtocolError("the memory is not sealed against writing")


# The offering side


def description(mechanism: str, device: Body, size: int, mapped_size: int, **more: Any) -> Body:
    """Returns the `memory` of an offer. `more` depends on the mechanism: segments, pool, pointer (bytes), offset."""
    if "pointer" in more:
        more["pointer"] = bytes(more["pointer"]).hex()
    memory = {"mechanism": mechanism, "device": device, "location": "device", "size": size, "mapped_size": mapped_size}
    return {**memory, "segments": 0, **more}


@dataclass
class Shared:
    """Memory to offer. The caller keeps the descriptors."""

    memory: Body
    segments: Sequence[tuple[int, int]] = ()
    """Descriptor and size of each allocation, for the mechanism vmm."""
    pool_fd: int | None = None
    access: str = "ro"
    salt: int | None = None
    array: Body | None = None
    reply_salt: int | None = None
    fill: Callable[[], None] = lambda: None
    """Called before each offer."""
    read: Callable[[int, int], bytes] | None = None
    """Reads bytes at an offset, to check a reply."""


class Producer:
    """A socket that serves one consumer. A context manager."""

    def __init__(self, path: str, backend: str, timeout: float = 30.0) -> None:
        self._path, self._backend, self._timeout = path, backend, timeout
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.settimeout(timeout)
            self._listener.bind(path)
            # Before it listens, so that no peer can connect earlier.
            os.chmod(path, 0o600)
            self._listener.listen(1)
        except BaseException:
            self._listener.close()
            raise

    def serve(self, shared: Shared) -> list[Body]:
        """Serves the first consumer. Returns the combined results of its requests once it has disconnected: only then has it released
        foreign memory."""
        channel = Channel(self._listener.accept()[0], self._timeout)
        try:
            channel.check_user()
            results = _Service(channel, shared).converse(self._backend)
        except BaseException as error:
            channel.end(error)
            raise
        channel.end()
        return results

    def close(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        self._listener.close()

    def __enter__(self) -> Producer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Service:
    """One conversation of a producer."""

    def __init__(self, channel: Channel, shared: Shared) -> None:
        self._channel, self._shared = channel, shared
        self._pool_sent = False

    def converse(self, backend: str) -> list[Body]:
        hello = self._channel.greeted()
        self._channel.hello(backend)
        results: list[Body] = []
        while True:
            try:
                asked = ("request",) if results else ("request", "subscribe")
                kind, request, _ = self._channel.receive(*asked, first=True)
                if kind == "subscribe":
                    raise Refusal("object", "there is no stream here, only an object to request")
            except PeerGone:
                if results:
                    return results
                raise
            if hello.get("backend") != backend:
                raise Refusal("backend", f"the memory is on backend {backend}, and the consumer's is another")
            results.append(self._answer(request))

    def _answer(self, request: Body) -> Body:
        shared = self._shared
        begin, length = self._range(request)
        if _get(request, "object", str) != DEFAULT_OBJECT:
            raise Refusal("object", f"there is no such object here, only `{DEFAULT_OBJECT}`")
        access = _get(request, "access", str, shared.access)
        if access == "rw" and shared.access == "ro":
            raise Refusal("access", "the memory is offered read-only, and rw was asked for")
        with self._channel.working():
            shared.fill()
        reply_salt = shared.reply_salt if access == "rw" else None
        offer = {"object": DEFAULT_OBJECT, "memory": shared.memory, "array": shared.array, "access": access}
        offer["part"] = None
        if shared.salt is not None:
            offer["check"] = {"salt": shared.salt, "reply_salt": reply_salt}
        self._hand_over(offer, begin, begin + length)
        return self._conclude(offer, begin, length)

    def _range(self, request: Body) -> tuple[int, int]:
        size = self._shared.memory["size"]
        asked = _get(request, "range", dict, {"offset": 0, "length": size})
        begin, length = _get(asked, "offset", int), _get(asked, "length", int)
        if length == 0 or begin + length > size:
            raise Refusal("range", f"{length} bytes from {begin} on were asked for, of {size}")
        return begin, length

    def _hand_over(self, offer: Body, begin: int, end: int) -> None:
        following: list[tuple[int, int]] = []
        if self._shared.memory["mechanism"] == "vmm":
            offer["part"], following = _part(self._shared.segments, begin, end)
        self._channel.send("offer", offer)
        if self._shared.pool_fd is not None and not self._pool_sent:
            self._channel.send("pool", {"pool": self._shared.memory["pool"]}, [self._shared.pool_fd])
            self._acknowledged(0)
            self._pool_sent = True
        for sent in range(0, len(following), MAX_FDS):
            fds, sizes = zip(*following[sent : sent + MAX_FDS])
            self._channel.send("segments", {"first": offer["part"]["first"] + sent, "sizes": sizes}, fds)
            self._acknowledged(sent + len(fds))

    def _acknowledged(self, sent: int) -> None:
        received = self._channel.receive("received").body.get("segments")
        if received != sent:
            raise ProtocolError(f"{received} segments of {sent} were acknowledged")

    def _conclude(self, offer: Body, begin: int, length: int) -> Body:
        found = self._channel.receive("result").body
        verified = _get(found, "verified", bool)
        claim = offer.get("check") or {}
        figures = _get(found, "check", dict, {})
        if figures:
            words = -(-(begin + length) // 4) - begin // 4 if claim.get("salt") is not None else 0
            mismatches, first = _get(figures, "mismatches", int), figures.get("first_mismatch")
            sound = _get(figures, "words", int) == words and mismatches <= words
            sound = sound and (verified == (mismatches == 0) or words == 0 and not verified)
            sound = sound and (first is None or mismatches > 0 and first["expected"] != first["found"])
            if not sound or figures.get("digest") is not None:
                raise ProtocolError(f"a result of {words} words can't be {found!r:.200}")
        own = unchecked(verified)
        # A consumer that ignores the check does not reply.
        if verified and figures and claim.get("reply_salt") is not None and self._shared.read is not None:
            with self._channel.working():
                own = check(self._shared.read(begin, length), claim["reply_salt"], begin)
        self._channel.send("result", own)
        return own if verified and not own["verified"] else found


def _part(segments: Sequence[tuple[int, int]], begin: int, end: int) -> tuple[Body, list[tuple[int, int]]]:
    """Returns the segments that cover a byte range, and the message's fields for them."""
    ends = [0]
    for _, size in segments:
        ends.append(ends[-1] + size)
    covering = [i for i in range(len(segments)) if ends[i] < end and ends[i + 1] > begin]
    first = covering[0]
    stop = first + len(covering)
    part = {"first": first, "segments": len(covering), "offset": ends[first], "size": ends[stop] - ends[first]}
    return part, list(segments[first:stop])
