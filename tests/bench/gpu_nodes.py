#!/usr/bin/env python3
"""The speed of NIXL's reads from GPU 0 to GPU 1, for memory of cuMemAlloc and of vmmfd, and of pulls. Both processes see both GPUs.

    gpu_nodes.py [--host] [--ucx NAME=FOLDER]... [MIB...]    needs nixl, numpy and pytest; 64, 1024 and 4096 MiB by default

`--ucx` measures all again with another NIXL, in FOLDER, for example with another CUDA module of UCX; its rows come before those of the
installed NIXL. `--host` uses host memory. Prints a JSON line for each row: `ratio` is its GB/s divided by those of plain memory to plain
memory with the same NIXL; `transport` has what UCX said. A process without a row for 60 s is killed.
"""

import argparse
import ctypes
import json
import os
import pathlib
import re
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from base64 import b64decode, b64encode
from contextlib import suppress

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "python" / "tests"))

import numpy as np

import vmmfd
import vmmfd._copies
import vmmfd.nodes

MIB = 1 << 20
LIMIT = 60
ROUNDS = 7
# A size is left out if one read of it would take longer.
SLOW = 20
# Source and target of each process pair.
PAIRS = [("plain", "plain"), ("vmmfd", "plain"), ("vmmfd", "vmmfd"), ("broker", "pull")]


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


