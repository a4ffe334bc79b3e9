"""What all of it needs: PyTorch when it is used, lists of problems, and bytes of storages."""

from __future__ import annotations

import functools
import importlib
from bisect import bisect_right
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

# How many problems an error lists.
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
    """A weak reference to a tensor's storage, which views of it have too; None if it has none, as a sparse tensor. While there is one,
    no other storage is equal to it."""
    try:
        # Neither a subclass of tensors nor a mode of functions has a say in it.
        with _torch()._C.DisableTorchFunction():
            return _weak()(tensor.untyped_storage())
    except Exception:
        return None


_Span = tuple[int, int]
"""Bytes of a storage: where they begin and end."""


def _span(tensor: Any) -> tuple[int, int]:
    """The bytes of its storage that a tensor with elements is in."""
    size = tensor.element_size()
    begin = tensor.storage_offset() * size
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * size


def _merged(spans: Iterable[_Span]) -> list[_Span]:
    """What spans cover, in order: those that overlap are one. Each begins at a multiple of 256, so that elements stay aligned."""
    merged: list[_Span] = []
    for begin, end in sorted((begin // 256 * 256, end) for begin, end in spans):
        if merged and begin < merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged


def _around(spans: list[_Span], place: int) -> _Span:
    """Which of these spans, of `_merged`, a place of one of them is in."""
    return spans[bisect_right(spans, place, key=lambda span: span[0]) - 1]


def _copied(storage: Any, begin: int, end: int) -> tuple[Any, Any]:
    """Bytes of a storage as tensors: a private copy, and what it is of."""
    torch = _torch()
    source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, begin, (end - begin,), (1,))
    return torch.empty_like(source).copy_(source), source
