"""Arrays between actors of three nodes on one machine, each with a raylet and a broker: host memory, NIXL over TCP."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vmmfd

from conftest import LIMIT, PYTHON, needs_nixl

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install ray==2.60.0")
np = pytest.importorskip("numpy")

import vmmfd._ray_agent as ray_agent  # noqa: E402
import vmmfd.ray  # noqa: E402

from ray_rig import MIB, STALL, Rig, get, origin_of  # noqa: E402

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "share_ray.py"


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    rig = Rig(tmp_path_factory.mktemp("ray"), places="abc")
    yield rig
    rig.close()


@pytest.fixture(scope="module")
def source(rig: Rig) -> Any:
    return rig.actor("a")


def test_same_node_maps(rig: Rig, source: Any) -> None:
    ref = source.make.remote(MIB, 3)
    assert get(rig.actor("a").read.remote(ref)) == (3 * MIB, True, True)
    (summary,) = [each for each in rig.brokers[0].list("ray/")]
    assert summary.segments == 1 and not rig.brokers[1].list("ray/")


def test_first_read_has_one_manager(rig: Rig, source: Any) -> None:
    reader = rig.actor("a")
    get(reader.slow_manager.remote())
    assert get(reader.read.remote(source.make.remote(MIB, 2))) == (2 * MIB, True, True)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
@pytest.mark.parametrize("place", ["a", pytest.param("b", marks=needs_nixl)])
def test_tensors_are_equal(rig: Rig, source: Any, place: str) -> None:
    found = get(rig.actor(place).read_tensors.remote(get(source.put_tensor.remote())))
    assert found == [
        ([[0, 3], [1, 4], [2, 5]], "torch.bfloat16", (3, 2)),
        (4.0, "torch.float32", ()),
        ([], "torch.float32", (0, 2)),
    ]


@needs_nixl
@pytest.mark.parametrize("count", [1, 4, 16])
def test_readers_share_one_transfer(rig: Rig, source: Any, count: int) -> None:
    ref = source.make.remote(4 * MIB, count)
    assert get([reader.read.remote(ref) for reader in rig.readers[:count]]) == [(4 * MIB * count, True, True)] * count
    (transfer,) = rig.pulled("b", origin_of(ref))
    assert transfer["source"] == rig.ids["a"] and rig.pulled("a") == []


@needs_nixl
def test_object_outlives_its_actor(rig: Rig) -> None:
    maker = rig.actor("a")
    ref = maker.make.remote(MIB, 5)
    origin_of(ref)
    ray.kill(maker)
    assert get(rig.readers[0].read.remote(ref)) == (5 * MIB, True, True)


@needs_nixl
@pytest.mark.parametrize("place", ["a", "b"])
def test_agent_killed_in_transfer(rig: Rig, source: Any, place: str) -> None:
    """The bytes are right, or the error names the cause; no name has other bytes. A dead agent is replaced."""
    ref = source.make.remote(128 * MIB, 9)
    origin = origin_of(ref)
    pid = rig.pid(place)
    call = rig.readers[0].read.remote(ref)
    while origin not in ray_agent._pulled_by([rig.ids["b"]]):
        assert not ray.wait([call], timeout=0)[0], "it was read before the kill"
    os.kill(pid, signal.SIGKILL)
    try:
        assert get(call)[0] == 9 * 128 * MIB
    except (vmmfd.Disconnected, vmmfd.Timeout, vmmfd.NotFound) as error:
        assert "ray/" in str(error)
    for summary in rig.brokers[1].list(f"ray/{origin}"):
        assert get(rig.readers[1].read.remote(ref))[0] == 9 * 128 * MIB, summary
    # An idle agent: the next read finds it dead.
    os.kill(rig.pid(place), signal.SIGKILL)
    assert get(rig.readers[0].read.remote(source.make.remote(MIB, 7))) == (7 * MIB, True, True)


@needs_nixl
def test_named_object_is_pulled(rig: Rig) -> None:
    here, there, _ = rig.brokers
    here.put("weights", {"x": np.full(MIB, 2, "u1")}, metadata={"step": 1})
    before = len(rig.pulled("b"))
    for _ in range(2):
        got = vmmfd.ray.pull("weights", stall=STALL)
        assert got[rig.ids["b"]].name == "weights" and got[rig.ids["a"]].id == here.stat("weights").summary.id
    assert there.stat("weights").metadata["step"] == 1
    assert len(rig.pulled("b")) == before + 1
    new = here.put("weights", {"x": np.full(MIB, 3, "u1")}, replace=True)
    assert vmmfd.ray.pull("weights", stall=STALL)[rig.ids["b"]].version == 2
    assert there.stat("weights").metadata["origin"]["id"] == new.id
    assert get(rig.readers[0].total.remote("weights")) == 3 * MIB
    # An array of it is read from the node's own copy.
    forwarded = rig.actor("a")
    assert get(rig.readers[0].read.remote(forwarded.forward.remote("weights"))) == (3 * MIB, True, True)
    assert len(rig.pulled("b")) == before + 2
    for broker in rig.brokers:
        broker.delete("weights")


@needs_nixl
def test_other_node_replaces_stopped_source(rig: Rig) -> None:
    size = 512 * MIB
    made = rig.brokers[0].put("large", {"x": np.full(size, 3, "u1")})
    a, b, c = (rig.ids[place] for place in "abc")
    vmmfd.ray.pull("large", [b], stall=STALL)
    reader = rig.actor("c")
    get(reader.nothing.remote())
    stopped = rig.pid("a")
    pull = vmmfd.ray.agents([c])[c].pull.options(concurrency_group="pull")
    call = pull.remote(ray_agent._Object("large", 1, made.id, made.id, a), "large", LIMIT, 10.0)
    while made.id not in ray_agent._pulled_by([c]):
        assert not ray.wait([call], timeout=0)[0], "it was pulled before the stop"
    os.kill(stopped, signal.SIGSTOP)
    try:
        get(call)
    finally:
        os.kill(stopped, signal.SIGCONT)
    (transfer,) = rig.pulled("c", made.id)
    assert transfer["source"] == b and transfer["checked"] is False
    assert get(reader.total.remote("large")) == 3 * size
    # The node whose agent was stopped is a source again.
    new = rig.brokers[0].put("large", {"x": np.full(MIB, 4, "u1")}, replace=True)
    assert vmmfd.ray.pull("large", [c], stall=STALL)[c].version == 2
    assert [each["source"] for each in rig.pulled("c", new.id)] == [a]
    for broker in rig.brokers:
        broker.delete("large")


@needs_nixl
def test_unread_offer_ends(rig: Rig) -> None:
    made = rig.brokers[0].put("offered", {"x": np.zeros(MIB, "u1")})
    a, b = (rig.ids[place] for place in "ab")
    wanted = ray_agent._Object("offered", 1, made.id, made.id, a)
    offer = vmmfd.ray.agents([a])[a].offer.options(concurrency_group="source")
    assert isinstance(get(offer.remote(wanted, b, 1.0)), bytes)
    deadline = time.monotonic() + LIMIT
    while rig.brokers[0].who("offered").leases:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    rig.brokers[0].delete("offered")


@needs_nixl
def test_error_of_source_is_raised(rig: Rig) -> None:
    rig.brokers[0].put("taken", {"x": np.zeros(8, "u1")}, metadata={"origin": "hub"})
    with pytest.raises(vmmfd.Invalid, match="'taken' has metadata.*'hub'.*: put it with another key"):
        vmmfd.ray.pull("taken")
    rig.brokers[0].delete("taken")


@pytest.mark.parametrize("name", ["linger", "stall"])
def test_other_limits_are_refused(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name}='5' is not a time"):
        vmmfd.ray.register(**{name: "5"})
    with pytest.raises(TypeError, match=f"{name}=None is not a time"):
        vmmfd.ray.register(**{name: None})
    with pytest.raises(TypeError, match="deadline=True is not a time"):
        vmmfd.ray.pull("nowhere", deadline=True)


def test_missing_name_is_reported(rig: Rig) -> None:
    with pytest.raises(vmmfd.NotFound, match="no node's broker has 'nowhere' version 3: put it on one"):
        vmmfd.ray.pull("nowhere", version=3)


def test_nothing_is_left(rig: Rig) -> None:
    deadline = time.monotonic() + LIMIT
    while any(broker.list("ray/") or broker.who("ray/").leases for broker in rig.brokers):
        assert time.monotonic() < deadline, [broker.list("ray/") for broker in rig.brokers]
        time.sleep(0.2)


@needs_nixl
@pytest.mark.skipif(not EXAMPLE.exists(), reason="the examples are not beside the tests")
def test_example(rig: Rig) -> None:
    run = [*PYTHON, str(EXAMPLE), *(server.path for server in rig.servers[:2])]
    # Ray finds a running cluster in its folder.
    environment = {**os.environ, "RAY_TMPDIR": str(rig.folder / "example")}
    ended = subprocess.run(run, capture_output=True, text=True, timeout=LIMIT, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert f"read on the other node: {[(262144.0, 1)] * 4}\ntransfers: 1\n" in ended.stdout


# The choice of a source, without a cluster.

WANTED = ray_agent._Object("weights", 1, "id", "id", "one")


class Wire:
    """Stands for `vmmfd.nodes.Node`. Each pull has the next result."""

    def __init__(self, *results: Exception | None) -> None:
        self.results = list(results)
        self.offers = 0
        self.sources: list[bytes] = []
        self.stalls: list[float] = []

    def offer(self, name: str, version: int | None = None) -> bytes:
        self.offers += 1
        return f"{name} {self.offers}".encode()

    def withdraw(self, offer: bytes) -> None:
        pass

    def pull(self, offer: bytes, **options: Any) -> Any:
        self.sources.append(offer)
        self.stalls.append(options["stall"])
        result = self.results.pop(0)
        if result:
            raise result
        return SimpleNamespace(name=options["name"], version=1, id="copy", checked=True)


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The agent of node `here`. The nodes `one`, `two` and `three` have the object."""

    def ask(nodes: Any, method: str, *arguments: Any, **options: Any) -> list[Any]:
        return [node if method == "has" else node.encode() for node in nodes]

    killed: list[str] = []
    fake = SimpleNamespace(end=SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_: None)))
    names = ["here", "one", "two", "three"]
    monkeypatch.setattr(ray_agent, "_ask", ask)
    monkeypatch.setattr(ray_agent, "_agent", lambda node: SimpleNamespace(node=node, **vars(fake)))
    monkeypatch.setattr(ray_agent, "list_named_actors", lambda _: [{"name": f"agent-{name}", "namespace": "vmmfd"} for name in names])
    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeID": name, "Alive": True} for name in names])
    monkeypatch.setattr(ray, "kill", lambda actor, no_restart: killed.append(actor.node))
    monkeypatch.setattr(ray_agent, "_copy", lambda *_: None)
    agent = ray_agent.Agent.__new__(ray_agent.Agent)
    agent._here, agent._broker, agent._lock, agent._lent, agent._pulls, agent._heard = "here", None, threading.Lock(), {}, {}, set()
    agent._done = ray_agent.deque()
    agent.killed, agent.names = killed, names
    return agent


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The agent's clock. Only sleeps take time."""
    clock = SimpleNamespace(now=0.0)

    def sleep(seconds: float) -> None:
        clock.now += seconds

    clock.monotonic, clock.sleep = (lambda: clock.now), sleep
    monkeypatch.setattr(ray_agent, "time", clock)
    return clock