class Memory:
    """Plain memory, or vmmfd's, of one GPU or the host. Its contents differ in each MiB."""

    driver = None

    def __init__(self, kind, host, device, size):
        self.kind, self.host, self.device, self.size = kind, host, device, size
        if not host:
            self.start(device)
        if kind != "plain":
            self.memory = vmmfd._native.Memory(size, backend="host" if host else "cuda", device=None if host else device)
            self.address = self.memory.address
        elif host:
            self.memory = np.empty(size, "u1")
            self.address = self.memory.ctypes.data
        else:
            address = ctypes.c_uint64()
            self.check("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
            self.address = address.value

    def free(self):
        if self.kind == "plain" and not self.host:
            self.check("cuMemFree_v2", ctypes.c_uint64(self.address))
        self.memory = None

    @classmethod
    def start(cls, device):
        if cls.driver is None:
            cls.driver = ctypes.CDLL("libcuda.so.1")
            context = ctypes.c_void_p()
            cls.check("cuInit", 0)
            cls.check("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            cls.check("cuCtxSetCurrent", context)

    @classmethod
    def check(cls, name, *arguments):
        if error := getattr(cls.driver, name)(*arguments):
            raise OSError(f"{name} failed with {error}")

    def copy(self, number, buffer, *, here):
        """Copies one MiB to the memory, or from it if `here`."""
        at = ctypes.c_uint64(self.address + number * MIB)
        ours, size = ctypes.c_void_p(buffer.ctypes.data), ctypes.c_size_t(MIB)
        if self.host:
            at = ctypes.c_void_p(at.value)
            ctypes.memmove(*((ours, at) if here else (at, ours)), MIB)
        elif here:
            self.check("cuMemcpyDtoH_v2", ours, at, size)
        else:
            self.check("cuMemcpyHtoD_v2", at, ours, size)

    def each(self):
        expected = np.random.default_rng(7).integers(0, 256, MIB, "u1")
        for number in range(self.size // MIB):
            expected[:8].view("u8")[0] = number
            yield number, expected

    def fill(self):
        for number, expected in self.each():
            self.copy(number, expected, here=False)

    def clear(self):
        zeros = np.zeros(MIB, "u1")
        for number in range(self.size // MIB):
            self.copy(number, zeros, here=False)

    def is_right(self):
        found = np.empty(MIB, "u1")
        for number, expected in self.each():
            self.copy(number, found, here=True)
            if not np.array_equal(found, expected):
                return False
        return True


def source(kind, host, socket):
    """Offers memory of each size that stdin names, until it ends."""
    # UCX's reader copies descriptors of this process: PR_SET_PTRACER, PR_SET_PTRACER_ANY.
    ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1 & 0xFFFFFFFFFFFFFFFF), 0, 0, 0)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    backend = "host" if host else "cuda"
    node = vmmfd.nodes.Node(vmmfd.connect(socket, backend=backend)) if kind == "broker" else None
    for line in sys.stdin:
        size = int(line) * MIB
        memory = Memory(kind, host, 0, size)
        memory.fill()
        if node is None:
            agent = vmmfd.nodes._Agent(progress=True)
            segments = [(memory.address, size)]
            registered = agent.register(backend, segments, 0)
            offers = [json.dumps([segments, b64encode(agent.metadata(registered)).decode()])]
        else:
            offers = []
            for name, digest in (("plain", None), ("digest", vmmfd._native.digest_of([memory.memory]))):
                arrays = [("x", "uint8", [size], None, 0, 0, None)]
                node._broker._native.put(f"{name}-{os.getpid()}-{line.strip()}", [("all", [memory.memory], arrays, digest)])
                offers.append(node.offer(f"{name}-{os.getpid()}-{line.strip()}").decode())
        print("\n".join(offers), file=out, flush=True)
        # Until the reader has finished.
        sys.stdin.readline()
        if node is None:
            agent._agent.deregister_memory(registered)
            agent.close()
        else:
            for offer in offers:
                node.withdraw(offer.encode())
            for name in ("plain", "digest"):
                node._broker.delete(f"{name}-{os.getpid()}-{line.strip()}")
        memory.free()


def reads(target, host, device, broker, size, ask):
    """Returns the rows of one size: the label, a function that reads once and returns the seconds, and one that compares the bytes."""
    backend = "host" if host else "cuda"
    if target == "pull":
        plain, digest = ask(2)
        node = vmmfd.nodes.Node(broker)

        def pull(offer, piece, compare=False):
            vmmfd._copies.PIECE = piece * MIB
            start = time.perf_counter()
            pulled = node.pull(offer, device=None if host else device, deadline=LIMIT, stall=LIMIT)
            took = time.perf_counter() - start
            if compare:
                with broker.get(pulled.name) as lease:
                    view = Memory.__new__(Memory)
                    view.host, view.address, view.size = host, lease["x"].address, size
                    if not host:
                        Memory.start(device)
                    right = view.is_right()
                broker.delete(pulled.name)
                return right
            broker.delete(pulled.name)
            return took

        for piece in (64, 256, 1024):
            yield f"pull, pieces of {piece} MiB", lambda p=piece: pull(plain, p), lambda p=piece: pull(plain, p, True)
        yield "pull, digest", lambda: pull(digest, 64), lambda: pull(digest, 64, True)
        return
    (answer,) = ask(1)
    segments, keys = json.loads(answer)
    memory, agent = Memory(target, host, device, size), vmmfd.nodes._Agent(progress=False)
    memory.clear()
    registered = agent.register(backend, [(memory.address, size)], device)
    api, kind = agent._agent, vmmfd._copies.KINDS[backend]
    peer = api.add_remote_agent(b64decode(keys))

    def read():
        return read_once(api, peer, kind, [(memory.address, size, device)], [(*segments[0], 0)])

    yield "read", read, memory.is_right
    api.remove_remote_agent(peer)
    api.deregister_memory(registered)
    agent.close()
    memory.free()


def reader(pair, host, sockets, sizes):
    """Prints the rows of a pair. The parent kills this process group at its limit."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    options = ["--host"] if host else []
    command = [sys.executable, __file__, *options, "--source", pair[0], "--sockets", *sockets, "--"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    device = 0 if host else min(1, len(vmmfd.devices("cuda")) - 1)
    broker = vmmfd.connect(sockets[1], backend="host" if host else "cuda")
    rate = {}
    for mib in sizes:
        if rate and mib * MIB / min(rate.values()) > SLOW:
            print(json.dumps({"mib": mib, "left out": f"at {min(rate.values()) / 1e9:.2f} GB/s"}), file=out, flush=True)
            continue

        def ask(count, mib=mib):
            child.stdin.write(b"%d\n" % mib)
            child.stdin.flush()
            answers = [child.stdout.readline() for _ in range(count)]
            if not all(answers):
                raise OSError("the source exited")
            return [answer.strip() for answer in answers]

        for label, read, is_right in reads(pair[1], host, device, broker, mib * MIB, ask):
            # The first connects and maps.
            first = read()
            times = [first] if first > 3 else [read() for _ in range(ROUNDS)]
            middle = statistics.median(times)
            rate[label] = mib * MIB / middle
            row = {"mib": mib, "row": label, "gb_s": round(rate[label] / 1e9, 2), "ms": round(middle * 1e3, 2)}
            row |= {"worst_ms": round(max(times) * 1e3, 2), "first_ms": round(first * 1e3, 2), "right": is_right()}
            print(json.dumps(row), file=out, flush=True)
        child.stdin.write(b"\n")
        child.stdin.flush()


def transports(log):
    """Returns the transports that UCX's tables name for reads, and the last errors."""
    lines = log.read_text(errors="replace").splitlines()
    found, title = set(), ""
    for line in lines:
        if "ucp_" in line and "|" in line:
            title = line
        elif "ucp_get" in title:
            found |= set(re.findall(r"(?:cuda_ipc|cuda_copy|rc_mlx5|tcp|cma|sysv|posix)/[\w.:]+", line))
    return sorted(found), [line[:300] for line in lines if "ERROR" in line or "Error" in line][-3:]


def measure(name, pair, options, environment, rates):
    log = pathlib.Path(tempfile.mkstemp(prefix=f"gpu-nodes-{name}-{'-'.join(pair)}-", suffix=".log")[1])
    command = [sys.executable, "-X", "faulthandler", __file__, *options[0], "--reader", *pair, *options[1]]
    with log.open("w") as errors:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, stdin=subprocess.DEVNULL, env=environment, start_new_session=True)
    label = {"ucx": name, "from": pair[0], "to": pair[1]}
    rest, ended = b"", "exited"
    while True:
        if not select.select([child.stdout], [], [], LIMIT)[0]:
            ended = f"no row in {LIMIT} s"
            break
        read = os.read(child.stdout.fileno(), 65536)
        if not read:
            break
        *lines, rest = (rest + read).split(b"\n")
        for line in map(json.loads, lines):
            if "gb_s" in line and pair == ("plain", "plain"):
                rates[line["mib"]] = line["gb_s"]
            if line.get("gb_s") and rates.get(line["mib"]):
                line["ratio"] = round(line["gb_s"] / rates[line["mib"]], 3)
            print(json.dumps(label | line), flush=True)
    with suppress(subprocess.TimeoutExpired):
        child.wait(5)
    # Also the source.
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    code = child.wait()
    used, failed = transports(log)
    print(json.dumps(label | {"transport": used, "ended": ended, "code": code, "errors": failed, "log": str(log)}), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mib", nargs="*", type=int)
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--ucx", action="append", default=[], metavar="NAME=FOLDER")
    for hidden, count in (("--source", 1), ("--reader", 2), ("--sockets", 2)):
        parser.add_argument(hidden, nargs=count, help=argparse.SUPPRESS)
    given = parser.parse_args()
    sizes = given.mib or [64, 1024, 4096]
    if given.source:
        return source(given.source[0], given.host, given.sockets[0])
    if given.reader:
        return reader(tuple(given.reader), given.host, given.sockets, sizes)
    from conftest import Server

    servers = [Server(pathlib.Path(tempfile.mkdtemp(prefix="vmmfd-gpu-nodes-"))) for _ in range(2)]
    try:
        options = [["--host"] if given.host else [], ["--sockets", *(server.path for server in servers), "--", *map(str, sizes)]]
        quiet = {"NIXL_LOG_LEVEL": "ERROR", "UCX_LOG_LEVEL": "info", "UCX_PROTO_INFO": "y"}
        for name, folder in [*(each.split("=", 1) for each in given.ucx), ("installed", "")]:
            environment = os.environ | quiet | {"PYTHONPATH": os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))}
            rates = {}
            for pair in PAIRS:
                measure(name, pair, options, environment, rates)
    finally:
        for server in servers:
            server.end()


if __name__ == "__main__":
    main()
