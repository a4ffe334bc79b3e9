"""Threads that use the same objects, with the GIL and in a free-threaded Python."""

from __future__ import annotations

import gc
import json
import os
import pickle
import sysconfig
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import LIMIT, Child, Server

import vmmfd
from vmmfd import _native, _reduce


def at_once(*works: Callable[[], Any]) -> list[Any]:
    """Runs functions at the same time, each in its own thread. Returns their results, or raises the first exception."""
    begin = threading.Barrier(len(works))

    def run(work: Callable[[], Any]) -> Any:
        begin.wait(LIMIT)
        return work()

    with ThreadPoolExecutor(len(works)) as threads:
        return [ran.result() for ran in [threads.submit(run, work) for work in works]]


@pytest.mark.skipif(not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="this Python always has a GIL")
def test_free_threaded_python_keeps_gil_off(child: Callable[..., Child]) -> None:
    code = "import sys, vmmfd, vmmfd.legacy, vmmfd.pool; print(sys._is_gil_enabled())"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHON_GIL"}
    done = child(f"import os, sys; os.execve(sys.executable, [sys.executable, '-W', 'error', '-c', {code!r}], {environment!r})")
    assert done.end().strip() == "False"


# Returns a view of an array, and whether it is writable.


def by_buffer(array: vmmfd.Array) -> tuple[object, bool]:
    view = memoryview(array)
    return view, not view.readonly


def by_dlpack(array: vmmfd.Array) -> tuple[object, bool]:
    view = np.from_dlpack(array)
    return view, view.flags.writeable


def by_interface(array: vmmfd.Array) -> tuple[object, bool]:
    part = array[:]
    return part, not part.__array_interface__["data"][1]


@pytest.mark.parametrize("look", [by_buffer, by_dlpack, by_interface])
def test_no_writable_view_during_seal(look: Callable[[vmmfd.Array], Any]) -> None:
    for _ in range(100):
        array = vmmfd.empty(8, "uint8", backend="host")
        memory = array._memory
        assert memory is not None

        def seal(memory: Any = memory) -> None:
            while True:
                try:
                    return _native.make_read_only(memory)
                except vmmfd.ExportError:
                    time.sleep(0)  # There is a view.

        def see(array: vmmfd.Array = array) -> bool:
            for _ in range(60):
                view, can_be_written = look(array)
                if can_be_written and array.readonly:
                    return False
                if not can_be_written:
                    break
                del view
            return True

        assert at_once(seal, see) == [None, True]
        assert array.readonly


def test_seal_waits_for_copy(child: Callable[..., Child]) -> None:
    # In a child process: a store into read-only memory kills it.
    code = """
    import sys, threading, time
    import numpy as np, vmmfd
    from vmmfd import _native

    def seal():
        while True:
            try:
                return _native.make_read_only(array._memory)
            except vmmfd.ExportError:
                time.sleep(0)

    source = np.full(1 << 20, 7, "u1")
    for number in range(60):
        array = vmmfd.empty(1 << 20, "uint8", backend="host")
        thread = threading.Thread(target=seal)
        thread.start()
        try:
            while True:
                array.copy_from(source)
        except vmmfd.Error as error:
            assert "read-only" in str(error), error
        thread.join()
        # A copy is complete or not started.
        assert array.tobytes() in (bytes(1 << 20), bytes(source)), number
    print("done")
    """
    assert child(code).end().strip() == "done"


class Once:
    """An array of another library that always returns the same capsule, to all threads at the same moment."""

    def __init__(self, array: vmmfd.Array, threads: int) -> None:
        self._capsule = array.__dlpack__(max_version=(1, 0))
        self._device = array.__dlpack_device__()
        self._threads = threading.Barrier(threads)

    def __dlpack__(self, **_: Any) -> Any:
        self._threads.wait(LIMIT)
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


def test_capsule_is_taken_once() -> None:
    source = vmmfd.asarray(np.arange(4), backend="host")
    for _ in range(150):
        once = Once(source, 2)

        def take(once: Once = once) -> bool:
            try:
                return vmmfd.asarray(once, backend="host").tobytes() == source.tobytes()
            except BufferError:
                return False

        assert sorted(at_once(take, take)) == [False, True]
    # It was deleted once: its memory is no longer exported.
    memory = source._memory
    del source, once
    gc.collect()
    assert memory is not None
    _native.make_read_only(memory)


