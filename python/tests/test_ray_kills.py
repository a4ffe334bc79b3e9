"""Arrays between nodes while a process is killed: the bytes are right, or an error names the cause.

VMMFD_TEST_KILLS is the number of kills of each kind, and VMMFD_TEST_SEED repeats the choices of a run, but not its times. `make test-nodes`
kills 200 times.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import vmmfd

from conftest import LIMIT, Server, needs_nixl

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install ray==2.60.0")
np = pytest.importorskip("numpy")

import vmmfd.ray  # noqa: E402

from ray_rig import MIB, Reader, Rig, get  # noqa: E402

KILLS = int(os.environ.get("VMMFD_TEST_KILLS", "3"))
SEED = int(os.environ.get("VMMFD_TEST_SEED", str(random.SystemRandom().randrange(1 << 32))))
KINDS = ("source actor", "source's agent", "reader's agent", "source's server", "reader's server")
STALL = 8.0
# Seconds after a kill within which an error names the cause: a few of these kills run beside other tests, many run alone.
LATE = STALL + (5 if KILLS >= 100 else 60)
SIZES = (MIB, 8 * MIB, 64 * MIB, 160 * MIB)
# Seconds until nothing is left.
SETTLE = 60
# Ray's own errors, which name the actor. Only a dead source can cause them.
RAYS = (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError, ray.exceptions.OwnerDiedError)
OURS = (vmmfd.Timeout, vmmfd.Disconnected, vmmfd.NotFound)


def pattern(size: int, seed: int) -> Any:
    """Words that differ from each other and from every other seed's. The first is the seed."""
    words = np.arange(size // 8, dtype="u8") * np.uint64(2 * seed + 1)
    words[0] = seed
    return words.view("u1")


def is_right(array: Any, seed: int | None = None) -> bool:
    found = np.asarray(array)
    seed = int(found[:8].view("u8")[0]) if seed is None else seed
    return bool((found == pattern(found.size, seed)).all())


class Worker(Reader):
    def make(self, size: int, seed: int) -> Any:
        array = vmmfd.empty(size, "uint8", backend="host")
        np.asarray(array)[:] = pattern(size, seed)
        return {"x": array}

    def check(self, value: Any, seed: int) -> bool:
        return is_right(value["x"], seed)

    def put(self, name: str, size: int, seed: int) -> None:
        with vmmfd.connect(backend="host") as broker:
            broker.put(name, self.make(size, seed))

    def pull(self, name: str, node: str, put: None) -> bool:
        return vmmfd.ray.pull(name, [node], stall=STALL)[node].name == name

    def check_name(self, name: str, seed: int, pulled: bool) -> bool:
        with vmmfd.connect(backend="host") as broker, broker.get(name) as lease:
            return is_right(lease["x"], seed)


def children(pid: int) -> list[int]:
    return [int(each) for path in Path(f"/proc/{pid}/task").glob("*/children") for each in path.read_text().split()]


def files_of(server: Server) -> list[int]:
    """The numbers of open files of the keeper and of the server."""
    return [len(os.listdir(f"/proc/{pid}/fd")) for pid in (server.keeper(), server.pid)]


class Load:
    """Rounds of reads, with a kill in each."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.random = random.Random(SEED)
        self.files = [files_of(server) for server in rig.servers]
        self.near = rig.actor("a")
        self.spare = [self.source() for _ in range(2)]
        # Outcomes of calls, and the longest time from the kill to an answer, by kind and outcome.
        self.outcomes: dict[str, Counter[str]] = defaultdict(Counter)
        self.longest: dict[tuple[str, str], float] = defaultdict(float)
        self.wrong: list[str] = []
        self.raylets: set[int] = set()
        # How often the bytes of each version were compared, by its id.
        self.checked: Counter[str] = Counter()
        # Seconds that a round takes.
        self.usual = 1.0

    def source(self) -> tuple[Any, Any]:
        actor = self.rig.actor("a")
        return actor, actor.__ray_call__.remote(lambda self: os.getpid())

    def target(self, kind: str, source: int) -> int:
        place = "a" if kind.startswith("source") else "b"
        if kind.endswith("agent"):
            return self.rig.pid(place)
        return source if kind.endswith("actor") else self.rig.servers["ab".index(place)].pid

    def round(self, number: int, kind: str) -> None:
        (actor, pid), seed = self.spare[-1], number + 1
        target = self.target(kind, get(pid))
        began = time.monotonic()
        calls = self.reads(actor, seed) if self.random.random() < 0.7 else self.pulls(actor, seed)
        done, waiting = ray.wait(calls, num_returns=len(calls), timeout=self.random.random() * self.usual)
        os.kill(target, signal.SIGKILL)
        killed = time.monotonic()
        for call in done:
            self.record(number, kind, self.outcome(call, kind) + " before the kill", 0.0)
        if kind == "source actor":
            self.spare.pop()
            self.spare.insert(0, self.source())
        while waiting and time.monotonic() < killed + LIMIT:
            done, waiting = ray.wait(waiting, timeout=1)
            for call in done:
                self.record(number, kind, self.outcome(call, kind), time.monotonic() - killed)
        for call in waiting:
            self.record(number, kind, f"HANG {LIMIT} s", LIMIT)
        # Not the time in which Ray starts an agent again.
        self.usual += 0.2 * (min((killed if len(done) == len(calls) else time.monotonic()) - began, 1) - self.usual)
        self.check_names(number, kind)

    def reads(self, source: Any, seed: int) -> list[Any]:
        ref = source.make.remote(self.random.choice(SIZES), seed)
        return [reader.check.remote(ref, seed) for reader in [*self.rig.readers, self.near]]

    def pulls(self, source: Any, seed: int) -> list[Any]:
        name, there = f"load/{seed}", self.rig.ids["b"]
        pulled = self.near.pull.remote(name, there, source.put.remote(name, self.random.choice(SIZES), seed))
        return [pulled, *(reader.check_name.remote(name, seed, pulled) for reader in self.rig.readers)]

    def outcome(self, call: Any, kind: str) -> str:
        try:
            return "right bytes" if ray.get(call) else "WRONG BYTES"
        except Exception as error:
            cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
            expected = OURS + (RAYS if kind == "source actor" else ())
            name = type(cause).__name__
            return name if isinstance(cause, expected) and str(cause) else f"UNEXPECTED {name}: {cause}"

    def record(self, number: int, kind: str, outcome: str, seconds: float) -> None:
        if outcome[:4].isupper():
            self.wrong.append(f"round {number}, kill of the {kind}: {outcome}")
        elif not outcome.startswith("right bytes") and seconds > LATE:
            self.wrong.append(f"round {number}, kill of the {kind}: {outcome} after {seconds:.1f} s")
        self.outcomes[kind][outcome[:40]] += 1
        self.longest[kind, outcome[:40]] = max(self.longest[kind, outcome[:40]], seconds)

    def check_names(self, number: int, kind: str) -> None:
        """No name has other bytes. Gets each version once, and twice more after kills of a server: a lease in every round would keep the
        copies of killed agents alive."""
        most = 3 if kind.endswith("server") else 1
        for broker in self.rig.brokers:
            for summary in broker.list():
                if self.checked[summary.id] >= most:
                    continue
                try:
                    with broker.get(summary.name, version=summary.version) as lease:
                        self.checked[summary.id] += 1
                        if not is_right(lease["x" if "x" in lease else "0"]):
                            self.wrong.append(f"round {number}, kill of the {kind}: {summary.name} has other bytes")
                except vmmfd.NotFound:
                    continue
                if summary.name.startswith("load/"):
                    broker.delete(summary.name)

    def settle(self) -> None:
        """Fails unless nothing is left: no name, lease, offer, memory or process, and no more open files than before."""
        deadline = time.monotonic() + SETTLE
        left: Any = "?"
        while left:
            left = self.left()
            assert time.monotonic() < deadline, f"left after {SETTLE} s: {left}"
            time.sleep(0.5)
        for actor in [*vmmfd.ray.agents().values(), *self.rig.readers, self.near, *(actor for actor, _ in self.spare)]:
            ray.kill(actor)
        while True:
            processes = [each for raylet in self.raylets for each in actors_of(raylet, "ray::A")]
            files = [files_of(server) for server in self.rig.servers]
            if not processes and all(now <= before for pair in zip(files, self.files) for now, before in zip(*pair)):
                return
            assert time.monotonic() < deadline, f"{processes}, open files of keeper and server: {files}, before: {self.files}"
            time.sleep(0.5)

    def left(self) -> list[Any]:
        found: list[Any] = []
        for broker in self.rig.brokers:
            found += [each.name for each in broker.list()] + list(broker.who().leases)
        for place, node in self.rig.ids.items():
            raylet, state = get(vmmfd.ray.agents()[node].__ray_call__.remote(held))
            self.raylets.add(raylet)
            found += [f"agent of {place}: {text}" for text in state]
            found += actors_of(raylet, "ray::Agent")[1:]
        return found

    def report(self) -> str:
        lines = [f"{KILLS} kills of each kind, seed {SEED}"]
        for kind in KINDS:
            for outcome, count in sorted(self.outcomes[kind].items()):
                lines.append(f"{kind:16} {count:6} {outcome}, at most {self.longest[kind, outcome]:.1f} s after the kill")
        return "\n".join(lines)


def actors_of(raylet: int, prefix: str) -> list[str]:
    """A node's processes of actors whose title starts with `prefix`."""
    titles = [Path(f"/proc/{pid}/cmdline").read_text() for pid in children(raylet)]
    return [title for title in titles if title.startswith(prefix)]


def held(agent: Any) -> tuple[int, list[str]]:
    """The agent's raylet, and what it holds: offers, and mapped memory of brokers and of pulls."""
    with open("/proc/self/maps") as maps:
        mapped = [line.split(maxsplit=5)[-1].strip() for line in maps if "memfd" in line]
    return os.getppid(), [f"{len(agent._wire._offers)} offers"] * bool(agent._wire._offers) + mapped


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    rig = Rig(tmp_path, readers=3, actor=Worker, with_keeper=True, stall=STALL)
    try:
        yield Load(rig)
    finally:
        rig.close()


@needs_nixl
def test_killed_processes_harm_no_read(load: Load) -> None:
    deck = list(KINDS) * KILLS
    load.random.shuffle(deck)
    began = time.monotonic()
    for number, kind in enumerate(deck):
        load.round(number, kind)
        if number % 50 == 49:
            print(f"{number + 1} of {len(deck)} kills in {time.monotonic() - began:.0f} s, {len(load.wrong)} wrong", flush=True)
    print(load.report(), flush=True)
    assert not load.wrong, "\n".join([load.report(), *load.wrong])
    assert sum(counts["right bytes"] for counts in load.outcomes.values()) > len(deck) / 2, load.report()
    load.settle()
