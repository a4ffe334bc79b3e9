"""Guards that refuse a `load_state_dict` into the broker's read-only memory."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from .._errors import ExportError
from ._base import _listed, _storage, _torch
from ._items import _items

if TYPE_CHECKING:
    from collections.abc import Iterable

# Storages handed out as read-only mapped memory, by weak reference. Each has its address at that time, because a storage can get other
# memory, and whether a module that receives it as a buffer may write to it. There is no lock: each change is atomic, so that a fork never
# finds the dict half changed.
_mapped: dict[Any, tuple[int, bool]] = {}


def _note(tensors: Iterable[Any], *, writable_buffers: bool) -> None:
    """Records that the memory of these tensors is mapped read-only."""
    for gone in [storage for storage in list(_mapped) if storage.expired()]:
        _mapped.pop(gone, None)
    # Bypass tensor subclasses and function modes.
    with _torch()._C.DisableTorchFunction():
        for tensor in tensors:
            if tensor.numel():
                _mapped[_storage(tensor)] = tensor.untyped_storage().data_ptr(), writable_buffers


def _is_mapped(tensor: Any) -> bool:
    """Returns whether a tensor, or the tensor it views, is in recorded memory."""
    return _noted(tensor) is not None


def _noted(tensor: Any) -> tuple[int, bool] | None:
    if not _mapped:
        return None
    noted = _mapped.get(_storage(tensor))
    with _torch()._C.DisableTorchFunction():
        return noted if noted is not None and tensor.untyped_storage().data_ptr() == noted[0] else None


def _guard_module(module: Any) -> None:
    """Makes a module and its submodules refuse a `load_state_dict` that would write to mapped memory."""
    hooks = getattr(module, "_load_state_dict_pre_hooks", None)
    # TorchScript modules have their own hooks, and a module created without its constructor may have none.
    if hooks is None or isinstance(module, _torch().jit.ScriptModule):
        return
    guards = (getattr(hook, "hook", hook) for hook in list(hooks.values()))
    if not any(isinstance(guard, _Guard) and guard.module() is module for guard in guards):
        module._register_load_state_dict_pre_hook(_Guard(module))


class _Guard:
    """The hook of one module. In a deep copy or a pickle of the module it does nothing: those tensors are not mapped."""

    def __init__(self, module: Any) -> None:
        self.module = weakref.ref(module)
        # Shallow copies share these dicts and may outlive the module.
        self._own = module._parameters, module._buffers

    def __call__(self, state_dict: Any, prefix: str, metadata: dict[str, Any], *_: Any) -> None:
        if metadata.get("assign_to_params_buffers", False):
            return
        module = self.module()
        if module is None:
            named = [pair for own in self._own for pair in own.items() if pair[1] is not None]
        else:
            named = [(item.name, item.tensor) for item in _items(module) if item.persistent]
        names = [
            prefix + name
            for name, tensor in named
            if prefix + name in state_dict and _is_mapped(tensor) and not _is_same(tensor, state_dict[prefix + name])
        ]
        if names:
            raise ExportError(
                "load_state_dict would copy into the broker's read-only memory: call it with assign=True, or load the module "
                "again. Tensors in that memory:" + _listed(names)
            )

    def __deepcopy__(self, memo: Any) -> Any:
        return "".format

    def __reduce__(self) -> tuple[Any, ...]:
        # A builtin that accepts any arguments: a pickled module does not need vmmfd.
        return getattr, ("", "format")


def _is_same(tensor: Any, value: Any) -> bool:
    """Returns whether copying a value to a tensor writes nothing, because both have the same elements."""
    torch = _torch()
    # A subclass may define its own `copy_`.
    if not {type(tensor), type(value)} <= {torch.Tensor, torch.nn.Parameter}:
        return False

    def place(of: Any) -> tuple[Any, ...]:
        return _storage(of), of.storage_offset(), of.shape, of.stride(), of.dtype, of.is_conj(), of.is_neg()

    with torch._C.DisableTorchFunction():
        return _storage(value) is not None and place(value) == place(tensor)