def test_stalled_source_is_replaced(agent: Any) -> None:
    agent._wire = Wire(vmmfd.Timeout("no piece"), None)
    assert agent.pull(WANTED, "weights", 60.0, 1.0).id == "copy"
    assert agent._wire.sources == [b"one", b"three"] and agent.killed == ["one"]
    assert [each["source"] for each in agent.pulled()] == ["three"]


def test_three_tries_in_all(agent: Any) -> None:
    agent._wire = Wire(*[vmmfd.Timeout("no piece")] * 4)
    with pytest.raises(vmmfd.Timeout, match="'weights' was not pulled: from node one: no piece; .*three: .*two: "):
        agent.pull(WANTED, "weights", 60.0, 1.0)
    assert len(agent._wire.sources) == 3


def test_only_source_fails_at_once(agent: Any) -> None:
    agent.names[:] = ["here", "one"]
    agent._wire = Wire(vmmfd.Timeout("no piece"), None)
    with pytest.raises(vmmfd.Timeout, match="from node one: no piece$"):
        agent.pull(WANTED, "weights", 60.0, 1.0)


def test_restarted_source_is_asked_again(agent: Any) -> None:
    agent._wire = Wire(vmmfd.Disconnected("gone"), None)
    assert agent.pull(WANTED, "weights", 60.0, 1.0).id == "copy"
    assert agent._wire.sources == [b"one", b"one"] and agent.killed == []