def test_threads_read_and_write_one_array() -> None:
    array = vmmfd.asarray(np.zeros((4, 256), "u4"), backend="host")

    def write(row: int) -> None:
        mine = array[row]
        for number in range(100):
            mine.copy_from(np.full(256, number, "u4"))
            assert (np.frombuffer(mine.tobytes(), "u4") == number).all()
            assert (np.from_dlpack(array)[row] == number).all() and (np.asarray(mine) == number).all()
            assert array.shape == (4, 256) and array.T.shape == (256, 4) and "uint32" in repr(array)

    at_once(*[lambda row=row: write(row) for row in range(4)])
    assert (np.from_dlpack(array) == 99).all()


def test_interface_readers_count_once(broker: vmmfd.Broker, name: str) -> None:
    broker.put(name, {"x": np.arange(4)})
    with broker.get(name) as lease:
        for _ in range(60):
            array = lease["x"]
            seen = at_once(*[lambda array=array: array.__array_interface__["data"]] * 3)
            assert seen == [(array.address, True)] * 3 and lease.exports == 1
            del array
            assert lease.exports == 0


def test_export_prevents_switch(broker: vmmfd.Broker, name: str) -> None:
    for value in (1, 2):
        broker.put(name, {"x": np.full(1024, value)}, replace=True, keep=1)
    with broker.get(name, version=1) as lease:
        other = lease.prepare(version=2)
        read_all: list[None] = []

        def read() -> None:
            try:
                for number in range(400):
                    if number % 2:
                        seen = np.frombuffer(lease["x"].tobytes(), "i8")
                        assert seen[0] in (1, 2) and (seen == seen[0]).all()
                        continue
                    view = np.from_dlpack(lease["x"])
                    first = view.copy()
                    assert lease.exports > 0 and first[0] in (1, 2)
                    assert (first == first[0]).all() and (view == first).all()
                    del view
            finally:
                read_all.append(None)

        def switch() -> int:
            nonlocal other
            count = 0
            while len(read_all) < 2 or count == 0:
                try:
                    other = lease.switch(other)
                    count += 1
                except vmmfd.ExportError:
                    time.sleep(0)
            return count

        *_, count = at_once(read, read, switch)
        assert lease.version == 1 + count % 2 and other.version == 2 - count % 2
        other.close()


def test_export_prevents_park(broker: vmmfd.Broker, name: str) -> None:
    broker.put(name, {"x": np.full(1024, 5)})
    with broker.get(name) as lease:
        array = lease["x"]
        read_all: list[None] = []

        def read() -> tuple[int, int]:
            seen = parked = 0
            try:
                for number in range(300):
                    try:
                        if number % 2:
                            assert set(np.frombuffer(array.tobytes(), "i8")) == {5}
                        else:
                            view = memoryview(array)
                            assert set(view[:8]) == {5} and lease.exports > 0
                            view.release()
                        seen += 1
                    except vmmfd.Invalid as error:
                        assert "parked" in str(error), error
                        parked += 1
            finally:
                read_all.append(None)
            return seen, parked

        def park() -> None:
            done = False
            while len(read_all) < 2 or not done:
                try:
                    lease.park(keep_lease=True)
                except vmmfd.ExportError:
                    time.sleep(0)
                else:
                    lease.unpark()
                    done = True

        *read_, _ = at_once(read, read, park)
        assert all(seen + parked == 300 for seen, parked in read_)
        assert set(np.from_dlpack(array)) == {5}


def test_lease_closed_during_reads(broker: vmmfd.Broker, name: str) -> None:
    broker.put(name, {"x": np.full(64, 3), "y": np.full(64, 4)})
    for _ in range(30):
        lease = broker.get(name)

        def read(lease: vmmfd.Lease = lease) -> None:
            while True:
                try:
                    array = lease["x"]
                    assert lease.name == name and len(lease) == 2 and lease.version == 1
                except vmmfd.Invalid as error:
                    assert "closed" in str(error), error
                    return
                # An array is still valid.
                assert set(np.from_dlpack(array)) == {3} and repr(lease)

        at_once(read, read, lease.close, lease.close)
        assert lease.is_closed and not lease.is_held
    del lease
    end = time.monotonic() + LIMIT
    while broker.who(name).leases and time.monotonic() < end:
        time.sleep(0.01)
    assert broker.who(name).leases == ()


def test_prepared_version_is_used_once(broker: vmmfd.Broker, name: str) -> None:
    for value in (1, 2):
        broker.put(name, {"x": np.full(8, value)}, replace=True, keep=1)
    for _ in range(20):
        with broker.get(name, version=1) as lease, lease.prepare(version=2) as prepared:

            def switch(lease: vmmfd.Lease = lease, prepared: vmmfd.Prepared = prepared) -> bool:
                try:
                    lease.switch(prepared).close()
                except vmmfd.Invalid:
                    return False
                return True

            assert sorted(at_once(switch, switch, switch)) == [False, False, True]
            assert lease.version == 2 and prepared.is_closed and lease["x"].tobytes() == np.full(8, 2).tobytes()


