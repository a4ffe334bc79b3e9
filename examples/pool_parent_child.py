"""Shares a memory pool with a child process, as in cuda.core's sample of shared memory resources.

    python examples/pool_parent_child.py [--elements N] [--device ORDINAL|UUID]

The parent creates a pool and an array in it, and writes; the child maps both and adds; the parent checks. On a device without shareable
pools it prints that and exits with 0.
"""

from __future__ import annotations

import argparse
import array
import multiprocessing
import os
import sys
import tempfile

import vmmfd
import vmmfd.pool

# The longest wait of either side, in seconds.
LIMIT = 30

ADDED = 1000


def child(path: str, backend: str) -> None:
    """Maps the array that the parent serves, and adds to each element."""
    shared = vmmfd.take(path, readonly=False, wait=LIMIT, backend=backend)
    print(f"child: {shared.nbytes} bytes, mapped: {shared.is_mapped}", flush=True)
    numbers = array.array("i", shared.tobytes())
    shared.copy_from(array.array("i", [number + ADDED for number in numbers]))
    # The owner frees the pool's memory: the parent waits until this array is gone.
    del shared


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--elements", type=int, default=1024, metavar="N", help="elements of the array [default: 1024]")
    parser.add_argument("--device", default="0", metavar="ORDINAL|UUID", help="device to allocate on [default: 0]")
    options = parser.parse_args()
    backend = os.environ.get("VMMFD_BACKEND", "auto")

    try:
        pool = vmmfd.pool.Pool(max_size=max(4 * options.elements, 2 << 20), device=options.device, backend=backend)
    except vmmfd.Unsupported as error:
        print(f"not run: {error}")
        return
    print(f"parent: a pool of at most {pool.max_size} bytes on {pool.device}, mapped: {pool.is_mapped}", flush=True)

    with pool, tempfile.TemporaryDirectory() as folder:
        shared = pool.empty(options.elements, "int32")
        numbers = array.array("i", range(options.elements))
        shared.copy_from(numbers)

        path = os.path.join(folder, "pool.sock")
        process = multiprocessing.get_context("spawn").Process(target=child, args=(path, backend))
        process.start()
        (served,) = vmmfd.serve(path, shared, wait=LIMIT)
        process.join(LIMIT)
        if process.exitcode is None:
            process.kill()
            sys.exit(f"the child took more than {LIMIT} s")
        if process.exitcode != 0 or served.error:
            sys.exit(f"the child failed: exit code {process.exitcode}, {served.error}")

        found = array.array("i", shared.tobytes())
        if list(found) != [number + ADDED for number in numbers]:
            sys.exit("the child's numbers are not here")
        print(f"parent: all {options.elements} are right; the first five: {', '.join(map(str, found[:5]))}")
        del shared


if __name__ == "__main__":
    main()
