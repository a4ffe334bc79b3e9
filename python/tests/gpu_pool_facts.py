"""What PyTorch really does with memory pools over shared memory, on this machine's GPU.

A script of its own: `python gpu_pool_facts.py [CASE ...]`. It runs each case in a process of its own, prints one JSON object for each
(`case`, `ok`, `facts`, and `failed` with the expectations that do not hold), and ends with 1 if any failed. It needs PyTorch with CUDA and
the package; no broker.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
import traceback
from typing import Any, Callable

MIB = 1 << 20
GIB = 1 << 30

facts: dict[str, Any] = {}
failed: list[str] = []
cases: dict[str, Callable[[], None]] = {}


def case(function: Callable[[], None]) -> Callable[[], None]:
    cases[function.__name__] = function
    return function


def expect(holds: bool, what: str) -> None:
    if not holds:
        failed.append(what)


def figures() -> dict[str, int]:
    from vmmfd import _native

    return _native.torch_pool_figures(0)


def in_arena(tensor: Any) -> bool:
    from vmmfd import _native

    return _native.torch_pool_find(tensor.data_ptr()) is not None


def used() -> int:
    """Bytes of the GPU in use, by all processes."""
    import torch

    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def filled(size: int, value: int) -> Any:
    import torch

    return torch.full((size,), value, dtype=torch.uint8, device="cuda")


# A second process, with ctypes alone: maps a descriptor read-only and reports digests of ranges, or writes.

READER = r"""
import ctypes, hashlib, json, sys
cuda = ctypes.CDLL("libcuda.so.1")
U64 = ctypes.c_uint64
def call(name, *arguments):
    code = getattr(cuda, name)(*arguments)
    if code: print(json.dumps({"failed": name, "code": code})); sys.exit(3)
call("cuInit", 0)
context = ctypes.c_void_p()
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
call("cuCtxSetCurrent", context)
fd, size = int(sys.argv[1]), int(sys.argv[2])
handle, address = U64(), U64()
call("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(fd), 1)
call("cuMemAddressReserve", ctypes.byref(address), ctypes.c_size_t(size), ctypes.c_size_t(0), U64(0), U64(0))
call("cuMemMap", address, ctypes.c_size_t(size), ctypes.c_size_t(0), handle, U64(0))
class Access(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int), ("flags", ctypes.c_int)]
call("cuMemSetAccess", address, ctypes.c_size_t(size), ctypes.byref(Access(1, 0, 1)), ctypes.c_size_t(1))
print("ready", flush=True)
for line in sys.stdin:
    offset, length = map(int, line.split())
    data = (ctypes.c_char * length)()
    call("cuMemcpyDtoH_v2", data, U64(address.value + offset), ctypes.c_size_t(length))
    print(hashlib.sha256(data).hexdigest(), flush=True)
