"""Shared helpers: the lazy import of PyTorch, problem lists, and byte ranges of storages."""

from __future__ import annotations

import functools
import importlib
from bisect import bisect_right
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

# The most problems that an error lists.
_LISTED = 40


@functools.cache
def _torch() -> Any:
    return importlib.import_module("torch")


def _listed(problems: list[str]) -> str:
    more = [f"and {len(problems) - _LISTED} more"] if len(problems) > _LISTED else []
    return "".join(f"\n- {problem}" for problem in [*problems[:_LISTED], *more])


@functools.cache
def _weak() -> Any:
    return importlib.import_module("torch.multiprocessing.reductions").StorageWeakRef


def _storage(tensor: Any) -> Any:
    """Returns a weak reference to a tensor's storage, equal for all its views; None for a tensor without storage, such as a sparse one.
    While the reference lives, no other storage compares equal."""
    try:
        # Bypass tensor subclasses and function modes.
        with _torch()._C.DisableTorchFunction():
            return _weak()(tensor.untyped_storage())
    except Exception:
        return None


_Span = tuple[int, int]
"""A byte range of a storage."""


def _span(tensor: Any) -> tuple[int, int]:
    """Returns the byte range of its storage that a non-empty tensor covers."""
    size = tensor.element_size()
    begin = tensor.storage_offset() * size
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * size


def _merged(spans: Iterable[_Span]) -> list[_Span]:
    """Merges overlapping ranges and sorts them. Each starts at a multiple of 256, which keeps elements aligned."""
    merged: list[_Span] = []
    for begin, end in sorted((begin // 256 * 256, end) for begin, end in spans):
        if merged and begin < merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged


def _around(spans: list[_Span], place: int) -> _Span:
    """Returns the range, from `_merged`, that contains an offset."""
    return spans[bisect_right(spans, place, key=lambda span: span[0]) - 1]


def _copied(storage: Any, begin: int, end: int) -> tuple[Any, Any]:
    """Copies a byte range of a storage. Returns the private copy and its source, as tensors."""
    torch = _torch()
    source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, begin, (end - begin,), (1,))
    return torch.empty_like(source).copy_(source), source
