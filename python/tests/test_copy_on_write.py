"""Leases with private copies of written pages."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
from conftest import Child

import vmmfd

np = pytest.importorskip("numpy", reason="NumPy is not installed")

# Larger than a page.
COUNT = 10_000


def read(broker: vmmfd.Broker, name: str) -> float:
    """Returns the value that all elements have for other readers."""
    with broker.get(name) as lease:
        [value] = set(np.from_dlpack(lease["x"]).tolist())
        return float(value)


@pytest.fixture(params=["sealed", "shared"])
def put(request: pytest.FixtureRequest, broker: vmmfd.Broker, name: str) -> Callable[[float], None]:
    """Puts a version whose memory is sealed by the kernel, or still writable by its maker."""

    def put(value: float) -> None:
        x = np.full(COUNT, float(value))
        array = x if request.param == "sealed" else vmmfd.asarray(x, backend="host")
        broker.put(name, {"x": array}, replace=True)

    return put


def test_writes_are_private_to_the_lease(broker: vmmfd.Broker, name: str, put: Callable[[float], None]) -> None:
    put(1)
    with broker.get(name, copy_on_write=True) as lease, broker.get_all([name], copy_on_write=True)[0] as other:
        assert not lease["x"].readonly
        x = np.from_dlpack(lease["x"])
        x[::2] = 5
        lease["x"][1::2].copy_from(np.full(COUNT // 2, 5.0))
        assert x.tolist() == [5.0] * COUNT == np.frombuffer(lease["x"].tobytes()).tolist()
        assert np.from_dlpack(other["x"]).tolist() == [1.0] * COUNT and read(broker, name) == 1
        # A put copies the private pages.
        broker.put(f"{name}.mine", {"x": lease["x"]})
        assert read(broker, f"{name}.mine") == 5
        found = broker.claim(name, copy_on_write=True)
        assert isinstance(found, vmmfd.Lease) and not found["x"].readonly
        found.close()
        assert broker.get(name)["x"].readonly


def test_switch_discards_writes(broker: vmmfd.Broker, name: str, put: Callable[[float], None]) -> None:
    put(1)
    lease = broker.get(name, copy_on_write=True)
    x = np.from_dlpack(lease["x"])
    x[:] = 5
    put(2)
    old = lease.switch(lease.prepare(), exports_unused=True)
    assert x.tolist() == [2.0] * COUNT
    x[:] = 6
    lease.switch(old, exports_unused=True).close()
    assert x.tolist() == [1.0] * COUNT
    x[:] = 7
    lease.park(exports_unused=True)
    lease.unpark(version="newest")
    assert x.tolist() == [2.0] * COUNT
    x[:] = 8
    assert read(broker, name) == 2


def test_written_pages_are_not_pickled(broker: vmmfd.Broker, name: str) -> None:
    broker.put(name, {"x": np.ones(3)})
    vmmfd.register_reducer()
    with broker.get(name, copy_on_write=True) as lease:
        for sent in (lease, lease["x"]):
            with pytest.raises(vmmfd.Invalid, match="with copy_on_write, and its private writes would not be sent"):
                ForkingPickler.dumps(sent)


def test_write_to_read_only_lease_crashes(
    broker: vmmfd.Broker, socket: str, name: str, child: Callable[..., Child], tmp_path: Path
) -> None:
    broker.put(name, {"x": np.ones(3)})
    program = """
        import ctypes, sys, vmmfd
        lease = vmmfd.connect(sys.argv[1], backend="host").get(sys.argv[2], copy_on_write=bool(sys.argv[3]))
        x = lease["x"].writable(never_written=True).__array_interface__["data"][0]
        ctypes.c_double.from_address(x).value = 5
        print(lease["x"].tobytes()[:8] == bytes(ctypes.c_double(5)))
        """
    assert child(program, socket, name, "yes").end() == "True\n"
    assert child(program, socket, name, "").end(-11) == ""
    assert read(broker, name) == 1


@pytest.mark.parametrize("driver", [pytest.param("fake", marks=pytest.mark.fake), pytest.param("cuda", marks=pytest.mark.cuda)])
def test_gpu_refuses_copy_on_write(socket: str, name: str, driver: str) -> None:
    with vmmfd.connect(socket, backend="cuda", timeout=20) as broker:
        broker.put(name, {"x": np.ones(3, dtype="f4")})
        with pytest.raises(vmmfd.Unsupported, match="does not support copy-on-write mappings, as CUDA has none: copy what is"):
            broker.get(name, copy_on_write=True)
        assert vmmfd._native._settle(10)
        assert len(broker.who(name).leases) == 0
        assert broker.get(name)["x"].readonly
        broker.delete(name)
