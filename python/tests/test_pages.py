"""Both READMEs and the pages of docs/ run as written: shell, files and output in one folder for each page, and the Python of two pages."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from conftest import LIMIT, Server

ROOT = Path(__file__).resolve().parents[2]
WITH_PAGES = (ROOT / "README.md").exists()
PAGES = ["README.md", "python/README.md", *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md")))] if WITH_PAGES else []

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")

pytestmark = pytest.mark.skipif(not WITH_PAGES, reason="the pages are not beside the tests")


class Block(NamedTuple):
    """A fenced block: the line of its first fence, its language, the comment above it, and its text."""

    line: int
    language: str
    mark: str
    text: str


def blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text()
    found = re.finditer(r"^(?:<!-- (.*?) -->\n)?```(\S*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(text.count("\n", 0, match.start(2)) + 1, match[2], match[1] or "", match[3]) for match in found]


def script(page: str) -> str:
    """The page's files and commands as one script, each on its line of the page."""
    lines = [""] * (len((ROOT / page).read_text().splitlines()) + 1)
    lines[0] = f"""set -eu; trap 'echo "{page}:$LINENO: $BASH_COMMAND failed" >&2' ERR"""
    for block in blocks(page):
        code = block.text.splitlines()
        if block.mark.startswith("file: "):
            code = [f"cat >{block.mark.removeprefix('file: ')} <<'END OF FILE'", *code, "END OF FILE"]
            lines[block.line - 1 : block.line - 1 + len(code)] = code
        elif block.language == "sh" and not block.mark:
            lines[block.line : block.line + len(code)] = map(_awaited, code)
    return "\n".join(lines) + "\n"


def _awaited(line: str) -> str:
    """A line that starts a broker at the default path, with a wait until it listens: a client waits only a second, and a busy machine takes
    longer."""
    starts = line.startswith("vmmfd serve") and line.endswith(" &") and "--socket" not in line
    return f"{line} until vmmfd status >/dev/null 2>&1; do sleep 0.1; done" if starts else line


def has_commands(page: str) -> bool:
    return any(block.language == "sh" and not block.mark for block in blocks(page))


def left_out() -> list[str]:
    """The blocks that can't run in every checkout, each with the reason that its page gives."""
    found = []
    for page in PAGES:
        for block in blocks(page):
            if block.mark.startswith("needs: "):
                found.append(f"{page}:{block.line}: needs {block.mark.removeprefix('needs: ')}: {block.text.splitlines()[0]}")
    return found


def test_bundled_tests_are_collected_without_pages(tmp_path: Path) -> None:
    tests = shutil.copytree(ROOT / "python/tests", tmp_path / "bundle/python-tests", ignore=shutil.ignore_patterns("__pycache__"))
    collect = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", "cuda"]
    run = subprocess.run(collect, cwd=tests, capture_output=True, text=True, timeout=LIMIT)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="the commands need Linux")
@pytest.mark.parametrize("page", [page for page in PAGES if has_commands(page)])
def test_page_runs_in_order(page: str) -> None:
    pytest.importorskip("numpy")
    target = Path(os.environ.get("CARGO_TARGET_DIR", "target"))
    # Another cargo may hold the lock of the build folder for longer than the programs of the tutorial wait.
    built = target / "pages" if "--manifest-path ../" in script(page) else target
    # The same path each time, so that cargo builds the tutorial's program once.
    folder = Path(tempfile.gettempdir(), f"vmmfd-pages-{os.getuid()}-{zlib.crc32(bytes(ROOT)):x}", page.replace("/", "-"))
    shutil.rmtree(folder, ignore_errors=True)
    clone = folder / "vmmfd"
    clone.mkdir(mode=0o700, parents=True)
    (folder / "run").mkdir(mode=0o700)
    for entry in ROOT.iterdir():
        if entry.name[0] != "." and entry.name != "target" and not entry.name.startswith("dist"):
            (clone / entry.name).symlink_to(entry)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VMMFD_")}
    environment |= {
        "PATH": f"{Path(sys.executable).parent}:{ROOT / target / 'debug'}:{environment['PATH']}",
        "XDG_RUNTIME_DIR": f"{folder}/run",
        "VMMFD_BACKEND": "host",
        "CARGO_TARGET_DIR": str(ROOT / built),
        "CARGO_NET_OFFLINE": "true",
        # The program runs once: without debug information its build takes a third less.
        "CARGO_PROFILE_DEV_DEBUG": "0",
    }
    with Path(folder, "output").open("w+") as output:
        shell = ["bash", "-c", script(page)]
        run = subprocess.Popen(
            shell, cwd=clone, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = run.wait(3 * LIMIT)
        finally:
            try:
                os.killpg(run.pid, signal.SIGTERM)
            except ProcessLookupError:
                pass
        output.seek(0)
        printed = output.read()
    # A broker that is stopping removes its own files at the same time.
    shutil.rmtree(folder, ignore_errors=True)
    assert code == 0, printed
    for block in blocks(page):
        if block.mark == "output":
            for line in block.text.splitlines():
                assert line in printed, f"{page}:{block.line}: `{line}` was not printed:\n{printed}"


@pytest.mark.parametrize("block", left_out())
def test_block_is_left_out(block: str) -> None:
    pytest.skip(block)


def run(page: str, test: str, broker: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Runs the Python blocks that this test checks, in one namespace; returns how many."""
    monkeypatch.setenv("VMMFD_BROKER_SOCKET", broker)
    names: dict[str, Any] = {"__name__": "page"}
    ran = 0
    for block in blocks(page):
        if block.mark == f"checked by: python/tests/test_pages.py::{test}":
            exec(compile("\n" * block.line + block.text, str(ROOT / page), "exec"), names)
            ran += 1
    return ran


def test_readme_example(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numpy")
    assert run("README.md", "test_readme_example", server.path, monkeypatch) == 1


def test_python_page(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numpy")
    # Readers start with the README, at the same broker.
    run("README.md", "test_readme_example", server.path, monkeypatch)
    assert run("docs/python.md", "test_python_page", server.path, monkeypatch) >= 5


def test_python_handoff(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numpy")
    # The README links to it: it needs no earlier block.
    assert run("docs/python.md", "test_python_handoff", server.path, monkeypatch) == 1


def test_python_streams(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numpy")
    assert run("docs/python.md", "test_python_streams", server.path, monkeypatch) == 2


@pytest.mark.cuda
@needs_torch
def test_python_page_with_torch(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("docs/python.md", "test_python_page_with_torch", server.path, monkeypatch) >= 1


@needs_torch
def test_python_page_with_torch_on_the_cpu(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("docs/python.md", "test_python_page_with_torch_on_the_cpu", server.path, monkeypatch) == 1
