"""Shares an array between Ray actors of two nodes, both on this machine: two raylets, and two brokers that listen at these paths.

    share_ray.py SOCKET SOCKET    starts a Ray cluster; needs vmmfd[ray], vmmfd[nixl] and NumPy

On a real cluster, start a broker on each node before `ray start`, with VMMFD_BROKER_SOCKET in its environment if the path is not the default.
"""

import logging
import os
import sys
from typing import Any

import numpy as np
import ray
from ray.cluster_utils import Cluster

import vmmfd
import vmmfd.ray

vmmfd.ray.register()  # Before the decorators that name the transport.

class Maker:
    @ray.method(tensor_transport="vmmfd")
    def make(self) -> dict[str, Any]:
        array = vmmfd.empty((256, 1024), "float32", backend="host")
        np.from_dlpack(array)[:] = 1
        return {"x": array, "step": 1}


class Reader:
    def read(self, value: Any) -> tuple[float, int]:
        x = np.from_dlpack(value["x"])  # the shared memory itself, read-only
        return float(x.sum()), value["step"]


def main() -> None:
    cluster = Cluster()
    for number, path in enumerate(sys.argv[1:3]):
        place: dict[str, Any] = {"env_vars": {"VMMFD_BROKER_SOCKET": path}, "resources": {f"node{number}": 100}}
        cluster.add_node(num_cpus=8, object_store_memory=80 << 20, include_dashboard=False, **place)
    os.environ["VMMFD_BROKER_SOCKET"] = sys.argv[1]
    ray.init(address=cluster.address, logging_level=logging.ERROR)
    try:
        options: dict[str, Any] = {"num_cpus": 0, "enable_tensor_transport": True}
        remote: Any = ray.remote(**options)
        maker = remote(Maker).options(resources={"node0": 1}).remote()
        readers = [remote(Reader).options(resources={"node1": 1}).remote() for _ in range(4)]
        ref = maker.make.remote()
        print("read on the other node:", ray.get([reader.read.remote(ref) for reader in readers]))
        agents = vmmfd.ray.agents()
        print("transfers:", sum(len(ray.get(agent.pulled.remote())) for agent in agents.values()))
        for agent in agents.values():
            ray.kill(agent)
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
