"""serve and take: with each other, with the two commands, and interruption."""

from __future__ import annotations

import json
import os
import signal
import socket as sockets
import struct
import subprocess
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import command

import vmmfd

NUMBERS = np.arange(24, dtype="f4").reshape(2, 3, 4)


def served(path: str, array: Any, **options: Any) -> tuple[threading.Thread, list[Any]]:
    """Serves in a thread. The list receives its result or exception."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(vmmfd.serve(path, array, **options))
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, result


def record(number: int, **body: Any) -> bytes:
    """Returns a protocol record of the given kind number."""
    text = json.dumps(body).encode()
    return struct.pack("<4sHHII", b"VMFD", 1, number, len(text), 0) + text


HELLO = record(1, version=1, capabilities=[], backend="host", pid=0, timeout_ms=6_000_000)
REQUEST = record(2, object="default", access=None, range=None)
BUSY = record(7)


@pytest.mark.parametrize("on", ["host", pytest.param("cuda", marks=pytest.mark.fake)])
def test_array_reaches_another_process(tmp_path: Path, child: Any, on: str) -> None:
    path = str(tmp_path / "handoff.sock")
    array = vmmfd.asarray(NUMBERS, backend=on)
    other = child(
        f"""
        import sys, numpy as np, vmmfd
        array = vmmfd.take({path!r}, backend={on!r}, wait=20, readonly=False)
        assert array.is_mapped and not array.readonly, array
        assert (array.shape, array.dtype) == ((2, 3, 4), "float32")
        assert np.frombuffer(array.tobytes(), "f4").tolist() == list(range(24))
        array[0].copy_from(np.full((3, 4), 7, "f4"))
        print("ready", flush=True)
        assert sys.stdin.readline()
        # The memory outlives its use in the creator.
        assert array.tobytes()[:4] == np.float32(7).tobytes()
        """
    )
    (one,) = vmmfd.serve(path, array, wait=20)
    assert one.pid == other.pid and one.uid == os.getuid() and one.error is None
    other.wait_for()
    assert np.frombuffer(array[0].tobytes(), "f4").tolist() == [7] * 12
    del array
    other.process.stdin.write("go\n")
    other.end()


def test_views_and_copies_are_served(tmp_path: Path) -> None:
    path = str(tmp_path / "handoff.sock")
    whole = vmmfd.asarray(NUMBERS, backend="host")
    for array, wanted in ((whole[1, :, ::2], NUMBERS[1, :, ::2]), (NUMBERS.T, NUMBERS.T), (b"bytes", np.frombuffer(b"bytes", "u1"))):
        thread, result = served(path, array, backend="host", wait=timedelta(seconds=20))
        taken = vmmfd.take(path, backend="host", wait=timedelta(seconds=20))
        thread.join()
        assert result[0][0].error is None
        assert taken.readonly and np.array_equal(np.from_dlpack(taken), wanted)
        with pytest.raises(vmmfd.Invalid, match="another process created"):
            vmmfd.serve(path, taken)
        del taken


def test_concurrent_consumers(tmp_path: Path) -> None:
    path = str(tmp_path / "handoff.sock")
    thread, result = served(path, NUMBERS, backend="host", consumers=3, wait=20)
    taken = [vmmfd.take(path, backend="host", wait=20) for _ in range(3)]
    thread.join()
    assert len(result[0]) == 3 and all(np.array_equal(np.asarray(array), NUMBERS) for array in taken)


@pytest.mark.parametrize("on", ["host", pytest.param("cuda", marks=pytest.mark.fake)])
def test_produce_and_consume_commands(tmp_path: Path, on: str) -> None:
    path = str(tmp_path / "handoff.sock")
    with subprocess.Popen(
        [*command(), "consume", "--socket", path, "--backend", on, "--timeout", "20s", "--to", str(tmp_path / "bytes")],
        stdout=subprocess.PIPE,
        text=True,
    ) as consumer:
        (one,) = vmmfd.serve(path, NUMBERS, backend=on, wait=20)
        output, _ = consumer.communicate(timeout=30)
        assert one.error is None and consumer.returncode == 0, output
    assert (tmp_path / "bytes").read_bytes() == NUMBERS.tobytes()
    with subprocess.Popen(
        [*command(), "produce", "--socket", path, "--backend", on, "--timeout", "20s", "--dtype", "int16", "--shape", "3x5"],
        stdout=subprocess.PIPE,
        text=True,
    ) as producer:
        array = vmmfd.take(path, backend=on, wait=20)
        output, _ = producer.communicate(timeout=30)
        assert producer.returncode == 0, output
    assert (array.shape, array.dtype, array.is_mapped) == ((3, 5), "int16", True)
    with subprocess.Popen(
        [*command(), "produce", "--socket", path, "--backend", on, "--timeout", "20s", "--size", "1000", "--seed", "0"],
        stdout=subprocess.PIPE,
    ) as producer:
        array = vmmfd.take(path, backend=on, wait=20)
        assert producer.wait(30) == 0
    assert (array.dtype, array.shape) == ("uint8", (1000,))


@pytest.mark.fake
@pytest.mark.parametrize("mechanism", ["pool", "legacy"])
def test_take_pool_and_legacy_memory(tmp_path: Path, mechanism: str) -> None:
    path = str(tmp_path / "handoff.sock")
    with subprocess.Popen(
        [*command(), "produce", "--socket", path, "--timeout", "20s", "--mechanism", mechanism, "--size", "4096"],
        stdout=subprocess.PIPE,
    ) as producer:
        array = vmmfd.take(path, wait=20)
        assert array.nbytes == 4096 and array.is_mapped
        assert len(array.tobytes()) == 4096
        del array
        assert producer.wait(30) == 0


def test_wait_times_out(tmp_path: Path) -> None:
    path = str(tmp_path / "handoff.sock")
    with pytest.raises(vmmfd.Error) as raised:
        vmmfd.take(path, backend="host", wait=0.3)
    assert isinstance(raised.value, TimeoutError), raised
    with pytest.raises(vmmfd.Error):
        vmmfd.serve(path, NUMBERS, backend="host", wait=0.3)
    assert not Path(path).exists()


def test_path_in_use_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "handoff.sock")
    thread, result = served(path, NUMBERS, backend="host", wait=20)
    while not Path(path).exists():
        time.sleep(0.01)
    with pytest.raises(vmmfd.Error, match="another process|already|serve"):
        vmmfd.serve(path, NUMBERS, backend="host", wait=1)
    vmmfd.take(path, backend="host", wait=20)
    thread.join()
    assert result[0][0].error is None


@pytest.mark.parametrize("call", ["vmmfd.take({path!r}, backend='host', wait=6000)", "vmmfd.serve({path!r}, b'x', backend='host', wait=6000)"])
def test_ctrl_c_interrupts_wait(tmp_path: Path, child: Any, call: str) -> None:
    path = str(tmp_path / "handoff.sock")
    other = child(
        f"""
        import vmmfd
        try:
            print("ready", flush=True)
            {call.format(path=path)}
        except KeyboardInterrupt:
            print("interrupted")
        """
    )
    other.wait_for()
    time.sleep(0.5)
    other.signal(signal.SIGINT)
    assert other.end() == "interrupted\n"


# Prints the word when the wait is interrupted, long before its timeout.
INTERRUPTED = """
import vmmfd
try:
    {call}
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize("is_busy", [False, True])
def test_ctrl_c_interrupts_wait_for_producer(tmp_path: Path, child: Any, is_busy: bool) -> None:
    """A silent producer, and a producer that constantly reports that it is busy."""
    path = str(tmp_path / "handoff.sock")
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        other = child(INTERRUPTED.format(call=f"vmmfd.take({path!r}, backend='host', wait=6000)"))
        connection, _ = listener.accept()
        with connection:
            assert connection.recv(1 << 16)
            if is_busy:
                threading.Thread(target=say_busy, args=(connection,)).start()
            other.signal(signal.SIGINT)
            assert other.end() == "interrupted\n"


