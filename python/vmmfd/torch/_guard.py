"""A `load_state_dict` that would copy into mapped memory of the broker is refused."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from .._errors import ExportError
from ._base import _listed, _storage, _torch
from ._items import _items

if TYPE_CHECKING:
    from collections.abc import Iterable

# The storages that were given out as read-only mapped memory, by weak references. Of each its address then, as a storage may get other
# memory, and whether a module that takes it as a buffer may write to it. There is no lock: each change is one step, so that a fork never
# finds the dict half changed.
_mapped: dict[Any, tuple[int, bool]] = {}


def _note(tensors: Iterable[Any], *, writable_buffers: bool) -> None:
    """Remembers that the memory of these tensors is mapped read-only."""
    for gone in [storage for storage in list(_mapped) if storage.expired()]:
        _mapped.pop(gone, None)
    # Subclasses of tensors and function modes must not see the question.
    with _torch()._C.DisableTorchFunction():
        for tensor in tensors:
            if tensor.numel():
                _mapped[_storage(tensor)] = tensor.untyped_storage().data_ptr(), writable_buffers


def _is_mapped(tensor: Any) -> bool:
    """Whether a tensor, or the tensor that it is a view of, is memory that was noted."""
    return _noted(tensor) is not None


def _noted(tensor: Any) -> tuple[int, bool] | None:
    if not _mapped:
        return None
    noted = _mapped.get(_storage(tensor))
    with _torch()._C.DisableTorchFunction():
        return noted if noted is not None and tensor.untyped_storage().data_ptr() == noted[0] else None


def _guard_module(module: Any) -> None:
    """Makes a module, and the modules in it, refuse a `load_state_dict` that would write to mapped memory."""
    hooks = getattr(module, "_load_state_dict_pre_hooks", None)
    # TorchScript modules have their own hooks, and a module that was made without its constructor may have none.
    if hooks is None or isinstance(module, _torch().jit.ScriptModule):
        return
    guards = (getattr(hook, "hook", hook) for hook in list(hooks.values()))
    if not any(isinstance(guard, _Guard) and guard.module() is module for guard in guards):
        module._register_load_state_dict_pre_hook(_Guard(module))


class _Guard:
    """The hook of one module. In a deep copy or a pickle of the module it does nothing, as the tensors there are no mapped memory."""

    def __init__(self, module: Any) -> None:
        self.module = weakref.ref(module)
        # Shallow copies share these dicts, and may outlive the module.
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
                "load_state_dict would copy into memory of the broker, which is read-only: call it with assign=True, or load the module "
                "anew. Tensors in such memory:" + _listed(names)
            )

    def __deepcopy__(self, memo: Any) -> Any:
        return "".format

    def __reduce__(self) -> tuple[Any, ...]:
        # A builtin that accepts any arguments, so that a pickled module does not need vmmfd.
        return getattr, ("", "format")


def _is_same(tensor: Any, value: Any) -> bool:
    """Whether a copy of a value to a tensor writes nothing, as both are the same elements."""
    torch = _torch()
    # A subclass may have its own `copy_`.
    if not {type(tensor), type(value)} <= {torch.Tensor, torch.nn.Parameter}:
        return False

    def place(of: Any) -> tuple[Any, ...]:
        return _storage(of), of.storage_offset(), of.shape, of.stride(), of.dtype, of.is_conj(), of.is_neg()

    with torch._C.DisableTorchFunction():
        return _storage(value) is not None and place(value) == place(tensor)
