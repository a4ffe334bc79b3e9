"""A lease's arrays as tensors, mapped or as private copies."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import _arguments, _native
from .._errors import Invalid, MismatchError, Unsupported
from ._base import _Span, _around, _copied, _merged, _torch
from ._guard import _note
from ._items import _items, _written

if TYPE_CHECKING:
    from collections.abc import Iterable

# PyTorch dtypes by their names in tables of arrays; None for types that PyTorch lacks.
_dtypes: dict[str, Any] = {}


class _Row(NamedTuple):
    name: str
    part: str
    array: _native.Array
    attributes: dict[str, Any]
    # Equal for tied names.
    identity: tuple[Any, ...]
    # Whether it covers all of its storage, and no other array shares it.
    is_alone: bool

    @property
    def kind(self) -> str:
        kind = self.attributes.get("kind")
        return kind if isinstance(kind, str) else "tensor"

    @property
    def dtype(self) -> Any:
        name = str(self.attributes.get("torch_dtype") or self.array.dtype)
        if name not in _dtypes:
            torch = _torch()
            found = getattr(torch, name, None)
            _dtypes[name] = found if isinstance(found, torch.dtype) else None
        found = _dtypes[name]
        # With a wrong element size in the table, PyTorch would read out of bounds.
        return found if found is not None and found.itemsize == self.array.itemsize else None


def _has_storage(attributes: dict[str, Any]) -> bool:
    return isinstance(attributes.get("storage"), int)


def _length(array: _native.Array) -> int:
    """Returns the bytes from the first to the last element of a non-empty array."""
    return sum(abs((length - 1) * stride) for length, stride in zip(array.shape, array.strides, strict=True)) + array.itemsize


class _Mapped:
    """The tensors of a lease: each storage is imported once, and copied at most once."""

    def __init__(self, lease: Any) -> None:
        self._torch = _torch()
        self._from_dlpack = self._torch.from_dlpack
        self._lease = lease
        self._pieces: dict[str, list[tuple[int, Any]]] = {}
        self._storages: dict[tuple[Any, ...], Any] = {}
        # The byte ranges of each storage that are copied together.
        self._spans: dict[tuple[Any, ...], list[_Span]] = {}
        # Private copies and their sources.
        self.private: dict[tuple[Any, ...], tuple[Any, Any]] = {}
        self.rows: list[_Row] = []
        arrays = list(lease._native.arrays())
        counts = Counter(
            (part, attributes["storage"]) for part, _, _, attributes, _ in arrays if attributes and _has_storage(attributes)
        )
        for part, name, array, attributes, is_dense in arrays:
            if not attributes or not _has_storage(attributes):
                # An array without a storage, for example from a file: its own bytes serve as the storage if they have no gaps.
                self.rows.append(_Row(name, part, array, attributes or {}, (part, name), is_dense))
                continue
            identity: tuple[Any, ...] = (part, attributes["storage"])
            is_alone = counts[identity] == 1
            if not is_alone:
                identity += (array.address, array.dtype, array.shape, array.strides)
            is_alone = is_alone and attributes.get("storage_bytes") == array.nbytes
            self.rows.append(_Row(name, part, array, attributes, identity, is_alone))
        # With private pages there is nothing to copy or guard.
        self.copy_on_write: bool = lease._native.copy_on_write
        self._is_cuda = any(row.array.device.backend == "cuda" for row in self.rows[:1])
        if self._is_cuda:
            if not self._torch.cuda.is_available():
                raise Unsupported("the object is on a GPU, and torch.cuda.is_available() is false", kind="unsupported")
            self._torch.cuda.init()

    def _import(self, array: _native.Array) -> Any:
        # Published work is finished: no stream has to wait.
        return self._from_dlpack(array._capsule())

    def _piece(self, part: str, begin: int, end: int) -> Any:
        """Returns the bytes between two addresses of a part as a tensor; None if they are not in one mapped piece."""
        if part not in self._pieces:
            self._pieces[part] = [(piece.address, piece) for piece in self._lease.memory(part)]
        for address, piece in self._pieces[part]:
            if address <= begin and end <= address + piece.nbytes:
                return self._import(piece[begin - address : end - address])
        return None

    def _bytes(self, row: _Row) -> tuple[tuple[Any, ...], Any, int]:
        """Returns the storage of an array as bytes: its identity, a tensor, and the offset of the array in it."""
        attributes = row.attributes
        number, inside, size = (attributes.get(key) for key in ("storage", "storage_offset", "storage_bytes"))
        if (
            isinstance(number, int) and isinstance(inside, int) and isinstance(size, int)
            and 0 <= inside and inside + _length(row.array) <= size
        ):  # fmt: skip
            begin = row.array.address - inside
            # The identity includes the address and size, because a table may be wrong.
            identity: tuple[Any, ...] = (row.part, number, begin, size)
            if identity in self._storages:
                return identity, self._storages[identity], inside
            found = self._piece(row.part, begin, begin + size)
            if found is not None:
                self._storages[identity] = found
                return identity, found, inside
        # No mapped storage: use the array's own bytes.
        identity = row.identity
        if identity not in self._storages:
            array = row.array
            length = _length(array)
            if any(stride < 0 and size > 1 for size, stride in zip(array.shape, array.strides, strict=True)):
                raise MismatchError(f"array {row.name!r} has negative strides, which PyTorch does not support: copy it with NumPy or CuPy")
            found = self._piece(row.part, array.address, array.address + length)
            assert found is not None, "an array lies in its memory"
            self._storages[identity] = found
        return identity, self._storages[identity], 0

    def will_copy(self, rows: Iterable[_Row]) -> None:
        """Sets the arrays to copy. Only their bytes are copied, and overlapping arrays share a copy."""
        spans: dict[tuple[Any, ...], list[_Span]] = {}
        for row in rows:
            if 0 not in row.array.shape:
                identity, _, inside = self._bytes(row)
                spans.setdefault(identity, []).append((inside, inside + _length(row.array)))
        self._spans = {identity: _merged(of) for identity, of in spans.items()}

    def tensor(self, row: _Row, private: bool) -> Any:
        """Returns an array as a tensor without a gradient: the mapped memory, or a copy, which requires `will_copy` first."""
        if row.is_alone and not private and "torch_dtype" not in row.attributes:
            # One import instead of two.
            try:
                return self._import(row.array)
            except (BufferError, RuntimeError):
                pass  # PyTorch or DLPack lacks this element type: handled below.
        torch, array, dtype = self._torch, row.array, row.dtype
        device = torch.device("cuda", array.device.ordinal) if array.device.backend == "cuda" else torch.device("cpu")
        if dtype is None:
            raise MismatchError(f"array {row.name!r} has type {array.dtype}, which PyTorch {torch.__version__} lacks")
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
            raise MismatchError(f"array {row.name!r} is not aligned to its elements, as PyTorch requires")
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
    """Returns the tensors of a lease by name: see `Lease.state_dict`."""
    torch = _torch()
    if module is not None and not isinstance(module, torch.nn.Module):
        raise TypeError(f"module= takes a torch.nn.Module, not a {type(module).__name__}")
    named = set(_arguments.names(private, "private"))
    _arguments.flag(writable_buffers, "writable_buffers")
    _arguments.flag(everything, "everything")
    kinds = {} if module is None else {item.name: item.kind for item in _items(module)}
    # Inside inference_mode, PyTorch would make them inference tensors.
    with torch.inference_mode(False):
        mapped = _Mapped(lease)
        unknown = named - {row.name for row in mapped.rows}
        if unknown:
            raise Invalid(f"private= names {min(unknown)!r}, which the object lacks")
        if not mapped.copy_on_write and module is not None:
            named |= _written(module)
        writable_buffers = writable_buffers and not mapped.copy_on_write
        # Tied names share a storage as copies too.
        identities = {row.identity for row in mapped.rows if row.name in named}
        rows: dict[str, _Row] = {}
        for row in mapped.rows:
            if everything or row.attributes.get("persistent", True):
                if row.name in rows:
                    raise Invalid(
                        f"the parts {rows[row.name].part!r} and {row.part!r} both have an array {row.name!r}: "
                        f"get only one of them, as with parts=[{row.part!r}]"
                    )
                rows[row.name] = row
        unasked = {name for name, row in rows.items() if writable_buffers and kinds.get(name, row.kind) != "parameter"} - named
        copied = unasked | {name for name, row in rows.items() if row.identity in identities}
        _warn_of_copies(
            lease,
            (rows[name] for name in unasked),
            "give module= if they are parameters, or map them read-only with writable_buffers=False",
        )
        mapped.will_copy(rows[name] for name in copied)
        found = {name: mapped.tensor(row, name in copied) for name, row in rows.items()}
    if not mapped.copy_on_write:
        _note((found[name] for name in rows.keys() - copied), writable_buffers=writable_buffers)
    return found


# The most bytes of unrequested copies without a warning.
_UNNOTICED = 64 << 20


def _warn_of_copies(lease: Any, rows: Iterable[_Row], remedy: str) -> None:
    """Warns if copies of these arrays take much memory."""
    sizes = {row.identity: row.array.nbytes for row in rows}
    total = sum(sizes.values())
    if total <= _UNNOTICED:
        return
    # Blame the package's caller.
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals["__name__"].startswith("vmmfd."):
        level, frame = level + 1, frame.f_back
    warnings.warn(
        f"{len(sizes)} tensors of {lease.name!r} are not known to be parameters: copying them takes another {total >> 20} MiB: {remedy}",
        stacklevel=level,
    )
