"""Runs the examples about weights."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path

import pytest

import vmmfd
from conftest import PYTHON, Server
from test_weights import FIRST, SECOND, write

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

pytestmark = pytest.mark.skipif(not (EXAMPLES / "weights_put.py").exists(), reason="the examples are not beside the tests")


def test_weights_put(server: Server, tmp_path: Path) -> None:
    write(tmp_path / "1.safetensors", FIRST)
    write(tmp_path / "2.safetensors", SECOND)
    put = [*PYTHON, str(EXAMPLES / "weights_put.py"), "m", str(tmp_path), "--socket", server.path, "--backend", "host"]
    ended = subprocess.run([*put, "--digest"], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0 and ended.stdout.startswith("m version 1: 6 tensors, "), ended
    assert ended.stderr == ""
    with vmmfd.connect(server.path, backend="host").get("m") as lease:
        assert lease["w"].tobytes() == FIRST["w"][2] and lease.parts[0].digest is not None
    # The refusal comes before it reads anything.
    (tmp_path / "1.safetensors").write_bytes(b"")
    again = subprocess.run(put, capture_output=True, text=True, timeout=60)
    assert again.returncode == 1 and again.stderr.startswith("weights_put: m exists already: give --replace"), again


def model(*options: str) -> None:
    """Runs the example of a real model, which checks its own results."""
    for module in ("torch", "transformers"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"there is no {module}")
    command = [*PYTHON, str(EXAMPLES / "real_model.py"), "--limit", "240", *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert ended.returncode == 0 and ended.stdout.endswith("all as it should be\n"), (ended.stdout, ended.stderr)


def test_real_model_on_host() -> None:
    model("--small", "--backend", "host")


@pytest.mark.cuda
def test_real_model_on_gpu() -> None:
    model()
