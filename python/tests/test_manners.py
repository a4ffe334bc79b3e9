"""Signals, threads, forks and child processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import LIMIT, Child, Server

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
    "connect": 'vmmfd.connect(sys.argv[1] + ".none", timeout=6000)',
}

SETUP = """
watch = broker.watch("none")
claim = broker.claim("taken")
put("there"); lease = broker.get("there")
put("other"); parked = broker.get("other"); parked.park()
"""


def interrupt(child: Child) -> None:
    """Interrupts each of its waits. tests/bench/waits.py measures the delay."""
    for _ in range(3):
        child.wait_for("ready")
        time.sleep(0.15)
        child.signal(signal.SIGINT)
        assert child.process.stdout is not None
        assert child.process.stdout.readline() == "interrupted\n"


@pytest.mark.parametrize("wait", WAITS)
def test_ctrl_c_interrupts_wait(server: Server, child: Callable[..., Child], wait: str) -> None:
    started = child(BEGIN + SETUP + INTERRUPTED.replace("WAIT", WAITS[wait]), server.path)
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
    code = BEGIN + 'put("there")\nsay("stop it")\nsys.stdin.readline()\n' + INTERRUPTED
    started = child(code.replace("WAIT", calls[call]), server.path)
    started.wait_for("stop it")
    server.pause()
    started.send_line()
    interrupt(started)
    server.go_on()
    started.end()


def test_interrupt_delay_benchmark_runs() -> None:
    script = Path(__file__).resolve().parents[2] / "tests" / "bench" / "waits.py"
    ended = subprocess.run([sys.executable, script, "--runs", "1"], capture_output=True, text=True, timeout=LIMIT)
    assert (ended.returncode, ended.stderr) == (0, ""), ended
    heading, *rows = ended.stdout.splitlines()
    assert heading.split() == ["ms", "median", "slowest"] and len(rows) == 9
    assert all(0 < float(row.split()[-2]) <= float(row.split()[-1]) for row in rows), rows


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
except vmmfd.Timeout:
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


def test_use_in_fork_is_refused(server: Server, child: Callable[..., Child]) -> None:
    started = child(
        BEGIN
        + """
import warnings
# Python 3.12 warns of forks in processes with threads.
warnings.simplefilter("ignore", DeprecationWarning)
put("there")
lease = broker.get("there")
array = lease["x"]
put("there", replace=True)
prepared = lease.prepare()
watch = broker.watch()
claim = broker.claim("claimed")
pid = os.fork()
if pid == 0:
    refused = 0
    for use in (broker.list, lambda: broker.get("there"), lambda: put("more"), lambda: broker.claim("x"), lambda: broker.watch(),
                lambda: lease["x"], lambda: lease.version, lambda: list(lease), lambda: lease.park(), lambda: lease.switch(prepared),
                lambda: lease.prepare(), lambda: prepared.version, lambda: watch.next(0), lambda: watch.place,
                lambda: broker.on_lost(print)):
        try:
            use()
        except ValueError as error:
            assert "is a fork of it: " in str(error), error
            refused += 1
    assert refused == 15, refused
    assert not lease.is_held and not lease.is_closed
    # Calls that need neither the broker nor the memory work.
    assert "not usable here" in repr(lease) and "not usable here" in repr(prepared) and broker.path in repr(broker) and repr(claim)
    assert (array.shape, array.dtype, array.readonly, array[1:].ndim) and "vmmfd.Array" in repr(array)
    for use in (array.tobytes, lambda: np.from_dlpack(array), lambda: array.address):
        try:
            use()
        except vmmfd.Error as error:
            assert "is a fork of it" in str(error), error
        else:
            raise AssertionError("a fork used memory")
    lease.close(); prepared.close(); watch.close(); claim.close(); broker.close()
    del lease, array, prepared, watch, claim, broker
    # A new connection works.
    own = vmmfd.connect(sys.argv[1], backend="host")
    assert own.list()
    own.close()
    os._exit(0)
_, status = os.waitpid(pid, 0)
assert status == 0, status
# The parent is unaffected.
assert lease.is_held and lease["x"].tobytes() and array.tobytes()
assert not isinstance(broker.list(), int) and len(broker.who("there").leases) == 2
lease.switch(prepared).close()
assert watch.next(5) is not None
try:
    broker.claim("claimed", wait=0)
except vmmfd.Timeout:
    say("all is there")
""",
        server.path,
    )
    assert "all is there" in started.end()


SPAWNED = """
import multiprocessing, sys
import numpy as np
import vmmfd

def sums(things, results):
    first = things[0]
    arrays = [np.from_dlpack(thing["x"] if isinstance(thing, vmmfd.Lease) else thing) for thing in things[1:]]
    results.put(([float(array.sum()) for array in arrays], len(first.list()), len(first.who().leases)))

