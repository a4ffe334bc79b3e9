"""`help()` of each public name: types, units and errors, in its own docstring or in those that it refers to."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

import vmmfd

MODULES = ["vmmfd", "vmmfd.engines.vllm", "vmmfd.legacy", "vmmfd.nodes", "vmmfd.pool", "vmmfd.ray", "vmmfd.records", "vmmfd.torch"]

# "As `get`", "those of `Broker.put`", "see `connect`", "Raises as `get` and `Lease.prepare`".
REFERENCE = re.compile(r"(?:\bas|\bAs|\bsee|\bSee|\bof|\band) (?:the `\w+` of )?`([\w.]+)`")

# The word that names a parameter's unit, by its name and annotation.
UNITS = {r".*: .*\b(Time|timedelta)\b": "seconds", r"\w*(size|bytes|offset): .*\bint\b": "bytes", r"(keep|consumers|threads): ": "number"}

# The classes whose objects users create.
CREATED = ["vmmfd.nodes.Node", "vmmfd.pool.Pool"]


def imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        pytest.skip(f"{error.name} is not installed, for {name}")


def public(module: ModuleType) -> dict[str, Any]:
    """The names of `__all__`, else the functions of the module."""
    own = [name for name, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__]
    return {name: getattr(module, name) for name in getattr(module, "__all__", own) if name[0] != "_"}


def members(kind: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties of a class, also the inherited ones of this package."""
    for base in kind.__mro__:
        if base.__module__.startswith("vmmfd"):
            for name, value in vars(base).items():
                # The class describes its slots.
                if name[0] != "_" and not inspect.ismemberdescriptor(value):
                    yield name, inspect.getattr_static(kind, name)


def entries(module: ModuleType) -> dict[str, tuple[Any, type | None]]:
    """What `help` shows, by its name: the object and its class."""
    found: dict[str, tuple[Any, type | None]] = {}
    for name, value in public(module).items():
        found[name] = value, None
        if inspect.isclass(value):
            found |= {f"{name}.{member}": (of, value) for member, of in members(value)}
    return found


def documented(value: Any, near: type | None, module: ModuleType, seen: frozenset[str] = frozenset()) -> str:
    """Its docstring, and those that it refers to: methods of its class, names of its module or of `vmmfd`."""
    text = inspect.getdoc(value) or ""
    for name in set(REFERENCE.findall(text)) - seen:
        for start in (near, module, vmmfd):
            try:
                other = inspect.getattr_static(start, name) if "." not in name else eval(name, {**vars(vmmfd), **vars(module)})
            except (AttributeError, NameError):
                continue
            if callable(other):
                text += "\n" + documented(other, near, module, seen | {name})
                break
    return text


def parameters(value: Any) -> dict[str, str]:
    """The annotation of each parameter, empty in the extension."""
    found = dict(inspect.signature(value).parameters)
    found.pop("self", None)
    return {name: "" if given.annotation is given.empty else str(given.annotation) for name, given in found.items()}


def raises(value: Any) -> bool:
    """Whether its own code has a `raise`."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(value.fget if isinstance(value, property) else value)))
    except (OSError, TypeError):
        return False
    return any(isinstance(node, ast.Raise) for node in ast.walk(tree))


def faults(name: str, value: Any, near: type | None, module: ModuleType) -> Iterator[str]:
    own = inspect.getdoc(value)
    if not own:
        yield "no docstring"
        return
    text = documented(value, near, module)
    # Users create few classes: `connect` makes the others' objects.
    given = {} if inspect.isclass(value) and f"{module.__name__}.{name}" not in CREATED else parameters(value) if callable(value) else {}
    for parameter, kind in given.items():
        if not kind and not re.search(rf"`{parameter}\b", text):
            yield f"{parameter} has no type"
        for pattern, unit in UNITS.items():
            if re.match(pattern, f"{parameter}: {kind}") and not re.search(rf"\b{unit}\b", text):
                yield f"{parameter} has no unit ({unit})"
    if (given or not inspect.isclass(value) and raises(value)) and not re.search(r"\b[Rr]aise", text):
        yield "no errors"


@pytest.mark.parametrize("name", MODULES)
def test_help_has_types_units_and_errors(name: str) -> None:
    module = imported(name)
    found = [f"{name}.{entry}: {fault}" for entry, (value, near) in entries(module).items() for fault in faults(entry, value, near, module)]
    assert not found, "\n" + "\n".join(found)
