"""What is mapped memory of the broker, and a `load_state_dict` that would copy into it: it is refused."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from .._errors import ExportError
from ._base import _listed, _storage, _torch

if TYPE_CHECKING:
    from collections.abc import Iterable

# The storages of mapped memory that were given out as tensors, by weak references, and their addresses then: a storage may get other
# memory. There is no lock: each change is one step, and a fork finds none that is held.
_mapped: dict[Any, int] = {}


def _note(tensors: Iterable[Any]) -> list[Any]:
    """Keeps in mind that the memory of these tensors is mapped. Returns their storages, by weak references."""
    for gone in [storage for storage in list(_mapped) if storage.expired()]:
        _mapped.pop(gone, None)
    noted = []
    # Neither a subclass of tensors nor a mode of functions has a say in where memory is.
    with _torch()._C.DisableTorchFunction():
        for tensor in tensors:
            if tensor.numel():
                storage = _storage(tensor)
                _mapped[storage] = tensor.untyped_storage().data_ptr()
                noted.append(storage)
    return noted


def _is_mapped(tensor: Any) -> bool:
    """Whether a tensor, or what it is a view of, is memory that was noted."""
    if not _mapped:
        return False
    storage = _storage(tensor)
    if storage is None or storage not in _mapped:
        return False
    with _torch()._C.DisableTorchFunction():
        return bool(tensor.untyped_storage().data_ptr() == _mapped[storage])


def _protect(module: Any, *, whole: bool = False) -> None:
    """Has a module refuse what would write to mapped memory, as far as it has such then. `whole` has it speak for the modules in it too,
    so that it refuses before anything is copied; else each speaks for itself."""
    hooks = getattr(module, "_load_state_dict_pre_hooks", None)
    # TorchScript has hooks of its own, and a module that was put together by hand may have none.
    if hooks is None or isinstance(module, _torch().jit.ScriptModule):
        return
    for hook in list(hooks.values()):
        guard = getattr(hook, "hook", hook)
        if isinstance(guard, _Guard) and guard.take(module):
            guard.whole |= whole
            return
    guard = _Guard(whole)
    guard.take(module)
    module._register_load_state_dict_pre_hook(guard)


class _Guard:
    """Refuses a `load_state_dict` that would copy into mapped memory. Copied or pickled with its module, it does nothing: the copy's
    tensors are its own."""

    def __init__(self, whole: bool) -> None:
        """One that speaks for no module yet."""
        self.whole = whole
        self._module: Any = _no_module
        self._own: _Tables = ({}, {}, ())

    def take(self, module: Any) -> bool:
        """Speaks for this module from now on, unless it does for another one that lives. Returns whether it speaks for it."""
        if self._module() is None:
            self._module = weakref.ref(module)
        if self._module() is not module:
            return False
        # A shallow copy, or a module that took over this one's `__dict__`, has these too when this one is gone. But not what is in it, nor
        # it: that would be a cycle, or hold a lease for modules that were taken out.
        self._own = _tables(module)
        return True

    def __call__(self, state_dict: Any, prefix: str, metadata: dict[str, Any], *_: Any) -> None:
        if metadata.get("assign_to_params_buffers", False):
            return
        module = self._module()
        if module is not None:
            # It may have been given others.
            self.take(module)
        tensors = [*_tensors(self._own, prefix)]
        if module is not None and self.whole:
            tensors += _inner_tensors(module, prefix)
        names = [
            name for name, tensor in tensors if name in state_dict and _is_mapped(tensor) and not _is_same(tensor, state_dict[name])
        ]
        if names:
            raise ExportError(
                "load_state_dict would copy into memory of the broker, which is read-only: call it with assign=True, or load the module "
                "anew. These are such:" + _listed(names)
            )

    def __deepcopy__(self, memo: Any) -> _Guard:
        return _Guard(False)

    def __reduce__(self) -> tuple[Any, ...]:
        # A function that takes anything and does nothing, so that who unpickles the module needs no vmmfd.
        return getattr, ("", "format")


def _no_module() -> None:
    """What a weak reference to no module returns."""


_Tables = tuple[Any, Any, Any]
"""What a module has: its parameters and its buffers by name, and the names of the buffers that are in no state dict."""


def _tables(module: Any) -> _Tables:
    return module._parameters, module._buffers, getattr(module, "_non_persistent_buffers_set", ())


def _tensors(tables: _Tables, prefix: str) -> Iterable[tuple[str, Any]]:
    """The tensors that a module has in its state dict, by their names there."""
    parameters, buffers, not_persistent = tables
    for leaf, tensor in parameters.items():
        if tensor is not None:
            yield prefix + leaf, tensor
    for leaf, tensor in buffers.items():
        if tensor is not None and leaf not in not_persistent:
            yield prefix + leaf, tensor


def _inner_tensors(module: Any, prefix: str) -> Iterable[tuple[str, Any]]:
    """Those of the modules in it."""
    for leaf, inner in module._modules.items():
        if inner is not None:
            inside = f"{prefix}{leaf}."
            yield from _tensors(_tables(inner), inside)
            yield from _inner_tensors(inner, inside)


def _is_same(tensor: Any, value: Any) -> bool:
    """Whether a value is the very tensor that it would be copied to, so that PyTorch writes nothing."""
    torch = _torch()
    plain = (torch.Tensor, torch.nn.Parameter)
    # A class of its own may have a `copy_` of its own.
    if type(value) not in plain or type(tensor) not in plain:
        return False
    with torch._C.DisableTorchFunction():
        storage = _storage(value)
        return bool(
            storage is not None
            and storage == _storage(tensor)
            and value.storage_offset() == tensor.storage_offset()
            and value.shape == tensor.shape
            and value.stride() == tensor.stride()
            and value.dtype == tensor.dtype
            and value.is_conj() == tensor.is_conj()
            and value.is_neg() == tensor.is_neg()
        )