def main():
    broker = vmmfd.connect(sys.argv[1], backend="host")
    broker.put("there", {"x": np.arange(6, dtype="f4").reshape(2, 3), "y": np.ones(3)})
    lease = broker.get("there")
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    for thing in (broker, lease, lease["x"]):
        try:
            context.Process(target=print, args=(thing,)).start()
        except TypeError as error:
            print("refused", flush=True)
    vmmfd.register_reducer()
    vmmfd.register_reducer()
    mine = vmmfd.empty(3, "float32", backend="host")
    try:
        context.Process(target=print, args=(mine,)).start()
    except vmmfd.Invalid as error:
        assert "put it, and send an array of a lease" in str(error)
        print("refused", flush=True)
    things = [broker, lease, lease["x"], lease["x"][1], lease["x"].T[1:], lease["y"], lease["y"]]
    process = context.Process(target=sums, args=(things, results))
    process.start()
    got, objects, leases = results.get(timeout=200)
    assert got == [15.0, 15.0, 12.0, 12.0, 3.0, 3.0], got
    # All arrays share one lease, beside the lease that was sent, and this process's.
    assert (objects, leases) == (1, 3), (objects, leases)
    process.join(50)
    assert process.exitcode == 0
    # The name now belongs to another object.
    broker.delete("there")
    broker.put("there", {"x": np.zeros((2, 3), dtype="f4"), "y": np.zeros(3)})
    process = context.Process(target=sums, args=([broker, lease["x"]], results))
    process.start()
    process.join(50)
    assert process.exitcode != 0

if __name__ == "__main__":
    main()
"""


def test_multiprocessing_sends_names(server: Server, child: Callable[..., Child], tmp_path: object) -> None:
    # A spawned process imports its parent's file.
    script = server.folder / "spawned.py"
    script.write_text(SPAWNED)
    started = child(f"import runpy, sys\nsys.argv = [{str(script)!r}, {server.path!r}]\nimport subprocess\n"
                    "done = subprocess.run([sys.executable, *sys.argv], capture_output=True, text=True)\n"
                    "print(done.stdout, done.stderr)\nsys.exit(done.returncode)")
    output = started.end()
    assert output.count("refused") == 4 and "is not the object that was sent" in output, output


def test_client_survives_broker_restart(server: Server, child: Callable[..., Child]) -> None:
    started = child(
        BEGIN
        + """
lost, restored, odd = [], [], []
broker.on_lost(lost.append)

@broker.on_restored
def seen(what):
    restored.append((what, threading.current_thread() is threading.main_thread()))
    raise ValueError("goes to the hook")

sys.unraisablehook = lambda what: odd.append(what.exc_value)
put("there")
lease = broker.get("there")
view = np.from_dlpack(lease["x"])
watch = broker.watch("there")
say("ready")
# The wait continues across the restart.
late = broker.get("late", wait=60)
assert (view == 1).all() and late.version == 1
deadline = time.monotonic() + 60
while not restored and time.monotonic() < deadline:
    time.sleep(0.01)
(what, main), = restored
assert (what.name, what.version, what.rebuilt, main) == ("there", 1, True, False), what
assert lease.is_held and not lost and isinstance(odd[0], ValueError)
assert broker.get("there").version == 1
assert watch.next(60).kind == "lost"
assert isinstance(what, vmmfd.Restored)
""",
        server.path,
    )
    started.wait_for("ready")
    time.sleep(0.2)
    server.kill()
    server.start()
    maker = child(BEGIN + 'put("late", lifetime="deleted")', server.path)
    maker.end()
    started.end()


def test_lost_lease_is_reported(server: Server, child: Callable[..., Child]) -> None:
    started = child(
        BEGIN
        + """
broker.close()
broker = vmmfd.connect(sys.argv[1], backend="host", timeout=2)
lost = []
broker.on_lost(lost.append)
put("there")
lease = broker.get("there")
say("ready")
deadline = time.monotonic() + 60
while not lost and time.monotonic() < deadline:
    time.sleep(0.01)
what, = lost
assert isinstance(what, vmmfd.Lost) and (what.name, what.version, what.kind) == ("there", 1, "unreachable"), what
assert what.reason == "the broker can't be reached" and not lease.is_held
assert np.from_dlpack(lease["x"])[0] == 1
try:
    broker.list()
except vmmfd.NotFound as error:
    say(error.hint)
""",
        server.path,
    )
    started.wait_for("ready")
    server.kill()
    assert "vmmfd serve" in started.end()


@pytest.mark.parametrize("first", ["import vmmfd", "pass"], ids=["behind_the_main_one", "first"])
def test_sub_interpreter_is_refused(child: Callable[..., Child], first: str) -> None:
    started = child(
        """
        try:
            import _xxsubinterpreters as interpreters
        except ImportError:
            import _interpreters as interpreters
        FIRST
        other = interpreters.create()
        try:
            failed = interpreters.run_string(other, "import vmmfd")
        except Exception as error:
            failed = error
        # Python 3.13 returns the exception. Builds without the stable ABI raise their own error.
        says = "only works in the main interpreter", "vmmfd._native does not support loading in subinterpreters"
        assert any(sentence in str(failed) for sentence in says), failed
        interpreters.destroy(other)
        import vmmfd
        print(vmmfd.empty(3, "f4", backend="host").shape)
        """.replace("FIRST", first)
    )
    assert "(3,)" in started.end()


def test_leases_dropped_while_server_is_stopped(server: Server, child: Callable[..., Child]) -> None:
    """More than the socket's buffer can hold, and with the GIL held: the garbage collector drops them."""
    started = child(
        BEGIN
        + """
put("there")
leases = [broker.get("there") for _ in range(1500)]
arrays = [lease["x"] for lease in leases]
for lease in leases:
    lease.close()
say("stop it")
sys.stdin.readline()
del arrays
# Only now does the server continue.
say("dropped")
while broker.who("there").leases:
    time.sleep(0.01)
""",
        server.path,
    )
    started.wait_for("stop it")
    server.pause()
    started.send_line()
    try:
        started.wait_for("dropped")
    finally:
        server.go_on()
    started.end()