def test_broker_closed_during_calls(socket: str, name: str) -> None:
    for number in range(10):
        broker = vmmfd.connect(socket, backend="host")
        under_way = threading.Barrier(4)

        def use(which: int, broker: vmmfd.Broker = broker, under_way: threading.Barrier = under_way) -> None:
            mine = f"{name}/{which}"
            turn = 0
            while True:
                try:
                    broker.put(mine, {"x": np.full(16, turn)}, replace=True)
                    lease = broker.get(mine)
                    broker.list(name)
                    broker.stat(mine)
                except vmmfd.Interrupted:
                    assert turn > 0
                    return
                assert set(np.from_dlpack(lease["x"])) == {turn}
                if turn == 0:
                    under_way.wait(LIMIT)
                turn += 1

        def wait(broker: vmmfd.Broker = broker, under_way: threading.Barrier = under_way) -> None:
            with broker.watch(name + "/none") as watch:
                under_way.wait(LIMIT)
                with pytest.raises((vmmfd.Interrupted, vmmfd.Invalid)):
                    watch.next()

        def close(broker: vmmfd.Broker = broker, under_way: threading.Barrier = under_way) -> None:
            under_way.wait(LIMIT)
            broker.close()

        at_once(lambda: use(1), lambda: use(2), wait, close)
        assert broker.is_closed, number


def test_handlers_survive_garbage_collection(tmp_path: Path, server: Server) -> None:
    broker = vmmfd.connect(server.path, backend="host", timeout=2)
    broker.put("x", {"x": np.zeros(4)})
    lease = broker.get("x")
    called: set[int] = set()

    def handler(number: int) -> Callable[[object], None]:
        return lambda _: called.add(number)

    def add(first: int) -> None:
        for number in range(first, first + 50):
            broker.on_lost(handler(number))

    def collect() -> None:
        for _ in range(30):
            gc.collect()

    at_once(lambda: add(0), lambda: add(50), collect)
    server.kill()
    end = time.monotonic() + LIMIT
    while len(called) < 100 and time.monotonic() < end:
        gc.collect()
    assert called == set(range(100))
    assert not lease.is_held
    broker.close()


def test_received_arrays_share_a_connection(
    broker: vmmfd.Broker, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    vmmfd.register_reducer()
    broker.put(name, {"x": np.arange(32)})
    made: list[vmmfd.Broker] = []

    def connect(*arguments: Any, **options: Any) -> vmmfd.Broker:
        one = vmmfd.connect(*arguments, **options)
        made.append(one)
        return one

    monkeypatch.setattr(_reduce, "connect", connect)
    with broker.get(name) as lease:
        sent = bytes(ForkingPickler.dumps(lease["x"]))
        for _ in range(20):
            monkeypatch.setattr(_reduce, "_brokers", {})
            arrays = at_once(*[lambda: pickle.loads(sent)] * 4)
            assert all(np.array_equal(np.from_dlpack(array), np.arange(32)) for array in arrays)
            assert [one for one in made if not one.is_closed] == list(_reduce._brokers.values())
            del arrays
            for one in made:
                one.close()
            made.clear()


def test_threads_load_weights(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = {f"layer.{number}": np.full((64, 64), number, "f4") for number in range(20)}
    size = 64 * 64 * 4
    header = json.dumps(
        {
            name: {"dtype": "F32", "shape": [64, 64], "data_offsets": [size * number, size * (number + 1)]}
            for number, name in enumerate(tensors)
        }
    ).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"".join(map(bytes, tensors.values())))
    loaded = at_once(*[lambda: vmmfd.load_safetensors(path, backend="host", digest=True, threads=2)] * 3)
    assert len({weights.digest for weights in loaded}) == 1

    def read() -> None:
        for name in loaded[0]:
            assert (np.from_dlpack(loaded[0][name]) == tensors[name]).all()

    at_once(read, read, read)


@pytest.mark.fake
def test_threads_drop_device_memory() -> None:
    def make() -> None:
        for number in range(200):
            array = vmmfd.empty(1 << 16, "uint8", backend="cuda")
            array.copy_from(np.full(1 << 16, number % 256, "u1"))
            assert set(array[:16].tobytes()) == {number % 256}

    at_once(make, make, make)
    assert _native._settle(LIMIT)
