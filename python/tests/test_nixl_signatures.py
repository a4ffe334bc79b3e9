"""The recorded signatures of NIXL that `vmmfd.nodes` uses, compared with its calls, and with NIXL where it is installed."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
from pathlib import Path

import pytest

import vmmfd.nodes

from conftest import PYTHON

SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "vllm-signatures"
RECORD = Path(__file__).with_name("nixl_signatures.json")

# The class of the objects that these names hold in `vmmfd.nodes`.
HOLDERS = {"self._agent": "nixl_agent", "agent": "nixl_agent", "nixl": ""}

# A call: the function's name, the number of its positional arguments, and its keywords.
Call = tuple[str, int, list[str]]


def calls() -> list[Call]:
    found: list[Call] = []
    for node in ast.walk(ast.parse(Path(vmmfd.nodes.__file__).read_text())):
        if not isinstance(node, ast.Call):
            continue
        function, arguments = node.func, node.args
        if isinstance(function, ast.Name) and function.id == "_try":
            function, arguments = arguments[0], arguments[1:]
        if isinstance(function, ast.Attribute) and (owner := HOLDERS.get(ast.unparse(function.value))) is not None:
            name = f"{owner}.{function.attr}" if owner else f"{function.attr}.__init__"
            found.append((name, len(arguments), [keyword.arg or "**" for keyword in node.keywords]))
    return found


def problem(call: Call, signature: str) -> str | None:
    """Returns why a method with this signature refuses a call."""
    name, count, keywords = call
    function = ast.parse(f"def f{signature}: ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    parameters = [argument.arg for argument in function.args.args][1:]
    required = parameters[: len(parameters) - len(function.args.defaults)]
    given = parameters[:count] + keywords
    wrong = count > len(parameters) or set(keywords) - set(parameters[count:]) or set(required) - set(given)
    return f"{name} takes {signature}, and gets {given}" if wrong else None


def test_calls_fit_the_record() -> None:
    # The module's own class has other methods.
    own = {f"nixl_agent.{name}" for name in vars(vmmfd.nodes._Agent)} - {"nixl_agent.__init__"}
    signatures = json.loads(RECORD.read_text())["signatures"]["nixl_cu12/_api.py"]
    used = [call for call in calls() if call[0] not in own]
    assert {name for name, _, _ in used} == set(signatures)
    assert not [found for call in used if (found := problem(call, signatures[call[0]]))]


def test_wrong_calls_are_found() -> None:
    signature = "(self, descs, kind: str='x') -> int"
    assert problem(("f", 1, ["kind"]), signature) is None
    for call in (("f", 0, []), ("f", 3, []), ("f", 1, ["other"]), ("f", 2, ["kind"])):
        assert problem(call, signature)


def test_installed_nixl_has_the_signatures() -> None:
    found = importlib.util.find_spec("nixl_cu12")
    if found is None or found.origin is None:
        pytest.skip("nixl-cu12 is not installed")
    if not SCRIPT.exists():
        pytest.skip("the scripts are not beside the tests")
    folder = Path(found.origin).parent.parent
    done = subprocess.run([*PYTHON, SCRIPT, folder, "--record", RECORD], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
