"""Memory that its creator makes read-only for itself after a put."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from conftest import Child

import vmmfd
from vmmfd import _native

np = pytest.importorskip("numpy", reason="NumPy is not installed")


def memory_of(array: vmmfd.Array) -> Any:
    memory = array._memory
    assert memory is not None
    return memory


VIEWS: dict[str, Callable[[vmmfd.Array], Any]] = {
    "dlpack": np.from_dlpack,
    "buffer": lambda array: np.frombuffer(array, "f4"),
    "memoryview": memoryview,
    "interface": np.asarray,
}


@pytest.mark.parametrize("kind", list(VIEWS))
def test_writable_views_prevent_seal(broker: vmmfd.Broker, kind: str) -> None:
    name = f"seal.{kind}"
    array = vmmfd.empty(8, "float32", backend="host")
    array.copy_from(np.arange(8, dtype="f4"))
    view = VIEWS[kind](array[2:])
    with pytest.raises(vmmfd.ExportError, match="1 writable views of the memory"):
        broker.put(name, {"x": array}, seal=True)
    # Nothing was put, and the view still works.
    assert broker.list(name) == []
    np.asarray(view)[0] = 9
    del view
    broker.put(name, {"x": array}, seal=True)
    assert array.readonly and array.tobytes() == np.array([0, 1, 9, 3, 4, 5, 6, 7], "f4").tobytes()
    with pytest.raises(vmmfd.Error, match="read-only"):
        array.copy_from(np.zeros(8, "f4"))
    # Later exports are read-only.
    assert not np.from_dlpack(array).flags.writeable and memoryview(array).readonly
    # Sealing again does nothing, even with views.
    seen = np.from_dlpack(array)
    broker.put(name, {"x": array}, seal=True, replace=True)
    assert seen[2] == 9


def test_promise_allows_seal_with_view(broker: vmmfd.Broker) -> None:
    array = vmmfd.empty(8, "float32", backend="host")
    view = np.from_dlpack(array)
    view[:] = 5
    broker.put("seal.promised", {"x": array}, seal=True, exports_unused=True)
    assert array.readonly and view[7] == 5
    with pytest.raises(TypeError, match="give True or False"):
        broker.put("seal.promised", {"x": array}, seal=True, exports_unused="yes", replace=True)  # type: ignore[arg-type]


def test_make_read_only_without_put() -> None:
    array = vmmfd.empty(8, "uint8", backend="host")
    view = memoryview(array)
    with pytest.raises(vmmfd.ExportError):
        _native.check_read_only([memory_of(array)])
    with pytest.raises(vmmfd.ExportError):
        _native.make_read_only(memory_of(array))
    assert not array.readonly
    view.release()
    _native.check_read_only([memory_of(array)])
    _native.make_read_only(memory_of(array))
    assert array.readonly
    with pytest.raises(vmmfd.Error, match="read-only"):
        array.copy_from(b"12345678")


def test_write_by_address_faults(child: Callable[..., Child]) -> None:
    one = child(
        """
        import ctypes, vmmfd
        from vmmfd import _native
        array = vmmfd.empty(8, "uint8", backend="host")
        ctypes.memset(array.address, 1, 8)
        _native.make_read_only(array._memory)
        print("ready", flush=True)
        ctypes.memset(array.address, 2, 8)
        """
    )
    one.wait_for("ready")
    one.process.communicate(timeout=60)
    assert one.process.returncode == -11
