"""Tests `vmmfd serve` over host memory with a client in plain Python. Needs no GPU.

broker_host.py FOLDER    the folder in which the commands are
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import broker
import host
import support
import protocol
from broker import Client, Lease, Part, Refused
from support import Child, Meeting, expect
from protocol import Segment

MIB = 1 << 20
GRANULARITY = 2 * MIB
SIZES = [GRANULARITY, 2 * GRANULARITY, GRANULARITY]
SIZE = 7 * MIB + 3


def run(meeting: Meeting, *arguments: str) -> Child:
    """Starts the command vmmfd."""
    return Child([meeting.command("vmmfd"), *arguments, "--socket", meeting.path], 60.0)


@contextlib.contextmanager
def serving(meeting: Meeting) -> Iterator[None]:
    """Starts a broker at the test's socket."""
    with run(meeting, "serve") as server:
        while not os.path.exists(meeting.path):
            server.must_run()
            time.sleep(0.005)
        try:
            yield
            server.must_run()
        finally:
            server.stop()


def done(meeting: Meeting, *arguments: str, code: int = 0) -> str:
    """Returns the output of a command that must exit with this code."""
    with run(meeting, *arguments) as command:
        return command.ends(code)


def memory(sizes: Sequence[int], size: int) -> protocol.Body:
    """Describes segments of the host device."""
    name = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").rstrip("\n")
    # V5 of the protocol.
    device = {"uuid": str(uuid.uuid5(uuid.UUID("8a4f2d0e-6c1b-4f0d-9a53-6d1e0c6f7b21"), name)), "name": "host memory"}
    return protocol.description("vmm", device, size, sum(sizes), segments=len(sizes))


def bytes_of(lease: Lease, part: int = 0) -> bytes:
    """Returns the bytes of a part's segments, without padding."""
    (run, segments), *others = lease.parts[part].runs
    expect("runs", others, [])
    expect("bytes of the run", sum(segment.size for segment in segments), run["size"])
    data = b"".join(host.content(segment) for segment in segments)
    return data[: lease.parts[part].memory["size"] - run["offset"]]


def refusal(action: Callable[[], object]) -> str:
    """Returns the server's refusal code."""
    error = host.error_of(action)
    expect("is refused", isinstance(error, Refused), True)
    return error.code


def golden(_: Meeting) -> None:
    """this side produces the golden records of the broker page"""
    path = Path(__file__).resolve().parents[2] / "docs/broker-golden.json"
    if not path.exists():
        print("left out, as there are no docs here: the broker's golden records")
        return
    records = json.loads(path.read_text(encoding="utf-8"))
    for record in records["records"]:
        message = broker.decode(bytes.fromhex(record["hex"]), [0] * record["descriptors"])
        expect(record["name"], (message.kind, message.body), (record["kind"], record["body"]))
        expect(f"{record['name']}, written", broker.encode(message.kind, message.body).hex(), record["hex"])
    for record in records["refused"]:
        given = bytes.fromhex(record["hex"]), [0] * record["descriptors"]
        error = host.error_of(lambda given=given: broker.decode(*given))
        expect(f"{record['name']} is refused", isinstance(error, protocol.ProtocolError), True)


def puts(meeting: Meeting) -> None:
    """`vmmfd get` reads segments that Python put, also after Python has exited"""
    data = os.urandom(SIZE)
    with serving(meeting):
        with host.memfds(SIZES, data) as segments, Client(meeting.path) as client:
            published = client.put("py/three", [Part("all", memory(SIZES, SIZE), segments)], backend="host")
            expect("version", published["version"], 1)
        to = f"{os.path.dirname(meeting.path)}/file"
        done(meeting, "get", "py/three", "--to", to, "--backend", "host")
        expect("the bytes of the file", Path(to).read_bytes() == data, True)
        (listed,) = json.loads(done(meeting, "ls", "--json"))["objects"]
        expect("as listed", (listed["name"], listed["version"], listed["size"]), ("py/three", 1, SIZE))


def gets(meeting: Meeting) -> None:
    """Python reads and lists an object of an exited `vmmfd put`"""
    data = os.urandom(3 * MIB + 1)
    source = f"{os.path.dirname(meeting.path)}/source"
    Path(source).write_bytes(data)
    with serving(meeting):
        done(meeting, "put", "rs/file", "--from", source, "--meta", '{"engine":"x","n":[1,2]}', "--backend", "host")
        with Client(meeting.path) as client:
            (summary,) = client.list("rs/")
            expect("as listed", (summary["name"], summary["version"], summary["leases"]), ("rs/file", 1, 0))
            with client.get("rs/file", expect={"engine": "x"}) as lease:
                expect("metadata", lease.metadata, {"engine": "x", "n": [1, 2]})
                expect("the bytes", bytes_of(lease) == data, True)
                held = json.loads(done(meeting, "who", "--json"))["leases"]
                expect("who", [(lease["name"], lease["pid"]) for lease in held], [("rs/file", os.getpid())])
            expect("leases", client.list()[0]["leases"], 0)
            expect("code", refusal(lambda: client.get("rs/file", expect={"engine": "y"})), "differs")
            done(meeting, "rm", "rs/file")
            expect("listed", client.list(), [])


