"""What it takes to get a file's tensors onto a GPU: `vmmfd.load_safetensors` beside what is usual, each in a process of its own.

    python gpu_load_safetensors.py [--gib 8] [--tensors 288] [--folder DIR] [--runs 3] [--threads 1,2,4,8,12,16]

One JSON object for each run: the seconds from a file in the page cache, in a process that has a context, to tensors that PyTorch
can use, with the GPU's work done. Every run compares some tensors with the file.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def write(path: Path, count: int, size: int) -> None:
    """Writes a file of bf16 matrices."""
    rows = max(1, size // count // 2 // 1024)
    each = rows * 1024 * 2
    header = {
        f"layers.{at}.weight": {"dtype": "BF16", "shape": [rows, 1024], "data_offsets": [at * each, (at + 1) * each]}
        for at in range(count)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    noise = os.urandom(16 << 20)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for at in range(count):
            left = each
            # Each begins elsewhere in the noise, so that one in the place of another is noticed.
            begin = at * 4099 % (len(noise) // 2)
            while left:
                piece = noise[begin : begin + left]
                file.write(piece)
                left -= len(piece)
                begin = 0


def read(path: Path) -> None:
    """Reads it all, so that it is in the page cache."""
    buffer = bytearray(16 << 20)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def compare(path: Path, tensors: dict[str, Any], torch: Any) -> None:
    """Compares some tensors with the file's bytes."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        names = sorted(header)
        assert sorted(tensors) == names
        for name in [*names[:: max(1, len(names) // 7)], names[-1]]:
            begin, end = header[name]["data_offsets"]
            file.seek(8 + length + begin)
            expected = torch.frombuffer(bytearray(file.read(end - begin)), dtype=torch.uint8)
            found = tensors[name].contiguous().view(torch.uint8).flatten().cpu()
            assert torch.equal(found, expected), f"{name} differs"


def one(arguments: argparse.Namespace) -> dict[str, Any]:
    """One run, in this process."""
    import torch

    path, device = arguments.file, arguments.device
    on_gpu = device != "cpu"
    if on_gpu:
        torch.zeros(1, device=device)
        torch.cuda.synchronize()
    steps: dict[str, float] = {}
    with contextlib.ExitStack() as open_until_compared:
        if arguments.one == "vmmfd":
            import vmmfd

            backend = "cuda" if on_gpu else "host"
            # The driver is open, as the context is.
            vmmfd.empty((1,), "uint8", backend=backend)
            begun = time.perf_counter()
            weights = vmmfd.load_safetensors(path, backend=backend, threads=arguments.number, digest=arguments.digest)
            steps["load_s"] = time.perf_counter() - begun
            tensors = {name: torch.from_dlpack(array) for name, array in weights.items()}
        elif arguments.one == "load_file":
            from safetensors.torch import load_file

            begun = time.perf_counter()
            tensors = load_file(path, device=device)
        else:
            from fastsafetensors import fastsafe_open

            begun = time.perf_counter()
            file = open_until_compared.enter_context(
                fastsafe_open([str(path)], nogds=True, device=device, debug_log=False)
            )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118: it is no mapping
        if on_gpu:
            torch.cuda.synchronize()
        took = time.perf_counter() - begun
        compare(path, tensors, torch)
    size = os.path.getsize(path)
    what = {"what": arguments.one, "threads": arguments.number, "digest": arguments.digest}
    times = {"s": took, **steps}
    return {**what, **{name: round(s, 4) for name, s in times.items()}, "gib_per_s": round(size / took / 2**30, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=8)
    parser.add_argument("--tensors", type=int, default=288)
    parser.add_argument("--folder", type=Path, default=None, help="where to write the file [default: a temporary one]")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", default="1,2,4,8,12,16")
    parser.add_argument("--device", default="cuda:0", help="cuda:0, or cpu to try the script")
    parser.add_argument("--one", choices=["vmmfd", "load_file", "fastsafetensors"], help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--digest", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(one(arguments)), flush=True)
        return

    cases: list[list[str]] = [["--one", "vmmfd", "--number", number] for number in arguments.threads.split(",")]
    cases += [["--one", "vmmfd"], ["--one", "vmmfd", "--digest"]]
    for module, case in [("safetensors", "load_file"), ("fastsafetensors", "fastsafetensors")]:
        if importlib.util.find_spec(module):
            cases.append(["--one", case])
        else:
            print(json.dumps({"what": case, "left_out": f"{module} is not installed"}), flush=True)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        path = Path(folder) / "model.safetensors"
        write(path, arguments.tensors, int(arguments.gib * 2**30))
        size = os.path.getsize(path)
        print(json.dumps({"file": size, "tensors": arguments.tensors, "cpus": os.cpu_count()}), flush=True)
        # One after the other, round after round: what else the machine does then falls on all of them.
        for _ in range(arguments.runs):
            for case in cases:
                read(path)
                command = [sys.executable, __file__, "--file", str(path), "--device", arguments.device, *case]
                ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
                if ended.returncode:
                    words = (ended.stderr.strip().splitlines() or ["it said nothing"])[-1]
                    print(json.dumps({"what": case[1], "failed": words}), flush=True)
                else:
                    print(ended.stdout.strip(), flush=True)


if __name__ == "__main__":
    main()
