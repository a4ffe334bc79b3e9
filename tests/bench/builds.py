#!/usr/bin/env python3
"""Compares two builds of vmmfd on one machine: builds.py OLD NEW [--rounds N] [OPTION...]

OLD and NEW are folders with `vmmfd` (and `vmmfd-bench`, if the build has one). The builds take turns, and each round swaps their order. An
OPTION is passed to `vmmfd bench`: for example `--size 2MiB,1GiB --count 100`.

Each row is divided by its floor, measured in the same run: two runs differ more than two builds. `new/old` is the ratio of the medians over the
rounds. `rounds` is the lowest and the highest ratio of a single round.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys

BENCHES = ("handoff", "repeat", "broker")
# The floors of rows that a report does not divide itself.
FLOORS = {"put": "send", "put of 65 segments": "send of 65 segments", "get": "handoff"}
# Rows that do not measure the product.
BARE = {"floor", "handoff", "unmap, map and set access"}
DEADLINE = 300


def measure(folder, options):
    """Returns the rows of one run: the median in microseconds, and its ratio to the floor."""
    rows = {}
    for bench in BENCHES:
        command = [folder / "vmmfd", "bench", bench, "--json", *options]
        run = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=DEADLINE, check=True)
        series = {(each["name"], each["size"]): each for each in json.loads(run.stdout)["series"]}
        for (name, size), each in series.items():
            floor = series.get((FLOORS.get(name), size))
            ratio = each["p50_us"] / floor["p50_us"] if floor else each["ratio"]
            if ratio and name not in BARE:
                rows[bench, name, size] = (each["p50_us"], ratio)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=pathlib.Path)
    parser.add_argument("new", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=4)
    arguments, options = parser.parse_known_args()
    builds = (arguments.old.resolve(), arguments.new.resolve())
    runs = ([], [])
    for number in range(arguments.rounds):
        for which in (0, 1) if number % 2 == 0 else (1, 0):
            runs[which].append(measure(builds[which], options))
        print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr, flush=True)
    print(f"{'row':44}{'old us':>9}{'new us':>9}{'old':>7}{'new':>7}{'new/old':>9}  rounds")
    for row in runs[1][0]:
        if any(row not in run for build in runs for run in build):
            continue
        (old_time, old), (new_time, new) = ([statistics.median(run[row][k] for run in build) for k in (0, 1)] for build in runs)
        single = [after[row][1] / before[row][1] for before, after in zip(*runs)]
        bench, name, size = row
        label = f"{bench}: {name}" + f", {size >> 20} MiB" * bool(size)
        print(f"{label:44}{old_time:9.1f}{new_time:9.1f}{old:7.2f}{new:7.2f}{new / old:9.3f}  {min(single):.2f} to {max(single):.2f}")


if __name__ == "__main__":
    main()
