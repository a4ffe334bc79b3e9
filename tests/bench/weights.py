#!/usr/bin/env python3
"""Measures loading a model's weights, sharing them with other processes and replacing them: this package beside the usual ways.

Longer than 500 lines: one file runs alone on a GPU node.

Needs a GPU, PyTorch, safetensors and the wheel of vmmfd; uses fastsafetensors too, if installed. A file of bf16 tensors is written to
FOLDER and is in the page cache when the clock starts. Each figure is for one process: from an initialised PyTorch and context to the moment
when all tensors are usable and the device is synchronised.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

GIB = 1 << 30
MIB = 1 << 20


def start_cuda() -> Any:
    """Initialises PyTorch and its context, as before a load."""
    import torch

    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    return torch


def used(torch: Any) -> int:
    """Returns the bytes of device memory that all processes use."""
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def timed(torch: Any, work: Callable[[], Any]) -> tuple[float, Any]:
    torch.cuda.synchronize()
    begun = time.perf_counter()
    result = work()
    torch.cuda.synchronize()
    return time.perf_counter() - begun, result


def write_file(path: Path, count: int, size: int) -> None:
    """Writes a checkpoint of `count` bf16 tensors, `size` bytes in total, each a multiple of 256 KiB."""
    import torch
    from safetensors.torch import save_file

    each = size // count // (256 << 10) * (256 << 10)
    rows = each // 2 // 1024
    generator = torch.Generator().manual_seed(1)
    one = torch.randint(-1000, 1000, (rows, 1024), dtype=torch.int16, generator=generator)
    tensors = {f"layers.{index:03}.weight": (one + index).view(torch.bfloat16) for index in range(count)}
    save_file(tensors, path, metadata={"format": "pt"})


def read_all(path: Path) -> None:
    """Reads a file into the page cache."""
    with path.open("rb", buffering=0) as file:
        while file.read(64 * MIB):
            pass


def checksum(torch: Any, tensors: dict[str, Any]) -> int:
    """Returns a sum of all bits, to compare the results of all ways."""
    return sum(int(tensor.view(torch.int16).sum(dtype=torch.int64)) for tensor in tensors.values()) & (1 << 63) - 1


# Ways to load a file: each returns the tensors and the object that keeps them


def by_load_file(path: Path) -> tuple[dict[str, Any], Any]:
    from safetensors.torch import load_file

    return load_file(path, device="cuda"), None


def by_fastsafetensors(path: Path) -> tuple[dict[str, Any], Any]:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    loader = SafeTensorsFileLoader(SingleGroup(), "cuda:0", nogds=True)
    loader.add_filenames({0: [str(path)]})
    buffers = loader.copy_files_to_device()
    return {name: buffers.get_tensor(name) for name in buffers.key_to_rank_lidx}, (loader, buffers)


def by_vmmfd(path: Path) -> tuple[dict[str, Any], Any]:
    import torch

    import vmmfd

    weights = vmmfd.load_safetensors(path, backend="cuda")
    return {name: torch.from_dlpack(array) for name, array in weights.items()}, weights


WAYS = {"load_file": by_load_file, "fastsafetensors": by_fastsafetensors, "vmmfd": by_vmmfd}


def import_for(way: str) -> None:
    """Imports modules before the clock starts."""
    importlib.import_module({"load_file": "safetensors.torch", "fastsafetensors": "fastsafetensors", "vmmfd": "vmmfd.torch"}[way])


def load_alone(way: str, path: Path, link: Connection) -> None:
    torch = start_cuda()
    import_for(way)
    before = used(torch)
    took, (tensors, keep) = timed(torch, lambda: WAYS[way](path))
    link.send((took, used(torch) - before, checksum(torch, tensors), len(tensors)))
    del tensors, keep


def load_together(way: str, path: Path, broker: str, first: bool, link: Connection) -> None:
    """One of several processes that start at once: the first with the broker puts the file there, the others wait for it."""
    torch = start_cuda()
    import_for(way)
    link.send("ready")
    link.recv()
    if way != "vmmfd":
        took, (tensors, keep) = timed(torch, lambda: WAYS[way](path))
        waited = 0.0
    else:
        import vmmfd

        client = vmmfd.connect(broker, backend="cuda")
        begun = time.perf_counter()
        if first:
            client.put("weights", vmmfd.load_safetensors(path, backend="cuda"))
        else:
            # Waits for the version first: the figure is for a process that starts later.
            client.get("weights", wait=60).close()
        waited = time.perf_counter() - begun
        took, tensors = timed(torch, lambda: client.state_dict("weights", writable_buffers=False))
        keep = client
    link.send((took, waited))
    link.recv()
    # Afterwards, because the sums need memory.
    link.send(checksum(torch, tensors))
    link.recv()
    del tensors, keep


def receive_over_ipc(path: Path, link: Connection) -> None:
    """The consumer of PyTorch's CUDA IPC."""
    torch = start_cuda()
    import torch.multiprocessing

    link.send("ready")
    while (message := link.recv()) != "end":
        assert message == "go"
        begun = time.perf_counter()
        tensors = link.recv()
        torch.cuda.synchronize()
        took = time.perf_counter() - begun
        link.send((took, checksum(torch, tensors)))
        del tensors


