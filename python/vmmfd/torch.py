"""PyTorch: modules and tensors in memory that other processes map, without copies.

`pool` makes PyTorch allocate in memory that can be shared; `broker.put(name, module)` then hands that memory over as it is.
`broker.state_dict(name)` and `broker.load(name, into=module)` give tensors in that memory to other processes.

This module imports torch when it is first used, and not before.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import threading
import warnings
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _native
from ._errors import Differs, ExportError, Invalid, Unsupported

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType
    from typing import Literal

    from ._lease import Lease, Prepared

    Entry = tuple[str, str, list[int], list[int] | None, int, int, str | None]
    PartPlan = tuple[str, list[_native.Memory], list[Entry], str | None]

__all__ = ["Loaded", "Pool", "pool"]

# How many problems an error lists.
_LISTED = 40


def _torch() -> Any:
    return importlib.import_module("torch")


def _listed(problems: list[str]) -> str:
    more = [f"and {len(problems) - _LISTED} more"] if len(problems) > _LISTED else []
    return "".join(f"\n- {problem}" for problem in [*problems[:_LISTED], *more])


# The pluggable allocator. PyTorch's memory pools keep a bare pointer to it, so it is never let go of.
_allocator: Any = None

# What allocates in shared memory now, in any thread.
_active: list[Pool] = []
_lock = threading.Lock()


def _pluggable() -> Any:
    global _allocator
    with _lock:
        if _allocator is None:
            torch = _torch()
            if not hasattr(torch.cuda, "MemPool") or not hasattr(torch.cuda, "use_mem_pool"):
                raise Unsupported(
                    f"PyTorch {torch.__version__} has no torch.cuda.MemPool: install 2.6 or newer", kind="unsupported"
                )
            _allocator = torch.cuda.memory.CUDAPluggableAllocator(
                _native.__file__, "vmmfd_torch_malloc", "vmmfd_torch_free"
            )
        return _allocator.allocator()


class Pool:
    """What `pool` returns: a context manager, to be entered once at a time, by one thread."""

    def __init__(self, arena: int, device: Any) -> None:
        self._arena = arena
        self._device = device
        self._ordinal = -1
        self._thread = 0
        self._mempool: Any = None
        self._routing: Any = None
        # Storages that are published while another thread's pool may have their blocks.
        self._held: list[Any] = []

    def __enter__(self) -> Pool:
        if self._routing is not None:
            raise Invalid("this pool is entered already: make another with vmmfd.torch.pool() for each thread and block")
        torch = _torch()
        if not torch.cuda.is_available():
            raise Unsupported("vmmfd.torch.pool() needs a GPU, and torch.cuda.is_available() is false", kind="unsupported")
        device = torch.cuda.current_device() if self._device is None else torch.device(self._device)
        if not isinstance(device, int):
            if device.type != "cuda":
                raise Invalid(f"device={str(device)!r} is no CUDA device: a pool is of memory of a GPU")
            device = torch.cuda.current_device() if device.index is None else int(device.index)
        # PyTorch's context first: an error there is PyTorch's to say.
        torch.cuda.init()
        _native.torch_pool_open(device, self._arena)
        self._ordinal = device
        self._thread = threading.get_ident()
        self._begin()
        with _lock:
            _active.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with _lock:
            _active.remove(self)
        self._end()
        self._held.clear()
        if error is not None and isinstance(error, _torch().OutOfMemoryError):
            trouble = _native.torch_pool_trouble()
            if trouble:
                error.add_note(f"vmmfd.torch.pool(): {trouble}")

    def _begin(self) -> None:
        torch = _torch()
        mempool = torch.cuda.MemPool(_pluggable())
        # PyTorch 2.11 ends the process when a pool is destroyed while another is in use, in any thread, or a graph is captured. So none is
        # ever destroyed: this object is a few bytes, and `_end` gives its memory back.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(mempool))
        routing = torch.cuda.use_mem_pool(mempool, self._ordinal)
        routing.__enter__()
        self._mempool, self._routing = mempool, routing

    def _end(self) -> None:
        routing, self._routing = self._routing, None
        mempool, self._mempool = self._mempool, None
        routing.__exit__(None, None, None)
        # What the destructor would do: nothing allocates in it any more, and `empty_cache` gives back its blocks that are free.
        _torch()._C._cuda_releasePool(self._ordinal, mempool.id)

    @property
    def figures(self) -> dict[str, int]:
        """What this process's pools of the device hold now: `arenas`, each of which is one descriptor; `closed`, those of them that are
        published; their `bytes`; the `blocks` that PyTorch has of them, and how many bytes of them are `used` so."""
        return _native.torch_pool_figures(self._ordinal) if self._ordinal >= 0 else dict.fromkeys(
            ("arenas", "closed", "bytes", "blocks", "used"), 0
        )


def pool(arena: int = 256 << 20, device: Any = None) -> Pool:
    """A context in which what this thread allocates with PyTorch on a GPU lies in memory that other processes can map.

        with vmmfd.torch.pool():
            model = load()
        broker.put("model", model)          # Without a copy.

    `arena` is the size in bytes of the pieces that are taken from the driver: each is one descriptor, and is given back when nothing is
    in it. `device` is a `torch.device`, its name or its number; by default PyTorch's current one. Needs PyTorch 2.6 or newer.

    Everything in an arena is handed to readers with it, what lies beside the tensors that are published included. Publishing closes
    arenas: nothing is allocated in them again, so that what readers see is never overwritten, whatever is deleted here. Memory of deleted
    tensors goes back at `torch.cuda.empty_cache()`, as all of PyTorch's does.

    Threads that are started inside allocate as ever: enter a pool in each. Blocks while the driver starts, if it has not.

    Raises `vmmfd.Unsupported` (a `NotImplementedError`) without a GPU or with an older PyTorch; `vmmfd.Invalid` (a `ValueError`) for a size
    or device that makes no sense, and in a fork of a process that has a pool.
    """
    if isinstance(arena, bool) or not isinstance(arena, int) or not 0 < arena < 1 << 47:
        raise Invalid(f"arena={arena!r} is no size of memory: give a number of bytes, such as 256 << 20")
    return Pool(arena, device)


def _close(addresses: Iterable[int], storages: Iterable[Any]) -> None:
    """Sees to it that nothing is allocated any more where something is published.

    Nothing is cut from these arenas again. This thread's pool goes on in a new one of PyTorch's, so that free blocks in them are not used
    either. Other threads' pools can't be changed from here: the storages are held until these threads leave them.
    """
    for address in addresses:
        _native.torch_pool_close(address)
    kept = list(storages)
    with _lock:
        pools = list(_active)
    for pool in pools:
        if pool._thread == threading.get_ident():
            pool._end()
            pool._begin()
        else:
            pool._held.extend(kept)


# What is put.

# Buffers that PyTorch's own modules write in training. A state_dict does not say of its tensors what they are.
_STATISTICS = frozenset({"running_mean", "running_var", "num_batches_tracked"})


class _Item(NamedTuple):
    name: str
    tensor: Any
    kind: str
    persistent: bool
    requires_grad: bool = False


class _Storage:
    """A storage of which something is put."""

    __slots__ = ("begin", "end", "items", "memory", "number", "offset", "storage")

    def __init__(self, storage: Any) -> None:
        self.storage = storage
        self.items: list[_Item] = []
        # Which bytes of it are put, and where they come to lie.
        self.begin = 0
        self.end: int = storage.nbytes()
        self.number = 0
        self.memory = 0
        self.offset = 0


def _items(value: Any) -> list[_Item]:
    """The tensors of a module, by the names of its parameters, buffers and attributes, or of a mapping."""
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
            raise Invalid(f"the name {name!r} is no str")
        if not isinstance(tensor, torch.Tensor):
            others.append(f"{name}: {type(tensor).__name__}")
        elif isinstance(tensor, torch.nn.Parameter):
            items.append(_Item(name, tensor, "parameter", True))
        else:
            kind = "buffer" if name.rpartition(".")[2] in _STATISTICS else "tensor"
            items.append(_Item(name, tensor, kind, True))
    if others:
        raise Invalid(
            "only tensors can be put together with tensors (plain values and extra state belong in metadata=, other arrays in "
            "torch.as_tensor, an Array of vmmfd in torch.from_dlpack):"
            + _listed(others)
        )
    return items


def _extra_states(value: Any) -> list[str]:
    """The modules in a module that have more in their `state_dict` than tensors."""
    base = _torch().nn.Module
    if not isinstance(value, base):
        return []
    return [
        path or type(module).__name__
        for path, module in value.named_modules()
        if type(module).get_extra_state is not base.get_extra_state or hasattr(module, "_packed_params")
    ]


def _problem(tensor: Any) -> str | None:
    """Why a tensor can't be put, or None."""
    torch = _torch()
    if torch.nn.parameter.is_lazy(tensor):
        return "has no shape yet: run the module once"
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "is of a function under torch.func (vmap, grad), and has no bytes outside: put what it returns"
    if isinstance(tensor, importlib.import_module("torch._subclasses").FakeTensor):
        return "is a FakeTensor, and has no bytes"
    if tensor.is_nested:
        return "is a nested tensor: put its values() and offsets()"
    if torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor):
        return f"is a {type(tensor).__name__}, which has its bytes in other tensors: put those"
    if tensor.layout != torch.strided:
        return f"is of layout {tensor.layout}: put its values and indices"
    if tensor.is_quantized:
        return "is quantised with a scheme of its own: put its int_repr(), scales and zero points"
    if tensor.device.type == "meta":
        return "is on the meta device, and has no bytes"
    if tensor.device.type not in ("cpu", "cuda"):
        return f"is on {tensor.device}, and only tensors on cpu and cuda can be put"
    return None


