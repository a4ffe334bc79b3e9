"""What is mapped memory of the broker, and a `load_state_dict` that would copy into it: it is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._errors import ExportError
from ._base import _listed, _storage, _torch

if TYPE_CHECKING:
    from collections.abc import Iterable

# The storages of mapped memory that were given out as tensors, by weak references, and their addresses then: a storage may get other
# memory. There is no lock: each change is one step, and a fork finds none that is held.
_mapped: dict[Any, int] = {}


def _note(tensors: Iterable[Any]) -> None:
    """Keeps in mind that the memory of these tensors is mapped."""
    for gone in [storage for storage in list(_mapped) if storage.expired()]:
        _mapped.pop(gone, None)
    # Whatever a subclass of tensors makes of it.
    with _torch()._C.DisableTorchFunctionSubclass():
        for tensor in tensors:
            if tensor.numel():
                _mapped[_storage(tensor)] = tensor.untyped_storage().data_ptr()


def _is_mapped(tensor: Any) -> bool:
    """Whether a tensor, or what it is a view of, is memory that was noted."""
    if not _mapped:
        return False
    storage = _storage(tensor)
    return storage in _mapped and bool(tensor.untyped_storage().data_ptr() == _mapped[storage])


def _protect(module: Any) -> None:
    """Has a module refuse what would write to mapped memory, as far as it has such then."""
    hooks = module._load_state_dict_pre_hooks.values()
    if not any(isinstance(getattr(hook, "hook", hook), _Guard) for hook in hooks):
        module._register_load_state_dict_pre_hook(_Guard(module))


class _Guard:
    """Refuses a `load_state_dict` that would copy into mapped memory. Copied or pickled with its module, it does nothing: the copy's
    tensors are its own."""

    def __init__(self, module: Any) -> None:
        # Not the module itself: it would be in a cycle, and so would its lease.
        self._parameters, self._buffers, self._modules = module._parameters, module._buffers, module._modules

    def __call__(self, state_dict: Any, prefix: str, metadata: dict[str, Any], *_: Any) -> None:
        if metadata.get("assign_to_params_buffers", False):
            return
        with _torch()._C.DisableTorchFunctionSubclass():
            names = [name for name, tensor in _tensors(self, prefix) if name in state_dict and _is_mapped(tensor)]
        if names:
            raise ExportError(
                "load_state_dict would copy into memory of the broker, which is read-only: call it with assign=True, or load the module "
                "anew. These are such:" + _listed(names)
            )

    def __reduce__(self) -> tuple[Any, ...]:
        # A function that takes anything and does nothing, so that who unpickles the module needs no vmmfd.
        return getattr, ("", "format")


def _tensors(module: Any, prefix: str) -> Iterable[tuple[str, Any]]:
    """The tensors that a module has now, and those in it, by the names that they have in a state dict."""
    for held in (module._parameters, module._buffers):
        for leaf, tensor in held.items():
            if tensor is not None:
                yield prefix + leaf, tensor
    for leaf, inner in module._modules.items():
        if inner is not None:
            yield from _tensors(inner, f"{prefix}{leaf}.")
