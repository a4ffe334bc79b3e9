"""Exceptions: which built-in each is, and what it says to do."""

from __future__ import annotations

import pickle
import socket as sockets
from pathlib import Path

import numpy as np
import pytest
from conftest import Server

import vmmfd

BUILT_IN = {
    vmmfd.Invalid: ValueError,
    vmmfd.NotFound: FileNotFoundError,
    vmmfd.NoArray: KeyError,
    vmmfd.Exists: FileExistsError,
    vmmfd.Differs: ValueError,
    vmmfd.Denied: PermissionError,
    vmmfd.Timeout: TimeoutError,
    vmmfd.Disconnected: ConnectionError,
    vmmfd.OutOfMemory: MemoryError,
    vmmfd.Unsupported: NotImplementedError,
    vmmfd.ExportError: BufferError,
    vmmfd.Interrupted: InterruptedError,
}


@pytest.mark.parametrize("kind", BUILT_IN)
def test_each_is_the_built_in_of_its_kind(kind: type[vmmfd.Error]) -> None:
    error = kind("one sentence", kind="peer", hint="do this")
    assert isinstance(error, BUILT_IN[kind]) and isinstance(error, vmmfd.Error)
    assert (str(error), error.kind, error.hint, error.__notes__) == ("one sentence", "peer", "do this", ["do this"])
    assert kind("x").hint is None and kind().kind == "usage" and str(kind()) == ""


def test_a_quota_says_what_to_do(tmp_path: Path) -> None:
    server = Server(tmp_path, "--quota", "objects=1,bytes=64MiB")
    try:
        with vmmfd.connect(server.path, backend="host") as broker:
            broker.put("one", {"x": np.ones(3)})
            with pytest.raises(vmmfd.Error, match="quota|objects") as caught:
                broker.put("two", {"x": np.ones(3)})
            assert type(caught.value) is vmmfd.Error and "--quota" in (caught.value.hint or "")
    finally:
        server.end()


def test_a_server_that_is_stopped_is_silent(server: Server) -> None:
    broker = vmmfd.connect(server.path, backend="host", timeout=5)
    server.pause()
    for call in (broker.list, lambda: vmmfd.connect(server.path, timeout=5)):
        with pytest.raises(TimeoutError) as caught:
            call()
        assert isinstance(caught.value, vmmfd.Timeout) and "stopped or overloaded" in (caught.value.hint or "")
    server.go_on()
    assert broker.list() == []


def test_what_is_no_broker(tmp_path: Path) -> None:
    path = str(tmp_path / "other.sock")
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as stream:
        stream.bind(path)
        stream.listen()
        with pytest.raises(vmmfd.Error, match="another type of socket"):
            vmmfd.connect(path, timeout=0.2)
    (tmp_path / "file").write_text("")
    with pytest.raises(vmmfd.Error, match="not a socket"):
        vmmfd.connect(tmp_path / "file", timeout=0.2)
    silent = str(tmp_path / "silent.sock")
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_SEQPACKET) as listener:
        listener.bind(silent)
        listener.listen()
        with pytest.raises(vmmfd.Timeout):
            vmmfd.connect(silent, timeout=0.2)


def test_the_end_of_the_server_is_reported(server: Server) -> None:
    broker = vmmfd.connect(server.path, backend="host", timeout=5)
    server.kill()
    with pytest.raises(FileNotFoundError, match="no broker on") as caught:
        broker.list()
    assert caught.value.kind == "peer" and "vmmfd serve" in (caught.value.hint or "")
    server.start()
    assert broker.list() == []


def test_they_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(vmmfd.Timeout("late", kind="peer", hint="wait")))
    assert (type(error), str(error), error.kind, error.hint) == (vmmfd.Timeout, "late", "peer", "wait")
