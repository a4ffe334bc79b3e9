#!/usr/bin/env python3
"""Ray's tensor transports `nixl` and `cuda_ipc` beside `vmmfd_torch`: the time of a read, its memory, and whether data survives its actor.

    ray_gpu.py [--cpu] [MIB...]    needs ray, nixl and torch; 64 and 1024 MiB by default

Two raylets and two brokers on this machine: node `a` has GPU 0, node `b` GPU 1, or GPU 0 if there is only one. Each actor sees both GPUs,
as UCX can map only memory of GPUs that it sees. `--cpu` uses CPU memory. Prints a JSON line for each read: `extra_mib` is how much less
memory of its GPU was free afterwards. The reader `after kill` is a new actor that reads when the source was killed. A read has a limit of
25 s.
"""

import argparse
import json
import os
import pathlib
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "python" / "tests"))

import ray
import torch
from conftest import Server
from ray.cluster_utils import Cluster

import vmmfd.ray

MIB = 1 << 20
LIMIT = 25
TRANSPORTS = ["vmmfd_torch", "cuda_ipc", "nixl"]


class Actor:
    def __init__(self, cpu):
        self.device = "cpu" if cpu else "cuda:0"
        self.kept = []
        if not cpu:
            torch.zeros(1, device=self.device)

    def free(self):
        return 0 if self.device == "cpu" else torch.cuda.mem_get_info()[0]

    def _make(self, mib, seed):
        made = torch.arange(mib * MIB // 4, dtype=torch.int32, device=self.device).add_(seed)
        if self.device != "cpu":
            torch.cuda.synchronize()
        return made

    def make_vmmfd_torch(self, mib, seed):
        return self._make(mib, seed)

    def make_nixl(self, mib, seed):
        return self._make(mib, seed)

    def make_cuda_ipc(self, mib, seed):
        return self._make(mib, seed)

    def read(self, tensor):
        self.kept.append(tensor)
        return tensor.nbytes

    def is_right(self, seed):
        """Compares all elements. Its own temporary memory is given back."""
        tensor, at = self.kept[-1], 0
        for part in tensor.split(4 * MIB):
            if not torch.equal(part, torch.arange(at, at + len(part), dtype=torch.int32, device=self.device).add_(seed)):
                return False
            at += len(part)
        return True

    def clear(self):
        self.kept.clear()
        if self.device != "cpu":
            torch.cuda.empty_cache()


class Bench:
    def __init__(self, cpu):
        self.cpu, self.seed, self.servers = cpu, 0, []
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="vmmfd-"))
        (self.folder / "ray").mkdir()
        os.environ |= {"RAY_TMPDIR": str(self.folder), "RAY_USAGE_STATS_ENABLED": "0", "NIXL_LOG_LEVEL": "ERROR"}
        count = 0 if cpu else torch.cuda.device_count()
        self.cluster = Cluster()
        for place, order in (("a", "0,1"), ("b", "1,0")):
            (self.folder / place).mkdir(exist_ok=True)
            self.servers.append(Server(self.folder / place))
            environment = {"VMMFD_BROKER_SOCKET": self.servers[-1].path}
            if not cpu:
                environment |= {"CUDA_VISIBLE_DEVICES": order if count > 1 else "0", "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
            options = {"temp_dir": str(self.folder)} if place == "a" else {}
            self.cluster.add_node(
                num_cpus=16, num_gpus=0 if cpu else 1, resources={place: 100}, object_store_memory=80 * MIB, env_vars=environment,
                include_dashboard=False, **options,
            )  # fmt: skip
        os.environ["VMMFD_BROKER_SOCKET"] = self.servers[0].path
        vmmfd.ray.register()
        ray.init(address=self.cluster.address, log_to_driver=False)
        ray.cloudpickle.register_pickle_by_value(sys.modules["__main__"])
        made = {f"make_{name}": ray.method(tensor_transport=name)(getattr(Actor, f"make_{name}")) for name in TRANSPORTS}
        self.kind = ray.remote(num_cpus=0, enable_tensor_transport=True)(type("Placed", (Actor,), made))
        print(json.dumps({"gpus": count, "torch": torch.__version__, "ray": ray.__version__}), flush=True)

    def actor(self, place):
        return self.kind.options(resources={place: 0.01}, num_gpus=0 if self.cpu else 0.05).remote(self.cpu)

    def get(self, call):
        return ray.get(call, timeout=LIMIT)

    def read(self, label, reader, ref):
        """Prints the row of one read. Returns whether the reader can be used again."""
        row = dict(label)
        try:
            start = time.perf_counter()
            self.get(reader.free.remote())
            row["call_ms"] = round((time.perf_counter() - start) * 1e3, 2)
            free = self.get(reader.free.remote())
            start = time.perf_counter()
            self.get(reader.read.remote(ref))
            row["ms"] = round((time.perf_counter() - start) * 1e3, 2)
            row["extra_mib"] = (free - self.get(reader.free.remote())) >> 20
            row["right"] = self.get(reader.is_right.remote(self.seed))
        except Exception as error:
            lines = [line for line in str(error).splitlines() if line.strip()]
            row["error"] = f"{type(error).__name__}: {' | '.join(lines[-2:])}"[:600]
        print(json.dumps(row), flush=True)
        return "error" not in row

    def measure(self, transport, sizes):
        actors = {name: self.actor(name[0]) for name in ("a source", "a first", "a second", "b first", "b second")}
        source = actors.pop("a source")
        self.get([actor.free.remote() for actor in (source, *actors.values())])
        # Starts agents, connections and contexts.
        for mib in [4, *sizes]:
            self.seed += 1
            free = self.get(source.free.remote())
            ref = getattr(source, f"make_{transport}").remote(mib, self.seed)
            ray.wait([ref], timeout=LIMIT, fetch_local=False)
            for name in list(actors):
                if not self.read({"transport": transport, "mib": mib, "reader": name, "warm": mib != 4}, actors[name], ref):
                    # Ray may have killed it.
                    del actors[name]
            self.print_source(transport, mib, source, free)
            if mib != sizes[-1]:
                del ref
                self.get([actor.clear.remote() for actor in (source, *actors.values())])
                time.sleep(1)
        new = {f"{place} after kill": self.actor(place) for place in "ab"}
        self.get([actor.free.remote() for actor in new.values()])
        ray.kill(source)
        time.sleep(2)
        for name, actor in new.items():
            self.read({"transport": transport, "mib": sizes[-1], "reader": name}, actor, ref)
        # Do the readers from before still have right bytes?
        for name, actor in actors.items():
            row = {"transport": transport, "mib": sizes[-1], "reader": name, "read before the kill": True}
            try:
                row["right"] = self.get(actor.is_right.remote(self.seed))
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {error}"[:300]
            print(json.dumps(row), flush=True)
        for actor in (*actors.values(), *new.values()):
            ray.kill(actor)

    def print_source(self, transport, mib, source, free):
        row = {"transport": transport, "mib": mib, "source": True}
        try:
            row["extra_mib"] = (free - self.get(source.free.remote())) >> 20
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"[:300]
        print(json.dumps(row), flush=True)

    def close(self):
        ray.shutdown()
        self.cluster.shutdown()
        for server in self.servers:
            server.end()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mib", nargs="*", type=int)
    parser.add_argument("--cpu", action="store_true")
    given = parser.parse_args()
    bench = Bench(given.cpu)
    try:
        for transport in TRANSPORTS:
            try:
                bench.measure(transport, given.mib or [64, 1024])
            except Exception as error:
                print(json.dumps({"transport": transport, "error": f"{type(error).__name__}: {error}"[:600]}), flush=True)
    finally:
        bench.close()


if __name__ == "__main__":
    main()
