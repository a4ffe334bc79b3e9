"""PyTorch on a GPU: pools, puts without a copy, and version switches under captured graphs.

One file of more than 500 lines: all tests need PyTorch on a GPU.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from conftest import Child

import vmmfd
from vmmfd import _native

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch_models import Net, X, assert_same, everything, is_mapped  # noqa: E402

pytestmark = pytest.mark.cuda
nn = torch.nn

MIB = 1 << 20
GIB = 1 << 30


@pytest.fixture
def broker(socket: str) -> Iterator[vmmfd.Broker]:
    with vmmfd.connect(socket, backend="cuda") as broker:
        yield broker


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert _native._settle(30)
    assert figures()["arenas"] == 0, "arenas are left"


def figures() -> dict[str, int]:
    return _native.torch_pool_figures(0)


def used() -> int:
    torch.cuda.synchronize()
    assert _native._settle(30)
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def in_arena(tensor: Any) -> bool:
    return _native.torch_pool_find(tensor.data_ptr()) is not None


class Layers(nn.Module):  # type: ignore[misc]
    """Linear layers and a norm with statistics, for a graph."""

    def __init__(self, size: int = 1024, layers: int = 4, device: str = "cuda") -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(size, size, dtype=torch.bfloat16, device=device) for _ in range(layers)
        )
        self.norm = nn.BatchNorm1d(size, device=device)
        self.register_buffer("bias", torch.zeros(size, device=device), persistent=False)

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.norm(x.float()) + self.bias


def assert_close(one: Any, other: Any) -> None:
    """Allows the differences between kernels for different shapes. Other versions differ far more."""
    torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def layers(seed: int, **options: Any) -> Any:
    torch.manual_seed(seed)
    module = Layers(**options).eval()
    with torch.no_grad():
        module.norm.running_mean.normal_()
        module.bias.normal_()
    return module


def test_pool_module_is_not_copied(broker: vmmfd.Broker, name: str) -> None:
    with vmmfd.torch.pool():
        module = nn.ParameterList(torch.full((32 * MIB,), at, dtype=torch.bfloat16, device="cuda") for at in range(16))
    torch.cuda.empty_cache()
    assert all(map(in_arena, module.parameters()))
    torch.cuda.reset_peak_memory_stats()
    allocated = torch.cuda.memory_allocated()
    broker.put(name, module, copy=False)
    assert torch.cuda.max_memory_allocated() == allocated
    # Other processes allocate too: a copy would show in each of several gets.
    grown = []
    for _ in range(5):
        tensors = None
        before = used()
        tensors = broker.state_dict(name)
        grown.append(used() - before)
    assert min(grown) < 32 * MIB, f"{[each // MIB for each in grown]} MiB for gets of 1 GiB"
    for key, parameter in module.named_parameters():
        assert torch.equal(tensors[key], parameter) and tensors[key].data_ptr() != parameter.data_ptr()
    # Outside the pool, a put needs a copy.
    outside = {key: parameter.detach().clone() for key, parameter in module.named_parameters()}
    before = used()
    broker.put(f"{name}.copied", outside)
    assert used() - before >= GIB
    broker.delete(f"{name}.copied")
    broker.delete(name)


def test_ties_views_and_private_copies(broker: vmmfd.Broker, name: str) -> None:
    with vmmfd.torch.pool():
        module = Net(1).cuda().eval()
        # `cuda()` creates new storages: share them again.
        whole = torch.randn(4, 8, device="cuda")
        module.first, module.last = nn.Parameter(whole[:2]), nn.Parameter(whole[2:])
        module.plain, module.norm.note = module.plain.cuda(), module.norm.note.cuda()
    x = X.cuda()
    expected = module(x)
    broker.put(name, module, copy=False)
    other = Net(device="meta").eval()
    loaded = broker.load(name, other)
    assert_same(module, other)
    assert_close(other(x), expected)
    assert other.head.weight is other.embed.weight
    assert other.first.untyped_storage().data_ptr() == other.last.untyped_storage().data_ptr()
    tensors = everything(other)
    for key in loaded.private:
        assert not is_mapped(tensors[key], loaded.lease)
        tensors[key].add_(1)
    # Training writes the statistics.
    other.train()(x)
    torch.cuda.synchronize()
    assert_same(module, broker.load(name, Net(device="meta")).module)


def test_buffers_are_copied(broker: vmmfd.Broker, name: str) -> None:
    tensors = {"weight": torch.ones(1 << 20, device="cuda"), "count": torch.arange(4, device="cuda")}
    broker.put(name, {key: nn.Parameter(tensor, requires_grad=False) for key, tensor in tensors.items()})
    with broker.get(name) as lease, vmmfd.torch.guard():
        found = lease.state_dict()
        module = nn.Module()
        module.weight = nn.Parameter(torch.empty(1 << 20, device="meta"), requires_grad=False)
        for leaf in ("count", "tied"):
            module.register_buffer(leaf, torch.empty(4, dtype=torch.int64, device="meta"))
        module.load_state_dict({**found, "tied": found["count"]}, assign=True)
        assert is_mapped(module.weight, lease) and is_mapped(found["count"], lease)
        module.count.add_(1)
        torch.cuda.synchronize()
        assert module.count.tolist() == [1, 2, 3, 4] and module.tied.tolist() == found["count"].tolist() == [0, 1, 2, 3]
        assert not is_mapped(module.count, lease) and module.count.untyped_storage().nbytes() == 32
        row = lease.state_dict(private=["count"])["count"]
        assert not is_mapped(row, lease) and row.tolist() == [0, 1, 2, 3]


def test_published_memory_is_not_overwritten(
    broker: vmmfd.Broker, socket: str, name: str, child: Callable[..., Child]
) -> None:
    reader = child(
        """
        import sys, hashlib, vmmfd
        broker = vmmfd.connect(sys.argv[1], backend="cuda")
        lease = broker.get(sys.argv[2], wait=30)
        def digests():
            print(" ".join(hashlib.sha256(lease[key].tobytes()).hexdigest() for key in sorted(lease)), flush=True)
        digests()
        for line in sys.stdin:
            digests()
        """,
        socket,
        name,
    )

    def ask() -> str:
        assert reader.process.stdout is not None
        return reader.process.stdout.readline().strip()

    def again() -> str:
        assert reader.process.stdin is not None
        reader.process.stdin.write("again\n")
        reader.process.stdin.flush()
        return ask()

    def make() -> Any:
        return nn.ParameterDict(
            {
                "large": torch.randn(20 * MIB, device="cuda"),
                "medium": torch.randn(MIB, device="cuda"),
                "small": torch.randn(10, device="cuda"),
            }
        )

    with vmmfd.torch.pool():
        module = make()
        expected = " ".join(
            hashlib.sha256(module[key].detach().cpu().numpy().tobytes()).hexdigest() for key in sorted(module.keys())
        )
        broker.put(name, module, copy=False)
        assert ask() == expected
        addresses = {parameter.data_ptr() for parameter in module.parameters()}
        del module
        gc.collect()
        # In the same pool, and in another.
        later = [make() for _ in range(5)]
        assert not addresses & {parameter.data_ptr() for one in later for parameter in one.parameters()}
        torch.cuda.synchronize()
        assert again() == expected
        torch.cuda.empty_cache()
        later += [make() for _ in range(5)]
    torch.cuda.empty_cache()
    with vmmfd.torch.pool():
        later += [make() for _ in range(5)]
    torch.cuda.synchronize()
    assert again() == expected


def test_pool_of_another_thread_keeps_published_memory(broker: vmmfd.Broker, name: str) -> None:
    # The thread is in a pool that owns some of the blocks.
    entered, leave, tensors = threading.Event(), threading.Event(), []

    def other_thread() -> None:
        with vmmfd.torch.pool():
            tensors.append(torch.full((3 * MIB,), 5.0, device="cuda"))
            entered.set()
            leave.wait(60)
            found = [torch.full((3 * MIB,), 6.0, device="cuda") for _ in range(30)]
            torch.cuda.synchronize()
            del found

    thread = threading.Thread(target=other_thread)
    thread.start()
    assert entered.wait(60)
    broker.put(name, {"x": tensors[0]}, copy=False)
    tensors.clear()
    gc.collect()
    leave.set()
    thread.join()
    got = broker.state_dict(name, writable_buffers=False)["x"]
    assert bool((got == 5.0).all())


def test_empty_cache_with_published_memory(broker: vmmfd.Broker, name: str) -> None:
    kinds = [torch.cuda.empty_cache]
    if hasattr(torch, "accelerator") and hasattr(torch.accelerator, "empty_cache"):
        kinds.append(torch.accelerator.empty_cache)
    for number, empty_cache in enumerate(kinds):
        with vmmfd.torch.pool():
            module = layers(number)
            gone = layers(5)
            broker.put(f"{name}.{number}", module, copy=False)
            empty_cache()
            del gone
            empty_cache()
        empty_cache()
        tensors = broker.state_dict(f"{name}.{number}")
        empty_cache()
        other = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(other):
            x = torch.randn(8, 1024, dtype=torch.bfloat16, device="cuda")
            with vmmfd.torch.pool():
                assert in_arena(torch.empty(30 * MIB, device="cuda"))
                empty_cache()
            y = module(x)
        empty_cache()
        for key, value in module.state_dict().items():
            assert torch.equal(value, tensors[key]), key
        kept = {key: value.clone() for key, value in tensors.items()}
        del module
        gc.collect()
        empty_cache()
        for key, value in kept.items():
            assert torch.equal(value, tensors[key]), key
        del x, y, other


class Captured:
    """A captured graph of a module."""

    def __init__(self, module: Any, x: Any) -> None:
        self.module, self.x = module, x
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.no_grad():
            with torch.cuda.stream(stream):
                for _ in range(3):
                    module(x)
            torch.cuda.current_stream().wait_stream(stream)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.y = module(x)

    def replay(self) -> Any:
        self.graph.replay()
        torch.cuda.synchronize()
        return self.y.clone()


def test_switch_under_captured_graph(broker: vmmfd.Broker, name: str) -> None:
    x = torch.randn(16, 1024, dtype=torch.bfloat16, device="cuda")
    expected = []
    for seed in range(4):
        with vmmfd.torch.pool():
            module = layers(seed)
        with torch.no_grad():
            expected.append(module(x))
        # In place first; then copies, whose layout depends only on names and sizes.
        if seed == 0:
            broker.put(name, module, copy=True, keep=4)
        else:
            broker.put(name, module, copy=True, replace=True)
        del module
    module = Layers(device="meta").eval()
    loaded = broker.load(name, module, version=1)
    captured = Captured(module, x)
    assert_close(captured.replay(), expected[0])
    pointers = [parameter.data_ptr() for parameter in module.parameters()]
    times, old = [], None
    for version in (2, 3, 4):
        prepared = loaded.lease.prepare(version=version)
        begun = time.perf_counter()
        old = loaded.switch(prepared)
        times.append(1e3 * (time.perf_counter() - begun))
        assert_close(captured.replay(), expected[version - 1])
        if version < 4:
            old.close()
    # And back.
    loaded.switch(old).close()
    assert_close(captured.replay(), expected[2])
    assert [parameter.data_ptr() for parameter in module.parameters()] == pointers
    print(f"switched in {[round(one, 2) for one in times]} ms")
    with pytest.raises(vmmfd.ExportError):
        loaded.lease.switch(loaded.lease.prepare(version=4))


def test_pool_layout_is_reproducible(broker: vmmfd.Broker, name: str) -> None:
    x = torch.randn(16, 1024, dtype=torch.bfloat16, device="cuda")
    expected = []
    for seed in range(2):
        with vmmfd.torch.pool():
            module = layers(seed)
        with torch.no_grad():
            expected.append(module(x))
        broker.put(name, module, copy=False, replace=seed > 0, keep=2 if seed == 0 else None)
    other = Layers(device="meta").eval()
    loaded = broker.load(name, other, version=1)
    captured = Captured(other, x)
    assert_close(captured.replay(), expected[0])
    loaded.switch().close()
    assert_close(captured.replay(), expected[1])


def test_sealed_put_is_read_only_here(
    broker: vmmfd.Broker, socket: str, name: str, child: Callable[..., Child]
) -> None:
    with vmmfd.torch.pool():
        module = layers(1)
        other = torch.ones(10, device="cuda")
    with pytest.raises(vmmfd.Invalid, match="other tensors of"):
        broker.put(name, module, seal=True)
    del other
    gc.collect()
    x = torch.randn(16, 1024, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        expected = module(x)
        broker.put(name, module, seal=True, copy=False)
        assert_close(module(x), expected)
    assert_same(module, broker.load(name, Layers(device="meta").eval()).module)
    # A write faults, shown in a child process.
    sinner = child(
        """
        import sys, torch, vmmfd
        broker = vmmfd.connect(sys.argv[1], backend="cuda")
        with vmmfd.torch.pool():
            x = torch.ones(1000, device="cuda")
        broker.put(sys.argv[2], {"x": x}, seal=True)
        assert float(x.sum()) == 1000
        try:
            x.add_(1)
            torch.cuda.synchronize()
        except RuntimeError as error:
            assert "illegal" in str(error), error
            print("fault", flush=True)
        """,
        socket,
        f"{name}.fault",
    )
    output, _ = sinner.process.communicate(timeout=60)
    assert "fault" in output
    assert bool((broker.state_dict(f"{name}.fault")["x"] == 1).all())


def test_object_survives_maker_kill(broker: vmmfd.Broker, socket: str, name: str, child: Callable[..., Child]) -> None:
    maker = child(
        """
        import sys, torch, vmmfd
        broker = vmmfd.connect(sys.argv[1], backend="cuda")
        with vmmfd.torch.pool():
            module = torch.nn.Linear(4096, 4096, device="cuda")
            torch.nn.init.constant_(module.weight, 3.0)
        broker.put(sys.argv[2], module, copy=False)
        print("ready", flush=True)
        sys.stdin.read()
        """,
        socket,
        name,
    )
    maker.wait_for("ready")
    os.kill(maker.pid, signal.SIGKILL)
    maker.process.wait()
    module = nn.Linear(4096, 4096, device="meta")
    broker.load(name, module)
    assert bool((module.weight == 3.0).all())
    assert module(torch.ones(2, 4096, device="cuda")).shape == (2, 4096)


def test_mixed_cpu_and_gpu_tensors(broker: vmmfd.Broker, name: str) -> None:
    with vmmfd.torch.pool():
        inside = torch.randn(1000, device="cuda")
    tensors = {"cpu": torch.randn(500), "inside": inside, "outside": torch.randn(300, device="cuda")}
    broker.put(name, tensors)
    found = broker.state_dict(name)
    for key, tensor in tensors.items():
        assert torch.equal(found[key].cpu(), tensor.cpu()), key
    with pytest.raises(vmmfd.ExportError) as raised:
        broker.put(name, tensors, copy=False, replace=True)
    assert sorted(str(raised.value).splitlines()[1:]) == ["- cpu", "- outside"]


def test_element_types(broker: vmmfd.Broker, name: str) -> None:
    names = ["bool", "int8", "int64", "float16", "bfloat16", "float64", "complex64", "float8_e4m3fn", "float8_e5m2"]
    with vmmfd.torch.pool():
        bits = torch.arange(48, dtype=torch.uint8, device="cuda")
        tensors = {key: (bits % 2 if key == "bool" else bits).clone().view(getattr(torch, key)) for key in names}
        tensors["empty"] = torch.empty(0, 5, device="cuda")
        tensors["turned"] = torch.randn(30, 40, device="cuda").T
    broker.put(name, tensors)
    found = broker.state_dict(name)
    for key, tensor in tensors.items():
        assert found[key].dtype == tensor.dtype and found[key].stride() == tensor.stride(), key
        one, two = tensor.contiguous().view(-1), found[key].contiguous().view(-1)
        assert tensor.numel() == 0 or torch.equal(one.view(torch.uint8), two.view(torch.uint8)), key


def test_get_of_288_tensors_is_fast(broker: vmmfd.Broker, name: str) -> None:
    with vmmfd.torch.pool():
        tensors = {f"layers.{at}.weight": torch.full((4, MIB), at, dtype=torch.bfloat16, device="cuda") for at in range(288)}
    begun = time.perf_counter()
    broker.put(name, tensors, copy=False)
    put = time.perf_counter() - begun
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        found = broker.state_dict(name, writable_buffers=False)
        times.append(1e3 * (time.perf_counter() - begun))
        assert float(found["layers.287.weight"][3, -1]) == torch.tensor(287.0, dtype=torch.bfloat16).item()
        del found
    print(f"put in {1e3 * put:.1f} ms, 288 tensors there in {[round(one, 2) for one in times]} ms; {figures()}")
    assert min(times) < 50
    broker.delete(name)


def test_out_of_memory_has_our_note() -> None:
    with pytest.raises(torch.OutOfMemoryError) as raised, vmmfd.torch.pool():
        torch.empty(1 << 44, dtype=torch.uint8, device="cuda")
    assert any(note.startswith("vmmfd.torch.pool(): ") for note in raised.value.__notes__)


def test_block_reuse_waits_for_gpu() -> None:
    size = 60 * MIB
    with vmmfd.torch.pool():
        kept = torch.zeros(size, dtype=torch.uint8, device="cuda")
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            late = torch.zeros(size, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
    address = late.data_ptr()
    with torch.cuda.stream(stream):
        # Sleeps about a second, then writes to a block that is freed in the meantime.
        torch.cuda._sleep(2_000_000_000)
        late.fill_(1)
    del late
    torch.cuda.empty_cache()
    with vmmfd.torch.pool():
        blocks = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(3)]
        for block in blocks:
            block.fill_(2)
    torch.cuda.synchronize()
    assert address in [block.data_ptr() for block in blocks]
    assert all(bool((block == 2).all()) for block in blocks)
    del kept


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_allocations_during_capture(mode: str) -> None:
    library = ctypes.CDLL(_native.__file__)
    library.vmmfd_torch_malloc.restype = ctypes.c_void_p
    library.vmmfd_torch_malloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    library.vmmfd_torch_free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    with vmmfd.torch.pool():
        pass
    x = torch.zeros(10, device="cuda")

    def work() -> None:
        # PyTorch's calls that wait for the GPU: an arena becomes empty, and a freed block is reused.
        one, two = (library.vmmfd_torch_malloc(2 * MIB, 0, None) for _ in range(2))
        library.vmmfd_torch_free(one, 2 * MIB, 0, None)
        one = library.vmmfd_torch_malloc(2 * MIB, 0, None)
        for block in (one, two):
            library.vmmfd_torch_free(block, 2 * MIB, 0, None)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        y = x + 1
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert figures()["arenas"] == 0
        work()
        z = y + 1
    graph.replay()
    assert float(z[0]) == 2


def test_lease_dropped_during_capture(broker: vmmfd.Broker, name: str) -> None:
    broker.put(name, {"x": torch.ones(1000, device="cuda")})
    x = torch.zeros(10, device="cuda")
    # Garbage of other tests may hold PyTorch or legacy memory, whose release would invalidate a capture.
    gc.collect()
    assert _native._settle(30)
    for _ in range(3):
        tensors = broker.state_dict(name, writable_buffers=False)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x + 1
            del tensors
            gc.collect()
            time.sleep(0.1)
            z = y + 1
        graph.replay()
        assert float(z[0]) == 2
    assert _native._settle(30)
    assert len(broker.who(name).leases) == 0


def test_pool_refusals_and_reuse() -> None:
    with pytest.raises(vmmfd.Invalid, match="is not a CUDA device"), vmmfd.torch.pool(device="cpu"):
        pass
    pool = vmmfd.torch.pool()
    with pool, pytest.raises(vmmfd.Invalid, match="is already entered"), pool:
        pass
    # It can be entered again.
    with pool:
        assert in_arena(torch.empty(10, device="cuda"))
    torch.cuda.empty_cache()
    assert pool.figures["arenas"] == 0
    with vmmfd.torch.pool(arena=32 * MIB) as small:
        tensors = [torch.empty(30 * MIB, dtype=torch.uint8, device="cuda") for _ in range(3)]
        assert small.figures["arenas"] == 3
    del tensors


@pytest.mark.parametrize(
    "holder",
    {
        "local": "tensor = allocate()",
        "open_pool": "entered = vmmfd.torch.pool(); entered.__enter__(); tensor = allocate()",
        "cycle": "class Node: pass\nnode = Node(); node.self, node.tensor = node, allocate()",
        "module": "sys.kept = allocate()",
        "thread": """
started = threading.Event()
def hold():
    tensor = allocate(); started.set(); threading.Event().wait()
threading.Thread(target=hold, daemon=True).start(); started.wait()
""",
    }.items(),
    ids=lambda holder: holder[0],
)
def test_pool_tensors_alive_at_exit(child: Callable[..., Child], holder: tuple[str, str]) -> None:
    begin = """import sys, threading, torch, vmmfd.torch
def allocate():
    with vmmfd.torch.pool():
        return torch.ones(30 << 20, device="cuda")
"""
    child(begin + holder[1]).end()


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_one_part_per_gpu(broker: vmmfd.Broker, name: str) -> None:
    with vmmfd.torch.pool(device=0), vmmfd.torch.pool(device=1):
        tensors = {"one": torch.full((1000,), 1.0, device="cuda:0"), "two": torch.full((1000,), 2.0, device="cuda:1")}
    broker.put(name, tensors, copy=False)
    with broker.get(name) as lease:
        assert [part.name for part in lease.parts] == ["all", "all-1"]
        found = lease.state_dict()
    assert {key: str(tensor.device) for key, tensor in found.items()} == {"one": "cuda:0", "two": "cuda:1"}
    assert all(torch.equal(found[key], tensors[key]) for key in tensors)