def _plain(tensor: Any) -> Any:
    """A tensor's bytes as they are: no gradient, no subclass, nothing that is only said of it."""
    torch = _torch()
    tensor = tensor.detach()
    if type(tensor) is not torch.Tensor:
        tensor = tensor.as_subclass(torch.Tensor)
    return tensor.resolve_conj().resolve_neg()


def _span(tensor: Any) -> tuple[int, int]:
    """The bytes of its storage that a tensor with elements is in."""
    size = tensor.element_size()
    begin = tensor.storage_offset() * size
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * size


# From which size on a tensor with wide gaps is put without them.
_GAPS = 64 << 10


def _compact(storage: _Storage) -> None:
    """Takes the one tensor of a storage that is copied out of it, if it is less than a quarter of what would be copied."""
    if len(storage.items) == 1:
        tensor = storage.items[0].tensor
        begin, end = _span(tensor)
        if end - begin >= _GAPS and tensor.numel() * tensor.element_size() < (end - begin) // 4:
            tensor = tensor.contiguous()
            storage.items = [storage.items[0]._replace(tensor=tensor)]
            storage.storage = tensor.untyped_storage()


def _dtype(tensor: Any) -> tuple[str, str | None]:
    """An element type's name in the table of arrays, and PyTorch's own name if that differs."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name in _SHARED_TYPES:
        return name, None
    return f"|V{tensor.element_size()}", name


# Types that have the same name in NumPy or ml_dtypes and in PyTorch.
_SHARED_TYPES = frozenset(
    {
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "bfloat16", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    }
)


def _plan(
    client: Any,
    value: Any,
    *,
    part: str = "all",
    device: Any = None,
    copy: bool | None = None,
    seal: bool = False,
) -> tuple[list[PartPlan], dict[str, Any], object]:
    """What a put of a module or of a mapping of names to tensors is made of: parts, one for each device, what comes into the metadata, and
    what has to live until it is put. With `seal` checks that this process's right to write that memory can be taken then.

    Storages in arenas of `pool` are handed over as they are. Others are copied, to a multiple of 256 bytes each, in the order of their
    names' appearance; with `copy=True` all are, with `copy=False` none may be. From here on nothing is allocated in these arenas.
    """
    torch = _torch()
    items, problems = [], []
    for item in _items(value):
        problem = _problem(item.tensor)
        if problem:
            problems.append(f"{item.name} {problem}")
        else:
            items.append(item._replace(tensor=_plain(item.tensor), requires_grad=item.tensor.requires_grad))
    if problems:
        raise Invalid("some tensors can't be put:" + _listed(problems))
    packed = _extra_states(value)
    if not items:
        where = f": what {packed[0]} has is in extra state, as of quantised modules, which is not carried" if packed else ""
        raise Invalid(f"there is no tensor to put{where}")
    if packed:
        warnings.warn(
            f"extra state of modules is not carried: that of {', '.join(packed[:5])}{' and others' if packed[5:] else ''} stays behind "
            "(plain values can go into metadata=)",
            stacklevel=4,
        )
    grouped: dict[str, dict[int, _Storage]] = {}
    empty: list[_Item] = []
    for item in items:
        if item.tensor.numel() == 0:
            empty.append(item)
            continue
        storage = item.tensor.untyped_storage()
        on = grouped.setdefault(str(item.tensor.device), {})
        on.setdefault(storage.data_ptr(), _Storage(storage)).items.append(item)
    grouped = grouped or {"cpu": {}}
    parts: list[PartPlan] = []
    in_place: dict[int, _native.Memory] = {}
    elsewhere: list[str] = []
    kept: list[Any] = []
    for number, (place, storages) in enumerate(grouped.items()):
        memories: list[_native.Memory] = []
        of_arena: dict[int, int] = {}
        copied: list[_Storage] = []
        for count, storage in enumerate(storages.values()):
            storage.number = count
            found = None
            if copy is not True and client.backend != "host":
                found = _native.torch_pool_find(storage.storage.data_ptr())
            if found is None:
                _compact(storage)
                spans = [_span(item.tensor) for item in storage.items]
                # What no tensor has of a storage is not copied.
                storage.begin = min(begin for begin, _ in spans) // 256 * 256
                storage.end = max(end for _, end in spans)
                copied.append(storage)
                elsewhere.extend(item.name for item in storage.items)
                continue
            memory, storage.offset = found
            if memory.address not in of_arena:
                of_arena[memory.address] = len(memories)
                memories.append(memory)
                in_place[memory.address] = memory
            storage.memory = of_arena[memory.address]
            kept.append(storage.storage)
        if copied and copy is False:
            continue
        if copied:
            values = []
            for storage in copied:
                source = torch.empty(0, dtype=torch.uint8, device=storage.storage.device)
                source.set_(storage.storage, storage.begin, (storage.end - storage.begin,), (1,))
                values.append((str(storage.number), source))
            target = device if device is not None or place == "cpu" else int(place.rpartition(":")[2])
            if client.backend == "host":
                target = device
            _, more, placed, _ = client.plan(values, part, device=target, copy=True)
            for storage, (_, _, _, _, memory_index, offset, _) in zip(copied, placed, strict=True):
                storage.memory, storage.offset = len(memories) + memory_index, offset
            memories.extend(more)
        entries: list[Entry] = []
        for storage in storages.values():
            for item in storage.items:
                entries.append(_entry(item, storage))
        if number == 0:
            if not memories:
                memories.append(_native.Memory(1, device=device, backend=client.backend))
            entries.extend(_entry(item, None) for item in empty)
        parts.append((part if number == 0 else f"{part}-{number}", memories, entries, None))
    if elsewhere and copy is False:
        raise ExportError(
            "copy=False, and these tensors lie in no memory that can be handed over (allocate them in vmmfd.torch.pool()):"
            + _listed(elsewhere)
        )
    if in_place and seal:
        _check_sealable(list(in_place.values()), kept)
    if in_place:
        _close(in_place, kept)
    return parts, {}, kept


def _entry(item: _Item, storage: _Storage | None) -> Entry:
    tensor = item.tensor
    dtype, own = _dtype(tensor)
    attributes: dict[str, Any] = {"kind": item.kind, "persistent": item.persistent}
    if item.requires_grad:
        attributes["requires_grad"] = True
    if own is not None:
        attributes["torch_dtype"] = own
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
    """Refuses to make memory read-only that something else is in: its next write would end the context."""
    torch = _torch()
    with _lock:
        others = [pool for pool in _active if pool._thread != threading.get_ident()]
    if others:
        raise Invalid("seal=True while another thread is in vmmfd.torch.pool(): it may allocate beside what is sealed")
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
            f"seal=True, and {count} other tensors of {size} bytes lie in the same arenas, which writes to them would turn into faults: "
            "put them too, or delete them first, or allocate them outside of vmmfd.torch.pool()"
        )


# What is got.


# PyTorch's element types by their names in tables of arrays; None for what it has not.
_dtypes: dict[str, Any] = {}


class _Row(NamedTuple):
    name: str
    part: str
    array: _native.Array
    attributes: dict[str, Any]
    # Names that are tied have the same one.
    identity: tuple[Any, ...]
    # Whether it is all of its storage, and nothing else is in that.
    is_alone: bool

    @property
    def kind(self) -> str:
        kind = self.attributes.get("kind")
        if isinstance(kind, str):
            return kind
        return "buffer" if self.name.rpartition(".")[2] in _STATISTICS else "tensor"

    @property
    def dtype(self) -> Any:
        name = self.attributes.get("torch_dtype") or self.array.dtype
        if name not in _dtypes:
            torch = _torch()
            found = getattr(torch, str(name), None)
            _dtypes[name] = found if isinstance(found, torch.dtype) else None
        return _dtypes[name]

    def is_private(self, writable_buffers: bool) -> bool:
        return writable_buffers and self.kind in ("buffer", "attribute")


class _Mapped:
    """The tensors of a lease: each storage is imported once, and copied once at most."""

    def __init__(self, lease: Any) -> None:
        self._torch = _torch()
        self._from_dlpack = self._torch.from_dlpack
        self._lease = lease
        self._pieces: dict[str, list[tuple[int, Any]]] = {}
        self._storages: dict[tuple[Any, ...], Any] = {}
        # Private copies, and what they are of.
        self.private: dict[tuple[Any, ...], tuple[Any, Any]] = {}
        self.rows: list[_Row] = []
        arrays = lease._native.arrays()
        counts = Counter(
            (part, attributes["storage"]) for part, _, _, attributes, _ in arrays if attributes and "storage" in attributes
        )
        for part, name, array, attributes, is_dense in arrays:
            if not attributes or "storage" not in attributes:
                # Of another maker, such as a file's: its bytes are a storage if there are no gaps between them.
                self.rows.append(_Row(name, part, array, attributes or {}, (part, name), is_dense))
                continue
            identity: tuple[Any, ...] = (part, attributes["storage"])
            is_alone = counts[identity] == 1
            if not is_alone:
                identity += (array.address, array.dtype, array.shape, array.strides)
            is_alone = is_alone and attributes.get("storage_bytes") == array.nbytes
            self.rows.append(_Row(name, part, array, attributes, identity, is_alone))
        self._is_cuda = any(row.array.device.backend == "cuda" for row in self.rows[:1])
        if self._is_cuda:
            if not self._torch.cuda.is_available():
                raise Unsupported("the object is on a GPU, and torch.cuda.is_available() is false", kind="unsupported")
            self._torch.cuda.init()

    def _import(self, array: _native.Array) -> Any:
        # What is published is finished: there is no work to wait for.
        return self._from_dlpack(array._capsule())

    def _bytes(self, row: _Row) -> tuple[tuple[Any, ...], Any, int]:
        """The storage that an array is in, as bytes: its identity, a tensor, and where the array begins in it."""
        attributes = row.attributes
        number, inside, size = (attributes.get(key) for key in ("storage", "storage_offset", "storage_bytes"))
        if isinstance(number, int) and isinstance(inside, int) and isinstance(size, int):
            identity: tuple[Any, ...] = (row.part, number, "storage")
            if identity in self._storages:
                return identity, self._storages[identity], inside
            if row.part not in self._pieces:
                self._pieces[row.part] = [(piece.address, piece) for piece in self._lease.memory(row.part)]
            begin = row.array.address - inside
            for address, piece in self._pieces[row.part]:
                if address <= begin and begin + size <= address + piece.nbytes and 0 <= inside:
                    found = self._import(piece[begin - address : begin - address + size])
                    self._storages[identity] = found
                    return identity, found, inside
        # It has none that is mapped: the array's own bytes.
        identity = row.identity
        if identity not in self._storages:
            array = row.array
            steps = [(length - 1) * stride for length, stride in zip(array.shape, array.strides, strict=True)]
            low = sum(step for step in steps if step < 0)
            length = sum(map(abs, steps)) + array.itemsize
            if low:
                raise Differs(f"array {row.name!r} has negative strides, which PyTorch has not: copy it with NumPy or CuPy")
            found = None
            for piece in self._lease.memory(row.part):
                begin = array.address - piece.address
                if 0 <= begin and begin + length <= piece.nbytes:
                    found = self._import(piece[begin : begin + length])
            assert found is not None, "an array lies in its memory"
            self._storages[identity] = found
        return identity, self._storages[identity], 0

    def tensor(self, row: _Row, private: bool) -> Any:
        """An array as a tensor without a gradient: of the memory itself, or of a copy of its storage."""
        if row.is_alone and not private and "torch_dtype" not in row.attributes:
            # One import, and not two.
            try:
                return self._import(row.array)
            except (BufferError, RuntimeError):
                pass  # PyTorch, or DLPack, has no such elements: it is seen below.
        torch, array, dtype = self._torch, row.array, row.dtype
        device = torch.device("cuda", array.device.ordinal) if array.device.backend == "cuda" else torch.device("cpu")
        if dtype is None:
            raise Differs(f"array {row.name!r} is of type {array.dtype}, which PyTorch {torch.__version__} has not")
        size = array.itemsize
        strides = tuple(stride // size for stride in array.strides)
        if 0 in array.shape:
            return torch.empty_strided(array.shape, strides, dtype=dtype, device=device)
        identity, source, inside = self._bytes(row)
        if private:
            if identity not in self.private:
                self.private[identity] = (torch.empty_like(source).copy_(source), source)
            source = self.private[identity][0]
        if inside % size or any(stride % size for stride in array.strides):
            raise Differs(f"array {row.name!r} is not aligned to its elements, which PyTorch asks for")
        made = torch.empty(0, dtype=dtype, device=device)
        return made.set_(source.untyped_storage(), inside // size, array.shape, strides)


def _wanted(private: Iterable[str]) -> set[str]:
    if isinstance(private, str):
        raise Invalid(f"private={private!r} is one name where a list belongs: give [{private!r}]")
    names = list(private)
    for name in names:
        if not isinstance(name, str):
            raise Invalid(f"private has {name!r}, of type {type(name).__name__}: names are str")
    return set(names)


def _written(module: Any) -> set[str]:
    """The names of the parameters that a module's forward writes: `max_norm` scales an embedding's rows where they are."""
    torch = _torch()
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return {
        f"{path}.weight".lstrip(".")
        for path, owner in module.named_modules(remove_duplicate=False)
        if isinstance(owner, kinds) and owner.max_norm is not None
    }


def _state_dict(
    lease: Any,
    *,
    writable_buffers: bool = True,
    everything: bool = False,
    module: Any = None,
    private: Iterable[str] = (),
) -> dict[str, Any]:
    """The tensors of a lease by name.

    Parameters are the mapped memory itself. Buffers are private copies unless `writable_buffers` is false, and so is what `private` names.
    What is a buffer is `module`'s to say, if one is given. What a `state_dict` of PyTorch does not have (buffers that are not persistent,
    tensors that are plain attributes) is left out unless `everything` is asked for.
    """
    named = _wanted(private)
    copied = set(named)
    if module is not None:
        if not isinstance(module, _torch().nn.Module):
            raise Invalid(f"module= takes a torch.nn.Module, and got a {type(module).__name__}")
        copied |= _written(module)
        if writable_buffers:
            copied |= {item.name for item in _items(module) if item.kind != "parameter"}
    mapped = _Mapped(lease)
    identities = set()
    if copied:
        unknown = named - {row.name for row in mapped.rows}
        if unknown:
            raise Invalid(f"private= names {min(unknown)!r}, which the object has not")
        # What is tied is one storage also as a copy.
        identities = {row.identity for row in mapped.rows if row.name in copied}
    found: dict[str, Any] = {}
    parts: dict[str, str] = {}
    for row in mapped.rows:
        if everything or row.attributes.get("persistent", True):
            if row.name in found:
                raise Invalid(
                    f"the parts {parts[row.name]!r} and {row.part!r} both have an array {row.name!r}: "
                    f"get one of them, as with parts=[{row.part!r}]"
                )
            parts[row.name] = row.part
            found[row.name] = mapped.tensor(row, row.identity in identities or row.is_private(writable_buffers))
    return found


class _Guard:
    """Refuses a `load_state_dict` that would copy into mapped memory. Copied or pickled with its module, it does nothing: the copy's
    tensors are its own."""

    def __init__(self, installed: dict[str, tuple[Any, int]]) -> None:
        self._installed = installed

    def __call__(self, state_dict: Any, prefix: str, metadata: dict[str, Any], *_: Any) -> None:
        if metadata.get("assign_to_params_buffers", False):
            return
        names = []
        for name, (reference, address) in self._installed.items():
            tensor = reference()
            if prefix + name in state_dict and tensor is not None and tensor.data_ptr() == address:
                names.append(prefix + name)
        if names:
            raise ExportError(
                "load_state_dict would copy into memory of the broker, which is read-only: call it with assign=True, or load the module "
                "anew. These are such:" + _listed(names)
            )

    def __reduce__(self) -> tuple[Any, ...]:
        # A function that takes anything and does nothing, so that who unpickles the module needs no vmmfd.
        return getattr, ("", "format")


def _guard(module: Any, installed: list[_Installed]) -> None:
    """Has the module, and each in it that has mapped tensors, refuse what would write to them."""
    of: dict[Any, dict[str, tuple[Any, int]]] = {module: {}}
    for name, owner, leaf, kind, address, is_mapped in installed:
        if is_mapped and kind != "attribute":
            tensor = weakref.ref(_held(owner, kind)[leaf])
            of[module][name] = tensor, address
            of.setdefault(owner, {})[leaf] = tensor, address
    for owner in module.modules():
        hooks = owner._load_state_dict_pre_hooks
        for key in [key for key, hook in hooks.items() if isinstance(getattr(hook, "hook", hook), _Guard)]:
            del hooks[key]
    for owner, tensors in of.items():
        if tensors:
            owner._register_load_state_dict_pre_hook(_Guard(tensors))


class _Installed(NamedTuple):
    """A tensor that a module was given."""

    name: str
    owner: Any
    leaf: str
    kind: str
    address: int
    is_mapped: bool


def _held(owner: Any, kind: str) -> dict[str, Any]:
    """Where a module has its tensors of a kind."""
    held: dict[str, Any] = {"parameter": owner._parameters, "buffer": owner._buffers}.get(kind, owner.__dict__)
    return held


class Loaded:
    """A module whose parameters are memory of the broker: what `broker.load` returns.

    `lease` is the lease, `module` the module, and `private` the names of the tensors that are private copies. The module keeps the memory
    by itself: this object is only needed to `switch` or `refresh`, and may be dropped.
    """

    def __init__(
        self, lease: Lease, module: Any, private: list[str], copies: list[tuple[Any, Any]], installed: list[_Installed]
    ) -> None:
        self.lease = lease
        self.module = module
        self.private = private
        self._copies = copies
        self._installed = installed

    def _check_moved(self, moved: object) -> None:
        if moved not in (None, "ignore"):
            raise Invalid(f'moved={moved!r} is none of None and "ignore"')
        if moved is not None:
            return
        addresses = {each.address for each in self._installed}
        names = []
        for each in self._installed:
            if each.kind == "attribute":
                continue
            now = _held(each.owner, each.kind).get(each.leaf)
            if now is not None and now.numel() and now.data_ptr() not in addresses:
                names.append(each.name)
        if names:
            raise Differs(
                "the module has other tensors now than it was given, as after half(), to() or an assignment, and no version comes "
                'there: load it anew, or say moved="ignore". These moved:' + _listed(names)
            )

    def refresh(self, *, moved: Literal["ignore"] | None = None) -> None:
        """Copies the current version's bytes into the private copies again, at their addresses: caches and statistics that the module has
        written there since are lost. Does not wait: the copies are in order on PyTorch's current stream.

        Raises `vmmfd.Invalid` if the lease is closed or parked, and `vmmfd.Differs` as `switch` does if tensors moved."""
        if self.lease.is_closed:
            raise Invalid("the lease is closed: load the module anew")
        if self.lease.is_parked:
            raise Invalid(f"the lease of {self.lease.name!r} is parked, and has no memory: unpark it first")
        self._check_moved(moved)
        torch = _torch()
        with torch.no_grad():
            for private, source in self._copies:
                private.copy_(source)

    @property
    def version(self) -> int:
        """The version that is there now."""
        version: int = self.lease.version
        return version

    def prepare(self, name: str | None = None, **options: Any) -> Prepared:
        """Gets and imports a version that is to take the place of this one, which stays in use meanwhile: `Lease.prepare`."""
        prepared: Prepared = self.lease.prepare(name, **options)
        return prepared

    def switch(
        self,
        prepared: Prepared | None = None,
        *,
        exported: Literal["valid"] | None = "valid",
        refresh: bool = True,
        moved: Literal["ignore"] | None = None,
    ) -> Prepared:
        """Puts another version at the addresses of this one, and returns the old one, to switch back to or to close.

        `prepared` is what `prepare` returned; without it, the newest version is prepared first. Waits for the device's work, then
        for the driver's calls. Tensors, views and captured CUDA graphs have the new version's values from then on; so have the private
        copies, unless `refresh` is false. You promise that nothing uses the module meanwhile, in another thread or stream.

        Raises what `lease.prepare` and `lease.switch` raise; `vmmfd.Differs` for a version of another layout, and, unless
        `moved="ignore"`, with a list of the parameters and buffers in whose place the module has others now, as after `half()` or `to()`:
        the new version does not come there.
        """
        self._check_moved(moved)
        if prepared is None:
            prepared = self.lease.prepare()
        old: Prepared = self.lease.switch(prepared, exported=exported)
        if refresh:
            self.refresh(moved="ignore")
        return old

    def __repr__(self) -> str:
        return f"<vmmfd.torch.Loaded {type(self.module).__name__} of {self.lease!r}, {len(self.private)} private copies>"


def _owner(module: Any, name: str) -> tuple[Any, str]:
    path, _, leaf = name.rpartition(".")
    return (module.get_submodule(path) if path else module), leaf


class _Fit(NamedTuple):
    # What the module has: of each name its kind, the tensor, and whether it is persistent.
    targets: dict[str, tuple[str, Any, bool]]
    # Which array comes to which name, and as what.
    chosen: dict[str, tuple[_Row, str]]
    # Names of the module that are tied to another one, which comes.
    follows: dict[str, str]
    problems: list[str]


def _fit(rows: list[_Row], module: Any, strict: bool) -> _Fit:
    """Compares an object with a module."""
    torch = _torch()
    targets = {item.name: (item.kind, item.tensor, item.persistent) for item in _items(module)}
    chosen: dict[str, tuple[_Row, str]] = {}
    problems: list[str] = []
    for row in rows:
        target = targets.get(row.name)
        if target is None:
            if strict and row.kind != "attribute":
                problems.append(f"{row.name}: the object has it ({row.kind}), and the module has not")
            continue
        if row.name in chosen:
            problems.append(f"{row.name}: the parts {chosen[row.name][0].part!r} and {row.part!r} have it: take one, with parts=")
            continue
        kind, tensor, _ = target
        chosen[row.name] = (row, kind)
        if row.dtype is None:
            problems.append(f"{row.name}: its type {row.array.dtype} is none of PyTorch's")
        elif not (row.kind == kind == "attribute") and not torch.nn.parameter.is_lazy(tensor):
            if tuple(tensor.shape) != tuple(row.array.shape):
                problems.append(f"{row.name}: shape {tuple(row.array.shape)}, and {tuple(tensor.shape)} in the module")
            if tensor.dtype != row.dtype:
                problems.append(f"{row.name}: type {row.dtype}, and {tensor.dtype} in the module")
    tied: dict[int, list[str]] = {}
    for name, (_, tensor, _) in targets.items():
        tied.setdefault(id(tensor), []).append(name)
    follows: dict[str, str] = {}
    for name, (kind, tensor, persistent) in targets.items():
        if name in chosen:
            continue
        leader = next((other for other in tied[id(tensor)] if other in chosen), None)
        if leader is not None:
            follows[name] = leader
        elif tensor.device.type == "meta" and not (strict and persistent):
            problems.append(f"{name}: it is on the meta device, and the object has not got it ({kind})")
        elif strict and persistent:
            problems.append(f"{name}: the module has it ({kind}), and the object has not")
    return _Fit(targets, chosen, follows, problems)


def _load(
    lease: Any, module: Any, *, strict: bool = True, writable_buffers: bool = True, private: Iterable[str] = ()
) -> Loaded:
    """Makes the tensors of a lease those of a module, and returns what it takes to switch them.

    All is checked first: what does not fit is listed in one `Differs`, and the module is as it was.
    """
    torch = _torch()
    if not isinstance(module, torch.nn.Module):
        raise Invalid(f"into= takes a torch.nn.Module, and got a {type(module).__name__}")
    named = _wanted(private)
    mapped = _Mapped(lease)
    fit = _fit(mapped.rows, module, strict)
    problems = fit.problems + [
        f"{name}: private= names it, and it does not come" for name in sorted(named - fit.chosen.keys() - fit.follows.keys())
    ]
    if problems:
        of = f"version {lease.version} of {lease.name!r}"
        # The exception has this frame, and should not hold the lease.
        del mapped, fit
        raise Differs(f"{of} does not fit into the {type(module).__name__}:{_listed(problems)}")
    # What is tied is one tensor also as a copy.
    leaders = (fit.follows.get(name, name) for name in named | _written(module))
    copied = {fit.chosen[name][0].identity for name in leaders if name in fit.chosen}
    made: dict[str, Any] = {}
    parameters: dict[tuple[Any, ...], Any] = {}
    copies: list[str] = []
    for name, (row, kind) in fit.chosen.items():
        is_private = row.identity in copied or (writable_buffers and kind != "parameter")
        if is_private:
            copies.append(name)
        if kind != "parameter":
            made[name] = mapped.tensor(row, is_private)
            continue
        if row.identity not in parameters or 0 in row.array.shape:
            old = fit.targets[name][1]
            parameter = torch.nn.Parameter(mapped.tensor(row, is_private), requires_grad=False)
            parameter.__dict__.update(old.__dict__)
            parameters[row.identity] = parameter
        made[name] = parameters[row.identity]
    made |= {name: made[leader] for name, leader in fit.follows.items()}
    installed = _install(module, made, fit, set(copies))
    _guard(module, installed)
    return Loaded(lease, module, copies, list(mapped.private.values()), installed)


def _install(module: Any, made: dict[str, Any], fit: _Fit, copies: set[str]) -> list[_Installed]:
    """Gives a module its tensors: all, or none if it refuses one."""
    before: list[tuple[dict[str, Any], str, Any]] = []
    installed: list[_Installed] = []
    name = ""
    try:
        for name, tensor in made.items():
            owner, leaf = _owner(module, name)
            kind, old, _ = fit.targets[name]
            held = _held(owner, kind)
            before.append((held, leaf, old))
            setattr(owner, leaf, tensor)
            is_there = held.get(leaf) is tensor
            if is_there and tensor.numel():
                is_mapped = fit.follows.get(name, name) not in copies
                installed.append(_Installed(name, owner, leaf, kind, tensor.data_ptr(), is_mapped))
    except BaseException as error:
        for held, leaf, old in before:
            held[leaf] = old
        if not isinstance(error, Exception):
            raise
        raise Differs(f"the {type(module).__name__} does not let its {name!r} be set, and is as it was: {error}") from error
    return installed
