"""A module exactly as its maker left it: every tensor of every kind, with aliasing, and no others.

`broker.put` and `broker.load` compare an object with the module. An engine's module has different tensors before and after its weights are
processed, so here the object decides which tensors the module has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .._errors import Invalid, MismatchError
from ._base import _listed, _torch
from ._get import _Mapped
from ._items import _Item, _items
from ._module import _held, _parameter
from ._put import _plan

_KINDS = ("parameter", "buffer", "attribute")
# Attributes of a module that hold its tensors and submodules.
_TABLES = ("_parameters", "_buffers", "_modules")


class Exact:
    """A module to put: its parameters in place, and copies of all other tensors, which the module may still write to.

    Beside a GPU model, CPU tensors are restored on the CPU. Raises `Invalid` if a parameter is not on `device`.
    """

    def __init__(self, broker: Any, module: Any, device: Any) -> None:
        torch = _torch()
        self._client = broker._native
        items = _items(module)
        elsewhere = [item.name for item in items if item.kind == "parameter" and item.tensor.device.type != device.type]
        if elsewhere:
            raise Invalid(f"parameters that are not on {device.type} can't be shared:{_listed(elsewhere)}")
        # An attribute that views a parameter remains a view of it.
        own = {item.tensor.untyped_storage().data_ptr() for item in items if item.kind == "parameter"}
        copies: dict[int, Any] = {}
        self._items = [item if item.kind == "parameter" else _apart(item, own, copies, device) for item in items]

    def _plan(self, copy: bool | None, device: Any, rdma: Any) -> Any:
        return _plan(self._client, self._items, copy=copy, device=device, rdma=rdma)


def _apart(item: _Item, own: set[int], copies: dict[int, Any], device: Any) -> _Item:
    """Returns a tensor in a copy of its storage, on the device. Names that share a storage share the copy."""
    tensor = item.tensor.detach()
    if tensor.numel() == 0 or tensor.is_meta or tensor.layout != _torch().strided:
        return item
    if tensor.device.type != device.type:
        return item._replace(tensor=tensor.to(device), place=tensor.device.type)
    storage = tensor.untyped_storage()
    address = storage.data_ptr()
    if address in own:
        return item
    if address not in copies:
        copies[address] = storage.clone()
    empty = _torch().empty(0, dtype=tensor.dtype, device=tensor.device)
    return item._replace(tensor=empty.set_(copies[address], tensor.storage_offset(), tensor.shape, tensor.stride()))


def _place(tensor: Any) -> tuple[Any, ...]:
    return tensor.device, tensor.dtype, tensor.shape, tensor.stride()


class Attached:
    """The tensors that `attach` gave a module."""

    def __init__(self) -> None:
        self.arrays = 0
        # The size of the private copies in bytes.
        self.copied = 0
        # The private copies, each with its mapped source.
        self.sources: list[tuple[Any, Any]] = []
        # The replaced tensors, which other objects may hold too: by id, with their replacements.
        self._replaced: dict[int, tuple[Any, Any]] = {}
        # Tensors to install after the weights are processed.
        self._late: list[tuple[Any, str, str, Any, bool]] = []

    def _install(self, owner: Any, leaf: str, kind: str, tensor: Any, is_persistent: bool) -> None:
        held = _held(owner, kind)
        tables: tuple[dict[str, Any], ...] = (owner._parameters, owner._buffers, owner.__dict__)
        for table in tables:
            old = table.get(leaf) if table is held else table.pop(leaf, None)
            if isinstance(old, _torch().Tensor) and old is not tensor:
                self._replaced[id(old)] = old, tensor
        held[leaf] = tensor
        owner._non_persistent_buffers_set.discard(leaf)
        if kind == "buffer" and not is_persistent:
            owner._non_persistent_buffers_set.add(leaf)

    def finish(self, module: Any) -> list[str]:
        """Installs the late tensors, and replaces the former tensors in objects that submodules hold. Returns the names of the meta tensors
        that remain in such objects."""
        torch = _torch()
        for each in self._late:
            self._install(*each)
        left: list[str] = []
        seen: set[int] = set()

        def visit(path: str, holder: Any, depth: int) -> None:
            if id(holder) in seen or isinstance(holder, (torch.Tensor, torch.nn.Module, type)) or not hasattr(holder, "__dict__"):
                return
            seen.add(id(holder))
            for name, value in list(vars(holder).items()):
                if not isinstance(value, torch.Tensor):
                    if depth:
                        visit(path, value, depth - 1)
                elif id(value) in self._replaced:
                    setattr(holder, name, self._replaced[id(value)][1])
                elif value.is_meta and value.numel():
                    left.append(f"{path}: {type(holder).__name__}.{name}")

        for path, owner in module.named_modules():
            for name, value in vars(owner).items():
                if name not in _TABLES:
                    visit(path, value, 1)
        return left


def attach(lease: Any, module: Any, reshaped: set[str], is_late: Callable[[Any], bool] = lambda _: False) -> Attached:
    """Installs a lease's tensors in a module: parameters are mapped, other tensors are private copies unless they view a parameter.

    The object's parameters replace the module's, whatever their shape. A module's buffer or attribute must have the object's kind, shape
    and type, unless `reshaped` names it: an engine writes to such tensors, up to its own limits. `is_late` selects submodules that create
    tensors during processing: their missing tensors are installed by `Attached.finish`. Raises `MismatchError`, before any change, for a
    mismatch and for an array whose submodule the module lacks.
    """
    torch = _torch()
    modules = dict(module.named_modules(remove_duplicate=False))
    with torch.inference_mode(False):
        mapped = _Mapped(lease)
        unknown = [row.name for row in mapped.rows if row.name.rpartition(".")[0] not in modules or row.kind not in _KINDS]
        if unknown:
            raise MismatchError(f"the model lacks the submodules for arrays of {lease.name!r}:{_listed(unknown)}")
        here = layout(module)
        others = [
            f"{row.name}: {_text(theirs)} in the object, {_text(here[row.name])} here"
            for row in mapped.rows
            if row.kind != "parameter" and row.name in here and row.name not in reshaped
            for theirs in [(row.kind, tuple(row.array.shape), row.dtype)]
            if here[row.name] != theirs
        ]
        if others:
            raise MismatchError(f"{lease.name!r} was published by an engine with other limits:{_listed(others)}")
        storages = {(row.part, row.attributes.get("storage")) for row in mapped.rows if row.kind == "parameter"}
        private = {
            row.name for row in mapped.rows if row.kind != "parameter" and (row.part, row.attributes.get("storage")) not in storages
        }
        mapped.will_copy(row for row in mapped.rows if row.name in private)
        tied: dict[tuple[Any, ...], Any] = {}
        attached = Attached()
        made: list[tuple[Any, str, str, Any, bool]] = []
        for row in mapped.rows:
            path, _, leaf = row.name.rpartition(".")
            owner = modules[path]
            key = row.identity if 0 not in row.array.shape else (id(owner), leaf), row.kind
            if key not in tied:
                tensor = mapped.tensor(row, row.name in private)
                if row.attributes.get("place") == "cpu":
                    tensor = tensor.cpu()
                old = _held(owner, row.kind).get(leaf)
                if row.name in private and isinstance(old, torch.Tensor) and _place(old) == _place(tensor):
                    # Reuse the existing tensor, which other objects may hold.
                    tensor = old.copy_(tensor)
                if row.kind == "parameter":
                    tensor = torch.nn.Parameter(tensor, requires_grad=False) if old is None else _parameter(tensor, old)
                elif row.name in private and tensor.numel():
                    attached.sources.append((tensor, mapped.tensor(row, False)))
                tied[key] = tensor
            made.append((owner, leaf, row.kind, tied[key], bool(row.attributes.get("persistent", True))))
    for each in made:
        owner, leaf = each[:2]
        if is_late(owner) and not any(leaf in table for table in (owner._parameters, owner._buffers, vars(owner))):
            attached._late.append(each)
        else:
            attached._install(*each)
    attached.arrays = len(made)
    attached.copied = sum(copy.untyped_storage().nbytes() for copy, _ in mapped.private.values())
    return attached


def settle(module: Any, device: Any, nones: set[str]) -> list[str]:
    """Removes the tensors that are still on the meta device, as the maker did: tensors named in `nones` become None, others are deleted,
    and tensors without elements are allocated. Returns the names of the removed tensors.

    Raises `MismatchError` for meta tensors in lists and dicts, which an object does not contain."""
    torch = _torch()
    lists = [
        f"{path}.{leaf}".lstrip(".")
        for path, owner in module.named_modules()
        for leaf, value in vars(owner).items()
        if leaf not in _TABLES and isinstance(value, (list, tuple, dict))
        for each in (value.values() if isinstance(value, dict) else value)
        if isinstance(each, torch.Tensor) and each.is_meta and each.numel()
    ]
    if lists:
        raise MismatchError(f"the model has tensors in lists or dicts, which cannot be shared:{_listed(lists)}")
    modules = dict(module.named_modules(remove_duplicate=False))
    left = []
    for item in _items(module):
        if not item.tensor.is_meta:
            continue
        path, _, leaf = item.name.rpartition(".")
        held = _held(modules[path], item.kind)
        if not item.tensor.numel():
            empty = torch.empty_like(item.tensor, device=device)
            held[leaf] = torch.nn.Parameter(empty, requires_grad=False) if item.kind == "parameter" else empty
            continue
        left.append(item.name)
        if item.name in nones:
            held[leaf] = None
        else:
            held.pop(leaf, None)
    return left


Layout = tuple[str, tuple[int, ...], Any]
"""A tensor's kind, shape and type."""


def layout(module: Any) -> dict[str, Layout]:
    """Returns the layouts of a module's tensors by name."""
    return {item.name: (item.kind, tuple(item.tensor.shape), item.tensor.dtype) for item in _items(module)}


def reshaped(before: dict[str, Layout], after: dict[str, Layout]) -> list[str]:
    """Returns the names of tensors, except parameters, whose layout changed."""
    return sorted(name for name, of in after.items() if of[0] != "parameter" and before.get(name, of) != of)


def _text(of: Layout) -> str:
    return f"{of[0]} {of[1]} of {of[2]}"


def nones(module: Any) -> set[str]:
    """Returns the names of parameters and buffers that are None."""
    return {
        f"{path}.{leaf}".lstrip(".")
        for path, owner in module.named_modules(remove_duplicate=False)
        for table in (owner._parameters, owner._buffers)
        for leaf, tensor in table.items()
        if tensor is None
    }
