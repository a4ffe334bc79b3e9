"""Leases: their lifetime, and switching versions at their addresses."""

from __future__ import annotations

import gc
import pickle
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from conftest import Child, Server

import vmmfd

MIB = 1 << 20


@pytest.fixture
def name(broker: vmmfd.Broker) -> str:
    """An object with one array of 1024 elements, all 1."""
    name = f"lease/{uuid.uuid4().hex}"
    put(broker, name, 1)
    return name


def put(broker: vmmfd.Broker, name: str, value: float, **more: Any) -> vmmfd.records.Published:
    return broker.put(name, {"x": np.full(1024, value, dtype="f4"), **more}, replace=True, metadata={"value": value})


def held(broker: vmmfd.Broker, name: str) -> list[int]:
    """Returns the versions with held leases."""
    return [lease.version for lease in broker.who(name).leases]


def settled(broker: vmmfd.Broker, name: str, expected: list[int]) -> bool:
    deadline = time.monotonic() + 60
    while held(broker, name) != expected and time.monotonic() < deadline:
        time.sleep(0.005)
    return held(broker, name) == expected


def test_lease_is_a_mapping(broker: vmmfd.Broker, name: str) -> None:
    lease = broker.get(name)
    assert isinstance(lease, Mapping)
    assert list(lease.keys()) == ["x"] and [array.shape for array in lease.values()] == [(1024,)]
    assert "x" in lease and "y" not in lease and 5 not in lease
    assert dict(lease.items())["x"].dtype == "float32"
    assert lease == lease and lease != broker.get(name) and len({lease, lease}) == 1
    assert "version 1" in repr(lease)
    with pytest.raises(KeyError):
        lease["y"]
    with pytest.raises(TypeError):
        lease[5]  # type: ignore[index]


def test_last_array_ends_closed_lease(broker: vmmfd.Broker, name: str) -> None:
    with broker.get(name) as lease:
        assert lease.is_held and held(broker, name) == [1] and lease.exports == 0
    assert held(broker, name) == [] and lease.is_closed and not lease.is_held
    with broker.get(name) as lease:
        array = lease["x"]
        view = np.from_dlpack(array)
        assert lease.exports == 1
    assert held(broker, name) == [1]
    del array
    assert held(broker, name) == [1] and (view == 1).all()
    broker.delete(name)
    assert (view == 1).all()
    rest = view[5:7]
    del view
    assert (rest == 1).all() and held(broker, name) == [1]
    del rest
    assert settled(broker, name, [])


def test_array_keeps_lease(broker: vmmfd.Broker, name: str) -> None:
    with broker.get(name) as lease:
        array = lease["x"]
    del lease
    assert array.tobytes() == np.full(1024, 1, dtype="f4").tobytes() and held(broker, name) == [1]
    part = array[3:5]
    del array
    assert part.tobytes() == np.full(2, 1, dtype="f4").tobytes()
    del part
    assert settled(broker, name, [])


