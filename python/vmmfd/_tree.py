"""Nested dicts, lists and tuples of arrays, as an object's flat arrays.

Each array of a nested value has a `path` among its attributes: for each level the key of a dict (a str, or `{"int": key}`), the index in a
list (an int) or in a tuple (`[index]`). The first array also has the `leaves`, the largest containers and plain values without any array:
a JSON text, since JSON readers may change the order of keys and round large numbers. It lists for each leaf the number of arrays before it,
its path, and its value, in which `{"dict": [[key, value], ...]}`, `{"tuple": [...]}`, `{"float": "nan"}` and `{"int": "0xff"}` stand for
values that JSON lacks, or Python converts only up to some number of digits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from . import _types as t
from ._arguments import PLAIN, shown
from ._errors import Invalid
from ._native import Array, Device, Memory

# A level of a path, for JSON.
Step = t.Any
Path = list[Step]

# The largest JSON text of the leaves. The attributes of an array have at most 1 MiB, and the path is among them.
_MAX_LEAVES = 960 << 10

# The most levels of a value.
_DEEPEST = 32

# The largest int in decimal digits.
_MAX_BITS = 64

# The alignment of copies, in bytes.
_ALIGNMENT = 256


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
        return [(*_key(key, texts), of) for key, of in value.items()]
    if isinstance(value, tuple):
        if type(value) is not tuple:
            raise Invalid(
                f"{_shown(texts)} has type {type(value).__name__}, which would come back as a tuple: put its _asdict(), or tuple(...)"
            )
        return [([index], index, of) for index, of in enumerate(value)]
    return [(index, index, of) for index, of in enumerate(value)] if isinstance(value, list) else None


def _key(key: object, texts: list[str]) -> tuple[Step, str | int]:
    """Returns the level of a path for a dict's key, and the key without its own class, such as an enum."""
    if isinstance(key, str):
        text = _text(str.__str__(key), texts)
        return text, text
    if type(key) is not int:
        raise TypeError(f"{_shown(texts)} has the key {shown(key)}, of type {type(key).__name__}: keys are str, and int in nested dicts")
    if key.bit_length() > _MAX_BITS:
        raise Invalid(f"{_shown(texts)} has a key of {key.bit_length()} bits, and at most {_MAX_BITS} are allowed: use a str")
    return {"int": key}, key


def _text(text: str, texts: list[str]) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Invalid(f"a str in {_shown(texts)} has an unpaired surrogate, which is not valid Unicode") from None
    return text


def _shown(texts: list[str]) -> str:
    return f"value[{'/'.join(texts)!r}]" if texts else "value"


def _encoded(leaf: t.Any, texts: list[str]) -> t.Any:
    steps = _steps(leaf, texts)
    if steps is None:
        if isinstance(leaf, str):
            return _text(leaf, texts)
        if isinstance(leaf, float):
            return leaf if math.isfinite(leaf) else {"float": repr(leaf)}
        return {"int": hex(leaf)} if type(leaf) is int and leaf.bit_length() > _MAX_BITS else leaf
    inner = [(key, _encoded(of, [*texts, str(key)])) for _, key, of in steps]
    if isinstance(leaf, Mapping):
        return {"dict": inner}
    values = [of for _, of in inner]
    return {"tuple": values} if isinstance(leaf, tuple) else values


# The conversions of numbers that JSON has as text.
_NUMBERS: dict[str, Callable[[str], t.Any]] = {"float": float, "int": lambda text: int(text, 16)}


def _decoded(leaf: t.Any) -> t.Any:
    if isinstance(leaf, list):
        return [_decoded(of) for of in leaf]
    if not isinstance(leaf, dict):
        return leaf
    ((kind, of),) = leaf.items()
    if kind in _NUMBERS:
        return _NUMBERS[kind](of)
    if kind not in ("dict", "tuple"):
        raise ValueError(f"a value of kind {shown(kind)}")
    return {key: _decoded(of) for key, of in of} if kind == "dict" else tuple(map(_decoded, of))


class _Node(dict[t.Any, t.Any]):
    """A container in progress. `kind` is the type of the finished one, and `parts` has the part that each member is from."""

    def __init__(self, kind: type) -> None:
        self.kind = kind
        self.parts: dict[t.Any, str] = {}

    def finished(self) -> t.Any:
        items = {key: of.finished() if isinstance(of, _Node) else of for key, of in self.items()}
        return items if self.kind is dict else self.kind(items[index] for index in sorted(items))


def restored(
    rows: Iterable[tuple[str, str, t.Any, dict[str, t.Any] | None]], convert: Callable[[t.Any], t.Any]
) -> dict[str, t.Any]:
    """Returns the nested value of arrays, each given with its part, name and attributes. Raises `Invalid` if two parts have different values
    at one place, and for attributes that `Flat` does not make."""
    root, seen = _Node(dict), dict[str, str]()
    leaves: list[tuple[int, Path, t.Any]] = []
    # The number of arrays since the one that has the leaves, and its part.
    count, of = 0, ""
    for part, name, array, attributes in rows:
        if name in seen:
            raise Invalid(f"the parts {seen[name]!r} and {part!r} both have an array {name!r}: give part={part!r}")
        seen[name] = part
        found = attributes or {}
        with _refusing_others():
            if "leaves" in found:
                _place_all(root, leaves, of)
                leaves, count, of = _parsed(found["leaves"])[::-1], 0, part
            while leaves and leaves[-1][0] <= count:
                _place_all(root, [leaves.pop()], of)
            node, key, path = _member(root, found.get("path", [name]), part)
        if key in node:
            raise _conflict(node, key, path, part)
        node[key], node.parts[key] = convert(array), part
        count += 1
    with _refusing_others():
        _place_all(root, leaves, of)
    tree: dict[str, t.Any] = root.finished()
    return tree


