"""Dependencies between the package's files, and between the extension's, have no cycles. Functions have at most 80 lines."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "vmmfd"
EXTENSION = Path(__file__).parent.parent / "src"

Graph = dict[str, set[str]]


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def running(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes of code that runs: no imports for type checkers."""
    for child in ast.iter_child_nodes(node):
        if is_type_checking(child):
            assert isinstance(child, ast.If)
            for other in child.orelse:
                yield from running(other)
        else:
            yield child
            yield from running(child)


def python_graph(package: Path) -> Graph:
    files = {".".join([package.name, *path.relative_to(package).with_suffix("").parts]): path for path in package.rglob("*.py")}
    files = {name.removesuffix(".__init__"): path for name, path in files.items()}
    # The extension only has a stub, and is the lowest layer.
    graph: Graph = {f"{package.name}.{path.stem}": set() for path in package.glob("*.pyi")}
    for name, path in files.items():
        found: set[str] = set()
        for node in running(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    parts = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
                    base = ".".join([*parts[: len(parts) - node.level + 1], *filter(None, [base])])
                # `from package import module` is an import of the module.
                found |= {inner if (inner := f"{base}.{alias.name}") in files or inner in graph else base for alias in node.names}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                # A module imported by name.
                found.add(node.value)
        graph[name] = (found & files.keys()) - {name}
    return graph


def rust_graph(folder: Path) -> Graph:
    files = {path.stem: path for path in folder.glob("*.rs")}
    graph: Graph = {}
    for name, path in files.items():
        code = re.sub(r"//.*", "", path.read_text())
        found = set(re.findall(r"(?:\b(?:crate|super)::|^mod )(\w+)", code, re.MULTILINE))
        for start in re.finditer(r"\b(?:crate|super)::\{", code):
            # Collect the names at the first level of the braces.
            depth, word = 1, ""
            for character in code[start.end() :]:
                if character in "{}":
                    depth += 1 if character == "{" else -1
                if depth == 0 or (depth == 1 and character == ","):
                    found.add(re.split(r"::|\s+as\s", word.strip())[0])
                    word = ""
                    if depth == 0:
                        break
                elif depth == 1:
                    word += character
        # Other names belong to the root.
        graph[name] = {each if each in files else "lib" for each in found if each} - {name}
    return graph


def cycle(graph: Graph) -> list[str]:
    """Returns a path from a file back to it, or nothing."""
    done: set[str] = set()

    def search(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for other in sorted(graph[name]):
            if found := search(other, [*path, name]):
                return found
        done.add(name)
        return []

    return next((found for name in sorted(graph) if (found := search(name, []))), [])


def test_python_files_have_no_cycle() -> None:
    graph = python_graph(PACKAGE)
    assert "vmmfd._lease" in graph["vmmfd._broker"] and "vmmfd.torch._get" in graph["vmmfd._lease"]
    assert cycle(graph) == []


def test_rust_files_have_no_cycle() -> None:
    graph = rust_graph(EXTENSION)
    assert "memory" in graph["dlpack"] and "client" in graph["lib"]
    assert cycle(graph) == []


def test_cycle_is_found(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text("TYPE_CHECKING = False\nif TYPE_CHECKING:\n    from . import one\n")
    (tmp_path / "one.py").write_text("import os\nfrom . import two\n")
    (tmp_path / "two.py").write_text("def late() -> None:\n    from .one import a\n")
    name = tmp_path.name
    assert cycle(python_graph(tmp_path)) == [f"{name}.one", f"{name}.two", f"{name}.one"]
    (tmp_path / "lib.rs").write_text("mod a;\nmod b;\nuse crate::{b::{self, C}, a};\n")
    (tmp_path / "a.rs").write_text("use crate::{\n    d,\n    b::{X, y::Z},\n};\n")
    (tmp_path / "b.rs").write_text("// crate::a\nfn f() { crate::a::g() }\n")
    assert cycle(rust_graph(tmp_path)) == ["a", "b", "a"]


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Returns the function's number of lines, without its docstring."""
    assert function.end_lineno is not None
    first = function.body[0]
    docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    lines = function.end_lineno - function.lineno + 1
    return lines - (first.end_lineno or 0) + first.lineno - 1 if docstring else lines


def test_functions_have_at_most_80_lines() -> None:
    found = {
        f"{path.name}:{node.lineno}": length(node)
        for folder in (PACKAGE, Path(__file__).parent)
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
    assert len(found) > 500
    assert {place: lines for place, lines in found.items() if lines > 80} == {}
