"""Clients, servers and keepers of two versions, together: each test is a row of the table "Versions together" in docs/operate.md."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import LIMIT, NEW, OLD, PAIRS, Broker, Child, Version, Wheel, wait_for

Versions = dict[str, Version]
Start = Callable[..., Any]
both = pytest.mark.parametrize(("client", "server"), PAIRS)
mixed = pytest.mark.parametrize(("first", "second"), PAIRS)


def summaries(version: Version, path: str) -> list[tuple[str, int, str]]:
    objects = json.loads(version.run("ls", "--socket", path, "--json"))["objects"]
    return sorted((of["name"], of["version"], of["id"]) for of in objects)


def content(version: Version, path: str, name: str, folder: Path, *options: str) -> bytes:
    file = folder / "content"
    version.run("get", name, "--socket", path, "--backend", "host", "--to", str(file), "--force", "--wait", "20s", *options)
    return file.read_bytes()


def put(version: Version, path: str, name: str, data: bytes, folder: Path, *options: str) -> None:
    file = folder / "data"
    file.write_bytes(data)
    version.run("put", name, "--socket", path, "--backend", "host", "--from", str(file), *options)


# Clients and servers


@both
def test_commands(client: str, server: str, versions: Versions, start: Start, tmp_path: Path) -> None:
    of, broker = versions[client], start(Broker, versions[server], tmp_path)
    path = broker.path
    watch = start(Child, [of.command(), "watch", "--socket", path, "--json"], tmp_path / "watch.log")
    assert json.loads(watch.line())["event"] == "following"
    get = [of.command(), "get", "a/b", "--socket", path, "--backend", "host", "--wait", "50s", "--json"]
    waits = start(Child, get, tmp_path / "get.log")
    put(of, path, "a/b", b"one" * 1000, tmp_path, "--meta", '{"step":1}', "--digest", "--keep", "1")
    assert waits.end() == 0
    assert content(of, path, "a/b", tmp_path, "--expect", '{"step":1}')[:3000] == b"one" * 1000
    put(of, path, "a/b", b"two" * 1000, tmp_path, "--replace", "--meta", '{"step":2}')
    put(of, path, "c", b"three", tmp_path, "--ttl", "1h", "--mode", "640")
    assert content(of, path, "a/b", tmp_path)[:3000] == b"two" * 1000
    assert content(of, path, "a/b", tmp_path, "--version", "1")[:3000] == b"one" * 1000
    of.run("get", "a/b", "--socket", path, "--backend", "host", "--expect", '{"step":1}', code=1)
    assert [(name, version) for name, version, _ in summaries(of, path)] == [("a/b", 2), ("c", 1)]
    assert json.loads(of.run("stat", "a/b", "--socket", path, "--json"))["versions"] == [1, 2]
    if client == NEW:
        # What it asks an older server for is of version 1 of the protocol too.
        listed = of.run("rm", "--prefix", "c", "--dry-run", "--socket", path)
        assert "c" in listed
        assert json.loads(of.run("status", "--socket", path, "--json"))["objects"] == 2
    os.kill(broker.pid, signal.SIGKILL)
    assert content(of, path, "a/b", tmp_path)[:3000] == b"two" * 1000
    put(of, path, "d", b"after the kill", tmp_path)
    of.run("rm", "a/b", "c", "--socket", path)
    assert [name for name, _, _ in summaries(of, path)] == ["d"]
    seen = []
    while len([kind for kind, name in seen if kind == "deleted"]) < 2:
        event = json.loads(watch.line())
        if event["event"] in ("published", "replaced", "deleted"):
            seen.append((event["event"], event["name"]))
    assert seen[-2:] == [("deleted", "a/b"), ("deleted", "c")] and ("published", "d") in seen, seen
    assert watch.end(signal.SIGTERM) in (0, 143)
    assert broker.child.end(signal.SIGTERM) == 0


@both
def test_exporter(client: str, server: str, versions: Versions, start: Start, tmp_path: Path) -> None:
    of, broker = versions[client], start(Broker, versions[server], tmp_path)
    put(versions[server], broker.path, "a", b"x", tmp_path)
    arguments = [of.command(), "exporter", "--socket", broker.path, "--listen", "127.0.0.1:0"]
    exporter = start(Child, arguments, tmp_path / "exporter.log")
    address = exporter.line().split("http://")[1].split("/")[0].split()[0]
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=LIMIT) as answer:
        lines = answer.read().decode().splitlines()
    assert {"vmmfd_up 1", "vmmfd_objects 1"} <= set(lines), lines
    has_later_figures = any(line.startswith("vmmfd_lost_versions ") for line in lines)
    assert has_later_figures == (client == server == NEW)


@both
def test_wheel(client: str, server: str, versions: Versions, start: Start, tmp_path: Path) -> None:
    broker = start(Broker, versions[server], tmp_path)
    maker, reader, waiter = (start(Wheel, versions[client], broker.path) for _ in range(3))
    reader.run("watch = broker.watch('w'); watch.next(timeout=0.1)")
    maker.run("""