def test_waiting_reader_gets_the_failure(agent: Any) -> None:
    agent.names[:] = ["here", "one"]
    agent._wire = Wire(vmmfd.Timeout("no piece"), None)
    for waited in (0.0, 60.0):
        with pytest.raises(vmmfd.Timeout, match="from node one: no piece$"):
            agent.pull(WANTED, "weights", 60.0, 1.0, waited)
    # Other arguments, and a later question, are a pull of their own.
    agent._wire.results = [None, None]
    assert agent.pull(WANTED, "other", 60.0, 1.0, 60.0).id == "copy" and agent._pulls == {}
    assert agent.pull(WANTED, "weights", 60.0, 1.0).id == "copy"


@pytest.mark.parametrize("heard", [True, False])
@pytest.mark.parametrize(("answers_after", "stall"), [(7.0, 5.0), (99.0, None)])
def test_silent_source_has_one_limit(
    agent: Any, clock: Any, monkeypatch: pytest.MonkeyPatch, answers_after: float, stall: float | None, heard: bool
) -> None:
    """The first answer of a source may take longer, and does not shorten the transfer's limit."""
    def ask(nodes: Any, method: str, *arguments: Any, limit: float = 3.0, **options: Any) -> list[Any]:
        clock.sleep(limit if nodes else 0.0)
        if clock.now > 20:
            # Another pull has its answer.
            agent._heard.add("one")
        return [node.encode() for node in nodes if clock.now > answers_after]

    agent.names[:] = ["here", "one"]
    agent._wire = Wire(vmmfd.Timeout("no piece"))
    monkeypatch.setattr(ray_agent, "_ask", ask)
    limit = 14 if heard else 30
    if heard:
        agent._heard.add("one")
    elif stall:
        answers_after, stall = 25.0, 10.0
    with pytest.raises(vmmfd.Error, match="no piece$" if stall else f"its agent did not answer in {limit} s$"):
        agent.pull(WANTED, "weights", 60.0, 10.0)
    assert agent._wire.stalls == ([pytest.approx(stall, abs=0.5)] if stall else []) and clock.now < limit + 1


