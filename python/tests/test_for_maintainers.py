"""The facts of docs/for-maintainers.md."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import tomllib
from pathlib import Path

import pytest

from conftest import PYTHON

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "for-maintainers.md"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the pages are not beside the tests")


def test_page_names_tested_versions() -> None:
    page = " ".join(PAGE.read_text().split())
    for name, package in (("vLLM", "vllm"), ("Ray", "ray"), ("NIXL", "nixl_cu12")):
        record = json.loads(Path(__file__).with_name(f"{package.removesuffix('_cu12')}_signatures.json").read_text())
        count = sum(map(len, record["signatures"].values()))
        assert f"| {name} {record[package]} | {count} |" in page


def test_page_describes_the_wheel() -> None:
    page = PAGE.read_text()
    project = tomllib.loads((ROOT / "python" / "pyproject.toml").read_text())["project"]
    assert "dependencies" not in project
    assert project["license"] in page and f"Python {project['requires-python'].removeprefix('>=')}" in page
    assert all(f"`{name}`" in page for name in project["optional-dependencies"])


def test_tensors_equal_a_load_from_disk(socket: str) -> None:
    for needed in ("torch", "transformers", "blake3"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [*PYTHON, ROOT / "tests" / "engines" / "parity.py", socket]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout in PAGE.read_text(), f"the table is out of date:\n{done.stdout}"
