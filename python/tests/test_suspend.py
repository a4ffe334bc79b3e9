"""`Broker.suspend` and `Broker.resume`: a process without memory of other processes."""

from __future__ import annotations

import os
import pickle
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import Child, Server, command

import vmmfd
import vmmfd.legacy

DRIVERS = [pytest.param("fake", marks=pytest.mark.fake), pytest.param("cuda", marks=pytest.mark.cuda)]

START = """
import sys
import numpy as np
import vmmfd
broker = vmmfd.connect(sys.argv[1], backend=sys.argv[2])

def refused(*words, **options):
    try:
        broker.suspend(**options)
    except vmmfd.Invalid as error:
        for word in ("this process can't be suspended", *words):
            assert word in str(error), (word, str(error))
    else:
        raise AssertionError("it was suspended")

def put(name, value):
    parts = {key: vmmfd.asarray(np.full(1000, value + at, "f8"), backend=sys.argv[2]) for at, key in enumerate("ab")}
    broker.put(name, parts, replace=True)
"""


def test_all_leases_are_parked(socket: str, child: Callable[..., Child], name: str) -> None:
    code = """
    name = sys.argv[3]
    put(name, 1)
    kept = broker.get(name, arrays=["b"])["b"]
    with broker.get(name, arrays=["b"]) as found:
        [(start, memory)] = found.pieces()
        part = broker._native.shared(name, 1, found.id, "all", start, memory.nbytes).array("b")
    assert start > 0
    del memory
    other = vmmfd.connect(sys.argv[1], backend="host")
    lease = other.get(name)
    private = broker.get(name, copy_on_write=True)
    private["a"].fill(7)
    parked = broker.get(name)
    parked.park()
    array = lease["a"].numpy()
    refused("other libraries hold exports of version 1", name, "exports_unused=True")
    assert not lease.is_parked and kept.tobytes() == part.tobytes()
    broker.suspend(exports_unused=True)
    assert lease.is_parked and not private.is_parked and private["a"].numpy()[0] == 7
    for unreadable in (kept, part):
        try:
            unreadable.tobytes()
        except vmmfd.Invalid as error:
            assert "parked" in str(error)
        else:
            raise AssertionError("it has memory")
    broker.suspend()
    broker.resume()
    broker.resume()
    assert array[0] == 1 and [np.frombuffer(of.tobytes())[0] for of in (kept, part)] == [2, 2]
    assert parked.is_parked and private["a"].numpy()[0] == 7
    broker.delete(name)
    """
    child(START + code.replace("\n    ", "\n"), socket, "host", name).end()


def test_resume_takes_newest_version(socket: str, child: Callable[..., Child], name: str) -> None:
    code = """
    from threading import Semaphore
    name = sys.argv[3]
    put(name, 1)
    put(name + "/kept", 1)
    lease, kept = broker.get(name), broker.get(name + "/kept")
    recalled = Semaphore(0)
    lease.on_recall(lambda of: recalled.release())
    broker.suspend()
    put(name, 5)
    try:
        broker.resume()
    except vmmfd.NotFound as error:
        assert name in str(error)
    else:
        raise AssertionError("the version is gone")
    assert lease.is_parked and not kept.is_parked and kept["a"].numpy()[0] == 1
    broker.resume(newest=True)
    assert lease.version == 2 and lease["a"].numpy()[0] == 5
    broker.recall(name, wait=0)
    assert recalled.acquire(timeout=60) and not recalled.acquire(timeout=0.1)
    broker.suspend(keep_lease=True)
    put(name, 9)
    broker.resume()
    assert lease.version == 2 and lease["a"].numpy()[0] == 5
    broker.delete(name), broker.delete(name + "/kept")
    """
    child(START + code.replace("\n    ", "\n"), socket, "host", name).end()


