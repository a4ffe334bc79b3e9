"""A client of both protocols in plain Python 3.9, to read beside docs/protocol.md and docs/broker-protocol.md.

    with Consumer(path) as consumer, consumer.request() as taken:
        consumer.report(check(taken.read(), taken.check["salt"]))
    with Broker(path) as broker, broker.get("frames/left") as taken:
        data = taken.read()

Comments such as R3 name the rules of the pages. The client opens host memory. On a GPU, pass `backend="cuda"`, and import the descriptors
in `segments` with cuMemImportFromShareableHandle. It lacks streams, pools, legacy handles, digests and replies.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import mmap
import os
import socket
import struct
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Body = dict[str, Any]

VERSION, MAX_BODY, MAX_FDS, GRANULARITY = 1, 65536, 253, 2 << 20
HEADER = struct.Struct("<4sHHII")
HANDOFF = dict(enumerate("hello request offer segments received result busy error pool subscribe stream format ready done end leave".split(), 1))
BROKER = {number: HANDOFF[number] for number in (1, 4, 5, 7, 8)}
BROKER.update(enumerate("put send published get lease claimed list objects stat version who leases delete done refused".split(), 32))
BROKER.update(enumerate("release report stop resume resumed watch events measure measured recall topic follow opened meet met".split(), 47))
# V2 and B6.
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
TABLE_SEALS = SEALS | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class Failure(Exception):
    """The conversation ends with this code. The peer receives it, unless `is_silent`."""

    def __init__(self, code: str, message: str, is_silent: bool = False) -> None:
        self.code, self.is_silent = code, is_silent
        # R9: control characters of a peer's text could change a terminal.
        super().__init__("".join(c if c.isprintable() else " " for c in f"{message} ({code})"))


class Refused(Failure):
    """The broker refused a request. The connection continues (B3)."""


def broken(message: str) -> Failure:
    """The peer broke a rule (R2)."""
    return Failure("protocol", message)


def is_natural(value: Any) -> bool:
    # R7: `True` is an `int` in Python.
    return type(value) is int and 0 <= value < 1 << 64


def is_name(value: Any) -> bool:
    return isinstance(value, str) and len(value.encode()) <= 255


def is_sizes(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(map(is_natural, value))


# The fields that this client reads: a type, a predicate, the fields of an object, or a list of such objects. A field whose name ends in `?`
# may be null or absent (R6).
MEMORY = {
    "mechanism": str, "device": {"uuid": str, "name": is_name}, "size": is_natural, "mapped_size": is_natural, "segments": is_natural,
    "immutable?": bool,
}  # fmt: skip
RUN = {"first": is_natural, "segments": is_natural, "offset": is_natural, "size": is_natural}
TABLE = {"length?": is_natural}
FIELDS: dict[str, Body] = {
    "hello": {"version": is_natural, "capabilities": list, "backend": is_name, "timeout_ms": lambda value: is_natural(value) and value},
    "request": {"object": is_name, "access?": str, "range?": {"offset": is_natural, "length": is_natural}},
    "offer": {"object": is_name, "memory": MEMORY, "access": str, "part?": RUN, "check?": {}},
    "segments": {"first": is_natural, "sizes": is_sizes},
    "received": {"segments": is_natural},
    "result": {"verified": bool, "check?": {}},
    "error": {"code": str, "message": str},
    "published": {"version": is_natural, "id": str},
    "lease": {
        "token": str, "version": is_natural, "backend": is_name, "metadata?": TABLE, "sizes": is_sizes,
        "parts": [{"name": is_name, "memory": MEMORY, "runs": [RUN], "arrays?": TABLE}],
    },
    "refused": {"code": str, "message": str},
    "stream": {"epoch": is_natural, "turns?": lambda value: value == 256},
    "ready": {"number": is_natural, "ready_at?": lambda value: is_natural(value) and 0 < value < 1 << 63},
}  # fmt: skip


def check_fields(name: str, value: Any, wanted: Any) -> None:
    """R4 to R7."""
    shape = type(wanted) if isinstance(wanted, (dict, list)) else wanted
    if not (isinstance(value, shape) if isinstance(shape, type) else shape(value)):
        raise broken(f"{name} is {value!r:.100}")
    for field, of_field in wanted.items() if isinstance(wanted, dict) else ():
        inner = value.get(field.rstrip("?"))
        if inner is not None or not field.endswith("?"):
            check_fields(f"{name}.{field.rstrip('?')}", inner, of_field)
    for item in value if isinstance(wanted, list) else ():
        check_fields(name, item, wanted[0])


def distinct(pairs: list[tuple[str, Any]]) -> Body:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("duplicate names")  # R8
    return dict(pairs)


def fd_count(kind: str, body: Body) -> int:
    """R3 and B7: the descriptors of a record are those of its tables, then those of its segments."""
    tables = [body.get("metadata")] if kind in ("put", "lease", "version") else []
    tables += [part.get("arrays") for part in body["parts"]] if kind in ("put", "lease") else []
    tables += [body] if kind == "format" else []
    sizes = body.get("sizes") if kind in ("segments", "put", "lease") else None
    peers = 1 + bool(body.get("process")) if kind == "meet" else int(kind == "pool" or kind == "stream" and body.get("turns") is not None)
    return peers + sum("length" in table for table in tables if table) + len(sizes or ())


def encode(kinds: dict[int, str], kind: str, body: Body) -> bytes:
    """Returns a record without its descriptors (R1)."""
    text = json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()
    number = next(number for number, name in kinds.items() if name == kind)
    return HEADER.pack(b"VMFD", VERSION, number, len(text), fd_count(kind, body)) + text


def decode(kinds: dict[int, str], record: bytes, fds: int) -> tuple[str, Body]:
    """Returns the kind and the body of a record that arrived with this number of descriptors."""
    if len(record) < HEADER.size:
        raise broken(f"a record of {len(record)} bytes has no header")
    magic, version, number, length, claimed = HEADER.unpack_from(record)
    text = record[HEADER.size :]
    if magic == b"VMFD" and version != VERSION:
        raise Failure("version", f"a record of version {version}")
    if magic != b"VMFD" or number not in kinds or length != len(text) or length > MAX_BODY:
        raise broken(f"a record with the header {record[: HEADER.size].hex()}")
    kind = kinds[number]
    try:
        # `int` refuses NaN and Infinity, which are no JSON.
        body = json.loads(text.decode(), object_pairs_hook=distinct, parse_constant=int)
    except (ValueError, RecursionError) as error:
        raise broken(f"the body of {kind} is no JSON: {error}") from None
    check_fields(kind, body, FIELDS.get(kind, {}))
    if not claimed == fds == fd_count(kind, body):
        raise broken(f"{kind} came with {fds} descriptors, and its header claims {claimed}")
    return kind, body


def host_device(boot_id: str = "") -> str:
    """Returns the UUID of the host's memory (V5)."""
    boot_id = boot_id or Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return str(uuid.uuid5(uuid.UUID("8a4f2d0e-6c1b-4f0d-9a53-6d1e0c6f7b21"), boot_id))


