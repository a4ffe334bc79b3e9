"""Tries read-only arrays in each library, and prints the table of docs/python.md.

    python readonly_table.py [--backend auto|cuda|host] [--write]

Each installed library runs in its own process, with each way in which it takes foreign memory: with an array that is mapped read-only, with
the same array by promise (`writable(never_written=True)`), and with a writable array. `--write` also tries, in further processes, a store into
read-only memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import vmmfd

LIMIT = 180
NUMBERS = bytes(4096)


def numpy_ways() -> dict[str, Callable[[Any], Any]]:
    import numpy as np

    return {
        "`numpy.from_dlpack`": np.from_dlpack,
        "`numpy.asarray`": np.asarray,
        "`memoryview`": memoryview,
    }


def torch_ways() -> dict[str, Callable[[Any], Any]]:
    import torch

    ways: dict[str, Callable[[Any], Any]] = {"`torch.from_dlpack`": torch.from_dlpack}
    if options.backend == "host":
        ways["`torch.frombuffer`"] = lambda array: torch.frombuffer(array, dtype=torch.float32)
        ways["`torch.as_tensor`"] = torch.as_tensor
    else:
        ways["`torch.as_tensor(device=\"cuda\")`"] = lambda array: torch.as_tensor(array, device="cuda")
    return ways


def cupy_ways() -> dict[str, Callable[[Any], Any]]:
    import cupy

    return {"`cupy.from_dlpack`": cupy.from_dlpack, "`cupy.asarray`": cupy.asarray}


def jax_ways() -> dict[str, Callable[[Any], Any]]:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    return {"`jax.dlpack.from_dlpack`": jax.dlpack.from_dlpack, "`jax.numpy.asarray`": jax.numpy.asarray}


def numba_ways() -> dict[str, Callable[[Any], Any]]:
    from numba import cuda

    return {"`numba.cuda.as_cuda_array`": cuda.as_cuda_array}


def core_ways() -> dict[str, Callable[[Any], Any]]:
    from cuda.core import Device
    from cuda.core.utils import StridedMemoryView

    Device(0).set_current()
    return {
        "`StridedMemoryView.from_dlpack`": lambda array: StridedMemoryView.from_dlpack(array, stream_ptr=-1),
        "`StridedMemoryView.from_cuda_array_interface`": lambda array: StridedMemoryView.from_cuda_array_interface(
            array, stream_ptr=-1
        ),
    }


LIBRARIES: dict[str, tuple[str, Callable[[], dict[str, Callable[[Any], Any]]], tuple[str, ...]]] = {
    # Name: distribution, ways, backends.
    "NumPy": ("numpy", numpy_ways, ("host",)),
    "PyTorch": ("torch", torch_ways, ("cuda", "host")),
    "CuPy": ("cupy", cupy_ways, ("cuda",)),
    "JAX": ("jax", jax_ways, ("cuda", "host")),
    "Numba": ("numba", numba_ways, ("cuda",)),
    "cuda.core": ("cuda-core", core_ways, ("cuda",)),
}


def address_of(made: Any) -> int | None:
    """Returns the address of a library's array, if it exposes one."""
    for ask in (
        lambda: made.data_ptr(),
        lambda: made.ctypes.data,
        lambda: made.data.ptr,
        lambda: made.unsafe_buffer_pointer(),
        lambda: made.device_ctypes_pointer.value,
        lambda: made.ptr,
    ):
        try:
            return int(ask())
        except Exception:
            continue
    return None


def says(made: Any) -> str:
    """Returns whether the library reports the array as writable."""
    for ask in (
        lambda: not made.flags.writeable,
        lambda: made.readonly,
        lambda: made.is_readonly,
    ):
        try:
            return "read-only" if ask() else "writable"
        except Exception:
            continue
    return "says nothing"


def attempt(way: Callable[[Any], Any], array: vmmfd.Array) -> str:
    import warnings

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            made = way(array)
        except BaseException as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0][:90] if str(error) else ''}"
        address = address_of(made)
    shared = "shared" if address in (None, array.address) else "**a copy**"
    warning = f"; warns: {str(warned[0].message).splitlines()[0][:60]}" if warned else ""
    return f"{shared}, {says(made)}{warning}"


