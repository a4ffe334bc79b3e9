"""What is got: the arrays of a lease as tensors, mapped or as private copies."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import _arguments, _native
from .._errors import Differs, Invalid, Unsupported
from ._base import _Span, _around, _copied, _merged, _torch
from ._hooks import _follow
from ._items import _STATISTICS, _items, _written

if TYPE_CHECKING:
    from collections.abc import Iterable

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
        name = str(self.attributes.get("torch_dtype") or self.array.dtype)
        if name not in _dtypes:
            torch = _torch()
            found = getattr(torch, name, None)
            _dtypes[name] = found if isinstance(found, torch.dtype) else None
        found = _dtypes[name]
        # A table that lies of its elements' size would have PyTorch read beyond them.
        return found if found is not None and found.itemsize == self.array.itemsize else None

    def is_private(self, writable_buffers: bool) -> bool:
        return writable_buffers and self.kind in ("buffer", "attribute")


def _has_storage(attributes: dict[str, Any]) -> bool:
    return isinstance(attributes.get("storage"), int)


def _length(array: _native.Array) -> int:
    """How many bytes lie between the first and the last of an array with elements."""
    return sum(abs((length - 1) * stride) for length, stride in zip(array.shape, array.strides, strict=True)) + array.itemsize


class _Mapped:
    """The tensors of a lease: each storage is imported once, and copied once at most."""

    def __init__(self, lease: Any) -> None:
        self._torch = _torch()
        self._from_dlpack = self._torch.from_dlpack
        self._lease = lease
        self._pieces: dict[str, list[tuple[int, Any]]] = {}
        self._storages: dict[tuple[Any, ...], Any] = {}
        # Of each storage, the bytes that are copied together.
        self._spans: dict[tuple[Any, ...], list[_Span]] = {}
        # Private copies, and what they are of.
        self.private: dict[tuple[Any, ...], tuple[Any, Any]] = {}
        self.rows: list[_Row] = []
        arrays = lease._native.arrays()
        counts = Counter(
            (part, attributes["storage"]) for part, _, _, attributes, _ in arrays if attributes and _has_storage(attributes)
        )
        for part, name, array, attributes, is_dense in arrays:
            if not attributes or not _has_storage(attributes):
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

    def _piece(self, part: str, begin: int, end: int) -> Any:
        """The bytes between two addresses of a part, as a tensor; None where they are not in one piece of mapped memory."""
        if part not in self._pieces:
            self._pieces[part] = [(piece.address, piece) for piece in self._lease.memory(part)]
        for address, piece in self._pieces[part]:
            if address <= begin and end <= address + piece.nbytes:
                return self._import(piece[begin - address : end - address])
        return None

    def _bytes(self, row: _Row) -> tuple[tuple[Any, ...], Any, int]:
        """The storage that an array is in, as bytes: its identity, a tensor, and where the array begins in it."""
        attributes = row.attributes
        number, inside, size = (attributes.get(key) for key in ("storage", "storage_offset", "storage_bytes"))
        if (
            isinstance(number, int) and isinstance(inside, int) and isinstance(size, int)
            and 0 <= inside and inside + _length(row.array) <= size
        ):  # fmt: skip
            begin = row.array.address - inside
            # With its place, as tables may lie.
            identity: tuple[Any, ...] = (row.part, number, begin, size)
            if identity in self._storages:
                return identity, self._storages[identity], inside
            found = self._piece(row.part, begin, begin + size)
            if found is not None:
                self._storages[identity] = found
                return identity, found, inside
        # It has none that is mapped: the array's own bytes.
        identity = row.identity
        if identity not in self._storages:
            array = row.array
            length = _length(array)
            if any(stride < 0 and size > 1 for size, stride in zip(array.shape, array.strides, strict=True)):
                raise Differs(f"array {row.name!r} has negative strides, which PyTorch has not: copy it with NumPy or CuPy")
            found = self._piece(row.part, array.address, array.address + length)
            assert found is not None, "an array lies in its memory"
            self._storages[identity] = found
        return identity, self._storages[identity], 0

    def will_copy(self, rows: Iterable[_Row]) -> None:
        """Says which arrays come as private copies. Of a storage these alone are copied, and those that overlap stay in one."""
        spans: dict[tuple[Any, ...], list[_Span]] = {}
        for row in rows:
            if 0 not in row.array.shape:
                identity, _, inside = self._bytes(row)
                spans.setdefault(identity, []).append((inside, inside + _length(row.array)))
        self._spans = {identity: _merged(of) for identity, of in spans.items()}

    def tensor(self, row: _Row, private: bool) -> Any:
        """An array as a tensor without a gradient: of the memory itself, or of a copy, which `will_copy` was called for."""
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
            begin, end = _around(self._spans[identity], inside)
            if (identity, begin) not in self.private:
                self.private[identity, begin] = _copied(source.untyped_storage(), begin, end)
            source, inside = self.private[identity, begin][0], inside - begin
        if inside % size or any(stride % size for stride in array.strides):
            raise Differs(f"array {row.name!r} is not aligned to its elements, which PyTorch asks for")
        made = torch.empty(0, dtype=dtype, device=device)
        return made.set_(source.untyped_storage(), inside // size, array.shape, strides)


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
    named = set(_arguments.names(private, "private"))
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
    rows: dict[str, tuple[_Row, bool]] = {}
    for row in mapped.rows:
        if everything or row.attributes.get("persistent", True):
            if row.name in rows:
                raise Invalid(
                    f"the parts {rows[row.name][0].part!r} and {row.part!r} both have an array {row.name!r}: "
                    f"get one of them, as with parts=[{row.part!r}]"
                )
            rows[row.name] = row, row.identity in identities or row.is_private(writable_buffers)
    mapped.will_copy(row for row, is_private in rows.values() if is_private)
    found = {name: mapped.tensor(row, is_private) for name, (row, is_private) in rows.items()}
    # Parameters too, as the module that they come to may have buffers there.
    _follow((found[name] for name, (_, is_private) in rows.items() if not is_private), writable_buffers)
    return found
