"""Shared fixtures: a broker server, child processes, and skips for tests that need a driver."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import signal
import subprocess
import sys
import textwrap
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import vmmfd

# The limit for a child process in seconds, only for a child that hangs. Other timeouts in the tests are shorter.
LIMIT = 300.0

# Ray's limit for a read, which it takes from here when it is imported: also only for a read that hangs.
os.environ["RAY_rdt_fetch_fail_timeout_milliseconds"] = str(int(LIMIT * 1000))

# The start of a command that runs Python with this process's options, such as `-X dev -W error`. multiprocessing starts its children so.
PYTHON: list[str] = [sys.executable, *subprocess._args_from_interpreter_flags()]  # type: ignore[attr-defined]

NIXL = [name for name in ("nixl", "nixl_cu12", "nixl_cu13") if importlib.util.find_spec(name)]
needs_nixl = pytest.mark.skipif(not NIXL, reason="NIXL is not installed (nixl, nixl_cu12 or nixl_cu13)")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cuda: needs a GPU")
    config.addinivalue_line("markers", "fake: over the emulated driver, where libcuda.so.1 is it")
    # A shell starts background jobs, and so their children, with SIGINT ignored.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _driver() -> str:
    """Returns the driver that loads here: `cuda`, `fake` or `none`."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "none"
    return "fake" if "FAKECUDA_DEVICES" in os.environ else ("cuda" if library.cuInit(0) == 0 else "none")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    driver = None
    for item in items:
        for marker in ("cuda", "fake"):
            if item.get_closest_marker(marker):
                driver = driver or _driver()
                if driver != marker:
                    item.add_marker(pytest.mark.skip(reason=f"needs the {marker} driver, but this machine has: {driver}"))


def command() -> list[str]:
    """Returns the `vmmfd` command: `VMMFD_BIN`, or the installed package's."""
    given = os.environ.get("VMMFD_BIN")
    return [given] if given else [*PYTHON, "-m", "vmmfd._command"]


class Server:
    """A broker server in a child process. With a keeper, the next server starts after each death, as under an init."""

    def __init__(self, folder: Path, *options: str, with_keeper: bool = False) -> None:
        self.folder = folder
        self.path = str(folder / "broker.sock")
        # The server refuses the emulated driver's memory without this option: it is not NVIDIA's.
        self.with_keeper = with_keeper
        options = options if with_keeper else ("--no-keeper", *options)
        self.options = (*options, *(["--emulated"] if "FAKECUDA_DEVICES" in os.environ and "--emulated" not in options else []))
        self.process: subprocess.Popen[str] | None = None
        self.start()

    def start(self) -> None:
        with (self.folder / "server.log").open("a") as log:
            serve = [*command(), "serve", "--socket", self.path, *self.options]
            self.process = subprocess.Popen(serve, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert "listening" in line, (line, (self.folder / "server.log").read_text())
        if self.with_keeper:
            threading.Thread(target=self._start_again, args=(self.process,), daemon=True).start()

    def _start_again(self, process: subprocess.Popen[str]) -> None:
        process.wait()
        if self.process is process:
            if process.stdout is not None:
                process.stdout.close()
            self.start()

    def keepers(self) -> dict[int, int]:
        """The keeper and, without a server, its twin: the pid of each with its parent's."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"{self.path}.keeper" in (entry / "cmdline").read_text().split("\0"):
                    found[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        return found

    def keeper(self) -> int:
        found = self.keepers()
        return next(pid for pid, parent in found.items() if parent not in found)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def pause(self) -> None:
        """Stops the process with SIGSTOP: it answers nothing."""
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def end(self) -> None:
        if self.process is None:
            return
        process, self.process = self.process, None
        process.send_signal(signal.SIGCONT)
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
        self._reap(process)

    def kill(self) -> None:
        assert self.process is not None
        process, self.process = self.process, None
        process.kill()
        self._reap(process)

    @staticmethod
    def _reap(process: subprocess.Popen[str]) -> None:
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server for one test."""
    server = Server(tmp_path)
    yield server
    server.end()


@pytest.fixture(scope="session")
def socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The socket of a server that all tests share: see `name`."""
    server = Server(tmp_path_factory.mktemp("broker"))
    yield server.path
    server.end()


@pytest.fixture
def broker(socket: str) -> Iterator[vmmfd.Broker]:
    """A client of the shared server, for host memory."""
    with vmmfd.connect(socket, backend="host") as broker:
        yield broker


@pytest.fixture
def name() -> str:
    """A unique object name."""
    return f"test/{uuid.uuid4().hex}"


def interrupted(call: Callable[[], Any], after: float) -> Any:
    """Returns the result of a call, or None if a signal handler, which runs after so many seconds, raised before the call returned."""

    class Raised(Exception):
        pass

    def handler(*_: object) -> None:
        raise Raised

    before, result = signal.signal(signal.SIGALRM, handler), None
    try:
        signal.setitimer(signal.ITIMER_REAL, after)
        result = call()
        signal.setitimer(signal.ITIMER_REAL, 0)
    except Raised:
        pass
    signal.signal(signal.SIGALRM, before)
    return result


class Child:
    """A Python program in a child process. It can print `ready`. At the time limit it is aborted, so that tests that wait for it fail."""

    def __init__(self, code: str, *arguments: str, env: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [*PYTHON, "-X", "faulthandler", "-c", textwrap.dedent(code), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
        )
        self.pid = self.process.pid
        # faulthandler then prints the threads' stacks.
        self.limit = threading.Timer(LIMIT, self.process.send_signal, [signal.SIGABRT])
        self.limit.daemon = True
        self.limit.start()

    def wait_for(self, line: str = "ready") -> None:
        """Waits until the child prints this line."""
        assert self.process.stdout is not None
        while True:
            came = self.process.stdout.readline()
            if came.strip() == line:
                return
            if not came:
                raise AssertionError(f"it exited before it printed {line}: {self.process.communicate()}")

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def send_line(self) -> None:
        """Lets a child continue that reads a line from stdin."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self, expected: int | None = 0) -> str:
        """Waits for the exit and returns the output. Fails for another exit code, and for any stderr output if 0 is expected."""
        output, errors = self.process.communicate()
        if expected is not None:
            assert self.process.returncode == expected, f"exit code {self.process.returncode}: {output}\n{errors}"
        if expected == 0:
            # On a busy machine, `connect` writes that it waits, and asyncio in development mode that a step took more than 0.1 s.
            wrong = [line for line in errors.splitlines() if not line.startswith(("no broker answers at ", "Executing <"))]
            assert not wrong, errors
        return output


@pytest.fixture
def child() -> Iterator[Callable[..., Child]]:
    """Starts child processes, and kills those that still run after the test."""
    children: list[Child] = []

    def start(code: str, *arguments: str, env: dict[str, str] | None = None) -> Child:
        children.append(Child(code, *arguments, env=env))
        return children[-1]

    yield start
    for one in children:
        one.limit.cancel()
        if one.process.poll() is None:
            one.process.kill()
        # Also closes its pipes.
        one.process.communicate()
