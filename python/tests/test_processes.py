"""Forks, spawned processes and interpreters, and a broker that stops or restarts."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import vmmfd

from conftest import LIMIT, PYTHON, Child, Server
from test_manners import BEGIN
from test_pages import WITH_PAGES, blocks


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
watch.fileno()
claim = broker.claim("claimed")
pid = os.fork()
if pid == 0:
    refused = 0
    sentence = (f"process {os.getpid()} is a fork of process {os.getppid()}, whose memory and connections it can't use: connect again, "
                "in a process that spawn or forkserver started")
    for use in (broker.list, lambda: broker.get("there"), lambda: put("more"), lambda: broker.claim("x"), lambda: broker.watch(),
                lambda: lease["x"], lambda: lease.version, lambda: list(lease), lambda: lease.park(), lambda: lease.switch(prepared),
                lambda: lease.prepare(), lambda: prepared.version, lambda: watch.next(0), lambda: watch.place, watch.fileno,
                lambda: broker.on_lost(print), array.tobytes, lambda: np.from_dlpack(array), lambda: array.address):
        try:
            use()
        except vmmfd.Invalid as error:
            assert str(error) == sentence, error
            refused += 1
    assert refused == 19, refused
    assert not lease.is_held and not lease.is_closed
    # Calls that need neither the broker nor the memory work.
    assert "not usable here" in repr(lease) and "not usable here" in repr(prepared) and "not usable here" in repr(watch) and broker.path in repr(broker) and repr(claim)
    assert (array.shape, array.dtype, array.readonly, array[1:].ndim) and "vmmfd.Array" in repr(array)
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
except vmmfd.NotFound:
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
import logging
# The restart may take long enough for the warning about it.
logging.getLogger("vmmfd").setLevel(logging.ERROR)
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
assert isinstance(what, vmmfd.records.Restored)
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
import logging
logging.getLogger("vmmfd").disabled = True
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
assert isinstance(what, vmmfd.records.Lost) and (what.name, what.version, what.kind) == ("there", 1, "unreachable"), what
assert what.reason == "the broker can't be reached" and not lease.is_held
assert np.from_dlpack(lease["x"])[0] == 1
try:
    broker.list()
except vmmfd.Disconnected as error:
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


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
def test_dataloader_recipe(server: Server, tmp_path: Path) -> None:
    if not WITH_PAGES:
        pytest.skip("the pages are not beside the tests")
    (recipe,) = [block.text for block in blocks("docs/python.md") if block.mark.endswith("::test_dataloader_recipe")]
    with vmmfd.connect(server.path, backend="host") as broker:
        broker.put("frames", {"x": np.arange(8)})
        (tmp_path / "recipe.py").write_text(recipe)
        environment = {**os.environ, "VMMFD_BROKER_SOCKET": server.path}
        subprocess.run([*PYTHON, str(tmp_path / "recipe.py")], env=environment, check=True, timeout=LIMIT)


def test_views_are_readable_in_fork(server: Server, child: Callable[..., Child]) -> None:
    child(
        BEGIN
        + """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)
put("there")
view = np.from_dlpack(broker.get("there")["x"])
pid = os.fork()
if pid == 0:
    os._exit(0 if (view == 1).all() and not view.flags.writeable else 1)
assert os.waitpid(pid, 0)[1] == 0
""",
        server.path,
    ).end()
