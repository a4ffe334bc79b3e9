"""Objects by name: put, get, claim and queries."""

from __future__ import annotations

import copy
import gc
import datetime
import math
import os
import pickle
import re
import subprocess
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import vmmfd

from conftest import PYTHON, Server, command

def floats(*values: float) -> np.ndarray:
    return np.array(values, dtype="f4")


def test_ten_line_example(server: Server, tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    program = root / "examples" / "share_numpy.py"
    shown = re.search(r"^## Ten lines$.*?^```python\n(.*?)^```$", (root / "docs" / "python.md").read_text(), re.MULTILINE | re.DOTALL)
    assert shown and program.read_text().endswith("\n" + shown[1])

    def run(path: str) -> tuple[int, str]:
        environment = {**os.environ, "VMMFD_BROKER_SOCKET": path}
        ended = subprocess.run([*PYTHON, str(program)], env=environment, capture_output=True, text=True, timeout=60)
        return ended.returncode, ended.stderr

    assert run(server.path) == (0, "")
    code, says = run(server.path)
    assert code == 1 and says.count("\n") == 1 and "demo" in says and "replace the object" in says, says
    code, says = run(str(tmp_path / "none.sock"))
    assert code == 1 and says.count("\n") == 1 and "start `vmmfd serve` at " in says, says


def test_put_and_get_round_trip(broker: vmmfd.Broker, name: str) -> None:
    values = {
        "x": np.arange(12, dtype="f4").reshape(3, 4),
        "flag": np.array([True, False]),
        "empty": np.zeros((0, 3), dtype="i8"),
        "scalar": np.array(5.5),
        "across": np.arange(12, dtype="<i2").reshape(3, 4).T,
        "backwards": np.arange(5, dtype="u1")[::-1],
        "complex": np.array([1 + 2j]),
        "bytes": b"abc",
    }
    put = broker.put(name, values, metadata={"step": 1, "nested": {"list": [1, 2.5, None, True, "é"]}})
    assert (put.name, put.version) == (name, 1) and uuid.UUID(put.id)
    with broker.get(name) as lease:
        assert list(lease) == list(values) and len(lease) == len(values)
        for key in values:
            if key == "bytes":
                assert lease[key].tobytes() == b"abc"
                continue
            got = np.from_dlpack(lease[key]) if key != "flag" else np.asarray(lease[key])
            assert got.dtype == values[key].dtype and np.array_equal(got, values[key]), key
            assert not got.flags.writeable or not got.size
        assert lease["x"].address % 256 == 0
        assert lease.metadata == {"step": 1, "nested": {"list": [1, 2.5, None, True, "é"]}}
        assert lease.metadata is not lease.metadata
        assert (lease.name, lease.version, lease.id) == (name, 1, put.id)
        assert lease.owner == vmmfd.records.Owner(uid=os.geteuid(), gid=os.getegid())
        age = datetime.datetime.now(datetime.timezone.utc) - lease.created
        assert abs(age) < datetime.timedelta(minutes=5)
        del got


def test_shared_arrays_are_not_copied(broker: vmmfd.Broker, name: str) -> None:
    mine = vmmfd.empty((4, 2), "float32", backend="host")
    other = vmmfd.asarray(np.arange(6, dtype="i4"), backend="host")
    mine.copy_from(np.arange(8, dtype="f4").reshape(4, 2))
    broker.put(name, {"mine": mine, "part": mine[1:3], "other": other}, copy=False)
    with broker.get(name) as lease:
        got, part = np.from_dlpack(lease["mine"]), np.from_dlpack(lease["part"])
        assert np.array_equal(np.from_dlpack(lease["other"]), np.arange(6))
        # The same memory: writes are visible to readers (do not do this after a put).
        mine.copy_from(np.full((4, 2), 7, dtype="f4"))
        assert (got == 7).all() and (part == 7).all() and part.shape == (2, 2)
        del got, part
    # Memory of another process is copied.
    with broker.get(name) as lease, pytest.raises(vmmfd.ExportError, match="copy=False"):
        broker.put(name + "/again", {"x": lease["mine"]}, copy=False)
    with broker.get(name) as lease:
        broker.put(name + "/again", {"x": lease["mine"]})
    broker.put(name + "/copied", {"x": mine}, copy=True)
    with broker.get(name + "/copied") as lease:
        mine.copy_from(np.zeros((4, 2), dtype="f4"))
        assert (np.from_dlpack(lease["x"]) == 7).all()


def test_copy_false_refuses_copies(broker: vmmfd.Broker, name: str) -> None:
    with pytest.raises(BufferError, match="ndarray.*copy=False"):
        broker.put(name, {"x": floats(1)}, copy=False)
    with pytest.raises(vmmfd.NotFound):
        broker.get(name)


def test_host_copies_are_sealed(broker: vmmfd.Broker, name: str) -> None:
    broker.put(name, {"x": floats(1, 2)})
    told = broker._native.stat(name)
    assert told["parts"][0]["memory"]["immutable"]


def test_sealed_memory_is_read_only_here(broker: vmmfd.Broker, name: str) -> None:
    mine = vmmfd.asarray(floats(1, 2), backend="host")
    broker.put(name, {"x": mine, "copied": floats(3)}, seal=True)
    assert mine.readonly and mine.tobytes() == floats(1, 2).tobytes()
    with pytest.raises(vmmfd.Error):
        mine.copy_from(floats(5, 6))
    # Its memory can be put again.
    assert broker.put(name, {"x": mine}, replace=True).version == 2
    with pytest.raises(ValueError, match="wait=5 is the time to wait for the other parts"):
        broker.put(name, {"x": mine}, replace=True, wait=5)


def test_bytes_of_predicts_mapped_size(broker: vmmfd.Broker, name: str) -> None:
    memories = [vmmfd._native.Memory(size, backend="host") for size in (1, 3 << 20)]
    broker._native.put(name, [(f"rank{at}", [memory], [], None) for at, memory in enumerate(memories)])
    sizes = [memory.mapped_size for memory in memories]
    assert broker.bytes_of(name) == sum(sizes) and broker.bytes_of(name, 1, parts=["rank1"]) == sizes[1]
    with pytest.raises(KeyError, match="no part 'rank2'; it has rank0, rank1"):
        broker.bytes_of(name, parts=["rank2"])


def test_replace_and_versions(broker: vmmfd.Broker, name: str) -> None:
    broker.put(name, {"x": floats(1)})
    with pytest.raises(FileExistsError, match="exists") as caught:
        broker.put(name, {"x": floats(2)})
    assert caught.value.kind == "object" and "replace the object" in caught.value.hint
    assert broker.put(name, {"x": floats(2)}, replace=True).version == 2
    assert broker.put(name, {"x": floats(3)}, replace_version=2).version == 3
    with pytest.raises(vmmfd.MismatchError):
        broker.put(name, {"x": floats(4)}, replace_version=2)
    with pytest.raises(vmmfd.NotFound):
        broker.get(name, version=1)
    with pytest.raises(TypeError, match="replace='yes'"):
        broker.put(name, {"x": floats(4)}, replace="yes")  # type: ignore[arg-type]
    broker.put(name, {"x": floats(4)}, replace=True, keep=2)
    broker.put(name, {"x": floats(5)}, replace=True)
    assert broker.get(name, version=4).version == 4
    assert broker.get(name).version == 5
    with pytest.raises(vmmfd.NotFound):
        broker.get(name, newer_than=5)
    assert broker.get(name, newer_than=4).version == 5


def test_get_compares_expectations(broker: vmmfd.Broker, name: str) -> None:
    broker.put(name, {"x": floats(1)}, metadata={"engine": "a", "n": 3}, digest="blake3:00")
    assert broker.get(name, expect={"engine": "a"}, digest="blake3:00")["x"].shape == (1,)
    with pytest.raises(vmmfd.MismatchError, match="engine"):
        broker.get(name, expect={"engine": "b"})
    with pytest.raises(vmmfd.MismatchError, match="blake3"):
        broker.get(name, digest={"all": "blake3:11"})
    with pytest.raises(TypeError, match="digest has type int"):
        broker.get(name, digest=5)  # type: ignore[arg-type]
    assert broker.get(name).parts[0].digest == "blake3:00"
    # Nested mappings must have the same fields, and numbers the same type.
    broker.put(name, {"x": floats(1)}, replace=True, metadata={"n": 1, "nest": {"a": 1, "b": 2}})
    assert broker.get(name, expect={"nest": {"b": 2, "a": 1}}).version == 2
    for other in ({"n": 1.0}, {"nest": {"a": 1}}, {"none": None}):
        with pytest.raises(vmmfd.MismatchError):
            broker.get(name, expect=other)


def test_get_all(broker: vmmfd.Broker, name: str) -> None:
    broker.put(name + "/a", {"x": floats(1)})
    broker.put(name + "/b", {"x": floats(2), "y": floats(3)})
    a, b = broker.get_all([name + "/a", name + "/b"])
    assert np.from_dlpack(a["x"])[0] == 1 and np.from_dlpack(b["x"])[0] == 2
    (got,) = broker.get_all({name + "/b": {"version": 1, "arrays": ["y"]}})
    assert np.from_dlpack(got["y"])[0] == 3
    with pytest.raises(vmmfd.NotFound):
        broker.get_all([name + "/a", name + "/c"])
    with pytest.raises(TypeError, match="is a single name"):
        broker.get_all(name)
    with pytest.raises(TypeError, match="'vresion', which is not one of"):
        broker.get_all({name: {"vresion": 1}})
    with pytest.raises(vmmfd.Invalid, match="wanted has '.*/a' twice"):
        broker.get_all([name + "/a", name + "/b", name + "/a"])
    with pytest.raises(vmmfd.Invalid, match="version=-1"):
        broker.get_all({name + "/a": {"version": -1}})


def test_wait_ends_at_put_or_timeout(broker: vmmfd.Broker, name: str) -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="waited 100 ms") as caught:
        broker.get(name, wait=0.1)
    assert time.monotonic() - began >= 0.1 and caught.value.kind == "peer" and caught.value.hint
    thread = threading.Timer(0.2, lambda: broker.put(name, {"x": floats(1)}))
    thread.start()
    assert broker.get(name, wait=datetime.timedelta(seconds=30)).version == 1
    thread.join()
    assert broker.get(name, wait=math.inf).version == 1