published = broker.put("w/x", {"x": np.full(4, 1.0)}, metadata={"step": 1}, keep=1, digest="none")
found = broker.claim("w/made", wait=20)
assert isinstance(found, vmmfd.Claim)
""")
    reader.run("""
lease = broker.get("w/x", expect={"step": 1}, wait=20)
x = np.from_dlpack(lease["x"])
assert x.tolist() == [1.0] * 4 and lease.version == 1
assert broker.stat("w/x").metadata == {"step": 1}
assert [held.version for held in broker.who("w/x").leases] == [1]
""")
    reader.start("with broker.claim('w/made', wait=50) as other: result = np.from_dlpack(other['y']).tolist()")
    maker.run("found.put({'y': np.arange(3.0)})")
    assert reader.answer() == [0.0, 1.0, 2.0]
    maker.run("broker.put('w/x', {'x': np.full(4, 2.0)}, replace=True, metadata={'step': 2})")
    reader.run("""
prepared = lease.prepare(newer_than=lease.version)
old = lease.switch(prepared, exported="valid")
old.close()
assert x.tolist() == [2.0] * 4 and lease.version == 2 and lease.is_held
""")
    # A claim ends with its server, and passes on to a process that waits for it.
    maker.run("found = broker.claim('w/next', wait=20); assert isinstance(found, vmmfd.Claim)")
    waiter.start("other = broker.claim('w/next', wait=50); result = isinstance(other, vmmfd.Claim)")
    os.kill(broker.pid, signal.SIGKILL)
    assert waiter.answer()
    reader.run("""
deadline = time.monotonic() + 50
while [held.version for held in broker.who("w/x").leases] != [2] or not lease.is_held:
    assert time.monotonic() < deadline
    time.sleep(0.02)
assert x.tolist() == [2.0] * 4
del x
lease.park(keep_lease=True, exported="valid")
lease.unpark()
assert np.from_dlpack(lease["x"]).tolist() == [2.0] * 4
""")
    maker.run("broker.put('w/z', {'z': np.zeros(2)}); broker.delete('w/made')")
    events = reader.run("""
result = []
while ("deleted", "w/made") not in result:
    event = watch.next(timeout=50)
    assert event is not None and event.kind != "lost", event
    result.append((event.kind, event.name))
""")
    assert ["replaced", "w/x"] in events and ["published", "w/z"] in events and ["leased", "w/x"] in events, events
    assert [name for name, _, _ in summaries(versions[client], broker.path)] == ["w/x", "w/z"]


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("client", [OLD, NEW])
@mixed
def test_restore(first: str, second: str, client: str, end: int, versions: Versions, start: Start, tmp_path: Path) -> None:
    alone = "--no-supervisor" if first == OLD else "--no-keeper"
    broker = start(Broker, versions[first], tmp_path, alone)
    holder = start(Wheel, versions[client], broker.path)
    id = holder.run("""