def in_child(name: str) -> None:
    """Tries one library with the arrays at a path."""
    distribution, ways, _ = LIBRARIES[name]
    readonly = vmmfd.take(options.path, backend=options.backend, wait=30)
    own = vmmfd.asarray(NUMBERS, backend=options.backend).reinterpret("float32")
    if options.way:
        write(ways()[options.way], readonly)
        return
    from importlib.metadata import version

    rows = []
    for way, call in ways().items():
        tried = [attempt(call, array) for array in (readonly, readonly.writable(never_written=True), own)]
        rows.append([way, *tried])
    named = None
    for candidate in (distribution, "cupy-cuda13x", "cupy-cuda12x", "cuda-python"):
        try:
            named = version(candidate)
            break
        except Exception:
            continue
    print(json.dumps({"version": named, "rows": rows}))


def write(way: Callable[[Any], Any], readonly: vmmfd.Array) -> None:
    """Stores into read-only memory by promise, and then uses the device again."""
    made = way(readonly.writable(never_written=True))
    try:
        made[0] = 1
        vmmfd_sync(made)
        print("the store itself succeeded?")
    except BaseException as error:
        print(f"{type(error).__name__}: {str(error).splitlines()[0][:100]}")
    try:
        vmmfd.asarray(NUMBERS, backend=options.backend).tobytes()
        print("; afterwards the device works")
    except BaseException as error:
        print(f"; afterwards nothing works: {str(error).splitlines()[0][:100]}")


def vmmfd_sync(made: Any) -> None:
    if "torch" in sys.modules and options.backend == "cuda":
        sys.modules["torch"].cuda.synchronize()
    elif "cupy" in sys.modules:
        sys.modules["cupy"].cuda.Device().synchronize()
    elif "numba" in sys.modules and options.backend == "cuda":
        from numba import cuda

        cuda.synchronize()


def run(name: str, way: str | None) -> subprocess.CompletedProcess[str]:
    """Serves the array to a child process that tries a library."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "table.sock")
        array = vmmfd.asarray(NUMBERS, backend=options.backend).reinterpret("float32")

        def serve() -> None:
            try:
                vmmfd.serve(path, array, wait=60)
            except vmmfd.Error as error:
                print(f"{name}: {error}", file=sys.stderr)

        thread = threading.Thread(target=serve)
        thread.start()
        command = [sys.executable, __file__, "--library", name, "--path", path, "--backend", options.backend]
        ran = subprocess.run(
            [*command, *(["--way", way] if way else [])], capture_output=True, text=True, timeout=LIMIT, check=False
        )
        thread.join()
        return ran


def main() -> None:
    print(f"On {vmmfd.devices(options.backend)[0]} ({options.backend}):\n")
    print("| Library | By | A read-only array | The same by `writable(\"promise\")` | An array of one's own |")
    print("|---|---|---|---|---|")
    found: list[tuple[str, str]] = []
    left_out = []
    for name, (_, _, backends) in LIBRARIES.items():
        if options.backend not in backends:
            continue
        ran = run(name, None)
        if ran.returncode != 0:
            left_out.append(f"{name}: {(ran.stderr.strip().splitlines() or ['?'])[-1][:150]}")
            continue
        result = json.loads(ran.stdout.splitlines()[-1])
        for way, *tried in result["rows"]:
            print(f"| {name} {result['version']} | {way} | {' | '.join(text.replace('|', '/') for text in tried)} |")
            found.append((name, way))
    for text in left_out:
        print(f"\nleft out: {text}")
    if options.write:
        print("\n| Library | By | A store into read-only memory |\n|---|---|---|")
        for name, way in found:
            ran = run(name, way)
            text = " ".join(ran.stdout.split()) or "nothing"
            ended = "" if ran.returncode == 0 else f" (exit code {ran.returncode})"
            print(f"| {name} | {way} | {text}{ended} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", default="auto", help="auto, cuda or host [default: auto]")
    parser.add_argument("--write", action="store_true", help="try what a store does, in processes of their own")
    parser.add_argument("--library", help=argparse.SUPPRESS)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--path", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.backend = vmmfd.devices(options.backend)[0].backend
    if options.library:
        in_child(options.library)
    else:
        main()
