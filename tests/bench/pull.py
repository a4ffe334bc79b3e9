#!/usr/bin/env python3
"""The time of a pull from another broker, beside NIXL's bare reads of the same bytes: into memory that is registered and was read into before,
and into new memory of memfd_create(2), which pulls use too.

    pull.py [MIB...]    needs nixl, numpy and pytest; 64, 256 and 1024 MiB by default

Two brokers and a process for the source on this machine, host memory, UCX over TCP. The reads take turns. `ratio` is the median time
of the first divided by the row's.
"""

import json
import mmap
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from base64 import b64decode

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "python" / "tests"))

import numpy as np

import vmmfd
import vmmfd.nodes

ROUNDS = 9
# On a machine with a GPU, NIXL refuses UCX without `cuda_copy`.
ENVIRONMENT = {"UCX_TLS": "tcp,cuda_copy", "NIXL_LOG_LEVEL": "ERROR", "UCX_LOG_LEVEL": "fatal"}


def source(path, mib):
    """Offers an object with a digest and one without."""
    native, broker = vmmfd._native, vmmfd.connect(path, backend="host")
    memory = native.Memory(mib << 20, backend="host")
    array = memory.array("uint8", (mib << 20,))
    np.asarray(array)[:] = 7
    node = vmmfd.nodes.Node(broker)
    for name, digest in ((f"plain-{mib}", None), (f"digest-{mib}", native.digest_of([memory]))):
        broker._native.put(name, [("all", [memory], [("x", "uint8", [mib << 20], None, 0, 0, None)], digest)])
        print(node.offer(name).decode(), flush=True)
    sys.stdin.read()


def read_once(api, peer, kind, ours, theirs):
    """Reads segments of another process with NIXL's own calls, and returns the seconds."""
    start = time.perf_counter()
    here, there = (api.get_xfer_descs(each, kind) for each in (ours, theirs))
    handle = api.initialize_xfer("READ", here, there, peer, b"", ["UCX"])
    api.transfer(handle)
    while (state := api.check_xfer_state(handle)) != "DONE":
        if state != "PROC":
            raise OSError(f"the read ended with {state}")
    took = time.perf_counter() - start
    api.release_xfer_handle(handle)
    return took


class Bare:
    """NIXL's own calls: one read of each segment."""

    def __init__(self, offer):
        api = vmmfd.nodes._import_nixl()
        self.agent = api.nixl_agent("bare", api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        fields = json.loads(offer)
        (part,), (keys,) = fields["parts"], fields["nixl"]
        self.theirs = part["segments"]
        self.peer = self.agent.add_remote_agent(b64decode(keys))
        self.allocate()

    def allocate(self):
        sizes = [size for _, size in self.theirs]
        memfd = os.memfd_create("bare")
        os.posix_fallocate(memfd, 0, sum(sizes))
        self.memory = np.frombuffer(mmap.mmap(memfd, sum(sizes)), "u1")
        os.close(memfd)
        self.ours = [(self.memory.ctypes.data + sum(sizes[:number]), size, 0) for number, size in enumerate(sizes)]
        self.registered = self.agent.register_memory([(*each, "") for each in self.ours], "DRAM", backends=["UCX"])

    def read_new(self):
        self.agent.deregister_memory(self.registered)
        self.memory = None
        start = time.perf_counter()
        self.allocate()
        return time.perf_counter() - start + self.read()

    def read(self):
        took = read_once(self.agent, self.peer, "DRAM", self.ours, [(*each, 0) for each in self.theirs])
        assert self.memory[-1] == 7
        return took


def pull(node, broker, offer):
    start = time.perf_counter()
    pulled = node.pull(offer)
    took = time.perf_counter() - start
    broker.delete(pulled.name)
    return took


def measure(servers, mib):
    command = [sys.executable, __file__, "--source", servers[0].path, str(mib)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        plain, digest = child.stdout.readline().strip(), child.stdout.readline().strip()
        with vmmfd.connect(servers[1].path, backend="host") as broker, vmmfd.nodes.Node(broker) as node:
            bare = Bare(plain)
            reads = {
                "bare read": bare.read,
                "into new memory": bare.read_new,
                "pull": lambda: pull(node, broker, plain),
                "pull, digest": lambda: pull(node, broker, digest),
            }
            times = {name: [] for name in reads}
            for number in range(ROUNDS + 1):
                for name, read in reads.items():
                    took = read()
                    # The first connects.
                    times[name] += [took] * (number > 0)
        print(f"{mib} MiB")
        for name, each in times.items():
            middle = statistics.median(each)
            ratio = statistics.median(times["bare read"]) / middle
            spread = f"{min(each) * 1e3:.0f} to {max(each) * 1e3:.0f}"
            print(f"    {name:16}{middle * 1e3:8.0f} ms ({spread}){(mib << 20) / middle / 1e9:7.2f} GB/s   ratio {ratio:.2f}", flush=True)
    finally:
        child.stdin.close()
        child.wait(30)


def main():
    from conftest import Server

    folders = [pathlib.Path(tempfile.mkdtemp(prefix="vmmfd-pull-")) for _ in range(2)]
    servers = [Server(folder) for folder in folders]
    try:
        for mib in [int(each) for each in sys.argv[1:]] or [64, 256, 1024]:
            measure(servers, mib)
    finally:
        for server in servers:
            server.end()


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    if sys.argv[1:2] == ["--source"]:
        source(sys.argv[2], int(sys.argv[3]))
    else:
        main()