broker.put("kept", {"x": np.arange(4.0)}, metadata={"step": 3}, mode=0o640)
lease = broker.get("kept")
broker.put("lost", {"x": np.arange(4.0)})
result = lease.id
""")
    before = summaries(versions[NEW], broker.path)
    broker.child.end(end)
    broker.replace(versions[second])
    broker.options = ("--no-supervisor" if second == OLD else "--no-keeper",)
    broker.start()
    after = wait_for("the object", lambda: summaries(versions[NEW], broker.path))
    assert after == [of for of in before if of[0] == "kept"] and after[0][2] == id
    holder.run("assert lease.is_held and broker.stat('kept').metadata == {'step': 3}")
    other = start(Wheel, versions[OLD if client == NEW else NEW], broker.path)
    assert other.run("result = np.from_dlpack(broker.get('kept')['x']).tolist()") == [0.0, 1.0, 2.0, 3.0]


# Handoffs


@both
def test_handoff_of_commands(client: str, server: str, versions: Versions, start: Start, tmp_path: Path) -> None:
    path = str(tmp_path / "handoff.sock")
    options = ["--socket", path, "--backend", "host", "--size", "5MiB", "--round-trip"]
    producer = start(Child, [versions[server].command("producer"), *options], tmp_path / "producer.log")
    versions[client].run("--socket", path, "--backend", "host", program="consumer")
    assert producer.end() == 0, producer.logged()


@both
def test_handoff_of_wheels(client: str, server: str, versions: Versions, start: Start, tmp_path: Path) -> None:
    broker = start(Broker, versions[NEW], tmp_path)
    maker, taker = start(Wheel, versions[server], broker.path), start(Wheel, versions[client], broker.path)
    path = str(tmp_path / "array.sock")
    maker.start(f"result = len(vmmfd.serve({path!r}, vmmfd.asarray(np.arange(6.0).reshape(2, 3), backend='host'), consumers=2))")
    code = f"result = np.from_dlpack(vmmfd.take({path!r}, backend='host', wait=50)).tolist()"
    assert taker.run(code) == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    versions[client].run("consume", "--socket", path, "--backend", "host")
    assert maker.answer() == 2


@both
@pytest.mark.parametrize("speaker", ["host.py", "broker_host.py"])
def test_plain_python(speaker: str, client: str, server: str, versions: Versions) -> None:
    program = [sys.executable, "-B", str(versions[client].folder / "interop" / speaker), str(versions[server].folder / "bin")]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=5 * LIMIT)
    failed = [line for line in ended.stdout.splitlines() if line.startswith("FAILED")]
    if client != server:
        # `vmmfd conform` of one version checks more than the speaker of the other, and versions word their errors differently.
        of_one_version = ("vmmfd conform: ", "the consumer tells why: ")
        failed = [line for line in failed if not any(text in line for text in of_one_version)]
    assert failed == [] and ended.stdout.count("ok  ") > 5, ended.stdout[-4000:] + ended.stderr[-4000:]


# Upgrades and rollbacks of a broker with objects


class Load:
    """A writer that puts small objects, and remembers what was acknowledged."""

    def __init__(self, wheel: Wheel) -> None:
        self.wheel = wheel
        wheel.run("""
acknowledged, stop = [], threading.Event()
def write():
    while not stop.is_set():
        name = f"load/{len(acknowledged)}"
        broker.put(name, {"x": np.full(2, float(len(acknowledged)))})
        acknowledged.append(name)
writer = threading.Thread(target=write)
writer.start()
""")

    def count(self) -> int:
        return self.wheel.run("result = len(acknowledged)")

    def goes_on(self) -> None:
        before = self.count()
        wait_for("more puts", lambda: self.count() > before + 3)

    def end(self) -> set[str]:
        return set(self.wheel.run("stop.set(); writer.join(); result = acknowledged"))


def filled(broker: Broker, versions: Versions, start: Start, folder: Path) -> tuple[list[Wheel], list[tuple[str, int, str]]]:
    """Objects and leases of clients of both versions."""
    put(versions[OLD], broker.path, "weights", b"one" * 1000, folder, "--keep", "1")
    put(versions[NEW], broker.path, "weights", b"two" * 1000, folder, "--replace", "--meta", json.dumps({"x": "y" * 6000}))
    put(versions[OLD], broker.path, "gone", b"gone", folder)
    versions[NEW].run("rm", "gone", "--socket", broker.path)
    holders = []
    for name in (OLD, NEW):
        holder = start(Wheel, versions[name], broker.path)
        holder.run(f"""
many = {{f"a{{n}}": np.full(3, float(n)) for n in range(300)}}
broker.put("held/{name}", many, metadata={{"step": 1}})
lease = broker.get("held/{name}")
""")
        holders.append(holder)
    return holders, summaries(versions[NEW], broker.path)


def has_all(broker: Broker, versions: Versions, folder: Path, holders: list[Wheel], before: list[tuple[str, int, str]]) -> None:
    for version in versions.values():
        after = summaries(version, broker.path)
        assert [of for of in after if not of[0].startswith("load/")] == before
        assert content(version, broker.path, "weights", folder)[:3000] == b"two" * 1000
        assert content(version, broker.path, "weights", folder, "--version", "1")[:3000] == b"one" * 1000
    for holder in holders:
        holder.run("""
deadline = time.monotonic() + 50
while not lease.is_held:
    assert time.monotonic() < deadline
    time.sleep(0.02)
