"""Reads a model's weights into GPU memory once and puts them under a name, for every process on this machine.

    vmmfd serve &
    python weights_put.py models/llama /models/llama [--replace] [--digest] [--backend host]

Then it exits, and the broker keeps the memory. Other processes get the tensors with `broker.get(name)` or `broker.load(name, into=module)`.
"""

import argparse
import sys
import time

import vmmfd


def show(done: int, total: int) -> None:
    print(f"\r{done / 2**30:.2f} of {total / 2**30:.2f} GiB", end="", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="name of the object")
    parser.add_argument("paths", nargs="+", help="safetensors files, a folder with all of a model's, or an index")
    parser.add_argument("--socket", help="the broker's socket [default: the one of `vmmfd serve`]")
    parser.add_argument("--backend", default="auto", choices=["auto", "cuda", "host"])
    parser.add_argument("--device", help="the device's number or UUID [default: the first one]")
    parser.add_argument("--replace", action="store_true", help="make it the next version of a name that exists")
    parser.add_argument("--digest", action="store_true", help="compute the digest, for readers to verify")
    options = parser.parse_args()

    device = int(options.device) if options.device and options.device.isdigit() else options.device
    with vmmfd.connect(options.socket, backend=options.backend) as broker:
        if not options.replace and any(summary.name == options.name for summary in broker.list(options.name)):
            sys.exit(f"weights_put: {options.name} exists already: give --replace to make this its next version")
        begun = time.perf_counter()
        progress = show if sys.stderr.isatty() else None
        weights = vmmfd.load_safetensors(
            options.paths, backend=options.backend, device=device, digest=options.digest, progress=progress
        )
        took = time.perf_counter() - begun
        if progress:
            print("\r\x1b[K", end="", file=sys.stderr)
        # Shares the memory itself: no copy, and no second peak.
        published = broker.put(options.name, weights, replace=options.replace)
    size = weights.nbytes / 2**30
    print(f"{published.name} version {published.version}: {len(weights)} tensors, {size:.2f} GiB in {took:.2f} s")


if __name__ == "__main__":
    try:
        main()
    except vmmfd.Error as error:
        sys.exit(f"weights_put: {error}" + (f"\n{error.hint}" if error.hint else ""))
