#!/usr/bin/env python3
"""Measures other ways to pass GPU memory between processes: PyTorch, CuPy, Numba and cuda.core.

Longer than 500 lines: one file runs alone on a GPU node.

Two processes on the first GPU. The clock runs from "the producer holds a filled, synchronised buffer, and the consumer waits" to "the
consumer holds a usable array or pointer". Afterwards, untimed, the consumer reads the buffer and releases it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.metadata
import importlib.util
import json
import math
import multiprocessing
import os
import pickle
import platform
import signal
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any, NoReturn

WARM_UP = 10
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
GRANULARITY = 2 << 20

VARIANTS = {
    "fresh": "each time a new buffer, which neither process has shared before",
    "reopened": "each time the same memory, which the consumer had opened before, and had let go of",
    "again": "each time the same buffer, which the consumer still holds open",
}


# The libraries, each imported only in the processes that use it


class Library:
    """A library as both sides use it. It holds one buffer at a time."""

    version = ""
    buffer: Any = None

    def lend(self, link: Connection) -> None: ...  # sends shared state once, before all buffers
    def borrow(self, link: Connection) -> None: ...  # receives it
    def allocate(self, size: int) -> None: ...
    def recycle(self, size: int) -> None: ...  # prepares the buffer to be sent again, in the same memory
    def fill(self, value: int) -> None: ...  # sets every byte; blocks until done
    def free(self) -> None: ...  # frees the memory
    def send(self, link: Connection) -> None: ...
    def receive(self, link: Connection, size: int) -> None: ...  # receives and opens a buffer
    def read(self, index: int) -> Any: ...  # one byte of the buffer
    def close(self) -> None: ...  # releases the received buffer


class Torch(Library):
    expandable = False

    def __init__(self) -> None:
        import torch
        import torch.multiprocessing  # so that every Pipe can carry tensors

        self._torch: Any = torch
        self.version = torch.__version__
        torch.cuda.set_device(0)
        torch.cuda.synchronize()

    def allocate(self, size: int) -> None:
        self.buffer = self._torch.empty(size, dtype=self._torch.uint8, device="cuda")
        found = {segment["is_expandable"] for segment in self._torch.cuda.memory_snapshot()}
        if found != {self.expandable}:
            raise RuntimeError(f"expandable segments: expected {self.expandable}, found {found}")

    def recycle(self, size: int) -> None:
        # A tensor keeps an event for every time it was sent; a new tensor reuses its block from PyTorch's cache.
        self.buffer = None
        self.buffer = self._torch.empty(size, dtype=self._torch.uint8, device="cuda")

    def fill(self, value: int) -> None:
        self.buffer.fill_(value)
        self._torch.cuda.synchronize()

    def free(self) -> None:
        self.buffer = None
        self._torch.cuda.ipc_collect()
        self._torch.cuda.empty_cache()

    def send(self, link: Connection) -> None:
        link.send(self.buffer)

    def receive(self, link: Connection, size: int) -> None:
        self.buffer = link.recv()

    def read(self, index: int) -> int:
        return int(self.buffer[index].item())

    def close(self) -> None:
        self.buffer = None


class ExpandableTorch(Torch):
    expandable = True

    def lend(self, link: Connection) -> None:
        # The consumer takes descriptors out of this process (pidfd_getfd). With Yama, as in Ubuntu, only an ancestor may, unless the
        # process allows it; elsewhere the call fails harmlessly.
        prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY)


class CuPy(Library):
    def __init__(self) -> None:
        import cupy
        from cupy.cuda import runtime

        self._cupy: Any = cupy
        self._runtime: Any = runtime
        self.version = cupy.__version__
        cupy.cuda.Device(0).use()
        runtime.free(0)  # makes the context

    def allocate(self, size: int) -> None:
        # The pool is empty, so this is a separate allocation: a handle opens an allocation from its start.
        self.buffer = self._cupy.empty(size, self._cupy.uint8)

    def fill(self, value: int) -> None:
        self._runtime.memset(self.buffer.data.ptr, value, self.buffer.nbytes)
        self._runtime.deviceSynchronize()

    def free(self) -> None:
        self.buffer = None
        self._cupy.get_default_memory_pool().free_all_blocks()

    def send(self, link: Connection) -> None:
        link.send_bytes(self._runtime.ipcGetMemHandle(self.buffer.data.ptr))

    def receive(self, link: Connection, size: int) -> None:
        address = self._runtime.ipcOpenMemHandle(link.recv_bytes())
        memory = self._cupy.cuda.UnownedMemory(address, size, None, 0)
        self.buffer = self._cupy.ndarray((size,), self._cupy.uint8, self._cupy.cuda.MemoryPointer(memory, 0))

    def read(self, index: int) -> int:
        return int(self._cupy.asnumpy(self.buffer[index : index + 1])[0])

    def close(self) -> None:
        address, self.buffer = self.buffer.data.ptr, None
        self._runtime.ipcCloseMemHandle(address)


class Numba(Library):
    def __init__(self) -> None:
        import numba
        import numpy
        from numba import cuda
        from numba.cuda.cudadrv import driver

        self._numpy: Any = numpy
        self._cuda: Any = cuda
        self._driver: Any = driver
        self._cuda.select_device(0)
        self._cuda.synchronize()
        self.version = numba.__version__
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            self.version += f", numba-cuda {importlib.metadata.version('numba-cuda')}"

    def allocate(self, size: int) -> None:
        self.buffer = self._cuda.device_array(size, self._numpy.uint8)

    def fill(self, value: int) -> None:
        self._driver.device_memset(self.buffer, value, self.buffer.nbytes)
        self._cuda.synchronize()

    def free(self) -> None:
        self.buffer = None
        # Numba frees in batches.
        self._cuda.current_context().memory_manager.deallocations.clear()

    def send(self, link: Connection) -> None:
        link.send(self.buffer.get_ipc_handle())

    def receive(self, link: Connection, size: int) -> None:
        # The two halves of `with handle as array`.
        self._handle = link.recv()
        self.buffer = self._handle.open()

    def read(self, index: int) -> int:
        return int(self.buffer[index])

    def close(self) -> None:
        self.buffer = None
        self._handle.close()


class CudaCore(Library):
    def __init__(self) -> None:
        import numpy
        from cuda import core
        from cuda.bindings import driver

        self._numpy: Any = numpy
        self._core: Any = core
        self._driver: Any = driver
        self.version = core.__version__
        self._device = core.Device(0)
        self._device.set_current()
        self._stream = self._device.default_stream

    def lend(self, link: Connection) -> None:
        options = self._core.DeviceMemoryResourceOptions(ipc_enabled=True)
        self._pool = self._core.DeviceMemoryResource(self._device, options)
        link.send(self._pool)

    def borrow(self, link: Connection) -> None:
        # Buffers find the pool by its UUID while it is held.
        self._pool = link.recv()

    def allocate(self, size: int) -> None:
        self.buffer = self._pool.allocate(size, stream=self._stream)

    def fill(self, value: int) -> None:
        self.buffer.fill(value, stream=self._stream)
        self._stream.sync()

    def free(self) -> None:
        self.close()

    def send(self, link: Connection) -> None:
        # Connection.send() would send the pool with each buffer.
        link.send_bytes(pickle.dumps(self.buffer))

    def receive(self, link: Connection, size: int) -> None:
        self.buffer = pickle.loads(link.recv_bytes())

    def read(self, index: int) -> int:
        byte = self._numpy.empty(1, self._numpy.uint8)
        (code,) = self._driver.cuMemcpyDtoH(byte.ctypes.data, int(self.buffer.handle) + index, 1)
        if code != self._driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"the driver says {code!r}")
        return int(byte[0])

    def close(self) -> None:
        self.buffer.close(self._stream)
        self._stream.sync()
        self.buffer = None


@dataclass(frozen=True)
class Peer:
    name: str
    library: type[Library]
    modules: tuple[str, ...]
    how: str
    variants: tuple[str, ...] = ("fresh", "reopened")
    allocator: str = ""


TENSOR = "a tensor sent through a Pipe by torch.multiprocessing's reductions, memory from "
PEERS = {
    "torch": Peer("PyTorch", Torch, ("torch",), TENSOR + "the default allocator", tuple(VARIANTS)),
    "torch-expandable": Peer(
        "PyTorch, expandable",
        ExpandableTorch,
        ("torch",),
        TENSOR + "expandable segments",
        tuple(VARIANTS),
        "expandable_segments:True",
    ),
    "cupy": Peer(
        "CuPy",
        CuPy,
        ("cupy",),
        "ipcGetMemHandle, the handle's bytes through a Pipe, ipcOpenMemHandle and an array on it",
    ),
    "numba": Peer("Numba", Numba, ("numba",), "get_ipc_handle, the IpcArrayHandle through a Pipe, opened as an array"),
    "cuda.core": Peer(
        "cuda.core",
        CudaCore,
        ("cuda.core", "cuda.bindings", "numpy"),
        "a Buffer of an IPC-enabled pool, pickled through a Pipe; the pool itself was sent once before",
    ),
}


# The two processes

Plan = list[tuple[int, str]]
"""The series to measure: sizes and variants."""

PR_SET_PDEATHSIG = 1
PR_SET_PTRACER = 0x59616D61
PR_SET_PTRACER_ANY = ctypes.c_ulong(-1).value


def prctl(option: int, value: int) -> int:
    return int(ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), *[ctypes.c_ulong(0)] * 3))


def now() -> int:
    """Nanoseconds of a clock that all processes share."""
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


def byte_of(handoff: int) -> int:
    """Returns the fill byte of a handoff: different from the previous one, and never 0."""
    return handoff % 255 + 1


def produce(library: Library, plan: Plan, count: int, link: Connection, report: Connection) -> None:
    library.lend(link)
    for size, variant in plan:
        times = []
        for handoff in range(WARM_UP + count):
            if handoff == 0 or variant == "fresh":
                library.allocate(size)
            elif variant == "reopened":
                library.recycle(size)
            library.fill(byte_of(handoff))
            link.recv_bytes()  # the consumer waits
            begin = now()
            library.send(link)
            (end,) = struct.unpack("q", link.recv_bytes())
            times.append((end - begin) / 1000)
            if variant == "fresh":
                library.free()
        if variant != "fresh":
            library.free()
        report.send(("series", (library.version, size, variant, times[WARM_UP:])))


def consume(library: Library, plan: Plan, count: int, link: Connection) -> None:
    library.borrow(link)
    for size, variant in plan:
        for handoff in range(WARM_UP + count):
            link.send_bytes(b"waiting")
            library.receive(link, size)
            end = now()
            found = [library.read(index) for index in (0, size // 2, size - 1)]
            if found != [byte_of(handoff)] * 3:
                raise ValueError(f"{variant}, {size} bytes: expected {byte_of(handoff)} in 3 bytes, found {found}")
            if variant != "again" or handoff == WARM_UP + count - 1:
                library.close()
            link.send_bytes(struct.pack("q", end))


def child(key: str, plan: Plan, count: int, link: Connection, report: Connection, gives: bool) -> None:
    """The main function of a process. Reports its series, if it produces, and its result."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # Ctrl-C reaches all processes; the parent stops this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A library's output is not a result.
    os.dup2(2, 1)
    try:
        library = PEERS[key].library()
        if gives:
            produce(library, plan, count, link, report)
        else:
            consume(library, plan, count, link)
        report.send(("done", None))
    except ModuleNotFoundError as missing:
        report.send(("missing", missing.name))
    except (EOFError, ConnectionError) as hung_up:
        report.send(("hung up", f"{type(hung_up).__name__}: {hung_up}"))
    except Exception as error:
        report.send(("failed", f"{type(error).__name__}: {error}"))


