"""Putting tensors: memory shared in place, copies, and the table of arrays."""

from __future__ import annotations

import importlib
import json
import threading
import warnings
from typing import TYPE_CHECKING, Any

from .. import _native
from .._errors import ExportError, Invalid
from ._base import _listed, _span, _torch
from ._items import _Item, _extra_states, _items
from ._pool import _active, _close, _lock

if TYPE_CHECKING:
    Entry = tuple[str, str, list[int], list[int] | None, int, int, str | None]
    PartPlan = tuple[str, list[_native.Memory], list[Entry], str | None]


class _Storage:
    """A storage with tensors to put."""

    __slots__ = ("begin", "end", "items", "memory", "number", "offset", "storage")

    def __init__(self, storage: Any) -> None:
        self.storage = storage
        self.items: list[_Item] = []
        # The byte range to put, and its destination.
        self.begin = 0
        self.end: int = storage.nbytes()
        self.number = 0
        self.memory = 0
        self.offset = 0


def _problem(tensor: Any) -> str | None:
    """Returns the reason why a tensor cannot be put, or None."""
    torch = _torch()
    if torch.nn.parameter.is_lazy(tensor):
        return "has no shape yet: run the module once"
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "belongs to a function under torch.func (vmap, grad) and has no bytes outside: put the function's result"
    if isinstance(tensor, importlib.import_module("torch._subclasses").FakeTensor):
        return "is a FakeTensor and has no bytes"
    if tensor.is_nested:
        return "is a nested tensor: put its values() and offsets()"
    if torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor):
        return f"is a {type(tensor).__name__}, which keeps its bytes in other tensors: put those"
    if tensor.layout != torch.strided:
        return f"has layout {tensor.layout}: put its values and indices"
    if tensor.is_quantized:
        return "is quantised with its own scheme: put its int_repr(), scales and zero points"
    if str(tensor.dtype).startswith(("torch.qint", "torch.quint")):
        return f"is a view of bytes as {tensor.dtype}, without a scheme: put view(torch.uint8)"
    if tensor.device.type == "meta":
        return "is on the meta device and has no bytes"
    if tensor.device.type not in ("cpu", "cuda"):
        return f"is on {tensor.device}, but only tensors on cpu and cuda can be put"
    return None


def _plain(tensor: Any) -> Any:
    """Returns a tensor's bytes as they are: without gradient, subclass, or lazy conjugation and negation."""
    torch = _torch()
    tensor = tensor.detach()
    if type(tensor) is not torch.Tensor:
        tensor = tensor.as_subclass(torch.Tensor)
    return tensor.resolve_conj().resolve_neg()


# Tensors with wide gaps are compacted from this size in bytes.
_GAPS = 64 << 10


def _compact(storage: _Storage) -> None:
    """Makes the only tensor of a storage contiguous if that leaves less than a quarter of the bytes to copy."""
    if len(storage.items) == 1:
        tensor = storage.items[0].tensor
        begin, end = _span(tensor)
        if end - begin >= _GAPS and tensor.numel() * tensor.element_size() < (end - begin) // 4:
            tensor = tensor.contiguous()
            storage.items = [storage.items[0]._replace(tensor=tensor)]
            storage.storage = tensor.untyped_storage()