def test_one_claimant_gets_the_claim(broker: vmmfd.Broker, name: str) -> None:
    claim = broker.claim(name)
    assert isinstance(claim, vmmfd.Claim) and claim.name == name and not claim.is_closed
    got: list[Any] = []
    waiting = threading.Thread(target=lambda: got.append(broker.claim(name, wait=30)))
    waiting.start()
    time.sleep(0.1)
    assert not got
    for nothing in ({}, {"wait": 0}):
        with pytest.raises(vmmfd.NotFound, match=f"no object `{name}`, and pid [0-9]+ of uid [0-9]+ has claimed it\nwait longer") as refused:
            broker.claim(name, **nothing)
        assert refused.value.kind == "object"
    with pytest.raises(vmmfd.Timeout, match="has claimed it: waited"):
        broker.claim(name, wait=0.01)
    assert claim.put({"x": floats(1)}).version == 1
    waiting.join(30)
    assert isinstance(got[0], vmmfd.Lease) and claim.is_closed
    # A dropped claim passes on.
    other = name + "/other"
    with broker.claim(other) as first:
        waiting = threading.Thread(target=lambda: got.append(broker.claim(other, wait=30)))
        waiting.start()
        time.sleep(0.1)
        assert len(got) == 1 and not first.is_closed
    waiting.join(30)
    assert isinstance(got[1], vmmfd.Claim)
    with pytest.raises(ValueError, match="give both"):
        broker.claim(name, part="a")


