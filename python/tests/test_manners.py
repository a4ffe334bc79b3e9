"""Signals and threads."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from conftest import Child, Server

# The start of a child: `broker` is connected to the given path.
BEGIN = """
import os, signal, sys, threading, time
import numpy as np
import vmmfd

def put(name, value=1.0, **options):
    return broker.put(name, {"x": np.full(8, value, dtype="f4")}, **options)

def say(word):
    print(word, flush=True)

broker = vmmfd.connect(sys.argv[1], backend="host", timeout=30)
"""

# Waits longer than a child may live, and reports the interrupt.
INTERRUPTED = """
for _ in range(3):
    try:
        say("ready")
        WAIT
        say("it was over")
    except KeyboardInterrupt:
        say("interrupted")
"""

WAITS = {
    "get": 'broker.get("none", wait=6000)',
    "get_all": 'broker.get_all(["none", "nor/this"], wait=float("inf"))',
    "claim": 'broker.claim("taken", wait=6000)',
    "watch": "watch.next()",
    "iteration": "next(watch)",
    "put": 'put("half", part="a", parts=["a", "b"], group="g", wait=6000)',
    "prepare": 'lease.prepare(wait=6000)',
    "unpark": 'parked.unpark(version=77, wait=6000)',
    "connect": 'vmmfd.connect(sys.argv[1] + ".none", wait=6000)',
}

# A lease that must survive the interrupted waits of its connection. The broker would delete its name without it.
HELD = """
restored = []
broker.on_restored(restored.append)
maker = vmmfd.connect(sys.argv[1], backend="host")
maker.put("model", {"x": np.ones(8)}, lifetime="leased")
held = broker.get("model")
maker.close()
"""

STILL_HELD = """
deadline = time.monotonic() + 60
while not held.is_held and time.monotonic() < deadline:
    time.sleep(0.01)
assert held.is_held and broker.get("model").version == 1 and len(broker.who("model").leases) == 1, broker.who()
"""

SETUP = """
watch = broker.watch("none")
claim = broker.claim("taken")
put("there"); lease = broker.get("there")
put("other"); parked = broker.get("other"); parked.park()
"""


def interrupt(child: Child) -> None:
    """Interrupts each of its waits."""
    for _ in range(3):
        child.wait_for("ready")
        time.sleep(0.15)
        child.signal(signal.SIGINT)
        assert child.process.stdout is not None
        assert child.process.stdout.readline() == "interrupted\n"


@pytest.mark.parametrize("wait", WAITS)
def test_ctrl_c_interrupts_wait(server: Server, child: Callable[..., Child], wait: str) -> None:
    code = BEGIN + SETUP + HELD + INTERRUPTED.replace("WAIT", WAITS[wait]) + STILL_HELD + "assert not restored, restored"
    started = child(code, server.path)
    interrupt(started)
    started.end()


@pytest.mark.parametrize("call", ["get", "list", "put", "stat", "delete", "connect"])
def test_ctrl_c_with_stopped_server(server: Server, child: Callable[..., Child], call: str) -> None:
    calls = {
        "get": 'broker.get("there")',
        "list": "broker.list()",
        "put": 'put("new")',
        "stat": 'broker.stat("there")',
        "delete": 'broker.delete("there")',
        "connect": "vmmfd.connect(sys.argv[1])",
    }
    code = BEGIN + 'put("there")\n' + HELD + 'say("stop it")\nsys.stdin.readline()\n' + INTERRUPTED
    code += 'say("go on")\n' + STILL_HELD
    started = child(code.replace("WAIT", calls[call]), server.path)
    started.wait_for("stop it")
    server.pause()
    started.send_line()
    interrupt(started)
    started.wait_for("go on")
    server.go_on()
    started.end()


def test_descriptor_limit_ends_no_lease(server: Server, child: Callable[..., Child]) -> None:
    started = child(
        BEGIN
        + """