"""


class Reader:
    """A second process that has the arena of an address mapped."""

    def __init__(self, address: int) -> None:
        from vmmfd import _native

        found = _native.torch_pool_descriptor(address)
        assert found is not None, "the address is in no arena"
        fd, self.offset, size = found
        command = [sys.executable, "-c", READER, str(fd), str(size)]
        self.process = subprocess.Popen(
            command, pass_fds=[fd], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        os.close(fd)
        line = self.process.stdout.readline().strip()  # type: ignore[union-attr]
        assert line == "ready", line

    def digest(self, offset: int, length: int) -> str:
        self.process.stdin.write(f"{offset} {length}\n")  # type: ignore[union-attr]
        self.process.stdin.flush()  # type: ignore[union-attr]
        return self.process.stdout.readline().strip()  # type: ignore[union-attr]

    def close(self) -> None:
        self.process.stdin.close()  # type: ignore[union-attr]
        self.process.wait(30)


def digest_of(value: int, size: int) -> str:
    return hashlib.sha256(bytes([value]) * size).hexdigest()


@case
def environment() -> None:
    import torch

    facts["torch"] = torch.__version__
    facts["devices"] = torch.cuda.device_count()
    facts["name"] = torch.cuda.get_device_name(0)
    facts["alloc_conf"] = os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF")


@case
def tensors_lie_in_arenas() -> None:
    import torch
    from vmmfd.torch import pool

    with pool():
        small, medium, large = filled(100, 1), filled(5 * MIB, 2), filled(60 * MIB, 3)
        nothing = torch.empty(0, device="cuda")
        facts["figures"] = figures()
    outside = filled(5 * MIB, 4)
    expect(all(map(in_arena, (small, medium, large))), "small, medium and large tensors lie in arenas")
    expect(not in_arena(outside), "a tensor made after the pool does not")
    expect(nothing.data_ptr() == 0, "a tensor of no elements has the address 0")
    facts["address_of_no_elements"] = nothing.data_ptr()
    expect(int(large.sum().item()) == 3 * 60 * MIB and int(medium[-1]) == 2, "they hold what was written")


@case
def empty_cache_with_live_and_deleted_tensors() -> None:
    import torch
    from vmmfd.torch import pool

    both = {"cuda": torch.cuda.empty_cache}
    if hasattr(torch, "accelerator") and hasattr(torch.accelerator, "empty_cache"):
        both["accelerator"] = torch.accelerator.empty_cache
    facts["kinds"] = sorted(both)
    for name, empty_cache in both.items():
        with pool():
            live, deleted = filled(40 * MIB, 1), filled(300 * MIB, 2)
            small = filled(1000, 5)
            del deleted
            empty_cache()
            facts[f"{name}_inside"] = figures()
            again = filled(300 * MIB, 3)
            empty_cache()
        empty_cache()
        expect(int(live[-1]) == 1 and int(again[-1]) == 3 and int(small[-1]) == 5, f"{name}: live tensors keep their bytes")
        facts[f"{name}_outside"] = figures()
        expect(all(map(in_arena, (live, again, small))), f"{name}: live tensors stay in arenas")
        before = used()
        del live, again, small
        gc.collect()
        facts[f"{name}_deleted"] = figures()
        empty_cache()
        facts[f"{name}_deleted_and_emptied"] = figures()
        facts[f"{name}_given_back_mib"] = (before - used()) // MIB
        expect(figures()["arenas"] == 0, f"{name}: deleted tensors' arenas are given back at empty_cache")
    for _ in range(20):
        with pool():
            filled(30 * MIB, 1)
    torch.cuda.empty_cache()
    facts["after_20_pools"] = figures()
    expect(figures()["arenas"] == 0, "pools that come and go leave nothing")


@case
def inside_another_pool_and_another_inside() -> None:
    import torch
    from vmmfd.torch import pool

    other = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(other):
        theirs = filled(30 * MIB, 1)
        with pool():
            ours = filled(30 * MIB, 2)
            small = filled(10, 2)
        theirs_again = filled(30 * MIB, 3)
    facts["ours_inside_theirs"] = [in_arena(tensor) for tensor in (theirs, ours, small, theirs_again)]
    expect(facts["ours_inside_theirs"] == [False, True, True, False], "inside another pool, the inner one serves")
    second = torch.cuda.MemPool()
    with pool():
        ours_too = filled(30 * MIB, 4)
        with torch.cuda.use_mem_pool(second):
            inner = filled(30 * MIB, 5)
        ours_again = filled(30 * MIB, 6)
    facts["theirs_inside_ours"] = [in_arena(tensor) for tensor in (ours_too, inner, ours_again)]
    expect(facts["theirs_inside_ours"] == [True, False, True], "with another pool inside, the inner one serves")
    with pool():
        with pool():
            nested = filled(30 * MIB, 7)
        outer = filled(30 * MIB, 7)
    expect(in_arena(nested) and in_arena(outer), "ours inside ours")
    values = [theirs, ours, small, theirs_again, ours_too, inner, ours_again]
    expect([int(tensor[-1]) for tensor in values] == [1, 2, 2, 3, 4, 5, 6], "all hold what was written")
    del theirs, ours, small, theirs_again, ours_too, inner, ours_again, nested, outer, values, other, second
    gc.collect()
    torch.cuda.empty_cache()
    expect(figures()["arenas"] == 0, "nothing is left")


@case
def what_is_published_is_not_overwritten() -> None:
    import torch
    from vmmfd import torch as shared

    def publish(*tensors: Any) -> None:
        shared._close([tensor.data_ptr() for tensor in tensors], [tensor.untyped_storage() for tensor in tensors])

    with shared.pool():
        first = filled(30 * MIB, 1)
        small = filled(1000, 2)
        reader, reader_of_small = Reader(first.data_ptr()), Reader(small.data_ptr())
        address = first.data_ptr()
        expect(reader.digest(reader.offset, 30 * MIB) == digest_of(1, 30 * MIB), "a second process reads it")
        # Without publishing, the block of a deleted tensor is used again.
        del first
        reused = filled(30 * MIB, 9)
        facts["unpublished_is_reused"] = reused.data_ptr() == address
        expect(reader.digest(reader.offset, 30 * MIB) == digest_of(9, 30 * MIB), "and sees what comes in its place")
        published = digest_of(9, 30 * MIB)
        publish(reused, small)
        del reused, small
        gc.collect()
        others = [filled(30 * MIB, 100 + at) for at in range(20)] + [filled(1000, 7) for _ in range(2000)]
        torch.cuda.empty_cache()
        others += [filled(30 * MIB, 200 + at) for at in range(20)]
        facts["figures"] = figures()
    after = [filled(30 * MIB, 50) for _ in range(5)]
    with shared.pool():
        after += [filled(30 * MIB, 60) for _ in range(20)]
    torch.cuda.synchronize()
    expect(reader.digest(reader.offset, 30 * MIB) == published, "what is published stays, its tensor deleted")
    offset = reader_of_small.offset
    expect(reader_of_small.digest(offset, 1000) == digest_of(2, 1000), "a small one too")
    # The same with the block inside a segment of PyTorch's, in another thread's pool.
    inside, leave = threading.Event(), threading.Event()
    found: dict[str, Any] = {}

    def other_thread() -> None:
        with shared.pool():
            found["tensor"] = filled(3 * MIB, 21)
            inside.set()
            leave.wait(60)
            found["later"] = [filled(3 * MIB, 22) for _ in range(30)]

    thread = threading.Thread(target=other_thread)
    thread.start()
    inside.wait(60)
    tensor = found.pop("tensor")
    third = Reader(tensor.data_ptr())
    publish(tensor)
    del tensor
    gc.collect()
    leave.set()
    thread.join()
    torch.cuda.synchronize()
    expect(third.digest(third.offset, 3 * MIB) == digest_of(21, 3 * MIB), "what another thread's pool has is held")
    for one in (reader, reader_of_small, third):
        one.close()
    expect(int(others[0][0]) == 100 and int(after[-1][-1]) == 60, "others hold what was written")


@case
def descriptors_of_8_gib() -> None:
    import torch
    from vmmfd.torch import pool

    each = 8 * GIB // 288 // 2
    torch.cuda.init()
    before, descriptors = used(), len(os.listdir("/proc/self/fd"))
    begun = time.perf_counter()
    with pool():
        tensors = [torch.empty(each, dtype=torch.bfloat16, device="cuda") for _ in range(288)]
    facts["allocated_in_ms"] = round(1e3 * (time.perf_counter() - begun), 2)
    facts["figures"] = figures()
    facts["descriptors"] = len(os.listdir("/proc/self/fd")) - descriptors
    facts["tensors_gib"] = round(288 * each * 2 / GIB, 3)
    facts["taken_gib"] = round((used() - before) / GIB, 3)
    expect(facts["descriptors"] <= 40, "at most 40 descriptors for 8 GiB")
    expect(facts["taken_gib"] < 1.1 * facts["tensors_gib"], "at most a tenth more memory than the tensors have")
    del tensors
    torch.cuda.empty_cache()
    begun = time.perf_counter()
    plain = [torch.empty(each, dtype=torch.bfloat16, device="cuda") for _ in range(288)]
    facts["without_the_pool_ms"] = round(1e3 * (time.perf_counter() - begun), 2)
    del plain
    torch.cuda.empty_cache()
    # Shapes as models have them: exact multiples of 2 MiB.
    with pool():
        tensors = [torch.empty(16 * MIB, dtype=torch.bfloat16, device="cuda") for _ in range(256)]
    facts["figures_of_32_mib_each"] = figures()
    expect(figures()["arenas"] <= 20, "8 GiB of 32 MiB each are at most 20 arenas")


@case
def memory_runs_out() -> None:
    import torch
    from vmmfd.torch import pool

    try:
        with pool():
            live = filled(1000, 1)
            torch.empty(10 << 40, dtype=torch.uint8, device="cuda")
        expect(False, "10 TiB can't be had")
    except torch.OutOfMemoryError as error:
        facts["message"] = str(error)[:200]
        facts["notes"] = getattr(error, "__notes__", [])
        expect(len(facts["notes"]) == 1, "the error has our note")
    expect(int(live[0]) == 1, "tensors before are whole")
    with pool():
        again = filled(30 * MIB, 2)
    expect(in_arena(again), "and the pool works on")


@case
def read_only_for_its_maker() -> None:
    import torch
    from vmmfd import _native
    from vmmfd.torch import pool

    with pool():
        weight = filled(30 * MIB, 3)
    out = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out.copy_(weight)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        out.copy_(weight)
    found = _native.torch_pool_find(weight.data_ptr())
    assert found is not None
    _native.make_read_only(found[0])
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    expect(int(out[-1]) == 3 and int(weight[0]) == 3, "it is read as before, by a captured graph too")
    try:
        weight.fill_(9)
        torch.cuda.synchronize()
        expect(False, "a write is a fault")
    except RuntimeError as error:
        facts["write"] = str(error).splitlines()[0]


@case
def threads() -> None:
    import torch
    from vmmfd.torch import pool

    problems: list[str] = []
    kept: list[tuple[int, Any]] = []

    def work(number: int) -> None:
        try:
            for round_ in range(10):
                with pool():
                    tensors = [filled((1 + round_) * MIB, number) for _ in range(10)]
                    if not all(map(in_arena, tensors)):
                        problems.append(f"thread {number}, round {round_}: not in an arena")
                kept.append((number, tensors[0]))
                del tensors
                if round_ % 3 == number % 3:
                    torch.cuda.empty_cache()
        except Exception as error:
            problems.append(f"thread {number}: {error!r}")

    started = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    facts["problems"] = problems[:5]
    expect(not problems, "six threads with pools at once")
    expect(all(bool((tensor == number).all()) for number, tensor in kept), "each has its own bytes")
    outcome: list[bool] = []
    with pool():
        thread = threading.Thread(target=lambda: outcome.append(in_arena(filled(30 * MIB, 1))))
        thread.start()
        thread.join()
    facts["a_thread_started_inside_uses_the_pool"] = outcome
    kept.clear()
    torch.cuda.empty_cache()
    expect(figures()["arenas"] == 0, "nothing is left")


@case
def two_devices() -> None:
    import torch
    from vmmfd import _native
    from vmmfd.torch import pool

    if torch.cuda.device_count() < 2:
        facts["skipped"] = "one device"
        return
    with pool(device="cuda:1"), pool(device=0):
        first, second = (torch.full((30 * MIB,), 7, dtype=torch.uint8, device=f"cuda:{at}") for at in range(2))
        mixed = second.to("cuda:0")
    facts["figures"] = [_native.torch_pool_figures(at) for at in range(2)]
    expect(in_arena(first) and in_arena(second) and in_arena(mixed), "each device has its arenas")
    expect(bool((mixed == 7).all()), "copies between them work")
    with pool(device=1):
        elsewhere = torch.full((30 * MIB,), 7, dtype=torch.uint8, device="cuda:0")
    expect(not in_arena(elsewhere), "a pool of device 1 leaves device 0 alone")
    del first, second, mixed
    torch.cuda.empty_cache()
    expect([_native.torch_pool_figures(at)["arenas"] for at in range(2)] == [0, 0], "nothing is left")


@case
def a_graph_is_captured() -> None:
    """Whether a graph's capture bears frees, and a wait for the context by another thread."""
    import torch
    from vmmfd.torch import pool

    cuda = ctypes.CDLL("libcuda.so.1")
    x = filled(MIB, 1)

    def capture(meanwhile: Callable[[], Any]) -> str:
        graph, done = torch.cuda.CUDAGraph(), []
        try:
            with torch.cuda.graph(graph):
                y = x + 1
                done.append(meanwhile())
                z = y + 1
            graph.replay()
            torch.cuda.synchronize()
            return f"captured, {done[0]}, {int(z[0])}"
        except RuntimeError as error:
            return f"broken, {done}: {str(error).splitlines()[0]}"

    def wait_elsewhere() -> Any:
        codes: list[int] = []
        context = ctypes.c_void_p()

        def wait() -> None:
            cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
            cuda.cuCtxSetCurrent(context)
            codes.append(cuda.cuCtxSynchronize())

        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()
        return codes

    with pool():
        tensors = [filled(30 * MIB, 2), filled(300 * MIB, 3)]

    def free() -> Any:
        tensors.pop()
        return figures()

    def allocate() -> Any:
        with pool():
            tensors.append(torch.empty(30 * MIB, dtype=torch.uint8, device="cuda"))
        return in_arena(tensors[-1])

    facts["nothing"] = capture(lambda: None)
    facts["a_deleted_tensor_of_the_pool"] = capture(free)
    facts["a_pool_inside"] = capture(allocate)
    expect(facts["a_deleted_tensor_of_the_pool"].startswith("captured"), "deleting a tensor does not break a capture")
    facts["cuCtxSynchronize_in_another_thread"] = capture(wait_elsewhere)
    facts["after_it"] = capture(lambda: None)
    torch.cuda.empty_cache()
    facts["figures"] = figures()


