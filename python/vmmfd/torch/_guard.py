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
    module._register_load_state_dict_pre_hook(_Guard(module, whole))


class _Guard:
    """Refuses a `load_state_dict` that would copy into mapped memory. Copied or pickled with its module, it does nothing: the copy's
    tensors are its own."""

    def __init__(self, module: Any, whole: bool) -> None:
        # Weakly, as the module has the guard: else its lease would stay until the next collection of garbage.
        self._module: Any = weakref.ref(module) if module is not None else lambda: None
        self.whole = whole

    def take(self, module: Any) -> bool:
        """Speaks for this module from now on, unless it does for another one. Returns whether it speaks for it."""
        if self._module() is None:
            self._module = weakref.ref(module)
        return self._module() is module

    def __call__(self, state_dict: Any, prefix: str, metadata: dict[str, Any], *_: Any) -> None:
        module = self._module()
        if module is None or metadata.get("assign_to_params_buffers", False):
            return
        names = [
            name
            for name, tensor in _tensors(module, prefix, self.whole)
            if name in state_dict and _is_mapped(tensor) and _is_written(tensor, state_dict[name])
        ]
        if names:
            raise ExportError(
                "load_state_dict would copy into memory of the broker, which is read-only: call it with assign=True, or load the module "
                "anew. These are such:" + _listed(names)
            )

    def __deepcopy__(self, memo: Any) -> _Guard:
        return _Guard(None, False)

    def __reduce__(self) -> tuple[Any, ...]:
        # A function that takes anything and does nothing, so that who unpickles the module needs no vmmfd.
        return getattr, ("", "format")


def _tensors(module: Any, prefix: str, whole: bool) -> Iterable[tuple[str, Any]]:
    """The tensors that a module has now, and if so those in it, by the names that they have in a state dict."""
    for leaf, tensor in [*module._parameters.items(), *module._buffers.items()]:
        if tensor is not None and leaf not in getattr(module, "_non_persistent_buffers_set", ()):
            yield prefix + leaf, tensor
    if whole:
        for leaf, inner in module._modules.items():
            if inner is not None:
                yield from _tensors(inner, f"{prefix}{leaf}.", whole)


def _is_written(tensor: Any, value: Any) -> bool:
    """Whether PyTorch would write to a tensor if it copied a value there: not if it does not fit, nor if it is the same memory."""
    torch = _torch()
    if not issubclass(type(value), torch.Tensor):
        return True
    with torch._C.DisableTorchFunction():
        if tensor.shape != value.shape:
            # PyTorch takes one element for a scalar, from a list too. All else it reports.
            return bool(tensor.dim() == 0 and value.dim() == 1)
        same = _storage(value) == _storage(tensor) and tensor.dtype == value.dtype and tensor.stride() == value.stride()
        return not (same and tensor.storage_offset() == value.storage_offset() and tensor.is_conj() == value.is_conj())
