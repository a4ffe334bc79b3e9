"""Mapped tensors that become buffers of a module, which may write to them: it gets private copies."""

from __future__ import annotations

import importlib
import threading
from typing import TYPE_CHECKING, Any

from ._base import _Span, _around, _copied, _merged, _span, _torch

if TYPE_CHECKING:
    from collections.abc import Iterable


class _Followed:
    """A storage of mapped memory that was given out as tensors of which it is not known what they will be."""

    __slots__ = ("copies", "spans")

    def __init__(self) -> None:
        # Where the tensors are in it, and what of that is copied together, once something is.
        self.spans: list[_Span] = []
        # The storages of what was copied, by where it begins: weak references.
        self.copies: dict[int, Any] | None = None


# By weak references to their storages, which are the same for views.
_followed: dict[Any, _Followed] = {}
# For what changes it, and for copies, so that each is made once.
_following = threading.RLock()
# PyTorch's handle of the hook, once it is installed.
_hook: Any = None


def _follow(tensors: Iterable[Any]) -> None:
    """Sees to it that of these tensors, which are mapped memory, a module gets private copies where they become its buffers."""
    weak = _weak()
    found: dict[Any, _Followed] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        if size:
            # One call to look it up, as there may be many.
            followed = found.setdefault(weak(storage), _Followed())
            followed.spans.append((0, size) if tensor.nbytes == size else _span(tensor))
    with _following:
        for gone in [storage for storage in _followed if storage.expired()]:
            del _followed[gone]
        _followed.update(found)
        if found:
            _install_hook()


def _weak() -> Any:
    """Makes weak references to storages. While there is one, no other storage is equal to it."""
    return importlib.import_module("torch.multiprocessing.reductions").StorageWeakRef


def _install_hook() -> None:
    """Has PyTorch ask us about every buffer that a module is given, by `load_state_dict(assign=True)` too. It stays."""
    global _hook
    if _hook is not None:
        return
    torch = _torch()
    is_compiling = torch.compiler.is_compiling

    def hook(module: Any, name: str, tensor: Any) -> Any:
        # What is traced is no memory, and torch.compile can't look into what follows.
        return None if is_compiling() or tensor is None else _writable(tensor)

    _hook = torch.nn.modules.module.register_module_buffer_registration_hook(hook)


def _writable(tensor: Any) -> Any:
    """What a module gets as its buffer instead of a tensor: a private copy, if it is one that is followed, else None."""
    if not _followed:
        return None
    weak = _weak()
    try:
        storage = tensor.untyped_storage()
        followed = _followed.get(weak(storage))
    except Exception:
        return None  # It has no storage, as a sparse tensor, and is none of ours.
    if followed is None:
        return None
    torch = _torch()
    # A tensor as it would be otherwise, which can be written outside of inference too.
    with _following, torch.inference_mode(False), torch.no_grad():
        if followed.copies is None:
            followed.spans, followed.copies = _merged(followed.spans), {}
        begin, end = _span(tensor)
        low, high = _around(followed.spans, begin)
        if type(tensor) is not torch.Tensor or tensor.is_conj() or tensor.is_neg() or not low <= begin < end <= high:
            return tensor.clone()
        copy = None
        if low in followed.copies:
            copy = torch.UntypedStorage._new_with_weak_ptr(followed.copies[low].cdata)
        if copy is None:
            copy = _copied(storage, low, high)[0].untyped_storage()
            followed.copies[low] = weak(copy)
        made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        made.set_(copy, tensor.storage_offset() - low // tensor.element_size(), tensor.shape, tensor.stride())
        made.__dict__.update(tensor.__dict__)
        return made
