"""Process-wide hooks of PyTorch, on request: they guard every module that takes mapped tensors."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from ._base import _torch
from ._guard import _guard_module, _noted


class GuardHandle:
    """The hooks that `guard` installed. As a context manager it removes them at the end."""

    def __init__(self) -> None:
        torch = _torch()
        hooks = torch.nn.modules.module
        self._handles = [
            hooks.register_module_parameter_registration_hook(_parameter_hook(torch)),
            hooks.register_module_buffer_registration_hook(_buffer_hook(torch)),
        ]

    def remove(self) -> None:
        """Removes the hooks. Modules that were guarded stay guarded. A second call does nothing."""
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> GuardHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()


def guard() -> GuardHandle:
    """Installs hooks in PyTorch that guard every module of this process, and returns a handle that removes them.

        with vmmfd.torch.guard():
            module.load_state_dict(broker.state_dict("model"), assign=True)

    While they are installed, a module that is given a mapped tensor of `state_dict` or `load` as a parameter refuses a later
    `load_state_dict` without `assign=True`, with `ExportError`. A module that is given one as a buffer gets a private copy instead, or is
    guarded too if the tensor came with `writable_buffers=False`. Nothing else is guarded: see the table in the documentation.

    PyTorch calls the hooks for each parameter and buffer that any module is given. `torch.compile` checks how many such hooks there are: it
    recompiles modules that assign buffers or parameters when the hooks are installed and when they are removed.
    """
    return GuardHandle()


# Tensors that torch.compile traces have no memory, and it can't trace the hooks; torch.export would record a copy. Other objects may only
# look like tensors, as proxies of torch.fx do, which have every attribute.


def _parameter_hook(torch: Any) -> Any:
    is_traced = torch.compiler.is_dynamo_compiling

    def hook(module: Any, name: str, tensor: Any) -> None:
        if not is_traced() and issubclass(type(tensor), torch.Tensor) and _noted(tensor):
            _guard_module(module)

    return hook


def _buffer_hook(torch: Any) -> Any:
    # True also while another thread traces.
    is_traced = torch.compiler.is_compiling

    def hook(module: Any, name: str, tensor: Any) -> Any:
        noted = None if is_traced() or not issubclass(type(tensor), torch.Tensor) else _noted(tensor)
        if noted is None:
            return None
        _, writable_buffers = noted
        if not writable_buffers:
            _guard_module(module)
            return None
        # Each registration makes a new copy: an earlier one may have been written since.
        with torch.inference_mode(False), torch.no_grad():
            made = tensor.clone().requires_grad_(tensor.requires_grad)
        made.__dict__.update(tensor.__dict__)
        return made

    return hook
