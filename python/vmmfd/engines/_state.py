"""The plain Python values that loading sets in a model: sizes that a kernel remembers, flags, `None` for a missing scale.

A class that accepts processed weights should restore such values itself. vLLM 0.33's kernel for per-tensor FP8 does not: it keeps a size
that only weight processing sets. So the changes are published with the weights.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from enum import Enum
from typing import Any

# Exactly these types: an enum that is a str or an int would return as the bare value.
_PLAIN = (type(None), bool, int, float, str)

State = dict[tuple[str, str], Any]
"""Values by the path of a module and the attribute in it, `quant_method.fp8_linear.size` say. For an object that is not plain: its type."""


def _holders(module: Any) -> Iterator[tuple[str, Any]]:
    """Yields the objects that hold state of a module: itself, its quantisation method, and the method's kernels."""
    yield "", module
    method = getattr(module, "quant_method", None)
    if method is not None and hasattr(method, "__dict__"):
        yield "quant_method.", method
        for name, value in vars(method).items():
            if "kernel" in type(value).__name__.lower() and hasattr(value, "__dict__"):
                yield f"quant_method.{name}.", value


def backends(model: Any) -> dict[str, int]:
    """Returns the backends of a model: the number of layers per combination of quantisation method, kernels and attention. An option such
    as `auto` does not identify the backend, which depends on the machine and the environment."""
    found: Counter[str] = Counter()
    for _, module in model.named_modules():
        words = [type(module.impl).__name__] if hasattr(getattr(module, "impl", None), "__dict__") else []
        for prefix, holder in _holders(module):
            if not prefix:
                continue
            words.append(type(holder).__name__)
            for name, value in vars(holder).items():
                if isinstance(value, (bool, Enum)):
                    words.append(f"{name}={value.name if isinstance(value, Enum) else value}")
                elif isinstance(value, type):
                    words.append(f"{name}={value.__name__}")
        if words:
            found[" ".join(words)] += 1
    return dict(found)


def state(model: Any) -> State:
    """Returns the current state of a model's modules."""
    import torch

    found: State = {}
    for path, module in model.named_modules():
        for prefix, holder in _holders(module):
            for name, value in vars(holder).items():
                if not prefix and name == "training":
                    continue  # Every module has it, and the loader sets it itself.
                if type(value) in _PLAIN:
                    found[path, prefix + name] = value
                elif prefix and not isinstance(value, (torch.Tensor, torch.nn.Module)):
                    found[path, prefix + name] = [type(value).__name__]
    return found


def changes(before: State, after: State) -> list[list[Any]]:
    """Returns the values that differ between two states, as JSON. Infinities and NaN become text, as JSON lacks them."""
    missing = object()
    return [
        [*where, {"float": str(value)} if isinstance(value, float) and not math.isfinite(value) else value]
        for where, value in after.items()
        if before.get(where, missing) != value
    ]


def is_changes(value: Any) -> bool:
    """Returns whether a value has the form that `changes` returns."""
    return isinstance(value, list) and all(
        isinstance(row, list)
        and len(row) == 3
        and all(isinstance(of, str) for of in row[:2])
        and (
            isinstance(row[2], _PLAIN)
            or row[2] in ({"float": "inf"}, {"float": "-inf"}, {"float": "nan"})
            or (isinstance(row[2], list) and len(row[2]) == 1)
        )
        for row in value
    )


def restore(model: Any, changed: list[list[Any]]) -> list[str]:
    """Sets a maker's plain values in a model. Returns the names of other objects that the maker has and the model lacks."""
    modules = dict(model.named_modules(remove_duplicate=False))
    absent = []
    for path, attribute, value in changed:
        through, dot, name = attribute.rpartition(".")
        holder = dict(_holders(modules[path])).get(through + dot) if path in modules else None
        if holder is None:
            absent.append(f"{path}.{attribute}")
        elif isinstance(value, dict):
            vars(holder)[name] = float(value["float"])
        elif not isinstance(value, list):
            vars(holder)[name] = value
        elif vars(holder).get(name) is None:
            absent.append(f"{path}.{attribute}, a {value[0]}")
    return absent
