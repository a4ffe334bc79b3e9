"""Nested dicts, lists and tuples of arrays, as an object's flat arrays.

Each array of a nested value has a `path` among its attributes: for each level the key of a dict (a str, or `{"int": key}`), the index in a
list (an int) or in a tuple (`[index]`). The first array also has the `leaves`, the largest containers and plain values without any array:
a JSON text, since JSON readers may change the order of keys and round large numbers. It lists for each leaf the number of arrays before it,
its path, and its value, in which `{"dict": [[key, value], ...]}`, `{"tuple": [...]}` and `{"float": "nan"}` stand for what JSON lacks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping

from . import _types as t
from ._arguments import PLAIN
from ._errors import Invalid

# A level of a path, for JSON.
Step = t.Any
Path = list[Step]

# The largest JSON text of the leaves. The attributes of an array have at most 1 MiB, and the path is among them.
_MAX_LEAVES = 960 << 10

# The most levels of a value.
_DEEPEST = 32

# Python converts an int of up to 4300 digits to text.
_MAX_BITS = 14_000


class Flat:
    """A nested value as flat arrays, with the attributes of each that restore it."""

    def __init__(self, value: Mapping[str, t.Any]) -> None:
        self.arrays: dict[str, t.Any] = {}
        self.attributes: dict[str, dict[str, t.Any]] = {}
        leaves: list[tuple[int, Path, t.Any]] = []
        rows = _rows(value, [], [])
        if rows is None:
            raise Invalid("there is no array to put among nested numbers, texts and containers: convert numbers with numpy.asarray()")
        for path, texts, of in rows:
            name = "/".join(texts)
            if _steps(of, texts) is not None or type(of) in PLAIN:
                leaves.append((len(self.arrays), path, _encoded(of, texts)))
            elif name in self.arrays:
                raise Invalid(f"two arrays of the value have the path {name!r}: rename a key")
            else:
                self.arrays[name], self.attributes[name] = of, {"path": path}
        if leaves:
            text = json.dumps(leaves, separators=(",", ":"))
            # Within other JSON, these characters get a backslash.
            size = len(text) + text.count('"') + text.count("\\")
            if size > _MAX_LEAVES:
                raise Invalid(
                    f"the numbers and texts of the value need {size} bytes, and at most {_MAX_LEAVES} are allowed: put long ones as arrays"
                )
            self.attributes[next(iter(self.arrays))]["leaves"] = text


def _rows(value: t.Any, path: Path, texts: list[str]) -> list[tuple[Path, list[str], t.Any]] | None:
    """Returns the arrays and leaves of a value, each with its path, or None if it has no array."""
    steps = _steps(value, texts)
    if steps is None:
        return None if type(value) in PLAIN else [(path, texts, value)]
    if len(path) >= _DEEPEST:
        raise Invalid(f"{_shown(texts)} is nested more than {_DEEPEST} levels deep: flatten it")
    rows: list[tuple[Path, list[str], t.Any]] = []
    found = False
    for step, key, of in steps:
        at = [*path, step], [*texts, str(key)]
        inner = _rows(of, *at)
        found |= inner is not None
        rows += [(*at, of)] if inner is None else inner
    return rows if found else None


def _steps(value: t.Any, texts: list[str]) -> Iterable[tuple[Step, t.Any, t.Any]] | None:
    """Returns each member of a container, with its level of a path and its key, or None if the value is no container."""
    if isinstance(value, Mapping):
        return [(_key(key, texts), key, of) for key, of in value.items()]
    if isinstance(value, tuple):
        if type(value) is not tuple:
            raise Invalid(
                f"{_shown(texts)} has type {type(value).__name__}, which would come back as a tuple: put its _asdict(), or tuple(...)"
            )
        return [([index], index, of) for index, of in enumerate(value)]
    return [(index, index, of) for index, of in enumerate(value)] if isinstance(value, list) else None


def _key(key: object, texts: list[str]) -> Step:
    if isinstance(key, str):
        return _text(str(key), texts)
    if type(key) is int:
        return {"int": _whole(key, texts)}
    raise TypeError(f"{_shown(texts)} has the key {key!r}, of type {type(key).__name__}: keys are str, and int in nested dicts")


def _text(text: str, texts: list[str]) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Invalid(f"a str in {_shown(texts)} has an unpaired surrogate, which is not valid Unicode") from None
    return text


def _whole(number: int, texts: list[str]) -> int:
    if number.bit_length() > _MAX_BITS:
        raise Invalid(f"{_shown(texts)} is an int of {number.bit_length()} bits, and at most {_MAX_BITS} are allowed: put an array")
    return number


def _shown(texts: list[str]) -> str:
    return f"value[{'/'.join(texts)!r}]" if texts else "value"


def _encoded(leaf: t.Any, texts: list[str]) -> t.Any:
    steps = _steps(leaf, texts)
    if steps is None:
        if isinstance(leaf, str):
            return _text(leaf, texts)
        if isinstance(leaf, float):
            return leaf if math.isfinite(leaf) else {"float": repr(leaf)}
        return _whole(leaf, texts) if type(leaf) is int else leaf
    inner = [(key, _encoded(of, [*texts, str(key)])) for _, key, of in steps]
    if isinstance(leaf, Mapping):
        return {"dict": inner}
    values = [of for _, of in inner]
    return {"tuple": values} if isinstance(leaf, tuple) else values


def _decoded(leaf: t.Any) -> t.Any:
    if isinstance(leaf, list):
        return [_decoded(of) for of in leaf]
    if not isinstance(leaf, dict):
        return leaf
    ((kind, of),) = leaf.items()
    if kind == "float":
        return float(of)
    return {key: _decoded(of) for key, of in of} if kind == "dict" else tuple(map(_decoded, of))


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
    leaves: list[tuple[int, Path, t.Any]] = []
    # The number of arrays since the one that has the leaves.
    count = 0
    for part, name, array, attributes in rows:
        if name in seen:
            raise Invalid(f"the parts {seen[name]!r} and {part!r} both have an array {name!r}: give part={part!r}")
        seen[name] = part
        found = attributes or {}
        if "leaves" in found:
            _place_all(root, leaves)
            leaves, count = json.loads(found["leaves"])[::-1], 0
        while leaves and leaves[-1][0] <= count:
            _place_all(root, [leaves.pop()])
        _place(root, found.get("path", [name]), convert(array))
        count += 1
    _place_all(root, leaves)
    tree: dict[str, t.Any] = root.finished()
    return tree


def _place_all(root: _Node, leaves: list[tuple[int, Path, t.Any]]) -> None:
    for _, path, leaf in reversed(leaves):
        _place(root, path, _decoded(leaf))


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
