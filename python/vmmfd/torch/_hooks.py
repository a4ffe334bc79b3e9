"""Optional process-wide PyTorch hooks that guard every module that receives mapped tensors."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from ._base import _torch
from ._guard import _guard_module, _noted


class GuardHandle:
    """The hooks that `guard` installed. A context manager that removes them."""

    def __init__(self) -> None:
        torch = _torch()
        hooks = torch.nn.modules.module
        self._handles = [
            hooks.register_module_parameter_registration_hook(_parameter_hook(torch)),
            hooks.register_module_buffer_registration_hook(_buffer_hook(torch)),
        ]

    def remove(self) -> None:
        """Removes the hooks. Guarded modules keep their guards. Removing twice does nothing."""
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> GuardHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()


def guard() -> GuardHandle:
    """Installs PyTorch hooks that guard every module of this process. Returns a handle that removes them.

        with vmmfd.torch.guard():
            module.load_state_dict(broker.state_dict("model"), assign=True)

    While installed, a module that receives a mapped tensor of `state_dict` or `load` as a parameter refuses a later `load_state_dict`
    without `assign=True`, with `ExportError`. A module that receives one as a buffer gets a private copy instead; if the tensor was
    returned with `writable_buffers=False`, the module is guarded too. Nothing else is guarded: see the table in the documentation.

    PyTorch calls the hooks for each parameter and buffer that any module registers. `torch.compile` checks the number of such hooks: it
    recompiles modules that assign buffers or parameters when the hooks are installed and when they are removed.
    """
    return GuardHandle()


# Tensors that torch.compile traces have no memory, and it can't trace the hooks; torch.export would record a copy. Proxies of torch.fx have
# every attribute and only look like tensors.


def _parameter_hook(torch: Any) -> Any:
    is_traced = torch.compiler.is_dynamo_compiling

    def hook(module: Any, name: str, tensor: Any) -> None:
        if not is_traced() and issubclass(type(tensor), torch.Tensor) and _noted(tensor):
            _guard_module(module)

    return hook


def _buffer_hook(torch: Any) -> Any:
    # Also true while another thread traces.
    is_traced = torch.compiler.is_compiling

    def hook(module: Any, name: str, tensor: Any) -> Any:
        noted = None if is_traced() or not issubclass(type(tensor), torch.Tensor) else _noted(tensor)
        if noted is None:
            return None
        _, writable_buffers = noted
        if not writable_buffers:
            _guard_module(module)
            return None
        # Each registration makes a new copy: an earlier copy may have been written to.
        with torch.inference_mode(False), torch.no_grad():
            made = tensor.clone().requires_grad_(tensor.requires_grad)
        made.__dict__.update(tensor.__dict__)
        return made

    return hook
