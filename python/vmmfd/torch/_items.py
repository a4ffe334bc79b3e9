"""The tensors of a module or a mapping, and their kinds."""

from __future__ import annotations

from typing import Any, NamedTuple

from .._errors import Invalid
from ._base import _listed, _torch

class _Item(NamedTuple):
    name: str
    tensor: Any
    kind: str
    persistent: bool
    requires_grad: bool = False
    # The device type to use in readers, if it differs from the tensor's.
    place: str | None = None


def _items(value: Any) -> list[_Item]:
    """Returns the tensors of a module, named by parameter, buffer or attribute, or of a mapping."""
    torch = _torch()
    items: list[_Item] = []
    if isinstance(value, torch.nn.Module):
        for path, module in value.named_modules(remove_duplicate=False):
            prefix = f"{path}." if path else ""
            for leaf, tensor in module._parameters.items():
                if tensor is not None:
                    items.append(_Item(prefix + leaf, tensor, "parameter", True))
            for leaf, tensor in module._buffers.items():
                if tensor is not None:
                    persistent = leaf not in module._non_persistent_buffers_set
                    items.append(_Item(prefix + leaf, tensor, "buffer", persistent))
            for leaf, tensor in vars(module).items():
                if isinstance(tensor, torch.Tensor):
                    items.append(_Item(prefix + leaf, tensor, "attribute", False))
        return items
    others = []
    for name, tensor in value.items():
        if not isinstance(name, str):
            raise TypeError(f"the name {name!r} is not a str")
        if not isinstance(tensor, torch.Tensor):
            others.append(f"{name}: {type(tensor).__name__}")
        elif isinstance(tensor, torch.nn.Parameter):
            items.append(_Item(name, tensor, "parameter", True))
        else:
            items.append(_Item(name, tensor, "tensor", True))
    if others:
        raise Invalid(
            "tensors can only be put together with tensors (put plain values and extra state in metadata=, other arrays through "
            "torch.as_tensor, a vmmfd.Array through torch.from_dlpack):"
            + _listed(others)
        )
    return items


def _extra_states(value: Any) -> list[str]:
    """Returns the submodules whose `state_dict` contains extra state besides tensors."""
    base = _torch().nn.Module
    if not isinstance(value, base):
        return []
    return [
        path or type(module).__name__
        for path, module in value.named_modules()
        if type(module).get_extra_state is not base.get_extra_state or hasattr(module, "_packed_params")
    ]


def _written(module: Any) -> set[str]:
    """Returns the names of parameters that a module's forward writes: `max_norm` rescales an embedding's rows in place."""
    torch = _torch()
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return {
        f"{path}.weight".lstrip(".")
        for path, owner in module.named_modules(remove_duplicate=False)
        if isinstance(owner, kinds) and owner.max_norm is not None
    }
