"""Model weights: safetensors files, read once into memory that is shared."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping

from . import _native
from . import _types as t
from ._errors import Invalid
from ._native import Array, Device

# The name of the one part of what is put, as `vmmfd put` has it.
_PART = "all"


class Weights(Mapping[str, Array]):
    """Weights in memory that is shared: `Array`s by their names in the files, in the order of the files.

    Made by `load_safetensors`. It keeps the memory, and so does each array of it; `broker.put(name, weights)` hands that memory over
    without a copy. The arrays can be written until then: do not write to what was put.
    """

    __slots__ = ("__weakref__", "_metadata", "_weights")

    def __init__(self, weights: _native.Weights) -> None:
        import json

        self._weights = weights
        self._metadata: dict[str, t.Any] = json.loads(weights.metadata)

    @property
    def metadata(self) -> dict[str, t.Any]:
        """What the files' headers say of them (`__metadata__`): strings by key; where files differ, a dictionary of each file's name and
        its string. A put has it in the object's metadata, under `safetensors`."""
        return self._metadata

    @property
    def digest(self) -> str | None:
        """BLAKE3 of all of the memory, zeros between the tensors included: `blake3:` and 64 hexadecimal digits. None unless it was
        asked for."""
        return self._weights.digest

    @property
    def files(self) -> list[str]:
        """The paths of the files, in their order."""
        return self._weights.files

    @property
    def nbytes(self) -> int:
        """How many bytes of memory they take: those of the tensors, rounded up to whole pages of the device (2 MiB on a GPU)."""
        return self._weights.memory.size

    @property
    def device(self) -> Device:
        """The device that they are on."""
        return self._weights.memory.device

    def __getitem__(self, name: str, /) -> Array:
        return self._weights[name]

    def __contains__(self, name: object, /) -> bool:
        return name in self._weights

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights.names())

    def __len__(self) -> int:
        return len(self._weights)

    def __repr__(self) -> str:
        return f"<vmmfd.Weights: {len(self)} arrays, {self.nbytes} bytes on {self.device}>"

    def _plan(
        self, *, copy: bool | None, device: t.DeviceName | None
    ) -> tuple[list[_native._PartPlan], dict[str, t.Any], object]:
        """What a put of them is made of: its parts, what comes into the metadata, and what has to live until it is put. Raises `Invalid`
        if they are to be copied, or to be on another device."""
        if copy:
            raise Invalid("copy=True, and vmmfd.Weights are handed over as they are: put dict(weights) to copy the arrays")
        mine = self.device
        if device is not None and not (
            device == mine.ordinal
            if isinstance(device, int) and not isinstance(device, bool)
            else _native.same_device(device, mine)
        ):
            raise Invalid(f"device={device!r}, and the weights are on {mine}: give device to load_safetensors")
        part: _native._PartPlan = (_PART, [self._weights.memory], self._weights.entries(), self.digest)
        return [part], {"safetensors": self._metadata} if self._metadata else {}, self._weights


def load_safetensors(
    paths: t.Path | Iterable[t.Path],
    *,
    backend: str = "auto",
    device: t.DeviceName | None = None,
    digest: bool = False,
    progress: Callable[[int, int], object] | None = None,
    threads: int | None = None,
) -> Weights:
    """Reads safetensors files into memory of a device that other processes can share.

    `paths` is a file, a folder, an index (`*.safetensors.index.json`), or several of them. Of a folder the files that its index names
    are read, or all `*.safetensors` if it has none. All is checked before memory is taken. The memory is made of segments of at most
    1 GiB, side by side, and each tensor begins at a multiple of 256 bytes.

    `backend` is `"auto"` (CUDA; ordinary memory where there is no GPU), `"cuda"` or `"host"`; `device` its number, its UUID or a
    `Device`: the first one by default. With `digest` the memory's BLAKE3 is computed, for readers to verify. `progress(done, all)` is
    called in this thread about 25 times in a second, with bytes. `threads` is how many threads read: as many as there are processors
    by default, but at most 8; each takes 4 MiB of page-locked memory meanwhile.

    Blocks without the GIL. Ctrl-C ends it in the main thread, and so does what `progress` raises; then no memory is left. On a GPU no
    stream of this process may be captured meanwhile: a copy ends the capture.

    Raises `NotFound` for a path that does not exist, `Denied` where it may not be read, `Invalid` for what is no such file, lies
    about its tensors (they overlap, leave bytes over, lie outside, are there twice) or changes meanwhile, `OutOfMemory`, and
    `Unsupported` where the device can't share memory.
    """
    if isinstance(paths, (str, os.PathLike)):
        paths = [paths]
    files = [os.fspath(path) for path in paths]
    return Weights(
        _native.load_safetensors(
            files, backend=backend, device=device, digest=digest, progress=progress, threads=threads
        )
    )