assert [np.from_dlpack(lease[f"a{n}"]).tolist() for n in (0, 299)] == [[0.0] * 3, [299.0] * 3]
assert any(held.name == lease.name for held in broker.who("held").leases)
""")


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


WAYS = {
    "SIGHUP": lambda broker: os.kill(broker.child.process.pid, signal.SIGHUP),
    "crash of the server": lambda broker: kill(broker.pid),
    "crash of the supervisor": lambda broker: kill(broker.child.process.pid),
}


@pytest.mark.parametrize("way", WAYS)
def test_upgrade_in_place(way: str, versions: Versions, start: Start, tmp_path: Path) -> None:
    broker = start(Broker, versions[OLD], tmp_path)
    holders, before = filled(broker, versions, start, tmp_path)
    load = Load(start(Wheel, versions[OLD], broker.path))
    load.goes_on()
    broker.replace(versions[NEW])
    WAYS[way](broker)
    wait_for(
        "two processes of today's",
        lambda: len(pids := broker.processes()) == 2 and all(broker.executes(pid) for pid in pids),
    )
    load.goes_on()
    has_all(broker, versions, tmp_path, holders, before)
    # Both of its processes hold everything: either may die.
    for _ in range(2):
        for pid in broker.processes():
            kill(pid)
            load.goes_on()
            wait_for("two processes", lambda: len(broker.processes()) == 2)
            load.goes_on()
    has_all(broker, versions, tmp_path, holders, before)
    # No way leads back. The server takes SIGHUP for a restart.
    broker.replace(versions[OLD])
    for pid in broker.processes():
        os.kill(pid, signal.SIGHUP)
    wait_for("the refusal", lambda: "can't take over the keeper's descriptors (exit code" in broker.child.logged())
    load.goes_on()
    has_all(broker, versions, tmp_path, holders, before)
    acknowledged = load.end()
    assert acknowledged <= {name for name, _, _ in summaries(versions[NEW], broker.path)}
    assert "is lost" not in broker.child.logged(), broker.child.logged()


def test_rollback_in_place_is_refused(versions: Versions, start: Start, tmp_path: Path) -> None:
    broker = start(Broker, versions[NEW], tmp_path)
    holders, before = filled(broker, versions, start, tmp_path)
    load = Load(start(Wheel, versions[OLD], broker.path))
    load.goes_on()
    keeper = broker.child.process.pid
    broker.replace(versions[OLD])
    os.kill(keeper, signal.SIGHUP)
    wait_for("the refusal", lambda: "not reloaded: " in broker.child.logged())
    load.goes_on()
    has_all(broker, versions, tmp_path, holders, before)
    # Each of the two starts the other from the program that runs.
    for pid in (broker.pid, keeper):
        kill(pid)
        load.goes_on()
        wait_for("two processes", lambda: len(broker.processes()) == 2)
    assert not any(broker.executes(pid) for pid in broker.processes())
    has_all(broker, versions, tmp_path, holders, before)
    assert load.end() <= {name for name, _, _ in summaries(versions[NEW], broker.path)}


def test_rollback_under_an_init_is_refused(versions: Versions, start: Start, tmp_path: Path) -> None:
    private = tmp_path / "keeper"
    private.mkdir(mode=0o700)
    socket, program = str(private / "keeper.sock"), private / "vmmfd"
    program.write_bytes(Path(versions[NEW].command()).read_bytes())
    program.chmod(0o755)
    keeper = start(Child, [str(program), "keeper", "--socket", socket], tmp_path / "keeper.log")
    wait_for("the keeper", lambda: os.path.exists(socket))
    broker = start(Broker, versions[NEW], tmp_path, "--keeper", socket)
    holders, before = filled(broker, versions, start, tmp_path)
    # The keeper's program is replaced by the older one.
    program.unlink()
    program.write_bytes(Path(versions[OLD].command()).read_bytes())
    program.chmod(0o755)
    refusal = versions[NEW].run("keeper", "--reload", "--socket", socket, code=5)
    assert "can't take over the keeper's descriptors" in refusal, refusal
    has_all(broker, versions, tmp_path, holders, before)
    # The older server knows no keeper, with the unit's options and without them.
    assert broker.child.end(signal.SIGTERM) == 0
    assert "--keeper" in versions[OLD].run("serve", "--keeper", socket, "--socket", broker.path, code=2)
    assert "is already served" in versions[OLD].run("serve", "--socket", broker.path, code=5)
    broker.start(announced=False)
    has_all(broker, versions, tmp_path, holders, before)
    assert keeper.end(signal.SIGTERM) == 0


def test_the_page_has_these_rows() -> None:
    page = (Path(__file__).parents[2] / "docs" / "operate.md").read_text(encoding="utf-8")
    tests = {name for name in globals() if name.startswith("test_") and name != "test_the_page_has_these_rows"}
    table = page.split("## Versions together")[1].split("\n## ")[0]
    assert {name for name in tests if f"`{name}`" not in table} == set()
