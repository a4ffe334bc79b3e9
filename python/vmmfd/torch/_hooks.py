"""Mapped tensors that become part of a module, by PyTorch's own hooks: buffers are private copies, parameters are guarded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._base import _storage, _torch
from ._guard import _is_mapped, _note, _protect

if TYPE_CHECKING:
    from collections.abc import Iterable

# The storages of which a module gets private copies where they become its buffers, by weak references. There is no lock: each change is
# one step, and a fork finds none that is held.
_followed: set[Any] = set()
# PyTorch's handles of the hooks, once they are installed.
_installed: list[Any] = []


def _follow(tensors: Iterable[Any], writable_buffers: bool) -> None:
    """Has modules that are given these tensors, which are mapped memory, refuse to load into them. They get private copies of those that
    become their buffers, if these are to be written."""
    found = [tensor for tensor in tensors if tensor.numel()]
    _note(found)
    _followed.difference_update([storage for storage in list(_followed) if storage.expired()])
    if writable_buffers:
        _followed.update(_storage(tensor) for tensor in found)
    if found:
        _install()


def _install() -> None:
    """Has PyTorch ask us about every tensor that a module is given, by `load_state_dict(assign=True)` too. It stays."""
    if _installed:
        return
    torch = _torch()
    is_compiling = torch.compiler.is_compiling

    # What is traced is no memory, and torch.compile can't look into what follows.

    def buffer(module: Any, name: str, tensor: Any) -> Any:
        if is_compiling() or tensor is None:
            return None
        copy = _writable(tensor)
        if copy is None:
            guard(module, tensor)
        return copy

    def parameter(module: Any, name: str, tensor: Any) -> None:
        if not is_compiling():
            guard(module, tensor)

    def guard(module: Any, tensor: Any) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            if _is_mapped(tensor):
                _protect(module)

    hooks = torch.nn.modules.module
    # Two threads may install two of each: the first one leaves nothing to do for the second.
    _installed.append(hooks.register_module_buffer_registration_hook(buffer))
    _installed.append(hooks.register_module_parameter_registration_hook(parameter))


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
