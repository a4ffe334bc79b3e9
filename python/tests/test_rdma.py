"""The option `rdma`: memory that network cards can reach, where the device supports it."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import Child

import vmmfd
from vmmfd import _native

MIB = 1 << 20


def flagged(array: vmmfd.Array) -> bool:
    """Returns whether the driver reported that RDMA can reach an array's memory."""
    assert array._memory is not None
    return array._memory.rdma


def safetensors(folder: Path) -> Path:
    header = b'{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'
    path = folder / "w.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"data")
    return path


@pytest.fixture
def on_device(socket: str) -> Any:
    with vmmfd.connect(socket, backend="cuda") as broker:
        yield broker


@pytest.mark.parametrize("rdma", ["auto", False])
def test_host_memory_never_has_flag(broker: vmmfd.Broker, name: str, tmp_path: Path, rdma: Any) -> None:
    assert not flagged(vmmfd.empty(3, "u1", backend="host", rdma=rdma))
    weights = vmmfd.load_safetensors(safetensors(tmp_path), backend="host", rdma=rdma)
    assert not flagged(weights["w"])
    broker.put(name, weights, rdma=rdma)
    broker.put(f"{name}.copy", {"x": np.ones(3)}, rdma=rdma)


def test_host_memory_is_refused(broker: vmmfd.Broker, name: str, tmp_path: Path) -> None:
    array = vmmfd.empty(3, "u1", backend="host")
    for call in (
        lambda: vmmfd.empty(3, "u1", backend="host", rdma=True),
        lambda: vmmfd.load_safetensors(safetensors(tmp_path), backend="host", rdma=True),
        lambda: broker.put(name, {"x": np.ones(3)}, rdma=True),
    ):
        with pytest.raises(vmmfd.Unsupported, match="gpuDirectRDMACapable"):
            call()
    with pytest.raises(vmmfd.Unsupported, match="RDMA can't reach the memory of part 'all'"):
        broker.put(name, {"x": array}, rdma=True)
    assert broker.list(name) == []


@pytest.mark.parametrize("rdma", ["yes", 1, None, np.array([1, 2])])
def test_other_values_are_refused(broker: vmmfd.Broker, name: str, tmp_path: Path, rdma: Any) -> None:
    import vmmfd.torch

    for call in (
        lambda: vmmfd.empty(3, "u1", backend="host", rdma=rdma),
        lambda: vmmfd.load_safetensors(safetensors(tmp_path), backend="host", rdma=rdma),
        lambda: broker.put(name, {"x": np.ones(3)}, rdma=rdma),
        lambda: vmmfd.torch.pool(rdma=rdma),
    ):
        with pytest.raises(vmmfd.Invalid if isinstance(rdma, str) else TypeError, match='is not "auto", True or False'):
            call()


