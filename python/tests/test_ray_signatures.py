"""The recorded signatures of Ray that `vmmfd.ray` uses, compared with its class, and with Ray where it is installed.

`python test_ray_signatures.py` replaces the recorded signatures by the installed Ray's.
"""

from __future__ import annotations

import ast
import importlib.util
import json
from importlib.machinery import SourceFileLoader
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

RECORD = Path(__file__).with_name("ray_signatures.json")
SCRIPT = Path(__file__).parents[2] / "scripts" / "vllm-signatures"
BASE = "ray/experimental/rdt/tensor_transport_manager.py"

recorded = json.loads(RECORD.read_text())


def reader() -> ModuleType:
    """The script that reads signatures from sources, as a module."""
    spec = importlib.util.spec_from_loader("signatures", SourceFileLoader("signatures", str(SCRIPT)))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def installed() -> dict[str, Any]:
    """The installed Ray's signatures. Ray is not imported."""
    found = importlib.util.find_spec("ray")
    assert found is not None and found.origin is not None
    return dict(reader().read(Path(found.origin).parents[1], recorded["signatures"]))


def parameters(function: ast.FunctionDef) -> tuple[list[str], int]:
    """The names of a function's parameters, and the number of defaults."""
    return [each.arg for each in function.args.args], len(function.args.defaults)


def test_transport_has_recorded_methods() -> None:
    package = importlib.util.find_spec("vmmfd")
    assert package is not None and package.origin is not None
    (ours,) = [
        node
        for node in ast.parse(Path(package.origin).with_name("ray.py").read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "Arrays"
    ]
    methods = {node.name: node for node in ours.body if isinstance(node, ast.FunctionDef)}
    rays = recorded["signatures"][BASE]
    abstract = [name.rpartition(".")[2] for name, found in rays.items() if found.startswith("@abstractmethod")]
    assert len(abstract) >= 10
    for name in abstract:
        signature = rays[f"TensorTransportManager.{name}"]
        is_static = signature.startswith("@abstractmethod @staticmethod")
        parsed = ast.parse(f"def f{signature[signature.index('('):]}: ...").body[0]
        assert isinstance(parsed, ast.FunctionDef)
        assert parameters(methods[name]) == parameters(parsed), name
        assert is_static == any(ast.unparse(each) == "staticmethod" for each in methods[name].decorator_list), name


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install ray==2.60.0")
@pytest.mark.skipif(not SCRIPT.exists(), reason="the script is not beside the tests")
def test_installed_ray_is_as_recorded() -> None:
    assert list(reader().differences(recorded["signatures"], installed())) == []


if __name__ == "__main__":
    RECORD.write_text(json.dumps({"ray": version("ray"), "signatures": installed()}, indent=2) + "\n")
