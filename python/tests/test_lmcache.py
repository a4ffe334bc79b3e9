"""LMCache's resolver of descriptors."""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import types
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import Child
from test_share import UNIT, Allocator

import vmmfd
from vmmfd.engines import lmcache

WRAPPER = "lmcache.v1.platform.devices.cuda.ipc_wrapper"


def memories() -> int:
    """Returns how many descriptors of memory are open."""
    paths = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sum(os.readlink(path).startswith("/memfd:") for path in paths if os.path.exists(path) or os.path.islink(path))


def test_resolver_gives_descriptor_away(broker: vmmfd.Broker) -> None:
    id = uuid.uuid4().bytes
    values = np.arange(1000, dtype="u2")
    name = f"lmcache/{id.hex()}"
    broker.put(name, {"tensor": values})
    resolve = lmcache.resolver(broker, wait=60, expect_owner=os.getuid())
    before = memories()
    fds = [resolve(id) for _ in range(2)]
    assert memories() == before + 2 and not any(os.get_inheritable(fd) for fd in fds)
    assert broker.who(name).leases == ()
    broker.delete(name)
    for fd in fds:
        with mmap.mmap(fd, values.nbytes, prot=mmap.PROT_READ) as memory:
            assert memory[:] == values.tobytes()
        os.close(fd)
    assert memories() == before


def test_resolver_refuses_other_objects(broker: vmmfd.Broker) -> None:
    id = uuid.uuid4().bytes
    resolve = lmcache.resolver(broker, wait=0.05)
    before = memories()
    with pytest.raises(vmmfd.Timeout, match=id.hex()):
        resolve(id)
    broker.put(f"lmcache/{id.hex()}", {key: vmmfd.empty(10, "u1", backend="host") for key in "ab"})
    with pytest.raises(vmmfd.Invalid, match="has 2 allocations, not one"):
        resolve(id)
    with pytest.raises(vmmfd.MismatchError):
        lmcache.resolver(broker, wait=0, expect_owner=os.getuid() + 1)(id)
    assert memories() == before
    broker.delete(f"lmcache/{id.hex()}")


def emulated(module: types.ModuleType) -> types.SimpleNamespace:
    """`cuda.bindings.driver` over the emulated driver, which `cuda.bindings` does not load: its classes, and the calls of the wrapper."""
    library = ctypes.CDLL("libcuda.so.1")
    u64, size = ctypes.c_uint64, ctypes.c_size_t

    def call(name: str, *arguments: Any) -> Any:
        return module.CUresult(getattr(library, name)(*arguments))

    def place(name: str, *arguments: Any) -> tuple[Any, int]:
        value = u64()
        return call(name, ctypes.byref(value), *arguments), value.value

    def set_access(base: int, length: int, access: list[Any], count: int) -> tuple[Any]:
        return (call("cuMemSetAccess", u64(base), size(length), ctypes.c_void_p(access[0].getPtr()), size(count)),)

    return types.SimpleNamespace(
        **{name: getattr(module, name) for name in dir(module) if name.startswith("CU")},
        cuMemImportFromShareableHandle=lambda fd, kind: place("cuMemImportFromShareableHandle", ctypes.c_void_p(fd), int(kind)),
        cuMemAddressReserve=lambda length, *_: place("cuMemAddressReserve", size(length), size(0), u64(0), u64(0)),
        cuMemMap=lambda base, length, at, handle, _: (call("cuMemMap", u64(base), size(length), size(at), u64(handle), u64(0)),),
        cuMemSetAccess=set_access,
        cuMemUnmap=lambda base, length: (call("cuMemUnmap", u64(base), size(length)),),
        cuMemAddressFree=lambda base, length: (call("cuMemAddressFree", u64(base), size(length)),),
        cuMemRelease=lambda handle: (call("cuMemRelease", u64(handle)),),
    )