def test_silent_sources_are_counted_at_once(agent: Any, clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(nodes: Any, method: str, *arguments: Any, limit: float = 3.0, waiting: Any = None) -> list[Any]:
        if method == "has":
            return list(nodes)
        clock.sleep(limit)
        waiting[nodes[0]] = "a call"
        return []

    agent.names[:] = ["here", "one", "two"]
    agent._heard |= {"one", "two"}
    monkeypatch.setattr(ray_agent, "_ask", ask)
    with pytest.raises(vmmfd.Disconnected, match="two: its agent did not answer in 1. s; from node one: its agent did not answer in 1. s$"):
        agent.pull(WANTED, "weights", 60.0, 10.0)
    assert clock.now < 20


def test_late_question_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    answered: list[str] = []

    def offer(*arguments: Any) -> str:
        calls.append(f"call {len(calls) + 1}")
        return calls[-1]

    method = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=offer))
    monkeypatch.setattr(ray_agent, "_agent", lambda node: SimpleNamespace(offer=method))
    monkeypatch.setattr(ray, "wait", lambda calls, **_: ([each for each in calls if each in answered], [*(set(calls) - set(answered))]))
    monkeypatch.setattr(ray, "get", lambda call: f"answer of {call}")
    search = ray_agent._Search(WANTED, "here", 10.0, set())
    assert ray_agent._ask(["one"], "offer", waiting=search._offers) == []
    assert ray_agent._ask(["one"], "offer", waiting=search._offers) == [] and calls == ["call 1"]
    answered[:] = calls
    assert ray_agent._ask(["one"], "offer", waiting=search._offers) == ["answer of call 1"]
    # An answer that arrived during a transfer.
    answered.clear()
    assert ray_agent._ask(["one"], "offer", waiting=search._offers) == []
    answered[:] = calls
    search.forget_answers()
    assert ray_agent._ask(["one"], "offer", waiting=search._offers) == [] and len(calls) == 3


