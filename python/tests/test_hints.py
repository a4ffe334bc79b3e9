"""Annotations, stubs and docstrings: public names resolve, and agree with the code."""

from __future__ import annotations

import ast
import inspect
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import vmmfd
import vmmfd.legacy
import vmmfd.pool
import vmmfd.torch
from vmmfd import _native

MODULES = (vmmfd, vmmfd.legacy, vmmfd.pool, vmmfd.records, vmmfd.torch)
STUBS = ast.parse((Path(vmmfd.__file__).parent / "_native.pyi").read_text())


def public() -> Iterator[tuple[str, Any]]:
    """Yields public classes and functions, their methods and properties."""
    for module in MODULES:
        for name in module.__all__:
            one = getattr(module, name)
            if not callable(one):
                continue
            yield f"{module.__name__}.{name}", one
            if not isinstance(one, type):
                continue
            for attribute, value in inspect.getmembers_static(one):
                value = getattr(value, "__func__", value)
                value = value.fget if isinstance(value, property) else value
                is_public = not attribute.startswith("_") or attribute in ("__init__", "__enter__", "__exit__", "__getitem__", "__iter__")
                if is_public and inspect.isfunction(value) and value.__module__.startswith("vmmfd"):
                    yield f"{module.__name__}.{name}.{attribute}", value


@pytest.mark.parametrize(("name", "one"), [pytest.param(*found, id=found[0]) for found in public()])
def test_hints_can_be_evaluated(name: str, one: Any) -> None:
    hints = typing.get_type_hints(one)
    # Classes of the extension only have signatures.
    given = getattr(one, "__annotations__", {})
    assert set(given) <= set(hints)
    assert not any(isinstance(hint, str | typing.ForwardRef) for hint in hints.values()), hints


def test_hints_are_correct() -> None:
    import datetime

    connect = typing.get_type_hints(vmmfd.connect)
    assert connect["timeout"] == float | datetime.timedelta and connect["return"] is vmmfd.Broker
    assert typing.get_type_hints(vmmfd.Broker.list)["return"] == list[vmmfd.records.Summary]
    assert typing.get_type_hints(vmmfd.records.Summary)["created"] is datetime.datetime
    assert typing.get_type_hints(vmmfd.records.Served)["error"] == str | None


def test_hints_need_no_torch(child: Any) -> None:
    child(
        """
        import sys, typing
        sys.modules["torch"] = None
        import vmmfd
        assert typing.get_type_hints(vmmfd.Broker.state_dict)["return"] == dict[str, typing.Any]
        """
    ).end()


def test_unused_hints_import_no_typing(child: Any) -> None:
    child(
        """
        import sys
        assert "typing" not in sys.modules
        import vmmfd
        heavy = {"typing", "datetime", "torch", "numpy"} & set(sys.modules)
        assert not heavy, heavy
        """
    ).end()


def classes() -> dict[str, ast.ClassDef]:
    return {node.name: node for node in STUBS.body if isinstance(node, ast.ClassDef)}


def documented() -> Iterator[tuple[str, str, Any]]:
    """Yields the extension's public names with a docstring in the stubs: name, docstring, object."""
    for node in STUBS.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and (one := vars(vmmfd).get(node.name)) is not None:
            if one is not vars(_native)[node.name]:
                continue
            text = ast.get_docstring(node)
            assert text, node.name
            yield node.name, text, one
            for item in node.body if isinstance(node, ast.ClassDef) else ():
                text = ast.get_docstring(item) if isinstance(item, ast.FunctionDef) else None
                # Python has its own docstrings for operator methods.
                if isinstance(item, ast.FunctionDef) and text and item.name not in ("__getitem__", "__setitem__", "__buffer__"):
                    yield f"{node.name}.{item.name}", text, getattr(one, item.name)


def test_stubs_and_code_share_docstrings() -> None:
    compared = set()
    for name, text, one in documented():
        assert inspect.cleandoc(one.__doc__ or "") == inspect.cleandoc(text), name
        compared.add(name)
    assert {"Array", "Array.dtype", "Array.copy_from", "Device.uuid", "empty", "asarray", "same_device"} <= compared


@pytest.mark.parametrize("kind", ["Array", "Device"])
def test_docstrings_list_attributes(kind: str) -> None:
    text = getattr(vmmfd, kind).__doc__
    for item in classes()[kind].body:
        if isinstance(item, ast.FunctionDef) and item.decorator_list and not item.name.startswith("_"):
            assert f"`{item.name}`" in text, item.name


@pytest.mark.parametrize("function", ["empty", "zeros", "asarray"])
def test_docstrings_name_parameters(function: str) -> None:
    one = getattr(vmmfd, function)
    for name in inspect.signature(one).parameters:
        assert f"`{name}`" in one.__doc__, name
    assert "`Array`" in one.__doc__.partition("\n")[0] and "(int, str or `Device`)" in one.__doc__


def test_attributes_match_stub_types() -> None:
    array = vmmfd.empty((2, 3), "float32", backend="host")
    names = {**vars(vmmfd), "Memory": _native.Memory, "Any": object, "Literal": typing.Literal}
    for one in (array, array.device):
        for item in classes()[type(one).__name__].body:
            if not isinstance(item, ast.FunctionDef) or not item.decorator_list or item.name == "__cuda_array_interface__":
                continue
            assert item.returns is not None
            wanted = eval(ast.unparse(item.returns), names)  # noqa: S307
            value = getattr(one, item.name)
            if typing.get_origin(wanted) is typing.Literal:
                assert value in typing.get_args(wanted), item.name
            else:
                # For `tuple[int, ...]`, check `tuple`.
                of = wanted if isinstance(wanted, types.UnionType) else typing.get_origin(wanted) or wanted
                assert isinstance(value, of), (item.name, value)
    assert isinstance(next(iter(array)), vmmfd.Array)