def test_ended_claim_refuses_put(socket: str, broker: vmmfd.Broker, name: str) -> None:
    claim = broker.claim(name)
    assert isinstance(claim, vmmfd.Claim)
    with pytest.raises(TypeError, match="is not an array"):
        claim.put({"x": object()})
    assert not claim.is_closed
    claim.close()
    with vmmfd.connect(socket, backend="host") as other:
        next_one = other.claim(name, wait=10)
        assert isinstance(next_one, vmmfd.Claim)
        with pytest.raises(vmmfd.Invalid, match=f"claim of '{name}' has ended.*claim it again"):
            claim.put({"x": floats(1)})
        assert next_one.put({"x": floats(2)}).version == 1
        with pytest.raises(vmmfd.Invalid, match="has ended"):
            next_one.put({"x": floats(3)}, replace=True)
    assert np.from_dlpack(broker.get(name)["x"])[0] == 2


def test_duplicate_selections_are_merged(broker: vmmfd.Broker, name: str) -> None:
    broker.put(name, {"x": floats(1), "y": floats(2)}, digest="d")
    assert broker.get(name, arrays=["x", "x"])["x"].shape == (1,)
    assert list(broker.get(name, parts=["all", "all"], digest="d")) == ["x", "y"]
    assert broker.get_all({name: {"arrays": ["y", "y"]}})[0]["y"].shape == (1,)
    assert isinstance(broker.claim(name, arrays=["x"] * 2000), vmmfd.Lease)
    with pytest.raises(vmmfd.Invalid, match="arrays has 1025 names, and a get takes at most 1024"):
        broker.get(name, arrays=[f"x{number}" for number in range(1025)])


