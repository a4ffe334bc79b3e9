"""Exceptions: their built-in base classes, errno values and hints."""

from __future__ import annotations

import errno
import pickle
import socket as sockets
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Server

import vmmfd

BUILT_IN = {
    vmmfd.Invalid: ValueError,
    vmmfd.NotFound: FileNotFoundError,
    vmmfd.NoArray: KeyError,
    vmmfd.AlreadyExists: FileExistsError,
    vmmfd.MismatchError: ValueError,
    vmmfd.PermissionDenied: PermissionError,
    vmmfd.Timeout: TimeoutError,
    vmmfd.Disconnected: ConnectionError,
    vmmfd.Crashed: ConnectionError,
    vmmfd.Ended: EOFError,
    vmmfd.OutOfMemory: MemoryError,
    vmmfd.Unsupported: NotImplementedError,
    vmmfd.ExportError: BufferError,
    vmmfd.Interrupted: InterruptedError,
}


@pytest.mark.parametrize("kind", BUILT_IN)
def test_built_in_bases(kind: type[vmmfd.Error]) -> None:
    error = kind("one sentence", kind="peer", hint="do this")
    assert isinstance(error, BUILT_IN[kind]) and isinstance(error, vmmfd.Error)
    assert (str(error), error.kind, error.hint, error.__notes__) == ("one sentence", "peer", "do this", ["do this"])
    assert kind("x").hint is None and kind().kind == "usage" and str(kind()) == ""


ERRNO = {
    vmmfd.NotFound: errno.ENOENT,
    vmmfd.NoArray: errno.ENOENT,
    vmmfd.AlreadyExists: errno.EEXIST,
    vmmfd.PermissionDenied: errno.EACCES,
    vmmfd.Timeout: errno.ETIMEDOUT,
    vmmfd.Disconnected: errno.ECONNRESET,
    vmmfd.Crashed: errno.ECONNRESET,
    vmmfd.Interrupted: errno.EINTR,
}


@pytest.mark.parametrize("kind", BUILT_IN)
def test_os_errors_have_errno(kind: type[vmmfd.Error]) -> None:
    error = pickle.loads(pickle.dumps(kind("one sentence")))
    assert isinstance(error, OSError) == (kind in ERRNO)
    if isinstance(error, OSError):
        assert (error.errno, error.strerror, str(error)) == (ERRNO[kind], "one sentence", "one sentence")
        # Python creates this class for the errno, or a subclass.
        assert isinstance(OSError(error.errno, ""), next(base for base in kind.__mro__ if base.__module__ == "builtins" and issubclass(base, OSError)))
    else:
        assert not hasattr(error, "errno")


def test_missing_name_has_errno(broker: vmmfd.Broker, name: str) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        broker.get(name)
    assert caught.value.errno == errno.ENOENT and caught.value.strerror == str(caught.value)


MEMORY_ENDS = """
import resource, sys
import vmmfd

resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
for size in (5 << 30, 1 << 45, 1 << 50, 1 << 62):
    try:
        vmmfd.empty(size, "uint8", backend="host")
    except MemoryError as error:
        assert isinstance(error, vmmfd.OutOfMemory) and error.kind == "system" and error.hint, repr(error)
        assert "CUDA" not in str(error) and "memory" in str(error), error
    else:
        raise AssertionError(size)
assert vmmfd.empty(1, "uint8", backend="host").nbytes == 1
"""


def test_exhausted_memory_is_out_of_memory(child: Any) -> None:
    child(MEMORY_ENDS).end()


def test_exhausted_addresses_are_out_of_memory(child: Any, broker: vmmfd.Broker, name: str) -> None:
    broker.put(name, {"x": vmmfd.empty(1 << 30, "uint8", backend="host")})
    child(
        """
        import resource, sys, vmmfd
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
        with vmmfd.connect(sys.argv[1], backend="host") as broker:
            try:
                broker.get(sys.argv[2])["x"].tobytes()
            except vmmfd.OutOfMemory as error:
                assert "CUDA" not in str(error), error
            else:
                raise AssertionError
        """,
        broker.path,
        name,
    ).end()
    broker.delete(name)


def test_quota_error_has_a_hint(tmp_path: Path) -> None:
    server = Server(tmp_path, "--quota", "objects=1,bytes=64MiB")
    try:
        with vmmfd.connect(server.path, backend="host") as broker:
            broker.put("one", {"x": np.ones(3)})
            with pytest.raises(vmmfd.Error, match="quota|objects") as caught:
                broker.put("two", {"x": np.ones(3)})
            assert type(caught.value) is vmmfd.Error and "quota" in (caught.value.hint or "")
    finally:
        server.end()


def test_silent_server_is_disconnected(server: Server) -> None:
    broker = vmmfd.connect(server.path, backend="host", timeout=0.5)
    server.pause()
    for call in (broker.list, lambda: vmmfd.connect(server.path, timeout=0.5)):
        with pytest.raises(ConnectionError) as caught:
            call()
        assert isinstance(caught.value, vmmfd.Disconnected) and caught.value.errno == errno.ECONNRESET
        assert "stopped or overloaded" in (caught.value.hint or "")
    server.go_on()
    assert broker.list() == []


def test_path_without_broker(tmp_path: Path) -> None:
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
        with pytest.raises(vmmfd.Disconnected):
            vmmfd.connect(silent, timeout=0.2)


def test_expired_wait_is_timeout(broker: vmmfd.Broker, name: str, tmp_path: Path) -> None:
    with pytest.raises(vmmfd.Timeout) as caught:
        broker.get(name, wait=0.1)
    assert caught.value.errno == errno.ETIMEDOUT
    with pytest.raises(vmmfd.Timeout) as caught:
        vmmfd.serve(tmp_path / "array.sock", np.ones(3), wait=0.1, backend="host")
    assert caught.value.errno == errno.ETIMEDOUT and "no consumer" in str(caught.value)
    with pytest.raises(vmmfd.Timeout, match="no producer on .* within 100ms"):
        vmmfd.take(tmp_path / "array.sock", wait=0.1, backend="host")
    with pytest.raises(vmmfd.NotFound):
        vmmfd.take(tmp_path / "array.sock", wait=0, backend="host")


def test_dead_server_is_reported(server: Server) -> None:
    broker = vmmfd.connect(server.path, backend="host", timeout=5)
    with broker.watch():
        server.kill()
        # The watch has the first connection. A new one waits for the timeout too, unlike the first connection of a client.
        with pytest.raises(vmmfd.Disconnected, match="is gone, and none has listened there within 5s") as caught:
            broker.list()
    assert caught.value.kind == "peer" and "vmmfd serve" in (caught.value.hint or "")
    server.start()
    assert broker.list() == []


def test_errors_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(vmmfd.Timeout("late", kind="peer", hint="wait")))
    assert (type(error), str(error), error.kind, error.hint) == (vmmfd.Timeout, "late", "peer", "wait")