def test_other_brokers_are_named(socket: str, server: Server, child: Callable[..., Child], name: str) -> None:
    code = """
    name = sys.argv[3]
    put(name, 1)
    own = broker.get(name)
    other = vmmfd.connect(sys.argv[4], backend="host")
    other.put("there", {"x": np.zeros(4)})
    lease = other.get("there")
    refused('version 1 of "there" is leased from the broker at', sys.argv[4])
    assert not own.is_parked
    lease.park()
    broker.suspend()
    assert own.is_parked
    """
    child(START + code.replace("\n    ", "\n"), socket, "host", name, server.path).end()


@pytest.mark.fake
def test_failed_suspend_is_undone(server: Server, child: Callable[..., Child]) -> None:
    code = """
    put("one", 1), put("two", 2)
    leases = [broker.get(name) for name in ("one", "two")]
    try:
        broker.suspend()
    except vmmfd.Error as error:
        assert "cuMemUnmap failed" in str(error) and not isinstance(error, vmmfd.Invalid), error
    else:
        raise AssertionError("the second lease is mapped")
    assert [np.frombuffer(lease["a"].tobytes())[0] for lease in leases] == [1, 2]
    assert all(lease.is_held for lease in leases)
    """
    # The four arrays are unmapped once they are put, then the first lease.
    child(START + code.replace("\n    ", "\n"), server.path, "cuda", env={"FAKECUDA_FAIL": "cuMemUnmap:6:999"}).end()


HOLDS = """
import pickle
import vmmfd.legacy
lease = broker.get("weights")
address = lease["a"].address
refused_memory = vmmfd.empty(10, "uint8")
refused("allocations of vmmfd.empty", "(1)", "own_copies=True")
assert not lease.is_parked
del refused_memory
legacy = vmmfd.legacy.open_ipc_array(*pickle.loads(bytes.fromhex(sys.argv[3])))
taken = vmmfd.take(sys.argv[4], wait=60)
refused("arrays of vmmfd.take (1), opened legacy handles (1): drop or close them")
assert not lease.is_parked
legacy.close()
del taken
own = vmmfd.asarray(np.arange(10), backend="cuda")
broker.put("own", {"x": own})
refused("allocations of vmmfd.empty", own_copies=False)
broker.suspend(own_copies=True)
assert lease.is_parked
broker.resume()
del own
broker.suspend()
print("ready", flush=True)
sys.stdin.readline()
broker.resume()
assert lease["a"].address == address and np.frombuffer(lease["a"].tobytes(), "f8")[999] == 3
lease.close()
"""


@pytest.mark.parametrize("driver", DRIVERS)
def test_suspended_process_gets_memory_back(driver: str, server: Server, tmp_path: Path, child: Callable[..., Child]) -> None:
    (tmp_path / "states").mkdir()
    env = {"FAKECUDA_CHECKPOINTS": str(tmp_path / "states")} if driver == "fake" else {}
    with vmmfd.connect(server.path, backend="cuda") as broker:
        broker.put("weights", {"a": vmmfd.asarray(np.full(1000, 3.0), backend="cuda")})
    legacy = vmmfd.legacy.empty(10, "int32")
    handle = vmmfd.legacy.get_ipc_handle(legacy)
    served = tmp_path / "served.sock"
    maker = child('import sys, vmmfd; vmmfd.serve(sys.argv[1], vmmfd.empty(4, "uint8", backend="cuda"))', str(served))
    sent = pickle.dumps((handle.handle, handle.shape, handle.dtype, handle.strides, handle.offset)).hex()
    holder = child(START + HOLDS, server.path, "cuda", sent, str(served), env=env)
    holder.wait_for()
    maker.end()

    def run(verb: str) -> str:
        ran = subprocess.run(
            [*command(), verb, str(holder.pid)], capture_output=True, text=True, timeout=120, env={**os.environ, **env}
        )
        assert ran.returncode == 0, ran
        return ran.stdout

    assert f"{holder.pid}" in run("suspend")
    run("resume")
    holder.send_line()
    holder.end()