import resource
# Each array in its own segment.
broker.put("four", {str(i): vmmfd.asarray(np.ones(8), backend="host") for i in range(4)})
"""
        + HELD
        + """
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
for room in range(6):
    used = len(os.listdir("/proc/self/fd")) - 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + room, hard))
    try:
        broker.get("four")
        assert room >= 4, room
    except vmmfd.Error as error:
        assert "open files" in str(error) or "EMFILE" in str(error) or "Too many open files" in str(error), (room, error)
    assert held.is_held
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
"""
        + STILL_HELD,
        server.path,
    )
    started.end()


def test_signal_on_another_thread_interrupts(server: Server, child: Callable[..., Child]) -> None:
    """The main thread gets no EINTR: its wait must poll."""
    started = child(
        BEGIN
        + """
def send():
    time.sleep(0.2)
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)
for _ in range(3):
    thread = threading.Thread(target=send)
    try:
        thread.start()
        broker.get("none", wait=6000)
    except KeyboardInterrupt:
        say("interrupted")
    thread.join()
""",
        server.path,
    )
    assert started.end() == "interrupted\n" * 3


def test_client_works_after_ctrl_c(server: Server, child: Callable[..., Child]) -> None:
    started = child(
        BEGIN
        + """
lost, restored = [], []
broker.on_lost(lost.append)
broker.on_restored(restored.append)
put("there")
lease = broker.get("there")
view = np.from_dlpack(lease["x"])
claim = broker.claim("mine")
for _ in range(3):
    try:
        say("ready")
        broker.get("none", wait=6000)
    except KeyboardInterrupt:
        say("interrupted")
assert broker.list() and broker.get("there").version == 1
deadline = time.monotonic() + 60
while not lease.is_held and time.monotonic() < deadline:
    time.sleep(0.01)
assert lease.is_held and (view == 1).all() and not lost, lost
assert len(broker.who("there").leases) == 1, broker.who()
# No interrupted wait used the claim's connection.
try:
    broker.claim("mine", wait=0)
except vmmfd.NotFound:
    say("the claim is held")
""",
        server.path,
    )
    for _ in range(3):
        started.wait_for("ready")
        time.sleep(0.1)
        started.signal(signal.SIGINT)
        started.wait_for("interrupted")
    assert "the claim is held" in started.end()


def test_handler_may_make_calls(server: Server, child: Callable[..., Child]) -> None:
    started = child(
        BEGIN
        + """
def handler(number, frame):
    say(f"in the handler: {len(broker.list())}")
    put("awaited")
signal.signal(signal.SIGUSR1, handler)
say("ready")
assert broker.get("awaited", wait=6000).version == 1
say("got it")
""",
        server.path,
    )
    started.wait_for("ready")
    time.sleep(0.2)
    started.signal(signal.SIGUSR1)
    assert "in the handler: 0\ngot it" in started.end()


def test_handler_may_raise(server: Server, child: Callable[..., Child]) -> None:
    started = child(
        BEGIN
        + """
class Enough(Exception): pass
def handler(number, frame):
    raise Enough("of it")
signal.signal(signal.SIGALRM, handler)
try:
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    broker.get("none", wait=6000)
except Enough as error:
    say(f"enough {error}")
# Signals whose handlers do not raise have no effect.
signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
began = time.monotonic()
try:
    broker.get("none", wait=0.5)
except vmmfd.Timeout:
    assert time.monotonic() - began >= 0.5
    say("timed out")
signal.setitimer(signal.ITIMER_REAL, 0)
""",
        server.path,
    )
    assert started.end() == "enough of it\ntimed out\n"


def test_other_threads_ignore_ctrl_c(server: Server, child: Callable[..., Child]) -> None:
    started = child(
        BEGIN
        + """
import queue
got = queue.Queue()
threading.Thread(target=lambda: got.put(broker.get("late", wait=6000))).start()
time.sleep(0.1)
try:
    say("ready")
    time.sleep(6000)
except KeyboardInterrupt:
    say("interrupted")