def test_each_pull_of_an_object_is_seen(agent: Any) -> None:
    """Also one that waited for a pull to another name."""
    first, waits = ray_agent._Pulling(), threading.Event()
    lock = first.lock
    lock.acquire()

    def acquire(timeout: float) -> bool:
        waits.set()
        return lock.acquire(timeout=timeout)

    first.lock = SimpleNamespace(acquire=acquire, release=lock.release)  # type: ignore[assignment]
    agent._pulls["id"] = first
    seen: list[list[str]] = []
    agent._wire = Wire(None)
    pull = agent._wire.pull
    agent._wire.pull = lambda *arguments, **options: seen.append(agent.pulling()) or pull(*arguments, **options)
    thread = threading.Thread(target=agent.pull, args=(WANTED, "other", 60.0, 1.0))
    thread.start()
    assert waits.wait(LIMIT)
    del agent._pulls["id"]
    lock.release()
    thread.join()
    assert seen == [["id"]] and agent._pulls == {}


def test_other_bytes_are_refused_at_once(agent: Any) -> None:
    agent._wire = Wire(vmmfd.MismatchError("other bytes"))
    with pytest.raises(vmmfd.MismatchError):
        agent.pull(WANTED, "weights", 60.0, 1.0)


def test_source_serves_one_reader(agent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    agent._wire = Wire()
    monkeypatch.setattr(ray_agent, "_copy", lambda *_: WANTED)
    monkeypatch.setattr(ray_agent, "_ask", lambda *_, **__: [["id"]])
    first = agent.offer(WANTED, "one", 0.0)
    assert agent.offer(WANTED, "two", 10.0) is False
    agent.end("id", first)
    second = agent.offer(WANTED, "two", 10.0)
    assert isinstance(second, bytes) and second != first
    # The reader's agent was restarted: it does not pull.
    monkeypatch.setattr(ray_agent, "_ask", lambda *_, **__: [[]])
    assert agent.offer(WANTED, "three", 0.0) is False
    agent._lent["id"] = agent._lent["id"]._replace(stall=0.0)
    assert isinstance(agent.offer(WANTED, "three", 0.0), bytes)
    agent.end("id", second)
    assert agent._lent["id"].reader == "three"