def receive_over_broker(broker: str, link: Connection) -> None:
    torch = start_cuda()
    import vmmfd
    import vmmfd.torch

    client = vmmfd.connect(broker, backend="cuda")
    link.send("ready")
    while (message := link.recv()) != "end":
        name = message
        took, tensors = timed(torch, lambda: client.state_dict(name, writable_buffers=False))
        link.send((took, checksum(torch, tensors)))
        del tensors


def receive_arrays(broker: str, count: int, link: Connection) -> None:
    """`get` to `torch.Tensor` of one array, and PyTorch's IPC of a tensor of the same size."""
    torch = start_cuda()
    import torch.multiprocessing

    import vmmfd
    import vmmfd.torch

    client = vmmfd.connect(broker, backend="cuda")
    link.send("ready")
    got, gone = [], []
    for _ in range(count):
        begun = time.perf_counter()
        lease = client.get("array")
        tensor = torch.from_dlpack(lease["x"])
        got.append(time.perf_counter() - begun)
        assert int(tensor[0]) == 7
        del tensor
        lease.close()
    for _ in range(count):
        link.send("next")
        # A new tensor each time, unknown to this process.
        begun = time.perf_counter()
        tensor = link.recv()
        gone.append(time.perf_counter() - begun)
        assert int(tensor[0]) == 7
        del tensor
        torch.cuda.synchronize()
        link.send("let go")
    link.send((got, gone))


