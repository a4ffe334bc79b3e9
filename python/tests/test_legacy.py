"""Legacy handles as in Numba, pools as in cuda.core: on the emulated driver, and on a GPU."""

from __future__ import annotations

import gc
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vmmfd
import vmmfd.legacy
import vmmfd.pool

from conftest import PYTHON

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_host_refuses_pools_and_handles() -> None:
    with pytest.raises(vmmfd.Unsupported):
        vmmfd.legacy.empty(4, "float32", backend="host")
    with pytest.raises(vmmfd.Unsupported):
        vmmfd.legacy.open_ipc_array(bytes(64), 4, "float32", backend="host")
    with pytest.raises(vmmfd.Unsupported):
        vmmfd.pool.Pool(backend="host")
    with pytest.raises(vmmfd.Invalid, match="max_size"):
        vmmfd.pool.Pool(max_size=0, backend="host")
    with pytest.raises(vmmfd.Invalid, match="64 bytes"):
        vmmfd.legacy.open_ipc_array(b"short", 4, "float32", backend="host")
    with pytest.raises(vmmfd.Invalid, match="vmmfd.legacy.empty"):
        vmmfd.legacy.get_ipc_handle(vmmfd.empty(4, "float32", backend="host"))


OPENS = """
import pickle, sys, numpy as np, vmmfd, vmmfd.legacy
handle = pickle.loads(bytes.fromhex(sys.argv[1]))
with handle as array:
    assert (array.shape, array.dtype, array.is_mapped, array.readonly) == ((2, 5), "int32", True, False), array
    assert np.frombuffer(array.tobytes(), "i4").tolist() == [20, 22, 24, 26, 28, 30, 32, 34, 36, 38]
    array.copy_from(np.full((2, 5), 7, "i4"))
    tensor = array.__dlpack__()
    try:
        handle.close()
    except BufferError as error:
        assert "1 views of the array" in str(error), error
    else:
        raise AssertionError("closed under a tensor")
    del tensor
    array.__cuda_array_interface__
for refused in (array.tobytes, array.__dlpack__, lambda: array.address):
    try:
        refused()
    except vmmfd.Error as error:
        assert "closed" in str(error), error
    else:
        raise AssertionError("closed, and there")
handle.close()
opened = vmmfd.legacy.open_ipc_array(handle.handle, 30, "int32")
assert np.frombuffer(opened.array.tobytes(), "i4")[20] == 7
kept = opened.array.__dlpack__()
opened.close(exports_unused=True)
opened.close()
for shape, offset in ((10**9, 0), (1, 1 << 40)):
    try:
        vmmfd.legacy.open_ipc_array(handle.handle, shape, "int32", offset=offset)
    except ValueError as error:
        pass
    else:
        raise AssertionError("outside of the memory")
"""


@pytest.mark.parametrize("driver", [pytest.param("fake", marks=pytest.mark.fake), pytest.param("cuda", marks=pytest.mark.cuda)])
def test_handle_opens_in_another_process(child: Any, driver: str) -> None:
    array = vmmfd.legacy.empty((3, 10), "int32")
    array.copy_from(np.arange(30, dtype="i4").reshape(3, 10))
    handle = vmmfd.legacy.get_ipc_handle(array[2, ::2])
    assert (handle.shape, handle.dtype, handle.offset, len(handle.handle)) == ((5,), "int32", 80, 64)
    whole = vmmfd.legacy.empty(60, "int32")
    whole.copy_from(np.arange(60, dtype="i4"))
    view = whole[20:40].reinterpret("int32", (2, 10))[:, ::2]
    child(OPENS, pickle.dumps(vmmfd.legacy.get_ipc_handle(view)).hex()).end()
    assert np.frombuffer(view.tobytes(), "i4").tolist() == [7] * 10
    with pytest.raises(vmmfd.Invalid, match="the process that created it"):
        vmmfd.legacy.get_ipc_handle(view).open()
    with pytest.raises(vmmfd.Error):
        vmmfd.legacy.open_ipc_array(bytes(64), 4, "float32")


