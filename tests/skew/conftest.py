"""Programs and wheels of two versions, and the processes that the tests make of them.

`VMMFD_SKEW_OLD` and `VMMFD_SKEW_NEW` name a folder each, with `bin/` (the commands), `python/` (a virtual environment with the wheel) and
`interop/` (the protocol in plain Python).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Only to end what hangs, in seconds.
LIMIT = 60.0


class Version:
    """The commands and the wheel of one version."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.folder = Path(os.environ[f"VMMFD_SKEW_{name.upper()}"])

    def command(self, program: str = "vmmfd") -> str:
        return str(self.folder / "bin" / program)

    def run(self, *arguments: str, code: int = 0, program: str = "vmmfd") -> str:
        """Runs a command to its end. Returns stdout, or stderr if another code than 0 is expected."""
        ended = subprocess.run([self.command(program), *arguments], capture_output=True, text=True, timeout=LIMIT)
        assert ended.returncode == code, (self.name, arguments, ended.returncode, ended.stdout, ended.stderr)
        return ended.stderr if code else ended.stdout


OLD, NEW = "old", "new"
# With the same version twice as a check of the tests themselves.
PAIRS = [(OLD, NEW), (NEW, OLD), (NEW, NEW)]


def wait_for(what: str, condition: Callable[[], Any], seconds: float = LIMIT) -> Any:
    """What `condition` returns as soon as that is true."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.02)
    return value


class Child:
    """A process whose lines are read as they come."""

    def __init__(self, arguments: list[str], log: Path, **options: Any) -> None:
        self.log = log
        with log.open("ab") as errors:
            self.process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=errors, **options)
        self.unread = b""

    def logged(self) -> str:
        return self.log.read_text()

    def line(self) -> str:
        """The next line."""
        assert self.process.stdout is not None
        while b"\n" not in self.unread:
            ready, _, _ = select.select([self.process.stdout], [], [], LIMIT)
            assert ready, "no line came"
            more = os.read(self.process.stdout.fileno(), 65536)
            assert more, (self.unread, self.logged())
            self.unread += more
        line, _, self.unread = self.unread.partition(b"\n")
        return line.decode()

    def end(self, signal_number: int | None = None) -> int:
        if signal_number is not None:
            self.process.send_signal(signal_number)
        return self.process.wait(LIMIT)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream:
                stream.close()


class Wheel(Child):
    """A Python with the wheel of one version."""

    def __init__(self, version: Version, path: str) -> None:
        worker = Path(__file__).with_name("worker.py")
        python = version.folder / "python" / "bin" / "python"
        super().__init__([str(python), str(worker)], Path(path).with_name("wheel.log"), stdin=subprocess.PIPE)
        self.run(f"broker = vmmfd.connect({path!r}, backend='host')")

    def start(self, code: str) -> None:
        """Has code run; `answer` returns its result."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(code).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        answer = json.loads(self.line())
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def run(self, code: str) -> Any:
        self.start(code)
        return self.answer()


class Broker:
    """A broker, of a program in a folder of its own, so that it can be replaced."""

    def __init__(self, version: Version, folder: Path, *options: str) -> None:
        self.folder, self.options = folder, options
        self.path = str(folder / "broker.sock")
        self.program = folder / "vmmfd"
        self.replace(version)
        self.start()

    def replace(self, version: Version) -> None:
        """Puts the program of a version in the place of the one before, as a package does."""
        fresh = self.folder / "vmmfd.new"
        shutil.copy2(version.command(), fresh)
        fresh.rename(self.program)

    def start(self, announced: bool = True) -> None:
        command = [str(self.program), "serve", "--socket", self.path, *self.options]
        self.child = Child(command, self.folder / "broker.log")
        if not announced:
            # A server that goes on with a keeper's objects prints no line.
            return
        line = self.child.line()
        assert "listening" in line, line
        self.pid = int(re.search(r"as pid (\d+)", line)[1])


    def executes(self, pid: int) -> bool:
        """Whether a process executes the program that is in place now."""
        try:
            return os.stat(f"/proc/{pid}/exe").st_ino == self.program.stat().st_ino
        except FileNotFoundError:
            return False

    def processes(self) -> list[int]:
        """The broker's processes: all that were started from this folder's program."""
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                with contextlib.suppress(OSError):
                    if (folder / "cmdline").read_bytes().startswith(str(self.program).encode() + b"\0"):
                        found.append(int(folder.name))
        return found

    def close(self) -> None:
        # Each of the two may start another one meanwhile, which one look at /proc can miss.
        looks = 0
        while looks < 5:
            pids = self.processes()
            looks = 0 if pids else looks + 1
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        self.child.close()


@pytest.fixture
def versions() -> dict[str, Version]:
    return {name: Version(name) for name in (OLD, NEW)}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Starts a process, which ends with the test: `start(Broker, version, ...)`."""
    with contextlib.ExitStack() as stack:

        def begin(kind: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
            child = kind(*arguments, **options)
            stack.callback(child.close)
            return child

        yield begin