class NotRun(Exception):
    """A module that a library needs is missing."""


class Failed(Exception):
    """A library failed or returned wrong data."""


@contextlib.contextmanager
def processes(key: str, plan: Plan, count: int) -> Iterator[dict[Connection, multiprocessing.Process]]:
    """A library's two processes, by their report pipes. The block's exit waits for them, or kills them."""
    children: dict[Connection, multiprocessing.Process] = {}
    # The setting that this version of PyTorch reads, without the caller's own.
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        os.environ.pop(name, None)
        if allocator := PEERS[key].allocator:
            os.environ[name] = allocator
    try:
        for link, gives in zip(multiprocessing.Pipe(), (True, False)):
            # Closed here, so that each side notices when the other exits.
            with link:
                report, reporter = multiprocessing.Pipe(duplex=False)
                with reporter:
                    told = key, plan, count, link, reporter, gives
                    process = multiprocessing.Process(target=child, args=told, daemon=True)
                    process.start()
                    children[report] = process
        yield children
    finally:
        for report, process in children.items():
            process.kill()
            process.join()
            report.close()


Series = dict[str, Any]


def measure(key: str, sizes: list[int], count: int, timeout: float, series: list[Series]) -> None:
    """Runs a library and appends each series as it arrives."""
    peer = PEERS[key]
    for module in peer.modules:
        # A missing parent package raises, a missing module does not.
        with contextlib.suppress(ModuleNotFoundError):
            if importlib.util.find_spec(module):
                continue
        raise NotRun(f"no module named {module}")
    deadline = time.monotonic() + timeout
    with processes(key, [(size, variant) for size in sizes for variant in peer.variants], count) as running:
        hung_up = ""
        waiting = set(running)
        while waiting:
            ready = connection.wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                raise Failed(f"not done within {timeout:g} s, and killed")
            for report in waiting.intersection(ready):
                try:
                    kind, content = report.recv()
                except EOFError:
                    running[report].join(5)
                    raise Failed(f"a process ended with exit code {running[report].exitcode}") from None
                if kind == "series":
                    series.append(series_of(peer, *content))
                    continue
                waiting.discard(report)
                if kind == "missing":
                    raise NotRun(f"no module named {content}")
                if kind == "failed":
                    raise Failed(content)
                # The other side has the reason.
                hung_up = content if kind == "hung up" else hung_up
        if hung_up:
            raise Failed(hung_up)
        # Libraries clean up at process exit.
        for process in running.values():
            process.join(5)