@pytest.mark.parametrize("driver", [pytest.param("fake", marks=pytest.mark.fake), pytest.param("cuda", marks=pytest.mark.cuda)])
def test_pool_size_is_limited(driver: str) -> None:
    from vmmfd import _native

    with vmmfd.pool.Pool(max_size=1 << 20) as pool:
        assert (pool.max_size, pool.used, pool.is_mapped) == (1 << 20, 0, False)
        array = pool.empty((4, 1000), "float32")
        array.copy_from(np.ones((4, 1000), "f4"))
        assert pool.used == 16000 and not array.is_mapped and array.device == pool.device
        with pytest.raises(vmmfd.OutOfMemory, match="at most 1048576"):
            pool.empty(1 << 20, "uint8")
        del array
        gc.collect()
        assert _native._settle(10) and pool.used == 0
        kept = pool.empty(1 << 20, "uint8")
    with pytest.raises(vmmfd.Invalid, match="closed"):
        pool.empty(1, "uint8")
    kept.copy_from(np.zeros(1 << 20, "u1"))


@pytest.mark.parametrize("driver", [pytest.param("fake", marks=pytest.mark.fake), pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("name", ["numba_ipc.py", "pool_parent_child.py"])
def test_examples_run(driver: str, name: str) -> None:
    if not EXAMPLES.exists():
        pytest.skip("the examples are not beside the tests")
    ran = subprocess.run([*PYTHON, EXAMPLES / name, "--elements", "1000"], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran
    assert "first five" in ran.stdout, ran


@pytest.mark.parametrize("name", ["numba_ipc.py", "pool_parent_child.py"])
def test_examples_skip_without_gpu(name: str) -> None:
    if not EXAMPLES.exists():
        pytest.skip("the examples are not beside the tests")
    ran = subprocess.run(
        [*PYTHON, EXAMPLES / name], capture_output=True, text=True, timeout=60, env={"PATH": "/usr/bin:/bin", "VMMFD_BACKEND": "host"}
    )
    assert ran.returncode == 0 and "not run" in ran.stdout, ran


@pytest.mark.cuda
def test_numba_opens_our_handle(child: Any) -> None:
    pytest.importorskip("numba.cuda")
    array = vmmfd.legacy.empty(10, "float32")
    array.copy_from(np.arange(10, dtype="f4"))
    handle = vmmfd.legacy.get_ipc_handle(array)
    child(
        """
        import sys, numpy as np
        from numba import cuda
        with cuda.open_ipc_array(bytes.fromhex(sys.argv[1]), (10,), np.float32, offset=int(sys.argv[2])) as view:
            assert view.copy_to_host().tolist() == list(range(10))
            view.copy_to_device(np.full(10, 5, "f4"))
            cuda.synchronize()
        """,
        handle.handle.hex(),
        str(handle.offset),
    ).end(expected=0)
    assert np.frombuffer(array.tobytes(), "f4").tolist() == [5] * 10


@pytest.mark.cuda
def test_cupy_handle_opens(child: Any) -> None:
    cupy = pytest.importorskip("cupy")
    runtime, size = cupy.cuda.runtime, 2 << 20
    # From the runtime: blocks of CuPy's pool hold other arrays too.
    block = runtime.malloc(size)
    try:
        memory = cupy.cuda.UnownedMemory(block, size, None, cupy.cuda.Device().id)
        numbers = cupy.ndarray((size // 4,), cupy.float32, cupy.cuda.MemoryPointer(memory, 0))
        numbers[:] = cupy.arange(size // 4, dtype="f4")
        cupy.cuda.Device().synchronize()
        child(
            """
            import sys, numpy as np, vmmfd.legacy
            with vmmfd.legacy.open_ipc_array(bytes.fromhex(sys.argv[1]), 10, "float32", offset=40) as array:
                assert np.frombuffer(array.tobytes(), "f4").tolist() == list(range(10, 20))
                array.copy_from(np.full(10, 5, "f4"))
            """,
            runtime.ipcGetMemHandle(block).hex(),
        ).end(expected=0)
        assert cupy.asnumpy(numbers[9:21]).tolist() == [9] + [5] * 10 + [20]
    finally:
        runtime.free(block)
