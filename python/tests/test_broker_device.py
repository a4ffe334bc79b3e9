"""The broker client with GPU memory: on the emulated driver, and on a GPU."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import Child, Server
from test_exit import ENDS
from test_manners import BEGIN

import vmmfd

pytestmark = pytest.mark.parametrize(
    "driver", [pytest.param("fake", marks=pytest.mark.fake), pytest.param("cuda", marks=pytest.mark.cuda)]
)

ON_DEVICE = BEGIN.replace('backend="host"', 'backend="cuda"')


@pytest.fixture
def broker(socket: str) -> Any:
    with vmmfd.connect(socket, backend="cuda", timeout=20) as broker:
        yield broker


def values(number: float, count: int = 1000) -> np.ndarray:
    return np.arange(count, dtype="f4") + number


def test_put_and_get_on_device(broker: vmmfd.Broker, name: str, child: Callable[..., Child], driver: str) -> None:
    broker.put(name, {"x": values(1).reshape(10, 100), "b": np.ones(3, dtype="?")}, metadata={"a": 1})
    lease = broker.get(name, device=0)
    x = lease["x"]
    assert x.device.uuid == vmmfd.device_uuid(0) and x.readonly and x.shape == (10, 100) and lease.parts[0].device == x.device.uuid
    assert x.tobytes() == values(1).tobytes() and x[3, ::7].tobytes() == values(1).reshape(10, 100)[3, ::7].tobytes()
    assert x.__dlpack_device__() == (2, 0) and broker.stat(name).summary.backend == "cuda"
    assert not broker._native.stat(name)["parts"][0]["memory"]["immutable"]
    code = 'lease = broker.get(sys.argv[2], device=vmmfd.device_uuid(0))\nassert lease["x"].tobytes() == (np.arange(1000, dtype="f4") + 1).tobytes()'
    child(ON_DEVICE + code, broker.path, name).end()


def test_own_memory_is_not_copied(broker: vmmfd.Broker, name: str, driver: str) -> None:
    mine = vmmfd.asarray(values(5), backend="cuda")
    broker.put(name, {"mine": mine, "last": mine[-3:]}, copy=False)
    lease = broker.get(name)
    assert lease["last"].tobytes() == values(5)[-3:].tobytes()
    mine.copy_from(values(6))
    assert lease["mine"].tobytes() == values(6).tobytes()
    del mine
    assert lease["mine"].tobytes() == values(6).tobytes()


def test_sealed_memory_is_read_only_here(broker: vmmfd.Broker, name: str, driver: str) -> None:
    mine = vmmfd.asarray(values(5), backend="cuda")
    broker.put(name, {"x": mine}, seal=True)
    assert mine.readonly and mine.tobytes() == values(5).tobytes()
    with pytest.raises(vmmfd.Error):
        mine.copy_from(values(6))
    assert broker.get(name)["x"].tobytes() == values(5).tobytes()


def test_switch_and_park_keep_addresses(broker: vmmfd.Broker, name: str, driver: str) -> None:
    broker.put(name, {"x": values(1)})
    lease = broker.get(name)
    array, address = lease["x"], lease["x"].address
    broker.put(name, {"x": values(2)}, replace=True)
    capsule = array.__dlpack__(max_version=(1, 0))
    prepared = lease.prepare()
    with pytest.raises(BufferError, match="exports_unused"):
        lease.switch(prepared)
    old = lease.switch(prepared, exports_unused=True)
    assert array.tobytes() == values(2).tobytes() and lease["x"].address == address
    del capsule
    gc.collect()
    deadline = time.monotonic() + 60
    while lease.exports and time.monotonic() < deadline:
        time.sleep(0.01)
    lease.switch(old).close()
    assert array.tobytes() == values(1).tobytes()
    lease.park()
    with pytest.raises(vmmfd.Error, match="parked"):
        array.tobytes()
    lease.unpark(version="newest")
    assert (lease.version, array.address) == (2, address) and array.tobytes() == values(2).tobytes()
    lease.close()
    assert array.tobytes() == values(2).tobytes()


def test_host_objects_need_host_backend(socket: str, broker: vmmfd.Broker, name: str, driver: str) -> None:
    with vmmfd.connect(socket, backend="host") as host:
        host.put(name, {"x": values(3)})
    with pytest.raises(vmmfd.Unsupported, match="on backend host, and this process uses cuda") as caught:
        broker.get(name)
    assert "use the backend of the memory" in caught.value.hint
    with vmmfd.connect(socket) as auto:
        assert np.from_dlpack(auto.get(name)["x"])[0] == 3
        auto.put(name + "/auto", {"x": values(4)})
        assert auto.stat(name + "/auto").summary.backend == "cuda"
    # Memory that is already shared decides the backend.
    with vmmfd.connect(socket) as auto:
        auto.put(name + "/mixed", {"x": vmmfd.empty(4, "uint8", backend="host"), "y": values(4)})
        assert auto.stat(name + "/mixed").summary.backend == "host"
    with pytest.raises(vmmfd.NotFound, match="there is no cuda device"):
        broker.get(name, device="GPU-00000000-0000-0000-0000-000000000000")


def test_two_devices_need_two_parts(server: Server, child: Callable[..., Child], driver: str) -> None:
    if len(vmmfd.devices()) < 2 and driver == "cuda":
        pytest.skip("this machine has one GPU")
    child(
        ON_DEVICE
        + """