def test_entered_pools_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    from vmmfd.torch import _pool

    opened: list[Any] = []
    cuda = SimpleNamespace(is_available=lambda: True, current_device=lambda: 0, init=lambda: None)
    monkeypatch.setattr(_pool, "_torch", lambda: SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(_pool._native, "torch_pool_open", lambda *options: opened.append(options))
    monkeypatch.setattr(_pool.Pool, "_begin", lambda self: None)
    monkeypatch.setattr(_pool.Pool, "_end", lambda self: None)
    with _pool.pool(rdma=True), _pool.pool(rdma=True):
        with pytest.raises(vmmfd.Invalid, match="rdma=False, but a pool with rdma=True is entered on device 0"):
            _pool.pool(rdma=False).__enter__()
    with _pool.pool():
        pass
    assert [options[3] for options in opened] == [True, True, "auto"] and _pool._active == []


def test_pool_is_created_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch counts a pool's uses for each device: counted on another, its release fails an assertion of PyTorch."""
    from vmmfd.torch import _pool

    uses = [0, 0]
    current = [0]

    class MemPool:
        id = (0, 1)

        def __init__(self, allocator: object) -> None:
            uses[current[0]] += 1

    class Device:
        def __init__(self, ordinal: int) -> None:
            self.ordinal, self.before = ordinal, current[0]

        def __enter__(self) -> None:
            current[0] = self.ordinal

        def __exit__(self, *_: object) -> None:
            current[0] = self.before

    @contextlib.contextmanager
    def use_mem_pool(pool: MemPool, ordinal: int) -> Iterator[None]:
        uses[ordinal] += 1
        yield
        release(ordinal)

    def release(ordinal: int, pool: object = None) -> None:
        uses[ordinal] -= 1
        assert uses[ordinal] >= 0

    cuda = SimpleNamespace(
        is_available=lambda: True, current_device=lambda: 0, init=lambda: None, MemPool=MemPool, use_mem_pool=use_mem_pool, device=Device
    )
    torch = SimpleNamespace(cuda=cuda, device=lambda ordinal: ordinal, _C=SimpleNamespace(_cuda_releasePool=release))
    monkeypatch.setattr(_pool, "_torch", lambda: torch)
    monkeypatch.setattr(_pool, "_pluggable", lambda: None)
    monkeypatch.setattr(_pool._native, "torch_pool_open", lambda *options: None)
    with _pool.pool(device=0), _pool.pool(device=1):
        pass
    assert uses == [0, 0] and current == [0]


@pytest.mark.fake
@pytest.mark.parametrize(("rdma", "flag"), [("auto", True), (True, True), (False, False)])
def test_device_memory_follows_option(on_device: vmmfd.Broker, name: str, tmp_path: Path, rdma: Any, flag: bool) -> None:
    array = vmmfd.empty(3, "u1", backend="cuda", rdma=rdma)
    assert flagged(array) is flag
    weights = vmmfd.load_safetensors(safetensors(tmp_path), backend="cuda", rdma=rdma)
    assert flagged(weights["w"]) is flag and weights["w"].tobytes() == b"data"
    _, memories, _, _ = on_device._native.plan([("x", np.ones(3))], "all", rdma=rdma)
    assert [memory.rdma for memory in memories] == [flag]
    on_device.put(name, {"x": array, "copied": np.arange(3)}, rdma=rdma)
    assert on_device.get(name)["copied"].tobytes() == np.arange(3).tobytes()


@pytest.mark.fake
def test_shared_memory_without_flag_is_refused(on_device: vmmfd.Broker, name: str) -> None:
    array = vmmfd.empty(3, "u1", backend="cuda", rdma=False)
    with pytest.raises(vmmfd.Unsupported, match="create it with rdma=True"):
        on_device.put(name, {"x": array}, rdma=True)
    on_device.put(name, {"x": array}, rdma=True, copy=True)


@pytest.mark.fake
def test_pool_blocks_follow_option(child: Callable[..., Child]) -> None:
    child(
        """
        import ctypes
        from vmmfd import _native
        library = ctypes.CDLL(_native.__file__)
        library.vmmfd_torch_malloc.restype = ctypes.c_void_p
        def flagged(rdma):
            _native.torch_pool_open(0, 16 << 20, None, rdma)
            memory, _ = _native.torch_pool_find(library.vmmfd_torch_malloc(2 << 20, 0, None))
            return memory.rdma
        assert [flagged(rdma) for rdma in (False, True, False, "auto")] == [False, True, False, False]
        assert _native.torch_pool_figures(0)["arenas"] == 2
        """
    ).end()


# Run with an emulated device or driver that lacks support.
WITHOUT = """
import numpy as np, sys, vmmfd
from vmmfd import _native
assert not vmmfd.empty(3, "u1", backend="cuda")._memory.rdma
assert not vmmfd.load_safetensors(sys.argv[1], backend="cuda")["w"]._memory.rdma
_native.torch_pool_open(0, 16 << 20)
for call in (
    lambda: vmmfd.empty(3, "u1", backend="cuda", rdma=True),
    lambda: vmmfd.load_safetensors(sys.argv[1], backend="cuda", rdma=True),
):
    try:
        call()
    except vmmfd.Unsupported as error:
        assert sys.argv[2] in str(error), error
    else:
        raise AssertionError("no error")
"""


@pytest.mark.fake
@pytest.mark.parametrize(
    ("setting", "value", "problem"),
    [("FAKECUDA_ATTRIBUTE", "110:0", "gpuDirectRDMACapable"), ("FAKECUDA_RDMA", "0", "its driver ignored gpuDirectRDMACapable")],
)
def test_auto_works_without_support(
    child: Callable[..., Child], tmp_path: Path, setting: str, value: str, problem: str
) -> None:
    child(WITHOUT, str(safetensors(tmp_path)), problem, env={setting: value}).end()


@pytest.mark.fake
def test_pool_requires_support(child: Callable[..., Child]) -> None:
    code = """
        import vmmfd
        from vmmfd import _native
        try:
            _native.torch_pool_open(0, 16 << 20, None, True)
        except vmmfd.Unsupported as error:
            assert "gpuDirectRDMACapable" in str(error)
        else:
            raise AssertionError("no error")
        """
    child(code, env={"FAKECUDA_ATTRIBUTE": "110:0"}).end()


@pytest.mark.fake
def test_flag_is_never_set_on_wsl(tmp_path: Path) -> None:
    version = tmp_path / "version"
    version.write_text("Linux version 5.15.0-microsoft-standard-WSL2 (root@1)")
    inside = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", 'mount --bind "$0" /proc/version && exec "$@"', str(version)]
    if shutil.which("unshare") is None or subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("this machine does not let a user mount a file over /proc/version")
    command = [*inside, sys.executable, "-c", WITHOUT, str(safetensors(tmp_path)), "this is WSL2"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
