"""Passes an array to a child process by a legacy CUDA handle: Numba's `get_ipc_handle` and `open_ipc_array`, line by line.

    python examples/numba_ipc.py [--elements N] [--device ORDINAL|UUID]

The same with Numba (left) and vmmfd (right):

    array = cuda.to_device(numbers)             array = vmmfd.legacy.empty(...); array.copy_from(numbers)
    handle = array.get_ipc_handle()             handle = vmmfd.legacy.get_ipc_handle(array)
    with handle as array:                       with handle as array:
    with cuda.open_ipc_array(bytes, ...):       with vmmfd.legacy.open_ipc_array(bytes, ...):

The handles are compatible: either side may use Numba. A handle can't be opened in the process that made it.
"""

from __future__ import annotations

import argparse
import array
import multiprocessing
import os
import sys

import vmmfd
import vmmfd.legacy

# The child's time limit in seconds.
LIMIT = 30


def child(handle: vmmfd.legacy.IpcArrayHandle, device: str, backend: str) -> None:
    """Opens the array twice, by the handle and by its bytes, and doubles it."""
    with handle as opened:
        # numba.cuda.as_cuda_array(opened) and cupy.asarray(opened) share its memory.
        numbers = array.array("f", opened.tobytes())
    # For a program that received the 64 bytes and the other values in another way.
    with vmmfd.legacy.open_ipc_array(
        handle.handle, handle.shape, handle.dtype, handle.strides, handle.offset, device=device, backend=backend
    ) as opened:
        opened.copy_from(array.array("f", [2 * number for number in numbers]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--elements", type=int, default=10, metavar="N", help="elements of the array [default: 10]")
    parser.add_argument("--device", default="0", metavar="ORDINAL|UUID", help="device to allocate on [default: 0]")
    options = parser.parse_args()
    backend = os.environ.get("VMMFD_BACKEND", "auto")

    try:
        shared = vmmfd.legacy.empty(options.elements, "float32", device=options.device, backend=backend)
    except vmmfd.Unsupported as error:
        print(f"not run: {error}")
        return
    numbers = array.array("f", range(options.elements))
    shared.copy_from(numbers)
    handle = vmmfd.legacy.get_ipc_handle(shared)

    try:
        handle.open(device=options.device, backend=backend)
    except vmmfd.Invalid as error:
        print(f"in its own process: {error}")

    process = multiprocessing.get_context("spawn").Process(target=child, args=(handle, options.device, backend))
    process.start()
    process.join(LIMIT)
    if process.exitcode is None:
        process.kill()
        sys.exit(f"the child took more than {LIMIT} s")
    if process.exitcode != 0:
        sys.exit(f"the child failed with exit code {process.exitcode}")

    found = array.array("f", shared.tobytes())
    if list(found) != [2 * number for number in numbers]:
        sys.exit("the child's numbers are not here")
    print(f"doubled by the child; the first five: {', '.join(str(number) for number in found[:5])}")


if __name__ == "__main__":
    main()
