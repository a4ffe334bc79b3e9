"""Type checks of the package, of its stubs, and of user code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import vmmfd

pytest.importorskip("mypy", reason="needs mypy")


Mypy = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def mypy(tmp_path_factory: pytest.TempPathFactory) -> Mypy:
    """Runs strict mypy with a shared cache: mypy reads the types of the standard library and NumPy once."""
    folder = tmp_path_factory.mktemp("mypy")

    def run(*arguments: str, exceptions: str = "") -> subprocess.CompletedProcess[str]:
        config = folder / "mypy.ini"
        config.write_text(f"[mypy]\nstrict = True\n[mypy-{OTHERS}]\nignore_missing_imports = True\nfollow_imports = skip\n{exceptions}")
        command = [sys.executable, "-m", "mypy", "--config-file", str(config), *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=folder)

    return run


EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

# Packages that the package and the examples import, and that CI may lack.
OTHERS = "lmcache.*,torch.*,transformers.*,vllm.*,ray.*,numba.*"


def test_mypy_accepts_the_package(mypy: Mypy) -> None:
    # By module name: with a path, mypy would check everything installed beside it.
    done = mypy("-p", "vmmfd")
    assert done.returncode == 0, done.stdout + done.stderr


def test_mypy_accepts_the_examples(mypy: Mypy) -> None:
    if not EXAMPLES.exists():
        pytest.skip("the examples are not beside the tests")
    files = list(EXAMPLES.glob("*.py"))
    untyped = "".join(f"disallow_{each} = False\n" for each in ("subclassing_any", "untyped_calls", "untyped_decorators"))
    done = mypy(*map(str, files), exceptions=f"[mypy-{','.join(file.stem for file in files)}]\n{untyped}")
    assert done.returncode == 0, done.stdout + done.stderr


def pyright(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("basedpyright", reason="needs basedpyright")
    # Not by the interpreter: with it, the checker finds no package in a virtual environment.
    environment = {**os.environ, "PYTHONPATH": str(Path(vmmfd.__file__).parent.parent)}
    command = [sys.executable, "-m", "basedpyright", *options]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)


def test_pyright_accepts_the_examples(tmp_path: Path) -> None:
    if not EXAMPLES.exists():
        pytest.skip("the examples are not beside the tests")
    # pyright's own rules. An error of a missing import is about this machine.
    missing = {"reportMissingImports": False, "reportMissingModuleSource": False}
    config = {"include": [f"{EXAMPLES}/*.py"], "typeCheckingMode": "standard", **missing}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))
    done = pyright(tmp_path)
    assert done.returncode == 0 and "0 errors" in done.stdout, done.stdout + done.stderr


def test_public_types_are_complete(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs ray")
    done = pyright(tmp_path, "--verifytypes", "vmmfd", "--ignoreexternal")
    assert "Type completeness score: 100%" in done.stdout, done.stdout


def test_stubtest_accepts_the_stubs(tmp_path: Path) -> None:
    # Names that PyO3 adds, and a method that Python 3.11 lacks.
    (tmp_path / "allowed").write_text("vmmfd._native.__all__\nvmmfd._native.Array.__buffer__\n")
    options = ["--allowlist", str(tmp_path / "allowed"), "--ignore-unused-allowlist"]
    done = subprocess.run([sys.executable, "-m", "mypy.stubtest", *options, "vmmfd._native"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_user_code_is_checked(mypy: Mypy, tmp_path: Path) -> None:
    code = tmp_path / "program.py"
    code.write_text(
        """
import datetime
import vmmfd

def use(broker: vmmfd.Broker) -> int:
    with broker.get("a", wait=datetime.timedelta(seconds=1), expect={"k": 1}) as lease:
        array: vmmfd.Array = lease["x"]
        for name, one in lease.items():
            assert isinstance(name, str) and one.shape
        wrong: str = lease.version
    summaries: list[vmmfd.records.Summary] = broker.list()
    leases: list[vmmfd.Lease] = broker.get_all(["a"])
    broker.put("a", {"x": array}, lifetime="maker", replace_version=3)
    broker.put("a", {"x": array}, lifetime="for ever")
    return len(summaries) + len(leases)
"""
    )
    done = mypy(str(code))
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert len(errors) == 2 and "[assignment]" in errors[0] and "[arg-type]" in errors[1], done.stdout