@case
def a_fork() -> None:
    from vmmfd import _native
    from vmmfd.torch import pool

    with pool():
        live = filled(30 * MIB, 1)
    library = ctypes.CDLL(_native.__file__)
    library.vmmfd_torch_malloc.restype = ctypes.c_void_p
    library.vmmfd_torch_malloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    library.vmmfd_torch_free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    pid = os.fork()
    if pid == 0:
        taken = library.vmmfd_torch_malloc(30 * MIB, 0, None)
        library.vmmfd_torch_free(live.data_ptr(), 30 * MIB, 0, None)
        os._exit(0 if taken is None else 1)
    expect(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, "a fork gets null")
    expect(int(live[-1]) == 1 and figures()["arenas"] == 1, "and takes nothing from its parent")


@case
def ends_with_everything_alive() -> None:
    program = """
import sys, threading, torch, vmmfd.torch
kind = sys.argv[1]
if kind == "entered":
    entered = vmmfd.torch.pool(); entered.__enter__()
    tensor = torch.ones(30 << 20, device="cuda")
else:
    with vmmfd.torch.pool():
        tensor = torch.ones(30 << 20, device="cuda")
if kind == "cycle":
    class Node: pass
    node = Node(); node.self, node.tensor = node, tensor; del tensor
if kind == "thread":
    def wait():
        global other
        with vmmfd.torch.pool():
            other = torch.ones(30 << 20, device="cuda"); started.set(); threading.Event().wait()
    started = threading.Event()
    threading.Thread(target=wait, daemon=True).start(); started.wait()
if kind == "module":
    sys.modules["kept"] = tensor
"""
    for kind in ("plain", "entered", "cycle", "thread", "module"):
        ended = subprocess.run([sys.executable, "-c", program, kind], capture_output=True, text=True, timeout=120)
        facts[kind] = [ended.returncode, ended.stderr[-300:]]
        expect(ended.returncode == 0, f"{kind}: a process ends cleanly")
        expect("panicked" not in ended.stderr, f"{kind}: nothing panics")