def many(meeting: Meeting) -> None:
    """an object with more segments than a record carries, as a whole and in part, and two objects at once"""
    count, size = 600, 600 * GRANULARITY - 1
    with serving(meeting), host.memfds([GRANULARITY] * 3, os.urandom(3 * GRANULARITY)) as three:
        described = memory([GRANULARITY] * count, size)
        with Client(meeting.path) as client:
            client.put("many", [Part("all", described, [three[at % 3] for at in range(count)])], backend="host")
            client.put("one", [Part("all", memory([GRANULARITY], 9), three[:1])], backend="host")
            contents = [host.content(segment) for segment in three]
            with client.get("many") as lease:
                ((run, segments),) = lease.parts[0].runs
                expect("segments", (run["first"], run["segments"], len(segments)), (0, count, count))
                for at in (0, 1, 252, 253, 254, 505, 506, 599):
                    expect(f"segment {at}", host.content(segments[at]) == contents[at % 3], True)
            with client.get("many", range={"offset": 301 * GRANULARITY + 7, "length": GRANULARITY}) as lease:
                ((run, segments),) = lease.parts[0].runs
                expected = {"first": 301, "segments": 2, "offset": 301 * GRANULARITY, "size": 2 * GRANULARITY}
                expect("run", run, expected)
                expect("segment 302", host.content(segments[1]) == contents[302 % 3], True)
            first, second = client.get_all([{"name": "many"}, {"name": "one"}])
            with first, second:
                expect("of the first", len(first.parts[0].runs[0][1]), count)
                expect("of the second", bytes_of(second) == contents[0][:9], True)


def tables(meeting: Meeting) -> None:
    """arrays and metadata that are too large for a record travel beside it; arrays can be got by name"""
    arrays = [
        {"name": f"layer.{at}", "array": {"dtype": "float32", "shape": [1024], "offset": at * MIB}, "attributes": {"at": at}}
        for at in range(7)
    ]
    arrays += [{"name": f"small.{at}", "array": {"dtype": "uint8", "shape": [1]}} for at in range(2000)]
    metadata = {"text": "é" * 10_000}
    data = os.urandom(SIZE)
    with serving(meeting), host.memfds(SIZES, data) as segments, Client(meeting.path) as client:
        part = Part("all", memory(SIZES, SIZE), segments, arrays, "blake3:00")
        client.put("tables", [part], backend="host", metadata=metadata, mode=0o640, lifetime={"kind": "idle", "ms": 60_000})
        with client.get("tables", digests={"all": "blake3:00"}) as lease:
            expect("metadata", lease.metadata, metadata)
            expect("names of the arrays", [of["name"] for of in lease.parts[0].arrays], [of["name"] for of in arrays])
            expect("attributes", lease.parts[0].arrays[3]["attributes"], {"at": 3})
            expect("the bytes", bytes_of(lease) == data, True)
        with client.get("tables", arrays=["layer.6"]) as lease:
            ((run, _),) = lease.parts[0].runs
            expect("run of the last array", run["offset"] <= 6 * MIB < run["offset"] + run["size"] < sum(SIZES) + 1, True)
            expect("less than all", run["size"] < sum(SIZES), True)
        found, told = client.stat("tables")
        expect("metadata by stat", told, metadata)
        expect("as told", (found["summary"]["mode"], found["summary"]["arrays"]), (0o640, len(arrays)))
        expect("lifetime", found["lifetime"], {"kind": "idle", "ms": 60_000})
        expect("maker", found["parts"][0]["maker"]["pid"], os.getpid())