put("late")
assert got.get().version == 1
""",
        server.path,
    )
    started.wait_for("ready")
    time.sleep(0.1)
    started.signal(signal.SIGINT)
    assert "interrupted" in started.end()


def test_waits_release_the_gil(server: Server, child: Callable[..., Child]) -> None:
    started = child(
        BEGIN
        + """
# A thread only runs when another releases the GIL.
sys.setswitchinterval(6000)
def work():
    going.wait()
    for _ in range(1000):
        pass
    put("late")
going = threading.Event()
thread = threading.Thread(target=work)
thread.start()
going.set()
# The other thread's put completes the wait.
assert broker.get("late", wait=6000).version == 1
thread.join()
""",
        server.path,
    )
    started.end()


def test_calls_are_concurrent(server: Server, child: Callable[..., Child]) -> None:
    started = child(
        BEGIN
        + """
threads = [threading.Thread(target=lambda: broker.get("late", wait=6000).close()) for _ in range(20)]
for thread in threads:
    thread.start()
time.sleep(0.3)
broker.list(); put("other"); broker.get("other").close()
put("late")
for thread in threads:
    thread.join()
""",
        server.path,
    )
    started.end()


ALLOCATIONS = {
    "empty": "vmmfd.empty(SIZE, 'uint8', backend='host')",
    "copy": "repeated.copy()",
    "put": "broker.put('large', {'x': np.broadcast_to(np.uint8(7), SIZE)})",
}


@pytest.mark.parametrize("call", ALLOCATIONS)
def test_ctrl_c_interrupts_allocation(server: Server, child: Callable[..., Child], call: str) -> None:
    program = """
        import os, signal, sys
        import numpy as np, vmmfd

        SIZE = 2 << 30
        committed = []

        class Interrupt(BaseException):
            pass

        def largest():
            sizes = [0]
            for fd in os.listdir("/proc/self/fd"):
                try:
                    if "memfd:vmmfd" in os.readlink(f"/proc/self/fd/{fd}"):
                        sizes.append(os.stat(f"/proc/self/fd/{fd}").st_blocks * 512)
                except FileNotFoundError:
                    pass
            return max(sizes)

        def interrupt(*_):
            committed.append(largest())
            raise Interrupt

        broker = vmmfd.connect(sys.argv[1], backend="host")
        repeated = vmmfd._native.Memory(1 << 20, backend="host").array("uint8", (2048, 1 << 20), (0, 1))
        signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        try:
            eval(sys.argv[2])
        except Interrupt:
            pass
        assert 0 < committed[0] < 1 << 30, committed
        assert largest() <= 2 << 20, "the memory was not released"
        """
    child(program, server.path, ALLOCATIONS[call]).end()


@pytest.mark.parametrize("stopped", [False, True], ids=["", "stopped"])
def test_close_interrupts_waits_of_threads(server: Server, child: Callable[..., Child], stopped: bool) -> None:
    started = child(
        BEGIN
        + """
ended = []
def wait():
    try:
        broker.get("none", wait=6000)
    except vmmfd.Interrupted as error:
        ended.append(str(error))
threads = [threading.Thread(target=wait) for _ in range(4)]
for thread in threads:
    thread.start()
time.sleep(0.3)
say("ready")
sys.stdin.readline()
broker.close()
for thread in threads:
    thread.join()
assert ended == ["the connection is closed: connect again"] * 4, ended
""",
        server.path,
    )
    started.wait_for("ready")
    if stopped:
        server.pause()
    started.send_line()
    started.end()


def test_closed_standard_descriptors_stay_closed(server: Server) -> None:
    program = """
import os, sys
import numpy as np
import vmmfd

for number in range(3):
    os.close(number)
broker = vmmfd.connect(sys.argv[1], backend="host")
broker.put("closed", {"x": np.arange(3)})
lease = broker.get("closed")
with broker.watch() as watch:
    watch.fileno()
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            continue
        os._exit(1 + number)
os._exit(10)
"""
    assert subprocess.run([sys.executable, "-c", program, server.path], timeout=60).returncode == 10
