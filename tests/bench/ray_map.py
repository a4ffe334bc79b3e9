#!/usr/bin/env python3
"""The time until a second actor has an array from Ray, on the array's node and on another, beside a get by name and an empty call.

    ray_map.py [MIB...]    needs ray, nixl and numpy; 64 and 1024 MiB by default

Two raylets and two brokers on this machine, host memory. The first actor of each node is not timed: it waits for the transfer. `goal` is
three times the get, and the call.
"""

import pathlib
import statistics
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "python" / "tests"))

import ray
import ray_rig

import vmmfd

ROUNDS = 15


class Actor:
    def nothing(self):
        pass

    def put(self, size):
        return [ray.put({"x": vmmfd.empty(size, "uint8", backend="host")}, _tensor_transport="vmmfd")]

    def first(self, refs):
        return ray.get(refs[0])["x"].nbytes

    def timed(self, refs):
        start = time.perf_counter()
        value = ray.get(refs[0])
        return time.perf_counter() - start, value["x"].nbytes

    def plain(self, size):
        """Gets an array by name. Each get is of a new object, as each read is."""
        with vmmfd.connect(backend="host") as broker:
            broker.put("plain", {"x": vmmfd.empty(size, "uint8", backend="host")}, replace=True)
            start = time.perf_counter()
            with broker.get("plain") as lease:
                found = lease["x"]
                took = time.perf_counter() - start
            del found
            broker.delete("plain")
        return took


def milliseconds(times):
    return f"{statistics.median(times) * 1e3:7.2f} ({min(times) * 1e3:.2f} to {max(times) * 1e3:.2f})"


def measure(source, actors, mib):
    times = {(place, what): [] for place in actors for what in ("first", "read", "get", "call")}
    for _ in range(ROUNDS if mib < 512 else 5):
        refs = ray.get(source.put.remote(mib << 20))
        for place, (one, two) in actors.items():
            start = time.perf_counter()
            ray.get(one.first.remote(refs))
            times[place, "first"].append(time.perf_counter() - start)
            times[place, "read"].append(ray.get(two.timed.remote(refs))[0])
            times[place, "get"].append(ray.get(two.plain.remote(mib << 20)))
            start = time.perf_counter()
            ray.get(two.nothing.remote())
            times[place, "call"].append(time.perf_counter() - start)
        del refs
    for place, where in (("a", "the array's node"), ("b", "another node")):
        goal = 3 * statistics.median(times[place, "get"]) + statistics.median(times[place, "call"])
        print(f"{mib} MiB, {where}: goal {goal * 1e3:.2f} ms")
        for what, label in (("first", "first actor"), ("read", "second actor"), ("get", "broker.get"), ("call", "empty call")):
            print(f"    {label:13}{milliseconds(times[place, what])} ms")


def main():
    ray_rig.LINGER = 100
    rig = ray_rig.Rig(pathlib.Path(tempfile.mkdtemp(prefix="vmmfd-ray-bench-")))
    try:
        for reader in rig.readers:
            ray.kill(reader)
        ray.cloudpickle.register_pickle_by_value(sys.modules["__main__"])
        kind = ray.remote(num_cpus=0, enable_tensor_transport=True)(Actor)
        actors = {place: [kind.options(resources={place: 0.01}).remote() for _ in range(2)] for place in "ab"}
        source = kind.options(resources={"a": 0.01}).remote()
        for mib in [int(each) for each in sys.argv[1:]] or [64, 1024]:
            measure(source, actors, mib)
    finally:
        rig.close()


if __name__ == "__main__":
    main()