def test_numpy_scalars_are_arrays(broker: vmmfd.Broker, name: str) -> None:
    values = {"f": np.float32(3.5), "i": np.int64(-7), "b": np.bool_(True), "sum": np.arange(3.0).sum()}
    broker.put(name, values)
    lease = broker.get(name)
    for key, value in values.items():
        got = np.asarray(lease[key])
        assert got.shape == () and got.dtype == value.dtype and got == value, key
    mine = vmmfd.asarray(np.float32(1), backend="host")
    mine.copy_from(np.float32(2))
    assert np.from_dlpack(mine) == 2
    with pytest.raises(vmmfd.Error):
        mine.copy_to(np.float32(0))
    with pytest.raises(TypeError, match="an object of type complex is not an array.*numpy.asarray"):
        broker.put(name + "/no", {"x": 1j})


def test_parts_are_published_together(broker: vmmfd.Broker, name: str) -> None:
    def rank(number: int) -> None:
        broker.put(
            name,
            {"w": floats(number)},
            part=f"rank{number}",
            parts=["rank0", "rank1"],
            group="g",
            wait=30,
            metadata={"a": 1} if number == 0 else None,
        )

    thread = threading.Thread(target=rank, args=(0,))
    thread.start()
    time.sleep(0.1)
    with pytest.raises(vmmfd.NotFound):
        broker.get(name)
    rank(1)
    thread.join(30)
    lease = broker.get(name)
    assert lease.metadata == {"a": 1}
    assert [part.name for part in lease.parts] == ["rank0", "rank1"]
    with pytest.raises(ValueError, match="in the parts rank0, rank1: choose one"):
        lease["w"]
    assert "w" in lease and list(lease) == ["w"]
    assert np.from_dlpack(lease.array("w", part="rank1"))[0] == 1
    with pytest.raises(KeyError, match="no part \"rank2\""):
        lease.array("w", part="rank2")
    only = broker.get(name, parts=["rank1"])
    assert np.from_dlpack(only["w"])[0] == 1 and len(only.parts) == 1
    with pytest.raises(ValueError, match="give part="):
        lease.memory()
    assert lease.memory("rank0")[0].tobytes()[:4] == floats(0).tobytes()
    with pytest.raises(TimeoutError):
        broker.put(name + "/late", {"w": floats(1)}, part="a", parts=["a", "b"], group="g", wait=0.1)
    with pytest.raises(ValueError, match="give both"):
        broker.put(name + "/late", {"w": floats(1)}, parts=["a", "b"])


def test_records_can_be_pickled(broker: vmmfd.Broker, name: str) -> None:
    published = broker.put(name, {"x": np.arange(3)})
    for record in (published, broker.stat(name), broker.who(name)):
        assert pickle.loads(pickle.dumps(record)) == record


def test_list_stat_and_who(broker: vmmfd.Broker, name: str) -> None:
    broker.put(name + "/a", {"x": floats(1), "y": floats(2)}, metadata={"k": 1}, mode=0o640, lifetime=60, keep=3)
    broker.put(name + "/b", {"x": floats(1)})
    listed = broker.list(name)
    assert [of.name for of in listed] == [name + "/a", name + "/b"]
    first = listed[0]
    assert (first.version, first.backend, first.parts, first.segments, first.arrays, first.leases) == (1, "host", 1, 1, 2, 0)
    assert first.mode == 0o640 and first.owner.uid == os.geteuid() and first.created.tzinfo is not None
    assert first.devices[0].bytes == first.size == broker.bytes_of(name + "/a")
    stat = broker.stat(name + "/a")
    assert stat.summary == first and stat.versions == (1,) and stat.metadata == {"k": 1}
    assert (stat.lifetime, stat.keep, stat.reports) == (60.0, 3, ())
    assert (stat.parts[0].name, stat.parts[0].arrays, stat.parts[0].maker.pid) == ("all", 2, os.getpid())
    assert broker.stat(name + "/b").lifetime == "deleted"
    with broker.get(name + "/a"):
        held = broker.who(name).leases
        assert [(lease.name, lease.version, lease.holder.pid, lease.named) for lease in held] == [(name + "/a", 1, os.getpid(), True)]
        assert broker.who().totals[0].uid == os.geteuid()
        broker.delete(name + "/a")
        assert not broker.who(name).leases[0].named
    assert not broker.who(name).leases
    for missing in (broker.stat, broker.delete, broker.bytes_of):
        with pytest.raises(FileNotFoundError) as caught:
            missing(name + "/a")
        assert isinstance(caught.value, vmmfd.NotFound) and caught.value.kind == "object"
    with pytest.raises(AttributeError):
        first.name = "x"
    assert "Summary(" in repr(first) and "mode=0o640, " in repr(first) and first != stat


