"""Splits a value to put into parts: memory, and the table of its arrays."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from . import _arguments, _native
from . import _types as t
from ._errors import Unsupported
from ._tree import Flat

# The name of the only part.
_PART = "all"


def plan(
    client: _native.Client,
    value: t.Any,
    *,
    part: str | None,
    device: t.DeviceName | None,
    copy: bool | None,
    seal: bool,
    rdma: t.Rdma,
) -> tuple[list[_native._PartPlan], dict[str, t.Any], object]:
    """Returns the parts of a value, the metadata to add, and the object that must live until the put is done."""
    own = getattr(type(value), "_plan", None)
    if own is not None and type(value).__module__.startswith("vmmfd."):
        parts, additions, keep_alive = own(value, copy=copy, device=device, rdma=rdma)
        if part is not None:
            parts = [(part, *parts[0][1:]), *parts[1:]]
        return parts, additions, keep_alive
    if isinstance(value, Mapping) and _is_nested(value):
        flat = Flat(value)
        parts, additions, keep_alive = plan(
            client, flat.arrays, part=part, device=device, copy=copy, seal=seal, rdma=rdma
        )
        return [_with_attributes(one, flat.attributes) for one in parts], additions, (keep_alive, flat)
    torch = sys.modules.get("torch")
    if torch is not None and _is_torchs(torch, value):
        from .torch._put import _plan

        return _plan(client, value, part=part or _PART, device=device, copy=copy, seal=seal, rdma=rdma)
    if not isinstance(value, Mapping):
        raise TypeError(f"value has type {type(value).__name__}: give a mapping of names to arrays, such as {{'x': array}}")
    arrays = []
    for name, array in value.items():
        if not isinstance(name, str):
            raise TypeError(f"value has the key {_arguments.shown(name)}, of type {type(name).__name__}: array names must be str")
        arrays.append((name, array))
    return [client.plan(arrays, part or _PART, device=device, copy=copy, rdma=rdma)], {}, arrays


def _is_nested(value: Mapping[object, t.Any]) -> bool:
    """Returns whether a mapping has a container or a plain value. A state dict with extra state is not nested: `load` would lose it."""
    nested = any(isinstance(of, (list, tuple, Mapping)) or type(of) in _arguments.PLAIN for of in value.values())
    return nested and not any(isinstance(name, str) and name.endswith("_extra_state") for name in value)


def _with_attributes(part: _native._PartPlan, added: dict[str, dict[str, t.Any]]) -> _native._PartPlan:
    """Returns the part with more attributes for each array."""
    import json

    name, memories, entries, digest = part
    merged: list[_native._Entry] = [
        (*entry[:6], json.dumps({**json.loads(entry[6] or "{}"), **added[entry[0]]})) for entry in entries
    ]
    return name, memories, merged, digest


def check_rdma(plans: list[_native._PartPlan]) -> None:
    """Raises `Unsupported` if RDMA can't reach memory that a put shares without a copy."""
    for part, memories, _, _ in plans:
        for memory in memories:
            if not memory.rdma:
                raise Unsupported(
                    f"rdma=True, but RDMA can't reach the memory of part {part!r} on {memory.device}: create it with rdma=True in "
                    "vmmfd.empty, vmmfd.torch.pool or vmmfd.load_safetensors",
                    kind="unsupported",
                )


def _is_torchs(torch: t.Any, value: t.Any) -> bool:
    """Returns whether a value belongs to PyTorch: a module, or a mapping with tensors."""
    module, tensor = getattr(getattr(torch, "nn", None), "Module", None), getattr(torch, "Tensor", None)
    if module is None or tensor is None:
        return False
    return isinstance(value, module) or isinstance(value, Mapping) and any(isinstance(of, tensor) for of in value.values())
