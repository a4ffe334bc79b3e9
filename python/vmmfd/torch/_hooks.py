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
_installed: dict[str, Any] = {}


def _follow(tensors: Iterable[Any], writable_buffers: bool) -> None:
    """Has modules that are given these tensors, which are mapped memory, refuse to load into them. They get private copies of those that
    become their buffers, if these are to be written."""
    storages = _note(tensors)
    _followed.difference_update([storage for storage in list(_followed) if storage.expired()])
    if writable_buffers:
        _followed.update(storages)
    if storages:
        _install()


def _install() -> None:
    """Has PyTorch ask about every tensor that a module is given, by `load_state_dict(assign=True)` too. It stays."""
    torch = _torch()
    hooks = torch.nn.modules.module
    # Two threads may install two of each: the first one leaves nothing to do for the second.
    if "parameter" not in _installed:
        _installed["parameter"] = hooks.register_module_parameter_registration_hook(_parameter_hook(torch))
    if "buffer" not in _installed:
        _installed["buffer"] = hooks.register_module_buffer_registration_hook(_buffer_hook(torch))


# What torch.compile traces is no memory, and it can't look into what the hooks do; and a copy would become part of what torch.export
# traces. What only looks like a tensor, as a proxy of torch.fx, answers all that it is asked.


def _parameter_hook(torch: Any) -> Any:
    is_traced = torch.compiler.is_dynamo_compiling

    def hook(module: Any, name: str, tensor: Any) -> None:
        if not is_traced() and issubclass(type(tensor), torch.Tensor) and _is_mapped(tensor):
            _protect(module)

    return hook


def _buffer_hook(torch: Any) -> Any:
    # Also while another thread traces.
    is_traced = torch.compiler.is_compiling

    def hook(module: Any, name: str, tensor: Any) -> Any:
        if is_traced() or not issubclass(type(tensor), torch.Tensor) or not _is_mapped(tensor):
            return None
        if _storage(tensor) not in _followed:
            _protect(module)
            return None
        # Each has its own, as it is not known which of them belong together: one that was shared could have been written since. A tensor
        # as it would be otherwise, which can be written outside of inference too.
        with torch.inference_mode(False), torch.no_grad():
            made = tensor.clone().requires_grad_(tensor.requires_grad)
        made.__dict__.update(tensor.__dict__)
        return made

    return hook
