"""Nested dicts, lists and tuples of arrays, as an object's flat arrays.

Each array of a nested value has a `path` among its attributes: for each level the key of a dict (a str, or `{"int": key}`), the index in a
list (an int) or in a tuple (`[index]`). The first array has the `leaves` that are no arrays, each as a path and a value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from . import _types as t
from ._errors import Invalid

_PLAIN = (str, int, float, bool, type(None))

# A level of a path, for JSON, and its text in an array's name.
Step = t.Any
Path = list[Step]


class Flat:
    """A nested value as flat arrays, with the attributes of each that restore it."""

    def __init__(self, value: Mapping[str, t.Any]) -> None:
        self.arrays: dict[str, t.Any] = {}
        self.attributes: dict[str, dict[str, t.Any]] = {}
        leaves: list[tuple[Path, t.Any]] = []
        for path, texts, leaf in _leaves(value, [], []):
            name = "/".join(texts)
            if _is_plain(leaf):
                leaves.append((path, _encoded(leaf)))
            elif name in self.arrays:
                raise Invalid(f"two arrays of the value have the path {name!r}: rename a key")
            else:
                self.arrays[name], self.attributes[name] = leaf, {"path": path}
        if not self.arrays:
            raise Invalid("there is no array to put among nested numbers, texts and containers: convert numbers with numpy.asarray()")
        if leaves:
            self.attributes[next(iter(self.arrays))]["leaves"] = leaves


def _is_plain(leaf: object) -> bool:
    # Not a subclass: a NumPy scalar, which is an array. Containers here are empty.
    return type(leaf) in _PLAIN or isinstance(leaf, (Mapping, list, tuple))


def _leaves(value: t.Any, path: Path, texts: list[str]) -> Iterator[tuple[Path, list[str], t.Any]]:
    """Yields the arrays, plain values and empty containers, each with its path."""
    steps: Iterable[tuple[Step, object, t.Any]]
    if isinstance(value, Mapping):
        steps = ((_key(key, texts), key, of) for key, of in value.items())
    elif isinstance(value, tuple):
        if type(value) is not tuple:
            raise Invalid(
                f"{_shown(texts)} has type {type(value).__name__}, which would come back as a tuple: put its _asdict(), or tuple(...)"
            )
        steps = (([index], index, of) for index, of in enumerate(value))
    elif isinstance(value, list):
        steps = ((index, index, of) for index, of in enumerate(value))
    else:
        yield path, texts, value
        return
    if len(path) >= 32:
        raise Invalid(f"{_shown(texts)} is nested more than 32 levels deep: flatten it")
    empty = True
    for step, text, of in steps:
        empty = False
        yield from _leaves(of, [*path, step], [*texts, str(text)])
    if empty:
        yield path, texts, value


def _key(key: object, texts: list[str]) -> Step:
    if isinstance(key, str):
        return str(key)
    if type(key) is int:
        return {"int": key}
    raise Invalid(f"{_shown(texts)} has the key {key!r}, of type {type(key).__name__}: keys are str, and int in nested dicts")


def _shown(texts: list[str]) -> str:
    return f"value[{'/'.join(texts)!r}]" if texts else "value"


def _encoded(leaf: t.Any) -> t.Any:
    if isinstance(leaf, float) and (leaf != leaf or leaf in (float("inf"), float("-inf"))):
        # JSON lacks them.
        return {"float": repr(leaf)}
    if isinstance(leaf, tuple):
        return {"tuple": 0}
    return {} if isinstance(leaf, Mapping) else leaf


def _decoded(leaf: t.Any) -> t.Any:
    if isinstance(leaf, dict) and leaf:
        return float(leaf["float"]) if "float" in leaf else ()
    return leaf


class _Node(dict[t.Any, t.Any]):
    """A container in progress. `kind` is the type of the finished one."""

    kind: type = dict

    def finished(self) -> t.Any:
        items = {key: of.finished() if isinstance(of, _Node) else of for key, of in self.items()}
        return items if self.kind is dict else self.kind(items[index] for index in sorted(items))


def restored(
    rows: Iterable[tuple[str, str, t.Any, dict[str, t.Any] | None]], convert: Callable[[t.Any], t.Any]
) -> dict[str, t.Any]:
    """Returns the nested value of arrays, each given with its part, name and attributes. Raises `Invalid` if two have one name."""
    root, seen = _Node(), dict[str, str]()
    for part, name, array, attributes in rows:
        if name in seen:
            raise Invalid(f"the parts {seen[name]!r} and {part!r} both have an array {name!r}: give part={part!r}")
        seen[name] = part
        found = attributes or {}
        _place(root, found.get("path", [name]), convert(array))
        for path, leaf in found.get("leaves", ()):
            _place(root, path, _decoded(leaf))
    tree: dict[str, t.Any] = root.finished()
    return tree


def _place(node: _Node, path: Path, leaf: t.Any) -> None:
    for number, step in enumerate(path):
        kind: type
        if isinstance(step, dict):
            kind, key = dict, step["int"]
        elif isinstance(step, list):
            kind, key = tuple, step[0]
        else:
            kind, key = (list if isinstance(step, int) else dict), step
        node.kind = kind
        if number == len(path) - 1:
            node[key] = leaf
        else:
            node = node.setdefault(key, _Node())
