"""Shared by the scripts of this folder: the commands as child processes that are always reaped, and the reports of checks."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import protocol

NOT_RUN = 77
"""The exit code of a script whose library is missing."""


class Unexpected(Exception):
    """A check failed."""


def expect(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise Unexpected(f"{what}: expected {expected!r}, found {found!r}")


def expect_verified(what: str, result: protocol.Body, words: int) -> None:
    """Requires a `result` without errors, and this number of checked words, if given."""
    expect(what, result, protocol.result(words) if words else protocol.unchecked(True))


def not_run(reason: str) -> NoReturn:
    print(f"not run: {reason}")
    sys.exit(NOT_RUN)


class Child:
    """A running command. When its block exits, it has exited or is killed."""

    def __init__(self, command: list[str], deadline: float) -> None:
        self._name, self._deadline = os.path.basename(command[0]), deadline
        # Not a pipe: the command must not wait for a reader.
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the block
        streams = {"stdin": subprocess.DEVNULL, "stdout": self._output, "stderr": subprocess.STDOUT}
        self._process = subprocess.Popen(command, **streams)

    def must_run(self) -> None:
        """Requires that it still runs."""
        if self._process.poll() is not None:
            raise Unexpected(f"{self._name}: expected to go on, and ended with {self._process.returncode}")

    def ends(self, code: int) -> str:
        """Waits for the exit, with this code. Returns the output."""
        try:
            found = self._process.wait(self._deadline)
        except subprocess.TimeoutExpired:
            raise Unexpected(f"{self._name}: expected to end within {self._deadline} s, and it runs") from None
        expect(f"exit code of {self._name}", found, code)
        return self._printed()

    def stop(self) -> None:
        """Terminates it and waits for the exit. A broker must not be killed: its server would start another keeper."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(self._deadline)

    def _printed(self) -> str:
        self._output.seek(0)
        return self._output.read().decode(errors="replace")

    def __enter__(self) -> Child:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._process.kill()
        self._process.wait()
        if error is not None:
            print(f"{self._name} printed:\n{self._printed()}", file=sys.stderr)
        self._output.close()


class Meeting:
    """A socket in its own folder, for a command and this script."""

    def __init__(self, commands: Path, folder: str, backend: str, timeout: float = 20.0) -> None:
        self._commands, self.path, self._backend, self._timeout = commands, f"{folder}/socket", backend, timeout
        self._latest: Child | None = None

    def command(self, name: str) -> str:
        """Returns the path of a command."""
        return str(self._commands / name)

    def _child(self, name: str, options: tuple[str, ...]) -> Child:
        # Later options override these.
        timeout = () if "--timeout" in options else ("--timeout", f"{self._timeout:.0f}s")
        command = [self.command(name), "--socket", self.path, "--backend", self._backend, *timeout, *options]
        self._latest = Child(command, 2 * self._timeout)
        return self._latest

    def producer(self, *options: str) -> Child:
        return self._child("producer", options)

    def consumer(self, *options: str) -> Child:
        return self._child("consumer", options)

    def consume(self, timeout: float | None = None) -> protocol.Consumer:
        self.wait_for_socket()
        return protocol.Consumer(self.path, self._backend, timeout or self._timeout)

    def wait_for_socket(self) -> None:
        """Waits until the producer listens, unless it failed to start."""
        while self._latest is not None and not os.path.exists(self.path):
            self._latest.must_run()
            time.sleep(0.005)

    def produce(self, timeout: float | None = None) -> protocol.Producer:
        return protocol.Producer(self.path, self._backend, timeout or self._timeout)


Check = Callable[[Meeting], None]


def run(backend: str, checks: list[Check], timeout: float = 20.0) -> NoReturn:
    """Runs checks on the commands in the folder given on the command line, each with its own socket, and reports each result. Exit code 0
    if all passed."""
    # As an exception, so that every child is killed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGHUP, lambda *_: sys.exit(129))
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} FOLDER    (the one in which the commands producer and consumer are)")
    commands = Path(sys.argv[1]).resolve()
    passed = [_passes(check, commands, backend, timeout) for check in checks]
    sys.exit(0 if all(passed) else 1)


def _passes(check: Check, commands: Path, backend: str, timeout: float) -> bool:
    name = (check.__doc__ or check.__name__).rstrip(".")
    # A socket's path is short; TMPDIR may be long.
    short = len(tempfile.gettempdir()) < 80
    with tempfile.TemporaryDirectory(prefix="vmmfd-", dir=None if short else "/tmp") as folder:
        try:
            check(Meeting(commands, folder, backend, timeout))
        except Exception as error:
            if not isinstance(error, (Unexpected, protocol.VmmfdError)):
                traceback.print_exc()
            print(f"FAILED  {name}: {type(error).__name__}: {error}", flush=True)
            return False
    print(f"ok      {name}", flush=True)
    return True
