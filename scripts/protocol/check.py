"""Tests the commands in a folder with the client beside this file, on host memory. Needs no GPU.

check.py FOLDER
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import client
from client import BROKER, GRANULARITY, HANDOFF, Broker, Connection, Consumer, Failure, Memory

SALT, SIZES, SIZE = 0x12345678, [GRANULARITY, 2 * GRANULARITY, GRANULARITY], (7 << 20) + 3
DOCS = Path(__file__).resolve().parents[2] / "docs"
# The limit of every wait, in seconds.
LIMIT = 60


class Place:
    """A socket and files in a folder of their own, and the commands."""

    def __init__(self, commands: Path, folder: str) -> None:
        self.vmmfd, self.path, self.file, self.log = str(commands / "vmmfd"), f"{folder}/socket", f"{folder}/file", f"{folder}/log"

    @contextlib.contextmanager
    def running(self, command: str, *options: str, code: int | None = 0) -> Iterator[None]:
        """Runs a command, which must exit with this code after the block. `None`: it is stopped there."""
        arguments = [self.vmmfd, command, "--socket", self.path, *options]
        with open(self.log, "a", encoding="utf-8") as log:
            child = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=log, start_new_session=True)
        try:
            deadline = time.monotonic() + LIMIT
            while command != "consume" and not os.path.exists(self.path):
                expect(f"{command} listens", (child.poll(), time.monotonic() < deadline), (None, True))
                time.sleep(0.005)
            yield
            if code is not None:
                expect(f"exit code of {command}", child.wait(LIMIT), code)
        finally:
            child.terminate()
            try:
                child.wait(LIMIT)
            finally:
                # Only a failed test leaves processes.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)

    def run(self, *arguments: str) -> str:
        with open(self.log, "a", encoding="utf-8") as log:
            command = [self.vmmfd, *arguments, "--socket", self.path]
            return subprocess.check_output(command, stderr=log, text=True, timeout=LIMIT)


def expect(what: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise AssertionError(f"{what}: {found!r:.300} instead of {wanted!r:.300}")


def code_of(action: Callable[[], object]) -> str:
    """Returns the code with which an action fails."""
    try:
        action()
    except Failure as error:
        return error.code
    return "none"


def golden(_: Place) -> None:
    """the pages' golden records and values"""
    for kinds, file in ((HANDOFF, "golden.json"), (BROKER, "broker-golden.json")):
        records = json.loads((DOCS / file).read_text(encoding="utf-8"))
        for record in records["records"]:
            found = client.decode(kinds, bytes.fromhex(record["hex"]), record["descriptors"])
            expect(record["name"], found, (record["kind"], record["body"]))
            again = client.decode(kinds, client.encode(kinds, *found), record["descriptors"])
            expect(record["name"], again, found)
        # The client checks only messages that it receives.
        for record in records["refused"] if kinds is HANDOFF else ():
            code = code_of(lambda: client.decode(kinds, bytes.fromhex(record["hex"]), record["descriptors"]))
            expect(record["name"], code in ("protocol", "version"), True)
        for value in records.get("words", ()):
            expect("word", client.word(value["salt"], value["index"]), value["word"])
        for value in records.get("bytes", ()):
            expect("bytes", client.pattern(value["salt"], value["offset"], value["size"]).hex(), value["hex"])
        for value in records.get("host_devices", ()):
            expect("device", client.host_device(value["boot_id"]), value["uuid"])


def consumes(place: Place) -> None:
    """as a consumer: five segments, then a range of them, with a check that takes longer than the producer waits"""
    for part, timeout, pause in ((None, "30s", 0.0), (((5 << 20) + 1, 99_999), "1s", 2.0)):
        options = "--size", "9MiB", "--chunk", "2MiB", "--seed", str(SALT), "--timeout", timeout
        with place.running("produce", "--backend", "host", *options), Consumer(place.path) as consumer, consumer.request(part) as taken:
            expect("segments", len(taken.segments), 1 if part else 5)
            with consumer.working():
                time.sleep(pause)
                found = client.check(taken.read(), taken.check["salt"], part[0] if part else 0)
            expect("mismatches", found["check"]["mismatches"], 0)
            expect("the producer's result", consumer.report(found)["verified"], True)


def is_refused(place: Place) -> None:
    """as a consumer: an absent object, and a range outside the object"""
    for request, code in (({"object": "x"}, "object"), ({"range": (0, 5)}, "range")):
        with place.running("produce", "--backend", "host", "--size", "4", code=4), Consumer(place.path) as consumer:
            expect("code", code_of(lambda: consumer.request(**request).__enter__()), code)