def series_of(peer: Peer, version: str, size: int, variant: str, times: list[float]) -> Series:
    figures = {"min": min(times), "median": percentile(times, 50), "p99": percentile(times, 99)}
    figures = {name: round(time, 3) for name, time in figures.items()}
    how = f"{peer.how}; {VARIANTS[variant]}"
    named = {"name": peer.name, "version": version, "variant": variant, "how": how, "size": size}
    return {**named, "unit": "us", **figures, "count": len(times)}


def percentile(times: list[float], percent: int) -> float:
    """Returns the nearest-rank percentile."""
    return sorted(times)[math.ceil(len(times) * percent / 100) - 1]


# Output


def text_of_size(size: int) -> str:
    for unit, factor in reversed(UNITS.items()):
        if size % factor == 0:
            return f"{size // factor} {unit}"
    return f"{size} bytes"


def text_of_time(microseconds: float) -> str:
    return f"{microseconds:.1f}" if microseconds < 100 else f"{microseconds:.0f}"


def table(series: list[Series], vmmfd: list[Series], sizes: list[int]) -> Iterator[str]:
    """Returns the output lines, one block per size, with the rows of `vmmfd bench handoff --json` first."""
    ours = [{**row, "variant": row["group"]} for row in vmmfd]
    rows = [row for row in ours + series if row["size"] in sizes]
    names = max([len(row["name"]) for row in rows], default=0)
    variants = max([len(row["variant"]) for row in rows], default=0)
    for size in sizes:
        block = [row for row in rows if row["size"] == size]
        if not block:
            continue
        floor = [row["median"] for row in block if (row["name"], row["variant"]) == ("floor", "handoff")]
        reference = floor[0] if floor else min(row["median"] for row in block)
        yield f"{text_of_size(size)}: microseconds, and the median as a multiple of {'the floor' if floor else 'the fastest'}"
        heads = "".join(f"{head:>9}" for head in ("min", "median", "p99", "ratio"))
        yield f"  {'name':{names}}  {'variant':{variants}}{heads}"
        for row in block:
            times = "".join(f"{text_of_time(row[figure]):>9}" for figure in ("min", "median", "p99"))
            ratio = f"{row['median'] / reference:.2f}" if reference > 0 else "-"
            yield f"  {row['name']:{names}}  {row['variant']:{variants}}{times}{ratio:>9}"
        yield ""
    for variant, meaning in VARIANTS.items():
        if any(row["variant"] == variant for row in series):
            yield f"{variant}: {meaning}"
    for name, version, how in dict.fromkeys(
        (row["name"], row["version"], row["how"].rpartition("; ")[0]) for row in series
    ):
        yield f"{name} {version}: {how}"


