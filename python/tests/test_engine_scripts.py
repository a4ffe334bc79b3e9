"""Scripts of tests/engines that need neither a GPU nor vLLM."""

from __future__ import annotations

import importlib.util
import json
import os
import struct
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from conftest import PYTHON

SCRIPTS = Path(__file__).parent.parent.parent / "tests" / "engines"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"engines_{name}", SCRIPTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fat_binary(*entries: tuple[int, int, bytes]) -> bytes:
    """Returns a fat binary; each entry has a kind (1 is PTX, 2 machine code), an architecture and contents."""
    body = b"".join(struct.pack("<HHIQ", kind, 0, 64, len(content)) + bytes(12) + struct.pack("<I", arch) + bytes(32) + content
                    for kind, arch, content in entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_only_hopper_code_is_kept(tmp_path: Path) -> None:
    def library(ampere: bytes, hopper: bytes, ptx: bytes) -> bytes:
        # A magic number alone is not a fat binary.
        return b"\x7fELF" + bytes.fromhex("50ed55ba") + b"text" + fat_binary((2, 80, ampere), (2, 90, hopper), (1, 90, ptx)) + b"after"

    path = tmp_path / "library.so"
    path.write_bytes(library(b"A" * 24, b"H" * 40, b"P" * 16))
    load("pack").erase_other_gpus(path)
    assert path.read_bytes() == library(bytes(24), b"H" * 40, bytes(16))


@pytest.mark.parametrize(("options", "code"), [([], 0), (["--strict"], 1)])
def test_absent_archives_are_named(tmp_path: Path, options: list[str], code: int) -> None:
    command = [*PYTHON, SCRIPTS / "run.py", "--packed", tmp_path / "nothing", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code
    assert f"there are no archives of vLLM in {tmp_path / 'nothing'}: run make engines-pack" in done.stderr


def test_exited_process_is_reported(tmp_path: Path) -> None:
    lab = load("lab")

    class Bench:
        folder, deadline, processes = tmp_path, float("inf"), []

    bench: Any = Bench()
    process = lab.Process(bench, "one", [*PYTHON, "-c", "print('out of memory'); raise SystemExit(3)"])
    with pytest.raises(lab.Failed, match="one ended with 3 before engine: out of memory"):
        process.wait_for("engine", lambda: None, 60)
    process.end()
    assert bench.processes == []


def test_incomplete_line_is_ignored(tmp_path: Path) -> None:
    lab = load("lab")
    path = tmp_path / "one.report"
    assert lab.whole_lines(path) == []
    path.write_text('{"event": "start"}\n{"event": "tok')
    assert lab.whole_lines(path) == [{"event": "start"}]


def test_row_reports_figures_and_failure(capsys: pytest.CaptureFixture[str]) -> None:
    lab = load("lab")
    bench = lab.Lab.__new__(lab.Lab)
    bench.rows = []
    with bench.row("good") as row:
        row["seconds"], row["lines"] = 2, ["not printed"]
    with bench.row("bad") as row:
        row["seconds"] = 3
        row.require(False, "too slow")
    with bench.row("broken"):
        raise KeyError("x")
    assert capsys.readouterr().out == "ROW good: PASS seconds=2\nROW bad: FAIL seconds=3 too slow\nROW broken: FAIL  KeyError: 'x'\n"
    assert [row["result"] for row in json.loads(json.dumps(bench.rows))] == ["PASS", "FAIL", "FAIL"]


def test_checkpoint_matches_index(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.torch")
    if "FAKECUDA_DEVICES" in os.environ or torch.cuda.is_available():
        pytest.skip("writes on the CPU")
    load("checkpoint").write(tmp_path, "tiny", "block-fp8")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    found = {name: file.name for file in tmp_path.glob("*.safetensors") for name in safetensors.load_file(file)}
    assert found == index
    assert "model.layers.1.mlp.down_proj.weight_scale_inv" in index