def versions(meeting: Meeting) -> None:
    """a replacement is the next version, if its condition holds; the previous version is kept while it is leased"""
    with serving(meeting), host.memfds([GRANULARITY] * 2, os.urandom(2 * GRANULARITY)) as (old, new):
        described = memory([GRANULARITY], 1000)
        with Client(meeting.path) as client:
            client.put("v", [Part("all", described, [old])], backend="host")
            again = [Part("all", described, [new])]
            expect("code", refusal(lambda: client.put("v", again, backend="host")), "exists")
            expect("code", refusal(lambda: client.put("v", again, backend="host", replace=True, if_version=7)), "version")
            with client.get("v") as lease:
                expect("version", client.put("v", again, backend="host", if_version=1)["version"], 2)
                expect("bytes of the old one", bytes_of(lease) == host.content(old)[:1000], True)
                with client.get("v", version=1) as same:
                    expect("version", same.body["version"], 1)
                with client.get("v") as current:
                    expect("bytes of the new one", bytes_of(current) == host.content(new)[:1000], True)
            expect("code", refusal(lambda: client.get("v", version=1)), "absent")


def waits(meeting: Meeting) -> None:
    """a get waits for a put on another connection, until its deadline or a stop"""
    with serving(meeting), host.memfds([GRANULARITY], b"x") as segments, Client(meeting.path) as waiting:
        expect("code", refusal(lambda: waiting.get("later")), "absent")
        expect("code", refusal(lambda: waiting.get("later", wait=0.05)), "timeout")
        waiting.send("get", {"objects": [{"name": "later"}], "wait_ms": 60_000})
        waiting.send("stop", {})
        expect("code", refusal(lambda: waiting.answer("lease")), "stopped")
        with Client(meeting.path) as maker:
            put = threading.Timer(0.2, lambda: maker.put("later", [Part("all", memory([GRANULARITY], 1), segments)], "host"))
            put.start()
            try:
                with waiting.get("later", wait=30.0) as lease:
                    expect("the byte", bytes_of(lease), b"x")
            finally:
                put.join()


def together(meeting: Meeting) -> None:
    """two connections put one version, a part each; claims exclude a third; if one dies, nothing is left"""
    claim = [{"part": f"rank{rank}", "group": "start"} for rank in range(2)]
    with serving(meeting), host.memfds([GRANULARITY] * 2, b"a".ljust(GRANULARITY, b"\0") + b"b") as segments, contextlib.ExitStack() as stack:
        makers = [stack.enter_context(Client(meeting.path)) for _ in range(2)]
        third, fourth = (stack.enter_context(Client(meeting.path)) for _ in range(2))
        for maker, of in zip(makers, claim):
            maker.send("get", {"objects": [{"name": "pair"}], "wait_ms": 60_000, "claim": of})
            maker.answer("claimed")
        third.send("get", {"objects": [{"name": "pair"}], "wait_ms": 60_000, "claim": {}})
        bodies = [
            {
                "name": "pair", "backend": "host", "announced": ["rank0", "rank1"], "group": "start", "wait_ms": 60_000,
                "parts": [{"name": f"rank{rank}", "memory": memory([GRANULARITY], 1)}], "sizes": [GRANULARITY],
            }
            for rank in range(2)
        ]
        # The first maker has put a part, and then disconnects.
        dying = stack.enter_context(Client(meeting.path))
        dying.send("put", bodies[1], [segments[1].fd])
        dying.close()
        makers[0].send("put", bodies[0], [segments[0].fd])
        # Answered after the other put.
        expect("code", refusal(lambda: fourth.get("pair")), "absent")
        expect("listed", fourth.list(), [])
        makers[1].send("put", bodies[1], [segments[1].fd])
        published = [maker.answer("published").body for maker in makers]
        expect("one version", published[0] == published[1], True)
        with third._take(False) as lease:
            expect("parts", [part.name for part in lease.parts], ["rank0", "rank1"])
            expect("bytes", [bytes_of(lease, part)[:1] for part in range(2)], [b"a", b"b"])


def half(meeting: Meeting) -> None:
    """a put with missing segments leaves nothing"""
    count = 300
    with serving(meeting), host.memfds([GRANULARITY], b"x") as (segment,), Client(meeting.path) as looking:
        with Client(meeting.path) as client:
            body = {
                "name": "half", "backend": "host", "sizes": [GRANULARITY] * 200,
                "parts": [{"name": "all", "memory": memory([GRANULARITY] * count, 1)}],
            }
            client.send("put", body, [segment.fd] * 200)
            client.answer("send")
            client.send("segments", {"first": 200, "sizes": [GRANULARITY] * 99}, [segment.fd] * 99)
            expect("listed", looking.list(), [])
        expect("code", refusal(lambda: looking.get("half")), "absent")
        part = Part("all", memory([GRANULARITY], 1), [Segment(segment.fd, GRANULARITY)])
        expect("version", looking.put("half", [part], backend="host")["version"], 1)


CHECKS = [golden, puts, gets, many, tables, versions, waits, together, half]

if __name__ == "__main__":
    support.run("host", CHECKS, timeout=30.0)