arrays = {f"on{device}": vmmfd.asarray(np.full(4, device, dtype="u1"), device=device) for device in (0, 1)}
try:
    broker.put("both", arrays)
    raise SystemExit("it was put")
except vmmfd.Invalid as error:
    assert "put one part per device" in str(error), error
def half(device):
    broker.put("both", {"x": arrays[f"on{device}"]}, part=f"rank{device}", parts=["rank0", "rank1"], group="g", wait=30)
thread = threading.Thread(target=half, args=(0,))
thread.start()
half(1)
thread.join()
lease = broker.get("both")
assert [lease.array("x", f"rank{rank}").tobytes() for rank in (0, 1)] == [bytes(4), bytes([1] * 4)]
assert len({part.device for part in lease.parts}) == 2
lease.close()
broker.put("copied", {"x": np.ones(3)}, device=1)
assert broker.get("copied")["x"].device.ordinal == 1
""",
        server.path,
        env={"FAKECUDA_DEVICES": "2"} if driver == "fake" else None,
    ).end()


@pytest.mark.parametrize("end", ENDS)
def test_objects_alive_at_exit(server: Server, child: Callable[..., Child], end: str, driver: str) -> None:
    # NumPy cannot access the memory: hold DLPack capsules instead.
    code = ENDS[end].replace("np.from_dlpack(array)", "array.__dlpack__(max_version=(1, 0))")
    code = code.replace("np.from_dlpack(held)", "held.__dlpack__(max_version=(1, 0))")
    code = code.replace("np.from_dlpack(one['x']).sum()", "one['x'].__dlpack__(max_version=(1, 0))")
    code = code.replace("view.sum()", "array.tobytes()" if "del broker, lease, array" not in code else "None")
    code = code.replace("assert (view == 1).all() and ", "assert ")
    child(ON_DEVICE + code, server.path).end()
    with vmmfd.connect(server.path, backend="host") as broker:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and broker.who().leases:
            time.sleep(0.01)
        assert not broker.who().leases


def test_fork_leaves_parent_unaffected(server: Server, child: Callable[..., Child], driver: str) -> None:
    started = child(
        ON_DEVICE
        + """
put("there")
lease = broker.get("there")
array = lease["x"]
capsule = array.__dlpack__(max_version=(1, 0))
put("there", 2.0, replace=True)
prepared = lease.prepare()
import warnings
warnings.simplefilter("ignore", DeprecationWarning)  # Of Python 3.12: a fork where there are several threads.
pid = os.fork()
if pid == 0:
    for use in (lambda: lease["x"], array.tobytes, lambda: broker.get("there"), lambda: vmmfd.empty(4, "uint8", backend="cuda")):
        try:
            use()
            os._exit(1)
        except vmmfd.Error as error:
            assert "fork" in str(error), error
    lease.close()
    prepared.close()
    del lease, array, capsule, prepared, broker
    sys.exit(0)
_, status = os.waitpid(pid, 0)
assert status == 0, status
assert lease.is_held and array.tobytes()[:4] == np.float32(1).tobytes()
del capsule
lease.switch(prepared, exports_unused=True).close()
assert array.tobytes()[:4] == np.float32(2).tobytes()
""",
        server.path,
    )
    started.end()