def say_busy(connection: sockets.socket) -> None:
    try:
        while True:
            connection.send(BUSY)
    except OSError:
        pass


def test_ctrl_c_interrupts_serve(tmp_path: Path, child: Any) -> None:
    path = str(tmp_path / "handoff.sock")
    other = child(INTERRUPTED.format(call=f"vmmfd.serve({path!r}, b'served', backend='host', consumers=4, wait=6000)"))
    assert vmmfd.take(path, backend="host", wait=60).tobytes() == b"served"
    with (
        sockets.socket(sockets.AF_UNIX, sockets.SOCK_SEQPACKET) as silent,
        sockets.socket(sockets.AF_UNIX, sockets.SOCK_SEQPACKET) as asking,
    ):
        silent.connect(path)
        asking.connect(path)
        asking.settimeout(60)
        asking.send(HELLO)
        assert asking.recv(1 << 16)
        asking.send(REQUEST)
        # The consumer has the memory, and does not acknowledge it.
        assert b"memory" in asking.recv(1 << 16)
        other.signal(signal.SIGINT)
        assert other.end() == "interrupted\n"
    assert not Path(path).exists()


def test_waits_release_the_gil(tmp_path: Path, child: Any) -> None:
    """A thread only runs when another releases the GIL, and each thread here waits for the other."""
    other = child(
        """
        import sys, threading, vmmfd
        sys.setswitchinterval(6000)
        going = threading.Event()
        def take():
            going.wait()
            vmmfd.take(sys.argv[1], backend="host", wait=6000)
        thread = threading.Thread(target=take)
        thread.start()
        going.set()
        vmmfd.serve(sys.argv[1], b"x", backend="host", wait=6000)
        thread.join()
        """,
        str(tmp_path / "handoff.sock"),
    )
    other.end()