def test_summaries_are_few_objects(broker: vmmfd.Broker, name: str) -> None:
    """The garbage collector, which holds the GIL, visits few objects for each summary."""
    x = vmmfd.zeros(1, backend="host")
    for number in range(50):
        broker.put(f"{name}/{number}", {"x": x})
    broker.list(name)
    gc.collect()
    before = len(gc.get_objects())
    summaries = broker.list(name)
    gc.collect()
    assert len(summaries) == 50 and len(gc.get_objects()) - before < 3 * 50


def test_maker_lifetime_ends_with_connection(socket: str, broker: vmmfd.Broker, name: str) -> None:
    with vmmfd.connect(socket, backend="host") as maker:
        maker.put(name, {"x": floats(1)}, lifetime="maker")
        lease = maker.get(name)
        x = np.from_dlpack(lease["x"])
        assert broker.stat(name).lifetime == "maker"
    # Although a lease of that Broker is still held.
    deadline = time.monotonic() + 60
    while broker.list(name) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not broker.list(name) and x[0] == 1
    assert lease.is_held and broker.who(name).leases
    with pytest.raises(ValueError, match="lifetime=\"for ever\" is not one of"):
        broker.put(name, {"x": floats(1)}, lifetime="for ever")  # type: ignore[arg-type]