def check_memfd(fd: int, size: int, seals: int) -> None:
    """V1 to V4."""
    try:
        stat, found = os.fstat(fd), fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise broken("a descriptor is no memfd") from None
    if os.fstatvfs(fd).f_bsize != mmap.PAGESIZE or stat.st_size != size or stat.st_blocks * 512 < size or found & seals != seals:
        raise broken(f"a memfd of {stat.st_size} bytes, {stat.st_blocks} blocks and seals {found:#x}, not {size} bytes and {seals:#x}")


class Memory(contextlib.AbstractContextManager):
    """Descriptors with their sizes. Their bytes follow one another, and `size` bytes from `start` on are the data. Closes them at exit."""

    def __init__(self, segments: list[tuple[int, int]], size: int = 0) -> None:
        self.segments, self.size, self.start, self.is_immutable = segments, size, 0, False
        # Of an offer or a lease.
        self.check: Body = {}
        self.metadata: Any = None

    @classmethod
    def create(cls, data: bytes, sizes: Sequence[int] = (GRANULARITY,)) -> Memory:
        """Creates host memory of segments of these sizes, which contain the data, then zeros (V1 to V3)."""
        memory = cls([], len(data))
        for size in sizes:
            fd = os.memfd_create("vmmfd", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            memory.segments.append((fd, size))
            os.posix_fallocate(fd, 0, size)
            os.pwrite(fd, data[:size], 0)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            data = data[size:]
        return memory

    def describe(self) -> Body:
        """Returns the `memory` of an offer or a put."""
        device, mapped_size = {"uuid": host_device(), "name": "host memory"}, sum(size for _, size in self.segments)
        sizes = {"size": self.size, "mapped_size": mapped_size, "segments": len(self.segments)}
        return {"mechanism": "vmm", "device": device, "location": "device", **sizes}

    def expect(self, memory: Body, access: str, run: Body, range: tuple[int, int] | None, is_host: bool) -> None:
        """Checks a description before the memory is opened (M1, M2, M6, C5, C9)."""
        size, mapped_size, (begin, length) = memory["size"], memory["mapped_size"], range or (0, memory["size"])
        self.start, self.size, self.is_immutable = begin - run["offset"], length, bool(memory.get("immutable"))
        if memory["mechanism"] != "vmm":
            raise Failure("failed", f"this client has no mechanism {memory['mechanism']}")
        if not 0 < size <= mapped_size < 1 << 47 or mapped_size % GRANULARITY or (self.is_immutable and access != "ro"):
            raise broken(f"{size} bytes in {mapped_size} bytes of memory, with {access}")
        # Without the swap space.
        if mapped_size > (os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE if is_host else 4 << 40):
            raise Failure("failed", f"{mapped_size} bytes are more than this machine has")
        if is_host and memory["device"]["uuid"].lower() != host_device():
            raise Failure("device", f"the memory is on the device {memory['device']['uuid']}")
        if not run["offset"] <= begin < begin + length <= run["offset"] + run["size"]:
            raise broken(f"{run} has not the {length} bytes at {begin}")
        # Before, inside and after the run there are bytes exactly if there are segments.
        after = memory["segments"] - run["first"] - run["segments"], mapped_size - run["offset"] - run["size"]
        for count, size in ((run["first"], run["offset"]), (run["segments"], run["size"]), after):
            if count < 0 or size < count * GRANULARITY or (count == 0) != (size == 0):
                raise broken(f"{count} segments with {size} bytes")

    def add(self, fds: list[int], sizes: list[int], run: Body, is_next: bool = True) -> None:
        """Appends segments of a run, which follow the last if `is_next` (C6, G5)."""
        self.segments += zip(fds, sizes)
        count, size = len(self.segments), sum(size for _, size in self.segments)
        if not is_next or count > run["segments"] or (count == run["segments"]) != (size == run["size"]):
            raise broken(f"{count} segments with {size} bytes, or out of order, for {run}")

    def read(self) -> bytes:
        """Returns a copy of the data in host memory."""
        found, seals = b"", SEALS | (fcntl.F_SEAL_WRITE if self.is_immutable else 0)
        for fd, size in self.segments:
            check_memfd(fd, size, seals)
            with mmap.mmap(fd, size, mmap.MAP_PRIVATE if self.is_immutable else mmap.MAP_SHARED, mmap.PROT_READ) as view:
                found += view[:]
        return found[self.start : self.start + self.size]

    def __exit__(self, *_: object) -> None:
        close_all([fd for fd, _ in self.segments])


def close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


class Connection(contextlib.AbstractContextManager):
    """A conversation. Reports a failure of its block to the peer."""

    def __init__(self, peer: str | socket.socket, kinds: dict[int, str], timeout: float, backend: str, *capabilities: str) -> None:
        self.kinds, self.timeout, self.backend, is_client = kinds, timeout, backend, isinstance(peer, str)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) if isinstance(peer, str) else peer
        self.socket.settimeout(timeout)
        own = {"version": VERSION, "capabilities": capabilities, "backend": backend, "pid": os.getpid(), "timeout_ms": int(timeout * 1000)}
        try:
            if isinstance(peer, str):
                self.socket.connect(peer)
                self.send("hello", own)
            self.hello = self.receive("hello", may_be_busy=is_client)[1]
            if self.hello["version"] < VERSION:
                raise Failure("version", f"the peer has version {self.hello['version']}")  # H1
            if not is_client:
                self.send("hello", own)  # H2
            if not set(capabilities) <= set(self.hello["capabilities"]):
                raise Failure("object", f"the peer lacks {' or '.join(capabilities)}")  # B2
        except BaseException as error:
            self.end(error)
            raise

    def send(self, kind: str, body: Body, fds: Sequence[int] = ()) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self.socket.sendmsg([encode(self.kinds, kind, body)], rights, socket.MSG_NOSIGNAL)
        except (BrokenPipeError, ConnectionResetError):
            # T3: the peer's `error` may be queued. This ends with a Failure.
            while True:
                close_all(self.receive()[2])

    def receive(self, *kinds: str, may_be_busy: bool = True) -> tuple[str, Body, list[int]]:
        """Returns the next record of these kinds (of any without `kinds`) that is not `busy` (H4). The kind "" is a close."""
        while True:
            record, fds, flags = self.take()
            try:
                if not record and "" in kinds:
                    return "", {}, fds
                if not record:
                    raise Failure("failed", "the peer closed the connection", is_silent=True)  # T2
                if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
                    raise broken("a record or its descriptors were cut off")
                kind, body = decode(self.kinds, record, len(fds))
                if kind == "error":
                    raise Failure(body["code"], f"the peer reports: {body['message'][:1024]}")
                if kind == "busy" and may_be_busy:
                    continue
                if kinds and kind not in kinds:
                    raise broken(f"{kind} came instead of {' or '.join(kinds)}")
                return kind, body, fds
            except BaseException as error:
                close_all(fds)
                # H5: an `error` is not answered, even if it is invalid.
                if isinstance(error, Failure) and record[4:8] == b"\1\0\x08\0":
                    error.is_silent = True
                raise

    def take(self) -> tuple[bytes, list[int], int]:
        """Returns the bytes, the descriptors and the flags of the next record. No bytes: the peer has hung up."""
        room = HEADER.size + MAX_BODY, socket.CMSG_SPACE(MAX_FDS * 4), socket.MSG_CMSG_CLOEXEC
        try:
            record, ancillary, flags, _ = self.socket.recvmsg(*room)
        except ConnectionResetError:
            # T3: reported once, before the queued records.
            record, ancillary, flags, _ = self.socket.recvmsg(*room)
        fds = array.array("i")
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(data[: len(data) // 4 * 4])
        return record, fds.tolist(), flags

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Sends `busy` while the block works (H3)."""

        def send() -> None:
            with contextlib.suppress(Failure, OSError):
                while not done.wait(min(0.9, self.hello["timeout_ms"] / 4000)):
                    self.send("busy", {})

        done, thread = threading.Event(), threading.Thread(target=send)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def end(self, error: BaseException | None = None) -> None:
        """Sends an `error` if there is one, shuts down writing, reads until the peer closes, and closes (H5, H6)."""
        with contextlib.closing(self.socket), contextlib.suppress(Failure, OSError):
            is_late = isinstance(error, socket.timeout)
            if error is not None and not getattr(error, "is_silent", False):
                code = getattr(error, "code", "timeout" if is_late else "failed")
                self.send("error", {"code": code, "message": (str(error) or type(error).__name__)[:256]})
            self.socket.shutdown(socket.SHUT_WR)
            deadline = time.monotonic() + (0.1 if is_late else self.timeout)
            record = b"-"
            while record and time.monotonic() < deadline:
                self.socket.settimeout(max(0.001, deadline - time.monotonic()))
                record, fds, _ = self.take()
                close_all(fds)

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self.end(None if isinstance(error, Refused) else error)


class Consumer(Connection):
    """A connection to a producer."""

    def __init__(self, path: str, backend: str = "host", timeout: float = 30.0) -> None:
        super().__init__(path, HANDOFF, timeout, backend)

    @contextlib.contextmanager
    def request(self, range: tuple[int, int] | None = None, access: str | None = None, object: str = "default") -> Iterator[Memory]:
        """Requests an object, or a range (offset, length) of it, and receives its descriptors."""
        self.send("request", {"object": object, "access": access, "range": range and {"offset": range[0], "length": range[1]}})
        offer = self.receive("offer")[1]
        if self.hello["backend"] != self.backend:
            raise Failure("backend", f"the producer's backend is {self.hello['backend']}")  # C2
        if offer["object"] != object or access not in (None, offer["access"]) or offer.get("part") is None:
            raise broken("the offer differs from the request, or has no part")  # C4, C5
        part = offer["part"]
        with Memory([]) as taken:
            taken.expect(offer["memory"], offer["access"], part, range, self.backend == "host")
            taken.check = offer.get("check") or {}
            while len(taken.segments) < part["segments"]:
                _, body, fds = self.receive("segments")
                taken.add(fds, body["sizes"], part, body["first"] == part["first"] + len(taken.segments))  # C6
                self.send("received", {"segments": len(taken.segments)})  # C7
            yield taken

    def report(self, result: Body) -> Body:
        """Reports the result, when all work on the memory is done (C10). Returns the producer's result."""
        self.send("result", result)
        return self.receive("result")[1]


def serve(path: str, memory: Memory, salt: int | None = None, timeout: float = 30.0) -> list[Body]:
    """Listens, serves one consumer of host memory, and returns the results of its requests. `salt`: the data is this salt's pattern."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.settimeout(timeout)
        listener.bind(path)
        listener.listen(1)
        accepted = listener.accept()[0]
    os.unlink(path)
    results: list[Body] = []
    with Connection(accepted, HANDOFF, timeout, "host") as peer:
        while True:
            kind, asked, _ = peer.receive("request", "" if results else "subscribe", may_be_busy=False)
            if not kind:
                return results  # C12
            if kind == "subscribe" or asked["object"] != "default":
                raise Failure("object", "there is only the object `default`, and no stream")  # C3, C13
            if peer.hello["backend"] != "host":
                raise Failure("backend", "the memory is on the backend host")  # C2
            if asked.get("access") == "rw":
                raise Failure("access", "the memory is read-only")
            results.append(hand_over(peer, asked.get("range") or {"offset": 0, "length": memory.size}, memory, salt))


def hand_over(peer: Connection, span: Body, memory: Memory, salt: int | None) -> Body:
    """Answers a request. Returns the consumer's result."""
    begin, end = span["offset"], span["offset"] + span["length"]
    if not begin < end <= memory.size:
        raise Failure("range", f"the range {span} of {memory.size} bytes")
    starts = [sum(size for _, size in memory.segments[:at]) for at in range(len(memory.segments) + 1)]
    covering = [at for at in range(len(memory.segments)) if starts[at] < end and starts[at + 1] > begin]
    first, stop = covering[0], covering[-1] + 1
    part = {"first": first, "segments": stop - first, "offset": starts[first], "size": starts[stop] - starts[first]}
    offer = {"object": "default", "memory": memory.describe(), "access": "ro", "part": part}
    peer.send("offer", offer if salt is None else {**offer, "check": {"salt": salt}})
    for at in range(first, stop, MAX_FDS):
        fds, sizes = zip(*memory.segments[at : min(at + MAX_FDS, stop)])
        peer.send("segments", {"first": at, "sizes": sizes}, fds)
        if peer.receive("received")[1]["segments"] != at - first + len(fds):
            raise broken("another number of segments was received")  # C7
    found = peer.receive("result")[1]
    peer.send("result", {"verified": found["verified"]})  # C11
    return found


class Broker(Connection):
    """A connection to a broker, with one request at a time (B8)."""

    def __init__(self, path: str, timeout: float = 30.0) -> None:
        super().__init__(path, BROKER, timeout, "none", "broker")

    def answer(self, *kinds: str, wait: float = 0.0) -> tuple[Body, list[int]]:
        """Returns the answer to a request that waits this long, and its descriptors."""
        self.socket.settimeout(self.timeout + wait)
        kind, body, fds = self.receive(*kinds, "refused")
        if kind == "refused":
            raise Refused(body["code"], f"refused: {body['message'][:1024]}")
        return body, fds

    def put(self, name: str, memory: Memory, **more: Any) -> Body:
        """Puts an object of one part. `more` has other fields of the message: replace, if_version, mode, lifetime, keep."""
        fds, sizes = [fd for fd, _ in memory.segments], [size for _, size in memory.segments]
        parts = [{"name": "all", "memory": memory.describe()}]
        self.send("put", {"name": name, "backend": "host", "parts": parts, **more, "sizes": sizes[:MAX_FDS]}, fds[:MAX_FDS])
        if len(fds) > MAX_FDS:
            self.answer("send")  # P2
        for at in range(MAX_FDS, len(fds), MAX_FDS):
            self.send("segments", {"first": at, "sizes": sizes[at : at + MAX_FDS]}, fds[at : at + MAX_FDS])
        return self.answer("published")[0]

    @contextlib.contextmanager
    def get(self, name: str, range: tuple[int, int] | None = None, wait: float = 0.0, **more: Any) -> Iterator[Memory]:
        """Leases an object of the part `all`, or a range (offset, length) of it, for the block. `more` has other fields of the message."""
        wanted = {"name": name, "parts": range and {"all": [{"offset": range[0], "length": range[1]}]}, **more}
        self.send("get", {"objects": [wanted], "wait_ms": int(wait * 1000) or None})
        lease, fds = self.answer("lease", wait=wait)
        count, table = len(fds) - len(lease["sizes"]), lease.get("metadata") or {}
        with Memory(list(zip(fds[count:], lease["sizes"]))) as taken, contextlib.ExitStack() as undo:
            undo.callback(close_all, fds[:count])
            if len(lease["parts"]) != 1 or len(lease["parts"][0]["runs"]) != 1:
                raise Failure("failed", "this client takes one run of one part")
            part, run = lease["parts"][0], lease["parts"][0]["runs"][0]
            taken.expect(part["memory"], "ro", run, range, lease["backend"] == "host")
            taken.add([], [], run)
            if "length" in table:
                check_memfd(fds[0], table["length"], TABLE_SEALS)  # B6
            taken.metadata = json.loads(os.pread(fds[0], table["length"], 0)) if "length" in table else table.get("inline")
            while len(taken.segments) < run["segments"]:
                self.send("received", {"segments": len(taken.segments)})  # G6
                body, fds = self.answer("segments")
                taken.add(fds, body["sizes"], run, body["first"] == len(taken.segments))  # G5
            yield taken
            self.send("release", {"token": lease["token"]})  # L1


def word(salt: int, i: int) -> int:
    h = i >> 31 & 0xFFFFFFFF
    h = (h ^ h >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    h = (h ^ h >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return (i * 2 + 1337 & 0xFFFFFFFF) ^ 0xDEADBEEF ^ salt ^ h ^ h >> 16


def pattern(salt: int, start: int, size: int) -> bytes:
    """Returns the bytes of a salt's pattern from `start` on."""
    first, end = start // 4, -(-(start + size) // 4)
    words = struct.pack(f"<{end - first}I", *(word(salt, i) for i in range(first, end)))
    return words[start - first * 4 :][:size]


def check(found: bytes, salt: int, start: int = 0) -> Body:
    """Returns the `result` for bytes that begin at `start` of the object (K3 to K5)."""
    before, after = bytes(start % 4), bytes(-(start + len(found)) % 4)
    both = (before + data + after for data in (pattern(salt, start, len(found)), found))
    pairs = list(zip(*(struct.unpack(f"<{len(data) // 4}I", data) for data in both)))
    wrong = [{"index": start // 4 + i, "expected": e, "found": f} for i, (e, f) in enumerate(pairs) if e != f]
    figures = {"words": len(pairs), "mismatches": len(wrong), **({"first_mismatch": wrong[0]} if wrong else {})}
    return {"verified": not wrong, "check": figures}
