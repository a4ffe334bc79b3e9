"""Measures for how long a put keeps other Python threads from running: a second thread sleeps 0.5 ms at a time and records the longest
delay.

    python tests/bench/gil.py [--repeat 5]

It starts a broker with the installed package's command, on host memory. Each row is the median of the longest delay of each repetition, in
milliseconds. `idle` is the same without a put: the machine's own delay.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable

import numpy as np

import vmmfd

PAUSE = 0.0005


def longest_delay(work: Callable[[], object]) -> float:
    """Returns the longest time in seconds by which another thread woke up late during the work."""
    longest, done, started = 0.0, threading.Event(), threading.Event()

    def tick() -> None:
        nonlocal longest
        started.set()
        last = time.perf_counter()
        while not done.is_set():
            time.sleep(PAUSE)
            now = time.perf_counter()
            longest, last = max(longest, now - last - PAUSE), now

    ticker = threading.Thread(target=tick)
    ticker.start()
    started.wait()
    work()
    done.set()
    ticker.join()
    return longest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    repeat = parser.parse_args().repeat
    one = np.zeros(2, "f4")
    arrays = {f"layers.{number}.weight": one for number in range(50_000)}
    nested = {"layers": {str(number): {"weight": one} for number in range(50_000)}}
    # Somewhat less than 1 MiB as JSON, in small values.
    metadata = {f"key{number}": [number, number / 3, "text", None] for number in range(20_000)}
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/broker.sock"
        command = [sys.executable, "-m", "vmmfd._command", "serve", "--socket", path, "--no-keeper"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert server.stdout is not None
        server.stdout.readline()
        try:
            broker = vmmfd.connect(path, backend="host")
            rows: dict[str, Callable[[], object]] = {
                "idle": lambda: time.sleep(0.2),
                "50,000 arrays": lambda: broker.put("arrays", arrays, replace=True),
                "50,000 arrays, nested": lambda: broker.put("nested", nested, replace=True),
                "metadata of 1 MiB": lambda: broker.put("metadata", {"x": one}, metadata=metadata, replace=True),
            }
            for name, work in rows.items():
                try:
                    delays = [longest_delay(work) for _ in range(repeat)]
                except vmmfd.Error as error:
                    print(f"{name:<24} {error}")
                    continue
                print(f"{name:<24} {1000 * statistics.median(delays):6.1f} ms")
        finally:
            server.terminate()
            server.wait()
            server.stdout.close()


if __name__ == "__main__":
    main()