def produces(place: Place) -> None:
    """as a producer: right data, a range, and one wrong byte"""
    data = client.pattern(SALT, 0, SIZE)
    wrong = data[:4_000_001] + bytes([data[4_000_001] ^ 1]) + data[4_000_002:]
    for given, options, mismatches in ((data, (), 0), (data, ("--range", "3MiB:1"), 0), (wrong, (), 1)):
        with Memory.create(given, SIZES) as memory, place.running("consume", "--backend", "host", *options, code=mismatches):
            (found,) = client.serve(place.path, memory, SALT)
            expect("mismatches", found["check"]["mismatches"], mismatches)
            first = found["check"].get("first_mismatch") or {"index": None}
            expect("the first", first["index"], 4_000_001 // 4 if mismatches else None)


def subscribes(place: Place) -> None:
    """as a subscriber: the buffers of `vmmfd pub`, each given back, and the end"""
    options = "--at", place.path, "--size", "70001", "--count", "9", "--subscribers", "1", "--every", "30s"
    with (
        place.running("pub", "--backend", "host", *options),
        Connection(place.path, HANDOFF, 30.0, "host", "stream") as peer,
        Memory([]) as pool,
    ):
        peer.send("subscribe", {"policy": "every", "held": 2, "history": 0})
        stream, offer = peer.receive("stream")[1], peer.receive("offer")[1]
        part = offer["part"]
        pool.expect(offer["memory"], offer["access"], part, None, True)
        while len(pool.segments) < part["segments"]:
            _, body, fds = peer.receive("segments")
            pool.add(fds, body["sizes"], part, body["first"] == len(pool.segments))
            peer.send("received", {"segments": len(pool.segments)})
        peer.receive("format")
        for number in range(1, 10):
            ready = peer.receive("ready")[1]
            expect("number", ready["number"], number)
            salt, begin = (stream["epoch"] + number) % (1 << 32), ready["offset"]
            expect("bytes", pool.read()[begin : begin + stream["size"]] == client.pattern(salt, 0, stream["size"]), True)
            peer.send("done", {"number": number})
        expect("published", peer.receive("end")[1]["published"], 9)


def puts(place: Place) -> None:
    """to a broker: an object for `vmmfd get`, and an object of 300 segments"""
    data = os.urandom(SIZE)
    with place.running("serve", code=None), Memory.create(data, SIZES) as memory, Broker(place.path) as broker:
        expect("version", broker.put("py/small", memory, metadata={"inline": {"a": 1}})["version"], 1)
        expect("code", code_of(lambda: broker.put("py/small", memory)), "exists")
        expect("version", broker.put("py/small", memory, replace=True)["version"], 2)
        place.run("get", "py/small", "--to", place.file, "--backend", "host")
        expect("bytes", Path(place.file).read_bytes() == data, True)
        # More segments than a record carries.
        broker.put("py/many", Memory(memory.segments[:1] * 300, 300 * GRANULARITY))
        with broker.get("py/many") as taken:
            expect("segments", (len(taken.segments), taken.size), (300, 300 * GRANULARITY))
        with broker.get("py/many", (7 * GRANULARITY - 1, 2)) as taken:
            expect("bytes", (len(taken.segments), taken.read()), (2, data[GRANULARITY - 1 : GRANULARITY] + data[:1]))


def gets(place: Place) -> None:
    """from a broker: an object of `vmmfd put`, with a table beside the record"""
    data, metadata = os.urandom(SIZE), {"text": "é" * 10_000}
    Path(place.file).write_bytes(data)
    with place.running("serve", code=None), Broker(place.path) as broker:
        place.run("put", "rs/file", "--from", place.file, "--meta", json.dumps(metadata), "--backend", "host")
        with broker.get("rs/file", wait=5.0) as taken:
            expect("bytes", taken.read() == data, True)
            expect("metadata", taken.metadata, metadata)
            expect("who", [lease["pid"] for lease in json.loads(place.run("who", "--json"))["leases"]], [os.getpid()])
        expect("code", code_of(lambda: broker.get("rs/none").__enter__()), "absent")
        expect("code", code_of(lambda: broker.get("rs/none", wait=0.1).__enter__()), "timeout")
        expect("who", json.loads(place.run("who", "--json"))["leases"], [])


def page(place: Place) -> None:
    """the program of docs/library.md takes a buffer"""
    _, _, after = (DOCS / "library.md").read_text(encoding="utf-8").partition("<!-- python: consumer -->\n```python\n")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    with place.running("produce", "--backend", "host", "--size", "1MiB"):
        command = [sys.executable, "-B", "-c", after.partition("```")[0], place.path]
        expect("output", subprocess.check_output(command, env=environment, text=True, timeout=LIMIT), "True\n")


for test in (golden, consumes, is_refused, produces, subscribes, puts, gets, page):
    with tempfile.TemporaryDirectory(prefix="vmmfd-", dir="/tmp") as folder:
        place = Place(Path(sys.argv[1]).resolve(), folder)
        try:
            test(place)
        except BaseException:
            print(f"FAILED  {test.__doc__}", file=sys.stderr)
            if os.path.exists(place.log):
                print(Path(place.log).read_text(encoding="utf-8"), file=sys.stderr)
            raise
    print(f"ok      {test.__doc__}", flush=True)