def show(text: str) -> None:
    """Prints in UTF-8, even if the locale lacks a character. A closed pipe is not an error."""
    try:
        sys.stdout.buffer.write(f"{text}\n".encode())
        sys.stdout.flush()
    except BrokenPipeError:
        # Python would flush again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def complain(text: str) -> None:
    print(f"peers: {text}", file=sys.stderr, flush=True)


# The command


class NoGpu(Exception):
    """There is no GPU to measure."""


def gpu() -> str:
    """Returns the first GPU's name from the driver, without any library."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise NoGpu("there is no libcuda.so.1, which comes with NVIDIA's driver") from None
    device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    if code := cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0):
        raise NoGpu(f"the driver finds none, and says {code}")
    cuda.cuDeviceGetName(name, len(name), device)
    return name.value.decode(errors="replace")


def driver_version() -> str | None:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    version = ctypes.create_string_buffer(96)
    code = nvml.nvmlInit_v2() or nvml.nvmlSystemGetDriverVersion(version, len(version))
    return None if code else version.value.decode(errors="replace")


def size_from(text: str) -> int:
    """Parses bytes. Smaller allocations share a block, whose handle opens all of it: that would be other work."""
    number, factor = text.strip(), 1
    for unit, bytes_of_unit in UNITS.items():
        if number.endswith(unit):
            number, factor = number.removesuffix(unit).strip(), bytes_of_unit
    if not (number.isascii() and number.isdigit()) or int(number) == 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a size, such as 2MiB or 1GiB")
    if int(number) * factor % GRANULARITY:
        raise argparse.ArgumentTypeError(f"'{text}' is not a multiple of 2MiB")
    return int(number) * factor


def sizes_from(text: str) -> list[int]:
    return list(dict.fromkeys(map(size_from, text.split(","))))


def peers_from(text: str) -> list[str]:
    for key in text.split(","):
        if key not in PEERS:
            raise argparse.ArgumentTypeError(f"'{key}' is none of {', '.join(PEERS)}")
    return list(dict.fromkeys(text.split(",")))


def positive(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) == 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number above 0")
    return int(text)


def vmmfd_from(path: str) -> list[Series]:
    """Returns the rows of a `vmmfd bench --json` file that pass memory to one consumer."""
    needed: dict[str, Any] = {"group": str, "name": str, "size": int, "consumers": int, "median": (int, float)}
    try:
        with open(path, encoding="utf-8") as file:
            series = json.load(file)["rows"]
        if not all(isinstance(row[field], kind) for row in series for field, kind in needed.items()):
            raise TypeError
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise argparse.ArgumentTypeError(f"{path} is not what vmmfd bench handoff --json prints") from None
    # No other library sends a record without memory.
    groups = [row for row in series if row["group"] in ("handoff", "repeat") and row["name"] != "record"]
    return [row for row in groups if row["consumers"] == 1]


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"peers: {message}\n")


def arguments() -> argparse.Namespace:
    parser = Parser(
        prog="peers.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exit codes: 0, done; 1, a peer failed, or with --strict was not run; 2, usage; 3, no GPU.",
    )
    option = parser.add_argument
    option("--size", type=sizes_from, default="2MiB,64MiB,1GiB", help="sizes, multiples of 2MiB (default: %(default)s)")
    option(
        "--count",
        type=positive,
        default=100,
        help=f"handoffs of each kind, after {WARM_UP} more (default: %(default)s)",
    )
    option("--peers", type=peers_from, default=",".join(PEERS), help="which to measure (default: %(default)s)")
    option(
        "--vmmfd", type=vmmfd_from, default=[], metavar="FILE", help="compare with vmmfd bench handoff --json's output"
    )
    option(
        "--timeout",
        type=positive,
        default=180,
        help="seconds until a peer's processes are killed (default: %(default)s)",
    )
    option("--strict", action="store_true", help="a peer that is not run counts as failed")
    option("--json", action="store_true", help="print one object, of what was measured here, and no table")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    # As exceptions, so that every child is killed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGHUP, lambda *_: sys.exit(129))
    # Also for the children: CUDA does not survive a fork, and cuda.core warns about forks.
    multiprocessing.set_start_method("spawn")
    try:
        name, driver = gpu(), driver_version()
    except NoGpu as none:
        complain(f"no GPU: {none}")
        return 3
    series: list[Series] = []
    failed = False
    for key in options.peers:
        try:
            measure(key, options.size, options.count, options.timeout, series)
        except NotRun as reason:
            complain(f"not run: {PEERS[key].name} ({reason})")
            failed |= options.strict
        except Failed as error:
            complain(f"failed: {PEERS[key].name}: {error}")
            failed = True
    found = {"gpu": name, "driver": driver, "python": platform.python_version()}
    if options.json:
        show(json.dumps({"schema": 1, **found, "count": options.count, "warm_up": WARM_UP, "series": series}, indent=2))
    else:
        machine = f"{name}, driver {driver or 'unknown'}, Python {found['python']}"
        head = f"{machine}; {options.count} handoffs each, after {WARM_UP} to warm up", ""
        show("\n".join([*head, *table(series, options.vmmfd, options.size)]).rstrip())
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