def main() -> int:
    if sys.argv[1:2] == ["--one"]:
        name = sys.argv[2]
        try:
            cases[name]()
        except BaseException:
            failed.append("raised: " + traceback.format_exc()[-1500:])
        print(json.dumps({"case": name, "ok": not failed, "facts": facts, "failed": failed}), flush=True)
        return 1 if failed else 0
    bad = 0
    for name in sys.argv[1:] or cases:
        begun = time.monotonic()
        try:
            ended = subprocess.run(
                [sys.executable, __file__, "--one", name], capture_output=True, text=True, timeout=180
            )
            lines = [line for line in ended.stdout.splitlines() if line.startswith('{"case"')]
            answer = json.loads(lines[-1]) if lines else {"case": name, "ok": False, "facts": {}, "failed": ["no answer"]}
            if ended.returncode not in (0, 1) or (not lines and ended.returncode == 0):
                answer["ok"] = False
                answer["failed"] = [*answer["failed"], f"ended with {ended.returncode}"]
            if not answer["ok"]:
                answer["stderr"] = ended.stderr[:1200] + " ... " + ended.stderr[-800:]
        except subprocess.TimeoutExpired:
            answer = {"case": name, "ok": False, "facts": {}, "failed": ["no answer in 180 s"]}
        answer["seconds"] = round(time.monotonic() - begun, 1)
        bad += not answer["ok"]
        print(json.dumps(answer), flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
