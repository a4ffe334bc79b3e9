"""Objects of another node's broker, read by NIXL over TCP: two brokers, and a process for each node."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vmmfd
import vmmfd.nodes
from vmmfd import _arguments, _copies

from conftest import NIXL, Child, Server, needs_nixl

MIB = 1 << 20
# Seconds without a finished piece.
STALL = 2.0

# UCX's and NIXL's messages go to stderr.
ENVIRONMENT = {"UCX_TLS": "tcp", "NIXL_LOG_LEVEL": "ERROR", "UCX_LOG_LEVEL": "fatal"}

# Enters a network namespace, if one is given, with a /sys that shows its devices: there UCX looks for them.
ENTER = """
    import ctypes, os
    if namespace := os.environ.get("TEST_NAMESPACE"):
        libc = ctypes.CDLL(None)
        assert libc.setns(os.open(f"/run/netns/{namespace}", os.O_RDONLY), 0x40000000) == 0
        assert libc.unshare(0x20000) == 0
        assert libc.mount(b"none", b"/", None, ctypes.c_ulong(0x44000), None) == 0
        assert libc.mount(b"none", b"/sys", b"sysfs", ctypes.c_ulong(0), None) == 0
"""

# Two memories, the first with four segments, which one array spans. Commands on stdin: `flip` changes a byte, `offer` and `withdraw`.
SOURCE = """
    import json, sys, numpy, pathlib, vmmfd, vmmfd.nodes, warnings
    warnings.filterwarnings("ignore", "this machine has no RDMA device", RuntimeWarning)
    socket, folder, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
    native, broker = vmmfd._native, vmmfd.connect(sys.argv[1], backend="host")
    memories = [native.Memory(size, backend="host", segment=size // 4), native.Memory(2 << 20, backend="host")]
    large = numpy.asarray(memories[0].array("uint8", (size,)))
    large[:] = numpy.random.default_rng(7).integers(0, 256, size, "uint8")
    small = numpy.asarray(memories[1].array("float32", (4, 8)))
    small[:] = numpy.arange(32).reshape(4, 8)
    entries = [
        ("large", "uint8", [size], None, 0, 0, None),
        ("small", "float32", [8, 4], [4, 32], 1, 0, json.dumps({"kind": "buffer"})),
    ]
    digest = native.digest_of(memories) if sys.argv[4] == "digest" else None
    broker._native.put("model", [("all", memories, entries, digest)], metadata={"step": 3})
    node = vmmfd.nodes.Node(broker, "first")
    for command in sys.stdin:
        if command == "flip\\n":
            large[size // 2] ^= 1
        if command == "offer\\n":
            offer = node.offer("model")
            pathlib.Path(folder, "offer").write_bytes(offer)
        if command == "withdraw\\n":
            node.withdraw(offer)
        print("done", flush=True)
"""

# Prints the result of a pull as JSON. While reads are in flight, it sends a signal to the source or runs a command, if asked.
READER = """
    import json, os, pathlib, subprocess, sys, time, numpy, vmmfd, vmmfd.nodes, warnings
    warnings.filterwarnings("ignore", "this machine has no RDMA device", RuntimeWarning)
    socket, folder, stall, event, source = sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4], int(sys.argv[5])
    broker = vmmfd.connect(socket, backend="host")
    node = vmmfd.nodes.Node(broker, "second")
    sleep = vmmfd.nodes.sleep

    def interrupt(seconds):
        global event
        if event.isdecimal():
            os.kill(source, int(event))
        elif event:
            subprocess.run(event, shell=True, check=True)
        event = ""
        sleep(seconds)

    vmmfd.nodes.sleep = interrupt

    def held():
        vmmfd._native._settle(10)
        return pathlib.Path("/proc/self/maps").read_text().count("memfd"), len(os.listdir("/proc/self/fd"))

    before, began = held(), time.monotonic()
    try:
        pulled = node.pull(pathlib.Path(folder, "offer").read_bytes(), stall=stall)
        result = {"checked": pulled.checked, "origin": pulled.origin, "version": pulled.version}
    except vmmfd.Error as error:
        result = {"error": type(error).__name__, "text": str(error), "hint": error.hint}
    result["seconds"] = time.monotonic() - began
    result["held"] = [before[0], held()[0]]
    result["names"] = [summary.name for summary in broker.list()]
    result["leases"] = len(broker.who().leases)
    if "model" in result["names"]:
        with broker.get("model") as lease:
            large = numpy.asarray(lease["large"])
            result["large"] = bool((large == numpy.random.default_rng(7).integers(0, 256, large.size, "uint8")).all())
            result["small"] = numpy.asarray(lease["small"]).tolist()
            result["attributes"], result["metadata"] = lease.attributes("small"), lease.metadata
            result["layout"] = [lease._native.layout()[0][number] for number in (2, 3)]
            del large
    node.close()
    print(json.dumps(result), flush=True)
"""


@dataclass
class Nodes:
    """Two nodes: a server each, and a process with an offered object at the first."""

    folder: Path
    start: Callable[..., Child]
    servers: list[Server] = field(default_factory=list)
    source: Child | None = None
    # The environment of each node's processes.
    environments: list[dict[str, str]] = field(default_factory=lambda: [ENVIRONMENT, ENVIRONMENT])

    def offer(self, *, size: int = 32 * MIB, digest: bool = True) -> Child:
        """Starts a source and makes an offer."""
        code = "digest" if digest else "none"
        self.source = self.start(ENTER + SOURCE, self.servers[0].path, str(self.folder), str(size), code, env=self.environments[0])
        self.tell("offer")
        return self.source

    def tell(self, command: str) -> None:
        assert self.source is not None and self.source.process.stdin is not None
        self.source.process.stdin.write(f"{command}\n")
        self.source.process.stdin.flush()
        self.source.wait_for("done")

    def pull(self, event: int | str = "") -> dict[str, Any]:
        """Pulls the offer. When reads are in flight, sends a signal to the source or runs a command."""
        assert self.source is not None
        event = str(int(event)) if isinstance(event, int) else event
        arguments = self.servers[1].path, str(self.folder), str(STALL), event, str(self.source.pid)
        output, errors = self.start(ENTER + READER, *arguments, env=self.environments[1]).process.communicate(timeout=120)
        assert output, errors
        return json.loads(output.splitlines()[-1])


@pytest.fixture
def nodes(tmp_path: Path, child: Callable[..., Child]) -> Iterator[Nodes]:
    made = Nodes(tmp_path, child)
    try:
        for name in ("first", "second"):
            (tmp_path / name).mkdir()
            made.servers.append(Server(tmp_path / name))
        yield made
    finally:
        if made.source is not None:
            made.source.process.kill()
        for server in made.servers:
            server.end()


@pytest.fixture
def linked(nodes: Nodes) -> Iterator[Nodes]:
    """Nodes whose only network is a link between them, with a namespace each."""
    names = [f"vmmfd{os.getpid()}{letter}" for letter in "ab"]

    def ip(*arguments: str, check: bool = True) -> None:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20)
        if check and done.returncode != 0:
            pytest.skip(f"network namespaces can't be made here: ip {' '.join(arguments)}: {done.stderr.strip()}")

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "veth", "netns", names[0], "type", "veth", "peer", "name", "veth", "netns", names[1])
        for number, name in enumerate(names):
            ip("-n", name, "address", "add", f"10.77.0.{number + 1}/24", "dev", "veth")
            ip("-n", name, "link", "set", "veth", "up")
            # NIXL's agent connects to itself.
            ip("-n", name, "link", "set", "lo", "up")
        nodes.environments = [ENVIRONMENT | {"TEST_NAMESPACE": name, "UCX_NET_DEVICES": "veth"} for name in names]
        yield nodes
    except FileNotFoundError:
        pytest.skip("network namespaces can't be made here: there is no command ip")
    finally:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                ip("netns", "delete", name, check=False)


def received(namespace: str) -> int:
    """The bytes that a namespace's link has received."""
    done = subprocess.run(["ip", "-n", namespace, "-s", "-j", "link", "show", "veth"], capture_output=True, check=True)
    return int(json.loads(done.stdout)[0]["stats64"]["rx"]["bytes"])


def failed(result: dict[str, Any], *kinds: str) -> bool:
    """Whether a pull failed with one of these errors, and left nothing."""
    left = result["held"][0] != result["held"][1] or result["names"] or result["leases"]
    return result.get("error") in kinds and not left


@needs_nixl
def test_pull_copies_whole_object(nodes: Nodes) -> None:
    nodes.offer()
    result = nodes.pull()
    stat = vmmfd.connect(nodes.servers[0].path).stat("model")
    assert "error" not in result, result
    origin = {"id": stat.summary.id, "version": 1, "node": "first"}
    assert (result["origin"], result["checked"]) == (origin, True), result
    assert result["large"] and result["small"] == [[row * 8.0 + column for row in range(4)] for column in range(8)]
    assert result["attributes"] == {"kind": "buffer"}
    assert result["metadata"] == {"step": 3, "origin": origin}
    assert result["layout"] == [stat.parts[0].digest, [8 * MIB] * 4 + [2 * MIB]]
    assert (result["leases"], result["held"][0]) == (0, result["held"][1])


# A process that starts after a pull: it offers the copy, and pulls it into the first broker.
SUCCESSOR = """
    import json, sys, vmmfd, vmmfd.nodes, warnings
    warnings.filterwarnings("ignore", "this machine has no RDMA device", RuntimeWarning)
    first, second = (vmmfd.connect(path, backend="host") for path in sys.argv[1:])
    with vmmfd.nodes.Node(second, "second") as source, vmmfd.nodes.Node(first, "third") as reader:
        pulled = reader.pull(source.offer("model"), name="again")
    print(json.dumps([pulled.origin, first.stat("again").metadata]))
"""


@needs_nixl
def test_restarted_node_keeps_origin(nodes: Nodes) -> None:
    nodes.offer()
    made = nodes.pull()["origin"]
    output, errors = nodes.start(SUCCESSOR, *(server.path for server in nodes.servers), env=ENVIRONMENT).process.communicate(timeout=120)
    assert output, errors
    assert json.loads(output) == [made, {"step": 3, "origin": made}] and made["node"] == "first"


@needs_nixl
def test_key_origin_is_kept(nodes: Nodes) -> None:
    """An object whose maker uses the key `origin` otherwise is not offered: the copy would lose the maker's value."""
    with vmmfd.connect(nodes.servers[0].path, backend="host") as broker, vmmfd.nodes.Node(broker, "first") as node:
        for value in ("hub", {"id": "x", "node": "first"}, {"id": "x", "version": "1", "node": "first"}):
            broker.put("model", {"x": vmmfd.empty(8, "uint8", backend="host")}, metadata={"origin": value}, replace=True)
            with pytest.raises(vmmfd.Invalid, match="'model' has metadata.*: put it with another key"):
                node.offer("model")
        assert not broker.who().leases


@pytest.mark.parametrize("value", ["5", b"5", None, True, float("nan"), 0, -1, 10**400, timedelta(0), timedelta])
def test_other_limits_are_refused(value: Any) -> None:
    kind = TypeError if value is None or isinstance(value, (str, bytes, bool, type)) else vmmfd.Invalid
    with pytest.raises(kind, match="stall=.*: give seconds, .* or a timedelta"):
        _arguments.limit(value, "stall")
    if NIXL:
        with vmmfd.nodes.Node(None) as node:  # type: ignore[arg-type]
            for name in ("deadline", "stall"):
                with pytest.raises(kind, match=f"{name}=.*: give seconds"):
                    node.pull(b"", **{name: value})


def test_limits_are_seconds() -> None:
    assert [_arguments.limit(value, "stall") for value in (2, 0.5, timedelta(minutes=1))] == [2.0, 0.5, 60.0]
    # A lock can wait that long.
    assert threading.Lock().acquire(timeout=_arguments.limit(float("inf"), "stall"))


@needs_nixl
def test_missing_digest_is_reported(nodes: Nodes) -> None:
    nodes.offer(digest=False)
    result = nodes.pull()
    assert result["checked"] is False and result["large"], result


@needs_nixl
def test_flipped_byte_differs(nodes: Nodes) -> None:
    nodes.offer()
    nodes.tell("flip")
    result = nodes.pull()
    assert failed(result, "MismatchError"), result


@needs_nixl
def test_withdrawn_offer_is_refused(nodes: Nodes) -> None:
    source = nodes.offer()
    nodes.tell("withdraw")
    assert not vmmfd.connect(nodes.servers[0].path).who().leases
    result = nodes.pull()
    assert failed(result, "Disconnected"), result
    assert source.process.poll() is None
    nodes.tell("offer")
    assert nodes.pull()["large"]


@needs_nixl
def test_killed_source_fails_pull(nodes: Nodes) -> None:
    nodes.offer(size=256 * MIB)
    result = nodes.pull(signal.SIGKILL)
    assert failed(result, "Disconnected", "Timeout"), result
    assert result["seconds"] < STALL + 1


@needs_nixl
def test_stopped_source_fails_pull(nodes: Nodes) -> None:
    source = nodes.offer(size=256 * MIB)
    result = nodes.pull(signal.SIGSTOP)
    assert failed(result, "Timeout"), result
    assert result["seconds"] >= STALL and f"{STALL:g} s" in result["text"]
    # Once it continued, UCX might end it at any later time, because its reader went away: another source takes its place.
    source.process.kill()
    source.process.wait()
    vmmfd.connect(nodes.servers[0].path).delete("model")
    nodes.offer()
    assert nodes.pull()["large"]


@needs_nixl
def test_link_carries_bytes_once(linked: Nodes) -> None:
    linked.offer(size=64 * MIB)
    namespace = linked.environments[1]["TEST_NAMESPACE"]
    before = received(namespace)
    assert linked.pull().get("checked")
    carried = (received(namespace) - before) / (66 * MIB)
    assert 1 <= carried < 1.05, carried


@needs_nixl
def test_cut_link_fails_pull(linked: Nodes) -> None:
    linked.offer(size=256 * MIB)
    result = linked.pull(f"ip -n {linked.environments[0]['TEST_NAMESPACE']} link set veth down")
    assert failed(result, "Timeout"), result
    assert result["seconds"] >= STALL


@needs_nixl
def test_taken_name_is_refused(nodes: Nodes) -> None:
    nodes.offer()
    assert "large" in nodes.pull()
    result = nodes.pull(signal.SIGKILL)
    assert result["error"] == "AlreadyExists"
    # No read was in flight.
    assert nodes.source is not None and nodes.source.process.poll() is None


def test_import_needs_no_nixl(child: Callable[..., Child]) -> None:
    code = """
        import sys, vmmfd, vmmfd.nodes
        assert not [name for name in sys.modules if name.startswith("nixl")]
        sys.modules.update(dict.fromkeys(("nixl", "nixl_cu12", "nixl_cu13")))
        try:
            vmmfd.nodes.Node(None)
        except vmmfd.Unsupported as error:
            print(error.hint)
    """
    assert child(code).end() == "pip install 'vmmfd[nixl]'\n"


@pytest.mark.parametrize("offer", [b"", b"{}", b"[]", b"\xff", b'{"vmmfd": 2}', b'{"vmmfd": 1, "name": "x", "origin": 3}'])
def test_other_bytes_are_refused(offer: bytes) -> None:
    with pytest.raises(vmmfd.Invalid, match="offer"):
        _copies.Offer(offer)


def test_spanned_segments_share_memory() -> None:
    sizes = [4, 4, 4, 2, 4]
    assert _copies._groups(sizes, []) == [(number, number + 1) for number in range(5)]
    assert _copies._groups(sizes, [(0, 8), (8, 8), (9, 14)]) == [(0, 2), (2, 4), (4, 5)]
    assert _copies._groups(sizes, [(0, 18)]) == [(0, 5)]


@pytest.mark.parametrize(("backend", "calls"), [("cuda", ["activate 1", "register"]), ("host", ["register"])])
def test_context_is_active_before_registration(monkeypatch: pytest.MonkeyPatch, backend: str, calls: list[str]) -> None:
    seen: list[str] = []
    monkeypatch.setattr(vmmfd._native, "activate", lambda device: seen.append(f"activate {device}"))
    agent = vmmfd.nodes._Agent.__new__(vmmfd.nodes._Agent)
    agent._agent = SimpleNamespace(register_memory=lambda *_, **__: seen.append("register"))
    agent.register(backend, [(4096, 4096)], 1)
    assert seen == calls


@pytest.mark.fake
def test_unknown_device_has_no_context() -> None:
    vmmfd._native.activate(0)
    with pytest.raises(vmmfd.Error):
        vmmfd._native.activate(99)


@pytest.mark.parametrize(("backend", "advice"), [("host", "Ray's own object store"), ("cuda", "share one broker on each machine$")])
def test_tcp_warns_once(monkeypatch: pytest.MonkeyPatch, backend: str, advice: str) -> None:
    from vmmfd import nodes

    monkeypatch.setattr("os.path.isdir", lambda path: False)
    monkeypatch.setattr(nodes, "_warned", set())
    with pytest.warns(RuntimeWarning, match=f"no RDMA device.*{advice}") as warned:
        nodes._warn_of_tcp(backend)
        monkeypatch.setattr("os.path.isdir", lambda path: pytest.fail("it was read again"))
        nodes._warn_of_tcp(backend)
    assert len(warned) == 1


def test_rdma_device_prevents_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    from vmmfd import nodes

    monkeypatch.setattr("os.path.isdir", lambda path: True)
    monkeypatch.setattr("os.listdir", lambda path: ["mlx5_0"])
    monkeypatch.setattr(nodes, "_warned", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nodes._warn_of_tcp("cuda")
