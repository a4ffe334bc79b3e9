"""The recorded signatures of vLLM, and the script that compares them with a wheel. vLLM is not needed."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import zipfile
from pathlib import Path

import pytest

from conftest import PYTHON

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "scripts" / "vllm-signatures"
RECORD = Path(__file__).with_name("vllm_signatures.json")
SOURCE = """
class Loader(Base):
    field: int = 3

    @abstractmethod
    def load(self, model: "Model", *, prefix: str = "") -> None: ...

def register(name: str): ...
"""
NAMES = ["Loader", "Loader.field", "Loader.load", "register"]


def wheel(folder: Path, source: str) -> Path:
    path = folder / "vllm-9.1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("vllm/loader.py", source)
        archive.writestr("vllm-9.1.0.dist-info/METADATA", "Name: vllm\nVersion: 9.1.0\n")
    return path


def compare(folder: Path, source: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [*PYTHON, SCRIPT, wheel(folder, source), "--record", folder / "record.json", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a record of `SOURCE`."""
    (tmp_path / "record.json").write_text(json.dumps({"vllm": "", "signatures": {"vllm/loader.py": dict.fromkeys(NAMES, "")}}))
    written = compare(tmp_path, SOURCE, "--write")
    assert written.returncode == 0, written.stderr
    return tmp_path


def test_equal_wheel_passes(folder: Path) -> None:
    record = json.loads((folder / "record.json").read_text())
    assert record["vllm"] == "9.1.0"
    assert record["signatures"]["vllm/loader.py"] == {
        "Loader": "class(Base) abstract: load",
        "Loader.field": "int = 3",
        "Loader.load": "@abstractmethod (self, model: 'Model', *, prefix: str='') -> None",
        "register": "(name: str)",
    }
    same = compare(folder, SOURCE)
    assert (same.returncode, same.stdout) == (0, "vllm 9.1.0: 0 of 4 signatures differ from those of 9.1.0\n")


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ('prefix: str = ""', "prefix: str", "Loader.load"),
        ("-> None", "-> int", "Loader.load"),
        ("int = 3", "int = 4", "Loader.field"),
        ("(Base)", "(Other)", "Loader"),
        ("def register", "def enrol", "register"),
    ],
)
def test_each_change_is_named(folder: Path, old: str, new: str, name: str) -> None:
    changed = compare(folder, SOURCE.replace(old, new))
    assert changed.returncode == 1
    assert [line for line in changed.stdout.splitlines() if line.startswith("vllm/")] == [f"vllm/loader.py: {name}"]
    assert ("absent" in changed.stdout) == (name == "register")


def test_moved_file_is_named(folder: Path) -> None:
    record = json.loads((folder / "record.json").read_text())
    record["signatures"] = {"vllm/other.py": record["signatures"]["vllm/loader.py"]}
    (folder / "record.json").write_text(json.dumps(record))
    changed = compare(folder, SOURCE)
    assert changed.returncode == 1
    assert changed.stdout.count("absent") == len(NAMES)
    refused = compare(folder, SOURCE, "--write")
    assert refused.returncode == 1 and "nothing was written" in refused.stderr


def test_adapter_imports_are_recorded() -> None:
    """Each name that the package's adapter imports from vLLM has a recorded signature."""
    signatures = json.loads(RECORD.read_text())["signatures"]
    recorded = {(file.removesuffix(".py").removesuffix("/__init__"), name) for file, names in signatures.items() for name in names}
    package = importlib.util.find_spec("vmmfd.engines")
    if package is None or package.origin is None:
        pytest.skip("the package has no engines")
    missing = []
    for path in Path(package.origin).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("vllm.") and not node.level:
                module = node.module.replace(".", "/")
                for alias in node.names:
                    as_module = f"{module}/{alias.name}"
                    if not any((file.startswith(module) and name == alias.name) or file == as_module for file, name in recorded):
                        missing.append(f"{path.name}: {node.module}.{alias.name}")
    assert not missing
