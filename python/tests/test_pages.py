"""Runs the Python blocks of the README and of docs/python.md, each page from first to last."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from conftest import Server

ROOT = Path(__file__).resolve().parents[2]
SOCKET = "/run/vmmfd/broker.sock"

pytestmark = pytest.mark.skipif(not (ROOT / "README.md").exists(), reason="the pages are not beside the tests")


def blocks(page: str) -> list[tuple[int, str]]:
    """Returns the Python blocks of a page with their line numbers."""
    text = (ROOT / page).read_text()
    found = re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, match.start()) + 2, match[1]) for match in found]


def run(page: str, needs_torch: bool, broker: str) -> int:
    """Runs the blocks that need PyTorch, or the others, in one namespace. Returns their number."""
    names: dict[str, Any] = {"__name__": "page"}
    ran = 0
    for line, code in blocks(page):
        # A block may use imports of earlier blocks.
        torch = "torch" in code
        if torch != needs_torch:
            continue
        code = code.replace(SOCKET, broker)
        exec(compile("\n" * (line - 1) + code, str(ROOT / page), "exec"), names)
        ran += 1
    return ran


def test_readme_example(server: Server) -> None:
    pytest.importorskip("numpy")
    assert run("README.md", False, server.path) == 1


def test_python_page(server: Server) -> None:
    pytest.importorskip("numpy")
    assert run("docs/python.md", False, server.path) >= 5


@pytest.mark.cuda
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="there is no PyTorch")
def test_python_page_with_torch(server: Server) -> None:
    assert run("docs/python.md", True, server.path) >= 1