@contextmanager
def _refusing_others() -> Iterator[None]:
    """Raises `Invalid` for attributes that `Flat` does not make: another program may have put them."""
    try:
        yield
    except Invalid:
        raise
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        raise Invalid(f"the attributes of the arrays do not describe a nested value ({shown(error)}): get each array by its name") from None


def _parsed(text: str) -> list[tuple[int, Path, t.Any]]:
    """Returns the leaves of a text. Raises `TypeError` and `ValueError` for other texts."""
    rows = json.loads(text)
    if not isinstance(rows, list):
        raise TypeError("leaves that are not a list")
    leaves: list[tuple[int, Path, t.Any]] = [(count, path, leaf) for count, path, leaf in rows]
    if not all(type(count) is int for count, _, _ in leaves):
        raise TypeError("a leaf without its number of arrays")
    return leaves


def _place_all(root: _Node, leaves: list[tuple[int, Path, t.Any]], part: str) -> None:
    for _, path, leaf in reversed(leaves):
        _place(root, path, leaf, part)


def _place(root: _Node, path: Path, leaf: t.Any, part: str) -> None:
    node, key, texts = _member(root, path, part)
    if isinstance(leaf, dict) and "dict" in leaf:
        # Member by member: other parts may have other members.
        _child(node, key, dict, texts, part)
        for inner, of in leaf["dict"]:
            _place(root, [*path, inner if isinstance(inner, str) else {"int": inner}], of, part)
    elif key not in node:
        node[key], node.parts[key] = _decoded(leaf), part
    elif type(node[key]) not in (*PLAIN, list, tuple) or _comparable(_encoded(node[key], [])) != _comparable(leaf):
        raise _conflict(node, key, texts, part)


def _comparable(leaf: t.Any) -> str:
    """Returns an encoded value as a text that does not depend on the order of a dict's keys."""
    if isinstance(leaf, dict) and "dict" in leaf:
        return f"{{{sorted((json.dumps(key), _comparable(of)) for key, of in leaf['dict'])}}}"
    if isinstance(leaf, dict):
        return repr(sorted((kind, _comparable(of)) for kind, of in leaf.items()))
    return repr(list(map(_comparable, leaf))) if isinstance(leaf, (list, tuple)) else json.dumps(leaf)


def _member(root: _Node, path: Path, part: str) -> tuple[_Node, t.Any, list[str]]:
    """Returns the container of a path's last level, its key there, and the path as text."""
    if not isinstance(path, list) or not 0 < len(path) <= _DEEPEST or isinstance(path[0], (int, list)):
        raise ValueError(f"path {shown(path)}")
    levels = [_level(step) for step in path]
    texts = [str(key) for _, key in levels]
    node = root
    for number, (_, key) in enumerate(levels[:-1]):
        node = _child(node, key, levels[number + 1][0], texts[: number + 1], part)
    return node, levels[-1][1], texts


def _level(step: Step) -> tuple[type, t.Any]:
    """Returns the type of a container, and the key of its member."""
    if isinstance(step, str):
        return dict, step
    kind: type = list
    key = step
    if isinstance(step, dict):
        kind, key = dict, step["int"]
    elif isinstance(step, list):
        kind, key = tuple, step[0]
    if type(key) is not int:
        raise TypeError(f"path with the level {shown(step)}")
    return kind, key


def _child(node: _Node, key: t.Any, kind: type, texts: list[str], part: str) -> _Node:
    found = node.get(key)
    if key not in node:
        found = node[key] = _Node(kind)
        node.parts[key] = part
    elif not isinstance(found, _Node) or found.kind is not kind:
        raise _conflict(node, key, texts, part)
    return found


def _conflict(node: _Node, key: t.Any, texts: list[str], part: str) -> Invalid:
    return Invalid(f"the parts {node.parts[key]!r} and {part!r} have different values at {'/'.join(texts)!r}: give part={part!r}")


def copies(arrays: list[Array]) -> Iterator[Array]:
    """Returns writable copies of arrays, in one new memory of each device."""
    devices = [array.device for array in arrays]
    rooms: dict[Device, int] = {}
    offsets = []
    for array, device in zip(arrays, devices):
        offsets.append(rooms.get(device, 0))
        rooms[device] = offsets[-1] + -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    memories = {
        device: Memory(room, backend=device.backend, device=device if device.backend == "cuda" else None)
        for device, room in rooms.items()
    }
    for array, device, offset in zip(arrays, devices, offsets):
        copy = memories[device].array(array.dtype, array.shape, None, offset)
        copy.copy_from(array)
        yield copy
