"""A trainer's side: a writable copy of an engine's object, to put as its next version. Needs PyTorch, and not vLLM."""

from __future__ import annotations

import re
from typing import Any

from .. import _native
from .._closing import Closing
from .._copies import Copy, Value, layouts
from .._errors import Invalid, MismatchError, NotFound
from ..torch._base import _torch

# The GPU and the ranks, which an engine appends to the name of its object.
_SUFFIX = re.compile(r"[^/]+((?:/[a-z]+\d+of\d+)*)")


class NextVersion(Closing):
    """A copy of an object that engines serve, on the same device: see `vmmfd.engines.vllm.next_version`."""

    def __init__(self, broker: Any, name: str, version: int | None = None) -> None:
        torch = _torch()
        self._broker, self._copies = broker, []
        # The version that `put` made.
        self.number: int | None = None
        self.tensors: dict[str, Any] = {}
        with broker.get(name, version=version) as lease:
            self.name: str = lease.name
            self._base, self._metadata = lease.version, lease.metadata
            if not isinstance(self._metadata.get("vllm"), dict):
                raise MismatchError(f"{name!r} was not published by load format vmmfd: give the name of an engine's object")
            for part in layouts(lease):
                ((_, source),) = lease.pieces(part["name"])
                # One segment: an engine's switch makes a driver call for each.
                whole = {"digest": None, "segments": [(source.address, sum(size for _, size in part["segments"]))]}
                copy = Copy(part | whole, part["device"])
                self._copies.append(copy)
                bytes_of, begin = [], 0
                for memory in copy.memories:
                    piece = memory.array("uint8", min(memory.mapped_size, source.nbytes - begin))
                    piece.copy_from(source[begin : begin + piece.nbytes])
                    begin += piece.nbytes
                    bytes_of.append(torch.from_dlpack(piece).untyped_storage())
                for entry in copy.entries:
                    self.tensors[entry[0]] = _tensor(torch, entry, bytes_of)

    def put(self, **options: Any) -> Any:
        """Puts the tensors' values as the next version, with the options of `Broker.put`, and closes. Waits for the device's work.

        Drop all other references to the tensors first: on host memory they keep the put from sealing it (`BufferError`). Raises
        `AlreadyExists` if another version was put since the copy was made, and as `Broker.put`.
        """
        if not self._copies:
            raise Invalid("the next version is put or closed: make another with next_version")
        self.tensors.clear()
        for copy in self._copies:
            copy.finish(self.name)
        metadata = {**self._metadata, "vllm": {**self._metadata["vllm"], "updated": True}}
        options.setdefault("replace_version", self._base)
        published = self._broker.put(self.name, Value(self._copies), metadata=metadata, **options)
        self.number = published.version
        self.close()
        return published

    @property
    def is_closed(self) -> bool:
        """Whether it was put or closed."""
        return not self._copies

    def close(self) -> None:
        """Frees the copy. Closing twice does nothing."""
        self.tensors.clear()
        for copy in self._copies:
            copy.memories.clear()
        self._copies.clear()


class NextVersions(Closing):
    """Copies of the objects of all ranks: see `vmmfd.engines.vllm.next_versions`."""

    def __init__(self, broker: Any, name: str) -> None:
        suffixes = {line.name: _SUFFIX.fullmatch(line.name, len(name) + 1) for line in broker.list(f"{name}/")}
        ranks = {each: [int(number) for number in re.findall(r"(\d+)of", found[1])] for each, found in suffixes.items() if found}
        if not ranks:
            raise NotFound(f"no engine has published objects under {name!r}: give the option \"name\" of its load format")
        self.objects: dict[str, NextVersion] = {}
        try:
            # An engine's first rank finds the newest version, so the first rank's object gets it last.
            for each in sorted(ranks, key=lambda each: (ranks[each], each), reverse=True):
                self.objects[each] = NextVersion(broker, each)
            _require_one_number({each: version._base for each, version in self.objects.items()})
        except BaseException:
            self.close()
            raise

    def put(self, **options: Any) -> int:
        """Puts the next version of each object as `NextVersion.put` does, and returns its number.

        If a put fails, engines continue to find the old version as the newest, and another call puts the remaining objects. Raises
        `MismatchError` if another program has put a version of some of the objects meanwhile."""
        for version in self.objects.values():
            if version.number is None:
                version.put(**options)
        return _require_one_number({name: version.number for name, version in self.objects.items()})

    @property
    def is_closed(self) -> bool:
        """Whether all were put or closed."""
        return all(version.is_closed for version in self.objects.values())

    def close(self) -> None:
        """Frees the copies. Closing twice does nothing."""
        for version in self.objects.values():
            version.close()


def _require_one_number(versions: dict[str, Any]) -> int:
    if len(set(versions.values())) > 1:
        newest = ", ".join(f"{name} version {version}" for name, version in versions.items())
        raise MismatchError(f"the ranks' newest versions differ ({newest}), and engines need one number: remove the objects and restart the engines")
    number: int = next(iter(versions.values()))
    return number


def _tensor(torch: Any, entry: _native._Entry, storages: list[Any]) -> Any:
    import json

    _, dtype, shape, strides, number, offset, attributes = entry
    of = getattr(torch, str(json.loads(attributes or "{}").get("torch_dtype") or dtype))
    tensor = torch.empty(0, dtype=of, device=storages[number].device)
    elements = [stride // of.itemsize for stride in strides] if strides is not None else None
    return tensor.set_(storages[number], offset // of.itemsize, tuple(shape), *([tuple(elements)] if elements is not None else []))
