"""Interpreter shutdown, in any order: no crash, and no lease left in the broker."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from conftest import Child, Server
from test_manners import BEGIN

import vmmfd

MAKE = """
put("there")
lease = broker.get("there")
array = lease["x"]
view = np.from_dlpack(array)
put("there", 2.0, replace=True)
prepared = lease.prepare()
claim = broker.claim("claimed")
watch = broker.watch("there")
lost = broker.on_lost(lambda what: print(what, broker, lease))
"""

ENDS = {
    "globals": MAKE,
    "main": "def main():\n" + "\n".join("    " + line for line in MAKE.splitlines()) + "\nmain()",
    "reverse": MAKE + "del broker, lease, array\nimport gc; gc.collect()",
    "cycle": MAKE + "cycle = [broker, lease, array, view, prepared, claim, watch]; cycle.append(cycle)\n"
    "class Odd: pass\nodd = Odd(); odd.me = odd; odd.all = cycle\ndel broker, lease, array, view, prepared, claim, watch",
    "modules": MAKE + "import builtins\nbuiltins.kept = (view, array, lease, prepared, broker)",
    "atexit": MAKE + "import atexit\natexit.register(lambda: (lease['x'].tobytes(), broker.list(), view.sum()))",
    "atexit_before": "import atexit\natexit.register(lambda: (view.sum(), broker.close(), lease.close()))\n" + MAKE,
    "closed": MAKE + "broker.close()",
    "all_closed": MAKE + "watch.close(); claim.close(); prepared.close(); lease.close(); broker.close()",
    "del": MAKE + "class Last:\n    def __init__(self, *things): self.things = things\n"
    "    def __del__(self): self.things[0].close()\nlast = Last(lease, broker)",
    "sys_exit": MAKE + "sys.exit(0)",
    "local": MAKE + "held = threading.local(); held.all = (view, lease, broker)",
    "thread": MAKE
    + "def other():\n    kept = broker.get('there'); held = kept['x']; np.from_dlpack(held)\n"
    "thread = threading.Thread(target=other); thread.start(); thread.join()",
    "threads_that_wait": MAKE
    + "for _ in range(4):\n    threading.Thread(target=lambda: broker.get('none', wait=60), daemon=True).start()\n"
    "threading.Thread(target=lambda: watch.next(), daemon=True).start()\ntime.sleep(0.2)",
    "threads_that_work": MAKE
    + "def work():\n    while True:\n        with broker.get('there') as one:\n            np.from_dlpack(one['x']).sum()\n"
    "for _ in range(3):\n    threading.Thread(target=work, daemon=True).start()\ntime.sleep(0.3)",
    "thread_last": MAKE
    + "def last():\n    time.sleep(0.2)\n    assert (view == 1).all() and lease['x'].tobytes()\n"
    "threading.Thread(target=last).start()\ndel broker",
}


@pytest.mark.parametrize("end", ENDS)
def test_objects_alive_at_exit(server: Server, child: Callable[..., Child], end: str) -> None:
    started = child(BEGIN + ENDS[end], server.path)
    started.end()
    # The broker holds nothing of it.
    with vmmfd.connect(server.path, backend="host") as broker:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and broker.who().leases:
            time.sleep(0.01)
        who = broker.who()
        assert not who.leases and who.totals[0].connections == 1, who
        assert isinstance(broker.claim("claimed", wait=0), vmmfd.Claim)


def test_uncaught_exception(server: Server, child: Callable[..., Child]) -> None:
    started = child(BEGIN + MAKE + "raise RuntimeError('the end')", server.path)
    started.end(1)


def test_loss_handler_at_exit(server: Server, child: Callable[..., Child]) -> None:
    """The server dies during interpreter shutdown: the connection's thread has losses to report."""
    started = child(
        BEGIN
        + """
put("there")
leases = [broker.get("there") for _ in range(20)]
broker.on_lost(lambda what: None)
broker.on_restored(lambda what: None)
say("ready")
sys.stdin.readline()
""",
        server.path,
    )
    started.wait_for("ready")
    server.kill()
    started.send_line()
    started.end()


def test_import_loads_no_large_module(child: Callable[..., Child]) -> None:
    child(
        """
import subprocess, sys

# Without `site`, which imports modules of the environment.
script = "import sys; before = set(sys.modules); sys.path[:0] = PATH; import vmmfd; maps = open('/proc/self/maps').read(); " \\
    "assert 'libcuda' not in maps; print(*(set(sys.modules) - before))"
script = script.replace("PATH", repr(sys.path))
done = subprocess.run([sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True, check=True)
heavy = {"typing", "re", "enum", "json", "datetime", "numpy", "torch", "inspect", "dataclasses", "contextlib", "asyncio", "multiprocessing"}
assert "vmmfd._native" in done.stdout.split()
assert not heavy & set(done.stdout.split()), heavy & set(done.stdout.split())
"""
    ).end()