@pytest.mark.fake
@pytest.mark.filterwarnings("ignore")
def test_lmcache_maps_published_tensor(socket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """LMCache's module, except the constructor of the wrapper and its result, which need PyTorch's CUDA and CuPy."""
    wrappers: Any = pytest.importorskip(WRAPPER, reason="LMCache is not installed")
    wire = importlib.import_module("lmcache.v1.platform.base.ipc_wire")
    bindings = emulated(importlib.import_module("cuda.bindings.driver"))
    monkeypatch.setattr(wrappers, "_cuda", types.SimpleNamespace(driver=bindings))
    engine, theirs = vmmfd.connect(socket, backend="cuda"), Allocator(1)
    tensor, id = theirs.array(100, 16), uuid.uuid4().bytes
    metadata = wire.TensorMetadata("uint8", (16,), (1,), 0, "GPU-0")
    data = wire.VmmCudaIPCData(
        version=1, metadata=metadata, export_id=id, kind="posix_fd", fabric_blob=None, alloc_size=UNIT, alloc_offset=100, nbytes=16
    )
    exported = wrappers.VmmCudaIPCWrapper.from_wire(data)
    assert lmcache.publish(engine, exported, tensor) is None
    exported._fd = os.open("/dev/null", os.O_RDONLY)
    published = lmcache.publish(engine, exported, tensor)
    assert published is not None and published.name == f"lmcache/{id.hex()}" and published.copied == 0
    received = wrappers.VmmCudaIPCWrapper.Deserialize(wrappers.VmmCudaIPCWrapper.Serialize(exported))
    with vmmfd.connect(socket, backend="cuda") as broker:
        with pytest.raises(RuntimeError, match="No VMM fd resolver"):
            received._import_and_map(0)
        lmcache.install(broker)
        before = memories()
        mapping = received._import_and_map(0)
        written = (ctypes.c_ubyte * 16)(*range(16))
        library, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
        assert library.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == library.cuCtxSetCurrent(context) == 0
        assert library.cuMemcpyHtoD_v2(ctypes.c_uint64(mapping.base_ptr + 100), written, ctypes.c_size_t(16)) == 0
        assert library.cuCtxSynchronize() == 0
        assert vmmfd.share(tensor, neighbours=True).tobytes() == bytes(range(16))
        wrappers._MAPPED_VMM_ALLOCATIONS[id], received._opens, mapping.refcount = mapping, 1, 1
        received.close()
        assert vmmfd._native._settle(60)
        assert id not in wrappers._MAPPED_VMM_ALLOCATIONS and memories() == before
        exported.close()
        with broker.watch(published.name) as watch:
            engine.close()
            event = watch.next(60)
        assert event is not None and event.kind == "deleted"
    wrappers.set_vmm_fd_resolver(None)


RECEIVES = f"""
import sys
import torch
import vmmfd
from vmmfd.engines import lmcache
from {WRAPPER} import VmmCudaIPCWrapper
torch.cuda.init()
broker = vmmfd.connect(sys.argv[1], backend="cuda")
lmcache.install(broker)
wrapper = VmmCudaIPCWrapper.Deserialize(bytes.fromhex(sys.argv[2]))
tensor = wrapper.to_tensor()
assert tensor.dtype == torch.bfloat16 and tensor.shape == (4, 1000)
assert torch.equal(tensor, torch.arange(4000, dtype=torch.bfloat16, device=tensor.device).reshape(4, 1000))
tensor[0, 0] = 77
torch.cuda.synchronize()
del tensor
wrapper.close()
"""


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore")
def test_lmcache_shares_tensor_with_process(socket: str, child: Callable[..., Child]) -> None:
    for module in ("torch", "cupy", "msgspec", "cuda.bindings.driver", WRAPPER):
        pytest.importorskip(module)
    code = f"""
    import os, subprocess, sys, types, warnings
    warnings.simplefilter("ignore")
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    import lmcache.v1
    import torch
    import vmmfd
    # The wrapper needs one module of these packages, whose own code imports all of LMCache's dependencies.
    for name in ("lmcache.v1.gpu_connector", "lmcache.v1.gpu_connector.kv_format"):
        package = sys.modules[name] = types.ModuleType(name)
        package.__path__ = [os.path.join(os.path.dirname(lmcache.__file__), *name.split(".")[1:])]
    from {WRAPPER} import VmmCudaIPCWrapper
    from vmmfd.engines import lmcache
    tensor = torch.arange(4000, dtype=torch.bfloat16, device="cuda").reshape(4, 1000)
    wrapper = VmmCudaIPCWrapper.wrap(tensor)
    with vmmfd.connect(sys.argv[1], backend="cuda") as broker:
        assert lmcache.publish(broker, wrapper, tensor).copied == 0
        subprocess.run([sys.executable, "-c", sys.argv[2], sys.argv[1], VmmCudaIPCWrapper.Serialize(wrapper).hex()], check=True, timeout=200)
    wrapper.close()
    assert tensor[0, 0].item() == 77
    """
    holder = child(code, socket, RECEIVES)
    output, errors = holder.process.communicate()
    assert holder.process.returncode == 0, (output, errors)
