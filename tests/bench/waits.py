#!/usr/bin/env python3
"""Measures the import time of the Python package, and the delay from Ctrl-C until each wait returns, beside a bare interpreter's.

Needs the package but no GPU: starts a broker on host memory. Each figure is a median with the slowest, in milliseconds.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

# Waits by name. `socket` is the broker's.
WAITS = {
    "time.sleep": "time.sleep(600)",
    "connect": 'vmmfd.connect(socket + ".none", wait=600)',
    "get": 'broker.get("none", wait=600)',
    "claim": 'broker.claim("taken", wait=600)',
    "watch": "watch.next()",
    "serve": 'vmmfd.serve(socket + ".handoff", b"x", backend="host", wait=600)',
    "take": 'vmmfd.take(socket + ".handoff", backend="host", wait=600)',
}

PROGRAM = """
import sys, time, vmmfd
socket = sys.argv[1]
broker = vmmfd.connect(socket, backend="host")
claim = broker.claim("taken")
watch = broker.watch("none")
while True:
    try:
        print("ready", flush=True)
        WAIT
    except KeyboardInterrupt:
        print(time.monotonic(), flush=True)
"""


def shown(seconds: list[float]) -> str:
    return f"{1e3 * statistics.median(seconds):8.2f} {1e3 * max(seconds):8.2f}"


def import_times(module: str, runs: int) -> list[float]:
    """Returns the import time in a new interpreter, less the environment's own start. The first run compiles the files."""
    program = (
        f"import sys, time; sys.path[:0] = {sys.path!r}; begun = time.perf_counter(); import {module}; print(time.perf_counter() - begun)"
    )
    command = [sys.executable, "-S", "-c", program]
    return [float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(runs + 1)][1:]


def ends(wait: str, socket: str, runs: int) -> list[float]:
    """Returns the delay from the signal until the wait returned."""
    command = [sys.executable, "-c", PROGRAM.replace("WAIT", wait), socket]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        # A wait that ignores Ctrl-C is killed.
        limit = threading.Timer(60 + runs, process.kill)
        limit.start()
        taken = []
        try:
            for _ in range(runs):
                process.stdout.readline()
                time.sleep(0.15)
                sent = time.monotonic()
                process.send_signal(signal.SIGINT)
                ended = process.stdout.readline()
                if not ended:
                    raise SystemExit(f"waits: the process that waits in {wait} did not go on after Ctrl-C")
                taken.append(float(ended) - sent)
        finally:
            limit.cancel()
            process.kill()
        return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20, metavar="N", help="of each (default: 20)")
    runs = parser.parse_args().runs
    if runs < 1:
        parser.error(f"--runs {runs} is no number of runs: give 1 or more")
    if importlib.util.find_spec("vmmfd") is None:
        raise SystemExit("waits: the package vmmfd is not installed here: pip install the wheel that `make wheel` builds")
    # Ends the child processes too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    print(f"{'ms':24} {'median':>8} {'slowest':>8}")
    for module in ("json", "vmmfd"):
        print(f"{'import ' + module:24} {shown(import_times(module, runs))}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        socket = str(Path(folder) / "broker.sock")
        given = os.environ.get("VMMFD_BIN")
        command = [given] if given else [sys.executable, "-m", "vmmfd._command"]
        try:
            server = subprocess.Popen([*command, "serve", "--quiet", "--socket", socket, "--no-keeper"], stdout=subprocess.PIPE, text=True)
        except OSError as error:
            raise SystemExit(f"waits: VMMFD_BIN={given}: {error}") from None
        try:
            assert server.stdout is not None
            if "listening" not in server.stdout.readline():
                raise SystemExit("waits: the broker's server did not start")
            for name, wait in WAITS.items():
                print(f"{'Ctrl-C in ' + name:24} {shown(ends(wait, socket, runs))}", flush=True)
        finally:
            server.terminate()
            server.communicate()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
