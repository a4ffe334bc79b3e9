"""Nodes of Ray on one machine, each with a raylet, a broker and actors."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import ray
import vmmfd
import vmmfd._ray_agent as ray_agent
import vmmfd.ray

from conftest import LIMIT, Server

MIB = 1 << 20
LINGER = 8.0
# So that no answer is late.
STALL = 100.0
# UCX's and NIXL's messages go to stderr. Ray runs actors with niceness 15: they would hardly run beside other busy processes.
OPTIONS = {
    "UCX_TLS": "tcp",
    "NIXL_LOG_LEVEL": "ERROR",
    "UCX_LOG_LEVEL": "fatal",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
}


class Reader:
    """An actor. Its checks are of bytes that depend on the object."""

    def nothing(self) -> None:
        pass

    def read(self, value: Any) -> tuple[int, bool, bool]:
        array = value["x"]
        return int(np.asarray(array).sum(dtype="u8")), array.readonly, array.is_mapped

    def total(self, name: str) -> int:
        with vmmfd.connect(backend="host") as broker, broker.get(name) as lease:
            return int(np.asarray(lease["x"]).sum(dtype="u8"))

    def slow_manager(self) -> None:
        """From here on, another thread can see that there is no manager while one is created."""
        import time

        import ray.experimental

        class Slow(ray.experimental.RDTManager):  # type: ignore[misc]
            def __init__(self) -> None:
                time.sleep(1)
                super().__init__()

        ray.experimental.RDTManager = Slow

    def forward(self, name: str) -> Any:
        return {"x": vmmfd.connect(backend="host").get(name)["x"]}

    def put_tensor(self) -> list[Any]:
        import torch

        tensor = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).T
        return [ray.put([tensor, torch.tensor(4.0), torch.empty(0, 2)], _tensor_transport="vmmfd_torch")]

    def read_tensors(self, refs: list[Any]) -> list[Any]:
        return [(tensor.tolist(), str(tensor.dtype), tuple(tensor.shape)) for tensor in ray.get(refs[0])]

    def make(self, size: int, value: int) -> Any:
        array = vmmfd.empty(size, "uint8", backend="host")
        np.asarray(array)[:] = value
        return {"x": array, "note": "in band"}


class Rig:
    """Nodes, their brokers, and actors on the second node."""

    def __init__(
        self, folder: Path, *, places: str = "ab", readers: int = 16, actor: type = Reader, with_keeper: bool = False, stall: float = STALL
    ) -> None:
        from ray.cluster_utils import Cluster

        self.folder = Path(tempfile.mkdtemp(prefix="vmmfd-ray-"))
        self.servers = []
        self.before = dict(os.environ)
        # Ray writes the address of a cluster there, and does not create the folder.
        (self.folder / "ray").mkdir()
        os.environ.update(OPTIONS, RAY_TMPDIR=str(self.folder))
        self.cluster = Cluster()
        for place in places:
            (folder / place).mkdir()
            self.servers.append(Server(folder / place, with_keeper=with_keeper))
            # Ray fails if a socket's path is long.
            options: dict[str, Any] = {"temp_dir": str(self.folder)} if place == "a" else {}
            self.cluster.add_node(
                num_cpus=20,
                resources={place: 100},
                object_store_memory=80 * MIB,
                env_vars={"VMMFD_BROKER_SOCKET": self.servers[-1].path},
                include_dashboard=False,
                # The tests neither scale the cluster nor read the workers' logs.
                no_monitor=True,
                include_log_monitor=False,
                **options,
            )
        os.environ["VMMFD_BROKER_SOCKET"] = self.servers[0].path
        vmmfd.ray.register(linger=LINGER, stall=stall)
        ray.init(address=self.cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        # The workers can't import the tests.
        for name in {__name__, actor.__module__}:
            ray.cloudpickle.register_pickle_by_value(sys.modules[name])
        self.brokers = [vmmfd.connect(server.path, backend="host") for server in self.servers]
        self.ids = {place: node["NodeID"] for node in ray.nodes() for place in places if place in node["Resources"]}
        made = {name: getattr(actor, name) for name in ("make", "forward")}
        methods = {name: ray.method(tensor_transport="vmmfd")(method) for name, method in made.items()}
        self.kind = ray.remote(num_cpus=0, enable_tensor_transport=True)(type("Actor", (actor,), methods))
        self.readers = [self.actor("b") for _ in range(readers)]
        # Agents end at once without NIXL.
        ray.get([reader.nothing.remote() for reader in self.readers], timeout=LIMIT)
        ray.wait([agent.pulled.remote() for agent in vmmfd.ray.agents().values()], num_returns=len(places), timeout=LIMIT)

    def actor(self, place: str) -> Any:
        return self.kind.options(resources={place: 0.01}).remote()

    def pulled(self, place: str, origin: str | None = None) -> list[Any]:
        """The transfers to a node."""
        done = get(vmmfd.ray.agents()[self.ids[place]].pulled.remote())
        return [each for each in done if origin in (None, each["origin"])]

    def pid(self, place: str) -> int:
        """The process of the node's agent."""
        return int(get(vmmfd.ray.agents()[self.ids[place]].__ray_call__.remote(lambda self: os.getpid())))

    def close(self) -> None:
        for broker in (*self.brokers, *ray_agent._brokers.values()):
            broker.close()
        for agent in vmmfd.ray.agents().values():
            ray.kill(agent)
        ray.shutdown()
        self.cluster.shutdown()
        for server in self.servers:
            server.end()
        os.environ.clear()
        os.environ.update(self.before)
        shutil.rmtree(self.folder, ignore_errors=True)


def get(call: Any) -> Any:
    return ray.get(call, timeout=LIMIT)


def origin_of(ref: Any) -> str:
    """Waits until an `ObjectRef`'s array is put, and returns the id of its object."""
    meta = ray._private.worker.global_worker.rdt_manager.wait_for_tensor_transport_metadata(ref.hex(), LIMIT)
    return str(meta.objects[0].origin)
