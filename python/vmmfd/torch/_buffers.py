"""Mapped tensors that become buffers of a module, which may write to them: it gets private copies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._base import _storage, _torch

if TYPE_CHECKING:
    from collections.abc import Iterable

# The storages of mapped memory that were given out as tensors, of which it is not known what they will be. By weak references. There
# is no lock: each change is one step, and a fork finds none that is held.
_followed: set[Any] = set()
# PyTorch's handle of the hook, once it is installed.
_hook: Any = None


def _follow(tensors: Iterable[Any]) -> None:
    """Sees to it that of these tensors, which are mapped memory, a module gets private copies where they become its buffers."""
    found = {_storage(tensor) for tensor in tensors if tensor.numel()}
    _followed.difference_update([storage for storage in list(_followed) if storage.expired()])
    _followed.update(found)
    if found:
        _install_hook()


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

    # Two threads may install two: what the first one copied is nothing to the second.
    _hook = torch.nn.modules.module.register_module_buffer_registration_hook(hook)


def _writable(tensor: Any) -> Any:
    """What a module gets as its buffer instead of a tensor: a copy of its own, if it is one that is followed, else None.

    Each has its own, as it is not known which of them belong together: one that was shared could have been written since."""
    if not _followed:
        return None
    storage = _storage(tensor)
    if storage is None or storage not in _followed:
        return None
    torch = _torch()
    # A tensor as it would be otherwise, which can be written outside of inference too.
    with torch.inference_mode(False), torch.no_grad():
        made = tensor.clone().requires_grad_(tensor.requires_grad)
    made.__dict__.update(tensor.__dict__)
    return made