class Driver:
    """The driver calls of a switch, through ctypes, for the same segments."""

    class Location(ctypes.Structure):
        _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))

    class Properties(ctypes.Structure):
        pass

    class Access(ctypes.Structure):
        pass

    def __init__(self) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        location = Driver.Location
        Driver.Properties._fields_ = (
            ("type", ctypes.c_int), ("handles", ctypes.c_int), ("location", location), ("meta", ctypes.c_void_p),
            ("flags", ctypes.c_ubyte * 8),
        )
        Driver.Access._fields_ = (("location", location), ("flags", ctypes.c_int))

    def call(self, name: str, *arguments: Any) -> None:
        code = getattr(self.cuda, name)(*arguments)
        if code:
            raise RuntimeError(f"{name} returned {code}")

    def exchange(self, segments: int, size: int, repeats: int) -> list[float]:
        """Returns the seconds to unmap, map and set access for `count` allocations at fixed addresses."""
        u64 = ctypes.c_uint64
        properties = Driver.Properties(1, 1, Driver.Location(1, 0), None)
        address, access = u64(), Driver.Access(Driver.Location(1, 0), 1)
        self.call("cuMemAddressReserve", ctypes.byref(address), ctypes.c_size_t(segments * size), ctypes.c_size_t(0), u64(0), u64(0))
        sets = []
        for _ in range(2):
            handles = [u64() for _ in range(segments)]
            for handle in handles:
                self.call("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(size), ctypes.byref(properties), u64(0))
            sets.append(handles)
        room = ctypes.c_size_t(segments * size)

        def put(handles: list[Any]) -> None:
            for index, handle in enumerate(handles):
                self.call("cuMemMap", u64(address.value + index * size), ctypes.c_size_t(size), ctypes.c_size_t(0), handle, u64(0))
            self.call("cuMemSetAccess", address, room, ctypes.byref(access), ctypes.c_size_t(1))

        put(sets[0])
        took = []
        for repeat in range(repeats):
            self.call("cuCtxSynchronize")
            begun = time.perf_counter()
            self.call("cuMemUnmap", address, room)
            put(sets[(repeat + 1) % 2])
            took.append(time.perf_counter() - begun)
        self.call("cuMemUnmap", address, room)
        for handles in sets:
            for handle in handles:
                self.call("cuMemRelease", handle)
        self.call("cuMemAddressFree", address, room)
        return took


def switch(broker: str, path: Path, repeats: int, link: Connection) -> None:
    """New versions under a process with tensors, and the driver calls alone for as many segments."""
    torch = start_cuda()
    import vmmfd
    import vmmfd.torch

    client = vmmfd.connect(broker, backend="cuda")
    client.put("switched", vmmfd.load_safetensors(path, backend="cuda"), replace=True)
    lease = client.get("switched")
    tensors = lease.state_dict(writable_buffers=False)
    pointers = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    sizes = [memory.nbytes for memory in lease.memory()]
    client.put("switched", vmmfd.load_safetensors(path, backend="cuda"), replace=True)
    prepared = lease.prepare(newer_than=lease.version)
    prepares, switches = [], []
    for _ in range(repeats):
        took, old = timed(torch, lambda: lease.switch(prepared, exports_unused=True))
        switches.append(took)
        prepared = old
    assert pointers == {name: tensor.data_ptr() for name, tensor in tensors.items()}
    segments = sum(-(-size // GIB) for size in sizes)
    prepared = old = None
    calls = Driver().exchange(segments, GIB, repeats)
    link.send((switches, calls, segments, prepares))


# The parent


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[str]:
    """A broker of the wheel's command."""
    path = str(folder / "broker.sock")
    server = subprocess.Popen([sys.executable, "-m", "vmmfd._command", "serve", "--socket", path], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while not os.path.exists(path):
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the broker did not start")
            time.sleep(0.01)
        yield path
    finally:
        server.terminate()
        server.wait(30)


class Worker:
    def __init__(self, context: Any, target: Callable[..., None], *arguments: Any) -> None:
        self.link, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(*arguments, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def receive(self) -> Any:
        if not self.link.poll(180):
            raise RuntimeError("a process did not answer in 180 s")
        return self.link.recv()

    def end(self) -> None:
        self.process.join(60)
        if self.process.is_alive():
            self.process.kill()
            raise RuntimeError("a process did not end")


def milliseconds(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {"p50_ms": round(statistics.median(ordered) * 1e3, 3), "min_ms": round(ordered[0] * 1e3, 3), "max_ms": round(ordered[-1] * 1e3, 3)}


def report(row: str, **values: Any) -> None:
    print(json.dumps({"row": row, **values}), flush=True)


class Run(NamedTuple):
    """The sizes and counts of each row."""

    context: Any
    folder: Path
    path: Path
    tensors: int
    repeats: int
    ways: list[str]

    def worker(self, *arguments: Any) -> Worker:
        return Worker(self.context, *arguments)


def file_row(run: Run) -> None:
    # Ways alternate, so that drift affects all of them.
    took: dict[str, list[float]] = {way: [] for way in run.ways}
    sums = set()
    for _ in range(run.repeats):
        for way in run.ways:
            worker = run.worker(load_alone, way, run.path)
            seconds, memory, total, count = worker.receive()
            worker.end()
            assert count == run.tensors, (way, count)
            took[way].append(seconds)
            sums.add(total)
    assert len(sums) == 1, sums
    for way in run.ways:
        report("file to tensors, one process", way=way, **milliseconds(took[way]))


def four_row(run: Run) -> None:
    for way in run.ways:
        with serving(run.folder) as broker:
            workers = [run.worker(load_together, way, run.path, broker, index == 0) for index in range(4)]
            for worker in workers:
                assert worker.receive() == "ready"
            before = subprocess_used()
            for worker in workers:
                worker.link.send("go")
            answers = [worker.receive() for worker in workers]
            above = subprocess_used() - before
            for worker in workers:
                worker.link.send("measured")
            sums = {worker.receive() for worker in workers}
            for worker in workers:
                worker.link.send("end")
                worker.end()
            assert len(sums) == 1, sums
            report(
                "four processes from a barrier", way=way, gib_above_contexts=round(above / GIB, 2),
                first_ms=round((answers[0][0] + answers[0][1]) * 1e3, 2),
                others_ms=[round(answer[0] * 1e3, 2) for answer in answers[1:]],
            )


def other_row(run: Run) -> None:
    import torch
    import torch.multiprocessing  # noqa: F401  lets pipes carry tensors

    import vmmfd
    import vmmfd.torch  # noqa: F401

    start_cuda()
    with serving(run.folder) as broker:
        client = vmmfd.connect(broker, backend="cuda")
        client.put("weights", vmmfd.load_safetensors(run.path, backend="cuda"))
        worker = run.worker(receive_over_broker, broker)
        assert worker.receive() == "ready"
        seconds, sums = [], set()
        for _ in range(run.repeats * 4):
            worker.link.send("weights")
            one, total = worker.receive()
            seconds.append(one)
            sums.add(total)
        worker.link.send("end")
        worker.end()
        report("loaded tensors into another process", way="vmmfd", **milliseconds(seconds))
    worker = run.worker(receive_over_ipc, run.path)
    assert worker.receive() == "ready"
    seconds = []
    for _ in range(run.repeats):
        tensors, _keep = by_load_file(run.path)
        torch.cuda.synchronize()
        worker.link.send("go")
        worker.link.send(tensors)
        one, total = worker.receive()
        seconds.append(one)
        sums.add(total)
        del tensors
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()
    worker.link.send("end")
    worker.end()
    assert len(sums) == 1, sums
    report("loaded tensors into another process", way="PyTorch CUDA IPC", **milliseconds(seconds))


def switch_row(run: Run) -> None:
    with serving(run.folder) as broker:
        worker = run.worker(switch, broker, run.path, run.repeats * 10)
        switches, calls, segments, _ = worker.receive()
        worker.end()
        ours, driver = milliseconds(switches), milliseconds(calls)
        report("new version under a process, same pointers", way="vmmfd", segments=segments, **ours)
        report("new version under a process, same pointers", way="the driver's calls", segments=segments, **driver,
               ratio=round(ours["p50_ms"] / driver["p50_ms"], 2))


def array_row(run: Run) -> None:
    import torch
    import torch.multiprocessing  # noqa: F401, F811

    import vmmfd

    start_cuda()
    count = run.repeats * 40
    with serving(run.folder) as broker:
        client = vmmfd.connect(broker, backend="cuda")
        array = vmmfd.empty((2 * MIB,), "uint8", backend="cuda")
        array.copy_from(torch.full((2 * MIB,), 7, dtype=torch.uint8, device="cuda"))
        client.put("array", {"x": array})
        worker = run.worker(receive_arrays, broker, count)
        assert worker.receive() == "ready"
        for _ in range(count):
            assert worker.receive() == "next"
            tensor = torch.full((2 * MIB,), 7, dtype=torch.uint8, device="cuda")
            torch.cuda.synchronize()
            worker.link.send(tensor)
            assert worker.receive() == "let go"
            del tensor
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()
        got, gone = worker.receive()
        worker.end()
        report("one array of 2 MiB", way="vmmfd, get to torch.Tensor", **milliseconds(got))
        report("one array of 2 MiB", way="PyTorch CUDA IPC, a new tensor", **milliseconds(gone))
    rust_array_row(count)


def rust_array_row(count: int) -> None:
    """The array row again, measured by the Rust client of the commands' benchmark."""
    if shutil.which("vmmfd-bench") is None:
        print("left out: the Rust client, since vmmfd-bench is not on PATH", file=sys.stderr)
        return
    output = subprocess.run(
        [sys.executable, "-m", "vmmfd._command", "bench", "broker", "--size", "2MiB", "--count", str(count), "--json"],
        capture_output=True, text=True, check=True,
    )
    for row in json.loads(output.stdout)["rows"]:
        if row["name"] in ("get", "get of one array", "handoff, with description"):
            times = {f"{key}_ms": round(row[key] / 1e3, 3) for key in ("median", "min", "p99")}
            report("one array of 2 MiB", way=f"the Rust client, {row['name']}", **times)


ROWS = {"file": file_row, "four": four_row, "other": other_row, "switch": switch_row, "array": array_row}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="where the file is written [default: /dev/shm]")
    parser.add_argument("--size", type=float, default=8.0, help="of the weights, in GiB [default: 8]")
    parser.add_argument("--count", type=int, default=288, help="number of tensors [default: 288]")
    parser.add_argument("--repeats", type=int, default=5, help="of each figure [default: 5]")
    parser.add_argument("--rows", default=",".join(ROWS), help="which rows, separated by commas [default: %(default)s]")
    options = parser.parse_args()
    rows = options.rows.split(",")
    unknown = [row for row in rows if row not in ROWS]
    if unknown:
        parser.error(f"--rows has {unknown[0]!r}: the rows are {', '.join(ROWS)}")
    ways = [way for way in WAYS if way != "fastsafetensors" or importlib.util.find_spec("fastsafetensors")]
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="vmmfd-bench-") as made:
        path = Path(made) / "model.safetensors"
        write_file(path, options.count, int(options.size * GIB))
        read_all(path)
        describe = "import torch; print(torch.cuda.get_device_name(0)); print(torch.__version__)"
        told = subprocess.run([sys.executable, "-c", describe], capture_output=True, text=True, check=True).stdout
        device, torch_version = told.split("\n")[:2]
        report("machine", device=device, torch=torch_version, bytes=path.stat().st_size, tensors=options.count, cpus=os.cpu_count())
        run = Run(multiprocessing.get_context("spawn"), Path(made), path, options.count, options.repeats, ways)
        for row in rows:
            ROWS[row](run)


def subprocess_used() -> int:
    """Returns the bytes in use on the device, without a context in this process."""
    output = subprocess.run(
        ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"], capture_output=True, text=True, check=True
    )
    return int(output.stdout.split()[0]) * MIB


if __name__ == "__main__":
    main()