def _dtype(tensor: Any) -> tuple[str, str | None]:
    """Returns an element type's name in the table of arrays, and PyTorch's own name if it differs."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name in _SHARED_TYPES:
        return name, None
    return f"|V{tensor.element_size()}", name


# Types with the same name in PyTorch and in NumPy or ml_dtypes.
_SHARED_TYPES = frozenset(
    {
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "bfloat16", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    }
)


def _checked(value: Any) -> list[_Item]:
    """Returns the tensors of a value as plain tensors. Raises `Invalid` if any cannot be put, or if there are none."""
    items, problems = [], []
    for item in value if isinstance(value, list) else _items(value):
        problem = _problem(item.tensor)
        if problem:
            problems.append(f"{item.name} {problem}")
        else:
            items.append(item._replace(tensor=_plain(item.tensor), requires_grad=item.tensor.requires_grad))
    if problems:
        raise Invalid("some tensors can't be put:" + _listed(problems))
    packed = _extra_states(value)
    if not items:
        where = f": {packed[0]} only has extra state, as quantised modules do, which cannot be put" if packed else ""
        raise Invalid(f"there is no tensor to put{where}")
    if packed:
        warnings.warn(
            f"the extra state of {', '.join(packed[:5])}{' and others' if packed[5:] else ''} is not put "
            "(plain values can go into metadata=)",
            # The caller of `Broker.put`.
            stacklevel=5,
        )
    return items


class _Placing:
    """Assigns memory to the storages of a value: shared in place, or copies."""

    def __init__(self, client: Any, device: Any, copy: bool | None, rdma: Any) -> None:
        self._client, self._device, self._copy, self._rdma = client, device, copy, rdma
        # Memory shared in place, by address.
        self.in_place: dict[int, _native.Memory] = {}
        # The storages in that memory.
        self.kept: list[Any] = []
        # The names of the other tensors.
        self.elsewhere: list[str] = []

    def place(self, where: str, part: str, storages: list[_Storage]) -> list[_native.Memory]:
        """Returns the memory of a part, whose storages are on the device `where`."""
        memories: list[_native.Memory] = []
        of_arena: dict[int, int] = {}
        copied: list[_Storage] = []
        for number, storage in enumerate(storages):
            storage.number = number
            found = None
            if self._copy is not True and self._client.backend != "host":
                found = _native.torch_pool_find(storage.storage.data_ptr())
            if found is None:
                copied.append(storage)
                self.elsewhere.extend(item.name for item in storage.items)
                continue
            memory, storage.offset = found
            if memory.address not in of_arena:
                of_arena[memory.address] = len(memories)
                memories.append(memory)
                self.in_place[memory.address] = memory
            storage.memory = of_arena[memory.address]
            self.kept.append(storage.storage)
        if copied and self._copy is not False:
            memories.extend(self._copies(where, part, copied, len(memories)))
        return memories

    def _copies(self, where: str, part: str, storages: list[_Storage], first: int) -> list[_native.Memory]:
        """Copies storages to new memory. `first` is the index of the first new memory in its part."""
        torch, values = _torch(), []
        for storage in storages:
            _compact(storage)
            # Bytes without a tensor are not copied.
            spans = [_span(item.tensor) for item in storage.items]
            storage.begin = min(begin for begin, _ in spans) // 256 * 256
            storage.end = max(end for _, end in spans)
            source = torch.empty(0, dtype=torch.uint8, device=storage.storage.device)
            source.set_(storage.storage, storage.begin, (storage.end - storage.begin,), (1,))
            values.append((str(storage.number), source))
        target = self._device
        if target is None and where != "cpu" and self._client.backend != "host":
            target = int(where.rpartition(":")[2])
        _, memories, placed, _ = self._client.plan(values, part, device=target, copy=True, rdma=self._rdma)
        for storage, (_, _, _, _, memory, offset, _) in zip(storages, placed, strict=True):
            storage.memory, storage.offset = first + memory, offset
        return list(memories)


def _plan(
    client: Any,
    value: Any,
    *,
    part: str = "all",
    device: Any = None,
    copy: bool | None = None,
    seal: bool = False,
    rdma: Any = "auto",
) -> tuple[list[PartPlan], dict[str, Any], object]:
    """Returns the parts of a module, of a mapping of names to tensors or of a list of items, one per device; the metadata to add; and the
    object that must live until the put is done. With `seal`, checks that this process may make the memory read-only.

    Storages in arenas of `pool` are shared in place. Others are copied, aligned to 256 bytes, in order of appearance; `copy=True` copies
    all, `copy=False` refuses copies. Closes these arenas.
    """
    grouped: dict[str, dict[int, _Storage]] = {}
    empty: list[_Item] = []
    for item in _checked(value):
        if item.tensor.numel() == 0:
            empty.append(item)
            continue
        storage = item.tensor.untyped_storage()
        on = grouped.setdefault(str(item.tensor.device), {})
        on.setdefault(storage.data_ptr(), _Storage(storage)).items.append(item)
    placing = _Placing(client, device, copy, rdma)
    placed = [(list(of.values()), placing.place(where, part, list(of.values()))) for where, of in (grouped or {"cpu": {}}).items()]
    if placing.elsewhere and copy is False:
        raise ExportError(
            "copy=False, but these tensors are not in memory that can be shared (allocate them in vmmfd.torch.pool()):"
            + _listed(placing.elsewhere)
        )
    parts: list[PartPlan] = []
    for number, (storages, memories) in enumerate(placed):
        entries = [_entry(item, storage) for storage in storages for item in storage.items]
        if number == 0:
            if not memories:
                memories.append(_native.Memory(1, device=device, backend=client.backend))
            entries.extend(_entry(item, None) for item in empty)
        parts.append((part if number == 0 else f"{part}-{number}", memories, entries, None))
    in_place = placing.in_place
    if in_place and seal:
        _check_sealable(list(in_place.values()), placing.kept)
    if in_place:
        _close(in_place, placing.kept)
    return parts, {}, placing.kept


def _entry(item: _Item, storage: _Storage | None) -> Entry:
    tensor = item.tensor
    dtype, own = _dtype(tensor)
    attributes: dict[str, Any] = {"kind": item.kind, "persistent": item.persistent}
    if item.requires_grad:
        attributes["requires_grad"] = True
    if own is not None:
        attributes["torch_dtype"] = own
    if item.place is not None:
        attributes["place"] = item.place
    size = tensor.element_size()
    strides = None if tensor.is_contiguous() else [stride * size for stride in tensor.stride()]
    memory = offset = 0
    if storage is not None:
        inside = tensor.storage_offset() * size - storage.begin
        attributes |= {
            "storage": storage.number,
            "storage_offset": inside,
            "storage_bytes": storage.end - storage.begin,
        }
        memory, offset = storage.memory, storage.offset + inside
    return item.name, dtype, list(tensor.shape), strides, memory, offset, json.dumps(attributes)


def _check_sealable(memories: list[_native.Memory], published: list[Any]) -> None:
    """Refuses to seal memory that contains other live tensors: their next write would destroy the context."""
    torch = _torch()
    with _lock:
        others = [pool for pool in _active if pool._thread != threading.get_ident()]
    if others:
        raise Invalid("seal=True while another thread is in vmmfd.torch.pool(): it may allocate beside the sealed memory")
    arenas = [(memory.address, memory.address + memory.mapped_size) for memory in memories]
    ours = sorted(storage.data_ptr() for storage in published)
    count = size = 0
    for segment in torch.cuda.memory_snapshot():
        begin = segment["address"]
        if not any(low <= begin < high for low, high in arenas):
            continue
        for block in segment["blocks"]:
            end = begin + block["size"]
            if block["state"].startswith("active") and not any(begin <= address < end for address in ours):
                count, size = count + 1, size + block["size"]
            begin = end
    if count:
        raise Invalid(
            f"seal=True, but {count} other tensors of {size} bytes are in the same arenas, and writes to them would fault: "
            "put them too, delete them first, or allocate them outside of vmmfd.torch.pool()"
        )