def test_system_broker_is_found(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VMMFD_BROKER_SOCKET", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("VMMFD_SYSTEM_SOCKET", str(server.path))
    with vmmfd.connect(backend="host") as broker:
        assert broker.path == str(server.path)
    absent = tmp_path / "absent.sock"
    monkeypatch.setenv("VMMFD_SYSTEM_SOCKET", str(absent))
    with pytest.raises(vmmfd.NotFound, match=f"no broker on {tmp_path}/vmmfd/broker.sock .* there is no {absent}"):
        vmmfd.connect(backend="host", wait=0.1)


def test_missing_broker_has_a_hint(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no broker on") as caught:
        vmmfd.connect(tmp_path / "broker.sock", wait=0)
    assert isinstance(caught.value, vmmfd.NotFound)
    assert f"start `vmmfd serve` at {tmp_path}" in caught.value.hint and caught.value.hint in caught.value.__notes__
    with pytest.raises(ValueError, match="can't be used"):
        vmmfd.connect("x" * 200)


def test_connect_waits_a_second_unless_asked(server: Server) -> None:
    server.kill()
    waits: list[tuple[dict[str, Any], str]] = [
        ({}, " within 1s"),
        ({"wait": datetime.timedelta(seconds=0.05)}, " within 50ms"),
        ({"wait": 0}, ""),
    ]
    for options, within in waits:
        with pytest.raises(vmmfd.NotFound, match=f"^no broker on {server.path}{within}\n"):
            vmmfd.connect(server.path, **options)
    starting = threading.Timer(1.2, server.start)
    starting.start()
    with vmmfd.connect(server.path, timeout=20, wait=20) as broker:
        assert broker.list() == []
    starting.join()
    with pytest.raises(TypeError, match="wait=None is not a time"):
        vmmfd.connect(server.path, wait=None)  # type: ignore[arg-type]


def test_path_from_environment(socket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VMMFD_BROKER_SOCKET", socket)
    assert vmmfd.connect(backend="host").path == socket


def test_closed_broker_refuses_calls(socket: str, name: str) -> None:
    broker = vmmfd.connect(socket, backend="host")
    broker.put(name, {"x": floats(1)})
    lease = broker.get(name)
    broker.close()
    broker.close()
    assert broker.is_closed and "closed" in repr(broker)
    for call in (lambda: broker.get(name), broker.list, lambda: broker.put(name, {"x": floats(1)}), broker.watch):
        with pytest.raises(InterruptedError, match="the connection is closed: connect again"):
            call()
    # The lease is still valid.
    assert lease.is_held and np.from_dlpack(lease["x"])[0] == 1
    lease.close()


def test_many_arrays_and_segments(broker: vmmfd.Broker, name: str) -> None:
    values = {f"layer.{number}.weight": np.full(16, number, dtype="i4") for number in range(2000)}
    broker.put(name, values)
    lease = broker.get(name)
    assert len(lease) == 2000
    for number in (0, 7, 1999):
        assert np.from_dlpack(lease[f"layer.{number}.weight"])[0] == number
    with pytest.raises(KeyError, match="layer.0.weight, .*\\.\\.\\.") as caught:
        lease["layer.2000.weight"]
    assert isinstance(caught.value, vmmfd.NoArray)
    assert lease.get("layer.2000.weight") is None
    memories = [vmmfd._native.Memory(1 << 20, backend="host") for _ in range(300)]
    broker._native.put(name + "/segments", [("all", memories, [("last", "uint8", [4], None, 299, 8, None)], None)])
    told = broker.stat(name + "/segments")
    assert told.summary.segments == 300
    assert broker.get(name + "/segments")["last"].nbytes == 4


def test_absent_arrays_and_parts_are_one_error(broker: vmmfd.Broker, name: str) -> None:
    """However they are requested."""
    broker.put(name, {"x": np.zeros(3), "y": np.ones(3)}, copy=True)
    with broker.get(name) as lease:
        for call in (
            lambda: broker.get(name, arrays=["x", "none"]),
            lambda: broker.get(name, parts=["none"]),
            lambda: broker.get(name, digest={"none": "d"}),
            lambda: broker.get_all({name: {"arrays": ["none"]}}),
            lambda: broker.claim(name, arrays=["none"]),
            lambda: broker.bytes_of(name, parts=["none"]),
            lambda: lease["none"],
            lambda: lease.array("x", "none"),
            lambda: lease.attributes("none"),
            lambda: lease.memory("none"),
            lambda: lease.tree(part="none"),
        ):
            with pytest.raises(vmmfd.NoArray, match="none"):
                call()


def test_only_requested_arrays_are_listed(broker: vmmfd.Broker, name: str) -> None:
    """Both are in one segment."""
    broker.put(name, {"x": np.zeros(3), "y": np.ones(3)}, copy=True)
    with broker.get(name, arrays=["y"]) as lease:
        assert list(lease) == ["y"] and list(lease.tree()) == ["y"] and "x" not in lease
        with pytest.raises(vmmfd.NoArray, match="was not requested"):
            lease["x"]


def test_metadata_numbers_are_exact(broker: vmmfd.Broker, name: str, tmp_path: Path) -> None:
    """A command may put numbers that no type of Rust holds."""
    number = 123456789012345678901234567890
    (tmp_path / "data").write_bytes(b"x")
    put = ["put", name, "--socket", broker.path, "--from", str(tmp_path / "data"), "--meta", f'{{"n": {number}}}']
    subprocess.run([*command(), *put], check=True, capture_output=True)
    with broker.get(name) as lease:
        assert lease.metadata["n"] == broker.stat(name).metadata["n"] == number


def test_handles_are_not_copied(broker: vmmfd.Broker, name: str) -> None:
    broker.put(name, {"x": floats(1)})
    with (
        broker.get(name) as lease,
        broker.watch(name) as watch,
        broker.follow(name) as follower,
        lease.prepare(version=1) as prepared,
        broker.claim(f"{name}/new") as claim,
    ):
        for handle in (broker, lease, watch, follower, prepared, claim):
            for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
                with pytest.raises(TypeError, match=f"a {type(handle).__name__} can't be"):
                    duplicate(handle)


def test_records_begin_with_name_and_version(broker: vmmfd.Broker, name: str) -> None:
    published = broker.put(name, {"x": floats(1)})
    with broker.get(name):
        (held,) = broker.who(name).leases
    for record in (published, broker.list(name)[0], held):
        shown = repr(record)
        assert shown.startswith(f"{type(record).__name__}(name={name!r}, version=1, ")
        assert f"id={published.id[:8]!r}" in shown and published.id not in shown
    stat = broker.stat(name)
    assert stat.version == 1 and stat.parts[0].device[:13] not in repr(stat)