def test_dropped_lease_ends(broker: vmmfd.Broker, name: str) -> None:
    lease = broker.get(name)
    del lease
    assert settled(broker, name, [])
    cycle: list[Any] = [broker.get(name)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert settled(broker, name, [])


def test_closed_lease_refuses_use(broker: vmmfd.Broker, name: str) -> None:
    lease = broker.get(name)
    lease.close()
    lease.close()
    assert repr(lease) == "<vmmfd.Lease: closed>"
    for use in (
        lambda: lease["x"],
        lambda: lease.version,
        lambda: lease.metadata,
        lambda: list(lease),
        lambda: "x" in lease,
        lambda: lease.park(),
        lambda: lease.prepare(version=1),
        lambda: lease.unpark(),
        lambda: lease.memory(),
        lambda: lease.parts,
    ):
        with pytest.raises(ValueError, match="the lease is closed: get the object again"):
            use()


def test_lease_is_not_pickled(broker: vmmfd.Broker, name: str) -> None:
    lease = broker.get(name)
    for thing in (broker, lease, lease["x"]):
        with pytest.raises(TypeError, match="pickled"):
            pickle.dumps(thing)


def test_selection_limits_the_mapping(broker: vmmfd.Broker) -> None:
    name = f"lease/{uuid.uuid4().hex}"
    memories = [vmmfd._native.Memory(2 * MIB, backend="host") for _ in range(4)]
    entries = [(f"a{at}", "uint8", [4], None, at, at, None) for at in range(4)]
    broker._native.put(name, [("all", memories, entries, None)])
    lease = broker.get(name, arrays=["a3", "a1"])
    assert sorted(lease) == ["a1", "a3"] and len(lease) == 2 and "a0" not in lease
    with pytest.raises(KeyError, match="was not requested"):
        lease["a0"]
    pieces = lease.pieces()
    assert [start for start, _ in pieces] == [2 * MIB, 6 * MIB] and [piece.nbytes for _, piece in pieces] == [2 * MIB] * 2
    assert lease["a3"].address == pieces[1][1].address + 3
    assert len(lease.memory()) == 2
    neighbours = broker.get(name, arrays=["a1", "a2"])
    assert [array.nbytes for array in neighbours.memory()] == [4 * MIB]
    with pytest.raises(vmmfd.NoArray):
        broker.get(name, arrays=["a9"])
    with pytest.raises(vmmfd.NoArray):
        broker.get(name, parts=["nope"])


def test_switch_keeps_addresses(broker: vmmfd.Broker, name: str) -> None:
    lease = broker.get(name)
    array, address = lease["x"], lease["x"].address
    with pytest.raises(vmmfd.NotFound):
        lease.prepare()
    put(broker, name, 2)
    prepared = lease.prepare()
    assert (prepared.name, prepared.version, prepared.metadata) == (name, 2, {"value": 2}) and "version 2" in repr(prepared)
    assert held(broker, name) == [1, 2] and array.tobytes()[:4] == np.float32(1).tobytes()
    old = lease.switch(prepared)
    assert (old.version, lease.version, lease.metadata) == (1, 2, {"value": 2})
    assert prepared.is_closed and array.tobytes()[:4] == np.float32(2).tobytes()
    assert lease["x"].address == address
    with pytest.raises(ValueError, match="prepare it again"):
        lease.switch(prepared)
    # And back.
    new = lease.switch(old)
    assert lease.version == 1 and array.tobytes()[:4] == np.float32(1).tobytes()
    new.close()
    new.close()
    assert settled(broker, name, [1])
    with pytest.raises(ValueError, match="closed"):
        new.version
    with lease.prepare(version=2) as prepared:
        assert prepared.version == 2
    assert prepared.is_closed and settled(broker, name, [1])
    put(broker, name, 3, more=np.zeros(3))
    old = lease.switch(lease.prepare())
    assert list(lease) == ["x", "more"] and array.tobytes()[:4] == np.float32(3).tobytes()
    # A layout with fewer arrays cannot be restored.
    with pytest.raises(ValueError, match="a layout other than"):
        lease.switch(old)
    assert lease.version == 3 and lease["more"].shape == (3,)


def test_switch_with_exports_needs_promise(broker: vmmfd.Broker, name: str) -> None:
    lease = broker.get(name)
    view = np.from_dlpack(lease["x"])
    put(broker, name, 2)
    prepared = lease.prepare()
    with pytest.raises(BufferError, match='1 exports .* exports_unused=True'):
        lease.switch(prepared)
    with pytest.raises(BufferError):
        lease.park()
    with pytest.raises(TypeError, match="exports_unused='valid' has type str"):
        lease.switch(prepared, exports_unused="valid")  # type: ignore[arg-type]
    # It can be tried again.
    assert not prepared.is_closed and (view == 1).all()
    lease.park(keep_lease=True, exports_unused=True)
    with pytest.raises(ValueError, match="is parked"):
        lease.switch(prepared, exports_unused=True)
    assert not prepared.is_closed
    lease.unpark(version=1)
    old = lease.switch(prepared, exports_unused=True)
    assert (view == 2).all() and lease.exports == 1
    with pytest.raises(BufferError):
        lease.switch(old)
    del view
    assert lease.exports == 0
    lease.switch(old)
    assert lease.version == 1


@pytest.mark.parametrize("how", ["__array_interface__", "memoryview"])
def test_all_exports_count(broker: vmmfd.Broker, name: str, how: str) -> None:
    lease = broker.get(name)
    array = lease["x"]
    view = memoryview(array) if how == "memoryview" else np.asarray(array)
    assert lease.exports >= 1
    with pytest.raises(BufferError):
        lease.park()
    del view, array
    gc.collect()
    assert lease.exports == 0
    lease.park()


def test_misfit_is_listed(broker: vmmfd.Broker, name: str) -> None:
    lease = broker.get(name)
    broker.put(name, {"x": np.zeros(1024, dtype="i4"), "y": np.zeros(3)}, replace=True)
    with pytest.raises(vmmfd.MismatchError, match="array `x` is int32 .*, not float32"):
        lease.prepare()
    assert lease.version == 1 and lease["x"].dtype == "float32"


def test_unpark_keeps_addresses(broker: vmmfd.Broker, name: str) -> None:
    lease = broker.get(name)
    array, address = lease["x"], lease["x"].address
    with pytest.raises(ValueError, match="not parked"):
        lease.unpark()
    lease.park(keep_lease=True)
    assert lease.is_parked and lease.is_held and "parked" in repr(lease) and held(broker, name) == [1]
    for use in (lambda: lease["x"], lambda: array.tobytes(), lambda: np.from_dlpack(array), lambda: lease.memory()):
        with pytest.raises(vmmfd.Error, match="parked"):
            use()
    put(broker, name, 2)
    lease.unpark()
    assert lease.version == 1 and array.tobytes()[:4] == np.float32(1).tobytes()
    lease.park()
    assert not lease.is_held and held(broker, name) == []
    lease.unpark(version="newest")
    assert (lease.version, lease["x"].address) == (2, address) and array.tobytes()[:4] == np.float32(2).tobytes()
    lease.park()
    put(broker, name, 3)
    with pytest.raises(vmmfd.NotFound):
        lease.unpark()
    assert lease.is_parked
    lease.close()
    # The array remains, without readable memory.
    with pytest.raises(vmmfd.Error, match="parked"):
        array.tobytes()


def test_reads_and_switches_are_exclusive(broker: vmmfd.Broker, name: str) -> None:
    put(broker, name, 1)
    lease = broker.get(name)
    array = lease["x"]
    stop, wrong = threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            got = np.frombuffer(array.tobytes(), dtype="f4")
            if not (got == got[0]).all():
                wrong.append(got)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for value in range(3, 23):
        put(broker, name, value)
        lease.switch(lease.prepare()).close()
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong and array.tobytes()[:4] == np.float32(22).tobytes()


def test_new_version_names_are_found(broker: vmmfd.Broker) -> None:
    name = f"lease/{uuid.uuid4().hex}"
    memory = vmmfd._native.Memory(4096, backend="host")
    entries = [(f"a{at}", "uint8", [1], None, 0, at, None) for at in range(20)]
    broker._native.put(name, [("all", [memory], entries, None)])
    lease = broker.get(name)
    assert lease["a7"].address == lease["a0"].address + 7
    broker._native.put(name, [("all", [memory], [("new", "uint8", [1], None, 0, 99, None), *entries[::-1]], None)], replace=True)
    lease.switch(lease.prepare()).close()
    assert lease["a7"].address == lease["a0"].address + 7 and lease["new"].address == lease["a0"].address + 99
    assert next(iter(lease)) == "new"


def test_parts_are_switched_together(broker: vmmfd.Broker) -> None:
    name = f"lease/{uuid.uuid4().hex}"

    def version(value: int) -> None:
        arrays = [vmmfd.asarray(np.full(4, value + part, dtype="u1"), backend="host") for part in range(2)]
        plans = [broker._native.plan([("w", array)], f"rank{part}") for part, array in enumerate(arrays)]
        broker._native.put(name, plans, replace=True)

    version(1)
    lease = broker.get(name)
    zero, one = lease.array("w", "rank0"), lease.array("w", "rank1")
    version(5)
    lease.switch(lease.prepare()).close()
    assert zero.tobytes() == bytes([5] * 4) and one.tobytes() == bytes([6] * 4)
    found = list(lease._native.arrays("rank1"))
    assert [(part, array) for part, array, *_ in found] == [("rank1", "w")]
    assert len(list(lease._native.arrays())) == 2


@pytest.mark.parametrize("how", ["capsule", "memoryview", "__array_interface__"])
def test_parked_memory_is_not_exported(server: Server, child: Callable[..., Child], how: str) -> None:
    """An export that waits for the end of a park must find no memory."""
    exports = {
        "capsule": "view = arrays[0].__dlpack__(max_version=(1, 1))",
        "memoryview": "view = memoryview(arrays[0])",
        # It counts for as long as its array lives.
        "__array_interface__": 'view = lease["x0"]; view.__array_interface__',
    }
    started = child(
        """
        import sys, threading, time
        import numpy as np
        import vmmfd

        sys.setswitchinterval(1e-5)
        broker = vmmfd.connect(sys.argv[1], backend="host")
        broker.put("parked", {f"x{number}": np.ones(1000, "f4") for number in range(50)})
        lease = broker.get("parked")
        arrays = [lease["x0"]]
        over, exported, wrong = [], [0], [0]

        def export():
            while not over:
                try:
                    EXPORT
                except vmmfd.Error:
                    continue
                exported[0] += 1
                wrong[0] += lease.is_parked
                del view
                time.sleep(1e-4)

        threads = [threading.Thread(target=export) for _ in range(3)]
        for thread in threads:
            thread.start()
        parks = 0
        while parks < 30 or exported[0] < 300:
            try:
                lease.park()
            except BufferError:
                continue
            parks += 1
            time.sleep(0.003)
            lease.unpark()
        over.append(True)
        for thread in threads:
            thread.join()
        assert not wrong[0], f"{wrong[0]} of {exported[0]} exports of what was parked"
        """.replace("EXPORT", exports[how]),
        server.path,
    )
    started.end()
